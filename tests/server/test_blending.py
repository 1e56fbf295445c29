"""``blend`` and ``POST /v1/warm`` over HTTP: what is blended, what is said of it, who sees it."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire import AsyncLLM, BlendCalibration, BlendParams, QualityLimits, SamplingParams, Segment
from quire.blend.calibration import BlendQuality
from quire.blend.retriever import ChunkTask
from quire.engine.blending import UNCALIBRATED
from quire.server.http.settings import ServerSettings
from quire.server.openai.generation import EncodedPrompt, encode, summed

from .conftest import Served, pages_free, serving, wait_for
from .test_prefix_salts import KEYS, headers

DOCUMENTS = [
    "def area(width, height):\n    return width * height\n\n" * 4,
    "class Stack:\n    def __init__(self):\n        self.items = []\n" * 5,
]
QUESTION = "# what is it\ndef test_"
LIMITS: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
BLEND = {"ratio": 0, "least": 1, "keep": False}
FIELDS = {"blended", "recomputed", "exact", "by_tier", "reason", "warning", "divergence", "unplaced"}


@pytest.fixture(autouse=True)
def nothing_is_kept(chat_llm: AsyncLLM) -> Iterator[None]:
    """Neither pages nor chunks."""
    yield
    wait_for(lambda: not chat_llm.engine.has_work)
    wait_for(lambda: pages_free(chat_llm))
    assert not chat_llm.engine.blending.under_way


@pytest.fixture(scope="module")
def apart(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm, ServerSettings(api_key=KEYS)) as found:
        yield found


@pytest.fixture(scope="module")
def shared(chat_llm: AsyncLLM) -> Iterator[Served]:
    with serving(chat_llm, ServerSettings(api_key=KEYS, share_prefix_cache=True)) as found:
        yield found


def post(served: Served, path: str, key: str = "first", **body: Any) -> Any:
    answer = served.client.post(f"/v1/{path}", json=body, headers=headers(key))
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refusal(served: Served, path: str, **body: Any) -> tuple[int, str | None, str | None]:
    answer = served.client.post(f"/v1/{path}", json=body)
    return answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]


def warm(served: Served, *segments: Any, key: str = "first", **more: Any) -> Any:
    return post(served, "warm", key, segments=list(segments), **more)["segments"]


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "segment": True, **more}


def about(*documents: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, documents), {"type": "text", "text": QUESTION}]}]


PROMPT = [part(DOCUMENTS[1]), part(DOCUMENTS[0]), {"text": QUESTION}]
ROADS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": about(*reversed(DOCUMENTS))}),
    "completion": ("completions", {"prompt": PROMPT}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("road", ROADS)
def test_prompts_are_blended(chat_served: Served, road: str, stream: bool) -> None:
    path, body = ROADS[road]
    kept = warm(chat_served, *DOCUMENTS)
    assert all(one["kept"] == one["tokens"] == one["computed"] >= 32 for one in kept)
    answers = post(chat_served, path, **body, **LIMITS, blend=BLEND, stream=stream)
    if stream:
        assert ["quire" in chunk for chunk in answers] == [False] * (len(answers) - 1) + [True]
    answer = answers[-1] if stream else answers
    found = answer["quire"]["blend"]
    tokens = sum(one["tokens"] for one in kept)
    assert set(found) == FIELDS
    assert found | {"exact": 0} == {
        "blended": tokens,
        "recomputed": 0,
        "exact": 0,
        "by_tier": {"memory": tokens},
        "reason": "",
        "warning": UNCALIBRATED,
        "divergence": None,
        "unplaced": [],
    }
    assert set(answer["quire"]) == {"reuse", "blend"}
    counted = chat_served.client.get("/metrics").text
    for name in ("blended", "recomputed"):
        (line,) = [line for line in counted.splitlines() if line.startswith(f"quire:{name}_tokens_total ")]
        assert float(line.split()[1]) == chat_served.llm.engine.snapshot()[f"quire:{name}_tokens_total"]
    assert chat_served.llm.engine.snapshot()["quire:blended_tokens_total"] >= tokens


def test_it_is_what_python_does(chat_served: Served) -> None:
    """Chats and parts: the same tokens, pieces and answers as those of ``LLM``."""
    params = BlendParams(ratio=0.2, least=1, keep=False)
    blend = {"ratio": 0.2, "least": 1, "keep": False}
    greedy = SamplingParams(**LIMITS)
    llm, messages = chat_served.llm, about(*DOCUMENTS)
    prompt = [Segment(DOCUMENTS[1]), "\n# then\n", Segment(DOCUMENTS[0]), QUESTION]
    sent = [{"text": one} if isinstance(one, str) else part(str(one.content)) for one in prompt]
    runs = [
        (
            lambda: llm.chat(messages, greedy, blend=params),
            lambda: post(chat_served, "chat/completions", messages=messages, blend=blend, **LIMITS),
        ),
        (
            lambda: llm.generate([prompt], greedy, blend=params),
            lambda: post(chat_served, "completions", prompt=sent, blend=blend, **LIMITS),
        ),
        (
            lambda: llm.generate([prompt], greedy),
            lambda: post(chat_served, "completions", prompt=sent, **LIMITS),
        ),
    ]
    for ours, theirs in runs:
        found = []
        for run in (ours, theirs):
            wait_for(lambda: pages_free(llm))
            warm(chat_served, *DOCUMENTS)
            found.append(asyncio.run(run()) if run is ours else run())  # type: ignore[arg-type]
        (output,), answer = found
        choice = answer["choices"][0]
        assert output.outputs[0].text == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
        assert answer["quire"].get("blend") == (None if output.blend is None else output.blend.as_dict())


def test_without_blend_marks_do_nothing(chat_served: Served) -> None:
    def asked(messages: Any, **more: Any) -> Any:
        answer = post(chat_served, "chat/completions", messages=messages, **LIMITS, **more)
        return answer["choices"], answer["usage"]["prompt_tokens"], set(answer["quire"])

    plain = [{"role": "user", "content": [{"type": "text", "text": text} for text in (*DOCUMENTS, QUESTION)]}]
    expected = asked(plain)
    assert expected[2] == {"reuse"}
    warm(chat_served, *DOCUMENTS)
    for blend in ({}, {"blend": False}, {"blend": None}):
        assert asked(about(*DOCUMENTS), **blend) == expected


def test_all_of_it_anew_is_exact(chat_served: Served) -> None:
    warm(chat_served, *DOCUMENTS)
    exact = post(chat_served, "completions", prompt=PROMPT, blend={**BLEND, "ratio": 1.0}, **LIMITS)
    plain = post(chat_served, "completions", prompt=PROMPT, cache_salt="x", **LIMITS)
    assert exact["choices"] == plain["choices"]
    blend = exact["quire"]["blend"]
    assert (blend["blended"], blend["exact"]) == (0, exact["usage"]["prompt_tokens"])


def test_forms_of_parts(chat_served: Served) -> None:
    """Token ids too; samples; an echo of all parts."""
    tokenizer = chat_served.llm.tokenizer
    assert tokenizer is not None
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in DOCUMENTS]
    assert [one["computed"] for one in warm(chat_served, ids[0], DOCUMENTS[1])] == [len(one) for one in ids]
    assert [one["computed"] for one in warm(chat_served, DOCUMENTS[0], ids[1])] == [0, 0]
    sent = [{"tokens": ids[1], "segment": True}, {"text": "\n", "segment": False}, part(DOCUMENTS[0]), {"text": "def"}]
    answer = post(chat_served, "completions", prompt=sent, blend=BLEND, echo=True, n=2, **LIMITS)
    assert answer["quire"]["blend"]["blended"] == sum(map(len, ids))
    assert [one["text"].startswith(f"{DOCUMENTS[1]}\n{DOCUMENTS[0]}def") for one in answer["choices"]] == [True] * 2
    # Prompts of other forms have no segments, and may yet hold texts that are kept.
    answer = post(chat_served, "completions", prompt=["a", ids[0] + [5, 6]], blend={**BLEND, "least": 16}, **LIMITS)
    several = answer["quire"]["blend"]
    assert set(several) == {"blended", "recomputed", "exact", "by_tier", "prompts"}
    assert [one["blended"] > 0 for one in several["prompts"]] == [False, True]
    for name in ("blended", "recomputed", "exact"):
        assert several[name] == sum(one[name] for one in several["prompts"])
    assert several["by_tier"] == {"memory": several["prompts"][1]["by_tier"]["memory"]}
    assert "at least 16" in several["prompts"][0]["reason"]
    one = post(chat_served, "completions", prompt=[{"text": "def "}, {"text": "f"}], **LIMITS)
    assert one["usage"]["prompt_tokens"] == len(tokenizer.encode("def ")) + len(
        tokenizer.encode("f", add_special_tokens=False)
    )


def test_texts_without_a_place_are_named(chat_served: Served) -> None:
    messages = [{"role": "user", "content": [part("\ue000"), part(DOCUMENTS[0])]}, {"role": "user", "content": "x"}]
    for stream in (False, True):
        answer = post(chat_served, "chat/completions", messages=messages, blend=BLEND, stream=stream, **LIMITS)
        blend = (answer[-1] if stream else answer)["quire"]["blend"]
        assert blend["unplaced"] == ["messages.0.content.0", "messages.0.content.1"]


def test_marks_of_both_kinds(chat_served: Served) -> None:
    """``cache_control`` and ``segment`` on one part: each does what it does alone, also where a
    pin ends behind a place at which the prompt is cut."""
    documents = [DOCUMENTS[0], "    return self.items\n" * 16]
    warm(chat_served, *documents)
    messages = about(*documents)
    messages[0]["content"][1]["cache_control"] = {"type": "ephemeral"}
    answer = post(chat_served, "chat/completions", messages=messages, blend={**BLEND, "ratio": 1}, **LIMITS)
    (hint,) = answer["quire"]["hints"]
    tokenizer = chat_served.llm.tokenizer
    assert tokenizer is not None
    pieces = ("<|user|>", documents[0], "\n", documents[1])
    tokens = sum(len(tokenizer.encode(one, add_special_tokens=False)) for one in pieces)
    assert tokens > len(tokenizer.encode("".join(pieces), add_special_tokens=False)), "cut, it has other tokens"
    assert (hint["id"], hint["status"], hint["tokens"]) == ("messages.0.content.1", "done", tokens)
    assert answer["quire"]["blend"]["unplaced"] == []


BAD: list[tuple[Any, str]] = [
    (1, "blend"),
    ("yes", "blend"),
    ([], "blend"),
    ({"ratio": 1.5}, "blend.ratio"),
    ({"ratio": -1}, "blend.ratio"),
    ({"ratio": True}, "blend.ratio"),
    ({"ratio": 10**400}, "blend.ratio"),
    ({"ratio": float("nan")}, "blend.ratio"),
    ({"ratio": "0.5"}, "blend.ratio"),
    ({"select": "best"}, "blend.select"),
    ({"select": ["v"]}, "blend.select"),
    ({"threshold": 0}, "blend.threshold"),
    ({"threshold": {}}, "blend.threshold"),
    ({"least": 0}, "blend.least"),
    ({"least": 1.5}, "blend.least"),
    ({"keep": 1}, "blend.keep"),
    ({"verify": 2}, "blend.verify"),
    ({"gate": 1}, "blend.gate"),
    ({"target": 0}, "blend.target"),
    ({"target": 0.1, "ratio": 0.15}, "blend.target"),
    ({"target": 0.1}, "blend.target"),  # the model is not calibrated
    ({"rate": 0.2}, "blend.rate"),
]
PARTS: list[tuple[Any, str]] = [
    ([{"text": "a"}, "b"], "prompt.1"),
    (["b", {"text": "a"}], "prompt.0"),
    ([{"text": "a", "tokens": [1]}], "prompt.0"),
    ([{"text": [1]}], "prompt.0"),
    ([{"tokens": "a"}], "prompt.0"),
    ([{"tokens": []}], "prompt.0"),
    ([{"text": "a", "segment": 1}], "prompt.0"),
    ([{"text": "a", "cache_control": {}}], "prompt.0"),
    ([{"type": "image_url", "text": "a"}], "prompt.0"),
    ([{}], "prompt.0"),
    ([{"text": ""}, {"text": ""}], "prompt"),
    ([{"text": "a"}, {"tokens": [99_999]}], "prompt"),
    ([{"text": "x " * 9000}, {"text": "x"}], "prompt"),
    ([{"text": "x" * 200_000, "segment": True}] * 3, "prompt"),
]
MARKS: list[tuple[Any, str]] = [
    ({"role": "user", "content": [part("a", segment="yes")]}, "messages.0.content.0.segment"),
    ({"role": "user", "content": [part("a")], "segment": True}, "messages.0.segment"),
]


def test_refusals(chat_served: Served) -> None:
    ran = chat_served.llm.engine.snapshot()["quire:prompt_tokens_total"]
    for blend, param in BAD:
        for path, body in ROADS.values():
            sent = json.dumps({**body, "blend": blend})
            answer = chat_served.client.post(f"/v1/{path}", content=sent, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, blend, answer.text)
    for prompt, param in PARTS:
        assert refusal(chat_served, "completions", prompt=prompt)[::2] == (400, param), str(prompt)[:80]
    for message, param in MARKS:
        assert refusal(chat_served, "chat/completions", messages=[message])[::2] == (400, param), message
    prefetch = {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [{"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0"}],
    }
    for path, body in ROADS.values():
        assert refusal(chat_served, path, **body, blend=True, kv_hints=prefetch, max_tokens=0)[::2] == (400, "blend")
    assert chat_served.llm.engine.snapshot()["quire:prompt_tokens_total"] == ran


def test_a_target(chat_served: Served) -> None:
    """What was measured beforehand decides; without that the answer names who measures."""
    answer = chat_served.client.post("/v1/completions", json={"prompt": PROMPT, "blend": {"target": 0.1}})
    assert "quire calibrate" in answer.json()["error"]["message"]
    blending, limits = chat_served.llm.engine.blending, QualityLimits()
    layer = blending.check_layer
    qualities = tuple(
        BlendQuality(
            layer=layer, ratio=ratio, mean_kl=kl, agreement=1.0, worst_agreement=1.0, equal_texts=1.0, cost=0.5
        )
        for ratio, kl in ((0.0, 0.5), (0.5, 0.05))
    )
    blending.calibration = BlendCalibration(layer=layer, probes=32, sampled=False, limits=limits, qualities=qualities)
    try:
        assert "quire:blend_calibrated 1.0" in chat_served.client.get("/metrics").text
        for given, recomputed, reason in (
            ({"target": 0.6}, 0.0, ""),
            ({"target": 0.1}, 0.5, ""),
            ({"target": 0.01}, 0.0, "no calibrated ratio has a mean KL of at most 0.01 nats"),
            ({"ratio": 0.2}, 0.0, "mean KL 0.5 nats (limit 0.05)"),
        ):
            warm(chat_served, *DOCUMENTS, cache_salt=str(given))
            body = {"prompt": PROMPT, "blend": {**given, "least": 1, "keep": False}, "cache_salt": str(given)}
            answer = post(chat_served, "completions", **body, **LIMITS)
            found = answer["quire"]["blend"]
            assert reason in found["reason"]
            assert (found["blended"] == 0) == bool(reason)
            whole = found["blended"] + found["recomputed"]
            assert found["recomputed"] == math.ceil(recomputed * whole - 1e-9)
    finally:
        blending.calibration = None


def test_sessions_are_not_blended(chat_served: Served) -> None:
    name = post(chat_served, "sessions", prompt="def f")["id"]
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": about("x")})):
        assert refusal(chat_served, path, session_id=name, blend=True, **body)[::2] == (400, "blend")
        assert post(chat_served, path, session_id=name, blend=False, **body, **LIMITS)["quire"].keys() == {"reuse"}
    assert refusal(chat_served, "completions", session_id=name, prompt=PROMPT)[::2] == (400, "prompt")
    chat_served.client.delete(f"/v1/sessions/{name}")


def test_edits_of_sessions_are_blended(chat_served: Served) -> None:
    made = post(chat_served, "sessions", prompt="".join(DOCUMENTS))
    name, before = made["id"], made["num_tokens"]
    blend = {"ratio": 0.0}
    done = post(chat_served, f"sessions/{name}/edit", span=[20, 30], text="", mode="blend", blend=blend)
    assert (done["mode"], done["exact"], done["num_tokens"]) == ("blend", False, before - 10)
    assert 0 < done["blended"] < before - 30
    chat_served.client.delete(f"/v1/sessions/{name}")


def test_a_model_that_cannot(chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the reason, which the capabilities tell too."""
    monkeypatch.setattr(chat_served.llm.engine.blending, "_refusal", "its layers cannot")
    for stream in (False, True):
        for path, body in ROADS.values():
            assert refusal(chat_served, path, **body, blend=True, stream=stream) == (400, "unsupported", "blend")
            assert post(chat_served, path, **body, blend=False, **LIMITS)["usage"]["completion_tokens"] == 4
    assert refusal(chat_served, "warm", segments=DOCUMENTS) == (400, "unsupported", "model")
    assert asyncio.run(chat_served.llm.capabilities())["engine_verbs"]["blending"] == "its layers cannot"
    monkeypatch.undo()
    assert asyncio.run(chat_served.llm.capabilities())["engine_verbs"]["blending"] == ""


def test_rows_that_do_not_come(chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is that of a full computation, and tells no path."""
    warm(chat_served, *DOCUMENTS)

    def broken(*_: Any) -> None:
        raise OSError(5, "I/O error", "/secret/path")

    expected = post(chat_served, "completions", prompt=PROMPT, cache_salt="x", **LIMITS)
    monkeypatch.setattr(ChunkTask, "pieces", broken)
    answer = post(chat_served, "completions", prompt=PROMPT, blend=BLEND, **LIMITS)
    assert answer["choices"] == expected["choices"]
    assert answer["quire"]["blend"]["blended"] == 0
    assert "did not come" in answer["quire"]["blend"]["reason"]
    assert "secret" not in json.dumps(answer)


# -- /v1/warm --------------------------------------------------------------------------------------


def test_warm(chat_served: Served) -> None:
    answer = post(chat_served, "warm", segments=[*DOCUMENTS, "a", DOCUMENTS[0]], model="tiny-chat")
    assert set(answer) == {"model", "segments"}
    assert answer["model"] == "tiny-chat"
    *long, short, again = answer["segments"]
    assert all(one["tokens"] == one["kept"] == one["computed"] for one in long)
    assert short == {"tokens": 1, "kept": 0, "computed": 0}
    assert again["kept"] == again["tokens"]
    assert "/v1/warm" in chat_served.client.get("/openapi.json").json()["paths"]


def test_warm_behind_what_prompts_begin_with(chat_served: Served) -> None:
    """It is tokenised as the beginning of a prompt, and prompts that begin so use it."""
    begin, document = "Notes on the yard.\n", DOCUMENTS[0]
    ids = chat_served.llm.tokenizer.encode(begin)
    for behind, computes in ((begin, True), (ids, False), ([*ids, 5], True)):
        (one,) = warm(chat_served, document, behind=behind, cache_salt="behind")
        assert (one["computed"] > 0) == computes
    body = {
        "prompt": [{"text": begin}, {"text": document, "segment": True}, {"text": "It"}],
        "blend": {"ratio": 0, "least": 1, "keep": False},
    }
    found = post(chat_served, "completions", **body, cache_salt="behind", **LIMITS)["quire"]["blend"]
    assert (found["blended"], found["recomputed"]) == (0, 0)
    assert found["by_tier"] == {"memory": one["tokens"]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "segments"),
        ({"segments": ["a"], "behind": [99_999]}, "behind"),
        ({"segments": ["a"], "behind": {}}, "behind"),
        ({"segments": ["a"], "behind": "x" * 900_000}, "behind"),
        ({"segments": []}, "segments"),
        ({"segments": "text"}, "segments"),
        ({"segments": ["a"] * 1025}, "segments"),
        ({"segments": ["a", 5]}, "segments.1"),
        ({"segments": ["a", [1.5]]}, "segments.1"),
        ({"segments": ["a", ""]}, "segments.1"),
        ({"segments": ["a", []]}, "segments.1"),
        ({"segments": ["a", "\ud800"]}, "segments.1"),
        ({"segments": ["a", [99_999]]}, "segments.1"),
        ({"segments": ["a", [-1]]}, "segments.1"),
        ({"segments": ["a", [5] * 5000]}, "segments.1"),
        ({"segments": ["a", "x " * 9000]}, "segments.1"),
        ({"segments": ["a", "x" * 900_000]}, "segments.1"),
        ({"segments": ["a"], "behind": ""}, "behind"),
        ({"segments": ["a"], "behind": []}, "behind"),
        ({"segments": ["a"], "behind": [5] * 5000}, "behind"),
        ({"segments": ["a"], "cache_salt": 3}, "cache_salt"),
        ({"segments": ["a"], "cache_salt": "\ud800"}, "cache_salt"),
        ({"segments": ["a"], "blend": True}, "blend"),
        ({"segments": ["a"], "model": "other"}, "model"),
    ],
)
def test_warm_refuses(chat_served: Served, body: Any, param: str) -> None:
    answer = chat_served.client.post("/v1/warm", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.json()["error"]["param"] == param, answer.text
    assert answer.status_code == (404 if "model" in body else 400)


def test_a_client_that_goes_away(chat_served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it wanted warmed ends with it."""
    engine = chat_served.llm.engine
    body = json.dumps({"segments": [[7, *range(8, 200), number] for number in range(9, 309)]}).encode()
    host, port = chat_served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/warm HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for(lambda: bool(engine.blending.under_way))
    wait_for(lambda: not engine.has_work)
    assert not engine.blending.under_way
    kept = warm(chat_served, [7, *range(8, 200), 308])
    assert kept[0]["computed"] == 194


# -- isolation -------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["warm", *ROADS]), st.sampled_from([None, "a"]), st.booleans()), min_size=1, max_size=3
)


@settings(max_examples=8)
@given(own=STEPS, others=STEPS)
def test_no_reply_depends_on_what_another_key_asked(
    apart: Served, own: list[tuple[str, str | None, bool]], others: list[tuple[str, str | None, bool]]
) -> None:
    def asked(key: str, step: tuple[str, str | None, bool]) -> Any:
        what, salt, keep = step
        if what == "warm":
            return warm(apart, *DOCUMENTS, key=key, cache_salt=salt)
        path, body = ROADS[what]
        answer = post(apart, path, key, **body, **LIMITS, cache_salt=salt, blend={**BLEND, "keep": keep})
        wait_for(lambda: not apart.llm.engine.has_work)
        return answer["quire"]["blend"]

    found: list[list[Any]] = []
    for disturbed in (False, True):
        wait_for(lambda: pages_free(apart.llm))
        replies = []
        for number, step in enumerate(own):
            for other in others[number:] if disturbed else ():
                asked("second", other)
            replies.append(asked("first", step))
        found.append(replies)
    assert found[0] == found[1]


def test_keys_see_their_own(apart: Served, shared: Served) -> None:
    def blended(served: Served, key: str, **more: Any) -> int:
        path, body = ROADS["chat"]
        return int(post(served, path, key, **body, **LIMITS, blend=BLEND, **more)["quire"]["blend"]["blended"])

    kept = sum(one["kept"] for one in warm(apart, *DOCUMENTS))
    assert blended(apart, "second") == 0
    assert blended(apart, "first", cache_salt="x") == 0
    assert [one["computed"] > 0 for one in warm(apart, *DOCUMENTS, key="second")] == [True, True]
    assert blended(apart, "first") == kept
    wait_for(lambda: pages_free(apart.llm))
    warm(shared, *DOCUMENTS)
    assert blended(shared, "second") == kept
    assert [one["computed"] for one in warm(shared, *DOCUMENTS, key="second")] == [0, 0]


# -- pieces ----------------------------------------------------------------------------------------


class Letters:
    """A tokenizer: 1 begins a prompt, and each letter is a token."""

    def encode(self, text: str) -> list[int]:
        return [1, *self.encode_inside(text)]

    def encode_inside(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def encode_part(self, text: str, first: bool) -> NDArray[np.int64]:
        return np.array([2] * first + self.encode_inside(text), dtype=np.int64)


def test_pieces_are_tokenised_by_themselves() -> None:
    """Only the first begins a prompt."""
    letters: Any = Letters()

    def encoded(part: Any, first: bool) -> NDArray[np.int64]:
        return encode(letters, part, inside=not first)

    found = EncodedPrompt.of(["ab", Segment("c"), [7, 8], Segment([9]), ""], encoded)
    start = [1]
    assert found.ids.tolist() == [*start, 97, 98, 99, 7, 8, 9]
    assert [isinstance(one, Segment) for one in found.given] == [False, True, False, True, False]
    pieces = [list(one.content if isinstance(one, Segment) else one) for one in found.given]
    assert pieces == [[*start, 97, 98], [99], [7, 8], [9], []]
    # Without segments it is one prompt, and no list of several.
    assert EncodedPrompt.of(["ab", [7]], encoded).given.tolist() == [*start, 97, 98, 7]
    assert EncodedPrompt.of(["a", Segment("b")], letters.encode_part).ids.tolist() == [2, 97, 98]


def test_sums_of_nothing() -> None:
    assert summed([], ("blended", "recomputed", "exact")) == {
        "blended": 0,
        "recomputed": 0,
        "exact": 0,
        "by_tier": {},
        "prompts": [],
    }
