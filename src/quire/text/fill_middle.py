"""Fill-in-the-middle: prompts for the text between a prefix and a suffix, by the tokens with which
code models were trained for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer

SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
"""Tokens before the prefix, before the suffix, and before the text between: of Qwen2.5-Coder and
CodeGemma, StarCoder, SantaCoder, DeepSeek-Coder, CodeLlama, GLM."""
FILES = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
"""Tokens before the name of a repository and before each file, of models that know other files."""
ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<|file_separator|>")
"""Further tokens that end the text between."""
LINE_END = "\n"
REPOSITORY, FILE = "myproject", "filename"
"""Names of the repository and of the file with the gap, which requests do not tell."""


@dataclass(frozen=True, slots=True)
class FillTokens:
    """The tokens of one tokenizer."""

    prefix: int
    suffix: int
    middle: int
    files: tuple[int, int] | None
    """Ids of the tokens in ``FILES``."""
    ends: tuple[int, ...]
    """Ids that end the text between, besides the model's own."""

    @classmethod
    def of(cls, tokenizer: Tokenizer | None) -> Self | None:
        if tokenizer is None:
            return None

        def ids_of(names: Sequence[str]) -> tuple[int, ...]:
            return tuple(found for name in names if (found := tokenizer.token_id(name)) is not None)

        for names in SPELLINGS:
            match ids_of(names):
                case (before, after, middle):
                    pairs = [(ids[0], ids[1]) for pair in FILES if len(ids := ids_of(pair)) == len(pair)]
                    files = pairs[0] if pairs else None
                    return cls(before, after, middle, files, (*ids_of(ENDS), *(files or ())))
        return None

    def prompt(
        self, tokenizer: Tokenizer, before: str, after: str, others: Sequence[tuple[str, str]] = ()
    ) -> list[int]:
        """Return the prompt for the text between ``before`` and ``after``. ``others`` are names and
        texts of further files. Special tokens that the texts spell stay text."""
        texts = SpelledTokens(tokenizer, None, before, after, list(map(list, others)), parse_special=False)

        def ids_of(text: str) -> list[int]:
            return texts.encode_rendered(texts.value(text), inside=True) if text else []

        ids = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        if others and self.files is not None:
            repository, file = self.files
            ids += [repository, *ids_of(f"{REPOSITORY}\n")]
            for name, text in others:
                ids += [file, *ids_of(f"{name}\n{text.removesuffix(LINE_END)}\n")]
            ids += [file, *ids_of(f"{FILE}\n")]
        else:
            ids += [one for _, text in others for one in ids_of(f"{text.removesuffix(LINE_END)}\n")]
        return [*ids, self.prefix, *ids_of(before), self.suffix, *ids_of(after), self.middle]
