"""Source files as text and as syntax trees, read and parsed once for all tests of a module that
look into them.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest


@cache
def text_of(path: Path) -> str:
    """Return what a file says."""
    return path.read_text(encoding="utf-8")


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file, which is not to be changed."""
    return ast.parse(text_of(path))


@pytest.fixture(scope="module", autouse=True)
def forget_sources() -> Iterator[None]:
    """Let the trees go with the module, and collect no garbage while they are there: they are a
    million objects, which each collection would visit. That took longer than to parse the files.
    """
    gc.disable()
    yield
    text_of.cache_clear()
    tree_of.cache_clear()
    gc.enable()
