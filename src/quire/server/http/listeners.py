"""Sockets that listen. No package of the server: an address is tried before a model is loaded."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from quire.base.errors import InvalidArgument

BACKLOG = 2048
"""Connections that may wait to be accepted."""


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on all addresses of ``host``. Port 0 takes one free port. Raise
    ``InvalidArgument`` for an address that cannot be listened on."""
    found: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        skipped: OSError | None = None
        for family, _, protocol, _, address in dict.fromkeys(addresses):
            # With port 0, all take the port of the first address.
            where = (address[0], port or (found[0].getsockname()[1] if found else 0), *address[2:])
            try:
                found.append(_listener(family, protocol, where))
            except OSError as error:
                # A name may have addresses of a kind that this machine lacks (IPv6 in a container).
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                skipped = error
        if not found and skipped is not None:
            raise skipped
    except (OSError, UnicodeError) as error:
        for listener in found:
            listener.close()
        raise InvalidArgument(
            f"cannot listen on host {host!r}, port {port}: {getattr(error, 'strerror', None) or error}; give a free port (0 takes "
            "one) and an address of this machine"
        ) from error
    return found


def _listener(family: int, protocol: int, where: tuple[Any, ...]) -> socket.socket:
    # ``socket.create_server`` leaves the protocol out, and asyncio then keeps Nagle's algorithm:
    # every answer on a connection that is used again would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, protocol)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address for clients."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
