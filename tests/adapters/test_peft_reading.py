"""Reading what PEFT saved: which rows get what, what makes two adapters the same, and everything
that is refused.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.peft_models import (
    ALPHA,
    RANK,
    embedding_name,
    linear_names,
    load_tensors,
    make_adapter,
    make_base,
    save_adapter,
    write_adapter,
)
from tests.test_parity import VOCAB, WIDTH
from torch import Tensor

from quire.adapters import peft, peft_files
from quire.adapters.assets import read_assets
from quire.adapters.peft import PREFIX, read_adapter
from quire.adapters.targets import ENCODERS, embedding_of, linears_of, low_rank_refusal, targets_of
from quire.base.errors import CheckpointError, NotFound, QuireError, ResourceExhausted, Unsupported
from quire.contracts.executor import ModelAssets
from quire.models.loading import load_model
from quire.nn.packed import PackedLinear, can_pack

FAMILY = "llama-mqa"
"""Six query heads of 8, one of keys: q has the rows 0 to 47 of "qkv", k 48 to 55, v 56 to 63.

Head and embedding are two.
"""
Q, K, V = (f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
UP, DOWN = "model.layers.2.mlp.up_proj", "model.layers.2.mlp.down_proj"
SHAPES = {Q: (48, 48), K: (8, 48), V: (8, 48), UP: (64, 48), DOWN: (48, 64), "lm_head": (VOCAB, WIDTH)}
EMBED = "model.embed_tokens"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    make_base(FAMILY, path)
    return path


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return load_model(base, dtype="float32")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """One that fits, to be damaged."""
    write_adapter(tmp_path / "adapter", {**SHAPES, EMBED: (VOCAB, WIDTH)}, EMBED)
    return tmp_path / "adapter"


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "adapter_config.json").read_text())
    return found


def change_config(path: Path, **changes: Any) -> None:
    (path / "adapter_config.json").write_text(json.dumps({**config_of(path), **changes}))


def change_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_tensors(path)
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")


# What is read.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_updates_are_rows_of_fused_maps_with_the_scale_in_b(
    base: Path, adapter: Path, dtype: str, stored: torch.dtype
) -> None:
    change_tensors(adapter, lambda tensors: tensors.update({key: one.to(stored) for key, one in tensors.items()}))
    model = load_model(base, dtype=dtype)
    found = read_adapter(adapter, model)
    places = {(one.linear, one.row): one for one in found.updates}
    assert list(places) == sorted(places)
    tensors = load_tensors(adapter)
    expected = {
        ("1.qkv", 0): Q,
        ("1.qkv", 48): K,
        ("1.qkv", 56): V,
        ("2.gate_up", 64): UP,
        ("2.down", 0): DOWN,
        ("head", 0): "lm_head",
    }
    assert places.keys() == expected.keys() | {("embed", 0)}
    for place, module in expected.items():
        a_RI, b_OR = (tensors[f"{PREFIX}{module}.lora_{part}.weight"] for part in "AB")
        assert torch.equal(places[place].a_RI, a_RI.to(model.dtype))
        assert torch.equal(places[place].b_RO, (b_OR.float() * (ALPHA / RANK)).to(model.dtype).T)
    a_RV, b_ER = (tensors[f"{PREFIX}{EMBED}.lora_embedding_{part}"] for part in "AB")
    assert torch.equal(places["embed", 0].a_RI, a_RV.to(model.dtype))
    assert torch.equal(places["embed", 0].b_RO, (b_ER.float() * (ALPHA / RANK)).to(model.dtype).T)
    for update in found.updates:
        assert update.a_RI.is_contiguous()
        assert update.b_RO.is_contiguous()
        assert update.a_RI.device.type == "cpu"
    assert found.rank == RANK
    assert found.nbytes == sum(one.numel() for one in tensors.values()) * model.dtype.itemsize
    assert found.source == str(adapter)


def test_the_files_may_go_when_an_adapter_is_read(model: Any, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path, {Q: SHAPES[Q], K: SHAPES[K]})
    tensors[f"{PREFIX}lm_head.weight"] = torch.randn(VOCAB, WIDTH)
    save_adapter(tmp_path, tensors, target_modules=[Q, K], modules_to_save=["lm_head"])
    found = read_adapter(tmp_path, model)
    kept = [tensor for one in found.updates for tensor in (one.a_RI, one.b_RO)] + [found.tables["head"]]
    before = [tensor.clone() for tensor in kept]
    weights = tmp_path / "adapter_model.safetensors"
    with weights.open("r+b") as stream:  # the same file, which may be mapped
        stream.write(bytes(weights.stat().st_size))
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_fingerprints_say_what_decides_results(model: Any, adapter: Path, tmp_path: Path) -> None:
    def fingerprint(
        config: dict[str, Any] | None = None, change: Callable[[dict[str, Tensor]], object] | None = None
    ) -> str:
        copy = Path(shutil.copytree(adapter, tmp_path / f"copy {len(list(tmp_path.iterdir()))}"))
        change_config(copy, **(config or {}))
        if change is not None:
            change_tensors(copy, change)
        return read_adapter(copy, model).fingerprint

    def swap(tensors: dict[str, Tensor]) -> None:
        for part in "AB":
            first, second = (f"{PREFIX}{module}.lora_{part}.weight" for module in (K, V))
            tensors[first], tensors[second] = tensors[second], tensors[first]

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors[f"{PREFIX}{DOWN}.lora_B.weight"][0, 0] += 1e-3

    ours = fingerprint()
    assert len(ours) == 32
    same: list[dict[str, Any]] = [
        {"lora_dropout": 0.3, "inference_mode": True, "base_model_name_or_path": "elsewhere"},
        {"target_modules": r"model\.layers\.1\.self_attn\.[qkv]_proj|.*2\.mlp\.(up|down)_proj|lm_head|.*embed_tokens"},
        {"alpha_pattern": {"q_proj": ALPHA}},
    ]
    assert {fingerprint(one) for one in same} == {ours}
    others = [
        fingerprint({"lora_alpha": 4}),
        fingerprint({"use_rslora": True}),
        fingerprint({"alpha_pattern": {"q_proj": 4}}),
    ]
    others += [fingerprint(change=swap), fingerprint(change=flip)]
    assert len({ours, *others}) == len(others) + 1


def test_fingerprints_say_which_rows(model: Any, tmp_path: Path) -> None:
    found = set()
    for name in (K, V, K.replace("layers.1", "layers.0")):  # of one shape, and with the same bytes
        write_adapter(tmp_path / name, {name: SHAPES[K]})
        found.add(read_adapter(tmp_path / name, model).fingerprint)
    assert len(found) == 3


def test_tables(model: Any, tmp_path: Path) -> None:
    tensors = {f"{PREFIX}{name}.weight": torch.randn(VOCAB, WIDTH) for name in (EMBED, "lm_head")}
    save_adapter(tmp_path / "both", tensors, target_modules=[], modules_to_save=["embed_tokens", "lm_head"])
    found = read_adapter(tmp_path / "both", model)
    assert found.updates == ()
    assert found.rank == 0
    assert torch.equal(found.tables["embed"], tensors[f"{PREFIX}{EMBED}.weight"])
    assert torch.equal(found.tables["head"], tensors[f"{PREFIX}lm_head.weight"])
    one = {f"{PREFIX}lm_head.weight": tensors[f"{PREFIX}lm_head.weight"]}
    save_adapter(tmp_path / "one", one, target_modules=[], modules_to_save=["lm_head"])
    assert read_adapter(tmp_path / "one", model).tables.keys() == {"head"}
    assert read_adapter(tmp_path / "one", model).fingerprint != found.fingerprint
    change_tensors(tmp_path / "one", lambda tensors: tensors[f"{PREFIX}lm_head.weight"][-1, 0].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight' has values that are not finite"):
        read_adapter(tmp_path / "one", model)


def test_a_tensor_whose_module_is_called_otherwise(tmp_path: Path) -> None:
    """Mamba-2's embedding in older files; its module, and so PEFT's name for it, is today's."""
    make_base("mamba2", tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    save_file(
        {key.replace("backbone.embeddings.", "backbone.embedding."): one for key, one in load_file(weights).items()},
        weights,
    )
    write_adapter(tmp_path / "adapter", {"backbone.embeddings": (VOCAB, 32)}, "backbone.embeddings")
    [update] = read_adapter(tmp_path / "adapter", load_model(tmp_path / "base", dtype="float32")).updates
    assert update.linear == "embed"


def test_modules_that_are_one_tensor_of_the_checkpoint(tmp_path: Path) -> None:
    peer = make_base("glm", tmp_path / "base", attention_bias=False)
    shapes = {name: shape for name, shape in linear_names(peer).items() if "1.self_attn." in name}
    write_adapter(tmp_path / "adapter", shapes)
    apart = read_adapter(tmp_path / "adapter", load_model(tmp_path / "base", dtype="float32"))
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    for layer in range(3):
        names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in ("q", "k", "v", "qkv")]
        tensors[names[-1]] = torch.cat([tensors.pop(name) for name in names[:-1]])
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    joined = read_adapter(tmp_path / "adapter", load_model(tmp_path / "base", dtype="float32"))
    for one, other in zip(apart.updates, joined.updates, strict=True):
        assert (one.linear, one.row) == (other.linear, other.row)
        assert torch.equal(one.a_RI, other.a_RI)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "llama-mqa"])
def test_copies_of_the_base_models_tables(family: str, dtype: str, tmp_path: Path) -> None:
    """PEFT saves them beside an update.

    They are no part of the adapter, but they say which model it belongs to.
    """
    pytest.importorskip("peft")
    peer = make_base(family, tmp_path / "base")
    model = load_model(tmp_path / "base", dtype=dtype)
    path = tmp_path / "adapter"
    make_adapter(tmp_path / "base", path, peer, target_modules=["embed_tokens", "lm_head"], init_lora_weights=False)
    copies = [key for key in load_tensors(path) if key.endswith("base_layer.weight")]
    assert len(copies) == 2
    found = read_adapter(path, model)
    assert {one.linear for one in found.updates} == {"embed", "head"}
    assert not found.tables
    change_tensors(path, lambda tensors: [tensors.pop(key) for key in copies])
    assert read_adapter(path, model).fingerprint == found.fingerprint
    table_VE = peer.get_input_embeddings().weight.detach()
    for key in (f"{PREFIX}{EMBED}.base_layer.weight", f"{PREFIX}{EMBED}.weight"):
        for kept in (table_VE.clone(), table_VE.bfloat16()):
            change_tensors(path, lambda tensors, key=key, kept=kept: tensors.update({key: kept}))  # type: ignore[misc]
            assert read_adapter(path, model).fingerprint == found.fingerprint
        change_tensors(path, lambda tensors, key=key: tensors[key][-1, -1].add_(1))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match="not this model's; expected an adapter of this base model"):
            read_adapter(path, model)
        change_tensors(path, lambda tensors, key=key: tensors.update({key: table_VE[1:].clone()}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"shape \[{VOCAB - 1}, {WIDTH}\]; expected \[{VOCAB}, {WIDTH}\]"):
            read_adapter(path, model)
        change_tensors(path, lambda tensors, key=key: tensors.pop(key))  # type: ignore[misc]


def test_spellings_of_a_model_with_an_encoder_beside_it(tmp_path: Path) -> None:
    peer = make_base("gemma3-with-vision", tmp_path / "base")
    model = load_model(tmp_path / "base", dtype="float32")
    shapes = linear_names(peer)
    del shapes["lm_head"]
    config = {"rank_pattern": {r".*layers\.1\.mlp\.down_proj": RANK}}
    tensors = write_adapter(tmp_path / "today", shapes, **config)
    found = read_adapter(tmp_path / "today", model)
    assert len(found.updates) == 21
    for folder, trunk in (("older", "language_model.model."), ("text", "model.")):

        def spell(name: str, trunk: str = trunk) -> str:
            return name.replace("model.language_model.", trunk)

        renamed = {spell(key): one for key, one in tensors.items()}
        save_adapter(tmp_path / folder, renamed, target_modules=[spell(name) for name in shapes], **config)
        assert read_adapter(tmp_path / folder, model).fingerprint == found.fingerprint
    mixed = dict(tensors)
    for part in "AB":
        key = next(key for key in tensors if key.endswith(f"q_proj.lora_{part}.weight"))
        mixed[key.replace("model.language_model.", "language_model.model.")] = mixed.pop(key)
    save_adapter(tmp_path / "mixed", mixed, target_modules=sorted(shapes))
    with pytest.raises(CheckpointError, match=r"no module 'language_model\.model\.layers"):
        read_adapter(tmp_path / "mixed", model)


def test_names_of_base_models_are_not_compared(model: Any, adapter: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One model has many: of its repository, of the one that it was made from, of directories."""
    named = SimpleNamespace(**{**vars(model), "config": {**model.config, "_name_or_path": "org/parent"}})
    found = read_adapter(adapter, model).fingerprint
    for theirs in ("org/other", "/data/other", None, 3, "x" * 10_000):
        change_config(adapter, base_model_name_or_path=theirs)
        assert read_adapter(adapter, named).fingerprint == found  # type: ignore[arg-type]
    assert not caplog.records


# Fingerprints.


@pytest.fixture(scope="module")
def documented() -> Callable[..., str]:
    text = (Path(__file__).parents[2] / "docs" / "statefile.md").read_text()
    code = next(one for one in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "def fingerprint(" in one)
    assert "quire." not in code
    scope: dict[str, Any] = {}
    exec(compile(code, "statefile.md", "exec"), scope)
    function: Callable[..., str] = scope["fingerprint"]
    return function


def stored(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of a safetensors file, read without any library."""
    data = (path / "adapter_model.safetensors").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8:end]).items():
        begin, stop = entry["data_offsets"]
        found[name] = (entry["dtype"], entry["shape"], data[end + begin : end + stop])
    return found


@pytest.mark.parametrize("root_scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprints_are_as_documented(
    dtype: torch.dtype, root_scaled: bool, model: Any, tmp_path: Path, documented: Callable[..., str]
) -> None:
    shapes = {name: SHAPES[name] for name in (V, Q, K, DOWN)} | {EMBED: (VOCAB, WIDTH)}
    tensors = write_adapter(tmp_path, shapes, EMBED)
    tensors[f"{PREFIX}lm_head.weight"] = torch.randn(VOCAB, WIDTH)
    save_adapter(
        tmp_path,
        {key: one.to(dtype) for key, one in tensors.items()},
        target_modules=list(shapes),
        modules_to_save=["lm_head"],
        alpha_pattern={"k_proj": 2},
        use_rslora=root_scaled,
    )
    files = stored(tmp_path)
    updates = []
    for name in shapes:
        keys = [f"{PREFIX}{name}.lora_{part}.weight" for part in "AB"]
        if name == EMBED:
            keys = [f"{PREFIX}{name}.lora_embedding_{part}" for part in "AB"]
        updates.append((name, RANK, 2 if name == K else ALPHA, *(files[key] for key in keys)))
    expected = documented(updates, [("lm_head", files[f"{PREFIX}lm_head.weight"])], root_scaled)
    assert read_adapter(tmp_path, model).fingerprint == expected


# What is asked before weights are read.


def test_limits_are_asked_before_weights_are_read(model: Any, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_tensors(adapter)
    a_key, b_key = (f"{PREFIX}{DOWN}.lora_{part}.weight" for part in "AB")
    tensors |= {a_key: tensors[a_key][:2].clone(), b_key: tensors[b_key][:, :2].clone()}
    tensors[f"{PREFIX}{EMBED}.base_layer.weight"] = torch.zeros(VOCAB, WIDTH)  # refused when it is read
    save_file(tensors, adapter / "adapter_model.safetensors")
    change_config(adapter, rank_pattern={"down_proj": 2})
    asked = []

    def refuse(rank: int, num_bytes: int) -> None:
        asked.append((rank, num_bytes))
        raise ResourceExhausted("too large")

    def read(*args: object) -> None:
        pytest.fail("a weight was read")

    with monkeypatch.context() as patch:
        patch.setattr(peft_files.FileWeights, "read", read)
        patch.setattr(peft_files.PackedWeights, "read", read)
        with pytest.raises(ResourceExhausted, match="too large"):
            read_adapter(adapter, model, admit=refuse)
        with pytest.raises(ResourceExhausted, match="too large"):  # as an executor reads it
            read_assets(ModelAssets(path=adapter), model, refuse)
        with pytest.raises(ResourceExhausted, match="too large"):
            read_assets(ModelAssets(path=shutil.make_archive(str(adapter), "zip", adapter)), model, refuse)
    change_tensors(adapter, lambda tensors: tensors.pop(f"{PREFIX}{EMBED}.base_layer.weight"))
    found = read_adapter(adapter, model, admit=lambda *given: asked.append(given))
    assert asked == [(RANK, found.nbytes)] * 4


def test_the_rank_that_is_asked_is_what_the_pool_counts(base: Path, tmp_path: Path) -> None:
    """An update of the embedding takes no rank rows; tables count with their bytes."""
    half = load_model(base, dtype="bfloat16")
    tensors = write_adapter(tmp_path, {EMBED: (VOCAB, WIDTH)}, EMBED)
    tensors[f"{PREFIX}lm_head.weight"] = torch.randn(VOCAB, WIDTH)
    save_adapter(tmp_path, tensors, target_modules=[EMBED], modules_to_save=["lm_head"])
    asked: list[tuple[int, int]] = []
    found = read_adapter(tmp_path, half, admit=lambda *given: asked.append(given))
    assert asked == [(0, found.nbytes)]


# Copies of the base model's tables.

TYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("theirs", TYPES)
@pytest.mark.parametrize("ours", TYPES)
@pytest.mark.parametrize("original", TYPES)
def test_copies_may_be_rounded_otherwise(original: str, ours: str, theirs: str) -> None:
    generator = torch.Generator().manual_seed(3)
    table_VE = torch.randn(40, 1000, generator=generator, dtype=torch.float64)
    table_VE *= 2.0 ** torch.randint(-30, 19, table_VE.shape, generator=generator)
    table_VE = table_VE.to(getattr(torch, original))
    one, other = (table_VE.to(getattr(torch, name)) for name in (ours, theirs))
    assert peft._is_same_table(one, other)
    assert not peft._is_same_table(one, other.roll(1, 0))
    changed = other.clone()
    changed[20, 500] = 1.02 * changed[20, 500] + 1e-3
    assert not peft._is_same_table(one, changed)
    changed[20, 500] = float("nan")
    assert not peft._is_same_table(one, changed)


def test_a_copy_in_its_own_type_has_the_same_numbers() -> None:
    table_VE = torch.randn(7, 9).bfloat16()
    changed = table_VE.clone()
    changed.view(torch.int16)[3, 4] += 1
    assert peft._is_same_table(table_VE, table_VE.clone())
    assert not peft._is_same_table(table_VE, changed)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_in_another_half_type(dtype: str, base: Path, adapter: Path) -> None:
    table_VE = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    key = f"{PREFIX}{EMBED}.base_layer.weight"
    other = torch.float16 if dtype == "bfloat16" else torch.bfloat16
    model = load_model(base, dtype=dtype)
    put_copy = table_VE.to(other)
    change_tensors(adapter, lambda tensors: tensors.update({key: put_copy}))
    read_adapter(adapter, model)
    change_tensors(adapter, lambda tensors: tensors[key][-1, -1].add_(1))
    with pytest.raises(CheckpointError, match="not this model's"):
        read_adapter(adapter, model)


# What is refused.


def drop(ending: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        change_tensors(path, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(ending)])

    return change


def put(key: str, *shape: int, dtype: torch.dtype = torch.float32, fill: float = 0.5) -> Callable[[Path], object]:
    tensor = torch.full(shape, fill, dtype=dtype)
    return lambda path: change_tensors(path, lambda tensors: tensors.update({PREFIX + key: tensor}))


def put_one(key: str, value: float) -> Callable[[Path], object]:
    return lambda path: change_tensors(path, lambda tensors: tensors[PREFIX + key][0, 0].fill_(value))


def say(**config: Any) -> Callable[[Path], object]:
    return lambda path: change_config(path, **config)


def rename(old: str, new: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        tensors = {key.replace(old, new): one for key, one in load_tensors(path).items()}
        save_file(tensors, path / "adapter_model.safetensors")

    return change


def cut(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def only_pickled(path: Path) -> None:
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(text)


def unlink(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


LORA_Q = f"{Q}.lora_A.weight"
DAMAGES: dict[str, tuple[Callable[[Path], object], type[QuireError], str]] = {
    "no directory": (shutil.rmtree, NotFound, "is missing; expected a directory"),
    "no configuration": (unlink("adapter_config.json"), NotFound, "holds no adapter: it has no adapter_config.json"),
    "no weights": (unlink("adapter_model.safetensors"), CheckpointError, "has no adapter_model.safetensors"),
    "only pickled weights": (only_pickled, CheckpointError, "only adapter_model.bin: save it as safetensors"),
    "configuration is no JSON": (write("adapter_config.json", "{"), CheckpointError, "cannot be read as JSON"),
    "configuration is a list": (write("adapter_config.json", "[]"), CheckpointError, "a JSON list; expected an object"),
    "weights cut short": (cut, CheckpointError, "no valid safetensors file"),
    "weights are no safetensors": (write("adapter_model.safetensors", "PK"), CheckpointError, "no valid safetensors"),
    "no tensors": (drop(""), CheckpointError, "holds no tensors"),
    "another method": (say(peft_type="IA3"), Unsupported, "peft_type is 'IA3'.*expected 'LORA'"),
    "no method": (say(peft_type=None), Unsupported, "peft_type is None"),
    "another task": (say(task_type="SEQ_CLS"), Unsupported, 'task_type is "SEQ_CLS"'),
    "rank 0": (say(r=0), CheckpointError, "r is 0; expected an integer of 1 or more"),
    "rank is a truth": (say(r=True), CheckpointError, "r is True; expected an integer"),
    "rank of a pattern": (
        say(rank_pattern={"q_proj": 0}),
        CheckpointError,
        r"rank_pattern\['q_proj'\] is 0; expected an int",
    ),
    "alpha is not finite": (
        say(lora_alpha=float("inf")),
        CheckpointError,
        "lora_alpha is inf; expected a finite number",
    ),
    "alpha of a pattern": (
        say(alpha_pattern={"k": "1"}),
        CheckpointError,
        r"alpha_pattern\['k'\] is '1'; expected a finite",
    ),
    "another rank": (say(r=RANK + 1), CheckpointError, rf"shape \[{RANK}, \d+\]; expected \[{RANK + 1}, \d+\]"),
    "pattern is no expression": (
        say(rank_pattern={"(": 2}),
        CheckpointError,
        "rank_pattern is .*valid regular expressions",
    ),
    "targets are no expression": (
        say(target_modules="(q"),
        CheckpointError,
        "target_modules is .*valid regular expressions",
    ),
    "targets are numbers": (say(target_modules=[1]), CheckpointError, "target_modules is .*list of strings"),
    "layers with an expression": (
        say(target_modules=".*q_proj", layers_to_transform=[1]),
        CheckpointError,
        "layers_to_transform is .*null where target_modules is a string",
    ),
    "layer lists without layers": (
        say(layers_pattern="layers"),
        CheckpointError,
        "layers_pattern is 'layers'; expected null",
    ),
    "layers are names": (say(layers_to_transform=["1"]), CheckpointError, "layers_to_transform is .*list of integers"),
    "changed base": (
        say(init_lora_weights="pissa_niter_4"),
        Unsupported,
        "'pissa_niter_4', which changes the base weights",
    ),
    "unknown start": (say(init_lora_weights="magic"), Unsupported, "init_lora_weights is 'magic', which is not known"),
    "trained biases": (say(bias="lora_only"), Unsupported, "bias is 'lora_only'"),
    "unknown option": (say(use_magic=True), Unsupported, "use_magic is true: not a field that is known"),
    "saved norms": (
        say(modules_to_save=["norm"]),
        Unsupported,
        "names 'norm'; what can be saved whole: model.embed_tokens, lm",
    ),
    "saved nothing": (say(modules_to_save=["nothing"]), Unsupported, "names 'nothing'"),
    "saved layer": (say(modules_to_save=["q_proj"]), Unsupported, "names 'q_proj'"),
    "table is missing": (
        lambda path: (
            say(modules_to_save=["embed_tokens"])(path),
            drop("_embedding_A")(path),
            drop("_embedding_B")(path),
        ),
        CheckpointError,
        "lacks model.embed_tokens, which adapter_config.json asks for",
    ),
    "update of a table": (
        say(modules_to_save=["lm_head"]),
        CheckpointError,
        "lm_head' has an update, which adapter_config",
    ),
    "DoRA's tensors": (put(f"{Q}.lora_magnitude_vector", 48), Unsupported, "belongs to DoRA"),
    "biases' tensors": (put(f"{Q}.lora_B.bias", 48), Unsupported, "biases of low-rank products"),
    "a trained bias": (put(f"{Q}.base_layer.bias", 48), Unsupported, "trained biases"),
    "foreign tensor": (
        put(f"{Q}.lora_C.weights", 48),
        CheckpointError,
        "no tensor of a LoRA adapter; expected names like",
    ),
    "foreign prefix": (
        rename("base_model.model.", "model."),
        CheckpointError,
        r"no tensor of a LoRA adapter: it does not begin with base_model\.model\.; expected",
    ),
    "named adapter": (
        rename("lora_A.weight", "lora_A.default.weight"),
        CheckpointError,
        "lora_A.default.weight' is no tensor of a LoRA adapter: the name of the adapter, 'default', stands in it",
    ),
    "no targets": (say(target_modules=None), Unsupported, "target_modules is null, so PEFT would choose modules"),
    "unheard-of targets": (
        lambda path: (path / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        Unsupported,
        "target_modules is missing, so PEFT would choose modules",
    ),
    "whole layer": (put(f"{Q}.weight", 48, 48), CheckpointError, "q_proj.weight' is nothing that PEFT saves"),
    "whole norm": (
        put("model.norm.weight", 48),
        Unsupported,
        r"model\.norm' \(saved whole\) cannot be adapted: it is no linear",
    ),
    "A is missing": (
        drop("1.self_attn.q_proj.lora_A.weight"),
        CheckpointError,
        "q_proj' has no lora_A; expected lora_A and",
    ),
    "B is missing": (drop("embedding_B"), CheckpointError, "embed_tokens' has no lora_embedding_B"),
    "A of a table": (
        put(f"{Q}.lora_embedding_A", RANK, 48),
        CheckpointError,
        "lora_embedding_A' is nothing that PEFT saves",
    ),
    "table as a map": (
        rename("lora_embedding_A", "lora_A.weight"),
        CheckpointError,
        "embed_tokens' has no lora_embedding_A",
    ),
    "too few inputs": (
        put(LORA_Q, RANK, 47),
        CheckpointError,
        rf"q_proj.lora_A.weight' has shape \[{RANK}, 47\]; expected",
    ),
    "too many outputs": (
        put(f"{K}.lora_B.weight", 9, RANK),
        CheckpointError,
        rf"\[9, {RANK}\]; expected \[8, {RANK}\]",
    ),
    "transposed": (put(f"{UP}.lora_A.weight", WIDTH, RANK), CheckpointError, rf"expected \[{RANK}, {WIDTH}\]"),
    "one dimension": (put(LORA_Q, RANK * 48), CheckpointError, rf"\[{RANK * 48}\]; expected"),
    "whole numbers": (put(LORA_Q, RANK, 48, dtype=torch.int32, fill=1), CheckpointError, "dtype I32; expected one of"),
    "too wide": (put(LORA_Q, RANK, 48, dtype=torch.float64), CheckpointError, "dtype F64; expected one of"),
    "not a number": (
        put_one(LORA_Q, float("nan")),
        CheckpointError,
        "q_proj.lora_A.weight' has values that are not finite",
    ),
    "infinite": (
        put_one(f"{V}.lora_B.weight", -float("inf")),
        CheckpointError,
        "v_proj.lora_B.weight' has values that are not",
    ),
    "unknown module": (
        rename("layers.1.", "layers.7."),
        CheckpointError,
        r"no module 'model\.layers\.7.*expected modules that end in down_proj, embed_tokens, gate_proj",
    ),
    "other names": (
        rename("self_attn.q_proj", "attention.wq"),
        CheckpointError,
        "no module 'model.layers.1.attention.wq",
    ),
    "an expert": (
        put("model.layers.1.mlp.experts.3.w1.lora_A.weight", RANK, 48),
        Unsupported,
        "belongs to a mixture's experts",
    ),
    "not a target": (
        say(target_modules=["k_proj", "v_proj"]),
        CheckpointError,
        "has an update, which adapter_config.json does",
    ),
    "excluded": (
        say(exclude_modules=["q_proj"]),
        CheckpointError,
        "q_proj' has an update, which adapter_config.json does not",
    ),
    "another layer": (
        say(target_modules=[*(f"{one}_proj" for one in "qkv"), UP, DOWN, "lm_head", EMBED], layers_to_transform=[0]),
        CheckpointError,
        "self_attn.._proj' has an update, which adapter_config.json does not ask for",
    ),
    "target without an update": (
        say(target_modules=["q_proj", K, V, UP, DOWN, "lm_head", EMBED]),
        CheckpointError,
        "lacks model.layers.0.self_attn.q_proj, model.layers.2.self_attn.q_proj, which",
    ),
    "all linear, but few": (
        lambda path: (
            drop("lm_head.lora_A.weight")(path),
            drop("lm_head.lora_B.weight")(path),
            drop("A")(path),
            drop("B")(path),
            say(target_modules="all-linear")(path),
        ),
        CheckpointError,
        "lacks .* and 12 more, which",
    ),
}
"""What is done to an adapter that fits, and the error that this makes."""


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_what_is_refused_leaves_no_trace(damage: str, model: Any, adapter: Path) -> None:
    change, error, message = DAMAGES[damage]
    change(adapter)
    with pytest.raises(error, match=message):
        read_adapter(adapter, model)
    assert all(linear.low_rank is None for linear in linears_of(model).values())
    embedding = embedding_of(model)
    assert embedding is not None
    assert embedding.low_rank is None


@pytest.mark.parametrize(
    "module",
    [
        "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1",
        "model.visual.blocks.0.attn.qkv",
        "model.multi_modal_projector.linear_1",
        "audio_tower.layers.0.fc1",
    ],
)
def test_modules_beside_the_language_model(module: str, model: Any, tmp_path: Path) -> None:
    write_adapter(tmp_path, {module: (16, 16), Q: SHAPES[Q]})
    part = next(one for one in module.split(".") if one in ENCODERS)
    with pytest.raises(Unsupported, match=rf"'{re.escape(module)}' belongs to {part}, an encoder .* not run here"):
        read_adapter(tmp_path, model)


def test_an_adapter_of_a_whole_model_with_an_encoder(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    peer = make_base("gemma3-with-vision", tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter", peer, target_modules=["q_proj"])
    model = load_model(tmp_path / "base", dtype="float32")
    with pytest.raises(Unsupported, match=r"vision_tower.*q_proj' belongs to vision_tower, an encoder"):
        read_adapter(tmp_path / "adapter", model)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pipes_are_not_read(name: str, model: Any, adapter: Path) -> None:
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(CheckpointError, match=f"{name}"):
        read_adapter(adapter, model)


def test_directories_of_adapters_say_where_they_are(model: Any, adapter: Path) -> None:
    for name in ("two", "one"):
        (adapter.parent / name).mkdir()
        shutil.copy(adapter / "adapter_config.json", adapter.parent / name)
    with pytest.raises(NotFound, match=r"there are adapters in it, in 'adapter', 'one', 'two'$"):
        read_adapter(adapter.parent, model)
    for index in range(4):
        shutil.copytree(adapter.parent / "one", adapter.parent / f"three{index}")
    with pytest.raises(NotFound, match=r"in 'adapter', 'one', 'three0', 'three1' and 3 more$"):
        read_adapter(adapter.parent, model)


LONG = "\x1b[2J\n" + "long" * 30_000
"""Escapes of terminals, lines, and more than anybody reads."""


@pytest.mark.parametrize(
    "change",
    [
        lambda path: put(f"{LONG}.lora_A.weight", 2)(path),
        lambda path: put(LONG, 2)(path),
        lambda path: put(f"model.layers.0.mlp.{LONG}.lora_magnitude_vector", 2)(path),
        lambda path: put(f"visual.{LONG}.lora_A.weight", 2)(path),
        *(
            lambda path, name=name, value=value: change_config(path, **{name: value})
            for name, value in {
                "peft_type": LONG,
                "task_type": LONG,
                "bias": LONG,
                "init_lora_weights": LONG,
                "r": LONG,
                "lora_alpha": LONG,
                "rank_pattern": {LONG: 0},
                "alpha_pattern": {LONG: "x"},
                "target_modules": LONG,
                "exclude_modules": [LONG, 3],
                "modules_to_save": [LONG],
                "layers_to_transform": [-1] * 100_000,
                "use_dora": LONG,
                LONG: LONG,
            }.items()
        ),
    ],
)
def test_messages_stay_short_and_on_one_line(change: Callable[[Path], object], model: Any, adapter: Path) -> None:
    change(adapter)
    with pytest.raises(QuireError) as raised:
        read_adapter(adapter, model)
    text = str(raised.value)
    assert len(text.replace(str(adapter), "")) < 700, len(text)
    assert text.isprintable()


def test_a_file_is_no_adapter(model: Any, adapter: Path) -> None:
    with pytest.raises(NotFound, match="is a file; expected a directory"):
        read_adapter(adapter / "adapter_model.safetensors", model)


def test_values_that_the_models_type_cannot_hold(base: Path, adapter: Path) -> None:
    put_one(f"{V}.lora_B.weight", 7e4)(adapter)
    read_adapter(adapter, load_model(base, dtype="bfloat16"))
    with pytest.raises(CheckpointError, match=r"v_proj.lora_B.weight' has values that are too large for torch.float16"):
        read_adapter(adapter, load_model(base, dtype="float16"))


@pytest.mark.parametrize(
    ("family", "module", "reason"),
    [
        ("deepseek-v3", "model.layers.0.self_attn.kv_b_proj", "latent attention uses its weight in two other forms"),
        ("qwen3-next", "model.layers.0.linear_attn.in_proj_qkvz", "its rows stand in another order here"),
        ("mamba2", "backbone.layers.0.mixer.conv1d", "it is a convolution"),
        ("qwen3-moe", "model.layers.0.mlp.gate", "it is the router of a mixture of experts"),
        ("qwen3-moe", "model.layers.0.mlp.experts.1.up_proj", "experts"),
        ("gpt-oss", "model.layers.0.mlp.experts", "experts"),
    ],
)
def test_modules_that_cannot_be_adapted(family: str, module: str, reason: str, tmp_path: Path) -> None:
    make_base(family, tmp_path / "base")
    model = load_model(tmp_path / "base", dtype="float32")
    write_adapter(tmp_path / "adapter", {module: (48, 48)})
    with pytest.raises(Unsupported, match=f"{module}' cannot be adapted: .*{reason}.*; what can be: "):
        read_adapter(tmp_path / "adapter", model)


def test_models_without_adapters(adapter: Path, model: Any) -> None:
    foreign = SimpleNamespace(fallback=True, blocks=[print], places={})
    assert "transformers' layers (the fallback)" in low_rank_refusal(foreign)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="the fallback"):
        read_adapter(adapter, foreign)  # type: ignore[arg-type]
    bare = SimpleNamespace(blocks=[print])
    assert "no linear maps" in low_rank_refusal(bare)  # type: ignore[arg-type]
    nameless = SimpleNamespace(**{**vars(model), "places": {}})
    with pytest.raises(Unsupported, match="came from no checkpoint"):
        read_adapter(adapter, nameless)  # type: ignore[arg-type]


# The targets.


@pytest.mark.parametrize("family", ["llama", "llama-mqa", "qwen2-moe", "falcon-h1", "deepseek-v2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_maps_by_name(family: str, dtype: str, tmp_path: Path) -> None:
    """Each target is rows of one map that the model really calls, packed or not, and no two
    overlap.
    """
    peer = make_base(family, tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    linears = linears_of(model)
    assert all(linear.name == name for name, linear in linears.items())
    packs = can_pack(model.dtype, model.device)
    assert isinstance(linears["head"], PackedLinear) == packs
    targets = targets_of(model)
    assert targets.named("embed") == embedding_name(peer)
    assert targets.named("head") == "lm_head"
    rows: dict[str, list[tuple[int, int]]] = {}
    for target in targets.targets.values():
        if target.linear != "embed":
            assert target.ins == linears[target.linear].in_features
            rows.setdefault(target.linear, []).append((target.row, target.row + target.outs))
    assert rows.keys() <= linears.keys()
    for name, spans in rows.items():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= linears[name].out_features
    assert low_rank_refusal(model) == ""
