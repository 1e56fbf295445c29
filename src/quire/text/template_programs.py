"""Chat templates as programs: what their syntax tells, and how they run.

The environment is that of ``transformers``, so a template renders the same text: an immutable
sandbox, ``trim_blocks`` and ``lstrip_blocks``, ``break`` and ``continue``, a ``tojson`` that does
not escape HTML, ``raise_exception``, ``strftime_now`` and the ``generation`` tag.

A sandbox keeps a template from Python, but not from loops without end and texts without bound:
``'a' * 10**9``, ``|center(10**9)``, constants that are folded when it is compiled. So what Quire
does not ship is compiled and rendered in a child process, whose memory and time have limits
(``render_apart``). In this process it is only parsed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from quire.base.errors import InvalidArgument, QuireError
from quire.text import long_texts
from quire.text.chat_calls import to_json
from quire.text.limited_process import LimitedProcess, LimitReached, TooSlow, serve

MAX_SOURCE = 1 << 18
"""Most characters of a template; templates of popular models have up to 20,000."""

MAX_TEXT = 1 << 26
"""Most characters of a rendered prompt where nothing else limits it."""

MAX_REASON = 2000
"""Most characters of the reason for which a template refuses messages."""

PROCESS = LimitedProcess(
    "the process that renders chat templates", "from quire.text.template_programs import serve_renders; serve_renders()"
)


class TemplateFailed(Exception):
    """What a template raised; the text says what and why."""


class TextTooLong(Exception):
    """The text is longer than was asked for."""


# -- rendering -------------------------------------------------------------------------------------


def render_apart(source: str, variables: Mapping[str, Any], most: int | None, seconds: float) -> str:
    """Return the text of a template with plain ``variables``. ``TextTooLong`` for more than
    ``most`` characters, ``LimitReached``, ``TemplateFailed``; ``Cancelled`` if the call was given
    up."""
    found = PROCESS.ask({"source": source, "variables": variables, "most": most}, seconds)
    if "failed" in found:
        raise TemplateFailed(found["failed"])
    if "text" not in found:
        raise TextTooLong
    return str(found["text"])


def serve_renders() -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"text": render_here(**request)}
        except TemplateFailed as error:
            return {"failed": str(error)}
        except TextTooLong:
            return {}

    serve(answer)


def render_here(source: str, variables: Mapping[str, Any], most: int | None, seconds: float) -> str:
    """Render a template in this process, as ``render_apart`` does in another one. Loops over data
    check the clock; nothing else is limited."""
    before = _limit.set((time.monotonic() + seconds, seconds))
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
        _limit.reset(before)


# -- syntax ----------------------------------------------------------------------------------------


def check_template(source: str, name: str) -> None:
    """Refuse with ``InvalidArgument`` what is no Jinja, or never reads the messages. ``name`` is
    how the error calls it."""
    if "messages" not in _loaded(_tree(source, name)):
        raise InvalidArgument(f"{name} never reads 'messages', as every chat template does; is it another file?")


class ParsedTemplate(NamedTuple):
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
    return parse(source).variables


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
def parse(source: str) -> ParsedTemplate:
    """Parse a chat template. ``InvalidArgument``: it does not compile, or is too long or deep."""
    tree = _tree(source, "the chat template")
    contents = _Contents(tree)
    return ParsedTemplate(
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


# -- the environment -------------------------------------------------------------------------------


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox. It checks the clock wherever a template reads data, as loops do."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        _look()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _look()
        return super().getitem(obj, argument)


_limit: ContextVar[tuple[float, float]] = ContextVar("limit")
"""When the rendering must have ended, and the seconds that it may take."""


def _look() -> None:
    """Raise ``Cancelled`` if the call was given up, ``LimitReached`` if it takes too long."""
    long_texts.check()
    end, seconds = _limit.get()
    if time.monotonic() > end:
        raise TooSlow(f"takes longer than {seconds:g} seconds")


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
