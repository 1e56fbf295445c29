"""Executors that keep K and V in 8 bits, compared with transformers over a cache that rounds in
the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.int8_rows import kept_in_int8, suites

from . import test_kv_cache, test_model_executor, test_serialize, test_trees


@pytest.fixture(autouse=True)
def int8() -> Iterator[pytest.MonkeyPatch]:
    """Everything is kept in this format."""
    with kept_in_int8() as patch:
        yield patch


OTHER = {
    # They convert a file from one dtype to another.
    "test_dtype_is_converted_on_request_only",
    "test_what_does_not_fit_is_refused",
    # It counts bytes of plain rows.
    "test_handle_members",
    # A process of its own has plain rows.
    "test_another_process",
}

globals().update(suites(test_serialize, test_kv_cache, test_model_executor, test_trees, without=OTHER, turn=0))
