"""The open forward of a KV state: one pass over all of its parts, and the state that has it.

Letters: T new tokens; Hq, Hkv heads; K, V sizes of keys and values; C channels; W taps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.attention import ForwardPlan, Scoring
from quire.contracts.block_calls import AttentionParts, StackParts
from quire.contracts.model import LatentExpansion
from quire.contracts.rows import HeadNormWeights
from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.kv import latent
from quire.kv.attention_parts import ForwardPart, LayerPart, LayerParts
from quire.kv.attention_pass import AttentionPass
from quire.kv.encoders import EncoderPass
from quire.kv.forward_need import ForwardNeed
from quire.kv.parts import StateParts
from quire.kv.recurrent import Gates, RecurrentPass
from quire.kv.rules import RECURRENT_REFUSAL, layer_refusal
from quire.ops.attention import visible_keys, weight_sums


class StatePass(AttentionPass):
    """The open forward over layers of every kind (``contracts.model.Pass``)."""

    def __init__(self, parts: StateParts, need: ForwardNeed, recurrent: RecurrentPass | None) -> None:
        super().__init__(parts, need)
        self._recurrent = recurrent
        self._encoders: EncoderPass | None = None
        if parts.encoders is not None:
            self._encoders = EncoderPass(parts.encoders, need.seq_ids, self.batch, parts.backend)
        self._parts: dict[tuple[int, ...], ForwardPart] = {}
        """For calls over whole blocks, by the kind of layer."""

    def attention_parts(
        self, layer_id: int, norms: HeadNormWeights | None, dtype: torch.dtype
    ) -> AttentionParts | None:
        """See ``contracts.model.Pass``."""
        state = self._state
        if self.capturing or state.layer_parts is None or dtype != state.dtype:
            return None
        part = state.layer_parts.of(layer_id, norms)
        if part is None:
            return None
        self.require_open(layer_id)
        forward = self._forward_part(state.layer_parts, part)
        if forward.made is None:
            return None
        self.begin_write(layer_id)
        self.end_write(layer_id)
        return AttentionParts(part.made.place, forward.made.place)

    def stack_parts(
        self, layers: tuple[tuple[int, HeadNormWeights | None], ...], dtype: torch.dtype
    ) -> StackParts | None:
        """See ``contracts.model.OpenPass``."""
        known = self._state.layer_parts
        if self.awaited or self.capturing or known is None or dtype != self._state.dtype:
            return None
        self._require_current()
        stack = None if not self.are_decodes and self.chosen.rows is not None else known.stack(layers)
        if stack is None:
            return None
        if self.are_decodes and (parts := known.of_decodes(stack, self._need.lengths, self._tables)) is not None:
            self.written |= stack.ids
            return parts
        forwards = [self._forward_part(known, part).made for part in stack.kinds]
        if any(made is None for made in forwards):
            return None
        self.written |= stack.ids
        return StackParts(stack.places, np.array([made.place for made in forwards])[stack.kind])

    def _forward_part(self, known: LayerParts, part: LayerPart) -> ForwardPart:
        index, rope = part.layer.class_index, part.layer.turning
        made = (
            self.prepared("fused", index).made,
            None if rope is None else self._rotation(rope),
            self._running_slots[index],
        )
        forward = self._parts.get(part.kind)
        if forward is None or not forward.is_of(*made):
            forward = self._parts[part.kind] = known.in_forward(part, *made)
        return forward

    def rehearse(self, rows: NDArray[np.int64], asking: NDArray[np.int64], first_layer: int) -> Rehearsal:
        """See ``contracts.model.OpenPass``."""
        self.require_all_alike("rehearse")
        if any(self.batch.windows):
            raise Unsupported("rehearse: a sequence has a window of its own, whose sink is read at relative positions")
        for chosen in (rows, asking):
            self.chosen.check(chosen)
        if not (rows.size and np.isin(asking, rows, assume_unique=True).all()):
            raise InvalidArgument(
                field="asking", given=asking, allowed="a part of rows, of which there is at least one"
            )
        if self.chosen.rows is not None or self.written:
            raise FailedPrecondition("rehearse: the forward is narrowed, or a layer has run; rehearse before")
        return Rehearsal(self, rows, asking, first_layer)

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> Tensor:
        """See ``contracts.model.Pass``."""
        self._state.layer(layer_id, "append_mla_kv")
        self.require_open(layer_id)
        return latent.attend(self, self._state, layer_id, q_THD, rows_TR, expansion)

    def attend_cross(self, layer_id: int, q_THD: Tensor) -> Tensor:
        """See ``contracts.model.Pass``."""
        encoders = self.encoder_rows(layer_id, "attend_cross")
        out_THD = encoders.attend(layer_id, q_THD)
        if self.capturing:
            self.weights[layer_id] = encoders.weights(layer_id, q_THD)
        return out_THD

    def encoder_rows(self, layer_id: int, verb: str) -> EncoderPass:
        """Return this forward over a cross layer's encoder rows; ``Unsupported`` for others."""
        kind = self._state.spec(layer_id).kind
        if self._encoders is None or kind != "cross":
            raise Unsupported(f"{verb}: layer {layer_id} is of kind {kind!r}: {layer_refusal('set_cross_kv', kind)}")
        self.require_open(layer_id)
        return self._encoders

    def recurrent(self, verb: str) -> RecurrentPass:
        """Return this forward over the recurrent layers; ``Unsupported`` where there are none."""
        if self._recurrent is None:
            raise Unsupported(f"{verb}: {RECURRENT_REFUSAL}")
        return self._recurrent

    def linear_attention(
        self, layer_id: int, state_id: int, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, **options: Unpack[Gates]
    ) -> Tensor:
        """See ``contracts.model.Pass``."""
        recurrent = self.recurrent(f"linear_attention of layer {layer_id}")
        self.require_open(layer_id)
        return recurrent.linear_attention(layer_id, state_id, q_THK, k_THK, v_THV, **options)

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        """See ``contracts.model.Pass``."""
        recurrent = self.recurrent(f"convolve of layer {layer_id}")
        self.require_open(layer_id)
        return recurrent.convolve(layer_id, state_id, x_TC, weight_CW, bias_C)


class Rehearsal(StatePass):
    """Some rows of a forward alone (``contracts.model.RehearsalPass``).

    Letters: N keys that a query of an entry sees."""

    def __init__(
        self, forward: StatePass, rows: NDArray[np.int64], asking: NDArray[np.int64], first_layer: int
    ) -> None:
        parts, starts = forward._state, forward.batch.starts
        assert parts.table.forward is not None
        need = parts.table.forward.need
        entries = np.flatnonzero(np.diff(np.searchsorted(rows, starts)))
        some = replace(
            need,
            seq_ids=tuple(need.seq_ids[entry] for entry in entries),
            lengths=tuple(need.lengths[entry] for entry in entries),
            stored=tuple(need.stored[entry] for entry in entries),
            counts=tuple(need.counts[entry] for entry in entries),
            trees=tuple(need.trees[entry] for entry in entries),
            windows=tuple(need.windows[entry] for entry in entries),
        )
        super().__init__(parts, some, None)
        self._forward, self._first_layer, self._wait = forward, first_layer, forward._wait
        self._at = np.concatenate([np.arange(starts[entry], starts[entry + 1]) for entry in entries])
        """Where each of this pass's rows is among the forward's."""
        self._firsts = [int(starts[entry]) for entry in entries]
        """Where the rows of each entry begin there."""
        self.narrow(np.searchsorted(self._at, rows))
        self._asks = np.isin(rows, asking, assume_unique=True)
        """Of each row that runs: whether its attention is summed."""
        self.capturing = True
        self._seen: dict[int, list[tuple[Tensor, ...]]] = {}
        """By layer class, of each entry that asks: its n asking rows among those that run, the
        slots of the N keys, which of them each query sees ``[n, N]``, those of N that are new
        tokens, and which rows of the forward these are."""
        self.mass_T = torch.zeros(int(starts[-1]), device=parts.device)

    def _require_current(self) -> None:
        self._forward._require_current()

    def write_rows(self, layer_id: int, rows: NDArray[np.int64], k: Tensor, v: Tensor | None) -> None:
        """See ``contracts.model.OpenPass``; ``rows`` are the forward's."""
        self._forward.write_rows(layer_id, rows, k, v)

    def begin_write(self, layer_id: int) -> None:
        """Take what the forward was given as given, then check as it does."""
        self.chosen.give(layer_id, np.flatnonzero(self._forward.chosen.given(layer_id)[self._at]))
        super().begin_write(layer_id)

    def end_write(self, layer_id: int) -> None:
        """Note the layer as written. The forward needs these rows again: they lie in its places."""
        super().end_write(layer_id)
        again = self._at if self.chosen.rows is None else self._at[self.chosen.rows]
        self._forward.chosen.take_back(layer_id, again)

    def weigh(
        self,
        layer_id: int,
        plan: ForwardPlan,
        q_THD: Tensor,
        k_SHD: Tensor,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        sinks_H: Tensor | None = None,
    ) -> None:
        """Add the asking rows' weights to the masses."""
        if layer_id < self._first_layer:
            return
        for rows, slots_N, visible_nN, new, into in self._seen_by(self._state.layer(layer_id).class_index, plan):
            q_nHD, k_NHD = q_THD.index_select(0, rows), k_SHD.index_select(0, slots_N)
            sums_N = weight_sums(q_nHD, k_NHD, visible_nN, scoring, sinks_H)
            self.mass_T.index_add_(0, into, sums_N.index_select(0, new))

    def _seen_by(self, class_index: int, plan: ForwardPlan) -> list[tuple[Tensor, ...]]:
        """Return what the asking rows see in the layers of one class (``_seen``)."""
        if class_index in self._seen:
            return self._seen[class_index]
        found, size = self._seen.setdefault(class_index, []), plan.page_size
        for entry, table in enumerate(plan.tables):
            rows = int(plan.starts[entry]) + np.flatnonzero(self._asks[plan.starts[entry] : plan.starts[entry + 1]])
            if not rows.size:
                continue
            visible = visible_keys(plan, entry)[0][rows - plan.starts[entry]]
            seen = np.flatnonzero(visible.any(0))
            slots = table[seen // size].astype(np.int64) * size + seen % size
            new = np.flatnonzero(seen >= self.batch.stored[entry])
            into = self._firsts[entry] + seen[new] - int(self.batch.stored[entry])
            arrays = (rows, slots, visible[:, seen], new, into)
            found.append(tuple(torch.from_numpy(x).to(self._state.device) for x in arrays))
        return found


class OpenState(StateParts):
    """The parts of a state, and its forward while one is open."""

    current_pass: StatePass | None = None
    """The open forward."""

    def open_pass(self) -> StatePass:
        """Return the open forward; ``FailedPrecondition`` if there is none."""
        if self.current_pass is None:
            raise FailedPrecondition("no forward is open; call begin_forward first")
        return self.current_pass

    @property
    def open_tokens(self) -> int:
        """T of the open forward; 0 if there is none."""
        return 0 if self.current_pass is None else self.current_pass.batch.num_tokens

    def close_pass(self) -> None:
        """Let the pass of a finished forward refuse from now on: its slots may be taken."""
        if self.current_pass is not None:
            self.current_pass.is_open = False
            self.current_pass = None
