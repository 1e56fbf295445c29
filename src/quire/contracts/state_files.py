"""The content of a state file, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.display import Pictured


@dataclass(frozen=True, slots=True)
class StateFileView(Pictured):
    """A state file's content, with verified checksums."""

    facts: Mapping[str, Any]
    """As printed by ``quire inspect --json``."""

    def document(self) -> dict[str, Any]:
        """Return ``facts`` in JSON types."""
        return dict(self.facts)
