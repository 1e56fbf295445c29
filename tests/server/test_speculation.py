"""Speculation over HTTP: the same texts, whole and streamed, a switch for each request, counts in
the answer and in the metrics.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.speculation.test_speculation import Everything

from quire import AsyncLLM

from .conftest import OPTIONS, Served, serving

PROMPT = "def area(width, height):\n    return width * height\n\n" * 3
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafting(plain_folder: Path) -> Iterator[Served]:
    llm = AsyncLLM(plain_folder, speculative="lookup", **OPTIONS)
    drafts = llm.engine.requests.drafts
    assert drafts is not None
    drafts.controller = Everything()
    with serving(llm) as found:
        yield found
    asyncio.run(llm.close())


def test_the_text_is_the_same_and_the_counts_are_told(drafting: Served) -> None:
    plain = drafting.client.post("/v1/completions", json={**BODY, "speculative": False}).json()
    drafted = drafting.client.post("/v1/completions", json=BODY).json()
    assert drafted["choices"] == plain["choices"]
    assert drafted["usage"]["completion_tokens"] == 40
    assert "speculation" not in plain["quire"]
    counts = drafted["quire"]["speculation"]
    assert 0 < counts["accepted"] <= counts["drafted"]
    assert counts["steps"] < 40
    assert counts["by_proposer"] == {"lookup": {key: counts[key] for key in ("drafted", "accepted")}}
    metrics = drafting.client.get("/metrics").text
    assert f"quire:drafted_tokens_total {float(counts['drafted'])}" in metrics
    assert f"quire:accepted_tokens_total {float(counts['accepted'])}" in metrics


def test_streams_bring_several_tokens_at_once(drafting: Served) -> None:
    whole = drafting.client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    with drafting.client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == whole
    assert any(chunk.get("quire", {}).get("speculation") for chunk in chunks)


def test_a_value_that_is_no_switch_is_refused(drafting: Served) -> None:
    answer = drafting.client.post("/v1/completions", json={**BODY, "speculative": "lookup"})
    assert answer.status_code == 400
    assert "speculative" in answer.json()["error"]["message"]


def test_exact_tokens_are_asked_for_by_name(drafting: Served) -> None:
    plain = drafting.client.post("/v1/completions", json=BODY).json()
    exact = drafting.client.post("/v1/completions", json={**BODY, "exact": True}).json()
    assert exact["choices"][0]["text"] == plain["choices"][0]["text"]
    answer = drafting.client.post("/v1/completions", json={**BODY, "exact": "yes"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "exact"
