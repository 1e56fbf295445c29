"""Rules for the tests themselves: each can fail, says why it tolerates what it tolerates, and tries
the same examples again.
"""

from __future__ import annotations

import ast
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.conftest import TURNS
from tests.sources import forget_sources, text_of  # noqa: F401

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
TOLERANCES = {"abs", "rel", "atol", "rtol"}


def always_true(test: ast.expr) -> bool:
    """Whether an assertion holds whatever was computed, in one of its cases at least."""
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=[_, *_]):
            return True
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(map(always_true, values))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(map(always_true, values))
        case ast.IfExp(body=body, orelse=orelse):
            return always_true(body) or always_true(orelse)
    return False


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What is below a node, without the functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield child
            yield from own(child)


def faults(text: str) -> Iterator[str]:
    """What is wrong with the tests of a file, by line."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert) and always_true(node.test):
            yield f"{node.lineno}: the assertion cannot fail"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            for part in own(node):
                if isinstance(part, ast.If) and any(
                    block and isinstance(block[0], ast.Return) for block in (part.body, part.orelse)
                ):
                    yield f"{part.lineno}: {node.name} ends before it has checked anything; pytest.skip says why"
        if isinstance(node, ast.Call):
            said = any("#" in line for line in lines[max(0, node.lineno - 2) : node.end_lineno])
            for keyword in node.keywords:
                given = isinstance(keyword.value, ast.Constant) and keyword.value.value
                if keyword.arg in TOLERANCES and isinstance(given, float) and given and not said:
                    yield f"{keyword.value.lineno}: a comment must say why {keyword.arg} is {given}"
                if keyword.arg == "deadline" and given:
                    yield f"{keyword.value.lineno}: how long an example takes says how busy the machine is"


def test_rules_are_kept() -> None:
    found = {path.relative_to(TESTS).as_posix(): list(faults(text_of(path))) for path in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_examples_have_no_deadline() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None


@pytest.mark.product(2)
@pytest.mark.parametrize("second", "cd")
@pytest.mark.parametrize("first", "ab")
def test_of_a_product_one_case_of_n_is_quick(first: str, second: str, request: pytest.FixtureRequest) -> None:
    """Among the slow ones this tells that the others are slow."""
    slow = request.node.get_closest_marker("slow") is not None
    assert slow == ((first == "a") != (second == "c"))


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", "abc")
def test_of_kinds_that_take_turns_one_is_quick(kind: str, request: pytest.FixtureRequest) -> None:
    """The name of the test says which: among the slow ones this tells that the others are slow."""
    begin = zlib.crc32(b"test_of_kinds_that_take_turns_one_is_quick")
    assert (request.node.get_closest_marker("slow") is None) == ((begin + "abc".index(kind)) % 3 == 0)


@pytest.mark.turns(1)
@pytest.mark.parametrize("checkpoint", "ab")
def test_all_kinds_may_be_kept(checkpoint: str, request: pytest.FixtureRequest) -> None:
    assert "checkpoint" in TURNS
    assert request.node.get_closest_marker("slow") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("assert True", 1),
        ("assert (x == 1, 'one')", 1),
        ("assert x == 1 or True", 1),
        ("assert x == 1 if y else True", 1),
        ("assert x == y if z else 6", 1),
        ("assert x == (y if z else 6)", 0),
        ("assert x == 1 or y == 2", 0),
        ("def test_it():\n    if x:\n        return\n    assert y", 1),
        ("def test_it():\n    if x:\n        assert z\n        return\n    assert y", 0),
        ("def test_it():\n    def inner():\n        if x:\n            return\n    assert inner() is None", 0),
        ("assert x == approx(1, abs=1e-4)", 1),
        ("# rounding\nassert x == approx(1, abs=1e-4)", 0),
        ("assert x == approx(1, abs=0.0) == approx(1, abs=BOUND)", 0),
        ("settings(deadline=200)", 1),
        ("settings(deadline=None)", 0),
    ],
)
def test_the_rules_can_be_broken(text: str, found: int) -> None:
    assert len(list(faults(text))) == found
