"""Storage of the rows of attention layers: write, read, copy. No sequences here.

How rows lie is the format's (``contracts.kv_format``); its planes are what is kept, copied and
given to files. A latent layer has one row per token, ``[N, 1, row]``, that is the key of all heads;
its value is the first Dv columns, so V is a view of K.

Letters: S slots of the pool; H KV heads; Dk, Dv head sizes of K and V; N rows.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, ResourceExhausted
from quire.base.uploads import uploaded
from quire.contracts.kv_format import Geometry, KVFormat, PlainRows
from quire.contracts.layers import CrossAttention, FullAttention, LatentAttention, WindowedAttention
from quire.contracts.rows import RowKernels
from quire.kv.forward_need import SlotCopy, SlotRange, breaks_of, slot_index
from quire.ops.rows import REFERENCE_ROWS

KeyValueSpec: TypeAlias = FullAttention | WindowedAttention
"""Layers that keep K and V of every token."""
PagedSpec: TypeAlias = KeyValueSpec | LatentAttention
"""Layers that keep rows of tokens in pages."""
StoredSpec: TypeAlias = PagedSpec | CrossAttention
"""Layers that keep rows in pages, of tokens or of an encoder."""


def geometry(spec: StoredSpec) -> Geometry:
    """Return the shape of a layer's rows."""
    if isinstance(spec, LatentAttention):
        return Geometry(1, spec.row_dim, spec.value_dim, True)
    return Geometry(spec.num_kv_heads, spec.head_dim, spec.value_dim, False)


def bytes_per_token(specs: Sequence[PagedSpec], format: KVFormat) -> int:
    """Return the bytes that these layers keep of one token."""
    return sum(format.bytes_per_row(geometry(spec)) for spec in specs)


def check_tensor(what: str, given: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ``InvalidArgument`` unless the tensor is of this type, shape and kind of device."""
    if tuple(given.shape) != shape or given.dtype != dtype or given.device.type != device.type:
        raise InvalidArgument(
            f"{what} is {given.dtype} {tuple(given.shape)} on {given.device}; {dtype} {shape} on {device} is needed"
        )


FEW_RUNS = 8
"""Runs of slots from which on rows are copied by an index."""
MAPPED = 4 << 20
"""Bytes from which on zeros have a mapping of their own. NumPy's may lie in memory that the process
has kept (``kernels.cpu_process``), and is then zeroed at once."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros in host memory that the operating system maps when they are first touched.
    ``torch.zeros`` touches all at once: seconds, and gigabytes that may never be needed."""
    size = math.prod(shape) * dtype.itemsize
    if size < MAPPED or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.zeros(size + 64, dtype=np.uint8)
        aligned = -raw.ctypes.data % 64
        return torch.from_numpy(raw[aligned : aligned + size]).view(dtype).view(shape)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8)).view(dtype).view(shape)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, advice: str) -> Tensor:
    """Return zeros on the device; ``ResourceExhausted`` (``what`` .. ``advice``) without memory.
    ``what`` says the size of the whole allocation."""
    try:
        return lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        part = f"no memory for {math.prod(shape) * dtype.itemsize / 2**30:,.2f} GiB of it"
        raise ResourceExhausted(f"{what} on {device}, which has {part}; {advice}") from error


IN_PARALLEL = 4 << 20
"""Bytes above which torch copies host memory, with several threads. These wait for each other. If
the processors have other work, that takes many times longer than a smaller copy."""


def copy_rows(target: Tensor, source: Tensor, start: int = 0) -> None:
    """Copy rows into the rows of ``target`` from ``start`` on, of one shape, on any devices. Other
    threads of Python run meanwhile."""
    stop = start + source.shape[0]
    if not 0 <= start <= stop <= target.shape[0] or source.shape[1:] != target.shape[1:]:
        raise InvalidArgument(f"rows {tuple(source.shape)} do not fit rows {start} on of {tuple(target.shape)}")
    is_small = source.nbytes <= IN_PARALLEL and source.dtype == target.dtype
    if is_small and source.is_cpu and target.is_cpu and source.is_contiguous() and target.is_contiguous():
        # By address: views of both, for a library that copies, take longer than the copy.
        ctypes.memmove(target.data_ptr() + start * target.stride(0) * target.itemsize, source.data_ptr(), source.nbytes)
    else:
        target[start:stop].copy_(source)


def _taken(rows_SHD: Tensor, slots: NDArray[np.int64]) -> Tensor:
    """Return a copy of rows, in one thread if it is small, as ``copy_rows``. Rows in a row, which
    are most of those in fresh pages, are copied at once."""
    if rows_SHD.is_cpu and slots.size and not breaks_of(slots).size:
        found = torch.empty((slots.size, *rows_SHD.shape[1:]), dtype=rows_SHD.dtype)
        copy_rows(found, rows_SHD[int(slots[0]) : int(slots[0]) + slots.size])
        return found
    if rows_SHD.is_cpu and 0 < slots.size * rows_SHD.shape[1:].numel() * rows_SHD.itemsize <= IN_PARALLEL:
        return torch.from_numpy(rows_SHD.view(torch.uint8).numpy().take(slots, axis=0)).view(rows_SHD.dtype)
    return rows_SHD.index_select(0, uploaded(slots, rows_SHD.device))


class PagedStorage:
    """The rows of all layers of one class. Each plane of layers of equal geometry is a slice of one
    tensor ``[L, S, ...]``, so that a copy of pages is one operation for all of them."""

    def __init__(
        self,
        specs: Sequence[StoredSpec],
        num_slots: int,
        format: KVFormat,
        device: torch.device,
        *,
        padding: bool = False,
        row_kernels: RowKernels = REFERENCE_ROWS,
        absent: Collection[int] = (),
    ) -> None:
        """Take memory for ``num_slots`` slots. ``padding``: and for one more, which no page has:
        padded forwards write the rows there that no token has. ``row_kernels`` copy slots.
        ``absent``: layers that other stages hold, without rows here."""
        self.num_slots = num_slots
        self._row_kernels = row_kernels
        self.format = format
        self.device = device
        self._shapes = [geometry(spec) for spec in specs]
        groups: dict[Geometry, list[int]] = {}
        for layer, shape in enumerate(self._shapes):
            if layer not in absent:
                groups.setdefault(shape, []).append(layer)
        self._tensors: list[Tensor] = []
        rows = sum(format.bytes_per_row(shape) * len(layers) for shape, layers in groups.items())
        whole_pool = rows * num_slots / 2**30
        need = f"the KV pool needs {whole_pool:,.2f} GiB"
        self.planes: list[dict[str, Tensor]] = [{} for _ in specs]
        """By layer and name, ``[S, ...]``; nothing for a layer that is not here."""
        for shape, layers in groups.items():
            for name, plane in format.planes(shape).items():
                # Zeros: a kernel may give a row that was never written the weight 0, and 0 * NaN
                # is NaN.
                whole = (len(layers), num_slots + padding, *plane.shape)
                self._tensors.append(allocate(whole, plane.dtype, device, need, "give a smaller kv_cache_memory"))
                for layer, tensor in zip(layers, self._tensors[-1].unbind(), strict=True):
                    self.planes[layer][name] = tensor
        self.layers = {
            layer: format.view(self._shapes[layer], planes) for layer, planes in enumerate(self.planes) if planes
        }
        """What kernels take of each layer that is here."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors)

    def write(self, layer: int, slots_N: Tensor, k_NHD: Tensor, v_NHD: Tensor | None = None) -> None:
        """Write rows to slots (int64, on the device). ``v`` is None exactly for a latent layer."""
        self.layers[layer].write(slots_N, k_NHD, v_NHD)

    def write_run(self, layer: int, start: int, k_NHD: Tensor, v_NHD: Tensor | None = None) -> None:
        """Write rows, on any device, to slots in a row; several times faster than ``write``."""
        self.put_run(layer, start, self.pack(layer, k_NHD, v_NHD))

    def read(self, layer: int, slots: NDArray[np.int64]) -> PlainRows:
        """Return fresh rows of these slots."""
        return self.format.expand(self._shapes[layer], self.take(layer, slots))

    # -- planes, as files have them ----------------------------------------------------------------

    def pack(self, layer: int, k_NHD: Tensor, v_NHD: Tensor | None) -> Mapping[str, Tensor]:
        """Return the planes of a layer's rows."""
        return self.format.pack(self._shapes[layer], k_NHD, v_NHD)

    def take(self, layer: int, slots: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return fresh planes of these slots, ``[N, ...]``."""
        return {name: _taken(plane, slots) for name, plane in self.planes[layer].items()}

    def lend(self, layer: int, slots: NDArray[np.int64]) -> list[Tensor]:
        """Return the planes of these slots one after the other, in pieces that may be views."""
        breaks = breaks_of(slots)
        if self.device.type != "cpu" or breaks.size >= FEW_RUNS:
            return list(self.take(layer, slots).values())
        ends = pairwise([0, *breaks.tolist(), slots.size])
        runs = [slice(int(slots[low]), int(slots[low]) + high - low) for low, high in ends]
        return [plane[run] for plane in self.planes[layer].values() for run in runs]

    def put(self, layer: int, slots: NDArray[np.int64], planes: Mapping[str, Tensor]) -> None:
        """Write planes of the device to slots that the host knows."""
        slots_N = uploaded(slots, self.device)
        for name, plane in planes.items():
            self.planes[layer][name].index_copy_(0, slots_N, plane)

    def put_run(self, layer: int, start: int, planes: Mapping[str, Tensor]) -> None:
        """Write planes, on any device, to slots in a row; several times faster than ``put``."""
        for name, plane in planes.items():
            copy_rows(self.planes[layer][name], plane, start)

    # -- slots, in any format ----------------------------------------------------------------------

    def copy(self, copies: Sequence[SlotCopy]) -> None:
        """Copy slots, in every layer."""
        if copies and self._tensors:
            source = slot_index(SlotRange(part.source, part.count) for part in copies)
            target = slot_index(SlotRange(part.target, part.count) for part in copies)
            self._row_kernels.copy_slots(self._tensors, np.stack((source, target)))

    def blank(self, ranges: Sequence[SlotRange]) -> None:
        """Zero slots, in every layer. Range by range: an index of slots takes ten times as long."""
        for part in ranges:
            for tensor in self._tensors:
                tensor[:, part.start : part.start + part.count].zero_()

    def blank_at(self, layer: int, slots_N: Tensor) -> None:
        """Zero slots (int64, on the device) of one layer."""
        for plane in self.planes[layer].values():
            plane.index_fill_(0, slots_N, 0)
