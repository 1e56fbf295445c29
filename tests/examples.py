"""How many examples of Hypothesis a test tries."""

from __future__ import annotations

from hypothesis import settings


def examples(quick: int, many: int) -> int:
    """``quick`` in ``make test``, ``many`` in ``make test-all``, which has a profile of its own."""
    return many if settings.get_current_profile_name() == "random" else quick
