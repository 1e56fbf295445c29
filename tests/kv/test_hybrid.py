"""``State``: every verb on attention and recurrent layers at once, against outputs computed from
scratch.

A toy model gives each token of each layer a query, key, value, decay and convolution input that
depend on the token alone. What every layer must return for a token is computed by loops over all
tokens before it (its ancestors, in a tree), in float64.

Letters: T new tokens; Hq, H heads; D head size; C channels; W taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.examples import examples
from torch import Tensor

from quire.base.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.contracts.layers import (
    FullAttention,
    LatentAttention,
    LayerSpec,
    Recurrent,
    StateTensor,
    WindowedAttention,
)
from quire.contracts.model import LatentExpansion
from quire.kv.contract import ContractState
from quire.kv.rules import LAYER_VERBS, PAGED_REFUSALS, PAGED_VERBS, RECURRENT_VERBS, layer_refusal, verbs_of
from quire.ops.attention import ReferenceAttention
from quire.ops.recurrence import ReferenceRecurrence

from .faces import contract
from .snapshots import snapshot as everywhere

HEADS, KV_HEADS, DIM, CHANNELS, TAPS, WINDOW, VOCAB = 4, 2, 4, 6, 4, 5, 50
F64 = torch.float64

FULL = FullAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM)
WINDOWED = WindowedAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM, window=WINDOW)
DELTA = Recurrent(
    states=(
        StateTensor(shape=(TAPS - 1, CHANNELS), dtype="float64"),
        StateTensor(shape=(KV_HEADS, DIM, DIM), dtype="float64"),
    )
)
CONV = Recurrent(states=(StateTensor(shape=(TAPS - 1, CHANNELS), dtype="float64"),))
RANK, ROTARY, NOPE, VALUES = 5, 2, 3, 4
LATENT = LatentAttention(num_heads=HEADS, row_dim=RANK + ROTARY, value_dim=RANK, sm_scale=0.5)
KINDS: dict[str, list[LayerSpec]] = {
    "latent": [LATENT, DELTA, CONV],
    "latent and windowed": [LATENT, WINDOWED, DELTA],
    "full": [DELTA, FULL, CONV],
    "windowed": [WINDOWED, DELTA],
    "mixed": [FULL, DELTA, WINDOWED, CONV],
    "recurrent": [DELTA, CONV],
}


def table(layer: int, name: str, *shape: int) -> Tensor:
    """float64 ``[VOCAB, *shape]``, fixed."""
    generator = torch.Generator().manual_seed(1000 * layer + sum(map(ord, name)))
    return torch.randn(VOCAB, *shape, generator=generator, dtype=F64)


def inputs(layer: int, tokens: list[int]) -> dict[str, Tensor]:
    """What the tokens bring to a layer."""
    index = torch.tensor(tokens, dtype=torch.int64)
    q, k, v = (
        table(layer, name, heads, DIM)[index] for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    return {
        "q": q,
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": v,
        "decay": -table(layer, "decay", KV_HEADS)[index].abs() / 4,
        "beta": table(layer, "beta", KV_HEADS)[index].sigmoid(),
        "x": table(layer, "x", CHANNELS)[index],
        "weight": table(layer, "w", CHANNELS, TAPS)[0],
        "latent q": table(layer, "latent q", HEADS, NOPE + ROTARY)[index],
        "rows": table(layer, "rows", RANK + ROTARY)[index],
        "expand k": table(layer, "expand k", HEADS, NOPE, RANK)[0],
        "expand v": table(layer, "expand v", HEADS, RANK, VALUES)[0],
    }


def expected(layer: int, spec: LayerSpec, tokens: list[int]) -> list[Tensor]:
    """What the layer returns for the last of these tokens, by loops."""
    given = inputs(layer, tokens)
    if isinstance(spec, Recurrent):
        taps = [given["x"][-1 - back] * given["weight"][:, TAPS - 1 - back] for back in range(min(TAPS, len(tokens)))]
        outs = [sum(taps[1:], taps[0])]
        if len(spec.states) > 1:
            states = [torch.zeros(DIM, DIM, dtype=F64) for _ in range(KV_HEADS)]
            for t in range(len(tokens)):
                for head in range(KV_HEADS):
                    k, v = given["k"][t, head], given["v"][t, head]
                    state = states[head] * math.exp(given["decay"][t, head])
                    states[head] = state + torch.outer(k, given["beta"][t, head] * (v - state.T @ k))
            outs.append(
                torch.stack([states[head // (HEADS // KV_HEADS)].T @ given["q"][-1, head] for head in range(HEADS)])
            )
        return outs
    window = spec.layer_window or len(tokens)
    seen = range(max(0, len(tokens) - window), len(tokens))
    rows = []
    if isinstance(spec, LatentAttention):
        for head in range(HEADS):
            scores, values = [], []
            for i in seen:
                c, k_pe = given["rows"][i, :RANK], given["rows"][i, RANK:]
                k = torch.cat((given["expand k"][head] @ c, k_pe))
                scores.append(given["latent q"][-1, head] @ k * spec.scale)
                values.append(c @ given["expand v"][head])
            rows.append(torch.stack(scores).softmax(0) @ torch.stack(values))
        return [torch.stack(rows)]
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = torch.stack([given["q"][-1, head] @ given["k"][i, kv_head] for i in seen]) * DIM**-0.5
        rows.append(scores.softmax(0) @ given["v"][seen.start :, kv_head])
    return [torch.stack(rows)]


def make(kind: str, **given: Any) -> ContractState:
    fields: dict[str, Any] = {"num_states": 64, "ring": 2, "page_size": 4, "recurrence": ReferenceRecurrence()} | given
    specs = KINDS[kind]
    if kind == "recurrent":
        return contract([spec for spec in specs if isinstance(spec, Recurrent)], **fields)
    return contract(specs, **{"capacity": 256, "dtype": F64, "backend": ReferenceAttention()} | fields)


def run(state: ContractState, kind: str, batch: dict[int, list[int]], trees: Any = None) -> list[list[Tensor]]:
    """One forward; per layer what each of its operations returned."""
    state.begin_forward(list(batch), [len(tokens) for tokens in batch.values()], trees)
    tokens = [token for entry in batch.values() for token in entry]
    found = outputs(state, kind, tokens)
    state.end_forward()
    return found


def outputs(state: ContractState, kind: str, tokens: list[int]) -> list[list[Tensor]]:
    opened = state.open_pass()
    found = []
    for layer, spec in enumerate(KINDS[kind]):
        given = inputs(layer, tokens)
        if isinstance(spec, Recurrent):
            found.append([opened.convolve(layer, 0, given["x"], given["weight"])])
            if len(spec.states) > 1:
                q, k, v = given["q"], given["k"], given["v"]
                found[-1].append(
                    opened.linear_attention(layer, 1, q, k, v, log_decay=given["decay"], beta_TH=given["beta"])
                )
        elif isinstance(spec, LatentAttention):
            expansion = LatentExpansion(given["expand k"], given["expand v"])
            found.append([opened.attend_latent(layer, given["latent q"], given["rows"], expansion)])
        else:
            found.append([opened.attend(layer, given["q"], given["k"], given["v"])])
    return found


def check_row(found: list[list[Tensor]], row: int, kind: str, tokens: list[int]) -> None:
    """The outputs of one row are those of the last of these tokens.

    Tolerance: rounding of float64 sums of as many terms.
    """
    for layer, spec in enumerate(KINDS[kind]):
        for part, want in zip(found[layer], expected(layer, spec, tokens), strict=True):
            bound = 64 * (len(tokens) + DIM) * torch.finfo(F64).eps * max(1.0, float(want.abs().max()))
            assert float((part[row] - want).abs().max()) <= bound, (layer, row)


class Conversations(RuleBasedStateMachine):
    """Random verbs; every sequence is always what a fresh run of its tokens would be."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        interval=st.sampled_from([0, 4, 8]),
        ring=st.integers(0, 3),
        states=st.sampled_from([8, 20, 64]),
    )
    def begin(self, kind: str, interval: int, ring: int, states: int) -> None:
        self.kind = kind
        self.state = make(kind, ring=ring, checkpoint_interval=interval, num_states=states)
        self.tokens: dict[int, list[int]] = {}
        self.pending: dict[int, tuple[list[int], list[int]]] = {}
        """Tokens and parents of uncommitted nodes."""
        self.next = 0

    def settled(self) -> list[int]:
        return [seq for seq in self.tokens if seq not in self.pending]

    def replay(self, seq: int, target: int, again: int) -> None:
        """Run the tokens again that a rewind asked for."""
        assert self.state.sequence_length(seq) == target - again
        if again:
            if self.state.missing_pages([seq], [again]):
                self.tokens[seq] = self.tokens[seq][: target - again]
                return
            rows = run(self.state, self.kind, {seq: self.tokens[seq][target - again : target]})
            for row in range(again):
                check_row(rows, row, self.kind, self.tokens[seq][: target - again + row + 1])

    @precondition(lambda self: len(self.tokens) < 5)
    @rule()
    def add(self) -> None:
        self.state.add_sequence(self.next)
        self.tokens[self.next] = []
        self.next += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def forward(self, data: st.DataObject) -> None:
        """Chains, pieces of prompts, decodes and trees in one batch."""
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True, min_size=1, max_size=3))
        batch: dict[int, list[int]] = {}
        trees: list[list[int] | None] = []
        paths: list[list[int]] = []
        for seq in seqs:
            tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
            batch[seq] = tokens
            old_tokens, old_parents = self.pending.get(seq, ([], []))
            if seq not in self.pending and data.draw(st.booleans()):
                trees.append(None)
                paths += [self.tokens[seq] + tokens[: n + 1] for n in range(len(tokens))]
                continue
            parents = [data.draw(st.integers(-1, len(old_tokens) + n - 1)) for n in range(len(tokens))]
            trees.append(parents)
            nodes, all_parents = old_tokens + tokens, old_parents + parents
            for node in range(len(old_tokens), len(nodes)):
                path, at = [nodes[node]], all_parents[node]
                while at >= 0:
                    path.insert(0, nodes[at])
                    at = all_parents[at]
                paths.append(self.tokens[seq] + path)
        if max(len(path) for path in paths) > 60:
            return
        if self.state.missing_pages(seqs, [len(tokens) for tokens in batch.values()], trees):
            before = snapshot(self.state)
            with pytest.raises(ResourceExhausted):
                self.state.begin_forward(seqs, [len(tokens) for tokens in batch.values()], trees)
            assert snapshot(self.state) == before
            return
        if data.draw(st.booleans()):
            self.state.begin_forward(seqs, [len(tokens) for tokens in batch.values()], trees)
            if data.draw(st.booleans()):
                outputs(self.state, self.kind, [token for entry in batch.values() for token in entry])
            self.state.abort_forward()
        rows = run(self.state, self.kind, batch, trees)
        for row, path in enumerate(paths):
            check_row(rows, row, self.kind, path)
        for seq, parents in zip(seqs, trees, strict=True):
            if parents is None:
                self.tokens[seq] += batch[seq]
            else:
                old_tokens, old_parents = self.pending.get(seq, ([], []))
                self.pending[seq] = (old_tokens + batch[seq], old_parents + parents)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.pending)), unique=True, min_size=1))
        leaves = [data.draw(st.integers(-1, len(self.pending[seq][0]) - 1)) for seq in seqs]
        self.state.commit_accepted_token_tree_nodes(seqs, leaves)
        for seq, leaf in zip(seqs, leaves, strict=True):
            nodes, parents = self.pending.pop(seq)
            path: list[int] = []
            while leaf >= 0:
                path.insert(0, nodes[leaf])
                leaf = parents[leaf]
            self.tokens[seq] += path

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.settled()))
        count = data.draw(st.integers(0, len(self.tokens[seq])))
        target = len(self.tokens[seq]) - count
        try:
            foretold = self.state.rewind_cost(seq, target)
            again = self.state.popn(seq, count)
        except FailedPrecondition:
            assert not any(target in part for part in self.state.reachable(seq))
            return
        assert again == foretold
        self.tokens[seq] = self.tokens[seq][:target]
        self.replay(seq, target, again)

    @precondition(lambda self: self.settled() and len(self.tokens) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.settled()))
        target = data.draw(st.integers(0, len(self.tokens[parent])))
        child, self.next = self.next, self.next + 1
        try:
            again = self.state.fork_sequence(parent, child, target)
        except FailedPrecondition:
            assert not any(target in part for part in self.state.reachable(parent))
            return
        self.tokens[child] = self.tokens[parent][:target]
        self.replay(child, target, again)

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.settled()))
        self.state.checkpoint(seq)
        length = len(self.tokens[seq])
        assert length == 0 or length in self.state.checkpoints(seq)
        assert self.state.rewind_cost(seq, length) == 0

    @precondition(lambda self: self.settled())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.settled()))
        kept = self.state.checkpoints(seq)
        if kept:
            position = data.draw(st.sampled_from(kept))
            self.state.drop_checkpoint(seq, position)
            assert self.state.checkpoints(seq) == [one for one in kept if one != position]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.tokens)))
        self.state.remove_sequence(seq)
        del self.tokens[seq]
        self.pending.pop(seq, None)

    @invariant()
    def whole(self) -> None:
        self.state.check()
        for seq, tokens in self.tokens.items():
            assert self.state.sequence_length(seq) == len(tokens)
        if not self.tokens:
            assert self.state.empty()


TestConversations = Conversations.TestCase
TestConversations.settings = settings(
    max_examples=examples(12, 40), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
def test_conversations_for_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Conversations,
        settings=settings(
            max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.product(16)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40])
def test_every_chunking_gives_the_same(kind: str, chunk: int) -> None:
    tokens = [(7 * n + 3) % VOCAB for n in range(40)]
    state = make(kind)
    state.add_sequence(0)
    for start in range(0, 40, chunk):
        rows = run(state, kind, {0: tokens[start : start + chunk]})
        for row in range(len(tokens[start : start + chunk])):
            check_row(rows, row, kind, tokens[: start + row + 1])


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_fork_and_pop_to_every_position(kind: str, stride: int) -> None:
    tokens = [(5 * n + 1) % VOCAB for n in range(40)]
    for position in range(0, 41, stride):
        state = make(kind, checkpoint_interval=8)
        state.add_sequence(0)
        for start in range(0, 40, 10):
            run(state, kind, {0: tokens[start : start + 10]})
        again = state.fork_sequence(0, 1, position)
        assert again < 8
        assert state.popn(0, 40 - position) == again
        more = [9, 8, 7]
        for seq in (0, 1):
            rest = tokens[position - again : position] + more
            rows = run(state, kind, {seq: rest})
            check_row(rows, len(rest) - 1, kind, tokens[:position] + more)
        state.check()


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["full", "mixed", "recurrent"])
@pytest.mark.parametrize("accepted", range(9))
def test_verify_then_go_back(kind: str, accepted: int) -> None:
    """Eight drafts as a chain: by commit with nothing to run again, by pop with what is
    not kept."""
    tokens, drafts = [1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16, 17, 18]
    kept = tokens + drafts[:accepted]
    state = make(kind)
    state.add_sequence(0)
    run(state, kind, {0: tokens})
    state.fork_sequence(0, 1)
    run(state, kind, {0: drafts}, [[*range(-1, 7)]])
    state.commit_accepted_token_tree_nodes([0], [accepted - 1])
    assert state.sequence_length(0) == len(kept)
    assert state.rewind_cost(0, len(kept)) == 0
    check_row(run(state, kind, {0: [30]}), 0, kind, [*kept, 30])
    run(state, kind, {1: drafts})
    again = state.popn(1, 8 - accepted)
    rest = [*kept[len(kept) - again :], 30]
    check_row(run(state, kind, {1: rest}), again, kind, [*kept, 30])


# ---- Refusals ------------------------------------------------------------------------------------


def snapshot(state: ContractState) -> Any:
    states = state.state.parts.recurrent.table
    return [
        (seq, state.sequence_length(seq), state.pending_nodes(seq), states.kept(seq), list(states.get(seq).ring))
        for seq in sorted(state.state.sequences.ids)
    ] + [[pool.num_used for pool in [*state.state.sequences.pools, states.pool]]]


REFUSED: dict[str, tuple[type[QuireError], Callable[[ContractState], object]]] = {
    "pop beyond the beginning": (InvalidArgument, lambda s: s.popn(0, 13)),
    "pop of a negative count": (InvalidArgument, lambda s: s.popn(0, -1)),
    "pop of an unknown sequence": (NotFound, lambda s: s.popn(9, 1)),
    "fork beyond the end": (InvalidArgument, lambda s: s.fork_sequence(0, 5, 13)),
    "fork of an unknown sequence": (NotFound, lambda s: s.fork_sequence(9, 5)),
    "fork to an existing one": (InvalidArgument, lambda s: s.fork_sequence(0, 1)),
    "pop with uncommitted nodes": (FailedPrecondition, lambda s: s.popn(1, 1)),
    "fork with uncommitted nodes": (FailedPrecondition, lambda s: s.fork_sequence(1, 5)),
    "checkpoint with uncommitted nodes": (FailedPrecondition, lambda s: s.checkpoint(1)),
    "a tree that is no tree": (InvalidArgument, lambda s: s.begin_forward([0], [2], [[0, 1]])),
    "ordinary tokens behind nodes": (FailedPrecondition, lambda s: s.begin_forward([0, 1], [1, 1])),
    "a sequence twice": (InvalidArgument, lambda s: s.begin_forward([0, 0], [1, 1])),
    "more states than there are": (ResourceExhausted, lambda s: s.begin_forward([1], [99], [[-1] * 99])),
    "a checkpoint that is not there": (InvalidArgument, lambda s: s.drop_checkpoint(0, 3)),
    "a state of no layer": (InvalidArgument, lambda s: s.debug_get(17, 0, 0)),
    "a state that the layer has not": (InvalidArgument, lambda s: s.debug_get(0, 2, 0)),
    "a state that is not kept": (FailedPrecondition, lambda s: s.debug_get(0, 0, 0, position=1)),
    "a state of another shape": (InvalidArgument, lambda s: s.debug_set(0, 0, 0, torch.zeros(2, 2, dtype=F64))),
    "a recurrent verb on attention": (Unsupported, lambda s: s.debug_get(1, 0, 0)),
    "get without a forward": (FailedPrecondition, lambda s: s.get(0, 0)),
    "set without a forward": (FailedPrecondition, lambda s: s.set(0, 0, torch.zeros(0, TAPS - 1, CHANNELS, dtype=F64))),
    "end without a forward": (FailedPrecondition, lambda s: s.end_forward()),
    "an attention window below 1": (InvalidArgument, lambda s: s.enable_sliding_window_for_seq(0, 0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_without_a_trace(name: str) -> None:
    state = make("full", num_states=32, checkpoint_interval=4, ring=2)
    state.add_sequence(0)
    state.add_sequence(1)
    run(state, "full", {0: list(range(12)), 1: [1, 2, 3]})
    run(state, "full", {1: [4, 5]}, [[-1, 0]])
    before = snapshot(state)
    error, call = REFUSED[name]
    with pytest.raises(error) as caught:
        call(state)
    assert type(caught.value) is error
    assert snapshot(state) == before
    state.check()
    rows = run(state, "full", {0: [20]})
    check_row(rows, 0, "full", [*range(12), 20])


def test_a_refused_first_forward_leaves_no_trace() -> None:
    """Pages are short, which the attention part finds after the recurrent part has been asked."""
    state = make("full", num_states=32, capacity=8, page_size=4)
    state.add_sequence(0)
    everything = everywhere(state)
    with pytest.raises(ResourceExhausted):
        state.begin_forward([0], [9])
    assert everywhere(state) == everything
    state.check()


def test_a_window_that_cannot_follow_the_states() -> None:
    """The nearest kept state lies behind what the window has let go of: refused, both parts as
    before.
    """
    state = make("windowed", ring=0, page_size=4)
    state.add_sequence(0)
    tokens = list(range(40))
    run(state, "windowed", {0: tokens[:10]})
    state.checkpoint(0)
    run(state, "windowed", {0: tokens[10:30]})
    run(state, "windowed", {0: tokens[30:39]})
    run(state, "windowed", {0: tokens[39:]})
    before = snapshot(state)
    with pytest.raises(FailedPrecondition, match="reachable"):
        state.popn(0, 2)
    with pytest.raises(FailedPrecondition, match="reachable"):
        state.fork_sequence(0, 1, 38)
    assert snapshot(state) == before
    assert state.nearest_reachable(0, 38) == 0
    assert state.reachable(0) == [range(10), range(40, 41)]
    assert state.fork_sequence(0, 2, 9) == 9
    assert state.sequence_length(2) == 0
    check_row(run(state, "windowed", {0: [3]}), 0, "windowed", [*tokens, 3])


def test_a_recurrent_state_has_no_window() -> None:
    state = make("recurrent")
    state.add_sequence(0)
    with pytest.raises(Unsupported, match="recurrent layers only"):
        state.enable_sliding_window_for_seq(0, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint_interval": 6}, "multiple of the page size 4"),
        ({"num_states": 0}, "num_states 0"),
        ({"ring": -1}, "ring -1"),
    ],
)
def test_what_no_state_can_be(given: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make("full", **given)


# ---- The examples of the specification -----------------------------------------------------------


def test_get_set_and_publish() -> None:
    specs = [
        Recurrent(
            states=(
                StateTensor(shape=(16, 16), dtype="float16"),
                StateTensor(shape=(32, 32), dtype="float32", initial=1.0),
            )
        )
    ]
    state = contract(specs, num_states=32, recurrence=ReferenceRecurrence())
    for seq in (0, 1, 2):
        state.add_sequence(seq)

    def values(seq: int) -> tuple[float, float]:
        found = [state.debug_get(0, one, seq).unique() for one in (0, 1)]
        assert all(len(one) == 1 for one in found)
        return float(found[0]), float(found[1])

    state.begin_forward([0, 2], [1, 1])
    for one, (shape, dtype, initial) in enumerate((((16, 16), torch.float16, 0.0), ((32, 32), torch.float32, 1.0))):
        assert torch.equal(state.get(0, one), torch.full((2, *shape), initial, dtype=dtype))
        state.set(0, one, torch.full((2, *shape), 2.0 + one, dtype=dtype))
        assert torch.equal(state.get(0, one), torch.full((2, *shape), initial, dtype=dtype))
    assert values(0) == (0, 1)
    state.end_forward()
    assert [values(seq) for seq in (0, 1, 2)] == [(2, 3), (0, 1), (2, 3)]
    assert state.fork_sequence(0, 3) == 0
    assert state.popn(3, 1) == 0
    assert (values(3), values(0)) == ((0, 1), (2, 3))
    with pytest.raises(InvalidArgument, match="0"):
        state.popn(3, 1)
    # A layer that sets nothing keeps its state.
    state.begin_forward([0], [4])
    state.set(0, 1, torch.full((1, 32, 32), 9.0))
    state.end_forward()
    assert values(0) == (2, 9)
    state.debug_set(0, 0, 0, torch.full((16, 16), 7.0, dtype=torch.float16))
    assert (values(0), values(2)) == ((7, 9), (2, 3))
    assert float(state.debug_get(0, 0, 0, position=1).unique()) == 2


@pytest.mark.parametrize("close", ["end_forward", "abort_forward", "clear"])
def test_a_pass_ends_with_its_forward(close: str) -> None:
    """Its slots may have another owner by then; also while the next forward is open."""
    state = make("recurrent")
    state.add_sequence(0)
    state.begin_forward([0], [1])
    outputs(state, "recurrent", [5])
    opened, given = state.open_pass(), inputs(0, [5])
    getattr(state, close)()
    if not state.has_sequence(0):
        state.add_sequence(0)
    gates = {"log_decay": given["decay"], "beta_TH": given["beta"]}
    for again in (False, True):
        if again:
            state.begin_forward([0], [1])
        for call in (
            lambda: opened.convolve(0, 0, given["x"], given["weight"]),
            lambda: opened.linear_attention(0, 1, given["q"], given["k"], given["v"], **gates),
            lambda: opened.recurrent_parts(0),
        ):
            with pytest.raises(FailedPrecondition, match="this forward is over"):
                call()


def test_linear_attention_examples() -> None:
    spec = Recurrent(states=(StateTensor(shape=(1, 1, 1), dtype="float32"),))
    state = contract([spec, spec], num_states=8, recurrence=ReferenceRecurrence())
    state.add_sequence(0)
    state.begin_forward([0], [3])

    def column(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1)

    padded = state.linear_attention(
        0,
        column(1, 1, 0.5, 7),
        column(1, 2, 1, 7),
        column(2, 1, 3, 7),
        log_decay=torch.tensor([[0.0], [0.0], [math.log(0.5)], [-1.0]]),
    )
    # A handful of roundings of sums of at most 5.
    bound = 8 * 5 * torch.finfo(torch.float32).eps
    assert float((padded.flatten() - torch.tensor([2.0, 4.0, 2.5, 0.0])).abs().max()) <= bound
    out = torch.full((3, 1, 1), 5.0)
    assert (
        state.linear_attention(1, column(1, 1, 1), column(1, 1, 1), column(2, 5, 5), beta=torch.ones(3, 1), out=out)
        is out
    )
    assert float((out.flatten() - torch.tensor([2.0, 5.0, 5.0])).abs().max()) <= bound
    state.end_forward()
    assert float(state.debug_get(0, 0, 0)) == pytest.approx(5.0)


def test_checkpoints_and_ring_of_the_specification() -> None:
    state = make("recurrent", ring=4, checkpoint_interval=16)
    state.add_sequence(0)
    tokens = list(range(40))
    start = 0
    for count in (16, 16, 5, 1, 1, 1):
        run(state, "recurrent", {0: tokens[start : start + count]})
        start += count
    assert state.checkpoints(0) == [16, 32]
    assert list(state.state.parts.recurrent.table.get(0).ring) == [32, 37, 38, 39]
    state.fork_sequence(0, 1)
    assert state.fork_sequence(0, 2, 20) == 4
    assert state.sequence_length(2) == 16
    assert state.popn(0, 2) == 0
    assert state.popn(0, 10) == 12
    assert state.sequence_length(0) == 16
    assert list(state.state.parts.recurrent.table.get(1).ring) == [32, 37, 38, 39]
    state.check()


# ---- Export and import ---------------------------------------------------------------------------


@pytest.mark.product(2)
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("length", [0, 1, 13])
def test_export_and_import_into_another_page_size(kind: str, length: int) -> None:
    """Kept states travel along; a continuation, and one from each of them, is that of
    the original."""
    tokens = [(3 * n + 1) % VOCAB for n in range(length)]
    state = make(kind, checkpoint_interval=4)
    state.add_sequence(0)
    for start in range(0, length, 5):
        run(state, kind, {0: tokens[start : start + 5]})
    other = make(kind, page_size=3)
    assert other.get_layout_hash() == state.get_layout_hash()
    metadata = state.get_checkpoint_metadata(0)
    assert metadata["kept_recurrent_positions"] == state.checkpoints(0) == [n for n in (4, 8, 12) if n <= length]
    other.prepare_import(7, metadata)
    groups = [group["group"] for group in metadata["groups"]]
    assert groups == list(range(len(KINDS[kind])))
    for group in reversed(groups):
        tensors = state.export_page_group(0, group)
        out = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        assert state.export_page_group(0, group, out) is out
        assert all(torch.equal(tensors[name], out[name]) for name in tensors)
        other.import_page_group(7, group, tensors)
    other.finish_import(7)
    other.check()
    assert other.checkpoints(7) == state.checkpoints(0)
    for position in [*reversed(state.checkpoints(0)), length]:
        if any(position in part for part in other.state.sequences.reachable(other.state.sequences.get(7))):
            other.fork_sequence(7, 8, position)
            check_row(run(other, kind, {8: [9]}), 0, kind, [*tokens[:position], 9])
            other.remove_sequence(8)
    other.remove_sequence(7)
    assert other.empty()


def test_imports_that_do_not_fit_leave_no_trace() -> None:
    state, other = make("full", checkpoint_interval=4), make("full", num_states=2)
    state.add_sequence(0)
    run(state, "full", {0: list(range(9))})
    metadata = state.get_checkpoint_metadata(0)
    with pytest.raises(ResourceExhausted, match="needs 3 states, 2 free"):
        other.prepare_import(0, metadata)
    assert other.empty()
    for changes in (
        {"kept_recurrent_positions": [4, 4]},
        {"kept_recurrent_positions": [0]},
        {"kept_recurrent_positions": [10]},
        {"kept_recurrent_positions": None},
        {"recurrent": []},
        {"layout_hash": "0" * 32},
    ):
        with pytest.raises(InvalidArgument, match="expected"):
            make("full").prepare_import(0, {**metadata, **changes})
    with pytest.raises(InvalidArgument, match="expected"):
        make("mixed").prepare_import(0, metadata)
    target = make("full")
    target.prepare_import(0, metadata)
    group = state.export_page_group(0, 0)
    with pytest.raises(InvalidArgument, match=r"state\.0@4"):
        target.import_page_group(0, 0, {name: one for name, one in group.items() if name != "state.0@4"})
    with pytest.raises(InvalidArgument, match="float64"):
        target.import_page_group(0, 0, {name: one.float() for name, one in group.items()})
    with pytest.raises(DataLoss, match="checksum"):
        target.import_page_group(0, 0, {name: one + 1 for name, one in group.items()})
    target.import_page_group(0, 0, group)
    with pytest.raises(FailedPrecondition, match="already"):
        target.import_page_group(0, 0, group)
    with pytest.raises(FailedPrecondition, match=r"\[1, 2\]"):
        target.finish_import(0)
    with pytest.raises(FailedPrecondition, match="import"):
        target.checkpoint(0)
    target.remove_sequence(0)
    assert target.empty()


# ---- The rule table ------------------------------------------------------------------------------


def test_the_rule_table_of_recurrent_layers() -> None:
    """What it refuses for a kind is refused, what it has runs, by verb."""
    state = make("full")
    state.add_sequence(0)
    run(state, "full", {0: [1, 2, 3]})
    state.begin_forward([0], [1])
    q, kv = torch.zeros(1, HEADS, DIM, dtype=F64), torch.zeros(1, KV_HEADS, DIM, dtype=F64)
    calls: dict[str, Callable[[int], object]] = {
        "attention_with_fused_qkv": lambda layer: state.attention_with_fused_qkv(layer, torch.cat((q, kv, kv), 1)),
        "append_kv": lambda layer: state.append_kv(layer, kv, kv),
        "append_mla_kv": lambda layer: state.append_mla_kv(layer, kv[:, 0]),
        "self_attention": lambda layer: state.self_attention(layer, q, kv, kv),
        "cross_attention": lambda layer: state.cross_attention(layer, q),
        "attention_with_shared_kv": lambda layer: state.attention_with_shared_kv(layer, q, kv, kv),
        "debug_get_kv": lambda layer: state.debug_get_kv(0, layer=layer),
        "debug_get_kv_mla": lambda layer: state.debug_get_kv_mla(0, layer=layer),
        "debug_set_kv": lambda layer: state.debug_set_kv(0, 0, kv, kv, layer=layer),
    }
    assert set(calls) == set(LAYER_VERBS)
    for verb, call in calls.items():
        with pytest.raises(Unsupported, match="recurrent"):
            call(0)
        if verb != "debug_set_kv" and not layer_refusal(verb, "full"):
            call(1)
    assert state.get(0, 0).shape == (1, TAPS - 1, CHANNELS)
    state.abort_forward()
    for kinds in (["recurrent"], ["full", "recurrent"], ["full"]):
        verbs = verbs_of(kinds)
        assert set(verbs) == {*PAGED_VERBS, *PAGED_REFUSALS}
        for verb in RECURRENT_VERBS:
            assert (verbs[verb] == "") == ("recurrent" in kinds)
        assert (verbs["append_kv"] == "") == ("full" in kinds)


def test_layers_may_come_in_any_order_and_again() -> None:
    """The last write of a layer counts, and nothing else changes."""
    tokens = [5, 6, 7]
    state = make("full")
    state.add_sequence(0)
    run(state, "full", {0: tokens})
    state.begin_forward([0], [2])
    outputs(state, "full", [40, 41])
    outputs(state, "full", [8, 9])
    state.end_forward()
    check_row(run(state, "full", {0: [10]}), 0, "full", [*tokens, 8, 9, 10])
