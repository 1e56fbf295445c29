"""Tiny models with recurrent layers, their executors, and what every verb must agree with: a fresh
run of the same tokens.

Tolerance: what float32 itself explains, measured on transformers' own run
(``tests.exact.Float32Bound``), twice, since two runs are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.exact import Float32Bound, run_exactly
from tests.executor.conftest import PAGE, FakeIdentity
from tests.test_parity import FAMILIES, SIZES, VOCAB
from torch import Tensor

from quire.contracts.executor import DecodeInput, PrefillInput
from quire.contracts.layers import Recurrent
from quire.executor.executor import Executor
from quire.executor.handle import Handle
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kv.state import State
from quire.models.families import LoadedModel
from quire.models.loading import load_model
from quire.runner.local import LocalRunner

LENGTH = 24


@dataclass(frozen=True)
class Hybrid:
    """A model, and the logits of ``tokens`` by transformers in float64."""

    kind: str
    model: LoadedModel
    peer: Any
    tokens: list[int]
    expected_TV: Tensor
    bound: Float32Bound

    @property
    def has_attention(self) -> bool:
        return any(not isinstance(spec, Recurrent) for spec in self.model.layer_specs)

    def close(self, found_RV: Tensor, start: int) -> None:
        """``found`` are the logits of ``tokens`` from position ``start`` on."""
        expected_RV = self.expected_TV[start : start + len(found_RV)]
        assert found_RV.shape == expected_RV.shape
        error = float((found_RV - expected_RV).abs().max())
        assert error <= self.bound, f"error {error:.2e}, expected at most {float(self.bound):.2e}"
        assert torch.equal(found_RV.argmax(-1), expected_RV.argmax(-1))


def make_hybrid(kind: str, path: Path) -> Hybrid:
    name, changes = FAMILIES[kind]
    torch.manual_seed(11)
    made = getattr(transformers, f"{name}ForCausalLM")
    peer = made(made.config_class(**{**SIZES, **changes})).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
    peer.save_pretrained(path)
    tokens_T = torch.randint(3, VOCAB, (LENGTH,))
    exact_TV = run_exactly(peer, tokens_T)
    bound = Float32Bound(peer, tokens_T, exact_TV)
    return Hybrid(kind, load_model(path, dtype="float32"), peer, tokens_T.tolist(), exact_TV, bound)


def make_executor(hybrid: Hybrid, *, states: int = 64, ring: int = 1, interval: int = 0, **given: Any) -> Executor:
    tokens, page_size = given.pop("tokens", 1024), given.pop("page_size", PAGE)
    state = State(
        hybrid.model.layer_specs,
        num_states=states,
        recurrence=ChunkedRecurrence(),
        backend=SdpaAttention(),
        ring=ring,
        checkpoint_interval=interval,
        capacity=tokens if hybrid.has_attention else None,
        page_size=page_size,
    )
    runner = LocalRunner(hybrid.model, state, torch.device("cpu"))
    return Executor(runner, identity=FakeIdentity(hybrid.kind), **given)


def prompt(*rows: Sequence[int], **given: Any) -> PrefillInput:
    return PrefillInput(input_ids=torch.tensor([list(row) for row in rows]), **given)


def token(cache: Any, *ids: int, **given: Any) -> DecodeInput:
    return DecodeInput(input_ids=torch.tensor([[one] for one in ids]), kv_cache=cache, **given)


def cut_at(executor: Executor, hybrid: Hybrid, length: int) -> Handle:
    """A handle of all tokens, truncated."""
    handle = executor.prefill(prompt(hybrid.tokens, logits="none")).kv_cache
    return executor.truncate_kv(handle, length)


def fresh(hybrid: Hybrid, tokens: Sequence[int]) -> Tensor:
    """Logits of the last of any tokens, on an executor of their own: float32 ``[V]``."""
    return make_executor(hybrid).prefill(prompt(tokens, logits="last")).logits[0, -1]


def check(executor: Executor) -> None:
    with executor.pool.lock:
        executor.pool.sweep()
        executor.pool.state.check()
