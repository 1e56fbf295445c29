"""Costs of recurrent states: size, forks, copies, files; rewinds by checkpoint interval.

Tokens after the nearest kept state are *run again*, although their state existed once; they are
counted where steps are executed. Logits are compared with those of runs without reuse, so the
models should run in float32.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.base.types import Add, Chunk, SeqId, Step
from quire.contracts.layers import Recurrent
from quire.engine.checkpoints import Checkpoints
from quire.kv.recurrent import bytes_per_state
from quire.kv.state import State
from quire.llm import LLM
from quire.runner.local import Runner, StepOutput
from quire_bench.reports import Spread, random_prompts
from quire_bench.state import LEAST_TOKENS, Row, Timer, held_sequence, possible, state_rows

LONG = 2.0
"""Seconds above which a rewind is not repeated."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Extent of the measurements: tokens, and numbers of places, documents, branches, rounds."""

    tokens: int = 2000
    """Tokens of the session, the documents and the history."""
    intervals: tuple[int, ...] = (0, 64, 256, 1024)
    """Tokens between checkpoints; 0: no automatic ones."""
    back: int = 100
    """Tokens of the longer one of the short rewinds."""
    places: int = 2
    """Random positions of further rewinds."""
    documents: int = 3
    branches: int = 8
    """Number of prompts that diverge from each document, at random positions."""
    tail: int = 64
    """Tokens of such a prompt after its divergence."""
    reply: int = 4
    """Tokens of the answer to each of these prompts."""
    turn: int = 20
    """Tokens of the second turn's own prompt."""
    answer: int = 16
    """Tokens of the answer to each turn."""
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("back", "places", "documents", "branches", "tail", "reply", "turn", "answer", "rounds"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} {getattr(self, name)}; at least 1 is needed")
        least = max(LEAST_TOKENS, 2 * self.back)
        if self.tokens < least:
            raise InvalidArgument(f"tokens {self.tokens}; at least {least} are needed")
        if not self.intervals or min(self.intervals) < 0:
            raise InvalidArgument(f"intervals {list(self.intervals)}; at least one is needed, each 0 (none) or greater")


# -- one model ---------------------------------------------------------------------------------


class CountingRunner:
    """A wrapped runner that counts the tokens it runs."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.model, self.state, self.room = inner.model, inner.state, inner.room
        self.adapters, self.loads = inner.adapters, inner.loads
        self.row_sources, self.logits, self.files = inner.row_sources, inner.logits, inner.files
        self.fault = inner.fault
        self.tokens = 0

    @property
    def revision(self) -> int:
        """See ``Runner``."""
        return self.inner.revision

    def new_seq(self) -> SeqId:
        """Return a new id; see ``Runner``."""
        return self.inner.new_seq()

    def execute(self, step: Step) -> StepOutput:
        """Execute and count; see ``Runner``."""
        self.tokens += sum(len(chunk.tokens) for chunk in step.chunks)
        return self.inner.execute(step)


class Subject:
    """A model with recurrent layers, at one interval.

    ``interval`` is in tokens between checkpoints; 0: no automatic ones; None: the engine chooses.
    Raise ``Unsupported`` for a model without recurrent layers.
    """

    def __init__(self, model: str, options: Mapping[str, Any], interval: int | None, *, cached: bool) -> None:
        self.llm = LLM(model, **{**options, "checkpoint_interval": interval, "enable_prefix_caching": cached})
        state, checkpoints = self.llm.engine.runner.state, self.llm.engine.checkpoints
        if not isinstance(state, State) or checkpoints is None:
            self.llm.close()
            raise Unsupported(f"{model} has no recurrent layers; quire bench state measures the states of attention")
        self.state: State = state
        self.checkpoints: Checkpoints = checkpoints
        self.by_engine = interval is None
        self._runner = CountingRunner(self.llm.engine.runner)
        self.llm.engine.runner = self.llm.engine.stepper.runner = self._runner

    @property
    def tokens_run(self) -> int:
        """Tokens run by the engine so far."""
        return self._runner.tokens

    @property
    def interval(self) -> int:
        """Tokens between automatic checkpoints; 0 without them."""
        return self.checkpoints.interval

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state at one position, all layers."""
        return bytes_per_state([spec for spec in self.llm.model.layer_specs if isinstance(spec, Recurrent)])

    @property
    def kept_states(self) -> int:
        """State slots in use."""
        return self.state.parts.recurrent_part("kept_states").table.pool.num_used

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Draw random token ids."""
        found: list[int] = random_prompts(1, tokens, self.llm.model.vocab_size, seed=seed)[0].tolist()
        return found

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()


def greedy(tokens: int) -> SamplingParams:
    """Return parameters for exactly ``tokens`` greedy tokens."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


class AtInterval(Protocol):
    """A measurement at an interval."""

    @property
    def interval(self) -> int: ...


M = TypeVar("M", bound=AtInterval)


def at_intervals(sizes: Sizes, measure: Callable[[int | None], M]) -> list[M]:
    """Call ``measure`` once at each interval and at the engine's own; sort by interval."""
    own = measure(None)
    others = [measure(interval) for interval in sizes.intervals if interval != own.interval]
    return sorted([own, *others], key=lambda one: one.interval)


# -- costs of one state ------------------------------------------------------------------------


def cost_rows(subject: Subject, sizes: Sizes, copy_gbps: float) -> list[Row]:
    """Measure a session's verbs and a checkpoint; add the time of copying one state."""
    size = subject.state_bytes
    limit = Row(
        what="copying one state, if forks did",
        median_seconds=2 * size / (copy_gbps * 1e9),
        note=f"{size:,} bytes read and written at {copy_gbps:.1f} GB/s",
    )
    rows = state_rows(subject.llm, sizes.tokens, sizes.rounds)
    return [*rows, possible("KVState.checkpoint", lambda: checkpoint_row(subject, sizes)), limit]


def checkpoint_row(subject: Subject, sizes: Sizes) -> Row:
    """Measure keeping the present state of a sequence."""
    state, timer = subject.state, Timer(subject.llm.model.device)
    with subject.llm.session(subject.prompt(LEAST_TOKENS, seed=5), pin=True) as session:
        seq = held_sequence(session)
        before, here = subject.kept_states, state.sequence_length(seq)

        def forget() -> None:
            if here in state.checkpoints(seq):
                state.drop_checkpoint(seq, here)

        return timer.row(
            "KVState.checkpoint",
            20 * sizes.rounds,
            lambda _: state.checkpoint(seq),
            prepare=forget,
            note=lambda: f"{subject.kept_states - before} states taken",
        )


# -- rewinds -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """A session rewound to ``position``, up to the logits of the token after it."""

    interval: int
    what: str
    position: int
    run_again: int
    """Number of tokens run again, including the token before ``position``: every session runs it
    for logits."""
    announced: int
    """Number of tokens to run again, as returned by the rewind."""
    seconds: Spread


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewinds:
    """Rewinds of one session at one interval."""

    interval: int
    by_engine: bool
    rows: tuple[Rewound, ...]
    logits: Mapping[int, Tensor]
    """``[V]``, of the token after each position."""
    checkpoints: int
    """Number of checkpoints kept by the session."""
    bytes: int
    """Bytes of these checkpoints."""


def rewinds(model: str, options: Mapping[str, Any], sizes: Sizes, interval: int | None) -> Rewinds:
    """Measure rewinds, each in a fork of one session: short, behind a checkpoint, random.

    Raises:
        QuireError: more tokens had to be run again than are between two checkpoints.
    """
    with Subject(model, options, interval, cached=False) as subject:
        every = subject.interval
        with subject.llm.session(subject.prompt(sizes.tokens, seed=0), pin=True) as session:
            kept = subject.state.checkpoints(held_sequence(session))
            places = random.Random(0).sample(range(1, sizes.tokens), sizes.places)
            wanted = [("by 1", sizes.tokens - 1), (f"by {sizes.back}", sizes.tokens - sizes.back)]
            # The last token runs for its logits; right after a checkpoint nothing else does.
            wanted += [("behind a checkpoint", kept[-1] + 1)] if kept else []
            wanted += [("to a random position", place) for place in sorted(places)]
            logits: dict[int, Tensor] = {}
            rows = []
            for what, position in wanted:
                again, announced, times = 0, 0, list[float]()
                while len(times) < (1 if "random" in what else sizes.rounds) and sum(times) < LONG:
                    with session.fork() as child:
                        before, started = subject.tokens_run, time.perf_counter()
                        announced = child.rewind(to=position)
                        logits[position] = child.logits().cpu()
                        times.append(time.perf_counter() - started)
                        again = subject.tokens_run - before
                if every and max(again, announced) > every:
                    raise QuireError(f"a rewind to {position} ran {again} tokens again; at most {every} were promised")
                rows.append(
                    Rewound(
                        interval=every,
                        what=what,
                        position=position,
                        run_again=again,
                        announced=announced,
                        seconds=Spread.of(times),
                    )
                )
        return Rewinds(
            interval=every,
            by_engine=subject.by_engine,
            rows=tuple(rows),
            logits=logits,
            checkpoints=len(kept),
            bytes=len(kept) * subject.state_bytes,
        )


def fresh_logits(model: str, options: Mapping[str, Any], sizes: Sizes) -> Tensor:
    """Return logits ``[S, V]`` after each of the session's S tokens, in one run of all."""
    with Subject(model, options, 0, cached=False) as subject:
        runner = subject.llm.engine.runner
        seq = runner.new_seq()
        step = Step(edits=(Add(seq),), chunks=(Chunk(seq, tuple(subject.prompt(sizes.tokens, seed=0)), logits="all"),))
        return runner.execute(step).logits_RV.cpu()


def compared(logits: Mapping[int, Tensor], fresh_SV: Tensor) -> dict[str, Any]:
    """Return the number of equal best tokens, and the largest difference over the largest logit."""
    pairs = [(own_V, fresh_SV[position - 1]) for position, own_V in logits.items()]
    apart = [float((own_V - fresh_V).abs().max() / fresh_V.abs().max()) for own_V, fresh_V in pairs]
    same = sum(int(own_V.argmax()) == int(fresh_V.argmax()) for own_V, fresh_V in pairs)
    return {"same": same, "of": len(pairs), "difference": max(apart, default=0.0)}
