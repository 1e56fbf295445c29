"""Arrays in documents."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray


def unpacked(text: str, kind: str) -> NDArray[Any]:
    """Return the array in a text of ``quire.base.documents.packed``."""
    return np.frombuffer(base64.b64decode(text), dtype=f"<{kind}")
