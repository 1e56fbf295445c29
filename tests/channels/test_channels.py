"""Channels of every kind: order, size, ends that close, die or lie; what a greeting refuses."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.base.errors import DataLoss, InvalidArgument, QuireError, Unsupported
from quire.channels import greeting, ring, urls
from quire.channels.greeting import Trust
from quire.channels.pair import channel_pair
from quire.channels.place import Place
from quire.channels.socket_end import SocketEnd
from quire.channels.urls import Listener, connect
from quire.contracts.channel import Channel

HAS_CRYPTOGRAPHY = importlib.util.find_spec("cryptography") is not None
needs_cryptography = pytest.mark.skipif(not HAS_CRYPTOGRAPHY, reason="the package cryptography is missing")
SECRET = Trust(b"a secret of both ends")
KINDS = ["pair", "tcp", "shm", pytest.param("sealed", marks=needs_cryptography)]


@contextmanager
def listening(url: str, trust: Trust) -> Iterator[tuple[Listener, list[SocketEnd], list[QuireError]]]:
    """A listener, its accepted ends, and what it refused."""
    ends, refused, stop = list[SocketEnd](), list[QuireError](), threading.Event()

    def serve(end: SocketEnd) -> None:
        ends.append(end)
        stop.wait()

    listener = Listener(url, trust, serve, refused.append)
    try:
        yield listener, ends, refused
    finally:
        stop.set()
        listener.close()


def until(true: object, seconds: float = 10.0) -> None:
    """Wait until something is there."""
    deadline = time.monotonic() + seconds
    while not (true() if callable(true) else true):
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def both(kind: str, path: Path) -> Iterator[tuple[Channel, Channel]]:
    """Two connected ends."""
    if kind == "pair":
        yield channel_pair()
        return
    trust = Trust(SECRET.secret, seals=True) if kind == "sealed" else SECRET
    with listening(f"shm:{path}/s" if kind == "shm" else "tcp://127.0.0.1:0", trust) as (listener, ends, _):
        ours = connect(listener.url, trust)
        until(lambda: ends)
        yield ours, ends[0]
        ours.close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_whole_and_in_order(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "RING_BYTES", 1 << 16)
    monkeypatch.setattr(ring, "_PIECE", 1 << 13)
    chance = random.Random(kind)
    with both(kind, tmp_path) as ends:
        for number in range(2):
            sender, receiver = ends[number], ends[1 - number]
            sent = [chance.randbytes(chance.choice((1, 64, 999, 200_000))) for _ in range(40)]
            assert receiver.receive(0) is None
            for one in sent:
                cut, lent = len(one) // 3, bytearray(one)
                sender.send([lent[:cut], memoryview(lent)[cut:]])
                lent[:] = bytes(len(lent))
            for one in sent:
                found = receiver.receive(10)
                assert found is not None
                assert bytes(found) == one
        started = time.monotonic()
        assert receiver.receive(0.02) is None
        assert time.monotonic() - started >= 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_closes(kind: str, tmp_path: Path) -> None:
    """What was sent before arrives; then both directions say so."""
    with both(kind, tmp_path) as (ours, theirs):
        ours.send([b"last words"])
        ours.close()
        ours.close()
        found = theirs.receive(10)
        assert found is not None
        assert bytes(found) == b"last words"
        for _ in range(2):
            with pytest.raises(DataLoss, match="closed"):
                theirs.receive(10)
        with pytest.raises(DataLoss, match="this end of the channel is closed"):
            ours.send([b"more"])
        with pytest.raises(DataLoss, match="closed"):
            theirs.send([b"more"])


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_closes_while_it_waits(kind: str, tmp_path: Path) -> None:
    with both(kind, tmp_path) as (ours, _):
        closing = threading.Timer(0.05, ours.close)
        closing.start()
        with pytest.raises(DataLoss, match="this end of the channel is closed"):
            ours.receive(10)
        closing.join()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_peer_that_answers_and_closes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it closes after was sent, though the end knows before the call returns."""
    with both(kind, tmp_path) as (ours, theirs):
        assert isinstance(ours, SocketEnd)
        write = ours._write

        def written(left: list[memoryview], seconds: float) -> None:
            write(left, seconds)
            assert theirs.receive(10) is not None
            theirs.send([b"the answer"])
            theirs.close()
            until(lambda: ours._fault)

        monkeypatch.setattr(ours, "_write", written)
        ours.send([b"the question"])
        found = ours.receive(10)
        assert found is not None
        assert bytes(found) == b"the answer"
        with pytest.raises(DataLoss, match="closed"):
            ours.send([b"more"])


CHILD = """
import os, sys, time
from quire.channels.greeting import Trust
from quire.channels.urls import connect
end = connect(sys.argv[1], Trust(b"a secret of both ends"))
end.send([b"here"])
while True:
    end.send([os.urandom(100_000)])
    time.sleep(0.001)
"""


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_process_that_is_killed(kind: str, tmp_path: Path) -> None:
    """The other end says so; nothing is left of shared memory."""
    url = f"shm:{tmp_path}/s" if kind == "shm" else "tcp://127.0.0.1:0"
    with listening(url, SECRET) as (listener, ends, _):
        child = subprocess.Popen([sys.executable, "-c", CHILD, listener.url])
        until(lambda: ends, 30)
        assert ends[0].receive(10) is not None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        with pytest.raises(DataLoss, match=r"closed the channel|is broken"):
            list(iter(lambda: ends[0].receive(10), None))
        ends[0].close()
        held = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}
        assert not any("quire-handover" in one for one in held)
    assert not (tmp_path / "s").exists()


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_wrong_secret(kind: str, tmp_path: Path) -> None:
    url = f"shm:{tmp_path}/s" if kind == "shm" else "tcp://127.0.0.1:0"
    with listening(url, SECRET) as (listener, ends, refused):
        before = threading.active_count()
        with pytest.raises(InvalidArgument, match="does not have the secret of this server"):
            connect(listener.url, Trust(b"another"))
        until(lambda: refused)
        assert "does not have the secret" in str(refused[0])
        until(lambda: threading.active_count() == before)
        assert not ends, "nothing is left running"
        connect(listener.url, SECRET).close()


def test_a_listener_that_lies() -> None:
    """One that takes any secret proves nothing itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def lie() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"quire-handover" + (2).to_bytes(2, "little") + b"\0" + bytes(32))
                connection.recv(49 + 32, socket.MSG_WAITALL)  # hello and proof, which may come together
                connection.sendall(b"\x01" + bytes(32))
                time.sleep(0.05)

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(InvalidArgument, match="does not have the secret"):
            connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", SECRET)
        thread.join()


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (b"quire-handover" + (3).to_bytes(2, "little") + b"\0" + bytes(32), "hands over by version 3; 2 is expected"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n\r\n\r\n", "hands over no state"),
        (b"quire", "ended the greeting: the connection was closed"),
    ],
)
def test_other_peers(hello: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(hello)
                connection.recv(49)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(InvalidArgument, match=message):
            connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", SECRET)
        thread.join()


def test_a_silent_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_SECONDS", 0.05)
    timed_out = pytest.raises(InvalidArgument, match="ended the greeting: timed out")
    with socket.create_server(("127.0.0.1", 0)) as server, timed_out:
        connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", SECRET)


def test_a_peer_that_greets_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "GREETING_SECONDS", 0.1)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                for byte in b"quire-handover" + bytes(100):
                    if stop.wait(0.05):
                        break
                    connection.sendall(bytes([byte]))

        thread = threading.Thread(target=answer)
        thread.start()
        started = time.monotonic()
        with pytest.raises(InvalidArgument, match="ended the greeting: timed out"):
            connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", SECRET)
        assert time.monotonic() - started < 1
        stop.set()
        thread.join()


@pytest.mark.parametrize(("sends", "message"), [(b"m", "gave no memory"), (b"", "timed out")])
def test_a_peer_that_shares_no_memory(
    sends: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "GREETING_SECONDS", 1.0)
    with listening(f"shm:{tmp_path}/s", SECRET) as (_, _, refused), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(f"{tmp_path}/s")
        greeting.greet(peer, "it", Trust(SECRET.secret, seals=False), connects=True, local=True)
        peer.sendall(sends)
        until(lambda: refused)
        assert message in str(refused[0])


def test_a_listener_that_closes_during_a_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer that comes through then is served no more, or ``close`` would wait for it."""
    greeted, served, goes_on, end_of = threading.Event(), list[SocketEnd](), threading.Event(), urls._end

    def held(connection: socket.socket, peer: str, trust: Trust, *, connects: bool) -> SocketEnd:
        found = end_of(connection, peer, trust, connects=connects)
        if not connects:
            greeted.set()
            assert goes_on.wait(10)
        return found

    def serve(end: SocketEnd) -> None:
        served.append(end)
        with pytest.raises(DataLoss):
            end.receive(10)

    monkeypatch.setattr(urls, "_end", held)
    listener = Listener("tcp://127.0.0.1:0", SECRET, serve, print)
    ours = connect(listener.url, SECRET)
    assert greeted.wait(10)
    closing = threading.Thread(target=listener.close)
    closing.start()
    until(lambda: listener._closed and not listener._thread.is_alive())
    goes_on.set()
    closing.join(5)
    assert not closing.is_alive()
    assert not served
    ours.close()


def test_garbage_after_the_greeting() -> None:
    """A message of an impossible size ends the channel."""
    with listening("tcp://127.0.0.1:0", SECRET) as (listener, ends, _):
        ours = connect(listener.url, SECRET)
        until(lambda: ends)
        ours._socket.sendall(struct.pack("<Q", 1 << 50))
        with pytest.raises(DataLoss, match="a message of 1125899906842624 bytes"):
            ends[0].receive(10)
        ours.close()


@needs_cryptography
def test_sealed_bytes_cannot_be_changed() -> None:
    from quire.channels.sealed import Seal

    caller, listener = (Seal(b"secret", b"hellos", connects=connects) for connects in (True, False))
    first, second = caller.close([b"one", b"two"]), caller.close([b"three"])
    assert b"one" not in first
    assert bytes(listener.open(memoryview(first))) == b"onetwo"
    for wrong in (first, second[:-1], bytes([second[0] ^ 1]) + second[1:]):
        fresh = Seal(b"secret", b"hellos", connects=False)
        fresh.open(memoryview(first))
        with pytest.raises(DataLoss, match="message 2 is not what the peer encrypted"):
            fresh.open(memoryview(wrong))
    assert bytes(listener.open(memoryview(second))) == b"three"


def test_off_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a secret, or without encryption, nothing is sent and nothing listened on."""
    for act in (
        lambda trust: connect("tcp://192.0.2.1:9", trust),
        lambda trust: Listener("tcp://0.0.0.0:0", trust, print, print),
    ):
        with pytest.raises(
            InvalidArgument, match="is off this machine, so who hands over must prove a secret"
        ) as raised:
            act(Trust())
        assert raised.value.field == "secret_file"
        with monkeypatch.context() as patch:
            patch.setattr(urls, "can_seal", lambda: False)
            with pytest.raises(Unsupported, match="the package cryptography is missing"):
                act(SECRET)


def test_one_side_cannot_encrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "can_seal", lambda: True)
    monkeypatch.setattr(greeting, "can_seal", lambda: False)
    with listening("tcp://127.0.0.1:0", SECRET) as (listener, _, refused):
        with pytest.raises(Unsupported, match="must be encrypted, and this server lacks the package cryptography"):
            connect(listener.url, Trust(SECRET.secret, seals=True))
        until(lambda: refused)


@pytest.mark.parametrize(
    "url", ["", "http://a:1", "tcp://a", "tcp://a:99999", "tcp://:1", "shm:relative", "tcp://a:1/x"]
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"tcp://HOST:PORT, or shm:/PATH"):
        Place.of(url)


def test_addresses_in_use(tmp_path: Path) -> None:
    in_use = pytest.raises(InvalidArgument, match="cannot be listened on")
    with listening(f"shm:{tmp_path}/s", SECRET) as (listener, _, _), in_use:
        Listener(listener.url, SECRET, print, print)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/s")
    with listening(f"shm:{tmp_path}/s", SECRET):  # what nothing listens on is replaced
        assert os.stat(f"{tmp_path}/s").st_mode & 0o077 == 0
    with pytest.raises(InvalidArgument, match="nothing listens at"):
        connect(f"shm:{tmp_path}/s", SECRET)
    with pytest.raises(InvalidArgument, match="nothing listens at"):
        connect("tcp://127.0.0.1:1", SECRET)
