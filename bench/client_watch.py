"""A middleware between clients and the server of ``clients.py``.

It assigns requests to rows and abilities, refuses some once, records the requests, and detects
disconnects. A client's base URL is ``/at/ROW/ABILITY``. The server gets the rest of the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.server.http.errors import busy, error_response

PREFIX = re.compile(r"^/at/([^/]+)/([^/]+)(/.*)$")
MADE = re.compile(r"\b(?:resp|call|fc|msg|rs)_[0-9a-f]{16,}")
"""Ids that the server makes and that return in later requests."""
REFUSED_ONCE = "retry"
"""The ability whose first request gets 429, in this server's form."""
KEPT_HEADERS = ("accept", "content-type", "anthropic-version", "anthropic-beta", "openai-beta")
"""Recorded headers: without keys, addresses and facts about the machine."""
OVERFLOW = "{overflow}"
"""Placeholder in a recording for a prompt that is longer than the context."""


@dataclass(kw_only=True, slots=True)
class Seen:
    """One request, and its outcome."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer: bytearray = field(default_factory=bytearray)
    ended: bool = False
    given_up: bool = False
    """Whether the client disconnected before the answer's end."""

    @property
    def code(self) -> str | None:
        """The code of an error's answer."""
        try:
            return str(json.loads(self.answer)["error"]["code"])
        except (ValueError, LookupError, TypeError):
            return None

    @property
    def made(self) -> list[str]:
        """The ids in the answer, each once."""
        return list(dict.fromkeys(MADE.findall(self.answer.decode())))


class Watch:
    """An ASGI middleware. ``seen`` has the requests by row and ability."""

    def __init__(self, app: Any, seen: dict[tuple[str, str], list[Seen]]) -> None:
        self.app, self.seen = app, seen

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        parts = PREFIX.match(scope["path"]) if scope["type"] == "http" else None
        if parts is None:
            await self.app(scope, receive, send)
            return
        row, ability, path = parts.groups()
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event.get("body", b""), event.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        one = Seen(method=scope["method"], path=path, headers=kept, body=body)
        earlier = self.seen.setdefault((row, ability), [])
        earlier.append(one)
        given = False

        async def received() -> Any:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            event = await receive()
            one.given_up |= event["type"] == "http.disconnect" and not one.ended
            return event

        async def sent(event: Any) -> None:
            if event["type"] == "http.response.start":
                one.status = event["status"]
            else:
                one.answer += event.get("body", b"")
                one.ended = not event.get("more_body", False)
            await send(event)

        inner = {**scope, "path": path, "raw_path": path.encode()}
        if ability == REFUSED_ONCE and len(earlier) == 1:
            refused = busy(429, "too many requests are under way; try again", "rate_limit_exceeded")
            await error_response(refused, path)(inner, received, sent)
        else:
            await self.app(inner, received, sent)


def recording(
    row: str,
    version: str,
    seen: Mapping[tuple[str, str], list[Seen]],
    abilities: Iterator[str] | tuple[str, ...],
    overflow: str,
) -> dict[str, Any]:
    """Return a client's requests as a JSON object: each once, in the order of ``abilities``,
    without long texts and new ids.

    ``{made.N.K}`` in a path or body is id number K in the answer to request N.
    """
    requests: list[dict[str, Any]] = []
    known: dict[str, str] = {}
    for ability in abilities:
        for one in seen.get((row, ability), ()):
            path = one.path
            text = one.body.decode().replace(overflow, OVERFLOW)
            for made, name in known.items():
                path, text = path.replace(made, name), text.replace(made, name)
            request = {
                "method": one.method,
                "path": path,
                "headers": one.headers,
                **({"body": json.loads(text)} if text else {}),
                **({"given_up": True} if one.given_up else {"status": one.status}),
            }
            if one.status == 429:
                continue
            if request not in requests:
                requests.append(request)
            if one.method == "POST":
                place = requests.index(request)
                known |= {made: f"{{made.{place}.{number}}}" for number, made in enumerate(one.made)}
    return {"client": row, "version": version, "requests": requests}


def write_recording(found: dict[str, Any], folder: Path) -> None:
    """Write one request a line, so that a changed request is one changed line."""
    head = {key: value for key, value in found.items() if key != "requests"}
    lines = ",\n".join("  " + json.dumps(one, ensure_ascii=False) for one in found["requests"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{found['client']}.json").write_text(
        json.dumps(head)[:-1] + f', "requests": [\n{lines}\n]}}\n', encoding="utf-8"
    )
