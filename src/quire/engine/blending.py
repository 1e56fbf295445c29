"""Blending of prompts in the engine: which of their tokens have cached rows, and how much of them
is computed anew.

For a request that wishes it, chunks of its segments are searched when it is admitted, and their
layers begin to come. From then on the steps that run these tokens are blended.

Letters: S tokens of a prompt; n tokens of a step's chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.blend_inputs import BlendInputs
from quire.base.errors import BlendLoadError, InvalidArgument, Unsupported
from quire.base.metrics import EngineMetrics
from quire.base.segments import AUTO, DEFAULT_RATIO, BlendParams
from quire.base.token_history import Ids
from quire.base.types import SeqId
from quire.blend.calibration import BlendCalibration, default_layer
from quire.blend.chunk_capture import ChunkCapture
from quire.blend.chunk_catalog import ChunkCatalog, store_of_chunks
from quire.blend.chunk_matching import cuts
from quire.blend.chunks import ChunkKeys, ChunkLayout
from quire.blend.given_parts import RetrievedRows
from quire.blend.retriever import ChunkRetriever, ChunkTask
from quire.blend.rows_task import RowsTask
from quire.blend.sequence_rows import Move, SequenceTask
from quire.blend.unmarked_text import SeenText, content_cuts, gaps
from quire.branches.branch import Branch
from quire.branches.stored_state import StoredState
from quire.contracts.blend import BlendRetriever
from quire.contracts.layers import KeyValueAttention
from quire.contracts.model import num_blocks
from quire.contracts.store import ObjectKey
from quire.engine.prompt_blend import PromptBlend
from quire.engine.prompts import Pieces
from quire.kv.rule_table import blending_refusal
from quire.kv.windows import intersection
from quire.runner.local import Runner
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.engine")

if TYPE_CHECKING:
    from quire.engine.request import Request
    from quire.engine.step_builder import ScheduledStep


DILUTION = 4
"""Tokens of a blended prompt that cost about what one of another does. So most prompts run in one
step, in which the question tells which of all their tokens matter."""
ASKING = 32
"""The last tokens of an edited session, which run, and whose attention tells what matters. Of a
prompt of one piece those that are taken for its question, of which there is no chunk."""
UNCALIBRATED = (
    "this model is not calibrated, so nothing is known of how far its blended answers are off; llm.calibrate_blending() or quire calibrate "
    "measures it, and BlendParams(verify=1) measures a prompt"
)
LATER = 64
"""Chunks that wait at a time to be computed when nothing else runs."""


LEAD_TEXT = """Notes on earlier reading

The pages before this one deal with other matters: the history of a small town, the care of tools, the results of a survey, and a list of \
changes to a program. Some of them are long and some are short. They name people, places, dates and amounts, and each stands by itself. None \
of them continues here. A reader who looks for one fact has to find the page that holds it first, and then the line. What follows is the next \
text of the collection. It begins with its own heading or its own first sentence, and it says what it has to say without the pages before it.

"""
"""What a chunk reads before it, as a text in the middle of a prompt has read others. A chunk that
has read nothing has other K and V, above all in its first hundred tokens."""
LEAD_TOKENS = 512
"""Of a beginning of prompts, at most, that chunks are computed behind."""
LEADS = 256
"""Such beginnings that are known at a time."""
LEAD_SHARE = 16
"""The lead text is left out if this many of it are longer than the longest sequence."""


def start_of(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that a sequence begins with, whose first token is a sink: those that begin a
    prompt, BOS, or the token that ends a text."""
    if tokenizer is None:
        return ()
    ids = tuple(one for one in tokenizer.encode("") if one not in tokenizer.eos_ids)
    if not ids and tokenizer.bos_id is not None:
        ids = (tokenizer.bos_id,)
    return ids or tokenizer.eos_ids[:1]


def lead_text_of(tokenizer: Tokenizer | None, max_model_len: int) -> tuple[int, ...]:
    """Return the ids of ``LEAD_TEXT``; none if the vocabulary cannot spell it, or if it is long for
    sequences of this length."""
    if tokenizer is None:
        return ()
    ids = tuple(tokenizer.encode(LEAD_TEXT, add_special_tokens=False))
    is_spelled = tokenizer.decode(ids).split() == LEAD_TEXT.split()
    return ids if is_spelled and LEAD_SHARE * len(ids) <= max_model_len else ()


def blend_refusal(runner: Runner) -> str:
    """Return the reason against blending a model's prompts; empty: none."""
    specs, state = runner.model.layer_specs, runner.state
    kinds = {spec.kind for spec in specs}
    own_rotation = any(isinstance(spec, KeyValueAttention) and spec.caller_rotates for spec in specs)
    if reason := blending_refusal(kinds, own_rotation=own_rotation):
        return reason
    if any(isinstance(spec, KeyValueAttention) and spec.rope_mode == "inline" for spec in specs):
        return "keys are stored raw and rotated when they are read"
    if len(specs) != num_blocks(runner.model) or len(state.geometry.layer_ids) != len(specs):
        return "some of its blocks have no keys and values of their own"
    return ""


def chunks_of(ids: Ids, marked: Iterable[tuple[int, int]]) -> list[Ids]:
    """Return the ids of the chunks of segments, each once."""
    found: dict[bytes, Ids] = {}
    for begin, end in marked:
        for start, stop in cuts(end - begin):
            part = ids[begin + start : begin + stop].copy()
            found.setdefault(part.tobytes(), part)
    return list(found.values())


class Blending:
    """The blending of one engine. The caller has the engine's lock."""

    def __init__(
        self, runner: Runner, stored: StoredState, start: Sequence[int], text: Sequence[int], metrics: EngineMetrics
    ) -> None:
        """``start``: the ids that a sequence begins with. ``text``: the ids of the text that stands
        between them and a chunk when it is computed."""
        self._runner, self._stored = runner, stored
        self.start = tuple(start)
        self.lead = (*start, *text)
        """What stands before a chunk when it is computed, unless the beginning of its prompts is
        known."""
        self._leads: dict[tuple[int, ...], None] = {}
        """Beginnings of prompts, in order of their last use, that chunks are computed behind."""
        self.retriever: BlendRetriever | None = None
        """Finds rows of prompts in the place of the store's chunks; None: these are used."""
        self.calibration: BlendCalibration | None = None
        """What was measured of this model; None: nothing."""
        self._metrics = metrics
        self._share = 0.0
        """Verifications that are due."""
        self.under_way: set[ObjectKey] = set()
        """Chunks that are to be computed."""
        self._seen = SeenText()
        self._warned: set[str] = set()
        self._refusal: str | None = None

    @property
    def refusal(self) -> str:
        """Why this model's prompts cannot be blended; empty: they can."""
        if self._refusal is None:
            self._refusal = blend_refusal(self._runner)
        return self._refusal

    def check(self, params: object) -> None:
        """Check the parameters of a call. ``Unsupported`` for a model that cannot be blended."""
        if not isinstance(params, BlendParams):
            raise InvalidArgument(field="blend", given=params, allowed="BlendParams or None")
        self.require()
        if params.target is not None and self.calibration is None:
            raise Unsupported(
                f"target={params.target:g}: this model is not calibrated; llm.calibrate_blending() or quire calibrate does that, and a "
                "ratio needs none",
                field="target",
            )

    @property
    def check_layer(self) -> int:
        """Return the check layer: rows are selected behind its projection. A calibration chooses
        it; without one it is the default."""
        return default_layer(num_blocks(self._runner.model)) if self.calibration is None else self.calibration.layer

    @property
    def _most(self) -> int:
        """Return the number of tokens of a blended prompt that count as one in a step. Pools of
        windows are sized by the tokens of a step."""
        return 1 if self._runner.state.geometry.window_layers else DILUTION

    def _score(self, params: BlendParams) -> str:
        if params.select != "auto":
            return params.select
        return AUTO if params.threshold is None else "v"

    def require(self) -> None:
        """Raise ``Unsupported`` for a model that cannot be blended."""
        if self.refusal:
            raise Unsupported(f"blending: {self.refusal}", field="blend")

    def add_lead(self, ids: Ids) -> tuple[int, ...]:
        """Note a beginning of prompts, and return the lead of their chunks: its first
        ``LEAD_TOKENS``. Chunks of prompts that begin so are found and kept behind it."""
        if not ids.size:
            return self.lead
        lead = tuple(ids[:LEAD_TOKENS].tolist())
        self._leads.pop(lead, None)
        self._leads[lead] = None
        if len(self._leads) > LEADS:
            del self._leads[next(iter(self._leads))]
        return lead

    def lead_of(self, ids_S: Ids) -> tuple[int, ...]:
        """Return the lead of a prompt's chunks: the longest known beginning of the prompt, or the
        lead of all other chunks."""
        head = tuple(ids_S[:LEAD_TOKENS].tolist()) if self._leads else ()
        found = [lead for lead in self._leads if head[: len(lead)] == lead]
        return max(found, key=len, default=self.lead)

    def ask(self, salt: Hashable, adapter: int | None, ids_S: Ids) -> None:
        """Ask tiers which chunks of a prompt there are, so that it need not wait when it is
        admitted."""
        self.catalog.ask(self._keys(salt, adapter, self.lead_of(ids_S)).parent)

    def wish(self, params: BlendParams, pieces: Pieces, length: int) -> PromptBlend:
        """Return the blending wished for a request of ``length`` tokens."""
        ratio = self._ratio(params)
        self._warn(self.warning)
        if isinstance(ratio, str):
            reason, params = ratio, replace(params, keep=False)
            return PromptBlend(
                params,
                pieces,
                length,
                1.0,
                self._score(params),
                1,
                lambda work, blend: reason,
                self._runner.row_sources,
            )
        sources, score = self._runner.row_sources, self._score(params)
        return PromptBlend(params, pieces, length, ratio, score, self._most, self._find, sources, warning=self.warning)

    @property
    def warning(self) -> str:
        """Return the warning for readers of blended answers; empty: none."""
        return UNCALIBRATED if self.calibration is None else ""

    def _warn(self, message: str) -> None:
        """Log a message once; not an empty one."""
        if message and message not in self._warned:
            self._warned.add(message)
            logger.warning("blending: %s", message)

    def _ratio(self, params: BlendParams) -> float | str:
        """Return the part of the reusable rows to compute anew, or the reason against any reuse."""
        found, target = self.calibration, params.target
        if target is not None and found is not None:
            nearest = min(found.ratios, key=lambda one: one.mean_kl)
            ratio = found.ratio_for(target)
            return (
                f"no calibrated ratio has a mean KL of at most {target:g} nats: {found.describe(nearest)}"
                if ratio is None
                else ratio
            )
        ratio = DEFAULT_RATIO if params.ratio is None else params.ratio
        is_measured = self._score(params) == AUTO and params.threshold is None
        if found is None or not params.gate or not is_measured or ratio == 1:
            return ratio
        if reason := found.refusal(ratio):
            self._warn(f"{reason}; such prompts are computed in full")
        return reason or ratio

    def is_verified(self, blend: PromptBlend) -> bool:
        """Return whether it is a blended prompt's turn to be computed in full, too."""
        self._share += blend.params.verify
        chosen = self._share >= 1
        self._share -= chosen
        return chosen

    # -- chunks ------------------------------------------------------------------------------------

    @property
    def scope(self) -> str:
        """Return a digest of the model and of all else that public chunks depend on, beside their
        tokens."""
        return self._keys(None, None, self.lead).parent.hex()

    def _keys(self, salt: Hashable, adapter: int | None, lead: tuple[int, ...]) -> ChunkKeys:
        fingerprint = None if adapter is None else self._runner.adapters.get(adapter).fingerprint
        return self._stored.keys.chunk_keys(salt, fingerprint, lead)

    @cached_property
    def catalog(self) -> ChunkCatalog:
        """Return the catalog, which knows what chunks the tiers have."""
        return ChunkCatalog(store_of_chunks(self._stored.store))

    @cached_property
    def layout(self) -> ChunkLayout:
        return ChunkLayout(self._runner.state)

    def _find(self, work: Branch, blend: PromptBlend) -> ChunkTask | RetrievedRows | str:
        """Find chunks of a prompt from its first token on that is not computed."""
        params = blend.params
        if len(work.runs.ids) > 1 or (work.tokens.ids[: blend.length] < 0).any():
            return "the prompt has several adapters, or embeddings"
        end = min(blend.question, blend.length - 1)
        rest = max(0, end - work.computed)
        if rest < params.least:
            return f"{rest} tokens are neither reused exactly nor part of the question; at least {params.least} must be"
        prompts, indices = [torch.from_numpy(work.tokens.ids[: blend.length].copy())], [list(blend.pieces.offsets)]
        if self.retriever is not None:
            return self._retrieved(prompts, indices, work, blend, end)
        lead = self.lead_of(work.tokens.ids[: blend.length])
        task, count = self._chunks(work, blend, lead, prompts, indices, end)
        marked = sum(max(0, min(stop, end) - max(start, work.computed)) for start, stop in blend.pieces.marked)
        if lead != self.lead and count < max(params.least, marked):
            # Some segments were computed without: take what has more of them.
            other, others = self._chunks(work, blend, self.lead, prompts, indices, end)
            (task if others > count else other).close()
            if others > count:
                task, count, lead = other, others, self.lead
        reason = ""
        if count < params.least:
            reason = f"{count} tokens have a state to be reused; at least {params.least} must have one"
        elif not self._stored.is_worth(
            count * (1 - blend.ratio) * (1 - self.check_layer / num_blocks(self._runner.model)),
            {tier: tokens * self.layout.row_bytes for tier, tokens in task.tokens_by_tier.items()},
        ):
            reason = f"to load the state of {count} tokens takes longer than to compute them"
        if reason:
            task.close()
            return reason
        blend.by_tier = dict(task.tokens_by_tier)
        if work.window is not None:
            return task  # a chunk by itself has seen what the window hides
        blend.exact = self._far_rows(task, len(lead))
        if tuple(work.tokens.ids[: len(lead)].tolist()) == lead:
            # A chunk behind its lead, where it was computed, has read there what it reads here.
            at_home = task.positions.numpy() == np.arange(blend.length)
            blend.exact |= at_home & (task.valid_mask.numpy() != 0)
        return task

    def _chunks(
        self,
        work: Branch,
        blend: PromptBlend,
        lead: tuple[int, ...],
        prompts: list[Tensor],
        indices: list[list[int]],
        end: int,
    ) -> tuple[ChunkTask, int]:
        """Find a prompt's chunks behind one lead; return the task that brings their rows, and their
        number."""
        keys = self._keys(work.salt, next(iter(work.runs.ids), None), lead)
        retriever = ChunkRetriever(self.catalog, self.layout, keys, device=self._runner.state.device)
        task = retriever.new_request(
            prompts,
            indices,
            wanted=[range(work.computed, end)],
            first_layer=0 if blend.score == "v_or_question" else self.check_layer,
        )
        return task, int(task.valid_mask.sum())

    def _retrieved(
        self, prompts: list[Tensor], indices: list[list[int]], work: Branch, blend: PromptBlend, end: int
    ) -> RetrievedRows | str:
        """Ask the caller's retriever. Rows of the question, and those that are reused exactly, are
        not taken."""
        assert self.retriever is not None
        try:
            task = self.retriever.new_request(prompts, indices)
            rows = RetrievedRows(task, blend.length, self.layout)
        except Exception as error:
            logger.warning("the blend retriever failed; the prompt is computed in full", exc_info=error)
            return f"the blend retriever failed: {type(error).__name__}"
        rows.valid_mask[: work.computed] = 0
        rows.valid_mask[end:] = 0
        if (count := int(rows.valid_mask.sum())) < blend.params.least:
            rows.close()
            return f"{count} tokens have a state to be reused; at least {blend.params.least} must have one"
        blend.by_tier = {"retriever": count}
        return rows

    def moved(self, seq: SeqId, move: Move, params: BlendParams, *, windowed: bool) -> PromptBlend | None:
        """Return the blending of tokens whose rows a sequence holds at other positions, and nothing
        more; None: some layer has let go of each of them. The last of them are what its selection
        asks the attention of. ``windowed``: the sequence has a window of its own."""
        export, length = self._runner.state.open_export(seq), move.start + move.length
        held = [range(move.source, move.source + move.length)]
        for layer in self.layout.layers:
            held = intersection(held, export.held(layer))
        moves = [Move(one.start + move.start - move.source, one.start, len(one)) for one in held]
        if not moves:
            return None
        count = sum(map(len, held))

        def find(work: Branch, blend: PromptBlend) -> RowsTask:
            task = SequenceTask(self.layout, export, length, moves)
            if not windowed:
                blend.exact = self._far_rows(task, move.source)
            return task

        return PromptBlend(
            replace(params, keep=False),
            Pieces((max(move.start, length - ASKING),)),
            length,
            DEFAULT_RATIO if params.ratio is None else params.ratio,
            self._score(params),
            self._most,
            find,
            self._runner.row_sources,
            released=move.length - count,
            by_tier={"pool": count},
        )

    def _far_rows(self, task: RowsTask, origin: int) -> NDArray[np.bool_]:
        """Return a mask of the rows that had read nothing before the position ``origin`` when they
        were computed: if all layers have windows, a token reads back one window in each layer."""
        windows = [getattr(spec, "layer_window", None) for spec in self._runner.model.layer_specs]
        far: NDArray[np.bool_] = task.valid_mask.numpy() != 0
        if None in windows:
            return np.zeros_like(far)
        far &= task.positions.numpy() >= origin + sum(window - 1 for window in windows if window)
        return far

    def missing(self, request: Request, blend: PromptBlend) -> list[Ids]:
        """Return the chunks of a prompt, but of the question, that are neither kept nor being
        computed; at most as many as leave ``LATER`` to be computed."""
        work = request.branch
        if self.refusal or self.retriever is not None or len(work.runs.ids) > 1:
            return []
        lead = self.lead_of(work.tokens.ids[: blend.length])
        keys = self._keys(work.salt, next(iter(work.runs.ids), None), lead)
        marked = [part for part in blend.pieces.marked if part[1] <= blend.question]
        text, found = work.tokens.ids[: blend.length], dict[ObjectKey, Ids]()
        unmarked = ((ids, False) for ids in self._unmarked(text, blend, request.seat.reuse.cached, keys))
        for ids, is_marked in chain(((ids, True) for ids in chunks_of(text, marked)), unmarked):
            if len(found) + len(self.under_way) >= LATER:
                break
            key = keys.key(ids)
            if key in found or key in self.under_way or self.catalog.has(key):
                continue
            if is_marked or self._seen.admits(key, ids):
                found[key] = ids
        return list(found.values())

    def _unmarked(self, ids_S: Ids, blend: PromptBlend, cached: int, keys: ChunkKeys) -> Iterator[Ids]:
        """Yield the chunks of a prompt's text behind ``cached`` tokens that is neither marked, nor
        part of the question, nor in a chunk."""
        if (ids_S < 0).any():
            return
        pieces, start = blend.pieces, len(self.start)
        begin = max(cached, start if tuple(ids_S[:start].tolist()) == self.start else 0)
        end = blend.question if pieces.offsets else blend.length - ASKING
        known = self.catalog.known(keys.parent).match(ids_S, pieces.offsets, begin, end)
        taken = [*pieces.marked, *((one.start, one.stop) for one in known), *((at, at) for at in pieces.offsets)]
        for low, high in gaps(begin, end, taken):
            # Where a prompt of one piece asks is not known: its documents end before.
            cuts = content_cuts(ids_S[low:high], to_end=high < end or bool(pieces.offsets))
            yield from chunks_of(ids_S[low:high], cuts)

    def capture(
        self, ids: Ids, salt: Hashable, adapter: int | None, lead: tuple[int, ...] | None = None
    ) -> ChunkCapture:
        """Return the capture of a chunk's rows, for a chunk computed behind a lead; None: the lead
        of prompts whose beginning is not known."""
        keys = self._keys(salt, adapter, self.lead if lead is None else lead)
        return ChunkCapture(self.catalog, self.layout, keys, ids.tolist())

    # -- steps -------------------------------------------------------------------------------------

    def inputs(self, scheduled: ScheduledStep) -> BlendInputs | None:
        """Return the blending of a step with prompts to be blended; None: these tokens are not."""
        chunks = tuple(
            None if work.blend is None else work.blend.chunk(work.computed, len(chunk.tokens))
            for work, chunk in zip((one.branch for one in scheduled.requests), scheduled.step.chunks, strict=True)
        )
        if not any(chunks):
            return None
        return BlendInputs(chunks, self.check_layer if self._runner.row_sources.executor is None else None)

    def ran(self, scheduled: ScheduledStep, blend: BlendInputs, masks: Sequence[NDArray[np.bool_] | None]) -> None:
        """Note the blended and the computed rows of a step, before its tokens count as computed.
        ``masks``: the rows of each chunk that did not run."""
        for request, chunk, left_out in zip(scheduled.requests, blend.chunks, masks, strict=True):
            work = request.branch
            if chunk is None or left_out is None or work.blend is None:
                continue
            anew = chunk.valid_n & ~left_out
            work.blend.spared += int(left_out.sum())
            if chunk.rows.exact is not None:
                left_out = left_out & ~chunk.rows.exact
            work.blend.ran(work.computed, left_out, anew)
            if left_out.any():
                first = work.computed + int(np.argmax(left_out))
                work.origin = replace(work.origin, inexact_from=work.origin.exact_part(first))
            self._metrics.blended_tokens.inc(int(left_out.sum()))
            self._metrics.recomputed_tokens.inc(int(anew.sum()))

    def failed(self, scheduled: ScheduledStep, error: BlendLoadError) -> bool:
        """Give up the chunks of the prompts whose rows did not come; the step runs again without.
        Return False if the error names no blended prompt."""
        works = [scheduled.requests[number].branch for number in error.requests if number < len(scheduled.requests)]
        blends = [work.blend for work in works if work.blend is not None and work.blend.task is not None]
        for blend in blends:
            logger.warning("%s; the prompt is computed in full", error)
            blend.end()
            blend.reason = "cached rows did not come; the log says why"  # clients read it, and no paths of files
        return bool(blends)

    def flush(self, timeout: float) -> bool:
        """Hand all chunks to the store; return whether it has them. Call it without the lock."""
        return "catalog" not in self.__dict__ or self.catalog.flush(timeout)

    def close(self) -> None:
        """End the threads of the chunk catalog."""
        if "catalog" in self.__dict__:
            self.catalog.close()
            if self.catalog.store is not self._stored.store:
                self.catalog.store.close()
