"""Decoders whose blocks have a recurrent mixer instead of attention, or beside it.

A family reads config.json into a ``HybridConfig``, says how its checkpoints spell the tensors and hands ``HybridDecoder``
the function that builds a block. The trunk (embedding, head, norms, MLPs, and the attention of blocks that attend) is
that of ``models.decoder``.

Layers are numbered as they come: block by block, in a block attention first, then the recurrent mixer. So where each block
has one of them, a layer's id is its block's; where each has both (Falcon-H1), block i has the layers 2i and 2i + 1.

Letters: T new tokens, R rows for the head, E model width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.contracts.layers import LayerSpec
from quire.contracts.model import Block, Pass
from quire.errors import Unsupported
from quire.models.blocks import FeedForward, Norm
from quire.models.checkpoint import NameTable, Place
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderConfig, Parameters, linear
from quire.nn.attention import Attention, NormedAttention
from quire.nn.embedding import Embedding, ScaledEmbedding
from quire.nn.linear import Linear
from quire.nn.mixers import GatedAttention, Mixer, MixerShape
from quire.nn.norm import RMSNorm, WideRMSNorm
from quire.nn.packed import can_pack, packed


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """What a hybrid computes."""

    trunk: DecoderConfig
    """Everything but the recurrent mixers. ``layers``: one spec for each block, whether it attends or not; empty where
    none attends. Norms are root mean square."""
    num_blocks: int
    attending: tuple[int, ...]
    """The blocks with attention, ascending."""
    recurrent: tuple[int, ...]
    """The blocks with a recurrent mixer, ascending."""
    mixer: MixerShape
    gated_attention: bool = False
    """Whether a sigmoid of the input gates what attention gives."""
    wide_residual: bool = False
    """Whether the residual stream is in float32 whatever the weights are."""

    def canonical(self) -> str:
        """JSON of what decides the logits, keys sorted."""
        plain = {
            "trunk": json.loads(self.trunk.canonical()),
            "blocks": [self.num_blocks, self.attending, self.recurrent],
            "mixer": asdict(self.mixer),  # type: ignore[call-overload]
            "gated_attention": self.gated_attention,
            "wide_residual": self.wide_residual,
            **self.own_fields(),
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    def own_fields(self) -> dict[str, Any]:
        """What a family adds to ``canonical``, in JSON types."""
        return {}


class LayerIds(NamedTuple):
    """The layers of a block; None: it has none of the kind."""

    attention: int | None
    recurrent: int | None


def layer_ids(config: HybridConfig) -> tuple[LayerIds, ...]:
    """Those of every block."""
    found: list[LayerIds] = []
    count = 0
    for block in range(config.num_blocks):
        attends, recurs = block in config.attending, block in config.recurrent
        found.append(LayerIds(count if attends else None, count + attends if recurs else None))
        count += attends + recurs
    return tuple(found)


class HybridBlock(Block, Protocol):
    """One block of a hybrid."""

    def pack(self) -> None:
        """Replace each linear map by its packed form, where there is one."""
        ...


class MixedBlock:
    """``h = x + mixer(norm(x))``, then ``h + mlp(norm(h))``."""

    __slots__ = ("mixer", "mixer_norm", "mlp", "mlp_norm")

    def __init__(self, mixer_norm: Norm, mixer: Mixer, mlp_norm: Norm, mlp: FeedForward) -> None:
        self.mixer_norm = mixer_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """``[T, E]`` to a fresh ``[T, E]``; ``x`` stays as it is."""
        h_TE = self.mixer(self.mixer_norm(x_TE), pass_).add_(x_TE)
        return self.mlp(self.mlp_norm(h_TE)).add_(h_TE)

    def pack(self) -> None:
        """See ``HybridBlock``."""
        self.mixer.pack()
        self.mlp.pack()


C = TypeVar("C", bound=HybridConfig)
BlockBuilder: TypeAlias = Callable[[C, int, LayerIds, Parameters], HybridBlock]
"""Configuration, number of the block, ids of its layers, parameters: the block."""


class HybridDecoder(Generic[C]):
    """A decoder with recurrent layers; implements ``quire.models.families.LoadedModel``. Weights only."""

    def __init__(self, config: C, parameters: Parameters, values: Mapping[str, Any], block: BlockBuilder[C]) -> None:
        """``parameters``: those of the family's name table. ``values``: config.json as it was read."""
        trunk = config.trunk
        self.architecture = trunk.architecture
        self.vocab_size = trunk.vocab_size
        self.hidden_size = trunk.hidden_size
        self.max_position = trunk.context
        self.max_model_len = trunk.max_model_len
        self.config: dict[str, Any] = dict(values)
        self.canonical_config = config.canonical()
        weight_VE = parameters["embed.weight"]
        scale = trunk.embedding_scale
        self.embedding = Embedding(weight_VE) if scale == 1.0 else ScaledEmbedding(weight_VE, scale)
        self.dtype = weight_VE.dtype
        self.device = weight_VE.device
        ids = layer_ids(config)
        self.layer_specs: Sequence[LayerSpec] = _specs(config, ids, self.dtype)
        self._hybrid_blocks = [block(config, number, one, parameters) for number, one in enumerate(ids)]
        self.blocks: Sequence[Block] = self._hybrid_blocks
        self._wide = config.wide_residual
        self.norm = norm_of(config, parameters, "norm")
        self.tied = trunk.tie_embeddings
        self.places: NameTable = {}
        self.lm_head = Linear(parameters["embed.weight" if self.tied else "head.weight"], name="head")
        self._logit_scale = trunk.logit_scale
        self.num_parameters = sum(tensor.numel() for tensor in parameters.values())
        """Counted once where embedding and head are one tensor."""
        self.parameter_bytes = sum(tensor.nbytes for tensor in parameters.values())

    def pack(self) -> bool:
        """Lay the weights out for this machine's kernels, where that helps; says whether it did.

        The head of a tied model gets a copy of its own: the embedding is read by rows.
        """
        if not can_pack(self.dtype, self.device):
            return False
        for block in self._hybrid_blocks:
            block.pack()
        if self.lm_head.weight is self.embedding.weight:
            self.parameter_bytes += self.embedding.weight.nbytes
        self.lm_head = packed(self.lm_head)
        return True

    def embed(self, tokens_T: Tensor) -> Tensor:
        """int64 ``[T]`` to a fresh ``[T, E]``, in float32 where the residual stream is."""
        x_TE = self.embedding(tokens_T)
        return x_TE.float() if self._wide else x_TE

    def head(self, x_RE: Tensor) -> Tensor:
        """``[R, E]`` to float32 logits ``[R, V]``; the product itself is in the model's dtype, the rest in float32."""
        logits_RV = self.lm_head(self.norm(x_RE).to(self.dtype)).float()
        return logits_RV if self._logit_scale == 1.0 else logits_RV.mul_(self._logit_scale)


def _specs(config: HybridConfig, ids: Sequence[LayerIds], dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    specs: list[LayerSpec] = []
    for block, one in enumerate(ids):
        if one.attention is not None:
            specs.append(config.trunk.layers[block])
        if one.recurrent is not None:
            specs.append(config.mixer.spec(dtype))
    return tuple(specs)


def norm_of(config: HybridConfig, parameters: Parameters, name: str) -> Norm:
    """The norm ``{name}.weight``, over the model width or over each head."""
    weight = parameters[f"{name}.weight"]
    if config.wide_residual:
        weight = weight.float()
    if config.trunk.norm == "rms":
        return RMSNorm(weight, config.trunk.norm_eps)
    norm = RMSNorm if weight.dtype == torch.float32 else WideRMSNorm
    return norm(weight.float() + 1.0, config.trunk.norm_eps)


def attention_of(config: HybridConfig, block: int, layer_id: int, parameters: Parameters) -> Attention:
    """The attention of a block: parameters ``{block}.qkv``, ``{block}.out`` and, where heads are normed, ``{block}.q_norm``
    and ``{block}.k_norm``."""
    spec = config.trunk.layers[block]
    qkv, out = linear(parameters, f"{block}.qkv"), linear(parameters, f"{block}.out")
    if config.trunk.head_norms == "none":
        return Attention(layer_id, spec, qkv, out)
    q_norm, k_norm = (norm_of(config, parameters, f"{block}.{name}") for name in ("q_norm", "k_norm"))
    attention = GatedAttention if config.gated_attention else NormedAttention
    return attention(layer_id, spec, qkv, out, q_norm, k_norm)


def only_attending(config: HybridConfig, table: Mapping[str, Place]) -> dict[str, Place]:
    """A decoder's name table without the attention of blocks that have none."""
    kept: dict[str, Place] = {}
    for name, place in table.items():
        if ".self_attn." not in name:
            kept[name] = place
            continue
        for block in config.attending:
            kept[name.format(block)] = replace(place, parameter=place.parameter.format(block))
    return kept


def respelled(table: Mapping[str, Place], spellings: Mapping[str, str]) -> dict[str, Place]:
    """The table with the first part of each name that ``spellings`` knows replaced."""
    found: dict[str, Place] = {}
    for name, place in table.items():
        theirs = next((part for part in spellings if part in name), "")
        found[name.replace(theirs, spellings[theirs]) if theirs else name] = place
    return found


def read_kinds(fields: ConfigFields, num_blocks: int, known: Mapping[str, bool]) -> tuple[int, ...]:
    """The blocks that attend, by ``layer_types``. ``Unsupported`` for a kind that is not among the known ones."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_blocks:
        raise fields.error("layer_types", f"a list of {num_blocks} strings")
    for block, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in known:
            raise Unsupported(f"{fields.source}: layer_types[{block}] is {kind!r}; expected one of {list(known)}")
    return tuple(block for block, kind in enumerate(kinds) if known[kind])


def read_taps(fields: ConfigFields, name: str, default: int) -> int:
    """Taps of a convolution, 2 or more: with one there is no state."""
    taps = fields.count(name, default)
    if taps < 2:
        raise fields.error(name, "an integer of 2 or more")
    return taps


def read_numbers(fields: ConfigFields, name: str, default: Sequence[float]) -> tuple[float, ...]:
    """A list of so many finite numbers above 0; ``default`` where the field is missing or null."""
    value = fields.get(name)
    if value is None:
        return tuple(default)
    expected = f"{len(default)} finite numbers above 0 in a list"
    if not isinstance(value, list) or len(value) != len(default):
        raise fields.error(name, expected)
    for one in value:
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < float("inf"):
            raise fields.error(name, expected)
    return tuple(float(one) for one in value)
