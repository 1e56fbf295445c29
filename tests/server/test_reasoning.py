"""Reasoning apart from the answer, against a reading of the whole text, however the text is cut."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import FailedPrecondition
from quire.server.tools.reasoning import ReasoningFormat, StreamingReasoning, reasoning_for

THINK = ReasoningFormat(opener="<think>", closer="</think>")
BRACKETS = ReasoningFormat(opener="[THINK]", closer="[/THINK]")
FRAGMENTS = (
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "<",
    "</",
    "<th",
    "ink>",
    " ",
    "\n",
    "\n\n",
    "a",
    "Hi there.",
    "é",
    "😀",
    "<tool_call>",
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)


def expected(format: ReasoningFormat, text: str, opened: bool) -> tuple[str | None, str]:
    begin = text.lstrip()
    if begin.startswith(format.opener):
        begin = begin[len(format.opener) :]
    elif not opened:
        return None, text
    reasoning, _, content = begin.partition(format.closer)
    return reasoning.strip() or None, content.lstrip()


def parsed(format: ReasoningFormat, text: str, opened: bool | None = None) -> tuple[str | None, str]:
    return streamed(format, [text], opened)


def streamed(format: ReasoningFormat, pieces: list[str], opened: bool | None) -> tuple[str | None, str]:
    parser = StreamingReasoning(format, opened)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    assert all(bool(delta.reasoning) != bool(delta.content) for delta in deltas)
    kinds = [bool(delta.reasoning) for delta in deltas]
    assert kinds == sorted(kinds, reverse=True)
    return "".join(delta.reasoning for delta in deltas) or None, "".join(delta.content for delta in deltas)


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 200), max_size=8), st.sampled_from([THINK, BRACKETS]))
def test_any_text_however_it_is_cut(text: str, opened: bool, places: list[int], format: ReasoningFormat) -> None:
    assert parsed(format, text, opened) == expected(format, text, opened)
    assert streamed(format, cut(text, places), opened) == expected(format, text, opened)
    assert streamed(format, list(text), opened) == expected(format, text, opened)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nSum.\n</think>\n\n4", False, "Sum.", "4"),
        ("Sum.\n</think>\n\n4", True, "Sum.", "4"),
        ("<think>\nSum.\n</think>\n\n4", True, "Sum.", "4"),
        ("<think>\n\n</think>\n\n4", False, None, "4"),
        ("  4 </think> <think>", False, None, "  4 </think> <think>"),
        ("<think>Su", False, "Su", ""),
        ("<think>Su</thi", False, "Su</thi", ""),
        ("<thi", False, None, "<thi"),
        ("a</think>b</think> c\n", True, "a", "b</think> c\n"),
        ("", False, None, ""),
    ],
)
def test_examples(text: str, opened: bool, reasoning: str | None, content: str) -> None:
    assert parsed(THINK, text, opened) == (reasoning, content)


def test_reasoning_is_streamed_as_it_comes() -> None:
    parser = StreamingReasoning(THINK)
    assert parser.feed("<thi") == parser.feed("nk>\n") == []
    assert [delta.reasoning for delta in parser.feed("One ")] == ["One"]
    assert [delta.reasoning for delta in parser.feed("two")] == [" two"]
    assert [delta.content for delta in parser.feed("\n</think>\nYes")] == ["Yes"]
    assert parser.finish() == []
    for call in (parser.finish, lambda: parser.feed("a")):
        with pytest.raises(FailedPrecondition, match="finished"):
            call()


QWEN3 = (
    "{%- if '</think>' in content %}{% endif %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
R1 = "{% if '</think>' in content %}{% endif %}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
COMMAND_A = (
    "{% if reasoning %}{{ '<|START_THINKING|>' }}{% else %}{{ '<|START_THINKING|><|END_THINKING|>' }}{% endif %}"
)
MAGISTRAL = "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}"


@pytest.mark.parametrize(
    ("template", "opener", "opened"),
    [
        (QWEN3, "<think>", False),
        (R1, "<think>", True),
        (MAGISTRAL, "[THINK]", False),
        (COMMAND_A, "<|START_THINKING|>", False),
        ("{{ messages }}", None, False),
    ],
)
def test_the_template_tells(template: str, opener: str | None, opened: bool) -> None:
    format = reasoning_for(template)
    assert (format and format.opener) == opener
    if format is not None:
        assert format.opened is opened
        assert parsed(format, f"a{format.closer}b")[0] == ("a" if opened else None)


def test_the_prompt_tells_better() -> None:
    assert THINK.opened_by("<|im_start|>assistant\n<think>\n")
    assert not THINK.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not THINK.opened_by("What does <think> mean?<|im_start|>assistant\n")


@pytest.mark.turns(6)
@pytest.mark.parametrize("body", ["\n", "<", "</think", "word "])
def test_time_is_linear(body: str) -> None:
    def seconds(size: int) -> float:
        text = "<think>" + body * (size // len(body))
        best = float("inf")
        for _ in range(3):
            parser = StreamingReasoning(THINK)
            begin = time.process_time()
            for char in text:
                parser.feed(char)
            parser.finish()
            best = min(best, time.process_time() - begin)
        return best

    # Four times the text: 4 if linear, 16 if quadratic.
    assert seconds(40_000) < 8 * seconds(10_000)
