"""Small random checkpoints, and adapters for them: made by PEFT, or written by hand beside the
merged weights.

Letters: T tokens, V vocabulary, R rank, I input, O output features.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.test_parity import FAMILIES, SIZES, VOCAB
from torch import Tensor

from quire import LLM
from quire.adapters.peft import PREFIX
from quire.base.types import Add, Chunk, Step

LENGTH, RANK, ALPHA = 18, 3, 5.0
TOKENS_T = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7))
WITH_VISION: dict[str, dict[str, Any]] = {
    "gemma3-with-vision": {
        "sliding_window": 5,
        "head_dim": 16,
        "query_pre_attn_scalar": 20,
    },
}
"""Families with an encoder of images beside the language model; what differs from ``SIZES``."""
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def make_base(name: str, path: Path, **changes: Any) -> Any:
    """A random model of a family of ``tests.test_parity``, saved to ``path``."""
    torch.manual_seed(sorted((*FAMILIES, *WITH_VISION)).index(name))
    if name in WITH_VISION:
        kind: Any = transformers.Gemma3ForConditionalGeneration
        text = transformers.Gemma3TextConfig(**{**SIZES, **WITH_VISION[name], **changes})
        config = kind.config_class(text_config=text.to_dict(), vision_config=VISION, mm_tokens_per_image=4)
    else:
        family, own = FAMILIES[name]
        kind = getattr(transformers, f"{family}ForCausalLM")
        config = kind.config_class(**{**SIZES, **own, **changes})
    peer = kind(config).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
        for buffer_name, buffer in peer.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
        embedding = peer.get_input_embeddings()
        if embedding.padding_idx is not None:
            embedding.weight[embedding.padding_idx] = 0  # as transformers reads some families, whatever is stored
    peer.save_pretrained(path)
    return peer


def linear_names(peer: Any) -> dict[str, tuple[int, int]]:
    """The linear maps of a model of transformers without its encoder of images: ``[O, I]`` by name,
    head included.
    """
    return {
        name: tuple(module.weight.shape)
        for name, module in peer.named_modules()
        if isinstance(module, torch.nn.Linear) and "vision" not in name and "projector" not in name
    }


def embedding_name(peer: Any) -> str:
    return next(name for name, module in peer.named_modules() if module is peer.get_input_embeddings())


def make_adapter(base: Path, path: Path, peer: Any, change: Callable[[Any], None] | None = None, **config: Any) -> Any:
    """A random adapter that PEFT makes for ``peer``, saves to ``path`` and reads from there into a
    fresh model.

    ``change``: what else is done with PEFT's model before it is saved.
    """
    import peft

    torch.manual_seed(11)
    fresh = type(peer).from_pretrained(base, dtype=torch.float32).eval()
    lora = peft.LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM", **config})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(fresh, lora)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn_like(parameter))
                elif "modules_to_save" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
        if change is not None:
            change(model)
        model.save_pretrained(path)
        read = peft.PeftModel.from_pretrained(type(peer).from_pretrained(base, dtype=torch.float32), path)
    adapted = read.eval().base_model.model
    if any(".experts" in name for name, _ in peer.named_parameters()):
        adapted.set_experts_implementation("eager")  # which runs in float64 too
    return adapted


def write_adapter(
    path: Path, sites: Mapping[str, tuple[int, int]], embedding: str = "", **config: Any
) -> dict[str, Tensor]:
    """An adapter for modules ``[O, I]`` by hand, as PEFT would save it; returns its tensors.

    ``embedding``: which of the modules is the table ``[V, E]``.
    """
    generator = torch.Generator().manual_seed(13)
    tensors: dict[str, Tensor] = {}

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    for name, (outs, ins) in sites.items():
        if name == embedding:
            tensors[f"{PREFIX}{name}.lora_embedding_A"] = draw(RANK, outs)
            tensors[f"{PREFIX}{name}.lora_embedding_B"] = draw(ins, RANK)
        else:
            tensors[f"{PREFIX}{name}.lora_A.weight"] = draw(RANK, ins)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = draw(outs, RANK)
    save_adapter(path, tensors, target_modules=sorted(sites), **config)
    return tensors


def save_adapter(path: Path, tensors: Mapping[str, Tensor], **config: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(values))


def load_tensors(path: Path) -> dict[str, Tensor]:
    return load_file(path / "adapter_model.safetensors")


def merged(peer: Any, tensors: Mapping[str, Tensor], scale: float = ALPHA / RANK) -> Any:
    """A copy of ``peer`` in float64 whose weights are ``W + scale B A``; a tied head has
    its own."""
    other = copy.deepcopy(peer).double()
    head = other.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    modules = dict(other.named_modules())
    with torch.no_grad():
        for key, a_RI in tensors.items():
            name = key.removeprefix(PREFIX)
            if name.endswith(".lora_A.weight"):
                b_OR = tensors[key.replace("lora_A", "lora_B")]
                modules[name.removesuffix(".lora_A.weight")].weight += scale * b_OR.double() @ a_RI.double()
            elif name.endswith(".lora_embedding_A"):
                b_OR = tensors[key.replace("embedding_A", "embedding_B")]
                modules[name.removesuffix(".lora_embedding_A")].weight += scale * (b_OR.double() @ a_RI.double()).T
    return other


class Bed:
    """A model behind a runner, for adapters."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.llm = LLM(path, **{"dtype": "float32", "page_size": 4, "kv_cache_memory": "4MiB", **options})
        self.runner = self.llm.engine.runner
        self.model: Any = self.runner.model

    def new(self) -> int:
        seq = self.runner.new_seq()
        self.runner.execute(Step(edits=(Add(seq),)))
        return seq

    def run(self, seq: int, tokens: list[int], adapter: int | None) -> Tensor:
        """Logits ``[T, V]`` of new tokens."""
        return self.runner.execute(Step(chunks=(Chunk(seq, tokens, adapter=adapter, logits="all"),))).logits_RV

    def in_chunks(self, chunk: int, adapter: int | None) -> Tensor:
        """Logits of ``TOKENS_T``, ``chunk`` tokens at a time."""
        seq, tokens = self.new(), TOKENS_T.tolist()
        return torch.cat([self.run(seq, tokens[at : at + chunk], adapter) for at in range(0, LENGTH, chunk)])
