"""Recurrent states that are kept on the way: at an interval, where prompts branch, and which of
them give way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.engine.test_recurrent_models import tokens_run
from tests.small_llms import (
    Checkpoint,
    MakeLLM,
    attention_layer,
    check,
    engine_of,
    greedy,
    random_tokens,
    recurrent_layer,
)

from quire import LLM
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.types import Add, Chunk, DropCheckpoint, Edit, SeqId, Step
from quire.engine.checkpoints import Checkpoints
from quire.engine.request import Request
from quire.kv.state import State

from .made_requests import made_request

INTERVAL = 16


def kept(llm: LLM, seq: SeqId) -> list[int]:
    state = engine_of(llm).runner.state
    assert isinstance(state, State)
    return state.checkpoints(seq)


def states(llm: LLM) -> State:
    state = engine_of(llm).runner.state
    assert isinstance(state, State)
    return state


# -- hits ------------------------------------------------------------------------------------------


def test_a_hit_in_the_middle_of_a_prompt(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """It goes on from the nearest kept state, and the output says what was reused, what was not,
    and why.
    """
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    prompt = random_tokens(100)
    llm.generate(prompt, greedy(4))
    branch = [*prompt[:60], *random_tokens(20, seed=3)]
    output = llm.generate(branch, greedy(4))[0]
    assert (output.num_cached_tokens, output.num_replayed_tokens) == (48, 12)
    assert "60 tokens of the prompt were known and the first 48 reused" in output.cache_note
    assert f"every {INTERVAL} tokens" in output.cache_note
    assert hybrid.continues(branch, output.outputs[0].token_ids)
    assert llm.metrics()["quire:tokens_replayed_total"] == 12
    assert llm.metrics()["quire:checkpoints_used_total"] >= 1
    assert llm.metrics()["quire:checkpoints_kept"] >= 100 // INTERVAL


def test_where_prompts_part_a_state_is_kept(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """The second prompt with a common beginning finds out where it ends; the third finds a state
    there.
    """
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=0)
    common = random_tokens(50)
    found = []
    for seed in range(1, 4):
        prompt = [*common, *random_tokens(9, seed=seed)]
        output = llm.generate(prompt, greedy(3))[0]
        assert hybrid.continues(prompt, output.outputs[0].token_ids)
        found.append((output.num_cached_tokens, output.num_replayed_tokens, bool(output.cache_note)))
    assert found == [(0, 0, False), (0, 50, True), (50, 0, False)]


def test_prompts_that_arrive_together_branch_where_they_part(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=0, max_num_batched_tokens=32)
    common = random_tokens(90)
    prompts = [[*common, *random_tokens(9, seed=seed)] for seed in range(1, 4)]
    outputs = llm.generate(prompts, greedy(3))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert hybrid.continues(prompt, output.outputs[0].token_ids)
    assert [output.num_cached_tokens for output in outputs] == [0, 90, 90]


def test_equal_prompts_that_arrive_together_are_computed_once(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=0, max_num_batched_tokens=32)
    prompt = random_tokens(70)
    outputs = llm.generate([prompt] * 3, greedy(3))
    assert [output.num_cached_tokens for output in outputs] == [0, 69, 69]
    assert all(hybrid.continues(prompt, output.outputs[0].token_ids) for output in outputs)


def test_going_back_into_a_long_history_runs_an_interval_at_most(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL, enable_prefix_caching=False)
    history = random_tokens(150)
    for position in (140, 130, 97, 96, 95, 33, 16, 15, 1):
        session = llm.session(history)
        session.logits()
        cost = session.rewind_cost(position)
        # The last token before the position runs anyway, for its logits.
        assert cost == position % INTERVAL
        assert session.rewind(to=position) == cost
        turn = random_tokens(5, seed=9)
        session.append(turn)

        def generate(session: Any = session, tokens: Sequence[int] = (*history[:position], *turn)) -> None:
            assert hybrid.continues(tokens, session.generate(greedy(3)).outputs[0].token_ids)

        assert tokens_run(generate, llm) <= cost + len(turn) + 3
        session.close()


def test_generated_text_is_kept_too(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    session = llm.session(random_tokens(10))
    session.generate(greedy(60))
    assert session._branch.seq is not None
    # And before the last token of the prompt.
    assert kept(llm, session._branch.seq) == [9, 16, 32, 48, 64]


def test_checkpoints_of_an_executor_are_its_own(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    state, runner = states(llm), engine_of(llm).runner
    llm.generate(random_tokens(40), greedy(2))
    seq = runner.new_seq()
    state.add_sequence(seq)
    runner.execute(Step(chunks=(Chunk(seq, random_tokens(30), checkpoints=(3, 20)),)))
    engine = engine_of(llm)
    assert engine.checkpoints is not None
    while engine.checkpoints.drop_one():
        pass
    assert engine.checkpoints.num_dropped > 0
    assert kept(llm, seq) == [3, 20]
    state.remove_sequence(seq)


def test_no_prefix_cache_and_no_session_keeps_nothing(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL, enable_prefix_caching=False)
    seen: list[int] = []
    runner = engine_of(llm).runner
    execute = runner.execute

    def watch(step: Step, *more: Any) -> Any:
        seen.extend(len(chunk.checkpoints) for chunk in step.chunks)
        return execute(step, *more)

    runner.execute = watch  # type: ignore[method-assign]
    llm.generate(random_tokens(80), greedy(2))
    assert seen
    assert not any(seen)


@pytest.mark.product(6)
@pytest.mark.parametrize("slots", [4, 5, 6, 9])
def test_few_slots(make_llm: MakeLLM, hybrid: Checkpoint, slots: int) -> None:
    """Checkpoints never take what a step needs, whoever runs, and give way to newer ones."""
    probe = make_llm(hybrid, kv_cache_memory="4MiB")
    layers = probe.model.layer_specs
    from quire.kv.recurrent import bytes_per_state

    each = bytes_per_state([spec for spec in layers if spec.kind == "recurrent"])
    pure = all(spec.kind == "recurrent" for spec in layers)
    budget = slots * each if pure else max(2 * slots * each, slots * each + 4000 * probe.bytes_per_token)
    llm = make_llm(hybrid, kv_cache_memory=budget, max_num_seqs=3, checkpoint_interval=INTERVAL)
    if pure:
        assert states(llm).parts.recurrent.table.pool.num_pages == slots
    rng = random.Random(slots)
    documents = [random_tokens(90, seed=seed) for seed in range(2)]
    for turn in range(8):
        prompts = [
            [*rng.choice(documents)[: rng.randint(1, 90)], *random_tokens(rng.randint(1, 9), seed=turn)]
            for _ in range(rng.randint(1, 4))
        ]
        for prompt, output in zip(prompts, llm.generate(prompts, greedy(4)), strict=True):
            assert output.outputs[0].finish_reason == "length"
            assert hybrid.continues(prompt, output.outputs[0].token_ids)
        check(llm)


def test_checkpoints_go_before_cached_sequences(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    first = random_tokens(100)
    llm.generate(first, greedy(2))
    pool = states(llm).parts.recurrent.table.pool
    others = pool.take(pool.num_free - 1)
    # Two prompts at once need more than the slot that is left.
    prompts = [random_tokens(20, seed=seed) for seed in (1, 2)]
    for prompt, output in zip(prompts, llm.generate(prompts, greedy(2)), strict=True):
        assert hybrid.continues(prompt, output.outputs[0].token_ids)
    engine = engine_of(llm)
    assert engine.checkpoints is not None
    assert engine.checkpoints.num_dropped > 0
    assert engine.cache is not None
    assert engine.cache.num_evictions == 0
    pool.release(others)
    assert llm.generate([*first, 1], greedy(1))[0].num_cached_tokens == 100


@pytest.mark.turns(1)
def test_sessions_that_were_written_into_keep_their_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    layer = attention_layer(llm)
    session = llm.session(random_tokens(50))
    session.logits()
    rows = session.kv(layer)
    session.set_kv(layer, start=3, k=rows["k"][3:5], v=rows["v"][3:5])
    engine = engine_of(llm)
    assert engine.checkpoints is not None
    assert session._branch.seq is not None
    before = kept(llm, session._branch.seq)
    assert before
    while engine.checkpoints.drop_one():
        pass
    assert kept(llm, session._branch.seq) == before


# -- what is given and refused ---------------------------------------------------------------------


def test_an_interval_for_a_model_without_recurrent_layers(make_llm: MakeLLM, llama: Checkpoint) -> None:
    with pytest.raises(InvalidArgument, match="checkpoint_interval 32: the model has no recurrent layers"):
        make_llm(llama, checkpoint_interval=32)
    llm = make_llm(llama, checkpoint_interval=0)
    runner = engine_of(llm).runner
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    with pytest.raises(Unsupported, match="no recurrent layers"):
        runner.execute(Step(chunks=(Chunk(seq, [1, 2], checkpoints=(1,)),)))
    with pytest.raises(Unsupported, match="no recurrent layers"):
        runner.execute(Step(edits=(DropCheckpoint(seq, 1),)))
    assert runner.state.sequence_length(seq) == 0
    runner.state.remove_sequence(seq)


def test_the_interval_is_chosen_from_the_sizes(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    engine = engine_of(llm)
    assert engine.checkpoints is not None
    assert 64 <= engine.checkpoints.interval <= 1024
    assert engine.checkpoints.interval % 16 == 0
    assert any(f"kept every {engine.checkpoints.interval} tokens" in note for note in llm._parts.notes)


@pytest.mark.parametrize(("asked", "words"), [((0,), "ascending"), ((2, 2), "ascending"), ((6,), r"in 1\.\.5")])
def test_checkpoints_of_a_chunk_are_checked(
    make_llm: MakeLLM, hybrid: Checkpoint, asked: tuple[int, ...], words: str
) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    runner = engine_of(llm).runner
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    with pytest.raises(InvalidArgument, match=words):
        runner.execute(Step(chunks=(Chunk(seq, list(range(5)), checkpoints=asked),)))
    runner.execute(Step(chunks=(Chunk(seq, list(range(5)), checkpoints=(2, 5)),)))
    assert kept(llm, seq) == [2, 5]
    with pytest.raises(InvalidArgument, match="no checkpoint"):
        runner.execute(Step(edits=(DropCheckpoint(seq, 3),)))
    runner.execute(Step(edits=(DropCheckpoint(seq, 2),)))
    assert kept(llm, seq) == [5]
    runner.state.remove_sequence(seq)


# -- the policy alone ------------------------------------------------------------------------------


class Slots:
    """A state with one sequence and its checkpoints, each in a slot of its own."""

    def __init__(self, spare: int, positions: dict[SeqId, list[int]], length: int = 10_000) -> None:
        self.spare, self.positions, self.length = spare, positions, length

    def spare_states(self, seq_ids: Sequence[SeqId], append_lengths: Sequence[int]) -> int:
        return self.spare

    def loose_checkpoints(self) -> dict[int, list[tuple[SeqId, int]]]:
        every = [(seq, position) for seq, held in self.positions.items() for position in held]
        return {slot: [one] for slot, one in enumerate(every)}

    def kept_positions(self, seq_id: SeqId) -> list[int]:
        return [0, *self.positions[seq_id], self.length]


def policy(slots: Slots, interval: int, ages: dict[SeqId, int]) -> tuple[Checkpoints, list[tuple[SeqId, int]]]:
    dropped: list[tuple[SeqId, int]] = []

    class Sequences:
        def ages(self) -> dict[SeqId, int]:
            return ages

        def apply(self, edit: Edit) -> None:
            assert isinstance(edit, DropCheckpoint)
            slots.positions[edit.seq].remove(edit.position)
            dropped.append((edit.seq, edit.position))

    return Checkpoints(slots, interval, Sequences()), dropped


def request(length: int, computed: int, seq: SeqId = 0, **changes: Any) -> Request:
    return made_request(range(length), seq=seq, computed=computed, reusable=True, **changes)


def test_what_saves_least_goes_first_and_of_equals_the_oldest() -> None:
    slots = Slots(-1, {1: [64, 128, 130], 2: [64, 128], 3: [10]})
    made, dropped = policy(slots, 64, {1: 1, 2: 0, 3: 2})
    while made.drop_one():
        pass
    # 2 tokens; 10 tokens; then 64 each, of the sequence used longest ago first, where the second
    # now saves 128.
    assert dropped == [(1, 130), (3, 10), (2, 64), (1, 64), (2, 128), (1, 128)]


def test_states_of_others_are_never_given_up() -> None:
    slots = Slots(-1, {1: [64], 2: [32]})
    made, dropped = policy(slots, 32, {1: 0})
    assert made.free_state_slots([1], [1])
    assert not made.free_state_slots([1], [1])
    assert dropped == [(1, 64)]


def test_nothing_is_given_up_where_states_are_not_short() -> None:
    made, dropped = policy(Slots(0, {1: [64]}), 64, {1: 0})
    assert not made.free_state_slots([1], [1])
    assert not dropped


def test_wishes_are_multiples_branches_and_never_the_beginning() -> None:
    made, _ = policy(Slots(100, {0: []}), 16, {})
    assert made.wishes([request(100, 0, branch_points={0, 5, 40, 77})], [64]) == [(5, 16, 32, 40, 48, 64)]
    assert made.wishes([request(100, 15)], [1]) == [(1,)]
    assert made.wishes([request(100, 16)], [1]) == [()]
    made, _ = policy(Slots(100, {0: []}), 0, {})
    assert made.wishes([request(100, 30, branch_points={31, 77})], [64]) == [(1, 47)]
    lonely = request(100, 0)
    lonely.branch.reusable = False
    assert made.wishes([lonely], [64]) == [()]


def test_wishes_take_what_is_left_and_displace_what_saves_no_more() -> None:
    # Room for one within the chunk; the one at its end takes none.
    made, dropped = policy(Slots(1, {0: [], 1: [100]}), 16, {})
    assert made.wishes([request(100, 0)], [48]) == [(16, 48)]
    assert not dropped
    # One of another sequence saves 8 tokens only.
    made, dropped = policy(Slots(0, {0: [], 1: [8, 108]}), 16, {1: 0})
    assert made.wishes([request(100, 0)], [40]) == [(16,)]
    assert dropped == [(1, 8)]


# -- what a review found ---------------------------------------------------------------------------


def test_a_written_state_is_what_one_comes_back_to(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """A checkpoint of before the write does not bring the old state back, by rewind, fork, or a
    cancelled run.
    """
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    tokens = random_tokens(33)  # what comes before the last token ends on a multiple of the interval
    layer = next(layer for layer, spec in enumerate(llm.model.layer_specs) if spec.kind == "recurrent")

    def written() -> Any:
        session = llm.session(tokens)
        session.set_kv(layer, **{name: 0 * state + 1 for name, state in session.kv(layer).items()})
        return session

    wanted = written().generate(greedy(6)).outputs[0].token_ids
    assert not hybrid.continues(tokens, wanted)
    session = written()
    session.generate(greedy(8))
    assert session.rewind(to=32) == 0
    session.append(tokens[32:])
    branch = session.fork(at=32)
    branch.append(tokens[32:])
    for one in (session, branch):
        assert one.modified
        assert one.generate(greedy(6)).outputs[0].token_ids == wanted


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_a_written_session_stays_usable_when_slots_fill(make_llm: MakeLLM, hybrid: Checkpoint, kind: str) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", max_num_seqs=3)
    layer = attention_layer(llm) if kind == "full" else recurrent_layer(llm)
    tokens = random_tokens(40)
    session = llm.session(tokens)
    found = session.kv(layer)
    session.set_kv(layer, **{name: -rows for name, rows in found.items()})
    session.append(random_tokens(7, seed=3))
    session.generate(greedy(2))
    wanted = session.fork().generate(greedy(5)).outputs[0].token_ids
    session.logits()
    loaded = llm.session_from_bytes(session.to_bytes())
    pool = states(llm).parts.recurrent.table.pool
    for seed in range(pool.num_pages):
        llm.generate(random_tokens(60, seed=seed), greedy(2))
    assert not pool.num_free
    for one in (session, loaded):
        assert one.generate(greedy(5)).outputs[0].token_ids == wanted


def test_going_back_uses_the_nearer_of_ones_own_states_and_the_cache(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=INTERVAL)
    tokens = random_tokens(170)
    session = llm.session(tokens)
    session.logits()
    # The cache has the first tokens only.
    llm.reset_prefix_cache()
    llm.generate(tokens[:20], greedy(1))
    assert session.rewind_cost(150) == session.rewind(to=150) == 6
    turn = random_tokens(5, seed=1)

    def generate() -> None:
        session.append(turn)
        assert hybrid.continues([*tokens[:150], *turn], session.generate(greedy(2)).outputs[0].token_ids)

    assert tokens_run(generate, llm) == 6 + 5 + 2 - 1


def test_reading_undoes_no_write(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    layer = attention_layer(llm)
    recurrent = recurrent_layer(llm)
    found = []
    for read in (False, True):
        session = llm.session(random_tokens(20))
        session.set_kv(layer, start=19, **{name: -9 * rows[19:] for name, rows in session.kv(layer).items()})
        if read:
            session.kv(recurrent)
        session.append([7, 8])
        found.append(session.generate(greedy(6)).outputs[0].token_ids)
    assert found[0] == found[1]
    assert not hybrid.continues([*random_tokens(20), 7, 8], found[0])


def test_a_write_makes_room_at_the_cost_of_the_cache(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=160, page_size=16)
    session = llm.session(random_tokens(40))
    session.compute()
    twin = session.fork()
    for seed in range(8):
        llm.generate(random_tokens(15, seed=seed), greedy(1))
    assert not states_free(llm)
    rows = session.kv(0)
    session.set_kv(0, **rows)
    assert session.modified
    assert llama.continues(random_tokens(40), twin.generate(greedy(3)).outputs[0].token_ids)


def states_free(llm: LLM) -> int:
    return engine_of(llm).runner.state.num_available_pages()


def test_many_alike_prompts_are_queued_quickly(make_llm: MakeLLM, hybrid: Checkpoint, monkeypatch: Any) -> None:
    """Comparisons grow with the number of prompts and not with its square."""
    from quire.engine import checkpoints

    llm = make_llm(hybrid, kv_cache_memory="4MiB")
    counted = [0]
    compare = checkpoints.common_prefix

    def counting(*given: Any) -> int:
        counted[0] += 1
        return compare(*given)

    monkeypatch.setattr(checkpoints, "common_prefix", counting)
    engine = engine_of(llm)
    begin = random_tokens(40)
    for seed in range(100):
        engine.submit(np.array([*begin, *random_tokens(5, seed=seed)]), greedy(1))
    assert counted[0] <= 100 * checkpoints.COMPARED
    engine.fail_all(FailedPrecondition("enough"))
    assert engine.checkpoints is not None
    assert not engine.checkpoints.branch_points
