"""Models of every kind of state with a tokenizer, adapters, and what a naive run of them says."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import regex
import tokenizers
import torch
from tests.adapters.peft_models import linear_names, merged, save_adapter, write_adapter
from tests.small_llms import EOS, VOCAB, Checkpoint, make_checkpoint, make_family
from tokenizers import decoders, models, pre_tokenizers

from quire.base.outputs import CompletionOutput

KINDS = {
    "dense": "llama",
    "windowed": "mistral",
    "mixed": "gemma3",
    "hybrid": "qwen3-next",
    "recurrent": "mamba2",
    "latent": "deepseek-v3",
}
ADAPTERS = ("one", "two")
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa", "in_proj", "out_proj")
"""Modules that adapters change, by the ends of their names."""
FORMS: dict[str, dict[str, Any]] = {
    "pattern": {"regex": "[a-h]{2,4}(,[a-h]{2,4})*"},
    "choice": {"choice": ["abcabc:0123401234", "abcabc:0123443210", "hgf"]},
}
"""One whose text may be of any length, and one in which most tokens are forced."""
PATTERNS = {"pattern": FORMS["pattern"]["regex"], "choice": "|".join(FORMS["choice"]["choice"])}


@cache
def vocabulary() -> tuple[str, ...]:
    """Return the text of each token: letters, digits, signs, and merges of two and three."""
    single = [*"abcdefgh0123456789,: \n{}()xyz-=+"]
    double = [a + b for a in "abcdh" for b in "abc,"] + [a + b for a in "01234" for b in "123:"]
    triple = [f"{a}{b}{c}" for a in "ab" for b in "abc" for c in "abc,"]
    texts = [*single, *double, *triple][: VOCAB - 1]
    assert len(texts) == VOCAB - 1
    return (*texts[:EOS], "</s>", *texts[EOS:])


def write_tokenizer(folder: Path) -> None:
    """Give a checkpoint a tokenizer of this vocabulary."""
    texts = vocabulary()
    piece = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled = {"</s>": "</s>"} | {
        text: "".join(part for part, _ in piece.pre_tokenize_str(text)) for text in texts if text != "</s>"
    }
    vocab = {spelled[text]: index for index, text in enumerate(texts)}
    known = set(vocab)
    merges = [
        (name[:cut], name[cut:])
        for name in sorted(known - {"</s>"}, key=len)
        for cut in range(1, len(name))
        if name[:cut] in known and name[cut:] in known
    ]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.pre_tokenizer, made.decoder = piece, decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(values | {"eos_token_id": EOS, "bos_token_id": None}))


@dataclass
class World:
    """A model, its adapters, and the same with merged weights."""

    checkpoint: Checkpoint
    adapters: dict[str, Path]
    merged: dict[str | None, Checkpoint] = field(default_factory=dict)

    def oracle(self, adapter: str | None) -> Checkpoint:
        """Return the model whose weights hold an adapter."""
        if adapter not in self.merged:
            if adapter is None:
                self.merged[None] = self.checkpoint
            else:
                from safetensors.torch import load_file

                tensors = load_file(self.adapters[adapter] / "adapter_model.safetensors")
                model = merged(self.checkpoint.model, tensors).float()
                self.merged[adapter] = Checkpoint(self.checkpoint.path, model)
        return self.merged[adapter]

    def says(
        self,
        prompt: list[int],
        output: CompletionOutput,
        adapter: str | None,
        form: str | None,
        stop_ids: Collection[int],
    ) -> bool:
        """Return whether each token is a most likely one of those that the form allows, in one
        forward of the whole text without a state."""
        tokens = list(output.token_ids)
        exact_TV, bound = self.oracle(adapter).exact_logits([*prompt, *tokens])
        rows_NV = exact_TV[len(prompt) - 1 : -1].clone()
        if form is not None:
            text = ""
            for number, token in enumerate(tokens):
                rows_NV[number, ~torch.tensor(self.allowed(form, text, stop_ids))] = -torch.inf
                text += vocabulary()[token]
        chosen = rows_NV[range(len(tokens)), tokens]
        # An adapter adds to a sum what merged weights have in it.
        slack = 2 * bound * (1 if adapter is None else 2)
        return bool((chosen >= rows_NV.amax(-1) - slack).all())

    @staticmethod
    def text(token: int) -> str:
        """Return the text of a token."""
        return vocabulary()[token]

    @staticmethod
    def allowed(form: str, text: str, stop_ids: Collection[int]) -> list[bool]:
        """Return which tokens leave a text that can become one of a form, or end one."""
        compiled = regex.compile(PATTERNS[form])
        found = [compiled.fullmatch(text + token, partial=True) is not None for token in vocabulary()]
        for token in (EOS, *stop_ids):
            found[token] = compiled.fullmatch(text) is not None
        return found


def make_world(kind: str, folder: Path) -> World:
    """Return the world of one of ``KINDS``."""
    name = KINDS[kind]
    maker: Callable[[str, Path], Checkpoint] = (
        make_checkpoint if name in ("llama", "mistral", "gemma3") else make_family
    )
    checkpoint = maker(name, folder / kind)
    write_tokenizer(checkpoint.path)
    sites = {
        place: shape for place, shape in linear_names(checkpoint.model).items() if place.rpartition(".")[2] in SITES
    }
    paths = {}
    for number, adapter in enumerate(ADAPTERS):
        paths[adapter] = folder / f"{kind}-{adapter}"
        tensors = write_adapter(paths[adapter], sites)
        # Weaker than the model's own weights, and of opposite signs.
        factor = (-0.4, 0.4)[number]
        tensors = {key: value * (factor if "lora_B" in key else 1) for key, value in tensors.items()}
        save_adapter(paths[adapter], tensors, target_modules=sorted(sites))
    return World(checkpoint, paths)
