"""A model's parameters while it is loaded: each is read when it is needed."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import ResourceExhausted, size_words
from quire.base.progress import Bar
from quire.contracts.linear import BlockRows, CodeRows
from quire.contracts.weights import CodedFormat
from quire.weights.checkpoint import Checkpoint
from quire.weights.floats import Floats
from quire.weights.gguf_blocks import HEADS, SIZES, GgufBlocks
from quire.weights.gguf_files import GgufFiles
from quire.weights.mapped_pages import drop_pages
from quire.weights.places import Place, parameter_dtypes, parameter_shapes


class LazyParameters(Mapping[str, Tensor]):
    """The parameters of an open checkpoint by name, while its model is loaded.

    ``weights[name]`` is read on access. Linear maps take ``late`` matrices instead, which are
    packed straight from the file if one tensor fills them completely, else from a scratch buffer
    that the next matrix reuses. On a CPU their own memory stays untouched, and so takes no room,
    unless they are still in use after packing. On another device, matrices that may stay in the
    blocks or codes of their file have no memory (``meta``) until ``read`` or ``place``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        places: Mapping[str, Place],
        dtype: torch.dtype,
        device: torch.device,
        bar: Bar,
        own: Collection[str] | None = None,
    ) -> None:
        """``dtype``: of parameters whose places give no other. ``bar`` counts the bytes read.
        ``own``: those that are here; others are zeros without memory; None: all.
        ``ResourceExhausted`` if the weights do not fit."""
        self._checkpoint, self._bar = checkpoint, bar
        shapes, kept = parameter_shapes(places), parameter_dtypes(places)
        absent = {} if own is None else {name: shapes.pop(name) for name in list(shapes) if name not in own}
        self._tensors: dict[str, dict[str, Place]] = {name: {} for name in shapes}
        for tensor, place in places.items():
            if place.parameter in shapes:
                self._tensors[place.parameter][tensor] = place
        self._device, self._placed = device, dict[str, Tensor]()
        whole = {name: shape for name, shape in shapes.items() if untouched(device) or not self._may_stay(name)}
        self._parameters, self._memories = allocate(whole, dtype, device, kept)
        late = {name: shape for name, shape in shapes.items() if name not in whole}
        self._parameters |= allocate(late, dtype, torch.device("meta"), kept)[0]
        for name, shape in absent.items():
            self._parameters[name] = torch.zeros((), dtype=kept.get(name, dtype), device=device).expand(shape)
        self._unread = set(shapes)
        self._lazy: dict[tuple[bool, int], _Lazy] = {}
        self._scratch, self._inside = torch.empty(0, dtype=torch.uint8), ""
        self._read_last = "", self._scratch
        self._counted: set[str] = set()
        self._filled: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        if name in self._unread:
            self._unread.remove(name)
            parameter = self._parameters[name]
            if parameter.is_meta:
                parameter = self._parameters[name] = self._on_device(parameter)
            self._fill(name, parameter)
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def late(self, name: str) -> Tensor:
        """Return a parameter without values: before ``materialize`` only its shape and type are
        valid, and ``read`` returns its values."""
        parameter = self._parameters[name]
        if name in self._unread and (name in self._memories or parameter.is_meta):
            held = parameter.untyped_storage() if parameter.is_meta else None
            late = _Lazy(name, parameter.dtype, tuple(parameter.shape), self._memories.get(name), held)
            self._lazy[_key(parameter)] = late
            return parameter
        return self[name]

    def release(self) -> None:
        """Drop the references to the parameters, so that only the model holds them."""
        self._parameters.clear()

    def read(self, weight: Tensor) -> Tensor:
        """Return the values of ``weight``, a parameter or a part of one, until the next call; on
        another device than a CPU as long as they are in use."""
        late = self._lazy.get(_key(weight))
        if late is None or late.name not in self._unread:
            return weight
        values = self._values(late)
        return values.as_strided(weight.shape, weight.stride(), values.storage_offset() + weight.storage_offset())

    def place(self, weight: Tensor) -> Tensor:
        """Return the values of a part of a parameter without memory, which has memory from now on;
        another tensor as it is."""
        late = self._lazy.get(_key(weight))
        if late is None or not weight.is_meta:
            return weight
        if late.name not in self._placed:
            self._placed[late.name] = self._on_device(torch.empty(late.shape, dtype=late.dtype, device="meta"))
            self._fill(late.name, self._placed[late.name])
        return self._placed[late.name].as_strided(weight.shape, weight.stride(), weight.storage_offset())

    def stored(self, weight: Tensor) -> list[BlockRows] | list[CodeRows] | list[Tensor]:
        """See ``contracts.block_calls.LayerKernels``. ``weight`` is a matrix or one of a stack."""
        late = self._lazy.get(_key(weight))
        if late is None:
            return []
        if late.name in self._unread and (codes := self._codes(late, weight)):
            return codes
        if late.name not in self._unread or weight.ndim != 2 or not weight.is_contiguous():
            return []
        if tensors := self._tensors_of(late, weight):
            return tensors
        if (inputs := weight.shape[1]) != late.shape[-1]:
            return []
        first = weight.storage_offset() // inputs
        found: list[tuple[str, Place, slice]] = []
        for name, place in sorted(self._tensors[late.name].items(), key=lambda item: item[1].row):
            start = place.row * math.prod(place.shape[1:-1])
            part = slice(max(first - start, 0), min(first + len(weight) - start, math.prod(place.shape[:-1])))
            if part.start >= part.stop:
                continue
            if not isinstance(place.format, GgufBlocks):
                return []
            found.append((name, place, part))
        rows = [self._rows(name, place, part) for name, place, part in found]
        if any(one is None for one in rows):
            return []
        self._count(late.name)
        return [one for one in rows if one is not None]

    def _tensors_of(self, late: _Lazy, weight: Tensor) -> list[Tensor]:
        """Return the tensors that fill a matrix one below the other; empty for a single one, which
        ``read`` returns."""
        places = sorted(self._tensors[late.name].items(), key=lambda item: item[1].row)
        if len(places) < 2 or tuple(weight.shape) != late.shape:
            return []
        if any(place.whole is not None or not place.format.is_plain for _, place in places):
            return []
        tensors = [self._checkpoint.source.read(name) for name, _ in places]
        if any(one.dtype != late.dtype for one in tensors):
            return []
        self._count(late.name)
        return tensors

    def _rows(self, name: str, place: Place, part: slice) -> BlockRows | None:
        """Return rows of a tensor; None if a rank's part of them does not consist of blocks."""
        source, kind = self._checkpoint.source, place.format.name
        if self._read_last[0] != name:  # the next matrix of a stack is in the same tensor
            rows = _cut_blocks(kind, source.read(name), place)
            if rows is None:
                return None
            self._read_last = name, rows
        rows_RB = self._read_last[1].flatten(0, -2)
        is_mapped = place.whole is None and isinstance(source, GgufFiles) and source.is_mapped(rows_RB)
        return BlockRows(f"{source.tensors[name].file}: {name}", kind, rows_RB[part], is_mapped)

    def _codes(self, late: _Lazy, weight: Tensor) -> list[CodeRows]:
        """Return the rows of a matrix, which may be a part of a parameter such as an expert."""
        if weight.ndim != 2 or not weight.is_contiguous() or weight.shape[-1] != late.shape[-1]:
            return []
        first = weight.storage_offset() // weight.shape[1]
        stop = first + len(weight)
        places = sorted(self._tensors[late.name].items(), key=lambda item: item[1].row)
        inside = [(name, place) for name, place in places if first <= place.row < stop]
        if sum(place.shape[0] for _, place in inside) != len(weight):
            return []
        found: list[CodeRows] = []
        for name, place in inside:
            if not isinstance(place.format, CodedFormat):
                return []
            stored = {one: self._checkpoint.source.read(one) for one in place.stored(name)}
            where = f"{self._checkpoint.tensors[next(iter(stored))].file}: {name}"
            made = place.format.code_rows(where, stored, (place.whole or place).shape)
            for tensor in stored.values():
                drop_pages(tensor)
            made = None if made is None else _cut(made, place)
            if made is None or not same_order(made, found):
                return []
            found.append(made)
        self._count(late.name)
        return found

    def expanded(self) -> dict[str, int]:
        """Return the bytes of tensors in other formats than floats whose values were read."""
        found: Counter[str] = Counter()
        for tensors in (self._tensors[name] for name in self._filled):
            for name, place in tensors.items():
                if not isinstance(place.format, Floats):
                    found[place.format.name] += self._checkpoint.nbytes(place.stored(name))
        return dict(found.most_common())

    def materialize(self) -> None:
        """Read the late parameters that are still in use into their own memory."""
        self._scratch, self._inside = torch.empty(0, dtype=torch.uint8), ""
        self._read_last = "", self._scratch
        self._placed.clear()
        for late in self._lazy.values():
            if late.name in self._unread and late.memory is not None and (memory := late.memory()) is not None:
                self._fill(late.name, torch.from_numpy(memory).view(late.dtype).view(late.shape))
        self._unread.clear()

    def _values(self, late: _Lazy) -> Tensor:
        (tensor, place), *others = self._tensors[late.name].items()
        if not others and place.format.is_plain and place.whole is None and late.held is None:
            found = self._checkpoint.source.read(tensor)
            if found.dtype == late.dtype:
                self._count(late.name)
                return found
        size = math.prod(late.shape) * late.dtype.itemsize
        if self._scratch.nbytes < size or (late.held is not None and self._inside != late.name):
            scratch = torch.empty(size, dtype=torch.uint8, device="meta")
            self._scratch, self._inside = self._on_device(scratch), ""
        values = self._scratch[:size].view(late.dtype).view(late.shape)
        if self._inside != late.name:
            self._inside = ""
            self._fill(late.name, values)
            self._inside = late.name
        return values

    def _may_stay(self, name: str) -> bool:
        return all(isinstance(place.format, GgufBlocks | CodedFormat) for place in self._tensors[name].values())

    def _on_device(self, parameter: Tensor) -> Tensor:
        found, _ = allocate({"": parameter.shape}, parameter.dtype, self._device)
        return found[""]

    def _fill(self, name: str, parameter: Tensor) -> None:
        self._filled.add(name)
        for tensor, place in self._tensors[name].items():
            self._checkpoint.fill(tensor, place, parameter)
        self._count(name)

    def _count(self, name: str) -> None:
        if name not in self._counted:
            self._counted.add(name)
            self._bar.update(
                sum(self._checkpoint.nbytes(place.stored(one)) for one, place in self._tensors[name].items())
            )


@dataclass(frozen=True, slots=True)
class _Lazy:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: weakref.ref[NDArray[np.uint8]] | None
    held: torch.UntypedStorage | None
    """Of a parameter without memory, so that no other one takes its address."""


def _cut_blocks(kind: str, rows: Tensor, place: Place) -> Tensor | None:
    """Return the rank's part of rows of blocks; None if it does not consist of blocks."""
    head = HEADS.get(kind, 0)
    if not head or place.whole is None:
        return place.cut_stored(rows, *SIZES[kind])
    blocks = place.cut_stored(rows[..., head:], *SIZES[kind])
    return None if blocks is None else torch.cat((place.cut_rows(rows[..., :head]), blocks), -1)


def _cut(made: CodeRows, place: Place) -> CodeRows | None:
    """Return the rank's part of rows; None if it does not consist of groups."""
    if place.whole is None:
        return made
    is_whole = made.group == place.whole.shape[1]
    codes = place.cut_stored(made.codes_RI, 1)
    scales = place.cut_rows(made.scales_Rg) if is_whole else place.cut_stored(made.scales_Rg, made.group)
    if codes is None or scales is None or (made.order_I is not None and codes.shape[1] < len(made.order_I)):
        return None
    return replace(made, group=codes.shape[1] if is_whole else made.group, codes_RI=codes, scales_Rg=scales)


def same_order(made: CodeRows, others: Sequence[CodeRows]) -> bool:
    """Return True if rows have their columns in the order of others."""
    for other in others[:1]:
        if made.order_I is None or other.order_I is None:
            return made.order_I is other.order_I
        return torch.equal(made.order_I, other.order_I)
    return True


def _key(weight: Tensor) -> tuple[bool, int]:
    """Return the address of a tensor's memory, or True and that of what describes the memory that
    it lacks."""
    storage = weight.untyped_storage()
    return weight.is_meta, storage._cdata if weight.is_meta else storage.data_ptr()


def untouched(device: torch.device) -> bool:
    """Return True if memory takes no room on a device before it is written."""
    return device.type == "cpu"


def late(parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a parameter for a ``Linear`` or a table, without values until the model is packed; see
    ``LazyParameters.late``."""
    return parameters.late(name) if isinstance(parameters, LazyParameters) else parameters[name]


def allocate(
    shapes: Mapping[str, Iterable[int]],
    dtype: torch.dtype,
    device: torch.device,
    kept: Mapping[str, torch.dtype] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, weakref.ref[NDArray[np.uint8]]]]:
    """Return uninitialised parameters of ``dtype``, or of the type in ``kept``, and on a CPU a weak
    reference to the memory of each. Raise ``ResourceExhausted`` with the wanted bytes if memory, or
    on a CPU the address space, does not suffice."""
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
        wanted = sum(math.prod(shape) * kept.get(name, dtype).itemsize for name, shape in shapes.items())
        # On a CPU it is not written before it is needed, so a limit of another kind was met.
        what = "address space (limits: ulimit -v, vm.overcommit_memory)" if untouched(device) else "memory"
        raise ResourceExhausted(f"the model needs {size_words(wanted)} of {what} on {device}: {error}") from error
    return parameters, memories
