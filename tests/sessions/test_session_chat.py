"""Chats in a session: its tokens are those of a stateless chat of all turns, and only new ones are
run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.small_llms import MakeLLM, check, engine_of, greedy, make_checkpoint, record

from quire import LLM, InvalidArgument, Session
from quire.engine.request_checks import RequestChecks
from quire.sessions.chat_turns import ChatTurns
from small_tokenizers import saved

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("chat")
    make_checkpoint("llama", path, vocab_size=600, max_position_embeddings=1024)
    (path / "tokenizer.json").write_text(saved("byte_level"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture
def chatty(make_llm: MakeLLM, folder: Path) -> LLM:
    return make_llm(folder)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_turns(chatty: LLM) -> None:
    session = chatty.session()
    turns: list[dict[str, str]] = []
    for text in ("The quick brown fox", "jumps over", "the lazy dog"):
        before = len(session)
        recorder = record(chatty)
        output = session.chat([user(text)], greedy(8))
        turns.append(user(text))
        tokens = output.prompt_token_ids
        assert chatty.tokenizer is not None
        prompt = (
            "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>" for t in turns) + "<|im_start|>assistant\n"
        )
        assert chatty.tokenizer.decode(tokens, skip_special_tokens=False) == prompt
        assert recorder.num_tokens == len(tokens) - output.num_cached_tokens + 7
        # Random text may be tokenised in another way when it is rendered, from its first token on.
        assert output.num_cached_tokens >= before - 8 - 1
        answer = output.outputs[0].text
        turns.append({"role": "assistant", "content": answer})
        check(chatty)
    fresh = chatty.chat(turns[:-1], greedy(8), cache_salt="fresh")[0]
    assert fresh.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_text_of_an_answer_says_can_be_told(chatty: LLM, stream: bool) -> None:
    """The next turn's template gets the message, and what comes behind the answer joins its
    content.
    """

    def read(text: str) -> dict[str, str]:
        texts.append(text)
        return {"role": "assistant", "content": f"<{len(text)}>"}

    texts: list[str] = []
    session = chatty.session()
    if stream:
        list(session.stream_chat([user("The quick")], greedy(8), answer=read))
    else:
        assert session.chat([user("The quick")], greedy(8), answer=read).outputs[0].text == texts[0]
    session.append(" fox")
    turns = [user("The quick"), {"role": "assistant", "content": f"<{len(texts[0])}> fox"}, user("jumps")]
    assert session.messages == turns[:2]
    output = session.chat([user("jumps")], greedy(2))
    assert len(texts) == 1
    assert chatty.tokenizer is not None
    prompt = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>" for t in turns) + "<|im_start|>assistant\n"
    assert chatty.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == prompt
    check(chatty)


def test_parameters_are_first_checked_without_the_lock(chatty: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large grammar takes seconds to compile, and then the check under the lock finds it."""
    engine, held = engine_of(chatty), list[bool]()
    params = RequestChecks.params

    def checked(checks: RequestChecks, *given: Any, **more: Any) -> None:
        held.append(engine.lock.owned)
        params(checks, *given, **more)

    monkeypatch.setattr(RequestChecks, "params", checked)
    session = chatty.session("The quick")
    for verb in (
        lambda: session.generate(greedy(1)),
        lambda: list(session.stream(greedy(1))),
        lambda: session.chat([user("one")], greedy(1)),
        lambda: list(session.stream_chat([user("two")], greedy(1))),
        lambda: chatty.generate(session, greedy(1)),
    ):
        held.clear()
        verb()
        assert held[0] is False


def test_the_template_gets_tools_and_variables(chatty: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each turn those that are given with it; what runs ahead of a turn gets the last ones."""
    from quire.text import chat_prompts

    template = "{{ tools[0].name if tools }}{{ mood }}" + TEMPLATE
    monkeypatch.setattr(chat_prompts, "select_template", lambda *_, **__: template)
    assert chatty.tokenizer is not None
    session, extra = chatty.session(), {"tools": [{"name": "clock"}], "variables": {"mood": "calm"}}
    session.chat([user("one")], greedy(4), answer=lambda text: {**assistant("short"), "said": text}, **extra)
    assert chatty.tokenizer.decode(session.tokens).startswith("clockcalm")
    child = session.fork()
    ahead = child.prefetch_next_turn()
    assert ahead is not None
    assert chatty.tokenizer.decode(ahead.prompt_token_ids).startswith("clockcalm")
    again = ChatTurns.read(session._live.turns.written())
    assert again.written() == session._live.turns.written()
    output = session.chat([user("two")], greedy(2), variables={"mood": "wild"})
    assert chatty.tokenizer.decode(output.prompt_token_ids).startswith("wild")
    check(chatty)


def test_rewind_takes_turns_back(chatty: LLM) -> None:
    session = chatty.session()
    session.chat([user("one")], greedy(4))
    length = len(session)
    first = session.chat([user("two")], greedy(4))
    session.rewind(to=length)
    again = session.chat([user("two")], greedy(4))
    assert first.prompt_token_ids == again.prompt_token_ids
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    other = session.fork(at=length)
    deltas = list(other.stream_chat([user("two")], greedy(4)))
    assert [token for delta in deltas for token in delta.token_ids] == again.outputs[0].token_ids
    assert other.tokens == session.tokens
    check(chatty)


def test_refused_messages_leave_no_trace(chatty: LLM) -> None:
    session = chatty.session()
    session.chat([user("one")], greedy(4))
    before = session.tokens
    for wrong in ([], "text", [{"role": "user"}], [3], [user("long " * 2000)]):
        with pytest.raises(InvalidArgument):
            session.chat(wrong, greedy(4))  # type: ignore[arg-type]
        assert session.tokens == before
    with pytest.raises(InvalidArgument):
        session.chat([user("two")], greedy(4, n=2))
    assert session.tokens == before
    assert session.chat([user("two")], greedy(4)).num_cached_tokens > 0


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def asked(chatty: LLM, *turns: dict[str, str]) -> list[int]:
    """The prompt of a stateless chat."""
    return chatty.chat(list(turns), greedy(1))[0].prompt_token_ids


def begun(chatty: LLM) -> Session:
    """A session that ends where the first answer begins."""
    session = chatty.session()
    output = session.chat([user("one")], greedy(1, ignore_eos=True))
    session.rewind(to=len(output.prompt_token_ids))
    return session


def test_what_is_generated_where_an_answer_begins_is_the_answer(chatty: LLM) -> None:
    session = begun(chatty)
    text = session.generate(greedy(3)).outputs[0].text
    text += "".join(delta.text for delta in session.stream(greedy(3)))
    other = session.fork()
    expected = asked(chatty, user("one"), assistant(text), user("two"))
    assert session.chat([user("two")], greedy(2)).prompt_token_ids == expected
    for _ in other.stream_chat([user("two")], greedy(2)):
        pass
    assert other.tokens == session.tokens
    check(chatty)


def test_what_is_generated_behind_an_answer_belongs_to_it(chatty: LLM) -> None:
    session = chatty.session()
    first = session.chat([user("one")], greedy(3)).outputs[0].text
    second = session.generate(greedy(3)).outputs[0].text
    session.append(" appended")
    prompt = session.chat([user("two")], greedy(2)).prompt_token_ids
    assert prompt == asked(chatty, user("one"), assistant(first + second + " appended"), user("two"))


def test_an_answer_that_is_rewound_into_keeps_its_beginning(chatty: LLM) -> None:
    session = chatty.session()
    output = session.chat([user("one")], greedy(6, ignore_eos=True))
    start = len(output.prompt_token_ids)
    session.rewind(to=start + 2)
    text = chatty.tokenizer.decode(session.tokens[start:])  # type: ignore[union-attr]
    expected = asked(chatty, user("one"), assistant(text), user("two"))
    assert session.fork().chat([user("two")], greedy(2)).prompt_token_ids == expected
    # Nothing was answered: the messages stand alone.
    session.rewind(to=start)
    assert session.chat([user("two")], greedy(2)).prompt_token_ids == asked(chatty, user("one"), user("two"))


def test_messages_that_are_rewound_into_are_forgotten(chatty: LLM) -> None:
    session = chatty.session()
    first = session.chat([user("one")], greedy(3)).outputs[0].text
    answered = len(session)
    session.chat([user("two")], greedy(3))
    session.rewind(to=answered + 2)
    session.generate(greedy(2))
    expected = asked(chatty, user("one"), assistant(first), user("three"))
    assert session.fork().chat([user("three")], greedy(2)).prompt_token_ids == expected
    session.rewind(to=answered)
    text = session.generate(greedy(2)).outputs[0].text
    expected = asked(chatty, user("one"), assistant(first + text), user("three"))
    assert session.chat([user("three")], greedy(2)).prompt_token_ids == expected


RULES = "{% if tools %}{{ 'Rules of tools. ' * 20 }}{% endif %}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_history_that_is_written_shorter_keeps_its_turns(
    chatty: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Ends of earlier turns are those in the new tokens, for the next turn and for rewinds."""
    monkeypatch.setattr(chatty.tokenizer, "chat_templates", {"default": RULES + TEMPLATE})
    session = chatty.session()
    session.chat([user("one")], greedy(3), tools=TOOLS, answer=lambda _: assistant("yes sir"))
    long = len(session)
    if stream:
        list(session.stream_chat([user("two")], greedy(3), answer=lambda _: assistant("no")))
    else:
        session.chat([user("two")], greedy(3), answer=lambda _: assistant("no"))
    assert len(session) < long  # the first turn ended behind all tokens that are there now
    forks = (session.fork(at=length) for length in range(len(session)))
    rewound = next(fork for fork in forks if fork.text.endswith("yes sir"))
    expected = asked(chatty, user("one"), assistant("yes sir"), user("two"), assistant("no"), user("three"))
    assert session.chat([user("three")], greedy(2)).prompt_token_ids == expected
    expected = asked(chatty, user("one"), assistant("yes sir"), user("three"))
    assert rewound.chat([user("three")], greedy(2)).prompt_token_ids == expected
    check(chatty)


def test_a_history_that_is_written_longer_forgets_what_is_rewound(chatty: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chatty.tokenizer, "chat_templates", {"default": RULES + TEMPLATE})
    session = chatty.session()
    session.chat([user("one")], greedy(3))
    short = len(session)
    session.chat([user("two")], greedy(3), tools=TOOLS)
    session.rewind(to=short + 1)  # among the rules, before the first message
    expected = asked(chatty, user("three"))
    assert session.chat([user("three")], greedy(2)).prompt_token_ids[-len(expected) :] == expected
    assert b"one" not in session.text.encode()


def test_thoughts_that_a_template_leaves_out_cost_no_turn(chatty: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is then found by its last line."""
    monkeypatch.setattr(
        chatty.tokenizer,
        "chat_templates",
        {"default": TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")},
    )
    session = chatty.session()
    session.chat([user("one")], greedy(3))
    long = len(session.append("thinking " * 60 + "</think>\nyes"))
    session.chat([user("two")], greedy(3), answer=lambda _: assistant("no"))
    assert len(session) < long
    output = session.chat([user("three")], greedy(2))
    text = chatty.tokenizer.decode(output.prompt_token_ids)  # type: ignore[union-attr]
    assert [word for word in ("one", "yes", "two", "no", "three") if word not in text] == []
