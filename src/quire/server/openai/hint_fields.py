"""Hints in the bodies of requests: vLLM's ``kv_hints``, ``cache_control`` marks as Anthropic has
them, and ``priority``; and their results, which every answer has under ``quire.hints``.

What is malformed is refused with 400. What is well-formed and cannot be done is answered as
"refused" with the reason, and the request runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from quire.base.hints import MOST_PRIORITY, MOST_SECONDS, NO_HINTS, PIN_SECONDS, CacheHints, HintKind, HintResult, Pin
from quire.base.outputs import RequestOutput
from quire.server.http.context import Context
from quire.server.http.errors import bad_field
from quire.server.openai.protocol import HintedBody, KvHintAction

PROTOCOL = "0.1"
"""The version of vLLM's and SGLang's envelope that is read."""
ACTION_VERSION = "1"
"""The major version of actions that are read."""
MOST_MARKS = 4
"""Marks of one request, as at Anthropic."""
MOST_PINS = 16
"""Pins of one request; each may cost a step of its own."""
LIFETIMES = {"5m": 300.0, "1h": 3600.0}
"""Seconds of the lifetimes that a mark may have."""

B = TypeVar("B", bound=HintedBody)
Answers: TypeAlias = list[dict[str, Any]]
"""What was done with each hint, as clients get it."""


@dataclass(kw_only=True)
class HintFields:
    """The hints of one request, and where they came from."""

    account: CacheHints = NO_HINTS
    """Hints of nothing, with the account in which pins count."""
    longest: float = MOST_SECONDS
    """The most seconds of a pin."""
    pins: list[Pin] = field(default_factory=list)
    """Named by their places in ``names``."""
    names: list[str] = field(default_factory=list)
    """The client's names of pins: ids of actions, or paths of marks."""
    demote: int | None = None
    demotions: list[str] = field(default_factory=list)
    """The ids of actions that ask for it."""
    prefetches: list[str] = field(default_factory=list)
    """The ids of actions that ask for one."""
    priority: int = 0
    answered: Answers = field(default_factory=list)
    """What is known before the request runs."""

    @property
    def hints(self) -> CacheHints:
        """Return the hints that the engine gets."""
        if not (self.pins or self.priority or self.demote is not None):
            return NO_HINTS
        return replace(self.account, pins=tuple(self.pins), demote=self.demote, priority=self.priority)

    def __bool__(self) -> bool:
        """Return whether there is anything to answer."""
        return bool(self.answered or self.prefetches or self.hints is not NO_HINTS)

    def pin(self, name: str, tokens: int | None, seconds: float) -> None:
        """Ask for a pin, of at most the longest time."""
        self.pins.append(Pin(tokens=tokens, ttl=min(seconds, self.longest), name=str(len(self.names))))
        self.names.append(name)

    def refuse(self, hint: HintKind | str, name: str, reason: str) -> None:
        """Note a hint that is not followed."""
        self.answered.append(answer_to(hint, name, done=False, reason=reason))

    def refuse_others(self, reason: str) -> None:
        """Pin and demote nothing."""
        for pin in self.pins:
            self.refuse("pin", self.names[int(pin.name)], reason)
        for name in self.demotions:
            self.refuse("demote", name, reason)
        self.pins, self.demotions, self.demote = [], [], None

    def answers(self, outputs: Mapping[int, RequestOutput]) -> Answers:
        """Return the outcomes of the hints, for each of several prompts with its number."""
        found = list(self.answered)
        for number, output in outputs.items():
            which = {"prompt": number} if number or len(outputs) > 1 else {}
            found += [{**one, **which} for one in self._of(output)]
        return found

    def _of(self, output: RequestOutput) -> Answers:
        found = []
        for result in output.hints:
            if result.hint == "demote":
                found += [_answer(result, name) for name in self.demotions]
            elif result.hint == "pin":
                found.append(_answer(result, self.names[int(result.name)]))
            else:
                found.append(_answer(result, "priority"))
        there = len(output.prompt_token_ids)
        return found + [answer_to("prefetch", name, tokens=there) for name in self.prefetches]


def answer_to(hint: str, name: str, *, done: bool = True, **more: Any) -> dict[str, Any]:
    """Return an answer's fields, without those that do not apply."""
    given = {key: value for key, value in more.items() if value not in (None, "")}
    return {"hint": hint, "id": name, "status": "done" if done else "refused", **given}


def _answer(result: HintResult, name: str) -> dict[str, Any]:
    return answer_to(result.hint, name, done=result.done, tokens=result.tokens, ttl=result.ttl, reason=result.reason)


# -- reading ---------------------------------------------------------------------------------------


def read_hints(context: Context, owner: str, body: HintedBody) -> HintFields:
    """Return the hints of a body, all but the marks in its messages and tools. Raise ``ApiError``
    400 for malformed ones."""
    found = HintFields(account=CacheHints(account=context.sessions.account(owner)), longest=context.settings.pinned_ttl)
    if body.priority is not None:
        if abs(body.priority) > MOST_PRIORITY:
            raise bad_field("priority", f"priority must be in [-{MOST_PRIORITY}, {MOST_PRIORITY}], got {body.priority}")
        found.priority = body.priority
        if not body.priority:
            found.answered.append(answer_to("priority", "priority"))
    if body.cache_control is not None:
        found.pin("cache_control", None, lifetime(body.cache_control, "cache_control"))
    envelope = body.kv_hints
    if envelope is not None:
        for number, action in enumerate(envelope.actions):
            where = f"kv_hints.actions.{number}"
            if envelope.protocol_version != PROTOCOL:
                reason = f"protocol_version {envelope.protocol_version[:20]!r} is not known; {PROTOCOL} is"
                found.refuse(action.action_type, action.action_id, reason)
            else:
                _read_action(found, action, where)
        if len(found.pins) > MOST_PINS:
            raise bad_field(
                "kv_hints.actions", f"kv_hints ask for {len(found.pins)} pins; a request may have {MOST_PINS}"
            )
    return found


def for_prefetch(body: B, hints: HintFields) -> tuple[B, bool]:
    """Return the body, and whether it asks for a prefetch and no tokens: ``max_tokens`` is 0, which
    nothing else may ask for. Raise ``ApiError`` 400 for such a stream."""
    given = [getattr(body, name, None) for name in ("max_tokens", "max_completion_tokens")]
    if not hints.prefetches or 0 not in given or getattr(body, "session_id", None) is not None:
        return body, False
    if getattr(body, "stream", None):
        raise bad_field("stream", "a prefetch without tokens (max_tokens=0) has nothing to stream; leave stream out")
    return body.model_copy(update={"max_tokens": 1, "max_completion_tokens": None}), True


def _read_action(found: HintFields, action: KvHintAction, where: str) -> None:
    """Read one action, by the names of vLLM's and SGLang's drafts where these have any."""
    kind, name, payload, at = action.action_type, action.action_id, action.payload, f"{where}.payload"
    if kind not in ("kv.pin", "kv.retain", "kv.demote", "kv.prefetch"):
        found.refuse(kind, name, "this server acts on kv.pin, kv.retain, kv.demote and kv.prefetch")
        return
    if action.action_version.split(".")[0] != ACTION_VERSION:
        found.refuse(kind, name, f"action_version {action.action_version[:20]!r} is not known; {ACTION_VERSION}.0 is")
        return
    match kind:
        case "kv.pin":
            _check_names(payload, ("end", "duration"), at)
            seconds = _seconds(payload.get("duration", PIN_SECONDS), f"{at}.duration")
            found.pin(name, _count(payload.get("end"), f"{at}.end"), seconds)
        case "kv.retain":
            _read_directives(found, name, payload, at)
        case "kv.demote":
            if "session_id" in payload:
                found.refuse("demote", name, "kv.demote of a session_id is not supported; give start, of this request")
                return
            _check_names(payload, ("start",), at)
            _ask_demotion(found, name, payload.get("start", 0), f"{at}.start")
        case "kv.prefetch":
            _check_names(payload, (), at)
            found.prefetches.append(name)


def _read_directives(found: HintFields, name: str, payload: Mapping[str, Any], at: str) -> None:
    """Read vLLM's ``kv.retain``: a priority over 0 is a pin of all tokens up to the range's end,
    and 0 gives up what begins there."""
    _check_names(payload, ("scope", "directives"), at)
    listed = payload.get("directives")
    if not isinstance(listed, list):
        raise bad_field(f"{at}.directives", f"{at}.directives must be a list, got {listed!r:.60}")
    if payload.get("scope") is not None:
        found.refuse("pin", name, "scope is not supported: pins belong to the API key")
        return
    for number, directive in enumerate(listed):
        where = f"{at}.directives.{number}"
        if not isinstance(directive, dict):
            raise bad_field(where, f"{where} must be an object, got {directive!r:.60}")
        _check_names(directive, ("start", "end", "priority", "duration", "covers_output"), where)
        priority = directive.get("priority")
        if type(priority) is not int or not 0 <= priority <= 100:
            raise bad_field(
                f"{where}.priority", f"{where}.priority must be an integer in [0, 100], got {priority!r:.60}"
            )
        seconds = _seconds(directive.get("duration"), f"{where}.duration")
        end = _count(directive.get("end"), f"{where}.end")
        start = directive.get("start", 0)
        if directive.get("covers_output"):
            found.refuse("pin", name, "the output is not pinned, only tokens of the prompt")
        elif not priority:
            _ask_demotion(found, name, start, f"{where}.start")
        else:
            found.pin(name, end, seconds)


def _ask_demotion(found: HintFields, name: str, start: Any, where: str) -> None:
    if type(start) is not int or start < 0:
        raise bad_field(where, f"{where} must be an integer of at least 0, got {start!r:.60}")
    found.demote = start if found.demote is None else min(start, found.demote)
    found.demotions.append(name)


def _check_names(payload: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in payload:
        if name not in known:
            allowed = ", ".join(known) or "nothing"
            raise bad_field(f"{where}.{name[:60]}", f"{where} may hold {allowed}, got {name!r:.60}")


def _seconds(value: Any, where: str) -> float:
    """Return a time; None is the longest."""
    if value is None:
        return MOST_SECONDS
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= MOST_SECONDS:
        raise bad_field(where, f"{where} must be null or seconds in (0, {MOST_SECONDS:g}], got {value!r:.60}")
    return float(value)


def _count(value: Any, where: str) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise bad_field(where, f"{where} must be null or an integer of at least 1, got {value!r:.60}")
    return value


def lifetime(mark: Any, where: str) -> float:
    """Return the seconds of a ``cache_control`` mark."""
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral" or mark.keys() - {"type", "ttl"}:
        raise bad_field(
            where, f'{where} must be {{"type": "ephemeral"}}, with "ttl": "5m" or "1h" if it has one, got {mark!r:.80}'
        )
    ttl = mark.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in LIFETIMES:
        raise bad_field(f"{where}.ttl", f'{where}.ttl must be "5m" or "1h", got {ttl!r:.60}')
    return LIFETIMES[ttl]
