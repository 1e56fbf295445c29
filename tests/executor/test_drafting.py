"""Executors of type Speculative: their own drafts, of the engine's proposers, change no token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from tests.executor import recurrent
from tests.executor.conftest import (
    VOCAB,
    Tiny,
    assert_close,
    check_pages,
    forget_tokens,
    inputs,
    make_executor,
    make_tiny,
    prompt,
    refused,
    some_ids,
    token,
)
from tests.executor.recurrent import Hybrid
from tests.executor.test_factory import FACTORY, config_of

from quire.base.errors import Cancelled, InvalidArgument, QuireError
from quire.base.sampling_params import SamplingParams
from quire.contracts.executor import ExecutorType
from quire.executor.drafting import Drafting
from quire.executor.executor import Executor
from quire.executor.handle import handle_of
from quire.executor.llm_executor import LlmExecutor
from quire.executor.request_sampling import ParamsSampling
from quire.kv.state import State
from quire.speculation.controller import Controller
from quire.speculation.draft_model import DraftModel
from quire.speculation.proposer import Context, Draft

SPECULATIVE = ExecutorType.SPECULATIVE
PROMPTS = [[(7 * place * place + 3 * count) % VOCAB for place in range(count)] for count in (6, 11, 3)]
STEPS = 24


class Everything(Controller):
    """Takes all drafts, whatever they cost."""

    def may_gain(self, *_: int) -> bool:
        return True

    def depths(self, promises: Sequence[Sequence[float]], *, decodes: int, rows: int, most: int) -> list[int]:
        return [len(chain) for chain in promises]


class Told:
    """Proposes what it was told that rows will say, with errors."""

    name = "told"

    def __init__(self, known: Sequence[Sequence[int]], right: float = 0.8) -> None:
        self.rng, self.known, self.right = random.Random(3), [list(one) for one in known], right
        self.asked = 0
        self.held: set[Any] = set()

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        self.asked += 1
        return [self._draft(context, count) for context, count in zip(contexts, most, strict=True)]

    def _draft(self, context: Context, most: int) -> Draft:
        self.held.add(context.name)
        ids = context.ids.tolist()
        found = next((one[len(ids) :] for one in self.known if one[: len(ids)] == ids), [])[:most]
        tokens = [one if self.rng.random() < self.right else self.rng.randrange(VOCAB) for one in found]
        return Draft(tokens, [1.0] * len(tokens))

    def ended(self, context: Context) -> None:
        self.held.discard(context.name)


class Failing(Told):
    name = "failing"

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        raise ZeroDivisionError("no drafts today")


class Outside(Told):
    name = "outside"

    def _draft(self, context: Context, most: int) -> Draft:
        return Draft([VOCAB] * most, [1.0] * most)


def drafting(proposer: Any, depth: int = 5) -> Drafting:
    made = Drafting(proposer, depth, VOCAB)
    made.controller = Everything()
    return made


def sampled(
    executor: Executor, params: Sequence[SamplingParams], prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    """Tokens behind prompts, of which the last token runs with the first draw."""
    cache = executor.prefill(padded(prompts)).kv_cache.cache
    last = inputs(*[ids[-1:] for ids in prompts])
    found = LlmExecutor(executor).sample_tokens_batch(STEPS, last, cache, sampling=list(params))
    for row, (ids, tokens) in enumerate(zip(prompts, found, strict=True)):
        assert cache.token_ids(row).tolist() == [*ids, *tokens[:-1]]
    cache.release()
    return found


def padded(prompts: Sequence[list[int]]) -> Any:
    width = max(map(len, prompts)) - 1
    rows = [[1] * (len(ids) - 1) + [0] * (width - len(ids) + 1) for ids in prompts]
    ids = [one[:-1] + [0] * (width - len(one) + 1) for one in prompts]
    return prompt(*ids, attention_mask=torch.tensor(rows))


GREEDY = [SamplingParams(temperature=0)] * len(PROMPTS)
DRAWN = [
    SamplingParams(temperature=1.1, seed=1),
    SamplingParams(temperature=0.7, top_k=9, seed=2, repetition_penalty=1.3),
    SamplingParams(temperature=1.3, top_p=0.8, presence_penalty=1.0, seed=3),
]


@pytest.mark.product(2)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_drafts_change_no_token(tiny: Tiny, params: list[SamplingParams], right: float) -> None:
    plain = sampled(make_executor(tiny), params)
    told = Told([ids + tokens for ids, tokens in zip(PROMPTS, plain, strict=True)], right)
    executor = make_executor(tiny, executor_type=SPECULATIVE, drafting=drafting(told))
    assert sampled(executor, params) == plain
    assert told.asked == 4 if right == 1.0 else told.asked > 4  # 24 tokens, six in a forward
    executor.pool.sweep()
    executor.prefill(prompt([1]))
    assert not told.held, "rows that are gone are forgotten"
    check_pages(executor)


def test_a_proposer_is_not_asked_for_drafts_that_cannot_pay(llama: Tiny) -> None:
    """Where a further row takes as long as the first one. It knows the least chance of others."""
    plain = sampled(make_executor(llama), GREEDY)
    leasts: list[float] = []

    class Watches(Told):
        def _draft(self, context: Context, most: int) -> Draft:
            leasts.append(context.least)
            return super()._draft(context, most)

    for dear in (True, False):
        told = Watches([ids + tokens for ids, tokens in zip(PROMPTS, plain, strict=True)], 1.0)
        made = Drafting(told, 5, VOCAB)
        costs = made.controller.costs
        costs.measured = lambda *_: None  # type: ignore[method-assign]
        costs.seconds = lambda rows, dear=dear: float(rows) if dear else 1.0  # type: ignore[method-assign, misc]
        executor = make_executor(llama, executor_type=SPECULATIVE, drafting=made)
        assert sampled(executor, GREEDY) == plain
        assert bool(told.asked) is not dear
    assert set(leasts) == {Controller.least(len(GREEDY))}


def test_large_batches_measure_what_a_draft_costs(llama: Tiny) -> None:
    """Until then they have few drafts."""
    prompts = [[3 + row, 5, 7 + row] for row in range(12)]
    params = [SamplingParams(temperature=0)] * len(prompts)
    plain = sampled(make_executor(llama), params, prompts)
    told = Told([ids + tokens for ids, tokens in zip(prompts, plain, strict=True)])
    parts = drafting(told)
    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=parts)
    assert sampled(executor, params, prompts) == plain
    assert parts.controller.costs.wide_steps > 0


@pytest.mark.parametrize("states", [64, 5])
def test_recurrent_rows(hybrid: Hybrid, states: int) -> None:
    """``states``: slots for a tree of each row, and too few for that, so that chains run again."""
    plain = sampled(recurrent.make_executor(hybrid, states=64), GREEDY)
    told = Told([ids + tokens for ids, tokens in zip(PROMPTS, plain, strict=True)])
    executor = recurrent.make_executor(hybrid, states=states + 4, executor_type=SPECULATIVE, drafting=drafting(told))
    assert sampled(executor, GREEDY) == plain
    assert told.asked < STEPS
    recurrent.check(executor)


def test_what_a_call_repeats_is_looked_up(llama: Tiny) -> None:
    ids = some_ids(8) * 3
    plain = sampled(make_executor(llama), GREEDY[:1], [ids])
    executor = make_executor(llama, executor_type=SPECULATIVE)
    assert executor.drafting is not None
    assert executor.drafting.proposer.name == "lookup"
    for _ in range(2):  # The second time the outputs of the first one are known.
        assert sampled(executor, GREEDY[:1], [ids]) == plain
    metrics = executor.operation_metrics.summary()
    assert metrics.decode_operations < 2 * STEPS


def test_rows_that_went_back_are_read_anew(llama: Tiny) -> None:
    wrong = []

    class Watches(Told):
        before: tuple[int, ...] = ()

        def _draft(self, context: Context, most: int) -> Draft:
            ids = tuple(context.ids.tolist())
            if ids[: len(self.before)] != self.before:
                wrong.append((self.before, ids))  # one request never goes back; an error would drop the proposer
            self.before = ids
            return super()._draft(context, most)

        def ended(self, context: Context) -> None:
            self.before = ()
            super().ended(context)

    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=drafting(Watches([])))
    cache = executor.prefill(prompt(PROMPTS[0])).kv_cache.cache
    for length, last in ((6, 5), (9, 9), (9, 2), (3, 9), (3, 4)):
        executor.truncate_kv(cache, length)
        LlmExecutor(executor).sample_tokens(4, inputs([last]), cache)
    assert wrong == []


class Breaks(ParamsSampling):
    left = 19

    def draw(self, logits_1V: torch.Tensor) -> int:
        if not self.left:
            raise QuireError("no more")
        self.left -= 1
        return super().draw(logits_1V)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny("Mistral", tmp_path_factory.mktemp("windowed"), sliding_window=6)


@pytest.mark.parametrize("kind", ["llama", "windowed"])
def test_a_failing_sampling_leaves_the_cache(kind: str, request: pytest.FixtureRequest) -> None:
    """Also where a window has let go of the tokens before the call."""
    tiny, ids = request.getfixturevalue(kind), some_ids(6)
    known = sampled(make_executor(tiny), GREEDY[:1], [ids])[0]
    executor = make_executor(tiny, executor_type=SPECULATIVE, drafting=drafting(Told([ids + known], 1.0)))
    llm = LlmExecutor(executor)
    cache = llm.create_kv_cache(dynamic=True)
    llm.prefill(inputs(ids[:-1]), cache)
    before = handle_of(cache)
    llm._samplings.append(Breaks(GREEDY[0], ids, vocab_size=VOCAB))
    with pytest.raises(QuireError, match="no more"):
        llm.sample_tokens(STEPS, inputs(ids[-1:]), cache)
    assert (cache.lengths, cache.capacity) == ((len(ids) - 1,), len(ids) - 1)
    assert before.is_valid
    assert_close(executor.decode(token(before, ids[-1])).logits[0], tiny.logits(ids)[-1])
    cache.release()
    assert executor.pool.state.empty()
    check_pages(executor)


@pytest.mark.parametrize("states", [64, 2])
def test_a_failing_sampling_leaves_states_that_no_replay_reaches(hybrid: Hybrid, states: int) -> None:
    executor = recurrent.make_executor(hybrid, states=states, executor_type=SPECULATIVE, drafting=drafting(Told([])))
    cache = executor.prefill(prompt(some_ids(9))).kv_cache.cache
    forget_tokens(cache.rows[0])
    llm = LlmExecutor(executor)
    llm._samplings.append(Breaks(GREEDY[0], vocab_size=executor.pool.facts.vocab_size))
    with pytest.raises(QuireError, match="no more" if states > 2 else "slots for recurrent states are missing"):
        llm.sample_tokens(STEPS, inputs([3]), cache)
    assert cache.lengths == (9,)
    recurrent.check(executor)


def test_windows_make_room_between_drafts(windowed: Tiny) -> None:
    """Twice as many tokens as the pool has slots."""
    found = []
    for kind in ({}, {"executor_type": SPECULATIVE, "drafting": drafting(Told([]))}):
        executor = make_executor(windowed, tokens=32, window_tokens=32, **kind)
        cache = executor.prefill(prompt(PROMPTS[0])).kv_cache.cache
        found.append(LlmExecutor(executor).sample_tokens(64, inputs([3]), cache))
    assert found[0] == found[1]


def test_a_cancelled_call_keeps_complete_forwards(llama: Tiny) -> None:
    ids = some_ids(6)
    known = sampled(make_executor(llama), GREEDY[:1], [ids])[0]
    told = Told([ids + known], 1.0)
    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=drafting(told))

    class Cancels(Told):
        def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
            if self.asked == 2:
                executor.cancel()
            return super().propose(contexts, most)

    executor.drafting = drafting(Cancels([ids + known], 1.0))
    llm = LlmExecutor(executor, kv_increment_size=40)
    cache = llm.create_kv_cache(dynamic=True)
    llm.prefill(inputs(ids[:-1]), cache)
    with pytest.raises(Cancelled) as caught:
        llm.sample_tokens(STEPS, inputs(ids[-1:]), cache)
    assert caught.value.token_ids == known[:12]
    assert cache.capacity == len(ids) - 1 + 40
    assert cache.token_ids(0).tolist() == ids + known[:11]


@pytest.mark.parametrize("proposer", [Failing, Outside])
def test_a_proposer_that_fails_is_dropped(llama: Tiny, proposer: Any) -> None:
    plain = sampled(make_executor(llama), GREEDY)
    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=drafting(proposer([])))
    assert sampled(executor, GREEDY) == plain
    assert executor.drafting is not None
    assert executor.drafting.dropped.startswith(f"the proposer {proposer.name} ")


def test_a_proposer_that_fails_to_forget_a_row_is_dropped(llama: Tiny) -> None:
    """The call counts, of which a row that went back or a released cache is a part."""

    class Unforgetting(Told):
        def ended(self, context: Context) -> None:
            raise ZeroDivisionError("cannot let go")

    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=drafting(Unforgetting([])))
    assert executor.drafting is not None
    cache = executor.prefill(prompt(PROMPTS[0])).kv_cache.cache
    LlmExecutor(executor).sample_tokens(4, inputs([3]), cache)
    assert not executor.drafting.dropped
    executor.truncate_kv(cache, 5)
    assert len(LlmExecutor(executor).sample_tokens(4, inputs([3]), cache)) == 4
    assert executor.drafting.dropped == "the proposer told raised ZeroDivisionError: cannot let go"
    executor.release_cache(cache.cache_id)
    assert executor.pool.state.empty()


# -- speculative_decode ----------------------------------------------------------------------------


def test_a_batch_is_its_calls(tiny: Tiny, executor: Executor) -> None:
    best = sampled(executor, GREEDY)
    drafts = [best[0][1:4], [*best[1][1:3], (best[1][3] + 1) % VOCAB], []]
    handles = [executor.prefill(prompt(ids)).kv_cache for ids in PROMPTS]
    copies = [executor.prefill(prompt(ids)).kv_cache for ids in PROMPTS]
    given = [token(handle, tokens[0]) for handle, tokens in zip(handles, best, strict=True)]
    found = executor.batch_speculative_decode(given, drafts, 1.0)
    assert [one.acceptance_count for one in found] == [3, 2, 0]
    for handle, tokens, draft, output in zip(copies, best, drafts, found, strict=True):
        alone = executor.speculative_decode(token(handle, tokens[0]), draft, 1.0)
        assert alone.accepted_tokens == output.accepted_tokens
        assert_close(alone.next_logits, output.next_logits)
        assert alone.kv_cache.sequence_length == output.kv_cache.sequence_length
    trees = [[-1, 0], None, [-1, -1]]
    given = [token(output.kv_cache, 5) for output in found]
    outputs = executor.batch_speculative_decode(given, [[1, 2], [3], [4, 6]], 0.0, draft_parents=trees)
    assert [one.acceptance_count for one in outputs] == [2, 1, 1]
    assert executor.batch_speculative_decode([], [], 1.0) == []


def test_recurrent_batches(hybrid: Hybrid) -> None:
    for states in (64, 9):
        executor = recurrent.make_executor(hybrid, states=states)
        best = sampled(executor, GREEDY)
        drafts = [best[0][1:4], [*best[1][1:3], (best[1][3] + 1) % VOCAB], best[2][1:2]]
        handles = [executor.prefill(prompt(ids)).kv_cache for ids in PROMPTS]
        given = [token(handle, tokens[0]) for handle, tokens in zip(handles, best, strict=True)]
        found = executor.batch_speculative_decode(given, drafts, 1.0)
        assert [one.acceptance_count for one in found] == [3, 2, 1]
        for tokens, output in zip(best, found, strict=True):
            count = 1 + output.acceptance_count
            assert int(output.next_logits.argmax()) == tokens[count]
            assert int(executor.decode(token(output.kv_cache, tokens[count])).logits.argmax()) == tokens[count + 1]
        recurrent.check(executor)


def test_own_drafts(llama: Tiny) -> None:
    best = sampled(make_executor(llama), GREEDY)
    told = Told([ids + tokens for ids, tokens in zip(PROMPTS, best, strict=True)], 1.0)
    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=drafting(told))
    handles = [executor.prefill(prompt(ids)).kv_cache for ids in PROMPTS]
    given = [token(handle, tokens[0]) for handle, tokens in zip(handles, best, strict=True)]
    found = executor.batch_speculative_decode(given, None, 1.0)
    assert [one.accepted_tokens for one in found] == [tuple(tokens[1:6]) for tokens in best]
    params = SamplingParams(temperature=1.0, seed=4)
    sampling = ParamsSampling(params, vocab_size=VOCAB)
    output = executor.speculative_decode(token(found[0].kv_cache, best[0][6]), None, 1.0, sampling=sampling)
    assert output.next_probs is not None
    assert float(output.next_probs.sum()) == pytest.approx(1.0)


def test_own_drafts_are_asked_for_by_calls_that_are_right(llama: Tiny) -> None:
    """A proposer that is asked learns of the row, so a refused call does not ask."""
    told = Told([])
    executor = make_executor(llama, executor_type=SPECULATIVE, drafting=drafting(told))
    handle = executor.prefill(prompt(PROMPTS[0])).kv_cache
    for match, given in (
        ("sampling must be a RequestSampling", {"sampling": SamplingParams()}),
        ("draft_probabilities belong to draft_tokens", {"draft_probabilities": torch.full((1, VOCAB), 1 / VOCAB)}),
        ("draft_parents belong to draft_tokens", {"draft_parents": [-1]}),
    ):
        with refused(InvalidArgument, executor, handle.cache, match=match):
            executor.speculative_decode(token(handle, 1), None, 1.0, **given)
    assert (told.asked, told.held) == (0, set())


def test_certain_drafts_keep_the_targets_distribution(llama: Tiny) -> None:
    from tests.executor.test_speculation import Given

    from quire.executor.acceptance import rejection_sample
    from quire.executor.request_sampling import draw_from

    target = torch.tensor([[0.4, 0.0, 0.35, 0.25], [0.1, 0.2, 0.3, 0.4]])
    sampling, counts = Given(target, 3), [0] * 4
    for _ in range(4000):
        result = rejection_sample(torch.zeros(2, 4), [2], None, sampling)
        assert result.next_probs is not None
        counts[2 if result.accepted else draw_from(result.next_probs[0], sampling.uniform())] += 1
    chi = sum((n - 4000 * float(p)) ** 2 / (4000 * float(p)) for n, p in zip(counts, target[0], strict=True) if p)
    assert chi < 27.7
    assert not counts[1]


def test_wrong_calls(llama: Tiny, ex: Executor) -> None:
    a, b = (ex.prefill(prompt(ids)).kv_cache for ids in PROMPTS[:2])
    caches = [a.cache, b.cache]
    both = [token(a, 1), token(b, 1)]
    for match, call in (
        ("only type 'Speculative' has", lambda: ex.speculative_decode(token(a, 1), None, 1.0)),
        ("draft_tokens has 1 entries for 2 inputs", lambda: ex.batch_speculative_decode(both, [[1]], 1.0)),
        ("item 1: draft_tokens: token id 97", lambda: ex.batch_speculative_decode(both, [[1], [VOCAB]], 1.0)),
        ("continue the same cache", lambda: ex.batch_speculative_decode([token(a, 1)] * 2, [[1], [2]], 1.0)),
        ("acceptance_threshold must be", lambda: ex.batch_speculative_decode(both, [[1], [2]], 1.5)),
    ):
        with refused(InvalidArgument, ex, *caches, match=match):
            call()
    with pytest.raises(InvalidArgument, match="drafting is for executor_type 'Speculative'"):
        make_executor(llama, drafting=drafting(Told([])))


# -- the factory -----------------------------------------------------------------------------------


def test_the_factory_makes_them(llama: Tiny) -> None:
    made = FACTORY.create_executor(config_of(llama, executor_type="Speculative"))
    assert made.drafting is not None
    assert (made.drafting.proposer.name, made.drafting.depth) == ("lookup", 32)
    assert made.capabilities().supports_continuous_batching
    options = {"speculative": {"method": "draft", "model": str(llama.path), "depth": 3}, "kv_dtype": "bfloat16"}
    made = FACTORY.create_batch_executor(config_of(llama, executor_type="Speculative", executor_options=options))
    assert made.drafting is not None
    assert isinstance(made.drafting.proposer, DraftModel)
    assert cast(State, made.pool.state).dtype == torch.bfloat16
    made.drafting.controller = Everything()
    plain = FACTORY.create_executor(config_of(llama, executor_options={"kv_dtype": "bfloat16"}))
    assert sampled(made, GREEDY) == sampled(plain, GREEDY)
    with pytest.raises(InvalidArgument, match=r"executor_options.speculative belongs to executor_type 'Speculative'"):
        config_of(llama, executor_options={"speculative": "lookup"})
    with pytest.raises(QuireError, match=r"executor_options.kv_dtype"):
        config_of(llama, executor_options={"kv_dtype": "float13"})
