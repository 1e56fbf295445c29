"""State files and stores as views, and their page's server, without a model."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.cli.test_cli import run
from tests.documents import unpacked
from tests.executor.conftest import prompt
from tests.small_llms import Checkpoint, hybrid

from quire import LLM
from quire.base.errors import NotFound
from quire.statefile.container import read_state
from quire.store.files import FileTier
from quire.store.survey import survey
from quire_inspector.files.file_snapshot import PAGE, file_snapshot
from quire_inspector.files.snapshot import Snapshot
from quire_inspector.files.snapshot_server import FileSource, SnapshotSource, StoreSource, create_snapshot_app
from quire_inspector.files.store_snapshot import store_snapshot

__all__ = ["hybrid"]

TEXT = "def add(a, b):\n    return a + b\n"
KEY = "the-key"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM("tiny-python", dtype="float32", kv_cache_memory="32MiB", store=[f"file://{folder}/store"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def session_file(llm: LLM, folder: Path) -> Path:
    with llm.session(TEXT * 5) as session:
        session.save(folder / "adder.quire")
    return folder / "adder.quire"


@pytest.fixture(scope="module")
def rows_file(llm: LLM, folder: Path) -> Path:
    """A KV cache of two rows that have grown apart."""
    rows = llm.executor.create_kv_cache(batch_size=2)
    llm.executor.prefill(prompt([7, 8, 9, *range(20, 40)], [7, 8, 9, *range(30, 50)], kv_cache=rows))
    (folder / "rows.quire").write_bytes(rows.serialize())
    return folder / "rows.quire"


@pytest.fixture(scope="module")
def store(llm: LLM, folder: Path) -> Path:
    """A store of a branch of two commits, one that parts from it, and one of a window."""
    with llm.session(TEXT * 25, name="adder") as session:
        session.commit("main", "first")
        with session.fork() as child:
            child.append("y = 2\n")
            child.commit("other")
        session.append("x = 1\n")
        session.commit("main", "second")
    with llm.session(TEXT * 10, window=64, sink=4) as session:
        session.commit("windowed")
    return folder / "store"


def norms(snapshot: Snapshot, branch: str, layer: int) -> Any:
    return asyncio.run(_norms(snapshot, branch, layer))


async def _norms(snapshot: Snapshot, branch: str, layer: int) -> Any:
    return await snapshot.norms(snapshot.branch(branch), layer)


def held_in_file(path: Path, pool: int, row: int | None = None) -> set[int]:
    """The positions that a file itself says that a class of layers holds."""
    metadata: Any = read_state(path).metadata
    sequence = metadata["sequence"] if row is None else metadata["rows"][row]
    return {position for start, stop in sequence["held"][pool]["ranges"] for position in range(start, stop)}


def pages_of(positions: set[int]) -> set[int]:
    return {position // PAGE for position in positions}


# -- state files -----------------------------------------------------------------------------------


def test_a_session_is_what_its_file_says(session_file: Path, llm: LLM) -> None:
    found = file_snapshot(session_file)
    (branch,) = found.branches
    tokens = llm.tokenizer.encode(TEXT * 5)
    assert found.overview().document()["source"] == "file"
    assert (branch.view.id, branch.view.name, branch.view.num_tokens) == ("session:0", "adder", len(tokens))
    held = held_in_file(session_file, 0)
    assert {position for one in branch.view.held[0].ranges for position in one} == held
    assert branch.view.reachable == (range(branch.view.computed + 1),)
    pool = found.pool(0).document()
    assert pool["counts"] == {"free": 0, "evictable": 0, "held": len(pages_of(held)), "pinned": 0}
    assert unpacked(pool["position"], "i4").tolist() == [page * PAGE for page in sorted(pages_of(held))]
    assert unpacked(pool["references"], "u2").tolist() == [1] * len(pages_of(held))
    page = found.page(0, 1).document()
    assert [one["id"] for one in page["tokens"]] == tokens[PAGE : 2 * PAGE]
    texts = found.text("session:0").document()["tokens"]
    assert "".join(one["text"] for one in texts) == TEXT * 5
    (node,) = [one for one in found.history().document()["nodes"] if one["branches"]]
    assert (node["branches"], node["end"]) == (["session:0"], len(tokens))
    assert TEXT in node["head"]


def test_norms_are_those_of_the_tensors(session_file: Path, llm: LLM) -> None:
    found = norms(file_snapshot(session_file), "session:0", 3)
    file = read_state(session_file)
    for name in ("k", "v"):
        wanted = file.tensor(f"layer.3.{name}").norm(dim=-1).numpy()
        # float32 sums of 64 squares in another order
        np.testing.assert_allclose(found.norms[name], wanted, rtol=1e-5)
    assert found.positions.tolist() == sorted(held_in_file(session_file, 0))
    with pytest.raises(NotFound, match=r"no state of layer 8; there are 8, 0 to 7"):
        norms(file_snapshot(session_file), "session:0", 8)


def test_rows_of_a_cache_are_branches_of_one_tree(rows_file: Path) -> None:
    found = file_snapshot(rows_file)
    assert [one.view.id for one in found.branches] == ["cache:0", "cache:1"]
    nodes = found.history().document()["nodes"]
    shared = next(one for one in nodes if one["end"] == 3)
    assert sorted(one["branches"][0] for one in nodes if one["parent"] == shared["id"]) == ["cache:0", "cache:1"]
    compared = found.compare("cache:0", "cache:1").document()
    assert (compared["shared"], compared["a"]["id"], compared["b"]["id"]) == (3, 20, 30)
    assert compared["kl_ab"] is None
    held = [held_in_file(rows_file, 0, row) for row in (0, 1)]
    pool = found.pool(0).document()
    assert pool["counts"]["held"] == sum(len(pages_of(one)) for one in held)
    assert unpacked(pool["holder"], "i4").tolist() == [row for row in (0, 1) for _ in pages_of(held[row])]
    for row in (0, 1):
        wanted = read_state(rows_file).tensor(f"row.{row}.layer.0.k").norm(dim=-1).numpy()
        # float32 sums of 64 squares in another order
        np.testing.assert_allclose(norms(found, f"cache:{row}", 0).norms["k"], wanted, rtol=1e-5)


def test_what_a_window_let_go_of_is_a_hole(llm: LLM, folder: Path) -> None:
    with llm.session(TEXT, window=64, sink=4) as session:
        session.append(TEXT * 12)
        session.append(TEXT)
        session.save(folder / "windowed.quire")
        reachable = session_reach(llm, session)
    found = file_snapshot(folder / "windowed.quire")
    (branch,) = found.branches
    held = held_in_file(folder / "windowed.quire", 0)
    assert len(held) < branch.view.computed, "the window has let go of something"
    assert branch.view.window == (64, 4)
    assert list(branch.view.reachable) == reachable
    pool = found.pool(0).document()
    total = -(-branch.view.computed // PAGE)
    assert pool["counts"] == {
        "free": total - len(pages_of(held)),
        "evictable": 0,
        "held": len(pages_of(held)),
        "pinned": 0,
    }
    owners = unpacked(pool["owner"], "u1")
    holes = [page for page in range(total) if owners[page] == 0]
    assert holes == [page for page in range(total) if page not in pages_of(held)]
    assert unpacked(pool["references"], "u2")[holes].tolist() == [0] * len(holes)
    mine = found.branch_pages("session:0", 0).document()
    assert unpacked(mine["positions"], "i4").tolist() == [page * PAGE for page in range(total)]
    assert unpacked(mine["pages"], "i4").tolist() == [-1 if page in holes else page for page in range(total)]
    assert norms(found, "session:0", 0).positions.tolist() == sorted(held)


def session_reach(llm: LLM, session: Any) -> list[range]:
    """Where the engine says that a session can be rewound to."""
    history = llm.views.history().document()
    (branch,) = [one for one in history["branches"] if one["kind"] == "session"]
    assert branch["num_tokens"] == len(session)
    return [range(*one) for one in branch["reachable"]]


def test_recurrent_states_stand_at_their_positions(hybrid: Checkpoint, tmp_path: Path) -> None:
    """Where the file has a checkpoint, and at the end."""
    path = tmp_path / "hybrid.quire"
    with LLM(hybrid.path, device="cpu", dtype="float32", kv_cache_memory="16MiB") as llm:
        session = llm.session([index % 90 for index in range(70)])
        session.append([3, 4, 5])
        session.append([6, 7, 8])
        session.save(path)
        reachable = session_reach(llm, session)
    metadata: Any = read_state(path).metadata
    kept = sorted({*metadata["sequence"]["kept_recurrent_positions"], metadata["sequence"]["length"]})
    found = file_snapshot(path)
    (branch,) = found.branches
    assert list(branch.view.checkpoints) == kept
    assert len(kept) > 1
    assert list(branch.view.reachable) == reachable
    number = len(found.pools) - 1
    assert found.overview().document()["pools"][number]["kind"] == "states"
    assert unpacked(found.pool(number).document()["position"], "i4").tolist() == kept
    layer = metadata["sequence"]["recurrent"][0]["layer"]
    states = norms(found, "session:0", layer)
    assert states.positions.tolist() == kept
    present = read_state(path).tensor(f"layer.{layer}.state.0").float()
    # float32 sums in another order
    assert states.norms["state_0"][-1].sum() == pytest.approx(
        float((present.flatten(1) if present.dim() == 3 else present.reshape(1, -1)).norm(dim=-1).sum()), rel=1e-4
    )


# -- stores ----------------------------------------------------------------------------------------


def of_store(directory: Path, ask: Callable[[Snapshot], Any]) -> Any:
    async def look() -> Any:
        tier = FileTier(directory, None)
        try:
            found = ask(await store_snapshot(tier))
            return await found if asyncio.iscoroutine(found) else found
        finally:
            await tier.close()

    return asyncio.run(look())


def test_commits_of_a_store_share_objects(store: Path, llm: LLM) -> None:
    found: Snapshot = of_store(store, lambda one: one)
    heads = {name: f"commit:{one.id}" for name, one in llm.branches().items()}
    named = {one.view.name: one.view for one in found.branches}
    assert {name: named[name].id for name in heads} == heads
    assert named["main"].last_commit == named["first"].id.partition(":")[2]
    wanted = llm.diff("main", "other")
    compared = found.compare(heads["main"], heads["other"]).document()
    assert compared["shared"] == wanted.common
    assert [compared["a"]["id"], compared["b"]["id"]] == [wanted.a_adds[0], wanted.b_adds[0]]
    pool = found.pool(0).document()
    references = unpacked(pool["references"], "u2")
    assert references.max() == 3, "the first piece is that of three commits"
    assert pool["counts"]["pinned"] == references.size
    assert sum(references) == sum(one.view.pages for one in found.branches if one.view.window is None)
    assert named["main"].shared_pages < named["main"].pages
    assert named["windowed"].window == (64, 4)


def test_norms_of_a_commit_are_those_of_its_session(store: Path, llm: LLM) -> None:
    for name in ("main", "windowed"):
        head = f"commit:{llm.branches()[name].id}"
        found = of_store(store, lambda one, head=head: one.norms(one.branch(head), 2))
        with llm.checkout(name) as session:
            session.logits()
            wanted = session.norms(2)
        # The last token has run since, and a window has let go of others.
        common, mine, its = np.intersect1d(found.positions, wanted.positions, return_indices=True)
        assert common.size >= wanted.positions.size - 1
        # float32 sums of 64 squares in another order
        np.testing.assert_allclose(found.norms["k"][mine], wanted.norms["k"][its], rtol=1e-5)


def test_an_object_that_is_gone_is_a_hole(store: Path, llm: LLM, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    head = f"commit:{llm.branches()['main'].id}"
    before: Snapshot = of_store(copy, lambda one: one)
    first = before.branch(head).view
    (name,) = {
        piece.key.name
        for commit in asyncio.run(_surveyed(copy))
        for piece in commit.pieces
        if piece.start == 0 and piece.stop == 256
    }
    (path,) = (copy / "objects").glob(f"*/{name}.quire")
    path.unlink()
    for index in copy.glob("index-*"):
        index.unlink()
    after: Snapshot = of_store(copy, lambda one: one)
    assert after.branch(head).view.computed == 0 < first.computed
    assert after.branch(head).view.held[0].ranges[0].start == 256
    assert after.overview().document()["use"]["free"] == 1
    assert not after.shows(before)
    assert before.shows(of_store(store, lambda one: one))


async def _surveyed(directory: Path) -> Any:
    tier = FileTier(directory, None)
    try:
        return (await survey(tier)).commits
    finally:
        await tier.close()


# -- the server ------------------------------------------------------------------------------------


@contextmanager
def asked(make: Callable[[], SnapshotSource]) -> Iterator[Callable[..., httpx.Response]]:
    """Yield what asks an application for documents, with the key unless told otherwise."""
    loop = asyncio.new_event_loop()
    source = make()
    app = create_snapshot_app(source, hosts=frozenset({"127.0.0.1:80"}), key=KEY)

    def ask(path: str, method: str = "GET", **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            given = {"host": "127.0.0.1:80", "authorization": f"Bearer {KEY}", **headers}
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:80") as client:
                return await client.request(method, path, headers=given)

        return loop.run_until_complete(send())

    try:
        yield ask
    finally:
        loop.run_until_complete(source.close())
        loop.close()


def test_the_server_answers_what_it_has_and_refuses_the_rest_in_a_sentence(session_file: Path) -> None:
    with asked(lambda: FileSource(session_file)) as ask:
        for path in (
            "",
            "/history",
            "/pages",
            "/pages/0/0",
            "/branch-pages?branch=session:0",
            "/tiers",
            "/norms?branch=session:0&layer=0",
        ):
            answer = ask(f"/v1/state{path}")
            assert (answer.status_code, answer.json()["format"]) == (200, 1)
        assert len(ask("/v1/state/text?branch=session:0&start=2&stop=5").json()["tokens"]) == 3
        for path, status, told in (
            ("/timeline", 400, "those of a running server"),
            ("/token?branch=session:0&position=1", 400, "probabilities need the model"),
            ("/attention?branch=session:0&position=1&layer=0", 400, "attention weights need the model"),
            ("/text", 400, "branch must be given once"),
            ("/text?branch=session:7", 404, "no branch 'session:7'"),
            ("/text?branch=session:0&start=9999", 400, "start"),
            ("/pages?pool=3", 404, "there is no pool 3"),
            ("/pages?pool=x", 400, "pool"),
            ("/pages/0/9999", 404, "has no page 9999"),
            ("/norms?branch=session:0&layer=99", 404, "no state of layer 99"),
            ("/nothing", 404, "there is no /v1/state/nothing here"),
        ):
            answer = ask(f"/v1/state{path}")
            assert answer.status_code == status, path
            assert told in answer.json()["error"]["message"]
        page = ask("/", authorization="")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        assert ask("/inspector/main.js", authorization="").status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer other"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1:81"}, 421),
        ({"host": "127.0.0.1.evil.example:80"}, 421),
    ],
)
def test_only_who_has_the_key_and_asks_this_host_is_answered(
    headers: dict[str, str], status: int, session_file: Path
) -> None:
    with asked(lambda: FileSource(session_file)) as ask:
        answer = ask("/v1/state", **headers)
        assert answer.status_code == status
        assert "model" not in answer.json()
        for method in ("POST", "DELETE", "PUT"):
            assert ask("/v1/state", method).status_code == 405


def test_a_store_is_read_again_when_it_has_changed(llm: LLM, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_inspector.files.snapshot_server.LOOK_SECONDS", 0.0)
    monkeypatch.setattr("quire_inspector.files.snapshot_server.SHARE", 0)
    with asked(lambda: StoreSource(FileTier(store, None))) as ask:
        first = ask("/v1/state").json()
        assert (first["source"], first["reading"]) == ("store", 1)
        assert ask("/v1/state").json()["reading"] == 1
        with llm.session("z = 3\n") as session:
            session.commit("new")
        second = ask("/v1/state").json()
        assert second["reading"] == 2
        assert second["branches"]["commit"] == first["branches"]["commit"] + 1


def test_the_command_prints_an_address_and_ends_with_the_first_signal(session_file: Path) -> None:
    command = [sys.executable, "-m", "quire.cli.main", "inspect", str(session_file), "--open", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"Showing it at (http://127\.0\.0\.1:\d+)/#key=(\S{32}) \(Ctrl\+C stops\)\n", line)
        assert found is not None, line
        client = httpx.Client(base_url=found[1], trust_env=False)
        with (
            client,
            client.stream("GET", "/v1/state/events", headers={"authorization": f"Bearer {found[2]}"}) as events,
        ):
            lines = events.iter_lines()
            assert next(lines) == "event: changed"
            assert json.loads(next(lines).removeprefix("data: "))["reading"] == 1
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


def test_mistakes_are_one_sentence(
    session_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, told in (
            ([str(tmp_path / "none.quire"), "--open"], "none.quire"),
            ([str(session_file), "--open", "--json"], "exclude each other"),
            ([str(session_file), "--port", "7"], "--port is for --open"),
            ([str(session_file), "--no-browser"], "--no-browser is for --open"),
            ([str(session_file), "--open", "--no-browser", "--port", port], f"port {port}"),
            ([str(session_file), "--open", "--no-browser", "--port", "99999"], "99999"),
        ):
            assert run("inspect", *words, monkeypatch=monkeypatch) == 2
            out, err = capsys.readouterr()
            assert told in err
            assert (out, err.count("\n")) == ("", 1)
    # In another process: modules that were imported without it would stay with other tests.
    code = "import sys; sys.modules['uvicorn'] = None; sys.argv[0] = 'quire'; from quire.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(session_file), "--open", "--no-browser"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "quire inspect --open needs the package uvicorn, which is not installed" in done.stderr
    assert done.stderr.count("\n") == 1
