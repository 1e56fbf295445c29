"""``quire state`` on a directory that an LLM is using, without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import run

from quire import LLM, NotFound
from quire.cli.store_tables import fact_for_people
from quire_inspector.files import known_tokenizers


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, str]]:
    """An LLM, and the URL of its store, in which a session and a branch of it were committed."""
    directory = tmp_path_factory.mktemp("state") / "store"
    llm = LLM("tiny-python", dtype="float32", kv_cache_memory="16MiB", store=[f"file://{directory}"])
    session = llm.session("def add(a, b):\n    return a + b\n" * 4, name="adder")
    session.commit("main", "first")
    child = session.fork()
    session.append("x = 1\n")
    session.commit("main", "second")
    child.append("y = 2\n")
    child.commit("other")
    yield llm, f"file://{directory}"
    llm.close()


class Shell:
    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._url, self._patch, self._capsys = url, monkeypatch, capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        assert run("state", *words, "--store", self._url, monkeypatch=self._patch) == code
        out, err = self._capsys.readouterr()
        return str(out if code == 0 else err)

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def shell(used: tuple[LLM, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(used[1], monkeypatch, capsys)


def test_looking(used: tuple[LLM, str], shell: Shell) -> None:
    llm, _ = used
    main, first = llm.log("main")
    listed = shell.json("ls")
    assert [(one["branch"], one["commit"]) for one in listed] == [
        ("main", main.id),
        ("other", llm.branches()["other"].id),
    ]
    assert "second" in shell("ls", "--all")
    assert [one["commit"] for one in shell.json("log", "main")] == [main.id, first.id]
    assert first.id[:12] in shell("log", main.id[:10])
    wanted, found = llm.diff("main", "other"), shell.json("diff", "main", "other")
    assert found == {
        "a": main.id,
        "b": wanted.b.id,
        "base": first.id,
        **{
            name: getattr(wanted, name) for name in ("common", "a_adds", "b_adds", "shared_bytes", "a_bytes", "b_bytes")
        },
    }
    assert f"{wanted.common} tokens and" in shell("diff", "main", "other")
    shown = shell.json("show", "main")
    assert shown["tokens"] == llm.checkout("main").tokens
    assert (shown["session"], shown["objects"], shown["objects_there"]) == ("adder", 1, 1)
    told = shell("show", "other")
    assert "objects there" in told
    assert f"{llm.log('other')[0].model['architecture']}, config " in told
    assert not {"{", "[", "None", "False"} & set(told.replace("'", " ").split())
    assert "return a + b" in shell("show", "other", "--text")
    parted = shell("diff", "main", "other", "--text")
    assert "x = 1" in parted
    assert "y = 2" in parted
    assert "leave out" not in shell("diff", "main", "main", "--text")
    assert "give one of them" in shell("diff", "main", "other", "--text", "--json", code=2)


def test_messages_do_not_steer_the_terminal(used: tuple[LLM, str], shell: Shell) -> None:
    llm, _ = used
    llm.session("q = 1\n").commit("steers", "\x1b[2Jgone\x9b")
    for words in (("ls",), ("log", "steers"), ("show", "steers")):
        told = shell(*words)
        assert "\\x1b[2Jgone\\x9b" in told
        assert not {"\x1b", "\x9b"} & set(told)
    llm.delete("steers")


def test_text_of_a_model_that_is_not_here(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_tokenizers, "_directories", lambda weights: [])
    assert "leave out --text to see token ids" in shell("show", "main", "--text", code=2)


def test_a_store_without_branches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "objects").mkdir()
    for words, told in ((["ls"], "there are no branches; --all"), (["ls", "--all"], "there are no branches\n")):
        assert run("state", *words, "--store", f"file://{tmp_path}", monkeypatch=monkeypatch) == 0
        assert told in capsys.readouterr().out


def test_copies_and_removals_while_the_llm_commits(used: tuple[LLM, str], shell: Shell, tmp_path: Path) -> None:
    llm, _ = used
    other = f"file://{tmp_path / 'other'}"
    assert "2 new commits, 2 objects" in shell("push", "main", other)
    assert "0 new commits, 0 objects of 0 bytes sent, 2 were there" in shell("push", "main", other)
    session = llm.session("z = 3\n" * 12)
    session.commit("here")
    llm.push("here", other)
    assert "branch here is gone" in shell("rm", "here")
    assert "no branch 'here'" in shell("log", "here", code=2)
    assert "8 digits are needed" in shell("show", "24c7", code=2)
    assert "no branch '24c7f00d', and no commit whose id begins so" in shell("show", "24c7f00d", code=2)
    assert "0 commits, 0 objects" in shell("gc"), "what is young stays"
    with pytest.raises(NotFound):
        llm.checkout("here")
    assert "1 objects" not in shell("pull", "here", other)
    assert llm.checkout("here").tokens == session.tokens
    session.append("w = 4\n")
    session.commit("here")
    assert "no earlier state" not in shell("ls")
    assert "from which this is no continuation" in shell("pull", "here", other, code=2)
    assert "branch here in directory" in shell("pull", "here", other, "--force")


def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, told in (
        (["ls"], "give --store URL, or --state-dir DIR"),
        (["ls", "--store", "memory://1GiB"], "outlives the process"),
        (["ls", "--store", f"file://{tmp_path}/typo"], "does not exist"),
        (["ls", "--state-dir", f"{tmp_path}/typo"], "does not exist"),
        (["ls", "--store", f"file://{tmp_path}"], "has no 'objects'"),
        (["gc", "--store", f"file://{tmp_path}"], "has no 'objects'"),
        (["pull", "a", f"file://{tmp_path}/typo", "--store", f"file://{tmp_path}/new"], "does not exist"),
        (["log", "a", "--store", "redis://127.0.0.1:1"], "127.0.0.1:1"),
        (["ls", "--store", "nothing"], "quire: --store 'nothing' is no store"),
        (["ls", "--store", str(tmp_path)], f"; of a directory it is file://{tmp_path}"),
        (["pull", "a", "memory://1GiB", "--state-dir", f"{tmp_path}"], "URL 'memory://1GiB' is no store that"),
    ):
        assert run("state", *words, monkeypatch=monkeypatch) == 2
        out, err = capsys.readouterr()
        assert told in err
        assert (out, err.count("\n")) == ("", 1)
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_looking_needs_no_torch(used: tuple[LLM, str]) -> None:
    code = (
        "import sys\nfrom quire.cli import main as cli\n"
        f"sys.argv = ['quire', 'state', 'diff', 'main', 'other', '--store', {used[1]!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.splitlines()[-1] == "False"
    assert "own bytes" in found.stdout


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("message", "", "none"),
        ("labels", {}, "none"),
        ("labels", {"a": "b", "c": "d"}, "a=b, c=d"),
        ("bytes", 12345, "12,345"),
        ("num_tokens", 0, "0"),
        ("adapters", [[0, None], [7, "f" * 40]], f"none from token 0 on, {'f' * 16} from token 7 on"),
        ("window", [64, 4], "64 with sink 4"),
        ("modified", False, "no"),
        (
            "model",
            {"architecture": "Llama", "config": "c" * 40, "weights": "w"},
            f"Llama, config {'c' * 16}, weights w",
        ),
    ],
)
def test_facts_for_people(name: str, value: Any, told: str) -> None:
    assert fact_for_people(name, value) == told
