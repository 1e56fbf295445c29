"""Progress of prompts on stderr. Without a terminal it is shown only on request."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from quire.engine.request import Request


class GenerationBar:
    """A bar of answered prompts; while prompts run, also their processed tokens."""

    def __init__(self, requests: Sequence[Sequence[Request]], *, show: bool | None, step_tokens: int) -> None:
        """Watch ``requests``, the samples of each prompt.

        ``show`` None: on a terminal, for several prompts or more than ``step_tokens`` tokens.
        """
        self._requests = requests
        self._total = sum(samples[0].asked.num_prompt for samples in requests)
        if show is None:
            show = sys.stderr.isatty() and (len(requests) > 1 or self._total > step_tokens)
        self.shown = show
        self._bar = tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not show)
        self._said: str | None = None
        self._began: tuple[float, int] | None = None
        """Time of the first update, and the number of finished prompt tokens then."""

    def advance(self) -> None:
        """Show the progress since the last call."""
        done = sum(samples[0].num_prompt_run for samples in self._requests)
        said = f"prompt tokens {done:,}/{self._total:,}{self._left(done)}" if done < self._total else ""
        if said != self._said:
            self._bar.set_postfix_str(said)
            self._said = said
        self._bar.update(sum(all(one.finished for one in samples) for samples in self._requests) - self._bar.n)

    def _left(self, done: int) -> str:
        """Return the time left for the other tokens of the prompts, at the rate so far, in
        words."""
        if self._began is None:
            self._began = (time.monotonic(), done)
        started, before = self._began
        seconds = time.monotonic() - started
        if done <= before or not seconds:
            return ""
        return f", {tqdm.format_interval(seconds * (self._total - done) / (done - before))} left"

    def close(self) -> None:
        """Show the final state and leave the line."""
        self.advance()
        self._bar.close()


def prompt_pieces(tokens: Sequence[int], step_tokens: int) -> Generator[Sequence[int], None, None]:
    """Yield the pieces of a prompt, to be appended one after the other.

    It is one piece, or on a terminal several of ``step_tokens`` with a temporary bar.
    """
    show = sys.stderr.isatty() and len(tokens) > step_tokens
    size = step_tokens if show else len(tokens)
    with tqdm(total=len(tokens), desc="Prompt", unit="token", leave=False, disable=not show) as bar:
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            yield piece
            bar.update(len(piece))
