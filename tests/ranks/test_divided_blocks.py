"""Ranks keep the blocks and codes of quantised checkpoints: the same numbers as expanded ones.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import test_deepseek as latent
from tests.models import test_parity as parity
from tests.models import test_recurrent_families as hybrids
from tests.models.conftest import Case, make_checkpoint
from tests.models.gguf_writer import write_gguf
from tests.models.quantized_writer import write_quantized
from tests.models.test_gguf_blocks import CASES, EXPERTS, KINDS
from tests.models.test_kept_codes import LAYOUTS, MODEL, MODELOPT, compressed, exactly
from tests.models.test_parity import run, tokens_for
from tests.ranks.test_division import check
from tests.ranks.thread_group import ThreadGroup, on_ranks
from torch import Tensor

from quire.build import layer_kernels
from quire.kernels.native_library import native_problem
from quire.models.families import LoadedModel
from quire.models.fingerprint import kept_formats, model_fingerprint
from quire.models.loading import load_model
from quire.weights.lazy_parameters import LazyParameters

pytestmark = pytest.mark.skipif(bool(native_problem()), reason="the C++ library was not built")


def loaded(path: Path, group: ThreadGroup | None = None) -> LoadedModel:
    return load_model(path, dtype="float32", group=group, kernels=layer_kernels(torch.device("cpu")))


MATRICES = {"ssm_in": "Q4_0", "ssm_out": "Q4_0"}


def divided(path: Path, size: int, runs: Callable[..., Tensor] = run) -> tuple[Tensor, list[LoadedModel]]:
    """Logits of rank 0, and the parts."""
    tokens_T = tokens_for(loaded(path).vocab_size)

    def part(group: ThreadGroup) -> tuple[Tensor, LoadedModel]:
        model = loaded(path, group)
        return runs(model, tokens_T, [len(tokens_T)]), model

    found = on_ranks(size, part)
    return found[0][0], [model for _, model in found]


def kept_and_expanded(
    path: Path, size: int, monkeypatch: pytest.MonkeyPatch, runs: Callable[..., Tensor] = run
) -> tuple[Tensor, Tensor]:
    """Logits of both; the parts of the first have the whole model's identity, and fewer bytes."""
    whole, (found, parts) = loaded(path), divided(path, size, runs)
    assert kept_formats(whole)
    for part in parts:
        assert part.expanded == whole.expanded
        assert model_fingerprint(path, part) == model_fingerprint(path, whole)
    monkeypatch.setattr(LazyParameters, "stored", lambda *_: [])
    wanted, others = divided(path, size, runs)
    assert all(part.parameter_bytes < other.parameter_bytes for part, other in zip(parts, others, strict=True))
    return found, wanted


@pytest.mark.parametrize(("case", "size"), [(CASES[0], 2), (CASES[1], 4), (EXPERTS[0], 2), (EXPERTS[1], 2)])
def test_blocks_of_gguf_files(case: Case, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; a matrix of three formats, one expert in each tensor, and all in one."""
    kinds: dict[str, Any] = dict(KINDS)
    if case in EXPERTS:
        is_one = case.family == "GptOss"
        kinds = {"exps.bias": "F32", **kinds, "gate_exps": "Q5_0", "up_exps": "Q5_0" if is_one else "Q4_1"}
        kinds["gate_inp"] = "F32"
        case = replace(case, changes={**case.changes, "num_experts_per_tok": 3})
    made = make_checkpoint(case, tmp_path / "model")
    file = write_gguf(made.path, tmp_path / "model.gguf", "Q4_0", kinds=kinds)
    found, wanted = kept_and_expanded(file, size, monkeypatch)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", [CASES[0], EXPERTS[0], EXPERTS[1]])
def test_nvfp4_of_gguf_files(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; rows have heads, also where ranks divide their columns."""
    changes = {**case.changes, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
    if case is EXPERTS[1]:
        changes["intermediate_size"] = 128
    made = make_checkpoint(replace(case, changes=changes), tmp_path / "model")
    kinds = {"exps.bias": "F32", "gate_inp": "F32"}
    found, wanted = kept_and_expanded(
        write_gguf(made.path, tmp_path / "model.gguf", "NVFP4", kinds=kinds), 2, monkeypatch
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_mixers(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one matrix are gate, x, B, C and time steps, each divided by itself."""
    monkeypatch.setattr(hybrids.HybridPass, "recurrent_parts", lambda *_: None, raising=False)
    case = Case("mamba2-wide", "Mamba2", {**hybrids.MAMBA, "hidden_size": 64, "head_dim": 16})
    made = hybrids.make_checkpoint(case, tmp_path / "model")
    file = write_gguf(made.path, tmp_path / "model.gguf", "Q4_0", kinds={"conv1d": "F32", "ssm_": "F32"} | MATRICES)
    found, wanted = kept_and_expanded(file, size, monkeypatch, hybrids.run)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", [latent.named("v3"), *map(hybrids.named, ("granite-4", "qwen3-next", "lfm2"))])
def test_gguf_files_of_new_kinds(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "DensePass", latent.LatentPass)
    kind = latent if case in latent.CASES else hybrids
    tiny = kind.make_checkpoint(case, tmp_path / "model")
    file = write_gguf(tiny.path, tmp_path / "model.gguf")
    check(replace(tiny, path=file), 2, kind.run)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 0)])
def test_codes_with_scales(bits: int, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(MODEL, tmp_path / "model").path
    quantized, plain = exactly(path, bits, group, compressed(bits, group))
    found, _ = kept_and_expanded(quantized, 2, monkeypatch)
    model = loaded(plain)  # expanded codes are rounded to the scales' type, and these values are not
    tokens_T = tokens_for(model.vocab_size)
    wanted = run(model, tokens_T, [len(tokens_T)])
    # Float32 products of codes and of numbers add in other orders: thousands of roundings of 2^-24.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["float8 32x64", "float8", "float8 tensor", "nvfp4 modelopt"])
def test_floats_of_8_and_4_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit; of a row of 64 inputs under one scale each rank has half."""
    layout, given, _, format = LAYOUTS[name]
    # Each rank has a block of 64 inputs, in NVFP4.
    head = 32 if format is MODELOPT else 16
    wide = {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": head}
    case = replace(MODEL, changes={**MODEL.changes, **wide})
    quantized, _ = write_quantized(make_checkpoint(case, tmp_path / "model").path, tmp_path, layout, given)
    found, wanted = kept_and_expanded(quantized, 2, monkeypatch)
    assert torch.equal(found, wanted)


def test_parts_that_are_no_whole_blocks_are_expanded(tmp_path: Path) -> None:
    """Of a row of 64 numbers in two blocks, each of four ranks has half a block."""
    changes = {**CASES[0].changes, "intermediate_size": 64}
    made = make_checkpoint(replace(CASES[0], changes=changes), tmp_path / "model")
    file = write_gguf(made.path, tmp_path / "model.gguf", "Q4_0", kinds={**KINDS, "ffn_down": "Q5_0"})
    _, (part, *_) = divided(file, 4)
    assert part.expanded["Q5_0"] > 0
    assert part.expanded["Q5_0"] < part.formats["Q5_0"]
