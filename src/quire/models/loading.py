"""Building a model from a checkpoint: a directory or a GGUF file.

Configuration, headers and memory are checked first. A checkpoint that cannot be loaded thus costs
milliseconds and no memory, independent of its size.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from quire.base.errors import CheckpointError, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.base.process_limits import free_memory, size_words
from quire.base.progress import Bar, on_terminal
from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import LayerSpec
from quire.contracts.linear import BlockKernel, Quantization
from quire.contracts.ranks import Grid, Group, Share, Stages
from quire.contracts.weights import CodedFormat
from quire.models.decoder import Trunk
from quire.models.division import divide_head, join_ranks
from quire.models.families import Family, LoadedModel, family_of, is_foreign
from quire.models.processor import Processor
from quire.models.quantized import Quantized, read_quantized, without_section
from quire.models.sources import open_weights, read_config
from quire.models.stages import check_stages, names_of, owners_of, ranges_of, row_of, stage_config
from quire.nn.packed import place_late
from quire.weights.block_panels import KINDS
from quire.weights.checkpoint import Checkpoint
from quire.weights.floats import Floats
from quire.weights.gguf_blocks import SIZES
from quire.weights.gguf_paths import is_gguf
from quire.weights.lazy_parameters import LazyParameters
from quire.weights.packed import FORMS
from quire.weights.places import Place, divided, expand, parameter_dtypes, parameter_shapes

logger = logging.getLogger(__name__)

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
"""Accepted values of ``dtype`` besides "auto"."""

PLAIN = LayerKernels()
WHOLE = Grid()
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")
"""Forms of weights that are proposed where memory does not suffice."""
WIDER, MUCH = 1.2, 1 << 28
"""The share and the bytes by which float32 takes more memory, from which on that is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Facts about a model before its weights are read."""

    max_position: int
    layer_specs: Sequence[LayerSpec]
    dtype: torch.dtype
    weight_bytes: int
    """Lower bound of the bytes of the weights on the device."""
    num_parameters: int
    num_read: float
    """Parameters that a token's forward reads: of a table that is no head one row, and of experts
    the chosen ones."""
    formats: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the weights in their files, by format, as in ``LoadedModel``."""
    expanded: Mapping[str, int] = field(default_factory=dict)
    """The part of ``formats`` that no kernel multiplies, and whose weights are expanded at load.
    Codes of integers may be expanded, too, which their scales decide when they are read."""


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str = "auto",
    progress: bool = False,
    max_model_len: int | None = None,
    kernels: LayerKernels = PLAIN,
    before_weights: Callable[[Outline], object] | None = None,
    group: Group | None = None,
    grid: Grid = WHOLE,
    stage: int = 0,
) -> LoadedModel:
    """Load the model in ``path``, the directory of a checkpoint or a GGUF file, with its weights on
    ``device``.

    ``dtype``: see ``resolve_dtype``. ``progress`` shows a bar over bytes if stderr is a terminal.
    ``max_model_len`` is the longest sequence that will run (None: the context length). It sets the
    frequencies of a RoPE that depends on length, and changes nothing in other models. ``kernels``
    are given to the layers that support them. ``before_weights`` is called before the weights are
    read, and may raise to refuse the model; the ``Outline`` of a fallback model has no layers,
    because they are unknown until they run. ``group``: the ranks that divide each layer; this
    process loads its rank's part (``models.division``), of the blocks of ``stage`` among the stages
    of ``grid`` (``models.stages``). ``transformers``, if installed, runs architectures that are not
    native (``models.fallback``).

    Raise ``CheckpointError`` if the directory or a file is missing, damaged or contradicts
    ``config.json``, ``Unsupported`` for an architecture or option that is not computed, and
    ``ResourceExhausted`` if the weights do not fit. These name the file, the found and the
    expected. Raise ``InvalidArgument`` for an unknown dtype or device.
    """
    path = Path(path)
    values = _read_values(path)
    device = _device(device)
    _check_dtype_name(dtype)
    share = None if group is None else Share(group.rank, group.size)
    if grid.size == 1 and is_foreign(values):
        return _load_foreign(path, values, max_model_len, device, dtype, before_weights)
    family, quantized, whole, config = _read_configs(path, values, max_model_len, grid, share)
    with Checkpoint(open_weights(path, quantized)) as checkpoint:
        num_layers = config.num_layers
        if num_layers > len(checkpoint.tensors):  # Also bounds the table that a damaged config.json could ask for.
            raise CheckpointError(
                f"{path}: {checkpoint.source.configuration} says {num_layers} layers, but there are {len(checkpoint.tensors)} tensors"
            )
        places = checkpoint.choose([expand(table, num_layers) for table in family.name_tables(whole)])
        checkpoint.check(places, family.ignorable_names(whole))
        ranges = None if grid.stages == 1 else ranges_of(whole, grid.stages, places)
        if share is not None:
            tables = (expand(table, num_layers) for table in family.name_tables(config))
            every, places = places, divided(places, next(one for one in tables if one.keys() <= places.keys()), share)
        stored = checkpoint.dtype(places)
        resolved = resolve_dtype(dtype, stored, device, in_blocks=_prefers_bfloat16(checkpoint, places, kernels))
        own, stages = None, None
        if ranges is not None:
            empty = cast(Trunk, family.build(config, _Placeholders(places, resolved, "cpu"), values))
            stages = Stages(stage, ranges, owners_of(whole, ranges), *row_of(empty))
            own = names_of(stages, places, tied=empty.tied)

        def weight_bytes(dtype: torch.dtype, form: Quantization | None) -> int:
            return _weight_bytes(places, dtype, device, replace(kernels, quantization=form), own)

        needed = weight_bytes(resolved, kernels.quantization)
        _check_memory(path, resolved, device, kernels, weight_bytes)
        if dtype == "auto":
            _note_widened(stored, resolved, weight_bytes(stored, kernels.quantization), needed)
        if before_weights is not None:
            outline = family.build(config, _Placeholders(places, resolved), values)
            before_weights(
                Outline(
                    max_position=outline.max_position,
                    layer_specs=outline.layer_specs,
                    dtype=resolved,
                    weight_bytes=needed,
                    **count_parameters(places, values),
                    formats=checkpoint.formats(places),
                    expanded=_expanded(checkpoint, places, resolved, kernels),
                )
            )
        _check_tied(checkpoint, family, whole)
        here = {name: place for name, place in places.items() if own is None or place.parameter in own}
        total = checkpoint.nbytes(one for name, place in here.items() for one in place.stored(name))
        hidden = not (progress and on_terminal())
        with Bar(total=total, unit="B", unit_scale=True, desc="Loading", disable=hidden) as bar:
            weights = LazyParameters(checkpoint, places, resolved, device, bar, own)
            model = family.build(config, weights, values)
            if stages is not None and own is not None:
                cast(Trunk, model).keep(stages)
                model.parameter_bytes = sum(weights.late(name).nbytes for name in own)
            model.places = places
            model.formats = checkpoint.formats(places)
            weights.release()
            if share is not None:
                model.canonical_config = whole.canonical()
                model.whole_specs = family.build(whole, _Placeholders(every, resolved), values).layer_specs
                model.num_parameters = sum(math.prod(one.shape) for one in every.values())
                if stages is None or stages.is_last:
                    divide_head(cast(Trunk, model), share)
            if model.pack(replace(kernels, read=weights.read, stored=weights.stored)):
                logger.info("%s: weights are laid out for this machine's products", path)
            place_late(model, weights.place)
            weights.materialize()
            model.expanded = weights.expanded()
    if group is not None:
        join_ranks(cast(Trunk, model), whole, group)
    return model


def check_division(path: Path, grid: Grid, max_model_len: int | None) -> None:
    """Raise ``Unsupported`` for a model that these ranks do not divide, as its configuration says;
    and the errors of ``load_model`` for a configuration that is not read."""
    share = Share(0, grid.slices) if grid.slices > 1 else None
    _read_configs(path, _read_values(path), max_model_len, grid, share)


def _read_values(path: Path) -> dict[str, Any]:
    """Return the values of ``config.json``, or of a GGUF file's metadata."""
    if not os.path.isdir(path) and not (is_gguf(path) and os.path.isfile(path)):
        found = "a file" if os.path.exists(path) else "missing"
        raise CheckpointError(f"{path} is {found}; expected the directory of a Hugging Face checkpoint, or a GGUF file")
    return read_config(path)


def _read_configs(
    path: Path, values: dict[str, Any], max_model_len: int | None, grid: Grid, share: Share | None
) -> tuple[Family, Quantized | None, Any, Any]:
    """Return the family, the form of quantised weights, and the configurations of the whole model
    and of a rank's share."""
    if grid.size > 1 and is_foreign(values):
        raise Unsupported(f"{grid}: transformers runs this model, and does not divide it")
    try:
        family, quantized = family_of(values), read_quantized(values)
        whole = family.read_config(without_section(values), max_model_len)
        if grid.stages > 1:
            check_stages(stage_config(whole), grid.stages)
        return family, quantized, whole, whole if share is None else whole.divided(share)
    except QuireError as error:
        error.about(f"{path}, whose metadata make the config.json" if is_gguf(path) else str(path))
        raise


def _load_foreign(
    path: Path,
    values: Mapping[str, Any],
    max_model_len: int | None,
    device: torch.device,
    dtype: str,
    before_weights: Callable[[Outline], object] | None,
) -> LoadedModel:
    """Load an architecture that is not native through ``transformers``."""
    from quire.models.fallback import read_foreign

    foreign = read_foreign(path, values, max_model_len)
    with Checkpoint(open_weights(path)) as checkpoint:
        stored = checkpoint.dtype(checkpoint.tensors)
        resolved = resolve_dtype(dtype, stored, device)
        outline = foreign.outline(checkpoint, resolved)
        needed = sum(tensor.nbytes for tensor in (*outline.parameters(), *outline.buffers()))
        _check_memory(path, resolved, device, PLAIN, lambda other, _: needed * other.itemsize // resolved.itemsize)
        if dtype == "auto":
            _note_widened(stored, resolved, needed * stored.itemsize // resolved.itemsize, needed)
        if before_weights is not None:
            count = sum(one.numel() for one in outline.parameters())
            before_weights(
                Outline(
                    max_position=foreign.length,
                    layer_specs=(),
                    dtype=resolved,
                    weight_bytes=needed,
                    num_parameters=count,
                    num_read=count,
                )
            )
        return foreign.load(checkpoint, outline, resolved, device)


class _Placeholders(dict[str, torch.Tensor]):
    """Parameters without values: vectors of zeros, and matrices without memory."""

    def __init__(self, places: Mapping[str, Place], dtype: torch.dtype, device: str = "meta") -> None:
        """``device``: of the matrices; on a CPU these can be read."""
        kept = parameter_dtypes(places)
        super().__init__(
            (
                name,
                torch.zeros((), dtype=kept.get(name, dtype), device="cpu" if len(shape) == 1 else device).expand(shape),
            )
            for name, shape in parameter_shapes(places).items()
        )


def count_parameters(places: Mapping[str, Place], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the two counts of an ``Outline``."""
    text = values.get("text_config") or values
    chosen, experts = (
        next((text[name] for name in names if text.get(name)), 1)
        for names in (
            ("num_experts_per_tok", "top_k_experts"),
            ("num_experts", "num_local_experts", "n_routed_experts"),
        )
    )
    sizes = {name: math.prod(shape) for name, shape in parameter_shapes(places).items()}
    read = sum(size * (chosen / experts if ".experts." in name else 1) for name, size in sizes.items())
    if "head.weight" in sizes:
        read -= sizes["embed.weight"]
    return {"num_parameters": sum(sizes.values()), "num_read": read}


def _check_tied(checkpoint: Checkpoint, family: Family, config: Any) -> None:
    """Raise ``CheckpointError`` if a tied head is stored with other values than the embedding."""
    trunk = getattr(config, "trunk", config)
    if not trunk.tie_embeddings:
        return
    untied = replace(trunk, tie_embeddings=False)
    for table in family.name_tables(untied if trunk is config else replace(config, trunk=untied)):
        names = {place.parameter: name for name, place in table.items()}
        checkpoint.check_tied(names["head.weight"], names["embed.weight"])


def resolve_dtype(
    requested: str,
    checkpoint_dtype: torch.dtype,
    device: torch.device,
    processor: Processor | None = None,
    *,
    in_blocks: bool = False,
) -> torch.dtype:
    """Return the dtype to run in; raise ``InvalidArgument`` for an unknown name.

    A name is used as it is. "auto" means the checkpoint's dtype, but float32 on a CPU that would
    emulate it by conversions. bfloat16 is fast with AVX512-BF16 or AMX (on Arm: as oneDNN reports),
    float16 with AVX512-FP16. ``processor`` None is this machine's CPU. ``in_blocks``: most weights
    are in blocks that the CPU multiplies faster in bfloat16 than in float32.
    """
    _check_dtype_name(requested)
    if requested != "auto":
        return DTYPES[requested]
    if device.type == "cpu" and not (processor or Processor.here()).multiplies(checkpoint_dtype):
        return torch.bfloat16 if in_blocks else torch.float32
    return checkpoint_dtype


def _prefers_bfloat16(checkpoint: Checkpoint, places: Mapping[str, Place], kernels: LayerKernels) -> bool:
    """Return True if blocks that the kernel multiplies faster in bfloat16 are most of the bytes."""
    if kernels.quantization is not None or not isinstance(kernels.linear, BlockKernel):
        return False
    formats = checkpoint.formats(places)
    faster = sum(size for kind, size in formats.items() if kind in kernels.linear.bfloat16_kinds)
    return 2 * faster > sum(formats.values())


def _note_widened(stored: torch.dtype, dtype: torch.dtype, before: int, taken: int) -> None:
    """Log what the choice of "auto" costs, if that is much: weights that stay in the blocks of a
    GGUF file cost nothing."""
    if stored != dtype and taken > WIDER * before and taken - before >= MUCH:
        logger.warning(
            "dtype auto: this CPU has no fast %s, so the weights take %.0f MiB in %s, not %.0f MiB",
            str(stored).removeprefix("torch."),
            taken / 2**20,
            str(dtype).removeprefix("torch."),
            before / 2**20,
        )


def _check_dtype_name(name: str) -> None:
    if name != "auto" and name not in DTYPES:
        raise InvalidArgument(f"dtype is {name!r}; expected one of {['auto', *DTYPES]}")


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"device is {str(device)!r}, which this machine does not have ({reason})") from error
    return found


def _weight_bytes(
    places: Mapping[str, Place],
    dtype: torch.dtype,
    device: torch.device,
    kernels: LayerKernels,
    own: Collection[str] | None,
) -> int:
    """Return a lower bound of the bytes of the parameters that are here while they are loaded. A
    CPU quantises matrices one by one and keeps the embedding; a GPU loads all of them first. Blocks
    that a kernel may multiply take what they take in the file."""
    form, in_blocks = kernels.quantization, dict[str, float]()
    if form is None and isinstance(kernels.linear, BlockKernel):
        for place in places.values():
            if isinstance(place.format, CodedFormat):
                in_blocks[place.parameter] = float(place.format.bits)
            elif place.format.name in KINDS:
                numbers, size = SIZES[place.format.name]
                in_blocks[place.parameter] = min(in_blocks.get(place.parameter, 64.0), 8 * size / numbers)
    kept = parameter_dtypes(places)
    total = 0.0
    for name, shape in parameter_shapes(places).items():
        if own is not None and name not in own:
            continue
        bits = 8.0 * kept.get(name, dtype).itemsize
        if form is not None and device.type == "cpu" and len(shape) > 1 and name != "embed.weight":
            bits = min(bits, FORMS[form].bits)
        elif name in in_blocks:
            bits = min(bits, in_blocks[name])
        total += math.prod(shape) * bits / 8
    return int(total)


def _expanded(
    checkpoint: Checkpoint, places: Mapping[str, Place], dtype: torch.dtype, kernels: LayerKernels
) -> dict[str, int]:
    """Return the bytes of tensors in formats that no kernel multiplies."""
    multiplies = kernels.quantization is None and isinstance(kernels.linear, BlockKernel) and dtype != torch.float16
    found = {
        name: place
        for name, place in places.items()
        if not isinstance(place.format, Floats)
        and not (multiplies and (isinstance(place.format, CodedFormat) or place.format.name in KINDS))
    }
    return checkpoint.formats(found)


def _check_memory(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    kernels: LayerKernels,
    weight_bytes: Callable[[torch.dtype, Quantization | None], int],
) -> None:
    """Raise ``ResourceExhausted`` if the weights exceed free memory; a CPU would overcommit.
    ``weight_bytes``: what they take in a dtype and a form of ``quantization``."""
    free, form = free_memory(device), kernels.quantization
    needed, half = weight_bytes(dtype, form), weight_bytes(torch.bfloat16, form)
    if free is None or needed <= free:
        return
    helps = ["free some memory", "take a smaller model"]
    is_wide = dtype == torch.float32 and needed > WIDER * half
    if is_wide:
        helps.insert(0, "give dtype bfloat16, which takes half")
    if form is None and kernels.linear is not None and device.type == "cpu":
        fits = [one for one in QUANTIZATIONS if weight_bytes(dtype, one) <= free]
        helps[:0] = [f"give quantization {' or '.join(fits)}"] * bool(fits)
    # If most weights stay in the blocks of a GGUF file, the dtype is not theirs.
    kinds = [str(dtype)] * (is_wide or dtype != torch.float32)
    if form is not None:
        kinds.append(form)
    held = f" in {' with '.join(kinds)}" if kinds else ""
    raise ResourceExhausted(
        f"{path} needs {size_words(needed)} for its weights{held}, but {size_words(free)} are free on {device}; "
        f"{', '.join(helps[:-1])}, or {helps[-1]}"
    )
