"""The chat template that a user chose: a built-in one, a file, Jinja text."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path

from quire.base.config import CHAT_TEMPLATES
from quire.base.errors import InvalidArgument, NotFound
from quire.text.template_programs import check_template
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire")

TURN_ENDS = {"chatml": "<|im_end|>"}
"""What ends a turn in a built-in template. A model that has it as a token ends answers with it."""


def with_chosen_template(tokenizer: Tokenizer, chosen: str) -> Tokenizer:
    """Return a tokenizer whose only chat template is ``chosen``, with tools or without.

    ``chosen``: a name among the model's own templates or ``CHAT_TEMPLATES``, Jinja text (which has
    ``{{`` or ``{%``), or else a file. ``NotFound`` without the file; ``InvalidArgument`` for a file
    that is no text, is no Jinja or never reads the messages.
    """
    if chosen in tokenizer.chat_templates:
        return tokenizer.with_chat_template(tokenizer.chat_templates[chosen])
    if chosen not in CHAT_TEMPLATES:
        given = "chat_template" if is_jinja(chosen) else f"chat_template {chosen!r}"
        source = chosen if is_jinja(chosen) else _read(Path(chosen).expanduser())
        check_template(source, given)
        return tokenizer.with_chat_template(source)
    end = TURN_ENDS.get(chosen)
    end_id = None if end is None else tokenizer.token_id(end)
    if end is not None and end_id is None:
        logger.warning(
            "chat_template %r marks turns with tokens such as %r, which this model does not have: "
            "it reads them as plain text, and its answers may run on into the next turn",
            chosen,
            end,
        )
    return tokenizer.with_chat_template(built_in_template(chosen), ends=() if end_id is None else (end_id,))


def is_jinja(text: str) -> bool:
    """Return whether this is a template itself, not the name of one."""
    return "{{" in text or "{%" in text


def built_in_template(name: str) -> str:
    """Return the Jinja text of one of ``CHAT_TEMPLATES``."""
    return (resources.files("quire") / "data" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def _read(path: Path) -> str:
    names = ", ".join(map(repr, CHAT_TEMPLATES))
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(
            f"chat_template {str(path)!r}: there is no such file; a Jinja file or a built-in name ({names}) is accepted"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"chat_template {str(path)!r} is no text in UTF-8; a Jinja file is accepted") from None
    except (OSError, ValueError) as error:  # a directory, no permission, a name that no file could have
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgument(f"chat_template {str(path)[:200]!r} cannot be read: {reason}") from error
