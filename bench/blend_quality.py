"""Accuracy of blended answers, by method, share of rows and hops.

Prompts are those of ``recipes/chunk_recall``: chunks computed separately after BOS, and a question
whose answer takes 0, 1 or 2 aliases from chunk to chunk; the model is the recipe's. The first chunk
is exact, because only BOS precedes it, and the question always runs. Costs are the work of linear
layers over that of a full prefill of the rows after the first chunk.

``--text`` measures the bundled model's perplexity of Python sources instead.

``python bench/blend_quality.py [--prompts 200] [--ratios 0.15,0.3] [--methods v,oracle] [--kind
default] [--text]``
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.chunk_recall.task import VARIANTS, Kind

from blend_cases import METHODS, answer_plainly, compare, make_cases, make_edit, rank_correlations
from blend_text import BUNDLED, compare_text, text_cases
from plain_llama import PlainLlama
from quire.base.errors import InvalidArgument
from quire_bench.reports import print_json, print_table

MODEL = Path(__file__).resolve().parents[1] / "recipes/chunk_recall/model"
WIDE = ("errors", "attention_errors", "token_layers")
"""Fields of the JSON line that are not in the table."""
RATIOS = (0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="for each number of hops; files with --text")
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--methods", default="", help="names that contain one of these; empty: all")
    parser.add_argument(
        "--kind",
        choices=[*VARIANTS, "edit"],
        default="default",
        help="of prompts; edit: a second chunk of six was taken out",
    )
    parser.add_argument("--text", action="store_true", help="perplexity of Python sources, by the bundled model")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    ratios = [float(ratio) for ratio in given.ratios.split(",")]
    wanted = given.methods.split(",")
    methods = {name: method for name, method in METHODS.items() if any(part in name for part in wanted)}
    if not methods:
        raise InvalidArgument(field="methods", given=given.methods, allowed=f"parts of {', '.join(METHODS)}")
    torch.set_grad_enabled(False)
    if given.text:
        model = PlainLlama(BUNDLED)
        cases = list(text_cases(model, given.prompts, given.seed))
        rows = compare_text(partial(answer_plainly, model), cases, methods, ratios)
    else:
        model = PlainLlama(given.model)
        if given.kind == "edit":
            rng = random.Random(f"{given.seed}/edit")
            cases = [make_edit(model, rng, Kind(chunks=6), 1) for _ in range(3 * given.prompts)]
        else:
            cases = make_cases(model, VARIANTS[given.kind], given.prompts, given.seed)
        rows = compare(partial(answer_plainly, model), cases, methods, ratios)
    print_table([{name: value for name, value in row.items() if name not in WIDE} for row in rows])
    print_json(
        {
            "bench": "blend_quality",
            "kind": "text" if given.text else given.kind,
            "cases": len(cases),
            "rank_correlations": rank_correlations(cases),
            "rows": rows,
        }
    )


if __name__ == "__main__":
    main()
