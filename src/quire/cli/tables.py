"""Tables for terminals of any width: long names wrap instead of being cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""Escapes of control characters: messages and names of commits may come from other people."""


def folding_table(
    *columns: str, title: str | None = None, rows: Iterable[Iterable[object]] = (), **options: Any
) -> Table:
    """Return a table of the texts of ``rows``, with control characters escaped. ``options`` are
    those of rich's ``Table``."""
    from rich.table import Column, Table

    folding = [Column(name, overflow="fold") for name in columns]
    table = Table(*folding, title=title, title_justify="left", **options)
    for row in rows:
        table.add_row(*(str(cell).translate(CONTROLS) for cell in row))
    return table


def print_tables(*tables: Table, stderr: bool = False) -> None:
    """Print without markup: names from files may contain brackets."""
    from rich.console import Console

    class PipedConsole(Console):
        """A console that lets the command report by its exit code that the reader is gone."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = PipedConsole(markup=False, stderr=stderr)
    console.width = console.width or 80  # COLUMNS=0: the width is not known
    for table in tables:
        console.print(table)
