"""Families with recurrent layers: logits against transformers, whole, in chunks and token by token;
what their configurations may ask for.

The pass keeps one sequence: K and V in lists, states in a dictionary, recurrences step by step.
``tests/test_parity.py`` runs the families through the KV state.

Letters: T tokens, V vocabulary, E model width.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.exact import Float32Bound, run_exactly, run_transformers
from torch import Tensor

from quire.base.errors import CheckpointError, QuireError, Unsupported
from quire.contracts.layers import FullAttention, LayerSpec, Recurrent
from quire.contracts.recurrence import RecurrencePlan
from quire.models import granite_moe_hybrid, lfm2, mamba2, qwen3_next
from quire.models.families import FAMILIES, LoadedModel
from quire.models.loading import load_model
from quire.models.mamba2 import UNBOUNDED
from quire.ops.recurrence import ReferenceRecurrence
from quire.weights.safetensors_files import SINGLE_FILE

from .conftest import GEOMETRY, Case, TinyCheckpoint
from .conftest import make_checkpoint as make_any_checkpoint
from .test_parity import CHUNKINGS, DensePass, error, tokens_for

REGISTERED = {name: FAMILIES.require(name) for name in FAMILIES if "recurrent" in FAMILIES.require(name).state_kinds}

MAMBA = {
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-5,
}
MIXED = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
FALCON = {
    **MIXED,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.6, 0.4],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.8,
}
GRANITE = {
    **MIXED,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.22,
    "logits_scaling": 7.0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LFM2 = {"block_multiple_of": 16, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}
LFM3 = {
    "head_dim": 8,
    "sliding_window": 9,
    "conv_L_cache": 4,
    "layer_types": ["sliding_attention", "conv", "full_attention"],
}
NEMOTRON = {
    "head_dim": 8,
    "layers_block_type": ["linear_attention", "moe", "full_attention"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.0,
}
LFM2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
}
DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
# In three sections, of which text turns all by one position.
MROPE = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
CASES = (
    Case("mamba2", "Mamba2", MAMBA),
    Case("mamba2-biases-tied", "Mamba2", {**MAMBA, "use_bias": True, "n_groups": 1, "tie_word_embeddings": True}),
    Case("mamba2-clamped-sharded", "Mamba2", {**MAMBA, "time_step_limit": [0.3, 0.9], "use_conv_bias": False}, True),
    Case("mamba2-gelu-narrow", "Mamba2", {**MAMBA, "hidden_act": "gelu", "residual_in_fp32": False}),
    Case("bamba", "Bamba", {**MIXED, "attn_layer_indices": [1]}),
    Case(
        "bamba-biases",
        "Bamba",
        {
            **MIXED,
            "attn_layer_indices": [0, 2],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
        True,
    ),
    Case(
        "bamba-clamped",
        "Bamba",
        {**MIXED, "attn_layer_indices": [0], "time_step_limit": [0.0, 0.6], "mamba_n_groups": 8},
    ),
    Case("falcon-h1", "FalconH1", FALCON),
    Case("falcon-h1-normed", "FalconH1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    Case(
        "falcon-h1-gated-first",
        "FalconH1",
        {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    ),
    Case(
        "falcon-h1-biases-plain",
        "FalconH1",
        {
            **MIXED,
            "mamba_d_ssm": None,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
            "tie_word_embeddings": True,
        },
        True,
    ),
    Case("granite-4", "GraniteMoeHybrid", GRANITE),
    Case(
        "granite-4-dense",
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 0, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case(
        "granite-4-rope",
        "GraniteMoeHybrid",
        {**GRANITE, "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_n_groups": 1},
        True,
    ),
    Case("lfm2", "Lfm2", LFM2),
    Case(
        "lfm2-biases-untied",
        "Lfm2",
        {
            "full_attn_idxs": [0],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
        True,
    ),
    Case("lfm2-moe", "Lfm2Moe", LFM2_MOE),
    Case(
        "lfm2-moe-unbiased",
        "Lfm2Moe",
        {
            **LFM2_MOE,
            "num_dense_layers": 0,
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.0,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        True,
    ),
    Case("lfm3", "Lfm3", LFM3),
    Case(
        "lfm3-plain",
        "Lfm3",
        {
            **LFM3,
            "layer_types": None,
            "num_hidden_layers": 5,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "conv_bias": True,
            "tie_word_embeddings": False,
        },
        True,
    ),
    Case("nemotron-h", "NemotronH", NEMOTRON),
    Case(
        "nemotron-h-dense",
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
        },
        True,
    ),
    Case(
        "nemotron-h-latent",
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": ["moe", "linear_attention", "full_attention"],
            "moe_latent_size": 16,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    Case("qwen3-next", "Qwen3Next", {**DELTA, **EXPERTS}),
    Case(
        "qwen3-next-some",
        "Qwen3Next",
        {
            **DELTA,
            **EXPERTS,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": True,
        },
        True,
    ),
    Case("qwen3.5", "Qwen3_5", {**DELTA, "rope_parameters": MROPE}),
    Case("qwen3.5-moe", "Qwen3_5Moe", {**DELTA, **EXPERTS, "rope_parameters": MROPE}),
)


def make_checkpoint(case: Case, path: Path) -> TinyCheckpoint:
    """With the experts of transformers that run in float64 too."""
    tiny = make_any_checkpoint(case, path)
    if {"num_experts", "num_local_experts"} & set(case.changes):
        tiny.model.set_experts_implementation("eager")
    return tiny


@pytest.fixture(scope="module")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], TinyCheckpoint]:
    made: dict[str, TinyCheckpoint] = {}

    def make(case: Case) -> TinyCheckpoint:
        if case.name not in made:
            made[case.name] = make_checkpoint(case, tmp_path_factory.mktemp("recurrent") / case.name)
        return made[case.name]

    return make


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[Case], TinyCheckpoint]) -> TinyCheckpoint:
    """Each case in turn; do not change its files."""
    return make_tiny(request.param)


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


class HybridPass(DensePass):
    """A ``Pass`` for one sequence with recurrent layers too. Keep it from chunk to chunk."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        super().__init__(specs)
        self.states: dict[tuple[int, int], Tensor] = {}
        self.seen: set[tuple[int, int]] = set()
        self.backend = ReferenceRecurrence()

    def begin(self, num_tokens: int) -> None:
        super().begin(num_tokens)
        self.seen.clear()
        self.plan = RecurrencePlan(
            starts=np.array([0, num_tokens]),
            parents=np.arange(-1, num_tokens - 1),
            given=np.array([0] + [-1] * (num_tokens - 1)),
            wanted=np.array([num_tokens - 1]),
            chains=True,
        )

    def _before(self, layer_id: int, state_id: int) -> Tensor:
        """``[1, *shape]``; each state is taken once in a forward."""
        spec = self.specs[layer_id]
        assert isinstance(spec, Recurrent)
        assert (layer_id, state_id) not in self.seen
        self.seen.add((layer_id, state_id))
        one = spec.states[state_id]
        first = torch.full((1, *one.shape), one.initial, dtype=getattr(torch, one.dtype))
        return self.states.get((layer_id, state_id), first)

    def _after(self, layer_id: int, state_id: int, states: Tensor) -> None:
        before = self.states.get((layer_id, state_id), states)
        assert states.shape == before.shape
        assert states.dtype == before.dtype
        self.states[layer_id, state_id] = states

    def linear_attention(
        self, layer_id: int, state_id: int, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, **rest: Any
    ) -> Tensor:
        before = self._before(layer_id, state_id)
        assert before.dtype == torch.float32
        assert rest["log_decay"].max() <= 0
        out, states = self.backend.linear_attention(self.plan, q_THK, k_THK, v_THV, before, **rest)
        self._after(layer_id, state_id, states)
        return out

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        before = self._before(layer_id, state_id)
        assert before.dtype == x_TC.dtype
        out, states = self.backend.convolve(self.plan, x_TC, weight_CW, bias_C, before)
        self._after(layer_id, state_id, states)
        return out


@torch.inference_mode()
def run(model: LoadedModel, tokens_T: Tensor, chunks: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` of all tokens, run chunk by chunk."""
    pass_ = HybridPass(model.layer_specs)
    recurrent = {
        (layer, state)
        for layer, spec in enumerate(model.layer_specs)
        if isinstance(spec, Recurrent)
        for state in range(len(spec.states))
    }
    logits = []
    for tokens in tokens_T.split(list(chunks)):
        pass_.begin(len(tokens))
        x_TE = model.embed(tokens)
        for block in model.blocks:
            before = x_TE.clone()
            out_TE = block(x_TE, pass_)
            assert torch.equal(x_TE, before), "a block changed its input"
            x_TE = out_TE
        assert pass_.seen == recurrent
        logits.append(model.head(x_TE))
    return torch.cat(logits)


# Parity.


def test_float32_logits_are_as_close_to_float64_as_those_of_transformers(tiny: TinyCheckpoint) -> None:
    model = load_model(tiny.path, dtype="float32")
    tokens_T = tokens_for(model.vocab_size)
    exact = run_exactly(tiny.model, tokens_T)
    bound = Float32Bound(tiny.model, tokens_T, exact)
    for name, chunks in CHUNKINGS.items():
        ours = run(model, tokens_T, chunks)
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape
        assert error(ours, exact) <= bound, name
        assert torch.equal(ours.argmax(-1), exact.argmax(-1)), name


# With experts, rounding turns choices over, here and there.
@pytest.mark.turns(3)
@pytest.mark.parametrize("name", ["mamba2", "bamba", "falcon-h1", "falcon-h1-normed", "lfm2", "qwen3.5"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_in_transformers(
    make_tiny: Callable[[Case], TinyCheckpoint], name: str, dtype: str
) -> None:
    tiny = make_tiny(named(name))
    model = load_model(tiny.path, dtype=dtype)
    tokens_T = tokens_for(model.vocab_size)
    theirs_model = copy.deepcopy(tiny.model).to(model.dtype)
    exact = run_exactly(theirs_model, tokens_T)
    theirs = run_transformers(theirs_model, tokens_T)
    ours = run(model, tokens_T, CHUNKINGS["chunks"])
    rms = [float((logits.double() - exact).square().mean().sqrt()) for logits in (ours, theirs)]
    assert rms[0] <= 1.5 * rms[1]


def test_the_suite_sees_a_state_that_is_lost(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    """Each state matters by far more than the bound: one that starts anew in the middle is seen."""
    for name in ("mamba2", "lfm2", "qwen3.5"):
        tiny = make_tiny(named(name))
        model = load_model(tiny.path, dtype="float32")
        tokens_T = tokens_for(model.vocab_size)
        exact = run_exactly(tiny.model, tokens_T)
        bound = Float32Bound(tiny.model, tokens_T, exact)
        spec = next(one for one in model.layer_specs if isinstance(one, Recurrent))
        for state in range(len(spec.states)):
            found = _run_with_a_loss(model, tokens_T, state)
            assert error(found[:20], exact[:20]) <= bound
            assert error(found[20:], exact[20:]) > 100 * float(bound), (name, state)


@torch.inference_mode()
def _run_with_a_loss(model: LoadedModel, tokens_T: Tensor, state: int) -> Tensor:
    pass_ = HybridPass(model.layer_specs)
    logits = []
    for tokens in tokens_T.split(20):
        pass_.begin(len(tokens))
        x_TE = model.embed(tokens)
        for block in model.blocks:
            x_TE = block(x_TE, pass_)
        logits.append(model.head(x_TE))
        pass_.states = {key: value for key, value in pass_.states.items() if key[1] != state}
    return torch.cat(logits)


# What a model is.


def test_the_model_says_what_it_is(tiny: TinyCheckpoint) -> None:
    model = load_model(tiny.path, dtype="bfloat16")
    config = tiny.model.config
    assert model.architecture == type(tiny.model).__name__
    assert (model.vocab_size, model.hidden_size) == (config.vocab_size, config.hidden_size)
    assert len(model.blocks) == config.num_hidden_layers
    corrections = [one for name, one in tiny.model.named_buffers() if name.endswith("bias")]
    assert model.num_parameters == sum(weight.numel() for weight in (*tiny.model.parameters(), *corrections))
    assert model.parameter_bytes >= 2 * model.num_parameters
    assert model.tied == config.tie_word_embeddings
    kinds = {spec.kind for spec in model.layer_specs}
    assert kinds <= set(REGISTERED[model.architecture].state_kinds)
    for spec in model.layer_specs:
        if isinstance(spec, Recurrent):
            assert spec.states[0].dtype == "bfloat16"
            assert all(one.dtype == "float32" for one in spec.states[1:])
    json.loads(model.canonical_config)


@pytest.mark.parametrize(("name", "wide"), [("mamba2", True), ("mamba2-gelu-narrow", False), ("bamba", False)])
def test_the_residual_stream_is_as_wide_as_it_was_trained(
    make_tiny: Callable[[Case], TinyCheckpoint], name: str, wide: bool
) -> None:
    model = load_model(make_tiny(named(name)).path, dtype="bfloat16")
    pass_ = HybridPass(model.layer_specs)
    pass_.begin(3)
    with torch.inference_mode():
        x_TE = model.embed(tokens_for(97)[:3])
        for block in model.blocks:
            assert x_TE.dtype == (torch.float32 if wide else torch.bfloat16)
            x_TE = block(x_TE, pass_)
        assert x_TE.dtype == (torch.float32 if wide else torch.bfloat16)
        assert model.head(x_TE).dtype == torch.float32


def test_a_blocks_layers_are_numbered_attention_first(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    kinds = {
        name: [spec.kind for spec in load_model(make_tiny(named(name)).path, dtype="float32").layer_specs]
        for name in ("mamba2", "bamba", "falcon-h1", "lfm2", "qwen3-next")
    }
    assert kinds == {
        "mamba2": ["recurrent"] * 3,
        "bamba": ["recurrent", "full", "recurrent"],
        "falcon-h1": ["full", "recurrent"] * 3,
        "lfm2": ["recurrent", "full", "recurrent"],
        "qwen3-next": ["recurrent"] * 3 + ["full"],
    }


def test_states_have_the_shapes_of_the_model(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    shapes = {}
    for name in ("mamba2", "falcon-h1", "lfm2", "qwen3-next"):
        specs = load_model(make_tiny(named(name)).path, dtype="float32").layer_specs
        spec = next(one for one in specs if isinstance(one, Recurrent))
        shapes[name] = [one.shape for one in spec.states]
    assert shapes == {
        "mamba2": [(3, 64 + 2 * 2 * 12), (8, 12, 8)],
        "falcon-h1": [(3, 64 + 2 * 2 * 12), (8, 12, 8)],
        "lfm2": [(2, 32)],
        "qwen3-next": [(3, 2 * 2 * 8 + 6 * 12), (6, 8, 12)],
    }


def test_the_partial_rotation_and_the_scale_of_keys_are_in_the_spec(
    make_tiny: Callable[[Case], TinyCheckpoint],
) -> None:
    def attention(name: str) -> FullAttention:
        specs = load_model(make_tiny(named(name)).path, dtype="float32").layer_specs
        return next(one for one in specs if isinstance(one, FullAttention))

    bamba_rope, delta_rope = attention("bamba").rope, attention("qwen3-next").rope
    assert bamba_rope is not None
    assert delta_rope is not None
    assert (bamba_rope.rotary_dim, delta_rope.rotary_dim) == (4, 4)
    assert attention("falcon-h1").scale == pytest.approx(0.7 * 8**-0.5)


@pytest.mark.parametrize(
    ("name", "rotary_dim", "theta"), [("bamba", 4, 10000.0), ("qwen3-next", 4, 10000.0), ("lfm2", 8, 1_000_000.0)]
)
def test_what_a_missing_rope_means(
    make_tiny: Callable[[Case], TinyCheckpoint], name: str, rotary_dim: int, theta: float
) -> None:
    config = config_of(make_tiny, name, rope_parameters=None, partial_rotary_factor=None)
    rope = config.trunk.layers[0].rope
    assert (rope.rotary_dim, rope.theta) == (rotary_dim, theta)


def test_mamba_has_no_end_of_its_own(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    path = make_tiny(named("mamba2")).path
    values = json.loads((path / "config.json").read_text())
    del values["max_position_embeddings"]
    assert mamba2.read_mamba2_config(values).trunk.context == UNBOUNDED


# Files.


def test_every_name_is_mapped_and_filled(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A tensor more or less is refused by name."""
    if tiny.case.sharded:
        pytest.skip("its tensors are in several files")
    tensors = load_file(tiny.path / SINGLE_FILE)
    (tmp_path / "config.json").write_text((tiny.path / "config.json").read_text())
    lost = sorted(tensors)[len(tensors) // 2]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match="lacks 1 of"):
        load_model(tmp_path, dtype="float32")
    save_file({**tensors, "model.strange.weight": torch.zeros(2)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"no place for model\.strange\.weight"):
        load_model(tmp_path, dtype="float32")


def test_mambas_older_name_of_the_embedding(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path) -> None:
    path = make_tiny(named("mamba2")).path
    tensors = load_file(path / SINGLE_FILE)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tokens_T = tokens_for(97)
    old, new = (run(load_model(one, dtype="float32"), tokens_T, [40]) for one in (tmp_path, path))
    assert torch.equal(old, new)


@pytest.mark.parametrize(("name", "whole"), [("qwen3.5", "Qwen3_5"), ("qwen3.5-moe", "Qwen3_5Moe")])
def test_the_language_model_of_one_that_reads_images(
    make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, name: str, whole: str
) -> None:
    """The same weights in a checkpoint with an encoder of images."""
    tiny = make_tiny(named(name))
    kind = getattr(transformers, f"{whole}ForConditionalGeneration")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    model = kind(kind.config_class(text_config=tiny.model.config.to_dict(), vision_config=vision)).float().eval()
    model.model.language_model.load_state_dict(tiny.model.model.state_dict())
    model.lm_head.load_state_dict(tiny.model.lm_head.state_dict())
    model.save_pretrained(tmp_path)
    tokens_T = tokens_for(97)
    found, expected = (load_model(path, dtype="float32") for path in (tmp_path, tiny.path))
    assert found.architecture == f"{whole}ForConditionalGeneration"
    assert found.num_parameters == expected.num_parameters
    assert torch.equal(run(found, tokens_T, [40]), run(expected, tokens_T, [40]))
    values = json.loads((tmp_path / "config.json").read_text())
    read = REGISTERED[found.architecture].read_config
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        read({**values, "tie_word_embeddings": True})
    with pytest.raises(Unsupported, match="text_config: attn_output_gate"):
        read({**values, "text_config": {**values["text_config"], "attn_output_gate": False}})


def test_rows_by_head_become_rows_by_part() -> None:
    rows = torch.tensor([[head * 10 + part] for head in (1, 2) for part in (0, 1, 1, 2)])
    qwen3_next.gather_parts_(rows, 2, (1, 2, 1))
    assert rows.flatten().tolist() == [10, 20, 11, 11, 21, 21, 12, 22]


# Configurations.


def config_of(make_tiny: Callable[[Case], TinyCheckpoint], name: str, **changes: Any) -> Any:
    values = json.loads((make_tiny(named(name)).path / "config.json").read_text())
    values |= changes
    return REGISTERED[values["architectures"][0]].read_config(values)


REFUSED: tuple[tuple[str, dict[str, Any], type[QuireError]], ...] = (
    ("mamba2", {"num_heads": 7}, CheckpointError),
    ("mamba2", {"n_groups": 3}, CheckpointError),
    ("mamba2", {"conv_kernel": 1}, CheckpointError),
    ("mamba2", {"num_hidden_layers": 100_000}, CheckpointError),
    ("mamba2", {"time_step_limit": [0.5]}, CheckpointError),
    ("mamba2", {"time_step_limit": [0.5, 0.1]}, CheckpointError),
    ("mamba2", {"time_step_limit": ["0", 1]}, CheckpointError),
    ("mamba2", {"model_type": "mamba"}, CheckpointError),
    ("mamba2", {"hidden_act": "relu"}, Unsupported),
    ("mamba2", {"residual_in_fp32": 1}, CheckpointError),
    ("mamba2", {"quantization_config": {"bits": 4}}, Unsupported),
    ("bamba", {"attn_layer_indices": [3]}, CheckpointError),
    ("bamba", {"attn_layer_indices": 1}, CheckpointError),
    ("bamba", {"attn_rotary_emb": 8}, Unsupported),
    ("bamba", {"mamba_d_head": 7}, CheckpointError),
    ("bamba", {"num_experts": 4}, Unsupported),
    ("bamba", {"embedding_multiplier": 2.0}, Unsupported),
    ("falcon-h1", {"ssm_multipliers": [1.0, 2.0]}, CheckpointError),
    ("falcon-h1", {"mlp_multipliers": [1.0, None]}, CheckpointError),
    ("falcon-h1", {"key_multiplier": 0}, CheckpointError),
    ("falcon-h1", {"attn_layer_indices": [1]}, Unsupported),
    ("falcon-h1", {"mamba_use_mlp": False}, Unsupported),
    ("falcon-h1", {"mamba_d_ssm": 65}, CheckpointError),
    ("falcon-h1", {"partial_rotary_factor": 0.5}, Unsupported),
    ("granite-4", {"position_embedding_type": "alibi"}, Unsupported),
    ("granite-4", {"layer_types": ["mamba", "moe", "mamba"]}, Unsupported),
    ("granite-4", {"num_experts_per_tok": 7}, CheckpointError),
    ("lfm2", {"layer_types": ["conv", "sliding_attention", "conv"]}, Unsupported),
    ("lfm2", {"layer_types": ["conv"]}, CheckpointError),
    ("lfm2", {"conv_dim": 64}, Unsupported),
    ("lfm2", {"use_pos_enc": False}, Unsupported),
    ("lfm2", {"block_use_swiglu": False}, Unsupported),
    ("lfm2", {"conv_L_cache": 1}, CheckpointError),
    ("lfm2", {"hidden_act": "gelu"}, Unsupported),
    ("lfm2-moe", {"layer_types": None}, CheckpointError),
    ("lfm2-moe", {"num_experts_per_tok": 7}, CheckpointError),
    ("lfm3", {"layer_types": ["conv", "moe", "conv"]}, Unsupported),
    ("lfm3", {"sliding_window": None}, CheckpointError),
    ("lfm3", {"hidden_act": "gelu"}, Unsupported),
    ("nemotron-h", {"layers_block_type": ["mamba", "mlp", "conv"]}, Unsupported),
    ("nemotron-h", {"layers_block_type": []}, CheckpointError),
    ("nemotron-h", {"mlp_hidden_act": "silu"}, Unsupported),
    ("nemotron-h", {"sliding_window": 4}, Unsupported),
    ("nemotron-h", {"n_group": 3}, CheckpointError),
    ("nemotron-h", {"n_groups": 3}, CheckpointError),
    ("nemotron-h", {"tie_word_embeddings": True}, Unsupported),
    ("nemotron-h", {"attention_bias": True}, Unsupported),
    ("qwen3-next", {"layer_types": ["full_attention"] * 3 + ["conv"]}, Unsupported),
    ("qwen3-next", {"linear_num_value_heads": 5}, CheckpointError),
    ("qwen3-next", {"num_experts": 0}, CheckpointError),
    ("qwen3-next", {"mlp_only_layers": [4]}, CheckpointError),
    ("qwen3-next", {"use_sliding_window": True}, Unsupported),
    ("qwen3.5", {"num_experts": 4}, Unsupported),
    ("qwen3.5", {"mamba_ssm_dtype": "bfloat16"}, Unsupported),
    ("qwen3.5-moe", {"mlp_only_layers": [1]}, Unsupported),
    ("qwen3.5-moe", {"decoder_sparse_step": 2}, Unsupported),
    ("qwen3.5", {"vision_config": {"depth": 2}}, Unsupported),
)


@pytest.mark.parametrize(("name", "changes", "kind"), REFUSED, ids=lambda one: str(one)[:60])
def test_what_is_not_computed_is_refused_by_name(
    make_tiny: Callable[[Case], TinyCheckpoint], name: str, changes: dict[str, Any], kind: type[QuireError]
) -> None:
    with pytest.raises(kind, match=r"config\.json") as caught:
        config_of(make_tiny, name, **changes)
    assert any(field in str(caught.value) for field in (*changes, "mamba_n_heads"))


DECIDING: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mamba2", {"time_step_limit": [0.0, 2.0]}),
    ("mamba2", {"residual_in_fp32": False}),
    ("mamba2", {"use_conv_bias": False}),
    ("mamba2", {"layer_norm_epsilon": 1e-3}),
    ("bamba", {"attn_layer_indices": [2]}),
    ("bamba", {"mamba_proj_bias": True}),
    ("falcon-h1", {"ssm_in_multiplier": 2.0}),
    ("falcon-h1", {"ssm_multipliers": None}),
    ("falcon-h1", {"key_multiplier": 2.0}),
    ("falcon-h1", {"mlp_multipliers": [1.0, 2.0]}),
    ("falcon-h1", {"mamba_rms_norm": True}),
    ("lfm2", {"conv_bias": True}),
    ("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}),
    ("lfm2-moe", {"use_expert_bias": False}),
    ("lfm2-moe", {"routed_scaling_factor": 2.0}),
    ("lfm3", {"use_attention_gate": False}),
    ("lfm3", {"use_sandwich_norm": False}),
    ("lfm3", {"layer_types": ["conv", "full_attention", "full_attention"]}),
    ("nemotron-h", {"time_step_min": 0.1}),
    ("nemotron-h", {"layers_block_type": ["mamba", "mlp", "attention"]}),
    ("nemotron-h", {"moe_latent_size": 4}),
    ("qwen3-next", {"norm_topk_prob": False}),
    ("qwen3-next", {"linear_key_head_dim": 4}),
)


@pytest.mark.parametrize(("name", "changes"), DECIDING, ids=lambda one: str(one)[:60])
def test_what_decides_the_logits_is_in_the_canonical_form(
    make_tiny: Callable[[Case], TinyCheckpoint], name: str, changes: dict[str, Any]
) -> None:
    plain = config_of(make_tiny, name).canonical()
    assert config_of(make_tiny, name, **changes).canonical() != plain
    assert config_of(make_tiny, name, initializer_range=0.5, chunk_size=64).canonical() == plain


def test_older_spellings_of_granite(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path) -> None:
    """Kinds of blocks as they are published, and both names of the experts."""
    older = {
        "layer_types": None,
        "layers_block_type": ["mamba", "attention", "mamba"],
        "position_embedding_type": "nope",
    }
    assert config_of(make_tiny, "granite-4", **older) == config_of(make_tiny, "granite-4")
    path = make_tiny(named("granite-4")).path
    tensors = load_file(path / SINGLE_FILE)
    published, ours = granite_moe_hybrid.MIXTURES
    assert any(published[1] in name for name in tensors)
    for old, new in zip(published, ours, strict=True):
        tensors = {name.replace(f"moe.{old}", f"moe.{new}"): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    tokens_T = tokens_for(97)
    old_run, new_run = (run(load_model(one, dtype="float32"), tokens_T, [40]) for one in (path, tmp_path))
    assert torch.equal(old_run, new_run)


def test_older_spellings_of_nemotron_h(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    new = config_of(make_tiny, "nemotron-h")
    assert config_of(make_tiny, "nemotron-h", layers_block_type=None, hybrid_override_pattern="ME*") == new
    assert config_of(make_tiny, "nemotron-h", n_groups=8, mamba_n_groups=2) == new
    assert config_of(make_tiny, "nemotron-h", layers_block_type=["mamba", "moe", "attention"]) == new


def test_older_spellings_of_lfm2() -> None:
    values = {**GEOMETRY, "architectures": ["Lfm2ForCausalLM"], "block_multiple_of": 16}
    new = lfm2.read_lfm2_config(
        {**values, "layer_types": ["conv", "conv", "full_attention"], "tie_word_embeddings": False}
    )
    del values["intermediate_size"]
    old = lfm2.read_lfm2_config({**values, "full_attn_idxs": [2], "block_ff_dim": 56, "tie_embedding": False})
    assert old == new
    assert new.trunk.intermediate_size == 48
    assert lfm2.read_lfm2_config({**values, "block_ff_dim": 56}).attending == (0, 1, 2)


def test_infinity_may_be_written_in_three_ways(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    found = {
        config_of(make_tiny, "mamba2", time_step_limit=limit).canonical()
        for limit in ([0.0, float("inf")], [0, {"__float__": "Infinity"}], None)
    }
    assert len(found) == 1
