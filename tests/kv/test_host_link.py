"""Copies beside what a device computes, on streams that do nothing before something waits for them:
whoever reads too early reads what was there before.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.base.host_link import HostLink, host_link
from quire.contracts.kv_state import Export
from quire.contracts.layers import FullAttention
from quire.kv import storage
from quire.kv.contract import ContractState
from quire.kv.formats.plain import PlainFormat
from quire.kv.rule_table import Combination
from quire.statefile import container as statefile

from .pair import same_bits
from .rule_stories import Story, encoded
from .test_pieces import TOKENS, bring, each_combination, rows_of, same_groups

CPU = torch.device("cpu")


class SlowEvent:
    def __init__(self, streams: SlowStreams, end: int) -> None:
        self.streams, self.end = streams, end
        self.computed = streams.computed

    def synchronize(self) -> None:
        self.streams.run(self.end)


class SlowStreams:
    """A side stream whose work is done when an event behind it is waited for, and no sooner."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = self.computed = self.seen = 0
        self.saw: list[int] = []
        """For all work: how much was computed before it, for certain."""
        self.host_waits = 0

    def run(self, end: int) -> None:
        while self.done < end:
            self.work[self.done]()
            self.done += 1

    def queue(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        self.saw.append(self.seen)

    def event(self, *, side: bool) -> SlowEvent:
        return SlowEvent(self, len(self.work) if side else 0)

    def side_waits(self, event: SlowEvent) -> None:  # type: ignore[override]
        self.seen = max(self.seen, event.computed)

    def compute_waits(self, event: SlowEvent) -> None:  # type: ignore[override]
        self.run(event.end)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), 0xAA, dtype=torch.uint8)

    @property
    def pending(self) -> int:
        return len(self.work) - self.done


def slow(state: ContractState, staging_bytes: int = 1 << 20) -> SlowStreams:
    """Give a state such a device."""
    streams = SlowStreams()
    state.state.parts.link = HostLink(CPU, streams, SlowStreams(), staging_bytes=staging_bytes)  # type: ignore[arg-type]
    return streams


def prepared(
    combination: Combination, staging_bytes: int = 1 << 20
) -> tuple[Story, SlowStreams, Export, dict[int, list[range]]]:
    """A story of which sequence 1 is to be an import of sequence 0."""
    story = Story(combination)
    story.begun()
    streams = slow(story.state, staging_bytes)
    export = story.state.open_export(0)
    metadata = story.state.get_checkpoint_metadata(0, checksums=False)
    story.state.prepare_import(1, metadata)
    return story, streams, export, rows_of(metadata)


def come(story: Story, layer: int, export: Export, rows: dict[int, list[range]]) -> None:
    if story.kinds[layer] == "cross":
        story.state.import_page_group(1, layer, dict(zip("kv", encoded(), strict=True)))
    else:
        bring(story.state, 1, layer, export, rows.get(layer, []), random.Random(3))


def is_loaded(story: Story, layer: int) -> bool:
    """Whether the link brings a layer; an encoder's rows are written at once."""
    return story.kinds[layer] != "cross"


@pytest.mark.turns(2)
@each_combination
@pytest.mark.parametrize("staging_bytes", [1 << 20, 40])
def test_a_forward_waits_for_what_was_queued(combination: Combination, staging_bytes: int) -> None:
    """Layer by layer: when a layer runs, it has come, and the next one may still be on its way."""
    story, streams, export, rows = prepared(combination, staging_bytes)
    state = story.state
    state.publish_import(1)
    layers = range(len(story.kinds))
    ends: list[int] = []
    for layer in layers:
        come(story, layer, export, rows)
        ends.append(len(streams.work))
    assert state.pending_layers(1) == []
    assert streams.pending
    story.begin(1, [8])
    found: list[Tensor] = []
    for layer, kind in enumerate(story.kinds):
        if staging_bytes > 40:
            # Buffers that are waited for are used again only if there is much to load.
            assert streams.done <= (ends[layer - 1] if layer else 0) or not is_loaded(story, layer)
        found.append(story.attend(layer, kind, [8]))
        assert streams.done >= ends[layer]
    state.end_forward()
    story.check_row(found, 0, [*TOKENS, 8])
    state.finish_import(1)
    story.goes_on(1, [*TOKENS, 8])
    story.goes_on(0, TOKENS)


@each_combination
def test_what_was_imported_is_read_when_it_is_there(combination: Combination) -> None:
    story, streams, export, rows = prepared(combination)
    state = story.state
    for layer in range(len(story.kinds)):
        come(story, layer, export, rows)
    assert streams.pending
    state.finish_import(1)
    assert not streams.pending
    for layer in range(len(story.kinds)):
        assert same_groups(state.export_page_group(1, layer), state.export_page_group(0, layer))
    story.goes_on(1, TOKENS)


@each_combination
def test_pages_of_an_import_that_is_given_up_are_written_no_more(combination: Combination) -> None:
    story, streams, export, rows = prepared(combination)
    come(story, 0, export, rows)
    assert streams.pending
    story.state.remove_sequence(1)
    assert not streams.pending
    story.add(2)
    story.run(2, [], TOKENS)
    assert not streams.pending


def test_loads_begin_when_the_pages_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device is given before an import has its pages, the zeros of their ends too."""
    story = Story(Combination(name="full", kinds=("full",)))
    story.begun()
    streams, state = slow(story.state), story.state
    export = state.open_export(0)
    blank = storage.PagedStorage.blank

    def counted(*args: object) -> None:
        blank(*args)  # type: ignore[arg-type]
        streams.computed += 1

    monkeypatch.setattr(storage.PagedStorage, "blank", counted)
    streams.computed = 5
    state.prepare_import(1, state.import_metadata(len(TOKENS)))
    assert streams.computed == 6
    streams.computed = 9
    come(story, 0, export, {0: [range(len(TOKENS))]})
    # All work: after the zeros, and not after what the device was given since then.
    assert streams.saw
    assert set(streams.saw) == {6}
    state.finish_import(1)


def test_rows_that_lie_apart() -> None:
    """Slots that are no neighbours, and a source that changes once it was handed over."""
    spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=3, value_dim=5)
    pool = storage.PagedStorage([spec], 12, PlainFormat(torch.bfloat16), CPU)
    streams = SlowStreams()
    link = HostLink(CPU, streams, SlowStreams(), staging_bytes=16)  # type: ignore[arg-type]
    k_NHD, v_NHD = torch.randn(4, 2, 3).bfloat16(), torch.randn(2, 4, 5).bfloat16().transpose(0, 1)
    kept = k_NHD.clone(), v_NHD.clone()
    slots = torch.tensor([9, 2, 3, 11])
    link.load([k_NHD, v_NHD], lambda k, v: pool.put(0, slots.numpy(), {"k": k, "v": v}))
    k_NHD.zero_()
    v_NHD.zero_()
    assert not pool.layers[0].k.any()
    link.compute_waits(link.loaded())
    assert same_bits(pool.layers[0].k[slots], kept[0])
    assert same_bits(pool.layers[0].v[slots], kept[1])


@pytest.mark.parametrize("staging_bytes", [1, 7, 1 << 10])
@pytest.mark.parametrize(
    "rows",
    [torch.randn(5, 3), torch.randn(6, 4).t(), torch.randn(3).bfloat16()[1:2], torch.tensor(3.0), torch.empty(0, 4)],
)
def test_rows_come_to_the_host(rows: Tensor, staging_bytes: int) -> None:
    """After what is computed, in pieces, and no buffer is filled again before it was read."""
    streams = SlowStreams()
    streams.computed = 4
    link = HostLink(CPU, SlowStreams(), streams, staging_bytes=staging_bytes)  # type: ignore[arg-type]
    assert same_bits(link.to_host(rows), rows)
    assert set(streams.saw) <= {4}
    assert len(streams.work) == -(-rows.nbytes // staging_bytes)


def test_files_read_devices_over_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = SlowStreams()
    link = HostLink(CPU, SlowStreams(), streams, staging_bytes=8)  # type: ignore[arg-type]
    monkeypatch.setattr(statefile, "host_link", lambda device: link)
    rows = torch.randn(4, 3)
    assert bytes(statefile.bytes_of(rows)) == rows.numpy().tobytes()
    assert len(streams.work) == 6


def test_the_host_needs_no_link() -> None:
    assert host_link(CPU) is None
