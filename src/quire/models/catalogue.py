"""Finding a model or adapter by name: bundled, in a local directory, or on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from quire.base.errors import InvalidArgument, NotFound, some
from quire.base.progress import Bar, on_terminal
from quire.models.ollama_files import ollama_file
from quire.weights.gguf_paths import is_gguf, part_files

ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
"""Files downloaded from a repository: weights, index, configurations, tokenizer, chat templates."""
IGNORED_FILES = ("consolidated*", "original/*", "onnx/*", "openvino/*")
"""Second copies of the same weights in other layouts."""

ADAPTER_FILE = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_FILE, ADAPTER_WEIGHTS)
"""The files of an adapter; its repository must have both."""
ADAPTER_TEXTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""Files of a tokenizer and chat templates that may accompany an adapter."""
LISTED = 4
"""Most names listed in an error message."""
HUB_SECONDS = 10.0
"""Seconds that the Hub has to list a repository's files."""

GGUF_PART = re.compile(r"[A-Za-z0-9_.-]+")
HUB_HOST = re.compile(r"^(https://)?(hf\.co|huggingface\.co)/(?=[^/]+/[^/]+$)")
"""What ollama, llama.cpp and browsers have before a Hub's id."""
HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def bundled_models() -> dict[str, Path]:
    """Map the name of each bundled model to its directory."""
    return _bundled("config.json")


def bundled_adapters() -> dict[str, Path]:
    """Map the name of each bundled adapter to its directory."""
    return _bundled(ADAPTER_FILE)


def _bundled(file: str) -> dict[str, Path]:
    data = resources.files("quire") / "data"
    if not isinstance(data, Path) or not data.is_dir():  # Files inside a zip file cannot be memory-mapped.
        return {}
    return {entry.name: entry for entry in sorted(data.iterdir()) if (entry / file).is_file()}


def registered_architectures() -> dict[str, tuple[str, ...]]:
    """Map each loadable architecture of config.json to its kinds of layer state."""
    from quire.models.families import FAMILIES  # imports torch, which no name of a model needs

    return {name: FAMILIES.require(name).state_kinds for name in FAMILIES}


def resolve_model(name: str, revision: str | None = None) -> Path:
    """Return the checkpoint directory of a bundled model, a local directory or a Hub repository, or
    a GGUF file: itself, or the one in such a directory or repository. ``NAME:Q4_K_M`` names one of
    several there, by a part of its name.

    The first match wins; ``./name`` is always local. The names of ollama's models on this machine
    (``small:1b``) come before the Hub's; ``hf.co/`` before a Hub's id is left out. A repository
    that is not in the Hub's cache is downloaded at ``revision`` (branch, tag or commit).
    ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` are respected. Raise ``NotFound`` with the
    reason and the bundled names, and ``InvalidArgument`` for an empty name or for a revision of a
    directory.
    """
    return _resolve_model("model", name, revision, "a checkpoint directory, a GGUF file, a model that ollama has here")


def resolve_tokenizer(name: str, revision: str | None = None) -> Path:
    """Return a tokenizer's directory, found in the order of ``resolve_model``. Raises the same."""
    return _resolve_model("tokenizer", name, revision, "a directory, a GGUF file, a model that ollama has here")


def _resolve_model(kind: str, name: str, revision: str | None, accepted: str) -> Path:
    local = Path(os.path.expanduser(name))
    if name not in bundled_models() and not os.path.exists(local):
        if revision is None and (file := ollama_file(name)) is not None:
            return file
        name = HUB_HOST.sub("", name)
    place, colon, part = name.rpartition(":")
    if not colon or os.path.exists(local):
        place, part = name, ""
    if part and not GGUF_PART.fullmatch(part):
        raise NotFound(f"{kind} {name!r}: {part!r} names no GGUF file; expected a part of its name, such as Q4_K_M")
    if os.path.isfile(local) and is_gguf(local):
        if revision is not None:
            raise InvalidArgument(f"revision is {revision!r}, but {name!r} is a file; expected a Hugging Face id")
        return part_files(local)[0]
    files = (f"*{part}*.gguf", f"*{part.lower()}*.gguf") if part else ALLOWED_FILES
    folder = _resolve(kind, place, revision, bundled_models(), accepted, files)
    if not part and any((folder / file).is_file() for file in ("config.json", "tokenizer.json")):
        return folder
    found = gguf_files(folder, part)
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(
            f"{kind} {name!r} has {len(found)} GGUF files: {_listed([one.name for one in found])}; name one of them, as in "
            f"{place}:{found[0].stem}"
        )
    there = [one.name for one in gguf_files(folder)]
    if not os.path.exists(os.path.expanduser(place)):
        there = [file for file in _files_of(place, revision) if file.endswith(".gguf")]
    if part:
        others = f"; it has {_listed(there)}" if there else ""
        raise NotFound(f"{kind} {name!r}: {place} has no GGUF file with {part} in its name{others}")
    if there:
        raise NotFound(
            f"{kind} {name!r} has GGUF files only: {_listed(there)}; name one of them, as in {place}:{Path(there[0]).stem}"
        )
    return folder


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")


def gguf_files(folder: Path, part: str = "") -> list[Path]:
    """List the models in a directory's GGUF files, of a split one its first file; those with
    ``part`` in their names, in any case."""
    found = {
        one.parent / re.sub(r"-\d{5}-of-", "-00001-of-", one.name)
        for one in sorted(folder.rglob("*.gguf") if part else folder.glob("*.gguf"))
        if not one.name.startswith("mmproj")
    }
    wanted = re.compile(rf"(?<![a-z0-9]){re.escape(part.lower())}(?![a-z0-9])" if part else "")
    return [one for one in sorted(found) if wanted.search(one.name.lower())]


def resolve_adapter(name: str) -> Path:
    """Return an adapter's PEFT directory, found in the order of ``resolve_model``.

    Raise ``NotFound`` also for a repository without an adapter, or with one in another format.
    """
    return _resolve("adapter", name, None, bundled_adapters(), "a PEFT directory", (*ADAPTER_FILES, *ADAPTER_TEXTS))


def _resolve(
    kind: str, name: str, revision: str | None, bundled: Mapping[str, Path], directory: str, files: Sequence[str]
) -> Path:
    accepted = f"a bundled {kind} ({', '.join(bundled) or 'none'}), {directory} or a Hugging Face id"
    if not name:
        raise InvalidArgument(f"{kind} name is empty; expected {accepted}")
    local = bundled.get(name) or Path(os.path.expanduser(name))
    if os.path.isdir(local):  # Unlike Path.is_dir, false for a name that no file could have.
        if revision is not None:
            raise InvalidArgument(f"revision is {revision!r}, but {name!r} is a directory; expected a Hugging Face id")
        return local
    if os.path.exists(local):
        raise NotFound(f"{kind} {name!r} is a file; expected {accepted}")
    is_file = name.endswith(".gguf")
    if not HUB_NAME.fullmatch(name) or (is_file and "/" not in name):
        what = "file" if is_file else "directory"
        raise NotFound(f"{kind} {name!r}: there is no such {what}; expected {accepted}")
    path = _download(kind, name, revision, files, accepted)
    if kind == "adapter" and not all((path / file).is_file() for file in ADAPTER_FILES):
        raise NotFound(_why_no_adapter(name, path))
    return path


def _why_no_adapter(name: str, path: Path) -> str:
    """Return a message about a repository that lacks some of ``ADAPTER_FILES``."""
    missing = next(file for file in ADAPTER_FILES if not (path / file).is_file())
    there = _files_of(name)
    expected = f"an adapter's repository holds {' and '.join(ADAPTER_FILES)}, as PEFT saves them"
    pickled = [file for file in there if file.startswith("adapter_model.") and file.endswith((".bin", ".pt", ".pth"))]
    below = sorted(file.rpartition("/")[0] for file in there if file.endswith(f"/{ADAPTER_FILE}"))
    if missing == ADAPTER_FILE and "config.json" in there:
        expected = f"it seems to be a model; {expected}"
    if missing == ADAPTER_WEIGHTS and pickled:
        expected = (
            f"its weights are in {pickled[0]!r}, a pickle, which is not read: save them as safetensors; {expected}"
        )
    if below:
        expected += (
            f"; it has adapters in {some([*map(repr, below)], LISTED)}: fetch it and give the path of one of them"
        )
    return f"adapter {name!r}: the repository has no {missing}; {expected}"


def _files_of(name: str, revision: str | None = None) -> list[str]:
    """List a repository's files; none if the Hub cannot be reached or refuses."""
    from huggingface_hub import model_info  # One request. Lists of files by pages try again for 20 s.

    try:
        found = model_info(name, revision=revision, timeout=HUB_SECONDS)
        return [one.rfilename for one in found.siblings or ()]
    except Exception:  # then the message is written without the list
        return []


def _download_bar() -> type[Any]:
    """Return the class of a download's bars: the Hub's own, on terminals only."""
    from huggingface_hub import utils

    base: Any = utils.tqdm  # type: ignore[attr-defined]

    class DownloadBar(Bar, base):  # type: ignore[misc]
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **{**given, "disable": bool(given.get("disable")) or not on_terminal()})

    return DownloadBar


def _download(kind: str, name: str, revision: str | None, files: Sequence[str], accepted: str) -> Path:
    from huggingface_hub import errors, snapshot_download  # Slow to import, and most names need no hub.

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=list(IGNORED_FILES),
                tqdm_class=_download_bar(),
            )
        )
    except errors.GatedRepoError as error:
        reason = "its repository is gated: accept its terms on huggingface.co and set HF_TOKEN"
        raise NotFound(f"{kind} {name!r}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise NotFound(f"{kind} {name!r} has no revision {revision!r} on the Hugging Face Hub") from error
    except errors.RepositoryNotFoundError as error:
        reason = (
            "there is no such file or directory, and no such repository on the Hugging Face Hub, or a private one "
            "that needs HF_TOKEN"
        )
        raise NotFound(f"{kind} {name!r}: {reason}; expected {accepted}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = (
            "there is no such file or directory, it is not in the local Hugging Face cache, and the Hub cannot be "
            "reached (offline?)"
        )
        raise NotFound(f"{kind} {name!r}: {reason}; expected {accepted}") from error
    except (OSError, ValueError) as error:  # Failed requests, a full disk, a name that the Hub refuses.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(f"{kind} {name!r} could not be fetched ({reason}); expected {accepted}") from error
