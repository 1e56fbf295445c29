"""Commits: documents that describe a session, and name the objects with its state. No torch.

A commit names its tokens and the turns of its chat by *pieces*, lists of a fixed number of items
under the digest of their content, so that the commits of one session share all but the last ones.
The names of its objects are computed from the tokens (``quire.store.keys``). Its id is a digest of
the document, its parent's id included, so an id identifies a whole history.

A *space* holds the branches of one owner. All names of records depend on it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from quire.base.errors import InvalidArgument, StoreDamaged, Unsupported
from quire.contracts.store import KEY_BYTES, ObjectKey, ObjectKind
from quire.statefile.schema import Count, Document, Fault, Run, Size, fitted
from quire.store.keys import Chain, StoredPiece, record_key, records_of

VERSION = 1
"""Version of the documents. A newer one is refused."""
LONGEST_NAME, LONGEST_MESSAGE = 128, 4096
"""Most characters of a branch's name, and of a message."""
TOKENS_IN_PIECE, TURNS_IN_PIECE = 1024, 16

_NAME = re.compile(r"(?![-/])[A-Za-z0-9._/-]{1,128}")
_ID = re.compile(r"[0-9a-f]{8,40}")


class StateNames(Document, frozen=True, kw_only=True):
    """The data from which the names of a state's objects are computed, and their bytes of state."""

    root: Annotated[str, Meta(pattern="^([0-9a-f]{2})*$")] = ""
    """The root digest of the keys of its tokens, in hexadecimal digits."""
    chunk: Size = 1
    """Number of tokens of a full run."""
    length: Count = 0
    """Number of tokens with state."""
    row_bytes: Count = 0
    """Bytes of a token in the layers that keep all tokens; 0: there are no objects of rows."""
    stops: Sequence[tuple[Count, Count]] = ()
    """Position and bytes of each stop."""
    file: tuple[str, Count] | None = None
    """Name and bytes of a single object with a whole state file, if tokens do not give the state;
    then all fields above are empty."""

    def pieces(self, ids_T: NDArray[np.int64], adapters: Sequence[Sequence[Any]]) -> dict[StoredPiece, int]:
        """Return the objects of these tokens with their positions and bytes of state. A whole state
        file spans all tokens."""
        if self.file is not None:
            return {StoredPiece(ObjectKey.parse(self.file[0]), 0, ids_T.size): self.file[1]}
        if not self.root:
            return {}
        runs = tuple((start, fingerprint) for start, fingerprint in adapters)
        chain = Chain.of(bytes.fromhex(self.root), ids_T[: self.length], runs, self.chunk)
        found: dict[StoredPiece, int] = {}
        for start in range(0, self.length, self.chunk) if self.row_bytes else ():
            stop = min(start + self.chunk, self.length)
            found[StoredPiece(chain.rows(start, stop), start, stop)] = (stop - start) * self.row_bytes
        return found | {
            StoredPiece(chain.stop(position), position, position): nbytes for position, nbytes in self.stops
        }

    def objects(self, ids_T: NDArray[np.int64], adapters: Sequence[Sequence[Any]]) -> dict[ObjectKey, int]:
        """Return the keys of the objects of these tokens, with their bytes of state."""
        return {piece.key: nbytes for piece, nbytes in self.pieces(ids_T, adapters).items()}

    @property
    def nbytes(self) -> int:
        """Bytes of state in all objects."""
        rows = self.length * self.row_bytes + sum(nbytes for _, nbytes in self.stops)
        return rows if self.file is None else int(self.file[1])


class SessionCommit(Document, frozen=True, kw_only=True):
    """A snapshot of a session. ``id`` is computed from all other fields."""

    id: str = ""
    """40 hexadecimal digits."""
    parent: str | None
    """The id of the commit from which the session was made, or of its previous commit."""
    time: float
    """Unix time."""
    message: str
    session: str | None
    """The session's name."""
    labels: Mapping[str, str]
    num_tokens: Count
    model: Mapping[str, str]
    """``ModelIdentity.fields``."""
    layout_hash: str
    """Digest of the layout of its KV state."""
    adapters: Sequence[Run]
    """[from position, fingerprint or None], as in state files."""
    key: Sequence[str | None]
    """Key of the states that may be shared with it: ``adapters.keys.written_key``."""
    window: tuple[Size, Count] | None
    """(window, sink)"""
    modified: bool
    """Whether tokens do not give its state; then it is never computed again."""
    tokens: Sequence[str]
    """Names of the pieces of its token ids."""
    turns: Sequence[str]
    """Names of the pieces of its chat's turns."""
    chat: Any
    """Further fields of its chat; None: it has no chat."""
    state: StateNames

    @property
    def nbytes(self) -> int:
        """Bytes of its state, shared objects included."""
        return self.state.nbytes

    @property
    def pieces(self) -> list[str]:
        """Names of all its pieces."""
        return [*self.tokens, *self.turns]

    def document(self) -> dict[str, Any]:
        """Return the document, without the id."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=dict)
        del found["id"]
        return {"version": VERSION, **found}

    def signed(self) -> Self:
        """Return the same commit with its id."""
        return msgspec.structs.replace(self, id=digest_of(self.document()))

    @classmethod
    def read(cls, document: Mapping[str, Any], name: str) -> Self:
        """Return the commit of a document found under ``name``. ``StoreDamaged`` if its digest
        differs; ``Unsupported`` for a newer version."""
        if digest_of(document) != name:
            raise StoreDamaged(f"commit {name} is damaged: its document has another digest")
        version = document.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise Unsupported(f"commit {name} is of version {version!r:.20}; this Quire reads up to {VERSION}")
        try:
            found = fitted({key: value for key, value in document.items() if key != "version"} | {"id": name}, cls, "")
            if found.state.file is not None:
                ObjectKey.parse(found.state.file[0])
        except (Fault, InvalidArgument) as fault:
            raise StoreDamaged(f"commit {name} is damaged: {fault}") from None
        if not all(0 <= stop <= found.state.length <= found.num_tokens for stop in (0, *dict(found.state.stops))):
            raise StoreDamaged(f"commit {name} is damaged: it has {found.num_tokens} tokens, and the state of others")
        return found


class SpaceRecord(Document, frozen=True):
    """Marks a space as used."""

    name: str


class BranchRecord(Document, frozen=True):
    """Names the head commit of a branch."""

    name: str
    commit: Annotated[str, Meta(pattern="^[0-9a-f]{40}$")]


class PieceRecord(Document, frozen=True):
    """Holds the items of a piece."""

    items: list[Any]


@dataclass(frozen=True, slots=True)
class Space:
    """The keys of one owner's records. ``name``: "" for a program, else from ``space_of``."""

    name: str = ""

    def branch(self, name: str) -> ObjectKey:
        """Return the key of a branch's record."""
        return record_key(f"branch/{self.name}", name)

    def commit(self, name: str) -> ObjectKey:
        """Return the key of a commit's record."""
        return ObjectKey(self.commits, ObjectKind.RECORD, 0, bytes.fromhex(name))

    def piece(self, name: str) -> ObjectKey:
        """Return the key of a piece's record."""
        return ObjectKey(self.pieces, ObjectKind.RECORD, 0, bytes.fromhex(name))

    @property
    def branches(self) -> bytes:
        """The parent of the keys of all branches."""
        return records_of(f"branch/{self.name}")

    @property
    def commits(self) -> bytes:
        """The parent of the keys of all commits."""
        return records_of(f"commit/{self.name}")

    @property
    def pieces(self) -> bytes:
        """The parent of the keys of all pieces."""
        return records_of(f"piece/{self.name}")


SPACES = records_of("space")
"""The parent of the records of all spaces."""


def space_of(owner: str) -> Space:
    """Return an owner's space. Its name does not reveal the owner."""
    if not isinstance(owner, str) or not _is_unicode(owner):
        raise InvalidArgument(field="owner", given=owner, allowed="a string")
    return Space(hashlib.blake2b(b"space:" + owner.encode(), digest_size=16).hexdigest() if owner else "")


def space_key(space: Space) -> ObjectKey:
    """Return the key of the record that marks a space as used."""
    return record_key("space", space.name)


def split(items: Sequence[Any], count: int) -> dict[str, list[Any]]:
    """Return items as pieces of ``count``, by name, in order."""
    pieces = [list(items[start : start + count]) for start in range(0, len(items), count)]
    # The place is part of the name: pieces of equal items at two places are two.
    return {digest_of([number, piece]): piece for number, piece in enumerate(pieces)}


def checked_piece(name: str, number: int, items: Sequence[Any]) -> list[Any]:
    """Return the items of piece ``number``; ``StoreDamaged`` if they do not fit its name."""
    if digest_of([number, list(items)]) != name:
        raise StoreDamaged(f"piece {name} is damaged: its items have another digest")
    return list(items)


def digest_of(document: Any) -> str:
    """Return the digest of a JSON document, in hexadecimal digits."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=dict)
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest()


def is_id(text: str) -> bool:
    """Return True if a text has the form of an id, or of the beginning of one."""
    return _ID.fullmatch(text) is not None


def checked_branch(name: object) -> str:
    """Return the name of a branch; ``InvalidArgument`` for an invalid one."""
    good = isinstance(name, str) and _NAME.fullmatch(name) is not None
    if not good or ".." in str(name):
        allowed = f'1 to {LONGEST_NAME} of A-Z a-z 0-9 . _ - /, without "..", and not beginning with - or /'
        raise InvalidArgument(field="name", given=name, allowed=allowed)
    return str(name)


def checked_message(message: object) -> str:
    """Return a message, "" for None; ``InvalidArgument`` for an invalid one."""
    if message is None:
        return ""
    if not isinstance(message, str) or len(message) > LONGEST_MESSAGE or not _is_unicode(message):
        raise InvalidArgument(
            field="message", given=message, allowed=f"text of at most {LONGEST_MESSAGE} characters, or None"
        )
    return message


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
