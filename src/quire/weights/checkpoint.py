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

from quire.base.errors import CheckpointError, some
from quire.contracts.weights import StoredTensor, WeightSource
from quire.weights.floats import DTYPES, Floats
from quire.weights.gguf_blocks import BLOCKS, SIZES
from quire.weights.mapped_pages import drop_pages
from quire.weights.places import Place
from quire.weights.scales import parts

FURTHER_SIZES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), (1, 1)),
    **dict.fromkeys(("U16",), (1, 2)),
    **dict.fromkeys(("U32",), (1, 4)),
    **dict.fromkeys(("U64", "C64"), (1, 8)),
}
"""Types of safetensors files that GGUF files lack, as in ``SIZES``."""
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
        """Return the spelling with the fewest missing tensors, then the fewest of another shape,
        the first among equals, in the formats of the files."""

        def faults(places: Mapping[str, Place]) -> tuple[int, int]:
            stored = _stored(places)
            there = [(self.tensors[name].shape, wanted) for name, wanted in stored.items() if name in self.tensors]
            wrong = sum(shape not in (wanted.shape, *wanted.others) for shape, wanted in there)
            return len(stored) - len(there), wrong

        found = [{name: self._in_format(name, place) for name, place in places.items()} for places in name_tables]
        return min(found, key=faults)

    def _in_format(self, name: str, place: Place) -> Place:
        found = self.source.format(name, place.format)
        return place if found == place.format else replace(place, format=found)

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
            if header.shape not in (wanted.shape, *wanted.others):
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
        if head not in self.tensors or embedding not in self.tensors:
            return
        if not self.are_equal(head, embedding):
            raise self.untied(head, embedding)

    def are_equal(self, first: str, second: str) -> bool:
        """Return whether two tables have the same values. Reads both."""
        if self.tensors[first].shape != self.tensors[second].shape:
            return False
        tables = [self.source.read(name) for name in (first, second)]
        pairs = zip(*(torch.split(table, _COMPARED) for table in tables), strict=True)
        return all(
            torch.equal(one.float(), other.float()) and drop_pages(one) + drop_pages(other) >= 0 for one, other in pairs
        )

    def untied(self, head: str, embedding: str) -> CheckpointError:
        """Return the error of a stored head that contradicts ``tie_word_embeddings``."""
        where = self.tensors[head].file if head in self.tensors else self.path
        return CheckpointError(
            f"{where}: {head} differs from {embedding}, but tie_word_embeddings in config.json makes them one; set that to "
            "false to run the stored head, or remove the tensor"
        )

    def dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the element type of most weights among these tensors (a few norms may have another
        type); float32 if none has a float type. Codes of other formats have no tensor of their
        name, or no such type."""
        elements = dict.fromkeys(DTYPES, 0)
        for header in (self.tensors[name] for name in names if name in self.tensors):
            # Numbers of quantised formats need no more than bfloat16.
            kind = "BF16" if header.dtype in BLOCKS else header.dtype
            if kind in elements:
                elements[kind] += math.prod(header.shape)
        return DTYPES[max(elements, key=lambda name: elements[name])]

    def fill(self, name: str, place: Place, parameter: Tensor) -> None:
        """Write the weights of tensor ``name`` to their rows of ``parameter``."""
        out = parameter.narrow(0, place.row, place.shape[0])
        stored = {one: self.source.read(one) for one in place.stored(name)}
        label = f"{self.tensors[next(iter(stored))].file}: {name}"
        if place.format.is_plain and place.shape:
            values = place.cut(stored[name])
            for rows in parts(len(values), values[:1].numel()):
                place.format.expand(label, {name: values[rows]}, out[rows])
                drop_pages(values[rows])
            return
        if place.whole is None:
            place.format.expand(label, stored, out)
        else:
            whole = torch.empty(place.whole.shape, dtype=out.dtype, device=out.device)
            place.format.expand(label, stored, whole)
            out.copy_(place.cut(whole))
        for tensor in stored.values():
            drop_pages(tensor)

    def nbytes(self, names: Iterable[str]) -> int:
        """Return the bytes of tensors in their files."""
        return sum(self._bytes_of(name) for name in names)

    def formats(self, places: Mapping[str, Place]) -> dict[str, int]:
        """Return the bytes of tensors in their files, by their formats, or the types of their
        elements if these are floats, the greatest first."""
        found: Counter[str] = Counter()
        for name, place in places.items():
            stored = list(place.stored(name))
            kind = self.tensors[stored[0]].dtype if isinstance(place.format, Floats) else place.format.name
            found[kind] += self.nbytes(stored)
        return dict(found.most_common())

    def _bytes_of(self, name: str) -> int:
        header = self.tensors[name]
        numbers, nbytes = FURTHER_SIZES.get(header.dtype) or SIZES[header.dtype]
        return math.prod(header.shape) // numbers * nbytes


def _stored(places: Mapping[str, Place]) -> dict[str, StoredTensor]:
    """Map every tensor that the files must hold to its shape and accepted element types."""
    return {one: tensor for name, place in places.items() for one, tensor in place.stored(name).items()}
