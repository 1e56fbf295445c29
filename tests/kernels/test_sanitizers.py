"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer: built for it into a folder
of its own, loaded in place of the installed library, and run through tests of the kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.kernels import native_library

KERNELS = Path(native_library.__file__).parent / "cpu"
COMPILER = shutil.which("g++")
FLAGS = ["-O1", "-g", "-std=c++17", "-Wno-psabi", "-fPIC"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
SUITES = {
    "paged attention": ["tests/kernels/test_paged_attention.py", "-k", "not greedy and not torch_serves"],
    "linear maps": ["tests/kernels/test_native_linear.py"],
    "codes of GGUF files": ["tests/kernels/test_native_blocks.py"],
    "blocks": ["tests/kernels/test_block.py", "-k", "not model and not library and not sink"],
    "blocks with recurrent layers": ["tests/kernels/test_mixed_blocks.py"],
    "blocks of one thing": ["tests/kernels/test_bare_blocks.py"],
    "blocks with experts": ["tests/kernels/test_expert_blocks.py"],
    "models": ["tests/kernels/test_model_call.py", "-k", "not maxima"],
    # PyTorch's exceptions cannot pass a preloaded sanitizer.
    "rows": ["tests/kernels/test_row_kernels.py", "-k", "not other_shapes"],
    "checked rows": ["tests/kernels/test_checked_rows.py"],
    "experts": ["tests/kernels/test_native_experts.py"],
    "recurrent layers": ["tests/kernels/test_native_mixers.py"],
    "merges": ["tests/kernels/test_merges.py"],
    "low rank": ["tests/adapters/test_native_low_rank.py", "-k", "reference or random or bit"],
}
"""Tests of each kernel that run, as arguments of pytest."""
RUN = """
import sys, ctypes
from functools import cache
from quire.kernels import native_library
found = ctypes.CDLL(sys.argv[1])
native_library._load = lambda: found
import pytest
sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "3000", *sys.argv[2:]]))
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("sanitized")

    def compiled(source: Path) -> str:
        made = folder / f"{source.stem}.o"
        build("-c", source, "-o", made)
        return str(made)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(KERNELS.glob("*.cpp"))))
    path = folder / "native.so"
    build("-shared", *objects, "-o", path)
    return path


def build(*arguments: str | Path) -> None:
    """Run the compiler."""
    built = subprocess.run([str(COMPILER), *FLAGS, *SANITIZERS, *map(str, arguments)], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no sanitizers: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr[-2000:]


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code with the sanitizers' runtime, which must be loaded first."""
    assert COMPILER is not None
    runtime = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    # Python keeps memory until it ends, which is no leak.
    options = {"ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment = {
        **os.environ,
        **options,
        "LD_PRELOAD": runtime,
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )


def test_each_kernel_has_a_suite() -> None:
    """Of the tests in this folder that ask for the library, and run its kernels."""
    asking = {path for path in Path(__file__).parent.glob("test_*.py") if "native_library" in path.read_text()}
    suites = {Path(path).name for path, *_ in SUITES.values() if path.startswith("tests/kernels/")}
    assert {path.name for path in asking} - suites == {
        "test_cpu_process.py",
        "test_native_library.py",
        "test_sanitizers.py",
    }


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", SUITES)
def test_kernels_touch_only_what_is_theirs(suite: str, library: Path) -> None:
    done = run(library, "-c", RUN, str(library), *SUITES[suite])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_a_row_too_many_is_found(library: Path) -> None:
    """The suite can fail: a pool that is one row shorter than its page table says."""
    code = """
import ctypes, sys
found = ctypes.CDLL(sys.argv[1])
from quire.kernels import native_library
native_library._load = lambda: found
import torch
from quire.contracts.kv_format import PlainRows
from tests.kernels.test_paged_attention import Batch
from quire.kernels.attention.cpu_attention import NativeAttention
batch = Batch([64], [1])
batch.k_SHD = batch.k_SHD.clone()[: int(batch.tables[0].max()) * 16 + 15].clone()
NativeAttention().run(NativeAttention().plan(batch.plan(), torch.float32), batch.q_THD, None, PlainRows(batch.k_SHD, batch.v_SHD), batch.scoring)
"""
    done = run(library, "-c", code, str(library))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
