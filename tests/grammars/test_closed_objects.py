"""Schemas with closed objects, against a naive validator: they allow no more than they did, and no
possible one becomes impossible.
"""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import InvalidArgument, StructuredOutputs
from quire.grammars.closed_objects import close_objects
from quire.grammars.formats import grammar_text

NAMES = ("a", "b", "c")
VALUES = [
    dict(zip(keys, values, strict=True))
    for count in range(4)
    for keys in itertools.combinations(NAMES, count)
    for values in itertools.product((1, {}, {"a": 1}, {"b": 1}), repeat=count)
]


def valid(schema: Any, value: Any, root: Any, depth: int = 0) -> bool:
    """Whether a value fits, by the definition of each keyword; a ``$ref`` in a circle fits none."""
    if not isinstance(schema, dict):
        return bool(schema)
    if depth > 30:
        return False

    def fits(part: Any, given: Any = value) -> bool:
        return valid(part, given, root, depth + 1)

    if "const" in schema and value != schema["const"]:
        return False
    if "$ref" in schema and not fits(root["$defs"][schema["$ref"].removeprefix("#/$defs/")]):
        return False
    if not all(map(fits, schema.get("allOf", ()))) or ("not" in schema and fits(schema["not"])):
        return False
    if "anyOf" in schema and not any(map(fits, schema["anyOf"])):
        return False
    if not isinstance(value, dict):
        return schema.get("type") != "object"
    named = schema.get("properties", {})
    rest = [item for name, item in value.items() if name not in named]
    return (
        set(schema.get("required", ())) <= value.keys()
        and len(value) >= schema.get("minProperties", 0)
        and all(fits(named[name], item) for name, item in value.items() if name in named)
        and all(fits(schema.get("additionalProperties", True), item) for item in rest)
    )


SUBSETS = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)
LEAVES = st.sampled_from([{"const": 1}, {"type": "object"}, True, {"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}])


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.lists(inner, min_size=1, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
            "required": SUBSETS,
            "minProperties": st.integers(0, 2),
            "additionalProperties": st.sampled_from([True, False, {"const": 1}]),
            "anyOf": parts,
            "allOf": parts,
            "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y"]),
        },
    )


SCHEMAS = st.recursive(LEAVES, combined, max_leaves=5)


@given(
    st.fixed_dictionaries({"$defs": st.fixed_dictionaries({"x": SCHEMAS, "y": SCHEMAS}), "allOf": st.tuples(SCHEMAS)})
)
def test_closing_takes_away_some_and_never_all(schema: dict[str, Any]) -> None:
    schema = json.loads(json.dumps(schema))
    closed = copy.deepcopy(schema)
    close_objects(closed)
    before = [value for value in VALUES if valid(schema, value, schema)]
    after = [value for value in VALUES if valid(closed, value, closed)]
    assert all(value in before for value in after)
    assert bool(after) == bool(before)
    again = copy.deepcopy(closed)
    close_objects(again)
    assert again == closed


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
ROWS: list[tuple[Any, Any]] = [
    (A, "closed"),
    ({"type": "object"}, "open"),
    ({**A, "additionalProperties": True}, "open"),
    ({**A, "unevaluatedProperties": True}, "open"),
    ({**A, "required": ["b"]}, "open"),
    ({**A, "minProperties": 2}, "open"),
    ({"patternProperties": {"^b": {}}}, "closed"),
    ({"properties": {"properties": {"type": "object"}}}, "closed"),
    ({"allOf": [A]}, "closed"),
    ({"allOf": [A, B]}, "open"),
    ({**A, "allOf": [B]}, "open"),
    ({"allOf": [A, {"description": "a"}]}, "closed"),
    ({**A, "$ref": "#/$defs/x", "$defs": {"x": B}}, "open"),
    ({"$ref": "#/$defs/x", "$defs": {"x": A}}, "closed"),
    ({"$ref": "#/$defs/a~1b/0", "$defs": {"a/b": [A]}}, "closed"),
    ({"anyOf": [A, B]}, "closed"),
    ({**A, "anyOf": [{"required": ["a"]}, {"title": "x"}]}, "closed"),
    ({**A, "anyOf": [{"required": ["c"]}, {"title": "x"}]}, "open"),
    ({"items": A}, "closed"),
    ({"default": A}, "open"),
    ({"not": A}, "open"),
    ({"if": A, "then": B}, "open"),
]


@pytest.mark.parametrize(("schema", "expected"), ROWS, ids=str)
def test_which_objects_are_closed(schema: Any, expected: str) -> None:
    found = copy.deepcopy(schema)
    close_objects(found)
    assert (found != schema) == (expected == "closed")
    if expected == "closed":
        assert '"additionalProperties": false' in json.dumps(found)


@pytest.mark.parametrize("schema", [True, 3, [], {"properties": 3, "required": 4, "allOf": {}, "$ref": 5}])
def test_what_is_no_schema_is_left_to_the_compiler(schema: Any) -> None:
    close_objects(schema)


def test_circles_and_depth() -> None:
    circle: Any = {"$ref": "#/$defs/x", "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#"}]}}}
    close_objects(circle)
    deep: Any = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    close_objects(deep)
    assert deep["properties"]["a"]["additionalProperties"] is False


def accepts(wanted: StructuredOutputs, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_text(wanted))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("options", "open_", "spaced"),
    [
        ({}, False, False),
        ({"disable_additional_properties": False}, True, False),
        ({"disable_any_whitespace": False}, False, True),
        ({"whitespace_pattern": " ?"}, False, True),
    ],
)
def test_options_of_json(options: dict[str, Any], open_: bool, spaced: bool) -> None:
    wanted = StructuredOutputs(json={"type": "object", "properties": {"a": {"const": 1}}}, **options)
    assert accepts(wanted, '{"a":1}')
    assert accepts(wanted, '{"a":1,"b":2}') == open_
    assert accepts(wanted, '{"a": 1}') == spaced
    anything = StructuredOutputs(json_object=True, **options)
    assert accepts(anything, '{"a":{"b":[1,2]}}')
    assert accepts(anything, '{"a": 1}') == spaced


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace"),
        ({"json": {}, "disable_additional_properties": None}, "disable_additional_properties"),
        ({"json": {}, "whitespace_pattern": ""}, "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": 3}, "whitespace_pattern"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
)
def test_options_are_checked(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        StructuredOutputs(**given)
    assert caught.value.field == f"structured_outputs.{field}"
