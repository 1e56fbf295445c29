"""The schemas within a JSON schema, and the references among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

SCHEMA_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords with schemas by names."""
DATA = ("const", "enum", "default", "examples", "example")
"""Keywords with values that are no schemas."""


def schemas(root: object, place: str = "", *, own: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all within it, each after its place: ``place`` and a JSON pointer.
    ``own``: without those that have an ``$id``, and so are documents of their own."""
    left: list[tuple[str, object]] = [(place, root)]
    while left:
        place, node = left.pop()
        if isinstance(node, list):
            left += [(f"{place}/{index}", one) for index, one in enumerate(node)]
        elif isinstance(node, dict) and (node is root or not (own and _is_document(node))):
            yield place, node
            for word, value in node.items():
                if word in SCHEMA_MAPS and isinstance(value, dict):
                    left += [(f"{place}/{word}/{token(name)}", one) for name, one in value.items()]
                elif word not in DATA:
                    left.append((f"{place}/{token(word)}", value))


def token(name: str) -> str:
    """Return a name as it stands in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def point(schema: object, place: str) -> None:
    """Make the references of a schema to itself pointers from the root of the document in which it
    is at ``place``, such as ``#/$defs/0``; its ``$id`` and the ``$anchor`` within it go."""
    if not isinstance(schema, dict):
        return
    named = schema.get("$id")
    document = named.partition("#")[0] if isinstance(named, str) else ""
    nodes, anchors = list(schemas(schema, place, own=True)), dict[str, str]()
    for at, node in nodes:
        for word in ("$anchor", "$id"):  # in draft 7 an anchor is "$id": "#name"
            if isinstance(node.get(word), str):
                anchors[node.pop(word).removeprefix("#")] = quote(at, safe="#/~$")
    for _, node in nodes:
        if isinstance(reference := node.get("$ref"), str):
            node["$ref"] = _led(reference, document, place, anchors)


def _led(reference: str, document: str, place: str, anchors: Mapping[str, str]) -> str:
    whose, _, fragment = reference.partition("#")
    if whose and whose != document:
        return reference
    return place + fragment if not fragment or fragment.startswith("/") else anchors.get(fragment, reference)


def _is_document(node: Mapping[str, Any]) -> bool:
    named = node.get("$id")
    return isinstance(named, str) and not named.startswith("#")
