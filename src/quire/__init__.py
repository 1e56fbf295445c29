"""Quire: an LLM inference runtime in which a model's memory is a value.

Names are imported on first use, so that ``import quire`` takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.base.collector import paused_collector
from quire.base.openmp import DECISION as _DECISION  # noqa: F401  (before anybody loads torch)

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM, AsyncSession, SampleDelta
    from quire.base.errors import (
        AlreadyExists,
        BlendLoadError,
        Cancelled,
        CheckpointError,
        DataLoss,
        FailedPrecondition,
        InvalidArgument,
        NotFound,
        QuireError,
        ResourceExhausted,
        Unsupported,
    )
    from quire.base.hints import CacheHints, Pin
    from quire.base.outputs import (
        BeamSearchOutput,
        Blend,
        CompletionOutput,
        EditReport,
        RequestOutput,
        Reuse,
        WarmedSegment,
    )
    from quire.base.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs
    from quire.base.segments import BlendParams, Segment
    from quire.base.speculation import Speculation
    from quire.blend.calibration import BlendCalibration, QualityLimits
    from quire.cli.inspection import describe
    from quire.executor.executor import Executor
    from quire.executor.llm_executor import LlmExecutor
    from quire.llm import LLM
    from quire.sessions.session import Session

_LAZY = {
    "AsyncLLM": "quire.async_llm",
    "AsyncSession": "quire.async_llm",
    "SampleDelta": "quire.async_llm",
    "LLM": "quire.llm",
    "Session": "quire.sessions.session",
    "Executor": "quire.executor.executor",
    "LlmExecutor": "quire.executor.llm_executor",
    "RequestOutput": "quire.base.outputs",
    "BeamSearchOutput": "quire.base.outputs",
    "CompletionOutput": "quire.base.outputs",
    "EditReport": "quire.base.outputs",
    "Reuse": "quire.base.outputs",
    "Blend": "quire.base.outputs",
    "BlendCalibration": "quire.blend.calibration",
    "QualityLimits": "quire.blend.calibration",
    "WarmedSegment": "quire.base.outputs",
    "describe": "quire.cli.inspection",
    "AlreadyExists": "quire.base.errors",
    "BlendLoadError": "quire.base.errors",
    "Cancelled": "quire.base.errors",
    "CheckpointError": "quire.base.errors",
    "DataLoss": "quire.base.errors",
    "FailedPrecondition": "quire.base.errors",
    "InvalidArgument": "quire.base.errors",
    "NotFound": "quire.base.errors",
    "QuireError": "quire.base.errors",
    "ResourceExhausted": "quire.base.errors",
    "Unsupported": "quire.base.errors",
    "CacheHints": "quire.base.hints",
    "Pin": "quire.base.hints",
    "BeamSearchParams": "quire.base.sampling_params",
    "SamplingParams": "quire.base.sampling_params",
    "StructuredOutputs": "quire.base.sampling_params",
    "BlendParams": "quire.base.segments",
    "Segment": "quire.base.segments",
    "Speculation": "quire.base.speculation",
}

__all__ = [
    "LLM",
    "AlreadyExists",
    "AsyncLLM",
    "AsyncSession",
    "BeamSearchOutput",
    "BeamSearchParams",
    "Blend",
    "BlendCalibration",
    "BlendLoadError",
    "BlendParams",
    "CacheHints",
    "Cancelled",
    "CheckpointError",
    "CompletionOutput",
    "DataLoss",
    "EditReport",
    "Executor",
    "FailedPrecondition",
    "InvalidArgument",
    "LlmExecutor",
    "NotFound",
    "Pin",
    "QualityLimits",
    "QuireError",
    "RequestOutput",
    "ResourceExhausted",
    "Reuse",
    "SampleDelta",
    "SamplingParams",
    "Segment",
    "Session",
    "Speculation",
    "StructuredOutputs",
    "Unsupported",
    "WarmedSegment",
    "describe",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        try:
            with paused_collector():
                module = import_module(_LAZY[name])
        except AttributeError as error:  # `from quire import` would report a missing name
            raise ImportError(f"{_LAZY[name]} cannot be imported: {error}") from error
        return getattr(module, name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # a fifth of this module's time

    try:
        return version("quire")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
