"""Large grammars, which are tried in a child process: what they may not do to the process, and to
each other.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire import InvalidArgument, QuireError, ResourceExhausted, StructuredOutputs
from quire.grammars import trial as grammar_trial
from quire.grammars.formats import compiled, grammar_text
from quire.grammars.grammars import Grammars
from quire.grammars.matcher import GrammarMatcher
from quire.grammars.trial import SEATS, GrammarsBusy, GrammarTrial, Seats, must_be_tried, thread_stack
from quire.text.tokenizer import Tokenizer
from small_tokenizers import saved


def rules(count: int, line: str = 'r{}: "x" r{}\n', head: str = "start: r0\n", last: str = 'r{}: "y"') -> str:
    """A chain of rules."""
    return head + "".join(line.format(i, i + 1) for i in range(count)) + last.format(count)


def references(count: int, inner: str = '{{"type":"object","properties":{{"a":{}}},"required":["a"]}}') -> str:
    """A chain of ``$ref``."""
    nodes = ",".join(f'"n{i}":' + inner.format(f'{{"$ref":"#/$defs/n{i + 1}"}}') for i in range(count))
    return f'{{"$ref":"#/$defs/n0","$defs":{{{nodes},"n{count}":{{"type":"null"}}}}}}'


TERMINALS = {"line": 'T{}: "x" T{}\n', "head": "start: T0\n", "last": 'T{}: "y"'}
GBNF = {"line": 'r{} ::= "x" r{}\n', "head": "root ::= r0\n", "last": 'r{} ::= "y"'}
BACKWARDS = rules(10_000, **GBNF).splitlines(keepends=True)
BACKWARDS[1:-1] = reversed(BACKWARDS[1:-1])
DEEP: dict[str, dict[str, Any]] = {
    "rules": {"grammar": rules(3000)},
    "parentheses": {"grammar": rules(3000, "r{}: " + "(" * 27 + "r{}" + ")" * 27 + "\n")},
    "terminals": {"grammar": rules(10_000, **TERMINALS)},
    "references": {"json": references(1000)},
    "arrays": {"json": references(100, '{{"items":' * 30 + "{}" + "}}" * 30)},
    "gbnf": {"grammar": "".join(BACKWARDS)},
}
SLOW = StructuredOutputs(regex="a?" * 40_000)
LARGE: dict[str, StructuredOutputs] = {
    "json": StructuredOutputs(json={"properties": {f"p{i}": {"type": "integer"} for i in range(200)}}),
    "gbnf": StructuredOutputs(grammar=rules(200, **GBNF)),
    "lark": StructuredOutputs(grammar=rules(200)),
    "regex": StructuredOutputs(regex="(xy?)+" * 500),
    "choice": StructuredOutputs(choice=[f"x{i}" for i in range(800)]),
    "special": StructuredOutputs(grammar='start: <|im_start|> <[5]> "x"' + ' "y"' * 1000),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(saved("byte_level"))
    found = Tokenizer.from_directory(folder)
    assert found is not None
    return found


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = Grammars(tokenizer, tokenizer.token_bytes.size, threads=False)
    yield found
    found.close()


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    found = GrammarTrial(300, {5: b"<s>"})
    yield found
    found.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputs]:
    """What children were asked for."""
    found: list[StructuredOutputs] = []
    text = GrammarTrial.text

    def counting(self: GrammarTrial, wanted: StructuredOutputs) -> str:
        found.append(wanted)
        return text(self, wanted)

    monkeypatch.setattr(GrammarTrial, "text", counting)
    return found


def child_of(trial: GrammarTrial) -> int:
    (child,) = trial._process.children
    return child.pid


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process ended, also where nobody asks how."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return not state or state.startswith("Z")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", DEEP)
def test_deep_grammars_are_refused(grammars: Grammars, name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"structured_outputs\.\w+ is nested too deeply.*fewer levels"):
        grammars.check(StructuredOutputs(**DEEP[name]))
    grammars.check(LARGE["lark"])


def test_what_is_too_slow_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(grammar_trial, "DEADLINE", 0.3)
        for wanted in (
            SLOW,
            StructuredOutputs(grammar="\n" * 100_000),
        ):  # the second in Python, which hears no signals then
            with pytest.raises(InvalidArgument, match=r"takes longer than 0.3 s to compile; make it smaller"):
                grammars.check(wanted)
    grammars.check(LARGE["lark"])


def test_what_needs_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "MEMORY", 256 << 20)
    trial = GrammarTrial(300, {})
    with pytest.raises(InvalidArgument, match=r"structured_outputs\.regex needs more than .* of memory"):
        trial.text(SLOW)
    trial.text(LARGE["lark"])
    trial.close()


SHORT_AND_COSTLY = [
    {"regex": "a{3}"},
    {"grammar": "start: X\nX: /a*/ & /b*/"},
    {"grammar": "start: X\nX: ~/a*/"},
    {"grammar": 'start: "a"~2..9'},
    {"grammar": 'root ::= "a"{2,9}'},
    {"grammar": 'start: %json {"type":"integer"}'},
    {"json": '{"type":"integer","multipleOf":7}'},
    {"json": '{"type":"integer","multiple\\u004ff":7}'},
    {"json": {"type": "string", "pattern": "a"}},
    {"json": {"patternProperties": {"^a": {}}}},
    {"json": {"allOf": [{}, {}]}},
    {"json": {"not": {}}},
    {"json": {"x-guidance": {"whitespace_pattern": "a"}}},
    {"json": {}, "whitespace_pattern": "a"},
]


@pytest.mark.parametrize("wanted", SHORT_AND_COSTLY, ids=str)
def test_what_may_cost_more_than_it_shows_is_tried(wanted: dict[str, Any]) -> None:
    assert must_be_tried(StructuredOutputs(**wanted))


def test_what_is_short_and_slow_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(grammar_trial, "DEADLINE", 1)
        with pytest.raises(InvalidArgument, match=r"structured_outputs\.json takes longer than 1 s"):
            grammars.check(StructuredOutputs(json={"type": "integer", "multipleOf": 99999989}))
    grammars.check(LARGE["lark"])


@pytest.mark.slow
def test_what_keeps_much_memory_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the child has memory free that another one of this kind left."""
    monkeypatch.setattr(grammar_trial, "KEPT_MEMORY", 24 << 20)
    for number in (99991, 99989):  # 48 MiB each
        with pytest.raises(InvalidArgument, match=r"structured_outputs\.json needs more than 24 MiB of memory"):
            grammars.check(StructuredOutputs(json={"type": "integer", "multipleOf": number}))
    grammars.check(LARGE["lark"])
    assert grammars._trial is not None
    assert grammars._trial.kept < 24 << 20


def test_a_first_mask_that_is_too_much_is_refused(trial: GrammarTrial) -> None:
    names = [f"r{i}" for i in range(6000)]
    rest = " | ".join(names) + "\n" + "".join(f'{name}: "a" "{name}" {name}?\n' for name in names)
    with pytest.raises(InvalidArgument, match=r"structured_outputs\.grammar is too complex to begin a text: .*items"):
        trial.text(StructuredOutputs(grammar=f"start: {rest}"))
    later = StructuredOutputs(grammar=f'start: "bbb" s\ns: {rest}')
    assert trial.text(later) == grammar_text(later)


def test_what_is_no_grammar_is_refused_with_the_same_words(grammars: Grammars) -> None:
    for wrong in (
        {"grammar": rules(250) + " nowhere"},
        {"regex": "a" * 3000 + "("},
        {"grammar": rules(500, **GBNF) + " ("},
    ):
        wanted = StructuredOutputs(**wrong)
        assert must_be_tried(wanted)
        with pytest.raises(InvalidArgument) as raised:
            grammars.check(wanted)
        with pytest.raises(InvalidArgument) as direct:
            compiled(wanted, grammar_text(wanted), grammars._llguidance())
        assert str(raised.value) == str(direct.value)


def test_no_text_is_longer_than_a_million_characters() -> None:
    half = "x" * 500_000
    StructuredOutputs(regex=half + half)
    for wanted in (
        {"regex": half + half + "x"},
        {"choice": [half, half + "x"]},
        {"json": '{"title": "' + half * 2 + '"}'},
    ):
        with pytest.raises(InvalidArgument, match=r"has 10000\d\d characters; at most 1000000 are accepted"):
            StructuredOutputs(**wanted)  # type: ignore[arg-type]


def test_refusals_are_remembered(
    grammars: Grammars, asked: list[StructuredOutputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = DEEP["rules"]
    errors = []
    for _ in range(3):
        with pytest.raises(InvalidArgument) as raised:
            grammars.check(StructuredOutputs(**deep))
        errors.append(raised.value)
    assert len(asked) == 1
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
    monkeypatch.setattr("quire.grammars.grammars.MAX_REFUSED", 2)
    for count in (3001, 3002, 3003):
        with pytest.raises(InvalidArgument):
            grammars.check(StructuredOutputs(grammar=rules(count)))
    assert len(grammars._refused) == 2
    with pytest.raises(InvalidArgument):
        grammars.check(StructuredOutputs(**deep))
    assert len(asked) == 5
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 601)
    with pytest.raises(InvalidArgument):
        grammars.check(StructuredOutputs(**deep))
    assert len(asked) == 6


# -- what is compiled ------------------------------------------------------------------------------


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", LARGE)
def test_the_same_as_without_a_trial(grammars: Grammars, asked: list[StructuredOutputs], name: str) -> None:
    """Masks along a text, to the bit."""
    wanted = LARGE[name]
    assert must_be_tried(wanted)
    tried = grammars.matcher(wanted)
    assert asked == [wanted]
    direct = GrammarMatcher(compiled(wanted, grammar_text(wanted), grammars._llguidance()))
    rng = np.random.default_rng(0)
    for _ in range(20):
        (mask,), (expected,) = (grammars.allowed({0: one}, {0: ()}).values() for one in (tried, direct))
        assert np.array_equal(mask, expected)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not allowed.size:
            break
        token = int(rng.choice(allowed))
        tried.accept(token)
        direct.accept(token)


def test_small_grammars_need_no_child(grammars: Grammars, asked: list[StructuredOutputs]) -> None:
    for wanted in (
        {"regex": "a" * 500},
        {"regex": "(é|[^a-z])+?"},
        {"json_object": True},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "maxLength": 9}}}},
        {"choice": ["{&~%"]},
        {"choice": ["a", "b" * 300]},
        {"grammar": rules(20, **GBNF)},
    ):
        grammars.check(StructuredOutputs(**wanted))  # type: ignore[arg-type]
    assert not asked
    assert grammars._trial is not None
    assert not grammars._trial._process.children


def test_what_is_small_depends_on_the_stack() -> None:
    before = threading.stack_size(1 << 20)
    try:
        assert thread_stack() == thread_stack() == 1 << 20
        assert not must_be_tried(StructuredOutputs(regex="a" * 256))
        assert must_be_tried(StructuredOutputs(regex="a" * 257))
        assert must_be_tried(StructuredOutputs(choice=["a" * 128, "b" * 129]))
    finally:
        threading.stack_size(before)


IN_A_THREAD = """
import sys, threading
from quire import StructuredOutputs
from quire.grammars import trial as grammar_trial
from quire.grammars.formats import compiled, grammar_text
threading.stack_size(1 << 20)
wanted = StructuredOutputs(**{sys.argv[1]: sys.stdin.read()})
assert not grammar_trial.must_be_tried(wanted)
threading.stack_size(1 << 19)
vocabulary = grammar_trial._vocabulary(300, {})
thread = threading.Thread(target=lambda: (compiled(wanted, grammar_text(wanted), vocabulary), print("done")))
thread.start()
thread.join()
"""


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    "wanted",
    [
        {"grammar": rules(15, "r{}:r{}\n")},
        {"grammar": rules(4, "r{}:" + "(" * 21 + "r{}" + ")" * 21 + "\n")},
        {"grammar": rules(13, "T{}:(T{})*\n", "start: T0\n", 'T{}:"y"')},
        {"json": '{"items":' * 24 + "{}" + "}" * 24},
        {"json": '{"const":' + "[" * 110 + "]" * 110 + "}"},
        {"json": references(4, '{{"items":{}}}')},
        {"regex": "(" * 80 + "a" + ")*" * 80},
    ],
)
def test_what_is_small_has_room(wanted: dict[str, str]) -> None:
    """What is compiled at once needs no more than half of the stack for which it is small."""
    ((field, text),) = wanted.items()
    done = subprocess.run(
        [sys.executable, "-c", IN_A_THREAD, field], input=text, capture_output=True, text=True, env=_environment()
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_the_child_is_light() -> None:
    code = "import sys, quire.grammars.trial; print([n for n in ('torch', 'numpy', 'tokenizers') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment(), check=True)
    assert done.stdout == "[]\n"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1])}


# -- the child -------------------------------------------------------------------------------------


def test_one_child_for_many(trial: GrammarTrial) -> None:
    with ThreadPoolExecutor(4) as pool:
        wanted = [large for name, large in LARGE.items() if name != "special"] * 2
        assert list(pool.map(trial.text, wanted)) == [grammar_text(w) for w in wanted]
    assert not is_gone(child_of(trial))


def test_a_child_that_was_killed_is_replaced(trial: GrammarTrial) -> None:
    expected = trial.text(LARGE["json"])
    first = child_of(trial)
    os.kill(first, signal.SIGKILL)
    assert trial.text(LARGE["json"]) == expected
    assert child_of(trial) != first


def test_a_child_that_hangs_is_replaced(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.text(LARGE["json"])
    os.kill(child_of(trial), signal.SIGSTOP)
    longer_than_a_pipe = StructuredOutputs(regex="a" * 500_000)
    with monkeypatch.context() as patched:
        patched.setattr(grammar_trial, "DEADLINE", 0.3)
        with pytest.raises(InvalidArgument, match="takes longer"):
            trial.text(longer_than_a_pipe)
    trial.text(LARGE["json"])


def test_an_interrupt_leaves_no_answer_behind(trial: GrammarTrial) -> None:
    trial.text(LARGE["json"])
    first = child_of(trial)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        trial.text(SLOW)
    timer.join()
    assert is_gone(first)
    assert trial.text(LARGE["json"]) == grammar_text(LARGE["json"])


def test_a_process_with_many_files(trial: GrammarTrial) -> None:
    """``select.select`` knows 1,024 files; a server has one for each connection."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    files: list[int] = []
    try:
        files += (os.open(os.devnull, os.O_RDONLY) for _ in range(1100))
        assert trial.text(LARGE["json"]) == grammar_text(LARGE["json"])
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def forked(function: Callable[[], None]) -> int:
    """The status of a process forked from this one that calls it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_a_forked_process_has_a_child_of_its_own(trial: GrammarTrial) -> None:
    trial.text(LARGE["json"])
    (child,) = trial._process.children
    assert child.stdin is not None
    assert child.stdout is not None
    pipes = [child.stdin.fileno(), child.stdout.fileno()]

    def ask() -> None:
        for pipe in pipes:
            with pytest.raises(OSError):
                os.fstat(pipe)
        assert trial.text(LARGE["lark"]) == grammar_text(LARGE["lark"])
        assert child_of(trial) != child.pid
        trial.close()

    with trial._lock:  # as of a thread that is not there any more
        assert forked(ask) == 0
        assert forked(trial.close) == 0
    assert trial.text(LARGE["gbnf"]) == grammar_text(LARGE["gbnf"])
    assert child_of(trial) == child.pid


def test_a_forked_process_waits_for_no_thread_of_the_other(grammars: Grammars) -> None:
    grammars.check(LARGE["lark"])
    wanted = LARGE["gbnf"]

    def ask() -> None:
        grammars.check(wanted)
        grammars.close()

    for i in range(SEATS):
        grammars._seats._since[i] = time.monotonic()
    with grammars._lock, grammars._setting_up, grammars._turn:
        assert forked(ask) == 0


@pytest.mark.parametrize("how", ["killed", "ends", "missing"])
def test_no_child_can_be_had(trial: GrammarTrial, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    with monkeypatch.context() as patched:
        if how == "missing":
            patched.setattr(sys, "executable", "/nowhere/python")
        else:
            dies = {"killed": "import os; os.kill(os.getpid(), 9)", "ends": "pass"}
            patched.setattr(trial._process, "_start", dies[how])
        with pytest.raises(QuireError, match="process that tries grammars cannot be used") as raised:
            trial.text(LARGE["json"])
        assert type(raised.value) is QuireError
    trial.text(LARGE["json"])


def test_closed(grammars: Grammars) -> None:
    grammars.check(LARGE["lark"])
    assert grammars._trial is not None
    child = child_of(grammars._trial)
    grammars.close()
    assert is_gone(child)
    grammars.check(LARGE["lark"])
    with pytest.raises(QuireError, match="closed"):
        grammars.check(LARGE["json"])


def test_closing_ends_what_waits(trial: GrammarTrial) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(trial.text, SLOW)
        wait_for(lambda: bool(trial._process.children))
        trial.close()
        with pytest.raises(QuireError, match="closed"):
            waiting.result()


def test_forgotten_with_its_child() -> None:
    trial = GrammarTrial(300, {})
    trial.text(LARGE["json"])
    child = child_of(trial)
    del trial
    gc.collect()
    assert is_gone(child)


PARENT = r"""
import os, signal, sys, time
from quire import StructuredOutputs
from quire.grammars import trial as grammar_trial
# The signal may come while the line below is printed, and print cannot be entered twice.
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"heard\n"))
grammar_trial.DEADLINE = 1
trial = grammar_trial.GrammarTrial(300, {})
small, slow = StructuredOutputs(regex="a"), StructuredOutputs(grammar="\n" * 900_000)
trial.text(small)
print(trial._process.children[0].pid, flush=True)
for line in sys.stdin:
    print(trial._process.children[0].pid if trial.text(slow if line == "slow\n" else small) else None, flush=True)
"""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=_environment(), start_new_session=True
    ) as found:
        yield found
        found.kill()


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_child_ends_with_a_parent_that_is_killed(parent: subprocess.Popen[str], busy: bool) -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if busy:
        parent.stdin.write("slow\n")
        parent.stdin.flush()
        time.sleep(0.1)
    parent.kill()
    wait_for(lambda: is_gone(child))


def test_an_interrupt_is_for_the_parent(parent: subprocess.Popen[str]) -> None:
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = parent.stdout.readline()
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout.readline() == "heard\n"
    parent.stdin.write("small\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == child
    parent.kill()
    assert parent.communicate()[1] == ""


# -- many at a time --------------------------------------------------------------------------------


class Gate:
    """Trials that wait until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[StructuredOutputs] = []
        self.open = threading.Event()

        def text(trial: GrammarTrial, wanted: StructuredOutputs) -> str:
            self.begun.append(wanted)
            assert self.open.wait(30)
            return grammar_text(wanted)

        monkeypatch.setattr(GrammarTrial, "text", text)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(12) as found:
        yield found


def copy_of(wanted: StructuredOutputs) -> StructuredOutputs:
    return StructuredOutputs(grammar=wanted.grammar)


def test_small_grammars_wait_for_nobody(grammars: Grammars, gate: Gate, pool: ThreadPoolExecutor) -> None:
    known = LARGE["lark"]
    gate.open.set()
    grammars.check(known)
    gate.open.clear()
    slow = pool.submit(grammars.matcher, LARGE["gbnf"])
    try:
        wait_for(lambda: len(gate.begun) == 2)
        grammars.check(StructuredOutputs(regex="new"))
        grammars.matcher(known)
        assert not slow.done()
    finally:
        gate.open.set()
    slow.result()


def test_the_same_is_compiled_once(grammars: Grammars, gate: Gate, pool: ThreadPoolExecutor) -> None:
    wanted = LARGE["gbnf"]
    asking = [pool.submit(grammars.matcher, copy_of(wanted)) for _ in range(SEATS)]
    wait_for(lambda: len(grammars._seats._since) == SEATS)
    assert not any(one.done() for one in asking)
    gate.open.set()
    for one in asking:
        one.result()
    assert gate.begun == [wanted]


def test_the_same_is_refused_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    opened, calls = threading.Event(), []

    def text(trial: GrammarTrial, wanted: StructuredOutputs) -> str:
        calls.append(wanted)
        assert opened.wait(30)
        raise InvalidArgument("too large")

    monkeypatch.setattr(GrammarTrial, "text", text)
    asking: list[Future[None]] = [pool.submit(grammars.check, copy_of(LARGE["gbnf"])) for _ in range(SEATS)]
    wait_for(lambda: len(grammars._seats._since) == SEATS)
    opened.set()
    errors = [one.exception() for one in asking]
    assert [str(error) for error in errors] == ["too large"] * SEATS
    assert len({id(error) for error in errors}) == SEATS
    assert len(calls) == 1


def test_what_went_wrong_by_itself_is_tried_again(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """No refusal: the next one who asks may have it."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(QuireError, match="cannot be used"):
            grammars.check(LARGE["lark"])
    grammars.check(LARGE["lark"])


def ends(function: Callable[[], object]) -> bool:
    """Whether a call in a thread of its own comes to an end."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


class Interrupting:
    """A lock after whose n-th use there is an interrupt."""

    def __init__(self, lock: Any, use: int) -> None:
        self.lock = lock
        self.uses = use

    def __enter__(self) -> None:
        self.lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self.lock.__exit__(None, None, None)
        self.uses -= 1
        if self.uses == 0:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


def test_who_is_interrupted_keeps_nobody_waiting(grammars: Grammars) -> None:
    lock = grammars._lock
    uses = 0
    while True:
        uses += 1
        wanted = StructuredOutputs(regex="a" * uses)
        grammars._lock = interrupting = Interrupting(lock, uses)  # type: ignore[assignment]
        with contextlib.suppress(KeyboardInterrupt):
            grammars.check(wanted)
        grammars._lock = lock
        assert ends(lambda wanted=wanted: grammars.check(wanted)), uses  # type: ignore[misc]
        if interrupting.uses > 0:
            break
    assert uses > 2


def test_who_is_interrupted_gives_the_seat_back() -> None:
    seats = Seats()
    seats._free = Interrupting(seats._free, 1)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt), seats.one():
        pass
    assert not seats._since


def test_few_wait_for_large_ones(grammars: Grammars, gate: Gate, pool: ThreadPoolExecutor) -> None:
    asking = [pool.submit(grammars.check, StructuredOutputs(grammar=rules(300 + i))) for i in range(SEATS)]
    wait_for(lambda: len(grammars._seats._since) == SEATS)
    for wanted in (StructuredOutputs(grammar=rules(299)), StructuredOutputs(grammar=rules(300))):
        with pytest.raises(GrammarsBusy, match=f"{SEATS} large grammars are waited for.*try again later") as raised:
            grammars.check(wanted)
        assert isinstance(raised.value, ResourceExhausted)
    grammars.check(StructuredOutputs(regex="small"))
    assert len(gate.begun) == 1  # one at a time
    gate.open.set()
    for one in asking:
        one.result()
    grammars.check(StructuredOutputs(grammar=rules(299)))


def test_a_burst_of_quick_ones_waits(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "PATIENCE", 60.0)
    wanted = [StructuredOutputs(grammar=rules(300 + i // 2)) for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(grammars.check, wanted))


def test_large_ones_are_kept_up_to_a_sum(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    text = GrammarTrial.text

    def heavy(trial: GrammarTrial, wanted: StructuredOutputs) -> str:
        found = text(trial, wanted)
        trial.kept = 300 << 20
        return found

    monkeypatch.setattr(GrammarTrial, "text", heavy)
    monkeypatch.setattr("quire.grammars.grammars.MAX_HELD_MEMORY", 2 << 30)  # all of them are still asked for
    small = StructuredOutputs(regex="a")
    wanted = [StructuredOutputs(regex=f"a{{{i}}}") for i in range(5)]
    for one in (wanted[0], small, *wanted[1:]):
        grammars.check(one)
    assert list(grammars._compiled) == wanted[2:]
    for i in range(5):
        grammars.check(StructuredOutputs(regex="b" * (i + 1)))
    assert list(grammars._compiled)[:3] == wanted[2:]
    assert set(grammars._sizes) == set(grammars._compiled)


@pytest.mark.parametrize("wanted", [LARGE["lark"], StructuredOutputs(grammar="start: X\nX: /a*/ & /ab?/")])
def test_what_was_checked_is_there_while_it_is_asked_for(
    grammars: Grammars, asked: list[StructuredOutputs], monkeypatch: pytest.MonkeyPatch, wanted: StructuredOutputs
) -> None:
    """The engine's thread compiles nothing large, whatever others ask for between the check and the
    beginning.
    """
    monkeypatch.setattr("quire.grammars.grammars.MAX_COMPILED", 1)
    first, second = copy_of(wanted), copy_of(wanted)
    grammars.check(first)
    grammars.check(second)
    grammars.check(StructuredOutputs(regex="b"))
    assert list(grammars._compiled) == [StructuredOutputs(regex="b")]
    del first
    gc.collect()
    grammars.matcher(second)
    assert len(asked) == 1
    asked.clear()
    del second
    gc.collect()
    assert not grammars._held


def test_what_is_held_has_a_limit(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large grammars of requests under way; each counts once, and what is known is not compiled
    again.
    """
    text, tried = GrammarTrial.text, list[str | None]()

    def heavy(trial: GrammarTrial, wanted: StructuredOutputs) -> str:
        found = text(trial, wanted)
        trial.kept = 150
        tried.append(wanted.regex)
        return found

    monkeypatch.setattr(GrammarTrial, "text", heavy)
    monkeypatch.setattr("quire.grammars.grammars.MAX_HELD_MEMORY", 300)
    one, two, three = (StructuredOutputs(regex=f"{letter}{{1,3}}") for letter in "abc")
    again = StructuredOutputs(regex=one.regex)
    for wanted in (one, again, two):
        grammars.check(wanted)
    for _ in range(2):
        with pytest.raises(GrammarsBusy, match="hold 0 MiB, and no more are compiled from 0 MiB on; try again later"):
            grammars.check(three)
    grammars.check(StructuredOutputs(regex="d"))
    grammars.matcher(again)
    del two, wanted
    gc.collect()
    grammars.check(three)
    assert tried == ["a{1,3}", "b{1,3}", "c{1,3}"]
