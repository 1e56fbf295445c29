"""Blending of cached K and V (``docs/blend.md``): its interfaces and their implementations.

Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.base.blend_inputs import BlendedRows
    from quire.blend.executor import TensorBlender
    from quire.blend.retriever import ChunkRetriever
    from quire.blend.scores import SCORES, Score, ScoreInputs, StatedScore
    from quire.blend.selection import BlendPolicy
    from quire.contracts.blend import (
        BlendExecutor,
        BlendOutput,
        BlendRetriever,
        BlendRetrieverResult,
        BlendRetrieverTask,
    )

_HOMES = {
    "BlendExecutor": "quire.contracts.blend",
    "BlendOutput": "quire.contracts.blend",
    "BlendPolicy": "quire.blend.selection",
    "BlendRetriever": "quire.contracts.blend",
    "BlendRetrieverResult": "quire.contracts.blend",
    "BlendRetrieverTask": "quire.contracts.blend",
    "BlendedRows": "quire.base.blend_inputs",
    "ChunkRetriever": "quire.blend.retriever",
    "SCORES": "quire.blend.scores",
    "Score": "quire.blend.scores",
    "ScoreInputs": "quire.blend.scores",
    "StatedScore": "quire.blend.scores",
    "TensorBlender": "quire.blend.executor",
}

__all__ = [
    "SCORES",
    "BlendExecutor",
    "BlendOutput",
    "BlendPolicy",
    "BlendRetriever",
    "BlendRetrieverResult",
    "BlendRetrieverTask",
    "BlendedRows",
    "ChunkRetriever",
    "Score",
    "ScoreInputs",
    "StatedScore",
    "TensorBlender",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
