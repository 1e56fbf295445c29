"""Rows of models with experts on CPUs: the same to the bit in any batch and any division of a
prompt, where C++ computes the whole model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models import test_recurrent_families
from tests.models.conftest import Case
from tests.models.test_moe_families import GPT_OSS, QWEN2, make_checkpoint, named
from tests.runner.test_recurrent_rows import loaded, logits_of, state_of

from quire.kernels.native_library import native_problem
from quire.models.decoder import Decoder
from quire.nn.experts import MixtureOfExperts
from quire.runner.row_dependence import content_dependence, row_dependence

LENGTHS = (37, 1, 140, 8)
CUTS = ([5, 6, 7, 37], [1], [64, 65, 100, 140], [1, 2, 3, 4, 5, 6, 7, 8])
LARGER = (
    Case("qwen2-moe-wider", "Qwen2Moe", {**QWEN2, "hidden_size": 288, "num_hidden_layers": 2}),
    Case("gpt-oss-wider", "GptOss", {**GPT_OSS, "hidden_size": 288, "num_hidden_layers": 2}),
)
"""Widths at which a kernel's sums have several vectors side by side."""
NAMES = ("mixtral", "qwen2-moe", "qwen2-moe-some", "qwen3-moe-dense-ends", "gpt-oss-clamped")


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if problem := native_problem():
        pytest.skip(problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [*map(named, NAMES), *LARGER, test_recurrent_families.named("lfm2-moe")], ids=lambda case: case.name
)
def test_rows_are_the_same_in_any_batch(case: Case, dtype: str, tmp_path: Path) -> None:
    make = test_recurrent_families.make_checkpoint if case.family == "Lfm2Moe" else make_checkpoint
    model = loaded(make(case, tmp_path).path, dtype)
    assert row_dependence(model, state_of(model)) == ""
    assert content_dependence(model) == ""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    alone = [logits_of(model, [prompt], [[len(prompt)]])[0] for prompt in prompts]
    for found, expected in zip(logits_of(model, prompts, list(CUTS)), alone, strict=True):
        assert torch.equal(found, expected)


def test_what_pytorch_computes_is_named(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(named("qwen2-moe"), tmp_path).path, "float32")
    assert isinstance(model, Decoder)
    layer = model.blocks[1].mlp
    assert isinstance(layer, MixtureOfExperts)
    layer.call = None
    assert row_dependence(model, state_of(model)) == "PyTorch computes a MixtureOfExperts"
