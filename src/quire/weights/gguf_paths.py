"""GGUF files by their names and first bytes, without reading them. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from quire.base.errors import CheckpointError, some

MAGIC = b"GGUF"
SPLIT_NAME = re.compile(r"(?P<base>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file: by its name, or by its first bytes."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def part_files(path: Path) -> tuple[Path, ...]:
    """Return the files of the model in ``path``: itself, or all parts of a split one, of which
    ``path`` is any. ``CheckpointError`` if a part is missing."""
    found = SPLIT_NAME.fullmatch(path.name)
    if found is None:
        return (path,)
    parts = int(found["parts"])
    names = [f"{found['base']}-{part:05}-of-{parts:05}.gguf" for part in range(1, parts + 1)]
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing or not names:
        raise CheckpointError(f"{path} is one of {parts} parts; {some(missing, 1)} beside it is missing")
    return tuple(path.with_name(name) for name in names)
