"""GGUF files of checkpoints in the directory format of ``transformers``, for llama.cpp.

Needs ``numpy``, ``gguf`` and for quantised files ``llama_cpp`` only, because it runs in the
environment of llama.cpp. Covers the checkpoints of ``checkpoints.py``: Llama and Qwen3 with tied
embeddings, in one file of bfloat16.

Letters: H heads, D head size, E width.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def gguf_file(model: Path, kind: str) -> Path:
    """Return the file of the checkpoint in directory ``model``, beside it; write it if it is
    missing.

    ``kind`` is the type of the matrices: ``BF16``, ``F32``, ``Q8_0``, ``Q4_0``. Vectors are F32.
    """
    is_quantized = kind.startswith("Q")
    path = model.with_name(f"{model.name}-{kind}{'-by-llama.cpp' if is_quantized else ''}.gguf")
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        if is_quantized:
            quantize(gguf_file(model, "BF16"), kind, part)
        else:
            write_gguf(model, kind, part)
        part.rename(path)
    return path


def quantize(source: Path, kind: str, path: Path) -> None:
    """Let llama.cpp quantise the file ``source``, as its users do: in ``Q4_0`` the map to logits
    has 6 or 8 bits.

    Raises:
        ValueError: llama.cpp refuses.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(options)):
        raise ValueError(f"{source}: llama.cpp cannot make {kind} of it")


def write_gguf(model: Path, kind: str, path: Path) -> None:
    """Write the checkpoint in directory ``model`` to ``path``.

    Raises:
        ValueError: a model whose weights have no known places in the file.
    """
    import gguf

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] not in ("llama", "qwen3") or not config["tie_word_embeddings"]:
        raise ValueError(f"{model}: only llama and qwen3 with tied embeddings are written")
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    llama = config["model_type"] == "llama"
    architecture = gguf.MODEL_ARCH.LLAMA if llama else gguf.MODEL_ARCH.QWEN3
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    wanted = gguf.GGMLQuantizationType[kind]

    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    # No vocabulary: tokens are only ids, and llama.cpp makes this many without texts.
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    factors = rope_factors(config["rope_parameters"], size)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, weight in read_tensors(model / "model.safetensors"):
        if llama and name.endswith("q_proj.weight"):
            weight = interleave_pairs(weight, heads)
        elif llama and name.endswith("k_proj.weight"):
            weight = interleave_pairs(weight, kv_heads)
        kept = wanted if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None:
            raise ValueError(f"{model}: '{name}' has no place in a GGUF file")
        writer.add_tensor(target, gguf.quants.quantize(weight, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_tensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the names and values of a safetensors file of bfloat16, which numpy does not
    support."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        start = file.tell()
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{path}: '{name}' is {entry['dtype']}; BF16 is read")
            begin, end = entry["data_offsets"]
            file.seek(start + begin)
            halves = np.frombuffer(file.read(end - begin), dtype="<u2")
            # bfloat16 is the upper half of float32.
            yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def interleave_pairs(weight: Array, heads: int) -> Array:
    """Return ``[H * D, E]`` with each head's rows i and D/2 + i side by side.

    llama.cpp rotates neighbours in Llama's heads, where transformers rotates the two halves.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def rope_factors(rope: dict[str, Any], size: int) -> Array | None:
    """Return the divisor of each pair's frequency in Llama 3's scaling; None if unscaled.

    Raises:
        ValueError: another kind of scaling.
    """
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope_type {rope['rope_type']!r}; default and llama3 are written")
    factors = []
    for pair in range(size // 2):
        turns = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** (2 * pair / size))
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - kept) / rope["factor"] + kept))
    return np.array(factors, dtype=np.float32)
