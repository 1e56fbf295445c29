"""The models that ollama keeps on this machine, by its names. No torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.weights.gguf_paths import is_gguf

MOST = 10_000
"""Most manifests that are looked at."""
REGISTRY = "registry.ollama.ai/"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A model: ollama's name with its tag, the GGUF file, and the format of its weights."""

    name: str
    file: Path
    weights: str


def ollama_models() -> Iterator[OllamaModel]:
    """Yield the models in ollama's folders. What cannot be read is left out, and so are models with
    an adapter, whose weights alone are another model."""
    given = (os.environ.get("OLLAMA_MODELS"), "~/.ollama/models", "/usr/share/ollama/.ollama/models")
    folders = [Path(os.path.realpath(os.path.expanduser(one))) for one in given if one]
    for folder in dict.fromkeys(folders):
        manifests = folder / "manifests"
        for manifest in sorted(manifests.rglob("*"))[:MOST] if os.path.isdir(manifests) else ():
            found = read_json(manifest)
            listed = found.get("layers")
            layers = {one.get("mediaType"): one for one in listed or () if isinstance(one, dict)}
            blob = None if _ADAPTER_LAYER in layers else _blob(folder, layers.get(_MODEL_LAYER))
            if blob is not None and is_gguf(blob):
                path = manifest.parent.relative_to(manifests).as_posix()
                name = path.removeprefix(REGISTRY).removeprefix("library/")
                config = _blob(folder, found.get("config"))
                weights = "" if config is None else str(read_json(config).get("file_type") or "")
                yield OllamaModel(f"{name}:{manifest.name}", blob, weights)


def ollama_file(name: str) -> Path | None:
    """Return the GGUF file of a model by ollama's name, where ``latest`` is the tag of a name
    without one; None if there is no such model. ``ORG/NAME`` without a tag is none of ollama's."""
    if ":" not in name.rpartition("/")[2]:
        if name.count("/") == 1:
            return None
        name += ":latest"
    return next((model.file for model in ollama_models() if model.name == name), None)


def read_json(file: Path) -> dict[str, Any]:
    """Return a file's JSON object, empty if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _blob(folder: Path, layer: object) -> Path | None:
    digest = layer.get("digest") if isinstance(layer, dict) else None
    file = folder / "blobs" / str(digest).replace(":", "-")
    is_digest = isinstance(digest, str) and re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    return file if is_digest and os.path.isfile(file) else None
