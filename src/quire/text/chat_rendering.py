"""Chat messages to a model's prompt, with its own Jinja template.

The environment is that of ``transformers``, so a template renders the same text: an immutable
sandbox, ``trim_blocks`` and ``lstrip_blocks``, ``break`` and ``continue``, a ``tojson`` that does
not escape HTML, ``raise_exception``, ``strftime_now`` and the ``generation`` tag. Templates are
untrusted: they see plain data only, in a copy, and cannot reach Python. Those that do not come with
Quire run in a process with limits (``template_process``); here they are only parsed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cache, lru_cache
from importlib import resources
from typing import Any, NamedTuple, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from quire.base.config import CHAT_TEMPLATES
from quire.base.errors import InvalidArgument, QuireError, context_full
from quire.base.signatures import require_text
from quire.text import long_texts, template_process
from quire.text.chat_calls import SURROGATE, fill_contents_of_calls, read_calls, take_text_from_calls, to_json
from quire.text.deprecated_messages import renewed
from quire.text.limited_process import LimitReached, TooSlow
from quire.text.long_texts import TextLimit
from quire.text.template_process import TemplateFailed, TextTooLong

Message: TypeAlias = Mapping[str, Any]
"""``{"role": str, "content": str or [{"type": "text", "text": str}, ...], ...}``, and further
keys."""

SECONDS = 10.0
"""How long a template may take for the messages of one prompt."""

MAX_SOURCE = 1 << 18
"""Most characters of a template; templates of popular models have up to 20,000."""

MAX_TEXT = 1 << 26
"""Most characters of a rendered prompt where nothing else limits it."""

MAX_REASON = 2000
"""Most characters of the reason for which a template refuses messages."""

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
    may also join with text. Arguments that are no object, as of a call that was cut short, stay
    text; a template that fails on them gets ``{}``. No content beside calls is ``none`` for a
    template that asks that, or an empty text if it fails then, and a missing key for others.
    "developer" becomes "system" for a template that does not have the word.

    ``InvalidArgument``: a text longer than ``text_limit``, as soon as it is; more time than
    ``SECONDS``; no template (None, a tokenizer without one); a malformed message (named by its
    index), also one with half a surrogate pair, unless ``tojson`` writes that; and whatever the
    template raises, with its message.
    """
    if tokenizer_template is None:
        raise InvalidArgument(_NO_TEMPLATE, field="messages")
    compiled = _parse(tokenizer_template)
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
    run = render_here if source in _shipped() else template_process.render
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


def render_here(source: str, variables: Mapping[str, Any], most: int | None, seconds: float) -> str:
    """Render a template in this process, as ``template_process.render`` does in another one. Loops
    over data check the clock; nothing else is limited."""
    deadline = _deadline.set(time.monotonic() + seconds)
    pieces, size = [], 0
    try:
        for piece in _compile(source).generate(variables):
            size += len(piece)
            if most is not None and size > most:
                raise TextTooLong
            if size > MAX_TEXT:
                raise LimitReached(f"makes more than {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)
    except (QuireError, LimitReached, TextTooLong, MemoryError):
        raise
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailed(f"is not valid Jinja: line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        reason = (error.message or type(error).__name__)[:MAX_REASON]
        raise TemplateFailed(f"refused the messages: {reason}") from error
    except Exception as error:  # an operation of the template on data it did not expect
        raise TemplateFailed(f"failed on the messages: {type(error).__name__}: {error}"[:MAX_REASON]) from error
    finally:
        _deadline.reset(deadline)


def _halved(messages: Sequence[Mapping[str, Any]]) -> InvalidArgument:
    """Return the error about a text with half a surrogate pair, with the message that has it."""
    for number, message in enumerate(messages):
        for key, value in message.items():
            if SURROGATE.search(json.dumps(value, ensure_ascii=False)):
                where = f"messages.{number}.{key}"
                return InvalidArgument(f"{where} has half a surrogate pair, which is no character", field=where)
    return InvalidArgument("the prompt has half a surrogate pair, which is no character", field="messages")


def select_template(templates: Mapping[str, str], chosen: str | None = None, *, with_tools: bool = False) -> str:
    """Return the template ``chosen`` (a name in ``templates``, or a template), else ``tool_use`` or
    ``default``. ``InvalidArgument`` if there is none."""
    if chosen is not None:
        return templates.get(chosen, chosen)
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


def _plain_messages(messages: Sequence[Message], template: _Parsed) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidArgument(field="messages", given=messages, allowed="a list of messages")
    if not messages:
        raise InvalidArgument("messages must hold at least one message, got none", field="messages")
    return [_plain_message(message, f"messages.{i}", template) for i, message in enumerate(renewed(messages))]


def _plain_message(message: Message, where: str, template: _Parsed) -> dict[str, Any]:
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


# ---- templates ----


def check_template(source: str, name: str) -> None:
    """Refuse with ``InvalidArgument`` what is no Jinja, or never reads the messages. ``name`` is
    how the error calls it."""
    if "messages" not in _loaded(_tree(source, name)):
        raise InvalidArgument(f"{name} never reads 'messages', as every chat template does; is it another file?")


class _Parsed(NamedTuple):
    """What a template does, as far as its syntax tells. Nothing of it has run: even constants are
    left as they are."""

    variables: frozenset[str]
    """Names that it reads."""
    reads_parts: bool
    """Whether it walks over the parts of a message's content."""
    asks_for_none: bool
    """Whether it asks if a message's content is none."""
    knows_developers: bool
    """Whether it has the word "developer" in its code, as the name of a role."""


def variables_of(source: str) -> frozenset[str]:
    """Return the variables that a template reads."""
    return _parse(source).variables


@lru_cache(maxsize=64)
def words_of(source: str) -> frozenset[str]:
    """Return the strings that a template's code searches in texts: the strings that it compares,
    and arguments of methods, filters and tests."""
    nodes = jinja2.nodes
    try:
        tree = _tree(source, "the chat template")
    except InvalidArgument:
        return frozenset()  # to be rendered, it is refused
    places: list[jinja2.nodes.Node] = list(tree.find_all(nodes.Compare))
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr):
            places += call.args
    for used in (*tree.find_all(nodes.Filter), *tree.find_all(nodes.Test)):
        places += used.args
    consts = [one for place in places for one in (place, *place.find_all(nodes.Const))]
    return frozenset(one.value for one in consts if isinstance(one, nodes.Const) and isinstance(one.value, str))


@lru_cache(maxsize=64)
def _parse(source: str) -> _Parsed:
    tree = _tree(source, "the chat template")
    contents = _Contents(tree)
    return _Parsed(
        reads_parts=contents.walked(),
        asks_for_none=contents.asked_for_none(),
        knows_developers=any(node.value == "developer" for node in tree.find_all(jinja2.nodes.Const)),
        variables=_loaded(tree),
    )


def _tree(source: str, name: str) -> jinja2.nodes.Template:
    """Return the syntax of a template. ``InvalidArgument``: it has none, or is too long or deep."""
    if len(source) > MAX_SOURCE:
        raise InvalidArgument(f"{name} has {len(source)} characters; at most {MAX_SOURCE} are read")
    try:
        return _environment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidArgument(f"{name} is not valid Jinja: line {error.lineno}: {error.message}") from error
    except RecursionError:
        raise InvalidArgument(f"{name} is nested too deeply to be read") from None


def _loaded(tree: jinja2.nodes.Template) -> frozenset[str]:
    """Return the names that a template reads, also those that it may have set before."""
    return frozenset(node.name for node in tree.find_all(jinja2.nodes.Name) if node.ctx == "load")


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


class _Contents:
    """The places of a template that have a message's content."""

    def __init__(self, tree: jinja2.nodes.Template) -> None:
        self._tree = tree
        self._holders = {"content"}
        for assignment in tree.find_all(jinja2.nodes.Assign):
            if isinstance(assignment.target, jinja2.nodes.Name) and self._is_content(assignment.node):
                self._holders.add(assignment.target.name)

    def _is_content(self, node: jinja2.nodes.Node) -> bool:
        while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Getitem) and not _is_key(node):
            if node.node is None:
                return False
            node = node.node
        return node.name in self._holders if isinstance(node, jinja2.nodes.Name) else _is_key(node)

    def walked(self) -> bool:
        """Return whether some ``for`` runs over ``message.content`` or a variable set from it."""
        return any(self._is_content(loop.iter) for loop in self._tree.find_all(jinja2.nodes.For))

    def asked_for_none(self) -> bool:
        """Return whether ``is none`` or ``== none`` is asked of it."""
        tests = (test.node for test in self._tree.find_all(jinja2.nodes.Test) if test.name == "none")
        compared = (
            compare.expr
            for compare in self._tree.find_all(jinja2.nodes.Compare)
            for operand in compare.ops
            if isinstance(operand.expr, jinja2.nodes.Const) and operand.expr.value is None
        )
        return any(self._is_content(node) for node in (*tests, *compared))


def _is_key(node: jinja2.nodes.Node) -> bool:
    """Return whether this is ``message.content``, ``message['content']`` or
    ``message.get('content')``."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Call) and node.args:
        asked = isinstance(node.node, jinja2.nodes.Getattr) and node.node.attr == "get"
        return asked and isinstance(node.args[0], jinja2.nodes.Const) and node.args[0].value == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        return isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    return False


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox. It checks the clock wherever a template reads data, as loops do."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _look()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _look()
        return super().getitem(obj, argument)


_deadline: ContextVar[float] = ContextVar("deadline")


def _look() -> None:
    """Raise ``Cancelled`` if the call was given up, ``LimitReached`` if it takes too long."""
    long_texts.check()
    if time.monotonic() > _deadline.get():
        raise TooSlow(f"takes longer than {SECONDS:g} seconds")


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_TemplateNamespace
    )
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks text for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class's attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """``dict`` without its attributes, which lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(jinja2.utils.Namespace):
    """``namespace`` that refuses names with a leading underscore, which lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no name, so that namespace(self=...) works
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace attribute must not begin with an underscore, got {name!r}")
