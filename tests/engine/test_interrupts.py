"""Ctrl-C at any line of any verb, and at any moment: what was interrupted is done, or undone, and
everything goes on.

The sweep sends a signal at one line after the other of the packages that hold state. ``make test``
takes a sample of the lines, ``make test-all`` all of them. After each, books are checked and the
model's tokens compared with those of transformers.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, make_checkpoint, make_family, random_tokens

import quire
from quire import LLM, AsyncLLM, BeamSearchParams, CacheHints, Pin
from quire.base import interrupts
from quire.base.errors import QuireError
from quire.contracts.executor_calls import PrefillInput
from quire.kv.contract import ContractState
from quire.sessions.session import Session
from quire.sessions.stream import SessionStream

PACKAGE = Path(quire.__file__).parent
FOLDERS = ("branches", "engine", "executor", "kv", "runner", "sessions")
SWEPT = (
    *(str(PACKAGE / name) + os.sep for name in FOLDERS),
    str(PACKAGE / "llm.py"),
    str(PACKAGE / "base/finalizers.py"),
)
HANDS_OVER = (str(PACKAGE / "llm.py"), str(PACKAGE / "sessions") + os.sep)
"""Where verbs hand things over between two locked parts."""
ENDLESS = 1 << 30
PROMPT, OTHER, MORE = random_tokens(21, seed=1), random_tokens(9, seed=2), random_tokens(5, seed=3)

Line = tuple[CodeType, int]


@pytest.fixture(scope="module", params=("llama", "qwen3-next"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A plain model, and a hybrid one."""
    make = make_family if request.param == "qwen3-next" else make_checkpoint
    return make(request.param, tmp_path_factory.mktemp("interrupts") / request.param)


@pytest.fixture(autouse=True)
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT raises ``KeyboardInterrupt``, also where these tests run in the background of a shell,
    which ignores it.

    Python drops the exception of a signal that comes in a finaliser, and says so; pytest would then
    keep the object.
    """
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass
class Bed:
    """What verbs are tried on: a session with some history, in an LLM whose prefix cache holds
    other things.
    """

    llm: LLM
    model: Checkpoint
    session: Session
    folder: Path

    def state_file(self) -> Path:
        path = self.folder / "other.quire"
        if not path.exists():
            with self.llm.session(OTHER) as other:
                other.save(path)
        return path


def generate(bed: Bed) -> None:
    bed.llm.generate([PROMPT, OTHER], [greedy(3), greedy(2, n=2, temperature=1.0, seed=1)])


def new_session(bed: Bed) -> None:
    bed.llm.session(PROMPT[:-3]).close()


def append(bed: Bed) -> None:
    bed.session.append(MORE)


def go_on(bed: Bed) -> None:
    bed.session.generate(greedy(3))


def stream(bed: Bed) -> None:
    for _ in bed.session.stream(greedy(3)):
        pass


def fork(bed: Bed) -> None:
    for child in bed.session.fork(n=2):
        child.append(MORE[:2])


def rewind(bed: Bed) -> None:
    bed.session.rewind(to=len(bed.session) - 7)
    bed.session.logits()


def edit(bed: Bed) -> None:
    bed.session.edit((5, 9), MORE[:2])


def score(bed: Bed) -> None:
    bed.session.score(MORE)


def save_and_load(bed: Bed) -> None:
    bed.session.save(bed.folder / "saved.quire")
    bed.llm.load_session(bed.folder / "saved.quire").generate(greedy(1))


def load(bed: Bed) -> None:
    bed.llm.session_from_bytes(bed.state_file().read_bytes()).close()


def look_and_write(bed: Bed) -> None:
    with bed.session.fork() as child:
        layer = child._engine.runner.state.geometry.layer_ids[0]
        rows = child.kv(layer)
        start = int(rows.pop("positions", torch.zeros(1))[0])
        child.set_kv(layer, start=start, **rows)


def look(bed: Bed) -> None:
    length = len(bed.session)
    bed.session.token(length - 3)
    layers = bed.llm.model.layer_specs
    bed.session.norms(len(layers) - 1)
    if (layer := next((layer for layer, spec in enumerate(layers) if spec.kind != "recurrent"), None)) is not None:
        bed.session.attention(length - 2, layer)
    with bed.session.fork(at=length - 4) as child:
        child.append(MORE[:2])
        child.compare(bed.session)


def beams(bed: Bed) -> None:
    bed.llm.beam_search([OTHER], BeamSearchParams(beam_width=2, max_tokens=2))


def hint(bed: Bed) -> None:
    bed.llm.generate([PROMPT], greedy(1), hints=CacheHints(pins=[Pin(tokens=5), Pin()], demote=7))
    bed.llm.prefetch(OTHER, only_idle=True)


def execute(bed: Bed) -> None:
    executor = bed.llm.executor
    found = executor.prefill(PrefillInput(input_ids=torch.tensor([PROMPT])))
    executor.truncate_kv(found.kv_cache, len(PROMPT) - 4)


def commit(bed: Bed) -> None:
    with storing(bed):
        bed.session.commit("swept", force=True)


def checkout(bed: Bed) -> None:
    with storing(bed), bed.llm.checkout("other") as found:
        found.generate(greedy(1))


@contextmanager
def storing(bed: Bed) -> Iterator[None]:
    """Let state of any length go to the store, and come back."""
    stored = engine_of(bed.llm).stored
    before, stored.least = stored.least, 1
    try:
        yield
    finally:
        stored.least = before


VERBS = (generate, new_session, append, go_on, stream, fork, rewind, score, save_and_load, load, look_and_write, beams)
VERBS = (*VERBS, execute, hint, commit, checkout, edit, look)


def code_of(frame: FrameType) -> CodeType | None:
    """None outside of the packages, and for finalisers: Python drops the exceptions of signals that
    come in those.
    """
    code = frame.f_code
    return code if code.co_filename.startswith(SWEPT) and code.co_name != "__del__" else None


def lines_of(act: Callable[[], None]) -> Counter[Line]:
    """How often each line runs."""
    found: Counter[Line] = Counter()

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            found[frame.f_code, frame.f_lineno] += 1
        return within

    sys.settrace(lambda frame, event, argument: within if code_of(frame) is not None else None)
    try:
        act()
    finally:
        sys.settrace(None)
    return found


@contextmanager
def signal_at(line: Line, time: int) -> Iterator[list[bool]]:
    """SIGINT before the given line runs for the given time; yields whether it was sent."""
    left, sent = [time], [False]

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno == line[1]:
            left[0] -= 1
            if left[0] == 0:
                sent[0] = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return within

    sys.settrace(lambda frame, event, argument: within if frame.f_code is line[0] else None)
    try:
        yield sent
    finally:
        sys.settrace(None)


def fresh(bed: Bed) -> None:
    """Let the session be what it was at first."""
    if not bed.session._live.closed:
        bed.session.close()
    bed.session = bed.llm.session(PROMPT)
    bed.session.append(MORE)
    bed.session.generate(greedy(2))


def assert_whole(bed: Bed, what: str) -> None:
    """All books are right, nothing is under way, and the session and the model go on as ever."""
    engine = engine_of(bed.llm)
    engine.finalizers.run_finalizers()  # what belongs to nobody any more
    assert not engine.requests.by_id, what
    assert engine.scheduler.idle, what
    executor = bed.llm.executor
    assert not executor._operations.busy, what
    executor.pool.sweep()
    assert not list(executor.pool.caches.values()), what
    check(bed.llm)
    if not bed.session._live.closed:
        assert not bed.session._branch.busy, what
        tokens = bed.session.tokens
        found = bed.session.generate(greedy(2)).outputs[0].token_ids
        assert bed.model.continues(tokens, found), f"{what}: wrong tokens of the session"
        bed.session.close()
    found = bed.llm.generate([PROMPT], greedy(2))[0].outputs[0].token_ids
    assert bed.model.continues(PROMPT, found), f"{what}: wrong tokens of a prompt"
    left = sorted(path.name for path in bed.folder.iterdir())
    assert all(name.endswith(".quire") for name in left), f"{what}: {left}"
    bed.llm.reset_prefix_cache()
    state = engine.runner.state
    assert not engine.branches.sessions, f"{what}: {engine.branches.sessions}"
    assert state.empty(), f"{what}: {state.num_used_pages} pages are left"
    state.check()


@pytest.fixture
def bed(make_llm: MakeLLM, model: Checkpoint, tmp_path: Path) -> Bed:
    """Its store is for commits alone: no state is long enough."""
    llm = make_llm(model, host_memory=0, store=[f"file://{tmp_path / 'store'}"])
    stored, folder = engine_of(llm).stored, tmp_path / "files"
    stored.keep = lambda *_, **__: None  # type: ignore[method-assign]
    stored.is_worth = lambda *_: True
    folder.mkdir()
    found = Bed(llm, model, llm.session(PROMPT), folder)
    with storing(found), llm.session(OTHER) as other:
        other.commit("other")
    stored.least = ENDLESS
    return found


def sweep(
    bed: Bed,
    verb: Callable[[Bed], None],
    stride: int,
    closer: tuple[str, ...] = (),
    *,
    closer_stride: int = 16,
    first_time: bool = False,
) -> int:
    """Interrupt a verb at every ``stride``-th of its lines, and at every ``closer_stride``-th of
    the files in ``closer``; how often that took effect.

    Which lines these are differs from verb to verb. A line that runs several times is interrupted
    at one of them, at random or with ``first_time`` at the first, which may be before the verb has
    its lock.
    """
    if verb is look_and_write and not hasattr(bed.llm._engine.runner.state, "layer_ids"):
        pytest.skip("no attention layer to write into")
    fresh(bed)
    verb(bed)  # once for what is made at the first use only
    gc.collect()
    fresh(bed)
    counts = lines_of(lambda: verb(bed))
    gc.collect()
    rng = random.Random(verb.__name__)
    raised, stride = 0, min(stride, len(counts) // 4)
    first = rng.randrange(stride)
    for number, line in enumerate(counts):
        is_close = line[0].co_filename.startswith(closer) and number % closer_stride == first % closer_stride
        if number % stride != first and not is_close:
            continue
        fresh(bed)
        what = f"{verb.__name__}, interrupted at {line[0].co_filename}:{line[1]}"
        with signal_at(line, 1 if first_time else rng.randint(1, counts[line])):
            try:
                verb(bed)
                interrupts.check()  # what came in a finaliser waits for the next verb
            except KeyboardInterrupt:
                raised += 1
        assert_whole(bed, what)
    return raised


@pytest.mark.product(3)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_a_sample_of_all_lines(bed: Bed, verb: Callable[[Bed], None]) -> None:
    plain = bed.model.path.name == "llama"
    assert sweep(bed, verb, 422 if plain else 802, HANDS_OVER if plain else ()) > 1


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_many_lines_between_the_parts_of_an_append(bed: Bed) -> None:
    assert sweep(bed, append, ENDLESS, (str(PACKAGE / "sessions/edits.py"),), closer_stride=3) > 4


def test_a_session_stays_held_whenever_it_is_looked_up(bed: Bed) -> None:
    """At every one of the times that these lines run, also before the parameters of a call are
    checked.
    """
    fresh(bed)
    counts = {line: count for line, count in lines_of(lambda: go_on(bed)).items() if line[0].co_name == "note_use"}
    assert sum(counts.values()) >= 6
    for line, count in counts.items():
        for hit in range(1, count + 1):
            fresh(bed)
            with signal_at(line, hit), suppress(KeyboardInterrupt):
                go_on(bed)
                interrupts.check()
            assert_whole(bed, f"interrupted at {line[0].co_filename}:{line[1]}, the {hit}. time")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("first_time", [False, True], ids=["any time", "first time"])
def test_all_lines(bed: Bed, verb: Callable[[Bed], None], first_time: bool) -> None:
    assert sweep(bed, verb, 1, first_time=first_time) > 200


class Alarm(BaseException):
    """What the handler of the timer raises, as somebody's time limit does."""


def ring(number: int, frame: FrameType | None) -> None:
    raise Alarm


def seconds_of(verb: Callable[[Bed], None], bed: Bed) -> float:
    """The time of one call, so that the timer rings as often on a fast machine."""
    fresh(bed)
    began = time.perf_counter()
    verb(bed)
    return time.perf_counter() - began


def interrupted_at_random(bed: Bed, rounds: int, seed: int) -> int:
    """Call verbs while a timer rings; how often it interrupted one."""
    rng = np.random.default_rng(seed)
    before = signal.signal(signal.SIGALRM, ring)
    rung = 0
    try:
        most = min(0.02, 2 * statistics.median(seconds_of(verb, bed) for verb in VERBS))
        fresh(bed)
        for number in range(rounds):
            verb = VERBS[rng.integers(len(VERBS))]
            if not len(PROMPT) < len(bed.session) < 150:
                fresh(bed)
            try:
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-5, most)))
                verb(bed)
                interrupts.check()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                rung += 1
            except QuireError as error:
                raise AssertionError(f"round {number}, {verb.__name__}: {error}") from error
            # What belongs to nobody any more goes with the next step or call, if its finaliser was
            # interrupted.
            engine_of(bed.llm).finalizers.run_finalizers()
            bed.llm.executor.pool.sweep()
            check(bed.llm)
            assert not bed.session._branch.busy
            if number % 7 == 0:
                tokens = bed.session.tokens
                found = bed.session.generate(greedy(1)).outputs[0].token_ids
                assert bed.model.continues(tokens, found), f"round {number}, {verb.__name__}"
            if number % 29 == 0:
                assert_whole(bed, f"round {number}, {verb.__name__}")
                fresh(bed)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_whole(bed, "at the end")
    return rung


def test_signals_at_any_moment(bed: Bed) -> None:
    assert interrupted_at_random(bed, 45, seed=0) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_thousand_signals(bed: Bed) -> None:
    rung, seed = 0, 1
    while rung < 2000:
        rung += interrupted_at_random(bed, 500, seed)
        seed += 1


def by_hand(state: Any) -> None:
    """Verbs of a KV state that somebody calls without an engine."""
    state.add_sequence(-1)
    state.begin_forward([-1], [40])
    state.abort_forward()
    state.begin_forward([-1], [40])
    state.end_forward(skipped=set(state.geometry.layer_ids))
    state.fork_sequence(-1, -2, 40)
    state.begin_forward([-2, -1], [3, 1])
    state.end_forward(skipped=set(state.geometry.layer_ids))
    state.popn(-2, 0)
    state.remove_sequence(-1)
    state.remove_sequence(-2)


def test_verbs_of_a_state_by_hand(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    """Each of them is done or is not."""
    state = engine_of(make_llm(checkpoints["gemma3"])).runner.state
    face = ContractState(state)  # type: ignore[arg-type]
    counts = lines_of(lambda: by_hand(face))
    raised = 0
    for line in list(counts)[::3]:
        with signal_at(line, counts[line]):
            try:
                by_hand(face)
            except KeyboardInterrupt:
                raised += 1
        state.check()
        if state.sequences.forward is not None:
            state.abort_forward()
        for seq in state.sequences.ids:
            state.remove_sequence(seq)
        assert state.empty(), line
    assert raised > 30


def test_a_logits_processor_is_interrupted_where_it_is(bed: Bed) -> None:
    """Code of the user is no change of ours: Ctrl-C reaches it at once, and its request ends as
    cancelled.
    """
    fresh(bed)
    ended = []

    def slow(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        ended.append(True)
        return logits

    before = bed.session.tokens
    with pytest.raises(KeyboardInterrupt):
        bed.session.generate(greedy(4, logits_processors=[slow]))
    assert bed.session.tokens == before
    assert not ended
    assert_whole(bed, "a slow processor")


def test_an_interrupt_takes_effect_after_the_step(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the end of the verb: what was drawn by then stays."""
    fresh(bed)
    runner, steps = engine_of(bed.llm).runner, [0]
    execute = runner.execute

    def pressed(step: Any) -> Any:
        steps[0] += bool(step.chunks)
        if steps[0] == 3:
            signal.raise_signal(signal.SIGINT)
        return execute(step)

    before = len(bed.session)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "execute", pressed)
        for verb in (bed.session.generate, lambda params: list(bed.session.stream(params))):
            steps[0] = 0
            with pytest.raises(KeyboardInterrupt):
                verb(greedy(40))
            assert len(bed.session) == before + 3
            before += 3
        steps[0] = 0
        with pytest.raises(KeyboardInterrupt):
            bed.llm.generate(OTHER, greedy(40))
        assert steps[0] == 3
    assert_whole(bed, "after three steps")


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_nobody_holds_any_more_is_ended_by_the_next_step(
    bed: Bed, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the garbage collector comes in the middle of something, which leaves it no lock; and
    where a signal comes into its finaliser before that has done anything.
    """
    fresh(bed)
    if interrupted:
        for kind in (Session, SessionStream):
            monkeypatch.setattr(kind, "__del__", lambda self: None)
    engine = engine_of(bed.llm)
    child, other = bed.session.fork(), bed.session.fork()
    stream = other.stream(greedy(9))
    next(stream)
    with engine.lock:
        del child, stream
        assert len(engine.branches.sessions) == 3
        assert other._branch.busy
    engine.step()
    assert len(engine.branches.sessions) == 2
    assert not other._branch.busy
    other.close()
    cache = bed.llm.executor.create_kv_cache()
    pool = bed.llm.executor.pool
    used = len(engine.runner.state.sequences)
    with engine.lock:
        if interrupted:
            cache._finalizer.detach()
        del cache
        assert len(engine.runner.state.sequences) == used
        assert pool.sweep()
    assert len(engine.runner.state.sequences) == used - 1
    assert_whole(bed, "orphans")


def test_cancelled_tasks(model: Checkpoint, tmp_path: Path) -> None:
    """A task that is cancelled at any moment leaves what a cancelled verb leaves."""
    rng = np.random.default_rng(5)

    async def each(llm: AsyncLLM) -> int:
        cancelled = 0
        session = await llm.session(PROMPT)

        async def streamed() -> None:
            async for _ in session.stream(greedy(8)):
                pass

        async def forked() -> None:
            for child in await session.fork(n=3):
                await child.close()

        verbs: tuple[Callable[[], Any], ...] = (
            lambda: llm.generate([PROMPT, OTHER], greedy(8)),
            lambda: session.append(MORE),
            lambda: session.generate(greedy(8)),
            streamed,
            forked,
            lambda: session.rewind(n=3),
            lambda: session.score(MORE),
            session.logits,
            lambda: session.save(tmp_path / "saved.quire"),
            lambda: llm.beam_search([OTHER], BeamSearchParams(beam_width=2, max_tokens=4)),
        )
        for number in range(40):
            if len(session) > 180:
                await session.rewind(to=len(PROMPT))
            task = asyncio.ensure_future(verbs[rng.integers(len(verbs))]())
            await asyncio.sleep(float(rng.uniform(0, 0.01)))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            if number % 5 == 0:
                tokens = session.tokens
                found = (await session.generate(greedy(2))).outputs[0].token_ids
                assert model.continues(tokens, found), number
        await session.close()
        found = (await llm.generate([PROMPT], greedy(2)))[0].outputs[0].token_ids
        assert model.continues(PROMPT, found)
        return cancelled

    async def main() -> int:
        llm = await asyncio.to_thread(
            AsyncLLM, model.path, device="cpu", dtype="float32", kv_cache_memory="8MiB", host_memory=0
        )
        async with llm:
            cancelled = await each(llm)
            engine, state = llm.engine, llm.engine.runner.state
            await llm.reset_prefix_cache()
            engine.finalizers.run_finalizers()
            assert not engine.requests.by_id
            assert not engine.branches.sessions
            assert state.empty()
            return cancelled

    assert asyncio.run(main()) > 5
