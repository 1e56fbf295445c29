"""Damaged, incomplete and foreign checkpoints: each has its error, and none costs memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.base.errors import CheckpointError, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.models import loading
from quire.models.families import FAMILIES
from quire.models.loading import load_model
from quire.models.sources import read_config, read_generation_config
from quire.weights import lazy_parameters
from quire.weights.checkpoint import Checkpoint
from quire.weights.places import Place, expand, parameter_shapes
from quire.weights.safetensors_files import INDEX_FILE, SINGLE_FILE, SafetensorsFiles, weight_files

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, allocating or reading a weight fails the test."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("memory was spent on a checkpoint that cannot be loaded")

    monkeypatch.setattr(lazy_parameters, "allocate", refuse)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, path / SINGLE_FILE)


def edit_index(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((path / INDEX_FILE).read_text())
    edit(index["weight_map"])
    (path / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(Q_PROJ), f"lacks 1 of 30 tensors: {Q_PROJ}"),
        (lambda t: [t.pop(name) for name in list(t) if "mlp" in name], r"lacks 9 of 30 tensors: .* and 5 more"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.update(extra=torch.ones(3)), "no place for extra"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(56, 32)}), "no place for model.layers.3"),
        (lambda t: t.update({Q_PROJ.replace("weight", "bias"): torch.ones(32)}), "no place for .*q_proj.bias"),
        (lambda t: t.update({Q_PROJ: torch.ones(32, 31)}), rf"{Q_PROJ} has shape \[32, 31\]; .* \[32, 32\]"),
        (lambda t: t.update({Q_PROJ: torch.ones(1024)}), r"has shape \[1024\]; .* \[32, 32\]"),
        (
            lambda t: t.update({Q_PROJ: torch.ones(32, 32, dtype=torch.int8)}),
            f"{Q_PROJ} has dtype I8; .*F32.*F16.*BF16",
        ),
        (lambda t: t.update({Q_PROJ: torch.ones(32, 32).to(torch.float8_e4m3fn)}), "has dtype F8_E4M3"),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_wrong_tensors(single_file: Path, edit: Callable[[dict[str, Tensor]], object], message: str) -> None:
    edit_tensors(single_file, edit)
    with pytest.raises(CheckpointError, match=message):
        load_model(single_file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 98}, r"embed_tokens.weight has shape \[97, 32\]; config.json makes it \[98, 32\]"),
        ({"num_hidden_layers": 2}, "no place for model.layers.2"),
        ({"num_hidden_layers": 4}, "lacks 9 of 39 tensors: model.layers.3"),
        ({"num_hidden_layers": 1000}, "says 1000 layers, but there are 30 tensors"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected an integer from 1 to 10000"),
        ({"attention_bias": True}, "q_proj.bias"),
        (
            {"tie_word_embeddings": True},
            "lm_head.weight differs from model.embed_tokens.weight, but tie_word_embeddings",
        ),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_configuration_that_the_tensors_contradict(single_file: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(single_file, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(single_file)


def truncate(path: Path, keep: int) -> None:
    with (path / SINGLE_FILE).open("r+b") as stream:
        stream.truncate(keep if keep >= 0 else (path / SINGLE_FILE).stat().st_size + keep)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: truncate(path, 0),
        lambda path: truncate(path, 5),
        lambda path: truncate(path, 200),
        lambda path: truncate(path, -1),
        lambda path: (path / SINGLE_FILE).write_bytes((path / SINGLE_FILE).read_bytes() + b"more"),
        lambda path: (path / SINGLE_FILE).write_bytes(b"\xff" * 4096),
        lambda path: (path / SINGLE_FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_damaged_files(single_file: Path, damage: Callable[[Path], object]) -> None:
    damage(single_file)
    with pytest.raises(CheckpointError, match=r"model.safetensors is no valid safetensors file, or is cut short"):
        load_model(single_file)


def test_a_file_that_cannot_be_mapped(single_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unmapped(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 99 bytes")

    monkeypatch.setattr("quire.weights.safetensors_files.safe_open", unmapped)
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be mapped into memory: unable to mmap"):
        load_model(single_file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has neither config.json nor a GGUF file"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda path: (path / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json cannot be read"),
        (lambda path: (path / "config.json").write_text("[1]"), "must hold a JSON object, found list"),
        (lambda path: (path / SINGLE_FILE).unlink(), f"holds neither {SINGLE_FILE} nor {INDEX_FILE}$"),
        (lambda path: (path / SINGLE_FILE).rename(path / "pytorch_model.bin"), "pytorch_model.bin: convert it to safe"),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_directories_that_are_no_checkpoint(single_file: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(single_file)
    with pytest.raises(CheckpointError, match=message):
        load_model(single_file)


def test_paths_that_are_no_directory(single_file: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is missing; expected the directory"):
        load_model(single_file / "nowhere")
    with pytest.raises(CheckpointError, match="is a file; expected the directory"):
        load_model(single_file / SINGLE_FILE)


def move_one(weight_map: dict[str, str]) -> None:
    """Of a shard with several tensors, give one to another shard."""
    shards = list(weight_map.values())
    name = next(name for name, shard in weight_map.items() if shards.count(shard) > 1)
    weight_map[name] = next(shard for shard in shards if shard != weight_map[name])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (move_one, r"says that .* is in .*; found in model-"),
        (lambda m: m.update(phantom=m[Q_PROJ]), "says that phantom is in .*; found in no file"),
        (lambda m: m.pop(Q_PROJ), f"holds {Q_PROJ}, which {INDEX_FILE} does not list"),
        (lambda m: m.update({Q_PROJ: "gone.safetensors"}), "lacks gone.safetensors"),
        (lambda m: m.update({Q_PROJ: "../other.safetensors"}), "expected the name of a .safetensors file"),
        (lambda m: m.update({Q_PROJ: 3}), "is in 3; expected the name"),
        (lambda m: m.clear(), "no weight_map"),
    ],
)
@pytest.mark.usefixtures("no_memory")
def test_indexes_that_lie(sharded: Path, edit: Callable[[dict[str, Any]], object], message: str) -> None:
    edit_index(sharded, edit)
    with pytest.raises(CheckpointError, match=message):
        load_model(sharded)


@pytest.mark.usefixtures("no_memory")
def test_shards_that_are_missing_damaged_or_overlap(sharded: Path) -> None:
    shards = weight_files(sharded)
    assert len(shards) > 2
    content = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shards[1].name}"):
        load_model(sharded)
    shards[1].write_bytes(content[:-8])
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is no valid"):
        load_model(sharded)
    save_file({**load_file(shards[0]), **load_file(shards[2])}, shards[2])
    shards[1].write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor .* is in .* and in "):
        load_model(sharded)
    (sharded / INDEX_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} cannot be read as JSON"):
        load_model(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_damaged_files_beside_config_json_are_named(single_file: Path, content: str) -> None:
    for name, read in (("generation_config.json", read_generation_config), ("hf_quant_config.json", read_config)):
        (single_file / name).write_text(content)
        with pytest.raises(CheckpointError, match=f"^{single_file / name} (cannot be read as|must hold a) JSON"):
            read(single_file)


@pytest.mark.usefixtures("no_memory")
def test_a_config_without_architectures_is_named_with_its_folder(single_file: Path) -> None:
    edit_config(single_file, architectures=None)
    with pytest.raises(CheckpointError, match=f"^{single_file}: config.json: architectures is None"):
        load_model(single_file)


@pytest.mark.usefixtures("no_memory")
def test_unknown_architectures(single_file: Path) -> None:
    edit_config(single_file, architectures=["BertModel"], model_type="bert")
    with pytest.raises(Unsupported, match="BertModel"):
        load_model(single_file)


@pytest.mark.usefixtures("no_memory")
def test_unknown_arguments_and_too_little_memory(single_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argument in ({"dtype": "int8"}, {"dtype": "bf16"}, {"device": "abacus"}, {"device": "cuda:99"}):
        with pytest.raises(InvalidArgument, match=r"is '.*'"):
            load_model(single_file, **argument)
    monkeypatch.setattr(loading, "free_memory", lambda device: 1000)
    with pytest.raises(
        ResourceExhausted, match=r"needs 0.12 MiB \(127,104 bytes\) for its weights in torch.float32, but "
    ):
        load_model(single_file)


def test_failed_allocation_is_resource_exhausted() -> None:
    """With the bytes of each parameter in its own type."""
    shapes, kept = {"weight": (1 << 30, 1 << 30), "norm": (1 << 30, 1 << 30)}, {"norm": torch.bfloat16}
    with pytest.raises(ResourceExhausted, match=r"needs 6442450944.00 GiB \(.*\) of address space .* on cpu"):
        lazy_parameters.allocate(shapes, torch.float32, torch.device("cpu"), kept)


@pytest.mark.turns(3)
def test_parameters_are_the_checkpoints_rows_in_order(tiny: Any) -> None:
    """Each slice of each parameter is the tensor that the name table says, whatever file
    it was in."""
    model = load_model(tiny.path, dtype="float32")
    given = {name.replace("language_model.", ""): weight for name, weight in tiny.model.named_parameters()}
    for layer, block in enumerate(model.blocks):
        prefix = f"model.layers.{layer}."
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        gate_up = ("mlp.gate_proj", "mlp.up_proj")
        for linear, names in (
            (block.attention.qkv, qkv if f"{prefix}{qkv[0]}.weight" in given else ("self_attn.qkv_proj",)),
            (block.attention.out, ("self_attn.o_proj",)),
            (block.mlp.gate_up, gate_up if f"{prefix}{gate_up[0]}.weight" in given else ("mlp.gate_up_proj",)),
            (block.mlp.down, ("mlp.down_proj",)),
        ):
            assert torch.equal(linear.weight, torch.cat([given[f"{prefix}{name}.weight"] for name in names]))
            assert (linear.bias is None) == (f"{prefix}{names[0]}.bias" not in given)
            if linear.bias is not None:
                assert torch.equal(linear.bias, torch.cat([given[f"{prefix}{name}.bias"] for name in names]))


def test_names_that_are_not_read(make_tiny: Any, single_file: Path) -> None:
    frequencies = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(4),
    }
    expected = load_model(single_file, dtype="float32")
    edit_tensors(single_file, lambda tensors: tensors.update(frequencies))
    assert load_model(single_file, dtype="float32").num_parameters == expected.num_parameters
    # Of a head beside tied embeddings nothing is kept.
    edit_config(single_file, tie_word_embeddings=True)
    edit_tensors(single_file, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].double().float()}))
    tied = load_model(single_file, dtype="float32")
    assert tied.num_parameters == expected.num_parameters - 97 * 32
    assert tied.lm_head.weight is tied.embedding.weight


def test_float_tensors_of_several_types_become_one(single_file: Path) -> None:
    edit_tensors(single_file, lambda t: t.update({n: w.bfloat16() for n, w in t.items() if "norm" not in n}))
    with Checkpoint(SafetensorsFiles(single_file)) as opened:
        values = json.loads((single_file / "config.json").read_text())
        family = FAMILIES.require("LlamaForCausalLM")
        config = family.read_config(values)
        places = expand(family.name_tables(config)[0], config.num_layers)
        assert opened.dtype(places) == torch.bfloat16
    model = load_model(single_file, dtype="bfloat16")
    assert model.norm.weight.dtype == model.embedding.weight.dtype == torch.bfloat16


def test_the_table_must_tile_every_parameter() -> None:
    good = {"a": Place(parameter="p", shape=(2, 3)), "b": Place(parameter="p", shape=(1, 3), row=2)}
    assert parameter_shapes(good) == {"p": (3, 3)}
    for row, shape in ((3, (1, 3)), (1, (1, 3)), (2, (1, 4))):
        with pytest.raises(QuireError, match="does not continue p"):
            parameter_shapes({**good, "b": Place(parameter="p", shape=shape, row=row)})


def test_progress_shows_only_on_a_terminal(
    single_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model(single_file, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load_model(single_file, progress=False)
    assert capsys.readouterr().err == ""
    load_model(single_file, progress=True)
    assert "Loading: " in capsys.readouterr().err
