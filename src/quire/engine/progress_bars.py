"""Bars on stderr for one call: of prompts, of a long prompt, and of the bytes of a state file.

Nothing is shown where stderr is no terminal, unless it is asked for, and nothing of what takes less
than ``DELAY``. A prompt of several steps is shown at once: its first step may take many seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from quire.base.progress import Bar, on_terminal

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.engine import Engine
    from quire.engine.request import Request
    from quire.statefile.container import StateFile

DELAY = 0.5
"""Seconds that a call takes before its bar is shown, unless one is asked for."""


def is_wanted(use_tqdm: bool | None) -> bool:
    """Return whether a bar may be shown: as asked, or on a terminal."""
    return on_terminal() if use_tqdm is None else use_tqdm


class GenerationBar:
    """A bar of answered prompts; while prompts run, also their processed tokens."""

    def __init__(self, requests: Sequence[Sequence[Request]]) -> None:
        """Watch ``requests``, the samples of each prompt."""
        self._requests = requests
        self._total = sum(samples[0].asked.num_prompt for samples in requests)
        self._bar = Bar(total=len(requests), desc="Generating", unit="prompt")
        self._said: str | None = None
        self._began: tuple[float, int] | None = None
        """The time of the first estimate, and the number of tokens done by then."""

    def advance(self) -> None:
        """Show the progress since the last call."""
        done = sum(samples[0].num_prompt_run for samples in self._requests)
        said = f"prompt tokens {done:,}/{self._total:,}{self._left(done)}" if done < self._total else ""
        if said != self._said:
            self._bar.set_postfix_str(said)
            self._said = said
        self._bar.update(sum(all(one.finished for one in samples) for samples in self._requests) - self._bar.n)

    def _left(self, done: int) -> str:
        """Return a text on the time left for the prompts' other tokens, at the rate so far; empty:
        not known."""
        if self._began is None:
            self._began = (time.monotonic(), done)
        started, before = self._began
        seconds = time.monotonic() - started
        if done <= before or not seconds:
            return ""
        return f", {Bar.format_interval(seconds * (self._total - done) / (done - before))} left"

    def close(self) -> None:
        """Show the final state and leave the line."""
        self.advance()
        self._bar.close()


class PromptBar:
    """A bar of the tokens of a prompt that have run, with the time that is left."""

    def __init__(self, request: Request, use_tqdm: bool | None) -> None:
        self._request = request
        self._bar = Bar(
            total=request.asked.num_prompt,
            initial=request.num_prompt_run,
            desc="Prompt",
            unit="token",
            leave=bool(use_tqdm),
        )

    def advance(self) -> None:
        """Show the progress since the last call."""
        self._bar.update(self._request.num_prompt_run - self._bar.n)

    def close(self) -> None:
        """Show the final state and leave the line."""
        self.advance()
        self._bar.close()


def prompt_bar(engine: Engine, request: Request, use_tqdm: bool | None = None) -> PromptBar | None:
    """Return a bar of a prompt that has not run: if that is asked for, or on a terminal if it takes
    several steps; else None. Where a thread of its own steps, no caller could advance it."""
    several = request.branch.remaining > engine.scheduler.limits.max_num_batched_tokens
    if engine.wait is not None or not is_wanted(use_tqdm) or not (several or use_tqdm):
        return None
    return PromptBar(request, use_tqdm)


def run_shown(engine: Engine, request: Request, use_tqdm: bool | None) -> None:
    """Run a request to its end, and show its ``prompt_bar``."""
    if (bar := prompt_bar(engine, request, use_tqdm)) is None:
        engine.run([request])
        return
    with closing(bar):
        engine.run([request], on_step=bar.advance)


@contextmanager
def generation_bar(
    engine: Engine, prompts: Sequence[Sequence[Request]], use_tqdm: bool | None
) -> Iterator[Callable[[], None] | None]:
    """Show a ``GenerationBar`` of prompts that run in the block. Give the function to be called
    after each step; None: nothing is shown.

    ``use_tqdm`` None: on a terminal, for several prompts or for more tokens than a step has.
    """
    show = use_tqdm
    if show is None and on_terminal():
        tokens = sum(samples[0].asked.num_prompt for samples in prompts)
        show = len(prompts) > 1 or tokens > engine.scheduler.limits.max_num_batched_tokens
    if not show:
        yield None
        return
    with closing(GenerationBar(prompts)) as bar:
        yield bar.advance


@contextmanager
def byte_bar(what: str, total: int, use_tqdm: bool | None) -> Iterator[Bar]:
    shown = is_wanted(use_tqdm)
    delay = 0 if use_tqdm else DELAY
    with Bar(
        total=total, desc=what, unit="B", unit_scale=True, leave=bool(use_tqdm), delay=delay, disable=not shown
    ) as bar:
        yield bar


def counted(tensors: Iterable[tuple[str, Tensor]], bar: Bar) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and count the bytes of each once the next one is asked for."""
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        yield name, tensor
        del tensor  # the next one may need its memory
        bar.update(nbytes)


def verify_shown(file: StateFile, what: str, use_tqdm: bool | None) -> None:
    """Compare all tensors of a file with their checksums; ``DataLoss`` for a difference."""
    with byte_bar(what, file.nbytes, use_tqdm) as bar:
        for name, spec in file.specs.items():
            file.verify(name)
            bar.update(spec.nbytes)
