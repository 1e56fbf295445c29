"""The attention verbs of a KV state. ``kv_state.AttentionKVCache`` is these and ``KVState``.

Letters and the rules for every verb (results, ``out=``, padding, errors) are in ``kv_state``. Further:

* The verbs need an open forward, except the two merges, ``set_cross_kv`` and the debug verbs. Layers may come in
  any order; a repeated call for a layer overwrites that layer's new rows and nothing else.
* What a query sees is decided by sequence, tree, windows and mask, never by batch, chunking, sharing, page size
  or kernel. Query head h reads KV head ``h // (Hq / Hkv)``.
* An *attention state* is ``(out, lse)``. ``lse`` is the natural log-sum-exp of the scores, float32 ``[N, Hq]``. A
  query that sees no key has ``out = 0`` and ``lse = -inf``, always written. Softmax, sums and merges are
  computed in float32 or better.
* ``sm_scale=None`` is the scale of the layer's spec, ``Dk ** -0.5`` if it names none. Soft caps, learned sinks and
  position biases belong to the spec; a learned sink is merged once, by the fused verb only.
* RoPE modes ``normal`` and ``inline`` take raw q and k in every verb; ``none`` takes them as they shall be used.
* All refuse: ``FailedPrecondition`` (no open forward), ``InvalidArgument`` (``layer_id``, shapes, dtypes, devices),
  ``Unsupported`` (a layer kind that the verb does not name).

Up to rounding, ``attention_with_fused_qkv`` = ``append_kv``, then ``merge(self_attention,
cross_attention(scope="past"))`` = ``append_kv``, then ``cross_attention(scope="all")``; the same holds for MLA with
``append_mla_kv``. Writes cost O(T), reads O(visible keys), pages that several entries share once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from quire.types import SeqId

if TYPE_CHECKING:
    from torch import Tensor

AttentionScope: TypeAlias = Literal["past", "all"]
"""What ``cross_attention`` reads: what was there before this forward, or also the rows appended in it."""


class AttentionVerbs(Protocol):
    """Attention over stored and new tokens, its parts, and reading and writing what is stored."""

    def attention_with_fused_qkv(
        self,
        layer_id: int,
        qkv: Tensor,
        *,
        sm_scale: float | None = None,
        mask: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rotate, store K and V of the new tokens, attend over all they may see: ``[N, Hq, Dv]``.

        Layers ``full`` and ``window``. ``qkv``, in the model's dtype, is ``[N, Hq + 2*Hkv, D]`` (Q, K, V heads)
        if Dk = Dv, or flat ``[N, Hq*Dk + Hkv*Dk + Hkv*Dv]`` always. ``mask``: bool, flat, entry by entry row-major
        ``[n_i, length after]``, true = attend; columns are positions, then tree nodes in order of appending. It
        replaces the causal and tree rule (bidirectional image blocks); windows and eviction still apply.
        """

    def append_kv(self, layer_id: int, k: Tensor, v: Tensor) -> None:
        """(ours) Store new rows without attending: k ``[N, Hkv, Dk]``, v ``[N, Hkv, Dv]``.

        Layers ``full`` and ``window``. Afterwards the slots hold exactly these rows, rotated as the mode says.
        """

    def append_mla_kv(self, layer_id: int, kv: Tensor) -> None:
        """Store one latent row per new token, kv ``[N, row]`` = ``[c_kv | k_pe]``, without attending.

        Layers ``latent``; the first Dv columns of a row are its value (MLA, DeepSeek-V2, arXiv:2405.04434).
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
        """The new tokens over the new tokens of the same sequence only; stores nothing.

        Causal or tree rule and all windows, or ``mask``: bool, flat, entry by entry row-major ``[n_i, n_i]``. q
        ``[N, Hq, dk]``, k ``[N, h, dk]``, v ``[N, h, dv]``; h divides Hq; dk, dv and h may differ from the layer's
        (expanded MLA: 192, 128, all heads). Returns ``(out [N, Hq, dv], lse [N, Hq])``.
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
        """The new tokens over stored tokens: ``(out [N, Hq, Dv], lse [N, Hq])``.

        ``scope="past"``: what was there before this forward, uncommitted nodes by the tree rule. ``"all"``: also
        the rows already appended in this forward, by the causal or tree rule. q ``[N, Hq, Dk]``; on ``latent``
        layers the absorbed query ``[N, Hq, row]``. On ``cross`` layers the keys are all rows of the encoder of each
        sequence, for every token and tree node; no row of it is a new token's, so both scopes are the same there.
        ``FailedPrecondition``: scope "all" before the layer's rows are appended; a ``cross`` layer whose encoder rows
        were not set (names layer and sequence).
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
        """Attention of another layer over K and V of ``source_layer_id``, with that layer's window: ``[N, Hq, Dv]``.

        Stores nothing. K and V of the new tokens are those given (both or none), or else those that the source
        layer stored in this forward. ``FailedPrecondition``: neither given nor stored.
        """

    def merge_attn_output_inplace(self, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
        """Join two attention states over disjoint key sets into the first; return ``(o1, lse1)``.

        m = max(lse1, lse2), w_i = exp(lse_i - m), ``o1 = (w1*o1 + w2*o2) / (w1 + w2)``, ``lse1 = m + ln(w1 + w2)``,
        in float32. o ``[N, Hq, Dv]``, lse float32 ``[N, Hq]``. Identity ``(0, -inf)``, to the bit; both -inf give
        ``(0, -inf)``, never NaN; commutative to the bit, associative up to rounding. Needs no forward; every layer
        kind.
        """

    def merge(self, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
        """``merge_attn_output_inplace`` into fresh tensors; its arguments stay as they are."""

    def set_cross_kv(self, layer_id: int, seq_id: SeqId, k: Tensor, v: Tensor) -> None:
        """(ours) Write the encoder's k ``[S, Hkv, Dk]`` and v ``[S, Hkv, Dv]`` of a ``cross`` layer, S >= 1.

        Once per sequence and layer, inside or outside a forward, whose ``abort_forward`` leaves them; S may differ
        between layers. Shared by forks, whose layers count as written too, never popped, counted in no length; gone
        with the last holder. A layer that is set after a fork is set on that side only, for which the rows of the
        other layers are copied once. ``FailedPrecondition``: written already; a sequence that is being
        imported. ``ResourceExhausted``: pages for encoder rows. O(S).
        """

    def debug_get_kv(
        self,
        seq_id: SeqId,
        start: int = 0,
        end: int | None = None,
        *,
        layer: int | None = None,
        relative: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rows start..end-1 as stored (mode ``normal``: rotated): K ``[L, n, Hkv, Dk]``, V ``[L, n, Hkv, Dv]``.

        Without L for one ``layer``. ``end=None``: all. Addresses are positions; uncommitted nodes follow the
        committed tokens in order of appending. ``relative=True`` counts cached tokens (sink, then window), as TVM
        does. An empty range is legal; inside a forward the rows are those before it. With ``layer`` a cross layer the
        addresses are rows 0..S-1 of the encoder, and ``relative`` makes no difference.

        ``InvalidArgument``: not 0 <= start <= end <= length + nodes; layers of different geometry without
        ``layer``. ``FailedPrecondition``: evicted positions in the range (says which are held); a cross layer that is
        not set. ``Unsupported``: no layer with K and V of tokens. O(rows).
        """

    def debug_get_kv_mla(
        self,
        seq_id: SeqId,
        start: int = 0,
        end: int | None = None,
        *,
        layer: int | None = None,
        relative: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """``debug_get_kv`` for latent layers: ``[L, n, row]``, without L for one ``layer``."""

    def debug_set_kv(
        self, seq_id: SeqId, start: int, k: Tensor, v: Tensor | None = None, *, layer: int | None = None
    ) -> None:
        """Overwrite rows start..start+n-1, laid out as ``debug_get_kv`` gives them.

        Latent layers: k ``[.., n, row]``, v None. Cross layers: with ``layer``, rows of the encoder that are set. Shared
        pages are split first, so no other sequence changes; then
        ``debug_get_kv`` returns these rows and all else is as before.

        ``InvalidArgument``: beyond the length, shape, dtype. ``FailedPrecondition``: evicted, forward open.
        ``ResourceExhausted``: pages for the split. O(rows).
        """
