"""The processes of the other ranks, as rank 0 sees them.

Steps, and rows of K and V, go through sockets that only two processes have (``rank_messages``), in
one order: what is sent first is done first.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import RanksBroken
from quire.base.interrupts import Lock
from quire.base.temporary_folders import TemporaryFolder, remove_leftovers
from quire.base.types import SeqId
from quire.contracts.adapters import Adapter
from quire.contracts.ranks import Grid, HandOver
from quire.runner import torch_group
from quire.runner.rank_messages import FAILED, SEEN, LoadAdapter, Put, Seen, Take, UnloadAdapter, receive, send
from quire.runner.torch_group import ENDED

PREFIX = "quire-ranks-"
"""How the names of folders begin in which ranks meet."""
ANSWER_SECONDS = 20.0
"""Seconds that one side waits for the other to confirm that a step failed there too."""
LOOK_SECONDS = 0.5
"""Seconds between looks whether a forward still runs, of a thread that waits for an answer."""
END_SECONDS = 5.0
"""Seconds that a rank has to end by itself."""


class Ranks:
    """They end with this object, and with this process. Any thread may call. ``PeerRows``: their
    rows of K and V."""

    def __init__(self, grid: Grid, main: str) -> None:
        """Start the processes of all ranks but this one; each runs ``main``, Python code that is
        given the number of a file descriptor, and answers there."""
        self.grid, self.size = grid, grid.size
        self.broken = ""
        """The reason why no step can run any more; empty while steps can."""
        self.is_running = False
        """Whether a forward runs, behind which the others answer. It finds itself if one hangs."""
        # They keep signals back: what is begun is sent, and each answer is read.
        self._sending, self._asking = Lock(), Lock()
        remove_leftovers(PREFIX)
        folder = TemporaryFolder(PREFIX)
        self.meeting = folder.path / "store"
        """Where the ranks' groups meet, with a suffix for each."""
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[int] = []
        """The number of threads of this process before and after ``share_threads``."""
        self.close = weakref.finalize(self, _end, self._processes, self._pipes, folder, os.getpid(), self._threads)
        for _ in range(1, self.size):
            ours, theirs = socket.socketpair()
            # What is sent to a process that hangs fails in time.
            limit = struct.pack("ll", int(torch_group.HANG_SECONDS), 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
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

    @property
    def fault(self) -> str:
        """The reason why no step can run; empty: steps can, as far as is known without one."""
        return self.broken or (ENDED if any(one.poll() is not None for one in self._processes) else "")

    def share_threads(self) -> int:
        """Lower this process's number of threads to a rank's share, until the others end; return
        it."""
        whole = torch.get_num_threads()
        self._threads[:] = whole, max(1, whole // self.size)
        torch.set_num_threads(self._threads[1])
        return self._threads[1]

    def tell(self, messages: Sequence[object]) -> None:
        """Send a message to each of the others. ``RanksBroken`` if one has ended."""
        with self._sending:
            if self.broken:
                raise RanksBroken(self.broken)
            for pipe, message in zip(self._pipes, messages, strict=True):
                self._send(pipe, message)

    def send(self, message: object) -> None:
        """Send one message to all others. ``RanksBroken`` if one has ended."""
        self.tell([message] * (self.size - 1))

    def wait(self) -> list[Any]:
        """Wait until all others have done what they were told; return their answers, or raise the
        error of one that could not. ``RanksBroken`` if one has ended."""
        answers = []
        for pipe in self._pipes:
            answer = self._answer(pipe, None)
            if isinstance(answer, BaseException):
                self.fail(answer)
                raise answer
            answers.append(answer)
        return answers

    def confirm_failure(self) -> None:
        """After a step that failed here: return if it failed on all ranks, and so left all states
        equal. Otherwise end the others: no step can run any more."""
        if self.broken:
            return
        with suppress(RanksBroken), self._asking:
            self.send(FAILED)
            if all(self._answer(pipe, ANSWER_SECONDS) == FAILED for pipe in self._pipes):
                return
        self.fail("a step failed on some ranks only")

    def fail(self, why: object = "") -> RanksBroken:
        """End the others at once. Return the error for all that want to run."""
        self.broken = self.broken or (f"{ENDED} ({why})" if str(why) else ENDED)
        for process in self._processes:  # Threads that wait for one of them notice.
            process.kill()
        with self._sending:
            self.close()
        return RanksBroken(self.broken)

    # -- rows of K and V ---------------------------------------------------------------------------

    def take(
        self, place: tuple[int, int], slots_N: NDArray[np.int64], ranks: Sequence[int]
    ) -> list[Mapping[str, Tensor]]:
        """See ``PeerRows``."""
        pipes = [self._pipes[rank - 1] for rank in ranks]
        with self._asking:
            with self._sending:
                if self.broken:
                    raise RanksBroken(self.broken)
                for pipe in pipes:
                    self._send(pipe, Take(place, slots_N))
            return [self._answer(pipe, torch_group.HANG_SECONDS) for pipe in pipes]

    def put(
        self,
        seq: SeqId,
        place: tuple[int, int],
        slots_N: NDArray[np.int64],
        parts: Mapping[int, Mapping[str, Tensor]],
    ) -> None:
        """See ``PeerRows``."""
        with self._sending:
            if self.broken:
                raise RanksBroken(self.broken)
            for rank, part in parts.items():
                self._send(self._pipes[rank - 1], Put(seq, place, slots_N, part))

    def follow(self, event: HandOver) -> None:
        """See ``PeerRows``."""
        self.send(event)

    def last_seen(self) -> list[Seen]:
        """Return the other ranks' results of the last step, besides logits."""
        with self._asking:
            self.send(SEEN)
            return [self._answer(pipe, torch_group.HANG_SECONDS) for pipe in self._pipes]

    # -- adapters ----------------------------------------------------------------------------------

    def load_adapter(self, adapter_id: int, parts: Sequence[Adapter]) -> None:
        """See ``PeerAdapters``."""
        with self._asking:
            self.tell([LoadAdapter(adapter_id, part) for part in parts])
            answers = [self._answer(pipe, torch_group.HANG_SECONDS) for pipe in self._pipes]
        for error in filter(None, answers):
            raise error

    def unload_adapter(self, adapter_id: int) -> None:
        """See ``PeerAdapters``."""
        with suppress(RanksBroken):
            self.send(UnloadAdapter(adapter_id))

    # -- one pipe ----------------------------------------------------------------------------------

    def _send(self, pipe: Connection, message: object) -> None:
        try:
            send(pipe, message)
        except OSError as error:
            raise self.fail(error) from error

    def _answer(self, pipe: Connection, seconds: float | None) -> Any:
        """Return the next answer. ``seconds``: those to wait for it while no forward runs; None: as
        long as it takes."""
        waited = 0.0
        try:
            while not pipe.poll(None if seconds is None else LOOK_SECONDS):
                waited = 0.0 if self.is_running else waited + LOOK_SECONDS
                if seconds is not None and waited >= seconds:
                    raise self.fail(f"no answer in {seconds:.0f} seconds")
            return receive(pipe)
        except (EOFError, OSError) as error:
            raise self.fail(error) from error


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    pipes: Sequence[Connection],
    folder: TemporaryFolder,
    owner: int,
    threads: Sequence[int],
) -> None:
    """Close the pipes, and kill each rank that has not ended ``END_SECONDS`` later. Then restore
    the number of PyTorch's threads, unless a caller has changed it. A forked child, whose process
    id is not ``owner``, only closes its copies of the pipes."""
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
    folder.remove()
    if threads and torch.get_num_threads() == threads[1]:
        torch.set_num_threads(threads[0])
