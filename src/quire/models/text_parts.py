"""Models that also read images, of which the text part is a native family.

Such a checkpoint has the text's fields in ``text_config``, or beside ``vision_config``, and its
tensors under another prefix. Everything else in it stays unread. Text alone has one position for
time, height and width, so their sections in RoPE change nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import CheckpointError, Unsupported
from quire.models.config_fields import ConfigFields
from quire.models.rope_config import without_sections
from quire.weights.places import NameTable


@dataclass(frozen=True, slots=True)
class TextType:
    """A ``model_type`` of ``text_config``."""

    model_type: str
    """That of the native family."""
    defaults: Mapping[str, Any]
    """Values of missing fields, as in transformers, which writes only others."""


def _sizes(
    vocab: int, width: int, inner: int, layers: int, heads: int, kv_heads: int, positions: int, **further: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        **further,
    }


_QWEN_VL = _sizes(152_064, 8192, 29_568, 80, 64, 8, 32_768, rms_norm_eps=1e-5, rope_theta=1e6)
_OMNI = _sizes(152_064, 3584, 18_944, 28, 28, 4, 32_768, rope_theta=1e6, tie_word_embeddings=True)
TEXT_TYPES: Mapping[str, TextType] = {
    "llama": TextType("llama", _sizes(32_000, 4096, 11_008, 32, 32, 32, 2048)),
    "mistral": TextType("mistral", _sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)),
    "ministral3": TextType("ministral3", _sizes(131_072, 4096, 14_336, 34, 32, 8, 262_144, head_dim=128)),
    "qwen2": TextType("qwen2", _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768)),
    "qwen2_vl_text": TextType("qwen2", _QWEN_VL),
    "qwen2_5_vl_text": TextType("qwen2", _QWEN_VL),
    "qwen2_5_omni_text": TextType("qwen2", _OMNI),
    "qwen3": TextType("qwen3", _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768)),
    "qwen3_vl_text": TextType("qwen3", _sizes(151_936, 4096, 22_016, 32, 32, 32, 128_000, rope_theta=5e5)),
    "qwen3_vl_moe_text": TextType(
        "qwen3_moe",
        _sizes(151_936, 2048, 5632, 24, 16, 16, 128_000, rope_theta=5e5, num_experts=60, moe_intermediate_size=1408)
        | {"num_experts_per_tok": 4, "norm_topk_prob": True, "head_dim": 128},
    ),
    "cohere2": TextType("cohere2", _sizes(256_000, 8192, 22_528, 40, 64, 64, 8192)),
    "deepseek_v3": TextType("deepseek_v3", {}),
    "lfm2": TextType("lfm2", _sizes(65_536, 2560, 12_288, 32, 32, 8, 128_000)),
    "lfm2_moe": TextType(
        "lfm2_moe",
        _sizes(65_536, 2048, 7168, 32, 32, 8, 128_000, moe_intermediate_size=1792, num_experts=32)
        | {"num_experts_per_tok": 4},
    ),
    "lfm3": TextType("lfm3", _sizes(128_000, 2048, 7680, 24, 16, 4, 128_000, head_dim=128)),
    "qwen3_5_text": TextType("qwen3_5_text", {}),
    "gemma3n_text": TextType(
        "gemma3n_text",
        _sizes(262_400, 2048, 16_384, 35, 8, 2, 32_768) | {"intermediate_size": [16_384] * 35},
    ),
    "gemma4_text": TextType("gemma4_text", _sizes(262_144, 2304, 9216, 30, 8, 4, 131_072)),
    "gemma3_text": TextType("gemma3_text", _sizes(262_208, 2304, 9216, 26, 8, 4, 131_072)),
}
"""Text parts that run, by ``model_type``."""

IMAGE_TEXT: Mapping[str, str] = {
    "AyaVisionForConditionalGeneration": "cohere2",
    "Cohere2VisionForConditionalGeneration": "cohere2",
    "Cosmos3OmniForConditionalGeneration": "qwen3_vl_text",
    "DeepseekVLForConditionalGeneration": "llama",
    "DeepseekVLHybridForConditionalGeneration": "llama",
    "FastVlmForConditionalGeneration": "qwen2",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "GotOcr2ForConditionalGeneration": "qwen2",
    "Idefics2ForConditionalGeneration": "mistral",
    "Idefics3ForConditionalGeneration": "llama",
    "InternVLForConditionalGeneration": "qwen2",
    "JanusForConditionalGeneration": "llama",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Lfm3VlForConditionalGeneration": "lfm3",
    "LightOnOcrForConditionalGeneration": "qwen3",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaNextVideoForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniCPMOcrForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_6ForConditionalGeneration": "qwen3_5_text",
    "MiniCPMV4_7ForConditionalGeneration": "qwen3_5_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Ovis2ForConditionalGeneration": "qwen2",
    "PerceptionLMForConditionalGeneration": "llama",
    "QianfanOCRForConditionalGeneration": "qwen3",
    "Qwen2_5OmniThinkerForConditionalGeneration": "qwen2_5_omni_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "SmolVLMForConditionalGeneration": "llama",
    "VideoLlama3ForConditionalGeneration": "qwen2",
    "VideoLlavaForConditionalGeneration": "llama",
    "VipLlavaForConditionalGeneration": "llama",
}
"""Architectures that read images, and the ``model_type`` of their text part without ``text_config``
or a type there."""

PREFIXES: Sequence[tuple[str, str]] = (
    ("model.language_model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),
    ("model.", "lm_head."),
    ("model.text_model.", "lm_head."),
    ("thinker.model.", "thinker.lm_head."),
)
"""What stands for ``model.`` and ``lm_head.`` in the tensors of text parts."""
TEXT = (
    *(prefix for pair in PREFIXES for prefix in pair if prefix not in ("model.", "thinker.model.")),
    *(f"{trunk}{part}." for trunk in ("model.", "thinker.model.") for part in ("layers", "embed_tokens", "norm")),
)
"""Beginnings of the names of text parts' tensors."""


def text_architecture(values: Mapping[str, Any]) -> str | None:
    """Return the name in ``architectures`` of config.json, if it is one of ``IMAGE_TEXT``."""
    names = values.get("architectures")
    found = names[0] if isinstance(names, list) and len(names) == 1 else None
    return found if isinstance(found, str) and found in IMAGE_TEXT else None


def text_type(values: Mapping[str, Any]) -> TextType:
    """Return the type of the text part. ``Unsupported`` with its name if it does not run."""
    architecture = str(text_architecture(values))
    text = values.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise CheckpointError(f"config.json: text_config is {text!r}; expected an object")
    found = (text or {}).get("model_type") or IMAGE_TEXT[architecture]
    if found not in TEXT_TYPES:
        raise Unsupported(
            f"architecture {architecture!r}: its text part is a {found!r}, which is not supported; known ones: {', '.join(TEXT_TYPES)}"
        )
    return TEXT_TYPES[found]


def text_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of the text part alone."""
    kind = text_type(values)
    text = values.get("text_config")
    given = without_sections(values if text is None else text)
    found = {**kind.defaults, **given}
    for name, newer in (("rope_theta", "rope_parameters"), ("num_experts", "num_local_experts")):
        if newer in given and name not in given:
            found.pop(name, None)
    for name in ("vision_config", "audio_config", "text_config"):
        found.pop(name, None)
    tied = values.get("tie_word_embeddings", found.get("tie_word_embeddings"))
    if tied is not None:
        found["tie_word_embeddings"] = tied
    return {**found, "model_type": kind.model_type}


def text_fields(
    fields: ConfigFields, model_type: str, architecture: str, defaults: Mapping[str, Any], *, tied: bool
) -> ConfigFields:
    """Return the fields of ``text_config`` for a family that has names for the whole checkpoint.
    ``tied``: whether head and embedding are one if neither part says it."""
    fields.expect_model_type(model_type, architecture)
    fields.get("vision_config")
    text = {**defaults, **without_sections(fields.mapping("text_config"))}
    tied = fields.flag("tie_word_embeddings", bool(text.get("tie_word_embeddings", tied)))
    if text.setdefault("tie_word_embeddings", tied) != tied:
        raise fields.error("tie_word_embeddings", f"that of text_config ({text['tie_word_embeddings']!r})")
    return ConfigFields(text, f"{fields.source}, text_config")


def says_tied(values: Mapping[str, Any]) -> bool:
    """Return whether config.json says if head and embedding are one. Versions of transformers have
    different defaults for it."""
    text = values.get("text_config")
    return any("tie_word_embeddings" in part for part in (values, text) if isinstance(part, dict))


def prefixed(tables: Sequence[NameTable]) -> list[NameTable]:
    """Return name tables of a family with each of the prefixes of text parts."""
    return [
        {_renamed(name, trunk, head): place for name, place in table.items()}
        for trunk, head in PREFIXES
        for table in tables
    ]


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Names of tensors that belong to no text part, or that its family ignores, too."""

    ignorable: Container[str]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not name.startswith(TEXT):
            return True
        return any(one in self.ignorable for one in _originals(name))


def _renamed(name: str, trunk: str, head: str) -> str:
    for old, new in (("model.", trunk), ("lm_head.", head)):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _originals(name: str) -> Iterator[str]:
    """Yield the names in families of a tensor of a text part."""
    for pair in PREFIXES:
        for old, new in zip(("model.", "lm_head."), pair, strict=True):
            if name.startswith(new):
                yield old + name.removeprefix(new)
