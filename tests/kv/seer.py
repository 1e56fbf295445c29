"""A state of which one can read off what each query sees: all keys are equal, and each token's
value is a column of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.contracts.layers import FullAttention, WindowedAttention
from quire.kernels.attention.sdpa import SdpaAttention

from .faces import contract


class Seer:
    """One layer (full, or with a window); ``columns`` tokens can be told apart."""

    def __init__(
        self, layer_window: int | None = None, *, page_size: int = 4, columns: int = 64, capacity: int = 400
    ) -> None:
        spec: FullAttention | WindowedAttention
        if layer_window is None:
            spec = FullAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=columns)
        else:
            spec = WindowedAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=columns, window=layer_window)
        self.state = contract([spec], capacity=capacity, page_size=page_size, backend=SdpaAttention())
        self.columns = columns

    def add(self, *lengths: int) -> None:
        """Sequences 0, 1, ... of these lengths."""
        for seq_id, length in enumerate(lengths):
            self.state.add_sequence(seq_id)
            if length:
                self.append([seq_id], [length])

    def rows(self, names: Sequence[int]) -> Tensor:
        """Fused rows of tokens with these names."""
        v = torch.nn.functional.one_hot(torch.tensor(names), self.columns).float()
        return torch.cat((torch.zeros(len(names), 4), v), 1)

    def append(
        self, ids: Sequence[int], counts: Sequence[int], parents: Any = None, *, mask: Tensor | None = None
    ) -> list[list[int]]:
        """One forward: what each new token sees, by name.

        A token's name is its address: its position, or the committed length plus the index of its
        node.
        """
        names: list[int] = []
        for seq_id, count in zip(ids, counts, strict=True):
            first = self.state.sequence_length(seq_id) + self.state.pending_nodes(seq_id)
            names += range(first, first + count)
        return self.name(ids, counts, names, parents, mask=mask)

    def name(
        self,
        ids: Sequence[int],
        counts: Sequence[int],
        names: Sequence[int],
        parents: Any = None,
        *,
        mask: Tensor | None = None,
    ) -> list[list[int]]:
        """The same with names that are given."""
        self.state.begin_forward(ids, counts, parents)
        out = self.state.attention_with_fused_qkv(0, self.rows(names), mask=mask)
        self.state.end_forward()
        self.state.check()
        found = [row.nonzero()[:, 0].tolist() for row in out[:, 0]]
        for row, seen in zip(out[:, 0], found, strict=True):
            # The mean of what is seen, so that nothing counts twice.
            assert not seen or torch.allclose(row[seen], torch.full((len(seen),), 1 / len(seen)))
        return found

    def stored(self, seq_id: int, start: int = 0, end: int | None = None) -> list[int]:
        """Names of the tokens that are stored."""
        _, v = self.state.debug_get_kv(seq_id, start, end, layer=0)
        return [int(name) for name in v[:, 0].argmax(-1)]
