"""Adapters from ``ModelAssets``: files, bytes or streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from quire.base.errors import CheckpointError, InvalidArgument, QuireError
from quire.contracts.adapters import Adapter
from quire.contracts.executor import ModelAssets
from quire.models.families import LoadedModel

PIECE = 1 << 20
"""Bytes of one read from a stream."""


def read_assets(assets: ModelAssets, model: LoadedModel, admit: Callable[[int, int], None] | None = None) -> Adapter:
    """Return the adapter of a PEFT directory, or of a packed adapter (``peft_files.FORMS``).

    A directory may be named by its file of weights. A packed adapter is a file of any name, bytes,
    or the rest of a stream; an open file is read from its beginning and then returned to its
    position. ``InvalidArgument`` for a file or stream that gives no bytes; ``admit`` and other
    errors as in ``quire.adapters.peft.read_adapter``.
    """
    from quire.adapters import peft, peft_config, peft_files

    source = f"the {assets.source} of an adapter"
    if assets.path is not None:
        path, source = Path(assets.path), str(assets.path)
        if path.name == peft_files.WEIGHTS_FILE and (path.parent / peft_config.CONFIG_FILE).exists():
            path = path.parent
        if not path.is_file():
            return peft.read_adapter(path, model, admit=admit)
    content = _bytes_of(assets, source, peft_files.MAX_BYTES)
    return peft.read_packed_adapter(peft_files.unpack(content, source), model, source, admit=admit)


def _bytes_of(assets: ModelAssets, source: str, limit: int) -> bytes:
    """Return all bytes of assets; ``CheckpointError`` beyond ``limit`` and for unreadable ones."""
    try:
        if assets.path is not None:
            with open(assets.path, "rb") as opened:
                return _read(opened, source, limit)
        if assets.stream is not None:
            return _read(assets.stream, source, limit)
        if assets.file is not None:
            place = assets.file.tell()
            try:
                assets.file.seek(0)
                return _read(assets.file, source, limit)
            finally:
                assets.file.seek(place)
        with memoryview(b"" if assets.data is None else assets.data) as view:
            if view.nbytes > limit:
                raise _too_long(source, limit)
            return view.tobytes()
    except QuireError:
        raise
    except (OSError, ValueError) as error:  # a closed file raises ValueError
        raise CheckpointError(f"{source} cannot be read: {error}") from error


def _read(opened: BinaryIO, source: str, limit: int) -> bytes:
    found = bytearray()
    while True:
        piece: object = opened.read(PIECE)
        if not isinstance(piece, bytes | bytearray):
            raise InvalidArgument(
                f"{source} gives {type(piece).__name__} when it is read; expected bytes, as of a file that is opened with 'rb'"
            )
        if not piece:
            return bytes(found)
        found += piece
        if len(found) > limit:
            raise _too_long(source, limit)


def _too_long(source: str, limit: int) -> CheckpointError:
    return CheckpointError(
        f"{source} has more than {limit} bytes; expected the path of a directory, which is not read into memory"
    )
