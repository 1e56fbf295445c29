"""``Summary``: a title, facts by name, and texts. ``TextTable``: rows of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire_inspector.drawing.pictures import Picture, html_table, titled
from quire_inspector.drawing.shown_text import in_code, in_html, short, visible


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Summary(Picture):
    """What something is, in words."""

    title: str
    facts: Sequence[tuple[str, str]]
    """Names and values; both may be users' texts."""
    texts: Sequence[tuple[str, str]] = ()
    """Names and texts that stand as they were written."""
    below: Sequence[Picture] = ()

    def _repr_html_(self) -> str:
        rows = [(f'<span style="opacity:.7">{in_html(name)}</span>', in_html(value)) for name, value in self.facts]
        rows += [
            (f'<span style="opacity:.7">{in_html(name)}</span>', in_code(short(text, 400))) for name, text in self.texts
        ]
        return titled(self.title, html_table(rows), *(one._repr_html_() for one in self.below))

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, value in self.facts:
            table.add_row(Text(visible(name), style="dim"), Text(visible(value)))
        for name, text in self.texts:
            table.add_row(Text(visible(name), style="dim"), Text(short(text, 400), style="italic"))
        return Group(Text(visible(self.title), style="bold"), table, *(one.__rich__() for one in self.below))


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class TextTable(Picture):
    """Texts in rows and columns, which may be users'."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def _repr_html_(self) -> str:
        return titled(
            self.title, html_table([[in_code(short(one, 200)) for one in row] for row in self.rows], self.columns)
        )

    def __rich__(self) -> RenderableType:
        table = Table(*self.columns, title=Text(visible(self.title), style="bold"), title_justify="left", box=None)
        for row in self.rows:
            table.add_row(*(Text(short(one, 200)) for one in row))
        return table
