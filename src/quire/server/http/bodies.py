"""The bodies of requests: what a JSON text may hold, and how it becomes a checked object.

Parsers and validators hold Python's lock until they are done, so each is only given a text that it
handles in some 30 ms: the structure of a text is counted first, piece by piece. Lists and mappings
have a longest length and stop at their first error, for an error takes a hundred times as long as a
value. What grows with a large body runs on a worker thread.
"""

from __future__ import annotations

import asyncio
import email.message
import gc
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, from_json

from quire.base.signatures import MAX_NESTING
from quire.server.http.errors import ApiError, bad_field, validation_error

MAX_CONTAINERS = 50_000
"""Most arrays and objects in a JSON body."""
MAX_MEMBERS = 50_000
"""Most members of all objects in a JSON body."""
MAX_VALUES = 500_000
"""Most values in a JSON body. A longer prompt goes as text, or to a session in parts."""
MAX_ITEMS = 10_000
"""Most entries of a list of anything but numbers, unless its field says otherwise."""
MAX_FIELDS = 256
"""Most fields of an object with fields of its own."""
LARGE_BODY = 65_536
"""Bytes from which a body is handled on a worker thread. Below, it takes some milliseconds."""
LENIENT = 4 << 20
"""Most bytes of a body in which a string may hold half a surrogate pair, which a slower parser
takes."""

_PIECE = 1 << 18
_STEPS = np.zeros(256, np.int8)
"""By byte: 1 where an array or an object begins, -1 where one ends."""
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


# -- the structure of a text -----------------------------------------------------------------------


def check_json(body: bytes) -> None:
    """Raise ``ApiError`` 400 for a body that is not UTF-8, or too deep or too large for a parser,
    JSON or not."""
    if b"\0" in body:
        # UTF-8 JSON has no such byte; in UTF-16 and UTF-32 every bracket has one.
        raise _not_json("the body must be JSON in UTF-8, and holds a zero byte")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise _not_json(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at index {error.start}") from None
    containers = body.count(b"[") + body.count(b"{")
    if containers <= MAX_NESTING and body.count(b",") < MAX_VALUES and body.count(b":") <= MAX_MEMBERS:
        return
    # Quotes that are part of a string are written with a backslash.
    text = body.replace(rb"\\", b"").replace(rb"\"", b"")
    containers = values = members = depth = 0
    inside = False
    for start in range(0, len(text), _PIECE):
        piece = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - start), start)
        quoted = np.logical_xor.accumulate(piece == ord('"')) ^ inside
        inside = bool(quoted[-1])
        marks = piece[~quoted]
        steps = _STEPS[marks]
        opened = int(np.count_nonzero(steps > 0))
        containers += opened
        values += opened + int(np.count_nonzero(marks == ord(",")))
        members += int(np.count_nonzero(marks == ord(":")))
        depths = depth + np.cumsum(steps, dtype=np.int64)
        if depths.size:
            depth = int(depths[-1])
            if depths.max() > MAX_NESTING:
                raise _not_json(f"the body nests more than {MAX_NESTING} arrays and objects in each other")
    for count, most, what in (
        (values + 1, MAX_VALUES, "values"),
        (containers, MAX_CONTAINERS, "arrays and objects"),
        (members, MAX_MEMBERS, "members of objects"),
    ):
        if count > most:
            raise _not_json(f"the body holds {count} {what}; at most {most} are taken")


def _not_json(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


# -- the structure of an object --------------------------------------------------------------------


def _bounded(schema: Any) -> Any:
    """Return a schema whose lists and mappings are bounded."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_bounded, schema))
    if not isinstance(schema, dict):
        return schema
    # A mapping of fields may have one that is called so.
    others = ("metadata", "serialization") if isinstance(schema.get("type"), str) else ()
    found = {name: value if name in others else _bounded(value) for name, value in schema.items()}
    if found.get("type") in ("list", "dict"):
        found["fail_fast"] = True
    if found.get("type") == "list" and found.get("items_schema", {}).get("type") not in ("int", "float"):
        found.setdefault("max_length", MAX_ITEMS)
    return found


class BoundedModel(BaseModel):
    """A body, or an object in one. Its lists and mappings stop at their first error."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cast("CoreSchema", _bounded(handler(source)))

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        # Each unknown field is an error of its own.
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_long", "an object has at most {most} fields here", {"most": MAX_FIELDS})
        return value


def check_count(name: str, listed: Any) -> None:
    """Raise ``ApiError`` 400 for a list of more than ``MAX_ITEMS`` entries. It is for fields that
    pydantic does not check."""
    if isinstance(listed, list) and len(listed) > MAX_ITEMS:
        raise bad_field(
            name, f"{name} has {len(listed)} entries; at most {MAX_ITEMS} are taken", code="invalid_argument"
        )


# -- from a text to an object ----------------------------------------------------------------------


class BodyRoute(APIRoute):
    """A route whose body is parsed and validated by ``parsed``, a large one on a worker thread."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        kind = self.body_field.field_info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BoundedModel)

        async def handler(request: Request) -> Response:
            found = _ParsedRequest(request.scope, request.receive)
            body = await found.body()
            if body and _is_json(request.headers.get("content-type", "")):
                found.value = await off_loop(found, lambda: parsed(body, kind))
            return await handle(found)

        return handler


class _ParsedRequest(Request):
    value: Any = None

    async def json(self) -> Any:
        """Return the checked object. FastAPI takes it as it is."""
        return self.value


async def off_loop(request: Request, function: Callable[[], T]) -> T:
    """Call a function whose time grows with a request's body, on a worker thread if that is
    large."""
    return function() if len(await request.body()) < LARGE_BODY else await asyncio.to_thread(function)


def parsed(body: bytes, kind: type[BoundedModel]) -> BoundedModel:
    """Return the object of a JSON text. Raise ``ApiError`` 400 with its first wrong field."""
    try:
        value = _from_json(body)
    except ValueError as error:
        if len(body) > LENIENT:
            raise _not_json(f"the body is not valid JSON: {error}") from None
        try:
            value = json.loads(body)
        except json.JSONDecodeError as found:
            raise _not_json(f"the body is not valid JSON: {found.msg}") from None
        except ValueError as found:  # an integer of too many digits
            raise _not_json(f"the body is not valid JSON: {found}") from None
    return validated(kind, value)


def validated(kind: type[M], value: Any) -> M:
    """Return an object of JSON's values. Raise ``ApiError`` 400 with its first wrong field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        raise validation_error([{**one, "loc": ("body", *one["loc"])} for one in problems]) from None


def _from_json(body: bytes) -> Any:
    """Parse JSON. The garbage collector waits: it would go through all objects of the process many
    times, while the parser holds Python's lock."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return from_json(body)
    finally:
        if collects:
            gc.enable()


def _is_json(content_type: str) -> bool:
    """Return whether FastAPI would parse a body of this type."""
    message = email.message.Message()
    message["content-type"] = content_type
    kind, _, named = message.get_content_type().partition("/")
    return bool(content_type) and kind == "application" and (named == "json" or named.endswith("+json"))
