"""How far Quire and llama.cpp agree on a GGUF file: ids, next-token distributions, greedy texts.

*Ids* are of 20,000 lines of code, prose, scripts, symbols and white space. *KL* is the mean over
tokens, in nats, from the distribution of ``transformers`` with the file's weights expanded to
float32 to the runtime's. *Same first* is the share of tokens with the same likeliest successor.
*Texts* are greedy; the table says at which token one differs from that of ``transformers``.

``python bench/gguf_agreement.py FILE [FILE ...] --llama PYTHON [--tokens 4000] [--lines 20000]``
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from quire.base.config import EngineConfig
from quire.base.types import Add, Chunk, Remove, Step
from quire.build import Parts, build
from quire.text.tokenizer import Tokenizer
from quire_bench.peer_process import PeerProcess
from quire_bench.peer_table import started
from quire_bench.reports import print_json, print_table
from quire_bench.texts import ROOT, mixed_lines

LENGTH = 400
"""Tokens of a sequence."""
NEW = 100
"""Tokens of a greedy text."""
PROMPTS = ("def fibonacci(n):\n", "The capital of France is", "import json\n\n\nclass Decoder:\n")

LogProbs = Callable[[list[int]], Tensor]
"""Takes the ids of a sequence, returns float64 ``[T, V]``, the log-probabilities after each."""


class Reference:
    """``transformers``, which expands the file to float32."""

    def __init__(self, file: Path) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )

    @torch.inference_mode()
    def log_probs(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def greedy(self, ids: list[int]) -> list[int]:
        found = self.model.generate(
            torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return list(found[0, len(ids) :].tolist())


class Quire:
    """The weights in the blocks of the file, activations in ``dtype``."""

    def __init__(self, file: Path, dtype: str) -> None:
        self.parts: Parts = build(EngineConfig(model=str(file), dtype=dtype, kv_cache_memory="256MiB"))

    def logits(self, ids: list[int], seq: int, *, added: bool) -> Tensor:
        edits = (Add(seq),) if added else ()
        return self.parts.runner.execute(Step(edits, (Chunk(seq, tuple(ids), logits="all"),))).logits_RV

    def log_probs(self, ids: list[int]) -> Tensor:
        seq = self.parts.runner.new_seq()
        found = self.logits(ids, seq, added=True).double().log_softmax(-1)
        self.parts.runner.execute(Step((Remove(seq),), ()))
        return found

    def greedy(self, ids: list[int]) -> list[int]:
        seq, found = self.parts.runner.new_seq(), []
        logits = self.logits(ids, seq, added=True)
        for _ in range(NEW):
            found.append(int(logits[-1].argmax()))
            logits = self.logits(found[-1:], seq, added=False)
        self.parts.runner.execute(Step((Remove(seq),), ()))
        return found


class Llama:
    """llama.cpp on the same file, in a process of its own."""

    def __init__(self, peer: PeerProcess, directory: Path) -> None:
        self.peer = peer
        self.place = directory / "logits.npy"

    def log_probs(self, ids: list[int]) -> Tensor:
        self.peer.ask("logits", prompt=ids, path=str(self.place))
        return torch.from_numpy(numpy.load(self.place)).double().log_softmax(-1)

    def greedy(self, ids: list[int]) -> list[int]:
        placed = self.peer.ask("place", prompts=[ids], room=NEW)
        done = self.peer.ask("decode", steps=NEW - 1)
        self.peer.ask("release")
        return [*placed[0], *done["tokens"][0]]


def sequences(tokenizer: Tokenizer, tokens: int) -> list[list[int]]:
    """Return sequences of code and prose with ``tokens`` tokens in all."""
    code = tokenizer.encode(inspect.getsource(json.decoder) + inspect.getsource(textwrap))
    prose = tokenizer.encode((ROOT / "docs/concepts.md").read_text(encoding="utf-8"))
    ids = [*code[: tokens // 2], *prose[: tokens - min(len(code), tokens // 2)]]
    return [ids[start : start + LENGTH] for start in range(0, len(ids), LENGTH)]


def distances(wanted: LogProbs, others: dict[str, LogProbs], texts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the others: its KL and the share of equal first successors."""
    kl: dict[str, list[Tensor]] = {name: [] for name in others}
    same: dict[str, list[Tensor]] = {name: [] for name in others}
    for ids in texts:
        base = wanted(ids)
        for name, function in others.items():
            found = function(ids)
            kl[name].append((base.exp() * (base - found)).sum(-1))
            same[name].append(found.argmax(-1) == base.argmax(-1))
    for name in others:
        yield {
            "runtime": name,
            "KL": float(torch.cat(kl[name]).mean()),
            "same first": float(torch.cat(same[name]).double().mean()),
        }


def first_difference(one: list[int], other: list[int]) -> int | None:
    return next((index for index, (left, right) in enumerate(zip(one, other, strict=True)) if left != right), None)


def differing_lines(tokenizer: Tokenizer, peer: PeerProcess, count: int) -> list[str]:
    """Return the lines that llama.cpp cuts into other ids."""
    texts = list(mixed_lines(count))
    theirs = peer.ask("tokenize", texts=texts)
    mine = tokenizer.backend.encode_batch_fast(texts)
    return [text for text, one, ids in zip(texts, mine, theirs, strict=True) if one.ids != ids]


def compare(file: Path, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Compare all runtimes on one file; return the report."""
    tokenizer = Tokenizer.from_path(file)
    if tokenizer is None:
        raise ValueError(f"{file} has no tokenizer")
    with ExitStack() as stack:
        runtimes: dict[str, Any] = {f"Quire, {dtype}": Quire(file, dtype) for dtype in options.dtypes}
        differing: list[str] | None = None
        if options.llama:
            peer = stack.enter_context(started("llama.cpp", options.llama, options.threads, directory / "llama.log"))
            # F32 K and V: what remains is what llama.cpp does with the weights and activations.
            settings = {"dtype": "float32", "quantization": None, "threads": options.threads}
            peer.ask("load", model=str(file.resolve()), length=4096, batch=1, kv_bytes=1 << 30, **settings)
            runtimes["llama.cpp"] = Llama(peer, directory)
            differing = differing_lines(tokenizer, peer, options.lines)
        reference = Reference(file)
        texts = sequences(tokenizer, options.tokens)
        logs: dict[str, LogProbs] = {name: runtime.log_probs for name, runtime in runtimes.items()}
        rows = list(distances(reference.log_probs, logs, texts))
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt)
            wanted = reference.greedy(ids)
            for row in rows:
                place = first_difference(wanted, runtimes[row["runtime"]].greedy(ids))
                row.setdefault("differs at", []).append(place)
    print(f"{file.name}: {sum(map(len, texts))} tokens, texts of {NEW}")
    print_table(
        [row | {"differs at": ", ".join(str(place or "nowhere") for place in row["differs at"])} for row in rows]
    )
    if differing is not None:
        print(f"{len(differing)} of {options.lines} lines have other ids in llama.cpp")
        for line in differing[:10]:
            print(f"  {line!r}")
    return {"file": file.name, "runtimes": rows, "lines": options.lines, "differing": differing and len(differing)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a GGUF file")
    parser.add_argument("--llama", default="", metavar="PYTHON", help="an interpreter with llama_cpp")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens whose distributions are compared (4000)")
    parser.add_argument("--lines", type=int, default=20_000, help="lines whose ids are compared (20000)")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if missing := [str(file) for file in options.files if not file.is_file()]:
        parser.error(f"no file {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as directory:
        reports = [compare(file, options, Path(directory)) for file in options.files]
    print_json({"benchmark": "gguf_agreement", "reports": reports})


if __name__ == "__main__":
    sys.exit(main())
