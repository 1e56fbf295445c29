"""GGUF files: every architecture against the same checkpoint in safetensors, every format of blocks
against the ``gguf`` package, tokenizers, splits, names of files, and bad input.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import struct
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base.errors import CheckpointError, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.base.progress import Bar
from quire.build import layer_kernels
from quire.kernels.linear.cpu_linear import native_linear
from quire.kernels.native_library import native_problem
from quire.models import loading
from quire.models.catalogue import resolve_model
from quire.models.families import family_of
from quire.models.fingerprint import model_fingerprint
from quire.models.gguf import ARCHITECTURES as ROWS
from quire.models.loading import load_model
from quire.models.processor import Processor
from quire.models.sources import open_weights, read_config
from quire.weights.checkpoint import Checkpoint
from quire.weights.gguf_blocks import BLOCKS, FLOAT8, NVFP4, SIZES, TYPE_NAMES, GgufBlocks, rows_of_file
from quire.weights.gguf_container import GgufFile, open_gguf, opened
from quire.weights.lazy_parameters import LazyParameters
from quire.weights.places import expand

from . import conftest, test_deepseek, test_moe_families, test_recurrent_families
from .conftest import Case, TinyCheckpoint, make_checkpoint
from .gguf_writer import ARCHITECTURES, write_gguf

PREDEFINED = {
    case.name: case
    for module in (conftest, test_moe_families, test_deepseek, test_recurrent_families)
    for case in module.CASES
}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 7}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = (
    *(
        PREDEFINED[name]
        for name in (
            "llama-gqa",
            "llama-mha-sharded",
            "llama-mqa-tied",
            "llama-biases",
            "llama-head-dim",
            "llama-rope-linear",
            "llama-rope-yarn",
            "ministral3",
            "qwen2",
            "qwen2-tied-sharded",
            "qwen3",
            "qwen3-biases-tied",
            "phi3",
            "phi3-longrope",
            "phi3-longrope-partial",
            "olmo2",
            "olmo2-biases-mha",
            "cohere2",
            "smollm3",
            "stablelm",
            "stablelm-2",
            "stablelm-head-norms",
            "granite",
            "granite-biases",
            "glm",
            "glm-no-bias-tied",
            "glm4",
            "mixtral",
            "mixtral-all-tied",
            "qwen2-moe",
            "qwen3-moe",
            "gpt-oss",
            "v2",
            "v2-lite",
            "v2-groups-sharded",
            "v3",
            "v3-yarn",
            "v3-dense",
            "mamba2",
            "mamba2-biases-tied",
            "lfm2",
            "lfm2-biases-untied",
            "lfm2-moe",
            "nemotron-h",
            "nemotron-h-dense",
            "nemotron-h-latent",
            "granite-4",
            "granite-4-dense",
            "qwen3-next",
            "qwen3.5",
            "qwen3.5-moe",
        )
    ),
    Case("llama-3.1", "Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    Case("gemma2", "Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    Case("gemma3", "Gemma3", {**GEMMA, "num_hidden_layers": 7}),
    Case(
        "gemma3-ropes",
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
)
"""What GGUF can say: no windows of Qwen and Mistral, for example."""


def parameters_of(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The canonical configuration and all parameters in float32."""
    values = read_config(path)
    family = family_of(values)
    config = family.read_config(values, None)
    with Checkpoint(open_weights(path)) as checkpoint:
        places = checkpoint.choose([expand(table, config.num_layers) for table in family.name_tables(config)])
        checkpoint.check(places, family.ignorable_names(config))
        device = torch.device("cpu")
        weights = LazyParameters(checkpoint, places, torch.float32, device, Bar(disable=True))
        return config.canonical(), {name: weights[name].clone() for name in weights}


def test_every_architecture_has_a_case() -> None:
    kinds = {ARCHITECTURES[kind] for kind in ARCHITECTURES}
    assert kinds | {"nemotron_h_moe"} == set(ROWS)


@pytest.mark.parametrize("name", ["falcon-h1", "falcon-h1-gated-first"])
def test_multipliers_are_in_the_weights(name: str, tmp_path: Path) -> None:
    """Those of Falcon-H1: the parameters are others, the logits are the same."""
    make_checkpoint(PREDEFINED[name], tmp_path / "model")
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    tokens_T = test_recurrent_families.tokens_for(97)
    wanted, found = (
        test_recurrent_families.run(load_model(path, dtype="float32"), tokens_T, [len(tokens_T)])
        for path in (tmp_path / "model", file)
    )
    # Products of factors are rounded at other places.
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_file_is_the_model_that_it_was_made_of(case: Case, tmp_path: Path) -> None:
    make_checkpoint(case, tmp_path / "model")
    config, wanted = parameters_of(tmp_path / "model")
    found_config, found = parameters_of(write_gguf(tmp_path / "model", tmp_path / "model.gguf"))
    assert found_config == config
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        # A converter adds 1 to norms, or takes an exponential.
        tolerance = 1e-6 if "norm" in name or "log_a" in name else 0
        torch.testing.assert_close(found[name], parameter, rtol=tolerance, atol=tolerance, msg=name)


def test_other_factors_of_rope_are_taken_as_they_are(tmp_path: Path) -> None:
    """Those of a Llama that was trained on another length than 8,192 tokens."""
    tiny = make_checkpoint(PREDEFINED["llama-rope-llama3"], tmp_path / "model")
    file = write_gguf(tiny.path, tmp_path / "model.gguf")
    wanted, found = (load_model(path, dtype="float32").layer_specs[0].rope for path in (tiny.path, file))
    from quire.ops.rope import RotaryTable

    positions_T = torch.arange(100)
    for mine, theirs in zip(
        *(RotaryTable(rope, positions_T.device).rows(positions_T, 99) for rope in (found, wanted)), strict=True
    ):
        # Angles of up to 100, of factors that the file rounds to float32.
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


# -- blocks ----------------------------------------------------------------------------------------


def raw_blocks(kind: str, rows: int, seed: int = 0) -> Tensor:
    """Bytes of blocks, all but the scales random."""
    _, size = SIZES[kind]
    raw = np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(raw[np.isfinite(values).all(-1)])


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != FLOAT8])  # which no GGUF file has
def test_blocks_have_the_values_of_the_package(kind: str) -> None:
    blocks = raw_blocks(kind, 5_000)
    assert len(blocks) > 3_500
    wanted = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    found = torch.empty(len(blocks), SIZES[kind][0])
    assert torch.equal(BLOCKS[kind](blocks), torch.from_numpy(wanted))
    if kind == NVFP4:
        blocks = rows_of_file(blocks, torch.ones(len(blocks), 1))
    GgufBlocks(kind).expand("x", {"x": blocks}, found)
    assert np.array_equal(found.numpy().view(np.uint32), wanted.view(np.uint32))
    narrow = torch.empty(found.shape, dtype=torch.bfloat16)
    GgufBlocks(kind).expand("x", {"x": blocks}, narrow)
    assert torch.equal(narrow, found.bfloat16())


def test_sizes_and_names_are_those_of_the_package() -> None:
    for kind, (numbers, size) in gguf.GGML_QUANT_SIZES.items():
        assert TYPE_NAMES[int(kind)] == kind.name
        assert SIZES[kind.name] == (numbers, size)


def test_scales_that_are_no_numbers_are_refused() -> None:
    blocks = raw_blocks("Q8_0", 4)[:2].clone()
    blocks[1, :2] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="not finite"):
        GgufBlocks("Q8_0").expand("x", {"x": blocks}, torch.empty(2, 32))


def test_what_float16_cannot_hold_is_refused() -> None:
    blocks = torch.full((1, 34), 127, dtype=torch.uint8)
    blocks[0, :2] = torch.tensor([0xFF, 0x7B], dtype=torch.uint8)  # 65,504
    with pytest.raises(Unsupported, match="float16 does not hold"):
        GgufBlocks("Q8_0").expand("x", {"x": blocks}, torch.empty(1, 32, dtype=torch.float16))


MIXED = Case("mixed", "Llama", {"intermediate_size": 64, "head_dim": 16})
KINDS = {"attn_q": "Q5_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_up": "Q5_1", "ffn_down": "F16", "output": "BF16"}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(MIXED, tmp_path_factory.mktemp("mixed") / "model")


@pytest.fixture(scope="module")
def mixed_file(mixed: TinyCheckpoint) -> Path:
    return write_gguf(mixed.path, mixed.path.parent / "model-Q4_K_M.gguf", "Q4_0", kinds=KINDS)


def test_mixed_formats_are_expanded_each_by_its_rule(mixed: TinyCheckpoint, mixed_file: Path) -> None:
    """Also rows that the converter has put in another order."""
    _, found = parameters_of(mixed_file)
    stored = load_file(mixed.path / "model.safetensors")
    names = {"Q5_0": "q_proj", "Q4_1": "k_proj", "Q8_0": "v_proj"}
    row = 0
    for kind, name in names.items():
        weight = stored[f"model.layers.1.self_attn.{name}.weight"].numpy()
        one = gguf.GGMLQuantizationType[kind]
        wanted = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, one), one))
        assert torch.equal(found["1.qkv.weight"][row : row + len(wanted)], wanted)
        row += len(wanted)
    model = load_model(mixed_file, dtype="auto")
    assert model.dtype in (torch.bfloat16, torch.float32)
    assert set(model.formats) == {"Q4_0", "F32", *KINDS.values()}
    assert sum(model.formats.values()) < mixed_file.stat().st_size


def test_text_status_and_fingerprint(mixed: TinyCheckpoint, mixed_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="quire")
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    f32 = write_gguf(mixed.path, mixed.path.parent / "model-F32.gguf")
    texts, prints = {}, {}
    for path in (mixed.path, f32, mixed_file):
        llm = LLM(str(path), dtype="float32", kv_cache_memory="16MiB", max_model_len=64)
        with llm:
            texts[path] = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
            prints[path] = model_fingerprint(path, llm.model)
            if path == mixed_file:
                assert {"Q4_0", "Q5_0"} < set(llm.status()["weight_formats"])
                with llm.session([3, 4, 5]) as session:
                    session.save(mixed.path.parent / "state.quire")
    assert list(texts[f32]) == list(texts[mixed.path])
    assert {one.config for one in prints.values()} == {prints[mixed.path].config}
    assert len({one.weights for one in prints.values()}) == 3
    assert "-gguf:BF16+F16+F32+Q4_0+Q4_1+Q5_0+Q5_1+Q8_0" in prints[mixed_file].weights
    assert "Q5_0" in caplog.text
    assert ("are expanded to float32" if native_problem() else "as the file has them") in caplog.text
    with (
        LLM(str(f32), dtype="float32", kv_cache_memory="16MiB", max_model_len=64) as llm,
        pytest.raises(QuireError, match="weights"),
    ):
        llm.load_session(mixed.path.parent / "state.quire")


@pytest.mark.skipif(bool(native_problem()), reason=native_problem())
def test_most_of_the_blocks_decide_the_dtype_where_bfloat16_is_slow(
    mixed: TinyCheckpoint, mixed_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Processor(machine="x86_64", bfloat16_instructions=False, onednn_bfloat16=False, onednn_float16=False)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: slow))
    kernels = layer_kernels(torch.device("cpu"))

    def chosen(path: Path, kinds: set[str], **options: Any) -> torch.dtype:
        monkeypatch.setattr(kernels.linear, "bfloat16_kinds", frozenset(kinds))
        return load_model(path, kernels=replace(kernels, **options)).dtype

    formats = load_model(mixed_file, kernels=kernels).formats
    most = max(formats, key=lambda kind: formats[kind])
    assert 2 * formats[most] < sum(formats.values())
    assert chosen(mixed_file, {most}) == torch.float32
    assert chosen(mixed_file, {"Q4_0", *KINDS.values()}) == torch.bfloat16
    assert chosen(mixed_file, {"Q4_0", *KINDS.values()}, quantization="int8") == torch.float32
    assert chosen(mixed.path, {"Q4_0"}) == torch.float32
    monkeypatch.undo()
    linear = native_linear()
    assert linear is not None
    assert ({"Q4_K", "Q6_K", "Q8_0"} <= linear.bfloat16_kinds) == (linear.level == 1)  # AVX2
    assert not linear.bfloat16_kinds & {"Q2_K", "F8_E4M3"}


@pytest.mark.skipif(bool(native_problem()), reason=native_problem())
def test_blocks_that_stay_as_they_are_take_no_more_where_bfloat16_is_slow(
    mixed: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Processor(machine="x86_64", bfloat16_instructions=False, onednn_bfloat16=False, onednn_float16=False)
    monkeypatch.setattr(Processor, "here", classmethod(lambda cls: slow))
    kernels = layer_kernels(torch.device("cpu"))
    monkeypatch.setattr(kernels.linear, "bfloat16_kinds", frozenset())
    blocks = write_gguf(mixed.path, tmp_path / "model-Q8_0.gguf", "Q8_0")
    assert load_model(blocks, kernels=kernels).dtype == torch.float32
    halves = write_gguf(mixed.path, tmp_path / "model-BF16.gguf", "BF16")
    assert load_model(halves, kernels=kernels).dtype == torch.float32
    assert not caplog.text  # less than a megabyte
    monkeypatch.setattr(loading, "MUCH", 0)
    load_model(blocks, kernels=kernels)
    assert not caplog.text
    load_model(halves, kernels=kernels)
    assert re.search(r"no fast bfloat16, so the weights take \d MiB in float32, not \d MiB", caplog.text)
    # The advice for too little memory has what helps.
    monkeypatch.setattr(loading, "free_memory", lambda device: 1 << 15)
    with pytest.raises(ResourceExhausted, match=r"for its weights, but .* on cpu; free some memory, or take a smaller"):
        load_model(blocks, kernels=kernels)
    with pytest.raises(ResourceExhausted, match=r"in torch.float32, but .* give dtype bfloat16, "):
        load_model(halves, kernels=kernels)


# -- files -----------------------------------------------------------------------------------------


def split(path: Path, parts: int, base: str) -> list[Path]:
    """Write a file again in parts, as ``llama-gguf-split`` does."""
    reader, files = gguf.GGUFReader(path), []
    names = [tensor.name for tensor in reader.tensors]
    for part in range(parts):
        files.append(path.with_name(f"{base}-{part + 1:05}-of-{parts:05}.gguf"))
        writer = gguf.GGUFWriter(files[-1], "llama")
        if part == 0:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    writer.add_key_value(field.name, field.contents(), field.types[0])
        for key, value in (("no", part), ("count", parts)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in reader.tensors[part::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


def test_split_files(mixed_file: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copy(mixed_file, tmp_path / "x.gguf"))
    files = split(whole, 3, "y")
    config, wanted = parameters_of(whole)
    assert resolve_model(str(files[2])) == files[0]
    found_config, found = parameters_of(files[0])
    assert found_config == config
    assert all(torch.equal(found[name], one) for name, one in wanted.items())
    files[1].rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"y-00002-of-00003.gguf beside it is missing"):
        open_gguf(files[0])
    shutil.copy(files[2], files[1])
    with pytest.raises(CheckpointError, match="part 3 of 3, but its name makes it part 2"):
        open_gguf(files[0])


def test_files_by_name(mixed_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    one = Path(shutil.copy(mixed_file, folder / "tiny-Q4_K_M.gguf"))
    assert resolve_model(str(one)) == one
    assert resolve_model(str(folder)) == one
    (folder / "mmproj-tiny.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(folder)) == one
    other = Path(shutil.copy(mixed_file, folder / "tiny-Q4_K_S.gguf"))
    assert resolve_model(f"{folder}:q4_k_s") == other
    assert resolve_model(f"{folder}:Q4_K_M") == one
    with pytest.raises(NotFound, match=r"2 GGUF files: tiny-Q4_K_M.gguf, tiny-Q4_K_S.gguf; name one of them") as caught:
        resolve_model(str(folder))
    assert resolve_model(str(caught.value).rpartition("as in ")[2]) == one
    with pytest.raises(NotFound, match=r"no GGUF file with Q8_0 in its name; it has tiny-Q4_K_M.gguf, tiny-Q4_K_S"):
        resolve_model(f"{folder}:Q8_0")
    # A name without the ending: by its first bytes.
    blob = Path(shutil.copy(mixed_file, folder / "sha256-0123"))
    assert load_model(resolve_model(str(blob)), dtype="float32").architecture == "LlamaForCausalLM"
    (folder / "notes.txt").write_text("no model")
    with pytest.raises(NotFound, match="is a file; expected"):
        resolve_model(str(folder / "notes.txt"))


# -- bad input -------------------------------------------------------------------------------------


def test_what_cannot_be_computed_is_refused_by_name(mixed: TinyCheckpoint, mixed_file: Path, tmp_path: Path) -> None:
    data = mixed_file.read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(b"llama", b"alien"))
    with pytest.raises(Unsupported, match=r"architecture 'alien' is not supported; known ones: .*qwen2"):
        load_model(other)
    file = write_gguf(mixed.path, tmp_path / "alibi.gguf", changes={"attention.max_alibi_bias": 8.0})
    with pytest.raises(Unsupported, match=r"llama.attention.max_alibi_bias is 8.0"):
        load_model(file)
    file = write_gguf(mixed.path, tmp_path / "rope.gguf", changes={"rope.scaling.type": "spiral"})
    with pytest.raises(Unsupported, match="RoPE scaling 'spiral'"):
        load_model(file)
    file = write_gguf(mixed.path, tmp_path / "heads.gguf", changes={"attention.head_count": 3})
    with pytest.raises(CheckpointError, match=r"heads.gguf"):
        load_model(file)


def test_a_format_that_is_not_expanded_is_refused_by_name(mixed_file: Path, tmp_path: Path) -> None:
    offset = mixed_file.read_bytes().index(b"blk.1.ffn_gate.weight") + len("blk.1.ffn_gate.weight") + 4 + 16
    data = bytearray(mixed_file.read_bytes())
    assert struct.unpack_from("<I", data, offset)[0] == 2
    struct.pack_into("<I", data, offset, 24)
    (tmp_path / "i8.gguf").write_bytes(data + bytes(4096))
    with pytest.raises(
        Unsupported, match=r"blk.1.ffn_gate.weight is in I8, which is not supported; known formats: .*Q4_K"
    ):
        load_model(tmp_path / "i8.gguf")
    struct.pack_into("<I", data, offset, 99)
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_gate.weight has type 99, which is not known"):
        load_model(tmp_path / "x.gguf")


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read as GGUF"),
        (b"PK\x03\x04" + bytes(40), "a GGUF file begins with"),
        (header()[:10], "cut short"),
        (header(version=1), "GGUF version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(keys=1 << 20), "the number of keys is 1048576; expected at most"),
        (header(tensors=1 << 62), "the number of tensors is"),
        (header(keys=1) + text(b"", 1 << 40), "the length of key 0 is"),
        (header(keys=1) + text(b"k") + struct.pack("<I", 8) + text(b"", 1 << 30), "the length of k is 1073741824"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60), "the number of items of k is"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 20), "ends at byte"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "an array of type 9"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 3) + text(b"", 2**64 - 1), "expected at most 65536"),
        (header(keys=1) + text(b"k") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"", 9), r"k\[1\] at byte"),
        (header(keys=1) + text(b"k") + struct.pack("<I", 77), "has type 77"),
        (header(keys=2) + 2 * (text(b"k") + struct.pack("<IB", 0, 1)), "is there twice"),
        (header(keys=1) + text(b"\xff"), "not UTF-8"),
        (header(keys=1) + text(b"general.alignment") + struct.pack("<II", 4, 3), "a power of two"),
        (header(tensors=1) + text(b"t") + struct.pack("<I", 5), "has 5 dimensions"),
        (header(tensors=1) + text(b"t") + struct.pack("<IQIQ", 1, 2**63, 0, 0), "ends at byte"),
        (header(tensors=1) + text(b"t") + struct.pack("<IQQIQ", 2, 2**63, 2**63, 0, 0), "ends at byte"),
        (header(tensors=1) + text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 7) + bytes(99), "a multiple of 32"),
        (header(tensors=1) + text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 2**63), "ends at byte"),
        (header(tensors=1) + text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0) + bytes(99), "no such rows"),
        (header(tensors=1) + text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(99), "no such rows"),
        (header(), "general.architecture is missing"),
    ],
)
def test_hostile_files_are_refused(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        load_model(file)


def test_damage_anywhere_is_refused_or_harmless(mixed_file: Path, tmp_path: Path) -> None:
    data, generator = mixed_file.read_bytes(), random.Random(1)
    end = max(tensor.start for tensor in GgufFile(mixed_file).tensors.values())
    file = tmp_path / "model.gguf"
    for turn in range(150):
        damaged = bytearray(data)
        if turn % 3 == 0:
            del damaged[generator.randrange(len(data)) :]
        else:
            for _ in range(generator.randrange(1, 4)):
                damaged[generator.randrange(min(end, 6000))] = generator.choice(
                    (0, 1, 127, 255, generator.randrange(256))
                )
        file.write_bytes(damaged)
        with suppress(QuireError):
            load_model(file, dtype="float32")


def test_a_file_of_a_repository(mixed_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files with that name are downloaded; without a name they are listed."""
    asked: list[Any] = []

    def download(name: str, **given: Any) -> str:
        asked.append((name, given["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    there = [SimpleNamespace(rfilename=file) for file in ("README.md", "x-Q8_0.gguf", "x-Q4_K_M.gguf")]
    monkeypatch.setattr(huggingface_hub, "model_info", lambda name, **given: SimpleNamespace(siblings=there))
    with pytest.raises(
        NotFound, match=r"GGUF files only: x-Q8_0.gguf, x-Q4_K_M.gguf; name one of them, as in org/x:x-Q8_0"
    ):
        resolve_model("org/x")
    with pytest.raises(NotFound, match=r"org/x has no GGUF file with Q8_0 in its name; it has x-Q8_0.gguf, x-Q4_"):
        resolve_model("org/x:Q8_0")
    shutil.copy(mixed_file, tmp_path / "x-Q4_K_M.gguf")
    assert resolve_model("org/x:Q4_K_M") == tmp_path / "x-Q4_K_M.gguf"
    assert asked[-1] == ("org/x", ["*Q4_K_M*.gguf", "*q4_k_m*.gguf"])
    with pytest.raises(NotFound, match="names no GGUF file"):
        resolve_model("org/x:Q4 K")


def test_an_open_file_is_read_once_until_it_changes(mixed_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(mixed_file.read_bytes())
    first = opened(path)
    assert opened(path) is first
    os.utime(path, ns=(1, 1))
    assert opened(path) is not first
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read as GGUF"):
        opened(path)
