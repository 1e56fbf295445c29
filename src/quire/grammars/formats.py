"""Requested formats to grammars in llguidance's words: text in, text out.

It imports only llguidance, and only where it is used, so that the child process of
``trial`` starts at once.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from quire.base.errors import InvalidArgument
from quire.base.sampling_params import StructuredOutputs
from quire.grammars.closed_objects import close_objects
from quire.grammars.schema_guard import guard, parsed, schema_at
from quire.grammars.schema_nodes import point

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

JSON_SPACE = r"[ \t]{1,8}|(\r?\n){1,2}[ \t]{0,40}"
"""White space between the tokens of JSON. Unbounded, a model might write nothing else."""

MASK_ITEMS = 50_000
"""Items of the parser for a mask or token: llguidance's limit. 5,000 would refuse objects of 400
optional properties, whose masks take 1 ms, and not help with ambiguous grammars, whose items take a
hundred times longer (``matcher``)."""

NO_TOKEN = "no token of the vocabulary continues the text"
"""The one reason for a matcher's end that is no limit."""

_WHOLE = '%llguidance {"no_forcing": true}\n'
_REST = "/(?s:.*)/"
_PARSING, _REASON = "regex parse error:", "error: "
_COSTLY = {
    "regex": ("{",),
    "grammar": ("&", "~", "{", "%"),
    "json": ('"multipleOf"', '"pattern', '"allOf"', '"not"', '"x-guidance"', "\\u"),
}
_LARK = re.compile(
    r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|%(?P<keyword>json|regex|llguidance)(?![a-z_])', re.DOTALL
)
"""Texts, comments and expressions of a grammar, and keywords that JSON follows."""
_SPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}
_TEMPERATURE = re.compile(r"^\s*\??\w+\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)


def field_of(wanted: StructuredOutputs) -> str:
    """Return the field that was given."""
    return next(iter(wanted.forms))


def length_of(wanted: StructuredOutputs) -> int:
    """Characters that were given."""
    value = getattr(wanted, field_of(wanted))
    return len(value) if isinstance(value, str) else sum(map(len, value)) if isinstance(value, tuple) else 0


def is_plain(wanted: StructuredOutputs) -> bool:
    r"""Return whether compiling takes no more than the length suggests.

    Some operations multiply: a repetition with a count by the count, and counts within each other
    by each other. An intersection, a complement or a multiple of a number needs the states of an
    automaton, up to 2 to the power of what was written. A hundred characters can take all memory,
    or hours. Without them, random texts of up to 2,000 characters took less than a second and 150
    MiB, also chains that double from rule to rule, since llguidance limits what these become.

    Signs are found anywhere in a text: a text that only quotes them is not plain either, which
    costs it no more than a trial. A JSON text with ``\u`` may spell a keyword that way.
    """
    name = field_of(wanted)
    return wanted.whitespace_pattern is None and not any(
        sign in str(getattr(wanted, name)) for sign in _COSTLY.get(name, ())
    )


def grammar_text(wanted: StructuredOutputs) -> str:
    """Return llguidance's grammar; ``InvalidArgument`` for what it would misunderstand."""
    main = {"name": "main", "lark_grammar": _WHOLE + _main(wanted)}
    return json.dumps({"grammars": [main, {"name": "text", **_body(wanted)}]}, ensure_ascii=False)


def compiled(wanted: StructuredOutputs, text: str, vocabulary: LLTokenizer) -> LLMatcher:
    """Return a matcher at the beginning of ``text``, the grammar of ``wanted``. ``InvalidArgument``
    with llguidance's words for an invalid one."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(
        vocabulary, text, log_level=0, limits=LLParserLimits(verbose_errors=False, step_max_items=MASK_ITEMS)
    )
    if matcher.is_error():
        # The grammar in which we put a pattern is nothing that the user knows.
        name = field_of(wanted)
        what = given(wanted) if name == "regex" else f"structured_outputs.{name}"
        reason = _plain(_sentence(matcher.get_error(), located=name != "regex"))
        raise InvalidArgument(f"{what} cannot be compiled: {reason}")
    return matcher


def reason_of(matcher: LLMatcher) -> str | None:
    """Return the reason for a matcher's end; None if it continues."""
    if not matcher.is_error():
        return None
    reason = matcher.get_error().split("\n<non-verbose/>")[0]
    return NO_TOKEN if reason == "NoExtensionBias" else reason


def given(wanted: StructuredOutputs) -> str:
    """Return the given grammar, as messages show it."""
    name = field_of(wanted)
    return f"structured_outputs.{name} {getattr(wanted, name)!r:.100}"


def mark(given: str | int) -> str:
    """Return a text, or a special token by its id, in a grammar."""
    return f"<[{given}]>" if isinstance(given, int) else json.dumps(given, ensure_ascii=False)


def up_to(rule: str, end: str | int) -> str:
    """Return a rule of any text up to the mark ``end`` and with it."""
    if isinstance(end, int):
        return f"{rule}: {_REST} {mark(end)}"
    return f"{rule}[suffix={mark(end)}]: {_REST}"


def _main(wanted: StructuredOutputs) -> str:
    """Return the rules of the whole text: that of the form, perhaps behind reasoning."""
    end, begin = wanted.reasoning_end, wanted.reasoning_begin
    if end is None:
        return "start: @text\n"
    first = "thought SPACE" if begin is None else f"({mark(begin)} thought SPACE)?"
    return f"start: {first} @text\n{up_to('thought', end)}\nSPACE: /[ \\t\\r\\n]{{0,8}}/\n"


def _body(wanted: StructuredOutputs) -> dict[str, object]:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.json is not None:
        return {"json_schema": json_schema(wanted)}
    if wanted.json_object:
        return {"json_schema": _spaced({"type": "object"}, wanted)}
    if wanted.regex is not None:
        quoted = json.loads(LLMatcher.grammar_from_regex(wanted.regex))
        return {"lark_grammar": quoted["grammars"][0]["lark_grammar"]}
    if wanted.choice is not None:
        # One terminal, a state of the lexer: a rule of thousands would be as many items of the
        # parser. DEL must be escaped in a string of a grammar, though not in JSON.
        literals = " | ".join(json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in wanted.choice)
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {literals}"}
    text = wanted.grammar or ""
    if _TEMPERATURE.search(text):
        raise InvalidArgument(
            "structured_outputs.grammar: temperature= of a rule is not supported; SamplingParams(temperature=...) holds for "
            "the whole text"
        )
    try:
        lark = any_to_lark(text)
    except MemoryError:
        raise
    except Exception as error:  # the converter raises bare Exception
        raise InvalidArgument(f"structured_outputs.grammar cannot be compiled: {error}") from error
    return {"lark_grammar": _with_guarded_schemas(lark)}


def _with_guarded_schemas(lark: str) -> str:
    """Return a grammar whose schemas behind ``%json`` are guarded. Their objects and white space
    stay as they are."""
    pieces, at = list[str](), 0
    while found := _LARK.search(lark, at):
        end = found.end()
        if found["keyword"] is None:
            pieces.append(lark[at:end])
        else:
            begin = end + len(lark[end:]) - len(lark[end:].lstrip())
            try:
                schema, end = schema_at(lark, begin)
            except ValueError:
                return lark  # llguidance says so
            pieces.append(lark[at:begin])
            if found["keyword"] == "json":
                try:
                    point(schema, "#")
                    guard(schema)
                except InvalidArgument as error:
                    why = str(error).removeprefix("structured_outputs.json: ")
                    raise InvalidArgument(f"structured_outputs.grammar: %json: {why}") from error
                pieces.append(json.dumps(schema, ensure_ascii=False))
            else:
                pieces.append(lark[begin:end])
        at = end
    return "".join([*pieces, lark[at:]])


def _sentence(error: str, *, located: bool) -> str:
    """Return llguidance's sentence without source lines; ``located``: with the place it names."""
    head, *lines = error.strip().split("\n")
    reason = next((line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)), None)
    if not located:
        return reason or head.rpartition("(in regex): ")[2]
    if reason is None:
        return head
    # A pattern within a schema comes without a place.
    return f"{head.removesuffix(_PARSING) or f'pattern {lines[0].strip()!r}: '}{reason}"


def _plain(reason: str) -> str:
    """Put it in words that help the grammar's author."""
    if reason.startswith("panic"):
        return f"it has too many rules, properties or items, make it smaller ({reason})"
    if reason.startswith("patternProperty regexes"):
        return f"parts that hold of one object together say different things of the names they do not list ({reason})"
    return reason.replace("Enable 'coerce_one_of' option", 'Set {"coerce_one_of": true} in the schema\'s x-guidance')


def json_schema(wanted: StructuredOutputs) -> object:
    """Return the schema as llguidance gets it."""
    schema = parsed(str(wanted.json))
    point(schema, "#")
    if wanted.disable_additional_properties:
        close_objects(schema)
    guard(schema)
    return _spaced(schema, wanted)


def _spaced(schema: object, wanted: StructuredOutputs) -> object:
    """Return a schema with the white space that is wanted, unless it has its own."""
    if schema is True:
        schema = {}
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict) or not isinstance(schema, dict) or options.keys() & _SPACE_OPTIONS:
        return schema
    space: dict[str, object] = {"whitespace_flexible": False}
    if wanted.whitespace_pattern is not None or not wanted.disable_any_whitespace:
        space = {"whitespace_pattern": wanted.whitespace_pattern or JSON_SPACE}
    return {**schema, "x-guidance": {**space, **options}}
