"""Blending of cached K and V (CacheBlend, EuroSys 2025): the retriever, and the executor.

Names and arguments follow LMCache 0.3. ``quire.blend`` implements them; ``docs/blend.md`` describes
their use by the engine.

Letters: R requests of a step; n tokens of a request's whole prompt, N of all prompts; T rows that
run in this step, those of request 0 first; A rows that are alive: T until layers begin to select,
then S; Hq, Hkv query and KV heads; D head size. In a latent layer (MLA) K is the rotated part,
``[N, 1, Dr]``, and V the latent, ``[N, 1, R]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class BlendRetrieverResult:
    """One layer of K and V as they were captured. The tensors are read only."""

    k: Tensor | None
    """``[N, Hkv, D]`` ("NHD") or ``[Hkv, N, D]`` ("HND") in the state's dtype on the model's
    device, rotated at ``original_positions``. Rows that are not valid are undefined, even NaN.
    None: no row of the batch is valid."""
    v: Tensor | None
    """As ``k``, without a rotation."""
    valid_mask: Tensor
    """int32 ``[N]`` on the CPU: 1 for rows that are present, the same in every layer."""
    original_positions: Tensor
    """int64 ``[N]`` on the device of ``k``: rotation positions of K; 0 for rows that are not
    valid."""


class BlendRetrieverTask(Protocol):
    """Chunks of the prompts of one request of ``BlendRetriever``, while they are loaded."""

    @property
    def valid_mask(self) -> Tensor:
        """int32 ``[N]`` on the CPU, known from the start."""

    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait until this layer is on the device, and return it; any order, any number of times.

        Later layers may still be loading. ``InvalidArgument``: no such layer. ``BlendLoadError``: a
        promised layer could not be loaded, or not in time; it names the requests. Run the step
        again then with their chunks invalid.
        """

    def close(self) -> None:
        """Release all objects. Closing again does nothing."""


class BlendRetriever(Protocol):
    """Finds chunks of prompts."""

    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> BlendRetrieverTask:
        """Look chunks up, hold the found ones, begin to load them, and return without waiting.

        ``full_prompts``: R integer tensors ``[n]`` on the CPU. ``indices``: for each prompt the
        offsets at which its second, third, ... segment begins; they do not descend and are within
        0..n. Equal offsets make an empty segment. ``InvalidArgument`` for others, before any
        lookup.
        """


@dataclass(frozen=True, slots=True, eq=False)
class BlendOutput:
    """The tensors with which one layer continues."""

    q: Tensor
    """``[S, ...]``, in the form of ``fresh_q``: the rows that continue."""
    k: Tensor
    """``[T, ...]``, in form and dtype of ``fresh_k``: for attention and for the pages."""
    v: Tensor
    """As ``k``."""
    positions: Tensor
    """``[S]``, as ``positions`` of the call: those of the kept rows, ascending in each request."""
    local_indices: Tensor
    """int64 ``[S]`` on the CPU: the kept rows as rows 0..T - 1 of the whole batch, ascending."""
    query_start_loc: Tensor | None
    """``[R + 1]``, as that of the call: counts of Q, on a call that selects; None on others."""
    kept: Tensor | None = None
    """int64 ``[S]`` on the model's device: the kept rows as rows of this call's ``fresh_q``. None:
    it is implied by ``local_indices`` of this call and the one before."""


class BlendExecutor(Protocol):
    """Chooses rows that are computed anew, and joins their K and V with cached ones."""

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
        """Blend one layer, after its projection, norms and RoPE and before its attention.

        Call it once for each layer, ascending; the first layer begins a new forward.
        ``retrieved_k``, ``retrieved_v``: the retriever's rows of this batch, with T on
        ``token_dim``, 2-D ``[T, Hkv * D]`` or 3-D; None for both: no row is valid, or the layer is
        before the first that selects. ``valid_mask [T]``: bool or integer, on the CPU.
        ``original_positions [T]``: integer. ``fresh_q``, ``fresh_k``, ``fresh_v``: A rows, K
        rotated at ``positions [A]``; after a selection, pass the positions of the last output.
        ``query_start_loc [R + 1]``: counts of the T rows, the same on every call. ``token_dim``: 0,
        or 1 for "HND". No argument is modified. ``InvalidArgument`` for shapes that disagree,
        before any work.
        """
