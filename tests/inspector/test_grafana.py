"""The dashboard: every query is over names and labels that ``/metrics`` has, and has data after a
few requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.conftest import Served, llm, served

__all__ = ["llm", "served"]

BOARD = Path(__file__).parents[2] / "deploy/grafana/quire.json"
SELECTOR = re.compile(r"(?<![\w:])((?:quire|vllm):\w+)\{([^}]*)\}")
BY = re.compile(r"by \(([^)]*)\)")
WORDS = re.compile(r"[a-zA-Z_]\w*")
FUNCTIONS = {"sum", "by", "rate", "increase", "max", "histogram_quantile", "le"}


def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


@pytest.fixture(scope="module")
def found(served: Served) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, after two requests with the same prompt."""
    for _ in range(2):
        body = {"prompt": "def fib(n):\n    return 1", "max_tokens": 8, "temperature": 0}
        served.client.post("/v1/completions", json=body).raise_for_status()
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(served.client.get("/metrics").text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def test_every_query_finds_samples(found: dict[str, list[tuple[dict[str, str], float]]]) -> None:
    used = set()
    for title, query, legend in queries():
        selectors = SELECTOR.findall(query)
        assert selectors, title
        for name, matchers in selectors:
            assert matchers == 'instance=~"$instance"', f"{title}: {query}"
            assert name in found, f"{title}: /metrics has no {name}"
            labels = set().union(*(set(labels) for labels, _ in found[name]))
            wanted = {label.strip() for by in BY.findall(query) for label in by.split(",")}
            wanted |= set(re.findall(r"\{\{(\w+)\}\}", legend))
            assert wanted <= labels, f"{title}: {name} has {labels}, not {wanted}"
            if "rate(" in query or "increase(" in query:
                assert name.endswith(("_total", "_bucket", "_sum", "_count")), f"{title}: {name} is no counter"
            used.add(name)
        rest = SELECTOR.sub("", query).replace("$__rate_interval", "")
        words = set(WORDS.findall(rest)) - FUNCTIONS - {label for by in BY.findall(query) for label in by.split(",")}
        assert not words, f"{title}: {words} in {query}"
    assert len(used) > 40


def test_quantiles_and_shares_have_something_to_divide_by(
    found: dict[str, list[tuple[dict[str, str], float]]],
) -> None:
    """Without a count the result is not a number, which Grafana shows as no data."""
    divided = 0
    for title, query, _ in queries():
        below = query.partition(" / ")[2] if " / " in query else query if "quantile" in query else ""
        for name, _ in SELECTOR.findall(below):
            assert sum(value for _, value in found[name]) > 0, f"{title}: nothing was counted in {name}"
            divided += 1
    assert divided > 15


def test_the_board_is_one_that_grafana_takes() -> None:
    document = board()
    assert document["uid"] == "quire"
    assert {one["name"] for one in document["templating"]["list"]} == {"datasource", "instance"}
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))
    places = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies over another panel"
        places |= cells
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs)) > 0
