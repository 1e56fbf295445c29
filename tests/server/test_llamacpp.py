"""llama-server's API, as its clients use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import AsyncLLM
from quire.server.http.settings import ServerSettings
from quire.server.openai import generation
from quire.text.fill_middle import FillTokens

from .conftest import OPTIONS, Served, serving, shallow_copy

PROMPT = "def add(a, b):\n    return a + b\n" * 4
GREEDY = {"temperature": 0, "n_predict": 6}


@pytest.fixture(scope="module")
def client(chat_llm: AsyncLLM) -> Iterator[httpx.Client]:
    with serving(chat_llm, ServerSettings(served_model_name="tiny")) as served:
        yield served.client


@pytest.fixture(scope="module")
def stored(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a state directory."""
    state = tmp_path_factory.mktemp("state")
    llm = AsyncLLM(chat_folder, state_dir=str(state), **{**OPTIONS, "max_num_seqs": 4})
    with serving(llm) as served:
        yield served
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model whose special tokens are those for filling in."""
    folder = tmp_path_factory.mktemp("models") / "fill"
    shallow_copy(folder, "*.jinja", "tokenizer_config.json", "generation_config.json")
    file = folder / "tokenizer.json"
    text = file.read_text()
    for own, name in (("pad", "fim_prefix"), ("user", "fim_suffix"), ("assistant", "fim_middle"), ("end", "fim_pad")):
        text = text.replace(f"<|{own}|>", f"<|{name}|>")
    file.write_text(text)
    llm = AsyncLLM(folder, **OPTIONS)
    with serving(llm) as served:
        yield served
    asyncio.run(llm.close())


def post(client: httpx.Client, path: str = "/completion", **body: Any) -> Any:
    found = client.post(path, json={**GREEDY, **body} if path in ("/completion", "/infill") else body)
    assert found.status_code == 200, found.text
    return found.json()


def refused(client: httpx.Client, path: str = "/completion", status: Any = 400, **body: Any) -> dict[str, Any]:
    found = client.post(path, json=body)
    assert found.status_code == status, found.text
    return dict(found.json()["error"])


def events(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    found = client.post("/completion", json={**GREEDY, "stream": True, **body})
    assert found.status_code == 200, found.text
    blocks = found.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


# -- /completion -----------------------------------------------------------------------------------


def test_a_completion_is_that_of_openais_endpoint(client: httpx.Client) -> None:
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    theirs = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "max_tokens": 6}).json()
    found = post(client, prompt=PROMPT, return_tokens=True)
    assert found["content"] == theirs["choices"][0]["text"]
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()["content"] == found["content"]
    assert (found["stop"], found["stop_type"], found["stopping_word"], found["truncated"]) == (True, "limit", "", False)
    assert (found["tokens_evaluated"], found["tokens_predicted"], found["prompt"]) == (len(ids), 6, PROMPT)
    assert (found["index"], found["id_slot"], found["model"]) == (0, -1, "tiny")
    assert found["has_new_line"] == ("\n" in found["content"])
    times = found["timings"]
    assert times["cache_n"] + times["prompt_n"] == len(ids)
    assert times["cache_n"] == found["tokens_cached"] > 0, "it has just been computed"
    assert times["predicted_n"] == 6
    assert times["predicted_ms"] > 0 < times["prompt_ms"]
    assert post(client, prompt=PROMPT)["tokens"] == []
    assert post(client, "/completions", prompt="x", n_predict=1)["tokens_predicted"] == 1


def test_a_stream_has_the_same_text_and_ends_with_the_whole(client: httpx.Client) -> None:
    whole = post(client, prompt=PROMPT, return_tokens=True)
    *pieces, last = events(client, prompt=PROMPT, timings_per_token=True)
    assert "".join(one["content"] for one in pieces) == whole["content"]
    assert [token for one in pieces for token in one["tokens"]] == whole["tokens"]
    assert not any(one["stop"] for one in pieces)
    assert [one["tokens_predicted"] for one in pieces][-1] == 6
    assert all(one["timings"]["predicted_n"] == one["tokens_predicted"] for one in pieces)
    assert (last["stop"], last["content"], last["tokens"]) == (True, "", [])
    assert last["generation_settings"] == {**whole["generation_settings"], "stream": True, "timings_per_token": True}
    assert last["stop_type"] == "limit"


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "in a session"])
def test_a_stream_tells_how_far_the_prompt_is(
    path: str, client: httpx.Client, chat_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PROGRESS", 0.001)
    # A step takes 1 ms at least, so the prompt is seen under way.
    text, is_chat = f"{path} " * 300, "chat" in path or "session" in path
    body: dict[str, Any] = {"return_progress": True, "max_tokens": 4, "temperature": 0, "stream": True}
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    if path == "in a session":
        body["session_id"] = client.post("/v1/sessions", json={}).json()["id"]
        path = "/v1/chat/completions"
    found = client.post(path, json=body)
    assert found.status_code == 200, found.text
    blocks = [block.removeprefix("data: ") for block in found.text.removesuffix("\n\n").split("\n\n")]
    chunks = [json.loads(block) for block in blocks if block != "[DONE]"]
    told = [one["prompt_progress"] for one in chunks if "prompt_progress" in one]
    times = chunks[-1]["timings"]
    total = times["prompt_n"] + times["cache_n"]
    assert told
    assert {one["total"] for one in told} == {total}
    done = [one["processed"] for one in told]
    assert done == sorted(done)
    assert all(one["cache"] <= one["processed"] <= total for one in told)
    assert "prompt_progress" in chunks[0]
    assert times["predicted_n"] > 0
    if "session_id" in body:
        client.delete(f"/v1/sessions/{body['session_id']}")
    refused = client.post("/v1/chat/completions", json={**body, "messages": [], "session_id": "sess-none"})
    assert refused.status_code in (400, 404), "a refusal has its status"


def test_an_answer_that_has_begun_goes_on(client: httpx.Client) -> None:
    """The prompt is the template's, and the beginning behind it. ollama goes on without being
    asked."""
    said = [{"role": "user", "content": "def add(a, b):"}, {"role": "assistant", "content": "    retu"}]
    chat: dict[str, Any] = {"messages": said, "temperature": 0, "max_tokens": 6, "continue_final_message": True}
    found = client.post("/v1/chat/completions", json=chat).json()
    prompt = post(client, "/apply-template", messages=said[:1])["prompt"] + "    retu"
    ids = client.post("/tokenize", json={"content": prompt, "parse_special": True}).json()["tokens"]
    wanted = post(client, prompt=ids)["content"]
    assert found["choices"][0]["message"]["content"] == wanted
    assert client.post("/apply-template", json=chat).json()["prompt"] == prompt
    assert client.post("/v1/chat/completions", json={**chat, "add_generation_prompt": False}).json()["choices"][0][
        "message"
    ] == {"role": "assistant", "content": wanted, "refusal": None}
    body = {"model": "tiny", "messages": said, "stream": False, "options": {"temperature": 0, "num_predict": 6}}
    assert client.post("/api/chat", json=body).json()["message"]["content"] == wanted
    session = client.post("/v1/sessions", json={}).json()["id"]
    for wrong in ({"messages": said[:1]}, {"messages": said[1:]}, {"session_id": session}):
        answer = client.post("/v1/chat/completions", json={**chat, **wrong})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in ("continue_final_message", "messages")
    client.delete(f"/v1/sessions/{session}")


def test_settings_are_those_that_counted(client: httpx.Client) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "repeat_penalty": 1.5,
    }
    given |= {"presence_penalty": 0.5, "frequency_penalty": 0.25, "n_predict": 2, "stop": ["zz"], "ignore_eos": True}
    settings = post(client, prompt="x", **given)["generation_settings"]
    assert {name: settings[name] for name in given} == given
    assert post(client, prompt="x", stop=["", "zz"])["generation_settings"]["stop"] == ["zz"]
    assert post(client, prompt="x", seed=-1)["generation_settings"]["seed"] == 0xFFFFFFFF
    assert post(client, prompt="x", seed=0xFFFFFFFF)["generation_settings"]["seed"] == 0xFFFFFFFF


def test_seeds_decide(client: httpx.Client) -> None:
    def texts(seed: int) -> str:
        return str(post(client, prompt="x", seed=seed, temperature=1.0, n_predict=12)["content"])

    assert texts(1) == texts(1)
    assert len({texts(seed) for seed in range(4)}) > 1


def test_prompts_are_texts_tokens_and_mixtures(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", content="x = 1\n")["tokens"]
    text = post(client, prompt="x = 1\n")["content"]
    assert post(client, prompt=ids)["content"] == text
    assert post(client, prompt={"prompt_string": "x = 1\n"})["content"] == text
    two = post(client, prompt=[ids, "x = 1\n"])
    assert [(one["index"], one["content"]) for one in two] == [(0, text), (1, text)]
    assert post(client, prompt=["x = 1\n"])["content"] == text, "one prompt in a list has one answer"
    mixed = post(client, prompt=[*ids, "y = ", 7], n_predict=1)
    assert mixed["tokens_evaluated"] == len(ids) + len(post(client, "/tokenize", content="y = ")["tokens"]) + 1
    assert len(post(client, prompt="x", n_cmpl=2, n_predict=1)) == 2
    streamed = events(client, prompt=["x = 1\n", "y"])
    assert {one["index"] for one in streamed} == {0, 1}
    assert "".join(one["content"] for one in streamed if one["index"] == 0) == text


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], [1.5], ["x", {}], {"prompt_string": 3}, None, True])
def test_a_prompt_that_is_none_is_refused(client: httpx.Client, prompt: Any) -> None:
    assert refused(client, prompt=prompt)["param"].startswith("prompt")


def test_ends_are_told(client: httpx.Client) -> None:
    text = post(client, prompt=PROMPT, n_predict=6)["content"]
    stop = text[2:5]
    found = post(client, prompt=PROMPT, stop=[stop])
    assert (found["stop_type"], found["stopping_word"], found["content"]) == ("word", stop, text.partition(stop)[0])
    end = client.post("/tokenize", json={"content": "<|end|>"}).json()["tokens"]
    found = post(client, prompt=PROMPT, logit_bias=[[end[0], 100]])
    assert (found["stop_type"], found["content"]) == ("eos", "")


def test_biases_are_pairs_or_an_object_of_tokens_or_texts(client: httpx.Client) -> None:
    first, second = post(client, prompt=PROMPT, n_predict=2, return_tokens=True)["tokens"]
    text = post(client, "/detokenize", tokens=[first])["content"]
    for banned in ([[first, False]], [[text, False]], {str(first): -100}, {text: False}):
        found = post(client, prompt=PROMPT, n_predict=1, logit_bias=banned, return_tokens=True)
        assert found["tokens"] != [first], banned
    assert second is not None
    for wrong in ([[first]], [[1.5, 1]], [[first, True]], [[first, "x"]], "x"):
        assert refused(client, prompt="x", logit_bias=wrong)["param"] == "logit_bias"


def test_probabilities_name_their_tokens(client: httpx.Client) -> None:
    found = post(client, prompt=PROMPT, n_probs=3, n_predict=4, return_tokens=True)
    listed = found["completion_probabilities"]
    assert [one["id"] for one in listed] == found["tokens"]
    for one in listed:
        assert len(one["top_logprobs"]) == 3
        best = one["top_logprobs"][0]
        assert best["id"] == one["id"], "greedy"
        assert best["logprob"] == one["logprob"] <= 0
        assert bytes(best["bytes"]).decode() == best["token"] == one["token"]
    streamed = events(client, prompt=PROMPT, n_probs=3, n_predict=4)
    assert [one for event in streamed for one in event["completion_probabilities"]] == listed
    assert refused(client, prompt="x", n_probs=21)["param"] == "n_probs"


def test_forms(client: httpx.Client) -> None:
    found = post(client, prompt="x", grammar='root ::= "ab" | "cd"', n_predict=-1)
    assert found["content"] in ("ab", "cd")
    assert found["stop_type"] == "eos"
    assert found["generation_settings"]["grammar"] == 'root ::= "ab" | "cd"'
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    assert json.loads(post(client, prompt="x", json_schema=schema, n_predict=30)["content"])["a"] in (1, 2)


def test_an_answer_may_be_cut_to_fields(client: httpx.Client) -> None:
    found = post(client, prompt="x", response_fields=["content", "generation_settings/n_predict", "nothing/here"])
    assert found.keys() == {"content", "generation_settings/n_predict"}
    assert found["generation_settings/n_predict"] == 6
    *_, last = events(client, prompt="x", response_fields=["stop_type"])
    assert last == {"stop_type": "limit"}


def test_without_a_limit_it_goes_on_and_with_0_it_only_computes(client: httpx.Client) -> None:
    end = client.post("/tokenize", json={"content": "<|end|>"}).json()["tokens"]
    limits = [post(client, prompt="x", n_predict=limit, logit_bias=[[end[0], 100]]) for limit in (-1, None)]
    assert [one["generation_settings"]["n_predict"] for one in limits] == [-1, -1]
    prompt = "# nobody asked for this before\n" * 4
    found = post(client, prompt=prompt, n_predict=0, stream=True)
    assert (found["content"], found["tokens_predicted"], found["tokens_cached"]) == ("", 0, 0)
    assert found["generation_settings"]["n_predict"] == 0
    assert post(client, prompt=prompt, n_predict=1)["timings"]["prompt_n"] == 1


def test_a_prompt_may_be_computed_afresh(client: httpx.Client) -> None:
    first = post(client, prompt=PROMPT)
    again = post(client, prompt=PROMPT, cache_prompt=False)
    assert again["content"] == first["content"]
    assert again["timings"]["prompt_n"] == again["tokens_evaluated"]
    assert post(client, prompt=PROMPT)["timings"]["prompt_n"] == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"n_indent": 4}, "n_indent"),
        ({"t_max_predict_ms": 10}, "t_max_predict_ms"),
        ({"n_cache_reuse": 256}, "n_cache_reuse"),
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"samplers": ["top_k", "temperature"]}, "samplers"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"session_id": "x"}, "session_id"),
        ({"echo": True}, "echo"),
        ({"logprobs": 2}, "logprobs"),
        ({"input_suffix": "x"}, "input_suffix"),
        ({"repeat_last_n": 64, "repeat_penalty": 1.5}, "repeat_last_n"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"id_slot": 99}, "id_slot"),
        ({"id_slot": -2}, "id_slot"),
        ({"id_slot": 0, "n_cmpl": 2}, "id_slot"),
        ({"id_slot": 0, "prompt": ["x", "y"]}, "id_slot"),
        ({"n_predict": -5}, "n_predict"),
        ({"temperature": -1}, "temperature"),
        ({"model": "other"}, "model"),
    ],
)
def test_nothing_is_ignored_that_would_change_the_text(client: httpx.Client, fields: dict[str, Any], name: str) -> None:
    status = 404 if name == "model" else 400
    assert refused(client, status=status, **{"prompt": "x", **fields})["param"] == name


def test_what_asks_for_nothing_is_taken(client: httpx.Client) -> None:
    plain = post(client, prompt="x = 1")["content"]
    nothing: dict[str, Any] = {"mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "dry_multiplier": 0.0, "lora": []}
    nothing |= {"n_keep": 4, "n_discard": 0, "xtc_probability": 0, "t_max_predict_ms": 0, "cache_prompt": True}
    nothing |= {"repeat_last_n": 64, "repeat_penalty": 1.0, "n_probs": 0, "grammar": "", "stop": [], "id_slot": -1}
    nothing |= {"n_cache_reuse": 0, "post_sampling_probs": False, "logit_bias": []}
    assert post(client, prompt="x = 1", **nothing)["content"] == plain
    assert refused(client, prompt="x " * 5000)["code"] == "context_length_exceeded"


# -- slots -----------------------------------------------------------------------------------------

OTHER = PROMPT + "x = 2\n"


def action(client: httpx.Client, slot: int, name: str, **body: Any) -> httpx.Response:
    return client.post(f"/slots/{slot}?action={name}", json=body)


def computed(client: httpx.Client, **body: Any) -> int:
    times = post(client, **body)["timings"]
    return int(times["prompt_n"])


def test_a_slot_goes_on_where_prompts_agree(stored: Served) -> None:
    client = stored.client
    length = len(post(client, "/tokenize", content=PROMPT)["tokens"])
    more = len(post(client, "/tokenize", content=OTHER)["tokens"]) - length
    plain = [post(client, prompt=text, cache_prompt=False)["content"] for text in (PROMPT + "y", OTHER)]
    first = post(client, prompt=PROMPT + "y", id_slot=1)
    assert (first["id_slot"], first["content"]) == (1, plain[0])
    second = post(client, prompt=OTHER, id_slot=1)
    assert second["content"] == plain[1]
    assert second["timings"]["prompt_n"] <= more + 1
    assert computed(client, prompt=OTHER, id_slot=1) == 1, "the logits behind the last token"
    assert computed(client, prompt=OTHER, id_slot=1, cache_prompt=False) == length + more
    assert post(client, prompt=OTHER, id_slot=1, n_predict=0)["tokens_predicted"] == 0
    listed = client.get("/slots").json()
    assert [one["id"] for one in listed] == [0, 1, 2, 3]
    assert not any(one["is_processing"] for one in listed)
    assert [one.get("num_tokens") for one in listed] == [None, length + more, None, None]
    session = client.get(f"/v1/sessions/{listed[1]['session_id']}").json()
    assert (session["labels"], session["name"]) == ({"slot": "1"}, "slot 1")
    assert action(client, 1, "erase").json() == {"id_slot": 1, "n_erased": length + more}
    assert action(client, 1, "erase").json() == {"id_slot": 1, "n_erased": 0}
    assert "session_id" not in client.get("/slots").json()[1]


def test_a_slot_is_saved_and_restored_under_a_name(stored: Served) -> None:
    client = stored.client
    length = len(post(client, "/tokenize", content=PROMPT)["tokens"])
    post(client, prompt=PROMPT, id_slot=0, cache_prompt=False)
    saved = action(client, 0, "save", filename="one.bin").json()
    assert saved["n_saved"] == length + GREEDY["n_predict"]
    assert saved["n_written"] > 0 < saved["timings"]["save_ms"]
    assert "one.bin" in client.get("/v1/branches").text
    post(client, prompt="# another text", id_slot=0)
    restored = action(client, 2, "restore", filename="one.bin").json()
    assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (
        2,
        saved["n_saved"],
        saved["n_written"],
    )
    page = stored.llm.config.page_size
    whole = len(post(client, "/tokenize", content=OTHER)["tokens"])
    # Full pages are in the store, and the prompts agree up to a token of the answer.
    assert computed(client, prompt=OTHER, id_slot=2) < whole - length + 2 * page
    assert action(client, 2, "save", filename="one.bin").status_code == 200, "a file is written over"
    assert computed(client, prompt="# another text", id_slot=0) == 1, "slot 0 is as it was"


def test_what_slots_refuse(client: httpx.Client, stored: Served) -> None:
    assert refused(client, "/slots/0?action=save", 501, filename="x")["message"].startswith(
        "slots are saved in the store"
    )
    assert post(client, prompt="x", id_slot=3)["id_slot"] == 3, "slots work without a store"
    assert refused(stored.client, "/slots/3?action=save", 404, filename="x")["message"].startswith("slot 3 is empty")
    assert refused(stored.client, "/slots/0?action=save")["param"] == "filename"
    assert refused(stored.client, "/slots/0?action=restore", 404, filename="none")["param"] == "filename"
    post(stored.client, prompt="x", id_slot=0)
    for name in ("../x", "/x", "", 3):
        assert refused(stored.client, "/slots/0?action=save", filename=name)["param"] == "filename"
    assert refused(stored.client, "/slots/4?action=erase")["param"] == "id_slot"
    assert refused(stored.client, "/slots/0?action=copy")["param"] == "action"
    assert refused(client, "/props", 501)["code"] == "unsupported"


async def _together(served: Served, *bodies: dict[str, Any]) -> list[tuple[dict[str, Any], list[bool]]]:
    async with httpx.AsyncClient(base_url=served.url, timeout=60, trust_env=False) as client:

        async def one(body: dict[str, Any]) -> tuple[dict[str, Any], list[bool]]:
            async with client.stream("POST", "/completion", json={**GREEDY, "stream": True, **body}) as answer:
                busy: list[bool] = []
                last: dict[str, Any] = {}
                async for line in answer.aiter_lines():
                    if line:
                        busy = busy or [slot["is_processing"] for slot in (await client.get("/slots")).json()]
                        last = json.loads(line.removeprefix("data: "))
            return last, busy

        return await asyncio.gather(*map(one, bodies))


def test_requests_for_one_slot_wait_for_each_other(stored: Served) -> None:
    long = {"prompt": PROMPT, "n_predict": 40, "ignore_eos": True, "id_slot": 3}
    post(stored.client, prompt="x", id_slot=3)
    found = asyncio.run(_together(stored, long, long))
    assert [last["tokens_predicted"] for last, _ in found] == [40, 40]
    assert all(busy[3] for _, busy in found), "the slot is in use"
    ((_, busy),) = asyncio.run(_together(stored, {**long, "id_slot": -1}))
    assert sum(busy) == 1, "a request without a slot counts too"


# -- the others ------------------------------------------------------------------------------------


def test_properties(client: httpx.Client) -> None:
    found = client.get("/props").json()
    assert found["total_slots"] == 32
    assert "<|assistant|>" in found["chat_template"]
    assert (found["model_alias"], found["model_path"]) == ("tiny", "tiny-chat")
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["eos_token"] == "<|end|>"
    assert found["build_info"].startswith("quire-")
    default = found["default_generation_settings"]
    assert default["n_ctx"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    sent = client.post("/completion", json={"prompt": "x", "stop": ["\n"]}).json()["generation_settings"]
    assert default["params"] == {**sent, "stop": []}, "as a request without parameters"
    assert client.get("/models").json() == client.get("/v1/models").json()
    assert client.get("/v1/health").json() == {"status": "ok"}


def test_templates_are_applied(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi <|end|>"}]
    prompt = post(client, "/apply-template", messages=messages)["prompt"]
    assert prompt == "<|user|>hi <|end|><|end|><|assistant|>"
    assert post(client, "/apply-template", messages=messages, add_generation_prompt=False)["prompt"] == prompt[:-13]
    assert refused(client, "/apply-template", messages=[])["param"] == "messages"
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    said = client.post("/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert post(client, prompt=post(client, "/apply-template", messages=chat["messages"])["prompt"])["content"] == said


def test_tokens_there_and_back(client: httpx.Client) -> None:
    text = "x = 'é 媽 🤗' <|end|>"
    tokens = post(client, "/tokenize", content=text)["tokens"]
    assert tokens == client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert post(client, "/detokenize", tokens=tokens)["content"] == text
    pieces = post(client, "/tokenize", content=text, with_pieces=True)["tokens"]
    assert [one["id"] for one in pieces] == tokens
    parts = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
    assert b"".join(parts).decode() == text
    assert any(isinstance(one["piece"], list) for one in pieces), "a part of a character"
    assert post(client, "/tokenize", content="<|end|>", parse_special=False)["tokens"] != tokens[-1:]
    assert post(client, "/tokenize", content="")["tokens"] == []
    assert refused(client, "/tokenize", content="x", prompt="x")["param"] == "prompt"


def test_text_between_is_filled_in(fill: Served) -> None:
    client, tokenizer = fill.client, fill.llm.tokenizer
    tokens = FillTokens.of(tokenizer)
    assert tokens is not None
    assert tokenizer is not None
    # The texts are not the tokens that they spell.
    before, after = "def f(): <|fim_suffix|>\n", "\nf()"
    found = post(client, "/infill", input_prefix=before, input_suffix=after, prompt="    ", return_tokens=True)
    prefix, suffix = (
        client.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
        for text in (before + "    ", after)
    )
    ids = [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]
    assert found["tokens_evaluated"] == len(ids)
    assert found["tokens"] == post(client, prompt=ids, return_tokens=True)["tokens"]
    extra = [{"filename": "a.py", "text": "A = 1"}, {"text": "B = 2\n"}]
    others = [one for text in ("A = 1\n", "B = 2\n") for one in post(client, "/tokenize", content=text)["tokens"]]
    with_extra = post(client, "/infill", input_prefix=before, input_suffix=after, prompt="    ", input_extra=extra)
    assert with_extra["tokens_evaluated"] == len(others) + len(ids)
    (end,) = tokens.ends
    ended = post(client, "/infill", input_prefix="x", input_suffix="", logit_bias=[[end, 100]])
    assert (ended["stop_type"], ended["content"]) == ("eos", "")
    openai = {"prompt": before + "    ", "suffix": after, "temperature": 0, "max_tokens": 6}
    assert client.post("/v1/completions", json=openai).json()["choices"][0]["text"] == found["content"]
    options = {"temperature": 0, "num_predict": 6}
    ollama = {"model": "fill", "prompt": before + "    ", "suffix": after, "stream": False, "options": options}
    assert client.post("/api/generate", json=ollama).json()["response"] == found["content"]
    assert refused(client, "/v1/completions", prompt=["x"], suffix="y")["param"] == "prompt"
    assert refused(client, "/v1/completions", prompt="x", suffix="y", echo=True)["param"] == "echo"
    assert "insert" in client.post("/api/show", json={"model": "fill"}).json()["capabilities"]


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 1, "text": "x"}, {"filename": "x", "text": 1}])
def test_what_infill_refuses(fill: Served, client: httpx.Client, extra: dict[str, Any]) -> None:
    body = {"input_prefix": "x", "input_suffix": "y"}
    assert refused(fill.client, "/infill", **body, input_extra=[extra])["param"].startswith("input_extra.0")
    assert refused(fill.client, "/infill", input_prefix="x")["param"] == "input_suffix"
    assert refused(client, "/infill", **body)["message"].startswith("input_suffix is not supported: this model has no")
    assert refused(client, "/v1/completions", prompt="x", suffix="y")["code"] == "unsupported_parameter"


def test_a_model_may_have_several_names(chat_llm: AsyncLLM) -> None:
    with serving(chat_llm, ServerSettings(served_model_name=("one", "two"))) as served:
        cards = served.client.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["one", "two"]
        assert cards[0]["root"] == cards[1]["root"] == "tiny-chat"
        body = {"prompt": "x", "max_tokens": 1}
        assert served.client.post("/v1/completions", json={**body, "model": "two"}).json()["model"] == "two"
        assert served.client.post("/v1/completions", json=body).json()["model"] == "one"
        assert served.client.get("/v1/models/two").json()["id"] == "two"
        missing = served.client.post("/v1/completions", json={**body, "model": "three"}).json()["error"]["message"]
        assert missing == "there is no model 'three'; this server has 'one', 'two'"
