"""What planted faults (``tests.mutants``) showed to be untested."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.kv.pair import Pair
from tests.prefix_trees import check_trees
from tests.small_llms import BYTES_PER_TOKEN, check, engine_of, greedy, make_checkpoint, random_tokens

from quire import LLM
from quire.branches.prefix_cache import RadixCache


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_owners_of_a_page_that_hold_different_parts_of_it_write_and_abort(order: list[int]) -> None:
    """The one that stays on the page must be the longest: what another wrote there would be in its
    rows after the abort.
    """
    pair = Pair(page_size=8)
    pair.add(0)
    pair.append(0, 6)
    pair.fork(0, 1, 3)
    pair.fork(0, 2, 1)
    pair.begin(order, [2, 2, 2])
    for layer in range(len(pair.specs)):
        pair.layer(layer, pair.random(layer, 6))
    assert sum(copy.count for copy in pair.copies) == (3 + 1) * len(pair.state.state.parts.paged.classes)
    pair.abort()
    pair.forward(order, [1, 3, 1])
    pair.finish()


class Windowed:
    """Sequences of which each can be forked in its last tokens only, as what a window leaves."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.lengths: dict[int, int] = {}
        self.cache = RadixCache(self.reach)

    def reach(self, seq: int, position: int) -> int:
        return position if position > self.lengths[seq] - self.window else 0

    def insert(self, seq: int, tokens: list[int], *, live: bool = False) -> list[int]:
        self.lengths[seq] = len(tokens)
        removed = self.cache.insert(seq, tokens, None, live=live)
        check_trees(self.cache)
        return removed


def agreeing(a: list[int], b: list[int]) -> int:
    """How many tokens two rows begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_under_windows_a_longer_sequence_does_not_replace_a_shorter_one() -> None:
    """It has let go of what the shorter one holds: only another of the same length is as good."""
    world, tokens = Windowed(4), list(range(40))
    for seq, length in enumerate((10, 20, 30)):
        assert world.insert(seq, tokens[:length]) == []
    assert len(world.cache) == world.cache.num_cached == 3
    assert world.insert(3, tokens[:20]) == [1]
    assert world.insert(4, tokens[:30], live=True) == []
    assert world.insert(4, tokens[:30]) == [2]
    assert world.insert(5, tokens[:5]) == []
    assert [world.cache.evict() for _ in range(5)] == [0, 3, 4, 5, None]


def test_under_windows_a_match_is_where_some_sequence_can_be_forked() -> None:
    rng = random.Random(0)
    for _ in range(200):
        world = Windowed(rng.randint(1, 6))
        held: dict[int, list[int]] = {}
        for seq in range(rng.randint(1, 8)):
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
            for gone in world.insert(seq, tokens, live=rng.random() < 0.3):
                held.pop(gone, None)
            if seq in world.cache:
                held[seq] = tokens
        wanted = [rng.randrange(2) for _ in range(rng.randint(1, 14))]
        common = {seq: agreeing(tokens, wanted) for seq, tokens in held.items()}
        longest = max(common.values(), default=0)
        # Those that hold the matched prefix, and those that end on the way to its end.
        asked = [seq for seq, count in common.items() if count in (longest, len(held[seq]))]
        best = max((world.reach(seq, common[seq]) for seq in asked), default=0)
        assert world.cache.peek(wanted, None) == best
        found = world.cache.match(wanted, None)
        if best:
            assert found is not None
            seq, length = found
            assert length == best == world.reach(seq, length)
            assert held[seq][:length] == wanted[:length]
        else:
            assert found is None


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_session_with_a_window_that_is_preempted_keeps_its_window(tmp_path: Path, after: int, kept: bool) -> None:
    """What is computed again, or comes back from host memory, is under the window, and goes on as
    if nothing had been.
    """
    checkpoint = make_checkpoint("llama", tmp_path)
    prompt, found = random_tokens(45), []
    for preempted in (False, True):
        options = {"kv_cache_memory": 400 * BYTES_PER_TOKEN, "page_size": 4, "host_memory": 2**30 if kept else 0}
        llm = LLM(checkpoint.path, device="cpu", dtype="float32", **options)
        engine = engine_of(llm)
        session = llm.session(prompt, window=20, sink=3)
        stream = session.stream(greedy(25))
        tokens = [token for _ in range(after) for token in next(stream).token_ids]
        if preempted and after:
            (work,) = engine.scheduler.running
            engine.scheduler.preempt(work)
        tokens += [token for delta in stream for token in delta.token_ids]
        if preempted and not after:
            engine.branches.drop(session._branch)
        tokens += session.generate(greedy(10)).outputs[0].token_ids
        assert engine.runner.state.num_used_pages < 45 // 4, "the window lets go of pages"
        found.append(tokens)
        check(llm)
        llm.close()
    assert found[0] == found[1]
    assert found[0] != checkpoint.greedy(prompt, 35), "the window shows"
