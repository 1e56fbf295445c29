"""Which of several refusals is raised."""

from __future__ import annotations

from collections.abc import Iterable

from quire.base.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)

ORDER: tuple[type[QuireError], ...] = (
    InvalidArgument,
    NotFound,
    Unsupported,
    FailedPrecondition,
    ResourceExhausted,
    DataLoss,
)
"""If several refusals apply, the first of these is raised."""

Faults = set[type[QuireError]]


def raise_first(faults: Iterable[type[QuireError]]) -> None:
    found = set(faults)
    for kind in ORDER:
        if kind in found:
            raise kind("the oracle refuses")
