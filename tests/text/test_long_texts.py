"""Texts that cannot fit are refused before they are tokenised, and long ones hold up nobody."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire import LLM, AsyncLLM, BeamSearchParams
from quire.base.errors import Cancelled, FailedPrecondition, InvalidArgument
from quire.models.catalogue import bundled_models
from quire.sessions import chat as session_chat
from quire.text import chat_rendering, long_texts, template_programs, tokenizer, tokenizer_process
from quire.text.chat_rendering import render_chat
from quire.text.limited_process import CHILDREN
from quire.text.long_texts import LONG, TextLimit, check, given_up_by, turn
from quire.text.token_bounds import longest_token
from quire.text.tokenizer import Tokenizer
from small_tokenizers import BUILDERS, byte_level, saved

BOUNDED = ("byte_level", "sentencepiece", "gemma")
"""Kinds of which every token stands for a bounded part of a text."""
USER = {"role": "user", "content": "hello"}

# -- how much a token stands for -------------------------------------------------------------------


def test_which_tokenizers_have_a_bound() -> None:
    found = {kind for kind in BUILDERS if longest_token(tokenizers.Tokenizer.from_str(saved(kind))) is not None}
    assert found == set(BOUNDED)


@pytest.mark.parametrize("kind", BOUNDED)
@given(text=st.text() | st.lists(st.sampled_from(["a", "  ", "fib(n)", "\u212a", "<s>", "→ä", "\n"])).map("".join))
@settings(deadline=None)
def test_no_token_stands_for_more(kind: str, text: str) -> None:
    backend = tokenizers.Tokenizer.from_str(saved(kind))
    longest = longest_token(backend)
    assert longest is not None
    assert len(text.encode()) <= longest * len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("form", ["NFC", "NFKC", "NFD", "NFKD", "Lowercase"])
def test_normalised_text_may_have_been_longer(form: str) -> None:
    """With the characters that shrink most in each of them."""
    plain, normalised = byte_level(), byte_level()
    normalised.normalizer = getattr(normalizers, form)()
    text = {
        "NFC": "\u03b9\u0308\u1fef", "NFKC": "\U0001d6d6\u0308\u0301", "NFD": "\u1fef", "NFKD": "\U0001d433", "Lowercase": "\u212a"
    }[form]  # fmt: skip
    before, after = longest_token(plain), longest_token(normalised)
    assert before is not None
    assert after is not None
    shrunk = len(normalizers.Sequence([normalised.normalizer]).normalize_str(text).encode())
    assert len(text.encode()) > shrunk
    assert before * len(text.encode()) <= after * shrunk


def test_what_drops_text_has_no_bound() -> None:
    taking, removing, stripping = byte_level(), byte_level(), byte_level()
    taking.add_special_tokens([tokenizers.AddedToken("<|x|>", rstrip=True, special=True)])
    removing.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(" ", "removed"), byte_level().pre_tokenizer]
    )
    stripping.normalizer = normalizers.Strip()
    for backend in (taking, removing, stripping):
        assert longest_token(backend) is None


# -- refused before they are tokenised -------------------------------------------------------------


@pytest.fixture
def untouched(python_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An LLM that must not tokenise."""

    def encode(backend: tokenizers.Tokenizer, *texts: str, **options: Any) -> list[int]:
        raise AssertionError(f"{sum(map(len, texts))} characters are tokenised")

    monkeypatch.setattr(tokenizer, "encode_with", encode)
    return python_llm


def too_long(llm: LLM) -> str:
    limit = llm.engine.checks.text_limit
    assert limit is not None
    return "a" * (limit.bytes + 1)


FACES: dict[str, Callable[[LLM, str], Any]] = {
    "generate": lambda llm, text: llm.generate(text),
    "beam_search": lambda llm, text: llm.beam_search(text, BeamSearchParams(beam_width=2)),
    "session": lambda llm, text: llm.session(text),
    "append": lambda llm, text: llm.session([5]).append(text),
    "score": lambda llm, text: llm.session([5]).score(text),
}


@pytest.mark.parametrize("face", FACES)
def test_a_text_that_cannot_fit_is_not_tokenised(untouched: LLM, face: str) -> None:
    text = too_long(untouched)
    with pytest.raises(InvalidArgument, match=f"length is 512 tokens.*at least {len(text)} bytes"):
        FACES[face](untouched, text)
    # Two bytes for each of these characters.
    with pytest.raises(InvalidArgument, match="maximum context length is 512 tokens"):
        FACES[face](untouched, "é" * (len(text) // 2 + 1))


def test_a_text_at_the_bound_is_tokenised(python_llm: LLM) -> None:
    text = too_long(python_llm)[1:]
    with pytest.raises(InvalidArgument, match="maximum context length is 512 tokens"):
        python_llm.generate(text)


def test_behind_a_window_any_text_fits(python_llm: LLM) -> None:
    text = too_long(python_llm)
    with python_llm.session([5], window=16) as session:
        session.append(text[:2000])
        assert session.encode(text).size > 512


# -- templates -------------------------------------------------------------------------------------

LOOPS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_prompt_that_cannot_fit_is_not_rendered_to_its_end() -> None:
    messages = [USER] * 1000
    assert len(render_chat(LOOPS, messages, text_limit=TextLimit(100, 5000))) == 5000
    with pytest.raises(InvalidArgument, match="more than 4999 bytes"):
        render_chat(LOOPS, messages, text_limit=TextLimit(100, 4999))


def test_templates_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they write nothing."""
    monkeypatch.setattr(chat_rendering, "SECONDS", -1.0)
    for template in (LOOPS, "{% for m in messages %}{% if m['role'] == 'x' %}x{% endif %}{% endfor %}"):
        with pytest.raises(InvalidArgument, match="takes longer than"):
            render_chat(template, [USER])


HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' * 100000 }}{% endfor %}",
    "{{ 'a' * 4000000000 }}",
    "{% set a = messages[0].content * 4000000000 %}",
    "{{ 'a'|center(4000000000) }}",
    "{{ '%4000000000d' % 1 }}",
    "{{ '%4000000000d'|format(1) }}",
    "{{ messages[0].content.rjust(4000000000) }}",
    "{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{{ (['a'] * 100000)|join('b' * 1000000) }}",
    "{{ ('a' * 20000)|replace('', 'b' * 1000000)|length }}",
    "{{ ([0] * 4000000000)|length }}",
    "{{ messages|batch(4000000000, 'x')|list|length }}",
    "{{ 10 ** (10 ** 9) }}",
    "{% for i in range(90) %}{{ 'a' * 1000000 }}{% endfor %}",
    "{{ messages|tojson(indent=4000000000) }}",
    "{{ lipsum(n=100000000) }}",
    "{% macro m(x) %}{{ m(x ~ x) }}{{ m(x ~ x) }}{% endmacro %}{{ m('a') }}",
    "{{ " + "(" * 50000 + "messages" + ")" * 50000 + " }}",
    "{{ " + "-" * 100000 + "1 }}",
    "{# " + "x" * 300000 + " #}{{ messages }}",
]


@pytest.mark.turns(3)
@pytest.mark.parametrize("template", HOSTILE, ids=[template[:40].replace("/", "") for template in HOSTILE])
def test_hostile_templates_are_refused(monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """In one sentence, with no memory of this process, and the next template is rendered."""
    monkeypatch.setattr(chat_rendering, "SECONDS", 1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidArgument, match="the chat template") as caught:
        render_chat(template, [USER])
    assert len(str(caught.value)) < 2100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB"
    assert render_chat(LOOPS, [USER]) == USER["content"]


def test_a_template_that_was_ended_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_rendering, "SECONDS", 1.0)
    for template in (HOSTILE[0], LOOPS):
        with suppress(InvalidArgument):
            render_chat(template, [USER])
    assert 0 < len(template_programs.PROCESS.free) <= CHILDREN
    assert all(child.poll() is None for child in template_programs.PROCESS.free)
    template_programs.PROCESS.free[-1].kill()
    assert render_chat(LOOPS, [USER]) == USER["content"], "another child is started"


def test_slow_templates_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_rendering, "SECONDS", 10.0)
    over, ends = threading.Event(), list[type[BaseException]]()

    def render_slowly() -> None:
        with given_up_by(over.is_set):
            try:
                render_chat(HOSTILE[0], [USER])
            except (Cancelled, InvalidArgument) as error:
                ends.append(type(error))

    threads = [threading.Thread(target=render_slowly) for _ in range(CHILDREN + 1)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        assert render_chat(LOOPS, [USER]) == USER["content"]
    assert not ends, "all are still rendered"
    over.set()
    for thread in threads:
        thread.join()
    assert ends == [Cancelled] * (CHILDREN + 1)


def spelled(**parts: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "?": 2}, merges=[], unk_token="?"))
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def split(pattern: str) -> dict[str, Any]:
    return {"pre_tokenizer": pre_tokenizers.Split(Regex(pattern), "isolated")}


DOUBLED = normalizers.Sequence([normalizers.Replace("a", "aa")] * 34)


@pytest.mark.parametrize(
    ("parts", "text", "reason"),
    [
        (split("(a+)+$"), "a" * 40 + "b", "retry-limit-in-match|longer than 1"),
        (split("a+$"), "a" * 60_000 + "b", "longer than 1 seconds"),
        ({"normalizer": normalizers.Replace("b", "a" * 100_000)}, "b" * 100_000, "1024 MiB of memory|longer than 1"),
        (
            {"normalizer": normalizers.Replace(Regex("(b|bb)+$"), "b")},
            "b" * 50 + "a",
            "retry-limit-in-match|longer than 1",
        ),
        pytest.param(
            {"normalizer": normalizers.Prepend("a" * 3_000_000)},
            "b" * 10,
            "longer than 1 seconds",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_hostile_tokenizers_are_refused(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], text: str, reason: str
) -> None:
    """In one sentence, and other texts have their tokens."""
    tokenizer = Tokenizer(spelled(**parts))
    monkeypatch.setattr(tokenizer_process, "SECONDS", 1.0)
    with pytest.raises(InvalidArgument, match=f"the tokenizer .*({reason})"):
        tokenizer.encode(text)
    if "Prepend" not in str(parts.values()):
        assert tokenizer.encode("aaa") == spelled(**parts).encode("aaa").ids


def test_hostile_tokenizers_are_refused_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_process, "SECONDS", 1.0)
    for parts in (
        {"normalizer": DOUBLED},
        {"decoder": decoders.Replace("a", "b" * 1000)},
        {"decoder": decoders.Replace(Regex("(a+)+$"), "b")},
    ):
        with pytest.raises(InvalidArgument, match="the tokenizer"):
            Tokenizer(spelled(**parts))
    ends = processors.TemplateProcessing(single="b $A b", special_tokens=[("b", 1)])
    assert Tokenizer(spelled(post_processor=ends))._special_prefix() == [1]


def test_which_tokenizers_are_safe() -> None:
    """Those of popular models; what makes texts longer step by step is not."""
    assert all(tokenizer_process.is_safe(tokenizers.Tokenizer.from_str(saved(kind))) for kind in BUILDERS)
    bundled = bundled_models()["tiny-python"] / "tokenizer.json"
    assert tokenizer_process.is_safe(tokenizers.Tokenizer.from_file(str(bundled)))
    patterns = sorted(tokenizer_process.KNOWN)
    assert all(tokenizer_process.is_safe(spelled(**split(pattern))) for pattern in patterns)
    assert not tokenizer_process.is_safe(spelled(**split(r"\p{L}+$")))
    assert not tokenizer_process.is_safe(spelled(normalizer=DOUBLED))
    assert not tokenizer_process.is_safe(spelled(normalizer=normalizers.Prepend("a" * 1000)))


@pytest.mark.turns(6)
@pytest.mark.parametrize("pattern", sorted(tokenizer_process.KNOWN))
def test_known_patterns_split_alike_in_the_process(pattern: str) -> None:
    """Forced into the process, a tokenizer gives the ids that it gives here."""
    tokenizer = Tokenizer(spelled(**split(pattern)))
    texts = ["", "ab ba  a1 22 333\n\n b's", "äöü é\u212a"]
    here = [tokenizer.encode(text) for text in texts]
    tokenizer._encoder._is_safe = False
    assert [tokenizer.encode(text) for text in texts] == here


def test_templates_end_with_their_call() -> None:
    looks = iter([False, False, True])
    with given_up_by(lambda: next(looks)), pytest.raises(Cancelled):
        render_chat("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", [USER])
    assert next(looks, None) is None


# -- turns -----------------------------------------------------------------------------------------


def test_one_long_text_at_a_time() -> None:
    began, ended, given_up = threading.Event(), threading.Event(), threading.Event()
    results: list[str] = []

    def wait(name: str) -> None:
        with given_up_by(given_up.is_set):
            began.set()
            try:
                with turn(LONG):
                    results.append(name)
            except Cancelled:
                results.append(f"{name} gave up")
        ended.set()

    with turn(LONG):
        thread = threading.Thread(target=wait, args=("second",))
        thread.start()
        assert began.wait(60)
        with turn(LONG - 1):  # short ones wait for nobody
            assert not results
        given_up.set()
        assert ended.wait(60)
        assert results == ["second gave up"]
        thread.join()
    given_up.clear()
    thread = threading.Thread(target=wait, args=("third",))
    thread.start()
    thread.join(60)
    assert results[1:] == ["third"]
    assert not long_texts._turns


def test_calls_within_calls_are_asked_in_turn() -> None:
    with given_up_by(lambda: True):
        with given_up_by(lambda: False):
            check()
        with pytest.raises(Cancelled):
            check()
    check()


def test_a_call_that_was_given_up_does_not_tokenise() -> None:
    """The event loop's task is cancelled while its text waits for another one."""

    async def run() -> None:
        async with AsyncLLM("tiny-python", device="cpu", kv_cache_memory="8MiB") as llm:
            assert llm.tokenizer is not None
            llm.tokenizer.__dict__["longest_token"] = None  # so that nothing is refused by its size
            with turn(LONG):
                task = asyncio.create_task(llm.generate("a" * LONG))
                await asyncio.sleep(0)
                while not task.cancelling():
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert (await llm.generate("def"))[0].outputs

    asyncio.run(run())


# -- sessions --------------------------------------------------------------------------------------


@pytest.fixture
def talking(python_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    assert python_llm.tokenizer is not None
    monkeypatch.setitem(python_llm.tokenizer.chat_templates, "default", LOOPS)
    return python_llm


def test_a_chat_is_rendered_while_others_go_on(talking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[bool] = []
    encode = session_chat.encode_chat

    def looking(*args: Any, **options: Any) -> list[int]:
        def look() -> None:
            free.append(talking.engine.lock.acquire(blocking=False))
            if free[-1]:
                talking.engine.lock.release()

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return encode(*args, **options)

    monkeypatch.setattr(session_chat, "encode_chat", looking)
    with talking.session([5]) as session:
        session.chat([USER])
    assert free == [True]


def test_a_session_that_changed_while_its_chat_was_rendered(talking: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = session_chat.encode_chat
    with talking.session([5, 6, 7]) as session:

        def rewinding(*args: Any, **options: Any) -> list[int]:
            session.rewind(to=1)
            return encode(*args, **options)

        monkeypatch.setattr(session_chat, "encode_chat", rewinding)
        with pytest.raises(FailedPrecondition, match="changed by another thread"):
            session.chat([USER])
        assert session.tokens == [5]


def test_a_chat_that_cannot_fit_is_not_rendered_to_its_end(talking: LLM, tmp_path: Path) -> None:
    text = too_long(talking)
    with talking.session([5]) as session, pytest.raises(InvalidArgument, match=f"more than {len(text) - 1} bytes"):
        session.chat([{"role": "user", "content": text}])
    with pytest.raises(InvalidArgument, match=f"more than {len(text) - 1} bytes"):
        talking.chat([{"role": "user", "content": text}])
