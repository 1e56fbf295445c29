"""The script that runs other people's clients: a server that is right passes, and wrong answers are
found. OpenAI's client runs here, Pydantic AI among the slow tests; ``make test-clients`` runs all.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import plain_folder

from quire.base.errors import InvalidArgument

__all__ = ["plain_folder"]

BENCH = Path(__file__).parents[2] / "bench"
HERE = Path(sys.executable)


@pytest.fixture(scope="module")
def clients() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("clients")


@pytest.fixture(scope="module")
def judge(clients: Any) -> Any:
    return importlib.import_module("client_reference")


@pytest.fixture(scope="module")
def watch(clients: Any) -> Any:
    return importlib.import_module("client_watch")


@pytest.fixture(scope="module")
def folder(clients: Any, plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return clients.chat_copy(str(plain_folder), tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def reference(clients: Any, folder: str) -> Iterator[Any]:
    made = clients.Reference(folder)
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def watched(clients: Any, folder: str) -> Iterator[Any]:
    with clients.watched_server(folder) as found:
        yield found


def test_a_model_without_a_chat_template_gets_one(clients: Any, folder: str, tmp_path: Path) -> None:
    assert (Path(folder) / "chat_template.jinja").exists()
    assert clients.chat_copy(folder, tmp_path) == folder
    assert clients.chat_copy("tiny-python", tmp_path) == "tiny-python"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "rows"),
    [
        pytest.param("openai", {"openai-chat": (), "openai-responses": ()}, marks=pytest.mark.slow),
        pytest.param(
            "pydantic-ai-slim",
            {"pydantic-ai-chat": ("details",), "pydantic-ai-responses": ("details",)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_clients_are_right(
    clients: Any,
    reference: Any,
    watched: Any,
    package: str,
    rows: dict[str, tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """In all abilities but those that they do not offer."""
    if importlib.util.find_spec(package.removesuffix("-slim").replace("-", "_")) is None:
        pytest.skip(f"{package} is not installed")
    line = clients.run_clients(watched, reference, list(rows), python=HERE, record=tmp_path)
    assert clients.complaints(line) == []
    for row, lacking in rows.items():
        found = line["clients"][row]
        assert found.pop("version") == importlib.metadata.version(package)
        assert found == {name: "not offered" if name in lacking else "ok" for name in clients.ABILITIES}
        recorded = json.loads((tmp_path / f"{row}.json").read_text())["requests"]
        assert sum("given_up" in one for one in recorded) == 1
        assert sum(one.get("status") == 400 for one in recorded) >= 1
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["benchmark"] == "clients"
    assert [text.split()[0] for text in table[2:]] == list(rows)


def test_what_is_not_there_is_named(clients: Any, reference: Any, watched: Any, tmp_path: Path) -> None:
    line = clients.run_clients(watched, reference, ["lm-eval"], python=tmp_path / "python")
    assert set(line["clients"]["lm-eval"]) == {"version", "why", *clients.ABILITIES}
    assert line["clients"]["lm-eval"]["text"] == "not installed"
    assert clients.complaints(line) == [f"lm-eval was not run: there is no {tmp_path / 'python'}"]


@pytest.mark.parametrize("rows", [[], ["openai-chat", "curl"]])
def test_unknown_clients_are_refused(clients: Any, reference: Any, watched: Any, rows: list[str]) -> None:
    with pytest.raises(InvalidArgument, match=r"of openai-chat, openai-responses, .* at least one is accepted"):
        clients.run_clients(watched, reference, rows)


# -- what is judged --------------------------------------------------------------------------------

RIGHT = {"city": "Rome", "days": 2}


@pytest.mark.parametrize(
    ("ability", "value", "said"),
    [
        ("text", "abc", None),
        ("text", "abd", "'abd' instead of 'abc'"),
        ("retry", "", "instead of 'abc'"),
        ("stream", ["a", "", "bc"], None),
        ("stream", ["abc", ""], "one piece"),
        ("stream", ["a", "b"], "instead of 'abc'"),
        ("tools", {"calls": [["weather", RIGHT]], "after": ""}, None),
        ("tools", {"calls": [["weather", json.dumps(RIGHT)]], "after": None}, "after the call"),
        ("tools", {"calls": [["other", RIGHT]], "after": ""}, "not of the form"),
        ("tools", {"calls": [["weather", "{}"]], "after": ""}, "not of the form"),
        ("tools", {"calls": [], "after": ""}, "not of the form"),
        ("structured", [RIGHT, json.dumps(RIGHT)], None),
        ("structured", [RIGHT, {"city": "Oslo", "days": 2}], "not of the form"),
        ("structured", ['{"city": "Rome", "days": 2'], "not of the form"),
        ("structured", [None], "not of the form"),
        ("cancel", True, None),
        ("overflow", False, "told False"),
        ("details", {"a": [1.0, -2.00005], "b": 3}, None),
        ("details", {"a": [1.0, -2.1], "b": 3}, "a: -2.1 instead of -2.0"),
        ("details", {"a": [1.0], "b": 3}, "instead of"),
        ("details", {"a": [1.0, float("nan")], "b": 3}, "a: nan instead of"),
        ("details", {"a": [1.0, -2.0]}, "instead of"),
    ],
)
def test_values_are_judged(judge: Any, ability: str, value: Any, said: str | None) -> None:
    found = judge.complaint(ability, value, "abc", {"a": [1.0, -2.0], "b": 3})
    assert found is None if said is None else said in found


def test_what_the_server_saw_is_judged(clients: Any, watched: Any, watch: Any) -> None:
    """A client may be content where the server was not asked as it should have been."""

    def said(ability: str, told: Any, *seen: tuple[int, bool]) -> str:
        watched.seen["x", ability] = [
            watch.Seen(method="POST", path="/", headers={}, body=b"", status=status, given_up=given_up)
            for status, given_up in seen
        ]
        return clients.judged("x", ability, told, watched, "abc", None)

    assert said("text", {"value": "abc"}, (200, False)) == "ok"
    assert said("text", {"value": "abc"}, (503, False), (200, False)) == "failed: the server answered 503"
    assert said("text", {"error": "Broken: no"}) == "failed: Broken: no"
    assert said("retry", {"value": "abc"}, (429, False), (200, False)) == "ok"
    assert "[200]" in said("retry", {"value": "abc"}, (200, False))
    assert said("cancel", {"value": True}, (200, True)) == "ok"
    assert "went on" in said("cancel", {"value": True}, (200, False))


def test_what_is_recorded(watch: Any) -> None:
    """Each request once, without long texts, and with a place for ids that are new each time."""
    first, again, other = (f"resp_{digit * 32}" for digit in "123")

    def seen(body: Any, status: int, made: str = "", path: str = "/v1/responses") -> Any:
        one = watch.Seen(
            method="POST", path=path, headers={"accept": "x"}, body=json.dumps(body).encode(), status=status
        )
        one.answer += json.dumps({"id": made, "more": made}).encode()
        return one

    asked = {
        ("x", "retry"): [seen({"input": "a"}, 429), seen({"input": "a"}, 200, again)],
        ("x", "text"): [seen({"input": "a"}, 200, first), seen({"input": "long long"}, 400)],
        ("x", "details"): [
            seen({"previous_response_id": again}, 200, other),
            seen({}, 200, path=f"/v1/responses/{other}"),
        ],
        ("y", "text"): [seen({"input": "b"}, 200)],
    }
    found = watch.recording("x", "1.0", asked, ("text", "retry", "details"), "long long")
    assert (found["client"], found["version"]) == ("x", "1.0")
    assert [(one["path"], one["body"], one["status"]) for one in found["requests"]] == [
        ("/v1/responses", {"input": "a"}, 200),
        ("/v1/responses", {"input": "{overflow}"}, 400),
        ("/v1/responses", {"previous_response_id": "{made.0.0}"}, 200),
        ("/v1/responses/{made.2.0}", {}, 200),
    ]


def test_likelihoods_are_those_of_transformers(judge: Any, reference: Any) -> None:
    """The reference itself, against another implementation in float64."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.model, dtype=torch.float64).eval()
    for context, continuation in judge.CONTINUATIONS[:3]:
        before = reference.llm.tokenizer.encode(context)
        whole = torch.tensor([list(reference.llm.tokenizer.encode(context + continuation))])
        with torch.no_grad():
            logprobs = model(whole).logits[0].log_softmax(-1)
        places = range(len(before) - 1, whole.shape[1] - 1)
        wanted = sum(logprobs[place, whole[0, place + 1]].item() for place in places)
        score, greedy, count = reference.likelihood(context, continuation)
        assert count == len(places)
        assert score == pytest.approx(wanted, abs=1e-4 * count)
        assert greedy is all(logprobs[place].argmax() == whole[0, place + 1] for place in places)


def test_plausible_bodies_run(clients: Any, watched: Any) -> None:
    """What the fuzzer offers in its second pass: fields that this server takes together."""
    httpx = pytest.importorskip("httpx")
    fuzz = importlib.import_module("fuzz")
    with httpx.Client(base_url=watched.url, timeout=60, trust_env=False) as client:
        description = client.get("/openapi.json").json()
        found = fuzz.plausible(description, "under-test", ["session-1"])
        assert set(found["paths"]) == set(description["paths"]) - set(fuzz.UNLIKELY)
        chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        names = [choice["$ref"].rpartition("/")[2] for choice in chat["anyOf"]]
        schemas = found["components"]["schemas"]
        assert [schemas[name]["required"] for name in names] == [["messages", *every] for every in [(), *fuzz.TOGETHER]]
        draw = random.Random(0)
        for name in names:
            fields = schemas[name]["properties"]
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            body |= {
                field: draw.choice(fields[field]["enum"])
                for field in schemas[name]["required"]
                if "enum" in fields[field]
            }
            answer = client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, (name, answer.text)
    places = {
        method: operation["parameters"][0]["schema"]
        for method, operation in found["paths"]["/v1/sessions/{session_id}"].items()
    }
    asked = found["paths"]["/v1/state/attention"]["get"]["parameters"]
    assert {one["name"]: one["schema"]["enum"] for one in asked} == {
        "branch": ["session:session-1"],
        "position": [0],
        "layer": [0],
    }
    assert places["get"] == {"enum": ["session-1"]}
    assert "enum" not in places["delete"]


def test_refusals_by_value_are_those_that_are_declared(clients: Any) -> None:
    fuzz = importlib.import_module("fuzz")
    tomllib = importlib.import_module("tomllib")
    paths = {"/a": {"get": {"responses": {"200": {}}}, "post": {"responses": {"200": {}, "400": {}}}}}
    (one,) = tomllib.loads(fuzz.configuration({"paths": paths}, by_value=True))["operations"]
    assert (one["include-path"], one["include-method"]) == ("/a", "POST")
    assert one["checks"]["positive_data_acceptance"]["expected-statuses"] == [*fuzz.TAKEN, "400"]
    assert tomllib.loads(fuzz.configuration({"paths": paths}, by_value=False)) == {}
