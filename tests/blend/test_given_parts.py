"""A retriever and an executor of a program's own, in place of the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens
from torch import Tensor

from quire import LLM, InvalidArgument, Segment
from quire.base.errors import BlendLoadError
from quire.blend import BlendOutput, BlendPolicy, BlendRetrieverResult, TensorBlender

from .test_blending import TrueRows, blended, told

DOCUMENTS = [random_tokens(length, seed=70 + length) for length in (40, 33, 52)]
QUESTION = random_tokens(9, seed=4)
PROMPT = [*map(Segment, DOCUMENTS), QUESTION]
IDS = [token for part in (*DOCUMENTS, QUESTION) for token in part]
DOCUMENTS_END = len(IDS) - len(QUESTION)


class TrueTask:
    """Cached rows that happen to be true, behind the published interface."""

    def __init__(self, rows: TrueRows, order: str, broken: bool) -> None:
        self._rows, self._order, self._broken = rows, order, broken
        self.valid_mask = rows.valid_mask
        self.closed = 0

    def result(self, layer_id: int) -> BlendRetrieverResult:
        if self._broken:
            raise BlendLoadError("the shelf is empty", {0})
        pieces = self._rows.pieces(layer_id)
        k, v = (torch.full((len(IDS), *x.shape[1:]), torch.nan) for x in (pieces[0].k, pieces[0].v))
        origins = torch.zeros(len(IDS), dtype=torch.int64)
        for one in pieces:
            span = slice(one.start, one.start + len(one.k))
            k[span], v[span] = one.k, one.v
            origins[span] = torch.arange(one.original, one.original + len(one.k))
        if self._order == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        return BlendRetrieverResult(k, v, self.valid_mask, origins)

    def close(self) -> None:
        self.closed += 1


class TrueRetriever:
    def __init__(self, order: str = "NHD", broken: bool = False) -> None:
        self.order, self.broken = order, broken
        self.rows: TrueRows | None = None
        self.tasks: list[TrueTask] = []
        self.asked: list[tuple[list[int], list[int]]] = []

    def new_request(self, full_prompts: Sequence[Tensor], indices: Sequence[Sequence[int]]) -> TrueTask:
        self.asked += [(ids.tolist(), list(marks)) for ids, marks in zip(full_prompts, indices, strict=True)]
        assert self.rows is not None
        self.tasks.append(TrueTask(self.rows, self.order, self.broken))
        return self.tasks[-1]


class SixFields:
    """The published executor: it has ``blend`` alone and returns six fields."""

    def __init__(self, inner: TensorBlender, drop: int | None = None) -> None:
        self.inner, self.drop = inner, drop
        self.layers: list[tuple[int, int]] = []

    def blend(self, layer_id: int, *given: Any) -> BlendOutput:
        out = self.inner.blend(layer_id, *given)
        self.layers.append((layer_id, len(out.local_indices)))
        kept = out.local_indices if self.drop is None else out.local_indices[: self.drop]
        return BlendOutput(out.q, out.k, out.v, out.positions, kept, out.query_start_loc)


def with_rows(llm: LLM, retriever: TrueRetriever) -> LLM:
    valid = np.arange(len(IDS)) < DOCUMENTS_END
    retriever.rows = TrueRows(llm, IDS, valid, 500)
    return llm


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_retriever_of_ones_own(make_llm: MakeLLM, llama: Checkpoint, order: str) -> None:
    """It is asked for the whole prompt and its segments, and what it gives is what is blended."""
    retriever = TrueRetriever(order)
    llm = with_rows(make_llm(llama, blend_retriever=retriever), retriever)
    (output,) = llm.generate([PROMPT], greedy(6), blend=blended(0.1))
    assert output.outputs[0].token_ids == llama.greedy(IDS, 6)
    assert retriever.asked == [(IDS, [40, 73, 125])]
    assert told(output).blended == DOCUMENTS_END - told(output).recomputed > 0
    assert told(output).by_tier == {"retriever": DOCUMENTS_END}
    assert [task.closed for task in retriever.tasks] == [1]
    check(llm)


def test_rows_that_the_retriever_does_not_bring(make_llm: MakeLLM, llama: Checkpoint) -> None:
    retriever = TrueRetriever(broken=True)
    llm = with_rows(make_llm(llama, blend_retriever=retriever), retriever)
    (output,) = llm.generate([PROMPT], greedy(6), blend=blended(0.1))
    assert output.outputs[0].token_ids == llama.greedy(IDS, 6)
    assert told(output).blended == 0
    assert "did not come" in told(output).reason
    check(llm)


@pytest.mark.parametrize("verb", ["result", "close"])
def test_a_retriever_that_fails_ends_no_request(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Neither its own, nor one beside it in the step; nothing of them is left."""

    def fail(*_: object) -> None:
        raise ConnectionError("the shelf is far away")

    monkeypatch.setattr(TrueTask, verb, fail)
    retriever = TrueRetriever()
    llm = with_rows(make_llm(llama, blend_retriever=retriever), retriever)
    found = llm.generate([PROMPT, QUESTION], greedy(6), blend=blended(0.1))
    assert [one.outputs[0].token_ids for one in found] == [llama.greedy(ids, 6) for ids in (IDS, QUESTION)]
    assert ("did not come" in told(found[0]).reason) is (verb == "result")
    check(llm)


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "heads": lambda k, v, origins: (k[:, :1], v[:, :1], origins),
    "columns": lambda k, v, origins: (k[..., 1:], v, origins),
    "tokens": lambda k, v, origins: (k, v[1:], origins),
    "whole numbers": lambda k, v, origins: (k.nan_to_num().long(), v, origins),
    "negative positions": lambda k, v, origins: (k, v, origins - 5000),
    "few positions": lambda k, v, origins: (k, v, origins[1:]),
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_of_another_form(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They end no request, and are not reused."""
    retriever, result = TrueRetriever(), TrueTask.result

    def wrong(task: TrueTask, layer_id: int) -> BlendRetrieverResult:
        found = result(task, layer_id)
        assert found.k is not None
        assert found.v is not None
        k, v, origins = WRONG[name](found.k, found.v, found.original_positions)
        return BlendRetrieverResult(k, v, found.valid_mask, origins)

    monkeypatch.setattr(TrueTask, "result", wrong)
    llm = with_rows(make_llm(llama, blend_retriever=retriever), retriever)
    (output,) = llm.generate([PROMPT], greedy(6), blend=blended(0.1))
    assert output.outputs[0].token_ids == llama.greedy(IDS, 6)
    assert told(output).blended == 0
    assert "did not come" in told(output).reason
    check(llm)


def test_an_executor_of_ones_own(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """It is called for each layer, and the rows that it keeps are those that run."""
    retriever = TrueRetriever()
    plain = make_llm(llama)
    specs = engine_of(plain).runner.model.layer_specs
    executor = SixFields(TensorBlender(BlendPolicy(ratio=0.1, layers=(1,), min_tokens=0), specs))
    llm = with_rows(make_llm(llama, blend_retriever=retriever, blend_executor=executor), retriever)
    (output,) = llm.generate([PROMPT], greedy(6), blend=blended(0.9))
    assert output.outputs[0].token_ids == llama.greedy(IDS, 6)
    kept = -(-DOCUMENTS_END // 10) + len(QUESTION)
    assert executor.layers[: len(specs)] == [(0, len(IDS)), *((layer, kept) for layer in range(1, len(specs)))]
    assert told(output).blended == len(IDS) - kept
    check(llm)


def test_a_step_of_blended_and_other_prompts(make_llm: MakeLLM, llama: Checkpoint) -> None:
    retriever = TrueRetriever()
    specs = engine_of(make_llm(llama)).runner.model.layer_specs
    executor = TensorBlender(BlendPolicy(min_tokens=0), specs)
    llm = with_rows(make_llm(llama, blend_retriever=retriever, blend_executor=executor), retriever)
    session, other = llm.session(random_tokens(20, seed=9)), random_tokens(30, seed=10)
    outputs = llm.generate([session, PROMPT], greedy(4), blend=blended(0.2))
    assert outputs[0].outputs[0].token_ids == llama.greedy(random_tokens(20, seed=9), 4)
    assert outputs[1].outputs[0].token_ids == llama.greedy(IDS, 4)
    assert told(outputs[1]).blended
    (plain,) = llm.generate([other], greedy(4))
    assert plain.outputs[0].token_ids == llama.greedy(other, 4)


def test_an_output_that_drops_a_row_that_must_run(make_llm: MakeLLM, llama: Checkpoint) -> None:
    retriever = TrueRetriever()
    specs = engine_of(make_llm(llama)).runner.model.layer_specs
    executor = SixFields(TensorBlender(BlendPolicy(layers=(1,), min_tokens=0), specs), drop=5)
    llm = with_rows(make_llm(llama, blend_retriever=retriever, blend_executor=executor), retriever)
    (output,) = llm.generate([PROMPT], greedy(4), blend=blended(0.1))
    assert output.outputs[0].finish_reason == "error"
    assert "blend_executor.local_indices" in str(output.outputs[0].error)
    (plain,) = llm.generate([IDS], greedy(4))
    assert plain.outputs[0].token_ids == llama.greedy(IDS, 4)
    check(llm)


@pytest.mark.parametrize(("name", "verb"), [("blend_retriever", "new_request"), ("blend_executor", "blend")])
def test_parts_without_their_verb_are_refused(name: str, verb: str) -> None:
    with pytest.raises(InvalidArgument, match=verb) as refused:
        LLM("no such model", **{name: object()})  # type: ignore[arg-type]
    assert refused.value.field == name
