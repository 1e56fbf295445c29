"""Heads that draft: small models that read hidden states of a larger one, their *target*.

A row of a head is the embedding of a token and, beside it, the hidden state of the position before.
A head has one block and a KV state of its own. Its output tells the token after the row's, and
stands for the hidden state of the row's token until the target has computed that.

Letters: T rows, R rows for the logits, E width of the head, D its vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import LayerSpec
from quire.contracts.model import Block
from quire.nn.linear import Linear
from quire.nn.packed import packed
from quire.weights.checkpoint import Checkpoint
from quire.weights.lazy_parameters import allocate
from quire.weights.places import NameTable, Place, parameter_dtypes, parameter_shapes

Map = Callable[[Tensor], Tensor]
EMBEDDING, LOGITS = "embed.weight", "head.weight"
"""The parameters that a head may share with its target."""


class Head(ABC):
    """A head as ``contracts.model.Model``. Its tokens are placeholders, whose embeddings are its
    rows."""

    stack = None
    wide = None
    norm: Map
    lm_head: Map

    def __init__(
        self,
        path: Path,
        architecture: str,
        *,
        layers: tuple[int, ...],
        spec: LayerSpec,
        block: Block,
        width: int,
        vocab_size: int,
        max_position: int,
        dtype: torch.dtype,
        device: torch.device,
        embed: Map,
        parameters: Mapping[str, Tensor],
    ) -> None:
        """``layers``: the target's blocks whose outputs it reads. ``embed``: maps the target's
        tokens to embeddings ``[T, E]``."""
        self.path, self.architecture, self.layers = path, architecture, layers
        self.layer_specs: Sequence[LayerSpec] = (spec,)
        self.blocks: Sequence[Block] = (block,)
        self.vocab_size, self.max_position = vocab_size, max_position
        self.hidden_size = 2 * width
        self.dtype, self.device = dtype, device
        self._embed = embed
        self.num_parameters = sum(one.numel() for one in parameters.values())
        self.parameter_bytes = sum(one.nbytes for one in parameters.values())

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return rows of zeros ``[T, 2E]``, in which embeddings take the places of placeholders."""
        return torch.zeros(len(tokens_T), self.hidden_size, dtype=self.dtype, device=self.device)

    def rows(self, tokens_T: Tensor, states_TE: Tensor) -> Tensor:
        """Return the rows ``[T, 2E]`` of the target's tokens behind these hidden states."""
        return torch.cat((self._embed(tokens_T).to(self.dtype), states_TE), dim=-1)

    @abstractmethod
    def states(self, features: Sequence[Tensor]) -> Tensor:
        """Return the hidden states ``[T, E]`` that the head reads, of outputs of the blocks
        ``layers``."""

    @abstractmethod
    def following(self, y_TE: Tensor) -> Tensor:
        """Map the block's output to the estimates of the next rows' hidden states."""

    def head(self, x_RE: Tensor) -> Tensor:
        """Return float32 logits ``[R, D]`` of the block's output."""
        return self.lm_head(self.norm(x_RE)).float()

    def target_ids(self, tokens: Sequence[int]) -> list[int]:
        """Return the target's ids of the head's tokens."""
        return list(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftLayer:
    """A layer of a checkpoint that drafts (multi-token prediction), as a model of one block."""

    config: Any
    """That of the model, of the same family."""
    names: Mapping[str, str]
    """Beginnings of names of its tensors, and what they are in the checkpoint."""
    prefix: str
    """What its names there begin with."""
    embedding_norm: str
    state_norm: str
    project: str
    """The tensors around the block: norms of embedding and hidden state, and the map of both to a
    hidden state."""


def target_logits(checkpoint: Checkpoint, target: Any, kernels: LayerKernels) -> Map:
    """Return a target's map to logits. If ranks divide its rows, or another stage has it, this
    process reads all of them once more, from the target's checkpoint, since heads draft without the
    other ranks."""
    if not target.whole_specs and target.stages is None:
        found: Map = target.lm_head
        return found
    names = {place.parameter: name for name, place in target.places.items()}
    name = names.get(LOGITS, names[EMBEDDING])
    shape = (target.vocab_size, target.hidden_size)
    places = checkpoint.choose([{name: Place(parameter=LOGITS, shape=shape)}])
    parameters = read_parameters(checkpoint, places, target.dtype, target.device)
    return packed(Linear(parameters[LOGITS]), kernels.of_head())


def read_parameters(
    checkpoint: Checkpoint, places: NameTable, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Read all parameters of a small model at once."""
    parameters, _ = allocate(parameter_shapes(places), dtype, device, parameter_dtypes(places))
    for name, place in places.items():
        checkpoint.fill(name, place, parameters[place.parameter])
    return parameters
