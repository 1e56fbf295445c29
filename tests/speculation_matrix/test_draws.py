"""Draws with drafts are those without, seed by seed, and have the distribution of the target, with
each way to change it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import Checkpoint, make_checkpoint
from tests.speculation.test_speculation import Told, drafting
from tests.speculation.test_trees import Branching
from torch import Tensor

from quire import LLM, SamplingParams
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampler import probabilities

from .worlds import FORMS, World, make_world

PROMPT = [3, 1, 4, 1, 7, 2]
VOCAB = 8
COUNT = 3
"""Tokens whose joint distribution is tested."""


def no_repeat(generated: list[int], logits: Tensor) -> Tensor:
    """Forbid the last token."""
    if generated:
        logits[generated[-1]] = -torch.inf
    return logits


WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "counts": {"presence_penalty": 0.7, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {2: 1.5, 6: -2.0}},
    "processor": {"logits_processors": [no_repeat]},
    "all": {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.3,
            "logit_bias": {1: 0.5}, "logits_processors": [no_repeat]},
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of eight tokens."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("draws"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model whose tokenizer grammars can use."""
    return make_world("dense", tmp_path_factory.mktemp("draws"))


class Guessing(Told):
    """Proposes random tokens of the small vocabulary: each is right in one case of a few."""

    def _draft(self, context: Any, most: int) -> Any:
        draft = super()._draft(context, most)
        return type(draft)([token % VOCAB for token in draft.tokens], draft.chances)


class Trees(Branching):
    """As ``Guessing``, with siblings: of those, too, the one that is drawn counts."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB)


def draws(checkpoint: Checkpoint, proposer: Told | None, params: Sequence[SamplingParams]) -> list[list[int]]:
    """Return the samples of requests for one prompt, with drafts or without."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_num_seqs": 64}
    with LLM(checkpoint.path, speculative=None if proposer is None else "lookup", **options) as llm:
        if proposer is not None:
            drafting(llm, proposer)
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        accepted = sum(output.speculation.accepted for output in outputs if output.speculation is not None)
    assert (accepted > 0) == (proposer is not None)
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.parametrize("way", WAYS)
def test_draws_are_those_without_drafts(small: Checkpoint, way: str) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, **WAYS[way]) for seed in range(6)]
    expected = draws(small, None, params)
    assert draws(small, Guessing(), params) == expected
    if way == "all":
        assert draws(small, Trees(), params) == expected
    assert len({tuple(tokens) for tokens in expected}) > 3


def test_draws_under_a_grammar_are_those_without_drafts(world: World) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=12, temperature=1.5, structured_outputs=FORMS["pattern"])
        for seed in range(16)
    ]
    expected = draws(world.checkpoint, None, params)
    told = Told(right=0.8)
    told.known = [PROMPT + tokens for tokens in expected]
    trees = Branching()
    trees.known = told.known
    assert draws(world.checkpoint, told, params) == expected
    assert draws(world.checkpoint, trees, params) == expected
    assert len({tuple(tokens) for tokens in expected}) > 8


def joint(checkpoint: Checkpoint, params: SamplingParams, form: str | None) -> dict[tuple[int, ...], float]:
    """Return the probability of each beginning of ``COUNT`` tokens, from the logits of transformers
    behind each shorter one."""
    found = {(): 1.0}
    vocab_size = checkpoint.model.config.vocab_size
    for _ in range(COUNT):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, chance in found.items():
            logits_V = checkpoint.logits([*PROMPT, *tokens])[-1]
            if form is not None:
                text = "".join(World.text(token) for token in tokens)
                logits_V[~torch.tensor(World.allowed(form, text, ()))] = -torch.inf
            sampler = RequestSampler(params, PROMPT, vocab_size=vocab_size, entropy=torch.Generator())
            for token in tokens:
                sampler.observe(token)
            p_V = probabilities(logits_V[None], [sampler])[0]
            longer |= {(*tokens, token): chance * float(p_V[token]) for token in p_V.nonzero()[:, 0].tolist()}
        found = longer
    return found


def assert_distributed(drawn: list[list[int]], chances: dict[tuple[int, ...], float]) -> None:
    """Pearson's test, within four standard deviations of the statistic. Cells that are expected
    less than five times are one."""
    counts = Counter(tuple(tokens) for tokens in drawn)
    assert not counts.keys() - chances.keys(), "a text that the target never draws"
    total, rest, statistic, cells = len(drawn), [0.0, 0.0], 0.0, 0
    for tokens, chance in chances.items():
        expected, found = total * chance, counts[tokens]
        if expected < 5:
            rest[0], rest[1] = rest[0] + expected, rest[1] + found
        else:
            statistic, cells = statistic + (found - expected) ** 2 / expected, cells + 1
    if rest[0] >= 5:
        statistic, cells = statistic + (rest[1] - rest[0]) ** 2 / rest[0], cells + 1
    freedom = cells - 1
    assert freedom > 0
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("proposer", [Guessing, Trees])
def test_the_joint_distribution_of_some_draws(small: Checkpoint, proposer: Callable[[], Told]) -> None:
    params = SamplingParams(seed=1, n=500, max_tokens=COUNT, ignore_eos=True, **WAYS["all"])
    assert_distributed(draws(small, proposer(), [params]), joint(small, params, None))


@pytest.mark.slow
@pytest.mark.parametrize("proposer", [Guessing, Trees])
@pytest.mark.parametrize("way", WAYS)
def test_the_joint_distribution_of_three_tokens(small: Checkpoint, way: str, proposer: Callable[[], Told]) -> None:
    params = [SamplingParams(seed=s, n=1000, max_tokens=COUNT, ignore_eos=True, **WAYS[way]) for s in range(24)]
    assert_distributed(draws(small, proposer(), params), joint(small, params[0], None))


@pytest.mark.slow
def test_the_joint_distribution_under_a_grammar(world: World) -> None:
    given: dict[str, Any] = {"top_k": 4, "max_tokens": COUNT, "structured_outputs": FORMS["pattern"]}
    params = [SamplingParams(seed=seed, n=1000, **given) for seed in range(24)]
    told = Told(right=0.7)
    bare = SamplingParams(**{**given, "structured_outputs": None})
    chances = joint(world.checkpoint, bare, "pattern")
    told.known = [PROMPT + list(max(chances, key=chances.__getitem__))]
    assert_distributed(draws(world.checkpoint, told, params), chances)


def test_the_test_finds_another_distribution(small: Checkpoint) -> None:
    """Draws of the target, and those of a temperature that is a little higher."""
    one, other = (SamplingParams(temperature=value, max_tokens=COUNT) for value in (1.0, 1.25))
    chances = joint(small, one, None)
    rng = np.random.default_rng(0)
    texts = list(chances)

    def drawn(values: dict[tuple[int, ...], float]) -> list[list[int]]:
        p = np.array([values[text] for text in texts])
        return [list(texts[index]) for index in rng.choice(len(texts), 20_000, p=p / p.sum())]

    assert_distributed(drawn(chances), chances)
    with pytest.raises(AssertionError):
        assert_distributed(drawn(joint(small, other, None)), chances)
