"""Hand-over of a sequence to another state while it is computed (``disagg_...``), in one process.

A state that computed all itself, in the same forwards, decides what is right: to the bit, since
rows are moved as they are.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch
from tests.examples import examples
from tests.kv.transfers import KINDS, LONGEST, begun, content, made, run

from quire.base.errors import Cancelled, DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.channels.pair import channel_pair
from quire.contracts.channel import Buffers, Channel
from quire.kv.contract import ContractState
from quire.kv.messages import packed

PAGE_SIZES = (1, 3, 4, 16)


def same(state: ContractState, seq: int, other: ContractState, other_seq: int) -> None:
    """Both sequences hold the same rows and states, to the bit."""
    found, expected = content(state, seq), content(other, other_seq)
    assert found.keys() == expected.keys()
    low = 0
    for name, tensor in found.items():
        # A windowed layer may hold more rows here, of a page that has not left yet.
        low = max(0, len(expected[name]) - len(tensor)) if not name.split(".")[1].startswith("state") else 0
        assert torch.equal(tensor, expected[name][low:]), name
    assert low < LONGEST


def goes_on(kind: str, state: ContractState, seq: int, other: ContractState, other_seq: int) -> None:
    """Two more tokens give the same outputs."""
    for _ in range(2):
        for ours, theirs in zip(run(state, kind, seq, 1), run(other, kind, other_seq, 1), strict=True):
            # Equal rows in pages of another size: at most 64 float32 products in another order.
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def chunks(chance: random.Random, total: int) -> list[int]:
    """Return random sizes that add up to ``total``."""
    found = []
    while total:
        found.append(chance.randint(1, min(total, 13)))
        total -= found[-1]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(examples(6, 60)))
def test_random_cuts(kind: str, seed: int) -> None:
    """Whatever the receiver has, where the mark begins, and how the prompt is cut."""
    chance = random.Random(f"{kind} {seed}")
    sender, receiver = made(kind, chance.choice(PAGE_SIZES)), made(kind, chance.choice(PAGE_SIZES))
    ours, theirs = channel_pair()
    start, total = chance.choice((0, chance.randint(1, 20))), chance.randint(1, 30)
    begun(receiver, kind, 5, start, encoders=start > 0)
    if chance.random() < 0.3 and start:
        receiver.fork_sequence(5, 6)  # so that the tail is shared
    begun(sender, kind, 1)
    cuts = chunks(chance, start + total)
    mark_after = chance.randint(0, len(cuts))
    begin_at = 0
    for number, count in enumerate([*cuts, 0]):
        if (
            (number == mark_after or begin_at + count > start)
            and not sender.state.parts.transfers
            and begin_at >= start
        ):
            found = receiver.disagg_prepare_recv(5, total, channel=theirs)
            sender.disagg_mark_send(1, start, found, ours)
            break
        run(sender, kind, 1, count)
        begin_at += count
    for count in chunks(chance, start + total - begin_at):
        run(sender, kind, 1, count)
        sender.check()
        receiver.check()
        assert receiver.sequence_length(5) == start
    receiver.disagg_wait(5, 10)
    sender.disagg_wait(1, 10)
    receiver.check()
    sender.check()
    assert receiver.sequence_length(5) == start + total
    same(receiver, 5, sender, 1)
    goes_on(kind, receiver, 5, sender, 1)
    if receiver.has_sequence(6):
        assert receiver.sequence_length(6) == start
    receiver.clear()
    assert receiver.empty()


def test_layers_are_sent_while_the_forward_is_open() -> None:
    sender, receiver = made("full"), made("full", 16)
    ours, theirs = channel_pair()
    begun(receiver, "full", 0)
    begun(sender, "full", 0)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, 9, channel=theirs), ours)
    come: list[int] = []

    def look(index: int) -> None:
        while receiver.state.parts.transfers[0].channel is theirs and not receiver.disagg_receive(0, 0):
            if not theirs._inbox.qsize():  # type: ignore[attr-defined]
                break
        come.append(receiver.state.parts.transfers[0].layers_come)

    run(sender, "full", 0, 9, between=look)
    assert come == [0, 1], "a layer has gone once the next one has run"
    assert sender.state.parts.transfers[0].ended
    receiver.disagg_wait(0)
    sender.disagg_wait(0)


def test_position_maps() -> None:
    """The maps of the contract's examples."""
    _, channel = channel_pair()
    state = made("full", 4, capacity=32)
    for seq in (8, 9):
        begun(state, "full", seq, 4)
    begun(state, "full", 0)
    assert state.disagg_prepare_recv(0, 5, channel=channel) == (1, 8, 5)
    state.clear()
    begun(state, "full", 1, 4)
    begun(state, "full", 0, 2)
    begun(state, "full", 2, 8)
    state.remove_sequence(1)
    state.add_sequence(3)
    state.remove_sequence(2)
    begun(state, "full", 4, 10)
    state.remove_sequence(4)
    assert state.disagg_prepare_recv(0, 7, channel=channel)[0] in (2, 3)
    window = made("window", 4, capacity=32)
    begun(window, "window", 0)
    found = window.disagg_prepare_recv(0, 11, channel=channel)
    assert found == (2, -1, 5, 1, 6), "5 of 11 tokens are out of a window of 7 behind the last"


class Faulty:
    """An end whose ``send`` does something at one of its messages."""

    def __init__(self, channel: Channel, at: int, act: Callable[[Channel, Buffers], None]) -> None:
        self._channel, self._at, self._act, self._count = channel, at, act, 0

    def receive(self, timeout: float | None = None) -> memoryview | None:
        return self._channel.receive(timeout)

    def close(self) -> None:
        self._channel.close()

    def send(self, parts: Buffers) -> None:
        self._count += 1
        if self._count - 1 == self._at:
            self._act(self._channel, parts)
        else:
            self._channel.send(parts)


def closed(channel: Channel, parts: Buffers) -> None:
    channel.close()
    raise DataLoss("the other end is closed")


def damaged(channel: Channel, parts: Buffers) -> None:
    whole = bytearray().join(parts)
    whole[random.Random(len(whole)).randrange(len(whole))] ^= 16
    channel.send([whole])


def silent(channel: Channel, parts: Buffers) -> None:
    pass


def one_hand_over(kind: str, chance: random.Random, sender: ContractState, receiver: ContractState) -> bool:
    """Hand sequence 1 over with a fault at a random message of a random side; return whether it
    came whole. Pages are as before where it did not."""
    ours, theirs = channel_pair()
    act = chance.choice([closed, damaged, silent])
    if chance.random() < 0.5:
        ours = Faulty(ours, chance.randint(0, 30), act)
    else:
        theirs = Faulty(theirs, chance.randint(0, 3), act)
    start, total = chance.choice((0, 7)), chance.randint(1, 20)
    begun(receiver, kind, 1, start)
    begun(sender, kind, 1)
    before = receiver.num_used_pages, content(receiver, 1)
    verdicts, errors = list[bool](), list[str]()
    stop = chance.choice(["", "", "", "cancel the receiver", "cancel the sender", "remove", "clear"])
    try:
        found = receiver.disagg_prepare_recv(1, total, channel=theirs)
        if start:
            run(sender, kind, 1, start)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("quire.kv.transfer_verbs.OFFER_SECONDS", 0.0)
            sender.disagg_mark_send(1, start, found, ours)
    except (DataLoss, InvalidArgument) as error:
        errors.append(str(error))
        if 1 in receiver.state.parts.transfers:
            receiver.disagg_cancel(1)
        run(sender, kind, 1, start + total - sender.sequence_length(1))
        verdicts.append(False)
    else:
        for count in chunks(chance, total):
            run(sender, kind, 1, count)  # whatever happens to the channel
        if stop == "cancel the receiver":
            receiver.disagg_cancel(1)
        elif stop == "cancel the sender":
            sender.disagg_cancel(1)
        elif stop == "remove":
            receiver.remove_sequence(1)
            begun(receiver, kind, 1, start)
        elif stop == "clear":
            receiver.clear()
            begun(receiver, kind, 1, start)
        for state in (receiver, sender):
            if 1 not in state.state.parts.transfers:
                verdicts.append(not stop or state is sender)
                continue
            try:
                state.disagg_wait(1, timeout=0)
                verdicts.append(True)
            except (DataLoss, Cancelled) as error:
                errors.append(str(error))
                verdicts.append(False)
    sender.check()
    receiver.check()
    assert all(any(word in one for word in ("sequence 1", "closed", "damaged", "has offered")) for one in errors), (
        errors
    )
    assert sender.sequence_length(1) == start + total, "a broken channel disturbs no forward"
    came = receiver.sequence_length(1) == start + total
    assert came or verdicts[0] is False
    if came:
        same(receiver, 1, sender, 1)
        goes_on(kind, receiver, 1, sender, 1)
    else:
        after = receiver.num_used_pages, content(receiver, 1)
        assert after[0] == before[0]
        assert all(torch.equal(after[1][name], tensor) for name, tensor in before[1].items())
    return came


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_breaks_nothing_is_lost(kind: str) -> None:
    """Random faults and cancellations on either side: pages in equal pages out, no wrong row."""
    chance, came = random.Random(kind), 0
    sender, receiver = made(kind, 4), made(kind, 3)
    rounds = examples(16, 160)
    for _ in range(rounds):
        came += one_hand_over(kind, chance, sender, receiver)
        for state in (sender, receiver):
            state.remove_sequence(1)
            assert state.empty()
    assert 0 < came < rounds


def test_late_messages_are_dropped() -> None:
    """Rows of a hand-over that was cancelled never reach pages that have a new owner."""
    sender, receiver = made("full"), made("full")
    ours, theirs = channel_pair()
    begun(receiver, "full", 0)
    begun(sender, "full", 0)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, 9, channel=theirs), ours)
    run(sender, "full", 0, 9)
    receiver.disagg_cancel(0)
    begun(receiver, "full", 1, 8)
    before = content(receiver, 1)
    receiver.disagg_prepare_recv(0, 9, channel=theirs)
    with pytest.raises(DataLoss, match=r"silent for 0 seconds; 0 of 2 layers of sequence 0 had arrived"):
        receiver.disagg_wait(0, timeout=0)
    assert all(torch.equal(content(receiver, 1)[name], tensor) for name, tensor in before.items())
    with pytest.raises(Cancelled, match="9 of 9 tokens of sequence 0 were sent"):
        sender.disagg_wait(0)


def test_refusals_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kv.transfer_verbs.OFFER_SECONDS", 0.0)
    sender, receiver, other = made("hybrid"), made("hybrid", capacity=16), made("full")
    ours, theirs = channel_pair()
    begun(receiver, "hybrid", 0)
    begun(sender, "hybrid", 0, 5)
    for length, kind in ((0, InvalidArgument), (17, ResourceExhausted)):
        with pytest.raises(kind, match="disagg_prepare_recv"):
            receiver.disagg_prepare_recv(0, length, channel=theirs)
        assert receiver.num_used_pages == 0
    for verb in ("disagg_wait", "disagg_cancel", "disagg_receive"):
        with pytest.raises(FailedPrecondition, match="neither being received nor sent"):
            getattr(receiver, verb)(0)
    found = receiver.disagg_prepare_recv(0, 9, channel=theirs)
    with pytest.raises(FailedPrecondition, match="being received; call disagg_wait"):
        receiver.disagg_prepare_recv(0, 9, channel=theirs)
    for call in (
        lambda: run(receiver, "hybrid", 0, 1),
        lambda: receiver.fork_sequence(0, 1),
        lambda: receiver.popn(0, 0),
        lambda: receiver.checkpoint(0),
        lambda: receiver.disagg_mark_send(0, 0, found, theirs),
        lambda: content(receiver, 0),
    ):
        with pytest.raises(FailedPrecondition, match="being received"):
            call()
    for given in ((), (1,), (1, 8), (0,), (1, 8, 0), (*found, 4), (2**40, 1), (1, 0, 2**40)):
        with pytest.raises(InvalidArgument, match="disagg_mark_send: the map"):
            sender.disagg_mark_send(0, 0, given, ours)
    with pytest.raises(InvalidArgument, match=r"the receiver has offered the maps .* is none of them"):
        sender.disagg_mark_send(0, 0, (*found[:-2], found[-2] + 1, 1), ours)
    with pytest.raises(InvalidArgument, match=r"begin 6 of sequence 0; 0\.\.5 \(its length\)"):
        sender.disagg_mark_send(0, 6, found, ours)
    sender.disagg_mark_send(0, 0, found, ours)
    with pytest.raises(FailedPrecondition, match="being sent already"):
        sender.disagg_mark_send(0, 0, found, ours)
    with pytest.raises(InvalidArgument, match="5 tokens of sequence 0 behind 5 cross position 9"):
        run(sender, "hybrid", 0, 5)
    with pytest.raises(FailedPrecondition, match=r"tokens 0\.\.4 of sequence 0 were sent"):
        sender.popn(0, 1)
    with pytest.raises(FailedPrecondition, match="trees are not"):
        sender.begin_forward([0], [2], [-1, 0])
    run(sender, "hybrid", 0, 4)
    for state in (receiver, sender):
        state.disagg_wait(0)
    same(receiver, 0, sender, 0)

    begun(other, "full", 0)
    end, far = channel_pair()
    begun(receiver, "hybrid", 1)
    found = receiver.disagg_prepare_recv(1, 2, channel=far)
    with pytest.raises(InvalidArgument, match=r"the map has 9 integers, 3 for 1 classes|malformed"):
        other.disagg_mark_send(0, 0, found, end)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float16}, r"layer 0 has dtype 'float16', expected 'float32'"),
        ({"first_layer": 2}, r"layout with first_layer 2 found, 0 expected"),
    ],
)
def test_a_receiver_of_another_layout(change: dict[str, object], message: str) -> None:
    sender, receiver = made("full"), made("full", **change)
    ours, theirs = channel_pair()
    begun(sender, "full", 0, 3)
    receiver.add_sequence(0)
    found = receiver.disagg_prepare_recv(0, 3, channel=theirs)
    with pytest.raises(InvalidArgument, match=message):
        sender.disagg_mark_send(0, 0, found, ours)
    assert not sender.state.parts.transfers


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = made("full"), made("full")
    ours, theirs = channel_pair()
    begun(sender, "full", 0, 3)
    receiver.add_sequence(0)
    with monkeypatch.context() as patch:
        patch.setattr("quire.kv.transfer_verbs.VERSION", 7)
        found = receiver.disagg_prepare_recv(0, 3, channel=theirs)
    with pytest.raises(InvalidArgument, match="the receiver hands over by version 7; 1 is expected"):
        sender.disagg_mark_send(0, 0, found, ours)


def test_an_aborted_forward_is_sent_again() -> None:
    sender, receiver = made("hybrid"), made("hybrid", 3)
    ours, theirs = channel_pair()
    begun(receiver, "hybrid", 0)
    begun(sender, "hybrid", 0)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, 9, channel=theirs), ours)
    with pytest.raises(ZeroDivisionError):
        run(sender, "hybrid", 0, 6, between=lambda index: 1 // (2 - index))
    sender.abort_forward()
    run(sender, "hybrid", 0, 3)
    run(sender, "hybrid", 0, 6)
    run(sender, "hybrid", 0, 1)
    receiver.disagg_wait(0)
    sender.disagg_wait(0)
    sender.popn(0, 1)
    same(receiver, 0, sender, 0)


def test_skipped_layers_arrive_as_zeros() -> None:
    sender, receiver = made("full"), made("full", 3)
    ours, theirs = channel_pair()
    begun(receiver, "full", 0)
    begun(sender, "full", 0)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, 5, channel=theirs), ours)
    sender.begin_forward([0], [5])
    sender.append_kv(0, torch.ones(5, 2, 8), torch.ones(5, 2, 6))
    sender.end_forward(skipped=[1])
    receiver.disagg_wait(0)
    same(receiver, 0, sender, 0)
    assert not content(receiver, 0)["1.k"].any()


def test_rows_come_while_forwards_run() -> None:
    """A thread takes what comes while the receiver computes another sequence."""
    sender, receiver = made("hybrid"), made("hybrid", 3)
    ours, theirs = channel_pair()
    for seq in (0, 1):
        begun(receiver, "hybrid", seq)
    begun(sender, "hybrid", 0)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, 30, channel=theirs), ours)
    thread = threading.Thread(target=lambda: [None for _ in iter(lambda: receiver.disagg_receive(0, 5), True)])
    thread.start()
    for _ in range(30):
        run(receiver, "hybrid", 1, 1)
        run(sender, "hybrid", 0, 1)
    thread.join()
    receiver.disagg_wait(0)
    same(receiver, 0, sender, 0)
    goes_on("hybrid", receiver, 1, sender, 0)


def test_windows_of_sequences() -> None:
    """A sequence with a sink and a window takes what these leave."""
    sender, receiver = made("full"), made("full", 3)
    ours, theirs = channel_pair()
    for state in (sender, receiver):
        begun(state, "full", 0)
        state.enable_sliding_window_for_seq(0, 8, 2)
    found = receiver.disagg_prepare_recv(0, 20, channel=theirs)
    sender.disagg_mark_send(0, 0, found, ours)
    for count in (9, 8, 3):
        run(sender, "full", 0, count)
    receiver.disagg_wait(0)
    receiver.check()
    assert receiver.cached_length(0) == sender.cached_length(0) == 8
    goes_on("full", receiver, 0, sender, 0)


def test_rows_for_slots_of_others_are_refused() -> None:
    """A sender cannot write where it was not told to."""
    sender, receiver = made("full"), made("full")
    ours, theirs = channel_pair()
    begun(receiver, "full", 1, 8)
    before = content(receiver, 1)
    begun(receiver, "full", 0)
    begun(sender, "full", 0, 4)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, 8, channel=theirs), ours)
    sender.state.parts.transfers[0]._slots[0][4:] = range(4)  # type: ignore[attr-defined]
    run(sender, "full", 0, 4)
    with pytest.raises(DataLoss, match="came for slots that were not given for them; 0 of 2 layers"):
        receiver.disagg_wait(0, 10)
    assert all(torch.equal(content(receiver, 1)[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    "runs",
    [
        lambda slot: [],
        lambda slot: [[-1, 1]],
        lambda slot: [[slot + 1, 0]],
        lambda slot: [[slot + 2, -1]],
        lambda slot: [[slot - 1, 2]],
        lambda slot: [[slot, 5]],
        lambda slot: [[slot, 8]],
        lambda slot: [[slot, 4], [slot + 4, 1]],
        lambda slot: [[1000, 4]],
        lambda slot: [[slot, 2**62]],
        lambda slot: [[slot, 2**64]],
        lambda slot: [[slot, 2, 2]],
        lambda slot: "slots",
    ],
)
def test_runs_that_were_not_given_are_refused(runs: Callable[[int], object]) -> None:
    """Of two pages between those of others, in a message that is whole."""
    kind = "window" if runs(0) == [[-1, 1]] else "full"  # The window leaves tokens without slots.
    receiver = made(kind, 4)
    for seq in (1, 2, 3):
        begun(receiver, kind, seq, 4)
    receiver.remove_sequence(2)
    before = content(receiver, 1), content(receiver, 3)
    begun(receiver, kind, 0)
    ours, theirs = channel_pair()
    _, slot, count, *_ = receiver.disagg_prepare_recv(0, 8, channel=theirs)
    assert slot == -1 if kind == "window" else count == 4
    name = receiver.state.parts.transfers[0].name
    ours.send(packed({"transfer": name, "kind": "rows", "layer": 0, "runs": runs(slot)}))
    with pytest.raises(DataLoss, match=r"not given for them|is malformed"):
        receiver.disagg_wait(0, 10)
    for seq, expected in zip((1, 3), before, strict=True):
        assert all(torch.equal(content(receiver, seq)[name], tensor) for name, tensor in expected.items())
    receiver.check()


@pytest.mark.parametrize("total", [5, 20])
@pytest.mark.parametrize("sizes", [(1, 16), (16, 1), (1, 1)])
def test_pages_between_those_of_others(total: int, sizes: tuple[int, int]) -> None:
    """Few runs of slots, and many, on either side."""
    ours, theirs = channel_pair()
    sender, receiver = (made("full", size) for size in sizes)
    for state, size in ((sender, sizes[0]), (receiver, sizes[1])):
        others = range(100, 100 + 160 // size)  # They have all pages.
        for seq in others:
            begun(state, "full", seq, 1)
        for seq in others[::2]:
            state.remove_sequence(seq)
        begun(state, "full", 0)
    sender.disagg_mark_send(0, 0, receiver.disagg_prepare_recv(0, total, channel=theirs), ours)
    run(sender, "full", 0, total)
    receiver.disagg_wait(0, 10)
    same(receiver, 0, sender, 0)


def test_states_that_leave_the_ring_are_free() -> None:
    """What comes goes to the front of a full ring of recent states."""
    sender, receiver = made("recurrent"), made("recurrent")
    for state in (sender, receiver):
        begun(state, "recurrent", 0, 1)
        for _ in range(4):
            run(state, "recurrent", 0, 1)
    used = receiver.num_used_pages
    ours, theirs = channel_pair()
    sender.disagg_mark_send(0, 5, receiver.disagg_prepare_recv(0, 3, channel=theirs), ours)
    run(sender, "recurrent", 0, 3)
    receiver.disagg_wait(0, 10)
    receiver.check()
    assert receiver.num_used_pages == used
    assert receiver.popn(0, 3) == 0
