"""The dtype that "auto" stands for, on every kind of CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.models import processor
from quire.models.loading import resolve_dtype
from quire.models.processor import Processor

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def kind(machine: str, *, instructions: bool, onednn: tuple[bool, bool]) -> Processor:
    return Processor(
        machine=machine, bfloat16_instructions=instructions, onednn_bfloat16=onednn[0], onednn_float16=onednn[1]
    )


KINDS: dict[str, tuple[Processor, set[torch.dtype]]] = {
    "AMD or Intel with AVX2": (kind("x86_64", instructions=False, onednn=(False, False)), {FLOAT32}),
    "Intel with AVX-512": (kind("x86_64", instructions=False, onednn=(True, False)), {FLOAT32}),
    "the same on Windows": (kind("AMD64", instructions=False, onednn=(True, False)), {FLOAT32}),
    "AMD with AVX512-BF16": (kind("x86_64", instructions=True, onednn=(True, False)), {FLOAT32, BFLOAT16}),
    "Intel with AMX": (kind("x86_64", instructions=True, onednn=(True, True)), {FLOAT32, BFLOAT16, FLOAT16}),
    "AMX that oneDNN may not use": (kind("x86_64", instructions=True, onednn=(False, False)), {FLOAT32}),
    "Arm without bfloat16": (kind("aarch64", instructions=False, onednn=(False, False)), {FLOAT32}),
    "Arm with bfloat16": (kind("arm64", instructions=False, onednn=(True, False)), {FLOAT32, BFLOAT16}),
}


@pytest.mark.parametrize("stored", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("cpu", "fast"), KINDS.values(), ids=KINDS)
def test_dtype_auto(cpu: Processor, fast: set[torch.dtype], stored: torch.dtype) -> None:
    assert resolve_dtype("auto", stored, torch.device("cpu"), cpu) == (stored if stored in fast else FLOAT32)
    assert resolve_dtype("auto", stored, torch.device("cuda"), cpu) == stored
    blocks = resolve_dtype("auto", stored, torch.device("cpu"), cpu, in_blocks=True)
    assert blocks == (stored if stored in fast else BFLOAT16)
    assert resolve_dtype("float16", stored, torch.device("cpu"), cpu) == FLOAT16
    assert resolve_dtype("half", stored, torch.device("cpu"), cpu) == FLOAT16


class Answers:
    """What torch says about a CPU, in place of torch."""

    def __init__(self, **answers: bool) -> None:
        for name, answer in answers.items():
            setattr(self, name, lambda answer=answer: answer)


@pytest.mark.parametrize(
    ("cpu", "limit", "instructions"),
    [
        (Answers(), "", False),
        (Answers(_is_avx512_bf16_supported=True), "", True),
        (Answers(_is_avx512_bf16_supported=False, _is_amx_tile_supported=True), "", True),
        (Answers(_is_avx512_bf16_supported=True), "avx512_core_vnni", False),
        (Answers(_is_avx512_bf16_supported=True), "AVX512_CORE", False),
        (Answers(_is_avx512_bf16_supported=True), "AVX512_CORE_BF16", True),
    ],
)
def test_the_kind_is_asked_of_torch_and_of_what_limits_it(
    cpu: Answers, limit: str, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch without these functions, which are private, has no fast path."""
    monkeypatch.setattr(processor.torch, "cpu", cpu)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    for answers in ((True, False), (False, True)):
        onednn = Answers(_is_mkldnn_bf16_supported=answers[0], _is_mkldnn_fp16_supported=answers[1])
        monkeypatch.setattr(processor.torch.ops, "mkldnn", onednn)
        assert Processor.here() == kind("x86_64", instructions=instructions, onednn=answers)
    monkeypatch.setattr(processor.torch.ops, "mkldnn", Answers())
    assert Processor.here() == kind("x86_64", instructions=instructions, onednn=(False, False))


def test_the_kind_of_this_machine_decides_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, fast in KINDS.values():
        monkeypatch.setattr(Processor, "here", classmethod(lambda cls, cpu=cpu: cpu))
        assert resolve_dtype("auto", BFLOAT16, torch.device("cpu")) == (BFLOAT16 if BFLOAT16 in fast else FLOAT32)


EMULATED = {
    "AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "AVX-512 without bfloat16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
}
"""Kinds that a process can be made to be, if its CPU is one of them or more."""
SENSITIVE = (
    "benchmarks/test_bench_commands.py",
    "cli/test_cli.py",
    "test_docs.py",
    "models/test_checkpoint.py",
    "models/test_packed.py",
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", EMULATED)
def test_what_depends_on_the_type_passes_on_other_kinds(kind: str) -> None:
    environment = {**os.environ, **EMULATED[kind]}
    ask = (
        "import torch; from quire.models.processor import Processor; print(Processor.here().multiplies(torch.bfloat16))"
    )
    told = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
    tests = [str(Path(__file__).parents[1] / name) for name in SENSITIVE]
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:]
