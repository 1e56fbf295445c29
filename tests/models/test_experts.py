"""Mixtures of experts: the choice, ties included, and the grouped run against the reference and
``transformers``.

Letters: T tokens, X experts, K experts of a token, E model width, F inner width of an expert, O
outputs, I inputs.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from quire.contracts.block_calls import LayerKernels
from quire.contracts.experts import Routing
from quire.nn import experts as module
from quire.nn.experts import (
    ActivatedGate,
    ClampedGate,
    ExpertLinear,
    Experts,
    Gate,
    MixtureOfExperts,
    Router,
    SharedExpert,
)
from quire.nn.linear import Linear
from quire.nn.mlp import GatedMLP
from quire.nn.packed import PackedLinear, can_pack, pack_maps
from quire.ops.experts import mix, route

X, K, E, INNER = 6, 3, 64, 40
DUPLICATED = (0, 2, X - 1)
EPS = torch.finfo(torch.float32).eps
ROUTINGS = {
    "all": Routing(top_k=K),
    "renormalised": Routing(top_k=K, renormalise=True),
    "chosen": Routing(top_k=K, softmax="chosen"),
}
needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this PyTorch does not pack bfloat16 weights on this CPU"
)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal, so that sums over a width need a factor of its root to stay of that size."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tied(rows: Tensor) -> Tensor:
    """A router's rows, or biases, of which three are made the same."""
    rows[list(DUPLICATED)] = rows[0].clone()
    return rows


def eighths(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Multiples of 1/8 below 2.

    A sum of E products of two of them is at most 64 * 15 * 15 units of 1/64, so it is exact in
    float32 in whatever order a kernel adds up, and sums that tie do so on every CPU.
    """
    return torch.randint(-15, 16, shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / 8


def make_experts(
    dtype: torch.dtype = torch.float32, *, biases: bool = False, transposed: bool = False, gate: Gate | None = None
) -> Experts:
    def stack(outs: int, ins: int, seed: int) -> ExpertLinear:
        weight_XOI = (random(X, outs, ins, seed=seed) / math.sqrt(ins)).to(dtype)
        if transposed:
            weight_XOI = weight_XOI.transpose(1, 2).contiguous().transpose(1, 2)
        return ExpertLinear(weight_XOI, random(X, outs, seed=seed + 1, dtype=dtype) if biases else None)

    return Experts(stack(2 * INNER, E, 10), stack(E, INNER, 20), gate or ActivatedGate())


def by_token(experts: Experts, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
    """``ops.experts.mix`` over the same weights, in float64 but for the inputs."""

    def expert(index: int) -> Callable[[Tensor], Tensor]:
        def run(x_RE: Tensor) -> Tensor:
            h_RG = wide(experts.gate_up.maps[index], x_RE)
            return wide(experts.down.maps[index], exact_gate(experts.gate, h_RG))

        return run

    return mix(x_TE.double(), weights_TK, experts_TK, [expert(index) for index in range(X)])


def wide(linear: Linear, x_RI: Tensor) -> Tensor:
    return F.linear(x_RI, linear.weight.double(), None if linear.bias is None else linear.bias.double())


def exact_gate(gate: Gate, h_RG: Tensor) -> Tensor:
    """The gates from their formulas, in float64."""
    if isinstance(gate, ActivatedGate):
        half = h_RG.shape[-1] // 2
        return h_RG[:, :half] * torch.sigmoid(h_RG[:, :half]) * h_RG[:, half:]
    columns = []
    for j in range(0, h_RG.shape[-1], 2):
        glu = h_RG[:, j].clamp(max=gate.limit)
        columns.append(
            glu * torch.sigmoid(gate.alpha * glu) * (h_RG[:, j + 1].clamp(min=-gate.limit, max=gate.limit) + 1)
        )
    return torch.stack(columns, -1)


def bound(exact_TE: Tensor, dtype: torch.dtype = torch.float32) -> float:
    """Two products in a row and a gate round like the root of their lengths; half types round each
    result besides.

    Values are of the size of their largest; the constant counts the roundings between x and the
    sum.
    """
    eps = torch.finfo(dtype).eps
    return float(exact_TE.abs().max()) * 4 * (math.sqrt(E) * EPS + (eps if eps > EPS else 0.0))


# The choice.


@pytest.mark.parametrize("name", sorted(ROUTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_by_definition(name: str, dtype: torch.dtype) -> None:
    routing = ROUTINGS[name]
    logits_TX = random(50, X, dtype=dtype)
    weights_TK, experts_TK = route(logits_TX, routing)
    assert (weights_TK.dtype, experts_TK.dtype) == (torch.float32, torch.int64)
    for row, weights, chosen in zip(logits_TX.double(), weights_TK, experts_TK.tolist(), strict=True):
        assert sorted(row[chosen].tolist(), reverse=True) == row[chosen].tolist(), "not best first"
        assert row[chosen].min() >= row[[x for x in range(X) if x not in chosen]].max()
        expected = (row.exp() / row.exp().sum())[chosen]
        if name != "all":
            expected = expected / expected.sum()
        assert (weights - expected).abs().max() < 8 * EPS


def test_route_chooses_among_equal_values_as_transformers_does() -> None:
    """The values that tie are the rounded probabilities, so logits that differ can tie too."""
    logits_TX = torch.randint(-2, 1, (200, X), generator=torch.Generator().manual_seed(0)).float()
    # Zeros become logits of their own, but by less than any exponential in float32 could keep.
    logits_TX[100:] += 1e-9 * torch.arange(X)
    probabilities_TX = logits_TX.softmax(-1)
    ties = [sum(len(set(row)) < X for row in rows.tolist()) for rows in (logits_TX, probabilities_TX)]
    assert 100 < ties[0] < ties[1]
    assert torch.equal(route(logits_TX, ROUTINGS["all"])[1], torch.topk(probabilities_TX, K)[1])
    assert torch.equal(route(logits_TX, ROUTINGS["renormalised"])[1], torch.topk(probabilities_TX, K)[1])
    assert torch.equal(route(logits_TX, ROUTINGS["chosen"])[1], torch.topk(logits_TX, K)[1])
    assert not torch.equal(torch.topk(logits_TX, K)[1], torch.topk(probabilities_TX, K)[1]), "no case of rounding"


def peer_router(kind: str, weight_XE: Tensor, bias_X: Tensor | None) -> Any:
    """The router of transformers, with these weights."""
    sizes = {"num_experts_per_tok": K, "hidden_size": E}
    if kind == "mixtral":
        peer = mixtral.MixtralTopKRouter(transformers.MixtralConfig(num_local_experts=X, **sizes))
    elif kind == "gpt_oss":
        peer = gpt_oss.GptOssTopKRouter(transformers.GptOssConfig(num_local_experts=X, **sizes))
        peer.bias.data = torch.zeros(X) if bias_X is None else bias_X
    else:
        config = transformers.Qwen2MoeConfig(num_experts=X, norm_topk_prob=kind == "qwen_renormalised", **sizes)
        peer = qwen2_moe.Qwen2MoeTopKRouter(config)
    peer.weight.data = weight_XE
    return peer.to(weight_XE.dtype)


PEER_ROUTINGS = {
    "mixtral": ROUTINGS["renormalised"],
    "qwen": ROUTINGS["all"],
    "qwen_renormalised": ROUTINGS["renormalised"],
    "gpt_oss": ROUTINGS["chosen"],
}


@pytest.mark.parametrize("kind", sorted(PEER_ROUTINGS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_duplicated_router_rows_lead_to_the_experts_of_transformers(kind: str, dtype: torch.dtype) -> None:
    weight_XE = tied(eighths(X, E, seed=3, dtype=dtype) / math.sqrt(E))
    bias_X = tied(eighths(X, seed=4, dtype=dtype)) if kind == "gpt_oss" else None
    x_TE = eighths(40, E, seed=5, dtype=dtype)
    logits_TX, scores_TK, expected_TK = peer_router(kind, weight_XE, bias_X)(x_TE)
    assert all(torch.equal(logits_TX[:, 0], logits_TX[:, other]) for other in DUPLICATED), "no ties to decide"
    assert any(len({0, 2, 5} & set(row)) in (1, 2) for row in expected_TK.tolist()), "no tie at the edge of the choice"
    weights_TK, experts_TK = Router(weight_XE, bias_X, PEER_ROUTINGS[kind])(x_TE)
    assert torch.equal(experts_TK, expected_TK)
    assert (weights_TK - scores_TK).abs().max() < 8 * torch.finfo(scores_TK.dtype).eps


@pytest.mark.parametrize("kind", sorted(ROUTINGS))
@torch.inference_mode()
def test_the_choice_does_not_depend_on_the_batch(kind: str) -> None:
    """Rows that tie get one logit however many tokens run; a plain product does not always give
    them one.
    """
    plain_differs = False
    for seed in range(30):
        weight_XE, x_TE = tied(random(X, E, seed=seed) / math.sqrt(E)), random(17, E, seed=100 + seed)
        router = Router(weight_XE, None, ROUTINGS[kind])
        weights_TK, experts_TK = router(x_TE)
        for chunk in (1, 2, 3, 5):
            parts = [router(part) for part in x_TE.split(chunk)]
            assert torch.equal(torch.cat([part[1] for part in parts]), experts_TK)
            assert torch.equal(torch.cat([part[0] for part in parts]), weights_TK)
            plain_TX = torch.cat([F.linear(part, weight_XE) for part in x_TE.split(chunk)])
            plain_differs |= not torch.equal(plain_TX[:, 0], plain_TX[:, X - 1])
    if not plain_differs:
        pytest.skip("this PyTorch's products give equal sums for equal rows in all these shapes")


# The grouped run.


def choices(num_tokens: int, kind: str, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Weights and experts: spread as they fall, or all tokens on the same ones, in turns."""
    logits_TX = random(num_tokens, X, seed=seed)
    if kind == "crowded":
        logits_TX[:, 1:4] += 100
    return route(logits_TX, ROUTINGS["renormalised"])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 50])
@pytest.mark.parametrize("kind", ["spread", "crowded"])
@pytest.mark.parametrize("form", ["plain", "biases, transposed, clamped"])
@torch.inference_mode()
def test_experts_against_the_reference(num_tokens: int, kind: str, form: str) -> None:
    plain = form == "plain"
    experts = make_experts(biases=not plain, transposed=not plain, gate=None if plain else ClampedGate(1.7, 1.0))
    x_TE = random(num_tokens, E, seed=8)
    before = x_TE.clone()
    weights_TK, experts_TK = choices(num_tokens, kind)
    found_TE = experts(x_TE, weights_TK, experts_TK)
    assert torch.equal(x_TE, before)
    assert (found_TE.shape, found_TE.dtype) == (x_TE.shape, x_TE.dtype)
    if num_tokens:
        exact_TE = by_token(experts, x_TE, weights_TK, experts_TK)
        assert (found_TE - exact_TE).abs().max() < bound(exact_TE)


@torch.inference_mode()
def test_one_choice_of_one_expert() -> None:
    experts = make_experts()
    x_TE = random(9, E)
    weights_TK, experts_TK = route(random(9, X), Routing(top_k=1, renormalise=True))
    exact_TE = by_token(experts, x_TE, weights_TK, experts_TK)
    assert (experts(x_TE, weights_TK, experts_TK) - exact_TE).abs().max() < bound(exact_TE)


@pytest.mark.parametrize("pairs", [1, 3 * K, 3 * K + 1, 10 * K])
@torch.inference_mode()
def test_long_batches_run_in_blocks(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x_TE = make_experts(), random(10, E)
    chosen = choices(10, "spread")
    expected_TE = experts(x_TE, *chosen)
    ran: list[int] = []
    mixed = Experts._mix
    monkeypatch.setattr(Experts, "_mix", lambda self, x, *rest: ran.append(len(x)) or mixed(self, x, *rest))
    monkeypatch.setattr(module, "MAX_PAIRS", pairs)
    found_TE = experts(x_TE, *chosen)
    assert max(ran) == max(1, pairs // K)
    assert sum(ran) == 10
    assert (found_TE - expected_TE).abs().max() < 2 * bound(expected_TE)


@pytest.mark.parametrize("num_tokens", [1, 2, 30])
@torch.inference_mode()
def test_experts_that_nobody_chose_are_not_read(num_tokens: int) -> None:
    experts, x_TE = make_experts(), random(num_tokens, E)
    weights_TK, experts_TK = choices(num_tokens, "crowded")
    assert set(experts_TK.flatten().tolist()) == {1, 2, 3}
    expected_TE = experts(x_TE, weights_TK, experts_TK)
    for stack in (experts.gate_up, experts.down):
        assert stack.weight is not None
        stack.weight[[0, 4, 5]] = float("nan")
    assert torch.equal(experts(x_TE, weights_TK, experts_TK), expected_TE)
    experts.gate_up.maps[1].weight[0, 0] = float("nan")
    assert experts(x_TE, weights_TK, experts_TK).isnan().any(), "the map is no view of the stack"


@torch.inference_mode()
def test_each_expert_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped: as many products as chosen experts, whatever the number of tokens."""
    experts, calls = make_experts(), []
    run = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: calls.append(len(x)) or run(self, x))
    experts(random(64, E), *choices(64, "crowded"))
    assert calls == [64] * 3 * 2


@torch.inference_mode()
def test_a_token_does_not_depend_on_its_company() -> None:
    experts, x_TE = make_experts(), random(40, E)
    weights_TK, experts_TK = choices(40, "spread")
    together_TE = experts(x_TE, weights_TK, experts_TK)
    order_T = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled_TE = experts(x_TE[order_T], weights_TK[order_T], experts_TK[order_T])
    limit = 2 * bound(together_TE)
    assert (shuffled_TE - together_TE[order_T]).abs().max() < limit
    for token in range(40):
        row = slice(token, token + 1)
        alone_1E = experts(x_TE[row], weights_TK[row], experts_TK[row])
        assert (alone_1E - together_TE[row]).abs().max() < limit


@torch.inference_mode()
def test_not_a_number_stays_in_its_token() -> None:
    experts, x_TE = make_experts(), random(20, E)
    chosen = choices(20, "crowded")
    expected_TE = experts(x_TE, *chosen)
    x_TE[7] = float("nan")
    found_TE = experts(x_TE, *chosen)
    assert found_TE[7].isnan().all()
    others = [token for token in range(20) if token != 7]
    assert torch.equal(found_TE[others], expected_TE[others])


@pytest.mark.product(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["spread", "crowded"])
@pytest.mark.parametrize("form", ["plain", "biases, transposed, clamped"])
@torch.inference_mode()
def test_all_experts_in_one_call(dtype: torch.dtype, kind: str, form: str) -> None:
    """What a GPU runs; the product that it uses exists on a CPU too."""
    plain = form == "plain"
    experts = make_experts(
        dtype, biases=not plain, transposed=not plain, gate=None if plain else ClampedGate(1.702, 2.0)
    )
    assert not experts._can_group
    experts._can_group = True
    for num_tokens in (1, 2, 33):
        x_TE = random(num_tokens, E, dtype=dtype)
        chosen = choices(num_tokens, kind)
        exact_TE = by_token(experts, x_TE, *chosen)
        assert (experts(x_TE, *chosen) - exact_TE).abs().max() < bound(exact_TE, dtype)


@pytest.mark.product(2)
@needs_packing
@pytest.mark.parametrize("num_tokens", [1, 5, 60])
@pytest.mark.parametrize("form", ["plain", "biases, transposed, clamped"])
@torch.inference_mode()
def test_packed_experts(num_tokens: int, form: str) -> None:
    plain = form == "plain"
    experts = make_experts(
        torch.bfloat16, biases=not plain, transposed=not plain, gate=None if plain else ClampedGate(1.702, 2.0)
    )
    x_TE = random(num_tokens, E, dtype=torch.bfloat16)
    chosen = choices(num_tokens, "spread")
    exact_TE = by_token(experts, x_TE, *chosen)
    assert (experts(x_TE, *chosen) - exact_TE).abs().max() < bound(exact_TE, torch.bfloat16)
    stacks = [weakref.ref(stack.weight) for stack in (experts.gate_up, experts.down)]
    pack_maps(experts, LayerKernels())
    assert all(isinstance(one, PackedLinear) for stack in (experts.gate_up, experts.down) for one in stack.maps)
    assert [stack() for stack in stacks] == [None, None], "the plain weights are still there"
    assert (experts(x_TE, *chosen) - exact_TE).abs().max() < bound(exact_TE, torch.bfloat16)
    pack_maps(experts, LayerKernels())
    assert (experts(x_TE, *chosen) - exact_TE).abs().max() < bound(exact_TE, torch.bfloat16)


def test_float32_is_not_packed() -> None:
    experts = make_experts()
    maps = list(experts.gate_up.maps)
    pack_maps(experts, LayerKernels())
    assert experts.gate_up.maps == maps
    assert experts.gate_up.weight is not None


# Gates.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clamped_gate(dtype: torch.dtype) -> None:
    """Beyond the limit on every side: a large gate is cut, a very negative one is not, up is cut on
    both sides.
    """
    gate = ClampedGate(1.702, 7.0)
    values = torch.tensor([-30.0, -7.5, -1.0, 0.0, 0.3, 6.9, 7.0, 7.5, 30.0])
    h_PG = torch.cartesian_prod(values, values).to(dtype)
    expected_PF = exact_gate(gate, h_PG.double())
    before = h_PG.clone()
    found_PF = gate(h_PG)
    assert torch.equal(h_PG, before)
    assert found_PF.dtype == dtype
    # Rounding its argument z changes exp(z) by a factor of 1 + z * eps.
    relative = torch.finfo(dtype).eps + (8 + 1.702 * 30) * EPS
    assert ((found_PF - expected_PF).abs() <= expected_PF.abs() * relative + torch.finfo(dtype).tiny).all()


# Whole layers against transformers.


def peer_layer(kind: str) -> Any:
    """A layer of transformers with random weights, tied router rows among them.

    Its logits of ``eighths`` are exact.
    """
    sizes = {"hidden_size": E, "num_experts_per_tok": K, "num_hidden_layers": 1}
    if kind == "mixtral":
        layer = mixtral.MixtralSparseMoeBlock(
            transformers.MixtralConfig(num_local_experts=X, intermediate_size=INNER, **sizes)
        )
    elif kind == "gpt_oss":
        config = transformers.GptOssConfig(
            num_local_experts=X, intermediate_size=INNER, swiglu_alpha=1.5, swiglu_limit=1.0, **sizes
        )
        layer = gpt_oss.GptOssMLP(config)
    elif kind == "qwen2":
        layer = qwen2_moe.Qwen2MoeSparseMoeBlock(
            transformers.Qwen2MoeConfig(
                num_experts=X, moe_intermediate_size=INNER, shared_expert_intermediate_size=24, **sizes
            )
        )
    else:
        layer = qwen3_moe.Qwen3MoeSparseMoeBlock(
            transformers.Qwen3MoeConfig(num_experts=X, moe_intermediate_size=INNER, norm_topk_prob=True, **sizes)
        )
    for seed, (name, weight) in enumerate(sorted(layer.named_parameters())):
        columns = weight.shape[-2 if kind == "gpt_oss" and weight.dim() == 3 else -1]
        weight.data = random(*weight.shape, seed=seed) / (1 if "bias" in name else math.sqrt(columns))
    router = layer.router if kind == "gpt_oss" else layer.gate
    router.weight.data = tied(eighths(X, E, seed=3) / math.sqrt(E))
    if kind == "gpt_oss":
        router.bias.data = tied(eighths(X, seed=4))
    return layer


def ours(layer: Any, kind: str) -> MixtureOfExperts:
    """Our layer out of the same weights."""
    routing = {
        "mixtral": ROUTINGS["renormalised"],
        "qwen2": ROUTINGS["all"],
        "qwen3": ROUTINGS["renormalised"],
        "gpt_oss": ROUTINGS["chosen"],
    }[kind]
    stacks = layer.experts
    if kind == "gpt_oss":
        experts = Experts(
            ExpertLinear(stacks.gate_up_proj.data.transpose(1, 2), stacks.gate_up_proj_bias.data),
            ExpertLinear(stacks.down_proj.data.transpose(1, 2), stacks.down_proj_bias.data),
            ClampedGate(1.5, 1.0),
        )
        return MixtureOfExperts(Router(layer.router.weight.data, layer.router.bias.data, routing), experts)
    experts = Experts(ExpertLinear(stacks.gate_up_proj.data), ExpertLinear(stacks.down_proj.data), ActivatedGate())
    shared = None
    if kind == "qwen2":
        one = layer.shared_expert
        gate_up = torch.cat((one.gate_proj.weight.data, one.up_proj.weight.data))
        shared = SharedExpert(
            GatedMLP(Linear(gate_up), Linear(one.down_proj.weight.data)), Linear(layer.shared_expert_gate.weight.data)
        )
    return MixtureOfExperts(Router(layer.gate.weight.data, None, routing), experts, shared)


def run_peer(layer: Any, x_TE: Tensor) -> Tensor:
    out = layer(x_TE[None])
    return (out[0] if isinstance(out, tuple) else out)[0]


@pytest.mark.product(2)
@pytest.mark.parametrize("kind", ["mixtral", "qwen2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("do_pack", [False, True])
@torch.inference_mode()
def test_layers_are_as_close_to_float64_as_those_of_transformers(kind: str, dtype: torch.dtype, do_pack: bool) -> None:
    """With ties: were one of them decided otherwise, the error would be as large as the result."""
    peer = peer_layer(kind).to(dtype)
    x_TE = eighths(60, E, seed=77, dtype=dtype)
    exact_TE = run_peer(copy.deepcopy(peer).double(), x_TE.double())
    found_TE = run_peer(peer, x_TE)
    layer = ours(copy.deepcopy(peer), kind)
    if do_pack:
        pack_maps(layer, LayerKernels())
    for chunk in (60, 7, 1):
        ours_TE = torch.cat([layer(part) for part in x_TE.split(chunk)])
        assert ours_TE.dtype == dtype
        # In half precision the logits are rounded before they are compared, so the exact run may
        # choose otherwise.
        same_T = same_choice(peer, kind, x_TE)
        assert same_T.double().mean() > 0.8
        errors = [((one - exact_TE) * same_T[:, None]).abs().square().mean().sqrt() for one in (ours_TE, found_TE)]
        assert errors[0] <= 1.5 * errors[1] + EPS * exact_TE.abs().max()
        assert ((ours_TE - found_TE).abs() < 2 * bound(exact_TE, dtype)).all()


def same_choice(peer: Any, kind: str, x_TE: Tensor) -> Tensor:
    """Which tokens go to the same experts in float64."""
    router = peer.router if kind == "gpt_oss" else peer.gate
    choice_TK, exact_TK = router(x_TE)[2], copy.deepcopy(router).double()(x_TE.double())[2]
    return (choice_TK == exact_TK).all(-1)
