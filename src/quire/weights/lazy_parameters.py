"""A model's parameters while it is loaded: each is read when it is needed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from quire.base.errors import ResourceExhausted
from quire.weights.checkpoint import Checkpoint
from quire.weights.places import Place, parameter_dtypes, parameter_shapes


class LazyParameters(Mapping[str, Tensor]):
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
        """``dtype``: of parameters whose places give no other. ``bar`` counts the bytes read.
        ``ResourceExhausted`` if the weights do not fit."""
        self._checkpoint, self._bar = checkpoint, bar
        shapes = parameter_shapes(places)
        self._tensors: dict[str, dict[str, Place]] = {name: {} for name in shapes}
        for tensor, place in places.items():
            self._tensors[place.parameter][tensor] = place
        self._parameters, self._memories = allocate(shapes, dtype, device, parameter_dtypes(places))
        self._unread = set(shapes)
        self._lazy: dict[int, _Lazy] = {}
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
        """Return a parameter without values: before ``materialize`` only its shape and type are
        valid, and ``read`` returns its values."""
        parameter = self._parameters[name]
        if name in self._unread and name in self._memories:
            memory = self._memories[name]
            self._lazy[parameter.data_ptr()] = _Lazy(name, parameter.dtype, tuple(parameter.shape), memory)
            return parameter
        return self[name]

    def release(self) -> None:
        """Drop the references to the parameters, so that only the model holds them."""
        self._parameters.clear()

    def read(self, weight: Tensor) -> Tensor:
        """Return the values of ``weight``, a parameter or a part of one, until the next call."""
        late = self._lazy.get(weight.untyped_storage().data_ptr())
        if late is None or late.name not in self._unread:
            return weight
        values = self._values(late)
        return values.as_strided(weight.shape, weight.stride(), values.storage_offset() + weight.storage_offset())

    def materialize(self) -> None:
        """Read the late parameters that are still in use into their own memory."""
        self._scratch, self._inside = torch.empty(0, dtype=torch.uint8), ""
        for late in self._lazy.values():
            if late.name in self._unread and (memory := late.memory()) is not None:
                self._fill(late.name, torch.from_numpy(memory).view(late.dtype).view(late.shape))
        self._unread.clear()

    def _values(self, late: _Lazy) -> Tensor:
        (tensor, place), *others = self._tensors[late.name].items()
        if not others and place.format.is_plain:
            found = self._checkpoint.source.read(tensor)
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
            self._bar.update(
                sum(self._checkpoint.nbytes(place.stored(one)) for one, place in self._tensors[name].items())
            )


@dataclass(frozen=True, slots=True)
class _Lazy:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: weakref.ref[NDArray[np.uint8]]


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
