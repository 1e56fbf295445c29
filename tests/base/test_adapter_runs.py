"""``AdapterRuns`` against a plain list with the adapter of each token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.base.types import BASE, AdapterRuns

LENGTH = 12
SWITCHES = st.lists(st.tuples(st.integers(0, LENGTH - 1), st.sampled_from([None, 0, 1])), max_size=5)


def made(switches: list[tuple[int, int | None]]) -> tuple[AdapterRuns, list[int | None]]:
    """A history by switches, and the adapter of each of ``LENGTH`` tokens."""
    runs, naive = BASE, [None] * LENGTH
    told: list[int | None] = list(naive)
    for position, adapter in switches:
        runs = runs.then(position, adapter)
        told[position:] = [adapter] * (LENGTH - position)
    return runs, told


@given(SWITCHES)
def test_each_token_has_its_adapter(switches: list[tuple[int, int | None]]) -> None:
    runs, naive = made(switches)
    assert [runs.at(position) for position in range(LENGTH)] == naive
    assert runs.at(10**9) == naive[-1]
    assert runs.runs[0][0] == 0
    assert all(a[0] < b[0] and a[1] != b[1] for a, b in zip(runs.runs, runs.runs[1:], strict=False))
    assert runs.ids == {one for one in naive if one is not None}


@given(SWITCHES, st.integers(0, LENGTH), st.integers(0, LENGTH), st.integers(0, 5), st.sampled_from([None, 0, 1]))
def test_a_piece_is_replaced(
    switches: list[tuple[int, int | None]], one: int, other: int, count: int, adapter: int | None
) -> None:
    (runs, naive), (start, stop) = made(switches), sorted((one, other))
    found, wanted = runs.spliced(start, stop, count, adapter), [*naive[:start], *[adapter] * count, *naive[stop:]]
    assert [found.at(position) for position in range(len(wanted))] == wanted
    assert all(a[0] < b[0] and a[1] != b[1] for a, b in zip(found.runs, found.runs[1:], strict=False))


@given(SWITCHES)
def test_where_a_run_ends(switches: list[tuple[int, int | None]]) -> None:
    runs, naive = made(switches)
    for position in range(LENGTH):
        ends = [later for later in range(position, LENGTH) if naive[later] != naive[position]]
        assert runs.end(position) == (ends[0] if ends else None)


@given(SWITCHES, SWITCHES)
def test_equal_histories_are_equal_values(
    switches: list[tuple[int, int | None]], others: list[tuple[int, int | None]]
) -> None:
    (runs, naive), (other, other_naive) = made(switches), made(others)
    assert (runs == other) == (naive == other_naive)


@given(SWITCHES, SWITCHES, st.integers(0, LENGTH))
def test_how_far_two_agree(
    switches: list[tuple[int, int | None]], others: list[tuple[int, int | None]], length: int
) -> None:
    (runs, naive), (other, other_naive) = made(switches), made(others)
    differ = [position for position in range(length) if naive[position] != other_naive[position]]
    assert runs.agreed(other, length) == (differ[0] if differ else length)


@given(SWITCHES, st.integers(1, LENGTH))
def test_a_cut_goes_on_with_its_last_run(switches: list[tuple[int, int | None]], length: int) -> None:
    runs, naive = made(switches)
    cut = runs.cut(length)
    assert [cut.at(position) for position in range(length)] == naive[:length]
    assert cut.at(LENGTH + 5) == naive[length - 1]


def test_a_cut_to_nothing_is_the_first_run() -> None:
    assert BASE.then(0, 3).then(4, 5).cut(0) == BASE.then(0, 3)
