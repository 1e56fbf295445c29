"""The tools that an answer may call, those that it must, and the form of a text that is calls or
an answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire.base.sampling_params import StructuredOutputs
from quire.server.http.context import Context
from quire.server.http.errors import bad_field, naming
from quire.server.openai.generation import form_of
from quire.server.openai.protocol import ChatRequest
from quire.server.tools.call_grammars import calls_or_answer, forced_calls
from quire.server.tools.harmony import is_harmony
from quire.server.tools.tools import ToolFormat, forced_format, functions_of, parser_for, schema_for
from quire.text.chat_rendering import select_template


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolChoice:
    """The functions that may be called, and those that must be."""

    given: list[dict[str, Any]] | None
    """The tools for the template; None without any. Where none may be called, the prompt has them
    all the same: so it begins as those where they may be."""
    may_call: bool
    forced: str | Mapping[str, Any] | None
    """ "required", or the choice of one function."""
    schema: Mapping[str, Any] | None
    """The JSON schema that forces calls where it is not known how the model writes them."""
    one_call: bool
    answer: StructuredOutputs | None = None
    """The form of an answer without calls, where there may be both."""
    allowed: Collection[str] | None = None
    """Names of the tools that may be called, and that the template sees, of those given; None: all.
    If calls are forced, their schema says that, and the prompt stays as it is for all tools."""

    forced_names: Collection[str] | None = None
    """Names of the tools that are forced, if calls are; None: all."""

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """Return the tools that may be called; None: none may."""
        return _those(self.given, self.allowed) if self.given is not None and self.may_call else None

    @property
    def shown(self) -> list[dict[str, Any]] | None:
        """Return the tools that the template writes; None without any."""
        return None if self.given is None else _those(self.given, self.allowed)

    @classmethod
    def of(cls, body: ChatRequest, tools: list[dict[str, Any]]) -> ToolChoice:
        choice: Any = body.tool_choice if body.tool_choice is not None else ("auto" if body.tools else "none")
        if choice not in ("none", "auto", "required") and not isinstance(choice, dict):
            raise bad_field("tool_choice", f"tool_choice must be {_CHOICES}, got {choice!r:.80}")
        allowed: Collection[str] | None = None
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice, allowed = _allowed_tools(choice, tools)
        # An empty list of tools is what programs send whose tools are all switched off.
        if not body.tools and choice != "none" and (body.tools is None or choice != "auto"):
            raise bad_field("tool_choice", "tool_choice needs tools; give some")
        one_call = body.parallel_tool_calls is False
        if not tools:
            return cls(given=None, may_call=False, forced=None, schema=None, one_call=False)
        with naming({}, "tools"):
            functions_of(tools)
            schema = schema_for(_those(tools, allowed), "required")
        forced = None if choice in ("none", "auto") else choice
        if isinstance(forced, dict):
            with naming({}, "tool_choice"):
                schema = schema_for(tools, forced)
        elif one_call:
            schema |= {"maxItems": 1}
        return cls(
            given=tools,
            may_call=choice != "none",
            forced=forced,
            schema=None if forced is None else schema,
            one_call=one_call,
            answer=form_of(body.response_format) if choice == "auto" else None,
            allowed=allowed if choice == "auto" else None,
            forced_names={forced["function"]["name"]} if isinstance(forced, dict) else allowed,
        )


_CHOICES = (
    '"none", "auto", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}]}}'
)


def _allowed_tools(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> tuple[str, Collection[str]]:
    """Return the mode and the names of a choice among some of the tools."""
    match choice.get("allowed_tools"):
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as listed}:
            known, names = [tool["function"]["name"] for tool in tools], []
            for tool in listed:
                match tool:
                    case {"type": "function", "function": {"name": str(name)}} if name in known:
                        names.append(name)
                    case _:
                        raise bad_field(
                            "tool_choice",
                            f"tool_choice allows {tool!r:.80}; the tools are {', '.join(known) or 'none'}, each allowed by "
                            '{"type": "function", "function": {"name": ...}}',
                        )
            return mode, frozenset(names)
    raise bad_field("tool_choice", f"tool_choice must be {_CHOICES}, got {dict(choice)!r:.80}")


def _those(tools: list[dict[str, Any]], allowed: Collection[str] | None) -> list[dict[str, Any]]:
    return tools if allowed is None else [tool for tool in tools if tool["function"]["name"] in allowed]


def forced_form(context: Context, template: str, tools: ToolChoice) -> tuple[StructuredOutputs, ToolFormat | None]:
    """Return the form of calls that are forced, and the format by which they are read, None for
    harmony. They are those of the model's family, or JSON where that is unknown or cannot hold the
    schemas of the tools."""
    named = context.settings.tool_call_parser
    assert tools.given is not None
    assert tools.forced is not None
    harmony = is_harmony(template, named)
    known = None if harmony else parser_for(context.llm.model.config, template, named)
    if harmony or known is not None:
        form = forced_calls(
            "harmony" if known is None else known.name,
            _those(tools.given, tools.forced_names),
            one_call=tools.one_call or isinstance(tools.forced, Mapping),
            special=_special_tokens(context),
        )
        if form is not None:
            return form, None if known is None else known.forced
    return StructuredOutputs(json=tools.schema), forced_format(tools.forced)


def _special_tokens(context: Context) -> Callable[[str], int | None]:
    """Return a function that returns the token of a mark that is a special token."""
    tokenizer = context.llm.tokenizer
    assert tokenizer is not None  # checked before
    special = tokenizer.token_bytes.special_ids
    return lambda mark: token if (token := tokenizer.token_id(mark)) in special else None


def calls_or_answer_form(context: Context, tools: ToolChoice, answer: StructuredOutputs) -> StructuredOutputs:
    tokenizer, named = context.llm.tokenizer, context.settings.tool_call_parser
    assert tokenizer is not None  # checked before
    with naming({}, "messages"):
        template = select_template(tokenizer.chat_templates, with_tools=True)
    format = None if is_harmony(template, named) else parser_for(context.llm.model.config, template, named)
    if format is None:
        raise bad_field(
            "response_format",
            "response_format cannot be given together with tools that this model may choose to call, since no grammar "
            'of its calls is known here; tool_choice "required", a named function and "none" work',
        )
    assert tools.offered is not None
    special = _special_tokens(context)
    return calls_or_answer(format.name, tools.offered, answer, one_call=tools.one_call, special=special)
