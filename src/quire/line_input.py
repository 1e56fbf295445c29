"""Lines that a person types, or that a pipe brings.

On a terminal they can be edited, recalled and completed, by ``readline``.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

Complete: TypeAlias = Callable[[str], Iterable[str]]
"""From a line up to the cursor to what its last word could become."""

HISTORY_LENGTH = 1000


class LineInput:
    """``with LineInput(complete) as lines: lines.read("> ")``. A file keeps the history."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self._found: list[str] = []
        self._readline = _readline() if is_typed() and sys.stdout.isatty() else None

    def read(self, prompt: str) -> str:
        """Return the next line. A pipe sees no prompt.

        ``EOFError`` at the end, ``KeyboardInterrupt`` for Ctrl-C.
        """
        if self._readline is not None:
            return input(prompt)
        if is_typed():  # the terminal alone edits it, and stdout belongs to the answers
            print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def __enter__(self) -> LineInput:
        if (readline := self._readline) is not None:
            # A word may hold anything but spaces: "/fork", "a/b.quire".
            readline.set_completer_delims(" ")
            readline.set_completer(self._completion)
            edited = "libedit" in (readline.__doc__ or "")  # another library under the same name, on macOS
            readline.parse_and_bind("bind ^I rl_complete" if edited else "tab: complete")
            readline.set_history_length(HISTORY_LENGTH)
            readline.clear_history()
            if (file := history_file()) is not None:
                with suppress(OSError):
                    readline.read_history_file(file)
        return self

    def __exit__(self, *_: object) -> None:
        if (readline := self._readline) is not None:
            readline.set_completer(None)
            if (file := history_file()) is not None:
                with suppress(OSError):  # a chat is not spoiled by a home that cannot be written
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch(mode=0o600)
                    readline.write_history_file(file)

    def _completion(self, word: str, state: int) -> str | None:
        """Return the candidate of this number, as ``readline`` asks for them."""
        assert self._readline is not None
        if state == 0:
            line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
            self._found = sorted(one for one in self._complete(line) if one.startswith(word))
        return self._found[state] if state < len(self._found) else None


def is_typed() -> bool:
    """Return whether stdin is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def history_file() -> Path | None:
    """Return where lines are remembered: ``QUIRE_HISTORY``, or a file among the user's state.

    None, for nowhere, if that variable is empty.
    """
    named = os.environ.get("QUIRE_HISTORY")
    if named is not None:
        return Path(named) if named else None
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "quire" / "chat_history"


def paths(beginning: str) -> list[str]:
    """Return the files and folders whose names begin so, folders with a slash."""
    return [found + "/" if os.path.isdir(found) else found for found in glob.glob(glob.escape(beginning) + "*")]


def _readline() -> ModuleType | None:
    """Return the module, which not every Python has. Once it is imported, ``input`` uses it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
