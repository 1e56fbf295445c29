"""What lies at a model's path: a directory in the format of Hugging Face, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.base.json_files import read_json
from quire.contracts.weights import WeightSource
from quire.models.config_fields import read_config_file
from quire.models.gguf import open_gguf_weights, read_gguf_config, read_gguf_generation
from quire.models.quantized import SECTION, Quantized, section_of
from quire.models.spellings import usual_values
from quire.models.text_parts import says_tied, text_architecture
from quire.weights.gguf_paths import is_gguf, part_files
from quire.weights.safetensors_files import SafetensorsFiles, stored_names
from quire.weights.safetensors_files import weight_files as safetensors_files


def read_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json in the names of native families (``models.spellings``), or what
    a GGUF file says in its stead. ``CheckpointError`` for a missing or damaged one. Whether a text
    part is tied is read from the names of tensors, if config.json does not say it."""
    if is_gguf(path):
        return read_gguf_config(path)
    values = usual_values(read_config_file(path))
    beside = read_json(path / "hf_quant_config.json").get("quantization")
    if isinstance(beside, dict) and section_of(values) is None:  # as ModelOpt wrote it before
        values[SECTION] = {"quant_method": "modelopt", **beside}
    if text_architecture(values) is not None and not says_tied(values):
        values["tie_word_embeddings"] = not any(name.endswith("lm_head.weight") for name in stored_names(path))
    return values


def read_generation_config(path: Path) -> dict[str, Any]:
    """Return generation_config.json, or what a GGUF file says in its stead; empty without."""
    return read_gguf_generation(path) if is_gguf(path) else read_json(path / "generation_config.json")


def open_weights(path: Path, quantized: Quantized | None = None) -> WeightSource:
    """Open the weights of a model, in a directory quantised as its config.json says.
    ``CheckpointError`` for missing or damaged files."""
    return open_gguf_weights(path) if is_gguf(path) else SafetensorsFiles(path, quantized)


def weight_files(path: Path) -> tuple[Path, ...]:
    """List the files of a model's weights by name; ``CheckpointError`` if one is missing."""
    return part_files(path) if is_gguf(path) else safetensors_files(path)
