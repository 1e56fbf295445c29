"""NF4 and FP4 of bitsandbytes: codes of 4 bits that stand for 16 values, with a scale for a block.

Blocks run over the weights row by row. The scales may be codes of 8 bits themselves (double
quantisation). Letters: N weights, b blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.base.errors import CheckpointError
from quire.contracts.weights import StoredTensor
from quire.weights.scaled_float8 import matrix
from quire.weights.scales import Shape, check_finite, parts, whole, write

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Known numbers of weights that share a scale."""
MOST_STATE = 4096
"""Most bytes of a state's JSON."""
KINDS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class FourBits:
    """``NAME`` uint8 ``[N / 2, 1]``, the first weight in the high bits, and ``NAME.absmax``,
    ``NAME.quant_map``, ``NAME.quant_state.bitsandbytes__KIND``; with double quantisation also
    ``NAME.nested_absmax`` and ``NAME.nested_quant_map``."""

    kind: str
    """"nf4" or "fp4"."""
    nested: bool
    sizes: tuple[int, int, int] = (0, 0, 0)
    """Numbers of scales, of scales of scales, and of bytes of the state, as the file has them."""
    is_plain: bool = False

    @property
    def name(self) -> str:
        """See ``WeightFormat``."""
        return self.kind

    @property
    def state(self) -> str:
        """The end of the name of the tensor that describes the others in JSON."""
        return f".quant_state.bitsandbytes__{self.kind}"

    def stored(self, name: str, shape: Shape) -> dict[str, StoredTensor]:
        """See ``WeightFormat``."""
        rows, columns = matrix(self.name, name, shape)
        scales, steps, state = self.sizes
        found = {
            name: StoredTensor(shape=(whole(rows * columns, 2), 1), dtypes=("U8",)),
            f"{name}.absmax": StoredTensor(shape=(scales,), dtypes=("U8",) if self.nested else ("F32",)),
            f"{name}.quant_map": StoredTensor(shape=(16,), dtypes=("F32",)),
            f"{name}{self.state}": StoredTensor(shape=(min(state, MOST_STATE),), dtypes=("U8",)),
        }
        if self.nested:
            found[f"{name}.nested_absmax"] = StoredTensor(shape=(steps,), dtypes=("F32",))
            found[f"{name}.nested_quant_map"] = StoredTensor(shape=(256,), dtypes=("F32",))
        return found

    def expand(self, name: str, stored: Mapping[str, Tensor], out: Tensor) -> None:
        """See ``WeightFormat``. Values are rounded to the state's dtype, and then to that of
        ``out``."""
        codes, absmax, values, state, *nested = stored.values()
        facts = _state(name, state, tuple(out.shape))
        block, kind = facts["blocksize"], KINDS[facts["dtype"]]
        scales = absmax
        if nested:
            steps, table = nested
            size = _block(name, facts, "nested_blocksize")
            _check_count(name, len(steps), whole(len(absmax), size), "nested_absmax")
            offset = facts.get("nested_offset")
            if not isinstance(offset, float | int) or isinstance(offset, bool):
                raise CheckpointError(f"{name}: nested_offset in its quant_state is {offset!r}; expected a number")
            check_finite(name, steps)
            scales = table[absmax.long()] * steps.repeat_interleave(size)[: len(absmax)] + torch.tensor(float(offset))
        count = out.numel()
        _check_count(name, len(scales), whole(count, block), "absmax")
        check_finite(name, scales)
        check_finite(name, values)
        codes, flat = codes.flatten(), out.view(-1) if out.is_contiguous() else torch.empty(count, dtype=out.dtype)
        for some in parts(count, 1, BLOCKS[-1]):
            size, pairs = some.stop - some.start, codes[some.start // 2 : whole(some.stop, 2)]
            found = values[torch.stack((pairs >> 4, pairs & 15), -1).flatten().long()[:size]]
            shares = scales[some.start // block : whole(some.stop, block)].repeat_interleave(block)[:size]
            write(name, (found * shares).to(kind), flat[some])
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))


def _state(name: str, state: Tensor, shape: Shape) -> dict[str, Any]:
    try:
        found = json.loads(bytes(state.tolist()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: its quant_state is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name}: its quant_state holds no object")
    _block(name, found, "blocksize")
    if list(found.get("shape") or ()) != list(shape):
        raise CheckpointError(f"{name}: shape in its quant_state is {found.get('shape')}; expected {list(shape)}")
    if (kind := found.get("dtype")) not in KINDS:
        raise CheckpointError(f"{name}: dtype in its quant_state is {kind!r}; expected one of {list(KINDS)}")
    return found


def _block(name: str, facts: dict[str, Any], field: str) -> int:
    found = facts.get(field)
    if found not in BLOCKS or isinstance(found, bool):
        raise CheckpointError(f"{name}: {field} in its quant_state is {found!r}; expected one of {list(BLOCKS)}")
    return int(found)


def _check_count(name: str, found: int, expected: int, what: str) -> None:
    if found != expected:
        raise CheckpointError(f"{name} has {found} numbers in {what}; expected {expected}")
