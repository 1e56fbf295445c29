"""What ``make gpu-test`` and ``make gpu-bench`` run, as far as it shows without a GPU."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.gpu_suite import SUITES

from quire import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_every_test_for_gpus_is_in_a_suite() -> None:
    listed = {part for suite in SUITES for part in suite if part.endswith(".py")}
    assert all((ROOT / name).is_file() for name in listed)
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", path.read_text(encoding="utf-8")) and path.name != Path(__file__).name
    }
    assert len(marked) > 5
    assert marked <= listed


@without_gpu
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("tests/gpu_suite.py", 0, "There is no CUDA device: the tests for GPUs are skipped."),
        ("bench/gpu.py", 2, "There is no CUDA device; gpu.py measures on one only."),
    ],
)
def test_without_a_gpu_one_sentence_says_so(
    command: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / command), run_name="__main__")
    assert ended.value.code == code
    assert "".join(capsys.readouterr()).strip() == said


def test_checkpoints_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several files, with the names and shapes that a model loads."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "SHARD_BYTES", 100 << 10)
    path = gpu.drawn_checkpoint("quick", tmp_path, torch.device("cpu"))
    assert len(list(path.glob("*.safetensors"))) > 1
    llm = LLM(path, device="cpu", dtype="float32", kv_cache_memory="4MiB")
    assert len(llm.generate([[3, 4]], SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].token_ids) == 3
    assert gpu.drawn_checkpoint("quick", tmp_path, torch.device("cpu")) == path


def test_a_part_that_fails_keeps_no_other_from_its_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part of each model is another process, which gets the limits."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gpu = importlib.import_module("gpu")
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        given = dict(zip(command[-6::2], command[-5::2], strict=True))
        assert json.loads(Path(given["--limits"]).read_text()) == {"device": "x"}
        ran.append([given["--parts"], given["--models"]])
        return subprocess.CompletedProcess(command, int(given["--parts"] == "latency"))

    monkeypatch.setattr(gpu, "limits_of", lambda arguments: {"device": "x"})
    monkeypatch.setattr(gpu.subprocess, "run", run)
    given = ["--device", "cpu", "--models", "quick,qwen3-0.6b", "--parts", "quantized,latency,peers"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *given])
    assert gpu.main() == 1
    assert ran == [[part, name] for part in ("latency", "peers") for name in ("quick", "qwen3-0.6b")]
    said = capsys.readouterr()
    assert said.out.splitlines()[-2:] == ["failed: latency quick", "failed: latency qwen3-0.6b"]
    assert "the part quantized is left out" in said.err


def test_a_call_that_fails_keeps_no_other_from_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "failures", [])

    def failing() -> object:
        raise RuntimeError("no registers")

    assert math.isnan(gpu.seconds_of(failing, 3))
    assert gpu.failures == ["RuntimeError: no registers"]


@pytest.mark.slow
def test_parts_of_models_are_measured(tmp_path: Path) -> None:
    """As on a GPU but for its limits: each part prints its line."""
    given = ["--device", "cpu", "--models", "quick", "--seconds", "0.5", "--rounds", "1", "--requests", "4"]
    parts = ["latency", "contexts", "captured", "throughput", "peers"]
    done = subprocess.run(
        [sys.executable, "bench/gpu.py", *given, "--parts", ",".join(parts), "--dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["benchmark"] for line in lines] == ["latency", "latency", "gpu", "throughput", "latency", "throughput"]
    assert [len(line["rows"]) for line in lines if line["benchmark"] == "latency"] == [3, 1, 3]
    assert [row["batch"] for row in lines[2]["captured"]] == [1, 8, 64] * 3
    assert set(lines[-1]["peers"]) == {"transformers, static batches", "transformers, continuous batching"}


def test_attention_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and operations of small cases, by loops; pages of a plan are each sequence's own."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    gpu = importlib.import_module("gpu")
    case = gpu.Attended("x", batch=3, count=4, keys=20, heads=6, kv_heads=2, key_size=8, value_size=5)
    pairs = 3 * sum(1 for query in range(16, 20) for key in range(20) if key <= query)
    assert case.operations == pairs * 6 * (2 * 8 + 2 * 5)
    assert case.bytes == 3 * 20 * 2 * (8 + 5) * 2
    plan = case.plan(torch.device("cpu"))
    assert sorted(np.concatenate(plan.tables)) == list(range(3 * 2))
    assert plan.positions.tolist() == [16, 17, 18, 19] * 3


def test_recurrences_are_counted_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and operations of small cases, against what a call takes and gives."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    part = importlib.import_module("gpu_recurrence")
    numbers: list[int] = []

    class Seen(part.ChunkedRecurrence):  # type: ignore[misc, name-defined]
        def linear_attention(self, plan: Any, *given: Any, **gates: Any) -> Any:
            found = super().linear_attention(plan, *given, **gates)
            seen = [*given, gates["log_decay"], *found, *([] if gates["beta_TH"] is None else [gates["beta_TH"]])]
            # Heads that are one in memory count once.
            numbers.append(sum((x[:, :1] if x.dim() == 3 and not x.stride(1) else x).nbytes for x in seen))
            return found

        def convolve(self, plan: Any, x: Any, weight: Any, bias: Any, states: Any) -> Any:
            found = super().convolve(plan, x, weight, bias, states)
            numbers.append(sum(one.nbytes for one in (x, weight, states, *found)))
            return found

    for case in (
        part.Recurring("x", 2, 5, heads=3, keys=4, values=6, delta=True),
        part.Recurring("x", 2, 5, heads=3, keys=4, values=6, shared=True),
        part.Recurring("x", 2, 5, heads=3, keys=0, values=6, taps=4),
    ):
        case.call(Seen(), torch.device("cpu"))()
        assert numbers[-1] == case.bytes
    # Of 10 tokens and 3 heads: S^T k, S + k u^T, S^T q.
    assert part.Recurring("x", 2, 5, heads=3, keys=4, values=6, delta=True).operations == 10 * 3 * 3 * 2 * 4 * 6
    monkeypatch.setattr(part, "RECURRING", part.RECURRING[:1])
    rows = part.recurrences(torch.device("cpu"), 1e9, 1e12, 1, lambda call, rounds: 1e-3)
    assert [row["recurrence"] for row in rows] == [case.name for case in part.RECURRING]


class Drawn:
    """Stands for a kernel, without Triton."""

    def draw(self, z_WV: torch.Tensor, max_W: torch.Tensor, table_G6: torch.Tensor, one: float) -> torch.Tensor:
        return table_G6[:, 0].long()

    def draw_ranked(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.draw(*given), torch.ones(1)


@pytest.mark.slow
def test_pieces_are_called_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in small, with one second for a call: the shares are bytes and operations."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    part = importlib.import_module("gpu_pieces")
    monkeypatch.setattr(part, "MAPS", {"x": (32, 48)})
    calls: list[Any] = []

    def seconds_of(call: Any, rounds: int) -> float:
        calls.append(call())
        return float(rounds)

    rows = part.float8_products(torch.device("cpu"), 32 * 48 + 32 * 4, 2 * 32 * 48, 1, seconds_of)
    assert [row["map"] for row in rows] == ["x, 1 rows", "x, 64 rows", "x, 8192 rows"]
    # Four maps in a call of a second.
    assert [row["of copy"] for row in rows] == ["400%"] * 3
    assert rows[0]["of bfloat16 GEMM"] == "400%"
    assert [tuple(one.shape) for one in calls[0]] == [(1, 32)] * 4
    monkeypatch.setattr(part, "STACKS", {"x": (3, 32, 48)})
    monkeypatch.setattr(
        torch,
        "_scaled_grouped_mm",
        lambda x, weight, *given, **named: F.grouped_mm(x.bfloat16(), weight.bfloat16(), offs=named["offs"]),
    )
    made = part.expert_products(torch.device("cpu"), 1, 2 * 8 * 32 * 48, 1, seconds_of)
    assert [row["stack"] for row in made] == ["x, 1 tokens", "x, 64 tokens", "x, 8192 tokens"]
    assert [row["of bfloat16 GEMM"] for row in made] == ["400%", "25600%", "3276800%"]
    assert [tuple(one.shape) for call in calls[-6:-4] for one in call] == [(8, 32)] * 8
    monkeypatch.setattr(part, "LAYERS", 2)
    rows = part.copies(torch.device("cpu"), 2 * 16 * 2 * 2 * 8 * 128 * 2, 1, 1, seconds_of)
    monkeypatch.setattr(part, "VOCABULARY", 97)
    monkeypatch.setattr(part, "TritonDraw", lambda: Drawn())
    made = part.draws(torch.device("cpu"), 97 * 4, 1, 1, seconds_of)
    assert [row["by"] for row in made] == ["temperature"] * 3 + ["top_k 50"] * 3 + ["top_p 0.95"] * 3
    assert [(row["rows"], row["of copy"]) for row in made] == [(1, "100%"), (64, "6400%"), (256, "25600%")] * 3
    assert [len(tokens) for tokens in calls[-18:]] == [1, 1, 64, 64, 256, 256] * 3
    # 16 slots of two layers, of K and V in bfloat16, read and written in a second.
    assert [row["of copy"] for row in rows] == ["100%", "1600%", "12800%"]
