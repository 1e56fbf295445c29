"""A caller's own retriever and executor in the engine's forwards.

Letters: N tokens of a prompt; T rows of a batch; A rows that are alive; R chunks of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.blend_inputs import BlendedChunk
from quire.base.errors import BlendLoadError, InvalidArgument
from quire.blend.chunks import ChunkLayout
from quire.blend.forward import BlendedForward, ProjectionPass, RowSource, project
from quire.blend.rows_task import RowsPiece
from quire.blend.selection import BlendPolicy
from quire.contracts.blend import BlendExecutor, BlendOutput, BlendRetrieverTask
from quire.contracts.kv_state import ModelState
from quire.contracts.layers import RopeSpec
from quire.contracts.model import Block, OpenPass
from quire.ops.rope import RotaryTable

logger = logging.getLogger("quire.blend")


def checked_part(name: str, given: object, verb: str) -> Any:
    """Return a part given by a caller, or None; ``InvalidArgument`` if it lacks its verb."""
    if given is not None and not callable(getattr(given, verb, None)):
        raise InvalidArgument(field=name, given=given, allowed=f"None, or an object with a method {verb}")
    return given


class RetrievedRows:
    """The rows of one prompt found by a ``BlendRetriever``, in pieces."""

    def __init__(self, task: BlendRetrieverTask, length: int, layout: ChunkLayout) -> None:
        """``length``: N. ``layout``: of the rows. ``InvalidArgument``: a mask of another length."""
        mask = torch.as_tensor(task.valid_mask).cpu()
        if mask.shape != (length,):
            raise InvalidArgument(field="valid_mask", given=list(mask.shape), allowed=f"[{length}]")
        self._task, self._length, self._layout = task, length, layout
        self.valid_mask = (mask != 0).int()
        self.tokens_by_tier = {"retriever": int(self.valid_mask.sum())}

    def pieces(self, layer_id: int) -> list[RowsPiece]:
        """Return the rows of a layer in order of ``start``: each piece has consecutive original
        positions. ``BlendLoadError``: the layer is missing, or differs from the promise."""
        found, valid = self._task.result(layer_id), self.valid_mask.numpy() != 0
        if not valid.any():
            return []
        if found.k is None or found.v is None:
            raise BlendLoadError(f"layer {layer_id}: the retriever gave no rows, and {valid.sum()} were promised")
        plan = self._layout.plan(layer_id, self._length)
        wanted = self._layout.split(
            layer_id, {name: torch.empty(one.shape, device="meta") for name, one in plan.items()}
        )
        k_NHD, v_NHD = (_by_token(layer_id, *one) for one in zip((found.k, found.v), wanted, strict=True))
        origins = torch.as_tensor(found.original_positions).cpu().numpy()
        if origins.shape != (self._length,) or origins[valid].min() < 0:
            raise BlendLoadError(f"layer {layer_id}: original_positions must be [{self._length}], >= 0 at valid rows")
        breaks = np.flatnonzero((np.diff(valid.astype(np.int8)) != 0) | (np.diff(origins) != 1)) + 1
        edges = [0, *breaks.tolist(), self._length]
        return [
            RowsPiece(start, k_NHD[start:stop], v_NHD[start:stop], int(origins[start]))
            for start, stop in pairwise(edges)
            if valid[start]
        ]

    def close(self) -> None:
        """Close the task. One that fails is left, as its request may be ending."""
        try:
            self._task.close()
        except Exception:
            logger.warning("a task of the blend retriever failed to close", exc_info=True)


def _by_token(layer_id: int, rows: Tensor, like: Tensor) -> Tensor:
    """Return rows of either order as ``[N, H, D]``, the shape of ``like``."""
    for one in (rows, rows.transpose(0, 1)) if rows.dim() == 3 and rows.is_floating_point() else ():
        if one.shape == like.shape:
            return one
    raise BlendLoadError(
        f"layer {layer_id}: the retriever gave {rows.dtype} {list(rows.shape)}; floating {list(like.shape)} was expected"
    )


class ExecutedForward(BlendedForward):
    """A blended forward in which a ``BlendExecutor`` chooses and joins rows, layer by layer."""

    def __init__(
        self,
        executor: BlendExecutor,
        state: ModelState,
        tables: Callable[[RopeSpec], RotaryTable],
        counts: Sequence[int],
        chunks: Sequence[BlendedChunk | None],
        sources: Sequence[RowSource | None],
    ) -> None:
        super().__init__(state, BlendPolicy(min_tokens=0), tables, counts, chunks, sources)
        self._executor = executor
        self._alive: NDArray[np.int64] = np.arange(int(self._starts[-1]))

    @property
    def alive(self) -> NDArray[np.int64]:
        """Rows of the batch that run now, ascending, int64 ``[A]``."""
        return self._alive

    @property
    def counts(self) -> list[int]:
        """Number of rows of each chunk that run now."""
        counts: list[int] = np.diff(np.searchsorted(self._alive, self._starts)).tolist()
        return counts

    @property
    def rehearsed(self) -> NDArray[np.int64]:
        """See ``BlendedForward``: none."""
        return np.empty(0, dtype=np.int64)

    def enter(self, layer: int, block: Block, x_TE: Tensor, pass_: OpenPass) -> Tensor:
        """See ``BlendedForward``. ``InvalidArgument``: an output with which no forward can
        continue."""
        if not layer and callable(prepare := getattr(self._executor, "prepare", None)):
            prepare([None if one is None else one.rows for one in self.chunks])
        fresh = project(block, x_TE, ProjectionPass(self._state, layer, pass_.positions_T))
        q_AHD, k_AHD = pass_.turn(layer, fresh.q_AHD), pass_.turn(layer, fresh.k_AHD)
        device, total = k_AHD.device, len(self._valid_T)
        cached_k, cached_v = (x.new_zeros(total, *x.shape[1:]) for x in (k_AHD, fresh.v_AHD))
        origins = torch.zeros(total, dtype=torch.int64)
        for chunk in range(len(self.chunks)):
            for piece, rows in self._parts(layer, chunk):
                at = torch.from_numpy(rows)
                cached_k[at.to(device)], cached_v[at.to(device)] = piece.k.to(cached_k), piece.v.to(cached_v)
                origins[at] = torch.arange(piece.original, piece.original + len(rows))
        nothing = not self._valid_T.any()
        output = self._executor.blend(
            layer,
            None if nothing else cached_k,
            None if nothing else cached_v,
            torch.from_numpy(self._valid_T.astype(np.int32)),
            origins,
            q_AHD,
            k_AHD,
            fresh.v_AHD,
            pass_.positions_T,
            torch.from_numpy(self._starts.astype(np.int32)).to(device),
            0,
        )
        kept = self._checked(layer, output, k_AHD, fresh.v_AHD)
        self._write(layer, np.arange(total), output.k, output.v, pass_)
        into = np.searchsorted(self._alive, kept)
        if kept.size < self._alive.size:
            self._alive = kept
            pass_.narrow(kept)
            x_TE = x_TE.index_select(0, torch.from_numpy(into).to(x_TE.device))
        return x_TE

    def _checked(self, layer: int, output: BlendOutput, k_AHD: Tensor, v_AHD: Tensor) -> NDArray[np.int64]:
        """Return the rows that continue."""
        kept: NDArray[np.int64] = torch.as_tensor(output.local_indices).cpu().numpy().astype(np.int64)
        must = np.flatnonzero(~self._valid_T)
        lasts = self._starts[1:] - 1
        if (
            kept.ndim != 1
            or (np.diff(kept) <= 0).any()
            or not np.isin(kept, self._alive).all()
            or not np.isin(np.concatenate((must, lasts)), kept).all()
        ):
            allowed = (
                "ascending rows that were alive, among them the last one of each request and all without a cached one"
            )
            raise InvalidArgument(field="blend_executor.local_indices", given=kept.tolist()[:64], allowed=allowed)
        for name, rows, like in (("k", output.k, k_AHD), ("v", output.v, v_AHD)):
            wanted = [len(self._valid_T), *like.shape[1:]]
            if list(rows.shape) != wanted:
                raise InvalidArgument(
                    field=f"blend_executor.{name}", given=list(rows.shape), allowed=f"of shape {wanted}"
                )
        return kept
