"""The interface between a model and its runner: a model's parts, and the pass of a forward.

A model is ``embed``, a list of ``blocks``, ``head``. The runner owns the loop over blocks, so
pipeline stages and tracing need no hook inside. A model knows no KV state; blocks see a ``Pass``.

Letters: T new tokens of the whole ragged batch, R rows for which logits are wanted, E model width,
V vocabulary, Hq, Hkv query and KV heads, D, Dk, Dv head sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.block_calls import AttentionParts, RowLogits, StackParts
from quire.contracts.layers import LayerSpec
from quire.contracts.linear import HeadMap
from quire.contracts.ranks import Stages
from quire.contracts.recurrence import RecurrentParts
from quire.contracts.rows import HeadNormWeights


class Pass(Protocol):
    """One forward over a ragged batch, as the blocks see it."""

    @property
    def positions_T(self) -> Tensor:
        """int32 ``[T]``: the true position of each new token that runs, in its sequence."""

    @property
    def places_T(self) -> Tensor:
        """int64 ``[T]``: the position at which each new token is rotated: its true one, or that of
        ``use_positions``."""

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        """Store K and V of the new tokens, attend over all tokens visible to each.

        ``q [T, Hq, Dk]``, ``k [T, Hkv, Dk]``, ``v [T, Hkv, Dv]`` in the model's dtype, *before*
        RoPE: the state rotates by the layer's spec. Returns ``[T, Hq, Dv]``, contiguous, fresh.
        """

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor, norms: HeadNormWeights | None = None) -> Tensor:
        """Attend with a fused projection ``[T, Hq*Dk + Hkv*Dk + Hkv*Dv]``; cheaper than ``attend``.
        With ``norms`` the query and key heads are normed first."""

    def attention_parts(
        self, layer_id: int, norms: HeadNormWeights | None, dtype: torch.dtype
    ) -> AttentionParts | None:
        """Return the inputs for a call over a whole block of activations of this dtype, in place of
        ``attend_qkv``, and count the layer's rows as written; None if ``attend_qkv`` is the only
        way. Call it before every such call."""

    def attend_shared(self, source_layer_id: int, q_THD: Tensor) -> Tensor:
        """Attend over K and V of ``source_layer_id``, for a layer without its own; store nothing.

        The source must have run in this forward; window and rotation are the source's.
        ``q [T, Hq, Dk]`` before RoPE, as in ``attend``. Returns ``[T, Hq, Dv]``, contiguous, fresh.
        """

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> Tensor:
        """Store latent rows of the new tokens, attend over all visible tokens (MLA,
        arXiv:2405.04434).

        ``q [T, Hq, Dn + Dr]`` and ``rows [T, R + Dr]`` (``[c_kv | k_pe]``) are given *before* RoPE,
        which rotates their last Dr columns by the layer's spec. Returns ``[T, Hq, Dv]``,
        contiguous, fresh. Tokens of one forward attend to each other in expanded form, to stored
        rows and in decodes in absorbed form.
        """

    def attend_cross(self, layer_id: int, q_THD: Tensor) -> Tensor:
        """Attend over all encoder rows of each token's sequence; store nothing. The rows are set by
        ``set_cross_kv``. Order, trees and windows do not matter. ``q [T, Hq, Dk]``. Returns ``[T,
        Hq, Dv]``, contiguous, fresh. ``FailedPrecondition``: no such rows."""

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
        """Run the recurrence from a state ``[H, K, V]`` over the new tokens, store the new state,
        return ``[T, Hq, V]``. See ``contracts.recurrence.RecurrenceBackend``."""

    def convolve(
        self, layer_id: int, state_id: int, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None
    ) -> Tensor:
        """Run the causal depthwise convolution with a state ``[W - 1, C]`` of a recurrent layer:
        ``[T, C]``. See ``contracts.recurrence.RecurrenceBackend``."""

    def recurrent_parts(self, layer_id: int) -> RecurrentParts | None:
        """Return the inputs for a call over a whole recurrent layer, in place of ``convolve`` and
        ``linear_attention``, and count the layer's states as written; None if these are the only
        way. Call it before every such call."""


class OpenPass(Pass, Protocol):
    """A pass, with verbs for a runner before and after the blocks run."""

    @property
    def weights(self) -> Mapping[int, Sequence[Tensor]]:
        """Attention weights by layer, per entry float32 ``[Hq, n, keys]``, since
        ``capture_weights``."""

    def stack_parts(
        self,
        layers: tuple[tuple[int, HeadNormWeights | None], ...],
        dtype: torch.dtype,
        recurrent: tuple[int, ...] = (),
    ) -> StackParts | None:
        """Return ``attention_parts`` of ``layers`` and ``recurrent_parts`` of recurrent ones, which
        run with nothing in between; None if a layer has none, or may have to be waited for, or if
        rows were left out. Models pass the same tuples in each forward, for which constant results
        are cached."""

    def use_mask(self, mask: Tensor) -> None:
        """Use one mask in all layers: flat bool, per entry ``[n, keys]``, columns by address."""

    def use_positions(self, positions: NDArray[np.int64]) -> None:
        """Rotate new tokens at positions ``[T]``, not their indices; call before any layer."""

    def capture_weights(self, layers: frozenset[int] | None = None) -> None:
        """Keep the attention weights of these layers (None: all layers) from now on."""

    def narrow(self, rows: NDArray[np.int64]) -> None:
        """Let only these of the T new tokens continue; they are the T of the verbs above from now
        on.

        ``rows``: indices into the forward's new tokens, ascending, some of each entry; after an
        earlier call a subset of its rows. A query still sees all keys up to its own position. Rows
        that are left out must be given to each layer that runs later (``write_rows``).

        ``InvalidArgument``: other rows. ``Unsupported``: a token tree, a mask, positions or
        captured weights of the caller's, cross and recurrent layers, keys that are rotated when
        read. None of these can follow either, nor attention over new tokens alone
        (``self_attention``). ``FailedPrecondition``: the forward is over.
        """

    def rehearse(self, rows: NDArray[np.int64], asking: NDArray[np.int64], first_layer: int) -> RehearsalPass:
        """Return a pass of some of the forward's new tokens alone, to run before the first layer
        does.

        Its stored rows are not rows of the forward: each layer needs these rows again. ``rows``:
        indices into the forward's new tokens, ascending; entries without any do not run. The other
        rows of these entries must be given to each layer before it runs (``write_rows`` of this
        pass), and stay given. ``asking``: those of ``rows`` whose attention is summed, in layers
        ``first_layer`` and later.

        ``InvalidArgument``: other rows. ``Unsupported``: as for ``narrow``, and a sequence with a
        window of its own. ``FailedPrecondition``: the forward is over or narrowed, or a layer has
        run.
        """

    def write_rows(self, layer_id: int, rows: NDArray[np.int64], k: Tensor, v: Tensor | None) -> None:
        """Store rows of new tokens for a layer that has not run yet; it then need not compute them.

        ``rows``: as for ``narrow``, any of the forward's new tokens. ``k [n, Hkv, Dk]``, rotated at
        its positions, and ``v [n, Hkv, Dv]`` have the state's dtype. For a latent layer k is the
        whole row, ``[n, R + Dr]``, and v None. Rows that run are overwritten. A layer that lacks
        some of the rows that were left out does not run: ``FailedPrecondition``.
        ``InvalidArgument``: other rows or tensors. ``FailedPrecondition``: the layer has run, or
        the forward is over.
        """

    def turn(self, layer_id: int, x_THD: Tensor) -> Tensor:
        """Return queries or keys of the new tokens that run, rotated as in the layer. ``x [T, H,
        D]``; in a latent layer the last columns rotate."""

    def wait_for_layers(self, wait: Callable[[int], None]) -> None:
        """Call ``wait`` with the id of each layer that is reached before an import has completed it
        (``KVState.publish_import``). It returns once the layer is complete, or raises."""


class RehearsalPass(Pass, Protocol):
    """A pass of some rows of a forward, before it."""

    @property
    def mass_T(self) -> Tensor:
        """float32 ``[T]``: the attention from the asking rows to each of the forward's new tokens,
        summed over rows, heads and the layers that have run."""


class AbsorbingMaps(NamedTuple):
    """Maps of a latent layer in absorbed form, packed."""

    queries: HeadMap
    """Dn to R: ``q key``."""
    values: HeadMap
    """R to Dv: ``out value``."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentExpansion:
    """Maps a latent ``c_kv`` to keys and values of each head."""

    key_HDR: Tensor
    """``[Hq, Dn, R]``: ``k_nope = key c_kv``."""
    value_HRV: Tensor
    """``[Hq, R, Dv]``: ``v = c_kv value``."""
    absorbing: AbsorbingMaps | None = None
    """The maps of the absorbed form, packed. With these a decode is the same to the bit in any
    batch. None: PyTorch multiplies."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in (self.key_HDR, self.value_HRV, *(self.absorbing or ())))


class Block(Protocol):
    """One layer of a model."""

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor: ...


class JoinedBlocks(Protocol):
    """All blocks of a model as one call."""

    def outputs(
        self, blocks: Sequence[Block], x_TE: Tensor, pass_: OpenPass, wanted: Sequence[int]
    ) -> list[Tensor] | None:
        """Return the outputs of some blocks, ascending, the last block's among them, the same to
        the bit as of the blocks one after the other; None if they must be called one by one, for
        example because a block in the list was replaced. For forwards in which no adapter is
        active."""

    def run_model(self, model: Model, tokens: NDArray[np.int64], pass_: OpenPass) -> RowLogits | None:
        """Return the result of ``embed``, the blocks and ``head`` of their model, likewise. There
        must be no extra step in between, and no placeholders."""


class WideRows(Protocol):
    """Rows of some models' blocks. They have further columns beside the residual stream (other
    streams, inputs of layers), or a factor that embeddings of a caller lack."""

    def entering(self, given_RE: Tensor) -> Tensor:
        """Map embeddings of a caller ``[R, E]`` to fresh rows."""

    def visible(self, x_TW: Tensor) -> Tensor:
        """Map rows to the residual stream ``[T, E]``."""


class Model(Protocol):
    """A decoder. Weights only; no state survives a call."""

    architecture: str
    """Its name in ``config.json``, for example ``LlamaForCausalLM``."""
    vocab_size: int
    max_position: int
    """Context length: positions run from 0 to ``max_position - 1``."""
    hidden_size: int
    layer_specs: Sequence[LayerSpec]
    """One for each layer, by global layer id."""
    blocks: Sequence[Block]
    """Those that are here; see ``stages_of``."""

    @property
    def wide(self) -> WideRows | None:
        """None: the rows of the blocks are ``hidden_size`` wide, and embeddings of a caller enter
        as they are."""

    @property
    def stack(self) -> JoinedBlocks | None:
        """The blocks as one call; None if the machine's kernels have no such call."""

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Embed int64 ``[T]`` as ``[T, E]``."""

    def head(self, x_RE: Tensor) -> Tensor:
        """Return float32 logits ``[R, V]`` of ``[R, E]``; includes the final norm."""


def stages_of(model: Model) -> Stages | None:
    """Return the stages of a model of which a part of the blocks is here; None: all are."""
    found: Stages | None = getattr(model, "stages", None)
    return found


def num_blocks(model: Model) -> int:
    """Return the number of a model's blocks in all stages."""
    stages = stages_of(model)
    return len(model.blocks) if stages is None else stages.num_blocks
