"""How rows of K and V lie in pages: ``KVFormat``, a value, and ``KVView``, what kernels take.

A format packs the rows of tokens into *planes*: named tensors that have a fixed shape for each
token. Pages and files hold planes. Only formats, and the kernels that name them, know what is in a
plane.

Letters: S slots of a pool; N rows; H KV heads; Dk, Dv head sizes of K and V.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.base.errors import Unsupported

PLAIN = "plain"
"""Name of the format of rows that lie as they were written."""


class Geometry(NamedTuple):
    """The geometry of a layer's rows; layers of equal geometry are stored together."""

    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool
    """V is the first ``value_dim`` columns of K."""


class Plane(NamedTuple):
    """One tensor of a layer's rows, for one token."""

    shape: tuple[int, ...]
    """At least one size."""
    dtype: torch.dtype


class KVView(Protocol):
    """The rows of one layer in memory, by slot; made once for each layer. A kernel reads the
    classes of views that it knows in its own way. ``keys``, ``values`` and ``write`` are the
    reference."""

    @property
    def format(self) -> str:
        """Name of the format."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, Dk and Dv."""

    def keys(self, slots_N: Tensor) -> Tensor:
        """Return K of these slots (int64), fresh: ``[N, H, Dk]``."""

    def values(self, slots_N: Tensor) -> Tensor:
        """Return V of these slots, fresh: ``[N, H, Dv]``."""

    def write(self, slots_N: Tensor, k_NHD: Tensor, v_NHD: Tensor | None) -> None:
        """Write rows to distinct slots. ``v_NHD`` is None exactly for a latent layer."""


class PlainRows(NamedTuple):
    """Rows of one layer as they were written; over a pool, a ``KVView`` in the plain format."""

    k: Tensor
    """``[S, H, Dk]``"""
    v: Tensor
    """``[S, H, Dv]``; of a latent layer a view of ``k``"""

    @property
    def format(self) -> str:
        return PLAIN

    @property
    def sizes(self) -> tuple[int, int, int]:
        _, heads, key_dim = self.k.shape
        return heads, key_dim, self.v.shape[2]

    def keys(self, slots_N: Tensor) -> Tensor:
        return self.k.index_select(0, slots_N)

    def values(self, slots_N: Tensor) -> Tensor:
        return self.v.index_select(0, slots_N)

    def write(self, slots_N: Tensor, k_NHD: Tensor, v_NHD: Tensor | None) -> None:
        self.k.index_copy_(0, slots_N, k_NHD)
        if v_NHD is not None:
            self.v.index_copy_(0, slots_N, v_NHD)


def plain_rows(view: KVView, kernel: str) -> PlainRows:
    """Return a view of plain rows; ``Unsupported``, for the named kernel, of another format."""
    if not isinstance(view, PlainRows):
        raise Unsupported(format_refusal(kernel, view.format))
    return view


def format_refusal(kernel: str, name: str) -> str:
    """Return the reason for a kernel of plain rows to refuse a format; "" if it is plain."""
    return "" if name == PLAIN else f"the {kernel} attention reads rows of the format {PLAIN!r}; these are {name!r}"


class KVFormat(ABC):
    """How rows of K and V lie in pages. A new format is one heir, and the kernels that know it.

    Planes of zeros are finite rows. Rows of different tokens do not depend on each other. Packing
    rows that were expanded gives the same planes: K stays where only V is overwritten.
    """

    name: ClassVar[str]
    """Its name in files and layout hashes, and for kernels."""
    dtype: torch.dtype
    """Of the rows that are written and read."""

    @abstractmethod
    def planes(self, shape: Geometry) -> Mapping[str, Plane]:
        """Return the planes of such rows, by name."""

    @abstractmethod
    def pack(self, shape: Geometry, k_NHD: Tensor, v_NHD: Tensor | None) -> Mapping[str, Tensor]:
        """Return the planes ``[N, ...]`` of rows; ``v_NHD`` is None exactly for latent rows."""

    @abstractmethod
    def expand(self, shape: Geometry, planes: Mapping[str, Tensor]) -> PlainRows:
        """Return the rows of planes ``[N, ...]``: the reference of all kernels."""

    def bytes_per_row(self, shape: Geometry) -> int:
        """Return the bytes of one token."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.planes(shape).values())

    def view(self, shape: Geometry, planes: Mapping[str, Tensor]) -> KVView:
        """Return the view for kernels of a layer with these planes ``[S, ...]``."""
        return PackedRows(self, shape, planes)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """A ``KVView`` over any format, which the reference attention reads. It packs rows when they
    are written, and expands them when they are read."""

    packing: KVFormat
    shape: Geometry
    planes: Mapping[str, Tensor]

    @property
    def format(self) -> str:
        return self.packing.name

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.shape[:3]

    def keys(self, slots_N: Tensor) -> Tensor:
        return self._rows(slots_N).k

    def values(self, slots_N: Tensor) -> Tensor:
        return self._rows(slots_N).v

    def _rows(self, slots_N: Tensor) -> PlainRows:
        found = {name: plane.index_select(0, slots_N) for name, plane in self.planes.items()}
        return self.packing.expand(self.shape, found)

    def write(self, slots_N: Tensor, k_NHD: Tensor, v_NHD: Tensor | None) -> None:
        for name, packed in self.packing.pack(self.shape, k_NHD, v_NHD).items():
            self.planes[name].index_copy_(0, slots_N, packed)
