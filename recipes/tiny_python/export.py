"""Stage ``export``: the checkpoint directory that ``quire.LLM`` and ``transformers`` load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from quire.base.errors import AlreadyExists, FailedPrecondition
from quire.models.catalogue import bundled_models

from .files import read_json, replaced_directory, require
from .network import round_weights
from .packing import load_tokens
from .settings import Workplace
from .train import Run, load_run
from .vocabulary import END, PAD, load_tokenizer


def export(work: Workplace, output: Path, *, force: bool = False) -> Path:
    """Writes bfloat16 weights, configuration, tokenizer and README to ``output``, in one piece.

    Raises:
        AlreadyExists: ``output`` exists and ``force`` is false.
        FailedPrecondition: no checkpoint, or no evaluation of this very checkpoint.
    """
    if output.exists() and not force:
        raise AlreadyExists(f"the output directory {output} exists already; choose another one or pass --force")
    run = load_run(work, torch.device("cpu"))
    evaluation = read_json(require(work.evaluation, "evaluate"))
    if evaluation["step"] != run.step:
        raise FailedPrecondition(
            f"{work.evaluation} is of step {evaluation['step']} and the checkpoint of step {run.step}; evaluate again"
        )
    readme = _readme(run, work, output.name, evaluation)
    model = run.model
    assert isinstance(model, LlamaForCausalLM)
    round_weights(model)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=load_tokenizer(work), eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    # Written by hand, so that a new model is talked to as the bundled one is.
    template = bundled_models()["tiny-python"] / "chat_template.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    with replaced_directory(output, force=force) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        # safetensors makes its file readable by the owner alone; the others have the mode that the
        # umask gives.
        (part / "model.safetensors").chmod((part / "config.json").stat().st_mode)
        (part / "README.md").write_text(readme, encoding="utf-8")
    return output


def _readme(run: Run, work: Workplace, name: str, evaluation: dict[str, Any]) -> str:
    recipe, recall = run.recipe, evaluation["recall"]
    parameters = sum(p.numel() for p in run.model.parameters())
    seen = run.step * recipe.batch * recipe.sequence_length
    origins = "\n".join(
        f"  - `{o['source']}` {o['version']} ({o['licence']}): {o['files']:,} files, {o['heldout_files']:,} of them "
        f"for evaluation, {o['bytes'] / 1e6:.1f} MB"
        for o in read_json(require(work.sources, "collect"))
    )
    unfinished = "" if run.finished else f" of the {recipe.steps:,} that the settings ask for"
    return f"""# {name}

A {parameters / 1e6:.2f}M-parameter Llama ({recipe.layers} layers, width {recipe.hidden_size}, {recipe.heads} query \
heads, {recipe.kv_heads} KV heads, head size {recipe.head_size}, tied embeddings, RoPE base {recipe.rope_theta:,.0f}; \
bfloat16) that completes Python and recalls assigned values. Made from random weights by Quire's recipe \
`recipes/tiny_python`; it owes nothing to any other model.

- **Tokenizer**: byte-level BPE, {recipe.vocab_size:,} entries, trained on the same text; digits are single tokens, a \
newline and its indentation are one token. `<|end|>` (0) separates documents and ends text, `<|pad|>` (1); \
`<|user|>` and `<|assistant|>` (2, 3) are reserved and untrained. No BOS is added.
- **Text**: {len(load_tokens(work.train_tokens)):,} tokens of Python source installed on the machine, and made-up \
modules of assignments and checks for {recipe.synthetic_fraction:.0%} of the sequences.
{origins}
- **Training**: {run.step:,} steps{unfinished}, {seen:,} tokens in sequences of \
{recipe.sequence_length:,}, batch {recipe.batch}; Muon (learning rate {recipe.muon_lr:g}, weight decay \
{recipe.weight_decay:g}) for matrices, AdamW ({recipe.adamw_lr:g}) for the rest; bfloat16 autocast; \
{run.seconds / 60:,.0f} minutes on {run.device}; seed {recipe.seed}.
- **Result**: evaluation loss {evaluation["heldout_loss"]:.2f} nats per token over \
{evaluation["heldout_tokens"]:,} tokens of unseen files; {recall["digits"]:.1%} of the digits after `==` in \
unseen check lines are the most likely token (chance 10 %): {recall["direct_digits"]:.1%} where a number was assigned \
({recall["direct_checks"]:,} lines), {recall["alias_digits"]:.1%} where another name was \
({recall["alias_checks"]:,} lines); all four digits are right in \
{recall["values"]:.1%} of the lines.
- **Good for**: demonstrations, and tests that need a model whose attention means something. **Not good for**: \
writing programs.
"""
