"""What the programs in this folder share. ``bench/clients.py`` runs each as ``python with_NAME.py
TASK ROW RESULTS`` in an environment that has the clients and not Quire.

A program gives, for each row of the table, functions by the names of abilities. A function gets a
base URL and returns a plain value, which the caller judges. RESULTS gets one JSON line for each.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEY = "no-key-is-needed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What every client is asked."""

    url: str
    model: str
    prompt: str
    form: dict[str, Any]
    """A JSON schema with a title and a description."""
    overflow: str
    """A prompt with more tokens than the context."""
    endless: int
    """The ``max_tokens`` of an answer that takes long."""
    extra: dict[str, Any]
    """What the row "details" needs."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as a conversation."""
        return [{"role": "user", "content": self.prompt}]


Abilities = Mapping[str, Callable[[str], Any]]


def run(package: str, rows: Mapping[str, Callable[[Task], Abilities]]) -> None:
    """Do what the command line says. An exception is the value of its ability."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    row = sys.argv[2]
    with open(sys.argv[3], "w", encoding="utf-8") as results:

        def tell(**values: Any) -> None:
            results.write(json.dumps(values) + "\n")
            results.flush()

        tell(version=importlib.metadata.version(package))
        for ability, function in rows[row](task).items():
            try:
                value = function(f"{task.url}/at/{row}/{ability}")
                if inspect.iscoroutine(value):
                    value = asyncio.run(value)
                tell(ability=ability, value=value)
            except Exception as error:  # any exception of a client library counts as a failure of one ability
                tell(ability=ability, error=f"{type(error).__name__}: {str(error)[:300]}")
