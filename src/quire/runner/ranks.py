"""``RankedRunner``: a model divided among processes, which replay the same steps.

Rank 0 is the user's process. It schedules, samples and answers; ``RankedRunner`` sends each step to
the other ranks and runs its own part. The others are children: each holds its part of the weights
and of K and V, and the same pages. Steps go through sockets as pickles, sums and gathers through
``torch.distributed``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch
from torch import Tensor

from quire.adapters.pool import AdapterPool
from quire.base.errors import FailedPrecondition, QuireError, RanksBroken, Unsupported
from quire.base.types import FinishImport, Import, Load, Remove, SeqId, Step
from quire.blend.forward import pieces_of
from quire.blend.rows_task import RowsPiece
from quire.contracts.adapters import Adapter
from quire.contracts.model import num_blocks, stages_of
from quire.contracts.ranks import Grid, HandOver
from quire.kv import sequencefile, transfer_verbs
from quire.kv.parts import StateParts
from quire.kv.state import State
from quire.kv.storage import geometry
from quire.runner.local import LocalRunner, StepOutput, logits_rows
from quire.runner.micro_batches import micro_batches
from quire.runner.rank_messages import (
    FAILED,
    SEEN,
    HeldRows,
    LoadAdapter,
    Put,
    Rows,
    Seen,
    Take,
    UnloadAdapter,
    receive,
    send,
)
from quire.runner.rank_processes import ANSWER_SECONDS, Ranks


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step that runs in other stages."""

    output: StepOutput
    """Its logits are there once ``RankedRunner.finish`` has returned."""
    num_messages: int
    """Number of messages of this rank, of this step and those before."""


class RankedRunner:
    """The ``Runner`` of rank 0."""

    def __init__(self, inner: LocalRunner, ranks: Ranks) -> None:
        """Wrap the runner of rank 0's part."""
        self.model, self.state, self.room, self.adapters = inner.model, inner.state, inner.room, inner.adapters
        self.loads, self.row_sources, self.logits = inner.loads, inner.row_sources, inner.logits
        self.files, self.device = inner.files, inner.device
        self.ranks, self._inner = ranks, inner
        stages = stages_of(inner.model)
        self._blocks = [range(num_blocks(inner.model))] if stages is None else stages.blocks

    @property
    def revision(self) -> int:
        """See ``Runner``."""
        return self._inner.revision

    @property
    def fault(self) -> str:
        """See ``Runner``. A rank that hangs is found by the next step."""
        return self.ranks.fault

    def new_seq(self) -> SeqId:
        """See ``Runner``."""
        return self._inner.new_seq()

    def execute(self, step: Step) -> StepOutput:
        """See ``Runner``. ``Unsupported`` for a step that ranks cannot run, and ``RanksBroken`` for
        chunks once a rank has ended.

        The others know neither files nor transfers: rank 0 reads, and gives each its heads. So a
        step that awaits transfers begins when all layers are there.
        """
        if reason := refusal(step, self.ranks.grid):
            raise Unsupported(f"{self.ranks.grid}: {reason}")
        match step.edits:
            case (Load() as edit,):
                return self._load(edit)
        if step.awaited or step.blend is not None:
            try:
                self._wait(step)
                parts = self._cached_rows(step)
            except BaseException:
                self._run(Step(edits=step.edits))
                raise
            self.ranks.tell([Rows(part) for part in parts[1:]])
            sources = self.row_sources.sources
            given = {name: sources[name] for name in parts[0]}
            sources.update(parts[0])
            try:
                output = self._run(replace(step, awaited=()))
            finally:
                sources.update(given)
        else:
            output = self._run(step)
        if step.chunks:
            transfer_verbs.send_computed(cast(State, self.state).parts)
        inputs = step.inputs
        is_blended = step.blend is not None and self.ranks.grid.stages > 1
        has_seen = inputs.attention_weights or inputs.observed or inputs.hidden_states or inputs.features or is_blended
        return self._with_all_seen(step, output) if step.chunks and has_seen else output

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.ranks.grid.stages

    def begin(self, step: Step) -> StagedStep:
        """Run the first stage of a step that has only chunks and asks for nothing but logits.
        Return while the other stages run it. Later steps run behind it in every stage. Errors are
        those of ``execute``; of a failed step nothing is under way."""
        self.ranks.send(step)
        line = self._inner.line
        assert line is not None
        with self._failing_together():
            self.ranks.is_running = True
            output = self._inner.execute(step)
        transfer_verbs.send_computed(cast(State, self.state).parts)
        return StagedStep(output, line.num_begun)

    def finish(self, step: StagedStep) -> StepOutput:
        """Wait for the logits of a step. ``RanksBroken`` if a rank has ended."""
        line = self._inner.line
        assert line is not None
        try:
            line.finish_sends(step.num_messages)
        except RanksBroken:
            raise self.ranks.fail() from None
        self.ranks.is_running = line.num_begun > step.num_messages
        return step.output

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Runs a step that the others run too. If it fails, it has failed on all of them, or they
        end."""
        try:
            yield
        except RanksBroken:
            raise self.ranks.fail() from None
        except BaseException:
            self.ranks.is_running = False
            self.ranks.confirm_failure()
            raise

    def _run(self, step: Step) -> StepOutput:
        parts = self._micro_batches(step)
        try:
            for part in parts:
                self.ranks.send(part)
        except RanksBroken:
            if step.chunks:
                raise
            return self._inner.execute(step)  # a request ends at its chunk; what remains is to free sequences
        with self._failing_together():
            if not step.chunks:
                return self._inner.execute(step)
            try:
                self.ranks.is_running = True
                outputs = [self._inner.execute(part) for part in parts]
                if (line := self._inner.line) is not None:
                    line.finish_sends()
            finally:
                self.ranks.is_running = False
        if len(outputs) == 1:
            return outputs[0]
        _, starts = logits_rows(step.chunks)
        return StepOutput(torch.cat([one.logits_RV for one in outputs]), starts)

    def _micro_batches(self, step: Step) -> list[Step]:
        """Return the parts of a step that stages run at the same time. There is room for all of
        them, so that none fails behind another."""
        state = self.state
        parts = micro_batches(step, self.ranks.grid.stages, cuts_chunks=not state.recurrent_ids)
        if len(parts) == 1:
            return parts
        seqs, counts = [chunk.seq for chunk in step.chunks], [len(chunk.tokens) for chunk in step.chunks]
        try:
            is_short = state.missing_pages(seqs, counts) > 0
            if state.recurrent_ids:
                is_short |= state.spare_states(seqs, counts) < 0
        except QuireError:  # The forward raises it.
            is_short = True
        return [step] if is_short else parts

    def _with_all_seen(self, step: Step, output: StepOutput) -> StepOutput:
        """Return the output with what all ranks have seen: of all heads and blocks."""
        parts = [
            seen_of(output),
            *self.ranks.last_seen(),
        ]
        slices = self.ranks.grid.slices
        stages = [parts[first : first + slices] for first in range(0, len(parts), slices)]
        every = [self._joined([part.attention_weights for part in stage]) for stage in stages]
        observed = {
            layer: self._joined([[part.observed[layer]] for part in stage])[0]
            for stage in stages
            for layer in stage[0].observed
        }
        features = dict[int, Tensor]()
        for stage, blocks in zip(stages, self._blocks, strict=True):
            own = [block for block in step.inputs.features if block in blocks]
            features.update(zip(own, stage[0].features, strict=True))
        return replace(
            output,
            attention_weights=_side_by_side(every),
            observed=observed,
            hidden_states=_side_by_side(
                [[[x.to(self.device) for x in one] for one in stage[0].hidden_states] for stage in stages]
            ),
            features=tuple(features[block].to(self.device) for block in step.inputs.features),
            left_out=parts[-1].left_out,
        )

    def _joined(self, parts: Sequence[Sequence[Sequence[Tensor]]]) -> list[tuple[Tensor, ...]]:
        """Return tensors of all heads, of those of each slice."""
        return [
            tuple(torch.cat([one.to(self.device) for one in heads]) for heads in zip(*chunks, strict=True))
            for chunks in zip(*parts, strict=True)
        ]

    def _load(self, edit: Load) -> StepOutput:
        """Make a sequence from a file; each rank gets its heads."""
        if edit.seq not in self.files:
            raise FailedPrecondition(f"sequence {edit.seq} is to be loaded, and no state file is open for it")
        self._run(Step(edits=(Import(edit.seq, edit.metadata),)))
        try:
            sequencefile.fill(self.state, edit.seq, self.files[edit.seq], edit.metadata, edit.prefix)
            return self._run(Step(edits=(FinishImport(edit.seq),)))
        except BaseException:
            self._run(Step(edits=(Remove(edit.seq),)))
            raise

    def _wait(self, step: Step) -> None:
        """Wait for all layers of the transfers of a step."""
        for seq in step.awaited:
            if seq not in self.loads:
                raise FailedPrecondition(f"sequence {seq} is awaited, and no transfer brings it")
            for layer in (*self.state.geometry.layer_ids, *self.state.recurrent_ids):
                self.loads[seq].wait(layer)

    def _cached_rows(self, step: Step) -> list[dict[int, HeldRows]]:
        """Return the cached rows that a step names, of each rank's heads. ``BlendLoadError``."""
        parts: list[dict[int, HeldRows]] = [{} for _ in range(self.ranks.size)]
        state, grid = cast(State, self.state).parts, self.ranks.grid
        stages = stages_of(self.model)
        owners = {} if stages is None else stages.owners
        for chunk, one in enumerate(() if step.blend is None else step.blend.chunks):
            if one is None or one.source not in self.row_sources.sources:
                continue
            source = self.row_sources.sources[one.source]
            layers = {layer: pieces_of(source, layer, chunk, one) for layer in state.paged.specs}
            for rank, part in enumerate(parts):
                part[one.source] = HeldRows(
                    {
                        layer: [_heads_of(state, layer, grid.share(rank).rank, piece) for piece in pieces]
                        for layer, pieces in layers.items()
                        if owners.get(layer, 0) == grid.stage(rank)
                    }
                )
        return parts


def _heads_of(state: StateParts, layer: int, slice: int, piece: RowsPiece) -> RowsPiece:
    """Return the rows of a slice's heads."""
    assert state.division is not None
    count = geometry(state.spec(layer)).kv_heads
    k, v = (state.division.heads_of(slice, rows, count) for rows in (piece.k, piece.v))
    return piece._replace(k=k, v=v)


def _side_by_side(stages: Sequence[Sequence[Sequence[Tensor]]]) -> tuple[tuple[Tensor, ...], ...]:
    """Return for each chunk the tensors of the layers of all stages."""
    return tuple(tuple(itertools.chain(*layers)) for layers in zip(*stages, strict=True))


def seen_of(output: StepOutput) -> Seen:
    """Return the tensors and masks of a rank's output, which rank 0 joins with the others'."""
    return Seen(output.attention_weights, output.observed, output.hidden_states, output.features, output.left_out)


def refusal(step: Step, grid: Grid) -> str:
    """Return the reason why ranks cannot run a step; empty: they can."""
    if step.blend is not None and step.blend.check_layer is None:
        return "a blend executor of the caller's own chooses among rows of all heads"
    if any(isinstance(edit, Load) for edit in step.edits) and (step.chunks or len(step.edits) > 1):
        return "a state file is loaded by a step of its own"
    return "" if step.inputs.drawn is None else "tokens are drawn on rank 0"


def serve_steps(runner: LocalRunner, pipe: Connection) -> None:
    """Do what rank 0 sends, until it ends. A step's error is rank 0's to report if it has the same;
    if it has none, end, so that rank 0 notices."""
    state, failed = cast(State, runner.state), False
    seen = Seen()
    inbox = _read(pipe)
    while True:
        try:
            message = inbox.get(timeout=ANSWER_SECONDS if failed else None)
        except Empty:
            return
        match message:
            case None:
                return
            case Take(place, slots_N):
                send(pipe, state.parts.storage(place).take(place[1], slots_N))
            case Put(seq, place, slots_N, planes):
                if seq in state.parts.imports or seq in state.parts.transfers:
                    found = {name: plane.to(runner.device) for name, plane in planes.items()}
                    state.parts.storage(place).put(place[1], slots_N, found)
            case HandOver() as event:
                transfer_verbs.follow(state.parts, event)
            case Rows(sources):
                named = {
                    name: HeldRows(
                        {layer: [_on(runner.device, one) for one in pieces] for layer, pieces in held.layers.items()}
                    )
                    for name, held in sources.items()
                }
                runner.row_sources.sources.update(named)
            case LoadAdapter(adapter_id, adapter):
                send(pipe, _loaded(runner.adapters, adapter, adapter_id))
            case UnloadAdapter(adapter_id):
                if adapter_id in runner.adapters.ids:
                    runner.adapters.unload(adapter_id)
            case str() if message == SEEN:
                send(pipe, seen)
            case str():
                send(pipe, FAILED if failed else None)
                failed = False
            case _ if failed:
                return
            case _:
                try:
                    output = runner.execute(message)
                    seen = seen_of(output)
                    if runner.line is not None and message.chunks:
                        runner.line.finish_sends()
                except QuireError:
                    failed = True
                runner.row_sources.sources.clear()


def _read(pipe: Connection) -> SimpleQueue[Any]:
    """Return a queue to which a thread brings all messages, also while a step runs, so that rank 0
    does not wait; None at the end."""
    inbox = SimpleQueue[Any]()

    def read() -> None:
        try:
            while True:
                inbox.put(receive(pipe))
        except (EOFError, OSError):
            inbox.put(None)

    threading.Thread(target=read, name="quire-rank-messages", daemon=True).start()
    return inbox


def _on(device: torch.device, piece: RowsPiece) -> RowsPiece:
    return piece._replace(k=piece.k.to(device), v=piece.v.to(device))


def _loaded(pool: AdapterPool, adapter: Adapter, adapter_id: int) -> QuireError | None:
    """Load a rank's part; return the error."""
    try:
        pool.load(adapter, adapter_id)
    except QuireError as error:
        return error
    return None
