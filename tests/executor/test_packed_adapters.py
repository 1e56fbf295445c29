"""Adapters in one piece: by path, open file, bytes and stream they are what the directory is;
whatever else they hold is refused.
"""

from __future__ import annotations

import json
import mmap
import random
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from io import BufferedReader, BytesIO, StringIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import torch
from safetensors.torch import load_file, save
from tests.executor.conftest import Tiny, refused
from tests.executor.test_adapters import RANK, executor_of

from quire.adapters import assets as adapter_assets
from quire.adapters import peft_files
from quire.base.errors import CheckpointError, InvalidArgument, QuireError, Unsupported
from quire.contracts.executor import ModelAssets
from quire.executor.executor import Executor

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def directory(tinies: dict[str, Tiny], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As PEFT saves it, with a README beside the two files."""
    path = tmp_path_factory.mktemp("packed") / "adapter"
    path.mkdir()
    tensors = {}
    for layer, block in enumerate(tinies["Llama"].reference.model.layers):
        module = block.self_attn.q_proj
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        tensors[f"{key}A.weight"] = torch.full((RANK, module.in_features), 0.01 * (layer + 1))
        tensors[f"{key}B.weight"] = torch.full((module.out_features, RANK), 0.02)
    (path / "adapter_model.safetensors").write_bytes(save(tensors))
    (path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (path / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    return path


@pytest.fixture(scope="module")
def zipped(directory: Path) -> bytes:
    return Path(shutil.make_archive(str(directory), "zip", directory.parent, directory.name)).read_bytes()


@pytest.fixture(scope="module")
def single(directory: Path) -> bytes:
    """One safetensors file, made as the documentation says."""
    tensors = load_file(directory / "adapter_model.safetensors")
    return save(tensors, metadata={"adapter_config": (directory / "adapter_config.json").read_text()})


@pytest.fixture(scope="module")
def bed(tinies: dict[str, Tiny]) -> Executor:
    return executor_of(tinies["Llama"].model)


def fingerprint(ex: Executor, assets: ModelAssets) -> str:
    """Load and unload it."""
    name = ex.load_lora(assets)
    try:
        return ex.pool.runner.adapters.get(name).fingerprint
    finally:
        ex.unload_lora(name)


@pytest.mark.parametrize("form", ["zipped", "single"])
def test_every_source_gives_the_adapter_of_the_directory(
    form: str, bed: Executor, directory: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: Any
) -> None:
    content: bytes = request.getfixturevalue(form)
    path = tmp_path / "adapter.of-any-name"
    path.write_bytes(content)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))  # a temporary file would be an error
    expected = fingerprint(bed, ModelAssets(path=directory))
    behind = BytesIO(b"before" + content)
    behind.seek(6)
    with path.open("rb") as file, path.open("rb") as mapped:
        file.seek(5)
        sources = [
            ModelAssets(path=path),
            ModelAssets(file=file),
            ModelAssets(data=content),
            ModelAssets(data=bytearray(content)),
            ModelAssets(data=memoryview(content)),
            ModelAssets(data=mmap.mmap(mapped.fileno(), 0, access=mmap.ACCESS_READ)),
            ModelAssets(stream=behind),
        ]
        assert [fingerprint(bed, one) for one in sources] == [expected] * len(sources)
        assert file.tell() == 5, "a file stands where it stood"
    assert behind.read() == b"", "a stream is read to its end"
    alone = path.rename(tmp_path / "adapter_model.safetensors")
    assert fingerprint(bed, ModelAssets(path=alone)) == expected
    path = alone
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as process:
        assert fingerprint(bed, ModelAssets(stream=cast(BinaryIO, process.stdout))) == expected
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name]


def test_the_files_may_lie_at_the_root_of_an_archive_and_be_stored(bed: Executor, directory: Path) -> None:
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for one in directory.iterdir():
            archive.write(one, one.name)
    expected = fingerprint(bed, ModelAssets(path=directory))
    assert fingerprint(bed, ModelAssets(file=content)) == expected


def archive_of(*members: tuple[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return content.getvalue()


def tar_of(directory: Path) -> bytes:
    content = BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(directory, "adapter")
    return content.getvalue()


def pickled(directory: Path) -> bytes:
    content = BytesIO()
    torch.save(load_file(directory / "adapter_model.safetensors"), content)
    return content.getvalue()


def with_fields(directory: Path, **fields: str) -> bytes:
    return save(load_file(directory / "adapter_model.safetensors"), metadata=fields or None)


NAMES = ("adapter_config.json", "adapter_model.safetensors")


def files(directory: Path) -> tuple[bytes, bytes]:
    return (directory / NAMES[0]).read_bytes(), (directory / NAMES[1]).read_bytes()


def members(directory: Path, prefix: str = "") -> list[tuple[str, bytes]]:
    return [(prefix + name, data) for name, data in zip(NAMES, files(directory), strict=True)]


CASES: dict[str, tuple[Callable[[Path], bytes], type[QuireError], str]] = {
    "nothing": (lambda path: b"", CheckpointError, "cut short; expected a zip archive"),
    "no form": (lambda path: b"x" * 100, CheckpointError, "expected a zip archive .* or a safetensors file"),
    "tar": (tar_of, CheckpointError, "expected a zip archive .* or a safetensors file"),
    "pickle": (pickled, CheckpointError, "0 files adapter_config.json"),
    "weights alone": (lambda path: files(path)[1], CheckpointError, "without its configuration"),
    "other metadata": (lambda path: with_fields(path, format="pt"), CheckpointError, "without its configuration"),
    "configuration alone": (lambda path: files(path)[0], CheckpointError, "safetensors"),
    "no JSON": (
        lambda path: with_fields(path, adapter_config="{"),
        CheckpointError,
        "of its metadata cannot be read as JSON",
    ),
    "no object": (lambda path: with_fields(path, adapter_config="[]"), CheckpointError, "holds a JSON list"),
    "deep JSON": (
        lambda path: with_fields(path, adapter_config="[" * 99999),
        CheckpointError,
        "cannot be read as JSON",
    ),
    "DoRA": (
        lambda path: with_fields(path, adapter_config=json.dumps(CONFIG | {"use_dora": True})),
        Unsupported,
        "of its metadata: use_dora is true",
    ),
    "no weights": (
        lambda path: archive_of((NAMES[0], files(path)[0])),
        CheckpointError,
        "0 files 'adapter_model.safetensors'",
    ),
    "weights elsewhere": (
        lambda path: archive_of(("a/" + NAMES[0], files(path)[0]), (NAMES[1], files(path)[1])),
        CheckpointError,
        "0 files 'a/adapter_model.safetensors'",
    ),
    "two adapters": (
        lambda path: archive_of(*members(path, "a/"), *members(path, "b/")),
        CheckpointError,
        "2 files adapter_config.json",
    ),
    "weights damaged inside": (
        lambda path: archive_of((NAMES[0], files(path)[0]), (NAMES[1], files(path)[1][:-4])),
        CheckpointError,
        "'adapter_model.safetensors' is no valid safetensors file, or is cut short",
    ),
    "rarely compressed": (
        lambda path: archive_of(*members(path), compression=zipfile.ZIP_BZIP2),
        CheckpointError,
        "compressed in a rare way",
    ),
    "many files": (
        lambda path: archive_of(*members(path), *[(str(one), b"") for one in range(1000)]),
        CheckpointError,
        "more than 1000 files",
    ),
    "a long configuration": (
        lambda path: archive_of((NAMES[0], b" " * ((4 << 20) + 1)), (NAMES[1], files(path)[1])),
        CheckpointError,
        "has 4194305 bytes; expected at most 4194304",
    ),
    "a long configuration in metadata": (
        lambda path: with_fields(path, adapter_config=" " * ((4 << 20) + 1)),
        CheckpointError,
        "more than 4194304 bytes",
    ),
    "a long header": (
        lambda path: with_fields(path, adapter_config=json.dumps(CONFIG), other=" " * (9 << 20)),
        CheckpointError,
        "expected fewer than 8388608",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str, bed: Executor, directory: Path) -> None:
    make, kind, match = CASES[case]
    content = make(directory)
    for assets in (ModelAssets(data=content), ModelAssets(stream=BytesIO(content))):
        with refused(kind, bed, match=match):
            bed.load_lora(assets)
    assert bed.pool.runner.adapters.ids == ()


def test_limits_hold_before_anything_is_parsed(
    bed: Executor, directory: Path, single: bytes, zipped: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").write_bytes(single)
    monkeypatch.setattr(peft_files, "MAX_BYTES", len(single) - 1)
    monkeypatch.setattr(adapter_assets, "PIECE", 100)

    class Endless(BytesIO):
        given = 0

        def read(self, size: int | None = -1) -> bytes:
            self.given += size or 0
            return b"x" * (size or 0)

    endless = Endless()
    for assets in (
        ModelAssets(path=tmp_path / "one"),
        ModelAssets(file=BytesIO(single)),
        ModelAssets(data=single),
        ModelAssets(stream=endless),
    ):
        with refused(
            CheckpointError, bed, match=f"more than {len(single) - 1} bytes; expected the path of a directory"
        ):
            bed.load_lora(assets)
    assert endless.given <= len(single) + 100
    # Short when it is packed, long when it is not.
    monkeypatch.setattr(peft_files, "MAX_BYTES", len(files(directory)[1]) - 1)
    assert len(zipped) < peft_files.MAX_BYTES
    with refused(CheckpointError, bed, match=f"expected at most {peft_files.MAX_BYTES}"):
        bed.load_lora(ModelAssets(data=zipped))


@pytest.mark.parametrize("form", ["zipped", "single"])
def test_damage_is_never_another_exception(form: str, bed: Executor, request: pytest.FixtureRequest) -> None:
    content: bytes = request.getfixturevalue(form)
    generator, told = random.Random(7), 0
    head = [generator.randrange(len(content) // 2) for _ in range(100)]
    tail = [len(content) - 1 - generator.randrange(min(600, len(content))) for _ in range(100)]
    for place in [*head, *tail]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << generator.randrange(8)
        for one in (bytes(damaged), content[:place]):
            try:
                fingerprint(bed, ModelAssets(data=one))
            except QuireError as error:
                told += len(str(error)) < 1000
    assert told > 200, "each that is cut short, at least"
    assert bed.pool.runner.adapters.ids == ()


def test_files_that_give_no_bytes(bed: Executor, single: bytes, tmp_path: Path) -> None:
    class Silent(BytesIO):
        def read(self, size: int | None = -1) -> Any:
            return None

    class Failing(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("the disk is gone")

    for assets, kind, match in (
        (ModelAssets(stream=cast(BinaryIO, StringIO("text"))), InvalidArgument, "gives str .* opened with 'rb'"),
        (ModelAssets(stream=Silent()), InvalidArgument, "gives NoneType"),
        (ModelAssets(stream=Failing()), CheckpointError, "the disk is gone"),
        (ModelAssets(file=Failing()), CheckpointError, "the file of an adapter cannot be read"),
    ):
        with refused(kind, bed, match=match):
            bed.load_lora(assets)
    (tmp_path / "one").write_bytes(single)
    opened = (tmp_path / "one").open("rb")
    assets = ModelAssets(file=cast(BufferedReader, opened))
    opened.close()
    with refused(CheckpointError, bed, match="closed file"):
        bed.load_lora(assets)
    for given in ({"data": 3}, {"data": "text"}, {"file": "name"}, {"stream": 3}, {"path": 3}):
        with pytest.raises(InvalidArgument, match=f"ModelAssets: {next(iter(given))} must be"):
            ModelAssets(**given)  # type: ignore[arg-type]
