"""Steps of the random machine that move sequences: out of the state, into another, and back into
it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.kv.exchange import checksum
from quire.kv.exports import SequenceExport

from .machine_sequences import SequenceSteps
from .oracle import ModelSequence
from .oracle_exchange import Export
from .oracle_windows import ranges
from .pair import Pair, same_bits

Groups = list[dict[str, Tensor]]


class ExchangeSteps(SequenceSteps):
    def __init__(self) -> None:
        super().__init__()
        self.exports: list[tuple[dict[str, Any], Groups]] = []
        self.sources: dict[int, tuple[dict[str, Any], Groups]] = {}
        """Where each import comes from."""
        self.opened: list[Opened] = []

    @rule(rng=st.randoms(use_true_random=True))
    def export(self, rng: random.Random) -> None:
        """Out of the state, into another with another page size, and out of that again."""
        seq_id = self.any_id(rng)
        if self.oracle.forward is None and self.oracle._pending(seq_id) and rng.random() < 0.7:
            self.commit_some(rng, [seq_id])
        found = self.compute(
            "get_checkpoint_metadata",
            lambda: self.oracle.export(seq_id),
            lambda: self.state.get_checkpoint_metadata(seq_id),
        )
        if not found:
            return
        told, metadata = found
        expected = told.metadata(self.oracle.classes)
        assert {name: metadata[name] for name in expected} == expected
        groups = [self.state.export_page_group(seq_id, layer) for layer in range(len(self.specs))]
        # Room for everything, whatever the page size.
        page_size = rng.choice([1, 3, 7, 16])
        other = Pair(self.specs, capacity=1 + metadata["length"], page_size=page_size, dtype=self.dtype)
        other.state.prepare_import(5, metadata)
        other.oracle.prepare_import(5, Export.read(metadata))
        for layer in reversed(range(len(self.specs))):
            other.state.import_page_group(5, layer, groups[layer])
            other.oracle.import_group(5, layer, groups[layer]["k"], groups[layer]["v"])
        other.state.finish_import(5)
        other.oracle.finish_import(5)
        for pair, exported in ((self.pair, seq_id), (other, 5)):
            for layer, group in enumerate(groups):
                stored = pair.oracle.stored(exported, layer)
                assert all(
                    torch.equal(given.view(torch.uint8), right.view(torch.uint8))
                    for given, right in zip(group.values(), stored, strict=True)
                )
        other.compare()
        assert other.state.get_checkpoint_metadata(5) == metadata
        assert other.state.get_layout_hash() == self.state.get_layout_hash() == metadata["layout_hash"]
        self.exports = [*self.exports[-3:], (metadata, groups)]

    @rule(rng=st.randoms(use_true_random=True))
    def start_import(self, rng: random.Random) -> None:
        """Perhaps behind pages of another sequence, which has other values; perhaps it counts
        before all has come.
        """
        self.settle(rng)
        if not self.exports:
            self.export(rng)
        if not self.exports:
            return
        # Mostly one that holds something.
        metadata, groups = max(rng.choices(self.exports, k=2), key=lambda one: one[0]["length"])
        summed = rng.random() < 0.3
        metadata = metadata if summed else without_checksums(metadata)
        parent, shared = (
            self.a_prefix(rng, metadata["length"]) if rng.random() < 0.1 + 0.5 * (not summed) else (None, 0)
        )
        seq_id, export = self.new_id(rng), Export.read(metadata)
        kept = metadata["kept_recurrent_positions"]
        more = {"kept": kept} if kept else {}
        needed = self.compute(
            "import_need",
            lambda: self.oracle.import_need(export, shared),
            lambda: self.state.import_need(metadata, shared=shared),
        )
        free = self.state.free_pages()
        found = self.compute(
            "prepare_import",
            lambda: self.oracle.prepare_import(seq_id, export, parent, shared, summed=summed, **more),
            lambda: self.state.prepare_import(seq_id, metadata, parent=parent, shared=shared),
        )
        if found and needed:
            assert needed[1][: len(needed[0])] == needed[0]
            assert [one - need for one, need in zip(free, needed[1], strict=True)] == self.state.free_pages()
            self.sources[seq_id] = (metadata, groups)
            early = rng.random() < 0.5
            self.go_on_for(rng, seq_id, rng.choice([0, 1, 3, 30, 30]))
            if early and self.call("publish_import", seq_id):
                ids = list(dict.fromkeys([seq_id, rng.choice(sorted(self.oracle.sequences))]))
                self.whole_forward(rng, ids, [rng.choice([1, 2, 5]) for _ in ids])
            if rng.random() < 0.7:
                self.finish(seq_id)

    def a_prefix(self, rng: random.Random, length: int) -> tuple[int | None, int]:
        """Mostly whole pages that a sequence has."""
        parent, size = self.any_id(rng), self.oracle.page_size
        pages = rng.randint(0, min(length, self.length(parent)) // size)
        fault = rng.random()
        if fault < 0.05:
            return parent, rng.choice([pages * size + 1, (pages + 1) * size, -size])
        return (None if fault < 0.07 else parent), pages * size

    def importing(self) -> list[int]:
        return [seq_id for seq_id in self.oracle.sequences if self.oracle.is_importing(seq_id)]

    @rule(rng=st.randoms(use_true_random=True))
    def import_some(self, rng: random.Random) -> None:
        """Legal in an open forward if the sequence counts already."""
        if rng.random() < 0.6:
            self.settle(rng)
        importing = self.importing()
        if self.exports and (importing or rng.random() < 0.1):
            for _ in range(rng.choice([1, 1, 4])):
                self.go_on_importing(rng, rng.choice(importing) if importing else self.any_id(rng))
        else:
            self.branch(rng)

    def go_on_for(self, rng: random.Random, seq_id: int, times: int) -> None:
        """So often, or until all has come."""
        for _ in range(times):
            if self.oracle.is_importing(seq_id) and self.oracle.pending_layers(seq_id):
                self.go_on_importing(rng, seq_id)

    def go_on_importing(self, rng: random.Random, seq_id: int) -> None:
        """A layer, or some rows of one."""
        _, groups = self.sources.get(seq_id, rng.choice(self.exports))
        pending = self.oracle.pending_layers(seq_id) if self.oracle.is_importing(seq_id) else []
        layer = rng.choice(pending) if pending and rng.random() < 0.9 else rng.randrange(len(groups))
        if layer < len(self.specs) and rng.random() < 0.5:
            self.bring_rows(rng, seq_id, layer)
        else:
            self.bring_layer(rng, seq_id, layer)

    def rows_of(self, rng: random.Random, seq_id: int, layer: int) -> tuple[dict[int, int], dict[str, Tensor]]:
        """The rows of an attention layer where an import comes from: the place of each position."""
        metadata, groups = self.sources.get(seq_id, rng.choice(self.exports))
        held = Export.read(metadata).held[self.oracle.class_of[layer]]
        return {position: row for row, position in enumerate(held)}, groups[layer]

    def bring_rows(self, rng: random.Random, seq_id: int, layer: int) -> None:
        """Some that are missing, or some of which one is not."""
        places, group = self.rows_of(rng, seq_id, layer)
        missing = sorted(places)
        if self.oracle.is_importing(seq_id):
            missing = sorted(set(self.oracle.expected(seq_id, layer)) - self.oracle.sequences[seq_id].come[layer])
        start = rng.choice(missing) if missing else rng.randint(-1, 5)
        stop = start + 1
        while stop in missing and rng.random() < 0.8:
            stop += 1
        fault = rng.random() if missing else 0.2
        if fault < 0.1:
            start, stop = rng.choice([(start - 1, stop), (start, stop + 1), (start, start)])
        rows = [places.get(position, 0) for position in range(start, stop)] if places else []
        k, v = group["k"][rows], group["v"][rows]
        if 0.1 < fault < 0.13:
            k = k[:, :, 1:]
            self.fail(
                "import_rows", InvalidArgument, lambda: self.state.import_rows(seq_id, layer, start, {"k": k, "v": v})
            )
            return
        summed = self.is_summed(seq_id)
        self.compute(
            "import_rows",
            lambda: self.oracle.import_rows(seq_id, layer, start, k, v, summed=summed),
            lambda: self.state.import_rows(seq_id, layer, start, {"k": k, "v": v}),
        )

    def is_summed(self, seq_id: int) -> bool:
        """Whether what is being imported has checksums."""
        if not self.oracle.is_importing(seq_id):
            return False
        groups = self.sources[seq_id][0]["groups"]
        return any(tensor["checksum"] for group in groups for tensor in group["tensors"].values())

    def bring_layer(self, rng: random.Random, seq_id: int, layer: int) -> None:
        """A group that is still missing, or one too many, or another one's, or damaged."""
        places, group = self.rows_of(rng, seq_id, layer)
        if rng.random() < 0.1:
            group = rng.choice(self.exports)[1][layer]
        elif self.oracle.is_importing(seq_id):
            rows = [places[position] for position in self.oracle.expected(seq_id, layer)]
            group = {name: tensor[rows] for name, tensor in group.items()}
        group = dict(group)
        if rng.random() < 0.2 and group["k"].numel() and self.is_summed(seq_id):
            group["k"] = group["k"].clone()
            group["k"].view(torch.uint8).view(-1)[0] ^= 1

        def intact() -> bool:
            if not self.is_summed(seq_id):
                return True
            promised = self.sources[seq_id][0]["groups"][layer]["tensors"]
            return all(checksum(group[name]) == promised[name]["checksum"] for name in ("k", "v"))

        self.compute(
            "import_page_group",
            lambda: self.oracle.import_group(seq_id, layer, group["k"], group["v"], intact),
            lambda: self.state.import_page_group(seq_id, layer, group),
        )

    def bring(self, rng: random.Random, layer: int) -> None:
        """Mostly write a layer before an open forward reaches it."""
        if self.oracle.forward is None or rng.random() < 0.2:
            return
        for seq_id in self.oracle.forward.ids:
            for _ in range(8):
                if not self.oracle.is_importing(seq_id) or layer not in self.oracle.pending_layers(seq_id):
                    break
                if layer < len(self.specs) and not self.is_summed(seq_id):
                    self.bring_rows(rng, seq_id, layer)
                else:
                    self.bring_layer(rng, seq_id, layer)

    def attend(self, rng: random.Random, layer: int) -> None:
        self.bring(rng, layer)
        super().attend(rng, layer)

    @rule(rng=st.randoms(use_true_random=True))
    def publish_import(self, rng: random.Random) -> None:
        self.settle(rng)
        importing = self.importing()
        if importing or rng.random() < 0.1:
            self.call("publish_import", rng.choice(importing) if importing and rng.random() < 0.9 else self.any_id(rng))
        else:
            self.branch(rng)

    @rule(rng=st.randoms(use_true_random=True))
    def finish_import(self, rng: random.Random) -> None:
        self.settle(rng)
        importing = self.importing()
        if importing or rng.random() < 0.1:
            seq_id = rng.choice(importing) if importing and rng.random() < 0.9 else self.any_id(rng)
            self.go_on_for(rng, seq_id, rng.choice([0, 30]))
            self.finish(seq_id)
        else:
            self.branch(rng)

    def finish(self, seq_id: int) -> None:
        if self.call("finish_import", seq_id):
            self.compare_all()

    # -- reading what was held ---------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def open_export(self, rng: random.Random) -> None:
        """Of a sequence or, mostly, of a fork made for it; read now and later."""
        self.settle(rng)
        seq_id, child = self.any_id(rng), self.new_id(rng)
        if rng.random() < 0.7 and self.call("fork_sequence", seq_id, child):
            seq_id = child
        found = self.compute("open_export", lambda: self.oracle.export(seq_id), lambda: self.state.open_export(seq_id))
        if found:
            self.opened = [
                *self.opened[-3:],
                Opened(seq_id, self.oracle.sequences[seq_id], *found, self.frozen(seq_id)),
            ]
            self.read(rng, self.opened[-1])

    def frozen(self, seq_id: int) -> list[Any]:
        """What must be as it is for an open export: rows, and the pages that hold them."""
        sequence = self.oracle.sequences[seq_id]
        rows = [list(map(id, rows)) for rows in sequence.rows]
        return [sequence.length, sequence.nodes, rows, [list(table) for table in sequence.tables]]

    @rule(rng=st.randoms(use_true_random=True))
    def read_export(self, rng: random.Random) -> None:
        """At any time."""
        for one in list(self.opened):
            same = self.oracle.sequences.get(one.seq_id) is one.sequence and self.frozen(one.seq_id) == one.frozen
            if not same or (self.oracle.forward is not None and one.seq_id in self.oracle.forward.ids):
                self.opened.remove(one)
            else:
                self.read(rng, one)

    def read(self, rng: random.Random, one: Opened) -> None:
        """Some rows of each layer, to the bit."""
        assert one.given.length == one.told.length
        for layer in range(len(self.specs)):
            held = one.told.held[self.oracle.class_of[layer]]
            assert one.given.held(layer) == ranges(set(held))
            for part in one.given.held(layer):
                start = rng.choice(part)
                stop = rng.randint(start + 1, part.stop)
                expected = self.oracle.stack(layer, one.sequence.rows[layer][start:stop])
                got = one.given.rows(layer, start, stop)
                assert all(same_bits(got[name], right) for name, right in zip("kv", expected, strict=True))
            outside = rng.randint(-1, one.told.length)
            if outside not in held:
                wrong = partial(one.given.rows, layer, outside, outside + 1)
                self.fail("rows", InvalidArgument, wrong)


@dataclass
class Opened:
    """An export that was opened, and what it must be."""

    seq_id: int
    sequence: ModelSequence
    told: Export
    given: SequenceExport
    frozen: list[Any]


def without_checksums(metadata: dict[str, Any]) -> dict[str, Any]:
    groups = [
        {**group, "tensors": {name: {**one, "checksum": ""} for name, one in group["tensors"].items()}}
        for group in metadata["groups"]
    ]
    return {**metadata, "groups": groups}
