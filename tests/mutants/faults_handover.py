"""Faults of hand-over: messages, pages, states, secrets."""

from __future__ import annotations

from tests.mutants.harness import Mutant

MUTANTS = (
    Mutant(
        name="messages-of-an-ended-hand-over-count",
        file="kv/transfer_verbs.py",
        old="one.channel is channel and one.name == transfer",
        new="one.channel is channel",
        tests=("kv/test_transfers.py::test_late_messages_are_dropped",),
    ),
    Mutant(
        name="the-last-layer-is-not-sent",
        file="kv/state.py",
        old="        opened.send_rest()\n",
        new="",
        tests=("kv/test_transfers.py::test_random_cuts",),
    ),
    Mutant(
        name="a-received-tail-loses-its-first-rows",
        file="kv/sequence_table.py",
        old="copies = [SlotCopy(table.page(whole) * size, int(pages[whole]) * size, valid)]",
        new="copies = []",
        tests=("kv/test_transfers.py::test_random_cuts",),
    ),
    Mutant(
        name="senders-write-anywhere",
        file="kv/reception.py",
        old='            raise DataLoss(f"rows of layer {layer_id} came for slots that were not given for them")',
        new="            pass",
        tests=("kv/test_transfers.py::test_rows_for_slots_of_others_are_refused",),
    ),
    Mutant(
        name="states-that-leave-the-ring-leak",
        file="kv/recurrent_table.py",
        old="        self._release(self._advance(seq_id, states, passed))",
        new="        self._advance(seq_id, states, passed)",
        tests=("kv/test_transfers.py::test_states_that_leave_the_ring_are_free",),
    ),
    Mutant(
        name="listeners-take-any-secret",
        file="channels/greeting.py",
        old="        connection.sendall(_REFUSED)\n        raise refusal\n",
        new="        pass\n",
        tests=("channels/test_channels.py::test_a_wrong_secret",),
    ),
    Mutant(
        name="a-peer-that-closes-after-the-last-message-loses-it",
        file="channels/socket_end.py",
        old="        return not (left and self._fault)",
        new="        return not self._fault",
        tests=("channels/test_channels.py::test_a_peer_that_answers_and_closes",),
    ),
)
