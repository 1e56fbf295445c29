"""Logits under adapters against PEFT, for every family: whole prompts, chunks, decode, and base
rows in the same batch.

The measure is PEFT on transformers in float64, reading the same files; where PEFT has no way to
adapt a module (it takes the names of experts for those of a shared one, and refuses some of
Mamba's), weights that the update was added to.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.adapters.peft_models import (
    FAMILIES,
    LENGTH,
    TOKENS_T,
    WITH_VISION,
    Bed,
    embedding_name,
    linear_names,
    make_adapter,
    make_base,
    merged,
    write_adapter,
)
from tests.exact import Float32Bound, run_exactly
from tests.test_parity import SIZES
from torch import Tensor

from quire.adapters.peft import read_adapter
from quire.adapters.targets import EMBED, spelled
from quire.base.errors import CheckpointError
from quire.base.types import Chunk, Step
from quire.models.families import name_tables_of

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")

NAMES = sorted((*FAMILIES, *WITH_VISION))
PARTS = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
"""What PEFT takes for experts in a model that has some."""
MAMBAS = ("mamba2", "falcon_h1", "nemotron_h")
"""Where PEFT refuses the projection out of a mixer."""
REORDERED = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
STREAMS = ("altup_projections.0", "altup_projections.1", "altup_unembed_projections.0", "altup_unembed_projections.1")
REFUSED = {
    "deepseek-v2": ("self_attn.kv_b_proj",),
    "deepseek-v2-lite": ("self_attn.kv_b_proj",),
    "deepseek-v3": ("self_attn.kv_b_proj",),
    "gemma3n": (*STREAMS, "per_layer_model_projection"),
    "gemma4": ("per_layer_model_projection",),
    "gemma4-moe": ("router.proj",),
    "glm4-moe-lite": ("self_attn.kv_b_proj",),
    "phimoe": ("mlp.router",),
    "youtu": ("self_attn.kv_b_proj",),
    "qwen3-next": REORDERED,
}
"""The linear maps of transformers that cannot be adapted here, by how their names end."""
SPELLINGS = (
    "deepseek-v2",
    "falcon-h1",
    "gemma3",
    "glm4",
    "gpt-oss",
    "granite-4",
    "lfm2",
    "lfm3",
    "llama",
    "mamba2",
    "mixtral",
    "nemotron-h",
    "phi3-longrope",
    "qwen2-moe",
    "qwen3-next",
    *WITH_VISION,
)
"""Families that between them have every way in which modules are named, fused, scaled and left out.

What PEFT writes for the others is spelled like that of one of these; that each of their modules is
adapted, ``test_every_module_...`` tells.
"""


def assert_same(found_TV: Tensor, expected_TV: Tensor, bound: Float32Bound) -> None:
    assert found_TV.shape == expected_TV.shape
    error = float((found_TV - expected_TV).abs().max())
    assert error <= bound, f"error {error:.2e}, expected at most {float(bound):.2e}"


def check(bed: Bed, adapter: Path, peer: Any, adapted: Any) -> None:
    """The logits under an adapter are those of ``adapted``, however they are computed, and those
    beside it the base's.
    """
    exact_TV = run_exactly(adapted, TOKENS_T)
    bound = Float32Bound(adapted.float(), TOKENS_T, exact_TV)
    base_TV = bed.in_chunks(LENGTH, None)
    assert float((exact_TV - base_TV).abs().max()) > 1000 * bound.so_far, (
        "the adapter changes too little to say anything"
    )
    one = bed.runner.adapters.load(read_adapter(adapter, bed.model))
    for chunk in (LENGTH, 5, 1):
        assert_same(bed.in_chunks(chunk, one), exact_TV, bound)
    tokens = TOKENS_T.tolist()
    under, beside = bed.new(), bed.new()
    bed.run(under, tokens[:6], one)
    chunks = (
        Chunk(beside, tokens, logits="all"),
        Chunk(under, tokens[6:], adapter=one, logits="all"),
        Chunk(bed.new(), tokens, adapter=one, logits="last"),
    )
    found = bed.runner.execute(Step(chunks=chunks))
    plain_TV = run_exactly(peer, TOKENS_T)
    assert_same(found.rows(0), plain_TV, Float32Bound(peer, TOKENS_T, plain_TV))
    assert_same(found.rows(1), exact_TV[6:], bound)
    assert_same(found.rows(2), exact_TV[-1:], bound)
    bed.runner.adapters.unload(one)
    assert torch.equal(bed.in_chunks(LENGTH, None), base_TV)


def peft_targets(peer: Any, sites: Any) -> list[str]:
    """The linear maps that both can adapt."""
    experts = any(".experts" in name for name, _ in peer.named_parameters())
    mamba = peer.config.model_type in MAMBAS
    found = []
    for name in linear_names(peer):
        ending = name.rpartition(".")[2]
        if name in sites and not (experts and ending in PARTS) and not (mamba and ending == "out_proj"):
            found.append(name)
    return found


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in SPELLINGS else pytest.mark.slow) for one in NAMES]
)
def test_every_family_is_as_peft_has_it(name: str, tmp_path: Path) -> None:
    """All linear maps that PEFT can adapt, the head among them, and the embedding."""
    peer = make_base(name, tmp_path / "base")
    bed = Bed(tmp_path / "base")
    sites = spelled(bed.model, list(linear_names(peer))).targets
    targets = [*peft_targets(peer, sites), embedding_name(peer)]
    adapted = make_adapter(
        tmp_path / "base", tmp_path / "adapter", peer, target_modules=targets, init_lora_weights=False
    )
    check(bed, tmp_path / "adapter", peer, adapted)


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in SPELLINGS else pytest.mark.slow) for one in NAMES]
)
def test_every_module_is_as_if_the_update_were_merged(name: str, tmp_path: Path) -> None:
    """All linear maps of transformers but those that are named above: none is forgotten, none is
    another one's.
    """
    peer = make_base(name, tmp_path / "base")
    bed = Bed(tmp_path / "base")
    linears = linear_names(peer)
    sites = spelled(bed.model, list(linears))
    refused = {one for one in linears if one.endswith(REFUSED.get(name, ("none",)))}
    assert {one for one, site in sites.targets.items() if site.linear != EMBED} == linears.keys() - refused
    assert refused <= sites.refused.keys()
    shapes = {one: shape for one, shape in linears.items() if one in sites.targets}
    embedding = embedding_name(peer)
    shapes[embedding] = tuple(peer.get_input_embeddings().weight.shape)
    tensors = write_adapter(tmp_path / "adapter", shapes, embedding)
    adapted = merged(peer, tensors)
    check(bed, tmp_path / "adapter", peer, adapted)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_spelling_of_each_family_names_modules_as_transformers_does(name: str) -> None:
    """Files may call them otherwise, as those of LFM3 and Nemotron-H do."""
    family, own = FAMILIES[name]
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**{**SIZES, **own})
    with torch.device("meta"):
        modules = linear_names(kind(config))
    wanted = {f"{one}.weight" for one in modules if one != "lm_head"}
    values = {**config.to_dict(), "architectures": [kind.__name__]}
    assert any(wanted <= table.keys() for table in name_tables_of(values))


def test_the_bias_of_a_head_is_the_base_models_own(tmp_path: Path) -> None:
    """PEFT saves it beside an update of the head."""
    peer = make_base("phimoe", tmp_path / "base")
    bed, adapter = Bed(tmp_path / "base"), tmp_path / "adapter"
    make_adapter(tmp_path / "base", adapter, peer, target_modules=["lm_head"], init_lora_weights=False)
    file = adapter / "adapter_model.safetensors"
    tensors, name = load_file(file), "base_model.model.lm_head.base_layer.bias"
    read_adapter(adapter, bed.model)
    save_file({**tensors, name: tensors[name] + 1}, file)
    with pytest.raises(CheckpointError, match=r"base_layer.bias' is the base model's own table, but not this model's"):
        read_adapter(adapter, bed.model)
    bed.model.lm_head.bias = None  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"base_layer.bias' is a bias that this model does not have"):
        read_adapter(adapter, bed.model)


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "two modules": ("llama-mqa", {"target_modules": ["q_proj", "v_proj"]}),
    "rslora": ("llama3", {"target_modules": ATTENTION, "use_rslora": True}),
    "all linear": ("llama-mqa", {"target_modules": "all-linear"}),
    "regular expression": ("llama-mqa", {"target_modules": r"model\.layers\.[02]\.(self_attn|mlp)\.(k|up)_proj"}),
    "rank pattern": ("llama-mqa", {"target_modules": ATTENTION, "rank_pattern": {r"layers\.1\..*": 2, "q_proj": 7}}),
    "alpha pattern": (
        "llama-mqa",
        {"target_modules": ATTENTION, "alpha_pattern": {r"layers\.[01]\.self_attn\.k_proj": 9.5, "v_proj": 1.5}},
    ),
    "both patterns, rslora": (
        "qwen2",
        {
            "target_modules": ["q_proj", "down_proj"],
            "rank_pattern": {"^model.layers.0.self_attn.q_proj": 5},
            "alpha_pattern": {"down_proj": 2},
            "use_rslora": True,
        },
    ),
    "layers": ("llama-mqa", {"target_modules": ATTENTION, "layers_to_transform": [0, 2]}),
    "one layer of a list": (
        "llama-mqa",
        {"target_modules": ATTENTION, "layers_to_transform": 1, "layers_pattern": ["blocks", "layers"]},
    ),
    "excluded": ("llama-mqa", {"target_modules": "all-linear", "exclude_modules": ["up_proj", "self_attn.q_proj"]}),
    "excluded by expression": ("llama-mqa", {"target_modules": ATTENTION, "exclude_modules": r".*\.1\..*"}),
    "whole embedding": ("llama-mqa", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole head": ("llama-mqa", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "both whole": ("llama-mqa", {"target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]}),
    "whole embedding, tied": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole head, tied": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "both whole, tied": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "embedding, tied": ("llama", {"target_modules": ["embed_tokens"]}),
    "head, tied": ("llama", {"target_modules": ["lm_head"]}),
    "update and table": ("llama", {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}),
    "scaled embedding": ("gemma3", {"target_modules": ["embed_tokens", "down_proj"]}),
    "scaled whole embedding": ("gemma3", {"target_modules": ["gate_proj"], "modules_to_save": ["embed_tokens"]}),
    "multiplied whole embedding": ("granite", {"target_modules": ["k_proj"], "modules_to_save": ["embed_tokens"]}),
    "whole embedding in float32": ("mamba2", {"target_modules": ["in_proj"], "modules_to_save": ["embeddings"]}),
}
"""A name, the family, and what its LoraConfig says."""


@pytest.mark.product(6)
@pytest.mark.parametrize("option", list(OPTIONS))
def test_options_are_as_peft_has_them(option: str, tmp_path: Path) -> None:
    name, config = OPTIONS[option]
    peer = make_base(name, tmp_path / "base")
    adapted = make_adapter(tmp_path / "base", tmp_path / "adapter", peer, **{"init_lora_weights": False, **config})
    check(Bed(tmp_path / "base"), tmp_path / "adapter", peer, adapted)


@pytest.mark.turns(2)
@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal", "mica"])
def test_starts_of_training_that_leave_the_base_as_it_is(start: bool | str, tmp_path: Path) -> None:
    peer = make_base("llama", tmp_path / "base")
    config = {"target_modules": ATTENTION, "init_lora_weights": start, "r": 4}
    adapted = make_adapter(tmp_path / "base", tmp_path / "adapter", peer, **config)
    check(Bed(tmp_path / "base"), tmp_path / "adapter", peer, adapted)
