"""``quire inspect`` of a store, and the survey that it prints."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import run

from quire import LLM
from quire.store.files import FileTier
from quire.store.survey import Survey, survey


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path]]:
    """An LLM and its ``state_dir``, in which there are three branches."""
    directory = tmp_path_factory.mktemp("kept")
    llm = LLM("tiny-python", dtype="float32", kv_cache_memory="16MiB", state_dir=directory)
    session = llm.session("def add(a, b):\n    return a + b\n" * 25, name="adder")
    session.commit("main", "first")
    child = session.fork()
    session.append("x = 1\n")
    session.commit("main", "second")
    child.append("y = 2\n")
    child.commit("other")
    llm.session("class A:\n    pass\n" * 10, window=64, sink=4).commit("windowed")
    yield llm, directory
    llm.close()


def surveyed(directory: Path) -> Survey:
    async def look() -> Survey:
        tier = FileTier(directory / "store", None)
        try:
            return await survey(tier)
        finally:
            await tier.close()

    return asyncio.run(look())


def test_a_survey_is_what_the_llm_says(kept: tuple[LLM, Path]) -> None:
    llm, directory = kept
    found = surveyed(directory)
    assert {name: one.commit.id for (_, name), one in found.branches().items()} == {
        name: commit.id for name, commit in llm.branches().items()
    }
    (first,) = (one for one in found.commits if one.commit.message == "first")
    assert first.branches == ()
    assert (found.total, found.damaged) == (4, ())
    for (_, name), one in found.branches().items():
        session = llm.checkout(name)
        assert one.ids.tolist() == session.tokens
        session.close()
        assert one.there == {piece.key for piece in one.pieces}
        # The last token of a session is run when it is needed.
        assert one.computed in (len(one.ids) - 1, len(one.ids))
    main = found.branches()["", "main"]
    assert len(main.pieces) > 1
    assert [piece.start for piece in main.pieces] == list(range(0, main.computed, 256))
    assert found.branches()["", "windowed"].stops == [found.branches()["", "windowed"].computed]


def test_what_is_gone_or_damaged_is_said_and_the_rest_is_shown(kept: tuple[LLM, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(kept[1], copy)
    whole = surveyed(copy)
    main, windowed = whole.branches()["", "main"], whole.branches()["", "windowed"]

    def file_of(name: str) -> Path:
        (found,) = (copy / "store" / "objects").glob(f"*/{name}.quire")
        return found

    first, *_ = main.pieces
    file_of(first.key.name).unlink()
    (windowed_commit,) = (copy / "store" / "objects").glob(f"*/*{windowed.commit.id}.quire")
    data = bytearray(windowed_commit.read_bytes())
    data[-20] ^= 1
    windowed_commit.write_bytes(data)
    for index in (copy / "store").glob("index-*"):
        index.unlink()
    found = surveyed(copy)
    assert found.branches()["", "main"].computed == 0
    assert first.key not in found.branches()["", "main"].there
    assert set(found.branches()) == {("", "main"), ("", "other")}
    assert len(found.damaged) == 2
    assert any(f"branch 'windowed' stands at commit {windowed.commit.id[:12]}" in told for told in found.damaged)


@pytest.mark.parametrize("form", ["state_dir", "directory", "url"])
def test_the_command_prints_it(
    form: str, kept: tuple[LLM, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm, directory = kept
    target = {"state_dir": f"{directory}", "directory": f"{directory}/store", "url": f"file://{directory}/store"}[form]
    assert run("inspect", target, "--json", monkeypatch=monkeypatch) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {one["branch"]: one["commit"] for one in found["branches"]} == {
        name: commit.id for name, commit in llm.branches().items()
    }
    assert all(one["objects"] == one["objects_there"] > 0 for one in found["branches"])
    assert run("inspect", target, monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "windowed" in out
    assert all(one["commit"][:12] in out for one in found["branches"])


def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, told in (
        (str(tmp_path), "holds no store"),
        (f"file://{tmp_path}/typo", "does not exist"),
        ("memory://1GiB", "outlives the process"),
        ("redis://127.0.0.1:1", "127.0.0.1:1"),
        ("http://127.0.0.1", "no tier of scheme 'http'"),
    ):
        assert run("inspect", target, monkeypatch=monkeypatch) == 2
        out, err = capsys.readouterr()
        assert told in err
        assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == [], "nothing was made"
