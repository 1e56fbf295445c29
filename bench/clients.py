"""Clients that other people wrote, against ``quire serve``: each must get what the engine says in
this process.

``openai`` (sync and async: whole and streamed, samples, seeds, stops, log-probabilities, tools,
structured outputs, errors), ``langchain-openai`` (invoke, stream, batch,
``with_structured_output``), ``litellm`` (completion, streaming, text completion), and ``lm-eval``
by its ``local-completions`` (log-likelihoods of continuations, generations). Those that are
installed are run, the others are named: ``pip install openai langchain-openai litellm
"lm-eval[api]"``.

The server runs on the CPU in float32, like the engine that it is compared with; a model without a
chat template gets a plain one. Texts are greedy or seeded, and must be the same to the letter.

``python bench/clients.py [--model tiny-python] [--clients openai litellm]``
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import importlib.metadata
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz import chat_copy
from quire.errors import InvalidArgument, QuireError
from quire.llm import LLM
from quire.sampling_params import SamplingParams
from quire_bench.reports import print_json, print_table
from quire_bench.serve_client import ServeClient
from quire_bench.serve_process import server_process

NAME = "under-test"
SERVER = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB", "--served-model-name", NAME)
KEY = "no-key-is-needed"
PROMPT = "def fib(n):"
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
FORM: dict[str, Any] = {
    "title": "Weather",
    "description": "The weather of a city.",
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": FORM}}
# LiteLLM takes additionalProperties out of what it sends to vLLM; without it the model may go on
# and on. Here nothing is left open.
CLOSED_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "enum": [{"city": "Rome", "days": 1}, {"city": "Paris", "days": 2}]},
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
CONTINUATIONS = (
    ("def add(a, b):", "\n    return a + b\n"),
    ("def add(a, b):", "\n    return a - b\n"),
    ("class Stack:\n    def __init__(self):", "\n        self.items = []\n"),
    ("for i in", " range(10):"),
    ("import", " os"),
)
"""What lm-eval scores: contexts, which end without a space as lm-eval would move it, and what might
follow them.
"""
LOGPROB_TOLERANCE = 1e-4
"""Of one token's, in float32: the server may run it in another batch, with other kernels, than the
engine here.
"""


class Reference:
    """What is right: the engine itself, one request at a time."""

    def __init__(self, model: str) -> None:
        self.model = model
        """A checkpoint with a chat template."""
        self.llm = LLM(model, device="cpu", dtype="float32", enable_prefix_caching=False, kv_cache_memory="64MiB")

    def texts(self, prompt: str, **params: Any) -> list[str]:
        """Of each sample."""
        output = self.llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]
        return [sample.text for sample in output.outputs]

    def answer(self, messages: list[dict[str, Any]], **params: Any) -> str:
        """Of a chat."""
        return self.llm.chat(messages, SamplingParams(**params), use_tqdm=False)[0].outputs[0].text

    def logprobs(self, prompt: str, **params: Any) -> list[float]:
        """Of each generated token."""
        sample = self.llm.generate(prompt, SamplingParams(**params, logprobs=0), use_tqdm=False)[0].outputs[0]
        return [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs or [], strict=True)]

    def likelihood(self, context: str, continuation: str) -> tuple[float, bool, int]:
        """Log-probability of ``continuation``, whether it is the greedy one, and its tokens."""
        tokenizer = self.llm.tokenizer
        assert tokenizer is not None
        before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
        after = list(whole[len(before) :])
        with self.llm.session(list(whole[: len(before)])) as session:
            scores = session.score(after)
        params = SamplingParams(temperature=0, max_tokens=len(after), ignore_eos=True)
        greedy = self.llm.generate([list(whole[: len(before)])], params, use_tqdm=False)[0].outputs[0].token_ids
        return sum(scores), list(greedy) == after, len(after)


@dataclass(kw_only=True, slots=True)
class Tally:
    """What a client was asked for, and what was wrong with it."""

    calls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def same(self, name: str, found: object, wanted: object) -> None:
        """A call that must have brought ``wanted``."""
        self.calls.append(name)
        if found != wanted:
            self.complaints.append(f"{name}: {found!r:.300} instead of {wanted!r:.300}")

    def close(self, name: str, found: Sequence[float], wanted: Sequence[float], tolerance: float) -> None:
        """A call that must have brought these numbers, about."""
        self.calls.append(name)
        if len(found) != len(wanted) or any(
            not abs(own - other) <= tolerance for own, other in zip(found, wanted, strict=True)
        ):
            self.complaints.append(f"{name}: {list(found)!r:.300} instead of {list(wanted)!r:.300}")

    def form(self, name: str, found: Any) -> None:
        """A call that must have brought an object of ``FORM``, or its JSON."""
        self.calls.append(name)
        try:
            value = json.loads(found) if isinstance(found, str) else found
            right = set(value) == {"city", "days"} and value["city"] in ("Rome", "Paris") and value["days"] in (1, 2, 3)
        except (ValueError, TypeError, LookupError):
            right = False
        if not right:
            self.complaints.append(f"{name}: {found!r:.300} is not of the form that was asked for")


Client = Callable[[str, str, Reference, Tally], None]


# -- openai ----------------------------------------------------------------------------------------


def run_openai(url: str, model: str, reference: Reference, tally: Tally) -> None:
    """The official client."""
    import httpx
    import openai

    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
    sampled: dict[str, Any] = {"temperature": 1.2, "max_tokens": 10, "n": 3, "seed": 11}
    text = reference.texts(PROMPT, **greedy)[0]
    answer = reference.answer(MESSAGES, **greedy)
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=httpx.Client(trust_env=False, timeout=60)
    ) as api:
        tally.same("models.list", model in [one.id for one in api.models.list()], True)

        def complete(**options: Any) -> Any:
            return api.completions.create(model=model, prompt=PROMPT, **options)

        def chat(**options: Any) -> Any:
            return api.chat.completions.create(**{"model": model, "messages": MESSAGES, **options})

        tally.same("completions", complete(**greedy).choices[0].text, text)
        chunks = list(complete(**greedy, stream=True, stream_options={"include_usage": True}))
        tally.same("completions, stream", "".join(one.choices[0].text for one in chunks[:-1]), text)
        tally.same("completions, stream, usage", chunks[-1].usage.completion_tokens, 16)
        wanted = reference.texts(PROMPT, **sampled)
        tally.same("completions, n and seed", [one.text for one in complete(**sampled).choices], wanted)
        parts = [""] * 3
        for chunk in complete(**sampled, stream=True):
            parts[chunk.choices[0].index] += chunk.choices[0].text
        tally.same("completions, n and seed, stream", parts, wanted)
        stop = text[4:8]
        cut = complete(**greedy, stop=[stop])
        tally.same(
            "completions, stop", (cut.choices[0].text, cut.choices[0].finish_reason), (text.partition(stop)[0], "stop")
        )
        found = complete(**greedy, logprobs=2).choices[0].logprobs
        tally.close(
            "completions, logprobs", found.token_logprobs, reference.logprobs(PROMPT, **greedy), LOGPROB_TOLERANCE
        )

        whole = chat(**greedy, logprobs=True, top_logprobs=2).choices[0]
        tally.same("chat", whole.message.content, answer)
        said = b"".join(bytes(one.bytes) for one in whole.logprobs.content).decode(errors="replace")
        tally.same("chat, logprobs", said, answer)
        chunks = list(chat(**greedy, stream=True))
        tally.same("chat, stream", "".join(one.choices[0].delta.content or "" for one in chunks), answer)
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": FORM, "strict": True}}
        rest: dict[str, Any] = {"seed": 3, "max_tokens": 300}
        tally.form("chat, json_schema", chat(**rest, response_format=form).choices[0].message.content)
        tally.same(
            "chat, regex",
            len(chat(extra_body={"structured_outputs": {"regex": "[ab]{4}"}}).choices[0].message.content),
            4,
        )
        (call,) = chat(**rest, tools=[TOOL], tool_choice=NAMED).choices[0].message.tool_calls
        tally.same("chat, tools, name", call.function.name, "weather")
        tally.form("chat, tools", call.function.arguments)
        with api.chat.completions.stream(
            model=model, messages=MESSAGES, tools=[TOOL], tool_choice=NAMED, **rest
        ) as stream:
            (other,) = stream.get_final_completion().choices[0].message.tool_calls
        tally.same("chat, tools, stream", other.function.arguments, call.function.arguments)
        history = [
            *MESSAGES,
            {"role": "assistant", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        tally.same("chat, a tool's result", chat(messages=history, max_tokens=4).choices[0].message.role, "assistant")
        for name, options, status in (
            ("error, temperature", {"temperature": -1}, 400),
            ("error, model", {"model": "no-such-model"}, 404),
        ):
            try:
                chat(**options)
                tally.same(name, "no error", status)
            except openai.APIStatusError as error:
                tally.same(name, (error.status_code, error.param), (status, name.partition(", ")[2]))

    async def together() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=httpx.AsyncClient(trust_env=False, timeout=60)
        ) as api:

            async def one(number: int) -> str:
                prompt = f"def f{number}("
                options: dict[str, Any] = {"model": model, "prompt": prompt, **greedy}
                if number % 2:
                    stream = await api.completions.create(**options, stream=True)
                    return "".join([chunk.choices[0].text async for chunk in stream])
                return str((await api.completions.create(**options)).choices[0].text)

            return await asyncio.gather(*(one(number) for number in range(8)))

    wanted = [reference.texts(f"def f{number}(", **greedy)[0] for number in range(8)]
    tally.same("async, 8 at a time", asyncio.run(together()), wanted)


# -- langchain -------------------------------------------------------------------------------------


def run_langchain(url: str, model: str, reference: Reference, tally: Tally) -> None:
    """LangChain's chat model."""
    import httpx
    from langchain_openai import ChatOpenAI

    def made(**options: Any) -> Any:
        return ChatOpenAI(
            base_url=f"{url}/v1",
            api_key=KEY,
            model=model,
            max_retries=0,
            http_client=httpx.Client(trust_env=False, timeout=60),
            http_async_client=httpx.AsyncClient(trust_env=False, timeout=60),
            **options,
        )

    greedy = {"temperature": 0, "max_tokens": 16}
    answer = reference.answer(MESSAGES, **greedy)
    plain = made(**greedy)
    whole = plain.invoke(PROMPT)
    tally.same("invoke", whole.content, answer)
    tally.same("invoke, usage", whole.usage_metadata["output_tokens"], 16)
    tally.same("stream", "".join(chunk.content for chunk in plain.stream(PROMPT)), answer)
    others = [f"def f{number}(" for number in range(4)]
    wanted = [reference.answer([{"role": "user", "content": other}], **greedy) for other in others]
    tally.same("batch", [one.content for one in plain.batch(others)], wanted)

    async def streamed() -> str:
        return "".join([chunk.content async for chunk in plain.astream(PROMPT)])

    tally.same("astream", asyncio.run(streamed()), answer)
    roomy = made(seed=3, max_tokens=300)
    for method in ("json_schema", "function_calling"):
        found = roomy.with_structured_output(FORM, method=method).invoke(PROMPT)
        tally.form(f"with_structured_output, {method}", found)
    calls = roomy.bind_tools([TOOL], tool_choice="weather").invoke(PROMPT).tool_calls
    tally.same("bind_tools", [call["name"] for call in calls], ["weather"])
    tally.form("bind_tools, arguments", calls[0]["args"])


# -- litellm ---------------------------------------------------------------------------------------


def run_litellm(url: str, model: str, reference: Reference, tally: Tally) -> None:
    """LiteLLM, which is told that the server is OpenAI's or vLLM's."""
    # Else it asks the network for a list of prices when it is imported.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    greedy = {"temperature": 0, "max_tokens": 16}
    there = {"api_base": f"{url}/v1", "api_key": KEY, "timeout": 60, "max_retries": 0}
    answer = reference.answer(MESSAGES, **greedy)
    for provider in ("openai", "hosted_vllm"):
        options: dict[str, Any] = {"model": f"{provider}/{model}", "messages": MESSAGES, **there}
        whole = litellm.completion(**options, **greedy)
        tally.same(f"{provider}, completion", whole.choices[0].message.content, answer)
        tally.same(f"{provider}, usage", whole.usage.completion_tokens, 16)
        chunks = litellm.completion(**options, **greedy, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        tally.same(f"{provider}, completion, stream", text, answer)
        found = litellm.completion(
            **options, seed=3, max_tokens=300, tools=[copy.deepcopy(CLOSED_TOOL)], tool_choice=NAMED
        )
        tally.form(f"{provider}, tools", found.choices[0].message.tool_calls[0].function.arguments)
    text = reference.texts(PROMPT, **greedy)[0]
    found = litellm.text_completion(model=f"text-completion-openai/{model}", prompt=PROMPT, **there, **greedy)
    tally.same("text_completion", found.choices[0].text, text)
    chunks = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt=PROMPT, stream=True, **there, **greedy
    )
    tally.same("text_completion, stream", "".join(chunk.choices[0].text or "" for chunk in chunks), text)


# -- lm-eval ---------------------------------------------------------------------------------------


def run_lm_eval(url: str, model: str, reference: Reference, tally: Tally) -> None:
    """The class behind ``lm_eval --model local-completions``, by tokens and by text, one request at
    a time and four.
    """
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    wanted = [reference.likelihood(*pair) for pair in CONTINUATIONS]
    longest = max(count for _, _, count in wanted)
    for name, options in (
        ("tokens", {"tokenized_requests": True, "batch_size": 1}),
        ("tokens, 4 in a body", {"tokenized_requests": True, "batch_size": 4}),
        ("text, 4 at a time", {"tokenized_requests": False, "batch_size": 1, "num_concurrent": 4}),
    ):
        lm = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions",
            model=model,
            tokenizer=reference.model,
            tokenizer_backend="huggingface",
            max_length=512,
            max_retries=1,
            **options,
        )
        asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(CONTINUATIONS)]
        found = lm.loglikelihood(asked, disable_tqdm=True)
        tally.close(
            f"loglikelihood, {name}",
            [score for score, _ in found],
            [score for score, _, _ in wanted],
            LOGPROB_TOLERANCE * longest,
        )
        tally.same(f"loglikelihood, {name}, greedy", [own for _, own in found], [own for _, own, _ in wanted])
        until = Instance("generate_until", {}, (PROMPT, {"until": ["\n\n"], "max_gen_toks": 16}), 0)
        (text,) = lm.generate_until([until], disable_tqdm=True)
        right = reference.texts(PROMPT, temperature=0, max_tokens=16, stop=["\n\n"])[0]
        tally.same(f"generate_until, {name}", text, right)


# -- all of them -----------------------------------------------------------------------------------

CLIENTS: dict[str, tuple[str, Client]] = {
    "openai": ("openai", run_openai),
    "langchain-openai": ("langchain_openai", run_langchain),
    "litellm": ("litellm", run_litellm),
    "lm-eval": ("lm_eval", run_lm_eval),
}
"""By the name of the package: its module, and what is run of it."""


def run_clients(url: str, reference: Reference, names: Sequence[str] = tuple(CLIENTS)) -> dict[str, Any]:
    """Run the installed ones of ``names`` against the server at ``url``, print a table and one JSON
    line, return what the line holds.

    A client that breaks off is a complaint like a wrong answer.
    """
    unknown = [name for name in names if name not in CLIENTS]
    if unknown or not names:
        raise InvalidArgument(f"clients {unknown}; of {', '.join(CLIENTS)} at least one is accepted")

    async def served() -> str:
        async with ServeClient(url) as client:
            return await client.model()

    model = asyncio.run(served())
    rows: list[dict[str, Any]] = []
    for name in names:
        module, run = CLIENTS[name]
        if importlib.util.find_spec(module) is None:
            rows.append({"client": name, "version": None, "calls": 0, "complaints": [], "result": "not installed"})
            continue
        tally = Tally()
        try:
            run(url, model, reference, tally)
        except Exception as error:
            # Whatever another's code raises, it is about one client.
            after = tally.calls[-1] if tally.calls else "nothing"
            tally.complaints.append(f"it broke off after {after}: {type(error).__name__}: {str(error)[:300]}")
        rows.append(
            {
                "client": name,
                "version": importlib.metadata.version(name),
                "calls": len(tally.calls),
                "complaints": tally.complaints,
                "result": f"{len(tally.complaints)} wrong" if tally.complaints else "right",
            }
        )
    print_table([{**{key: row[key] for key in ("client", "version", "calls", "result")}} for row in rows])
    line = {
        "benchmark": "clients",
        "model": model,
        "clients": {row["client"]: {key: row[key] for key in ("version", "calls", "complaints")} for row in rows},
    }
    print_json(line)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python", help="a bundled model or a checkpoint's directory")
    parser.add_argument("--clients", nargs="+", choices=tuple(CLIENTS), default=tuple(CLIENTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-clients-") as directory:
        model = chat_copy(arguments.model, Path(directory))
        with server_process(model, SERVER) as process:
            result = run_clients(process.url, Reference(model), arguments.clients)
    complaints = [f"{name}, {text}" for name, found in result["clients"].items() for text in found["complaints"]]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(str(error))
