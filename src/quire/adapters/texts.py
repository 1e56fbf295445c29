"""Tokenizers and chat templates beside adapters, which must be those that the model is used with.

A trainer often saves a tokenizer beside an adapter: a copy of the model's, or one with
tokens or a template of its own. All requests are read by one tokenizer, so a different one is
refused, unless the user chose what to use in its place.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.base.errors import Unsupported, some
from quire.base.json_files import read_json
from quire.models.catalogue import ADAPTER_TEXTS
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.engine")

ENDS = ("bos_token", "eos_token")
"""Special tokens that decide how prompts begin and where answers end."""


def check_adapter_texts(path: Path, mine: Tokenizer, *, chose_tokenizer: bool, chose_template: bool) -> None:
    """Raise ``Unsupported`` if the tokenizer or the chat template in an adapter's directory differs
    from ``mine``, by what differs; a warning if the user chose ``mine``. ``CheckpointError`` names
    a damaged file. A directory that is missing is refused elsewhere."""
    if not any((path / name).is_file() for name in ADAPTER_TEXTS):
        return
    if (path / "tokenizer.json").is_file() and (own := Tokenizer.from_directory(path)) is not None:
        differences, templates = [*_differences(own, mine)], own.chat_templates
    else:
        differences, templates = [*_added_tokens(path, mine)], _templates(path)
    if differences:
        _refuse(
            f"{path} has a tokenizer of its own, and all requests are read by the model's: {', '.join(differences)}; give "
            "tokenizer= (--tokenizer) with that directory to use it for all, or with the model's to go without it",
            chose_tokenizer,
        )
    if templates and _stripped(templates) != _stripped(mine.chat_templates):
        _refuse(
            f"{path} has a chat template of its own, and all chats are written by the model's; give chat_template= "
            "(--chat-template) with its file to use it for all, or with the model's to go without it",
            chose_template,
        )


def _refuse(message: str, chose: bool) -> None:
    if not chose:
        raise Unsupported(message)
    logger.warning("%s", message.partition(";")[0])


def _differences(own: Tokenizer, mine: Tokenizer) -> Iterator[str]:
    """Yield a sentence for each difference. A token for padding alone changes no prompt."""
    theirs, ours = (one.backend.get_vocab(with_added_tokens=True) for one in (own, mine))
    padding = own.special_tokens.get("pad_token")
    new = sorted(token for token, number in theirs.items() if ours.get(token) != number and token != padding)
    lost = sorted(token for token in ours.keys() - theirs.keys())
    if new:
        yield f"{some([*map(repr, new)])} {'are' if len(new) > 1 else 'is'} no such token of the model"
    if lost:
        yield f"it lacks {some([*map(repr, lost)])}"
    for name in ENDS:
        if own.special_tokens.get(name) != mine.special_tokens.get(name):
            yield f"{name} is {own.special_tokens.get(name)!r} and not {mine.special_tokens.get(name)!r}"
    if not (new or lost):
        theirs_says, ours_says = (_rules(one, padding) for one in (own, mine))
        if other := sorted(
            name for name in theirs_says.keys() | ours_says if theirs_says.get(name) != ours_says.get(name)
        ):
            yield f"it has another {' and '.join(other)}"


def _rules(tokenizer: Tokenizer, padding: str | None) -> dict[str, Any]:
    """Return a tokenizer's definition without its vocabulary's ids."""
    rules: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    rules["added_tokens"] = [one for one in rules.get("added_tokens") or () if one["content"] != padding]
    for name in ("version", "truncation", "padding"):
        rules.pop(name, None)
    return rules


def _added_tokens(path: Path, mine: Tokenizer) -> Iterator[str]:
    """Yield the tokens that a vocabulary in another format adds, if the model lacks them."""
    given = read_json(path / "added_tokens.json")
    if new := sorted(token for token, number in given.items() if mine.token_id(token) != number):
        yield f"{some([*map(repr, new)])} {'are' if len(new) > 1 else 'is'} no such token of the model"


def _templates(path: Path) -> dict[str, str]:
    """Return the chat template in a directory without a ``tokenizer.json``."""
    if (file := path / "chat_template.jinja").is_file():
        return {"default": file.read_text(encoding="utf-8", errors="replace")}
    found = read_json(path / "tokenizer_config.json").get("chat_template")
    return {} if found is None else {"default": str(found)}


def _stripped(templates: Mapping[str, str]) -> dict[str, str]:
    return {name: text.strip() for name, text in templates.items()}
