"""The state file (``.quire``): metadata and named tensors in a checked safetensors container.

This module is the container only; its callers decide the content. The format is documented in
``docs/statefile.md`` and encoded in ``header``. The header holds one checksum per tensor and one of
itself, so every damaged, missing or surplus byte is noticed. Nothing in a file is ever executed.

Tensors are written one at a time, as they are produced, and read as views of the mapped file. A
file appears under its name complete and synced, or not at all.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.base import interrupts
from quire.base.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, Unsupported
from quire.base.host_link import host_link
from quire.statefile.atomic_file import check_regular, os_errors, replacing
from quire.statefile.header import JSON, HeaderDraft, HeaderLimits, TensorSpec, checksum, read_header, some

Buffer: TypeAlias = bytes | bytearray | memoryview


def plan_of(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Return the plan for tensors that exist already."""
    return [TensorSpec(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()]


# Writing


def write_state(
    target: str | os.PathLike[str] | BinaryIO,
    metadata: Mapping[str, JSON],
    plan: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, Tensor]],
) -> int:
    """Write a state and return its size in bytes.

    ``tensors`` yields every tensor of ``plan`` once, in any order; each is hashed, written and let
    go before the next is asked for. Any device, any strides. ``metadata`` is JSON: string keys,
    finite numbers, at most 64 levels; tuples are stored as lists.

    A path is replaced in one step, after everything was synced to the disk. On any failure, an
    exception of the iterator included (it passes as it is), the earlier file stays untouched and no
    other is left. A killed process may leave a temporary file until the next save to the same name.

    A binary file object must be seekable and at its end. It is neither synced nor closed; what it
    holds is no state file before the call has returned.

    Errors: ``InvalidArgument`` (metadata, plan or tensors malformed or not matching; a target that
    cannot be written), ``NotFound`` (no such directory), ``ResourceExhausted`` (disk full),
    ``QuireError`` (device broke).
    """
    draft = _draft(metadata, plan)
    if isinstance(target, str | os.PathLike):
        path = Path(target)
        label = f"state file {str(path)!r}"
        with replacing(path, label) as sink:
            _write(sink, draft, tensors, label)
    else:
        _check_sink(target)
        _write(target, draft, tensors, "the given file object")
    return draft.file_size


def to_bytes(metadata: Mapping[str, JSON], plan: Sequence[TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Return a state as the bytes that ``write_state`` would write; ``read_state`` takes them."""
    draft = _draft(metadata, plan)
    sink = io.BytesIO()
    # At full size from the start, the buffer is never copied to grow, and getvalue() shares it.
    sink.seek(draft.file_size - 1)
    sink.write(b"\0")
    sink.seek(0)
    _write(sink, draft, tensors, "the state")
    return sink.getvalue()


def _draft(metadata: Mapping[str, JSON], plan: Sequence[TensorSpec]) -> HeaderDraft:
    _require_little_endian()
    return HeaderDraft(metadata, plan)


def _write(sink: BinaryIO, draft: HeaderDraft, tensors: Iterable[tuple[str, Tensor]], label: str) -> None:
    """Write the tensors, each at its final place, then the header with their checksums."""
    with os_errors(label):
        base = sink.tell()
    checksums: dict[str, str] = {}
    for name, tensor in tensors:
        _check_tensor(name, tensor, draft, checksums)
        checksums[name] = _put(sink, base + draft.data_start + draft.spans[name][0], tensor, label)
        del tensor  # the next one may need its memory
        interrupts.check()
    missing = draft.specs.keys() - checksums.keys()
    if missing:
        raise InvalidArgument(
            f"{len(missing)} of {len(draft.specs)} planned tensors did not come: {some(sorted(missing))}"
        )
    with os_errors(label):
        sink.seek(base)
        _write_all(sink, memoryview(draft.encode(checksums)))
        sink.seek(base + draft.file_size)
        sink.flush()


def _check_tensor(name: str, tensor: Tensor, draft: HeaderDraft, written: Mapping[str, str]) -> None:
    spec = draft.specs.get(name)
    if spec is None:
        raise InvalidArgument(f"tensor {name!r} is not in the plan, which has {some(draft.specs)}")
    if name in written:
        raise InvalidArgument(f"tensor {name!r} came twice; each planned tensor is written once")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise InvalidArgument(f"tensor {name!r} must be a dense torch.Tensor with data, got {type(tensor).__name__}")
    if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise InvalidArgument(
            f"tensor {name!r} was planned as {spec.dtype} {list(spec.shape)}, "
            f"it came as {tensor.dtype} {list(tensor.shape)}"
        )


def _put(sink: BinaryIO, offset: int, tensor: Tensor, label: str) -> str:
    data = bytes_of(tensor)
    with os_errors(label):
        sink.seek(offset)
        _write_all(sink, data)
    return checksum(data)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements in row-major order in host memory; copy only those in another layout."""
    found, link = tensor.detach().resolve_neg(), host_link(tensor.device)
    dense = found.cpu().contiguous() if link is None else link.to_host(found)
    # Not reshape(-1): a contiguous tensor of one element may have any stride; a byte view needs 1.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().data


def _write_all(sink: BinaryIO, data: memoryview) -> None:
    # An unbuffered file may take less than it is offered (2 GiB at most on Linux).
    while len(data):
        taken = sink.write(data)
        if not taken:
            raise OSError(errno.EIO, "the file object took no bytes")
        data = data[taken:]


def _check_sink(target: BinaryIO) -> None:
    accepted = "a state is written to a path, or to a writable, seekable, binary file object that stands at its end"
    try:
        if isinstance(target, io.TextIOBase) or not target.writable():
            raise InvalidArgument(f"{accepted}; got {type(target).__name__} {getattr(target, 'mode', '')!r}")
        here = target.tell()
        end = target.seek(0, os.SEEK_END)
        target.seek(here)
    except InvalidArgument:
        raise
    except (AttributeError, OSError, ValueError) as error:
        raise InvalidArgument(f"{accepted}; got {type(target).__name__} ({error})") from None
    if here != end:
        raise InvalidArgument(f"{accepted}; it stands at byte {here} of {end}")


# Reading


def read_state(
    source: str | os.PathLike[str] | Buffer,
    *,
    verify: bool = True,
    limits: Callable[[int], HeaderLimits] | None = None,
) -> StateFile:
    """Open a state: a path (memory-mapped) or the bytes of one (kept, not copied).

    The header is always checked completely, with its checksum; ``verify`` adds the checksums of the
    tensors, which reads every byte once. ``limits``: from the size of the file, in bytes, to what
    its header may hold at most; None: what the format allows.

    Errors: ``DataLoss`` (truncated, altered, malformed, trailing bytes, no safetensors file),
    ``InvalidArgument`` (undamaged, but another format or version, or an unknown dtype: expected and
    found; or no regular file, or no permission), ``NotFound`` (no such file).
    """
    _require_little_endian()
    if isinstance(source, str | os.PathLike):
        label = f"state file {os.fspath(source)!r}"
        view = _map_file(Path(source), label)
    else:
        label = "the given state"
        view = _bytes_view(source)
    state = StateFile(view, label, None if limits is None else limits(len(view)))
    if verify:
        state.verify()
    return state


def header_size(source: Buffer, there: int) -> int:
    """Return the number of a state's first bytes that are needed to open it. ``there`` of them are
    present; 8 if these are too few to say."""
    view = _bytes_view(source)
    return 8 if there < 8 else min(8 + int.from_bytes(view[:8], "little"), len(view))


class StateFile:
    """An open state, made by ``read_state``.

    Tensors are views of the mapped file or of the given bytes: treat them as read-only. Writing
    into a view of a file changes the memory of this process only, never the file; writing into a
    view of ``bytes`` changes an object that Python takes to be constant. If another process cuts
    the file short while it is mapped, reading the lost part ends this process (SIGBUS);
    ``write_state`` never cuts files, it replaces them.
    """

    def __init__(self, view: memoryview, label: str, limits: HeaderLimits | None) -> None:
        self._header = read_header(view, label, limits)
        self._view: memoryview | None = view
        self._flat: dict[torch.dtype, Tensor] = {}
        """The whole elements of ``_view``, in the dtypes that were asked for."""
        self._label = label

    @property
    def metadata(self) -> Mapping[str, JSON]:
        """Return the mapping that was given to ``write_state``."""
        return self._header.metadata

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in the order of the writer's plan."""
        return tuple(self._header.specs)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name, dtype and shape of each tensor. Reads no data."""
        return self._header.specs

    @property
    def spans(self) -> Mapping[str, tuple[int, int]]:
        """Return the range of each tensor's bytes, counted from ``address``: the first one, and the
        one behind the last."""
        return self._header.spans

    @property
    def checksums(self) -> Mapping[str, str]:
        """Return the checksum that each tensor must have, as the file says."""
        return self._header.checksums

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return max((end for _, end in self._header.spans.values()), default=0)

    def tensor(self, name: str) -> Tensor:
        """Return a view, on the CPU; a copy only if a foreign writer did not align the tensor.

        It stays valid after ``close``. Errors: ``NotFound``, ``FailedPrecondition`` (closed).
        """
        spec = self._header.specs.get(name)
        if spec is None:
            raise NotFound(f"{self._label} has no tensor {name!r}; it holds {some(self._header.specs)}")
        begin, end = self._span(name)
        raw, size = self._flat_of(torch.uint8), spec.dtype.itemsize
        if begin % size or raw.data_ptr() % size:
            return raw[begin:end].clone().view(spec.dtype).view(spec.shape)
        # One operation: a load asks for thousands of tensors.
        return self._flat_of(spec.dtype).as_strided(spec.shape, spec.strides, begin // size)

    def _flat_of(self, dtype: torch.dtype) -> Tensor:
        if (flat := self._flat.get(dtype)) is None:
            flat = _as_tensor(self._open_view())
            flat = self._flat[dtype] = flat[: len(flat) - len(flat) % dtype.itemsize].view(dtype)
        return flat

    @property
    def address(self) -> int:
        """Return the address of the tensors' bytes in memory. They stay there until the file is
        closed. ``FailedPrecondition``: closed."""
        return int(np.frombuffer(self._open_view(), dtype=np.uint8).ctypes.data) + self._header.data_start

    def end(self, *names: str) -> int:
        """Return the number of the file's first bytes that hold these tensors, which must exist."""
        return max(self._span(name)[1] for name in names)

    def verify(self, *names: str) -> None:
        """Compare these tensors, without any all of them, with their checksums. ``DataLoss`` names
        the first that differs."""
        for name in names or self._header.checksums:
            begin, end = self._span(name)
            expected, found = self._header.checksums[name], checksum(self._open_view()[begin:end])
            if found != expected:
                raise DataLoss(
                    f"{self._label}: tensor {name!r} is damaged: checksum {expected!r:.80} expected, {found!r} found"
                )

    def _span(self, name: str) -> tuple[int, int]:
        begin, end = self._header.spans[name]
        return self._header.data_start + begin, self._header.data_start + end

    def _open_view(self) -> memoryview:
        if self._view is None:
            raise FailedPrecondition(f"{self._label} is closed; open it again to read tensors")
        return self._view

    def close(self) -> None:
        """Close the file; its mapping ends with the last tensor taken from it. May be repeated."""
        self._view = None
        self._flat.clear()

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _map_file(path: Path, label: str) -> memoryview:
    check_regular(path, label)
    with os_errors(label), open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise DataLoss(f"{label} is empty")
        # A private mapping: a stray write into a view neither reaches the file nor crashes.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _bytes_view(source: object) -> memoryview:
    if not isinstance(source, bytes | bytearray | memoryview):
        raise InvalidArgument(f"a state is read from a path or from bytes, got {type(source).__name__}")
    view = memoryview(source)
    if not view.c_contiguous or view.nbytes == 0:
        view = memoryview(view.tobytes())
    return view.cast("B")


def _as_tensor(data: memoryview) -> Tensor:
    """Return uint8 ``[n]`` over the same memory, which it keeps alive."""
    if not len(data):
        return torch.empty(0, dtype=torch.uint8)
    if not data.readonly:
        return torch.frombuffer(data, dtype=torch.uint8)
    # torch has no read-only tensors and warns of read-only buffers; see the class about writing.
    array = np.frombuffer(data, dtype=np.uint8)
    window = (ctypes.c_ubyte * len(data)).from_address(array.ctypes.data)
    window.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise Unsupported(f"state files need a little-endian machine, this one is {sys.byteorder}-endian")
