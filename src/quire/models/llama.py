"""The Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen3.

One decoder with four configurations: pre-norm blocks, rotary attention over grouped heads, SwiGLU. They differ in
which projections have biases, in a norm of each query and key head (Qwen3), and in what a missing field of config.json
means. Sources: the models' reports (arXiv:2302.13971, 2310.06825, 2407.10671, 2505.09388) and transformers.

Letters: T new tokens, R rows for the head, E model width, V vocabulary, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from quire.contracts.layers import FullAttention, LayerSpec
from quire.contracts.model import Block, Pass
from quire.errors import CheckpointError, Unsupported
from quire.models.checkpoint import Place
from quire.models.config import (
    ConfigFields,
    DecoderConfig,
    read_rope,
    refuse_layer_types,
    refuse_unsupported,
    refuse_window,
)
from quire.nn.attention import Attention
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear
from quire.nn.mlp import SwiGLU
from quire.nn.norm import RMSNorm
from quire.nn.packed import can_pack, packed

DEFAULT_RMS_NORM_EPS = 1e-6
"""What transformers takes in all four families when config.json does not say."""


def read_llama_config(values: Mapping[str, Any]) -> DecoderConfig:
    """``LlamaForCausalLM``: biases by ``attention_bias`` (q, k, v and o) and ``mlp_bias``."""
    fields = ConfigFields(values)
    bias = fields.flag("attention_bias", False)
    refuse_window(fields, fields.count("max_position_embeddings"))
    return _read(
        fields, "LlamaForCausalLM", "llama", qkv_bias=bias, out_bias=bias, mlp_bias=fields.flag("mlp_bias", False)
    )


def read_mistral_config(values: Mapping[str, Any]) -> DecoderConfig:
    """``MistralForCausalLM`` without biases. A missing ``sliding_window`` means 4,096, as in transformers."""
    fields = ConfigFields(values)
    _refuse_biases(fields, "attention_bias", "mlp_bias")
    refuse_window(fields, fields.count("max_position_embeddings"), default=4096)
    return _read(fields, "MistralForCausalLM", "mistral", kv_heads_required=True)


def read_qwen2_config(values: Mapping[str, Any]) -> DecoderConfig:
    """``Qwen2ForCausalLM``: q, k and v always have biases, o never. ``sliding_window`` is off unless
    ``use_sliding_window``, which is refused."""
    fields = ConfigFields(values)
    _refuse_biases(fields, "mlp_bias")
    fields.get("sliding_window"), fields.get("max_window_layers")  # Read by nobody while windows are off.
    return _read(fields, "Qwen2ForCausalLM", "qwen2", kv_heads_required=True, qkv_bias=True)


def read_qwen3_config(values: Mapping[str, Any]) -> DecoderConfig:
    """``Qwen3ForCausalLM``: norms of query and key heads; biases by ``attention_bias``; a missing ``head_dim`` is 128."""
    fields = ConfigFields(values)
    _refuse_biases(fields, "mlp_bias")
    fields.get("sliding_window"), fields.get("max_window_layers")
    if not fields.present("head_dim"):
        fields = ConfigFields({**values, "head_dim": 128})
    bias = fields.flag("attention_bias", False)
    return _read(
        fields, "Qwen3ForCausalLM", "qwen3", kv_heads_required=True, qkv_bias=bias, out_bias=bias, head_norms=True
    )


def _refuse_biases(fields: ConfigFields, *names: str) -> None:
    for name in names:
        if fields.flag(name, False):
            raise Unsupported(f"{fields.source}: {name} is true, which this architecture does not have; expected false")


def _read(
    fields: ConfigFields,
    architecture: str,
    model_type: str,
    *,
    kv_heads_required: bool = False,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> DecoderConfig:
    """The fields that all four share, then everything that is refused."""
    if fields.get("model_type") not in (None, model_type):
        raise fields.error("model_type", f"{model_type!r}, which goes with {architecture}")
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if kv_heads_required and not fields.present("num_key_value_heads"):
        raise fields.error("num_key_value_heads", "the number of KV heads, or null for one per query head")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({num_heads}), or head_dim")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{fields.source}: head_dim is {head_dim}; expected an even number, as RoPE turns pairs")
    num_layers, max_position = fields.count("num_hidden_layers"), fields.count("max_position_embeddings")
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=fields.number("rms_norm_eps", DEFAULT_RMS_NORM_EPS),
        rope=read_rope(fields, head_dim, max_position),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        head_norms=head_norms,
    )
    refuse_layer_types(fields, num_layers)
    refuse_unsupported(fields)
    return config


def name_table(config: DecoderConfig) -> dict[str, Place]:
    """Every tensor of a checkpoint and the rows that it fills; ``{}`` is the layer."""
    width, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = {
        "model.embed_tokens.weight": Place(parameter="embed.weight", shape=(config.vocab_size, width)),
        "model.norm.weight": Place(parameter="norm.weight", shape=(width,)),
        "model.layers.{}.input_layernorm.weight": Place(parameter="{}.attention_norm.weight", shape=(width,)),
        "model.layers.{}.post_attention_layernorm.weight": Place(parameter="{}.mlp_norm.weight", shape=(width,)),
    }
    if not config.tie_embeddings:
        table["lm_head.weight"] = Place(parameter="head.weight", shape=(config.vocab_size, width))
    # Name, parameter, first row, output rows, input columns, bias.
    for name, parameter, row, rows, columns, bias in (
        ("self_attn.q_proj", "qkv", 0, q_rows, width, config.qkv_bias),
        ("self_attn.k_proj", "qkv", q_rows, kv_rows, width, config.qkv_bias),
        ("self_attn.v_proj", "qkv", q_rows + kv_rows, kv_rows, width, config.qkv_bias),
        ("self_attn.o_proj", "out", 0, width, q_rows, config.out_bias),
        ("mlp.gate_proj", "gate_up", 0, inner, width, config.mlp_bias),
        ("mlp.up_proj", "gate_up", inner, inner, width, config.mlp_bias),
        ("mlp.down_proj", "down", 0, width, inner, config.mlp_bias),
    ):
        weight = Place(parameter=f"{{}}.{parameter}.weight", shape=(rows, columns), row=row)
        table[f"model.layers.{{}}.{name}.weight"] = weight
        if bias:
            table[f"model.layers.{{}}.{name}.bias"] = Place(parameter=f"{{}}.{parameter}.bias", shape=(rows,), row=row)
    if config.head_norms:
        for one in ("q_norm", "k_norm"):
            place = Place(parameter=f"{{}}.{one}.weight", shape=(config.head_dim,))
            table[f"model.layers.{{}}.self_attn.{one}.weight"] = place
    return table


def ignorable_names(config: DecoderConfig) -> frozenset[str]:
    """Tensors that a checkpoint may hold and that are not read: frequencies, which config.json decides, and a head
    that the same file says is the embedding."""
    names = {"model.rotary_emb.inv_freq"}
    names |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)}
    return frozenset(names | {"lm_head.weight"} if config.tie_embeddings else names)


class DecoderBlock:
    """``h = x + attention(norm(x))``, then ``h + mlp(norm(h))``."""

    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(self, attention_norm: RMSNorm, attention: Attention, mlp_norm: RMSNorm, mlp: SwiGLU) -> None:
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """``[T, E]`` to a fresh ``[T, E]``; ``x`` stays as it is."""
        # The residual is added in place into what the layer has just made, never into the caller's x.
        h_TE = self.attention(self.attention_norm(x_TE), pass_).add_(x_TE)
        return self.mlp(self.mlp_norm(h_TE)).add_(h_TE)


class Decoder:
    """A decoder of the Llama family; implements ``quire.contracts.model.Model``. Weights only."""

    def __init__(self, config: DecoderConfig, parameters: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """``parameters``: those of ``name_table(config)``. ``values``: config.json as it was read."""
        spec = FullAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_dim=config.head_dim,
            rope=config.rope,
            rope_mode="normal",
        )
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position = config.max_position
        self.config: dict[str, Any] = dict(values)
        self.canonical_config = config.canonical()
        self.embedding = Embedding(parameters["embed.weight"])
        self._decoder_blocks = [_block(layer, spec, config, parameters) for layer in range(config.num_layers)]
        self.blocks: Sequence[Block] = self._decoder_blocks
        self.layer_specs: Sequence[LayerSpec] = (spec,) * config.num_layers
        self.norm = RMSNorm(parameters["norm.weight"], config.rms_norm_eps)
        self.lm_head = Linear(parameters["embed.weight" if config.tie_embeddings else "head.weight"])
        self.tied = config.tie_embeddings
        self.dtype = self.embedding.weight.dtype
        self.device = self.embedding.weight.device
        self.num_parameters = sum(tensor.numel() for tensor in parameters.values())
        """Counted once where embedding and head are one tensor."""
        self.parameter_bytes = sum(tensor.nbytes for tensor in parameters.values())

    def pack(self) -> bool:
        """Lay the weights out for this machine's kernels, where that helps; says whether it did.

        The head of a tied model gets a copy of its own: the embedding is read by rows.
        """
        if not can_pack(self.dtype, self.device):
            return False
        for block in self._decoder_blocks:
            block.attention.qkv, block.attention.out = packed(block.attention.qkv), packed(block.attention.out)
            block.mlp.gate_up, block.mlp.down = packed(block.mlp.gate_up), packed(block.mlp.down)
        if self.lm_head.weight is self.embedding.weight:
            self.parameter_bytes += self.embedding.weight.nbytes
        self.lm_head = packed(self.lm_head)
        return True

    def embed(self, tokens_T: Tensor) -> Tensor:
        """int64 ``[T]`` to a fresh ``[T, E]``."""
        return self.embedding(tokens_T)

    def head(self, x_RE: Tensor) -> Tensor:
        """``[R, E]`` to float32 logits ``[R, V]``; the product itself is in the model's dtype."""
        return self.lm_head(self.norm(x_RE)).float()


def _block(layer: int, spec: FullAttention, config: DecoderConfig, parameters: Mapping[str, Tensor]) -> DecoderBlock:
    def linear(name: str) -> Linear:
        return Linear(parameters[f"{layer}.{name}.weight"], parameters.get(f"{layer}.{name}.bias"))

    def norm(name: str) -> RMSNorm:
        return RMSNorm(parameters[f"{layer}.{name}.weight"], config.rms_norm_eps)

    head_norms = (norm("q_norm"), norm("k_norm")) if config.head_norms else None
    return DecoderBlock(
        attention_norm=norm("attention_norm"),
        attention=Attention(layer, spec, linear("qkv"), linear("out"), head_norms),
        mlp_norm=norm("mlp_norm"),
        mlp=SwiGLU(linear("gate_up"), linear("down")),
    )
