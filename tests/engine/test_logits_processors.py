"""Logits processors: what they are given, when, and that one that fails concerns its own request
only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import EOS, VOCAB, Checkpoint, MakeLLM, assert_near, check, engine_of, greedy, random_tokens
from torch import Tensor

from quire import LLM, InvalidArgument, SamplingParams

PROMPT = random_tokens(15)


def only(token: int) -> Callable[[list[int], Tensor], Tensor]:
    def process(token_ids: list[int], logits: Tensor) -> Tensor:
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([token]), 1.0)

    return process


def test_what_they_are_given(llm: LLM, checkpoint: Checkpoint) -> None:
    """The tokens generated so far, a list of its own, and the logits of the next one."""
    seen: list[tuple[list[int], Tensor]] = []

    def look(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append((list(token_ids), logits.clone()))
        assert logits.untyped_storage().nbytes() == 4 * VOCAB, "no view of the batch"
        token_ids.append(3)
        result = logits.clone()
        logits.fill_(torch.nan)
        return result

    output = llm.generate([PROMPT, random_tokens(4)], [greedy(5, logits_processors=[look]), greedy(5)])
    tokens = checkpoint.greedy(PROMPT, 5)
    assert output[0].outputs[0].token_ids == tokens
    assert output[1].outputs[0].token_ids == checkpoint.greedy(random_tokens(4), 5)
    assert [ids for ids, _ in seen] == [tokens[:n] for n in range(5)]
    assert_near(torch.stack([logits for _, logits in seen]), checkpoint.logits(PROMPT + tokens[:-1])[len(PROMPT) - 1 :])
    assert all(logits.dtype == torch.float32 and logits.shape == (VOCAB,) for _, logits in seen)
    check(llm)


def test_order(small: LLM, llama: Checkpoint) -> None:
    """After bias, penalties and the ban of end tokens; before temperature and the filters; one
    after the other.
    """
    seen: list[Tensor] = []

    def look(_: list[int], logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits

    def double(_: list[int], logits: Tensor) -> Tensor:
        return logits * 2

    params = SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=0.7,
        top_k=2,
        seed=1,
        logit_bias={4: 3.5},
        repetition_penalty=1.5,
        logits_processors=[look, double, look],
    )
    small.generate(PROMPT, params)
    raw = llama.logits(PROMPT)[-1].clone()
    raw[4] += 3.5
    history = torch.tensor(sorted(set(PROMPT)))
    raw[history] = torch.where(raw[history] > 0, raw[history] / 1.5, raw[history] * 1.5)
    finite = torch.arange(VOCAB) != EOS
    assert float(seen[0][EOS]) == -torch.inf
    assert_near(seen[0][finite], raw[finite])
    assert torch.equal(seen[1], seen[0] * 2)


def test_they_decide(small: LLM, llama: Checkpoint) -> None:
    assert small.generate(PROMPT, greedy(4, logits_processors=[only(31)]))[0].outputs[0].token_ids == [31] * 4
    params = SamplingParams(max_tokens=4, temperature=1.5, seed=2, logits_processors=(only(31), only(31)))
    assert small.generate(PROMPT, params)[0].outputs[0].token_ids == [31] * 4
    # EOS is banned before min_tokens, whatever a processor says, and chosen then.
    params = SamplingParams(
        max_tokens=9,
        temperature=0,
        min_tokens=2,
        logprobs=0,
        logits_processors=[lambda _, logits: logits.index_fill(0, torch.tensor([EOS]), 99.0)],
    )
    output = small.generate(PROMPT, params)[0].outputs[0]
    assert (len(output.token_ids), output.token_ids[-1], output.finish_reason) == (3, EOS, "stop")
    # Log-probabilities are of the raw distribution.
    assert output.logprobs is not None
    raw = llama.logits(PROMPT + output.token_ids[:-1]).log_softmax(-1)[-1, EOS]
    assert_near(torch.tensor(output.logprobs[-1][EOS].logprob), raw)


def test_the_same_as_logit_bias(small: LLM) -> None:
    """Also in the draws of a seed."""
    bias = torch.zeros(VOCAB)
    bias[7], bias[50] = 4.0, -6.0
    one = SamplingParams(max_tokens=20, seed=5, temperature=0.8, top_p=0.9, n=3, ignore_eos=True)
    by_hand = one.replace(logits_processors=[lambda _, logits: logits + bias])
    by_field = one.replace(logit_bias={7: 4.0, 50: -6.0})
    a, b = small.generate([PROMPT, PROMPT], [by_hand, by_field])
    assert [s.token_ids for s in a.outputs] == [s.token_ids for s in b.outputs]
    assert len({tuple(s.token_ids) for s in a.outputs}) == 3


def test_samples_and_preemption(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Each sample shows its own tokens, and a request that is computed again is not shown them
    twice.
    """

    def alternate(token_ids: list[int], logits: Tensor) -> Tensor:
        # A token may not be drawn a second time.
        return logits.index_fill(0, torch.tensor(token_ids, dtype=torch.int64), -torch.inf)

    params = SamplingParams(max_tokens=25, seed=3, n=3, ignore_eos=True, logits_processors=[alternate])
    prompts = [random_tokens(20, seed=i) for i in range(4)]
    free = make_llm(llama).generate(prompts, params)
    tight_llm = make_llm(llama, pool=112, page_size=4)
    tight = tight_llm.generate(prompts, params)
    assert engine_of(tight_llm).scheduler.num_preemptions
    for one, other in zip(free, tight, strict=True):
        for sample, same in zip(one.outputs, other.outputs, strict=True):
            assert sample.token_ids == same.token_ids
            assert len(set(sample.token_ids)) == 25


def raising(_: list[int], logits: Tensor) -> Tensor:
    raise ValueError("not today")


class Nothing:
    def __call__(self, token_ids: list[int], logits: Tensor) -> None:
        logits.zero_()


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("processor", "match"),
    [
        (raising, r"logits_processors\[1\] \(raising\) raised ValueError: not today"),
        (Nothing(), r"logits_processors\[1\] \(Nothing\) must return logits.*got None"),
        (lambda _, logits: logits[:-1], rf"must return float32 \[{VOCAB}\], got torch.float32 \[{VOCAB - 1}\]"),
        (lambda _, logits: logits[None], rf"got torch.float32 \[1, {VOCAB}\]"),
        (lambda _, logits: logits.double(), "got torch.float64"),
        (lambda _, logits: logits.tolist(), r"must return logits.*got \["),
        (lambda _, logits: logits.index_fill(0, torch.tensor([9]), torch.nan), "returned nan as the logit of token 9"),
        (lambda _, logits: logits.index_fill(0, torch.tensor([8]), torch.inf), "returned inf as the logit of token 8"),
        (
            lambda _, logits: logits - torch.inf,
            r"^logits_processors\[1\] \(<lambda>\) returned -inf as the logit of every token",
        ),
        (lambda _: None, "raised TypeError"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_one_that_fails_ends_its_request(small: LLM, llama: Checkpoint, processor: Any, match: str, at: int) -> None:
    def later(token_ids: list[int], logits: Tensor) -> Any:
        return logits if len(token_ids) < at else processor(token_ids, logits)

    later.__name__ = getattr(processor, "__name__", type(processor).__name__)
    bad = greedy(5, logits_processors=[lambda _, logits: logits, processor if not at else later])
    prompts = [random_tokens(length) for length in (4, 5, 6)]
    outputs = small.generate(prompts, [greedy(5), bad, greedy(5)])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert len(outputs[1].outputs[0].token_ids) == at
    assert re.search(match, outputs[1].outputs[0].error or "")
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [llama.greedy(prompts[i], 5) for i in (0, 2)]
    check(small)


def test_what_is_left_is_for_the_last(small: LLM) -> None:
    """One may take every token away if a later one gives some back; the first that does is named if
    none does.
    """

    def nothing(_: list[int], logits: Tensor) -> Tensor:
        return logits.fill_(-torch.inf)

    outputs = small.generate(
        [PROMPT] * 2,
        [greedy(2, logits_processors=given) for given in ([nothing, only(31)], [only(31), nothing, nothing])],
    )
    assert outputs[0].outputs[0].token_ids == [31, 31]
    assert re.match(r"logits_processors\[1\] \(nothing\) returned -inf", outputs[1].outputs[0].error or "")
    # Tokens that are banned anyway are none.
    params = greedy(2, ignore_eos=False, min_tokens=1, logits_processors=[only(EOS)])
    assert "no token to draw" in (small.generate(PROMPT, params)[0].outputs[0].error or "")
    check(small)


def test_interrupt_goes_through(small: LLM, llama: Checkpoint) -> None:
    def interrupt(_: list[int], logits: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.generate(PROMPT, greedy(5, logits_processors=[interrupt]))
    check(small)
    assert small.generate(PROMPT, greedy(5))[0].outputs[0].token_ids == llama.greedy(PROMPT, 5)


def test_they_cannot_run_the_engine(small: LLM, llama: Checkpoint) -> None:
    """A step within a step would run tokens twice; it is refused, and the refusal ends
    the request."""

    def nested(_: list[int], logits: Tensor) -> Tensor:
        small.generate([1, 2, 3], greedy(1))
        return logits

    bad, good = small.generate([PROMPT, random_tokens(5)], [greedy(5, logits_processors=[nested]), greedy(5)])
    assert bad.outputs[0].finish_reason == "error"
    assert "a logits processor cannot run anything on its own engine" in (bad.outputs[0].error or "")
    assert good.outputs[0].token_ids == llama.greedy(random_tokens(5), 5)
    check(small)


def test_sessions(small: LLM, llama: Checkpoint) -> None:
    """They see what this generation has drawn, not what the session had before."""
    seen: list[list[int]] = []

    def look(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(token_ids)
        return logits

    with small.session(PROMPT) as session:
        for _ in range(2):
            before = session.tokens
            seen.clear()
            tokens = session.generate(greedy(3, logits_processors=[look])).outputs[0].token_ids
            assert tokens == llama.greedy(before, 3)
            assert seen == [tokens[:n] for n in range(3)]
        assert len(session.generate(greedy(3, logits_processors=[only(9)])).outputs[0].token_ids) == 3
        assert session.tokens[-3:] == [9, 9, 9]


def test_bad_values() -> None:
    for value in (5, "abc", {1: 2}, [None], [max, 3], {max}):
        with pytest.raises(InvalidArgument, match="logits_processors must be a list of callables"):
            SamplingParams(logits_processors=value)  # type: ignore[arg-type]
    given = [max]
    params = SamplingParams(logits_processors=given)
    given.append(min)
    assert params.logits_processors == (max,)
    assert hash(params) == hash(SamplingParams(logits_processors=[max]))
    assert SamplingParams(logits_processors=[]).logits_processors == ()


def test_an_array_is_no_tensor(small: LLM) -> None:
    params = greedy(2, logits_processors=[lambda _, logits: np.asarray(logits)])
    assert "must return logits" in (small.generate(PROMPT, params)[0].outputs[0].error or "")
