"""One blended forward: the loop over a model's blocks in which, from a layer on, some rows run.

Before the check layer all rows of a batch run. There the block is run as far as its projection, the
rows that go on are chosen from its Q, K and V, and the block runs with these. Behind it the others
have cached rows.

Letters: T rows of the batch; S rows that go on; n rows of a chunk; A rows that are alive; Hq, Hkv
heads; D head size; E model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.blend.rotation import Rotation
from quire.blend.scores import Score, ScoreInputs, score_of
from quire.blend.selection import BlendedRows, BlendPolicy, Selection
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import KeyValueAttention, LatentAttention
from quire.contracts.model import Block, LatentExpansion, OpenPass, Pass
from quire.errors import QuireError, Unsupported


@dataclass(frozen=True, slots=True, eq=False)
class CachedRows:
    """Adjacent rows of one layer, as they were captured."""

    start: int
    """Position in the prompt of the first one."""
    k: Tensor
    """``[n, Hkv, D]``, of a latent layer the part that is rotated, ``[n, 1, Dr]``."""
    v: Tensor
    """``[n, Hkv, D]``, of a latent layer the latent, ``[n, 1, R]``."""
    original_start: int
    """Position at which K of the first one was rotated."""


class RowSource(Protocol):
    """Cached rows of one prompt."""

    def pieces(self, layer_id: int) -> Sequence[CachedRows]:
        """Wait for a layer's rows, and return them. ``BlendLoadError``: they do not come."""


@dataclass(frozen=True, slots=True, eq=False)
class BlendedChunk:
    """How one chunk of a step is blended."""

    source: RowSource
    start: int
    """Position in the prompt of the chunk's first token."""
    valid_n: NDArray[np.bool_]
    """Which of the chunk's rows have a cached one."""
    rows: BlendedRows


class BlendedForward:
    """The rows of one forward, layer by layer (``runner.local.RowChoice``)."""

    def __init__(
        self,
        state: ModelState,
        policy: BlendPolicy,
        rotation: Rotation,
        counts: Sequence[int],
        chunks: Sequence[BlendedChunk | None],
    ) -> None:
        """``counts``: rows of each chunk of the step. ``chunks``: how each is blended; None: all of
        its rows run."""
        self._state, self._policy, self._rotation = state, policy, rotation
        self._chunks = chunks
        self._starts = np.concatenate(([0], np.cumsum(counts)))
        valid = [
            np.zeros(count, dtype=np.bool_) if one is None else one.valid_n
            for count, one in zip(counts, chunks, strict=True)
        ]
        self._valid_T = np.concatenate(valid)
        self._selection = Selection(policy, counts, self._valid_T, [None if one is None else one.rows for one in chunks])
        self._score: Score = score_of(policy.score)
        self._narrowed = False

    @property
    def alive(self) -> NDArray[np.int64]:
        """Rows of the batch that run now, ascending, int64 ``[A]``."""
        return self._selection.alive

    @property
    def counts(self) -> list[int]:
        """Rows of each chunk that run now."""
        return self._selection.counts.tolist()

    def first_left_out(self, chunk: int) -> int | None:
        """Return the position of a chunk's first row that does not run; None: all run."""
        start, stop = self._starts[chunk : chunk + 2].tolist()
        alive = self.alive[np.searchsorted(self.alive, start) : np.searchsorted(self.alive, stop)] - start
        one = self._chunks[chunk]
        if one is None or alive.size == stop - start:
            return None
        return one.start + int(np.setdiff1d(np.arange(stop - start), alive, assume_unique=True)[0])

    def enter(self, layer: int, block: Block, x_AE: Tensor, pass_: OpenPass) -> Tensor:
        """Return the rows of x that enter a block. Called for each, in order."""
        if layer in self._policy.layers:
            x_AE = self._select(layer, block, x_AE, pass_)
        elif self._narrowed:
            self._fill(layer, pass_)
        return x_AE

    def _select(self, layer: int, block: Block, x_AE: Tensor, pass_: OpenPass) -> Tensor:
        selection = self._selection
        if self._narrowed:
            self._fill(layer, pass_)
        probe = ProjectionPass(self._state, layer, pass_.positions_T)
        fresh = project(block, x_AE, probe)  # type: ignore[arg-type]
        pass_.append(layer, fresh.k_AHD, fresh.v_AHD)
        if selection.candidates.size:
            scores = self._score.scores(self._inputs(layer, fresh, pass_)).cpu().numpy()
        else:
            scores = np.empty(0, dtype=np.float32)
        kept = selection.select(layer, scores)
        if kept.size == x_AE.shape[0]:
            return x_AE
        pass_.narrow(selection.alive)
        self._narrowed = True
        return x_AE.index_select(0, torch.from_numpy(kept).to(x_AE.device))

    def _fill(self, layer: int, pass_: OpenPass) -> None:
        """Give a layer the cached rows of those that do not run."""
        latent = isinstance(self._state.layer_spec(layer), LatentAttention)
        runs_T = np.zeros(int(self._starts[-1]), dtype=np.bool_)
        runs_T[self.alive] = True
        rows: list[NDArray[np.int64]] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for part, batch_rows in self._parts(layer):
            left = np.flatnonzero(~runs_T[batch_rows])
            if not left.size:
                continue
            index = torch.from_numpy(left).to(part.k.device)
            k = self._rotation.moved(
                layer, part.k.index_select(0, index), part.original_start + index, part.start - part.original_start
            )
            rows.append(batch_rows[left])
            keys.append(k)
            values.append(part.v.index_select(0, index))
        if not rows:
            return
        order = np.concatenate(rows)
        k, v = torch.cat(keys), torch.cat(values)
        if latent:
            pass_.write_rows(layer, order, torch.cat((v, k), -1).squeeze(1), None)
        else:
            pass_.write_rows(layer, order, k, v)

    def _parts(self, layer: int) -> list[tuple[CachedRows, NDArray[np.int64]]]:
        """Return the cached rows of a layer that are of this batch, with their rows in it, in
        order."""
        found: list[tuple[CachedRows, NDArray[np.int64]]] = []
        for chunk, (begin, end) in zip(self._chunks, zip(self._starts[:-1].tolist(), self._starts[1:].tolist(), strict=True), strict=True):
            if chunk is None:
                continue
            stop = chunk.start + end - begin
            for piece in chunk.source.pieces(layer):
                first = max(piece.start, chunk.start)
                last = min(piece.start + piece.k.shape[0], stop)
                if first < last:
                    some = slice(first - piece.start, last - piece.start)
                    cut = CachedRows(first, piece.k[some], piece.v[some], piece.original_start + some.start)
                    found.append((cut, begin + np.arange(first - chunk.start, last - chunk.start)))
        return found


class Projected(Exception):
    """What a block gives to attention, before rotation. It ends the block."""

    def __init__(self, q_AHD: Tensor, k_AHD: Tensor, v_AHD: Tensor) -> None:
        super().__init__()
        self.q_AHD, self.k_AHD, self.v_AHD = q_AHD, k_AHD, v_AHD


class ProjectionPass:
    """A pass that runs a block as far as its attention (``contracts.model.Pass``)."""

    def __init__(self, state: ModelState, layer: int, positions_T: Tensor) -> None:
        self._spec = state.layer_spec(layer)
        self.positions_T = positions_T

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> NoReturn:
        """Raise what was given as ``Projected``."""
        raise Projected(q_THD, k_THD, v_THD)

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor) -> NoReturn:
        """Raise the parts of the projection as ``Projected``."""
        spec = self._spec
        assert isinstance(spec, KeyValueAttention)
        sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim]
        q, k, v = torch.split(qkv_TC, sizes, dim=-1)
        heads = ((q, spec.num_heads), (k, spec.num_kv_heads), (v, spec.num_kv_heads))
        raise Projected(*(x.unflatten(-1, (count, -1)) for x, count in heads))

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> NoReturn:
        """Raise the query, the part of the rows that is rotated, and the latent."""
        spec = self._spec
        assert isinstance(spec, LatentAttention)
        latent, rotated = rows_TR.unsqueeze(1).split([spec.value_dim, spec.row_dim - spec.value_dim], dim=-1)
        raise Projected(q_THD, rotated, latent)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unsupported(f"{name} in a blended forward: a layer of this model is no attention over its own tokens")


def project(block: Block, x_AE: Tensor, pass_: Pass) -> Projected:
    """Run a block as far as its attention."""
    try:
        block(x_AE, pass_)
    except Projected as found:
        return found
    raise QuireError("a block has no attention, from whose K and V rows could be selected")
