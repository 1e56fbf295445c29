"""Faults of text in the middle of another, of streams of unknown decoders, and of special tokens
that messages spell.
"""

from __future__ import annotations

from tests.mutants.harness import Mutant

INNER, SPELLED = "text/test_inner_texts.py::", "text/test_spelled_tokens.py::"

MUTANTS = (
    Mutant(
        name="appended-text-begins-a-prompt",
        file="text/tokenizer.py",
        old="return self.encode_inside(text) if self.has_text(ids) else",
        new="return self.encode_inside(text) if False else",
        tests=(INNER + "test_texts_add_up",),
    ),
    Mutant(
        name="no-text-begins-behind-bos",
        file="text/tokenizer.py",
        old="return bool(self.token_bytes.end_of(ids[ids >= 0], skip_special_tokens=True))",
        new="return bool(ids.size)",
        tests=(INNER + "test_a_text_begins_where_no_text_stands",),
    ),
    Mutant(
        name="parts-of-a-template-are-inner-text-to-their-end",
        file="text/tokenizer.py",
        old="start = found.start()",
        new="pass",
        tests=(INNER + "test_pieces_of_a_rendered_template",),
    ),
    Mutant(
        name="edits-leave-the-space-of-the-next-token",
        file="sessions/edits.py",
        old="while is_text and",
        new="while not is_text and",
        tests=(INNER + "test_edits_where_a_text_begins",),
    ),
    Mutant(
        name="special-tokens-fill-the-context-of-a-stream",
        file="text/token_bytes.py",
        old="if skip_special_tokens:\n                visible_T",
        new="if not skip_special_tokens:\n                visible_T",
        tests=(INNER + "test_special_tokens_before_a_completion",),
    ),
    Mutant(
        name="unknown-decoders-stream-parts-of-characters",
        file="text/decoder_stream.py",
        old="min(doubtful, MOST_PARTIAL)",
        new="0",
        tests=(INNER + "test_texts_add_up",),
    ),
    Mutant(
        name="answers-hide-what-the-template-looks-for",
        file="text/spelled_tokens.py",
        old='self._in_answers if role == "assistant" else self._every',
        new="self._every",
        tests=(SPELLED + "test_what_a_template_looks_for_in_answers",),
    ),
    Mutant(
        name="arguments-spell-tokens-with-escapes",
        file="text/spelled_tokens.py",
        old='if "\\\\" in text:',
        new="if False:",
        tests=(SPELLED + "test_every_text_of_a_conversation",),
    ),
    Mutant(
        name="stand-ins-are-characters-of-the-text",
        file="text/spelled_tokens.py",
        old="if one not in used)",
        new="if True)",
        tests=(SPELLED + "test_only_the_template_writes_control_tokens",),
    ),
    Mutant(
        name="a-prompt-is-cut-at-no-stand-in",
        file="text/spelled_tokens.py",
        old="first, *rest = self._cuts.split(self._unescaped(text))",
        new="first, *rest = [self.shown(text)]",
        tests=(SPELLED + "test_only_the_template_writes_control_tokens",),
    ),
)
