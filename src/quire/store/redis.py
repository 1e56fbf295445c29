"""``RedisTier``: objects in Redis or Valkey, for several machines.

Under ``quire:`` the server has each object as ``object:NAME``; names by parent and by digest,
``under:PARENT`` and ``ends:DIGEST``; ``size``, ``use`` (order of last uses), ``queue`` (eviction
candidates), ``pins``, and the counters ``uses``, ``bytes`` and ``pinned``. Scripts change these
together with the objects, so changes are atomic. A server that evicts keys by its own policy leaves
names without objects: they are misses, and the first miss removes the name. One server, not a
cluster: scripts access keys that are not declared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from quire.base.errors import InvalidArgument, TierError, Unsupported
from quire.contracts.store import Blob, ObjectKey, ObjectKind, ObjectPart, TierStat
from quire.store.keys import checked_name

PREFIX = "quire:"
CONNECT_SECONDS, ANSWER_SECONDS = 1.0, 2.0
"""Seconds for a connection, and for one whole answer."""

_COMMON = f"""
local P = '{PREFIX}'
local function call(verb, key, ...) return redis.call(verb, P .. key, ...) end
local function parent(name) return string.sub(name, 1, 40) end
local function digest(name) return string.sub(name, -40) end
local function above(name) return call('SMEMBERS', 'ends:' .. parent(name)) end
local function offer(name)
    if call('EXISTS', 'under:' .. digest(name)) == 0 and call('SISMEMBER', 'pins', name) == 0 then
        call('ZADD', 'queue', call('ZSCORE', 'use', name) or 0, name)
    else
        call('ZREM', 'queue', name)
    end
end
local function note_use(name)
    call('ZADD', 'use', call('INCR', 'uses'), name)
    offer(name)
end
local function drop(name)
    local there = call('DEL', 'object:' .. name)
    local size = call('HGET', 'size', name)
    if not size then return there end
    call('HDEL', 'size', name)
    call('DECRBY', 'bytes', size)
    if call('SREM', 'pins', name) == 1 then call('DECRBY', 'pinned', size) end
    local use = tonumber(call('ZSCORE', 'use', name) or 0)
    call('ZREM', 'use', name)
    call('ZREM', 'queue', name)
    call('SREM', 'under:' .. parent(name), name)
    call('SREM', 'ends:' .. digest(name), name)
    for _, one in ipairs(above(name)) do
        if use > tonumber(call('ZSCORE', 'use', one) or 0) then call('ZADD', 'use', use, one) end
        offer(one)
    end
    return there
end
"""
_PUT = """
local name, blob, replace, capacity = ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local old = call('HGET', 'size', name)
if old and call('EXISTS', 'object:' .. name) == 0 then
    drop(name)
    old = false
end
if old and not replace then
    note_use(name)
    return 1
end
local function size_of(one) return tonumber(call('HGET', 'size', one) or 0) end
local size, total = #blob, tonumber(call('GET', 'bytes') or 0) - (old or 0)
if capacity >= 0 and total + size > capacity then
    -- What is pinned, and what that and the new object stand under, stays.
    local waiting, seen, stays = call('SMEMBERS', 'pins'), { [name] = true }, 0
    for _, one in ipairs(above(name)) do table.insert(waiting, one) end
    while #waiting > 0 do
        local one = table.remove(waiting)
        if not seen[one] then
            seen[one] = true
            stays = stays + size_of(one)
            for _, other in ipairs(above(one)) do table.insert(waiting, other) end
        end
    end
    if stays + size > capacity then return 0 end
end
local pinned = call('SISMEMBER', 'pins', name)
if old then
    call('DECRBY', 'bytes', old)
    call('DECRBY', 'pinned', old * pinned)
    call('HDEL', 'size', name)
    call('ZREM', 'queue', name)
end
call('SADD', 'under:' .. parent(name), name)
for _, one in ipairs(above(name)) do call('ZREM', 'queue', one) end
while capacity >= 0 and tonumber(call('GET', 'bytes') or 0) + size > capacity do
    local oldest = call('ZRANGE', 'queue', 0, 0)[1]
    if not oldest then break end -- names in a circle, which no hashes make
    drop(oldest)
end
call('SET', 'object:' .. name, blob)
call('SADD', 'ends:' .. digest(name), name)
call('HSET', 'size', name, size)
call('INCRBY', 'bytes', size)
call('INCRBY', 'pinned', size * pinned)
note_use(name)
return 1
"""
_USE = """
for _, name in ipairs(ARGV) do
    if call('EXISTS', 'object:' .. name) == 0 then drop(name) else note_use(name) end
end
"""
_REMOVE = """
local count = 0
for _, name in ipairs(ARGV) do count = count + drop(name) end
return count
"""
_PIN = """
local pinned = table.remove(ARGV, 1) == '1'
for _, name in ipairs(ARGV) do
    local size = call('HGET', 'size', name)
    if size and call(pinned and 'SADD' or 'SREM', 'pins', name) == 1 then
        call(pinned and 'INCRBY' or 'DECRBY', 'pinned', size)
        offer(name)
    end
end
"""


class RedisTier:
    """Objects in a server, at most ``capacity`` bytes of them; None: by the server's own limit and
    policy. Nothing is connected before the first call."""

    kind = "redis"

    def __init__(self, url: str, capacity: int | None, *, label: str = "Redis") -> None:
        """``url`` is in the form of ``redis.asyncio``. It may hold a password, so messages show
        ``label`` instead."""
        try:
            from redis.asyncio import Redis
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
            from redis.exceptions import ConnectionError as Disconnected
        except ImportError as error:
            raise Unsupported("redis:// needs the package redis: pip install 'quire[store]'", field="store") from error
        self.capacity, self.label = capacity, label
        self._client: Redis = Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            # Retry once, since the server may have closed the connection since its last use.
            retry=Retry(NoBackoff(), 1, supported_errors=(Disconnected,)),
        )
        scripts = (_PUT, _USE, _REMOVE, _PIN)
        self._put, self._use, self._remove, self._pin = (self._client.register_script(_COMMON + one) for one in scripts)

    async def get(self, keys: Sequence[ObjectKey]) -> list[Blob | None]:
        from redis.exceptions import OutOfMemoryError

        names = [checked_name(key) for key in keys]
        if not names:
            return []
        with self._errors():
            found: list[Any] = await self._client.mget([_object(name) for name in names])
            with contextlib.suppress(OutOfMemoryError):  # a full server cannot record uses
                await self._use(args=names)
        return found

    async def part(self, key: ObjectKey, start: int, stop: int) -> ObjectPart | None:
        from redis.exceptions import OutOfMemoryError

        name = checked_name(key)
        with self._errors():
            async with self._client.pipeline(transaction=True) as pipe:
                for words in (("EXISTS",), ("STRLEN",), ("GETRANGE", start, max(0, stop - 1))):
                    pipe.execute_command(words[0], _object(name), *words[1:])
                there, size, blob = await pipe.execute()
            if not start:
                with contextlib.suppress(OutOfMemoryError):
                    await self._use(args=[name])
        return ObjectPart(blob if stop > start else b"", int(size)) if there else None

    async def put(self, key: ObjectKey, blob: Blob) -> bool:
        from redis.exceptions import OutOfMemoryError

        name = checked_name(key)
        limit = -1 if self.capacity is None else self.capacity
        with self._errors():
            try:
                return bool(await self._put(args=[name, blob, int(key.kind is ObjectKind.RECORD), limit]))
            except OutOfMemoryError:  # the server's own limit
                return False

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [bool(one) for one in await self._each("EXISTS", [_object(checked_name(key)) for key in keys])]

    async def children(self, parents: Sequence[bytes]) -> list[list[ObjectKey]]:
        answers = await self._each("SMEMBERS", [f"{PREFIX}under:{parent.hex()}" for parent in parents])
        return [[key for name in names for key in _parsed(name)] for names in answers]

    async def remove(self, keys: Collection[ObjectKey]) -> int:
        names = [checked_name(key) for key in keys]
        with self._errors():
            return int(await self._remove(args=names)) if names else 0

    async def pin(self, keys: Collection[ObjectKey], pinned: bool) -> None:
        names = [checked_name(key) for key in keys]
        with self._errors():
            await self._pin(args=[int(pinned), *names])

    async def stat(self) -> TierStat:
        with self._errors():
            objects = int(await self._client.hlen(f"{PREFIX}size"))
            size, pinned = await self._client.mget(f"{PREFIX}bytes", f"{PREFIX}pinned")
        return TierStat(objects=objects, bytes=int(size or 0), capacity=self.capacity, pinned=int(pinned or 0))

    async def close(self) -> None:
        with self._errors():
            await self._client.aclose()

    async def _each(self, verb: str, keys: Sequence[str]) -> list[Any]:
        """Run a command for each key, in one pipeline."""
        if not keys:
            return []
        with self._errors():
            async with self._client.pipeline(transaction=False) as pipe:
                for key in keys:
                    pipe.execute_command(verb, key)
                return list(await pipe.execute())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            raise TierError(f"{self.label}: {str(error) or type(error).__name__}") from error


def _object(name: str) -> str:
    return f"{PREFIX}object:{name}"


def _parsed(name: bytes) -> Iterator[ObjectKey]:
    with contextlib.suppress(InvalidArgument, UnicodeDecodeError):  # a key of another program
        yield ObjectKey.parse(name.decode("ascii"))
