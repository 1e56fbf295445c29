"""A naive KV state that decides what is right: every token's K and V in Python lists, attention by loops, no pages in
the values. Pages exist as a count of holders only, so that the oracle knows when a refusal for lack of them is due.

Each verb works out every reason there is to refuse the call and raises the first class in the order of the
contract; otherwise it changes the model. Values are float64; stored rows have been rounded to the type of the state.

Letters: T new tokens; Hq, Hkv heads; Dk, Dv head sizes; P page size; L layers.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.layers import FullAttention, RopeSpec
from quire.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)

ORDER: tuple[type[QuireError], ...] = (
    InvalidArgument,
    NotFound,
    Unsupported,
    FailedPrecondition,
    ResourceExhausted,
    DataLoss,
)
"""If several refusals apply, the first of these is raised."""

Row = tuple[Tensor, Tensor]
"""K ``[Hkv, Dk]`` and V ``[Hkv, Dv]`` of one token in one layer, as stored."""


def raise_first(faults: Iterable[type[QuireError]]) -> None:
    found = set(faults)
    for kind in ORDER:
        if kind in found:
            raise kind("the oracle refuses")


@cache
def frequencies(spec: RopeSpec) -> list[float]:
    """Angle per position of each pair, one by one."""
    result = []
    for pair in range(spec.rotary_dim // 2):
        freq = spec.theta ** (-2 * pair / spec.rotary_dim)
        if spec.scaling == "linear":
            freq /= spec.factor
        elif spec.scaling == "llama3":
            wavelength = 2 * math.pi / freq
            if wavelength > spec.original_max_position / spec.low_freq_factor:
                freq /= spec.factor
            elif wavelength >= spec.original_max_position / spec.high_freq_factor:
                smooth = (spec.original_max_position / wavelength - spec.low_freq_factor) / (
                    spec.high_freq_factor - spec.low_freq_factor
                )
                freq = (1 - smooth) * freq / spec.factor + smooth * freq
        result.append(freq)
    return result


def rotated(x_HD: Tensor, position: int, spec: RopeSpec) -> Tensor:
    """One token's heads at one position, in float64, pair by pair."""
    out = x_HD.double().numpy().copy()
    half = spec.rotary_dim // 2
    for pair, freq in enumerate(frequencies(spec)):
        a, b = (2 * pair, 2 * pair + 1) if spec.interleaved else (pair, pair + half)
        cos, sin = math.cos(position * freq), math.sin(position * freq)
        first, second = out[:, a].copy(), out[:, b].copy()
        with np.errstate(invalid="ignore"):
            out[:, a] = first * cos - second * sin
            out[:, b] = second * cos + first * sin
    return torch.from_numpy(out)


def unit(dtype: torch.dtype) -> float:
    """Unit roundoff: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def rotation_bound(x_HD: Tensor, dtype: torch.dtype) -> float:
    """How far a rotation in float32, rounded to ``dtype``, may be from the exact one.

    Each of two products has a rounded factor and one rounding, their sum one more: 3 u32 (|a| + |b|), at most
    3 sqrt(2) u32 times the norm of the pair; then one rounding to the type, or to its smallest subnormal.
    """
    info = torch.finfo(dtype)
    size = float(x_HD.double().norm(dim=-1).max()) if x_HD.numel() else 0.0
    return 2 * size * (3 * math.sqrt(2) * unit(torch.float32) + unit(dtype)) + info.tiny * info.eps


def attention_bound(q_HD: Tensor, keys: Sequence[Row], scale: float, dtype: torch.dtype) -> float:
    """How far one query's attention, computed in ``dtype`` with sums in float32, may be from the exact one.

    A score is off by at most d = scale |q| |k| (c u + (Dk + 12) u32): q, k, both times the root of the scale and the
    score itself may be rounded (c = 6, with the rotation of q and k), and the sum over Dk terms and the float32
    rotations have float32 errors. Weights are then off by a factor e^(2d); weights, products and the result are rounded once each,
    and m terms are summed in float32.
    """
    u, u32 = unit(dtype), unit(torch.float32)
    k_norm = float(torch.stack([k for k, _ in keys]).double().norm(dim=-1).max())
    v_size = float(torch.stack([v for _, v in keys]).double().abs().max())
    score = scale * float(q_HD.double().norm(dim=-1).max()) * k_norm
    d = score * (6 * u + (q_HD.shape[-1] + 12) * u32)
    return v_size * (math.expm1(2 * d) + (len(keys) + 8) * u32 + 4 * u) + torch.finfo(dtype).tiny


def attend_one(q_HD: NDArray[np.float64], keys: Sequence[Row], scale: float) -> NDArray[np.float64]:
    """One token's attention over rows of K and V, head by head, key by key."""
    heads = q_HD.shape[0]
    kv_heads = keys[0][0].shape[0]
    k_MHD = torch.stack([k for k, _ in keys]).double().numpy()
    v_MHD = torch.stack([v for _, v in keys]).double().numpy()
    out = np.zeros((heads, v_MHD.shape[-1]))
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        scores = k_MHD[:, kv_head] @ q_HD[head] * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v_MHD[:, kv_head] / weights.sum()
    return out


@dataclass
class ModelSequence:
    rows: list[list[Row]]
    """By layer, then by token."""
    pages: list[int] = field(default_factory=list)
    reserved: int | None = None
    imported: set[int] = field(default_factory=set)

    @property
    def length(self) -> int:
        """Published tokens: none while an import is under way."""
        return len(self.rows[0]) if self.reserved is None else 0


@dataclass
class Pages:
    """Who holds which page, by number of holders. Page ids are the oracle's own."""

    total: int
    holders: Counter[int] = field(default_factory=Counter)
    next_id: int = 0

    @property
    def free(self) -> int:
        return self.total - len(self.holders)

    def take(self) -> int:
        self.next_id += 1
        self.holders[self.next_id] = 1
        return self.next_id

    def drop(self, page: int) -> None:
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]


@dataclass
class ModelForward:
    ids: list[int]
    counts: list[int]
    before: tuple[dict[int, list[int]], Pages]
    """Page tables and holders as they were."""
    written: dict[int, list[list[Row]]] = field(default_factory=dict)
    """By layer, by entry: the new rows."""


class Oracle:
    """The model of ``PagedKVState`` with layers of full attention."""

    def __init__(self, specs: Sequence[FullAttention], capacity: int, page_size: int, dtype: torch.dtype) -> None:
        self.specs = list(specs)
        self.page_size = page_size
        self.dtype = dtype
        self.pages = Pages(-(-capacity // page_size))
        self.sequences: dict[int, ModelSequence] = {}
        self.forward: ModelForward | None = None

    # -- pages -------------------------------------------------------------------------------------------------

    def page_count(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _grow(self, pages: Pages, table: list[int], length: int, count: int) -> int:
        """Write ``count`` tokens behind ``length``: whoever writes into a shared page gets its own, the last owner
        writes in place. Returns the pages taken (the pool may be overdrawn)."""
        taken = 0
        if length % self.page_size and pages.holders[table[-1]] > 1:
            pages.drop(table[-1])
            table[-1] = pages.take()
            taken += 1
        while len(table) < self.page_count(length + count):
            table.append(pages.take())
            taken += 1
        return taken

    def missing(self, ids: Sequence[int], counts: Sequence[int]) -> int:
        """Pages that a forward is short of; while one is open, as before it."""
        tables, pages = self.forward.before if self.forward else (self._tables(), self.pages)
        tables, pages = copy.deepcopy(tables), copy.deepcopy(pages)
        for seq_id, count in zip(ids, counts, strict=True):
            self._grow(pages, tables[seq_id], self.sequences[seq_id].length, count)
        return max(0, -pages.free)

    def _tables(self) -> dict[int, list[int]]:
        return {seq_id: list(sequence.pages) for seq_id, sequence in self.sequences.items()}

    # -- sequences ---------------------------------------------------------------------------------------------

    def _faults(
        self, *, needs: Iterable[int] = (), new: Iterable[int] = (), ready: bool = True
    ) -> set[type[QuireError]]:
        """Refusals that every verb which edits has in common."""
        faults: set[type[QuireError]] = set()
        if self.forward is not None:
            faults.add(FailedPrecondition)
        for seq_id in new:
            if seq_id in self.sequences or not -(2**63) <= seq_id < 2**63:
                faults.add(InvalidArgument)
        for seq_id in needs:
            if seq_id not in self.sequences:
                faults.add(NotFound)
            elif ready and self.sequences[seq_id].reserved is not None:
                faults.add(FailedPrecondition)
        return faults

    def clear(self) -> None:
        self.sequences.clear()
        self.forward = None
        self.pages = Pages(self.pages.total)

    def add_sequence(self, seq_id: int) -> None:
        raise_first(self._faults(new=[seq_id]))
        self.sequences[seq_id] = ModelSequence([[] for _ in self.specs])

    def remove_sequence(self, seq_id: int) -> None:
        raise_first(self._faults(needs=[seq_id], ready=False))
        for page in self.sequences.pop(seq_id).pages:
            self.pages.drop(page)

    def fork_sequence(self, parent_id: int, child_id: int, fork_pos: int = -1) -> int:
        faults = self._faults(needs=[parent_id], new=[child_id])
        if fork_pos < -1 or (parent_id in self.sequences and fork_pos > self.sequences[parent_id].length):
            faults.add(InvalidArgument)
        raise_first(faults)
        parent = self.sequences[parent_id]
        length = parent.length if fork_pos == -1 else fork_pos
        child = ModelSequence([rows[:length] for rows in parent.rows], parent.pages[: self.page_count(length)])
        for page in child.pages:
            self.pages.holders[page] += 1
        self.sequences[child_id] = child
        return 0

    def popn(self, seq_id: int, n: int) -> int:
        faults = self._faults(needs=[seq_id])
        if n < 0 or (seq_id in self.sequences and n > self.sequences[seq_id].length):
            faults.add(InvalidArgument)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        length = sequence.length - n
        for rows in sequence.rows:
            del rows[length:]
        while len(sequence.pages) > self.page_count(length):
            self.pages.drop(sequence.pages.pop())
        return 0

    # -- forward -----------------------------------------------------------------------------------------------

    def _batch_faults(self, ids: Sequence[int], counts: Sequence[int]) -> set[type[QuireError]]:
        faults = self._faults(needs=ids)
        if len(ids) != len(counts) or not ids or len(set(ids)) != len(ids) or any(count < 1 for count in counts):
            faults.add(InvalidArgument)
        return faults

    def missing_pages(self, ids: Sequence[int], counts: Sequence[int]) -> int:
        faults = self._batch_faults(ids, counts)
        if not any(seq_id in self.sequences and self.sequences[seq_id].reserved is not None for seq_id in ids):
            faults.discard(FailedPrecondition)
        raise_first(faults)
        return self.missing(ids, counts)

    def begin_forward(self, ids: Sequence[int], counts: Sequence[int], parents: object = None) -> None:
        faults = self._batch_faults(ids, counts)
        if parents is not None:
            faults.add(Unsupported)
        if not faults and self.missing(ids, counts):
            faults.add(ResourceExhausted)
        raise_first(faults)
        self.forward = ModelForward(list(ids), list(counts), (self._tables(), copy.deepcopy(self.pages)))
        for seq_id, count in zip(ids, counts, strict=True):
            sequence = self.sequences[seq_id]
            self._grow(self.pages, sequence.pages, sequence.length, count)

    def positions(self) -> list[int]:
        if self.forward is None:
            raise FailedPrecondition("the oracle refuses")
        return [
            self.sequences[seq_id].length + index
            for seq_id, count in zip(self.forward.ids, self.forward.counts, strict=True)
            for index in range(count)
        ]

    def attend(
        self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Exact results ``[T, Hq, Dv]`` and how far a right answer may be from them, ``[T]``; a bound of infinity
        where a row of the entry is not finite, for then anything may come out."""
        assert self.forward is not None
        spec = self.specs[layer]
        scale = spec.scale if scale is None else scale
        turn = spec.rope if spec.rope_mode == "normal" else None
        out = torch.zeros(len(q_THD), spec.num_heads, spec.value_dim, dtype=torch.float64)
        bound = torch.zeros(len(q_THD), dtype=torch.float64)
        start = 0
        entries: list[list[Row]] = []
        for seq_id, count in zip(self.forward.ids, self.forward.counts, strict=True):
            sequence = self.sequences[seq_id]
            new: list[Row] = []
            for index in range(count):
                k, v = k_THD[start + index], v_THD[start + index]
                if turn:
                    k = rotated(k, sequence.length + index, turn).to(self.dtype)
                new.append((k, v))
            keys = sequence.rows[layer] + new
            finite = all(bool(k.isfinite().all() and v.isfinite().all()) for k, v in keys)
            for index in range(count):
                q = q_THD[start + index].double()
                if turn:
                    q = rotated(q, sequence.length + index, turn)
                visible = keys[: sequence.length + index + 1]
                if not finite or not q.isfinite().all():
                    bound[start + index] = math.inf
                    continue
                out[start + index] = torch.from_numpy(attend_one(q.numpy(), visible, scale))
                bound[start + index] = attention_bound(q, visible, scale, self.dtype)
            entries.append(new)
            start += count
        self.forward.written[layer] = entries
        return out, bound

    def end_forward(self, skipped: Iterable[int] = ()) -> None:
        left_out = set(skipped)
        faults: set[type[QuireError]] = set()
        if any(not 0 <= layer < len(self.specs) for layer in left_out):
            faults.add(InvalidArgument)
        if self.forward is None or set(range(len(self.specs))) - set(self.forward.written) - left_out:
            faults.add(FailedPrecondition)
        raise_first(faults)
        assert self.forward is not None
        for layer, spec in enumerate(self.specs):
            zero = (
                torch.zeros(spec.num_kv_heads, spec.head_dim, dtype=self.dtype),
                torch.zeros(spec.num_kv_heads, spec.value_dim, dtype=self.dtype),
            )
            entries = self.forward.written.get(layer) or [[zero] * count for count in self.forward.counts]
            for seq_id, rows in zip(self.forward.ids, entries, strict=True):
                self.sequences[seq_id].rows[layer].extend(rows)
        self.forward = None

    def abort_forward(self) -> None:
        if self.forward is None:
            raise FailedPrecondition("the oracle refuses")
        tables, self.pages = self.forward.before
        for seq_id, table in tables.items():
            self.sequences[seq_id].pages = table
        self.forward = None

    # -- rows --------------------------------------------------------------------------------------------------

    def stored(self, seq_id: int, layer: int) -> tuple[Tensor, Tensor]:
        """K ``[n, Hkv, Dk]`` and V ``[n, Hkv, Dv]`` of a sequence."""
        spec, rows = self.specs[layer], self.sequences[seq_id].rows[layer]
        if not rows:
            return (
                torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=self.dtype),
                torch.empty(0, spec.num_kv_heads, spec.value_dim, dtype=self.dtype),
            )
        return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])

    def adopt(self, seq_id: int, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Take the bits of rotated keys as they were stored, once they have been found close enough."""
        rows = self.sequences[seq_id].rows[layer]
        for index in range(len(k)):
            rows[start + index] = (k[index].clone(), v[index].clone())

    def debug_get_faults(self, seq_id: int, start: int, end: int | None, layer: int) -> None:
        faults = self._faults(needs=[seq_id])
        if self.forward is not None and not self._importing(seq_id):
            faults.discard(FailedPrecondition)
        if not 0 <= layer < len(self.specs) or start < 0 or (end is not None and end < start):
            faults.add(InvalidArgument)
        if seq_id in self.sequences:
            length = self.sequences[seq_id].length
            if max(start, start if end is None else end) > length:
                faults.add(InvalidArgument)
        raise_first(faults)

    def _importing(self, seq_id: int) -> bool:
        return seq_id in self.sequences and self.sequences[seq_id].reserved is not None

    def debug_set_kv(self, seq_id: int, start: int, k: Tensor, v: Tensor, layer: int) -> None:
        faults = self._faults(needs=[seq_id])
        stop = start + len(k)
        if not 0 <= layer < len(self.specs) or start < 0:
            faults.add(InvalidArgument)
        if seq_id in self.sequences and stop > self.sequences[seq_id].length:
            faults.add(InvalidArgument)
        shared: list[int] = []
        if not faults and stop > start:
            table = self.sequences[seq_id].pages
            touched = range(start // self.page_size, self.page_count(stop))
            shared = [index for index in touched if self.pages.holders[table[index]] > 1]
            if len(shared) > self.pages.free:
                faults.add(ResourceExhausted)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        for index in shared:
            self.pages.drop(sequence.pages[index])
            sequence.pages[index] = self.pages.take()
        for index in range(len(k)):
            sequence.rows[layer][start + index] = (k[index].clone(), v[index].clone())

    # -- import ------------------------------------------------------------------------------------------------

    def export_faults(self, seq_id: int) -> None:
        if seq_id not in self.sequences:
            raise NotFound("the oracle refuses")
        if self._importing(seq_id):
            raise FailedPrecondition("the oracle refuses")

    def prepare_import(self, seq_id: int, length: int) -> None:
        faults = self._faults(new=[seq_id])
        if self.page_count(length) > self.pages.free:
            faults.add(ResourceExhausted)
        raise_first(faults)
        sequence = ModelSequence([[] for _ in self.specs], reserved=length)
        sequence.pages = [self.pages.take() for _ in range(self.page_count(length))]
        self.sequences[seq_id] = sequence

    def import_group(self, seq_id: int, layer: int, k: Tensor, v: Tensor, intact: Callable[[], bool]) -> None:
        faults = self._faults(needs=[seq_id], ready=False)
        if seq_id in self.sequences:
            sequence = self.sequences[seq_id]
            if sequence.reserved is None or layer in sequence.imported:
                faults.add(FailedPrecondition)
            if sequence.reserved is not None and len(k) != sequence.reserved:
                faults.add(InvalidArgument)
        if not intact():
            faults.add(DataLoss)
        raise_first(faults)
        sequence = self.sequences[seq_id]
        sequence.rows[layer] = [(k[index].clone(), v[index].clone()) for index in range(len(k))]
        sequence.imported.add(layer)

    def finish_import(self, seq_id: int) -> None:
        faults = self._faults(needs=[seq_id], ready=False)
        if seq_id in self.sequences:
            sequence = self.sequences[seq_id]
            if sequence.reserved is None or len(sequence.imported) < len(self.specs):
                faults.add(FailedPrecondition)
        raise_first(faults)
        self.sequences[seq_id].reserved = None
        self.sequences[seq_id].imported = set()
