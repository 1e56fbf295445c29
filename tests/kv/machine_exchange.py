"""Steps of the random machine that move sequences: out of the state, into another, and back into
it.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from torch import Tensor

from quire.kv.exchange import checksum

from .machine_sequences import SequenceSteps
from .oracle_exchange import Export
from .pair import Pair

Groups = list[dict[str, Tensor]]


class ExchangeSteps(SequenceSteps):
    def __init__(self) -> None:
        super().__init__()
        self.exports: list[tuple[dict[str, Any], Groups]] = []
        self.sources: dict[int, tuple[dict[str, Any], Groups]] = {}
        """Where each import comes from."""

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
        self.settle(rng)
        if not self.exports:
            self.export(rng)
        if not self.exports:
            return
        metadata, groups = rng.choice(self.exports)
        seq_id = self.new_id(rng)
        found = self.compute(
            "prepare_import",
            lambda: self.oracle.prepare_import(seq_id, Export.read(metadata)),
            lambda: self.state.prepare_import(seq_id, metadata),
        )
        if found:
            self.sources[seq_id] = (metadata, groups)
            for _ in range(rng.choice([0, 1, 2, 4])):
                self.go_on_importing(rng, seq_id)
            if rng.random() < 0.5:
                self.finish(seq_id)

    def importing(self) -> list[int]:
        return [seq_id for seq_id in self.oracle.sequences if self.oracle.is_importing(seq_id)]

    @rule(rng=st.randoms(use_true_random=True))
    def import_group(self, rng: random.Random) -> None:
        self.settle(rng)
        importing = self.importing()
        if self.exports and (importing or rng.random() < 0.1):
            self.go_on_importing(rng, rng.choice(importing) if importing else self.any_id(rng))
        else:
            self.branch(rng)

    def go_on_importing(self, rng: random.Random, seq_id: int) -> None:
        """A group that is still missing, or one too many, or another one's, or damaged."""
        _, groups = self.sources.get(seq_id, rng.choice(self.exports))
        if rng.random() < 0.1:
            groups = rng.choice(self.exports)[1]
        done = self.oracle.sequences[seq_id].imported if seq_id in self.oracle.sequences else set()
        missing = [layer for layer in range(len(self.specs)) if layer not in done]
        layer = rng.choice(missing) if missing and rng.random() < 0.9 else self.a_layer(rng)
        group = dict(groups[layer])
        if rng.random() < 0.2 and group["k"].numel():
            group["k"] = group["k"].clone()
            group["k"].view(torch.uint8).view(-1)[0] ^= 1

        def intact() -> bool:
            if not self.oracle.is_importing(seq_id):
                return True
            promised = self.sources[seq_id][0]["groups"][layer]["tensors"]
            return all(checksum(group[name]) == promised[name]["checksum"] for name in ("k", "v"))

        self.compute(
            "import_page_group",
            lambda: self.oracle.import_group(seq_id, layer, group["k"], group["v"], intact),
            lambda: self.state.import_page_group(seq_id, layer, group),
        )

    @rule(rng=st.randoms(use_true_random=True))
    def finish_import(self, rng: random.Random) -> None:
        self.settle(rng)
        importing = self.importing()
        if importing or rng.random() < 0.1:
            self.finish(rng.choice(importing) if importing and rng.random() < 0.9 else self.any_id(rng))
        else:
            self.branch(rng)

    def finish(self, seq_id: int) -> None:
        if self.call("finish_import", seq_id):
            self.compare_all()
