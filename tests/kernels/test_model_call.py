"""A model of joined blocks as one call, and the forwards of decodes that keep their place.

Letters: T rows, E model width, V vocabulary, S slots, N positions.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kernels.native_forms import FORMS, three_threads  # noqa: F401
from torch import Tensor

from quire.contracts.attention import Scoring
from quire.contracts.block_calls import LayerKernels, MLPParts, ModelEnds, NormWeight, Residuals, StackParts
from quire.contracts.experts import GateForm
from quire.contracts.kv_format import PlainRows
from quire.contracts.layers import FullAttention, LayerSpec, RopeSpec, WindowedAttention
from quire.contracts.linear import WeightForm
from quire.kernels.attention import cpu_calls
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.block import NativeBlocks, NativeStack, native_blocks
from quire.kernels.linear.cpu_linear import NativeLinear, NativeMap, native_linear
from quire.kernels.native_library import native_library, native_problem
from quire.kernels.rows.cpu_rows import native_rows
from quire.kv.block_calls import LayerParts
from quire.kv.state import State
from quire.ops.rope import RotaryTable
from quire.sampling.logit_edits import first_maxima
from quire.weights.packed import rows_of

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_problem())

WIDTH, INNER, HEADS, HEAD = 64, 96, 2, 16
PIECE = 4096
"""Logits of a row that one thread looks at together."""
ROPE = RopeSpec(theta=1e4, rotary_dim=HEAD)


class Small:
    """Two blocks with pools of their own, a table of tokens and a head."""

    def __init__(
        self,
        form: tuple[torch.dtype, WeightForm],
        vocabulary: int,
        tied: bool,
        shape: tuple[float, float, float | None] = (1.0, 1.0, None),
        *,
        behind: bool = False,
    ) -> None:
        """``shape``: the embedding's and the logits' factor, and the soft cap. ``behind``: norms
        are behind attention and MLP, and not before."""
        library = native_library()
        assert library is not None
        self.dtype, self.form = form
        self.generator = torch.Generator().manual_seed(vocabulary)
        self.kernel, blocks = NativeLinear(library), NativeBlocks(library)
        backend = NativeAttention()
        self.shape = shape
        whole, layers = [], []
        for _ in range(2):
            norm = NormWeight(self.drawn(WIDTH), 1e-5)
            sums = Residuals(None, norm, norm, 0.22, 0.22) if behind else Residuals(norm)
            out, mlp = self.map(WIDTH, HEADS * HEAD), (self.map(2 * INNER, WIDTH), self.map(WIDTH, INNER))
            tail = blocks.tail(out, sums, MLPParts(*mlp, GateForm("silu")))
            assert tail is not None
            block = blocks.whole(None if behind else norm, self.map((HEADS + 2) * HEAD, WIDTH), tail)
            assert block is not None
            whole.append(block)
            self.k_SHD, self.v_SHD = (torch.zeros(256, 1, HEAD, dtype=self.dtype) for _ in range(2))
            layers.append(backend.layer_part(HEADS, PlainRows(self.k_SHD, self.v_SHD), Scoring(0.25), None, None))
        self.norm, self.head = NormWeight(self.drawn(WIDTH), 1e-5), self.map(vocabulary, WIDTH)
        self.table_VE = None if tied else self.drawn(vocabulary, WIDTH)
        self.blocks, self.whole = blocks, whole
        forwards = backend.decode_forwards(HEADS, PlainRows(self.k_SHD, self.v_SHD), None, 4, ROPE)
        assert forwards is not None
        self.forwards, self.turns = forwards, RotaryTable(ROPE, torch.device("cpu"))
        places = np.array([one.place for one in layers if one is not None])
        self.parts = StackParts(places, np.full(2, forwards.place))
        self._kept = layers

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def map(self, outputs: int, inputs: int) -> NativeMap:
        weight_OI = self.drawn(outputs, inputs) * inputs**-0.5
        if (self.dtype, self.form) == (torch.float32, "bfloat16"):
            weight_OI = weight_OI.bfloat16().float()
        return self.kernel.pack(weight_OI, None, self.form)

    def stack(self) -> NativeStack:
        found = self.blocks.stack(self.whole, ModelEnds(self.table_VE, self.norm, self.head, *self.shape))
        assert found is not None
        return found

    def plan(self, lengths: list[int]) -> None:
        """Each sequence has pages of its own, which other ones do not read."""
        tables = [np.arange(16, dtype=np.int32) for _ in lengths]
        assert self.forwards.plan(
            lengths,
            [table[: length // 4 + 1] for table, length in zip(tables, lengths, strict=True)],
            self.turns.up_to(64),
        )

    def one_by_one(self, tokens: np.ndarray[Any, Any]) -> Tensor:
        rows, chosen_T = native_rows(), torch.from_numpy(tokens)
        assert rows is not None
        if self.table_VE is None:
            x_TE = rows_of(self.head.weights, chosen_T).to(self.dtype)
        else:
            x_TE = self.table_VE.index_select(0, chosen_T)
        factor, scale, cap = self.shape
        x_TE = x_TE.mul_(factor)
        logits_TV = self.head(rows.rms_norm(self.stack()(x_TE, self.parts), self.norm.weight_E, 1e-5)).float()
        logits_TV = logits_TV.mul_(scale)
        return logits_TV if cap is None else rows.soft_cap(logits_TV, cap)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("vocabulary", [7, 96, PIECE + 1, 3 * PIECE])
def test_every_number_is_that_of_the_parts(form: tuple[torch.dtype, WeightForm], vocabulary: int) -> None:
    tied = form[1] in ("float32", "bfloat16") and vocabulary % 2 == 1
    small = Small(form, vocabulary, tied)
    stack = small.stack()
    assert stack.most_tokens == 64
    for count in (1, 2, 5, 17, 64):
        tokens = np.arange(count) * 13 % vocabulary
        tokens[-1] = vocabulary - 1
        small.plan([9] * count)  # equal ones: all write the same rows
        tokens[:] = tokens[-1] if count > 1 else tokens
        found = stack.model(tokens, small.parts)
        assert torch.equal(found.logits_TV, small.one_by_one(tokens))
        assert found.maxima == first_maxima(found.logits_TV)
    with pytest.raises(IndexError, match=f"0 to {vocabulary - 1}"):
        stack.model(np.array([0, vocabulary]), small.parts)
    with pytest.raises(IndexError, match="-1"):
        stack.model(np.array([-1]), small.parts)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("vocabulary", [7, 97, PIECE + 1])
def test_scaled_and_capped_ends(form: tuple[torch.dtype, WeightForm], vocabulary: int, behind: bool) -> None:
    rows, tied = native_rows(), form[1] in ("float32", "bfloat16") and vocabulary % 4 == 1
    assert rows is not None
    for shape in ((math.sqrt(WIDTH) + 0.1, 1.0, None), (3.0, 1 / 7, None), (1.0, 1.0, 0.7), (12.0, 0.3, 0.2)):
        small = Small(form, vocabulary, tied, shape, behind=behind)
        stack = small.stack()
        for count, level in itertools.product((1, 5), (0, 1, 2)):
            rows.use_level(level)
            tokens = np.full(count, vocabulary - 1)
            small.plan([9] * count)
            found = stack.model(tokens, small.parts)
            assert torch.equal(found.logits_TV, small.one_by_one(tokens))
            assert found.maxima == first_maxima(found.logits_TV)
            assert shape[2] is None or found.logits_TV.abs().max() <= shape[2]


@pytest.mark.turns(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data())
def test_first_maxima(dtype: torch.dtype, data: st.DataObject) -> None:
    """Of equal logits the first one; none of a row that is not finite."""
    small = Small((dtype, "float32" if dtype == torch.float32 else "bfloat16"), 2 * PIECE + 37, tied=False)
    weight_OI = torch.zeros(2 * PIECE + 37, WIDTH, dtype=dtype)
    # Equal numbers times all inputs: a sum's sign and size are the same for equal rows.
    values = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 2 * PIECE + 36),
                st.sampled_from((0.0, -0.0, 1.0, 1.0, -1.0, 2.0, float("inf"), -float("inf"), float("nan"))),
            ),
            max_size=12,
        )
    )
    for place, value in values:
        weight_OI[place, 0] = value
    if data.draw(st.booleans()):
        weight_OI[:, 1] = -1.0
    small.head = small.kernel.pack(weight_OI, None, small.form)
    small.plan([3, 3])
    found = small.stack().model(np.array([5, 5]), small.parts)
    assert found.maxima == first_maxima(found.logits_TV)


def test_every_level_and_any_number_of_threads() -> None:
    rows = native_rows()
    assert rows is not None
    small = Small((torch.bfloat16, "bfloat16"), PIECE + 40, tied=True)
    small.plan([2])
    tokens, stack = np.array([77]), small.stack()
    try:
        for level in (0, 1, 2):
            rows.use_level(level)
            torch.set_num_threads(1)
            expected = small.one_by_one(tokens)
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for _ in range(20):  # threads that come early and late
                    found = stack.model(tokens, small.parts)
                    assert torch.equal(found.logits_TV, expected)
                    assert found.maxima == first_maxima(expected)
    finally:
        rows.use_level(2)


def test_ends_that_do_not_fit_leave_the_blocks() -> None:
    small, other = Small((torch.float32, "float32"), 96, False), Small((torch.bfloat16, "bfloat16"), 96, False)
    table_VE, norm, head = small.table_VE, small.norm, small.head
    assert table_VE is not None
    for ends in (
        None,
        ModelEnds(other.table_VE, norm, head),
        ModelEnds(table_VE[:, :32], norm, head),
        ModelEnds(table_VE, other.norm, head),
        ModelEnds(table_VE, NormWeight(small.drawn(32), 1e-5), head),
        ModelEnds(table_VE, norm, other.head),
        ModelEnds(table_VE, norm, small.map(96, 32)),
        ModelEnds(None, norm, small.kernel.pack(small.drawn(96, WIDTH), None, "int8")),
    ):
        stack = small.blocks.stack(small.whole, ends)
        assert stack is not None
        assert stack.most_tokens == 0


# -- forwards of decodes ---------------------------------------------------------------------------

SPECS: tuple[LayerSpec, ...] = (
    FullAttention(num_heads=HEADS, num_kv_heads=1, head_dim=HEAD, value_dim=HEAD, rope=ROPE, rope_mode="normal"),
    WindowedAttention(
        num_heads=HEADS, num_kv_heads=1, head_dim=HEAD, value_dim=HEAD, rope=ROPE, rope_mode="normal", window=24
    ),
    FullAttention(num_heads=HEADS, num_kv_heads=1, head_dim=HEAD, value_dim=HEAD),
)


class Twins:
    """Two states of the same layers: decodes of one take the place of those before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.generator = torch.Generator().manual_seed(1)
        kernels = LayerKernels(native_rows(), native_linear(), blocks=native_blocks())
        self.states = [
            State(SPECS, capacity=8192, page_size=4, backend=NativeAttention(), rows=kernels.rows) for _ in range(2)
        ]
        small = Small((torch.float32, "float32"), 96, False)
        self.stack = small.blocks.stack([*small.whole, small.whole[0]], None)
        self.layers = tuple((layer, None) for layer in range(3))
        plain = LayerParts.of_decodes
        self.kept = 0

        def of_decodes(parts: LayerParts, *given: Any) -> Any:
            found = plain(parts, *given) if parts is self.states[0].parts.paged.layer_parts else None
            self.kept += found is not None
            return found

        monkeypatch.setattr(LayerParts, "of_decodes", of_decodes)

    def forward(self, seqs: list[int], counts: list[int]) -> None:
        x_TE = torch.randn(sum(counts), WIDTH, generator=self.generator)
        outs = []
        for state in self.states:
            state.begin_forward(seqs, counts)
            parts = state.open_pass().stack_parts(self.layers, torch.float32)
            assert parts is not None
            assert self.stack is not None
            outs.append(self.stack(x_TE, parts))
            state.end_forward()
        assert torch.equal(*outs)
        for layer in range(3):
            rows = [state.parts.layer(layer) for state in self.states]
            assert torch.equal(rows[0].view.k, rows[1].view.k)
            assert torch.equal(rows[0].view.v, rows[1].view.v)

    def __getattr__(self, verb: str) -> Any:
        def both(*given: Any) -> None:
            for state in self.states:
                getattr(state, verb)(*given)

        return both


def test_decodes_in_their_place_are_those_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind prompts, forks that share pages and splits, pops, and with other sequences each time;
    with more keys and items than there was memory for at first."""
    twins = Twins(monkeypatch)
    for seq in range(3):
        twins.add_sequence(seq)
    for seq, length in enumerate((3, 40, 1)):
        twins.forward([seq], [length])
    kept = 1  # a prompt of one token
    assert twins.kept == kept
    for seqs in ([0, 1, 2], [0, 1, 2], [1], [2, 0], [0], [0], [0, 1, 2]):
        twins.forward(seqs, [1] * len(seqs))
        kept += 1
        assert twins.kept == kept
    twins.popn(1, 1)
    twins.forward([1, 0], [1, 1])
    for _ in range(20):
        twins.forward([1], [60])  # more keys than one split has
    for child in range(3, 12):
        twins.fork_sequence(1, child)
    for _ in range(6):
        twins.forward([*range(3, 12), 0], [1] * 10)
    for seq in range(3, 12):
        twins.remove_sequence(seq)
    for _ in range(3):
        twins.forward([0, 1, 2], [1, 1, 1])
    assert twins.kept == kept + 1 + 6 + 3


def test_what_is_no_plain_decode_is_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(monkeypatch)
    for seq in range(2):
        twins.add_sequence(seq)
        twins.forward([seq], [5])
    twins.forward([0, 1], [2, 1])
    monkeypatch.setattr(RotaryTable, "MAX_ROWS", 4)
    twins.forward([0, 1], [1, 1])
    monkeypatch.undo()
    twins = Twins(monkeypatch)
    monkeypatch.setattr(cpu_calls, "MOST_KEPT", 1)
    twins.add_sequence(0)
    twins.forward([0], [5])
    twins.forward([0], [1])
    assert twins.kept == 0
    state = State(SPECS, capacity=64, dtype=torch.float64, backend=NativeAttention())
    assert state.parts.paged.layer_parts is not None
    state.add_sequence(0)
    state.begin_forward([0], [1])
    assert state.open_pass().stack_parts(twins.layers, torch.float64) is None
    assert list(itertools.chain(state.open_pass().written)) == []
