"""Stage ``tokenizer``: byte-level BPE for Python source.

Digits are single tokens, so that a number is read and recalled digit by digit; a newline and the
indentation that follows it are one token.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.base.errors import FailedPrecondition

from .corpus import read_documents
from .files import replaced_file, require, require_new
from .settings import Recipe, Workplace

END, PAD, USER, ASSISTANT = SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
"""Their ids are 0 to 3. The first ends documents; the last two are reserved and untrained."""

END_ID, PAD_ID = 0, 1

WORDS = r"\n[ ]*|[ ]?[A-Za-z_]+|[0-9]| ?[^\sA-Za-z0-9_]+|\s+(?!\S)|\s+"
"""What BPE never merges across: newline with indentation, word, digit, punctuation, other space."""


def train_tokenizer(recipe: Recipe, work: Workplace, *, force: bool = False) -> Tokenizer:
    """Trains on the training documents and writes ``tokenizer.json``.

    Raises:
        AlreadyExists: it is there and ``force`` is false.
        FailedPrecondition: no corpus yet, or too little text for a vocabulary of that size.
    """
    require_new(work.tokenizer, force=force)
    require(work.train_text, "collect")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in read_documents(work.train_text)), trainer)
    if tokenizer.get_vocab_size() != recipe.vocab_size:
        raise FailedPrecondition(
            f"the collected text gives only {tokenizer.get_vocab_size()} tokens and vocab_size is "
            f"{recipe.vocab_size}; collect more sources or lower vocab_size"
        )
    with replaced_file(work.tokenizer) as part:
        tokenizer.save(str(part))
    return tokenizer


def load_tokenizer(work: Workplace) -> Tokenizer:
    """The tokenizer of a work directory.

    Raises:
        FailedPrecondition: it has not been trained.
    """
    return Tokenizer.from_file(str(require(work.tokenizer, "tokenizer")))


def fingerprint(path: Path) -> str:
    """Hash of a file: names the exact tokenizer that tokens and checkpoints belong to."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
