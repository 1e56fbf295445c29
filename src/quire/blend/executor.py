"""Blending on plain tensors: ``contracts.blend.BlendExecutor`` for callers with their own loop over
layers.

Letters: R requests; T rows of the batch; A rows that are alive; S rows that continue; H heads of K
and V; D columns of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.blend_inputs import BlendedRows
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.blend.rotation import KeyMove
from quire.blend.scores import ScoreInputs, score_of
from quire.blend.selection import BlendPolicy, Selection
from quire.contracts.blend import BlendOutput
from quire.contracts.layers import (
    CrossAttention,
    FullAttention,
    KeyValueAttention,
    LatentAttention,
    LayerSpec,
    Recurrent,
    RopeSpec,
    WindowedAttention,
)
from quire.ops.rope import RotaryTable


@dataclass(slots=True, eq=False)
class _Forward:
    """The state of one forward from layer to layer."""

    starts: Tensor
    """``query_start_loc``, as given."""
    counts: list[int]
    """Rows of each request."""
    positions: NDArray[np.int64]
    """``[T]``, of the first layer: the position of each row."""
    valid: NDArray[np.bool_]
    """``[T]``, of the first layer."""
    selection: Selection
    requests: Sequence[BlendedRows | None]
    layer_id: int
    """The last layer that was blended."""
    alive: Tensor
    """``selection.alive`` on the model's device."""
    origins: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """``[T]``: original positions for ``moves``; empty before there are any."""
    moves: dict[RopeSpec, KeyMove] = field(default_factory=dict)

    @property
    def left_out(self) -> bool:
        """True if some rows do not run."""
        return len(self.alive) < len(self.positions)


@dataclass(frozen=True, slots=True)
class _Widths:
    """Heads of a layer and their columns."""

    query_heads: int
    query_dim: int | None
    """None: any, since queries of latent layers have several forms."""
    heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, spec: LayerSpec) -> _Widths:
        if isinstance(spec, LatentAttention):
            key_dim = spec.row_dim - spec.value_dim
            return cls(spec.num_heads, None, 1, key_dim, spec.value_dim, spec.scale, None)
        assert isinstance(spec, (FullAttention, WindowedAttention))
        key_dim = spec.head_dim
        return cls(spec.num_heads, key_dim, spec.num_kv_heads, key_dim, spec.value_dim, spec.scale, spec.layer_window)

    def check(self, name: str, given: Tensor, count: int, token_dim: int, device: torch.device) -> None:
        """Raise ``InvalidArgument`` unless a tensor of this name has ``count`` rows of this
        layer."""
        heads = self.query_heads if name == "fresh_q" else self.heads
        columns = {"q": self.query_dim, "k": self.key_dim, "v": self.value_dim}[name[-1]]
        if columns is None:
            columns = math.prod((*given.shape[:token_dim], *given.shape[token_dim + 1 :])) // heads
        flat, by_head = [count, heads * columns], [count, heads, columns]
        if token_dim == 1:
            flat, by_head = [heads * columns, count], [heads, count, columns]
        if list(given.shape) not in (flat, by_head) or not given.is_floating_point() or given.device != device:
            allowed = f"a floating tensor {flat} or {by_head} on {device}"
            raise InvalidArgument(field=name, given=given, allowed=allowed)


class TensorBlender:
    """Blends the layers of one model, or of one pipeline stage, for any number of forwards.

    It runs no layer of a model and has no pages. One forward at a time.
    """

    def __init__(
        self,
        policy: BlendPolicy,
        layers: Sequence[LayerSpec],
        *,
        first_layer: int = 0,
        all_reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take the specs of layers ``first_layer`` and later; heads are those of this rank.

        ``all_reduce`` sums a tensor over ranks, replicated heads counted once. ``Unsupported`` for
        layers whose state cannot be moved, and for a score that needs a forward of its own.
        ``InvalidArgument`` for an unknown score and for a policy that selects before
        ``first_layer``.
        """
        for layer_id, spec in enumerate(layers, first_layer):
            if refusal := blend_refusal(spec):
                raise Unsupported(f"blend: layer {layer_id} {refusal}", field="layers")
        if policy.layers[0] < first_layer:
            raise InvalidArgument(field="policy.layers", given=policy.layers, allowed=f"layers from {first_layer} on")
        self.policy = policy
        self._score = score_of(policy.score)
        if "question" in self._score.needs:
            raise Unsupported(
                f"score: '{policy.score}' needs a pass of the question over all layers, before those that are blended; "
                "choose 'v'",
                field="score",
            )
        self._layers = tuple(layers)
        self._widths = tuple(map(_Widths.of, layers))
        self._first = first_layer
        self._all_reduce = all_reduce
        self._tables: dict[tuple[RopeSpec, torch.device], RotaryTable] = {}
        self._requests: Sequence[BlendedRows | None] | None = None
        self._forward: _Forward | None = None

    def prepare(self, requests: Sequence[BlendedRows | None]) -> None:
        """Set the known facts about each request of the next forward; None: none. Without a call
        nothing is known of any."""
        self._requests = tuple(requests)

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
        """Blend one layer, as ``contracts.blend.BlendExecutor`` says.

        At the first layer that selects, one of K and V may be None if the score does not read it.
        ``FailedPrecondition``: the layer is not the next one.
        """
        if not self._first <= layer_id < self._first + len(self._layers):
            allowed = f"in {self._first}..{self._first + len(self._layers) - 1}"
            raise InvalidArgument(field="layer_id", given=layer_id, allowed=allowed)
        if token_dim not in (0, 1):
            raise InvalidArgument(field="token_dim", given=token_dim, allowed="0 or 1")
        forward = self._opened(layer_id, positions, query_start_loc, valid_mask)
        widths = self._widths[layer_id - self._first]
        device, count, total = positions.device, len(forward.alive), len(forward.positions)
        widths.check("fresh_q", fresh_q, count, token_dim, device)
        widths.check("fresh_k", fresh_k, count, token_dim, device)
        widths.check("fresh_v", fresh_v, count, token_dim, device)
        retrieved = {"k": retrieved_k, "v": retrieved_v}
        for name, given in retrieved.items():
            if given is not None:
                widths.check(f"retrieved_{name}", given, total, token_dim, device)
        _check_integers("positions", positions, count)
        _check_integers("original_positions", original_positions, total)
        selects = layer_id in self.policy.layers
        selection = forward.selection
        if layer_id == self.policy.layers[0] and retrieved_k is None and retrieved_v is None:
            nothing = np.zeros_like(forward.valid)
            selection = Selection(self.policy, forward.counts, nothing, forward.requests)
        reads: frozenset[str] = frozenset()
        if forward.left_out:
            reads = frozenset({"k", "v"})
        elif selects and len(selection.candidates):
            reads = self._score.needs
        cached: dict[str, Tensor] = {}
        for name in sorted(reads):
            given = retrieved[name]
            if given is None:
                why = "rows were left out" if forward.left_out else f"score {self.policy.score!r} reads it"
                raise InvalidArgument(field=f"retrieved_{name}", given=None, allowed=f"a tensor, since {why}")
            # Keys of another dtype than the model's become float32, so that they are rounded only
            # once.
            cached[name] = _heads(given if given.dtype == fresh_k.dtype else given.float(), token_dim, widths.heads)
        if "k" in cached:
            cached["k"] = self._moved(layer_id, forward, cached["k"], original_positions)

        k, v = fresh_k, fresh_v
        if forward.left_out:
            k = _joined(cached["k"], fresh_k, forward.alive, token_dim)
            v = _joined(cached["v"], fresh_v, forward.alive, token_dim)
        kept = torch.arange(count, device=device)
        starts = None
        q = fresh_q
        if selects:
            scores = np.empty(0)
            if len(selection.candidates):
                if forward.left_out:
                    cached = {name: rows[forward.alive] for name, rows in cached.items()}
                inputs = ScoreInputs(
                    layer_id=layer_id,
                    selection=selection,
                    candidates=torch.from_numpy(selection.scored).to(device),
                    positions=positions,
                    fresh_q=_heads(fresh_q, token_dim, widths.query_heads),
                    fresh_k=_heads(fresh_k, token_dim, widths.heads),
                    fresh_v=_heads(fresh_v, token_dim, widths.heads),
                    cached_k=cached.get("k"),
                    cached_v=cached.get("v"),
                    scale=widths.scale,
                    window=widths.window,
                    all_reduce=self._all_reduce,
                )
                scores = self._score.scores(inputs).detach().cpu().numpy()
            kept = torch.from_numpy(selection.select(layer_id, scores)).to(device)
            ends = torch.from_numpy(np.cumsum(selection.counts)).to(query_start_loc)
            starts = torch.cat((ends.new_zeros(1), ends))
            q, positions = fresh_q.index_select(token_dim, kept), positions.index_select(0, kept)
            forward.alive = forward.alive[kept]
        forward.selection, forward.layer_id = selection, layer_id
        if layer_id == self._first:
            self._forward, self._requests = forward, None
        return BlendOutput(
            q=q,
            k=k,
            v=v,
            positions=positions,
            local_indices=torch.from_numpy(selection.alive.copy()),
            query_start_loc=starts,
            kept=kept,
        )

    def _opened(self, layer_id: int, positions: Tensor, query_start_loc: Tensor, valid_mask: Tensor) -> _Forward:
        """Return the forward that this layer begins or continues; change nothing."""
        forward = self._forward
        if layer_id == self._first:
            counts = _checked_counts(query_start_loc)
            valid = _checked_mask(valid_mask, sum(counts))
            requests = self._requests if self._requests is not None else (None,) * len(counts)
            return _Forward(
                starts=query_start_loc,
                counts=counts,
                positions=_checked_positions(positions, counts),
                valid=valid,
                selection=Selection(self.policy, counts, valid, requests),
                requests=requests,
                layer_id=layer_id,
                alive=torch.arange(len(valid), device=positions.device),
            )
        if forward is None or layer_id != forward.layer_id + 1:
            before = "no layer" if forward is None else f"layer {forward.layer_id}"
            raise FailedPrecondition(
                f"blend: layer {layer_id} cannot follow {before}; each layer is blended once, beginning with {self._first}"
            )
        # Reading the values of another tensor would wait for its device.
        if query_start_loc is not forward.starts and _checked_counts(query_start_loc) != forward.counts:
            allowed = f"that of layer {self._first}, with {forward.counts} rows"
            raise InvalidArgument(field="query_start_loc", given=query_start_loc.tolist(), allowed=allowed)
        if not np.array_equal(_checked_mask(valid_mask, len(forward.valid)), forward.valid):
            raise InvalidArgument(field="valid_mask", given=valid_mask, allowed=f"that of layer {self._first}")
        return forward

    def _moved(self, layer_id: int, forward: _Forward, k_THD: Tensor, original_positions: Tensor) -> Tensor:
        """Return cached keys at the positions of the batch; rows without a cached key are
        undefined."""
        spec = self._layers[layer_id - self._first]
        assert not isinstance(spec, (CrossAttention, Recurrent))
        if spec.rope is None or spec.rope_mode == "inline":
            return k_THD
        origins = np.where(forward.valid, original_positions.long().cpu().numpy(), 0)
        if origins.min() < 0:
            raise InvalidArgument(field="original_positions", given=int(origins.min()), allowed="positions >= 0")
        if not np.array_equal(origins, forward.origins):
            forward.origins, forward.moves = origins, {}
        move = forward.moves.get(spec.rope)
        if move is None:
            device = k_THD.device
            table = self._tables.get((spec.rope, device))
            if table is None:
                table = self._tables[spec.rope, device] = RotaryTable(spec.rope, device)
            targets = np.where(forward.valid, forward.positions, 0)
            move = forward.moves[spec.rope] = KeyMove(table, origins, targets)
        return move(k_THD)


def blend_refusal(spec: LayerSpec) -> str:
    """Return the reason why rows of such a layer cannot be used at another position; "" if they
    can."""
    if isinstance(spec, Recurrent):
        return "keeps a recurrent state: it cannot be moved to another place, and needs every row"
    if isinstance(spec, CrossAttention):
        return "keeps rows of an encoder, which belong to no token"
    if isinstance(spec, KeyValueAttention) and spec.caller_rotates and spec.rope is None:
        return "has keys that the model rotates by a rule of its own: they cannot be moved"
    return ""


def _heads(rows: Tensor, token_dim: int, heads: int) -> Tensor:
    """Return a tensor of any accepted form as a view ``[T, H, D]``."""
    rows = rows.movedim(token_dim, 0)
    return rows if rows.dim() == 3 else rows.reshape(len(rows), heads, -1)


def _joined(cached_THD: Tensor, fresh: Tensor, alive: Tensor, token_dim: int) -> Tensor:
    """Return cached rows overwritten by the fresh ones, in form and dtype of ``fresh``.

    Rows without a cached one are all alive, so no undefined value remains, and none is computed
    with.
    """
    cached = cached_THD.to(fresh.dtype)
    cached = cached.flatten(1) if fresh.dim() == 2 else cached
    return cached.movedim(0, token_dim).index_copy(token_dim, alive, fresh)


def _check_integers(name: str, given: Tensor, count: int) -> None:
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool or given.shape != (count,):
        raise InvalidArgument(field=name, given=given, allowed=f"integers [{count}]")


def _checked_positions(given: Tensor, counts: list[int]) -> NDArray[np.int64]:
    """Return a copy of the positions of all rows, because the caller may write to its own."""
    _check_integers("positions", given, sum(counts))
    positions: NDArray[np.int64] = given.to("cpu", torch.int64, copy=True).numpy()
    first = np.zeros(len(positions), dtype=np.bool_)
    first[np.cumsum([0, *counts[:-1]])] = True
    if (positions < 0).any() or (np.diff(positions)[~first[1:]] < 1).any():
        allowed = "positions >= 0 that ascend in each request"
        raise InvalidArgument(field="positions", given=positions.tolist(), allowed=allowed)
    return positions


def _checked_mask(given: Tensor, count: int) -> NDArray[np.bool_]:
    """Return ``valid_mask`` as bool."""
    if given.is_floating_point() or given.is_complex() or given.shape != (count,) or given.device.type != "cpu":
        raise InvalidArgument(field="valid_mask", given=given, allowed=f"bool or integers [{count}] on the CPU")
    mask: NDArray[np.bool_] = (given != 0).numpy()
    return mask


def _checked_counts(given: Tensor) -> list[int]:
    """Return the number of rows of each request."""
    if given.is_floating_point() or given.is_complex() or given.dim() != 1 or len(given) < 2 or given[0] != 0:
        raise InvalidArgument(field="query_start_loc", given=given, allowed="integers [R + 1], the first of them 0")
    starts = given.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    if min(counts) < 1:
        raise InvalidArgument(field="query_start_loc", given=starts, allowed="ascending: each request has a row")
    return counts
