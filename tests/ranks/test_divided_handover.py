"""Hand-over where ranks divide the state of the sender, of the receiver, or both: any layout to any
other one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.test_divided_rows import FORMATS, SEQ, SIZES, WINDOW, States
from tests.ranks.thread_ranks import thread_ranks  # noqa: F401
from tests.server.test_handover import counts, grown, joined
from tests.small_llms import make_family

from quire import AsyncLLM, SamplingParams
from quire.base.errors import Cancelled, FailedPrecondition
from quire.channels.pair import channel_pair
from quire.contracts.channel import Channel
from quire.contracts.kv_format import KVFormat
from quire.contracts.ranks import HandOver
from quire.kv import transfer_verbs
from quire.kv.messages import opened
from quire.kv.state import State

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class FollowingStates(States):
    """``PeerRows``, of ranks that take part in a hand-over."""

    def follow(self, event: HandOver) -> None:
        for state in self.ranks[1:]:
            transfer_verbs.follow(state.parts, event)

    def put(self, seq: int, place: tuple[int, int], slots_N: Any, parts: Any) -> None:
        assert all(seq in self.ranks[rank].parts.transfers for rank in parts)
        for rank, part in parts.items():
            self.ranks[rank].parts.storage(place).put(place[1], slots_N, part)

    def run(self, count: int, seed: int) -> None:
        if count:
            super().run(count, seed)
        for state in (self.whole, *self.ranks):
            if not state.has_sequence(SEQ):
                state.add_sequence(SEQ)
        transfer_verbs.send_computed(self.ranks[0].parts)

    def check(self) -> None:
        for state in (self.whole, *self.ranks):
            state.check()

    def is_empty(self) -> bool:
        for state in (self.whole, *self.ranks):
            if state.has_sequence(SEQ):
                state.remove_sequence(SEQ)
        return all(state.empty() and not state.parts.transfers for state in self.ranks)


def check_same(found: State, expected: State) -> None:
    """Both hold the same rows, to the bit. Of a windowed layer one may hold more, in a page that
    has not left yet."""
    assert found.sequence_length(SEQ) == expected.sequence_length(SEQ)
    for layer in range(2):
        (mine,), (theirs,) = (state.open_export(SEQ).held(layer) for state in (found, expected))
        assert mine.stop == theirs.stop
        start = max(mine.start, theirs.start)
        assert mine.stop - start >= min(mine.stop, WINDOW - 1)
        pairs = zip(
            *(state.debug_get_kv(SEQ, start, mine.stop, layer=layer) for state in (found, expected)), strict=True
        )
        assert all(torch.equal(one, other) for one, other in pairs)


def cuts(chance: random.Random, total: int) -> list[int]:
    found = []
    while total:
        found.append(chance.randint(1, min(total, 9)))
        total -= found[-1]
    return found


def both(
    chance: random.Random, size: int, others: int, queries: int, heads: int, format: KVFormat
) -> list[FollowingStates]:
    """Return a sender and a receiver."""
    return [
        FollowingStates(size, queries, heads, format, chance.choice((1, 4, 8))),
        FollowingStates(others, queries, heads, format, chance.choice((1, 4, 16))),
    ]


def marked(sender: FollowingStates, receiver: FollowingStates, start: int, count: int) -> Channel:
    """Let ``count`` tokens from ``start`` on be sent; return the receiver's end."""
    ours, theirs = channel_pair()
    found = receiver.ranks[0].disagg_prepare_recv(SEQ, count, channel=theirs)
    sender.ranks[0].disagg_mark_send(SEQ, start, found, ours)
    return theirs


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: f"{one.name}-{one.dtype}")
@pytest.mark.parametrize(("size", "queries", "heads"), SIZES)
@pytest.mark.parametrize("others", ["one", "as many", "more"])
def test_rows_of_all_heads_come(others: str, size: int, queries: int, heads: int, format: KVFormat) -> None:
    """Between ranks of other numbers, in pages of other sizes, wherever the mark is set."""
    chance = random.Random(f"{others} {size} {heads} {format.name} {format.dtype}")
    sender, receiver = both(chance, size, {"one": 1, "as many": size, "more": queries}[others], queries, heads, format)
    start, total = chance.choice((0, 5)), chance.randint(8, 30)
    sender.run(start, 0)
    receiver.run(start, 0)
    steps = cuts(chance, total)
    mark = chance.randrange(len(steps) + 1)
    for number, count in enumerate([*steps, 0]):
        if number == mark:
            marked(sender, receiver, start, total)
        sender.run(count, number + 1)
        assert {state.sequence_length(SEQ) for state in receiver.ranks} == {start}
        for side in (sender, receiver):
            side.check()
    receiver.ranks[0].disagg_wait(SEQ, 5)
    sender.ranks[0].disagg_wait(SEQ, 5)
    check_same(receiver.ranks[0], sender.whole)
    assert {state.sequence_length(SEQ) for state in receiver.ranks} == {start + total}
    for side in (sender, receiver):
        side.check()
        assert side.is_empty()


def test_a_hand_over_that_ends_leaves_no_page() -> None:
    """Cancelled on either side, or with its sequence: on all ranks nothing is left of it."""
    for end in ("cancel", "cancel at the sender", "remove", "remove at the sender"):
        sender, receiver = both(random.Random(end), 2, 3, 6, 6, FORMATS[0])
        sender.run(0, 0)
        receiver.run(3, 0)
        used = [state.num_used_pages for state in receiver.ranks]
        marked(sender, receiver, 0, 9)
        sender.run(4, 1)
        receiver.ranks[0].disagg_receive(SEQ, 0)
        side = sender if end.endswith("sender") else receiver
        if end.startswith("cancel"):
            side.ranks[0].disagg_cancel(SEQ)
        else:
            for state in side.ranks:
                state.remove_sequence(SEQ)
        if side is sender:
            with pytest.raises(Cancelled):
                receiver.ranks[0].disagg_wait(SEQ, 5)
        for state in receiver.ranks:
            assert not state.parts.transfers
        if not end.startswith("remove") or side is sender:
            assert [state.num_used_pages for state in receiver.ranks] == used
        sender.run(2, 2)
        for one in (sender, receiver):
            one.check()
            assert one.is_empty()


def test_rows_are_sent_once() -> None:
    """Each row of each layer, whatever the steps."""
    sender, receiver = both(random.Random(0), 2, 1, 4, 4, FORMATS[0])
    sender.run(3, 0)
    receiver.run(0, 0)
    theirs = marked(sender, receiver, 0, 8)
    for number in (1, 2):
        sender.run(2, number)
    sender.run(1, 3)
    rows = {0: 0, 1: 0}
    while (message := theirs.receive(0)) is not None:
        header, _ = opened(message)
        if header["kind"] == "rows":
            rows[header["layer"]] += sum(length for _, length in header["runs"])
    assert rows == {0: 8, 1: 8}


def test_all_ranks_refuse_alike() -> None:
    """A pop of what was sent is refused by each rank, so that none goes on alone."""
    sender, receiver = both(random.Random(0), 2, 2, 4, 4, FORMATS[0])
    sender.run(0, 0)
    receiver.run(0, 0)
    marked(sender, receiver, 0, 9)
    sender.run(4, 1)
    for state in sender.ranks:
        with pytest.raises(FailedPrecondition, match=r"tokens 0\.\.3 of sequence 7 were sent"):
            state.popn(SEQ, 1)
    for state in receiver.ranks:
        with pytest.raises(FailedPrecondition, match="received"):
            state.begin_forward([SEQ], [1])


# -- engines ---------------------------------------------------------------------------------------


LAYOUTS = [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (2, 1))]
"""Slices and stages of the server that computes prompts, and of the one that answers."""


def llm_of(path: Path, layout: tuple[int, int], page_size: int) -> AsyncLLM:
    slices, stages = layout
    return AsyncLLM(
        path,
        dtype="float32",
        kv_cache_memory="8MiB",
        page_size=page_size,
        max_num_batched_tokens=32,
        tensor_parallel_size=slices,
        pipeline_parallel_size=stages,
    )


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("kind", ["gemma3", "qwen3-next", "falcon-h1", "deepseek-v3"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=lambda layouts: " to ".join(f"{a}x{b}" for a, b in layouts))
def test_prompts_go_between_layouts(layouts: Sequence[tuple[int, int]], kind: str, tmp_path: Path) -> None:
    """With windows, recurrent layers, latent rows: the texts of one that computes all itself."""
    path = make_family(kind, tmp_path / kind).path
    prompts = [random.Random(number).choices(range(5, 90), k=50 + 20 * number) for number in range(3)]
    sides = [llm_of(path, layout, size) for layout, size in zip(layouts, (16, 5), strict=True)]
    try:
        expected = asyncio.run(sides[1].generate(prompts, GREEDY))
        asyncio.run(sides[1].reset_prefix_cache())
        before = counts(sides[1])
        with joined(*sides, "tcp://127.0.0.1:0"):
            found = asyncio.run(sides[1].generate(prompts, GREEDY))
        assert grown(sides[1], before) == {"whole": 3, "lost": 0, "refused": 0}
        for prompt, output, wanted in zip(prompts, found, expected, strict=True):
            assert output.num_cached_tokens == len(prompt) - 1
            assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
    finally:
        for llm in sides:
            asyncio.run(llm.close())
