"""Adapters saved by PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``.

They are in a directory or packed (``peft_files``). Configuration, names and shapes are checked
before weights are read, so a wrong directory costs milliseconds. Options are computed or refused.

Letters: R rank; I input, O output features of a module; V vocabulary; E model width.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from quire.adapters.peft_config import CONFIG_FILE, LoraConfig, lora_config_of, read_lora_config, shown
from quire.adapters.peft_files import WEIGHTS_FILE, FileWeights, PackedAdapter, PackedWeights, Weights
from quire.adapters.targets import (
    EMBED,
    HEAD,
    AdapterTarget,
    AdapterTargets,
    encoder_in,
    linears_of,
    low_rank_refusal,
    spelled,
    table_of,
    targets_of,
)
from quire.base.errors import CheckpointError, NotFound, Unsupported, some
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.models.families import LoadedModel
from quire.weights.floats import DTYPES

PICKLED_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
KINDS: Mapping[str, str] = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    ".lora_embedding_A": "lora_embedding_A",
    ".lora_embedding_B": "lora_embedding_B",
    ".base_layer.weight": "copy",
    ".base_layer.bias": "bias",
    ".weight": "whole",
}
"""Kinds of tensors by the suffixes of their names after the module; the first match counts. A
"copy" is a base model's table, which PEFT saves beside its update, with the "bias" of a head that
has one; "whole" may be a copy, too."""
OTHERS: Mapping[str, str] = {
    ".lora_magnitude_vector": "DoRA",
    ".lora_diag": "KaSA",
    ".lora_B.bias": "biases of low-rank products",
    ".bias": "trained biases",
    ".token_adapter.": "single trained tokens",
    ".trainable_tokens_": "single trained tokens",
}
"""Name parts of tensors of unsupported methods, with the names of the methods."""
NAMED_UPDATE = re.compile(r"\.lora_(?:embedding_)?[AB]\.(?!(?:weight|bias)\Z)([^.]+)(?:\.weight)?\Z")
"""The end of a tensor's name that contains an adapter's name; PEFT leaves it out of files."""
ROWS = 512
"""Rows of a table compared at a time."""
FINGERPRINT_HEAD = "quire-adapter 1\n"
"""The first line of the fingerprinted text; another rule needs another number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Update:
    """A module's update in the file: names of its tensors and configured values."""

    name: str
    """The module's name in the spelling of the model's checkpoint."""
    target: AdapterTarget
    a_key: str
    b_key: str
    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """The parts of the file to read."""

    updates: Sequence[_Update]
    """Updates sorted by linear map and row."""
    tables: Mapping[str, tuple[str, str]]
    """For "embed" and "head" the module's name and the tensor that replaces the table."""
    copies: Mapping[str, str]
    """Tensors that must equal the base model's tables, mapped to "embed" or "head"."""

    @property
    def rank(self) -> int:
        """Return the largest rank of a linear map's update; 0 if there is none."""
        return max((update.rank for update in self.updates if update.target.linear != EMBED), default=0)

    def numel(self, file: Weights) -> int:
        """Return the number of elements of the adapter."""
        keys = [key for update in self.updates for key in (update.a_key, update.b_key)]
        keys += [key for _, key in self.tables.values()]
        return sum(math.prod(file.shapes[key]) for key in keys)


def read_adapter(
    path: str | os.PathLike[str], model: LoadedModel, *, admit: Callable[[int, int], None] | None = None
) -> Adapter:
    """Read the adapter in the directory ``path``, checked against ``model``, onto the CPU.

    It has the model's dtype. Names, shapes and copies of tables must match; the base model's name
    is not compared. ``admit`` is called before weights are read, with the largest rank of the
    linear maps and the adapter's bytes on the host; its exceptions are passed on.

    Raise ``NotFound`` without such a directory or an adapter in it, and ``Unsupported`` if the
    model can have no adapter or an option is not computed. Raise ``CheckpointError`` with the found
    and the expected for a damaged adapter or one of another model.
    """
    _require_sites(model)
    path = Path(path)
    if not os.path.isdir(path):
        found = "a file" if os.path.exists(path) else "missing"
        raise NotFound(f"adapter {path} is {found}; expected a directory that PEFT saved")
    config = read_lora_config(path)
    if not (path / WEIGHTS_FILE).is_file():
        there = f", only {PICKLED_FILE}: save it as safetensors" if (path / PICKLED_FILE).is_file() else ""
        raise CheckpointError(f"{path} has no {WEIGHTS_FILE}{there}")
    with FileWeights(path / WEIGHTS_FILE) as file:
        return _adapter(file, config, model, str(path), admit)


def read_packed_adapter(
    packed: PackedAdapter, model: LoadedModel, source: str, *, admit: Callable[[int, int], None] | None = None
) -> Adapter:
    """Read the adapter in both files of ``packed`` from ``source``, as ``read_adapter`` does."""
    _require_sites(model)
    config = lora_config_of(packed.config, packed.config_name)
    with PackedWeights(packed.weights, packed.weights_name, packed.config_name) as file:
        return _adapter(file, config, model, source, admit)


def _require_sites(model: LoadedModel) -> None:
    """Raise ``Unsupported`` for a model that can have no adapters."""
    if reason := low_rank_refusal(model):
        raise Unsupported(reason)
    if not model.places:
        raise Unsupported("adapters: this model came from no checkpoint, so nothing says what its modules are called")


def _adapter(
    file: Weights, config: LoraConfig, model: LoadedModel, source: str, admit: Callable[[int, int], None] | None
) -> Adapter:
    plan = _plan(file, config, model)
    if admit is not None:
        admit(plan.rank, plan.numel(file) * model.dtype.itemsize)
    for key, linear in plan.copies.items():
        is_bias = key.endswith(".base_layer.bias")
        table = linears_of(model)[linear].bias if is_bias and linear == HEAD else table_of(model, linear)
        if table is None or (is_bias and table.ndim > 1):
            raise CheckpointError(f"{file.name}: {shown(key)} is a bias that this model does not have")
        if not table.is_meta:  # Another stage has it.
            _check_copy(file, key, table)
    return _read(file, plan, model.dtype, source)


def _plan(file: Weights, config: LoraConfig, model: LoadedModel) -> _Plan:
    """Check all names, types and shapes."""
    modules = _modules(file)
    names = {target: name for name, target in targets_of(model).targets.items()}
    targets = spelled(model, modules)
    for module, keys in modules.items():
        if module not in targets.targets:
            raise _no_target(file, module, keys, targets)
    _check_whole(file, config, targets)
    updates: list[_Update] = []
    tables: dict[str, tuple[str, str]] = {}
    copies: dict[str, str] = {}
    for module, keys in modules.items():
        target = targets.targets[module]
        a, b = ("lora_embedding_A", "lora_embedding_B") if target.linear == EMBED else ("lora_A", "lora_B")
        if a in keys or b in keys:
            updates.append(_update(file, module, names.get(target, module), target, keys, config))
        elif extra := sorted(keys.keys() - {"copy", "bias", "whole"}):
            raise CheckpointError(f"{file.name}: {shown(module)} has {extra[0]}; expected {a} and {b} of this module")
        for kind in keys.keys() - {a, b}:
            if kind == "bias" and target.linear != HEAD:
                raise Unsupported(
                    f"{file.name}: {shown(keys[kind])} belongs to trained biases, which adapters here cannot have"
                )
            if target.linear not in (EMBED, HEAD) or kind not in ("copy", "bias", "whole"):
                raise CheckpointError(f"{file.name}: {shown(keys[kind])} is nothing that PEFT saves for LoRA")
            shape = (target.ins, target.outs) if target.linear == EMBED else (target.outs, target.ins)
            _check_header(file, keys[kind], shape[:1] if kind == "bias" else shape)
            if kind == "whole" and config.saves(module):
                tables[target.linear] = (names[target], keys[kind])
            else:
                copies[keys[kind]] = target.linear
    _check_complete(file, config, targets, {update.target for update in updates}, tables)
    updates.sort(key=lambda update: (update.target.linear, update.target.row))
    return _Plan(updates=updates, tables=dict(sorted(tables.items())), copies=copies)


def _modules(file: Weights) -> dict[str, dict[str, str]]:
    """Return the tensors of each module by kind."""
    if not file.shapes:
        raise CheckpointError(f"{file.name} holds no tensors; expected those of an adapter")
    modules: dict[str, dict[str, str]] = {}
    for key in file.shapes:
        method = next((what for part, what in OTHERS.items() if part in key), "")
        if method and not key.endswith(tuple(KINDS)):
            raise Unsupported(f"{file.name}: {shown(key)} belongs to {method}, which adapters here cannot have")
        ending = next((one for one in KINDS if key.endswith(one)), "")
        if not key.startswith(PREFIX) or not ending or NAMED_UPDATE.search(key):
            raise CheckpointError(
                f"{file.name}: {shown(key)} is no tensor of a LoRA adapter{_why_foreign(key)}; expected names like "
                f"{PREFIX}MODULE.lora_A.weight"
            )
        module = key.removeprefix(PREFIX).removesuffix(ending)
        modules.setdefault(module, {})[KINDS[ending]] = key
    return modules


def _why_foreign(key: str) -> str:
    """Return the reason why the name is not in PEFT's form; empty if it is unknown."""
    if named := NAMED_UPDATE.search(key):
        return f": the name of the adapter, {shown(named[1])}, stands in it, which PEFT leaves out of files"
    return "" if key.startswith(PREFIX) or ".lora_" not in key else f": it does not begin with {PREFIX}"


def _no_target(file: Weights, module: str, keys: Mapping[str, str], targets: AdapterTargets) -> Exception:
    """Return the error for a module that is missing or cannot be adapted."""
    if encoder := encoder_in(module):
        return Unsupported(
            f"{file.name}: {shown(module)} belongs to {encoder}, an encoder or projector beside the language model, which is not "
            "run here; expected an adapter of the language model alone (exclude_modules of PEFT leaves modules out)"
        )
    reason = targets.refused.get(module, "")
    if not reason and re.search(r"\.experts(\.|$)", module):
        reason = "it belongs to a mixture's experts"
    if reason:
        saved = " (saved whole)" if "whole" in keys else ""
        return Unsupported(
            f"{file.name}: {shown(module)}{saved} cannot be adapted: {reason}; what can be: {targets.endings()}"
        )
    return CheckpointError(
        f"{file.name}: the model has no module {shown(module)}, so the adapter was made for another one; expected modules that "
        f"end in {targets.endings()}"
    )


def _check_whole(file: Weights, config: LoraConfig, targets: AdapterTargets) -> None:
    """Raise ``Unsupported`` if ``modules_to_save`` names anything but embedding and head."""
    for ending in config.whole:
        found = [name for name in (*targets.targets, *targets.refused) if name.endswith(ending)]
        if not found or any(name not in (targets.named(EMBED), targets.named(HEAD)) for name in found):
            raise Unsupported(
                f"{file.config_name}: modules_to_save names {shown(ending)}; what can be saved whole: "
                f"{targets.named(EMBED)}, {targets.named(HEAD)}"
            )


def _update(
    file: Weights, module: str, name: str, target: AdapterTarget, keys: Mapping[str, str], config: LoraConfig
) -> _Update:
    a, b = ("lora_embedding_A", "lora_embedding_B") if target.linear == EMBED else ("lora_A", "lora_B")
    for kind in (a, b):
        if kind not in keys:
            raise CheckpointError(f"{file.name}: {shown(module)} has no {kind}; expected {a} and {b}")
    if not _is_target(config, module, target):
        raise CheckpointError(
            f"{file.name}: {shown(module)} has an update, which {CONFIG_FILE} does not ask for (target_modules, exclude_modules, "
            "layers_to_transform, modules_to_save)"
        )
    rank = config.rank_of(module)
    _check_header(file, keys[a], (rank, target.ins))
    _check_header(file, keys[b], (target.outs, rank))
    scale = config.scale_of(module)
    return _Update(name=name, target=target, a_key=keys[a], b_key=keys[b], rank=rank, scale=scale)


def _is_target(config: LoraConfig, module: str, target: AdapterTarget) -> bool:
    return config.targets_module(module, inner=target.linear not in (EMBED, HEAD))


def _check_header(file: Weights, key: str, shape: tuple[int, ...]) -> None:
    if file.shapes[key] != shape:
        raise CheckpointError(
            f"{file.name}: {shown(key)} has shape {shown(list(file.shapes[key]))}; expected {shown(list(shape))}"
        )
    if file.dtypes[key] not in DTYPES:
        raise CheckpointError(f"{file.name}: {shown(key)} has dtype {file.dtypes[key]}; expected one of {list(DTYPES)}")


def _check_complete(
    file: Weights,
    config: LoraConfig,
    targets: AdapterTargets,
    updated: Iterable[AdapterTarget],
    tables: Mapping[str, object],
) -> None:
    """Raise ``CheckpointError`` for an empty file or if a configured tensor is missing."""
    there = frozenset(updated)
    missing = [
        name for name, target in targets.targets.items() if target not in there and _is_target(config, name, target)
    ]
    missing += [
        name
        for name, target in targets.targets.items()
        if target.linear in (EMBED, HEAD) and config.saves(name) and target.linear not in tables
    ]
    if missing:
        raise CheckpointError(f"{file.name} lacks {some(missing)}, which {CONFIG_FILE} asks for")
    if not there and not tables:
        raise CheckpointError(f"{file.name} changes nothing: it holds no update and no table")


def _check_copy(file: Weights, key: str, table_VE: Tensor) -> None:
    """Raise ``CheckpointError`` unless the tensor is the model's table, up to rounding. Of a
    divided head the rows that are here are compared, the first ones."""
    copy_VE = file.read(key)[: len(table_VE)]
    parts = (slice(begin, begin + ROWS) for begin in range(0, len(copy_VE), ROWS))
    if not all(_is_same_table(copy_VE[part], table_VE[part].cpu()) for part in parts):
        raise CheckpointError(
            f"{file.name}: {shown(key)} is the base model's own table, but not this model's; expected an adapter of this base model"
        )


def _is_same_table(one: Tensor, other: Tensor) -> bool:
    """Return True if both may be the same numbers, each rounded to its own type."""
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    infos = [torch.finfo(tensor.dtype) for tensor in (one, other)]
    largest = min(info.max for info in infos)  # a larger number is infinite in one of the types
    first, second = (tensor.double().clamp(-largest, largest) for tensor in (one, other))
    # The rounding error is at most eps / 2 of the number's power of two, which the rounded number
    # reaches, or half of the smallest subnormal.
    size = torch.maximum(first.abs(), second.abs())
    steps = sum(info.eps for info in infos) / 2 * size + sum(info.tiny * info.eps for info in infos) / 2
    return bool(((first - second).abs() <= steps).all())


def _read(file: Weights, plan: _Plan, dtype: torch.dtype, source: str) -> Adapter:
    """Read the weights into one block of memory; raise ``CheckpointError`` if any is not finite."""
    sizes = [update.rank * size for update in plan.updates for size in (update.target.ins, update.target.outs)]
    memory = torch.empty(sum(sizes), dtype=dtype)
    parts = iter(torch.split(memory, sizes))
    updates, lines = [], []
    for update in plan.updates:
        target = update.target
        a_RI, b_OR = file.read(update.a_key), file.read(update.b_key)
        kept_RI = next(parts).view(update.rank, target.ins).copy_(a_RI)
        kept_RO = next(parts).view(update.rank, target.outs).copy_((b_OR.float() * update.scale).T)
        lines.append(
            f"{update.name} update {struct.pack('>d', update.scale).hex()} {_described(a_RI)} {_described(b_OR)}\n"
        )
        updates.append(LowRankUpdate(linear=target.linear, row=target.row, a_RI=kept_RI, b_RO=kept_RO))
    if not _is_finite(memory):
        for one, update in zip(updates, plan.updates, strict=True):
            for key, tensor in ((update.a_key, one.a_RI), (update.b_key, one.b_RO)):
                if not _is_finite(tensor):
                    raise _not_finite(file, key, dtype)
    tables = {}
    for linear, (name, key) in plan.tables.items():
        table_VE = file.read(key)
        lines.append(f"{name} table {_described(table_VE)}\n")
        tables[linear] = table_VE.to(dtype, copy=True)
        if not _is_finite(tables[linear]):
            raise _not_finite(file, key, dtype)
    return Adapter(fingerprint=_fingerprint(lines), updates=tuple(updates), tables=tables, source=source)


def _fingerprint(lines: Iterable[str]) -> str:
    """Return the adapter's identity in the checkpoint's terms; ``docs/statefile.md`` defines it."""
    return xxhash.xxh3_128_hexdigest((FINGERPRINT_HEAD + "".join(sorted(lines, key=str.encode))).encode())


def _described(tensor: Tensor) -> str:
    """Return type, shape and XXH3-128 of the bytes of a tensor as it is stored."""
    raw: Any = tensor.contiguous().view(torch.uint8).numpy()
    dtype = next(name for name, one in DTYPES.items() if one == tensor.dtype)
    return f"{dtype} {'x'.join(map(str, tensor.shape))} {xxhash.xxh3_128_hexdigest(raw)}"


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.numel() or all(map(torch.isfinite, torch.aminmax(tensor)))  # aminmax passes NaN on


def _not_finite(file: Weights, key: str, dtype: torch.dtype) -> CheckpointError:
    why = f"values that are too large for {dtype}" if _is_finite(file.read(key)) else "values that are not finite"
    return CheckpointError(f"{file.name}: {shown(key)} has {why}; expected finite ones")
