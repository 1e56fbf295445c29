"""Trains the model, measures it, and writes its directory in the form of transformers.

Everything random depends on ``--seed``. A stage of the curriculum ends when the model is good
enough at it; without the first stages nothing is learned.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .task import ASK, BOS, EOS, MAX_HOPS, WORDS, Kind, make_prompt, make_question

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

STAGES = (
    Kind(chunks=1, longest=16),
    Kind(chunks=2, longest=20, aliases=0.0),
    Kind(chunks=2, longest=24),
    Kind(longest=24),
    Kind(longest=64, distractors=0.05, overridden=0.05),
)
"""The curriculum; the last stage takes the steps that are left."""
GOOD_ENOUGH = 0.93
TOKENS = 2560
"""Of a step, about: longer prompts come in smaller batches."""
QUESTIONS = 4
"""Asked behind a prompt in training."""
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts of one step, filled up with EOS. Letters: B prompts, S tokens."""

    ids: Tensor
    """int64 ``[B, S]``."""
    labels: Tensor
    """int64 ``[B, S]``: the value that a token stands for, or IGNORED."""
    asked: Tensor
    """int8 ``[B, S]``: 1 + hops where a question asks, else 0."""


def build_model(seed: int, layers: int = 5, width: int = 96) -> LlamaForCausalLM:
    """Return the model with random weights; the global generator stays as it was."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_batch(rng: random.Random, kind: Kind) -> Batch:
    """Draw the prompts of a step, whose chunks are about equally long."""
    import torch

    longest = rng.randint(kind.shortest, kind.longest)
    kind = replace(kind, shortest=max(kind.shortest, longest // 2), longest=longest)
    rows = []
    for _ in range(max(1, TOKENS // (kind.chunks * longest))):
        prompt = make_prompt(rng, kind)
        ids = prompt.body
        labels = dict(prompt.labels)
        asked = {}
        for _ in range(QUESTIONS):
            key = rng.choice([key for hops in range(MAX_HOPS + 1) for key in prompt.keys(hops)])
            made = prompt.known[key]
            ids += [ASK, key]
            assert made.value is not None
            labels[len(ids) - 1] = made.value
            asked[len(ids) - 1] = 1 + made.hops
        rows.append((ids, labels, asked))
    shape = (len(rows), max(len(ids) for ids, _, _ in rows))
    batch = Batch(
        ids=torch.full(shape, EOS), labels=torch.full(shape, IGNORED), asked=torch.zeros(shape, dtype=torch.int8)
    )
    for row, (ids, labels, asked) in enumerate(rows):
        batch.ids[row, : len(ids)] = torch.tensor(ids)
        for tensor, values in ((batch.labels, labels), (batch.asked, asked)):
            tensor[row, list(values)] = torch.tensor(list(values.values()), dtype=tensor.dtype)
    return batch


def train(
    steps: int, seed: int, *, stages: Sequence[Kind] = STAGES, minutes: float = float("inf"), report_every: int = 50
) -> LlamaForCausalLM:
    """Train from random weights: Muon for the matrices of the blocks, AdamW for the rest.

    The learning rate stays in all stages but the last, and falls there to nothing.
    """
    import torch

    model = build_model(seed)
    rng = random.Random(f"{seed}/train")
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
    rest = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=0.004, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.98), weight_decay=0.0),
    )
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    stage, entered, recent = 0, 0, 0.0
    began = time.monotonic()
    for step in range(steps):
        batch = make_batch(rng, stages[stage])
        logits = model(input_ids=batch.ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        last = stage == len(stages) - 1
        done = max((step - entered) / (steps - entered), (time.monotonic() - began) / (60 * minutes)) if last else 0.0
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50) * max(0.0, min(1.0, 1.6 * (1 - done)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if done >= 1.0:
            break
        asked = batch.asked > 0
        right = float((logits.argmax(-1) == batch.labels)[asked].float().mean())
        recent += 0.05 * (right - recent)
        if step % report_every == 0:
            print(
                f"step {step}  stage {stage}  loss {loss.item():.3f}  right {recent:.3f}  "
                f"{time.monotonic() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        if recent > GOOD_ENOUGH and not last:
            stage, entered, recent = stage + 1, step, 0.0
    return model.eval()


def accuracy(model: LlamaForCausalLM, kind: Kind, prompts: int, seed: int) -> tuple[float, ...]:
    """Return the share of right answers to questions of 0, 1, ... hops, ``prompts`` of each."""
    import torch

    shares = []
    with torch.inference_mode():
        for hops in range(MAX_HOPS + 1):
            rng = random.Random(f"{seed}/evaluate/{hops}")
            right = 0
            for _ in range(prompts):
                question = make_question(rng, kind, hops)
                logits = model(input_ids=torch.tensor([question.tokens]), use_cache=False).logits
                right += int(logits[0, -1].argmax()) == question.answer
            shares.append(right / prompts)
    return tuple(shares)


def tokenizer_text() -> str:
    """Return a ``tokenizer.json`` of words between spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer.to_str(pretty=True)


def save(model: LlamaForCausalLM, output: Path) -> None:
    """Write weights in float16, configuration and tokenizer."""
    import torch

    model.to(torch.float16).save_pretrained(output)
    (output / "tokenizer.json").write_text(tokenizer_text(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.chunk_recall.train", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory to write; it must not exist")
    parser.add_argument("--steps", type=int, default=6000, help="optimizer steps, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="time, at most")
    parser.add_argument("--evaluated", type=int, default=300, help="prompts for each number of hops")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.output.exists():
        print(f"error: {chosen.output} exists; choose another directory", file=sys.stderr)
        return 2
    model = train(chosen.steps, chosen.seed, minutes=chosen.minutes)
    save(model, chosen.output)
    model = model.float()
    for name, kind in VARIANTS.items():
        print(json.dumps({"kind": name, "accuracy": accuracy(model, kind, chosen.evaluated, chosen.seed)}), flush=True)
    return 0


VARIANTS = {
    "default": Kind(),
    "64": Kind(shortest=64, longest=64),
    "distractors": Kind(distractors=0.2),
    "overridden": Kind(overridden=0.2),
    "repeated": Kind(repeated=True),
    "permuted": Kind(permuted=True),
}
"""Kinds that are measured after training."""

if __name__ == "__main__":
    sys.exit(main())
