"""What a model writes below the heads of functions that it was not trained on, and what it thinks
of the real docstrings.

Letters: B prompts of a batch; T tokens; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import torch
from recipes.tiny_python.vocabulary import PAD_ID
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from .data import IGNORED, Function, example

QUOTES = '"""'
_BATCH = 32
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a model does after the heads of held-out functions, at temperature 0."""

    opened: float
    """Share of prompts ``def f(x):`` + newline + indentation that are continued by three double
    quotes.
    """
    opened_after_newline: float
    """The same for prompts that end with the newline, so that the indentation is for the model to
    write.
    """
    closed: float
    """Share of the prompts of the first kind whose docstring is opened and closed within 40 tokens.
    """
    loss: float
    """Nats per token of the docstrings that the authors wrote, quotes included."""


def measure(model: Any, tokenizer: Tokenizer, functions: Sequence[Function], *, progress: IO[str]) -> Measurement:
    """Measures ``model`` (of transformers or PEFT, in float32) on ``functions``, of which there is
    at least one.
    """
    whole = [f"{function.head}\n{function.indent}" for function in functions]
    texts = continuations(model, tokenizer, whole, tokens=40, progress=progress)
    lines = continuations(model, tokenizer, [f"{f.head}\n" for f in functions], tokens=3, progress=progress)
    return Measurement(
        opened=_share(opens(text) for text in texts),
        opened_after_newline=_share(opens(text) for text in lines),
        closed=_share(opens(text) and text.count(QUOTES) > 1 for text in texts),
        loss=docstring_loss(model, tokenizer, functions),
    )


def opens(text: str) -> bool:
    """Whether a text that follows the head of a function begins with three double quotes."""
    return text.lstrip(" ").startswith(QUOTES)


@torch.inference_mode()
def continuations(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[str], *, tokens: int, progress: IO[str]
) -> list[str]:
    """What ``model`` writes after each prompt at temperature 0, at most ``tokens`` tokens of it."""
    texts: list[str] = []
    with tqdm(total=len(prompts), desc="evaluation", unit="prompt", file=progress) as bar:
        for part in _batches(prompts):
            rows = [tokenizer.encode(prompt).ids for prompt in part]
            longest = max(map(len, rows))
            ids_BT = torch.tensor([[PAD_ID] * (longest - len(row)) + row for row in rows], device=model.device)
            mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
            out_BT = model.generate(
                input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=tokens, do_sample=False, pad_token_id=PAD_ID
            )
            texts += [tokenizer.decode(row, skip_special_tokens=True) for row in out_BT[:, longest:].tolist()]
            bar.update(len(part))
    return texts


@torch.inference_mode()
def docstring_loss(model: Any, tokenizer: Tokenizer, functions: Sequence[Function]) -> float:
    """Mean negative log-probability, in nats per token, of the functions' own docstrings after
    their heads.
    """
    total, count = 0.0, 0
    for part in _batches(functions):
        examples = [example(function, tokenizer, split=False) for function in part]
        ids, labels = [], []
        for one in examples:
            end = one.given + one.docstring
            ids.append(torch.tensor(one.ids[:end]))
            labels.append(torch.tensor([IGNORED] * one.given + list(one.ids[one.given : end])))
        ids_BT = _padded(ids, PAD_ID).to(model.device)  # Behind the text, where no token sees it.
        labels_BT = _padded(labels, IGNORED).to(model.device)
        logits_BTV = model(input_ids=ids_BT).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        ).item()
        count += int((labels_BT[:, 1:] != IGNORED).sum())
    return total / count


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def _batches(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def _share(answers: Iterator[bool]) -> float:
    given = list(answers)
    return sum(given) / len(given)
