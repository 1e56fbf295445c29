"""``Seal``: authenticated encryption of the messages of one connection (AES-256 in GCM).

It needs the package ``cryptography``, which the extra ``handover`` brings. Both keys follow from
the shared secret and from random bytes of both ends, so each connection has its own. Who learns the
secret later can read what was recorded before.
"""

from __future__ import annotations

import hmac
from importlib.util import find_spec

from quire.base.errors import DataLoss
from quire.contracts.channel import Buffers


def can_seal() -> bool:
    """Return whether this process can encrypt."""
    return find_spec("cryptography") is not None


class Seal:
    """The keys of both directions. The n-th message has n as its nonce, so that none can be left
    out, repeated or moved."""

    def __init__(self, secret: bytes, greetings: bytes, *, connects: bool) -> None:
        """Derive the keys. ``greetings``: the hellos of both ends; ``connects``: whether this end
        has opened the connection."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        names = (b"to the listener", b"to the caller")
        out, back = names if connects else names[::-1]
        self._out = AESGCM(hmac.digest(secret, b"seal " + out + greetings, "sha256"))
        self._back = AESGCM(hmac.digest(secret, b"seal " + back + greetings, "sha256"))
        self._sent = self._opened = 0

    def close(self, parts: Buffers) -> bytes:
        """Return a message encrypted, 16 bytes longer."""
        self._sent += 1
        return bytes(self._out.encrypt(self._sent.to_bytes(12, "little"), b"".join(parts), None))

    def open(self, data: memoryview) -> memoryview:
        """Return a message as it was; ``DataLoss`` if it is not the next one of the peer."""
        from cryptography.exceptions import InvalidTag

        self._opened += 1
        try:
            found = self._back.decrypt(self._opened.to_bytes(12, "little"), data, None)
        except InvalidTag:
            raise DataLoss(f"message {self._opened} is not what the peer encrypted") from None
        return memoryview(bytearray(found))
