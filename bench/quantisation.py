"""Loss by weights of 8 and 4 bits: next-token distributions beside those of the checkpoint's
weights, on source code of Python's library, in float32.

*KL* is from the checkpoint's distribution to the quantised one's, in nats, the mean over tokens;
*same first* counts tokens with the same likeliest successor.

``python bench/quantisation.py [--model tiny-python] [--tokens 1200] [--kinds int8,int4]``
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
from typing import Any

import torch
from torch import Tensor

from quire.base.config import EngineConfig
from quire.base.errors import QuireError, Unsupported
from quire.base.types import Add, Chunk, Remove, Step
from quire.build import Parts, build
from quire_bench.reports import print_json, print_table

LENGTH = 300
"""Tokens of a sequence."""


def loaded(model: str, quantization: str | None) -> Parts:
    return build(EngineConfig(model=model, dtype="float32", quantization=quantization, kv_cache_memory="256MiB"))


def log_probabilities(parts: Parts, ids: list[int]) -> Tensor:
    """Return float64 ``[T, V]`` of the successor of each token, sequence by sequence."""
    runner, found = parts.runner, []
    for start in range(0, len(ids), LENGTH):
        seq = runner.new_seq()
        output = runner.execute(Step((Add(seq),), (Chunk(seq, tuple(ids[start : start + LENGTH]), logits="all"),)))
        found.append(output.logits_RV.double().log_softmax(-1))
        runner.execute(Step((Remove(seq),), ()))
    return torch.cat(found)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, print the table and the JSON line; return the line's content."""
    plain = loaded(arguments.model, None)
    if plain.tokenizer is None:
        raise Unsupported(f"{arguments.model} has no tokenizer; give a model that has one")
    ids = plain.tokenizer.encode(inspect.getsource(json.decoder))[: arguments.tokens]
    base = log_probabilities(plain, ids)
    inside = torch.tensor([place for place in range(len(ids) - 1) if (place + 1) % LENGTH])
    after = torch.tensor(ids)[inside + 1].unsqueeze(1)
    lines: list[dict[str, Any]] = []
    for kind in (None, *arguments.kinds):
        parts = plain if kind is None else loaded(arguments.model, kind)
        found = base if kind is None else log_probabilities(parts, ids)
        lines.append(
            {
                "weights": kind or "checkpoint",
                "MiB": round(parts.model.parameter_bytes / 2**20, 1),
                "KL": float((base.exp() * (base - found)).sum(-1).mean()),
                "same first": float((found.argmax(-1) == base.argmax(-1)).double().mean()),
                "perplexity": float((-found[inside].gather(1, after)).mean().exp()),
            }
        )
    print_table(lines)
    result = {"benchmark": "quantisation", "model": arguments.model, "tokens": len(ids), "lines": lines}
    print_json(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["int8", "int4"])
    try:
        run(parser.parse_args())
    except QuireError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
