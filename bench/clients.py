"""Third-party clients against the server: each must get the engine's own results.

The clients are in ``client_programs``, with their versions: Python ones in ``requirements.txt``,
npm ones in ``package.json``; ``make test-clients`` installs and runs them. Each program runs in a
process of its own, with the clients' interpreter or Node. Those that are not installed are named.

The columns: ``text`` (whole, to the letter), ``stream`` (the same in pieces), ``tools`` (a forced
call, whole and streamed if the client does both, and a turn with its result), ``structured``
(answers in a JSON schema), ``cancel`` (a cancelled stream ends in the server too), ``retry`` (429
is repeated), ``overflow`` (the client distinguishes a context that is too small from other errors),
``details`` (samples, seeds, stops, log-probabilities, likelihoods, kept responses, ...).

The server runs on the CPU in float32, like the engine that it is compared with; a model without a
chat template gets a plain one. Texts are greedy or seeded, and must be the same to the letter.

``python bench/clients.py [--model tiny-python] [--rows openai-chat lm-eval] [--record DIR]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_reference import CONTINUATIONS, FORM, GREEDY, MESSAGES, PROMPT, STOPS, Reference, complaint
from client_watch import REFUSED_ONCE, Seen, Watch, recording, write_recording
from fuzz import chat_copy
from quire.async_llm import AsyncLLM
from quire.base.errors import InvalidArgument, QuireError
from quire.models.catalogue import bundled_models
from quire.server.http.app import create_app
from quire.server.http.listeners import bind, url_of
from quire.server.http.serving import Server
from quire.server.http.settings import ServerSettings
from quire_bench.reports import print_json, print_table

NAME = "under-test"
PROGRAMS = Path(__file__).parent / "client_programs"
PYTHON = Path(__file__).parents[1] / ".venv-clients/bin/python"
ABILITIES = ("text", "stream", "tools", "structured", "cancel", "retry", "overflow", "details")
ROWS: dict[str, str] = {
    "openai-chat": "with_openai.py",
    "openai-responses": "with_openai.py",
    "agents-responses": "with_agents.py",
    "agents-chat": "with_agents.py",
    "pydantic-ai-responses": "with_pydantic_ai.py",
    "pydantic-ai-chat": "with_pydantic_ai.py",
    "pydantic-ai-anthropic": "with_pydantic_ai.py",
    "langchain-chat": "with_langchain.py",
    "langchain-responses": "with_langchain.py",
    "langchain-anthropic": "with_langchain.py",
    "dspy-chat": "with_dspy.py",
    "dspy-responses": "with_dspy.py",
    "litellm-openai": "with_litellm.py",
    "litellm-vllm": "with_litellm.py",
    "litellm-anthropic": "with_litellm.py",
    "litellm-proxy-chat": "with_litellm_proxy.py",
    "litellm-proxy-responses": "with_litellm_proxy.py",
    "anthropic": "with_anthropic.py",
    "ollama": "with_ollama.py",
    "lm-eval": "with_lm_eval.py",
    "node-openai-chat": "with_openai.mjs",
    "node-openai-responses": "with_openai.mjs",
    "node-anthropic": "with_anthropic.mjs",
    "node-ollama": "with_ollama.mjs",
    "ai-sdk-openai": "with_ai_sdk.mjs",
    "ai-sdk-openai-compatible": "with_ai_sdk.mjs",
    "ai-sdk-anthropic": "with_ai_sdk.mjs",
}
"""The rows of the table, with the program of each."""
STOPPED = ("agents-chat", "agents-responses")
"""Rows whose client rejects answers cut at ``max_tokens``, so that ``STOPS`` end them."""
ENDLESS = 3000
"""Tokens of an answer that a client cancels."""
PROGRAM_SECONDS = 300.0
REST_SECONDS = 10.0
SETTINGS = ServerSettings(served_model_name=NAME, tool_call_parser="hermes")
"""The model's template shows no form of calls, so the server needs the name of a parser."""
ENVIRONMENT = {
    "NO_PROXY": "*",
    "PYTHONDONTWRITEBYTECODE": "1",
    # No program may request prices, models or updates from the network, or send telemetry.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """A server, and its recorded requests."""

    url: str
    llm: AsyncLLM
    seen: dict[tuple[str, str], list[Seen]]

    def at_rest(self) -> bool:
        """Return True if nothing runs any more, after waiting a while."""
        deadline = time.monotonic() + REST_SECONDS
        while self.llm.engine.has_work and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.llm.engine.has_work


@contextmanager
def watched_server(model: str) -> Iterator[Watched]:
    """Serve a model in a thread of this process."""
    llm = AsyncLLM(model, device="cpu", dtype="float32", kv_cache_memory="64MiB")
    seen: dict[tuple[str, str], list[Seen]] = {}
    execute = llm.engine.runner.execute

    def unhurried(*given: Any) -> Any:
        # A streamed answer arrives in several pieces, also from a fast model.
        time.sleep(0.005)
        return execute(*given)

    llm.engine.runner.execute = unhurried  # type: ignore[method-assign]
    app = create_app(llm, SETTINGS)
    app.add_middleware(Watch, seen=seen)
    sockets = bind("127.0.0.1", 0)
    server = Server(app)
    thread = threading.Thread(target=server.run, args=(sockets,), name="quire-clients", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise QuireError("the server did not begin")
            time.sleep(0.01)
        yield Watched(url=url_of(sockets[0]), llm=llm, seen=seen)
    finally:
        server.should_exit = True
        thread.join(60)
        asyncio.run(llm.close())


def run_program(row: str, task: dict[str, Any], python: Path) -> tuple[str | None, dict[str, Any], str]:
    """Run the program of a row. Return the client's version (None: it is not installed), its value
    for each ability, and its last output."""
    program = PROGRAMS / ROWS[row]
    with tempfile.TemporaryDirectory(prefix="quire-client-") as directory:
        given, results = Path(directory, "task.json"), Path(directory, "results.jsonl")
        given.write_text(json.dumps(task), encoding="utf-8")
        command = [
            "node" if program.suffix == ".mjs" else str(python.absolute()),
            str(program),
            str(given),
            row,
            str(results),
        ]
        keys = {name: value for name, value in os.environ.items() if "_KEY" not in name and "PROXY" not in name.upper()}
        environment = {**keys, **ENVIRONMENT, "DSPY_CACHEDIR": directory, "HF_HOME": directory}
        try:
            done = subprocess.run(
                command,
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=PROGRAM_SECONDS,
                check=False,
            )
            said = (done.stderr or done.stdout).strip()
        except FileNotFoundError:
            said = f"there is no {command[0]}"
        except subprocess.TimeoutExpired:
            said = f"it did not end within {PROGRAM_SECONDS:g} s"
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    told = [json.loads(line) for line in lines]
    version = next((one["version"] for one in told if "version" in one), None)
    return version, {one["ability"]: one for one in told if "ability" in one}, said[-400:]


def judged(row: str, ability: str, told: dict[str, Any], watched: Watched, text: str, details: Any) -> str:
    """Return "ok", or "failed: why", by the client's value and the server's records."""
    found = str(told["error"]) if "error" in told else complaint(ability, told["value"], text, details)
    seen = watched.seen.get((row, ability), [])
    if found is None and (broken := [one.status for one in seen if one.status >= 500]):
        found = f"the server answered {broken[0]}"
    if found is None and ability == REFUSED_ONCE and [one.status for one in seen] != [429, 200]:
        found = f"its requests had the statuses {[one.status for one in seen]}"
    if found is None and ability == "cancel" and not (watched.at_rest() and seen and seen[-1].given_up):
        found = "what was given up went on"
    return "ok" if found is None else f"failed: {found}"


def run_clients(
    watched: Watched,
    reference: Reference,
    rows: Sequence[str] = tuple(ROWS),
    *,
    python: Path = PYTHON,
    record: Path | None = None,
) -> dict[str, Any]:
    """Run the programs of ``rows``, print a table and one JSON line; return the line's content.

    ``record``: a folder for each client's requests.
    """
    unknown = [row for row in rows if row not in ROWS]
    if unknown or not rows:
        raise InvalidArgument(f"rows {unknown}; of {', '.join(ROWS)} at least one is accepted")
    context = watched.llm.engine.max_model_len
    text, details = reference.answer(MESSAGES, **GREEDY), reference.details(NAME)
    stopped = reference.answer(MESSAGES, temperature=0, max_tokens=200, stop=list(STOPS))
    task = {
        "url": watched.url,
        "model": NAME,
        "prompt": PROMPT,
        "form": FORM,
        "overflow": "x " * (context + 100),
        "endless": ENDLESS,
        "extra": {
            "continuations": CONTINUATIONS,
            "folder": str(bundled_models().get(reference.model, reference.model)),
            "stop": reference.texts(PROMPT, **GREEDY)[0][4:8],
            "stops": STOPS,
        },
    }
    found: dict[str, Any] = {}
    for row in rows:
        version, told, said = run_program(row, task, python)
        results = {
            ability: judged(row, ability, told[ability], watched, stopped if row in STOPPED else text, details.get(row))
            if ability in told
            else "not offered"
            for ability in ABILITIES
        }
        if version is None:
            results = dict.fromkeys(ABILITIES, "not installed")
        found[row] = {"version": version, **results}
        if version is None or not told:
            found[row]["why"] = said
        if record is not None and version is not None:
            write_recording(recording(row, version, watched.seen, ABILITIES, task["overflow"]), record)
    print_table(
        [
            {"client": row, **{key: str(value).partition(":")[0] for key, value in one.items() if key != "why"}}
            for row, one in found.items()
        ]
    )
    line = {"benchmark": "clients", "model": NAME, "clients": found}
    print_json(line)
    return line


def complaints(line: dict[str, Any]) -> list[str]:
    """Return the failures, and the rows that could not be run, of the values of ``run_clients``."""
    said = []
    for row, one in line["clients"].items():
        if "why" in one:
            said.append(f"{row} was not run: {one['why']}")
        said += [f"{row}, {ability}: {one[ability]}" for ability in ABILITIES if one[ability].startswith("failed")]
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python", help="a bundled model or a checkpoint's directory")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=tuple(ROWS))
    parser.add_argument("--python", type=Path, default=PYTHON, help="the interpreter that has the Python clients")
    parser.add_argument("--record", type=Path, help="a folder for what each client sends, as tests/server/recordings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-clients-") as directory:
        model = chat_copy(arguments.model, Path(directory))
        reference = Reference(model)
        with watched_server(model) as watched:
            line = run_clients(watched, reference, arguments.rows, python=arguments.python, record=arguments.record)
    if found := complaints(line):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    try:
        main()
    except QuireError as error:
        sys.exit(str(error))
