"""Decoder blocks, and their ends, as one call: every number is that of the parts one by one, with
norms before and behind attention and MLP, and with scaled residuals.

Letters: T rows, E model width, F inner width, C columns of the heads.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.kernels.native_forms import FORMS, three_threads  # noqa: F401
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base.types import Add, Chunk, Inputs, Pop, Remove, Step
from quire.contracts.block_calls import MLPParts, NormWeight, Residuals
from quire.contracts.executor_calls import PrefillInput
from quire.contracts.experts import GateForm
from quire.contracts.linear import WeightForm
from quire.contracts.rows import ActivationName
from quire.kernels.block import MOST_ROWS, NativeBlock, NativeBlocks, NativeStack, NativeTail, native_blocks
from quire.kernels.linear.cpu_linear import EMULATED, NativeLinear, NativeMap
from quire.kernels.native_library import native_library, native_problem
from quire.kernels.rows.cpu_rows import NativeRows, native_rows
from quire.models.blocks import SerialBlock
from quire.models.decoder import Decoder

GREEDY = SamplingParams(temperature=0, max_tokens=12)
SHAPES = ((64, 96, 64), (48, 200, 24), (576, 1536, 576), (8, 8, 8))
"""E, F, C; few of them whole panels of 32 outputs."""
ACTIVATIONS: tuple[ActivationName, ...] = ("silu", "gelu", "gelu_tanh")
ARRANGEMENTS = ("pre", "post", "sandwich", "pre scaled", "sandwich scaled", "none")
"""Where norms are, and whether the residuals have a factor."""


@pytest.fixture
def rows() -> NativeRows:
    found = native_rows()
    if found is None:
        pytest.skip(native_problem())
    return found


class End:
    """The parts of a block's end, and their one call."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        form: tuple[torch.dtype, WeightForm],
        level: int | None = None,
        arrangement: str = "pre",
        norms: torch.dtype | None = None,
    ) -> None:
        """``norms``: dtype of their weights; None: that of the rows."""
        library = native_library()
        assert library is not None
        kernel = NativeLinear(library, level)
        width, inner, columns = shape
        self.dtype, kind = form
        self.generator = torch.Generator().manual_seed(sum(shape))

        def made(outputs: int, inputs: int, bias: bool) -> NativeMap:
            weight_OI = self.drawn(outputs, inputs) * inputs**-0.5
            if (self.dtype, kind) == (torch.float32, "bfloat16"):
                weight_OI = weight_OI.bfloat16().float()  # so that no bit is lost
            return kernel.pack(weight_OI, self.drawn(outputs) if bias else None, kind)

        self.out, self.gate_up, self.down = (
            made(width, columns, True),
            made(2 * inner, width, False),
            made(width, inner, True),
        )
        self.norm_E = self.drawn(width)
        place, scale = arrangement.split()[0], 0.22 if "scaled" in arrangement else 1.0
        inner, *behind = (NormWeight(self.drawn(width).to(norms or self.dtype), 10.0**-power) for power in (5, 2, 4))
        self.residuals = Residuals(inner if place in ("pre", "sandwich") else None, scale=scale, mlp_scale=scale)
        if place in ("post", "sandwich"):
            self.residuals = self.residuals._replace(attention_out=behind[0], mlp_out=behind[1])

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def one_by_one(self, rows: NativeRows, activation: ActivationName, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        def norm(given: NormWeight | None, y_TE: Tensor) -> Tensor:
            return y_TE if given is None else rows.rms_norm(y_TE, *given)

        mlp_in, attention_out, mlp_out, scale, _ = self.residuals
        h_TE = norm(attention_out, self.out(heads_TC))
        if mlp_in is not None:
            n_TE = rows.add_rms_norm(h_TE, x_TE, *mlp_in, scale)
        else:
            n_TE = h_TE = rows.add_scaled(h_TE, x_TE, scale)
        y_TE = norm(mlp_out, self.down(rows.gated(self.gate_up(n_TE), activation)))
        return y_TE.add_(h_TE) if scale == 1.0 else rows.add_scaled(y_TE, h_TE, scale)

    def mlp(self, activation: ActivationName) -> MLPParts:
        return MLPParts(self.gate_up, self.down, GateForm(activation))

    def joined(self, activation: ActivationName, heads_TC: Tensor, x_TE: Tensor) -> Tensor:
        library = native_library()
        assert library is not None
        call = NativeBlocks(library).tail(self.out, self.residuals, self.mlp(activation))
        assert call is not None
        assert call.takes(x_TE)
        return call(heads_TC, x_TE)


@pytest.mark.turns(4)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}-{form[1]}")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_that_of_the_parts(
    rows: NativeRows, shape: tuple[int, int, int], form: tuple[torch.dtype, WeightForm]
) -> None:
    end = End(shape, form)
    for count, activation in zip((1, 2, 5, 17, MOST_ROWS), itertools.cycle(ACTIVATIONS), strict=False):
        heads_TC, x_TE = end.drawn(count, shape[2]), end.drawn(count, shape[0])
        before = x_TE.clone()
        expected = end.one_by_one(rows, activation, heads_TC, x_TE)
        assert torch.equal(end.joined(activation, heads_TC, x_TE), expected)
        assert torch.equal(x_TE, before)
        assert expected.isfinite().all()


@pytest.mark.turns(4)
@pytest.mark.parametrize("form", [*FORMS, "wide norms"], ids=str)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_every_arrangement_is_that_of_the_parts(
    rows: NativeRows, arrangement: str, form: tuple[torch.dtype, WeightForm] | str
) -> None:
    """Also with norms in float32 of rows in bfloat16."""
    wide = torch.float32 if isinstance(form, str) else None
    for shape in SHAPES[:2]:
        end = End(
            shape, (torch.bfloat16, "bfloat16") if isinstance(form, str) else form, arrangement=arrangement, norms=wide
        )
        for count, activation in zip((1, 2, 5, 17), itertools.cycle(ACTIVATIONS), strict=False):
            heads_TC, x_TE = end.drawn(count, shape[2]), end.drawn(count, shape[0])
            expected = end.one_by_one(rows, activation, heads_TC, x_TE)
            assert torch.equal(end.joined(activation, heads_TC, x_TE), expected)
            assert expected.isfinite().all()


@pytest.mark.parametrize("arrangement", ["pre", "sandwich scaled"])
@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_every_level_and_any_number_of_threads(rows: NativeRows, rounds: int, arrangement: str) -> None:
    library = native_library()
    assert library is not None
    best = NativeLinear(library).level
    try:
        for level, rows_level, count in itertools.product((*range(best + 1), EMULATED), (0, 1, 2), (1, 4)):
            rows.use_level(rows_level)
            end = End((96, 160, 64), (torch.bfloat16, "bfloat16"), level, arrangement)
            heads_TC, x_TE = end.drawn(count, 64), end.drawn(count, 96)
            expected = end.one_by_one(rows, "silu", heads_TC, x_TE)
            for number in (1, 2, 5):
                torch.set_num_threads(number)
                for _ in range(rounds):  # threads that come early and late
                    assert torch.equal(end.joined("silu", heads_TC, x_TE), expected)
    finally:
        rows.use_level(2)


def test_what_is_no_number_stays_none(rows: NativeRows) -> None:
    end = End((64, 96, 64), (torch.float32, "float32"))
    heads_TC, x_TE = end.drawn(3, 64), end.drawn(3, 64)
    heads_TC[1, 5] = torch.nan
    found = end.joined("silu", heads_TC, x_TE)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_heads_may_be_columns_of_something_wider(rows: NativeRows) -> None:
    end = End((64, 96, 64), (torch.bfloat16, "bfloat16"))
    wide_TC, x_TE = end.drawn(4, 200), end.drawn(4, 64)
    expected = end.one_by_one(rows, "silu", wide_TC[:, 7:71].contiguous(), x_TE)
    assert torch.equal(end.joined("silu", wide_TC[:, 7:71], x_TE), expected)
    assert torch.equal(
        end.joined("silu", wide_TC[:, ::2][:, :64], x_TE), end.joined("silu", wide_TC[:, :128:2].contiguous(), x_TE)
    )


def test_parts_that_do_not_fit_are_not_joined(rows: NativeRows) -> None:
    blocks = native_blocks()
    assert blocks is not None
    one, other = End((64, 96, 64), (torch.float32, "float32")), End((48, 200, 24), (torch.float32, "float32"))
    norm = NormWeight(one.norm_E, 1e-5)
    sums = Residuals(norm)
    mlp = one.mlp("silu")
    call = blocks.tail(one.out, sums, mlp)
    assert call is not None
    assert blocks.tail(one.out, sums, mlp._replace(first=other.gate_up)) is None
    assert blocks.tail(one.out, sums, mlp._replace(down=other.down)) is None
    assert blocks.tail(other.out, sums, mlp) is None
    for weight_E in (other.norm_E, one.norm_E.bfloat16(), one.norm_E.repeat_interleave(2)[::2]):
        bad = NormWeight(weight_E, 1e-5)
        for residuals in (Residuals(bad), Residuals(norm, bad, norm), Residuals(norm, norm, bad), Residuals(None, bad)):
            assert blocks.tail(one.out, residuals, mlp) is None
        assert blocks.whole(bad, one.gate_up, call) is None
    assert blocks.whole(norm, one.gate_up, call) is not None  # any map of E inputs
    assert blocks.whole(None, one.gate_up, call) is not None
    assert blocks.whole(norm, one.down, call) is None
    assert blocks.whole(None, one.down, call) is None
    assert not call.takes(torch.zeros(MOST_ROWS + 1, 64))
    assert not call.takes(torch.zeros(0, 64))
    assert not call.takes(torch.zeros(1, 64, dtype=torch.bfloat16))
    assert not call.takes(torch.zeros(4, 128)[:, ::2])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Kind and rows of each call."""
    found: list[tuple[str, int]] = []
    for kind, verb, rows_at in (
        (NativeTail, "__call__", 1),
        (NativeBlock, "__call__", 0),
        (NativeStack, "outputs", 0),
        (NativeStack, "model", 0),
    ):
        plain = getattr(kind, verb)
        name = "model" if verb == "model" else kind.__name__

        def counted(self: Any, *given: Any, plain: Any = plain, rows_at: int = rows_at, name: str = name) -> Any:
            found.append((name, len(given[rows_at])))
            return plain(self, *given)

        monkeypatch.setattr(kind, verb, counted)
    return found


def joined_blocks(llm: LLM) -> list[SerialBlock]:
    return [block for block in llm.model.blocks if isinstance(block, SerialBlock) and block.joined is not None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_decodes_the_same_with_and_without(rows: NativeRows, dtype: str, calls: list[tuple[str, int]]) -> None:
    """Also an adapter, whose requests run the parts one by one."""
    prompts = ["def fib(n):", "class Stack:\n", "import os\n"]
    with LLM("tiny-python", dtype=dtype, adapters={"docs": "tiny-python-docstrings"}, kv_cache_memory="16MiB") as llm:
        joined = joined_blocks(llm)
        assert len(joined) == len(llm.model.blocks)
        ours = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)]
        assert calls.count(("model", 3)) >= 11
        assert {kind for kind, _ in calls} <= {"model", "NativeStack"}  # the latter for prompts
        calls.clear()
        assert isinstance(llm.model, Decoder)
        norm = llm.model.norm
        llm.model.norm = lambda x_RE: norm(x_RE)  # not that of the call
        llm.reset_prefix_cache()
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == ours
        assert calls.count(("NativeStack", 3)) >= 11
        assert {kind for kind, _ in calls} == {"NativeStack"}
        calls.clear()
        llm.model.norm, llm.model.stack = norm, None
        llm.reset_prefix_cache()
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == ours
        assert calls.count(("NativeBlock", 3)) >= 11 * len(joined)
        calls.clear()
        adapted = llm.generate(prompts[:1], GREEDY, adapter="docs")[0].outputs[0].token_ids
        assert calls == []
        for block in joined:
            block.joined = None
        llm.reset_prefix_cache()
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY)] == ours
        assert llm.generate(prompts[:1], GREEDY, adapter="docs")[0].outputs[0].token_ids == adapted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_of_blocks_are_the_same_with_and_without(rows: NativeRows, dtype: str) -> None:
    """Those that heads read, of decodes and of a prompt."""
    with LLM("tiny-python", dtype=dtype, kv_cache_memory="16MiB") as llm:
        runner, count = llm._engine.runner, len(llm.model.blocks)
        assert count > 2
        seqs = [runner.new_seq() for _ in range(3)]
        for tokens in ([5, 6, 7, 8], [9]):
            edits = tuple(Add(seq) for seq in seqs) if len(tokens) > 1 else ()
            chunks = tuple(Chunk(seq, tokens) for seq in seqs)
            wanted = runner.execute(Step(edits=edits, chunks=chunks, inputs=Inputs(hidden_states=True)))
            runner.execute(Step(edits=tuple(Pop(seq, len(tokens)) for seq in seqs)))
            for features in (tuple(range(count)), (0, count - 2), (count - 1,)):
                found = runner.execute(Step(chunks=chunks, inputs=Inputs(features=features)))
                runner.execute(Step(edits=tuple(Pop(seq, len(tokens)) for seq in seqs)))
                assert torch.equal(found.logits_RV, wanted.logits_RV)
                for block, output_TE in zip(features, found.features, strict=True):
                    assert torch.equal(output_TE, torch.cat([chunk[block] for chunk in wanted.hidden_states]))
            runner.execute(Step(chunks=chunks))
        runner.execute(Step(edits=tuple(Remove(seq) for seq in seqs)))


def test_without_the_library_blocks_run_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.build.native_blocks", lambda: None)
    with LLM("tiny-python", dtype="float32", kv_cache_memory="16MiB") as llm:
        assert joined_blocks(llm) == []


def test_windows_with_a_sink_and_captured_weights_run_the_parts(rows: NativeRows, calls: list[tuple[str, int]]) -> None:
    """The sink's queries are turned otherwise; weights are computed from queries."""
    with LLM("tiny-python", dtype="float32", kv_cache_memory="16MiB") as llm:
        with llm.session("def f(a, b):\n    return a", window=16, sink=4) as session:
            session.generate(GREEDY)
        assert {kind for kind, _ in calls} >= {"NativeTail"}
        calls.clear()
        llm.executor.prefill(PrefillInput(input_ids=torch.tensor([[1, 2, 3]]), output_attentions=True))
        assert {kind for kind, _ in calls} == {"NativeTail"}
