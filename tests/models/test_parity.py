"""Logits against transformers, for every family, whole and in chunks.

The measure is a float64 run of transformers. Our float32 error may be twice that of transformers' own float32 run, and
besides that what float32 itself explains: transformers takes its inverse frequencies in float32 also in the float64
run, which turns position p by up to p * eps, and each layer rounds the residual stream once or twice.

Letters: T tokens, S stored tokens, Hq, Hkv heads, D head size, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.layers import FullAttention, LayerSpec
from quire.models.catalogue import resolve_model
from quire.models.families import LoadedModel
from quire.models.loading import load_model
from quire.ops.rope import RotaryTable, rotate

NUM_TOKENS = 40
CHUNKINGS = {"whole": [NUM_TOKENS], "chunks": [1, 7, 16, 2, 14], "tokens": [1] * NUM_TOKENS}


class DensePass:
    """A ``Pass`` for one sequence: K and V in lists, attention written out. Keep it from chunk to chunk."""

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        self.specs = specs
        self.k: list[list[Tensor]] = [[] for _ in specs]
        self.v: list[list[Tensor]] = [[] for _ in specs]
        self.positions_T = torch.arange(0, dtype=torch.int32)

    def begin(self, num_tokens: int) -> None:
        start = int(self.positions_T[-1]) + 1 if len(self.positions_T) else 0
        self.positions_T = torch.arange(start, start + num_tokens, dtype=torch.int32)

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor) -> Tensor:
        spec = self.specs[layer_id]
        assert isinstance(spec, FullAttention)
        assert qkv_TC.is_contiguous()
        heads_THD = qkv_TC.unflatten(-1, (-1, spec.head_dim))
        return self.attend(layer_id, *heads_THD.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1))

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        spec = self.specs[layer_id]
        assert isinstance(spec, FullAttention)
        assert spec.rope is not None
        assert spec.rope_mode == "normal"
        positions_T = self.positions_T.long()
        cos, sin = RotaryTable(spec.rope, q_THD.device).rows(positions_T, int(positions_T.max()))
        q_THD, k_THD = rotate(q_THD, cos, sin), rotate(k_THD, cos, sin)
        self.k[layer_id].extend(k_THD)
        self.v[layer_id].extend(v_THD)
        group = spec.num_heads // spec.num_kv_heads
        k_SHD = torch.stack(self.k[layer_id]).repeat_interleave(group, 1)
        v_SHD = torch.stack(self.v[layer_id]).repeat_interleave(group, 1)
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD.float()) * spec.scale
        hidden_TS = torch.arange(len(k_SHD)) > positions_T[:, None]
        weights_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
        return torch.einsum("hts,shd->thd", weights_HTS, v_SHD.float()).to(q_THD.dtype)


@torch.inference_mode()
def run(model: LoadedModel, tokens_T: Tensor, chunks: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` of all tokens, run chunk by chunk."""
    pass_ = DensePass(model.layer_specs)
    logits = []
    for tokens in tokens_T.split(list(chunks)):
        pass_.begin(len(tokens))
        x_TE = model.embed(tokens)
        for block in model.blocks:
            before = x_TE.clone()
            out_TE = block(x_TE, pass_)
            assert torch.equal(x_TE, before), "a block changed its input"
            x_TE = out_TE
        logits.append(model.head(x_TE))
    return torch.cat(logits)


@torch.inference_mode()
def run_transformers(model: Any, tokens_T: Tensor, attention: str = "eager") -> Tensor:
    model.set_attn_implementation(attention)
    return model(tokens_T[None]).logits[0]


def in_float64(model: Any) -> Any:
    """A float64 copy; transformers' norms and rotations would go through float32 whatever the model's dtype."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = lambda x, m=module: m.weight * x * (x.square().mean(-1, True) + m.variance_epsilon).rsqrt()
        elif kind.endswith("RotaryEmbedding"):
            module.forward = lambda x, position_ids, m=module: _cos_sin(m.inv_freq, position_ids)
    return model


def _cos_sin(inv_freq: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angle = position_ids.double()[..., None] * inv_freq.double()
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def tokens_for(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def error(logits: Tensor, exact: Tensor) -> float:
    return float((logits.double() - exact).abs().max())


def test_float32_logits_are_as_close_to_float64_as_those_of_transformers(tiny: Any) -> None:
    model = load_model(tiny.path, dtype="float32")
    tokens_T = tokens_for(model.vocab_size)
    exact = run_transformers(in_float64(tiny.model), tokens_T)
    theirs = max(error(run_transformers(tiny.model, tokens_T, kind), exact) for kind in ("eager", "sdpa"))
    eps = torch.finfo(torch.float32).eps
    bound = 2 * theirs + eps * (NUM_TOKENS + 2 * len(model.blocks)) * float(exact.abs().max())
    assert bound < 1e-4 * float(exact.abs().max()), "the bound itself is too wide to say anything"
    for name, chunks in CHUNKINGS.items():
        ours = run(model, tokens_T, chunks)
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape
        assert error(ours, exact) <= bound, name
        assert torch.equal(ours.argmax(-1), exact.argmax(-1)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_in_transformers(tiny: Any, dtype: str) -> None:
    model = load_model(tiny.path, dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    tokens_T = tokens_for(model.vocab_size)
    theirs_model = copy.deepcopy(tiny.model).to(model.dtype)
    # Exact arithmetic on the rounded weights: only the rounding of activations is compared.
    exact = run_transformers(in_float64(theirs_model), tokens_T)
    theirs = run_transformers(theirs_model, tokens_T)
    ours = run(model, tokens_T, CHUNKINGS["chunks"])
    rms = [float((logits.double() - exact).square().mean().sqrt()) for logits in (ours, theirs)]
    # The mean over thousands of logits is a stable measure; half as much again is beyond its scatter.
    assert rms[0] <= 1.5 * rms[1]


def test_the_model_says_what_it_is(tiny: Any) -> None:
    model = load_model(tiny.path, dtype="float32")
    config = tiny.model.config
    assert model.architecture == type(tiny.model).__name__
    assert (model.vocab_size, model.hidden_size) == (config.vocab_size, config.hidden_size)
    assert model.max_position == config.max_position_embeddings
    assert len(model.blocks) == len(model.layer_specs) == config.num_hidden_layers
    assert model.num_parameters == sum(weight.numel() for weight in tiny.model.parameters())
    assert model.parameter_bytes == 4 * model.num_parameters
    assert model.device == torch.device("cpu")


def test_bundled_model_recalls_the_value_of_an_alias() -> None:
    from tokenizers import Tokenizer

    path = resolve_model("tiny-python")
    found = re.search(r"```\n(.*?)\n```\ncontinues with `(.*?)`", (path / "README.md").read_text(), re.DOTALL)
    assert found is not None
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    model = load_model(path, dtype="float32")
    ids = tokenizer.encode(found[1]).ids
    expected = tokenizer.encode(found[2]).ids
    generated: list[int] = []
    for _ in expected:
        tokens_T = torch.tensor(ids + generated)
        generated.append(int(run(model, tokens_T, [len(tokens_T)])[-1].argmax()))
    assert tokenizer.decode(generated) == found[2] == " 8031"
