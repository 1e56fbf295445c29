"""A lossy format of K and V, and the oracles of the suites with rows in that format.

``Int8Rows`` is the whole format. ``kept_in_int8`` makes all states keep it, and gives transformers
a cache that rounds as it does, so that suites compare with the same model over the same rows.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from quire.base import config
from quire.contracts.kv_format import Geometry, KVFormat, PlainRows, Plane
from quire.kv import state as kv_state

STEPS = 127
"""Largest code."""


@dataclass(frozen=True, slots=True)
class Int8Rows(KVFormat):
    """One byte for each number, and for each head of K and of V the exponent of its unit; of a
    latent row for what V is and for what was rotated, which transformers' caches hold apart, too.
    """

    name: ClassVar[str] = "int8"
    dtype: torch.dtype

    def planes(self, shape: Geometry) -> Mapping[str, Plane]:
        """See ``KVFormat``."""
        width = shape.key_dim + (0 if shape.latent else shape.value_dim)
        return {
            "codes": Plane((shape.kv_heads, width), torch.int8),
            "exponents": Plane((shape.kv_heads, 2), torch.int8),
        }

    def pack(self, shape: Geometry, k_NHD: Tensor, v_NHD: Tensor | None) -> Mapping[str, Tensor]:
        """See ``KVFormat``."""
        halves = k_NHD.tensor_split([shape.value_dim], -1) if v_NHD is None else (k_NHD, v_NHD)
        parts = [_packed(x_NHD) for x_NHD in halves]
        return {name: torch.cat([part[at] for part in parts], -1) for at, name in enumerate(("codes", "exponents"))}

    def expand(self, shape: Geometry, planes: Mapping[str, Tensor]) -> PlainRows:
        """See ``KVFormat``."""
        codes, exponents = planes["codes"].double(), planes["exponents"]
        halves = codes.tensor_split([shape.value_dim if shape.latent else shape.key_dim], -1)
        one, other = (torch.ldexp(half, exponents[..., at : at + 1]).to(self.dtype) for at, half in enumerate(halves))
        return PlainRows(torch.cat((one, other), -1), one) if shape.latent else PlainRows(one, other)


def _packed(x_NHD: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and exponents. The unit is the least power of two in which the largest number
    has a code, so that packing what was expanded gives the same."""
    mantissa, exponent = torch.frexp(x_NHD.double().abs().amax(-1, keepdim=True) / STEPS)
    exponent = torch.where(mantissa > 0, exponent - (mantissa == 0.5).int(), 0).clamp(-126, 126)
    codes = torch.ldexp(x_NHD.double(), -exponent).round().clamp(-STEPS, STEPS)
    return codes.to(torch.int8), exponent.to(torch.int8)


def rounded(x: Tensor) -> Tensor:
    """Return rows ``[..., D]`` as the format keeps them."""
    codes, exponents = _packed(x)
    return torch.ldexp(codes.double(), exponents).to(x.dtype)


def error_of(x: Tensor) -> float:
    """How far a number of these rows may be from the kept one: half a unit, and a unit is less than
    twice the largest number by 127."""
    return float(x.double().abs().max()) / STEPS if x.numel() else 0.0


@contextmanager
def kept_in_int8() -> Iterator[pytest.MonkeyPatch]:
    """All states keep K and V so, and transformers' caches hold the same numbers."""
    update = Cache.update

    def rounding(self: Cache, k: Tensor, v: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return update(self, rounded(k), rounded(v), *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_state, "PlainFormat", Int8Rows)
        patch.setattr(Cache, "update", rounding)
        for name in config.KV_FORMATS:
            patch.setitem(config.KV_FORMATS, name, __name__)
        yield patch


TURNS = 6
"""Formats take turns in ``make test``: a test of a suite runs over one of two, or none."""


def suites(
    *modules: ModuleType, without: set[str], turn: int, slow: set[str] = frozenset()
) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the tests of these modules, by new names. Those of another ``turn`` are slow."""
    for module in modules:
        for name, test in vars(module).items():
            if name.startswith("test_") and name not in without and test.__module__ == module.__name__:
                quick = name not in slow and zlib.crc32(name.encode()) % TURNS == turn
                yield f"{module.__name__.rpartition('.')[2]}__{name}", test if quick else _slow(test)


def _slow(test: Callable[..., None]) -> Callable[..., None]:
    """Return the test with a mark that the test of the suite itself does not have."""

    @functools.wraps(test)
    def marked(*args: Any, **given: Any) -> None:
        test(*args, **given)

    marked.pytestmark = [*getattr(test, "pytestmark", ()), pytest.mark.slow.mark]  # type: ignore[attr-defined]
    return marked
