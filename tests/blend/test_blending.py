"""Blended prompts in the engine.

``TrueRows`` gives cached rows that happen to be true, at other positions: then blending must change
nothing, whatever rows are chosen. That is the test of masks, positions, rotations and writes, for
every family. What is approximate is measured elsewhere (``bench/blend_quality.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters.test_adapters import Merged, World
from tests.small_llms import (
    BYTES_PER_TOKEN,
    Checkpoint,
    MakeLLM,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    record,
    token_ids,
)
from tests.test_parity import FAMILIES as EVERY

from quire import LLM, InvalidArgument, Session, Unsupported
from quire.base.errors import BlendLoadError
from quire.base.outputs import Blend, RequestOutput
from quire.base.segments import BlendParams, Segment, SelectName
from quire.blend.forward import BlendedForward
from quire.blend.retriever import ChunkTask
from quire.blend.rotation import KeyMove
from quire.blend.rows_task import RowsPiece
from quire.branches.move_costs import MoveCosts
from quire.contracts.model import OpenPass, RehearsalPass
from quire.engine import prompt_blend
from quire.engine.blending import Blending
from quire.engine.prompt_blend import PromptBlend
from quire.ops.rope import RotaryTable
from quire.sessions.prompts import cache_key

COUNT = 6
DOCUMENTS = [random_tokens(length, seed=40 + length) for length in (40, 33, 52, 24)]
SEGMENTS = [Segment(one) for one in DOCUMENTS]
QUESTION = random_tokens(9, seed=3)
PROMPT = [SEGMENTS[0], SEGMENTS[2], QUESTION]


def joined(parts: Sequence[Segment | list[int]]) -> list[int]:
    return [token for part in parts for token in (part.content if isinstance(part, Segment) else part)]  # type: ignore[misc]


def blended(ratio: float = 0.15, **more: Any) -> BlendParams:
    return BlendParams(**{"ratio": ratio, "least": 1, "keep": False, **more})


class TrueRows:
    """Rows of a prompt as a full computation gives them, moved by ``shift`` positions."""

    def __init__(self, llm: LLM, ids: list[int], valid: np.ndarray[Any, Any], shift: int) -> None:
        engine = engine_of(llm)
        state, (request,) = engine.runner.state, engine.submit(np.array([*ids, 0]), greedy(9))
        while request.branch.computed < len(ids):
            engine.step()
        # Before the next forward, at which windows let go of rows.
        assert request.branch.seq is not None
        export, layout = state.open_export(request.branch.seq), engine.blending.layout
        self.valid_mask = torch.from_numpy(valid.astype(np.int32))
        self.tokens_by_tier = {"memory": int(valid.sum())}
        places = np.arange(len(ids))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], valid.astype(np.int8), [0]))))
        self.rows: dict[int, list[RowsPiece]] = {}
        for layer in layout.layers:
            k, v = (x.clone() for x in layout.split(layer, export.rows(layer, 0, len(ids))))
            rope = state.layer_spec(layer).rope  # type: ignore[union-attr]
            # Each piece comes from another place.
            shifts = np.repeat(shift * np.arange(1, len(edges) + 2), np.diff([0, *edges, len(ids)]))
            if rope is not None:
                k = KeyMove(RotaryTable(rope, k.device), places, places + shifts)(k)
            k[~valid], v[~valid] = float("nan"), float("nan")
            self.rows[layer] = [
                RowsPiece(start, k[start:stop], v[start:stop], start + int(shifts[start]))
                for start, stop in edges.reshape(-1, 2).tolist()
            ]
        engine.end([request])
        engine.reset_prefix_cache()
        self.closed = 0

    def pieces(self, layer: int) -> list[RowsPiece]:
        return self.rows[layer]

    def close(self) -> None:
        self.closed += 1


def told(output: RequestOutput) -> Blend:
    assert output.blend is not None
    return output.blend


def give(monkeypatch: pytest.MonkeyPatch, rows: TrueRows) -> None:
    """Let all prompts be blended with these rows."""

    def find(self: Blending, work: Any, blend: PromptBlend) -> Any:
        return rows

    monkeypatch.setattr(Blending, "_find", find)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each rehearsal runs, from now on."""
    found: list[int] = []
    right = BlendedForward.rehearse

    def rehearse(self: BlendedForward, pass_: OpenPass) -> RehearsalPass:
        found.append(self.rehearsed.size)
        return right(self, pass_)

    monkeypatch.setattr(BlendedForward, "rehearse", rehearse)
    return found


@pytest.fixture(autouse=True)
def loads_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are depends on how busy the machine is."""
    monkeypatch.setattr(MoveCosts, "is_worth", lambda self, tokens, roads: True)


@pytest.fixture(scope="session")
def families() -> dict[str, Checkpoint]:
    return {}


def family(name: str, families: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    if name not in families:
        families[name] = make_family(name, tmp_path_factory.mktemp(name))
    return families[name]


RECURRENT = ("qwen3-next", "mamba2", "lfm2", "bamba", "falcon-h1", "granite-moe-hybrid")


def is_recurrent(name: str) -> bool:
    return any(name.startswith(one) for one in (*RECURRENT, "granitemoehybrid", "granite-hybrid"))


SHARED_ROWS = ("gemma3n", "gemma4")
"""Families whose last blocks read K and V of blocks before them."""
BLENDABLE = [name for name in EVERY if not is_recurrent(name) and name not in SHARED_ROWS]


@pytest.mark.parametrize("name", SHARED_ROWS)
def test_blocks_that_read_others_rows_are_not_blended(
    name: str, families: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory, make_llm: MakeLLM
) -> None:
    checkpoint = family(name, families, tmp_path_factory)
    llm = make_llm(checkpoint)
    recorder = record(llm)
    for call in (
        lambda: llm.generate([[SEGMENTS[0], QUESTION]], greedy(1), blend=blended()),
        lambda: llm.warm(SEGMENTS),
    ):
        with pytest.raises(Unsupported, match="some of its blocks have no keys and values of their own"):
            call()
    assert not recorder.forwards
    (output,) = llm.generate([[SEGMENTS[0], QUESTION]], greedy(COUNT))
    assert output.outputs[0].token_ids == checkpoint.greedy(joined([SEGMENTS[0], QUESTION]), COUNT)


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", BLENDABLE)
def test_true_rows_change_nothing(
    name: str,
    families: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fixed point, for each family: any valid rows, any ratio, whole or in chunks."""
    checkpoint = family(name, families, tmp_path_factory)
    ids = random_tokens(90, seed=1)
    expected = checkpoint.greedy(ids, COUNT)
    exact_TV, bound = checkpoint.exact_logits(ids)
    exact_V = exact_TV[-1].log_softmax(-1)
    # Rows that are moved there and back are rounded twice more, and so is the sum of exponentials.
    bound *= 4
    for seed, budget in ((0, 2048), (1, 17)):
        llm = make_llm(checkpoint, max_num_batched_tokens=budget, page_size=8)
        if reason := engine_of(llm).blending.refusal:
            pytest.skip(reason)
        generator = np.random.default_rng(seed)
        valid = np.repeat(generator.random(18) < 0.6, 5)
        valid[85:] = False
        rows = TrueRows(make_llm(checkpoint, max_num_batched_tokens=2048), ids, valid, shift=29 * seed)
        with monkeypatch.context() as patch:
            give(patch, rows)
            patch.setattr(prompt_blend, "MOST_ASKING", 1.0)
            rehearsals = counted(patch)
            for ratio, select in ((0.0, "v"), (0.2, "v"), (0.4, "v_or_question"), (1.0, "v")):
                params = greedy(COUNT, logprobs=10)
                (output,) = llm.generate(ids, params, blend=blended(ratio, select=select))
                assert output.outputs[0].token_ids == expected, f"{ratio} {select}: {told(output)}"
                assert output.outputs[0].logprobs is not None
                for token, one in output.outputs[0].logprobs[0].items():
                    assert abs(one.logprob - float(exact_V[token])) <= bound
                assert told(output).blended + told(output).recomputed <= valid.sum()
                assert (told(output).blended > 0) == (ratio < 1)
                check(llm)
            assert len(rehearsals) == 1 or seed == 1, "in small pieces the last one may have no choice"


def test_a_wrong_row_changes_something(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached rows are read: else the fixed point would hold for nothing."""
    ids, llm = random_tokens(90, seed=1), make_llm(llama)
    rows = TrueRows(make_llm(llama), ids, np.arange(90) < 80, shift=3)
    for pieces in rows.rows.values():
        for piece in pieces:
            piece.v[5:60] += 1.0
    give(monkeypatch, rows)
    (output,) = llm.generate(ids, greedy(COUNT), blend=blended(0.0))
    assert output.outputs[0].token_ids != llama.greedy(ids, COUNT)


def test_all_is_computed_anew(make_llm: MakeLLM, checkpoint: Checkpoint) -> None:
    """A ratio of 1 is a full computation, exact and found by others."""
    llm = make_llm(checkpoint)
    assert [one.kept for one in llm.warm(SEGMENTS)] == [len(one) for one in DOCUMENTS]
    for order in ((0, 1, 2), (2, 0, 3), (3, 3, 1)):
        prompt = [*(SEGMENTS[index] for index in order), QUESTION]
        (output,) = llm.generate([prompt], greedy(COUNT), blend=blended(1.0))
        assert output.outputs[0].token_ids == checkpoint.greedy(joined(prompt), COUNT)
        assert told(output).blended == 0
        assert told(output).exact == len(joined(prompt))
    check(llm)


def test_without_blend_segments_are_one_text(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    prompt = [SEGMENTS[1], DOCUMENTS[0][:5], SEGMENTS[2], QUESTION]
    one, two = llm.generate([prompt, joined(prompt)], greedy(COUNT))
    assert one.outputs[0].token_ids == two.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)
    assert one.blend is None
    assert one.prompt_token_ids == joined(prompt)
    assert llm.generate(prompt, greedy(COUNT))[0].prompt_token_ids == joined(prompt), (
        "a list with a segment is a prompt"
    )


def test_counters(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """What is said is what was done: budget, question, holes."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS[1:])
    prompt = [SEGMENTS[0], SEGMENTS[1], DOCUMENTS[0][:7], SEGMENTS[2], QUESTION]
    kept = len(DOCUMENTS[1]) + len(DOCUMENTS[2])
    for ratio in (0.0, 0.15, 0.5):
        llm.reset_prefix_cache()
        llm.warm(SEGMENTS[1:])
        recorder = record(llm)
        (output,) = llm.generate([prompt], greedy(1), blend=blended(ratio, select="v"))
        found = told(output)
        cached = output.num_cached_tokens
        assert found.blended + found.recomputed == kept
        assert found.recomputed == -int(-ratio * kept // 1)
        assert found.exact >= len(DOCUMENTS[0]), "what stands before the first kept row"
        assert found.by_tier == {"memory": kept}
        assert recorder.num_tokens == len(joined(prompt)) - cached
    snapshot = engine_of(llm).snapshot()
    assert snapshot["quire:blended_tokens_total"] > snapshot["quire:recomputed_tokens_total"] > 0


def test_the_exact_cache_never_finds_it(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Nor do tiers, forks are marked, and computing it again makes it exact."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    prompt = [SEGMENTS[0], SEGMENTS[1], SEGMENTS[2], QUESTION]
    ids = joined(prompt)
    (first,) = llm.generate([prompt], greedy(COUNT, n=2, temperature=0.7, seed=3), blend=blended(0.1))
    assert told(first).blended
    check(llm)
    (exact,) = llm.generate([ids], greedy(COUNT))
    assert exact.num_cached_tokens <= told(first).exact
    assert exact.outputs[0].token_ids == llama.greedy(ids, COUNT)
    assert exact.blend is None


def test_a_mixed_step(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Blended prompts beside decodes, ordinary prompts and each other: each as if it were alone."""
    prompts: list[Any] = [
        [SEGMENTS[2], SEGMENTS[0], QUESTION],
        [SEGMENTS[1], QUESTION],
        random_tokens(50, seed=9),
        [SEGMENTS[3], SEGMENTS[1], SEGMENTS[0], QUESTION],
    ]
    alone = []
    for prompt in prompts:
        llm = make_llm(llama)
        llm.warm(SEGMENTS)
        alone += llm.generate([prompt], greedy(COUNT), blend=blended(0.3))
    llm = make_llm(llama, max_num_batched_tokens=512)
    llm.warm(SEGMENTS)
    engine = engine_of(llm)
    (decoding,) = engine.submit(np.array(random_tokens(20)), greedy(20))
    engine.step()
    together = llm.generate(prompts, greedy(COUNT), blend=blended(0.3))
    assert token_ids(together) == token_ids(alone)
    assert [one.blend for one in together] == [one.blend for one in alone]
    engine.run([decoding])
    assert decoding.output.token_ids == llama.greedy(random_tokens(20), 20)
    check(llm)


def test_what_has_no_chunk_is_kept_for_later(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    engine = engine_of(llm)
    prompt = [SEGMENTS[0], SEGMENTS[1], QUESTION]
    (output,) = llm.generate([prompt], greedy(COUNT), blend=blended(keep=True))
    assert told(output).blended == 0
    assert "0 tokens have a state" in told(output).reason
    assert output.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)
    while not engine.scheduler.idle:
        engine.step()
    (output,) = llm.generate([[SEGMENTS[1], SEGMENTS[0], QUESTION]], greedy(COUNT), blend=blended(0.0))
    assert (told(output).exact, told(output).blended) == (len(DOCUMENTS[1]), len(DOCUMENTS[0]))
    assert [one.computed for one in llm.warm(SEGMENTS[:2])] == [0, 0]
    check(llm)


@pytest.mark.parametrize("select", ["v", "v_or_question"])
@pytest.mark.parametrize("how", ["raises", "lost", "short"])
def test_rows_that_do_not_come(
    make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, how: str, select: SelectName
) -> None:
    """The prompt is computed in full, others in the step too, and nothing leaks."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    right = ChunkTask.pieces

    def pieces(self: ChunkTask, layer: int) -> list[RowsPiece]:
        if layer == 1 and int(self.valid_mask.sum()) == 40 + 33:
            if how == "raises":
                raise RuntimeError("the disk is gone")
            if how == "lost":
                raise BlendLoadError("layer 1 did not come")
            return right(self, layer)[:1]
        return right(self, layer)

    monkeypatch.setattr(ChunkTask, "pieces", pieces)
    prompts = [[SEGMENTS[0], SEGMENTS[1], QUESTION], [SEGMENTS[2], SEGMENTS[3], QUESTION], random_tokens(30)]
    failing, other, plain = llm.generate(prompts, greedy(COUNT), blend=blended(0.01, select=select))
    assert failing.outputs[0].token_ids == llama.greedy(joined(prompts[0]), COUNT)  # type: ignore[arg-type]
    assert told(failing).blended == 0
    assert told(failing).reason
    assert (told(other).exact >= 52, told(other).blended) == (True, 23)
    assert plain.outputs[0].token_ids == llama.greedy(random_tokens(30), COUNT)
    check(llm)


def test_a_preempted_prompt_is_blended_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    prompt = [SEGMENTS[0], SEGMENTS[2], SEGMENTS[1], QUESTION]
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    (alone,) = llm.generate([prompt], greedy(COUNT), blend=blended(0.2))
    llm.reset_prefix_cache()
    llm.warm(SEGMENTS)
    engine = engine_of(llm)
    wish = engine.blending.wish(
        blended(0.2), llm.requests.prepare([prompt], greedy(COUNT)).pieces_of(0), len(joined(prompt))
    )
    (request,) = engine.submit(np.array(joined(prompt)), greedy(COUNT), key=cache_key(None), blend=wish)
    while len(request.output.token_ids) < 3:
        engine.step()
    engine.scheduler.preempt(request)
    check(llm)
    engine.run([request])
    assert request.output.token_ids == alone.outputs[0].token_ids
    assert not request.branch.origin.exact
    check(llm)


def test_a_cancelled_prompt_leaves_nothing(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, max_num_batched_tokens=16)
    llm.warm(SEGMENTS)
    engine = engine_of(llm)
    prompt = [SEGMENTS[0], SEGMENTS[2], SEGMENTS[1], QUESTION]
    wish = engine.blending.wish(
        blended(0.2), llm.requests.prepare([prompt], greedy(1)).pieces_of(0), len(joined(prompt))
    )
    (request,) = engine.submit(
        np.array(joined(prompt)), greedy(COUNT), key=cache_key(None), blend=wish, request_id="one"
    )
    engine.step()
    engine.step()
    assert wish is not None
    assert wish.task is not None
    assert 0 < request.branch.computed < len(joined(prompt))
    engine.cancel("one")
    engine.step()
    assert request.output.finish_reason == "cancelled"
    assert wish.task is None
    check(llm)
    (output,) = llm.generate([joined(prompt)], greedy(COUNT))
    assert output.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)


def test_the_question_always_runs(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Also if it is a known text itself."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    (output,) = llm.generate([[SEGMENTS[1], SEGMENTS[0], SEGMENTS[2]]], greedy(1), blend=blended(0.0))
    assert (told(output).exact, told(output).blended) == (len(DOCUMENTS[1]), len(DOCUMENTS[0]))
    # Without pieces everything may be reused but the last token.
    (output,) = llm.generate([joined(SEGMENTS[1:3])], greedy(1), blend=blended(0.0))
    assert told(output).blended == len(DOCUMENTS[1]) + len(DOCUMENTS[2]) - 1 - output.num_cached_tokens


def test_verification(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A share of the prompts is computed in full too; the report says how far off logits were."""
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    prompts = [[SEGMENTS[a], SEGMENTS[b], QUESTION] for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))]
    params = greedy(1, logprobs=97)
    outputs = llm.generate(prompts, params, blend=blended(0.1, verify=0.5))
    measured = [one for one in outputs if told(one).divergence is not None]
    assert len(measured) == 2
    for output in measured:
        assert output.outputs[0].logprobs is not None
        full = llama.logits(output.prompt_token_ids)[-1].double().log_softmax(-1)
        found = torch.tensor([output.outputs[0].logprobs[0][token].logprob for token in range(97)]).double()
        # Sums of 97 float32 log-probabilities of two implementations.
        assert told(output).divergence == pytest.approx(float((full.exp() * (full - found)).sum()), rel=1e-3, abs=1e-6)
    assert engine_of(llm).snapshot()["quire:blend_divergence_nats_count"] == 2
    (exact,) = llm.generate([prompts[0]], greedy(1), blend=blended(1.0, verify=1.0))
    assert told(exact).divergence is None, "nothing is off"
    check(llm)


def test_what_costs_more_than_it_saves(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    asked: list[tuple[float, dict[str, int]]] = []

    def is_worth(tokens: float, nbytes: dict[str, int]) -> bool:
        asked.append((tokens, nbytes))
        return False

    engine_of(llm).stored.is_worth = is_worth
    prompt = [SEGMENTS[0], SEGMENTS[1], QUESTION]
    (output,) = llm.generate([prompt], greedy(COUNT), blend=blended(0.0))
    assert "takes longer" in told(output).reason
    assert asked[-1] == (73.0, {"memory": 73 * BYTES_PER_TOKEN})
    assert output.outputs[0].token_ids == llama.greedy(joined(prompt), COUNT)


def test_salts_and_adapters_keep_their_own(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    llm.warm(SEGMENTS, cache_salt="a")
    prompt = [SEGMENTS[0], SEGMENTS[1], QUESTION]
    for salt, found in (("b", 0), (None, 0), ("a", 33)):
        (output,) = llm.generate([prompt], greedy(1), blend=blended(0.0), cache_salt=salt)
        assert told(output).blended == found


def test_adapters_in_one_step(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Each prompt has its own adapter's chunks, and rows that go on keep their adapters."""
    merged = Merged(llama)

    def run(names: Sequence[str | None], ratio: float) -> list[tuple[list[int], Blend]]:
        world = World.of(make_llm(llama), merged)
        engine, requests = world.engine, []
        for name in (None, "one"):
            warming = engine.submit_chunks(
                [np.array(one) for one in DOCUMENTS], key=cache_key(None), adapter=world.ids.get(name or "")
            )
            engine.run([request for _, found in warming for request in found])
        for name in names:
            pieces = world.llm.requests.prepare([PROMPT], greedy(1)).pieces_of(0)
            wish = engine.blending.wish(blended(ratio), pieces, len(joined(PROMPT)))
            requests += engine.submit(
                np.array(joined(PROMPT)),
                greedy(COUNT),
                key=cache_key(None),
                adapter=world.ids.get(name or ""),
                blend=wish,
            )
        engine.run(requests)
        for name, request in zip(names, requests, strict=True):
            if ratio == 1.0:
                ids = joined(PROMPT)
                assert world.continues(ids, [name] * len(ids), request.output.token_ids, name)
        check(world.llm)
        return [
            (one.output.token_ids, one.branch.blend.report(one.branch))
            for one in requests
            if one.branch.blend is not None
        ]

    names = ("one", None, "two", "one")
    run(names, 1.0)
    together = run(names, 0.2)
    assert [report.blended > 0 for _, report in together] == [True, True, False, True]
    assert together[:3] == [run([name], 0.2)[0] for name in names[:3]]
    assert together[0] != together[1]


def test_a_restart(llama: Checkpoint, tmp_path: Path, make_llm: MakeLLM) -> None:
    """Chunks are in durable tiers too."""
    store = [f"file://{tmp_path}/store"]
    prompt = [SEGMENTS[2], SEGMENTS[0], QUESTION]
    one = make_llm(llama, store=store)
    one.warm(SEGMENTS)
    expected = one.generate([prompt], greedy(COUNT), blend=blended())
    assert engine_of(one).flush(30)
    one.close()
    two = make_llm(llama, store=store, host_memory=0)
    found = two.generate([prompt], greedy(COUNT), blend=blended())
    assert token_ids(found) == token_ids(expected)
    assert told(found[0]).by_tier == {"disk": 92}


def test_refusals(make_llm: MakeLLM, llama: Checkpoint, hybrid: Checkpoint) -> None:
    llm = make_llm(llama)
    for name, value in (("ratio", 1.5), ("ratio", True), ("verify", -1), ("select", "best"), ("least", 0), ("keep", 1)):
        with pytest.raises(InvalidArgument) as caught:
            BlendParams(**{name: value})
        assert caught.value.field == name
    with pytest.raises(InvalidArgument, match="only orders"):
        BlendParams(select="v_or_question", threshold=0.5)
    with pytest.raises(InvalidArgument, match="blend"):
        llm.generate([SEGMENTS], blend=0.15)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"prompt\.1"):
        llm.generate([[SEGMENTS[0], 5]])  # type: ignore[list-item]
    with pytest.raises(InvalidArgument, match="segments"):
        llm.warm("text")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="prompt_logprobs"):
        llm.generate([[*SEGMENTS, QUESTION]], greedy(1, prompt_logprobs=1), blend=blended())
    other = make_llm(hybrid)
    recorder = record(other)
    for call in (
        lambda: other.generate([[SEGMENTS[0], QUESTION]], greedy(1), blend=blended()),
        lambda: other.warm(SEGMENTS),
        lambda: other.session(DOCUMENTS[0]).edit((2, 5), mode="blend"),
    ):
        with pytest.raises(Unsupported, match="recurrent"):
            call()
    assert not recorder.forwards or recorder.num_tokens <= len(DOCUMENTS[0])
    (output,) = other.generate([[SEGMENTS[0], QUESTION]], greedy(COUNT))
    assert output.outputs[0].token_ids == hybrid.greedy(joined([SEGMENTS[0], QUESTION]), COUNT)


def test_threads_end(llama: Checkpoint, make_llm: MakeLLM) -> None:
    before = {thread.name for thread in threading.enumerate()}
    llm = make_llm(llama)
    llm.warm(SEGMENTS)
    llm.generate([[*SEGMENTS, QUESTION]], greedy(1), blend=blended())
    llm.close()
    left = {thread.name for thread in threading.enumerate() if thread.is_alive()} - before
    assert not {name for name in left if "chunk" in name}


# -- edits -----------------------------------------------------------------------------------------


def test_a_blended_edit_with_all_anew_is_exact(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    ids = random_tokens(120, seed=8)
    session = llm.session(ids)
    report = session.edit((20, 45), [7, 8, 9], mode="blend", blend=blended(1.0))
    assert report.exact
    assert session.exact
    assert report.blended == 0
    wanted = [*ids[:20], 7, 8, 9, *ids[45:]]
    assert session.tokens == wanted
    assert session.generate(greedy(COUNT)).outputs[0].token_ids == llama.greedy(wanted, COUNT)
    check(llm)


def test_a_blended_edit_is_marked(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama)
    ids = random_tokens(160, seed=8)
    session = llm.session(ids)
    recorder = record(llm)
    report = session.edit((20, 45), mode="blend", blend=blended(0.1))
    assert not report.exact
    assert not session.exact
    assert report.blended > 60
    assert report.removed == 25
    assert report.added == 0
    assert recorder.num_tokens == 160 - 25 - 20 - 1
    assert session.tokens == [*ids[:20], *ids[45:]]
    answer = session.generate(greedy(COUNT)).outputs[0].token_ids
    fork = session.fork()
    assert not fork.exact
    session.save(tmp_path / "one.quire")
    assert not llm.load_session(tmp_path / "one.quire").exact
    (fresh,) = llm.generate([[*ids[:20], *ids[45:]]], greedy(COUNT))
    assert fresh.num_cached_tokens <= (session._branch.origin.inexact_from or 0)
    assert fresh.outputs[0].token_ids == llama.greedy([*ids[:20], *ids[45:]], COUNT)
    fork.rewind(to=15)
    assert fork.exact
    # What is approximate is not moved once more.
    again = session.edit((5, 8), mode="blend", blend=blended(0.0))
    assert again.blended <= 20
    assert len(answer) == COUNT
    check(llm)


def test_an_edit_whose_rows_are_true(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Tokens that are replaced by the same ones: every row is true, and stays at its place."""
    llm = make_llm(llama, enable_prefix_caching=False)
    ids = random_tokens(120, seed=8)
    session = llm.session(ids)
    report = session.edit((20, 45), ids[20:45], mode="blend", blend=blended(0.0))
    assert report.blended > 0
    assert session.generate(greedy(COUNT)).outputs[0].token_ids == llama.greedy(ids, COUNT)


WINDOWED = [name for name in BLENDABLE if any(one in name for one in ("window", "gemma2", "gemma3", "gpt-oss"))]


def held_from(session: Session) -> int:
    """The first of the last tokens that all layers hold."""
    state = session._engine.runner.state
    assert session._branch.seq is not None
    export = state.open_export(session._branch.seq)
    return max(export.held(layer)[-1].start for layer in session._engine.blending.layout.layers)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", WINDOWED)
def test_edits_of_models_with_windows(
    name: str,
    families: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What windows hold is kept, and what they let go of is run again. True rows change nothing:
    the mask, and which rows stand where, are right."""
    monkeypatch.setattr("quire.engine.blending.ASKING", 2)  # windows are shorter than what else runs
    checkpoint = family(name, families, tmp_path_factory)
    ids = random_tokens(90, seed=8)
    exact_TV, bound = checkpoint.exact_logits(ids)
    for ratio, budget in ((0.0, 2048), (0.5, 17)):
        llm = make_llm(checkpoint, enable_prefix_caching=False, page_size=8, max_num_batched_tokens=budget)
        session = llm.session(ids)
        session.logits()
        held = held_from(session)
        assert 70 < held < 90
        report = session.edit((10, 20), ids[10:20], mode="blend", blend=blended(ratio))
        # The span's rows are no longer there either, so those before it run again too.
        assert report.released == held - 20
        assert report.replayed >= 10 + report.released
        is_far = {spec.kind for spec in engine_of(llm).runner.model.layer_specs} == {"window"}
        assert (report.blended > 0) == (not is_far)
        assert float((session.logits().double() - exact_TV[-1]).abs().max()) <= 4 * bound
        assert session.generate(greedy(COUNT)).outputs[0].token_ids == checkpoint.greedy(ids, COUNT)
        check(llm)
    # Another text before what is kept: all anew is exact, and otherwise it is marked.
    for ratio in (0.0, 1.0):
        session = make_llm(checkpoint, page_size=8).session(ids)
        report = session.edit((8, 12), [7, 8], mode="blend", blend=blended(ratio))
        wanted = [*ids[:8], 7, 8, *ids[12:]]
        assert session.tokens == wanted
        assert report.released == 0, "in one forward nothing has left yet"
        assert report.exact == session.exact == (ratio == 1)
        assert (report.blended > 0) == (ratio == 0)
        if ratio:
            assert session.generate(greedy(COUNT)).outputs[0].token_ids == checkpoint.greedy(wanted, COUNT)
        check(llm)


def test_what_no_window_saw_is_exact(
    families: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all layers have windows, tokens that many windows behind a span have read nothing of it:
    they are kept, nothing of the budget is theirs, and the session stays exact."""
    monkeypatch.setattr("quire.engine.blending.ASKING", 2)
    checkpoint = family("mistral-window", families, tmp_path_factory)
    llm = make_llm(checkpoint, page_size=8)
    specs = engine_of(llm).runner.model.layer_specs
    reach = sum(spec.layer_window - 1 for spec in specs)  # type: ignore
    ids = random_tokens(80, seed=8)
    for ratio in (0.0, 0.5):
        session = llm.session(ids)
        session.logits()
        stop = held_from(session) - reach
        assert stop > 3
        wanted = [*ids[: stop - 3], 5, *ids[stop:]]
        report = session.edit((stop - 3, stop), [5], mode="blend", blend=blended(ratio))
        assert (report.exact, report.blended, report.released) == (True, 0, reach)
        assert session.generate(greedy(COUNT)).outputs[0].token_ids == checkpoint.greedy(wanted, COUNT)
        session = make_llm(checkpoint, page_size=8).session(ids)
        report = session.edit((stop - 3, stop), [5], mode="blend", blend=blended(ratio))
        assert report.released == 0
        assert report.blended == (reach if not ratio else reach // 2)
    check(llm)


@pytest.mark.turns(6)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek-v3"])
@pytest.mark.parametrize("select", ["v", "v_or_question"])
def test_edits_of_sessions_with_a_window(
    name: str,
    select: SelectName,
    families: dict[str, Checkpoint],
    tmp_path_factory: pytest.TempPathFactory,
    make_llm: MakeLLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sink is read at relative positions by the tokens that run, too."""
    monkeypatch.setattr("quire.engine.blending.ASKING", 2)
    checkpoint = family(name, families, tmp_path_factory)
    llm = make_llm(checkpoint, enable_prefix_caching=False, page_size=8)
    ids, options = random_tokens(90, seed=8), {"window": 40, "sink": 3}
    fresh = llm.session(ids, **options)  # type: ignore[arg-type]
    wanted, answer = fresh.logits(), fresh.generate(greedy(COUNT)).outputs[0].token_ids
    bound = 4 * checkpoint.exact_logits(ids)[1]
    for ratio in (0.0, 0.4, 1.0):
        session = llm.session(ids, **options)  # type: ignore[arg-type]
        session.logits()
        report = session.edit((10, 20), ids[10:20], mode="blend", blend=blended(ratio, select=select))
        assert report.released > 0
        assert (report.blended > 0) == (ratio < 1)
        assert session.window == (40, 3)
        assert float((session.logits() - wanted).abs().max()) <= bound
        assert session.generate(greedy(COUNT)).outputs[0].token_ids == answer
    check(llm)


def test_blend_is_for_the_mode_blend(make_llm: MakeLLM, llama: Checkpoint) -> None:
    session = make_llm(llama).session(random_tokens(60))
    with pytest.raises(InvalidArgument, match="blend"):
        session.edit((2, 4), blend=blended())
