"""The command line: one subcommand a stage, and ``all``.

Options of the recipe come from its dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.base.errors import AlreadyExists, QuireError

from .settings import PRESETS, Recipe, Workplace

_INTERRUPTED = 130
"""Exit status of a run that Ctrl-C ended, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a stage; the result is the exit status: 0, 2 for a refused call, 130 after Ctrl-C."""
    parsed = _parser().parse_args(arguments)
    try:
        recipe = _recipe(parsed)
        return _run(parsed.stage, parsed, recipe, Workplace(root=parsed.work))
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the last checkpoint, if there is one, is whole", file=sys.stderr)
        return _INTERRUPTED


def _run(stage: str, parsed: argparse.Namespace, recipe: Recipe, work: Workplace) -> int:
    # torch and transformers are only needed by the later stages; --help stays quick.
    if stage == "all" and parsed.output.exists() and not parsed.force:
        raise AlreadyExists(f"the output directory {parsed.output} exists already; choose another one or pass --force")
    stages = list(_STAGES) if stage == "all" else [stage]
    for name in stages:
        if stage == "all" and parsed.resume and _STAGES[name] and (work.root / _STAGES[name]).exists():
            continue
        print(f"== {name}", file=sys.stderr)
        if (status := _run_one(name, parsed, recipe, work)) != 0:
            return status
    return 0


_STAGES = {
    "collect": "SOURCES.json",
    "tokenizer": "tokenizer.json",
    "pack": "tokens.heldout.npy",
    "train": "",
    "evaluate": "",
    "export": "",
}
"""The stages in order, with the last file of those that ``all --resume`` need not repeat."""


def _run_one(stage: str, parsed: argparse.Namespace, recipe: Recipe, work: Workplace) -> int:
    if stage == "collect":
        from .corpus import collect

        for origin in collect(recipe, work, force=parsed.force):
            print(json.dumps(asdict(origin)))
    elif stage == "tokenizer":
        from .vocabulary import train_tokenizer

        print(f"{train_tokenizer(recipe, work, force=parsed.force).get_vocab_size()} tokens in {work.tokenizer}")
    elif stage == "pack":
        from .packing import pack

        train_tokens, heldout_tokens = pack(recipe, work, force=parsed.force)
        print(f"{train_tokens:,} training tokens, {heldout_tokens:,} held-out tokens")
    elif stage == "train":
        return _train(parsed, recipe, work)
    elif stage == "evaluate":
        from .evaluate import evaluate

        result = evaluate(
            work,
            sequences=parsed.eval_sequences,
            files=parsed.eval_files,
            batch=parsed.eval_batch,
            device=parsed.device,
        )
        print(json.dumps(asdict(result)))
    else:
        from .export import export

        print(export(work, parsed.output, force=parsed.force))
    return 0


def _train(parsed: argparse.Namespace, recipe: Recipe, work: Workplace) -> int:
    from .train import TrainingOptions, train

    names = {field.name for field in dataclasses.fields(TrainingOptions)}
    values = {name: value for name, value in vars(parsed).items() if name in names}
    # `all --resume` also begins a run that never got as far as a checkpoint.
    if parsed.stage == "all" and not work.checkpoint.exists():
        values["resume"] = False
    run = train(recipe, work, TrainingOptions(**values))
    complete = run.finished or run.step == parsed.stop_after
    print(f"{run.step} steps, last loss {run.losses[-1]:.3f}, checkpoint {work.checkpoint}")
    if not complete:
        print("interrupted; go on with --resume", file=sys.stderr)
    return 0 if complete else _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.tiny_python", description="Makes the model tiny-python from Python sources."
    )
    subparsers = parser.add_subparsers(dest="stage", required=True, metavar="STAGE")
    texts = {
        "collect": "gather source files, note their licences, split off held-out files",
        "tokenizer": "train the byte-level BPE",
        "pack": "tokenize the text",
        "train": "train, with checkpoints; Ctrl-C saves",
        "evaluate": "held-out loss and recall of the checkpoint",
        "export": "write the model directory",
        "all": "every stage in order",
    }
    for stage, text in texts.items():
        sub = subparsers.add_parser(stage, help=text, description=text)
        sub.add_argument("--work", type=Path, required=True, help="directory of this run's files")
        if stage not in ("evaluate",):
            sub.add_argument("--force", action="store_true", help="overwrite what this stage makes")
        if stage in ("collect", "tokenizer", "pack", "train", "all"):
            _add_recipe(sub)
        else:
            # Later stages take the settings out of the checkpoint.
            sub.set_defaults(preset="bundled")
        if stage in ("train", "all"):
            _add_training(sub)
        if stage in ("evaluate", "train", "all"):
            sub.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
        if stage in ("evaluate", "all"):
            sub.add_argument("--eval-sequences", type=int, default=256, help="held-out sequences at most")
            sub.add_argument("--eval-files", type=int, default=200, help="made-up files for recall")
            sub.add_argument("--eval-batch", type=int, default=8, help="sequences of one forward pass")
        if stage in ("export", "all"):
            sub.add_argument("--output", type=Path, required=True, help="the model directory to make")
    return parser


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recipe", "the defaults are those of the preset")
    group.add_argument("--preset", choices=sorted(PRESETS), default="bundled", help="default: bundled")
    for field in dataclasses.fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        text = field.metadata["help"]
        if isinstance(field.default, tuple):
            group.add_argument(option, nargs="+", default=None, metavar="NAME", help=text)
        else:
            kind = type(field.default)
            group.add_argument(option, type=kind, default=None, metavar=kind.__name__.upper(), help=text)


def _add_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--stop-after", type=int, default=0, help="stop and save after so many steps in all")
    parser.add_argument("--checkpoint-every", type=int, default=200, help="steps from checkpoint to checkpoint")
    parser.add_argument("--report-every", type=int, default=10, help="steps from one progress line to the next")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that prepare sequences")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")


def _recipe(parsed: argparse.Namespace) -> Recipe:
    """The preset with the options that were given."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(Recipe):
        value = getattr(parsed, field.name, None)
        if value is not None:
            given[field.name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(PRESETS[parsed.preset], **given)
