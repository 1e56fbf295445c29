"""``quire bench``: the command line of the benchmarks in the package ``quire_bench``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.base.errors import InvalidArgument, Unsupported
from quire.cli.options import KeyOption, ModelOption, chosen_model, command

bench_app = typer.Typer(
    help="Measure tok/s, time to first token and achieved over possible bandwidth: a table, then one JSON line.",
    no_args_is_help=True,
)


PeerOption = Annotated[str, typer.Option(help="Compare with: none, transformers.")]
RoundsOption = Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")]


@contextmanager
def _measuring() -> Iterator[None]:
    """Report in one sentence that ``quire_bench``, which the block imports, is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "quire_bench":
            raise
        raise Unsupported(
            "quire bench needs the package quire_bench, which is not installed; "
            "pip install . in Quire's folder brings it"
        ) from error


@command(bench_app, "engine", name="latency")
def bench_latency(
    model: ModelOption = None,
    batch: Annotated[str, typer.Option(help="Batch sizes to decode with, by commas.")] = "1,4,16",
    prompt: Annotated[str, typer.Option(help="Prompt lengths to prefill, by commas.")] = "512,2048",
    decode: Annotated[int, typer.Option(help="Tokens to decode for each sequence.")] = 32,
    context: Annotated[int, typer.Option(help="Prompt length before decoding.")] = 128,
    rounds: RoundsOption = 3,
    peer: PeerOption = "none",
    **options: Any,
) -> None:
    """Measure prefill and decode speed beside the hardware's peak and a peer, in one run."""
    with _measuring():
        from quire_bench.latency import run_latency

    model, chosen = chosen_model(model, options)
    run_latency(
        model,
        engine_options=chosen,
        batches=_integers("batch", batch),
        prompts=_integers("prompt", prompt),
        decode=decode,
        context=context,
        rounds=rounds,
        peer=peer,
    )


@command(bench_app, "engine", name="throughput")
def bench_throughput(
    model: ModelOption = None,
    requests: Annotated[int, typer.Option(help="Requests, all handed over at once.")] = 256,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Fraction of the lengths, which are 100 to 1,024 tokens. Default: measured, so that it takes minutes.",
            show_default=False,
        ),
    ] = None,
    peer: PeerOption = "none",
    peer_batches: Annotated[str, typer.Option(help="Batch sizes of the peer to try, by commas.")] = "8,16,32,64",
    rounds: RoundsOption = 3,
    seed: Annotated[int, typer.Option(help="Of the random lengths and tokens.")] = 0,
    **options: Any,
) -> None:
    """Measure tokens per second of many requests, beside a peer's continuous and static batches.

    It takes minutes. Smaller numbers make it short: --requests 32 --scale 0.1 --rounds 1.
    """
    with _measuring():
        from quire_bench.throughput import run_throughput

    model, chosen = chosen_model(model, options)
    run_throughput(
        model,
        engine_options=chosen,
        requests=requests,
        scale=scale,
        rounds=rounds,
        seed=seed,
        peer=peer,
        peer_batches=_integers("peer-batches", peer_batches),
    )


@command(bench_app, "engine", name="speculative")
def bench_speculative(
    model: ModelOption = None,
    tasks: Annotated[int, typer.Option(help="Requests of each kind, at most.")] = 60,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256,
    batches: Annotated[str, typer.Option(help="Requests at a time, by commas.")] = "1,4,16",
    kinds: Annotated[str, typer.Option(help="By commas: edit (of code), agent (copies results), free.")] = (
        "edit,agent,free"
    ),
    peer: Annotated[bool, typer.Option(help="Compare with the prompt lookup of transformers.")] = False,
    vllm: Annotated[
        str | None, typer.Option(metavar="PYTHON", help="Compare with the n-grams of vLLM, which this interpreter has.")
    ] = None,
    queue: Annotated[bool, typer.Option(help="Let a request begin as soon as another one ended.")] = False,
    **options: Any,
) -> None:
    """Measure decoding with speculation against decoding without, by turns, with equal texts."""
    with _measuring():
        from quire_bench.speculative import run_speculative

    model, chosen = chosen_model(model, options)
    run_speculative(
        model,
        engine_options=chosen,
        tasks=tasks,
        tokens=tokens,
        batches=_integers("batches", batches),
        kinds=kinds.split(","),
        peer=peer,
        vllm=vllm,
        queue=queue,
    )


@command(bench_app, "engine", name="state")
def bench_state(
    model: ModelOption = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the sequence that is forked, rewound and saved.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Repetitions of what is slow; quick verbs have 20 times as many.")] = 5,
    **options: Any,
) -> None:
    """Measure fork, copy, rewind, save, restore and a second turn; start-up of bundled models."""
    with _measuring():
        from quire_bench.state import run_state, start_rows
    from quire.models.catalogue import bundled_models

    name, chosen = chosen_model(model, options)
    run_state(
        name,
        engine_options=chosen,
        tokens=tokens,
        rounds=rounds,
        start=(lambda count: start_rows(count, name)) if name in bundled_models() else None,
    )


PEER_OPTIONS: dict[str, tuple[Any, str]] = {
    "quick": (bool, "The smallest shape, few cells: 3 minutes. Default: no-quick."),
    "shapes": (str, "Shapes of models, by commas. Default: smollm2-135m,qwen3-0.6b,llama-3.2-1b."),
    "dtypes": (str, "By commas: bfloat16, float32, int8, int4. Default: bfloat16."),
    "prefill": (str, "Lengths of prompts. Default: 128,512,2048."),
    "decode": (str, "Batches and contexts, as in 1x128,4x1024. Default: 1, 4 and 16 after 128, 1024 and 4096."),
    "steps": (int, "Decode steps of a round. Default: 16."),
    "rounds": (int, "Interleaved rounds. Default: 5."),
    "peers": (str, "By commas: quire, transformers, llama.cpp, vllm. Default: all that are there."),
    "llama": (str, "The interpreter that has llama_cpp and gguf."),
    "vllm": (str, "The interpreter that has vllm."),
    "threads": (int, "Default: the CPUs of this process."),
    "hardware_seconds": (float, "Time for bandwidth and products. Default: 10."),
    "dir": (Path, "Keep checkpoints here (7 GB and more); else they are temporary."),
    "plot": (Path, "Draw into this file (needs matplotlib)."),
}
"""Types and help texts of the options of ``quire_bench.peer_table``, which has the defaults."""


@command(bench_app, name="peers", more=PEER_OPTIONS)
def bench_peers(**options: Any) -> None:
    """Compare prefill and decode with the transformers, llama.cpp and vLLM that are installed.

    docs/benchmarks.md has the tables, and says how the others are installed.
    """
    with _measuring():
        from quire_bench.peer_table import main

    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        words += [] if value is None or value is False else [flag] if value is True else [flag, str(value)]
    main(words)


LOAD_OPTIONS: dict[str, tuple[Any, str]] = {
    "peer": (str, "A second server to compare with, in interleaved rounds."),
    "peer_model": (str, "The model of the second server; by default the first that it lists."),
    "peer_api_key": (str, "Key for the second server."),
    "requests": (int, "Requests; of a trace its first ones. Default: 256."),
    "rate": (float, "Requests a second, arriving at random; inf: all at once. Default: inf."),
    "concurrency": (int, "Requests under way at most; by default any number."),
    "prompt_tokens": (str, "Lengths of prompts, LEAST-MOST. Default: 100-1024."),
    "output_tokens": (str, "Lengths of answers, LEAST-MOST. Default: 100-1024."),
    "vocab_size": (int, "Prompts are random token ids below this. Default: 1024."),
    "trace": (Path, "A trace in Mooncake's format (JSONL), in place of random requests."),
    "scale": (float, "Fraction of the trace's lengths. Default: 1.0."),
    "speed": (float, "2 sends the trace in half the time. Default: 1.0."),
    "stream": (bool, "Read answers token by token. Default: stream."),
    "rounds": (int, "Rounds; with a peer they are interleaved. Default: 1."),
    "seed": (int, "Of lengths, arrivals and tokens. Default: 0."),
}
"""Types and help texts of the arguments of ``run_serve``, which has the defaults."""


@command(bench_app, name="serve", more=LOAD_OPTIONS)
def bench_serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, as in http://127.0.0.1:8000.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="By default the first that the server lists.", show_default=False),
    ] = None,
    api_key: KeyOption = None,
    **options: Any,
) -> None:
    """Load a server: tokens per second, and percentiles of times to first, next and last token."""
    with _measuring():
        from quire_bench.serve_load import run_serve

    given = {name: value for name, value in options.items() if value is not None}
    given |= {name: _span(name, given[name]) for name in ("prompt_tokens", "output_tokens") if name in given}
    run_serve(url, model=model, api_key=api_key, **given)


def _span(name: str, text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isascii() and least.isdigit()) or (most and not (most.isascii() and most.isdigit())):
        raise InvalidArgument(
            f"--{name.replace('_', '-')} {text!r}; LEAST-MOST is accepted, like 100-1024, or one number"
        )
    return int(least), int(most or least)


def _integers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InvalidArgument(f"--{name} {text!r}; whole numbers of at least 1, separated by commas, are accepted")
    return found
