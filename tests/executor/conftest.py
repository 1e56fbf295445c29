"""Tiny random models, executors over small pools, and what a refused call must leave alone.

Tolerances: both sides compute in float32, so they may differ by rounding that grows with the length
of the sums. With L layers of width E and H hidden units, logits of magnitude A agree within ``A *
eps * L * (E + H)``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.token_history import UNKNOWN, TokenHistory
from quire.contracts.executor import DecodeInput, ExecutorInputs, PrefillInput, TextData
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.executor.row import Row
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.state import State
from quire.models.families import LoadedModel
from quire.models.loading import load_model
from quire.runner.local import LocalRunner

VOCAB, LAYERS, WIDTH, HIDDEN, CONTEXT, PAGE = 97, 3, 32, 56, 128, 4
FAMILIES = ("Llama", "Qwen3")
RECURRENT_KINDS = ("mamba2", "qwen3-next", "lfm2", "falcon-h1")
"""Recurrent layers alone; gated delta rule and attention; short convolutions and attention; both in
each block.
"""


@dataclass(frozen=True)
class Tiny:
    """A model here, and the same one in transformers."""

    family: str
    path: Path
    model: LoadedModel
    reference: Any

    def logits(self, ids: list[int]) -> Tensor:
        """float32 ``[S, V]`` of a full pass of the oracle."""
        with torch.no_grad():
            return self.reference(torch.tensor([ids])).logits[0]


class FakeIdentity:
    def __init__(self, name: str) -> None:
        self.name = name

    def fields(self) -> dict[str, str]:
        return {"architecture": self.name, "config": "c" * 8, "weights": "w" * 8}


def tolerance(expected: Tensor) -> float:
    eps = torch.finfo(torch.float32).eps
    return float(expected.abs().max()) * eps * LAYERS * (WIDTH + HIDDEN)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) <= tolerance(expected)


def make_tiny(family: str, path: Path, **fields: Any) -> Tiny:
    """A random model of ``family``, saved to ``path``; ``fields`` are further ones of its
    configuration.
    """
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
    }
    kind = getattr(transformers, f"{family}ForCausalLM")
    reference = kind(kind.config_class(**sizes | fields)).float().eval()
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 and "embed" not in name else 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + ("norm" in name))
    reference.save_pretrained(path)
    return Tiny(family, path, load_model(path, dtype="float32"), reference)


@pytest.fixture(scope="session")
def tinies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tiny]:
    return {family: make_tiny(family, tmp_path_factory.mktemp("models") / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tinies: dict[str, Tiny]) -> Tiny:
    return tinies[request.param]


@pytest.fixture
def llama(tinies: dict[str, Tiny]) -> Tiny:
    return tinies["Llama"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long sweeps run over the first two kinds, and over the others among the slow ones; random
    calls meet all of them.
    """
    for item in items:
        if item.get_closest_marker("sweep") and item.callspec.params["hybrid"] in RECURRENT_KINDS[2:]:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=RECURRENT_KINDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A ``Hybrid`` of each kind."""
    from tests.executor.recurrent import make_hybrid

    return make_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def make_executor(
    tiny: Tiny,
    *,
    tokens: int = 1024,
    window_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    name: str = "",
    **kwargs: Any,
) -> Executor:
    state = State(
        tiny.model.layer_specs,
        capacity=tokens,
        window_capacity=window_tokens,
        page_size=PAGE,
        dtype=dtype,
        backend=SdpaAttention(),
    )
    runner = LocalRunner(tiny.model, state, torch.device("cpu"))
    return Executor(runner, identity=FakeIdentity(name or tiny.family), **kwargs)


Maker = Callable[..., Executor]


@pytest.fixture
def executor(tiny: Tiny) -> Iterator[Executor]:
    """Of each family. Pages are recounted, and all are free when the last cache is gone."""
    made = make_executor(tiny)
    yield made
    check_pages(made)


@pytest.fixture
def ex(llama: Tiny) -> Iterator[Executor]:
    made = make_executor(llama)
    yield made
    check_pages(made)


@pytest.fixture
def llm(ex: Executor) -> LlmExecutor:
    return LlmExecutor(ex)


def check_pages(executor: Executor) -> None:
    # Under the lock a cache that the garbage collector finds meanwhile is let go of later.
    with executor.pool.lock:
        if executor.pool.runner_or_none is not None:
            executor.pool.sweep()
            executor.pool.state.check()


def some_ids(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(VOCAB) for _ in range(count)] if count else []


def prompt(*rows: list[int], **kwargs: Any) -> PrefillInput:
    return PrefillInput(input_ids=torch.tensor(rows), **kwargs)


def token(cache: Any, *ids: int, **kwargs: Any) -> DecodeInput:
    return DecodeInput(input_ids=torch.tensor([[i] for i in ids]), kv_cache=cache, **kwargs)


def inputs(*rows: list[int], at: int | tuple[int, ...] | None = None, lengths: tuple[int, ...] | None = None) -> Any:
    return ExecutorInputs(
        text=TextData(token_ids=torch.tensor(rows, dtype=torch.int64), row_lengths=lengths), next_position=at
    )


def snapshot(executor: Executor, *caches: KVCache) -> object:
    """Everything that a refused call must leave as it was."""
    state = executor.pool.state
    metrics = executor.metrics()
    return (
        state.num_available_pages(),
        sorted(state.sequences.ids),
        metrics.to_dict(),
        len(executor.pool.caches),
        [
            (
                cache.num_entries,
                cache.lengths,
                cache.revision,
                [row.seq for row in cache.rows],
                [tuple(pages.tolist()) for pages in cache.pages()],
                [cache.token_ids(index).tolist() for index in range(cache.batch_size)],  # type: ignore[union-attr]
                [
                    cache.read(layer, cache.lengths, values=True).sum().item()
                    for layer in executor.pool.state.geometry.layer_ids
                ],
            )
            for cache in caches
        ],
    )


@contextmanager
def refused(kind: type[QuireError], executor: Executor, *caches: KVCache, match: str = "") -> Iterator[None]:
    """The block raises exactly ``kind`` and leaves no trace."""
    before = snapshot(executor, *caches)
    with pytest.raises(kind, match=match or None) as caught:
        yield
    assert caught.type is kind
    assert snapshot(executor, *caches) == before


def forget_tokens(row: Row) -> None:
    """As after loading a file that does not tell them."""
    row.tokens = TokenHistory(np.full(len(row.tokens), UNKNOWN))
