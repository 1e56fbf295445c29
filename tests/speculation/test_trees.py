"""Trees of drafts: the path of the tokens drawn counts, and what runs beside it changes nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_steps_ahead import array
from tests.small_llms import (
    VOCAB,
    Checkpoint,
    MakeLLM,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    record,
    token_ids,
)
from tests.speculation.test_speculation import FAMILIES, PROMPT, Told, drafting, step_all

from quire import SamplingParams
from quire.base.types import TokenTree
from quire.speculation.likely_trees import LEAST_CHANCE, LikelyTree
from quire.speculation.proposer import Context, Draft, problem_of


class Branching(Told):
    """Proposes trees in which the tokens that it was told are a path, more or less, in any order of
    siblings."""

    def __init__(self, seed: int = 0, right: float = 0.8, vocab_size: int = VOCAB) -> None:
        super().__init__(seed, right)
        self.vocab_size = vocab_size

    def _draft(self, context: Context, most: int) -> Draft:
        spine = [token % self.vocab_size for token in super()._draft(context, most).tokens]
        tokens, chances, parents, before = list[int](), list[float](), list[int](), -1
        for token in spine:
            siblings = [self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(0, 2))] + [token]
            self.rng.shuffle(siblings)
            places = range(len(tokens), len(tokens) + len(siblings))
            tokens += siblings
            chances += [0.9 if one == token else 0.3 for one in siblings]
            parents += [before] * len(siblings)
            before = places[siblings.index(token)]
        # Some hang anywhere.
        for _ in range(self.rng.randint(0, 3) if tokens else 0):
            parents.append(self.rng.randrange(-1, len(tokens)))
            tokens.append(self.rng.randrange(self.vocab_size))
            chances.append(self.rng.random())
        return Draft(tokens, chances, parents=parents)


def told(*known: list[int], seed: int = 0, right: float = 0.8) -> Branching:
    proposer = Branching(seed, right)
    proposer.known = list(known)
    return proposer


# -- the value -------------------------------------------------------------------------------------


def paths(draft: Draft) -> Iterator[frozenset[int]]:
    """Yield each set of nodes that contains the parents of all its nodes."""
    for count in range(len(draft) + 1):
        for chosen in itertools.combinations(range(len(draft)), count):
            if all(parent < 0 or parent in chosen for node in chosen if (parent := draft.tree.parents[node]) > -2):
                yield frozenset(chosen)


@pytest.mark.parametrize("seed", range(3))
def test_each_beginning_of_the_best_is_the_best_tree(seed: int) -> None:
    """Against all trees of so many nodes."""
    rng = random.Random(seed)
    parents = [rng.randrange(-1, index) for index in range(8)]
    draft = Draft(list(range(8)), [rng.choice([0.2, 0.5, 1.0, 1.3]) for _ in parents], parents=parents)
    for factor, most in itertools.product((1.0, 0.6), range(9)):
        promised = draft.promises(factor)
        found = draft.best(most, factor)
        assert not problem_of(found, 8, most)
        # float sums in another order.
        assert sum(found.promises(factor)) == pytest.approx(
            max(sum(promised[node] for node in chosen) for chosen in paths(draft) if len(chosen) == most), rel=1e-12
        )
        assert found.promises(factor) == sorted(found.promises(factor), reverse=True)


def test_paths_and_chains() -> None:
    draft = Draft([5, 6, 7, 5, 9], [0.5, 0.4, 0.1, 0.9, 0.8], parents=[-1, -1, 0, 0, 3])
    assert [draft.tree.path(wanted, draft.tokens) for wanted in ([5, 5, 9, 1], [6, 7], [7], [])] == [
        [0, 3, 4],
        [1],
        [],
        [],
    ]
    assert draft.chain() == Draft([5, 5, 9], [0.5, 0.9, 0.8])
    assert draft.compared([0, 3]) == pytest.approx(0.5 + 0.4 + 0.1 + 0.9 + 0.8)
    assert draft.compared([]) == pytest.approx(0.5 + 0.4)
    assert Draft([1, 2], [0.5, 0.5]).tree == TokenTree((-1, 0))
    assert Draft([1, 2], [0.5, float("nan")]).promises() == [0.5, 0.0]


@pytest.mark.parametrize(
    ("parents", "reason"), [([-1], "no parent per draft"), ([-1, 1], "come before"), ([-2, 0], "come before")]
)
def test_parents_that_make_no_tree(parents: list[int], reason: str) -> None:
    assert reason in problem_of(Draft([3, 4], [0.5, 0.5], parents=parents), VOCAB, 8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("width", "most"), [(1, 6), (2, 9), (3, 4), (3, 20)])
def test_likely_trees(seed: int, width: int, most: int) -> None:
    """Level by level the likeliest drafts run, and their own drafts are taken from their rows."""
    rng = random.Random(seed)
    least = 0.6 * (seed % 2)
    tree, rows = LikelyTree(most=most, width=width, least=least), [[]]
    while True:
        last = list(tree.next)
        behind = [sorted((rng.random() for _ in range(width)), reverse=True) for _ in rows]
        before = len(tree.tokens)
        tree.add([list(range(width))] * len(rows), behind)
        new = range(before, len(tree.tokens))
        assert [tree.parents[node] for node in new] == [one for one in (last or [-1]) for _ in range(width)]
        able = sorted(
            (node for node in new if tree.promises[node] >= max(LEAST_CHANCE, least)),
            key=lambda node: -tree.promises[node],
        )
        assert tree.next == able[: min(width, most - 1 - len(tree.ran))]
        assert [(last or [-1])[row] for row in tree.rows] == [tree.parents[node] for node in tree.next]
        assert [tree.ran[one] if one >= 0 else -1 for one in tree.next_parents] == [
            tree.parents[node] for node in tree.next
        ]
        if not tree.next:
            break
        rows = [[node] for node in tree.next]
    assert tree.promises == pytest.approx(tree.draft.promises())
    assert bool(tree.draft.parents) == (width > 1)
    assert len(tree.ran) < most


def test_chances_that_are_no_numbers_make_no_drafts() -> None:
    tree = LikelyTree(most=4, width=2)
    tree.add([[5, 6]], [[float("nan"), 0.5]])
    assert tree.draft == Draft([6], [0.5])


# -- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_texts(
    make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path, kind: str, right: float
) -> None:
    checkpoint = checkpoints.get(kind) or make_family(kind, tmp_path)
    prompts = [random_tokens(length, seed=length) for length in (20, 3, 40)]
    expected = [checkpoint.greedy(prompt, 24) for prompt in prompts]
    proposer = told(*(prompt + text for prompt, text in zip(prompts, expected, strict=True)), right=right)
    llm = drafting(make_llm(checkpoint, speculative="lookup", max_num_batched_tokens=16), proposer)
    steps = record(llm)
    outputs = llm.generate(prompts, greedy(24))
    assert token_ids(outputs) == expected
    trees = [chunk.tree.parents for step in steps.forwards for chunk in step.chunks if chunk.tree is not None]
    assert any(tree != tuple(range(-1, len(tree) - 1)) for tree in trees)
    if right == 1.0:
        assert all(output.speculation.accepted > 4 for output in outputs if output.speculation is not None)
    check(llm)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_more_drafts_than_the_depth(make_llm: MakeLLM, llama: Checkpoint, depth: int) -> None:
    llm = drafting(make_llm(llama, speculative="lookup"), told(PROMPT + llama.greedy(PROMPT, 30)), depth=depth)
    steps = record(llm)
    assert token_ids(llm.generate([PROMPT], greedy(30))) == [llama.greedy(PROMPT, 30)]
    assert max(len(chunk.tokens) for step in steps.forwards[1:] for chunk in step.chunks) == 1 + depth


def test_drawn_tokens_are_those_without_drafts(make_llm: MakeLLM, llama: Checkpoint) -> None:
    params = [
        SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.3, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(4)
    ]
    expected = token_ids(make_llm(llama).generate([PROMPT] * 4, params))
    llm = drafting(make_llm(llama, speculative="lookup"), told(*(PROMPT + one for one in expected)))
    assert token_ids(llm.generate([PROMPT] * 4, params)) == expected
    assert llm.metrics()["quire:accepted_tokens_total"] > 0
    check(llm)


@pytest.mark.parametrize("kind", ["llama", "qwen3-next"])
def test_in_a_pool_that_is_too_small(
    make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path, kind: str
) -> None:
    """Trees are cut to the pages and the slots for states that there are."""
    checkpoint = checkpoints.get(kind) or make_family(kind, tmp_path)
    prompts = [random_tokens(20, seed=seed) for seed in range(5)]
    expected = [checkpoint.greedy(prompt, 24) for prompt in prompts]
    proposer = told(*(prompt + text for prompt, text in zip(prompts, expected, strict=True)))
    pool: dict[str, Any] = {"pool": 100} if kind == "llama" else {"kv_cache_memory": "1MiB"}
    llm = drafting(make_llm(checkpoint, page_size=4, speculative="lookup", **pool), proposer)
    assert token_ids(llm.generate(prompts, greedy(24))) == expected
    assert kind != "llama" or engine_of(llm).scheduler.num_preemptions
    check(llm)


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3-next"])
def test_interrupted_while_tokens_are_taken(
    make_llm: MakeLLM,
    checkpoints: dict[str, Checkpoint],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    at: int,
) -> None:
    """The path of the tokens that were drawn before stays, wherever it is in the tree."""
    checkpoint = checkpoints.get(kind) or make_family(kind, tmp_path)
    tokens = checkpoint.greedy(PROMPT, 30)
    llm = drafting(make_llm(checkpoint, speculative="lookup"), told(PROMPT + tokens, right=1.0, seed=2))
    engine = engine_of(llm)
    (request,) = engine.submit(array(PROMPT), greedy(30))
    take, calls = engine.sampling.take, 0

    def broken(drawing: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1 + at:
            raise KeyboardInterrupt
        take(drawing)

    monkeypatch.setattr(engine.sampling, "take", broken)
    with pytest.raises(KeyboardInterrupt):
        step_all(llm)
    check(llm)
    step_all(llm)
    assert request.output.token_ids == tokens


@pytest.mark.parametrize("cut", [2, 5])
def test_a_session_goes_on_behind_a_stop_within_a_tree(make_llm: MakeLLM, llama: Checkpoint, cut: int) -> None:
    tokens = llama.greedy(PROMPT, 30)
    llm = drafting(make_llm(llama, speculative="lookup"), told(PROMPT + tokens, right=1.0))
    session = llm.session(PROMPT)
    output = session.generate(greedy(30, stop_token_ids=[tokens[cut]])).outputs[0]
    assert output.token_ids == tokens[: tokens.index(tokens[cut]) + 1]
    assert session.generate(greedy(12)).outputs[0].token_ids == llama.greedy(session.tokens[:-12], 12)
    check(llm)


def test_a_tree_that_is_none_is_dropped(make_llm: MakeLLM, llama: Checkpoint) -> None:
    class Wrong(Told):
        def _draft(self, context: Context, most: int) -> Draft:
            return Draft([3, 4], [0.5, 0.5], parents=[0, -1])

    (output,) = drafting(make_llm(llama, speculative="lookup"), Wrong()).generate([PROMPT], greedy(12))
    assert output.outputs[0].token_ids == llama.greedy(PROMPT, 12)
    assert output.speculation is not None
    assert "come before" in output.speculation.dropped
