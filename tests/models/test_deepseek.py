"""DeepSeek-V2 and V3, GLM-4-MoE-Lite, Youtu: logits against transformers in every chunking, the
routers by groups and with a correction, spellings of their checkpoints, and what their
configurations may not ask for.

Attention is written out here over rows in lists, so what is tested is the model and the specs of
its layers; ``tests/test_parity.py`` runs the families through the KV state.

Letters: T tokens, S stored tokens, Hq heads, D head size, R columns of a latent, V vocabulary, X
experts, K experts of a token, E width.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.exact import EqualSums, Float32Bound, run_exactly, run_transformers
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from quire.base.errors import CheckpointError, InvalidArgument, QuireError, Unsupported
from quire.contracts.experts import Routing
from quire.contracts.layers import LatentAttention
from quire.contracts.model import LatentExpansion
from quire.models.families import FAMILIES
from quire.models.loading import load_model
from quire.nn.experts import MixtureOfExperts, Router
from quire.nn.latent import MultiHeadLatentAttention
from quire.nn.mlp import GatedMLP
from quire.nn.packed import PackedLinear, can_pack
from quire.ops.experts import route
from quire.ops.rope import RotaryTable, rotate
from quire.weights.safetensors_files import SINGLE_FILE

from . import test_parity as parity
from .conftest import GEOMETRY, Case, TinyCheckpoint
from .conftest import make_checkpoint as make_any_checkpoint
from .test_parity import CHUNKINGS, DensePass, error, run, tokens_for

EPS = torch.finfo(torch.float32).eps
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
"""Heads of K are 10 wide, those of V 7, a stored row 28."""
EXPERTS = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
V2 = {**LATENT, **EXPERTS, "first_k_dense_replace": 1}
V2_GROUPS = {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0}
V3 = {**LATENT, **EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
GLM = {**LATENT, **EXPERTS}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
CASES = (
    Case("v2", "DeepseekV2", V2),
    Case("v2-lite", "DeepseekV2", {**V2, "q_lora_rank": None, "n_shared_experts": 2, "tie_word_embeddings": True}),
    Case("v2-biases", "DeepseekV2", {**V2, "attention_bias": True, "first_k_dense_replace": 0}),
    Case("v2-groups-sharded", "DeepseekV2", V2_GROUPS, sharded=True),
    Case("v2-yarn", "DeepseekV2", {**V2, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}}),
    Case("v3", "DeepseekV3", V3),
    Case(
        "v3-whole-heads-turn-by-halves",
        "DeepseekV3",
        {**V3, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
    ),
    Case("v3-yarn", "DeepseekV3", {**V3, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    Case("v3-yarn-without-weights", "DeepseekV3", {**V3, "rope_parameters": YARN, "n_group": 1, "topk_group": 1}),
    Case(
        "v3-dense", "DeepseekV3", {**V3, "first_k_dense_replace": 7, "rms_norm_eps": 1e-2, "tie_word_embeddings": True}
    ),
    Case("glm4-moe-lite", "Glm4MoeLite", GLM),
    Case(
        "glm4-moe-lite-pattern",
        "Glm4MoeLite",
        {**GLM, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 2, "topk_group": 1, "hidden_act": "gelu"},
    ),
    Case("youtu", "Youtu", LATENT),
    Case(
        "youtu-yarn-untied-sharded",
        "Youtu",
        {
            **LATENT,
            "tie_word_embeddings": False,
            "q_lora_rank": None,
            "rope_parameters": {**YARN, "attention_factor": 1.3},
        },
        sharded=True,
    ),
)
ALL_CHOSEN = (
    Case("v2-all", "DeepseekV2", {**V2, "num_experts_per_tok": 8}),
    Case("v3-all", "DeepseekV3", {**V3, "num_experts_per_tok": 8, "topk_group": 4}),
    Case("youtu", "Youtu", LATENT),
)
"""Without a choice there is none that rounding could turn over."""


class LatentPass(DensePass):
    """One sequence whose latent rows are kept in lists; absorbed for single tokens, else
    expanded."""

    def attend_latent(self, layer_id: int, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion) -> Tensor:
        spec = self.specs[layer_id]
        assert isinstance(spec, LatentAttention)
        assert spec.rope is not None
        turning, rank = spec.rope.rotary_dim, spec.value_dim
        key_HDR, value_HRV = expansion.key_HDR, expansion.value_HRV
        nope = key_HDR.shape[1]
        assert q_THD.shape[1:] == (spec.num_heads, nope + turning)
        assert rows_TR.shape == (len(q_THD), spec.row_dim)
        assert spec.row_dim == rank + turning
        assert key_HDR.shape == (spec.num_heads, nope, rank)
        assert value_HRV.shape[:2] == (spec.num_heads, rank)
        positions_T = self.positions_T.long()
        cos, sin = RotaryTable(spec.rope, q_THD.device).rows(positions_T, int(positions_T.max()))

        def turned(x_THD: Tensor) -> Tensor:
            assert spec.rope is not None
            part = rotate(x_THD[..., -turning:].contiguous(), cos, sin, interleaved=spec.rope.interleaved)
            return torch.cat((x_THD[..., :-turning], part), -1)

        q_THD = turned(q_THD).float()
        self.k[layer_id].extend(turned(rows_TR[:, None])[:, 0])
        rows_SR = torch.stack(self.k[layer_id]).float()
        latent_SR, position_SR = rows_SR.split([rank, turning], dim=-1)
        scores_HTS = torch.einsum("thd,sd->hts", q_THD[..., nope:], position_SR)
        hidden_TS = positions_T[:, None] < torch.arange(len(rows_SR))
        if len(q_THD) == 1:
            q_THR = torch.einsum("thd,hdr->thr", q_THD[..., :nope], key_HDR.float())
            scores_HTS = scores_HTS + torch.einsum("thr,sr->hts", q_THR, latent_SR)
        else:
            k_SHD = torch.einsum("sr,hdr->shd", latent_SR, key_HDR.float())
            scores_HTS = scores_HTS + torch.einsum("thd,shd->hts", q_THD[..., :nope], k_SHD)
        weights_HTS = (scores_HTS * spec.scale).masked_fill(hidden_TS, float("-inf")).softmax(-1)
        if len(q_THD) == 1:
            out = torch.einsum("hts,sr->thr", weights_HTS, latent_SR)
            return torch.einsum("thr,hrv->thv", out, value_HRV.float()).to(rows_TR.dtype)
        v_SHD = torch.einsum("sr,hrv->shv", latent_SR, value_HRV.float())
        return torch.einsum("hts,shv->thv", weights_HTS, v_SHD).to(rows_TR.dtype)


@pytest.fixture(autouse=True)
def _latent_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "DensePass", LatentPass)


def corrections(model: Any) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def make_checkpoint(case: Case, path: Path) -> TinyCheckpoint:
    """With random corrections, and the experts of transformers that run in float64 too."""
    tiny = make_any_checkpoint(case, path)
    generator = torch.Generator().manual_seed(3)
    for correction in corrections(tiny.model):
        correction.copy_(0.3 * torch.randn(correction.shape, generator=generator))
    tiny.model.save_pretrained(path, **({"max_shard_size": "12KB"} if case.sharded else {}))
    if case.family != "Youtu":
        tiny.model.set_experts_implementation("eager")
    return tiny


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], TinyCheckpoint]:
    @functools.cache
    def make(name: str) -> TinyCheckpoint:
        return make_checkpoint(named(name), tmp_path_factory.mktemp("latent") / name)

    return lambda case: make(case.name)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[Case], TinyCheckpoint]) -> TinyCheckpoint:
    """Each case in turn; do not change its files."""
    return make_tiny(request.param)


def named(name: str) -> Case:
    return next(case for case in (*CASES, *ALL_CHOSEN) if case.name == name)


# These run on the ``tiny`` of this module.
test_float32_logits = parity.test_float32_logits_are_as_close_to_float64_as_those_of_transformers


@pytest.mark.turns(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ALL_CHOSEN, ids=lambda case: case.name)
def test_half_precision(make_tiny: Callable[[Case], TinyCheckpoint], case: Case, dtype: str) -> None:
    parity.test_half_precision_is_no_worse_than_in_transformers(make_tiny(case), dtype)


def test_the_model_says_what_it_is(tiny: TinyCheckpoint) -> None:
    model, config = load_model(tiny.path, dtype="float32"), tiny.model.config
    assert model.architecture == type(tiny.model).__name__
    weights = [*tiny.model.parameters(), *corrections(tiny.model)]
    assert model.num_parameters == sum(weight.numel() for weight in weights)
    assert model.parameter_bytes == 4 * model.num_parameters
    assert model.max_position == config.max_position_embeddings
    assert len(model.layer_specs) == len(model.blocks) == config.num_hidden_layers
    for spec, theirs in zip(model.layer_specs, tiny.model.model.layers, strict=True):
        assert isinstance(spec, LatentAttention)
        assert (spec.num_heads, spec.row_dim, spec.value_dim) == (4, 28, 24)
        assert spec.rope is not None
        assert spec.rope.rotary_dim == 4
        assert spec.scale == pytest.approx(theirs.self_attn.scaling, rel=1e-15)  # some units of float64


def test_yarn_weighs_all_columns(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    """The scale of the scores by the square of one weight's magnitude, the rotated columns by what
    the other has beyond it.
    """

    def spec(name: str) -> Any:
        return load_model(make_tiny(named(name)).path, dtype="float32").layer_specs[0]

    log = 0.1 * math.log(8)
    assert spec("v2-yarn").scale == pytest.approx(10**-0.5 * (0.5 * log + 1) ** 2)
    assert spec("v2-yarn").rope.attention_factor == pytest.approx((0.707 * log + 1) / (0.5 * log + 1))
    assert spec("v3-yarn").scale == pytest.approx(10**-0.5 * (log + 1) ** 2)
    assert spec("v3-yarn").rope.attention_factor == 1.0
    assert spec("v3-yarn-without-weights").scale == pytest.approx(10**-0.5)
    assert spec("v3-yarn-without-weights").rope.attention_factor == pytest.approx(log + 1)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("v2", [0]),
        ("v2-biases", []),
        ("v3", [0]),
        ("v3-dense", [0, 1, 2]),
        ("glm4-moe-lite", [0]),
        ("glm4-moe-lite-pattern", [1]),
        ("youtu", [0, 1, 2]),
    ],
)
def test_which_layers_have_experts(make_tiny: Callable[[Case], TinyCheckpoint], name: str, dense: list[int]) -> None:
    model = load_model(make_tiny(named(name)).path, dtype="float32")
    kinds = [type(block.mlp) for block in model.blocks]  # type: ignore[attr-defined]
    assert kinds == [GatedMLP if layer in dense else MixtureOfExperts for layer in range(len(kinds))]


def test_no_input_is_changed(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    """The same prompt twice through one model."""
    model, tokens_T = load_model(make_tiny(named("v3")).path, dtype="float32"), tokens_for(97)
    assert torch.equal(run(model, tokens_T, [40]), run(model, tokens_T, [40]))


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="bfloat16 is not packed on this CPU")
@pytest.mark.parametrize("name", ["v2-lite", "v3"])
def test_bfloat16_weights_are_packed(make_tiny: Callable[[Case], TinyCheckpoint], name: str) -> None:
    model = load_model(make_tiny(named(name)).path, dtype="bfloat16")
    for block in model.blocks:
        attention = block.attention  # type: ignore[attr-defined]
        assert isinstance(attention, MultiHeadLatentAttention)
        maps = [attention.qkv, attention.out, *([attention.query_up.up] if attention.query_up else [])]
        assert all(isinstance(one, PackedLinear) for one in maps)
        assert len(maps) == (2 if name == "v2-lite" else 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_correction_is_not_rounded(make_tiny: Callable[[Case], TinyCheckpoint], dtype: str) -> None:
    tiny = make_tiny(named("v3"))
    model = load_model(tiny.path, dtype=dtype)
    found = [block.mlp.router.correction for block in model.blocks[1:]]  # type: ignore[attr-defined]
    for one, theirs in zip(found, corrections(tiny.model), strict=True):
        assert torch.equal(one, theirs)
        assert not torch.equal(one, theirs.to(model.dtype).float()), "nothing to round"


# Routing.


ROUTINGS = {
    "v2": Routing(top_k=3, in_float32=True, scale=1.5),
    "v2-groups": Routing(top_k=3, in_float32=True, groups=4, top_groups=2, scale=1.5),
    "v3": Routing(
        top_k=3,
        in_float32=True,
        scores="sigmoid",
        renormalise=True,
        groups=4,
        top_groups=2,
        group_score="best_two",
        scale=1.5,
    ),
    "v3-as-they-are": Routing(
        top_k=3, in_float32=True, scores="sigmoid", groups=2, top_groups=1, group_score="best_two", scale=1.5
    ),
}
DUPLICATED = (0, 3, 4, 7)


def by_hand(scores: list[float], choice: list[float], routing: Routing) -> dict[int, float]:
    """Experts and weights of one token, out of plain lists."""
    size = len(scores) // routing.groups
    best = 1 if routing.group_score == "best" else 2
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(routing.groups)]
    groups = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.top_groups]
    allowed = [x for x in range(len(scores)) if x // size in groups]
    chosen = sorted(allowed, key=lambda x: -choice[x])[: routing.top_k]
    total = sum(scores[x] for x in chosen) if routing.renormalise else 1.0
    return {x: routing.scale * scores[x] / total for x in chosen}


@pytest.mark.parametrize("name", sorted(ROUTINGS))
@pytest.mark.parametrize("tokens", [0, 1, 200])
def test_route_by_definition(name: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(11)
    routing, logits_TX = ROUTINGS[name], 2 * torch.randn(tokens, 8, generator=generator)
    correction_X = torch.randn(8, generator=generator) if routing.scores == "sigmoid" else None
    weights_TK, experts_TK = route(logits_TX, routing, correction_X)
    assert (weights_TK.shape, weights_TK.dtype, experts_TK.dtype) == ((tokens, 3), torch.float32, torch.int64)
    wide_TX = logits_TX.double()
    scores_TX = wide_TX.sigmoid() if routing.scores == "sigmoid" else wide_TX.softmax(-1)
    choice_TX = scores_TX if correction_X is None else scores_TX + correction_X
    for scores, choice, weights, experts in zip(
        scores_TX.tolist(), choice_TX.tolist(), weights_TK.tolist(), experts_TK.tolist(), strict=True
    ):
        expected = by_hand(scores, choice, routing)
        assert list(expected) == experts, "other experts, or not best first"
        assert weights == pytest.approx(list(expected.values()), rel=8 * EPS)


def test_the_correction_and_the_groups_change_the_choice() -> None:
    """Otherwise the test above would say nothing about them."""
    generator = torch.Generator().manual_seed(11)
    logits_TX, correction_X = 2 * torch.randn(200, 8, generator=generator), torch.randn(8, generator=generator)
    chosen = [
        route(logits_TX, routing, correction)[1].sort(-1).values
        for routing in (
            ROUTINGS["v3"],
            replace(ROUTINGS["v3"], groups=1, top_groups=1),
            replace(ROUTINGS["v3"], group_score="best"),
        )
        for correction in (None, correction_X)
    ]
    for index, one in enumerate(chosen):
        assert not any(torch.equal(one, other) for other in chosen[:index])


def test_scores_that_vanish_give_weights_of_zero() -> None:
    weights_TK, _ = route(torch.full((2, 8), -200.0), ROUTINGS["v3"])
    assert torch.equal(weights_TK, torch.zeros(2, 3))


@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_sigmoids_that_tie_do_not_fall_apart(tokens: int) -> None:
    """Whatever the place of an expert in a tensor of any size."""
    logits_T1 = torch.randn(tokens, 1, generator=torch.Generator().manual_seed(2))
    weights_TK, _ = route(logits_T1.expand(-1, 7).contiguous(), Routing(top_k=7, scores="sigmoid", in_float32=True))
    assert torch.equal(weights_TK, weights_TK[:, :1].expand(-1, 7))


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 2, "top_groups": 3},
        {"groups": 2, "top_groups": 0},
        {"softmax": "chosen", "groups": 2},
        {"softmax": "chosen", "scores": "sigmoid"},
    ],
)
def test_a_routing_that_makes_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        Routing(top_k=2, **changes)


@pytest.mark.parametrize("name", sorted(ROUTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_routers_with_duplicated_rows_choose_as_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    """Equal rows in several groups and within one, with equal corrections: ties between experts and
    between groups.
    """
    routing, width = ROUTINGS[name], 64
    generator = torch.Generator().manual_seed(5)
    sizes = {
        "num_experts_per_tok": routing.top_k,
        "hidden_size": width,
        "n_routed_experts": 8,
        "n_group": routing.groups,
        "topk_group": routing.top_groups,
        "routed_scaling_factor": routing.scale,
        "norm_topk_prob": routing.renormalise,
    }
    correction_X = None
    if routing.scores == "sigmoid":
        peer: Any = DeepseekV3TopkRouter(transformers.DeepseekV3Config(**sizes))
        correction_X = torch.randn(8, generator=generator)
        correction_X[list(DUPLICATED)] = correction_X[0].clone()
        peer.e_score_correction_bias.copy_(correction_X)
    else:
        method = "greedy" if routing.groups == 1 else "group_limited_greedy"
        peer = DeepseekV2TopkRouter(transformers.DeepseekV2Config(**sizes, topk_method=method))
    weight_XE = torch.randn(8, width, generator=generator) / math.sqrt(width)
    weight_XE[list(DUPLICATED)] = weight_XE[0].clone()
    x_TE = torch.randn(60, width, generator=generator).to(dtype)
    peer.weight.data = weight_XE.to(dtype)
    with EqualSums():
        logits_TX, scores_TK, expected_TK = peer(x_TE)
    assert logits_TX.dtype == torch.float32
    router = Router(weight_XE.to(dtype), None, routing, correction_X)
    weights_TK, experts_TK = router(x_TE)
    assert all(torch.equal(logits_TX[:, 0], logits_TX[:, other]) for other in DUPLICATED), "no ties to decide"
    tied = [len(set(DUPLICATED) & set(row)) for row in expected_TK.tolist()]
    assert any(0 < count < len(DUPLICATED) for count in tied), "no tie at the edge of the choice"
    assert torch.equal(experts_TK.sort(-1).values, expected_TK.sort(-1).values)
    order, peer_order = experts_TK.argsort(-1), expected_TK.argsort(-1)
    found, expected = weights_TK.gather(-1, order), scores_TK.gather(-1, peer_order)
    assert (found - expected).abs().max() < 8 * EPS * routing.scale
    for chunk in (1, 2, 7):
        parts = [router(part) for part in x_TE.split(chunk)]
        assert torch.equal(torch.cat([part[1] for part in parts]), experts_TK)
        assert torch.equal(torch.cat([part[0] for part in parts]), weights_TK)


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", ["v2-groups-sharded", "v3"])
def test_ties_in_the_router(tmp_path: Path, name: str) -> None:
    """Router rows are the same, and their experts are not.

    Whatever the chunks, each token goes to the experts that it has in transformers where the sums
    of equal rows are equal; one other choice would be far outside of the bound.
    """
    peer = make_checkpoint(named(name), tmp_path / "untied").model
    with torch.no_grad():
        for layer in peer.model.layers[1:]:
            layer.mlp.gate.weight[[1, 2, 5]] = layer.mlp.gate.weight[0].clone()
        for correction in corrections(peer):
            correction[[1, 2, 5]] = correction[0].clone()
    peer.save_pretrained(tmp_path / "tied")
    model = load_model(tmp_path / "tied", dtype="float32")
    tokens_T = tokens_for(model.vocab_size)
    logits: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: logits.append(out[0]))
        for layer in peer.model.layers[1:]
    ]
    with EqualSums():
        run_transformers(peer, tokens_T)
        for hook in hooks:
            hook.remove()
        exact_TV = run_exactly(peer, tokens_T)
        bound = float(Float32Bound(peer, tokens_T, exact_TV))
    assert len(logits) == 2
    assert all(torch.equal(one[:, 0], one[:, other]) for one in logits for other in (1, 2, 5)), "no ties to decide"
    for chunks in CHUNKINGS.values():
        assert error(run(model, tokens_T, chunks), exact_TV) <= bound
    # The suite sees another choice: the tied experts trade places.
    for block in model.blocks[1:]:
        experts = block.mlp.experts  # type: ignore[attr-defined]
        for stack in (experts.gate_up, experts.down):
            stack.maps[0], stack.maps[5] = stack.maps[5], stack.maps[0]
    assert error(run(model, tokens_T, [len(tokens_T)]), exact_TV) > 100 * bound


# Checkpoints.


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, path / SINGLE_FILE)


@pytest.mark.parametrize("name", ["v2", "v3", "glm4-moe-lite-pattern"])
def test_every_spelling_is_the_same_model(
    make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, name: str
) -> None:
    """What transformers writes by default (as on the hub), and its own form with stacked
    experts."""
    tiny = make_tiny(named(name))
    tiny.model.save_pretrained(tmp_path, save_original_format=False)
    stacked, usual = load_file(tmp_path / SINGLE_FILE), load_file(tiny.path / SINGLE_FILE)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in stacked)
    assert any(key.endswith("mlp.experts.7.gate_proj.weight") for key in usual)
    tokens_T = tokens_for(97)
    logits = [run(load_model(path, dtype="float32"), tokens_T, [40]) for path in (tiny.path, tmp_path)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("count", [None, 0])
def test_without_shared_experts(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, count: int | None) -> None:
    """As a shared expert that adds nothing.

    transformers writes tensors without elements for one of width 0.
    """
    path = Path(shutil.copytree(make_tiny(named("v2")).path, tmp_path / "none"))
    edit_tensors(path, lambda t: [t[name].zero_() for name in t if "shared_experts.down_proj" in name])
    expected = run(load_model(path, dtype="float32"), tokens_for(97), [40])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "n_shared_experts": count}))

    def shrink(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "shared_experts" in name]:
            weight = tensors.pop(name)
            if count == 0:
                tensors[name] = weight[:, :0].clone() if "down_proj" in name else weight[:0].clone()

    edit_tensors(path, shrink)
    model = load_model(path, dtype="float32")
    assert torch.equal(run(model, tokens_for(97), [40]), expected)
    assert all(block.mlp.shared is None for block in model.blocks[1:])  # type: ignore[attr-defined]


def test_layers_that_draft_are_not_read(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path) -> None:
    """As many as the configuration has; what goes beyond them has no place."""
    make_tiny(named("v3")).model.save_pretrained(tmp_path)
    expected = run(load_model(tmp_path, dtype="float32"), tokens_for(97), [40])
    draft = {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "model.layers.3.mlp.gate.weight": torch.ones(8, 32)}
    edit_tensors(tmp_path, lambda t: t.update(draft))
    assert torch.equal(run(load_model(tmp_path, dtype="float32"), tokens_for(97), [40]), expected)
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.4.eh_proj.weight": torch.ones(32, 64)}))
    with pytest.raises(CheckpointError, match=r"no place for model.layers.4.eh_proj.weight"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "suffix",
    [
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_b_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.up_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, suffix: str) -> None:
    make_tiny(named("v3")).model.save_pretrained(tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop(f"model.layers.1.{suffix}"))
    with pytest.raises(CheckpointError, match=rf"lacks 1 of .* tensors: model.layers.1.{suffix}"):
        load_model(tmp_path)


# Configurations.


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a case as transformers writes it."""
    return written(named(name))


def written(case: Case) -> dict[str, Any]:
    kind = getattr(transformers, f"{case.family}ForCausalLM")
    values = json.loads(kind.config_class(**{**GEOMETRY, **case.changes}).to_json_string(use_diff=False))
    return {**values, "architectures": [f"{case.family}ForCausalLM"]}


def read(values: dict[str, Any]) -> Any:
    family = FAMILIES.get(values["architectures"][0])
    assert family is not None
    return family.read_config(values)


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("v2", {"model_type": "deepseek_v3"}, CheckpointError, "model_type is 'deepseek_v3'"),
        ("v2", {"kv_lora_rank": None}, CheckpointError, "kv_lora_rank is None"),
        ("v2", {"q_lora_rank": 0}, CheckpointError, "q_lora_rank is 0"),
        ("v2", {"qk_nope_head_dim": -1}, CheckpointError, "qk_nope_head_dim is -1"),
        ("v2", {"qk_rope_head_dim": 3}, CheckpointError, "qk_head_dim is 10; expected"),
        (
            "v2",
            {"qk_rope_head_dim": 3, "qk_head_dim": None, "head_dim": None},
            CheckpointError,
            "head_dim is 3; .* even",
        ),
        ("v2", {"v_head_dim": None}, CheckpointError, "v_head_dim is None"),
        ("v2", {"head_dim": 10}, CheckpointError, "head_dim is 10; expected 4"),
        (
            "v2",
            {"num_key_value_heads": 2},
            CheckpointError,
            r"num_key_value_heads is 2; expected num_attention_heads \(4",
        ),
        ("v2", {"mlp_bias": True}, Unsupported, "mlp_bias is true"),
        ("v2", {"norm_topk_prob": True}, Unsupported, "norm_topk_prob is true"),
        (
            "v2",
            {"topk_method": "noaux_tc"},
            Unsupported,
            'topk_method is "noaux_tc".*"greedy" or "group_limited_greedy"',
        ),
        ("v2", {"scoring_func": "sigmoid"}, Unsupported, 'scoring_func is "sigmoid"'),
        ("v2", {"rope_interleave": False}, Unsupported, "rope_interleave is false"),
        ("v2", {"moe_layer_freq": 2}, Unsupported, "moe_layer_freq is 2"),
        ("v2", {"first_k_dense_replace": -1}, CheckpointError, "first_k_dense_replace is -1"),
        ("v2", {"n_routed_experts": None}, CheckpointError, "n_routed_experts is None"),
        ("v2", {"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok is 9"),
        ("v2", {"n_shared_experts": -1}, CheckpointError, "n_shared_experts is -1"),
        ("v2", {"routed_scaling_factor": 0}, CheckpointError, "routed_scaling_factor is 0"),
        ("v2", {"quantization_config": {"quant_method": "fp8"}}, Unsupported, "quantization_config"),
        ("v2", {"hidden_act": "relu"}, Unsupported, "hidden_act is 'relu'"),
        ("v2-yarn", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, CheckpointError, "mscale is missing"),
        (
            "v2-yarn",
            {"rope_parameters": {"rope_type": "default", "mscale_all_dim": 1.0}},
            Unsupported,
            "mscale_all_dim",
        ),
        ("v2", {"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor 0.5"),
        (
            "v2-groups-sharded",
            {"n_group": 3},
            CheckpointError,
            r"n_group is 3; expected a divisor of n_routed_experts \(8",
        ),
        ("v2-groups-sharded", {"n_group": None}, CheckpointError, "n_group is None"),
        ("v2-groups-sharded", {"topk_group": 5}, CheckpointError, r"topk_group is 5; expected at most n_group \(4"),
        ("v2-groups-sharded", {"topk_group": 1}, CheckpointError, r"topk_group is 1; .* num_experts_per_tok \(3"),
        ("v3", {"n_group": 8}, CheckpointError, "n_group is 8; .* groups of 2 or more"),
        ("v3", {"scoring_func": "softmax"}, Unsupported, 'scoring_func is "softmax"'),
        ("v3", {"topk_method": "greedy"}, Unsupported, 'topk_method is "greedy"'),
        ("v3", {"norm_topk_prob": "yes"}, CheckpointError, "norm_topk_prob is 'yes'"),
        ("v3", {"num_nextn_predict_layers": 10**9}, CheckpointError, "num_nextn_predict_layers is 1000000000"),
        ("v3", {"num_experts": 9}, Unsupported, "num_experts is 9"),
        ("v3", {"num_local_experts": 9}, CheckpointError, "num_local_experts is 9"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"]}, CheckpointError, "mlp_layer_types .* a list of 3 strings"),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense", "moe", "sparse"]}, CheckpointError, "mlp_layer_types"),
        ("glm4-moe-lite", {"first_k_dense_replace": 2}, CheckpointError, r"first_k_dense_replace is 2; .* \[0\]"),
        ("youtu", {"n_routed_experts": 8}, Unsupported, "n_routed_experts is 8"),
        ("youtu", {"use_sliding_window": True}, Unsupported, "use_sliding_window is true"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], kind: type[QuireError], message: str) -> None:
    values = config_of(name)
    read(values)
    with pytest.raises(kind, match=message):
        read({**values, **changes})


def test_q_lora_rank_is_said() -> None:
    values = config_of("v2")
    del values["q_lora_rank"]
    with pytest.raises(CheckpointError, match="q_lora_rank is missing"):
        read(values)


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu"])
def test_fields_that_are_missing_are_as_in_transformers(family: str) -> None:
    experts = {} if family == "Youtu" else {**EXPERTS, "n_group": 4, "topk_group": 2}
    values = written(Case(family, family, {**LATENT, **experts, "num_hidden_layers": 5}))
    required = {"architectures", *GEOMETRY, *LATENT, *EXPERTS, "n_group", "topk_group", "num_hidden_layers"}
    for name in values.keys() - required:
        rest = {key: value for key, value in values.items() if key != name}
        assert read(rest).canonical() == read(values).canonical(), name
    assert {"rms_norm_eps", "tie_word_embeddings", "attention_bias", "rope_parameters"} <= values.keys() - required


def test_published_fields_are_read() -> None:
    """As in the configurations of the published models: fields that transformers does not know, and
    older spellings.
    """
    rope = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "type": "yarn"}
    rope["original_max_position_embeddings"] = 4096
    beside = {"rope_theta": 10000, "rope_scaling": rope, "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True}
    v2 = {key: value for key, value in config_of("v2-lite").items() if key not in ("rope_parameters", "head_dim")}
    config = read({**v2, **beside, "scoring_func": "softmax", "n_group": 1, "topk_group": 1, "aux_loss_alpha": 0.001})
    assert (config.routing.groups, config.shared_size, config.latent.query_rank) == (1, 32, 0)
    assert config.layers[0].scale == pytest.approx(10**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert config.layers[0].rope.attention_factor == 1.0
    v3 = {key: value for key, value in config_of("v3").items() if key not in ("rope_parameters", "rope_interleave")}
    config = read({**v3, **beside, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1})
    assert config.layers[0].rope.interleaved
    assert read({**v3, "n_shared_experts": None}).shared_size == 0
    glm = {key: value for key, value in config_of("glm4-moe-lite").items() if key != "mlp_layer_types"}
    assert read({**glm, "first_k_dense_replace": 1, "topk_method": "noaux_tc"}) == read(glm)
    assert read({**glm, "num_nextn_predict_layers": 1}).canonical() == read(glm).canonical()


def test_canonical_configurations_tell_models_apart() -> None:
    canonical = {case.name: read(config_of(case.name)).canonical() for case in CASES}
    assert len(set(canonical.values())) == len(CASES)
    for name, field, value in (
        ("v2", "kv_lora_rank", 26),
        ("v2", "routed_scaling_factor", 2.0),
        ("v2-groups-sharded", "topk_group", 3),
        ("v3", "norm_topk_prob", False),
        ("v3", "rope_interleave", False),
        ("youtu", "v_head_dim", 8),
    ):
        assert read({**config_of(name), field: value}).canonical() != canonical[name]
