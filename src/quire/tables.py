"""Tables for terminals of any width: long names wrap instead of being cut."""

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
    """Print to stdout without markup: names from files may contain brackets."""
    from rich.console import Console

    console = Console(markup=False)
    for table in tables:
        console.print(table)
