"""``adapter_config.json`` as PEFT writes it: ranks, scales, and target modules.

Each field of PEFT's ``LoraConfig`` (0.21) is read, does not change a run (``HARMLESS``), or must be
empty: null, false, or an empty list, object or string. Other values and unknown fields are refused
by name. Module names match as in PEFT, by the package ``regex``, whose matcher has a limit of time,
unlike Python's.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import regex

from quire.base.errors import CheckpointError, NotFound, Unsupported, some
from quire.models.config_fields import ConfigFields

CONFIG_FILE = "adapter_config.json"
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8
"""PEFT's defaults."""
ALL_LINEAR = "all-linear"
HARMLESS: frozenset[str] = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "inference_mode",
        "lora_dropout",
        "lora_ga_config",
        "loftq_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    }
)
"""Fields of training, initialisation, versions and inactive options, and the base model's name. The
name is not checked, because the same weights have many names and paths; shapes are."""
REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow (routing between adapters)",
    "ensure_weight_tying": "one adapter for tied modules",
    "fan_in_fan_out": "weights that are stored transposed",
    "kasa_config": "KaSA",
    "layer_replication": "replicated layers",
    "lora_bias": "biases of low-rank products",
    "megatron_config": "Megatron's layers",
    "monteclora_config": "MonteCLoRA",
    "target_parameters": "low-rank updates of bare parameters (experts)",
    "trainable_token_indices": "single trained tokens",
    "use_bdlora": "BD-LoRA",
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "velora_config": "VeLoRA",
}
"""Options that change or may change the computation, with their names."""
KEPT_BASE = ("gaussian", "eva", "orthogonal", "mica")
"""Initialisations, besides PEFT's own two, that leave the base weights unchanged."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base weights: the saved update applies to the changed weights
only."""

MAX_CONFIG_BYTES = 4 << 20
"""Limit of the file's bytes: the accepted number of names, of 1,000 characters each."""
MAX_PATTERN = 2000
"""Most characters of a regular expression."""
MATCH_SECONDS = 2.0
"""Limit for matching the expressions of a file, some of which would need years."""
MAX_NAMES = 4096
"""Most names or expressions in one list or object."""
SHOWN = 120
"""Most characters of a file's names and values in messages."""

Held = TypeVar("Held", bound=Sized)
N = TypeVar("N", int, float)
Names: TypeAlias = tuple[str, ...] | str
"""Endings of module names, or one regular expression for a whole name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """The values of the file. Module names are relative to ``base_model.model.``."""

    rank: int
    alpha: float
    root_scaled: bool = False
    """rsLoRA (arXiv:2312.03732): the scale is ``alpha / sqrt(rank)``, not ``alpha / rank``."""
    targets: Names
    excluded: Names = ()
    layers: tuple[int, ...] = ()
    """The layers whose modules are targets; empty: all."""
    layer_lists: tuple[str, ...] = ()
    """Accepted names of a list of layers; empty: any."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks and alphas by regular expressions for ends of names."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    """Ends of the names of modules that are saved whole (``modules_to_save``)."""
    _compiled: dict[str, regex.Pattern[str]] = field(default_factory=dict, repr=False, compare=False)
    _seconds: list[float] = field(default_factory=lambda: [MATCH_SECONDS], repr=False, compare=False)
    """One number: the remaining seconds of ``MATCH_SECONDS``, which all matches share."""

    def rank_of(self, module: str) -> int:
        """Return the rank of the module's update."""
        return self.ranks.get(self._pattern_for(self.ranks, module), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the scale of the module's low-rank product."""
        alpha, rank = self.alphas.get(self._pattern_for(self.alphas, module), self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.root_scaled else rank)

    def saves(self, module: str) -> bool:
        """Return True if the module is saved whole."""
        return module.endswith(self.whole)

    def targets_module(self, module: str, *, inner: bool) -> bool:
        """Return True if the module has an update; ``inner`` marks linear maps but the head."""
        if self._excludes(module):
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == ALL_LINEAR:
                return inner
            return self._match(self.targets, module, whole=True) is not None
        if module in self.targets:
            return True
        if not module.endswith(tuple(f".{target}" for target in self.targets)):
            return False
        return not self.layers or self._layer_of(module) in self.layers

    def _excludes(self, module: str) -> bool:
        if isinstance(self.excluded, str):
            if self.excluded and self._match(self.excluded, module, whole=True):
                return True
        elif module in self.excluded or module.endswith(tuple(f".{one}" for one in self.excluded)):
            return True
        return any(self._match(_whole_pattern(one), module) for one in self.whole)

    def _layer_of(self, module: str) -> int | None:
        """Return the name's first number, or the number after a name in ``layer_lists`` if that is
        not empty."""
        patterns = [_layer_pattern(one) for one in self.layer_lists] or [r".*?\.[^.]*\.(?P<idx>\d+)\."]
        found = next((match for pattern in patterns if (match := self._match(pattern, module))), None)
        return None if found is None else int(found["idx"])

    def _pattern_for(self, patterns: Mapping[str, object], module: str) -> str:
        """Return the first pattern that matches the name's end; the name itself if none does."""
        return next((one for one in patterns if self._match(_end_pattern(one), module)), module)

    def _match(self, pattern: str, module: str, *, whole: bool = False) -> regex.Match[str] | None:
        """Match a name's beginning, or all of it. ``Unsupported`` if that takes too long."""
        if pattern not in self._compiled:  # the package's own cache may be too small
            self._compiled[pattern] = regex.compile(pattern)
        compiled, started = self._compiled[pattern], time.monotonic()
        try:
            # Other threads run meanwhile.
            return (compiled.fullmatch if whole else compiled.match)(
                module, concurrent=True, timeout=max(1e-3, self._seconds[0])
            )
        except TimeoutError:
            raise Unsupported(
                f"{CONFIG_FILE}: matching names takes longer than {MATCH_SECONDS:g} s, with {shown(pattern)} at the end; "
                "expected fewer repeats, or fewer expressions"
            ) from None
        finally:
            self._seconds[0] -= time.monotonic() - started


def shown(value: object) -> str:
    """Return a file's name or value for a message: one line, no control characters, shortened."""
    text = repr(value[: SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def told(error: object) -> str:
    """Return a library's message, which may quote files, in the form of ``shown``."""
    return shown(str(error))[1:].removesuffix("'").removesuffix('"')


def _end_pattern(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _layer_pattern(name: str) -> str:
    return rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\."


def _whole_pattern(name: str) -> str:
    return rf"(^|.*\.){name}($|\..*)"


def read_lora_config(path: Path) -> LoraConfig:
    """Read ``adapter_config.json`` in the directory ``path``.

    Raise ``NotFound`` if it is missing, ``CheckpointError`` if it is malformed, and ``Unsupported``
    with the name of a method or option that is not computed.
    """
    file = path / CONFIG_FILE
    if not os.path.exists(file):
        below = sorted(one.parent.name for one in path.glob(f"*/{CONFIG_FILE}"))
        there = f"; there are adapters in it, in {some([*map(shown, below)])}" if below else ""
        raise NotFound(f"{path} holds no adapter: it has no {CONFIG_FILE}; expected a directory that PEFT saved{there}")
    if not file.is_file():  # reading a pipe could wait forever
        raise CheckpointError(f"{file} is no regular file; expected one that PEFT saved")
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {told(error)}") from error
    return lora_config_of(text, str(file))


def lora_config_of(text: bytes, source: str) -> LoraConfig:
    """Read the text of ``adapter_config.json`` as ``read_lora_config``; errors name ``source``."""
    if len(text) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{source} has more than {MAX_CONFIG_BYTES} bytes; expected at most so many")
    try:
        values = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} cannot be read as JSON: {told(error)}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{source} holds a JSON {type(values).__name__}; expected an object")
    return parse_lora_config(values, source)


def parse_lora_config(values: Mapping[str, Any], source: str = CONFIG_FILE) -> LoraConfig:
    """Read parsed values; see ``read_lora_config``. ``source`` names the file in errors."""
    fields = ConfigFields(values, source, shown)
    _check_method(fields)
    targets = _targets(fields, "target_modules")
    layers = _layers(fields, "layers_to_transform")
    layer_lists = _strings(fields, "layers_pattern", single=True)
    if isinstance(targets, str):
        for name, given in (("layers_to_transform", layers), ("layers_pattern", layer_lists)):
            if given:
                raise fields.error(name, "null where target_modules is a string")
    if layer_lists and not layers:
        raise fields.error("layers_pattern", "null where layers_to_transform is")
    config = LoraConfig(
        rank=fields.count("r", DEFAULT_RANK),
        alpha=_finite(fields, "lora_alpha", DEFAULT_ALPHA),
        root_scaled=fields.flag("use_rslora", False),
        targets=targets,
        excluded=_names(fields, "exclude_modules"),
        layers=layers,
        layer_lists=layer_lists,
        ranks=_by_pattern(fields, "rank_pattern", ConfigFields.count),
        alphas=_by_pattern(fields, "alpha_pattern", _finite),
        whole=_strings(fields, "modules_to_save"),
    )
    _check_patterns(fields, config)
    _refuse_others(fields)
    return config


def _check_method(fields: ConfigFields) -> None:
    """Raise ``Unsupported`` unless the method is plain LoRA for a causal language model."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise Unsupported(f"{fields.source}: peft_type is {shown(kind)}, which is not supported; expected 'LORA'")
    fields.expect("task_type", "CAUSAL_LM")
    bias = fields.get("bias")
    if bias not in (None, "none"):
        raise Unsupported(f"{fields.source}: bias is {shown(bias)}; trained biases are not supported; expected 'none'")
    start = fields.get("init_lora_weights")
    if start is None or isinstance(start, bool):
        return
    if not isinstance(start, str) or not start.lower().startswith(KEPT_BASE + CHANGED_BASE):
        raise Unsupported(
            f"{fields.source}: init_lora_weights is {shown(start)}, which is not known; expected true or false"
        )
    if start.lower().startswith(CHANGED_BASE):
        raise Unsupported(
            f"{fields.source}: init_lora_weights is {shown(start)}, which changes the base weights, so the saved update does not "
            "belong to them; save it as an update of the original weights (path_initial_model_for_weight_conversion)"
        )


def _refuse_others(fields: ConfigFields) -> None:
    """Raise ``Unsupported`` for an unread field that is neither harmless nor empty."""
    for name in fields.unread():
        value = fields.values[name]
        if name in HARMLESS or value is None or value is False or value in ("", [], {}):
            continue
        text = json.dumps(value)
        text = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
        what = (
            f"{REFUSED[name]}, not supported"
            if name in REFUSED
            else "not a field that is known, and may change results"
        )
        label = name if name.isidentifier() and len(name) < SHOWN else shown(name)
        raise Unsupported(f"{fields.source}: {label} is {text}: {what}; expected null or false")


def _finite(fields: ConfigFields, name: str, default: float | None = None) -> float:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e30:
        raise fields.error(name, "a finite number")
    return float(value)


def _by_pattern(fields: ConfigFields, name: str, read: Callable[[ConfigFields, str], N]) -> dict[str, N]:
    """Read the values of an object whose keys are regular expressions."""
    found = {}
    for key, value in _few(fields, name, fields.mapping(name)).items():
        label = f"{name}[{shown(key)}]"
        found[key] = read(ConfigFields({label: value}, fields.source, shown), label)
    return found


def _strings(fields: ConfigFields, name: str, *, single: bool = False) -> tuple[str, ...]:
    """Read a list of nonempty strings (null: none), or with ``single`` perhaps one string."""
    value = fields.get(name)
    if value is None or value == "":
        return ()
    if single and isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise fields.error(name, "a list of strings")
    return tuple(_few(fields, name, value))


def _targets(fields: ConfigFields, name: str) -> Names:
    """Read names; raise ``Unsupported`` if there are none, where PEFT would choose some."""
    if fields.get(name) is None:
        found = "null" if fields.present(name) else "missing"
        raise Unsupported(
            f"{fields.source}: {name} is {found}, so PEFT would choose modules by the type of the model; expected a list of the "
            "modules' names, or a regular expression"
        )
    return _names(fields, name)


def _few(fields: ConfigFields, name: str, values: Held) -> Held:
    if len(values) > MAX_NAMES:
        raise CheckpointError(f"{fields.source}: {name} has {len(values)} entries; expected at most {MAX_NAMES}")
    return values


def _names(fields: ConfigFields, name: str) -> Names:
    """Read a list of strings, or one regular expression."""
    value = fields.get(name)
    return value if isinstance(value, str) else _strings(fields, name)


def _layers(fields: ConfigFields, name: str) -> tuple[int, ...]:
    """Read a layer or a list of layers."""
    value = fields.get(name)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in listed):
        raise fields.error(name, "a list of integers of 0 or more")
    return tuple(listed)


def _check_patterns(fields: ConfigFields, config: LoraConfig) -> None:
    """Raise ``CheckpointError`` for a bad expression, ``Unsupported`` for a long one."""
    found = {"rank_pattern": {one: _end_pattern(one) for one in config.ranks}}
    found["alpha_pattern"] = {one: _end_pattern(one) for one in config.alphas}
    found["modules_to_save"] = {one: _whole_pattern(one) for one in config.whole}
    found["layers_pattern"] = {one: _layer_pattern(one) for one in config.layer_lists}
    found["target_modules"] = {config.targets: config.targets} if isinstance(config.targets, str) else {}
    found["exclude_modules"] = {config.excluded: config.excluded} if isinstance(config.excluded, str) else {}
    for name, patterns in found.items():
        for given, pattern in patterns.items():
            if len(pattern) > MAX_PATTERN:
                raise Unsupported(
                    f"{fields.source}: {name} has {shown(given)}, of {len(given)} characters; at most {MAX_PATTERN} are read"
                )
            try:
                regex.compile(pattern)
            except (regex.error, OverflowError, RecursionError) as error:
                raise fields.error(name, f"valid regular expressions ({told(error)})") from error
