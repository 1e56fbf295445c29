"""Blending cached KV (CacheBlend, Yao et al., EuroSys 2025, arXiv:2405.16444), with LMCache 0.3's interfaces.

Text chunks that were computed before, elsewhere, are reused: K is rotated to its new position, exactly, and the
tokens whose KV is most wrong are recomputed, which is an approximation. If the cached KV happens to be true, blending
changes nothing; no row ever depends on a row after it.

Letters: R requests in the step; n tokens of a request's prompt, C of them already in its own pages (*context*); N the
sum of n; T rows that run in this step (rows C..n-1 of every request, concatenated); A rows of one call: T until the
first selection, then S; S rows still running; L layers; c the first selecting layer; Hq, Hkv heads; D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, TypeAlias, get_args

import torch
from torch import Tensor

from quire.errors import InvalidArgument

BlendScore: TypeAlias = Literal["v", "k", "kv_rel", "first_k", "query", "v_query", "random", "oracle", "rows"]
"""How wrong a cached row is. ``v``: squared difference of V, summed over heads and dims. ``k``: of K, re-rotated.
``kv_rel``: both, each relative to the cached row. ``first_k``: the first rows of each chunk but the first. ``query``:
attention mass from the query segment. ``v_query``: ``v`` times its square root. For tests: ``random``, ``oracle`` (true
deviation), ``rows`` (an explicit list)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendPolicy:
    """What is recomputed. An executor is built with one and serves any number of forwards."""

    ratio: float = 0.15
    """Part of the candidate rows that is recomputed, in [0, 1]. Rows that must run anyway do not count."""
    selecting_layers: tuple[int, ...] = (1,)
    """Where rows are selected, ascending; several are *gradual filtering*."""
    layer_factors: tuple[float, ...] = ()
    """``ratio`` is multiplied by these at the selecting layers, for example (1.5, 1.0, 0.7); not ascending. Empty: by 1."""
    score: BlendScore = "v"
    threshold: float | None = None
    """Recompute only rows whose score is above it; None: the ratio alone decides."""
    min_tokens: int = 256
    """A request with fewer reusable tokens is not blended: it runs as a full prefill."""
    protect_last: bool = True
    """Always recompute the last row of each request. False only reproduces LMCache 0.3's selection in tests."""

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)
        layers = self.selecting_layers
        if not layers or layers[0] < 0 or any(b <= a for a, b in pairwise(layers)):
            raise InvalidArgument(f"selecting_layers must be one or more ascending layer ids >= 0; got {layers}")
        factors = self.layer_factors
        if factors and (
            len(factors) != len(layers)
            or not all(math.isfinite(f) and f > 0 for f in factors)
            or any(b > a for a, b in pairwise(factors))
        ):
            raise InvalidArgument(
                f"layer_factors must be empty or {len(layers)} positive numbers that do not ascend; got {factors}"
            )
        if self.score not in get_args(BlendScore):
            raise InvalidArgument(f"score must be one of {', '.join(get_args(BlendScore))}; got {self.score!r}")
        if self.threshold is not None and not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise InvalidArgument(f"threshold must be a finite number >= 0, or None; got {self.threshold}")
        if self.min_tokens < 0:
            raise InvalidArgument(f"min_tokens must be >= 0; got {self.min_tokens}")

    def budget(self, candidates: int, selection: int = 0, ratio: float | None = None) -> int:
        """How many of the ``candidates`` (counted at the first selecting layer) are recomputed from a selection on.

        ``selection`` indexes ``selecting_layers``; ``ratio`` is a request's own, None the policy's.
        ``ceil(ratio * factor * candidates - 1e-9)``, at most all of them. A ratio of 1 recomputes every candidate at
        every selection, whatever the factors.
        """
        ratio = self.ratio if ratio is None else ratio
        _check_ratio(ratio)
        if candidates < 0 or not 0 <= selection < len(self.selecting_layers):
            raise InvalidArgument(
                f"candidates must be >= 0 and selection below {len(self.selecting_layers)}; "
                f"got {candidates} and {selection}"
            )
        factor = self.layer_factors[selection] if self.layer_factors and ratio < 1.0 else 1.0
        # The small term keeps 0.07 * 100, which is a little more than 7 in binary, from costing an eighth row.
        return max(0, math.ceil(min(1.0, ratio * factor) * candidates - 1e-9))


def _check_ratio(ratio: float) -> None:
    if not 0.0 <= ratio <= 1.0:
        raise InvalidArgument(f"ratio must be in [0, 1]; got {ratio}")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendRequest:
    """(ours) What the runtime knows of one request of the next forward. Rows count its own rows of the step, from 0."""

    ratio: float | None = None
    """Its own ratio; None: the policy's."""
    threshold: float | None = None
    """Its own threshold; None: the policy's."""
    forced_rows: tuple[int, ...] = ()
    """Rows that must be recomputed: the query segment, decode rows."""
    exact_rows: tuple[int, ...] = ()
    """Rows whose cached KV is known to be exact: no candidates."""

    def __post_init__(self) -> None:
        if self.ratio is not None:
            _check_ratio(self.ratio)
        if self.threshold is not None and not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise InvalidArgument(f"threshold must be a finite number >= 0, or None; got {self.threshold}")
        if min((*self.forced_rows, *self.exact_rows), default=0) < 0:
            raise InvalidArgument(f"rows must be >= 0; got forced {self.forced_rows}, exact {self.exact_rows}")


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendRetrieverResult:
    """K and V of one layer as they were captured, for all N tokens of the concatenated prompts. Read-only."""

    k: Tensor | None
    """``[N, Hkv, D]`` ("NHD") or ``[Hkv, N, D]`` ("HND"), cache dtype, model device; rotated at
    ``original_positions``. Rows that are not valid are undefined (may be NaN). None, as ``v``, if no token is valid."""
    v: Tensor | None
    valid_mask: Tensor
    """int32 ``[N]`` on the CPU, 1 where the KV of the token is available; the same for every layer, any pattern."""
    original_positions: Tensor
    """int64 ``[N]``, on the device of K and V (CPU when they are None): where the stored K was rotated; 0 if invalid."""

    def __post_init__(self) -> None:
        mask, positions = self.valid_mask, self.original_positions
        if mask.dim() != 1 or mask.dtype != torch.int32 or mask.device.type != "cpu":
            raise InvalidArgument(
                f"valid_mask must be int32 [N] on the CPU; got {mask.dtype} {list(mask.shape)} on {mask.device}"
            )
        if positions.shape != mask.shape or positions.dtype != torch.int64:
            raise InvalidArgument(field="original_positions", given=positions, allowed=f"int64 {list(mask.shape)}")
        if self.k is None or self.v is None:
            if self.k is not None or self.v is not None:
                raise InvalidArgument("k and v must both be given, or both be None")
            if mask.any():
                raise InvalidArgument(f"k and v are None although {int(mask.sum())} tokens are valid")
            return
        tokens = mask.shape[0]
        for name, tensor in (("k", self.k), ("v", self.v)):
            if tensor.dim() != 3 or tokens not in tensor.shape[:2]:
                allowed = f"[{tokens}, heads, dim] or [heads, {tokens}, dim]"
                raise InvalidArgument(field=name, given=tensor, allowed=allowed)
        if not self.k.device == self.v.device == positions.device:
            raise InvalidArgument(
                f"k, v and original_positions must share a device; got {self.k.device}, {self.v.device}, {positions.device}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlendOutput:
    """What goes on after one layer's blending: the short Q, the long K and V."""

    q: Tensor
    """``[S, ...]``, in the form of ``fresh_q``: the rows that go on."""
    k: Tensor
    """``[T, ...]``, in form and dtype of ``fresh_k``, as ``v``: what attention reads and what is written to the pages."""
    v: Tensor
    positions: Tensor
    """``[S]``, dtype and device of the positions given: strictly increasing inside a request."""
    local_indices: Tensor
    """int64 ``[S]`` on the CPU: kept rows as rows of the original batch, 0..T-1, ascending; ``arange(T)`` before any
    selection."""
    query_start_loc: Tensor | None
    """``[R + 1]``: new cumulative counts of Q on a call that selects, also if it kept every row; None on every other.
    K and V keep the original one."""
    kept: Tensor | None = None
    """(ours) int64 ``[S]`` on the model's device: kept rows as rows of this call's ``fresh_q``; gather the residual
    stream with it."""

    def __post_init__(self) -> None:
        local = self.local_indices
        if local.dim() != 1 or local.dtype != torch.int64 or local.device.type != "cpu":
            raise InvalidArgument(
                f"local_indices must be int64 [S] on the CPU; got {local.dtype} {list(local.shape)} on {local.device}"
            )
        if (local.diff() <= 0).any() or (local[:1] < 0).any():
            raise InvalidArgument("local_indices must be >= 0 and ascend strictly")
        if self.positions.shape != local.shape:
            raise InvalidArgument(
                f"positions has shape {list(self.positions.shape)}; local_indices {list(local.shape)}"
            )
        if self.kept is not None and self.kept.shape != local.shape:
            raise InvalidArgument(f"kept has shape {list(self.kept.shape)}; local_indices {list(local.shape)}")
        if self.query_start_loc is not None and self.query_start_loc.dim() != 1:
            raise InvalidArgument(f"query_start_loc must be [R + 1]; got shape {list(self.query_start_loc.shape)}")


class BlendRetrieverTask(Protocol):
    """One look-up under way. Pins what it found until it is closed or garbage-collected."""

    @property
    def valid_mask(self) -> Tensor:
        """int32 ``[N]`` on the CPU, known at once: what was promised, the same for every layer."""

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Block until **this layer** is on the device; later ones may still be loading.

        Callable in any order, repeatedly, with equal answers. ``InvalidArgument``: outside 0..L-1.
        ``BlendLoadError``: a promised layer cannot be loaded, or the task's deadline passed; names the requests
        concerned, and the caller runs the step again with their chunks invalid. ``FailedPrecondition``: closed.
        """

    def close(self) -> None:
        """Release pins and buffers. Idempotent."""


class BlendRetriever(Protocol):
    """Finds chunks of prompts whose KV is stored."""

    def new_request(self, full_prompts: list[Tensor], indices: list[list[int]]) -> BlendRetrieverTask:
        """Look chunks up, pin what is found, start loading, return at once.

        ``full_prompts``: R integer 1-D tensors on the CPU, each the **whole** prompt, tokens already in pages included;
        never changed. ``indices``: for each the offsets at which segments 2, 3, ... start, non-decreasing in 0..n;
        [] is one segment, equal offsets make an empty one.

        ``InvalidArgument``, before any look-up: lists of different length, offsets not sorted or out of range, a prompt
        that is not 1-D integer.
        """


class BlendExecutor(Protocol):
    """Blends one forward, layer by layer. Serves any number of forwards; one thread at a time."""

    def prepare(self, requests: Sequence[BlendRequest]) -> None:
        """(ours) What is known of each of the R requests of the next forward; before its first layer, optional.

        Without it only the last row of each request must be recomputed. It holds for one forward.
        ``InvalidArgument``: malformed here; a count other than R at the first layer.
        """

    def blend(
        self,
        layer_id: int,
        retrieved_k: Tensor | None,
        retrieved_v: Tensor | None,
        valid_mask: Tensor,
        original_positions: Tensor,
        fresh_q: Tensor,
        fresh_k: Tensor,
        fresh_v: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        token_dim: int,
    ) -> BlendOutput:
        """Blend one layer, after its projection, QK-norm and RoPE, before its attention; once, in increasing order.

        * ``layer_id``: the first layer of the stage begins a new forward and resets all state of the last one.
        * ``retrieved_k``, ``retrieved_v``: this batch's T rows, on ``token_dim``; 2-D ``[T, Hkv*D]`` or 3-D, cache
          dtype. None for both: all invalid, or a layer before c, where cached rows are not used.
        * ``valid_mask`` ``[T]``, CPU, bool or integer; ``original_positions`` ``[T]``, any integer dtype and device.
        * ``fresh_q`` ``[A, Hq*D]`` or 3-D, model dtype; ``fresh_k``, ``fresh_v`` ``[A, Hkv*D]`` or 3-D; K is rotated at
          ``positions`` already.
        * ``positions`` ``[A]``, integer: place of each row in its request, from C. After a selection those of the last
          ``BlendOutput``. The T of the first call alone say where K is rotated to.
        * ``query_start_loc`` int32 ``[R + 1]``: cumulative row counts of the *original* batch, the same on every call.
        * ``token_dim``: the dimension that holds tokens, in fresh and retrieved tensors alike: 0, or 1 for "HND".

        Before c, K and V are the fresh ones. At c, rows are selected and K and V stay fresh for all. After c they are
        the cached rows, re-rotated, with the fresh ones scattered over them: fresh wins wherever it exists. Nothing
        passed in is modified. ``InvalidArgument``: shapes that disagree, layers out of order. O(T) rows.
        """
