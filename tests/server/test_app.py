"""The application as a whole: the shape of errors, bodies that are none, its
description, settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, StrictInt

from quire.base.errors import InvalidArgument, QuireError
from quire.base.other_names import NOT_OFFERED, PATHS
from quire.server.http.app import create_app
from quire.server.http.errors import ApiError, api_error, error_response, install, validation_error
from quire.server.http.settings import ServerSettings

from .conftest import Served


def test_errors_as_answers() -> None:
    """What each class is, ``test_error_roads`` tells."""
    error = api_error(InvalidArgument("what was given"), param="field")
    assert (error.status, error.message, error.param) == (400, "what was given", "field")
    error = api_error(QuireError("the inside"), param="field")
    assert (error.status, error.message, error.param) == (500, "internal error", None)
    assert api_error(ValueError("inside")).message == "internal error"
    mine = ApiError(418, "teapot")
    assert api_error(mine) is mine


def test_half_a_surrogate_pair_in_a_message() -> None:
    assert json.loads(bytes(error_response(ApiError(400, "got \ud800")).body))["error"]["message"] == "got \ud800"


class Inner(BaseModel):
    number: StrictInt
    either: list[StrictInt] | str = ""


class Outer(BaseModel):
    inner: list[Inner] = []


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"inner": [{"number": 1}, {"number": "x"}]}, "inner.1.number"),
        ({"inner": [{}]}, "inner.0.number"),
        ({"inner": [{"number": 1, "either": [1, "x"]}]}, "inner.0.either.1"),
        ({"inner": 3}, "inner"),
    ],
)
def test_the_field_of_a_validation_error(data: dict[str, Any], param: str) -> None:
    import pydantic

    with pytest.raises(pydantic.ValidationError) as caught:
        Outer.model_validate(data)
    problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
    error = validation_error(problems)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")


def check_error(found: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    assert found.status_code == status
    assert found.headers["content-type"] == "application/json"
    body = found.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    if code is not None:
        assert body["error"]["code"] == code
    return body["error"]  # type: ignore[no-any-return]


JSON = {"Content-Type": "application/json"}


def test_bodies_that_are_none(client: httpx.Client) -> None:
    for body in (b"{", b"{'a': 1}", b'{"a": 1,}', b"\xff\xfe", b'{"prompt": "\xff"}', b"nul", b"1" * 5000):
        check_error(client.post("/tokenize", content=body, headers=JSON), 400)
    for body in (b"", b"[]", b"3", b'"x"', b"null", b"[{}]"):
        error = check_error(client.post("/tokenize", content=body, headers=JSON), 400, "invalid_argument")
        assert error["param"] is None
    error = check_error(
        client.post("/tokenize", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}), 400
    )
    assert "application/json" in error["message"]
    check_error(client.post("/tokenize", content=b'{"a":' * 100 + b"1" + b"}" * 100, headers=JSON), 400, "invalid_json")
    check_error(client.post("/tokenize", content=b'{"prompt": "x"}\0', headers=JSON), 400, "invalid_json")
    check_error(client.post("/tokenize", json={"prompt": "x" * (16 << 20)}), 413, "request_too_large")
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_unknown_fields_are_tolerated(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "x", "whatever": [1]}).status_code == 200


def test_paths_and_methods(client: httpx.Client) -> None:
    assert client.get("/").headers["content-type"].startswith("text/html")
    for path in ("/v1", "/v1/nothing", "/tokenize/", "/%ff", "/inspector/nothing.js"):
        check_error(client.get(path), 404, "not_found")
    assert client.get("/nothing").json()["error"]["message"].endswith("the document /openapi.json lists what there is")
    paths = set(client.get("/openapi.json").json()["paths"]) | {"/v1/state"}
    for path, told in PATHS.items():
        answer = client.post(path)
        if path.startswith("/api/"):
            assert (answer.status_code, answer.json()) == (404, {"error": f"there is no {path}; {told}"})
        else:
            check_error(answer, 404, "not_found")
            assert answer.json()["error"]["message"] == f"there is no {path}; {told}"
        assert {name.rstrip(";,.") for name in re.findall(r"(?:GET|POST) (\S+)", told)} <= paths
    for method, path in (("GET", "/tokenize"), ("DELETE", "/v1/models"), ("POST", "/health")):
        found = client.request(method, path)
        check_error(found, 405, "method_not_allowed")
        assert found.headers["allow"]


def test_what_is_not_offered_is_named(client: httpx.Client) -> None:
    """The 404 says what is missing and what there is."""
    paths = set(client.get("/openapi.json").json()["paths"])
    for path, told in {
        "/v1/rerank": "texts are not ranked",
        "/v1/audio/transcriptions": "hears speech",
        "/v1/audio/speech": "speaks",
        "/v1/images/generations": "makes pictures",
        "/v1/fine_tuning/jobs": "nothing is trained here",
        "/v1/files": "keeps no files",
        "/v1/conversations": "conversations are",
    }.items():
        answer = client.post(path)
        check_error(answer, 404, "not_found")
        message = answer.json()["error"]["message"]
        assert message.startswith(f"there is no {path}; ")
        assert told in message
        assert "/v1/chat/completions" in message
    for reason in NOT_OFFERED.values():
        assert {name.rstrip(";,.)") for name in re.findall(r"(?:GET|POST) (\S+)", reason)} <= paths
    assert client.post("/v1/imagesque").json()["error"]["message"].endswith("lists what there is")


def test_given_values_are_shown_as_json() -> None:
    for said, wanted in {
        "a must be b, got True": "a must be b, got true",
        "a: b, got None (and 2 more)": "a: b, got null (and 2 more)",
        "got {'a': [None, 'x']}": 'got {"a": [null, "x"]}',
        "got [False, 'cut of": "got [False, 'cut of",
        "got 'True'": "got 'True'",
        "True": "True",
        "got " + "[" * 400: "got " + "[" * 400,
    }.items():
        assert ApiError(400, said).message == wanted


def test_request_ids_are_on_every_answer(client: httpx.Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/v1/nothing"), ("POST", "/tokenize")):
        assert client.request(method, path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


def test_the_document_says_that_a_sink_needs_a_window(served: Served) -> None:
    body = served.client.get("/openapi.json").json()["components"]["schemas"]["CreateBody"]
    assert body["if"]["properties"]["sink"] == {"exclusiveMinimum": 0}
    assert body["then"]["required"] == ["window"]
    for given, status in (
        ({"sink": 4}, 400),
        ({"sink": 4, "window": None}, 400),
        ({"sink": 0}, 200),
        ({"sink": 4, "window": 64}, 200),
    ):
        answer = served.client.post("/v1/sessions", json=given)
        assert answer.status_code == status, given
        if status == 200:
            served.client.delete(f"/v1/sessions/{answer.json()['id']}")


def test_the_description(served: Served) -> None:
    found = served.client.get("/openapi.json").json()
    assert {"/health", "/v1/models", "/tokenize", "/v1/load_lora_adapter"} <= set(found["paths"])
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"], path  # errors have the shape of 4XX
            refusal = operation["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"]
            shapes = {"/v1/messages": "AnthropicErrorBody", "/api/": "OllamaErrorBody"}
            shape = next((one for start, one in shapes.items() if path.startswith(start)), "ErrorBody")
            assert refusal.rpartition("/")[2] == shape, path
    assert served.client.get("/docs").status_code == 200


def test_errors_of_routes_that_are_ours() -> None:
    """What is nobody's fault but ours reaches whoever wraps the application."""
    app = FastAPI()
    install(app)

    @app.get("/broken")
    async def broken() -> None:
        raise QuireError("the inside")

    import asyncio

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as client:
            with pytest.raises(QuireError, match="the inside"):
                await client.get("/broken")

    asyncio.run(run())


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("host", ["", " ", 3]),
        ("port", [-1, 65536, True, "80", 1.0]),
        ("api_key", ["abc", ("",), ("a b",), ("é",), ("a\n",), (3,)]),
        ("served_model_name", ["", " ", "a\nb", 3]),
        ("tool_call_parser", ["", "Hermes", "none", 3]),
        ("allowed_origin", ["*", ("a.example",), ("https://a.example/path",), ("https://a, https://b",), (3,)]),
        ("allowed_host", ["*", ("https://a.example",), ("a.example:80",), ("a, b",), ("",), (3,)]),
        ("adapter_dir", ["/", ("/no/such/place",), (3,)]),
        ("max_body_bytes", [0, -1, "4G", "x", True]),
        ("max_upload_bytes", [0, "x"]),
        ("max_waiting", [0, -1, 1.5, True]),
        ("max_sessions", [0, "3"]),
        ("max_responses", [0, "3"]),
        ("max_response_bytes", [0, "x"]),
        ("session_ttl", [0, -1.0, float("inf"), float("nan"), "1", True]),
        ("drain_seconds", [-1, float("inf"), float("nan"), None]),
    ],
)
def test_settings_that_are_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgument, match=name):
            ServerSettings(**{name: value})


def test_keys_do_not_get_into_errors() -> None:
    with pytest.raises(InvalidArgument) as caught:
        ServerSettings(api_key=("se cret",))
    assert "cret" not in str(caught.value)


def test_settings(tmp_path: Path) -> None:
    made = ServerSettings(
        port=0,
        api_key=["a", "b"],
        max_body_bytes="1KiB",
        adapter_dir=[str(tmp_path)],
        drain_seconds=0,  # type: ignore[arg-type]
    )
    assert (made.api_key, made.max_body_bytes, made.max_upload_bytes) == (("a", "b"), 1024, 4 << 30)
    assert made.adapter_dir == (tmp_path,)


def test_one_llm_in_two_applications(served: Served) -> None:
    other = create_app(served.llm, ServerSettings(served_model_name="other"))
    assert other.state.context.model_name == "other"
    assert served.context.model_name == "tiny-python"
