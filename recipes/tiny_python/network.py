"""The trained module, its two optimizers, and the schedule of their learning rate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from quire.base.errors import FailedPrecondition

from .settings import Recipe
from .vocabulary import END_ID, PAD_ID


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """A Llama with random float32 weights drawn from the recipe's seed; the global generator is
    left as it was.
    """
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_size,
        max_position_embeddings=recipe.max_positions,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)


def round_weights(model: nn.Module) -> None:
    """Rounds the weights to bfloat16, in place, and leaves the buffers: ``model.to`` would round
    the rotary frequencies too, and a loaded checkpoint has those in float32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


class Optimizers:
    """Muon for the matrices of the blocks, AdamW for embeddings and norms, stepped together.

    Muon is torch's, with the learning rate of each matrix scaled so that its update has the RMS of
    an AdamW update (Jordan et al., "Muon"; Liu et al., arXiv:2502.16982).
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        named = dict(model.named_parameters())
        matrices = [p for name, p in named.items() if p.ndim == 2 and ".layers." in name]
        chosen = {id(p) for p in matrices}
        rest = [p for p in named.values() if id(p) not in chosen]
        self._recipe = recipe
        self._muon = torch.optim.Muon(
            matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, scale: float) -> None:
        """Update the weights with ``scale`` times the learning rates; forget the gradients."""
        for optimizer, rate in ((self._muon, self._recipe.muon_lr), (self._adamw, self._recipe.adamw_lr)):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()  # type: ignore[no-untyped-call]
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def learning_rate_scale(recipe: Recipe, step: int) -> float:
    """Factor of the learning rates at ``step`` (from 0): linear warm-up, constant, linear to
    ``final_scale``.
    """
    warmup = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    first = recipe.decay_from * recipe.steps
    if step < first or recipe.steps - 1 <= first:
        return warmup
    progress = (step - first) / (recipe.steps - 1 - first)
    return warmup * (1.0 - (1.0 - recipe.final_scale) * progress)


def select_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is a GPU where there is one.

    Raises:
        FailedPrecondition: torch cannot use it here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise FailedPrecondition(f"torch cannot use the device '{name}' here; use 'cpu' or 'auto'") from error
    return device
