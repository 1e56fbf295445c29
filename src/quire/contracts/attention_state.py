"""The attention verbs of a KV state. ``kv_state.AttentionKVCache`` is these, ``StoredRows`` and
``KVState``.

Letters and common rules (results, ``out=``, padding, errors) are in ``kv_state``. Further:

* The verbs need an open forward, except the two merges, ``set_cross_kv`` and the debug verbs.
  Layers may come in any order. A repeated call for a layer overwrites only its new rows.
* Sequence, tree, windows and mask decide which keys a query sees; batch, chunking, sharing, page
  size and kernel do not. Query head h reads KV head ``h // (Hq / Hkv)``.
* An *attention state* is ``(out, lse)``. ``lse`` is the natural log-sum-exp of the scores, float32
  ``[N, Hq]``. A query that sees no key has ``out = 0`` and ``lse = -inf``, always written. Softmax,
  sums and merges are computed in float32 or better.
* ``sm_scale=None`` means the scale of the layer's spec, or ``Dk ** -0.5`` if the spec has none.
  Soft caps, learned sinks and biases belong to the spec. Only the fused verb merges sinks.
* With RoPE mode ``normal`` or ``inline`` every verb takes raw q and k. With ``none`` it takes q and
  k in their final form.
* All raise ``FailedPrecondition`` (no open forward), ``InvalidArgument`` (``layer_id``, shapes,
  dtypes, devices) and ``Unsupported`` (a layer kind that the verb does not name).

Up to rounding, ``attention_with_fused_qkv`` equals ``append_kv`` then ``merge(self_attention,
cross_attention(scope="past"))``; it equals ``append_kv`` then ``cross_attention(scope="all")``. The
same holds for MLA with ``append_mla_kv``. Writes cost O(T). Reads cost O(visible keys); pages that
several entries share are read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from quire.base.types import SeqId

if TYPE_CHECKING:
    from torch import Tensor

AttentionScope: TypeAlias = Literal["past", "all"]
"""What ``cross_attention`` reads: rows from before this forward, or also rows appended in it."""


class StoredRows(Protocol):
    """Access to the stored rows of attention layers."""

    def set_cross_kv(self, layer_id: int, seq_id: SeqId, k: Tensor, v: Tensor) -> None:
        """(ours) Write encoder rows of a ``cross`` layer: k ``[S, Hkv, Dk]``, v ``[S, Hkv, Dv]``, S
        >= 1.

        Once per sequence and layer, inside or outside a forward; ``abort_forward`` leaves the rows.
        S may differ between layers. Forks share the rows and count as written. The rows are never
        popped, count in no length, and go with their last holder. A layer that is set after a fork
        is set on that side only; that side then copies the rows of its other layers once.
        ``FailedPrecondition``: written already; a sequence that is being imported.
        ``ResourceExhausted``: pages for encoder rows. O(S).
        """

    def debug_get_kv(
        self,
        seq_id: SeqId,
        start: int | None = 0,
        end: int | None = None,
        *,
        layer: int | None = None,
        relative: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return stored rows start..end-1 (mode ``normal``: rotated).

        K ``[L, n, Hkv, Dk]``, V ``[L, n, Hkv, Dv]``; with ``layer`` without L. ``start=None``: from
        the first row; ``end=None``: to the last. Addresses are positions; uncommitted nodes follow
        the committed tokens in order of appending. ``relative=True`` counts cached tokens (sink,
        then window), as TVM does. An empty range is legal. Inside a forward the rows are those from
        before it. For a cross ``layer`` the addresses are encoder rows 0..S-1, and ``relative``
        makes no difference.

        ``InvalidArgument``: not 0 <= start <= end <= length + nodes; layers of different geometry
        without ``layer``. ``FailedPrecondition``: evicted positions in the range (says which are
        held); a cross layer that is not set. ``Unsupported``: no layer with K and V of tokens.
        O(rows).
        """

    def debug_get_kv_mla(
        self,
        seq_id: SeqId,
        start: int | None = 0,
        end: int | None = None,
        *,
        layer: int | None = None,
        relative: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return latent rows as ``debug_get_kv``: ``[L, n, row]``; with ``layer`` without L."""

    def debug_set_kv(
        self, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None = None, *, layer: int | None = None
    ) -> None:
        """Overwrite rows start..start+n-1, laid out as ``debug_get_kv`` gives them.

        Latent layers: k ``[.., n, row]``, v None. Cross layers: only with ``layer``, on encoder
        rows that are set. Shared pages are split first, so no other sequence changes.
        ``debug_get_kv`` then returns these rows, and all else is as before.

        ``InvalidArgument``: beyond the length, shape, dtype. ``FailedPrecondition``: evicted,
        forward open. ``ResourceExhausted``: pages for the split. O(rows).
        """


class AttentionVerbs(Protocol):
    """Attention over stored and new tokens."""

    def attention_with_fused_qkv(
        self,
        layer_id: int,
        qkv: Tensor,
        *,
        sm_scale: float | None = None,
        mask: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotate, store K and V of the new tokens, attend over all visible tokens: ``[N, Hq, Dv]``.

        Layers ``full`` and ``window``. ``qkv``, in the model's dtype, is flat ``[N, Hq*Dk + Hkv*Dk
        + Hkv*Dv]``, or if Dk = Dv also ``[N, Hq + 2*Hkv, D]`` (Q, K, V heads). ``mask``: bool,
        flat, entry by entry row-major ``[n_i, length after]``, true = attend. Its columns are
        positions, then tree nodes in order of appending. It replaces the causal and tree rule
        (bidirectional image blocks); windows and eviction still apply.
        """

    def append_kv(self, layer_id: int, k: Tensor, v: Tensor) -> None:
        """(ours) Store new rows without attending: k ``[N, Hkv, Dk]``, v ``[N, Hkv, Dv]``. Layers
        ``full`` and ``window``. The slots then hold exactly these rows, rotated by mode."""

    def append_mla_kv(self, layer_id: int, kv: Tensor) -> None:
        """Store latent rows of new tokens without attending: ``[N, row]`` = ``[c_kv | k_pe]``.

        Layers ``latent``. The first Dv columns are the value (MLA, DeepSeek-V2, arXiv:2405.04434).
        """

    def self_attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sm_scale: float | None = None,
        mask: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over the new tokens of the same sequence only; store nothing.

        The causal or tree rule and all windows apply, or ``mask``: bool, flat, entry by entry
        row-major ``[n_i, n_i]``. q ``[N, Hq, dk]``, k ``[N, h, dk]``, v ``[N, h, dv]``; h divides
        Hq. dk, dv and h may differ from the layer's (expanded MLA: 192, 128, all heads). Returns
        ``(out [N, Hq, dv], lse [N, Hq])``.
        """

    def cross_attention(
        self,
        layer_id: int,
        q: Tensor,
        *,
        scope: AttentionScope = "past",
        sm_scale: float | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend over stored tokens; return ``(out [N, Hq, Dv], lse [N, Hq])``.

        ``scope="past"``: rows from before this forward; uncommitted nodes follow the tree rule.
        ``"all"``: also rows appended in this forward, by the causal or tree rule. q is
        ``[N, Hq, Dk]``; on ``latent`` layers it is the absorbed query ``[N, Hq, row]``. On
        ``cross`` layers the keys are all encoder rows of the sequence, for every token, tree node
        and scope. ``FailedPrecondition``: scope "all" before the layer's rows are appended; a
        ``cross`` layer without encoder rows (names layer and sequence).
        """

    def attention_with_shared_kv(
        self,
        source_layer_id: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sm_scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend over K and V of ``source_layer_id`` with that layer's window: ``[N, Hq, Dv]``.

        Stores nothing. K and V of the new tokens are the given ones (both or none), else the source
        layer's from this forward. ``FailedPrecondition``: neither given nor stored.
        """

    def merge_attn_output_inplace(self, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
        """Join two attention states over disjoint key sets into the first; return ``(o1, lse1)``.

        In float32, with m = max(lse1, lse2) and w_i = exp(lse_i - m):
        ``o1 = (w1*o1 + w2*o2) / (w1 + w2)``, ``lse1 = m + ln(w1 + w2)``. o is ``[N, Hq, Dv]``, lse
        float32 ``[N, Hq]``. ``(0, -inf)`` is the identity to the bit; two states with lse -inf give
        ``(0, -inf)``, never NaN. Commutative to the bit, associative up to rounding. Needs no
        forward; every layer kind.
        """

    def merge(self, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
        """Join as ``merge_attn_output_inplace``, into fresh tensors."""
