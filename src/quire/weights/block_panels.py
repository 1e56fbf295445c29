"""The packed form "blocks": codes and scales of GGUF files, in panels of 32 outputs.

It is the definition of ``BLOCKS`` in ``kernels/cpu/linear.h``. No code and no scale is changed, so
the values are those of ``gguf_blocks`` to the bit.

Letters: R rows (outputs), I inputs; N blocks, B bytes of a block; p panels, s stretches of the
inputs with a head each, g groups of 32 inputs in a stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from quire.base.errors import CheckpointError
from quire.contracts.linear import BlockRows, PackedMatrix
from quire.weights.gguf_blocks import SIZES, fifth_bits, joined, nibbles, six_bits, some_bits
from quire.weights.panels import PANEL

GROUP = 32
"""Inputs of a group."""
PACKED_AT_ONCE = 1 << 20
"""Weights that are packed at a time, so that they stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The numbers of rows, each ``[R, s, ..., bytes]``, uint8."""

    head: Tensor
    """float16: the scales' unit, and the minima's"""
    codes: Tensor
    """``[R, s, g, words, 4]``; of Q8_0 ``[R, s, g, 32, 1]``"""
    high: Tensor
    """``[R, s, g, words, 4]``"""
    scales: Tensor
    """``[R, s, g, numbers, bytes]``"""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """One format of GGUF files in panels."""

    name: str
    codes: Callable[[Tensor], Tensor]
    """Returns the codes ``[N, numbers]`` of blocks, uint8 from 0 on (Q8_0: two's complement)."""
    scales: Callable[[Tensor], Tensor]
    """Returns the scales of blocks as bytes ``[N, bytes of all groups]``, group by group."""
    unit: int = -1
    """First byte of the float16 numbers of a head; -1 without a head."""
    units: int = 0
    numbers: int = 1
    """Scales of a group."""
    high: int = 0
    """Bits of a code above the fourth."""
    offset: int = 0

    @property
    def groups(self) -> int:
        """Groups of a stretch."""
        return SIZES[self.name][0] // GROUP

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes for an output: of a head, and of a group's codes, high bits and scales."""
        return 2 * self.units, 32 if self.name == "Q8_0" else 16, 4 * self.high, 2

    def panel_bytes(self, inputs: int) -> int:
        """Return the bytes of a panel."""
        head, *group = self.sizes
        return PANEL * (inputs // GROUP * sum(group) + inputs // (GROUP * self.groups) * head)

    def pieces(self, rows_RB: Tensor) -> Pieces:
        """Return the numbers of rows of blocks."""
        rows, (_, size), groups = len(rows_RB), SIZES[self.name], self.groups
        blocks = rows_RB.reshape(-1, size)
        stretches = len(blocks) // rows
        shape = rows, stretches, groups
        codes = self.codes(blocks).view(-1, GROUP)
        high = codes.new_empty(len(codes), 0, 4)
        if self.name == "Q8_0":
            laid = codes.view(-1, GROUP, 1)
        else:
            laid = (codes[:, 0::2] & 15 | codes[:, 1::2] << 4).view(-1, 4, 4)
        if self.high:
            each = 8 // self.high
            shifts = torch.arange(0, 8, self.high, dtype=torch.uint8)
            above = (codes >> 4).view(-1, GROUP // each, each) << shifts
            high = above.sum(-1, dtype=torch.uint8).view(-1, self.high, 4)
        head = blocks[:, self.unit : self.unit + 2 * self.units] if self.units else blocks[:, :0]
        return Pieces(
            head.reshape(rows, stretches, self.units, 2),
            laid.view(*shape, *laid.shape[1:]),
            high.view(*shape, self.high, 4),
            self.scales(blocks).reshape(*shape, self.numbers, 2 // self.numbers),
        )

    def lay(self, pieces: Pieces, out: Tensor) -> None:
        """Write the pieces of whole panels to ``out``, uint8 ``[p, panel_bytes]``."""
        for part, piece in zip(self._parts(out), _all(pieces), strict=True):
            rows = piece.view(len(out), PANEL, *piece.shape[1:])
            part.copy_(rows.movedim(1, -2))

    def read(self, panels: Tensor, chosen: tuple[Tensor, Tensor] | None = None) -> Pieces:
        """Return the pieces of panels, uint8 ``[p, panel_bytes]``: of all outputs, or of the chosen
        ones by panel and place in it."""
        parts = self._parts(panels)
        if chosen is None:
            return Pieces(*(part.movedim(-2, 1).flatten(0, 1) for part in parts))
        panel, place = chosen
        return Pieces(*(part.movedim(-2, 1)[panel, place] for part in parts))

    def values(self, pieces: Pieces) -> Tensor:
        """Return float32 ``[R, I]``."""
        rows = len(pieces.codes)
        if self.name == "Q8_0":
            codes = pieces.codes.contiguous().view(torch.int8).float()
        else:
            low = torch.stack((pieces.codes & 15, pieces.codes >> 4), -1)
            codes = low.reshape(*low.shape[:3], GROUP)
            if self.high:
                shifts = torch.arange(0, 8, self.high, dtype=torch.uint8)
                above = pieces.high.unsqueeze(-1) >> shifts & (1 << self.high) - 1
                codes = codes | above.reshape(codes.shape) << 4
            codes = codes.float() - self.offset
        if not self.units:
            steps = pieces.scales.contiguous().view(torch.float16).float()
            return (codes.view(*steps.shape[:3], GROUP) * steps.squeeze(-1)).view(rows, -1)
        units = pieces.head.contiguous().view(torch.float16).float().unsqueeze(2)  # [R, s, 1, units, 1]
        scales = pieces.scales.squeeze(-1)
        if self.units == 2:
            scaled = units.squeeze(-1) * scales.float()
            return (codes * scaled[..., :1] - scaled[..., 1:]).view(rows, -1)
        steps = units * scales.contiguous().view(torch.int8).float().unsqueeze(-1)
        return (codes.view(*steps.shape[:4], -1) * steps).view(rows, -1)

    def _parts(self, panels: Tensor) -> Iterator[Tensor]:
        """Yield views of panels: ``[p, s, (g,) numbers, 32, bytes]`` of each piece."""
        head, *group = self.sizes
        flat = panels.view(len(panels), -1, PANEL * (head + self.groups * sum(group)))
        widths = [2, 1 if self.name == "Q8_0" else 4, 4, 2 // self.numbers]
        yield flat[..., : PANEL * head].view(*flat.shape[:-1], self.units, PANEL, 2)
        inside = flat[..., PANEL * head :].view(*flat.shape[:-1], self.groups, PANEL * sum(group))
        start = 0
        for size, width in zip(group, widths[1:], strict=True):
            part = inside[..., PANEL * start : PANEL * (start + size)]
            yield part.view(*part.shape[:-1], size // width, PANEL, width)
            start += size


def _all(pieces: Pieces) -> tuple[Tensor, ...]:
    return pieces.head, pieces.codes, pieces.high, pieces.scales


def _two_scales(blocks: Tensor) -> Tensor:
    return torch.stack(six_bits(blocks), -1)


def _five_k(blocks: Tensor) -> Tensor:
    low = some_bits(blocks[:, 48:].reshape(-1, 4, 32), 0, 4, mask=15).view(-1, 8, 32)
    return joined(low, some_bits(blocks[:, 16:48], *range(8), mask=1))


def _six_k(blocks: Tensor) -> Tensor:
    low = some_bits(blocks[:, :128].reshape(-1, 2, 64), 0, 4, mask=15).view(-1, 16, 16)
    return joined(low, some_bits(blocks[:, 128:192].reshape(-1, 2, 32), 0, 2, 4, 6, mask=3).view(-1, 16, 16))


KINDS: Mapping[str, BlockKind] = {
    kind.name: kind
    for kind in (
        BlockKind("Q4_0", lambda one: nibbles(one, 2), lambda one: one[:, :2], offset=8),
        BlockKind("Q5_0", lambda one: joined(nibbles(one, 6), fifth_bits(one, 2)), lambda one: one[:, :2], high=1, offset=16),
        BlockKind("Q8_0", lambda one: one[:, 2:].contiguous(), lambda one: one[:, :2]),
        BlockKind("Q4_K", lambda one: some_bits(one[:, 16:].reshape(-1, 4, 32), 0, 4, mask=15), _two_scales, 0, 2, 2),
        BlockKind("Q5_K", _five_k, _two_scales, 0, 2, 2, high=1),
        BlockKind("Q6_K", _six_k, lambda one: one[:, 192:208], 208, 1, 2, high=2, offset=32),
    )
}  # fmt: skip
"""In the order of ``Kind`` in ``kernels/cpu/linear.h``."""


def pack_blocks(parts: Sequence[BlockRows], inputs: int, empty: Callable[[int], Tensor] | None = None) -> PackedMatrix:
    """Return rows that follow each other as one matrix. ``empty`` allocates bytes.

    ``CheckpointError``: a scale is not finite. All parts but the last have a multiple of 32 rows.
    """
    sizes = [-(-len(part.rows_RB) // PANEL) * KINDS[part.kind].panel_bytes(inputs) for part in parts]
    out = (empty or (lambda size: torch.empty(size, dtype=torch.uint8)))(sum(sizes))
    for part, to in zip(parts, torch.split(out, sizes), strict=True):
        kind = KINDS[part.kind]
        panels = to.view(-1, kind.panel_bytes(inputs))
        step = max(1, PACKED_AT_ONCE // (PANEL * inputs))
        for first in range(0, len(panels), step):
            rows = part.rows_RB[first * PANEL : (first + step) * PANEL]
            rows = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
            pieces = kind.pieces(rows)
            floats = pieces.head if kind.units else pieces.scales
            if not bool(torch.isfinite(floats.contiguous().view(torch.float16)).all()):
                raise CheckpointError(f"{part.name} has a scale in {part.kind} that is not finite; the file is damaged")
            kind.lay(pieces, panels[first : first + step])
    outputs = sum(len(part.rows_RB) for part in parts)
    kinds = tuple((part.kind, len(part.rows_RB)) for part in parts)
    return PackedMatrix("blocks", outputs, inputs, GROUP, out, None, kinds)


def unpack_blocks(packed: PackedMatrix) -> Tensor:
    """Return the values ``[O, I]`` in float32."""
    found = []
    for kind, rows, panels in _panels_of(packed):
        step = max(1, PACKED_AT_ONCE // (PANEL * packed.inputs))
        found += [kind.values(kind.read(some)) for some in torch.split(panels, step)]
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
        values_TI[inside] = kind.values(kind.read(panels, (place // PANEL, place % PANEL)))
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
