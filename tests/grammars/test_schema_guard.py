"""Schemas whose numbers, patterns and names llguidance gets wrong: what is generated is checked by
a naive validator that counts in decimals, and what cannot be held to is refused by name.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from datetime import date
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from typing import Any

import llguidance
import pytest

from quire import InvalidArgument, StructuredOutputs
from quire.grammars import schema_guard
from quire.grammars.formats import grammar_text

BYTES = llguidance.LLTokenizer("byte")
END = 1 << BYTES.eos_token
TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; 1 is 1.0, and not true."""
    if is_number(one) and is_number(other):
        return Fraction(one) == Fraction(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return bool(one == other)


def valid(schema: Any, value: Any, root: Any) -> bool:
    """Whether a value fits, by the definition of each keyword."""
    if not isinstance(schema, dict):
        return bool(schema)

    def fits(part: Any, given: Any = value) -> bool:
        return valid(part, given, root)

    kinds = schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    checks = [
        not kinds
        or any(
            is_number(value) and (kind == "number" or Fraction(value).denominator == 1)
            if kind in ("number", "integer")
            else type(value) is TYPES[kind]
            for kind in kinds
        ),
        "const" not in schema or same(value, schema["const"]),
        "enum" not in schema or any(same(value, one) for one in schema["enum"]),
        all(map(fits, schema.get("allOf", ()))),
        "anyOf" not in schema or any(map(fits, schema["anyOf"])),
        "oneOf" not in schema or sum(map(fits, schema["oneOf"])) == 1,
        "$ref" not in schema or fits(root["$defs"][schema["$ref"].removeprefix("#/$defs/")]),
    ]
    if is_number(value):
        number = Fraction(value)
        checks += [
            number >= Fraction(schema.get("minimum", number)),
            number <= Fraction(schema.get("maximum", number)),
            "exclusiveMinimum" not in schema or number > Fraction(schema["exclusiveMinimum"]),
            "exclusiveMaximum" not in schema or number < Fraction(schema["exclusiveMaximum"]),
            "multipleOf" not in schema or (number / Fraction(schema["multipleOf"])).denominator == 1,
        ]
    elif isinstance(value, str):
        checks += [
            schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)),
            "pattern" not in schema or re.search(schema["pattern"], value, re.ASCII) is not None,
            schema.get("format") != "date" or is_date(value),
        ]
    elif isinstance(value, list):
        first = schema.get("prefixItems", [])
        checks += [
            schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)),
            all(map(fits, first, value)),
            all(fits(schema.get("items", True), item) for item in value[len(first) :]),
        ]
    elif isinstance(value, dict):
        checks += [
            schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", len(value)),
            set(schema.get("required", ())) <= value.keys(),
        ]
        for name, item in value.items():
            parts = [schema["properties"][name]] if name in schema.get("properties", ()) else []
            parts += [part for key, part in schema.get("patternProperties", {}).items() if re.search(key, name)]
            checks += [fits(part, item) for part in parts or [schema.get("additionalProperties", True)]]
    return all(checks)


def is_date(text: str) -> bool:
    year, month, day = map(int, text.split("-"))
    date(year or 2000, month, day)  # raises for a day that there is not
    return True


def parsed(text: str) -> Any:
    with localcontext(Context(prec=500)):
        return json.loads(text, parse_float=Decimal)


def texts(matcher: Any, seed: int, count: int) -> Iterator[str]:
    """Yield what random walks end with. They like escapes, digits and ends."""
    draw = random.Random(seed)
    for _ in range(count):
        walk, text = matcher.deep_copy(), bytearray()
        while len(text) < 60:
            mask = int.from_bytes(walk.compute_bitmask(), "little")
            allowed = [byte for byte in range(256) if mask >> byte & 1]
            if mask & END and (not allowed or draw.random() < 0.4):
                yield text.decode()
                break
            if not allowed:
                break
            liked = [byte for byte in allowed if byte in (b'"}],:' if len(text) > 30 else b'"\\}]:,.u05b')]
            # An exponent of many digits would take a validator all its memory.
            rest = [byte for byte in allowed if byte not in b"eE"] or allowed
            byte = draw.choice(liked if liked and draw.random() < 0.5 else rest)
            text.append(byte)
            assert walk.consume_token(byte)


def matcher_of(schema: Any, **options: Any) -> Any:
    matcher = llguidance.LLMatcher(BYTES, grammar_text(StructuredOutputs(json=schema, **options)), log_level=0)
    if matcher.is_error():
        raise InvalidArgument(matcher.get_error())
    return matcher


def check(schema: Any, seed: int, count: int, **options: Any) -> int:
    """Check what is generated for a schema, and return how many texts that was."""
    written, found = parsed(json.dumps(schema)), 0
    for text in texts(matcher_of(schema, **options), seed, count):
        assert valid(written, parsed(text), written), (schema, text)
        found += 1
    return found


# -- what is generated is valid --------------------------------------------------------------------

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMAS: list[Any] = [
    *({"type": "number", "exclusiveMinimum": low, "maximum": high} for low, high in ((0, 0.5), (1, 1.1), (10, 10.001))),
    *({"type": "number", "minimum": low, "exclusiveMaximum": high} for low, high in ((-0.5, 0), (-1.01, -1))),
    {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "number", "maximum": 0.5}]},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.1234567890123456},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
    {"type": "integer", "exclusiveMinimum": 2**60, "maximum": 2**60 + 2000},
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": "number", "minimum": -(2**53) - 10**12 - 1, "exclusiveMaximum": -(2**53) - 1},
    {"type": "number", "minimum": 0.12345678901234561, "maximum": 0.1234567890123471},
    {"type": "number", "minimum": 1e-30, "maximum": 1e-21},
    *({"type": "string", "pattern": pattern} for pattern in (r"^[^\\]{1,4}$", r"^[^\\/:*]{1,4}$", r'^[^"]{1,4}$')),
    *({"type": "string", "pattern": pattern} for pattern in (r"^[\x00-\x1f]{1,3}$", r"^(?:[\x00-\x0f]|[\x10-\x1f])$")),
    {"type": "string", "pattern": r"^[^\\]+$", "minLength": 2, "maxLength": 3},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date", "pattern": "^200.-02"},
    {**OBJECT, "additionalProperties": True},
    {**OBJECT, "required": ["a", "b"], "additionalProperties": {"type": "string"}},
    {"allOf": [{**OBJECT, "additionalProperties": True}, {"additionalProperties": {"type": "integer", "minimum": 5}}]},
    {"type": "object", "additionalProperties": {"const": 1}, "minProperties": 1},
    {"const": [2**53, -(2**60), {"é": '\0"'}]},
    {"enum": [123456.789012345, 1e22, 1e-22, -0.0]},
]
CLOSED: list[Any] = [
    {"oneOf": [{**OBJECT, "required": ["a"]}, {"type": "object", "properties": {"b": {}}, "required": ["b"]}]},
    {"type": "object", "patternProperties": {r'^[^"\\]$': {"const": 1}}},
]
"""These are refused if they are open."""


@pytest.mark.turns(3)
@pytest.mark.parametrize("schema", [*SCHEMAS, *CLOSED], ids=str)
def test_texts_are_valid(schema: Any) -> None:
    assert check(schema, 1, 40) > 4
    if schema in CLOSED:
        with pytest.raises(InvalidArgument):
            check(schema, 1, 1, disable_additional_properties=False)
    else:
        assert check(schema, 2, 40, disable_additional_properties=False) > 4


NUMBERS = [0, 1, -1, 2, 10, 0.5, 1.5, -0.5, -1.01, 10.001, 1e-7, 123456789.1234567, 2**53 + 1, -(2**53) - 3, 10**18]
KEYS = ["a", "b", "ab", 'a"', "é", "\\", "\n", "a/b"]
PATTERNS = [
    r"^[^\\]{1,3}$",
    r'^[^"]{0,2}$',
    r"^[\x00-\x1f]{1,2}$",
    r"^[^a]{1,2}$",
    "a",
    "^[ab]*$",
    r"^\d+$",
    "^.{1,2}$",
]


def some_value(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if kind < 0.4 or depth == 0:
        return draw.choice([*NUMBERS, "a", '"\\', "\n", None, True, ""])
    if kind < 0.7:
        return [some_value(draw, depth - 1) for _ in range(draw.randint(0, 2))]
    return {name: some_value(draw, depth - 1) for name in draw.sample(KEYS, draw.randint(0, 2))}


def some_schema(draw: random.Random, depth: int) -> Any:
    def part() -> Any:
        return some_schema(draw, depth - 1)

    def often(share: float, **words: Any) -> dict[str, Any]:
        return {word: make() for word, make in words.items() if draw.random() < share}

    def few() -> int:
        return draw.randint(0, 3)

    kind = draw.random() * (0.55 if depth == 0 else 1)
    if kind < 0.25:
        bounds = dict.fromkeys(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), lambda: draw.choice(NUMBERS)
        )
        return {
            "type": draw.choice(["number", "integer", ["number", "null"]]),
            **often(0.4, **bounds),
            **often(0.2, multipleOf=lambda: draw.choice([1, 3, 0.5, 0.1, 0.25])),
        }
    if kind < 0.35:
        return {"enum": [some_value(draw, 2) for _ in range(2)]}
    if kind < 0.5:
        return {"type": "string", **often(0.5, pattern=lambda: draw.choice(PATTERNS), minLength=few, maxLength=few)}
    if kind < 0.55:
        return draw.choice([True, {}, {"type": "boolean"}, {"type": "string", "format": "date"}])
    if kind < 0.65:
        return {"type": "array", **often(0.4, items=part, prefixItems=lambda: [part()], minItems=few, maxItems=few)}
    if kind < 0.9:
        return {
            "type": "object",
            **often(0.8, properties=lambda: {name: part() for name in draw.sample(KEYS, 2)}),
            **often(0.5, required=lambda: draw.sample(KEYS, draw.randint(0, 2))),
            **often(0.5, additionalProperties=lambda: draw.choice([True, False, part()])),
            **often(0.2, patternProperties=lambda: {draw.choice(["^a", "^[^a]$", "b$"]): part()}),
            **often(0.2, minProperties=few, maxProperties=few),
        }
    return {draw.choice(["allOf", "anyOf", "oneOf"]): [part(), part()]}


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_texts_of_random_schemas_are_valid(seed: int) -> None:
    draw, finished = random.Random(seed), 0
    for number in range(50):
        schema = some_schema(draw, 2)
        try:
            finished += check(schema, number, 10, disable_additional_properties=draw.random() < 0.5)
        except InvalidArgument:
            continue  # refused
    assert finished > 100


def guarded_twice(schema: Any) -> tuple[Any, Any]:
    first = schema_guard.parsed(json.dumps(schema))
    schema_guard.guard(first)
    second = schema_guard.parsed(json.dumps(first))
    schema_guard.guard(second)
    return first, second


def test_a_guarded_schema_stays_as_it_is() -> None:
    for schema in SCHEMAS:
        first, second = guarded_twice(schema)
        assert first == second
    draw, kept = random.Random(5), 0
    for _ in range(200):
        try:
            first, second = guarded_twice(some_schema(draw, 2))
        except InvalidArgument:
            continue
        assert first == second
        kept += 1
    assert kept > 50


# -- schemas in grammars ---------------------------------------------------------------------------


def lark(text: str) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(BYTES, grammar_text(StructuredOutputs(grammar=text)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("start: ", ""),
        ('start: "" ', " // %json {\n"),
        ('# " %json\nstart: ""', ""),
        ("start: inner\ninner: ", ""),
        ("start: a ", '\na: ""\nb: /%json/'),
        ('%llguidance {"no_forcing": true}\nstart: ', ' ""'),
    ],
)
def test_schemas_in_grammars_are_guarded(before: str, behind: str) -> None:
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    for space in ("", " ", "\n "):
        text = f"{before}%json{space}{json.dumps(schema)}{behind}"
        for written, held in (("0.5", True), ("0.0", False), ("0", False)):
            matcher, data = lark(text), list(written.encode())
            assert (matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()) == held
        with pytest.raises(
            InvalidArgument, match=r"^structured_outputs.grammar: %json: /const: the number 9007199254740993"
        ):
            lark(text.replace(json.dumps(schema), '{"const": 9007199254740993}'))


def test_what_only_looks_like_a_schema_stays() -> None:
    text = 'start: "%json {" /%json \\{\\/"/ "a" // %json {"const": 1e999}\n# %json {"const": 1e999}\n'
    written = '%json {%json {/"a'
    matcher = lark(text)
    assert matcher.try_consume_tokens(list(written.encode())) == len(written)
    with pytest.raises(InvalidArgument, match="const: the number 1e999"):
        lark(text + 'a: %json {"const": 1e999}')


# -- no more is left out than is said --------------------------------------------------------------


def fits(schema: Any, text: str) -> bool:
    matcher, data = matcher_of(schema), list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.000000000000001"], ["0", "0.0", "0.51"]),
        ({"type": "number", "exclusiveMinimum": -1, "maximum": 2}, ["-0.99", "0", "2"], ["-1", "-1.0", "2.1"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.9", "0.99"], ["0", "1", "1.0"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
        ({"type": "integer", "exclusiveMinimum": True, "minimum": 0}, ["1", "10"], ["0"]),
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            ["-9223372036854774784", "9223372036854774784", "1234567890123456789"],
            ["-9223372036854775809", "9223372036854775808"],
        ),
        ({"type": "string", "pattern": r"^[^\\]{1,4}$"}, ['"a/b"', '"\\"\\n\\u0001"'], ['"\\\\"', '"a\\\\b"']),
        ({"type": "string", "pattern": r'^[^"]+$'}, ['"\\\\"'], ['"\\""']),
        ({"type": "string", "pattern": r"^[\x00-\x1f]+$"}, ['"\\n\\u0001"'], ['"\\""', '"\\\\"']),
        ({"type": "string", "pattern": r"^[[:alpha:]][^\]\[]$"}, ['"ab"'], ['"a]"']),
        ({"type": "string", "format": "date"}, ['"2000-02-29"', '"2024-02-29"'], ['"1900-02-29"', '"2023-02-29"']),
        ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"', '"12:00:60Z"']),
        (
            {"type": "string", "format": "date-time", "pattern": "Z$"},
            ['"2024-02-29T00:00:00.5Z"'],
            ['"2023-02-29T00:00:00Z"', '"2024-02-29T00:00:00+00:00"'],
        ),
        ({**OBJECT, "additionalProperties": True}, ['{"a":1,"b":"x"}', '{"\\n":{}}'], ['{"a":"x"}', '{"\\u0061":"x"}']),
        (
            {**OBJECT, "additionalProperties": {"const": 2}},
            ['{"a":1}', '{"aa":2}', '{"":2,"b":2}'],
            ['{"a":"x"}', '{"aa":1}', '{"\\u0061":2}'],
        ),
        ({"type": "object", "required": ["a"], "additionalProperties": {"const": 2}}, ['{"a":2,"b":2}'], ["{}"]),
    ],
    ids=str,
)
def test_what_fits(schema: Any, inside: list[str], outside: list[str]) -> None:
    assert [text for text in inside if not fits(schema, text)] == []
    assert [text for text in outside if fits(schema, text)] == []


# -- refused by name -------------------------------------------------------------------------------

BIG = 2**53 + 1


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"const": BIG}, "/const: the number 9007199254740993 cannot be told"),
        ({"properties": {"a": {"enum": [1, BIG]}}}, "/properties/a/enum/1: the number 9007199254740993"),
        ({"const": [{"a/b": 12345678901234567890}]}, "/const/0/a~1b: the number 12345678901234567890"),
        ({"const": 123456789.12345679}, "/const: the number 123456789.12345679"),
        ({"const": 5e-324}, "/const: the number 5e-324"),
        ('{"const": 1e999}', "/const: the number 1e999 is beyond what a float holds"),
        ('{"maximum": 1e-9999999999999999999}', "is beyond what a float holds"),
        ({"type": "integer", "minimum": BIG, "maximum": BIG}, "no number between its bounds can be told"),
        ({"type": "number", "minimum": 0.12345678901234561, "maximum": 0.12345678901234565}, "no number between"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "the multipleOf of its parts"),
        ({"multipleOf": 0.01, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 99999999}}}, "the multipleOf of its"),
        ({"type": "string", "pattern": "[a-z&&[^b]]"}, r"the class \[a-z&&\[\^b\] of its pattern means different"),
        ({"type": "string", "pattern": "[+--]"}, "means different things"),
        ({"type": "string", "pattern": r"\x00"}, "asks for the character NUL"),
        ({"additionalProperties": {"type": "boolean"}, "minProperties": 2}, "minProperties is 2, but a name"),
        ({"patternProperties": {"^[ab]$": {}}, "required": ["a"], "minProperties": 3}, "minProperties is 3"),
        ({"patternProperties": {"^x-": {}}, "additionalProperties": {"type": "string"}}, "beside patternProperties"),
        ({"properties": {"x" * 2000: {}}, "additionalProperties": {"type": "string"}}, "too many to tell other names"),
        (
            {"oneOf": [{**OBJECT, "required": ["a"]}, {"type": "object", "properties": {"b": {}}}]},
            "oneOf constraints are not supported",  # both fit {"a": 1}
        ),
    ],
    ids=str,
)
def test_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        matcher_of(schema)
