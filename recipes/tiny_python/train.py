"""Stage ``train``: the loop, its checkpoints, and its progress.

The first Ctrl-C ends the run after the current step and saves it, the second one ends it at once. A
resumed run gives the losses of an uninterrupted one, because order and made-up text depend on the
step alone.

Letters: B sequences of a forward pass, L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument

from .files import replaced_file, require
from .network import Optimizers, build_model, learning_rate_scale, select_device
from .packing import TrainingSequences, load_tokens
from .settings import Recipe, Workplace
from .vocabulary import fingerprint, load_tokenizer

CHECKPOINT_FORMAT = 1

_MAY_CHANGE = frozenset({"sources", "heldout_every", "max_file_bytes", "micro_batch", "max_positions"})
"""Fields that a resumed run may change: they act in other stages, or change nothing but speed and
memory.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to run; none of these changes what is computed, apart from rounding.

    Raises:
        InvalidArgument: a count out of range.
    """

    device: str = "auto"
    resume: bool = False
    force: bool = False
    """Throw an existing checkpoint away."""
    stop_after: int = 0
    """Stop and save when so many steps are done in all; 0 is the recipe's last one."""
    checkpoint_every: int = 200
    report_every: int = 10
    loader_workers: int = 0
    """Processes that prepare sequences; a GPU needs a few."""
    compile: bool = False
    """torch.compile the model."""

    def __post_init__(self) -> None:
        for name, least in (("stop_after", 0), ("checkpoint_every", 1), ("report_every", 1), ("loader_workers", 0)):
            if getattr(self, name) < least:
                raise InvalidArgument(f"{name} must be {least} or greater, got {getattr(self, name)}")


@dataclass(kw_only=True)
class Run:
    """What a checkpoint holds. ``losses`` has one entry (nats per token) for each step done."""

    recipe: Recipe
    tokenizer: str
    model: nn.Module
    optimizers: Optimizers
    losses: list[float]
    seconds: float
    """Time of training, over all resumptions."""
    device: str

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self.losses)

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.steps


def train(recipe: Recipe, work: Workplace, options: TrainingOptions, *, progress: IO[str] = sys.stderr) -> Run:
    """Trains to the end, to ``stop_after``, or to Ctrl-C, and saves.

    Raises: FailedPrecondition: an earlier stage is missing or does not fit, or there is nothing to
    resume. AlreadyExists: there is a checkpoint, and neither ``resume`` nor ``force`` is given.
    """
    if options.resume and options.force:
        raise InvalidArgument("--resume keeps the checkpoint and --force throws it away; give one of them")
    if work.checkpoint.exists() and not (options.resume or options.force):
        raise AlreadyExists(f"{work.checkpoint} exists already; pass --resume to go on or --force to start anew")
    tokens = load_tokens(work.train_tokens)
    tokenizer = load_tokenizer(work)
    if tokenizer.get_vocab_size() != recipe.vocab_size:
        raise FailedPrecondition(
            f"{work.tokenizer} has {tokenizer.get_vocab_size()} tokens and vocab_size is {recipe.vocab_size}; "
            "train the tokenizer and pack again, or set vocab_size to match"
        )
    if len(tokens) < 2 * recipe.sequence_length:
        raise FailedPrecondition(
            f"{work.train_tokens} has {len(tokens)} tokens and sequences of {recipe.sequence_length} need at least "
            f"{2 * recipe.sequence_length}; collect more sources or shorten the sequences"
        )
    device = select_device(options.device)
    run = _resumed(recipe, work, device) if options.resume else _fresh(recipe, work, device)
    last = min(recipe.steps, options.stop_after or recipe.steps)
    loader = _loader(TrainingSequences(recipe, tokens, tokenizer), run.step, last, options)
    forward: Callable[..., Any] = torch.compile(run.model) if options.compile else run.model
    _cut_log(work, run.step)
    with _interruptible() as interrupted, open(work.log, "a", encoding="utf-8") as log:
        report = _Report(run, progress, log)
        # micro-batches of one step follow each other in the loader
        for batch in _grouped(loader, recipe.batch // recipe.forward_batch):
            scale = learning_rate_scale(recipe, run.step)
            loss, norm = _step(forward, run, batch, scale, device)
            run.losses.append(loss)
            if run.step % options.report_every == 0 or run.step == last:
                report(loss, norm, scale)
            if interrupted() or (run.step % options.checkpoint_every == 0 and run.step < last):
                report.save(work)
            if interrupted():
                break
        else:
            report.save(work)
    return run


def load_run(work: Workplace, device: torch.device) -> Run:
    """The run in ``work``'s checkpoint, on ``device``.

    Raises:
        FailedPrecondition: no checkpoint, one of another format, or one of another tokenizer.
    """
    path = require(work.checkpoint, "train")
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if state.get("format") != CHECKPOINT_FORMAT:
        raise FailedPrecondition(f"{path} has format {state.get('format')}, this recipe reads {CHECKPOINT_FORMAT}")
    if state["tokenizer"] != fingerprint(require(work.tokenizer, "tokenizer")):
        raise FailedPrecondition(f"{path} was trained with another tokenizer than {work.tokenizer}; train again")
    recipe = Recipe.from_dict(state["recipe"])
    model: nn.Module = build_model(recipe)
    model.to(device)
    model.load_state_dict(state["model"])
    optimizers = Optimizers(model, recipe)
    optimizers.load_state_dict(state["optimizers"])
    return Run(
        recipe=recipe,
        tokenizer=state["tokenizer"],
        model=model,
        optimizers=optimizers,
        losses=state["losses"],
        seconds=state["seconds"],
        device=state["device"],
    )


def save_run(run: Run, work: Workplace) -> None:
    """Writes the checkpoint in one piece."""
    state = {
        "format": CHECKPOINT_FORMAT,
        "recipe": run.recipe.as_dict(),
        "tokenizer": run.tokenizer,
        "model": run.model.state_dict(),
        "optimizers": run.optimizers.state_dict(),
        "losses": run.losses,
        "seconds": run.seconds,
        "device": run.device,
    }
    with replaced_file(work.checkpoint) as part:
        torch.save(state, part)


def _fresh(recipe: Recipe, work: Workplace, device: torch.device) -> Run:
    model: nn.Module = build_model(recipe)
    model.to(device)
    return Run(
        recipe=recipe,
        tokenizer=fingerprint(work.tokenizer),
        model=model,
        optimizers=Optimizers(model, recipe),
        losses=[],
        seconds=0.0,
        device=_device_name(device),
    )


def _resumed(recipe: Recipe, work: Workplace, device: torch.device) -> Run:
    run = load_run(work, device)
    if different := recipe.differences(run.recipe, ignore=_MAY_CHANGE):
        raise FailedPrecondition(
            f"{work.checkpoint} was trained with other settings ({'; '.join(different)}); "
            "resume with the same ones or start anew with --force"
        )
    run.recipe = recipe
    run.device = _device_name(device)
    return run


def _step(
    forward: Callable[..., Any], run: Run, batch: list[Tensor], scale: float, device: torch.device
) -> tuple[float, float]:
    """One optimizer step over micro-batches ``[B, L + 1]``; returns the mean loss and the norm of
    the gradient.
    """
    loss_sum = torch.zeros((), device=device)
    for tokens in batch:
        tokens_BL = tokens.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits_BLV = forward(input_ids=tokens_BL[:, :-1], use_cache=False).logits
        targets = tokens_BL[:, 1:].reshape(-1)
        loss = functional.cross_entropy(logits_BLV.float().flatten(0, 1), targets) / len(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach()
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), run.recipe.clip)
    run.optimizers.step(scale)
    return float(loss_sum), float(norm)


def _loader(sequences: TrainingSequences, step: int, last: int, options: TrainingOptions) -> DataLoader[Tensor]:
    """Micro-batches of the steps from ``step`` to before ``last``, in order."""
    recipe = sequences.recipe
    return DataLoader(
        sequences,
        batch_size=recipe.forward_batch,
        sampler=range(step * recipe.batch, last * recipe.batch),
        num_workers=options.loader_workers,
        worker_init_fn=_start_worker,
        pin_memory=torch.cuda.is_available(),
    )


def _start_worker(_: int) -> None:
    # Ctrl-C goes to the whole process group; the loop still needs its workers for the step that it
    # finishes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _grouped(loader: DataLoader[Tensor], size: int) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for item in loader:
        group.append(item)
        if len(group) == size:
            yield group
            group = []


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells whether Ctrl-C was pressed; the second press raises as usual."""
    pressed = False

    def note(_: int, __: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _cut_log(work: Workplace, step: int) -> None:
    """Keeps of the log what came before ``step``: a killed run reports steps that its checkpoint
    does not have.
    """
    lines = work.log.read_text(encoding="utf-8").splitlines(keepends=True) if work.log.exists() else []
    with replaced_file(work.log) as part:
        part.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} with {torch.get_num_threads()} threads"


class _Report:
    """Progress: a line for people (rewritten in place on a terminal), a JSON line for the log, and
    the clock.
    """

    def __init__(self, run: Run, progress: IO[str], log: IO[str]) -> None:
        self._run = run
        self._progress = progress
        self._log = log
        self._first_seconds = run.seconds
        self._started = time.perf_counter()
        self._last = (run.step, self._started)

    def __call__(self, loss: float, norm: float, scale: float) -> None:
        run, now = self._run, time.perf_counter()
        steps, seconds = run.step - self._last[0], now - self._last[1]
        self._last = (run.step, now)
        speed = steps * run.recipe.batch * run.recipe.sequence_length / seconds
        minutes = (run.recipe.steps - run.step) * seconds / steps / 60
        values = {"step": run.step, "loss": loss, "gradient_norm": norm, "scale": scale, "tokens_per_second": speed}
        self._log.write(json.dumps(values) + "\n")
        self._log.flush()
        line = (
            f"step {run.step}/{run.recipe.steps}  loss {loss:.3f}  gradient {norm:.2f}  learning rate x{scale:.2f}  "
            f"{speed:,.0f} tokens/s  {minutes:.1f} min left"
        )
        inplace = self._progress.isatty() and run.step < run.recipe.steps
        self._progress.write(f"\r{line}  " if inplace else f"{line}\n")
        self._progress.flush()

    def save(self, work: Workplace) -> None:
        """Saves the run with the time that it has taken."""
        self._run.seconds = self._first_seconds + time.perf_counter() - self._started
        save_run(self._run, work)
