"""Names of a decoder's tensors in checkpoints, and the parameters that they fill.

The parameters of a ``Decoder`` in layer ``{}``: ``embed``, ``norm``, ``head`` (unless tied);
``{}.qkv``, ``{}.out``, ``{}.q_norm``, ``{}.k_norm``, ``{}.sinks`` (no suffix); norms by placement
out of ``{}.attention_norm``, ``{}.attention_out_norm``, ``{}.mlp_norm``, ``{}.mlp_out_norm``; a
dense MLP's ``{}.gate_up``, ``{}.down``. Each has ``.weight`` and, if configured, ``.bias``. The
rows of ``qkv`` are all query heads, key heads, value heads; those of ``gate_up`` are gate, then up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from quire.models.decoder import DecoderConfig, Placement
from quire.weights.places import Place

PRE_NORMS: Mapping[str, str] = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Llama's names for the norms of a block, which most families adopted."""


BLOCK_NORMS: Mapping[Placement, tuple[str, ...]] = {
    "pre": ("attention_norm", "mlp_norm"),
    "post": ("attention_out_norm", "mlp_out_norm"),
    "sandwich": ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm"),
    "parallel": ("attention_norm",),
}
"""The norms over the model width in a block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """The spelling of one family. Names of a layer's parts follow ``{trunk}layers.{}.``."""

    norms: Mapping[str, str]
    """Our names of a block's norms over the model width, to the checkpoint's; unused entries are
    allowed."""
    trunk: str = "model."
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names in ``self_attn``. One name: one tensor stores the projections in this order."""
    out: str = "o_proj"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Norms of queries and keys in ``self_attn``; those per head are ``norms.0``, ``norms.1``."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Names in ``mlp``. One name: one tensor stores both, gate first."""
    down: str = "down_proj"
    others: tuple[str, ...] = ()
    """Prefixes of tensors in the checkpoint that belong to other models (image encoders)."""


LLAMA_NAMES = Names(norms=PRE_NORMS)


def name_table(config: DecoderConfig, names: Names = LLAMA_NAMES) -> dict[str, Place]:
    """Map each tensor of a dense decoder's checkpoint to its place; ``{}`` is the layer."""
    return {**trunk_names(config, names), **mlp_names(config, names)}


def trunk_names(config: DecoderConfig, names: Names = LLAMA_NAMES) -> dict[str, Place]:
    """Return the names of embedding, head, norms and attention: all but the MLPs."""
    width, spec = config.hidden_size, config.layers[0]
    layer = f"{names.trunk}layers.{{}}."
    table = {f"{names.trunk}embed_tokens.weight": Place(parameter="embed.weight", shape=(config.vocab_size, width))}
    if not config.tie_embeddings:
        table[f"{names.head}.weight"] = Place(parameter="head.weight", shape=(config.vocab_size, width))
    if config.head_bias:
        table[f"{names.head}.bias"] = Place(parameter="head.bias", shape=(config.vocab_size,))
    norms = {f"{names.trunk}norm": "norm"}
    norms |= {f"{layer}{names.norms[ours]}": f"{{}}.{ours}" for ours in BLOCK_NORMS[config.placement]}
    for theirs, ours in norms.items():
        for part in ("weight", "bias") if config.norm_bias else ("weight",):
            table[f"{theirs}.{part}"] = Place(parameter=f"{ours}.{part}", shape=(width,))
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = (q_rows, kv_rows, spec.num_kv_heads * spec.value_dim)
    attention = f"{layer}self_attn."
    table |= map_names(attention, names.qkv, "{}.qkv", rows, width, config.qkv_bias)
    columns = spec.num_heads * spec.value_dim
    table |= map_names(attention, (names.out,), "{}.out", (width,), columns, config.out_bias, is_sum=True)
    for ours, theirs, heads, first in (
        ("q_norm", names.head_norms[0], spec.num_heads, config.first_heads[0]),
        ("k_norm", names.head_norms[1], spec.num_kv_heads, config.first_heads[1]),
    ):
        place = Place(parameter=f"{{}}.{ours}.weight", shape=(spec.head_dim,))
        if config.head_norms == "shared":
            table[f"{attention}{theirs}.weight"] = place
        elif config.head_norms == "width":
            table[f"{attention}{theirs}.weight"] = Place(parameter=place.parameter, shape=(heads * spec.head_dim,))
        elif config.head_norms == "each":
            for head in range(heads):
                table[f"{attention}{theirs}.norms.{first + head}.weight"] = Place(
                    parameter=place.parameter, shape=place.shape, row=head * spec.head_dim
                )
    return table


def mlp_names(
    config: DecoderConfig, names: Names = LLAMA_NAMES, layers: Collection[int] | None = None
) -> dict[str, Place]:
    """Return the names of the dense MLPs; ``layers`` limits them if other layers have experts."""
    width, inner = config.hidden_size, config.intermediate_size
    table: dict[str, Place] = {}
    for layer in ("{}",) if layers is None else sorted(layers):
        table |= gated_names(f"{names.trunk}layers.{layer}.mlp.", f"{layer}.", width, inner, names, config.mlp_bias)
    return table


def map_names(
    prefix: str,
    names: tuple[str, ...],
    parameter: str,
    rows: tuple[int, ...],
    columns: int,
    bias: bool = False,
    *,
    is_sum: bool = False,
) -> dict[str, Place]:
    """Return the names of a linear map stored in one tensor per name, or in a single one.
    ``is_sum``: ranks divide its columns and add the results."""
    table, row = {}, 0
    parts = rows if len(names) == 1 < len(rows) else ()
    for name, count in zip(names, rows if len(names) > 1 else (sum(rows),), strict=True):
        shape = (count, columns)
        table[f"{prefix}{name}.weight"] = Place(parameter=f"{parameter}.weight", shape=shape, row=row, parts=parts)
        if bias:
            place = Place(parameter=f"{parameter}.bias", shape=(count,), row=row, parts=parts, is_sum=is_sum)
            table[f"{prefix}{name}.bias"] = place
        row += count
    return table


def gated_names(
    prefix: str, parameter: str, width: int, inner: int, names: Names = LLAMA_NAMES, bias: bool = False
) -> dict[str, Place]:
    """Return the names of a gated MLP; ``prefix`` and ``parameter`` begin theirs and ours."""
    table = map_names(prefix, names.gate_up, f"{parameter}gate_up", (inner, inner), width, bias)
    return table | map_names(prefix, (names.down,), f"{parameter}down", (width,), inner, bias, is_sum=True)


def places_of(
    sizes: Mapping[str, tuple[str, tuple[int, ...]]], prefix: str = "", parameter: str = ""
) -> dict[str, Place]:
    """Return the places of tensors, of which ``sizes`` has our names and the shapes by theirs;
    ``prefix`` and ``parameter`` begin theirs and ours."""
    return {prefix + theirs: Place(parameter=parameter + ours, shape=shape) for theirs, (ours, shape) in sizes.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class IgnorableNames:
    """Names of tensors that a checkpoint may hold unread; used as ``name in ignorable``."""

    names: frozenset[str]
    prefixes: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return name in self.names or (isinstance(name, str) and name.startswith(self.prefixes))


def ignorable_names(config: DecoderConfig, names: Names = LLAMA_NAMES) -> IgnorableNames:
    """Return the names of RoPE's frequencies, a tied head, and other models' tensors."""
    ignored = {f"{names.trunk}rotary_emb.inv_freq"}
    ignored |= {f"{names.trunk}layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)}
    if config.tie_embeddings:
        ignored.add(f"{names.head}.weight")
    return IgnorableNames(names=frozenset(ignored), prefixes=names.others)
