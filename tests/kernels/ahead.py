"""Compile Triton programs for a GPU that is not there, as they would be launched: run as a program.

Launches are recorded with tensors on the CPU, and their programs compiled for compute capability
9.0. A line of JSON for each says what the compiler made: ``python -m tests.kernels.ahead``, with
``--rare`` of rare cases.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from tests.kernels.test_native_blocks import rows_of_blocks
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.contracts.attention import ForwardPlan, Scoring
from quire.contracts.kv_format import PlainRows
from quire.contracts.rows import HeadNormWeights, Rotation
from quire.weights.block_panels import KINDS

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass
class Recorder:
    """Stands for a program and keeps its launches."""

    program: Any
    launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def compiled(program: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what the compiler makes of a launch."""
    options = {name: kwargs[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in kwargs}
    names = program.arg_names
    given = {**dict(zip(names, args, strict=False)), **{name: x for name, x in kwargs.items() if name in names}}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        x = given[name]
        if program.params[index].is_constexpr or (isinstance(x, int) and x == 1):
            signature[name], constants[name] = "constexpr", x
        elif isinstance(x, Tensor):
            signature[name] = TYPES[x.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(x, float) else "i32"
            if isinstance(x, int) and x % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
    found = triton.compile(source, target=TARGET, options=options)
    ptx = found.asm["ptx"]
    return {
        "program": program.__name__,
        "shared": found.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", ptx)),
        "mma": len(re.findall(r"mma\.sync", ptx)),
        "fused": len(re.findall(r"fma\.rn\.f32", ptx)),
        "async_copies": len(re.findall(r"cp\.async", ptx)),
        "cubin": len(found.asm["cubin"]),
        **resources(found.asm["cubin"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of stack of a program."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "program.cubin"
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def decodes(counts: list[int], keys: list[int]) -> ForwardPlan:
    """Return a plan of entries over pages of 16 that ends at their last tokens."""
    starts = np.concatenate(([0], np.cumsum(counts)))
    widths = [-(-number // 16) for number in keys]
    ends = np.cumsum(widths)
    return ForwardPlan(
        page_size=16,
        counts=np.array(counts),
        keys=np.array(keys),
        origins=np.zeros(len(counts), dtype=np.int64),
        starts=starts,
        tables=tuple(
            np.arange(end - width, end, dtype=np.int32) for width, end in zip(widths, ends.tolist(), strict=True)
        ),
        positions=np.concatenate([np.arange(number - n, number) for n, number in zip(counts, keys, strict=True)]),
        rules=(None,) * len(counts),
        device=torch.device("cpu"),
    )


CASES: dict[str, tuple[list[int], list[int], tuple[int, int, int, int], bool]] = {
    "decode": ([1] * 4, [500] * 4, (32, 8, 128, 128), False),
    "verify": ([8], [1024], (32, 8, 128, 128), False),
    "prompt": ([512], [512], (32, 8, 128, 128), True),
    "chunk": ([512], [1024], (32, 8, 128, 128), False),
    "latent decode": ([1] * 2, [512] * 2, (16, 1, 576, 512), False),
    "latent prompt": ([512], [512], (16, 16, 192, 128), True),
}
"""Counts and keys of entries; heads, KV heads, Dk, Dv; whether rows of new tokens are given."""


def launched() -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Return what a model's layers launch in bfloat16: case, program, arguments."""
    from quire.kernels.attention import attention_programs
    from quire.kernels.attention.triton_attention import TritonAttention
    from quire.kernels.draw import draw_programs, penalty_programs
    from quire.kernels.draw.triton_draw import TritonDraw
    from quire.kernels.draw.triton_penalties import TritonPenalties
    from quire.kernels.linear import block_programs
    from quire.kernels.linear.triton_blocks import TritonBlocks
    from quire.kernels.recurrence import recurrence_programs, triton_recurrence
    from quire.kernels.rows import row_programs
    from quire.kernels.rows import triton_rows as rows_module

    names = {
        block_programs: ("multiply_blocks", "read_rows"),
        attention_programs: ("attend_items", "merge_states"),
        draw_programs: ("sum_blocks", "find_tokens", "count_bins", "choose_bins", "collect_keys", "find_ranked"),
        penalty_programs: ("add_amounts", "penalise"),
        recurrence_programs: ("walk_rows", "weigh_chunks", "pass_chunks", "read_chunks", "convolve_rows"),
        row_programs: ("norm_rows", "gate_rows", "scale_rows", "copy_words", "place_heads"),
    }
    recorders = {(module, name): Recorder(getattr(module, name)) for module, listed in names.items() for name in listed}
    for (module, name), recorder in recorders.items():
        setattr(module, name, recorder)

    def recorded(case: str) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
        for recorder in recorders.values():
            for args, kwargs in recorder.launches:
                yield case, recorder.program, args, kwargs
            recorder.launches.clear()

    dtype = torch.bfloat16
    for case, (counts, keys, (heads, kv_heads, dk, dv), fresh) in CASES.items():
        plan, tokens = decodes(counts, keys), sum(counts)
        slots = 16 * sum(table.size for table in plan.tables)
        k_SHD = torch.zeros(slots, kv_heads, dk, dtype=dtype)
        v_SHD = k_SHD[..., :dv] if case == "latent decode" else torch.zeros(slots, kv_heads, dv, dtype=dtype)
        new = (k_SHD[:tokens], v_SHD[:tokens]) if fresh else None
        backend = TritonAttention(programs=1000)
        q_THD = torch.zeros(tokens, heads, dk, dtype=dtype)
        backend.run(backend.plan(plan, dtype), q_THD, new, PlainRows(k_SHD, v_SHD), Scoring(0.1))
        yield from recorded(case)
    rows_module.triton_problem = lambda device: ""
    rows = rows_module.TritonRows()
    x_TE, weight_E = torch.zeros(64, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    rows.rms_norm(x_TE, weight_E, 1e-5)
    rows.add_rms_norm(x_TE, x_TE.clone(), weight_E, 1e-5)
    for activation in ("silu", "gelu", "gelu_tanh"):
        rows.gated(torch.zeros(64, 2 * 14336, dtype=dtype), activation)
    rows_module.round_rows(x_TE)
    angles = Rotation(torch.zeros(64, 1, 128), torch.zeros(64, 1, 128), False)
    norms = HeadNormWeights(weight_E[:128], weight_E[:128], 1e-5)
    pool = torch.zeros(2, 64, 8, 128, dtype=dtype)
    for given in (None, norms):
        rows.rope_and_write_kv(
            torch.zeros(64, 48 * 128, dtype=dtype), 32, angles, given, PlainRows(*pool), torch.arange(64)
        )
    rows.copy_slots([pool], np.array([[0, 1], [2, 3]]))
    yield from recorded("rows")
    z_WV = torch.zeros(4, 151_936)
    for draw in (TritonDraw().draw, TritonDraw().draw_ranked):
        draw(z_WV, z_WV[:, 0], torch.zeros(4, 6, dtype=torch.float64), 2.0**44)
    places_N, seen_SV = torch.zeros(300, dtype=torch.int64), torch.zeros(8, 151_936, dtype=torch.int32)
    TritonPenalties().add(seen_SV, places_N, places_N, places_N.int())
    TritonPenalties().penalise(z_WV, seen_SV, torch.zeros(4, 5, dtype=torch.float64))
    yield from recorded("draws")
    kernel = TritonBlocks(torch.device("cpu"))
    for kind in KINDS:
        made = kernel.pack_blocks([rows_of_blocks(kind, 96, 2048)], 2048, None, dtype)
        assert made is not None
        for count in (1, 200):
            made(torch.zeros(count, 2048, dtype=dtype))
        made.rows(places_N)
    stack = kernel.join([made, made, made])
    assert stack is not None
    stack(torch.zeros(200, 2048, dtype=dtype), torch.tensor([3, 3, 200], dtype=torch.int32))
    yield from recorded("blocks")
    triton_recurrence.triton_problem = lambda device: ""
    for case in RECURRENCES:
        recur(*RECURRENCES[case])
        yield from recorded(case)


RARE = ("large state space", "columns")
"""Cases of few models or none, which are compiled by themselves."""
RECURRENCES: dict[str, tuple[int, int, int, int, bool]] = {
    "gated delta": (32, 128, 128, 1, True),
    "state space": (24, 128, 64, 1, False),
    "large state space": (24, 256, 64, 1, False),
    "columns": (4, 128, 128, 128, True),
}
"""Heads, K, V, decays of a head, whether by the delta rule."""


def recur(heads: int, keys: int, values: int, decays: int, delta: bool) -> None:
    """Launch what a layer does with a long chain and a decode, and with decodes alone."""
    from quire.contracts.recurrence import RecurrencePlan
    from quire.kernels.recurrence.triton_recurrence import TritonRecurrence

    backend = TritonRecurrence()
    for lengths in ([200, 1], [1, 1]):
        total, starts = sum(lengths), np.concatenate(([0], np.cumsum(lengths)))
        parents, given = np.arange(total) - 1, np.full(total, -1)
        parents[starts[:-1]], given[starts[:-1]] = -1, np.arange(2)
        plan = RecurrencePlan(starts=starts, parents=parents, given=given, wanted=starts[1:] - 1, chains=True)
        x = torch.zeros(total, heads, max(keys, values))
        decay = torch.zeros(total, heads) if decays == 1 else torch.zeros(total, heads, keys)
        q, v, beta = x[..., :keys], x[..., :values], torch.zeros(total, heads) if delta else None
        states = torch.zeros(2, heads, keys, values)
        backend.linear_attention(plan, q, q, v, states, log_decay=decay, beta_TH=beta)
        channels = heads * values
        x = torch.zeros(total, channels, dtype=torch.bfloat16)
        backend.convolve(plan, x, x.new_zeros(channels, 4), x.new_zeros(channels), x.new_zeros(2, 3, channels))


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    for case, program, args, kwargs in launched():
        if (case in RARE) == ("--rare" in sys.argv):
            print(json.dumps({"case": case, **compiled(program, args, kwargs)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
