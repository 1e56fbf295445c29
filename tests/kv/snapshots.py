"""Everything that a refused call must leave as it is, taken from the object itself, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

CACHES = {"backend", "_rotary", "_rotations", "_prepared", "_raw", "_layers", "_relative_T"}
"""Attributes that may be filled at any time, because they say nothing that is not known otherwise."""


def snapshot(thing: object) -> list[Any]:
    """A value that is equal for two snapshots if and only if nothing has changed: books, brackets, imports and bytes."""
    return list(_walk(thing, {}))


def _walk(thing: Any, known: dict[int, int]) -> Iterator[Any]:
    if isinstance(thing, (int, float, str, bytes, bool, type(None), range, Enum, torch.dtype, torch.device)):
        yield repr(thing)
        return
    if callable(thing) and not hasattr(thing, "__dict__"):
        return
    if id(thing) in known:
        yield "again", known[id(thing)]
        return
    known[id(thing)] = len(known)
    if isinstance(thing, Tensor):
        yield str(thing.dtype), tuple(thing.shape), thing.detach().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(thing, np.ndarray):
        yield str(thing.dtype), thing.shape, thing.tobytes()
    elif isinstance(thing, (set, frozenset)):
        yield sorted(map(repr, thing))
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield repr(key)
            yield from _walk(value, known)
    elif isinstance(thing, (list, tuple)):
        yield len(thing)
        for value in thing:
            yield from _walk(value, known)
    else:
        yield type(thing).__name__
        for name in _attributes(thing):
            if name not in CACHES:
                yield name
                yield from _walk(getattr(thing, name), known)


def _attributes(thing: object) -> list[str]:
    names = list(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if hasattr(thing, name) and not callable(getattr(thing, name))]
