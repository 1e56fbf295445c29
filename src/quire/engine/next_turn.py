"""The tokens with which the prompt of a conversation's next turn begins, whatever is said in it.

A chat template may write an answer into later prompts in another way than the model wrote it: most
leave the reasoning out. Then the state of the answer is of no use to the next turn, unless the
answer has been run again as the template writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.branches.history import common_prefix
from quire.engine.spelled_tokens import SpelledTokens
from quire.engine.tokenizer import Tokenizer

PROBES = ("a", "\n\n[")
"""Beginnings of a next message. Tokens before it that differ between these belong to it."""


def next_turn_ids(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    texts: SpelledTokens | Tokenizer,
    *,
    inside: bool = False,
) -> NDArray[np.int64]:
    """Return the tokens up to where the next message begins. ``messages`` ends with the answer,
    whose calls, if it has any, are answered next. ``texts`` tokenises what ``render`` returns.
    ``inside``: other text stands before them. Errors are those of ``render``."""
    found: NDArray[np.int64] | None = None
    for probe in PROBES:
        text = render([*messages, _next_message(messages[-1], probe)])
        ids = np.array(texts.encode_rendered(text, inside=inside), dtype=np.int64)
        found = ids if found is None else found[: common_prefix(found, ids)]
    assert found is not None
    return found


def _next_message(answer: Mapping[str, Any], content: str) -> dict[str, Any]:
    calls = answer.get("tool_calls")
    if not calls:
        return {"role": "user", "content": content}
    name = calls[0].get("function", {}).get("name")
    return {"role": "tool", "tool_call_id": calls[0].get("id"), "name": name, "content": content}


def parts_from(history: NDArray[np.int64], computed: NDArray[np.int64]) -> bool:
    """Return whether a history goes on in another way than what has been computed."""
    return common_prefix(history, computed) < min(history.size, computed.size)
