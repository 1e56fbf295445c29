"""``BranchTree``: who shares which tokens, and where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from quire.contracts.views import BranchView, HistoryNode, HistoryView
from quire_inspector.drawing.pictures import Picture, axes, titled
from quire_inspector.drawing.shown_text import in_code, in_figure, in_html, short, visible

MOST_NODES = 200
"""Nodes that are drawn; the others are counted."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class BranchTree(Picture):
    """Runs of tokens as trees, with the branches that end in each."""

    title: str
    nodes: Sequence[HistoryNode]
    """Parents come before what is below them."""
    branches: Mapping[str, BranchView]
    marked: str | None = None
    """The id of the branch that is marked."""

    def _below(self) -> dict[str | None, list[HistoryNode]]:
        """Return the nodes by their parent; None has roots."""
        # A root without tokens of its own is a place only.
        empty = {node.id for node in self.nodes if node.start == node.end and not node.branches}
        shown = [node for node in self.nodes if node.id not in empty][:MOST_NODES]
        ids, found = {node.id for node in shown}, dict[str | None, list[HistoryNode]]()
        for node in shown:
            found.setdefault(node.parent if node.parent in ids else None, []).append(node)
        return found

    def _named(self, branch: str) -> str:
        view = self.branches.get(branch)
        name = branch if view is None or view.name is None else f"{view.name} ({branch})"
        told = [] if view is None else [word for word in ("busy", "pinned", "modified") if getattr(view, word)]
        if view is not None and view.pages:
            told.append(f"{view.pages} pages, {view.shared_pages} shared")
        if view is not None and view.adapter is not None:
            told.append(f"adapter {view.adapter}")
        return name if not told else f"{name} [{', '.join(told)}]"

    @property
    def _more(self) -> str:
        left = len(self.nodes) - MOST_NODES
        return f"{left} more runs of tokens are not drawn" if left > 0 else ""

    def _repr_html_(self) -> str:
        below = self._below()

        def listed(parent: str | None) -> str:
            items = "".join(f"<li>{self._html(node)}{listed(node.id)}</li>" for node in below.get(parent, ()))
            return f'<ul style="margin:0;padding-left:1.4em">{items}</ul>' if items else ""

        more = f'<div style="opacity:.7">{self._more}</div>' if self._more else ""
        return titled(self.title, listed(None) or "<div>there are no tokens</div>", more)

    def _html(self, node: HistoryNode) -> str:
        found = [f'<span style="opacity:.7">{node.start}–{node.end}</span>']
        if node.head is not None:
            found.append(in_code(short(node.head + (f" … {node.tail}" if node.tail else ""))))
        for branch in node.branches:
            weight = "700" if branch == self.marked else "500"
            found.append(
                f'<span style="border:1px solid currentColor;border-radius:.6em;padding:0 .5em;font-weight:{weight}">'
                f"<bdi>{in_html(short(self._named(branch)))}</bdi></span>"
            )
        return " ".join(found)

    def __rich__(self) -> RenderableType:
        below, top = self._below(), Tree(Text(visible(self.title), style="bold"))

        def grow(tree: Tree, parent: str | None) -> None:
            for node in below.get(parent, ()):
                grow(tree.add(self._line(node)), node.id)

        grow(top, None)
        return Group(top, Text(self._more)) if self._more else top

    def _line(self, node: HistoryNode) -> Text:
        line = Text(f"{node.start}–{node.end} ", style="dim")
        if node.head is not None:
            line.append(Text(short(node.head + (f" … {node.tail}" if node.tail else ""), 48), style="italic"))
        for branch in node.branches:
            line.append("  ")
            line.append(Text(("▶ " if branch == self.marked else "● ") + short(self._named(branch)), style="bold"))
        return line

    def plot(self, ax: Any = None) -> Any:
        """See ``Picture``. Positions go to the right; each end of a tree has a line of its own."""
        below, lines = self._below(), 0
        drawn = axes(ax, height=1.0 + 0.35 * max(1, len([one for one in self.nodes if one.branches])))

        def draw(node: HistoryNode) -> float:
            nonlocal lines
            children = below.get(node.id, ())
            if children:
                places = [draw(child) for child in children]
                height = sum(places) / len(places)
                drawn.plot([node.end, node.end], [min(places), max(places)], color="C7", linewidth=1)
            else:
                height, lines = float(lines), lines + 1
            is_marked = self.marked in node.branches
            drawn.plot([node.start, node.end], [height, height], color="C1" if is_marked else "C0", linewidth=2.5)
            if node.branches:
                label = ", ".join(in_figure(self._named(one), 40) for one in node.branches)
                drawn.annotate(label, (node.end, height), xytext=(4, 0), textcoords="offset points", va="center")
            return height

        for root in below.get(None, ()):
            draw(root)
        drawn.set_title(in_figure(self.title))
        drawn.set_xlabel("position")
        drawn.set_yticks([])
        drawn.invert_yaxis()
        return drawn


def tree_of(view: HistoryView, title: str, marked: str | None = None) -> BranchTree:
    """Return the picture of all trees; with ``marked``, of the tree of that branch alone."""
    branches = {one.id: one for one in view.branches}
    if marked is None:
        return BranchTree(title, view.nodes, branches)
    roots: dict[str, str] = {}
    for node in view.nodes:
        # What shares no token with others is a tree of its own.
        roots[node.id] = node.id if node.parent is None or node.start == 0 else roots[node.parent]
    own = next((roots[node.id] for node in view.nodes if marked in node.branches), None)
    return BranchTree(title, [node for node in view.nodes if roots[node.id] == own], branches, marked)
