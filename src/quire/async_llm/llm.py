"""``AsyncLLM``: the verbs of ``LLM``, carried out in the background."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from quire.async_llm.background import Background, awaited, shared
from quire.async_llm.executor import AsyncExecutor
from quire.async_llm.session import AsyncSession, unwrapped
from quire.async_llm.stepper import BeamJob, Job, Stepper
from quire.async_llm.stream import AsyncStream, Prepared
from quire.base.errors import InvalidArgument
from quire.base.hints import CacheHints
from quire.base.outputs import BeamSearchOutput, RequestOutput, WarmedSegment
from quire.base.sampling_params import BeamSearchParams, SamplingParams
from quire.base.segments import BlendParams, Segment
from quire.base.uncopied import Uncopied
from quire.engine.named_adapters import AdapterInfo
from quire.engine.prompts import Prompt, Prompts, SegmentedPrompt, Text
from quire.engine.request import Request
from quire.engine.request_outputs import warmed
from quire.llm import LLM, Messages
from quire.sessions.prompts import PreparedPrompts, PromptsOrSessions

T = TypeVar("T")


class ChatOptions(TypedDict, total=False):
    """The keywords of ``LLM.chat``."""

    adapter: str | None
    cache_salt: str | None
    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    hints: CacheHints | None
    blend: BlendParams | None


class AsyncLLM(Uncopied, AbstractAsyncContextManager["AsyncLLM"]):
    """An ``LLM`` whose verbs are awaited.

    Arguments and errors are as of ``LLM``. The constructor loads the model, so a running loop
    calls it by ``await asyncio.to_thread(AsyncLLM, model)``. Several event loops and threads may
    use the object. Cancelling a task that awaits a verb cancels the verb within a step. A request's
    error reaches only the tasks that await this request.
    """

    _instead = "make another where it is needed, or serve it and send requests"

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._llm = self._inner = LLM(model, **options)
        self._background = Background(self._llm)
        self._executor = AsyncExecutor(self._background)
        self.before_prompts: Callable[[PreparedPrompts], Awaitable[None]] | None = None
        """Awaited before prompts that passed all checks are queued; None: nothing is."""

    __init__.__signature__ = inspect.signature(LLM.__init__)  # type: ignore[attr-defined]

    # -- generating --------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: PromptsOrSessions | AsyncSession | Sequence[Prompt | AsyncSession],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        hints: CacheHints | None = None,
        blend: BlendParams | None = None,
    ) -> list[RequestOutput]:
        """Generate as ``LLM.generate`` does, also from sessions among the prompts. ``request_id``
        names the prompt for ``abort``. Of several, number i is called "name-i"."""
        given = unwrapped(prompts)
        return await self._run(
            "generate",
            lambda: self._llm.requests.prepare(
                given, sampling_params, adapter=adapter, cache_salt=cache_salt, hints=hints, blend=blend
            ),
            request_id,
        )

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer as ``LLM.chat`` does; ``request_id`` as in ``generate``."""
        return await self._run(
            "chat", lambda: self._llm.requests.prepare_chat(messages, sampling_params, **options), request_id
        )

    async def _run(
        self, verb: str, prepare: Callable[[], PreparedPrompts], request_id: str | None
    ) -> list[RequestOutput]:
        _check_name(request_id)
        prepared = await self._prepared(verb, prepare)
        keeps = self.kept is not None and any(prepared.sessions)
        if keeps:
            await self._background.call(verb, prepared.require_kept)
        groups: list[list[Request]] = []

        def submit() -> list[Request]:
            groups.extend(self._llm.requests.submit(prepared, request_id))
            return [sample for samples in groups for sample in samples]

        await self._background.finish(Job(self.engine, submit, name=request_id))
        if keeps:
            await self._background.call(verb, prepared.keep_sessions)
        if any(params.logprobs is not None or params.prompt_logprobs is not None for params in prepared.params):
            # Decoding the texts of millions of them would block the event loop.
            return await asyncio.to_thread(self._llm.requests.outputs, prepared, groups)
        return self._llm.requests.outputs(prepared, groups)

    async def _prepared(self, verb: str, prepare: Callable[[], PreparedPrompts]) -> PreparedPrompts:
        found = await self._background.call(verb, prepare)
        if self.before_prompts is not None:
            await self.before_prompts(found)
        return found

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        hints: CacheHints | None = None,
        blend: BlendParams | None = None,
    ) -> AsyncStream:
        """Continue one prompt: ``async for delta in llm.stream("text")``. The stream's ``output``
        is the result that ``generate`` would return."""
        return self._stream(
            "stream",
            lambda: self._llm.requests.prepare(
                [prompt], sampling_params, adapter=adapter, cache_salt=cache_salt, hints=hints, blend=blend
            ),
            request_id,
        )

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """Answer one conversation, as a stream."""
        return self._stream(
            "stream_chat", lambda: self._llm.requests.prepare_chat(messages, sampling_params, **options), request_id
        )

    def _stream(self, verb: str, prepare: Callable[[], PreparedPrompts], request_id: str | None) -> AsyncStream:
        _check_name(request_id)

        async def prepared() -> Prepared:
            found = await self._prepared(verb, prepare)
            if len(found.ids) != 1:
                raise InvalidArgument(f"{verb} takes one prompt, got {len(found.ids)}; make a stream for each")
            job = Job(
                self.engine, lambda: self._llm.requests.submit(found, request_id)[0], name=request_id, streams=True
            )
            return job, lambda: self._llm.requests.outputs(found, [job.requests])[0]

        return AsyncStream(self._background, prepared)

    prefetch = awaited(LLM.prefetch)

    async def warm(
        self,
        segments: Sequence[Segment | Text],
        *,
        behind: Text | SegmentedPrompt | Messages | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> list[WarmedSegment]:
        """Compute the missing state of segments, as ``LLM.warm`` does."""
        submit = await self._background.call(
            "warm",
            lambda: self._llm.requests.prepare_warm(segments, behind=behind, adapter=adapter, cache_salt=cache_salt),
        )
        submitted: list[tuple[int, list[Request]]] = []

        def start() -> list[Request]:
            submitted.extend(submit())
            return [request for _, requests in submitted for request in requests]

        await self._background.finish(Job(self.engine, start))
        return warmed(submitted)

    async def beam_search(
        self, prompts: Prompts, params: BeamSearchParams, *, adapter: str | None = None, cache_salt: str | None = None
    ) -> list[BeamSearchOutput]:
        """Search as ``LLM.beam_search`` does."""
        searches, texts = await self._background.call(
            "beam_search",
            lambda: self._llm.requests.prepare_beams(prompts, params, adapter=adapter, cache_salt=cache_salt),
        )
        await self._background.finish(BeamJob(self.engine, searches))
        return [search.output(text) for search, text in zip(searches, texts, strict=True)]

    async def abort(self, request_id: str) -> bool:
        """End a request, and return when its pages are free; False if there is no such request.
        Tasks that await it get the output so far, with ``finish_reason`` "cancelled"."""
        self._background.require_open("abort")
        job = self._background.stepper.find(request_id)
        if job is None:
            return False
        await self._background.abort(job)
        return True

    # -- sessions ----------------------------------------------------------------------------------

    session = awaited(LLM.session, AsyncSession)
    load_session = awaited(LLM.load_session, AsyncSession)
    session_from_bytes = awaited(LLM.session_from_bytes, AsyncSession)
    resume = awaited(LLM.resume, AsyncSession)
    resumable = awaited(LLM.resumable)
    forget = awaited(LLM.forget)
    checkout = awaited(LLM.checkout, AsyncSession)
    branches = awaited(LLM.branches)
    log = awaited(LLM.log)
    diff = awaited(LLM.diff)
    delete = awaited(LLM.delete)
    push = awaited(LLM.push)
    pull = awaited(LLM.pull)
    gc = awaited(LLM.gc)
    restored = awaited(LLM.restored, AsyncSession)

    # -- what LLM has besides ----------------------------------------------------------------------

    load_adapter = awaited(LLM.load_adapter)
    unload_adapter = awaited(LLM.unload_adapter)

    async def adapters(self) -> Mapping[str, AdapterInfo]:
        """Return ``LLM.adapters``."""
        return await self._background.call("adapters", lambda: self._llm.adapters)

    async def read(self, reader: Callable[[LLM], T]) -> T:
        """Run a function of the LLM, as ``lambda llm: llm.views.history()``, on a worker thread."""
        return await self._background.call("read", lambda: reader(self._llm))

    reset_prefix_cache = awaited(LLM.reset_prefix_cache)
    calibrate_blending = awaited(LLM.calibrate_blending)
    capabilities = awaited(LLM.capabilities)
    status = awaited(LLM.status)
    metrics = awaited(LLM.metrics)

    tokenizer = shared(LLM.tokenizer)
    blend_calibration = shared(LLM.blend_calibration)

    @property
    def executor(self) -> AsyncExecutor:
        """Return the executor contract, whose verbs are awaited."""
        return self._executor

    @property
    def stepper(self) -> Stepper:
        """Return the engine's stepper, for jobs and calls of other threads."""
        return self._background.stepper

    identity = shared(LLM.identity)
    model = shared(LLM.model)
    engine = shared(LLM.engine)
    bytes_per_token = shared(LLM.bytes_per_token)
    config = shared(LLM.config)
    kept = shared(LLM.kept)
    pages = awaited(LLM.pages)
    history = awaited(LLM.history)
    views = shared(LLM.views)
    """Its methods block; ``read`` runs them."""
    default_params = shared(LLM.default_params)

    # -- closing -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel running requests and free everything. Closing twice is harmless. Later calls raise
        ``FailedPrecondition``."""
        await self._background.close()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _check_name(request_id: str | None) -> None:
    if request_id is not None and (not isinstance(request_id, str) or not request_id):
        raise InvalidArgument(field="request_id", given=request_id, allowed="a non-empty string")
