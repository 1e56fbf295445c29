"""Rows of models with latent attention on CPUs: the same to the bit in any batch and any division
of a prompt, since all rows take the absorbed form; and exact requests without windows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.conftest import Case
from tests.models.test_deepseek import LATENT, V3, make_checkpoint, named
from tests.runner.test_recurrent_rows import loaded, logits_of, state_of
from tests.small_llms import engine_of

from quire import LLM, SamplingParams
from quire.kernels.native_library import native_problem
from quire.models.decoder import Decoder
from quire.nn.latent import MultiHeadLatentAttention
from quire.runner.row_dependence import content_dependence, row_dependence

LENGTHS = (37, 1, 140, 8)
CUTS = ([5, 6, 7, 37], [1], [64, 65, 100, 140], [1, 2, 3, 4, 5, 6, 7, 8])
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [*map(named, NAMES), *LARGER], ids=lambda case: case.name)
def test_rows_are_the_same_in_any_batch(case: Case, dtype: str, tmp_path: Path) -> None:
    model = loaded(make_checkpoint(case, tmp_path).path, dtype)
    assert row_dependence(model, state_of(model)) == ""
    assert content_dependence(model) == ""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    alone = [logits_of(model, [prompt], [[len(prompt)]])[0] for prompt in prompts]
    for found, expected in zip(logits_of(model, prompts, list(CUTS)), alone, strict=True):
        assert torch.equal(found, expected)


def test_packed_maps_replace_the_tensors(tmp_path: Path) -> None:
    """The weights take no more memory than before where panels are whole; two forms would be named
    as what makes rows depend on others."""
    tiny = make_checkpoint(LARGER[1], tmp_path)
    plain, model = (loaded(tiny.path, dtype) for dtype in ("float16", "bfloat16"))
    assert isinstance(model, Decoder)
    assert isinstance(plain, Decoder)
    for block, other in zip(model.blocks, plain.blocks, strict=True):
        attention, same = block.attention, other.attention
        assert isinstance(attention, MultiHeadLatentAttention)
        assert isinstance(same, MultiHeadLatentAttention)
        assert same.expansion.absorbing is None
        assert attention.expansion.key_HDR.is_meta
        assert attention.expansion.value_HRV.is_meta
        assert attention.expansion.nbytes == same.expansion.nbytes
        attention.expansion = same.expansion
    assert row_dependence(model, state_of(model)) == "PyTorch computes a MultiHeadLatentAttention"


def test_exact_requests_have_no_windows(tmp_path: Path) -> None:
    tiny = make_checkpoint(LARGER[0], tmp_path)
    llm = LLM(tiny.path, device="cpu", dtype="bfloat16", max_num_seqs=6, max_num_batched_tokens=48)
    assert engine_of(llm).exact.dependence == ""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 90, (length,), generator=generator).tolist() for length in (70, 5, 33, 20)]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=20, exact=True, ignore_eos=True)
    alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    together = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
    assert together == alone
