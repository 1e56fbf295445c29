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
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from quire.contracts.layers import LayerSpec, Recurrent
from quire.contracts.model import Block
from quire.contracts.ranks import Share
from quire.models import decoder
from quire.models.blocks import Mixer, Norm, SerialBlock
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderConfig, Parameters, Trunk, gated_mlp, linear, serial_block
from quire.models.mixture import MixtureConfig, mixture_mlp
from quire.nn.attention import Attention, GatedAttention, HeadGatedAttention, NormedAttention
from quire.nn.norm import RMSNorm
from quire.weights.places import Place


class MixerShape(Protocol):
    """The sizes of a recurrent mixer (``nn.mamba``, ``nn.delta``, ``nn.short_conv``): a frozen
    dataclass of numbers."""

    def spec(self, dtype: torch.dtype) -> Recurrent:
        """Return the state of a layer of a model in ``dtype``."""
        ...

    def divided(self, share: Share) -> Self:
        """Return the sizes of one rank's mixer. ``Unsupported`` if heads do not divide."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    OWN: ClassVar[tuple[str, ...]] = ()
    """Fields that a family adds to ``canonical``, of JSON types."""

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
    gated_heads: bool = False
    """Whether a sigmoid of the input multiplies the output of each head of attention."""
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
            **({"gated_heads": True} if self.gated_heads else {}),
            **{name: getattr(self, name) for name in self.OWN},
        }
        return json.dumps(plain, sort_keys=True, separators=(",", ":"))

    def divided(self, share: Share) -> Self:
        """See ``DecoderConfig``."""
        return replace(self, trunk=self.trunk.divided(share), mixer=self.mixer.divided(share))

    @property
    def num_layers(self) -> int:
        """Number of blocks, under the name that the tables of tensor names use."""
        return self.num_blocks


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


C = TypeVar("C", bound=HybridConfig)
BlockBuilder: TypeAlias = Callable[[C, int, LayerIds, Parameters], Block]
"""Builder of a block from configuration, block number, layer ids and parameters."""
MixerBuilder: TypeAlias = Callable[[C, int, int, Parameters], Mixer]
"""Builder of a recurrent mixer from configuration, block number, layer id and parameters."""


class HybridDecoder(Trunk, Generic[C]):
    """The weights of a decoder with recurrent layers."""

    def __init__(self, config: C, parameters: Parameters, values: Mapping[str, Any], block: BlockBuilder[C]) -> None:
        """Build the blocks by ``block``; see ``Trunk``."""
        norm = norm_of(config, parameters, "norm")
        super().__init__(config.trunk, config.canonical(), parameters, values, norm)
        ids = layer_ids(config)
        self.layer_specs = _specs(config, ids, self.dtype)
        self.blocks = [block(config, number, one, parameters) for number, one in enumerate(ids)]
        self._wide = config.wide_residual

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Map int64 ``[T]`` to a fresh ``[T, E]`` in the residual stream's type."""
        x_TE = self.embedding(tokens_T)
        return x_TE.float() if self._wide else x_TE


def mixed_block(config: C, block: int, ids: LayerIds, parameters: Parameters, *, mixer: MixerBuilder[C]) -> SerialBlock:
    """Build a block of attention or of ``mixer``, and an MLP or, in a mixture, experts."""
    trunk = config.trunk
    if ids.attention is None:
        assert ids.recurrent is not None
        part = mixer(config, block, ids.recurrent, parameters)
    else:
        part = attention_of(config, block, ids.attention, parameters)
    if isinstance(trunk, MixtureConfig):
        mlp = mixture_mlp(trunk, block, parameters)
    else:
        mlp = gated_mlp(trunk, block, parameters)
    return serial_block(trunk, part, mlp, lambda name: norm_of(config, parameters, f"{block}.{name}"))


def _specs(config: HybridConfig, ids: Sequence[LayerIds], dtype: torch.dtype) -> tuple[LayerSpec, ...]:
    specs: list[LayerSpec] = []
    for block, one in enumerate(ids):
        if one.attention is not None:
            specs.append(config.trunk.layers[block])
        if one.recurrent is not None:
            specs.append(config.mixer.spec(dtype))
    return tuple(specs)


def norm_of(config: HybridConfig, parameters: Parameters, name: str) -> Norm:
    """Return the norm ``{name}.weight`` over the model width. Results have the dtype of the
    weights, also of a wide residual stream."""
    weight = parameters[f"{name}.weight"]
    if config.wide_residual:
        return RMSNorm(weight.float(), config.trunk.norm_eps, weight.dtype)
    return decoder.norm_of(config.trunk, weight)


def attention_of(config: HybridConfig, block: int, layer_id: int, parameters: Parameters) -> Attention:
    """Build a block's attention; see ``decoder.attention_of``."""
    normed: Callable[..., NormedAttention] = GatedAttention if config.gated_attention else NormedAttention
    if config.gated_heads:
        normed = partial(HeadGatedAttention, gate=linear(parameters, f"{block}.gate"))
    spec = config.trunk.layers[block]
    return decoder.attention_of(config.trunk, block, spec, parameters, layer_id=layer_id, normed=normed)


def only_attending(config: HybridConfig, table: Mapping[str, Place]) -> dict[str, Place]:
    """Return a decoder's name table without the attention of blocks that have none."""
    kept: dict[str, Place] = {}
    for name, place in table.items():
        if ".self_attn." not in name:
            kept[name] = place
            continue
        for block in config.attending:
            kept[name.format(block)] = replace(place, parameter=place.parameter.format(block))
    return kept


def respelled(table: Mapping[str, Place], spellings: Mapping[str, str]) -> dict[str, Place]:
    """Replace in each name the first part that occurs in ``spellings``."""
    found: dict[str, Place] = {}
    for name, place in table.items():
        theirs = next((part for part in spellings if part in name), "")
        found[name.replace(theirs, spellings[theirs]) if theirs else name] = place
    return found


def split_blocks(attends: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of ``HybridConfig`` for blocks with either attention or a mixer."""
    return {
        "num_blocks": len(attends),
        "attending": tuple(block for block, one in enumerate(attends) if one),
        "recurrent": tuple(block for block, one in enumerate(attends) if not one),
    }


def read_taps(fields: ConfigFields, name: str, default: int) -> int:
    """Read the taps of a convolution, 2 or more: with one there is no state."""
    taps = fields.count(name, default)
    if taps < 2:
        raise fields.error(name, "an integer of 2 or more")
    return taps
