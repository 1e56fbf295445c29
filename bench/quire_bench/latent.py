"""Cost and accuracy of latent attention (MLA) in its forms, beside the hardware's limits.

``bench.latent_forms`` has the forms. Letters: T new tokens; S tokens of a history; H heads; R rank
of the latent; Dn, Dr columns of a head without and with positions; Dv value size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.model import LatentExpansion
from quire_bench.hardware import Hardware
from quire_bench.latent_forms import FORMS, GEOMETRIES, Cell, Geometry, Inputs, expand, has_library
from quire_bench.reports import Spread, interleave

HEADS_CHECKED = 2
"""Heads of the first sequence that are compared with float64."""
MOST_OPERATIONS = 4e11
"""Most operations of a measured step of a form."""


# -- limits and exact results -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """The least reading and computing of one layer of a form."""

    stored_bytes: int
    """Bytes of the state, for all sequences of the cell."""
    read_bytes: int
    """Bytes of the state and of the maps."""
    operations: float
    """Multiplications and additions."""


def work_of(form: str, geometry: Geometry, cell: Cell, itemsize: int) -> Work:
    """Return the work of one layer of a form."""
    new, expansion = cell.batch * cell.tokens, 2.0 * geometry.expansion_size
    by_rows = 2.0 * geometry.heads * (geometry.row + geometry.rank)
    by_heads = 2.0 * geometry.heads * (geometry.head + geometry.value)
    stored = cell.keys * geometry.row * itemsize
    both = form in ("latent", "unpacked")
    if form == "absorbed" or (both and cell.tokens == 1):
        operations = cell.pairs * by_rows + new * expansion
    elif both:
        own = cell.batch * cell.tokens * (cell.tokens + 1) // 2
        # New rows are expanded; with a past, queries are absorbed as well.
        operations = own * by_heads + (cell.pairs - own) * by_rows + new * expansion * (2 if cell.history else 1)
    elif form == "expanded":
        stored = cell.keys * geometry.heads * (geometry.head + geometry.value) * itemsize
        operations = cell.pairs * by_heads + new * expansion
    else:
        operations = cell.pairs * by_heads + cell.keys * expansion
    return Work(stored_bytes=stored, read_bytes=stored + geometry.expansion_size * itemsize, operations=operations)


def possible_seconds(work: Work, hardware: Hardware, dtype: torch.dtype) -> float:
    """Return one layer's least seconds by the peaks; an unknown dtype has float32's."""
    peaks = hardware["peak_tflops"]
    peak = peaks.get(str(dtype).removeprefix("torch."), peaks["float32"])
    return max(work.read_bytes / (hardware["read_gbps"] * 1e9), work.operations / (peak * 1e12))


def plain(q_THD: Tensor, k_SHD: Tensor, v_SHD: Tensor, scale: float) -> Tensor:
    """Attend by the plain formula, ``[T, H, Dv]`` of the last T of S tokens."""
    new, keys = len(q_THD), len(k_SHD)
    scores_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD) * scale
    later_TS = torch.ones(new, keys, dtype=torch.bool, device=q_THD.device).triu(keys - new + 1)
    weights_HTS = scores_HTS.masked_fill(later_TS, float("-inf")).softmax(-1)
    return torch.einsum("hts,shv->thv", weights_HTS, v_SHD)


def exact_and_bound(geometry: Geometry, cell: Cell, inputs: Inputs) -> tuple[Tensor, float]:
    """Return some heads of the first sequence in float64, and the bound on a form's error.

    The error is a share of the largest result. The bound is a rounding plus twice plain attention's
    error in this precision, times (R + Dr) / (Dn + Dr) for the absorbed form's longer sums.
    """
    rows_SR = torch.cat((inputs.history_SR, inputs.rows_TR[: cell.tokens]))
    key_HDR, value_HRV = (part[:HEADS_CHECKED] for part in astuple(inputs.expansions[0]))
    expansion = LatentExpansion(key_HDR, value_HRV)
    q_THD, scale = inputs.q_THD[: cell.tokens, :HEADS_CHECKED], geometry.head**-0.5
    wide = LatentExpansion(key_HDR.double(), value_HRV.double())
    exact_THV = plain(q_THD.double(), *expand(rows_SR.double(), wide), scale)
    largest = float(exact_THV.abs().max())
    theirs = float((plain(q_THD, *expand(rows_SR, expansion), scale) - exact_THV).abs().max()) / largest
    return exact_THV, 2 * geometry.row / geometry.head * theirs + torch.finfo(q_THD.dtype).eps


def astuple(expansion: LatentExpansion) -> tuple[Tensor, Tensor]:
    """Return both tensors."""
    return expansion.key_HDR, expansion.value_HRV


# -- one cell ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One form in one cell; times are those of one layer."""

    form: str
    work: Work
    seconds: Spread | None = None
    """None: not measured, for the reason in ``skipped``."""
    skipped: str = ""
    to_latent: Spread | None = None
    """Its time divided by that of *latent*, round by round."""
    read_gbps: float = 0.0
    """Bytes that must be read, divided by the time."""
    of_possible: float = 0.0
    """The hardware's least time, divided by the time."""
    error: float = 0.0
    """The largest difference from float64, as a share of the largest result."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """All forms of one cell."""

    cell: Cell
    layers: int
    bound: float
    """The bound on the errors."""
    forms: Sequence[Measured] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Return True if the error of every form is within the bound."""
        return all(one.error <= self.bound for one in self.forms)


def measure_cell(
    cell: Cell, *, dtype: torch.dtype, device: torch.device, rounds: int, most_bytes: int, hardware: Hardware
) -> CellResult:
    """Measure a cell's forms in turn: for several tokens in one layer, else in as many layers as
    fit expanded into ``most_bytes``. Raise ``InvalidArgument`` for an unknown geometry."""
    if cell.geometry not in GEOMETRIES:
        raise InvalidArgument(f"geometry {cell.geometry!r}; there are {', '.join(GEOMETRIES)}")
    geometry = GEOMETRIES[cell.geometry]
    names = ["latent", "expanded", "anew"] if cell.tokens == 1 else ["latent", "absorbed", "expanded"]
    if has_library(device):
        names.insert(1, "unpacked")
    works = {name: work_of(name, geometry, cell, dtype.itemsize) for name in names}
    fitting = most_bytes // works["expanded"].stored_bytes
    layers = 1 if cell.tokens > 1 else min(geometry.layers, fitting) or geometry.layers
    inputs = Inputs.draw(geometry, cell, layers, dtype, device)
    skipped = {name: _skipped(work, layers, most_bytes) for name, work in works.items()}
    with torch.inference_mode():
        forms = {name: FORMS[name](geometry, cell, inputs) for name in names if not skipped[name]}
        exact_THV, bound = exact_and_bound(geometry, cell, inputs)
        outs: dict[str, Tensor] = {}

        def timed(name: str) -> float:
            outs[name], seconds = forms[name].step()
            return seconds / layers

        result = interleave({name: lambda name=name: timed(name) for name in forms}, rounds)  # type: ignore[misc]
    found = []
    for name, work in works.items():
        if skipped[name]:
            found.append(Measured(form=name, work=work, skipped=skipped[name]))
            continue
        seconds = result.spread(name)
        own_THV = outs[name][: cell.tokens, :HEADS_CHECKED].double()
        found.append(
            Measured(
                form=name,
                work=work,
                seconds=seconds,
                to_latent=result.ratios[name],
                read_gbps=work.read_bytes / seconds.median / 1e9,
                of_possible=possible_seconds(work, hardware, dtype) / seconds.median,
                error=float((own_THV - exact_THV).abs().max() / exact_THV.abs().max()),
            )
        )
    return CellResult(cell=cell, layers=layers, bound=bound, forms=found)


def _skipped(work: Work, layers: int, most_bytes: int) -> str:
    """Return the reason why a form is not measured; empty if it is."""
    if work.stored_bytes * layers > most_bytes:
        return f"{work.stored_bytes * layers / 2**30:.1f} GiB"
    if work.operations * layers > MOST_OPERATIONS:
        return f"{work.operations * layers / 1e9:.0f} Gop"
    return ""


def lines(result: CellResult) -> list[dict[str, Any]]:
    """Return rows for the table."""
    cell = result.cell
    found = []
    for one in result.forms:
        line: dict[str, Any] = {
            "geometry": cell.geometry,
            "what": cell.what,
            "batch": cell.batch,
            "history": cell.history,
            "tokens": cell.tokens,
            "form": one.form,
            "MiB read": round(one.work.read_bytes / 2**20, 1),
        }
        if one.seconds is None:
            found.append(line | {"ms/layer": f"not measured: {one.skipped}"})
            continue
        found.append(
            line
            | {
                "ms/layer": f"{one.seconds.median * 1e3:.3g}",
                "/ latent": "" if one.form == "latent" else str(one.to_latent),
                "GB/s": f"{one.read_gbps:.1f}",
                "of possible": f"{one.of_possible:.0%}",
                "error": f"{one.error:.1e} of {result.bound:.1e}",
            }
        )
    return found
