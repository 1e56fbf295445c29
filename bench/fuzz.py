"""Requests that schemathesis makes up from the server's OpenAPI description, with all its checks:
none may end in a 5xx, none may hang, what the description forbids must be refused, what it allows
taken, and answers must be as described.

What a type allows is mostly refused for its value, and no made-up id is that of a session. So there
are two passes. In the first the description is the server's own, and 400 is a right answer to what
fits a schema where the description says so (operations that declare 400). In the second each body
has plausible values only, the model's name and ids of live sessions; there 400 is wrong.

Schemathesis is not installed with Quire: ``make test-clients`` has it in ``.venv-clients``
(``--python``). The server is one of its own, with a context of 128 tokens, so that a request that
asks for as many tokens as there can be ends soon; or the one of ``--url``. A model without a chat
template gets a plain one.

``python bench/fuzz.py [--cases 2000] [--seconds 30] [--url http://localhost:8000]``
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from quire.client import HttpFailure
from quire.errors import QuireError, Unsupported
from quire.models.catalogue import bundled_models
from quire_bench.reports import print_json, print_table
from quire_bench.serve_client import ServeClient
from quire_bench.serve_process import ServerProcess, server_process

PROGRAM = ("-c", "from schemathesis.cli import schemathesis; schemathesis()")
TAKEN = ("2xx", "3xx", "401", "403", "404", "409", "429", "5xx")
"""What schemathesis takes for the answer to a request that fits its schema."""
SERVER = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "64MiB", "--max-model-len", "128")
REST_SECONDS = 10.0
SESSIONS = 8
TEMPLATE = (
    "{% for message in messages %}<|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>"
    "{{ message.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TEXT: dict[str, Any] = {"type": "string", "maxLength": 10}
_FLAG: dict[str, Any] = {"type": "boolean"}
_TOKENS = {"type": "array", "items": {"enum": [3, 50, 299]}, "minItems": 1, "maxItems": 12}
_FORM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": _FORM}}


def _number(least: float, most: float) -> dict[str, Any]:
    return {"type": "number", "minimum": least, "maximum": most}


def _integer(least: int, most: int) -> dict[str, Any]:
    # One by one: to JSON Schema 5.0 is an integer too, which this server refuses.
    return {"enum": sorted({least, (least + most) // 2, most})}


ELSEWHERE = (
    *(
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "n",
        "structured_outputs",
        "response_format",
        "max_completion_tokens",
    ),
    *("prompt", "session_id", "parallel_tool_calls", "metadata", "stream_options"),
)
"""Fields of chats that responses and messages have not, or have in another shape."""
PLAUSIBLE: dict[str, dict[str, Any]] = {
    "temperature": _number(0, 2),
    "top_p": _number(0.01, 1),
    "top_k": _integer(1, 50),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.5, 2),
    "logit_bias": {"type": "object", "properties": {"5": _number(-100, 100)}, "additionalProperties": False},
    "n": _integer(1, 3),
    "max_tokens": _integer(1, 12),
    "max_completion_tokens": _integer(1, 12),
    "min_tokens": _integer(0, 1),
    "top_logprobs": _integer(0, 5),
    "prompt_logprobs": _integer(0, 5),
    "seed": {"enum": [0, 7, 2**40]},
    "stop": {
        "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}]
    },
    "stop_token_ids": _TOKENS,
    "prompt": {"anyOf": [{**_TEXT, "minLength": 1}, _TOKENS]},
    "text": {**_TEXT, "minLength": 1},
    "input": {**_TEXT, "minLength": 1},
    "system": _TEXT,
    "segments": {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": 3},
    "branch": {"enum": ["main"]},
    "name": {"enum": ["main", "other"]},
    "labels": {"enum": [{}, {"task": "42"}]},
    "span": {"enum": [[0, 0]]},
    "mode": {"enum": ["exact"]},
    "tokens": _TOKENS,
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {**_TEXT, "minLength": 1}},
            "required": ["role", "content"],
            "additionalProperties": False,
        },
    },
    **dict.fromkeys(
        (
            *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "parallel_tool_calls", "store"),
            *("return_token_strs", "add_generation_prompt"),
        ),
        _FLAG,
    ),
    "stop_sequences": {"enum": [["x"], ["\n", "y"]]},
    "instructions": _TEXT,
    "metadata": {"enum": [{"a": "b"}]},
    "tools": {"enum": [[_TOOL]]},
    "tool_choice": {"enum": ["required", "none", {"type": "function", "function": {"name": "weather"}}]},
    "response_format": {
        "enum": [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "form", "schema": _FORM}},
        ]
    },
    "structured_outputs": {"enum": [{"regex": "[ab]{4}"}, {"choice": ["yes", "no"]}, {"json": _FORM}]},
    "stream": {"enum": [True]},
    "stream_options": {"type": "object", "properties": {"include_usage": _FLAG}, "additionalProperties": False},
    "chat_template_kwargs": {"enum": [{}, {"enable_thinking": True}]},
    "at": {"enum": [1]},
    "to": {"enum": [1]},
    "ttl": {"enum": [600, 1000.5]},
    "max_output_tokens": _integer(1, 12),
    "window": _integer(16, 64),
    "sink": _integer(0, 8),
}
"""Of fields, by their names: what a server can do."""
_MESSAGES = {
    "messages": {
        "enum": [[{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}]]
    },
    "tools": {"enum": [[{"name": "weather", "input_schema": _FORM}]]},
    "tool_choice": {"enum": [{"type": "any"}, {"type": "none"}]},
}
_RESPONSES = {
    "tools": {"enum": [[{"type": "function", "name": "weather", "parameters": _FORM}]]},
    "tool_choice": {"enum": ["required", "none", {"type": "function", "name": "weather"}]},
}
OTHERWISE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ChatRequest": ({"logprobs": {"enum": [True]}}, ()),
    "MessagesRequest": (_MESSAGES, (*ELSEWHERE, "stop")),
    "CountedMessages": (_MESSAGES, (*ELSEWHERE, "stop")),
    "ResponseRequest": (_RESPONSES, (*ELSEWHERE, "text", "messages", "max_tokens", "stop")),
    "TokenizeRequest": ({"prompt": _TEXT}, ()),
    "AdapterBody": ({"name": {"enum": [None]}}, ()),
    "RewindBody": ({}, ("n",)),
    "GenerateBody": ({"n": {"enum": [1]}}, ()),
    "GenerateManyBody": ({"n": {"enum": [1]}}, ()),
}
"""By schemas: fields with other values than in ``PLAUSIBLE``, and fields that are refused."""
EXCLUSIVE = (("prompt", "messages"), ("text", "tokens"))
"""Of these, plausible bodies have the first alone."""
NEEDED = ("prompt", "text", "to")
TOGETHER = (
    ("stream", "stream_options"),
    ("tools", "tool_choice"),
    ("response_format",),
    ("structured_outputs",),
    ("logprobs", "top_logprobs"),
    ("stop_token_ids",),
)
"""Fields that need each other, or that others forbid: some plausible bodies have all of one of
these, some none.
"""
UNLIKELY = ("/v1/embeddings", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/sessions/state")
"""Paths for which no value is plausible here."""


def operations(description: dict[str, Any]) -> int:
    """Operations of an OpenAPI description: a path and a method each."""
    methods = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
    return sum(len(methods & set(path)) for path in description["paths"].values())


def plausible(description: dict[str, Any], model: str, sessions: Sequence[str]) -> dict[str, Any]:
    """The description with values that a server takes in the place of each body, and with these
    sessions where a path or a query names one that is not deleted. Fields of which none is known
    are left out, and so are parameters of queries that need not be there.
    """
    found = copy.deepcopy(description)
    for path in UNLIKELY:
        del found["paths"][path]
    ids = {"type": "array", "items": {"enum": list(sessions)}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
    own_ids = {"model": {"enum": [model]}, "session_id": {"enum": list(sessions)}, "ids": ids}
    # What every look into the state must say. A session may have been rewound to its beginning.
    branch, first = {"enum": [f"session:{one}" for one in sessions]}, {"enum": [0]}
    looks = {"branch": branch, "a": branch, "b": branch, "layer": first, "position": first}
    schemas = found["components"]["schemas"]
    choices: dict[str, list[dict[str, str]]] = {}
    for name, schema in list(schemas.items()):
        if "properties" not in schema:
            continue
        own, refused = OTHERWISE.get(name, ({}, ()))
        known = {**PLAUSIBLE, **own_ids, **own}
        fields = {field: known[field] for field in schema["properties"] if field in known and field not in refused}
        # A session of the bench answers no chat, nor is it asked by two at a time.
        fields.pop("session_id", None)
        for one, other in EXCLUSIVE:
            if one in fields:
                fields.pop(other, None)
        needed = [field for field in NEEDED if field in fields]
        together = [every for every in TOGETHER if all(field in fields for field in every)]
        plain = {field: value for field, value in fields.items() if not any(field in every for every in together)}
        for number, every in enumerate([(), *together]):
            schemas[f"Plausible{number}{name}"] = {
                **schema,
                "properties": {**plain, **{field: fields[field] for field in every}},
                "required": [*dict.fromkeys([*schema.get("required", ()), *needed, *every])],
                "additionalProperties": False,
            }
            choices.setdefault(name, []).append({"$ref": f"#/components/schemas/Plausible{number}{name}"})
    for path in found["paths"].values():
        for method, operation in path.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                name = content["schema"].get("$ref", "").rpartition("/")[2]
                if name in choices:
                    content["schema"] = {"anyOf": choices[name]}
            parameters = [
                one
                for one in operation.get("parameters", ())
                if one["in"] == "path" or (one["in"] == "query" and one.get("required"))
            ]
            operation["parameters"] = parameters
            for parameter in parameters:
                if parameter["in"] == "query":
                    parameter["schema"] = looks[parameter["name"]]
                elif parameter["name"] in own_ids and method != "delete":
                    parameter["schema"] = own_ids[parameter["name"]]
    return found


def configuration(description: dict[str, Any], *, by_value: bool) -> str:
    """Schemathesis' file of settings. ``by_value``: what fits its schema may be answered 400 where
    the description declares it.
    """
    lines: list[str] = []
    for path, every in description["paths"].items() if by_value else ():
        for method, operation in every.items():
            if "400" in operation["responses"]:
                lines += [
                    "[[operations]]",
                    f"include-path = {json.dumps(path)}",
                    f'include-method = "{method.upper()}"',
                ]
                lines += [f"checks.positive_data_acceptance.expected-statuses = {json.dumps([*TAKEN, '400'])}"]
    return "\n".join(lines) + "\n"


def chat_copy(model: str, directory: Path) -> str:
    """A model with a chat template: itself, or a copy in ``directory`` of a checkpoint that has
    none.
    """
    folder = Path(bundled_models().get(model, model))
    if not folder.is_dir() or (folder / "chat_template.jinja").exists():
        return model
    made = shutil.copytree(folder, directory / folder.name)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return str(made)


def run_fuzz(
    url: str, *, cases: int, seconds: float, api_key: str | None = None, seed: int = 0, python: str = sys.executable
) -> dict[str, Any]:
    """At least ``cases`` requests to the server at ``url``, ``seconds`` for each answer.
    ``python``: the interpreter that has schemathesis.

    The counts; "complaints" names what is not as it must be. ``Unsupported`` if schemathesis is not
    installed.
    """
    require(python)

    async def described() -> tuple[dict[str, Any], str, list[str]]:
        async with ServeClient(url, api_key=api_key, timeout=seconds) as client:
            description = await client.json("GET", "/openapi.json")
            model = (await client.json("GET", "/v1/models"))["data"][0]["id"]
            body = {"prompt": [3, 4, 5, 6, 7, 8, 9, 10], "pin": True, "window": 64, "sink": 4}
            sessions = [(await client.json("POST", "/v1/sessions", body))["id"] for _ in range(SESSIONS)]
            return description, model, sessions

    description, model, sessions = asyncio.run(described())
    count = operations(description)
    options = [
        "--max-examples",
        str(-(-cases // (2 * count))),
        "--seed",
        str(seed),
        "--request-timeout",
        f"{seconds:g}",
    ]
    options += ["--max-response-time", f"{seconds:g}"]
    if api_key is not None:
        options += ["--header", f"Authorization: Bearer {api_key}"]
    statuses: Counter[int] = Counter()
    complaints: list[str] = []
    for name, given, mode, phases in (
        ("as described", description, "all", "coverage,fuzzing"),
        # All values beside all others are for the first pass.
        ("plausible", plausible(description, model, sessions), "positive", "fuzzing"),
    ):
        settings = configuration(given, by_value=mode == "all")
        code, found = _pass(url, given, settings, [*options, "--mode", mode, "--phases", phases], python)
        statuses.update(found)
        if code:
            complaints.append(f"{name}: schemathesis ended with code {code}; what it found is above")
    broken = {status: number for status, number in statuses.items() if not 100 <= status < 500}
    complaints += [f"{number} answers of status {status}" for status, number in sorted(broken.items())]
    if statuses.total() < cases:
        complaints.append(f"{statuses.total()} requests were made, fewer than {cases}")
    complaints += asyncio.run(_at_rest(url, api_key, sessions))
    return {
        "operations": count,
        "requests": statuses.total(),
        "statuses": {str(status): number for status, number in sorted(statuses.items())},
        "complaints": complaints,
    }


def _pass(
    url: str, description: dict[str, Any], settings: str, options: Sequence[str], python: str
) -> tuple[int, list[int]]:
    """Run schemathesis. Its code, and the statuses of all answers."""
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-") as directory:
        log, given = Path(directory, "requests.har"), Path(directory, "openapi.json")
        given.write_text(json.dumps(description), encoding="utf-8")
        Path(directory, "schemathesis.toml").write_text(settings, encoding="utf-8")
        command = [
            os.path.abspath(shutil.which(python) or python),
            *PROGRAM,
            "run",
            str(given),
            "--url",
            url,
            "--checks",
            "all",
            "--continue-on-failure",
        ]
        command += ["--report-har-path", str(log), "--no-color", *options]
        # Strings that no URL can hold are thrown away; how many does not matter.
        command += ["--suppress-health-check", "filter_too_much"]
        # What hypothesis remembers of earlier runs would lie in the directory; a fresh one knows
        # nothing.
        done = subprocess.run(command, cwd=directory, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, check=False)
        try:
            entries = json.loads(log.read_text(encoding="utf-8"))["log"]["entries"]
        except (OSError, ValueError, LookupError) as error:
            raise QuireError(
                f"schemathesis ended with code {done.returncode} and left no list of its requests"
            ) from error
    return done.returncode, [entry["response"]["status"] for entry in entries]


def require(python: str) -> None:
    """Raise ``Unsupported`` if an interpreter does not have schemathesis."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('schemathesis') is None)"
    if not shutil.which(python) or subprocess.run([python, "-c", look], check=False).returncode:
        raise Unsupported(f"schemathesis is not installed for {python}; `make test-clients` installs it")


async def _at_rest(url: str, api_key: str | None, sessions: Sequence[str]) -> list[str]:
    """What is not as it must be once nobody asks for anything: the server answers, and nothing runs
    on.

    Closes the sessions.
    """
    deadline = asyncio.get_running_loop().time() + REST_SECONDS
    async with ServeClient(url, api_key=api_key, timeout=REST_SECONDS) as client:
        try:
            await client.fetch("GET", "/health")
            for session in sessions:
                # A request that deletes sessions may have been given this one's id by another's
                # answer.
                with suppress(HttpFailure):
                    await client.fetch("DELETE", f"/v1/sessions/{session}")
            while True:
                lines = (await client.fetch("GET", "/metrics")).decode().splitlines()
                running = [line for line in lines if line.startswith("quire:num_requests_running ")]
                if all(float(line.split()[1]) == 0 for line in running):
                    return []
                if asyncio.get_running_loop().time() > deadline:
                    return ["requests run on after the last answer"]
                await asyncio.sleep(0.1)
        except (QuireError, OSError) as error:
            return [f"the server does not answer any more: {str(error) or type(error).__name__}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0, help="for each answer")
    parser.add_argument("--url")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has schemathesis")
    arguments = parser.parse_args()
    require(arguments.python)
    with ExitStack() as stack:
        process: ServerProcess | None = None
        if arguments.url is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-fuzz-")))
            process = stack.enter_context(server_process(chat_copy(arguments.model, directory), SERVER))
        url = arguments.url if process is None else process.url
        given = {name: getattr(arguments, name) for name in ("cases", "seconds", "api_key", "seed", "python")}
        result = run_fuzz(url, **given)
    print_table([{"status": status, "answers": number} for status, number in result["statuses"].items()])
    print_json({"benchmark": "fuzz", **result})
    if result["complaints"]:
        sys.exit("\n".join(result["complaints"]))


if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(str(error))
