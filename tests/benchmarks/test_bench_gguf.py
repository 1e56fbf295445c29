"""GGUF files of the benchmarks' checkpoints: what is in them, and that llama.cpp computes the same.

``QUIRE_LLAMA_PYTHON`` names an interpreter with ``llama_cpp`` and ``gguf``, for the latter.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire.contracts.layers import RopeSpec
from quire.ops.rope import inverse_frequencies
from quire_bench.checkpoints import SHAPES, checkpoint
from quire_bench.peers import TransformersPeer
from quire_bench.reports import random_prompts

BENCH = Path(__file__).parents[2] / "bench"
LLAMA = SHAPES["quick-1m"]
LLAMA3 = dataclasses.replace(
    LLAMA, rope=dataclasses.replace(SHAPES["llama-3.2-1b"].rope, original_max_position=1024), head_size=64
)
QWEN3 = dataclasses.replace(LLAMA, head_size=128, rope=RopeSpec(theta=1e6, rotary_dim=128), qk_norms=True)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``quire bench peers``."""
    return importlib.import_module("quire_bench.peer_table")


@pytest.fixture
def files(peers: ModuleType) -> ModuleType:
    return importlib.import_module("quire_bench.gguf_files")


class TestFiles:
    def test_tensors_are_read_as_they_are(self, files: ModuleType, tmp_path: Path) -> None:
        path = checkpoint("quick-1m", directory=tmp_path) / "model.safetensors"
        expected = load_file(path)
        found = dict(files.read_tensors(path))
        assert set(found) == set(expected)
        assert all(np.array_equal(found[name], expected[name].float().numpy()) for name in expected)

    def test_halves_become_neighbours(self, files: ModuleType) -> None:
        weight = np.arange(2 * 6, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
        assert files.interleave_pairs(weight, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]

    @pytest.mark.parametrize("shape", [LLAMA3, SHAPES["llama-3.2-1b"]], ids=["small", "1b"])
    def test_factors_are_those_of_the_frequencies(self, shape: Any, files: ModuleType) -> None:
        plain = inverse_frequencies(RopeSpec(theta=shape.rope.theta, rotary_dim=shape.head_size))
        scaled = inverse_frequencies(shape.rope)
        found = torch.from_numpy(files.rope_factors(shape.config()["rope_parameters"], shape.head_size))
        torch.testing.assert_close(found, (plain / scaled).float())
        assert 1 < len(found.unique()) < len(found)

    def test_no_factors_and_unknown_ones(self, files: ModuleType) -> None:
        assert files.rope_factors({"rope_type": "default"}, 64) is None
        with pytest.raises(ValueError, match="yarn"):
            files.rope_factors({"rope_type": "yarn"}, 64)

    @pytest.mark.parametrize("shape", [LLAMA, LLAMA3, QWEN3], ids=["llama", "llama3", "qwen3"])
    def test_llama_cpp_says_what_transformers_says(self, shape: Any, peers: ModuleType, tmp_path: Path) -> None:
        """Purely random weights, norms among them: any wrong place or row changes the text."""
        python = os.environ.get("QUIRE_LLAMA_PYTHON", "")
        if not python and not all(map(importlib.util.find_spec, ("llama_cpp", "gguf"))):
            pytest.skip("needs llama-cpp-python and gguf, here or in the interpreter QUIRE_LLAMA_PYTHON")
        from transformers import AutoConfig, AutoModelForCausalLM

        config = shape.config()
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config.pop("model_type"), **config | {"vocab_size": 256}), dtype=torch.float32
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(torch.randn_like(weight) * 0.1 if weight.ndim == 2 else 1 + 0.5 * torch.rand_like(weight))
        model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
        prompts = random_prompts(2, 300, 256)
        expected = TransformersPeer(tmp_path / "model", torch.float32).generate(prompts, 12).tokens
        assert len(set(expected[0])) > 3
        log = tmp_path / "llama.log"
        with peers.started("llama.cpp", python or sys.executable, 1, log) as peer:
            about = peer.ask(
                "load",
                model=str(tmp_path / "model"),
                dtype="float32",
                quantization=None,
                threads=1,
                length=512,
                batch=2,
                kv_bytes=0,
            )
            assert (about["file"], about["kv"], about["flash_attn"]) == ("F32", "F32", False)
            assert peer.ask("prefill", prompt=prompts[0].tolist())["tokens"] == [expected[0][0]]
            texts = peer.ask("place", prompts=prompts.tolist(), room=20)
            for text, more in zip(texts, peer.ask("decode", steps=11)["tokens"], strict=True):
                text.extend(more)
        assert [tuple(text) for text in texts] == list(expected)
