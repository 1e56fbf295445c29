"""The greeting of a connection: both ends prove that they know one secret, and agree on encryption.

Both send a hello: a name, the version, flags and 32 random bytes. Then each proves the secret by
an HMAC over both hellos, the caller first, so that a listener gives nothing away. docs/handover.md
has the bytes.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from dataclasses import dataclass

from quire.base.errors import InvalidArgument, Unsupported
from quire.channels.sealed import Seal, can_seal

VERSION = 2
"""Of the greeting and of what follows it."""
GREETING_SECONDS = 10.0
"""Most seconds of a greeting."""
_NAME = b"quire-handover"
_HELLO = len(_NAME) + 2 + 1 + 32
_MUST, _CAN = 1, 2
_ACCEPTED, _REFUSED = b"\x01", b"\x00"


@dataclass(frozen=True, slots=True)
class Trust:
    """The demands of an end on its peers."""

    secret: bytes = b""
    """Empty: any process of this machine is trusted."""
    seals: bool | None = None
    """Whether messages are encrypted; None: if the connection leaves this machine."""


def greet(connection: socket.socket, peer: str, trust: Trust, *, connects: bool, local: bool) -> Seal | None:
    """Greet the other end; return the encryption of messages, None: there is none. ``local``: both
    ends are on this machine. ``InvalidArgument``: another version, or a peer that does not know the
    secret; ``Unsupported``: one that cannot encrypt. Then the connection is of no more use."""
    until = time.monotonic() + GREETING_SECONDS
    must = not local if trust.seals is None else trust.seals
    flags = (_MUST if must else 0) | (_CAN if can_seal() else 0)
    mine = _NAME + VERSION.to_bytes(2, "little") + bytes([flags]) + secrets.token_bytes(32)
    try:
        connection.settimeout(GREETING_SECONDS)
        connection.sendall(mine)
        theirs = _exactly(connection, _HELLO, until)
        if theirs[: len(_NAME)] != _NAME:
            raise InvalidArgument(f"what answers at {peer} hands over no state; give the --peer of a prefill server")
        if (version := int.from_bytes(theirs[len(_NAME) : len(_NAME) + 2], "little")) != VERSION:
            raise InvalidArgument(f"{peer} hands over by version {version}; {VERSION} is expected")
        both = mine + theirs if connects else theirs + mine
        _prove(connection, peer, trust.secret, both, until, connects=connects)
    except (OSError, EOFError) as error:
        raise InvalidArgument(f"{peer} ended the greeting: {error}") from error
    their_flags = theirs[len(_NAME) + 2]
    if not (flags | their_flags) & _MUST:
        return None
    if not flags & their_flags & _CAN:
        who = peer if flags & _CAN else "this server"
        raise Unsupported(f"messages to {peer} must be encrypted, and {who} lacks the package cryptography")
    return Seal(trust.secret, both, connects=connects)


def _prove(connection: socket.socket, peer: str, secret: bytes, both: bytes, until: float, *, connects: bool) -> None:
    """Prove the secret to each other."""
    mine, theirs = (b"caller", b"listener") if connects else (b"listener", b"caller")
    proof, expected = (hmac.digest(secret, who + both, "sha256") for who in (mine, theirs))
    refusal = InvalidArgument(f"{peer} does not have the secret of this server; give both the same --secret-file")
    if connects:
        connection.sendall(proof)
        if _exactly(connection, 1, until) != _ACCEPTED:
            raise refusal
        if not hmac.compare_digest(_exactly(connection, 32, until), expected):
            raise refusal
        return
    if not hmac.compare_digest(_exactly(connection, 32, until), expected):
        connection.sendall(_REFUSED)
        raise refusal
    connection.sendall(_ACCEPTED + proof)


def _exactly(connection: socket.socket, count: int, until: float) -> bytes:
    found = b""
    while len(found) < count:
        # A peer that sends a byte now and then must end in time, too.
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(count - len(found))
        if not data:
            raise EOFError("the connection was closed")
        found += data
    return found
