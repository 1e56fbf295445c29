"""Distributions over 2,000 tokens of code and prose, in float32, 8 and 4 bits, with an adapter."""

from __future__ import annotations

import copy
import inspect
import json.decoder
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.peft_models import make_adapter

from quire import LLM
from quire_bench.texts import ROOT

TOKENS = 2000
LENGTH = 500
CHUNK = 100
MOST_LOSS = {"int8": 0.01, "int4": 0.2}
"""Nats of a format, on average: what is wanted of it."""


def texts(llm: LLM) -> list[list[int]]:
    """Sequences of ``LENGTH`` tokens: half of them code of Python's library, half prose."""
    assert llm.tokenizer is not None
    code = llm.tokenizer.encode(inspect.getsource(json.decoder) + inspect.getsource(textwrap))
    prose = llm.tokenizer.encode((ROOT / "docs/concepts.md").read_text(encoding="utf-8"))
    ids = [*code[: TOKENS // 2], *prose[: TOKENS // 2]]
    assert len(ids) == TOKENS
    return [ids[start : start + LENGTH] for start in range(0, TOKENS, LENGTH)]


def logits(llm: LLM, ids: list[int], adapter: str | None = None) -> torch.Tensor:
    """The logits after every ``CHUNK`` tokens, through a session: float64 ``[C, V]``."""
    with llm.session(ids[:CHUNK], adapter=adapter) as session:
        found = [session.logits().double()]
        for start in range(CHUNK, len(ids), CHUNK):
            found.append(session.append(ids[start : start + CHUNK]).logits().double())
    return torch.stack(found)


@torch.inference_mode()
def wanted(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, CHUNK - 1 :: CHUNK].double()


def kl(base: torch.Tensor, found: torch.Tensor) -> float:
    """Mean divergence of ``found`` from ``base``, logits ``[T, V]``, in nats."""
    base, found = base.log_softmax(-1), found.log_softmax(-1)
    return float((base.exp() * (base - found)).sum(-1).mean())


def test_logits_are_as_near_to_float64_as_those_of_transformers(llm: LLM, theirs: Any) -> None:
    exact = copy.deepcopy(theirs).double()
    mine = others = 0.0
    for ids in texts(llm):
        truth = wanted(exact, ids)
        mine = max(mine, float((logits(llm, ids) - truth).abs().max()))
        others = max(others, float((wanted(theirs, ids) - truth).abs().max()))
    # Both add in float32, in orders of their own: the errors are of one size.
    assert mine < 4 * others


@pytest.mark.parametrize("quantization", MOST_LOSS)
def test_loss_by_8_and_4_bits(file: Path, theirs: Any, quantization: str, request: pytest.FixtureRequest) -> None:
    if (file.stem, quantization) == ("gemma-3-270m", "int4"):
        request.applymarker(pytest.mark.xfail(strict=True, reason="4 bits lose 0.31 nats in this small model"))
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "256MiB", "max_model_len": 1024}
    with LLM(str(file.with_suffix("")), quantization=quantization, **options) as llm:
        found = [kl(wanted(theirs, ids), logits(llm, ids)) for ids in texts(llm)]
    print(f"{file.stem}, {quantization}: KL {sum(found) / len(found):.4f}")
    assert 0 < sum(found) / len(found) < MOST_LOSS[quantization]


def test_a_random_adapter_is_pefts(llm: LLM, file: Path, theirs: Any, tmp_path: Path) -> None:
    """Over the blocks of the file, which stay as they are."""
    base, plain = tmp_path / "base", copy.deepcopy(theirs)
    plain.hf_quantizer = None  # else transformers refuses to save what it has expanded
    if hasattr(plain.config, "quantization_config"):
        del plain.config.quantization_config
    plain.save_pretrained(base)

    def soften(model: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(0.05)  # of weights of about 0.03

    adapted = make_adapter(base, tmp_path / "adapter", plain, soften, target_modules=["q_proj", "v_proj", "down_proj"])
    llm.load_adapter("random", tmp_path / "adapter")
    try:
        ids = texts(llm)[0]
        exact = wanted(copy.deepcopy(adapted).double(), ids)
        mine = float((logits(llm, ids, "random") - exact).abs().max())
        # As above; without the adapter the difference is far larger.
        assert mine < 4 * float((wanted(adapted, ids) - exact).abs().max())
        assert float((logits(llm, ids) - exact).abs().max()) > 100 * mine
    finally:
        llm.unload_adapter("random")
