"""Prefill buckets: LiteRT-LM's table, and its rule by the letter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidArgument
from quire.executor.buckets import PrefillGroup, prefill_groups


@pytest.mark.parametrize(
    ("buckets", "num_tokens", "groups"),
    [
        ((1024, 512, 128), 2048, [(1024, 1024), (1024, 1024)]),
        ((1024, 512, 128), 1536, [(1024, 1024), (512, 512)]),
        ((1024, 512, 128), 1100, [(1024, 1024), (128, 76)]),
        ((1024, 512, 128), 100, [(128, 100)]),
        ((512, 128, 32), 600, [(512, 512), (128, 88)]),
        ((512, 128, 32), 768, [(512, 512), (512, 256)]),
        ((512, 128, 32), 592, [(512, 512), (128, 80)]),
        ((512, 128, 32), 640, [(512, 512), (128, 128)]),
        ((512, 384, 128), 768, [(512, 512), (384, 256)]),
        ((512, 384, 128), 640, [(512, 512), (128, 128)]),
        ((100, 30, 10), 280, [(100, 100), (100, 100), (100, 80)]),
        ((600, 500), 599, [(600, 599)]),
        ((512, 128), 130, [(128, 128), (128, 2)]),
        ((512, 128), 0, []),
    ],
)
def test_prefill_groups_of_litert(buckets: tuple[int, ...], num_tokens: int, groups: list[tuple[int, int]]) -> None:
    expected = [PrefillGroup(bucket, used) for bucket, used in groups]
    assert prefill_groups(num_tokens, buckets) == expected
    assert prefill_groups(num_tokens, buckets[::-1]) == expected


def groups_by_the_letter(r: int, buckets: list[int]) -> list[tuple[int, int]]:
    """The four numbered rules of the specification, one by one."""
    groups: list[tuple[int, int]] = []
    at = 0
    while True:
        c = buckets[at]
        while r >= c:
            groups.append((c, c))
            r -= c
        if r == 0:
            return groups
        if at + 1 == len(buckets):
            return [*groups, (c, r)]
        m = buckets[at + 1]
        if not (2 * m >= c and r <= m) and 2 * r >= c:
            return [*groups, (c, r)]
        at += 1


@given(st.integers(0, 3000), st.sets(st.integers(1, 700), min_size=1, max_size=5))
def test_prefill_groups_by_the_letter(num_tokens: int, buckets: set[int]) -> None:
    groups = prefill_groups(num_tokens, list(buckets))
    assert [(g.bucket, g.num_tokens) for g in groups] == groups_by_the_letter(num_tokens, sorted(buckets, reverse=True))
    assert sum(g.num_tokens for g in groups) == num_tokens
    assert not any(g.padding for g in groups[:-1])


def test_prefill_groups_refusals() -> None:
    for num_tokens, buckets in ((-1, [4]), (1, []), (1, [0, 4]), (1, [4, 4])):
        with pytest.raises(InvalidArgument):
            prefill_groups(num_tokens, buckets)
