"""Low-rank products: the reference against loops over numbers in float64, the fast ones against the
reference.

How far off a fast result may be is derived: ``n`` products of numbers of precision u, summed in any
order, are off by no more than n * u of the sum of their magnitudes; a result is rounded once to the
model's dtype.

Letters: T rows, I input, O output features, R rank, V vocabulary, E model width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from torch import Tensor

from quire.adapters import low_rank as fast
from quire.adapters.low_rank import Share, plan_parts, product_dtype
from quire.adapters.pool import AdapterPool
from quire.base.errors import InvalidArgument
from quire.contracts.adapters import Adapter, LowRankUpdate
from quire.kernels.linear.low_rank import native_low_rank
from quire.nn.embedding import Embedding, ScaledEmbedding
from quire.nn.linear import Linear
from quire.ops.low_rank import add_low_rank, embed_under, replace_products

VOCABULARY, WIDTH = 50, 24
SIZES = {"0.qkv": (WIDTH, 40), "0.out": (20, WIDTH), "head": (WIDTH, VOCABULARY)}
"""Inputs and outputs of the maps of a small model."""
PIECES = {"0.qkv": ((0, 24), (24, 8), (32, 8)), "0.out": ((0, 24),), "head": ((0, 50),), "embed": ((0, 24),)}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _needs_its_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


# -- the reference ---------------------------------------------------------------------------------


def update_of(
    linear: str, row: int, rank: int, inputs: int, outputs: int, generator: torch.Generator, dtype: torch.dtype
) -> LowRankUpdate:
    a_RI = torch.randn(rank, inputs, generator=generator).to(dtype)
    b_RO = torch.randn(rank, outputs, generator=generator).to(dtype)
    return LowRankUpdate(linear=linear, row=row, a_RI=a_RI, b_RO=b_RO)


ORDERS = 30 * 10 * torch.finfo(torch.float64).eps
"""Two orders of a sum of at most 30 products of normal numbers, of which none is above 10, in
float64.
"""


def test_the_reference_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y, table = (torch.randn(*shape, generator=generator).double() for shape in ((4, 5), (4, 7), (7, 5)))
    one = update_of("0.qkv", 2, 3, 5, 4, generator, torch.float64)
    other = update_of("0.qkv", 0, 2, 5, 2, generator, torch.float64)
    updates = [[one], [], [other, one], [other]]
    expected = y.clone()
    for t, mine in enumerate(updates):
        for update in mine:
            for o in range(update.b_RO.shape[1]):
                for r in range(update.rank):
                    h = sum(float(x[t, i]) * float(update.a_RI[r, i]) for i in range(5))
                    expected[t, update.row + o] += h * float(update.b_RO[r, o])
    torch.testing.assert_close(add_low_rank(y, x, updates), expected, rtol=0, atol=ORDERS)
    assert torch.equal(add_low_rank(y, x, [[]] * 4), y)

    bias = torch.randn(7, generator=generator).double()
    replaced = replace_products(y, x, [None, table, None, table], bias)
    for t in range(4):
        for o in range(7):
            sum_ = sum(float(x[t, i]) * float(table[o, i]) for i in range(5)) + float(bias[o])
            assert float(replaced[t, o]) == pytest.approx(sum_ if t % 2 else float(y[t, o]), rel=0, abs=ORDERS)


def test_the_reference_of_embeddings_is_the_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, table = (torch.randn(9, 6, generator=generator).double() for _ in range(2))
    update = update_of("embed", 1, 2, 9, 4, generator, torch.float64)
    tokens = torch.tensor([3, 8, 3])
    found = embed_under(weight[tokens], tokens, [[], [], [update]], [None, table, None])
    assert torch.equal(found[0], weight[3])
    assert torch.equal(found[1], table[8])
    expected = weight[3].clone()
    for e in range(4):
        expected[1 + e] += sum(float(update.a_RI[r, 3]) * float(update.b_RO[r, e]) for r in range(2))
    torch.testing.assert_close(found[2], expected, rtol=0, atol=ORDERS)


# -- the fast products -----------------------------------------------------------------------------


@dataclass
class Bed:
    """The maps of a small model, and the pool that changes them."""

    linears: dict[str, Linear]
    embedding: Embedding
    pool: AdapterPool
    dtype: torch.dtype
    device: torch.device


def bed(
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    rank_capacity: int = 512,
    bias: bool = True,
    native: bool = True,
) -> Bed:
    generator = torch.Generator().manual_seed(3)
    linears = {
        name: Linear(
            torch.randn(outputs, inputs, generator=generator).to(device, dtype),
            torch.randn(outputs, generator=generator).to(device, dtype) if bias else None,
            name,
        )
        for name, (inputs, outputs) in SIZES.items()
    }
    embedding = ScaledEmbedding(torch.randn(VOCABULARY, WIDTH, generator=generator).to(device, dtype), 4.0)
    place = torch.device(device)
    kernel = native_low_rank() if native else None
    pool = AdapterPool(linears, embedding, dtype=dtype, device=place, rank_capacity=rank_capacity, kernel=kernel)
    return Bed(linears, embedding, pool, dtype, place)


def random_adapter(draw: random.Random, dtype: torch.dtype, max_rank: int = 64) -> Adapter:
    """Some pieces of some maps, of one rank or of several; whole tables now and then."""
    generator = torch.Generator().manual_seed(draw.getrandbits(60))
    rank = draw.choice([1, 4, 4, 8, 8, draw.randint(1, max_rank)])
    even = draw.random() < 0.7
    updates, tables = [], {}
    for name, pieces in PIECES.items():
        inputs, outputs = SIZES.get(name, (VOCABULARY, WIDTH))
        if name in ("head", "embed") and draw.random() < 0.3:
            shape = (inputs, outputs) if name == "embed" else (outputs, inputs)
            tables[name] = torch.randn(*shape, generator=generator).to(dtype)
            continue
        if name == "0.qkv" and draw.random() < 0.2:
            pieces = ((0, outputs),)
        for row, width in pieces:
            if draw.random() < 0.6:
                mine = rank if even else draw.randint(1, max_rank)
                updates.append(update_of(name, row, mine, inputs, width, generator, dtype))
    return Adapter(fingerprint=str(draw.getrandbits(60)), updates=tuple(updates), tables=tables)


def doubled(update: LowRankUpdate) -> LowRankUpdate:
    return replace(update, a_RI=update.a_RI.double(), b_RO=update.b_RO.double())


def magnitudes(update: LowRankUpdate) -> LowRankUpdate:
    return replace(update, a_RI=update.a_RI.double().abs(), b_RO=update.b_RO.double().abs())


def updates_for(adapter: Adapter | None, name: str) -> list[LowRankUpdate]:
    return [update for update in adapter.updates if update.linear == name] if adapter is not None else []


def bound(exact: Tensor, sums: Tensor, terms: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``sums``: of the magnitudes of what was added up, ``terms`` of them at a time."""
    u, wide = torch.finfo(dtype).eps / 2, torch.finfo(product_dtype(dtype, device)).eps / 2
    rounding = u * exact.abs() * 1.01
    return rounding + 2 * terms * wide * sums + torch.finfo(dtype).tiny


def close(found: Tensor, exact: Tensor, allowed: Tensor) -> None:
    off = (found.cpu().double() - exact).abs()
    assert bool((off <= allowed).all()), f"off by {float((off / allowed).max())} of what is allowed"


def forward_and_compare(
    bed: Bed, adapters: Sequence[int | None], counts: Sequence[int], head_counts: Sequence[int], seed: int
) -> None:
    """One forward of every map, against the reference in float64, base rows to the bit."""
    generator = torch.Generator().manual_seed(seed)
    held = [None if one is None else bed.pool.get(one) for one in adapters]
    rows = [one for one, count in zip(held, counts, strict=True) for _ in range(count)]
    head_rows = [one for one, count in zip(held, head_counts, strict=True) for _ in range(count)]
    tokens = torch.randint(VOCABULARY, (len(rows),), generator=generator)
    bed.pool.deactivate()
    x = {
        name: torch.randn(len(head_rows if name == "head" else rows), inputs, generator=generator).to(bed.dtype)
        for name, (inputs, _) in SIZES.items()
    }
    on = {name: one.to(bed.device) for name, one in x.items()}
    base = {name: linear(on[name]).cpu() for name, linear in bed.linears.items()}
    plain = Embedding(bed.embedding.weight)(tokens.to(bed.device)).cpu()
    bed.pool.activate(adapters, counts, head_counts)
    for name, linear in bed.linears.items():
        found = linear(on[name]).cpu()
        owners = head_rows if name == "head" else rows
        mine = [updates_for(one, name) for one in owners]
        tables = [one.tables.get(name) if one else None for one in owners]
        wide, x64 = base[name].double(), x[name].double()
        bias = None if linear.bias is None else linear.bias.cpu().double()
        exact = replace_products(wide, x64, [None if t is None else t.double() for t in tables], bias)
        exact = add_low_rank(exact, x64, [[doubled(one) for one in ones] for ones in mine])
        sums = replace_products(
            wide.abs(),
            x64.abs(),
            [None if t is None else t.double().abs() for t in tables],
            None if bias is None else bias.abs(),
        )
        sums = add_low_rank(sums, x64.abs(), [[magnitudes(one) for one in ones] for ones in mine])
        terms = SIZES[name][0] + 64 + 2
        close(found, exact, bound(exact, sums, terms, bed.dtype, bed.device))
        for row, (ones, table) in enumerate(zip(mine, tables, strict=True)):
            if not ones and table is None:
                assert torch.equal(found[row], base[name][row]), f"row {row} of {name} is one of the base model"
    found = bed.embedding(tokens.to(bed.device)).cpu() / 4.0
    mine = [updates_for(one, "embed") for one in rows]
    tables = [one.tables.get("embed") if one else None for one in rows]
    wide_tables = [None if t is None else t.double() for t in tables]
    exact = embed_under(plain.double(), tokens, [[doubled(one) for one in ones] for ones in mine], wide_tables)
    sums = embed_under(plain.double().abs(), tokens, [[magnitudes(one) for one in ones] for ones in mine], wide_tables)
    close(found, exact, bound(exact, sums.abs(), 66, bed.dtype, bed.device))
    for row, (ones, table) in enumerate(zip(mine, tables, strict=True)):
        if not ones and table is None:
            assert torch.equal(found[row], plain[row])
    bed.pool.deactivate()
    for name, linear in bed.linears.items():
        assert torch.equal(linear(on[name]).cpu(), base[name]), "the base model is back"


@pytest.mark.product(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@settings(max_examples=examples(8, 20), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_batch_gives_what_the_reference_gives(dtype: torch.dtype, native: bool, device: str, seed: int) -> None:
    if device == "cuda" and dtype != torch.float32:
        dtype = torch.float64  # the device sums half types in its own ways: precision is tried with these two
    draw = random.Random(seed)
    the = bed(dtype, device, bias=draw.random() < 0.5, native=native)
    ids = [the.pool.load(random_adapter(draw, dtype, 40)) for _ in range(draw.randint(1, 8))]
    for _ in range(2):
        chunks = draw.randint(1, 14)
        adapters = [draw.choice([*ids, None]) for _ in range(chunks)]
        counts = [draw.choice([1, 1, 1, 2, 5, 33, 40]) for _ in range(chunks)]
        head_counts = [draw.choice([0, 1, count]) for count in counts]
        forward_and_compare(the, adapters, counts, head_counts, draw.getrandbits(30))


def test_rows_of_another_number_are_refused() -> None:
    the = bed()
    full = update_of("0.out", 0, 2, 20, WIDTH, torch.Generator(), torch.float32)
    token = update_of("embed", 0, 2, VOCABULARY, WIDTH, torch.Generator(), torch.float32)
    one = the.pool.load(Adapter(fingerprint="b", updates=(full, token)))
    the.pool.activate([one], [3], [1])
    with pytest.raises(InvalidArgument, match="2 rows where adapters were told of 3"):
        the.linears["0.out"](torch.zeros(2, 20))
    with pytest.raises(InvalidArgument, match="4 tokens where adapters were told of 3"):
        the.embedding(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_a_bad_row_stays_alone(native: bool) -> None:
    """NaN and infinity in one row reach no other, whether under the same adapter or another one of
    the same product.
    """
    the = bed(native=native)
    draw = [update_of("0.out", 0, 4, 20, WIDTH, torch.Generator().manual_seed(i), torch.float32) for i in range(4)]
    ids = [the.pool.load(Adapter(fingerprint=str(i), updates=(one,))) for i, one in enumerate(draw)]
    x = torch.randn(8, 20)
    adapters = [*ids, *ids]
    the.pool.activate(adapters, [1] * 8, [0] * 8)
    clean = the.linears["0.out"](x)
    x[2], x[5] = float("nan"), float("inf")
    dirty = the.linears["0.out"](x)
    good = [0, 1, 3, 4, 6, 7]
    assert torch.equal(dirty[good], clean[good])
    assert not dirty[[2, 5]].isfinite().any()


# -- plans -----------------------------------------------------------------------------------------


def test_neighbours_of_one_rank_are_one_product() -> None:
    cpu = torch.device("cpu")
    (part,) = plan_parts([Share(16 * i, 16, i, i + 1) for i in range(16)], cpu)
    assert len(part.products) == 1
    assert part.kept is None
    assert part.source == part.target == slice(0, 16)
    # One adapter, rows that lie together.
    (part,) = plan_parts([Share(0, 16, i, i + 1) for i in range(3, 9)], cpu)
    assert (part.source, len(part.products)) == (slice(3, 9), 1)
    # Rows uneven, but not by much: padding instead of products.
    (part,) = plan_parts([Share(0, 8, 0, 3), Share(8, 8, 3, 4), Share(16, 8, 4, 6)], cpu)
    assert len(part.products) == 1
    assert part.kept is not None
    assert part.kept.tolist() == [0, 1, 2, 3, 6, 7]
    # Other ranks, gaps between them, and much padding are products of their own.
    for shares in (
        [Share(0, 8, 0, 1), Share(8, 4, 1, 2)],
        [Share(0, 8, 0, 1), Share(16, 8, 1, 2)],
        [Share(0, 8, 0, 20), Share(8, 8, 20, 21)],
    ):
        (part,) = plan_parts(shares, cpu)
        assert len(part.products) == 2


def test_long_chunks_run_over_views() -> None:
    parts = plan_parts([Share(0, 8, 0, 64), Share(8, 8, 64, 65), Share(0, 8, 65, 66)], torch.device("cpu"))
    assert [part.source for part in parts[:1]] == [slice(0, 64)]
    assert len(parts) == 2


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.tuples(st.integers(0, 6), st.integers(1, fast.LONG_CHUNK + 4)), min_size=1, max_size=20))
def test_every_row_is_planned_once_under_its_adapter(data: list[tuple[int, int]]) -> None:
    ranks = [4, 4, 8, 8, 8, 2, 4]
    firsts = [sum(ranks[:i]) for i in range(7)]
    shares, owner, begin = [], {}, 0
    for adapter, count in data:
        shares.append(Share(firsts[adapter], ranks[adapter], begin, begin + count))
        owner |= dict.fromkeys(range(begin, begin + count), adapter)
        begin += count + 1  # a base row between them
    seen: list[int] = []
    for part in plan_parts(shares, torch.device("cpu")):
        rows = torch.arange(begin)
        source, target = (fast.take_rows(rows, index) for index in (part.source, part.target))
        kept = torch.arange(len(source)) if part.kept is None else part.kept
        assert torch.equal(source[kept], target)
        seen += target.tolist()
        for product in part.products:
            each = (product.end - product.begin) // product.adapters
            for position in range(product.begin, product.end):
                first = product.first + (position - product.begin) // each * product.rank
                assert first == firsts[owner[int(source[position])]]
    assert sorted(seen) == sorted(owner)
