"""Proposers without weights of their own: each module is one, by its method's name.

A new one is a new module with one heir of ``speculation.proposer.Proposer``, made without
arguments.
"""

from __future__ import annotations

from quire.base.registry import class_in
from quire.base.speculation import PROPOSERS
from quire.speculation.proposer import Proposer


def proposer_of(method: str) -> Proposer:
    """Return a new proposer of a method that needs no model."""
    found: Proposer = class_in(PROPOSERS["lookup" if method == "auto" else method], Proposer)()
    return found
