"""``AdapterRuns`` with fingerprints in place of ids, for keys and in files.

Ids are valid only for the pool that gave them. In files a history is a list of ``[from position,
fingerprint]``, ascending from 0, with null for the base model; [] if only the base model ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from quire.base.errors import DataLoss, InvalidArgument
from quire.base.types import BASE, AdapterRuns

FingerprintRuns: TypeAlias = tuple[tuple[int, str | None], ...]
"""(from position, fingerprint or None for the base model), as in ``AdapterRuns``."""


def fingerprint_runs(runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> FingerprintRuns:
    """Return the history by fingerprints. Equal neighbours are joined, because two ids may be one
    adapter."""
    found: list[tuple[int, str | None]] = []
    for start, adapter in runs.runs:
        fingerprint = None if adapter is None else fingerprint_of(adapter)
        if not found or found[-1][1] != fingerprint:
            found.append((start, fingerprint))
    return tuple(found)


def written(runs: AdapterRuns, fingerprint_of: Callable[[int], str]) -> list[list[Any]]:
    """Return a history in the form of files."""
    found = fingerprint_runs(runs, fingerprint_of)
    return [] if found == ((0, None),) else [list(run) for run in found]


def as_read(
    value: object, length: int, find: Callable[[str], int | None], loaded: Callable[[], Iterable[str]], what: str
) -> AdapterRuns:
    """Return the ``AdapterRuns`` of a history of ``length`` tokens read from a file.

    ``find`` returns the id of a loaded adapter by fingerprint; ``loaded`` returns all loaded
    fingerprints; ``what`` names the subject in errors. ``DataLoss``: the value is no history.
    ``InvalidArgument``: an adapter is not loaded here.
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
