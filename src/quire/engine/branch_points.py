"""The positions at which running prompts diverge: recurrent states are worth keeping there."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice

from quire.base.token_history import common_prefix
from quire.engine.request import Request

LEAST = 32
"""Tokens that two prompts have in common at least."""

COMPARED = 16
"""Prompts with the same beginning, of those that arrived last, with which a new one is compared."""


class BranchPoints:
    """The requests under way, by their keys and first tokens."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Hashable, bytes], dict[Request, None]] = {}
        """In order of arrival."""

    def __len__(self) -> int:
        """Return the number of different beginnings."""
        return len(self._alike)

    def note(self, request: Request) -> None:
        """Note the positions of states to keep for a new request: its branch points with others,
        and the position before its last token, which a request of the same tokens runs again
        (without logits: its end)."""
        request.seat.branch_points.add(len(request.branch.tokens) - (request.output.wants != "none"))
        if not request.branch.cacheable or len(request.branch.tokens) <= LEAST:
            return
        alike = self._alike.setdefault(_name(request), {})
        for other in islice(reversed(alike), COMPARED):
            common = common_prefix(request.branch.tokens.ids, other.branch.tokens.ids)
            common = min(common, len(request.branch.tokens) - 1, len(other.branch.tokens) - 1)
            if common >= LEAST:
                other.seat.branch_points.add(common)
                request.seat.branch_points.add(common)
        alike[request] = None

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        alike = self._alike.get(_name(request), {})
        alike.pop(request, None)
        if not alike:
            self._alike.pop(_name(request), None)


def _name(request: Request) -> tuple[Hashable, bytes]:
    return request.branch.key, request.branch.tokens.ids[:LEAST].tobytes()
