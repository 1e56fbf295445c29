"""Python's garbage collector, paused while many objects are made that all stay.

Each collection looks at all young objects, and some at all objects. Imports, vocabularies and
merges make hundreds of thousands, none of which is garbage.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Keep the collector from running inside; it is left as it was."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
