"""Reuse by the prefix cache for recurrent models: against checkpoints' memory, and in second turns.

Texts are compared with those of runs without reuse, so the models should run in float32.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quire.base.errors import QuireError
from quire.base.outputs import RequestOutput
from quire_bench.reports import Spread, interleave
from quire_bench.states import Sizes, Subject, greedy

if TYPE_CHECKING:
    from quire_bench.peers import TransformersPeer


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Count equal leading tokens."""
    both = min(len(a), len(b))
    return next((index for index in range(both) if a[index] != b[index]), both)


# -- memory against hits ------------------------------------------------------------------------


def workload(subject: Subject, sizes: Sizes) -> list[list[int]]:
    """Return the documents, then prompts that diverge from them at random positions, in random
    order."""
    draw = random.Random(1)
    documents = [subject.prompt(sizes.tokens, seed=10 + index) for index in range(sizes.documents)]
    branches = [
        [*document[: draw.randrange(1, sizes.tokens)], *subject.prompt(sizes.tail, seed=1000 * index + number)]
        for index, document in enumerate(documents, start=1)
        for number in range(sizes.branches)
    ]
    draw.shuffle(branches)
    return [*documents, *branches]


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of prompt tokens, without each last one, that an earlier prompt shares."""
    return sum(
        max((common(ids[:-1], earlier) for earlier in prompts[:index]), default=0) for index, ids in enumerate(prompts)
    )


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """The workload at one interval."""

    interval: int
    by_engine: bool
    """Whether the engine chose the interval."""
    prompt_tokens: int
    shared_tokens: int
    reused_tokens: int
    replayed_tokens: int
    """Counts by the requests' reports."""
    states: int
    """Number of states held after the last prompt, including those at ends and forks of prompts."""
    bytes: int
    """Bytes of these states."""
    lost: int
    """Cached sequences and checkpoints dropped for room; above 0 the pool is the limit."""
    seconds: float
    texts: tuple[tuple[int, ...], ...]

    @property
    def hit_rate(self) -> float:
        """Reused tokens divided by all prompt tokens."""
        return self.reused_tokens / self.prompt_tokens

    @property
    def of_shared(self) -> float:
        """Reused tokens divided by the reusable ones."""
        return self.reused_tokens / self.shared_tokens if self.shared_tokens else 0.0


def cache_row(model: str, options: Mapping[str, Any], sizes: Sizes, interval: int | None) -> CacheRow:
    """Run the prompts of the workload in order, each with a short answer."""
    with Subject(model, options, interval, cached=True) as subject:
        prompts = workload(subject, sizes)
        outputs = list[RequestOutput]()
        started = time.perf_counter()
        for ids in prompts:
            outputs += subject.llm.generate(ids, greedy(sizes.reply), use_tqdm=False)
        seconds = time.perf_counter() - started
        cache = subject.llm.engine.cache
        assert cache is not None
        return CacheRow(
            interval=subject.interval,
            by_engine=subject.by_engine,
            prompt_tokens=sum(map(len, prompts)),
            shared_tokens=shared_tokens(prompts),
            reused_tokens=sum(output.num_cached_tokens for output in outputs),
            replayed_tokens=sum(output.num_replayed_tokens for output in outputs),
            states=subject.kept_states,
            bytes=subject.kept_states * subject.state_bytes,
            lost=cache.num_evictions + subject.checkpoints.num_dropped,
            seconds=seconds,
            texts=tuple(tuple(output.outputs[0].token_ids) for output in outputs),
        )


def fresh_texts(model: str, options: Mapping[str, Any], sizes: Sizes) -> tuple[tuple[int, ...], ...]:
    """Return the answers of the workload without a prefix cache."""
    with Subject(model, options, 0, cached=False) as subject:
        params = greedy(sizes.reply)
        outputs = [subject.llm.generate(ids, params, use_tqdm=False)[0] for ids in workload(subject, sizes)]
        return tuple(tuple(output.outputs[0].token_ids) for output in outputs)


# -- second turns ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A second turn on a first one."""

    what: str
    interval: int
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens that the first turn did not have."""
    run_tokens: int
    """Prompt tokens that ran, counted where steps are executed."""
    cached_tokens: int
    replayed_tokens: int
    """Counts by the request's report."""
    seconds: Spread
    """Seconds to the first token."""
    whole: Spread
    """A run of the whole prompt, divided by these seconds, round by round."""
    peer: Spread | None
    """The same for transformers; None: not measured."""
    equal: Mapping[str, str]
    """Equal tokens and their total, by the compared run."""

    @property
    def met(self) -> bool:
        """True if only the new tokens and at most one interval ran; False without an interval."""
        return self.interval > 0 and self.run_tokens <= self.new_tokens + self.interval


class Chat:
    """A first turn and turns after it, with or without the cached state."""

    def __init__(self, subject: Subject, sizes: Sizes) -> None:
        self.subject = subject
        self.sizes = sizes
        self.history = subject.prompt(sizes.tokens, seed=7)
        self.new = subject.prompt(sizes.turn, seed=8)
        self.first = [*self.history, *self.answer(self.history).outputs[0].token_ids]
        self.texts: dict[str, Sequence[int]] = {}
        """The last answers, by their makers."""
        self.found: tuple[RequestOutput, int] | None = None
        """The last turn on a first one, and the number of its prompt tokens that ran."""

    def answer(self, ids: Sequence[int]) -> RequestOutput:
        return self.subject.llm.generate(list(ids), greedy(self.sizes.answer), use_tqdm=False)[0]

    def warm(self, turn: Sequence[int]) -> float:
        """Return the seconds to the first token after the first turn."""
        self.subject.llm.reset_prefix_cache()
        self.answer(self.history)
        before = self.subject.tokens_run
        output = self.answer(turn)
        # Each token of the answer except the last is run once.
        decoded = len(output.outputs[0].token_ids) - 1
        self.found = output, self.subject.tokens_run - before - decoded
        return self._noted("warm", output)

    def cold(self, turn: Sequence[int]) -> float:
        """Return the seconds to the first token with an empty cache."""
        self.subject.llm.reset_prefix_cache()
        return self._noted("whole", self.answer(turn))

    def by_peer(self, turn: Sequence[int], peer: TransformersPeer) -> float:
        """Return transformers' seconds to the first token."""
        made = peer.generate(torch.tensor([list(turn)]), self.sizes.answer)
        self.texts["transformers"] = made.tokens[0]
        return made.prefill_seconds

    def _noted(self, name: str, output: RequestOutput) -> float:
        self.texts[name] = output.outputs[0].token_ids
        seconds = output.metrics.time_to_first_token
        assert seconds is not None
        return seconds

    def measure(self, what: str, length: int, rounds: int = 1, peer: TransformersPeer | None = None) -> Turn:
        """Measure the turn that keeps ``length`` tokens of the first one, in ``rounds``.

        Raises:
            QuireError: it ran more than its new tokens and one interval.
        """
        turn = [*self.first[:length], *self.new]
        self.texts.clear()
        subjects: dict[str, Callable[[], float]] = {"warm": lambda: self.warm(turn), "whole": lambda: self.cold(turn)}
        if peer is not None:
            subjects["transformers"] = lambda: self.by_peer(turn, peer)
        result = interleave(subjects, rounds, warmup=0)
        assert self.found is not None
        (output, run_tokens), interval, own = self.found, self.subject.interval, self.texts["warm"]
        found = Turn(
            what=what,
            interval=interval,
            prompt_tokens=len(turn),
            new_tokens=len(turn) - common(turn, self.first),
            run_tokens=run_tokens,
            cached_tokens=output.num_cached_tokens,
            replayed_tokens=output.num_replayed_tokens,
            seconds=result.spread("warm"),
            whole=result.ratios["whole"],
            peer=result.ratios.get("transformers"),
            equal={name: f"{common(own, text)}/{len(text)}" for name, text in self.texts.items() if text is not own},
        )
        if interval and not found.met:
            raise QuireError(
                f"a second turn {what} ran {found.run_tokens} tokens; {found.new_tokens} are new, and the interval is {interval}"
            )
        return found


def second_turns(
    model: str,
    options: Mapping[str, Any],
    sizes: Sizes,
    interval: int | None = None,
    peer: TransformersPeer | None = None,
) -> list[Turn]:
    """Measure turns after the answer, after half of it (a shortened chat), and in the history.

    The first of them runs in all rounds, and by ``peer`` (of the same checkpoint).

    Raises:
        QuireError: a turn ran more than its new tokens and one interval.
    """
    with Subject(model, options, interval, cached=True) as subject:
        chat = Chat(subject, sizes)
        place = random.Random(2).randrange(sizes.tokens // 4, 3 * sizes.tokens // 4)
        return [
            chat.measure("after the answer", len(chat.first), sizes.rounds, peer),
            chat.measure("after half of the answer", sizes.tokens + sizes.answer // 2),
            chat.measure(f"after token {place} of the history", place),
        ]
