"""One model, one KV state, one process: the runner that the others wrap.

Letters: T new tokens of the batch; R rows through the head; E model width; V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.contracts.model import Model
from quire.errors import InvalidArgument, Unsupported
from quire.kv.paged import PagedKVState
from quire.types import Add, Chunk, Commit, Edit, Fork, Pop, Remove, SeqId, Step


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits of a step. The rows of chunk i are ``starts[i]..starts[i + 1] - 1``."""

    logits_RV: Tensor
    """float32 ``[R, V]``, fresh"""
    starts: tuple[int, ...]

    def rows(self, chunk: int) -> Tensor:
        """``[rows, V]`` of one chunk: 1 row for "last", n for "all", 0 for "none"."""
        return self.logits_RV[self.starts[chunk] : self.starts[chunk + 1]]


class Runner(Protocol):
    """What executes steps."""

    model: Model
    state: PagedKVState
    reclaim: Callable[[], bool] | None
    """Gives up something that can be had again (a cached sequence, an idle session's state) and says whether it did.
    Whoever owns such things sets it; whoever is short of pages calls it until it has room or nothing is left."""

    def execute(self, step: Step) -> StepOutput:
        """Apply the edits in order, then run the chunks as one forward."""
        ...

    def new_seq(self) -> SeqId:
        """A sequence id that nobody has had."""
        ...


class LocalRunner:
    """Runs on the device that holds the model and the state."""

    def __init__(self, model: Model, state: PagedKVState, device: torch.device) -> None:
        self.model = model
        self.state = state
        self.device = device
        self._seqs = itertools.count()
        self.reclaim: Callable[[], bool] | None = None

    def new_seq(self) -> SeqId:
        """See ``Runner``."""
        return next(self._seqs)

    def execute(self, step: Step) -> StepOutput:
        """See ``Runner``. If compute fails the forward is undone: lengths and pages are as after the edits."""
        check_chunks(step.chunks)
        for edit in step.edits:
            self.apply(edit)
        if not step.chunks:
            return StepOutput(torch.empty(0, self.model.vocab_size, device=self.device), (0,))
        self.state.begin_forward([chunk.seq for chunk in step.chunks], [len(chunk.tokens) for chunk in step.chunks])
        try:
            with torch.inference_mode():
                tokens_T = torch.from_numpy(np.concatenate([as_ids(chunk.tokens) for chunk in step.chunks]))
                pass_ = self.state.open_pass()
                x_TE = self.model.embed(tokens_T.to(self.device))
                for block in self.model.blocks:
                    x_TE = block(x_TE, pass_)
                index, starts = logits_rows(step.chunks)
                x_RE = x_TE if index is None else x_TE.index_select(0, torch.from_numpy(index).to(self.device))
            # Outside of inference mode, so that the logits are an ordinary tensor that a caller may write to.
            with torch.no_grad():
                if starts[-1]:
                    logits_RV = self.model.head(x_RE)
                else:
                    logits_RV = torch.empty(0, self.model.vocab_size, device=self.device)
            self.state.end_forward()
        except BaseException:
            if self.state.table.forward is not None:
                self.state.abort_forward()
            raise
        return StepOutput(logits_RV, starts)

    def apply(self, edit: Edit) -> None:
        """One edit of the sequences."""
        match edit:
            case Add(seq):
                self.state.add_sequence(seq)
            case Fork(parent, child, pos):
                self.state.fork_sequence(parent, child, pos)
            case Pop(seq, n):
                self.state.popn(seq, n)
            case Remove(seq):
                self.state.remove_sequence(seq)
            case Commit():
                raise Unsupported("Commit: token trees are not in this release; append chains and take back with Pop")


def check_chunks(chunks: Sequence[Chunk]) -> None:
    """Refuse what this release cannot run, before anything is touched."""
    for chunk in chunks:
        if chunk.tree is not None:
            raise Unsupported("a chunk with a token tree: trees are not in this release; append chains")
        if chunk.adapter is not None:
            raise Unsupported(f"a chunk with adapter {chunk.adapter}: adapters are not in this release")
        if not len(chunk.tokens):
            raise InvalidArgument(f"the chunk of sequence {chunk.seq} has no tokens; give at least one")


def as_ids(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Token ids as an int64 array."""
    return np.asarray(tokens, dtype=np.int64)


def logits_rows(chunks: Sequence[Chunk]) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]] | None, tuple[int, ...]]:
    """Rows of the batch that go through the head (None: all of them), and where each chunk's begin."""
    starts = [0]
    rows: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    end = 0
    for chunk in chunks:
        count = len(chunk.tokens)
        wanted = {"last": 1, "all": count, "none": 0}[chunk.logits]
        rows.append(np.arange(end + count - wanted, end + count))
        starts.append(starts[-1] + wanted)
        end += count
    return (None if starts[-1] == end else np.concatenate(rows)), tuple(starts)
