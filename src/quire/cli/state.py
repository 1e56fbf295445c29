"""``quire state``: the branches in a store, without a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from quire.base.errors import InvalidArgument, NotFound
from quire.base.progress import on_terminal
from quire.cli.options import command
from quire.cli.store_tables import COLUMNS, SHOWN, commit_facts, commit_row, fact_for_people

if TYPE_CHECKING:
    from quire.contracts.store import StoreTier
    from quire.store.commits import SessionCommit
    from quire.store.history import History

R = TypeVar("R")
TEXT_TOKENS = 60
"""Most tokens whose text is shown."""

state_app = typer.Typer(
    help="Look at the branches that sessions were committed to, and copy them; no model is loaded.",
    no_args_is_help=True,
)

StoreOption = Annotated[
    str | None, typer.Option(metavar="URL", help="The store: file:///DIRECTORY, redis://HOST, s3://BUCKET ...")
]
DirOption = Annotated[Path | None, typer.Option(metavar="DIR", help="A server's --state-dir instead.")]
SpaceOption = Annotated[str, typer.Option(help="Whose branches: an API key's space, which ls --all tells.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace a branch there that is no earlier state of it.")]
TextOption = Annotated[
    bool,
    typer.Option("--text", help="Show text and no token ids. The tokenizer is read, and this machine must have it."),
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="A branch, or 8 digits or more of a commit's id.")]


@command(state_app, name="ls")
def list_branches(
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Those of all API keys.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List branches: name, commit, tokens, bytes of state, time, message."""

    async def branches(tier: StoreTier) -> dict[str, Mapping[str, SessionCommit]]:
        from quire.store.collection import spaces_of
        from quire.store.commits import Space
        from quire.store.history import History

        spaces = await spaces_of(tier) if everything else [Space(space)]
        return {one.name: await History(tier, one).branches(damaged) for one in spaces}

    damaged = list[str]()
    found = _run(store, state_dir, branches)
    for one in damaged:
        print(one, file=sys.stderr)
    if as_json:
        print(
            json.dumps(
                [commit_facts(one) | {"branch": name, "space": at} for at in found for name, one in found[at].items()]
            )
        )
        return
    rows = [(*([at] if everything else []), name, *commit_row(one)) for at in found for name, one in found[at].items()]
    if rows:
        _print([*(["space"] if everything else []), "branch", *COLUMNS], rows)
    else:
        print(f"there are no branches{'' if everything else '; --all looks at those of API keys, too'}")


@command(state_app)
def log(
    name: NameArgument,
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
    as_json: JsonOption = False,
) -> None:
    """List a commit and all before it, the latest first."""

    async def chain(history: History) -> list[SessionCommit]:
        return await history.log(await history.find(name))

    found = _run(store, state_dir, _within(space, chain))
    if as_json:
        print(json.dumps([commit_facts(one) for one in found]))
    else:
        _print(COLUMNS, map(commit_row, found))


@command(state_app)
def diff(
    a: NameArgument,
    b: NameArgument,
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
    text: TextOption = False,
    as_json: JsonOption = False,
) -> None:
    """Tell where two commits part, what each adds, and which bytes of state they share."""
    from quire.store.history import Difference

    _require_table(text, as_json)

    async def compare(history: History) -> Difference:
        return await history.diff(await history.find(a), await history.find(b))

    found = _run(store, state_dir, _within(space, compare))
    if as_json:
        told = {
            name: getattr(found, name)
            for name in ("base", "common", "a_adds", "b_adds", "shared_bytes", "a_bytes", "b_bytes")
        }
        print(json.dumps({"a": found.a.id, "b": found.b.id, **told}))
        return
    sides = ((a, found.a, found.a_adds, found.a_bytes), (b, found.b, found.b_adds, found.b_bytes))
    rows = [
        (name, one.id[:SHOWN], one.num_tokens, len(adds), f"{own:,}", _words(one, text)(adds))
        for name, one, adds, own in sides
    ]
    _print(["", "commit", "tokens", "own tokens", "own bytes", "they begin with"], rows)
    base = "there is no common commit" if found.base is None else f"the last common commit is {found.base[:SHOWN]}"
    print(f"{found.common} tokens and {found.shared_bytes:,} bytes of state are common; {base}")


@command(state_app)
def show(
    name: NameArgument,
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
    text: TextOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a commit holds, and how many of its objects are there."""

    _require_table(text, as_json)

    async def look(history: History) -> tuple[SessionCommit, list[int], dict[Any, bool]]:
        found = await history.find(name)
        return found, (await history.tokens(found)).tolist(), await history.there(list(await history.objects(found)))

    found, ids, there = _run(store, state_dir, _within(space, look))
    facts = commit_facts(found) | {"objects": len(there), "objects_there": sum(there.values())}
    if as_json:
        print(json.dumps(facts | {"tokens": ids}))
        return
    described = ((key.replace("_", " "), fact_for_people(key, value)) for key, value in facts.items())
    _print(["", ""], [*described, ("text" if text else "tokens", _words(found, text)(ids))])


@command(state_app)
def push(
    name: NameArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="The store that gets the branch.")],
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
    force: ForceOption = False,
) -> None:
    """Copy a branch and its history to another store. What is there is not sent again."""
    _transfer(name, space, force, _tier(store, state_dir), _other(url))


@command(state_app)
def pull(
    name: NameArgument,
    url: Annotated[str, typer.Argument(metavar="URL", help="The store that has the branch.")],
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
    force: ForceOption = False,
) -> None:
    """Copy a branch and its history from another store."""
    from quire.store.urls import existing

    _transfer(name, space, force, existing(_other(url)), _tier(store, state_dir, new=True))


@command(state_app, name="rm")
def remove(
    name: Annotated[str, typer.Argument(help="A branch.", metavar="NAME")],
    store: StoreOption = None,
    state_dir: DirOption = None,
    space: SpaceOption = "",
) -> None:
    """Forget a branch. Its commits and their state stay until gc."""

    async def delete(history: History) -> str:
        return await history.delete(name)

    head = _run(store, state_dir, _within(space, delete))
    print(f"branch {name} is gone; its commit was {head or 'lost'}")


@command(state_app, name="gc")
def collect_garbage(
    store: StoreOption = None,
    state_dir: DirOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Remove commits that no branch reaches, and state that only they need.

    Commits of the last hour stay, so a server may use the store meanwhile.
    """
    from quire.store.collection import collect

    found = _run(store, state_dir, lambda tier: collect(tier, dry_run=dry_run))
    print(
        f"{found.commits} commits, {found.objects} objects of {found.bytes:,} bytes of state and {found.pieces} pieces "
        f"{'would be' if dry_run else 'were'} removed; {found.released} objects {'would be' if dry_run else 'are now'} the cache's"
    )
    for sentence in found.damaged:
        print(f"damaged, and left with what it may reach: {sentence}")


# -- the store -------------------------------------------------------------------------------------


def _within(
    space: str, function: Callable[[History], Coroutine[Any, Any, R]]
) -> Callable[[StoreTier], Coroutine[Any, Any, R]]:
    from quire.store.commits import Space
    from quire.store.history import History

    return lambda tier: function(History(tier, Space(space)))


def _run(store: str | None, state_dir: Path | None, function: Callable[[StoreTier], Coroutine[Any, Any, R]]) -> R:
    import asyncio

    tier = _tier(store, state_dir)

    async def run() -> R:
        try:
            return await function(tier)
        finally:
            await tier.close()

    return asyncio.run(run())


def _tier(store: str | None, state_dir: Path | None, *, new: bool = False) -> StoreTier:
    """Return the tier of the options. ``new``: its directory may be created."""
    if (store is None) == (state_dir is None):
        raise InvalidArgument("give --store URL, or --state-dir DIR, one of them", field="store")
    from quire.store.urls import existing, state_tier

    tier = _other(store, "--store") if store is not None else state_tier(str(state_dir))
    return tier if new else existing(tier)


def _other(url: str, name: str = "URL") -> StoreTier:
    from quire.store.urls import ACCEPTED, durable_tier

    durable = {scheme: form for scheme, form in ACCEPTED.items() if scheme != "memory"}
    if url.partition(":")[0] not in durable and "@" not in url:  # such a URL may hold a password
        near = "" if ":" in url else f"; of a directory it is {Path(url).absolute().as_uri()}"
        raise InvalidArgument(
            f"{name} {url!r:.200} is no store that outlives the process; accepted: {', '.join(durable.values())}{near}"
        )
    return durable_tier(url)


def _transfer(name: str, space: str, force: bool, source: StoreTier, target: StoreTier) -> None:
    from quire.store.commits import Space
    from quire.store.history import History
    from quire.store.transfer import Transferred, transfer

    async def run() -> Transferred:
        ends = History(source, Space(space)), History(target, Space(space))
        try:
            return await transfer(*ends, name, force=force, show=on_terminal())
        finally:
            await source.close()
            await target.close()

    import asyncio

    found = asyncio.run(run())
    lost = f"; {found.missing} are lost and will be computed again" if found.missing else ""
    print(
        f"branch {name} in {target.label} is at commit {found.commit[:SHOWN]}: {found.commits} new commits, "
        f"{found.objects} objects of {found.bytes:,} bytes sent, {found.there} were there{lost}"
    )


# -- printing --------------------------------------------------------------------------------------


def _some(ids: list[int]) -> str:
    return " ".join(map(str, ids[:SHOWN])) + (" ..." if len(ids) > SHOWN else "")


def _require_table(text: bool, as_json: bool) -> None:
    if text and as_json:
        raise InvalidArgument("--text is for tables, and --json has all token ids; give one of them")


def _words(commit: SessionCommit, text: bool) -> Callable[[list[int]], str]:
    """Return a function that shows tokens of a commit: their first ids, or their first text."""
    if not text:
        return _some
    from quire_inspector.files.known_tokenizers import tokenizer_of

    tokenizer = tokenizer_of(commit.model)
    if tokenizer is None:
        raise NotFound(
            f"this machine has not used the model of commit {commit.id[:SHOWN]}, so its tokenizer is not known; "
            "leave out --text to see token ids"
        )

    def words(ids: list[int]) -> str:
        shown = repr(tokenizer.decode(ids[:TEXT_TOKENS], skip_special_tokens=False))
        return shown + (" ..." if len(ids) > TEXT_TOKENS else "")

    return words


def _print(columns: list[str], rows: Any) -> None:
    from quire.cli.tables import folding_table, print_tables

    print_tables(folding_table(*columns, rows=rows))
