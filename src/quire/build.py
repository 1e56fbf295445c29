"""Builds an engine or an executor from a configuration: model, KV state, runner, store. No other
module knows every concrete class.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from quire.adapters.divided import DividedAdapters
from quire.adapters.peft import read_adapter
from quire.adapters.pool import AdapterPool
from quire.adapters.targets import absent_linears, embedding_of, linears_of, low_rank_refusal
from quire.adapters.texts import check_adapter_texts
from quire.base.config import ATTENTION_CLASSES, EngineConfig, ExecutorConfig, parse_bytes
from quire.base.errors import CheckpointError, InvalidArgument, Unsupported, size_words
from quire.base.process_limits import free_memory
from quire.base.sampling_params import SamplingParams
from quire.base.speculation import Speculation, read_speculation
from quire.branches.stored_state import StoredState
from quire.contracts.adapters import Adapter
from quire.contracts.attention import AttentionBackend
from quire.contracts.block_calls import LayerKernels
from quire.contracts.executor import ExecutorType
from quire.contracts.kv_format import KVFormat
from quire.contracts.layers import LayerSpec, Recurrent
from quire.contracts.linear import Quantization
from quire.contracts.ranks import Grid
from quire.engine.assembly import make_engine
from quire.engine.decode_turns import LEAST_ROWS_ON_CPU, DecodeTurns
from quire.engine.engine import Engine
from quire.engine.exact import ExactWindows
from quire.engine.named_adapters import NamedAdapters
from quire.engine.step_builder import Limits
from quire.executor.drafting import Drafting
from quire.executor.executor import Executor
from quire.executor.factory import Choices, Factory, check_devices, check_flash, check_heads, check_length
from quire.kernels.block import native_blocks
from quire.kernels.cpu_process import keep_freed_memory, limit_threads
from quire.kernels.draw.triton_draw import fastest_draw
from quire.kernels.draw.triton_penalties import fastest_penalties
from quire.kernels.experts import native_experts
from quire.kernels.linear.cpu_linear import native_linear
from quire.kernels.linear.float8 import Float8Linear, float8_problem
from quire.kernels.linear.low_rank import native_low_rank
from quire.kernels.linear.triton_blocks import TritonBlocks
from quire.kernels.merges import scored_merges
from quire.kernels.native_library import native_problem
from quire.kernels.recurrence.cpu_recurrence import native_mixers
from quire.kernels.recurrence.triton_recurrence import fastest_recurrence
from quire.kernels.rows.cpu_rows import native_rows
from quire.kernels.rows.triton_rows import TritonRows
from quire.kernels.triton_support import attention_problem, triton_problem
from quire.kv.divided_rows import DividedRows
from quire.kv.exchange import dtype_name
from quire.kv.formats import kv_format
from quire.kv.forward_need import pages_for
from quire.kv.recurrent import bytes_per_state
from quire.kv.state import State
from quire.kv.storage import bytes_per_token
from quire.models.catalogue import resolve_model, resolve_tokenizer
from quire.models.eagle import load_eagle
from quire.models.families import LoadedModel
from quire.models.fingerprint import checkpoint_mark, kept_formats, length_rule_of, model_fingerprint
from quire.models.heads import Head
from quire.models.loading import WHOLE, Outline, check_division, load_model
from quire.models.mtp import load_mtp
from quire.models.sources import read_generation_config
from quire.runner.graph import CudaCapture, GraphRunner, usual_sizes
from quire.runner.local import LocalRunner, Runner
from quire.runner.memory_profile import (
    capture_usual,
    captured_bytes,
    device_memory,
    greatest_lengths,
    measured_budget,
    run_greatest_step,
)
from quire.runner.pool_budget import (
    ATTENTION,
    LEAST_STATES,
    STATE_SHARE,
    Budget,
    PoolSizes,
    check_outline,
    check_room,
    checkpoint_interval,
    free_budget,
    given_budget,
    longest_of,
    pool_sizes,
    sequence_bytes,
    short_pool,
)
from quire.runner.rank_processes import Ranks
from quire.runner.ranks import RankedRunner
from quire.runner.row_dependence import content_dependence, row_dependence
from quire.runner.torch_group import TorchGroup, TorchLine
from quire.sampling.seen_tokens import SeenTokens
from quire.speculation.draft_model import DraftModel, check_vocabulary, check_vocabulary_size
from quire.speculation.heads import Heads
from quire.speculation.proposer import Proposer
from quire.speculation.proposers import proposer_of
from quire.store.memory import MemoryTier
from quire.store.stack import Store
from quire.store.urls import open_tiers, state_tier
from quire.text.chat_templates import with_chosen_template
from quire.text.tokenizer import Tokenizer
from quire.weights.gguf_container import open_gguf
from quire.weights.gguf_paths import is_gguf

logger = logging.getLogger("quire")


class Identity:
    """Which model this is; the weights digest is computed when it is first asked for."""

    def __init__(self, path: Path, model: LoadedModel) -> None:
        self.path, self._model = path, model
        self._found: dict[str, str] = {}

    def fields(self) -> dict[str, str]:
        """Return ``architecture``, ``config`` and ``weights``, and ``length`` if that matters."""
        if not self._found:
            fields = asdict(model_fingerprint(self.path, self._model))
            self._found = {name: value for name, value in fields.items() if value}
        return self._found.copy()


@dataclass(frozen=True, slots=True)
class Parts:
    """What an ``LLM`` is made of."""

    config: EngineConfig
    path: Path
    engine: Engine
    model: LoadedModel
    runner: Runner
    tokenizer: Tokenizer | None
    identity: Identity
    adapters: NamedAdapters
    default_params: SamplingParams
    ranks: Ranks | None
    """The other processes that hold parts of the model; None: this one holds all."""
    notes: tuple[str, ...]
    """Decisions that a user may want to know of: the dtype taken, the size of the pool."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part that a rank loads."""

    config: EngineConfig
    path: Path
    device: str
    grid: Grid
    rank: int
    meeting: Path
    """Where the ranks' groups meet (``joined``)."""
    mark: str
    """``checkpoint_mark`` of rank 0."""
    threads: int
    """Threads of a rank on a CPU."""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.grid.size}"


def build(config: EngineConfig, *, progress: bool = False) -> Parts:
    """Load a model and put an engine around it. Each misfit is one clear error, before memory is
    spent."""
    path = resolve_model(config.model, revision=config.revision)
    grid = Grid(config.tensor_parallel_size, config.pipeline_parallel_size)
    if grid.size == 1:
        return _build(config, path, None, progress=progress)
    check_division(path, grid, config.max_model_len)
    ranks = Ranks(grid, RANK_MAIN)
    try:
        return _build(config, path, ranks, progress=progress)
    except BaseException:
        ranks.close()
        raise


def _build(config: EngineConfig, path: Path, ranks: Ranks | None, *, progress: bool) -> Parts:
    device = resolve_device(config.device)
    if device.type == "cpu":
        limit_threads()
    group, line = (None, None) if ranks is None else meet(ranks, config, path, device)
    shared = open_gguf(path) if is_gguf(path) else None  # its readers below find it open
    tokenizer = load_tokenizer(config, path)
    speculation = read_speculation("speculative", config.speculative)
    generation, chosen = read_generation_config(path), config.override_generation_config or {}
    SamplingParams.from_generation_config(chosen, "override_generation_config")
    defaults = SamplingParams.from_generation_config({**generation, **chosen})
    model = load_model(
        path,
        device=device,
        dtype=config.dtype,
        progress=progress,
        max_model_len=config.max_model_len,
        kernels=layer_kernels(device, config.quantization),
        before_weights=lambda outline: check_outline(config, outline, device),
        group=group,
        grid=WHOLE if ranks is None else ranks.grid,
    )
    if ranks is not None:
        join_loaded(ranks, model, line)
    check_quantized(model, config.quantization)
    if device.type == "cpu":
        keep_freed_memory()
    if tokenizer is not None:
        tokenizer.check_fits(model.vocab_size)
    max_len = longest_of(config, model.max_position)
    format = kv_format(config.kv_dtype, model.dtype)
    adapters = make_adapters(model, config.adapter_ranks, config.adapter_memory, ranks)
    draft = None
    if speculation is not None:
        draft = load_drafter(config, speculation, path, model, tokenizer, device, max_len, progress)
    captures = (
        device.type == "cuda" and ranks is None and not config.enforce_eager and not getattr(model, "fallback", False)
    )
    runs_ahead = device.type != "cpu" and ranks is None and config.async_scheduling
    budget = pool_budget(config, model, adapters, format, device, max_len, captures=captures)
    proposer: DraftModel | Heads | None = None
    if isinstance(draft, Head) and speculation is not None:
        proposer, budget = make_heads(config, draft, speculation.method, model, budget, format, device, max_len)
    elif draft is not None and not isinstance(draft, Head):
        proposer, budget = make_draft_model(config, draft, model, budget, format, device, max_len)
    budget = rank_budget(budget, ranks, model, format, device, is_given=config.kv_cache_memory is not None)
    sizes = pool_sizes(config, model.layer_specs, format, max_len, budget, slack=int(runs_ahead))
    division = joined_division(ranks, sizes, model)
    state = make_state(
        model.layer_specs,
        sizes,
        config.page_size,
        format,
        device,
        config.attention_backend,
        padding=captures,
        slack=int(runs_ahead),
        division=division,
    )
    interval = checkpoint_interval(config, model.layer_specs, format)
    local = LocalRunner(model, state, device, adapters, group, line)
    runner: Runner = local
    dependences = [dependences_of(model, state)]
    if ranks is not None:
        dependences += ranks.wait()
        runner = RankedRunner(local, ranks)
    elif captures and not state.static_refusal(1) and (memory := device_memory(device)):
        runner = graphs = GraphRunner(local, CudaCapture(), longest=max_len)
        capture_usual(memory, graphs.capture, usual_sizes(config.max_num_seqs), progress)
    del shared
    identity = Identity(path, model)
    engine = make_engine(
        runner,
        limits=Limits(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=sizes.step_tokens),
        max_model_len=max_len,
        tokenizer=tokenizer,
        eos_ids=eos_ids(generation, model.config, tokenizer, model.vocab_size),
        enable_prefix_caching=config.enable_prefix_caching,
        checkpoint_interval=interval,
        seed=config.seed,
        stored=StoredState(runner, make_store(config), identity),
        speculation=speculation,
        proposer=proposer,
        dependence=next((one for one, _ in dependences if one), ""),
        content_dependence=next((one for _, one in dependences if one), ""),
    )
    engine.sampling.kernel = fastest_draw(device)
    if device.type != "cpu":
        engine.sampling.seen = SeenTokens(model.vocab_size, device, fastest_penalties(device))
    engine.stepper.runs_ahead = runs_ahead
    if isinstance(runner, RankedRunner) and runner.stages > 1 and config.async_scheduling:
        stepper, least = engine.stepper, 1 if device.type == "cuda" else LEAST_ROWS_ON_CPU
        stepper.turns = DecodeTurns(runner, stepper.decodes_ahead, stepper.in_flight, least)
    engine.timeline.model = Path(config.model).name if Path(config.model).exists() else str(config.model)
    held: list[str] = []
    if state.geometry.specs:
        windows = f" and {sizes.window_tokens} tokens of windowed layers" if sizes.window_tokens is not None else ""
        pages = pages_for(sizes.tokens, config.page_size)
        held.append(
            f"{pages} pages of {config.page_size} tokens{windows} in {dtype_name(format.dtype) if config.kv_dtype == 'auto' else config.kv_dtype}"
        )
    if state.recurrent_ids:
        every = f", kept every {interval} tokens" if interval else ""
        held.append(f"{sizes.states} recurrent states of {state.geometry.state_bytes:,} bytes{every}")
    weights = f", {model.quantization} weights" if model.quantization else ""
    if kept := kept_formats(model):
        weights = f", weights in {', '.join(kept)} as the file has them"
    part = "" if ranks is None else f", in each of {ranks.size} ranks"
    notes: tuple[str, ...] = (
        f"{model.architecture}, {model.num_parameters / 1e6:.1f}M parameters in {dtype_name(model.dtype)} on {device}{weights}, "
        f"{model.parameter_bytes / 2**20:.0f} MiB{part}",
        f"KV pool: {' and '.join(held)}, {state.num_bytes / 2**20:.0f} MiB"
        + (
            f", {bytes_per_token([spec for spec in model.layer_specs if isinstance(spec, ATTENTION)], format):,} bytes a token in all layers"
            if state.geometry.specs
            else ""
        ),
    )
    notes = (*notes, *short_pool(sizes, model.layer_specs, max_len, state.num_bytes))
    if draft is not None and proposer is not None:
        notes = (
            *notes,
            f"drafts: {draft.architecture}, {draft.num_parameters / 1e6:.1f}M parameters in {dtype_name(draft.dtype)}, "
            f"{draft.parameter_bytes / 2**20:.0f} MiB, with a KV pool of {proposer.runner.state.num_bytes / 2**20:.0f} MiB",
        )
    notes = (*notes, exact_note(engine.exact))
    for note in notes:
        logger.info(note)
    for note in expanded_weights(model):
        logger.warning(note)
        notes = (*notes, note)
    if (rule := length_rule_of(model)) is not None and rule.inexact:
        logger.warning(rule.inexact)
        notes = (*notes, rule.inexact)

    def read(directory: Path) -> Adapter:
        if tokenizer is not None:
            chose = {
                "chose_tokenizer": config.tokenizer is not None,
                "chose_template": config.chat_template is not None,
            }
            check_adapter_texts(directory, tokenizer, **chose)
        return read_adapter(directory, model, admit=runner.adapters.admit)

    named = NamedAdapters(engine, read)
    if device.type == "cpu" and (linear := native_linear()) is not None:
        linear.memory.collapse()
    return Parts(config, path, engine, model, runner, tokenizer, identity, named, defaults, ranks, notes)


RANK_MAIN = "from quire.rank_process import main; main"
"""The code that a rank's process runs, but for its argument."""


def meet(
    ranks: Ranks, config: EngineConfig, path: Path, device: torch.device
) -> tuple[TorchGroup | None, TorchLine | None]:
    """Let the other ranks begin to load their parts; return as ``joined``."""
    check_devices(device, ranks.grid)
    first = device.index or 0
    places = [str(device) if device.type == "cpu" else f"cuda:{first + rank}" for rank in range(ranks.size)]
    mark = checkpoint_mark(path)
    threads = ranks.share_threads() if device.type == "cpu" else 1
    parts = [
        RankPart(config, path, place, ranks.grid, rank, ranks.meeting, mark, threads)
        for rank, place in enumerate(places)
    ]
    ranks.tell(parts[1:])
    ranks.wait()
    return joined(parts[0], device)


def joined(part: RankPart, device: torch.device) -> tuple[TorchGroup | None, TorchLine | None]:
    """Wait for the other ranks; return the slices of this rank's stage, and the stages. None: there
    is one."""
    if device.type == "cpu":
        torch.set_num_threads(part.threads)
    grid, stage = part.grid, part.grid.stage(part.rank)
    slices = part.meeting.with_name(f"{part.meeting.name}-{stage}")
    group = TorchGroup(grid.share(part.rank), device, slices) if grid.slices > 1 else None
    return group, TorchLine(part.rank, grid, device, part.meeting) if grid.stages > 1 else None


def join_loaded(ranks: Ranks, model: LoadedModel, line: TorchLine | None) -> None:
    """Wait until all ranks have loaded; learn what they have expanded."""
    expanded = Counter(model.expanded)
    for rank, other in enumerate(ranks.wait(), 1):
        if ranks.grid.stage(rank) and not ranks.grid.share(rank).rank:
            expanded.update(other)
    model.expanded = dict(expanded)
    if line is not None and model.stages is not None:
        line.use(model.stages, model.vocab_size)


def rank_budget(
    budget: Budget, ranks: Ranks | None, model: LoadedModel, format: KVFormat, device: torch.device, *, is_given: bool
) -> Budget:
    """Return the bytes for the layers of all stages with which no rank takes more than its share:
    the budget, which is each rank's if it is given, else what all ranks of a CPU divide."""
    if ranks is None:
        return budget
    nbytes = budget.nbytes if is_given or device.type != "cpu" else budget.nbytes // ranks.size
    return replace(budget, nbytes=int(nbytes / stage_share(model, format)))


def dependences_of(model: LoadedModel, state: State) -> tuple[str, str]:
    """Return ``row_dependence`` and ``content_dependence`` of the blocks that are here."""
    return row_dependence(model, state), content_dependence(model)


def stage_share(model: LoadedModel, format: KVFormat) -> float:
    """Return the largest part of the memory of layers of one kind that a stage has."""
    if model.stages is None:
        return 1.0
    ids = sorted(model.stages.owners)
    kinds: dict[object, Counter[int]] = {}
    for layer, spec in zip(ids, model.layer_specs, strict=True):
        is_recurrent = isinstance(spec, Recurrent)
        size = bytes_per_state([spec]) if is_recurrent else bytes_per_token([spec], format)  # type: ignore[list-item]
        kind = "states" if is_recurrent else getattr(spec, "layer_window", None) is None
        kinds.setdefault(kind, Counter())[model.stages.owners[layer]] += size
    return max(max(one.values()) / one.total() for one in kinds.values())


def joined_division(ranks: Ranks | None, sizes: PoolSizes, model: LoadedModel) -> DividedRows | None:
    """Let the other ranks make their states; return the division of all rows. None: no ranks."""
    if ranks is None:
        return None
    ranks.send(sizes)
    return division_of(model, ranks.grid, 0, ranks)


def division_of(model: LoadedModel, grid: Grid, rank: int, peers: Ranks | None) -> DividedRows:
    """Return the division of a rank's rows; ``peers``: the other ranks, for rank 0."""
    return DividedRows(grid, rank, model.whole_specs, peers, {} if model.stages is None else model.stages.owners)


def exact_note(exact: ExactWindows) -> str:
    """Return the cost of requests with ``exact``, in words."""
    if not exact.dependence:
        return "exact=True costs nothing: a row of this model is the same in any batch"
    if exact.refusal:
        return f"exact=True is refused: {exact.refusal}"
    return f"exact=True verifies tokens in forwards of {exact.size} rows of one request: {exact.dependence}"


def load_draft_model(
    config: EngineConfig,
    speculation: Speculation,
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    device: torch.device,
    progress: bool,
) -> LoadedModel | None:
    """Load the model that drafts; None: the method has none. ``InvalidArgument`` if its vocabulary
    is not that of ``model``, ``Unsupported`` for a head."""
    if speculation.method in ("eagle", "mtp"):
        raise Unsupported(
            f"speculative: {speculation.method} is a head, which reads the steps of an LLM; executors draft by lookup or "
            "by a draft model",
            field="speculative",
            given=speculation.method,
        )
    if speculation.model is None:
        return None
    name = os.fspath(speculation.model)
    path = resolve_model(name)
    check_vocabulary(name, Tokenizer.from_path(path, scored_merges()), tokenizer)
    draft = load_model(
        path,
        device=device,
        dtype=config.dtype,
        progress=progress,
        max_model_len=config.max_model_len,
        kernels=layer_kernels(device, config.quantization),
    )
    check_vocabulary_size(name, draft.vocab_size, model.vocab_size, is_compared=tokenizer is not None)
    return draft


def load_drafter(
    config: EngineConfig,
    speculation: Speculation,
    path: Path,
    model: LoadedModel,
    tokenizer: Tokenizer | None,
    device: torch.device,
    max_len: int,
    progress: bool,
) -> LoadedModel | Head | None:
    """Load the model or the head that drafts for ``model``, which is in ``path``; None: the method
    has none. ``InvalidArgument`` if it does not fit the model."""
    if speculation.method == "mtp":
        return load_mtp(path, model, layer_kernels(device, config.quantization))
    if speculation.method == "eagle" and speculation.model is not None:
        head = resolve_model(os.fspath(speculation.model))
        return load_eagle(head, path, model, max_len, layer_kernels(device, config.quantization))
    return load_draft_model(config, speculation, model, tokenizer, device, progress)


def make_draft_model(
    config: EngineConfig,
    draft: LoadedModel,
    model: LoadedModel,
    budget: Budget,
    format: KVFormat,
    device: torch.device,
    max_len: int,
) -> tuple[DraftModel, Budget]:
    """Return the proposer of a loaded model, and the budget that its pool leaves."""
    parts = _drafter_parts("draft model", config, draft, model, budget, format, device, max_len)
    proposer = DraftModel(
        parts.runner,
        max_len=parts.max_len,
        step_tokens=parts.step_tokens,
        vocab_size=model.vocab_size,
        width=parts.width,
    )
    return proposer, parts.left


def make_heads(
    config: EngineConfig,
    head: Head,
    method: str,
    model: LoadedModel,
    budget: Budget,
    format: KVFormat,
    device: torch.device,
    max_len: int,
) -> tuple[Heads, Budget]:
    """Return the proposer of a loaded head, and the budget that its pool leaves."""
    parts = _drafter_parts("head", config, head, model, budget, format, device, max_len)
    heads = Heads(parts.runner, head, method, max_len=parts.max_len, step_tokens=parts.step_tokens, width=parts.width)
    return heads, parts.left


class _DrafterParts(NamedTuple):
    """What a proposer with a state of its own is made of, and the budget that its pool leaves."""

    runner: LocalRunner
    max_len: int
    step_tokens: int
    width: int
    left: Budget


def _drafter_parts(
    kind: str,
    config: EngineConfig,
    draft: LoadedModel | Head,
    model: LoadedModel,
    budget: Budget,
    format: KVFormat,
    device: torch.device,
    max_len: int,
) -> _DrafterParts:
    """Make a state for ``draft``, which ``kind`` names in errors. Its pool and the model's hold
    about as many tokens. ``ResourceExhausted`` if its share holds no sequence."""
    own_format, length = kv_format("auto", draft.dtype), min(max_len, draft.max_position)
    own = sequence_bytes(draft.layer_specs, own_format, length)
    share = budget.nbytes * own // max(1, own + sequence_bytes(model.layer_specs, format, max_len))
    words = f"speculative: the {kind}'s share of the KV pool, {size_words(share)} of {size_words(budget.nbytes)}, holds"
    sizes = pool_sizes(config, draft.layer_specs, own_format, length, Budget(share, words, budget.advice))
    state = make_state(draft.layer_specs, sizes, config.page_size, own_format, device, config.attention_backend)
    left = budget.nbytes - state.num_bytes
    words = f"{size_words(left)} for the KV pool, beside {size_words(state.num_bytes)} for the {kind}'s, hold"
    budget = replace(budget, nbytes=left, words=words)
    options = read_speculation("speculative", config.speculative)
    width = 1 if options is None else options.width
    return _DrafterParts(LocalRunner(draft, state, device), length, sizes.step_tokens, width, budget)


def expanded_weights(model: LoadedModel) -> Iterator[str]:
    """Yield a note on the formats of a file's weights that no kernel multiplies, if any."""
    if model.expanded:
        form = model.quantization or dtype_name(model.dtype)
        yield f"weights: {weights_note(model.formats, model.expanded, form, model.parameter_bytes)}"


def weights_note(formats: Mapping[str, int], expanded: Mapping[str, int], form: str, taken: float) -> str:
    """Return a sentence on the formats of weights and their sizes in the files, in bytes.
    ``expanded``: those that become ``form``; ``taken``: bytes of all weights in memory."""

    def listed(found: Mapping[str, int]) -> str:
        return ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in found.items())

    return (
        f"{listed(formats)} in the file; {listed(expanded)} {'are' if len(expanded) > 1 else 'is'} expanded to {form}, so that "
        f"{sum(formats.values()) / 2**20:.0f} MiB take {taken / 2**20:.0f} MiB"
    )


HOST_SHARE = 0.125
"""Part of the free host memory to which state may move, without ``host_memory``."""


def make_store(config: EngineConfig) -> Store | None:
    """Return the store of a configuration: host memory, what it names, and a directory below
    ``state_dir`` if that is nothing durable; None: nothing."""
    tiers = open_tiers(config.store)
    if config.state_dir is not None and all(isinstance(tier, MemoryTier) for tier in tiers):
        tiers.append(state_tier(config.state_dir))
    if not any(isinstance(tier, MemoryTier) for tier in tiers):
        free = int((free_memory(torch.device("cpu")) or 0) * HOST_SHARE)
        if capacity := free if config.host_memory is None else parse_bytes(config.host_memory):
            tiers.insert(0, MemoryTier(capacity))
    return Store(tiers) if tiers else None


ADAPTER_SHARE = 0.125
"""Part of the free host memory that loaded adapters may take, without ``adapter_memory``."""


def make_adapters(
    model: LoadedModel, ranks: int = 512, memory: int | str | None = None, peers: Ranks | None = None
) -> AdapterPool:
    """Return the pool of a model's adapters; it refuses all if no adapter can change the model.
    ``peers``: the other ranks, which keep their parts."""
    if reason := low_rank_refusal(model):
        return AdapterPool.without_sites(reason)
    if memory is None:
        free = free_memory(torch.device("cpu"))
        host = None if free is None else int(free * ADAPTER_SHARE)
    else:
        host = parse_bytes(memory, name="adapter_memory")
    kernel = native_low_rank()
    pool = AdapterPool(
        linears_of(model),
        embedding_of(model),
        dtype=model.dtype,
        device=model.device,
        rank_capacity=ranks,
        host_capacity=host,
        kernel=kernel,
        division=None if peers is None else DividedAdapters(model.places, peers.grid, peers),
        absent=absent_linears(model),
    )
    if kernel is None and model.device.type == "cpu":
        pool.slowness = native_problem()
    return pool


def load_tokenizer(config: EngineConfig, model_path: Path) -> Tokenizer | None:
    """Return the configured tokenizer, else the model's; None: it works with token ids."""
    path = model_path if config.tokenizer is None else resolve_tokenizer(config.tokenizer, revision=config.revision)
    found = Tokenizer.from_path(path, scored_merges())
    if found is None and config.tokenizer is not None:
        raise CheckpointError(f"tokenizer {config.tokenizer!r}: {path} holds no tokenizer.json")
    if found is not None and config.parse_special:
        found = found.parsing_special()
    if config.chat_template is None:
        return found
    if found is None:
        raise InvalidArgument(f"chat_template {config.chat_template!r}: this model has no tokenizer, so it cannot chat")
    return with_chosen_template(found, config.chat_template)


def resolve_device(name: str) -> torch.device:
    """Return a device, for ``auto`` CUDA if there is one; ``Unsupported`` for an absent one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument(f"device {name!r} is unknown; 'auto', 'cpu', 'cuda' or 'cuda:N' are accepted") from error
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if torch.cuda._is_in_bad_fork():
            raise Unsupported(
                f"device {name!r}: CUDA was used before os.fork(); start children with the 'spawn' method, or take 'cpu'"
            )
        if (device.index or 0) >= count:
            raise Unsupported(f"device {name!r} is not there; PyTorch sees {count} CUDA devices, 'cpu' works")
    elif device.type != "cpu":
        raise Unsupported(f"device {name!r} is not supported; 'auto', 'cpu' and 'cuda' are")
    return device


ENGINE_RING = 1
"""Recent states of a sequence beside its present one; a large hybrid's takes tens of megabytes."""


def make_state(
    specs: Sequence[LayerSpec],
    sizes: PoolSizes,
    page_size: int,
    format: KVFormat,
    device: torch.device,
    backend: str,
    *,
    padding: bool = False,
    slack: int = 0,
    division: DividedRows | None = None,
) -> State:
    """Return the KV state for these layers; ``backend``: one of ``ATTENTION_BACKENDS``, of which
    "auto" is the fastest on the device; ``padding``, ``slack``, ``division``: as ``State``'s."""
    pages = any(not isinstance(spec, Recurrent) for spec in specs)
    if backend == "auto":
        backend = fastest_attention(device)
    module, _, name = ATTENTION_CLASSES[backend].partition(":")
    attention: AttentionBackend = getattr(import_module(module), name)()
    return State(
        specs,
        capacity=sizes.tokens if pages else None,
        window_capacity=sizes.window_tokens if pages else None,
        num_states=sizes.states or None,
        ring=ENGINE_RING,
        page_size=page_size,
        format=format,
        device=device,
        backend=attention,
        recurrence=fastest_recurrence(device),
        rows=layer_kernels(device).rows,
        padding=padding,
        slack=slack,
        division=division,
    )


def pool_budget(
    config: EngineConfig,
    model: LoadedModel,
    adapters: AdapterPool,
    format: KVFormat,
    device: torch.device,
    max_len: int,
    *,
    captures: bool = False,
) -> Budget:
    """Return the bytes of the pools: ``kv_cache_memory``, a share of free host memory, or of a GPU
    what the greatest step leaves, which runs once on a state that is gone afterwards, and, where
    the engine ``captures`` them, decodes of usual sizes."""
    if config.kv_cache_memory is not None:
        check_room(budget := given_budget(config.kv_cache_memory), 0, device)
        return budget
    if (memory := device_memory(device)) is None:
        return free_budget(device)
    specs, size = model.layer_specs, config.page_size
    lengths = greatest_lengths(config.max_num_seqs, config.max_num_batched_tokens, max_len)
    if state_bytes := bytes_per_state([spec for spec in specs if isinstance(spec, Recurrent)]):
        # Tens of megabytes for each sequence; fewer sequences have as many tokens.
        count = max(1, min(len(lengths), int(memory.free() * STATE_SHARE) // state_bytes))
        lengths = greatest_lengths(count, config.max_num_batched_tokens, max_len)
    tokens = sum(pages_for(length, size) * size for length in lengths)
    windowed = any(isinstance(spec, ATTENTION) and spec.layer_window is not None for spec in specs)
    sizes = PoolSizes(tokens, tokens if windowed else None, max(lengths), len(lengths) if state_bytes else 0)

    def run() -> int:
        state = make_state(specs, sizes, size, format, device, config.attention_backend)
        run_greatest_step(LocalRunner(model, state, device, adapters), lengths)
        return state.num_bytes

    def captured() -> int:
        one = PoolSizes(2 * size, 2 * size if windowed else None, size, LEAST_STATES if state_bytes else 0)
        state = make_state(specs, one, size, format, device, config.attention_backend, padding=True)
        if state.static_refusal(1):
            return 0
        runner = GraphRunner(LocalRunner(model, state, device, adapters), CudaCapture(), longest=max_len)
        return captured_bytes(memory, runner.capture, usual_sizes(config.max_num_seqs))

    share = config.gpu_memory_utilization
    budget = measured_budget(memory, share, lengths, run, *[captured] * captures)
    # States and passes refer to each other, and what they hold is set aside for the pool.
    gc.collect()
    logger.info("%s the KV pool", budget.words)
    return budget


def fastest_attention(device: torch.device) -> str:
    """Return the backend that "auto" is: C++ on a CPU and Triton on a GPU, if they are there."""
    if device.type == "cpu":
        return "native" if not native_problem() else "torch"
    return "triton" if not attention_problem(device) else "torch"


def layer_kernels(device: torch.device, quantization: str | None = None) -> LayerKernels:
    """Return the kernels for a model's layers on this device; ``Unsupported`` if none multiplies
    with weights of that quantization."""
    form = cast("Quantization | None", quantization)
    if form is not None and (reason := quantization_problem(form, device)):
        raise Unsupported(f"quantization {form!r}: {reason}", field="quantization", given=form)
    if device.type != "cpu":
        has_triton = not triton_problem(device)
        linear = Float8Linear() if form else TritonBlocks(device) if has_triton else None
        return LayerKernels(TritonRows() if has_triton else None, linear, form)
    return LayerKernels(native_rows(), native_linear(), form, native_blocks(), native_mixers(), native_experts())


def quantization_problem(quantization: Quantization, device: torch.device) -> str:
    """Return the reason against multiplying with such weights on a device; "" if there is none."""
    if quantization == "fp8":
        return float8_problem(device)
    if device.type != "cpu":
        return f"the device is {device}, and only CPUs have it"
    return native_problem() if native_linear() is None else ""


def check_quantized(model: LoadedModel, quantization: str | None) -> None:
    """Raise ``Unsupported`` if the model has kept its weights as they were."""
    if quantization is not None and model.quantization is None:
        why = "transformers runs it" if getattr(model, "fallback", False) else f"its dtype is {model.dtype}"
        raise Unsupported(
            f"quantization {quantization!r}: {model.architecture} has no weights that can be quantised: {why}; "
            "leave it out, or take bfloat16 and a native architecture",
            field="quantization",
            given=quantization,
        )


def eos_ids(
    generation: dict[str, Any], model_config: dict[str, Any], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """Return the tokens that end a text: the tokenizer's, and the ones in
    ``generation_config.json``, else of ``config.json``."""
    given = (one.get("eos_token_id") for one in (generation, model_config))
    found: Any = next((one for one in given if one is not None), [])
    ids = [*(found if isinstance(found, list) else [found]), *(tokenizer.eos_ids if tokenizer is not None else ())]
    return tuple(dict.fromkeys(token for token in ids if isinstance(token, int) and 0 <= token < vocab_size))


# -- executors -------------------------------------------------------------------------------------


def make_executor(config: ExecutorConfig, choices: Choices) -> Executor:
    """Load a model and put an executor with a pool of its own around it."""
    path = resolve_model(choices.model)
    if choices.grid.size == 1:
        return _make_executor(config, choices, path, None)
    check_division(path, choices.grid, config.max_sequence_length)
    ranks = Ranks(choices.grid, RANK_MAIN)
    try:
        return _make_executor(config, choices, path, ranks)
    except BaseException:
        ranks.close()
        raise


def _make_executor(config: ExecutorConfig, choices: Choices, path: Path, ranks: Ranks | None) -> Executor:
    device, size = choices.device, choices.page_size
    if device.type == "cpu":
        limit_threads()
    arguments, memory = choices.arguments(config), config.memory_config
    chunk = arguments.setdefault("prefill_chunk_size", 2048)
    chunk = min(chunk, config.max_sequence_length) if chunk > 0 else config.max_sequence_length
    limits = EngineConfig(
        model=choices.model,
        dtype=config.dtype,
        kv_dtype=str(config.executor_options.get("kv_dtype", "auto")),
        max_model_len=config.max_sequence_length,
        max_num_seqs=config.max_batch_size,
        max_num_batched_tokens=chunk,
        page_size=size,
        attention_backend=choices.attention_backend,
    )
    group, line = (None, None) if ranks is None else meet(ranks, limits, path, device)
    speculation = None
    if choices.executor_type is ExecutorType.SPECULATIVE:
        speculation = read_speculation("speculative", config.executor_options.get("speculative")) or Speculation()

    def budget_of(model: Outline | LoadedModel, weights: int = 0) -> Budget:
        """Check the limits that depend on the model; return the bytes of its pools. ``weights``:
        bytes of weights that are not loaded yet."""
        check_length(config, model.max_position)
        # Of a rank's part the outline does not know all heads; the model does.
        specs = model.layer_specs if group is None else getattr(model, "whole_specs", ())
        if specs:
            check_heads(config, [spec for spec in specs if isinstance(spec, ATTENTION)])
        if memory.memory_pool_size is None:
            budget = free_budget(device, memory.max_memory_usage / 100, weights)
        else:
            budget = given_budget(memory.memory_pool_size, "memory_pool_size")
            check_room(budget, weights, device)
        sizes_of(model, budget)
        return budget

    def sizes_of(model: Outline | LoadedModel, budget: Budget) -> PoolSizes:
        format = kv_format(limits.kv_dtype, model.dtype)
        return pool_sizes(limits, model.layer_specs, format, config.max_sequence_length, budget)

    model = load_model(
        path,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_sequence_length,
        kernels=layer_kernels(device),
        before_weights=lambda outline: budget_of(outline, outline.weight_bytes),
        group=group,
        grid=WHOLE if ranks is None else ranks.grid,
    )
    if ranks is not None:
        join_loaded(ranks, model, line)
    if (rule := length_rule_of(model)) is not None and rule.inexact:
        logger.warning(rule.inexact.replace("max_model_len", "max_sequence_length"))
    draft = None
    if speculation is not None:
        draft = load_draft_model(
            limits, speculation, model, Tokenizer.from_path(path, scored_merges()), device, progress=False
        )
    budget, format = budget_of(model), kv_format(limits.kv_dtype, model.dtype)
    if speculation is not None:
        proposer: Proposer
        if draft is None:
            proposer = proposer_of(speculation.method)
        else:
            longest = config.max_sequence_length
            proposer, budget = make_draft_model(limits, draft, model, budget, format, device, longest)
        arguments["drafting"] = Drafting(proposer, speculation.depth, model.vocab_size)
    budget = rank_budget(budget, ranks, model, format, device, is_given=memory.memory_pool_size is not None)
    sizes = sizes_of(model, budget)
    division = joined_division(ranks, sizes, model)
    state = make_state(model.layer_specs, sizes, size, format, device, choices.attention_backend, division=division)
    arguments["fallbacks"] = check_flash(config, state)
    if sizes.window_tokens is not None:
        arguments["prefill_chunk_size"] = sizes.step_tokens
    runner: Runner = LocalRunner(model, state, device, make_adapters(model, peers=ranks), group, line)
    if ranks is not None:
        ranks.wait()
        runner = RankedRunner(cast(LocalRunner, runner), ranks)
        arguments["on_shutdown"] = ranks.close
    return Executor(runner, identity=Identity(path, model), **arguments)


EXECUTOR_FACTORY = Factory(resolve_device, make_executor)
