"""Heads for multi-token prediction (arXiv:2412.19437) that a model's own checkpoint carries.

Such a head maps the normed embedding and the normed hidden state together to a hidden state, on
which a block of the model's family runs. The target's hidden state is the output of its last block
behind its final norm. Embedding and logits are the target's, unless the checkpoint has others. Of
several layers the first one drafts all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import QuireError, Unsupported
from quire.contracts.block_calls import LayerKernels
from quire.contracts.model import Block, Pass, num_blocks
from quire.models.blocks import Joinable
from quire.models.decoder import DecoderConfig, Trunk, norm_of
from quire.models.families import family_of
from quire.models.heads import EMBEDDING, LOGITS, DraftLayer, Head, Map, read_parameters, target_logits
from quire.models.sources import open_weights
from quire.nn.embedding import Embedding
from quire.nn.linear import Linear
from quire.nn.packed import pack_maps, packed
from quire.weights.checkpoint import Checkpoint
from quire.weights.places import Place, expand


class JoinedInput:
    """A block whose rows are maps of embeddings and hidden states."""

    def __init__(self, embedding_norm: Map, state_norm: Map, project: Linear, block: Block) -> None:
        self.embedding_norm, self.state_norm, self.project, self.block = embedding_norm, state_norm, project, block

    def __call__(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        """Map embeddings and hidden states, rows ``[T, 2E]`` of a head, to a fresh ``[T, E]``."""
        e_TE, h_TE = (part.contiguous() for part in x_TE.chunk(2, dim=-1))
        return self.block(self.project(torch.cat((self.embedding_norm(e_TE), self.state_norm(h_TE)), dim=-1)), pass_)


class MtpHead(Head):
    """A head of a model's own checkpoint."""

    target_norm: Map

    def states(self, features: Sequence[Tensor]) -> Tensor:
        return self.target_norm(features[0]).to(self.dtype)

    def following(self, y_TE: Tensor) -> Tensor:
        """See ``Head``: normed, as the target's are."""
        return self.norm(y_TE)


class _OtherTensors:
    """The tensors that a head does not read: the model's, and later drafting layers."""

    def __init__(self, layer: DraftLayer, unread: Sequence[str]) -> None:
        self._layer, self._unread = layer, frozenset(unread)

    def __contains__(self, name: object) -> bool:
        prefix, own = self._layer.prefix, self._layer.names["model.layers.0."]
        if not isinstance(name, str) or not name.startswith(prefix) or name in self._unread:
            return True
        later = name.startswith(f"{prefix}layers.") and not name.startswith(own)
        return later or name.endswith(".rotary_emb.inv_freq")


def load_mtp(path: Path, target: Any, kernels: LayerKernels) -> MtpHead:
    """Load the head that the checkpoint of ``target``, a native model, has for it.

    Raise ``Unsupported`` for a model without such a layer, and ``CheckpointError`` for an
    incomplete or damaged one.
    """
    try:
        layer, family = None, None
        if isinstance(target, Trunk):
            family = family_of(target.config)
            layer = family.draft_layer(family.read_config(target.config, target.max_model_len))
        if layer is None or family is None:
            raise Unsupported(
                f"{path} has no layers that draft, by its config.json; lookup and draft models suit any model",
                field="speculative",
                given="mtp",
            )
        with Checkpoint(open_weights(path)) as checkpoint:
            return _loaded(path, checkpoint, layer, family, target, kernels)
    except QuireError as error:
        error.about("speculative: mtp")
        raise


def _loaded(
    path: Path, checkpoint: Checkpoint, layer: DraftLayer, family: Any, target: Trunk, kernels: LayerKernels
) -> MtpHead:
    dtype, device = target.dtype, target.device
    tables = [_respelled(layer, expand(table, 1)) for table in family.name_tables(layer.config)]
    own = _own_tables(checkpoint, target, tables[0])
    shared = [name for name, place in tables[0].items() if place.parameter in (EMBEDDING, LOGITS) and name not in own]
    config: DecoderConfig = getattr(layer.config, "trunk", layer.config)
    width = config.hidden_size
    around = {
        layer.embedding_norm: Place(parameter="embedding_norm.weight", shape=(width,)),
        layer.state_norm: Place(parameter="state_norm.weight", shape=(width,)),
        layer.project: Place(parameter="project.weight", shape=(width, 2 * width)),
    }
    places = checkpoint.choose(
        [{name: place for name, place in table.items() if name not in shared} | around for table in tables]
    )
    checkpoint.check(places, _OtherTensors(layer, shared))
    parameters = read_parameters(checkpoint, places, dtype, device)
    # The model of one block has neither: these rows are not used.
    unused = {name: torch.zeros(1, width, dtype=dtype, device=device) for name in (EMBEDDING, LOGITS)}
    alone = family.build(layer.config, {**unused, **parameters}, target.config)
    (inner,), (spec,) = alone.blocks, alone.layer_specs
    embedding_norm, state_norm = (norm_of(config, parameters[f"{name}_norm.weight"]) for name in ("embedding", "state"))
    block = JoinedInput(embedding_norm, state_norm, Linear(parameters["project.weight"]), inner)
    for part in (block, alone.norm):
        pack_maps(part, kernels)
    if isinstance(inner, Joinable):
        inner.join(kernels)
    head = MtpHead(
        path,
        target.architecture,
        layers=(num_blocks(target) - 1,),
        spec=spec,
        block=block,
        width=width,
        vocab_size=target.vocab_size,
        max_position=target.max_position,
        dtype=dtype,
        device=device,
        embed=Embedding(parameters[EMBEDDING]) if EMBEDDING in parameters else target.embed,
        parameters=parameters,
    )
    head.target_norm, head.norm = _final_norm(checkpoint, target, config, kernels), alone.norm
    own_head = parameters.get(LOGITS)
    if own_head is None:
        head.lm_head = target_logits(checkpoint, target, kernels)
    else:
        head.lm_head = packed(Linear(own_head), kernels.of_head())
    return head


def _final_norm(checkpoint: Checkpoint, target: Trunk, config: DecoderConfig, kernels: LayerKernels) -> Map:
    """Return the target's final norm, which this process reads if only the last stage has it."""
    if target.stages is None:
        return target.norm
    places = {name: place for name, place in target.places.items() if place.parameter == "norm.weight"}
    parameters = read_parameters(checkpoint, places, target.dtype, target.device)
    norm = norm_of(config, parameters["norm.weight"])
    pack_maps(norm, kernels)
    return norm


def _respelled(layer: DraftLayer, table: Mapping[str, Place]) -> dict[str, Place]:
    """Return a name table of the model of one block with the names of the checkpoint."""
    found = {}
    for name, place in table.items():
        begin = next(one for one in layer.names if name.startswith(one))
        found[layer.names[begin] + name.removeprefix(begin)] = place
    return found


def _own_tables(checkpoint: Checkpoint, target: Trunk, table: Mapping[str, Place]) -> list[str]:
    """Return the names of the layer's embedding and head, if they differ from the model's."""
    names = {place.parameter: name for name, place in target.places.items()}
    own = []
    for name, place in table.items():
        if place.parameter in (EMBEDDING, LOGITS) and name in checkpoint.tensors:
            theirs = names.get(place.parameter, names[EMBEDDING])
            if not checkpoint.are_equal(name, theirs):
                own.append(name)
    return own
