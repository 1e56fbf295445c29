"""What shows that Quire is right on a CUDA device: ``make gpu-test``, or ``python -m
tests.gpu_suite``.

Kernels against exact attention and work on rows, the families against transformers in float64 (an
``LLM`` takes the device by itself), users' verbs against the CPU, and what else has a test for
GPUs. It needs the packages of the tests, and no network.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

SUITES: tuple[tuple[str, ...], ...] = (
    ("tests/kernels/test_triton_attention.py",),
    ("tests/kernels/test_triton_recurrence.py",),
    ("tests/kernels/test_triton_blocks.py",),
    ("tests/kernels/test_float8.py", "tests/kernels/test_triton_draw.py", "tests/sampling/test_seen_tokens.py"),
    ("tests/test_cuda.py",),
    ("tests/kernels/test_attention_kernel.py", "tests/kernels/test_row_kernels.py", "-k", "triton"),
    ("tests/test_parity.py", "-m", "not slow"),
    (
        "tests/adapters/test_low_rank.py",
        "tests/blend/test_chunk_retriever.py",
        "tests/blend/test_tensor_blender.py",
        "tests/kv/test_attention_backends.py",
        "tests/kv/test_cross.py",
        "tests/kv/test_rope.py",
        "tests/kernels/test_recurrence.py",
        "tests/test_rule_table.py",
        "tests/sampling/test_sampling.py",
        "-m",
        "gpu",
    ),
)
"""Arguments of pytest's runs, the quick ones first. Each has a process of its own: behind an access
to memory that is not there, nothing runs on the device any more."""


def main() -> int:
    """Run them all, and return whether one failed."""
    if not torch.cuda.is_available():
        print("There is no CUDA device: the tests for GPUs are skipped.")
        return 0
    threads = {"OMP_NUM_THREADS": str(max(1, min(8, torch.get_num_threads())))}
    command, environment = [sys.executable, "-m", "pytest", "-rfE"], {**os.environ, **threads}
    failed = [
        suite[0]
        for suite in SUITES
        if subprocess.run([*command, *suite, *sys.argv[1:]], env=environment, check=False).returncode
    ]
    for name in failed:
        print(f"failed: the run that begins with {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
