"""``quire quantize``: the numbers of ``quantization`` as a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.conftest import CASES, Case, make_checkpoint
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cli import quantize
from quire.cli.main import app
from quire.kernels.native_library import native_library
from quire.models import loading
from quire.models.fingerprint import kept_formats, model_fingerprint
from quire.weights.panels import codes_of
from quire.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the C++ library")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
MODELS = {
    "llama": Case("llama", "Llama", SIZES),
    "tied": Case("tied", "Qwen3", {**SIZES, "tie_word_embeddings": True}),
    "odd-groups": Case("odd-groups", "Qwen2", {**SIZES, "intermediate_size": 88}),
    "fused": Case("fused", "Phi3", {**SIZES, "num_key_value_heads": 4}),
    "experts": Case(
        "experts", "Qwen3Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    ),
    "vision": next(case for case in CASES if case.name == "gemma3-with-vision"),
    "hybrid": Case("hybrid", "Lfm2", {**SIZES, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}),
}
PROMPTS = [[3, 5, 7], [11] * 20, [1, 2, 3, 4, 90, 80]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    paths: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in paths:
            paths[name] = make_checkpoint(MODELS[name], tmp_path_factory.mktemp(name) / "model").path
        return paths[name]

    return make


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def outputs_of(path: Path, **given: Any) -> tuple[list[Any], Any]:
    params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=3)
    with LLM(str(path), dtype="float32", kv_cache_memory="8MiB", **given) as llm:
        found = [one.outputs[0] for one in llm.generate(PROMPTS, params)]
        return [(one.token_ids, one.logprobs) for one in found], llm.model


@pytest.mark.product(2)
@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_quantisation(
    made: Callable[[str], Path], tmp_path: Path, name: str, form: str
) -> None:
    """To the bit: the codes and scales are the same."""
    path, out = made(name), tmp_path / "out"
    wanted, quantised = outputs_of(path, quantization=form)
    result = run("quantize", path, out, "--format", form)
    assert result.exit_code == 0, result.output
    assert f"of weights in {form}" in result.output
    found, model = outputs_of(out)
    assert found == wanted
    assert kept_formats(model)
    assert model.expanded == {}
    assert model.parameter_bytes == quantised.parameter_bytes
    marks = [model_fingerprint(one, its) for one, its in ((path, quantised), (out, model))]
    assert marks[0].weights != marks[1].weights


def test_what_is_in_the_directory(made: Callable[[str], Path], tmp_path: Path) -> None:
    path, out = Path(shutil.copytree(made("vision"), tmp_path / "model")), tmp_path / "deep" / "out"
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.bin").write_text("x")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tools.jinja").write_text("{}")
    assert run("quantize", path, out).exit_code == 0
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files >= {"config.json", "tokenizer.json", "additional_chat_templates/tools.jinja", SINGLE_FILE}
    assert "notes.bin" not in files
    assert [one.name for one in out.parent.iterdir()] == ["out"]
    before, after = load_file(path / SINGLE_FILE), load_file(out / SINGLE_FILE)
    others = {name for name in before if "vision" in name}
    assert others
    assert all(torch.equal(after[name], before[name]) for name in others)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["tie_word_embeddings"] is False


@pytest.mark.skipif(importlib.util.find_spec("compressed_tensors") is None, reason="needs compressed-tensors")
@pytest.mark.parametrize("name", ["llama", "tied", "experts"])
def test_compressed_tensors_reads_the_same_codes(made: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig

    path, out = made(name), tmp_path / "out"
    assert run("quantize", path, out).exit_code == 0
    config = QuantizationConfig(**json.loads((out / "config.json").read_text())["quantization_config"])
    groups = [scheme.weights for scheme in config.config_groups.values()]
    assert {(one.num_bits, one.group_size) for one in groups} >= {(4, 32), (8, 64)}
    stored = load_file(out / SINGLE_FILE)
    head = outputs_of(out)[1].lm_head.map.weights
    codes, scales = codes_of(head)
    theirs = unpack_from_int32(stored["lm_head.weight_packed"], 8, torch.Size(stored["lm_head.weight_shape"].tolist()))
    assert torch.equal(codes, theirs)
    assert torch.equal(scales, stored["lm_head.weight_scale"])


def test_several_files(made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "SHARD_BYTES", 10_000)
    wanted, _ = outputs_of(made("llama"), quantization="int8")
    assert run("quantize", made("llama"), tmp_path / "out", "--format", "int8").exit_code == 0
    assert (tmp_path / "out" / INDEX_FILE).is_file()
    assert len([*(tmp_path / "out").glob("model-*.safetensors")]) > 3
    assert outputs_of(tmp_path / "out")[0] == wanted


def test_a_failed_write_leaves_nothing(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **more: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(quantize, "save_file", fail)
    for out in (tmp_path / "out", tmp_path / "a" / "b" / "out"):
        result = run("quantize", made("llama"), out)
        assert result.exit_code == 2
        assert "cannot be written: No space left on device" in result.output
        assert [*tmp_path.iterdir()] == []
    full = shutil.disk_usage(tmp_path)._replace(free=1 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    result = run("quantize", made("llama"), tmp_path / "a" / "out")
    assert "it needs 0.06 MiB" in result.output
    assert "but 0.00 MiB (1,024 bytes) are free there" in result.output
    assert [*tmp_path.iterdir()] == []


def test_a_place_without_a_directory_is_refused_before_the_load(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *_, **given: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("x")
    result = run("quantize", made("llama"), tmp_path / "file" / "out")
    assert f"cannot be written: {tmp_path}/file is no directory" in result.output
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = run("quantize", made("llama"), tmp_path / "a" / "out")
    assert f"cannot be written: {tmp_path} lets nothing be made in it" in result.output


def test_refusals(made: Callable[[str], Path], tmp_path: Path) -> None:
    path, out = made("llama"), tmp_path / "out"
    for words, message in (
        (("quantize", path, out, "--format", "int5"), "int4 or int8"),
        (("quantize", path, path), "exists; expected a new directory"),
        (("quantize", tmp_path / "none", out), "there is no such directory"),
    ):
        result = run(*words)
        assert result.exit_code == 2
        assert message in result.output
    assert run("quantize", path, out).exit_code == 0
    assert "is quantised already" in run("quantize", out, tmp_path / "again").output
    stacked = Path(shutil.copytree(path, tmp_path / "foreign"))
    config = json.loads((stacked / "config.json").read_text())
    (stacked / "config.json").write_text(json.dumps({**config, "architectures": ["ArceeForCausalLM"]}))
    assert "is not native" in run("quantize", stacked, tmp_path / "again").output
    assert not (tmp_path / "again").exists()


def test_a_tied_head_that_is_stored_too(made: Callable[[str], Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(made("tied"), tmp_path / "model"))
    tensors = load_file(path / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / SINGLE_FILE)
    wanted, _ = outputs_of(path, quantization="int4")
    assert run("quantize", path, tmp_path / "out").exit_code == 0
    assert outputs_of(tmp_path / "out")[0] == wanted
