"""The settings of ``quire serve``, besides the engine's options."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from quire.config import check_int, check_real, parse_bytes
from quire.errors import InvalidArgument
from quire.server import harmony, tools
from quire.signatures import require_bool

PARSERS = (*tools.NAMES, *harmony.NAMES)
"""Possible values of ``tool_call_parser``."""

_PER_KEY = "Default: half of {}, or all of it where there are not two keys."
_KEY = re.compile(r"[\x21-\x7e]+")
_ORIGIN = re.compile(r"\*|https?://[^\s/?#,]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """A server's address, keys and limits. Raises ``InvalidArgument`` for a bad value."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 for all."})
    port: int = field(default=8000, metadata={"help": "Port to listen on; 0 takes a free one."})
    api_key: tuple[str, ...] = field(
        default=(),
        metadata={"help": "Key that clients must send as a bearer token; may be repeated, each sees its own sessions."},
    )
    served_model_name: str | None = field(
        default=None, metadata={"help": "The model's name in requests and /v1/models; by default what was loaded."}
    )
    tool_call_parser: str | None = field(
        default=None,
        metadata={
            "help": "How the model writes tool calls (hermes, llama3_json, ...); by default as its chat template tells."
        },
    )
    allowed_origin: tuple[str, ...] = field(
        default=(), metadata={"help": "Origin that browsers may call from (CORS), * for all; may be repeated."}
    )
    adapter_dir: tuple[Path, ...] = field(
        default=(), metadata={"help": "Directory from which adapters may be loaded over HTTP; may be repeated."}
    )
    max_body_bytes: int | str = field(
        default="16MiB", metadata={"help": "Largest body of a request but uploads of state files."}
    )
    max_upload_bytes: int | str = field(default="4GiB", metadata={"help": "Largest state file that is taken."})
    upload_seconds: float = field(
        default=3600.0, metadata={"help": "Seconds that one upload may take, if it is not too slow before."}
    )
    max_waiting: int = field(
        default=1024, metadata={"help": "Requests under way or waiting, at most; further ones get 429."}
    )
    max_sessions: int = field(default=1024, metadata={"help": "Open sessions at most; further ones are refused."})
    max_sessions_per_key: int | None = field(
        default=None, metadata={"help": f"Of one API key, at most. {_PER_KEY.format('max_sessions')}"}
    )
    session_ttl: float = field(default=3600.0, metadata={"help": "Seconds after which an unused session is closed."})
    pinned_ttl: float = field(
        default=14400.0, metadata={"help": "The same of a pinned session, for which no request may ask for more."}
    )
    max_pinned_share: float = field(
        default=0.75, metadata={"help": "Part of the KV pool that pinned sessions may hold, in (0, 1]."}
    )
    max_pinned_share_per_key: float | None = field(
        default=None, metadata={"help": f"Those of one API key, at most. {_PER_KEY.format('max_pinned_share')}"}
    )
    max_stored_bytes: int | str = field(
        default="16GiB",
        metadata={"help": "State files that lie on this machine's disk on their way in or out, at most."},
    )
    max_stored_bytes_per_key: int | str | None = field(
        default=None, metadata={"help": f"Those of one API key, at most. {_PER_KEY.format('max_stored_bytes')}"}
    )
    share_prefix_cache: bool = field(
        default=False,
        metadata={
            "help": "Let API keys find each other's prompts in the prefix cache, which tells a key what others have asked."
        },
    )
    drain_seconds: float = field(
        default=30.0, metadata={"help": "Seconds that requests have to finish when the server is told to stop."}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise InvalidArgument(field="host", given=self.host, allowed="an address or a name")
        check_int("port", self.port, 0, 65535)
        for listed in ("api_key", "allowed_origin", "adapter_dir"):
            _set_tuple(self, listed)
        for key in self.api_key:
            # Error messages end up in logs, so this one leaves the key out.
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise InvalidArgument(
                    "api_key must be visible ASCII, at least one character, no space", field="api_key"
                )
        name = self.served_model_name
        if name is not None and (not isinstance(name, str) or not name.strip() or not name.isprintable()):
            raise InvalidArgument(field="served_model_name", given=name, allowed="printable text, not empty")
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            allowed = f"one of {', '.join(PARSERS)}"
            raise InvalidArgument(field="tool_call_parser", given=self.tool_call_parser, allowed=allowed)
        for origin in self.allowed_origin:
            if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
                raise InvalidArgument(field="allowed_origin", given=origin, allowed="* or like https://host:port")
        for folder in self.adapter_dir:
            if not isinstance(folder, (str, Path)) or not os.path.isdir(folder):
                raise InvalidArgument(field="adapter_dir", given=str(folder), allowed="a directory")
        object.__setattr__(self, "adapter_dir", tuple(map(Path, self.adapter_dir)))
        for limit in ("max_body_bytes", "max_upload_bytes", "max_stored_bytes", "max_stored_bytes_per_key"):
            if limit.endswith("_per_key") and getattr(self, limit) is None:
                continue
            size = parse_bytes(getattr(self, limit), name=limit)
            check_int(limit, size, 1)
            object.__setattr__(self, limit, size)
        for count in ("max_waiting", "max_sessions"):
            check_int(count, getattr(self, count), 1)
        for share in ("max_pinned_share", "max_pinned_share_per_key"):
            if getattr(self, share) is not None or not share.endswith("_per_key"):
                check_real(share, getattr(self, share), above=0, up_to=1)
        if self.max_sessions_per_key is not None:
            check_int("max_sessions_per_key", self.max_sessions_per_key, 1)
        require_bool("share_prefix_cache", self.share_prefix_cache)
        _check_seconds("session_ttl", self.session_ttl, positive=True)
        _check_seconds("pinned_ttl", self.pinned_ttl, positive=True)
        _check_seconds("upload_seconds", self.upload_seconds, positive=True)
        _check_seconds("drain_seconds", self.drain_seconds, positive=False)

    @property
    def body_limit(self) -> int:
        """``max_body_bytes`` as a number."""
        return parse_bytes(self.max_body_bytes, name="max_body_bytes")

    @property
    def upload_limit(self) -> int:
        """``max_upload_bytes`` as a number."""
        return parse_bytes(self.max_upload_bytes, name="max_upload_bytes")

    @property
    def sessions_per_key(self) -> int:
        """``max_sessions_per_key``, or its default."""
        return min(self.max_sessions, self.max_sessions_per_key or math.ceil(self.max_sessions * self._per_key))

    @property
    def pinned_share_per_key(self) -> float:
        """``max_pinned_share_per_key``, or its default."""
        return min(self.max_pinned_share, self.max_pinned_share_per_key or self.max_pinned_share * self._per_key)

    @property
    def stored_limit(self) -> int:
        """``max_stored_bytes`` as a number."""
        return parse_bytes(self.max_stored_bytes, name="max_stored_bytes")

    @property
    def stored_per_key(self) -> int:
        """``max_stored_bytes_per_key`` as a number, or its default."""
        given = self.max_stored_bytes_per_key
        if given is None:
            return math.ceil(self.stored_limit * self._per_key)
        return min(self.stored_limit, parse_bytes(given, name="max_stored_bytes_per_key"))

    @property
    def _per_key(self) -> float:
        """Share of one key in a total: half of it where there are other keys."""
        return 0.5 if len(set(self.api_key)) > 1 else 1.0


def _set_tuple(settings: ServerSettings, name: str) -> None:
    value = getattr(settings, name)
    if not isinstance(value, (list, tuple)):
        raise InvalidArgument(f"{name} must be a list, got {type(value).__name__}", field=name)
    object.__setattr__(settings, name, tuple(value))


def _check_seconds(name: str, value: object, *, positive: bool) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):  # type: ignore[operator]
        raise InvalidArgument(field=name, given=value, allowed=f"a finite number {'>' if positive else '>='} 0")
