"""Quire: an LLM inference runtime in which a model's memory is a value.

Names are imported on first use, so that ``import quire`` takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.base.collector import paused_collector
from quire.base.openmp import DECISION as _DECISION  # noqa: F401  (before anybody loads torch)

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM as AsyncLLM
    from quire.async_llm import AsyncSession as AsyncSession
    from quire.async_llm import SampleDelta as SampleDelta
    from quire.base.errors import AlreadyExists as AlreadyExists
    from quire.base.errors import BlendLoadError as BlendLoadError
    from quire.base.errors import Cancelled as Cancelled
    from quire.base.errors import CheckpointError as CheckpointError
    from quire.base.errors import DataLoss as DataLoss
    from quire.base.errors import FailedPrecondition as FailedPrecondition
    from quire.base.errors import InvalidArgument as InvalidArgument
    from quire.base.errors import NotFound as NotFound
    from quire.base.errors import QuireError as QuireError
    from quire.base.errors import ResourceExhausted as ResourceExhausted
    from quire.base.errors import Unsupported as Unsupported
    from quire.base.hints import CacheHints as CacheHints
    from quire.base.hints import Pin as Pin
    from quire.base.outputs import BeamSearchOutput as BeamSearchOutput
    from quire.base.outputs import Blend as Blend
    from quire.base.outputs import CompletionOutput as CompletionOutput
    from quire.base.outputs import EditReport as EditReport
    from quire.base.outputs import RequestOutput as RequestOutput
    from quire.base.outputs import Reuse as Reuse
    from quire.base.outputs import WarmedSegment as WarmedSegment
    from quire.base.sampling_params import BeamSearchParams as BeamSearchParams
    from quire.base.sampling_params import SamplingParams as SamplingParams
    from quire.base.sampling_params import StructuredOutputs as StructuredOutputs
    from quire.base.segments import BlendParams as BlendParams
    from quire.base.segments import Segment as Segment
    from quire.base.speculation import Speculation as Speculation
    from quire.blend.calibration import BlendCalibration as BlendCalibration
    from quire.blend.calibration import QualityLimits as QualityLimits
    from quire.cli.inspection import describe as describe
    from quire.executor.executor import Executor as Executor
    from quire.executor.llm_executor import LlmExecutor as LlmExecutor
    from quire.llm import LLM as LLM
    from quire.sessions.session import Session as Session

_NAMES = {
    "quire.async_llm": "AsyncLLM AsyncSession SampleDelta",
    "quire.base.errors": (
        "AlreadyExists BlendLoadError Cancelled CheckpointError DataLoss FailedPrecondition InvalidArgument "
        "NotFound QuireError ResourceExhausted Unsupported"
    ),
    "quire.base.hints": "CacheHints Pin",
    "quire.base.outputs": "BeamSearchOutput Blend CompletionOutput EditReport RequestOutput Reuse WarmedSegment",
    "quire.base.sampling_params": "BeamSearchParams SamplingParams StructuredOutputs",
    "quire.base.segments": "BlendParams Segment",
    "quire.base.speculation": "Speculation",
    "quire.blend.calibration": "BlendCalibration QualityLimits",
    "quire.cli.inspection": "describe",
    "quire.executor.executor": "Executor",
    "quire.executor.llm_executor": "LlmExecutor",
    "quire.llm": "LLM",
    "quire.sessions.session": "Session",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:
    __all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            with paused_collector():
                module = import_module(_HOMES[name])
        except AttributeError as error:  # `from quire import` would report a missing name
            raise ImportError(f"{_HOMES[name]} cannot be imported: {error}") from error
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
    return sorted([*_HOMES, "__version__"])
