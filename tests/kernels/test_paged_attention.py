"""The C++ attention over pages: against the reference in float64 at each level of instructions, and
rows to the bit whatever the batch.

``test_attention_kernel.py`` holds all backends against a definition by loops; here are long
histories, sizes of heads, levels, threads and batches.

Letters: T rows of the batch; S slots; P page size; Hq, Hkv heads; Dk, Dv head sizes.
"""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.test_attention_kernel import BACKENDS, FEATURES, GROUPS, KINDS, SIZES, Case, random_entry
from tests.test_parity import FAMILIES
from tests.test_parity import SIZES as MODEL
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.attention import AttentionState, ForwardPlan, KeyRule, Scoring
from quire.contracts.kv_format import PlainRows
from quire.contracts.layers import FullAttention
from quire.kernels import native_library
from quire.kernels.attention import cpu_attention
from quire.kernels.attention.cpu_attention import EMULATED, LEVELS, NativeAttention, shapes_of
from quire.kernels.attention.sdpa import SdpaPlan
from quire.kernels.native_library import native_problem
from quire.ops.attention import ReferenceAttention

pytestmark = pytest.mark.skipif(bool(native_problem()), reason=native_problem() or "the C++ kernels are there")
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=[*LEVELS, EMULATED])
def backend(request: pytest.FixtureRequest) -> NativeAttention:
    try:
        return NativeAttention(request.param)
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also for little work."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(cpu_attention, "ONE_THREAD", 0)
    yield
    torch.set_num_threads(before)


class Batch:
    """Entries of random numbers over one pool. Entry i has ``keys[i]`` keys, and its last
    ``counts[i]`` tokens are the queries."""

    def __init__(
        self,
        keys: list[int],
        counts: list[int],
        *,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (2, 3),
        sizes: tuple[int, int] = (16, 16),
        page_size: int = 16,
        size: float = 1.0,
        scoring: Scoring | None = None,
        window: int = 0,
        latent: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-n // page_size) for n in keys]
        ids = np.random.default_rng(seed).permutation(sum(widths) + 1).astype(np.int32)
        self.tables = np.split(ids[:-1], np.cumsum(widths)[:-1])
        shape = ((sum(widths) + 1) * page_size, heads[0])
        self.k_SHD = (size * torch.randn(*shape, sizes[0], generator=generator)).to(dtype)
        self.v_SHD = torch.randn(*shape, sizes[1], generator=generator).to(dtype)
        if latent:
            self.v_SHD = self.k_SHD[..., : sizes[1]]
        self.q_THD = (size * torch.randn(sum(counts), heads[0] * heads[1], sizes[0], generator=generator)).to(dtype)
        self.keys, self.counts, self.page_size, self.dtype, self.window = keys, counts, page_size, dtype, window
        self.scoring = scoring or Scoring(sizes[0] ** -0.5)

    def plan(self, entries: list[int] | None = None) -> ForwardPlan:
        """Return the plan of some entries, by default all."""
        chosen = list(range(len(self.keys))) if entries is None else entries
        counts = np.array([self.counts[e] for e in chosen])
        positions = np.concatenate([np.arange(self.keys[e] - self.counts[e], self.keys[e]) for e in chosen])
        return ForwardPlan(
            page_size=self.page_size,
            counts=counts,
            keys=np.array([self.keys[e] for e in chosen]),
            origins=np.zeros(len(chosen), dtype=np.int64),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            tables=tuple(self.tables[e] for e in chosen),
            positions=positions,
            rules=(None,) * len(chosen),
            lows=np.maximum(0, positions + 1 - self.window) if self.window else None,
            device=torch.device("cpu"),
        )

    def rows(self, entries: list[int]) -> list[int]:
        """Return the rows of these entries in the whole batch."""
        starts = np.concatenate([[0], np.cumsum(self.counts)])
        return [row for e in entries for row in range(starts[e], starts[e + 1])]

    def state(self, backend: Any, plan: ForwardPlan | None = None, q_THD: Tensor | None = None) -> AttentionState:
        q_THD = self.q_THD if q_THD is None else q_THD
        prepared = backend.plan(self.plan() if plan is None else plan, q_THD.dtype)
        found: AttentionState = backend.run_state(
            prepared, q_THD, None, PlainRows(self.k_SHD, self.v_SHD), self.scoring
        )
        return found

    def check(self, backend: NativeAttention) -> None:
        """Compare with the reference in float64.

        A score is a sum of Dk products in float32: it is off by at most d = (Dk + 12) u32 of the
        sum of their sizes. Weights are off by the factor exp(2 d) and by 4 u32, and by u where they
        are rounded for a product of bfloat16. The result is rounded once. The terms of the keys are
        summed in float32, in blocks that each round twice more.
        """
        exact = Batch.__new__(Batch)
        exact.__dict__.update(self.__dict__)
        exact.k_SHD, exact.v_SHD, exact.q_THD = self.k_SHD.double(), self.v_SHD.double(), self.q_THD.double()
        wanted, found = exact.state(ReferenceAttention()), self.state(backend)
        u, u32 = torch.finfo(self.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
        product = float(exact.q_THD.norm(dim=-1).max() * exact.k_SHD.norm(dim=-1).max()) * self.scoring.scale
        d = (self.q_THD.shape[-1] + 12) * u32 * product + 8 * u32 * (self.scoring.softcap or 0.0)
        sums = (BLOCK + 3 * max(self.keys) / BLOCK + 16) * u32
        bound = float(exact.v_SHD.abs().max()) * (math.expm1(2 * d) + sums + 3 * u) + torch.finfo(self.dtype).tiny
        assert float((found.out.double() - wanted.out).abs().max()) <= bound
        largest = float(wanted.lse.abs().max())
        assert float((found.lse.double() - wanted.lse).abs().max()) <= d + sums + 16 * u32 * max(1.0, largest)
        assert found.out.is_contiguous()


BLOCK = cpu_attention.BLOCK
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1024, 1100]
"""Around a page, a block and a split."""


@pytest.mark.turns(6)
@pytest.mark.parametrize("dtype", TYPES)
def test_lengths(backend: NativeAttention, dtype: torch.dtype) -> None:
    Batch(LENGTHS, [1] * len(LENGTHS), dtype=dtype).check(backend)
    for page_size in (5, 17):  # 16 keys that are read together end in another page, 17 in the last row of one
        Batch(LENGTHS, [min(n, 1 + n // 3) for n in LENGTHS], dtype=dtype, page_size=page_size).check(backend)


@pytest.mark.turns(3)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 7), (24, 40), (64, 64), (80, 80), (96, 33), (128, 128), (256, 192)])
def test_sizes_of_heads(backend: NativeAttention, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    for count, heads in ((1, (2, 1)), (1, (1, 3)), (9, (1, 1)), (9, (2, 5)), (1, (1, 17))):
        Batch([77, 130], [count, 1], dtype=dtype, sizes=sizes, heads=heads).check(backend)


@pytest.mark.parametrize("dtype", TYPES)
def test_latent_rows(backend: NativeAttention, dtype: torch.dtype) -> None:
    """V is the first columns of K."""
    for count in (1, 5):
        Batch([600, 40], [count, 1], dtype=dtype, sizes=(72, 64), heads=(1, 16), latent=True).check(backend)


@pytest.mark.product(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(72, 64), (576, 512), (33, 20)])
def test_heads_do_not_know_their_group(backend: NativeAttention, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Whole vectors of query heads have products of their own, with the bits of any other group."""
    for heads in (16, 48):
        batch = Batch([130, 40, 70], [1, 7, 70], dtype=dtype, sizes=sizes, heads=(1, heads), latent=True, page_size=5)
        batch.check(backend)
        whole = batch.state(backend)
        for first, stop in ((0, 1), (1, 6), (6, 15), (15, heads)):
            some = batch.state(backend, None, batch.q_THD[:, first:stop])
            assert torch.equal(some.out, whole.out[:, first:stop])
            assert torch.equal(some.lse, whole.lse[:, first:stop])


@pytest.mark.parametrize("size", [1e-18, 1e-3, 30.0])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_tiny_and_huge_scores(backend: NativeAttention, size: float, softcap: float | None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        Batch([700, 90, 3], [1, 40, 3], dtype=dtype, size=size, scoring=Scoring(0.3, softcap)).check(backend)


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_scores_beyond_float32(backend: NativeAttention, dtype: torch.dtype) -> None:
    """Not a silent number: what the definition cannot say either is no number."""
    batch = Batch([70], [1], size=1e20, dtype=dtype)
    assert batch.state(backend).out.isnan().any()


@pytest.mark.parametrize("dtype", TYPES)
def test_no_number_stays_none(backend: NativeAttention, dtype: torch.dtype) -> None:
    """A NaN of a row that is seen reaches the result, in K, in V, and where nothing else is."""
    for keys, row in ((70, 69), (1, 0)):
        for name in ("k_SHD", "v_SHD"):
            batch = Batch([keys], [1], dtype=dtype)
            slot = int(batch.tables[0][row // 16]) * 16 + row % 16
            getattr(batch, name)[slot] = math.nan
            assert batch.state(backend).out.isnan().all()


def test_weights_are_powers_of_two(backend: NativeAttention) -> None:
    """A key's weight is 2^x, within 2^-22 of it (``exp2_of``), and 0 below 2^-126. Beside a key of
    weight 1 the result is 2^x / (1 + 2^x), which rounds a sum, a quotient and a product."""
    x = torch.cat([-126 * torch.rand(3000), -torch.rand(1000), -(2.0 ** -torch.arange(40.0)), -torch.arange(140.0)])
    batch = Batch([2] * len(x), [1] * len(x), heads=(1, 1), sizes=(1, 1), page_size=2, scoring=Scoring(math.log(2)))
    for rows in (batch.k_SHD, batch.v_SHD):
        rows[0::2], rows[1::2] = 0, 1
    found = batch.state(backend, q_THD=x.view(-1, 1, 1)).out.flatten().double()
    exact = torch.where(x < -126, 0.0, 2.0 ** x.double())
    assert float(exact[x >= -126].min()) == 2.0**-126
    assert bool(((found - exact / (1 + exact)).abs() <= exact * (2.0**-22 + 3 * 2.0**-24)).all())


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), level=st.sampled_from([*LEVELS, EMULATED]), dtype=st.sampled_from(TYPES))
def test_random_plans(seed: int, level: str, dtype: torch.dtype) -> None:
    """Everything with everything, at each level, against the definition by loops."""
    rng = random.Random(seed)
    kinds = rng.choice([KINDS, ("chain",), ("chain", "tree", "mask")])
    case = Case(
        [random_entry(rng, kinds) for _ in range(rng.randint(1, 4))],
        seed=seed % 1000,
        page_size=rng.choice([1, 5, 16]),
        heads=rng.choice(GROUPS),
        sizes=rng.choice([*SIZES, (64, 64)]),
        dtype=dtype,
        scoring=Scoring(rng.choice([0.3, 1.0]), rng.choice([None, None, 0.7, 5.0])),
        learned=rng.random() < 0.3,
        fragmented=rng.random() < 0.6,
    )
    with pytest.MonkeyPatch.context() as patch:
        try:
            made = NativeAttention(level)
        except Unsupported:
            made = NativeAttention()
        patch.setitem(BACKENDS, "native", lambda: made)
        case.check("native")


# -- rows to the bit -------------------------------------------------------------------------------


def assert_same(found: AttentionState, wanted: AttentionState, rows: list[int] | slice = slice(None)) -> None:
    assert torch.equal(found.out, wanted.out[rows])
    assert torch.equal(found.lse, wanted.lse[rows])


@pytest.mark.turns(8)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 300])
def test_rows_do_not_know_their_batch(
    backend: NativeAttention, dtype: torch.dtype, window: int, three_threads: None
) -> None:
    for heads, sizes in (((2, 3), (64, 64)), ((1, 8), (24, 40))):
        batch = Batch(
            [1200, 40, 700, 64, 1, 1999], [1, 40, 5, 1, 1, 70], dtype=dtype, heads=heads, sizes=sizes, window=window
        )
        whole = batch.state(backend)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert_same(batch.state(backend), whole)
            for entries in ([0], [1], [5], [2, 3], [4, 0, 2]):
                rows = batch.rows(entries)
                assert_same(batch.state(backend, batch.plan(entries), batch.q_THD[rows]), whole, rows)


@pytest.mark.product(2)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("window", [0, 100])
def test_chunks_do_not_matter(backend: NativeAttention, dtype: torch.dtype, window: int) -> None:
    """A prompt at once, in chunks, and token by token."""
    for heads, sizes in (((1, 4), (64, 64)), ((2, 1), (20, 12))):
        batch = Batch([601], [601], dtype=dtype, heads=heads, sizes=sizes, window=window)
        whole = batch.state(backend)
        for cuts in ([0, 1, 64, 100, 513, 601], [600, 601], [511, 512, 513], [70, 71, 74, 90]):
            for first, stop in itertools.pairwise(cuts):
                batch.keys, batch.counts = [stop], [stop - first]
                assert_same(batch.state(backend, None, batch.q_THD[first:stop]), whole, slice(first, stop))


def shared(batch: Batch, groups: list[list[int]], splits: list[int]) -> None:
    """Let entries have the pages of a group's first one in so many splits."""
    for group, number in zip(groups, splits, strict=True):
        pages = number * 512 // batch.page_size
        for entry in group[1:]:
            batch.tables[entry][:pages] = batch.tables[group[0]][:pages]


@pytest.mark.turns(6)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("page_size", [16, 512, 48])
def test_shared_pages_do_not_matter(
    backend: NativeAttention, dtype: torch.dtype, page_size: int, three_threads: None
) -> None:
    """Groups within groups, entries that end with a split, chunks beside decodes."""
    keys, counts = [1600, 1537, 1024, 1100, 530, 1536, 512, 2100], [1, 3, 1, 1, 1, 1, 1, 40]
    batch = Batch(keys, counts, dtype=dtype, page_size=page_size)
    shared(batch, [[0, 1, 2, 3, 5, 7], [0, 1, 5], [4, 6]], [2, 3, 1])
    whole = batch.state(backend)
    batch.check(backend)
    for entry in range(len(keys)):
        rows = batch.rows([entry])
        assert_same(batch.state(backend, batch.plan([entry]), batch.q_THD[rows]), whole, rows)


# -- what is read ----------------------------------------------------------------------------------


def keys_read(backend: NativeAttention, batch: Batch) -> int:
    """Return the keys under the first KV head that items of work read."""
    prepared = backend.plan(batch.plan(), batch.dtype)
    items = backend.bind(prepared, shapes_of(prepared, batch.q_THD, None, batch.k_SHD, batch.v_SHD)).items
    _, _, _, _, head, _, split, stop, first, last, _ = items.T
    assert (stop <= 32).all(), "splits of 512 keys"
    seen = np.minimum(last, stop * 512) - np.maximum(first, split * 512)
    return int(seen[head == 0].sum())


def test_shared_pages_are_read_once(three_threads: None) -> None:
    batch = Batch([1600] * 8, [1] * 8)
    assert keys_read(NativeAttention(), batch) == 8 * 1600
    shared(batch, [list(range(8))], [3])
    assert keys_read(NativeAttention(), batch) == 1536 + 8 * 64
    batch.tables[5][0] = batch.tables[4][80]
    assert keys_read(NativeAttention(), batch) == 1536 + 7 * 64 + 1600


@pytest.mark.parametrize(("keys", "heads"), [([4096], 3), ([4096], 8), ([3000, 2000, 700, 90], 8), ([500], 4)])
def test_items_become_smaller(keys: list[int], heads: int, three_threads: None) -> None:
    """An item is half of a thread's share of what is left, or one split under one head."""
    backend, batch = NativeAttention(), Batch(keys, [1] * len(keys), heads=(heads, 2))
    prepared = backend.plan(batch.plan(), batch.dtype)
    items = backend.bind(prepared, shapes_of(prepared, batch.q_THD, None, batch.k_SHD, batch.v_SHD)).items
    left = sum(keys) * heads
    for _, pieces in itertools.groupby(items.tolist(), key=lambda item: (item[1], item[6])):
        chunk = list(pieces)
        sizes = [min(last, stop * 512) - split * 512 for *_, split, stop, _, last, _ in chunk]
        assert [item[4] for item in chunk] == [0, *itertools.accumulate(item[5] for item in chunk)][:-1]
        for item, size in zip(chunk, sizes, strict=True):
            assert item[5] * size <= max(left // 6 + 1, size)
            assert size <= 512 or heads * size <= left // 6 + 1
        left -= heads * sizes[0]
    assert left == 0


def test_a_window_is_all_that_is_read() -> None:
    batch = Batch([3000], [1], window=200)
    assert keys_read(NativeAttention(), batch) == 200
    batch = Batch([3000], [600], window=200)
    assert keys_read(NativeAttention(), batch) <= 600 * 200 // 20


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_unseen_rows_are_not_read(backend: NativeAttention, dtype: torch.dtype) -> None:
    """Not even as zeros: of pages that hold seen rows too, under a mask and a window."""
    batch = Batch([200], [1], window=30, dtype=dtype)
    rule = KeyRule(first=0, allowed=np.arange(200)[None] % 3 == 0, positions=np.arange(200))
    for plan in (batch.plan(), replace(batch.plan(), rules=(rule,)), replace(batch.plan(), rules=(rule,), lows=None)):
        seen = np.arange(200) >= (170 if plan.lows is not None else 0)
        if plan.rules[0] is not None:
            seen &= np.arange(200) % 3 == 0
        before = batch.state(backend, plan)
        k_SHD, v_SHD = batch.k_SHD.clone(), batch.v_SHD.clone()
        address = np.flatnonzero(seen)
        slots = batch.tables[0][address // 16].astype(np.int64) * 16 + address % 16
        batch.k_SHD.fill_(math.nan)
        batch.v_SHD.fill_(math.nan)
        batch.k_SHD[slots], batch.v_SHD[slots] = k_SHD[slots], v_SHD[slots]
        assert_same(batch.state(backend, plan), before)
        batch.k_SHD, batch.v_SHD = k_SHD, v_SHD


def test_many_decodes_over_one_prefix_are_planned_in_little_memory() -> None:
    """No mask: two numbers a row, and the page ids once."""
    length, entries = 32768, 64
    pages: NDArray[np.int32] = np.arange(length // 16, dtype=np.int32)
    plan = ForwardPlan(
        page_size=16,
        counts=np.ones(entries, dtype=np.int64),
        keys=np.full(entries, length),
        origins=np.zeros(entries, dtype=np.int64),
        starts=np.arange(entries + 1),
        tables=(pages,) * entries,
        positions=np.full(entries, length - 1),
        rules=(None,) * entries,
        device=torch.device("cpu"),
    )
    backend = NativeAttention()
    pool = torch.zeros(1, 3, 64).expand(length, 3, 64)
    tracemalloc.start()
    prepared = backend.plan(plan, torch.float32)
    items = backend.bind(prepared, shapes_of(prepared, torch.zeros(entries, 9, 64), None, pool, pool)).items
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used <= 2 * entries * pages.nbytes
    assert items[:, 3].tolist() == [entries] * len(items)


# -- arguments, types, models ----------------------------------------------------------------------


def test_arguments() -> None:
    backend, batch = NativeAttention(), Batch([40], [1])
    prepared = backend.plan(batch.plan(), torch.bfloat16)
    with pytest.raises(InvalidArgument, match=r"planned for torch\.bfloat16 on the CPU; q is torch\.float32"):
        backend.run(prepared, batch.q_THD, None, PlainRows(batch.k_SHD, batch.v_SHD), batch.scoring)
    prepared = backend.plan(batch.plan(), torch.float32)
    with pytest.raises(InvalidArgument, match=r"K is torch\.float64"):
        backend.run(prepared, batch.q_THD, None, PlainRows(batch.k_SHD.double(), batch.v_SHD), batch.scoring)
    with pytest.raises(InvalidArgument, match="is not in a pool of 16 slots"):
        backend.run(prepared, batch.q_THD, None, PlainRows(batch.k_SHD[:16], batch.v_SHD[:16]), batch.scoring)
    spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8)
    assert "runs on a CPU" in backend.refusal(spec, torch.device("cuda"))
    assert backend.refusal(spec, torch.device("cpu")) == ""
    assert isinstance(backend.plan(batch.plan(), torch.float64), SdpaPlan)


def test_what_tiles_multiply() -> None:
    """Bfloat16 with an even number of columns; all else goes as without tiles."""
    for dtype, sizes, by_tiles in (
        (torch.bfloat16, (64, 64), True),
        (torch.bfloat16, (22, 33), True),
        (torch.bfloat16, (33, 64), False),
        (torch.float32, (64, 64), False),
        (torch.float16, (64, 64), False),
    ):
        batch = Batch([300], [20], dtype=dtype, sizes=sizes)
        found, other = (batch.state(NativeAttention(level)) for level in (EMULATED, "portable"))
        assert torch.equal(found.lse, other.lse) != by_tiles


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NativeAttention("portable").level == "portable"
    assert NativeAttention().level in LEVELS
    if NativeAttention().level != LEVELS[-1]:
        with pytest.raises(Unsupported, match="this processor has portable"):
            NativeAttention(LEVELS[-1])
    monkeypatch.setattr(cpu_attention, "native_library", lambda: None)
    monkeypatch.setattr(cpu_attention, "native_problem", lambda: "not built")
    spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8)
    assert NativeAttention().refusal(spec, torch.device("cpu")) == "not built"
    with pytest.raises(Unsupported, match="not built"):
        NativeAttention("portable")


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_pairs_are_not_used_unasked(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intel's processors without tiles multiply float32 faster than pairs of bfloat16."""
    library = native_library.native_library()
    assert library is not None
    answers = {"quire_slow_pairs": lambda: slow, "quire_attention_level": lambda: LEVELS.index("AVX512-BF16")}
    double = SimpleNamespace(
        function=lambda name, *given, **more: answers.get(name) or library.function(name, *given, **more),
        parallel=library.parallel,
    )
    monkeypatch.setattr(cpu_attention, "native_library", lambda: double)
    assert NativeAttention().level == ("AVX-512" if slow else "AVX512-BF16")
    assert NativeAttention("AVX512-BF16").level == "AVX512-BF16"


def test_without_the_library_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend_of(name: str) -> str:
        llm = LLM("tiny-python", dtype="float32", attention_backend=name, kv_cache_memory="4MiB")
        return str(llm.engine.runner.state.parts.paged.backend.name)

    assert backend_of("auto") == "native"
    monkeypatch.setattr("quire.build.native_problem", lambda: "not built")
    assert backend_of("auto") == "torch"
    monkeypatch.setattr(native_library, "_load", lambda: "not built")
    with pytest.raises(Unsupported, match="not built"):
        backend_of("native")


@pytest.mark.turns(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3", "gpt_oss", "mistral"])
def test_greedy_tokens_are_those_of_torch(family: str, tmp_path: Path) -> None:
    found = [name for name in FAMILIES if name.replace("-", "_").startswith(family)]
    name, changes = FAMILIES[found[0]]
    torch.manual_seed(1)
    kind = getattr(transformers, f"{name}ForCausalLM")
    peer = kind(kind.config_class(**{**MODEL, **changes})).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    peer.save_pretrained(tmp_path)
    prompts = [list(range(3, 3 + n)) for n in (30, 7, 1)]
    texts = []
    for backend in ("native", "torch"):
        llm = LLM(str(tmp_path), dtype="float32", attention_backend=backend, kv_cache_memory="4MiB")
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


@pytest.mark.turns(2)
def test_each_feature_at_each_level(backend: NativeAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "native", lambda: backend)
    for number, (entries, softcap, learned) in enumerate(FEATURES.values()):
        dtype = TYPES[number % 3]
        Case(entries, sizes=(16, 32), dtype=dtype, scoring=Scoring(0.6, softcap), learned=learned).check("native")
