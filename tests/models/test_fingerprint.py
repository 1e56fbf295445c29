"""Fingerprints: equal for the same model, different in the right field, and their cache
may fail."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.models.conftest import CASES

from quire.base.errors import CheckpointError, InvalidArgument
from quire.models import fingerprint
from quire.models.fingerprint import ModelFingerprint, cache_file, file_digest, model_fingerprint, weights_digest
from quire.models.loading import load_model
from quire.weights.safetensors_files import SINGLE_FILE, weight_files


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def differences(one: ModelFingerprint, other: ModelFingerprint) -> tuple[str, ...]:
    """Names of the fields that differ."""
    return tuple(field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name))


def test_it_tells_models_apart(single_file: Path) -> None:
    first = model_fingerprint(single_file, load_model(single_file, dtype="float32"))
    assert first == model_fingerprint(single_file, load_model(single_file, dtype="bfloat16"))

    flip_last_byte(single_file / SINGLE_FILE)
    other = model_fingerprint(single_file, load_model(single_file))
    assert differences(first, other) == ("weights",)

    config = single_file / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "rms_norm_eps": 0.5, "transformers_version": "0"}))
    assert differences(other, model_fingerprint(single_file, load_model(single_file))) == ("config",)


def test_a_length_that_decides_frequencies_is_part_of_it(make_tiny: Any) -> None:
    path = make_tiny(next(case for case in CASES if case.name == "phi3-longrope")).path
    found = [model_fingerprint(path, load_model(path, max_model_len=length)) for length in (16, 17, 128, None)]
    assert differences(found[0], found[1]) == ("config", "length")
    assert found[1] == found[2] == found[3]
    assert [one.length for one in found[:2]] == ["max_model_len up to 16", "max_model_len above 16"]


def test_directory_of_another_model_is_refused(single_file: Path, sharded: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not describe"):
        model_fingerprint(sharded, load_model(single_file))


def test_digest_is_of_the_bytes_and_of_every_shard(single_file: Path, sharded: Path) -> None:
    content = (single_file / SINGLE_FILE).read_bytes()
    assert weights_digest(single_file) == xxhash.xxh3_128_hexdigest(content)
    seen = {weights_digest(sharded)}
    for shard in weight_files(sharded):
        flip_last_byte(shard)
        seen.add(weights_digest(sharded))
    assert len(seen) == 1 + len(weight_files(sharded))


def test_digest_is_remembered_until_the_file_changes(single_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = single_file / SINGLE_FILE
    digest = file_digest(file)
    assert list(json.loads(cache_file().read_text())) == [str(file.resolve())]
    assert [entry.name for entry in cache_file().parent.iterdir()] == ["digests.json"]

    def fail(*args: Any) -> None:
        raise AssertionError("the file was read again")

    with monkeypatch.context() as patch:
        patch.setattr(fingerprint.xxhash, "xxh3_128", fail)
        assert file_digest(file) == digest
        link = single_file / "link.safetensors"
        link.symlink_to(file)
        assert file_digest(link) == digest
        stat = file.stat()
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(AssertionError, match="read again"):
            file_digest(file)
    assert file_digest(file) == digest


@pytest.mark.parametrize("cache", ["", "[]", "{", '{"x": 3}', "entry"])
def test_damaged_cache_is_replaced(single_file: Path, cache: str) -> None:
    file = single_file / SINGLE_FILE
    digest = file_digest(file)
    good = cache_file().read_text()
    cache_file().write_text(good.replace(digest, "zz" * 16) if cache == "entry" else cache)
    assert file_digest(file) == digest
    assert json.loads(cache_file().read_text())[str(file.resolve())]["xxh3_128"] == digest


def test_cache_that_cannot_be_written_is_harmless(single_file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    assert len(file_digest(single_file / SINGLE_FILE)) == 32


def test_missing_file_is_a_checkpoint_error(single_file: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read for its digest"):
        file_digest(single_file / "gone.safetensors")
