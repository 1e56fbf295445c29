"""Attention over pages by FlashInfer, an optional package.

FlashInfer processes requests: rows of queries over pages in a table. Its kernels support causal
order, a window of one size, or a mask of bits. So the rows of a batch are cut into *runs*,
neighbours that one request can express, and requests of one form (``Form``) are one *call*:

* rows whose last key advances by one, with one window or none: causal;
* rows that see the same keys, such as all rows of a past: not causal;
* single rows;
* entries with a tree or a mask: the keys that some row sees, and bits.

If keys begin inside a page, each slot is a page of one key. So it is in batches with sinks, because
pages may contain invisible rows with NaN.

A row that sees no key is in no request. Sinks and learned logits are merged as attention states.

Letters: T rows of the batch; B entries; R runs; S slots; P page size; Hq, Hkv query and KV heads; D
head size.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, Unsupported
from quire.base.uploads import uploaded
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PLAIN, KVView, format_refusal, plain_rows
from quire.contracts.layers import KeyValueAttention, LayerSpec
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.attention.visibility import VisibleKeys, sink_part, window_part
from quire.kernels.triton_support import cuda_problem, on_device_of
from quire.ops.attention import check_sink_query, kind_refusal, merge

LEAST_VERSION = (0, 7, 2)
"""Least version of FlashInfer, against which this file is tested. Up to 0.6.16 it hides keys scored
below -50,000."""
HEAD_SIZES = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
WORKSPACE = 128 << 20
"""Bytes for the partial results of a call; FlashInfer raises if they do not suffice."""
MOST_BITS = 2**31 - 1
"""Most bits of the masks of a call: FlashInfer counts them in int32."""
CAPPED = "the FlashInfer kernels cap scores by an approximate tanh, off by up to 2^-11 of the cap"


def flashinfer_problem(device: torch.device) -> str:
    """Return the reason why FlashInfer cannot run on a device; "" if it can. This imports it."""
    if find_spec("flashinfer") is None:
        return "the FlashInfer kernels need the package flashinfer-python, which is not installed"
    if problem := cuda_problem("FlashInfer", device):
        return problem
    try:
        version = str(import_module("flashinfer").__version__)
    except (ImportError, OSError, RuntimeError) as error:
        return f"the FlashInfer kernels cannot be imported: {error}"
    numbers = [int(part) if part.isdecimal() else 0 for part in version.split("+")[0].split(".")[:3]]
    if (*numbers,) < LEAST_VERSION:
        return f"the FlashInfer kernels need release {'.'.join(map(str, LEAST_VERSION))}; {version} is installed"
    return ""


class Form(NamedTuple):
    """The common properties of the requests of one call."""

    kernels: str
    """``fa2``, which splits keys and supports masks, for masks and single rows; ``auto`` for
    others: ``fa3`` on devices that have it."""
    page: int
    window: int
    """Number of keys before its own that a row sees; -1: all."""
    causal: bool


@dataclass(frozen=True, slots=True)
class FlashCall:
    """Requests in arrays, in FlashInfer's form."""

    form: Form
    rows: NDArray[np.int64] | None
    """Rows of the batch; None: all of them, in order."""
    row_starts: NDArray[np.int32]
    page_starts: NDArray[np.int32]
    pages: NDArray[np.int32]
    last: NDArray[np.int32]
    """Number of keys in the last page of each request."""
    mask: NDArray[np.bool_] | None = None
    """``[rows, keys]`` of each request, flat and concatenated."""


def slots_at(plan: ForwardPlan, entry: int, addresses: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the pool slots of an entry's keys."""
    page, offset = np.divmod(addresses, plan.page_size)
    slots: NDArray[np.int32] = plan.tables[entry][page] * np.int32(plan.page_size) + offset.astype(np.int32)
    return slots


def made_call(
    plan: ForwardPlan,
    form: Form,
    rows: NDArray[np.int64],
    counts: list[int],
    pages: list[NDArray[np.int32]],
    last: NDArray[np.int64],
    mask: NDArray[np.bool_] | None = None,
) -> FlashCall:
    """Return the call of requests with ``counts`` of these rows each, in order."""
    row_starts, page_starts = (np.cumsum([0, *sizes]).astype(np.int32) for sizes in (counts, map(len, pages)))
    ordered = rows.size == plan.num_tokens and bool((rows == np.arange(rows.size)).all())
    table = np.concatenate(pages)
    return FlashCall(form, None if ordered else rows, row_starts, page_starts, table, last.astype(np.int32), mask)


def calls_of(plan: ForwardPlan, part: VisibleKeys) -> list[FlashCall]:
    """Return the calls of one part. Each row is in one of them, or sees nothing."""
    calls = [] if not part.columns else [masked_call(plan, part)]
    # Rows behind a sink may hold NaN, and a window may begin in the sink's last page.
    size = plan.page_size if plan.sinks is None else 1
    entry_T = np.repeat(np.arange(plan.num_entries), plan.counts)
    low_T, high_T, seen_T = part.low, part.high, part.low < part.high
    if part.columns:
        seen_T = seen_T & ~np.isin(entry_T, list(part.columns))
    first_R, stop_R, causal_R = runs_of(entry_T, low_T, high_T, seen_T, size)
    if not first_R.size:
        return calls
    many_R, begin_R, end_R, last_R = stop_R - first_R > 1, low_T[first_R], high_T[stop_R - 1], low_T[stop_R - 1]
    window_R = np.where(many_R & causal_R & (last_R > 0), end_R - 1 - last_R, -1)
    page_R = np.where(many_R | (begin_R % size == 0), size, 1)
    base_R = begin_R // page_R * page_R
    forms_R = np.stack((many_R, page_R, window_R, causal_R), axis=1)
    for many, page, window, causal in np.unique(forms_R, axis=0).tolist():
        chosen = np.flatnonzero((forms_R == (many, page, window, causal)).all(1))
        first, counts, end = first_R[chosen], (stop_R - first_R)[chosen], end_R[chosen]
        runs = zip(*(x.tolist() for x in (entry_T[first], base_R[chosen], end)), strict=True)
        if page == plan.page_size:
            pages = [plan.tables[entry][base // page : -(-stop // page)] for entry, base, stop in runs]
        else:
            pages = [slots_at(plan, entry, np.arange(base, stop)) for entry, base, stop in runs]
        rows = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        form = Form("auto" if many else "fa2", page, window, bool(causal))
        calls.append(made_call(plan, form, rows, counts.tolist(), pages, (end - 1) % page + 1))
    return calls


def runs_of(
    entry_T: NDArray[np.int64],
    low_T: NDArray[np.int64],
    high_T: NDArray[np.int64],
    seen_T: NDArray[np.bool_],
    size: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the first row of each run, one past its last, and True for causal runs."""
    together = seen_T[1:] & seen_T[:-1] & (entry_T[1:] == entry_T[:-1])
    rise, shift = np.diff(high_T), np.diff(low_T)
    step = together & (rise == 1) & ((shift == 1) | (low_T[1:] + low_T[:-1] == 0))
    same = together & (rise == 0) & (shift == 0) & (low_T[1:] % size == 0)
    link = step + 2 * same
    cut = link == 0
    cut[1:] |= (link[:-1] > 0) & (link[1:] != link[:-1])
    edges = np.flatnonzero(np.concatenate(([True], cut, [True])))
    first, stop = edges[:-1][seen_T[edges[:-1]]], edges[1:][seen_T[edges[:-1]]]
    return first, stop, (stop - first == 1) | ~np.concatenate((same, [False]))[first]


def masked_call(plan: ForwardPlan, part: VisibleKeys) -> FlashCall:
    """Return the call of the entries with a rule: slots of visible keys, and bits. ``Unsupported``:
    more bits than FlashInfer can count."""
    rows, slots, masks = [], [], []
    for entry, columns in part.columns.items():
        start, stop, first = int(plan.starts[entry]), int(plan.starts[entry + 1]), int(part.first[entry])
        address = np.arange(first, int(part.stop[entry]))
        visible = (address >= part.low[start:stop, None]) & (address < part.high[start:stop, None])
        visible[:, columns.first - first : columns.stop - first] |= columns.visible
        seeing, keys = np.flatnonzero(visible.any(1)), np.flatnonzero(visible.any(0))
        rows.append(seeing + start)
        slots.append(slots_at(plan, entry, address[keys]))
        masks.append(visible[np.ix_(seeing, keys)].ravel())
    if (bits := sum(mask.size for mask in masks)) > MOST_BITS:
        raise Unsupported(f"the FlashInfer kernels count the bits of masks in int32; these are {bits:,}")
    counts, ones = [row.size for row in rows], np.ones(len(rows), np.int64)
    form, whole = Form("fa2", 1, -1, False), np.concatenate(rows)
    return made_call(plan, form, whole, counts, slots, ones, np.concatenate(masks))


class FlashShape(NamedTuple):
    """The tensor shapes and types that FlashInfer's plan of a call depends on."""

    heads: int
    kv_heads: int
    size: int
    scale: float


@dataclass(slots=True)
class Held:
    """A wrapper of FlashInfer. Its memory takes milliseconds to make."""

    wrapper: Any
    planned: Any = None
    """A CUDA event after its last plan's upload."""


class Bound(NamedTuple):
    """A call, planned for layers of one shape."""

    held: Held
    page: int
    rows: Tensor | None
    """On the device."""


@dataclass(slots=True, weakref_slot=True)
class FlashPlan:
    """A batch as calls, and the wrappers that it holds while it lives."""

    plan: ForwardPlan
    dtype: torch.dtype
    parts: list[list[FlashCall]]
    """Calls of the window part and, if there are sinks, of the sink part."""
    bound: dict[FlashShape, list[list[Bound]]] = field(default_factory=dict)
    """By part."""
    taken: list[tuple[Any, Held]] = field(default_factory=list)


def give_back(idle: dict[Any, list[Held]], taken: list[tuple[Any, Held]]) -> None:
    """Return the wrappers of a deleted plan to the idle ones."""
    for kind, held in taken:
        idle.setdefault(kind, []).append(held)


class FlashInferAttention:
    """The backend ``flashinfer``: exact attention by FlashInfer's kernels for pages. Batches of
    other types than 16 bits, such as float32, run through PyTorch's kernels (``SdpaAttention``)."""

    name = "flashinfer"

    def __init__(self, *, library: Any = None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
        """Make a backend. For tests: a replacement of FlashInfer, and its supported types."""
        self._library, self._dtypes, self._other = library, dtypes, SdpaAttention()
        self._idle: dict[Any, list[Held]] = {}
        self._workspaces: dict[torch.device, Tensor] = {}

    def refusal(self, spec: LayerSpec, device: torch.device, format: str = PLAIN) -> str:
        """See the contract."""
        if reason := flashinfer_problem(device) or kind_refusal(self.name, spec) or format_refusal(self.name, format):
            return reason
        if not isinstance(spec, KeyValueAttention) or spec.softcap is not None:
            return CAPPED
        if spec.head_dim == spec.value_dim and spec.head_dim in HEAD_SIZES:
            return ""
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"the FlashInfer kernels have heads of {sizes} columns; K has {spec.head_dim}, V has {spec.value_dim}"

    def fuses(self, spec: LayerSpec, device: torch.device) -> bool:
        """Return True: attention weights exist only for a block of keys at a time."""
        del spec, device
        return True

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        """See the contract. A plan of another type is ``SdpaAttention``'s. Raise as
        ``masked_call``."""
        if dtype not in self._dtypes:
            return self._other.plan(plan, dtype)
        parts = (part for part in (window_part(plan), sink_part(plan)) if part is not None)
        made = FlashPlan(plan, dtype, [calls_of(plan, part) for part in parts])
        weakref.finalize(made, give_back, self._idle, made.taken).atexit = False
        return made

    def run(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See the contract. ``InvalidArgument``: ``q_sink_THD`` missing or surplus, a tensor not of
        the planned type. ``Unsupported``: capped scores."""
        if not isinstance(prepared, FlashPlan):
            return self._other.run(prepared, q_THD, new, view, scoring, q_sink_THD=q_sink_THD, sinks_H=sinks_H)
        states = self._states(prepared, q_THD, view, scoring, q_sink_THD, lse=sinks_H is not None)
        if sinks_H is not None:
            nothing, lse_H = states[0].out.new_zeros(1, 1, 1), sinks_H.to(torch.float32)
            states.append(AttentionState(nothing, lse_H.expand(q_THD.shape[:2])))
        return union(states, q_THD.dtype).out

    def run_state(
        self,
        prepared: Any,
        q_THD: Tensor,
        new: tuple[Tensor, Tensor] | None,
        view: KVView,
        scoring: Scoring,
        *,
        q_sink_THD: Tensor | None = None,
        coarse: bool = False,
    ) -> AttentionState:
        """See the contract; never coarse. Raise as ``run``."""
        if not isinstance(prepared, FlashPlan):
            return self._other.run_state(prepared, q_THD, new, view, scoring, q_sink_THD=q_sink_THD, coarse=coarse)
        return union(self._states(prepared, q_THD, view, scoring, q_sink_THD, lse=True), q_THD.dtype)

    def _states(
        self,
        prepared: FlashPlan,
        q_THD: Tensor,
        view: KVView,
        scoring: Scoring,
        q_sink_THD: Tensor | None,
        *,
        lse: bool,
    ) -> list[AttentionState]:
        """Return the state of each part; its lse is empty unless ``lse``."""
        check_sink_query(prepared.plan, q_sink_THD)
        if scoring.softcap is not None:
            raise Unsupported(CAPPED)
        k_SHD, v_SHD = plain_rows(view, self.name)
        queries = [q_THD] if q_sink_THD is None else [q_THD, q_sink_THD]
        for x in (*queries, k_SHD, v_SHD):
            if x.dtype != prepared.dtype or x.device.type != prepared.plan.device.type:
                raise InvalidArgument(
                    f"the batch was planned for {prepared.dtype} on {prepared.plan.device}; a tensor is {x.dtype} on {x.device}"
                )
        lse = lse or len(prepared.parts) > 1
        with on_device_of(q_THD):
            parts = self._bound(
                prepared, FlashShape(q_THD.shape[1], k_SHD.shape[1], k_SHD.shape[2], float(scoring.scale))
            )
            return [attended(part, q.contiguous(), k_SHD, v_SHD, lse) for part, q in zip(parts, queries, strict=False)]

    def _bound(self, prepared: FlashPlan, shape: FlashShape) -> list[list[Bound]]:
        """Return the calls of a plan for layers of one shape, made once."""
        found = prepared.bound.get(shape)
        if found is None:
            found = [[self._bind(prepared, call, shape) for call in calls] for calls in prepared.parts]
            prepared.bound[shape] = found
        return found

    def _bind(self, prepared: FlashPlan, call: FlashCall, shape: FlashShape) -> Bound:
        """Plan a call with a wrapper that no other plan holds."""
        form, device = call.form, prepared.plan.device
        # A wrapper keeps the kernels that "auto" was at its first plan.
        kind = (form.kernels, shape.size, prepared.dtype)
        idle = self._idle.get(kind)
        held = idle.pop() if idle else Held(self._wrapper(form.kernels, device))
        prepared.taken.append((kind, held))
        if held.planned is not None:
            # A plan is written to pinned memory, which the last upload may still read.
            held.planned.synchronize()
        held.wrapper.plan(
            torch.from_numpy(call.row_starts),
            torch.from_numpy(call.page_starts),
            uploaded(call.pages, device),
            torch.from_numpy(call.last),
            shape.heads,
            shape.kv_heads,
            shape.size,
            form.page,
            custom_mask=None if call.mask is None else uploaded(call.mask, device),
            causal=form.causal,
            sm_scale=shape.scale,
            window_left=form.window,
            q_data_type=prepared.dtype,
            kv_data_type=prepared.dtype,
        )
        if device.type == "cuda":
            held.planned = torch.cuda.current_stream(device).record_event()
        return Bound(held, form.page, None if call.rows is None else uploaded(call.rows, device))

    def _wrapper(self, kernels: str, device: torch.device) -> Any:
        if self._library is None:
            self._library = import_module("flashinfer")
        if device not in self._workspaces:
            # Calls run one behind the other, so they share it.
            self._workspaces[device] = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspaces[device], "NHD", backend=kernels)


def attended(calls: list[Bound], q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, lse: bool) -> AttentionState:
    """Return the state of one part; its lse is empty unless ``lse``."""
    shape = (*q_THD.shape[:2], v_SHD.shape[2])
    out_THD = q_THD.new_zeros(shape)
    lse_TH = q_THD.new_full(shape[:2] if lse else (0,), -torch.inf, dtype=torch.float32)
    for held, page, rows in calls:
        pool = tuple(in_pages(x_SHD, page) for x_SHD in (k_SHD, v_SHD))
        if rows is None:
            held.wrapper.run(q_THD, pool, out=out_THD, lse=lse_TH if lse else None, return_lse=lse)
            continue
        found = held.wrapper.run(q_THD.index_select(0, rows), pool, return_lse=lse)
        out_THD.index_copy_(0, rows, found[0] if lse else found)
        if lse:
            lse_TH.index_copy_(0, rows, found[1])
    # FlashInfer's is the logarithm to base 2.
    return AttentionState(out_THD, lse_TH.mul_(math.log(2)) if lse else lse_TH)


def in_pages(x_SHD: Tensor, size: int) -> Tensor:
    """Return a pool as pages ``[S // P, P, Hkv, D]``, in place. Slots after the last page are
    padding."""
    pages = x_SHD.shape[0] // size
    return x_SHD[: pages * size].view(pages, size, *x_SHD.shape[1:])


def union(states: list[AttentionState], dtype: torch.dtype) -> AttentionState:
    """Return the state over the keys of all states; several are merged in float32 and rounded
    once."""
    if len(states) == 1:
        return states[0]
    found = reduce(merge, (AttentionState(out.to(torch.float32), lse) for out, lse in states))
    return AttentionState(found.out.to(dtype), found.lse)
