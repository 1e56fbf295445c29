"""Grammars: the tokens that keep a text in the requested form. Over llguidance, imported lazily.

llguidance walks a trie of the bytes of all tokens. The bytes come from ``TokenBytes``, so a grammar
sees exactly the text that a user gets. Two things are our own:

- *The end.* llguidance's vocabulary has one token more than the model: its bit in a mask says that
  the text may end here. Tokens that end a text, EOS and stop tokens, can be drawn there and nowhere
  else. Without such a token, or if it may not be drawn, a text that cannot continue ends by itself.
- *No forcing.* Where a grammar leaves one text only, llguidance would allow the one token that its
  tokenizer would take. Here every token that keeps the text in the language is allowed.

Large grammars (long ones, and those that may cost more than they show) are tried in a child process
before they are compiled here (``trial``). A request waits for no other's grammar, only for
its turn among large ones, and few may wait for that. A matcher follows the emitted tokens of one
generation, independently of KV state.

Letters: M matchers; B words of a mask (``quire.sampling.filters``).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.base.sampling_params import StructuredOutputs
from quire.grammars.formats import NO_TOKEN, compiled, field_of, given, grammar_text
from quire.grammars.matcher import GrammarMatcher
from quire.grammars.trial import GrammarsBusy, GrammarTrial, Seats, must_be_tried
from quire.sampling.filters import Words, num_words
from quire.sampling.generations import UNCOUNTED
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

logger = logging.getLogger("quire.engine")

MAX_COMPILED = 64
"""Compiled grammars that an engine keeps, the least recently used going first."""

MAX_COMPILED_MEMORY = 1 << 30
"""Bytes of all compiled grammars that an engine keeps, as far as they were measured."""

MAX_HELD_MEMORY = 1 << 30
"""Bytes of the large grammars of requests under way, from which on no further ones are compiled."""

MAX_THREADS = 16
"""Threads that make masks."""

DOUBTFUL_SECONDS = 0.1
"""Seconds of the masks of a step, after which those of the next one are timed one by one."""

MAX_REFUSED = 64
"""Refusals of large grammars that an engine keeps, the least recently used going first."""

REFUSED_SECONDS = 600.0
"""Seconds that a refusal for slowness holds. Later the grammar is tried again."""


class RowGrammars:
    """``quire.sampling.filters.Allowed`` of the matchers of some rows."""

    def __init__(
        self, grammars: Grammars, matchers: Mapping[int, GrammarMatcher], ends: Mapping[int, Sequence[int]]
    ) -> None:
        """Keep ``ends``: by row the tokens that end the text."""
        self._grammars = grammars
        self.inners = matchers
        self._ends = ends
        self.made: dict[int, Words] = {}
        """The masks that were made, by row."""

    @property
    def rows(self) -> Collection[int]:
        return self.inners.keys()

    def accepts(self, row: int, token: int) -> bool:
        matcher = self.inners[row]
        matcher.over = False
        # Only the mask knows whether a text may end.
        return token not in self._ends[row] and matcher.accepts(token)

    def masks(self, rows: Sequence[int]) -> Mapping[int, Words]:
        found = self._grammars.allowed({row: self.inners[row] for row in rows}, self._ends)
        self.made |= found
        return found

    def num_allowed(self, row: int) -> int:
        """Return the number of tokens in the row's mask; ``UNCOUNTED`` if none was made."""
        words = self.made.get(row)
        return UNCOUNTED if words is None else int(np.unpackbits(words.view(np.uint8)).sum())


class Grammars:
    """An engine's grammars: its vocabulary as llguidance sees it, and compiled ones.
    Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, *, threads: bool) -> None:
        """Compile for ``vocab_size`` ids; those without a token are never allowed. ``threads``:
        whether the cores are idle, as beside a GPU; a model's threads that wait for their turn hold
        others up."""
        self._threads = min(MAX_THREADS, os.cpu_count() or 1) if threads else 1
        self._executor: LLExecutor | None = None
        self._doubtful = False
        """Whether the masks of a step took so long that one of them may be slow."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._setting_up = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._sizes: dict[StructuredOutputs, int] = {}
        """Bytes of the large ones among them."""
        self._held: dict[int, tuple[LLMatcher, int]] = {}
        """Large grammars and their bytes by the id of their request, while it lives: between the
        check of a request and its beginning, which is in the engine's thread, none may be
        forgotten."""
        self._refused: OrderedDict[StructuredOutputs, tuple[str, float]] = OrderedDict()
        """Why large grammars were refused, and until when that holds."""
        self._seats = Seats()
        self._turn = threading.Lock()
        self._trial: GrammarTrial | None = None
        self._inside: tuple[int, ...] | None = None
        self._end_masks: dict[tuple[int, ...], tuple[Words, Words]] = {}
        _GRAMMARS.add(self)

    def forked(self) -> None:
        """Start afresh in a forked process: threads that held our locks, or compiled, are not
        here."""
        self._lock, self._setting_up, self._turn = threading.Lock(), threading.Lock(), threading.Lock()
        self._seats = Seats()
        self._executor = None

    def check(self, wanted: StructuredOutputs) -> None:
        """Raise ``InvalidArgument`` with llguidance's words for an invalid grammar, one without a
        text in this vocabulary, or if it takes too much time, memory or stack to compile;
        ``Unsupported`` if the tokens have no bytes of their own; ``GrammarsBusy`` if too many large
        ones wait."""
        self._get(wanted)

    def matcher(self, wanted: StructuredOutputs) -> GrammarMatcher:
        """Return a new matcher at the beginning of the text; raise as ``check``."""
        found = self._get(wanted)
        with self._lock:
            return GrammarMatcher(found.deep_copy())

    def close(self) -> None:
        """End the child process, if there is one. Large grammars are not compiled any more."""
        with self._setting_up:
            if self._trial is not None:
                self._trial.close()

    def _get(self, wanted: StructuredOutputs) -> LLMatcher:
        try:
            return self._found(wanted)
        except QuireError as error:
            error.field = f"structured_outputs.{field_of(wanted)}"
            raise

    def _found(self, wanted: StructuredOutputs) -> LLMatcher:
        found = self._known(wanted)
        if found is not None:
            return found
        if not must_be_tried(wanted):
            return self._keep(wanted, large=False)
        # One after the other, so that they take no more than one core from the model.
        with self._seats.one(), self._turn:
            # It may have been compiled since the search.
            return self._known(wanted) or self._keep(wanted, large=True)

    def _known(self, wanted: StructuredOutputs) -> LLMatcher | None:
        """Return a compiled grammar or None. ``InvalidArgument`` if it was refused."""
        with self._lock:
            found, _ = self._held.get(id(wanted), (None, 0))
            if wanted in self._compiled:
                found = self._compiled[wanted]
                self._compiled.move_to_end(wanted)
                if must_be_tried(wanted):
                    self._hold(wanted, found)
            message, until = self._refused.get(wanted, ("", 0.0))
            if found is None and time.monotonic() < until:
                self._refused.move_to_end(wanted)
                raise InvalidArgument(message)
        return found

    def _hold(self, wanted: StructuredOutputs, matcher: LLMatcher) -> None:
        if id(wanted) not in self._held:
            self._held[id(wanted)] = matcher, self._sizes.get(wanted, 0)
            weakref.finalize(wanted, self._held.pop, id(wanted), None).atexit = False

    def _keep(self, wanted: StructuredOutputs, *, large: bool) -> LLMatcher:
        """Compile it, and remember what came of it."""
        if large:
            with self._lock:
                # Many may hold the same one.
                held = sum({id(matcher): size for matcher, size in self._held.values()}.values())
            if held >= MAX_HELD_MEMORY:
                raise GrammarsBusy(
                    f"structured_outputs: the large grammars of requests under way hold {held >> 20} MiB, and no more are "
                    f"compiled from {MAX_HELD_MEMORY >> 20} MiB on; try again later"
                )
        try:
            found, size = self._compile(wanted)
        except InvalidArgument as error:
            if large:
                with self._lock:
                    self._refused[wanted] = (str(error), time.monotonic() + REFUSED_SECONDS)
                    self._refused.move_to_end(wanted)
                    while len(self._refused) > MAX_REFUSED:
                        self._refused.popitem(last=False)
            raise
        with self._lock:
            # Keyed by a copy: ``wanted`` itself must die with its request (see ``_held``).
            known = dataclasses.replace(wanted)
            self._compiled[known] = found
            self._compiled.move_to_end(known)
            self._sizes[known] = size
            while len(self._compiled) > MAX_COMPILED or sum(self._sizes.values()) > MAX_COMPILED_MEMORY:
                self._sizes.pop(self._compiled.popitem(last=False)[0], None)
            if large:
                self._hold(wanted, found)
        return found

    def _compile(self, wanted: StructuredOutputs) -> tuple[LLMatcher, int]:
        """Return a matcher, and the bytes that it keeps, 0 if it is small."""
        vocabulary = self._llguidance()
        size = 0
        if self._trial is not None and must_be_tried(wanted):
            text = self._trial.text(wanted)
            size = self._trial.kept
            matcher = compiled(wanted, text, vocabulary)
        else:
            matcher = compiled(wanted, grammar_text(wanted), vocabulary)
        for warning in matcher.get_grammar_warnings():
            logger.warning("structured_outputs.%s: %s", field_of(wanted), warning)
        first = GrammarMatcher(matcher.deep_copy())
        if not self.allowed({0: first}, {0: ()})[0].any() and not first.over:
            why = first.reason()
            if why not in (None, NO_TOKEN):
                raise InvalidArgument(f"structured_outputs.{field_of(wanted)} is too complex to begin a text: {why}")
            raise InvalidArgument(f"{given(wanted)} allows no text in the tokens of this model")
        return matcher, size

    def _llguidance(self) -> LLTokenizer:
        with self._setting_up:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                table = self._tokenizer.token_bytes
                if not table.concatenates:
                    raise Unsupported(
                        "structured_outputs need a tokenizer whose tokens are bytes wherever they stand (byte-level BPE, "
                        "SentencePiece); what a token of this model's tokenizer adds depends on the one before"
                    )
                tokens = _Vocabulary(self._tokenizer, self._vocab_size)
                special = {i: tokens.tokens[i] for i in tokens.special_token_ids if i != tokens.eos_token_id}
                self._trial = GrammarTrial(self._vocab_size, special)
                self._vocabulary = LLTokenizer(TokenizerWrapper(tokens))
            return self._vocabulary

    def allowed(self, matchers: Mapping[int, GrammarMatcher], ends: Mapping[int, Sequence[int]]) -> dict[int, Words]:
        """Return the allowed next tokens by the keys of ``matchers``; ``ends`` are those that end
        the text."""
        last = self._vocab_size
        masks_MB = np.zeros((len(matchers), num_words(last + 1)), dtype=np.uint32)
        self._fill(masks_MB, list(matchers.values()))
        found: dict[int, Words] = {}
        for words_B, (key, matcher) in zip(masks_MB, matchers.items(), strict=True):
            # The bit is also set where the parser cannot continue at all.
            may_end = bool(words_B[last // 32] >> np.uint32(last % 32) & np.uint32(1)) and matcher.accepting
            keep_B, ends_B = self._end_bits(tuple(ends[key]))
            words_B &= keep_B
            matcher.over = may_end and not words_B.any()
            if may_end:
                words_B |= ends_B
            found[key] = words_B[: num_words(last)]
        return found

    def _fill(self, masks_MB: Words, matchers: Sequence[GrammarMatcher]) -> None:
        """Make masks, each in its row."""
        if len(matchers) < 2 or self._threads == 1 or self._doubtful:
            self._doubtful = False
            for row, matcher in enumerate(matchers):
                matcher.fill(masks_MB, row)
            return
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        started = time.perf_counter()
        rows = [(matcher.inner, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, rows, masks_MB.view(np.int32))
        # This does not tell whose mask took long. The next call does.
        self._doubtful = time.perf_counter() - started > DOUBTFUL_SECONDS

    def _end_bits(self, ends: tuple[int, ...]) -> tuple[Words, Words]:
        """Return the mask without ending tokens and the end bit; and these tokens alone."""
        known = self._end_masks.get(ends)
        if known is None:
            ends_B = np.zeros(num_words(self._vocab_size + 1), dtype=np.uint32)
            for token in ends:
                ends_B[token // 32] |= np.uint32(1 << token % 32)
            keep_B = ~ends_B
            keep_B[self._vocab_size // 32] &= ~np.uint32(1 << self._vocab_size % 32)
            # A new dict: other threads that check grammars may read the old one.
            self._end_masks = {ends: (keep_B, ends_B)} | (
                self._end_masks if len(self._end_masks) < MAX_COMPILED else {}
            )
            return keep_B, ends_B
        return known

    def context(self, prompt: Sequence[int]) -> list[int]:
        """Return a detokenizer's context after which no text begins: there decoders would drop a
        space that a grammar counts."""
        if self._inside is None:
            table = self._tokenizer.token_bytes
            rule = table.rule
            ids = range(table.size) if rule is not None and (rule.max_strips or rule.drops_first_marker) else ()
            plain = (token for token in ids if token not in table.special_ids and table.piece(token).isalnum())
            self._inside = tuple([token] if (token := next(plain, None)) is not None else [])
        return [*self._inside, *prompt]


_GRAMMARS: weakref.WeakSet[Grammars] = weakref.WeakSet()


def _forked() -> None:
    for grammars in _GRAMMARS:
        grammars.forked()


os.register_at_fork(after_in_child=_forked)


class _Vocabulary:
    """The tokens of a model as llguidance takes them, and one more that stands for the end."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        table = tokenizer.token_bytes
        self.tokens = [table.piece(token) for token in range(vocab_size)] + [b"<end>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = sorted({token for token in table.special_ids if token < vocab_size} | {vocab_size})

    def __call__(self, text: bytes | str) -> list[int]:
        """llguidance tokenizes to force tokens, and our grammars force none."""
        raise QuireError("a grammar asked for the tokens of a text")
