"""Fields that switch a model's reasoning on and off, as variables of its chat template."""

from __future__ import annotations

from typing import Any, TypeVar

from quire.engine.chat_rendering import variables_of
from quire.server.errors import bad_field, naming
from quire.server.protocol import ChatRequest, Reasoning
from quire.server.reasoning import reasoning_for

SWITCHES = ("enable_thinking", "thinking")
"""Variables that templates switch reasoning by; the first one that a template reads counts."""

T = TypeVar("T")


def thinking_variables(body: ChatRequest, template: str) -> dict[str, Any]:
    """Return the variables that ``reasoning_effort``, ``reasoning`` and ``enable_thinking`` give a
    template. Raise ``ApiError`` 400 for what it does not read."""
    reasoning = body.reasoning or Reasoning()
    effort = _one("reasoning.effort", reasoning.effort, "reasoning_effort", body.reasoning_effort)
    switch = _one("reasoning.enabled", reasoning.enabled, "enable_thinking", body.enable_thinking)
    if effort is None and switch is None:
        return {}
    with naming({}, "messages"):
        read = variables_of(template)
    found: dict[str, Any] = {}
    switches = [name for name in SWITCHES if name in read]
    if effort is not None:
        where = "reasoning_effort" if reasoning.effort is None else "reasoning.effort"
        if "reasoning_effort" in read:
            found["reasoning_effort"] = effort
        elif effort != "none":
            use = "enable_thinking switches it" if switches else "leave it out"
            raise _unread(where, f"this model's chat template knows no effort of reasoning; {use}")
        elif switch is None:
            switch = False
        elif switch:
            raise _unread(where, f'{where} "none" and enable_thinking true exclude each other; give one of them')
    if switch is not None:
        if switches:
            found[switches[0]] = switch
        elif switch or reasoning_for(template) is not None:
            where = "enable_thinking" if reasoning.enabled is None else "reasoning.enabled"
            raise _unread(where, "this model's chat template does not switch reasoning on or off; leave it out")
    return found


def _one(name: str, value: T | None, other: str, same: T | None) -> T | None:
    """Return the value of two fields that mean the same."""
    if value is not None and same is not None and value != same:
        raise bad_field(name, f"{name} is {value!r} and {other} {same!r}, which are the same; give one of them")
    return same if value is None else value


def _unread(name: str, reason: str) -> Exception:
    return bad_field(name, f"{name} is not supported: {reason}", code="unsupported_parameter")
