"""Time of a decode step by the number of rounds that waiting OpenMP threads spin.

One process for each number of rounds that a waiting thread spins before it sleeps, all on the same
checkpoint. They are timed in turn, first on the idle machine, then beside other processes that only
compute: there the thread that a step waits for may have to wait for a processor, which a spinning
thread keeps busy. All texts are compared.

``python bench/waiting.py [--shape quick-30m] [--spins 300000,3000] [--neighbours 2] [--rounds 8]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from quire.base.errors import QuireError
from quire.base.openmp import SPINS, VARIABLES
from quire_bench.checkpoints import DEFAULT_DIRECTORY, SHAPES, checkpoint
from quire_bench.reports import interleave, print_json, print_table

GNUS_DEFAULT = 300_000
"""Default rounds of GNU's runtime, without a setting by the user or by Quire."""

CHILD = """
import json, sys, time
from quire import LLM, SamplingParams
from quire_bench.reports import random_prompts
path, batch, decode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
llm = LLM(path, device="cpu", kv_cache_memory="256MiB", enable_prefix_caching=False)
prompts = list(random_prompts(batch, 128, llm.engine.checks.vocab_size).numpy())
params = SamplingParams(temperature=0, max_tokens=decode + 1, ignore_eos=True)
for line in sys.stdin:
    requests = [llm.engine.submit(prompt, params)[0] for prompt in prompts]
    while not all(request.output.token_ids for request in requests):
        llm.engine.step()
    started, steps = time.perf_counter(), 0
    while llm.engine.has_work:
        llm.engine.step()
        steps += 1
    seconds = (time.perf_counter() - started) / steps
    print(json.dumps({"seconds": seconds, "tokens": [request.output.token_ids for request in requests]}), flush=True)
"""


class Subject:
    """A process that decodes on command."""

    def __init__(self, stack: ExitStack, path: Path, arguments: argparse.Namespace, spins: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        self.tokens: list[list[int]] = []
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(path), str(arguments.batch), str(arguments.decode)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=inherited | {"OMP_NUM_THREADS": str(arguments.threads), "GOMP_SPINCOUNT": spins},
            )
        )
        stack.callback(self._process.kill)

    def decode(self) -> float:
        """Return the seconds of a step."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print("go", file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            raise QuireError(f"the process that decodes ended with status {self._process.wait()}")
        found = json.loads(line)
        self.tokens = found["tokens"]
        return float(found["seconds"])


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run ``count`` processes that compute all the time."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for one in found:
            one.kill()
            one.wait()


def main() -> None:
    """Print a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="quick-30m")
    spins = f"{GNUS_DEFAULT},{SPINS},1000,0"
    parser.add_argument("--spins", default=spins, help=f"Rounds of spinning, by commas. Default {spins}.")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY, help="Where random checkpoints are kept.")
    for name, value, meaning in (
        ("batch", 1, "Sequences that decode together."),
        ("threads", os.cpu_count() or 1, "Threads of each process."),
        ("neighbours", os.cpu_count() or 1, "Processes that compute beside it when the machine is busy."),
        ("rounds", 8, "Rounds, on the quiet and on the busy machine."),
        ("decode", 32, "Steps of a round."),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{meaning} Default {value}.")
    arguments = parser.parse_args()
    path = checkpoint(arguments.shape, directory=arguments.dir)
    rows, found = [], {}
    with ExitStack() as stack:
        subjects = {count: Subject(stack, path, arguments, count) for count in arguments.spins.split(",")}
        functions: dict[str, Callable[[], float | None]] = {spins: one.decode for spins, one in subjects.items()}
        for machine, count in (("quiet", 0), ("busy", arguments.neighbours)):
            with neighbours(count):
                compared = interleave(functions, arguments.rounds)
            found[machine] = compared
            rows += [
                {
                    "machine": machine,
                    "spins": spins,
                    "ms a step": 1e3 * compared.spread(spins).median,
                    "over the first": str(compared.ratios[spins]),
                }
                for spins in subjects
            ]
        if len({json.dumps(one.tokens) for one in subjects.values()}) != 1:
            raise QuireError("the texts differ")
    print_table(rows)
    print_json({"bench": "waiting", **vars(arguments), **found})


if __name__ == "__main__":
    main()
