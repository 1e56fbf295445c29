"""Tokenising text that stands in the middle of another.

Many tokenizers treat a text's ends in their own way: they put a space before it (Llama 2, Mistral,
T5, GPT-2 with ``add_prefix_space``), or strip white space. In the middle there are no ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers

_ENDS = frozenset({"Prepend", "Strip"})
"""Normalisers that change a text's ends."""


def for_inner_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return the tokenizer that leaves a text's ends alone; ``backend`` itself, if it does."""
    given = [
        None if part is None else json.loads(part.__getstate__())
        for part in (backend.normalizer, backend.pre_tokenizer)
    ]
    normalizer = _changed(given[0], "normalizers", lambda step: step["type"] not in _ENDS and step)
    splits = _changed(given[1], "pretokenizers", _without_prefix)
    if [normalizer, splits] == given:
        return backend
    description: dict[str, Any] = json.loads(backend.to_str())
    description |= {"normalizer": normalizer, "pre_tokenizer": splits}
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _without_prefix(step: dict[str, Any]) -> dict[str, Any]:
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    return {**step, "add_prefix_space": False} if step.get("add_prefix_space") else step


def _changed(given: dict[str, Any] | None, parts: str, change: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a step, or a sequence of steps, after ``change``, which gives nothing for a step that
    goes."""
    if given is None or given["type"] != "Sequence":
        return given and (change(given) or None)
    found = [_changed(step, parts, change) for step in given[parts]]
    return {**given, parts: [step for step in found if step is not None]}
