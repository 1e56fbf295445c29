"""Calibration of blending: probes are run in full and blended, over the engine's own state.

A probe is run as sequences of its own, which are removed afterwards. No other request, nor the
prefix cache, the store of chunks or a session ever sees them. The result is kept as a record of the
store, under a key of all that chunks depend on: model, layout, dtype and lead.

Letters: Q rows of a question; M tokens of the vocabulary; S tokens of a prompt.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.base.blend_inputs import BlendInputs
from quire.base.errors import InvalidArgument, QuireError, ResourceExhausted
from quire.base.interrupts import check
from quire.base.progress import Bar
from quire.base.segments import AUTO, BlendParams
from quire.base.token_history import Ids
from quire.base.types import Add, Chunk, Pop, Remove, SeqId, Step
from quire.blend.calibration import (
    LAYER_RATIO,
    RATIOS,
    TEXT_TOKENS,
    BlendCalibration,
    BlendQuality,
    Deviation,
    QualityLimits,
    choose_layer,
    deviation,
    layers_to_try,
)
from quire.blend.chunk_matching import LEAST, cuts
from quire.blend.chunks import ChunkLayout
from quire.blend.rows_task import RowsPiece, RowsTask
from quire.contracts.model import num_blocks
from quire.contracts.store import ObjectKey
from quire.engine.blending import Blending
from quire.engine.engine import Engine
from quire.engine.prompt_blend import PromptBlend
from quire.engine.prompts import Pieces
from quire.runner.local import StepOutput
from quire.sessions.commits import ask
from quire.store.commits import Space
from quire.store.history import History
from quire.store.keys import record_key, records_of
from quire.store.records import Unfit, unpack_record

logger = logging.getLogger("quire.engine")

CHUNKS = 4
"""Of a probe that is made of a text; a question of half a chunk follows them."""
LONGEST = 128
"""Tokens of such a chunk, at most."""
ASKING = 64
"""The last rows of a question, at most, whose answers are compared."""
KIND, VERSION = "blend calibration", 2
"""Of records."""

Advance = Callable[[int], object]
"""Shows progress by a number of steps."""


@dataclass(frozen=True, slots=True, eq=False)
class BlendProbe:
    """A prompt of which some segments are reused."""

    ids: Ids
    """``[S]``"""
    pieces: Pieces
    """Segments among them that do not begin the prompt are reused."""

    @property
    def asks(self) -> int:
        """Return the first row of the prompt whose answer is compared."""
        return max(self.pieces.question(len(self.ids)), len(self.ids) - ASKING)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First token, and the one behind the last, of each chunk that is reused."""
        marked = [(begin, end) for begin, end in self.pieces.marked if begin and end <= self.pieces.offsets[-1]]
        return [(begin + start, begin + stop) for begin, end in marked for start, stop in cuts(end - begin)]


def room_for_probe(engine: Engine) -> int:
    """Return the largest number of tokens of a probe: it runs in one step."""
    return min(engine.max_model_len, engine.scheduler.limits.max_num_batched_tokens, engine.checks.pool_tokens)


def probe_length(engine: Engine) -> int:
    """Return the tokens of a probe that is made of a text, without its start.
    ``ResourceExhausted``: the engine has no room for one."""
    room = room_for_probe(engine)
    size = min(LONGEST, _chunk_size(room - len(engine.blending.start)))
    if size < LEAST:
        raise ResourceExhausted(
            f"a probe has {_text_size(LEAST)} tokens at least and runs in one step, and {room} fit in; give more max_num_batched_tokens, "
            "max_model_len or kv_cache_memory"
        )
    return _text_size(size)


def _chunk_size(tokens: int) -> int:
    return 2 * tokens // (2 * CHUNKS + 1)


def _text_size(chunk: int) -> int:
    return CHUNKS * chunk + chunk // 2


def probes_of(engine: Engine, texts: Sequence[tuple[Ids, Pieces]], count: int) -> list[BlendProbe]:
    """Return at most ``count`` probes: prompts of pieces as they are, and of other texts the first
    parts, then the second ones, and so on. ``InvalidArgument`` for what makes no probe."""
    length, start, room = probe_length(engine), np.array(engine.blending.start, dtype=np.int64), room_for_probe(engine)
    rounds: dict[int, list[BlendProbe]] = {}
    for number, (ids, pieces) in enumerate(texts):
        field = f"texts.{number}"
        if pieces.offsets:
            probe = BlendProbe(ids, pieces)
            if not probe.chunks or pieces.question(len(ids)) == len(ids) or len(ids) > room:
                allowed = (
                    f"at most {room} tokens, with a Segment of {LEAST} or more between the first piece and the last"
                )
                raise InvalidArgument(field=field, given=f"{len(ids)} tokens", allowed=allowed)
            rounds.setdefault(0, []).append(probe)
            continue
        if len(start) and np.array_equal(ids[: len(start)], start):
            ids = ids[len(start) :]
        own = min(length, len(ids))
        if _chunk_size(own) < LEAST:
            raise InvalidArgument(
                field=field, given=f"{len(ids)} tokens", allowed=f"a text of {_text_size(LEAST)} tokens or more"
            )
        for part in range(min(count, len(ids) // own)):
            rounds.setdefault(part, []).append(_probe(start, ids[part * own : (part + 1) * own]))
    return [probe for part in sorted(rounds) for probe in rounds[part]][:count]


def _probe(start: Ids, ids: Ids) -> BlendProbe:
    """Return a probe of a text that begins a prompt."""
    size, first = _chunk_size(len(ids)), len(start)
    ends = [first + (number + 1) * size for number in range(CHUNKS)]
    return BlendProbe(np.concatenate((start, ids)), Pieces(tuple(ends), tuple(itertools.pairwise(ends))))


@dataclass(frozen=True, slots=True, eq=False)
class ProbeAnswer:
    """The answer to a probe that is computed in full."""

    logits_QM: Tensor
    """float32: of the question's rows, and of all but the last token of ``text``."""
    text: list[int]
    """The greedy text: at least one token, at most ``TEXT_TOKENS``."""


class ProbeRows(RowsTask):
    """The rows of chunks that were computed by themselves."""

    def __init__(self, layout: ChunkLayout, length: int, lead: int, rows: dict[tuple[int, int], dict[int, RowsPiece]]):
        """``rows``: by the first token and the one behind the last, by layer."""
        super().__init__(layout, length, [(begin, lead, end - begin) for begin, end in rows], "NHD")
        self._rows = rows

    def pieces(self, layer_id: int) -> list[RowsPiece]:
        """Return the rows of a layer, in order of ``start``."""
        return [self._rows[span][layer_id] for span in sorted(self._rows)]

    def close(self) -> None:
        """Do nothing: the garbage collector frees the rows."""


class ProbeRuns:
    """Forwards of probes. The caller does not have the engine's lock; other requests run between
    two forwards. ``ResourceExhausted``: they leave no room for a probe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def full(self, probe: BlendProbe) -> ProbeAnswer:
        """Return the answer to a probe that is computed in full. Its text is shorter where a
        sequence or a step has no room for more."""
        engine = self._engine
        room = min(
            min(engine.max_model_len, engine.checks.pool_tokens) - len(probe.ids),
            engine.scheduler.limits.max_num_batched_tokens - (len(probe.ids) - probe.asks),
        )
        with self._sequence(probe.ids[: probe.asks]) as seq:
            rows = [self._run(seq, probe.ids[probe.asks :].tolist())]
            text = [int(rows[0][-1].argmax())]
            while len(text) < min(TEXT_TOKENS, 1 + room) and text[-1] not in engine.eos_ids:
                rows.append(self._run(seq, text[-1:]))
                text.append(int(rows[-1][-1].argmax()))
        return ProbeAnswer(torch.cat(rows), text)

    def rows(self, probe: BlendProbe) -> ProbeRows:
        """Return the rows of a probe's chunks."""
        blending, found = self._engine.blending, dict[tuple[int, int], dict[int, RowsPiece]]()
        lead, layout = np.array(blending.lead_of(probe.ids), dtype=np.int64), blending.layout
        for begin, end in probe.chunks:
            ids = np.concatenate((lead, probe.ids[begin:end]))
            with self._sequence(ids) as seq:
                # Before the next forward, with which windows let go of rows.
                export = self._engine.runner.state.open_export(seq)
                layers = {one: layout.split(one, export.plain_rows(one, len(lead), len(ids))) for one in layout.layers}
                found[begin, end] = {
                    one: RowsPiece(begin, k.clone(), v.clone(), len(lead)) for one, (k, v) in layers.items()
                }
        return ProbeRows(layout, len(probe.ids), len(lead), found)

    def blended(self, probe: BlendProbe, rows: ProbeRows, layer: int, ratio: float, text: Sequence[int] = ()) -> Tensor:
        """Return logits behind blended chunks, float32 ``[Q, M]``: of the question's rows, and of
        all but the last token of a ``text`` behind them."""
        length = len(probe.ids)
        sources = self._engine.runner.row_sources
        blend = PromptBlend(BlendParams(), probe.pieces, length, ratio, AUTO, 1, lambda work, blend: rows, sources)
        blend.take(rows)
        blend.exact = np.zeros_like(blend.valid)
        try:
            with self._sequence(probe.ids, BlendInputs((blend.chunk(0, length),), layer)) as seq:
                # A forward of some rows has no logits but the last one's. The question runs once
                # more, over the state that it had.
                self._engine.runner.execute(Step(edits=(Pop(seq, length - probe.asks),)))
                return self._run(seq, [*probe.ids[probe.asks :].tolist(), *text[:-1]])
        finally:
            blend.end()

    @contextmanager
    def _sequence(self, ids: Ids, blend: BlendInputs | None = None) -> Iterator[SeqId]:
        """Run tokens as a sequence, which is gone at the end, under the lock."""
        check()
        with self._engine.lock:
            seq = self._engine.runner.new_seq()
            self._engine.runner.execute(Step(edits=(Add(seq),)))
            try:
                if ids.size:
                    chunk = Chunk(seq, ids.tolist(), logits="none")
                    run_step(self._engine, Step(chunks=(chunk,), blend=blend))
                yield seq
            finally:
                self._engine.runner.execute(Step(edits=(Remove(seq),)))

    def _run(self, seq: SeqId, ids: list[int]) -> Tensor:
        return run_step(self._engine, Step(chunks=(Chunk(seq, ids, logits="all"),))).rows(0)


def run_step(engine: Engine, step: Step) -> StepOutput:
    """Run a step; others give up pages and states for it if it lacks room. The caller has the
    lock."""
    while True:
        try:
            return engine.runner.execute(step)
        except ResourceExhausted:
            if not engine.runner.room.make():
                raise


def sampled_texts(engine: Engine, count: int, length: int, advance: Advance) -> list[tuple[Ids, Pieces]]:
    """Return texts of ``length`` tokens that the model samples behind its start, or behind any one
    token, always the same ones. ``advance`` counts these tokens."""
    generator, limits, texts = torch.Generator().manual_seed(0), engine.scheduler.limits, list[list[int]]()
    start = list(engine.blending.start)
    first = start or torch.randint(engine.runner.model.vocab_size, (count,), generator=generator).tolist()
    total = max(1, len(start)) + length
    while len(texts) < count:
        many = min(count - len(texts), limits.max_num_seqs, max(1, engine.checks.pool_tokens // (2 * total)))
        many = min(many, max(1, limits.max_num_batched_tokens // max(1, len(start))))
        some = [list(start) or [first[len(texts) + row]] for row in range(many)]
        _sample(engine, some, total, generator, advance)
        texts += some
    return [(np.array(text, dtype=np.int64), Pieces()) for text in texts]


def _sample(
    engine: Engine, texts: Sequence[list[int]], length: int, generator: torch.Generator, advance: Advance
) -> None:
    """Continue texts up to a length, at temperature 1."""
    seqs = [engine.runner.new_seq() for _ in texts]
    with engine.lock:
        engine.runner.execute(Step(edits=tuple(map(Add, seqs))))
    try:
        done = 0
        while (now := len(texts[0])) < length:
            check()
            with engine.lock:
                chunks = tuple(Chunk(seq, text[done:]) for seq, text in zip(seqs, texts, strict=True))
                output = run_step(engine, Step(chunks=chunks))
            chances = output.logits_RV.float().softmax(-1).cpu()
            for text, (token,) in zip(texts, torch.multinomial(chances, 1, generator=generator).tolist(), strict=True):
                text.append(token)
            done = now
            advance(len(texts))
    finally:
        with engine.lock:
            engine.runner.execute(Step(edits=tuple(map(Remove, seqs))))


def calibrate(
    engine: Engine, probes: Sequence[BlendProbe], limits: QualityLimits, advance: Advance, *, sampled: bool
) -> BlendCalibration:
    """Measure, and choose the check layer. ``advance`` counts each probe twice."""
    runs, layers = ProbeRuns(engine), num_blocks(engine.runner.model)
    tried = layers_to_try(layers)
    by_layer = _measure(runs, probes, [(tried[0], 0.0), *((layer, LAYER_RATIO) for layer in tried)], layers, advance)
    layer = choose_layer(by_layer[1:], by_layer[0].mean_kl)
    by_ratio = _measure(runs, probes, [(layer, ratio) for ratio in RATIOS if ratio != LAYER_RATIO], layers, advance)
    found = {(one.layer, one.ratio): one for one in (*by_layer, *by_ratio)}
    qualities = tuple(found[name] for name in sorted(found))
    return BlendCalibration(layer=layer, probes=len(probes), sampled=sampled, limits=limits, qualities=qualities)


def calibrate_on(
    engine: Engine, texts: Sequence[tuple[Ids, Pieces]] | None, count: int, limits: QualityLimits, *, show: bool
) -> BlendCalibration:
    """Measure on texts, or on what the model samples, use what was found, and keep it where a store
    outlives the process. ``show``: progress on stderr."""
    length, given = probe_length(engine), texts
    if given is None:
        with Bar(total=count * length, desc="Sampling", unit="token", disable=not show) as bar:
            given = sampled_texts(engine, count, length, bar.update)
    made = probes_of(engine, given, count)
    with Bar(total=2 * len(made), desc="Probing", unit="probe", disable=not show) as bar:
        found = calibrate(engine, made, limits, bar.update, sampled=texts is None)
    with engine.lock:
        engine.blending.calibration = found
    if is_kept(engine):
        keep_calibration(engine, found)
    return found


def _measure(
    runs: ProbeRuns, probes: Sequence[BlendProbe], ways: Sequence[tuple[int, float]], layers: int, advance: Advance
) -> list[BlendQuality]:
    """Return the quality of each way to blend, a layer and a ratio."""
    found: list[list[Deviation]] = [[] for _ in ways]
    for probe in probes:
        true, rows = runs.full(probe), runs.rows(probe)
        for deviations, (layer, ratio) in zip(found, ways, strict=True):
            ours_QM = runs.blended(probe, rows, layer, ratio, true.text)
            deviations.append(deviation(true.logits_QM, ours_QM, len(true.text)))
        advance(1)
    return [BlendQuality.of(one, layers, *way) for one, way in zip(found, ways, strict=True)]


# -- records ---------------------------------------------------------------------------------------


def is_kept(engine: Engine) -> bool:
    """Return whether a calibration outlives the process."""
    store = engine.stored.store
    return store is not None and store.is_durable


def keep_calibration(engine: Engine, found: BlendCalibration) -> None:
    """Write a calibration to the store's first durable tier, in the place of an earlier one.
    ``TierError``, ``ResourceExhausted``."""
    key = _key(engine.blending)

    async def write(history: History) -> None:
        await history.put(key, found.document())
        await history.pin([key])

    ask(engine, Space(""), write)


def kept_calibration(engine: Engine) -> BlendCalibration | None:
    """Return the calibration of this model that the store has; None: it has none, or cannot be
    read, which is logged."""

    async def listed(history: History) -> list[ObjectKey]:
        (keys,) = await history.tier.children([records_of(KIND)])
        return list(keys)

    try:
        # The digest of the weights takes time, so only where there is any record.
        if not (keys := ask(engine, Space(""), listed)) or (key := _key(engine.blending)) not in keys:
            return None

        async def read(history: History) -> BlendCalibration | None:
            (blob,) = await history.tier.get([key])
            return None if blob is None else unpack_record(key, blob, BlendCalibration)

        return ask(engine, Space(""), read)
    except Unfit as error:
        logger.warning("the calibration of blending is not used: %s; calibrate again", error)
    except QuireError as error:
        logger.warning("the store cannot be read, so no calibration of blending is known: %s", error)
    return None


def _key(blending: Blending) -> ObjectKey:
    return record_key(KIND, f"{VERSION}/{AUTO}/{blending.scope}")
