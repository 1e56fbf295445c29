"""Costs of recurrent states, and gains from keeping them: of a hybrid and of a pure Mamba-2 model,
with random weights.

Size, fork, copy, save and restore of states; rewinds against the interval of checkpoints; the
memory of checkpoints against the share of prompts found in the prefix cache (of a smaller hybrid,
because they are many); second turns on a long history of the first model, which may run at most the
new tokens and one interval.

``python bench/states.py [--models bamba-150m,mamba2-120m] [--tokens 2000] [--rounds 3] [--peer
transformers] [--small]``
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.base.errors import QuireError
from quire_bench.checkpoints import DEFAULT_DIRECTORY, DRAWN, drawn
from quire_bench.hardware import Hardware, measure
from quire_bench.reports import print_json, print_table
from quire_bench.reuse import CacheRow, Turn, cache_row, fresh_texts, second_turns
from quire_bench.state import duration
from quire_bench.states import (
    Rewinds,
    Rewound,
    Sizes,
    Subject,
    at_intervals,
    compared,
    cost_rows,
    fresh_logits,
    rewinds,
)

SMALL = Sizes(
    tokens=200, intervals=(0, 32, 64), back=20, places=2, documents=2, branches=3, tail=8, turn=5, answer=6, rounds=1
)
PEERS = ("none", "transformers")

Options = Mapping[str, Any]


def costs(name: str, path: str, options: Options, sizes: Sizes, hardware: Hardware) -> dict[str, Any]:
    """Measure and print the costs of one state of a model; return them for the JSON line."""
    with Subject(path, options, 0, cached=True) as subject:
        model = subject.llm.model
        rows = cost_rows(subject, sizes, hardware["copy_gbps"])
        with subject.llm.session(subject.prompt(sizes.tokens, seed=0)) as session:
            file_bytes = len(session.to_bytes())
        found = {
            "name": name,
            "architecture": model.architecture,
            "parameters": model.num_parameters,
            "dtype": str(model.dtype).removeprefix("torch."),
            "state_bytes": subject.state_bytes,
            "token_bytes": subject.llm.bytes_per_token,
            "file_bytes": file_bytes,
        }
    print(
        f"\n{name}: {found['architecture']}, {found['parameters'] / 1e6:.0f}M parameters in {found['dtype']}; a recurrent state has "
        f"{found['state_bytes']:,} bytes, a token of attention {found['token_bytes']:,}, the file of {sizes.tokens} tokens {file_bytes:,}"
    )
    print_table([row.shown() for row in rows])
    return found | {"costs": [asdict(row) for row in rows]}


def rewind_costs(name: str, path: str, options: Options, sizes: Sizes) -> dict[str, Any]:
    """Measure and print rewinds at every interval, and the engine's own; return them for the JSON
    line."""
    found = at_intervals(sizes, partial(rewinds, path, options, sizes))
    fresh_SV = fresh_logits(path, options, sizes)
    held = [
        {"interval": one.interval, "by_engine": one.by_engine, "checkpoints": one.checkpoints, "bytes": one.bytes}
        | {"equal": compared(one.logits, fresh_SV)}
        for one in found
    ]
    print(f"\n{name}: rewinds of {sizes.tokens} tokens")
    print_table([rewind_line(one, row) for one in found for row in one.rows])
    print_table([held_line(row) for row in held])
    return {"rewinds": [asdict(row) for one in found for row in one.rows], "checkpoints": held}


def cache_costs(name: str, path: str, options: Options, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure and print the prefix cache's workload at every interval, and the engine's own; return
    it for the JSON line."""
    expected = fresh_texts(path, options, sizes)
    rows = []
    for row in at_intervals(sizes, partial(cache_row, path, options, sizes)):
        values = asdict(row) | {"hit_rate": row.hit_rate, "of_shared": row.of_shared}
        del values["texts"]
        same = sum(own == other for own, other in zip(row.texts, expected, strict=True))
        rows.append((row, values | {"equal": {"same": same, "of": len(expected)}}))
    print(f"\n{name}: {sizes.documents} documents, {sizes.branches} prompts that leave each of them somewhere")
    print_table([cache_line(row, values["equal"]) for row, values in rows])
    return [values for _, values in rows]


def turn_costs(name: str, path: str, options: Options, sizes: Sizes, peer: str) -> list[dict[str, Any]]:
    """Measure and print second turns at the engine's own interval; return them for the JSON
    line."""
    other = None
    if peer == "transformers":
        from quire_bench.peers import TransformersPeer

        other = TransformersPeer(path, torch.float32, device=options["device"])
    turns = second_turns(path, options, sizes, None, other)
    print(f"\n{name}: second turns on {sizes.tokens} tokens")
    print_table([turn_line(turn) for turn in turns])
    return [asdict(turn) | {"met": turn.met} for turn in turns]


# -- table rows ------------------------------------------------------------------------------------


def rewind_line(one: Rewinds, row: Rewound) -> dict[str, Any]:
    return {
        "interval": named(row.interval, one.by_engine),
        "rewind": row.what,
        "position": row.position,
        "run again": row.run_again,
        "announced": row.announced,
        "time": duration(row.seconds.median),
        "least": duration(row.seconds.least),
        "most": duration(row.seconds.most),
    }


def held_line(row: Mapping[str, Any]) -> dict[str, Any]:
    equal = row["equal"]
    return {
        "interval": named(row["interval"], row["by_engine"]),
        "checkpoints": row["checkpoints"],
        "MiB": row["bytes"] / 2**20,
        "best tokens equal": f"{equal['same']}/{equal['of']}",
        "logits apart": equal["difference"],
    }


def cache_line(row: CacheRow, equal: Mapping[str, int]) -> dict[str, Any]:
    return {
        "interval": named(row.interval, row.by_engine),
        "states": row.states,
        "MiB": row.bytes / 2**20,
        "reused": f"{row.hit_rate:.1%}",
        "of what is shared": f"{row.of_shared:.1%}",
        "run again": row.replayed_tokens,
        "lost": row.lost,
        "s": row.seconds,
        "answers equal": f"{equal['same']}/{equal['of']}",
    }


def turn_line(turn: Turn) -> dict[str, Any]:
    return {
        "turn": turn.what,
        "prompt": turn.prompt_tokens,
        "new": turn.new_tokens,
        "run": turn.run_tokens,
        "at most": f"{turn.new_tokens} + {turn.interval}",
        "first token": duration(turn.seconds.median),
        "whole prompt / it": str(turn.whole),
        "transformers / it": "" if turn.peer is None else str(turn.peer),
        "equal tokens": ", ".join(f"{name} {count}" for name, count in turn.equal.items()),
    }


def named(interval: int, by_engine: bool) -> str:
    return f"{interval or 'none'}{', as chosen' if by_engine else ''}"


# -- all of it -------------------------------------------------------------------------------------


def run(
    models: Mapping[str, str], cached: tuple[str, str], options: Options, sizes: Sizes, peer: str
) -> dict[str, Any]:
    """Measure, print tables and the JSON line; return the line's content.

    ``cached``: name and path of the model of the prefix cache's workload. The second turns are
    those of the first model. ``QuireError`` if more was run again than an interval.
    """
    hardware = measure(device=options["device"], seconds=4.0)
    described = [
        costs(name, path, options, sizes, hardware) | rewind_costs(name, path, options, sizes)
        for name, path in models.items()
    ]
    cache = cache_costs(*cached, options, sizes)
    first = next(iter(models))
    turns = turn_costs(first, models[first], options, sizes, peer)
    result = {
        "benchmark": "states",
        "device": options["device"],
        "threads": torch.get_num_threads(),
        "peer": peer,
        **asdict(sizes),
        "models": described,
        "cache": {"model": cached[0], "rows": cache},
        "turns": {"model": first, "rows": turns},
        "met": {"second_turn": all(turn["met"] for turn in turns)},
        "hardware": hardware,
    }
    print_json(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bamba-150m,mamba2-120m", help=f"separated by commas: {', '.join(DRAWN)}")
    parser.add_argument(
        "--cache-model", default="bamba-20m", help="runs the prompts that branch; small, since they are many"
    )
    parser.add_argument("--tokens", type=int, default=2000, help="of sessions, documents and histories")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", default="transformers", choices=PEERS)
    parser.add_argument("--kv-cache-memory", default="4GiB")
    parser.add_argument("--small", action="store_true", help="tiny models and few tokens, to see that it runs")
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIRECTORY)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    small = ["bamba-small", "mamba2-small"]
    names = small if arguments.small else arguments.models.split(",")
    cached = small[0] if arguments.small else arguments.cache_model
    memory = "64MiB" if arguments.small else arguments.kv_cache_memory
    options = {"device": arguments.device, "dtype": "float32", "kv_cache_memory": memory}
    try:
        sizes = SMALL if arguments.small else replace(Sizes(), tokens=arguments.tokens, rounds=arguments.rounds)
        paths = {name: str(drawn(name, directory=arguments.dir)) for name in names}
        run(paths, (cached, str(drawn(cached, directory=arguments.dir))), options, sizes, arguments.peer)
    except QuireError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
