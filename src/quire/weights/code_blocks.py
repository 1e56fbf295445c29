"""Codes of quantised checkpoints as blocks of GGUF files, which kernels multiply.

A code less its zero takes 4, 5 or 8 bits: that decides the format. Floats of 8 bits have one of
their own, with float32 scales. Floats of 4 bits with scales in 8 bits are NVFP4. Letters: R rows, I
inputs; b blocks of 32 inputs, or of 64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.contracts.linear import BlockRows, CodeRows
from quire.weights.block_panels import GROUP
from quire.weights.gguf_blocks import FLOAT8, NVFP4, SIZES, headed, heads, nvfp4_steps

HOLDS = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
"""Codes of a format are from the number below zero to one less than it."""


def blocks_of(parts: Sequence[CodeRows]) -> list[BlockRows] | None:
    """Return rows with the same values in the smallest formats; None if a scale of integers is no
    float16, or a code or a group has no place in them."""
    found = [_blocks(part) for part in parts]
    made = [one for one in found if one is not None]
    return made if len(made) == len(found) else None


def _blocks(part: CodeRows) -> BlockRows | None:
    rows = len(part.codes_RI)
    if part.codes_RI.dtype == torch.float8_e4m3fn:
        return None if part.group % GROUP else _floats(part)
    if part.codes_RI.dtype == torch.uint8:
        return _floats_of_4_bits(part)
    kind = next((kind for kind, most in HOLDS.items() if part.fits(-most, most - 1)), None)
    halves = part.scales_Rg.half()
    if kind is None or part.group % GROUP or not torch.equal(halves.float(), part.scales_Rg.float()):
        return None
    scales_Rb = halves.repeat_interleave(part.group // GROUP, 1)
    parts = [scales_Rb.unsqueeze(-1).view(torch.uint8)]
    codes = part.codes_RI.view(rows, -1, GROUP)
    if kind == "Q8_0":
        parts.append(codes.to(torch.int8).view(torch.uint8))
    else:
        codes = (codes + HOLDS[kind]).to(torch.uint8)
        if kind == "Q5_0":
            parts.append(_bytes_of_bits(codes >> 4))
        low = codes & 15
        parts.append(low[..., :16] | low[..., 16:] << 4)
    return BlockRows(part.name, kind, torch.cat(parts, -1).view(rows, -1))


def _floats(part: CodeRows) -> BlockRows:
    rows = len(part.codes_RI)
    scales_Rb = part.scales_Rg.float().repeat_interleave(part.group // GROUP, 1)
    codes = part.codes_RI.contiguous().view(torch.uint8).view(rows, -1, GROUP)
    blocks = torch.cat((scales_Rb.unsqueeze(-1).view(torch.uint8), codes), -1)
    return BlockRows(part.name, FLOAT8, blocks.view(rows, -1))


def _floats_of_4_bits(part: CodeRows) -> BlockRows | None:
    """None for another group than 16, half a block, or a unit that no head holds."""
    rows, inputs = part.codes_RI.shape
    # Codes stand for half of what the table has.
    head_12 = _head(part.unit / 2)
    if part.group != 16 or inputs % SIZES[NVFP4][0] or head_12 is None:
        return None
    scales_Rb4 = part.scales_Rg.contiguous().view(torch.uint8).view(rows, -1, 4)
    codes = part.codes_RI.view(rows, -1, 4, 2, 8)
    blocks = torch.cat((scales_Rb4, (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)), -1)
    return BlockRows(part.name, NVFP4, headed(blocks.view(rows, -1), head_12.expand(rows, 2).contiguous()))


def _head(unit: float) -> Tensor | None:
    """Return float32 ``[1, 2]``: the head with which every scale becomes its product with the unit,
    rounded once; None if there is none, as the sum of two numbers of 20 bits is not the unit
    itself."""
    every = torch.arange(127, dtype=torch.uint8).view(1, -1)
    wanted = (every.view(torch.float8_e4m3fn).double() * unit).float()
    for near in (1, 1 + 2.0**-40, 1 - 2.0**-40):
        found = heads(torch.tensor([[unit * near]], dtype=torch.float64))
        if torch.equal(nvfp4_steps(every, found), wanted):
            return found
    return None


def _bytes_of_bits(bits_RbG: Tensor) -> Tensor:
    """Return ``[R, b, 4]`` of bits, the first ones lowest."""
    shifted = bits_RbG.view(*bits_RbG.shape[:-1], 4, 8) << torch.arange(8, dtype=torch.uint8)
    return shifted.sum(-1, dtype=torch.uint8)
