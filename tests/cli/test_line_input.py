"""Lines that are typed: edited, recalled and completed on a terminal; as they are out of a pipe or
without readline.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from quire.cli.line_input import LineInput, history_file, paths

SCRIPT = """
import sys
{before}
from quire.cli.line_input import LineInput
with LineInput(lambda line: ["/stats", "/save", "/switch"] if " " not in line else ["main"]) as lines:
    while True:
        try:
            print("got", repr(lines.read("> ")), flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        except EOFError:
            print("end", flush=True)
            break
"""
PATIENCE = 5.0
"""Seconds after which a control key is pressed again."""
WITHOUT = "sys.modules['readline'] = None"


def typed(keys: str, home: Path, *, before: str = "", **environment: str) -> list[str]:
    """What the script says of keys that are typed on a terminal, which ends each time it asks for a
    line.
    """
    main, side = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "QUIRE_HISTORY"}
    env |= {"XDG_STATE_HOME": str(home), "TERM": "dumb", **environment}
    command = [sys.executable, "-c", SCRIPT.format(before=before)]

    def take_terminal() -> None:  # so that Ctrl-C is a signal
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, env=env, start_new_session=True, preexec_fn=take_terminal
    )
    os.close(side)
    shown, sent = "", ""

    def read_until(mark: str) -> None:
        nonlocal shown
        start = len(shown)
        while mark not in shown[start:]:
            if not select.select([main], [], [], PATIENCE)[0]:
                # CPython's readline misses a control key that comes before it begins to wait for
                # one.
                assert sent[-1:] in ("\x03", "\x04"), f"no {mark!r} after {sent!r}: {shown!r}"
                os.write(main, sent[-1:].encode())
                continue
            shown += os.read(main, 4096).decode()

    try:
        for line in keys.split("|"):
            read_until("> ")
            os.write(main, line.encode())
            sent = line
        read_until("end")
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert process.returncode == 0
    said = re.findall(r"(?:^|> |\^C)(got .*?|interrupted|end)(?=\r|$)", shown, re.MULTILINE)
    return [line for line, _ in itertools.groupby(said)]


def test_lines_are_edited_completed_and_recalled(tmp_path: Path) -> None:
    up, left, start = "\x1b[A", "\x1b[D", "\x01"
    keys = f"acd{left}{left}b\n|bc{start}a\n|{up}{up}!\n|/st\t\n|/switch m\t\n|\x04"
    assert typed(keys, tmp_path) == [
        "got 'abcd'",
        "got 'abc'",
        "got 'abcd!'",
        "got '/stats'",
        "got '/switch main'",
        "end",
    ]
    file = tmp_path / "quire" / "chat_history"
    assert file.read_text().splitlines() == ["abcd", "abc", "abcd!", "/stats", "/switch main"]
    assert file.stat().st_mode & 0o777 == 0o600
    # The next chat has them; this one keeps nothing.
    assert typed(f"{up}{up}{up}\n|\x04", tmp_path) == ["got 'abcd!'", "end"]
    before = file.read_text()
    assert typed(f"{up}new\n|\x04", tmp_path, QUIRE_HISTORY="") == ["got 'new'", "end"]
    assert file.read_text() == before


def test_a_pasted_text_of_several_lines_is_one_line(tmp_path: Path) -> None:
    pasted = "\x1b[200~def f():\n    return 1\x1b[201~"
    keys = f"{pasted}\n|\x04"
    assert typed(keys, tmp_path, TERM="xterm") == [r"got 'def f():\n    return 1'", "end"]


@pytest.mark.parametrize("before", ["", WITHOUT], ids=["readline", "without"])
def test_control_keys(before: str, tmp_path: Path) -> None:
    assert typed("abc\x03|def\n|\x04", tmp_path, before=before) == ["interrupted", "got 'def'", "end"]


def test_the_end_can_be_typed_between_two_lines(tmp_path: Path) -> None:
    """As while an answer comes: it ends the next line, and the terminal is left as it was."""
    script = """
import time
from quire.cli.line_input import LineInput
with LineInput(lambda line: ()) as lines:
    print("busy", flush=True)
    time.sleep(1)
    try:
        lines.read("> ")
    except EOFError:
        print("end", flush=True)
"""
    main, side = pty.openpty()
    before = termios.tcgetattr(side)[6]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "dumb"}
    process = subprocess.Popen([sys.executable, "-c", script], stdin=side, stdout=side, stderr=side, env=env)
    shown = ""
    try:
        for mark, keys in (("busy", b"\x04"), ("end", b"")):
            while mark not in shown and select.select([main], [], [], 60)[0]:
                shown += os.read(main, 4096).decode()
            assert mark in shown
            os.write(main, keys)
        assert process.wait(60) == 0
        assert termios.tcgetattr(side)[6] == before
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(side)


def test_a_history_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "quire").write_text("a file where the folder would be")
    assert typed("a\n|\x04", tmp_path) == ["got 'a'", "end"]


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("a\\\nb\nc", ["a\nb", "c"]),
        ("a\\\\\nb", ["a\\\\", "b"]),
        ('"""a\n\nb"""\nc', ["a\n\nb", "c"]),
        ('"""\na\\\n"""\nc', ["a\\", "c"]),
        ('"""a"""\nb', ["a", "b"]),
        ('"""a\nb', ["a\nb"]),  # the input ends first
        ("/load a\\\nb", ["/load a\\", "b"]),
    ],
)
def test_texts_of_several_lines(given: str, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    lines = LineInput(lambda _: [])
    found = []
    with contextlib.suppress(EOFError):
        while True:
            found.append(lines.read_text("> "))
    assert found == texts


def test_a_pipe_sees_no_prompt(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT.format(before="")]
    done = subprocess.run(command, input="a\n\t/st\t\nb", capture_output=True, text=True, env=env)
    assert done.stdout == "got 'a'\ngot '\\t/st\\t'\ngot 'b'\nend\n"
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_prompt_is_not_in_what_stdout_is_piped_to(tmp_path: Path) -> None:
    main, side = pty.openpty()
    command = [sys.executable, "-c", SCRIPT.format(before="")]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdin=side, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        os.close(side)
        os.write(main, b"a\n\x04")
        out, err = process.communicate(timeout=60)
        os.close(main)
    assert out == b"got 'a'\nend\n"
    assert err == b"> > "


def test_where_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("QUIRE_HISTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert history_file() == tmp_path / ".local" / "state" / "quire" / "chat_history"
    monkeypatch.setenv("QUIRE_HISTORY", "x")
    assert history_file() == Path("x")


def test_completion_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1].quire").touch()
    (tmp_path / "a[1]").mkdir()
    (tmp_path / "b.quire").touch()
    assert sorted(paths("a[1]")) == ["a[1].quire", "a[1]/"]
    assert paths("nothing") == []


def test_completion_asks_for_one_after_another() -> None:
    lines = LineInput(lambda line: [line + "b", line + "a", "other"])

    class Buffer:
        @staticmethod
        def get_line_buffer() -> str:
            return "/fxyz"

        @staticmethod
        def get_endidx() -> int:
            return 2

    lines._readline = Buffer  # type: ignore[assignment]
    assert [lines._completion("/f", state) for state in range(3)] == ["/fa", "/fb", None]
