"""Bars on stderr for one call: of a long prompt, and of the bytes of a state file.

Nothing is shown where stderr is no terminal, unless it is asked for, and nothing of what takes less
than ``DELAY``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from torch import Tensor

    from quire.engine.engine import Engine
    from quire.engine.request import Request
    from quire.kv.statefile import StateFile

DELAY = 0.5
"""Seconds that a call takes before its bar is shown, unless one is asked for."""


def is_wanted(use_tqdm: bool | None) -> bool:
    """Return whether a bar may be shown: as asked, or on a terminal."""
    return sys.stderr.isatty() if use_tqdm is None else use_tqdm


class PromptBar:
    """A bar of the tokens of a prompt that have run, with the time that is left."""

    def __init__(self, request: Request, use_tqdm: bool | None) -> None:
        self._request = request
        self._bar = tqdm(
            total=request.asked.num_prompt,
            initial=request.num_prompt_run,
            desc="Prompt",
            unit="token",
            leave=bool(use_tqdm),
            delay=0 if use_tqdm else DELAY,
        )

    def advance(self) -> None:
        """Show the progress since the last call."""
        self._bar.update(self._request.num_prompt_run - self._bar.n)

    def close(self) -> None:
        """Show the final state and leave the line."""
        self.advance()
        self._bar.close()


def run_shown(engine: Engine, request: Request, use_tqdm: bool | None) -> None:
    """Run a request to its end, and show how far its prompt is: if that is asked for, or on a
    terminal if it takes several steps. Where a thread of its own steps, nobody could."""
    several = request.branch.remaining > engine.scheduler.limits.max_num_batched_tokens
    if engine.wait is not None or not is_wanted(use_tqdm) or not (several or use_tqdm):
        engine.run([request])
        return
    with closing(PromptBar(request, use_tqdm)) as bar:
        engine.run([request], on_step=bar.advance)


@contextmanager
def byte_bar(what: str, total: int, use_tqdm: bool | None) -> Iterator[tqdm[Any]]:
    """Give a bar of ``total`` bytes."""
    shown = is_wanted(use_tqdm)
    delay = 0 if use_tqdm else DELAY
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, leave=bool(use_tqdm), delay=delay, disable=not shown
    ) as bar:
        yield bar


def counted(tensors: Iterable[tuple[str, Tensor]], bar: tqdm[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and count the bytes of each once the next one is asked for."""
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        yield name, tensor
        del tensor  # the next one may need its memory
        bar.update(nbytes)


def verify_shown(file: StateFile, what: str, use_tqdm: bool | None) -> None:
    """Compare all tensors of a file with their checksums; ``DataLoss`` for one that differs."""
    with byte_bar(what, file.nbytes, use_tqdm) as bar:
        for name, spec in file.specs.items():
            file.verify(name)
            bar.update(spec.nbytes)
