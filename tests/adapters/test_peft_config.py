"""``adapter_config.json``: every field, matching as PEFT matches, and expressions that would take
too long.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.adapters import peft_config
from quire.adapters.peft_config import HARMLESS, REFUSED, parse_lora_config
from quire.base.errors import CheckpointError, Unsupported


def test_every_field_of_peft_is_known() -> None:
    """One that a later version adds shows up here; until then files with it are refused."""
    peft = pytest.importorskip("peft")
    source = Path(peft_config.__file__).read_text()
    for one in dataclasses.fields(peft.LoraConfig):
        is_read = f'("{one.name}"' in source or f'(fields, "{one.name}"' in source
        assert one.name in HARMLESS or one.name in REFUSED or is_read, one.name


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_options_that_are_not_computed(name: str) -> None:
    values = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    for neutral in (None, False, [], {}, ""):
        parse_lora_config({**values, name: neutral})
    for given in (True, [3], {"a": 1}, "x", 1, 0):
        with pytest.raises(Unsupported, match=f"{name} is .*: {peft_config.REFUSED[name].split('(')[0].strip()}"):
            parse_lora_config({**values, name: given})


TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["self_attn.q_proj", "lm_head", "model.layers.1.mlp.up_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": "q_proj"},
    {"target_modules": r"model\.layers\.1\.self_attn\.q"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 10]},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 1},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "blocks"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": []},
    {"target_modules": ["w1"], "layers_to_transform": [2]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*v_proj"},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": "v_proj"},
    {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["self_attn"]},
    {"target_modules": []},
]
MODULES = (
    "lm_head",
    "model.embed_tokens",
    *(f"model.layers.{layer}.self_attn.{one}_proj" for layer in (0, 1, 10) for one in "qkv"),
    *(f"model.layers.{layer}.mlp.{one}_proj" for layer in (0, 1, 10) for one in ("up", "down")),
    "model.layers.1.mlp.experts.2.w1",
    "model.layers.2.mlp.experts.1.w1",
    "transformer.h.1.attn.q_proj",
    "blocks.1.q_proj",
    "q_proj",
)


@pytest.mark.parametrize("values", TARGETS, ids=str)
def test_modules_are_matched_as_peft_matches_them(values: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs = peft.LoraConfig(**values)
    ours = parse_lora_config({"peft_type": "LORA", **values})
    for module in MODULES:
        assert ours.targets_module(module, inner=True) == bool(check_target_module_exists(theirs, module)), module


@pytest.mark.parametrize(
    "pattern",
    [
        {},
        {"q_proj": 2},
        {"q_pro": 2, "proj": 3},
        {"layers.1.self_attn.q_proj": 2, ".*_proj": 3},
        {r"model\.layers\.\d\..*": 2, "q_proj": 3},
        {"model.layers.10.self_attn.v_proj": 2, "^lm_head": 5},
        {"attn.q_proj": 4},
    ],
    ids=str,
)
def test_patterns_are_matched_as_peft_matches_them(pattern: dict[str, int]) -> None:
    pytest.importorskip("peft")
    from peft.utils.other import get_pattern_key

    values = {"peft_type": "LORA", "target_modules": ["x"], "r": 8, "lora_alpha": 12}
    ranked = parse_lora_config({**values, "rank_pattern": pattern})
    weighed = parse_lora_config({**values, "alpha_pattern": pattern, "use_rslora": True})
    for module in MODULES:
        key = get_pattern_key(list(pattern), module)
        assert ranked.rank_of(module) == pattern.get(key, 8)
        assert ranked.scale_of(module) == 12 / pattern.get(key, 8)
        assert weighed.scale_of(module) == pattern.get(key, 12) / 8**0.5


HOSTILE = r"(?:.|..)*(?:.|..)*\d"
LONG_NAME = "model.layers." + "a" * 300 + ".mlp"
FIELDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "target_modules": lambda one: {"target_modules": one},
    "exclude_modules": lambda one: {"exclude_modules": one},
    "rank_pattern": lambda one: {"rank_pattern": {one: 2}},
    "alpha_pattern": lambda one: {"alpha_pattern": {one: 2}},
    "layers_pattern": lambda one: {"layers_to_transform": [1], "layers_pattern": [one]},
    "modules_to_save": lambda one: {"modules_to_save": [one]},
}


@pytest.mark.parametrize("field", FIELDS)
def test_expressions_that_take_too_long(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matcher gives up, and lets other threads run before that."""
    monkeypatch.setattr(peft_config, "MATCH_SECONDS", 0.2)
    config = parse_lora_config({"peft_type": "LORA", "target_modules": ["mlp"], **FIELDS[field](HOSTILE)})
    begun = time.monotonic()
    with pytest.raises(Unsupported, match=r"takes longer than 0.2 s"):
        config.scale_of(LONG_NAME) if "pattern" in field and "layers" not in field else config.targets_module(
            LONG_NAME, inner=True
        )
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("field", FIELDS)
def test_expressions_that_are_refused(field: str) -> None:
    given = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    with pytest.raises(Unsupported, match=f"{field} has 'aaa.*, of 5000 characters; at most 2000 are read"):
        parse_lora_config({**given, **FIELDS[field]("a" * 5000)})
    with pytest.raises(CheckpointError, match="valid regular expressions"):
        parse_lora_config({**given, **FIELDS[field]("(")})


USUAL = [
    r"^(?!.*vision).*\.(?:q_proj|v_proj)",
    r".*\.layers\.(0|1)\..*_proj",
    r"^(?!.*(?:vision|projector|lm_head)).*\.(?:q_proj|down_proj)",
    r"(?=.*layers)(?=.*attn)(?!.*k_proj).*proj",
    r"model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)",
    rf".*\.({'|'.join(map(str, range(120)))})\.(self_attn|mlp)\..*",
    r"(?:.*?(?:language|text|model).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj|v_proj|"
    r"o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|"
    r"feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))",
]


@pytest.mark.parametrize("pattern", USUAL, ids=lambda pattern: pattern[:30])
def test_usual_expressions_are_matched(pattern: str) -> None:
    config = parse_lora_config({"peft_type": "LORA", "target_modules": pattern})
    for module in MODULES:
        assert config.targets_module(module, inner=True) == bool(re.fullmatch(pattern, module)), module
    assert any(config.targets_module(module, inner=True) for module in MODULES)


def test_many_expressions() -> None:
    """One for each module of a large model is usual; what all of them ask for together
    is limited."""
    values = {"peft_type": "LORA", "target_modules": ["q_proj"]}
    names = {f"model.layers.{layer}.mlp.{part}_proj": layer + 1 for layer in range(200) for part in ("up", "down")}
    assert parse_lora_config({**values, "rank_pattern": names}).rank_of("model.layers.150.mlp.up_proj") == 151
    with pytest.raises(CheckpointError, match="rank_pattern has 5000 entries; expected at most 4096"):
        parse_lora_config({**values, "rank_pattern": dict.fromkeys(map(str, range(5000)), 1)})
    with pytest.raises(CheckpointError, match="target_modules has 5000 entries"):
        parse_lora_config({**values, "target_modules": ["x"] * 5000})
