"""Tables for a terminal of any width: nothing is cut, a long name goes on in the next line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def folding_table(*columns: str, title: str | None = None, **options: Any) -> Table:
    """Return an empty table. ``options`` are those of rich's ``Table``."""
    from rich.table import Column, Table

    folding = [Column(name, overflow="fold") for name in columns]
    return Table(*folding, title=title, title_justify="left", **options)


def print_tables(*tables: Table) -> None:
    """Print to stdout. Brackets are no markup: names come from files."""
    from rich.console import Console

    console = Console(markup=False)
    for table in tables:
        console.print(table)
