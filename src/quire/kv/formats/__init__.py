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
    """Return the format that ``kv_dtype`` names, or that a file names, for rows of a dtype; rows
    of a dtype that ``name`` is. ``name``: "auto", or one of ``KV_FORMATS``."""
    if name == "auto":
        name = str(dtype).removeprefix("torch.")
    found: KVFormat = class_in(KV_FORMATS[name], KVFormat)(getattr(torch, name) if name in DTYPES else dtype)
    return found
