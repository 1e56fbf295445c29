"""``LocalRunner``: a step that is refused, and K and V in another type than the model's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.contracts.layers import FullAttention, LayerSpec
from quire.contracts.model import Block, Pass
from quire.errors import InvalidArgument, QuireError, Unsupported
from quire.kernels.sdpa import SdpaAttention
from quire.kv.paged import PagedKVState
from quire.runner.local import LocalRunner
from quire.types import Add, Chunk, Fork, Pop, Step, TokenTree

HEADS, DIM, VOCAB = 2, 4, 11
SPEC = FullAttention(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, value_dim=DIM)


class OneLayer:
    """Attention over embeddings, the least that is a model. It keeps what its layer returned."""

    architecture, vocab_size, max_position, hidden_size = "OneLayer", VOCAB, 64, HEADS * DIM
    layer_specs: Sequence[LayerSpec] = (SPEC,)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.table = torch.randn(VOCAB, HEADS * DIM)
        self.blocks: Sequence[Block] = [self.block]
        self.outputs: list[Tensor] = []

    def embed(self, tokens_T: Tensor) -> Tensor:
        return self.table[tokens_T]

    def block(self, x_TE: Tensor, pass_: Pass) -> Tensor:
        self.outputs.append(pass_.attend_qkv(0, x_TE.repeat(1, 3)))
        return self.outputs[-1].flatten(1)

    def head(self, x_RE: Tensor) -> Tensor:
        return x_RE @ self.table.T


def make_runner(dtype: torch.dtype = torch.float32) -> LocalRunner:
    state = PagedKVState([SPEC], capacity=64, page_size=4, dtype=dtype, backend=SdpaAttention())
    return LocalRunner(OneLayer(), state, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Unsupported, {"tokens": [1], "tree": TokenTree((-1,))}),
        (Unsupported, {"tokens": [1], "adapter": 0}),
        (InvalidArgument, {"tokens": []}),
    ],
)
def test_a_refused_chunk_leaves_the_edits_undone(kind: type[QuireError], fields: dict[str, Any]) -> None:
    runner = make_runner()
    runner.execute(Step(edits=(Add(0),), chunks=(Chunk(0, [1, 2, 3]),)))
    with pytest.raises(kind):
        runner.execute(Step(edits=(Pop(0, 1), Fork(0, 1), Add(2)), chunks=(Chunk(0, [4]), Chunk(1, **fields))))
    assert runner.state.table.ids == [0]
    assert runner.state.sequence_length(0) == 3
    runner.state.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunks", [(40,), (1,) * 20, (3, 30, 1), (17, 17)])
def test_kv_in_another_type(dtype: torch.dtype, chunks: Sequence[int]) -> None:
    """Attention is that over q, K and V rounded to the storage type; its result comes in the model's."""
    runner = make_runner(dtype)
    model = runner.model
    assert isinstance(model, OneLayer)
    tokens = [(7 * index) % VOCAB for index in range(sum(chunks))]
    runner.execute(Step(edits=(Add(0),)))
    begin = 0
    for count in chunks:
        runner.execute(Step(chunks=(Chunk(0, tokens[begin : begin + count]),)))
        begin += count
    x_THD = model.table[tokens].view(-1, HEADS, DIM).to(dtype)
    assert torch.equal(runner.state.debug_get_kv(0, layer=0)[0], x_THD)
    found = torch.cat(model.outputs)
    assert found.dtype == torch.float32
    exact_HTD = torch.nn.functional.scaled_dot_product_attention(
        *(x_THD.double().transpose(0, 1),) * 3, is_causal=True, scale=SPEC.scale
    )
    # Two states, rounded to the storage type, are merged and rounded; sums run in float32 at least.
    eps = max(2 * torch.finfo(dtype).eps, len(tokens) * torch.finfo(torch.float32).eps)
    assert float((found.double() - exact_HTD.transpose(0, 1)).abs().max()) <= eps * float(x_THD.double().abs().max())
