"""Progress bars that leave their lock free after an interrupt and after an error of stderr.

All bars of a process share tqdm's lock, which is two locks taken one after the other. A Ctrl-C
between the two would leave one held, and the next bar of another thread would wait for ever.
"""

from __future__ import annotations

import sys
from typing import Any, Self

from tqdm import tqdm

from quire.base.interrupts import SHIELD, uninterrupted


def on_terminal() -> bool:
    """Return True if stderr is a terminal. A process may have no stderr (``2>&-``, a daemon)."""
    return sys.stderr is not None and sys.stderr.isatty()


class Bar(tqdm):  # type: ignore[type-arg]  # generic in the stubs only
    """A bar of tqdm. Signals take effect after it has released tqdm's lock."""

    @uninterrupted
    def __new__(cls, *args: Any, **settings: Any) -> Self:
        return super().__new__(cls, *args, **settings)

    @uninterrupted
    def __init__(self, *args: Any, **settings: Any) -> None:
        # Without a stderr there is nothing to draw on.
        super().__init__(*args, **(settings if sys.stderr is not None else {**settings, "disable": True}))

    def clear(self, nolock: bool = False) -> None:
        """Clear the bar's line."""
        with SHIELD, self.get_lock():  # type: ignore[no-untyped-call]
            super().clear(nolock=True)

    def refresh(self, nolock: bool = False, lock_args: Any = None) -> None:
        """Draw the bar now."""
        with SHIELD, self.get_lock():  # type: ignore[no-untyped-call]
            super().refresh(nolock=True)

    def close(self) -> None:
        """Draw the bar for the last time, and leave its line."""
        if not getattr(self, "disable", True):
            with SHIELD:
                super().close()
