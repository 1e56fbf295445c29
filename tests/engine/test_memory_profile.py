"""The pool of a device is what the greatest step leaves. The device here is made up: tested are the
arithmetic, what runs, and that nothing of it stays.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.small_llms import Checkpoint, make_checkpoint

from quire import LLM, ResourceExhausted, SamplingParams, build
from quire.base.types import Step
from quire.kv.state import State
from quire.runner.local import LocalRunner
from quire.runner.memory_profile import (
    MemoryUse,
    capture_usual,
    captured_bytes,
    greatest_lengths,
    measured_budget,
    run_greatest_step,
)

MIB = 1 << 20


class MadeUpMemory:
    """A device of 1,000 MiB, of which others hold 100 MiB and PyTorch held ``peak``."""

    name = "cuda:7"

    def __init__(self, peak: int = 300 * MIB, free: int = 700 * MIB, error: Exception | None = None) -> None:
        self.peak, self._free, self.error = peak, free, error
        self.held: list[int] = []
        self.captures = 0

    def free(self) -> int:
        return self._free

    def use_of(self, run: Callable[[], int]) -> MemoryUse:
        self.held.append(run())
        if self.error is not None:
            raise self.error
        return MemoryUse(1000 * MIB, self.peak, 100 * MIB)

    def taken_by(self, run: Callable[[], object]) -> int:
        """20 MiB, then 3 MiB for each."""
        run()
        self.captures += 1
        return 3 * MIB if self.captures > 1 else 20 * MIB


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ((4, 10, 100), [3, 3, 2, 2]),
        ((4, 3, 100), [1, 1, 1]),
        ((2, 100, 16), [16, 16]),
        ((1, 2048, 1000), [1000]),
    ],
)
def test_the_greatest_step(limits: tuple[int, int, int], lengths: list[int]) -> None:
    assert greatest_lengths(*limits) == lengths


@pytest.mark.parametrize(("share", "peak", "left"), [(0.9, 300, 500), (1.0, 300, 600), (0.5, 300, 100), (0.4, 300, 0)])
def test_what_is_left(share: float, peak: int, left: int) -> None:
    budget = measured_budget(MadeUpMemory(peak * MIB), share, [1], lambda: 0)
    assert budget.nbytes == left * MIB
    for said in (f"{left} MiB of 1000 MiB on cuda:7", f"gpu_memory_utilization {share}", "300 MiB", "100 MiB"):
        assert said in budget.words


@pytest.mark.parametrize(
    ("sizes", "left", "ran"), [([], 600, []), ([4], 580, [4]), ([4, 3, 2, 1], 600 - 20 - 9, [4, 3])]
)
def test_captured_decodes_are_in_the_budget(sizes: list[int], left: int, ran: list[int]) -> None:
    """The second one tells what each of the others takes."""
    memory, seen = MadeUpMemory(), []
    budget = measured_budget(
        memory, 1.0, [1], lambda: 0, lambda: captured_bytes(memory, lambda size: not seen.append(size), sizes)
    )
    assert (budget.nbytes, seen) == (left * MIB, ran)
    assert (f"less {600 - left} MiB for captured decodes" in budget.words) == bool(sizes)


def test_sizes_are_captured_until_one_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    with caplog.at_level("INFO", logger="quire"):
        capture_usual(MadeUpMemory(), lambda size: not seen.append(size) and size > 2, [4, 3, 2, 1], progress=True)
        assert seen == [4, 3, 2]
        assert "captured decodes of 2 sizes, up to 4 sequences, in 20 MiB" in caplog.text
        caplog.clear()
        capture_usual(MadeUpMemory(), lambda size: False, [4, 3], progress=False)
        assert not caplog.text


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MadeUpMemory]:
    def give(**options: Any) -> MadeUpMemory:
        found = MadeUpMemory(**options)
        monkeypatch.setattr(build, "device_memory", lambda _: found)
        return found

    return give


OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 200}


def test_the_pool_is_what_the_step_leaves(device: Callable[..., MadeUpMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Step] = []
    states: list[weakref.ref[object]] = []
    execute, made = LocalRunner.execute, build.make_state

    def watched(self: LocalRunner, step: Step, *args: Any) -> Any:
        steps.append(step)
        return execute(self, step, *args)

    def watched_state(*args: Any, **options: Any) -> State:
        state = made(*args, **options)
        states.append(weakref.ref(state))
        return state

    monkeypatch.setattr(LocalRunner, "execute", watched)
    monkeypatch.setattr(build, "make_state", watched_state)
    memory = device(peak=798 * MIB)
    before = torch.get_rng_state()
    llm = LLM("tiny-python", **OPTIONS)
    assert torch.equal(before, torch.get_rng_state())
    # As many sequences, tokens and rows of logits as a step may have, once.
    (step,) = steps
    assert [len(chunk.tokens) for chunk in step.chunks] == [34, 34, 33, 33, 33, 33]
    assert {chunk.logits for chunk in step.chunks} == {"all"}
    state = llm.engine.runner.state
    per_token = state.num_bytes // (state.pool_sizes()[0] * state.page_size)
    # Pages of the profile's state: three for each sequence.
    assert memory.held == [6 * 3 * 16 * per_token]
    assert state.pool_sizes()[0] == 2 * MIB // (16 * per_token)
    # Nothing is left of it.
    gc.collect()
    assert states[0]() is None
    assert llm.engine.runner.revision == 0
    assert state.free_pages() == state.pool_sizes()
    assert llm.engine.runner.new_seq() == 0
    monkeypatch.undo()
    plain = LLM("tiny-python", kv_cache_memory="2MiB", **OPTIONS)
    assert plain.engine.runner.new_seq() == 0
    assert llm.engine.metrics.snapshot() == plain.engine.metrics.snapshot()
    params = SamplingParams(temperature=0.8, max_tokens=8)
    first, second = (one.generate("def add(", params)[0].outputs[0].token_ids for one in (llm, plain))
    assert first == second


def test_it_is_not_larger_than_can_be_used(device: Callable[..., MadeUpMemory]) -> None:
    device(peak=10 * MIB)
    assert LLM("tiny-python", **OPTIONS).engine.checks.pool_tokens == 6 * 512


def test_a_given_pool_is_not_measured(device: Callable[..., MadeUpMemory]) -> None:
    memory = device()
    LLM("tiny-python", kv_cache_memory="2MiB", **OPTIONS)
    assert memory.held == []


def test_no_page_fits(device: Callable[..., MadeUpMemory]) -> None:
    device(peak=800 * MIB)
    with pytest.raises(ResourceExhausted) as caught:
        LLM("tiny-python", **OPTIONS)
    for said in (
        "0 MiB of 1000 MiB on cuda:7",
        "less 800 MiB",
        "less 100 MiB",
        "no page of 16 tokens (",
        "give a greater",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), ResourceExhausted("no")])
def test_the_step_does_not_fit(device: Callable[..., MadeUpMemory], error: Exception) -> None:
    device(error=error)
    with pytest.raises(
        ResourceExhausted, match=r"200 tokens of 6 sequences .* 700 MiB .* smaller max_num_batched_tokens"
    ):
        LLM("tiny-python", **OPTIONS)


def test_what_is_wrong_with_the_step_is_told(device: Callable[..., MadeUpMemory]) -> None:
    device(error=RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal"):
        LLM("tiny-python", **OPTIONS)


def test_recurrent_states_of_few_sequences(
    hybrid: Checkpoint, device: Callable[..., MadeUpMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their states are large: the step has as many sequences as half of what is free holds."""
    lengths: list[list[int]] = []

    def watched(runner: LocalRunner, given: list[int]) -> None:
        lengths.append(given)
        run_greatest_step(runner, given)

    monkeypatch.setattr(build, "run_greatest_step", watched)
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    memory = device(peak=10 * MIB)
    llm = LLM(str(hybrid.path), **options)
    state_bytes = llm.engine.runner.state.geometry.state_bytes
    assert state_bytes
    device(peak=10 * MIB, free=2 * 3 * state_bytes)
    LLM(str(hybrid.path), **options)
    assert lengths == [[8] * 8, [22, 21, 21]]
    assert memory.held[0] >= 8 * state_bytes


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows(family: str, device: Callable[..., MadeUpMemory], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(family, tmp_path)
    memory = device(peak=10 * MIB)
    llm = LLM(str(checkpoint.path), max_num_seqs=3, max_num_batched_tokens=100)
    assert memory.held
    assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2
