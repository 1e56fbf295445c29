"""Bamba (IBM, Princeton, CMU, UIUC): Llama blocks, most with a Mamba-2 mixer for attention.

Half of each query and key head rotates. Source: transformers and the model's card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.models.config_fields import ConfigFields, config_reader
from quire.models.decoder import DecoderConfig
from quire.models.geometry import read_geometry
from quire.models.hybrid_decoder import only_attending, read_taps, respelled, split_blocks
from quire.models.mamba2 import MambaConfig, check_heads, mamba_names, read_step_limit
from quire.models.mixture import read_layer_numbers
from quire.models.rope_config import read_rope
from quire.models.tensor_names import Names, name_table
from quire.nn.mamba import Mamba2Shape
from quire.weights.places import NameTable

NORMS: Mapping[str, str] = {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
SPELLINGS: Mapping[str, str] = {".mlp.": ".feed_forward.", "model.norm.": "model.final_layernorm."}
"""Names of modules in Bamba and Falcon-H1 for Llama's."""


@config_reader
def read_bamba_config(fields: ConfigFields, max_model_len: int | None) -> MambaConfig:
    """Read ``BambaForCausalLM``; without ``attn_layer_indices`` no block has attention."""
    geometry = read_geometry(fields, "BambaForCausalLM", "bamba", max_model_len, kv_heads_required=True)
    # Older configurations count the rotated columns; transformers rotates half in any case.
    fields.expect("attn_rotary_emb", geometry.head_dim // 2)
    attending = read_layer_numbers(fields, "attn_layer_indices", geometry.num_layers)
    trunk = DecoderConfig(
        **geometry.usual(fields, 1e-5),
        layers=geometry.layers(read_rope(fields, geometry, partial_default=0.5)),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    return read_mamba_mixers(fields, trunk, [block in attending for block in range(geometry.num_layers)])


def bamba_spellings(config: MambaConfig) -> Sequence[NameTable]:
    table = only_attending(config, respelled(name_table(config.trunk, Names(norms=NORMS)), SPELLINGS))
    for block in config.recurrent:
        table |= mamba_names(config, f"model.layers.{block}.mamba", str(block))
    return (table,)


def read_mamba_mixers(fields: ConfigFields, trunk: DecoderConfig, attends: Sequence[bool]) -> MambaConfig:
    """Read the mixers of Bamba and Granite 4, which all blocks without attention have."""
    pass_over_generation(fields)
    bias = fields.flag("mamba_proj_bias", False)
    shape = read_mamba_shape(fields, int(fields.number("mamba_expand", 2) * trunk.hidden_size))
    return MambaConfig(
        trunk=trunk,
        **split_blocks(attends),
        mixer=shape,
        activation=trunk.activation,
        project_bias=bias,
        out_bias=bias,
        conv_bias=fields.flag("mamba_conv_bias", True),
        norm_groups=shape.num_groups,
    )


def read_mamba_shape(fields: ConfigFields, width: int) -> Mamba2Shape:
    """Read a mixer of this width from the fields that Bamba and Falcon-H1 share."""
    num_heads = fields.count("mamba_n_heads", 128)
    least, greatest = read_step_limit(fields)
    if fields.get("mamba_d_head") in (None, "auto"):
        head_dim = max(1, width // num_heads)
    else:
        head_dim = fields.count("mamba_d_head")
    shape = Mamba2Shape(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.count("mamba_n_groups", 1),
        state_size=fields.count("mamba_d_state", 256),
        taps=read_taps(fields, "mamba_d_conv", 4),
        least_step=least,
        greatest_step=greatest,
    )
    check_heads(fields, shape, width, "mamba_n_heads", "mamba_n_groups")
    return shape


def pass_over_generation(fields: ConfigFields) -> None:
    """Skip fields for the number of logits, the prompt's chunks and a training loss."""
    for name in ("num_logits_to_keep", "mamba_chunk_size", "z_loss_coefficient"):
        fields.get(name)
