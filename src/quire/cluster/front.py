"""``Front``: the ASGI application in front of a cluster's replicas.

It reads a request whole, chooses a replica by its sessions or its prompt, and streams the answer
back. It keeps the places of sessions and prefixes in memory only: a session that it does not know
is looked for on all replicas, and one of them takes it over if its own has ended.

A request that no replica has begun to answer is sent to another one, unless it is about a session:
it may have taken effect there.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, urlencode
from weakref import WeakValueDictionary

from starlette.responses import Response

from quire.cluster.calls import Answer, Call, ReplicaGone, Replicas
from quire.cluster.router import Choice, Router, digests
from quire.server.http.errors import ApiError, busy, error_response
from quire.server.http.events import JsonAnswer, done_unless_gone, encode_json

MOST_BYTES = 1 << 30
"""Largest body. Bodies are held in memory, state files among them."""
PATIENCE = 30.0
"""Seconds that a request waits for a replica, and for a session whose replica is ending."""
LOOK_SECONDS = 0.25
_ID = r"(?:session|resp|chat)[-_][0-9a-f]{32}"
_SESSION = re.compile(r"/v1/sessions/(session-[0-9a-f]{32})(?:/|$)")
_RESPONSE = re.compile(rf"/v1/responses/({_ID})(?:/|$)")
_MADE = re.compile(rb'"id": ?"((?:session-|resp_)[0-9a-f]{32})"')
_FORKS = re.compile(rb"session-[0-9a-f]{32}")
STAYS = {"pinned": "is pinned", "last_commit": "continues a commit"}
"""Facts of a session with which it is not moved."""
TO_ALL = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
BY_KEY = ("/v1/chats", "/slots")
"""Paths whose state one replica keeps for an API key."""


@dataclass(slots=True)
class FrontCounts:
    """Counts since the front began."""

    requests: Counter[str] = field(default_factory=Counter)
    """By the reason of the choice."""
    repeated: int = 0
    """Requests that another replica got after one had ended."""
    found: int = 0
    """Sessions that were found on another replica than they were."""
    moved: int = 0
    """Sessions that the front moved."""
    seconds: float = 0.0
    """Time of all choices."""


class Front:
    """``front(scope, receive, send)``. Used on one event loop."""

    def __init__(self, replicas: Replicas, router: Router | None = None, *, patience: float = PATIENCE) -> None:
        """``patience``: seconds that a request waits for a replica."""
        self._replicas, self._patience = replicas, patience
        self.router = router or Router()
        self.counts = FrontCounts()
        self._moving: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock of each session that is being moved."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"scope type {scope['type']!r}; only http is served")
        reply = _Reply(scope, receive, send)
        try:
            if (call := await reply.call()) is None:
                return
            # The replica sees that its client has left, and cancels the request.
            if (work := await done_unless_gone(receive, self._answer(reply, call))) is not None:
                work.result()
        except ApiError as error:
            await reply.send(error_response(error, scope["path"]))

    async def _answer(self, reply: _Reply, call: Call) -> None:
        path, _, query = call.path.partition("?")
        reads = call.method in ("GET", "HEAD")
        if path == "/health" and reads:
            await self._health(reply)
        elif path == "/v1/cluster" and reads:
            await reply.send(JsonAnswer(self.document()))
        elif path in TO_ALL:
            await self._to_all(reply, call)
        elif path == "/v1/sessions" and reads:
            await self._sessions(reply, replace(call, method="GET"), query)
        else:
            await self._to_one(reply, call, path)

    # -- what the front answers itself -------------------------------------------------------------

    async def _health(self, reply: _Reply) -> None:
        self._look()
        if not self.router.names:
            raise _refused(503, "no replica takes requests", "no_replica")
        await reply.send(JsonAnswer({"status": "ok", "replicas": len(self.router.names)}))

    def document(self) -> dict[str, Any]:
        """Return the cluster's state as JSON."""
        self._look()
        router, counts = self.router, self.counts
        held = Counter(router.sessions.values())
        total = counts.requests.total()
        return {
            "object": "cluster",
            "replicas": [
                {"name": name, "under_way": router.load[name], "sessions": held[name]} for name in router.names
            ],
            "requests": dict(counts.requests),
            "repeated": counts.repeated,
            "sessions_found": counts.found,
            "sessions_moved": counts.moved,
            "blocks": len(router.prefixes),
            "mean_choice_seconds": counts.seconds / total if total else 0.0,
        }

    async def _to_all(self, reply: _Reply, call: Call) -> None:
        """Send a call to all replicas, and answer with the first answer that is an error, or else
        with the first one."""
        names = await self._names()
        done = await asyncio.gather(*(self._read(name, call) for name in names))
        answer, body = next(((answer, body) for answer, body in done if answer.status >= 400), done[0])
        await reply.whole(answer, body)

    async def _sessions(self, reply: _Reply, call: Call, query: str) -> None:
        """List the sessions of all replicas, the oldest first."""
        given = parse_qs(query, keep_blank_values=True)
        text = given.get("limit", ["100"])[-1]
        limit = int(text) if text.isascii() and text.isdecimal() else 0
        after = given.pop("after", [None])[-1]
        if 1 <= limit <= 1000:  # else the replicas refuse it
            given["limit"] = ["1000"]
        names = await self._names()
        done = await asyncio.gather(*(self._listed(name, call, given) for name in names))
        merged = list[dict[str, Any]]()
        for name, (answer, body, entries) in zip(names, done, strict=True):
            if answer.status != 200:
                await reply.whole(answer, body)
                return
            for entry in entries:
                self.router.place(entry["id"], name)
            merged += entries
        merged.sort(key=lambda entry: (entry.get("created", 0), entry["id"]))
        ids = [entry["id"] for entry in merged]
        if after is not None and after not in ids:
            raise _refused(404, f"after: there is no session {after!r:.60} in this list", "not_found")
        start = 0 if after is None else ids.index(after) + 1
        page = merged[start : start + limit]
        await reply.send(JsonAnswer({"object": "list", "data": page, "has_more": len(merged) > start + len(page)}))

    async def _listed(
        self, name: str, call: Call, given: Mapping[str, list[str]]
    ) -> tuple[Answer, bytes, list[dict[str, Any]]]:
        """Return all sessions of a replica, page by page, behind its last answer."""
        entries = list[dict[str, Any]]()
        while True:
            after = {"after": entries[-1]["id"]} if entries else {}
            path = f"/v1/sessions?{urlencode({**given, **after}, doseq=True)}"
            answer, body = await self._read(name, replace(call, path=path))
            page = json.loads(body) if answer.status == 200 else {"data": []}
            entries += page["data"]
            if not (page["data"] and page.get("has_more")):
                return answer, body, entries

    # -- what a replica answers --------------------------------------------------------------------

    async def _to_one(self, reply: _Reply, call: Call, path: str) -> None:
        body = _object(call)
        ids = _ids(path, body)
        blocks = [] if ids else digests(_key(call, body), prompt_text(path, body))
        without = set[str]()
        while True:
            begun = time.perf_counter()
            choice = await self._choice(call, path, ids, blocks, without)
            self.counts.seconds += time.perf_counter() - begun
            self.counts.requests[choice.reason] += 1
            try:
                with self.router.under_way(choice.replica, blocks, ids):
                    async with self._replicas.send(choice.replica, call) as answer:
                        await self._pass_on(reply, call, answer, choice.replica, ids)
                return
            except ReplicaGone as error:
                if reply.begun:
                    await reply.cut(error)
                    return
                if ids and error.reached and call.method not in ("GET", "HEAD"):
                    message = f"the replica of {ids[0]} has ended during the call; see what it has before you repeat it"
                    raise _refused(503, message, "replica_ended") from error
                without.add(choice.replica)
                self.counts.repeated += 1

    async def _choice(
        self, call: Call, path: str, ids: Sequence[str], blocks: Sequence[int], without: set[str]
    ) -> Choice:
        names = await self._names(without)
        if ids:
            return Choice(await self._place_of(ids, call, without), "session")
        if path.startswith(BY_KEY) or "id_slot" in call.path:
            left, key = set(names) - without, _key(call, {}).ljust(256)
            return Choice(min(left, key=lambda name: digests(name, key)[0]), "session")
        choice = self.router.choose(blocks, without)
        assert choice is not None
        return choice

    async def _pass_on(self, reply: _Reply, call: Call, answer: Answer, name: str, ids: Sequence[str]) -> None:
        """Send an answer on, and note the sessions that it makes."""
        await reply.begin(answer.status, answer.headers)
        head, makes_forks = b"", call.path.partition("?")[0].endswith("/fork")
        async for chunk in answer.chunks:
            if len(head) < 1 << 16:
                head += chunk
                for found in _FORKS.findall(head) if makes_forks else _MADE.findall(head):
                    self.router.place(found.decode(), name)
            await reply.chunk(chunk)
        await reply.end()
        if call.method == "DELETE" or answer.status == 404:  # it is looked for again
            for one in ids:
                self.router.sessions.pop(one, None)

    async def _read(self, name: str, call: Call) -> tuple[Answer, bytes]:
        try:
            async with self._replicas.send(name, call) as answer:
                return answer, await answer.read()
        except ReplicaGone as error:
            raise _refused(503, f"{name} has ended during the call; repeat it", "replica_ended") from error

    # -- replicas and sessions ---------------------------------------------------------------------

    def _look(self) -> None:
        if tuple(names := self._replicas.names()) != self.router.names:
            self.router.update(names)

    async def _names(self, without: set[str] | None = None) -> tuple[str, ...]:
        """Return the replicas, and wait until there is one that is not in ``without``."""
        end = time.monotonic() + self._patience
        while True:
            self._look()
            if any(name not in (without or ()) for name in self.router.names):
                return self.router.names
            if time.monotonic() > end:
                raise _refused(503, f"no replica took the request within {self._patience:g} seconds", "no_replica")
            await asyncio.sleep(LOOK_SECONDS)

    async def _place_of(self, ids: Sequence[str], call: Call, without: set[str]) -> str:
        """Return the replica that has these sessions. If several have them, they are moved to the
        first one's. A session of a replica with too much to do is moved to the least loaded one."""
        first = await self._find(ids[0], call, without)
        for name in ids[1:]:
            if (place := await self._find(name, call, without)) != first:
                await self._move(name, place, first, call)
        if ids == ids[:1] and ids[0].startswith("session") and self.router.is_overloaded(first):
            least = self.router.least()
            assert least is not None
            with suppress(ApiError):  # it is in use, pinned, or does not fit: then it stays
                return await self._move(ids[0], first, least, call)
        return first

    async def _find(self, name: str, call: Call, without: set[str]) -> str:
        """Return the replica of a session. One that the front does not know is asked for, the least
        loaded replica first: that one takes it over if its own has ended. ``without``: replicas
        that have ended."""
        if (lock := self._moving.get(name)) is not None:
            async with lock:
                pass
        self._look()
        known = self.router.sessions.get(name)
        if known in self.router.names and known not in without:
            return str(known)
        kind = "responses" if name.startswith("resp") else "sessions"
        lookup = Call("GET", f"/v1/{kind}/{name}" + ("?tokens=false" if kind == "sessions" else ""), _identity(call))
        end = time.monotonic() + (self._patience if known is not None else 0.0)
        while True:
            self._look()
            for replica in sorted(set(self.router.names) - without, key=self.router.load.__getitem__):
                try:
                    async with self._replicas.send(replica, lookup) as answer:
                        status = answer.status
                        await answer.read()
                except ReplicaGone:
                    continue
                if status == 200:
                    self.router.place(name, replica)
                    self.counts.found += 1
                if status != 404:  # as 401: that is the answer to the request, too
                    return replica
            if time.monotonic() >= end:
                # A replica's own words for a session that there is not.
                self.router.sessions.pop(name, None)
                await self._names(without)
                return self.router.least(without) or self.router.names[0]
            await asyncio.sleep(LOOK_SECONDS)

    async def _move(self, name: str, source: str, target: str, call: Call) -> str:
        """Move an idle session by its state file; return its replica then, another one than
        ``target`` if another request has moved it meanwhile. Calls about it wait. ``ApiError``: it
        is in use, or one of the replicas refuses."""
        async with self._moving.setdefault(name, asyncio.Lock()):
            if (place := self.router.sessions.get(name, source)) != source:
                return place
            if self.router.calls[name]:
                raise _refused(
                    409, f"{name} is in use, so that it cannot be moved; repeat it later", "session_not_moved"
                )
            identity = _identity(call)
            answer, body = await self._read(source, Call("GET", f"/v1/sessions/{name}?tokens=false", identity))
            _require(answer, body, name)
            told = json.loads(body)
            if stays := [reason for fact, reason in STAYS.items() if told.get(fact)]:
                message = f"{name} stays on its replica: it {' and '.join(stays)}, which its state file does not have"
                raise _refused(409, message, "session_not_moved")
            answer, state = await self._read(source, Call("GET", f"/v1/sessions/{name}/state", identity))
            _require(answer, state, name)
            fields = [("id", name), ("ttl", told["ttl"])]
            fields += [(field, told[field]) for field in ("name", "parent", "created") if told.get(field)]
            fields += [("label", f"{label}={value}") for label, value in told.get("labels", {}).items()]
            kind = (b"content-type", b"application/octet-stream")
            upload = Call("POST", f"/v1/sessions/state?{urlencode(fields)}", (*identity, kind), state)
            _require(*await self._read(target, upload), name)
            await self._read(source, Call("DELETE", f"/v1/sessions/{name}", identity))
            self.router.place(name, target)
            self.counts.moved += 1
            return target


class _Reply:
    """Reads one request, and writes its answer."""

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.begun = False
        self._is_events = False

    async def call(self) -> Call | None:
        """Read the request; None if the client leaves before its end. ``ApiError``: its body is too
        large."""
        parts, size = list[bytes](), 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > MOST_BYTES:
                raise _refused(413, f"the body has more than {MOST_BYTES} bytes", "body_too_large")
            if not message.get("more_body"):
                break
        query = self._scope["query_string"].decode()
        path = self._scope.get("raw_path", self._scope["path"].encode()).decode()
        headers = tuple((bytes(name), bytes(value)) for name, value in self._scope["headers"])
        return Call(self._scope["method"], path + (f"?{query}" if query else ""), headers, b"".join(parts))

    async def begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.begun = True
        self._is_events = any(value.startswith(b"text/event-stream") for _, value in headers)
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def chunk(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: Answer, body: bytes) -> None:
        await self.begin(answer.status, answer.headers)
        await self.chunk(body)
        await self.end()

    async def send(self, response: Response) -> None:
        self.begun = True
        await response(self._scope, self._receive, self._send)

    async def cut(self, error: ReplicaGone) -> None:
        """End an answer that cannot be completed: with an event of an error, or without an end."""
        if not self._is_events:
            raise error
        refused = _refused(503, "the replica has ended during the answer", "replica_ended")
        await self.chunk(b"data: " + encode_json(refused.body) + b"\n\n")
        await self.end()


def _refused(status: int, message: str, code: str) -> ApiError:
    """Return an answer of the front's own."""
    return busy(503, message, code) if status == 503 else ApiError(status, message, code=code)


# -- reading requests ------------------------------------------------------------------------------


def prompt_text(path: str, body: Mapping[str, Any]) -> str:
    """Return a request's prompt as a text: tools, then messages in their order, or the prompt
    itself. Prompts with a common beginning give texts with one. "" without a prompt."""
    messages = body.get("messages") or body.get("input")
    if messages is None and isinstance(body.get("prompt"), (str, list)):
        prompt = body["prompt"]
        first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else prompt
        return first if isinstance(first, str) else ",".join(map(str, first))
    if messages is None:
        return ""
    # The keys' order is the client's, and the same in its next request.
    head = [body.get(name) for name in ("model", "tools", "system", "instructions") if body.get(name)]
    items = messages if isinstance(messages, list) else [messages]
    return "\n".join(json.dumps(item, ensure_ascii=False) for item in [*head, *items])


def _object(call: Call) -> Mapping[str, Any]:
    """Return the body as an object; an empty one for any other body, which a replica refuses."""
    if not call.body or call.body[:1] not in b"{ \n\r\t":
        return {}
    try:
        found = json.loads(call.body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ids(path: str, body: Mapping[str, Any]) -> list[str]:
    """Return the sessions or the stored response that a request is about."""
    if found := _SESSION.match(path) or _RESPONSE.match(path):
        return [found[1]]
    given = body.get("ids") if path == "/v1/sessions/generate" else None
    several = given if isinstance(given, list) else [body.get("session_id"), body.get("previous_response_id")]
    return [one for one in several if isinstance(one, str) and re.fullmatch(_ID, one)]


def _key(call: Call, body: Mapping[str, Any]) -> str:
    """Return the API key and the salt, which divide prefixes."""
    keys = [value for _, value in _identity(call)]
    return f"{b' '.join(keys).decode(errors='replace')}\n{body.get('cache_salt') or ''}"


def _identity(call: Call) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that say who asks."""
    return tuple((name, value) for name, value in call.headers if name.lower() in (b"authorization", b"x-api-key"))


def _require(answer: Answer, body: bytes, name: str) -> None:
    """Raise ``ApiError`` unless a replica has done what moves a session."""
    if answer.status >= 400:
        try:
            reason = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = f"status {answer.status}"
        raise _refused(
            409, f"{name} cannot be moved to the replica of the other sessions: {reason}", "session_not_moved"
        )


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
