"""Requests for tests of what chooses steps, without an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from quire.base.token_history import TokenHistory
from quire.engine.request import AskedFor, Output, Request, RequestBranch, Seat


@dataclass
class QuestionToTiers:
    """In place of a question to tiers that they have not answered."""

    is_answered: bool = False


def made_request(tokens: Iterable[int], **given: Any) -> Request:
    """Return a request with these tokens. Each given field is set in the place that has it."""
    places = [
        {field.name: given.pop(field.name) for field in fields(place) if field.name in given}
        for place in (AskedFor, RequestBranch, Seat, Output)
    ]
    assert not given
    asked, branch, seat, output = places
    return Request(
        AskedFor(**asked), RequestBranch(tokens=TokenHistory(tokens), **branch), Seat(**seat), Output(**output)
    )
