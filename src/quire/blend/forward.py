"""One blended forward: a loop over a model's blocks that runs only some rows from a layer on.

Before the check layer all rows of a batch run. At the check layer the block runs up to its
projection, the rows to continue are chosen by its Q, K and V, and the block runs with these. After
it the other rows are cached ones. If a score needs the question's attention, the rows that must run
do so before all this, alone and over the cached rows of all layers.

Letters: T rows of the batch; S rows that continue; n rows of a chunk; A rows that are alive; Hq,
Hkv heads; D head size; E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.blend_inputs import BlendedChunk
from quire.base.errors import BlendLoadError, QuireError, Unsupported
from quire.blend.rotation import KeyMove
from quire.blend.rows_task import RowsPiece
from quire.blend.scores import ScoreInputs, score_of
from quire.blend.selection import BlendPolicy, Selection
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import KeyValueAttention, LatentAttention, RopeSpec
from quire.contracts.model import Block, LatentExpansion, OpenPass, Pass, RehearsalPass
from quire.contracts.rows import HeadNormWeights
from quire.ops.rope import RotaryTable
from quire.ops.rows import REFERENCE_ROWS, normed_heads


class RowSource(Protocol):
    """Cached rows of one prompt."""

    def pieces(self, layer_id: int) -> Sequence[RowsPiece]:
        """Wait for a layer's rows, and return them. ``BlendLoadError``: they could not be
        loaded."""


class BlendedForward:
    """The rows of one forward that run, layer by layer (``OpenPass.narrow``)."""

    def __init__(
        self,
        state: ModelState,
        policy: BlendPolicy,
        tables: Callable[[RopeSpec], RotaryTable],
        counts: Sequence[int],
        chunks: Sequence[BlendedChunk | None],
        sources: Sequence[RowSource | None],
        *,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """``counts``: number of rows of each chunk of the step. ``chunks``: the blending of each;
        None: all of its rows run. ``sources``: their cached rows. ``tables``: the state's rotary
        tables. ``all_reduce`` sums a tensor over the ranks that divide the model."""
        self._state, self._policy, self._tables = state, policy, tables
        self._all_reduce = all_reduce
        self._moves: dict[Hashable, KeyMove] = {}
        self.chunks, self._sources = chunks, sources
        self._starts = np.concatenate(([0], np.cumsum(counts)))
        valid = [
            np.zeros(count, dtype=np.bool_) if one is None else one.valid_n
            for count, one in zip(counts, chunks, strict=True)
        ]
        rows = [None if one is None else one.rows for one in chunks]
        self._valid_T = np.concatenate(valid)
        self._selection = Selection(policy, counts, self._valid_T, rows)
        self._narrowed = False
        self.scores_C: NDArray[np.float32] | None = None
        """The scores by which rows were selected, one for each of the ``num_scored`` candidates;
        None: not yet."""
        self.num_scored = self._selection.candidates.size
        self._rehearsal: RehearsalPass | None = None
        edges = np.searchsorted(self._selection.candidates, self._starts)
        self._asked = [
            index
            for index, one in enumerate(chunks)
            if one is not None and "question" in score_of(one.score).needs and edges[index] < edges[index + 1]
        ]
        """Numbers of the chunks whose questions run before the forward."""

    @property
    def alive(self) -> NDArray[np.int64]:
        """Rows of the batch that run now, ascending, int64 ``[A]``. The last row of each chunk is
        always among them."""
        return self._selection.alive

    @property
    def counts(self) -> list[int]:
        """Number of rows of each chunk that run now."""
        return [int(count) for count in self._selection.counts]

    @property
    def left_out(self) -> tuple[NDArray[np.bool_] | None, ...]:
        """For each chunk, a mask of its rows that do not run, bool ``[n]``; None: it is not
        blended."""
        masks = np.split(self._left_out(), self._starts[1:-1])
        return tuple(None if one is None else mask for one, mask in zip(self.chunks, masks, strict=True))

    @property
    def rehearsed(self) -> NDArray[np.int64]:
        """Rows of the batch that run alone through all blocks before the forward, ascending: the
        rows that must run, of chunks whose score needs their attention."""
        must = self._selection.must
        return must[np.isin(np.searchsorted(self._starts, must, side="right") - 1, self._asked)]

    def rehearse(self, pass_: OpenPass) -> RehearsalPass:
        """Return the pass for the rehearsed rows (``OpenPass.rehearse``)."""
        ends, counts = self._starts[1:], self._selection.question_counts
        asking = np.concatenate([np.arange(ends[index] - counts[index], ends[index]) for index in self._asked])
        self._rehearsal = pass_.rehearse(self.rehearsed, asking, self._policy.layers[0])
        return self._rehearsal

    def give(self, layer: int, pass_: OpenPass) -> None:
        """Write the cached rows that a layer's rehearsal reads. They stay for the forward."""
        others_T = np.ones(int(self._starts[-1]), dtype=np.bool_)
        others_T[self._selection.must] = False
        self._fill(layer, pass_, self._asked, others_T)

    def _left_out(self) -> NDArray[np.bool_]:
        left_T = np.ones(int(self._starts[-1]), dtype=np.bool_)
        left_T[self.alive] = False
        return left_T

    def enter(self, layer: int, block: Block, x_TE: Tensor, pass_: OpenPass) -> Tensor:
        """Return the rows of x that enter a block. Called for each block, in order."""
        if self._narrowed:
            given = () if self._rehearsal is None else self._asked
            self._fill(layer, pass_, [one for one in range(len(self.chunks)) if one not in given], self._left_out())
        if layer not in self._policy.layers:
            return x_TE
        probe = ProjectionPass(self._state, layer, pass_.positions_T)
        fresh = project(block, x_TE, probe)
        fresh = Projected(fresh.q_AHD, pass_.turn(layer, fresh.k_AHD), fresh.v_AHD)
        # All rows, also the ones that are not selected: computed K and V replace cached ones.
        self._write(layer, self.alive, fresh.k_AHD, fresh.v_AHD, pass_)
        self.scores_C = self._scores(layer, fresh, pass_)
        kept = self._selection.select(layer, self.scores_C)
        if kept.size == x_TE.shape[0]:
            return x_TE
        pass_.narrow(self.alive)
        self._narrowed = True
        return x_TE.index_select(0, torch.from_numpy(kept).to(x_TE.device))

    @property
    def check_layer(self) -> int:
        """The layer that selects."""
        return self._policy.layers[0]

    def follow(self, scores_C: NDArray[np.float32], pass_: OpenPass) -> None:
        """Leave out the rows that an earlier stage has left out, by its scores."""
        before, self.scores_C = self.alive.size, scores_C
        self._selection.select(self.check_layer, scores_C)
        if self.alive.size < before:
            pass_.narrow(self.alive)
            self._narrowed = True

    # -- selection ---------------------------------------------------------------------------------

    def _scores(self, layer: int, fresh: Projected, pass_: OpenPass) -> NDArray[np.float32]:
        """Return the scores of all candidates, each by the score of its request."""
        selection = self._selection
        if not selection.candidates.size:
            return np.zeros(0, dtype=np.float32)
        chunk_of_C = np.searchsorted(self._starts, selection.candidates, side="right") - 1
        names = [None if one is None else one.score for one in self.chunks]
        wanted = sorted({name for index in set(chunk_of_C.tolist()) if (name := names[index]) is not None})
        scores = {name: score_of(name) for name in wanted}
        needs = frozenset().union(*(score.needs for score in scores.values()))
        inputs = self._inputs(layer, fresh, pass_, needs)
        found_C = fresh.v_AHD.new_zeros(selection.candidates.size, dtype=torch.float32)
        for name, score in scores.items():
            own = np.array([names[index] == name for index in chunk_of_C])
            found_C = torch.where(torch.from_numpy(own).to(found_C.device), score.scores(inputs).float(), found_C)
        # The only time that the host waits for the device in a layer that selects.
        on_host: NDArray[np.float32] = found_C.cpu().numpy()
        return on_host

    def _inputs(self, layer: int, fresh: Projected, pass_: OpenPass, needs: frozenset[str]) -> ScoreInputs:
        spec, device = self._state.layer_spec(layer), fresh.v_AHD.device
        cached: dict[str, Tensor | None] = {"k": None, "v": None}
        mass_T = None if self._rehearsal is None else self._rehearsal.mass_T
        if needs := needs & cached.keys():
            place = np.full(int(self._starts[-1]), -1, dtype=np.int64)
            place[self.alive] = np.arange(self.alive.size)
            for name in needs:
                like = fresh.k_AHD if name == "k" else fresh.v_AHD
                cached[name] = like.new_zeros(like.shape)
            for chunk in range(len(self.chunks)):
                for piece, rows in self._parts(layer, chunk):
                    at = place[rows]
                    index = torch.from_numpy(np.flatnonzero(at >= 0)).to(device)
                    into = torch.from_numpy(at[at >= 0]).to(device)
                    for name in needs:
                        x = self._moved(layer, piece) if name == "k" else piece.v
                        target = cached[name]
                        assert target is not None
                        target.index_copy_(0, into, x.index_select(0, index).to(target.dtype))
        assert isinstance(spec, (KeyValueAttention, LatentAttention))
        return ScoreInputs(
            layer_id=layer,
            selection=self._selection,
            candidates=torch.from_numpy(self._selection.scored).to(device),
            positions=pass_.positions_T,
            # Rotated only if the measure reads keys.
            fresh_q=pass_.turn(layer, fresh.q_AHD) if "k" in needs else fresh.q_AHD,
            fresh_k=fresh.k_AHD,
            fresh_v=fresh.v_AHD,
            cached_k=cached["k"],
            cached_v=cached["v"],
            scale=spec.scale if isinstance(spec, KeyValueAttention) else 1.0,
            window=spec.layer_window if isinstance(spec, KeyValueAttention) else None,
            question_mass=None if mass_T is None else mass_T[torch.from_numpy(self.alive).to(device)],
            all_reduce=self._all_reduce,
        )

    # -- cached rows -------------------------------------------------------------------------------

    def _moved(self, layer: int, piece: RowsPiece) -> Tensor:
        """Return K of a piece, rotated to its position in the prompt."""
        spec = self._state.layer_spec(layer)
        assert isinstance(spec, (KeyValueAttention, LatentAttention))
        k_NHD, rope = piece.k, spec.rope
        if rope is None:
            return k_NHD
        # All rows of a piece move by one distance, in all layers of one rotation.
        name = (rope, piece.original, piece.start, len(k_NHD))
        if name not in self._moves:
            origins, targets = (np.full(len(k_NHD), at, dtype=np.int64) for at in (piece.original, piece.start))
            self._moves[name] = KeyMove(self._tables(rope), origins, targets)
        return self._moves[name](k_NHD)

    def _fill(self, layer: int, pass_: OpenPass, chunks: Iterable[int], left_T: NDArray[np.bool_]) -> None:
        """Write the cached rows of a layer for rows that do not run. Whole pieces are copied; rows
        that run overwrite theirs."""
        for chunk in chunks:
            wanted = left_T[self._starts[chunk] : self._starts[chunk + 1]].any()
            for piece, rows in self._parts(layer, chunk) if wanted else ():
                if left_T[rows].any():
                    self._write(layer, rows, self._moved(layer, piece), piece.v, pass_)

    def _write(self, layer: int, rows: NDArray[np.int64], k_NHD: Tensor, v_NHD: Tensor, pass_: OpenPass) -> None:
        k_NHD, v_NHD = k_NHD.to(self._state.dtype), v_NHD.to(self._state.dtype)
        if isinstance(self._state.layer_spec(layer), LatentAttention):
            pass_.write_rows(layer, rows, torch.cat((v_NHD, k_NHD), -1).squeeze(1), None)
        else:
            pass_.write_rows(layer, rows, k_NHD, v_NHD)

    def _parts(self, layer: int, chunk: int) -> list[tuple[RowsPiece, NDArray[np.int64]]]:
        """Return the pieces of a layer's cached rows within a chunk, each with its rows of the
        batch."""
        one, begin, end = self.chunks[chunk], int(self._starts[chunk]), int(self._starts[chunk + 1])
        source = self._sources[chunk]
        if one is None or source is None:
            return []
        pieces = pieces_of(source, layer, chunk, one)
        found: list[tuple[RowsPiece, NDArray[np.int64]]] = []
        for piece in pieces:
            first, last = max(piece.start, one.start), min(piece.start + piece.k.shape[0], one.start + end - begin)
            if first < last:
                some = slice(first - piece.start, last - piece.start)
                cut = RowsPiece(first, piece.k[some], piece.v[some], piece.original + some.start)
                found.append((cut, begin + np.arange(first - one.start, last - one.start)))
        return found


def pieces_of(source: RowSource, layer: int, chunk: int, one: BlendedChunk) -> Sequence[RowsPiece]:
    """Return a layer's cached rows of a chunk: all valid ones. Any error is ``BlendLoadError``,
    with the chunk's number."""
    try:
        pieces = source.pieces(layer)
    except Exception as error:
        message = str(error) if isinstance(error, BlendLoadError) else f"layer {layer} of cached rows: {error}"
        raise BlendLoadError(message, (chunk,)) from error
    missing_n = one.valid_n.copy()
    for piece in pieces:
        missing_n[max(0, piece.start - one.start) : max(0, piece.start + len(piece.k) - one.start)] = False
    if wanted := int(missing_n.sum()):
        raise BlendLoadError(f"layer {layer}: {wanted} rows that were promised did not come", (chunk,))
    return pieces


class Projected(Exception):
    """The attention inputs of a block, raised to end the block."""

    def __init__(self, q_AHD: Tensor, k_AHD: Tensor, v_AHD: Tensor) -> None:
        super().__init__()
        self.q_AHD, self.k_AHD, self.v_AHD = q_AHD, k_AHD, v_AHD


class ProjectionPass:
    """A pass that runs a block up to its attention (``contracts.model.Pass``)."""

    def __init__(self, state: ModelState, layer: int, positions_T: Tensor) -> None:
        self._spec = state.own_spec(layer)
        self.positions_T = self.places_T = positions_T

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> NoReturn:
        """Raise the arguments as ``Projected``."""
        raise Projected(q_THD, k_THD, v_THD)

    def attention_parts(self, layer_id: int, norms: HeadNormWeights | None, dtype: torch.dtype) -> None:
        """Return None: the block must not run as one call."""

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor, norms: HeadNormWeights | None = None) -> NoReturn:
        """Raise the parts of the projection as ``Projected``."""
        spec = self._spec
        assert isinstance(spec, KeyValueAttention)
        sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.value_dim]
        q, k, v = torch.split(qkv_TC, sizes, dim=-1)
        heads = ((q, spec.num_heads), (k, spec.num_kv_heads), (v, spec.num_kv_heads))
        q_AHD, k_AHD, v_AHD = (x.view(x.shape[0], count, -1) for x, count in heads)
        raise Projected(*normed_heads(REFERENCE_ROWS, q_AHD, k_AHD, norms), v_AHD)

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> NoReturn:
        """Raise the query, the rotated part of the rows, and the latent."""
        spec = self._spec
        assert isinstance(spec, LatentAttention)
        latent, rotated = torch.split(rows_TR.unsqueeze(1), [spec.value_dim, spec.row_dim - spec.value_dim], dim=-1)
        raise Projected(q_THD, rotated, latent)

    def __getattr__(self, name: str) -> NoReturn:
        raise Unsupported(f"{name} in a blended forward: a layer of this model is no attention over its own tokens")


def project(block: Block, x_AE: Tensor, pass_: Pass) -> Projected:
    """Run a block up to its attention."""
    try:
        block(x_AE, pass_)
    except Projected as found:
        return found
    raise QuireError("a block has no attention, from whose K and V rows could be selected")
