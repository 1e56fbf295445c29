"""What ``quire serve`` is told, beside the engine's own options."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from quire.config import parse_bytes
from quire.errors import InvalidArgument
from quire.server import harmony, tools

PARSERS = (*tools.NAMES, *harmony.NAMES)
"""What ``tool_call_parser`` may be."""

_KEY = re.compile(r"[\x21-\x7e]+")
_ORIGIN = re.compile(r"\*|https?://[^\s/?#,]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server listens, whom it lets in, and what it limits. ``InvalidArgument`` for a bad value."""

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
    max_waiting: int = field(
        default=1024, metadata={"help": "Requests under way or waiting, at most; further ones get 429."}
    )
    max_sessions: int = field(default=1024, metadata={"help": "Open sessions at most; further ones get 429."})
    session_ttl: float = field(default=3600.0, metadata={"help": "Seconds after which an unused session is closed."})
    drain_seconds: float = field(
        default=30.0, metadata={"help": "Seconds that requests have to finish when the server is told to stop."}
    )

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise InvalidArgument(f"host must be an address or a name, got {self.host!r}")
        _check_int("port", self.port, 0, 65535)
        for listed in ("api_key", "allowed_origin", "adapter_dir"):
            _set_tuple(self, listed)
        for key in self.api_key:
            # The key itself is not repeated: error messages end up in logs.
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise InvalidArgument("api_key must be visible ASCII characters without spaces, at least one")
        name = self.served_model_name
        if name is not None and (not isinstance(name, str) or not name.strip() or not name.isprintable()):
            raise InvalidArgument(f"served_model_name must be printable text, not empty, got {name!r}")
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            raise InvalidArgument(
                f"tool_call_parser must be one of {', '.join(PARSERS)}, got {self.tool_call_parser!r}"
            )
        for origin in self.allowed_origin:
            if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
                raise InvalidArgument(f"allowed_origin must be * or like https://host:port, got {origin!r}")
        for folder in self.adapter_dir:
            if not isinstance(folder, (str, Path)) or not os.path.isdir(folder):
                raise InvalidArgument(f"adapter_dir must be a directory, got {str(folder)!r}")
        object.__setattr__(self, "adapter_dir", tuple(map(Path, self.adapter_dir)))
        for limit in ("max_body_bytes", "max_upload_bytes"):
            size = parse_bytes(getattr(self, limit), name=limit)
            _check_int(limit, size, 1)
            object.__setattr__(self, limit, size)
        for count in ("max_waiting", "max_sessions"):
            _check_int(count, getattr(self, count), 1)
        _check_seconds("session_ttl", self.session_ttl, positive=True)
        _check_seconds("drain_seconds", self.drain_seconds, positive=False)

    @property
    def body_limit(self) -> int:
        """``max_body_bytes`` as a number."""
        return parse_bytes(self.max_body_bytes, name="max_body_bytes")

    @property
    def upload_limit(self) -> int:
        """``max_upload_bytes`` as a number."""
        return parse_bytes(self.max_upload_bytes, name="max_upload_bytes")


def _set_tuple(settings: ServerSettings, name: str) -> None:
    value = getattr(settings, name)
    if not isinstance(value, (list, tuple)):
        raise InvalidArgument(f"{name} must be a list, got {type(value).__name__}")
    object.__setattr__(settings, name, tuple(value))


def _check_int(name: str, value: object, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        accepted = f"an integer >= {least}" if most is None else f"an integer in [{least}, {most}]"
        raise InvalidArgument(f"{name} must be {accepted}, got {value!r}")


def _check_seconds(name: str, value: object, *, positive: bool) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):  # type: ignore[operator]
        raise InvalidArgument(f"{name} must be a finite number {'>' if positive else '>='} 0, got {value!r}")
