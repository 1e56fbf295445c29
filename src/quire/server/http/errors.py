"""Errors in the shape of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``.

Routes raise ``ApiError``, or let Quire's own errors through. Only this module knows their statuses.
"""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from quire.base.errors import (
    CONTEXT_FULL,
    MAX_SHOWN,
    AlreadyExists,
    BlendLoadError,
    Cancelled,
    CheckpointError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotDurable,
    NotFound,
    PoolExhausted,
    QuireError,
    QuotaExceeded,
    RanksBroken,
    ResourceExhausted,
    StoreDamaged,
    StoreFull,
    TierError,
    Unsupported,
)
from quire.base.metrics import REFUSAL_ERRORS
from quire.base.other_names import path_hint
from quire.base.signatures import shown
from quire.grammars.trial import GrammarsBusy

logger = logging.getLogger("quire.server")

STORE_UNAVAILABLE = "the server's store cannot be read or written now; its log says why"
"""What a client learns of a tier that failed."""
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection. No client reads it."""

RETRY_AFTER = 1
"""Seconds after which a client may repeat a request that was refused for momentary load."""

STATUSES: tuple[tuple[type[QuireError], int, str], ...] = (
    (AlreadyExists, 409, "already_exists"),
    (InvalidArgument, 400, "invalid_argument"),
    (NotFound, 404, "not_found"),
    (FailedPrecondition, 409, "failed_precondition"),
    (GrammarsBusy, 429, "rate_limit_exceeded"),
    (QuotaExceeded, 429, "quota_exceeded"),
    (PoolExhausted, 503, "pool_exhausted"),
    (StoreFull, 507, "store_full"),
    (ResourceExhausted, 400, "resource_exhausted"),
    (Unsupported, 400, "unsupported"),
    (BlendLoadError, 400, "blend_load_error"),
    (StoreDamaged, 500, "store_damaged"),
    (DataLoss, 400, "data_loss"),
    (CheckpointError, 400, "bad_checkpoint"),
    (NotDurable, 507, "not_durable"),
    (TierError, 503, "store_unavailable"),
    (RanksBroken, 500, "ranks_broken"),
    (Cancelled, CLIENT_GONE, "cancelled"),
)
"""Status and code of each class, the narrower ones first. Others are internal errors."""

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
"""Types by status. Others are "invalid_request_error", from 500 on "server_error"."""


MESSAGES = "/v1/messages"
"""Where errors have Anthropic's shape, as they have below."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's types by status. Others are "invalid_request_error", from 500 on "api_error"."""


MOST_BRANCHES = 2
"""Most further members of a union that an error tells of."""

PYTHONS = tuple("TFN[{")
"""How values begin that Python writes in another way than JSON."""

OLLAMA = "/api"
"""Where errors have ollama's shape, as they have below."""


class ErrorDetail(BaseModel):
    """A description of one error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer from 400 on."""

    error: ErrorDetail


REFUSED_VALUES: dict[int | str, dict[str, Any]] = {
    400: {
        "model": ErrorBody,
        "description": "A body, or a value whose schema fits and which this server, its model or the state of a session "
        "does not take; `param` names the field.",
    }
}
"""The answer of the operations whose values are checked beyond what JSON Schema says."""


class AnthropicErrorDetail(BaseModel):
    """A description of one error. ``param`` and ``code`` are as in ``ErrorDetail``."""

    type: str
    message: str
    param: str | None = None
    code: str | None = None


class AnthropicErrorBody(BaseModel):
    """The body of every answer from 400 on of ``/v1/messages``."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaErrorBody(BaseModel):
    """The body of every answer from 400 on of ollama's calls."""

    error: str


def errors_as(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of ``/openapi.json``, with bodies of type ``model``."""
    return {
        "4XX": {"model": model, "description": "What was asked for cannot be had."},
        "5XX": {"model": model, "description": "The server stops, or broke."},
    }


class ApiError(Exception):
    """An error with its answer. ``message`` says what was given and what is accepted. ``param`` is
    the path of the field that it is about ("messages.0.role"). ``code`` is for programs
    ("model_not_found"). ``type`` follows from the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _in_json(message)
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Return the JSON object to send, as an answer or inside a stream."""
        # LangChain looks for the code in the text of OpenAI's exceptions, which is the message.
        message = f"{self.message} ({CONTEXT_FULL})" if self.code == CONTEXT_FULL else self.message
        return {"error": {"message": message, "type": self.type, "param": self.param, "code": self.code}}


def _in_json(message: str) -> str:
    """Return a message that ends with a given value, which Python has written, with true, false,
    null, lists and objects as JSON has them."""
    said, got, rest = message.rpartition("got ")
    value, more, count = rest.partition(" (and ")
    if not got or value[:1] not in PYTHONS or len(value) > MAX_SHOWN:
        return message
    try:
        written = json.dumps(ast.literal_eval(value), ensure_ascii=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # cut short, or no value
        return message
    return f"{said}{got}{written}{more}{count}"


def ollama_body(error: ApiError) -> dict[str, Any]:
    """Return an error in ollama's shape."""
    return {"error": error.message}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON object of an error in Anthropic's shape, also for inside a stream."""
    kind = ANTHROPIC_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message
    if error.code == CONTEXT_FULL:
        # Programs know it by Anthropic's words.
        whole = "input length and `max_tokens` exceed context limit"
        message = f"{whole if error.param == 'max_tokens' else 'prompt is too long'}: {message}"
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "param": error.param, "code": error.code},
    }


def bad_field(param: str, message: str, *, code: str | None = None) -> ApiError:
    """Return the answer to a body with one bad field."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, reason: str) -> ApiError:
    """Return the answer to a body with a field that would be ignored otherwise."""
    return bad_field(param, f"{param} is not supported: {reason}", code="unsupported_parameter")


def busy(status: int, message: str, code: str, seconds: int = RETRY_AFTER, **headers: str) -> ApiError:
    """Return the answer to a request that is refused for momentary load. ``seconds``: when to try
    again."""
    return ApiError(status, message, code=code, headers={"Retry-After": str(seconds), **headers})


def api_error(
    error: BaseException, fields: Mapping[str, str] = MappingProxyType({}), *, param: str | None = None
) -> ApiError:
    """Return the answer to ``error``, without details that are for the log only. ``fields`` maps
    arguments to fields of the body. ``param`` is the field of an error that is about none of these
    arguments."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TierError):
        # Its own words name directories and hosts, which clients must not learn.
        logger.warning("store: %s", error)
        error = TierError(STORE_UNAVAILABLE)
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            headers = {"Retry-After": str(RETRY_AFTER)} if status in (429, 503) else None
            if status in (500, 507):
                # It took effect, or would fail again. OpenAI's clients repeat a call after any 5xx.
                headers = {"x-should-retry": "false"}
            field, said = (error.field or "").split(".")[0], str(error)
            param = fields.get(field, param)
            if error.allowed:
                said = said.replace(error.allowed, error.allowed.replace("None", "null"))
            if field and param and said.startswith(f"{field} "):
                said = said.replace(field, param, 1)  # the client's name of it
            return ApiError(status, said, param=param, code=error.code or code, headers=headers)
    return ApiError(500, "internal error", code="internal_error")


@contextmanager
def naming(
    fields: Mapping[str, str], default: str | None = None, of: tuple[type[QuireError], ...] = (QuireError,)
) -> Iterator[None]:
    """Turn errors ``of`` these classes into answers about one of ``fields``, or ``default``."""
    try:
        yield
    except of as error:
        raise api_error(error, fields, param=default) from error


@contextmanager
def hiding(path: Path, name: str) -> Iterator[None]:
    """Let errors of Quire say ``name`` instead of a state file at ``path``, or of ``path``, which
    clients must not learn."""
    try:
        yield
    except QuireError as error:
        text = str(error).replace(f"state file {str(path)!r}", name).replace(str(path), name)
        text = text.replace(str(path.parent), "the server's directory")
        error.args = (text, *error.args[1:])
        raise


def error_response(error: ApiError, path: str = "") -> Response:
    """Return ``error`` as an answer at ``path``, in ASCII so that half a surrogate pair cannot
    break it."""
    body = error.body
    if f"{path}/".startswith(f"{MESSAGES}/"):
        body = anthropic_body(error)
    elif path.startswith(f"{OLLAMA}/"):
        body = ollama_body(error)
    return Response(json.dumps(body), status_code=error.status, headers=error.headers, media_type="application/json")


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return pydantic's ``errors()`` as one answer that names the first wrong field."""
    if not problems:
        return ApiError(400, "the request is invalid", code="invalid_argument")
    first, *others = problems
    where = str(next(iter(first.get("loc", ())), "body"))
    fields = _fields(first)
    param = _path(fields) or None
    if param is None and where == "body":
        message = "the body must be a JSON object, sent as Content-Type: application/json"
        return ApiError(400, message, code="invalid_argument")
    message, kind = str(first.get("msg", "invalid")), first.get("type")
    if kind == "extra_forbidden":
        message = "there is no such field in this call"
    elif kind not in ("missing", "value_error", "assertion_error"):  # nothing was given; checks of our own say what
        message = f"{message}, got {_given(first.get('input'))}"
    if param is not None and any(_is_branch(part) for part in fields):
        # The members of a union: a value that no member takes has a problem with each.
        same = [one for one in others if _fields(one) and _fields(one)[0] == fields[0]]
        others = [one for one in others if one not in same]
        for one in same[:MOST_BRANCHES]:
            message += f"; or {_path(_fields(one))}: {one.get('msg', 'invalid')}, got {_given(one.get('input'))}"
    more = f" (and {len(others)} more)" if others else ""
    return ApiError(400, f"{param or where}: {message}{more}", param=param, code="invalid_argument")


def _fields(problem: Mapping[str, Any]) -> list[str]:
    """Return the path of a problem within the body, with the members of unions in it."""
    return [str(part) for part in problem.get("loc", ())][1:]


def _path(fields: Sequence[str]) -> str:
    return ".".join(part for part in fields if not _is_branch(part))


def _given(value: object) -> str:
    """Return a value of a body in a few words."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value) if value is None or isinstance(value, bool) else shown(value)


def _is_branch(part: str) -> bool:
    """Return whether a part of a path is a union's member: "list[int]", "function-after[...]"."""
    return any(mark in part for mark in "[](),") or part in ("str", "int", "float", "bool", "constrained-str")


def count(request: Request, error: ApiError) -> None:
    """Count an error among the engine's refusals, unless the server is unhealthy or closing."""
    if error.code in ("shutting_down", "unhealthy"):
        return
    kinds: dict[int | str | None, type[QuireError]] = {code: kind for kind, _, code in STATUSES}
    kinds |= {400: InvalidArgument, 404: NotFound, 409: FailedPrecondition, 429: QuotaExceeded, 503: PoolExhausted}
    kind = kinds.get(error.code) or kinds.get(error.status) or QuireError
    name = next((one.__name__ for one in kind.__mro__ if one.__name__ in REFUSAL_ERRORS), None)
    if name is not None:
        request.app.state.context.llm.engine.metrics.refusals.inc(name)


def _methods(request: Request, routes: Sequence[BaseRoute]) -> set[str]:
    """Return the methods that a request's path may be asked by: those of its own routes, or of the
    ones with a place for any name."""
    own: set[str] = set()
    others: set[str] = set()
    for route in routes:
        if (inner := getattr(route, "original_router", None)) is not None:
            others |= _methods(request, inner.routes)
        elif route.matches(request.scope)[0] != Match.NONE:
            of_this = own if getattr(route, "path", "") == request.scope["path"] else others
            of_this |= getattr(route, "methods", None) or set()
    return own or others


def install(app: FastAPI) -> None:
    """Answer all errors of routes in this shape. The gate logs internal ones."""

    async def from_route(request: Request, error: Exception) -> Response:
        found = validation_error(error.errors()) if isinstance(error, RequestValidationError) else api_error(error)
        if found.status == 500:
            raise error
        count(request, found)
        return error_response(found, request.scope["path"])

    async def from_framework(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        codes = {404: "not_found", 405: "method_not_allowed"}
        headers = dict(error.headers or {})
        if error.status_code == 405:
            # The framework tells those of one route, and a path may have several.
            found = _methods(request, request.app.routes)
            headers["Allow"] = ", ".join(sorted(found | ({"HEAD"} if "GET" in found else set())))
        message = {
            404: f"there is no {request.url.path}; {path_hint(request.url.path)}",
            405: f"{request.url.path} does not take {request.method}; it takes {headers.get('Allow')}",
        }.get(error.status_code, str(error.detail))
        answer = ApiError(error.status_code, message, code=codes.get(error.status_code), headers=headers)
        return error_response(answer, request.scope["path"])

    for kind in (ApiError, QuireError, RequestValidationError):
        app.add_exception_handler(kind, from_route)
    app.add_exception_handler(HTTPException, from_framework)
