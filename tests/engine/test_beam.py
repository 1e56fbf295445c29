"""Beam search against a search by brute force over a table of logits, and against transformers'."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import (
    CONTEXT,
    EOS,
    TOLERANCE,
    VOCAB,
    Checkpoint,
    MakeLLM,
    check,
    engine_of,
    greedy,
    random_tokens,
    record,
)

from quire import LLM, BeamSearchParams, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.base.outputs import BeamSearchOutput
from quire.engine.beam import BeamSearch, best_continuations, search
from quire.sampling.token_logprobs import logprobs_of, top_logprobs
from quire.text.detokenizer import IncrementalDetokenizer

PROMPT = random_tokens(12)
Found = list[tuple[list[int], float]]


def beams(width: int, count: int, **changes: Any) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": width, "max_tokens": count, "ignore_eos": True, **changes})


def found(output: BeamSearchOutput) -> Found:
    return [(sequence.token_ids, sequence.cum_logprob) for sequence in output.sequences]


def logprobs_after(llama: Checkpoint, prompt: Sequence[int]) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Log-probabilities of the next token, float64 [V], after the prompt and some tokens; each
    asked for once.
    """
    known: dict[tuple[int, ...], torch.Tensor] = {}

    def after(tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in known:
            known[tokens] = llama.logits([*prompt, *tokens])[-1].double().log_softmax(-1)
        return known[tokens]

    return after


def naive_search(
    after: Callable[[tuple[int, ...]], torch.Tensor], width: int, count: int, ends: set[int], penalty: float
) -> Found:
    """Every continuation of every beam, in lists, until ``count`` tokens: no hypothesis is ever
    given up early.
    """
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, float, tuple[int, ...]]] = []
    while live:
        grown = [
            (total + logprob, (*tokens, token))
            for total, tokens in live
            for token, logprob in enumerate(after(tokens).tolist())
        ]
        best = heapq.nlargest(width * (1 + max(1, len(ends))), grown, key=lambda item: item[0])
        over = [item[1][-1] in ends or len(item[1]) == count for item in best]
        done += [
            (total / len(tokens) ** penalty, total, tokens)
            for (total, tokens), ended in list(zip(best, over, strict=True))[:width]
            if ended
        ]
        live = [item for item, ended in zip(best, over, strict=True) if not ended][:width]
    return [(list(tokens), total) for _, total, tokens in sorted(done, reverse=True)[:width]]


def assert_same(ours: Found, theirs: Found) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, total), (_, expected) in zip(ours, theirs, strict=True):
        assert abs(total - expected) <= TOLERANCE * max(1.0, abs(expected))


@pytest.mark.turns(3)
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.7, 2.0])
def test_equals_brute_force(small: LLM, llama: Checkpoint, width: int, penalty: float) -> None:
    after = logprobs_after(llama, PROMPT)
    for ends in ({EOS}, {EOS, 3, 17, 40}):
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=5,
            length_penalty=penalty,
            early_stopping="never",
            stop_token_ids=sorted(ends - {EOS}),
        )
        (output,) = small.beam_search(PROMPT, params)
        expected = naive_search(after, width, 5, ends, penalty)
        # A search that ends once nothing can get better finds the same, unless short ones gain:
        # then it is the best that is.
        if penalty >= 0:
            assert_same(found(output), expected)
        else:
            assert_same(found(output)[:1], expected[:1])
        for sequence in output.sequences:
            assert sequence.score == pytest.approx(sequence.cum_logprob / len(sequence.token_ids) ** penalty)
            assert (sequence.finish_reason == "stop") == (sequence.token_ids[-1] in ends)
            assert sequence.stop_reason == (sequence.token_ids[-1] if sequence.finish_reason == "stop" else None)
    check(small)


def test_every_family(llm: LLM, checkpoint: Checkpoint) -> None:
    """Also where windows let go of the prompt; what is kept of it for the prefix cache serves the
    next search.
    """
    prompt = random_tokens(60)
    expected = naive_search(logprobs_after(checkpoint, prompt), 3, 6, {EOS}, 1.0)
    for cached in (0, 59):
        (output,) = llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=6, early_stopping="never"))
        assert_same(found(output), expected)
        assert output.num_cached_tokens == cached
        check(llm)


def test_width_of_the_vocabulary_is_exhaustive(small: LLM, llama: Checkpoint) -> None:
    """With as many beams as there are tokens, two steps look at all pairs."""
    after = logprobs_after(llama, PROMPT)
    (output,) = small.beam_search(PROMPT, beams(VOCAB, 2, length_penalty=0.0))
    first = after(())
    pairs = torch.stack([first[token] + after((token,)) for token in range(VOCAB)]).flatten()
    best = pairs.topk(VOCAB)
    assert [sequence.token_ids for sequence in output.sequences] == [
        [int(index) // VOCAB, int(index) % VOCAB] for index in best.indices
    ]
    assert len(output.sequences) == VOCAB


@pytest.mark.turns(2)
@pytest.mark.parametrize("width", [64, VOCAB + 7])
def test_many_beams(small: LLM, llama: Checkpoint, width: int) -> None:
    """More candidates than a row has tokens; and more beams than the first round has."""
    (output,) = small.beam_search(PROMPT, BeamSearchParams(beam_width=width, max_tokens=3, early_stopping="never"))
    assert_same(found(output), naive_search(logprobs_after(llama, PROMPT), width, 3, {EOS}, 1.0))
    assert len(output.sequences) == width
    check(small)


@pytest.mark.parametrize("distinct", [2, 5, 1000])
def test_continuations_equal_a_sort_of_all(distinct: int) -> None:
    """Sums descending, then the lower row, then the better rank, which is the lower token among
    equal logits.
    """
    rng = np.random.default_rng(distinct)
    for rows, count in ((1, 4), (3, 4), (7, 20), (7, 97), (64, 128), (5, 500)):
        logits_RV = torch.from_numpy(rng.integers(0, distinct, (rows, VOCAB)).astype(np.float32)) / 100
        logits_RV[rng.random((rows, VOCAB)) < 0.1] = -torch.inf
        logits_RV[-1] = logits_RV[0]
        totals = (-rng.integers(0, 3, rows) / 8).tolist()
        per_row = min(count, VOCAB)
        tops = [entry.top for entry in logprobs_of(logits_RV, [0] * rows, [per_row] * rows) if entry is not None]
        every = [(row, entry) for row, top in enumerate(tops) for entry in top if entry.logprob > -math.inf]
        every.sort(key=lambda item: (-(totals[item[0]] + item[1].logprob), item[0], item[1].rank))
        assert best_continuations(totals, *top_logprobs(logits_RV, per_row), count) == every[:count]


@pytest.mark.product(3)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, -1.0])
def test_equals_transformers(small: LLM, llama: Checkpoint, early_stopping: Any, penalty: float) -> None:
    for seed, ends in ((1, [EOS]), (2, [EOS, 11, 60]), (3, list(range(20)))):
        prompt = random_tokens(9, seed=seed)
        ids = torch.tensor([prompt])
        theirs = llama.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=12,
            eos_token_id=ends,
            pad_token_id=96,
            early_stopping=early_stopping,
            length_penalty=penalty,
            output_scores=True,
            return_dict_in_generate=True,
        )
        params = BeamSearchParams(
            beam_width=4,
            max_tokens=12,
            early_stopping=early_stopping,
            length_penalty=penalty,
            stop_token_ids=[end for end in ends if end != EOS],
        )
        (output,) = small.beam_search(prompt, params)
        for sequence, row, score in zip(output.sequences, theirs.sequences, theirs.sequences_scores, strict=True):
            count = len(sequence.token_ids)
            assert sequence.tokens == row[: 9 + count].tolist()
            assert (row[9 + count :] == 96).all()
            assert abs(sequence.score - float(score)) <= TOLERANCE * max(1.0, abs(float(score)))
    check(small)


def test_one_beam_is_greedy(small: LLM, llama: Checkpoint) -> None:
    (output,) = small.beam_search(PROMPT, beams(1, 9))
    (sequence,) = output.sequences
    assert sequence.token_ids == llama.greedy(PROMPT, 9)
    assert sequence.tokens == PROMPT + sequence.token_ids
    assert sequence.finish_reason == "length"
    logits = llama.logits(sequence.tokens)[len(PROMPT) - 1 : -1].log_softmax(-1)
    for row, token, entries in zip(logits, sequence.token_ids, sequence.logprobs, strict=True):
        assert list(entries) == [token]
        assert abs(entries[token].logprob - float(row[token])) <= TOLERANCE * float(row.abs().max())
        assert entries[token].rank == 1
    assert sequence.cum_logprob == sum(
        entries[t].logprob for t, entries in zip(sequence.token_ids, sequence.logprobs, strict=True)
    )


def test_beams_run_together(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Two prompts, four beams each: one step a token, and the prompt is computed once."""
    llm = make_llm(llama)
    recorder = record(llm)
    prompts = [random_tokens(40, seed=1), random_tokens(40, seed=2)]
    together = [found(output) for output in llm.beam_search(prompts, beams(4, 6))]
    assert [len(step.chunks) for step in recorder.forwards] == [2] + [8] * 5
    assert recorder.num_tokens == 80 + 40
    for prompt, expected in zip(prompts, together, strict=True):
        assert_same(found(llm.beam_search(prompt, beams(4, 6))[0]), expected)
    again = llm.beam_search(prompts[0], beams(4, 6))[0]
    assert again.num_cached_tokens == 39
    check(llm)


def test_among_other_requests(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Neither waits for the other: a long prompt does not hold up the beams, and nothing changes
    what is found.
    """
    alone = found(make_llm(llama).beam_search(PROMPT, beams(3, 8))[0])
    llm = make_llm(llama, max_num_batched_tokens=8)
    engine = engine_of(llm)
    decode = engine.submit(np.array(random_tokens(4)), greedy(30))
    one = BeamSearch(engine, np.array(PROMPT), beams(3, 8))
    one.start()
    engine.step()
    long = engine.submit(np.array(random_tokens(200)), greedy(2))
    steps = 0
    while not one.done:
        engine.step()
        one.advance()
        steps += 1
    # Two steps at most for what is left of the prompt, then one for each of the other tokens.
    assert steps <= 2 + 8
    assert long[0].branch.computed > 0
    assert not long[0].output.token_ids
    one.release()
    assert_same(found(one.output()), alone)
    engine.run([*decode, *long])
    assert decode[0].output.token_ids == llama.greedy(random_tokens(4), 30)
    assert long[0].output.token_ids == llama.greedy(random_tokens(200), 2)
    check(llm)


@pytest.mark.turns(2)
@pytest.mark.parametrize(("pool", "options"), [(64, {}), (48, {"page_size": 4}), (4096, {"max_num_seqs": 5})])
def test_when_not_all_beams_fit(make_llm: MakeLLM, llama: Checkpoint, pool: int, options: dict[str, Any]) -> None:
    """Beams whose state is given up are computed again; more beams of several prompts than may run
    take several steps.
    """
    prompts = [random_tokens(25), random_tokens(22)]
    expected = make_llm(llama).beam_search(prompts, beams(5, 14))
    llm = make_llm(llama, pool=pool, **options)
    for output, wanted in zip(llm.beam_search(prompts, beams(5, 14)), expected, strict=True):
        assert output.error is None
        assert_same(found(output), found(wanted))
    check(llm)


def test_what_does_not_fit_is_refused(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=32, max_num_seqs=4)
    recorder = record(llm)
    calls: list[tuple[Any, Any, type[Exception], str]] = [
        (random_tokens(20), beams(2, 14), ResourceExhausted, "32 tokens"),
        ([PROMPT, random_tokens(CONTEXT - 1)], beams(2, 2), InvalidArgument, "prompt 1: .*context"),
        ([VOCAB], beams(2, 2), InvalidArgument, "vocabulary"),
        ([], beams(2, 2), InvalidArgument, "empty"),
        (PROMPT, beams(2, 2, stop_token_ids=[VOCAB]), InvalidArgument, "stop_token_ids"),
        (PROMPT, beams(2, 2, stop="x"), Unsupported, "tokenizer"),
        (PROMPT, beams(100_000, 2), InvalidArgument, "^beam_width must be at most 4, .*max_num_seqs, got 100000$"),
        (PROMPT, beams(5, 2), InvalidArgument, "beam_width"),
        (PROMPT, greedy(2), InvalidArgument, "BeamSearchParams"),
        ("text", beams(2, 2), InvalidArgument, "no tokenizer"),
    ]
    for prompts, params, error, match in calls:
        with pytest.raises(error, match=match):
            llm.beam_search([[]] if prompts == [] else prompts, params)
    with pytest.raises(NotFound, match="mine"):
        llm.beam_search(PROMPT, beams(2, 2), adapter="mine")
    assert not recorder.steps
    assert llm.beam_search([], beams(2, 2)) == []
    check(llm)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("beam_width", value) for value in (0, -1, 1.5, True, None, "2")),
        *(("max_tokens", value) for value in (0, None, 2.0)),
        *(("length_penalty", value) for value in (math.nan, math.inf, 10.1, "1", None)),
        *(("early_stopping", value) for value in (None, 1, "always")),
        *(("ignore_eos", value) for value in (None, 0)),
        *(("stop", value) for value in ("", [1])),
        *(("stop_token_ids", value) for value in (5, [-1], [1.0])),
        *(("skip_special_tokens", value) for value in ("yes",)),
    ],
)
def test_bad_parameters(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=field):
        BeamSearchParams(**{"beam_width": 2, field: value})


def test_stop_strings_are_looked_for_in_new_text_only(python_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    push, counts = IncrementalDetokenizer.push, list[int]()

    def counted(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        counts[-1] += 1
        return push(detokenizer, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "push", counted)
    for length in (12, 48):
        counts.append(0)
        python_llm.beam_search("def f(x):\n", beams(2, length, stop="never to be seen", ignore_eos=True))
    assert counts[1] <= 4 * counts[0]


def test_text_and_stop_strings(python_llm: LLM) -> None:
    tokenizer = python_llm.tokenizer
    assert tokenizer is not None
    (free,) = python_llm.beam_search("def f(x):\n", beams(3, 10))
    for sequence in free.sequences:
        assert sequence.text == tokenizer.decode(sequence.tokens)
        assert sequence.text == "def f(x):\n" + sequence.output_text
    best = free.sequences[0].output_text
    stop = best[8:12]
    assert len(stop) == 4
    (stopped,) = python_llm.beam_search("def f(x):\n", beams(3, 10, stop=["never to be seen", stop]))
    ended = [sequence for sequence in stopped.sequences if sequence.finish_reason == "stop"]
    assert ended
    for sequence in ended:
        assert sequence.stop_reason == stop
        whole = tokenizer.decode(sequence.tokens)[len("def f(x):\n") :]
        assert stop not in sequence.output_text
        assert whole.startswith(sequence.output_text + stop)
    (shown,) = python_llm.beam_search("def f(x):\n", beams(3, 10, stop=stop, include_stop_str_in_output=True))
    assert [s.output_text for s in shown.sequences if s.finish_reason == "stop"] == [
        sequence.output_text + stop for sequence in ended
    ]
    check(python_llm)


def test_the_token_that_ends_is_not_in_the_text(python_llm: LLM) -> None:
    tokenizer = python_llm.tokenizer
    assert tokenizer is not None
    first = python_llm.generate("x =", greedy(1))[0].outputs[0].token_ids[0]
    params = beams(2, 4, stop_token_ids=[first], length_penalty=0.0)
    sequence = next(s for s in python_llm.beam_search("x =", params)[0].sequences if s.finish_reason == "stop")
    assert (sequence.token_ids[-1], sequence.stop_reason) == (first, first)
    assert sequence.output_text == tokenizer.decode(sequence.token_ids[:-1])
    shown = beams(2, 4, stop_token_ids=[first], length_penalty=0.0, include_stop_str_in_output=True)
    sequence = next(s for s in python_llm.beam_search("x =", shown)[0].sequences if s.finish_reason == "stop")
    assert sequence.output_text == tokenizer.decode(sequence.token_ids)


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3])
def test_a_broken_step_ends_one_search(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    llm = make_llm(llama)
    engine = engine_of(llm)
    execute, forwards = engine.runner.execute, []

    def poisoned(step: Any) -> Any:
        output = execute(step)
        if step.chunks:
            forwards.append(step)
            if len(forwards) == at:
                output.logits_RV[-1, 7] = torch.nan
        return output

    prompts = [PROMPT, random_tokens(9)]
    expected = [found(output) for output in llm.beam_search(prompts, beams(3, 6))]
    llm.reset_prefix_cache()
    monkeypatch.setattr(engine.runner, "execute", poisoned)
    good, bad = llm.beam_search(prompts, beams(3, 6))
    assert good.error is None
    assert_same(found(good), expected[0])
    assert "NaN" in (bad.error or "")
    assert {sequence.finish_reason for sequence in bad.sequences} <= {"error"}
    assert all(len(sequence.token_ids) == at - 1 for sequence in bad.sequences)
    check(llm)
    monkeypatch.undo()
    # What may be broken is not found by others.
    again = llm.beam_search(prompts, beams(3, 6))
    for output, wanted in zip(again, expected, strict=True):
        assert_same(found(output), wanted)
    assert again[1].num_cached_tokens == 0


def test_a_step_that_raises(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    blocks: Any = engine_of(llm).runner.model.blocks
    block, calls = blocks[1], [0]

    def breaking(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise RuntimeError("the device fell over")
        return block(*arguments)

    blocks[1] = breaking
    (output,) = llm.beam_search(PROMPT, beams(3, 6))
    assert "the device fell over" in (output.error or "")
    assert len(output.sequences) == 3
    check(llm)
    assert_same(
        found(llm.beam_search(PROMPT, beams(3, 6))[0]), found(make_llm(llama).beam_search(PROMPT, beams(3, 6))[0])
    )


def test_interrupt(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(llama)
    engine = engine_of(llm)
    other = engine.submit(np.array(random_tokens(9)), greedy(20))
    execute, forwards = engine.runner.execute, []

    def interrupting(step: Any) -> Any:
        if step.chunks:
            forwards.append(step)
            if len(forwards) == 4:
                raise KeyboardInterrupt
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.beam_search([PROMPT, random_tokens(7)], beams(4, 9))
    check(llm)
    assert not engine.branches.sessions
    engine.run(other)
    assert other[0].output.token_ids == llama.greedy(random_tokens(9), 20)


def test_close_in_the_middle(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    engine = engine_of(llm)
    one = BeamSearch(engine, np.array(PROMPT), beams(3, 9))
    steps = [0]

    def close() -> None:
        steps[0] += 1
        if steps[0] == 4:
            llm.close()

    search(engine, [one], close)
    output = one.output()
    assert {sequence.finish_reason for sequence in output.sequences} == {"cancelled"}
    assert all(len(sequence.token_ids) == 3 for sequence in output.sequences)
    with pytest.raises(FailedPrecondition, match="closed"):
        llm.beam_search(PROMPT, beams(2, 2))


def test_no_leak_over_many_searches(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=128, page_size=4)
    for seed in range(8):
        llm.beam_search([random_tokens(20, seed=seed), random_tokens(7, seed=seed)], beams(3, 4))
        check(llm)
        assert not engine_of(llm).branches.sessions
