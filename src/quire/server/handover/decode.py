"""``DecodeSide``: lets a prefill server compute prompts; where that fails, they run here."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from quire.async_llm import AsyncLLM
from quire.base.errors import DataLoss, QuireError
from quire.channels.greeting import Trust
from quire.channels.place import Place
from quire.channels.socket_end import SocketEnd
from quire.channels.urls import check_trust, connect
from quire.engine.handover import IncomingPrompt, IncomingPrompts
from quire.server.handover.prompts import AskedPrompt, asked_key, locked
from quire.server.http import logs
from quire.sessions.prompts import PreparedPrompts

LEAST_TOKENS = 32
"""Tokens that the cache must lack of a prompt, so that it is worth asking for."""
SILENT_SECONDS = 20.0
"""Seconds without a sign of life after which a prefill server counts as gone."""
AGAIN_SECONDS = 5.0
"""Seconds for which a prefill server that could not be reached is not tried again."""
LOOK_SECONDS = 0.2
"""Seconds between two looks whether the pages of a prompt were taken for other requests."""
THREADS = 64
"""Prompts that are asked for at a time; others are computed here."""


class DecodeSide:
    """What ``AsyncLLM`` asks before it runs a prompt (``AsyncLLM.before_prompts``)."""

    def __init__(self, llm: AsyncLLM, url: str, trust: Trust, model: Mapping[str, str]) -> None:
        """Ask the prefill server at ``url``; ``model``: the fingerprint of ``llm``'s model."""
        check_trust(Place.of(url), trust)
        self._llm, self._engine, self._url, self._trust, self._model = llm, llm.engine, url, trust, dict(model)
        self._incoming = IncomingPrompts(self._engine)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="quire-handover")
        self._places = threading.Semaphore(THREADS)
        self._idle: list[SocketEnd] = []
        self._lock = threading.Lock()
        self._closed = False
        self._down_until = 0.0

    def close(self) -> None:
        """Ask for nothing any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for end in idle:
            end.close()
        self._threads.shutdown()

    async def bring(self, prepared: PreparedPrompts) -> None:
        """Bring the state of prompts into the prefix cache, as far as the peer computes it."""
        wanted = [number for number in range(len(prepared.ids)) if self._is_wanted(prepared, number)]
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            *(
                loop.run_in_executor(
                    self._threads,
                    self._bring,
                    np.array(prepared.ids[number][:-1]),
                    asked_key(prepared.key),
                    prepared.adapter,
                )
                for number in wanted
                if self._places.acquire(blocking=False)
            )
        )

    def _is_wanted(self, prepared: PreparedPrompts, number: int) -> bool:
        params, ids = prepared.params[number], prepared.ids[number]
        if prepared.session_of(number) is not None or prepared.blend is not None or ids.size <= LEAST_TOKENS:
            return False
        if ids.min() < 0 or params.prompt_logprobs is not None:  # Embeddings; logits of tokens that must run here.
            return False
        exact, adapter = self._engine.exact, prepared.adapter
        return not (params.exact and exact.has_windows(params, ids, None, adapter=adapter, blended=False))

    def _bring(self, tokens: NDArray[np.int64], key: tuple[str, str | None], adapter: int | None) -> None:
        """Bring one prompt, on a thread; note why it did not come."""
        try:
            if self._closed or time.monotonic() < self._down_until:
                return
            try:
                end = self._connected()
            except QuireError as error:
                self._down_until = time.monotonic() + AGAIN_SECONDS
                self._note("refused", error)
                return
            try:
                self._bring_over(end, tokens, key, adapter)
            except QuireError as error:
                end.close()
                self._note("lost" if isinstance(error, DataLoss) else "refused", error)
            else:
                self._keep(end)
        finally:
            self._places.release()

    def _bring_over(
        self, end: SocketEnd, tokens: NDArray[np.int64], key: tuple[str, str | None], adapter: int | None
    ) -> None:
        begin = self._incoming.begin
        incoming = locked(self._llm, lambda: begin(tokens, key=key, adapter=adapter, channel=end, least=LEAST_TOKENS))
        if incoming is None:
            return
        try:
            fingerprint = None if adapter is None else self._engine.runner.adapters.get(adapter).fingerprint
            asked = AskedPrompt(
                tokens=incoming.tokens,
                key=key,
                adapter=fingerprint,
                begin=incoming.begin,
                map=incoming.map,
                model=self._model,
            )
            end.send(asked.message())
            self._receive(incoming)
            locked(self._llm, lambda: self._incoming.finish(incoming))
        except BaseException:
            locked(self._llm, lambda: self._incoming.drop(incoming))
            raise
        self._engine.metrics.prompts_handed_over.inc("whole")
        self._engine.metrics.tokens_handed_over.inc(tokens.size - incoming.begin)

    def _receive(self, incoming: IncomingPrompt) -> None:
        """Take what comes, while the engine runs other requests."""
        heard = time.monotonic()
        while True:
            asked = time.monotonic()
            if self._engine.runner.state.disagg_receive(incoming.seq, LOOK_SECONDS):
                return
            if (now := time.monotonic()) - asked < LOOK_SECONDS:
                heard = now  # A message has come.
            elif now - heard > SILENT_SECONDS:
                raise DataLoss(f"{self._url} was silent for {SILENT_SECONDS:g} seconds")

    def _note(self, result: str, error: QuireError) -> None:
        self._engine.metrics.prompts_handed_over.inc(result)
        logs.event("handover_" + result, level=logging.WARNING, text=f"{error}; the prompt is computed here")

    def _connected(self) -> SocketEnd:
        with self._lock:
            while self._idle:
                end = self._idle.pop()
                if end.is_open:
                    return end
                end.close()
        return connect(self._url, self._trust)

    def _keep(self, end: SocketEnd) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(end)
                return
        end.close()
