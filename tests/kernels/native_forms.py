"""What tests of the C++ calls over several maps share: forms of weights, and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.contracts.linear import WeightForm

FORMS: tuple[tuple[torch.dtype, WeightForm], ...] = (
    (torch.float32, "float32"),
    (torch.float32, "bfloat16"),
    (torch.bfloat16, "bfloat16"),
    (torch.bfloat16, "int8"),
    (torch.float32, "int4"),
)
"""Dtypes of activations and forms of weights."""


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """Three, so that more than one has work at once, in each test of a file that imports this."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)
