"""Fingerprints of models: architecture, computation, weights.

State files carry a fingerprint, because K and V mean nothing to another model. The digest of the
weights reads every byte once at several GB/s, so it is computed at the first request and cached.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from quire.base.errors import CheckpointError, InvalidArgument
from quire.models.families import LoadedModel, canonical_of
from quire.models.quantized import read_quantized
from quire.models.rope_config import LengthRule, length_rule
from quire.models.sources import read_config, weight_files
from quire.weights.floats import DTYPES
from quire.weights.gguf_paths import is_gguf

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 24


class ModelIdentity(Protocol):
    """The identity of a model. The first request may compute the digest of the weights."""

    def fields(self) -> Mapping[str, str]:
        """Return ``architecture``, ``config``, ``weights``; equal values mean equal K and V."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFingerprint:
    """Models with equal fingerprints give the same K and V for the same tokens, up to rounding."""

    architecture: str
    config: str
    """SHA-256 (hex) of the canonical JSON that decides the logits, without context and dtype."""
    weights: str
    """XXH3-128 (hex) of the bytes of the files, then "-gguf" or the
    ``quant_method`` of a quantised checkpoint and the formats in the files, then
    "-int8", "-int4" or "-fp8" if the weights were quantised."""
    length: str = ""
    """The range of ``max_model_len`` with the same RoPE frequencies; "" if they do not depend on
    it. It is implied by ``config``, and explains a difference there."""


def model_fingerprint(path: str | os.PathLike[str], model: LoadedModel) -> ModelFingerprint:
    """Return the fingerprint of ``model``, loaded from ``path``. Raise ``InvalidArgument`` if that
    directory now has another model, and ``CheckpointError`` if it is unreadable."""
    path = Path(path)
    values = read_config(path)
    if canonical_of(values, model.max_model_len) != model.canonical_config:
        raise InvalidArgument(
            f"{path} does not describe the {model.architecture} that was given; expected its directory"
        )
    return ModelFingerprint(
        architecture=model.architecture,
        config=hashlib.sha256(model.canonical_config.encode()).hexdigest(),
        weights="-".join((weights_digest(path), *_formats(path, model))),
        length="" if (rule := length_rule_of(model)) is None else rule.made_for,
    )


def _formats(path: Path, model: LoadedModel) -> Iterator[str]:
    quantized = None if is_gguf(path) else read_quantized(model.config)
    if is_gguf(path) or quantized is not None:
        yield f"{'gguf' if quantized is None else quantized.method}:{'+'.join(sorted(model.formats))}"
    if kept := kept_formats(model):
        yield f"blocks:{'+'.join(sorted(kept))}"
    if model.quantization:
        yield model.quantization


def kept_formats(model: LoadedModel) -> list[str]:
    """Return the formats that kernels multiply as they are, besides floats."""
    return [name for name, size in model.formats.items() if name not in DTYPES and model.expanded.get(name, 0) < size]


def length_rule_of(model: LoadedModel) -> LengthRule | None:
    """Return the rule for the lengths with equal RoPE frequencies of a model; None if they do not
    depend on the length."""
    ropes = [rope for spec in model.layer_specs if (rope := getattr(spec, "rope", None)) is not None]
    return length_rule(model.config, ropes, model.max_model_len or model.max_position)


def weights_digest(path: Path) -> str:
    """Return XXH3-128 (hex) of the file's bytes, or of the files' digests ordered by name."""
    digests = [file_digest(file) for file in weight_files(path)]
    return digests[0] if len(digests) == 1 else xxhash.xxh3_128_hexdigest("".join(digests).encode())


def checkpoint_mark(path: Path) -> str:
    """Return a short digest of the configuration and of the names, sizes and times of the files,
    by which processes of one machine find that they see the same checkpoint."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weight_files(path)]
    return xxhash.xxh3_64_hexdigest(json.dumps([read_config(path), stats], sort_keys=True, default=str).encode())


def file_digest(file: Path) -> str:
    """Return XXH3-128 (hex) of a file, cached by path, size and modification time."""
    try:
        real = file.resolve(strict=True)
        before = real.stat()
        key = {"size": before.st_size, "mtime_ns": before.st_mtime_ns}
        entry = _read_cache().get(str(real))
        if (
            isinstance(entry, dict)
            and {name: entry.get(name) for name in key} == key
            and _is_digest(entry.get("xxh3_128"))
        ):
            return str(entry["xxh3_128"])
        digest = xxhash.xxh3_128()
        with real.open("rb", buffering=0) as stream:
            while block := stream.read(READ_BYTES):
                digest.update(block)
        after = real.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read for its digest: {error}") from error
    if (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
        _remember(str(real), {**key, "xxh3_128": digest.hexdigest()})
    return str(digest.hexdigest())


def digested_models(weights: str) -> list[Path]:
    """Return the directories and GGUF files of this machine with this cached ``weights_digest``.
    Reads only the cache."""
    known = set[Path]()
    folders = set[Path]()
    for name, entry in _read_cache().items():
        with suppress(OSError, AttributeError):
            stat, file = os.stat(name), Path(name)
            if (stat.st_size, stat.st_mtime_ns) == (entry.get("size"), entry.get("mtime_ns")):
                known.add(file)
                if is_gguf(file):
                    folders.add(file)
                    continue
                # A directory of the Hub's cache links to files that lie elsewhere.
                linked = file.parent.name == "blobs"
                folders |= {*(file.parent.parent / "snapshots").iterdir()} if linked else {file.parent}
    found: list[Path] = []
    for folder in sorted(folders):
        with suppress(CheckpointError):
            if {file.resolve() for file in weight_files(folder)} <= known and weights_digest(folder) == weights:
                found.append(folder)
    return found


def cache_file() -> Path:
    """Return ``quire/digests.json`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "quire" / "digests.json"


def _read_cache() -> dict[str, Any]:
    """Read the cache; empty if missing or damaged, because every entry can be computed again."""
    try:
        cache = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):
        return {}
    return cache if isinstance(cache, dict) else {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and all(c in "0123456789abcdef" for c in value)


def _remember(key: str, entry: dict[str, Any]) -> None:
    """Add an entry through a temporary file. Parallel writers may lose entries, never the file."""
    temporary = None
    try:
        target = cache_file()
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=target.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as stream:
            temporary = Path(stream.name)
            json.dump({**_read_cache(), key: entry}, stream, indent=1, sort_keys=True)
        temporary.replace(target)
    except (OSError, RuntimeError) as error:
        logger.debug("the digest of %s is not cached: %s", key, error)
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()
