"""The text parts of models that read images, out of whole checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KIND_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KINDS

from quire import LLM
from quire.base.errors import CheckpointError, Unsupported
from quire.models.families import MODEL_TYPES, family_of
from quire.models.fingerprint import model_fingerprint
from quire.models.loading import load_model
from quire.models.text_parts import IMAGE_TEXT, TEXT_TYPES
from quire.weights.safetensors_files import SINGLE_FILE

from .conftest import CASES

TYPES = {name: kind for name, kind in KINDS.items() if kind in IMAGE_TEXT}
TYPES["mistral3+ministral3"] = TYPES["mistral3"]  # with another type of text than the usual one
WITHOUT_ENCODER = {"fast_vlm", "gemma3n", "perception_lm"}
"""Types whose image encoder needs a package that is not installed here."""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "vocab_size_per_layer_input": 130,
    "hidden_size_per_layer_input": 4,
}
FURTHER: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "qk_head_dim": 12,
        "v_head_dim": 8,
        "head_dim": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "qwen3_5_text": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_vl_moe_text": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "lfm2": {"full_attn_idxs": [1], "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm3": {"layer_types": ["conv", "sliding_attention"], "sliding_window": 6, "conv_L_cache": 3},
    "mistral": {"sliding_window": None},
    "gemma4_text": {**SHARED, "global_head_dim": 16},
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def small_config(model_type: str) -> Any:
    whole, _, part = model_type.partition("+")
    if model_type == "gemma4":  # whose sizes by layer are set once
        return CONFIG_MAPPING[whole](text_config={**SIZES, **FURTHER["gemma4_text"]}, vision_config={})
    config = CONFIG_MAPPING[whole](**({"text_config": CONFIG_MAPPING[part]()} if part else {}))
    text = config.get_text_config(decoder=True)
    for name, value in {**SIZES, **FURTHER.get(text.model_type, {})}.items():
        if hasattr(text, name) or name in FURTHER.get(text.model_type, {}):
            setattr(text, name, value)
    if "_vl_" in text.model_type or "omni" in text.model_type:
        text.rope_parameters = dict(MROPE)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    if model_type == "aya_vision":
        config.vision_config.num_attention_heads = 16
    return config


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Return a checkpoint of a type, and the model in transformers without weights for images."""
    made: dict[str, tuple[Path, Any]] = {}

    def build(model_type: str) -> tuple[Path, Any]:
        if model_type not in made:
            made[model_type] = whole_checkpoint(model_type, tmp_path_factory.mktemp(model_type) / "model")
        return made[model_type]

    return build


def whole_checkpoint(model_type: str, path: Path) -> tuple[Path, Any]:
    kind, config = getattr(transformers, TYPES[model_type]), small_config(model_type)
    with torch.device("meta"):
        model = kind(config)
    place = "text_model" if hasattr(model.model, "text_model") else "language_model"
    # Only the text part has memory: without images nothing else is called.
    text = type(getattr(model.model, place))(config.get_text_config(decoder=True))
    setattr(model.model, place, text)
    text_config = config.get_text_config(decoder=True)
    model.lm_head = torch.nn.Linear(text_config.hidden_size, text_config.vocab_size, bias=False)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    generator = torch.Generator().manual_seed(len(model_type))
    with torch.no_grad():
        for name, weight in [*text.named_parameters(), ("lm_head", model.lm_head.weight)]:
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 and "embed" not in name else 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + ("norm" in name))
        if tied:
            model.lm_head.weight = text.embed_tokens.weight
    model = model.float().eval()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    others = {name: torch.zeros(1) for name, tensor in model.state_dict().items() if tensor.is_meta}
    assert others
    if tied:
        del tensors["lm_head.weight"]
    path.mkdir()
    config.architectures = [TYPES[model_type]]
    config.save_pretrained(path)
    save_file({**tensors, **others}, path / SINGLE_FILE, metadata={"format": "pt"})
    return path, model


TOKENS = [5, 9, 3, 120, 77, 5, 5, 18, 64, 33, 12, 7, 99, 101, 4, 3]


def scores_of(path: Path) -> tuple[list[float], Tensor]:
    """The log probabilities of all tokens but the first, and the logits after the last."""
    with LLM(str(path), dtype="float32", kv_cache_memory="8MiB") as llm, llm.session() as session:
        session.append(TOKENS[:1])
        scores = session.score(TOKENS[1:])
        session.append(TOKENS[1:])
        return scores, session.logits()


@pytest.mark.turns(2)
@pytest.mark.parametrize("model_type", sorted(set(TYPES) - WITHOUT_ENCODER))
def test_text_has_the_logits_of_transformers(make: Callable[[str], tuple[Path, Any]], model_type: str) -> None:
    path, theirs = make(model_type)
    tokens_BT = torch.tensor([TOKENS])
    with torch.no_grad():
        if model_type == "idefics3":  # moves embeddings to the image encoder's device, which has no memory
            logits_TV = theirs.lm_head(theirs.model.text_model(input_ids=tokens_BT).last_hidden_state)[0]
        else:
            logits_TV = theirs(input_ids=tokens_BT).logits[0]
    # With images transformers leaves out the scale of logits that it has for Cohere's text models.
    logits_TV = logits_TV * getattr(theirs.config.text_config, "logit_scale", 1.0)
    wanted = logits_TV.log_softmax(-1)[torch.arange(len(TOKENS) - 1), TOKENS[1:]]
    scores, last = scores_of(path)
    # Float32 through some layers, whose sums transformers adds in other orders; weights at other
    # places differ by more than 0.1.
    torch.testing.assert_close(torch.tensor(scores), wanted, rtol=1e-3, atol=1e-3)
    # As above.
    torch.testing.assert_close(last.view(-1), logits_TV[-1], rtol=1e-3, atol=1e-3)


def write_text(path: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: Any) -> None:
    save_file(edit(load_file(path / SINGLE_FILE)), path / SINGLE_FILE, metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **config}))


def renamed(*pairs: tuple[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Replace beginnings of names, the first that fits."""

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            old, new = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
            found[new + name.removeprefix(old)] = tensor
        return found

    return edit


OLDER = renamed(
    ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")
)


@pytest.fixture
def llava(make: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Path:
    return copied(make, "llava", tmp_path)


def copied(make: Callable[[str], tuple[Path, Any]], model_type: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(make(model_type)[0], tmp_path / model_type))


@pytest.mark.parametrize("model_type", ["llava", "mistral3", "internvl"])
def test_older_names(make: Callable[[str], tuple[Path, Any]], tmp_path: Path, model_type: str) -> None:
    wanted = scores_of(make(model_type)[0])
    path = copied(make, model_type, tmp_path)
    write_text(path, OLDER)
    found = scores_of(path)
    assert found[0] == wanted[0]
    assert any(name.startswith("language_model.model.") for name in load_model(path, dtype="float32").places)


def test_experts_of_a_vision_model_are_stored_the_other_way_round(
    make: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    wanted = scores_of(make("qwen3_vl_moe")[0])
    path = copied(make, "qwen3_vl_moe", tmp_path)
    write_text(path, lambda t: {n: x.mT.contiguous() if ".experts." in n else x for n, x in t.items()})
    assert scores_of(path)[0] == wanted[0]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_fields_beside_those_of_the_encoder(
    make: Callable[[str], tuple[Path, Any]], tmp_path: Path, model_type: str
) -> None:
    """As these two were published: no ``text_config``, and RoPE of the type "mrope"."""
    wanted = scores_of(make(model_type)[0])
    path = copied(make, model_type, tmp_path)
    values = json.loads((path / "config.json").read_text())
    text = values.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    flat = {**text, **values, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(flat))
    write_text(path, renamed(("model.language_model.", "model."), ("model.visual.", "visual.")))
    assert scores_of(path)[0] == wanted[0]


def test_whether_the_head_is_stored_decides_what_config_json_does_not_say(llava: Path) -> None:
    values = json.loads((llava / "config.json").read_text())
    del values["tie_word_embeddings"]
    del values["text_config"]["tie_word_embeddings"]
    (llava / "config.json").write_text(json.dumps(values))
    model = load_model(llava, dtype="float32")
    assert not model.tied
    assert model_fingerprint(llava, model).config
    write_text(llava, lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"})
    assert load_model(llava, dtype="float32").tied


def test_a_tied_head_that_is_stored_with_other_values_is_refused(llava: Path) -> None:
    write_text(llava, OLDER, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"language_model.lm_head.weight differs from language_model.model.embed"):
        load_model(llava, dtype="float32")


def test_defaults_are_those_of_transformers() -> None:
    for name, kind in TEXT_TYPES.items():
        theirs = CONFIG_MAPPING[name]()
        for field, value in kind.defaults.items():
            found = theirs.rope_parameters[field] if field == "rope_theta" else getattr(theirs, field, value)
            assert found == value, (name, field)


def test_fields_that_transformers_leaves_out(llava: Path) -> None:
    """It writes only what differs from the defaults of the text's class."""
    values = json.loads((llava / "config.json").read_text())
    del values["text_config"]["max_position_embeddings"]
    (llava / "config.json").write_text(json.dumps(values))
    assert load_model(llava, dtype="float32").max_position == 2048


@pytest.mark.parametrize(
    ("edit", "config", "kind", "message"),
    [
        (lambda t: t, {"text_config": {"model_type": "exaone4"}}, Unsupported, "its text part is a 'exaone4', which is not supported; known ones: llama"),
        (lambda t: t, {"text_config": 3}, CheckpointError, "text_config is 3; expected an object"),
        (lambda t: {**t, "model.language_model.layers.7.norm.weight": torch.ones(1)}, {}, CheckpointError, "no place for model.language_model.layers.7.norm.weight"),
        (lambda t: {n: x for n, x in t.items() if n != "model.language_model.norm.weight"}, {}, CheckpointError, "lacks 1 of .* tensors: model.language_model.norm.weight"),
    ],
)  # fmt: skip
def test_damaged_text_parts(
    llava: Path,
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    config: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    write_text(llava, edit, **config)
    with pytest.raises(kind, match=message):
        load_model(llava, dtype="float32")


def test_a_second_copy_of_the_weights_is_not_read(llava: Path) -> None:
    """Mistral's own format beside shards."""
    wanted = scores_of(llava)
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, llava / "consolidated.safetensors")
    assert scores_of(llava)[0] == wanted[0]
    (llava / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"only consolidated.safetensors.*convert"):
        load_model(llava)


def test_code_of_a_checkpoint_is_not_run_where_the_type_is_known(make_tiny: Any, tmp_path: Path) -> None:
    """A checkpoint with its own class of a known ``model_type`` takes the native family."""
    path = Path(shutil.copytree(make_tiny(CASES[0]).path, tmp_path / "own"))
    values = json.loads((path / "config.json").read_text())
    own = {
        **values,
        "architectures": ["OurLlamaForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_ours.OurLlamaForCausalLM"},
    }
    (path / "config.json").write_text(json.dumps(own))
    assert load_model(path, dtype="float32").architecture == "LlamaForCausalLM"
    own["auto_map"] = {"AutoModelForSequenceClassification": "modeling_ours.Scores"}
    (path / "config.json").write_text(json.dumps(own))
    with pytest.raises(Unsupported, match=r"own code"):
        load_model(path, dtype="float32")


def test_types_of_native_families() -> None:
    """Each is the type that its reader expects."""
    for model_type, name in MODEL_TYPES.items():
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [name]
        family_of(config.to_dict())
        assert KIND_NAMES[model_type] == name
