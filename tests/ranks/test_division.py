"""Models that ranks divide: logits against transformers, and the sizes of what each rank holds.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exact import Float32Bound, run_exactly
from tests.models import test_deepseek as latent
from tests.models import test_moe_families as mixtures
from tests.models import test_parity as parity
from tests.models import test_recurrent_families as hybrids
from tests.models.conftest import CASES, Case, make_checkpoint, make_tiny  # noqa: F401
from tests.models.test_parity import CHUNKINGS, error, run, tokens_for
from tests.ranks.thread_group import on_ranks
from torch import Tensor

from quire.base.errors import Unsupported
from quire.build import layer_kernels
from quire.contracts.ranks import Share
from quire.models.families import family_of
from quire.models.loading import load_model
from quire.weights.places import parameter_shapes


def logits_of(
    path: Any, size: int, tokens_T: Tensor, chunks: list[int], runs: Callable[..., Tensor] = run, **options: Any
) -> Tensor:
    """Logits of rank 0."""
    return on_ranks(
        size, lambda group: runs(load_model(path, dtype="float32", group=group, **options), tokens_T, chunks)
    )[0]


def check(tiny: Any, size: int, runs: Callable[..., Tensor] = run, **options: Any) -> None:
    tokens_T = tokens_for(load_model(tiny.path, dtype="float32").vocab_size)
    exact = run_exactly(tiny.model, tokens_T)
    found = logits_of(tiny.path, size, tokens_T, CHUNKINGS["chunks"], runs, **options)
    assert found.shape == exact.shape
    assert error(found, exact) <= Float32Bound(tiny.model, tokens_T, exact)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_give_the_logits_of_one(make_tiny: Any, case: Case) -> None:  # noqa: F811
    check(make_tiny(case), 2)


@pytest.mark.parametrize("case", latent.CASES, ids=lambda case: case.name)
def test_latent_attention(tmp_path: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are divided, the rows that all of them read are not."""
    monkeypatch.setattr(parity, "DensePass", latent.LatentPass)
    check(latent.make_checkpoint(case, tmp_path / case.name), 2)


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", hybrids.CASES, ids=lambda case: case.name)
def test_recurrent_layers(tmp_path: Any, case: Case) -> None:
    """The heads of mixers, and the channels of their convolutions and norms."""
    check(hybrids.make_checkpoint(case, tmp_path / case.name), 2, hybrids.run)


FEW_KEY_HEADS = Case(
    "qwen3.5-few", "Qwen3_5", {**hybrids.DELTA, "linear_num_key_heads": 1, "linear_num_value_heads": 4}
)


@pytest.mark.parametrize(
    "case",
    [*map(hybrids.named, ("mamba2", "mamba2-biases-tied", "falcon-h1-normed", "bamba", "lfm2")), FEW_KEY_HEADS],
    ids=lambda case: case.name,
)
def test_more_ranks_than_groups_of_heads(tmp_path: Any, case: Case) -> None:
    """Neighbouring ranks hold the same B and C, or key head, and norm the channels of one group
    together."""
    check(hybrids.make_checkpoint(case, tmp_path / case.name), 4, hybrids.run)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "llama-mqa-tied", "qwen2-tied-sharded", "phi3", "gemma2", "olmo2", "stablelm-head-norms"]
)
def test_more_ranks_than_kv_heads(make_tiny: Any, name: str) -> None:  # noqa: F811
    """Neighbouring ranks hold the same KV head; the last one holds fewer rows of the head."""
    check(make_tiny(next(case for case in CASES if case.name == name)), 4)


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "qwen2-moe", "qwen3-moe", "gpt-oss"])
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
        ("llama-biases", 5, "4 query heads do not divide by 5"),
    ],
)
def test_what_does_not_divide_is_refused(make_tiny: Any, name: str, size: int, reason: str) -> None:  # noqa: F811
    tiny = make_tiny(next(case for case in CASES if case.name == name))
    with pytest.raises(Unsupported, match=reason):
        on_ranks(size, lambda group: load_model(tiny.path, dtype="float32", group=group))


@pytest.mark.parametrize(
    ("name", "changes", "size", "reason"),
    [
        ("mamba2", {}, 3, "8 heads of the mixers do not divide by 3"),
        ("bamba", {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_expand": 3, "mamba_n_groups": 3}, 2, "3 groups of"),
        ("qwen3-next", {"linear_num_value_heads": 8}, 4, "2 key heads of the mixers do not divide by 4"),
        ("qwen3.5", {}, 4, "6 value heads of the mixers do not divide by 4"),
        ("lfm2", {}, 8, "4 query heads do not divide by 8"),
    ],
)
def test_mixers_that_do_not_divide_are_refused(
    tmp_path: Any, name: str, changes: dict[str, Any], size: int, reason: str
) -> None:
    path = hybrids.make_checkpoint(hybrids.named(name), tmp_path / name).path
    values = json.loads((path / "config.json").read_text()) | changes
    config = family_of(values).read_config(values, None)
    with pytest.raises(Unsupported, match=f"tensor_parallel_size {size}: {reason}"):
        config.divided(Share(0, size))
