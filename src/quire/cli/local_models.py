"""The models on this machine: bundled ones, the Hub's cache, this directory, and the folders of
ollama, llama.cpp and LM Studio. No torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from quire.base.errors import CheckpointError, short_size
from quire.models.catalogue import bundled_models, gguf_files
from quire.models.ollama_files import ollama_models, read_json
from quire.weights.gguf_paths import MAGIC, part_files

_FORMAT = re.compile(r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE)
"""Finds the format of weights in the name of a GGUF file."""
BUNDLED = "bundled"
MOST = 10_000
"""Most files that are looked at below one folder."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model, by what a command takes for it."""

    name: str
    weights: str
    nbytes: int
    place: str


def models_here() -> list[LocalModel]:
    """List the models on this machine. What cannot be read is left out."""
    home = Path.home()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    llama = [os.environ.get("LLAMA_CACHE"), cache / "llama.cpp", home / "Library/Caches/llama.cpp"]
    studio = [home / ".lmstudio/models", cache / "lm-studio/models"]
    found = [
        *_directories(bundled_models().items(), BUNDLED),
        *_here(Path.cwd()),
        *_hub(),
        *(LocalModel(one.name, one.weights, _size([one.file]), "ollama") for one in ollama_models()),
        *(one for folder in _folders(llama) for one in _files(folder.glob("*.gguf"), "llama.cpp")),
        *(one for folder in _folders(studio) for one in _files(folder.glob("*/*/*.gguf"), "LM Studio")),
    ]
    return list(dict.fromkeys(found))


def _folders(given: Iterable[str | Path | None]) -> list[Path]:
    """Return the existing folders, each once."""
    there = [Path(one).expanduser() for one in given if one]
    return list(dict.fromkeys(one.resolve() for one in there if one.is_dir()))


def _here(folder: Path) -> Iterator[LocalModel]:
    configs = sorted(folder.glob("*/config.json"))[:MOST]
    yield from _directories(((f"./{one.parent.name}", one.parent) for one in configs), "this directory")
    for model in _files(gguf_files(folder), "this directory"):
        yield LocalModel(Path(model.name).name, model.weights, model.nbytes, model.place)


def _directories(named: Iterable[tuple[str, Path]], place: str) -> Iterator[LocalModel]:
    for name, folder in named:
        weights = list(folder.glob("*.safetensors"))
        config = read_json(folder / "config.json")
        if weights and ("architectures" in config or "model_type" in config):
            yield LocalModel(name, _format_in(config), _size(weights), place)


def _files(files: Iterable[Path], place: str) -> Iterator[LocalModel]:
    """Yield the models in GGUF files, of split ones by their first parts."""
    for file in list(files)[:MOST]:
        try:
            parts = part_files(file)
        except CheckpointError:  # a part is missing
            continue
        if file == parts[0] and not file.name.startswith("mmproj") and _is_whole(file):
            yield LocalModel(str(file), _format_of(file.name), _size(parts), place)


def _is_whole(file: Path) -> bool:
    """Return whether a file begins as GGUF does: no page of an error, no pointer of git-lfs."""
    try:
        return file.is_file() and file.open("rb").read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _hub() -> Iterator[LocalModel]:
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, ValueError):
        return
    place = "Hugging Face's cache"
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        revisions = sorted(repo.revisions, key=lambda one: ("main" in one.refs, one.last_modified), reverse=True)
        if repo.repo_type != "model" or not revisions:
            continue
        folder = Path(revisions[0].snapshot_path)
        yield from _directories([(repo.repo_id, folder)], place)
        models = list(_files(gguf_files(folder), place))
        for model in models:
            part = f":{model.weights}" if len(models) > 1 and model.weights else ""
            yield LocalModel(f"{repo.repo_id}{part}", model.weights, model.nbytes, place)


def _format_of(name: str) -> str:
    found = _FORMAT.findall(name)
    return found[-1].upper() if found else ""


def _format_in(config: Mapping[str, Any]) -> str:
    """Return the format of weights that a config.json tells."""
    quantized = config.get("quantization_config")
    inner = config.get("text_config")
    texts = [config, inner if isinstance(inner, dict) else {}]
    dtype = next((one for text in texts for key in ("dtype", "torch_dtype") if (one := text.get(key))), "")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    return str(method or dtype)


def _size(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


# -- showing ---------------------------------------------------------------------------------------


def models_table(models: Iterable[LocalModel]) -> Any:
    from quire.cli.tables import folding_table

    rows = [(one.name, one.weights or "-", short_size(one.nbytes), one.place) for one in models]
    return folding_table("model", "weights", "size", "where", title="On this machine", rows=rows)


def ask_for_model(command: str) -> NoReturn:
    """Show the models on this machine and how to take one, and exit as for a wrong use."""
    from quire.cli.tables import print_tables

    found = models_here()
    print(
        f"quire: {command} needs a MODEL: one of these, a directory, a GGUF file or a Hugging Face id", file=sys.stderr
    )
    if found:
        print_tables(models_table(found), stderr=True)
        one = next((model for model in found if model.place != BUNDLED), found[0])
        print(f"For example: quire {command} {one.name}", file=sys.stderr)
    sys.exit(2)
