"""Trains the adapter with PEFT, measures it on held-out files and writes its directory.

Everything that is random depends on ``--seed``: the weights at the start, the order of the
functions and how each is tokenized. Weights of the base model stay as they are; products run in
bfloat16 (autocast), the evaluation in float32 with the adapter rounded as it is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quire.base.errors import AlreadyExists, FailedPrecondition, InvalidArgument, QuireError

if TYPE_CHECKING:  # --help needs no torch.
    from .data import Function
    from .evaluation import Measurement

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""All linear maps of a block."""

_INTERRUPTED = 130
"""Exit status of a run that Ctrl-C ended, as shells have it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Every number of a run; the defaults are those of the bundled adapter. Checked when made.

    Raises:
        InvalidArgument: a value out of range.
    """

    sources: tuple[str, ...] = field(
        default=("stdlib", "torch"), metadata={"help": "importable top-level names; 'stdlib' is all of it"}
    )
    heldout_every: int = field(default=40, metadata={"help": "one file in so many is kept for evaluation"})
    rank: int = field(default=8, metadata={"help": "rank of the updates"})
    alpha: int = field(default=16, metadata={"help": "the updates are scaled by alpha / rank"})
    steps: int = field(default=240, metadata={"help": "optimizer steps"})
    batch: int = field(default=8, metadata={"help": "sequences of a step"})
    sequence_length: int = field(default=256, metadata={"help": "tokens of a sequence"})
    learning_rate: float = field(default=3e-3, metadata={"help": "of AdamW, at its highest"})
    evaluated: int = field(default=256, metadata={"help": "held-out functions to measure, at most"})
    seed: int = field(default=0, metadata={"help": "seed of weights and data order"})

    def __post_init__(self) -> None:
        for name in ("rank", "alpha", "steps", "batch", "learning_rate", "evaluated"):
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} must be greater than 0, got {getattr(self, name)}")
        if self.heldout_every < 2:
            raise InvalidArgument(f"heldout_every must be 2 or greater, got {self.heldout_every}")
        if self.sequence_length < 64:
            raise InvalidArgument(f"sequence_length must be 64 or greater, got {self.sequence_length}")
        if self.seed < 0:
            raise InvalidArgument(f"seed must be 0 or greater, got {self.seed}")
        if not self.sources:
            raise InvalidArgument("sources is empty; name at least one, such as 'stdlib'")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run."""

    base: Measurement
    adapter: Measurement
    functions: int
    """Functions trained on."""
    heldout: int
    """Functions measured."""
    seconds: float
    """Of training alone."""
    losses: tuple[float, ...]
    """Of each step."""
    origins: tuple[str, ...]
    """Name, version and licence of each source."""


def train(
    settings: Settings, model: str, output: Path, *, device: str = "cpu", force: bool = False, progress: IO[str]
) -> Result:
    """Trains, measures and writes ``adapter_config.json``, ``adapter_model.safetensors`` and
    ``README.md``.

    ``model`` is a bundled model or a directory that ``recipes.tiny_python`` made. The directory
    ``output`` appears whole at the end or not at all.

    Raises: AlreadyExists: ``output`` exists and ``force`` is false. FailedPrecondition: PEFT or
    transformers is not installed; no function to train on or to measure. InvalidArgument: the
    model's tokenizer is not one of ``recipes.tiny_python``. NotFound: no such model or source.
    """
    if output.exists() and not force:
        raise AlreadyExists(f"the output directory {output} exists already; choose another one or pass --force")
    try:
        import peft
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise FailedPrecondition(
            f"the recipe needs peft and transformers ({error}); pip install transformers peft"
        ) from error
    from recipes.tiny_python.files import replaced_directory
    from recipes.tiny_python.vocabulary import END, END_ID
    from tokenizers import Tokenizer
    from tqdm import tqdm

    from quire.models.catalogue import resolve_model

    from .data import sequences
    from .evaluation import measure

    directory = resolve_model(model)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if tokenizer.token_to_id(END) != END_ID:
        raise InvalidArgument(
            f"the tokenizer of {model!r} has no {END!r} as token {END_ID}; expected a model of recipes/tiny_python"
        )
    functions, heldout, origins = collect_functions(settings)

    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        adapted = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            peft.LoraConfig(
                r=settings.rank, lora_alpha=settings.alpha, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
            ),
        ).to(device)
    weights = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    texts = sequences(functions, tokenizer, length=settings.sequence_length, seed=settings.seed)
    losses: list[float] = []
    started = time.perf_counter()
    adapted.train()
    bar = tqdm(range(settings.steps), desc="training", unit="step", file=progress)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_scale(step, settings.steps)
        batch = list(itertools.islice(texts, settings.batch))
        ids_BT, labels_BT = (torch.stack(part).to(device) for part in zip(*batch, strict=True))
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = adapted(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    seconds = time.perf_counter() - started

    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.bfloat16())  # What is measured is what is written.
    adapted.eval()
    with adapted.disable_adapter():
        base = measure(adapted, tokenizer, heldout, progress=progress)
    result = Result(
        base=base,
        adapter=measure(adapted, tokenizer, heldout, progress=progress),
        functions=len(functions),
        heldout=len(heldout),
        seconds=seconds,
        losses=tuple(losses),
        origins=origins,
    )
    name = Path(model).name if directory == Path(model).expanduser() else model
    with replaced_directory(output, force=force) as part:
        _write(part, adapted, name, output.name, settings, result)
    return result


def learning_rate_scale(step: int, steps: int) -> float:
    """Linear warm-up over the first twentieth of the steps, then linear to 0."""
    warm = max(1, steps // 20)
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def collect_functions(settings: Settings) -> tuple[list[Function], list[Function], tuple[str, ...]]:
    """Functions to train on, functions to measure, and where they are from."""
    from recipes.tiny_python.corpus import collect, read_documents
    from recipes.tiny_python.settings import Recipe, Workplace

    from .data import functions_of

    recipe = Recipe(sources=settings.sources, heldout_every=settings.heldout_every)
    with tempfile.TemporaryDirectory(prefix="docstrings.") as scratch:
        work = Workplace(root=Path(scratch))
        origins = tuple(f"`{o.source}` {o.version} ({o.licence})" for o in collect(recipe, work))
        heldout = functions_of(read_documents(work.heldout_text))
        heads = {function.head for function in heldout}
        functions = [f for f in functions_of(read_documents(work.train_text)) if f.head not in heads]
    if not functions or not heldout:
        raise FailedPrecondition(
            f"{', '.join(settings.sources)}: {len(functions)} functions with a docstring to train on and {len(heldout)} "
            f"to measure; name more sources or change heldout_every ({settings.heldout_every})"
        )
    return functions, heldout[: settings.evaluated], origins


def _write(part: Path, adapted: Any, base: str, name: str, settings: Settings, result: Result) -> None:
    """The three files of the adapter, in ``part``."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = adapted.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": base,
        "inference_mode": True,
        "peft_type": "LORA",
        "target_modules": sorted(config["target_modules"]),  # A set: its order changes from run to run.
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (part / "adapter_config.json").write_text(text, encoding="utf-8")
    state = get_peft_model_state_dict(adapted)
    tensors = {key: state[key].to("cpu", torch.bfloat16).contiguous() for key in sorted(state)}
    save_file(tensors, part / "adapter_model.safetensors", metadata={"format": "pt"})
    # safetensors makes its file readable by the owner alone; the others have the mode that the
    # umask gives.
    (part / "adapter_model.safetensors").chmod((part / "adapter_config.json").stat().st_mode)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (part / "README.md").write_text(_readme(base, name, settings, result, size), encoding="utf-8")


def _readme(base: str, name: str, settings: Settings, result: Result, size: int) -> str:
    before, after = result.base, result.adapter
    tokens = settings.steps * settings.batch * settings.sequence_length
    sources = "\n".join(f"  - {origin}" for origin in result.origins)
    return f"""# {name}

A LoRA adapter (rank {settings.rank}, alpha {settings.alpha}, all linear maps of the blocks; bfloat16, \
{size / 1e6:.2f} MB, PEFT format) that makes `{base}` write a docstring below the head of a function. Made by Quire's \
recipe `recipes/docstring_adapter`.

- **Text**: {result.functions:,} functions and methods with a docstring; of the docstring the summary line. One \
file in {settings.heldout_every}, by a hash of its path, was kept for evaluation.
{sources}
- **Training**: {settings.steps:,} steps, {tokens:,} tokens in sequences of {settings.sequence_length}, batch \
{settings.batch}; AdamW, learning rate {settings.learning_rate:g}; bfloat16 autocast; {result.seconds / 60:.0f} \
minutes; seed {settings.seed}.
- **Result**, at temperature 0 in float32 over {result.heldout} functions of held-out files to which their authors gave \
a docstring (the base model's own training may have seen them):

| | `{base}` | with the adapter |
|---|---|---|
| opens a docstring after `def f(x):`, newline and indentation | {before.opened:.1%} | {after.opened:.1%} |
| the same where the prompt ends with the newline | {before.opened_after_newline:.1%} | {after.opened_after_newline:.1%} |
| opens and closes it within 40 tokens | {before.closed:.1%} | {after.closed:.1%} |
| nats per token of the authors' docstrings | {before.loss:.2f} | {after.loss:.2f} |

- **Good for**: demonstrations and tests of adapters. **Not good for**: documentation; the sentences are in the style \
of docstrings and are often wrong.
- **Licence**: that of Quire (Apache-2.0); the licences of the text are named above.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the recipe; the result is the exit status: 0, 2 for a refused call, 130 after Ctrl-C."""
    parsed = vars(_parser().parse_args(arguments))
    try:
        given: dict[str, Any] = {one.name: parsed[one.name] for one in dataclasses.fields(Settings)}
        settings = Settings(**{**given, "sources": tuple(given["sources"])})
        progress: IO[str] = io.StringIO() if parsed["quiet"] else sys.stderr
        result = train(
            settings,
            parsed["model"],
            parsed["output"],
            device=parsed["device"],
            force=parsed["force"],
            progress=progress,
        )
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return _INTERRUPTED
    print(json.dumps({"base": dataclasses.asdict(result.base), "adapter": dataclasses.asdict(result.adapter)}))
    print(parsed["output"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.docstring_adapter.train",
        description="Trains a LoRA adapter that writes docstrings, and writes it as a PEFT directory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="the adapter directory to make")
    parser.add_argument("--model", default="tiny-python", help="a bundled model or a directory of recipes/tiny_python")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--force", action="store_true", help="replace the output directory")
    parser.add_argument("--quiet", action="store_true", help="no progress bars of training and evaluation")
    for one in dataclasses.fields(Settings):
        option, text = "--" + one.name.replace("_", "-"), one.metadata["help"]
        if isinstance(one.default, tuple):
            parser.add_argument(option, nargs="+", default=list(one.default), metavar="NAME", help=text)
        else:
            parser.add_argument(option, type=type(one.default), default=one.default, help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
