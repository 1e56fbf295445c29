"""Mixtral, PhiMoE, Qwen2-MoE, Qwen3-MoE and gpt-oss: the suite of all families on their own cases,
ties in the router, every spelling of their checkpoints, and what their configurations may not ask
for.

Letters: T tokens, V vocabulary, X experts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.exact import EqualSums, Float32Bound, run_exactly, run_transformers
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from quire.base.errors import CheckpointError, QuireError, Unsupported
from quire.contracts.experts import Routing
from quire.models.families import FAMILIES, LoadedModel
from quire.models.loading import load_model
from quire.nn.experts import MixtureOfExperts
from quire.nn.mlp import GatedMLP
from quire.nn.packed import PackedLinear, can_pack
from quire.ops.experts import route
from quire.weights.mxfp4 import MXFP4
from quire.weights.safetensors_files import SINGLE_FILE

from . import test_parity as parity
from .conftest import FULL, GEOMETRY, LONG_ROPE, Case, TinyCheckpoint
from .conftest import make_checkpoint as make_any_checkpoint
from .test_parity import CHUNKINGS, error, run, tokens_for

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
PHIMOE = {
    **MIXTRAL,
    "attention_bias": True,
    "lm_head_bias": True,
    "router_jitter_noise": 0.2,
    "rope_parameters": {
        **LONG_ROPE,
        "short_mscale": 1.2,
        "long_mscale": 1.4,
        "original_max_position_embeddings": 128,
    },
}
QWEN = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN2 = {**QWEN, "shared_expert_intermediate_size": 40}
QWEN3 = {**QWEN, "head_dim": 16, "norm_topk_prob": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 7,
    "rope_parameters": YARN,
}
WINDOW = "sliding_attention"
CASES = (
    Case("mixtral", "Mixtral", MIXTRAL),
    Case("mixtral-windows-sharded", "Mixtral", {**MIXTRAL, "sliding_window": 9, "head_dim": 12}, sharded=True),
    Case("mixtral-all-tied", "Mixtral", {**MIXTRAL, "num_experts_per_tok": 8, "tie_word_embeddings": True}),
    Case("phimoe", "Phimoe", PHIMOE),
    Case("phimoe-windows", "Phimoe", {**MIXTRAL, "sliding_window": 9, "tie_word_embeddings": True}, sharded=True),
    Case("qwen2-moe", "Qwen2Moe", QWEN2),
    Case("qwen2-moe-some", "Qwen2Moe", {**QWEN2, "num_hidden_layers": 5, "decoder_sparse_step": 2, "qkv_bias": False}),
    Case("qwen2-moe-normed", "Qwen2Moe", {**QWEN2, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    Case(
        "qwen2-moe-windows",
        "Qwen2Moe",
        {**QWEN2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        sharded=True,
    ),
    Case(
        "qwen2-moe-layer-types",
        "Qwen2Moe",
        {**QWEN2, "use_sliding_window": True, "sliding_window": 6, "layer_types": [*FULL[:1], WINDOW, WINDOW]},
    ),
    Case("qwen3-moe", "Qwen3Moe", QWEN3),
    Case("qwen3-moe-biases", "Qwen3Moe", {**QWEN3, "attention_bias": True, "norm_topk_prob": False}),
    Case("qwen3-moe-dense-ends", "Qwen3Moe", {**QWEN3, "mlp_only_layers": [0, 2], "num_experts_per_tok": 1}),
    Case("qwen3-moe-windows", "Qwen3Moe", {**QWEN3, "use_sliding_window": True, "sliding_window": 5}),
    Case("gpt-oss", "GptOss", GPT_OSS),
    Case("gpt-oss-clamped", "GptOss", {**GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 1.2, "num_hidden_layers": 4}),
    Case(
        "gpt-oss-layer-types",
        "GptOss",
        {**GPT_OSS, "layer_types": [*FULL[:2], WINDOW], "attention_bias": False, "num_key_value_heads": 4},
        sharded=True,
    ),
)
ALL_CHOSEN = (
    Case("mixtral-all", "Mixtral", {**MIXTRAL, "num_experts_per_tok": 8}),
    Case("qwen2-moe-all", "Qwen2Moe", {**QWEN2, "num_experts_per_tok": 6}),
    Case("qwen3-moe-all", "Qwen3Moe", {**QWEN3, "num_experts_per_tok": 6}),
    Case("gpt-oss-all", "GptOss", {**GPT_OSS, "num_experts_per_tok": 6}),
)
"""Without a choice there is none that rounding could turn over."""
TIED = ("mixtral", "phimoe", "qwen2-moe", "qwen3-moe", "gpt-oss")


def make_checkpoint(case: Case, path: Path) -> TinyCheckpoint:
    """With the experts of transformers that run in float64 too."""
    tiny = make_any_checkpoint(case, path)
    tiny.model.set_experts_implementation("eager")
    return tiny


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], TinyCheckpoint]:
    @functools.cache
    def make(name: str) -> TinyCheckpoint:
        return make_checkpoint(named(name), tmp_path_factory.mktemp("moe") / name)

    return lambda case: make(case.name)


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[[Case], TinyCheckpoint]) -> TinyCheckpoint:
    """Each case in turn; do not change its files."""
    return make_tiny(request.param)


def named(name: str) -> Case:
    return next(case for case in (*CASES, *ALL_CHOSEN) if case.name == name)


def mixtures(model: Any) -> list[MixtureOfExperts]:
    return [block.mlp for block in model.blocks if isinstance(block.mlp, MixtureOfExperts)]


# These run on the ``tiny`` of this module.
test_float32_logits = parity.test_float32_logits_are_as_close_to_float64_as_those_of_transformers
test_the_model_says_what_it_is = parity.test_the_model_says_what_it_is

# Routing.


@pytest.mark.turns(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ALL_CHOSEN, ids=lambda case: case.name)
def test_half_precision(make_tiny: Callable[[Case], TinyCheckpoint], case: Case, dtype: str) -> None:
    parity.test_half_precision_is_no_worse_than_in_transformers(make_tiny(case), dtype)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", TIED)
def test_ties_in_the_router(tmp_path: Path, name: str) -> None:
    """Router rows are the same, and their experts are not.

    Whatever the chunks, each token goes to the experts that it has in transformers where the sums
    of equal rows are equal; one other choice would be far outside of the bound.
    """
    peer = make_checkpoint(named(name), tmp_path / "untied").model
    routers = [layer.mlp.router if name in ("gpt-oss", "phimoe") else layer.mlp.gate for layer in peer.model.layers]
    with torch.no_grad():
        for router in routers:
            router.weight[[1, 2, 5]] = router.weight[0].clone()
            if name == "gpt-oss":
                router.bias[[1, 2, 5]] = router.bias[0].clone()
    peer.save_pretrained(tmp_path / "tied")
    model = load_model(tmp_path / "tied", dtype="float32")
    tokens_T = tokens_for(model.vocab_size)
    logits: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: logits.append(out[0])) for router in routers]
    with EqualSums():
        run_transformers(peer, tokens_T)
        for hook in hooks:
            hook.remove()
        exact_TV = run_exactly(peer, tokens_T)
        bound = float(Float32Bound(peer, tokens_T, exact_TV))
    assert len(logits) == len(model.blocks)
    assert all(torch.equal(one[:, 0], one[:, other]) for one in logits for other in (1, 2, 5)), "no ties to decide"
    for chunks in CHUNKINGS.values():
        assert error(run(model, tokens_T, chunks), exact_TV) <= bound
    # The suite sees another choice: the tied experts trade places.
    for mixture in mixtures(model):
        for stack in (mixture.experts.gate_up, mixture.experts.down):
            stack.maps[0], stack.maps[1] = stack.maps[1], stack.maps[0]
    assert error(run(model, tokens_T, [len(tokens_T)]), exact_TV) > 100 * bound


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3])
def test_sparse_mixers_choice_is_that_of_transformers(noise: float) -> None:
    """To the bit, ties and logits of zero included."""
    logits_TX = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    logits_TX[200:] = (logits_TX[200:] * 2).round() / 2
    weights_TK, experts_TK = sparsemixer(logits_TX, noise, training=False)
    found = route(logits_TX, Routing(top_k=2, reach=2 * noise))
    assert torch.equal(found[0], weights_TK)
    assert torch.equal(found[1], experts_TK)
    assert noise == 0 or float(found[0].min()) < 0.6


def test_magnitudes_of_phimoes_rope_follow_the_length(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    values = json.loads((make_tiny(named("phimoe")).path / "config.json").read_text())
    values["original_max_position_embeddings"] = values["rope_parameters"]["original_max_position_embeddings"] = 64
    read = FAMILIES.require("PhimoeForCausalLM").read_config
    for length, kind, weight in ((64, "short", 1.2), (65, "long", 1.4)):
        rope = read(values, length).layers[0].rope
        assert (rope.attention_factor, rope.factors) == (weight, tuple(LONG_ROPE[f"{kind}_factor"]))
    del values["rope_parameters"]["long_mscale"]
    with pytest.raises(CheckpointError, match="long_mscale is missing; expected a finite number above 0"):
        read(values, 64)
    with pytest.raises(CheckpointError, match="num_experts_per_tok is 3; expected 2, which SparseMixer chooses"):
        read({**values, "num_experts_per_tok": 3}, 64)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("qwen2-moe", []),
        ("qwen2-moe-some", [0, 2, 4]),
        ("qwen2-moe-normed", [0]),
        ("qwen3-moe-dense-ends", [0, 2]),
        ("gpt-oss", []),
        ("phimoe", []),
    ],
)
def test_which_layers_have_experts(make_tiny: Callable[[Case], TinyCheckpoint], name: str, dense: list[int]) -> None:
    model = load_model(make_tiny(named(name)).path, dtype="float32")
    kinds = [type(block.mlp) for block in model.blocks]  # type: ignore[attr-defined]
    assert kinds == [GatedMLP if layer in dense else MixtureOfExperts for layer in range(len(kinds))]


def test_windows_and_sinks_are_in_the_specs(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    def windows(name: str) -> list[int | None]:
        return [spec.layer_window for spec in load_model(make_tiny(named(name)).path, dtype="float32").layer_specs]  # type: ignore[union-attr]

    assert windows("mixtral-windows-sharded") == [9, 9, 9]
    assert windows("qwen2-moe-windows") == [6, None, None]
    assert windows("qwen2-moe-layer-types") == [None, 6, 6]
    assert windows("qwen3-moe-windows") == [5, 5, 5]
    assert windows("gpt-oss-clamped") == [7, None, 7, None]
    assert windows("gpt-oss-layer-types") == [None, None, 7]
    tiny = make_tiny(named("gpt-oss"))
    for spec, layer in zip(load_model(tiny.path, dtype="float32").layer_specs, tiny.model.model.layers, strict=True):
        assert spec.sinks == tuple(layer.self_attn.sinks.tolist())  # type: ignore[union-attr]


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="bfloat16 is not packed on this CPU")
@pytest.mark.parametrize("name", ["qwen2-moe-some", "gpt-oss"])
def test_bfloat16_experts_are_packed_and_take_no_second_place(
    make_tiny: Callable[[Case], TinyCheckpoint], name: str
) -> None:
    model = load_model(make_tiny(named(name)).path, dtype="bfloat16")
    assert mixtures(model)
    for mixture in mixtures(model):
        for stack in (mixture.experts.gate_up, mixture.experts.down):
            assert stack.weight is None
            assert all(isinstance(one, PackedLinear) for one in stack.maps)
        if mixture.shared is not None:
            assert isinstance(mixture.shared.mlp.gate_up, PackedLinear)
    assert model.parameter_bytes == 2 * model.num_parameters


# Checkpoints.


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "qwen2-moe-some", "qwen3-moe", "gpt-oss"])
def test_every_spelling_is_the_same_model(
    make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, name: str
) -> None:
    """What transformers writes by default (as on the hub), and its own form with stacked
    experts."""
    tiny = make_tiny(named(name))
    tiny.model.save_pretrained(tmp_path, save_original_format=False)
    stacked, usual = load_file(tmp_path / SINGLE_FILE), load_file(tiny.path / SINGLE_FILE)
    assert any(key.endswith("mlp.experts.gate_up_proj") for key in stacked)
    assert (stacked.keys() == usual.keys()) == (name == "gpt-oss")
    tokens_T = tokens_for(97)
    logits = [run(load_model(path, dtype="float32"), tokens_T, [40]) for path in (tiny.path, tmp_path)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("experts.3.w2", "lacks 1 of .* tensors: model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("gate.", "lacks 1 of .* tensors: model.layers.1.block_sparse_moe.gate.weight"),
    ],
)
def test_a_missing_tensor_is_named_in_the_spelling_at_hand(
    make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, drop: str, message: str
) -> None:
    path = copy_of(make_tiny(named("mixtral")).path, tmp_path)
    edit_tensors(path, lambda t: t.pop(next(key for key in t if f"layers.1.block_sparse_moe.{drop}" in key)))
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_mixed_spellings_are_refused(make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path) -> None:
    path = copy_of(make_tiny(named("mixtral")).path, tmp_path)
    edit_tensors(path, lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.ones(8, 32, 56)}))
    with pytest.raises(CheckpointError, match=r"no place for model.layers.0.mlp.experts.down_proj"):
        load_model(path)


def copy_of(source: Path, target: Path) -> Path:
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(path: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, path / SINGLE_FILE)


# MXFP4.


QUANTISED = Case("gpt-oss-mxfp4", "GptOss", {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16})
QUANTISATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights, once in MXFP4 and once as transformers unpacks them."""
    root = tmp_path_factory.mktemp("mxfp4")
    plain = make_checkpoint(QUANTISED, root / "plain").path
    (root / "packed").mkdir()
    packed = copy_of(plain, root / "packed")
    generator = torch.Generator().manual_seed(0)
    mxfp4_tensors, plain_tensors = load_file(packed / SINGLE_FILE), load_file(plain / SINGLE_FILE)
    for name in [key for key in plain_tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        count, ins, outs = plain_tensors[name].shape
        blocks = torch.randint(0, 256, (count, outs, ins // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        del mxfp4_tensors[name]
        mxfp4_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain_tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(mxfp4_tensors, packed / SINGLE_FILE)
    save_file(plain_tensors, plain / SINGLE_FILE)
    edit_config(packed, quantization_config=QUANTISATION)
    return packed, plain


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_mxfp4_is_unpacked_exactly(quantised: tuple[Path, Path], dtype: str) -> None:
    models = [load_model(path, dtype=dtype) for path in quantised]
    tokens_T = tokens_for(97)
    assert torch.equal(*(run(model, tokens_T, [40]) for model in models))
    assert models[0].num_parameters == models[1].num_parameters
    stacks = [[mixture.experts.gate_up.weight for mixture in mixtures(model)] for model in models]
    assert dtype == "bfloat16" or all(torch.equal(*pair) for pair in zip(*stacks, strict=True))  # type: ignore[arg-type]


def test_auto_is_the_type_of_what_is_not_quantised(quantised: tuple[Path, Path], tmp_path: Path) -> None:
    path = copy_of(quantised[0], tmp_path)
    assert load_model(path).dtype == torch.float32
    edit_tensors(path, lambda t: t.update({k: v.half() for k, v in t.items() if v.dtype == torch.float32}))
    assert load_model(path, dtype="float16").dtype == torch.float16


@pytest.mark.parametrize(
    ("suffix", "edit", "message"),
    [
        ("down_proj_scales", lambda t: None, "lacks 1 of .* tensors: .*down_proj_scales"),
        ("down_proj_blocks", lambda t: None, "lacks 1 of .* tensors: .*down_proj_blocks"),
        (
            "down_proj_scales",
            lambda t: t[..., :-1].clone(),
            r"down_proj_scales has shape \[6, 64, 2\]; .* \[6, 64, 3\]",
        ),
        ("down_proj_blocks", lambda t: t.flatten(-2), r"down_proj_blocks has shape \[6, 64, 48\]; .* \[6, 64, 3, 16\]"),
        ("down_proj_blocks", lambda t: t.float(), r"down_proj_blocks has dtype F32; expected one of \['U8'\]"),
        ("down_proj_bias", lambda t: t.to(torch.uint8), r"down_proj_bias has dtype U8; expected one of \['F32'"),
        (
            "down_proj_scales",
            lambda t: t.index_fill(0, torch.tensor(2), 255),
            "down_proj_blocks has a scale byte of 255",
        ),
    ],
)
def test_damaged_mxfp4(
    quantised: tuple[Path, Path], tmp_path: Path, suffix: str, edit: Callable[[Tensor], Tensor | None], message: str
) -> None:
    path, name = copy_of(quantised[0], tmp_path), f"model.layers.1.mlp.experts.{suffix}"

    def change(tensors: dict[str, Tensor]) -> None:
        changed = edit(tensors.pop(name))
        tensors.update({} if changed is None else {name: changed})

    edit_tensors(path, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(path, dtype="float32")


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 252])
def test_mxfp4_values(scale: int) -> None:
    """All sixteen numbers in both halves of a byte, also where they are the smallest and the
    largest that there are.
    """
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 2, 8, 16)
    expected = [n * 2.0 ** (scale - 127) for byte in range(256) for n in (numbers[byte % 16], numbers[byte // 16])]
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(1, 2, 256, dtype=dtype)
        MXFP4.expand("blocks", {"b": blocks, "s": torch.full((1, 2, 8), scale, dtype=torch.uint8)}, out)
        assert torch.equal(out.double().flatten(), torch.tensor(expected, dtype=torch.float64))
        assert torch.equal(out.signbit().flatten(), torch.tensor(expected).signbit())


@pytest.mark.parametrize("scale", [90, 160])
def test_what_float16_cannot_hold_is_refused(scale: int) -> None:
    blocks, out = torch.full((1, 1, 1, 16), 0x11, dtype=torch.uint8), torch.empty(1, 1, 32, dtype=torch.float16)
    with pytest.raises(Unsupported, match="blocks has values that float16 does not hold"):
        MXFP4.expand("blocks", {"b": blocks, "s": torch.full((1, 1, 1), scale, dtype=torch.uint8)}, out)
    MXFP4.expand("blocks", {"b": torch.zeros_like(blocks), "s": torch.full((1, 1, 1), scale, dtype=torch.uint8)}, out)
    assert not out.any()


# Configurations.


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a case as transformers writes it."""
    case = named(name)
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
        ("mixtral", {"num_local_experts": None}, CheckpointError, "num_local_experts is None; expected an integer"),
        ("mixtral", {"num_local_experts": 0}, CheckpointError, "num_local_experts is 0"),
        ("mixtral", {"num_local_experts": 10**9}, CheckpointError, "num_local_experts is 1000000000; .* 1 to 4096"),
        (
            "mixtral",
            {"num_experts": 9},
            CheckpointError,
            r"num_experts is 9; expected the same as num_local_experts \(8",
        ),
        ("mixtral", {"num_experts_per_tok": 9}, CheckpointError, "num_experts_per_tok is 9; expected at most"),
        ("mixtral", {"num_experts_per_tok": None}, CheckpointError, "num_experts_per_tok is None"),
        ("mixtral", {"hidden_act": "relu"}, Unsupported, "hidden_act is 'relu'"),
        ("mixtral", {"attention_bias": True}, Unsupported, "attention_bias is true"),
        ("mixtral", {"quantization_config": {"quant_method": "awq"}}, Unsupported, "quantization_config"),
        ("mixtral", {"layer_types": [WINDOW] * 3}, Unsupported, "layer_types"),
        ("mixtral", {"sliding_window": 0}, CheckpointError, "sliding_window is 0"),
        ("qwen2-moe", {"decoder_sparse_step": 0}, CheckpointError, "decoder_sparse_step is 0"),
        ("qwen2-moe", {"mlp_only_layers": [3]}, CheckpointError, r"mlp_only_layers is \[3\]; .* from 0 to 2"),
        ("qwen2-moe", {"mlp_only_layers": [True]}, CheckpointError, "mlp_only_layers"),
        ("qwen2-moe", {"mlp_only_layers": 1}, CheckpointError, "mlp_only_layers is 1"),
        ("qwen2-moe", {"norm_topk_prob": "yes"}, CheckpointError, "norm_topk_prob is 'yes'"),
        ("qwen2-moe", {"shared_expert_intermediate_size": 0}, CheckpointError, "shared_expert_intermediate_size is 0"),
        ("qwen2-moe", {"layer_types": [WINDOW, *FULL[:2]]}, CheckpointError, "sliding_window is null or off"),
        ("qwen3-moe", {"moe_intermediate_size": None}, CheckpointError, "moe_intermediate_size is None"),
        ("qwen3-moe", {"mlp_bias": True}, Unsupported, "mlp_bias is true"),
        ("gpt-oss", {"rope_parameters": None}, CheckpointError, "rope_parameters is None"),
        ("gpt-oss", {"hidden_act": "gelu"}, Unsupported, 'hidden_act is "gelu"'),
        ("gpt-oss", {"experts_per_token": 4}, CheckpointError, "experts_per_token is 4; expected the same as"),
        ("gpt-oss", {"quantization_config": {"quant_method": "fp8"}}, Unsupported, "quant_method in .* is 'fp8'"),
        ("gpt-oss", {"quantization_config": "mxfp4"}, CheckpointError, "quantization_config is 'mxfp4'"),
        ("gpt-oss", {"swiglu_limit": 0}, CheckpointError, "swiglu_limit is 0"),
        ("gpt-oss", {"sliding_window": None}, CheckpointError, "layer 0 is a sliding_attention layer"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 3}, Unsupported, "chunked_attention"),
        ("gpt-oss", {"model_type": "mixtral"}, CheckpointError, "model_type is 'mixtral'"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], kind: type[QuireError], message: str) -> None:
    values = config_of(name)
    read(values)
    with pytest.raises(kind, match=message):
        read({**values, **changes})


def test_published_fields_are_read() -> None:
    """As in the configurations of the published models, which older versions of
    transformers wrote."""
    values = config_of("qwen3-moe")
    del values["num_local_experts"]
    config = read({**values, "num_experts": 6, "sliding_window": None, "max_window_layers": 48, "rope_scaling": None})
    assert (config.num_experts, config.routing.top_k, config.routing.renormalise) == (6, 3, True)
    assert [spec.layer_window for spec in config.layers] == [None] * 3
    values = {**config_of("qwen2-moe-windows"), "num_hidden_layers": 6, "max_window_layers": 4}
    del values["layer_types"]
    assert [spec.layer_window for spec in read(values).layers] == [6, None, 6, None, None, None]
    values = config_of("gpt-oss")
    rope = {key: value for key, value in values.pop("rope_parameters").items() if key != "rope_theta"}
    old = {"rope_scaling": rope, "rope_theta": 150000, "initial_context_length": 4096, "experts_per_token": 2}
    assert read({**values, **old}) == read(config_of("gpt-oss"))
    assert (
        read({**values, **old, "quantization_config": QUANTISATION}).canonical()
        == read(config_of("gpt-oss")).canonical()
    )
    bare = {key: value for key, value in values.items() if key not in ("layer_types", "swiglu_alpha", "sliding_window")}
    config = read({**bare, **old, "max_position_embeddings": 4096})
    assert (config.swiglu_alpha, [spec.layer_window for spec in config.layers]) == (1.702, [128, None, 128])


def test_canonical_configurations_tell_models_apart() -> None:
    canonical = {name: read(config_of(name)).canonical() for name in (case.name for case in CASES)}
    assert len(set(canonical.values())) == len(CASES)
    for name, field, value in (
        ("mixtral", "num_experts_per_tok", 3),
        ("qwen2-moe", "norm_topk_prob", True),
        ("qwen2-moe", "mlp_only_layers", [1]),
        ("gpt-oss", "swiglu_limit", 6.0),
    ):
        assert read({**config_of(name), field: value}).canonical() != canonical[name]


def test_parameters_count_each_expert_once(make_tiny: Callable[[Case], TinyCheckpoint]) -> None:
    for name in TIED:
        tiny = make_tiny(named(name))
        model: LoadedModel = load_model(tiny.path, dtype="float32")
        assert model.num_parameters == sum(weight.numel() for weight in tiny.model.parameters())
