"""Ranks: processes that divide a model and replay the same steps.

Rank 0 is the user's process. It schedules, samples and answers; ``RankedRunner`` sends each step to
the other ranks and runs its own part. The others are children: each holds its part of the weights
and of K and V, and the same pages. Steps go through sockets as pickles, sums and gathers through
``torch.distributed``.

Letters: R rows, O output features.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from quire.base.errors import QuireError, RanksBroken, Unsupported
from quire.base.types import Import, Load, Overwrite, SeqId, Step
from quire.contracts.ranks import Share
from quire.runner.local import LocalRunner, StepOutput

TIMEOUT = timedelta(minutes=5)
"""Time that a rank waits for another one in a sum: longer than the longest forward."""
ENDED = "a process that holds a part of the model has ended, or does not answer; load the model again"
ANSWER_SECONDS = 20.0
"""Seconds that rank 0 waits for another rank to confirm that a step failed there too."""
END_SECONDS = 5.0
"""Seconds that a rank has to end by itself."""


class TorchGroup:
    """A ``Group`` over ``torch.distributed``: gloo for CPUs, NCCL for GPUs."""

    def __init__(self, share: Share, device: torch.device, meeting: Path) -> None:
        """Wait for all ranks. ``meeting``: a file that they share, and that does not exist yet."""
        self.rank, self.size = share.rank, share.size
        store = FileStore(str(meeting), share.size)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, share.rank, share.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            chosen = gloo._Options()
            chosen._devices = [gloo.create_device(hostname="127.0.0.1")]
            chosen._timeout = TIMEOUT
            self._group = gloo(store, share.rank, share.size, chosen)

    def sum(self, x: Tensor) -> Tensor:
        """See ``Group``."""
        # The sum of two numbers is rounded once in any type; each further number rounds it again.
        sums = x.float() if self.size > 2 and x.element_size() == 2 else x
        try:
            self._group.allreduce([sums]).wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
        return x if sums is x else x.copy_(sums)

    def gather(self, x_RO: Tensor) -> Tensor | None:
        """See ``Group``."""
        found = [[torch.empty_like(x_RO) for _ in range(self.size)]] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        try:
            self._group.gather(found, [x_RO.contiguous()], options).wait()
        except RuntimeError as error:
            raise RanksBroken(ENDED) from error
        return torch.cat(found[0], -1) if self.rank == 0 else None


class Ranks:
    """The other ranks, as rank 0 sees them. They end with this object, and with this process."""

    def __init__(self, size: int, main: str) -> None:
        """Start ``size - 1`` processes; each runs ``main``, Python code that is given the number of
        a file descriptor, and answers there."""
        self.size = size
        self.broken = ""
        """The reason why no step can run any more; empty while steps can."""
        self._meeting = Path(tempfile.mkdtemp(prefix="quire-ranks-"))
        self.meeting = self._meeting / "store"
        """Where the ranks' groups meet."""
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _end, self._processes, self._pipes, self._meeting, os.getpid())
        for _ in range(1, size):
            ours, theirs = socket.socketpair()
            with theirs:
                started = subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        f"import sys; sys.path[:] = sys.argv[1:]; {main}({theirs.fileno()})",
                        *sys.path,
                    ],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C is rank 0's to handle.
                    start_new_session=True,
                )
            self._processes.append(started)
            self._pipes.append(Connection(ours.detach()))

    def tell(self, messages: Sequence[object]) -> None:
        """Send a message to each of the others. ``RanksBroken`` if one has ended."""
        for pipe, message in zip(self._pipes, messages, strict=True):
            self._send(pipe, message)

    def wait(self) -> None:
        """Wait until all others have done what they were told; raise the error of one that could
        not. ``RanksBroken`` if one has ended."""
        for pipe in self._pipes:
            try:
                answer = pipe.recv()
            except (EOFError, OSError) as error:
                raise self._break(error) from error
            if isinstance(answer, BaseException):
                self._break(answer)
                raise answer

    def send(self, message: object) -> None:
        """Send one message to all others. ``RanksBroken`` if one has ended."""
        if self.broken:
            raise RanksBroken(self.broken)
        for pipe in self._pipes:
            self._send(pipe, message)

    def confirm_failure(self) -> None:
        """After a step that failed here: return if it failed on all ranks, and so left all states
        equal. Otherwise end the others: no step can run any more."""
        if self.broken:
            return
        try:
            self.send(FAILED)
            if all(pipe.poll(ANSWER_SECONDS) and pipe.recv() == FAILED for pipe in self._pipes):
                return
        except (EOFError, OSError, RanksBroken):
            pass
        self._break("a step failed on some ranks only")

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except OSError as error:
            raise self._break(error) from error

    def _break(self, why: object) -> RanksBroken:
        self.broken = f"{ENDED} ({why})" if str(why) else ENDED
        self.close()
        return RanksBroken(self.broken)


FAILED = "failed"
"""Message and answer: the last step failed here."""


def _end(processes: Sequence[subprocess.Popen[bytes]], pipes: Sequence[Connection], folder: Path, owner: int) -> None:
    """End processes whose owner is this process: they end when their pipe does."""
    for pipe in pipes:
        with suppress(OSError):
            pipe.close()
    if os.getpid() != owner:
        return
    for process in processes:
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class RankedRunner:
    """The ``Runner`` of rank 0."""

    def __init__(self, inner: LocalRunner, ranks: Ranks) -> None:
        """Wrap the runner of rank 0's part."""
        self.model, self.state, self.room, self.adapters = inner.model, inner.state, inner.room, inner.adapters
        self.transfers, self.row_sources, self.logits = inner.transfers, inner.row_sources, inner.logits
        self.files = inner.files
        self.ranks, self._inner = ranks, inner

    @property
    def revision(self) -> int:
        """See ``Runner``."""
        return self._inner.revision

    def new_seq(self) -> SeqId:
        """See ``Runner``."""
        return self._inner.new_seq()

    def execute(self, step: Step) -> StepOutput:
        """See ``Runner``. ``Unsupported`` for a step that needs all heads in one process, and
        ``RanksBroken`` for chunks once a rank has ended."""
        if reason := refusal(step):
            raise Unsupported(f"tensor_parallel_size {self.ranks.size}: {reason}", field="tensor_parallel_size")
        try:
            self.ranks.send(step)
        except RanksBroken:
            if step.chunks:
                raise
            return self._inner.execute(step)  # a request ends at its chunk; what remains is to free sequences
        try:
            return self._inner.execute(step)
        except BaseException:
            self.ranks.confirm_failure()
            raise


def refusal(step: Step) -> str:
    """Return the reason why ranks cannot run a step; empty: they can."""
    if step.blend is not None or step.awaited:
        return "ranks do not share cached or arriving state"
    if any(isinstance(edit, (Import, Load, Overwrite)) for edit in step.edits):
        return "state of all heads is written into sequences of some heads"
    inputs = step.inputs
    if inputs.attention_weights or inputs.observed:
        return "attention weights are of all heads"
    if inputs.places or inputs.drawn is not None:
        return "logits and tokens stay on rank 0"
    return ""


def serve_steps(runner: LocalRunner, pipe: Connection) -> None:
    """Run the steps that rank 0 sends, until it ends. An error is rank 0's to report if it has the
    same; if it has none, end, so that rank 0 notices."""
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return
        failed = False
        if message != FAILED:
            try:
                runner.execute(message)
                continue
            except QuireError:
                failed = True
            if not pipe.poll(ANSWER_SECONDS) or pipe.recv() != FAILED:
                return
        pipe.send(FAILED if failed else None)
