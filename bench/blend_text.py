"""Perplexity of text after chunks of real text, blended against full: the bundled model.

Python sources of the standard library: four chunks of a file, each computed separately after the
end token, and the 64 tokens after them, which run like a question.
"""

from __future__ import annotations

import math
import random
import statistics
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from blend_cases import NAIVE, Backend, Case, Method, interval, make_case
from plain_llama import PlainLlama

BUNDLED = Path(__file__).resolve().parents[1] / "src/quire/data/tiny-python"
LEAD = 0
CHUNKS, CHUNK, CONTINUATION = 4, 128, 64


def text_cases(model: PlainLlama, files: int, seed: int) -> Iterator[Case]:
    """Yield the prompts of ``files`` files."""
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    need = CHUNKS * CHUNK + CONTINUATION
    for path in random.Random(seed).sample(paths, len(paths)):
        ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")).ids
        if len(ids) >= need and files:
            files -= 1
            chunks = [ids[at : at + CHUNK] for at in range(0, CHUNKS * CHUNK, CHUNK)]
            yield make_case(model, chunks, ids[CHUNKS * CHUNK : need], LEAD)


def compare_text(
    backend: Backend, cases: Sequence[Case], methods: Mapping[str, Method], ratios: Sequence[float]
) -> list[dict[str, object]]:
    """Return the table: a full prefill, reuse alone, then each method at each ratio."""
    answers = [case.tokens[1 - CONTINUATION :] for case in cases]
    full = [case.full.logits[-CONTINUATION:].log_softmax(-1) for case in cases]

    def losses(logits: Sequence[torch.Tensor]) -> list[float]:
        pairs = zip(logits, answers, strict=True)
        return [float(torch.nn.functional.cross_entropy(given[:-1], ids)) for given, ids in pairs]

    best = losses(full)
    rows: list[dict[str, object]] = [
        {"method": "full", "ratio": 1.0, "perplexity": math.exp(statistics.fmean(best)), "cost": 1.0}
    ]
    for ratio, name, method in [
        (0.0, "reuse alone", NAIVE),
        *((ratio, name, method) for ratio in ratios for name, method in methods.items()),
    ]:
        found = [backend(case, method, ratio) for case in cases]
        ours = [answer.logits[-CONTINUATION:].log_softmax(-1) for answer in found]
        kls = [float((true.exp() * (true - own)).sum(-1).mean()) for true, own in zip(full, ours, strict=True)]
        low, high = interval(kls)
        rows.append(
            {
                "method": name,
                "ratio": ratio,
                "perplexity": math.exp(statistics.fmean(losses(ours))),
                "kl": statistics.fmean(kls),
                "low": low,
                "high": high,
                "agree": statistics.fmean(
                    float((true.argmax(-1) == own.argmax(-1)).float().mean())
                    for true, own in zip(full, ours, strict=True)
                ),
                "cost": statistics.fmean(answer.cost for answer in found),
            }
        )
    return rows
