"""Linear maps: the C++ products against PyTorch's, plain and with weights packed by oneDNN.

A decode reads all weights once, so each candidate runs over as many different maps as do not fit
into the caches. The bytes and operations of a product are also given as shares of the read
bandwidth and of the GEMM peak, measured in the same run.

``python bench/linear.py [--shapes 3072x576,8192x2048] [--rows 1,4,16,512] [--dtypes
bfloat16,float32] [--blocks Q4_K,Q8_0] [--rounds 5] [--small]``
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.base.errors import QuireError, Unsupported
from quire.contracts.linear import BlockRows, WeightForm
from quire.kernels.linear.cpu_linear import FORMS, native_linear
from quire.kernels.native_library import native_problem
from quire.weights.block_panels import KINDS
from quire.weights.gguf_blocks import HEADS, SIZES
from quire_bench.hardware import measure, packs
from quire_bench.reports import interleave, print_json, print_table

WEIGHT_BYTES = 400 << 20
"""Bytes of the float32 weights of all maps of a shape, unless ``--small``."""


Product: TypeAlias = Callable[[Any], Tensor]


def each(product: Product, maps: Sequence[Any]) -> None:
    for one in maps:
        product(one)


def random_blocks(kind: str, outputs: int, inputs: int) -> BlockRows:
    """Return rows in blocks of any codes, whose scales are finite."""
    numbers, size = SIZES[kind]
    rows_RB = torch.randint(16, 60, (outputs, inputs // numbers * size), dtype=torch.uint8)
    return BlockRows(kind, kind, rows_RB)


def candidates(
    weights: list[Tensor], x_TI: Tensor, blocks: Sequence[str]
) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """Return functions that run all maps, and the bytes of weights that they read, by name.
    ``blocks``: formats of GGUF files, which are left out where rows are no whole blocks."""
    kernel = native_linear()
    if kernel is None:
        raise Unsupported(native_problem())
    ops: Any = torch.ops.mkldnn
    runs: dict[str, Callable[[], None]] = {}
    plain = sum(weight.nbytes for weight in weights)
    if packs(x_TI.device, x_TI.dtype):
        packed = [ops._reorder_linear_weight(weight, 16) for weight in weights]
        runs["oneDNN, packed"] = partial(
            each, lambda one: ops._linear_pointwise(x_TI, one, None, "none", [], ""), packed
        )
    runs["torch"] = partial(each, partial(F.linear, x_TI), weights)
    read = dict.fromkeys(runs, plain)
    forms: tuple[WeightForm, ...] = FORMS if x_TI.dtype == torch.float32 else FORMS[1:]
    for form in forms:
        maps = [kernel.pack(weight, None, form) for weight in weights]
        runs[f"Quire, {form}"] = partial(each, lambda one: one(x_TI), maps)
        read[f"Quire, {form}"] = sum(one.weights.nbytes for one in maps)
    outputs, inputs = weights[0].shape
    for kind in blocks:
        if inputs % SIZES[kind][0]:
            continue
        rows = [random_blocks(kind, outputs, inputs) for _ in weights]
        packed = [kernel.pack_blocks([one], inputs, None, x_TI.dtype) for one in rows]
        found = [one for one in packed if one is not None]
        runs[f"Quire, {kind}"] = partial(each, lambda one: one(x_TI), found)
        read[f"Quire, {kind}"] = sum(one.weights.nbytes for one in found)
    return runs, read


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the JSON line; return the line's content."""
    hardware = measure(seconds=1.0 if arguments.small else 8.0)
    lines: list[dict[str, Any]] = []
    for dtype_name in arguments.dtypes:
        dtype = getattr(torch, dtype_name)
        for outputs, inputs in arguments.shapes:
            count = 2 if arguments.small else max(2, WEIGHT_BYTES // (4 * outputs * inputs))
            weights = [torch.randn(outputs, inputs).mul_(inputs**-0.5).to(dtype) for _ in range(count)]
            for rows in arguments.rows:
                x_TI = torch.randn(rows, inputs).to(dtype)
                runs, read = candidates(weights, x_TI, arguments.blocks)
                compared = interleave(runs, rounds=arguments.rounds)
                for name in runs:
                    seconds = compared.spread(name).median
                    work = 2 * rows * outputs * inputs * count
                    lines.append(
                        {
                            "map": f"{outputs} x {inputs}, {dtype_name}",
                            "rows": rows,
                            "product": name,
                            "reads GB/s": round(read[name] / seconds / 1e9, 1),
                            "of bandwidth": round(read[name] / seconds / 1e9 / hardware["read_gbps"], 2),
                            "of GEMM peak": round(work / seconds / 1e12 / hardware["peak_tflops"][dtype_name], 2),
                            "time over the first's": str(compared.ratios[name]),
                        }
                    )
    print_table(lines)
    found = {"benchmark": "linear", "hardware": dict(hardware), "lines": lines}
    print_json(found)
    return found


def sizes(text: str) -> list[tuple[int, int]]:
    return [(int(outputs), int(inputs)) for outputs, _, inputs in (one.partition("x") for one in text.split(","))]


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def kinds(text: str) -> list[str]:
    found = [] if text == "none" else text.split(",")
    if unknown := set(found) - (KINDS.keys() - HEADS.keys()):
        raise argparse.ArgumentTypeError(
            f"{sorted(unknown)} are no formats; expected {sorted(KINDS.keys() - HEADS.keys())}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=sizes, default=sizes("3072x576,576x1536,8192x2048"), help="outputs x inputs")
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16, 512])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["bfloat16", "float32"])
    parser.add_argument("--blocks", type=kinds, default=["Q4_K", "Q8_0"], help="formats of GGUF files, or none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="few weights, that caches hold: a trial of the command")
    try:
        run(parser.parse_args())
    except QuireError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
