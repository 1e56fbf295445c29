"""Decode at batch 1, 4, 16 and prefill of 512 and 2,048 tokens, interleaved with ``transformers``'
generate.

Random checkpoints in bfloat16 of the shapes of SmolLM2-135M and Llama-3.2-1B, made when they are
first needed. ``python bench/latency.py [--shapes smollm2-135m,llama-3.2-1b] [--rounds 3]
[--quick]``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from checkpoints import DEFAULT_DIRECTORY, checkpoint
from quire_bench.hardware import measure
from quire_bench.latency import run_latency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="smollm2-135m,llama-3.2-1b")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", type=int, default=24)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--peer", default="transformers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    hardware = measure(device=arguments.device, seconds=10.0)
    for shape in arguments.shapes.split(","):
        run_latency(
            str(checkpoint(shape, directory=arguments.dir)),
            engine_options={"device": arguments.device, "kv_cache_memory": "2GiB"},
            batches=[int(part) for part in arguments.batches.split(",")],
            prompts=[int(part) for part in arguments.prompts.split(",")],
            decode=arguments.decode,
            context=arguments.context,
            rounds=arguments.rounds,
            peer=arguments.peer,
            hardware=hardware,
        )


if __name__ == "__main__":
    main()
