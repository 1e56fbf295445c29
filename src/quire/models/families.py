"""Which architectures there are: the one registry from a name in ``config.json`` to the code that builds it.

A family is one file with three functions (read the configuration, name the tensors, build the model) and a line here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from quire.contracts.model import Model
from quire.errors import CheckpointError, Unsupported
from quire.models import llama
from quire.models.checkpoint import NameTable
from quire.models.config import DecoderConfig
from quire.registry import Registry

C = TypeVar("C")


class LoadedModel(Model, Protocol):
    """A model that came from a checkpoint."""

    dtype: torch.dtype
    """Of weights and activations."""
    device: torch.device
    num_parameters: int
    tied: bool
    """Whether the head is the embedding."""
    parameter_bytes: int
    """Bytes of weights on ``device``; tied weights count once, or twice if the head was packed."""
    config: dict[str, Any]
    """``config.json`` as it was read."""
    canonical_config: str
    """Canonical JSON of what decides the logits; the same for every spelling of the same model."""

    def pack(self) -> bool:
        """Lay the weights out for this machine's kernels, where that helps; says whether it did."""
        ...


@dataclass(frozen=True, kw_only=True)
class Family(Generic[C]):
    """How checkpoints of one architecture become models. ``C`` is the family's type of configuration."""

    state_kinds: tuple[str, ...]
    """Kinds of layer state, as in ``LayerSpec.kind``."""
    read_config: Callable[[Mapping[str, Any]], C]
    """From ``config.json``; ``CheckpointError`` for bad values, ``Unsupported`` for what is not computed."""
    num_layers: Callable[[C], int]
    name_table: Callable[[C], NameTable]
    ignorable_names: Callable[[C], Collection[str]]
    build: Callable[[C, Mapping[str, Tensor], Mapping[str, Any]], LoadedModel]


FAMILIES: Registry[Family[Any]] = Registry("architecture")


def _llama_like(read_config: Callable[[Mapping[str, Any]], DecoderConfig]) -> Family[DecoderConfig]:
    return Family(
        state_kinds=("full",),
        read_config=read_config,
        num_layers=lambda config: config.num_layers,
        name_table=llama.name_table,
        ignorable_names=llama.ignorable_names,
        build=llama.Decoder,
    )


FAMILIES.register("LlamaForCausalLM", _llama_like(llama.read_llama_config))
FAMILIES.register("MistralForCausalLM", _llama_like(llama.read_mistral_config))
FAMILIES.register("Qwen2ForCausalLM", _llama_like(llama.read_qwen2_config))
FAMILIES.register("Qwen3ForCausalLM", _llama_like(llama.read_qwen3_config))


def family_of(values: Mapping[str, Any]) -> Family[Any]:
    """The family that ``architectures`` in config.json names.

    ``CheckpointError`` if it does not name exactly one, ``Unsupported`` (with the list of known ones) if it is unknown.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        found = repr(names) if "architectures" in values else "missing"
        raise CheckpointError(
            f"config.json: architectures is {found}; expected one of {FAMILIES.list_names()} in a list"
        )
    family = FAMILIES.get(names[0])
    if family is None:
        raise Unsupported(f"architecture {names[0]!r} is not supported; known ones: {', '.join(FAMILIES)}")
    return family
