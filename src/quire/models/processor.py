"""The element types that the CPU multiplies without conversion."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

X86 = frozenset({"x86_64", "amd64"})
CONVERTING_ISAS = frozenset({"AVX512_CORE", "AVX512_CORE_VNNI"})
"""Values of ``ONEDNN_MAX_CPU_ISA`` under which oneDNN accepts bfloat16, converting it to float32.

Under lower values oneDNN reports that it does not accept bfloat16.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """The properties of a CPU that decide the choice of a dtype."""

    machine: str
    """The name by ``platform.machine()``, in any case."""
    bfloat16_instructions: bool
    """Whether it has AVX512-BF16 or AMX; ignored on Arm."""
    onednn_bfloat16: bool
    """Whether oneDNN accepts bfloat16. On x86 it does from AVX-512 on, where it converts."""
    onednn_float16: bool
    """Whether oneDNN accepts float16, which on x86 needs AVX512-FP16."""

    @classmethod
    def here(cls) -> Processor:
        """Return the kind of this machine's CPU, limited by ``ONEDNN_MAX_CPU_ISA``."""
        instructions = _probe(torch.cpu, "_is_avx512_bf16_supported") or _probe(torch.cpu, "_is_amx_tile_supported")
        used = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in CONVERTING_ISAS
        return cls(
            machine=platform.machine(),
            bfloat16_instructions=instructions and used,
            onednn_bfloat16=_probe(torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
            onednn_float16=_probe(torch.ops.mkldnn, "_is_mkldnn_fp16_supported"),
        )

    def multiplies(self, dtype: torch.dtype) -> bool:
        """Return True if it multiplies matrices of ``dtype`` without converting them to float32."""
        if dtype == torch.bfloat16:
            instructions = self.bfloat16_instructions or self.machine.lower() not in X86
            return instructions and self.onednn_bfloat16
        if dtype == torch.float16:
            return self.onednn_float16
        return True


def _probe(owner: object, name: str) -> bool:
    """Query torch about the CPU; a version without the private function has no fast path either."""
    ask: Callable[[], bool] | None = getattr(owner, name, None)
    return bool(ask()) if ask is not None else False
