"""``ChanceBars``: probabilities of tokens as bars; ``Parting``: of two sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.contracts.token_views import ChancesView, ComparisonView, PartingSide, TokenChance
from quire_inspector.drawing.pictures import Picture, axes, html_table, titled
from quire_inspector.drawing.shown_text import in_code, in_figure, in_html, short

BAR = 24
"""Characters of a bar of probability 1."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class ChanceBars(Picture):
    """Tokens with their probabilities."""

    title: str
    chances: Sequence[TokenChance]
    marked: int | None = None
    """The id of the token that stands there."""
    notes: Sequence[str] = ()

    def _repr_html_(self) -> str:
        rows = []
        for one in self.chances:
            share = math.exp(one.logprob)
            bar = (
                '<div style="width:10em;border:1px solid currentColor;height:.7em" role="presentation">'
                f'<div style="width:{share:.1%};height:100%;background:currentColor;opacity:.6"></div></div>'
            )
            weight = "600" if one.id == self.marked else "400"
            text = in_code(short(named(one)))
            rows.append((str(one.rank), f'<span style="font-weight:{weight}">{text}</span>', f"{share:.2%}", bar))
        told = "".join(f'<div style="opacity:.7;font-size:.9em">{in_html(note)}</div>' for note in self.notes)
        return titled(self.title, html_table(rows, ("rank", "token", "probability", "")), told)

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for one in self.chances:
            share = math.exp(one.logprob)
            style = "bold" if one.id == self.marked else ""
            bar = "█" * round(share * BAR)
            table.add_row(
                Text(f"{one.rank}"), Text(short(named(one), 40), style=style), Text(f"{share:.2%}"), Text(bar)
            )
        notes = [Text(short(note, 200), style="dim") for note in self.notes]
        return Group(Text(short(self.title), style="bold"), table, *notes)

    def plot(self, ax: Any = None) -> Any:
        """See ``Picture``. The most probable token is on top."""
        drawn = axes(ax, height=1.2 + 0.25 * len(self.chances))
        shares = [math.exp(one.logprob) for one in self.chances]
        drawn.barh(range(len(shares)), shares)
        drawn.set_yticks(range(len(shares)), [in_figure(named(one), 30) for one in self.chances])
        drawn.invert_yaxis()
        drawn.set_xlabel("probability")
        drawn.set_title(in_figure(self.title))
        return drawn


def named(one: TokenChance) -> str:
    """Return the text shown for a token."""
    return str(one.id) if one.text is None else one.text


def chances_picture(view: ChancesView) -> ChanceBars:
    """Return the picture of a token's chances."""
    chances = list(view.alternatives)
    if view.token is not None and view.token.id not in {one.id for one in chances}:
        chances.append(view.token)
    shown = "the token to come" if view.id is None else repr(view.text) if view.text is not None else str(view.id)
    notes = []
    if view.entropy is not None:
        notes.append(f"entropy {view.entropy:.3f} nats")
    if view.mask is not None:
        count = "an unknown number" if view.mask.allowed is None else f"{view.mask.allowed:,}"
        notes.append(f"mask {view.mask.kind}: {count} of {view.vocab_size:,} tokens allowed")
    if view.stop is not None:
        reason = "" if view.stop.stop_reason is None else f" by {view.stop.stop_reason!r}"
        notes.append(f"a generation from {view.stop.start} on ended here: {view.stop.finish_reason}{reason}")
    if not view.exact:
        notes.append("the state before was written into, blended or converted, and is read as it is")
    if not chances:
        notes.append("nothing comes before, so there are no probabilities")
    return ChanceBars(f"position {view.position}: {shown}", chances, view.id, notes)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Parting(Picture):
    """Two sequences where they part."""

    title: str
    sides: tuple[ChanceBars, ChanceBars]

    def _repr_html_(self) -> str:
        both = "".join(f'<div style="flex:1 1 20em">{one._repr_html_()}</div>' for one in self.sides)
        return titled(self.title, f'<div style="display:flex;flex-wrap:wrap;gap:1em">{both}</div>')

    def __rich__(self) -> RenderableType:
        return Group(Text(short(self.title, 120), style="bold"), *(one.__rich__() for one in self.sides))

    def plot(self, ax: Any = None) -> Any:
        """See ``Picture``. Bars of both sides stand side by side."""
        drawn = axes(ax, height=4.0)
        ids = list(dict.fromkeys(one.id for side in self.sides for one in side.chances))
        names = {one.id: named(one) for side in self.sides for one in side.chances}
        for number, (side, label) in enumerate(zip(self.sides, "ab", strict=True)):
            shares = {one.id: math.exp(one.logprob) for one in side.chances}
            at = [place + 0.4 * number for place in range(len(ids))]
            drawn.barh(at, [shares.get(one, 0.0) for one in ids], height=0.4, label=label)
        drawn.set_yticks(range(len(ids)), [in_figure(names[one], 30) for one in ids])
        drawn.invert_yaxis()
        drawn.set_xlabel("probability")
        drawn.set_title(in_figure(self.title))
        drawn.legend()
        return drawn


def parting_picture(view: ComparisonView) -> Parting:
    """Return the picture of a comparison."""
    title = f"{view.shared} tokens in common"
    if view.divergences is not None:
        title += f"; KL {view.divergences[0]:.3g} and {view.divergences[1]:.3g} nats"
    return Parting(title, (_side("a", view.a), _side("b", view.b)))


def _side(name: str, side: PartingSide) -> ChanceBars:
    known = {one.id for one in side.alternatives}
    more = [one for one in (side.token, side.other) if one is not None and one.id not in known]
    goes_on = "ends here" if side.id is None else f"goes on with {side.id if side.text is None else side.text!r}"
    return ChanceBars(f"{name} {goes_on}", [*side.alternatives, *dict.fromkeys(more)], side.id)
