"""Tiny random heads in the layouts in which they are published, and their definition in float64.

A *follower* is a target whose next token depends on the last one alone, and a head that predicts it
from the hidden state alone, so that one position of misalignment makes all drafts wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from safetensors.torch import load_file, save_file
from tests.small_llms import CONTEXT, GEOMETRY, VOCAB, Checkpoint
from tests.test_parity import FAMILIES, SIZES
from torch import Tensor

DRAFTED = 40
"""Tokens of a head with a vocabulary of its own."""
WIDE = 112
"""A width with room for a direction of its own for each token."""
EPS = 1e-6
THETA = 10_000.0


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5


def around_one(generator: torch.Generator, size: int) -> Tensor:
    return 1 + 0.3 * torch.randn(size, generator=generator)


# -- EAGLE-3 ---------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


@dataclass
class Eagle:
    """A saved EAGLE-3 head."""

    path: Path
    tensors: dict[str, Tensor]
    layers: tuple[int, ...]
    ids: list[int]

    @torch.inference_mode()
    def logits(self, target: Checkpoint, tokens: Sequence[int]) -> Tensor:
        """The definition: float64 ``[T - 1, D]``, row t of the hidden states at t and token t +
        1."""
        w = {name: one.double() for name, one in self.tensors.items() if one.is_floating_point()}
        hidden, _ = hidden_states(target, tokens)
        x_TE = torch.cat([hidden[layer][:-1] for layer in self.layers], -1) @ w["fc.weight"].T
        e_TE = target.model.get_input_embeddings().weight.double()[torch.tensor(list(tokens[1:]))]
        e_TE, n_TE = norm(e_TE, w["midlayer.input_layernorm.weight"]), norm(x_TE, w["midlayer.hidden_norm.weight"])
        joined, count = torch.cat((e_TE, n_TE), -1), len(tokens) - 1
        q, k, v = (
            (joined @ w[f"midlayer.self_attn.{name}.weight"].T).view(count, -1, HEAD_DIM).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 0) for one in (rotated(k), v))
        a = F.scaled_dot_product_attention(rotated(q), k, v, is_causal=True).transpose(0, 1).flatten(1)
        x_TE = x_TE + a @ w["midlayer.self_attn.o_proj.weight"].T
        n_TE = norm(x_TE, w["midlayer.post_attention_layernorm.weight"])
        gate, up, down = (w[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x_TE = x_TE + (F.silu(n_TE @ gate.T) * (n_TE @ up.T)) @ down.T
        return norm(x_TE, w["norm.weight"]) @ w["lm_head.weight"].T


def hidden_states(target: Checkpoint, tokens: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """float64 ``[T, E]``: the output of each layer, and that of the final norm."""
    target.exact_logits(tokens)
    found: list[Tensor] = []

    def note(layer: Any, given: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0].clone())

    hooks = [layer.register_forward_hook(note) for layer in target.exact.model.layers]
    last = target.exact.model(torch.tensor([list(tokens)])).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return found, last


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotated(x_HTD: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angles = torch.arange(x_HTD.shape[1]).double()[:, None] * THETA ** (-torch.arange(half).double() / half)
    a, b = x_HTD[..., :half], x_HTD[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def make_eagle(path: Path, layers: tuple[int, ...], *, width: int = 32, seed: int = 3, **changes: Any) -> Eagle:
    """Save a random head; ``changes`` are fields of its config.json, None: left out."""
    generator = torch.Generator().manual_seed(seed)
    inner = 48
    tensors = {
        "fc.weight": random(generator, width, 3 * width),
        "norm.weight": around_one(generator, width),
        "lm_head.weight": random(generator, DRAFTED, width),
    }
    for name, shape in {
        "self_attn.q_proj": (HEADS * HEAD_DIM, 2 * width),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, 2 * width),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, 2 * width),
        "self_attn.o_proj": (width, HEADS * HEAD_DIM),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }.items():
        tensors[f"midlayer.{name}.weight"] = random(generator, *shape)
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = around_one(generator, width)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    return save_eagle(path, tensors, ids, layers, hidden_size=width, intermediate_size=inner, **changes)


def save_eagle(path: Path, tensors: dict[str, Tensor], ids: Tensor, layers: tuple[int, ...], **changes: Any) -> Eagle:
    tensors = {
        **tensors,
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": len(ids),
        "max_position_embeddings": 32,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        **changes,
    }
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    save_file(tensors, path / "model.safetensors")
    return Eagle(path, tensors, layers, ids.tolist())


# -- MTP -------------------------------------------------------------------------------------------

MTP = ("qwen3-next", "qwen3.5", "deepseek-v3", "glm4-moe-lite")
ALONE: Mapping[str, dict[str, Any]] = {
    "qwen3-next": {"layer_types": ["full_attention"]},
    "qwen3.5": {"layer_types": ["full_attention"]},
    "deepseek-v3": {"first_k_dense_replace": 0},
    "glm4-moe-lite": {"mlp_layer_types": ["sparse"]},
}
"""What makes a model of the family of one block, the one that drafts."""


@dataclass
class Mtp:
    """A saved model with a layer that drafts."""

    target: Checkpoint
    block: Any
    """The layer and its norm, as a model of transformers."""
    around: dict[str, Tensor]
    """The norms of embedding and hidden state, and the map of both."""
    prefix: str
    """What the names of the layer's tensors begin with in the checkpoint."""

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The definition: float64 ``[T - 1, V]``, row t of the hidden state at t and token t +
        1."""
        enorm, hnorm, project = (one.double() for one in self.around.values())
        h_TE = hidden_states(self.target, tokens)[1][:-1]
        e_TE = self.target.exact.get_input_embeddings().weight[torch.tensor(list(tokens[1:]))]
        offset = 0 if self.prefix.startswith("model.") else 1
        eps = self.block.config.rms_norm_eps
        e_TE, h_TE = (F.rms_norm(x, x.shape[-1:], w + offset, eps) for x, w in ((e_TE, enorm), (h_TE, hnorm)))
        x_TE = torch.cat((e_TE, h_TE), -1) @ project.T
        y_TE = self.block.double()(inputs_embeds=x_TE[None], use_cache=False).last_hidden_state[0]
        logits_TV: Tensor = y_TE @ self.target.exact.get_output_embeddings().weight.T
        return logits_TV


def make_mtp(
    kind: str,
    path: Path,
    *,
    edit: Callable[[Any, Any], None] | None = None,
    around: dict[str, Tensor] | None = None,
    **changes: Any,
) -> Mtp:
    """Save a model of a family and a layer that drafts for it. ``edit`` changes the weights of
    both; ``around``: as in ``Mtp``, None: random ones."""
    name, given = FAMILIES[kind]
    torch.manual_seed(7)
    config_class = getattr(transformers, f"{name}ForCausalLM").config_class
    fields = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, **given, **changes}
    is_latent = name in ("DeepseekV3", "Glm4MoeLite")
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**fields)).float().eval()
    alone = {**fields, "num_hidden_layers": 1, **ALONE[kind]}
    block_class = next(
        cls for cls in (getattr(transformers, f"{name}{end}", None) for end in ("TextModel", "Model")) if cls
    )
    block = block_class(block_class.config_class(**alone)).float().eval()
    with torch.no_grad():
        for part in (model, block):
            for parameter in part.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
        if edit is not None:
            edit(model, block)
    model.save_pretrained(path)
    width = model.config.get_text_config().hidden_size
    generator = torch.Generator().manual_seed(5)
    first = around_one(generator, width) - (0 if is_latent else 1)
    if around is None:
        around = {"embedding": first, "state": first.flip(0), "project": random(generator, width, 2 * width)}
    found = Mtp(Checkpoint(path, model), block, around, "")
    return save_mtp(found, is_latent, model.config.num_hidden_layers)


def save_mtp(found: Mtp, is_latent: bool, num_layers: int) -> Mtp:
    """Write the layer's tensors beside the model's, as they are published: one tensor for each map
    of each expert."""
    path = found.target.path
    prefix = f"model.layers.{num_layers}." if is_latent else "mtp."
    layer = prefix if is_latent else "mtp.layers.0."
    names = ("enorm", "hnorm", "eh_proj") if is_latent else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
    tensors = {f"{prefix}{name}.weight": one for name, one in zip(names, found.around.values(), strict=True)}
    for name, weight in found.block.state_dict().items():
        one = weight.detach().clone()
        if name == "norm.weight":
            tensors[f"{prefix}{'shared_head.' if is_latent else ''}norm.weight"] = one
        elif name.endswith("experts.gate_up_proj"):
            for expert, part in enumerate(one):
                for half, values in zip(("gate_proj", "up_proj"), part.chunk(2), strict=True):
                    tensors[f"{layer}mlp.experts.{expert}.{half}.weight"] = values.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, part in enumerate(one):
                tensors[f"{layer}mlp.experts.{expert}.down_proj.weight"] = part.contiguous()
        elif name.startswith("layers.0."):
            tensors[layer + name.removeprefix("layers.0.")] = one
    file = path / "model.safetensors"
    every = load_file(file)
    if is_latent:
        tensors[f"{prefix}embed_tokens.weight"] = every["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = every["lm_head.weight"].clone()
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    save_file({**every, **tensors}, file)
    return Mtp(found.target, found.block, found.around, prefix)


# -- followers -------------------------------------------------------------------------------------

HOT = 4.0
"""What a gate is given for the direction of the token."""


def followed(seed: int = 0) -> tuple[list[int], Tensor]:
    """The token behind each token, and the drafted tokens: these follow each other in a circle."""
    generator = torch.Generator().manual_seed(seed)
    circle = torch.randperm(VOCAB, generator=generator)[:DRAFTED]
    after = circle[torch.randint(DRAFTED, (VOCAB,), generator=generator)]
    after[circle] = circle.roll(-1)
    return after.tolist(), circle.sort().values


def steps(after: Sequence[int]) -> Tensor:
    """``[E, E]``: maps the direction of each token to that of the token behind it."""
    found = torch.zeros(WIDE, WIDE)
    found[after, range(VOCAB)] = 1.0
    return found


def say_what_follows(model: Any, after: Sequence[int], one: float) -> None:
    """Let the logits of a model be those of the token behind the last one, and all blocks add
    nothing. ``one``: the weight of a norm that changes nothing."""
    add_nothing(model, one)
    eye = torch.eye(VOCAB, WIDE)
    model.get_input_embeddings().weight.copy_(eye)
    model.get_output_embeddings().weight.copy_(steps(after)[:VOCAB])


def add_nothing(model: Any, one: float) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
            parameter.zero_()
        elif "norm" in name and parameter.numel() == WIDE:
            parameter.fill_(one)


def stepping_mlp(after: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of an MLP that turns the direction of a token to that of the token behind
    it, once its input, which is normed, is added."""
    eye = torch.eye(WIDE) / math.sqrt(WIDE)
    return HOT * eye, eye, (steps(after) - torch.eye(WIDE)) / F.silu(torch.tensor(HOT))


def eagle_follower(path: Path) -> tuple[Checkpoint, Eagle, list[int]]:
    """A target and its head, which reads the blocks that are usual."""
    after, ids = followed()
    sizes = {**GEOMETRY, "hidden_size": WIDE, "num_hidden_layers": 4, "tie_word_embeddings": False}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).float().eval()
    with torch.no_grad():
        say_what_follows(model, after, 1.0)
    model.save_pretrained(path / "target")
    random_one = make_eagle(path / "random", (1, 1, 0), width=WIDE)
    gate, up, down = stepping_mlp(after)
    tensors = {
        **random_one.tensors,
        "fc.weight": torch.cat((torch.zeros(WIDE, WIDE), torch.eye(WIDE), torch.zeros(WIDE, WIDE)), 1),
        "midlayer.self_attn.o_proj.weight": torch.zeros(WIDE, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": up,
        "midlayer.mlp.down_proj.weight": down,
        "midlayer.post_attention_layernorm.weight": torch.ones(WIDE),
        "norm.weight": torch.ones(WIDE),
        # Of the tokens before each, only the one of the circle.
        "lm_head.weight": steps(after)[ids] * torch.zeros(WIDE).index_fill(0, ids, 1.0),
    }
    head = save_eagle(
        path / "head", tensors, ids, (1, 1, 0), hidden_size=WIDE, intermediate_size=WIDE, eagle_config=None
    )
    return Checkpoint(path / "target", model), head, after


def mtp_follower(kind: str, path: Path) -> tuple[Mtp, list[int]]:
    after, _ = followed()
    one = 1.0 if kind in ("deepseek-v3", "glm4-moe-lite") else 0.0

    def edit(model: Any, block: Any) -> None:
        say_what_follows(model, after, one)
        add_nothing(block, one)
        mlp = block.layers[0].mlp
        shared = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", mlp))
        for part, values in zip((shared.gate_proj, shared.up_proj, shared.down_proj), stepping_mlp(after), strict=True):
            part.weight.copy_(values)
        if hasattr(mlp, "shared_expert_gate"):
            mlp.shared_expert_gate.weight.zero_()  # A half.
            shared.down_proj.weight.mul_(2.0)

    around = {
        "embedding": torch.full((WIDE,), one),
        "state": torch.full((WIDE,), one),
        "project": torch.cat((torch.zeros(WIDE, WIDE), torch.eye(WIDE) / math.sqrt(WIDE)), 1),
    }
    sizes = {"hidden_size": WIDE, "intermediate_size": WIDE, "moe_intermediate_size": WIDE, "num_attention_heads": 4}
    if kind == "qwen3-next":
        sizes |= {"shared_expert_intermediate_size": WIDE}
    if kind in ("deepseek-v3", "glm4-moe-lite"):
        sizes |= {"num_key_value_heads": 4}
    return make_mtp(kind, path, edit=edit, around=around, tie_word_embeddings=False, **sizes), after
