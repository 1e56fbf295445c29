"""Adapters of models that ranks divide: logits against weights with the adapter merged into them.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.peft_models import embedding_name, linear_names, merged, write_adapter
from tests.exact import Float32Bound, run_exactly
from tests.models import test_deepseek as latent
from tests.models import test_parity as parity
from tests.models import test_recurrent_families as hybrids
from tests.models.conftest import CASES, TinyCheckpoint, make_tiny  # noqa: F401
from tests.models.test_parity import error, run, tokens_for
from tests.ranks.thread_group import ThreadGroup, on_ranks
from torch import Tensor

from quire.adapters.divided import DividedAdapters
from quire.adapters.peft import read_adapter
from quire.adapters.targets import targets_of
from quire.build import layer_kernels, make_adapters
from quire.contracts.adapters import Adapter
from quire.contracts.ranks import Grid
from quire.models.loading import load_model


class NoPeers:
    def load_adapter(self, adapter_id: int, parts: Sequence[Adapter]) -> None:
        raise AssertionError

    def unload_adapter(self, adapter_id: int) -> None:
        raise AssertionError


def check(tiny: TinyCheckpoint, size: int, folder: Path, runs: Callable[..., Tensor] = run) -> None:
    """All maps that adapters can change, the embedding and the head are changed."""
    whole = load_model(tiny.path, dtype="float32")
    targets = targets_of(whole).targets
    embedding = embedding_name(tiny.model)
    sites = {name: shape for name, shape in linear_names(tiny.model).items() if name in targets}
    sites |= {embedding: tuple(tiny.model.get_input_embeddings().weight.shape)}
    tensors = write_adapter(folder, sites, embedding)
    peer = merged(tiny.model, tensors)
    tokens_T = tokens_for(whole.vocab_size)
    fingerprint = read_adapter(folder, whole).fingerprint

    def adapted(group: ThreadGroup) -> Tensor:
        model = load_model(tiny.path, dtype="float32", group=group, kernels=layer_kernels(torch.device("cpu")))
        adapter = read_adapter(folder, model)
        assert adapter.fingerprint == fingerprint, "it is read as one process reads it"
        pool, base = make_adapters(model), runs(model, tokens_T, [len(tokens_T)])
        number = pool.load(DividedAdapters(model.places, Grid(size), NoPeers()).parts(adapter)[group.rank])
        pool.activate([number], [len(tokens_T)], [len(tokens_T)])
        found = runs(model, tokens_T, [len(tokens_T)])
        pool.deactivate()
        again = runs(model, tokens_T, [len(tokens_T)])
        assert group.rank or torch.equal(again, base)
        return found

    exact = run_exactly(peer, tokens_T)
    assert error(on_ranks(size, adapted)[0], exact) <= Float32Bound(peer.float(), tokens_T, exact)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("llama-biases", 2), ("llama-gqa", 4), ("llama-mqa-tied", 2), ("phi3", 2), ("phi3", 4), ("gemma2", 2)),
        ("olmo2", 4),
    ],
)
def test_ranks_give_the_logits_of_the_merged_model(make_tiny: Any, name: str, size: int, tmp_path: Path) -> None:  # noqa: F811
    """In some models ranks share a KV head, and files hold parts of maps in one tensor."""
    check(make_tiny(next(case for case in CASES if case.name == name)), size, tmp_path)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("v2", 2), ("v2-lite", 4), ("mamba2-biases-tied", 2), ("falcon-h1", 4), ("lfm2-biases-untied", 2)),
        *(("granite-4-dense", 2), ("qwen3.5", 2)),
    ],
)
def test_ranks_of_other_layers(name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "DensePass", latent.LatentPass)
    monkeypatch.setattr(hybrids.HybridPass, "recurrent_parts", lambda *_: None, raising=False)
    kind = hybrids if any(case.name == name for case in hybrids.CASES) else latent
    check(kind.make_checkpoint(kind.named(name), tmp_path / "model"), size, tmp_path, kind.run)
