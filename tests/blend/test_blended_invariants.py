"""What holds for blended prompts of every family in the engine, beside the fixed point
(``test_blending``): rows of the first layer are right wherever a chunk stands, no row depends on
later ones, windows end where they end; and what a miss costs.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens, record
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire import LLM
from quire.base.segments import BlendParams, Segment
from quire.blend.retriever import ChunkRetriever
from quire.blend.rotation import KeyMove
from quire.ops.rope import RotaryTable
from quire.sessions.prompts import cache_key

from .test_blending import (
    BLENDABLE,
    COUNT,
    DOCUMENTS,
    QUESTION,
    SEGMENTS,
    TrueRows,
    blended,
    families,  # noqa: F401
    family,
    give,
    joined,
    loads_are_worth_it,  # noqa: F401
    told,
)

ROUNDING = 2e-5
"""Of float32 rows that were computed in products of other shapes and rotated once more, relative
to the largest element."""


def rows_of(llm: LLM, prompt: list[Any], blend: BlendParams | None) -> dict[int, tuple[Tensor, Tensor]]:
    """K and V of all rows, by layer, before windows let go of any."""
    engine, ids = engine_of(llm), joined(prompt)
    pieces = llm.requests.prepare([prompt], greedy(1)).pieces_of(0)
    wish = None if blend is None else engine.blending.wish(blend, pieces, len(ids))
    (request,) = engine.submit(np.array(ids), greedy(2), key=cache_key(None), blend=wish)
    while request.branch.computed < len(ids):
        engine.step()
    assert request.branch.seq is not None
    export, layout = engine.runner.state.open_export(request.branch.seq), engine.blending.layout
    found = {layer: layout.split(layer, export.rows(layer, 0, len(ids))) for layer in layout.layers}
    kept = {layer: (k.clone(), v.clone()) for layer, (k, v) in found.items()}
    engine.end([request])
    if blend is not None:
        assert request.branch.blend is not None
        assert request.branch.blend.left_out.any()
    return kept


def near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= ROUNDING * float(other.abs().max())


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", BLENDABLE)
def test_every_family(
    name: str,
    families: dict[str, Checkpoint],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(family(name, families, tmp_path_factory), enable_prefix_caching=False)
    engine = engine_of(llm)
    if reason := engine.blending.refusal:
        pytest.skip(reason)
    llm.warm(SEGMENTS)
    # The first layer: as far away as the model goes, where V is that of the full prompt, and K is
    # after its rotation.
    before = 200
    prompt = [random_tokens(before), SEGMENTS[0], QUESTION]
    keys = engine.blending._keys(cache_key(None), None, engine.blending.lead)
    retriever = ChunkRetriever(engine.blending.catalog, engine.blending.layout, keys, device=llm.model.device)
    task = retriever.new_request([torch.tensor(joined(prompt))], [[before]])
    places = np.arange(before, before + len(DOCUMENTS[0]))
    first = engine.blending.layout.layers[0]
    (piece,) = task.pieces(first)
    k, rope = piece.k, engine.runner.state.layer_spec(first).rope  # type: ignore[union-attr]
    if rope is not None:
        k = KeyMove(RotaryTable(rope, k.device), piece.original + np.arange(len(k)), places)(k)
    task.close()
    true_k, true_v = rows_of(llm, prompt, None)[first]
    assert near(k, true_k[places])
    assert near(piece.v, true_v[places])
    # Later tokens change no row before them, computed anew or not. Rows near a window's end are
    # held for the longest prompt that is run here.
    params = blended(0.3, select="v")
    texts = [[SEGMENTS[0], SEGMENTS[2], random_tokens(9, seed=seed)] for seed in (1, 2)]
    one, two = (rows_of(llm, text, params) for text in texts)
    at = len(joined(texts[0])) - 9
    for layer in one:
        assert near(one[layer][0][:at], two[layer][0][:at])
        assert near(one[layer][1][:at], two[layer][1][:at])
        assert not near(one[layer][1][at:], two[layer][1][at:])
    check(llm)


def test_a_window_ends_where_it_ends(
    families: dict[str, Checkpoint],  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If only the last row runs, cached rows a window and more before it are never read; the next
    one is."""
    checkpoint = family("mistral-window", families, tmp_path_factory)
    ids, begin = random_tokens(90, seed=1), 89
    llm = make_llm(checkpoint, page_size=8, enable_prefix_caching=False)
    specs = engine_of(llm).runner.model.layer_specs
    (window,) = {spec.layer_window for spec in specs}  # type: ignore[union-attr]
    assert window
    found = []
    for spoilt in (0, begin - window + 1, begin - window + 2):
        rows = TrueRows(make_llm(checkpoint), ids, np.arange(90) < begin, shift=3)
        for pieces in rows.rows.values():
            for piece in pieces:
                piece.k[:spoilt] += 3.0
                piece.v[:spoilt] -= 5.0
        with monkeypatch.context() as patch:
            give(patch, rows)
            (output,) = llm.generate(ids, greedy(1, logprobs=20), blend=blended(0.0, select="v"))
        assert told(output).blended == begin
        assert output.outputs[0].logprobs is not None
        found.append({token: one.logprob for token, one in output.outputs[0].logprobs[0].items()})
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("separator", [[], [7], [7, 8, 9]])
def test_separators_are_tokens(make_llm: MakeLLM, llama: Checkpoint, separator: list[int]) -> None:
    """Kept or left out, all computed anew is a full prefill of just these tokens."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    prompt = [SEGMENTS[0], separator, SEGMENTS[2], separator, QUESTION]
    for ratio in (1.0, 0.0):
        (output,) = llm.generate([prompt], greedy(COUNT), blend=blended(ratio))
        assert output.prompt_token_ids == joined(prompt)
        # The first one is exact, where it stands.
        assert told(output).blended + told(output).recomputed == len(DOCUMENTS[2])
        if ratio:
            assert output.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)
        llm.reset_prefix_cache()
        llm.warm(SEGMENTS)


def test_chunks_that_never_come(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline the prompt is computed in full, and nothing leaks."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    monkeypatch.setitem(ChunkRetriever.__init__.__kwdefaults__, "seconds", 0.05)
    store = engine_of(llm).blending.catalog.store
    with monkeypatch.context() as patch:
        patch.setattr(store, "get", lambda keys: [Future() for _ in keys])
        prompt = [SEGMENTS[0], SEGMENTS[1], QUESTION]
        failing, plain = llm.generate([prompt, random_tokens(30)], greedy(COUNT), blend=blended())
    assert failing.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)
    assert told(failing).blended == 0
    assert "did not come" in told(failing).reason
    assert plain.outputs[0].token_ids == llama.greedy(random_tokens(30), COUNT)
    check(llm)


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_miss_costs_next_to_nothing(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same forwards, no object asked for, and a handful of operations on its ids: fewer than
    2 % of those of a model of ten layers."""
    llm = make_llm(llama, enable_prefix_caching=False)
    llm.warm(SEGMENTS[:1])
    blending = engine_of(llm).blending
    asked: list[Any] = []
    get = blending.catalog.store.get
    monkeypatch.setattr(blending.catalog.store, "get", lambda keys: (asked.extend(keys), get(keys))[1])
    prompt, steps, operations = [SEGMENTS[2], Segment(random_tokens(90)), QUESTION], [], []
    for blend in (None, blended()):
        recorder = record(llm)
        with Operations() as counter:
            (output,) = llm.generate([prompt], greedy(1), blend=blend)
        steps.append([[len(chunk.tokens) for chunk in step.chunks] for step in recorder.forwards])
        operations.append(counter.count)
    assert told(output).blended == 0
    assert "0 tokens have a state" in told(output).reason
    assert steps[0] == steps[1]
    assert not asked
    assert 0 <= operations[1] - operations[0] <= 10, "some for a prompt, none for a layer"
