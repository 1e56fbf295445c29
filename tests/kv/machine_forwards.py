"""Steps of the random machine inside of a forward: batches of chains and trees, masks, attention
and its parts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError, Unsupported

from .machine import BACKENDS, DTYPES, GEOMETRIES, IDS, PAGES, Machine
from .oracle_forward import States
from .pair import Pair, num_columns, split_columns

Parents = Sequence[int] | Sequence[Sequence[int] | None] | None


class ForwardSteps(Machine):
    @initialize(
        page_size=st.sampled_from(sorted(PAGES)),
        geometry=st.sampled_from(sorted(GEOMETRIES)),
        backend=st.sampled_from(sorted(BACKENDS)),
        dtype=st.sampled_from(DTYPES),
        rng=st.randoms(use_true_random=True),
    )
    def build(self, page_size: int, geometry: str, backend: str, dtype: torch.dtype, rng: random.Random) -> None:
        self.specs = GEOMETRIES[geometry]
        self.dtype = dtype
        capacity = PAGES[page_size] * page_size
        self.pair = Pair(
            self.specs,
            capacity=capacity,
            window_capacity=rng.choice([None, capacity * 2 // 3]),
            page_size=page_size,
            dtype=dtype,
            backend=BACKENDS[backend](),
        )
        self.state, self.oracle = self.pair.state, self.pair.oracle
        for seq_id in rng.sample(IDS, 4):
            self.call("add_sequence", seq_id)
            if rng.random() < 0.5:
                self.set_window(rng, seq_id)
        self.whole_forward(rng, *self.batch(rng))

    # -- the bracket -------------------------------------------------------------------------------

    def settle(self, rng: random.Random) -> None:
        """Before an edit: mostly close the forward, for edits inside of one are all refused."""
        if self.oracle.forward is None or rng.random() < 0.2:
            return
        if rng.random() < 0.3:
            self.call("abort_forward")
            return
        for layer in range(len(self.specs)):
            if layer not in self.oracle.forward.written:
                self.attend(rng, layer)
        self.end([])

    def ensure_open(self, rng: random.Random) -> None:
        """Before a verb that belongs into a forward: mostly open one."""
        if self.oracle.forward is None and rng.random() < 0.8:
            self.begin(*self.batch(rng))

    def batch(self, rng: random.Random) -> tuple[list[int], list[int], Parents]:
        """Chains and trees, some of which go on growing; perhaps with a fault."""
        existing = sorted(self.oracle.sequences)
        rng.shuffle(existing)
        ids = existing[: rng.randint(1, 9)]
        counts = [rng.choice([1, 1, 1, 2, 3, 5, 9]) for _ in ids]
        trees: list[list[int] | None] = []
        wanted = rng.choice([0.0, 0.3, 1.0])
        for seq_id, count in zip(ids, counts, strict=True):
            nodes = self.oracle.sequences[seq_id].nodes
            grows = rng.random() < (0.95 if nodes else wanted)
            trees.append(self.tree(rng, nodes, count) if grows else None)
        fault = rng.random()
        if fault < 0.05:
            ids.append(self.any_id(rng))
            counts.append(rng.choice([1, 0, -1]))
            trees.append(None)
        elif fault < 0.08:
            counts.append(1)
        elif fault < 0.12:
            counts = [rng.choice([17, 30]) for _ in ids]
            trees = [None if tree is None else self.tree(rng, 0, n) for tree, n in zip(trees, counts, strict=True)]
        elif fault < 0.15:
            trees = [tree and [*tree[:-1], rng.choice([-2, len(tree) + 20])] for tree in trees]
        elif fault < 0.16:
            trees = trees[:-1]
        if not any(tree is not None for tree in trees):
            return ids, counts, rng.choice([None, list(trees)])
        flat = [parent for tree in trees if tree is not None for parent in tree]
        return ids, counts, flat if None not in trees and rng.random() < 0.5 else trees

    @staticmethod
    def tree(rng: random.Random, nodes: int, count: int) -> list[int]:
        """Parents of ``count`` nodes behind ``nodes`` old ones: chains, bushes, several roots."""
        kind = rng.choice(["chain", "any", "deep"])
        parents: list[int] = []
        for node in range(nodes, nodes + count):
            low = -1 if kind == "any" else max(-1, node - 3)
            parents.append(node - 1 if kind == "chain" else rng.randint(low, node - 1))
        return parents

    def begin(self, ids: list[int], counts: list[int], parents: Parents = None) -> bool:
        if not self.call("begin_forward", ids, counts, parents):
            return False
        # A forward copies rows and gives up pages, and nobody's rows change.
        self.compare_all()
        return True

    def whole_forward(
        self,
        rng: random.Random,
        ids: list[int],
        counts: list[int],
        parents: Parents = None,
        *,
        publish: bool = True,
    ) -> None:
        if not self.begin(ids, counts, parents):
            return
        layers = list(range(len(self.specs)))
        rng.shuffle(layers)
        for layer in layers:
            self.attend(rng, layer)
        if publish:
            self.end([])
        else:
            self.call("abort_forward")
            self.compare_all()

    def end(self, skipped: list[int]) -> None:
        forward = self.oracle.forward
        if self.call("end_forward", skipped=skipped):
            assert forward is not None
            for entry in forward.entries:
                self.pair.adopt(entry.seq_id, entry.old, entry.end)
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def missing(self, rng: random.Random) -> None:
        self.call("missing_pages", *self.batch(rng))

    @rule(rng=st.randoms(use_true_random=True), whole=st.booleans(), publish=st.booleans())
    def forward(self, rng: random.Random, whole: bool, publish: bool) -> None:
        """``begin_forward``, and mostly all of what belongs to it."""
        self.settle(rng)
        if whole:
            self.whole_forward(rng, *self.batch(rng), publish=publish)
        else:
            self.begin(*self.batch(rng))

    @rule(rng=st.randoms(use_true_random=True))
    def verify(self, rng: random.Random) -> None:
        """A tree, perhaps in two forwards, and its commit, and a token behind it."""
        self.settle(rng)
        if self.oracle.forward is not None or not self.oracle.sequences:
            return
        ids = rng.sample(sorted(self.oracle.sequences), min(len(self.oracle.sequences), rng.randint(1, 3)))
        for _ in range(rng.choice([1, 1, 2])):
            counts = [rng.choice([1, 3, 6]) for _ in ids]
            nodes = [self.oracle.sequences[seq_id].nodes for seq_id in ids]
            self.whole_forward(rng, ids, counts, [self.tree(rng, old, n) for old, n in zip(nodes, counts, strict=True)])
        rng.shuffle(ids)
        self.commit_some(rng, ids)
        self.compare_all()
        self.whole_forward(rng, ids, [1] * len(ids))

    @rule(rng=st.randoms(use_true_random=True))
    def slide(self, rng: random.Random) -> None:
        """One sequence goes on for a while."""
        self.settle(rng)
        if self.oracle.sequences:
            seq_id = rng.choice(sorted(self.oracle.sequences))
            for _ in range(3):
                self.whole_forward(rng, [seq_id], [rng.choice([1, 1, 2, 4, 7])])

    @rule(rng=st.randoms(use_true_random=True))
    def positions(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        relative = rng.random() < 0.5
        found = self.compute(
            "get_query_positions",
            lambda: self.oracle.positions(relative),
            lambda: self.state.get_query_positions(relative=relative),
        )
        if found:
            assert found[1].dtype == torch.int32
            assert found[1].tolist() == found[0]

    @rule(rng=st.randoms(use_true_random=True))
    def publish(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        fault = rng.random()
        everything = list(range(len(self.specs)))
        self.end(everything if fault < 0.3 else [1] if fault < 0.4 else [5] if fault < 0.45 else [])

    @rule(rng=st.randoms(use_true_random=True))
    def abort(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        if self.call("abort_forward"):
            self.compare_all()

    # -- attention ---------------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def layer(self, rng: random.Random) -> None:
        """One layer of the open forward, perhaps once more; or a refused call."""
        self.ensure_open(rng)
        if rng.random() < 0.25:
            self.refused_attention(rng, self.a_layer(rng))
        else:
            self.attend(rng, self.a_layer(rng))

    @rule(rng=st.randoms(use_true_random=True))
    def part(self, rng: random.Random) -> None:
        """A verb that reads without storing."""
        self.ensure_open(rng)
        layer, rows = self.a_layer(rng), self.num_rows(rng)
        q, k, v = split_columns(self.specs[layer], self.values(rng, rows, num_columns(self.specs[layer])))
        rng.choice([self.past, self.everything, self.own, self.shared])(rng, layer, q, k, v)

    def tokens(self) -> int:
        return self.oracle.forward.tokens if self.oracle.forward else 3

    def num_rows(self, rng: random.Random) -> int:
        return self.tokens() + rng.choice([0, 0, 0, 1, 5])

    def attend(self, rng: random.Random, layer: int) -> None:
        """A layer at once, or in parts that give the same."""
        spec, rows = self.specs[layer], self.num_rows(rng)
        qkv = self.values(rng, rows, num_columns(spec))
        if self.oracle.forward is not None and rng.random() < 0.08:
            self.poison(rng, qkv)
        if rng.random() < 0.7:
            self.fused(rng, layer, qkv)
            if rng.random() < 0.05:
                self.shared(rng, layer, *split_columns(spec, self.values(rng, rows, num_columns(spec))))
            return
        q, k, v = split_columns(spec, qkv)
        n = self.tokens()
        self.compute(
            "append_kv",
            lambda: self.oracle.append_kv(layer, k[:n], v[:n]),
            lambda: self.state.append_kv(layer, k, v),
        )
        if rng.random() < 0.5:
            self.everything(rng, layer, q, k, v)
            return
        own, past = self.own(rng, layer, q, k, v), self.past(rng, layer, q, k, v)
        if own and past:
            self.oracle.cross_attention(layer, q[:n], "all").check(*self.state.merge(*own, *past))

    def fused(self, rng: random.Random, layer: int, qkv: Tensor) -> None:
        spec, scale, mask = self.specs[layer], rng.choice([None, None, None, 0.5]), None
        if rng.random() < 0.15 and self.oracle.forward is not None:
            mask = self.mask(rng, "all")
        given = qkv
        if spec.head_dim == spec.value_dim and rng.random() < 0.5:
            given = qkv.view(len(qkv), -1, spec.head_dim)
        out = torch.full((len(qkv), spec.num_heads, spec.value_dim), 7.0, dtype=self.dtype)
        given_out = out if rng.random() < 0.3 else None
        found = self.compute(
            "attention_with_fused_qkv",
            lambda: self.oracle.attention_with_fused_qkv(
                layer, *split_columns(spec, qkv[: self.tokens()]), scale=scale, mask=mask
            ),
            lambda: self.state.attention_with_fused_qkv(layer, given, sm_scale=scale, mask=mask, out=given_out),
        )
        if found:
            expected, got = found
            expected.check(got)
            assert got is given_out or given_out is None
            assert (got[self.tokens() :] == (0.0 if given_out is None else 7.0)).all()

    def mask(self, rng: random.Random, scope: Any) -> Tensor:
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        return torch.rand(self.oracle.mask_size(scope), generator=generator) < rng.choice([0.1, 0.5, 1.1])

    def poison(self, rng: random.Random, qkv: Tensor) -> None:
        """NaN or infinity in some entry; its neighbours must not see it."""
        entry = rng.choice(self.oracle.open_forward().entries)
        row = rng.randrange(entry.start, entry.start + entry.count)
        qkv[row] = rng.choice([float("nan"), float("inf"), float("-inf")])

    def check_state(self, found: tuple[States, Any] | None, out: Any) -> tuple[Tensor, Tensor] | None:
        """An attention state against the oracle, padding included."""
        if found is None:
            return None
        expected, got = found
        expected.check(*got)
        assert out is None or (got[0] is out[0] and got[1] is out[1])
        n = len(expected.out)
        assert (got[0][n:] == (0.0 if out is None else 7.0)).all()
        assert (got[1][n:] == (float("-inf") if out is None else 7.0)).all()
        return got[0], got[1]

    def out_of(self, rng: random.Random, q: Tensor, value_dim: int) -> tuple[Tensor, Tensor] | None:
        if rng.random() < 0.8:
            return None
        return q.new_full((*q.shape[:2], value_dim), 7.0), torch.full(q.shape[:2], 7.0)

    def past(self, rng: random.Random, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        out = self.out_of(rng, q, v.shape[-1])
        found = self.compute(
            "cross_attention",
            lambda: self.oracle.cross_attention(layer, q[: self.tokens()]),
            lambda: self.state.cross_attention(layer, q, out=out),
        )
        return self.check_state(found, out)

    def everything(self, rng: random.Random, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        out, scale = self.out_of(rng, q, v.shape[-1]), rng.choice([None, 0.3])
        found = self.compute(
            "cross_attention",
            lambda: self.oracle.cross_attention(layer, q[: self.tokens()], "all", scale),
            lambda: self.state.cross_attention(layer, q, scope="all", sm_scale=scale, out=out),
        )
        self.check_state(found, out)

    def own(self, rng: random.Random, layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        out, mask, n = self.out_of(rng, q, v.shape[-1]), None, self.tokens()
        if rng.random() < 0.1 and self.oracle.forward is not None:
            # (The caller merges this with the past, which is all that there is if the mask hides
            # nothing.)
            mask = self.oracle_order()
        found = self.compute(
            "self_attention",
            lambda: self.oracle.self_attention(layer, q[:n], k[:n], v[:n], mask=mask),
            lambda: self.state.self_attention(layer, q, k, v, mask=mask, out=out),
        )
        return self.check_state(found, out)

    def oracle_order(self) -> Tensor:
        """A mask that says what order and tree say anyway."""
        values = [
            entry.precedes(key, query)
            for entry in self.oracle.open_forward().entries
            for query in range(entry.old, entry.end)
            for key in range(entry.old, entry.end)
        ]
        return torch.tensor(values)

    def shared(self, rng: random.Random, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        given, n = rng.random() < 0.5, self.tokens()
        found = self.compute(
            "attention_with_shared_kv",
            lambda: self.oracle.attention_with_shared_kv(layer, q[:n], *((k[:n], v[:n]) if given else ())),
            lambda: self.state.attention_with_shared_kv(layer, q, *((k, v) if given else ())),
        )
        if found:
            found[0].check(found[1])
            assert (found[1][n:] == 0.0).all()

    def refused_attention(self, rng: random.Random, layer: int) -> None:
        """A call with something wrong; the first class in the order of the contract, forward or
        not.
        """
        spec, tokens, rows = self.specs[layer], self.tokens(), self.num_rows(rng)
        qkv = self.values(rng, rows, num_columns(spec))
        q, k, v = split_columns(spec, qkv)
        out = torch.zeros(rows, spec.num_heads, spec.value_dim, dtype=self.dtype)
        fused, past, own = "attention_with_fused_qkv", "cross_attention", "self_attention"
        wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            (fused, (layer, qkv[:, :-1]), {}),
            (fused, (layer, qkv.to(torch.float64)), {}),
            (fused, (layer, qkv), {"out": out[:, :, :-1]}),
            (fused, (layer, qkv), {"out": out.to(torch.float64)}),
            (fused, (layer, qkv), {"out": qkv.view(-1)[: out.numel()].view(out.shape)}),
            (fused, (len(self.specs), qkv), {}),
            (fused, (-1, qkv), {}),
            (fused, (layer, qkv), {"mask": torch.ones(3)}),
            (past, (layer, q[:, :, :-1]), {}),
            (past, (layer, q), {"scope": "future"}),
            (past, (layer, q), {"out": (out, out)}),
            (own, (layer, q, k[:, :, :-1], v), {}),
            (own, (layer, q, k, v[:-1]), {}),
            ("append_kv", (layer, k, v[:, :, :-1]), {}),
            ("append_kv", (-1, k, v), {}),
            ("attention_with_shared_kv", (layer, q, k), {}),
            ("attention_with_shared_kv", (layer, q[..., :-1]), {}),
        ]
        if self.oracle.forward is not None:
            wrong.append((fused, (layer, qkv[: tokens - 1]), {}))
            wrong.append((fused, (layer, qkv), {"mask": self.mask(rng, "all")[:-1]}))
            wrong.append((own, (layer, q, k, v), {"mask": torch.cat([self.mask(rng, "new")] * 2)}))
        verb, args, more = rng.choice(wrong)
        kind: type[QuireError] = InvalidArgument
        if rng.random() < 0.25:
            verb, args, more = rng.choice(
                [
                    ("append_mla_kv", (layer, k), {}),
                    ("checkpoint", (0,), {}),
                    ("linear_attention", (layer, q, k, v), {}),
                ]
            )
            kind = Unsupported
        self.fail(verb, kind, lambda: getattr(self.state, verb)(*args, **more))
