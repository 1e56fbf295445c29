"""Latent attention (MLA): rows in absorbed form against keys and values of all heads, for decodes,
prompts and chunks.

On the attention of some layers with the sizes of DeepSeek-V2-Lite and DeepSeek-V3: the KV state's
form (*latent*) beside storing the keys and values of all heads (*expanded*) and beside expanding
all rows for each token (*anew*); prompts and chunks beside attending to rows only (*absorbed*).
Each form is compared with float64. A form that needs too much memory or time is left out with the
reason.

``python bench/latent.py [--geometries v2-lite,v3] [--batches 1,4,16] [--histories 512,2048,8192]
[--rounds 5] [--small]``
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from quire.base.config import parse_bytes
from quire.base.errors import QuireError
from quire_bench.hardware import measure
from quire_bench.latent import CellResult, lines, measure_cell
from quire_bench.latent_forms import GEOMETRIES, Cell
from quire_bench.reports import print_json, print_table

CHUNK = (256, 2048)
"""New tokens of a chunk, and its history."""


def cells(geometry: str, arguments: argparse.Namespace) -> list[Cell]:
    decodes = [
        Cell(geometry=geometry, batch=batch, history=history)
        for history in arguments.histories
        for batch in arguments.batches
    ]
    prompts = [Cell(geometry=geometry, tokens=tokens) for tokens in arguments.prompts]
    tokens, history = (8, 64) if arguments.small else CHUNK
    return [*decodes, *prompts, Cell(geometry=geometry, history=history, tokens=tokens)]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the JSON line; return the line's content."""
    most_bytes = parse_bytes(arguments.memory)  # invalid sizes are refused before any measurement
    hardware = measure(device=arguments.device, seconds=1.0 if arguments.small else 8.0)
    results: list[CellResult] = [
        measure_cell(
            cell,
            dtype=getattr(torch, arguments.dtype),
            device=torch.device(arguments.device),
            rounds=arguments.rounds,
            most_bytes=most_bytes,
            hardware=hardware,
        )
        for geometry in arguments.geometries
        for cell in cells(geometry, arguments)
    ]
    print_table([line for result in results for line in lines(result)])
    decodes = [
        one
        for result in results
        if result.cell.what == "decode"
        for one in result.forms
        if one.form == "expanded" and one.to_latent is not None
    ]
    found = {
        "benchmark": "latent",
        "device": arguments.device,
        "threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "rounds": arguments.rounds,
        "geometries": {name: asdict(GEOMETRIES[name]) for name in arguments.geometries},
        "cells": [
            asdict(result.cell)
            | {"what": result.cell.what, "layers": result.layers, "bound": result.bound, "equal": result.equal}
            | {"forms": [asdict(one) for one in result.forms]}
            for result in results
        ],
        "equal": all(result.equal for result in results),
        "decodes_faster": sum(one.to_latent.median > 1 for one in decodes if one.to_latent is not None),
        "decodes": len(decodes),
        "hardware": hardware,
    }
    print(
        f"all forms within their bounds: {found['equal']}; decodes faster than the expanded form: "
        f"{found['decodes_faster']} of {found['decodes']}"
    )
    print_json(found)
    return found


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError("at least 1")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometries", default="v2-lite,v3", help=f"separated by commas: {', '.join(GEOMETRIES)}")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16], help="sequences of a decode")
    parser.add_argument("--histories", type=numbers, default=[512, 2048, 8192], help="tokens before a decode")
    parser.add_argument("--prompts", type=numbers, default=[512, 1024], help="tokens of prompts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="3GiB", help="the most that one form's state may take")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny geometry and few tokens, to see that it runs")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.geometries, arguments.batches, arguments.rounds = "small", [1, 2], 1
        arguments.histories, arguments.prompts = [40, 100], [24]
    arguments.geometries = arguments.geometries.split(",")
    if unknown := [name for name in arguments.geometries if name not in GEOMETRIES]:
        parser.error(f"--geometries has {', '.join(unknown)}; there are {', '.join(GEOMETRIES)}")
    try:
        run(arguments)
    except QuireError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
