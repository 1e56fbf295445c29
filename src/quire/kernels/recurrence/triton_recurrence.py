"""Recurrences in Triton, for CUDA devices. The reference is ``quire.ops.recurrence``.

Unsupported inputs (float64, large heads, other devices) run in PyTorch's form. Decodes, drafts and
short entries run row by row: each state is read and written once. Longer entries run in chunks of
``ROWS``: all chunks are prepared at once, then one program for each head and some columns of the
state passes it from chunk to chunk. Trees run in the same ways.

Letters: T rows; G given states; M wanted states; S steps; Hq query heads, H heads of the state; K,
V sizes of keys and values; C channels; W taps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.contracts.recurrence import Recurred, RecurrenceBackend, RecurrencePlan, StatePlaces
from quire.kernels.recurrence.chunked import ChunkedRecurrence, addresses
from quire.kernels.recurrence.steps import Steps, steps_of
from quire.kernels.triton_support import known_dtypes, on_device_of, triton_problem, upload
from quire.ops.recurrence import check_convolve, check_linear_attention, promoted

MOST_KEYS, MOST_COLUMNS = 256, 128
"""Most rows of a state in a program: with one decay for a head, and with one for each row."""
NUMBERS = 8192
"""Elements of a state in a program of single rows."""
LEVELS = 6
ROWS = 1 << LEVELS
"""Rows of a chunk: as many as the matrix units process at once."""
WIDTH, NARROW = 32, 16
"""Columns of a state in a program of chunks; more would leave a GPU idle with one prompt.
``NARROW`` if registers would not suffice otherwise."""
KEYS_HELD = 64
"""Rows of each block of such a state."""
WIDTH_READ = 64
"""Columns of values that a program of outputs computes."""


class _Bound(NamedTuple):
    """Steps, and their arrays on a device."""

    steps: Steps
    chunks: Tensor
    chunked: Tensor
    rows: Tensor
    walked: Tensor


class TritonRecurrence(ChunkedRecurrence):
    """The backend ``triton``: equal to the reference up to rounding.

    It caches the arrays of the last plan, which all layers of a forward share.
    """

    name = "triton"

    def __init__(self) -> None:
        self._steps: tuple[RecurrencePlan, torch.device, _Bound] | None = None
        self._places: tuple[RecurrencePlan, torch.device, tuple[int, int], list[Tensor]] | None = None

    def linear_attention(
        self,
        plan: RecurrencePlan,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        states_GHKV: Tensor,
        *,
        scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta_TH: Tensor | None = None,
    ) -> Recurred:
        """See the contract; the output has the promoted dtype of q, k, v. ``InvalidArgument``."""
        check_linear_attention(plan, q_THK, k_THK, v_THV, states_GHKV, log_decay, beta_TH)
        places, after = _apart(plan, states_GHKV)
        out_THV = self._attend(plan, q_THK, k_THK, v_THV, places, after, scale, log_decay, beta_TH)
        if out_THV is None:
            return super().linear_attention(
                plan, q_THK, k_THK, v_THV, states_GHKV, scale=scale, log_decay=log_decay, beta_TH=beta_TH
            )
        return Recurred(out_THV, after)

    def linear_attention_at(
        self,
        plan: RecurrencePlan,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        places: StatePlaces,
        *,
        scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta_TH: Tensor | None = None,
    ) -> Tensor | None:
        """See ``PooledRecurrence``. ``InvalidArgument``."""
        pool = places.pool_S
        check_linear_attention(plan, q_THK, k_THK, v_THV, pool, log_decay, beta_TH, len(places.sources_G))
        return self._attend(plan, q_THK, k_THK, v_THV, places, pool, scale, log_decay, beta_TH)

    def _attend(
        self,
        plan: RecurrencePlan,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        places: StatePlaces,
        after: Tensor,
        scale: float,
        log_decay: Tensor | None,
        beta_TH: Tensor | None,
    ) -> Tensor | None:
        """Write the wanted states to ``after`` and return the output. None, without a launch, for
        unsupported inputs."""
        pool, sources, targets = places
        heads, keys, values = pool.shape[1:]
        by_column = log_decay is not None and log_decay.dim() == 3
        fits = 0 < keys <= (MOST_COLUMNS if by_column else MOST_KEYS) and values > 0 and plan.num_rows > 0
        if not fits or not _known(q_THK, k_THK, v_THV, pool):
            return None
        q, k, v, before = (_by_rows(x) for x in (q_THK, k_THK, v_THV, pool))
        query_heads, device = q.shape[1], q.device
        out_THV = v.new_empty(plan.num_rows, query_heads, values, dtype=promoted(q, k, v))
        # Arguments that the program does not read can be any tensor.
        decays, decay, delta = 0, out_THV, beta_TH is not None
        if log_decay is not None:
            decays, decay = (keys, _by_rows(log_decay)) if by_column else (1, log_decay)
            decay = decay if decay.dtype in known_dtypes() else decay.to(torch.float32)
        beta = out_THV if beta_TH is None else beta_TH
        beta = beta if beta.dtype in known_dtypes() else beta.to(torch.float32)
        sizes = {"HEADS": heads, "KEYS": keys, "DECAYS": decays}
        state, gates = before.stride()[:3], (*decay.stride()[:2], *beta.stride()[:2])
        padded = _power(keys)
        width = max(1, min(_power(values), NUMBERS // padded, 64))

        from quire.kernels.recurrence import recurrence_programs as programs

        def walk(entries: int, kept: Tensor, rows: Tensor, walked: Tensor, listed: bool) -> None:
            programs.walk_rows[(entries, heads, -(-values // width))](
                out_THV, after, kept, before, sources, targets, q, k, v, decay, beta, rows, walked, float(scale),
                *state, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *gates,
                QUERIES=query_heads // heads, VALUES=values, K=padded, W=width, DELTA=delta, LISTED=listed, **sizes,
            )  # fmt: skip

        with on_device_of(out_THV):
            if alone(plan, len(sources)):
                walk(plan.num_rows, after, out_THV, out_THV, False)
                return out_THV
            steps, chunks, chunked, rows, walked = self._bound(plan, device)
            if len(steps.walked):
                kept = torch.empty(steps.kept, heads, keys, values, device=device) if steps.kept else after
                walk(len(steps.walked), kept, rows, walked, True)
            if not len(steps.chunks):
                return out_THV
            q, k, v = q.float(), k.float(), v.float()
            number, some = len(steps.chunks), NARROW if by_column else max(16, min(padded, WIDTH))
            common = {"C": ROWS, **sizes}
            scoring = {"LEVELS": LEVELS, "K": some, "num_warps": 8 if by_column else 4}
            held = torch.empty(number, heads, keys, values, device=device)
            since, until = held.new_empty(2, plan.num_rows, heads, decays)
            inverses, u = held, v
            if delta:
                inverses, u = held.new_empty(number, heads, ROWS, ROWS), held.new_empty(v.shape)
            if delta or decays:
                programs.weigh_chunks[(number, heads)](
                    inverses, since, until, k, decay, beta, chunks, *k.stride()[:2], *gates,
                    DELTA=delta, num_stages=2, **scoring, **common,
                )  # fmt: skip
            block, width = max(16, min(padded, KEYS_HELD)), NARROW if by_column or keys > 128 else WIDTH
            width = max(16, min(_power(values), width))
            programs.pass_chunks[(len(steps.chunked), heads, -(-values // width))](
                after, held, u, before, sources, targets, k, v, inverses, since, until, chunks, chunked,
                *state, *k.stride()[:2], *v.stride()[:2],
                VALUES=values, K=block, BLOCKS=-(-keys // block), W=width, DELTA=delta,
                num_stages=2 if by_column else 3, **common,
            )  # fmt: skip
            width = max(16, min(_power(values), WIDTH_READ))
            programs.read_chunks[(number, query_heads, -(-values // width))](
                out_THV, held, q, k, u, decay, since, chunks, float(scale),
                *q.stride()[:2], *k.stride()[:2], *u.stride()[:2], *gates[:2],
                QUERIES=query_heads // heads, VALUES=values, W=width, num_stages=3, **scoring, **common,
            )  # fmt: skip
        return out_THV

    def convolve(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, states_GWC: Tensor
    ) -> Recurred:
        """See the contract. ``InvalidArgument``: shapes, dtypes, devices."""
        check_convolve(plan, x_TC, weight_CW, bias_C, states_GWC)
        places, after = _apart(plan, states_GWC)
        out_TC = self._convolve(plan, x_TC, weight_CW, bias_C, places, after)
        if out_TC is None:
            return super().convolve(plan, x_TC, weight_CW, bias_C, states_GWC)
        return Recurred(out_TC, after)

    def convolve_at(
        self, plan: RecurrencePlan, x_TC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, places: StatePlaces
    ) -> Tensor | None:
        """See ``PooledRecurrence``. ``InvalidArgument``: as ``convolve``."""
        check_convolve(plan, x_TC, weight_CW, bias_C, places.pool_S, len(places.sources_G))
        return self._convolve(plan, x_TC, weight_CW, bias_C, places, places.pool_S)

    def _convolve(
        self,
        plan: RecurrencePlan,
        x_TC: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        places: StatePlaces,
        after: Tensor,
    ) -> Tensor | None:
        """See ``_attend``."""
        pool, sources, targets = places
        rows, given, (channels, taps) = plan.num_rows, len(sources), weight_CW.shape
        if not _known(x_TC, pool) or not rows or not channels:
            return None
        x, before, weight = _by_rows(x_TC), _by_rows(pool), weight_CW.contiguous()
        weight = weight if weight.dtype in known_dtypes() else weight.to(torch.float32)
        out_TC = x.new_empty(rows, channels)
        bias = out_TC if bias_C is None else bias_C.to(weight.dtype).contiguous()
        listed = not alone(plan, given)
        inputs = wanted = out_TC
        if listed:
            inputs, wanted = self._inputs(plan, (given, taps - 1), x.device)

        from quire.kernels.recurrence.recurrence_programs import convolve_rows

        with on_device_of(x):
            some, width = min(16, _power(rows)), min(128, _power(channels))
            convolve_rows[(-(-rows // some), -(-channels // width))](
                out_TC, after, before, sources, targets, x, weight, bias, inputs, wanted, rows, given,
                x.stride(0), *before.stride()[:2],
                CHANNELS=channels, TAPS=taps, BIAS=bias_C is not None, LISTED=listed, N=some, W=width,
            )  # fmt: skip
        return out_TC

    def _bound(self, plan: RecurrencePlan, device: torch.device) -> _Bound:
        held = self._steps
        if held is None or held[0] is not plan or held[1] != device:
            steps = steps_of(plan, ROWS)
            arrays = upload((steps.chunks, steps.chunked, steps.rows, steps.walked), device)
            self._steps = held = plan, device, _Bound(steps, *arrays)
        return held[2]

    def _inputs(self, plan: RecurrencePlan, given: tuple[int, int], device: torch.device) -> list[Tensor]:
        """Return the addresses of each row's inputs, and its wanted state or -1."""
        held = self._places
        if held is None or held[0] is not plan or held[1:3] != (device, given):
            targets = np.full(plan.num_rows, -1, dtype=np.int32)
            targets[plan.wanted] = np.arange(len(plan.wanted))
            made = upload((addresses(plan, *given).astype(np.int32), targets), device)
            self._places = held = plan, device, given, made
        return held[3]


def fastest_recurrence(device: torch.device) -> RecurrenceBackend:
    """Return the fastest recurrences on a device: Triton's on a GPU, if available."""
    return ChunkedRecurrence() if device.type == "cpu" or triton_problem(device) else TritonRecurrence()


def alone(plan: RecurrencePlan, given: int) -> bool:
    """Return True if each row n is a decode from state n to wanted state n."""
    rows = plan.num_rows
    return given == rows == len(plan.wanted) and bool((plan.given == np.arange(rows)).all())


def _apart(plan: RecurrencePlan, states_G: Tensor) -> tuple[StatePlaces, Tensor]:
    """Return states as places in their order, and memory for the wanted states in theirs."""
    after_M = states_G.new_empty(len(plan.wanted), *states_G.shape[1:])
    order = torch.arange(max(len(states_G), len(after_M)), device=states_G.device)
    return StatePlaces(states_G, order[: len(states_G)], order), after_M


def _known(*tensors: Tensor) -> bool:
    return all(x.dtype in known_dtypes() for x in tensors) and not triton_problem(tensors[0].device)


def _by_rows(x: Tensor) -> Tensor:
    """Return the tensor with contiguous columns; other dimensions may be views."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _power(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()
