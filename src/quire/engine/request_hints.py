"""The hints of one request, from its arrival to their results."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeAlias

from quire.engine.request import RequestBranch
from quire.errors import QuireError
from quire.hints import CacheHints, HintResult, Pin, PinAccount

PrefixName: TypeAlias = tuple[PinAccount, Hashable, bytes]
"""Account, key and a digest of the tokens of a pinned prefix."""


class Pinning(Protocol):
    """The pinned prefixes of an engine."""

    def pin(self, prompt: RequestBranch, length: int, ttl: float, account: PinAccount) -> tuple[int, PrefixName | None]:
        """Pin the first ``length`` computed tokens. Return how many are, and the name of the pin,
        None for an older one. ``QuireError`` if that cannot be."""
        ...

    def drop(self, name: PrefixName) -> None:
        """Give up one whose state is broken."""
        ...


class RequestHints:
    """What is left to do, and the results so far. The caller holds the engine's lock."""

    def __init__(self, wanted: CacheHints, num_prompt: int) -> None:
        """``num_prompt``: tokens of the prompt; of a session, all that it has."""
        self._wanted = wanted
        self.results: list[HintResult] = []
        places = [(num_prompt if pin.tokens is None else min(pin.tokens, num_prompt), pin) for pin in wanted.pins]
        self._waiting: list[tuple[int, Pin]] = sorted(places, key=lambda place: place[0])
        self._made: list[PrefixName] = []
        if wanted.priority:
            self.results.append(HintResult(hint="priority"))

    @property
    def stops(self) -> tuple[int, ...]:
        """Return the positions at which the state is to be kept, ascending."""
        return tuple(sorted({position for position, _ in self._waiting}))

    def ran(self, branch: RequestBranch, pins: Pinning) -> None:
        """Pin what has been computed by now."""
        while self._waiting and self._waiting[0][0] <= branch.computed:
            position, pin = self._waiting.pop(0)
            try:
                tokens, made = pins.pin(branch, position, pin.ttl, self._wanted.account)
            except QuireError as error:
                self._note(pin, done=False, reason=str(error))
                continue
            if made is not None:
                self._made.append(made)
            reason = "" if tokens == position else f"no state is kept between {tokens} and {position} tokens"
            self._note(pin, tokens=tokens, ttl=pin.ttl, reason=reason)

    def failed(self, pins: Pinning) -> None:
        """Give up what was pinned of a state that is not fit to be used."""
        for made in self._made:
            pins.drop(made)
        self.results = [result for result in self.results if result.hint != "pin"]
        self._waiting = [(0, pin) for pin in self._wanted.pins]
        self._refuse("the request failed")

    def ended(self) -> int | None:
        """Refuse the pins that are left, at the end of the request. Return the position from which
        its state is to be given up; None: it stays."""
        self._refuse("the prompt did not run that far")
        return self._wanted.demote

    def demoted(self, start: int, given_up: int) -> None:
        """Note that so many tokens from ``start`` on were given up, which only this prompt used."""
        reason = "" if given_up else f"nothing that only this prompt uses is held beyond {start} tokens"
        self.results.append(HintResult(hint="demote", tokens=given_up, reason=reason))

    def _refuse(self, reason: str) -> None:
        """Refuse what is left."""
        for _, pin in self._waiting:
            self._note(pin, done=False, reason=reason)
        self._waiting = []

    def _note(
        self, pin: Pin, *, done: bool = True, tokens: int | None = None, ttl: float | None = None, reason: str = ""
    ) -> None:
        self.results.append(HintResult(hint="pin", name=pin.name, done=done, tokens=tokens, ttl=ttl, reason=reason))
