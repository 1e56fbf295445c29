"""Stage ``collect``: Python sources of this machine, split into training and held-out files.

A source is a name that can be imported (``torch``, ``json``), or ``stdlib`` for the whole standard
library. Nothing is imported: packages are only found. Which files are held out depends on nothing
but their path inside the source, so that a later version of a package keeps the same split.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound

from .files import replaced_file, require, require_new, write_json
from .settings import Recipe, Workplace

_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """One source file: ``path`` starts with the name of its source, ``text`` has no carriage
    returns.
    """

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What was taken from one source, and under which licence."""

    source: str
    version: str
    licence: str
    files: int
    heldout_files: int
    bytes: int


def collect(recipe: Recipe, work: Workplace, *, force: bool = False) -> list[Origin]:
    """Writes the training and held-out documents and the note of their origins.

    Raises:
        AlreadyExists: the documents are there and ``force`` is false.
        NotFound: a source is not installed, or has no Python files.
        FailedPrecondition: the split leaves one side without files.
    """
    require_new(work.train_text, force=force)
    roots = {source: find_source(source) for source in dict.fromkeys(recipe.sources)}
    seen: set[bytes] = set()
    origins: list[Origin] = []
    with replaced_file(work.train_text) as train_part, replaced_file(work.heldout_text) as heldout_part:
        with open(train_part, "w", encoding="utf-8") as train, open(heldout_part, "w", encoding="utf-8") as heldout:
            for source, root in roots.items():
                origins.append(_collect_source(source, root, recipe, seen, train, heldout))
        kept = sum(origin.heldout_files for origin in origins)
        total = sum(origin.files for origin in origins)
        if kept in (0, total):
            raise FailedPrecondition(
                f"{kept} of {total} files would be held out, and both sides of the split need at least one; "
                f"name more sources or change heldout_every ({recipe.heldout_every})"
            )
        write_json(work.sources, [asdict(origin) for origin in origins])
    return origins


def read_documents(path: Path) -> Iterator[Document]:
    """Documents of a file that ``collect`` wrote, in its order.

    Raises:
        FailedPrecondition: the file is not there.
    """
    with open(require(path, "collect"), encoding="utf-8") as lines:
        for line in lines:
            yield Document(**json.loads(line))


def is_heldout(path: str, every: int) -> bool:
    """Whether the file at ``path`` is kept for evaluation: one in ``every``, by a hash of the path
    alone.
    """
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % every == 0


def find_source(source: str) -> Path:
    """The directory or the single file that holds ``source``.

    Raises:
        InvalidArgument: not a plain top-level name.
        NotFound: nothing of that name is installed, or it has no Python source.
    """
    if source == "stdlib":
        return Path(sysconfig.get_paths()["stdlib"])
    if not source.isidentifier():
        raise InvalidArgument(f"a source is 'stdlib' or an importable top-level name such as 'torch', got {source!r}")
    spec = importlib.util.find_spec(source)
    if spec is None:
        raise NotFound(f"the source '{source}' is not installed for {sys.executable}")
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise NotFound(f"the source '{source}' has no Python source (it is {spec.origin or 'built in'})")
    return Path(spec.origin)


def _collect_source(
    source: str, root: Path, recipe: Recipe, seen: set[bytes], train: IO[str], heldout: IO[str]
) -> Origin:
    """Writes the documents of one source; ``seen`` holds the hashes of all that were written
    before.
    """
    files = heldout_files = size = 0
    for document in _documents(source, root, recipe.max_file_bytes):
        content = document.text.encode()
        digest = hashlib.sha256(content).digest()
        if digest in seen:  # vendored copies: the same file must not be on both sides of the split
            continue
        seen.add(digest)
        is_kept = is_heldout(document.path, recipe.heldout_every)
        (heldout if is_kept else train).write(json.dumps(asdict(document)) + "\n")
        files, heldout_files, size = files + 1, heldout_files + is_kept, size + len(content)
    if not files:
        raise NotFound(f"the source '{source}' has no readable Python files under {root}")
    version, licence = _licence(source)
    return Origin(source=source, version=version, licence=licence, files=files, heldout_files=heldout_files, bytes=size)


def _documents(source: str, root: Path, max_bytes: int) -> Iterator[Document]:
    base = root if root.is_dir() else root.parent
    for path in sorted(base.rglob("*.py")) if root.is_dir() else [root]:
        relative = path.relative_to(base)
        if _SKIPPED_DIRECTORIES.intersection(relative.parts) or not 0 < path.stat().st_size <= max_bytes:
            continue
        try:
            with tokenize.open(path) as file:  # honours the coding line of PEP 263
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # the library's tests hold files that are broken on purpose
        if text.strip():
            yield Document(path=f"{source}/{relative.as_posix()}", text=text)


def _licence(source: str) -> tuple[str, str]:
    """Version and licence of a source, as its metadata give them."""
    if source == "stdlib" or source in sys.stdlib_module_names:
        return platform.python_version(), "PSF-2.0"
    names = importlib.metadata.packages_distributions().get(source, [])
    if not names:
        return "unknown", "unknown: no metadata are installed"
    metadata = importlib.metadata.metadata(names[0])
    fields = {name: metadata.get_all(name, []) for name in ("License-Expression", "Classifier", "License")}
    classified = [text.rsplit(" :: ", 1)[-1] for text in fields["Classifier"] if text.startswith("License ::")]
    # Old packages put the whole licence text into the last field; its first line names it.
    named = [*fields["License-Expression"], ", ".join(classified), *fields["License"], "unknown"]
    return metadata["Version"], next(text.strip().splitlines()[0] for text in named if text.strip())
