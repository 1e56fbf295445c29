"""A processor that cannot multiply packed bfloat16 weights gets plain ones."""

from __future__ import annotations

import pytest
import torch

from quire.nn.linear import Linear
from quire.nn.packed import can_pack, packed


def test_a_processor_without_bfloat16_kernels_gets_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False, raising=False)
    assert not can_pack(torch.bfloat16, torch.device("cpu"))
    plain = Linear(torch.randn(4, 4).bfloat16())
    assert packed(plain) is plain
