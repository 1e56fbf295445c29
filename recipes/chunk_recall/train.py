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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .task import ASK, BOS, EOS, MAX_HOPS, VARIANTS, WORDS, Kind, make_prompt, make_question

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

STAGES = (
    (Kind(chunks=1, longest=16), 6144),
    (Kind(chunks=2, longest=20, aliases=0.0), 4096),
    (Kind(chunks=2, longest=24), 4096),
    (Kind(longest=32), 4096),
    (Kind(longest=64, distractors=0.03, overridden=0.03), 4096),
)
"""The curriculum: prompts, and about how many tokens of them a step has. The last stage takes the
steps that are left."""
GOOD_ENOUGH = 0.91
"""Share of right answers at which a stage ends."""
LAST_STAGE = 0.7
"""Share of the steps after which the last stage has begun at the latest; the learning rate falls
from then on, linearly, to nothing."""
QUESTIONS = 8
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


def make_batch(rng: random.Random, kind: Kind, tokens: int) -> Batch:
    """Draw prompts of about so many tokens, whose chunks are about equally long."""
    import torch

    longest = rng.randint(kind.shortest, kind.longest)
    kind = replace(kind, shortest=max(kind.shortest, longest // 2), longest=longest)
    rows = []
    for _ in range(max(1, tokens // (kind.chunks * longest))):
        prompt = make_prompt(rng, kind)
        ids = prompt.body
        labels = dict(prompt.labels)
        asked = {}
        for _ in range(QUESTIONS):
            key = rng.choice(rng.choice([keys for hops in range(MAX_HOPS + 1) if (keys := prompt.keys(hops))]))
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


def train(steps: int, seed: int, report_every: int = 50, start: Path | None = None) -> LlamaForCausalLM:
    """Train from random weights, or in the last stage alone from a model: Muon for the matrices of
    the blocks, AdamW for the rest."""
    import torch
    from transformers import LlamaForCausalLM

    model = build_model(seed) if start is None else LlamaForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    last_stage = LAST_STAGE if start is None else 0.0
    rng = random.Random(f"{seed}/train")
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
    rest = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, lr=0.004, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.98), weight_decay=0.0),
    )
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    stage, recent = 0, 0.0
    began = time.monotonic()
    for step in range(steps):
        if step >= last_stage * steps:
            stage = len(STAGES) - 1
        batch = make_batch(rng, *STAGES[stage])
        logits = model(input_ids=batch.ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = min(1.0, (step + 1) / 50, (1 - step / steps) / (1 - last_stage))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        right = float((logits.argmax(-1) == batch.labels)[batch.asked > 0].float().mean())
        recent += 0.05 * (right - recent)
        if step % report_every == 0:
            said = f"step {step}  stage {stage}  loss {loss.item():.3f}  right {recent:.3f}"
            print(f"{said}  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if recent > GOOD_ENOUGH and stage < len(STAGES) - 1:
            stage, recent = stage + 1, 0.0
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
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps")
    parser.add_argument("--start", type=Path, help="a model to train on from, in the last stage")
    parser.add_argument("--evaluated", type=int, default=300, help="prompts for each number of hops")
    parser.add_argument("--report-every", type=int, default=50, help="steps between two lines of progress")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.output.exists():
        print(f"error: {chosen.output} exists; choose another directory", file=sys.stderr)
        return 2
    model = train(chosen.steps, chosen.seed, chosen.report_every, chosen.start)
    save(model, chosen.output)
    model = model.float()
    for name, kind in VARIANTS.items():
        print(json.dumps({"kind": name, "accuracy": accuracy(model, kind, chosen.evaluated, chosen.seed)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
