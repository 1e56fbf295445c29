"""Ids, weights and greedy texts of GGUF files, beside the directories that transformers has written
of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import safe_open

from quire import LLM, SamplingParams
from quire.kernels.merges import scored_merges
from quire.models.sources import open_weights
from quire.text.gguf_tokenizer import merges_of
from quire.text.tokenizer import Tokenizer
from quire.weights.gguf_blocks import BLOCKS
from quire_bench.texts import mixed_lines

LINES = 20_000
TOKENS = 200
PROMPTS = ("def fibonacci(n):\n", "The capital of France is")


def test_ids_of_mixed_text(file: Path) -> None:
    """Those of tokenizer.json, except for runs of 32 spaces and more and a written ▁: there
    SentencePiece, as llama.cpp, takes the longest token of spaces first, and a ▁ for itself.
    """
    found = Tokenizer.from_path(file, scored_merges())
    assert found is not None
    wanted = tokenizers.Tokenizer.from_file(str(file.with_suffix("") / "tokenizer.json"))
    # One of the normaliser's; byte-level tokenizers have none.
    excepted = ("▁", " " * 32) if wanted.normalizer is not None else ()
    texts = [line for line in mixed_lines(LINES) if not any(one in line for one in excepted)]
    assert len(texts) > LINES // 2
    for text, mine, theirs in zip(
        texts, found.backend.encode_batch_fast(texts), wanted.encode_batch_fast(texts), strict=True
    ):
        assert mine.ids == theirs.ids, text
        assert found.decode(mine.ids) == wanted.decode(mine.ids), text


def test_merges_that_texts_use_give_the_ids_of_all(file: Path) -> None:
    """Of SentencePiece's vocabularies; byte-level ones have their merges in the file."""
    used, every = Tokenizer.from_path(file, scored_merges()), Tokenizer.from_path(file, merges_of)
    assert used is not None
    assert every is not None
    texts = [*mixed_lines(LINES), *(" " * count for count in range(1, 100))]
    for text, mine, theirs in zip(
        texts, used.backend.encode_batch_fast(texts), every.backend.encode_batch_fast(texts), strict=True
    ):
        assert mine.ids == theirs.ids, text


def test_weights_in_bfloat16_are_those_of_the_directory(file: Path) -> None:
    source = open_weights(file)
    with safe_open(file.with_suffix("") / "model.safetensors", framework="pt") as stored:
        names = set(stored.keys())
        assert names - set(source.tensors) <= {"lm_head.weight"}
        for name in sorted(names & set(source.tensors)):
            form, out = source.format(name, None), torch.empty(source.tensors[name].shape, dtype=torch.bfloat16)
            form.expand(name, {name: source.read(name)}, out)
            assert torch.equal(out, stored.get_tensor(name)), name


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(llm: LLM, theirs: Any, prompt: str) -> None:
    """Which reads the same file, in float32."""
    output = llm.generate([prompt], SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))[0]
    assert set(llm.status()["weight_formats"]) & set(BLOCKS)
    ids = torch.tensor([output.prompt_token_ids])
    wanted = theirs.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, ids.shape[1] :]
    assert list(output.outputs[0].token_ids) == wanted.tolist()
