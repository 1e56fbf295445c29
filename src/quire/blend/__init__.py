"""Blending of cached K and V (``docs/blend.md``): its interfaces and their implementations.

Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.blend_inputs import BlendedRows as BlendedRows
    from quire.blend.executor import TensorBlender as TensorBlender
    from quire.blend.retriever import ChunkRetriever as ChunkRetriever
    from quire.blend.scores import SCORES as SCORES
    from quire.blend.scores import Score as Score
    from quire.blend.scores import ScoreInputs as ScoreInputs
    from quire.blend.scores import StatedScore as StatedScore
    from quire.blend.selection import BlendPolicy as BlendPolicy
    from quire.contracts.blend import BlendExecutor as BlendExecutor
    from quire.contracts.blend import BlendOutput as BlendOutput
    from quire.contracts.blend import BlendRetriever as BlendRetriever
    from quire.contracts.blend import BlendRetrieverResult as BlendRetrieverResult
    from quire.contracts.blend import BlendRetrieverTask as BlendRetrieverTask

_NAMES = {
    "quire.base.blend_inputs": "BlendedRows",
    "quire.blend.executor": "TensorBlender",
    "quire.blend.retriever": "ChunkRetriever",
    "quire.blend.scores": "SCORES Score ScoreInputs StatedScore",
    "quire.blend.selection": "BlendPolicy",
    "quire.contracts.blend": "BlendExecutor BlendOutput BlendRetriever BlendRetrieverResult BlendRetrieverTask",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:
    __all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
