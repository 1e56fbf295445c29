"""Replicas without a model: each notes its calls, and has sessions as a set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from quire.cluster.calls import Answer, Call, ReplicaGone

JSON = ((b"content-type", b"application/json"),)
EVENTS = ((b"content-type", b"text/event-stream"),)


class FakeReplicas:
    """``ending``: replicas that end when they are called; ``cutting``: within the answer."""

    def __init__(self, *names: str) -> None:
        self.there = list(names)
        self.calls: list[tuple[str, Call]] = []
        self.sessions: dict[str, set[str]] = {name: set() for name in names}
        self.pinned: set[str] = set()
        self.ending: set[str] = set()
        self.cutting: set[str] = set()
        self.stuck: set[str] = set()
        self.facts: dict[str, dict[str, object]] = {}
        self.parents: dict[str, str] = {}
        self.refusing = False
        """Whether calls about sessions are refused, whoever has them."""
        self.page = 1000
        self.pause: asyncio.Event | None = None
        """Appends wait for it."""

    def names(self) -> Sequence[str]:
        return list(self.there)

    @asynccontextmanager
    async def send(self, name: str, call: Call) -> AsyncIterator[Answer]:
        self.calls.append((name, call))
        if name not in self.there:
            raise ReplicaGone(f"{name} has ended", reached=False)
        assert len(self.calls) < 1000, "asked again and again"
        if name in self.stuck:
            raise ReplicaGone(f"{name} refuses connections", reached=False)
        if name in self.ending:
            self.there.remove(name)
            raise ReplicaGone(f"{name} ends")
        if self.pause is not None and call.path.endswith("/append"):
            await self.pause.wait()
        status, headers, parts = self._answer(name, call)

        async def chunks() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
                if name in self.cutting:
                    raise ReplicaGone(f"{name} ends")

        yield Answer(status, headers, chunks())

    def _answer(self, name: str, call: Call) -> tuple[int, tuple[tuple[bytes, bytes], ...], list[bytes]]:
        path, _, query = call.path.partition("?")
        own = self.sessions[name]
        if path == "/v1/sessions/state" and call.method == "POST":
            own.add(query.partition("id=")[2].partition("&")[0])
            return 200, JSON, [b"{}"]
        if path.startswith("/v1/sessions/session-"):
            session = path.split("/")[3]
            if session not in own:
                return 404, JSON, [b'{"error": {"message": "there is no session"}}']
            if call.method == "DELETE":
                own.discard(session)
            if self.refusing:
                return 401, JSON, [b'{"error": {"message": "no such key"}}']
            told = {
                "id": session,
                "parent": self.parents.get(session),
                "name": "a",
                "labels": {"b": "c"},
                "ttl": 60.0,
                "pinned": session in self.pinned,
                **self.facts.get(session, {}),
            }
            return 200, JSON, [json.dumps(told).encode()]
        if path == "/v1/sessions" and call.method == "GET":
            given = dict(part.split("=") for part in query.split("&"))
            data = [{"id": session, "created": int(session[-4:], 16)} for session in sorted(own)]
            data = [one for one in data if str(one["id"]) > given.get("after", "")]
            page = data[: min(int(given["limit"]), self.page)]
            return 200, JSON, [json.dumps({"data": page, "has_more": len(data) > len(page)}).encode()]
        if b'"stream"' in call.body and json.loads(call.body)["stream"]:
            return 200, EVENTS, [b"data: 1\n\n", b"data: 2\n\n"]
        return 200, JSON, [json.dumps({"by": name}).encode()]
