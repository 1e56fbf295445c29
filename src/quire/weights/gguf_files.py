"""GGUF files as a source of weights, under the names that a family's checkpoints have."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.contracts.weights import TensorHeader, WeightFormat
from quire.weights.floats import DTYPES, FLOATS
from quire.weights.gguf_blocks import BLOCKS, NVFP4, GgufBlocks, rows_of_file
from quire.weights.gguf_container import GgufParts
from quire.weights.mapped_pages import drop_pages

SMALL = 1 << 16
"""Numbers of a tensor such as a norm."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensors of a GGUF file that make one of a checkpoint.

    ``change`` maps them to it. It may move rows only, so that it serves rows of blocks as well as
    of numbers; with ``expanded`` it is given float32 values and may change them. Tensors in several
    formats are expanded, too.
    """

    tensors: tuple[str, ...]
    change: Callable[..., Tensor] = _same
    expanded: bool = False


def _like(shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of a shape, with values if it is small: PyTorch imports 900 modules for
    arithmetic without them."""
    return torch.ones(shape) if math.prod(shape) <= SMALL else torch.empty(shape, device="meta")


class GgufFiles:
    """``WeightSource`` over a GGUF file, or the parts of one.

    ``origins``: the tensors by a checkpoint's names. Tensors of the file that make none of these
    have their own names, except ``unused`` ones. ``CheckpointError`` if an origin's tensors do not
    fit together.
    """

    configuration = "its metadata"

    def __init__(
        self, path: Path, parts: GgufParts, origins: Mapping[str, Origin], unused: Container[str] = ()
    ) -> None:
        self.path, self._parts, self._origins = path, parts, dict(origins)
        used = {tensor for origin in origins.values() for tensor in origin.tensors}
        self._origins |= {name: Origin((name,)) for name in parts.places if name not in used and name not in unused}
        self.tensors = {name: self._header(name, origin) for name, origin in self._origins.items()}
        self._maps: dict[Path, Tensor] = {}

    def format(self, name: str, usual: WeightFormat) -> WeightFormat:
        """See ``WeightSource``. ``Unsupported`` for a format that is not expanded."""
        if name not in self.tensors:
            return usual
        kind = self.tensors[name].dtype
        if kind in DTYPES:
            return FLOATS
        if kind not in BLOCKS:
            (tensor, *_) = self._origins[name].tensors
            known = ", ".join((*DTYPES, *BLOCKS))
            raise Unsupported(
                f"{self.tensors[name].file}: {tensor} is in {kind}, which is not supported; known formats: {known}"
            )
        return GgufBlocks(kind)

    def read(self, name: str) -> Tensor:
        """See ``WeightSource``. Blocks are rows of bytes as they lie in memory."""
        origin = self._origins[name]
        if self._expands(origin):
            return origin.change(*map(self._expanded, origin.tensors))
        raw = [self._raw(one) for one in origin.tensors]
        made = origin.change(*raw)
        if self.tensors[name].dtype == NVFP4:
            made = rows_of_file(made, origin.change(*map(self._units, origin.tensors)))
        if not self.is_mapped(made):
            for tensor in raw:
                drop_pages(tensor)
        return made

    def is_mapped(self, tensor: Tensor) -> bool:
        """Return True if a tensor that was read is a part of a map itself, not a copy."""
        return any(
            tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in self._maps.values()
        )

    def slices(self) -> dict[str, Any]:
        """See ``WeightSource``. ``transformers`` runs no GGUF file."""
        raise Unsupported(f"{self.path}: a GGUF file runs in Quire's own architectures only")

    def close(self) -> None:
        """See ``WeightSource``. A map is closed with its last tensor."""
        self._maps.clear()

    def _header(self, name: str, origin: Origin) -> TensorHeader:
        headers = [self._parts.header(one) for one in origin.tensors]
        file = self._parts.places[origin.tensors[0]].path
        try:
            shape = origin.change(*(_like(header.shape) for header in headers)).shape
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = " and ".join(str(list(header.shape)) for header in headers)
            raise CheckpointError(
                f"{file}: {' and '.join(origin.tensors)} have shape {shapes}, of which {name} cannot be made"
            ) from error
        return TensorHeader(file=file, shape=tuple(shape), dtype="F32" if self._expands(origin) else headers[0].type)

    def _expands(self, origin: Origin) -> bool:
        return origin.expanded or len({self._parts.header(one).type for one in origin.tensors}) > 1

    def _raw(self, tensor: str) -> Tensor:
        file, header = self._parts.places[tensor], self._parts.header(tensor)
        if file.path not in self._maps:
            try:
                size = file.path.stat().st_size
                self._maps[file.path] = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{file.path} cannot be mapped: {error}") from error
        data = self._maps[file.path][header.start : header.start + header.nbytes]
        if len(data) < header.nbytes:
            raise CheckpointError(f"{file.path} has become shorter while it was read")
        if header.type in DTYPES:
            return data.view(DTYPES[header.type]).view(header.shape)
        return data.view(*header.shape[:-1], -1)

    def _expanded(self, tensor: str) -> Tensor:
        header = self._parts.header(tensor)
        values = torch.empty(header.shape)
        name = f"{self._parts.places[tensor].path}: {tensor}"
        form = FLOATS if header.type in DTYPES else GgufBlocks(header.type)
        raw = self._raw(tensor)
        rows = rows_of_file(raw, self._units(tensor)) if header.type == NVFP4 else raw
        form.expand(name, {tensor: rows}, values)
        drop_pages(raw)
        return values

    def _units(self, tensor: str) -> Tensor:
        """Return float32 ``[..., R, 1]``: what the file has for the scales of a tensor's rows."""
        rows, (name, _) = self._parts.header(tensor).shape[:-1], unit_names(tensor)
        if name not in self._parts.places:
            return torch.ones(*rows, 1)
        found = self._raw(name)
        stacks = rows[:-1]
        if found.dtype != torch.float32 or found.numel() not in (1, math.prod(stacks)):
            raise CheckpointError(
                f"{self._parts.places[name].path}: {name} has {found.numel()} numbers in {self._parts.header(name).type}; "
                f"expected one, or one for each of {math.prod(stacks)} matrices, in F32"
            )
        return found.view(*stacks, 1, 1).expand(*rows, 1) if found.numel() > 1 else found.view(()).expand(*rows, 1)


def unit_names(tensor: str) -> tuple[str, str]:
    """Return the names of what the scales of a tensor in NVFP4 are multiplied by, and of the same
    for activations, which is not read."""
    stem = tensor.removesuffix(".weight")
    return f"{stem}.scale", f"{stem}.input_scale"
