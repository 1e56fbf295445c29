"""Formats of K and V by name: each module is one, and ``kv_dtype`` takes its name.

A new format is a new module with one heir of ``contracts.kv_format.KVFormat``, made for the dtype
of the rows that are written and read. ``plain`` has the names of dtypes.
"""

from __future__ import annotations

import torch

from quire.base.config import DTYPES, KV_FORMATS
from quire.base.registry import class_in
from quire.contracts.kv_format import KVFormat


def kv_format(name: str, dtype: torch.dtype) -> KVFormat:
    """Return a format by its name in ``kv_dtype`` or in a file: "auto", or one of ``KV_FORMATS``.
    "auto" gives plain rows of ``dtype``, the name of a dtype plain rows of that dtype. Any other
    name gives that format, with rows that are written and read in ``dtype``."""
    if name == "auto":
        name = str(dtype).removeprefix("torch.")
    found: KVFormat = class_in(KV_FORMATS[name], KVFormat)(getattr(torch, name) if name in DTYPES else dtype)
    return found
