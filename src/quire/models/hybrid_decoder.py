"""Decoders whose blocks have a recurrent mixer instead of attention, or beside it.

A family reads config.json into a ``HybridConfig``, spells its checkpoints' tensors, and gives
``HybridDecoder`` the builder of a block. ``models.decoder`` has the trunk: embedding, head, norms,
MLPs, and the attention of some blocks.

Layers are numbered block by block, attention before the recurrent mixer. With one layer in each
block, its id is the block's. With both (Falcon-H1), block i has the layers 2i and 2i + 1.

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
    """The computation of a hybrid."""

    trunk: DecoderConfig
    """All parts but the recurrent mixers. ``layers`` has a spec for every block, or none if no
    block has attention. Norms are root mean square."""
    num_blocks: int
    attending: tuple[int, ...]
    """The blocks with attention, ascending."""
    recurrent: tuple[int, ...]
    """The blocks with a recurrent mixer, ascending."""
    mixer: MixerShape
    gated_attention: bool = False
    """Whether a sigmoid of the input gates the output of attention."""
    wide_residual: bool = False
    """Whether the residual stream is in float32 for any dtype of the weights."""

    def canonical(self) -> str:
        """Return JSON of the fields that decide the logits, keys sorted."""
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
        """Return the fields that a family adds to ``canonical``, in JSON types."""
        return {}


class LayerIds(NamedTuple):
    """Ids of a block's layers; None for a kind that the block lacks."""

    attention: int | None
    recurrent: int | None


def layer_ids(config: HybridConfig) -> tuple[LayerIds, ...]:
    """Return the layer ids of every block."""
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
        """Replace each linear map by its packed form where it has one."""
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
        """Map ``[T, E]`` to a fresh ``[T, E]``; leave ``x`` unchanged."""
        h_TE = self.mixer(self.mixer_norm(x_TE), pass_).add_(x_TE)
        return self.mlp(self.mlp_norm(h_TE)).add_(h_TE)

    def pack(self) -> None:
        """See ``HybridBlock``."""
        self.mixer.pack()
        self.mlp.pack()


C = TypeVar("C", bound=HybridConfig)
BlockBuilder: TypeAlias = Callable[[C, int, LayerIds, Parameters], HybridBlock]
"""Builder of a block from configuration, block number, layer ids and parameters."""


class HybridDecoder(Generic[C]):
    """The weights of a decoder with recurrent layers; a ``models.families.LoadedModel``."""

    def __init__(self, config: C, parameters: Parameters, values: Mapping[str, Any], block: BlockBuilder[C]) -> None:
        """Build the blocks from ``parameters`` of the name table; ``values`` is config.json."""
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
        """A tensor shared by embedding and head counts once."""
        self.parameter_bytes = sum(tensor.nbytes for tensor in parameters.values())

    def pack(self) -> bool:
        """Lay the weights out for this machine's kernels where that helps; return whether it did.

        The head of a tied model gets its own copy, since the embedding is read by rows.
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
        """Map int64 ``[T]`` to a fresh ``[T, E]`` in the residual stream's type."""
        x_TE = self.embedding(tokens_T)
        return x_TE.float() if self._wide else x_TE

    def head(self, x_RE: Tensor) -> Tensor:
        """Map ``[R, E]`` to float32 logits ``[R, V]``; only the product is in the model's dtype."""
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
    """Return the norm ``{name}.weight``, over the model width or over each head."""
    weight = parameters[f"{name}.weight"]
    if config.wide_residual:
        weight = weight.float()
    if config.trunk.norm == "rms":
        return RMSNorm(weight, config.trunk.norm_eps)
    norm = RMSNorm if weight.dtype == torch.float32 else WideRMSNorm
    return norm(weight.float() + 1.0, config.trunk.norm_eps)


def attention_of(config: HybridConfig, block: int, layer_id: int, parameters: Parameters) -> Attention:
    """Build a block's attention from ``{block}.qkv`` and ``{block}.out``, and for normed heads
    ``{block}.q_norm`` and ``{block}.k_norm``."""
    spec = config.trunk.layers[block]
    qkv, out = linear(parameters, f"{block}.qkv"), linear(parameters, f"{block}.out")
    if config.trunk.head_norms == "none":
        return Attention(layer_id, spec, qkv, out)
    q_norm, k_norm = (norm_of(config, parameters, f"{block}.{name}") for name in ("q_norm", "k_norm"))
    attention = GatedAttention if config.gated_attention else NormedAttention
    return attention(layer_id, spec, qkv, out, q_norm, k_norm)


def only_attending(config: HybridConfig, table: Mapping[str, Place]) -> dict[str, Place]:
    """Return a decoder's name table without attention in blocks that have none."""
    kept: dict[str, Place] = {}
    for name, place in table.items():
        if ".self_attn." not in name:
            kept[name] = place
            continue
        for block in config.attending:
            kept[name.format(block)] = replace(place, parameter=place.parameter.format(block))
    return kept


def respelled(table: Mapping[str, Place], spellings: Mapping[str, str]) -> dict[str, Place]:
    """Replace in each name the first part that ``spellings`` has."""
    found: dict[str, Place] = {}
    for name, place in table.items():
        theirs = next((part for part in spellings if part in name), "")
        found[name.replace(theirs, spellings[theirs]) if theirs else name] = place
    return found


def read_kinds(fields: ConfigFields, num_blocks: int, known: Mapping[str, bool]) -> tuple[int, ...]:
    """Read the blocks with attention from ``layer_types``; unknown kinds are ``Unsupported``."""
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_blocks:
        raise fields.error("layer_types", f"a list of {num_blocks} strings")
    for block, kind in enumerate(kinds):
        if not isinstance(kind, str) or kind not in known:
            raise Unsupported(f"{fields.source}: layer_types[{block}] is {kind!r}; expected one of {list(known)}")
    return tuple(block for block, kind in enumerate(kinds) if known[kind])


def read_taps(fields: ConfigFields, name: str, default: int) -> int:
    """Read the taps of a convolution, 2 or more: with one there is no state."""
    taps = fields.count(name, default)
    if taps < 2:
        raise fields.error(name, "an integer of 2 or more")
    return taps


def read_numbers(fields: ConfigFields, name: str, default: Sequence[float]) -> tuple[float, ...]:
    """Read as many finite numbers above 0 as ``default`` has; null or missing gives ``default``."""
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
