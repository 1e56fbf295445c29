"""``PrefillSide``: computes prompts for decode servers, and sends their state meanwhile.

A connection carries one prompt at a time. What arrives on it is either a request for a prompt, or
belongs to the hand-over, which takes it from ``Inbox``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Mapping

from quire.async_llm import AsyncLLM
from quire.async_llm.stepper import Job
from quire.base.errors import DataLoss, InvalidArgument, QuireError
from quire.base.types import SeqId
from quire.channels.greeting import Trust
from quire.channels.socket_end import SocketEnd
from quire.channels.urls import Listener
from quire.contracts.channel import Buffers, Channel
from quire.engine.handover import adapter_of, send_prompt
from quire.engine.request import Request
from quire.kv.messages import opened, packed
from quire.server.handover.prompts import AskedPrompt, locked
from quire.server.http import logs

ALIVE_SECONDS = 5.0
"""Seconds between two signs of life while a prompt waits for its turn."""


class Inbox:
    """The end of a channel, as a hand-over sees it: what belongs to it is put in."""

    def __init__(self, channel: Channel) -> None:
        """Send by ``channel``."""
        self._channel = channel
        self._queue: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    def send(self, parts: Buffers) -> None:
        """See ``contracts.channel.Channel``."""
        self._channel.send(parts)

    def put(self, message: memoryview) -> None:
        """Hand over a message that has come."""
        self._queue.put(message)

    def receive(self, timeout: float | None = None) -> memoryview | None:
        """See ``contracts.channel.Channel``."""
        try:
            return self._queue.get(timeout=timeout) if timeout != 0 else self._queue.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """See ``contracts.channel.Channel``."""
        self._channel.close()


class PrefillSide:
    """Listens for decode servers."""

    def __init__(self, llm: AsyncLLM, url: str, trust: Trust, model: Mapping[str, str]) -> None:
        """Compute prompts by ``llm`` for who connects to ``url``; ``model``: its fingerprint."""
        self.llm, self.engine, self.stepper, self.model = llm, llm.engine, llm.stepper, dict(model)
        self._listener = Listener(url, trust, self._serve, _refused)
        self.url = self._listener.url

    def close(self) -> None:
        """End all hand-overs, and listen no more."""
        self._listener.close()

    def _serve(self, end: SocketEnd) -> None:
        """Serve one decode server until its connection ends."""
        inbox, transfer = Inbox(end), ""
        current: _Prompt | None = None
        try:
            while True:
                message = end.receive(ALIVE_SECONDS)
                if message is None:
                    if current is not None and not current.job.over:
                        end.send(packed({"transfer": current.transfer, "kind": "alive"}))
                    continue
                header, data = opened(message)
                if header.get("kind") == "prompt":
                    if current is not None:
                        current.end()
                    current = _Prompt(self, AskedPrompt.of(header, data), inbox, transfer)
                    current.begin()
                else:
                    if header.get("kind") == "offer":
                        transfer = str(header.get("transfer"))
                    inbox.put(message)
                    if current is not None:
                        current.hear()
        except QuireError as error:
            if not isinstance(error, DataLoss):
                logs.event("handover_refused", level=logging.WARNING, text=str(error))
        finally:
            if current is not None:
                current.end()


class _Prompt:
    def __init__(self, side: PrefillSide, asked: AskedPrompt, inbox: Inbox, transfer: str) -> None:
        self._side, self._asked, self._inbox, self.transfer = side, asked, inbox, transfer
        self._seq: SeqId | None = None
        self._is_ended = False
        """Whether the receiver is gone: a job that has not started by then runs nothing."""
        self.job = Job(side.engine, self._begin_prefix)

    def begin(self) -> None:
        """Queue what the prompt begins with, then the prompt; tell the receiver of a refusal."""
        self.job.listeners.append(self._prefix_is_here)
        self._side.stepper.submit(self.job)

    def _begin_prefix(self) -> list[Request]:
        """Compute the tokens that the receiver has and this server has not."""
        if self._is_ended:
            return []
        engine, asked = self._side.engine, self._asked
        if asked.model != self._side.model:
            raise InvalidArgument(
                f"the prompt is for the model {dict(asked.model)}, and this server has {self._side.model}"
            )
        engine.checks.tokens(asked.tokens)
        engine.checks.length(asked.tokens.size, None)
        if not 0 <= asked.begin <= asked.tokens.size:
            raise InvalidArgument(f"the receiver has {asked.begin} of {asked.tokens.size} tokens")
        if not asked.begin:
            return []
        return [
            engine.submit_prefix(asked.tokens[: asked.begin], key=asked.key, adapter=adapter_of(engine, asked.adapter))
        ]

    def _prefix_is_here(self) -> None:
        if self.job.over and self.job.error is not None:
            self._refuse(self.job.error)
        elif self.job.over and not self._is_ended:
            self.job = Job(self._side.engine, self._send)
            self.job.listeners.append(self._ended)
            self._side.stepper.submit(self.job)

    def _send(self) -> list[Request]:
        if self._is_ended:
            return []
        asked = self._asked
        with self._side.engine.lock:
            request = send_prompt(
                self._side.engine,
                asked.tokens,
                key=asked.key,
                adapter=asked.adapter,
                begin=asked.begin,
                position_map=asked.map,
                channel=self._inbox,
            )
        self._seq = request.branch.seq
        return [request]

    def _ended(self) -> None:
        if self.job.over and self.job.error is not None:
            self._refuse(self.job.error)

    def _refuse(self, error: BaseException) -> None:
        """Say why the prompt is not computed."""
        self._side.engine.metrics.prompts_sent.inc("refused")
        logs.event("handover_refused", level=logging.WARNING, text=str(error))
        with contextlib.suppress(DataLoss):  # It is gone.
            self._inbox.send(packed({"transfer": self.transfer, "kind": "failed", "reason": str(error)}))

    def hear(self) -> None:
        """Let the hand-over take what has come; end it if it is over."""
        locked(self._side.llm, self._hear)

    def _hear(self) -> None:
        state, seq = self._side.engine.runner.state, self._seq
        if seq is None or not state.has_sequence(seq):
            return
        try:
            if state.disagg_receive(seq, 0.0):
                self._seq = None
                state.disagg_wait(seq, 0.0)
                self._side.engine.metrics.prompts_sent.inc("whole")
        except QuireError:
            self._side.engine.metrics.prompts_sent.inc("lost")

    def end(self) -> None:
        """End what still runs of it: the receiver is gone."""
        engine = self._side.engine

        def stop() -> None:
            self._is_ended = True
            engine.end(self.job.requests)
            if (seq := self._seq) is not None and engine.runner.state.has_sequence(seq):
                with contextlib.suppress(QuireError):  # It has ended meanwhile.
                    engine.runner.state.disagg_cancel(seq)
                    engine.metrics.prompts_sent.inc("lost")

        locked(self._side.llm, stop)


def _refused(error: QuireError) -> None:
    logs.event("peer_refused", level=logging.WARNING, text=str(error))
