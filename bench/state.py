"""Costs of the state: fork, deep copy, rewind, save and restore of a long sequence; a second chat
turn; start-up.

A random checkpoint of one of the shapes; the start-up is the bundled model's. ``quire bench state``
does the same with any model. ``python bench/state.py [--tokens 32768] [--shape smollm2-135m]
[--rounds 5]``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.base.errors import QuireError
from quire_bench.checkpoints import DEFAULT_DIRECTORY, checkpoint
from quire_bench.state import run_state, start_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    arguments = parser.parse_args()
    shape = "smollm2-135m-32k" if arguments.shape == "smollm2-135m" and arguments.tokens > 8192 else arguments.shape
    try:
        run_state(
            str(checkpoint(shape, directory=arguments.dir)),
            engine_options={"kv_cache_memory": "3GiB"},
            tokens=arguments.tokens,
            rounds=arguments.rounds,
            start=start_rows,
            facts={"shape": shape},
        )
    except QuireError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
