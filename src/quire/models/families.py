"""The registry that maps an architecture in ``config.json`` to the code that builds it.

A family has a file (configuration reader, tensor names, model builder) and a line here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from quire.contracts.model import Model
from quire.errors import CheckpointError, Unsupported
from quire.models import bamba, deepseek, falcon_h1, gemma, granite_moe_hybrid, lfm2, llama, mamba2, qwen3_next
from quire.models.checkpoint import NameTable
from quire.models.cohere2 import COHERE2_NAMES, read_cohere2_config
from quire.models.decoder import Decoder, DecoderConfig, MlpBuilder, gated_mlp
from quire.models.glm4 import GLM4_NAMES, read_glm4_config
from quire.models.gpt_oss import gpt_oss_mlp, gpt_oss_spellings, read_gpt_oss_config
from quire.models.granite import read_granite_config
from quire.models.hybrid_decoder import HybridConfig
from quire.models.mixtral import mixtral_spellings, read_mixtral_config
from quire.models.mixture import MixtureConfig, mixture_mlp
from quire.models.olmo2 import OLMO2_NAMES, read_olmo2_config
from quire.models.phi3 import PHI3_NAMES, read_phi3_config
from quire.models.qwen_moe import qwen_moe_spellings, read_qwen2_moe_config, read_qwen3_moe_config
from quire.models.smollm3 import read_smollm3_config
from quire.models.stablelm import STABLELM_NAMES, read_stablelm_config
from quire.models.tensor_names import LLAMA_NAMES, Names, ignorable_names, name_table
from quire.registry import Registry

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)
M = TypeVar("M", bound=MixtureConfig)


VOLATILE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"})
"""Fields of config.json that decide no logits in any architecture."""


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
    max_model_len: int | None
    """The length for which ``load_model`` fixed a length-dependent RoPE; None: ``max_position``."""
    config: dict[str, Any]
    """``config.json`` as it was read."""
    canonical_config: str
    """Canonical JSON of the fields that decide the logits, equal for all spellings of a model."""
    places: NameTable
    """The checkpoint's tensor names and the parameter rows that they fill; empty if
    ``transformers`` loaded them."""

    def pack(self) -> bool:
        """Lay the weights out for this machine's kernels if that helps; return whether it did."""
        ...


class ConfigReader(Protocol[C_co]):
    """A function from ``config.json`` to a family's configuration."""

    def __call__(self, values: Mapping[str, Any], max_model_len: int | None = None) -> C_co:
        """Read ``values``; a RoPE may depend on ``max_model_len`` (None: all positions)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Family(Generic[C]):
    """The way from checkpoints of one architecture to models; ``C`` is its configuration's type."""

    state_kinds: tuple[str, ...]
    """Kinds of layer state, as in ``LayerSpec.kind``."""
    read_config: ConfigReader[C]
    """Reads config.json. Bad values are ``CheckpointError``, missing features ``Unsupported``."""
    num_layers: Callable[[C], int]
    spellings: Callable[[C], Sequence[NameTable]]
    """Name tables of all spellings in which checkpoints of the family occur; commonest first."""
    ignorable_names: Callable[[C], Container[str]]
    build: Callable[[C, Mapping[str, Tensor], Mapping[str, Any]], LoadedModel]


FAMILIES: Registry[Family[Any]] = Registry("architecture")


def dense(
    read_config: ConfigReader[DecoderConfig], names: Names = LLAMA_NAMES, state_kinds: tuple[str, ...] = ("full",)
) -> Family[DecoderConfig]:
    """Return a family of decoders without experts."""
    return Family(
        state_kinds=state_kinds,
        read_config=read_config,
        num_layers=lambda config: config.num_layers,
        spellings=lambda config: (name_table(config, names),),
        ignorable_names=lambda config: ignorable_names(config, names),
        build=Decoder,
    )


def mixture(
    read_config: ConfigReader[M], spellings: Callable[[M], Sequence[NameTable]], mlp: MlpBuilder[M]
) -> Family[M]:
    """Return a family of decoders with experts; ``mlp`` builds a layer's feed-forward part."""
    return Family(
        state_kinds=WINDOWED,
        read_config=read_config,
        num_layers=lambda config: config.num_layers,
        spellings=spellings,
        ignorable_names=ignorable_names,
        build=partial(Decoder, mlp=mlp),
    )


def latent_mixture(read_config: ConfigReader[deepseek.LatentMixtureConfig]) -> Family[deepseek.LatentMixtureConfig]:
    """Return a family of decoders with latent attention and experts."""
    return Family(
        state_kinds=LATENT,
        read_config=read_config,
        num_layers=lambda config: config.num_layers,
        spellings=deepseek.latent_mixture_spellings,
        ignorable_names=deepseek.latent_mixture_ignorable_names,
        build=partial(deepseek.LatentDecoder[deepseek.LatentMixtureConfig], mlp=mixture_mlp),
    )


def recurrent(
    read_config: ConfigReader[HybridConfig],
    spellings: Callable[[Any], Sequence[NameTable]],
    build: Callable[[Any, Mapping[str, Tensor], Mapping[str, Any]], LoadedModel],
    ignorable: Callable[[Any], Container[str]] = lambda config: ignorable_names(config.trunk),
    state_kinds: tuple[str, ...] = ("full", "recurrent"),
) -> Family[Any]:
    """Return a family with recurrent layers, alone or beside attention."""
    return Family(
        state_kinds=state_kinds,
        read_config=read_config,
        num_layers=lambda config: config.num_blocks,
        spellings=spellings,
        ignorable_names=ignorable,
        build=build,
    )


WINDOWED = ("full", "window")
LATENT = ("latent",)

FAMILIES.register("LlamaForCausalLM", dense(llama.read_llama_config))
FAMILIES.register("MistralForCausalLM", dense(llama.read_mistral_config, state_kinds=WINDOWED))
FAMILIES.register("Qwen2ForCausalLM", dense(llama.read_qwen2_config, state_kinds=WINDOWED))
FAMILIES.register("Qwen3ForCausalLM", dense(llama.read_qwen3_config, state_kinds=WINDOWED))
FAMILIES.register("Phi3ForCausalLM", dense(read_phi3_config, PHI3_NAMES, state_kinds=WINDOWED))
FAMILIES.register("Gemma2ForCausalLM", dense(gemma.read_gemma2_config, gemma.GEMMA_NAMES, state_kinds=WINDOWED))
FAMILIES.register("Gemma3ForCausalLM", dense(gemma.read_gemma3_config, gemma.GEMMA_NAMES, state_kinds=WINDOWED))
FAMILIES.register(
    "Gemma3ForConditionalGeneration",
    dense(gemma.read_gemma3_with_vision_config, gemma.GEMMA3_NAMES, state_kinds=WINDOWED),
)
FAMILIES.register("Olmo2ForCausalLM", dense(read_olmo2_config, OLMO2_NAMES))
FAMILIES.register("Cohere2ForCausalLM", dense(read_cohere2_config, COHERE2_NAMES, state_kinds=WINDOWED))
FAMILIES.register("SmolLM3ForCausalLM", dense(read_smollm3_config, state_kinds=WINDOWED))
FAMILIES.register("StableLmForCausalLM", dense(read_stablelm_config, STABLELM_NAMES))
FAMILIES.register("GraniteForCausalLM", dense(read_granite_config))
FAMILIES.register("Glm4ForCausalLM", dense(read_glm4_config, GLM4_NAMES))
FAMILIES.register("MixtralForCausalLM", mixture(read_mixtral_config, mixtral_spellings, mixture_mlp))
FAMILIES.register("Qwen2MoeForCausalLM", mixture(read_qwen2_moe_config, qwen_moe_spellings, mixture_mlp))
FAMILIES.register("Qwen3MoeForCausalLM", mixture(read_qwen3_moe_config, qwen_moe_spellings, mixture_mlp))
FAMILIES.register("GptOssForCausalLM", mixture(read_gpt_oss_config, gpt_oss_spellings, gpt_oss_mlp))
FAMILIES.register("DeepseekV2ForCausalLM", latent_mixture(deepseek.read_deepseek_v2_config))
FAMILIES.register("DeepseekV3ForCausalLM", latent_mixture(deepseek.read_deepseek_v3_config))
FAMILIES.register("Glm4MoeLiteForCausalLM", latent_mixture(deepseek.read_glm4_moe_lite_config))
FAMILIES.register(
    "YoutuForCausalLM",
    Family(
        state_kinds=LATENT,
        read_config=deepseek.read_youtu_config,
        num_layers=lambda config: config.num_layers,
        spellings=deepseek.latent_spellings,
        ignorable_names=ignorable_names,
        build=partial(deepseek.LatentDecoder[deepseek.LatentConfig], mlp=gated_mlp),
    ),
)

FAMILIES.register(
    "Mamba2ForCausalLM",
    recurrent(
        mamba2.read_mamba2_config,
        mamba2.mamba2_spellings,
        mamba2.Mamba2Model,
        mamba2.mamba2_ignorable_names,
        state_kinds=("recurrent",),
    ),
)
FAMILIES.register("BambaForCausalLM", recurrent(bamba.read_bamba_config, bamba.bamba_spellings, bamba.Bamba))
FAMILIES.register(
    "FalconH1ForCausalLM",
    recurrent(falcon_h1.read_falcon_h1_config, falcon_h1.falcon_h1_spellings, falcon_h1.FalconH1),
)
FAMILIES.register(
    "GraniteMoeHybridForCausalLM",
    recurrent(
        granite_moe_hybrid.read_granite_moe_hybrid_config,
        granite_moe_hybrid.granite_moe_hybrid_spellings,
        granite_moe_hybrid.GraniteMoeHybrid,
    ),
)
FAMILIES.register("Lfm2ForCausalLM", recurrent(lfm2.read_lfm2_config, lfm2.lfm2_spellings, lfm2.Lfm2))
for _name, _read in (
    ("Qwen3NextForCausalLM", qwen3_next.read_qwen3_next_config),
    ("Qwen3_5ForCausalLM", qwen3_next.read_qwen3_5_config),
    ("Qwen3_5MoeForCausalLM", qwen3_next.read_qwen3_5_moe_config),
    ("Qwen3_5ForConditionalGeneration", qwen3_next.read_qwen3_5_with_vision_config),
    ("Qwen3_5MoeForConditionalGeneration", qwen3_next.read_qwen3_5_moe_with_vision_config),
):
    FAMILIES.register(
        _name,
        recurrent(_read, qwen3_next.delta_spellings, qwen3_next.DeltaModel, qwen3_next.delta_ignorable_names),
    )


def is_foreign(values: Mapping[str, Any]) -> bool:
    """Return whether config.json names exactly one architecture, which is none of ours."""
    names = values.get("architectures")
    return isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0] not in FAMILIES


def canonical_of(values: Mapping[str, Any], max_model_len: int | None) -> str:
    """Return canonical JSON of the fields in ``values`` (config.json) that decide the logits."""
    if is_foreign(values):
        kept = {name: value for name, value in values.items() if name not in VOLATILE}
        return json.dumps({"fallback": kept}, sort_keys=True, separators=(",", ":"))
    return str(family_of(values).read_config(values, max_model_len).canonical())


def family_of(values: Mapping[str, Any]) -> Family[Any]:
    """Return the family that ``architectures`` in config.json names. Raise ``CheckpointError``
    unless it is exactly one name, and ``Unsupported`` with the known names if it is unknown."""
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        found = repr(names) if "architectures" in values else "missing"
        raise CheckpointError(
            f"config.json: architectures is {found}; expected one of {FAMILIES.list_names()} in a list"
        )
    family = FAMILIES.get(names[0])
    if family is None:
        raise Unsupported(f"architecture {names[0]!r} is not supported; known ones: {', '.join(FAMILIES)}")
    return family
