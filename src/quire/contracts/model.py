"""What a model is to whoever runs it, and what a forward is to a model.

A model is ``embed``, a list of ``blocks``, ``head``. The runner owns the loop over blocks, so pipeline
stages and tracing need no hook inside. A model knows no KV state: its blocks see a ``Pass``.

Letters: T new tokens of the whole ragged batch, R rows for which logits are wanted, E model width, V vocabulary,
Hq, Hkv query and KV heads, D, Dk, Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.layers import LayerSpec


class Pass(Protocol):
    """One forward over a ragged batch, as the blocks see it."""

    @property
    def positions_T(self) -> Tensor:
        """int32 ``[T]``: the true position of each new token in its sequence."""
        ...

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        """Store K and V of the new tokens, attend over all that each may see.

        ``q [T, Hq, Dk]``, ``k [T, Hkv, Dk]``, ``v [T, Hkv, Dv]`` in the model's dtype, *before* RoPE: the state
        rotates as the layer's spec says. Returns ``[T, Hq, Dv]``, contiguous, fresh.
        """
        ...

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor) -> Tensor:
        """The same for a fused projection ``[T, Hq*Dk + Hkv*Dk + Hkv*Dv]``; cheaper where nothing comes between."""
        ...

    def attend_shared(self, source_layer_id: int, q_THD: Tensor) -> Tensor:
        """Attention of a layer that has no K and V of its own over those of ``source_layer_id``, which must have run in
        this forward. Stores nothing; window and rotation are the source's.

        ``q [T, Hq, Dk]`` before RoPE, as ``attend`` takes it. Returns ``[T, Hq, Dv]``, contiguous, fresh.
        """
        ...

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> Tensor:
        """Store the latent rows of the new tokens, attend over all that each may see (MLA, arXiv:2405.04434).

        ``q [T, Hq, Dn + Dr]`` and ``rows [T, R + Dr]`` (``[c_kv | k_pe]``), both *before* RoPE, which turns their last Dr columns
        as the layer's spec says. Returns ``[T, Hq, Dv]``, contiguous, fresh. Tokens of one forward attend to each other in expanded
        form, to what was stored before, and in decodes, in absorbed form.
        """
        ...

    def attend_cross(self, layer_id: int, q_THD: Tensor) -> Tensor:
        """Attend over all rows of the encoder of each token's sequence, which were set beforehand (``set_cross_kv``). Stores
        nothing; order, trees and windows do not matter.

        ``q [T, Hq, Dk]``. Returns ``[T, Hq, Dv]``, contiguous, fresh. ``FailedPrecondition``: a sequence has no rows of the layer.
        """
        ...

    def linear_attention(
        self,
        layer_id: int,
        state_id: int,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        *,
        scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta_TH: Tensor | None = None,
    ) -> Tensor:
        """Read a state ``[H, K, V]`` of a recurrent layer, run the recurrence over the new tokens, leave the new state:
        ``[T, Hq, V]``. See ``contracts.recurrence.RecurrenceBackend``."""
        ...

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        """The causal depthwise convolution with a state ``[W - 1, C]`` of a recurrent layer: ``[T, C]``. See
        ``contracts.recurrence.RecurrenceBackend``."""
        ...


class OpenPass(Pass, Protocol):
    """A pass, and what a runner asks of it before and after the blocks run."""

    @property
    def weights(self) -> Mapping[int, Sequence[Tensor]]:
        """By layer, per entry float32 ``[Hq, n, keys]``, of what ran after ``capture_weights``."""
        ...

    def use_mask(self, mask: Tensor) -> None:
        """Use one mask in all layers: flat bool, per entry ``[n, keys]``, keys by address."""
        ...

    def use_positions(self, positions: NDArray[np.int64]) -> None:
        """Rotate the new tokens at these ``[T]`` and not at their indices, before layers run."""
        ...

    def capture_weights(self) -> None:
        """Keep the attention weights of every layer from now on."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LatentExpansion:
    """What turns a latent ``c_kv`` into keys and values of each head."""

    key_HDR: Tensor
    """``[Hq, Dn, R]``: ``k_nope = key c_kv``."""
    value_HRV: Tensor
    """``[Hq, R, Dv]``: ``v = c_kv value``."""


class Block(Protocol):
    """One layer of a model."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor: ...


class Model(Protocol):
    """A decoder. Weights only; no state survives a call."""

    architecture: str
    """Its name in ``config.json``, for example ``LlamaForCausalLM``."""
    vocab_size: int
    max_position: int
    """Context length: positions run from 0 to ``max_position - 1``."""
    hidden_size: int
    layer_specs: Sequence[LayerSpec]
    """One per layer, by global layer id."""
    blocks: Sequence[Block]

    def embed(self, tokens_T: Tensor) -> Tensor:
        """int64 ``[T]`` to ``[T, E]``."""
        ...

    def head(self, x_RE: Tensor) -> Tensor:
        """``[R, E]`` to float32 logits ``[R, V]``; includes the final norm."""
        ...
