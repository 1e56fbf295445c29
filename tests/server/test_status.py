"""Health, version, metrics, models, tokens."""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import AsyncLLM, SamplingParams
from quire.base.metrics import EngineMetrics
from quire.executor.counters import HELP
from quire.runner.local import LocalRunner
from quire.server.http import status
from quire.server.http.settings import ServerSettings

from .conftest import OPTIONS, Served, serving


def error_of(response: httpx.Response) -> dict[str, object]:
    found = response.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    return found["error"]  # type: ignore[no-any-return]


# -- health ----------------------------------------------------------------------------------------


def test_health(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/version").json() == {"version": metadata.version("quire")}


def test_health_of_a_server_that_stops(llm: AsyncLLM) -> None:
    with serving(llm) as served:
        served.context.gate.close()
        found = served.client.get("/health")
        assert (found.status_code, error_of(found)["code"]) == (503, "shutting_down")
        assert served.client.get("/metrics").status_code == 200
        found = served.client.get("/v1/models")
        assert (found.status_code, error_of(found)["code"]) == (503, "shutting_down")


def test_health_of_an_engine_that_is_gone() -> None:
    llm = AsyncLLM("tiny-python", **OPTIONS)
    with serving(llm) as served:
        assert served.client.get("/health").status_code == 200
        asyncio.run(llm.close())
        found = served.client.get("/health")
        assert (found.status_code, error_of(found)["code"]) == (503, "unhealthy")


def test_health_of_an_engine_that_lost_a_rank(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRunner, "fault", "a process that holds a part of the model has ended")
    found = served.client.get("/health")
    assert (found.status_code, error_of(found)["code"]) == (503, "unhealthy")
    assert "a part of the model has ended" in error_of(found)["message"]
    monkeypatch.undo()
    assert served.client.get("/health").status_code == 200


def test_health_of_an_engine_that_is_stuck(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "HEALTH_SECONDS", 0.1)
    with served.llm.engine.lock:
        for _ in range(3):
            found = served.client.get("/health")
            assert (found.status_code, error_of(found)["code"]) == (503, "unhealthy")
        assert served.client.get("/version").status_code == 200  # the event loop goes on
    monkeypatch.undo()
    assert served.client.get("/health").status_code == 200


# -- metrics ---------------------------------------------------------------------------------------


def numbers(client: httpx.Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = client.get("/metrics")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(found.text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in values
            values[key] = sample.value
    return values


def test_metrics_have_exactly_these_names(served: Served) -> None:
    found = numbers(served.client)
    families = EngineMetrics().collect()
    wanted = {(sample.name, tuple(sorted(sample.labels))) for family in families for sample in family.samples}
    own = {"quire:http_requests_under_way", "quire:sessions_open"}
    stored = served.llm.engine.stored.collect()
    wanted |= {(sample.name, tuple(sorted(sample.labels))) for family in stored for sample in family.samples}
    assert {key for key in found if key[0].startswith("quire:")} == wanted | {(name, ()) for name in own | set(HELP)}
    text = served.client.get("/metrics").text
    for name, help in HELP.items():
        assert f"# HELP {name} {help}\n" in text
        assert f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n" in text
    for family in families:
        assert f"# TYPE {family.name} {family.type}\n" in text
        assert f"# HELP {family.name} {family.help}\n" in text


def test_names_that_boards_for_vllm_know(served: Served) -> None:
    """The numbers are those of Quire's own names, under vLLM's label and reasons."""
    asyncio.run(served.llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
    found = numbers(served.client)
    second = {key: value for key, value in found.items() if key[0].startswith("vllm:")}
    assert {dict(labels).pop("model_name") for _, labels in second} == {"tiny-python"}

    def value(name: str, *labels: tuple[str, str]) -> float:
        return found[(f"vllm:{name}", tuple(sorted([("model_name", "tiny-python"), *labels])))]

    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert value(name) == found[(f"quire:{name}", ())]
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time"):
        assert value(f"{name}_seconds_count") == found[(f"quire:{name}_seconds_count", ())] > 0
        bucket = f"{name}_seconds_bucket"
        assert value(bucket, ("le", "+Inf")) == found[(f"quire:{bucket}", (("le", "+Inf"),))]
    for name in ("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"):
        assert value(f"{name}_sum") == found[(f"quire:{name}_sum", ())] > 0
    for name in ("request_prompt_tokens", "request_generation_tokens"):
        assert value(f"{name}_sum") >= 5
    assert value("generation_tokens_total") == found[("quire:generation_tokens_total", ())]
    assert (
        value("prefix_cache_queries_total") == value("prompt_tokens_total") == found[("quire:prompt_tokens_total", ())]
    )
    assert value("prefix_cache_hits_total") == found[("quire:prompt_tokens_cached_total", ())]
    reasons = {dict(labels)["finished_reason"] for name, labels in second if name == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}


def test_the_parts_of_a_request_make_its_time(served: Served) -> None:
    def sums() -> list[float]:
        found = numbers(served.client)
        names = ("request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency")
        return [found[(f"quire:{name}_seconds_sum", ())] for name in names]

    before = sums()
    asyncio.run(served.llm.generate("class A:", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)))
    *parts, whole = (after - old for after, old in zip(sums(), before, strict=True))
    assert all(part > 0 for part in parts)
    assert sum(parts) <= whole < sum(parts) + 0.1  # what follows the last token: its text


def test_metrics_count(served: Served) -> None:
    def value(name: str, **labels: str) -> float:
        return found[(f"quire:{name}", tuple(sorted(labels.items())))]

    found = numbers(served.client)
    tokens, success = value("generation_tokens_total"), value("request_success_total", finished_reason="length")
    asyncio.run(served.llm.generate("def fib(n):", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
    found = numbers(served.client)
    assert value("generation_tokens_total") == tokens + 5
    assert value("request_success_total", finished_reason="length") == success + 1
    assert value("time_to_first_token_seconds_count") == value("time_to_first_token_seconds_bucket", le="+Inf") > 0
    assert value("pages_evictable") > 0  # of the prefix cache, which is not in use
    assert value("kv_cache_usage_perc") == value("pages_held") == value("pages_pinned") == 0
    assert value("num_requests_running") == 0


# -- models ----------------------------------------------------------------------------------------


def test_models(served: Served) -> None:
    found = served.client.get("/v1/models").json()
    assert found["object"] == "list"
    (card,) = found["data"]
    assert card.pop("created") == pytest.approx(time.time(), abs=600)
    assert card == {
        "id": "tiny-python",
        "object": "model",
        "owned_by": "quire",
        "root": "tiny-python",
        "parent": None,
        "max_model_len": 4096,
        "weight_formats": ["BF16"],
        "weight_formats_kept": [],
    }
    assert served.client.get("/v1/models/tiny-python").json()["id"] == "tiny-python"
    for name in ("tiny", "tiny-python/x", "a/b", "%00", "é"):
        refused = served.client.get(f"/v1/models/{name}")
        assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")
        assert error_of(refused)["param"] == "model"


def test_another_name(chat_llm: AsyncLLM, chat_folder: Path) -> None:
    with serving(chat_llm, ServerSettings(served_model_name="acme/tiny")) as served:
        card = served.client.get("/v1/models/acme/tiny").json()
        assert (card["id"], card["root"]) == ("acme/tiny", chat_folder.name)
        assert served.client.get(f"/v1/models/{chat_folder}").status_code == 404


def test_embeddings_are_refused(client: httpx.Client) -> None:
    found = client.post("/v1/embeddings", json={"model": "tiny-python", "input": "x"})
    assert (found.status_code, error_of(found)["code"]) == (400, "unsupported")
    assert "embeddings" in str(error_of(found)["message"])


# -- tokens ----------------------------------------------------------------------------------------

TEXTS = ("def fib(n):\n    return n\n", "", "naïve 你好 👩‍👩‍👧‍👦\x00", "<|user|>x<|end|>", "a" * 3000)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_there_and_back(served: Served, text: str) -> None:
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    found = served.client.post(
        "/tokenize", json={"model": "tiny-python", "prompt": text, "return_token_strs": True}
    ).json()
    ids = tokenizer.encode(text)
    strings = found.pop("token_strs")
    assert found == {"count": len(ids), "max_model_len": 4096, "tokens": ids}
    assert strings == [tokenizer.token_text(token) for token in ids]
    back = served.client.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": text, "content": text}


def test_tokens_of_messages(chat_served: Served) -> None:
    tokenizer = chat_served.llm.tokenizer
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for generation, end in ((True, "<|assistant|>"), (False, "")):
        body = {"messages": messages, "add_generation_prompt": generation}
        found = chat_served.client.post("/tokenize", json=body).json()
        text = f"<|user|>hi<|end|><|assistant|>ho<|end|>{end}"
        assert found["tokens"] == tokenizer.encode(text, add_special_tokens=False)
        assert found["token_strs"] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": []}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"messages": "x"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": []}, None),
        ({"messages": [{"content": "\ud800"}]}, None),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs.messages",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_what_tokenize_refuses(chat_client: httpx.Client, body: dict[str, object], param: str | None) -> None:
    import json

    found = chat_client.post("/tokenize", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert error_of(found)["param"] == param


def test_tokenize_for_a_model_that_is_not_there(client: httpx.Client) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert client.post(path, json={**body, "model": "tiny-python"}).status_code == 200
        found = client.post(path, json={**body, "model": "gpt-4"})
        assert (found.status_code, error_of(found)["code"], error_of(found)["param"]) == (
            404,
            "model_not_found",
            "model",
        )


@pytest.mark.parametrize("token", [-1, 4096, 2**70, 1.5, True, "3", None])
def test_what_detokenize_refuses(client: httpx.Client, token: object) -> None:
    found = client.post("/detokenize", json={"tokens": [5, token]})
    assert (found.status_code, error_of(found)["param"]) == (400, "tokens.1")


def test_messages_without_a_template(plain_client: httpx.Client) -> None:
    found = plain_client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
    assert found.status_code == 400
    assert "chat template" in str(error_of(found)["message"])
