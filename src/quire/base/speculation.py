"""Speculation: its options, and what it did for a request. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.base.errors import InvalidArgument
from quire.base.registry import modules_in

PROPOSERS = modules_in("quire.speculation.proposers")
"""The methods that need no model, and the module of each."""
MAX_DEPTH = 64
"""Most drafts of a request in one step."""
MAX_WIDTH = 8
"""Most drafts behind one token."""
WITH_MODEL = {"draft": "the draft model, as in draft:DIR", "eagle": "the EAGLE-3 head, as in eagle:DIR"}
"""The methods that have a model of their own, and what it is."""
METHODS = ("auto", *PROPOSERS, *WITH_MODEL, "mtp")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How later tokens are proposed, so that one step verifies several.

    The tokens are those that the model gives without speculation: a draft is kept only if it is the
    token that the request's own sampling draws there.
    """

    method: str = "auto"
    """``lookup`` copies what followed the same tokens earlier, in this request or in outputs under
    the same salt; ``draft`` asks a smaller model of the same vocabulary; ``eagle`` asks a head that
    was trained for the model, and ``mtp`` the head in the model's own checkpoint; ``auto`` is
    ``lookup`` in this release."""
    depth: int = 32
    """Most drafts of a request in one step, 1 to ``MAX_DEPTH``. Fewer are tried where fewer pay."""
    width: int = 1
    """Most drafts of a draft model or a head behind one token, 1 to ``MAX_WIDTH``: 1 makes chains,
    more make trees, of which the best ``depth`` drafts are verified."""
    model: str | os.PathLike[str] | None = None
    """The draft model of ``draft``: a name, directory, GGUF file or Hugging Face id. The head of
    ``eagle``: a directory or Hugging Face id."""

    def __post_init__(self) -> None:
        _check_method("speculative.method", self.method, self.method)
        if type(self.depth) is not int or not 1 <= self.depth <= MAX_DEPTH:
            allowed = f"an integer in 1..{MAX_DEPTH}"
            raise InvalidArgument(field="speculative.depth", given=self.depth, allowed=allowed)
        if type(self.width) is not int or not 1 <= self.width <= (most := 1 if self.is_lookup else MAX_WIDTH):
            allowed = "1: lookup makes chains" if self.is_lookup else f"an integer in 1..{most}"
            raise InvalidArgument(field="speculative.width", given=self.width, allowed=allowed)
        if self.model is not None and not isinstance(self.model, str | os.PathLike):
            raise InvalidArgument(field="speculative.model", given=self.model, allowed="the path or name of a model")
        if (self.method in WITH_MODEL) != bool(self.model):
            allowed = WITH_MODEL.get(self.method, f"left out: only {' and '.join(WITH_MODEL)} have one")
            raise InvalidArgument(field="speculative.model", given=self.model, allowed=allowed)

    @property
    def is_lookup(self) -> bool:
        return self.method in ("auto", "lookup")


def _check_method(name: str, given: object, method: object) -> None:
    """Raise ``InvalidArgument`` for a word that is no method."""
    if method not in METHODS:
        raise InvalidArgument(field=name, given=given, allowed=f"one of {', '.join(METHODS)}")


def read_speculation(name: str, given: Any) -> Speculation | None:
    """Return options from an object, a method's name, ``draft:MODEL``, ``eagle:HEAD``, a mapping of
    fields, ``"off"`` or None. Raise ``InvalidArgument`` for anything else."""
    if given is None or given == "off" or given is False:
        return None
    if isinstance(given, Speculation):
        return given
    if isinstance(given, str):
        method, _, model = given.partition(":")
        _check_method(name, given, method)
        return Speculation(method=method, model=model or None)
    if isinstance(given, Mapping):
        unknown = sorted(set(map(str, given)) - {"method", "depth", "width", "model"})
        if unknown:
            raise InvalidArgument(
                field=f"{name}.{unknown[0]}", given=given[unknown[0]], allowed="method, depth, width and model only"
            )
        return Speculation(**given)
    raise InvalidArgument(
        field=name, given=given, allowed=f'a quire.Speculation, one of {", ".join(METHODS)}, or "off"'
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationCounts:
    """What speculation did for the samples of a request."""

    drafted: int = 0
    """Drafts that a step has verified."""
    accepted: int = 0
    """Drafts that became tokens of the output."""
    steps: int = 0
    """Steps that had drafts."""
    by_proposer: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafted and accepted, by proposer."""
    dropped: str = ""
    """The reason why the request's proposer was dropped; empty: it was not."""

    def as_dict(self) -> dict[str, Any]:
        """Return them in the form of HTTP replies."""
        found: dict[str, Any] = {"drafted": self.drafted, "accepted": self.accepted, "steps": self.steps}
        found["by_proposer"] = {
            name: {"drafted": drafted, "accepted": accepted} for name, (drafted, accepted) in self.by_proposer.items()
        }
        return found | ({"dropped": self.dropped} if self.dropped else {})

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        names = {**self.by_proposer, **other.by_proposer}
        pairs = {name: (self.by_proposer.get(name, (0, 0)), other.by_proposer.get(name, (0, 0))) for name in names}
        return SpeculationCounts(
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            steps=self.steps + other.steps,
            by_proposer={name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in pairs.items()},
            dropped=self.dropped or other.dropped,
        )
