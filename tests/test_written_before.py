"""State files, stores and journals that Quire wrote before its schemas were structs are still read.

``written_before.zip`` has them, of the bundled model, and the metadata of files of many models.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.statefile.schema import KINDS, check_metadata
from quire.store.journal import SessionJournal

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    with zipfile.ZipFile(Path(__file__).with_name("written_before.zip")) as file:
        file.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def told(before: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((before / "expected.json").read_text())
    return found


@pytest.fixture(scope="module")
def llm(before: Path) -> Any:
    with LLM(
        "tiny-python",
        dtype="float32",
        kv_cache_memory="64MiB",
        max_model_len=512,
        store=[f"file://{before}/store"],
        state_dir=str(before / "journal"),
    ) as made:
        yield made


def test_files_of_sessions(llm: LLM, before: Path, told: dict[str, Any]) -> None:
    for name, tokens, text in (
        ("session", told["tokens"][:6], told["session_next"]),
        ("windowed", told["windowed"], told["windowed_next"]),
        ("written", told["written"], told["written_next"]),
    ):
        with llm.load_session(before / f"{name}.quire") as session:
            assert session.tokens == tokens
            assert session.generate(GREEDY).outputs[0].text == text
            assert session.modified == (name == "written")


def test_files_of_caches(llm: LLM, before: Path) -> None:
    for name, rows in (("cache", 2), ("placed", 1)):
        cache = llm.executor.create_kv_cache(batch_size=rows)
        data = (before / f"{name}.quire").read_bytes()
        cache.load(data)
        assert cache.serialize() == data


def test_commits(llm: LLM, told: dict[str, Any]) -> None:
    (found,) = llm.branches().values()
    assert (found.message, found.session, found.labels) == ("as it was", "plain", {"task": "42"})
    with llm.checkout("first") as session:
        assert session.tokens == told["tokens"]
        assert session.generate(GREEDY).outputs[0].text == told["next"]


def test_journals(before: Path, tmp_path: Path, told: dict[str, Any]) -> None:
    with zipfile.ZipFile(Path(__file__).with_name("written_before.zip")) as file:
        file.extractall(tmp_path)
    journal = SessionJournal(tmp_path / "journal")
    found = {one.name: one for one in journal.records()}
    assert found["plain"].tokens.tolist() == told["tokens"]
    assert found["plain"].labels == {"task": "42"}
    assert found["plain"].commit is not None
    assert found["windowed"].window == [8, 2]
    assert found["written"].state is not None
    assert journal.state_path(found["written"]).exists()
    assert found["plain"].lifetime.left is None
    journal.close()
    assert not list((tmp_path / "journal").glob("*damaged*"))


def test_metadata_of_many_models(before: Path) -> None:
    found = json.loads((before / "metadata.json").read_text())
    assert {one["kind"] for one in found} == set(KINDS)
    for one in found:
        check_metadata(one, tuple(KINDS))
