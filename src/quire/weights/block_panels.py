"""The packed form "blocks": codes and scales of files, in panels of 32 outputs.

``kernels/cpu/linear.h`` defines the layout, and ``cpu/linear_pack_blocks.cpp`` writes it. No code
and no scale is changed, so the values are those of ``gguf_blocks`` to the bit.

Letters: R rows (outputs), I inputs; p panels, s stretches of the inputs with a head each, g groups
of 32 inputs in a stretch, h halves of a group. Some kinds have one head of a whole row instead,
at the beginning of a panel (``gguf_blocks.HEADS``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.contracts.linear import PackedMatrix
from quire.weights.gguf_blocks import FLOAT8, FP4_VALUES, HEADS, IQ4_VALUES, NVFP4, SIZES, nvfp4_steps
from quire.weights.panels import PANEL

GROUP = 32
"""Inputs of a group."""
READ_AT_ONCE = 1 << 20
"""Weights that are read at a time, so that they stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One format of blocks in panels: of GGUF files, or 8-bit floats."""

    name: str
    low: int
    """Bits of a code in ``codes``."""
    high: int = 0
    """Bits of a code above these."""
    scale: int = 2
    """Bytes of a group's scales for an output."""
    units: int = 0
    """float16 numbers of a head for an output."""
    has_minima: bool = False
    halves: int = 1
    """Scales of a group, each of as many inputs."""
    offset: int = 0
    """Is subtracted from a code."""
    table: tuple[int, ...] = ()
    """The number of each code; empty: the code less ``offset``."""

    @property
    def groups(self) -> int:
        """Groups of a stretch."""
        return SIZES[self.name][0] // GROUP

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes for an output: of a head, and of a group's codes, high bits and scales."""
        return 2 * self.units, 4 * self.low, 4 * self.high, self.scale

    @property
    def row(self) -> int:
        """Bytes of the head of a whole row, for an output."""
        return HEADS.get(self.name, 0)

    def panel_bytes(self, inputs: int) -> int:
        head, *group = self.sizes
        return PANEL * (self.row + inputs // GROUP * sum(group) + inputs // (GROUP * self.groups) * head)

    def values(self, panels: Tensor, chosen: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return float32 ``[R, I]`` of panels, uint8 ``[p, panel_bytes]``: of all outputs, or of
        the chosen ones by panel and place in it."""
        row, head, codes, high, scales = (
            part.movedim(-2, 1).flatten(0, 1) if chosen is None else part.movedim(-2, 1)[chosen]
            for part in self._parts(panels)
        )  # [R, (s, (g,)) numbers, bytes]
        numbers = self._numbers(codes, high).view(*codes.shape[:3], self.halves, -1)
        if self.row:
            units_R2 = row.contiguous().view(torch.float32).squeeze(-1)
            steps, minima = nvfp4_steps(scales.flatten(1), units_R2).view(scales.shape[:-1]), None
        else:
            steps, minima = self._scales(head.contiguous(), scales.contiguous())
        values = numbers * steps.unsqueeze(-1)
        return (values if minima is None else values - minima.unsqueeze(-1)).view(len(codes), -1)

    def _numbers(self, codes: Tensor, high: Tensor) -> Tensor:
        if self.low == 8:
            return codes.contiguous().view(torch.float8_e4m3fn if self.name == FLOAT8 else torch.int8).float()
        found = _bits_of(codes, self.low)
        if self.high:
            found = found | _bits_of(high, self.high) << self.low
        return torch.tensor(self.table, dtype=torch.float32)[found.int()] if self.table else found.float() - self.offset

    def _scales(self, head: Tensor, scales: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return ``[R, s, g, h]`` of the scales and of what is subtracted."""
        if self.name == "MXFP4":
            exponents = scales.squeeze(-1).int() - 128
            return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents), None
        if not self.units:
            numbers = scales.view(torch.float32 if self.name == FLOAT8 else torch.float16).float().squeeze(-1)
            return numbers[..., :1], -numbers[..., 1:] if self.has_minima else None
        units = head.view(torch.float16).float().unsqueeze(2)  # [R, s, 1, units, 1]
        numbers = scales.squeeze(-1)
        if not self.has_minima:
            return units[..., 0] * numbers.view(torch.int8).float(), None
        if self.halves == 1:
            steps, minima = numbers[..., :1], numbers[..., 1:]
        else:
            steps, minima = numbers & 15, numbers >> 4
        return units[..., 0, :] * steps.float(), units[..., 1, :] * minima.float()

    def _parts(self, panels: Tensor) -> Iterator[Tensor]:
        """Yield views of panels: ``[p, (s, (g,)) numbers, 32, bytes]`` of the head of rows, head,
        codes, high bits and scales."""
        yield panels[:, : PANEL * self.row].view(len(panels), self.row // 4, PANEL, 4)
        head, *group = self.sizes
        flat = panels[:, PANEL * self.row :].view(len(panels), -1, PANEL * (head + self.groups * sum(group)))
        yield flat[..., : PANEL * head].view(*flat.shape[:-1], self.units, PANEL, 2)
        inside = flat[..., PANEL * head :].view(*flat.shape[:-1], self.groups, PANEL * sum(group))
        number = 1 if self.units or self.row or self.scale == 1 else 4 if self.name == FLOAT8 else 2
        widths = [1 if self.low == 8 else 4, 4, number]
        start = 0
        for size, width in zip(group, widths, strict=True):
            part = inside[..., PANEL * start : PANEL * (start + size)]
            yield part.view(*part.shape[:-1], size // width, PANEL, width)
            start += size


def _bits_of(words: Tensor, width: int) -> Tensor:
    """Return ``[R, s, g, 32]`` of words as bytes ``[R, s, g, words, 4]``: the even inputs of a word
    are in its lower half."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)
    found = words.unsqueeze(-1) >> shifts & (1 << width) - 1
    return found.view(*words.shape[:4], 2, 16 // width).transpose(-2, -1).reshape(*words.shape[:3], GROUP)


KINDS: Mapping[str, BlockKind] = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", 4, offset=8),
        BlockKind("Q4_1", 4, scale=4, has_minima=True),
        BlockKind("Q5_0", 4, 1, offset=16),
        BlockKind("Q5_1", 4, 1, scale=4, has_minima=True),
        BlockKind("Q8_0", 8),
        BlockKind("Q2_K", 2, units=2, has_minima=True, halves=2),
        BlockKind("Q3_K", 2, 1, units=1, halves=2, offset=4),
        BlockKind("Q4_K", 4, units=2, has_minima=True),
        BlockKind("Q5_K", 4, 1, units=2, has_minima=True),
        BlockKind("Q6_K", 4, 2, units=1, halves=2, offset=32),
        BlockKind("IQ4_NL", 4, table=IQ4_VALUES),
        BlockKind("IQ4_XS", 4, scale=1, units=1, table=IQ4_VALUES),
        BlockKind("MXFP4", 4, scale=1, table=FP4_VALUES),
        BlockKind(NVFP4, 4, halves=2, table=FP4_VALUES),
        BlockKind(FLOAT8, 8, scale=4),
    )
}
"""In the order of ``Kind`` in ``kernels/cpu/linear.h``."""


def unpack_blocks(packed: PackedMatrix) -> Tensor:
    """Return the values ``[O, I]`` in float32."""
    found = []
    for kind, rows, panels in _panels_of(packed):
        step = max(1, READ_AT_ONCE // (PANEL * packed.inputs))
        found += [kind.values(some) for some in torch.split(panels, step)]
        found[-1] = found[-1][: len(found[-1]) - -rows % PANEL]
    return torch.cat(found)


def block_rows_of(packed: PackedMatrix, outputs_T: Tensor) -> Tensor:
    """Return rows ``[T, I]`` in float32 by output number."""
    values_TI = torch.empty(len(outputs_T), packed.inputs)
    first = 0
    for kind, rows, panels in _panels_of(packed):
        place = outputs_T - first
        inside = ((place >= 0) & (place < rows)).nonzero().squeeze(-1)
        place = place[inside]
        values_TI[inside] = kind.values(panels, (place // PANEL, place % PANEL))
        first += rows
    return values_TI


def _panels_of(packed: PackedMatrix) -> Iterator[tuple[BlockKind, int, Tensor]]:
    start = 0
    for name, rows in packed.kinds:
        kind = KINDS[name]
        end = start + -(-rows // PANEL) * kind.panel_bytes(packed.inputs)
        yield kind, rows, packed.values[start:end].view(-1, kind.panel_bytes(packed.inputs))
        start = end


def fits_panels(parts: Sequence[tuple[str, int]]) -> bool:
    """Return True if maps of these formats and numbers of rows can be one matrix."""
    return all(kind in KINDS for kind, _ in parts) and not any(rows % PANEL for _, rows in parts[:-1])
