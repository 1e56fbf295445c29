"""``GraphRunner``: decode steps as captured work, launched at once (CUDA graphs).

The host needs longer to launch the kernels of a small decode than the device to run them. So the
first step of a size launches its kernels one by one, the second records them, and later steps
launch the recording as a whole. A size is a number of sequences, rounded up, and the number of new
tokens of each: 1 for decodes, a few for drafts to verify. Decodes are recorded when a model is
loaded. All other inputs that differ between steps are in memory at fixed addresses
(``quire.kv.static_pass``), shared by all sizes. Other steps run uncaptured.

Letters: T rows of a forward; V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import ResourceExhausted, Unsupported
from quire.base.types import Add, Chunk, Remove, SeqId, Step
from quire.base.uploads import SharedMemory
from quire.contracts.kv_state import ModelState
from quire.kv.state import State
from quire.kv.static_pass import StaticForward
from quire.runner.local import LocalRunner, StepOutput, check_chunks, check_drawn

logger = logging.getLogger("quire")

MOST_TOKENS = 16
"""Most new tokens of a sequence in captured steps."""
MOST_SIZES = 64
"""Most sizes that are kept; the least recently used one is dropped."""
LARGEST = 512
"""Most new tokens of a captured step; larger steps keep the device busy anyway."""


class Size(NamedTuple):
    """The size of captured steps."""

    entries: int
    """Number of sequences, padding included."""
    tokens: int
    """Number of new tokens of each sequence."""


def rounded(entries: int) -> int:
    """Round a number of sequences up by at most a quarter, so that few sizes occur."""
    step = 1 << max(0, (entries - 1).bit_length() - 3)
    return -(-entries // step) * step


def usual_sizes(most: int) -> list[int]:
    """Return the rounded numbers of sequences of decodes up to ``most``, largest first."""
    return sorted({rounded(entries) for entries in range(1, min(most, LARGEST) + 1)}, reverse=True)


class Capture(Protocol):
    """Records launches of device work."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record the launches of ``run``. Return a function that launches them again on the same
        memory, and the tensor that ``run`` returns, which each launch overwrites. ``RuntimeError``
        if ``run`` waits for the device."""


class CudaCapture:
    """Records CUDA graphs. They share memory, so one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``Capture``."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may copy to and from the device during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


class CapturedStep:
    """Captured steps of one size."""

    def __init__(self, static: StaticForward) -> None:
        self.static = static
        self._shared = static.memory.shared
        self.is_warm = False
        """Whether a step has run, so that all kernels are compiled and all memory is allocated."""
        self._launch: Callable[[], None] | None = None
        self._logits_TV: Tensor | None = None

    def run(self, work: Callable[[], Tensor], capture: Capture, drawn: Tensor | None = None) -> Tensor:
        """Run the open forward; return its logits, which the next run may overwrite. ``drawn``: as
        in ``Inputs.drawn``."""
        self.static.memory.send()
        if drawn is not None:
            self.static.tokens.tensor[: len(drawn)].copy_(drawn)
        if not self.is_warm:
            self.static.begin_again()
            logits_TV = work()
            # All captured sizes share one buffer for logits; one for each size would need some
            # gigabytes for a large vocabulary.
            held = self._shared.take("logits", logits_TV.numel(), logits_TV.dtype)
            self._logits_TV = held.view(logits_TV.shape)
            self.is_warm = True
            return logits_TV
        assert self._logits_TV is not None
        place_TV = self._logits_TV
        if self._launch is None:
            self.static.begin_again()
            self._launch, _ = capture(lambda: place_TV.copy_(work()))
        self._launch()
        return place_TV


class GraphRunner:
    """A ``Runner`` that captures the steps it can; an inner runner runs the others."""

    def __init__(
        self, inner: LocalRunner, capture: Capture, *, longest: int, largest: int = LARGEST, sizes: int = MOST_SIZES
    ) -> None:
        """Wrap a runner. ``longest``: most tokens of a sequence; ``largest``, ``sizes``: as
        ``LARGEST`` and ``MOST_SIZES``. ``Unsupported`` if no step can be captured."""
        state = inner.state
        if not isinstance(state, State):
            raise Unsupported(f"captured steps need a state of this package, got {type(state).__name__}")
        if reason := state.static_refusal(1):
            raise Unsupported(f"captured steps: {reason}")
        self.model, self.room, self.adapters = inner.model, inner.room, inner.adapters
        self.loads, self.row_sources, self.logits = inner.loads, inner.row_sources, inner.logits
        self.files = inner.files
        self.state: ModelState = state
        self._inner, self._state, self._capture = inner, state, capture
        self._longest, self._largest, self._most = longest, largest, sizes
        self._sizes: dict[Size, CapturedStep | None] = {}
        """By size, the most recently used last; None: the size cannot be captured."""
        self._revision = 0
        self.shared = SharedMemory(state.device)
        """Memory that all sizes share."""

    def new_seq(self) -> SeqId:
        """See ``Runner``."""
        return self._inner.new_seq()

    @property
    def revision(self) -> int:
        """See ``Runner``."""
        return self._inner.revision + self._revision

    @property
    def fault(self) -> str:
        """See ``Runner``."""
        return self._inner.fault

    def execute(self, step: Step) -> StepOutput:
        """See ``Runner``. A failure undoes the forward: the state is as after the edits."""
        captured = self._step_of(step)
        if captured is None:
            return self._inner.execute(step)
        if step.inputs.drawn is not None:
            check_drawn(step, step.inputs.drawn)
        for edit in step.edits:
            self._inner.apply(edit)
        found = self._run(captured, step)
        return self._inner.execute(replace(step, edits=())) if found is None else found

    def capture(self, entries: int) -> bool:
        """Record decodes of ``entries`` sequences, rounded up, now; return True on success. It runs
        two tokens of a temporary sequence, and fails if there are no pages for them."""
        captured = self._captured(Size(rounded(entries), 1))
        if captured is None:
            return False
        seq = self.new_seq()
        self._inner.apply(Add(seq))
        try:
            step = Step(chunks=(Chunk(seq, [0]),))
            return all(self._run(captured, step) is not None for _ in range(2))
        except ResourceExhausted:
            return False
        finally:
            self._inner.apply(Remove(seq))

    def _run(self, captured: CapturedStep, step: Step) -> StepOutput | None:
        """Run the chunks of a step by captured work. None if that is impossible; then they have not
        run."""
        seqs, counts = [chunk.seq for chunk in step.chunks], [len(chunk.tokens) for chunk in step.chunks]
        kept = [chunk.checkpoints for chunk in step.chunks]
        if not self._state.begin_static(captured.static, seqs, counts, checkpoints=kept if any(kept) else ()):
            return None
        try:
            captured.static.tokens.fill(np.concatenate([np.asarray(chunk.tokens) for chunk in step.chunks]))
            with torch.inference_mode():
                found_TV = captured.run(lambda: self._forward(captured.static), self._capture, step.inputs.drawn)
            # Copied outside of inference mode, since callers may write to the result.
            logits_TV = found_TV[: sum(counts)].clone()
            self.state.end_forward()
        except BaseException as error:
            if self.state.forward_is_open:
                self.state.abort_forward()
            if not captured.is_warm or not isinstance(error, RuntimeError):
                raise
            # Nothing has run: recording launches nothing.
            self._refuse(captured, str(error))
            return None
        self._revision += 1
        if not captured.static.is_whole:
            self._refuse(captured, "layers leave states as they are")
        return StepOutput(logits_TV, tuple(np.concatenate(([0], np.cumsum(counts))).tolist()), captured=True)

    def _forward(self, static: StaticForward) -> Tensor:
        assert static.pass_ is not None
        x_TE = self.model.embed(static.tokens.tensor)
        for block in self.model.blocks:
            x_TE = block(x_TE, static.pass_)
        return self.model.head(x_TE)

    def _step_of(self, step: Step) -> CapturedStep | None:
        """Return the captured steps of this step's size; None: it runs uncaptured."""
        if not step.chunks or not step.is_plain:
            return None
        check_chunks(step.chunks)
        count = len(step.chunks[0].tokens)
        if len(step.chunks) * count > self._largest:
            return None
        wanted = ("last", "all") if count == 1 else ("all",)
        if count > MOST_TOKENS or any(
            len(chunk.tokens) != count
            or chunk.tree is not None
            or chunk.adapter is not None
            or chunk.logits not in wanted
            or min(chunk.tokens) < 0
            for chunk in step.chunks
        ):
            return None
        return self._captured(Size(rounded(len(step.chunks)), count))

    def _captured(self, size: Size) -> CapturedStep | None:
        if size not in self._sizes:
            self._sizes[size] = self._made(size)
            if len(self._sizes) > self._most:
                del self._sizes[next(iter(self._sizes))]
        found = self._sizes[size] = self._sizes.pop(size)
        return found

    def _made(self, size: Size) -> CapturedStep | None:
        if self._state.static_refusal(size.tokens):
            return None
        return CapturedStep(self._state.static_forward(*size, self._longest, self.shared))

    def _refuse(self, captured: CapturedStep, reason: str) -> None:
        """Run steps of this size uncaptured from now on."""
        size = Size(captured.static.entries, captured.static.count)
        logger.warning("steps of %d x %d tokens are not captured: %s", *size, reason)
        self._sizes[size] = None
