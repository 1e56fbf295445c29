"""The command line: ``quire generate``, ``chat``, ``serve``, ``inspect``, ``models``, ``capabilities``, ``doctor``, ``bench``.

Options are the keyword arguments of ``LLM`` and ``SamplingParams`` in kebab-case, derived from these classes. A mistake is one
sentence on stderr and exit code 2, never a traceback. What only a command needs is imported inside it, so that ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import inspect as python_inspect
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from quire.config import EngineConfig, field_help, named_paths
from quire.errors import InvalidArgument, NotFound, QuireError, Unsupported
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM

DEFAULT_MODEL = "tiny-python"
DEFAULT_NEW_TOKENS = 128

app = typer.Typer(
    help="Run language models whose memory is a value: fork it, rewind it, save it, look into it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(
    help="Measure tok/s, time to first token and achieved over possible bandwidth: a table, then one JSON line.",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")

SAMPLING_OPTIONS: dict[str, tuple[Any, str]] = {
    "max_tokens": (int, f"Tokens to generate at most ({DEFAULT_NEW_TOKENS} if not given)."),
    "min_tokens": (int, "Tokens before which no end token or stop string ends the text."),
    "temperature": (float, "0 takes the most likely token; higher is more random."),
    "top_p": (float, "Sample from the smallest set of tokens that holds this much probability."),
    "top_k": (int, "Sample from this many most likely tokens; -1 is off."),
    "min_p": (float, "Drop tokens below this share of the most likely one's probability."),
    "seed": (int, "Makes the sampled tokens reproducible."),
    "stop": (list[str], "End the text before this string; may be repeated."),
    "stop_token_ids": (list[int], "End the text at this token; may be repeated."),
    "ignore_eos": (bool, "Go on after the model's end token."),
    "presence_penalty": (float, "Against tokens that the text holds already."),
    "frequency_penalty": (float, "Against tokens, by how often the text holds them."),
    "repetition_penalty": (float, "Against tokens of prompt and text; 1 is off."),
}
"""Those of ``SamplingParams`` that make sense for one text on a terminal."""


# -- options out of dataclasses ------------------------------------------------------------------------------------


def _parameter(name: str, kind: Any, text: str) -> python_inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if kind is bool:  # Either way, so that it can be turned off where the default or a config file has it on.
        flag += "/--no-" + name.replace("_", "-")
    # Without a value on the command line the field is not set, so that a config file and the defaults count.
    option = typer.Option(flag, help=text, show_default=False)
    return python_inspect.Parameter(
        name, python_inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _engine_parameters() -> Iterator[python_inspect.Parameter]:
    kinds: dict[str, Any] = {"int": int, "int | None": int, "float": float, "bool": bool}
    helps = field_help(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model":
            continue
        kind = list[str] if field.name == "adapters" else kinds.get(str(field.type), str)
        default = "" if field.default in (None, dataclasses.MISSING) else f" Default: {field.default}."
        yield _parameter(field.name, kind, helps[field.name] + default)


def _server_parameters() -> Iterator[python_inspect.Parameter]:
    from quire.server.settings import ServerSettings

    kinds: dict[str, Any] = {
        "int": int,
        "int | None": int,
        "float": float,
        "float | None": float,
        "bool": bool,
        "tuple[str, ...]": list[str],
        "tuple[Path, ...]": list[Path],
    }
    helps = field_help(ServerSettings)
    for field in dataclasses.fields(ServerSettings):
        default = "" if field.default in (None, ()) else f" Default: {field.default}."
        yield _parameter(field.name, kinds.get(str(field.type), str), helps[field.name] + default)


def _with_options(*groups: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of the engine, of sampling, of a server, and ``--config``; the command gets them as ``options``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in python_inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not python_inspect.Parameter.VAR_KEYWORD
        ]
        config = _parameter("config", Path, "A YAML file with these options; the command line wins.")
        added = [config] if groups else []
        if "sampling" in groups:
            added += [_parameter(name, kind, text) for name, (kind, text) in SAMPLING_OPTIONS.items()]
        if "server" in groups:
            added += list(_server_parameters())
        if "engine" in groups:
            # "seed" is both: the request's own, given here, makes the engine's pointless.
            taken = {parameter.name for parameter in (*own, *added)}
            added += [parameter for parameter in _engine_parameters() if parameter.name not in taken]

        def run(**given: Any) -> None:
            # Inside of typer, which would turn an interrupt and a closed pipe into exit codes of its own.
            with _one_sentence():
                command(**given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = python_inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return run

    return decorate


def _chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Options of the config file, overridden by those of the command line."""
    merged: dict[str, Any] = {}
    path = options.pop("config", None)
    if path is not None:
        merged.update(_read_config(path, {"model", *options}))
    merged.update({name: value for name, value in options.items() if value is not None and value != []})
    return merged


def _read_config(path: Path, known: Set[str]) -> dict[str, Any]:
    """The options of a YAML file. Those that the command does not have are refused by name."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"config file {str(path)!r} does not exist") from None
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or "it is no YAML"
        where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise InvalidArgument(f"config file {str(path)!r} cannot be read: {where}{problem}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"config file {str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    if found is None:  # empty, or nothing but comments
        return {}
    if not isinstance(found, dict):
        raise InvalidArgument(f"config file {str(path)!r} must hold a mapping of options")
    options = {str(name).replace("-", "_"): value for name, value in found.items()}
    if unknown := sorted(set(options) - known):
        raise InvalidArgument(
            f"config file {str(path)!r} has unknown options {unknown}; known here are {sorted(known)}"
        )
    if len(options) < len(found):
        raise InvalidArgument(f"config file {str(path)!r} gives an option twice, in kebab-case and in snake_case")
    return options


def _sampling(options: dict[str, Any], llm: LLM) -> SamplingParams:
    given = {name: options[name] for name in SAMPLING_OPTIONS if name in options}
    defaults = llm.default_params
    return defaults.replace(**{"max_tokens": DEFAULT_NEW_TOKENS, **given})


def _load(model: str | None, options: dict[str, Any], adapter: str | None = None) -> LLM:
    """``adapter``: loaded under its own name if ``adapters`` has none of that name."""
    from quire.llm import LLM

    engine = {name: value for name, value in options.items() if name not in SAMPLING_OPTIONS}
    chosen = engine.pop("model", DEFAULT_MODEL) if model is None else model
    engine.pop("model", None)
    if adapter is None:
        return LLM(chosen, **engine)
    named = named_paths(engine.get("adapters") or {})
    engine["adapters"] = named if adapter in named else {**named, adapter: adapter}
    try:
        return LLM(chosen, **engine)
    except NotFound as error:
        if adapter in named or not named:
            raise
        raise NotFound(f"{error}; and it is none of --adapters: {', '.join(map(repr, named))}") from error


AdapterOption = Annotated[
    str | None,
    typer.Option(
        "--adapter",
        "-a",
        help="Run under this adapter: a name given by --adapters, or what --adapters takes after NAME=.",
        show_default=False,
    ),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help=f"A bundled model, a directory or a Hugging Face id. Default: {DEFAULT_MODEL}.",
        show_default=False,
    ),
]


# -- commands ------------------------------------------------------------------------------------------------------


def _print_version(wanted: bool) -> None:
    if wanted:
        from quire.doctor import versions

        print(", ".join(f"{name} {found}" for name, found in versions().items()))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions of what matters.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is decided while loading.")] = False,
) -> None:
    del version
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr
    )


@app.command()
@_with_options("sampling", "engine")
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    model: ModelOption = None,
    adapter: AdapterOption = None,
    **options: Any,
) -> None:
    """Stream the continuation of a prompt to stdout; timing goes to stderr."""
    chosen = _chosen(options)
    text = sys.stdin.read() if prompt == "-" else prompt
    started = time.perf_counter()
    llm = _load(model, chosen, adapter)
    params = _sampling(chosen, llm)
    loaded = time.perf_counter()
    first: float | None = None
    count = 0
    with llm.session(text, adapter=adapter) as session:
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


UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Talk to the server at this address instead, as in http://127.0.0.1:8000."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="QUIRE_API_KEY", help="Key for that server.", show_default=False),
]


@app.command()
@_with_options("sampling", "engine")
def chat(
    model: ModelOption = None,
    adapter: AdapterOption = None,
    url: UrlOption = None,
    api_key: KeyOption = None,
    **options: Any,
) -> None:
    """Talk to a model in the terminal; /fork, /switch, /rewind, /adapter, /save, /load and /stats handle its memory."""
    from quire.terminal_chat import TerminalChat

    chosen = _chosen(options)
    if url is not None:
        from quire.remote_chat import run_remote_chat

        configured = chosen.pop("model", None)
        sampling = {"max_tokens": DEFAULT_NEW_TOKENS}
        sampling |= {name: chosen.pop(name) for name in SAMPLING_OPTIONS if name in chosen}
        if chosen:
            raise InvalidArgument(f"{sorted(chosen)} are options of an engine, and with --url the server has its own")
        run_remote_chat(url, model=model or configured, adapter=adapter, api_key=api_key, sampling=sampling)
        return
    llm = _load(model, chosen, adapter)
    TerminalChat(llm, _sampling(chosen, llm), adapter).run()


@app.command()
@_with_options("server", "engine")
def serve(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A bundled model, a directory or a Hugging Face id.")
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP: OpenAI's endpoints, and sessions that can be forked, rewound, saved. Ctrl-C stops it gently.

    Without --api-key the keys are those in the environment variable QUIRE_API_KEY, separated by commas.
    """
    from quire.server.settings import ServerSettings

    chosen = _chosen(options)
    fields = {field.name for field in dataclasses.fields(ServerSettings)}
    given = {field: chosen.pop(field) for field in fields & set(chosen)}
    if "api_key" not in given and (keys := os.environ.get("QUIRE_API_KEY")):
        given["api_key"] = [key.strip() for key in keys.split(",") if key.strip()]
    settings = ServerSettings(**given)
    configured = chosen.pop("model", DEFAULT_MODEL)
    try:
        from quire.server.serving import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "quire":
            raise
        raise Unsupported(
            f"quire serve needs the package {error.name or error}, which is not installed; pip install '.[server]' in Quire's folder brings it"
        ) from error
    from quire.async_llm import AsyncLLM

    run(AsyncLLM(configured if name is None else name, **chosen), settings)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A .quire state file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a state file holds: model, tokens, positions, layers, bytes, checks.

    The pairs of ranges_start_stop in the JSON are half open: [0, 24] means the positions 0 to 23.
    """
    from quire.inspection import describe, print_description

    found = describe(file)
    if as_json:
        print(json.dumps(found))
    else:
        print_description(found)


@app.command()
def models() -> None:
    """List bundled models, registered architectures and the kinds of state they have."""
    from rich.console import Console
    from rich.table import Table

    from quire.models.catalogue import bundled_adapters, bundled_models, registered_architectures

    console = Console(markup=False)
    bundled = Table("bundled model", "directory", title="Bundled models", title_justify="left")
    for name, path in bundled_models().items():
        bundled.add_row(name, str(path))
    console.print(bundled)
    adapters = Table("bundled adapter", "directory", title="Bundled adapters (LoRA)", title_justify="left")
    for name, path in bundled_adapters().items():
        adapters.add_row(name, str(path))
    console.print(adapters)
    known = Table(
        "architecture",
        "kinds of state",
        title="Architectures (from a directory or a Hugging Face id)",
        title_justify="left",
    )
    for name, kinds in registered_architectures().items():
        known.add_row(name, ", ".join(kinds))
    console.print(known)
    print("Any other decoder of transformers runs through its own layers if it passes the check when it is loaded.")


@app.command()
@_with_options("engine")
def capabilities(
    model: ModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print it for every kind of model; loads none.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it for every kind of model in Markdown; loads none.")
    ] = False,
    **options: Any,
) -> None:
    """Print the rule table: what this model on this device does, what it refuses, and why."""
    from quire.inspection import print_capabilities, print_rules
    from quire.kv.rule_table import combination_of

    chosen = _chosen(options)
    if as_json + everything + markdown > 1:
        raise InvalidArgument("--json, --all and --markdown are three ways to print; give one of them")
    if everything or markdown:
        print_rules(markdown=markdown)
        return
    with _load(model, chosen) as llm:
        own = combination_of(llm.model.layer_specs, len(llm.engine.runner.model.blocks))
        print_capabilities(llm.capabilities(), own, as_json=as_json)


@app.command()
def doctor() -> None:
    """Say what is used here and why, and what to do about what does not work."""
    from quire.doctor import examine, print_findings

    print_findings(examine())


@bench_app.command("latency")
@_with_options("engine")
def bench_latency(
    model: ModelOption = None,
    batch: Annotated[str, typer.Option(help="Batch sizes to decode with, by commas.")] = "1,4,16",
    prompt: Annotated[str, typer.Option(help="Prompt lengths to prefill, by commas.")] = "512,2048",
    decode: Annotated[int, typer.Option(help="Tokens to decode for each sequence.")] = 32,
    context: Annotated[int, typer.Option(help="Prompt length before decoding.")] = 128,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 3,
    peer: Annotated[str, typer.Option(help="Compare with: none, transformers.")] = "none",
    **options: Any,
) -> None:
    """Prefill and decode speed, with what the hardware could do and a peer in the same run."""
    from quire.bench.latency import run_latency

    chosen = _chosen(options)
    configured = chosen.pop("model", DEFAULT_MODEL)
    run_latency(
        configured if model is None else model,
        engine_options=chosen,
        batches=_integers("batch", batch),
        prompts=_integers("prompt", prompt),
        decode=decode,
        context=context,
        rounds=rounds,
        peer=peer,
    )


@bench_app.command("throughput")
@_with_options("engine")
def bench_throughput(
    model: ModelOption = None,
    requests: Annotated[int, typer.Option(help="Requests, all handed over at once.")] = 256,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Fraction of the lengths, which are 100 to 1,024 tokens. Default: measured, so that it takes minutes.",
            show_default=False,
        ),
    ] = None,
    peer: Annotated[str, typer.Option(help="Compare with: none, transformers.")] = "none",
    peer_batches: Annotated[str, typer.Option(help="Batch sizes of the peer to try, by commas.")] = "8,16,32,64",
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; the median counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random lengths and tokens.")] = 0,
    **options: Any,
) -> None:
    """Tokens a second of many requests at once, against a peer's continuous and static batches in the same run.

    It takes minutes; fewer --requests, a small --scale and --rounds 1 make it short, as in --requests 32 --scale 0.1 --rounds 1.
    """
    from quire.bench.throughput import run_throughput

    chosen = _chosen(options)
    configured = chosen.pop("model", DEFAULT_MODEL)
    run_throughput(
        configured if model is None else model,
        engine_options=chosen,
        requests=requests,
        scale=scale,
        rounds=rounds,
        seed=seed,
        peer=peer,
        peer_batches=_integers("peer-batches", peer_batches),
    )


@bench_app.command("state")
@_with_options("engine")
def bench_state(
    model: ModelOption = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the sequence that is forked, rewound and saved.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Repetitions of what is slow; quick verbs have 20 times as many.")] = 5,
    **options: Any,
) -> None:
    """What fork, copy, rewind, save, restore and a second chat turn cost; for a bundled model the start-up too."""
    from quire.bench.state import run_state, start_rows
    from quire.models.catalogue import bundled_models

    chosen = _chosen(options)
    configured = chosen.pop("model", DEFAULT_MODEL)
    name = configured if model is None else model
    run_state(
        name,
        engine_options=chosen,
        tokens=tokens,
        rounds=rounds,
        start=(lambda count: start_rows(count, name)) if name in bundled_models() else None,
    )


@bench_app.command("serve")
@_with_options()
def bench_serve(
    url: Annotated[str, typer.Argument(help="The server, as in http://127.0.0.1:8000.")],
    peer: Annotated[
        str | None, typer.Option(help="A second server to compare with, in interleaved rounds.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="By default the first that the server lists.", show_default=False),
    ] = None,
    peer_model: Annotated[str | None, typer.Option(help="The same of the second server.", show_default=False)] = None,
    api_key: KeyOption = None,
    peer_api_key: Annotated[str | None, typer.Option(help="Key for the second server.", show_default=False)] = None,
    requests: Annotated[int, typer.Option(help="Requests; of a trace its first ones.")] = 256,
    rate: Annotated[float, typer.Option(help="Requests a second, arriving at random; inf: all at once.")] = math.inf,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests under way at most; by default any number.", show_default=False)
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Lengths of prompts, LEAST-MOST.")] = "100-1024",
    output_tokens: Annotated[str, typer.Option(help="Lengths of answers, LEAST-MOST.")] = "100-1024",
    vocab_size: Annotated[int, typer.Option(help="Prompts are random token ids below this.")] = 1024,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace in Mooncake's format (JSONL), in place of random requests.", show_default=False),
    ] = None,
    scale: Annotated[float, typer.Option(help="Fraction of the trace's lengths.")] = 1.0,
    speed: Annotated[float, typer.Option(help="2 sends the trace in half the time.")] = 1.0,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Read answers token by token.")] = True,
    rounds: Annotated[int, typer.Option(help="Rounds; with a peer they are interleaved.")] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals and tokens.")] = 0,
) -> None:
    """Load a server: tokens a second, time to the first token, between tokens and to the end, by percentiles."""
    from quire.bench.serve_load import run_serve

    run_serve(
        url,
        peer=peer,
        model=model,
        peer_model=peer_model,
        api_key=api_key,
        peer_api_key=peer_api_key,
        requests=requests,
        rate=rate,
        concurrency=concurrency,
        prompt_tokens=_span("prompt-tokens", prompt_tokens),
        output_tokens=_span("output-tokens", output_tokens),
        vocab_size=vocab_size,
        trace=trace,
        scale=scale,
        speed=speed,
        stream=stream,
        rounds=rounds,
        seed=seed,
    )


def _span(name: str, text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not (least.isascii() and least.isdigit()) or (most and not (most.isascii() and most.isdigit())):
        raise InvalidArgument(f"--{name} {text!r}; LEAST-MOST is accepted, like 100-1024, or one number")
    return int(least), int(most or least)


def _integers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InvalidArgument(f"--{name} {text!r}; whole numbers of at least 1, separated by commas, are accepted")
    return found


# -- the entry point -----------------------------------------------------------------------------------------------


@contextmanager
def _one_sentence() -> Iterator[None]:
    """Turn what can go wrong into one line on stderr and an exit code."""
    try:
        yield
    except QuireError as error:
        _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _fail("interrupted", 130)
    except MemoryError:
        _fail(
            "this machine does not have enough memory for that; try a smaller model, kv_cache_memory or max_model_len",
            2,
        )
    except UnicodeError as error:
        _fail(f"text is not in the encoding of the terminal or pipe ({error}); PYTHONIOENCODING=utf-8 may help", 2)
    except BrokenPipeError:
        _drop_output()  # whoever read it is gone
        sys.exit(141)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            _fail(f"{error.filename}: {reason}", 2)
        if error.errno is None or isinstance(error, ConnectionError):
            _fail(reason, 2)
        _drop_output()
        _fail(f"output cannot be written: {reason}", 2)


def _drop_output() -> None:
    """Let what is still buffered for stdout go nowhere, so that the interpreter has nothing to complain about at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    print(f"quire: {message}", file=sys.stderr)
    sys.exit(code)


def main() -> None:
    """The command ``quire``."""
    with _one_sentence():
        try:
            app(prog_name="quire")
        finally:
            if sys.stdout is not None:  # None where the shell has closed it
                sys.stdout.flush()  # here, where a failure can still be told in a sentence


if __name__ == "__main__":
    main()
