"""``LocalRunner``: a step that is refused, K and V in another type than the model's, and what a
forward has besides tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.base.blend_inputs import BlendedChunk, BlendedRows, BlendInputs
from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError, Unsupported
from quire.base.types import Add, Chunk, Commit, Fork, Inputs, Load, LogitsPlace, Pop, SetWindow, Step, TokenTree
from quire.blend.rows_task import RowsPiece
from quire.contracts.layers import FullAttention, LayerSpec
from quire.contracts.model import Block, Pass
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kv.state import State
from quire.runner.local import LocalRunner

HEADS, DIM, VOCAB = 2, 4, 11
SPEC = FullAttention(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, value_dim=DIM)


class OneLayer:
    """Attention over embeddings, the least that is a model. It keeps what its layer returned."""

    architecture, vocab_size, max_position, hidden_size = "OneLayer", VOCAB, 64, HEADS * DIM
    stack = None
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
    state = State([SPEC], capacity=64, page_size=4, dtype=dtype, backend=SdpaAttention())
    return LocalRunner(OneLayer(), state, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (InvalidArgument, {"tokens": [1, 2], "tree": TokenTree((-1,))}),
        (Unsupported, {"tokens": [1], "adapter": 0}),
        (InvalidArgument, {"tokens": []}),
        (InvalidArgument, {"tokens": [1, -1]}),
    ],
)
def test_a_refused_chunk_leaves_the_edits_undone(kind: type[QuireError], fields: dict[str, Any]) -> None:
    runner = make_runner()
    runner.execute(Step(edits=(Add(0),), chunks=(Chunk(0, [1, 2, 3]),)))
    with pytest.raises(kind):
        runner.execute(Step(edits=(Pop(0, 1), Fork(0, 1), Add(2)), chunks=(Chunk(0, [4]), Chunk(1, **fields))))
    assert runner.state.sequences.ids == [0]
    assert runner.state.sequence_length(0) == 3
    runner.state.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunks", [(40,), (1,) * 20, (3, 30, 1), (17, 17)])
def test_kv_in_another_type(dtype: torch.dtype, chunks: Sequence[int]) -> None:
    """Attention is that over q, K and V rounded to the storage type; its result comes in the
    model's.
    """
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


def run(runner: LocalRunner, *chunks: Chunk, **inputs: Any) -> Any:
    return runner.execute(Step(chunks=chunks, inputs=Inputs(**inputs)))


def added(*seqs: int) -> LocalRunner:
    runner = make_runner()
    runner.execute(Step(edits=tuple(Add(seq) for seq in seqs)))
    return runner


def test_embeddings_stand_at_placeholders() -> None:
    runner = added(0, 1, 2)
    table = runner.model.table  # type: ignore[attr-defined]
    plain = run(added(1, 2), Chunk(1, [6], logits="all"), Chunk(2, [1, 5, 2], logits="all"))
    rows = table[[6, 5]].double()
    mixed = run(runner, Chunk(1, [-2], logits="all"), Chunk(2, [1, -1, 2], logits="all"), embeddings=rows)
    assert torch.equal(mixed.logits_RV, plain.logits_RV)
    assert torch.equal(rows, table[[6, 5]].double()), "inputs stay as they are"
    for tokens, embeddings in (
        ([1, -1], None),
        ([1, -1], torch.ones(2, 8)),
        ([1, 1], torch.ones(1, 8)),
        ([1, -1], torch.ones(1, 7)),
    ):
        with pytest.raises(InvalidArgument, match=r"placeholders \(negative ids\) need embeddings"):
            run(runner, Chunk(0, tokens), embeddings=embeddings)
    assert runner.state.sequence_length(0) == 0


def test_hidden_states_and_weights_come_per_chunk() -> None:
    runner = added(0, 1)
    run(runner, Chunk(0, [1, 2, 3]))
    bare = run(runner, Chunk(1, [9]))
    assert (bare.hidden_states, bare.attention_weights) == ((), ())
    output = run(runner, Chunk(0, [4, 5]), Chunk(1, [7]), hidden_states=True, attention_weights=True)
    assert [[x.shape for x in chunk] for chunk in output.hidden_states] == [[(2, 8)], [(1, 8)]]
    assert torch.equal(torch.cat([chunk[0] for chunk in output.hidden_states]), runner.model.outputs[-1].flatten(1))  # type: ignore[attr-defined]
    weights_HnK = output.attention_weights[0][0]
    assert weights_HnK.shape == (HEADS, 2, 5)
    assert output.attention_weights[1][0].shape == (HEADS, 1, 2)
    assert float((weights_HnK.sum(-1) - 1).abs().max()) <= 8 * torch.finfo(torch.float32).eps
    assert torch.count_nonzero(weights_HnK[:, 0, 4:]) == 0, "a token does not see later ones"
    v_KHD = runner.state.debug_get_kv(0, layer=0)[1]
    again = torch.einsum("hnk,khd->nhd", weights_HnK, v_KHD).flatten(1)
    bound = 8 * torch.finfo(torch.float32).eps * float(v_KHD.abs().max())
    assert float((again - output.hidden_states[0][0]).abs().max()) <= bound
    output.logits_RV.zero_()
    output.hidden_states[0][0].zero_()
    weights_HnK.zero_()  # ordinary tensors, which belong to the caller


def test_outputs_of_blocks_are_of_all_tokens() -> None:
    runner = make_runner()
    step = Step(edits=(Add(0), Add(1)), chunks=(Chunk(0, [4, 5]), Chunk(1, [7], logits="none")))
    output = runner.execute(replace(step, inputs=Inputs(features=(0, 0))))
    assert output.logits_RV.shape == (1, VOCAB)
    for found in output.features:
        assert torch.equal(found, runner.model.outputs[-1].flatten(1))  # type: ignore[attr-defined]
    for block in (-1, 1):
        with pytest.raises(InvalidArgument, match="features must be blocks 0 to 0"):
            runner.execute(Step(edits=(Pop(0, 1),), chunks=(Chunk(0, [1]),), inputs=Inputs(features=(block,))))
    assert runner.state.sequence_length(0) == 2


def test_a_mask_replaces_the_causal_rule() -> None:
    runner = added(0)
    run(runner, Chunk(0, [1, 2]))
    # The second of three new tokens sees the third; the first sees only itself.
    allowed = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    output = run(runner, Chunk(0, [3, 4, 5]), mask=allowed.flatten(), attention_weights=True)
    assert torch.equal(output.attention_weights[0][0] > 0, allowed.expand(HEADS, 3, 5))


def test_a_load_without_its_file_is_refused() -> None:
    runner = make_runner()
    with pytest.raises(FailedPrecondition, match="sequence 3 is to be loaded, and no state file is open for it"):
        runner.execute(Step(edits=(Load(3, {}),)))
    assert runner.state.empty()


def test_trees_and_their_commit() -> None:
    runner = added(0, 1)
    run(runner, Chunk(0, [1, 2]), Chunk(1, [3]))
    tree = TokenTree((-1, 0, 0, 2))
    output = run(runner, Chunk(0, [4, 5, 6, 7], tree, logits="all"), Chunk(1, [8], logits="all"))
    chain = run(added(0), Chunk(0, [1, 2, 4, 6, 7], logits="all")).logits_RV[2:]
    bound = 32 * torch.finfo(torch.float32).eps * float(chain.abs().max())
    assert float((output.rows(0)[[0, 2, 3]] - chain).abs().max()) <= bound
    assert (runner.state.sequence_length(0), runner.state.pending_nodes(0)) == (2, 4)
    runner.execute(Step(edits=(Commit((0,), (3,)),)))
    assert (runner.state.sequence_length(0), runner.state.pending_nodes(0)) == (5, 0)
    following = run(runner, Chunk(0, [9])).logits_RV
    fresh = run(added(0), Chunk(0, [1, 2, 4, 6, 7, 9])).logits_RV
    assert float((following - fresh).abs().max()) <= bound
    runner.state.check()


def test_a_window_is_an_edit() -> None:
    runner = added(0)
    runner.execute(Step(edits=(SetWindow(0, 4, 1),)))
    run(runner, Chunk(0, [1, 2, 3, 4, 5, 6]))
    output = run(runner, Chunk(0, [7]), attention_weights=True)
    assert (output.attention_weights[0][0][:, 0] > 0).tolist() == [
        [True, False, False, False, True, True, True]
    ] * HEADS
    runner.execute(Step(edits=(Add(1), SetWindow(1, 4), SetWindow(1, None))))
    run(runner, Chunk(1, [1, 2, 3, 4, 5, 6]))
    assert runner.state.cached_length(1) == 6


def test_logits_are_written_to_named_tensors() -> None:
    """Of two chunks to one tensor, with a row between them, in two steps; a third one is apart."""
    plain = run(added(0, 1), Chunk(0, [1, 2, 3], logits="all"), Chunk(1, [4, 5]))
    runner = added(0, 1)
    first = (LogitsPlace(0, 5), LogitsPlace(1, 1))
    output = run(runner, Chunk(0, [1, 2], logits="all"), Chunk(1, [4, 5]), places=first)
    assert output.logits_RV.shape[0] == output.starts[-1] == 0
    run(runner, Chunk(0, [3], logits="all"), places=(LogitsPlace(0, 5, 3),))
    bound = 32 * torch.finfo(torch.float32).eps * float(plain.logits_RV.abs().max())
    assert float((runner.logits[0][[0, 1, 3]] - plain.rows(0)).abs().max()) <= bound
    assert float((runner.logits[1] - plain.rows(1)).abs().max()) <= bound
    assert not runner.logits[0][[2, 4]].any()


@pytest.mark.parametrize(
    "places",
    [
        (LogitsPlace(0, 3),),
        (LogitsPlace(0, 3), LogitsPlace(0, 3, 3)),
        (LogitsPlace(0, 2), LogitsPlace(1, 1)),
        (LogitsPlace(0, 4), LogitsPlace(0, 5, 3)),
        (LogitsPlace(7, 4), LogitsPlace(0, 1)),
        (LogitsPlace(0, 4), LogitsPlace(1, 1, -1)),
    ],
)
def test_places_that_do_not_fit_are_refused(places: tuple[LogitsPlace, ...]) -> None:
    runner = added(0, 1)
    runner.logits[7] = torch.zeros(3, VOCAB)
    with pytest.raises(InvalidArgument, match="places"):
        run(runner, Chunk(0, [1, 2, 3], logits="all"), Chunk(1, [4]), places=places)
    assert runner.state.sequence_length(0) == 0
    assert list(runner.logits) == [7]


def test_a_blending_that_does_not_fit_changes_nothing() -> None:
    """Of another number of chunks, by rows that nothing has, by an executor that is not there, and
    with logits of all rows."""
    runner, nothing = added(0), np.zeros(3, dtype=np.bool_)
    known = BlendedChunk(runner.row_sources.add(NoRows()), 0, nothing, BlendedRows(), "v")
    unknown = BlendedChunk(5, 0, nothing, BlendedRows(), "v")
    chunk = Chunk(0, [1, 2, 3])
    for kind, chunks, layer, one in (
        (InvalidArgument, (known, known), 0, chunk),
        (FailedPrecondition, (unknown,), 0, chunk),
        (FailedPrecondition, (known,), None, chunk),
        (Unsupported, (known,), 0, Chunk(0, [1, 2, 3], logits="all")),
    ):
        with pytest.raises(kind):
            runner.execute(Step(edits=(Add(1),), chunks=(one,), blend=BlendInputs(chunks, layer)))
        assert runner.state.sequences.ids == [0]


class NoRows:
    """A source without any rows."""

    def pieces(self, layer_id: int) -> list[RowsPiece]:
        return []
