"""Logits of every family against ``transformers``, through the runner and the state: whole and
chunked prefill, decode, ragged batches, verify, fork and rewind at every position, save and load
into another page size.

Windows are shorter than the sequences by far, so most positions of a decoded sequence cannot be
gone back to: there the state must refuse, and leave everything as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from tests.exact import Float32Bound, run_exactly
from torch import Tensor

from quire import LLM
from quire.base.errors import FailedPrecondition
from quire.base.types import Add, Chunk, Commit, Fork, Pop, Remove, Step, TokenTree

VOCAB, LENGTH, LAYERS, WIDTH = 101, 26, 3, 48
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 300.0, "factor": 8.0, "original_max_position_embeddings": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 200.0,
    "short_factor": [1.0, 1.1, 1.4, 2.0],
    "long_factor": [1.2, 2.0, 4.0, 9.0],
}
# transformers' experts that run in float64 too.
EAGER = {"experts_implementation": "eager"}
EXPERTS = {**EAGER, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENT = {
    **EAGER,
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
"""Heads of K are 10 wide, those of V 7, a stored row 28."""
MANY_EXPERTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
}
MAMBA = {
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 2,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 16,
    "hidden_size": 32,
}
MIXED = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
SHARED = {
    "head_dim": 16,
    "sliding_window": 5,
    "vocab_size_per_layer_input": 101,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 9.0,
}
GEMMA3N = {
    **SHARED,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
    "vocab_size_per_layer_input": 90,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.9, 0.0, 0.6, 0.0, 0.0, 0.0],
}
NEMOTRON = {
    **EAGER,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 8,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 12,
    "time_step_min": 0.4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "moe_latent_size": 16,
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
DEEPSEEK_YARN = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16, "attention_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral-window": ("Mistral", {"sliding_window": 7}),
    "ministral3": (
        "Ministral3",
        {"head_dim": 8, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.7}},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"use_sliding_window": False, "head_dim": 16}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN, "head_dim": 16}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "phi3-window": ("Phi3", {"sliding_window": 5, "partial_rotary_factor": 0.5}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 5,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3n": ("Gemma3n", GEMMA3N),
    "gemma4": (
        "Gemma4",
        {
            **SHARED,
            "num_hidden_layers": 5,
            "num_kv_shared_layers": 2,
            "layer_types": [*["full_attention", "sliding_attention"] * 2, "full_attention"],
            "global_head_dim": 24,
            "use_double_wide_mlp": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            **EAGER,
            **SHARED,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 4, "sliding_window": 7}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm-2": (
        "StableLm",
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 7.0,
        },
    ),
    "glm": ("Glm", {"head_dim": 8}),
    "glm4": ("Glm4", {"head_dim": 8}),
    "mixtral": ("Mixtral", {**EAGER, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 9}),
    "phimoe": (
        "Phimoe",
        {
            **EAGER,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
            "rope_parameters": {
                **LONGROPE,
                "short_mscale": 1.2,
                "long_mscale": 1.4,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gpt-oss": (
        "GptOss",
        {
            **EAGER,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 7,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**LATENT, **MANY_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1, "rope_parameters": DEEPSEEK_YARN},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**LATENT, **MANY_EXPERTS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, **MANY_EXPERTS, "first_k_dense_replace": 1, "rope_parameters": DEEPSEEK_YARN},
    ),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, **MANY_EXPERTS, "n_group": 1, "topk_group": 1}),
    "youtu": ("Youtu", {**LATENT, "attention_bias": True}),
    "mamba2": ("Mamba2", MAMBA),
    "bamba": ("Bamba", {**MIXED, "attn_layer_indices": [1]}),
    "falcon-h1": (
        "FalconH1",
        {**MIXED, "mamba_d_ssm": 64, "key_multiplier": 0.7, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3]},
    ),
    "granite-4": (
        "GraniteMoeHybrid",
        {
            **MIXED,
            **EAGER,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lfm2": ("Lfm2", {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "lfm2-moe": (
        "Lfm2Moe",
        {**EXPERTS, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    ),
    "lfm3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 5,
            "conv_L_cache": 4,
            "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        },
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "qwen3-next": ("Qwen3Next", {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40}),
    "qwen3.5": ("Qwen3_5", DELTA),
}
"""A name, the family's in transformers, and what differs from ``SIZES``."""
ONE_ROPE = {
    kind: {"rope_parameters": {**rope, **{f"short_{one[5:]}": rope[one] for one in rope if one.startswith("long_")}}}
    for kind, (_, changes) in FAMILIES.items()
    if "long_factor" in (rope := changes.get("rope_parameters", {}))
}
"""Fields with which transformers' frequencies stay as a sequence grows beyond the short factors, as
those of an LLM do: for runs of any length."""


PAGE_SIZES = [1, 5, 16]
CHUNKS = [LENGTH, 1, 7, 2, 17, 25]
STATES = {
    "llama3",
    "mistral-window",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gpt-oss",
    "deepseek-v3",
    "mamba2",
    "bamba",
    "falcon-h1",
    "lfm2",
    "lfm3",
    "qwen3-next",
}
"""Families that between them have every kind of state: K and V, windows in all layers and in some,
learned sinks, latent rows, rows of another layer, recurrent layers alone, beside and between
attention, also with windows.
"""
OF_THE_FAMILY = {
    "test_prefill_in_chunks_and_decode",
    "test_ragged_batch_of_prompts_chunks_and_decodes",
}
"""Tests of what a family computes; the others are of what its state does."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each family with each test of what it computes, each kind of state with all tests; everything
    together is slow.

    The page size that a family has in a test that is not slow goes round with the families, the
    tests and the chunks.
    """
    if "model" not in metafunc.fixturenames:
        return
    tests = sorted(
        name for name, found in vars(metafunc.module).items() if name.startswith("test_") and callable(found)
    )
    chunked = "chunk" in metafunc.fixturenames
    name = metafunc.function.__name__
    cases = []
    for number, family in enumerate(sorted(FAMILIES)):
        for turn, chunk in enumerate(CHUNKS if chunked else [0]):
            usual = (number + turn + tests.index(name)) % len(PAGE_SIZES)
            quick = turn % 2 == number % 2 if family in STATES and chunked else family in STATES
            quick = quick or (name in OF_THE_FAMILY and turn == number % (2 if chunked else 1))
            for index, size in enumerate(PAGE_SIZES):
                values = (family, size, chunk) if chunked else (family, size)
                cases.append(pytest.param(*values, marks=() if quick and index == usual else pytest.mark.slow))
    names = "model, page_size, chunk" if chunked else "model, page_size"
    metafunc.parametrize(names, cases, indirect=["model"], scope=None)


class Model(NamedTuple):
    path: Path
    tokens: list[int]
    expected_TV: Tensor
    """Logits of ``tokens`` by transformers, in float64."""
    bound: Float32Bound
    """How far off a float32 run may be."""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, changes = FAMILIES[request.param]
    torch.manual_seed(sorted(FAMILIES).index(request.param))
    kind = getattr(transformers, f"{name}ForCausalLM", None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    peer = kind(kind.config_class(**{**SIZES, **changes})).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            # The initial weights are so small that all logits are nearly equal.
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
        for name, buffer in peer.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.3 * torch.randn_like(buffer))
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    path = tmp_path_factory.mktemp(request.param)
    peer.save_pretrained(path)
    tokens_T = torch.randint(3, VOCAB, (LENGTH,))
    exact = run_exactly(peer, tokens_T)
    return Model(path, tokens_T.tolist(), exact, Float32Bound(peer, tokens_T, exact))


@pytest.fixture
def llm(page_size: int, model: Model) -> LLM:
    return LLM(model.path, dtype="float32", page_size=page_size, kv_cache_memory="8MiB")


def assert_same(found_TV: Tensor, model: Model, start: int = 0) -> None:
    """``found`` are the logits from position ``start`` on, on any device."""
    found_TV = found_TV.cpu()
    expected_TV = model.expected_TV[start : start + len(found_TV)]
    assert found_TV.shape == expected_TV.shape
    assert torch.equal(found_TV.argmax(-1), expected_TV.argmax(-1))
    error = float((found_TV - expected_TV).abs().max())
    assert error <= model.bound, f"error {error:.2e}, expected at most {float(model.bound):.2e}"


def run(llm: LLM, seq: int, tokens: list[int]) -> Tensor:
    return llm.engine.runner.execute(Step(chunks=(Chunk(seq, tokens, logits="all"),))).logits_RV.cpu()


def new(llm: LLM) -> int:
    seq = llm.engine.runner.new_seq()
    llm.engine.runner.execute(Step(edits=(Add(seq),)))
    return seq


def edit(llm: LLM, *edits: Any) -> None:
    llm.engine.runner.execute(Step(edits=edits))


def test_prefill_in_chunks_and_decode(llm: LLM, model: Model, chunk: int) -> None:
    seq = new(llm)
    parts = [run(llm, seq, model.tokens[start : start + chunk]) for start in range(0, LENGTH, chunk)]
    assert_same(torch.cat(parts), model)


def test_ragged_batch_of_prompts_chunks_and_decodes(llm: LLM, model: Model) -> None:
    """Sequences at different places run together, each against the same expected rows."""
    starts = [0, 0, 3, 9, 20, 24, 25]
    counts = [LENGTH, 1, 5, 17, 1, 2, 1]
    seqs = [new(llm) for _ in starts]
    for seq, start in zip(seqs, starts, strict=True):
        if start:
            run(llm, seq, model.tokens[:start])
    chunks = [
        Chunk(seq, model.tokens[start : start + count], logits="all")
        for seq, start, count in zip(seqs, starts, counts, strict=True)
    ]
    found = llm.engine.runner.execute(Step(chunks=tuple(chunks)))
    for index, start in enumerate(starts):
        assert_same(found.rows(index), model, start)


@pytest.mark.turns(2)
def test_after_fork_at_every_position(llm: LLM, model: Model) -> None:
    state, parent = llm.engine.runner.state, new(llm)
    run(llm, parent, model.tokens[:10])
    run(llm, parent, model.tokens[10:])
    wrong = [(token + 1) % VOCAB for token in model.tokens]
    for position in range(1, LENGTH):
        # Recurrent layers: from the nearest state that is kept.
        start = state.nearest_reachable(parent, position)
        if state.parts.recurrent is not None:
            assert start == (10 if position >= 10 else 0)
            if start < position:
                with pytest.raises(FailedPrecondition, match=f"running {position - start} tokens again"):
                    edit(llm, Fork(parent, llm.engine.runner.new_seq(), position))
        elif not state.forgets:
            assert start == position
        child = llm.engine.runner.new_seq()
        other = llm.engine.runner.new_seq()
        edit(llm, Fork(parent, child, start), Fork(parent, other, start))
        run(llm, other, wrong[start:])  # a sibling that goes another way must not show
        assert_same(run(llm, child, model.tokens[start:]), model, start)
        edit(llm, Remove(child), Remove(other))
    state.check()


@pytest.mark.turns(2)
def test_after_rewind_to_every_position(llm: LLM, model: Model) -> None:
    """Each rewind lies before the forward of the one before it: with windows, much is
    gone by then."""
    state, seq = llm.engine.runner.state, new(llm)
    run(llm, seq, model.tokens)
    refused = 0
    for position in reversed(range(LENGTH)):
        if state.nearest_reachable(seq, position) != position:
            with pytest.raises(FailedPrecondition, match="reach"):
                edit(llm, Pop(seq, LENGTH - position))
            with pytest.raises(FailedPrecondition, match="reach"):
                edit(llm, Fork(seq, llm.engine.runner.new_seq(), position))
            assert state.sequence_length(seq) == LENGTH
            edit(llm, Remove(seq))
            seq, refused = new(llm), refused + 1
            for part in (model.tokens[:position], model.tokens[position:]):
                if part:
                    run(llm, seq, part)
        edit(llm, Pop(seq, LENGTH - position))
        assert_same(run(llm, seq, model.tokens[position:]), model, position)
    assert (refused > 0) == state.forgets
    state.check()


@pytest.mark.turns(2)
def test_rewinds_of_a_decoded_sequence_are_exact_or_refused(llm: LLM, model: Model) -> None:
    state, seq = llm.engine.runner.state, new(llm)
    for token in model.tokens:
        run(llm, seq, [token])
    for position in range(LENGTH):
        child = llm.engine.runner.new_seq()
        if state.nearest_reachable(seq, position) == position:
            edit(llm, Fork(seq, child, position))
            assert_same(run(llm, child, model.tokens[position:]), model, position)
            edit(llm, Remove(child))
        else:
            assert state.forgets
            with pytest.raises(FailedPrecondition, match="reach"):
                edit(llm, Fork(seq, child, position))
    state.check()


@pytest.mark.turns(2)
def test_verify_then_truncate(llm: LLM, model: Model) -> None:
    """Drafts, most of them wrong, run in one forward; the state after taking them back goes on
    rightly.
    """
    seq = new(llm)
    run(llm, seq, model.tokens[:8])
    for position in range(8, LENGTH - 4):
        draft = [model.tokens[position], model.tokens[position + 1], 4, 4]
        found = run(llm, seq, draft)
        assert_same(found[:2], model, position)
        kept = llm.engine.runner.state.nearest_reachable(seq, position + 1)
        edit(llm, Pop(seq, position + 4 - kept))
        if kept <= position:  # the tokens that a recurrent state is short of
            run(llm, seq, model.tokens[kept : position + 1])


@pytest.mark.turns(2)
def test_verify_trees_then_commit(llm: LLM, model: Model) -> None:
    """A tree with the right tokens on one path; what follows a commit is as if they had come one by
    one.
    """
    seq = new(llm)
    run(llm, seq, model.tokens[:8])
    position = 8
    while position + 3 < LENGTH:
        one, two, three = model.tokens[position : position + 3]
        wrong = (two + 1) % VOCAB
        # Two roots; below the right one a wrong and a right child; the third token below both.
        nodes, parents = [wrong, one, wrong, two, three, three], (-1, -1, 1, 1, 2, 3)
        tree = Chunk(seq, nodes, tree=TokenTree(parents), logits="all")
        found = llm.engine.runner.execute(Step(chunks=(tree,))).logits_RV.cpu()
        assert_same(found[[1, 3, 5]], model, position)
        leaf = (1, 3, 5)[position % 3]
        edit(llm, Commit((seq,), (leaf,)))
        position += 1 + position % 3
        assert llm.engine.runner.state.sequence_length(seq) == position
    assert_same(run(llm, seq, model.tokens[position:]), model, position)
    llm.engine.runner.state.check()


@pytest.mark.turns(2)
def test_after_save_and_load_into_another_page_size(llm: LLM, model: Model, tmp_path: Path) -> None:
    other = LLM(model.path, dtype="float32", page_size=7, kv_cache_memory="8MiB")
    for length in (2, 7, 16, LENGTH):
        with llm.session(model.tokens[:length]) as session:
            session.save(tmp_path / "state.quire")
            with other.load_session(tmp_path / "state.quire") as restored:
                assert restored.tokens == model.tokens[:length]
                assert_same(restored.logits().unsqueeze(0), model, length - 1)


def test_the_suite_sees_a_difference(llm: LLM, model: Model) -> None:
    """One wrong token early on is far outside of the tolerance at the end."""
    tokens = list(model.tokens)
    tokens[3] = (tokens[3] + 1) % VOCAB
    seq = new(llm)
    found = run(llm, seq, tokens)
    assert torch.equal(found[:3].argmax(-1), model.expected_TV[:3].argmax(-1))
    with pytest.raises(AssertionError):
        assert_same(found[5:], model, 5)
    assert np.isfinite(found.numpy()).all()
