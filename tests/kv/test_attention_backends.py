"""Attention kernels against the reference, and the reference against a definition by loops.

Tolerances: ``attention_bound`` says how far a right answer may be from the exact one, row by row;
and over a whole batch a kernel's error against float64 is held against that of the reference at the
same precision.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.examples import examples
from torch import Tensor

from quire.contracts.attention import AttentionBackend, AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PlainRows
from quire.kernels.attention import lse_attention as lse_module
from quire.kernels.attention.groups import MAX_WASTE, BatchRows, CausalGroup, PagedGroup, is_run, waste_bounded
from quire.kernels.attention.lse_attention import lse_attention
from quire.kernels.attention.sdpa import SHORT_CHUNK, VIEW_KEYS, SdpaAttention, SdpaPlan
from quire.ops.attention import ReferenceAttention, attend, merge

from .oracle import attend_one, attention_bound, unit
from .pair import same_bits

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = ((1, 1), (4, 1), (2, 2), (2, 4), (1, 8), (3, 5))
"""(KV heads, query heads of each): MHA, GQA, MQA."""
SIZES = ((8, 8), (64, 64), (5, 5), (16, 6), (3, 7))
"""(Dk, Dv)"""


def tables_for(
    rng: random.Random, lengths: list[int], page_size: int, fragmented: bool
) -> tuple[tuple[NDArray[np.int32], ...], int]:
    """Page tables without a page in common, and the number of pages of the pool."""
    sizes = [-(-length // page_size) for length in lengths]
    pages = list(range(sum(sizes) + 3))
    if fragmented:
        rng.shuffle(pages)
    else:
        pages = pages[rng.randint(0, 3) :]
    tables = []
    for size in sizes:
        tables.append(np.array(pages[:size], dtype=np.int32))
        pages = pages[size:]
    if fragmented and len(tables) > 1 and rng.random() < 0.5:
        # A shared prefix: whole pages that no new row lies in.
        shared = min(sizes[0], sizes[1]) // 2
        tables[1][:shared] = tables[0][:shared]
    return tuple(tables), sum(sizes) + 3


class Case:
    """A pool of rows, a batch over it, and its exact attention."""

    def __init__(
        self,
        entries: list[tuple[int, int]],
        *,
        seed: int = 0,
        page_size: int = 4,
        heads: tuple[int, int] = (2, 2),
        sizes: tuple[int, int] = (8, 8),
        dtype: torch.dtype = torch.float32,
        fragmented: bool = False,
        scale: float | None = None,
        device: str = "cpu",
    ) -> None:
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        pasts, counts = np.array([past for past, _ in entries]), np.array([count for _, count in entries])
        kv_heads, group = heads
        self.scale = sizes[0] ** -0.5 if scale is None else scale
        tables, num_pages = tables_for(rng, (pasts + counts).tolist(), page_size, fragmented)
        # Shared prefixes hold old rows only.
        if len(tables) > 1:
            same = int((tables[0][: tables[1].size] == tables[1][: tables[0].size]).sum())
            if same * page_size > min(pasts[0], pasts[1]):
                tables, num_pages = tables_for(rng, (pasts + counts).tolist(), page_size, False)
        starts = np.concatenate([[0], np.cumsum(counts)])
        positions = np.concatenate([np.arange(past, past + count) for past, count in entries])
        slots = np.concatenate(
            [
                table[np.arange(past, past + count) // page_size].astype(np.int64) * page_size
                + np.arange(past, past + count) % page_size
                for table, (past, count) in zip(tables, entries, strict=True)
            ]
        )
        self.plan = ForwardPlan(
            page_size=page_size,
            counts=counts,
            keys=pasts + counts,
            origins=np.zeros_like(counts),
            starts=starts,
            tables=tables,
            positions=positions,
            rules=(None,) * len(tables),
            device=torch.device(device),
        )
        shape = (num_pages * page_size, kv_heads)
        # What lies in rows that nobody has written is large, but finite: that much a state
        # promises.
        self.k_SHD, self.v_SHD = (torch.full((*shape, dim), 50.0, dtype=dtype, device=device) for dim in sizes)
        written = np.concatenate(
            [slots_of(table, length, page_size) for table, length in zip(tables, pasts + counts, strict=True)]
        )
        for pool in (self.k_SHD, self.v_SHD):
            rows = torch.randn(len(written), kv_heads, pool.shape[-1], generator=generator).to(dtype)
            pool[torch.from_numpy(written).to(device)] = rows.to(device)
        self.q_THD = torch.randn(int(starts[-1]), kv_heads * group, sizes[0], generator=generator).to(dtype).to(device)
        self.k_THD, self.v_THD = self.k_SHD[torch.from_numpy(slots)], self.v_SHD[torch.from_numpy(slots)]

    def run(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> Tensor:
        kind = dtype or self.q_THD.dtype
        q, k, v, k_pool, v_pool = (
            tensor.to(kind) for tensor in (self.q_THD, self.k_THD, self.v_THD, self.k_SHD, self.v_SHD)
        )
        out = backend.run(backend.plan(self.plan, kind), q, (k, v), PlainRows(k_pool, v_pool), Scoring(self.scale))
        assert out.shape == (self.plan.num_tokens, self.q_THD.shape[1], self.v_SHD.shape[-1])
        assert out.dtype == kind
        assert out.is_contiguous()
        return out

    def check(self, backend: AttentionBackend) -> None:
        before = self.k_SHD.clone(), self.v_SHD.clone()
        exact = self.run(ReferenceAttention(), torch.float64)
        reference = self.run(ReferenceAttention()).double()
        got = self.run(backend).double()
        assert torch.equal(self.k_SHD, before[0])
        assert torch.equal(self.v_SHD, before[1])
        error, yardstick = (got - exact).abs(), (reference - exact).abs()
        bound = self.bounds().to(error.device)
        assert (error.amax((1, 2)) <= bound).all()
        assert (yardstick.amax((1, 2)) <= bound).all()
        # Weights, two parts and their merge may be rounded to the storage type where the reference
        # rounds once, and float32 sums go in another order: a few times the yardstick, and never
        # less than one rounding.
        floor = unit(self.q_THD.dtype) * exact.square().mean().sqrt()
        assert error.square().mean().sqrt() <= 4 * torch.maximum(yardstick.square().mean().sqrt(), floor)

    def bounds(self) -> Tensor:
        result = []
        for entry, table in enumerate(self.plan.tables):
            start, stop = int(self.plan.starts[entry]), int(self.plan.starts[entry + 1])
            length = int(self.plan.keys[entry])
            slots = torch.from_numpy(slots_of(table, length, self.plan.page_size))
            keys = list(zip(self.k_SHD.cpu()[slots], self.v_SHD.cpu()[slots], strict=True))
            # The norms of all keys of the entry: no less than those of the visible ones.
            largest = max(float(q.double().norm(dim=-1).max()) for q in self.q_THD[start:stop].cpu())
            q = torch.full((1, self.q_THD.shape[-1]), largest / math.sqrt(self.q_THD.shape[-1]))
            result += [attention_bound(q, keys, self.scale, self.q_THD.dtype)] * (stop - start)
        return torch.tensor(result, dtype=torch.float64)


def slots_of(table: NDArray[np.int32], length: int, page_size: int) -> NDArray[np.int64]:
    positions = np.arange(length)
    result: NDArray[np.int64] = table[positions // page_size].astype(np.int64) * page_size + positions % page_size
    return result


def paths(prepared: SdpaPlan) -> Counter[str]:
    """Which ways through the backend a batch takes."""
    found: Counter[str] = Counter()
    part = prepared.window
    found["single"] += part.single
    found["parts"] += not part.single
    for causal in part.causal:
        found["prompts padded"] += causal.real is not None
        found["prompts together"] += causal.b > 1
        found["prompt"] += causal.b == 1
        found["prompts scattered"] += causal.target.index is not None
    for paged in part.paged:
        found["view"] += paged.keys.pages is None
        found["view without mask"] += paged.mask is None
        found["gathered"] += paged.keys.pages is not None
        found["decodes"] += paged.n == 1 and paged.b > 1
        found["short chunks padded"] += paged.real is not None
        found["scattered"] += paged.target.index is not None
    for chunk in part.long:
        found["long chunk over a run"] += chunk.keys.pages is None
        found["long chunk over pages"] += chunk.keys.pages is not None
    return found


def row_list(rows: BatchRows) -> list[int]:
    return list(range(rows.first, rows.stop)) if rows.index is None else rows.index.tolist()


def check_served_once(prepared: SdpaPlan, tokens: int) -> None:
    """Every row of the batch is some group's target, exactly once, and is computed from itself."""
    rows: list[int] = []
    part = prepared.window
    assert part.complete
    assert part.blind is None
    groups: list[CausalGroup | PagedGroup] = [*part.causal, *part.paged]
    for group in groups:
        targets = row_list(group.target)
        sources = row_list(group.rows)
        assert len(sources) == group.b * group.n
        real = list(range(len(sources))) if group.real is None else group.real.tolist()
        assert [sources[index] for index in real] == targets
        rows += targets
    for chunk in [*part.long, *part.blocks]:
        rows += range(chunk.start, chunk.stop)
    assert sorted(rows) == list(range(tokens))


ENTRY = st.one_of(
    st.tuples(st.integers(0, 40), st.just(1)),
    st.tuples(st.integers(180, 420), st.just(1)),
    st.tuples(st.integers(0, 60), st.integers(2, SHORT_CHUNK)),
    st.tuples(st.integers(180, 300), st.integers(2, SHORT_CHUNK)),
    st.tuples(st.just(0), st.integers(2, 70)),
    st.tuples(st.integers(1, 90), st.integers(SHORT_CHUNK, 60)),
)


class TestSdpa:
    seen: ClassVar[Counter[str]] = Counter()

    @pytest.mark.product(2)
    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("examples", [70, pytest.param(1500, marks=pytest.mark.slow)])
    def test_random_ragged_plans(self, device: str, examples: int) -> None:
        TestSdpa.seen = Counter()

        @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
        @given(
            entries=st.lists(ENTRY, min_size=1, max_size=9),
            seed=st.integers(0, 2**20),
            page_size=st.sampled_from([1, 2, 3, 5, 16]),
            heads=st.sampled_from(GROUPS),
            sizes=st.sampled_from(SIZES),
            dtype=st.sampled_from(DTYPES),
            fragmented=st.booleans(),
            scale=st.sampled_from([None, None, 0.3]),
        )
        def run(entries: list[tuple[int, int]], dtype: torch.dtype, **more: object) -> None:
            case = Case(entries, dtype=dtype, device=device, **more)  # type: ignore[arg-type]
            prepared = SdpaAttention().plan(case.plan, dtype)
            check_served_once(prepared, case.plan.num_tokens)
            TestSdpa.seen += paths(prepared)
            case.check(SdpaAttention())

        run()
        if device == "cpu":
            assert {name for name, count in TestSdpa.seen.items() if count} >= {
                "single",
                "parts",
                "prompt",
                "prompts together",
                "view",
                "gathered",
                "decodes",
                "short chunks padded",
                "scattered",
                "long chunk over a run",
                "long chunk over pages",
            }

    @pytest.mark.turns(8)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("heads", GROUPS)
    @pytest.mark.parametrize("sizes", SIZES)
    def test_one_batch_of_everything(self, dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
        entries = [(0, 9), (30, 1), (7, 20), (0, 12), (200, 1), (5, 3), (0, 1), (220, 4), (31, 1), (40, 33)]
        for fragmented in (False, True):
            Case(entries, heads=heads, sizes=sizes, dtype=dtype, fragmented=fragmented, page_size=5).check(
                SdpaAttention()
            )

    @pytest.mark.parametrize(
        ("entries", "name"),
        [
            ([(0, 30)], "prompt"),
            ([(0, 30), (0, 30)], "prompts together"),
            ([(0, 30), (0, 29), (0, 31)], "prompts padded"),
            ([(0, 30), (4, 1), (0, 30)], "prompts scattered"),
            ([(9, 1)], "view without mask"),
            ([(9, 3)], "view"),
            ([(9, 1), (9, 1), (4, 1)], "decodes"),
            ([(9, 3), (9, 1), (4, 2)], "short chunks padded"),
            ([(9, 1), (0, 9), (8, 1)], "scattered"),
            ([(9, SHORT_CHUNK + 1)], "long chunk over a run"),
            ([(VIEW_KEYS, 1), (VIEW_KEYS + 9, 1)], "view"),
            ([(VIEW_KEYS - 2, 1), (VIEW_KEYS - 2, 1)], "decodes"),
        ],
    )
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_each_path_by_itself(self, entries: list[tuple[int, int]], name: str, page_size: int) -> None:
        case = Case(entries, page_size=page_size)
        assert paths(SdpaAttention().plan(case.plan, torch.float32))[name]
        case.check(SdpaAttention())

    def test_large_scores(self) -> None:
        """Scores of some hundreds: a softmax without its maximum would overflow."""
        case = Case([(40, 1), (3, 20), (0, 10)], scale=40.0)
        out = case.run(SdpaAttention())
        assert out.isfinite().all()
        case.check(SdpaAttention())

    def test_q_that_is_a_slice_of_a_fused_tensor(self) -> None:
        for entries in ([(0, 8)], [(9, 1), (3, 1)], [(9, 4), (0, 5)], [(9, 20)]):
            case = Case(entries)
            expected = case.run(SdpaAttention())
            wide = torch.randn(case.q_THD.shape[0], 10, 8)
            wide[:, 2:6], wide[:, 6:8] = case.q_THD, case.k_THD
            case.q_THD, case.k_THD = wide[:, 2:6], wide[:, 6:8]
            assert torch.equal(case.run(SdpaAttention()), expected)

    @settings(max_examples=examples(66, 200), deadline=None)
    @given(costs=st.lists(st.integers(1, 500), min_size=1, max_size=40), slack=st.integers(0, 600))
    def test_groups_waste_little(self, costs: list[int], slack: int) -> None:
        cost = np.array(costs)
        groups = waste_bounded(list(range(len(costs))), cost, slack)
        assert sorted(entry for group in groups for entry in group) == list(range(len(costs)))
        for group in groups:
            assert group == sorted(group)
            computed, needed = len(group) * int(cost[group].max()), int(cost[group].sum())
            assert len(group) == 1 or computed <= MAX_WASTE * needed + slack

    @given(pages=st.lists(st.integers(0, 9), min_size=1, max_size=6))
    def test_runs(self, pages: list[int]) -> None:
        expected = pages == list(range(pages[0], pages[0] + len(pages)))
        assert is_run(np.array(pages, dtype=np.int32)) == expected


class TestReference:
    @pytest.mark.parametrize("heads", GROUPS)
    @pytest.mark.parametrize("sizes", SIZES)
    def test_against_loops(self, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
        case = Case([(5, 3), (0, 4), (12, 1)], heads=heads, sizes=sizes, fragmented=True)
        out = case.run(ReferenceAttention(), torch.float64)
        for entry, table in enumerate(case.plan.tables):
            start, past = int(case.plan.starts[entry]), int(case.plan.keys[entry] - case.plan.counts[entry])
            for row in range(int(case.plan.counts[entry])):
                slots = slots_of(table, past + row + 1, case.plan.page_size)
                keys = list(zip(case.k_SHD[slots].double(), case.v_SHD[slots].double(), strict=True))
                exact = attend_one(case.q_THD[start + row].double().numpy(), keys, case.scale)
                # Both are float64; sums over the keys and the columns go in another order.
                assert np.abs(out[start + row].numpy() - exact).max() <= 64 * unit(torch.float64) * 10

    def test_attention_state_example(self) -> None:
        """One key with score 0.5 and value 1, one with score 1.5 and value 3."""
        q = torch.ones(1, 1, 1)
        k, v = torch.tensor([0.5, 1.5]).view(2, 1, 1), torch.tensor([1.0, 3.0]).view(2, 1, 1)
        whole = attend(q, k, v, torch.ones(1, 2, dtype=torch.bool), 1.0)
        parts = [attend(q, k[i : i + 1], v[i : i + 1], torch.ones(1, 1, dtype=torch.bool), 1.0) for i in (0, 1)]
        for state in (whole, merge(parts[0], parts[1]), merge(parts[1], parts[0])):
            assert round(float(state.out), 4) == 2.4621
            assert round(float(state.lse), 4) == 1.8133
            assert state.lse.shape == (1, 1)

    def test_soft_cap(self) -> None:
        """Scores 2 and -60 with a cap of 3: 3 tanh(2/3) and -3."""
        q, k, v = torch.ones(1, 1, 1), torch.tensor([1.0, -30.0]).view(2, 1, 1), torch.tensor([1.0, 5.0]).view(2, 1, 1)
        state = attend(q, k, v, torch.ones(1, 2, dtype=torch.bool), 2.0, 3.0)
        capped = [math.exp(3 * math.tanh(2 / 3)), math.exp(3 * math.tanh(-20))]
        assert abs(float(state.out) - (capped[0] + 5 * capped[1]) / sum(capped)) <= 16 * unit(torch.float32)
        assert abs(float(state.lse) - math.log(sum(capped))) <= 16 * unit(torch.float32)

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
    def test_a_query_without_keys(self, dtype: torch.dtype) -> None:
        q, k, v = torch.randn(3, 2, 4).to(dtype), torch.randn(5, 1, 4).to(dtype), torch.randn(5, 1, 4).to(dtype)
        visible = torch.ones(3, 5, dtype=torch.bool)
        visible[1] = False
        state = attend(q, k, v, visible, 0.5)
        assert state.out.dtype == dtype
        assert state.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert not state.out[1].any()
        assert (state.lse[1] == -math.inf).all()
        assert state.lse[[0, 2]].isfinite().all()
        nothing = attend(q, k[:0], v[:0], visible[:, :0], 0.5)
        assert not nothing.out.any()
        assert (nothing.lse == -math.inf).all()


NUMBERS = st.floats(-30, 30, width=32)


@st.composite
def states(draw: st.DrawFn, dtype: torch.dtype = torch.float32, empty: bool = False) -> AttentionState:
    out = torch.tensor(draw(st.lists(NUMBERS, min_size=12, max_size=12))).view(2, 2, 3).to(dtype)
    lse = torch.tensor(draw(st.lists(NUMBERS, min_size=4, max_size=4))).view(2, 2)
    for row in range(2):
        for head in range(2):
            if empty or draw(st.integers(0, 5)) == 0:
                out[row, head], lse[row, head] = 0.0, -math.inf
    return AttentionState(out, lse)


EMPTY = AttentionState(torch.zeros(2, 2, 3), torch.full((2, 2), -math.inf))


class TestMerge:
    @given(a=states())
    def test_identity_to_the_bit(self, a: AttentionState) -> None:
        for merged in (merge(a, EMPTY), merge(EMPTY, a)):
            # Adding 0 turns the sign of a negative zero, which is equal.
            assert torch.equal(merged.out, a.out)
            assert torch.equal(merged.lse, a.lse)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_identity_in_other_types(self, dtype: torch.dtype) -> None:
        a = AttentionState(torch.randn(2, 2, 3).to(dtype), torch.randn(2, 2))
        empty = AttentionState(EMPTY.out.to(dtype), EMPTY.lse)
        for merged in (merge(a, empty), merge(empty, a)):
            assert same_bits(merged.out, a.out)
            assert same_bits(merged.lse, a.lse)

    def test_both_empty(self) -> None:
        merged = merge(EMPTY, EMPTY)
        assert not merged.out.any()
        assert (merged.lse == -math.inf).all()

    @given(a=states(), b=states())
    def test_commutative_to_the_bit(self, a: AttentionState, b: AttentionState) -> None:
        one, two = merge(a, b), merge(b, a)
        assert torch.equal(one.out, two.out)
        assert torch.equal(one.lse, two.lse)
        assert not one.out.isnan().any()
        assert not one.lse.isnan().any()

    @given(a=states(), b=states(), c=states())
    def test_associative_up_to_rounding(self, a: AttentionState, b: AttentionState, c: AttentionState) -> None:
        one, two = merge(merge(a, b), c), merge(a, merge(b, c))
        u = unit(torch.float32)
        size = max(float(state.out.abs().max()) for state in (a, b, c))
        largest = max([1.0, *(float(x) for state in (a, b, c) for x in state.lse.flatten() if x.isfinite())])
        # Each merge: an exponent off by u |lse|, two roundings of weights and products, a sum, a
        # quotient.
        assert (one.out - two.out).abs().max() <= 2 * size * (8 * u + 4 * u * (30 + largest))
        finite = one.lse.isfinite()
        assert torch.equal(finite, two.lse.isfinite())
        assert ((one.lse - two.lse).abs()[finite] <= 8 * u * (30 + largest)).all()

    @pytest.mark.parametrize("cuts", [(3,), (1, 9), (2, 5, 11)])
    def test_parts_make_the_whole(self, cuts: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(n, h, 8, generator=generator) for n, h in ((4, 4), (14, 2), (14, 2)))
        visible = torch.rand(4, 14, generator=generator) < 0.5
        visible[0] = False
        visible[1, 3:] = False
        whole = attend(q.double(), k.double(), v.double(), visible, 8**-0.5)
        edges = [0, *cuts, 14]
        merged = AttentionState(torch.zeros(4, 4, 8), torch.full((4, 4), -math.inf))
        for start, stop in itertools.pairwise(edges):
            part = attend(q, k[start:stop], v[start:stop], visible[:, start:stop], 8**-0.5)
            merged = merge(merged, part)
        keys = list(zip(k, v, strict=True))
        for row in range(4):
            bound = len(edges) * attention_bound(q[row], keys, 8**-0.5, torch.float32)
            assert (merged.out[row].double() - whole.out[row]).abs().max() <= bound
            seen = visible[row].any()
            assert seen == merged.lse[row].isfinite().all()
        finite = whole.lse.isfinite()
        assert ((merged.lse - whole.lse).abs()[finite] <= 64 * unit(torch.float32)).all()

    def test_arguments_stay(self) -> None:
        a, b = (AttentionState(torch.randn(2, 2, 3), torch.randn(2, 2)) for _ in range(2))
        before = [tensor.clone() for tensor in (*a, *b)]
        merge(a, b)
        assert all(torch.equal(x, y) for x, y in zip(before, (*a, *b), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_exponential_of_16_bits(dtype: torch.dtype) -> None:
    """What ``coarse`` allows holds for every weight: 31 equal keys at each of many scores below the
    one of a 32nd.
    """
    coarse = 2.0**-13
    below = (torch.arange(0, 512, dtype=torch.float64) / 512 * 6 * math.log(2)).to(dtype)
    q = torch.ones(len(below), 1, 1, 1, dtype=dtype)
    k = torch.zeros(len(below), 1, 32, 1, dtype=dtype)
    k[:, 0, 1:, 0] = -below[:, None]
    exact = torch.exp(-below.double())
    # The key on top has a weight of 1 that is off as much, and sums of 32 terms are rounded in
    # float32.
    for queries, allowed in ((q, coarse), (q.float(), 0.0)):
        lse = lse_attention(queries, k, k, Scoring(scale=1.0)).lse[:, 0].double()
        rounding = 40 * unit(torch.float32) * torch.exp(lse) / 31
        error = ((torch.exp(lse) - 1) / 31 - exact).abs()
        assert torch.all(error <= allowed * exact + allowed / 31 + rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scores", [1 << 26, 128])
def test_the_log_sum_exp_of_float32_queries_is_good_to_float32(
    dtype: torch.dtype, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the type of K and V is, and in however many pieces they are converted."""
    monkeypatch.setattr(lse_module, "MAX_SCORES", scores)
    for keys in (16, 33, 512):
        zeros = torch.zeros(1, 1, keys, 16, dtype=dtype)
        state = lse_attention(torch.randn(1, 4, 1, 16), zeros, zeros, Scoring(scale=1.0))
        assert state.out.dtype == torch.float32
        assert float((state.lse.double() - math.log(keys)).abs().max()) <= (keys + 12) * unit(torch.float32)


@pytest.mark.parametrize("scores", [1 << 26, 128])
@pytest.mark.parametrize("kind", ["plain", "mask", "causal", "values in keys", "short values"])
def test_widened_keys_are_as_float32_keys(kind: str, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 16)
    k, v = torch.randn(2, 2, 19 if kind != "causal" else 5, 16).bfloat16(), torch.randn(2, 2, 19, 16).bfloat16()
    mask = None
    if kind == "mask":
        mask = torch.zeros(2, 1, 5, 19).masked_fill_(torch.rand(2, 1, 5, 19) < 0.4, -math.inf)
        mask[..., 0] = 0.0
    v = {"values in keys": k[..., :12], "short values": v[..., :12], "causal": v[:, :, :5]}.get(kind, v)
    whole = lse_attention(q, k.float(), v.float(), Scoring(0.3), mask=mask, causal=kind == "causal")
    monkeypatch.setattr(lse_module, "MAX_SCORES", scores)
    found = lse_attention(
        q, k, v, Scoring(0.3), mask=None if mask is None else mask.bfloat16(), causal=kind == "causal"
    )
    bound = 64 * unit(torch.float32) * float(v.float().abs().max())
    assert found.out.shape == whole.out.shape
    assert float((found.out - whole.out).abs().max()) <= bound
    assert float((found.lse - whole.lse).abs().max()) <= 64 * unit(torch.float32)
