"""The registry that maps an architecture in ``config.json`` to the code that builds it.

A family has a file (configuration reader, tensor names, model builder) and a line here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from quire.base.errors import CheckpointError, Unsupported
from quire.base.registry import Registry
from quire.contracts.block_calls import LayerKernels
from quire.contracts.layers import LayerSpec
from quire.contracts.model import Model
from quire.contracts.ranks import Stages
from quire.models import (
    bamba,
    deepseek,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    gemma_layers,
    granite_moe_hybrid,
    lfm2,
    llama,
    mamba2,
    nemotron_h,
    qwen3_next,
)
from quire.models import dense_families as dense
from quire.models.config_fields import ConfigReader
from quire.models.decoder import Decoder, DecoderConfig, MlpBuilder, gated_mlp
from quire.models.gpt_oss import gpt_oss_mlp, gpt_oss_spellings, read_gpt_oss_config
from quire.models.heads import DraftLayer
from quire.models.hybrid_decoder import BlockBuilder, HybridDecoder, mixed_block
from quire.models.mixtral import mixtral_spellings, phimoe_spellings, read_mixtral_config, read_phimoe_config
from quire.models.mixture import mixture_mlp
from quire.models.quantized import without_section
from quire.models.qwen_moe import qwen_moe_spellings, read_qwen2_moe_config, read_qwen3_moe_config
from quire.models.tensor_names import LLAMA_NAMES, Names, ignorable_names, name_table
from quire.models.text_parts import OtherNames, prefixed, text_architecture, text_type, text_values
from quire.weights.places import NameTable, expand

VOLATILE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Fields of config.json that affect the logits in no architecture."""


class LoadedModel(Model, Protocol):
    """A model read from a checkpoint."""

    dtype: torch.dtype
    """Element type of weights and activations."""
    device: torch.device
    num_parameters: int
    tied: bool
    """Whether embedding and head are one tensor."""
    parameter_bytes: int
    """Bytes of weights on ``device``; tied weights count once, or twice if the head was packed."""
    quantization: str | None
    """Form of the weights of linear maps, as in ``contracts.linear``; None: the checkpoint's."""
    max_model_len: int | None
    """The length for which ``load_model`` computed a length-dependent RoPE; None:
    ``max_position``."""
    config: dict[str, Any]
    """The parsed ``config.json``."""
    whole_specs: Sequence[LayerSpec]
    """The layers with all heads of a model that ranks divide; empty: it is not divided."""
    stages: Stages | None
    """The stages of a model of which a part of the blocks is here; None: all are."""
    canonical_config: str
    """Canonical JSON of the fields that decide the logits, equal for all spellings of a model."""
    formats: Mapping[str, int]
    """Bytes of the weights in their files, by the types of elements or formats of blocks there."""
    expanded: Mapping[str, int]
    """The part of ``formats`` whose blocks were expanded at load; kernels multiply the others."""
    places: NameTable
    """The checkpoint's tensor names and the parameter rows that they fill; empty if
    ``transformers`` loaded them."""

    def pack(self, kernels: LayerKernels) -> bool:
        """Give the layers their kernels, and pack the weights for this machine if that helps.
        Return True if it packed them."""
        ...


NameTables: TypeAlias = Callable[[Any], Sequence[NameTable]]
Ignorable: TypeAlias = Callable[[Any], Container[str]]
Build: TypeAlias = Callable[[Any, Mapping[str, Tensor], Mapping[str, Any]], LoadedModel]


def _no_draft_layer(config: Any) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """The functions from checkpoints of one architecture to models. The others take the
    configuration that ``read_config`` returns."""

    state_kinds: tuple[str, ...]
    """Kinds of layer state, as in ``LayerSpec.kind``."""
    read_config: ConfigReader[Any]
    """Reads config.json. Bad values are ``CheckpointError``, missing features ``Unsupported``."""
    name_tables: NameTables
    """Name tables of all spellings in checkpoints of the family; the commonest first."""
    ignorable_names: Ignorable = ignorable_names
    build: Build = Decoder
    draft_layer: Callable[[Any], DraftLayer | None] = _no_draft_layer
    """Returns the first layer that drafts; None: there is none."""


FAMILIES: Registry[Family] = Registry("architecture")
MODEL_TYPES: dict[str, str] = {}
"""Native architectures by ``model_type``, for checkpoints with code of their own."""
FULL, WINDOWED, LATENT = ("full",), ("full", "window"), ("latent",)

DENSE: Mapping[str, tuple[str, tuple[str, ...], ConfigReader[DecoderConfig], Names]] = {
    "LlamaForCausalLM": ("llama", FULL, llama.read_llama_config, LLAMA_NAMES),
    "MistralForCausalLM": ("mistral", WINDOWED, llama.read_mistral_config, LLAMA_NAMES),
    "Ministral3ForCausalLM": ("ministral3", WINDOWED, llama.read_ministral3_config, LLAMA_NAMES),
    "Qwen2ForCausalLM": ("qwen2", WINDOWED, llama.read_qwen2_config, LLAMA_NAMES),
    "Qwen3ForCausalLM": ("qwen3", WINDOWED, llama.read_qwen3_config, LLAMA_NAMES),
    "Phi3ForCausalLM": ("phi3", WINDOWED, dense.read_phi3_config, dense.PHI3_NAMES),
    "Gemma2ForCausalLM": ("gemma2", WINDOWED, gemma.read_gemma2_config, gemma.GEMMA_NAMES),
    "Gemma3ForCausalLM": ("gemma3_text", WINDOWED, gemma.read_gemma3_config, gemma.GEMMA_NAMES),
    "Gemma3ForConditionalGeneration": ("", WINDOWED, gemma.read_gemma3_with_vision_config, gemma.GEMMA3_NAMES),
    "Olmo2ForCausalLM": ("olmo2", FULL, dense.read_olmo2_config, dense.OLMO2_NAMES),
    "Cohere2ForCausalLM": ("cohere2", WINDOWED, dense.read_cohere2_config, dense.COHERE2_NAMES),
    "SmolLM3ForCausalLM": ("smollm3", WINDOWED, dense.read_smollm3_config, LLAMA_NAMES),
    "StableLmForCausalLM": ("stablelm", FULL, dense.read_stablelm_config, dense.STABLELM_NAMES),
    "GraniteForCausalLM": ("granite", FULL, dense.read_granite_config, LLAMA_NAMES),
    "Glm4ForCausalLM": ("glm4", FULL, dense.read_glm4_config, dense.GLM4_NAMES),
}
"""Of each dense family its ``model_type`` ("" if ``MODEL_TYPES`` does not have it), kinds of state,
reader and names of tensors."""


def _register(architecture: str, model_type: str, family: Family) -> None:
    FAMILIES.register(architecture, family)
    if model_type:
        MODEL_TYPES[model_type] = architecture


def _mixture(
    architecture: str,
    model_type: str,
    read: ConfigReader[Any],
    name_tables: NameTables,
    mlp: MlpBuilder[Any] = mixture_mlp,
) -> None:
    _register(architecture, model_type, Family(WINDOWED, read, name_tables, build=partial(Decoder[Any], mlp=mlp)))


def _hybrid(
    architecture: str,
    model_type: str,
    read: ConfigReader[Any],
    name_tables: NameTables,
    block: BlockBuilder[Any],
    ignorable: Ignorable = lambda config: ignorable_names(config.trunk),
    state_kinds: tuple[str, ...] = ("full", "recurrent"),
    draft_layer: Callable[[Any], DraftLayer | None] = _no_draft_layer,
) -> None:
    build = partial(HybridDecoder[Any], block=block)
    _register(architecture, model_type, Family(state_kinds, read, name_tables, ignorable, build, draft_layer))


def _dense_tables(config: DecoderConfig, names: Names) -> Sequence[NameTable]:
    return (name_table(config, names),)


for _name, (_type, _kinds, _read, _names) in DENSE.items():
    _tables, _ignorable = partial(_dense_tables, names=_names), partial(ignorable_names, names=_names)
    _register(_name, _type, Family(_kinds, _read, _tables, _ignorable))

_glm = Family(FULL, dense.read_glm_config, dense.glm_spellings, dense.glm_ignorable_names)
_register("GlmForCausalLM", "glm", _glm)
_mixture("MixtralForCausalLM", "mixtral", read_mixtral_config, mixtral_spellings)
_mixture("PhimoeForCausalLM", "phimoe", read_phimoe_config, phimoe_spellings)
_mixture("Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_moe_config, qwen_moe_spellings)
_mixture("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe_config, qwen_moe_spellings)
_mixture("GptOssForCausalLM", "gpt_oss", read_gpt_oss_config, gpt_oss_spellings, gpt_oss_mlp)

for _name, _type, _read_latent in (
    ("DeepseekV2ForCausalLM", "deepseek_v2", deepseek.read_deepseek_v2_config),
    ("DeepseekV3ForCausalLM", "deepseek_v3", deepseek.read_deepseek_v3_config),
    ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", deepseek.read_glm4_moe_lite_config),
):
    _build: Build = partial(deepseek.LatentDecoder[Any], mlp=mixture_mlp)
    _names_of = (deepseek.latent_mixture_spellings, deepseek.latent_mixture_ignorable_names)
    _register(_name, _type, Family(LATENT, _read_latent, *_names_of, _build, deepseek.latent_draft_layer))
_youtu: Build = partial(deepseek.LatentDecoder[Any], mlp=gated_mlp)
_register(
    "YoutuForCausalLM", "youtu", Family(LATENT, deepseek.read_youtu_config, deepseek.latent_spellings, build=_youtu)
)

for _name, _type, _read_layered, _spellings, _build in (
    ("Gemma3nForCausalLM", "gemma3n_text", gemma3n.read_gemma3n_config, gemma3n.gemma3n_spellings, gemma3n.gemma3n),
    ("Gemma4ForCausalLM", "gemma4_text", gemma4.read_gemma4_config, gemma4.gemma4_spellings, gemma4.gemma4),
):
    _register(_name, _type, Family(WINDOWED, _read_layered, _spellings, gemma_layers.layered_ignorable_names, _build))
_mamba: BlockBuilder[Any] = partial(mixed_block, mixer=mamba2.mamba_of)
_hybrid("BambaForCausalLM", "bamba", bamba.read_bamba_config, bamba.bamba_spellings, _mamba)
_hybrid(
    "FalconH1ForCausalLM",
    "falcon_h1",
    falcon_h1.read_falcon_h1_config,
    falcon_h1.falcon_h1_spellings,
    falcon_h1.side_by_side_block,
)
_hybrid(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    granite_moe_hybrid.read_granite_moe_hybrid_config,
    granite_moe_hybrid.granite_moe_hybrid_spellings,
    _mamba,
)
_short: BlockBuilder[Any] = partial(mixed_block, mixer=lfm2.short_conv)
_windows_too = ("full", "window", "recurrent")
_hybrid("Lfm2ForCausalLM", "lfm2", lfm2.read_lfm2_config, lfm2.lfm2_spellings, _short)
_hybrid("Lfm2MoeForCausalLM", "lfm2_moe", lfm2.read_lfm2_moe_config, lfm2.lfm2_spellings, _short)
_hybrid("Lfm3ForCausalLM", "lfm3", lfm2.read_lfm3_config, lfm2.lfm3_spellings, _short, state_kinds=_windows_too)
_hybrid(
    "Mamba2ForCausalLM",
    "mamba2",
    mamba2.read_mamba2_config,
    mamba2.mamba2_spellings,
    mamba2.bare_block,
    mamba2.mamba2_ignorable_names,
    ("recurrent",),
)
_hybrid(
    "NemotronHForCausalLM",
    "nemotron_h",
    nemotron_h.read_nemotron_h_config,
    nemotron_h.nemotron_h_spellings,
    nemotron_h.nemotron_h_block,
    nemotron_h.nemotron_h_ignorable_names,
)
for _name, _type, _read_delta in (
    ("Qwen3NextForCausalLM", "qwen3_next", qwen3_next.read_qwen3_next_config),
    ("Qwen3_5ForCausalLM", "qwen3_5_text", qwen3_next.read_qwen3_5_config),
    ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", qwen3_next.read_qwen3_5_moe_config),
    ("Qwen3_5ForConditionalGeneration", "", qwen3_next.read_qwen3_5_with_vision_config),
    ("Qwen3_5MoeForConditionalGeneration", "", qwen3_next.read_qwen3_5_moe_with_vision_config),
):
    _hybrid(
        _name,
        _type,
        _read_delta,
        qwen3_next.delta_spellings,
        partial(mixed_block, mixer=qwen3_next.delta_net),
        qwen3_next.delta_ignorable_names,
        draft_layer=qwen3_next.delta_draft_layer,
    )


def is_foreign(values: Mapping[str, Any]) -> bool:
    """Return True if config.json names exactly one architecture, and it is not a native one."""
    names = values.get("architectures")
    named = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    return named and text_architecture(values) is None and _native_name(values) is None


def canonical_of(values: Mapping[str, Any], max_model_len: int | None) -> str:
    """Return canonical JSON of the fields in ``values`` (config.json) that decide the logits."""
    if is_foreign(values):
        kept = {name: value for name, value in values.items() if name not in VOLATILE}
        return json.dumps({"fallback": kept}, sort_keys=True, separators=(",", ":"))
    return str(family_of(values).read_config(without_section(values), max_model_len).canonical())


def name_tables_of(values: Mapping[str, Any]) -> list[NameTable]:
    """Return the name tables of all spellings in files of a native model, for each layer."""
    family = family_of(values)
    config = family.read_config(without_section(values), None)
    return [expand(table, config.num_layers) for table in family.name_tables(config)]


def family_of(values: Mapping[str, Any]) -> Family:
    """Return the family that ``architectures`` in config.json names. Raise ``CheckpointError``
    unless it is exactly one name, and ``Unsupported`` with the known names if it is unknown."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        found = repr(names) if "architectures" in values else "missing"
        raise CheckpointError(
            f"config.json: architectures is {found}; expected one of {FAMILIES.list_names()} in a list"
        )
    if text_architecture(values) is not None:
        return _text_family(FAMILIES.require(MODEL_TYPES[text_type(values).model_type]))
    name = _native_name(values)
    if name is None:
        raise Unsupported(f"architecture {names[0]!r} is not supported; known ones: {', '.join(FAMILIES)}")
    return FAMILIES.require(name)


def _text_family(family: Family) -> Family:
    """Return the family of a text part out of a whole checkpoint."""

    def read(values: Mapping[str, Any], max_model_len: int | None = None) -> Any:
        return family.read_config(text_values(values), max_model_len)

    return replace(
        family,
        read_config=read,
        name_tables=lambda config: prefixed(family.name_tables(config)),
        ignorable_names=lambda config: OtherNames(family.ignorable_names(config)),
    )


def _native_name(values: Mapping[str, Any]) -> str | None:
    """Return the native architecture that config.json names, or whose ``model_type`` it has if it
    brings its own code for a causal language model; None if there is none."""
    (name, *_) = values["architectures"]
    if name in FAMILIES:
        return str(name)
    code = values.get("auto_map")
    if not isinstance(code, dict) or "AutoModelForCausalLM" not in code:
        return None
    return MODEL_TYPES.get(str(values.get("model_type")))
