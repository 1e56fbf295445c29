"""The timeline: which phases requests go through, what steps run, and that little is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams, StructuredOutputs
from quire.base.caller_context import NOBODY, Caller, caller, on_behalf_of
from quire.contracts.executor_calls import DecodeInput, PrefillInput
from quire.engine import timeline as module
from quire.engine.request import Request
from quire.engine.timeline import RequestLane
from quire_inspector.views.timeline_reader import latencies, timeline_document

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB", max_num_batched_tokens=16) as made:
        yield made


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(300, 3000, length).tolist()


def last(llm: LLM) -> RequestLane:
    return llm.engine.timeline.ended_lanes()[-1]


def phases(lane: RequestLane) -> list[str]:
    return [phase for phase, _ in lane.phases]


def test_a_prompt_runs_in_chunks_and_then_decodes(llm: LLM) -> None:
    since = llm.engine.timeline.count
    (output,) = llm.generate([prompt(40)], GREEDY)
    lane, steps = last(llm), llm.engine.timeline.steps(since)
    assert phases(lane) == ["waiting", "prefill", "decode"]
    chunks = [chunk for step in steps for chunk in step.prefills]
    assert chunks == [(lane.number, 0, 16), (lane.number, 16, 16), (lane.number, 32, 8)]
    assert lane.numbers["chunks"] == 3
    assert [step.decodes for step in steps] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert [step.generated for step in steps] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert [step.number for step in steps] == list(range(since + 1, since + 9))
    for step in steps:
        assert 0 < step.schedule_seconds + step.model_seconds <= step.seconds
    assert lane.numbers["output_tokens"] == len(output.outputs[0].token_ids) == 6
    chosen = steps[0].start + steps[0].schedule_seconds
    assert lane.admitted == lane.phases[1][1] == pytest.approx(chosen, abs=1e-9)  # float64 of the same time
    assert lane.phases[2][1] == lane.numbers["first_token"]
    assert lane.finished == pytest.approx(
        lane.arrival + output.metrics.e2e_latency, abs=1e-9
    )  # float64 of monotonic times


def test_pages_and_queues_are_those_of_the_state(llm: LLM) -> None:
    requests = [llm.engine.submit(np.array(prompt(20, seed)), GREEDY)[0] for seed in (1, 2, 3)]
    while not all(request.output.token_ids for request in requests):
        llm.engine.step()
    step, state = llm.engine.timeline.steps()[-1], llm.engine.runner.state
    assert step.pages_free == state.num_pages - state.num_used_pages
    assert (step.running, step.waiting) == (3, 0)
    document = timeline_document(llm.engine.timeline)
    assert document["pages"] == {"total": state.num_pages, "free": step.pages_free}
    live = [lane for lane in document["requests"] if lane["phase"] != "finished"]
    assert [lane["output_tokens"] for lane in live] == [len(request.output.token_ids) for request in requests]
    llm.engine.end(requests)
    assert [lane.numbers["finish_reason"] for lane in llm.engine.timeline.ended_lanes()][-3:] == ["cancelled"] * 3


def test_what_a_prompt_found_is_told(llm: LLM) -> None:
    llm.reset_prefix_cache()
    tokens = prompt(64, 7)
    llm.generate([tokens], GREEDY)
    llm.generate([tokens], GREEDY)
    assert (last(llm).numbers["cached_tokens"], last(llm).numbers["by_tier"]) == (63, {"pool": 63})
    llm.generate([tokens[:40] + prompt(24, 8)], GREEDY)
    numbers = last(llm).numbers
    assert (numbers["cached_tokens"], numbers["miss"], numbers["missed_at"]) == (40, "other_text", 40)


@pytest.mark.parametrize(("memory", "back"), [(0, ["prefill"]), ("64MiB", ["loading"])])
def test_a_preempted_request_waits_and_comes_back(memory: int | str, back: list[str]) -> None:
    """Its state is computed again, or comes from host memory."""
    options = {"kv_cache_memory": "1MiB", "host_memory": memory, "enable_prefix_caching": False}
    with LLM("tiny-python", device="cpu", dtype="float32", **options) as llm:
        capacity = llm.engine.runner.state.capacity
        assert capacity is not None
        size = capacity // 2 - 20
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        requests: list[Request] = [llm.engine.submit(np.array(prompt(size, seed)), params)[0] for seed in (1, 2)]
        llm.engine.run(requests)
        lanes = llm.engine.timeline.ended_lanes()
        (away,) = [lane for lane in lanes if lane.numbers["preemptions"]]
        assert phases(away) == ["waiting", "prefill", "decode", "preempted", *back, "decode"]
        steps = llm.engine.timeline.steps()
        assert sum(step.preemptions for step in steps) == llm.engine.scheduler.num_preemptions == 1
        times = [at for _, at in away.phases]
        assert times == sorted(times)
        assert away.numbers["output_tokens"] == 60


def test_samples_of_a_prompt_have_a_lane_each(llm: LLM) -> None:
    since = llm.engine.timeline.count
    llm.generate([prompt(8, 3)], GREEDY.replace(n=3, temperature=1.0, seed=1))
    lanes = [lane for lane, _ in llm.engine.timeline.lanes(since)]
    assert [(lane.index, phases(lane)[-1]) for lane in lanes] == [(0, "decode"), (1, "decode"), (2, "decode")]
    assert [phases(lane) for lane in lanes[1:]] == [["waiting", "decode"]] * 2
    assert len({lane.request_id for lane in lanes}) == 1


def test_one_token_is_a_decode_too(llm: LLM) -> None:
    """It is drawn in the step of the prompt, in which the request also ends."""
    since = llm.engine.timeline.count
    llm.generate([prompt(8, 11)], GREEDY.replace(n=2, max_tokens=1, temperature=1.0, seed=1))
    first, second = (lane for lane, _ in llm.engine.timeline.lanes(since))
    assert (phases(first), phases(second)) == (["waiting", "prefill", "decode"], ["waiting", "decode"])
    for lane in (first, second):
        assert lane.phases[-1] == ("decode", lane.numbers["first_token"])
        assert lane.admitted == lane.phases[1][1]


def test_kinds_of_requests(llm: LLM) -> None:
    since = llm.engine.timeline.count
    with llm.session(prompt(8, 4)) as session:
        session.generate(GREEDY)
    kinds = [lane.kind for lane, _ in llm.engine.timeline.lanes(since)]
    assert kinds == ["run", "turn"]
    assert last(llm).numbers["finish_reason"] == "length"


def test_a_beam_search_counts_in_steps(llm: LLM) -> None:
    from quire import BeamSearchParams

    since, before = llm.engine.timeline.count, llm.engine.metrics.generation_tokens.value
    llm.beam_search([prompt(8, 5)], BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    assert [lane.kind for lane, _ in llm.engine.timeline.lanes(since)] == ["run"]
    steps = llm.engine.timeline.steps(since)
    assert [step.decodes for step in steps] == [0, 3, 3, 3]
    assert llm.engine.metrics.generation_tokens.value == before + 1 + 3 * 3


def ended_by(llm: LLM, text: str, params: SamplingParams) -> dict[str, object]:
    llm.generate([text], params)
    return last(llm).numbers


def test_ends_are_told_without_texts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    (output,) = llm.generate(["def fib(n):"], params.replace(ignore_eos=True))
    text, token = output.outputs[0].text, output.outputs[0].token_ids[3]
    stopped = ended_by(llm, "def fib(n):", params.replace(stop=[text[4:8]]))
    assert (stopped["finish_reason"], stopped["stop"]) == ("stop", "stop_string")
    assert ended_by(llm, "def fib(n):", params.replace(stop_token_ids=[token]))["stop"] == "stop_token"
    formed = ended_by(llm, "x = ", params.replace(structured_outputs=StructuredOutputs(choice=["1", "2"])))
    assert (formed["structured"], formed["stop"]) == ("choice", None)


def test_a_failure_is_told_by_its_class(llm: LLM) -> None:
    def broken(tokens: Sequence[int], logits: object) -> object:
        raise ValueError("a text that nobody else may see")

    (output,) = llm.generate([prompt(5, 6)], GREEDY.replace(logits_processors=[broken]))
    assert output.outputs[0].finish_reason == "error"
    numbers = last(llm).numbers
    assert numbers["finish_reason"] == "error"
    assert "nobody" not in str(timeline_document(llm.engine.timeline))
    assert numbers["error"] == type(output.outputs[0].failure).__name__


def test_an_ended_lane_keeps_nothing_of_its_request(llm: LLM) -> None:
    request = llm.engine.submit(np.array(prompt(5)), GREEDY)[0]
    llm.engine.run([request])
    assert last(llm).request_id == request.request_id
    gone = weakref.ref(request.output.sampler)
    del request
    gc.collect()
    assert gone() is None


def test_rings_are_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    line = module.Timeline(
        llm.engine.scheduler, llm.engine.stored, llm.engine.runner.state, frozenset(), llm.engine.metrics
    )
    monkeypatch.setattr(llm.engine.requests, "timeline", line)
    for number in range(module.LANES + 10):
        request = llm.engine.submit(np.array(prompt(3)), GREEDY)[0]
        llm.engine.end([request])
        assert line.ended_lanes()[-1].number == number + 1
    assert len(line.ended_lanes()) == module.LANES
    lane = line.ended_lanes()[-1]
    for number in range(200):
        lane.enter("decode" if number % 2 else "preempted", lane.arrival + number)
    assert len(lane.phases) == module.PHASES


def test_steps_after_a_number(llm: LLM) -> None:
    llm.generate([prompt(30)], GREEDY)
    line = llm.engine.timeline
    kept = line.steps()
    assert line.steps(line.count) == line.steps(line.count + 5) == []
    assert line.steps(line.count - 3) == kept[-3:]
    assert line.steps(0) == kept


def test_who_asked_is_noted(llm: LLM) -> None:
    who = Caller("key", "00-1-2-01")
    with on_behalf_of(who):
        llm.generate([prompt(4)], GREEDY)
    assert (last(llm).caller, last(llm).owner) == (who, "key")
    assert caller.get() is NOBODY
    llm.generate([prompt(4)], GREEDY)
    assert last(llm).owner == ""


def test_listeners_hear_of_ends_and_harm_nothing(llm: LLM) -> None:
    heard: list[RequestLane] = []

    def broken(lane: RequestLane) -> None:
        raise RuntimeError("no collector")

    llm.engine.timeline.on_end += [broken, heard.append]
    try:
        (output,) = llm.generate([prompt(4)], GREEDY)
    finally:
        llm.engine.timeline.on_end.clear()
    assert [lane.request_id for lane in heard] == [output.request_id]
    assert output.outputs[0].finish_reason == "length"


def test_drafts_of_the_executor_are_counted(llm: LLM) -> None:
    first = llm.executor.prefill(PrefillInput(input_ids=torch.tensor([prompt(12, 9)])))
    assert first.logits is not None
    best = first.logits[:, -1].argmax(-1, keepdim=True)
    before = timeline_document(llm.engine.timeline)["drafts"]
    found = llm.executor.speculative_decode(DecodeInput(input_ids=best, kv_cache=first.kv_cache), [1, 2, 3], 1.0)
    after = timeline_document(llm.engine.timeline)["drafts"]
    assert after["drafted"] == before["drafted"] + 3
    assert after["accepted"] == before["accepted"] + found.acceptance_count
    assert after["rate"] == pytest.approx(after["accepted"] / after["drafted"], abs=1e-4)  # told with 4 digits


def test_latencies_are_percentiles(llm: LLM) -> None:
    llm.generate([prompt(6, seed) for seed in range(20)], GREEDY)
    lanes = llm.engine.timeline.ended_lanes()[-20:]
    found = latencies(lanes, [0.1 * number for number in range(11)])
    assert found["inter_token"] == {"count": 11, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    whole = sorted(lane.finished - lane.arrival for lane in lanes if lane.finished is not None)
    assert found["request"]["count"] == 20
    assert whole[9] - 1e-6 <= found["request"]["p50"] <= whole[10] + 1e-6  # told in microseconds
    assert latencies([], [])["queue"] == {"count": 0, "p50": None, "p90": None, "p95": None, "p99": None}
