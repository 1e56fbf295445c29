"""The plain format: rows of K and V lie in pages as they were written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quire.contracts.kv_format import PLAIN, Geometry, KVFormat, PlainRows, Plane


@dataclass(frozen=True, slots=True)
class PlainFormat(KVFormat):
    """Rows of one dtype: ``k [H, Dk]`` and ``v [H, Dv]``, or ``latent [row]``."""

    name: ClassVar[str] = PLAIN
    dtype: torch.dtype

    def planes(self, shape: Geometry) -> Mapping[str, Plane]:
        if shape.latent:
            return {"latent": Plane((shape.key_dim,), self.dtype)}
        sizes = {"k": shape.key_dim, "v": shape.value_dim}
        return {name: Plane((shape.kv_heads, size), self.dtype) for name, size in sizes.items()}

    def pack(self, shape: Geometry, k_NHD: Tensor, v_NHD: Tensor | None) -> Mapping[str, Tensor]:
        """See ``KVFormat``. The planes share memory with the rows."""
        return {"latent": k_NHD.squeeze(1)} if v_NHD is None else {"k": k_NHD, "v": v_NHD}

    def expand(self, shape: Geometry, planes: Mapping[str, Tensor]) -> PlainRows:
        """See ``KVFormat``. The rows share memory with the planes."""
        if not shape.latent:
            return PlainRows(planes["k"], planes["v"])
        k_N1R = planes["latent"].unsqueeze(1)
        return PlainRows(k_N1R, k_N1R[..., : shape.value_dim])

    def view(self, shape: Geometry, planes: Mapping[str, Tensor]) -> PlainRows:
        return self.expand(shape, planes)
