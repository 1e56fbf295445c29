"""Lines from a person or a pipe.

On a terminal ``readline`` lets them be edited, recalled and completed.
"""

from __future__ import annotations

import glob
import os
import sys
import termios
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

Complete: TypeAlias = Callable[[str], Iterable[str]]
"""A function from the line up to the cursor to completions of its last word."""

HISTORY_LENGTH = 1000
BLOCK = '"""'
"""Begins and ends a text of several lines."""
MORE = "... "
"""The prompt of its further lines."""
NO_KEY = b"\0"
"""In place of a control key of a terminal: no key does it."""


class LineInput:
    """``with LineInput(complete) as lines: lines.read("> ")``. A file keeps the history."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self._found: list[str] = []
        self._readline = _readline() if is_typed() and sys.stdout.isatty() else None
        self._end_key: bytes | None = None
        """The terminal's key for the end of the input: an ordinary key between two lines."""

    def read(self, prompt: str) -> str:
        """Return the next line. Show no prompt to a pipe.

        Raise ``EOFError`` at the end and ``KeyboardInterrupt`` for Ctrl-C.
        """
        if self._readline is not None:
            self._set_end_key(self._end_key)
            try:
                return input(prompt)
            finally:
                self._set_end_key(NO_KEY)
        if is_typed():  # without readline the terminal edits the line; stdout is reserved for the answers
            print(prompt, end="", file=sys.stderr, flush=True)
        return input()

    def read_text(self, prompt: str) -> str:
        """Return the next line, or a text of several lines: each but the last one ends with a
        backslash, or they are between two ``BLOCK``. A command has one line. Raise the errors of
        ``read``; the end of the input ends a text too."""
        line = self.read(prompt)
        if line.startswith("/"):
            return line
        block = line.startswith(BLOCK)
        lines = [line.removeprefix(BLOCK) if block else line]
        with suppress(EOFError):
            while not lines[-1].endswith(BLOCK) if block else _goes_on(lines[-1]):
                if not block:
                    lines[-1] = lines[-1][:-1]
                lines.append(self.read(MORE))
        text = "\n".join(lines)
        return text.removesuffix(BLOCK).removeprefix("\n").removesuffix("\n") if block else text

    def __enter__(self) -> LineInput:
        if (readline := self._readline) is not None:
            # A word may hold anything but spaces: "/fork", "a/b.quire".
            readline.set_completer_delims(" ")
            readline.set_completer(self._completion)
            edited = "libedit" in (readline.__doc__ or "")  # another library under the same name, on macOS
            readline.parse_and_bind("bind ^I rl_complete" if edited else "tab: complete")
            readline.set_history_length(HISTORY_LENGTH)
            readline.clear_history()
            # The terminal would take a Ctrl-D out of what is typed during an answer.
            with suppress(termios.error):
                self._end_key = termios.tcgetattr(sys.stdin)[6][termios.VEOF]
            self._set_end_key(NO_KEY)
            if (file := history_file()) is not None:
                with suppress(OSError):
                    readline.read_history_file(file)
        return self

    def __exit__(self, *_: object) -> None:
        if (readline := self._readline) is not None:
            self._set_end_key(self._end_key)
            readline.set_completer(None)
            if (file := history_file()) is not None:
                with suppress(OSError):  # a chat works without a writable home directory
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch(mode=0o600)
                    readline.write_history_file(file)

    def _set_end_key(self, key: bytes | None) -> None:
        if self._end_key is not None and key is not None:
            with suppress(termios.error):
                settings = termios.tcgetattr(sys.stdin)
                settings[6][termios.VEOF] = key
                termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)

    def _completion(self, word: str, state: int) -> str | None:
        """Return candidate number ``state`` for ``readline``."""
        assert self._readline is not None
        if state == 0:
            line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
            self._found = sorted(one for one in self._complete(line) if one.startswith(word))
        return self._found[state] if state < len(self._found) else None


def _goes_on(line: str) -> bool:
    """Return True if a line ends with a backslash that is not doubled."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def is_typed() -> bool:
    """Return True if stdin is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def history_file() -> Path | None:
    """Return the history's file: ``QUIRE_HISTORY``, or a file in the user's state directory.

    Return None if that variable is empty.
    """
    named = os.environ.get("QUIRE_HISTORY")
    if named is not None:
        return Path(named) if named else None
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "quire" / "chat_history"


def paths(beginning: str) -> list[str]:
    """Return the paths with this beginning; folders end with a slash."""
    return [found + "/" if os.path.isdir(found) else found for found in glob.glob(glob.escape(beginning) + "*")]


def _readline() -> ModuleType | None:
    """Return the module, or None if Python lacks it. Once it is imported, ``input`` uses it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
