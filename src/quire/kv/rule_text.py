"""The rule table (``rule_table``) as text for a terminal and as ``docs/rules.md``. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence

from quire.kv.rule_table import BESIDES, COMBINATIONS, Cell, tables


def marked(rows: Mapping[str, Mapping[str, Cell]]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the marks of each row, and the texts of their numbers, from 1: ``+`` works, ``+3``
    works with note 3, ``-4`` is refused for reason 4."""
    texts: list[str] = []
    marks: dict[str, list[str]] = {}
    for name, cells in rows.items():
        marks[name] = []
        for cell in cells.values():
            text = cell.reason or cell.note
            if text and text not in texts:
                texts.append(text)
            marks[name].append(("+" if cell.works else "-") + (str(texts.index(text) + 1) if text else ""))
    return marks, texts


INTRODUCTION = """\
# The rules

What works on which layers, in which combination and on which device. This page is made of the table in the code
(`quire capabilities --markdown`); `quire capabilities` says what holds for one model. A test tries every cell: what works gives
exact results, what is refused raises `Unsupported` with the reason, before anything is computed or changed.

`+` works; `+3` works, and note 3 below the table says how; `-4` is refused, for reason 4."""


def as_markdown(everywhere: Mapping[str, str]) -> str:
    """Return the page ``docs/rules.md``. ``everywhere``: refusals for every model, and why."""
    parts = [INTRODUCTION]
    for title, rows in tables().items():
        parts.append(f"## {title[0].upper()}{title[1:]}")
        if title == "verbs of a KV state":
            lines = [
                f"* {one.name}: {one.models or 'no model of this release; the state alone'}" for one in COMBINATIONS
            ]
            parts.append("\n".join(lines))
        marks, texts = marked(rows)
        columns = list(next(iter(rows.values())))
        parts.append("\n".join(_markdown_rows(columns, marks)))
        parts.append("\n".join(f"{number}. {text}" for number, text in enumerate(texts, 1)))
        if besides := BESIDES.get(title):
            parts.append("\n".join(["Refused besides:", "", *_described(besides)]))
    parts += ["## Refused for every model", "\n".join(_described(everywhere))]
    return "\n\n".join(parts) + "\n"


def _markdown_rows(columns: Iterable[str], marks: Mapping[str, Sequence[str]]) -> list[str]:
    head = ["", *columns]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return lines + [f"| {name} | {' | '.join(row)} |" for name, row in marks.items()]


def _described(reasons: Mapping[str, str]) -> list[str]:
    return [f"* {name}: {reason}" for name, reason in reasons.items()]


def as_text(width: int) -> str:
    """Return all tables for a terminal of ``width`` characters; letters stand for columns."""
    parts: list[str] = []
    for title, rows in tables().items():
        marks, texts = marked(rows)
        columns = list(next(iter(rows.values())))
        letters = [chr(ord("A") + index) for index in range(len(columns))]
        cells = max(len(mark) for row in marks.values() for mark in row) + 1
        names = max(map(len, marks))
        names = max(8, min(names, width - cells * len(columns)))
        lines = [title.upper(), *(f"  {letter} {name}" for letter, name in zip(letters, columns, strict=True))]
        lines.append(" " * names + "".join(f"{letter:>{cells}}" for letter in letters))
        for name, row in marks.items():
            if len(name) > names:  # on a line of its own
                lines.append(name)
                name = ""
            lines.append(f"{name:<{names}}" + "".join(f"{mark:>{cells}}" for mark in row))
        for number, text in enumerate(texts, 1):
            lines += textwrap.wrap(f"{number:>3} {text}", max(20, width), subsequent_indent="    ")
        for what, reason in BESIDES.get(title, {}).items():
            lines += textwrap.wrap(f"  - {what}: {reason}", max(20, width), subsequent_indent="    ")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
