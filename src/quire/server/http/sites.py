"""The names by which clients reach this server, and the web pages that may send it requests.

A browser runs the scripts of any page, on the user's machine and so behind every firewall. It adds
headers to their requests that the scripts cannot choose:

* ``Host``. A page whose own name resolves to this machine (DNS rebinding) has the same origin as
  this server, and no other header betrays it. The attack needs a name, so any IP address is taken.
* ``Origin`` and ``Sec-Fetch-Site``. They name the site of the page that sends a request. Forms and
  scripts of other sites may send some requests without asking, and only not read the answers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.types import Scope

from quire.server.http.errors import ApiError
from quire.server.http.settings import ServerSettings

LOCAL = "localhost"
"""The name that is taken beside the settings'."""
PROBED = "/health"
"""The path that is answered under any name: probes use names of their own."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})
STATELESS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/api/chat",
        "/api/generate",
        "/api/show",
        "/chat/completions",
        "/completion",
        "/completions",
        "/infill",
        "/apply-template",
    }
)
"""Paths of which a POST changes no session, branch or adapter, unless it names a ``session_id``."""
CHATS = "/v1/chats/"
"""What the conversations of the page at ``/`` are below, which are its own."""
PORTS = {"http": 80, "https": 443}


class Sites:
    """The checks of one server."""

    def __init__(self, settings: ServerSettings) -> None:
        self._names = {LOCAL, settings.host.lower(), *settings.allowed_host}
        # A page has no key, so behind keys a name is only checked if names were given.
        self._any_name = "*" in self._names or bool(settings.api_key and not settings.allowed_host)
        self._origins = frozenset(settings.allowed_origin)
        self._allow_edits = settings.allow_edits

    def check(self, scope: Scope, *, public: bool) -> bool:
        """Return whether the request comes from a page under this server's own name that may only
        read. Raise ``ApiError`` 403 for a name that is not this server's, a page of another site,
        or such a page that would change something. ``public``: whether the path tells and changes
        nothing, so that other pages may link to it."""
        host = _one(scope, b"host")
        if not self._any_name and scope["path"] != PROBED:
            self._check_name(host)
        origin, site = _one(scope, b"origin"), _one(scope, b"sec-fetch-site")
        if "*" in self._origins or origin in self._origins or (public and scope["method"] in READING):
            return False
        own = origin is not None and _is_same(origin, host)
        foreign = not own if site is None and origin is not None else site not in (None, "same-origin", "none")
        if foreign:
            raise ApiError(
                403,
                f"the request comes from a web page of {'another site' if origin is None else repr(origin[:80])}; start the "
                "server with --allowed-origin and the page's origin to let its pages call it",
                code="origin_not_allowed",
            )
        reads_only = own and not self._allow_edits
        path = scope["path"]
        if reads_only and scope["method"] not in READING and path not in STATELESS and not path.startswith(CHATS):
            raise page_reads_only()
        return reads_only

    def _check_name(self, host: str | None) -> None:
        name = None if host is None else _split(f"//{host}").hostname
        if host is None or (name is not None and (name.removesuffix(".") in self._names or _is_address(name))):
            return
        raise ApiError(
            403,
            f"this server is not known by the name {(name or host)[:80]!r}; use its IP address or localhost, or start it with "
            "--allowed-host and that name (* takes every name) or with --api-key",
            code="host_not_allowed",
        )


def page_reads_only() -> ApiError:
    """Return the answer to a page of this server that would change something."""
    return ApiError(
        403,
        "web pages under this server's own address may only read sessions, branches and adapters; start it with "
        "--allow-edits, or with --allowed-origin and the page's origin",
        code="edits_not_allowed",
    )


def header_values(scope: Mapping[str, Any], name: bytes) -> Sequence[bytes]:
    """Return the values of the headers of a name, which is in lower case."""
    return [value for found, value in scope["headers"] if found.lower() == name]


def _one(scope: Scope, name: bytes) -> str | None:
    """Return the value of a header; several ones joined, which equals no valid value."""
    given = header_values(scope, name)
    return ", ".join(one.decode("latin-1") for one in given) if given else None


def _split(url: str) -> SplitResult:
    try:
        found = urlsplit(url)
        found.port  # noqa: B018 - raises for what is no number
    except ValueError:
        return urlsplit("")
    return found


def _is_same(origin: str, host: str | None) -> bool:
    """Return whether an origin's host and port are those of a header Host. The scheme is a
    proxy's."""
    page, here = _split(origin), _split(f"//{host or ''}")
    usual = PORTS.get(page.scheme)
    return page.hostname is not None and (page.hostname, page.port or usual) == (here.hostname, here.port or usual)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
