"""``LocalRunner``: one model, one KV state, one process, which other runners wrap.

Letters: T new tokens of the batch, n of one chunk; K keys of one chunk, the new ones included; R
rows through the head; M placeholders; E model width; V vocabulary; Hq query heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.adapters.pool import AdapterPool
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.base.types import (
    Add,
    Chunk,
    Commit,
    DropCheckpoint,
    Edit,
    FinishImport,
    Fork,
    Import,
    Inputs,
    KeepCheckpoint,
    Load,
    LogitsPlace,
    Overwrite,
    Pop,
    Remove,
    SeqId,
    SetWindow,
    Step,
)
from quire.base.uploads import uploaded
from quire.blend.forward import BlendedForward
from quire.blend.row_sources import RowSources
from quire.contracts.kv_state import ModelState
from quire.contracts.model import Block, Model, OpenPass, num_blocks, stages_of
from quire.contracts.ranks import Group, Line
from quire.kv import layer_memory, sequencefile
from quire.kv.rule_table import position_refusal, weights_refusal
from quire.runner.reclaim import Room
from quire.statefile.container import StateFile

Ids: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of a step, all fresh tensors. Chunk i has rows ``starts[i]..starts[i + 1] - 1``."""

    logits_RV: Tensor
    """float32 ``[R, V]``"""
    starts: tuple[int, ...]
    hidden_states: tuple[tuple[Tensor, ...], ...] = ()
    """Per chunk, per layer ``[n, E]``, the layer's output in the model's dtype, if asked for."""
    features: tuple[Tensor, ...] = ()
    """By block of ``Inputs.features`` its output ``[T, E]``, in the model's dtype."""
    attention_weights: tuple[tuple[Tensor, ...], ...] = ()
    """Per chunk, per layer float32 ``[Hq, n, K]``, if asked for."""
    observed: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """By observed layer, per chunk float32 ``[Hq, n, K]``."""
    captured: bool = False
    """Whether the step ran as captured work (``GraphRunner``)."""
    left_out: tuple[NDArray[np.bool_] | None, ...] = ()
    """Of a blended step, per chunk bool ``[n]``: rows that did not run; None: not blended."""
    maxima: Sequence[int] | None = None
    """``sampling.logit_edits.first_maxima`` of the logits as returned; None: not computed."""

    @property
    def known_maxima(self) -> Sequence[int] | None:
        """``maxima``; None if the logits were written to since."""
        return None if self.maxima is None or self.logits_RV._version else self.maxima

    def rows(self, chunk: int) -> Tensor:
        """Return ``[rows, V]`` of one chunk: 1 row for "last", n for "all", 0 for "none"."""
        return self.logits_RV[self.starts[chunk] : self.starts[chunk + 1]]


class LayerLoad(Protocol):
    """Loads the layers of one sequence from a store, on another thread."""

    def wait(self, layer: int) -> None:
        """Return once a layer is complete. An error that it raises aborts the forward."""


class Runner(Protocol):
    """An executor of steps."""

    model: Model
    state: ModelState
    room: Room
    """The owners of sequences that can be given up; callers that are short of pages call it."""
    adapters: AdapterPool
    """The adapters that chunks may name."""
    loads: dict[SeqId, LayerLoad]
    """The loads that steps may await, by sequence. Owners add and remove theirs."""
    row_sources: RowSources
    """The cached rows that blended steps name."""
    files: dict[SeqId, StateFile]
    """The open state files that edits load, by the sequence that is made. Owners add and remove
    theirs."""
    logits: dict[int, Tensor]
    """Tensors float32 ``[size, V]`` that steps have named as places for logits, with zeros in rows
    that nothing was written to. Callers remove what they have named."""

    @property
    def revision(self) -> int:
        """Number of executed steps, including steps without chunks."""

    @property
    def fault(self) -> str:
        """The reason why no forward can run any more; empty: they can."""

    def execute(self, step: Step) -> StepOutput:
        """Apply the edits in order, then run the chunks as one forward."""

    def new_seq(self) -> SeqId:
        """Return a new sequence id. Ids are never reused."""


HEAD_ROWS = 64
"""Rows that run through the head at a time if logits have destinations; this bounds the copies."""


class LocalRunner:
    """Runs on the device that holds the model and the state."""

    def __init__(
        self,
        model: Model,
        state: ModelState,
        device: torch.device,
        adapters: AdapterPool | None = None,
        group: Group | None = None,
        line: Line | None = None,
    ) -> None:
        """Make a runner; ``adapters`` None: no adapter can change the model. ``group``: the ranks
        that divide its layers, of which only the first has logits; None: they are whole. ``line``:
        the stages that divide its blocks; None: all are here."""
        self.adapters = AdapterPool.without_sites() if adapters is None else adapters
        self.model = model
        self._wide = getattr(model, "wide", None)
        self.state = state
        self.device = device
        self.line, self._stages = line, stages_of(model) if line is not None else None
        self._num_blocks = num_blocks(model)
        self._has_logits = group is None or group.rank == 0
        self._seqs = itertools.count()
        self._no_logits = torch.empty(0, model.vocab_size, device=device)
        self.room = Room()
        self.loads: dict[SeqId, LayerLoad] = {}
        self.row_sources = RowSources(state, None if group is None else group.sum)
        self.files: dict[SeqId, StateFile] = {}
        self.logits: dict[int, Tensor] = {}
        self._revision = 0

    def new_seq(self) -> SeqId:
        """See ``Runner``."""
        return next(self._seqs)

    @property
    def revision(self) -> int:
        """See ``Runner``."""
        return self._revision

    @property
    def fault(self) -> str:
        """See ``Runner``."""
        return ""

    def execute(self, step: Step) -> StepOutput:
        """See ``Runner``. A failure undoes the forward: the state is as after the edits."""
        self._revision += 1
        inputs = step.inputs
        if not step.chunks:
            for edit in step.edits:
                self.apply(edit)
            return StepOutput(self._no_logits, (0,))
        check_chunks(step.chunks)
        adapters = [chunk.adapter for chunk in step.chunks]
        plain = adapters.count(None) == len(adapters)
        if not plain:
            self.adapters.check(adapters)
        if inputs.mask is not None and self.state.recurrent_ids:
            raise Unsupported(
                "a mask: recurrent layers see the tokens of a sequence in order, and no mask can change that; leave it out"
            )
        if inputs.positions is not None and (reason := position_refusal(self.model.layer_specs)):
            raise Unsupported(f"positions: {reason}")
        if inputs.places:
            self._check_places(step)
        if any(not 0 <= block < self._num_blocks for block in inputs.features):
            allowed = f"blocks 0 to {self._num_blocks - 1}"
            raise InvalidArgument(field="features", given=inputs.features, allowed=allowed)
        loads = self._loads(step)
        counts, kept = [len(chunk.tokens) for chunk in step.chunks], [chunk.checkpoints for chunk in step.chunks]
        blended = None
        if step.blend is not None:
            _check_blend(step)
            blended = self.row_sources.forward(step.blend, counts)
        if inputs.drawn is not None:
            check_drawn(step, inputs.drawn)
        if inputs.attention_weights and (reason := weights_refusal(self.model.layer_specs, self._num_blocks)):
            raise Unsupported(f"attention weights: {reason}; leave output_attentions False")
        tokens = np.concatenate([np.asarray(chunk.tokens, dtype=np.int64) for chunk in step.chunks])
        placeholders = self._placeholders(tokens, inputs)
        for edit in step.edits:
            self.apply(edit)
        trees = [None if chunk.tree is None else chunk.tree.parents for chunk in step.chunks]
        seqs = [chunk.seq for chunk in step.chunks]
        self.state.begin_forward(seqs, counts, trees if any(trees) else None, checkpoints=kept if any(kept) else ())
        try:
            index, starts = logits_rows(step.chunks)
            output = None
            if plain and step.is_plain and inputs.drawn is None and placeholders is None and index is None:
                output = self._at_once(tokens, starts)
            if output is None:
                output = self._forward(step, loads, blended, tokens, placeholders, index, starts)
            self.state.end_forward()
        except BaseException:
            if self.state.forward_is_open:
                self.state.abort_forward()
            raise
        finally:
            self.adapters.deactivate()
        return output

    def _at_once(self, tokens: Ids, starts: tuple[int, ...]) -> StepOutput | None:
        """Run the model as one call; None if the model has no such call for this step."""
        self.adapters.deactivate()
        stack = self.model.stack
        found = None if stack is None else stack.run_model(self.model, tokens, self.state.open_pass())
        return None if found is None else StepOutput(found.logits_TV, starts, maxima=found.maxima)

    def _forward(
        self,
        step: Step,
        loads: Sequence[LayerLoad],
        blended: BlendedForward | None,
        tokens: Ids,
        placeholders: Ids | None,
        index: Ids | None,
        starts: tuple[int, ...],
    ) -> StepOutput:
        """Run the model part by part; ``index``, ``starts``: as returned by ``logits_rows``."""
        inputs = step.inputs
        adapters, counts = [chunk.adapter for chunk in step.chunks], [len(chunk.tokens) for chunk in step.chunks]
        plain = adapters.count(None) == len(adapters)
        hidden: list[Tensor] = []
        features: dict[int, Tensor] = {}
        with torch.inference_mode():
            if plain:
                self.adapters.deactivate()
            else:
                self.adapters.activate(adapters, counts, np.diff(starts).tolist())
            pass_ = self._open_pass(inputs, loads)
            first = 0 if self._stages is None else self._stages.own.start
            embedded_TE = None if first else self._embed(tokens, placeholders, inputs)
            if blended is not None and blended.rehearsed.size:
                self._rehearse(blended, embedded_TE, pass_, adapters, counts)
                self.adapters.activate(adapters, counts, np.diff(starts).tolist())
            x_TE = self._received(blended, len(tokens), pass_, step) if embedded_TE is None else embedded_TE
            stack, blocks = self.model.stack, self.model.blocks
            if stack is not None and plain and blended is None and not inputs.hidden_states:
                wanted = {block - first for block in inputs.features}
                read = sorted({*wanted.intersection(range(len(blocks))), len(blocks) - 1})
                outputs = stack.outputs(blocks, x_TE, pass_, read)
                if outputs is not None:
                    x_TE, blocks = outputs[-1], ()
                    features = {first + block: y_TE for block, y_TE in zip(read, outputs, strict=True)}
            for layer, block in enumerate(blocks, first):
                if blended is not None:
                    x_TE = self._entering(blended, layer, block, x_TE, pass_, step)
                x_TE = block(x_TE, pass_)
                if inputs.hidden_states or layer in inputs.features:
                    seen_TE = x_TE if self._wide is None else self._wide.visible(x_TE)
                    hidden.append(seen_TE)
                    features[layer] = seen_TE
            if blended is not None:
                index = np.searchsorted(blended.alive, np.arange(len(tokens)) if index is None else index)
            self._send(x_TE, blended)
            x_RE = x_TE if index is None else x_TE.index_select(0, uploaded(index, self.device))
        # Outside of inference mode: callers may write to the results.
        with torch.no_grad():
            if inputs.places:
                # The adapters' work on the head is planned for all rows.
                is_first = self._stages is None or self._stages.is_first
                rows = np.diff(starts).tolist()
                places = self._tensors_at(inputs.places, rows) if self._has_logits and is_first else None
                self._head_to(x_RE, places, HEAD_ROWS if plain else max(1, starts[-1]))
                del places
                starts = (0,) * len(starts)
            logits_RV = self._head(x_RE) if starts[-1] else self._no_logits
            states = _split(hidden, step.chunks) if inputs.hidden_states else ()
            weights = self._weights(pass_, len(step.chunks)) if inputs.attention_weights else ()
            observed = _observed(pass_, self._own_layers(inputs.observed))
            found = tuple(features[block] for block in inputs.features if block in features)
        left_out = () if blended is None else blended.left_out
        return StepOutput(logits_RV, starts, states, found, weights, observed, left_out=left_out)

    def _head(self, x_RE: Tensor) -> Tensor:
        """Return the logits of rows; of a model in stages, rank 0 has those of the last one. Other
        ranks return any values."""
        line, stages = self.line, self._stages
        if line is None or stages is None:
            return self.model.head(x_RE)
        if stages.is_last:
            logits_RV = self.model.head(x_RE)
            if self._has_logits:
                line.give(logits_RV)
            return logits_RV
        return line.fetch(len(x_RE)) if stages.is_first and self._has_logits else self._no_logits

    def _rehearse(
        self,
        blended: BlendedForward,
        x_TE: Tensor | None,
        pass_: OpenPass,
        adapters: Sequence[int | None],
        counts: Sequence[int],
    ) -> None:
        """Run the rehearsed rows alone through all blocks, before the forward. ``x_TE``: the
        embeddings of all rows; None: the stage before gives the rehearsed ones."""
        rows, line = blended.rehearsed, self.line
        running = np.diff(np.searchsorted(rows, np.concatenate(([0], np.cumsum(counts)))))
        self.adapters.activate(adapters, running.tolist(), [0] * len(counts))
        rehearsal, first = blended.rehearse(pass_), 0 if self._stages is None else self._stages.own.start
        if x_TE is not None:
            x_SE = x_TE.index_select(0, uploaded(rows, self.device))
        else:
            assert line is not None
            x_SE = line.receive(len(rows))
        for layer, block in enumerate(self.model.blocks, first):
            blended.give(layer, pass_)
            x_SE = block(x_SE, rehearsal)
        if line is not None:
            self._send(x_SE, None)
            rehearsal.mass_T.copy_(line.sum(rehearsal.mass_T))

    def _received(self, blended: BlendedForward | None, count: int, pass_: OpenPass, step: Step) -> Tensor:
        """Receive the previous stage's rows ``[A, E]``, of a blended forward the alive ones."""
        assert self.line is not None
        if blended is not None and self._has_selected(blended.check_layer):
            scores_C = self.line.receive_scores(blended.num_scored) if blended.num_scored else torch.empty(0)
            blended.follow(scores_C.cpu().numpy(), pass_)
            count = blended.alive.size
            self._plan_adapters(blended, step)
        return self.line.receive(count)

    def _send(self, x_TE: Tensor, blended: BlendedForward | None) -> None:
        """Give the next stage rows, if there is one, and the scores by which they were selected."""
        if self.line is None or self._stages is None or self._stages.is_last:
            return
        if blended is not None and blended.scores_C is not None and blended.num_scored:
            self.line.send_scores(torch.from_numpy(blended.scores_C))
        self.line.send(x_TE)

    def _has_selected(self, layer: int) -> bool:
        """Return whether a stage before holds this layer."""
        return self._stages is not None and layer < self._stages.own.start

    def _entering(
        self, blended: BlendedForward, layer: int, block: Block, x_TE: Tensor, pass_: OpenPass, step: Step
    ) -> Tensor:
        """Return the rows that enter a block, and plan the work of adapters for them."""
        entering_SE = blended.enter(layer, block, x_TE, pass_)
        if entering_SE.shape[0] != x_TE.shape[0]:
            self._plan_adapters(blended, step)
        return entering_SE

    def _plan_adapters(self, blended: BlendedForward, step: Step) -> None:
        """Plan the work of adapters for the rows that still run."""
        head_counts = [int(chunk.logits == "last") for chunk in step.chunks]
        self.adapters.activate([chunk.adapter for chunk in step.chunks], blended.counts, head_counts)

    def _check_places(self, step: Step) -> None:
        """Raise ``InvalidArgument`` for places that do not fit a step's logits."""
        _, starts = logits_rows(step.chunks)
        places, counts = step.inputs.places, np.diff(starts).tolist()
        if len(places) != len(counts):
            raise InvalidArgument(field="places", given=len(places), allowed=f"one for each of {len(counts)} chunks")
        sizes = {name: len(tensor) for name, tensor in self.logits.items()}
        for place, count in zip(places, counts, strict=True):
            size = sizes.setdefault(place.tensor, place.size)
            if place.size != size or not 0 <= place.start <= size - count:
                raise InvalidArgument(field="places", given=place, allowed=f"{count} rows within {size}")

    def _tensors_at(self, places: Sequence[LogitsPlace], counts: Sequence[int]) -> list[Tensor]:
        """Return the rows of named tensors for the logits of each chunk."""
        for place in places:
            if place.tensor not in self.logits:
                self.logits[place.tensor] = torch.zeros(place.size, self.model.vocab_size, device=self.device)
        return [
            self.logits[place.tensor][place.start : place.start + count]
            for place, count in zip(places, counts, strict=True)
        ]

    def _head_to(self, x_RE: Tensor, places: Sequence[Tensor] | None, most: int) -> None:
        """Write the logits of all rows to their destinations, if there are any, ``most`` rows at a
        time."""
        chunk = offset = 0
        for begin in range(0, len(x_RE), most):
            logits_RV = self._head(x_RE[begin : begin + most])
            if self.line is not None and places is not None:
                self.line.finish_sends()
            while places is not None and len(logits_RV):
                count = min(len(places[chunk]) - offset, len(logits_RV))
                places[chunk][offset : offset + count] = logits_RV[:count]
                logits_RV, offset = logits_RV[count:], offset + count
                if offset == len(places[chunk]):
                    chunk, offset = chunk + 1, 0
            del logits_RV  # otherwise it would exist beside the next logits

    def _loads(self, step: Step) -> list[LayerLoad]:
        """Return the loads that a step awaits; ``FailedPrecondition`` if there is none."""
        for seq in step.awaited:
            if seq not in self.loads:
                raise FailedPrecondition(f"sequence {seq} is awaited, and no transfer brings it")
        return [self.loads[seq] for seq in step.awaited]

    def _placeholders(self, tokens: Ids, inputs: Inputs) -> Ids | None:
        """Return the rows of the batch whose ids are negative; None if there are none.
        ``InvalidArgument`` unless each has an embedding."""
        rows = np.flatnonzero(tokens < 0) if np.minimum.reduce(tokens) < 0 else None
        count, given = 0 if rows is None else len(rows), inputs.embeddings
        shape = (count, self.model.hidden_size)
        if (given is None and count) or (given is not None and tuple(given.shape) != shape):
            found = "none" if given is None else str(list(given.shape))
            raise InvalidArgument(f"{count} placeholders (negative ids) need embeddings {list(shape)}; got {found}")
        return rows

    def _open_pass(self, inputs: Inputs, loads: Sequence[LayerLoad]) -> OpenPass:
        pass_ = self.state.open_pass()
        if inputs.mask is not None:
            pass_.use_mask(inputs.mask)
        if inputs.positions is not None:
            pass_.use_positions(inputs.positions)
        if inputs.attention_weights or (observed := self._own_layers(inputs.observed)):
            pass_.capture_weights(None if inputs.attention_weights else observed)
        if loads:
            pass_.wait_for_layers(partial(_wait_for, loads))
        return pass_

    def _embed(self, tokens: Ids, placeholders: Ids | None, inputs: Inputs) -> Tensor:
        """Return ``[T, E]``, with the given rows at placeholders."""
        if inputs.drawn is not None:
            return self.model.embed(inputs.drawn)
        if placeholders is None or inputs.embeddings is None:
            return self.model.embed(uploaded(tokens, self.device))
        x_TE = self.model.embed(uploaded(tokens.clip(min=0), self.device))
        rows = uploaded(placeholders, self.device)
        given = inputs.embeddings.to(x_TE.device, x_TE.dtype)
        return x_TE.index_copy(0, rows, given if self._wide is None else self._wide.entering(given))

    def _own_layers(self, layers: frozenset[int]) -> frozenset[int]:
        """Return the layers that no other stage holds."""
        if self._stages is None:
            return layers
        own, owners = self._stages.stage, self._stages.owners
        return frozenset(layer for layer in layers if owners.get(layer, own) == own)

    def _weights(self, pass_: OpenPass, num_chunks: int) -> tuple[tuple[Tensor, ...], ...]:
        layers = sorted(pass_.weights)
        if len(layers) != len(self.model.blocks):
            raise Unsupported(
                f"attention weights: {len(layers)} of {len(self.model.blocks)} blocks have some; leave output_attentions False"
            )
        return tuple(tuple(pass_.weights[layer][chunk].clone() for layer in layers) for chunk in range(num_chunks))

    def apply(self, edit: Edit) -> None:
        """Apply one edit of the sequences. ``FailedPrecondition`` if it needs tokens to run
        again."""
        match edit:
            case Add(seq):
                self.state.add_sequence(seq)
            case Fork(parent, child, pos):
                self.state.fork_sequence(parent, child, pos, exact=True)
            case Pop(seq, n):
                self.state.popn(seq, n, exact=True)
            case Remove(seq):
                self.state.remove_sequence(seq)
            case KeepCheckpoint(seq):
                self.state.checkpoint(seq)
            case DropCheckpoint(seq, position):
                self.state.drop_checkpoint(seq, position)
            case Import(seq, metadata, parent, shared):
                self.state.prepare_import(seq, metadata, parent=parent, shared=shared)
                try:
                    self.state.publish_import(seq)
                except BaseException:
                    self.state.remove_sequence(seq)
                    raise
            case FinishImport(seq):
                self.state.finish_import(seq)
            case Load(seq, metadata, prefix):
                if seq not in self.files:
                    raise FailedPrecondition(f"sequence {seq} is to be loaded, and no state file is open for it")
                sequencefile.load(self.state, seq, self.files[seq], metadata, prefix)
            case Overwrite(seq, layer, start, tensors):
                layer_memory.write(self.state, seq, layer, start, tensors)
            case Commit(seqs, leaves):
                self.state.commit_accepted_token_tree_nodes(seqs, leaves)
            case SetWindow(seq, window, sink):
                self.state.enable_sliding_window_for_seq(seq, window, sink)


def _wait_for(loads: Sequence[LayerLoad], layer: int) -> None:
    """Wait for a layer of each transfer."""
    for one in loads:
        one.wait(layer)


def _check_blend(step: Step) -> None:
    """Raise ``Unsupported`` for inputs or outputs of all rows in a forward that runs only some, and
    ``InvalidArgument`` for a blending of another number of chunks."""
    inputs, given = step.inputs, () if step.blend is None else step.blend.chunks
    if len(given) != len(step.chunks):
        raise InvalidArgument(field="blend", given=len(given), allowed=f"one for each of {len(step.chunks)} chunks")
    for name, asked in (
        ("mask", inputs.mask is not None),
        ("positions", inputs.positions is not None),
        ("hidden_states", inputs.hidden_states or bool(inputs.features)),
        ("attention_weights", inputs.attention_weights or bool(inputs.observed)),
        ("logits", any(chunk.logits == "all" for chunk in step.chunks)),
    ):
        if asked:
            raise Unsupported(f"{name} are of all rows, and only some of this forward's go on", field=name)


def check_drawn(step: Step, drawn: Tensor) -> None:
    """Raise ``InvalidArgument`` unless ``drawn`` has one token for each token of the step."""
    wanted = (sum(len(chunk.tokens) for chunk in step.chunks),)
    if drawn.dtype != torch.int64 or tuple(drawn.shape) != wanted:
        raise InvalidArgument(f"drawn tokens must be int64 {list(wanted)}, got {drawn.dtype} {list(drawn.shape)}")
    if any(min(chunk.tokens) < 0 for chunk in step.chunks):
        raise InvalidArgument("drawn tokens stand for all of a step's, and it has placeholders (negative ids)")


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Raise ``InvalidArgument`` for malformed chunks, before anything changes."""
    for chunk in chunks:
        if not len(chunk.tokens):
            raise InvalidArgument(f"the chunk of sequence {chunk.seq} has no tokens; give at least one")
        if chunk.tree is not None and len(chunk.tree.parents) != len(chunk.tokens):
            raise InvalidArgument(
                f"the chunk of sequence {chunk.seq} has {len(chunk.tokens)} tokens and a tree of {len(chunk.tree.parents)} nodes; "
                "give a parent for each token"
            )


def _observed(pass_: OpenPass, layers: frozenset[int]) -> dict[int, tuple[Tensor, ...]]:
    """Return copies of the weights of observed layers; ``Unsupported`` for one without any."""
    for layer in layers:
        if layer not in pass_.weights:
            raise Unsupported(f"layer {layer} has no attention weights over keys of its own", field="layer")
    return {layer: tuple(one.clone() for one in pass_.weights[layer]) for layer in sorted(layers)}


def _split(layers: Sequence[Tensor], chunks: Sequence[Chunk]) -> tuple[tuple[Tensor, ...], ...]:
    """Return copies of each chunk's rows of each layer's ``[T, E]``."""
    counts = [len(chunk.tokens) for chunk in chunks]
    rows = zip(*(x_TE.split_with_sizes(counts) for x_TE in layers), strict=True)
    return tuple(tuple(x_nE.clone() for x_nE in found) for found in rows)


def logits_rows(chunks: Sequence[Chunk]) -> tuple[Ids | None, tuple[int, ...]]:
    """Return the rows that run through the head (None: all), and the first such row of each
    chunk."""
    counts = [len(chunk.tokens) for chunk in chunks]
    wanted = [
        1 if chunk.logits == "last" else count if chunk.logits == "all" else 0
        for count, chunk in zip(counts, chunks, strict=True)
    ]
    starts = (0, *itertools.accumulate(wanted))
    if wanted == counts:
        return None, starts
    ends = itertools.accumulate(counts)
    return np.concatenate([np.arange(end - some, end) for some, end in zip(wanted, ends, strict=True)]), starts
