"""``ObjectTier``: objects in S3, Google's or Azure's object store, by ``obstore``.

``PARENT/NAME`` are the objects, so that the children of a parent are one listing. A pin is an empty
object ``pins/NAME``. This tier evicts nothing: the bucket's lifecycle rules do. They cannot see
pins, so a rule for a bucket with pinned objects must not expire these.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from quire.base.errors import InvalidArgument, TierError, Unsupported
from quire.contracts.store import Blob, ObjectKey, ObjectKind, ObjectPart, TierStat
from quire.store.keys import checked_name

if TYPE_CHECKING:
    from obstore.store import RetryConfig

R = TypeVar("R")

PARALLEL = 32
"""Most concurrent requests."""
RETRIES: RetryConfig = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}


class ObjectTier:
    """Objects in a bucket. Credentials come from the environment, as ``obstore`` reads them."""

    kind = "object"

    def __init__(self, url: str) -> None:
        try:
            from obstore.store import from_url
        except ImportError as error:
            raise Unsupported(
                "s3://, gs:// and az:// need the package obstore: pip install 'quire[store]'", field="store"
            ) from error
        self.label = url
        try:
            # No options for the client: giving any would disable the environment variables.
            self._store = from_url(url) if url.startswith("file:") else from_url(url, retry_config=RETRIES)
        except Exception as error:
            raise InvalidArgument(f"{url}: {_brief(error)}", field="store", given=url) from error
        self._turns = asyncio.Semaphore(PARALLEL)

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        return await self._all(map(self._read, _paths(keys)))

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        (found,) = await self._all([self._part(_path(key), start, stop)])
        return found

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        path = _path(key)
        with self._errors():
            if key.kind is ObjectKind.RECORD or await self._size(path) is None:
                await self._store.put_async(path, memoryview(blob))
        return True

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [size is not None for size in await self._all(map(self._size, _paths(keys)))]

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        return [list(found) for found in await self._all(self._list(f"{one.hex()}/") for one in parents)]

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        return sum(await self._all(map(self._delete, dict.fromkeys(_paths(keys)))))

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        there = await self.contains(list(keys))
        pins = [_pin_of(path) for path, one in zip(_paths(keys), there, strict=True) if one]
        if pinned:
            await self._all(self._store.put_async(pin, b"") for pin in pins)
        else:
            await self._all(map(self._gone, pins))

    async def stat(self) -> TierStat:
        """Return the totals, after a listing of all objects."""
        with self._errors():
            objects = await self._list("")
            pins = [entry["path"] async for entries in self._store.list("pins/") for entry in entries]
        pinned = {path.removeprefix("pins/") for path in pins}
        return TierStat(
            objects=len(objects),
            bytes=sum(objects.values()),
            capacity=None,
            pinned=sum(size for key, size in objects.items() if key.name in pinned),
        )

    async def close(self) -> None:
        """Do nothing: a client has no connection of its own."""

    async def _all(self, calls: Iterable[Awaitable[R]]) -> list[R]:
        async def in_turn(call: Awaitable[R]) -> R:
            async with self._turns:
                return await call

        with self._errors():
            return await asyncio.gather(*map(in_turn, calls))

    async def _read(self, path: str) -> Blob | None:
        try:
            return memoryview(await (await self._store.get_async(path)).bytes_async())
        except FileNotFoundError:
            return None

    async def _part(self, path: str, start: int, stop: int) -> ObjectPart | None:
        # An empty range is an error and does not return the size.
        size = None if start else await self._size(path)
        if not start and (size is None or not min(stop, size)):
            return None if size is None else ObjectPart(b"", size)
        try:
            found = await self._store.get_async(
                path, options={"range": (start, stop if size is None else min(stop, size))}
            )
            return ObjectPart(memoryview(await found.bytes_async()), found.meta["size"])
        except FileNotFoundError:
            return None

    async def _size(self, path: str) -> int | None:
        try:
            return (await self._store.head_async(path))["size"]
        except FileNotFoundError:
            return None

    async def _list(self, prefix: str) -> dict[ObjectKey, int]:
        """Return the keys of all objects under a prefix, with their bytes."""
        found: dict[ObjectKey, int] = {}
        async for entries in self._store.list(prefix):
            for entry in entries:
                with contextlib.suppress(InvalidArgument):  # a pin, or a file of another program
                    key = ObjectKey.parse(entry["path"].rpartition("/")[2])
                    if entry["path"] == _path(key):
                        found[key] = entry["size"]
        return found

    async def _delete(self, path: str) -> bool:
        there = await self._size(path) is not None
        await self._gone(path)
        await self._gone(_pin_of(path))
        return there

    async def _gone(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            await self._store.delete_async(path)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TierError:
            raise
        except Exception as error:  # an error of obstore, whose classes have only Exception in common
            raise TierError(f"{self.label}: {_brief(error)}") from error


def _path(key: ObjectKey) -> str:
    return f"{key.parent.hex()}/{checked_name(key)}"


def _paths(keys: Collection[ObjectKey]) -> list[str]:
    return [_path(key) for key in keys]


def _pin_of(path: str) -> str:
    return f"pins/{path.rpartition('/')[2]}"


def _brief(error: Exception) -> str:
    """Return an error's first line, without query parameters of URLs: they may be a signature."""
    return re.sub(r"\?\S*", "?...", (str(error) or type(error).__name__).splitlines()[0])
