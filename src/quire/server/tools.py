"""Tool calls in the text of a model: which format it writes, the calls in a text, and the schema that forces them.

What holds for every format and every text:

- What a stream gives does not depend on how its text is cut.
- A call begins as soon as its name is known and its arguments have opened (where the name comes last, or the arguments are a
  string, when it is whole). From then on its arguments are given as they are written, and it stays a call, also if its text
  turns malformed or ends.
- Its arguments are valid JSON if the model wrote that. Strings in them are passed on as they are, with escapes that JSON does not
  know and with line breaks. If the call turns malformed before it is whole, its arguments get all of it, as it is written, up to
  the mark that ends it (in formats without one: up to the next marker, or the end), so that nobody takes them for whole. If the
  text ends, they are what was written of them.
- What is no call is content, unchanged: nothing that the model wrote is lost or doubled, but for what the format itself consists
  of, and nothing raises. The mark that ends a call is of the format, also if the call is malformed.
- A marker inside of a JSON string is no marker.
- White space after the last text is the format's if there are calls. All other white space is content.
- The time is linear in the length of the text.

No I/O, and nothing of HTTP.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.server import tool_formats
from quire.server.tool_formats import Offered, Schemas
from quire.server.tool_reader import Malformed, Reader, Steps, ToolCall, overlap

__all__ = [
    "StreamingToolParser",
    "ToolCall",
    "ToolDelta",
    "ToolFormat",
    "forced_format",
    "names_of",
    "parser_for",
    "schema_for",
]

Grammar = Callable[[Reader, str, Offered], Steps[None]]
"""Reads calls after a marker ("" where there is none)."""
Tools = Sequence[Mapping[str, Any]]
"""As OpenAI's API has them: ``{"type": "function", "function": {"name": str, "parameters": JSON schema, ...}}``."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("const", "enum", "default", "examples", "example")


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolDelta:
    """What a piece of text added: content, or something of the call with this ``index``."""

    content: str = ""
    index: int | None = None
    """Of the call, from 0; None for content."""
    name: str | None = None
    """Once for each call, in its first delta."""
    arguments: str = ""
    """A piece of them as they are written; "" in the first delta of a call."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """How a model writes calls."""

    name: str
    markers: tuple[str, ...]
    """What begins a call. Often these are special tokens: they must be in the text (``skip_special_tokens=False``)."""
    grammar: Grammar = field(repr=False)
    bare: bool = False
    """Whether a message may begin with a call that has no marker."""
    wrappers: tuple[str, ...] = ()
    """What stands around the text of an answer; it is no content."""

    def streaming(self, tools: Tools | None = None) -> StreamingToolParser:
        """Return a parser for one message.

        ``tools`` tells the types of parameters, for the formats that write values bare, and the
        names, for those whose calls look like an answer in JSON.
        """
        return StreamingToolParser(self, tools)

    @property
    def without_calls(self) -> ToolFormat | None:
        """For messages that call nothing: it only leaves out what stands around an answer. None if nothing does."""
        return replace(self, markers=(), bare=False) if self.wrappers else None


class StreamingToolParser:
    """The calls of one message, as its text arrives."""

    def __init__(self, format: ToolFormat, tools: Tools | None = None) -> None:
        self._format = format
        self._offered = Offered(None if tools is None else names_of(tools), _schemas(tools or ()))
        self._sought = (*format.markers, *format.wrappers)
        self._pattern = re.compile("|".join(map(re.escape, self._sought)) or "(?!)")
        self._reader = Reader(self._of_call)
        self._deltas: list[ToolDelta] = []
        self._num_calls = 0
        self._space: list[str] = []
        self._steps = self._run()

    def feed(self, text: str) -> list[ToolDelta]:
        """What ``text`` adds. ``FailedPrecondition`` after ``finish``."""
        if self._reader.closed:
            raise FailedPrecondition("this parser is finished; a message needs one of its own")
        self._reader.push(text)
        next(self._steps)
        return self._drain()

    def finish(self) -> list[ToolDelta]:
        """What was held back. ``FailedPrecondition`` if called twice."""
        if self._reader.closed:
            raise FailedPrecondition("this parser is finished; a message needs one of its own")
        self._reader.closed = True
        for _ in self._steps:
            raise AssertionError("a grammar waits for text after the end")
        if self._space and not self._num_calls:
            self._deltas.append(ToolDelta(content="".join(self._space)))
        return self._drain()

    def _run(self) -> Steps[None]:
        reader = self._reader
        if self._format.bare:
            yield from self._calls("")
        while True:
            reader.hold()
            if found := self._pattern.search(reader.text, reader.at):
                self._content(reader.text[reader.at : found.start()])
                reader.at = found.start()
                reader.hold()
                reader.at = found.end()
                if found.group() not in self._format.wrappers:
                    yield from self._calls(found.group())
                continue
            held = 0 if reader.closed else overlap(reader.text[reader.at :], self._sought)
            end = len(reader.text) - held
            self._content(reader.text[reader.at : end])
            reader.at = end
            if reader.closed:
                return
            yield

    def _calls(self, marker: str) -> Steps[None]:
        try:
            yield from self._format.grammar(self._reader, marker, self._offered)
        except Malformed:
            yield from self._reader.rest_of_call(self._sought)
        self._reader.over()
        self._content(self._reader.held())

    def _of_call(self, name: str | None, arguments: str) -> None:
        if name is not None:
            self._num_calls += 1
        self._deltas.append(ToolDelta(index=self._num_calls - 1, name=name, arguments=arguments))

    def _content(self, text: str) -> None:
        """White space waits for what follows it."""
        trimmed = text.rstrip()
        if trimmed:
            self._deltas.append(ToolDelta(content="".join([*self._space, trimmed])))
            self._space = []
        if len(trimmed) < len(text):
            self._space.append(text[len(trimmed) :])

    def _drain(self) -> list[ToolDelta]:
        """The new deltas: pieces of content, and of one call's arguments, that belong together in one."""
        drained: list[ToolDelta] = []
        # The names stand alone; numbers tell the calls apart, so equal neighbours are of one kind.
        for (index, name), group in itertools.groupby(self._deltas, lambda delta: (delta.index, delta.name)):
            deltas = list(group)
            content = "".join(delta.content for delta in deltas)
            arguments = "".join(delta.arguments for delta in deltas)
            drained.append(ToolDelta(content=content, index=index, name=name, arguments=arguments))
        self._deltas = []
        return drained


_FORMATS = {
    known.name: known
    for known in (
        ToolFormat(name="hermes", markers=("<tool_call>",), grammar=tool_formats.hermes),
        ToolFormat(name="granite", markers=("<|tool_call|>", "<tool_call>"), grammar=tool_formats.hermes),
        ToolFormat(name="llama3_json", markers=("<|python_tag|>",), grammar=tool_formats.llama3_json, bare=True),
        ToolFormat(name="mistral", markers=("[TOOL_CALLS]",), grammar=tool_formats.mistral),
        ToolFormat(
            name="deepseek_v3",
            markers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            grammar=tool_formats.deepseek_v3,
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
"""Of formats, for ``parser_for``."""
_REFUSED = ("harmony", "openai", "gpt_oss")

_SIGNS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    # What another format writes besides: these come first.
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
    # Some templates of LFM2 leave it to the model how it calls the tools of this list.
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_calls_section_begin|>",), None),
)
"""What a template holds, and the format that this means; None for formats that are not read here."""
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
"""``LlamaForCausalLM`` is missing: models of every kind have this architecture."""


def parser_for(
    model_config: Mapping[str, Any], chat_template: str | None, name: str | None = None
) -> ToolFormat | None:
    """The format in which a model writes tool calls: the one of this ``name``, or else the one whose markers are in the chat
    template, or else what models of the architecture (``architectures`` in config.json) write. None if nothing tells, or if it
    is a format that is not read here.

    ``InvalidArgument``: a name that does not exist. ``Unsupported``: the format of gpt-oss, which is no format of calls alone."""
    if name is not None:
        if name in _REFUSED:
            raise Unsupported(
                f"tool call format {name!r}: gpt-oss writes calls among its channels, which server.harmony reads; there are "
                f"{', '.join(_FORMATS)}"
            )
        if (known := _FORMATS.get(_ALIASES.get(name, name))) is None:
            raise InvalidArgument(f"tool call format is {name!r}; expected one of {', '.join(NAMES)}")
        return known
    for signs, meant in _SIGNS:
        if chat_template is not None and all(sign in chat_template for sign in signs):
            return None if meant is None else _FORMATS[meant]
    for architecture in architectures(model_config):
        if architecture in _ARCHITECTURES:
            return _FORMATS[_ARCHITECTURES[architecture]]
    return None


def architectures(model_config: Mapping[str, Any]) -> list[str]:
    """The names in config.json, without what they end with."""
    names = model_config.get("architectures")
    return [str(name).removesuffix("ForCausalLM") for name in names] if isinstance(names, (list, tuple)) else []


def schema_for(tools: Tools, choice: str | Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema that makes a model call tools: for ``"required"`` an array of calls
    ``{"name": ..., "parameters": {...}}``, for ``{"type": "function", "function": {"name": ...}}`` that function's arguments.

    ``InvalidArgument``: another choice, a function that is not among the tools, no tools or malformed ones."""
    functions = _functions(tools)
    if choice != "required":
        return functions[_chosen(choice, functions)]
    definitions = {str(index): _moved(schema, f"#/$defs/{index}") for index, schema in enumerate(functions.values())}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(functions)
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}


def forced_format(choice: str | Mapping[str, Any]) -> ToolFormat:
    """The format of a text that ``schema_for`` allows; for streams. ``InvalidArgument`` as there."""
    if choice == "required":
        return ToolFormat(name="required", markers=(), grammar=tool_formats.array_of_calls, bare=True)
    name = _chosen(choice, None)
    return ToolFormat(name="named", markers=(), grammar=tool_formats.one_object(name), bare=True)


def _chosen(choice: str | Mapping[str, Any], functions: Mapping[str, Any] | None) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        allowed = '"required" or {"type": "function", "function": {"name": ...}}'
        raise InvalidArgument(field="tool_choice", given=choice, allowed=allowed)
    if functions is not None and name not in functions:
        raise InvalidArgument(f"tool_choice names {name!r}; the tools are {', '.join(functions)}", field="tool_choice")
    return name


def _functions(tools: Tools) -> dict[str, dict[str, Any]]:
    """The schema of the arguments of each tool, by its name."""
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            allowed = '{"type": "function", "function": {...}}'
            raise InvalidArgument(field=f"tools.{index}", given=tool, allowed=allowed)
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits, dots, dashes and underscores"
            raise InvalidArgument(field=f"tools.{index}.function.name", given=name, allowed=allowed)
        if name in functions:
            field = f"tools.{index}.function.name"
            raise InvalidArgument(f"{field} is {name!r}, as that of another tool; expected each once", field=field)
        if schema is not None and not isinstance(schema, Mapping):
            raise InvalidArgument(field=f"tools.{index}.function.parameters", given=schema, allowed="a JSON schema")
        if schema and schema.get("type", "object") != "object":
            field = f"tools.{index}.function.parameters.type"
            raise InvalidArgument(field=field, given=schema["type"], allowed="'object'")
        functions[name] = {"type": "object", **schema} if schema else {"type": "object", "properties": {}}
    if not functions:
        raise InvalidArgument("tools is empty; expected at least one tool to call", field="tools")
    return functions


def names_of(tools: Tools) -> frozenset[str]:
    """The names of tools, as far as there are any; never raises."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return frozenset(str(function.get("name")) for function in functions if isinstance(function, Mapping))


def _schemas(tools: Tools) -> Schemas:
    """The schemas of parameters, as far as there are any; never raises."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        schema = function.get("parameters") if isinstance(function, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(function, Mapping) and isinstance(properties, Mapping):
            found[str(function.get("name"))] = properties
    return found


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold at another place of a document."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _SCHEMA_MAPS and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved
