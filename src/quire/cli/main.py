"""The command line: ``quire`` and its commands.

Options are derived from ``LLM`` and ``SamplingParams``: their keyword arguments in kebab-case. A
mistake is one sentence on stderr and exit code 2, never a traceback. A command imports only its own
needs, so that ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.base.config import named_paths
from quire.base.errors import FailedPrecondition, InvalidArgument, NotFound, Unsupported, size_words
from quire.base.sampling_params import SamplingParams
from quire.base.signatures import require_text
from quire.cli.bench import bench_app
from quire.cli.chat import DEFAULT_MODEL
from quire.cli.local_models import ask_for_model, models_here, models_table
from quire.cli.options import (
    CHAT_OPTIONS,
    LISTED_HELP,
    MODEL_HELP,
    MODEL_KINDS,
    SAMPLING_DEFAULTS,
    SAMPLING_OPTIONS,
    AdapterOption,
    KeyOption,
    ModelOption,
    UrlOption,
    WordedGroup,
    chosen_model,
    command,
    given_model,
    one_sentence,
)
from quire.cli.state import state_app

if TYPE_CHECKING:
    from quire.llm import LLM

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]

ListedArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=LISTED_HELP, show_default=False)]
MeasuredArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_KINDS, show_default=False)]
MeasuredOption = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_KINDS, show_default=False)]
ListedOption = Annotated[str | None, typer.Option("--model", "-m", help=LISTED_HELP, show_default=False)]

HERE = "http://127.0.0.1:8000"
ServerOption = Annotated[str, typer.Option("--url", help="The server's address.")]

COLLECT_AFTER = 50_000
"""Number of new objects after which Python's garbage collector runs."""

app = typer.Typer(
    cls=WordedGroup,
    help="Run language models whose memory is a value: fork it, rewind it, save it, look into it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench", short_help=bench_app.info.help)
app.add_typer(state_app, name="state", short_help=state_app.info.help)


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given fields of sampling, checked before a model is loaded."""
    given = {name: options[name] for name in SAMPLING_OPTIONS if name in options}
    SamplingParams(**{"max_tokens": None, **given})
    return given


def _load(model: str, options: dict[str, Any], adapter: str | None = None) -> LLM:
    """Load a model. ``adapter`` is loaded under its own name unless ``adapters`` has that name."""
    from quire.llm import LLM

    engine = {name: value for name, value in options.items() if name not in SAMPLING_OPTIONS}
    if adapter is None:
        return LLM(model, **engine)
    named = named_paths(engine.get("adapters") or {})
    engine["adapters"] = named if adapter in named else {**named, adapter: adapter}
    try:
        return LLM(model, **engine)
    except NotFound as error:
        if adapter in named or not named:
            raise
        raise NotFound(f"{error}; and it is none of --adapters: {', '.join(map(repr, named))}") from error


PROMPT_STEP = 512
"""Prompt tokens of a step of ``quire chat`` on a CPU: a bar shows how many have run, and Ctrl-C
takes effect in between."""

# -- commands --------------------------------------------------------------------------------------


def _print_version(wanted: bool) -> None:
    if wanted:
        from quire.cli.doctor import versions

        print(", ".join(f"{name} {found}" for name, found in versions().items()))
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions of what matters.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is decided while loading.")] = False,
) -> None:
    del version
    if sys.stdout is None and context.invoked_subcommand != "serve":  # closed by the shell; a server needs no stdout
        raise FailedPrecondition("output cannot be written: stdout is closed")
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr
    )


def _is_model(word: str) -> bool:
    """Return whether the only argument of ``generate`` is a model on this machine."""
    from quire.models.catalogue import bundled_models

    if word in bundled_models():
        return True
    looks_so = word.endswith(".gguf") or "/" in word
    return looks_so and os.path.exists(word) and (word.endswith(".gguf") or os.path.exists(f"{word}/config.json"))


@command(app, "sampling", "engine")
def generate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help=f"The text to continue; - reads it from stdin. Before it, {MODEL_HELP[0].lower()}{MODEL_HELP[1:]}",
        ),
    ],
    model: ModelOption = None,
    adapter: AdapterOption = None,
    **options: Any,
) -> None:
    """Stream the continuation of a prompt to stdout; timing goes to stderr."""
    if len(words) > 2:
        raise InvalidArgument(
            f"{len(words)} arguments are given, where PROMPT or MODEL PROMPT is accepted; put the prompt in quotes"
        )
    *named, prompt = words
    given, chosen = given_model(model, options, *named)
    if given is None and _is_model(prompt):
        raise InvalidArgument(
            f"{prompt!r} is a model, and there is no prompt; put one behind it, where - reads it from stdin "
            "(with -m MODEL the name of a model may be the prompt)"
        )
    model, fields = DEFAULT_MODEL if given is None else given, _sampling(chosen)
    text = sys.stdin.read() if prompt == "-" else prompt
    require_text("the prompt", text)
    started = time.perf_counter()
    llm = _load(model, chosen, adapter)
    params = llm.default_params.replace(**{**SAMPLING_DEFAULTS, **fields})
    loaded = time.perf_counter()
    first: float | None = None
    count = 0
    # Validate now; otherwise an error would be raised only after the prompt has run.
    (tokens,) = llm.requests.prepare(text, params, adapter=adapter).ids
    with llm.session(adapter=adapter) as session:
        session.append(tokens.tolist())
        prompt_tokens = len(session)
        for delta in session.stream(params):
            first = first or time.perf_counter()
            count += len(delta.token_ids)
            print(delta.text, end="", flush=True)
    print(flush=True)
    ended = time.perf_counter()
    if first is not None:
        rate = f"{(count - 1) / (ended - first):.1f} tok/s" if count > 1 and ended > first else "-"
        print(
            f"loaded in {loaded - started:.2f} s; {prompt_tokens} prompt tokens, first token after {first - loaded:.3f} s; "
            f"{count} tokens, {rate}",
            file=sys.stderr,
        )


@command(app, "chat", "sampling", "engine")
def chat(
    name: ListedArgument = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LINE",
            help="Answer this line only, in quotes or not; - reads it from stdin, as a whole.",
            show_default=False,
        ),
    ] = None,
    model: ListedOption = None,
    adapter: AdapterOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    **options: Any,
) -> None:
    """Talk to a model in the terminal; /help lists the commands that fork, rewind and save.

    Each line of a pipe is a turn. If one is refused, the exit code is 2. On a CPU steps have 512
    tokens unless --max-num-batched-tokens is given, so that a bar shows how far a long prompt is.
    """
    from quire.cli.chat import LocalBackend, TerminalChat

    model, chosen = given_model(model, options, name)
    kept = {name: chosen.pop(name) for name in CHAT_OPTIONS if name in chosen}
    fields = _sampling(chosen)
    text = sys.stdin.read().removesuffix("\n") if words == ["-"] else " ".join(words) if words else None
    if text is not None and not text.strip():
        raise InvalidArgument("LINE is empty; give a text, or leave it out to talk")
    require_text("LINE", text or "")
    if url is not None:
        from quire.cli.remote_chat import run_remote_chat

        if others := sorted(chosen.keys() - fields.keys()):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
            raise InvalidArgument(f"{flags}: with --url the server has its own; leave it out")
        run_remote_chat(url, model=model, adapter=adapter, api_key=api_key, sampling=fields, line=text, **kept)
        return
    if model is None:
        ask_for_model("chat")
    from quire.build import resolve_device

    if "max_num_batched_tokens" not in chosen and resolve_device(chosen.get("device", "auto")).type == "cpu":
        chosen["max_num_batched_tokens"] = PROMPT_STEP
    llm = _load(model, chosen, adapter)
    system = kept.pop("system", None)
    talk = TerminalChat(LocalBackend(llm, fields, **kept), adapter, system)
    if text is not None:
        talk.take_only(text)
        return
    if llm.config.model == DEFAULT_MODEL:
        print(f"{DEFAULT_MODEL} completes Python; begin some, as in def fib(n):", file=sys.stderr)
    talk.run()


@command(app, "server", "engine")
def serve(
    name: ListedArgument = None,
    model: ListedOption = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's endpoints, and sessions to fork, rewind and save.

    Ctrl-C stops it gently. Without --api-key, the environment variable QUIRE_API_KEY gives the
    keys, separated by commas.
    """
    from quire.server.http.settings import ServerSettings

    model, chosen = given_model(model, options, name)
    if model is None:
        ask_for_model("serve")
    fields = {field.name for field in dataclasses.fields(ServerSettings)}
    given = {field: chosen.pop(field) for field in fields & set(chosen)}
    if "api_key" not in given and (keys := os.environ.get("QUIRE_API_KEY")):
        given["api_key"] = [key.strip() for key in keys.split(",") if key.strip()]
        if not given["api_key"]:
            raise InvalidArgument(
                f"QUIRE_API_KEY is {keys!r}, without a key; unset it, or give keys separated by commas"
            )
    settings = ServerSettings(**given)
    _require_server("quire serve")
    from quire.server.http.listeners import bind

    for listener in bind(settings.host, settings.port):  # refused here, before a load that may take minutes
        listener.close()
    from quire.async_llm import AsyncLLM

    # The server's modules are imported while the weights are packed, which leaves Python free.
    with ThreadPoolExecutor(1) as other:
        serving = other.submit(import_module, "quire.server.http.serving")
        llm = AsyncLLM(model, **chosen)
    serving.result().serve(llm, settings)


@command(app, "server", "engine")
def cluster(
    name: ListedArgument = None,
    model: ListedOption = None,
    replicas: Annotated[int, typer.Option(help="Servers at the start, and at least.")] = 2,
    max_replicas: Annotated[
        int | None, typer.Option(help="Servers at most, by the requests under way. Default: --replicas.")
    ] = None,
    cpus: Annotated[float, typer.Option(help="CPUs that Ray sets aside for each server.")] = 1.0,
    gpus: Annotated[float, typer.Option(help="GPUs that Ray sets aside for each server.")] = 0.0,
    target: Annotated[
        float, typer.Option(help="Requests under way for each server, above which there will be more.")
    ] = 8.0,
    slack: Annotated[
        int, typer.Option(help="Requests that a server may have more than the least loaded and still get its prefixes.")
    ] = 4,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a running Ray, as auto; by default one starts here.")
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run --replicas processes on this machine, without Ray.")
    ] = False,
    **options: Any,
) -> None:
    """Serve a model by several servers behind one address, on Ray Serve.

    Requests go to the server that knows their session, or the longest beginning of their prompt.
    The other options are those of quire serve, for each server. --state-dir is the folder of all
    servers' state directories; on several machines it is on a file system that they share.
    """
    from quire.cluster.shape import ClusterShape

    model, chosen = given_model(model, options, name)
    if model is None:
        ask_for_model("cluster")
    shape = ClusterShape(
        least=replicas,
        most=replicas if max_replicas is None else max_replicas,
        cpus=cpus,
        gpus=gpus,
        target=target,
        slack=slack,
    )
    _require_server("quire cluster")
    from quire.cluster.launch import launch

    launch(model, chosen, shape, is_local=local, ray_address=ray_address)


def _require_server(what: str) -> None:
    """Raise ``Unsupported`` if the packages of the server are not installed."""
    try:
        import fastapi  # noqa: F401
        import h11  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"{what} needs the package {error.name or error}, which is not installed; pip install '.[server]' in Quire's folder brings it"
        ) from error


@command(app)
def inspect(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE_OR_STORE", help="A .quire state file; or a store: its directory, a --state-dir, or a URL."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    in_browser: Annotated[
        bool, typer.Option("--open", help="Show it as a page on this machine, until Ctrl+C.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --open: the port of 127.0.0.1; 0 takes a free one.")] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="With --open: print the address, and start no browser.")
    ] = False,
) -> None:
    """Show what a state file or a store holds: model, tokens, positions, layers, bytes, checks;
    branches and commits, and which of their objects are there. No model is loaded.

    The pairs of ranges_start_stop in the JSON are half open: [0, 24] means the positions 0 to 23.
    """
    from quire.store.urls import store_at

    if (no_browser or port) and not in_browser:
        raise InvalidArgument(f"{'--no-browser' if no_browser else '--port'} is for --open; give both")
    if as_json and in_browser:
        raise InvalidArgument("--json and --open exclude each other; give one of them")
    tier = store_at(target)
    if in_browser:
        _require_server("quire inspect --open")
        from quire_inspector.files.snapshot_server import FileSource, StoreSource, show

        source = partial(FileSource, Path(target)) if tier is None else partial(StoreSource, tier)
        show(source, port=port, browse=not no_browser)
        return
    if tier is not None:
        import asyncio

        from quire.cli.store_tables import describe_store, print_store

        found, print_found = asyncio.run(describe_store(tier)), print_store
    else:
        from quire.cli.inspection import facts_of, print_description

        found, print_found = facts_of(Path(target)), print_description
    if as_json:
        print(json.dumps(found))
    else:
        print_found(found)


@command(app)
def models(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print what runs of each model type of transformers, in Markdown.")
    ] = False,
) -> None:
    """List the models on this machine, bundled adapters, and the architectures that run, with the
    kinds of state they have."""
    if markdown:
        from quire.models.model_types import types_table

        print(types_table(), end="")
        return
    from quire.cli.tables import folding_table, print_tables
    from quire.models.catalogue import bundled_adapters, registered_architectures

    kinds = [(name, ", ".join(kinds)) for name, kinds in registered_architectures().items()]
    known = "Architectures (from a directory or a Hugging Face id)"
    print_tables(
        models_table(models_here()),
        folding_table("bundled adapter", "directory", title="Bundled adapters (LoRA)", rows=bundled_adapters().items()),
        folding_table("architecture", "kinds of state", title=known, rows=kinds),
    )
    print("Any other decoder of transformers runs through its own layers if it passes the check when it is loaded.")


@command(app)
def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A bundled model, a directory or a Hugging Face id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new directory.")],
    form: Annotated[str, typer.Option("--format", help="int4 or int8: the values of --quantization.")] = "int4",
) -> None:
    """Write a model with quantised weights, as a checkpoint of compressed-tensors.

    Its tokens are those of the model with the same --quantization, but it loads without packing.
    """
    import torch

    from quire.build import check_quantized, layer_kernels
    from quire.cli.quantize import BITS, check_source, check_target, write_quantized
    from quire.models.catalogue import resolve_model
    from quire.models.loading import load_model

    if form not in BITS:
        raise InvalidArgument(field="format", given=form, allowed=" or ".join(BITS))
    path = resolve_model(model)
    check_source(path)
    check_target(out)
    loaded = load_model(path, kernels=layer_kernels(torch.device("cpu"), form), progress=True)
    check_quantized(loaded, form)
    written = write_quantized(path, out, loaded, "int4" if form == "int4" else "int8")
    print(f"{out}: {size_words(written)} of weights in {form}")


@command(app, "engine")
def capabilities(
    name: ModelArgument = None,
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print it for every kind of model; loads none.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it for every kind of model in Markdown; loads none.")
    ] = False,
    **options: Any,
) -> None:
    """Print the rule table: what this model on this device does, what it refuses, and why."""
    from quire.cli.inspection import print_capabilities, print_rules
    from quire.contracts.model import num_blocks
    from quire.kv.rule_table import combination_of

    model, chosen = chosen_model(model, options, name)
    if as_json + everything + markdown > 1:
        raise InvalidArgument("--json, --all and --markdown are three ways to print; give one of them")
    if everything or markdown:
        print_rules(markdown=markdown)
        return
    with _load(model, chosen) as llm:
        own = combination_of(llm.model.layer_specs, num_blocks(llm.engine.runner.model))
        print_capabilities(llm.capabilities(), own, as_json=as_json)


@command(app, "engine")
def calibrate(
    name: ModelArgument = None,
    model: ModelOption = None,
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of text that is like the prompts' documents; may be repeated. Default: the model's own."
        ),
    ] = None,
    probes: Annotated[int | None, typer.Option(help="Prompts that are tried. Default: 32.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> None:
    """Measure how far blended answers of a model are off, by check layer and ratio.

    With --state-dir or --store, later processes use what is found.
    """
    from quire.blend.calibration import PROBES
    from quire.cli.inspection import print_calibration

    model, chosen = chosen_model(model, options, name)
    read: list[str] = []
    for path in texts or ():
        try:
            read.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 ({error})"
            raise InvalidArgument(f"--texts: {str(path)!r}: {reason}", field="texts") from error
    with _load(model, chosen) as llm:
        found = llm.calibrate_blending(read or None, probes=PROBES if probes is None else probes)
        store = llm.engine.stored.store
    print_calibration(found, kept=store is not None and store.is_durable, as_json=as_json)


@command(app)
def doctor(
    name: MeasuredArgument = None,
    model: MeasuredOption = None,
    measure: Annotated[bool, typer.Option(help="Measure this machine in five seconds; --model always does.")] = True,
) -> None:
    """Print the kernels and libraries in use, with reasons, the speed that models can have, and
    remedies for what fails."""
    from quire.cli.doctor import examine, measured, print_findings

    model, _ = given_model(model, {}, name)
    findings = examine()
    has_torch = any(one.name == "C++ kernels" for one in findings)
    if has_torch and (measure or model is not None):
        from quire.models.catalogue import resolve_model

        findings += measured(None if model is None else resolve_model(model))
    print_findings(findings)


@command(app)
def top(
    url: ServerOption = HERE,
    api_key: KeyOption = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and end.")] = False,
) -> None:
    """Show a running server: tokens per second, requests, latencies, pages, tiers; q ends it.

    Without a terminal it is shown once. A server that goes away is waited for.
    """
    from quire_inspector.top import run_top

    run_top(url, api_key=api_key, interval=interval, once=once, as_json=as_json)


@command(app)
def trace(
    url: ServerOption = HERE,
    api_key: KeyOption = None,
    seconds: Annotated[float, typer.Option(help="How long to record. Ctrl-C ends it earlier.")] = 10.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file, which is replaced.")] = Path("trace.json"),
) -> None:
    """Record the steps and requests of a running server into a file for Perfetto.

    ui.perfetto.dev and chrome://tracing show such files. There are no texts in them.
    """
    from quire_inspector.trace import record_trace

    record_trace(url, output, seconds=seconds, api_key=api_key)


# -- the entry point -------------------------------------------------------------------------------


def _open_closed_streams() -> None:
    """Read and write nothing where the shell has closed stdin or stderr. The next opened file would
    else get their numbers. A closed stdout stays None, so that a lost output is reported."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def main() -> None:
    """Run the command ``quire``."""
    # At Python's own threshold, collections take a fifth of the time to a first token: imports make
    # hundreds of thousands of objects, all of which stay.
    gc.set_threshold(COLLECT_AFTER)
    _open_closed_streams()
    with one_sentence():
        try:
            app(prog_name="quire")
        finally:
            if sys.stdout is not None:  # None if the shell has closed it
                sys.stdout.flush()  # flushed here, where a failure can still be reported as one sentence


if __name__ == "__main__":
    main()
