"""The attention verbs of the contract (``contracts.attention_state``) over the open forward of a
state: checks, padding, ``out=``.

Letters: T new tokens; N >= T rows of a padded tensor; n tokens of an entry; Hq, Hkv heads; Dk, Dv
sizes.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.contracts.attention import AttentionState, Scoring
from quire.contracts.attention_state import AttentionScope
from quire.contracts.layers import CrossAttention, LatentAttention
from quire.kv.layer_classes import key_value_spec
from quire.kv.plans import Masks, check_mask, cut_mask
from quire.kv.rules import refuse_layer
from quire.kv.state import State
from quire.kv.tensor_checks import check_out, check_state_out, check_states, check_type, padded, padded_state
from quire.ops import attention


def attention_with_fused_qkv(
    state: State,
    layer_id: int,
    qkv: Tensor,
    *,
    sm_scale: float | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    spec = key_value_spec("attention_with_fused_qkv", layer_id, state.parts.layer(layer_id, "attention_with_fused_qkv"))
    tokens = state.open_tokens
    columns = (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim
    flat = qkv
    if qkv.dim() == 3 and spec.head_dim == spec.value_dim and qkv.shape[2] == spec.head_dim:
        flat = qkv.flatten(1)
    if flat.dim() != 2 or flat.shape[1] != columns or flat.shape[0] < tokens:
        raise InvalidArgument(
            f"qkv of layer {layer_id} has shape {tuple(qkv.shape)}; at least {tokens} rows of {columns} columns are needed"
        )
    check_type(state.parts, "qkv", flat)
    shape = (flat.shape[0], spec.num_heads, spec.value_dim)
    if out is not None:
        check_out(out, shape, state.dtype, qkv)
    masks = None if mask is None else _masks(state, mask, of="all")
    result = state.open_pass().attend_qkv(
        layer_id, flat[:tokens], scale=_scoring(state, layer_id, sm_scale).scale, masks=masks
    )
    return padded(result, flat.shape[0], 0.0, out)


def append_kv(state: State, layer_id: int, k: Tensor, v: Tensor) -> None:
    spec = key_value_spec("append_kv", layer_id, state.parts.layer(layer_id, "append_kv"))
    check_rows(state, f"k of layer {layer_id}", k, (spec.num_kv_heads, spec.head_dim))
    check_rows(state, f"v of layer {layer_id}", v, (spec.num_kv_heads, spec.value_dim))
    tokens = state.open_tokens
    state.open_pass().append(layer_id, k[:tokens], v[:tokens])


def append_mla_kv(state: State, layer_id: int, kv: Tensor) -> None:
    spec = state.parts.layer(layer_id, "append_mla_kv").spec
    if not isinstance(spec, LatentAttention):
        refuse_layer("append_mla_kv", layer_id, spec.kind)
    tokens = state.open_tokens
    if kv.dim() != 2 or kv.shape[1] != spec.row_dim or kv.shape[0] < tokens:
        raise InvalidArgument(
            f"kv of layer {layer_id} has shape {tuple(kv.shape)}; at least {tokens} rows of {spec.row_dim} columns are needed"
        )
    check_type(state.parts, "kv", kv)
    state.open_pass().append_rows(layer_id, kv[:tokens])


def self_attention(
    state: State,
    layer_id: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float | None = None,
    mask: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    spec = state.parts.layer(layer_id, "self_attention").spec
    check_rows(state, "q", q, (spec.num_heads, None))
    check_rows(state, "k", k, (None, int(q.shape[2])))
    check_rows(state, "v", v, (int(k.shape[1]), None))
    if spec.num_heads % k.shape[1]:
        raise InvalidArgument(f"k has {k.shape[1]} heads, which do not divide the {spec.num_heads} query heads")
    rope, latent = spec.rope, isinstance(spec, LatentAttention)
    if rope is not None and (latent or spec.rope_mode != "none") and rope.rotary_dim > q.shape[2]:
        raise InvalidArgument(f"q and k have heads of {q.shape[2]}; layer {layer_id} rotates {rope.rotary_dim} columns")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InvalidArgument(f"q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows; the same is needed")
    check_state_out(out, (q.shape[0], spec.num_heads, int(v.shape[2])), state.dtype, (q, k, v))
    masks = None if mask is None else _masks(state, mask, of="own")
    tokens = state.open_tokens
    scoring = _scoring(state, layer_id, sm_scale)
    if sm_scale is None and spec.sm_scale is None and not latent:
        # The expanded form of a latent layer has the scale of the absorbed one.
        scoring = replace(scoring, scale=int(q.shape[2]) ** -0.5)
    found = state.open_pass().own(layer_id, q[:tokens], k[:tokens], v[:tokens], scoring, masks)
    return padded_state(found, q.shape[0], out)


def cross_attention(
    state: State,
    layer_id: int,
    q: Tensor,
    *,
    scope: AttentionScope = "past",
    sm_scale: float | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    spec = state.parts.spec(layer_id)
    if scope not in ("past", "all"):
        raise InvalidArgument(f"scope {scope!r}; 'past' or 'all' are accepted")
    dim = spec.row_dim if isinstance(spec, LatentAttention) else spec.head_dim
    check_rows(state, "q", q, (spec.num_heads, dim))
    check_state_out(out, (q.shape[0], spec.num_heads, spec.value_dim), state.dtype, (q,))
    opened = state.open_pass()
    if isinstance(spec, CrossAttention):
        # No row of an encoder is a new token's: both scopes are the same.
        found = opened.encoder_rows(layer_id, "cross_attention").state(layer_id, q[: state.open_tokens], sm_scale)
        return padded_state(found, q.shape[0], out)
    if scope == "all" and layer_id not in opened.written:
        raise FailedPrecondition(
            f"cross_attention with scope 'all': the rows of layer {layer_id} are not appended in this forward; call {'append_mla_kv' if spec.kind == 'latent' else 'append_kv'}"
        )
    scoring = _scoring(state, layer_id, sm_scale)
    found = opened.cross(layer_id, q[: state.open_tokens], "past" if scope == "past" else "fused", scoring)
    return padded_state(found, q.shape[0], out)


def attention_with_shared_kv(
    state: State,
    source_layer_id: int,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    sm_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    verb = "attention_with_shared_kv"
    spec = key_value_spec(verb, source_layer_id, state.parts.layer(source_layer_id, verb))
    check_rows(state, "q", q, (spec.num_heads, spec.head_dim))
    if (k is None) != (v is None):
        raise InvalidArgument("attention_with_shared_kv: one of k and v is missing; give both or none")
    new: tuple[Tensor, Tensor] | None = None
    if k is not None and v is not None:
        check_rows(state, "k", k, (spec.num_kv_heads, spec.head_dim))
        check_rows(state, "v", v, (spec.num_kv_heads, spec.value_dim))
        new = (k[: state.open_tokens], v[: state.open_tokens])
    if out is not None:
        for given in (q, k, v):
            if given is not None:
                check_out(out, (q.shape[0], spec.num_heads, spec.value_dim), state.dtype, given)
    if spec.sinks:
        raise Unsupported(
            f"attention_with_shared_kv: layer {source_layer_id} has learned sink logits, which belong to its own heads"
        )
    opened = state.open_pass()
    if new is None and source_layer_id not in opened.written:
        raise FailedPrecondition(
            f"attention_with_shared_kv: layer {source_layer_id} has stored nothing in this forward; run it before, or give k and v"
        )
    scoring = _scoring(state, source_layer_id, sm_scale)
    result = opened.shared(source_layer_id, q[: state.open_tokens], new, scoring)
    return padded(result, q.shape[0], 0.0, out)


def merge(state: State, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    check_states("merge", o1, lse1, o2, lse2)
    found = attention.merge(AttentionState(o1, lse1), AttentionState(o2, lse2))
    return found.out, found.lse


def merge_attn_output_inplace(
    state: State, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    check_states("merge_attn_output_inplace", o1, lse1, o2, lse2)
    found = attention.merge(AttentionState(o1, lse1), AttentionState(o2, lse2))
    o1.copy_(found.out)
    lse1.copy_(found.lse)
    return o1, lse1


def _scoring(state: State, layer_id: int, sm_scale: float | None) -> Scoring:
    scoring = state.parts.layer(layer_id).scoring
    return scoring if sm_scale is None else replace(scoring, scale=float(sm_scale))


def _masks(state: State, mask: Tensor, *, of: str) -> Masks | None:
    """Cut a flat mask into ``[n, keys]`` per entry; if no forward is open, check its type."""
    check_mask(mask, state.device)
    if state.current_pass is None:
        return None
    state.current_pass.chosen.require_all("a mask")
    return cut_mask(mask, state.current_pass.batch, own=of == "own")


def check_rows(state: State, name: str, tensor: Tensor, inner: tuple[int | None, int | None]) -> None:
    """Raise ``InvalidArgument`` unless it is ``[N, heads, dim]``, N >= T of the open forward."""
    wanted = [size if size is not None else "any" for size in inner]
    fits = tensor.dim() == 3 and all(
        given > 0 and wish in (None, given) for given, wish in zip(tensor.shape[1:], inner, strict=True)
    )
    if not fits or tensor.shape[0] < state.open_tokens:
        raise InvalidArgument(
            f"{name} has shape {tuple(tensor.shape)}; at least {state.open_tokens} rows of [{wanted[0]}, {wanted[1]}] are needed"
        )
    check_type(state.parts, name, tensor)
