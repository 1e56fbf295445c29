"""Where a model's name leads: a bundled model, a local directory, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

from quire.errors import InvalidArgument, NotFound
from quire.models.families import FAMILIES

ALLOWED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
"""What is fetched of a repository: weights, their index, configurations, tokenizer, chat templates."""
IGNORED_FILES = ("consolidated*", "original/*", "onnx/*", "openvino/*")
"""Second copies of the same weights in other layouts."""

HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def bundled_models() -> dict[str, Path]:
    """Name and directory of each model that comes with the package."""
    data = resources.files("quire") / "data"
    if not isinstance(data, Path) or not data.is_dir():  # Inside of a zip file nothing can be memory-mapped.
        return {}
    return {entry.name: entry for entry in sorted(data.iterdir()) if (entry / "config.json").is_file()}


def registered_architectures() -> dict[str, tuple[str, ...]]:
    """Name of each architecture in config.json that can be loaded, and the kinds of layer state that it has."""
    return {name: FAMILIES.require(name).state_kinds for name in FAMILIES}


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The checkpoint directory for ``name``: a bundled model, else a local directory, else a Hub repository.

    ``./name`` is always local. A repository is downloaded, at ``revision`` (branch, tag or commit), unless it is in
    the Hub's cache; ``HF_HOME``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` are respected.

    ``NotFound`` says why a name leads nowhere and what is bundled; ``InvalidArgument`` for an empty name, or for a
    revision of something that has none.
    """
    if not name:
        raise InvalidArgument(f"model name is empty; expected {_accepted()}")
    local = bundled_models().get(name) or Path(os.path.expanduser(name))
    if os.path.isdir(local):  # Unlike Path.is_dir, false for a name that no file could have.
        if revision is not None:
            raise InvalidArgument(f"revision is {revision!r}, but {name!r} is a directory; expected a Hugging Face id")
        return local
    if os.path.exists(local):
        raise NotFound(f"model {name!r} is a file; expected {_accepted()}")
    if not HUB_NAME.fullmatch(name):
        raise NotFound(f"model {name!r}: there is no such directory; expected {_accepted()}")
    return _download(name, revision)


def _accepted() -> str:
    bundled = ", ".join(bundled_models()) or "none"
    return f"a bundled model ({bundled}), a checkpoint directory or a Hugging Face id"


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download  # Slow to import, and most names need no hub.

    try:
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=list(ALLOWED_FILES), ignore_patterns=list(IGNORED_FILES)
            )
        )
    except errors.GatedRepoError as error:
        reason = "its repository is gated: accept its terms on huggingface.co and set HF_TOKEN"
        raise NotFound(f"model {name!r}: {reason}") from error
    except errors.RevisionNotFoundError as error:
        raise NotFound(f"model {name!r} has no revision {revision!r} on the Hugging Face Hub") from error
    except errors.RepositoryNotFoundError as error:
        reason = "no such repository on the Hugging Face Hub, or a private one that needs HF_TOKEN"
        raise NotFound(f"model {name!r}: {reason}; expected {_accepted()}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = "not in the local Hugging Face cache, and the Hub cannot be reached (offline?)"
        raise NotFound(f"model {name!r}: {reason}; expected {_accepted()}") from error
    except (OSError, ValueError) as error:  # Failed requests, a full disk, a name that the Hub would not take.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise NotFound(f"model {name!r} could not be fetched ({reason}); expected {_accepted()}") from error
