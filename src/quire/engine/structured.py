"""Grammars: which tokens keep a text in the form that was asked for. Over llguidance, which is imported at first use.

llguidance walks a trie of the bytes of all tokens. The bytes are those of ``TokenBytes``, so a grammar sees exactly the text that
a user gets. Two things are our own:

- *The end.* The vocabulary that llguidance knows has one token more than the model: its bit in a mask says that the text may
  end here. What ends a text then, EOS and stop tokens, can be drawn there and nowhere else; where there is no such token, or
  it may not be drawn, a text to which nothing can be added ends by itself.
- *No forcing.* Where a grammar leaves one text only, llguidance would allow the one token that its tokenizer would take. Here
  every token that keeps the text in the language is allowed, and the model decides.

A matcher follows the tokens of one generation as they are emitted, so nothing that happens to a request's KV state concerns it.

Letters: M matchers; B words of a mask (``quire.ops.filters``).
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.engine.tokenizer import Tokenizer
from quire.errors import InvalidArgument, QuireError, Unsupported
from quire.ops.filters import Words, num_words
from quire.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

logger = logging.getLogger("quire.engine")

MAX_COMPILED = 64
"""Compiled grammars that an engine keeps, the least recently used going first."""

JSON_SPACE = r"[ \t]{1,8}|(\r?\n){1,2}[ \t]{0,40}"
"""White space between the tokens of JSON. Without a bound a model that is fond of it would write nothing else."""

_NO_TOKEN = "no token of the vocabulary continues the text"
_WHOLE = '%llguidance {"no_forcing": true}\nstart: @text\n'
_PARSING, _REASON = "regex parse error:", "error: "
_SPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}
_TEMPERATURE = re.compile(r"^\s*\??\w+\s*\[[^\]]*\btemperature\s*=", re.MULTILINE)


class GrammarMatcher:
    """Where the text of one generation is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.over = False
        """Whether, at the last mask, the text could end and nothing could be added to it."""

    def accept(self, token: int) -> None:
        """``token`` joined the text; one that ended it did not. ``QuireError`` if the grammar does not go on, which happens
        only beyond llguidance's limits on a parser's size."""
        if not self._matcher.consume_token(token):
            raise self.problem() or QuireError(f"structured_outputs: token {token} does not continue the text")

    def accepts(self, token: int) -> bool:
        """Whether ``token`` continues the text; a hundredth of a mask's time."""
        return self._matcher.validate_tokens([token]) == 1

    @property
    def complete(self) -> bool:
        """Whether the text is whole and nothing can be added to it."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    def problem(self) -> QuireError | None:
        """Why the grammar does not go on; None if it does."""
        reason = self.reason()
        return None if reason is None else QuireError(f"structured_outputs: {reason}")

    def reason(self) -> str | None:
        """The words of ``problem``."""
        if not self._matcher.is_error():
            return None
        reason = self._matcher.get_error().split("\n<non-verbose/>")[0]
        return _NO_TOKEN if reason == "NoExtensionBias" else reason


class RowGrammars:
    """``quire.ops.filters.Allowed`` of the matchers of some rows."""

    def __init__(
        self, grammars: Grammars, matchers: Mapping[int, GrammarMatcher], ends: Mapping[int, Sequence[int]]
    ) -> None:
        """``ends``: by row the tokens that end the text."""
        self._grammars = grammars
        self._matchers = matchers
        self._ends = ends

    @property
    def rows(self) -> Collection[int]:
        return self._matchers.keys()

    def accepts(self, row: int, token: int) -> bool:
        # Only the mask knows whether a text may end.
        matcher = self._matchers[row]
        matcher.over = False
        return token not in self._ends[row] and matcher.accepts(token)

    def masks(self, rows: Sequence[int]) -> Mapping[int, Words]:
        return self._grammars.allowed({row: self._matchers[row] for row in rows}, self._ends)


class Grammars:
    """What an engine knows of grammars: its vocabulary as llguidance sees it, and what has been compiled. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, threads: bool) -> None:
        """``vocab_size``: of the model; ids that the tokenizer has not are never allowed. ``threads``: whether the cores have
        nothing else to do, as beside a GPU; threads of a model that wait for their next turn keep others waiting."""
        self._threads = threads
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._inside: tuple[int, ...] | None = None
        self._end_masks: dict[tuple[int, ...], tuple[Words, Words]] = {}

    # -- compiling -------------------------------------------------------------------------------------------

    def check(self, wanted: StructuredOutputs) -> None:
        """``InvalidArgument`` with llguidance's words if there is no such grammar, or no text of this vocabulary in it;
        ``Unsupported`` for a tokenizer whose tokens have no bytes of their own."""
        with self._lock:
            self._get(wanted)

    def matcher(self, wanted: StructuredOutputs) -> GrammarMatcher:
        """A new matcher at the beginning of the text. Raises as ``check``."""
        with self._lock:
            return GrammarMatcher(self._get(wanted).deep_copy())

    def _get(self, wanted: StructuredOutputs) -> LLMatcher:
        found = self._compiled.get(wanted)
        if found is None:
            found = self._compiled[wanted] = self._compile(wanted)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(wanted)
        return found

    def _compile(self, wanted: StructuredOutputs) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        name, body = _body(wanted)
        main = {"name": "main", "lark_grammar": _WHOLE}
        text = json.dumps({"grammars": [main, {"name": "text", **body}]}, ensure_ascii=False)
        matcher = LLMatcher(self._llguidance(), text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        given = f"structured_outputs.{name} {getattr(wanted, name)!r:.100}"
        if matcher.is_error():
            # The grammar in which we put a pattern is nothing that the user knows.
            what = given if name == "regex" else f"structured_outputs.{name}"
            reason = _sentence(matcher.get_error(), located=name != "regex")
            raise InvalidArgument(f"{what} cannot be compiled: {reason}")
        for warning in matcher.get_grammar_warnings():
            logger.warning("structured_outputs.%s: %s", name, warning)
        first = GrammarMatcher(matcher.deep_copy())
        if not self.allowed({0: first}, {0: ()})[0].any() and not first.over:
            why = first.reason()
            raise InvalidArgument(
                f"{given} allows no text in the tokens of this model"
                + ("" if why is None or why == _NO_TOKEN else f": {why}")
            )
        return matcher

    def _llguidance(self) -> LLTokenizer:
        if self._vocabulary is None:
            from llguidance import LLTokenizer, TokenizerWrapper

            table = self._tokenizer.token_bytes
            if not table.concatenates:
                raise Unsupported(
                    "structured_outputs need a tokenizer whose tokens are bytes wherever they stand (byte-level BPE, "
                    "SentencePiece); what a token of this model's tokenizer adds depends on the one before"
                )
            self._vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)))
        return self._vocabulary

    # -- running ---------------------------------------------------------------------------------------------

    def allowed(self, matchers: Mapping[int, GrammarMatcher], ends: Mapping[int, Sequence[int]]) -> dict[int, Words]:
        """What may be drawn next, by the keys of ``matchers``. ``ends``: tokens that end the text."""
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        last = self._vocab_size
        masks_MB = np.zeros((len(matchers), num_words(last + 1)), dtype=np.uint32)
        inner = [matcher._matcher for matcher in matchers.values()]
        if len(inner) > 1 and self._threads:
            if self._executor is None:
                self._executor = LLExecutor()
            rows = [(matcher, row) for row, matcher in enumerate(inner)]
            fill_next_token_bitmask_par(self._executor, rows, masks_MB.view(np.int32))
        else:
            for row, llmatcher in enumerate(inner):
                fill_next_token_bitmask(llmatcher, masks_MB.view(np.int32), row)
        found: dict[int, Words] = {}
        for words_B, (key, matcher) in zip(masks_MB, matchers.items(), strict=True):
            # The bit is also set where the parser cannot go on at all.
            may_end = (
                bool(words_B[last // 32] >> np.uint32(last % 32) & np.uint32(1)) and matcher._matcher.is_accepting()
            )
            keep_B, ends_B = self._end_bits(tuple(ends[key]))
            words_B &= keep_B
            matcher.over = may_end and not words_B.any()
            if may_end:
                words_B |= ends_B
            found[key] = words_B[: num_words(last)]
        return found

    def _end_bits(self, ends: tuple[int, ...]) -> tuple[Words, Words]:
        """What is left without the tokens that end a text and the bit that says that it may end; and these tokens alone."""
        if ends not in self._end_masks:
            ends_B = np.zeros(num_words(self._vocab_size + 1), dtype=np.uint32)
            for token in ends:
                ends_B[token // 32] |= np.uint32(1 << token % 32)
            keep_B = ~ends_B
            keep_B[self._vocab_size // 32] &= ~np.uint32(1 << self._vocab_size % 32)
            self._end_masks = {ends: (keep_B, ends_B)} | (
                self._end_masks if len(self._end_masks) < MAX_COMPILED else {}
            )
        return self._end_masks[ends]

    def context(self, prompt: Sequence[int]) -> list[int]:
        """A context for the detokenizer after which no text begins: decoders drop a space there that a grammar counts."""
        if self._inside is None:
            table = self._tokenizer.token_bytes
            rule = table.rule
            ids = range(table.size) if rule is not None and (rule.max_strips or rule.drops_first_marker) else ()
            plain = (token for token in ids if token not in table.special_ids and table.piece(token).isalnum())
            self._inside = tuple([token] if (token := next(plain, None)) is not None else [])
        return [*self._inside, *prompt]


class _Vocabulary:
    """The tokens of a model as llguidance wants to have them, and one more that stands for the end."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        table = tokenizer.token_bytes
        self.tokens = [table.piece(token) for token in range(vocab_size)] + [b"<end>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = sorted({token for token in table.special_ids if token < vocab_size} | {vocab_size})

    def __call__(self, text: bytes | str) -> list[int]:
        """llguidance tokenizes to force tokens, and our grammars force none."""
        raise QuireError("a grammar asked for the tokens of a text")


def _body(wanted: StructuredOutputs) -> tuple[str, dict[str, object]]:
    """The field that was given, and its grammar for llguidance."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if wanted.json is not None:
        return "json", {"json_schema": _bounded(json.loads(str(wanted.json)))}
    if wanted.json_object:
        return "json_object", {"json_schema": _bounded({"type": "object"})}
    if wanted.regex is not None:
        quoted = json.loads(LLMatcher.grammar_from_regex(wanted.regex))
        return "regex", {"lark_grammar": quoted["grammars"][0]["lark_grammar"]}
    if wanted.choice is not None:
        literals = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return "choice", {"lark_grammar": f"start: {literals}"}
    text = wanted.grammar or ""
    if _TEMPERATURE.search(text):
        raise InvalidArgument(
            "structured_outputs.grammar: temperature= of a rule is not supported; SamplingParams(temperature=...) holds for "
            "the whole text"
        )
    try:
        return "grammar", {"lark_grammar": any_to_lark(text)}
    except Exception as error:  # the converter raises bare Exception
        raise InvalidArgument(f"structured_outputs.grammar cannot be compiled: {error}") from error


def _sentence(error: str, *, located: bool) -> str:
    """What llguidance says of a grammar, without the lines that show it; ``located``: with the place that it names."""
    head, *lines = error.strip().split("\n")
    reason = next((line.removeprefix(_REASON) for line in lines if line.startswith(_REASON)), None)
    if not located:
        return reason or head.rpartition("(in regex): ")[2]
    if reason is None:
        return head
    # A pattern within a schema comes without a place.
    return f"{head.removesuffix(_PARSING) or f'pattern {lines[0].strip()!r}: '}{reason}"


def _bounded(schema: object) -> object:
    """A schema with our white space, unless it says itself what it wants."""
    if schema is True:
        schema = {}
    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict) or not isinstance(schema, dict) or options.keys() & _SPACE_OPTIONS:
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE, **options}}
