"""Incremental detokenisation against decoding everything at once, and stop strings against reading
every character.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.text.test_tokenizer import BUNDLED, load, tokenizer_of

from quire.base.errors import FailedPrecondition, InvalidArgument
from quire.text.detokenizer import IncrementalDetokenizer, StopMatcher
from quire.text.tokenizer import Tokenizer
from small_tokenizers import BUILDERS, LINES

KINDS = [*BUILDERS, "bundled"]


@cache
def tokenizer(kind: str) -> Tokenizer:
    return load(BUNDLED) if kind == "bundled" else tokenizer_of(kind)


def continuation(tok: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    """``decode(prompt + output)`` without ``decode(prompt)``."""
    before = tok.decode(prompt, skip_special_tokens=skip)
    both = tok.decode([*prompt, *output], skip_special_tokens=skip)
    if both.startswith(before):
        return both[len(before) :]
    assert before.endswith("\ufffd")  # the prompt ended inside a character, which the output completed
    assert both.startswith(before[:-1])
    return both[len(before) - 1 :]


def run(detokenizer: IncrementalDetokenizer, output: list[int]) -> list[str]:
    """All deltas, until a stop string or the end."""
    deltas = []
    for token_id in output:
        deltas.append(detokenizer.push(token_id))
        assert detokenizer.text == "".join(deltas)
        if detokenizer.stopped_by is not None:
            break
    deltas.append(detokenizer.finish())
    assert detokenizer.text == "".join(deltas)
    return deltas


def ids_of(tok: Tokenizer) -> st.SearchStrategy[list[int]]:
    any_ids = st.lists(st.integers(0, tok.vocab_size + 2), max_size=30)
    text = st.one_of(st.text(max_size=30), st.sampled_from(LINES[:5])).map(lambda text: tok.encode(text))
    return st.one_of(any_ids, text, st.tuples(text, any_ids).map(lambda pair: pair[0] + pair[1]))


# ---- text ----


@pytest.mark.turns(6)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_concatenate_to_the_decoded_continuation(kind: str, data: st.DataObject, skip: bool) -> None:
    tok = tokenizer(kind)
    ids = data.draw(ids_of(tok))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    detokenizer = IncrementalDetokenizer(tok, prompt, skip_special_tokens=skip)
    run(detokenizer, output)
    assert detokenizer.text == continuation(tok, prompt, output, skip=skip)
    assert detokenizer.num_tokens == detokenizer.tokens_before_stop == len(output)


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(text=st.one_of(st.text(), st.sampled_from(LINES[:5])))
def test_valid_text_is_emitted_as_soon_as_its_characters_are_complete(kind: str, text: str) -> None:
    tok = tokenizer(kind)
    output = tok.encode(text)
    detokenizer = IncrementalDetokenizer(tok)
    for i, token_id in enumerate(output):
        detokenizer.push(token_id)
        complete = tok.decode(output[: i + 1])
        if "\ufffd" not in text:
            assert "\ufffd" not in detokenizer.text
            complete = complete.rstrip("\ufffd")
        assert detokenizer.text == complete.removesuffix("\ufffd") or detokenizer.text == complete


def test_incomplete_bytes_wait_and_invalid_bytes_do_not() -> None:
    tok = tokenizer("sentencepiece")
    byte = {value: tok.backend.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    detokenizer = IncrementalDetokenizer(tok, tok.encode("a"))
    assert [detokenizer.push(byte[b]) for b in "你".encode()] == ["", "", "你"]
    assert [detokenizer.push(byte[b]) for b in b"\xe4\xbdA"] == ["", "", "\ufffdA"]
    assert detokenizer.push(byte[0xFF]) == "\ufffd"
    assert detokenizer.push(byte[0xF0]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == "你\ufffdA\ufffd\ufffd"


def test_leading_space_belongs_to_a_continuation_and_not_to_a_beginning() -> None:
    tok = tokenizer("sentencepiece")
    fox = tok.encode("fox", add_special_tokens=False)
    assert tok.token_text(fox[0]).startswith(" ")
    for prompt, expected in (([], "fox"), ([1], "fox"), (tok.encode("the"), " fox")):
        detokenizer = IncrementalDetokenizer(tok, prompt)
        run(detokenizer, fox)
        assert detokenizer.text == expected
    spelled_out = IncrementalDetokenizer(tok, [1], skip_special_tokens=False)
    run(spelled_out, fox)
    assert spelled_out.text == " fox"


def test_output_completes_the_character_that_the_prompt_began() -> None:
    tok = tokenizer("sentencepiece")
    first, *rest = (tok.backend.token_to_id(f"<0x{b:02X}>") for b in "你".encode())
    detokenizer = IncrementalDetokenizer(tok, [first], stop=["b"])
    assert "".join(run(detokenizer, rest)) == "你"
    assert IncrementalDetokenizer(tok, [first]).finish() == ""
    letter = tok.encode("b", add_special_tokens=False)[-1]
    detokenizer = IncrementalDetokenizer(tok, [first], stop=["b"])
    assert detokenizer.push(rest[0]) == ""
    assert detokenizer.push(letter) == ""
    assert (detokenizer.stopped_by, detokenizer.text) == ("b", "")
    assert detokenizer.tokens_before_stop == 1  # the prompt's damaged character covers it


# ---- stop strings ----


def first_match(text: str, stops: list[str], after: int = 0) -> tuple[int, int, str] | None:
    """The match that ends first, beyond ``after`` characters, the longest of those: start, end,
    stop string.
    """
    for end in range(after + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), end, stop
    return None


@pytest.mark.turns(6)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 4))
def test_stop_strings_anywhere_never_leak(kind: str, data: st.DataObject, include: bool, min_tokens: int) -> None:
    tok = tokenizer(kind)
    ids = data.draw(ids_of(tok))
    cut = data.draw(st.integers(0, min(len(ids), 5)))
    prompt, output = ids[:cut], ids[cut:]
    full = continuation(tok, prompt, output)
    slices = st.tuples(st.integers(0, len(full)), st.integers(1, 8)).map(lambda pair: full[pair[0] : sum(pair)] or "a")
    stops = data.draw(st.lists(st.one_of(slices, st.text(min_size=1, max_size=3)), min_size=1, max_size=4))

    plain = IncrementalDetokenizer(tok, prompt)
    decoded = [len(plain.text) for token_id in output if [plain.push(token_id)]]  # characters after each token
    match = first_match(full, stops, ([0, *decoded][min(min_tokens, len(output))]) if min_tokens else 0)
    detokenizer = IncrementalDetokenizer(
        tok, prompt, stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    for token_id, characters in zip(output, decoded, strict=True):
        detokenizer.push(token_id)
        if detokenizer.stopped_by is not None:
            break
        held = 0 if include else longest_beginning(full[:characters], stops)
        assert detokenizer.text == full[: characters - held]
    detokenizer.finish()
    if match is None or (min_tokens and len(output) <= min_tokens):
        assert detokenizer.stopped_by is None
        assert detokenizer.text == full
        return
    start, end, stop = match
    assert detokenizer.stopped_by == stop
    assert detokenizer.text == (full[:end] if include else full[:start])
    covered = [len(continuation(tok, prompt, output[: n + 1])) for n in range(len(output))]
    if not tok.decode(prompt).endswith("\ufffd"):  # else the prompt's damaged character counts in ``covered``
        assert detokenizer.tokens_before_stop == sum(cover <= start for cover in covered[: detokenizer.num_tokens])


@pytest.mark.turns(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data(), include=st.booleans())
def test_a_fork_goes_on_by_itself(kind: str, data: st.DataObject, include: bool) -> None:
    tok = tokenizer(kind)
    ids, other = data.draw(ids_of(tok)), data.draw(ids_of(tok))
    first = data.draw(st.integers(0, len(ids)))
    cut = data.draw(st.integers(first, len(ids)))
    prompt, output, rest = ids[:first], ids[first:cut], ids[cut:]
    stops = data.draw(st.lists(st.text(min_size=1, max_size=2), max_size=3))

    def fresh() -> IncrementalDetokenizer:
        return IncrementalDetokenizer(tok, prompt, stop=stops, include_stop_str_in_output=include)

    def told(detokenizer: IncrementalDetokenizer, given: list[int]) -> tuple[str, str | None, int]:
        for token_id in given:
            if detokenizer.stopped_by is None:
                detokenizer.push(token_id)
        detokenizer.finish()
        return detokenizer.text, detokenizer.stopped_by, detokenizer.tokens_before_stop

    parent = fresh()
    for token_id in output:
        if parent.stopped_by is None:
            parent.push(token_id)
    fork = parent.fork()
    assert told(fork, other) == told(fresh(), output + other)
    assert told(parent, rest) == told(fresh(), output + rest)


def longest_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of ``text`` begin a stop string without completing it."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]) and n <= len(text)), default=0)


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 40)),
)
@example(text="aabab", stops=["abab", "ab"], cuts=[])
@example(text="aaab", stops=["aab"], cuts=[2])
def test_matcher_does_not_depend_on_how_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    expected = first_match(text, stops)
    matcher = StopMatcher(stops)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(borders):
        match = matcher.scan(text[begin:end])
        if match is not None:
            assert expected == (begin + match.end - len(match.stop), begin + match.end, match.stop)
            return
        assert matcher.held == longest_beginning(text[:end], stops)
    assert expected is None


def words(text: str) -> list[int]:
    """One token for each character."""
    return [tokenizer("byte_level").encode(character)[0] for character in text]


@pytest.mark.parametrize(
    ("stops", "include", "deltas", "stopped_by", "before"),
    [
        (["cd"], False, ["a", "b", "", ""], "cd", 2),
        (["cd"], True, ["a", "b", "c", "d"], "cd", 2),
        (["cx", "d"], False, ["a", "b", "", "c"], "d", 3),
        (["bcd", "c"], False, ["a", "", "b"], "c", 2),
        (["cd", "bcd"], False, ["a", "", "", ""], "bcd", 1),
        (["bcx"], False, ["a", "", "", "bcd", "e", ""], None, 5),
        (["ef"], False, ["a", "b", "c", "d", "", "e"], None, 5),
        (["a"], False, [""], "a", 0),
    ],
)
def test_stop_strings_by_example(
    stops: list[str], include: bool, deltas: list[str], stopped_by: str | None, before: int
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer("byte_level"), stop=stops, include_stop_str_in_output=include)
    found = run(detokenizer, words("abcde"))
    assert found == (deltas if stopped_by is None else [*deltas, ""])
    assert detokenizer.stopped_by == stopped_by
    assert detokenizer.tokens_before_stop == before


def test_stop_string_inside_one_token_cuts_the_token() -> None:
    tok = tokenizer("bundled")
    [word] = tok.encode(" return")
    for include, text in ((False, " re"), (True, " retu")):
        detokenizer = IncrementalDetokenizer(tok, stop=["tu"], include_stop_str_in_output=include)
        assert detokenizer.push(word) == text
        assert (detokenizer.stopped_by, detokenizer.tokens_before_stop) == ("tu", 0)


@pytest.mark.parametrize(
    ("min_tokens", "stops", "text"),
    [
        (0, ["a"], ""),
        (1, ["a"], "ab"),
        (1, ["ab"], ""),  # begins in the first token, ends after it
        (2, ["ab"], "ab"),
        (6, ["a", "b"], "ababab"),
    ],
)
def test_min_tokens(min_tokens: int, stops: list[str], text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer("byte_level"), stop=stops, min_tokens=min_tokens)
    run(detokenizer, words("ababab"))
    assert detokenizer.text == text


@pytest.mark.parametrize(
    ("text", "deltas"), [("abaxy", ["", "", "ab", "ax", "y", ""]), ("ababa", ["", "", "ab", "", "", ""])]
)
def test_of_a_stop_string_that_came_too_early_only_its_end_is_held_back(text: str, deltas: list[str]) -> None:
    """The "a" that ends it may begin the next one."""
    detokenizer = IncrementalDetokenizer(tokenizer("byte_level"), stop=["aba"], min_tokens=3)
    assert run(detokenizer, words(text)) == deltas


def test_an_ended_text_takes_no_more_tokens() -> None:
    [letter] = words("a")
    stopped = IncrementalDetokenizer(tokenizer("byte_level"), stop=["a"])
    stopped.push(letter)
    finished = IncrementalDetokenizer(tokenizer("byte_level"))
    finished.push(letter)
    finished.finish()
    for detokenizer in (stopped, finished):
        text = detokenizer.text
        with pytest.raises(FailedPrecondition, match="ended with"):
            detokenizer.push(letter)
        assert detokenizer.finish() == ""
        assert (detokenizer.text, detokenizer.num_tokens) == (text, 1)


def test_bad_arguments_are_refused() -> None:
    tok = tokenizer("byte_level")
    for stop in ("abc", [""], [1]):
        with pytest.raises(InvalidArgument, match="non-empty strings"):
            IncrementalDetokenizer(tok, stop=stop)  # type: ignore[arg-type]
    for min_tokens in (-1, True, 1.0):
        with pytest.raises(InvalidArgument, match="min_tokens"):
            IncrementalDetokenizer(tok, min_tokens=min_tokens)  # type: ignore[arg-type]
    detokenizer = IncrementalDetokenizer(tok)
    with pytest.raises(InvalidArgument, match="at least 0, got -1"):
        detokenizer.push(-1)
    assert detokenizer.num_tokens == 0
