"""Logits against transformers, for every family, whole and in chunks.

The measure is a float64 run of transformers (``tests.exact``). Attention is written out here, so
what is tested is the model and the specs of its layers; ``tests/test_parity.py`` runs the families
through the KV state.

Letters: T tokens, S stored tokens, Hq, Hkv heads, D head size, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.exact import Float32Bound, run_exactly, run_transformers
from tests.models.conftest import CASES, Case
from torch import Tensor

from quire.contracts.layers import FullAttention, LayerSpec, WindowedAttention
from quire.contracts.rows import HeadNormWeights
from quire.models.catalogue import resolve_model
from quire.models.families import LoadedModel
from quire.models.loading import load_model
from quire.ops.rope import RotaryTable, rotate
from quire.ops.rows import REFERENCE_ROWS, normed_heads

NUM_TOKENS = 40
CHUNKINGS = {"whole": [NUM_TOKENS], "chunks": [1, 7, 16, 2, 14], "tokens": [1] * NUM_TOKENS}


class DensePass:
    """A ``Pass`` for one sequence: K and V in lists, attention written out.

    Keep it from chunk to chunk.
    """

    def __init__(self, specs: Sequence[LayerSpec]) -> None:
        self.specs = specs
        self.k: list[list[Tensor]] = [[] for _ in specs]
        self.v: list[list[Tensor]] = [[] for _ in specs]
        self.positions_T = torch.arange(0, dtype=torch.int32)

    def begin(self, num_tokens: int) -> None:
        start = int(self.positions_T[-1]) + 1 if len(self.positions_T) else 0
        self.positions_T = torch.arange(start, start + num_tokens, dtype=torch.int32)

    @property
    def places_T(self) -> Tensor:
        return self.positions_T.long()

    def attention_parts(self, layer_id: int, norms: HeadNormWeights | None, dtype: torch.dtype) -> None:
        """The block does not run whole."""

    def attend_qkv(self, layer_id: int, qkv_TC: Tensor, norms: HeadNormWeights | None = None) -> Tensor:
        spec = self.specs[layer_id]
        assert isinstance(spec, FullAttention | WindowedAttention)
        assert qkv_TC.is_contiguous()
        heads_THD = qkv_TC.unflatten(-1, (-1, spec.head_dim))
        q_THD, k_THD, v_THD = heads_THD.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return self.attend(layer_id, *normed_heads(REFERENCE_ROWS, q_THD, k_THD, norms), v_THD)

    def attend(self, layer_id: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        spec = self.specs[layer_id]
        assert isinstance(spec, FullAttention | WindowedAttention)
        assert spec.rope_mode == ("none" if spec.rope is None else "normal")
        assert q_THD.shape[1:] == (spec.num_heads, spec.head_dim)
        assert k_THD.shape[1:] == (spec.num_kv_heads, spec.head_dim)
        assert v_THD.shape[1:] == (spec.num_kv_heads, spec.value_dim)
        positions_T = self.positions_T.long()
        if spec.rope is not None:
            cos, sin = RotaryTable(spec.rope, q_THD.device).rows(positions_T, int(positions_T.max()))
            q_THD, k_THD = (rotate(x, cos, sin, interleaved=spec.rope.interleaved) for x in (q_THD, k_THD))
        self.k[layer_id].extend(k_THD)
        self.v[layer_id].extend(v_THD)
        group = spec.num_heads // spec.num_kv_heads
        k_SHD = torch.stack(self.k[layer_id]).repeat_interleave(group, 1)
        v_SHD = torch.stack(self.v[layer_id]).repeat_interleave(group, 1)
        scores_HTS = torch.einsum("thd,shd->hts", q_THD.float(), k_SHD.float()) * spec.scale
        if spec.softcap is not None:
            scores_HTS = torch.tanh(scores_HTS / spec.softcap) * spec.softcap
        age_TS = positions_T[:, None] - torch.arange(len(k_SHD))
        hidden_TS = (age_TS < 0) | (age_TS >= (spec.layer_window or len(k_SHD)))
        scores_HTS = scores_HTS.masked_fill(hidden_TS, float("-inf"))
        if spec.sinks:
            sinks_H1 = torch.tensor(spec.sinks)[:, None, None].expand(-1, len(positions_T), 1)
            scores_HTS = torch.cat((scores_HTS, sinks_H1), -1)
        weights_HTS = scores_HTS.softmax(-1)[..., : len(k_SHD)]
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


def tokens_for(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def error(logits: Tensor, exact: Tensor) -> float:
    return float((logits.double() - exact).abs().max())


def test_float32_logits_are_as_close_to_float64_as_those_of_transformers(tiny: Any) -> None:
    model = load_model(tiny.path, dtype="float32")
    tokens_T = tokens_for(model.vocab_size)
    exact = run_exactly(tiny.model, tokens_T)
    bound = Float32Bound(tiny.model, tokens_T, exact)
    for name, chunks in CHUNKINGS.items():
        ours = run(model, tokens_T, chunks)
        assert ours.dtype == torch.float32
        assert ours.shape == exact.shape
        assert error(ours, exact) <= bound, name
        assert torch.equal(ours.argmax(-1), exact.argmax(-1)), name


@pytest.mark.turns(3)
@pytest.mark.parametrize(("tokens", "length"), [(16, 16), (9, 3), (17, 17), (40, 128), (17, None)])
@pytest.mark.parametrize("name", ["phi3-longrope", "phi3-longrope-partial"])
def test_longrope_takes_the_factors_that_the_longest_sequence_needs(
    make_tiny: Any, name: str, tokens: int, length: int | None
) -> None:
    """transformers takes those of the sequence at hand: the same where both are on one side of the
    original length.
    """
    tiny = make_tiny(next(case for case in CASES if case.name == name))
    model = load_model(tiny.path, dtype="float32", max_model_len=length)
    tokens_T = tokens_for(model.vocab_size)[:tokens]
    exact = run_exactly(tiny.model, tokens_T)
    bound = Float32Bound(tiny.model, tokens_T, exact)
    for chunks in ([tokens], [1] * tokens, [5, tokens - 5]):
        assert error(run(model, tokens_T, chunks), exact) <= bound


def test_longrope_with_a_longer_length_is_another_model(make_tiny: Any) -> None:
    tiny = make_tiny(next(case for case in CASES if case.name == "phi3-longrope"))
    short, long = (load_model(tiny.path, dtype="float32", max_model_len=length) for length in (16, 17))
    assert short.canonical_config != long.canonical_config
    assert (short.max_model_len, long.max_model_len) == (16, 17)
    assert short.max_position == long.max_position == 128
    assert long.canonical_config == load_model(tiny.path, dtype="float32").canonical_config
    tokens_T = tokens_for(97)[:16]
    exact = run_exactly(tiny.model, tokens_T)
    assert error(run(long, tokens_T, [16]), exact) > 100 * float(Float32Bound(tiny.model, tokens_T, exact))


def test_dynamic_rope_beyond_the_context(make_tiny: Any) -> None:
    """The base that transformers takes for a sequence of the longest length, in every chunking and
    for short ones too.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 200.0, "factor": 2.0}
    tiny = make_tiny(
        Case("llama-rope-dynamic", "Llama", {"rope_parameters": rope, "head_dim": 16, "max_position_embeddings": 16})
    )
    model = load_model(tiny.path, dtype="float32", max_model_len=NUM_TOKENS)
    assert model.max_position == NUM_TOKENS
    assert load_model(tiny.path, dtype="float32", max_model_len=9).max_position == 16
    tokens_T = tokens_for(model.vocab_size)
    exact = run_exactly(tiny.model, tokens_T)
    bound = Float32Bound(tiny.model, tokens_T, exact)
    for chunks in CHUNKINGS.values():
        assert error(run(model, tokens_T, chunks), exact) <= bound
    assert error(run(model, tokens_T[:9], [9]), exact[:9]) <= bound


@pytest.mark.turns(8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_no_worse_than_in_transformers(tiny: Any, dtype: str) -> None:
    model = load_model(tiny.path, dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    tokens_T = tokens_for(model.vocab_size)
    theirs_model = copy.deepcopy(tiny.model).to(model.dtype)
    # Exact arithmetic on the rounded weights: only the rounding of activations is compared.
    exact = run_exactly(theirs_model, tokens_T)
    theirs = run_transformers(theirs_model, tokens_T)
    ours = run(model, tokens_T, CHUNKINGS["chunks"])
    rms = [float((logits.double() - exact).square().mean().sqrt()) for logits in (ours, theirs)]
    # The mean over thousands of logits is a stable measure; half as much again is beyond its
    # scatter.
    assert rms[0] <= 1.5 * rms[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemmas_embedding_is_scaled_to_the_bit_as_it_was_trained(make_tiny: Any, name: str, dtype: torch.dtype) -> None:
    """By the root of the width, rounded to the model's dtype (5.65625 for 32 in bfloat16)."""
    tiny = make_tiny(next(case for case in CASES if case.name == name))
    tokens_T = tokens_for(97)
    model = load_model(tiny.path, dtype=str(dtype).removeprefix("torch."))
    theirs = copy.deepcopy(tiny.model).to(dtype).get_input_embeddings()(tokens_T)
    assert torch.equal(model.embed(tokens_T), theirs)


def test_the_model_says_what_it_is(tiny: Any) -> None:
    model = load_model(tiny.path, dtype="float32")
    config = tiny.model.config.get_text_config()
    assert model.architecture == type(tiny.model).__name__
    assert (model.vocab_size, model.hidden_size) == (config.vocab_size, config.hidden_size)
    assert model.max_position == config.max_position_embeddings
    assert len(model.blocks) == len(model.layer_specs) == config.num_hidden_layers
    ours = [
        weight
        for name, weight in tiny.model.named_parameters()
        if "vision_tower" not in name and "multi_modal" not in name
    ]
    assert model.num_parameters == sum(weight.numel() for weight in ours)
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
