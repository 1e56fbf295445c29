"""Values of quantised layouts, to the bit those of the libraries that define them.

``recorded_values.safetensors`` has matrices that compressed-tensors, bitsandbytes, ModelOpt,
AutoAWQ and AutoGPTQ quantised or read; ``recorded_values`` wrote it. GGUF's package, and
transformers for float8 and MXFP4, are asked in other tests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from quire.contracts.weights import TensorHeader
from quire.models.quantized import read_quantized
from quire.weights.floats import FLOATS

from .recorded_values import FILE, NAME

with safe_open(FILE, framework="pt") as opened:
    SECTIONS: Mapping[str, str] = opened.metadata()
DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return load_file(FILE)


def expanded(section: str, stored: Mapping[str, Tensor], wanted: Tensor) -> Tensor:
    """What a checkpoint with this section of config.json has for the matrix."""
    headers = {
        name: TensorHeader(file=FILE, shape=tuple(tensor.shape), dtype=DTYPES[tensor.dtype])
        for name, tensor in stored.items()
    }
    quantized = read_quantized({"quantization_config": json.loads(section)})
    assert quantized is not None
    name, out = f"{NAME}.weight", torch.empty_like(wanted)
    format = quantized.format(name, FLOATS, headers)
    needed = format.stored(name, tuple(wanted.shape))
    for one, tensor in needed.items():
        assert headers[one].shape in (tensor.shape, *tensor.others)
        assert headers[one].dtype in tensor.dtypes
    format.expand(name, {one: stored[one] for one in needed}, out)
    return out


@pytest.mark.parametrize("case", sorted(SECTIONS))
def test_values_are_those_of_the_library(tensors: dict[str, Tensor], case: str) -> None:
    wanted = tensors[f"{case}="]
    stored = {name.partition("/")[2]: one for name, one in tensors.items() if name.startswith(f"{case}/")}
    found = expanded(SECTIONS[case], stored, wanted)
    assert len(wanted.unique()) > 3
    same = torch.int32 if wanted.dtype == torch.float32 else torch.int16
    # A zero may have either sign, as a product with a zero code has that of its scale.
    assert torch.equal((found + 0.0).view(same), (wanted + 0.0).view(same))


def test_every_layout_is_recorded() -> None:
    kinds = Counter(name.partition("-")[0] for name in SECTIONS)
    assert kinds == {"ct": 27, "bnb": 12, "awq": 2, "gptq": 6, "modelopt": 4}
