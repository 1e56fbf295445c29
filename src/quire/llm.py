"""``LLM``: a model, its memory and an engine, for Python programs.

from quire import LLM, SamplingParams

llm = LLM("tiny-python")
outputs = llm.generate(["def fib(n):"], SamplingParams(temperature=0, max_tokens=32))
with llm.session("class Stack:\\n") as session:
    session.append("    def push(self, x):\\n")
    branches = session.fork(n=2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from quire.base.config import EngineConfig, check_int
from quire.base.errors import InvalidArgument, Unsupported
from quire.base.hints import CacheHints
from quire.base.interrupts import uninterrupted
from quire.base.outputs import BeamSearchOutput, RequestOutput, WarmedSegment
from quire.base.process_exit import end_with_process
from quire.base.progress import on_terminal
from quire.base.sampling_params import BeamSearchParams, SamplingParams
from quire.base.segments import BlendParams, Segment
from quire.base.signatures import require_bool, suggests_keywords
from quire.base.speculation import Speculation
from quire.base.uncopied import Uncopied
from quire.blend.calibration import PROBES, BlendCalibration, QualityLimits
from quire.blend.given_parts import checked_part
from quire.build import build, quantization_problem
from quire.contracts.blend import BlendExecutor, BlendRetriever
from quire.contracts.executor import CacheLike
from quire.contracts.views import HistoryView
from quire.engine.abilities import ENGINE_REFUSALS, ENGINE_VERBS
from quire.engine.engine import Engine
from quire.engine.named_adapters import AdapterInfo
from quire.engine.page_use import OWNERS
from quire.engine.prompts import Prompt, Prompts, SegmentedPrompt, Text
from quire.engine.request_outputs import prefix_output
from quire.executor import counters
from quire.executor.executor import Executor
from quire.kv.rules import verbs_of
from quire.models.catalogue import resolve_adapter
from quire.models.families import LoadedModel
from quire.models.fingerprint import ModelIdentity, kept_formats
from quire.sessions import blend_calibration
from quire.sessions import history as session_history
from quire.sessions.durable import KeptSessions
from quire.sessions.prompts import Messages as Messages
from quire.sessions.prompts import PromptRequests, PromptsOrSessions
from quire.sessions.session import Session
from quire.sessions.sources import SessionSources
from quire.store.collection import Collected
from quire.store.commits import SessionCommit
from quire.store.history import Difference
from quire.store.journal import SessionJournal, SessionRecord
from quire.store.transfer import Transferred
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quire_inspector.drawing.page_maps import PageMaps
    from quire_inspector.drawing.summaries import Summary
    from quire_inspector.views.state_views import StateViews


@suggests_keywords
class LLM(Uncopied):
    """A loaded model that generates, and whose state sessions can hold.

    ``model`` is the name of a bundled model, a directory, or a Hugging Face id.
    ``quire.base.config.EngineConfig`` describes the keywords, as does ``quire generate --help``.
    ``chat_template`` may also be Jinja text, or the name of one of the model's templates.
    ``blend_retriever`` and ``blend_executor`` take the places of the store's chunks and of the
    built-in selection in prompts with ``blend``; their interfaces are in ``quire.blend``. Raises
    ``NotFound``, ``CheckpointError``, ``InvalidArgument``, ``Unsupported``, ``ResourceExhausted``.
    """

    _instead = "make another where it is needed, or serve it and send requests"

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
        enforce_eager: bool = False,
        async_scheduling: bool = True,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        speculative: Speculation | Mapping[str, Any] | str | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        quantization: str | None = None,
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        parse_special: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
        override_generation_config: Mapping[str, Any] | str | None = None,
        host_memory: int | str | None = None,
        store: Sequence[str] = (),
        adapter_ranks: int = 512,
        adapter_memory: int | str | None = None,
        state_dir: str | Path | None = None,
        blend_retriever: BlendRetriever | None = None,
        blend_executor: BlendExecutor | None = None,
    ) -> None:
        # The other arguments are the configuration's fields: no other local variable may exist yet.
        own = ("self", "__class__", "own", "blend_retriever", "blend_executor")
        given = {name: value for name, value in locals().items() if name not in own}
        config = EngineConfig.from_mapping(given)
        checked_part("blend_retriever", blend_retriever, "new_request")
        checked_part("blend_executor", blend_executor, "blend")
        if blend_executor is not None and config.tensor_parallel_size * config.pipeline_parallel_size > 1:
            allowed = "left out beside tensor_parallel_size: it chooses among rows of all heads"
            raise Unsupported(field="blend_executor", given=blend_executor, allowed=allowed)
        # Before the model is loaded, which takes longer than to find that the directory is in use.
        journal = None if config.state_dir is None else SessionJournal(Path(config.state_dir))
        try:
            parts = self._parts = build(config, progress=on_terminal())
            self._engine, self._adapters = parts.engine, parts.adapters
            self._requests = PromptRequests(parts.engine, parts.adapters, parts.default_params)
            self._sessions = SessionSources(
                self._requests, identity=parts.identity, journal=journal, executor=lambda: self.executor
            )
        except BaseException:
            if journal is not None:
                journal.close()
            raise
        self._executor: Executor | None = None
        end_with_process(self.close)
        self._views: StateViews | None = None
        try:
            parts.engine.blending.retriever = blend_retriever
            parts.engine.runner.row_sources.executor = blend_executor
            if not parts.engine.blending.refusal and blend_calibration.is_kept(parts.engine):
                parts.engine.blending.calibration = blend_calibration.kept_calibration(parts.engine)
            for name, path in (config.adapters or {}).items():
                self.load_adapter(name, path)
        except BaseException:
            self.close()
            raise

    # -- generating --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptsOrSessions,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        hints: CacheHints | None = None,
        blend: BlendParams | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: text or token ids, one or many. Return their outputs in their order.

        A list with a ``Segment`` in it is one prompt made of pieces: ``[Segment("a document"),
        Segment("another"), "a question"]``. With ``blend`` the state that its segments had by
        themselves is used wherever they stand, mended in part: approximate, and said to be so in
        ``RequestOutput.blend``. Without, the pieces are one text.

        A prompt may have embeddings of images or sounds at placeholders:
        ``{"prompt_token_ids": [5, -1, -1, 7], "multi_modal_data": {"image": rows}}``,
        ``{"prompt_embeds": rows}``, or ``ExecutorInputs`` of one row
        (``quire.engine.prompts.read_prompt``).

        A prompt may be a session. It is continued as by ``Session.generate``, in the same batch as
        the others: its new tokens stay in it. Give each session once. ``adapter`` and
        ``cache_salt`` are for the other prompts; a session has its own.

        Without ``sampling_params`` the model's ``generation_config.json`` gives the defaults.
        ``adapter`` is the name of a loaded adapter; None: the base model. Prompts with different
        ``cache_salt`` never share cached state. All prompts are checked before the first one runs.
        A request that fails later ends with ``finish_reason`` "error", and the others continue.
        ``hints`` say how long beginnings of the prompts are wanted, and how urgent they are;
        ``RequestOutput.hints`` has their results. ``use_tqdm`` shows on stderr how many prompts
        and tokens of them are done; None: on a terminal, for several prompts or a long one.
        """
        prepared = self._requests.prepare(
            prompts, sampling_params, adapter=adapter, cache_salt=cache_salt, hints=hints, blend=blend
        )
        return self._requests.run(prepared, use_tqdm)

    @uninterrupted
    def warm(
        self,
        segments: Sequence[Segment | Text],
        *,
        behind: Text | SegmentedPrompt | Messages | None = None,
        adapter: str | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool | None = None,
    ) -> list[WarmedSegment]:
        """Compute the state that segments have by themselves, as far as it is not kept, for prompts
        that are blended later. Return the tokens kept of each, as counts.

        ``behind`` is what these prompts begin with: text, token ids, messages of a chat (its
        system message), or a whole prompt, of which the part before its first segment counts. The
        state is then computed behind the first 512 tokens of that and is much nearer to what it is
        in prompts that begin so (``docs/blend.md``). Give it in each process, which remembers the
        last 256. Other prompts use what was computed without.

        It goes into the store, from which it is given up as other state is. ``Unsupported`` for a
        model that cannot be blended. The first request that fails raises its error, and the
        requests of all segments end.
        """
        submitted = self._requests.prepare_warm(segments, behind=behind, adapter=adapter, cache_salt=cache_salt)()
        return self._requests.warm(submitted, use_tqdm)

    @uninterrupted
    def calibrate_blending(
        self,
        texts: Sequence[Text | SegmentedPrompt] | None = None,
        *,
        probes: int = PROBES,
        limits: QualityLimits | None = None,
        use_tqdm: bool | None = None,
    ) -> BlendCalibration:
        """Measure the distance of blended answers from full computations; return the calibration,
        which holds for prompts from now on: the check layer, ratios for
        ``BlendParams(target=...)``, and whether prompts are blended at all (``limits``, by default
        ``QualityLimits()``).

        ``probes`` prompts are run in full and blended, with several check layers and ratios. They
        are made of ``texts``: prompts of pieces, as in ``generate``, are taken as they are; of
        others each 576 tokens, or as many as there is room for, make four chunks and a question.
        None: texts that the model samples. Texts of the use at hand are better. Nothing of them
        is kept.

        A store that outlives the process keeps the calibration, for later processes with this
        model. Adapters are not measured. ``Unsupported`` for a model that cannot be blended;
        ``ResourceExhausted``: there is no room for a probe. ``use_tqdm`` shows progress on stderr;
        None: on a terminal.
        """
        self._requests.require_open("calibrate_blending")
        return self._requests.calibrate(texts, probes, limits, use_tqdm)

    @property
    def blend_calibration(self) -> BlendCalibration | None:
        """Return the calibration of ``calibrate_blending``, here or in an earlier process; None: it
        found nothing."""
        self._requests.require_open("blend_calibration")
        return self._engine.blending.calibration

    @uninterrupted
    def prefetch(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        hints: CacheHints | None = None,
        only_idle: bool = False,
        most: int | None = None,
    ) -> RequestOutput:
        """Bring the state of a prompt, or of its beginning, into the pool before it is asked for.

        It is computed, as far as it is not there, when nothing else wants to run, unless ``hints``
        give a priority. The output has no continuations; its ``prompt_token_ids`` are what the pool
        holds then: all but the prompt's last token, which runs with the prompt.
        ``FailedPrecondition`` without a prefix cache.

        ``only_idle``: it ends early, with what it has, as soon as anything else is to run, and does
        not begin if something runs or if more than ``most`` tokens are missing. Then the output is
        not ``finished``.
        """
        require_bool("only_idle", only_idle)
        if most is not None:
            check_int("most", most, 1, also="or None")
        request = self._requests.submit_prefetch(
            prompt, adapter=adapter, cache_salt=cache_salt, hints=hints, only_idle=only_idle, most=most
        )
        try:
            self._engine.run([request])
        finally:
            self._engine.end([request])
        return prefix_output(request, self.tokenizer, prompt if isinstance(prompt, str) else None)

    def chat(
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
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered with the model's chat template.

        With ``blend`` the texts that are marked by ``"segment": True``, beside the ``text`` of a
        part or the ``content`` of a message, are segments, as in ``generate``. Those that the
        template does not write as they are, ``RequestOutput.blend.unplaced`` names.
        """
        prepared = self._requests.prepare_chat(
            messages,
            sampling_params,
            adapter=adapter,
            cache_salt=cache_salt,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            hints=hints,
            blend=blend,
        )
        return self._requests.run(prepared, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        adapter: str | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most probable continuations of each prompt: text or token ids, one or many.
        All prompts are checked before the first one runs. A prompt that fails later has an
        ``error``, and the others continue."""
        searches, texts = self._requests.prepare_beams(prompts, params, adapter=adapter, cache_salt=cache_salt)
        return self._requests.search(searches, texts, use_tqdm)

    # -- sessions ----------------------------------------------------------------------------------

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
        use_tqdm: bool | None = None,
    ) -> Session:
        """Return a live sequence that starts with ``prompt``, which is run.

        ``prompt`` is text, token ids, either with embeddings as in ``generate``, or nothing.
        ``pin``: its state is never dropped when the pool is short. ``adapter`` is the name of a
        loaded one; ``Session.use_adapter`` changes it.

        ``window``: only the first ``sink`` tokens and the last ``window - sink`` are seen and kept
        (StreamingLLM). So memory and time per token stay constant however long it gets, also beyond
        the model's context. Such a session shares no prefix with others. ``Unsupported``: a sink on
        a model that runs through transformers' layers.

        ``cache`` is a KV cache of ``executor``, or a handle; the session becomes a copy-on-write
        fork of it. It replaces all of these but ``pin``, ``name`` and ``labels``; ``row`` picks one
        of several rows. The session has the row's tokens, window and adapters, continues under the
        last of these, and shares no prefix with others.

        ``name`` and ``labels`` (strings by strings) tell many sessions apart; they need not be
        unique. With ``state_dir`` a session that has a name outlives the process: ``resume``.
        ``use_tqdm`` is as in ``Session.append``.
        """
        return self._sessions.session(
            prompt,
            adapter=adapter,
            cache_salt=cache_salt,
            pin=pin,
            window=window,
            sink=sink,
            cache=cache,
            row=row,
            name=name,
            labels=labels,
            use_tqdm=use_tqdm,
        )

    def load_session(
        self,
        path: str | Path,
        *,
        convert_dtype: bool = False,
        row: int | None = None,
        use_tqdm: bool | None = None,
    ) -> Session:
        """Return the session of a file by ``Session.save``, or of a row of a serialized KV cache.

        ``Session.chat`` continues the chat of the file. ``row`` picks one of several rows of what
        ``KVCache.serialize`` returned. ``convert_dtype`` accepts another KV dtype. ``use_tqdm``
        shows the bytes on stderr; None: on a terminal, if it takes long. ``InvalidArgument``
        (another model, dtype or version: expected and found), ``DataLoss`` (damaged),
        ``NotFound``, ``ResourceExhausted``.
        """
        return self._sessions.load(path, convert_dtype, row, use_tqdm)

    def session_from_bytes(
        self, data: bytes | bytearray | memoryview, *, convert_dtype: bool = False, row: int | None = None
    ) -> Session:
        """Return the session of bytes by ``Session.to_bytes``; the rest as in ``load_session``."""
        return self._sessions.from_bytes(data, convert_dtype, row)

    def resume(self, name: str) -> Session:
        """Return the session that ``state_dir`` keeps under a name, be it of an earlier process.

        Its tokens, labels, adapters, window and chat are those after the last call on it that
        returned; its state is found or computed at its next use. ``NotFound``: no session of that
        name is kept, or it is of another model. ``InvalidArgument``: an adapter of it is not
        loaded.
        """
        return self._sessions.resume(name)

    def resumable(self) -> list[str]:
        """Return the names of the sessions that ``resume`` returns, the oldest first."""
        return self._sessions.keeper("resumable").names()

    def forget(self, name: str) -> None:
        """Keep the session of a name no longer; ``NotFound``. An open one is then not kept."""
        self._sessions.keeper("forget").forget(name)

    def restored(self, record: SessionRecord) -> Session:
        """Return the session of a record. Nothing keeps it: a server keeps its own, by ids."""
        return self._sessions.keeper("restored").restored(record)

    @property
    def kept(self) -> KeptSessions | None:
        """Return the part that keeps sessions in ``state_dir``; None without a directory."""
        return self._sessions.kept

    # -- history -----------------------------------------------------------------------------------
    # ``owner`` is the owner of the branches: "" for a program, else as in ``Session.commit``.
    # Commits are named by branches, or by their ids, of which 8 digits suffice. All raise
    # ``FailedPrecondition`` if the store has no durable tier, ``TierError`` if that cannot be
    # reached, and ``StoreDamaged`` for a damaged record.

    @uninterrupted
    def checkout(self, name: str, *, owner: str = "") -> Session:
        """Return a session that continues a commit: its tokens, adapters, window, labels and
        chat, and the place in history from which its own commits follow. It has no name.

        Its state is found by its tokens at its next use, or computed again. State that tokens do
        not give (after ``set_kv``, or of embeddings) is loaded here; ``StoreDamaged`` if it is
        damaged or gone. ``NotFound``: there is no such branch. ``InvalidArgument``: another model's
        commit, or one of its adapters is not loaded.
        """
        return session_history.checkout(self._sessions, name, owner)

    def branches(self, *, owner: str = "", damaged: list[str] | None = None) -> Mapping[str, SessionCommit]:
        """Return the commit at which each branch stands, by name in order. ``damaged`` gets a
        sentence for each that cannot be read; the log has these if it is None."""
        return session_history.branches(self._sessions, owner, damaged)

    def log(self, name: str, *, owner: str = "") -> list[SessionCommit]:
        """Return a commit and all before it, the latest first. ``NotFound``."""
        return session_history.log(self._sessions, name, owner)

    def diff(self, a: str, b: str, *, owner: str = "") -> Difference:
        """Return the difference of two commits: the common part, and the part of each.
        ``NotFound``."""
        return session_history.diff(self._sessions, a, b, owner)

    @uninterrupted
    def delete(self, name: str, *, owner: str = "") -> str:
        """Forget a branch; return the id of its commit, which stays until ``gc``; "" if that is
        lost. ``NotFound``."""
        return session_history.delete(self._sessions, name, owner)

    @uninterrupted
    def push(
        self, name: str, url: str, *, force: bool = False, owner: str = "", use_tqdm: bool | None = None
    ) -> Transferred:
        """Copy a branch and its history to another store, as ``store=`` names one. What is there is
        not sent again; everything is verified before the branch is written there. ``NotFound``;
        ``AlreadyExists``: the branch there is no earlier state of this one, and not ``force``.
        ``use_tqdm`` shows the bytes on stderr; None: on a terminal."""
        return session_history.copy(self._sessions, "push", name, url, force=force, owner=owner, use_tqdm=use_tqdm)

    @uninterrupted
    def pull(
        self, name: str, url: str, *, force: bool = False, owner: str = "", use_tqdm: bool | None = None
    ) -> Transferred:
        """Copy a branch and its history from another store; the rest as in ``push``."""
        return session_history.copy(self._sessions, "pull", name, url, force=force, owner=owner, use_tqdm=use_tqdm)

    @uninterrupted
    def gc(self, *, dry_run: bool = False) -> Collected:
        """Remove commits that no branch of any owner reaches, and state that only they need.
        ``dry_run``: only report them. Commits of the last hour stay: other processes may be about
        to name them. A damaged record keeps what it may reach, and is in ``damaged``."""
        return session_history.gc(self._sessions, dry_run)

    # -- adapters ----------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | Path) -> AdapterInfo:
        """Load a LoRA adapter for ``adapter=name``, while requests run.

        ``path`` is a bundled adapter, a PEFT directory or a Hugging Face id. Everything about it is
        checked first: ``NotFound``, ``CheckpointError`` (damaged, or made for another model:
        expected and found), ``Unsupported`` (a kind of adapter or a layer that is not computed, by
        name), ``AlreadyExists``, ``ResourceExhausted``. Base results stay the same to the bit. A
        tokenizer or template beside it must be the model's, unless this LLM was given which to use.
        """
        self._requests.require_open("load_adapter")
        if not isinstance(path, (str, Path)):
            raise InvalidArgument(f"load_adapter takes the path of a directory, got {path!r}", field="path")
        return self._adapters.load(name, path.expanduser() if isinstance(path, Path) else resolve_adapter(path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter and everything that was cached under it. ``NotFound``;
        ``FailedPrecondition``, with their numbers, while requests or open sessions use it."""
        self._requests.require_open("unload_adapter")
        self._adapters.unload(name)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Return the loaded adapters by name."""
        self._requests.require_open("adapters")
        return self._adapters.infos()

    # -- parts -------------------------------------------------------------------------------------

    @property
    def executor(self) -> Executor:
        """Return the executor contract over the same weights and pages. It is a new one after
        ``shutdown`` and after an error of the device."""
        self._requests.require_open("executor")
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
                self._executor.on_drafts = self._engine.metrics.count_drafts
            return self._executor

    @property
    def model(self) -> LoadedModel:
        """Return the model, which holds the weights."""
        return self._parts.model

    @property
    def engine(self) -> Engine:
        """Return the engine, the level below: requests and steps."""
        return self._engine

    @property
    def requests(self) -> PromptRequests:
        """Return the part that checks, encodes and queues requests."""
        return self._requests

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model without one: it works with token ids."""
        return self._engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """Return the parameters of calls without ``SamplingParams``, from the model's
        ``generation_config.json``, or ``override_generation_config``."""
        return self._requests.default_params

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV state of one token, over all layers."""
        state = self._engine.runner.state
        return sum(state.geometry.page_bytes) // state.page_size

    @property
    def config(self) -> EngineConfig:
        return self._parts.config

    @property
    def identity(self) -> ModelIdentity:
        """Return the model's identity. States of two models are alike if their identities are."""
        return self._parts.identity

    # -- reports -----------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget the state of all finished requests."""
        self._requests.require_open("reset_prefix_cache")
        self._engine.reset_prefix_cache()

    def capabilities(self) -> dict[str, Any]:
        """Return the verbs and combinations of this model here, with reasons against others."""
        self._requests.require_open("capabilities")
        kinds, device = [spec.kind for spec in self.model.layer_specs], self.model.device
        quantised = quantization_problem("int8" if device.type == "cpu" else "fp8", device)
        return {
            "executor": self.executor.capabilities(),
            "verbs": verbs_of(kinds),
            "engine": ENGINE_REFUSALS,
            "engine_verbs": ENGINE_VERBS
            | {"blending": self._engine.blending.refusal, "quantised weights": quantised}
            | ({} if self.tokenizer is not None else {"structured outputs": "this model has no tokenizer"}),
            "notes": self._parts.notes,
            "blend_calibration": None if (found := self._engine.blending.calibration) is None else found.document(),
        }

    def status(self) -> dict[str, Any]:
        """Return counts of requests, pages (of all pools; see ``PageUse``), sequences, adapters;
        and the formats of the weights in their files, and those of them that kernels multiply as
        they are. "executor" counts the calls on ``executor``;
        None until it is first used. ``metrics`` counts what the engine runs itself."""
        self._requests.require_open("status")
        use = self._engine.page_use()
        return {
            "num_requests_running": self._engine.num_running,
            "num_requests_waiting": self._engine.num_waiting,
            "num_pages": use.total,
            **{f"num_pages_{owner}": getattr(use, owner) for owner in OWNERS},
            "kv_cache_usage": use.usage,
            "num_sequences": len(self._engine.runner.state.sequence_ids()),
            "num_adapters": len(self._adapters.infos()),
            "weight_formats": [*self.model.formats],
            "weight_formats_kept": kept_formats(self.model),
            "executor": None if self._executor is None else self._executor.status(),
        }

    def metrics(self) -> dict[str, float]:
        """Return the counters since the start by name, with the executor's."""
        self._requests.require_open("metrics")
        return self._engine.snapshot() | counters.snapshot(self._executor)

    # -- views -------------------------------------------------------------------------------------

    @property
    def views(self) -> StateViews:
        """Return the views of the state: branches, pages, texts."""
        self._requests.require_open("views")
        if self._views is None:
            from quire_inspector.views.state_views import StateViews

            self._views = StateViews(self._engine, self._requests.adapters, self._engine.timeline.model)
        return self._views

    def pages(self) -> PageMaps:
        """Return the pages of all pools, by holder, to be drawn in notebooks and terminals, and by
        ``plot``. Its ``pools`` are the views. ``FailedPrecondition`` once it is closed."""
        from quire_inspector.views.llm_repr import pool_pages

        return pool_pages(self.views)

    def history(self) -> HistoryView:
        """Return all branches as trees over tokens, to be drawn as ``pages`` is.
        ``FailedPrecondition`` once it is closed."""
        return self.views.history(owner=None)

    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        """Record the steps and requests inside of a ``with`` block into a file for Perfetto or
        ``chrome://tracing``. No texts are in it. ``NotFound`` for a missing directory, and
        ``ResourceExhausted`` at the end for a full disk."""
        self._requests.require_open("trace")
        if not isinstance(path, (str, Path)):
            raise InvalidArgument(field="path", given=path, allowed="the name of a file")
        from quire_inspector.views.tracing import traced

        timeline = self._engine.timeline
        return traced(timeline, timeline.model, Path(path).expanduser())

    def _repr_html_(self) -> str:
        return self._summary()._repr_html_()

    def __rich__(self) -> RenderableType:
        return self._summary().__rich__()

    def _summary(self) -> Summary:
        from quire_inspector.views.llm_repr import llm_summary

        return llm_summary(self)

    def __repr__(self) -> str:
        from quire_inspector.views.llm_repr import llm_repr

        return llm_repr(self)

    # -- its end -----------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Give everything back; later calls raise ``FailedPrecondition``. Twice is harmless."""
        if self._requests.closed or self._engine.lock.is_parents:
            return
        self._requests.closed = True
        if self._executor is not None:
            self._executor.shutdown()
        self._engine.shutdown()
        if self._sessions.kept is not None:
            self._sessions.kept.close()
        if self._parts.ranks is not None:
            self._parts.ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
