"""The recurrent verbs of a KV state. ``kv_state.RNNState`` is these, ``StoredStates``
and ``KVState``.

A recurrent layer has any number of state tensors with fixed shapes, dtypes and initial values. One
published state of a sequence is a page: immutable, shared by forks. Some are *kept* for rewinds:
position 0 always; checkpoints (``KVState.checkpoint``, or every ``checkpoint_interval`` tokens);
and a ring of the states published just before the present one.

Letters and the rules for every verb are in ``kv_state``. All verbs raise ``InvalidArgument``
(``layer_id``, ``state_id``, shape, dtype) and ``Unsupported`` (not a recurrent layer); ``get``,
``set`` and ``linear_attention`` also ``FailedPrecondition`` (no open forward).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.base.types import SeqId

if TYPE_CHECKING:
    from torch import Tensor


class StoredStates(Protocol):
    """Access to the stored states of recurrent layers."""

    def debug_get(self, layer_id: int, state_id: int, seq_id: SeqId, *, position: int | None = None) -> Tensor:
        """Return a copy ``[*shape]`` of the published state, or of the one kept at ``position``.
        Legal at any time. ``FailedPrecondition``: no state is kept there. Cost: one state."""

    def debug_set(self, layer_id: int, state_id: int, seq_id: SeqId, data: Tensor) -> None:
        """(ours) Replace the present state of this sequence only; forks and kept states do not
        change. ``data`` is ``[*shape]``. ``FailedPrecondition``: open forward.
        ``ResourceExhausted``: a page for the new state. Cost: one state."""


class RecurrentVerbs(Protocol):
    """Recurrent state: read and written in a forward."""

    def get(self, layer_id: int, state_id: int, *, per_token: bool = False, out: Tensor | None = None) -> Tensor:
        """Return the state *before* this forward, ``[B, *shape]``, even after a ``set`` in it.

        ``per_token=True``: ``[T, *shape]``, for each row the state of its predecessor or tree
        parent if that lies before this forward, else 0 for the layer to compute. Cost: one read of
        the rows.
        """

    def set(self, layer_id: int, state_id: int, data: Tensor, *, per_token: bool = False) -> None:
        """Set the state after each entry's last token ``[B, *shape]``, or each token
        ``[T, *shape]``.

        ``per_token=True`` fills the ring with the last states of the chunk and keeps a checkpoint
        that the chunk passes. The last call wins; ``end_forward`` publishes; a layer without
        ``set`` keeps its state. ``InvalidArgument``: a token tree in the batch without
        ``per_token``. Cost: one write of those rows.
        """

    def linear_attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sm_scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run ``get``, the gated linear or delta rule, and ``set`` in one: ``[N, Hq, Dv]``.

        The layer's state 0 is S ``[Hkv, Dk, Dv]``, float32. q ``[N, Hq, Dk]``, k ``[N, Hkv, Dk]``,
        v ``[N, Hkv, Dv]``, ``log_decay`` <= 0 ``[N, Hkv]`` or ``[N, Hkv, Dk]``, ``beta``
        ``[N, Hkv]``. For each token, from the state of its predecessor or tree parent:
        ``S = exp(log_decay) * S``; ``u = v``, or with beta the delta rule
        ``u = beta * (v - S^T k)`` (DeltaNet, arXiv:2406.06484; gated, arXiv:2412.06464);
        ``S = S + k u^T``; ``out = sm_scale * S^T q``. Trees, ring and checkpoints work.
        Chunk-parallel kernels equal it up to rounding.
        """
