"""A feed-forward layer with experts: the C++ call against its parts one by one.

Both have the same products. A round runs as many layers as do not fit into the caches, the parts
and then the call, and compares wall time and the processor time of all threads. The second says
more where other programs run beside this one.

``python bench/experts.py [--shape 1024x512x32x4] [--rows 1,4,16,64,512] [--forms
bfloat16,int4,float32] [--layers 3] [--threads 2] [--rounds 9] [--small]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.base.errors import Unsupported
from quire.build import layer_kernels
from quire.contracts.experts import Routing
from quire.kernels.native_library import native_problem
from quire.nn.experts import ActivatedGate, ExpertLinear, Experts, MixtureOfExperts, Router
from quire_bench.reports import print_json, print_table

FORMS = ("bfloat16", "int8", "int4", "float32")


def layer(shape: list[int], form: str, *, in_one: bool) -> MixtureOfExperts:
    """Return a random layer of ``E, F, X, K``: as one call, or as parts."""
    width, inner, experts, choices = shape
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return (torch.randn(sizes, generator=generator) * sizes[-1] ** -0.5).to(dtype)

    stacks = (ExpertLinear(drawn(experts, *sizes)) for sizes in ((2 * inner, width), (width, inner)))
    router = Router(drawn(experts, width), None, Routing(top_k=choices, renormalise=True))
    found = MixtureOfExperts(router, Experts(*stacks, ActivatedGate()))
    kernels = layer_kernels(torch.device("cpu"), form if form.startswith("int") else None)
    if kernels.experts is None:
        raise Unsupported(native_problem())
    found.pack(kernels if in_one else replace(kernels, experts=None))
    return found


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a run: wall, and of all threads' processors."""
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - processor


def measured(
    parts: list[MixtureOfExperts], calls: list[MixtureOfExperts], x_TE: Tensor, rounds: int
) -> dict[str, float]:
    """Return medians over rounds."""

    def each(layers: list[MixtureOfExperts]) -> None:
        for one in layers:
            one(x_TE)

    each(parts)
    each(calls)
    pairs = [(timed(lambda: each(parts)), timed(lambda: each(calls))) for _ in range(rounds)]
    wall, processor = ([old[i] / new[i] for old, new in pairs] for i in range(2))
    return {
        "call_ms": 1e3 * statistics.median(new[0] for _, new in pairs) / len(calls),
        "over_call": statistics.median(wall),
        "least": min(wall),
        "most": max(wall),
        "processor_over_call": statistics.median(processor),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1024x512x32x4", help="E x F x experts x experts of a token")
    parser.add_argument("--rows", default="1,4,16,64,512")
    parser.add_argument("--forms", default="bfloat16,int4,float32", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true", help="a tiny layer, to see that it runs")
    if parser.parse_known_args()[0].small:
        parser.set_defaults(shape="64x32x8x2", rows="1,5", layers=1, rounds=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for form in options.forms.split(","):
        if form not in FORMS:
            parser.error(f"--forms has {form}; there are {', '.join(FORMS)}")
        shape = [int(size) for size in options.shape.split("x")]
        parts, calls = ([layer(shape, form, in_one=in_one) for _ in range(options.layers)] for in_one in (False, True))
        for count in map(int, options.rows.split(",")):
            x_TE = torch.randn(count, shape[0], generator=torch.Generator().manual_seed(1))
            x_TE = x_TE.to(torch.float32 if form == "float32" else torch.bfloat16)
            rows.append({"form": form, "rows": count, **measured(parts, calls, x_TE, options.rounds)})
    print_table(rows)
    print_json({"benchmark": "experts", "shape": options.shape, "threads": options.threads, "rows": rows})


if __name__ == "__main__":
    main()
