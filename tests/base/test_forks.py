"""After ``os.fork()``: in the child what was made before refuses at once, and new LLMs work; the
parent goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import Unsupported
from quire.build import resolve_device

PROGRAM = """
import asyncio, multiprocessing, os, sys, threading, time
import torch
from quire import LLM, AsyncLLM, QuireError, SamplingParams
from quire.build import EXECUTOR_FACTORY
from quire.base.config import ExecutorConfig

folder = sys.argv[1]
torch.set_num_threads(2)  # of which one is the parent's alone
given = dict(device="cpu", dtype="float32", kv_cache_memory="16MiB")
params = SamplingParams(temperature=0, max_tokens=3)
prompt = [[5] * 100]


def tokens(llm):
    return list(llm.generate(prompt, params)[0].outputs[0].token_ids)


def awaited(coroutine):
    return asyncio.new_event_loop().run_until_complete(coroutine)


def outcome(verb):
    try:
        return "nothing raised", verb()
    except QuireError as error:
        return str(error)


llm = LLM("tiny-python", **given, state_dir=folder + "/state", store=["file://" + folder + "/store"])
expected = tokens(llm)
session = llm.session(prompt[0], name="kept")
stream = llm.session(prompt[0]).stream(SamplingParams(max_tokens=30, ignore_eos=True))
next(stream)
executor = llm.executor
cache = executor.create_kv_cache()
store = llm.engine.stored.store
own = EXECUTOR_FACTORY.create_executor(ExecutorConfig(model_info="tiny-python", device="cpu", dtype="float32", max_sequence_length=64))
async_llm = AsyncLLM("tiny-python", **given)
loop = asyncio.new_event_loop()
execute = async_llm.engine.runner.execute
async_llm.engine.runner.execute = lambda step: time.sleep(0.02) or execute(step)  # the children need the processor
running = async_llm.stream([7] * 20, SamplingParams(max_tokens=2000, ignore_eos=True))
loop.run_until_complete(anext(running))  # its engine steps at every fork

VERBS = {
    "generate": lambda: tokens(llm),
    "session": lambda: llm.session(prompt[0]),
    "chat": lambda: llm.chat([{"role": "user", "content": "x"}]),
    "resume": lambda: llm.resume("kept"),
    "metrics": lambda: llm.metrics(),
    "status": lambda: llm.status(),
    "capabilities": lambda: llm.capabilities(),
    "pages": lambda: llm.pages(),
    "append": lambda: session.append(prompt[0]),
    "Session.generate": lambda: session.generate(params),
    "fork": lambda: session.fork(),
    "rewind": lambda: session.rewind(5),
    "save": lambda: session.save(folder + "/saved"),
    "commit": lambda: session.commit("main", "first"),
    "next": lambda: next(stream),
    "create_kv_cache": lambda: executor.create_kv_cache(),
    "lengths": lambda: cache.lengths,
    "cancel": lambda: executor.cancel(),
    "warmup": lambda: own.warmup(),
    "Executor.create_kv_cache": lambda: own.create_kv_cache(),
    "stat": lambda: store.stat(),
    "flush": lambda: store.flush(1.0),
    "AsyncLLM.generate": lambda: awaited(async_llm.generate(prompt[0], params)),
    "AsyncLLM.session": lambda: awaited(async_llm.session(prompt[0])),
    "AsyncLLM.stream": lambda: awaited(anext(async_llm.stream(prompt[0], params))),
    "AsyncLLM.metrics": lambda: awaited(async_llm.metrics()),
}


def child():
    outcomes = {name: outcome(verb) for name, verb in VERBS.items()}
    said = set(outcomes.values()) if all(isinstance(one, str) for one in outcomes.values()) else outcomes
    assert len(said) == 1 and "made before os.fork()" in said.pop(), outcomes
    for held in (session, stream, llm):
        held.close()  # gives back nothing that is the parent's
    awaited(async_llm.close())
    in_use = outcome(lambda: LLM("tiny-python", **given, state_dir=folder + "/state"))
    assert "in use by another process" in in_use, in_use
    with LLM("tiny-python", **given, state_dir=folder + f"/{os.getpid()}") as new:
        assert tokens(new) == expected
        assert awaited(generated(AsyncLLM("tiny-python", **given))) == expected
    return True


async def generated(one):
    return list((await one.generate(prompt, params))[0].outputs[0].token_ids)


def fork(end):
    if not (pid := os.fork()):
        end(0 if child() else 1)
    statuses.append(os.waitpid(pid, 0)[1])


statuses = []
fork(sys.exit)
thread = threading.Thread(target=fork, args=[os._exit])
thread.start()
thread.join()
assert statuses == [0, 0]
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply(child)

# The parent goes on.
assert tokens(llm) == expected
next(stream)
loop.run_until_complete(running.aclose())
assert loop.run_until_complete(generated(async_llm)) == expected
loop.run_until_complete(async_llm.close())
session.generate(params)
llm.close()

# A child that lives on does not keep the parent's directory.
llm = LLM("tiny-python", **given, state_dir=folder + "/state")
assert llm.resumable() == ["kept"]
reading, writing = os.pipe()
if not (pid := os.fork()):
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
llm.close()
LLM("tiny-python", **given, state_dir=folder + "/state").close()
os.close(writing)
os.waitpid(pid, 0)
print("over")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_children_of_a_fork(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_cuda_after_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    for name in ("auto", "cuda"):
        with pytest.raises(Unsupported, match=r"CUDA was used before os\.fork"):
            resolve_device(name)
