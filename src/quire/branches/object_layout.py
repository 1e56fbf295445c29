"""``ObjectLayout``: the tensors of a KV state in stored objects.

An object is a run, the rows of consecutive tokens, or a stop, the further state that a continuation
at one position needs (rows of windows, recurrent states).

Letters: n tokens of a run; p the position of a stop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from quire.base.types import SeqId
from quire.contracts.kv_state import Export, ModelState, TensorPlan
from quire.contracts.layers import CrossAttention
from quire.contracts.store import ObjectKind
from quire.store.keys import CHUNK, Chain, StoredPiece
from quire.store.objects import tensor_name


class ObjectLayout:
    """The layers and tensors of one KV state, by kind of object."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        geometry = state.geometry
        self.chunk = max(CHUNK, state.page_size)
        """Tokens of a full run."""
        self.chunk -= self.chunk % state.page_size
        windows = {layer: state.layer_spec(layer).layer_window for layer in geometry.layer_ids}  # type: ignore[union-attr]
        self.row_layers = tuple(layer for layer, window in windows.items() if window is None)
        """Layers that keep all tokens."""
        self.window_layers = tuple(layer for layer, window in windows.items() if window is not None)
        self.recurrent_layers = state.recurrent_ids
        self.has_stops = bool(self.window_layers or self.recurrent_layers)
        """Whether a continuation needs more than rows, that is a stop."""
        self.layers = tuple(sorted({*windows, *self.recurrent_layers}))
        self._one = state.plan_import(state.import_metadata(1))
        """Tensors of one token."""
        row_bytes = {
            layer: sum(math.prod(one.shape[1:]) * one.dtype.itemsize for one in self._one[layer].values())
            for layer in windows
        }
        self.row_bytes = sum(row_bytes[layer] for layer in self.row_layers)
        """Bytes of one token in all layers that keep all tokens."""
        self._window_bytes = {layer: row_bytes[layer] for layer in self.window_layers}
        self._seen = {layer: window - 1 for layer, window in windows.items() if window is not None}
        """Number of tokens before a position that a windowed layer sees from there on."""
        kinds = [state.layer_spec(layer) for layer in self.layers]
        self.refusal = ""
        """Reason why the state is no function of tokens; empty: it is one."""
        if any(isinstance(spec, CrossAttention) for spec in kinds) or len(kinds) < len(state.get_layout()["layers"]):
            self.refusal = "cross layers keep what an encoder read, which tokens do not tell"

    def plan(self, kind: ObjectKind, n: int, layer: int) -> dict[str, TensorPlan]:
        """Return a layer's tensors in a run of ``n`` tokens, or in a stop at ``n``."""
        one = self._one[layer]
        if layer in self.recurrent_layers:
            return one
        rows = n - self.window_start(layer, n) if kind is ObjectKind.STOP else n
        return {name: TensorPlan((rows, *plan.shape[1:]), plan.dtype) for name, plan in one.items()}

    def layers_of(self, kind: ObjectKind) -> tuple[int, ...]:
        """Return the layers of a run, or of a stop."""
        return self.row_layers if kind is ObjectKind.ROWS else (*self.window_layers, *self.recurrent_layers)

    def window_start(self, layer: int, p: int) -> int:
        """Return the first token of a windowed layer in a stop at ``p``."""
        return max(0, p - self._seen[layer])

    def stops(self, seq: SeqId, *, again: bool = False) -> list[int]:
        """Return the positions of a sequence at which a stop can be made, ascending. ``again``:
        also before its last token, if no layer is recurrent."""
        state, length = self._state, self._state.sequence_length(seq)
        wanted = {*state.checkpoints(seq), length} if self.recurrent_layers else {length - again, length}
        return sorted(p for p in wanted if p and state.nearest_reachable(seq, p) == p)

    def pieces(self, seq: SeqId, chain: Chain, *, again: bool, whole: bool) -> list[StoredPiece]:
        """Return the objects of a sequence; ``whole``: a single one. ``again``: as for
        ``stops``."""
        length = len(chain.ids)
        if whole:
            return [StoredPiece(chain.stop(length), length, length)]
        found: list[StoredPiece] = []
        for start in range(0, length, chain.chunk) if self.row_layers else ():
            end = min(start + chain.chunk, length)
            found.append(StoredPiece(chain.rows(start, end), start, end))
        if self.has_stops:
            found += [StoredPiece(chain.stop(p), p, p) for p in self.stops(seq, again=again)]
        return found

    def nbytes(self, start: int, stop: int) -> int:
        """Return the bytes of a run, or of a stop if ``start == stop``."""
        if start < stop:
            return (stop - start) * self.row_bytes
        windows = sum(
            self._window_bytes[layer] * (stop - self.window_start(layer, stop)) for layer in self.window_layers
        )
        return self._state.geometry.state_bytes + windows

    def rows(self, export: Export, start: int, stop: int) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the rows of tokens ``start..stop - 1``, reading each on
        demand."""
        for layer in self.row_layers:
            for name, tensor in export.rows(layer, start, stop).items():
                yield tensor_name(layer, name), tensor

    def whole(self, export: Export, plan: Mapping[int, Mapping[str, TensorPlan]]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of a whole sequence, reading each on demand. ``plan``: of
        ``plan_import``."""
        for layer, group in plan.items():
            rows = {} if layer in self.recurrent_layers else export.held_rows(layer)
            for name in group:
                state, _, position = name.partition("@")
                tensor = rows[name] if rows else export.states(layer, int(position or export.length))[state]
                yield tensor_name(layer, name), tensor

    def stop(self, export: Export, p: int) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of a stop at ``p``, reading each on demand."""
        for layer in self.window_layers:
            for name, tensor in export.rows(layer, self.window_start(layer, p), p).items():
                yield tensor_name(layer, name), tensor
        for layer in self.recurrent_layers:
            for name, tensor in export.states(layer, p).items():
                yield tensor_name(layer, name), tensor
