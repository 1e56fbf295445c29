"""The rules of the KV state contract: the verbs of each kind of layer and of a state, else why not.

Refusals, ``capabilities()`` and the rule table (``rule_table``) use them, so none disagree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from quire.base.errors import Unsupported
from quire.contracts.attention_state import AttentionVerbs, StoredRows
from quire.contracts.kv_state import KVState
from quire.contracts.layers import Recurrent, window_refusal

RECURRENT_REFUSAL = "the state has no recurrent layers"
"""Why a state without such layers has not their verbs."""

RECURRENT_LAYER_VERBS = ("linear_attention", "get", "set", "debug_get", "debug_set")
"""Verbs that are about one recurrent layer."""

RECURRENT_VERBS = (*RECURRENT_LAYER_VERBS, "checkpoint", "drop_checkpoint")
"""What a state with recurrent layers does besides."""

PAGED_REFUSALS: dict[str, str] = {
    "set_cross_kv": "the state has no cross layers, which no model of this release has",
    **dict.fromkeys(RECURRENT_VERBS, RECURRENT_REFUSAL),
}
"""What paged attention refuses, with the reason."""

PAGED_VERBS = tuple(
    verb
    for protocol in (KVState, AttentionVerbs, StoredRows)
    for verb in vars(protocol)
    if not verb.startswith("_") and verb not in PAGED_REFUSALS
)
"""What paged attention does, exactly."""

_KEYS_AND_VALUES = ("full", "window")
_NO_KV = "it keeps one row per token and no K and V"
_ROWS_OF_ENCODERS = "its rows are the encoder's, and tokens add none; call set_cross_kv"
_LATENT_FUSED = (
    "its query is absorbed or expanded by the model; call append_mla_kv, then self_attention or cross_attention"
)

LAYER_VERBS: dict[str, dict[str, str]] = {
    "attention_with_fused_qkv": {
        "latent": _LATENT_FUSED,
        "cross": "its keys are the encoder's; call set_cross_kv once for each sequence, then cross_attention",
    },
    "append_kv": {"latent": f"{_NO_KV}; call append_mla_kv", "cross": _ROWS_OF_ENCODERS},
    "append_mla_kv": {
        **dict.fromkeys(_KEYS_AND_VALUES, "it keeps K and V; call append_kv"),
        "cross": _ROWS_OF_ENCODERS,
    },
    "self_attention": {"cross": "its keys are the encoder's, and none of them is a new token's; call cross_attention"},
    "cross_attention": {},
    "attention_with_shared_kv": {
        "latent": "only the model that made its rows can read them; call cross_attention with an absorbed query",
        "cross": "its keys are the encoder's and follow no token; call cross_attention",
    },
    "debug_get_kv": {"latent": f"{_NO_KV}; call debug_get_kv_mla"},
    "debug_get_kv_mla": dict.fromkeys((*_KEYS_AND_VALUES, "cross"), "it keeps K and V; call debug_get_kv"),
    "debug_set_kv": {},
}
"""Verbs that are about one attention layer: the kinds of layer that lack them, and why."""

CROSS_VERBS: dict[str, dict[str, str]] = {
    "set_cross_kv": {
        **dict.fromkeys(_KEYS_AND_VALUES, "its rows are those of tokens; call append_kv"),
        "latent": "its rows are those of tokens; call append_mla_kv",
    },
}
"""As ``LAYER_VERBS``: what a state with cross layers does besides."""

LAYER_KINDS = ("full", "window", "latent", "cross", "recurrent")
"""Every kind of layer."""


def layer_refusal(verb: str, kind: str) -> str:
    """Return the reason against a verb on layers of this kind; empty: they have it. The verb is one
    of ``LAYER_VERBS``, ``CROSS_VERBS`` and ``RECURRENT_LAYER_VERBS``."""
    if verb in RECURRENT_LAYER_VERBS:
        return "" if kind == "recurrent" else "it keeps rows of tokens and no state of fixed size"
    if kind == "recurrent":
        return "it keeps a state of fixed size and no rows of tokens; recurrent verbs are linear_attention, get, set, debug_get"
    return (LAYER_VERBS | CROSS_VERBS)[verb].get(kind, "")


def refuse_layer(verb: str, layer_id: int, kind: str) -> NoReturn:
    """Raise ``Unsupported`` with the table's reason, for a kind of layer without the verb."""
    raise Unsupported(f"{verb}: layer {layer_id} is of kind {kind!r}: {layer_refusal(verb, kind)}")


def verbs_of(kinds: Iterable[str]) -> dict[str, str]:
    """Return every verb of a state with such layers: empty if some layer has it, else why not."""
    everything = set(kinds)
    # Reasons speak of what tokens leave behind in attention layers, where there are such.
    present = sorted(everything, key=lambda kind: (kind == "recurrent", kind == "cross", kind))
    found = dict.fromkeys(PAGED_VERBS, "") | PAGED_REFUSALS
    if "recurrent" in everything:
        found.update(dict.fromkeys(RECURRENT_VERBS, ""))
    if "cross" in everything:
        found.update(dict.fromkeys(CROSS_VERBS, ""))
    if everything <= {"cross", "recurrent"}:
        found["enable_sliding_window_for_seq"] = window_refusal([Recurrent(states=())])
    for verb in LAYER_VERBS:
        if all(layer_refusal(verb, kind) for kind in present):
            found[verb] = (
                f"the state has layers of kind {' and '.join(map(repr, present))} only: {layer_refusal(verb, present[0])}"
            )
    return found
