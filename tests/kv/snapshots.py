"""Everything that a refused call must leave as it is, taken from the object itself, whatever it is
made of.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

CACHES = {"backend", "pooled", "_rotary", "_rotations", "_prepared", "_raw", "_layers", "_relative_T"}
"""Attributes that may be filled at any time, because they say nothing that is not known otherwise.
"""


PLAIN = (int, float, str, bytes, bool, type(None), range, Enum, torch.dtype, torch.device)


def snapshot(thing: object) -> list[Any]:
    """A value that is equal for two snapshots if and only if nothing has changed: books, brackets,
    imports and bytes.
    """
    found: list[Any] = []
    _walk(thing, {}, found)
    return found


def _walk(thing: Any, known: dict[int, int], found: list[Any]) -> None:
    if isinstance(thing, PLAIN):
        found.append(repr(thing))
        return
    if callable(thing) and not hasattr(thing, "__dict__"):
        return
    if id(thing) in known:
        found.append(("again", known[id(thing)]))
        return
    known[id(thing)] = len(known)
    if isinstance(thing, Tensor):
        found.append((str(thing.dtype), tuple(thing.shape)))
        found.append(thing.detach().contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(thing, np.ndarray):
        found.append((str(thing.dtype), thing.shape, thing.tobytes()))
    elif isinstance(thing, (set, frozenset)):
        found.append(sorted(map(repr, thing)))
    elif isinstance(thing, dict):
        for key, value in thing.items():
            found.append(repr(key))
            _walk(value, known, found)
    elif isinstance(thing, (list, tuple)):
        found.append(len(thing))
        for value in thing:
            _walk(value, known, found)
    else:
        found.append(type(thing).__name__)
        for name in _attributes(thing):
            if name not in CACHES:
                found.append(name)
                _walk(getattr(thing, name), known, found)


def _attributes(thing: object) -> list[str]:
    names = list(getattr(thing, "__dict__", {}))
    for kind in type(thing).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if hasattr(thing, name) and not callable(getattr(thing, name))]
