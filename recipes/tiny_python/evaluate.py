"""Stage ``evaluate``: the loss on held-out files, and the recall of assigned values.

Measured on the bfloat16 weights that ``export`` writes. Recall is teacher-forced: for every digit
after ``==`` in made-up modules that training has not seen, is it the most likely token after the
text before it?

Letters: B sequences, L tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from quire.base.errors import FailedPrecondition, InvalidArgument

from . import synthetic
from .files import write_json
from .network import round_weights, select_device
from .packing import Tokens, load_tokens
from .settings import Recipe, Workplace
from .train import load_run
from .vocabulary import END_ID, PAD_ID, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Shares of right answers, 0 to 1. Chance is 0.1 for a digit and 0.0001 for a value."""

    digits: float
    """Digits that are the most likely token."""
    direct_digits: float
    """The same, of names that were assigned a number."""
    alias_digits: float
    """The same, of names that were assigned another name."""
    values: float
    """Checks whose four digits are all right."""
    direct_checks: int
    """Checks of names that were assigned a number."""
    alias_checks: int
    """Checks of names that were assigned another name; where it is 0, so is the share."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What the exported model's README states."""

    step: int
    heldout_loss: float
    """Nats per token."""
    heldout_tokens: int
    recall: Recall


def evaluate(
    work: Workplace, *, sequences: int = 256, files: int = 200, batch: int = 8, device: str = "auto"
) -> Evaluation:
    """Evaluates the checkpoint on at most ``sequences`` held-out sequences and ``files`` made-up
    files, and writes it.

    Raises: InvalidArgument: a count below 1. FailedPrecondition: no checkpoint or no held-out
    tokens, or the run ended before its first step.
    """
    for name, value in (("sequences", sequences), ("files", files), ("batch", batch)):
        if value < 1:
            raise InvalidArgument(f"{name} must be 1 or greater, got {value}")
    run = load_run(work, select_device(device))
    tokens = load_tokens(work.heldout_tokens)
    if len(tokens) <= run.recipe.sequence_length:
        raise FailedPrecondition(
            f"{work.heldout_tokens} has {len(tokens)} tokens, less than a sequence of {run.recipe.sequence_length} "
            "and its last target; collect more sources"
        )
    model = run.model.eval()
    round_weights(model)
    loss, count = heldout_loss(model, run.recipe, tokens, sequences=sequences, batch=batch)
    recall = recall_of_values(model, run.recipe, load_tokenizer(work), files=files, batch=batch)
    evaluation = Evaluation(step=run.step, heldout_loss=loss, heldout_tokens=count, recall=recall)
    write_json(work.evaluation, asdict(evaluation))
    return evaluation


@torch.inference_mode()
def heldout_loss(model: nn.Module, recipe: Recipe, tokens: Tokens, *, sequences: int, batch: int) -> tuple[float, int]:
    """Mean loss in nats per token over the first windows of the held-out tokens, and the number of
    tokens.
    """
    length = recipe.sequence_length
    windows = min(sequences, (len(tokens) - 1) // length)
    total = 0.0
    for first in range(0, windows, batch):
        rows = range(first, min(first + batch, windows))
        tokens_BL = torch.stack(
            [torch.from_numpy(tokens[i * length : (i + 1) * length + 1].astype("int64")) for i in rows]
        )
        tokens_BL = tokens_BL.to(_device_of(model))
        logits_BLV = model(input_ids=tokens_BL[:, :-1], use_cache=False).logits
        targets = tokens_BL[:, 1:].reshape(-1)
        total += float(functional.cross_entropy(logits_BLV.float().flatten(0, 1), targets, reduction="sum"))
    return total / (windows * length), windows * length


@torch.inference_mode()
def recall_of_values(model: nn.Module, recipe: Recipe, tokenizer: Tokenizer, *, files: int, batch: int) -> Recall:
    """Recall over ``files`` made-up files, each at the start of its own sequence."""
    right: list[Tensor] = []  # of each check: whether its digits were the most likely tokens, bool [4]
    aliases: list[bool] = []
    for questions in _batched(_questions(recipe, tokenizer), files, batch):
        longest = max(len(ids) for ids, _ in questions)
        # Padding comes after the text, where causal attention cannot see it.
        tokens_BL = torch.tensor([[*ids, *[PAD_ID] * (longest - len(ids))] for ids, _ in questions])
        logits_BLV = model(input_ids=tokens_BL.to(_device_of(model)), use_cache=False).logits
        guess_BL = logits_BLV.argmax(-1).cpu()
        for row, (_, answers) in enumerate(questions):
            for places, is_alias in answers:
                right.append(guess_BL[row, places - 1] == tokens_BL[row, places])
                aliases.append(is_alias)
    right_CD, alias_C = torch.stack(right), torch.tensor(aliases)
    return Recall(
        digits=_mean(right_CD),
        direct_digits=_mean(right_CD[~alias_C]),
        alias_digits=_mean(right_CD[alias_C]),
        values=_mean(right_CD.all(-1)),
        direct_checks=int((~alias_C).sum()),
        alias_checks=int(alias_C.sum()),
    )


Question = tuple[list[int], list[tuple[Tensor, bool]]]
"""Tokens of a file; for each of its checks the places of the digits' tokens, and whether the name
is an alias.
"""


def _questions(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Question]:
    """Files that fit into a training sequence, from generators that training does not use."""
    index = 0
    while True:
        rng = synthetic.generator(recipe.seed, "evaluate", index)
        source = synthetic.make_source(rng, synthetic.largest_module(recipe.sequence_length))
        index += 1
        encoding = tokenizer.encode(source.text)
        ids = [END_ID, *encoding.ids]  # as in training, where a file follows the end of another one
        if len(ids) > recipe.sequence_length:
            continue
        place = {start: i + 1 for i, (start, _) in enumerate(encoding.offsets)}
        yield (
            ids,
            [
                (torch.tensor([place[at] for at in range(check.start, check.stop)]), check.hops > 0)
                for check in source.checks
            ],
        )


def _batched(questions: Iterator[Question], files: int, batch: int) -> Iterator[list[Question]]:
    for first in range(0, files, batch):
        yield [next(questions) for _ in range(min(batch, files - first))]


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
