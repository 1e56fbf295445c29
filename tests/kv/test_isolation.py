"""Values that are not numbers: what one sequence stores never reaches another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState

from .faces import contract
from .oracle_values import Spec
from .pair import attention, num_columns, same_bits, windowed


class Twins:
    """Two states with the same history, but that one of them stores NaN or infinity in a sequence.

    All results but those of this sequence (0, or ``excluded``) are equal to the bit, and finite.
    """

    def __init__(self, bad: float, page_size: int, spec: Spec | None = None) -> None:
        spec = spec or attention(rotary_dim=0)
        self.spec, self.bad = spec, bad
        self.excluded: int | None = 0
        self.states = [contract([spec], capacity=160, page_size=page_size, backend=SdpaAttention()) for _ in range(2)]
        self.generator = torch.Generator().manual_seed(1)

    def each(self, act: Callable[[ContractState], object]) -> None:
        for state in self.states:
            act(state)

    def add(self, *seq_ids: int) -> None:
        for state in self.states:
            for seq_id in seq_ids:
                state.add_sequence(seq_id)

    def forward(
        self,
        ids: list[int],
        counts: list[int],
        bad_row: int | None = None,
        parents: list[list[int] | None] | None = None,
    ) -> None:
        qkv = torch.randn(sum(counts), num_columns(self.spec), generator=self.generator)
        poisoned = qkv.clone()
        if bad_row is not None:
            poisoned[bad_row] = self.bad
        results = []
        for state, values in zip(self.states, (qkv, poisoned), strict=True):
            state.begin_forward(ids, counts, parents)
            results.append(state.attention_with_fused_qkv(0, values))
            state.end_forward()
            state.check()
        start = 0
        for seq_id, count in zip(ids, counts, strict=True):
            if seq_id != self.excluded:
                clean, other = (result[start : start + count] for result in results)
                assert clean.isfinite().all()
                assert same_bits(clean, other), f"sequence {seq_id}"
            start += count


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("page_size", [4, 5, 16])
class TestIsolation:
    def test_neighbours_in_a_batch(self, bad: float, page_size: int) -> None:
        twins = Twins(bad, page_size)
        twins.add(0, 1, 2, 3, 4)
        twins.forward([1, 0, 2, 3], [7, 9, 3, 8], bad_row=12)
        twins.forward([3, 0, 4, 1], [1, 1, 5, 1], bad_row=1)
        twins.forward([2, 0, 1], [20, 30, 1], bad_row=25)
        twins.forward([4, 3, 2, 1, 0], [1, 1, 1, 1, 1])

    def test_first_page_of_the_pool(self, bad: float, page_size: int) -> None:
        """Where padding would look if it did not keep to its own sequence."""
        twins = Twins(bad, page_size)
        twins.add(0, 1, 2, 3)
        twins.forward([0, 1, 2, 3], [2, 3, 20, 9], bad_row=1)
        twins.forward([2, 3, 1], [1, 1, 1])
        twins.forward([1, 3, 2], [1, 4, 2])
        # All four in a pool whose pages lie scattered.
        twins.forward([3, 1], [17, 17])
        twins.forward([1, 2, 0, 3], [1, 1, 1, 1])

    @pytest.mark.turns(3)
    @pytest.mark.parametrize("how", ["remove", "pop", "clear", "abort"])
    def test_recycled_pages(self, bad: float, page_size: int, how: str) -> None:
        twins = Twins(bad, page_size)
        twins.each(lambda state: state.add_sequence(0))
        # Every slot of the pool has held it.
        for start in range(0, 160 // page_size * page_size, page_size):
            counts = [page_size]
            if how == "abort" and start:
                break
            if how == "abort":
                counts = [160 // page_size * page_size]
                values = torch.full((counts[0], num_columns(twins.spec)), bad)
                twins.states[1].begin_forward([0], counts)
                twins.states[1].attention_with_fused_qkv(0, values)
                twins.states[1].abort_forward()
                continue
            qkv = torch.full((page_size, num_columns(twins.spec)), bad)
            for state, values in zip(twins.states, (torch.zeros_like(qkv), qkv), strict=True):
                state.begin_forward([0], counts)
                state.attention_with_fused_qkv(0, values)
                state.end_forward()
        if how == "remove":
            twins.each(lambda state: state.remove_sequence(0))
        elif how == "pop":
            twins.each(lambda state: state.popn(0, state.sequence_length(0)))
        elif how == "clear":
            twins.each(lambda state: state.clear())
        twins.add(1, 2, 3, 4)
        twins.forward([1, 2, 3, 4], [1, 3, 18, 7])
        twins.forward([4, 2, 1, 3], [1, 1, 1, 1])
        twins.forward([4, 2, 3], [2, 6, 1])

    @pytest.mark.parametrize("child_first", [False, True])
    def test_forks_below_the_row(self, bad: float, page_size: int, child_first: bool) -> None:
        twins = Twins(bad, page_size)
        twins.add(0, 5)
        twins.forward([0, 5], [11, 2], bad_row=10)
        twins.each(lambda state: state.fork_sequence(0, 1, 10))
        twins.each(lambda state: state.fork_sequence(0, 2, 9))
        twins.each(lambda state: state.fork_sequence(1, 3, 6))
        if not child_first:
            twins.forward([0, 5], [1, 1])
        twins.forward([2, 5], [1, 1])
        twins.each(lambda state: state.remove_sequence(0))
        # The last owner writes into the page that holds the bad row.
        twins.forward([1, 5], [1, 1])
        twins.forward([3, 1, 2, 5], [2, 1, 1, 17])
        twins.forward([5, 3, 2, 1], [1, 1, 1, 1])

    @pytest.mark.turns(3)
    @pytest.mark.parametrize("target", [6, 7, 8, 9])
    @pytest.mark.parametrize("how", ["pop", "abort", "fork and pop"])
    def test_back_to_before_the_row(self, bad: float, page_size: int, target: int, how: str) -> None:
        """The sequence that stored it itself takes it back, and is as good as any other."""
        twins = Twins(bad, page_size)
        twins.add(0, 1)
        twins.forward([0, 1], [target, 40])
        qkv = torch.zeros(5, num_columns(twins.spec))
        for state, values in zip(twins.states, (qkv, qkv + bad), strict=True):
            state.begin_forward([0], [5])
            state.attention_with_fused_qkv(0, values)
            if how == "abort":
                state.abort_forward()
                continue
            state.end_forward()
            if how == "pop":
                state.popn(0, 5)
                continue
            state.fork_sequence(0, 2)
            state.remove_sequence(0)
            state.popn(2, 5)
        twins.excluded = None
        seq_id = 2 if how == "fork and pop" else 0
        twins.forward([1, seq_id], [1, 1])
        twins.forward([seq_id, 1], [1, 1])

    def test_pages_split_by_set(self, bad: float, page_size: int) -> None:
        twins = Twins(bad, page_size)
        twins.each(lambda state: state.add_sequence(0))
        tokens = 160 // page_size * page_size
        for state, value in zip(twins.states, (0.0, bad), strict=True):
            state.begin_forward([0], [tokens])
            state.attention_with_fused_qkv(0, torch.full((tokens, num_columns(twins.spec)), value))
            state.end_forward()
        twins.each(lambda state: state.remove_sequence(0))
        twins.add(1, 2)
        twins.forward([1, 2], [6, 30])
        twins.each(lambda state: state.fork_sequence(1, 3))
        rows = torch.ones(1, 1, 2, 8)
        twins.each(lambda state: state.debug_set_kv(1, 5, rows, rows))
        twins.forward([2, 1], [1, 1])
        twins.forward([1, 3, 2], [1, 1, 1])

    def test_pages_of_an_import(self, bad: float, page_size: int) -> None:
        twins = Twins(bad, page_size)
        twins.each(lambda state: state.add_sequence(7))
        twins.forward([7], [6])
        exports = [(state.get_checkpoint_metadata(7), state.export_page_group(7, 0)) for state in twins.states]
        twins.each(lambda state: state.add_sequence(0))
        tokens = twins.states[0].num_available_pages() * page_size
        for state, value in zip(twins.states, (0.0, bad), strict=True):
            state.begin_forward([0], [tokens])
            state.attention_with_fused_qkv(0, torch.full((tokens, num_columns(twins.spec)), value))
            state.end_forward()
        twins.each(lambda state: state.remove_sequence(0))
        for state, (metadata, group) in zip(twins.states, exports, strict=True):
            state.prepare_import(1, metadata)
            state.import_page_group(1, 0, group)
            state.finish_import(1)
        twins.each(lambda state: state.add_sequence(2))
        twins.forward([1, 2, 7], [1, 12, 1])
        twins.forward([2, 7, 1], [1, 1, 1])

    def test_pages_of_an_import_that_are_written_in_part(self, bad: float, page_size: int) -> None:
        """What a window let go of is not in the file, and kernels read whole pages."""
        twins = Twins(bad, page_size)
        twins.add(7)
        twins.each(lambda state: state.enable_sliding_window_for_seq(7, 7, 2))
        for count in (9, 14, 1):
            twins.forward([7], [count])
        exports = [(state.get_checkpoint_metadata(7), state.export_page_group(7, 0)) for state in twins.states]
        twins.each(lambda state: state.remove_sequence(7))
        twins.add(0)
        tokens = twins.states[0].num_available_pages() * page_size
        for state, value in zip(twins.states, (0.0, bad), strict=True):
            state.begin_forward([0], [tokens])
            state.attention_with_fused_qkv(0, torch.full((tokens, num_columns(twins.spec)), value))
            state.end_forward()
        twins.each(lambda state: state.remove_sequence(0))
        for state, (metadata, group) in zip(twins.states, exports, strict=True):
            state.prepare_import(1, metadata)
            state.import_page_group(1, 0, group)
            state.finish_import(1)
        for state in twins.states:
            # Rows behind the length are zeroed when a forward begins.
            pages, length = state.state.sequences.get(1).tables[0].pages, state.sequence_length(1)
            places = [(pages[at // page_size], at % page_size) for at in range(length)]
            rows = [page * page_size + offset for page, offset in places if page >= 0]
            assert len(rows) > state.cached_length(1)
            stored = state.state.parts.paged.classes[0].storage.read(0, np.array(rows))
            assert stored.k.isfinite().all()
            assert stored.v.isfinite().all()
        twins.forward([1], [1])
        twins.forward([1], [3])

    @pytest.mark.parametrize("node", [0, 1, 3])
    def test_nodes_that_were_rejected(self, bad: float, page_size: int, node: int) -> None:
        """The path that stays was computed in a forward of its own, and lies where the bad node has
        been.
        """
        twins = Twins(bad, page_size)
        twins.add(0, 1)
        twins.forward([0, 1], [6, 20])
        twins.forward([1, 0], [4, 4], bad_row=4 + node, parents=[[-1, 0, 0, 1], [-1, -1, -1, -1]])
        twins.forward([0, 1], [3, 2], parents=[[-1, 4, 5], [2, 3]])
        twins.each(lambda state: state.commit_accepted_token_tree_nodes([1, 0], [4, 6]))
        # (While it was a neighbour in the tree anything may have come out; from here on it is
        # gone.)
        twins.excluded = None
        twins.forward([1, 0], [1, 1])
        twins.forward([0, 1], [18, 1])

    @pytest.mark.turns(3)
    @pytest.mark.parametrize("layer_window", [None, 6])
    def test_windows(self, bad: float, page_size: int, layer_window: int | None) -> None:
        """What a sequence gives up goes to others, and null pages are read by nobody."""
        twins = Twins(bad, page_size, windowed(layer_window, rotary_dim=0) if layer_window else None)
        twins.add(0, 1, 2)
        for seq_id in (0, 1, 2):
            twins.each(
                lambda state, seq_id=seq_id: state.enable_sliding_window_for_seq(seq_id, 6, 2)  # type: ignore[misc]
            )
        twins.forward([1, 0, 2], [30, 40, 3], bad_row=50)
        twins.forward([2, 0, 1], [1, 1, 30], bad_row=1)
        twins.forward([1, 2], [1, 40])
        twins.forward([2, 0, 1], [3, 20, 1])
        # By now it has forgotten them itself, page and all.
        twins.forward([0, 1, 2], [17, 1, 1])
        twins.excluded = None
        twins.forward([0, 1, 2], [1, 1, 1])
        twins.forward([2, 1, 0], [2, 1, 4])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_past_is_read_before_new_rows_are_written(bad: float, count: int) -> None:
    """What an aborted forward, or an earlier owner of the page, left where new rows will lie is not
    read as the past.
    """
    spec = attention(rotary_dim=0)
    state = contract([spec], capacity=64, page_size=4, backend=SdpaAttention())
    generator = torch.Generator().manual_seed(2)
    state.add_sequence(0)
    state.begin_forward([0], [6])
    state.attention_with_fused_qkv(0, torch.randn(6, num_columns(spec), generator=generator))
    state.end_forward()
    q = torch.randn(count, spec.num_heads, spec.head_dim, generator=generator)
    state.begin_forward([0], [count])
    before = state.cross_attention(0, q)
    state.attention_with_fused_qkv(0, torch.full((count, num_columns(spec)), bad))
    state.abort_forward()
    for other in (1, 2):
        state.fork_sequence(0, other)
    for seq_id in (0, 1, 2):  # in place, and in a page that is split off
        state.begin_forward([seq_id], [count])
        for found, wanted in zip(state.cross_attention(0, q), before, strict=True):
            assert same_bits(found, wanted)
        state.abort_forward()
