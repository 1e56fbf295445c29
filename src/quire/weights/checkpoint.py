"""A checkpoint, held against the places of a model: all faults of the files are found in their
headers, before any weight is read.

A family defines a ``NameTable``. It maps each checkpoint tensor to the ``Place`` that it fills in a
parameter of the model. Several tensors may share a parameter (q, k and v in one fused projection).
A parameter is filled slice by slice, or packed from the file, so loading needs no more memory than
the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.base.errors import CheckpointError
from quire.contracts.weights import StoredTensor, WeightSource
from quire.weights.floats import DTYPES
from quire.weights.gguf_blocks import BLOCKS, SIZES
from quire.weights.places import Place
from quire.weights.safetensors_files import some

_COMPARED = 4096
"""Rows of a table compared at a time."""


class Checkpoint:
    """The open files of one checkpoint; a context manager, which closes them."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.path, self.tensors = source.path, source.tensors

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.source.close()

    def choose(self, name_tables: Sequence[Mapping[str, Place]]) -> Mapping[str, Place]:
        """Return the spelling with the fewest missing tensors, the first among equals, in the
        formats of the files."""
        places = min(name_tables, key=lambda places: sum(name not in self.tensors for name in _stored(places)))
        return {
            name: place
            if (found := self.source.format(name, place.format)) == place.format
            else replace(place, format=found)
            for name, place in places.items()
        }

    def check(self, places: Mapping[str, Place], ignorable: Container[str] = ()) -> None:
        """Raise ``CheckpointError`` unless the files hold exactly these tensors, with these shapes
        and types. ``ignorable`` names may be present too, and are not read."""
        stored = _stored(places)
        self.refuse_names(
            [name for name in stored if name not in self.tensors],
            [name for name in self.tensors if name not in stored and name not in ignorable],
            len(stored),
        )
        for name, wanted in stored.items():
            header = self.tensors[name]
            if header.shape != wanted.shape:
                raise self.misshapen(name, header.shape, wanted.shape)
            if header.dtype not in wanted.dtypes:
                raise CheckpointError(
                    f"{header.file}: {name} has dtype {header.dtype}; expected one of {list(wanted.dtypes)}"
                )

    def refuse_names(self, missing: Collection[str], surplus: Sequence[str], expected: int) -> None:
        """Raise ``CheckpointError`` for ``missing`` tensors, out of ``expected``, or ``surplus``
        tensors of the model that config.json describes."""
        if missing:
            raise CheckpointError(f"{self.path} lacks {len(missing)} of {expected} tensors: {some(missing)}")
        if surplus:
            found = self.tensors.get(surplus[0])
            where = self.path if found is None else found.file
            raise CheckpointError(
                f"{where}: the model that {self.source.configuration} describes has no place for {some(surplus)}"
            )

    def misshapen(self, name: str, found: Iterable[int], expected: Iterable[int]) -> CheckpointError:
        """Return the error of a tensor whose shape contradicts config.json."""
        where = self.tensors[name].file if name in self.tensors else self.path
        return CheckpointError(
            f"{where}: {name} has shape {list(found)}; {self.source.configuration} makes it {list(expected)}"
        )

    def check_tied(self, head: str, embedding: str) -> None:
        """Raise ``CheckpointError`` if the head of a model that config.json ties to its embedding
        is stored with other values. Reads both tensors if both are present."""
        if head not in self.tensors:
            return
        if self.tensors[head].shape == self.tensors[embedding].shape:
            parts = zip(*(torch.split(self.source.read(name), _COMPARED) for name in (head, embedding)), strict=True)
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
            # Numbers of quantised formats need no more than bfloat16.
            kind = "BF16" if header.dtype in BLOCKS else header.dtype
            if kind in elements:
                elements[kind] += math.prod(header.shape)
        return DTYPES[max(elements, key=lambda name: elements[name])]

    def fill(self, name: str, place: Place, parameter: Tensor) -> None:
        """Write the weights of tensor ``name`` to their rows of ``parameter``."""
        stored = {one: self.source.read(one) for one in place.stored(name)}
        place.format.expand(
            f"{self.tensors[name].file}: {name}", stored, parameter.narrow(0, place.row, place.shape[0])
        )

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the bytes of tensors in their files."""
        return sum(self._bytes_of(name) for name in names)

    def formats(self, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of tensors in their files, by the types of their elements or the
        formats of their blocks, the greatest first."""
        found: Counter[str] = Counter()
        for name in names:
            found[self.tensors[name].dtype] += self._bytes_of(name)
        return dict(found.most_common())

    def _bytes_of(self, name: str) -> int:
        header = self.tensors[name]
        numbers, nbytes = SIZES[header.dtype]
        return math.prod(header.shape) // numbers * nbytes


def _stored(places: Mapping[str, Place]) -> dict[str, StoredTensor]:
    """Map every tensor that the files must hold to its shape and accepted element types."""
    return {one: tensor for name, place in places.items() for one, tensor in place.stored(name).items()}
