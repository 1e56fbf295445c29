"""Named sessions of a program outlive it: after a crash each is what it was when its last call
returned, and goes on with the tokens of a run without a crash.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.engine.test_media import image, rows_of
from tests.small_llms import Checkpoint, MakeLLM, attention_layer, check, greedy, make_checkpoint, random_tokens

from quire import LLM, AsyncLLM, InvalidArgument, NotFound, Session
from quire.base import interrupts
from quire.base.errors import FailedPrecondition, NotDurable
from quire.models.catalogue import bundled_adapters
from small_tokenizers import saved

from .test_session_chat import TEMPLATE, user

PROMPT = random_tokens(20)
Crash = Callable[[Path], Path]


@pytest.fixture
def crash(tmp_path: Path) -> Crash:
    """What a process that is killed now would leave behind, for the next one."""

    def copied(directory: Path) -> Path:
        copy = tmp_path / f"after-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(directory, copy, copy_function=copied_file)
        return copy

    def copied_file(source: str, target: str) -> None:
        with suppress(FileNotFoundError):  # of the store, which goes on
            shutil.copy2(source, target)

    return copied


def test_a_session_goes_on_after_a_crash(
    make_llm: MakeLLM, checkpoint: Checkpoint, tmp_path: Path, crash: Crash
) -> None:
    llm = make_llm(checkpoint, state_dir=tmp_path / "a")
    session = llm.session(PROMPT, name="one", labels={"task": "42"})
    first = session.generate(greedy(5)).outputs[0].token_ids
    list(session.stream(greedy(3)))
    session.append([1, 2, 3])
    session.rewind(n=1)
    session.generate(greedy(2))
    llm.generate([session, PROMPT], greedy(2))
    llm.session(PROMPT)  # has no name
    again = make_llm(checkpoint, state_dir=crash(tmp_path / "a"))
    assert again.resumable() == ["one"]
    found = again.resume("one")
    assert found.tokens == session.tokens
    assert found.tokens[: 20 + 5] == [*PROMPT, *first]
    assert (found.name, dict(found.labels), found.num_computed) == ("one", {"task": "42"}, 0)
    assert found.generate(greedy(6)).outputs[0].token_ids == checkpoint.greedy(session.tokens, 6)
    check(again)


def test_models_with_recurrent_layers(make_llm: MakeLLM, hybrid: Checkpoint, tmp_path: Path, crash: Crash) -> None:
    options: dict[str, Any] = {"kv_cache_memory": "4MiB"}
    session = make_llm(hybrid, state_dir=tmp_path / "a", **options).session(PROMPT, name="one")
    for _ in range(3):
        session.generate(greedy(4))
    session.rewind(n=2)
    found = make_llm(hybrid, state_dir=crash(tmp_path / "a"), **options).resume("one")
    assert found.tokens == session.tokens
    assert hybrid.continues(session.tokens, found.generate(greedy(6)).outputs[0].token_ids)


def test_random_calls_and_crashes(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, crash: Crash) -> None:
    dice, directory = random.Random(3), tmp_path / "0"
    llm = make_llm(llama, state_dir=directory)
    sessions: dict[str, Session] = {}
    wanted: dict[str, list[int]] = {}
    for _ in range(120):
        name, verb = dice.choice("abcd"), dice.randrange(9)
        session = sessions.get(name)
        if verb == 8:
            directory = crash(directory)
            llm.close()
            llm, sessions = make_llm(llama, state_dir=directory), {}
            assert sorted(llm.resumable()) == sorted(wanted)
            continue
        if verb == 7 and name in wanted:
            llm.forget(name)
            del wanted[name]
            sessions.pop(name, None)
        elif verb == 6:
            sessions[name] = llm.session(random_tokens(dice.randrange(30), seed=dice.randrange(9)), name=name)
        elif session is None and name in wanted:
            sessions[name] = llm.resume(name)
        elif session is not None and verb < 3 and len(session):
            expected = llama.greedy(session.tokens, 3)
            assert session.generate(greedy(3)).outputs[0].token_ids == expected
        elif session is not None and verb == 3:
            session.append([dice.randrange(90)])
        elif session is not None and verb == 4:
            session.rewind(to=dice.randrange(len(session) + 1))
        elif session is not None and verb == 5:
            session.close()
            del sessions[name]
        if name in sessions:
            if name in wanted and sessions[name] is not session and verb != 6:
                assert sessions[name].tokens == wanted[name]
            wanted[name] = sessions[name].tokens
    assert len(wanted) > 1


def test_chats_go_on(make_llm: MakeLLM, tmp_path: Path, crash: Crash) -> None:
    make_checkpoint("llama", tmp_path / "model", vocab_size=600, max_position_embeddings=1024)
    (tmp_path / "model/tokenizer.json").write_text(saved("byte_level"))
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    llm = make_llm(tmp_path / "model", state_dir=tmp_path / "a")
    session, whole = llm.session(name="chat"), llm.session()
    for one in (session, whole):
        one.chat([user("The quick brown fox")], greedy(6))
        list(one.stream_chat([user("jumps")], greedy(6)))
        one.rewind(n=2)
    directory = crash(tmp_path / "a")
    found = make_llm(tmp_path / "model", state_dir=directory).resume("chat")
    wanted = whole.chat([user("over")], greedy(6))
    assert found.chat([user("over")], greedy(6)).prompt_token_ids == wanted.prompt_token_ids
    assert found.tokens == whole.tokens
    with pytest.raises(NotDurable, match="no JSON"):
        session.chat([user("over")], greedy(2), answer=lambda text: {**user(text), "object": object()})


def test_windows_salts_and_pins(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, crash: Crash) -> None:
    llm = make_llm(llama, state_dir=tmp_path / "a")
    windowed = llm.session(PROMPT, name="windowed", window=16, sink=2)
    windowed.generate(greedy(9))
    salted = llm.session(PROMPT, name="salted", cache_salt="x", pin=True)
    llm.session(PROMPT, name="plain")
    directory = crash(tmp_path / "a")
    after = windowed.generate(greedy(9)).outputs[0].token_ids
    again = make_llm(llama, state_dir=directory)
    found = again.resume("windowed")
    assert found.window == (16, 2)
    assert found.generate(greedy(9)).outputs[0].token_ids == after
    found = again.resume("salted")
    assert (found.pinned, found._branch.key) == (True, salted._branch.key)
    again.resume("plain").generate(greedy(1))
    assert found.generate(greedy(1)).num_cached_tokens == 0
    assert again.generate(PROMPT, greedy(1), cache_salt="x")[0].num_cached_tokens > 0


def test_adapters(make_llm: MakeLLM, tmp_path: Path, crash: Crash) -> None:
    options: dict[str, Any] = {"kv_cache_memory": "16MiB", "max_model_len": 128}
    adapters = {"docs": str(bundled_adapters()["tiny-python-docstrings"])}
    llm = make_llm("tiny-python", state_dir=tmp_path / "a", adapters=adapters, **options)
    session = llm.session("def f(x):\n", name="one")
    session.use_adapter("docs")
    session.generate(greedy(4))
    directory = crash(tmp_path / "a")
    wanted = session.generate(greedy(8)).outputs[0].token_ids
    again = make_llm("tiny-python", state_dir=directory, **options)
    with pytest.raises(InvalidArgument, match=r"session 'one': .*load that adapter first"):
        again.resume("one")
    again.load_adapter("other", adapters["docs"])
    found = again.resume("one")
    assert found.adapter == "other"
    assert found.generate(greedy(8)).outputs[0].token_ids == wanted


def test_what_tokens_do_not_give_is_in_a_state_file(
    make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, crash: Crash
) -> None:
    llm = make_llm(llama, state_dir=tmp_path / "a")
    layer, states = attention_layer(llm), tmp_path / "a/states"
    written = llm.session(PROMPT, name="written")
    written.set_kv(layer, start=0, v=written.kv(layer)["v"] * -3)
    seen = llm.session(image([1, -1, -1, 4, -1], rows_of(3)), name="seen")
    seen.generate(greedy(2))
    assert len(list(states.iterdir())) == 2
    written.generate(greedy(2))
    assert len(list(states.iterdir())) == 2, "one file each"
    directory = crash(tmp_path / "a")
    wanted = [one.generate(greedy(5)).outputs[0].token_ids for one in (written, seen)]
    assert wanted[0] != llama.greedy(written.tokens[:22], 5)
    again = make_llm(llama, state_dir=directory)
    found = [again.resume(name) for name in ("written", "seen")]
    assert all(one.modified and one.pinned for one in found)
    assert [one.generate(greedy(5)).outputs[0].token_ids for one in found] == wanted
    again.forget("seen")
    assert len(list((directory / "states").iterdir())) == 1
    # A stream leaves the file as it was; closing the session writes it.
    list(written.stream(greedy(3)))
    tokens = written.tokens
    before = make_llm(llama, state_dir=crash(tmp_path / "a")).resume("written")
    assert before.tokens == tokens[:-3]
    states.rename(tmp_path / "elsewhere")
    with pytest.raises(
        NotDurable, match=r"cannot be written to the state directory: its state file cannot .*no directory"
    ):
        written.append([1])
    with pytest.raises(NotDurable):
        written.close()
    (tmp_path / "elsewhere").rename(states)
    check(llm)
    written = llm.resume("written")
    list(written.stream(greedy(3)))
    tokens = written.tokens
    written.close()
    after = make_llm(llama, state_dir=crash(tmp_path / "a")).resume("written")
    assert after.tokens == tokens


def test_another_dtype_is_not_computed_again(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    data = make_llm(llama, kv_dtype="bfloat16").session(PROMPT).to_bytes()
    llm = make_llm(llama, state_dir=tmp_path / "a")
    session = llm.session_from_bytes(data, convert_dtype=True)
    session.name = "rough"
    assert session.append([1]).name == "rough"
    assert len(list((tmp_path / "a/states").iterdir())) == 1
    llm.close()
    assert not make_llm(llama, state_dir=tmp_path / "a").resume("rough")._branch.origin.exact


def test_threads(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    """What is written last is what the session is."""
    llm = make_llm(llama, state_dir=tmp_path)
    session = llm.session(PROMPT, name="one")

    def work(token: int) -> None:
        for _ in range(15):
            with suppress(FailedPrecondition):  # another thread uses it
                session.append([token])

    for seed in range(3):
        threads = [threading.Thread(target=work, args=(10 * seed + number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert llm.kept is not None
        assert session._kept_as is not None
        found = llm.kept.journal.get(session._kept_as)
        assert found is not None
        assert found.tokens.tolist() == session.tokens


class Alarm(BaseException):
    """What the handler of the timer raises."""


def test_interrupts(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that an alarm ends leaves nothing locked, and the next one that returns is kept."""
    # Python drops the exception of a signal that comes in a finaliser, and says so.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def ring(number: int, frame: object) -> None:
        raise Alarm

    dice, rung = random.Random(5), 0
    llm = make_llm(llama, state_dir=tmp_path)
    session = llm.session(PROMPT, name="0")
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for number in range(80):
            verbs: list[Callable[[], Any]] = [
                lambda: session.generate(greedy(2)),
                lambda: list(session.stream(greedy(2))),
                lambda: session.rewind(to=15),
                lambda number=number: setattr(session, "name", str(number)),  # type: ignore[misc]
                lambda: session.append([3]),
            ]
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 0.01))
                dice.choice(verbs)()
                interrupts.check()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                rung += 1
            session.append([4])
            assert llm.resumable() == [session.name]
            assert llm.kept is not None
            assert session._kept_as is not None
            found = llm.kept.journal.get(session._kept_as)
            assert found is not None
            assert found.tokens.tolist() == session.tokens
            session.rewind(to=min(len(session), 60))
        check(llm)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rung, "no alarm came within a call"


def test_names(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama, state_dir=tmp_path / "a")
    first, second = llm.session([1], name="same"), llm.session([2], name="same")
    first.append([3])
    assert llm.resume("same").tokens == [2], "the later one replaces"
    second.append([4])
    assert llm.resume("same").tokens == [2], "and is replaced by what was resumed"
    second.name = "other"
    second.labels = {"a": "b"}
    assert sorted(llm.resumable()) == ["other", "same"]
    second.name = "third"
    assert sorted(llm.resumable()) == ["same", "third"]
    child = second.fork()
    child.name = "child"
    second.name = None
    child.close()
    del child
    gc.collect()
    assert sorted(llm.resumable()) == ["child", "same"]
    llm.close()
    again = make_llm(llama, state_dir=tmp_path / "a")
    assert dict(again.resume("child").labels) == {"a": "b"}
    open_ = again.resume("same")
    again.forget("same")
    open_.append([1])
    assert again.resumable() == ["child"], "what is forgotten stays so"
    with pytest.raises(NotFound, match="there are: 'child'"):
        again.resume("same")
    for verb in (again.forget, again.resume):
        with pytest.raises(NotFound):
            verb("../../etc/passwd")
        with pytest.raises(InvalidArgument, match="name must be the name of a session, got 3"):
            verb(3)  # type: ignore[arg-type]


def test_without_a_directory(small: LLM) -> None:
    session = small.session([1], name="one")
    session.append([2])
    for verb in (lambda: small.resume("one"), small.resumable, lambda: small.forget("one")):
        with pytest.raises(FailedPrecondition, match="give state_dir="):
            verb()


def test_another_model(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    directory = tmp_path / "a"
    llm = make_llm(checkpoints["llama"], state_dir=directory)
    llm.session(PROMPT, name="one")
    llm.close()
    other = make_llm(checkpoints["mistral"], state_dir=directory)
    assert other.resumable() == []
    with pytest.raises(NotFound, match=r"there are: none; .* another model \(LlamaForCausalLM\), and goes on where"):
        other.resume("one")
    with pytest.raises(NotFound, match="another model"):
        other.forget("one")
    # Each model has its own sessions, whatever they are called.
    other.session([7, 8, 9], name="one")
    other.close()
    llm = make_llm(checkpoints["llama"], state_dir=directory)
    assert llm.resumable() == ["one"]
    assert llm.resume("one").tokens == PROMPT
    llm.forget("one")
    llm.close()
    assert make_llm(checkpoints["mistral"], state_dir=directory).resume("one").tokens == [7, 8, 9]


def test_the_directory(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "deep/er"
    llm = make_llm(llama, state_dir=directory)
    llm.session([1], name="one")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    with pytest.raises(InvalidArgument, match="in use by another LLM of this process; close that one, or") as caught:
        LLM(llama.path, state_dir=directory)
    assert caught.value.field == "state_dir"
    with pytest.raises(NotFound):
        LLM(tmp_path / "nothing", state_dir=tmp_path / "b")
    make_llm(llama, state_dir=tmp_path / "b")  # was let go
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", Path("/proc/quire")):
        with pytest.raises(InvalidArgument, match=r"cannot be used: .*; give a directory that can be written"):
            LLM(llama.path, state_dir=bad)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=1 << 20, used=1 << 20, free=4096))
    with pytest.raises(InvalidArgument, match=r"cannot be used: .*; its disk is full, free space on it"):
        LLM(llama.path, state_dir=tmp_path / "file")


def fill(llm: LLM) -> None:
    for number in range(100):
        llm.session(PROMPT, name=f"other {number}", labels={"long": "x" * 500})


def test_what_cannot_be_kept_is_told(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama, state_dir=tmp_path / "a")
    session = llm.session(PROMPT, name="one")
    assert llm.kept is not None
    database = llm.kept.journal._db
    ((pages,),) = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NotDurable, match="full"):
        fill(llm)
    session.labels = {"long": "x" * 500}  # is told with the next call
    with pytest.raises(NotDurable, match="full"):
        session.append([5])
    held = session.tokens
    database.execute(f"PRAGMA max_page_count = {pages + 100}")
    session.append([7])
    llm.close()
    assert make_llm(llama, state_dir=tmp_path / "a").resume("one").tokens == [*held, 7]


def test_what_is_not_kept_is_said_not_to_be_begun_again(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    """The call that finds the disk full took effect; later calls are refused before they begin, and
    the session is written once there is room, by ``close`` if nobody calls it before.
    """
    llm = make_llm(llama, state_dir=tmp_path / "a")
    session = llm.session(PROMPT, name="one")
    assert llm.kept is not None
    database = llm.kept.journal._db
    ((pages,),) = database.execute("PRAGMA page_count").fetchall()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(NotDurable, match="full"):
        fill(llm)
    with pytest.raises(NotDurable, match=r"the call took effect, .* is full; free space on its disk$"):
        session.append([5] * 200)
    held = session.tokens
    assert held[-200:] == [5] * 200
    for call in (
        lambda: session.append([7]),
        lambda: session.generate(greedy(2)),
        lambda: session.stream(greedy(2)),
        lambda: llm.generate([session], greedy(2)),
        lambda: session.rewind(n=1),
    ):
        with pytest.raises(NotDurable, match="the call was not begun"):
            call()
        assert session.tokens == held
    check(llm)
    database.execute(f"PRAGMA max_page_count = {pages + 100}")
    session.close()
    assert llm.resume("one").tokens == held


def test_a_stream_that_cannot_be_kept_took_effect(
    make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(llama, state_dir=tmp_path / "a")
    session = llm.session(PROMPT, name="one")
    stream = session.stream(greedy(2))
    next(stream)
    assert llm.kept is not None
    with monkeypatch.context() as patch:

        def full(_: object) -> None:
            raise NotDurable("the disk is full")

        patch.setattr(llm.kept.journal, "write", full)
        with pytest.raises(NotDurable, match=r"the call took effect, .*: the disk is full"):
            list(stream)
        with pytest.raises(NotDurable, match="was not begun: the disk is full"):
            session.stream(greedy(2))
    session.stream(greedy(2)).close()
    check(llm)


def test_a_name_that_cannot_be_taken_stays(
    make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, crash: Crash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of that name fails to begin, or the name to be forgotten: the session that has the
    name goes on being kept."""
    llm = make_llm(llama, state_dir=tmp_path / "a")
    session = llm.session(PROMPT, name="one")
    assert llm.kept is not None

    def full(changes: Any) -> None:
        raise NotDurable("the disk is full")

    for number, call in enumerate((lambda: llm.session([1, 2], name="one"), lambda: llm.forget("one"))):
        with monkeypatch.context() as patch:
            patch.setattr(llm.kept.journal, "write", full)
            with pytest.raises(NotDurable, match="full"):
                call()
        session.append([number])
        again = make_llm(llama, state_dir=crash(tmp_path / "a"))
        assert again.resume("one").tokens == session.tokens


def test_awaited(llama: Checkpoint, tmp_path: Path) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB"}
        async with AsyncLLM(llama.path, state_dir=tmp_path, **options) as llm:
            session = await llm.session(PROMPT, name="one")
            await session.generate(greedy(3))
            async for _ in session.stream(greedy(3)):
                pass
            await llm.generate([session, PROMPT], greedy(3))
            tokens = session.tokens
            assert await llm.resumable() == ["one"]
        async with AsyncLLM(llama.path, state_dir=tmp_path, **options) as llm:
            again = await llm.resume("one")
            assert again.tokens == tokens
            assert (await again.generate(greedy(4))).outputs[0].token_ids == llama.greedy(tokens, 4)
            await llm.forget("one")
            assert await llm.resumable() == []

    asyncio.run(main())
