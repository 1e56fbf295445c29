"""Checkpoints under other names than those of the native families."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from quire import LLM
from quire.base.errors import Unsupported
from quire.models.families import FAMILIES, MODEL_TYPES, family_of
from quire.models.fingerprint import model_fingerprint
from quire.models.loading import load_model
from quire.models.sources import open_weights, read_config
from quire.models.spellings import ARCHITECTURES, TYPES, usual_values
from quire.models.text_parts import IMAGE_TEXT, TEXT_TYPES
from quire.weights.safetensors_files import SINGLE_FILE

from .conftest import GEOMETRY, Case, TinyCheckpoint, make_checkpoint
from .gguf_writer import write_gguf

TOKENS = [5, 9, 3, 90, 77, 5, 5, 18, 64, 33, 12, 7, 95, 91, 4, 3]
GLM = Case("glm-spelled", "Glm", {"head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 30_000.0})
CHATGLM: dict[str, Any] = {
    "architectures": ["ChatGLMModel"],
    "model_type": "chatglm",
    "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "ffn_hidden_size": GEOMETRY["intermediate_size"],
    "fp32_residual_connection": False,
    "hidden_size": GEOMETRY["hidden_size"],
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": GEOMETRY["num_key_value_heads"],
    "num_attention_heads": GEOMETRY["num_attention_heads"],
    "num_layers": GEOMETRY["num_hidden_layers"],
    "original_rope": True,
    "padded_vocab_size": GEOMETRY["vocab_size"],
    "post_layer_norm": True,
    "pre_seq_len": None,
    "prefix_projection": False,
    "quantization_bit": 0,
    "rmsnorm": True,
    "rope_ratio": 3,
    "seq_length": GEOMETRY["max_position_embeddings"],
    "tie_word_embeddings": False,
    "vocab_size": GEOMETRY["vocab_size"],
}
"""The fields of published files, for the sizes of the tests."""
DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def scores_of(path: Path) -> list[float]:
    with LLM(str(path), dtype="float32", kv_cache_memory="8MiB") as llm, llm.session(TOKENS[:1]) as session:
        return session.score(TOKENS[1:])


def check_scores(path: Path, peer: Any) -> None:
    with torch.inference_mode():
        logits_TV = peer(torch.tensor([TOKENS])).logits[0]
    wanted = logits_TV.log_softmax(-1)[torch.arange(len(TOKENS) - 1), TOKENS[1:]]
    # Float32 through some layers, whose sums transformers adds in other orders.
    torch.testing.assert_close(torch.tensor(scores_of(path)), wanted, rtol=1e-3, atol=1e-3)


def rewritten(tiny: TinyCheckpoint, path: Path, config: dict[str, Any], drop: tuple[str, ...] = ()) -> Path:
    """A copy with other fields in config.json."""
    shutil.copytree(tiny.path, path)
    values = {**json.loads((path / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps({name: one for name, one in values.items() if name not in drop}))
    return path


# -- ChatGLM ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(GLM, tmp_path_factory.mktemp("glm") / "model")


@pytest.fixture
def chatglm(glm: TinyCheckpoint, tmp_path: Path) -> Path:
    """The model of ``glm`` as ChatGLM's files have it."""
    path, stored = tmp_path / "chatglm", load_file(glm.path / SINGLE_FILE)
    path.mkdir()
    made = {
        "transformer.embedding.word_embeddings.weight": stored["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": stored["model.norm.weight"],
        "transformer.output_layer.weight": stored["lm_head.weight"],
        "transformer.rotary_pos_emb.inv_freq": torch.ones(2),
    }
    for layer in range(GEOMETRY["num_hidden_layers"]):
        old, new = f"model.layers.{layer}.", f"transformer.encoder.layers.{layer}."
        for part in ("weight", "bias"):
            made[f"{new}self_attention.query_key_value.{part}"] = torch.cat(
                [stored[f"{old}self_attn.{name}_proj.{part}"] for name in "qkv"]
            )
        for theirs, ours in (
            ("self_attention.dense", "self_attn.o_proj"),
            ("mlp.dense_h_to_4h", "mlp.gate_up_proj"),
            ("mlp.dense_4h_to_h", "mlp.down_proj"),
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
        ):
            made[f"{new}{theirs}.weight"] = stored[f"{old}{ours}.weight"]
    save_file(made, path / SINGLE_FILE, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CHATGLM))
    return path


def test_chatglm_has_the_logits_of_transformers_for_glm(glm: TinyCheckpoint, chatglm: Path) -> None:
    check_scores(glm.path, glm.model)
    check_scores(chatglm, glm.model)
    assert (
        load_model(chatglm, dtype="float32").canonical_config == load_model(glm.path, dtype="float32").canonical_config
    )


def test_chatglm_in_gguf(glm: TinyCheckpoint, chatglm: Path, tmp_path: Path) -> None:
    """Whose converter keeps q, k and v in one tensor."""
    shutil.copy(glm.path / "config.json", chatglm / "config.json")
    file = write_gguf(chatglm, tmp_path / "model.gguf")
    assert any("self_attn.qkv_proj" in name for name in open_weights(file).tensors)
    check_scores(file, glm.model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"multi_query_attention": False}, "multi_query_attention is false, which is not supported; expected true"),
        ({"rmsnorm": False}, "rmsnorm is false, which is not supported; expected true"),
        ({"add_bias_linear": True}, "add_bias_linear is true, which is not supported; expected false"),
        ({"pre_seq_len": 128}, "pre_seq_len is 128"),
        ({"quantization_bit": 4}, "quantization_bit is 4, which is not supported; expected 0"),
        ({"prefix_projection": True}, "prefix_projection is true"),
    ],
)
def test_other_kinds_of_chatglm_are_refused_by_name(chatglm: Path, changes: dict[str, Any], message: str) -> None:
    (chatglm / "config.json").write_text(json.dumps({**CHATGLM, **changes}))
    with pytest.raises(Unsupported, match=message):
        load_model(chatglm)


def test_the_first_chatglm_is_refused_by_name() -> None:
    first = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "position_encoding_2d": True, "num_layers": 28}
    with pytest.raises(Unsupported, match="multi_query_attention is missing, which is not supported; expected true"):
        usual_values(first)


# -- Llama under other names -----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("model_type", ["internlm3", "iquestcoder"])
def test_types_with_the_layers_of_llama(
    make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, model_type: str, bias: bool
) -> None:
    """As published, with code of their own, and as transformers writes them."""
    case = Case(f"llama-{bias}-spelled", "Llama", {"attention_bias": bias, "mlp_bias": bias, "head_dim": 8})
    tiny = make_tiny(case)
    name = {"internlm3": "InternLM3ForCausalLM", "iquestcoder": "IQuestCoderForCausalLM"}[model_type]
    own = {"architectures": [name], "model_type": model_type, "auto_map": {"AutoModelForCausalLM": f"modeling.{name}"}}
    if model_type == "internlm3":
        path = rewritten(
            tiny, tmp_path / "own", {**own, "qkv_bias": bias, "bias": bias}, drop=("attention_bias", "mlp_bias")
        )
    else:
        off = {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1, "clip_qkv": None}
        path = rewritten(tiny, tmp_path / "own", {**own, **off})
    check_scores(path, tiny.model)
    saved = rewritten(tiny, tmp_path / "saved", {"model_type": model_type})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    check_scores(saved, theirs)
    loaded = [load_model(one, dtype="float32") for one in (path, saved, tiny.path)]
    assert len({one.canonical_config for one in loaded}) == 1
    assert len({model_fingerprint(one, model).config for one, model in zip((path, saved), loaded, strict=False)}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "internlm3", "qkv_bias": True, "bias": False}, "qkv_bias is true and bias is false"),
        ({"model_type": "iquestcoder", "use_sliding_window": True}, "use_sliding_window is true"),
        ({"model_type": "iquestcoder", "clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ],
)
def test_what_llama_does_not_compute_is_refused_by_name(
    make_tiny: Callable[[Case], TinyCheckpoint], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = rewritten(make_tiny(Case("llama-spelled", "Llama")), tmp_path / "model", changes)
    with pytest.raises(Unsupported, match=message):
        load_model(path)


# -- Qwen, Kimi ------------------------------------------------------------------------------------


def test_qwen_3_8_is_qwen_3_5(tmp_path: Path) -> None:
    """In one configuration for text, and in one for text beside a whole one."""
    tiny = make_checkpoint(Case("qwen3_5-spelled", "Qwen3_5", DELTA), tmp_path / "model")
    wanted = scores_of(tiny.path)
    named = {"architectures": ["Qwen3_8ForCausalLM"], "model_type": "qwen3_8_text"}
    check_scores(rewritten(tiny, tmp_path / "renamed", named), tiny.model)
    text = json.loads((tiny.path / "config.json").read_text()) | {"model_type": "qwen3_8_text"}
    whole = {"architectures": ["Qwen3_8ForCausalLM"], "model_type": "qwen3_8", "text_config": text, "vision_config": {}}
    shutil.copytree(tiny.path, tmp_path / "whole")
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    assert scores_of(tmp_path / "whole") == wanted
    assert read_config(tmp_path / "whole")["model_type"] == "qwen3_5_text"


def test_names_lead_to_known_ones() -> None:
    for other, name in ARCHITECTURES.items():
        assert other not in FAMILIES
        assert name in FAMILIES or name in IMAGE_TEXT or hasattr(transformers, name)
    wholes = {"qwen3_5", "qwen3_5_moe", "gemma3"}
    for other, name in TYPES.items():
        assert other not in MODEL_TYPES
        assert name in {*MODEL_TYPES, *TEXT_TYPES, *wholes}
    for kind in ("", "_moe"):
        values = {
            "architectures": [f"Qwen3_8{kind[1:].title()}ForConditionalGeneration"],
            "model_type": f"qwen3_8{kind}",
            "text_config": {"model_type": f"qwen3_8{kind}_text"},
        }
        assert json.dumps(usual_values(values)) == json.dumps(values).replace("wen3_8", "wen3_5")


def test_kimi_is_deepseek() -> None:
    values = CONFIG_MAPPING["deepseek_v3"]().to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    wanted = family_of(values).read_config(values)
    found = usual_values({**values, "model_type": "kimi_k2"})
    assert family_of(found).read_config(found) == wanted
    images = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    found = usual_values({**images, "text_config": {**values, "model_type": "kimi_k2"}})
    assert family_of(found).read_config(found) == wanted
