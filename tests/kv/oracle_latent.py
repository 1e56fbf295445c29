"""A latent layer, naively: every raw row in a list, every query by itself, in float64, in expanded
form.

It rotates each row at its position and each query at the position from which it looks, so it knows
nothing of absorbed queries, pages, merges or queries that are turned back.

Letters: T new tokens; M keys; H heads; R columns of ``c_kv``; Dn, Dr columns of a head without and
with positions; Dv value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from quire.contracts.layers import LatentAttention, RopeSpec


class Answer(NamedTuple):
    """What one query gets, and how far off arithmetic of some precision may be."""

    out_HV: Tensor
    out_bound_HV: Tensor
    lse_H: Tensor
    lse_bound_H: Tensor
    seen: list[int]
    """Addresses"""


@dataclass
class NaiveSequence:
    rows: list[Tensor] = field(default_factory=list)
    """Raw rows ``[R + Dr]`` by address: committed tokens, then nodes."""
    length: int = 0
    parents: list[int] = field(default_factory=list)
    window: tuple[int, int, str] | None = None

    def copy(self, length: int) -> NaiveSequence:
        return NaiveSequence(self.rows[:length], length, [], self.window)

    def depth(self, node: int) -> int:
        return 0 if self.parents[node] < 0 else 1 + self.depth(self.parents[node])

    def position(self, address: int) -> int:
        return address if address < self.length else self.length + self.depth(address - self.length)

    def path(self, node: int) -> list[int]:
        """The node and its ancestors."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]


def turned(x_D: Tensor, spec: RopeSpec | None, position: int) -> Tensor:
    """The last rotary columns rotated, pair by pair."""
    if spec is None:
        return x_D
    out_D, width = x_D.clone(), spec.rotary_dim
    first = x_D.shape[-1] - width
    for pair in range(width // 2):
        angle = torch.tensor(position * spec.theta ** (-2 * pair / width), dtype=torch.float64)
        i, j = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + width // 2)
        a, b = x_D[..., first + i], x_D[..., first + j]
        out_D[..., first + i] = a * angle.cos() - b * angle.sin()
        out_D[..., first + j] = a * angle.sin() + b * angle.cos()
    return out_D


class NaiveLatent:
    def __init__(self, spec: LatentAttention, key_HDR: Tensor, value_HRV: Tensor, eps: float) -> None:
        self.spec = spec
        self.key, self.value = key_HDR.double(), value_HRV.double()
        self.eps = eps
        self.sequences: dict[int, NaiveSequence] = {}
        self._expanded: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def expand(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``k_nope [H, Dn]``, ``v [H, Dv]`` and the size of its terms, of a raw row; made once."""
        found = self._expanded.get(id(row))
        if found is None:
            c = row[: self.spec.value_dim].double()
            v, size = (torch.einsum("r,hrv->hv", x, y) for x, y in ((c, self.value), (c.abs(), self.value.abs())))
            # With the row, so that nothing else gets its id.
            found = self._expanded[id(row)] = self.key @ c, v, size, row
        return found[:3]

    def fork(self, parent: int, child: int, position: int) -> None:
        source = self.sequences[parent]
        self.sequences[child] = source.copy(source.length if position < 0 else position)

    def commit(self, seq_id: int, leaf: int) -> None:
        sequence = self.sequences[seq_id]
        path = sequence.path(leaf)
        sequence.rows = sequence.rows[: sequence.length] + [sequence.rows[sequence.length + node] for node in path]
        sequence.length += len(path)
        sequence.parents = []

    def answer(
        self,
        seq_id: int,
        address: int,
        base: int,
        query_HD: Tensor,
        *,
        within: range | None = None,
        allowed: Sequence[bool] | None = None,
    ) -> Answer:
        """One new token at ``address``; ``base``: the committed length before the forward.

        ``within``: only these keys. ``allowed``: which addresses a mask lets it see.
        """
        sequence = self.sequences[seq_id]
        q = sequence.position(address)
        if allowed is not None:
            seen = [key for key, one in enumerate(allowed) if one]
        elif address < sequence.length:
            seen = list(range(address + 1))
        else:
            path = sequence.path(address - sequence.length)
            seen = [*range(sequence.length), *(sequence.length + node for node in path)]
        evicted = low = sink = 0
        if sequence.window is not None:
            size, sink, eviction = sequence.window
            evicted = max(0, q + 1 - size) if eviction == "token" else max(0, base - size)
            if evicted:
                low = (q + 1 if eviction == "token" else base) - (size - sink)
        seen = [key for key in seen if sequence.position(key) >= low or sequence.position(key) < sink]
        if within is not None:
            seen = [key for key in seen if key in within]
        return self._attend(sequence, seen, query_HD.double(), q, evicted, sink)

    def _attend(
        self, sequence: NaiveSequence, seen: list[int], query_HD: Tensor, q: int, evicted: int, sink: int
    ) -> Answer:
        heads, nope, rank = self.key.shape
        values = self.value.shape[-1]
        if not seen:
            nothing = torch.zeros(heads, values, dtype=torch.float64)
            return Answer(nothing, nothing, torch.full((heads,), -torch.inf).double(), nothing[:, 0], [])
        scores, sizes, value, value_sizes = [], [], [], []
        absorbed_HR = (query_HD[:, :nope].abs().unsqueeze(1) @ self.key.abs()).squeeze(1)
        for key in seen:
            place = sequence.position(key)
            row = turned(sequence.rows[key].double(), self.spec.rope, place)
            looks = turned(query_HD, self.spec.rope, q - evicted if evicted and place < sink else q)
            k_nope_HD, v_HV, size_HV = self.expand(sequence.rows[key])
            k_HD = torch.cat((k_nope_HD, row[rank:].expand(heads, -1)), -1)
            scores.append(self.spec.scale * (looks * k_HD).sum(-1))
            # Terms of the sum in any order of summation; a rotated column is a sum of two.
            rotary = sequence.rows[key][rank:].double().abs().sum() * query_HD[:, nope:].abs().sum(-1)
            sizes.append(self.spec.scale * (absorbed_HR @ row[:rank].abs() + rotary))
            value.append(v_HV)
            value_sizes.append(size_HV)
        scores_MH = torch.stack(scores)
        lse_H = scores_MH.logsumexp(0)
        weights_MH = (scores_MH - lse_H).exp()
        out_HV = torch.einsum("mh,mhv->hv", weights_MH, torch.stack(value))
        size_HV = torch.einsum("mh,mhv->hv", weights_MH, torch.stack(value_sizes))
        # A sum of n products is off by n * eps of its absolute terms (Higham, Accuracy and
        # Stability, 3.1); 16 more for rotations, the softmax and a merge.
        score_error_H = self.eps * (nope + query_HD.shape[-1] + rank + 16) * torch.stack(sizes).amax(0)
        sums = self.eps * (rank + len(seen) + 16)
        bound_HV = (torch.expm1(2 * score_error_H) + sums).unsqueeze(-1) * size_HV
        return Answer(out_HV, bound_HV, lse_H, score_error_H + sums * (1 + lse_H.abs()), seen)
