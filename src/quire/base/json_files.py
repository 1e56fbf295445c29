"""JSON files of checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.base.errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty without it; ``CheckpointError`` for other content."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:  # JSON and UTF-8 errors are ValueErrors
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, found {type(content).__name__}")
    return content
