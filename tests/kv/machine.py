"""What the random machine is built of: geometries, ids, and a call that goes to the state and to
the oracle.

A step makes one call on ``State`` and on the oracle. If the oracle refuses, the state must refuse
with the same class and without a trace; otherwise results agree: stored rows to the bit, attention
within a derived bound, lengths, pages, nodes and reachable positions exactly. ``check()`` runs
after every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant
from torch import Tensor

from quire.base.errors import QuireError
from quire.contracts.attention import AttentionBackend
from quire.contracts.layers import FullAttention, RopeSpec, WindowedAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.contract import ContractState
from quire.ops.attention import ReferenceAttention

from .oracle import Oracle
from .oracle_refusals import ORDER, raise_first
from .oracle_values import Spec
from .pair import Pair, refused

IDS = (-(2**63), -9, -1, 0, 1, 2, 3, 4, 7, 40, 2**40, 2**63 - 1)
BAD_IDS = (2**63, -(2**63) - 1)
PAGES = {1: 48, 2: 28, 5: 16, 16: 11}
"""Size of the pool by page size: small, so that it runs out."""

HALVES = RopeSpec(theta=10000.0, rotary_dim=8)
PARTIAL = RopeSpec(theta=500.0, rotary_dim=4, interleaved=True)
SHORT = RopeSpec(theta=10.0, rotary_dim=4)
GQA = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, rope=HALVES, rope_mode="normal")
INLINE = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, rope=PARTIAL, rope_mode="inline")
CAPPED = FullAttention(
    num_heads=4, num_kv_heads=2, head_dim=8, value_dim=8, rope=HALVES, rope_mode="normal", softcap=3.0
)


def windowed(window: int, **more: Any) -> WindowedAttention:
    return WindowedAttention(
        **{"num_heads": 2, "num_kv_heads": 1, "head_dim": 6, "value_dim": 6, "window": window, **more}
    )


GEOMETRIES: dict[str, list[Spec]] = {
    "gqa": [GQA, GQA],
    "raw": [FullAttention(num_heads=2, num_kv_heads=2, head_dim=3, value_dim=3)] * 2,
    "mixed": [
        FullAttention(num_heads=4, num_kv_heads=1, head_dim=6, value_dim=5, rope=PARTIAL, rope_mode="normal"),
        FullAttention(num_heads=2, num_kv_heads=2, head_dim=4, value_dim=4, rope=SHORT, rope_mode="none"),
    ],
    "inline": [INLINE, CAPPED],
    "windows": [
        windowed(3, rope=SHORT, rope_mode="normal"),
        windowed(7, rope=SHORT, rope_mode="inline", sinks=(0.5, -1.0)),
    ],
    "alternating": [
        windowed(4, rope=PARTIAL, rope_mode="normal", softcap=2.0),
        FullAttention(num_heads=2, num_kv_heads=1, head_dim=6, value_dim=6, rope=SHORT, rope_mode="normal"),
        windowed(4, value_dim=5),
    ],
}
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": SdpaAttention, "reference": ReferenceAttention}
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Machine(RuleBasedStateMachine):
    operations: ClassVar[int] = 0
    """Calls made by all runs."""
    refusals: ClassVar[dict[tuple[str, type[QuireError]], int]] = {}
    """By verb and class."""
    verbs: ClassVar[dict[str, int]] = {}
    """Calls that went through."""

    specs: list[Spec]
    dtype: torch.dtype
    pair: Pair
    state: ContractState
    oracle: Oracle

    # -- calls -------------------------------------------------------------------------------------

    def call(self, verb: str, *args: Any, **more: Any) -> bool:
        """The same call on both; whether it went through."""
        Machine.operations += 1
        try:
            self.pair.both(verb, *args, **more)
        except ORDER as refusal:
            self.count_refusal(verb, type(refusal))
            return False
        Machine.verbs[verb] = Machine.verbs.get(verb, 0) + 1
        self.state.check()
        return True

    def compute(self, verb: str, expect: Callable[[], Any], act: Callable[[], Any]) -> tuple[Any, Any] | None:
        """A call that returns tensors: what the oracle returned, and the state; None if both
        refused.
        """
        Machine.operations += 1
        try:
            expected = expect()
        except ORDER as refusal:
            self.count_refusal(verb, type(refusal))
            refused(self.pair, type(refusal), act)
            return None
        Machine.verbs[verb] = Machine.verbs.get(verb, 0) + 1
        try:
            got = act()
        except QuireError as error:
            raise AssertionError(f"{verb} was refused: {error}") from error
        self.state.check()
        return expected, got

    def fail(self, verb: str, kind: type[QuireError], act: Callable[[], Any]) -> None:
        """A call that the test knows to be wrong."""
        self.compute(verb, lambda: raise_first([kind]), act)

    @staticmethod
    def count_refusal(verb: str, kind: type[QuireError]) -> None:
        Machine.refusals[verb, kind] = Machine.refusals.get((verb, kind), 0) + 1

    # -- edits that many steps make ----------------------------------------------------------------

    def set_window(self, rng: random.Random, seq_id: int) -> bool:
        size = rng.choice([1, 2, 3, 4, 5, 6, 8, 11, 14])
        sink = rng.choice([0, 0, rng.randrange(size), rng.randrange(size)])
        eviction = rng.choice(["token", "token", "forward"])
        fault = rng.random()
        if fault < 0.05:
            size, sink = rng.choice([(0, 0), (-1, 0), (3, 3), (4, -1)])
        elif fault < 0.07:
            eviction = "never"
        elif fault < 0.15:
            return self.call("enable_sliding_window_for_seq", seq_id, None)
        return self.call("enable_sliding_window_for_seq", seq_id, size, sink, eviction=eviction)

    def commit_some(self, rng: random.Random, ids: list[int]) -> bool:
        """Any node of each, or none; perhaps one that is not there."""
        leaves = []
        for seq_id in ids:
            nodes = self.oracle.sequences[seq_id].nodes if seq_id in self.oracle.sequences else 0
            leaves.append(rng.choice([-1, nodes - 1, *[rng.randint(-1, max(-1, nodes - 1)) for _ in range(4)]]))
            if rng.random() < 0.03:
                leaves[-1] = rng.choice([-2, nodes])
        return self.call("commit_accepted_token_tree_nodes", ids, leaves)

    # -- ids and values ----------------------------------------------------------------------------

    def any_id(self, rng: random.Random) -> int:
        """Mostly an id that exists."""
        if self.oracle.sequences and rng.random() < 0.9:
            return rng.choice(sorted(self.oracle.sequences))
        return rng.choice(IDS + BAD_IDS)

    def new_id(self, rng: random.Random) -> int:
        """Mostly an id that is new."""
        unused = [seq_id for seq_id in IDS if seq_id not in self.oracle.sequences]
        return rng.choice(unused) if unused and rng.random() < 0.9 else rng.choice(IDS + BAD_IDS)

    def length(self, seq_id: int) -> int:
        return self.oracle.sequences[seq_id].length if seq_id in self.oracle.sequences else 3

    def stored(self, seq_id: int) -> int:
        return self.oracle.sequences[seq_id].stored if seq_id in self.oracle.sequences else 3

    def a_layer(self, rng: random.Random) -> int:
        return rng.randrange(len(self.specs))

    def values(self, rng: random.Random, *shape: int) -> Tensor:
        """Numbers of many sizes."""
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        return (torch.randn(shape, generator=generator) * rng.choice([0.25, 1.0, 4.0])).to(self.dtype)

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "state"):
            self.pair.compare_books()

    def compare_all(self) -> None:
        for seq_id in self.oracle.sequences:
            self.pair.compare_rows(seq_id)

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        if self.oracle.forward is not None:
            self.pair.abort()
        self.compare_all()
        self.pair.finish()
