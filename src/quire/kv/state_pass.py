"""The open forward of a KV state: one pass over all of its parts, and the state that has it.

Letters: T new tokens; Hq, Hkv heads; K, V sizes of keys and values; C channels; W taps.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from quire.contracts.model import LatentExpansion
from quire.errors import FailedPrecondition, Unsupported
from quire.kv import latent
from quire.kv.attention_pass import AttentionPass
from quire.kv.encoders import EncoderPass
from quire.kv.forward_need import ForwardNeed
from quire.kv.parts import StateParts
from quire.kv.recurrent import Gates, RecurrentPass
from quire.kv.rules import RECURRENT_REFUSAL, layer_refusal


class StatePass(AttentionPass):
    """The open forward over layers of every kind (``contracts.model.Pass``)."""

    def __init__(self, parts: StateParts, need: ForwardNeed, recurrent: RecurrentPass | None) -> None:
        super().__init__(parts, need)
        self._recurrent = recurrent
        self._encoders: EncoderPass | None = None
        if parts.encoders is not None:
            self._encoders = EncoderPass(parts.encoders, need.seq_ids, self.batch, parts.backend)

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
