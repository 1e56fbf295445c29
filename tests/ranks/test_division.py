"""Models that ranks divide: logits against transformers, and the sizes of what each rank holds.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.exact import Float32Bound, run_exactly
from tests.models import test_moe_families as mixtures
from tests.models.conftest import CASES, Case, make_checkpoint, make_tiny  # noqa: F401
from tests.models.test_parity import CHUNKINGS, error, run, tokens_for
from tests.ranks.thread_group import on_ranks
from torch import Tensor

from quire.base.errors import Unsupported
from quire.build import layer_kernels
from quire.models.loading import load_model
from quire.weights.places import parameter_shapes

UNDIVIDED = ("olmo2", "stablelm-2", "stablelm-head-norms")
"""Families with norms over several heads at once, or one for each head."""
DENSE = [case for case in CASES if not case.name.startswith(UNDIVIDED)]


def logits_of(path: Any, size: int, tokens_T: Tensor, chunks: list[int], **options: Any) -> Tensor:
    """Logits of rank 0."""
    return on_ranks(
        size, lambda group: run(load_model(path, dtype="float32", group=group, **options), tokens_T, chunks)
    )[0]


def check(tiny: Any, size: int, **options: Any) -> None:
    tokens_T = tokens_for(load_model(tiny.path, dtype="float32").vocab_size)
    exact = run_exactly(tiny.model, tokens_T)
    found = logits_of(tiny.path, size, tokens_T, CHUNKINGS["chunks"], **options)
    assert found.shape == exact.shape
    assert error(found, exact) <= Float32Bound(tiny.model, tokens_T, exact)


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_two_ranks_give_the_logits_of_one(make_tiny: Any, case: Case) -> None:  # noqa: F811
    check(make_tiny(case), 2)


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa-tied", "qwen2-tied-sharded", "phi3", "gemma2"])
def test_more_ranks_than_kv_heads(make_tiny: Any, name: str) -> None:  # noqa: F811
    """Neighbouring ranks hold the same KV head; the last one holds fewer rows of the head."""
    check(make_tiny(next(case for case in CASES if case.name == name)), 4)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"])
def test_experts_are_divided(tmp_path: Any, name: str) -> None:
    case = next(case for case in mixtures.CASES if case.name.startswith(name))
    check(mixtures.make_checkpoint(case, tmp_path / name), 2)


def test_packed_weights(make_tiny: Any) -> None:  # noqa: F811
    """The layout of this machine's kernels."""
    check(make_tiny(CASES[0]), 2, kernels=layer_kernels(torch.device("cpu")))


def test_a_rank_holds_its_part(make_tiny: Any) -> None:  # noqa: F811
    tiny = make_tiny(next(case for case in CASES if case.name == "llama-biases"))
    whole = load_model(tiny.path, dtype="float32")
    parts = on_ranks(2, lambda group: load_model(tiny.path, dtype="float32", group=group))
    assert {one.canonical_config for one in parts} == {whole.canonical_config}
    own, all_of_it = (parameter_shapes(model.places) for model in (parts[1], whole))
    assert {name: shape for name, shape in own.items() if name.startswith("0.") and "norm" not in name} == {
        "0.qkv.weight": (32, 32),
        "0.qkv.bias": (32,),
        "0.out.weight": (32, 16),
        "0.out.bias": (32,),
        "0.gate_up.weight": (56, 32),
        "0.gate_up.bias": (56,),
        "0.down.weight": (32, 28),
        "0.down.bias": (32,),
    }
    assert all_of_it["0.qkv.weight"] == (64, 32)
    assert [spec.num_heads for spec in parts[0].layer_specs] == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("llama-gqa", 3, "4 query heads do not divide by 3"),
        ("llama-gqa", 8, "4 query heads do not divide by 8"),
        ("olmo2", 2, "head norms that this release does not divide"),
        ("stablelm-2", 2, "head norms that this release does not divide"),
    ],
)
def test_what_does_not_divide_is_refused(make_tiny: Any, name: str, size: int, reason: str) -> None:  # noqa: F811
    tiny = make_tiny(next(case for case in CASES if case.name == name))
    with pytest.raises(Unsupported, match=reason):
        on_ranks(size, lambda group: load_model(tiny.path, dtype="float32", group=group))
