"""``/v1/completions`` against the engine on the same prompts: equal tokens, texts,
log-probabilities and ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.exact import TINY_PYTHON

from quire import AsyncLLM, RequestOutput, SamplingParams
from quire.base.outputs import Logprob
from quire.models.catalogue import bundled_models
from quire.server.openai.logprobs import Offsets, completion_logprobs

from .conftest import OPTIONS, Served, pages_free, serving, wait_for

PROMPT = "def fib(n):"
DIFFICULT = 'name = "naïve café 你好 👩‍👩‍👧 🇩🇪"\n'


def alone(llm: AsyncLLM, prompt: Any, **params: Any) -> RequestOutput:
    """What the engine gives for one prompt."""
    options = {name: params.pop(name) for name in ("adapter",) if name in params}
    return asyncio.run(llm.generate(prompt, SamplingParams(**params), **options))[0]


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE]."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def gathered(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that chunks make up."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            known = choices.setdefault(part["index"], {"text": "", "logprobs": None, "finish_reason": None})
            assert known["finish_reason"] is None, "nothing comes after the end"
            known["text"] += part["text"]
            known |= {"finish_reason": part["finish_reason"], "stop_reason": part["stop_reason"]}
            if part["logprobs"] is not None:
                before = known["logprobs"] or {name: [] for name in part["logprobs"]}
                known["logprobs"] = {name: before[name] + part["logprobs"][name] for name in before}
    return choices


def test_text_is_the_engines(client: httpx.Client, served: Served) -> None:
    body = complete(client, model="tiny-python", prompt=PROMPT, temperature=0, max_tokens=24)
    wanted = alone(served.llm, PROMPT, temperature=0, max_tokens=24)
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny-python"
    assert body["choices"] == [
        {
            "index": 0,
            "text": wanted.outputs[0].text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(wanted.prompt_token_ids)
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24


def test_ids_of_requests(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}, headers={"X-Request-Id": "mine-7"}
    )
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json()["id"] == "cmpl-mine-7"


def test_defaults(client: httpx.Client, served: Served) -> None:
    body = complete(client, prompt=PROMPT, seed=3, max_tokens=None, temperature=None, stop=None)
    wanted = alone(served.llm, PROMPT, seed=3)
    assert body["choices"][0]["text"] == wanted.outputs[0].text
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("as_ids", [False, True])
def test_many_prompts_and_samples(client: httpx.Client, served: Served, as_ids: bool) -> None:
    texts = [PROMPT, "class Stack:\n", "import os\n"]
    assert served.llm.tokenizer is not None
    prompts: list[Any] = [served.llm.tokenizer.encode(text) for text in texts] if as_ids else texts
    wanted = [alone(served.llm, prompt, n=2, seed=11, max_tokens=9) for prompt in prompts]
    body = {"prompt": prompts, "n": 2, "seed": 11, "max_tokens": 9}
    found = complete(client, **body)
    assert [choice["index"] for choice in found["choices"]] == list(range(6))
    expected = [sample.text for output in wanted for sample in output.outputs]
    assert [choice["text"] for choice in found["choices"]] == expected
    assert len(set(expected)) > 3
    assert found["usage"]["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in wanted)
    assert found["usage"]["completion_tokens"] == sum(
        len(sample.token_ids) for output in wanted for sample in output.outputs
    )
    streamed = gathered(events(client, **body))
    assert [streamed[index]["text"] for index in range(6)] == expected


def test_streams_say_the_same(client: httpx.Client) -> None:
    """With characters of several tokens, which come whole, and log-probabilities."""
    body = {"prompt": DIFFICULT * 2 + DIFFICULT[:14], "max_tokens": 40, "temperature": 0.9, "seed": 5, "logprobs": 3}
    whole = complete(client, **body)
    chunks = events(client, **body, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert len(chunks) > 20
    usage = chunks[-1]["usage"]
    assert {**usage, "prompt_tokens_details": 0} == {**whole["usage"], "prompt_tokens_details": 0}
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    (choice,) = whole["choices"]
    found = gathered(chunks)[0]
    assert found["text"] == choice["text"]
    assert found["finish_reason"] == choice["finish_reason"]
    assert found["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
    assert found["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=TINY_PYTHON)
    assert len({chunk["id"] for chunk in chunks}) == 1
    running = events(client, **body, stream_options={"continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in running][-1] == usage["completion_tokens"]
    assert "usage" not in events(client, **body)[0]


def test_stop_strings_do_not_leak(client: httpx.Client, served: Served) -> None:
    text = alone(served.llm, PROMPT, temperature=0, max_tokens=40).outputs[0].text
    stop = text[17:23]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": ["never there", stop]}
    (choice,) = complete(client, **body)["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    found = gathered(events(client, **body))[0]
    assert (found["text"], found["stop_reason"]) == (choice["text"], stop)
    kept = complete(client, **body, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == choice["text"] + stop


def test_other_fields_reach_the_engine(client: httpx.Client, served: Served) -> None:
    """Each of them changes what is generated, and as in the engine."""
    plain = {"seed": 2, "max_tokens": 12, "temperature": 1.5}
    texts = {alone(served.llm, PROMPT, **plain).outputs[0].text}
    tokens = alone(served.llm, PROMPT, **plain).outputs[0].token_ids
    for more in (
        {"top_k": 2},
        {"min_p": 0.2},
        {"top_p": 0.5},
        {"repetition_penalty": 5.0},
        {"presence_penalty": 2.0, "temperature": 0.1},
        {"frequency_penalty": 2.0, "temperature": 0.2},
        {"stop_token_ids": [tokens[2]]},
        {"logit_bias": {str(tokens[0]): -100.0}},
    ):
        found = complete(client, prompt=PROMPT, **{**plain, **more})["choices"][0]
        wanted = alone(served.llm, PROMPT, **{**plain, **more}).outputs[0]
        assert (found["text"], found["stop_reason"]) == (wanted.text, wanted.stop_reason), more
        assert found["finish_reason"] == wanted.finish_reason
        texts.add(wanted.text)
    assert len(texts) == 9
    ends = {"prompt": "x = 1\n<|end|>", "seed": 0, "max_tokens": 12, "logit_bias": {"0": 100}}
    assert complete(client, **ends)["usage"]["completion_tokens"] == 1
    assert complete(client, **ends, min_tokens=5)["usage"]["completion_tokens"] == 6
    ignoring = complete(client, **ends, ignore_eos=True, skip_special_tokens=False)
    assert ignoring["choices"][0]["text"] == "<|end|>" * 12


def test_logprobs(client: httpx.Client, served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 10, "seed": 4, "temperature": 1.8}
    found = complete(client, **body, logprobs=3)["choices"][0]
    wanted = alone(served.llm, PROMPT, **{k: v for k, v in body.items() if k != "prompt"}, logprobs=3).outputs[0]
    logprobs, tokenizer = found["logprobs"], served.llm.tokenizer
    assert wanted.logprobs is not None
    assert tokenizer is not None
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in wanted.token_ids]
    chosen = [entry[token].logprob for token, entry in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    assert logprobs["token_logprobs"] == pytest.approx(chosen, abs=TINY_PYTHON)
    for found_top, entry in zip(logprobs["top_logprobs"], wanted.logprobs, strict=True):
        assert found_top == pytest.approx(
            {tokenizer.token_text(t): one.logprob for t, one in entry.items()}, abs=TINY_PYTHON
        )
    assert {3, 4} >= {len(top) for top in logprobs["top_logprobs"]}
    offsets = [*logprobs["text_offset"], len(found["text"])]
    assert [found["text"][a:b] for a, b in itertools.pairwise(offsets)] == logprobs["tokens"]
    none = complete(client, **body, logprobs=0)["choices"][0]["logprobs"]
    assert none["token_logprobs"] == pytest.approx(chosen, abs=TINY_PYTHON)
    assert [list(top) for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]


def test_tokens_of_one_text_are_the_most_probable_one(served: Served) -> None:
    """Parts of characters have no text of their own."""
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    likely, unlikely, *_ = (token for token in range(4096) if tokenizer.token_text(token) == "\ufffd")
    entry = {likely: Logprob(logprob=-1.0, rank=1), unlikely: Logprob(logprob=-float("inf"), rank=2)}
    offsets = Offsets(tokenizer, [5], skip_special_tokens=True)
    found = completion_logprobs([likely], [entry], 2, offsets, tokenizer)
    assert found["top_logprobs"] == [{"\ufffd": -1.0}]
    assert completion_logprobs([unlikely], [entry], 2, offsets, tokenizer)["token_logprobs"] == [-9999.0]


def test_echo(client: httpx.Client, served: Served) -> None:
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(DIFFICULT)
    body = {"prompt": DIFFICULT, "max_tokens": 4, "temperature": 0, "echo": True}
    plain = complete(client, **body)["choices"][0]
    assert plain["text"] == DIFFICULT + alone(served.llm, DIFFICULT, temperature=0, max_tokens=4).outputs[0].text
    assert plain["logprobs"] is None
    found = complete(client, **body, logprobs=2)["choices"][0]
    assert found["text"] == plain["text"]
    logprobs = found["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    wanted = alone(served.llm, DIFFICULT, temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    assert wanted.prompt_logprobs is not None
    assert wanted.outputs[0].logprobs is not None
    every = [*ids, *wanted.outputs[0].token_ids]
    entries = [*wanted.prompt_logprobs, *wanted.outputs[0].logprobs]
    chosen = [None if entry is None else entry[token].logprob for token, entry in zip(every, entries, strict=True)]
    assert logprobs["token_logprobs"][1:] == pytest.approx(chosen[1:], abs=TINY_PYTHON)
    # Where a token begins: behind all characters that the tokens before it complete or begin.
    for count, offset in enumerate(logprobs["text_offset"]):
        before = b"".join(tokenizer.token_bytes.piece(token) for token in every[:count])
        assert offset == len([1 for byte in before if not 0x80 <= byte < 0xC0])
    streamed = gathered(events(client, **body, logprobs=2))[0]
    assert streamed["text"] == found["text"]
    assert streamed["logprobs"]["tokens"] == logprobs["tokens"]
    assert streamed["logprobs"]["text_offset"] == logprobs["text_offset"]
    by_ids = complete(client, **{**body, "prompt": [ids, ids[:3]]}, n=2)["choices"]
    assert [choice["text"] for choice in by_ids[:2]] == [plain["text"]] * 2
    assert by_ids[2]["text"].startswith(tokenizer.decode(ids[:3]))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_as_lm_eval_asks_for_them(client: httpx.Client, served: Served, max_tokens: int) -> None:
    """``local-completions``: token ids of context and continuation, and the log-probabilities of
    what is behind the context.
    """
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    contexts = [tokenizer.encode("def add(a, b):\n"), tokenizer.encode("import ")]
    ends = [tokenizer.encode("    return a + b\n"), tokenizer.encode("os\n")]
    body = complete(
        client,
        prompt=[a + b for a, b in zip(contexts, ends, strict=True)],
        temperature=0,
        max_tokens=max_tokens,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    assert body["usage"]["completion_tokens"] == 2 * max_tokens
    for choice, context, end in zip(body["choices"], contexts, ends, strict=True):
        found = choice["logprobs"]["token_logprobs"]
        found = found[len(context) : len(found) - max_tokens]

        async def score(context: list[int] = context, end: list[int] = end) -> list[float]:
            async with await served.llm.session(context) as session:
                return await session.score(end)

        assert found == pytest.approx(asyncio.run(score()), abs=TINY_PYTHON)
        assert choice["finish_reason"] == "length"
    if not max_tokens:
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == ["def add(a, b):\n    return a + b\n", "import os\n"]


def test_prompt_logprobs(client: httpx.Client, served: Served) -> None:
    found = complete(client, prompt=PROMPT, max_tokens=1, prompt_logprobs=2, echo=True, logprobs=4)["choices"][0]
    wanted = alone(served.llm, PROMPT, max_tokens=1, prompt_logprobs=2).prompt_logprobs
    assert wanted is not None
    assert found["prompt_logprobs"][0] is None
    for got, entry in zip(found["prompt_logprobs"][1:], wanted[1:], strict=True):
        assert entry is not None
        assert set(got) == {str(token) for token in entry}
        for token, one in entry.items():
            assert got[str(token)]["logprob"] == pytest.approx(one.logprob, abs=TINY_PYTHON)
            assert (got[str(token)]["rank"], got[str(token)]["decoded_token"]) == (one.rank, one.decoded_token)
    assert {4, 5} >= {len(top) for top in found["logprobs"]["top_logprobs"][1:]}


def test_long_answers(client: httpx.Client, served: Served) -> None:
    """Which are written off the event loop."""
    prompt = DIFFICULT * 25
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "n": 2}
    first, second = complete(client, **body)["choices"]
    assert served.llm.tokenizer is not None
    assert len(first["logprobs"]["tokens"]) == len(served.llm.tokenizer.encode(prompt)) > 1024
    assert first["text"] == second["text"] == prompt
    assert first["logprobs"] == second["logprobs"] == gathered(events(client, **body))[1]["logprobs"]


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("more", "allowed"),
    [
        ({"structured_outputs": {"regex": "(ab|cd){3}", "json": None}}, None),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"grammar": 'start: "left" | "right"'}}, ("left", "right")),
        ({"structured_outputs": {"json": SCHEMA}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, None),
        ({"response_format": {"type": "text"}, "max_tokens": 4}, None),
    ],
)
def test_structured_outputs(client: httpx.Client, more: dict[str, Any], allowed: tuple[str, ...] | None) -> None:
    body = {"prompt": PROMPT, "seed": 1, "max_tokens": 200, **more}
    (choice,) = complete(client, **body)["choices"]
    assert gathered(events(client, **body))[0]["text"] == choice["text"]
    assert choice["finish_reason"] == ("length" if "max_tokens" in more else "stop")
    if "max_tokens" in more:
        assert choice["text"]
    elif allowed is not None:
        assert choice["text"] in allowed
    elif "regex" in more.get("structured_outputs", {}):
        assert len(choice["text"]) == 6
        assert set(choice["text"]) <= set("abcd")
    else:
        assert json.loads(choice["text"])["a"] in (1, 22)


def test_cached_tokens(client: httpx.Client) -> None:
    def cached(**more: Any) -> int:
        usage = complete(client, prompt=DIFFICULT * 3, max_tokens=2, **more)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    def streamed(**more: Any) -> int:
        usage = events(client, prompt=DIFFICULT * 3, max_tokens=2, stream_options={"include_usage": True}, **more)[-1][
            "usage"
        ]
        return usage["prompt_tokens_details"]["cached_tokens"]

    for first, second in ((cached, streamed), (streamed, cached)):
        salts = [f"{first.__name__} {number}" for number in range(2)]
        assert first(cache_salt=salts[0]) == 0
        assert first(cache_salt=salts[0]) > 0
        assert second(cache_salt=salts[0]) > 0
        assert second(cache_salt=salts[1]) == 0


def test_a_session_goes_on(client: httpx.Client, served: Served) -> None:
    wanted = alone(served.llm, PROMPT, temperature=0, max_tokens=12)
    made = client.post("/v1/sessions", json={"prompt": PROMPT}).json()
    try:
        first = complete(client, session_id=made["id"], temperature=0, max_tokens=5)
        assert first["session_id"] == made["id"]
        rest = events(client, session_id=made["id"], temperature=0, max_tokens=7)
        assert first["choices"][0]["text"] + gathered(rest)[0]["text"] == wanted.outputs[0].text
        for name, value in (("echo", True), ("cache_salt", "x"), ("prompt", ["a", "b"]), ("n", 2), ("model", "no")):
            answer = client.post("/v1/completions", json={"session_id": made["id"], "stream": True, name: value})
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["param"] == name
        answer = client.post("/v1/completions", json={"session_id": "session-" + "0" * 32, "stream": True})
        assert answer.status_code == 404
    finally:
        client.delete(f"/v1/sessions/{made['id']}")
    wait_for(lambda: pages_free(served.llm))


def test_generation_config_counts_field_by_field(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled_models()["tiny-python"], folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"temperature": 1e-6, "top_k": 50, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(config))
    llm = AsyncLLM(folder, **OPTIONS)
    with serving(llm) as found:
        greedy = alone(llm, PROMPT, temperature=0, max_tokens=7).outputs[0].text
        assert complete(found.client, prompt=PROMPT)["choices"][0]["text"] == greedy
        hot = {"temperature": 2.0, "seed": 9}
        wanted = alone(llm, PROMPT, **hot, top_k=50, max_tokens=7).outputs[0].text
        assert complete(found.client, prompt=PROMPT, **hot)["choices"][0]["text"] == wanted != greedy
    asyncio.run(llm.close())


def test_adapters_by_name(served: Served) -> None:
    asyncio.run(served.llm.load_adapter("docs", "tiny-python-docstrings"))
    with serving(served.llm) as found:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12}
        wanted = alone(found.llm, PROMPT, temperature=0, max_tokens=12, adapter="docs").outputs[0].text
        answer = complete(found.client, model="docs", **body)
        assert (answer["model"], answer["choices"][0]["text"]) == ("docs", wanted)
        base = complete(found.client, model="tiny-python", **body)["choices"][0]["text"]
        assert base == alone(found.llm, PROMPT, temperature=0, max_tokens=12).outputs[0].text != wanted
    asyncio.run(served.llm.unload_adapter("docs"))


@pytest.fixture(scope="module")
def without_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / "ids"
    shutil.copytree(bundled_models()["tiny-python"], folder, ignore=shutil.ignore_patterns("tokenizer*"))
    llm = AsyncLLM(folder, **OPTIONS)
    with serving(llm) as found:
        yield found
    asyncio.run(llm.close())


def test_model_without_tokenizer(without_tokenizer: Served) -> None:
    client = without_tokenizer.client
    wanted = alone(without_tokenizer.llm, [5, 6, 7], temperature=0, max_tokens=3).outputs[0].token_ids
    choice = complete(client, prompt=[5, 6, 7], temperature=0, max_tokens=3, logprobs=1)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in wanted]
    for more, param in (({"prompt": "text"}, "prompt"), ({"echo": True}, "echo"), ({"stop": "x"}, "stop")):
        answer = client.post("/v1/completions", json={"prompt": [5], "stream": True, **more})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
