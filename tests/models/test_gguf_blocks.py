"""Models whose weights stay in the blocks of their GGUF file, against the same ones expanded."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base.errors import CheckpointError
from quire.kernels.native_library import native_problem
from quire.models.decoder import Decoder
from quire.models.fingerprint import kept_formats, model_fingerprint
from quire.nn.experts import MixtureOfExperts
from quire.nn.packed import KernelLinear
from quire.weights.lazy_parameters import LazyParameters

from .conftest import Case, make_checkpoint
from .gguf_writer import write_gguf

pytestmark = pytest.mark.skipif(bool(native_problem()), reason="the C++ library was not built")

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
}
KINDS = {
    "attn_q": "Q5_0",
    "attn_k": "Q4_0",
    "attn_v": "Q8_0",
    "attn_output": "Q4_1",
    "ffn_gate.": "F16",
    "ffn_up.": "Q5_1",
    "token_embd": "Q5_0",
    "output.weight": "Q8_0",
}
"""Of one matrix in three formats; beside one that is not in blocks (``ffn_up``); Q4_0 otherwise."""
CASES = (
    Case("blocks-untied", "Llama", SIZES),
    Case("blocks-tied", "Qwen2", {**SIZES, "tie_word_embeddings": True}),
    Case("blocks-scaled", "Gemma3", {**SIZES, "query_pre_attn_scalar": 32, "sliding_window": 16}),
)
PROMPTS = [[5, 6, 7], [9] * 5, list(range(3, 100))]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    case: Case = request.param
    path = tmp_path_factory.mktemp(case.name)
    return write_gguf(make_checkpoint(case, path / "model").path, path / "model.gguf", "Q4_0", kinds=KINDS)


@contextmanager
def loaded(file: Path, **given: Any) -> Iterator[LLM]:
    with LLM(str(file), **{"dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 128, **given}) as llm:
        yield llm


@pytest.fixture
def expanding(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def nothing(_: LazyParameters, weight: Tensor) -> list[Any]:
        del weight
        return []

    monkeypatch.setattr(LazyParameters, "stored", nothing)
    return monkeypatch


def logprobs(llm: LLM, prompts: list[list[int]] = PROMPTS, **given: Any) -> list[Any]:
    outputs = [one.outputs[0] for one in llm.generate(prompts, PARAMS, **given)]
    return [(one.token_ids, one.logprobs) for one in outputs]


def decoder(llm: LLM) -> Decoder[Any]:
    assert isinstance(llm.model, Decoder)
    return llm.model


def in_every_batch(llm: LLM) -> list[Any]:
    found = logprobs(llm)
    assert [one for prompt in PROMPTS for one in logprobs(llm, [prompt])] == found
    return found


def write_adapter(path: Path) -> Path:
    """Low-rank updates of q, v and down, in PEFT's files."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, inputs, outputs in (
        ("self_attn.q_proj", 256, 256),
        ("self_attn.v_proj", 256, 64),
        ("mlp.down_proj", 512, 256),
    ):
        base = f"base_model.model.model.layers.1.{name}"
        tensors[f"{base}.lora_A.weight"] = torch.randn(4, inputs, generator=generator) * 0.1
        tensors[f"{base}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator) * 0.1
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
    }
    config["layers_to_transform"] = [1]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def test_a_kept_model_is_the_expanded_one(
    file: Path, expanding: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit, in every batch."""
    caplog.set_level("INFO", logger="quire")
    with loaded(file) as llm:
        wanted, plain = in_every_batch(llm), model_fingerprint(file, llm.model)
        size, nothing = llm.model.parameter_bytes, kept_formats(llm.model)
        table = decoder(llm).embedding.plain_weight()
    expanding.undo()
    caplog.clear()
    with loaded(file) as llm:
        assert "Q5_1 0.3 MiB is expanded to float32" in caplog.text
        assert in_every_batch(llm) == wanted
        assert torch.equal(decoder(llm).embedding.plain_weight(), table)
        found, kept = model_fingerprint(file, llm.model), kept_formats(llm.model)
        assert set(kept) == {"Q4_0", "Q4_1", "Q5_0", "Q8_0"}
        assert llm.status()["weight_formats_kept"] == kept
        assert list(llm.model.expanded) == ["Q5_1"]
        assert llm.model.parameter_bytes < size * 0.6
        head = decoder(llm).lm_head
        assert isinstance(head, KernelLinear)
        assert head.map.weights.form == "blocks"
    assert nothing == []
    assert found.weights == f"{plain.weights}-blocks:{'+'.join(sorted(kept))}"


EXPERTS = (
    Case("blocks-experts", "Qwen3Moe", {**SIZES, "num_experts": 6, "moe_intermediate_size": 64}),
    Case(
        "blocks-stacked", "GptOss", {**SIZES, "num_local_experts": 6, "intermediate_size": 64, "num_hidden_layers": 2}
    ),
)


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: case.name)
def test_experts(case: Case, expanding: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each in tensors of its own, whose gate and up have two formats; all in one tensor."""
    is_one = case.family == "GptOss"
    kinds = {
        "exps.bias": "F32",
        **KINDS,
        "gate_exps": "Q5_0",
        "up_exps": "Q5_0" if is_one else "Q4_1",
        "gate_inp": "F32",
    }
    formats = ["Q5_0"] if is_one else ["Q5_0", "Q4_1"]
    made = make_checkpoint(replace(case, changes={**case.changes, "num_experts_per_tok": 3}), tmp_path / "model")
    file = write_gguf(made.path, tmp_path / "model.gguf", "Q4_0", kinds=kinds)
    found = []
    for is_kept in (False, True):
        with loaded(file) as llm:
            found.append(logprobs(llm))
            block: Any = decoder(llm).blocks[0]
            layer: MixtureOfExperts = block.mlp
            for maps, wanted in ((layer.experts.gate_up.maps, formats), (layer.experts.down.maps, ["Q4_0"])):
                assert len(maps) == 6
                for one in maps:
                    assert isinstance(one, KernelLinear)
                    assert [kind for kind, _ in one.map.weights.kinds] == (wanted if is_kept else [])
            if is_kept:
                assert llm.model.expanded == {}
        expanding.undo()
    assert found[0] == found[1]


@pytest.mark.parametrize("case", [CASES[0], *EXPERTS], ids=lambda case: case.name)
def test_numbers_of_tensors_in_nvfp4(case: Case, expanding: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tensor, or each matrix of a stack, has one that all scales are multiplied by."""
    made = make_checkpoint(replace(case, changes={**case.changes, "num_experts_per_tok": 3}), tmp_path / "model")
    kinds = {"exps.bias": "F32", "gate_inp": "F32", "token_embd": "Q4_0"}
    file = write_gguf(made.path, tmp_path / "model.gguf", "NVFP4", kinds=kinds)
    down = next(one for one in gguf.GGUFReader(file).tensors if re.fullmatch(r"blk.1.ffn_down.*weight", one.name))
    units = next(one for one in gguf.GGUFReader(file).tensors if one.name == down.name.replace(".weight", ".scale"))
    wanted = gguf.quants.dequantize(down.data, gguf.GGMLQuantizationType.NVFP4)
    wide = torch.from_numpy(wanted) * torch.from_numpy(units.data.copy()).view(-1, *[1] * (wanted.ndim - 1))
    found = []
    for is_kept in (False, True):
        with loaded(file) as llm:
            found.append(logprobs(llm))
            assert set(kept_formats(llm.model)) == ({"NVFP4", "Q4_0"} if is_kept else set())
            mlp: Any = decoder(llm).blocks[1].mlp
            maps = mlp.experts.down.maps if wide.ndim > 2 else [mlp.down]
            for one, values in zip(maps, wide.view(-1, *wide.shape[-2:]), strict=True):
                # Products of three factors, in another order.
                torch.testing.assert_close(one.plain_weight(), values, rtol=2.0**-22, atol=0)
        expanding.undo()
    assert found[0] == found[1]


def test_a_wrong_number_of_tensors_in_nvfp4_is_refused(tmp_path: Path) -> None:
    make_checkpoint(CASES[0], tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "NVFP4")
    reader = gguf.GGUFReader(file)
    unit = next(one for one in reader.tensors if one.name == "blk.1.ffn_gate.scale")
    data = bytearray(file.read_bytes())
    data[unit.data_offset : unit.data_offset + 4] = struct.pack("<f", float("inf"))
    file.write_bytes(data)
    with (
        pytest.raises(CheckpointError, match=r"gate_proj.weight has a scale in NVFP4 that is not finite"),
        loaded(file),
    ):
        pass


def test_quantisation_is_of_the_expanded_weights(file: Path) -> None:
    with loaded(file, quantization="int8") as llm:
        assert kept_formats(llm.model) == []
        assert "blocks:" not in model_fingerprint(file, llm.model).weights


def test_rows_in_bfloat16(file: Path) -> None:
    """Rows of the table are rounded once; the products meet the file's own weights."""
    with loaded(file, dtype="bfloat16") as llm:
        assert kept_formats(llm.model)
        assert decoder(llm).embedding.plain_weight().dtype == torch.bfloat16
        in_every_batch(llm)


def test_adapters(file: Path, expanding: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory, found = write_adapter(tmp_path / "adapter"), []
    for _ in range(2):
        with loaded(file, adapters={"mine": directory}) as llm:
            found.append(logprobs(llm, adapter="mine"))
            assert found[-1] != logprobs(llm)
        expanding.undo()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_scales_that_are_no_numbers_are_refused_where_blocks_are_kept(kind: str, tmp_path: Path) -> None:
    make_checkpoint(CASES[0], tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", kind)
    (gate,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_gate.weight")
    data = bytearray(file.read_bytes())
    data[gate.data_offset : gate.data_offset + 2] = struct.pack("<H", 0x7E00)
    file.write_bytes(data)
    with (
        pytest.raises(CheckpointError, match=rf"gate_proj.weight has a scale in {kind} that is not finite"),
        loaded(file),
    ):
        pass
