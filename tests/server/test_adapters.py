"""Adapters over HTTP: loaded from allowed places only, listed, named as models, unloaded."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from quire import AsyncLLM, SamplingParams
from quire.models.catalogue import bundled_adapters, bundled_models
from quire.server.http.errors import ApiError
from quire.server.http.settings import ServerSettings
from quire.server.openai.adapter_routes import allowed_path

from .conftest import OPTIONS, Served, serving

NAME = "tiny-python-docstrings"
PROMPT = "def add(a, b):\n"
PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An allowed directory: good/, deep/er/good, a damaged one, links in and out, and beside it a
    forbidden adapter.
    """
    root = tmp_path_factory.mktemp("adapters")
    allowed, source = root / "allowed", bundled_adapters()[NAME]
    shutil.copytree(source, allowed / "good")
    shutil.copytree(source, allowed / "deep" / "er" / "good")
    shutil.copytree(source, root / "forbidden")
    shutil.copytree(source, root / "allowed-too")
    shutil.copytree(source, allowed / "damaged")
    weights = allowed / "damaged" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (allowed / "empty").mkdir()
    (allowed / "file").write_text("x")
    (allowed / "inward").symlink_to(allowed / "good")
    (allowed / "outward").symlink_to(root / "forbidden")
    (allowed / "loop").symlink_to(allowed / "loop")
    (allowed / "leaky").mkdir()
    shutil.copy(source / "adapter_config.json", allowed / "leaky")
    (allowed / "leaky" / "adapter_model.safetensors").symlink_to(root / "forbidden" / "adapter_model.safetensors")
    shutil.copytree(source, allowed / "texted")
    (allowed / "texted" / "chat_template.jinja").write_text("{{ messages }}")
    shutil.copytree(source, allowed / "leaky-text")
    (allowed / "leaky-text" / "tokenizer.json").symlink_to(bundled_models()["tiny-python"] / "tokenizer.json")
    return allowed


@pytest.fixture(scope="module")
def served(llm: AsyncLLM, folder: Path) -> Iterator[Served]:
    with serving(llm, ServerSettings(adapter_dir=(folder,))) as found:
        yield found


@pytest.fixture(autouse=True)
def clean(llm: AsyncLLM) -> Iterator[None]:
    """Every test unloads what it loads."""
    yield
    assert not asyncio.run(llm.adapters())


def load(client: httpx.Client, path: object, name: object = "a") -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


def unload(client: httpx.Client, name: object = "a") -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def names(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


# -- where from ------------------------------------------------------------------------------------


def test_what_is_allowed(served: Served, folder: Path) -> None:
    for path in ("good", "./good", "good/", "deep/er/good", "deep//er/./good", "inward", str(folder / "good"), NAME):
        found = load(served.client, path)
        assert found.status_code == 200, path
        assert unload(served.client).status_code == 200


def test_what_is_not(served: Served, folder: Path) -> None:
    forbidden = folder.parent / "forbidden"
    paths = [
        str(forbidden),
        str(folder.parent / "allowed-too"),  # begins with the same letters
        str(folder.parent),
        "../forbidden",
        "good/../../forbidden",
        "good/../good",
        f"{folder}/../forbidden",
        "outward",
        str(folder / "outward"),
        "outward/.",
        "leaky",
        "leaky-text",
        "/",
        "/etc",
        "/no/such/place",
        "",
        "\0",
        "good\0",
    ]
    for path in paths:
        found = load(served.client, path)
        error = found.json()["error"]
        # The same for what is there and what is not: nobody learns about the machine by asking.
        assert (found.status_code, error["code"], error["param"]) == (403, "not_allowed", "lora_path"), path
        assert error["type"] == "permission_error"


def test_what_is_not_there(served: Served) -> None:
    for path in ("missing", "file", "loop", "good/deeper", "x" * 5000, "org/name", "~", "https://example.com/x"):
        found = load(served.client, path)
        assert (found.status_code, found.json()["error"]["param"]) == (404, "lora_path"), path
    assert load(served.client, "empty").status_code == 404
    assert load(served.client, "damaged").status_code == 400


def test_a_template_of_an_adapters_own(served: Served, folder: Path) -> None:
    found = load(served.client, "texted")
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (400, "unsupported")
    assert error["message"].startswith("texted has a chat template of its own")
    assert str(folder) not in found.text


def test_half_a_surrogate_pair(served: Served) -> None:
    for body in (rb'{"lora_name": "a", "lora_path": "\ud800"}', rb'{"lora_name": "\ud800", "lora_path": "good"}'):
        found = served.client.post("/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"})
        assert found.status_code in (400, 403)


def test_without_directories_only_bundled_ones(llm: AsyncLLM, folder: Path) -> None:
    with serving(llm) as served:
        assert load(served.client, str(folder / "good")).status_code == 403
        assert load(served.client, "good").status_code == 403
        assert load(served.client, NAME).status_code == 200
        assert unload(served.client).status_code == 200


def test_several_directories(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "good", tmp_path / "mine")
    (tmp_path / "across").symlink_to(folder / "good")
    folders = (folder, tmp_path)
    assert allowed_path("mine", folders) == Path(os.path.realpath(tmp_path / "mine"))
    assert allowed_path("good", folders) == Path(os.path.realpath(folder / "good"))
    assert allowed_path("across", folders) == Path(os.path.realpath(folder / "good"))
    with pytest.raises(ApiError):
        allowed_path("across", (tmp_path,))


def test_a_directory_that_is_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert allowed_path("good", (tmp_path / "link",)) == Path(os.path.realpath(folder / "good"))
    assert allowed_path(str(tmp_path / "link" / "good"), (tmp_path / "link",)) == Path(
        os.path.realpath(folder / "good")
    )


# -- names -----------------------------------------------------------------------------------------


def test_an_adapter_is_a_model(served: Served, folder: Path) -> None:
    client = served.client
    card = load(client, "good", "docs/v1").json()
    assert client.get("/v1/models").json()["data"][1] == card
    assert client.get("/v1/models/docs/v1").json() == card
    assert (card["id"], card["parent"], card["root"]) == ("docs/v1", "tiny-python", "good")
    assert client.post("/tokenize", json={"prompt": "x", "model": "docs/v1"}).status_code == 200
    assert served.context.adapter_of("docs/v1") == "docs/v1"
    assert unload(client, "docs/v1").json() == {"id": "docs/v1", "deleted": True}
    assert client.post("/tokenize", json={"prompt": "x", "model": "docs/v1"}).status_code == 404
    assert client.get("/v1/models/docs/v1").status_code == 404


def test_names_that_are_refused(served: Served) -> None:
    client = served.client
    for name in ("", " ", "a\nb", "x" * 257, 3, None):
        found = load(client, "good", name)
        assert (found.status_code, found.json()["error"]["param"]) == (400, "lora_name")
    found = load(client, "good", "tiny-python")
    assert (found.status_code, found.json()["error"]["param"]) == (409, "lora_name")
    assert load(client, "good").status_code == 200
    found = load(client, "good")
    assert (found.status_code, found.json()["error"]["code"]) == (409, "already_exists")
    assert names(client) == ["tiny-python", "a"]
    assert unload(client).status_code == 200
    found = unload(client)
    assert (found.status_code, found.json()["error"]["param"]) == (404, "lora_name")


def test_an_adapter_in_use_stays(served: Served) -> None:
    async def run() -> None:
        async with await served.llm.session(PROMPT, adapter="a"):
            found = await asyncio.to_thread(unload, served.client)
            assert (found.status_code, found.json()["error"]["code"]) == (409, "failed_precondition")
        assert served.context.adapter_of("a") == "a"

    assert load(served.client, "good").status_code == 200
    asyncio.run(run())
    assert unload(served.client).status_code == 200


def test_what_others_loaded_is_listed(served: Served) -> None:
    async def outputs(adapter: str | None) -> list[int]:
        (output,) = await served.llm.generate(PROMPT, PARAMS, adapter=adapter)
        return output.outputs[0].token_ids

    asyncio.run(served.llm.load_adapter("aside", NAME))
    assert names(served.client) == ["tiny-python", "aside"]
    assert served.context.adapter_of("aside") == "aside"
    assert load(served.client, "good").status_code == 200
    assert asyncio.run(outputs("a")) == asyncio.run(outputs("aside")) != asyncio.run(outputs(None))
    for name in ("a", "aside"):
        assert unload(served.client, name).status_code == 200


def test_adapters_of_the_start() -> None:
    llm = AsyncLLM("tiny-python", adapters={"docs": NAME}, **OPTIONS)
    try:
        with serving(llm) as served:
            assert served.context.adapter_of("docs") == "docs"
            assert names(served.client) == ["tiny-python", "docs"]
    finally:
        asyncio.run(llm.close())


def test_adapters_belong_to_their_keys(llm: AsyncLLM, folder: Path) -> None:
    """Another key neither sees, uses, replaces nor unloads them, and has the same names to give."""
    asyncio.run(llm.load_adapter("all", NAME))
    settings = ServerSettings(api_key=("one", "two"), adapter_dir=(folder,), max_adapters_per_key=2)
    try:
        with serving(llm, settings, authorization="Bearer one") as served:
            one = served.client
            two = httpx.Client(
                base_url=served.url, timeout=60, trust_env=False, headers={"authorization": "Bearer two"}
            )
            complete = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            texts = {
                name: one.post("/v1/completions", json={**complete, "model": name}).json()["choices"][0]["text"]
                for name in ("tiny-python", "all")
            }
            with two:
                assert load(one, "good", "secret-name").status_code == 200
                assert names(one) == ["tiny-python", "all", "secret-name"]
                assert names(two) == ["tiny-python", "all"]
                for method, path, body in (
                    ("POST", "/v1/completions", {**complete, "model": "secret-name"}),
                    ("GET", "/v1/models/secret-name", None),
                    ("POST", "/v1/unload_lora_adapter", {"lora_name": "secret-name"}),
                    ("POST", "/v1/sessions", {"prompt": PROMPT, "model": "secret-name"}),
                ):
                    answer = two.request(method, path, json=body)
                    assert (answer.status_code, answer.text.count("secret-name")) == (404, 1), "what was asked for"
                session = two.post("/v1/sessions", json={"prompt": PROMPT}).json()["id"]
                answer = two.post(f"/v1/sessions/{session}/adapter", json={"name": "secret-name"})
                assert (answer.status_code, answer.text.count("secret-name")) == (404, 1)
                # The same name stands for another adapter of another key.
                assert load(two, NAME, "secret-name").status_code == 200
                assert (
                    two.post("/v1/completions", json={**complete, "model": "secret-name"}).json()["choices"][0]["text"]
                    == texts["all"]
                )
                assert two.post(f"/v1/sessions/{session}/adapter", json={"name": "secret-name"}).status_code == 200
                assert two.get(f"/v1/sessions/{session}").json()["adapter"] == "secret-name"
                assert two.delete(f"/v1/sessions/{session}").status_code == 200
                # What is for all, no key replaces or unloads.
                assert load(two, "good", "all").json()["error"]["code"] == "already_exists"
                refused = unload(two, "all")
                assert (refused.status_code, refused.json()["error"]["code"]) == (409, "failed_precondition")
                # A key has so many, whatever another has.
                assert load(two, "good", "more").status_code == 200
                refused = load(two, "good", "too many")
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "adapter_limit")
                assert load(one, "good", "more").status_code == 200
                for client in (one, two):
                    assert [unload(client, name).status_code for name in ("secret-name", "more")] == [200, 200]
                    assert names(client) == ["tiny-python", "all"]
    finally:
        asyncio.run(llm.unload_adapter("all"))
