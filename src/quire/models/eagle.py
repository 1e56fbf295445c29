"""EAGLE-3 heads (arXiv:2503.01840) in their published format, ``LlamaForCausalLMEagle3``.

The head reads the outputs of a low, a middle and a high block of the target, which ``fc`` maps to
one hidden state. Its block is Llama's, but attention reads the normed embedding and the normed
hidden state side by side. It may have fewer tokens than the target: ``d2t`` has the difference
between the target's id and the head's, by the head's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, InvalidArgument, QuireError, Unsupported
from quire.contracts.block_calls import LayerKernels
from quire.contracts.model import Pass, num_blocks
from quire.models.config_fields import ConfigFields, refuse_unsupported
from quire.models.decoder import DecoderConfig, Parameters, attention_of, gated_mlp, linear, norm_of
from quire.models.families import LoadedModel
from quire.models.geometry import read_geometry
from quire.models.heads import Head, read_parameters, target_logits
from quire.models.rope_config import read_rope
from quire.models.sources import open_weights, read_config
from quire.models.tensor_names import LLAMA_NAMES, ignorable_names, name_table
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear
from quire.nn.packed import pack_maps, packed
from quire.weights.checkpoint import Checkpoint
from quire.weights.places import NameTable, Place

ARCHITECTURE = "LlamaForCausalLMEagle3"
NUM_READ = 3
"""Blocks of the target whose outputs a head reads."""
INTEGERS = ("I64", "I32")


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig:
    """The computation of a head."""

    trunk: DecoderConfig
    """Of one layer; its vocabulary is the target's."""
    draft_vocab: int
    target_width: int
    layers: tuple[int, ...]
    """The target's blocks whose outputs it reads."""
    fc_bias: bool


def read_eagle_config(values: Mapping[str, Any], target: LoadedModel, max_len: int) -> EagleConfig:
    """Read the head's config.json. ``max_len``: the longest sequence, which takes the place of the
    context that the head was trained with: positions only matter by their differences."""
    fields = ConfigFields(values)
    names = fields.get("architectures")
    if names != [ARCHITECTURE]:
        raise fields.error("architectures", f"[{ARCHITECTURE!r}]")
    geometry = read_geometry(fields, ARCHITECTURE, "llama", None)
    if geometry.num_layers != 1:
        raise Unsupported(
            f"{fields.source}: num_hidden_layers is {geometry.num_layers}; heads of 1 layer are supported"
        )
    if geometry.vocab_size != target.vocab_size:
        raise _of_another(fields, "vocab_size", f"the model's vocabulary, {target.vocab_size}")
    given = fields.get("draft_vocab_size")
    draft_vocab = geometry.vocab_size if given is None else fields.count("draft_vocab_size")
    if draft_vocab > geometry.vocab_size:
        raise fields.error("draft_vocab_size", f"at most vocab_size ({geometry.vocab_size})")
    width = geometry.hidden_size if fields.get("target_hidden_size") is None else fields.count("target_hidden_size")
    if width != target.hidden_size:
        name = "target_hidden_size" if fields.present("target_hidden_size") else "hidden_size"
        raise _of_another(fields, name, f"the model's width, {target.hidden_size}")
    trunk = DecoderConfig(
        **{**geometry.usual(fields), "tie_embeddings": False},
        layers=geometry.layers(read_rope(fields, geometry)),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    config = EagleConfig(
        trunk=replace(trunk, max_position=max(max_len, trunk.max_position)),
        draft_vocab=draft_vocab,
        target_width=width,
        layers=_layers(fields, num_blocks(target)),
        fc_bias=fields.flag("bias", False),
    )
    refuse_unsupported(fields)
    return config


def _of_another(fields: ConfigFields, name: str, expected: str) -> InvalidArgument:
    return InvalidArgument(f"{fields.source}: {name} is {fields.get(name)}; expected {expected}", field="speculative")


def _layers(fields: ConfigFields, num_blocks: int) -> tuple[int, ...]:
    """Return the blocks that ``eagle_config`` names, or those before the third block, the middle
    one and the third last."""
    section = fields.mapping("eagle_config")
    found = section.get("eagle_aux_hidden_state_layer_ids")
    if found is None:
        found = [1, num_blocks // 2 - 1, num_blocks - 4]
    whole = isinstance(found, list) and all(type(one) is int and 0 <= one < num_blocks for one in found)
    if not whole or len(found) != NUM_READ:
        raise CheckpointError(
            f"{fields.source}: the head reads the outputs of blocks {found}; expected {NUM_READ} of the model's, "
            f"0 to {num_blocks - 1}"
        )
    return tuple(found)


def eagle_spellings(config: EagleConfig, *, embeds: bool, heads: bool) -> tuple[NameTable, ...]:
    """Return the name tables with the layer as ``midlayer`` and as ``layers.0``. ``embeds``,
    ``heads``: whether the checkpoint has an embedding and a head of its own."""
    trunk = config.trunk
    width = trunk.hidden_size
    table: dict[str, Place] = {}
    for name, place in name_table(trunk, replace(LLAMA_NAMES, trunk="")).items():
        name, place = name.format(0), replace(place, parameter=place.parameter.format(0))
        if place.parameter.startswith("0.qkv.") and len(place.shape) == 2:
            place = replace(place, shape=(place.shape[0], 2 * width))
        if place.parameter == "head.weight":
            place = replace(place, shape=(config.draft_vocab, width))
        if (place.parameter != "embed.weight" or embeds) and (place.parameter != "head.weight" or heads):
            table[name] = place
    table["layers.0.hidden_norm.weight"] = Place(parameter="0.state_norm.weight", shape=(width,))
    table["fc.weight"] = Place(parameter="fc.weight", shape=(width, NUM_READ * config.target_width))
    if config.fc_bias:
        table["fc.bias"] = Place(parameter="fc.bias", shape=(width,))
    return {name.replace("layers.0.", "midlayer."): place for name, place in table.items()}, table


class EagleBlock:
    """Llama's block over a hidden state, with attention over embedding and hidden state."""

    def __init__(self, config: DecoderConfig, parameters: Parameters) -> None:
        def norm(name: str) -> Any:
            return norm_of(config, parameters[f"0.{name}.weight"])

        (spec,) = config.layers
        self.embedding_norm, self.state_norm, self.mlp_norm = map(norm, ("attention_norm", "state_norm", "mlp_norm"))
        self.attention = attention_of(config, 0, spec, parameters)
        self.mlp = gated_mlp(config, 0, parameters)

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map embeddings and hidden states, rows ``[T, 2E]`` of a head, to a fresh ``[T, E]``."""
        e_TE, x_TE = (part.contiguous() for part in x_TE.chunk(2, dim=-1))
        y_TE: Tensor = self.attention(torch.cat((self.embedding_norm(e_TE), self.state_norm(x_TE)), dim=-1), pass_)
        return self.mlp(self.mlp_norm.after_sum(y_TE, x_TE)).add_(y_TE)


class EagleHead(Head):
    fc: Linear
    ids: list[int] | None = None
    """The target's id of each token; None: the same."""

    def states(self, features: Sequence[Tensor]) -> Tensor:
        return self.fc(torch.cat(list(features), dim=-1).to(self.dtype))

    def following(self, y_TE: Tensor) -> Tensor:
        """See ``Head``: the output itself, without the norm."""
        return y_TE

    def target_ids(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens) if self.ids is None else [self.ids[token] for token in tokens]


def load_eagle(path: Path, target_path: Path, target: LoadedModel, max_len: int, kernels: LayerKernels) -> EagleHead:
    """Load an EAGLE-3 head for ``target``, whose checkpoint is in ``target_path``. Embedding and
    map to logits are the target's, unless the head has them.

    Raise ``InvalidArgument`` for a head of another model, ``CheckpointError`` for a damaged one,
    ``Unsupported`` for what is not computed.
    """
    try:
        if getattr(target, "fallback", False):
            raise Unsupported(f"transformers runs {target.architecture}, which shows no outputs of its layers")
        values = read_config(path)
        config = read_eagle_config(values, target, max_len)
        with Checkpoint(open_weights(path)) as checkpoint:
            return _loaded(path, checkpoint, config, target_path, target, kernels)
    except QuireError as error:
        error.about(f"speculative: the head {path}")
        raise


def _loaded(
    path: Path,
    checkpoint: Checkpoint,
    config: EagleConfig,
    target_path: Path,
    target: LoadedModel,
    kernels: LayerKernels,
) -> EagleHead:
    trunk, dtype, device = config.trunk, target.dtype, target.device
    embeds, heads = "embed_tokens.weight" in checkpoint.tensors, "lm_head.weight" in checkpoint.tensors
    same_width = trunk.hidden_size == target.hidden_size
    # A head without some of these uses the target's.
    embeds = embeds or not same_width
    heads = heads or not same_width or config.draft_vocab != trunk.vocab_size
    places = checkpoint.choose(eagle_spellings(config, embeds=embeds, heads=heads))
    ignorable = {*ignorable_names(trunk, replace(LLAMA_NAMES, trunk="")).names, "d2t", "t2d"}
    checkpoint.check(places, ignorable | {"midlayer.self_attn.rotary_emb.inv_freq"})
    ids = _target_ids(checkpoint, config)
    parameters = read_parameters(checkpoint, places, dtype, device)
    block = EagleBlock(trunk, parameters)
    embed = Embedding(parameters["embed.weight"]) if embeds else target.embed
    head = EagleHead(
        path,
        ARCHITECTURE,
        layers=config.layers,
        spec=trunk.layers[0],
        block=block,
        width=trunk.hidden_size,
        vocab_size=config.draft_vocab,
        max_position=trunk.max_position,
        dtype=dtype,
        device=device,
        embed=embed,
        parameters=parameters,
    )
    head.ids = ids
    head.norm = norm_of(trunk, parameters["norm.weight"])
    if heads:
        head.lm_head = packed(linear(parameters, "head"), kernels.of_head())
    else:
        with Checkpoint(open_weights(target_path)) as theirs:
            head.lm_head = target_logits(theirs, target, kernels)
    head.fc = packed(linear(parameters, "fc"), kernels)
    for part in (block, head.norm):
        pack_maps(part, kernels)
    return head


def _target_ids(checkpoint: Checkpoint, config: EagleConfig) -> list[int] | None:
    """Return the target's id of each token of the head. ``CheckpointError`` for one that the target
    does not have."""
    count, vocab = config.draft_vocab, config.trunk.vocab_size
    if "d2t" not in checkpoint.tensors:
        if count != vocab:
            raise CheckpointError(
                f"d2t is missing; expected it where draft_vocab_size ({count}) is not vocab_size ({vocab})"
            )
        return None
    header = checkpoint.tensors["d2t"]
    if header.shape != (count,) or header.dtype not in INTEGERS:
        raise CheckpointError(
            f"d2t is {header.dtype} {list(header.shape)}; expected draft_vocab_size ({count}) integers of type {INTEGERS}"
        )
    ids: list[int] = (checkpoint.source.read("d2t").long() + torch.arange(count)).tolist()
    bad = next((token for token, id in enumerate(ids) if not 0 <= id < vocab), None)
    if bad is not None:
        raise CheckpointError(f"d2t makes its token {bad} the model's {ids[bad]}; expected 0 to {vocab - 1}")
    return ids
