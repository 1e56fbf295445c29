"""Chat templates of strangers, rendered in a child process with limits.

A template is a program. A sandbox keeps it from Python, but not from loops without end and texts
without bound: ``'a' * 10**9``, ``|center(10**9)``, constants that are folded when it is compiled.
So what Quire does not ship is compiled and rendered in a child, whose memory and time have limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quire.text.limited_process import LimitedProcess, serve


class TemplateFailed(Exception):
    """What a template raised; the text says what and why."""


class TextTooLong(Exception):
    """The text is longer than was asked for."""


Render = Callable[[str, Mapping[str, Any], int | None, float], str]

PROCESS = LimitedProcess(
    "the process that renders chat templates",
    "from quire.text.chat_rendering import render_here; from quire.text.template_process import serve_renders; "
    "serve_renders(render_here)",
)


def render(source: str, variables: Mapping[str, Any], most: int | None, seconds: float) -> str:
    """Return the text of a template with plain ``variables``. ``TextTooLong`` for more than
    ``most`` characters, ``LimitReached``, ``TemplateFailed``; ``Cancelled`` if the call was given
    up."""
    found = PROCESS.ask({"source": source, "variables": variables, "most": most}, seconds)
    if "failed" in found:
        raise TemplateFailed(found["failed"])
    if "text" not in found:
        raise TextTooLong
    return str(found["text"])


def serve_renders(render_here: Render) -> None:
    """Render in the child, by ``chat_rendering.render_here``."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"text": render_here(request["source"], request["variables"], request["most"], request["seconds"])}
        except TemplateFailed as error:
            return {"failed": str(error)}
        except TextTooLong:
            return {}

    serve(answer)
