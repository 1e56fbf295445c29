"""The verbs that hand a sequence over to another state while it is computed (``disagg_...``).

The receiver takes pages and says where rows go; the sender sends each layer's rows once the layer
has run. On the receiver nothing counts before all has come. Whatever ends a hand-over before, its
pages are free again and the sequence is as it was.

Where ranks divide a state, rank 0 hands over rows of all heads and layers. The others take and free
the same pages (``follow``). They answer between steps only, so rank 0 sends behind each step.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.base.errors import (
    Cancelled,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    QuireError,
    RanksBroken,
    ResourceExhausted,
)
from quire.base.interrupts import SHIELD
from quire.base.types import SeqId
from quire.contracts.channel import Buffers, Channel
from quire.contracts.ranks import HandOver
from quire.kv.exchange import get_layout
from quire.kv.forward_need import ForwardNeed
from quire.kv.messages import VERSION, Transfer, opened, packed
from quire.kv.metadata_checks import check_layout
from quire.kv.parts import StateParts
from quire.kv.position_maps import compressed, expanded
from quire.kv.reception import Reception
from quire.kv.send_mark import SendMark
from quire.kv.sequences import check_integer
from quire.kv.stored_rows import require_held

OFFER_SECONDS = 5.0
"""Most seconds that a sender waits for the receiver's offer, which is sent before its map is."""
POLL_SECONDS = 0.05
"""Seconds between checks for signals while a verb waits."""


def disagg_prepare_recv(state: StateParts, seq_id: SeqId, length: int, *, channel: Channel) -> tuple[int, ...]:
    verb = "disagg_prepare_recv"
    length = check_integer(length, f"{verb}: length", 1)
    state.sequences.get(seq_id)
    state.sequences.require_settled(seq_id, verb)
    _require_unsent(state, seq_id, verb)
    if state.recurrent is not None and not state.recurrent.table.num_available:
        raise ResourceExhausted(f"{verb}: needs 1 state, 0 free")
    reception = _reserve(state, seq_id, length, channel, secrets.token_hex(8))
    found = compressed([reception.slots_of_class(index) for index in _order(state)])
    offer = {"kind": "offer", "transfer": reception.name, "version": VERSION, "length": length, "map": found}
    try:
        _let_follow(state, HandOver("receive", seq_id, reception.length - length, reception.length))
        channel.send(packed({**offer, "layout": get_layout(state)}))
    except BaseException:
        _forget(state, seq_id)
        raise
    return found


def disagg_mark_send(
    state: StateParts, seq_id: SeqId, begin: int, compressed_remote_position_map: Sequence[int], receiver: Channel
) -> None:
    verb = "disagg_mark_send"
    begin = check_integer(begin, f"{verb}: begin", 0)
    order = _order(state)
    slots = expanded(compressed_remote_position_map, len(order), verb)
    sequence = state.sequences.get(seq_id)
    if begin > sequence.length:
        raise InvalidArgument(
            f"{verb}: begin {begin} of sequence {seq_id}; 0..{sequence.length} (its length) is accepted"
        )
    state.sequences.require_settled(seq_id, verb)
    _require_unsent(state, seq_id, verb)
    offer = _offer_of(state, receiver, [int(number) for number in compressed_remote_position_map])
    end = begin + int(offer["length"])
    by_class = [one for one, index in zip(slots, order, strict=True) if index is not None]
    if any(len(one) != offer["length"] for one in by_class):
        raise InvalidArgument(
            f"{verb}: the map is of {[len(one) for one in by_class]} tokens by class; {offer['length']} of each were offered"
        )
    for index, one in enumerate(by_class):
        cached = np.flatnonzero(one[: max(0, min(end, sequence.length) - begin)] >= 0) + begin
        pieces = np.split(cached, np.flatnonzero(np.diff(cached) != 1) + 1) if cached.size else []
        require_held(state, seq_id, index, [range(int(one[0]), int(one[-1]) + 1) for one in pieces], verb)
    if state.recurrent is not None and end <= sequence.length:
        positions = state.recurrent.table.committed_slots(seq_id)
        if end not in positions:
            raise InvalidArgument(
                f"{verb}: the map ends at position {end} of sequence {seq_id}, whose recurrent states are kept at {sorted(positions)}"
            )
    state.offers[receiver].remove(offer)
    _let_follow(state, HandOver("send", seq_id, begin, end))
    mark = SendMark(state, seq_id, begin, end, by_class, receiver, offer["transfer"])
    state.transfers[int(seq_id)] = mark
    mark.send_computed(sequence.length)


def disagg_receive(state: StateParts, seq_id: SeqId, timeout: float | None = None) -> bool:
    transfer = _transfer_of(state, seq_id, "disagg_receive")
    if not transfer.is_over:
        _pump(state, transfer.channel, timeout)
    return transfer.is_over


def disagg_wait(state: StateParts, seq_id: SeqId, timeout: float | None = None) -> None:
    verb = "disagg_wait"
    transfer = _transfer_of(state, seq_id, verb)
    state.sequences.require_closed(verb)
    try:
        _pump_until_over(state, transfer, timeout)
        if transfer.error is not None:
            raise transfer.error
        if isinstance(transfer, Reception):
            _let_follow(state, HandOver("publish", seq_id))
            transfer.publish()
    except BaseException as error:
        _give_up(state, transfer, f"{type(error).__name__}: {error}")
        raise
    if isinstance(transfer, Reception):
        _tell(transfer, "done")
    del state.transfers[seq_id]
    if isinstance(transfer, SendMark):
        _let_follow(state, HandOver("forget", seq_id))


def disagg_cancel(state: StateParts, seq_id: SeqId) -> None:
    transfer = _transfer_of(state, seq_id, "disagg_cancel")
    state.sequences.require_closed("disagg_cancel")
    _forget(state, seq_id)
    _tell(transfer, "cancel")


# -- what other verbs ask --------------------------------------------------------------------------


def end_transfers(state: StateParts, seq_ids: Iterable[SeqId]) -> None:
    """Cancel what is sent or received of sequences that go. What was sent whole stays sent."""
    for seq_id in seq_ids:
        if (transfer := state.transfers.get(seq_id)) is not None:
            _forget(state, seq_id)
            if not (isinstance(transfer, SendMark) and transfer.ended):
                _tell(transfer, "cancel")


def check_forward(state: StateParts, need: ForwardNeed) -> None:
    """Raise each refusal of a forward of sequences that are being sent."""
    for seq_id, length, count, tree in zip(need.seq_ids, need.lengths, need.counts, need.trees, strict=True):
        if not isinstance(mark := state.transfers.get(seq_id), SendMark):
            continue
        if state.recurrent is not None and length < mark.end < length + count:
            raise InvalidArgument(
                f"begin_forward: {count} tokens of sequence {seq_id} behind {length} cross position {mark.end}, whose recurrent "
                f"state is sent; give {mark.end - length} of them first"
            )
        if tree is not None:
            raise FailedPrecondition(f"begin_forward: sequence {seq_id} is being sent, and trees are not; give a chain")


def check_pop(state: StateParts, seq_id: SeqId, stop: int) -> None:
    """Raise ``FailedPrecondition`` for a pop of tokens that were sent."""
    mark = state.transfers.get(seq_id)
    if isinstance(mark, SendMark) and stop < mark.sent:
        raise FailedPrecondition(
            f"popn: tokens {mark.begin}..{mark.sent - 1} of sequence {seq_id} were sent; keep {mark.sent}, or cancel the hand-over"
        )


def check_transfers(state: StateParts) -> None:
    """Check that exactly the sequences that are received have pages and slots for it."""
    receiving = {seq for seq in state.sequences.ids if state.sequences.get(seq).receiving}
    noted = {seq for seq, one in state.transfers.items() if isinstance(one, Reception)}
    slots = receiving if state.recurrent is None else state.recurrent.table.received.keys()
    if not receiving == noted == state.sequences.received.keys() == slots:
        raise QuireError(f"sequences {sorted(receiving)} are receiving, and receptions of {sorted(noted)} noted")
    if gone := [seq for seq in state.transfers if seq not in state.sequences]:
        raise QuireError(f"sequences {gone} are handed over, which do not exist")


# -- ranks -----------------------------------------------------------------------------------------


def send_computed(state: StateParts) -> None:
    """Send the new rows of a divided state. The caller is rank 0, behind each step."""
    for mark in [one for one in state.transfers.values() if isinstance(one, SendMark)]:
        try:
            mark.send_computed(state.sequences.get(mark.seq_id).length)
        except QuireError as error:  # A rank does not answer: the next step says so.
            mark.fail(DataLoss(f"{error}; {mark.told()}"))


def follow(state: StateParts, event: HandOver) -> None:
    """Repeat rank 0's change on another rank."""
    seq = event.seq
    match event.kind:
        case "receive":
            _reserve(state, seq, event.end - event.begin, _RANK_0, "")
        case "send":
            state.transfers[seq] = SendMark(state, seq, event.begin, event.end, [], _RANK_0, "")
        case "publish":
            reception = state.transfers.pop(seq)
            assert isinstance(reception, Reception)
            reception.publish()
        case "forget":
            if seq in state.transfers:
                _forget(state, seq)


def _let_follow(state: StateParts, event: HandOver) -> None:
    if state.division is not None and state.division.peers is not None:
        state.division.peers.follow(event)


class _Rank0:
    """The ``Channel`` of another rank than 0: it has none."""

    def send(self, parts: Buffers) -> None:
        raise FailedPrecondition("rank 0 hands over for all ranks")

    def receive(self, timeout: float | None = None) -> memoryview | None:
        raise FailedPrecondition("rank 0 hands over for all ranks")

    def close(self) -> None:
        pass


_RANK_0 = _Rank0()


# -- messages --------------------------------------------------------------------------------------


def _order(state: StateParts) -> list[int | None]:
    """Return the classes in the order of their first layers; None: the recurrent one."""
    firsts: list[tuple[int, int | None]] = [(one.layers[0], index) for index, one in enumerate(state.paged.classes)]
    if state.recurrent_ids:
        firsts.append((state.recurrent_ids[0], None))
    return [index for _, index in sorted(firsts, key=lambda one: one[0])]


def _require_unsent(state: StateParts, seq_id: SeqId, verb: str) -> None:
    if seq_id in state.transfers:
        raise FailedPrecondition(f"{verb}: sequence {seq_id} is being sent already; wait for that, or cancel it")


def _reserve(state: StateParts, seq_id: SeqId, length: int, channel: Channel, name: str) -> Reception:
    """Take room for ``length`` tokens behind those of a sequence."""
    start = state.sequences.get(seq_id).length
    classes = state.sequences.reserve_reception(seq_id, length)
    slot = None if state.recurrent is None else state.recurrent.table.reserve_reception(seq_id)
    found = Reception(state, seq_id, start + length, channel, name, classes, slot)
    state.transfers[int(seq_id)] = found
    try:
        for one, taken in zip(state.paged.classes, classes, strict=True):
            one.storage.blank(taken.blanks)
            one.storage.copy(taken.copies)
    except BaseException:
        _forget(state, seq_id)
        raise
    return found


def _transfer_of(state: StateParts, seq_id: SeqId, verb: str) -> Transfer:
    state.sequences.get(seq_id)
    found = state.transfers.get(seq_id)
    if found is None:
        raise FailedPrecondition(
            f"{verb}: sequence {seq_id} is neither being received nor sent; call disagg_prepare_recv or disagg_mark_send"
        )
    return found


def _offer_of(state: StateParts, channel: Channel, given: list[int]) -> dict[str, Any]:
    """Return the receiver's offer of this map, checked; wait until it has come."""
    verb, deadline = "disagg_mark_send", time.monotonic() + OFFER_SECONDS
    offers = state.offers.setdefault(channel, [])
    while not (found := [one for one in offers if one["map"] == given]):
        if not _pump(state, channel, min(POLL_SECONDS, OFFER_SECONDS)) and time.monotonic() >= deadline:
            raise InvalidArgument(
                f"{verb}: the receiver has offered the maps {[one['map'] for one in offers]}; {given} is none of them"
            )
        SHIELD.check()
    offer = found[0]
    if offer.get("version") != VERSION:
        raise InvalidArgument(
            f"{verb}: the receiver hands over by version {offer.get('version')!r}; {VERSION} is expected"
        )
    check_layout(get_layout(state), offer.get("layout"), verb)
    return offer


def _pump(state: StateParts, channel: Channel, timeout: float | None) -> bool:
    """Receive one message and act by it; False if there was none in time. What ends the channel
    ends all that it carries."""
    try:
        message = channel.receive(timeout)
        if message is None:
            return False
        header, data = opened(message)
    except DataLoss as error:
        carried = [one for one in list(state.transfers.values()) if one.channel is channel]
        for one in carried:
            one.fail(DataLoss(f"{error}; {one.told()}"))
        if not carried:
            raise
        return False
    _dispatch(state, channel, header, data)
    return True


def _dispatch(state: StateParts, channel: Channel, header: Mapping[str, Any], data: memoryview) -> None:
    kind, transfer = header.get("kind"), header.get("transfer")
    if kind == "offer":
        state.offers.setdefault(channel, []).append(dict(header))
        return
    found = next(
        (one for one in list(state.transfers.values()) if one.channel is channel and one.name == transfer), None
    )
    if found is None:  # Of a hand-over that has ended: its slots may have another owner.
        return
    if kind == "cancel":
        found.fail(Cancelled(f"the other side has cancelled the hand-over; {found.told()}"))
    elif kind == "failed":
        found.fail(DataLoss(f"the other side has failed ({header.get('reason')}); {found.told()}"))
    elif isinstance(found, Reception) and kind != "alive":
        found.take(header, data)
    elif isinstance(found, SendMark) and kind == "done":
        found.delivered = True


def _pump_until_over(state: StateParts, transfer: Transfer, timeout: float | None) -> None:
    """Receive until a hand-over is over, or the peer was silent for ``timeout`` seconds."""
    heard = time.monotonic()
    while not transfer.is_over:
        left = POLL_SECONDS if timeout is None else min(POLL_SECONDS, max(0.0, heard + timeout - time.monotonic()))
        if _pump(state, transfer.channel, left):
            heard = time.monotonic()
        elif timeout is not None and time.monotonic() >= heard + timeout and not transfer.is_over:
            transfer.fail(DataLoss(f"the other side was silent for {timeout} seconds; {transfer.told()}"))
        SHIELD.check()


def _forget(state: StateParts, seq_id: SeqId) -> None:
    if isinstance(found := state.transfers.pop(seq_id), Reception):
        found.give_back()
    with contextlib.suppress(RanksBroken):
        _let_follow(state, HandOver("forget", seq_id))


def _give_up(state: StateParts, transfer: Transfer, reason: str) -> None:
    """Forget a hand-over, and tell the other side if it may not know."""
    known = isinstance(transfer.error, Cancelled)
    _forget(state, transfer.seq_id)
    if not known:
        _tell(transfer, "failed", reason=reason)


def _tell(transfer: Transfer, kind: str, **more: str) -> None:
    """Send a last word, which a peer that is gone does not miss."""
    with contextlib.suppress(QuireError):
        transfer.channel.send(packed({"transfer": transfer.name, "kind": kind, **more}))
