"""Perplexity of what follows chunks of real text, blended against full: the bundled model.

Python sources of the standard library: four chunks of a file, each computed alone behind the end
token, and the 64 tokens after them.
"""

from __future__ import annotations

import random
import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from blend_quality import Case, Method, make_case, run_blended
from plain_llama import PlainLlama
from tokenizers import Tokenizer

BUNDLED = Path(__file__).resolve().parents[1] / "src/quire/data/tiny-python"
LEAD = 0
CHUNKS, CHUNK, CONTINUATION = 4, 128, 64


def text_cases(model: PlainLlama, prompts: int, seed: int) -> Iterator[Case]:
    """Yield prompts of one file each."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    need = CHUNKS * CHUNK + CONTINUATION
    for path in random.Random(seed).sample(paths, len(paths)):
        ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids
        if len(ids) >= need and prompts:
            prompts -= 1
            chunks = tuple(tuple(ids[at : at + CHUNK]) for at in range(0, CHUNKS * CHUNK, CHUNK))
            yield make_case(model, chunks, tuple(ids[CHUNKS * CHUNK : need]), LEAD)


def losses(logits: torch.Tensor, case: Case) -> float:
    """Return nats per token of the continuation."""
    answers = case.tokens[-CONTINUATION + 1 :]
    return float(torch.nn.functional.cross_entropy(logits[-CONTINUATION:-1], answers))


def compare_text(
    model: PlainLlama, cases: Sequence[Case], methods: Mapping[str, Method], ratios: Sequence[float]
) -> list[dict[str, object]]:
    """Return a row of the table for each method and ratio."""
    full = [losses(case.full.logits, case) for case in cases]
    rows = []
    for ratio in ratios:
        for name, method in methods.items():
            found, kls, costs = [], [], []
            for case in cases:
                run, cost = run_blended(model, case, method, ratio)
                found.append(losses(run.logits, case))
                true = case.full.logits[-CONTINUATION:].log_softmax(-1)
                ours = run.logits[-CONTINUATION:].log_softmax(-1)
                kls.append(float((true.exp() * (true - ours)).sum(-1).mean()))
                costs.append(cost)
            rows.append(
                {
                    "method": name,
                    "ratio": ratio,
                    "perplexity": float(torch.tensor(found).mean().exp()),
                    "full": float(torch.tensor(full).mean().exp()),
                    "kl": statistics.fmean(kls),
                    "cost": statistics.fmean(costs),
                }
            )
    return rows
