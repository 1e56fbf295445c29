"""Stage ``pack``, and the training sequences made of what it packed.

Documents are tokenized, shuffled once, separated by ``<|end|>`` and stored as one row of 16-bit
tokens. Which sequence comes when is a function of the seed and the sequence's index alone, so
training can stop and go on anywhere, and workers can prepare sequences in any order.

Letters: L tokens of a sequence, N tokens of the corpus.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from quire.base.errors import FailedPrecondition

from . import synthetic
from .corpus import read_documents
from .files import replaced_file, require, require_new
from .settings import Recipe, Workplace
from .vocabulary import END_ID, load_tokenizer

Tokens = npt.NDArray[np.uint16]

_BATCH = 64
"""Documents tokenized at a time."""


def pack(recipe: Recipe, work: Workplace, *, force: bool = False) -> tuple[int, int]:
    """Writes the token files; returns the numbers of training and held-out tokens.

    Raises: AlreadyExists: they are there and ``force`` is false. FailedPrecondition: no corpus or
    tokenizer yet, or less text than the recipe's sequences need.
    """
    require_new(work.train_tokens, force=force)
    for path in (work.train_text, work.heldout_text):
        require(path, "collect")
    tokenizer = load_tokenizer(work)
    train = _tokenize(tokenizer, work.train_text, shuffle_seed=recipe.seed)
    heldout = _tokenize(tokenizer, work.heldout_text, shuffle_seed=recipe.seed)
    for name, tokens, least in (
        ("training", train, 2 * recipe.sequence_length),
        ("held-out", heldout, recipe.sequence_length + 1),
    ):
        if len(tokens) < least:
            raise FailedPrecondition(
                f"the {name} text has {len(tokens)} tokens and sequences of {recipe.sequence_length} need at least "
                f"{least}; collect more sources or shorten the sequences"
            )
    for path, tokens in ((work.train_tokens, train), (work.heldout_tokens, heldout)):
        with replaced_file(path) as part, open(part, "wb") as file:
            np.save(file, tokens)
    return len(train), len(heldout)


def load_tokens(path: Path) -> Tokens:
    """A token file, mapped into memory.

    Raises:
        FailedPrecondition: it is not there.
    """
    tokens: Tokens = np.load(require(path, "pack"), mmap_mode="r")
    return tokens


def _tokenize(tokenizer: Tokenizer, path: Path, *, shuffle_seed: int) -> Tokens:
    rows: list[Tokens] = []
    texts = [document.text for document in read_documents(path)]
    for first in range(0, len(texts), _BATCH):
        for encoding in tokenizer.encode_batch(texts[first : first + _BATCH]):
            rows.append(np.array([*encoding.ids, END_ID], dtype=np.uint16))
    random.Random(shuffle_seed).shuffle(rows)
    return np.concatenate(rows)


class TrainingSequences(Dataset[Tensor]):
    """Item ``i`` is the ``i``-th sequence of training, int64 ``[L + 1]``: inputs, and targets one
    further.

    Made-up modules are spread evenly, so that every batch has its share. The other sequences go
    through windows of the corpus in a new order in each epoch, cut at a new place, so that no two
    epochs see the same windows.
    """

    def __init__(self, recipe: Recipe, tokens: Tokens, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self._tokens = tokens
        self._tokenizer = tokenizer
        # The last cut of an epoch moves windows by up to L - 1 tokens, and the targets need one
        # more.
        self._windows = (len(tokens) - recipe.sequence_length) // recipe.sequence_length
        self._epoch = -1
        self._starts: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.recipe.steps * self.recipe.batch

    def __getitem__(self, index: int) -> Tensor:
        share = self.recipe.synthetic_fraction
        synthetic_before = int(index * share)
        if int((index + 1) * share) > synthetic_before:
            return self._made_up(index)
        return self._window(index - synthetic_before)

    def _made_up(self, index: int) -> Tensor:
        length = self.recipe.sequence_length + 1
        rng = synthetic.generator(self.recipe.seed, "train", index)
        largest = synthetic.largest_module(length)
        ids: list[int] = []
        while len(ids) < length:
            ids += self._tokenizer.encode(synthetic.make_source(rng, largest).text).ids
            ids.append(END_ID)
        return torch.tensor(ids[:length])

    def _window(self, index: int) -> Tensor:
        length = self.recipe.sequence_length
        epoch, place = divmod(index, self._windows)
        if epoch != self._epoch:
            rng = np.random.default_rng([self.recipe.seed, epoch])
            cut = int(rng.integers(length))
            self._starts = cut + length * rng.permutation(self._windows)
            self._epoch = epoch
        start = int(self._starts[place])
        return torch.from_numpy(self._tokens[start : start + length + 1].astype(np.int64))
