"""Stores and commits for people and as JSON. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cli.tables import folding_table, print_tables

if TYPE_CHECKING:
    from quire.contracts.store import StoreTier
    from quire.store.commits import SessionCommit
    from quire.store.survey import SurveyedCommit

COLUMNS = ["commit", "tokens", "bytes", "time", "message"]
"""Columns of ``commit_row``."""
SHOWN = 12
"""Number of shown digits of an id, and of shown tokens of a side in ``quire state diff``."""


def commit_row(commit: SessionCommit) -> tuple[object, ...]:
    """Return a commit as a row of a table of ``COLUMNS``."""
    return (
        commit.id[:SHOWN],
        commit.num_tokens,
        f"{commit.nbytes:,}",
        _time(commit),
        commit.message or commit.session or "",
    )


def fact_for_people(name: str, value: Any) -> str:
    """Return a value of ``commit_facts``, or a number, in words."""
    match name, value:
        case _, bool():
            return "yes" if value else "no"
        case "bytes", int():
            return f"{value:,}"
        case _, None | "" | []:
            return "none"
        case "model", {"architecture": architecture, "config": config, "weights": weights}:
            return f"{architecture}, config {config[:16]}, weights {weights[:16]}"
        case "adapters", [*runs]:
            return ", ".join(f"{(adapter or 'none')[:16]} from token {start} on" for start, adapter in runs)
        case "window", [window, sink]:
            return f"{window} with sink {sink}"
        case _, dict():
            return ", ".join(f"{key}={one}" for key, one in value.items()) or "none"
        case _:
            return str(value)


def commit_facts(commit: SessionCommit) -> dict[str, Any]:
    """Return a commit in JSON types, without its tokens."""
    return {
        "commit": commit.id,
        "parent": commit.parent,
        "time": _time(commit),
        "message": commit.message,
        "session": commit.session,
        "labels": dict(commit.labels),
        "num_tokens": commit.num_tokens,
        "bytes": commit.nbytes,
        "model": dict(commit.model),
        "adapters": [list(one) for one in commit.adapters],
        "window": commit.window,
        "modified": commit.modified,
    }


def _time(commit: SessionCommit) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(commit.time))


async def describe_store(tier: StoreTier) -> dict[str, Any]:
    """Return the content of a store in JSON types, and close the tier. ``TierError``: it cannot be
    read."""
    from quire.store.survey import survey

    try:
        found = await survey(tier)
    finally:
        await tier.close()
    return {
        "store": found.label,
        "kind": found.kind,
        "objects": found.stat.objects,
        "bytes": found.stat.bytes,
        "pinned_bytes": found.stat.pinned,
        "capacity": found.stat.capacity,
        "num_commits": found.total,
        "branches": [{"branch": name, "space": space, **_held(one)} for (space, name), one in found.branches().items()],
        "commits": [{"space": one.space, **_held(one)} for one in found.commits],
        "damaged": list(found.damaged),
    }


def _held(one: SurveyedCommit) -> dict[str, Any]:
    keys = {piece.key for piece in one.pieces}
    facts = {"objects": len(keys), "objects_there": len(keys & one.there), "computed": one.computed}
    return {**commit_facts(one.commit), **facts, "stops": one.stops}


def print_store(found: Mapping[str, Any]) -> None:
    """Print the result of ``describe_store`` as tables on stdout."""
    limit = "no limit" if found["capacity"] is None else f"at most {found['capacity']:,}"
    facts = [
        ("kind", found["kind"]),
        ("objects", f"{found['objects']:,} of {found['bytes']:,} bytes ({limit}), {found['pinned_bytes']:,} pinned"),
        ("commits", f"{found['num_commits']:,}, of them {len(found['commits']):,} read"),
        *(("damaged", one) for one in found["damaged"]),
    ]
    spaces = len({one["space"] for one in found["branches"]}) > 1
    rows = [
        (
            *([one["space"]] if spaces else []),
            one["branch"],
            one["commit"][:SHOWN],
            one["num_tokens"],
            f"{one['objects_there']} of {one['objects']}, {one['bytes']:,} bytes",
            one["time"],
            one["message"] or one["session"] or "",
        )
        for one in found["branches"]
    ]
    columns = [*(["space"] if spaces else []), "branch", "commit", "tokens", "objects there", "time", "message"]
    print_tables(
        folding_table("", "", rows=facts, box=None, show_header=False, title=found["store"]),
        folding_table(*columns, rows=rows, title="Branches"),
    )
