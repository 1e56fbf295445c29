"""The official OpenAI client, imported when a test first uses it: its types take seconds, and tests
are collected in every process."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import pytest


def openai() -> Any:
    """The package; a test that asks for it without it is skipped."""
    return pytest.importorskip("openai")


def response_types() -> Any:
    return pytest.importorskip("openai.types.responses")


@cache
def event_types() -> dict[str, Any]:
    """The type of each event of a streamed response."""
    kinds = get_args(get_args(response_types().ResponseStreamEvent)[0])
    return {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in kinds}
