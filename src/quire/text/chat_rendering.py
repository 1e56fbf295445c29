"""Chat messages to a model's prompt, with its own Jinja template.

Templates are untrusted: they see plain data only, in a copy, and cannot reach Python. Those that do
not come with Quire run in a process with limits (``template_programs``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

from quire.base.config import CHAT_TEMPLATES
from quire.base.errors import InvalidArgument, context_full
from quire.base.signatures import require_text
from quire.text.chat_calls import SURROGATE, fill_contents_of_calls, read_calls, renewed, take_text_from_calls
from quire.text.limited_process import LimitReached
from quire.text.long_texts import TextLimit
from quire.text.template_programs import ParsedTemplate, TemplateFailed, TextTooLong, parse, render_apart, render_here

Message: TypeAlias = Mapping[str, Any]
"""``{"role": str, "content": str or [{"type": "text", "text": str}, ...], ...}``, and further
keys."""

SECONDS = 10.0
"""How long a template may take for the messages of one prompt."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which a message's reasoning is passed; templates read the first, some the second."""

_NO_TEMPLATE = (
    "the tokenizer has no chat template: choose one with chat_template (--chat-template on the command "
    "line), a Jinja file or a built-in one such as 'chatml'; or complete a plain prompt instead of messages"
)


def render_chat(
    tokenizer_template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    text_limit: TextLimit | None = None,
    **extra: Any,
) -> str:
    """Render the prompt for ``messages``; encode it with ``add_special_tokens=False``.

    ``tools`` are JSON schemas of functions; ``extra`` (``enable_thinking=False``,
    ``documents=[...]``) are further variables of the template. A list of text parts stays a list
    for a template that walks over parts, and is joined with newlines for others. ``tool_calls``
    whose ``arguments`` are JSON text (as OpenAI's API has them) become objects, which a template
    may also join with text. Arguments that are no object, as of a call that was cut short, or that
    nest too deeply, stay text; a template that fails on them gets ``{}``. No content beside calls
    is ``none`` for a template that asks that, or an empty text if it fails then, and a missing key
    for others.
    "developer" becomes "system" for a template that does not have the word.

    ``InvalidArgument``: a text longer than ``text_limit``, as soon as it is; more time than
    ``SECONDS``; no template (None, a tokenizer without one); a malformed message (named by its
    index), also one with half a surrogate pair, unless ``tojson`` writes that; and whatever the
    template raises, with its message.
    """
    if tokenizer_template is None:
        raise InvalidArgument(_NO_TEMPLATE, field="messages")
    compiled = parse(tokenizer_template)
    variables = {
        **{name: text for name, text in (("bos_token", bos_token), ("eos_token", eos_token)) if text is not None},
        **{name: _plain(value, name) for name, value in extra.items()},
        "messages": _plain_messages(messages, compiled),
        "tools": None if tools is None else _plain_tools(tools),
        "documents": _plain(extra.get("documents"), "documents"),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = _written(tokenizer_template, variables, text_limit)
    except LimitReached as error:
        raise InvalidArgument(f"the chat template {error} for the messages; send fewer", field="messages") from error
    except TemplateFailed as error:
        raise InvalidArgument(f"the chat template {error}", field="messages") from error
    if SURROGATE.search(text):
        raise _halved(variables["messages"])
    return text


def _written(source: str, variables: Mapping[str, Any], limit: TextLimit | None) -> str:
    """Return the text of a template, which is rendered here if it comes with Quire, else in a
    process of its own. Where it fails, it is rendered again with calls that are easier to read."""
    run = render_here if source in _shipped() else render_apart
    easier = iter((fill_contents_of_calls, take_text_from_calls))
    while True:
        try:
            return run(source, variables, None if limit is None else limit.bytes, SECONDS)
        except TextTooLong:
            assert limit is not None
            problem = f"The messages make a prompt of more than {limit.bytes} bytes, and one that fits has no more"
            raise context_full(limit.tokens, problem, "messages") from None
        except TemplateFailed:
            if not any(change(variables["messages"]) for change in easier):
                raise


@cache
def _shipped() -> frozenset[str]:
    """Return the templates that come with Quire."""
    folder = resources.files("quire") / "data" / "chat_templates"
    return frozenset((folder / f"{name}.jinja").read_text(encoding="utf-8") for name in CHAT_TEMPLATES)


def _halved(messages: Sequence[Mapping[str, Any]]) -> InvalidArgument:
    """Return the error about a text with half a surrogate pair, with the message that has it."""
    for number, message in enumerate(messages):
        for key, value in message.items():
            if SURROGATE.search(json.dumps(value, ensure_ascii=False)):
                where = f"messages.{number}.{key}"
                return InvalidArgument(f"{where} has half a surrogate pair, which is no character", field=where)
    return InvalidArgument("the prompt has half a surrogate pair, which is no character", field="messages")


def select_template(templates: Mapping[str, str], *, with_tools: bool = False) -> str:
    """Return the template ``tool_use`` or ``default``. ``InvalidArgument`` if there is none."""
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise InvalidArgument(
            "the tokenizer has several chat templates and no default: choose one with chat_template, "
            f"{sorted(templates)} or a Jinja file"
        )
    raise InvalidArgument(_NO_TEMPLATE, field="messages")


# ---- messages ----


def _plain_messages(messages: Sequence[Message], template: ParsedTemplate) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidArgument(field="messages", given=messages, allowed="a list of messages")
    if not messages:
        raise InvalidArgument("messages must hold at least one message, got none", field="messages")
    return [_plain_message(message, f"messages.{i}", template) for i, message in enumerate(renewed(messages))]


def _plain_message(message: Message, where: str, template: ParsedTemplate) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgument(field=where, given=message, allowed="an object with 'role' and 'content'")
    # Clients send "content": null and the like; templates handle a missing key, and print a null.
    plain: dict[str, Any] = {k: v for k, v in _plain_mapping(message, where).items() if v is not None}
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgument(
            field=f"{where}.role", given=message.get("role"), allowed="a non-empty string such as 'user'"
        )
    require_text(f"{where}.role", role)
    if role == "developer" and not template.knows_developers:
        plain["role"] = "system"
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    if "content" in plain:
        plain["content"] = _plain_content(plain["content"], f"{where}.content", keep_parts=template.reads_parts)
    elif role in ("assistant", "tool"):
        # What a server answered, also a refusal or nothing at all, comes back in the next request.
        if "tool_calls" not in plain:
            refusal = plain.get("refusal")
            plain["content"] = refusal if isinstance(refusal, str) else ""
    else:
        raise InvalidArgument(
            f"{where} has no content; only messages of an assistant or a tool may have none", field=where
        )
    if "tool_calls" in plain:
        plain["tool_calls"] = read_calls(plain["tool_calls"], f"{where}.tool_calls")
        if template.asks_for_none and not plain.get("content"):
            plain["content"] = None
    reasoning = next((plain[key] for key in _REASONING_FIELDS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _plain_content(content: Any, where: str, *, keep_parts: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(field=where, given=content, allowed="a string or a list of text parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
            raise InvalidArgument(field=f"{where}.{i}", given=part, allowed="{'type': 'text', 'text': string}")
    parts = [{"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part for part in content]
    return parts if keep_parts else "\n".join(part["text"] for part in parts)


def _plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidArgument(field="tools", given=tools, allowed="a list of JSON schemas")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidArgument(field=f"tools.{i}", given=tool, allowed="a JSON schema of a function")
    return [_plain(tool, f"tools.{i}") for i, tool in enumerate(tools)]


def _plain_mapping(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise InvalidArgument(f"{where} must have strings as keys, got {key!r}", field=where)
    return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}


def _plain(value: Any, where: str) -> Any:
    """Return a copy in JSON types: a template can neither change the caller's data nor call into
    it."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # subclasses (enums) carry methods
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, where)
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}.{i}") for i, item in enumerate(value)]
    allowed = "JSON data (object, list, string, number, true, false, null)"
    raise InvalidArgument(field=where, given=value, allowed=allowed)
