"""Tool calls in a model's text: its format, the calls, and the schema that forces calls.

Rules for every format and every text:

- A call begins as soon as its name is known and its arguments have opened; if the name comes last,
  or the arguments are a string, when it is whole. From then on its arguments are given as they are
  written, and it stays a call, also if its text turns malformed or ends.
- Its arguments are valid JSON if the model wrote that. Strings in them keep line breaks and escapes
  that JSON does not have. If the call turns malformed, its arguments get its whole text up to the
  mark that ends it (without one, up to the next marker or the end), so that they do not seem whole.
  If the text ends, they are the part that was written.
- Other text is content, unchanged. Nothing is lost or doubled but the format's own parts. The mark
  that ends a call is the format's, also if the call is malformed.
- A marker inside a JSON string is no marker.
- Where tools are offered, a text may begin with calls without a marker (``tools.bare_calls``).
- White space after the last text is the format's if there are calls. Other white space is content.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.base.errors import InvalidArgument
from quire.grammars.schema_nodes import point
from quire.server.tools import formats as tool_formats
from quire.server.tools.bare_calls import bare_calls
from quire.server.tools.formats import Offered, Tools
from quire.server.tools.reader import Delta, Malformed, MessageParser, Reader, Steps, overlap

Grammar = Callable[[Reader, str, Offered], Steps[None]]
"""A grammar that reads calls after a marker ("" without one)."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOTHING = re.compile("(?!)")


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The format of a model's calls."""

    name: str
    markers: tuple[str, ...]
    """Beginnings of calls. The text must keep them, also if they are special tokens."""
    grammar: Grammar = field(repr=False)
    wrappers: tuple[str, ...] = ()
    """Marks around the text of an answer; they are no content."""
    whole: bool = False
    """Whether a text is an answer as a whole unless it begins with a call."""
    only_calls: bool = False
    """Whether nothing but calls is written: the rest of one that was cut is no content."""

    @property
    def forced(self) -> ToolFormat:
        """Return a format for texts that are calls and nothing else. Those of Llama have no
        marker."""
        if self.name == "llama3_json":
            return replace(self, markers=(), only_calls=True)
        return replace(self, whole=True, only_calls=True)

    @property
    def without_calls(self) -> ToolFormat | None:
        """Return a format for messages without calls, which drops the wrappers; None without
        wrappers."""
        return replace(self, markers=()) if self.wrappers else None


class StreamingToolParser(MessageParser):
    """A parser of the calls of one message, as its text arrives."""

    def __init__(self, format: ToolFormat, tools: Tools | None = None) -> None:
        """Begin a message. ``tools`` tells the types of parameters, for the formats that write
        values bare, and the names, for those whose calls look like an answer in JSON."""
        super().__init__()
        self._format = format
        self._offered = Offered(tools)
        self._sought = (*format.markers, *format.wrappers)
        self._pattern = re.compile("|".join(map(re.escape, self._sought))) if self._sought else _NOTHING
        self._only_calls = format.only_calls
        self._reader = Reader(self._of_call)
        self._num_calls = 0
        self._space: list[str] = []
        self._steps = self._run()

    def _read(self, text: str, *, last: bool) -> None:
        self._reader.push(text)
        self._reader.closed = last
        waits = next(self._steps, False) is None
        if last and waits:
            raise AssertionError("a grammar waits for text after the end")
        if last and self._space and not self._num_calls:
            self._deltas.append(Delta(content="".join(self._space)))
        self._deltas = _joined(self._deltas)

    def _run(self) -> Steps[None]:
        reader = self._reader
        if self._format.whole:
            if not (yield from self._begins_with_a_mark()):
                self._sought = ()
        elif self._format.only_calls:
            yield from self._calls(self._format.grammar)
        elif self._format.markers and self._offered.names is not None:
            yield from self._calls(bare_calls)
        if not self._sought:
            self._pattern = _NOTHING
        while True:
            reader.hold()
            if found := self._pattern.search(reader.text, reader.at):
                self._content(reader.text[reader.at : found.start()])
                reader.at = found.start()
                reader.hold()
                reader.at = found.end()
                if found.group() not in self._format.wrappers:
                    yield from self._calls(self._format.grammar, found.group())
                continue
            held = 0 if reader.closed else overlap(reader.text[reader.at :], self._sought)
            end = len(reader.text) - held
            self._content(reader.text[reader.at : end])
            reader.at = end
            if reader.closed:
                return
            yield

    def _begins_with_a_mark(self) -> Steps[bool]:
        yield from self._reader.space()
        for marker in self._format.markers:
            if (yield from self._reader.next_is(marker)):
                self._only_calls = True
                return True
        self._reader.unread()
        return False

    def _calls(self, grammar: Grammar, marker: str = "") -> Steps[None]:
        try:
            yield from grammar(self._reader, marker, self._offered)
        except Malformed:
            recovered = yield from self._reader.rest_of_call(self._sought)
            if not recovered and grammar is bare_calls:
                self._reader.unread()  # a marker may begin there
        self._reader.over()
        self._content(self._reader.held())

    def _of_call(self, name: str | None, arguments: str) -> None:
        call_id = None
        if name is not None:
            self._num_calls += 1
            call_id = self._reader.call_id
        self._deltas.append(Delta(index=self._num_calls - 1, name=name, call_id=call_id, arguments=arguments))

    def _content(self, text: str) -> None:
        """Add content. White space waits for the text after it."""
        if self._only_calls:
            return
        trimmed = text.rstrip()
        if trimmed:
            self._deltas.append(Delta(content="".join([*self._space, trimmed])))
            self._space = []
        if len(trimmed) < len(text):
            self._space.append(text[len(trimmed) :])


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Join adjacent pieces of content, or of one call."""
    joined: list[Delta] = []
    # Names are not joined. Neighbours with equal numbers belong to one call.
    for (index, name), group in itertools.groupby(deltas, lambda delta: (delta.index, delta.name)):
        pieces = list(group)
        content = "".join(piece.content for piece in pieces)
        arguments = "".join(piece.arguments for piece in pieces)
        first = pieces[0]
        joined.append(Delta(content=content, index=index, name=name, call_id=first.call_id, arguments=arguments))
    return joined


_FORMATS = {
    known.name: known
    for known in (
        ToolFormat(name="hermes", markers=("<tool_call>",), grammar=tool_formats.hermes),
        ToolFormat(name="granite", markers=("<|tool_call|>", "<tool_call>"), grammar=tool_formats.hermes),
        ToolFormat(name="llama3_json", markers=("<|python_tag|>",), grammar=tool_formats.llama3_json),
        ToolFormat(name="mistral", markers=("[TOOL_CALLS]",), grammar=tool_formats.mistral),
        ToolFormat(
            name="deepseek_v3",
            markers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            grammar=tool_formats.deepseek_v3,
        ),
        ToolFormat(
            name="kimi_k2",
            markers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            grammar=tool_formats.kimi_k2,
        ),
        ToolFormat(name="qwen3_coder", markers=("<tool_call>", "<function="), grammar=tool_formats.qwen3_coder),
        ToolFormat(name="glm45", markers=("<tool_call>",), grammar=tool_formats.glm45),
        ToolFormat(name="lfm2", markers=("<|tool_call_start|>",), grammar=tool_formats.lfm2),
        ToolFormat(
            name="cohere",
            markers=("<|START_ACTION|>",),
            grammar=tool_formats.cohere,
            wrappers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    )
}
_ALIASES = {"deepseek_v31": "deepseek_v3", "qwen3_xml": "qwen3_coder", "glm47": "glm45"}
NAMES = (*_FORMATS, *_ALIASES)
"""Names of formats, for ``parser_for``."""

_SIGNS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    # Formats whose templates also have the signs of another one come first.
    (("<|channel|>",), None),  # server.harmony
    (("｜DSML｜",), None),
    (("<｜tool▁call▁begin｜>",), "deepseek_v3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<arg_key>", "<arg_value>"), "glm45"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|START_ACTION|>",), "cohere"),
    (("<|tool_call_start|>",), "lfm2"),
    # Some templates of LFM2 have only this list of tools, and no form of calls.
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
)
"""Parts of templates, and the formats that they indicate; None for formats not read here."""
_ARCHITECTURES = {
    **dict.fromkeys(("Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Qwen3Next", "SmolLM3"), "hermes"),
    **dict.fromkeys(("Qwen3_5", "Qwen3_5Moe"), "qwen3_coder"),
    **dict.fromkeys(("Mistral", "Mixtral"), "mistral"),
    "DeepseekV3": "deepseek_v3",
    "Glm4MoeLite": "glm45",
    "GraniteMoeHybrid": "hermes",
    "Granite": "granite",
    **dict.fromkeys(("Lfm2", "Lfm2Moe"), "lfm2"),
    "Cohere2": "cohere",
}
"""``LlamaForCausalLM`` is missing, since models of all families use it."""


def parser_for(
    model_config: Mapping[str, Any], chat_template: str | None, name: str | None = None
) -> ToolFormat | None:
    """Return the format of a model's tool calls; None if it is unknown or not read here.

    It is the one called ``name``, or else the one with markers in the chat template, or else that
    of the architecture in config.json. Raise ``InvalidArgument`` for an unknown name.
    """
    if name is not None:
        if (known := _FORMATS.get(_ALIASES.get(name, name))) is None:
            raise InvalidArgument(f"tool call format is {name!r}; expected one of {', '.join(NAMES)}")
        return known
    for signs, meant in _SIGNS:
        if chat_template is not None and all(sign in chat_template for sign in signs):
            return None if meant is None else _FORMATS[meant]
    names = model_config.get("architectures")
    for architecture in names if isinstance(names, (list, tuple)) else ():
        if (meant := _ARCHITECTURES.get(str(architecture).removesuffix("ForCausalLM"))) is not None:
            return _FORMATS[meant]
    return None


def schema_for(tools: Tools, choice: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema that makes a model call tools.

    For ``"required"`` it is an array of calls ``{"name": ..., "parameters": {...}}``, for
    ``{"type": "function", "function": {"name": ...}}`` the arguments of that function. Raise
    ``InvalidArgument`` for another choice, an unknown function, and tools that cannot be forced.
    """
    functions = functions_of(tools)
    if choice != "required":
        function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            allowed = '"required" or {"type": "function", "function": {"name": ...}}'
            raise InvalidArgument(field="tool_choice", given=choice, allowed=allowed)
        if name not in functions:
            known = ", ".join(functions)
            raise InvalidArgument(f"tool_choice names {name!r}; the tools are {known}", field="tool_choice")
        return functions[name]
    call = call_schema(functions)
    return {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}


def call_schema(
    functions: Mapping[str, Mapping[str, Any]], name_key: str = "name", arguments_key: str = "parameters"
) -> dict[str, Any]:
    """Return the JSON schema of an object that describes a call of one of ``functions_of``."""
    definitions = {str(index): schema for index, schema in enumerate(json.loads(json.dumps([*functions.values()])))}
    for index, schema in definitions.items():
        point(schema, f"#/$defs/{index}")
    calls = [
        {
            "type": "object",
            "properties": {name_key: {"const": name}, arguments_key: {"$ref": f"#/$defs/{index}"}},
            "required": [name_key, arguments_key],
            "additionalProperties": False,
        }
        for index, name in enumerate(functions)
    ]
    return {"anyOf": calls, "$defs": definitions}


def forced_format(choice: str | Mapping[str, Any]) -> ToolFormat:
    """Return the format of texts under ``schema_for``, which has checked the choice."""
    if isinstance(choice, str):
        return ToolFormat(name=choice, markers=(), grammar=tool_formats.array_of_calls, only_calls=True)
    grammar = tool_formats.one_object(choice["function"]["name"])
    return ToolFormat(name="named", markers=(), grammar=grammar, only_calls=True)


def functions_of(tools: Tools) -> dict[str, dict[str, Any]]:
    """Return the schema of each tool's arguments, by name. Raise ``InvalidArgument`` for tools that
    cannot be forced."""
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        name, schema, place = tool["function"]["name"], tool["function"].get("parameters"), f"tools.{index}.function"
        if not _NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits, dots, dashes and underscores"
            raise InvalidArgument(field=f"{place}.name", given=name, allowed=allowed)
        if name in functions:
            message = f"{place}.name is {name!r}, as that of another tool; expected each once"
            raise InvalidArgument(message, field=f"{place}.name")
        if schema and schema.get("type", "object") != "object":
            raise InvalidArgument(field=f"{place}.parameters.type", given=schema["type"], allowed="'object'")
        functions[name] = {"type": "object", **schema} if schema else {"type": "object", "properties": {}}
    if not functions:
        raise InvalidArgument("tools is empty; expected at least one tool to call", field="tools")
    return functions
