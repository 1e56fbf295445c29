"""``quire.reuse`` beside ``usage``: on every road, and never a word of another key's texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.test_prefix_salts import KEYS, call, headers, leave, made

from quire import AsyncLLM
from quire.base.outputs import Miss
from quire.server.http.settings import ServerSettings

from .conftest import Served, pages_free, serving, wait_for

LIMITS: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
TEXT = "def area(width, height):\n    return width * height\n\n" * 4
OWN = "x = 1\n"
FOREIGN = "password = 'swordfish'\n"
FIELDS = {"cached", "by_tier", "replayed", "miss", "missed_at", "reason"}


@pytest.fixture(autouse=True)
def nothing_is_left(chat_llm: AsyncLLM) -> Iterator[None]:
    yield
    wait_for(lambda: pages_free(chat_llm))


@pytest.fixture(scope="module")
def apart(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm, ServerSettings(api_key=KEYS)) as found:
        yield found


@pytest.fixture(scope="module")
def shared(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm, ServerSettings(api_key=KEYS, share_prefix_cache=True)) as found:
        yield found


@pytest.fixture(scope="module")
def keyless(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm) as found:
        yield found


def complete(served: Served, text: Any, key: str = "first", **more: Any) -> dict[str, Any]:
    answer = call(served, key, "/v1/completions", prompt=text, **LIMITS, **more)
    assert set(answer["quire"]) == {"reuse"}
    return dict(answer["quire"]["reuse"])


def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = served.client.post(path, json={**LIMITS, **body, "stream": True}, headers=headers("first"))
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_it_agrees_with_the_usage(apart: Served) -> None:
    assert complete(apart, TEXT + OWN)["miss"] == "none"
    answer = call(apart, "first", "/v1/completions", prompt=TEXT + "y = 2\n", **LIMITS)
    reuse = answer["quire"]["reuse"]
    assert set(reuse) == FIELDS
    assert reuse["cached"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 10
    assert reuse["by_tier"] == {"pool": reuse["cached"]}
    assert (reuse["miss"], reuse["missed_at"], reuse["replayed"]) == ("other_text", reuse["cached"], 0)
    assert "('y = 2' here, 'x = 1' there)" in reuse["reason"]
    found = apart.client.get("/metrics", headers=headers("first")).text
    assert 'quire:reuse_misses_total{reason="other_text"}' in found
    assert 'quire:prompt_tokens_reused_total{tier="pool"}' in found


def test_of_several_prompts_each_is_told(apart: Served) -> None:
    complete(apart, TEXT + OWN)
    found = complete(apart, [TEXT + "y = 2\n", "a", TEXT + OWN])
    parts = found["prompts"]
    assert [part["miss"] for part in parts] == ["other_text", "none", "none"]
    assert all(set(part) == FIELDS for part in parts)
    assert found["cached"] == sum(part["cached"] for part in parts) == found["by_tier"]["pool"]
    assert found["replayed"] == 0


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("road", ["completions", "chat/completions"])
def test_the_last_chunk_of_a_stream_has_it(apart: Served, road: str, samples: int, usage: bool) -> None:
    chat = road.startswith("chat")
    prompt = {"messages": [{"role": "user", "content": TEXT}]} if chat else {"prompt": TEXT}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for known in (False, True):
        chunks = events(apart, f"/v1/{road}", n=samples, **prompt, **options)
        assert ["quire" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert bool(chunks[-1]["choices"]) != usage
        reuse = chunks[-1]["quire"]["reuse"]
        assert set(reuse) == FIELDS
        assert (reuse["cached"] > 10) == known


def test_streams_of_several_prompts_end_with_all_of_them(apart: Served) -> None:
    chunks = events(apart, "/v1/completions", prompt=[TEXT, "a"], n=2)
    assert ["quire" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks[-1]["quire"]["reuse"]["prompts"]) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_sessions(apart: Served, stream: bool) -> None:
    names = [made(apart, "first", prompt=TEXT) for _ in range(2)]
    path = f"/v1/sessions/{names[0]}/generate"
    one = events(apart, path)[-1] if stream else call(apart, "first", path, **LIMITS)
    assert set(one["quire"]["reuse"]) == FIELDS
    assert one["quire"]["reuse"]["cached"] > 10
    body = {"ids": names}
    path = "/v1/sessions/generate"
    both = events(apart, path, **body)[-1] if stream else call(apart, "first", path, **body, **LIMITS)
    assert [part["miss"] for part in both["quire"]["reuse"]["prompts"]] == ["none", "none"]
    for name in names:
        leave(apart, "first", name)


# -- isolation -------------------------------------------------------------------------------------

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["", OWN, FOREIGN, "y = 2\n", "y = 3\n"]),
        st.sampled_from([None, "a", "b"]),
        st.booleans(),
    ),
    max_size=4,
)


@settings(max_examples=12)
@given(own=CALLS, others=CALLS)
def test_no_reply_depends_on_what_another_key_asked(
    apart: Served, own: list[tuple[str, str | None, bool]], others: list[tuple[str, str | None, bool]]
) -> None:
    """The first key's replies are the same whether the second one asks between them or not."""

    def asked(served: Served, key: str, step: tuple[str, str | None, bool]) -> dict[str, Any]:
        text, salt, chat = step
        if not chat:
            return complete(served, TEXT + text, key, cache_salt=salt)
        messages = [{"role": "user", "content": TEXT + text}]
        answer = call(served, key, "/v1/chat/completions", messages=messages, cache_salt=salt, **LIMITS)
        return dict(answer["quire"]["reuse"])

    found: list[list[dict[str, Any]]] = []
    for disturbed in (False, True):
        wait_for(lambda: pages_free(apart.llm))
        replies = []
        for number, step in enumerate(own):
            for other in others[number:] if disturbed else ():
                asked(apart, "second", other)
            replies.append(asked(apart, "first", step))
        found.append(replies)
    assert found[0] == found[1]


def test_salts_of_one_key_are_its_own(apart: Served) -> None:
    complete(apart, TEXT + FOREIGN, "second", cache_salt="x")
    assert complete(apart, TEXT + FOREIGN, "first", cache_salt="y")["miss"] == "none"
    found = complete(apart, TEXT + FOREIGN, "second", cache_salt="y")
    assert (found["miss"], found["cached"]) == ("other_salt", 0)
    assert found["missed_at"] > 10
    assert "swordfish" not in found["reason"]


def test_whoever_shares_the_cache_gets_no_quotes(shared: Served) -> None:
    """Counts are shared there, and texts are not."""
    complete(shared, TEXT + FOREIGN, "second")
    found = complete(shared, TEXT + OWN, "first")
    assert (found["miss"], found["missed_at"]) == ("other_text", found["cached"])
    assert found["reason"].endswith("differs from a text that was computed before")
    # Another client's salt is not even counted.
    complete(shared, TEXT + FOREIGN + OWN, "second", cache_salt="x")
    found = complete(shared, TEXT + FOREIGN + OWN, "first", cache_salt="y")
    assert (found["miss"], found["missed_at"]) == ("none", None)


def test_without_keys_all_are_one_client(keyless: Served) -> None:
    """As for sessions, which all may list."""
    complete(keyless, TEXT + FOREIGN)
    assert "swordfish" in complete(keyless, TEXT + "password = 'tuna'\n")["reason"]
    assert complete(keyless, TEXT + OWN, cache_salt="x")["miss"] == Miss.OTHER_SALT
