"""``LLM``: a model, its memory and an engine, for Python programs.

from quire import LLM, SamplingParams

llm = LLM("tiny-python")
outputs = llm.generate(["def fib(n):"], SamplingParams(temperature=0, max_tokens=32))
with llm.session("class Stack:\\n") as session:
    session.append("    def push(self, x):\\n")
    branches = session.fork(n=2)
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from quire.branches.history import TokenHistory
from quire.branches.media import NO_MEDIA, Media
from quire.build import Parts, build
from quire.config import EngineConfig, parse_bytes
from quire.contracts.executor import CacheLike, ExecutorInputs
from quire.contracts.layers import sink_refusal, window_refusal
from quire.engine import row_sessions, saved_sessions
from quire.engine.beam import BeamSearch, search
from quire.engine.chat_rendering import render_chat, select_template
from quire.engine.engine import Engine
from quire.engine.named_adapters import AdapterInfo
from quire.engine.prompt_sessions import PreparedPrompts, PromptsOrSessions, split_sessions
from quire.engine.prompts import Prompt, Prompts, Text, as_prompts, naming_prompt, read_prompt
from quire.engine.request_checks import RequestChecks
from quire.engine.request_outputs import request_output
from quire.engine.sequence_request import SequenceRequest, SessionState
from quire.engine.session import Session
from quire.engine.session_labels import checked_labels, checked_name
from quire.engine.token_ids import as_token_ids
from quire.engine.tokenizer import Tokenizer
from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.interrupts import uninterrupted
from quire.kv.rules import verbs_of
from quire.kv.windows import Window
from quire.models.catalogue import resolve_adapter
from quire.models.families import LoadedModel
from quire.models.loading import free_memory
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.progress import GenerationBar
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.signatures import require_bool

if TYPE_CHECKING:
    from quire.executor.executor import Executor

ENGINE_REFUSALS: dict[str, str] = {
    "LLM(speculative=...)": "speculation in the engine is not in this release; the executor has speculative_decode",
    "LLM(quantization=...)": "quantised weights are not in this release",
    "LLM(tensor_parallel_size=2), LLM(pipeline_parallel_size=2)": "one device runs the whole model in this release",
    "LLM(trust_remote_code=True)": "code of checkpoints is never run",
    "blending": "blending of cached segments is not in this release",
}
"""What the engine refuses, with the reason, for ``capabilities``."""

ENGINE_VERBS: dict[str, str] = dict.fromkeys(
    (
        "structured outputs",
        "prompt logprobs",
        "logits processors",
        "beam search",
        "AsyncLLM",
        "windowed sessions",
        "host memory",
        "adapters",
        "sessions as KV caches",
    ),
    "",
)
"""What the engine does beyond plain generation, each with an empty reason against it, for ``capabilities``."""

Messages = Sequence[Mapping[str, Any]]

HOST_SHARE = 0.125
"""Part of the free host memory to which state may be moved unless ``host_memory`` says otherwise."""


class LLM:
    """A loaded model that generates, and whose state can be held in sessions.

    ``model``: the name of a bundled model, a directory, or a Hugging Face id. The keywords are described by
    ``quire.config.EngineConfig``; ``quire generate --help`` prints the same. ``chat_template`` may also be Jinja text, or the name
    of one of the model's own templates. Raises ``NotFound`` (no such model),
    ``CheckpointError`` (damaged or unknown checkpoint), ``InvalidArgument``, ``Unsupported``, ``ResourceExhausted``.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        kv_dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        kv_cache_memory: int | str | None = None,
        gpu_memory_utilization: float = 0.9,
        page_size: int = 16,
        checkpoint_interval: int | None = None,
        enable_prefix_caching: bool = True,
        attention_backend: str = "auto",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        speculative: object | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        quantization: object | None = None,
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
        host_memory: int | str | None = None,
        adapter_ranks: int = 512,
        adapter_memory: int | str | None = None,
    ) -> None:
        # The arguments are the fields of the configuration, by name; nothing else may be a local variable yet.
        config = EngineConfig.from_mapping({name: value for name, value in locals().items() if name != "self"})
        self._parts: Parts = build(config, progress=sys.stderr.isatty())
        self._engine = self._parts.engine
        self._adapters = self._parts.adapters
        if config.host_memory is None:
            self._engine.host.capacity = int((free_memory(torch.device("cpu")) or 0) * HOST_SHARE)
        else:
            self._engine.host.capacity = parse_bytes(config.host_memory)
        self._executor: Executor | None = None
        self._closed = False
        try:
            for name, path in (config.adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    # -- generating ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptsOrSessions,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: text or token ids, one or many. One ``RequestOutput`` per prompt, in their order. A prompt may have embeddings
        of images or sounds at placeholders: ``{"prompt_token_ids": [5, -1, -1, 7], "multi_modal_data": {"image": rows}}``,
        ``{"prompt_embeds": rows}``, or ``ExecutorInputs`` of one row (``quire.engine.prompts.read_prompt``).

        A prompt may be a session, which goes on as by ``Session.generate``, in the same batch as the others:
        its new tokens stay in it. Give each once. ``adapter`` and ``cache_salt`` are for the other prompts, a
        session has its own.

        Without ``sampling_params`` the model's ``generation_config.json`` gives the defaults. ``adapter``: the name of a loaded
        adapter under which all of them run; None: the base model. All prompts are checked before
        the first one runs. Prompts with different ``cache_salt`` never share cached state. A request that fails
        later ends with ``finish_reason`` "error" and leaves the others alone. ``use_tqdm``: a bar on stderr of the prompts that are
        done, and of the prompts' tokens that have been run; None: on a terminal, if there are several prompts or a long one.
        """
        return self._run(self.prepare(prompts, sampling_params, adapter=adapter, cache_salt=cache_salt), use_tqdm)

    def prepare(
        self,
        prompts: PromptsOrSessions,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> PreparedPrompts:
        """The arguments of ``generate``, checked and encoded, for ``submit``."""
        self._require_open("generate")
        chosen = self._adapter(adapter)
        sessions, given = split_sessions(prompts, self._engine)
        if sessions and None not in sessions and (adapter is not None or cache_salt is not None):
            raise InvalidArgument(
                f"adapter={adapter!r} and cache_salt={cache_salt!r} for sessions only: a session has its own; leave them out",
                field="adapter" if cache_salt is None else "cache_salt",
            )
        listed = as_prompts(given)
        params = self._params_for(sampling_params, len(listed))
        ids, media = [], []
        for number, prompt in enumerate(listed):
            with naming_prompt(number, len(listed)):
                tokens, embeddings = self._read(prompt, self._engine.checks)
            ids.append(tokens)
            media.append(embeddings)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._checked(PreparedPrompts(ids, texts, params, cache_key(cache_salt), chosen, media, sessions))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered with the model's chat template."""
        prepared = self.prepare_chat(
            messages,
            sampling_params,
            adapter=adapter,
            cache_salt=cache_salt,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )
        return self._run(prepared, use_tqdm)

    def prepare_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> PreparedPrompts:
        """The arguments of ``chat``, checked, rendered and encoded, for ``submit``."""
        self._require_open("chat")
        chosen = self._adapter(adapter)
        if not isinstance(messages, (list, tuple)) or not messages:
            allowed = "a list of messages, or a list of such lists, with at least one message"
            raise InvalidArgument(field="messages", given=messages, allowed=allowed)
        conversations: Sequence[Messages] = [messages] if isinstance(messages[0], Mapping) else messages
        params = self._params_for(sampling_params, len(conversations))
        tokenizer = self._parts.tokenizer
        if tokenizer is None:
            raise FailedPrecondition("chat needs a tokenizer with a chat template, and this model has no tokenizer")
        template = select_template(tokenizer.chat_templates, with_tools=tools is not None)
        texts = [
            render_chat(
                template,
                conversation,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                max_bytes=self._engine.checks.max_text_bytes,
                **tokenizer.special_tokens,
            )
            for conversation in conversations
        ]
        ids = [np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64) for text in texts]
        return self._checked(PreparedPrompts(ids, list(texts), params, cache_key(cache_salt), chosen))

    def _checked(self, prepared: PreparedPrompts) -> PreparedPrompts:
        """Refuses, before anything is queued, whatever ``submit`` would refuse."""
        checks, count = self._engine.checks, len(prepared.ids)
        for number, (tokens, chosen) in enumerate(zip(prepared.ids, prepared.params, strict=True)):
            with naming_prompt(number, count):
                if (session := prepared.session_of(number)) is not None:
                    session.check_generate(chosen)
                    continue
                checks.tokens(tokens, prepared.media_of(number))
                checks.params(chosen)
                checks.scored(tokens, chosen)
                checks.length(tokens.size, chosen)
        return prepared

    def submit(self, prepared: PreparedPrompts, request_id: str | None = None) -> list[list[SequenceRequest]]:
        """Queue prompts, all or none: for each its samples. Whoever steps the engine runs them. With ``request_id`` that is
        the name of a single prompt, and several are numbered, as in "name-0"."""
        requests: list[list[SequenceRequest]] = []
        with self._engine.lock:
            self._checked_sessions(prepared)
            try:
                for number, (tokens, chosen) in enumerate(zip(prepared.ids, prepared.params, strict=True)):
                    name = request_id if request_id is None or len(prepared.ids) == 1 else f"{request_id}-{number}"
                    if (session := prepared.session_of(number)) is not None:
                        requests.append([session.submit_generate(chosen, name)])
                        continue
                    requests.append(
                        self._engine.submit(
                            tokens,
                            chosen,
                            request_id=name,
                            key=prepared.key,
                            adapter=prepared.adapter,
                            media=prepared.media_of(number),
                        )
                    )
            except BaseException:
                for samples in requests:
                    self._engine.end(samples)
                raise
        return requests

    def _checked_sessions(self, prepared: PreparedPrompts) -> None:
        """Check the sessions again before any of them is lent: other threads may have used them since."""
        for number, chosen in enumerate(prepared.params):
            if (session := prepared.session_of(number)) is not None:
                with naming_prompt(number, len(prepared.ids)):
                    session.check_generate(chosen)

    def outputs(self, prepared: PreparedPrompts, requests: Sequence[Sequence[SequenceRequest]]) -> list[RequestOutput]:
        """What became of the requests of ``submit``, so far."""
        return [
            request_output(samples, self.tokenizer, text)
            for samples, text in zip(requests, prepared.texts, strict=True)
        ]

    @uninterrupted
    def _run(self, prepared: PreparedPrompts, use_tqdm: bool | None) -> list[RequestOutput]:
        engine = self._engine
        requests: list[list[SequenceRequest]] = []
        try:
            requests = self.submit(prepared)
            step_tokens = engine.scheduler.limits.max_num_batched_tokens
            with closing(GenerationBar(requests, show=use_tqdm, step_tokens=step_tokens)) as bar:
                samples = [sample for samples in requests for sample in samples]
                engine.run(samples, bar.advance if bar.shown else None)
        finally:
            for samples in requests:
                engine.end(samples)
        return self.outputs(prepared, requests)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of prompts: text or token ids, one or many. One ``BeamSearchOutput`` per prompt.

        All prompts are checked before the first one runs. One that fails later has an ``error`` and leaves the others alone.
        """
        searches, texts = self.prepare_beams(prompts, params, adapter=adapter, cache_salt=cache_salt)
        show = use_tqdm if use_tqdm is not None else (len(searches) > 1 and sys.stderr.isatty())
        with tqdm(total=len(searches), desc="Searching", unit="prompt", disable=not show) as bar:

            def advance() -> None:
                bar.update(sum(one.done for one in searches) - bar.n)

            search(self._engine, searches, advance if show else None)
        return [one.output(text) for one, text in zip(searches, texts, strict=True)]

    def prepare_beams(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[list[BeamSearch], list[str | None]]:
        """The searches of ``beam_search``, checked and not started, and the prompts that were text."""
        self._require_open("beam_search")
        chosen = self._adapter(adapter)
        if not isinstance(params, BeamSearchParams):
            raise InvalidArgument(f"beam_search takes BeamSearchParams, got {type(params).__name__}", field="params")
        listed, key, stopping = as_prompts(prompts), cache_key(cache_salt), params.sampling()
        searches: list[BeamSearch] = []
        for number, prompt in enumerate(listed):
            with naming_prompt(number, len(listed)):
                if isinstance(prompt, (Mapping, ExecutorInputs)):
                    raise Unsupported("beam_search takes text and token ids, and no embeddings")
                tokens = self._encode(prompt, self._engine.checks)
                self._engine.checks.tokens(tokens)
                self._engine.checks.params(stopping)
                self._engine.checks.length(tokens.size, stopping)
                searches.append(BeamSearch(self._engine, tokens, params, key=key, adapter=chosen))
        return searches, [prompt if isinstance(prompt, str) else None for prompt in listed]

    # -- sessions --------------------------------------------------------------------------------------------

    @uninterrupted
    def session(
        self,
        prompt: Prompt = "",
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        pin: bool = False,
        window: int | None = None,
        sink: int = 0,
        cache: CacheLike | None = None,
        row: int | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Session:
        """A live sequence that starts with ``prompt`` (text, token ids, these with embeddings as of ``generate``, or nothing), which
        is run.

        ``pin``: its state is never dropped when the pool is short. ``window``: only the first ``sink`` tokens and the last
        ``window - sink`` are seen and kept (StreamingLLM), so that memory and time per token stay as they are however long it
        gets, also beyond the model's context; such a session shares no prefix with others. ``Unsupported``: a sink on a
        model that runs through transformers' layers. ``adapter``: the name of a loaded one; ``Session.use_adapter`` changes it.

        ``cache``: a KV cache of ``executor``, or a handle, of which the session is to be a copy-on-write fork, the cache unchanged, in
        the place of all these but ``pin``, ``name`` and ``labels``; ``row`` picks one of several rows. It has the row's tokens, window and adapters, goes on
        under the last of these, and shares no prefix with others.
        ``name`` and ``labels`` (strings by strings) are for whoever has many sessions; they need not be unique.
        """
        self._require_open("session")
        called, labelled = checked_name(name), checked_labels({} if labels is None else labels)
        if cache is not None:
            _refuse_beside(
                "cache",
                prompt=isinstance(prompt, ExecutorInputs) or len(prompt) > 0,
                adapter=adapter is not None,
                cache_salt=cache_salt is not None,
                window=window is not None,
                sink=sink != 0,
            )
            require_bool("pin", pin)
            from quire.executor.arguments import resolve_row

            with self._engine.lock:
                forked = row_sessions.fork_to_session(self._engine, *resolve_row(self._engine.runner, cache, row))
                forked.pinned |= pin
                session = self._session(forked)
                session.name, session.labels = called, labelled
                return session
        if row is not None:
            raise InvalidArgument(f"row {row!r} without a KV cache; give cache=, or leave row out", field="row")
        require_bool("pin", pin)
        kept, key = self._window(window, sink), cache_key(cache_salt)
        tokens, media = self._read(prompt, self._engine.checks if kept is None else None)
        self._engine.checks.tokens(tokens, media)
        with self._engine.lock:  # so that the adapter stays loaded until the session is known to use it
            held = TokenHistory(tokens, media)
            state = SessionState(tokens=held, key=key, pinned=pin, window=kept, adapter=self._adapter(adapter))
            if tokens.size:
                self._engine.checks_of(state).length(tokens.size, None)
            session = self._session(state)
            session.name, session.labels = called, labelled
        try:
            session.compute()
        except BaseException:
            session.close()
            raise
        return session

    def _window(self, window: int | None, sink: int) -> Window | None:
        for name, value in (("window", window), ("sink", sink)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidArgument(field=name, given=value, allowed="an integer")
        if window is None:
            if sink != 0:
                raise InvalidArgument(f"sink is {sink} without a window; give a window, or sink=0", field="sink")
            return None
        longest = self._engine.max_model_len
        if not 0 <= sink < window or window > longest:
            raise InvalidArgument(
                f"window {window} with sink {sink}; 0 <= sink < window <= {longest} (the context) is needed",
                field="window",
            )
        if reason := window_refusal(self._engine.runner.model.layer_specs):
            raise Unsupported(f"window {window}: {reason}", field="window")
        if sink and (reason := sink_refusal(self._engine.runner.model.layer_specs)):
            raise Unsupported(f"window {window} with sink {sink}: {reason}", field="sink")
        return Window(window, sink)

    def _session(self, state: SessionState) -> Session:
        return Session(
            self._engine,
            state,
            identity=self._parts.identity,
            defaults=lambda: self._parts.default_params,
            executor=lambda: self.executor,
            adapters=self._adapters,
        )

    def load_session(self, path: str | Path, *, convert_dtype: bool = False, row: int | None = None) -> Session:
        """The session that ``Session.save`` wrote, or a row of what ``KVCache.serialize`` returned (``row``: which, of several).
        ``InvalidArgument`` (another model, dtype, version: expected and found), ``DataLoss`` (damaged), ``NotFound``,
        ``ResourceExhausted``. ``convert_dtype`` accepts another KV dtype."""
        self._require_open("load_session")
        if not isinstance(path, (str, Path)):
            raise InvalidArgument(
                f"load_session takes a path, got {type(path).__name__}; bytes go to session_from_bytes", field="path"
            )
        require_bool("convert_dtype", convert_dtype)
        return self._restore(path, convert_dtype, row)

    def session_from_bytes(
        self, data: bytes | bytearray | memoryview, *, convert_dtype: bool = False, row: int | None = None
    ) -> Session:
        """The same from the bytes of ``Session.to_bytes``."""
        self._require_open("session_from_bytes")
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise InvalidArgument(
                f"session_from_bytes takes bytes, got {type(data).__name__}; a path goes to load_session", field="data"
            )
        require_bool("convert_dtype", convert_dtype)
        return self._restore(data, convert_dtype, row)

    def _restore(
        self, source: str | Path | bytes | bytearray | memoryview, convert_dtype: bool, row: int | None
    ) -> Session:
        if row is not None and (isinstance(row, bool) or not isinstance(row, int)):
            raise InvalidArgument(field="row", given=row, allowed="an integer or None")
        with saved_sessions.opened(self._engine, source) as file, self._engine.lock:
            loaded = saved_sessions.load(self._engine, file, self._parts.identity, convert_dtype=convert_dtype, row=row)
            return self._session(loaded)

    # -- adapters --------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA adapter (a bundled one, a PEFT directory or a Hugging Face id) for ``adapter=name``, while requests run.

        Everything about it is checked first: ``NotFound``, ``CheckpointError`` (damaged, or made for another model: expected and
        found), ``Unsupported`` (a kind of adapter or a layer that is not computed, by name), ``AlreadyExists``,
        ``ResourceExhausted``. Base results stay as they were, to the bit. A tokenizer or a chat template beside the adapter is not
        read.
        """
        self._require_open("load_adapter")
        if not isinstance(path, (str, Path)):
            raise InvalidArgument(f"load_adapter takes the path of a directory, got {path!r}", field="path")
        return self._adapters.load(name, path.expanduser() if isinstance(path, Path) else resolve_adapter(path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter and everything that was cached under it. ``NotFound``; ``FailedPrecondition`` while requests or open
        sessions use it, with their numbers."""
        self._require_open("unload_adapter")
        self._adapters.unload(name)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """What is loaded, by name."""
        self._require_open("adapters")
        return self._adapters.infos()

    def _adapter(self, name: str | None) -> int | None:
        """``NotFound`` for a name that is not loaded."""
        return None if name is None else self._adapters.id_of(name)

    # -- looking around --------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one: it works with token ids."""
        return self._parts.tokenizer

    @property
    def executor(self) -> Executor:
        """The executor contract over the same weights and pages; a new one after ``shutdown`` and after an error of the device."""
        self._require_open("executor")
        from quire.executor.executor import Executor

        with self._engine.lock:
            if self._executor is None or not self._executor.is_usable:
                if self._executor is not None:
                    self._executor.shutdown()  # One whose device failed gives its pages back.
                self._executor = Executor(
                    self._parts.runner,
                    identity=self._parts.identity,
                    max_model_len=self._engine.max_model_len,
                    max_batch_size=self._parts.config.max_num_seqs,
                    prefill_chunk_size=self._parts.config.max_num_batched_tokens,
                    lock=self._engine.lock,
                )
            return self._executor

    @property
    def model(self) -> LoadedModel:
        """The weights."""
        return self._parts.model

    @property
    def engine(self) -> Engine:
        """The level below: requests and steps."""
        return self._engine

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV state of one token, over all layers."""
        state = self._engine.runner.state
        return sum(state.geometry.page_bytes) // state.page_size

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    def reset_prefix_cache(self) -> None:
        """Forget the state of all finished requests."""
        self._require_open("reset_prefix_cache")
        self._engine.reset_prefix_cache()

    def capabilities(self) -> dict[str, Any]:
        """Which verbs and combinations this model has here, and why not where not."""
        self._require_open("capabilities")
        kinds = [spec.kind for spec in self.model.layer_specs]
        return {
            "executor": self.executor.capabilities(),
            "verbs": verbs_of(kinds),
            "engine": ENGINE_REFUSALS,
            "engine_verbs": ENGINE_VERBS
            | ({} if self.tokenizer is not None else {"structured outputs": "this model has no tokenizer"}),
            "notes": self._parts.notes,
        }

    def status(self) -> dict[str, Any]:
        """What is going on: requests, pages (of all pools; see ``PageUse``), sequences, and the calls on
        ``executor``, None as long as nobody has asked for that: what the engine runs itself is counted in
        ``metrics``."""
        self._require_open("status")
        use = self._engine.page_use()
        return {
            "num_requests_running": self._engine.num_running,
            "num_requests_waiting": self._engine.num_waiting,
            "num_pages": use.total,
            "num_pages_free": use.free,
            "num_pages_evictable": use.evictable,
            "num_pages_held": use.held,
            "num_pages_pinned": use.pinned,
            "kv_cache_usage": use.usage,
            "num_sequences": len(self._engine.runner.state.sequence_ids()),
            "num_adapters": len(self._adapters.infos()),
            "executor": None if self._executor is None else self._executor.status(),
        }

    def metrics(self) -> dict[str, float]:
        """Counters since the start, by name; those of ``executor`` among them."""
        from quire.executor import counters

        self._require_open("metrics")
        return self._engine.snapshot() | counters.snapshot(self._executor)

    @uninterrupted
    def close(self) -> None:
        """Give everything back; later calls raise ``FailedPrecondition``. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._executor is not None:
            self._executor.shutdown()
        self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- helpers ---------------------------------------------------------------------------------------------

    def _require_open(self, verb: str) -> None:
        if self._closed:
            raise FailedPrecondition(f"{verb}: the LLM is closed; make a new one")

    @property
    def default_params(self) -> SamplingParams:
        """What counts without ``SamplingParams``: the model's ``generation_config.json``."""
        return self._parts.default_params

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.default_params] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, (list, tuple)) or not all(isinstance(item, SamplingParams) for item in given):
            raise InvalidArgument(field="sampling_params", given=given, allowed="SamplingParams or a list of them")
        if len(given) != count:
            raise InvalidArgument(
                f"{len(given)} sampling_params for {count} prompts; give one, or one for each", field="sampling_params"
            )
        return list(given)

    def _read(self, prompt: Prompt, checks: RequestChecks | None) -> tuple[NDArray[np.int64], Media]:
        if isinstance(prompt, (Mapping, ExecutorInputs)):
            return read_prompt(prompt, self.model.hidden_size)
        return self._encode(prompt, checks), NO_MEDIA

    def _encode(self, prompt: Text, checks: RequestChecks | None) -> NDArray[np.int64]:
        """Token ids of a prompt; a text that ``checks`` know to be too long is not tokenised."""
        if checks is not None:
            checks.text(prompt)
        if not isinstance(prompt, str):
            return as_token_ids(prompt)
        if self._parts.tokenizer is None:
            if not prompt:
                return np.empty(0, dtype=np.int64)
            raise InvalidArgument("this model has no tokenizer; give token ids instead of text", field="prompt")
        return np.array(self._parts.tokenizer.encode(prompt), dtype=np.int64)


def cache_key(salt: str | None) -> Hashable:
    """What may share cached state, beside adapters: the salt."""
    if salt is not None and not isinstance(salt, str):
        raise InvalidArgument(field="cache_salt", given=salt, allowed="a string")
    return ("", salt)


def _refuse_beside(given: str, **others: bool) -> None:
    """``InvalidArgument`` for other arguments that are there, too, and in whose place ``given`` stands."""
    if surplus := [name for name, is_there in others.items() if is_there]:
        raise InvalidArgument(
            f"{', '.join(surplus)} beside {given}: what it holds says this already; leave it out", field=surplus[0]
        )
