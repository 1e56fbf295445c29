"""How the pool is sized."""

from __future__ import annotations

import pytest
import torch

from quire import LLM, ResourceExhausted, SamplingParams


@pytest.mark.parametrize(("max_model_len", "page_size"), [(40, 16), (8, 16), (33, 32), (7, 1)])
def test_pool_holds_one_sequence_of_full_length(max_model_len: int, page_size: int) -> None:
    """Rounding to pages must not take away what one sequence may need."""
    llm = LLM("tiny-python", dtype="float32", max_model_len=max_model_len, max_num_seqs=1, page_size=page_size)
    assert llm.engine.checks.pool_tokens >= max_model_len
    prompt = list(range(5, 5 + max_model_len - 2))
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 2


def test_pool_is_not_larger_than_can_be_used() -> None:
    llm = LLM("tiny-python", dtype="float32", max_model_len=64, max_num_seqs=3)
    assert llm.engine.checks.pool_tokens == 3 * 64


def test_memory_for_less_than_a_page_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match="page"):
        LLM("tiny-python", kv_cache_memory=100)
    with pytest.raises(ResourceExhausted, match="page"):
        LLM("tiny-python", kv_cache_memory="64KiB", page_size=1000)


def test_attention_backends_agree() -> None:
    prompt, greedy = list(range(5, 60)), SamplingParams(temperature=0, max_tokens=12)
    texts = [
        LLM("tiny-python", dtype="float32", attention_backend=name, kv_cache_memory="16MiB")
        .generate(prompt, greedy)[0]
        .outputs[0]
        .token_ids
        for name in ("torch", "reference", "native", "auto")
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_pool_respects_the_limit_of_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container what the host has free says nothing: the pool is a quarter of what loading may
    use, too.
    """
    from quire import pool_budget

    monkeypatch.setattr(pool_budget, "free_memory", lambda device: 1 << 30)
    assert pool_budget.free_budget(torch.device("cpu")).nbytes == 1 << 28
    monkeypatch.setattr(pool_budget, "free_memory", lambda device: None)
    assert pool_budget.free_budget(torch.device("cpu")).nbytes > 0
