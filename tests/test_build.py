"""How the pool is sized."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, InvalidArgument, ResourceExhausted, SamplingParams
from quire.base.config import ExecutorConfig, MemoryConfig
from quire.build import EXECUTOR_FACTORY
from quire.models import loading
from quire.runner import pool_budget
from quire.weights import lazy_parameters


@pytest.mark.parametrize(("max_model_len", "page_size"), [(40, 16), (8, 16), (33, 32), (7, 1)])
def test_pool_holds_one_sequence_of_full_length(max_model_len: int, page_size: int) -> None:
    """Rounding to pages must not take away what one sequence may need."""
    llm = LLM("tiny-python", dtype="float32", max_model_len=max_model_len, max_num_seqs=1, page_size=page_size)
    assert llm.engine.checks.pool_tokens >= max_model_len
    prompt = list(range(5, 5 + max_model_len - 2))
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 2


def test_a_pool_smaller_than_the_longest_sequence_is_told() -> None:
    with LLM("tiny-python", dtype="float32", kv_cache_memory="1MiB") as llm:
        (note,) = (one for one in llm.capabilities()["notes"] if one.startswith("the KV pool holds"))
    assert note == (
        "the KV pool holds 128 tokens, and longer sequences than that are refused; max_model_len 4096 would take a "
        "kv_cache_memory of about 32.00 MiB (33,554,432 bytes)"
    )


def test_pool_is_not_larger_than_can_be_used() -> None:
    llm = LLM("tiny-python", dtype="float32", max_model_len=64, max_num_seqs=3)
    assert llm.engine.checks.pool_tokens == 3 * 64


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(lazy_parameters, "allocate", refuse)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_cache_memory": 100}, ResourceExhausted, "kv_cache_memory 100 holds no page of 16 tokens .*give a larger"),
        ({"kv_cache_memory": "64KiB", "page_size": 1000}, ResourceExhausted, "no page of 1000 tokens"),
        (
            {"kv_cache_memory": "900000GiB"},
            ResourceExhausted,
            r"kv_cache_memory is 900000.00 GiB \([\d,]+ bytes\), beside [\d.]+ MiB .* are free on cpu; give at most",
        ),
        ({"max_model_len": 1 << 20}, InvalidArgument, "max_model_len 1048576 is beyond the model's 4096 positions"),
    ],
)
def test_context_and_pool_are_checked_before_weights_are_read(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM("tiny-python", **options)


@pytest.mark.usefixtures("no_weights")
def test_an_executors_pool_is_checked_before_weights_are_read() -> None:
    memory = MemoryConfig(memory_pool_size=100)
    with pytest.raises(ResourceExhausted, match="memory_pool_size 100 holds no page"):
        EXECUTOR_FACTORY.create_executor(ExecutorConfig(model_info="tiny-python", memory_config=memory))


@pytest.mark.usefixtures("no_weights")
def test_what_weights_leave_is_what_the_pool_is_checked_against(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 2 * 13_902_336  # twice those in bfloat16
    monkeypatch.setattr(loading, "free_memory", lambda device: weights + 1000)
    monkeypatch.setattr(pool_budget, "free_memory", lambda device: weights + 1000)
    with pytest.raises(ResourceExhausted, match="of free memory for the KV pool on cpu hold no page of 16 tokens"):
        LLM("tiny-python", dtype="float32", page_size=16, max_model_len=64)


def test_quantised_weights_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 8 << 20  # 13.26 MiB in bfloat16, 3.9 MiB and the embedding in int4
    monkeypatch.setattr(loading, "free_memory", lambda device: free)
    helps = "give quantization int8 or int4, free some memory, or take a smaller model"
    with pytest.raises(ResourceExhausted, match=rf"needs 13.26 MiB \([\d,]+ bytes\) .* in torch.bfloat16, .*{helps}"):
        LLM("tiny-python", dtype="bfloat16", kv_cache_memory="4MiB")
    with LLM("tiny-python", dtype="bfloat16", kv_cache_memory="4MiB", quantization="int4") as llm:
        assert llm.engine.runner.model.quantization == "int4"


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
    monkeypatch.setattr(pool_budget, "free_memory", lambda device: 1 << 30)
    assert pool_budget.free_budget(torch.device("cpu")).nbytes == 1 << 28
    monkeypatch.setattr(pool_budget, "free_memory", lambda device: None)
    assert pool_budget.free_budget(torch.device("cpu")).nbytes > 0
