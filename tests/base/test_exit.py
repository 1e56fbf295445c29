"""What lives when a program ends is let go without a word, in whatever order the interpreter
empties its modules.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.base import process_exit

ROOT = Path(quire.__file__).parent

KEPT_MAIN = """
import sys
# What `import __main__` in a module does that nothing empties before the end (dill's does): the
# program's objects are let go after all modules that they need.
sys.kept_main = sys.modules["__main__"]
"""

PROGRAM = """
from quire import LLM, SamplingParams

llm = LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB")
held = llm.session("def f(x):\\n")
pinned = llm.session("class A:\\n", pin=True)
stream = llm.session("import os\\n").stream(SamplingParams(max_tokens=64, ignore_eos=True))
next(stream)
streamed = llm.session("import sys\\n")
half = streamed.stream(SamplingParams(max_tokens=64, ignore_eos=True))
next(half)
cache = llm.executor.create_kv_cache()
"""

ASYNC_PROGRAM = """
import asyncio
from quire import AsyncLLM, SamplingParams
from quire.server.http.app import create_app
from quire.server.http.serving import Server

loop = asyncio.new_event_loop()
async_llm = AsyncLLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB")
server = Server(create_app(async_llm))
params = SamplingParams(max_tokens=2000, ignore_eos=True)

async def begin():
    session = await async_llm.session("def f(x):\\n")
    stream, other = session.stream(params), async_llm.stream("class A:\\n", params)
    await anext(stream)
    await anext(other)
    return session, stream, other

kept = loop.run_until_complete(begin())  # two requests run on in the background
"""

STORING = """
import atexit, gc, multiprocessing, os, sys, threading
from quire import LLM, SamplingParams
from quire.store.files import FileTier

def hold(put=FileTier._put):
    # Nothing is written before the process ends.
    gate = threading.Event()
    atexit.register(gate.set)
    multiprocessing.util.Finalize(None, gate.set, exitpriority=1)
    FileTier._put = lambda *args: gate.wait() and put(*args)

def run(name):
    hold()
    llm = LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="16MiB", store=[f"file://{sys.argv[1]}/{name}"])
    llm.generate([[9] * 600], SamplingParams(max_tokens=1))
    return llm

def drop():
    run("dropped")
    gc.collect()

child = multiprocessing.get_context("fork").Process(target=run, args=["process"])
child.start()
child.join()
if not (forked := os.fork()):
    kept = run("forked")
    sys.exit()
assert (child.exitcode, os.waitpid(forked, 0)[1]) == (0, 0)
drop()
kept = run("kept")
"""

# Python aborts if a daemon thread holds the lock of stderr's buffer at the end; os.write has none.
CALLING = """
import os
import threading
import torch
from quire import QuireError
from quire.build import EXECUTOR_FACTORY
from quire.executor import ExecutorConfig

executor = EXECUTOR_FACTORY.create_executor(ExecutorConfig(model_info="tiny-python", dtype="float32", device="cpu"))
begun = threading.Event()

def call():
    while True:
        try:
            executor.forward(torch.full((4, 500), 5))
        except QuireError as error:
            os.write(2, f"{error}\\n".encode())
            return
        begun.set()

threading.Thread(target=call, daemon=True).start()
begun.wait()
"""

UNHELD = """
import sys
from quire import LLM, SamplingParams

llm = LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="128MiB", store=[f"file://{sys.argv[1]}"])
for first in range(4):
    llm.generate([[first, *range(6, 600)]], SamplingParams(max_tokens=1), use_tqdm=False)
"""


def ended(program: str, *arguments: str) -> tuple[int, str]:
    """Exit status and stderr of a program of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(PROGRAM, marks=pytest.mark.slow, id="sessions and streams"),
        pytest.param(ASYNC_PROGRAM, marks=pytest.mark.slow, id="a stepping engine"),
        pytest.param(PROGRAM + ASYNC_PROGRAM, id="both"),
    ],
)
def test_alive_at_exit(program: str) -> None:
    assert ended(KEPT_MAIN + program) == (0, "")


def objects_in(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*.quire"))


def test_what_was_accepted_is_written_at_exit(tmp_path: Path) -> None:
    """In a process, a child of ``multiprocessing``, and a child of ``os.fork``; by an LLM that the
    program has, and by one that it has dropped.
    """
    assert ended(STORING, str(tmp_path)) == (0, "")
    written = {name: objects_in(tmp_path / name) for name in ("process", "forked", "dropped", "kept")}
    assert set(written.values()) == {written["kept"]}, written
    assert written["kept"] >= 2


@pytest.mark.slow
def test_a_daemon_thread_of_the_program_may_be_in_a_call() -> None:
    status, said = ended(CALLING)
    assert status == 0, said
    # The end finds it between two forwards, or before one.
    assert said in ("forward: the executor is shut down; make a new one\n", "forward was cancelled\n")


def test_a_call_in_any_room_is_a_call_of_quire() -> None:
    assert Path(process_exit._PACKAGE) == ROOT


@pytest.mark.slow
def test_threads_end_before_the_interpreter(tmp_path: Path) -> None:
    """They are in PyTorch's code, where the interpreter's end would abort the process."""
    for number in range(8):
        assert ended(UNHELD, str(tmp_path / str(number))) == (0, "")
        assert objects_in(tmp_path / str(number)) == 12


def test_the_emulation_lets_objects_go_last() -> None:
    """A finaliser that is not guarded finds its function's module empty, and not without the
    emulation.
    """
    program = "import json\nclass Late:\n    dumps = staticmethod(json.dumps)\n    def __del__(self): self.dumps([])\nlate = Late()\n"
    assert ended(program) == (0, "")
    status, said = ended(KEPT_MAIN + program)
    assert (status, said.count("Exception ignored in")) == (0, 1), said


def test_every_finaliser_is_guarded() -> None:
    found = 0
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "__del__" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name == "__del__":
                found += 1
                assert [ast.unparse(one) for one in node.decorator_list] == ["unless_exiting"], f"{path}:{node.lineno}"
    assert found >= 3
