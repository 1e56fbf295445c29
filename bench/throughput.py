"""Hundreds of requests at once, in turn with ``transformers``' continuous batching and its static
batches.

A random checkpoint of one of the shapes, whose texts are the same in every right runtime. Prompts
and texts have 100 to 1,024 tokens times the scale, which is chosen so that it takes minutes here.
``quire bench throughput`` does the same with any model. ``python bench/throughput.py [--shape
smollm2-135m] [--requests 256] [--scale 0.25] [--rounds 3]``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from checkpoints import DEFAULT_DIRECTORY, checkpoint
from quire.errors import QuireError
from quire_bench.latency import PEERS
from quire_bench.throughput import PEER_BATCHES, run_throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--scale", type=float, default=None, help="of all lengths; by default chosen by a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", default="transformers", choices=PEERS)
    parser.add_argument(
        "--peer-batches", default=",".join(map(str, PEER_BATCHES)), help="batch sizes of the peer to try"
    )
    parser.add_argument("--kv-cache-memory", default="2GiB")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    try:
        batches = [int(part) for part in arguments.peer_batches.split(",")]
    except ValueError:
        parser.error(f"--peer-batches {arguments.peer_batches!r}; whole numbers, separated by commas, are accepted")
    try:
        run_throughput(
            str(checkpoint(arguments.shape, directory=arguments.dir)),
            engine_options={"device": arguments.device, "kv_cache_memory": arguments.kv_cache_memory},
            requests=arguments.requests,
            scale=arguments.scale,
            rounds=arguments.rounds,
            seed=arguments.seed,
            peer=arguments.peer,
            peer_batches=batches,
        )
    except QuireError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
