"""The script that runs other people's clients: a server that is right passes, and wrong answers are
found.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import OPTIONS, Served, plain_folder, serving

from quire import AsyncLLM
from quire.errors import InvalidArgument
from quire.server.settings import ServerSettings

__all__ = ["plain_folder"]

pytest.importorskip("openai")
BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def clients() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module("clients")


@pytest.fixture(scope="module")
def folder(clients: Any, plain_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return clients.chat_copy(str(plain_folder), tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def reference(clients: Any, folder: str) -> Iterator[Any]:
    made = clients.Reference(folder)
    yield made
    made.llm.close()


@pytest.fixture(scope="module")
def served(folder: str) -> Iterator[Served]:
    llm = AsyncLLM(folder, **OPTIONS)
    try:
        with serving(llm, ServerSettings(served_model_name="tested")) as found:
            yield found
    finally:
        asyncio.run(llm.close())


def test_a_model_without_a_chat_template_gets_one(clients: Any, folder: str, tmp_path: Path) -> None:
    assert (Path(folder) / "chat_template.jinja").exists()
    assert clients.chat_copy(folder, tmp_path) == folder
    assert clients.chat_copy("tiny-python", tmp_path) == "tiny-python"
    assert list(tmp_path.iterdir()) == []


def test_openai_is_right(
    clients: Any, reference: Any, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "litellm" else there(name))
    found = clients.run_clients(served.url, reference, ["openai", "litellm"])
    assert found["model"] == "tested"
    assert found["clients"]["openai"]["complaints"] == []
    assert found["clients"]["openai"]["calls"] == 20
    assert found["clients"]["litellm"] == {"version": None, "calls": 0, "complaints": []}
    table = capsys.readouterr().out.splitlines()
    assert json.loads(table[-1]) == {"benchmark": "clients", **{key: found[key] for key in ("model", "clients")}}
    assert table[2].split() == ["openai", importlib.metadata.version("openai"), "20", "right"]
    assert table[3].split() == ["litellm", "None", "0", "not", "installed"]


@pytest.mark.slow
def test_wrong_texts_are_found(clients: Any, reference: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    right = clients.Reference.texts
    monkeypatch.setattr(clients.Reference, "texts", lambda self, *a, **o: [text + "!" for text in right(self, *a, **o)])
    found = clients.run_clients(served.url, reference, ["openai"])["clients"]["openai"]
    assert found["calls"] == 20
    assert [text.partition(":")[0] for text in found["complaints"]] == [
        "completions",
        "completions, stream",
        "completions, n and seed",
        "completions, n and seed, stream",
        "async, 8 at a time",
    ]


def test_a_client_that_breaks_off_is_told(
    clients: Any, reference: Any, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaking(url: str, model: str, reference: Any, tally: Any) -> None:
        tally.same("first", 1, 1)
        raise RuntimeError("out of luck")

    monkeypatch.setitem(clients.CLIENTS, "openai", ("openai", breaking))
    found = clients.run_clients(served.url, reference, ["openai"])["clients"]["openai"]
    assert found["complaints"] == ["it broke off after first: RuntimeError: out of luck"]
    assert "1 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("names", [[], ["openai", "curl"]])
def test_unknown_clients_are_refused(clients: Any, reference: Any, names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="of openai, langchain-openai, litellm, lm-eval at least one"):
        clients.run_clients("http://127.0.0.1:9", reference, names)


@pytest.mark.parametrize(
    ("found", "right"),
    [
        ('{"city": "Rome", "days": 2}', True),
        ({"city": "Paris", "days": 1}, True),
        ('{"city": "Rome"}', False),
        ('{"city": "Oslo", "days": 2}', False),
        ('{"city": "Rome", "days": 2', False),
        (None, False),
    ],
)
def test_forms_are_judged(clients: Any, found: Any, right: bool) -> None:
    tally = clients.Tally()
    tally.form("name", found)
    assert (tally.complaints == []) is right


def test_numbers_are_judged(clients: Any) -> None:
    tally = clients.Tally()
    tally.close("same", [-1.0, -2.0], [-1.0, -2.00005], 1e-4)
    assert tally.complaints == []
    tally.close("far", [-1.0, -2.0], [-1.0, -2.1], 1e-4)
    tally.close("short", [-1.0], [-1.0, -2.0], 1e-4)
    tally.close("none", [float("nan")], [-1.0], 1e-4)
    assert [text.partition(":")[0] for text in tally.complaints] == ["far", "short", "none"]


def test_likelihoods_are_those_of_transformers(clients: Any, reference: Any) -> None:
    """The reference itself, against another implementation in float64."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.model, dtype=torch.float64).eval()
    for context, continuation in clients.CONTINUATIONS[:3]:
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


def test_plausible_bodies_run(clients: Any, served: Served) -> None:
    """What the fuzzer offers beside the server's own description: fields that this server takes,
    and takes together.
    """
    fuzz = importlib.import_module("fuzz")
    description = served.client.get("/openapi.json").json()
    found = fuzz.plausible(description, "tested", ["session-1"])
    assert set(found["paths"]) == set(description["paths"])
    chat = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    *narrow, own = [choice["$ref"].rpartition("/")[2] for choice in chat["anyOf"]]
    assert own == "ChatRequest"
    schemas = found["components"]["schemas"]
    assert [schemas[name]["required"] for name in narrow] == [["messages", *every] for every in [(), *fuzz.TOGETHER]]
    draw = random.Random(0)
    for name in narrow:
        fields = schemas[name]["properties"]
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        body |= {
            field: draw.choice(fields[field]["enum"]) for field in schemas[name]["required"] if "enum" in fields[field]
        }
        answer = served.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, (name, answer.text)
    places = {
        method: operation["parameters"][0]["schema"]
        for method, operation in found["paths"]["/v1/sessions/{session_id}"].items()
    }
    assert places["get"]["anyOf"][0] == {"enum": ["session-1"]}
    assert "anyOf" not in places["delete"]
