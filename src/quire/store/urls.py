"""Tiers from URLs: ``memory://4GiB``, ``file:///var/quire?size=200GiB``, ``redis://host`` ..."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from quire.base.config import parse_bytes
from quire.base.errors import InvalidArgument, NotFound
from quire.contracts.store import StoreTier
from quire.store.files import FileTier
from quire.store.memory import MemoryTier
from quire.store.redis import RedisTier
from quire.store.remote import ObjectTier

ACCEPTED = {
    "memory": "memory://4GiB",
    "file": "file:///DIRECTORY?size=200GiB",
    "redis": "redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE][?size=8GiB]",
    "rediss": "rediss://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE][?size=8GiB]",
    "s3": "s3://BUCKET[/PREFIX]",
    "gs": "gs://BUCKET[/PREFIX]",
    "az": "az://CONTAINER[/PREFIX]",
}
"""The accepted form of URL for each scheme."""


def open_tiers(urls: str | Sequence[str]) -> list[StoreTier | MemoryTier]:
    """Return the tiers of URLs in their order; ``InvalidArgument`` for a URL in none of the forms
    of ``ACCEPTED``. Nothing is opened or connected before its first use."""
    return [_tier(url) for url in ([urls] if isinstance(urls, str) else urls)]


def durable_tier(url: str) -> StoreTier:
    """Return the tier of a URL; ``InvalidArgument`` unless it outlives processes."""
    if not isinstance(url, str):
        raise InvalidArgument(field="url", given=url, allowed="one URL, as file:///DIRECTORY")
    (tier,) = open_tiers(url)
    if isinstance(tier, MemoryTier):
        raise InvalidArgument(field="url", given=url, allowed="a store that outlives the process, not memory://")
    return tier


def state_tier(directory: str | os.PathLike[str]) -> FileTier:
    """Return the tier of a ``state_dir``, for a store without another durable tier. It takes at
    most half of the disk space that is free of other files."""
    path = Path(directory).absolute() / "store"
    there = next(one for one in (path, *path.parents) if one.is_dir())
    held = sum(file.stat().st_size for file in path.rglob("*.quire"))
    return FileTier(path, (shutil.disk_usage(there).free + held) // 2)


def store_at(target: str) -> StoreTier | None:
    """Return the store at a URL, or in a directory: a ``file://`` store, or a ``state_dir`` with a
    store. None: ``target`` is neither. ``NotFound`` for a directory without a store."""
    if "://" in target:
        return existing(durable_tier(target))
    directory = Path(target)
    if not directory.is_dir():
        return None
    for one in (directory, directory / "store"):
        if (one / "objects").is_dir():
            return FileTier(one, None)
    raise NotFound(
        f"directory {target!r} holds no store: there is no 'objects' and no 'store/objects' in it; give the directory "
        "of a file:// store or a state_dir, or a state file"
    )


def existing(tier: StoreTier) -> StoreTier:
    """Return a tier; ``NotFound`` for a directory without a store, where a tier would make one."""
    directory: Path | None = getattr(tier, "directory", None)
    if directory is not None and not (directory / "objects").is_dir():
        why = "has no 'objects'" if directory.is_dir() else "does not exist"
        raise NotFound(f"there is no store: directory {str(directory)!r} {why}")
    return tier


def _tier(url: str) -> StoreTier | MemoryTier:
    if not isinstance(url, str):
        raise InvalidArgument(field="store", given=url, allowed=f"one of {', '.join(ACCEPTED.values())}, or several")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _refused(url, "it is no URL, or its port is none") from None
    if (accepted := ACCEPTED.get(parts.scheme)) is None:
        raise _refused(url, f"there is no tier of scheme {parts.scheme!r}" if parts.scheme else "it has no scheme")
    if parts.fragment or any(ord(letter) < 32 for letter in unquote(url)):
        raise _refused(url, "a fragment and control characters mean nothing here")
    if "@" in parts.netloc and parts.scheme not in ("redis", "rediss"):
        raise _refused(url, f"{parts.scheme}:// takes no user and no password")
    size = _size(url, parts)
    where = unquote(parts.path)
    match parts.scheme:
        case "memory":
            if parts.path or not parts.netloc:
                raise _refused(url, f"the size stands behind memory://, as in {accepted}")
            return MemoryTier(_bytes(url, parts.netloc))
        case "file":
            if parts.netloc or not where.startswith("/") or not where.strip("/"):
                raise _refused(url, f"a directory has three slashes and an absolute path: {accepted}")
            return FileTier(where, size)
        case "redis" | "rediss":
            database = where.strip("/")
            if not parts.hostname or (database and not (database.isascii() and database.isdecimal())):
                raise _refused(url, f"a host is needed, and a database is a number: {accepted}")
            label = f"{parts.scheme}://{parts.hostname}:{port or 6379}/{database or 0}"
            return RedisTier(parts._replace(query="").geturl(), size, label=label)
    if not parts.netloc or port is not None:
        raise _refused(url, f"a name is needed: {accepted}")
    return ObjectTier(url)


def _size(url: str, parts: SplitResult) -> int | None:
    """Return the parameter ``size`` of a URL, which may have no other."""
    try:
        given = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError:
        raise _refused(url, "its parameters are not NAME=VALUE") from None
    if names := [name for name, _ in given if name != "size"]:
        raise _refused(url, f"there is no parameter {names[0]!r}; the only one is size")
    if len(given) > 1:
        raise _refused(url, "size is given twice")
    if not given:
        return None
    if parts.scheme == "memory":
        raise _refused(url, f"the size stands behind memory://, as in {ACCEPTED['memory']}")
    if parts.scheme in ("s3", "gs", "az"):
        raise _refused(url, "a bucket has no size= here: its lifecycle rules say what goes when")
    return _bytes(url, given[0][1])


def _bytes(url: str, text: str) -> int:
    try:
        size = parse_bytes(text)
    except InvalidArgument as error:
        raise _refused(url, str(error)) from None
    if not size:
        raise _refused(url, "its size must be at least 1 byte")
    return size


def _refused(url: str, reason: str) -> InvalidArgument:
    """Return an error that repeats the URL without secrets."""
    scheme, slashes, _ = url.partition("://")
    shown = url.partition("?")[0]
    if "@" in url:
        shown = f"{scheme}://..." if slashes and "@" not in scheme else "the URL"
    return InvalidArgument(
        f"{shown!r:.200} is no store: {reason}; accepted: {', '.join(ACCEPTED.values())}", field="store", given=shown
    )
