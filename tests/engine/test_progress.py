"""How far prompts have come: on a terminal, or where it is asked for."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

import pytest
import tqdm.std

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.base.errors import DataLoss, InvalidArgument
from quire.base.progress import Bar
from quire.cli import main as cli
from quire.engine import progress_bars
from quire.models import catalogue

LONG = "x = 1\n" * 40
"""120 tokens, which take several steps of 32."""
GREEDY = SamplingParams(temperature=0, max_tokens=2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-python", dtype="float32", kv_cache_memory="32MiB", max_num_batched_tokens=32)


def shown(llm: LLM, monkeypatch: pytest.MonkeyPatch, *prompts: str, stderr: io.StringIO, **options: bool) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        # Another salt each time, so that nothing is cached.
        llm.generate(list(prompts), GREEDY, cache_salt=str(id(stderr)), **options)
    return stderr.getvalue()


def test_a_long_prompt_shows_its_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    total = len(llm.tokenizer.encode(LONG))
    assert total > 96
    text = shown(llm, monkeypatch, LONG, stderr=Terminal())
    done = [int(found) for found in re.findall(rf"prompt tokens (\d+)/{total}", text)]
    assert done == sorted(done)
    assert {32, 64, 96} <= set(done) < {*range(0, total, 32)}
    last = text.rstrip().rpartition("\r")[2]
    assert "1/1" in last
    assert "prompt tokens" not in last


def test_of_several_prompts_all_tokens_count(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    total = sum(len(llm.tokenizer.encode(text)) for text in (LONG, "y = 2\n" * 20))
    text = shown(llm, monkeypatch, LONG, "y = 2\n" * 20, stderr=io.StringIO(), use_tqdm=True)
    done = [int(found) for found in re.findall(rf"prompt tokens (\d+)/{total}", text)]
    assert done[-1] > total - 32
    assert "2/2" in text


def test_a_process_without_stderr_loads_and_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as in a daemon, or behind 2>&-
    with LLM("tiny-python", dtype="float32", kv_cache_memory="8MiB") as llm:
        assert len(llm.generate([LONG, LONG], GREEDY)) == len(llm.generate([LONG, LONG], GREEDY, use_tqdm=True)) == 2
        llm.session(LONG).close()
        llm.beam_search([LONG, LONG], BeamSearchParams(beam_width=2, max_tokens=2))


def test_nothing_is_shown_where_nobody_looks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(llm, monkeypatch, LONG, stderr=io.StringIO()) == ""
    assert shown(llm, monkeypatch, LONG, LONG, stderr=io.StringIO()) == ""
    assert shown(llm, monkeypatch, "x = 1", stderr=Terminal()) == ""
    assert shown(llm, monkeypatch, LONG, LONG, stderr=Terminal(), use_tqdm=False) == ""


def generate(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> str:
    options = ["--temperature", "0", "--max-tokens", "2", "--dtype", "float32", "--kv-cache-memory", "32MiB"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr("quire.engine.progress_bars.Bar", partial(Bar, mininterval=0))
        cli.app(["generate", LONG, "--max-num-batched-tokens", "32", *options], standalone_mode=False)
    return stderr.getvalue()


def test_the_command_shows_the_prompt_and_writes_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Prompt" not in generate(monkeypatch, io.StringIO())
    out = capsys.readouterr().out
    err = generate(monkeypatch, Terminal())
    assert capsys.readouterr().out == out
    assert re.search(r"Prompt: +\d+%.* 64/199 \[", err), err  # the last token runs with the answer
    assert "tok/s" in err.rpartition("\r")[2]


# -- sessions --------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars are shown without a delay, and every time."""
    monkeypatch.setattr(progress_bars, "DELAY", 0)
    monkeypatch.setattr(progress_bars, "Bar", partial(Bar, mininterval=0))


def seen(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, act: Callable[[], object]) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        act()
    return stderr.getvalue()


@pytest.mark.usefixtures("at_once")
def test_a_long_prompt_of_a_session_shows_its_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with llm.session() as session:
        text = seen(monkeypatch, Terminal(), lambda: session.append(LONG))
        done = [int(found) for found in re.findall(rf"(\d+)/{len(session) - 1} ", text)]
        assert {32, 64, 96} <= set(done)
        assert done == sorted(done)
        assert re.search(r"<\d\d:\d\d", text), "no time is left"
    assert "Prompt" in seen(monkeypatch, Terminal(), lambda: llm.session(LONG, cache_salt="a").close())
    assert seen(monkeypatch, Terminal(), lambda: llm.session(LONG, cache_salt="b", use_tqdm=False).close()) == ""
    with llm.session() as session:
        session.append(LONG[:6])
        assert seen(monkeypatch, Terminal(), lambda: session.append("y")) == "", "one step is no long prompt"
        assert "Prompt" in seen(monkeypatch, io.StringIO(), lambda: session.append(LONG[::-1], use_tqdm=True))
        assert seen(monkeypatch, Terminal(), lambda: session.append("z = 3\n" * 40, use_tqdm=False)) == ""
        assert seen(monkeypatch, io.StringIO(), lambda: session.append("u = 3\n" * 40)) == ""
    with llm.session("v = 4\n" * 40) as session:
        llm.engine.branches.drop(session._branch)
        llm.reset_prefix_cache()
        assert "Prompt" in seen(monkeypatch, Terminal(), lambda: session.compute())
        assert seen(monkeypatch, Terminal(), lambda: session.compute()) == ""


@pytest.mark.usefixtures("at_once")
def test_a_stream_shows_its_prompt_and_leaves_the_line_before_a_delta(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llm.session(LONG) as session:
        for computed in (False, True):
            if not computed:
                llm.engine.branches.drop(session._branch)
                llm.reset_prefix_cache()
            terminal = Terminal()
            stream = session.stream(SamplingParams(temperature=0, max_tokens=3))
            first = seen(monkeypatch, terminal, lambda stream=stream: next(stream))  # type: ignore[misc]
            assert ("64/" in first) is not computed
            assert first.endswith("\r") or computed
            assert seen(monkeypatch, terminal, lambda stream=stream: list(stream)) == first  # type: ignore[misc]


def test_a_chat_shows_its_prompt_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def chat() -> None:
        options = ["--max-tokens", "1", "--device", "cpu", "--kv-cache-memory", "32MiB"]
        cli.app(["chat", "tiny-python", "w = 5\n" * 200, *options], standalone_mode=False)

    assert "Prompt:   0%" in seen(monkeypatch, Terminal(), chat)


@pytest.mark.usefixtures("at_once")
def test_files_show_their_bytes(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "state.quire"
    with llm.session(LONG) as session:
        session.compute()
        for stderr, options, is_shown in (
            (Terminal(), {}, True),
            (io.StringIO(), {}, False),
            (Terminal(), {"use_tqdm": False}, False),
            (io.StringIO(), {"use_tqdm": True}, True),
        ):
            saving = seen(monkeypatch, stderr, partial(session.save, path, **options))
            assert ("Saving: 100%" in saving) == is_shown
            assert bool(saving) == is_shown
            other = Terminal() if stderr.isatty() else io.StringIO()
            loading = seen(monkeypatch, other, lambda options=options: llm.load_session(path, **options).close())
            assert ("Restoring: 100%" in loading) == is_shown
            assert bool(loading) == is_shown
        for wrong in (1, "yes"):
            with pytest.raises(InvalidArgument, match="use_tqdm"):
                session.save(path, use_tqdm=wrong)
            with pytest.raises(InvalidArgument, match="use_tqdm"):
                llm.load_session(path, use_tqdm=wrong)
            with pytest.raises(InvalidArgument, match="use_tqdm"):
                session.append("x", use_tqdm=wrong)
            with pytest.raises(InvalidArgument, match="use_tqdm"):
                session.compute(use_tqdm=wrong)


def test_what_is_quick_shows_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a terminal, without being asked for."""
    with llm.session("x = 1") as session:
        assert seen(monkeypatch, Terminal(), lambda: session.save(tmp_path / "state.quire")) == ""
        assert seen(monkeypatch, Terminal(), lambda: llm.load_session(tmp_path / "state.quire").close()) == ""


def test_a_damaged_file_is_found_with_a_bar(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at_once: None
) -> None:
    path = tmp_path / "state.quire"
    with llm.session(LONG) as session:
        session.save(path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)

    def load() -> None:
        with pytest.raises(DataLoss, match="is damaged"):
            llm.load_session(path)

    assert "Restoring" in seen(monkeypatch, Terminal(), load)


def test_servers_show_no_bars(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    """Where a thread of its own steps, a terminal belongs to somebody else."""

    async def run() -> None:
        async with AsyncLLM("tiny-python", dtype="float32", kv_cache_memory="32MiB", max_num_batched_tokens=32) as llm:
            session = await llm.session()
            monkeypatch.setattr(sys, "stderr", stderr)
            await session.append(LONG)
            await session.compute()
            monkeypatch.undo()

    stderr = Terminal()
    asyncio.run(run())
    assert stderr.getvalue() == ""


def test_the_time_left_is_shown(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(llm, monkeypatch, LONG, stderr=Terminal())
    assert re.search(r"prompt tokens 64/\d+, \d\d:\d\d left", text)


# -- the lock of all bars --------------------------------------------------------------------------


def interrupted_at(line: int, act: Callable[[], None]) -> bool:
    """Run ``act`` with a Ctrl-C at the given line of tqdm's module, counted as they
    run. False: fewer lines ran."""
    reached = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal reached
        if frame.f_code.co_filename != tqdm.std.__file__ or frame.f_code.co_name == "__del__":
            return None  # Python drops the exceptions of finalisers
        if event == "line":
            reached += 1
            if reached == line:
                signal.raise_signal(signal.SIGINT)
        return trace

    before, handler = sys.gettrace(), signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        signal.signal(signal.SIGINT, handler)
    return reached >= line


def lock_is_free() -> bool:
    """Return True if another thread gets tqdm's lock."""
    got: list[bool] = []

    def take() -> None:
        for one in (locks := Bar.get_lock().locks):
            got.append(one.acquire(timeout=1))
            if got[-1]:
                one.release()
        assert locks

    thread = Thread(target=take)
    thread.start()
    thread.join()
    return all(got)


def test_the_lock_is_free_after_an_interrupt_at_any_line() -> None:
    def shown_bar() -> None:
        with Bar(total=3, file=io.StringIO(), mininterval=0, leave=False) as bar:
            bar.update()
            bar.set_postfix_str("x")
            bar.clear()

    def hidden_bar() -> None:
        with Bar(total=3, disable=True) as bar:
            bar.update()

    for act in (shown_bar, hidden_bar):
        line = 1
        while interrupted_at(line, act):
            assert lock_is_free(), (act.__name__, line)
            line += 1
        assert line > 10


def test_the_lock_is_free_after_an_error_of_stderr() -> None:
    class Closed(io.StringIO):
        shut = False

        def write(self, text: str) -> int:
            if self.shut:
                raise BrokenPipeError
            return super().write(text)

    file = Closed()
    bar = Bar(total=3, file=file, mininterval=0)
    file.shut = True
    for act in (bar.update, bar.clear, bar.close):
        with pytest.raises(BrokenPipeError):
            act()
        assert lock_is_free(), act.__name__
    file.shut = False


# -- models ----------------------------------------------------------------------------------------


def test_loading_shows_bytes_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtype": "float32", "kv_cache_memory": "8MiB"}
    assert "Loading" in seen(monkeypatch, Terminal(), lambda: LLM("tiny-python", **options).close())
    assert "Loading" not in seen(monkeypatch, io.StringIO(), lambda: LLM("tiny-python", **options).close())


def test_downloads_show_bars_on_terminals_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []

    def snapshot_download(name: str, *, tqdm_class: Any, **given: object) -> str:
        with tqdm_class(total=7, desc=f"Fetching {name}", name="quire.test") as bar:
            bar.update(7)
        made.append(bar)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)

    def fetch() -> None:
        assert catalogue._download("model", "some/name", None, ["*"], "a model") == tmp_path

    assert "Fetching some/name: 100%" in seen(monkeypatch, Terminal(), fetch)
    assert seen(monkeypatch, io.StringIO(), fetch) == ""
    assert len(made) == 2
