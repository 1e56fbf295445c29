"""Hints: a program's knowledge about the future use of a prompt's state, and the results.

No hint changes a token. A hint that cannot be followed is refused with a reason, in the result, and
the request continues.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from quire.base.config import check_int, check_real
from quire.base.errors import InvalidArgument, QuireError

HintKind: TypeAlias = Literal["pin", "demote", "prefetch", "priority"]

PIN_SECONDS = 300.0
"""Default seconds of a pin, as of Anthropic's ``cache_control`` marks."""

MOST_SECONDS = 30 * 24 * 3600.0
"""Most seconds of a pin, as in vLLM's ``kv.retain``."""

MOST_PRIORITY = 2**31 - 2
"""Bound of the absolute value of priorities."""


@dataclass(frozen=True, eq=False, slots=True)
class PinAccount:
    """A user whose pinned sessions and prompts count together."""

    share: float
    """Largest part of each pool that they may hold."""
    total: float
    """Largest part of each pool that all pinned state may hold, of other accounts or none
    included."""


OWN_ACCOUNT = PinAccount(share=0.75, total=0.75)
"""The account of a program's own pins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A request to keep the state of a prompt's beginning in the pool for a time."""

    tokens: int | None = None
    """Number of first tokens to keep; None, or more than the prompt has: the whole prompt."""
    ttl: float = PIN_SECONDS
    """Seconds. A longer pin of the same tokens stays unchanged."""
    name: str = ""
    """The name of its result."""

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_int("tokens", self.tokens, 1, also="or None")
        check_real("ttl", self.ttl, above=0, up_to=MOST_SECONDS, unit=" seconds")
        if not isinstance(self.name, str):
            raise InvalidArgument(field="name", given=self.name, allowed="a string")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheHints:
    """A program's hints about the state of one request."""

    pins: Sequence[Pin] = ()
    """Beginnings of the prompt to be kept, even if the pool is short."""
    demote: int | None = None
    """At the end of the request, give up the state in the pool beyond this number of first tokens.
    Lower tiers may keep it; pinned and shared state stays. None: nothing is given up."""
    priority: int = 0
    """Lower values run earlier, as in vLLM; equal ones in order of arrival. The highest value is
    preempted first."""
    account: PinAccount = OWN_ACCOUNT
    """The account of these pins."""

    def __post_init__(self) -> None:
        if not isinstance(self.pins, (list, tuple)) or not all(isinstance(pin, Pin) for pin in self.pins):
            raise InvalidArgument(field="pins", given=self.pins, allowed="a list of Pin")
        object.__setattr__(self, "pins", tuple(self.pins))
        if self.demote is not None:
            check_int("demote", self.demote, 0, also="or None")
        check_int("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        if not isinstance(self.account, PinAccount):
            raise InvalidArgument(field="account", given=self.account, allowed="a PinAccount")


NO_HINTS = CacheHints()


def checked_hints(hints: object) -> CacheHints:
    """Return hints, none for None; ``InvalidArgument`` for anything else."""
    if hints is None:
        return NO_HINTS
    if not isinstance(hints, CacheHints):
        raise InvalidArgument(field="hints", given=hints, allowed="CacheHints or None")
    return hints


@dataclass(frozen=True, kw_only=True, slots=True)
class HintResult:
    """The result of one hint."""

    hint: HintKind
    name: str = ""
    """The pin's name."""
    done: bool = True
    tokens: int | None = None
    """For a pin, the number of kept tokens; for a demotion, of tokens given up; for a prefetch, of
    tokens in the pool now."""
    ttl: float | None = None
    """Seconds of a pin."""
    reason: str = ""
    """Reason why it was refused, or followed in part; empty otherwise."""

    def named(self, name: str) -> HintResult:
        """Return the same result with another name."""
        return replace(self, name=name)


PrefixName: TypeAlias = tuple[PinAccount, Hashable, bytes]
"""Account, key and a digest of the tokens of a pinned prefix."""


class RequestHints:
    """The hints of one request, from its arrival to their results: pins to make, and the results so
    far. The caller holds the engine's lock."""

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

    @property
    def account(self) -> PinAccount:
        return self._wanted.account

    def due(self, computed: int) -> Iterator[tuple[int, Pin]]:
        """Yield the pins that can be made now, and their positions, once."""
        while self._waiting and self._waiting[0][0] <= computed:
            yield self._waiting.pop(0)

    def pinned(self, pin: Pin, position: int, tokens: int, made: PrefixName | None) -> None:
        """Record a pin of ``tokens``; ``made``: the pin is new."""
        if made is not None:
            self._made.append(made)
        reason = "" if tokens == position else f"no state is kept between {tokens} and {position} tokens"
        self._note(pin, tokens=tokens, ttl=pin.ttl, reason=reason)

    def refused(self, pin: Pin, error: QuireError) -> None:
        """Note the reason for not making a pin."""
        self._note(pin, done=False, reason=str(error))

    def failed(self) -> list[PrefixName]:
        """Refuse all pins of a state that is not fit to be used. Return the pins that are to be
        dropped."""
        self.results = [result for result in self.results if result.hint != "pin"]
        self._waiting = [(0, pin) for pin in self._wanted.pins]
        self._refuse("the request failed")
        return self._made

    def ended(self) -> int | None:
        """Refuse the pins that are left, at the end of the request. Return the position from which
        its state is to be given up; None: it stays."""
        self._refuse("the prompt did not run that far")
        return self._wanted.demote

    def demoted(self, start: int, given_up: int) -> None:
        """Record the tokens from ``start`` on as given up. Only this prompt used them."""
        reason = "" if given_up else f"nothing that only this prompt uses is held beyond {start} tokens"
        self.results.append(HintResult(hint="demote", tokens=given_up, reason=reason))

    def _refuse(self, reason: str) -> None:
        """Refuse the remaining hints."""
        for _, pin in self._waiting:
            self._note(pin, done=False, reason=reason)
        self._waiting = []

    def _note(
        self, pin: Pin, *, done: bool = True, tokens: int | None = None, ttl: float | None = None, reason: str = ""
    ) -> None:
        self.results.append(HintResult(hint="pin", name=pin.name, done=done, tokens=tokens, ttl=ttl, reason=reason))
