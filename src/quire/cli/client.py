"""The common parts of a server's clients: its address, its errors, the events of its streams.

Standard library only. Source of the format of events: the HTML standard, "Server-sent events",
section "Interpreting an event stream".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire.base.errors import InvalidArgument, QuireError

DONE = "[DONE]"
"""The payload of the last event of an OpenAI stream."""


class HttpFailure(QuireError):
    """An answer with a ``status`` of 400 or above; ``param`` and ``code`` are those of OpenAI's
    error."""

    def __init__(self, message: str, status: int = 0, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status, self.param = status, param


class BrokenAnswer(QuireError, ConnectionError):
    """An incomplete answer, an answer not in HTTP/1.1, JSON or event form, or an error inside a
    stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """The address of a server: ``http://host[:port][/prefix]``."""

    tls: bool
    host: str
    port: int
    prefix: str
    """Path before ``/v1``, without a slash at its end."""

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse ``http://localhost:8000`` or ``.../v1``; raise ``InvalidArgument`` for others."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        plain = not any(ord(char) <= 32 or ord(char) >= 127 for char in url)
        extra = parts.query or parts.fragment or parts.username is not None
        if parts.scheme not in ("http", "https") or not parts.hostname or extra or not plain:
            raise InvalidArgument(f"url {url!r}; something like http://localhost:8000 is accepted")
        prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        tls = parts.scheme == "https"
        return cls(tls=tls, host=parts.hostname, port=port or (443 if tls else 80), prefix=prefix)

    @property
    def authority(self) -> str:
        """The address in the form of the Host header: without the port if that is the usual one."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def check_key(api_key: str | None) -> str | None:
    """Return the key; raise ``InvalidArgument`` if a header cannot hold it."""
    if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable()):
        raise InvalidArgument(
            "api_key holds nothing, or characters that a header cannot hold; printable ASCII is accepted"
        )
    return api_key


def failure(status: int, body: bytes) -> HttpFailure:
    """Return an error answer as an exception, from OpenAI's shape or any other."""
    try:
        found = json.loads(body)["error"]
        message, param, code = str(found["message"]), found.get("param"), found.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, param, code = body[:200].decode("utf-8", "replace").strip(), None, None
    shown = f"the server answered {status}: {message or 'without a reason'}"
    if status == 401:
        shown += "; api_key gives one (--api-key, or the environment variable QUIRE_API_KEY)"
    return HttpFailure(shown, status, param=param, code=code)


class EventParser:
    """Parses pieces of a ``text/event-stream`` into data; drops names, ids and comments."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Return the data of the events that this piece completes."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        events: list[str] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return events


def event_object(event: str) -> dict[str, Any]:
    """Return an event's JSON object; raise ``BrokenAnswer`` for others and for a server's error."""
    try:
        found = json.loads(event)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BrokenAnswer(f"the server sent an event that is no JSON object: {event[:200]!r}")
    if found.get("error") is not None:
        error = found["error"]
        raise BrokenAnswer(f"the stream broke: {error.get('message') if isinstance(error, dict) else error}")
    return found
