"""Checkpoints in safetensors files: one file, or several and their index."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.base.errors import CheckpointError, some
from quire.base.json_files import read_json
from quire.contracts.weights import TensorHeader, WeightFormat

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_index(path: Path) -> dict[str, str]:
    """Return the index's map of tensor to file names; raise ``CheckpointError`` if malformed."""
    file = path / INDEX_FILE
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file} has no weight_map; expected an object of tensor names and file names")
    for tensor, shard in weight_map.items():
        # A shard is a file of this directory: an index cannot point elsewhere.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{file}: {tensor} is in {shard!r}; expected the name of a .safetensors file beside it"
            )
    return weight_map


def weight_files(path: Path) -> tuple[Path, ...]:
    """List the checkpoint's safetensors files by name; a single file goes before an index, as in
    transformers. Raise ``CheckpointError`` if there are none or one is missing."""
    if (path / SINGLE_FILE).is_file():
        return (path / SINGLE_FILE,)
    if not (path / INDEX_FILE).is_file():
        raise _no_weights(path)
    files = tuple(path / name for name in sorted(set(read_index(path).values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path} lacks {some(missing)}, named in {INDEX_FILE}; expected {len(files)} files")
    return files


def stored_names(path: Path) -> Collection[str]:
    """Return the names of a checkpoint's tensors; ``CheckpointError`` as in ``weight_files``."""
    if not (path / SINGLE_FILE).is_file():
        weight_files(path)
        return read_index(path)
    source = SafetensorsFiles(path)
    source.close()
    return source.tensors


def _no_weights(path: Path) -> CheckpointError:
    message = f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    if others:
        message += f", only {some(others)}: convert it to safetensors in that layout, for example with transformers' save_pretrained"
    return CheckpointError(message)


class Formats(Protocol):
    """The formats of a quantised checkpoint."""

    def format(self, name: str, usual: WeightFormat, headers: Mapping[str, TensorHeader]) -> WeightFormat:
        """Return the format of a tensor that checkpoints of its family usually store as
        ``usual``."""

    def reads(self, name: str) -> bool:
        """Return whether a tensor belongs to weights; others are passed over."""


class SafetensorsFiles:
    """``WeightSource`` over a directory of safetensors files.

    The constructor raises ``CheckpointError`` for missing or damaged files, or a wrong index.
    ``formats`` None: the tensors lie in their families' formats.
    """

    configuration = "config.json"

    def __init__(self, path: Path, formats: Formats | None = None) -> None:
        self.path, self._formats = path, formats
        self.files = weight_files(path)
        self.tensors: dict[str, TensorHeader] = {}
        self._handles: dict[Path, Any] = {}
        with ExitStack() as stack:
            for file in self.files:
                try:
                    handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
                    headers = [(name, handle.get_slice(name)) for name in handle.keys()]  # noqa: SIM118
                except (SafetensorError, OSError, ValueError) as error:
                    raise CheckpointError(f"{file} is no valid safetensors file, or is cut short: {error}") from error
                except RuntimeError as error:
                    raise CheckpointError(f"{file} cannot be mapped into memory: {error}") from error
                self._handles[file] = handle
                self._add(
                    file,
                    {n: TensorHeader(file=file, shape=tuple(s.get_shape()), dtype=s.get_dtype()) for n, s in headers},
                )
            if self.files[0].name != SINGLE_FILE:
                self._check_index()
            if formats is not None:
                self.tensors = {name: header for name, header in self.tensors.items() if formats.reads(name)}
            self._open = stack.pop_all()

    def close(self) -> None:
        self._handles.clear()
        self._open.close()

    def format(self, name: str, usual: WeightFormat) -> WeightFormat:
        return usual if self._formats is None else self._formats.format(name, usual, self.tensors)

    def read(self, name: str) -> Tensor:
        header = self.tensors[name]
        try:
            tensor: Tensor = self._handles[header.file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{header.file}: {name} cannot be read: {error}") from error
        return tensor

    def slices(self) -> dict[str, Any]:
        return {name: self._handles[header.file].get_slice(name) for name, header in self.tensors.items()}

    def _add(self, file: Path, headers: Mapping[str, TensorHeader]) -> None:
        twice = [name for name in headers if name in self.tensors]
        if twice:
            raise CheckpointError(f"tensor {twice[0]} is in {self.tensors[twice[0]].file} and in {file}; expected one")
        self.tensors.update(headers)

    def _check_index(self) -> None:
        weight_map = read_index(self.path)
        for name, shard in weight_map.items():
            found = self.tensors[name].file.name if name in self.tensors else "no file"
            if found != shard:
                raise CheckpointError(f"{self.path / INDEX_FILE} says that {name} is in {shard}; found in {found}")
        unlisted = [name for name in self.tensors if name not in weight_map]
        if unlisted:
            file = self.tensors[unlisted[0]].file
            raise CheckpointError(f"{file} holds {some(unlisted)}, which {INDEX_FILE} does not list")
