"""What the engine can and cannot do beyond plain generation, for ``LLM.capabilities``."""

from __future__ import annotations

ENGINE_REFUSALS: dict[str, str] = {
    "LLM(quantization='awq')": "int8, int4 and fp8 are made at load; a checkpoint in AWQ is read as its config.json says, without the option",
    "LLM(trust_remote_code=True)": "code of checkpoints is never run",
}
"""Options that the engine refuses, with reasons, for ``capabilities``."""

ENGINE_VERBS: dict[str, str] = dict.fromkeys(
    [
        "structured outputs",
        "prompt logprobs",
        "logits processors",
        "beam search",
        "AsyncLLM",
        "windowed sessions",
        "host memory",
        "stores",
        "sessions that outlive the process",
        "sessions as history",
        "adapters",
        "sessions as KV caches",
        "cache hints",
        "blending",
        "speculation",
    ],
    "",
)
"""Abilities beyond plain generation, with empty reasons against them, for ``capabilities``."""
