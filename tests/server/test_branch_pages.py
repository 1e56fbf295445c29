"""``/v1/state/branch-pages``: the pages of one branch, in the order of its positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.documents import unpacked

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings

from .conftest import Served, serving
from .test_state_routes import fresh, got, session

TEXT = "def add(a, b):\n    return a + b\n" * 8
KEYS = ("first-key", "second-key")


@pytest.fixture
def served(llm: AsyncLLM) -> Iterator[Served]:
    with serving(llm) as found:
        yield found


def pages_of(served: Served, branch: str) -> tuple[list[int], list[int]]:
    found = got(served.client, f"/branch-pages?branch={branch}&pool=0")
    assert (found["branch"], found["pool"]) == (branch, 0)
    return unpacked(found["pages"], "i4").tolist(), unpacked(found["positions"], "i4").tolist()


def test_they_are_in_the_order_of_positions(served: Served) -> None:
    with session(served.client, prompt=TEXT) as name:
        fresh(served)
        pages, positions = pages_of(served, f"session:{name}")
        size = served.llm.engine.runner.state.page_size
        computed = next(one for one in got(served.client, "/history")["branches"] if one["id"] == f"session:{name}")
        assert positions == list(range(0, computed["computed"], size))
        assert len(set(pages)) == len(pages) == computed["pages"]
        for page, position in zip(pages, positions, strict=True):
            (holder,) = [
                one for one in got(served.client, f"/pages/0/{page}")["holders"] if one["branch"] == f"session:{name}"
            ]
            assert holder["start"] == position


def test_what_a_window_let_go_of_is_a_null_page(served: Served) -> None:
    with session(served.client, prompt=TEXT * 3, window=64, sink=4) as name:
        served.client.post(f"/v1/sessions/{name}/append", json={"text": TEXT})
        fresh(served)
        pages, positions = pages_of(served, f"session:{name}")
        branch = next(one for one in got(served.client, "/history")["branches"] if one["id"] == f"session:{name}")
        (held,) = [one["ranges"] for one in branch["held"] if one["pool"] == 0]
        size = served.llm.engine.runner.state.page_size
        rows = np.concatenate([np.arange(*one) for one in held])
        assert -1 in pages
        assert [page >= 0 for page in pages] == [bool(np.any(rows // size == one // size)) for one in positions]


def test_other_keys_and_unknown_ones_are_told_nothing(llm: AsyncLLM) -> None:
    first, second = ({"authorization": f"Bearer {key}"} for key in KEYS)
    with serving(llm, ServerSettings(api_key=KEYS)) as served:
        client = served.client
        name = client.post("/v1/sessions", json={"prompt": TEXT}, headers=first).json()["id"]
        fresh(served)
        path = f"/v1/state/branch-pages?branch=session:{name}"
        assert client.get(path, headers=first).status_code == 200
        refused = client.get(path, headers=second)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "branch")
        assert client.get(f"{path}&pool=7", headers=first).json()["error"]["param"] == "pool"
        client.delete(f"/v1/sessions/{name}", headers=first)
