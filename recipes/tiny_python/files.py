"""Writing files and directories so that a reader sees the old one or the whole new one."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.base.errors import AlreadyExists, FailedPrecondition


@contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Gives a temporary path beside ``path``; what was written there takes its place when the block
    ends well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Named for the process: two runs on one directory must not write the same temporary file.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def replaced_directory(path: Path, *, force: bool) -> Iterator[Path]:
    """Gives an empty temporary directory beside ``path`` that takes its place when the block ends
    well.

    Raises:
        AlreadyExists: ``path`` exists and ``force`` is false; checked before anything is made.
    """
    if path.exists() and not force:
        raise AlreadyExists(f"the output directory {path} exists already; choose another one or pass --force")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        part = Path(scratch, "new")
        part.mkdir()
        yield part
        if path.exists():
            path.replace(Path(scratch, "old"))
        part.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Writes ``value`` indented, in one piece."""
    with replaced_file(path) as part:
        part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value in ``path``."""
    return json.loads(path.read_text(encoding="utf-8"))


def require(path: Path, stage: str) -> Path:
    """``path``, which ``stage`` makes.

    Raises:
        FailedPrecondition: it is not there.
    """
    if not path.exists():
        raise FailedPrecondition(f"{path} is missing; run the stage '{stage}' first")
    return path


def require_new(path: Path, *, force: bool) -> None:
    """Refuses to overwrite ``path`` unless ``force``.

    Raises:
        AlreadyExists: it is there.
    """
    if path.exists() and not force:
        raise AlreadyExists(f"{path} exists already; pass --force to make it again")
