"""Logits of every family against ``transformers`` in float32, through the runner and the state: whole and chunked
prefill, decode, ragged batches, verify, fork and rewind at every position, save and load into another page size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM
from quire.types import Add, Chunk, Fork, Pop, Remove, Step

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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16, "attention_bias": True}),
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"use_sliding_window": False, "head_dim": 16}),
}

# Rounding errors of the sums of one layer grow like the root of their length, and those of the layers add up.
TOLERANCE = LAYERS * math.sqrt(WIDTH) * torch.finfo(torch.float32).eps


class Model(NamedTuple):
    path: Path
    tokens: list[int]
    expected_TV: Tensor
    """Logits of ``tokens`` by transformers."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    name, changes = FAMILIES[request.param]
    torch.manual_seed(sorted(FAMILIES).index(request.param))
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    peer = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            # The initial weights are so small that all logits are nearly equal.
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param)
    peer.save_pretrained(path)
    tokens = torch.randint(3, VOCAB, (LENGTH,)).tolist()
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0].clone()
    return Model(path, tokens, expected)


@pytest.fixture(params=[1, 5, 16])
def llm(request: pytest.FixtureRequest, model: Model) -> LLM:
    return LLM(model.path, dtype="float32", page_size=request.param, kv_cache_memory="8MiB")


def assert_same(found_TV: Tensor, expected_TV: Tensor) -> None:
    assert found_TV.shape == expected_TV.shape
    assert torch.equal(found_TV.argmax(-1), expected_TV.argmax(-1))
    error = (found_TV - expected_TV).abs().max() / expected_TV.abs().max()
    assert error < TOLERANCE, f"relative error {error:.2e}"


def run(llm: LLM, seq: int, tokens: list[int]) -> Tensor:
    return llm.engine.runner.execute(Step(chunks=(Chunk(seq, tokens, logits="all"),))).logits_RV


def new(llm: LLM) -> int:
    seq = llm.engine.runner.new_seq()
    llm.engine.runner.execute(Step(edits=(Add(seq),)))
    return seq


def edit(llm: LLM, *edits: Any) -> None:
    llm.engine.runner.execute(Step(edits=edits))


@pytest.mark.parametrize("chunk", [LENGTH, 1, 2, 7, 17, 25])
def test_prefill_in_chunks_and_decode(llm: LLM, model: Model, chunk: int) -> None:
    seq = new(llm)
    parts = [run(llm, seq, model.tokens[start : start + chunk]) for start in range(0, LENGTH, chunk)]
    assert_same(torch.cat(parts), model.expected_TV)


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
    for index, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert_same(found.rows(index), model.expected_TV[start : start + count])


def test_after_fork_at_every_position(llm: LLM, model: Model) -> None:
    parent = new(llm)
    run(llm, parent, model.tokens)
    wrong = [(token + 1) % VOCAB for token in model.tokens]
    for position in range(1, LENGTH):
        child = llm.engine.runner.new_seq()
        other = llm.engine.runner.new_seq()
        edit(llm, Fork(parent, child, position), Fork(parent, other, position))
        run(llm, other, wrong[position:])  # a sibling that goes another way must not show
        assert_same(run(llm, child, model.tokens[position:]), model.expected_TV[position:])
        edit(llm, Remove(child), Remove(other))
    llm.engine.runner.state.check()


def test_after_rewind_to_every_position(llm: LLM, model: Model) -> None:
    seq = new(llm)
    run(llm, seq, model.tokens)
    for position in reversed(range(LENGTH)):
        edit(llm, Pop(seq, LENGTH - position))
        assert_same(run(llm, seq, model.tokens[position:]), model.expected_TV[position:])


def test_verify_then_truncate(llm: LLM, model: Model) -> None:
    """Drafts, most of them wrong, run in one forward; the state after taking them back goes on rightly."""
    seq = new(llm)
    run(llm, seq, model.tokens[:8])
    for position in range(8, LENGTH - 4):
        draft = [model.tokens[position], model.tokens[position + 1], 4, 4]
        found = run(llm, seq, draft)
        assert_same(found[:2], model.expected_TV[position : position + 2])
        edit(llm, Pop(seq, 3))


def test_after_save_and_load_into_another_page_size(llm: LLM, model: Model, tmp_path: Path) -> None:
    other = LLM(model.path, dtype="float32", page_size=7, kv_cache_memory="8MiB")
    for length in (2, 7, 16, LENGTH):
        with llm.session(model.tokens[:length]) as session:
            session.save(tmp_path / "state.quire")
            with other.load_session(tmp_path / "state.quire") as restored:
                assert restored.tokens == model.tokens[:length]
                assert_same(restored.logits().unsqueeze(0), model.expected_TV[length - 1 : length])


def test_the_suite_sees_a_difference(llm: LLM, model: Model) -> None:
    """One wrong token early on is far outside of the tolerance at the end."""
    tokens = list(model.tokens)
    tokens[3] = (tokens[3] + 1) % VOCAB
    seq = new(llm)
    found = run(llm, seq, tokens)
    assert torch.equal(found[:3].argmax(-1), model.expected_TV[:3].argmax(-1))
    with pytest.raises(AssertionError):
        assert_same(found[5:], model.expected_TV[5:])
    assert np.isfinite(found.numpy()).all()
