"""Weights in checkpoints: how they lie in a file (a format), and what reads the file (a source).

A new format is one file in ``quire.weights``, and its kernels. A new kind of checkpoint is one more
``WeightSource``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from quire.contracts.linear import CodeRows


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """The header of one tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The element type, by its safetensors name, or the format of blocks, by its name in GGUF."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor that a checkpoint must have."""

    shape: tuple[int, ...]
    dtypes: Collection[str]
    """Accepted element types, as in ``TensorHeader``."""
    others: Collection[tuple[int, ...]] = ()
    """Other accepted shapes."""


class WeightFormat(Protocol):
    """How the weights of one map, or of a stack of maps, lie in the tensors of a checkpoint."""

    @property
    def name(self) -> str:
        """The name that errors and logs give."""

    @property
    def is_plain(self) -> bool:
        """Whether the first stored tensor is the weights themselves, row by row."""

    def stored(self, name: str, shape: tuple[int, ...]) -> Mapping[str, StoredTensor]:
        """Return the stored tensors of weights of this shape, first the tensor ``name`` or the one
        that replaces it. ``Unsupported`` for a shape that the format does not have."""

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """Write the weights to ``out``, in its dtype. This is the definition of the format.

        ``CheckpointError`` with ``name`` for values that the format does not have, ``Unsupported``
        if the dtype of ``out`` cannot hold a value of a quantised format.
        """


@runtime_checkable
class CodedFormat(WeightFormat, Protocol):
    """A format of codes with scales, which a kernel may multiply as they are."""

    @property
    def bits(self) -> int:
        """The bits of a code."""

    def code_rows(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, ...]) -> CodeRows | None:
        """Return the codes of all rows, with their columns in the order of groups; None if groups
        differ in size. Raise as ``expand``."""


class WeightSource(Protocol):
    """The open files of a checkpoint."""

    @property
    def path(self) -> Path:
        """The directory or file that the user named."""

    @property
    def configuration(self) -> str:
        """The name, in errors, of what describes the model: config.json."""

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        """The headers of all tensors, by name."""

    def format(self, name: str, usual: WeightFormat) -> WeightFormat:
        """Return the format of a tensor that checkpoints of its family usually store as ``usual``.

        ``Unsupported`` for a format that is neither multiplied nor expanded.
        """

    def read(self, name: str) -> Tensor:
        """Return a tensor as it lies in its file, through a memory map.

        ``CheckpointError`` if it cannot be read.
        """

    def slices(self) -> dict[str, Any]:
        """Return all tensors as lazy slices, for transformers."""

    def close(self) -> None:
        """Close the files."""
