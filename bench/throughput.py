"""Hundreds of requests at once, in turn with ``transformers``' continuous batching and its static
batches, and with vLLM.

A random checkpoint of one of the shapes, whose texts are the same in every right runtime. Prompts
and texts have 100 to 1,024 tokens times the scale, which is chosen so that it takes minutes here.
``quire bench throughput`` does the same with any model, without vLLM. ``python bench/throughput.py
[--shape smollm2-135m] [--requests 256] [--scale 0.25] [--rounds 3] [--vllm PYTHON]``, where
``PYTHON`` is the interpreter that has vLLM (``docs/benchmarks.md``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from quire.base.config import parse_bytes
from quire.base.errors import QuireError
from quire_bench.checkpoints import DEFAULT_DIRECTORY, checkpoint
from quire_bench.latency import PEERS
from quire_bench.peer_process import PeerFailed
from quire_bench.peer_table import started
from quire_bench.throughput import LONGEST, PEER_BATCHES, Outcome, PeerWay, Workload, run_throughput


@contextmanager
def vllm_way(python: str, model: Path, requests: int, pool: str) -> Iterator[PeerWay]:
    """Start vLLM in a process that is stopped between requests; yield its way to serve."""
    with tempfile.TemporaryDirectory(prefix="quire-vllm-") as scratch:
        threads = torch.get_num_threads()
        with started("vllm", python, threads, Path(scratch) / "vllm.log") as peer:
            peer.ask(
                "load",
                model=str(model),
                dtype="bfloat16",
                quantization=None,
                threads=threads,
                length=2 * LONGEST,
                batch=requests,
                kv_bytes=parse_bytes(pool),
            )

            def way(work: Workload, batch: int) -> Outcome:
                done = peer.ask("serve", prompts=work.prompts, lengths=work.lengths)
                return Outcome(tokens=tuple(map(tuple, done["tokens"])), seconds=done["seconds"])

            yield way


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
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="the interpreter that has vLLM")
    parser.add_argument("--kv-cache-memory", default="2GiB")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    try:
        batches = [int(part) for part in arguments.peer_batches.split(",")]
    except ValueError:
        parser.error(f"--peer-batches {arguments.peer_batches!r}; whole numbers, separated by commas, are accepted")
    try:
        with ExitStack() as stack:
            model = checkpoint(arguments.shape, directory=arguments.dir)
            engines: dict[str, PeerWay] = {}
            if arguments.vllm:
                pool = arguments.kv_cache_memory
                engines["vLLM"] = stack.enter_context(vllm_way(arguments.vllm, model, arguments.requests, pool))
            run_throughput(
                str(model),
                engine_options={"device": arguments.device, "kv_cache_memory": arguments.kv_cache_memory},
                requests=arguments.requests,
                scale=arguments.scale,
                rounds=arguments.rounds,
                seed=arguments.seed,
                peer=arguments.peer,
                peer_batches=batches,
                engines=engines,
            )
    except (PeerFailed, QuireError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
