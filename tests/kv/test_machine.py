"""All verbs of the KV state in random order against the oracle, refusals included.

A step makes one call on ``PagedKVState`` and on the oracle. If the oracle refuses, the state must refuse with the
same class and without a trace; otherwise results agree: stored rows to the bit, attention within a derived bound,
lengths and page counts exactly. ``check()`` runs after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from quire.contracts.attention import AttentionBackend
from quire.contracts.layers import FullAttention, RopeSpec
from quire.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.kernels.sdpa import SdpaAttention
from quire.kv.exchange import checksum
from quire.kv.paged import PagedKVState
from quire.ops.attention import ReferenceAttention

from .oracle import Oracle, rotation_bound
from .pair import same_bits, snapshot

IDS = (-(2**63), -9, -1, 0, 1, 2, 3, 4, 7, 40, 2**40, 2**63 - 1)
BAD_IDS = (2**63, -(2**63) - 1)
PAGES = {1: 48, 2: 28, 5: 16, 16: 11}
"""Size of the pool by page size: small, so that it runs out."""

HALVES = RopeSpec(theta=10000.0, rotary_dim=8)
PARTIAL = RopeSpec(theta=500.0, rotary_dim=4, interleaved=True)
GQA = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, rope=HALVES, rope_mode="normal")
GEOMETRIES: dict[str, list[FullAttention]] = {
    "gqa": [GQA, GQA],
    "raw": [FullAttention(num_heads=2, num_kv_heads=2, head_dim=3, value_dim=3)] * 2,
    "mixed": [
        FullAttention(num_heads=4, num_kv_heads=1, head_dim=6, value_dim=5, rope=PARTIAL, rope_mode="normal"),
        FullAttention(num_heads=2, num_kv_heads=2, head_dim=4, value_dim=4, rope=PARTIAL, rope_mode="none"),
    ],
}
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": SdpaAttention, "reference": ReferenceAttention}
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


class KVMachine(RuleBasedStateMachine):
    operations: ClassVar[int] = 0
    """Calls made by all runs."""
    refusals: ClassVar[dict[type[QuireError], int]] = {}

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
        make = BACKENDS[backend]
        self.state = PagedKVState(self.specs, capacity=capacity, page_size=page_size, backend=make(), dtype=dtype)
        self.oracle = Oracle(self.specs, capacity, page_size, dtype)
        # Where exports go and imports come from: another page size, and room for everything.
        self.other_page_size = 3 if page_size != 2 else 7
        self.exports: list[tuple[dict[str, Any], list[dict[str, Tensor]]]] = []
        self.sources: dict[int, tuple[dict[str, Any], list[dict[str, Tensor]]]] = {}
        """Where each import comes from."""
        for seq_id in rng.sample(IDS, 4):
            self.state.add_sequence(seq_id)
            self.oracle.add_sequence(seq_id)
        self.forward(rng, whole=True, publish=True)

    # -- helpers -------------------------------------------------------------------------------------------------

    def settle(self, rng: random.Random) -> None:
        """Before an edit: mostly close the forward, for edits inside of one are all refused."""
        if self.oracle.forward is None or rng.random() < 0.2:
            return
        if rng.random() < 0.3:
            self.call(self.oracle.abort_forward, self.state.abort_forward)
            return
        for layer in range(len(self.specs)):
            if layer not in self.oracle.forward.written:
                self.run_layer(rng, layer)
        self.end([])

    def ensure_open(self, rng: random.Random) -> None:
        """Before a verb that belongs into a forward: mostly open one."""
        if self.oracle.forward is None and rng.random() < 0.8:
            self.begin(*self.batch(rng))

    def call(self, expect: Callable[[], Any], act: Callable[[], Any]) -> tuple[bool, Any, Any]:
        """The same call on both: (went through, what the oracle returned, what the state returned)."""
        KVMachine.operations += 1
        try:
            expected = expect()
        except QuireError as refusal:
            kind = type(refusal)
            KVMachine.refusals[kind] = KVMachine.refusals.get(kind, 0) + 1
            before = snapshot(self.state)
            with pytest.raises(kind) as raised:
                act()
            assert type(raised.value) is kind
            assert str(raised.value)
            assert snapshot(self.state) == before
            return False, None, None
        got = act()
        self.state.check()
        return True, expected, got

    def any_id(self, rng: random.Random) -> int:
        """Mostly an id that exists."""
        if self.oracle.sequences and rng.random() < 0.9:
            return rng.choice(sorted(self.oracle.sequences))
        return rng.choice(IDS + BAD_IDS)

    def new_id(self, rng: random.Random) -> int:
        """Mostly an id that is new."""
        unused = [seq_id for seq_id in IDS if seq_id not in self.oracle.sequences]
        return rng.choice(unused) if unused and rng.random() < 0.9 else rng.choice(IDS + BAD_IDS)

    def compare(self, seq_id: int) -> None:
        """Stored rows, to the bit."""
        if self.oracle._importing(seq_id):
            return
        for layer in range(len(self.specs)):
            k, v = self.oracle.stored(seq_id, layer)
            got_k, got_v = self.state.debug_get_kv(seq_id, layer=layer)
            if self.oracle.forward is not None:
                assert len(got_k) == len(k)
            assert same_bits(got_k, k), f"K of sequence {seq_id}, layer {layer}"
            assert same_bits(got_v, v), f"V of sequence {seq_id}, layer {layer}"

    def compare_all(self) -> None:
        for seq_id in self.oracle.sequences:
            self.compare(seq_id)

    def values(self, rng: random.Random, *shape: int) -> Tensor:
        """Numbers of many sizes."""
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        return (torch.randn(shape, generator=generator) * rng.choice([0.25, 1.0, 4.0])).to(self.dtype)

    # -- sequences -------------------------------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def add(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id = self.new_id(rng)
        self.call(lambda: self.oracle.add_sequence(seq_id), lambda: self.state.add_sequence(seq_id))

    @rule(rng=st.randoms(use_true_random=True))
    def remove(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id = self.any_id(rng)
        # Mostly when it is getting full, else nothing ever grows.
        if len(self.oracle.sequences) < 5 and rng.random() < 0.6:
            return
        done, _, _ = self.call(lambda: self.oracle.remove_sequence(seq_id), lambda: self.state.remove_sequence(seq_id))
        if done:
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def fork(self, rng: random.Random) -> None:
        self.settle(rng)
        parent, child = self.any_id(rng), self.new_id(rng)
        length = self.oracle.sequences[parent].length if parent in self.oracle.sequences else 3
        pos = rng.choice([-1, length, 0, rng.randint(-2, length + 1), rng.randint(0, length)])
        done, expected, got = self.call(
            lambda: self.oracle.fork_sequence(parent, child, pos), lambda: self.state.fork_sequence(parent, child, pos)
        )
        if done:
            assert got == expected
            self.compare(child)

    @rule(rng=st.randoms(use_true_random=True))
    def branch(self, rng: random.Random) -> None:
        """A fork of something long, and one token or two for parent, child and some others: pages split."""
        self.settle(rng)
        usable = [seq_id for seq_id in self.oracle.sequences if not self.oracle._importing(seq_id)]
        unused = [seq_id for seq_id in IDS if seq_id not in self.oracle.sequences]
        if self.oracle.forward is not None or not usable or not unused:
            return
        parent, child = (
            max(usable, key=lambda seq_id: (self.oracle.sequences[seq_id].length, seq_id)),
            rng.choice(unused),
        )
        pos = rng.choice([-1, rng.randint(0, self.oracle.sequences[parent].length)])
        self.call(
            lambda: self.oracle.fork_sequence(parent, child, pos), lambda: self.state.fork_sequence(parent, child, pos)
        )
        self.compare(child)
        for ids in rng.choice([[[parent, child]], [[child], [parent]], [[parent]], [[child]], [[*usable[:7], child]]]):
            ids = list(dict.fromkeys(ids))
            rng.shuffle(ids)
            self.whole_forward(rng, ids, [rng.choice([1, 1, 2]) for _ in ids])

    def whole_forward(self, rng: random.Random, ids: list[int], counts: list[int], *, publish: bool = True) -> None:
        if not self.begin(ids, counts):
            return
        layers = list(range(len(self.specs)))
        rng.shuffle(layers)
        for layer in layers:
            self.run_layer(rng, layer)
        if publish:
            self.end([])
        else:
            self.call(self.oracle.abort_forward, self.state.abort_forward)
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def pop(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id = self.any_id(rng)
        length = self.oracle.sequences[seq_id].length if seq_id in self.oracle.sequences else 3
        count = rng.choice([1, 0, length, rng.randint(0, length), rng.randint(-1, length + 1)])
        done, expected, got = self.call(lambda: self.oracle.popn(seq_id, count), lambda: self.state.popn(seq_id, count))
        if done:
            assert got == expected
            self.compare_all()

    @rule(rng=st.randoms(use_true_random=True))
    def clear(self, rng: random.Random) -> None:
        if rng.random() < 0.93:
            return
        self.call(self.oracle.clear, self.state.clear)
        assert self.state.empty()

    # -- forward -----------------------------------------------------------------------------------------------------

    def batch(self, rng: random.Random) -> tuple[list[int], list[int]]:
        existing = sorted(self.oracle.sequences)
        rng.shuffle(existing)
        ids = existing[: rng.randint(1, 9)]
        counts = [rng.choice([1, 1, 1, 2, 3, 5, 9]) for _ in ids]
        fault = rng.random()
        if fault < 0.06:
            ids.append(self.any_id(rng))
            counts.append(rng.choice([1, 0, -1]))
        elif fault < 0.09:
            counts.append(1)
        elif fault < 0.12:
            counts = [rng.choice([17, 30]) for _ in ids]
        return ids, counts

    @rule(rng=st.randoms(use_true_random=True))
    def missing(self, rng: random.Random) -> None:
        ids, counts = self.batch(rng)
        done, expected, got = self.call(
            lambda: self.oracle.missing_pages(ids, counts), lambda: self.state.missing_pages(ids, counts)
        )
        if done:
            assert got == expected

    @rule(rng=st.randoms(use_true_random=True), whole=st.booleans(), publish=st.booleans())
    def forward(self, rng: random.Random, whole: bool, publish: bool) -> None:
        """``begin_forward``, and mostly all of what belongs to it."""
        self.settle(rng)
        ids, counts = self.batch(rng)
        if whole:
            self.whole_forward(rng, ids, counts, publish=publish)
            return
        tree = rng.random() < 0.1 and all(count > 0 for count in counts)
        self.begin(ids, counts, [[-1] * count for count in counts] if tree else None)

    def begin(self, ids: list[int], counts: list[int], parents: list[list[int]] | None = None) -> bool:
        done, _, _ = self.call(
            lambda: self.oracle.begin_forward(ids, counts, parents),
            lambda: self.state.begin_forward(ids, counts, parents),
        )
        if done:
            assert self.state.missing_pages(ids, counts) == 0
            # A forward copies rows, and nobody's rows change.
            self.compare_all()
        return done

    @rule(rng=st.randoms(use_true_random=True))
    def positions(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        relative = rng.random() < 0.5
        done, expected, got = self.call(
            self.oracle.positions, lambda: self.state.get_query_positions(relative=relative)
        )
        if done:
            assert got.dtype == torch.int32
            assert got.tolist() == expected

    @rule(rng=st.randoms(use_true_random=True), layer=st.integers(0, 1))
    def layer(self, rng: random.Random, layer: int) -> None:
        """One layer of the open forward, perhaps once more; or a refused call."""
        self.ensure_open(rng)
        self.run_layer(rng, layer, faults=True)

    def run_layer(self, rng: random.Random, layer: int, *, faults: bool = False) -> None:
        spec, forward = self.specs[layer], self.oracle.forward
        columns = (spec.num_heads + spec.num_kv_heads) * spec.head_dim + spec.num_kv_heads * spec.value_dim
        tokens = sum(forward.counts) if forward else 3
        rows = tokens + rng.choice([0, 0, 0, 1, 5])
        qkv = self.values(rng, rows, columns)
        if forward is not None and rng.random() < 0.08:
            self.poison(rng, qkv)
        scale = rng.choice([None, None, None, 0.5])
        if faults and rng.random() < 0.3:
            self.refused_attention(rng, layer, qkv, tokens)
            return
        given = qkv
        if spec.head_dim == spec.value_dim and rng.random() < 0.5:
            given = qkv.view(rows, -1, spec.head_dim)
        out = None
        if rng.random() < 0.3:
            out = torch.full((rows, spec.num_heads, spec.value_dim), 7.0, dtype=self.dtype)
        q_THD, k_THD, v_THD = self.parts(layer, qkv[:tokens])

        def expect() -> tuple[Tensor, Tensor]:
            if self.oracle.forward is None:
                self.oracle.positions()
            return self.oracle.attend(layer, q_THD, k_THD, v_THD, scale)

        done, expected, got = self.call(
            expect, lambda: self.state.attention_with_fused_qkv(layer, given, sm_scale=scale, out=out)
        )
        if not done:
            return
        exact, bound = expected
        assert got is out or out is None
        assert (got[tokens:] == (0.0 if out is None else 7.0)).all()
        error = (got[:tokens].double() - exact).abs().amax((1, 2))
        assert ((error <= bound) | bound.isinf()).all(), f"error {error.tolist()}, bound {bound.tolist()}"

    def parts(self, layer: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.specs[layer]
        q = spec.num_heads * spec.head_dim
        k = spec.num_kv_heads * spec.head_dim
        return (
            qkv[:, :q].view(-1, spec.num_heads, spec.head_dim),
            qkv[:, q : q + k].view(-1, spec.num_kv_heads, spec.head_dim),
            qkv[:, q + k :].view(-1, spec.num_kv_heads, spec.value_dim),
        )

    def poison(self, rng: random.Random, qkv: Tensor) -> None:
        """NaN or infinity in some entry; its neighbours must not see it."""
        assert self.oracle.forward is not None
        counts = self.oracle.forward.counts
        entry = rng.randrange(len(counts))
        start = sum(counts[:entry])
        row = rng.randrange(start, start + counts[entry])
        qkv[row] = rng.choice([float("nan"), float("inf"), float("-inf")])

    def refused_attention(self, rng: random.Random, layer: int, qkv: Tensor, tokens: int) -> None:
        """A call with something wrong; the first class in the order of the contract, forward or not."""
        spec = self.specs[layer]
        mask = torch.ones(tokens * tokens, dtype=torch.bool)
        out = torch.zeros(len(qkv), spec.num_heads, spec.value_dim, dtype=self.dtype)
        wrong: list[tuple[type[QuireError], tuple[Any, ...], dict[str, Any]]] = [
            (InvalidArgument, (layer, qkv[:, :-1]), {}),
            (InvalidArgument, (layer, qkv.to(torch.float64)), {}),
            (InvalidArgument, (layer, qkv), {"out": out[:, :, :-1]}),
            (InvalidArgument, (layer, qkv), {"out": out.to(torch.float64)}),
            (InvalidArgument, (layer, qkv), {"out": qkv.view(-1)[: out.numel()].view(out.shape)}),
            (InvalidArgument, (len(self.specs), qkv), {}),
            (InvalidArgument, (-1, qkv), {}),
            (Unsupported, (layer, qkv), {"mask": mask}),
        ]
        if self.oracle.forward is not None:
            wrong.append((InvalidArgument, (layer, qkv[: tokens - 1]), {"mask": mask}))
        kind, args, more = rng.choice(wrong)

        def expect() -> None:
            raise kind("the test refuses")

        self.call(expect, lambda: self.state.attention_with_fused_qkv(*args, **more))

    @rule(rng=st.randoms(use_true_random=True))
    def publish(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        fault = rng.random()
        skipped = [0, 1] if fault < 0.3 else [1] if fault < 0.4 else [5] if fault < 0.45 else []
        self.end(skipped)

    def end(self, skipped: list[int]) -> None:
        forward = self.oracle.forward
        done, _, _ = self.call(
            lambda: self.oracle.end_forward(skipped), lambda: self.state.end_forward(skipped=iter(skipped))
        )
        if not done:
            return
        assert forward is not None
        for seq_id, count in zip(forward.ids, forward.counts, strict=True):
            self.adopt_rotated(seq_id, count)
        self.compare_all()

    def adopt_rotated(self, seq_id: int, count: int) -> None:
        """New keys of layers with RoPE: right up to rounding, and to the bit from here on."""
        length = self.oracle.sequences[seq_id].length
        for layer, spec in enumerate(self.specs):
            if spec.rope is None or spec.rope_mode != "normal":
                continue
            k, v = self.state.debug_get_kv(seq_id, length - count, length, layer=layer)
            exact = self.oracle.stored(seq_id, layer)[0][length - count :]
            for row in range(count):
                if exact[row].isfinite().all():
                    # The oracle's own row was rounded once as well.
                    assert (k[row].double() - exact[row].double()).abs().max() <= rotation_bound(exact[row], self.dtype)
            assert k.isfinite().all() or not exact.isfinite().all()
            self.oracle.adopt(seq_id, layer, length - count, k, v)

    @rule(rng=st.randoms(use_true_random=True))
    def abort(self, rng: random.Random) -> None:
        self.ensure_open(rng)
        done, _, _ = self.call(self.oracle.abort_forward, self.state.abort_forward)
        if done:
            self.compare_all()

    # -- rows ------------------------------------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def debug_get(self, rng: random.Random) -> None:
        seq_id = self.any_id(rng)
        length = self.oracle.sequences[seq_id].length if seq_id in self.oracle.sequences else 3
        start = rng.choice([0, rng.randint(0, length), rng.randint(-1, length + 1)])
        end = rng.choice([None, length, rng.randint(min(start, length), length), rng.randint(-1, length + 1)])
        layer = rng.choice([0, 1, 0, 1, 0, 1, 0, 1, 2])
        done, _, got = self.call(
            lambda: self.oracle.debug_get_faults(seq_id, start, end, layer),
            lambda: self.state.debug_get_kv(seq_id, start, end, layer=layer, relative=rng.random() < 0.5),
        )
        if done:
            k, v = (x[start : length if end is None else end] for x in self.oracle.stored(seq_id, layer))
            assert same_bits(got[0], k)
            assert same_bits(got[1], v)

    @rule(rng=st.randoms(use_true_random=True))
    def debug_set(self, rng: random.Random) -> None:
        self.settle(rng)
        seq_id, layer = self.any_id(rng), rng.choice([0, 1, 0, 1, 0, 1, 2])
        length = self.oracle.sequences[seq_id].length if seq_id in self.oracle.sequences else 3
        start = rng.choice([rng.randint(0, length), rng.randint(-1, length + 1)])
        count = rng.choice([0, 1, max(0, length - start), rng.randint(0, length + 1)])
        spec = self.specs[min(layer, 1)]
        k = self.values(rng, count, spec.num_kv_heads, spec.head_dim)
        v = self.values(rng, count, spec.num_kv_heads, spec.value_dim)
        done, _, _ = self.call(
            lambda: self.oracle.debug_set_kv(seq_id, start, k, v, layer),
            lambda: self.state.debug_set_kv(seq_id, start, k, v, layer=layer),
        )
        if done:
            self.compare_all()

    # -- export and import -----------------------------------------------------------------------------------------

    @rule(rng=st.randoms(use_true_random=True))
    def export(self, rng: random.Random) -> None:
        """Out of the state, into another with another page size, and out of that again."""
        seq_id = self.any_id(rng)
        done, _, metadata = self.call(
            lambda: self.oracle.export_faults(seq_id), lambda: self.state.get_checkpoint_metadata(seq_id)
        )
        if not done:
            return
        groups = [self.state.export_page_group(seq_id, layer) for layer in range(len(self.specs))]
        other = PagedKVState(
            self.specs,
            capacity=1 + metadata["length"],
            page_size=self.other_page_size,
            backend=SdpaAttention(),
            dtype=self.dtype,
        )
        other.prepare_import(5, metadata)
        for layer in reversed(range(len(self.specs))):
            other.import_page_group(5, layer, groups[layer])
        other.finish_import(5)
        other.check()
        for layer in range(len(self.specs)):
            got = other.debug_get_kv(5, layer=layer)
            for given, expected in zip(got, self.oracle.stored(seq_id, layer), strict=True):
                assert same_bits(given, expected)
        assert other.get_checkpoint_metadata(5) == metadata
        assert other.get_layout_hash() == self.state.get_layout_hash() == metadata["layout_hash"]
        self.exports = [*self.exports[-3:], (metadata, groups)]

    @rule(rng=st.randoms(use_true_random=True))
    def start_import(self, rng: random.Random) -> None:
        self.settle(rng)
        if not self.exports:
            self.export(rng)
        if not self.exports:
            return
        metadata, groups = rng.choice(self.exports)
        seq_id = self.new_id(rng)
        done, _, _ = self.call(
            lambda: self.oracle.prepare_import(seq_id, metadata["length"]),
            lambda: self.state.prepare_import(seq_id, metadata),
        )
        if done:
            self.sources[seq_id] = (metadata, groups)
            for _ in range(rng.choice([0, 1, 2, 4])):
                self.go_on_importing(rng, seq_id)
            if rng.random() < 0.5:
                self.finish(seq_id)

    @rule(rng=st.randoms(use_true_random=True))
    def import_group(self, rng: random.Random) -> None:
        self.settle(rng)
        importing = [seq_id for seq_id in self.oracle.sequences if self.oracle._importing(seq_id)]
        if self.exports and (importing or rng.random() < 0.1):
            self.go_on_importing(rng, rng.choice(importing) if importing else self.any_id(rng))
        else:
            self.branch(rng)

    def go_on_importing(self, rng: random.Random, seq_id: int) -> None:
        """A group that is still missing, or one too many, or another one's, or damaged."""
        _, groups = self.sources.get(seq_id, rng.choice(self.exports))
        if rng.random() < 0.1:
            groups = rng.choice(self.exports)[1]
        done = self.oracle.sequences[seq_id].imported if seq_id in self.oracle.sequences else set()
        missing = [layer for layer in range(len(self.specs)) if layer not in done]
        layer = rng.choice(missing) if missing and rng.random() < 0.9 else rng.randrange(len(self.specs))
        group = dict(groups[layer])
        if rng.random() < 0.2 and group["k"].numel():
            group["k"] = group["k"].clone()
            group["k"].view(torch.uint8).view(-1)[0] ^= 1
        self.import_layer(seq_id, layer, group)

    def import_layer(self, seq_id: int, layer: int, group: dict[str, Tensor]) -> None:
        def intact() -> bool:
            if not self.oracle._importing(seq_id):
                return True
            promised = self.sources[seq_id][0]["groups"][layer]["tensors"]
            return all(checksum(group[name]) == promised[name]["checksum"] for name in ("k", "v"))

        self.call(
            lambda: self.oracle.import_group(seq_id, layer, group["k"], group["v"], intact),
            lambda: self.state.import_page_group(seq_id, layer, group),
        )

    @rule(rng=st.randoms(use_true_random=True))
    def finish_import(self, rng: random.Random) -> None:
        self.settle(rng)
        importing = [seq_id for seq_id in self.oracle.sequences if self.oracle._importing(seq_id)]
        if importing or rng.random() < 0.1:
            self.finish(rng.choice(importing) if importing and rng.random() < 0.9 else self.any_id(rng))
        else:
            self.branch(rng)

    def finish(self, seq_id: int) -> None:
        done, _, _ = self.call(lambda: self.oracle.finish_import(seq_id), lambda: self.state.finish_import(seq_id))
        if done:
            self.compare_all()

    # -- always ------------------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "state"):
            return
        state, oracle = self.state, self.oracle
        state.check()
        assert sorted(state.table.ids) == sorted(oracle.sequences)
        assert state.num_available_pages() == oracle.pages.free
        assert state.total_sequence_length() == sum(sequence.length for sequence in oracle.sequences.values())
        assert state.empty() == (not oracle.sequences)
        for seq_id, sequence in oracle.sequences.items():
            assert state.sequence_length(seq_id) == state.cached_length(seq_id) == sequence.length
            assert state.pending_nodes(seq_id) == 0
            assert state.reachable(seq_id) == [range(sequence.length + 1)]
            shared = sum(oracle.pages.holders[page] > 1 for page in sequence.pages)
            assert state.sequence_pages(seq_id) == (len(sequence.pages), shared)

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        if self.oracle.forward is not None:
            self.oracle.abort_forward()
            self.state.abort_forward()
        self.compare_all()
        for seq_id in list(self.oracle.sequences):
            self.oracle.remove_sequence(seq_id)
            self.state.remove_sequence(seq_id)
            self.state.check()
            self.compare_all()
        assert self.state.empty()
        assert self.state.num_available_pages() == self.oracle.pages.total


REFUSED_IN_EVERY_RUN = {InvalidArgument, NotFound, Unsupported, FailedPrecondition, ResourceExhausted}


def run_machine(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        KVMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_short() -> None:
    KVMachine.operations, KVMachine.refusals = 0, {}
    run_machine(90, 50, derandomize=True)
    assert KVMachine.operations >= 4000
    assert set(KVMachine.refusals) >= REFUSED_IN_EVERY_RUN


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long() -> None:
    KVMachine.operations, KVMachine.refusals = 0, {}
    run_machine(60, 60, derandomize=True)
    while KVMachine.operations < 20_000:
        run_machine(100, 100, derandomize=False)
    assert KVMachine.operations >= 20_000
    assert set(KVMachine.refusals) >= REFUSED_IN_EVERY_RUN | {DataLoss}
