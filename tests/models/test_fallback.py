"""Models that are not native, through transformers' layers: the same logits as transformers, or a
refusal at load.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.exact import Float32Bound, run_exactly

from quire import LLM, SamplingParams
from quire.base.errors import CheckpointError, InvalidArgument, ResourceExhausted, Unsupported
from quire.base.types import Add, Chunk, Fork, Pop, Step
from quire.contracts.layers import FullAttention, sink_refusal
from quire.kv.exchange import layer_metadata
from quire.kv.formats.plain import PlainFormat
from quire.models.config_fields import read_config_file
from quire.models.fallback import read_foreign
from quire.models.loading import load_model
from quire.models.probe import ProbePass

LAYERS, WIDTH, LENGTH, VOCAB = 4, 48, 26, 101
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
"""Heads of K are 10 wide, those of V 7."""
GROUPS: dict[str, Any] = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("Olmo", {"clip_qkv": 1.5}),
    "olmo3-windows": ("Olmo3", {"sliding_window": 7}),
    "starcoder2-window": ("Starcoder2", {"sliding_window": 5}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.25}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "gpt2": ("GPT2", {}),
    "opt": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": WIDTH}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmoe-router-logits": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True}),
    "minicpm3": ("MiniCPM3", {**LATENT, "dim_model_base": 12}),
    "glm4-moe": ("Glm4Moe", {**GROUPS, "head_dim": 8}),
    "apertus": ("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}


def make(name: str, changes: dict[str, Any], path: Path) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    torch.manual_seed(len(name))
    peer = kind(config).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            # The initial weights are so small that all logits are nearly equal.
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
    peer.save_pretrained(path)
    return peer


@pytest.mark.turns(6)
@pytest.mark.parametrize("which", sorted(MODELS))
def test_logits_in_pieces_ragged_forked_and_rewound(which: str, tmp_path: Path) -> None:
    peer = make(*MODELS[which], tmp_path)
    if "num_experts_per_tok" in MODELS[which][1]:
        peer.set_experts_implementation("eager")  # which runs in float64 too
    tokens_T = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5))
    tokens, expected_TV = tokens_T.tolist(), run_exactly(peer, tokens_T)
    bound = Float32Bound(peer, tokens_T, expected_TV)
    llm = LLM(tmp_path, dtype="float32", page_size=3, kv_cache_memory="4MiB")
    runner = llm.engine.runner
    a, b, c = (runner.new_seq() for _ in range(3))
    runner.execute(Step(edits=(Add(a), Add(b))))

    def run(*chunks: tuple[int, int, int]) -> list[torch.Tensor]:
        parts = tuple(Chunk(seq, tokens[start:stop], logits="all") for seq, start, stop in chunks)
        output = runner.execute(Step(chunks=parts))
        return [output.rows(index) for index in range(len(parts))]

    def check(*chunks: tuple[int, int, int]) -> None:
        for rows, (_, start, stop) in zip(run(*chunks), chunks, strict=True):
            exact_TV = expected_TV[start:stop]
            assert torch.equal(rows.argmax(-1), exact_TV.argmax(-1))
            assert float((rows - exact_TV).abs().max()) <= bound

    check((a, 0, 9))
    check((b, 0, LENGTH), (a, 9, 10))
    check((a, 10, 20))
    runner.execute(Step(edits=(Fork(a, c), Pop(a, 3))))
    check((c, 20, LENGTH), (a, 17, 25))
    runner.state.check()
    greedy = (
        llm.generate(tokens[:8], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0].token_ids
    )
    with torch.inference_mode():
        best = peer(torch.tensor([tokens[:8] + list(greedy)])).logits[0, 7:-1].argmax(-1).tolist()
    assert list(greedy) == best


def test_windows_are_found(tmp_path: Path) -> None:
    make(*MODELS["olmo3-windows"], tmp_path)
    model = load(tmp_path)
    assert [spec.layer_window for spec in model.layer_specs] == [7, 7, 7, None]  # type: ignore[union-attr]


def test_sizes_of_k_and_v_may_differ(tmp_path: Path) -> None:
    make(*MODELS["minicpm3"], tmp_path)
    model = load(tmp_path)
    assert model.architecture == "MiniCPM3ForCausalLM"
    assert {(spec.num_kv_heads, spec.head_dim, spec.value_dim) for spec in model.layer_specs} == {(6, 10, 7)}


@pytest.mark.parametrize("which", ["olmo", "gpt2"])
def test_a_sink_is_refused_before_anything_runs(which: str, tmp_path: Path) -> None:
    """Positions are in q and k already, by a rule that is not known: the query cannot be moved next
    to the sink.
    """
    peer = make(*MODELS[which], tmp_path)
    llm = LLM(tmp_path, dtype="float32", page_size=3, kv_cache_memory="4MiB")
    state = llm.engine.runner.state
    with pytest.raises(Unsupported, match=r"window 8 with sink 2.*rule of their own.*sink=0"):
        llm.session([5, 6, 7], window=8, sink=2)
    assert state.empty()
    state.add_sequence(1000)
    with pytest.raises(Unsupported, match=r"window 8 with sink 2.*rule of their own"):
        state.enable_sliding_window_for_seq(1000, 8, 2)
    with pytest.raises(InvalidArgument, match="0 <= sink < window"):
        state.enable_sliding_window_for_seq(1000, 8, 8)
    assert state.sequences.get(1000).window is None
    state.remove_sequence(1000)

    # Without a sink, true positions are all that is needed.
    window, prompt = 8, list(range(3, 23))
    session = llm.session(prompt, window=window)
    found = session.generate(SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)).outputs[0].token_ids
    tokens = torch.tensor([prompt + list(found)])
    places = torch.arange(tokens.shape[1])
    distance = places[:, None] - places
    mask = torch.where((distance >= 0) & (distance < window), 0.0, float("-inf"))
    with torch.inference_mode():
        logits = peer(tokens, attention_mask=mask[None, None]).logits[0]
    assert list(found) == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_layers_and_files_are_the_same_with_and_without_the_refusal_of_sinks() -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "value_dim": 4}
    plain, given = FullAttention(**sizes), FullAttention(**sizes, caller_rotates=True)
    assert layer_metadata(plain, PlainFormat(torch.float32)) == layer_metadata(given, PlainFormat(torch.float32))
    assert sink_refusal([plain]) == ""
    assert "the first is 1" in sink_refusal([plain, given])


def test_the_comparison_runs_where_the_model_is() -> None:
    device = torch.device("meta")
    spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=4, value_dim=3)
    pass_ = ProbePass([spec], device)
    for start, stop in ((0, 3), (3, 4)):
        pass_.open(start, stop, stop - start)
        count = 2 * (stop - start)
        assert pass_.positions_T.device == device
        q, k, v = (torch.empty(count, heads, dim, device=device) for heads, dim in ((2, 4), (1, 4), (1, 3)))
        assert pass_.attend(0, q, k, v).shape == (count, 2, 3)
        assert pass_.k[0].device == device


@pytest.mark.parametrize("enabled", [True, False])
def test_loading_draws_no_bars_and_keeps_the_users_settings(
    enabled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(*MODELS["olmo"], tmp_path)
    settings = transformers.utils.logging
    before = settings.is_progress_bar_enabled()
    (settings.enable_progress_bar if enabled else settings.disable_progress_bar)()
    capsys.readouterr()
    try:
        load(tmp_path)
        assert "Loading weights" not in capsys.readouterr().err
        assert settings.is_progress_bar_enabled() == enabled
    finally:
        (settings.enable_progress_bar if before else settings.disable_progress_bar)()


def test_no_weights_are_read_for_an_attention_that_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("Bloom", {}, tmp_path)

    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(transformers.BloomForCausalLM, "from_pretrained", read)
    with pytest.raises(Unsupported, match="cannot be replaced"):
        load(tmp_path)


def load(path: Path) -> Any:
    return load_model(path, dtype="float32")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent": ("Mamba", {"state_size": 4, "expand": 1}, "linear_attention"),
    "positions in the scores": ("Bloom", {}, "cannot be replaced"),
    "attention of its own": ("CodeGen", {"rotary_dim": 4}, "cannot be replaced"),
    "does not hand arguments on": ("Nemotron", {}, "does not hand on"),
    "frequencies by length": (
        "Olmo",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
        "dynamic",
    ),
}


@pytest.mark.parametrize("which", sorted(REFUSED))
def test_what_cannot_run_exactly_is_refused_at_load(which: str, tmp_path: Path) -> None:
    name, changes, reason = REFUSED[which]
    make(name, changes, tmp_path)
    with pytest.raises(Unsupported, match=reason) as refusal:
        LLM(tmp_path, dtype="float32")
    assert name in str(refusal.value)


def test_a_rule_that_is_no_window_is_refused(tmp_path: Path) -> None:
    """Chunked attention looks causal on a short prompt."""
    config = transformers.Llama4TextConfig(
        **{**SIZES, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 64, "head_dim": 8}
    )
    torch.manual_seed(0)
    transformers.Llama4ForCausalLM(config).float().save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=r"attends in chunks.*give max_model_len 64 or less"):
        LLM(tmp_path, dtype="float32")


def test_a_model_whose_logits_depend_on_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison at load is not for show: a layer that looks at its neighbours in the batch is
    caught by it.
    """
    make(*MODELS["olmo"], tmp_path)
    layer = transformers.models.olmo.modeling_olmo.OlmoMLP
    own = layer.forward

    def leaking(self: Any, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) + 0.01 * x.mean(1, keepdim=True)

    monkeypatch.setattr(layer, "forward", leaking)
    with pytest.raises(Unsupported, match="depend on more than tokens"):
        load(tmp_path)


def test_the_named_architecture_is_what_runs(tmp_path: Path) -> None:
    """Not what the model type would lead to, with weights made up for what is missing."""
    make(*MODELS["olmo"], tmp_path)
    config = tmp_path / "config.json"
    for name in ("OlmoForSequenceClassification", "BertModel"):
        config.write_text(config.read_text().replace("OlmoForCausalLM", name))
        with pytest.raises(Unsupported, match=f"{name}.*leads to OlmoForCausalLM"):
            LLM(tmp_path, dtype="float32")
        config.write_text(config.read_text().replace(name, "OlmoForCausalLM"))


def test_unknown_and_foreign_code_are_refused(tmp_path: Path) -> None:
    make(*MODELS["gpt2"], tmp_path)
    values = read_config_file(tmp_path)
    own = {"AutoModelForCausalLM": "modeling_ours.OursForCausalLM"}
    for found in (
        {"auto_map": {}},
        {"auto_map": own, "model_type": "nobody"},
        {"auto_map": {"AutoModel": "modeling_ours.Ours"}},
    ):
        with pytest.raises(Unsupported, match="own code"):
            read_foreign(tmp_path, {**values, **found})
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}')
    with pytest.raises(Unsupported, match="NobodyForCausalLM"):
        LLM(tmp_path)


def greedy(path: Path, prompt: list[int]) -> list[int]:
    with LLM(path, dtype="float32", kv_cache_memory="4MiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        return list(llm.generate(prompt, params)[0].outputs[0].token_ids)


@pytest.mark.parametrize("config", [True, False])
def test_code_of_a_checkpoint_is_not_run_where_transformers_knows_the_type(tmp_path: Path, config: bool) -> None:
    """Its files are named in ``auto_map``, and would fail if they were imported."""
    make(*MODELS["olmo"], tmp_path)
    wanted = greedy(tmp_path, [5, 9, 3])
    own = {"AutoModelForCausalLM": "modeling_ours.OursForCausalLM"}
    own |= {"AutoConfig": "configuration_ours.OursConfig"} if config else {}
    for name in ("modeling_ours", "configuration_ours"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError")
    edit_config(tmp_path, architectures=["OursForCausalLM"], auto_map=own)
    assert greedy(tmp_path, [5, 9, 3]) == wanted


LLAMA4: dict[str, Any] = {
    "head_dim": 8,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 64,
    "floor_scale": 48,
    "no_rope_layers": [1, 1, 1, 0],
    "pad_token_id": 0,
}


def test_chunks_that_cover_the_sequences_are_full_attention(tmp_path: Path) -> None:
    """Llama 4, whose queries also grow with their position, in layers that do not rotate."""
    config = transformers.Llama4TextConfig(**{**SIZES, **LLAMA4})
    torch.manual_seed(3)
    peer = transformers.Llama4ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5))
    peer.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match=r"attends in chunks.* 128 tokens; give max_model_len 47 or less"):
        LLM(tmp_path, dtype="float32")
    with pytest.raises(Unsupported, match=r"attends in chunks.* 48 tokens; give max_model_len 47 or less"):
        LLM(tmp_path, dtype="float32", max_model_len=48)
    tokens = torch.randint(3, VOCAB, (47,), generator=torch.Generator().manual_seed(5)).tolist()
    with LLM(tmp_path, dtype="float32", max_model_len=47, kv_cache_memory="4MiB") as llm:
        assert all(isinstance(one, FullAttention) for one in llm.model.layer_specs)
        with llm.session(tokens[:1]) as session:
            scores = torch.tensor(session.score(tokens[1:46]))
    with torch.inference_mode():
        logits_TV = peer(torch.tensor([tokens])).logits[0]
    wanted = logits_TV.log_softmax(-1)[torch.arange(45), tokens[1:46]]
    # Float32 through four layers, whose sums are added in other orders; a mask with a chunk, or
    # queries that have grown, differ by more than 0.1.
    torch.testing.assert_close(scores, wanted, rtol=1e-3, atol=1e-3)
    edit_config(tmp_path, attention_chunk_size=16)
    with pytest.raises(Unsupported, match="give max_model_len 16 or less"):
        LLM(tmp_path, dtype="float32", max_model_len=47)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


ATTENTION = "transformer.h.1.attn.c_attn.bias"
DOWN = "model.layers.1.mlp.down_proj.weight"
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
"""transformers stacks it with the gates."""


@pytest.mark.parametrize(
    ("which", "edit", "message"),
    [
        ("olmo", lambda t: t.pop(DOWN), f"lacks 1 of 30 tensors: {DOWN}"),
        ("olmo", lambda t: t.update(extra=torch.ones(3)), "model.safetensors: .* has no place for extra"),
        (
            "olmo",
            lambda t: t.update({DOWN.replace("weight", "bias"): torch.ones(WIDTH)}),
            "no place for .*down_proj.bias",
        ),
        ("olmo", lambda t: t.update({DOWN.replace(".1.", ".4."): t[DOWN].clone()}), r"no place for model.layers.4"),
        ("olmo", lambda t: t.update({DOWN: torch.ones(WIDTH, 5)}), rf"{DOWN} has shape \[48, 5\]; .* \[48, 64\]"),
        ("olmo", lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}), f"{DOWN} has dtype I8; expected one of"),
        ("olmo", lambda t: t.update({DOWN: t[DOWN].to(torch.float8_e4m3fn)}), f"{DOWN} has dtype F8_E4M3"),
        # A name that transformers would pass over if the model did not have it.
        ("gpt2", lambda t: t.update({ATTENTION: t[ATTENTION].to(torch.int8)}), f"{ATTENTION} has dtype I8"),
        ("olmoe", lambda t: t.pop(EXPERT), "cannot make the model's tensors of the stored ones"),
        ("gpt2", lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, WIDTH)}), "lm_head.weight differs from .*wte"),
        ("gpt2", lambda t: t.pop("transformer.wte.weight"), "lacks 2 of .*lm_head.weight, transformer.wte.weight"),
    ],
)
def test_files_that_contradict_the_model(
    which: str, edit: Callable[[dict[str, torch.Tensor]], object], message: str, tmp_path: Path
) -> None:
    make(*MODELS[which], tmp_path)
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "no place for model.layers.3"),
        ({"num_hidden_layers": 5}, "lacks 7 of 37 tensors: model.layers.4"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers, but there are 30 tensors"),
        ({"num_hidden_layers": "two"}, "cannot read config.json.*expected int, got str"),
        ({"num_attention_heads": 0}, "cannot build 'OlmoForCausalLM' from config.json: ZeroDivisionError"),
        ({"attention_bias": True}, "lacks 16 of 46 tensors: model.layers.0.self_attn.k_proj.bias"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"vocab_size": VOCAB + 1}, rf"lm_head.weight has shape \[{VOCAB}, 48\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "config.json: quantization_config is"),
        ({"transformers_weights": "other.safetensors"}, "config.json: transformers_weights is"),
    ],
)
def test_a_configuration_that_the_files_contradict(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make(*MODELS["olmo"], tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises((CheckpointError, Unsupported), match=message):
        load(tmp_path)


def test_a_configuration_of_more_than_the_memory_is_refused_in_its_outline(tmp_path: Path) -> None:
    make(*MODELS["olmo"], tmp_path)
    edit_config(tmp_path, hidden_size=6 << 20)
    with pytest.raises(
        ResourceExhausted, match=r"needs \d+\.\d\d GiB \([\d,]+ bytes\) for its weights in torch.float32"
    ):
        load(tmp_path)


def test_the_context_is_checked_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(*MODELS["olmo"], tmp_path)

    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(transformers.OlmoForCausalLM, "from_pretrained", read)
    with pytest.raises(InvalidArgument, match="max_model_len 129 is beyond the model's 128 positions"):
        LLM(tmp_path, max_model_len=129)


def test_damaged_files_and_copies_in_other_shards_are_refused_by_name(tmp_path: Path) -> None:
    peer = make(*MODELS["olmo"], tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"model.safetensors is no valid safetensors file, or is cut short"):
        load(tmp_path / "one")

    peer.save_pretrained(tmp_path / "shards", max_shard_size="64KB")
    first, *_, last = sorted((tmp_path / "shards").glob("*.safetensors"))
    stale = {name: tensor * 0.5 for name, tensor in load_file(first).items()}
    save_file({**load_file(last), **stale}, last, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"tensor .* is in .*{first.name} and in .*{last.name}"):
        load(tmp_path / "shards")
    first.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {first.name}"):
        load(tmp_path / "shards")


def test_what_older_files_hold_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    make(*MODELS["gpt2"], tmp_path)
    expected = load(tmp_path).num_parameters
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4).bool(),
        "transformer.h.0.attn.masked_bias": torch.ones(()),
    }
    edit_tensors(tmp_path, lambda tensors: tensors.update(masks))
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    # Without the prefix of the model, as in the first published files.
    edit_tensors(tmp_path, lambda t: [t.update({n.removeprefix("transformer."): t.pop(n)}) for n in list(t)])
    assert load(tmp_path).num_parameters == expected


def test_an_adapter_in_the_folder_of_a_model_is_not_applied(tmp_path: Path) -> None:
    """transformers would load it with the model, or another model in its place."""
    make(*MODELS["olmo"], tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere", "peft_type": "LORA"}')
    assert load(tmp_path).architecture == "OlmoForCausalLM"
