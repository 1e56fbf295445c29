"""Shared parts of commands: options from configuration dataclasses and a YAML file, and exit
codes."""

from __future__ import annotations

import dataclasses
import inspect as python_inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from quire.base.config import EngineConfig, field_help
from quire.base.errors import InvalidArgument, NotFound, QuireError
from quire.base.other_names import ALIASES, COMMANDS, OPTIONS, translated
from quire.base.sampling_fields import Surface, declarations_on
from quire.base.sampling_params import SamplingParams
from quire.cli.chat import ANSWER_TOKENS, DEFAULT_MODEL

LOG = logging.getLogger("quire")

MODEL_KINDS = "A bundled model, a directory, a GGUF file or a Hugging Face id."
MODEL_HELP = f"{MODEL_KINDS} Default: {DEFAULT_MODEL}."
LISTED_HELP = f"{MODEL_KINDS} Without one, those on this machine are listed."

SAMPLING_DEFAULTS = {"max_tokens": ANSWER_TOKENS}
"""Defaults in a terminal that differ from the model's."""
DEFAULT_TEXTS = {"max_tokens": f"{ANSWER_TOKENS}; none in a chat with a chat template"}
"""The same, as the help says it."""


def _sampling_options() -> Iterator[tuple[str, tuple[Any, str]]]:
    for name, (_, found) in declarations_on(SamplingParams, Surface.COMMAND).items():
        kind = found.kind.option or found.kind.json
        repeated = " May be repeated." if get_origin(kind) is list else ""
        default = f" Default: {DEFAULT_TEXTS[name]}." if name in DEFAULT_TEXTS else ""
        yield name, (kind, found.help + repeated + default)


SAMPLING_OPTIONS: dict[str, tuple[Any, str]] = dict(_sampling_options())
"""Types and help texts of the fields that ``SamplingParams`` declares for commands."""

CHAT_OPTIONS: dict[str, tuple[Any, str]] = {
    "system": (str, "The system message, which says how the model is to answer; /system changes it."),
    "window": (
        int,
        "Keep the first --sink and the last tokens only, so many in all: the chat never fills the context.",
    ),
    "sink": (int, "First tokens that a --window keeps; 4 is usual. Default: 0."),
}
"""Types and help texts of what ``quire chat`` has besides: the system message, and arguments of
``LLM.session``."""


# -- options out of dataclasses --------------------------------------------------------------------


def _number(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return the parser of an option; its error repeats the given text."""

    def parse(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise typer.BadParameter(f"{text[:60]!r} is not {'an integer' if kind is int else 'a number'}") from None

    return parse


def _with_parser(parameter: python_inspect.Parameter) -> python_inspect.Parameter:
    """Return a parameter of a command, with a parser if it is a number."""
    for one in (int, float):
        for kind, shown in ((one, one.__name__), (list[one], f"list[{one.__name__}]")):  # type: ignore[valid-type]
            match get_args(parameter.annotation):
                case (given, OptionInfo() as option) if given in (kind, kind | None):
                    option.parser, option.metavar = _number(one), f"<{shown}>"
    return parameter


_KINDS: dict[str, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "float | None": float,
    "bool": bool,
    "tuple[str, ...]": list[str],
    "str | tuple[str, ...] | None": list[str],
    "tuple[float, ...]": list[float],
    "tuple[Path, ...]": list[Path],
}
"""Types of options by the annotations of fields; all others are texts."""


def _parameter(name: str, kind: Any, text: str) -> python_inspect.Parameter:
    flag = "--" + name.replace("_", "-")
    if others := [other for other, option in OPTIONS.items() if option.own == flag]:
        text += f" Also {', '.join(others)}."
    if kind is bool:  # Both flags, so that a value that is on by default or by a config file can be turned off.
        flag += "/--no-" + name.replace("_", "-")
    # An option that is not given stays unset, so that the config file and the defaults apply.
    option = typer.Option(flag, help=text, show_default=False)
    return _with_parser(
        python_inspect.Parameter(
            name, python_inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
        )
    )


def _config_parameters(config: type[Any]) -> Iterator[python_inspect.Parameter]:
    """Yield an option for every field of a configuration."""
    helps = field_help(config)
    for field in dataclasses.fields(config):
        kind = (
            list[str] if field.name in ("adapters", "override_generation_config") else _KINDS.get(str(field.type), str)
        )
        default = "" if field.default in (None, (), dataclasses.MISSING) else f" Default: {field.default}."
        yield _parameter(field.name, kind, helps[field.name] + default)


class WordedCommand(TyperCommand):
    """A command that knows other programs' names of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            known = {
                name: not getattr(parameter, "is_flag", False)
                for parameter in self.params
                for name in (*parameter.opts, *parameter.secondary_opts)
            }
            args, notes, variables = translated(args, known)
            for name, says in notes.items():
                LOG.warning("%s: %s", name, says)
            os.environ.update(variables)
        return super().parse_args(ctx, args)


class WordedGroup(TyperGroup):
    """A group that knows other programs' names of its commands: it runs the same command, or
    suggests another one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in ALIASES:
            args = [ALIASES[args[0]], *args[1:]]
        if args and args[0] in COMMANDS and args[0] not in self.commands and not ctx.resilient_parsing:
            raise InvalidArgument(f"there is no command {args[0]}; {COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)


def command(
    app: typer.Typer,
    *groups: str,
    name: str | None = None,
    more: Mapping[str, tuple[Any, str]] = MappingProxyType({}),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command with ``--config``, the options of ``groups`` as keywords, and those of
    ``more`` (types and help texts). ``groups``: "chat", "sampling", "server", "engine". An error
    becomes one sentence and an exit code."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            _with_parser(parameter)
            for parameter in python_inspect.signature(function, eval_str=True).parameters.values()
            if parameter.kind is not python_inspect.Parameter.VAR_KEYWORD
        ]
        config = _parameter("config", Path, "A YAML file with these options; the command line wins.")
        added = [config] if groups else []
        chat, sampling = CHAT_OPTIONS if "chat" in groups else {}, SAMPLING_OPTIONS if "sampling" in groups else {}
        added += [_parameter(name, kind, text) for name, (kind, text) in {**chat, **sampling, **more}.items()]
        if "server" in groups:
            from quire.server.http.settings import ServerSettings

            added += _config_parameters(ServerSettings)
        if "engine" in groups:
            # Both have "seed". With the request's own seed, the engine's is not needed.
            taken = {"model", *(parameter.name for parameter in (*own, *added))}
            added += [parameter for parameter in _config_parameters(EngineConfig) if parameter.name not in taken]

        def run(**given: Any) -> None:
            # Called inside typer, which has its own exit codes for an interrupt and a closed pipe.
            with one_sentence([parameter.name for parameter in added]):
                function(**given)

        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = python_inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        # In a list of commands typer truncates the help, but not ``short_help``: give it the first
        # paragraph.
        first = (python_inspect.getdoc(function) or "").partition("\n\n")[0]
        app.command(name, cls=WordedCommand, short_help=" ".join(first.split()))(run)
        return run

    return decorate


def chosen_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the config file, overridden by those of the command line."""
    merged: dict[str, Any] = {}
    path = options.pop("config", None)
    if path is not None:
        merged.update(read_config(path, {"model", *options}))
    merged.update({name: value for name, value in options.items() if value is not None and value != []})
    return merged


def given_model(
    model: str | None, options: dict[str, Any], argument: str | None = None
) -> tuple[str | None, dict[str, Any]]:
    """Return the model of the command line (as an option or an ``argument``) or of the config file,
    None without one, and the other options."""
    if model is not None and argument is not None:
        raise InvalidArgument(f"the model is given twice, as {argument!r} and as --model {model!r}; give it once")
    model, chosen = model if argument is None else argument, chosen_options(options)
    configured = chosen.pop("model", None)
    return configured if model is None else model, chosen


def chosen_model(model: str | None, options: dict[str, Any], argument: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the result of ``given_model``, with the default model in place of None."""
    given, chosen = given_model(model, options, argument)
    return DEFAULT_MODEL if given is None else given, chosen


def read_config(path: Path, known: Set[str]) -> dict[str, Any]:
    """Return the options of a YAML file. Refuse unknown options by name."""
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
        reason = error.strerror if isinstance(error, OSError) else None
        raise InvalidArgument(
            f"config file {str(path)!r} cannot be read: {reason or str(error).splitlines()[0]}"
        ) from error
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


# -- options that several commands have ------------------------------------------------------------

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
        help=MODEL_HELP,
        show_default=False,
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="Talk to the server at this address instead, as in http://127.0.0.1:8000."),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="QUIRE_API_KEY", help="Key for that server.", show_default=False),
]


# -- failures --------------------------------------------------------------------------------------


@contextmanager
def one_sentence(options: Collection[str] = ()) -> Iterator[None]:
    """Convert an error to an exit code and a line on stderr that names one of ``options``."""
    try:
        yield
    except QuireError as error:
        name = (error.field or "").split(".")[0]
        option = f"--{name.replace('_', '-')}: " if name in options else ""
        _fail(option + " ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _fail("interrupted", 130)
    except MemoryError:
        _fail(
            "this machine does not have enough memory for that; try a smaller model, kv_cache_memory or max_model_len",
            2,
        )
    except ImportError as error:
        _fail(f"{error}; quire doctor tells which packages work here", 2)
    except UnicodeError as error:
        _fail(f"text is not in the encoding of the terminal or pipe ({error}); PYTHONIOENCODING=utf-8 may help", 2)
    except BrokenPipeError:
        _drop_output()  # the reading process has ended
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
    """Discard buffered output for stdout, so that the interpreter reports no error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    print(f"quire: {message}", file=sys.stderr)
    sys.exit(code)
