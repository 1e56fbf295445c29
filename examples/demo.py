"""The main job in one go, in float32: complete, fork, rewind, save, end the process, restore in a
new one, go on.

Run it by ``make demo``, or ``python examples/demo.py``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from quire import LLM, SamplingParams

PROMPT = """\
# module base
port = 8031
host = 1276
# module other
alias = port
# checks
assert alias =="""
FUNCTION = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=6)
CONTINUE = SamplingParams(temperature=0, max_tokens=24)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.7, repetition_penalty=1.15, max_tokens=32, seed=seed)


def restore(path: Path) -> None:
    """What the second process does: load the file and go on."""
    llm = LLM("tiny-python", dtype="float32")
    started = time.perf_counter()
    session = llm.load_session(path)
    seconds = time.perf_counter() - started
    output = session.generate(CONTINUE).outputs[0]
    print(json.dumps({"token_ids": output.token_ids, "seconds": seconds}))


def main() -> None:
    console = Console()
    timings = Table("what", "how long", "note", title="Timings and pages", title_justify="left")

    started = time.perf_counter()
    llm = LLM("tiny-python", dtype="float32")
    timings.add_row("load the model", f"{time.perf_counter() - started:.2f} s", "7M parameters, bundled, float32")

    console.rule("1  recall: the model looks values up in its context")
    output = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    console.print(Syntax(PROMPT + output.text.split("\n")[0], "python"))

    console.rule("2  complete a function")
    session = llm.session(FUNCTION)
    started = time.perf_counter()
    output = session.generate(SamplingParams(temperature=0.5, repetition_penalty=1.1, max_tokens=48, seed=1)).outputs[0]
    seconds = time.perf_counter() - started
    console.print(Syntax(session.text, "python"))
    timings.add_row("generate 48 tokens", f"{seconds * 1e3:.0f} ms", f"{len(output.token_ids) / seconds:.0f} tok/s")

    console.rule("3  fork it: two continuations share its pages")
    started = time.perf_counter()
    left, right = session.fork(n=2)
    seconds = time.perf_counter() - started
    timings.add_row("fork twice", f"{seconds * 1e6:.0f} µs", "nothing is copied")
    for name, branch, seed in (("left", left, 1), ("right", right, 2)):
        branch.append("\n    def peek(self):\n")
        branch.generate(sampled(seed))
        held, shared = branch.pages
        console.print(f"[bold]{name}[/bold] ({held} pages, {shared} of them shared)")
        console.print(Syntax(branch.text[len(session.text) :].strip("\n"), "python"))

    console.rule("4  rewind: go back, and it goes the same way again")
    before = len(left)
    again = left.rewind(n=32)
    timings.add_row("rewind 32 tokens", f"{again} tokens to run again", f"{before} -> {len(left)} tokens")
    first = left.fork().generate(CONTINUE).outputs[0].token_ids
    second = left.generate(CONTINUE).outputs[0].token_ids
    console.print(f"two continuations from the same place are equal: {first == second}")

    console.rule("5  save, end the process, restore in a new one")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "stack.quire"
        started = time.perf_counter()
        session.save(path)
        timings.add_row("save", f"{(time.perf_counter() - started) * 1e3:.1f} ms", f"{path.stat().st_size:,} bytes")
        done = subprocess.run(
            [sys.executable, __file__, "--restore", str(path)], stdout=subprocess.PIPE, text=True, check=True
        )
    restored = json.loads(done.stdout)
    timings.add_row("restore", f"{restored['seconds'] * 1e3:.1f} ms", "in another process, checksums verified")
    here = session.generate(CONTINUE).outputs[0].token_ids
    console.print(f"the new process goes on with the same tokens: {here == restored['token_ids']}")
    console.print(timings)
    if not (first == second and here == restored["token_ids"]):
        sys.exit("the demo found a difference that must not be")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restore", type=Path, help="continue from this state file and print the tokens as JSON")
    arguments = parser.parse_args()
    if arguments.restore is not None:
        restore(arguments.restore)
    else:
        main()
