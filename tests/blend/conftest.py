"""float64 throughout, for tests that compare a blended forward with a full one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.blend.small_model import small_model
from tests.exact import Float64


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Make tables, rotations and scores in float64, too, for a whole file."""
    with Float64():
        small_model.cache_clear()
        yield
    small_model.cache_clear()
