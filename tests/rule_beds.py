"""A tiny random model of each combination of layers, here and in transformers, for the checks of
the rule table.

Letters: T tokens; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tests.small_llms import CONTEXT, Checkpoint, engine_of, greedy, random_tokens
from tests.test_parity import FAMILIES, SIZES
from torch import Tensor

from quire import LLM
from quire.base.errors import Unsupported
from quire.base.types import Add, Chunk, Inputs, Remove, Step, TokenTree
from quire.kv.rule_table import Combination
from quire.text.token_bytes import TokenBytes
from small_tokenizers import saved

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": FAMILIES["llama"],
    "window": FAMILIES["mistral-window"],
    "full + window": FAMILIES["gemma3"],
    "latent": FAMILIES["youtu"],
    "recurrent": FAMILIES["mamba2"],
    "full + recurrent": FAMILIES["bamba"],
    "full beside recurrent": FAMILIES["falcon-h1"],
    "fallback": ("GPT2", {}),
}
"""A model of transformers for each combination of which models are made."""
TOKENIZER = "byte_level"
PROMPT = random_tokens(30)


@dataclass
class Bed:
    """A model, and how many forwards its state has begun."""

    combination: Combination
    checkpoint: Checkpoint
    llm: LLM
    forwards: list[int] = field(default_factory=lambda: [0])

    @classmethod
    def make(cls, combination: Combination, path: Path) -> Bed:
        name = combination.name
        family, changes = KINDS[name]
        torch.manual_seed(sorted(KINDS).index(name))
        kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
        vocab = TokenBytes(tokenizers.Tokenizer.from_str(saved(TOKENIZER))).size + 5
        sizes = {**SIZES, "vocab_size": vocab, "max_position_embeddings": CONTEXT}
        peer = kind(kind.config_class(**{**sizes, **changes})).float().eval()
        with torch.no_grad():
            for parameter in peer.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
        peer.save_pretrained(path)
        (path / "tokenizer.json").write_text(saved(TOKENIZER))
        bed = cls(combination, Checkpoint(path, peer), LLM(path, **OPTIONS))
        state = bed.state
        begin = state.begin_forward

        def counted(*given: Any, **more: Any) -> None:
            bed.forwards[0] += 1
            begin(*given, **more)

        state.begin_forward = counted  # type: ignore[method-assign]
        return bed

    @property
    def state(self) -> Any:
        return engine_of(self.llm).runner.state

    @property
    def runner(self) -> Any:
        return engine_of(self.llm).runner

    def rows(self, found_TV: Tensor, tokens: Sequence[int], start: int) -> None:
        """These are the logits of the tokens from position ``start`` on."""
        exact_TV, bound = self.checkpoint.exact_logits(tokens)
        assert found_TV.shape == exact_TV[start:].shape
        assert float((found_TV - exact_TV[start:]).abs().max()) <= bound

    def goes_on(self, session: Any, tokens: Sequence[int]) -> None:
        """The session holds exactly these tokens, and continues as they do."""
        assert session.tokens == list(tokens)
        assert self.checkpoint.continues(tokens, session.generate(greedy(4)).outputs[0].token_ids)

    def run(self, seq: int, tokens: Sequence[int], tree: TokenTree | None = None, **inputs: Any) -> Any:
        chunk = Chunk(seq, list(tokens), tree=tree, logits="all")
        return self.runner.execute(Step(chunks=(chunk,), inputs=Inputs(**inputs)))

    def new(self) -> int:
        seq: int = self.runner.new_seq()
        self.runner.execute(Step(edits=(Add(seq),)))
        return seq

    @contextmanager
    def sequence(self) -> Iterator[int]:
        """An empty sequence, which is removed whatever happens."""
        seq = self.new()
        try:
            yield seq
        finally:
            self.drop(seq)

    def drop(self, *seqs: int) -> None:
        self.runner.execute(Step(edits=tuple(Remove(seq) for seq in seqs)))


OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "8MiB", "page_size": 4}


def refused(bed: Bed, call: Callable[[], object], reason: str) -> None:
    """``Unsupported`` with the reason, before a forward; sequences, lengths and pages are as
    before.
    """

    def books() -> object:
        state = bed.state
        return (
            bed.forwards[0],
            {seq: state.sequence_length(seq) for seq in state.sequences.ids},
            state.num_available_pages(),
            state.num_used_pages,
        )

    # Caches that nobody has any more are let go of now, and not in between, when they are counted.
    bed.llm.executor.pool.sweep()
    with bed.llm.engine.lock:
        before = books()
        with pytest.raises(Unsupported) as raised:
            call()
        assert reason in str(raised.value), str(raised.value)
        assert books() == before
        bed.state.check()


def keeping(bed: Bed) -> int:
    return next(layer for layer, spec in enumerate(bed.llm.model.layer_specs) if spec.kind in ("full", "window"))


def causal_mask(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril().flatten()
