"""``quantization_config`` of config.json: in which formats the tensors of a checkpoint lie.

``METHODS`` has a reader for each ``quant_method``. It gives a rule that names the format of a
tensor by its name and the tensors beside it. Values of activations are never rounded, so the
scales of activations are not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.weights import TensorHeader, WeightFormat
from quire.models.config_fields import ConfigFields
from quire.weights.awq import Awq
from quire.weights.gptq import Gptq
from quire.weights.integer_codes import IntegerCodes
from quire.weights.nf4 import FourBits
from quire.weights.nvfp4 import COMPRESSED_TENSORS, MODELOPT
from quire.weights.scaled_float8 import FLOAT8, ScaledFloat8

SECTION = "quantization_config"
OTHER_SECTIONS = ("compression_config",)
"""Former names of the section."""
Headers: TypeAlias = Mapping[str, TensorHeader]
Rule: TypeAlias = Callable[[str, Headers], WeightFormat | None]
"""Returns the format of a tensor by name; None: floats."""
ACTIVATIONS = re.compile(
    r".*\.((input|output|q|k|v|prob)_(scale|zero_point|global_scale)|activation_scale|input_scale_inv)"
)
"""Names of tensors for activations and KV states."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """How a checkpoint is quantised."""

    method: str
    rule: Rule

    def format(self, name: str, usual: WeightFormat, headers: Headers) -> WeightFormat:
        """Return the format of a tensor that checkpoints of its family usually store as
        ``usual``."""
        return (self.rule(name, headers) if usual.is_plain else None) or usual

    def reads(self, name: str) -> bool:
        """Return whether a tensor belongs to weights."""
        return ACTIVATIONS.fullmatch(name) is None


def section_of(values: Mapping[str, Any]) -> ConfigFields | None:
    """Return the section of config.json, or of its text_config; None without one.
    ``CheckpointError`` if it is no object."""
    for part, source in ((values, "config.json"), (values.get("text_config"), "config.json, text_config")):
        for name in (SECTION, *OTHER_SECTIONS):
            if isinstance(part, dict) and part.get(name) is not None:
                found = ConfigFields(part, source).mapping(name)
                return ConfigFields(found, f"{source}, {name}")
    return None


def read_quantized(values: Mapping[str, Any]) -> Quantized | None:
    """Return the quantisation of a checkpoint; None: it has none, or its family reads the section.

    ``Unsupported`` with the known methods for another ``quant_method``, and for an option that is
    not computed. ``CheckpointError`` for a damaged section.
    """
    section = section_of(values)
    if section is None:
        return None
    method = section.get("quant_method")
    if method is None and section.get("load_in_4bit"):
        method = "bitsandbytes"  # which older versions of transformers did not name
    if method in OWN:
        return None
    if not isinstance(method, str) or method not in METHODS:
        raise Unsupported(
            f"{section.source}: quant_method is {method!r}, which is not supported; expected one of {sorted(METHODS)}"
        )
    return Quantized(method, METHODS[method](section))


def without_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json without a section that ``read_quantized`` reads."""
    section = section_of(values)
    if section is None or section.get("quant_method") in OWN:
        return dict(values)
    found = {name: value for name, value in values.items() if name not in (SECTION, *OTHER_SECTIONS)}
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = {name: value for name, value in text.items() if name not in (SECTION, *OTHER_SECTIONS)}
    return found


# Names.


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _names(section: ConfigFields, *fields: str) -> Sequence[str]:
    """Read a list of names under the first of the fields that is there."""
    for field in fields:
        if (found := section.get(field)) is not None:
            if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
                raise section.error(field, "a list of names")
            return found
    return ()


def _matches(module: str, pattern: str) -> bool:
    """Return whether a name, or an expression after ``re:``, is that of a module."""
    if not pattern.startswith("re:"):
        return module == pattern
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise CheckpointError(f"config.json, {SECTION}: {pattern!r} is no regular expression: {error}") from error


def _pair(value: object) -> tuple[int, int] | None:
    """Return two numbers of 1 or more; None for another value."""
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return None


# Methods.


def _fp8(section: ConfigFields) -> Rule:
    """DeepSeek's and Qwen's: blocks, or one scale for all weights or each row."""
    section.expect("fmt", "e4m3", "float8_e4m3fn")
    section.expect("activation_scheme", "dynamic", "static")
    section.expect("expert_dtype", "fp8")
    block = section.get("weight_block_size")
    sizes = _pair(block)
    if block is not None and sizes is None:
        raise section.error("weight_block_size", "two numbers of 1 or more, or null")

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        if name not in headers or headers[name].dtype not in FLOAT8:
            return None
        inverse = f"{name}_scale" not in headers
        return ScaledFloat8("_scale_inv" if inverse else "_scale", sizes)

    return rule


def _fbgemm(section: ConfigFields) -> Rule:
    """Meta's: a scale for each row."""
    del section

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        found = name in headers and headers[name].dtype in FLOAT8
        return ScaledFloat8("_scale") if found else None

    return rule


PACKED, INTEGERS, FLOATS8, FLOATS4 = "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"
COMPRESSED = (PACKED, INTEGERS, FLOATS8, FLOATS4, "naive-quantized")


def _compressed(section: ConfigFields) -> Rule:
    """compressed-tensors: groups of modules, each with its own format."""
    sparsity = section.mapping("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise Unsupported(
            f'{section.source}: sparsity_config has the format {sparsity["format"]!r}; expected "dense" or none'
        )
    if section.mapping("transform_config").get("config_groups"):
        raise Unsupported(f"{section.source}: transform_config rotates activations, which is not supported")
    ignored = _names(section, "ignore")
    groups = section.mapping("config_groups")
    if not groups:
        raise section.error("config_groups", "an object of groups")
    usual = section.get("format")
    targets: list[tuple[str, Callable[[str, Headers], WeightFormat]]] = []
    for group, found in groups.items():
        fields = ConfigFields(found if isinstance(found, dict) else {}, f"{section.source}, {group}")
        made = _compressed_group(fields, fields.get("format") or usual)
        targets += [(target, made) for target in _names(fields, "targets")]
    # The most specific target counts: a name, then an expression, then a class.
    targets.sort(key=lambda one: one[0].startswith("re:"))

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        quantised = f"{name}_packed" in headers or f"{name}_scale" in headers
        module = _module(name)
        if not quantised or any(_matches(module, one) for one in ignored):
            return None
        made = next((made for target, made in targets if _matches(module, target)), None)
        made = made or next((made for target, made in targets if target == "Linear"), None)
        if made is None:
            raise CheckpointError(
                f"{section.source}: no group has {module} as a target, but the files have scales for it"
            )
        return made(name, headers)

    return rule


def _compressed_group(fields: ConfigFields, format: object) -> Callable[[str, Headers], WeightFormat]:
    weights = ConfigFields(fields.mapping("weights"), f"{fields.source}, weights")
    if format not in COMPRESSED:
        raise Unsupported(
            f"{fields.source}: format is {format!r}, which is not supported; expected one of {list(COMPRESSED)}"
        )
    kind, bits = weights.get("type") or "int", weights.count("num_bits", 8)
    if format == FLOATS4:
        weights.expect("type", "float")
        weights.expect("num_bits", 4)
        weights.expect("group_size", 16)
        weights.expect("strategy", "tensor_group")
        weights.expect("symmetric", True)
        return lambda name, headers: COMPRESSED_TENSORS
    strategy = weights.get("strategy")
    group = weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    block = weights.get("block_structure")
    if strategy not in ("tensor", "channel", "group", "block") or kind not in ("int", "float"):
        raise Unsupported(
            f"{weights.source}: type {kind!r} with strategy {strategy!r} is not supported; expected int or float by "
            "tensor, channel, group or block"
        )
    if strategy == "group" and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
        raise weights.error("group_size", "a number of 1 or more")
    size = group if strategy == "group" else 0
    if kind == "float":
        if bits != 8 or format == PACKED:
            raise Unsupported(
                f"{weights.source}: floats of {bits} bits as {format!r} are not supported; expected 8 bits"
            )
        sizes = {"block": _pair(block), "group": (1, size)}.get(strategy)
        if strategy == "block" and sizes is None:
            raise weights.error("block_structure", "two numbers of 1 or more")
        return lambda name, headers: ScaledFloat8("_scale", sizes, rounds=True)
    if strategy == "block" or bits > 8 or (format != PACKED and bits != 8):
        raise Unsupported(
            f"{weights.source}: integers of {bits} bits by {strategy} as {format!r} are not supported; expected 8 bits, or up "
            f"to 8 bits as {PACKED!r}, by tensor, channel or group"
        )
    asymmetric = not weights.flag("symmetric", True)

    def made(name: str, headers: Headers) -> WeightFormat:
        return IntegerCodes(
            bits,
            size,
            packed=format == PACKED,
            has_zeros=asymmetric or f"{name}_zero_point" in headers,
            has_order=f"{name}_g_idx" in headers,
        )

    return made


def _modelopt(section: ConfigFields) -> Rule:
    """NVIDIA's: floats of 4 bits, and of 8 with a scale for all weights or each row. A tensor's
    type says which."""
    section.expect("quant_algo", *MODELOPT_ALGORITHMS)

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        if name not in headers or f"{name}_scale" not in headers:
            return None
        kind = headers[name].dtype
        return ScaledFloat8("_scale") if kind in FLOAT8 else MODELOPT if kind == "U8" else None

    return rule


MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION")


def _group_size(section: ConfigFields, field: str, default: int | None = None) -> int:
    """Read a number of inputs; 0 for the -1 that stands for all."""
    found = section.get(field)
    found = default if found is None else found
    if isinstance(found, bool) or not isinstance(found, int) or (found < 1 and found != -1):
        raise section.error(field, "a number of 1 or more, or -1 for all inputs")
    return max(found, 0)


def _awq(section: ConfigFields) -> Rule:
    bits = "w_bit" if section.present("w_bit") else "bits"
    section.expect(bits, 4)
    version = "version" if section.present("version") else "format"
    section.expect(version, "gemm", "GEMM")
    size = _group_size(section, "q_group_size" if section.present("q_group_size") else "group_size", 128)

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        return Awq(size) if f"{_module(name)}.qweight" in headers and name not in headers else None

    return rule


def _gptq(section: ConfigFields) -> Rule:
    """GPTQ, of AutoGPTQ and GPTQModel: ``dynamic`` has options of some modules."""
    format = "checkpoint_format" if section.present("checkpoint_format") else "format"
    section.expect(format, "gptq", "gptq_v2")
    section.expect("pack_dtype", "int32")
    section.expect("quant_method", "gptq")
    options = _gptq_options(section, section)
    further = [
        (pattern.removeprefix("+:"), _gptq_options(ConfigFields(found, f"{section.source}, {pattern}"), section))
        for pattern, found in section.mapping("dynamic").items()
        if isinstance(found, dict) and not pattern.startswith("-:")
    ]

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        module = _module(name)
        if f"{module}.qweight" not in headers or name in headers:
            return None
        bits, size = next((one for pattern, one in further if _matches(module, f"re:{pattern}")), options)
        return Gptq(bits, size, section.get(format) != "gptq_v2", f"{module}.g_idx" in headers)

    return rule


def _gptq_options(fields: ConfigFields, usual: ConfigFields) -> tuple[int, int]:
    fields = ConfigFields({**usual.values, **fields.values}, fields.source)
    fields.expect("bits", 2, 4, 8)
    return fields.count("bits"), _group_size(fields, "group_size", 128)


def _bitsandbytes(section: ConfigFields) -> Rule:
    section.expect("load_in_8bit", False)

    def rule(name: str, headers: Headers) -> WeightFormat | None:
        if f"{name}.absmax" not in headers:
            return None
        for kind in ("nf4", "fp4"):
            nested = f"{name}.nested_absmax" in headers
            made = FourBits(kind, nested)
            if (state := headers.get(f"{name}{made.state}")) is not None:
                steps = headers.get(f"{name}.nested_absmax")
                sizes = (_length(headers[f"{name}.absmax"]), _length(steps), _length(state))
                return FourBits(kind, nested, sizes)
        raise CheckpointError(f"{headers[f'{name}.absmax'].file}: {name} has absmax, but no quant_state of nf4 or fp4")

    return rule


def _length(header: TensorHeader | None) -> int:
    return header.shape[0] if header is not None and len(header.shape) == 1 else 0


METHODS: Mapping[str, Callable[[ConfigFields], Rule]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "modelopt": _modelopt,
}
"""Readers of the section by ``quant_method``."""
OWN = ("mxfp4",)
"""Methods whose section the family reads."""
