"""Prompts of an ``LLM``, from its arguments to the engine's queue, and to their outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from quire.adapters.keys import OwnedSalt
from quire.base.config import check_int
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported, took_effect
from quire.base.hints import NO_HINTS, CacheHints, checked_hints
from quire.base.interrupts import SHIELD
from quire.base.media import NO_MEDIA, Media
from quire.base.outputs import BeamSearchOutput, RequestOutput, RequestOutputs, WarmedSegment
from quire.base.progress import Bar, on_terminal
from quire.base.sampling_params import BeamSearchParams, SamplingParams
from quire.base.segments import BlendParams, Segment
from quire.base.signatures import require_text
from quire.blend.calibration import BlendCalibration, QualityLimits
from quire.contracts.executor import ExecutorInputs
from quire.engine import beam
from quire.engine.engine import CheckedPrompt, Engine
from quire.engine.named_adapters import NamedAdapters
from quire.engine.progress_bars import generation_bar
from quire.engine.prompts import (
    WHOLE,
    Pieces,
    Prompt,
    Prompts,
    SegmentedPrompt,
    Text,
    as_prompts,
    is_segmented,
    naming_prompt,
    read_prompt,
    read_segments,
    unwrapped,
)
from quire.engine.request import Request
from quire.engine.request_checks import RequestChecks
from quire.engine.request_outputs import request_output, warmed
from quire.sessions import blend_calibration
from quire.sessions.session import Session
from quire.text.chat_prompts import ChatPrompt
from quire.text.chat_segments import cut_at_segments, without_segments
from quire.text.token_ids import as_token_ids

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""One conversation."""
PromptsOrSessions: TypeAlias = Prompts | Session | Sequence[Prompt | Session]
"""What ``generate`` takes: one prompt or session, or a list of them."""


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """Prompts that have passed all checks: as token ids, with their texts where they were text."""

    ids: list[NDArray[np.int64]]
    texts: list[str | None]
    params: list[SamplingParams]
    key: Hashable
    adapter: int | None = None
    media: Sequence[Media] = ()
    """The embeddings of each; empty: there are none."""
    sessions: Sequence[Session | None] = ()
    """Which session each of them is; None where it is none. Empty if none of them is."""
    hints: CacheHints = NO_HINTS
    """What is said about the state of each."""
    pieces: Sequence[Pieces] = ()
    """Of each; empty: all are of one piece."""
    blend: BlendParams | None = None
    """How the state of their segments is reused; None: not at all."""
    checked: Sequence[CheckedPrompt | None] = ()
    """The result of the checks of each; None where it is a session."""

    def media_of(self, number: int) -> Media:
        return self.media[number] if self.media else NO_MEDIA

    def pieces_of(self, number: int) -> Pieces:
        return self.pieces[number] if self.pieces else WHOLE

    def session_of(self, number: int) -> Session | None:
        """Return the session that is continued in the place of one prompt."""
        return self.sessions[number] if self.sessions else None

    def require_kept(self) -> None:
        """Raise ``NotDurable`` if a session among them is kept, and cannot be."""
        for session in self.sessions:
            if session is not None:
                session.require_kept()

    def keep_sessions(self) -> None:
        """Wait until the sessions among them are durable, if they are kept."""
        for session in self.sessions:
            if session is not None:
                with took_effect():
                    session._keep(wait=True)


class PromptRequests:
    """The part of an ``LLM`` that checks, encodes, queues and runs prompts."""

    def __init__(self, engine: Engine, adapters: NamedAdapters, default_params: SamplingParams) -> None:
        """``default_params``: the parameters of calls without ``SamplingParams``."""
        self.engine = engine
        self.adapters = adapters
        self.default_params = default_params
        self.closed = False
        """Whether the LLM is closed."""

    def prepare(
        self,
        prompts: PromptsOrSessions,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        hints: CacheHints | None = None,
        blend: BlendParams | None = None,
    ) -> PreparedPrompts:
        """Check and encode the arguments of ``generate``, for ``submit``."""
        self.require_open("generate")
        chosen, hinted = self.adapter_id(adapter), checked_hints(hints)
        if blend is not None:
            self.engine.blending.check(blend)
        sessions, given = split_sessions(prompts, self.engine)
        if sessions and None not in sessions and (adapter is not None or cache_salt is not None):
            raise InvalidArgument(
                f"adapter={adapter!r} and cache_salt={cache_salt!r} for sessions only: a session has its own; leave them out",
                field="adapter" if cache_salt is None else "cache_salt",
            )
        listed = as_prompts(given)
        params = self._params_for(sampling_params, len(listed))
        ids, media, pieces = [], [], []
        for number, prompt in enumerate(listed):
            with naming_prompt(number, len(listed)):
                tokens, embeddings, parts = self.read(prompt, self.engine.checks)
            ids.append(tokens)
            media.append(embeddings)
            pieces.append(parts)
        key, texts = cache_key(cache_salt), texts_of(listed)
        return self._checked(PreparedPrompts(ids, texts, params, key, chosen, media, sessions, hinted, pieces, blend))

    def prepare_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        hints: CacheHints | None = None,
        blend: BlendParams | None = None,
    ) -> PreparedPrompts:
        """Check, render and encode the arguments of ``chat``, for ``submit``."""
        self.require_open("chat")
        chosen, hinted = self.adapter_id(adapter), checked_hints(hints)
        if blend is not None:
            self.engine.blending.check(blend)
        if not isinstance(messages, (list, tuple)) or not messages:
            allowed = "a list of messages, or a list of such lists, with at least one message"
            raise InvalidArgument(field="messages", given=messages, allowed=allowed)
        conversations: Sequence[Messages] = [messages] if isinstance(messages[0], Mapping) else messages
        params = self._params_for(sampling_params, len(conversations))
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise FailedPrecondition("chat needs a tokenizer with a chat template, and this model has no tokenizer")
        texts: list[str | None] = []
        ids, pieces = [], []
        for conversation in conversations:
            chat = ChatPrompt(tokenizer, conversation, tools, text_limit=self.engine.checks.text_limit)
            bare, marked = without_segments(chat.texts.messages(conversation))
            render = partial(chat.render, tools=tools, asks=add_generation_prompt)
            text = render(bare)
            texts.append(chat.texts.shown(text))
            parts, unplaced = ([text], ()) if blend is None else cut_at_segments(text, bare, marked, render)
            tokens, found = read_segments(parts, chat.texts.encode_part)
            ids.append(tokens)
            pieces.append(replace(found, unplaced=unplaced))
        key = cache_key(cache_salt)
        return self._checked(PreparedPrompts(ids, texts, params, key, chosen, hints=hinted, pieces=pieces, blend=blend))

    def prepare_beams(
        self, prompts: Prompts, params: BeamSearchParams, *, adapter: str | None = None, cache_salt: str | None = None
    ) -> tuple[list[beam.BeamSearch], list[str | None]]:
        """Return the checked searches of ``beam_search``, and the prompts that are text."""
        self.require_open("beam_search")
        chosen = self.adapter_id(adapter)
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument(f"beam_search takes BeamSearchParams, got {type(params).__name__}", field="params")
        listed, key, stopping = as_prompts(prompts), cache_key(cache_salt), params.sampling()
        searches: list[beam.BeamSearch] = []
        for number, prompt in enumerate(listed):
            with naming_prompt(number, len(listed)):
                if isinstance(prompt, (Mapping, ExecutorInputs)):
                    raise Unsupported("beam_search takes text and token ids, and no embeddings")
                tokens, _, _ = self.read(prompt, self.engine.checks)
                self.engine.checks.tokens(tokens)
                self.engine.checks.params(stopping)
                self.engine.checks.length(tokens.size, stopping)
                searches.append(beam.BeamSearch(self.engine, tokens, params, key=key, adapter=chosen))
        return searches, texts_of(listed)

    def submit_prefetch(
        self,
        prompt: Prompt,
        *,
        adapter: str | None,
        cache_salt: str | None,
        hints: CacheHints | None,
        only_idle: bool,
        most: int | None,
    ) -> Request:
        """Check, encode and queue what ``prefetch`` runs."""
        self.require_open("prefetch")
        chosen, hinted = self.adapter_id(adapter), checked_hints(hints)
        tokens, media, _ = self.read(prompt, self.engine.checks)
        # The last token runs again anyway: its logits are wanted.
        tokens = tokens[: max(1, tokens.size - 1)]
        return self.engine.submit_prefix(
            tokens,
            key=cache_key(cache_salt),
            adapter=chosen,
            media=media,
            hints=hinted,
            only_idle=only_idle,
            most=most,
        )

    def prepare_warm(
        self,
        segments: Sequence[Segment | Text],
        *,
        behind: Text | SegmentedPrompt | Messages | None,
        adapter: str | None,
        cache_salt: str | None,
    ) -> Callable[[], list[tuple[int, list[Request]]]]:
        """Check and encode segments; return a function that queues the computation of the segments
        that are not kept. It returns, for each, its tokens and the requests that compute them."""
        self.require_open("warm")
        self.engine.blending.require()
        chosen, key = self.adapter_id(adapter), cache_key(cache_salt)
        if isinstance(segments, (str, Segment)) or not isinstance(segments, Sequence):
            raise InvalidArgument(field="segments", given=segments, allowed="a list of segments, text or token ids")
        ids: list[NDArray[np.int64]] = []
        for number, segment in enumerate(segments):
            with naming_prompt(number, len(segments)):
                content = segment.content if isinstance(segment, Segment) else segment
                ids.append(self._encode(content, self.engine.checks, begins=False))
                self.engine.checks.tokens(ids[-1])
        begun = None if behind is None else self._beginning(behind)
        return partial(self.engine.submit_chunks, ids, key=key, adapter=chosen, behind=begun)

    def _beginning(self, prompt: Text | SegmentedPrompt | Messages) -> NDArray[np.int64]:
        """Return the ids of a prompt before its first segment: without segments, all of them; of
        messages, those before the text of a user's message that follows."""
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            messages = cast("list[Mapping[str, Any]]", list(prompt))
            if not without_segments(messages)[1]:
                parts = [{"type": "text", "text": "text", "segment": True}, {"type": "text", "text": "?"}]
                messages.append({"role": "user", "content": parts})
            prepared = self.prepare_chat(messages, blend=BlendParams())
        else:
            prepared = self.prepare(cast("list[Prompt]", [prompt]))
        marked = prepared.pieces_of(0).marked
        return prepared.ids[0][: marked[0][0]] if marked else prepared.ids[0]

    def submit(self, prepared: PreparedPrompts, request_id: str | None = None) -> list[list[Request]]:
        """Queue prompts, all or none, for the engine's steps; return the samples of each.
        ``request_id`` is the name of a single prompt; several are numbered, as in "name-0"."""
        requests: list[list[Request]] = []
        count = len(prepared.ids)
        with self.engine.lock:
            # Before any session has a request: threads may have used them since they were checked.
            for number, chosen in enumerate(prepared.params):
                if (session := prepared.session_of(number)) is not None:
                    with naming_prompt(number, count):
                        session.check_generate(chosen)
            try:
                for number, (tokens, chosen) in enumerate(zip(prepared.ids, prepared.params, strict=True)):
                    name = request_id if request_id is None or count == 1 else f"{request_id}-{number}"
                    if (session := prepared.session_of(number)) is not None:
                        requests.append([session.submit_generate(chosen, name, prepared.hints)])
                        continue
                    blend, pieces = prepared.blend, prepared.pieces_of(number)
                    requests.append(
                        self.engine.submit(
                            tokens,
                            chosen,
                            request_id=name,
                            key=prepared.key,
                            adapter=prepared.adapter,
                            media=prepared.media_of(number),
                            hints=prepared.hints,
                            blend=None if blend is None else self.engine.blending.wish(blend, pieces, tokens.size),
                            checked=prepared.checked[number],
                        )
                    )
            except BaseException:
                for samples in requests:
                    self.engine.end(samples)
                raise
        return requests

    def outputs(self, prepared: PreparedPrompts, requests: Sequence[Sequence[Request]]) -> list[RequestOutput]:
        """Return the results of ``submit``'s requests so far."""
        pairs = zip(requests, prepared.texts, strict=True)
        return RequestOutputs(request_output(samples, self.engine.tokenizer, text) for samples, text in pairs)

    def require_open(self, verb: str) -> None:
        """Raise ``FailedPrecondition`` once the LLM is closed."""
        self.engine.lock.require_own()
        if self.closed:
            raise FailedPrecondition(f"{verb}: the LLM is closed; make a new one")

    def adapter_id(self, name: str | None) -> int | None:
        """Return the id of an adapter; ``NotFound`` for a name that is not loaded."""
        return None if name is None else self.adapters.id_of(name)

    def _checked(self, prepared: PreparedPrompts) -> PreparedPrompts:
        """Refuse, before anything is queued, whatever ``submit`` would refuse."""
        count, found = len(prepared.ids), list[CheckedPrompt | None]()
        for number, (tokens, chosen) in enumerate(zip(prepared.ids, prepared.params, strict=True)):
            with naming_prompt(number, count):
                if (session := prepared.session_of(number)) is not None:
                    session.check_generate(chosen)
                    found.append(None)
                    continue
                media, blended = prepared.media_of(number), prepared.blend is not None
                found.append(self.engine.check(tokens, chosen, adapter=prepared.adapter, media=media, blended=blended))
                if blended and chosen.prompt_logprobs is not None:
                    raise Unsupported(
                        "prompt_logprobs of a blended prompt: not all of its tokens run; leave one of the two out",
                        field="prompt_logprobs",
                    )
        return replace(prepared, checked=found)

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [self.default_params if given is None else given] * count
        if not isinstance(given, (list, tuple)) or not all(isinstance(item, SamplingParams) for item in given):
            raise InvalidArgument(field="sampling_params", given=given, allowed="SamplingParams or a list of them")
        if len(given) != count:
            raise InvalidArgument(
                f"{len(given)} sampling_params for {count} prompts; give one, or one for each", field="sampling_params"
            )
        return list(given)

    def read(self, prompt: Prompt, checks: RequestChecks | None) -> tuple[NDArray[np.int64], Media, Pieces]:
        """Return a prompt's token ids, embeddings and pieces. ``checks`` refuse a text that is too
        long before it is tokenised; None: they do not."""
        prompt = unwrapped(prompt)
        if isinstance(prompt, (Mapping, ExecutorInputs)):
            return *read_prompt(prompt, self.engine.runner.model.hidden_size), WHOLE
        if is_segmented(prompt):
            tokens, pieces = read_segments(
                prompt,  # type: ignore[arg-type]
                lambda text, first: self._encode(text, checks, begins=first),
            )
            return tokens, NO_MEDIA, pieces
        return self._encode(prompt, checks), NO_MEDIA, WHOLE  # type: ignore[arg-type]

    def _encode(self, prompt: Text, checks: RequestChecks | None, *, begins: bool = True) -> NDArray[np.int64]:
        """Return a prompt's token ids; ``checks`` refuse a text that is too long, untokenised.
        ``begins``: as a prompt, with the tokens that begin one; else in the middle of a text."""
        if checks is not None:
            checks.text(prompt)
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            if not prompt:
                return np.empty(0, dtype=np.int64)
            raise InvalidArgument(
                "this model has no tokenizer; give token ids instead of text, or load it with a tokenizer",
                field="prompt",
            )
        encode = tokenizer.encode if begins else tokenizer.encode_inside
        return np.array(encode(prompt), dtype=np.int64)

    # -- runs --------------------------------------------------------------------------------------

    def run(self, prepared: PreparedPrompts, use_tqdm: bool | None) -> list[RequestOutput]:
        """Run prompts; return their outputs. Signals take effect between steps. Only this part of
        ``LLM.generate`` is shielded: they may end the checks before it at any line."""
        with SHIELD:
            submitted: list[list[Request]] = []
            prepared.require_kept()
            try:
                submitted = self.submit(prepared)
                samples = [sample for samples in submitted for sample in samples]
                with generation_bar(self.engine, submitted, use_tqdm) as on_step:
                    self.engine.run(samples, on_step)
                self.engine.run([one.output.verification for one in samples if one.output.verification is not None])
            finally:
                for samples in submitted:
                    self.engine.end(samples)
            prepared.keep_sessions()
            return self.outputs(prepared, submitted)

    def warm(self, submitted: Sequence[tuple[int, Sequence[Request]]], use_tqdm: bool | None) -> list[WarmedSegment]:
        """Compute the chunks of segments; return the kept tokens of each."""
        runs = [request for _, runs in submitted for request in runs]
        try:
            with generation_bar(self.engine, [[one] for one in runs], use_tqdm) as on_step:
                self.engine.run(runs, on_step)
        finally:
            self.engine.end(runs)
        return warmed(submitted)

    def search(
        self, searches: Sequence[beam.BeamSearch], texts: Sequence[str | None], use_tqdm: bool | None
    ) -> list[BeamSearchOutput]:
        """Run searches to their ends; return their outputs."""
        show = use_tqdm if use_tqdm is not None else (len(searches) > 1 and on_terminal())
        with Bar(total=len(searches), desc="Searching", unit="prompt", disable=not show) as bar:

            def advance() -> None:
                bar.update(sum(one.done for one in searches) - bar.n)

            with SHIELD:
                beam.search(self.engine, searches, advance if show else None)
        return [one.output(text) for one, text in zip(searches, texts, strict=True)]

    def calibrate(
        self,
        texts: Sequence[Text | SegmentedPrompt] | None,
        probes: int,
        limits: QualityLimits | None,
        use_tqdm: bool | None,
    ) -> BlendCalibration:
        """Check the arguments of a calibration, and run it."""
        chosen = QualityLimits() if limits is None else limits
        self.engine.blending.require()
        check_int("probes", probes, 1)
        if not isinstance(chosen, QualityLimits):
            raise InvalidArgument(field="limits", given=limits, allowed="QualityLimits or None")
        if texts is not None and (isinstance(texts, str) or not isinstance(texts, Sequence) or not texts):
            raise InvalidArgument(field="texts", given=texts, allowed="a list of texts, at least one, or None")
        show = on_terminal() if use_tqdm is None else use_tqdm
        given = []
        for number, text in enumerate(texts or ()):
            with naming_prompt(number, len(texts or ())):
                ids, _, pieces = self.read(text, None)
                self.engine.checks.tokens(ids)
            given.append((ids, pieces))
        return blend_calibration.calibrate_on(self.engine, None if texts is None else given, probes, chosen, show=show)


def cache_key(salt: str | None) -> Hashable:
    """Return the key under which requests share cached state, beside adapters: the salt's owner, ""
    for a plain text, and the salt."""
    if salt is not None and not isinstance(salt, str):
        raise InvalidArgument(field="cache_salt", given=salt, allowed="a string")
    require_text("cache_salt", (salt.given if isinstance(salt, OwnedSalt) else salt) or "")
    return (salt.owner if isinstance(salt, OwnedSalt) else "", salt)


def texts_of(prompts: Sequence[Prompt]) -> list[str | None]:
    """Return the prompts that are text, with None for the others."""
    return [prompt if isinstance(prompt, str) else None for prompt in prompts]


def split_sessions(prompts: PromptsOrSessions, engine: Engine) -> tuple[list[Session | None], Prompts]:
    """Return the sessions among the prompts, if any, and the prompts with nothing in their places.
    ``InvalidArgument`` for a session of another LLM, and for a session given twice: it continues in
    one way at a time."""
    if isinstance(prompts, Session):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)) or not any(isinstance(one, Session) for one in prompts):
        return [], prompts  # type: ignore[return-value]
    found = [one if isinstance(one, Session) else None for one in prompts]
    places: dict[int, int] = {}
    for number, session in enumerate(found):
        if session is None:
            continue
        if not session.belongs_to(engine):
            raise InvalidArgument(
                f"prompt {number} is a session of another LLM; its own one can continue it", field=f"prompts.{number}"
            )
        first = places.setdefault(id(session), number)
        if first != number:
            raise InvalidArgument(
                f"prompt {number} is the same session as prompt {first}; give it once, and forks of it for more branches",
                field=f"prompts.{number}",
            )
    return found, [() if isinstance(one, Session) else one for one in prompts]
