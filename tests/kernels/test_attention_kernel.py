"""The attention backends over plans made by hand, against a definition in float64, row by row.

The definition decides what a row sees from the words of ``ForwardPlan``, and shares no code with
the backends. Bounds say how far a right answer may be from the exact one; they are
derived from the precision.

Letters: T rows of the batch; Hq, Hkv heads; Dk, Dv head sizes; P page size; S slots.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.triton_machine import DEVICE, CarriedAttention, needs_triton
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.attention import AttentionBackend, AttentionState, ForwardPlan, KeyRule, Scoring
from quire.contracts.kv_format import PlainRows
from quire.contracts.layers import FullAttention, LatentAttention, WindowedAttention
from quire.kernels.attention import group_calls, lse_attention, row_blocks, sdpa
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.attention.groups import Keys
from quire.kernels.attention.sdpa import PartGroups, SdpaAttention, SdpaPlan
from quire.ops.attention import ReferenceAttention, attention_weights

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "torch": SdpaAttention,
    "native": NativeAttention,
    "reference": ReferenceAttention,
    "triton": lambda: CarriedAttention(least_split=64, programs=1000),
}
QUICK = ("torch", "native", "reference")
"""Those that meet each random plan; of the interpreter ``tests/kernels/test_triton_attention.py``
tries fewer."""
NAMES = [*QUICK, pytest.param("triton", marks=needs_triton)]
PATIENT = [
    *QUICK,
    pytest.param("triton", marks=[needs_triton, pytest.mark.slow]),
]
"""For what takes the interpreter a minute."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GROUPS = ((1, 1), (4, 1), (2, 2), (2, 4), (1, 8))
"""(KV heads, query heads of each): MHA, GQA, MQA."""
SIZES = ((8, 8), (5, 5), (16, 6), (3, 7))
"""(Dk, Dv)"""
Kind = Literal["chain", "own", "late", "past", "some", "any", "tree", "tree own", "tree past", "mask"]
"""What the keys are: all tokens, the new ones, only the last of these, those before; all, for
``some`` of the tokens behind ``past`` as queries, or ``any`` positions in any order; by token tree,
by mask.
"""
KINDS: tuple[Kind, ...] = ("chain", "own", "late", "past", "some", "any", "tree", "tree own", "tree past", "mask")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of a batch, as a test describes it."""

    kind: Kind
    past: int
    """Committed tokens."""
    count: int
    pending: int = 0
    """Earlier nodes of the tree."""
    parents: tuple[int, ...] = ()
    """Of all nodes; empty: any."""
    window: int = 0
    """Of the sequence; 0: none."""
    sink: int = 0
    layer_window: int = 0
    """0: none."""


@dataclass(frozen=True)
class Made:
    """An entry of a plan. ``lows`` and ``sinks`` as in ``ForwardPlan``."""

    keys: int
    origin: int
    positions: list[int]
    rule: KeyRule | None
    lows: list[int]
    sinks: list[tuple[int, int]]
    own: bool
    """The last keys are the new tokens."""


def make_entry(entry: Entry, rng: random.Random) -> Made:
    nodes = entry.pending + entry.count
    parents = entry.parents or [rng.choice([-1, j - 1, rng.randrange(-1, j)]) if j else -1 for j in range(nodes)]
    depth, seen = [0] * nodes, np.eye(nodes, dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depth[node] = depth[parent] + 1
            seen[node] |= seen[parent]
    new = range(entry.pending, nodes)
    keys, origin, rule, own = entry.past + entry.count, 0, None, True
    if entry.kind.startswith("tree"):
        positions = [entry.past + depth[node] for node in new]
        columns = {"tree": range(nodes), "tree own": new, "tree past": range(entry.pending)}[entry.kind]
        first, origin = (0, entry.past) if entry.kind == "tree own" else (entry.past, 0)
        keys, own = first + len(columns), entry.kind != "tree past"
        where = np.array([entry.past + depth[node] for node in columns], dtype=np.int64)
        rule = KeyRule(first=first, allowed=seen[np.ix_(list(new), list(columns))], positions=where)
    else:
        positions = [entry.past + index for index in range(entry.count)]
        if entry.kind == "own":
            keys, origin = entry.count, entry.past
        elif entry.kind == "late":
            keys, own = -(-entry.count // 2), False
            origin = entry.past + entry.count - keys
        elif entry.kind == "some":
            keys, own = keys + rng.choice([1, entry.count, 3 * entry.count]), rng.random() < 0.2
            positions = sorted(rng.sample(range(entry.past, keys), entry.count))
            if own:  # The last keys, though there are others before that do not run.
                positions = list(range(keys - entry.count, keys))
        elif entry.kind == "any":
            positions, own = [rng.randrange(keys + 3) for _ in positions], False
        elif entry.kind == "past":
            keys, own = entry.past, False
        elif entry.kind == "mask":
            allowed = np.array([[rng.random() < 0.4 for _ in range(keys)] for _ in range(entry.count)])
            for row in allowed:
                row[: rng.choice([0, 0, keys // 2, keys])] = False
            rule = KeyRule(first=0, allowed=allowed, positions=np.arange(keys))
    lows, sinks = [], []
    for q in positions:
        low, sink = 0, (0, 0)
        if entry.layer_window:
            low = max(0, q - entry.layer_window + 1)
        if entry.window and q - (entry.window - entry.sink) + 1 > entry.sink:
            # The sink is cut off from the window: it is a part of its own, of which the layer's
            # window leaves some.
            sink = (low, entry.sink) if low < entry.sink else (0, 0)
            low = max(low, q - (entry.window - entry.sink) + 1)
        lows.append(low)
        sinks.append(sink)
    return Made(keys, origin, positions, rule, lows, sinks, own)


class Case:
    """A batch over a pool, and its exact attention."""

    def __init__(
        self,
        entries: list[Entry],
        *,
        seed: int = 0,
        page_size: int = 4,
        heads: tuple[int, int] = (2, 2),
        sizes: tuple[int, int] = (8, 8),
        dtype: torch.dtype = torch.float32,
        scoring: Scoring | None = None,
        learned: bool = False,
        fragmented: bool = True,
        fresh: bool = True,
    ) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.made = [make_entry(entry, rng) for entry in entries]
        self.sights = [
            [self.sight(number, row) for row in range(len(made.positions))] for number, made in enumerate(self.made)
        ]
        self.scoring = scoring or Scoring(sizes[0] ** -0.5)
        self.dtype = dtype
        kv_heads, group = heads
        widths = [-(-made.keys // page_size) for made in self.made]
        pages = list(range(sum(widths) + 2))
        if fragmented:
            rng.shuffle(pages)
        tables = []
        for width in widths:
            tables.append(np.array(pages[:width], dtype=np.int32))
            pages = pages[width:]
        counts = np.array([entry.count for entry in entries])
        windowed = any(entry.window or entry.layer_window for entry in entries)
        sunk = any(entry.sink for entry in entries)
        self.plan = ForwardPlan(
            page_size=page_size,
            counts=counts,
            keys=np.array([made.keys for made in self.made], dtype=np.int64),
            origins=np.array([made.origin for made in self.made], dtype=np.int64),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            tables=tuple(tables),
            positions=np.array([q for made in self.made for q in made.positions]),
            rules=tuple(made.rule for made in self.made),
            lows=np.array([low for made in self.made for low in made.lows]) if windowed else None,
            sinks=np.array([sink for made in self.made for sink in made.sinks]) if sunk else None,
            device=torch.device("cpu"),
        )
        # Pages of nobody, and null pages, hold NaN: whoever reads them shows it. Rows that a row of
        # the entry sees are numbers; others of the same pages are large, but finite: that much a
        # state promises.
        shape = ((sum(widths) + 2) * page_size, kv_heads)
        self.k_SHD, self.v_SHD = (torch.full((*shape, dim), math.nan, dtype=dtype) for dim in sizes)
        for number, made in enumerate(self.made):
            visible = {key for parts in self.sights[number] for part in parts for key in part}
            for page, slot in enumerate(tables[number].tolist()):
                if visible.isdisjoint(range(page * page_size, (page + 1) * page_size)):
                    tables[number][page] = -1
                    continue
                there = min(page_size, made.keys - page * page_size)
                for pool in (self.k_SHD, self.v_SHD):
                    rows_PHD = pool[slot * page_size : (slot + 1) * page_size]
                    rows_PHD[:there] = torch.randn(there, *pool.shape[1:], generator=generator).to(dtype)
                    rows_PHD[there:] = 50.0
        num_heads, tokens = kv_heads * group, int(counts.sum())
        self.q_THD, q_sink = (torch.randn(tokens, num_heads, sizes[0], generator=generator).to(dtype) for _ in range(2))
        self.q_sink_THD = q_sink if sunk else None
        self.sinks_H = 2 * torch.randn(num_heads, generator=generator) if learned else None
        self.new: tuple[Tensor, Tensor] | None = None
        if fresh and all(made.own for made in self.made):
            slots = [
                max(0, int(table[a // page_size])) * page_size + a % page_size
                for table, made, count in zip(tables, self.made, counts.tolist(), strict=True)
                for a in range(made.keys - count, made.keys)
            ]
            self.new = self.k_SHD[slots], self.v_SHD[slots]

    def sight(self, number: int, row: int) -> tuple[list[int], list[int]]:
        """Addresses that a row of an entry sees in its window part and in its sink part."""
        made = self.made[number]
        query, low, (sink, end) = made.positions[row], made.lows[row], made.sinks[row]
        positions = made.origin + np.arange(made.keys)
        seen = positions <= query
        if made.rule is not None:
            positions[made.rule.first :] = made.rule.positions[: max(0, made.keys - made.rule.first)]
            seen[: made.rule.first] = positions[: made.rule.first] <= query
            seen[made.rule.first :] = made.rule.allowed[row, : max(0, made.keys - made.rule.first)]
        in_window = seen & (positions >= low)
        in_sink = seen & ~in_window & (positions >= sink) & (positions < end)
        return np.flatnonzero(in_window).tolist(), np.flatnonzero(in_sink).tolist()

    def exact(
        self, learned: bool
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], list[NDArray[np.float64]], Tensor]:
        """``out [T, Hq, Dv]``, ``lse [T, Hq]``, weights ``[Hq, n, keys]`` of each entry; bounds
        ``[3, T]`` of these three.
        """
        q, k, v = (x.double().numpy() for x in (self.q_THD, self.k_SHD, self.v_SHD))
        q_sink = None if self.q_sink_THD is None else self.q_sink_THD.double().numpy()
        tokens, heads, _ = q.shape
        out, lse = np.zeros((tokens, heads, v.shape[2])), np.full((tokens, heads), -math.inf)
        bounds = torch.zeros(4, tokens, dtype=torch.float64)
        weights = []
        for number, made in enumerate(self.made):
            table, page_size = self.plan.tables[number], self.plan.page_size
            slot = [int(table[a // page_size]) * page_size + a % page_size for a in range(made.keys)]
            entry_weights = np.zeros((heads, len(made.positions), made.keys))
            for row in range(len(made.positions)):
                t = int(self.plan.starts[number]) + row
                window, sink = self.sights[number][row]
                asked = [(key, q[t]) for key in window]
                if sink:
                    assert q_sink is not None
                    asked += [(key, q_sink[t]) for key in sink]
                assert all(slot[key] >= 0 for key, _ in asked)
                # Row by row of the heads, so that what a row sees decides alone.
                scores_HK = np.zeros((heads, len(asked)))
                values_HKD = v[[slot[key] for key, _ in asked]].transpose(1, 0, 2).repeat(heads // k.shape[1], 0)
                for part, queries_HD in ((window, q[t]), (sink, None if q_sink is None else q_sink[t])):
                    if part:
                        assert queries_HD is not None
                        keys_HKD = k[[slot[key] for key in part]].transpose(1, 0, 2).repeat(heads // k.shape[1], 0)
                        place = slice(0, len(window)) if part is window else slice(len(window), None)
                        scores_HK[:, place] = (keys_HKD @ queries_HD[:, :, None])[:, :, 0] * self.scoring.scale
                if self.scoring.softcap is not None:
                    scores_HK = self.scoring.softcap * np.tanh(scores_HK / self.scoring.softcap)
                terms_HK = scores_HK
                if learned and self.sinks_H is not None:
                    terms_HK = np.concatenate((scores_HK, self.sinks_H.double().numpy()[:, None]), 1)
                if terms_HK.shape[1]:
                    top_H = terms_HK.max(1)
                    lse[t] = top_H + np.log(np.exp(terms_HK - top_H[:, None]).sum(1))
                    weights_HK = np.exp(scores_HK - lse[t][:, None])
                    entry_weights[:, row, [key for key, _ in asked]] = weights_HK
                    out[t] = (weights_HK[:, None] @ values_HKD)[:, 0]
                rows = [slot[key] for key, _ in asked]
                size = max([0.0, *(float(np.linalg.norm(query, axis=-1).max()) for _, query in asked[:1] + asked[-1:])])
                k_size = float(np.linalg.norm(k[rows], axis=-1).max()) if rows else 0.0
                v_size = float(np.abs(v[rows]).max()) if rows else 0.0
                seen = lse[t][np.isfinite(lse[t])]
                bounds[:, t] = torch.tensor(
                    self.bounds(size * k_size, v_size, len(rows), float(np.abs(seen).max()) if seen.size else 0.0)
                )
            weights.append(entry_weights)
        return out, lse, weights, bounds

    def bounds(self, product: float, v_size: float, keys: int, lse: float) -> list[float]:
        """How far out, the lse inside, weights, and the lse of a state of one row may be from the
        exact ones.

        A score is off by at most d = scale |q| |k| (6 u + (Dk + 12) u32): q, k, both times the root
        of the scale and the score may be rounded, and Dk terms are summed; a soft cap has a
        quotient, a tanh and a product more, of size 8 u32 cap. A log-sum-exp is off by d, by the
        sum of m terms (of which each may be rounded to the type), and by a few roundings of its own
        size; each merge (three at most, of segments, sink and learned logit) adds as much. Weights
        are off by the factor of both; products, partial results and the result are rounded once
        each.

        For a state nothing is rounded to less than float32 before its lse.
        """
        u, u32 = (torch.finfo(kind).eps / 2 for kind in (self.dtype, torch.promote_types(self.dtype, torch.float32)))
        if self.dtype == torch.float64:
            u32 = u
        d32 = self.scoring.scale * product * (self.q_THD.shape[-1] + 12) * u32 + 8 * u32 * (self.scoring.softcap or 0.0)
        d = d32 + self.scoring.scale * product * 6 * u
        sums = (keys + 8) * u32 + 4 * 8 * u32 * max(1.0, lse)
        lse_bound, state_lse_bound = d + 2 * u + sums, d32 + sums
        tiny = torch.finfo(self.dtype).tiny
        weight_bound = math.expm1(d + lse_bound) + 8 * torch.finfo(torch.float32).eps
        out_bound = v_size * (math.expm1(d + lse_bound) + (keys + 8) * u32 + 6 * u) + tiny
        return [out_bound, lse_bound, weight_bound, state_lse_bound]

    def run(self, backend: AttentionBackend, **changes: Any) -> Tensor:
        arguments = {"q_sink_THD": self.q_sink_THD, "sinks_H": self.sinks_H, **changes}
        prepared = backend.plan(self.plan, self.dtype)
        return backend.run(prepared, self.q_THD, self.new, PlainRows(self.k_SHD, self.v_SHD), self.scoring, **arguments)

    def run_state(self, backend: AttentionBackend) -> AttentionState:
        prepared = backend.plan(self.plan, self.dtype)
        return backend.run_state(
            prepared, self.q_THD, self.new, PlainRows(self.k_SHD, self.v_SHD), self.scoring, q_sink_THD=self.q_sink_THD
        )

    def check(self, *names: str) -> None:
        """Attention, state and weights, by the backends named (the quick ones)."""
        pools = self.k_SHD.clone(), self.v_SHD.clone()
        without = self.exact(False)
        plain, plain_lse, _, plain_bounds = without
        out, _, weights, bounds = without if self.sinks_H is None else self.exact(True)
        shape = (self.plan.num_tokens, self.q_THD.shape[1], self.v_SHD.shape[2])
        for name in names or QUICK:
            backend = BACKENDS[name]()
            found = self.run(backend)
            state = self.run_state(backend)
            for tensor in (found, state.out):
                assert tensor.shape == shape
                assert tensor.dtype == self.dtype
                assert tensor.is_contiguous()
            assert state.lse.shape == shape[:2]
            assert state.lse.is_contiguous()
            assert state.lse.dtype == torch.promote_types(self.dtype, torch.float32)
            self.within(name, found, out, bounds[0])
            self.within(name, state.out, plain, plain_bounds[0])
            empty = np.isneginf(plain_lse)
            assert (np.isneginf(state.lse.double().numpy()) == empty).all(), name
            assert not found.double().numpy()[empty].any()
            assert not state.out.double().numpy()[empty].any()
            error = np.where(
                empty, 0.0, np.abs(np.where(empty, 0.0, state.lse.double().numpy()) - np.where(empty, 0.0, plain_lse))
            )
            assert (error.max(1) <= plain_bounds[3].numpy()).all(), (name, error.max(1), plain_bounds[3])
        for number, tensor in enumerate(
            attention_weights(
                self.plan,
                self.q_THD,
                PlainRows(self.k_SHD, self.v_SHD),
                self.scoring,
                q_sink_THD=self.q_sink_THD,
                sinks_H=self.sinks_H,
            )
        ):
            rows = slice(int(self.plan.starts[number]), int(self.plan.starts[number + 1]))
            assert tensor.dtype == torch.float32
            assert tensor.shape == weights[number].shape
            assert ((tensor.numpy() == 0) >= (weights[number] == 0)).all()
            assert (np.abs(tensor.double().numpy() - weights[number]) <= bounds[2][rows].numpy()[:, None]).all()
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(pools, (self.k_SHD, self.v_SHD), strict=True)
        )

    @staticmethod
    def within(name: str, found: Tensor, exact: NDArray[np.float64], bound_T: Tensor) -> None:
        error = (found.double() - torch.from_numpy(exact)).abs().amax((1, 2))
        assert (error <= bound_T).all(), (name, error, bound_T)


def paths(prepared: SdpaPlan) -> Counter[str]:
    """Which ways through the torch backend a batch takes."""
    found: Counter[str] = Counter()

    def count(label: str, part: PartGroups) -> None:
        found[f"{label} single"] += part.single
        found[f"{label} incomplete"] += not part.complete
        found[f"{label} blind rows"] += part.blind is not None
        found[f"{label} prompts"] += len(part.causal)
        found[f"{label} long chunks"] += len(part.long)
        for group in part.paged:
            found[f"{label} {'view' if group.keys.pages is None else 'gathered'}"] += 1
            found[f"{label} decodes"] += group.n == 1 and group.b > 1
            found[f"{label} chunks together"] += group.n > 1 and group.b > 1
            found[f"{label} no mask"] += group.mask is None
        for block in part.blocks:
            found[f"{label} block"] += 1
            found[f"{label} merged segments"] += len(block.segments) > 1
            for segment in block.segments:
                found[f"{label} segment without mask"] += segment.mask is None
                found[f"{label} segment with rule"] += segment.mask is not None and segment.mask.dtype == torch.bool
                found[f"{label} segment with blind rows"] += segment.blind is not None

    count("window", prepared.window)
    if prepared.sink is not None:
        count("sink", prepared.sink)
    return found


def random_entry(rng: random.Random, kinds: tuple[Kind, ...]) -> Entry:
    kind = rng.choice(kinds)
    count = rng.choice([1, 1, 1, 2, 3, rng.randint(2, 16), rng.randint(17, 45)])
    past = rng.choice([0, rng.randint(0, 8), rng.randint(0, 40), rng.randint(30, 110)])
    if kind == "past" and not past and rng.random() < 0.7:
        past = rng.randint(1, 30)
    entry = Entry(kind=kind, past=past, count=count, pending=rng.choice([0, 0, 1, 5]) if kind.startswith("tree") else 0)
    if rng.random() < 0.6:
        entry = replace(entry, layer_window=rng.choice([0, 1, 3, 7, 20, 60]))
    if rng.random() < 0.6:
        window = rng.choice([2, 6, 9, 25, 50])
        entry = replace(entry, window=window, sink=rng.choice([0, 1, min(4, window - 1), window - 1]))
    return entry


def use_small_blocks(monkeypatch: pytest.MonkeyPatch, smallest: int, largest: int, unmasked: int) -> None:
    """Blocks and segments that are small enough to be met in a test by loops."""
    monkeypatch.setattr(row_blocks, "SMALLEST_BLOCK", smallest)
    monkeypatch.setattr(row_blocks, "LARGEST_BLOCK", largest)
    monkeypatch.setattr(row_blocks, "UNMASKED_KEYS", unmasked)


@pytest.mark.parametrize("examples", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_random_plans(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything with everything: kinds of entries, windows, sinks, soft caps, learned logits,
    types, sizes.
    """
    seen: Counter[str] = Counter()
    for seed in range(examples):
        rng = random.Random(seed)
        with monkeypatch.context() as patch:
            if rng.random() < 0.7:
                use_small_blocks(patch, rng.choice([3, 8]), rng.choice([8, 16]), rng.choice([0, 5, 20]))
            patch.setattr(sdpa, "VIEW_KEYS", rng.choice([8, 192]))
            patch.setattr(lse_attention, "MAX_SCORES", rng.choice([300, 3000, 1 << 26]))
            kinds = rng.choice(
                [KINDS, ("chain",), ("chain", "tree", "mask"), ("own", "tree own"), ("past", "tree past")]
            )
            case = Case(
                [random_entry(rng, kinds) for _ in range(rng.randint(1, 5))],
                seed=seed,
                page_size=rng.choice([1, 5, 16]),
                heads=rng.choice(GROUPS),
                sizes=rng.choice(SIZES[:1] * 3 + SIZES),
                dtype=rng.choice(DTYPES),
                scoring=Scoring(rng.choice([0.3, 1.0]), rng.choice([None, None, 0.7, 5.0])),
                learned=rng.random() < 0.3,
                fragmented=rng.random() < 0.6,
                fresh=rng.random() < 0.7,
            )
            seen += paths(SdpaAttention().plan(case.plan, case.dtype))
            case.check()
    assert {name for name, count in seen.items() if count} >= {
        "window single",
        "window incomplete",
        "window blind rows",
        "window prompts",
        "window long chunks",
        "window view",
        "window gathered",
        "window decodes",
        "window chunks together",
        "window no mask",
        "window block",
        "window merged segments",
        "window segment without mask",
        "window segment with rule",
        "window segment with blind rows",
        "sink view",
        "sink gathered",
        "sink block",
        "sink segment with blind rows",
        "sink blind rows",
        "sink incomplete",
    }


DECODES = [Entry(kind="chain", past=past, count=1) for past in (30, 31, 3, 47)]
CHUNKS = [
    Entry(kind="chain", past=9, count=5),
    Entry(kind="chain", past=40, count=40),
    Entry(kind="chain", past=0, count=7),
]


def with_windows(entries: list[Entry], **more: int) -> list[Entry]:
    return [replace(entry, **more) for entry in entries]


TWO_DEPTHS = (*range(-1, 19), *(19 if node % 2 else -1 for node in range(20)))
"""A chain of 20 nodes, then its children and roots in turn."""
TREES = [Entry(kind="tree", past=20, count=7, pending=3), Entry(kind="tree", past=33, count=20)]
FEATURES: dict[str, tuple[list[Entry], float | None, bool]] = {
    "plain": (DECODES + CHUNKS, None, False),
    "layer window": (with_windows(DECODES + CHUNKS, layer_window=6), None, False),
    "wider layer window": (
        with_windows([*CHUNKS, Entry(kind="chain", past=60, count=45)], layer_window=30),
        None,
        False,
    ),
    "sink": (with_windows(DECODES + CHUNKS, window=9, sink=3), None, False),
    "both windows": (with_windows(DECODES + CHUNKS, window=9, sink=3, layer_window=12), None, False),
    "trees": (TREES + DECODES, None, False),
    "trees, windows, sinks": (with_windows(TREES + DECODES, window=9, sink=3), None, False),
    "deep trees, windows": (
        [Entry(kind="tree", past=30, count=45, layer_window=w) for w in (2, 5, 9, 14)],
        None,
        False,
    ),
    "tree over two depths": (
        [Entry(kind="tree", past=30, count=40, parents=TWO_DEPTHS, layer_window=12)],
        None,
        False,
    ),
    "tree over its past": ([Entry(kind="tree past", past=40, count=20, pending=6)], None, False),
    "some rows": (
        [Entry(kind="some", past=past, count=n) for past, n in ((0, 20), (30, 40), (9, 5), (3, 1))],
        None,
        False,
    ),
    "some rows, windows": (
        [Entry(kind="some", past=past, count=n, layer_window=9) for past, n in ((0, 20), (30, 40), (9, 5), (3, 1))],
        None,
        False,
    ),
    "some rows beside others": ([*CHUNKS, *DECODES, Entry(kind="some", past=11, count=30)], 1.5, True),
    "any positions": ([Entry(kind="any", past=30, count=count) for count in (1, 9, 20, 20)], None, False),
    "decodes at any positions": ([Entry(kind="any", past=past, count=1) for past in (30, 9, 31)], None, False),
    "masks": ([Entry(kind="mask", past=11, count=9), Entry(kind="mask", past=0, count=30)], None, False),
    "masks and windows": (with_windows([Entry(kind="mask", past=30, count=9)], window=12, sink=2), None, False),
    "own keys": ([Entry(kind="own", past=11, count=9), Entry(kind="own", past=50, count=1)], None, False),
    "own keys, windows": (with_windows([Entry(kind="own", past=11, count=30)], layer_window=4), None, False),
    "fewer keys than new tokens": (
        [Entry(kind="late", past=4, count=9), Entry(kind="late", past=0, count=30)],
        None,
        False,
    ),
    "past keys": ([Entry(kind="past", past=11, count=9), Entry(kind="past", past=0, count=4)], None, False),
    "more new tokens than keys": ([Entry(kind="past", past=3, count=25)], None, False),
    "past keys, windows": (with_windows([Entry(kind="past", past=11, count=30)], window=6, sink=2), None, False),
    "soft cap": (DECODES + CHUNKS, 1.5, False),
    "learned logits": (DECODES + CHUNKS, None, True),
    "everything": (with_windows(TREES + DECODES + CHUNKS, window=14, sink=4, layer_window=20), 2.0, True),
}


WAYS = ["usual", "small blocks", "no kernel with log-sum-exp"]
Pool = tuple[tuple[int, int], int, bool]
"""Sizes of rows, the page size, and whether pages are in any order."""
POOLS: list[Pool] = [((8, 8), 1, True), ((16, 6), 5, False), ((8, 8), 16, True)]


def features_by_type_and_way() -> Iterator[Any]:
    """Each feature in float32 in the usual way, and in one of the other ways and types, which go
    round with the features; all of them among the slow ones.
    """
    for number, feature in enumerate(FEATURES):
        for turn, way in enumerate(WAYS):
            for kind, dtype in enumerate(DTYPES):
                others = turn == 1 + number % 2 and kind == number // 2 % len(DTYPES)
                usual = others or (turn == 0 and dtype == torch.float32)
                name = f"{way}-{feature}-{str(dtype).removeprefix('torch.')}"
                yield pytest.param(feature, dtype, way, marks=() if usual else pytest.mark.slow, id=name)


@pytest.mark.parametrize(("feature", "dtype", "way"), list(features_by_type_and_way()))
def test_each_feature(feature: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one of the pools."""
    number = list(FEATURES).index(feature) + WAYS.index(way)
    check_feature(feature, dtype, way, [POOLS[number % 3]], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_over_all_pools(
    feature: str, dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_feature(feature, dtype, way, POOLS, monkeypatch)


def check_feature(
    feature: str, dtype: torch.dtype, way: str, pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "small blocks":
        use_small_blocks(monkeypatch, 8, 16, 5)
    if way == "no kernel with log-sum-exp":
        # As on a GPU.
        for module in (lse_attention, group_calls):
            monkeypatch.setattr(module, "has_lse_kernel", lambda *args: False)
    entries, softcap, learned = FEATURES[feature]
    for sizes, page_size, fragmented in pools:
        Case(
            entries,
            page_size=page_size,
            sizes=sizes,
            dtype=dtype,
            scoring=Scoring(0.6, softcap),
            learned=learned,
            fragmented=fragmented,
        ).check()


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_see_nothing(name: str) -> None:
    """A past that is empty, a mask without a key, a window that ends before the keys: 0 and -inf,
    learned logit or not.
    """
    entries = [
        Entry(kind="past", past=0, count=3),
        Entry(kind="past", past=0, count=1),
        Entry(kind="tree past", past=0, count=4),
        Entry(kind="past", past=4, count=20, layer_window=3),
        Entry(kind="chain", past=2, count=1),
    ]
    for learned in (False, True):
        case = Case(entries, learned=learned)
        case.check(name)
        state = case.run_state(BACKENDS[name]())
        assert state.lse[:8].isneginf().all()
        assert not state.out[:8].any()
        assert state.lse[-1].isfinite().all()
        nothing = Case(entries[:3], learned=learned)
        assert not nothing.run(BACKENDS[name]()).any()


@pytest.mark.parametrize("seeds", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PATIENT)
def test_new_rows_from_the_pool(name: str, seeds: int) -> None:
    """Prompts and long chunks without fresh K and V, beside entries whose last page nobody sees,
    and one with fewer keys than new tokens, which has no rows of its own."""
    hidden, short = Entry(kind="mask", past=5, count=1), Entry(kind="past", past=3, count=25)
    for seed in range(seeds):
        Case([hidden, *CHUNKS, hidden, short, hidden], seed=seed, page_size=1, fresh=False).check(name)


@pytest.mark.parametrize("name", PATIENT)
def test_sequences_do_not_reach_each_other(name: str) -> None:
    """NaN in the rows of one sequence changes no bit of another, however they are padded
    together."""
    for feature, (entries, softcap, learned) in FEATURES.items():
        for victim in range(len(entries)):
            case = Case(entries, seed=victim, scoring=Scoring(0.5, softcap), learned=learned)
            before = case.run(BACKENDS[name]())
            pages = case.plan.tables[victim]
            for page in pages[pages >= 0].tolist():
                for pool in (case.k_SHD, case.v_SHD):
                    pool[page * 4 : page * 4 + 4] = math.nan
            after = case.run(BACKENDS[name]())
            others = np.ones(len(after), dtype=np.bool_)
            others[case.plan.starts[victim] : case.plan.starts[victim + 1]] = False
            assert torch.equal(before[others], after[others]), feature


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", PATIENT)
@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_rows_behind_the_sink_are_not_read(name: str, count: int, kind: Kind) -> None:
    """NaN that left the window and only shares a page with the sink changes nothing, whoever is in
    the batch.
    """
    for seed in range(4):
        sinks = [1, 2, 3, 5][: 1 + seed]
        entries = [Entry(kind=kind, past=30, count=count, window=8, sink=sink) for sink in sinks]
        case = Case([*entries, Entry(kind="chain", past=9, count=count)], seed=seed)
        before, left = case.run(BACKENDS[name]()), 0
        for sink, table in zip(sinks, case.plan.tables, strict=False):
            for address in range(sink, -(-sink // 4) * 4):
                slot = int(table[address // 4]) * 4 + address % 4
                case.k_SHD[slot], case.v_SHD[slot], left = math.nan, math.nan, left + 1
        assert left >= len(sinks)
        assert torch.equal(case.run(BACKENDS[name]()), before)
        case.check(name)


@pytest.mark.parametrize("name", NAMES)
def test_sink_query_is_given_if_and_only_if_there_are_sinks(name: str) -> None:
    with_sink = Case(with_windows(DECODES, window=9, sink=3))
    with pytest.raises(InvalidArgument, match="the plan has a sink part and no q_sink_THD"):
        with_sink.run(BACKENDS[name](), q_sink_THD=None)
    without = Case(DECODES)
    with pytest.raises(InvalidArgument, match="no sink part and a q_sink_THD"):
        without.run(BACKENDS[name](), q_sink_THD=without.q_THD)


def test_q_of_another_type_than_planned() -> None:
    case = Case(DECODES)
    backend = SdpaAttention()
    prepared = backend.plan(case.plan, torch.bfloat16)
    with pytest.raises(InvalidArgument, match=r"planned for torch\.bfloat16; q is torch\.float32"):
        backend.run(prepared, case.q_THD, case.new, PlainRows(case.k_SHD, case.v_SHD), case.scoring)


@pytest.mark.parametrize("name", NAMES)
def test_kinds_of_layers(name: str) -> None:
    backend, cpu = BACKENDS[name](), DEVICE if name == "triton" else torch.device("cpu")
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "value_dim": 8}
    assert backend.refusal(FullAttention(**sizes, softcap=3.0, sinks=(0.5, 1.0)), cpu) == ""
    assert backend.refusal(WindowedAttention(**sizes, window=3), cpu) == ""
    assert "latent" in backend.refusal(LatentAttention(num_heads=2, row_dim=8, value_dim=6), cpu)


# -- how the torch backend does it -----------------------------------------------------------------


@pytest.mark.product(2)
@pytest.mark.parametrize("count", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [0, 12])
def test_rows_of_any_stride(count: int, groups: int, window: int) -> None:
    """A projection whose columns are not neighbours in memory, as the transpose of one; new rows as
    the pool itself.
    """
    for past in (0, 21):
        case = Case([Entry(kind="chain", past=past, count=count, layer_window=window)], heads=(2, groups))
        case.q_THD = case.q_THD.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        assert case.new is not None
        k, v = (x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in case.new)
        case.new = k, v
        case.check("torch")
        wide = torch.stack((case.k_SHD, case.v_SHD), 2)
        case.k_SHD, case.v_SHD = wide.unbind(2)
        case.check("torch")


@pytest.mark.turns(8)
@pytest.mark.parametrize("scores", [1, 100, 1 << 12, 1 << 26])
@pytest.mark.parametrize("groups", [1, 3])
def test_no_more_scores_than_allowed(scores: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft caps have no kernel with a log-sum-exp: scores exist, some entries, rows and keys at a
    time.
    """
    monkeypatch.setattr(lse_attention, "MAX_SCORES", scores)
    sizes: list[int] = []
    explicit = lse_attention.explicit

    def counting(q_BNHD: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, *args: Any, **kwargs: Any) -> AttentionState:
        b, n, heads, _ = q_BNHD.shape
        sizes.append(b * n * heads * k_BHMD.shape[2])
        assert b * n == heads * k_BHMD.shape[2] == groups * 2 or k_BHMD.numel() + v_BHMD.numel() <= max(scores, 44)
        return explicit(q_BNHD, k_BHMD, v_BHMD, *args, **kwargs)

    monkeypatch.setattr(lse_attention, "explicit", counting)
    case = Case(CHUNKS + DECODES, heads=(2, groups), sizes=(16, 6), scoring=Scoring(0.4, 3.0))
    case.check("torch")
    assert max(sizes) <= max(scores, 2 * groups)


def windowed_decodes(length: int, batch: int, *, fragmented: bool) -> ForwardPlan:
    """Decodes at the end of long sequences with a window of 128 and a sink of 4, that share one
    long page table.
    """
    size = length // 16 + 1
    pages = np.arange(size, dtype=np.int32)
    if fragmented:
        pages = pages ^ 1
    pages[1 : (length - 128) // 16] = -1
    positions = np.full(batch, length)
    return ForwardPlan(
        page_size=16,
        counts=np.ones(batch, dtype=np.int64),
        keys=positions + 1,
        origins=np.zeros(batch, dtype=np.int64),
        starts=np.arange(batch + 1),
        tables=(pages,) * batch,
        positions=positions,
        rules=(None,) * batch,
        lows=positions - 123,
        sinks=np.tile(np.array([0, 4]), (batch, 1)),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("batch", [1, 16])
def test_a_windowed_decode_costs_its_window(batch: int, fragmented: bool) -> None:
    """However long the sequence is: memory of the plan, and keys that are read."""
    used = []
    for length in (1 << 10, 1 << 22):
        plan = windowed_decodes(length, batch, fragmented=fragmented)
        SdpaAttention().plan(plan, torch.float32)
        tracemalloc.start()
        prepared: SdpaPlan = SdpaAttention().plan(plan, torch.float32)
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert prepared.sink is not None
        assert sum(group.b * group.keys.m for group in prepared.window.paged) <= batch * 144
        assert sum(group.b * group.keys.m for group in prepared.sink.paged) <= batch * 16
        assert not prepared.window.blocks + prepared.sink.blocks
    assert used[1] <= used[0] + 4096


def computed(prepared: SdpaPlan) -> int:
    """Scores of one head that the blocks of the window part compute."""
    return sum((b.stop - b.start) * (s.stop - s.start) for b in prepared.window.blocks for s in b.segments)


@pytest.mark.parametrize("window", [64, 128, 1024, 4096])
@pytest.mark.parametrize("past", [0, 5000])
def test_long_windowed_chunks_cost_their_windows(window: int, past: int) -> None:
    """Neither masks of tokens x context, nor many more scores than are visible."""
    count = 6000
    positions = np.arange(past, past + count)
    plan = ForwardPlan(
        page_size=16,
        counts=np.array([count]),
        keys=np.array([past + count]),
        origins=np.zeros(1, dtype=np.int64),
        starts=np.array([0, count]),
        tables=(np.arange(-(-(past + count) // 16), dtype=np.int32),),
        positions=positions,
        rules=(None,),
        lows=np.maximum(0, positions - window + 1),
        device=torch.device("cpu"),
    )
    prepared: SdpaPlan = SdpaAttention().plan(plan, torch.float32)
    needed = int(np.minimum(positions + 1, window).sum())
    # A block of at most 64 rows, or of a quarter of the window, reads so many keys more than each
    # of its rows sees.
    assert needed <= computed(prepared) <= needed * (1 + max(64, window // 4) / window) + row_blocks.LARGEST_BLOCK**2
    masks = {id(s.mask): s.mask.numel() for b in prepared.window.blocks for s in b.segments if s.mask is not None}
    assert sum(masks.values()) <= 16 * row_blocks.LARGEST_BLOCK * (row_blocks.UNMASKED_KEYS + row_blocks.LARGEST_BLOCK)
    assert all(
        s.stop - s.start <= row_blocks.UNMASKED_KEYS + 1024
        for b in prepared.window.blocks
        for s in b.segments
        if s.mask is not None
    )


def chosen_rows(count: int, keys: int, *, runs: bool, page_size: int = 16) -> ForwardPlan:
    """One entry of ``keys`` tokens over pages in any order, of which ``count`` rows run."""
    rng = np.random.default_rng(count)
    if runs:
        firsts = rng.choice(keys // 30, count // 30, replace=False) * 30
        positions = np.sort((firsts[:, None] + np.arange(30)).ravel())
    else:
        positions = np.sort(rng.choice(keys, count, replace=False))
    return ForwardPlan(
        page_size=page_size,
        counts=np.array([count]),
        keys=np.array([keys]),
        origins=np.zeros(1, dtype=np.int64),
        starts=np.array([0, count]),
        tables=(rng.permutation(-(-keys // page_size)).astype(np.int32),),
        positions=positions,
        rules=(None,),
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(("count", "keys"), [(600, 4096), (1200, 6000), (60, 4096)])
def test_rows_that_are_no_neighbours_cost_what_they_see(
    count: int, keys: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly a key behind a row is read for it, keys are gathered once, and masks are small."""
    plan = chosen_rows(count, keys, runs=runs)
    prepared: SdpaPlan = SdpaAttention().plan(plan, torch.float32)
    needed = int((plan.positions + 1).sum())
    # What the rows of a block see moves by a quarter of the longest; 64 rows are never cut.
    moved = keys * max(1 / 4, 64 / count)
    assert needed <= computed(prepared) <= needed + count * moved / 2
    masks = [s.mask.numel() for b in prepared.window.blocks for s in b.segments if s.mask is not None]
    assert sum(masks) <= count * (row_blocks.UNMASKED_KEYS + moved)
    gathered = []
    gather = Keys.gather

    def counted(self: Keys, pool: Any) -> Any:
        gathered.append(self.m)
        return gather(self, pool)

    monkeypatch.setattr(Keys, "gather", counted)
    k_SHD, v_SHD = torch.randn(2, -(-keys // 16) * 16, 1, 4).unbind(0)
    SdpaAttention().run(prepared, torch.randn(count, 1, 4), None, PlainRows(k_SHD, v_SHD), Scoring(0.5))
    assert gathered == [int(plan.positions[-1]) + 1]


def test_long_chunks_with_windows() -> None:
    """Blocks of their true size: the first ones, those in the middle, the last one."""
    for entry in (
        Entry(kind="chain", past=0, count=300, layer_window=128),
        Entry(kind="chain", past=350, count=150, layer_window=100),
        Entry(kind="chain", past=37, count=290, window=90, sink=10),
        Entry(kind="tree", past=200, count=100, layer_window=100),
        Entry(kind="some", past=37, count=140),
    ):
        case = Case([entry], heads=(1, 2), sizes=(4, 4))
        case.check("torch")
        sink = SdpaAttention().plan(case.plan, torch.float32).sink
        # All rows see the same sink: it is not cut as the window is.
        assert sink is None or len(sink.blocks) == 1


def test_a_long_past_in_front_of_a_tree_has_no_mask() -> None:
    for count in (5, 40):
        case = Case([Entry(kind="tree", past=3000, count=count)], heads=(1, 1), sizes=(4, 4), page_size=16)
        prepared: SdpaPlan = SdpaAttention().plan(case.plan, torch.float32)
        (block,) = prepared.window.blocks
        assert [segment.mask is None for segment in block.segments] == [True, False]
        assert block.segments[1].stop - block.segments[1].start == count
        case.check("torch")


def test_plain_batches_take_the_plain_ways() -> None:
    """Windows that hide nothing change nothing."""
    for window in (0, 2000):
        case = Case(with_windows(DECODES + CHUNKS, layer_window=window))
        part = SdpaAttention().plan(case.plan, torch.float32).window
        assert (len(part.causal), len(part.long), len(part.blocks)) == (1, 1, 0)
        assert sorted((group.b, group.n) for group in part.paged) == [(1, 5), (4, 1)]
    assert SdpaAttention().plan(Case(DECODES).plan, torch.float32).window.single


def test_decodes_are_not_padded_to_the_rows_of_a_chunk() -> None:
    """One short chunk in the batch must not multiply the work of every decode beside it."""
    entries = [Entry(kind="chain", past=30, count=count) for count in (1, 5, 1, 16, 1)]
    prepared: SdpaPlan = SdpaAttention().plan(Case(entries, page_size=16).plan, torch.float32)
    assert sorted((group.b, group.n) for group in prepared.window.paged) == [(2, 16), (3, 1)]
