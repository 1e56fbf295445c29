"""JSON schemas whose objects have no members but those that they name.

A schema that does not speak of ``additionalProperties`` allows any, and weak models keep inventing
some. So such objects are closed, but for those that this would make impossible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from quire.grammars.schema_nodes import schemas

_CONDITIONS = ("not", "if", "then", "else")
_SAID = ("additionalProperties", "unevaluatedProperties")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref")
_NAMING = ("properties", "patternProperties")
_NEEDING = ("required", "minProperties")


def close_objects(schema: object) -> None:
    """Close the objects of a parsed schema, in place, that name properties and do not say whether
    there may be others. Left open are parts of a combination that name properties each (``allOf``,
    ``$ref`` beside ``properties``), conditions, objects that need more than they name, and
    alternatives of ``oneOf`` of which more than one could hold of the same object."""
    nodes = [node for _, node in schemas(schema)]
    kept_open: set[int] = set()
    for node in nodes:
        for part in _conditions(node):
            _leave(part, schema, kept_open)
        groups = _groups(node, schema)
        if len(groups) > 1:
            known = {name for part in reached(node, schema) for name in _named(part)}
            if sum(any(_speaks(part, known, schema) for part in group) for group in groups) > 1:
                _leave(node, schema, kept_open)
        options = [_target(one, schema) or one for one in _listed(node, "oneOf") if isinstance(one, dict)]
        if not all(_apart(one, other) for one, other in itertools.permutations(options, 2)):
            for option in options:
                _leave(option, schema, kept_open)
    for node in nodes:
        named = any(word in node for word in _NAMING)
        if named and id(node) not in kept_open and not any(word in node for word in _SAID) and _suffices(node):
            node["additionalProperties"] = False


def _apart(one: object, other: object) -> bool:
    """Return whether no value of ``one``, once it is closed, is one of ``other`` as it was given:
    closing must not make alternatives exclude each other."""
    if not isinstance(one, dict) or not isinstance(other, dict) or any(word in one for word in _COMBINED):
        return False
    kinds = one.get("type"), other.get("type")
    if all(isinstance(kind, str) for kind in kinds) and kinds[0] != kinds[1]:
        return True
    for name in _required(one) | _required(other):
        values = [_values(part.get("properties"), name) for part in (one, other)]
        if all(values) and not any(value in values[1] for value in values[0]):
            return True
    closed = one.get("additionalProperties", not _suffices(one)) is False and any(word in one for word in _NAMING)
    return closed and "patternProperties" not in one and not _required(other) <= _named(one)


def _values(properties: object, name: str) -> list[Any]:
    """Return the values of a property of which there are some only; none for others."""
    given = properties.get(name) if isinstance(properties, dict) else None
    if not isinstance(given, dict):
        return []
    return [given["const"]] if "const" in given else _listed(given, "enum")


def _groups(node: dict[str, Any], root: object) -> list[list[dict[str, Any]]]:
    """Return the parts that hold of one object together: what stands in the schema itself, each of
    ``allOf``, and of ``anyOf`` and ``oneOf`` the alternatives."""
    groups: list[list[Any]] = [[{word: node[word] for word in (*_NAMING, *_NEEDING) if word in node}]]
    groups += [[one] for one in _listed(node, "allOf")]
    groups += [_listed(node, "anyOf"), _listed(node, "oneOf"), [_target(node, root)]]
    return [found for group in groups if (found := [one for one in group if isinstance(one, dict) and one])]


def _conditions(node: dict[str, Any]) -> list[Any]:
    dependent = node.get("dependentSchemas")
    return [node.get(word) for word in _CONDITIONS] + list(dependent.values() if isinstance(dependent, dict) else ())


def _listed(node: dict[str, Any], word: str) -> list[Any]:
    found = node.get(word)
    return found if isinstance(found, list) else []


def _target(node: dict[str, Any], root: object) -> object:
    """Return the schema that ``$ref`` points to, if it is here."""
    found, place = root, node.get("$ref")
    if not isinstance(place, str) or not (place == "#" or place.startswith("#/")):
        return None
    for name in place.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def reached(node: object, root: object) -> Iterator[dict[str, Any]]:
    """Yield a schema and those that hold of the same object with it."""
    left, seen = [node], set()
    while left:
        one = left.pop()
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [part for word in ("allOf", "anyOf", "oneOf") for part in _listed(one, word)]
            left += [_target(one, root), *_conditions(one)]


def _speaks(node: object, known: set[str], root: object) -> bool:
    """Return whether a part names properties, or needs others than those ``known``."""
    return any(
        any(word in one for word in _NAMING) or "minProperties" in one or not _required(one) <= known
        for one in reached(node, root)
    )


def _named(node: dict[str, Any]) -> set[str]:
    properties = node.get("properties")
    return set(properties) if isinstance(properties, dict) else set()


def _required(node: dict[str, Any]) -> set[str]:
    required = node.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _leave(node: object, root: object, kept_open: set[int]) -> None:
    kept_open.update(map(id, reached(node, root)))


def _suffices(node: dict[str, Any]) -> bool:
    """Return whether what an object needs is among what it names."""
    if "patternProperties" in node:
        return True
    named, least = _named(node), node.get("minProperties")
    return _required(node) <= named and not (isinstance(least, int) and least > len(named))
