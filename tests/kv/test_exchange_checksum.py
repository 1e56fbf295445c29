"""The checksum of a tensor looks at its elements and not at how they lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kv.exchange import checksum

NUMBERS = torch.arange(60.0)


@pytest.mark.parametrize(
    "tensor",
    [
        NUMBERS.view(3, 4, 5),
        NUMBERS.view(5, 4, 3).permute(2, 1, 0),
        NUMBERS[7:8].as_strided((1, 1, 1), (5, 5, 5)),
        NUMBERS[::7][:1].view(1, 1, 1),
        NUMBERS[:0].view(0, 1, 4),
        NUMBERS.view(3, 4, 5).bfloat16(),
    ],
)
def test_checksum_is_that_of_a_plain_copy(tensor: Tensor) -> None:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor)
    assert checksum(tensor) == checksum(plain)
    if tensor.numel():
        assert checksum(tensor) != checksum(plain + 1)
