"""The two files of an adapter, configuration and weights: in a directory, or packed into bytes.

Packed adapters are read in memory: no file is written and nothing is executed. Only the two files
of a zip archive are unpacked. Parts that are too long are refused before they are parsed.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeAlias

import torch
from safetensors import SafetensorError, deserialize, safe_open
from torch import Tensor

from quire.adapters.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES, shown, told
from quire.base.errors import CheckpointError, QuireError
from quire.weights.floats import DTYPES

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_KEY = "adapter_config"
"""Metadata key for the text of ``adapter_config.json`` in a self-contained safetensors file."""
MAX_BYTES = 1 << 31
"""Limit in bytes of a packed adapter and of its unpacked weights. Rank 64 for all linear maps of a
model of 70 billion weights takes 1.6e9."""
MAX_HEADER_BYTES = 8 << 20
"""Limit in bytes of the header of a self-contained adapter; a tensor takes about 150 bytes."""
MAX_MEMBERS = 1000
"""Most files in a zip archive."""
FORMS = f"a zip archive of a directory that PEFT saved, or a safetensors file whose metadata has {CONFIG_KEY!r}"


class FileWeights:
    """The tensors of an adapter in a memory-mapped safetensors file; ``CheckpointError`` if it is
    damaged. ``name`` and ``config_name``: of the weights and the configuration in errors."""

    def __init__(self, path: Path) -> None:
        self.name, self.config_name = str(path), str(path.parent / CONFIG_FILE)
        try:
            opened: Any = safe_open(path, framework="pt", device="cpu")
            self._handle = opened.__enter__()
            slices = {name: self._handle.get_slice(name) for name in self._handle.keys()}  # noqa: SIM118
            self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(one.get_shape()) for name, one in slices.items()}
            self.dtypes: Mapping[str, str] = {name: one.get_dtype() for name, one in slices.items()}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is no valid safetensors file, or is cut short: {told(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.__exit__(*exc)

    def read(self, key: str) -> Tensor:
        try:
            tensor: Tensor = self._handle.get_tensor(key)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.name}: {shown(key)} cannot be read: {told(error)}") from error
        return tensor


class PackedWeights:
    """The same in the bytes of a safetensors file; ``CheckpointError`` if they are damaged."""

    def __init__(self, data: bytes, name: str, config_name: str) -> None:
        self.name, self.config_name = name, config_name
        try:
            self._tensors: dict[str, Any] = dict(deserialize(data))  # type: ignore[no-untyped-call]
        except (SafetensorError, ValueError) as error:
            raise CheckpointError(f"{name} is no valid safetensors file, or is cut short: {told(error)}") from error
        self.shapes: Mapping[str, tuple[int, ...]] = {key: tuple(one["shape"]) for key, one in self._tensors.items()}
        self.dtypes: Mapping[str, str] = {key: one["dtype"] for key, one in self._tensors.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tensors = {}

    def read(self, key: str) -> Tensor:
        found = self._tensors[key]
        return torch.frombuffer(found["data"], dtype=DTYPES[found["dtype"]]).view(found["shape"])


Weights: TypeAlias = FileWeights | PackedWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedAdapter:
    """Both files of an adapter, taken from one sequence of bytes."""

    config: bytes
    """The text of ``adapter_config.json``."""
    weights: bytes
    """A safetensors file."""
    config_name: str
    """Names of the two files in errors."""
    weights_name: str


def unpack(data: bytes, source: str) -> PackedAdapter:
    """Return the two files of a packed adapter (``FORMS``) named ``source``. ``CheckpointError``:
    another form, damage, missing files, several adapters, or a part that is too long."""
    if data.startswith(b"PK\x03\x04"):
        return _unzipped(data, source)
    config = _header_of(data, source).get("__metadata__", {}).get(CONFIG_KEY)
    if not isinstance(config, str):
        raise CheckpointError(
            f"{source} is a safetensors file without its configuration; expected the text of {CONFIG_FILE} as {CONFIG_KEY!r} in its "
            "metadata, or a zip archive of the directory"
        )
    name = f"{source}, {CONFIG_KEY!r} of its metadata"
    return PackedAdapter(config=config.encode(), weights=data, config_name=name, weights_name=source)


def _header_of(data: bytes, source: str) -> dict[str, Any]:
    """Return the JSON header of a safetensors file; the rest is not read."""
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= len(data):
        raise CheckpointError(f"{source} is no valid safetensors file, or is cut short; expected {FORMS}")
    if end > MAX_HEADER_BYTES:
        raise CheckpointError(f"{source} has a header of {end - 8} bytes; expected fewer than {MAX_HEADER_BYTES}")
    try:
        found = json.loads(data[8:end].decode("utf-8"))
        if isinstance(found, dict) and isinstance(found.get("__metadata__", {}), dict):
            return found
        raise ValueError("the header is no JSON object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source} is no valid safetensors file: {told(error)}; expected {FORMS}") from error


def _unzipped(data: bytes, source: str) -> PackedAdapter:
    # Each entry of the archive's directory begins so. Count before parsing, which could take long.
    if len(list(islice(re.finditer(rb"PK\x01\x02", data), MAX_MEMBERS + 1))) > MAX_MEMBERS:
        raise CheckpointError(
            f"{source} is a zip archive of more than {MAX_MEMBERS} files; expected those of one adapter"
        )
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            configs = [one for one in archive.infolist() if Path(one.filename).name == CONFIG_FILE]
            if len(configs) != 1:
                raise CheckpointError(
                    f"{source} is a zip archive with {len(configs)} files {CONFIG_FILE}; expected the directory of one adapter"
                )
            config = _member(archive, configs[0], source, MAX_CONFIG_BYTES)
            beside = configs[0].filename.removesuffix(CONFIG_FILE) + WEIGHTS_FILE
            found = [one for one in archive.infolist() if one.filename == beside]
            if len(found) != 1:
                raise CheckpointError(
                    f"{source} has {len(found)} files {shown(beside)}; expected one beside {CONFIG_FILE}"
                )
            weights = _member(archive, found[0], source, MAX_BYTES)
    except QuireError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{source} is a damaged or unusual zip archive: {told(error)}") from error
    return PackedAdapter(
        config=config,
        weights=weights,
        config_name=f"{source}, {shown(configs[0].filename)}",
        weights_name=f"{source}, {shown(beside)}",
    )


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, source: str, limit: int) -> bytes:
    """Return a file of an archive with at most ``limit`` bytes; its entry bounds the read."""
    if info.file_size > limit:
        raise CheckpointError(f"{source}: {shown(info.filename)} has {info.file_size} bytes; expected at most {limit}")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise CheckpointError(
            f"{source}: {shown(info.filename)} is compressed in a rare way; expected deflated or stored"
        )
    return archive.read(info)
