"""Adapters of models that ranks divide: logits against weights with the adapter merged into them.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.peft_models import embedding_name, linear_names, merged, write_adapter
from tests.exact import Float32Bound, run_exactly
from tests.models.conftest import CASES, make_tiny  # noqa: F401
from tests.models.test_parity import error, run, tokens_for
from tests.ranks.thread_group import ThreadGroup, on_ranks
from torch import Tensor

from quire.adapters.divided import DividedAdapters
from quire.adapters.peft import read_adapter
from quire.build import layer_kernels, make_adapters
from quire.contracts.adapters import Adapter
from quire.contracts.ranks import Grid
from quire.models.loading import load_model


class NoPeers:
    def load_adapter(self, adapter_id: int, parts: Sequence[Adapter]) -> None:
        raise AssertionError

    def unload_adapter(self, adapter_id: int) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("name", "size"),
    [("llama-biases", 2), ("llama-gqa", 4), ("llama-mqa-tied", 2), ("phi3", 2), ("phi3", 4), ("gemma2", 2)],
)
def test_ranks_give_the_logits_of_the_merged_model(make_tiny: Any, name: str, size: int, tmp_path: Path) -> None:  # noqa: F811
    """All maps, the embedding and the head are changed; in some models ranks share a KV head, and
    files hold parts of maps in one tensor."""
    tiny = make_tiny(next(case for case in CASES if case.name == name))
    embedding = embedding_name(tiny.model)
    sites = linear_names(tiny.model) | {embedding: tuple(tiny.model.get_input_embeddings().weight.shape)}
    tensors = write_adapter(tmp_path, sites, embedding)
    peer = merged(tiny.model, tensors)
    whole = load_model(tiny.path, dtype="float32")
    tokens_T = tokens_for(whole.vocab_size)
    fingerprint = read_adapter(tmp_path, whole).fingerprint

    def adapted(group: ThreadGroup) -> Tensor:
        model = load_model(tiny.path, dtype="float32", group=group, kernels=layer_kernels(torch.device("cpu")))
        adapter = read_adapter(tmp_path, model)
        assert adapter.fingerprint == fingerprint, "it is read as one process reads it"
        pool, base = make_adapters(model), run(model, tokens_T, [len(tokens_T)])
        number = pool.load(DividedAdapters(model.places, Grid(size), NoPeers()).parts(adapter)[group.rank])
        pool.activate([number], [len(tokens_T)], [len(tokens_T)])
        found = run(model, tokens_T, [len(tokens_T)])
        pool.deactivate()
        again = run(model, tokens_T, [len(tokens_T)])
        assert group.rank or torch.equal(again, base)
        return found

    exact = run_exactly(peer, tokens_T)
    assert error(on_ranks(size, adapted)[0], exact) <= Float32Bound(peer.float(), tokens_T, exact)
