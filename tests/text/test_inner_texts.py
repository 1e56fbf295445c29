"""Text in the middle of a session: its text is the concatenation of what was put in and generated,
whatever a tokenizer does at the ends of a text. Tokenizers are made of all steps that do something
there; what they must give is what was put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.examples import examples
from tests.small_llms import make_checkpoint
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire import LLM, SamplingParams, Segment
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from small_tokenizers import add_bos

TEXTS = st.text("ab é你😀\n", max_size=6)
SPECIAL = ["<unk>", "<s>", "</s>"]
MERGES = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]


@cache
def spaces_model() -> models.BPE:
    """▁ for spaces, bytes for other characters."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é"]
    tokens += [left + right for left, right in MERGES]
    return models.BPE({token: i for i, token in enumerate(tokens)}, MERGES, unk_token="<unk>", byte_fallback=True)


@cache
def bytes_model() -> models.BPE:
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "ab"]
    return models.BPE({token: i for i, token in enumerate(tokens)}, [("Ġ", "a"), ("a", "b")])


def decoder_of(draw: Callable[[Any], Any], steps: list[Any]) -> Any:
    """Steps in a sequence, perhaps nested, perhaps with what changes nothing: in forms that are
    known and in forms that are not.
    """
    if draw(st.booleans()):
        at = draw(st.integers(1, len(steps)))
        steps = [decoders.Sequence(steps[:at]), *steps[at:]]
    return steps[0] if len(steps) == 1 and draw(st.booleans()) else decoders.Sequence(steps)


@st.composite
def made(draw: Callable[[Any], Any]) -> Tokenizer:
    """A tokenizer that can express all of ``TEXTS``."""
    schemes = st.sampled_from(["always", "first", "never"])
    if draw(st.booleans()):
        backend = tokenizers.Tokenizer(bytes_model())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=draw(st.booleans()))
        if draw(st.booleans()):
            backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer])
        fuse = [decoders.Fuse()] * draw(st.integers(0, 1))
        strip = [decoders.Strip(" ", 1, 0)] * draw(st.integers(0, 1))
        backend.decoder = decoder_of(draw, [decoders.ByteLevel(), *fuse, *strip])
    else:
        backend = tokenizers.Tokenizer(spaces_model())
        steps: list[Any] = []
        if draw(st.booleans()):
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=draw(schemes), split=draw(st.booleans()))
        else:
            steps = [normalizers.Prepend("▁")] * draw(st.integers(0, 1)) + [normalizers.Replace(" ", "▁")]
        # As a text's end: in the middle it must not take anything.
        steps = [normalizers.Strip()] * draw(st.integers(0, 1)) + steps
        if steps:
            backend.normalizer = steps[0] if len(steps) == 1 else normalizers.Sequence(steps)
        if draw(st.booleans()):
            spaces = [decoders.Replace("▁", " "), decoders.ByteFallback()]
            if draw(st.booleans()):
                spaces.reverse()
            strip = [decoders.Strip(" ", 1, 0)] * draw(st.integers(0, 1))
            parts = [*spaces, decoders.Fuse(), *strip]
        else:
            parts = [decoders.Metaspace(prepend_scheme=draw(schemes)), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoder_of(draw, parts)
    backend.add_special_tokens(SPECIAL)
    if draw(st.booleans()):
        add_bos(backend)
    return Tokenizer(backend)


# -- tokenizers ------------------------------------------------------------------------------------


@settings(max_examples=examples(50, 150))
@given(tokenizer=made(), texts=st.lists(TEXTS, min_size=2, max_size=4), data=st.data())
def test_texts_add_up(tokenizer: Tokenizer, texts: list[str], data: st.DataObject) -> None:
    """Decoded at once, and token by token from any place on."""
    ids, wanted = tokenizer.encode(texts[0]), None
    for text in texts[1:]:
        before = np_of(ids)
        # What begins a text is read as a prompt is.
        wanted = tokenizer.decode(ids) if tokenizer.has_text(before) else None
        ids += tokenizer.encode_after(before, text)
        if wanted is not None:
            assert tokenizer.decode(ids) == wanted + text
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    cut = data.draw(st.integers(0, len(ids)))
    stream = IncrementalDetokenizer(tokenizer, ids[:cut])
    pieces = [*(stream.push(token) for token in ids[cut:]), stream.finish()]
    given_text = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    rest = tokenizer.decode(ids).removeprefix(given_text)
    assert "".join(pieces) == (rest if cut < len(ids) else "")


def np_of(ids: list[int]) -> NDArray[np.int64]:
    return np.array(ids, dtype=np.int64)


# -- sessions --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose tokenizer a test puts in its place."""
    path = tmp_path_factory.mktemp("inner")
    make_checkpoint("llama", path, vocab_size=300)
    with LLM(path, device="cpu", dtype="float32", kv_cache_memory="4MiB") as llm:
        yield llm


def speaking(llm: LLM, tokenizer: Tokenizer) -> LLM:
    llm.engine.tokenizer = tokenizer
    llm.engine.outputs = replace(llm.engine.outputs, tokenizer=tokenizer)
    return llm


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokenizer=made(), data=st.data())
def test_the_text_of_a_session_is_what_was_put_in(model: LLM, tokenizer: Tokenizer, data: st.DataObject) -> None:
    llm = speaking(model, tokenizer)
    with llm.session("a" + data.draw(TEXTS)) as session:
        for verb in data.draw(
            st.lists(st.sampled_from(["append", "score", "segments", "edit", "generate"]), max_size=5)
        ):
            before, text = session.text, data.draw(TEXTS)
            if verb == "append":
                assert session.append(text).text == before + text
            elif verb == "segments":
                assert session.append([text, Segment("b a"), " "]).text == before + text + "b a "
            elif verb == "score":
                scored, ids = len(session.score(text)), session.tokens
                assert session.append(text).text == before + text
                assert session.tokens[: len(ids)] == ids
                assert len(session) - len(ids) == scored
            elif verb == "generate":
                params = SamplingParams(max_tokens=3, ignore_eos=True, min_tokens=3, seed=data.draw(st.integers(0, 99)))
                said = session.generate(params).outputs[0].text
                # Bytes that are no character yet may become one.
                assert session.text.rstrip("\ufffd") == (before + said).rstrip("\ufffd")
                session.rewind(n=3)
            elif tokenizer.token_bytes.concatenates and len(before) > 3:
                start = data.draw(st.integers(1, len(before) - 1))
                piece = before[start : data.draw(st.integers(start + 1, len(before)))]
                if before.count(piece) == 1:
                    session.edit(piece, text)
                    assert session.text == before.replace(piece, text)


def sentencepiece(*, strips: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer(spaces_model())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    backend.add_special_tokens(SPECIAL)
    add_bos(backend)
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("text", "span", "new", "wanted"),
    [
        ("ab b", "ab", "", " b"),
        ("ab b", "ab", "b", "b b"),
        ("ab b", "a", " a", " ab b"),
        (" b", " b", "a", "a"),
        ("ab b", (1, 1), "b", "bab b"),
        ("ab b", "ab b", "é", "é"),
    ],
)
def test_edits_where_a_text_begins(model: LLM, text: str, span: str | tuple[int, int], new: str, wanted: str) -> None:
    """The space before a text is not of it, and becomes of it when something stands before."""
    with speaking(model, sentencepiece()).session(text) as session:
        session.edit(span, new)
        assert session.text == wanted


def test_a_text_begins_where_no_text_stands(model: LLM) -> None:
    """Behind BOS a text is read as a prompt is."""
    tokenizer = sentencepiece()
    llm = speaking(model, tokenizer)
    with llm.session("") as session, llm.session("ab") as whole:
        assert session.append("ab").tokens == whole.tokens
        assert session.text == "ab"


def test_positions_mean_tokens(model: LLM) -> None:
    with speaking(model, sentencepiece()).session("ab b") as session:
        ids = session.tokens
        session.edit((0, 2))
        assert session.tokens == ids[2:]


def test_pieces_of_a_rendered_template() -> None:
    """Up to its first special token a piece continues the text before it; behind that all is as in
    the whole."""
    tokenizer = sentencepiece()
    whole = "<s>a b</s>ab<s>b"
    at = whole.index(" b</s>")
    ids = tokenizer.encode_rendered(whole)
    assert ids == tokenizer.encode(whole, add_special_tokens=False)
    parts = [tokenizer.encode_rendered(whole[:at]), tokenizer.encode_rendered(whole[at:], inside=True)]
    assert parts[0] + parts[1] == ids


@pytest.mark.parametrize("count", [0, 1, 70])
def test_special_tokens_before_a_completion(count: int) -> None:
    """However many: the text goes on."""
    tokenizer = sentencepiece()
    word = tokenizer.token_id("▁a")
    assert word is not None
    context = tokenizer.token_bytes.end_of(np_of([word, *[2] * count]), skip_special_tokens=True)
    assert IncrementalDetokenizer(tokenizer, context).push(word) == " a"
    context = tokenizer.token_bytes.end_of(np_of([2] * count), skip_special_tokens=True)
    assert IncrementalDetokenizer(tokenizer, context).push(word) == "a"
