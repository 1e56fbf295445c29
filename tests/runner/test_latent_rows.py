"""Decodes of models with latent attention on CPUs: the same to the bit in any batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.conftest import Case
from tests.models.test_deepseek import LATENT, V3, make_checkpoint, named
from tests.runner.test_recurrent_rows import loaded, state_of
from torch import Tensor

from quire.base.types import Add, Chunk, Step
from quire.kernels.native_library import native_problem
from quire.models.decoder import Decoder
from quire.models.families import LoadedModel
from quire.nn.latent import MultiHeadLatentAttention
from quire.runner.local import LocalRunner
from quire.runner.row_dependence import row_dependence

LENGTHS = (37, 1, 140, 8)
WIDE = {"hidden_size": 96, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 2}
ROWS = {"kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
LARGER = (
    Case("v3-wider", "DeepseekV3", {**V3, **WIDE, **ROWS}),
    Case("youtu-wider", "Youtu", {**LATENT, **WIDE, **ROWS, "q_lora_rank": None}),
)
"""Whole panels of weights, and as many query heads as DeepSeek-V2-Lite has."""
NAMES = ("v2", "v2-lite", "v2-biases", "v3", "v3-whole-heads-turn-by-halves", "glm4-moe-lite", "youtu")


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if problem := native_problem():
        pytest.skip(problem)


def decoded(model: LoadedModel, prompts: list[list[int]], later: list[list[int]]) -> list[Tensor]:
    """Return the logits of tokens that run one by one behind prompts, which ran alone."""
    runner = LocalRunner(model, state_of(model), torch.device("cpu"))
    for seq, prompt in enumerate(prompts):
        runner.execute(Step(edits=(Add(seq),)))
        runner.execute(Step(chunks=(Chunk(seq, prompt, logits="none"),)))
    steps = [
        runner.execute(Step(chunks=tuple(Chunk(seq, [token], logits="all") for seq, token in enumerate(tokens))))
        for tokens in zip(*later, strict=True)
    ]
    return list(torch.stack([step.logits_RV.clone() for step in steps], 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*map(named, NAMES), *LARGER], ids=lambda case: case.name)
def test_decodes_are_the_same_in_any_batch(case: Case, dtype: str, tmp_path: Path) -> None:
    model = loaded(make_checkpoint(case, tmp_path).path, dtype)
    generator = torch.Generator().manual_seed(0)
    prompts, later = (
        [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in lengths]
        for lengths in (LENGTHS, [5] * len(LENGTHS))
    )
    together = decoded(model, prompts, later)
    for prompt, tokens, found in zip(prompts, later, together, strict=True):
        assert torch.equal(found, decoded(model, [prompt], [tokens])[0])


def test_prompts_are_named_as_what_depends(tmp_path: Path) -> None:
    model = loaded(make_checkpoint(LARGER[1], tmp_path).path, "bfloat16")
    assert isinstance(model, Decoder)
    attention = model.blocks[0].attention
    assert isinstance(attention, MultiHeadLatentAttention)
    assert attention.expansion.absorbing is not None
    assert row_dependence(model, state_of(model)) == "PyTorch computes a MultiHeadLatentAttention"
