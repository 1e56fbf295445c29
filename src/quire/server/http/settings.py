"""The settings of ``quire serve``, besides the engine's options."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

from quire.base.config import check_int, check_real, option, parse_bytes
from quire.base.errors import InvalidArgument
from quire.base.signatures import require_bool
from quire.channels.place import Place
from quire.server.tools import harmony, tools

PARSERS = (*tools.NAMES, *harmony.NAMES)
"""Possible values of ``tool_call_parser``."""

ROLES = ("prefill", "decode", "both")
"""Possible values of ``role``."""
LEAST_SECRET = 16
"""Bytes of a secret."""
MAX_WEIGHT = 1e6
"""Largest weight of an API key."""
_PER_KEY = "Default: half of {}, or all of it where there are not two keys."
_KEY = re.compile(r"[\x21-\x7e]+")
_ENDPOINT = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#,]+")
_HOST = re.compile(r"\*|[^\s/:@,*]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """A server's address, keys and limits. Raises ``InvalidArgument`` for a bad value."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = option(
        (), "Key that clients must send as a bearer token; may be repeated, each sees its own sessions."
    )
    api_key_weight: tuple[float, ...] = option(
        (), "Share of the api_key at the same place in what keys divide, relative to the others. Default: 1 for each."
    )
    otlp_endpoint: str | None = option(
        None,
        "Address that a span of each request is sent to (OpenTelemetry, OTLP over HTTP), as http://127.0.0.1:4318; by "
        "default as the standard variables OTEL_* say.",
    )
    served_model_name: str | tuple[str, ...] | None = option(
        None,
        "The model's name in requests and /v1/models; may be repeated, each names the model, and answers have the first. "
        "By default what was loaded.",
    )
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls (hermes, llama3_json, ...); by default as its chat template tells."
    )
    allowed_origin: tuple[str, ...] = option(
        (), "Origin that browsers may call from (CORS), * for all; may be repeated."
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Name of this server in the header Host, besides IP addresses, localhost and --host; * for all, as behind a "
        "reverse proxy that checks it; may be repeated. Without it, a server with keys takes all names.",
    )
    adapter_dir: tuple[Path, ...] = option(
        (), "Directory from which adapters may be loaded over HTTP; may be repeated."
    )
    max_adapters_per_key: int = option(
        16, "Adapters that one API key, or all clients without keys, may have loaded over HTTP at a time."
    )
    max_body_bytes: int | str = option("16MiB", "Largest body of a request but uploads of state files.")
    max_upload_bytes: int | str = option("4GiB", "Largest state file that is taken.")
    upload_seconds: float = option(3600.0, "Seconds that one upload may take, if it is not too slow before.")
    max_waiting: int = option(1024, "Requests under way or waiting, at most; further ones get 429.")
    max_sessions: int = option(1024, "Open sessions at most; further ones are refused.")
    max_sessions_per_key: int | None = option(None, f"Of one API key, at most. {_PER_KEY.format('max_sessions')}")
    session_ttl: float = option(3600.0, "Seconds after which an unused session is closed.")
    pinned_ttl: float = option(
        14400.0, "The same of a pinned session or prompt, for which no request may ask for more."
    )
    max_pinned_share: float = option(0.75, "Part of the KV pool that pinned sessions and prompts may hold, in (0, 1].")
    max_pinned_share_per_key: float | None = option(
        None, f"Those of one API key, at most. {_PER_KEY.format('max_pinned_share')}"
    )
    max_stored_bytes: int | str = option(
        "16GiB", "State files that lie on this machine's disk on their way in or out, at most."
    )
    max_stored_bytes_per_key: int | str | None = option(
        None, f"Those of one API key, at most. {_PER_KEY.format('max_stored_bytes')}"
    )
    max_responses: int = option(4096, "Stored responses (/v1/responses) at most; the oldest ones go first.")
    max_response_bytes: int | str = option("256MiB", "Memory for their conversations, at most; the same.")
    max_chats: int = option(1024, "Conversations of the page at / that are kept, at most; further ones are refused.")
    max_chat_bytes: int | str = option("256MiB", "Memory for them, at most.")
    adopt_from: str | None = option(
        None,
        "Folder of other servers' state directories: a session of one that has ended continues here at its next use. "
        "Needs --state-dir.",
    )
    share_prefix_cache: bool = option(
        False, "Let API keys find each other's prompts in the prefix cache, which tells a key what others have asked."
    )
    rerun_reasoning: bool = option(
        True,
        "In idle time, run answers of chats again without the reasoning that the chat template leaves out of later "
        "prompts, so that the next turn finds them.",
    )
    max_rerun_tokens: int = option(8192, "Most tokens that are computed for one such answer.")
    allow_edits: bool = option(
        False,
        "Let the page at /, and others under this server's address, fork, rewind, delete and generate in sessions, as "
        "any other client may.",
    )
    role: str = option(
        "both",
        "prefill: compute prompts for other servers, too, which connect to --peer; decode: let the server at --peer "
        "compute prompts, and compute them here if that fails; both: neither.",
    )
    peer: str | None = option(
        None,
        "Where the servers of both roles meet: tcp://HOST:PORT, or shm:/PATH of a socket on one machine. A prefill server "
        "listens there.",
    )
    secret_file: str | None = option(
        None, "File with the secret that both must know, of at least 16 bytes; needed off this machine."
    )
    drain_seconds: float = option(30.0, "Seconds that requests have to finish when the server is told to stop.")

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host.strip():
            raise InvalidArgument(field="host", given=self.host, allowed="an address or a name")
        check_int("port", self.port, 0, 65535)
        for listed in ("api_key", "api_key_weight", "allowed_origin", "allowed_host", "adapter_dir"):
            values = getattr(self, listed)
            if not isinstance(values, (list, tuple)):
                raise InvalidArgument(f"{listed} must be a list, got {type(values).__name__}", field=listed)
            object.__setattr__(self, listed, tuple(values))
        for key in self.api_key:
            # Error messages end up in logs, so this one leaves the key out.
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise InvalidArgument(
                    "api_key must be visible ASCII, at least one character, no space", field="api_key"
                )
        if self.api_key_weight and len(self.api_key_weight) != len(self.api_key):
            weights, keys = len(self.api_key_weight), len(self.api_key)
            raise InvalidArgument(
                f"api_key_weight is given {weights} times for {keys} keys; give one weight for each api_key, in their order",
                field="api_key_weight",
            )
        for weight in self.api_key_weight:
            check_real("api_key_weight", weight, above=0, up_to=MAX_WEIGHT)
        for name in self.model_names:
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise InvalidArgument(field="served_model_name", given=name, allowed="printable text, not empty")
        if self.tool_call_parser is not None and self.tool_call_parser not in PARSERS:
            allowed = f"one of {', '.join(PARSERS)}"
            raise InvalidArgument(field="tool_call_parser", given=self.tool_call_parser, allowed=allowed)
        endpoints = () if self.otlp_endpoint is None else (self.otlp_endpoint,)
        for name, texts, form, allowed in (
            ("otlp_endpoint", endpoints, _ENDPOINT, "like http://host:port or https://host/path"),
            ("allowed_origin", self.allowed_origin, _ORIGIN, "* or like https://host:port"),
            ("allowed_host", self.allowed_host, _HOST, "* or a name without scheme and port, like quire.example"),
        ):
            for text in texts:
                if not isinstance(text, str) or not form.fullmatch(text):
                    raise InvalidArgument(field=name, given=text, allowed=allowed)
        object.__setattr__(self, "allowed_host", tuple(host.lower() for host in self.allowed_host))
        for folder in self.adapter_dir:
            if not isinstance(folder, (str, Path)) or not os.path.isdir(folder):
                raise InvalidArgument(field="adapter_dir", given=str(folder), allowed="a directory")
        object.__setattr__(self, "adapter_dir", tuple(map(Path, self.adapter_dir)))
        if self.role not in ROLES:
            raise InvalidArgument(field="role", given=self.role, allowed=f"one of {', '.join(ROLES)}")
        if (self.role == "both") != (self.peer is None):
            needed = "--peer is missing, where both servers meet" if self.peer is None else "it has no --peer"
            raise InvalidArgument(f"role {self.role!r}: {needed}", field="peer")
        if self.peer is not None:
            Place.of(self.peer)
        if self.secret_file is not None and len(self.secret) < LEAST_SECRET:
            raise InvalidArgument(
                f"secret_file {self.secret_file!r} has {len(self.secret)} bytes; at least {LEAST_SECRET} are needed",
                field="secret_file",
            )
        for limit in [one.name for one in fields(self) if one.name.startswith("max_")]:
            value = getattr(self, limit)
            if value is None and limit.endswith("_per_key"):
                continue
            if "_share" in limit:
                check_real(limit, value, above=0, up_to=1)
                continue
            if "_bytes" in limit:
                value = parse_bytes(value, name=limit)
                object.__setattr__(self, limit, value)  # a number from here on
            check_int(limit, value, 1)
        for switch in ("share_prefix_cache", "rerun_reasoning", "allow_edits"):
            require_bool(switch, getattr(self, switch))
        for seconds in ("session_ttl", "pinned_ttl", "upload_seconds", "drain_seconds"):
            _check_seconds(seconds, getattr(self, seconds), positive=seconds != "drain_seconds")

    @property
    def model_names(self) -> tuple[str, ...]:
        """``served_model_name`` as a tuple; empty for the name of what was loaded."""
        given = self.served_model_name
        return tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)

    @cached_property
    def secret(self) -> bytes:
        """The content of ``secret_file``, without white space around it; empty: there is none."""
        if self.secret_file is None:
            return b""
        try:
            return Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise InvalidArgument(f"secret_file cannot be read: {error}", field="secret_file") from error

    @cached_property
    def key_weights(self) -> Mapping[str, float]:
        """Weights of the API keys by the digests that they are known by; without keys of ""."""
        weights = self.api_key_weight or (1.0,) * len(self.api_key)
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in self.api_key]
        return dict(zip(digests, map(float, weights), strict=True)) or {"": 1.0}

    @property
    def sessions_per_key(self) -> int:
        """``max_sessions_per_key``, or its default."""
        return min(self.max_sessions, self.max_sessions_per_key or self.of_one_key(self.max_sessions))

    @property
    def pinned_share_per_key(self) -> float:
        """``max_pinned_share_per_key``, or its default."""
        return min(self.max_pinned_share, self.max_pinned_share_per_key or self.max_pinned_share * self._per_key)

    @property
    def stored_per_key(self) -> int:
        """``max_stored_bytes_per_key``, or its default."""
        given = self.max_stored_bytes_per_key
        total = int(self.max_stored_bytes)
        return self.of_one_key(total) if given is None else min(total, int(given))

    def of_one_key(self, total: int | str) -> int:
        """Return the part of a total that one API key may have."""
        return math.ceil(int(total) * self._per_key)

    @property
    def _per_key(self) -> float:
        """Share of one key in a total: half of it where there are other keys."""
        return 0.5 if len(set(self.api_key)) > 1 else 1.0


def _check_seconds(name: str, value: object, *, positive: bool) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):  # type: ignore[operator]
        raise InvalidArgument(field=name, given=value, allowed=f"a finite number {'>' if positive else '>='} 0")
