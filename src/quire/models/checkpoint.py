"""Reading a Hugging Face checkpoint: safetensors files, their index, and each tensor's place.

A family defines a ``NameTable``. It maps each checkpoint tensor to the ``Place`` that it fills in a
parameter of the model. Several tensors may share a parameter (q, k and v in one fused projection).
A parameter is filled slice by slice, or packed from the file, so loading needs no more memory than
the model. All faults of the files are found in their headers, before any weight is read.
"""

from __future__ import annotations

import json
import math
import sys
import weakref
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.errors import CheckpointError, QuireError, ResourceExhausted
from quire.models import mxfp4

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Element types of weights, by their safetensors names."""
_COMPARED = 4096
"""Rows of a table compared at a time."""
BYTES = "U8"
"""Element type of MXFP4 blocks and scales. Other quantised weights need their own kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Rows ``row`` to ``row + shape[0]`` of a parameter, filled by one tensor of this shape."""

    parameter: str
    shape: tuple[int, ...]
    row: int = 0
    transposed: bool = False
    """Whether the checkpoint swaps the last two dimensions."""
    scales: str = ""
    """The tensor with the scales of an MXFP4 tensor (``models.mxfp4``); empty for floats."""
    dtype: torch.dtype | None = None
    """Element type of a parameter that must not be rounded to the model's; None: the model's."""

    def stored(self, name: str) -> dict[str, tuple[int, ...]]:
        """Map the checkpoint's tensor ``name`` for this place, and its scales, to their shapes."""
        if self.scales:
            blocks = (*self.shape[:-1], self.shape[-1] // mxfp4.BLOCK)
            return {name: (*blocks, mxfp4.BLOCK_BYTES), self.scales: blocks}
        if self.transposed:
            return {name: (*self.shape[:-2], self.shape[-1], self.shape[-2])}
        return {name: self.shape}


NameTable: TypeAlias = Mapping[str, Place]
"""Checkpoint tensor name to place. ``{}`` in names and parameters stands for every layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """The header of one tensor in a safetensors file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def expand(table: NameTable, num_layers: int) -> dict[str, Place]:
    """Return the table with each name that holds ``{}`` repeated for every layer."""
    places = {}
    for name, place in table.items():
        for layer in range(num_layers) if "{}" in name else (0,):
            places[name.format(layer)] = replace(
                place, parameter=place.parameter.format(layer), scales=place.scales.format(layer)
            )
    return places


def parameter_shapes(places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Return every parameter's shape; raise ``QuireError`` for rows unfilled or filled twice."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, place in sorted(places.items(), key=lambda item: (item[1].parameter, item[1].row)):
        rows, *rest = shapes.get(place.parameter, (0, *place.shape[1:]))
        if place.row != rows or tuple(rest) != place.shape[1:]:
            raise QuireError(f"name table: {name} does not continue {place.parameter} at row {rows}")
        shapes[place.parameter] = (rows + place.shape[0], *rest)
    return shapes


def read_index(path: Path) -> dict[str, str]:
    """Return the index's map of tensor to file names; raise ``CheckpointError`` if malformed."""
    file = path / INDEX_FILE
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
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
        raise CheckpointError(f"{path} lacks {_some(missing)}, named in {INDEX_FILE}; expected {len(files)} files")
    return files


def _no_weights(path: Path) -> CheckpointError:
    message = f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}"
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    if others:
        message += f", only {_some(others)}: convert it to safetensors, for example with transformers' save_pretrained"
    return CheckpointError(message)


def _some(names: Collection[str], limit: int = 4) -> str:
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class Checkpoint:
    """The open files of one checkpoint; a context manager. ``load`` reads what ``check`` saw.

    The constructor raises ``CheckpointError`` for missing or damaged files, or a wrong index.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
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
                self._handles[file] = handle
                self._add(
                    file,
                    {n: TensorHeader(file=file, shape=tuple(s.get_shape()), dtype=s.get_dtype()) for n, s in headers},
                )
            if self.files[0].name != SINGLE_FILE:
                self._check_index()
            self._open = stack.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handles.clear()
        self._open.close()

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
            raise CheckpointError(f"{file} holds {_some(unlisted)}, which {INDEX_FILE} does not list")

    def choose(self, spellings: Sequence[Mapping[str, Place]]) -> Mapping[str, Place]:
        """Return the spelling with the fewest missing tensors, the first among equals."""
        return min(spellings, key=lambda places: sum(name not in self.tensors for name in _stored(places)))

    def check(self, places: Mapping[str, Place], ignorable: Container[str] = ()) -> None:
        """Raise ``CheckpointError`` unless the files hold exactly these tensors, with these shapes
        and types. ``ignorable`` names may be present too, and are not read."""
        stored = _stored(places)
        self.refuse_names(
            [name for name in stored if name not in self.tensors],
            [name for name in self.tensors if name not in stored and name not in ignorable],
            len(stored),
        )
        for name, (shape, dtypes) in stored.items():
            header = self.tensors[name]
            if header.shape != shape:
                raise self.misshapen(name, header.shape, shape)
            if header.dtype not in dtypes:
                raise CheckpointError(f"{header.file}: {name} has dtype {header.dtype}; expected one of {list(dtypes)}")

    def refuse_names(self, missing: Collection[str], surplus: Sequence[str], expected: int) -> None:
        """Raise ``CheckpointError`` for ``missing`` tensors, out of ``expected``, or ``surplus``
        tensors of the model that config.json describes."""
        if missing:
            raise CheckpointError(f"{self.path} lacks {len(missing)} of {expected} tensors: {_some(missing)}")
        if surplus:
            found = self.tensors.get(surplus[0])
            where = self.path if found is None else found.file
            raise CheckpointError(f"{where}: the model that config.json describes has no place for {_some(surplus)}")

    def misshapen(self, name: str, found: Iterable[int], expected: Iterable[int]) -> CheckpointError:
        """Return the error of a tensor whose shape contradicts config.json."""
        where = self.tensors[name].file if name in self.tensors else self.path
        return CheckpointError(f"{where}: {name} has shape {list(found)}; config.json makes it {list(expected)}")

    def check_tied(self, head: str, embedding: str) -> None:
        """Raise ``CheckpointError`` if the head of a model that config.json ties to its embedding
        is stored with other values. Reads both tensors if both are present."""
        if head not in self.tensors:
            return
        if self.tensors[head].shape == self.tensors[embedding].shape:
            parts = zip(*(torch.split(self.mapped(name), _COMPARED) for name in (head, embedding)), strict=True)
            if all(torch.equal(one.float(), other.float()) for one, other in parts):
                return
        raise self.untied(head, embedding)

    def untied(self, head: str, embedding: str) -> CheckpointError:
        """Return the error of a stored head that contradicts ``tie_word_embeddings``."""
        where = self.tensors[head].file if head in self.tensors else self.path
        return CheckpointError(
            f"{where}: {head} differs from {embedding}, but tie_word_embeddings in config.json makes them one; set that to "
            "false to run the stored head, or remove the tensor"
        )

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the element type of most weights among these tensors (a few norms may have another
        type); float32 if none has a float type."""
        elements = dict.fromkeys(DTYPES, 0)
        for name in names:
            header = self.tensors[name]
            if header.dtype in elements:
                elements[header.dtype] += math.prod(header.shape)
        return DTYPES[max(elements, key=lambda name: elements[name])]

    def weights(
        self, places: Mapping[str, Place], *, dtype: torch.dtype, device: torch.device, progress: bool = False
    ) -> LateParameters:
        """Return the parameters of ``places`` on ``device``, to be called after ``check``.

        They have ``dtype`` unless their places give another. ``progress`` shows a bar over bytes on
        stderr if that is a terminal. Raise ``ResourceExhausted`` if the weights do not fit.
        """
        hidden = not (progress and sys.stderr.isatty())
        total = sum(_nbytes(self.tensors[name]) for name in _stored(places))
        bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"loading {self.path.name}", disable=hidden)
        self._open.callback(bar.close)
        return LateParameters(self, places, dtype, device, bar)

    def fill(self, name: str, place: Place, parameter: Tensor) -> None:
        """Read tensor ``name`` into its rows of ``parameter`` through a memory map."""
        target, source = parameter.narrow(0, place.row, place.shape[0]), self.mapped(name)
        if place.scales:
            mxfp4.unpack(f"{self.tensors[name].file}: {name}", source, self.mapped(place.scales), target)
        else:
            target.copy_(source.transpose(-1, -2) if place.transposed else source)

    def nbytes(self, name: str, place: Place) -> int:
        """Return the bytes in the file of tensor ``name`` and its scales."""
        return sum(_nbytes(self.tensors[one]) for one in place.stored(name))

    def slices(self) -> dict[str, Any]:
        """Return all tensors by name as lazy safetensors slices, read by indexing."""
        return {name: self._handles[header.file].get_slice(name) for name, header in self.tensors.items()}

    def mapped(self, name: str) -> Tensor:
        """Return tensor ``name`` in its stored form, mapped from the file."""
        header = self.tensors[name]
        try:
            tensor: Tensor = self._handles[header.file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{header.file}: {name} cannot be read: {error}") from error
        return tensor


class LateParameters(Mapping[str, Tensor]):
    """The parameters of an open checkpoint by name, while its model is loaded.

    ``weights[name]`` is read on access. Linear maps take ``late`` matrices instead, which are
    packed straight from the file if one tensor fills them completely, else from a scratch buffer
    that the next matrix reuses. Their own memory stays untouched, and so takes no room, unless they
    are still in use after packing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        places: Mapping[str, Place],
        dtype: torch.dtype,
        device: torch.device,
        bar: tqdm[Any],
    ) -> None:
        """See ``Checkpoint.weights``; ``bar`` counts the bytes read."""
        self._checkpoint, self._bar = checkpoint, bar
        shapes = parameter_shapes(places)
        self._tensors: dict[str, dict[str, Place]] = {name: {} for name in shapes}
        for tensor, place in places.items():
            self._tensors[place.parameter][tensor] = place
        kept = {place.parameter: place.dtype for place in places.values() if place.dtype is not None}
        self._parameters, self._memories = allocate(shapes, dtype, device, kept)
        self._unread = set(shapes)
        self._late: dict[int, _Late] = {}
        self._scratch, self._inside = torch.empty(0, dtype=torch.uint8), ""
        self._counted: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._unread:
            self._unread.remove(name)
            self._fill(name, self._parameters[name])
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def late(self, name: str) -> Tensor:
        """Return a parameter without values: before ``settle`` only its shape and type are valid,
        and ``read`` returns its values."""
        parameter = self._parameters[name]
        if name in self._unread and name in self._memories:
            memory = self._memories[name]
            self._late[parameter.data_ptr()] = _Late(name, parameter.dtype, tuple(parameter.shape), memory)
            return parameter
        return self[name]

    def release(self) -> None:
        """Drop the references to the parameters, so that only the model holds them."""
        self._parameters.clear()

    def read(self, weight: Tensor) -> Tensor:
        """Return the values of ``weight``, a parameter or a part of one, until the next call."""
        late = self._late.get(weight.untyped_storage().data_ptr())
        if late is None or late.name not in self._unread:
            return weight
        values = self._values(late)
        return values.as_strided(weight.shape, weight.stride(), values.storage_offset() + weight.storage_offset())

    def settle(self) -> None:
        """Read the late parameters that are still in use into their own memory."""
        self._scratch, self._inside = torch.empty(0, dtype=torch.uint8), ""
        for late in self._late.values():
            if late.name in self._unread and (memory := late.memory()) is not None:
                self._fill(late.name, torch.from_numpy(memory).view(late.dtype).view(late.shape))
        self._unread.clear()

    def _values(self, late: _Late) -> Tensor:
        (tensor, place), *others = self._tensors[late.name].items()
        if not (others or place.transposed or place.scales):
            found = self._checkpoint.mapped(tensor)
            if found.dtype == late.dtype:
                self._count(late.name)
                return found
        size = math.prod(late.shape) * late.dtype.itemsize
        if self._scratch.nbytes < size:
            self._scratch, self._inside = torch.empty(size, dtype=torch.uint8), ""
        values = self._scratch[:size].view(late.dtype).view(late.shape)
        if self._inside != late.name:
            self._inside = ""
            self._fill(late.name, values)
            self._inside = late.name
        return values

    def _fill(self, name: str, parameter: Tensor) -> None:
        for tensor, place in self._tensors[name].items():
            self._checkpoint.fill(tensor, place, parameter)
        self._count(name)

    def _count(self, name: str) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self._bar.update(sum(self._checkpoint.nbytes(*one) for one in self._tensors[name].items()))


@dataclass(frozen=True, slots=True)
class _Late:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: weakref.ref[NDArray[np.uint8]]


def late(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a parameter for a ``Linear`` or a table, without values until the model is packed; see
    ``LateParameters.late``."""
    return parameters.late(name) if isinstance(parameters, LateParameters) else parameters[name]


def allocate(
    shapes: Mapping[str, Iterable[int]],
    dtype: torch.dtype,
    device: torch.device,
    kept: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, weakref.ref[NDArray[np.uint8]]]]:
    """Return uninitialised parameters of ``dtype``, or of the type in ``kept``, and on a CPU a weak
    reference to the memory of each. Raise ``ResourceExhausted`` with the wanted bytes if memory
    does not suffice."""
    parameters, memories = {}, {}
    try:
        for name, shape in shapes.items():
            wide, kind = tuple(shape), kept.get(name, dtype)
            if device.type != "cpu" or not math.prod(wide):
                parameters[name] = torch.empty(wide, dtype=kind, device=device)
            else:
                memory = np.empty(math.prod(wide) * kind.itemsize, np.uint8)
                parameters[name] = torch.from_numpy(memory).view(kind).view(wide)
                memories[name] = weakref.ref(memory)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        wanted = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        raise ResourceExhausted(f"the model needs {wanted} bytes for its weights on {device}: {error}") from error
    return parameters, memories


def _stored(places: Mapping[str, Place]) -> dict[str, tuple[tuple[int, ...], Collection[str]]]:
    """Map every tensor that the files must hold to its shape and accepted element types."""
    return {
        stored: (shape, (BYTES,) if place.scales else tuple(DTYPES))
        for name, place in places.items()
        for stored, shape in place.stored(name).items()
    }


def _nbytes(header: TensorHeader) -> int:
    return math.prod(header.shape) * (1 if header.dtype == BYTES else DTYPES[header.dtype].itemsize)
