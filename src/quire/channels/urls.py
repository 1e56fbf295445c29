"""Connecting to an address and listening there: ``tcp://HOST:PORT``, or ``shm:/PATH`` for two
processes of one machine."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.channels.greeting import GREETING_SECONDS, Trust, greet
from quire.channels.place import Place
from quire.channels.ring import RingEnd
from quire.channels.sealed import can_seal
from quire.channels.socket_end import SocketEnd
from quire.channels.stream import StreamEnd

MOST_CONNECTIONS = 256
"""Most connections of a listener; further ones are closed."""
RETRY_SECONDS = 0.05
"""Seconds until the next ``accept`` after one that failed, as without file descriptors."""


def check_trust(place: Place, trust: Trust) -> None:
    """Refuse an address off this machine without a secret or without encryption."""
    if place.path:
        return
    try:
        found = {one[4][0] for one in socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise InvalidArgument(f"{place.url}: {error}", field="peer") from None
    if not trust.secret and not all(map(_is_loopback, found)):
        raise InvalidArgument(
            f"{place.url} is off this machine, so who hands over must prove a secret; give --secret-file",
            field="secret_file",
        )
    if not can_seal() and (trust.seals or not all(map(_is_loopback, found))):
        raise Unsupported(
            f"{place.url} is off this machine, so states must be encrypted, for which the package cryptography is missing; "
            "install quire[handover]",
            field="peer",
        )


def connect(url: str, trust: Trust) -> SocketEnd:
    """Connect to a listener. ``InvalidArgument``, ``Unsupported``: it refuses or is refused."""
    place = Place.of(url)
    check_trust(place, trust)
    try:
        if place.path:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(GREETING_SECONDS)
            connection.connect(place.path)
        else:
            connection = socket.create_connection((place.host, place.port), GREETING_SECONDS)
    except OSError as error:
        raise InvalidArgument(f"nothing listens at {url}: {error}", field="peer") from error
    return _end(connection, url, trust, connects=True)


def _end(connection: socket.socket, peer: str, trust: Trust, *, connects: bool) -> SocketEnd:
    try:
        found: SocketEnd
        if connection.family == socket.AF_UNIX:
            greet(connection, peer, Trust(trust.secret, seals=False), connects=connects, local=True)
            found = RingEnd(connection, peer, connects=connects)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            ends = connection.getsockname()[0], connection.getpeername()[0]
            seal = greet(connection, peer, trust, connects=connects, local=all(map(_is_loopback, ends)))
            found = StreamEnd(connection, peer, seal)
    except BaseException:
        connection.close()
        raise
    found.start()
    return found


class Listener:
    """Takes connections, each on a thread of its own."""

    def __init__(
        self, url: str, trust: Trust, serve: Callable[[SocketEnd], None], refused: Callable[[QuireError], None]
    ) -> None:
        """Listen at ``url``, and let ``serve`` have each end, which is closed when that returns.
        ``refused`` gets the error of a peer whose greeting fails."""
        self.place, self._trust, self._serve, self._refused = Place.of(url), trust, serve, refused
        check_trust(self.place, trust)
        self._ends: set[SocketEnd] = set()
        self._threads: set[threading.Thread] = set()
        self._slots = threading.Semaphore(MOST_CONNECTIONS)
        self._closed = False
        self._socket = self._bound()
        self._thread = threading.Thread(target=self._accept, name="quire-listen", daemon=True)
        self._thread.start()

    def _bound(self) -> socket.socket:
        path = self.place.path
        found = socket.socket(
            socket.AF_UNIX if path else (socket.AF_INET6 if ":" in self.place.host else socket.AF_INET)
        )
        try:
            if path:
                _remove_stale(path)
                before = os.umask(0o177)  # only this user connects
                try:
                    found.bind(path)
                finally:
                    os.umask(before)
            else:
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind((self.place.host, self.place.port))
            found.listen()
        except OSError as error:
            found.close()
            raise InvalidArgument(f"{self.place.url} cannot be listened on: {error}", field="peer") from error
        return found

    @property
    def url(self) -> str:
        """The address, with the port that was taken."""
        if self.place.path:
            return self.place.url
        host = f"[{self.place.host}]" if ":" in self.place.host else self.place.host
        return f"tcp://{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Take no connections any more, and close all ends."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for end in list(self._ends):
            end.close()
        for thread in list(self._threads):
            thread.join()
        if self.place.path:
            with contextlib.suppress(OSError):
                os.unlink(self.place.path)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                time.sleep(RETRY_SECONDS)
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._one, args=(connection,), name="quire-peer", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _one(self, connection: socket.socket) -> None:
        try:
            self._greet_and_serve(connection)
        finally:
            self._slots.release()
            self._threads.discard(threading.current_thread())

    def _greet_and_serve(self, connection: socket.socket) -> None:
        try:
            address = "a process of this machine" if self.place.path else str(connection.getpeername()[0])
            end = _end(connection, address, self._trust, connects=False)
        except (QuireError, OSError) as error:
            self._refused(error if isinstance(error, QuireError) else InvalidArgument(str(error)))
            return
        self._ends.add(end)
        try:
            if not self._closed:  # else ``close`` may not have seen this end
                self._serve(end)
        finally:
            end.close()
            self._ends.discard(end)


def _is_loopback(address: object) -> bool:
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(str(address).partition("%")[0])
        return (getattr(found, "ipv4_mapped", None) or found).is_loopback
    return False


def _remove_stale(path: str) -> None:
    """Remove a socket that nothing listens on."""
    if not Path(path).exists() or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
