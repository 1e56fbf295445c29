"""``quire quantize``: a checkpoint whose matrices are the packed forms of ``quantization``.

It is one of compressed-tensors (``pack-quantized``). Its codes and scales are those that a model
loaded with that ``quantization`` multiplies, so it has the same tokens, and it loads without
packing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from quire.base.errors import AlreadyExists, FailedPrecondition, Unsupported, size_words
from quire.contracts.linear import PackedMatrix, Quantization
from quire.models.families import LoadedModel, family_of, is_foreign
from quire.models.quantized import SECTION, without_section
from quire.models.sources import open_weights, read_config
from quire.nn.experts import ExpertLinear
from quire.nn.linear import Linear
from quire.nn.packed import LAYERS, KernelLinear, parts_of
from quire.weights.checkpoint import Checkpoint
from quire.weights.gguf_paths import is_gguf
from quire.weights.panels import codes_of
from quire.weights.places import Place, expand
from quire.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 4 << 30
"""Most bytes of a file, but for one tensor."""
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "additional_chat_templates/*.jinja")
"""Files of a directory that are copied: tokenizer, templates, defaults of generation."""
BITS: Mapping[str, int] = {"int4": 4, "int8": 8}
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Stored:
    """Tensors of the new checkpoint that are made when they are written."""

    nbytes: int
    make: Callable[[], Mapping[str, Tensor]]


def check_source(path: Path) -> None:
    """Raise ``Unsupported`` with the reason if a checkpoint is not quantised by this verb."""
    if is_gguf(path):
        raise Unsupported(f"{path} is a GGUF file, whose formats stay as they are; expected a directory")
    values = read_config(path)
    if is_foreign(values):
        raise Unsupported(f"{path}: {values['architectures'][0]!r} is not native, so its weights are not packed")
    if SECTION in values or without_section(values) != values:
        raise Unsupported(f"{path} is quantised already; expected weights in a float type")


def check_target(out: Path) -> None:
    """Raise ``AlreadyExists`` for a file and for a directory that holds something, and
    ``FailedPrecondition`` if no directory can be made there."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AlreadyExists(f"{out} exists; expected a new directory")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = "lets nothing be made in it" if above.is_dir() else "is no directory"
        raise FailedPrecondition(f"{out} cannot be written: {above} {what}")


def write_quantized(path: Path, out: Path, model: LoadedModel, form: Quantization) -> int:
    """Write ``model``, which was loaded from ``path`` with ``quantization=form``, to the new
    directory ``out``; return its bytes.

    The directory appears when it is complete. ``AlreadyExists`` if there is something.
    ``Unsupported`` for stacked experts that no spelling of the family stores one by one.
    ``FailedPrecondition`` if it cannot be written, which leaves no directory.
    """
    check_target(out)
    packed = packed_matrices(model)
    if not packed:
        raise Unsupported(f"{model.architecture} has no matrix that {form} packs")
    values = read_config(path)
    with Checkpoint(open_weights(path)) as checkpoint:
        table, values = _names(checkpoint, values, model, packed)
        entries = [*_entries(checkpoint, table, model, packed)]
        values = {**values, SECTION: _section(table, packed)}
        needed = sum(entry.nbytes for entry in entries)
        temporary: Path | None = None
        missing = [folder for folder in out.absolute().parents if not folder.exists()]
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(out.parent).free) < needed:
                raise FailedPrecondition(
                    f"{out} cannot be written: it needs {size_words(needed)}, but {size_words(free)} are free there"
                )
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
            written = _write(temporary, entries)
            _copy_texts(path, temporary)
            (temporary / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            temporary.chmod(0o755)
            os.replace(temporary, out)
        except (OSError, SafetensorError) as error:
            raise FailedPrecondition(f"{out} cannot be written: {error}") from error
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            if not out.exists():
                with suppress(OSError):  # not there, or another process has put something in it
                    for folder in missing:
                        folder.rmdir()
    return written


def packed_matrices(model: LoadedModel) -> dict[str, list[PackedMatrix]]:
    """Return the packed maps of a model in "int4" and "int8" by their parameters without
    ``.weight``: one of a map, one for each of some experts."""
    found: dict[str, list[PackedMatrix]] = {}
    for part in (*model.blocks, getattr(model, "lm_head", None)):
        for name, maps in _maps(part):
            made = [one.map.weights for one in maps if isinstance(one, KernelLinear) and one.map.weights.form in BITS]
            if made and len(made) == len(maps):
                found[name] = made
    return found


def _maps(part: object) -> Iterator[tuple[str, Sequence[Linear]]]:
    if isinstance(part, Linear):
        yield part.name, [part]
    elif isinstance(part, ExpertLinear):
        yield part.name, part.maps
    elif isinstance(part, list | tuple):
        for one in part:
            yield from _maps(one)
    elif type(part).__module__.startswith(LAYERS):
        for _, one in parts_of(part):
            yield from _maps(one)


def _names(
    checkpoint: Checkpoint, values: dict[str, Any], model: LoadedModel, packed: Mapping[str, list[PackedMatrix]]
) -> tuple[dict[str, Place], dict[str, Any]]:
    """Return the name table of the new checkpoint, and its config.json. A tied head that was packed
    becomes one of its own."""
    family = family_of(values)
    config = family.read_config(values, None)
    trunk = getattr(config, "trunk", config)
    if trunk.tie_embeddings and HEAD in packed:
        untied = replace(trunk, tie_embeddings=False)
        config = untied if trunk is config else replace(config, trunk=untied)
        values = {**values, "tie_word_embeddings": False}
        if isinstance(text := values.get("text_config"), dict):
            values["text_config"] = {**text, "tie_word_embeddings": False}
    tables = [expand(table, config.num_layers) for table in family.name_tables(config)]
    single = [
        table
        for table in tables
        if all(len(place.shape) == 2 for place in table.values() if _parameter(place) in packed)
    ]
    if not single:
        raise Unsupported(
            f"{checkpoint.path}: {model.architecture} stores its experts in one tensor, which this format cannot have"
        )
    return min(single, key=lambda table: sum(name not in checkpoint.tensors for name in table)), values


def _parameter(place: Place) -> str:
    return place.parameter.removesuffix(".weight")


def _entries(
    checkpoint: Checkpoint, table: Mapping[str, Place], model: LoadedModel, packed: Mapping[str, list[PackedMatrix]]
) -> Iterator[Stored]:
    """Yield the tensors of the new checkpoint: packed ones, and all others as they are."""
    replaced = {name for name, place in model.places.items() if _parameter(place) in packed}
    replaced |= {name for name, place in table.items() if _parameter(place) in packed}
    for name in checkpoint.tensors:
        if name not in replaced:
            yield Stored(checkpoint.nbytes([name]), lambda name=name: {name: checkpoint.source.read(name).contiguous()})  # type: ignore[misc]
    for name, place in table.items():
        if (matrices := packed.get(_parameter(place))) is not None:
            yield Stored(
                _rows_bytes(place, matrices[0]),
                lambda name=name, place=place, matrices=matrices: _coded(name, place, matrices),  # type: ignore[misc]
            )


def _rows_bytes(place: Place, matrix: PackedMatrix) -> int:
    rows, columns = place.shape
    return rows * (columns * BITS[matrix.form] // 8 + 2 * (columns // matrix.group))


def _coded(name: str, place: Place, matrices: Sequence[PackedMatrix]) -> dict[str, Tensor]:
    """Return the tensors of rows of some matrices that stand one below the other."""
    height = matrices[0].outputs
    first, last = place.row // height, (place.row + place.shape[0] - 1) // height
    both = [codes_of(matrix) for matrix in matrices[first : last + 1]]
    start = place.row - first * height
    codes, scales = (torch.cat(parts)[start : start + place.shape[0]] for parts in zip(*both, strict=True))
    bits = BITS[matrices[0].form]
    if bits == 4:
        nibbles = (codes + 8).view(torch.uint8).reshape(len(codes), -1, 2)
        words = nibbles[..., 0] | nibbles[..., 1] << 4
    else:
        words = codes.reshape(len(codes), -1).view(torch.uint8) ^ 128
    # Inputs are a multiple of 8: whole words.
    return {
        f"{name}_packed": words.contiguous().view(torch.int32),
        f"{name}_scale": scales.contiguous(),
        f"{name}_shape": torch.tensor(place.shape),
    }


def _section(table: Mapping[str, Place], packed: Mapping[str, list[PackedMatrix]]) -> dict[str, Any]:
    """Return ``quantization_config``: the commonest form for all maps, others by name."""
    forms: dict[tuple[int, int], list[str]] = {}
    plain = []
    for name, place in table.items():
        module = name.removesuffix(".weight")
        if (matrices := packed.get(_parameter(place))) is not None:
            forms.setdefault((BITS[matrices[0].form], matrices[0].group), []).append(module)
        elif len(place.shape) == 2 and _parameter(place) != "embed":
            plain.append(module)
    groups = {}
    for number, ((bits, group), modules) in enumerate(sorted(forms.items(), key=lambda item: -len(item[1]))):
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": group,
            "dynamic": False,
        }
        groups[f"group_{number}"] = {
            "targets": modules if number else ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _write(folder: Path, entries: Sequence[Stored]) -> int:
    """Write the tensors to one file, or to several and their index; return their bytes."""
    shards: list[list[Stored]] = [[]]
    for entry in entries:
        if shards[-1] and sum(one.nbytes for one in shards[-1]) + entry.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(entry)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    places: dict[str, str] = {}
    written = 0
    for file, shard in zip([SINGLE_FILE] if len(shards) == 1 else names, shards, strict=True):
        tensors = {name: tensor for entry in shard for name, tensor in entry.make().items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        written += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _copy_texts(path: Path, folder: Path) -> None:
    for pattern in COPIED:
        for file in path.glob(pattern):
            if file.is_file() and file.name != INDEX_FILE:
                target = folder / file.relative_to(path)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
