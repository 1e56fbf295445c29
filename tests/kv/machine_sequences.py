"""Steps of the random machine outside of a forward: sequences, windows, commits, stored rows."""

from __future__ import annotations

import random

from hypothesis import strategies as st
from hypothesis.stateful import rule

from .machine import IDS
from .machine_forwards import ForwardSteps
from .pair import same_bits


class SequenceSteps(ForwardSteps):
    @rule(rng=st.randoms(use_true_random=True))
    def add(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id = self.new_id(rng)
        if self.call("add_sequence", seq_id) and rng.random() < 0.4:
            self.set_window(rng, seq_id)

    @rule(rng=st.randoms(use_true_random=True))
    def remove(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id = self.any_id(rng)
        # Mostly when it is getting full, else nothing ever grows.
        if len(self.oracle.sequences) < 5 and rng.random() < 0.6:
            return
        if self.call("remove_sequence", seq_id):
            self.compare_all()

    def a_position(self, rng: random.Random, seq_id: int) -> int:
        """Mostly a reachable one, often at an edge of what is reachable."""
        length = self.length(seq_id)
        if seq_id not in self.oracle.sequences or rng.random() < 0.2:
            return rng.choice([0, length, rng.randint(-2, length + 1)])
        found = self.oracle.reachable_set(seq_id)
        edges = [m for m in range(length + 1) if (m in found) != (m + 1 in found) or (m in found) != (m - 1 in found)]
        return rng.choice([*edges, length, rng.choice(sorted(found))])

    @rule(rng=st.randoms(use_true_random=True))
    def fork(self, rng: random.Random) -> None:
        self.settle(rng)
        parent, child = self.any_id(rng), self.new_id(rng)
        if self.oracle._pending(parent) and rng.random() < 0.7:
            self.commit_some(rng, [parent])
        pos = rng.choice([-1, self.a_position(rng, parent)])
        if self.call("fork_sequence", parent, child, pos):
            self.pair.compare_rows(child)

    @rule(rng=st.randoms(use_true_random=True))
    def branch(self, rng: random.Random) -> None:
        """A fork of something long, and one token or two for parent, child and some others: pages
        split.
        """
        self.settle(rng)
        usable = [
            seq_id
            for seq_id in self.oracle.sequences
            if not self.oracle.is_importing(seq_id) and not self.oracle._pending(seq_id)
        ]
        unused = [seq_id for seq_id in IDS if seq_id not in self.oracle.sequences]
        if self.oracle.forward is not None or not usable or not unused:
            return
        parent, child = max(usable, key=lambda seq_id: (self.length(seq_id), seq_id)), rng.choice(unused)
        pos = rng.choice([-1, rng.choice(sorted(self.oracle.reachable_set(parent)))])
        self.call("fork_sequence", parent, child, pos)
        self.pair.compare_rows(child)
        for ids in rng.choice([[[parent, child]], [[child], [parent]], [[parent]], [[child]], [[*usable[:7], child]]]):
            ids = list(dict.fromkeys(ids))
            rng.shuffle(ids)
            self.whole_forward(rng, ids, [rng.choice([1, 1, 2]) for _ in ids])

    @rule(rng=st.randoms(use_true_random=True))
    def pop(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id = self.any_id(rng)
        if self.oracle._pending(seq_id) and rng.random() < 0.7:
            self.commit_some(rng, [seq_id])
        position = self.a_position(rng, seq_id)
        if self.oracle.forward is None and rng.random() < 0.3:
            self.call("rewind_cost", seq_id, position)
        if self.call("popn", seq_id, self.length(seq_id) - position):
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def clear(self, rng: random.Random) -> None:
        if rng.random() < 0.93:
            return
        self.call("clear")
        assert self.state.empty()

    # -- windows and trees -------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def window(self, rng: random.Random) -> None:
        """Mostly where it is legal: nothing evicted, no nodes."""
        self.settle(rng)
        legal = [seq_id for seq_id, found in self.oracle.sequences.items() if not found.nodes and not found.evicted]
        seq_id = rng.choice(sorted(legal)) if legal and rng.random() < 0.6 else self.any_id(rng)
        if self.set_window(rng, seq_id):
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def commit(self, rng: random.Random) -> None:
        """Any subset of the pending sequences, in any order."""
        self.settle(rng)
        pending = [seq_id for seq_id in self.oracle.sequences if self.oracle._pending(seq_id)]
        rng.shuffle(pending)
        ids = pending[: rng.randint(1, 4)] if pending else [self.any_id(rng)]
        fault = rng.random()
        if fault < 0.05:
            ids = [*ids, self.any_id(rng)]
        elif fault < 0.08:
            self.call("commit_accepted_token_tree_nodes", ids, [-1] * (len(ids) + 1))
            return
        if self.commit_some(rng, ids):
            self.compare_all()

    # -- rows --------------------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def debug_get(self, rng: random.Random) -> None:
        seq_id, relative = self.any_id(rng), rng.random() < 0.5
        stored = self.stored(seq_id)
        start = rng.choice([0, rng.randint(0, stored), rng.randint(-1, stored + 1)])
        end = rng.choice([None, stored, rng.randint(min(start, stored), stored), rng.randint(-1, stored + 1)])
        layer = rng.choice([*range(len(self.specs))] * 3 + [None, len(self.specs)])
        found = self.compute(
            "debug_get_kv",
            lambda: self.oracle.debug_get_kv(seq_id, start, end, layer, relative),
            lambda: self.state.debug_get_kv(seq_id, start or None, end, layer=layer, relative=relative),
        )
        if found is None:
            return
        expected, got = found
        for which in (0, 1):
            rows = got[which].unbind(0) if layer is None else [got[which]]
            assert all(same_bits(given, right[which]) for given, right in zip(rows, expected, strict=True))

    @rule(rng=st.randoms(use_true_random=True))
    def debug_set(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id, layer = self.any_id(rng), rng.choice([*range(len(self.specs))] * 3 + [len(self.specs)])
        length = self.length(seq_id)
        start = rng.choice([rng.randint(0, length), rng.randint(-1, length + 1)])
        count = rng.choice([0, 1, max(0, length - start), rng.randint(0, length + 1)])
        spec = self.specs[min(layer, len(self.specs) - 1)]
        k = self.values(rng, count, spec.num_kv_heads, spec.head_dim)
        v = self.values(rng, count, spec.num_kv_heads, spec.value_dim)
        if self.call("debug_set_kv", seq_id, start, k, v, layer=layer):
            self.compare_all()
