"""``AdapterRuns`` by fingerprints, for keys and in files.

Ids mean nothing beside the pool that gave them. In files a history is a list of ``[from position,
fingerprint]``, ascending from 0, null for the base model, and [] where only that ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from quire.errors import DataLoss, InvalidArgument
from quire.types import BASE, AdapterRuns

FingerprintRuns: TypeAlias = tuple[tuple[int, str | None], ...]
"""(from position, fingerprint or None for the base model), as of ``AdapterRuns``."""


def fingerprint_runs(runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> FingerprintRuns:
    """Return the history by fingerprints, neighbours different: two ids may be one adapter."""
    found: list[tuple[int, str | None]] = []
    for start, adapter in runs.runs:
        fingerprint = None if adapter is None else fingerprint_of(adapter)
        if not found or found[-1][1] != fingerprint:
            found.append((start, fingerprint))
    return tuple(found)


def written(runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> list[list[Any]]:
    """Return a history as files have it."""
    found = fingerprint_runs(runs, fingerprint_of)
    return [] if found == ((0, None),) else [list(run) for run in found]


def as_read(
    value: object, length: int, find: Callable[[str], int | None], loaded: Callable[[], Iterable[str]], what: str
) -> AdapterRuns:
    """Return the history of ``length`` tokens that a file has, by the ids of adapters here.

    ``find``: the id of a loaded adapter with a fingerprint; ``loaded``: all fingerprints, and
    ``what``: the subject, for errors. ``DataLoss`` for what is no history; ``InvalidArgument`` if
    an adapter is not loaded here.
    """
    if not isinstance(value, list):
        raise DataLoss(f"{what}: adapters {value!r:.80}; a list of [from position, fingerprint or null] is expected")
    before: tuple[int, str | None] | None = None
    for run in value:
        match run:
            case [int(start), (str() | None) as fingerprint] if type(start) is int and fingerprint != "":
                pass
            case _:
                raise DataLoss(f"{what}: adapters {run!r:.80}; [from position, fingerprint or null] is expected")
        if before is None and start:
            raise DataLoss(f"{what}: the first run of adapters begins at {start}; 0 is expected")
        if before is not None and (not before[0] < start < length or fingerprint == before[1]):
            raise DataLoss(
                f"{what}: adapters {value!r:.200}; positions in order, within its {length} tokens, and neighbours that differ "
                "are expected"
            )
        before = (start, fingerprint)
    if value and all(fingerprint is None for _, fingerprint in value):
        raise DataLoss(f"{what}: adapters {value!r:.80}; of the base model alone, [] is expected")
    runs = BASE
    for start, fingerprint in value:
        adapter = None if fingerprint is None else find(fingerprint)
        if fingerprint is not None and adapter is None:
            known = ", ".join(sorted(set(loaded()))) or "none"
            raise InvalidArgument(
                f"{what} was made with the adapter of fingerprint {fingerprint:.80} from token {start} on, expected to be loaded "
                f"here; loaded are: {known}; load that adapter first"
            )
        runs = runs.then(start, adapter)
    return runs
