"""The pool of adapters: ids, refusals, the two tiers, and that nothing is left behind.

Letters: R rank, I input, O output features, V vocabulary, E model width, T rows.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.adapters.test_low_rank import SIZES, VOCABULARY, WIDTH, Bed, bed, forward_and_compare, random_adapter
from torch import Tensor

from quire.adapters.low_rank import RankRows
from quire.adapters.pool import AdapterPool
from quire.adapters.rank_rows import arrange
from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, Unsupported
from quire.contracts.adapters import Adapter, LowRankUpdate


def adapter(rank: int = 4, name: str = "0.out", seed: int = 0, row: int = 0, outputs: int | None = None) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    inputs, all_outputs = SIZES.get(name, (VOCABULARY, WIDTH))
    a_RI = torch.randn(rank, inputs, generator=generator)
    b_RO = torch.randn(rank, outputs or all_outputs, generator=generator)
    return Adapter(fingerprint=f"{seed}", updates=(LowRankUpdate(linear=name, row=row, a_RI=a_RI, b_RO=b_RO),))


def footprint(the: Bed) -> tuple[object, ...]:
    """All that a refused call must leave as it was."""
    terms = tuple(linear.low_rank for linear in the.linears.values())
    pool = the.pool
    return (
        pool.ids,
        pool.resident,
        pool.host_bytes,
        pool.device_bytes,
        pool.loads,
        pool.evictions,
        terms,
        the.embedding.low_rank,
    )


def bare(the: Bed) -> bool:
    return all(linear.low_rank is None for linear in the.linears.values()) and the.embedding.low_rank is None


# -- ids and refusals ------------------------------------------------------------------------------


def test_ids_are_never_given_twice() -> None:
    the = bed()
    same = adapter()
    assert (the.pool.load(same), the.pool.load(same)) == (0, 1)
    the.pool.unload(1)
    assert the.pool.load(same) == 2
    assert the.pool.ids == (0, 2)
    assert the.pool.get(2) is same
    assert the.pool.find("0") == 0
    assert the.pool.find("1") is None
    the.pool.unload(0)
    assert the.pool.find("0") == 2


@pytest.mark.parametrize("unknown", [1, -1, True, 7])
def test_unknown_ids_are_not_found(unknown: int) -> None:
    the = bed()
    the.pool.load(adapter())
    the.pool.load(adapter())
    the.pool.unload(1)
    before = footprint(the)
    calls: list[Callable[[], object]] = [
        lambda: the.pool.get(unknown),
        lambda: the.pool.unload(unknown),
        lambda: the.pool.check([0, unknown]),
        lambda: the.pool.fits([unknown]),
        lambda: the.pool.activate([unknown], [1], [1]),
    ]
    for call in calls:
        with pytest.raises(NotFound, match=r"not loaded; loaded are \[0\]"):
            call()
    assert footprint(the) == before


def with_update(**changes: object) -> Adapter:
    one = adapter()
    return replace(one, updates=(replace(one.updates[0], **changes),))  # type: ignore[arg-type]


def with_tables(**tables: Tensor) -> Adapter:
    return Adapter(fingerprint="t", tables=tables)


REFUSED = [
    (with_update(linear="5.out"), Unsupported, "5.out"),
    (with_update(row=1), InvalidArgument, "20 inputs and 24 outputs"),
    (with_update(row=-1), InvalidArgument, "20 inputs"),
    (with_update(a_RI=torch.zeros(4, 21)), InvalidArgument, "20 inputs"),
    (with_update(a_RI=torch.zeros(3, 20)), InvalidArgument, "rank, inputs"),
    (with_update(a_RI=torch.zeros(20)), InvalidArgument, "rank, inputs"),
    (with_update(a_RI=torch.zeros(0, 20), b_RO=torch.zeros(0, 24)), InvalidArgument, "at least 1"),
    (with_update(b_RO=torch.zeros(4, 0)), InvalidArgument, "at least 1"),
    (with_update(a_RI=torch.zeros(4, 20).double()), InvalidArgument, "float64"),
    (with_update(b_RO=torch.zeros(4, 24).half()), InvalidArgument, "float16"),
    (replace(adapter(), updates=adapter().updates + adapter(outputs=1, row=23).updates), InvalidArgument, "overlap"),
    (with_tables(norm=torch.zeros(3, 3)), Unsupported, "norm"),
    (with_tables(embed=torch.zeros(WIDTH, VOCABULARY)), InvalidArgument, "expected"),
    (with_tables(head=torch.zeros(VOCABULARY + 1, WIDTH)), InvalidArgument, "expected"),
    (with_tables(head=torch.zeros(VOCABULARY, WIDTH).half()), InvalidArgument, "float16"),
    (replace(adapter(name="embed"), tables={"embed": torch.zeros(VOCABULARY, WIDTH)}), InvalidArgument, "both"),
    (adapter(rank=65), ResourceExhausted, "rank is 65; .* 64 in all, make adapter_ranks larger"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), REFUSED)
def test_what_does_not_go_with_the_model_is_refused_without_a_trace(
    wrong: Adapter, error: type[Exception], words: str
) -> None:
    the = bed(rank_capacity=64)
    with pytest.raises(error, match=words):
        the.pool.load(wrong)
    assert bare(the)
    assert the.pool.load(adapter()) == 0
    before = footprint(the)
    with pytest.raises(error, match=words):
        the.pool.load(wrong)
    assert footprint(the) == before
    assert the.pool.load(adapter()) == 1


def test_models_without_embedding_or_sites() -> None:
    pool = AdapterPool({}, None, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(Unsupported, match="embed"):
        pool.load(adapter(name="embed"))
    none = AdapterPool.without_sites("no adapters here")
    with pytest.raises(Unsupported, match="no adapters here"):
        none.load(adapter())
    with pytest.raises(Unsupported, match="no adapters here"):
        none.admit(1, 1)
    with pytest.raises(Unsupported, match="no adapters here"):
        none.activate([0], [1], [1])
    none.check([None])
    none.activate([None, None], [1, 2], [1, 1])
    none.deactivate()
    with pytest.raises(InvalidArgument, match="rank_capacity is 0"):
        AdapterPool({}, None, dtype=torch.float32, device=torch.device("cpu"), rank_capacity=0)


def test_host_memory_is_a_limit() -> None:
    the = bed()
    one = adapter()
    the.pool.host_capacity = 2 * one.nbytes
    the.pool.load(one)
    the.pool.load(one)
    before = footprint(the)
    with pytest.raises(ResourceExhausted, match=r"0 are left .* make adapter_memory larger"):
        the.pool.load(one)
    with pytest.raises(ResourceExhausted, match="takes 1 bytes of host memory and 0 are left"):
        the.pool.admit(1, 1)
    assert footprint(the) == before
    the.pool.unload(0)
    the.pool.admit(the.pool.rank_capacity, one.nbytes)
    with pytest.raises(ResourceExhausted, match=f"{one.nbytes} are left of"):
        the.pool.admit(1, one.nbytes + 1)
    with pytest.raises(ResourceExhausted, match="make adapter_ranks larger"):
        the.pool.admit(the.pool.rank_capacity + 1, 1)
    assert the.pool.load(one) == 2


def test_what_is_in_use_stays() -> None:
    the = bed()
    one = the.pool.load(adapter())
    two = the.pool.load(adapter(seed=1))
    reasons = {one: "session 3 has it"}
    the.pool.guards.append(lambda asked: reasons.get(asked, ""))
    before = footprint(the)
    with pytest.raises(FailedPrecondition, match="session 3 has it"):
        the.pool.unload(one)
    assert footprint(the) == before
    the.pool.activate([two], [1], [1])
    with pytest.raises(FailedPrecondition, match="a forward runs with it"):
        the.pool.unload(two)
    the.pool.deactivate()
    the.pool.unload(two)
    reasons.clear()
    the.pool.unload(one)
    assert bare(the)


def test_a_wrong_activation_leaves_the_base_model() -> None:
    the = bed(rank_capacity=8)
    ids = [the.pool.load(adapter(rank=4, seed=seed)) for seed in range(3)]
    assert the.pool.fits(ids[:2])
    assert not the.pool.fits(ids)
    assert the.pool.fits([ids[0]] * 9)
    x = torch.randn(3, 20)
    base = the.linears["0.out"](x)
    with pytest.raises(ResourceExhausted, match=r"12 in all; at most 8 .* make adapter_ranks larger"):
        the.pool.activate(ids, [1, 1, 1], [0, 0, 0])
    with pytest.raises(InvalidArgument, match="2 counts"):
        the.pool.activate(ids[:1], [1, 1], [1])
    assert torch.equal(the.linears["0.out"](x), base)


# -- the two tiers ---------------------------------------------------------------------------------


def test_the_one_used_longest_ago_gives_way() -> None:
    the = bed(rank_capacity=12)
    ids = [the.pool.load(adapter(rank=4, seed=seed)) for seed in range(4)]
    assert the.pool.resident == (0, 1, 2), "there was no room for the last one"
    the.pool.activate([ids[0], ids[2]], [1, 1], [1, 1])
    the.pool.activate([ids[3]], [1], [1])
    assert the.pool.resident == (0, 2, 3)
    the.pool.activate([ids[1]], [1], [1])
    assert the.pool.resident == (1, 2, 3)
    assert (the.pool.loads, the.pool.evictions) == (5, 2)
    assert the.pool.ids == (0, 1, 2, 3)


def test_results_stay_right_while_adapters_come_and_go() -> None:
    draw = random.Random(14)
    the = bed(rank_capacity=40)
    ids = [the.pool.load(random_adapter(draw, torch.float32, 24)) for _ in range(10)]
    forwards = 0
    for seed in range(60):
        adapters = [draw.choice([*ids, None]) for _ in range(draw.randint(1, 5))]
        if the.pool.fits({one for one in adapters if one is not None}):
            forwards += 1
            forward_and_compare(the, adapters, [draw.choice([1, 3, 34]) for _ in adapters], [1] * len(adapters), seed)
    assert forwards > 20
    assert the.pool.evictions > 10


def test_rank_rows_in_pieces_are_laid_out_anew() -> None:
    """Enough of them, but no run that is long enough: whatever fits by its sum can run."""
    the = bed(rank_capacity=16)
    ids = [the.pool.load(adapter(rank=4, seed=seed)) for seed in range(4)]
    the.pool.unload(ids[0])
    the.pool.unload(ids[2])
    wide = the.pool.load(adapter(rank=8, seed=9))
    assert wide not in the.pool.resident
    forward_and_compare(the, [ids[1], wide, ids[3]], [2, 2, 2], [1, 1, 1], 1)
    assert the.pool.resident == (ids[1], ids[3], wide)


def test_arrangements() -> None:
    ranks = {0: 4, 1: 4, 2: 4, 3: 8, 4: 0}
    found = arrange({0: 0, 1: 4}, ranks, [2], 12, evict=False)
    assert found is not None
    assert (dict(found.first), found.written) == ({0: 0, 1: 4, 2: 8}, (2,))
    assert arrange({0: 0, 1: 4, 2: 8}, ranks, [3], 12, evict=False) is None
    found = arrange({0: 0, 1: 4, 2: 8}, ranks, [3], 12, evict=True)
    assert found is not None
    assert (dict(found.first), found.written) == ({2: 8, 3: 0}, (3,))
    assert arrange({}, ranks, [0, 3, 1], 12, evict=True) is None
    found = arrange({0: 0, 2: 8, 4: 0}, ranks, [2, 3, 4], 15, evict=True)
    assert found is not None
    assert dict(found.first)[2] != dict(found.first)[3]
    assert arrange({0: 0}, ranks, [4], 4, evict=False) is not None


def test_storage_grows_with_what_is_loaded_and_only_where_it_changes_something() -> None:
    the = bed(rank_capacity=64)
    assert the.pool.device_bytes == 0
    the.pool.load(adapter(rank=4))
    row = 4 * (20 + WIDTH)
    assert the.pool.device_bytes == 4 * row
    the.pool.load(adapter(rank=4))
    assert the.pool.device_bytes == 8 * row
    the.pool.load(adapter(rank=4))
    assert the.pool.device_bytes == 16 * row, "by doubling"
    assert the.linears["0.qkv"].low_rank is None
    for one in the.pool.ids:
        the.pool.unload(one)
    assert the.pool.device_bytes == 0
    assert bare(the)


def test_no_device_memory_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    the = bed()
    one = the.pool.load(adapter())
    x = torch.randn(2, 20)
    the.pool.activate([one], [2], [1])
    result = the.linears["0.out"](x)
    the.pool.deactivate()
    enlarged = RankRows.enlarged

    def fails(self: RankRows, capacity: int) -> tuple[Tensor, Tensor]:
        if self.row == 24:
            raise torch.OutOfMemoryError("out of memory")
        return enlarged(self, capacity)

    updates = (*adapter(rank=8).updates, *adapter(rank=8, name="0.qkv", row=24, outputs=8).updates)
    before = footprint(the)
    with monkeypatch.context() as patch:
        patch.setattr(RankRows, "enlarged", fails)
        with pytest.raises(ResourceExhausted, match="out of memory"):
            the.pool.load(Adapter(fingerprint="x", updates=updates))
        assert footprint(the) == before
    the.pool.activate([one], [2], [1])
    assert torch.equal(the.linears["0.out"](x), result)
    assert the.pool.load(Adapter(fingerprint="x", updates=updates)) > one


def test_storage_that_has_grown_is_not_held_twice() -> None:
    the = bed()
    one = the.pool.load(adapter())
    the.pool.activate([one], [1], [1])
    the.pool.deactivate()
    (rows,) = the.linears["0.out"].low_rank.pieces.values()  # type: ignore[union-attr]
    old = weakref.ref(rows.a_SI)
    the.pool.load(adapter(seed=1))
    gc.collect()
    assert old() is None
    assert rows.capacity == 8
    assert the.pool._plan is None, "views of the old storage would keep it"


def test_the_same_batch_with_other_rows_for_the_head() -> None:
    the = bed()
    ids = [the.pool.load(adapter(name="head", seed=seed)) for seed in range(2)]
    for seed, head_counts in enumerate(([1, 1, 1], [0, 1, 3], [3, 0, 0])):
        forward_and_compare(the, [ids[0], None, ids[1]], [3, 3, 3], head_counts, seed)


def test_loading_during_a_forward_changes_nothing_of_it() -> None:
    the = bed()
    one = the.pool.load(adapter(rank=4))
    x = torch.randn(2, 20)
    the.pool.activate([one], [2], [1])
    before = the.linears["0.out"](x)
    the.pool.load(adapter(rank=32, seed=1))
    assert torch.equal(the.linears["0.out"](x), before)


def test_pools_work_inside_and_outside_of_inference_mode() -> None:
    """Whoever loads, and whoever runs, may be in inference mode or not; the head runs outside of
    it.
    """
    the = bed()
    head = adapter(name="head", seed=3)
    with torch.inference_mode():
        one, *_ = (the.pool.load(head) for _ in range(3))
        the.pool.activate([one, None], [2, 1], [2, 1])
    bytes_before = the.pool.device_bytes
    the.pool.load(head)
    assert the.pool.device_bytes == bytes_before, "written to what was made in inference mode"
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        first = the.linears["head"](x)
    two = the.pool.load(adapter(name="head", rank=16, seed=4))
    the.pool.activate([one, None], [2, 1], [2, 1])
    with torch.inference_mode():
        assert torch.equal(the.linears["head"](x), first)
        the.pool.activate([two, None], [2, 1], [2, 1])
    assert not torch.equal(the.linears["head"](x)[:2], first[:2])
    assert torch.equal(the.linears["head"](x)[2:], first[2:])


# -- nothing left behind ---------------------------------------------------------------------------


def test_a_thousand_random_calls_leave_nothing() -> None:
    draw = random.Random(7)
    the = bed(rank_capacity=64)
    shelf = [random_adapter(draw, torch.float32, 24) for _ in range(12)]
    x = {name: torch.randn(4, inputs) for name, (inputs, _) in SIZES.items()}
    base = {name: linear(x[name]) for name, linear in the.linears.items()}
    most = 0
    for _ in range(1000):
        ids = list(the.pool.ids)
        what = draw.random()
        if what < 0.3 and len(ids) < 8:
            the.pool.load(draw.choice(shelf))
        elif what < 0.55 and ids:
            the.pool.unload(draw.choice(ids))
        else:
            adapters = [draw.choice([*ids, None]) for _ in range(4)]
            if the.pool.fits({one for one in adapters if one is not None}):
                the.pool.activate(adapters, [1, 1, 1, 1], [1, 1, 1, 1])
                for name, linear in the.linears.items():
                    linear(x[name])
                the.embedding(torch.zeros(4, dtype=torch.int64))
                the.pool.deactivate()
        most = max(most, the.pool.device_bytes)
        assert the.pool.host_bytes == sum(the.pool.get(one).nbytes for one in the.pool.ids)
        assert set(the.pool.resident) <= set(the.pool.ids)
    all_rows = sum(4 * 64 * (inputs + outputs) for inputs, outputs in SIZES.values())
    assert most <= 4 * all_rows, "whatever comes, storage is bounded by the rank rows of the pieces"
    watched = [
        weakref.ref(rows.a_SI)
        for linear in the.linears.values()
        if linear.low_rank
        for rows in linear.low_rank.pieces.values()  # type: ignore[attr-defined]
    ]
    for one in the.pool.ids:
        the.pool.unload(one)
    gc.collect()
    assert not any(one() is not None for one in watched)
    assert (the.pool.host_bytes, the.pool.device_bytes, the.pool.resident, the.pool.ids) == (0, 0, (), ())
    assert bare(the)
    for name, linear in the.linears.items():
        assert torch.equal(linear(x[name]), base[name])
