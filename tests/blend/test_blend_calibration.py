"""Calibration of blending: what probes find, what comes of it, what is kept, and what is not.

On the model that has to read across chunks, where the check layer decides; and on random ones, of
every kind of attention.
"""

from __future__ import annotations

import logging
import math
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from recipes.chunk_recall.task import BOS, Kind, Question, make_question
from tests.small_llms import (
    Checkpoint,
    MakeLLM,
    assert_empty,
    check,
    engine_of,
    greedy,
    make_checkpoint,
    make_family,
    random_tokens,
)

from quire import LLM, BlendParams, InvalidArgument, QualityLimits, ResourceExhausted, Segment, Unsupported
from quire.base.errors import QuireError
from quire.base.outputs import Blend, RequestOutput
from quire.base.types import Step
from quire.blend.calibration import RATIOS, TEXT_TOKENS, BlendCalibration, deviation
from quire.blend.chunk_catalog import ChunkCatalog
from quire.contracts.store import ObjectKind
from quire.engine.prompts import Pieces
from quire.sessions import blend_calibration
from quire.sessions.blend_calibration import ProbeRuns, probe_length, probes_of

MODEL = Path(__file__).resolve().parents[2] / "recipes/chunk_recall/model"
TEXT = random_tokens(200, seed=5)
DOCUMENTS = [random_tokens(length, seed=40 + length) for length in (40, 33, 52)]
PROMPT = [*map(Segment, DOCUMENTS), random_tokens(9, seed=3)]


def prompt_of(one: Question) -> list[Any]:
    return [[BOS, *one.chunks[0]], *map(Segment, one.chunks[1:]), list(one.ask)]


def told(output: RequestOutput) -> Blend:
    assert output.blend is not None
    return output.blend


@pytest.fixture(scope="module")
def recall() -> Iterator[LLM]:
    llm = LLM(MODEL, dtype="float32", device="cpu", kv_cache_memory="64MiB", max_model_len=512)
    # Whether loads are worth it depends on how busy the machine is.
    engine_of(llm).stored.is_worth = lambda tokens, nbytes: True
    yield llm
    llm.close()
    assert_empty(llm)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    rng = random.Random("calibration")
    return [make_question(rng, Kind(), hops) for hops in (1, 2) for _ in range(8)]


@pytest.fixture(scope="module")
def found(recall: LLM, questions: list[Question]) -> BlendCalibration:
    return recall.calibrate_blending([prompt_of(one) for one in questions])


@pytest.fixture
def calibrated(recall: LLM, found: BlendCalibration) -> Iterator[LLM]:
    """What a test makes of the calibration is undone."""
    engine_of(recall).blending.calibration = found
    yield recall
    engine_of(recall).blending.calibration = found
    recall.reset_prefix_cache()


# -- the model that reads across chunks ------------------------------------------------------------


def test_the_layer_that_knows_is_chosen(calibrated: LLM, found: BlendCalibration) -> None:
    assert found.layer == 2
    assert calibrated.blend_calibration == found
    assert (found.probes, found.sampled) == (16, False)
    assert [one.ratio for one in found.ratios] == [*RATIOS]
    by_name = {(one.layer, one.ratio): one for one in found.qualities}
    assert not by_name[1, 0.15].passes(QualityLimits()), "V tells nothing at layer 1 of this model"
    assert by_name[2, 0.15].passes(QualityLimits())
    assert by_name[2, 0.5].mean_kl < by_name[2, 0.15].mean_kl < by_name[2, 0.0].mean_kl
    assert by_name[1, 0.0].mean_kl > 1.0, "reuse alone"


def test_probes_are_as_far_off_as_prompts(calibrated: LLM, questions: list[Question]) -> None:
    """The same prompts, as users send them, with chunks from the store."""
    engine, some = engine_of(calibrated), questions[::4]
    prompts = [prompt_of(one) for one in some]
    calibrated.warm([Segment(chunk) for one in some for chunk in one.chunks])
    params = BlendParams(ratio=0.0, gate=False, least=16, keep=False, verify=1.0)
    outputs = calibrated.generate(prompts, greedy(1), blend=params)
    prepared, runs, largest = calibrated.requests.prepare(prompts, greedy(1)), ProbeRuns(engine), 0.0
    for number, output in enumerate(outputs):
        (probe,) = probes_of(engine, [(prepared.ids[number], prepared.pieces_of(number))], 1)
        rows = runs.rows(probe)
        asked = len(probe.ids) - probe.asks
        last = deviation(runs.full(probe).logits_QM[asked - 1 : asked], runs.blended(probe, rows, 2, 0.0)[-1:])
        divergence = told(output).divergence
        assert divergence is not None
        # Sums of float32 in other orders: one step runs several prompts.
        assert last.kl == pytest.approx(divergence, rel=1e-2, abs=1e-6)
        largest = max(largest, divergence)
    assert largest > 0.01, "reuse alone is far off"
    check(calibrated)


def test_a_target(calibrated: LLM, found: BlendCalibration, questions: list[Question]) -> None:
    prompts = [prompt_of(one) for one in questions]
    calibrated.warm([Segment(chunk) for one in questions for chunk in one.chunks])

    def run(**params: Any) -> list[Blend]:
        calibrated.reset_prefix_cache()
        calibrated.warm([Segment(chunk) for one in questions for chunk in one.chunks])
        blend = BlendParams(least=16, keep=False, verify=1.0, **params)
        return [told(output) for output in calibrated.generate(prompts, greedy(1), blend=blend)]

    target = found.at(0.15).mean_kl * 1.01
    ratio = found.ratio_for(target)
    assert ratio is not None
    assert ratio <= 0.15
    reached, stated = run(target=target), run(ratio=ratio, gate=False)
    assert [(one.blended, one.recomputed) for one in reached] == [(one.blended, one.recomputed) for one in stated]
    assert all(one.blended for one in reached)
    # The mean is that of the last tokens, and the calibration's that of two rows of a question.
    assert mean(one.divergence or 0.0 for one in reached) <= 2 * target
    for one in run(target=1e-9):
        assert (one.blended, one.recomputed) == (0, 0)
        assert "no calibrated ratio has a mean KL of at most 1e-09 nats: 16 probes" in one.reason


def test_the_gate(
    calibrated: LLM, found: BlendCalibration, questions: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    prompt = prompt_of(questions[0])
    calibrated.warm([Segment(chunk) for chunk in questions[0].chunks])
    blending, before = engine_of(calibrated).blending, len(engine_of(calibrated).blending.under_way)

    def run(**params: Any) -> Blend:
        calibrated.reset_prefix_cache()
        calibrated.warm([Segment(chunk) for chunk in questions[0].chunks])
        return told(calibrated.generate([prompt], greedy(1), blend=BlendParams(**{"least": 16, **params}))[0])

    assert run().blended > 0
    assert run(ratio=0.4).blended > 0
    assert found.at(0.15).mean_kl < found.at(0.05).mean_kl
    limits = QualityLimits(mean_kl=found.at(0.15).mean_kl, worst_agreement=0.0, equal_texts=0.0)
    blending.calibration = strict = replace(found, limits=limits)
    assert run().blended > 0
    assert run(ratio=0.3).blended > 0
    refused = run(ratio=0.06)
    assert refused.blended == 0
    assert refused.reason == f"the model's calibration refuses it: {strict.describe(found.at(0.05))}"
    assert run(ratio=0.06).blended == 0
    assert sum(refused.reason in record.message for record in caplog.records) == 1, "the log says it once"
    assert len(blending.under_way) == before, "chunks that are of no use are not computed"
    assert run(ratio=0.06, gate=False).blended > 0
    assert run(ratio=0.06, select="v").blended > 0, "the calibration does not tell of it"
    assert run(ratio=0.06, select="v", threshold=1e-9).blended > 0
    assert run(ratio=1.0).reason == "", "all of it is exact"
    # Too few equal texts close it, however small the KL.
    unequal = tuple(replace(one, equal_texts=0.85) for one in found.qualities)
    blending.calibration = replace(found, qualities=unequal)
    assert "equal texts 85% (limit 90%)" in run().reason
    # With the other check layer nothing passes.
    blending.calibration = replace(found, layer=1)
    assert "mean KL" in run(ratio=0.15).reason
    assert run(ratio=0.15, gate=False).blended > 0


def test_the_text_of_a_probe_is_the_greedy_one(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """That of a request with the same prompt, up to an end of the text, and as long as there is
    room."""
    llm = make_llm(llama)
    engine = engine_of(llm)
    runs = ProbeRuns(engine)
    (probe,) = probes_of(engine, [(np.array(TEXT), Pieces())], 1)
    (expected,) = llm.generate([probe.ids.tolist()], greedy(TEXT_TOKENS))
    answer = runs.full(probe)
    assert answer.text == expected.outputs[0].token_ids
    assert answer.logits_QM.shape[0] == len(probe.ids) - probe.asks + TEXT_TOKENS - 1
    # All rows computed anew give the same rows behind the question.
    found = deviation(answer.logits_QM, runs.blended(probe, runs.rows(probe), 1, 1.0, answer.text), TEXT_TOKENS)
    assert found.is_equal
    assert found.kl <= 1e-9
    engine.eos_ids = frozenset({answer.text[2]})
    assert runs.full(probe).text == answer.text[: answer.text.index(answer.text[2]) + 1]
    engine.max_model_len = len(probe.ids) + 1
    assert runs.full(probe).text == answer.text[:2]
    check(llm)


def test_the_check_layer_is_that_of_the_calibration(
    calibrated: LLM, found: BlendCalibration, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, layers = engine_of(calibrated), []
    blending, execute = engine.blending, engine.runner.execute

    def noted(step: Step) -> Any:
        if step.blend is not None:
            layers.append(step.blend.check_layer)
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", noted)
    calibrated.warm([Segment(chunk) for chunk in questions[0].chunks])
    for layer in (1, 3):
        calibrated.reset_prefix_cache()
        blending.calibration = replace(found, layer=layer)
        calibrated.warm([Segment(chunk) for chunk in questions[0].chunks])
        params = BlendParams(ratio=0.3, gate=False, least=16, keep=False)
        calibrated.generate([prompt_of(questions[0])], greedy(1), blend=params)
    assert layers == [1, 3]


# -- any model -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "deepseek-v2-lite"])
def test_all_rows_anew_are_a_full_computation(
    name: str, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory, make_llm: MakeLLM
) -> None:
    """Where windows let go, and of latents; and a probe leaves nothing behind."""
    made = checkpoints[name] if name in checkpoints else make_family(name, tmp_path_factory.mktemp(name))
    # Chunks that a window of 24 tokens reaches across.
    llm = make_llm(made, max_num_batched_tokens=80)
    engine = engine_of(llm)
    runs, length = ProbeRuns(engine), probe_length(engine)
    prepared = llm.requests.prepare(random_tokens(length, seed=9), greedy(1))
    (probe,) = probes_of(engine, [(prepared.ids[0], prepared.pieces_of(0))], 1)
    rows, full = runs.rows(probe), runs.full(probe).logits_QM[: length - probe.asks]
    assert full.shape[0] == length - 4 * (2 * length // 9)
    assert deviation(full, runs.blended(probe, rows, 1, 1.0)).kl <= 1e-9  # rounding of float32, squared
    assert deviation(full, runs.blended(probe, rows, 0, 0.0)).kl > 1e-6, "cached rows are read"
    check(llm)


def test_nothing_of_it_is_kept(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    """Neither in the prefix cache nor in a store, sessions or metrics of prompts."""
    llm = make_llm(llama, store=[f"file://{tmp_path}/store"])
    engine = engine_of(llm)
    put: list[ObjectKind] = []
    store = engine.stored.store
    assert store is not None
    original, store.put = store.put, lambda key, *rest, **more: put.append(key.kind) or original(key, *rest, **more)  # type: ignore[method-assign]
    for texts in (None, [TEXT], [PROMPT]):
        before = engine.snapshot()
        calibration = llm.calibrate_blending(texts, probes=2)
        assert calibration.sampled == (texts is None)
        assert calibration.probes == (2 if texts is None else 1)
        assert engine.cache is not None
        assert not engine.cache._entries
        assert engine.runner.state.empty()
        assert not engine.branches.sessions
        changed = {name for name, value in engine.snapshot().items() if value != before[name]}
        assert not {name for name in changed if not name.startswith(("quire:store_", "quire:blend_calibrated"))}
        check(llm)
    assert engine.snapshot()["quire:blend_calibrated"] == 1
    assert put == []
    assert "catalog" not in vars(engine.blending), "chunks are no matter of it"
    assert isinstance(engine.blending.catalog, ChunkCatalog)


def test_it_always_finds_the_same(make_llm: MakeLLM, llama: Checkpoint) -> None:
    one, other = (make_llm(llama).calibrate_blending(probes=2) for _ in range(2))
    assert one == other


def test_a_small_pool(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Texts are sampled a few at a time, and cached prefixes make room."""
    llm = make_llm(llama, pool=320)
    llm.generate([random_tokens(100, seed=seed) for seed in (1, 2)], greedy(1))
    expected = make_llm(llama).calibrate_blending([TEXT])
    assert llm.calibrate_blending(probes=2).probes == 2
    # Chunks of other sizes: a probe is at most what the pool holds.
    assert llm.calibrate_blending([TEXT]) == expected
    small = make_llm(llama, max_num_batched_tokens=71)
    with pytest.raises(ResourceExhausted, match=r"72 tokens at least .* 71 fit"):
        small.calibrate_blending()
    assert make_llm(llama, max_num_batched_tokens=72).calibrate_blending(probes=1).probes == 1


def test_texts_are_cut_into_probes(make_llm: MakeLLM, llama: Checkpoint) -> None:
    engine = engine_of(make_llm(llama, max_num_batched_tokens=90))
    assert probe_length(engine) == 90
    llm = make_llm(llama, max_num_batched_tokens=90)
    prepared = llm.requests.prepare(
        [random_tokens(190, seed=1), random_tokens(75, seed=2), PROMPT[:1] + PROMPT[-2:]], greedy(1)
    )
    texts = [(ids, prepared.pieces_of(number)) for number, ids in enumerate(prepared.ids)]
    texts[2] = (texts[2][0][-90:], texts[2][1])
    found = probes_of(engine, texts[:2], 9)
    assert [probe.ids.tolist() for probe in found] == [
        prepared.ids[0][:90].tolist(),
        prepared.ids[1].tolist(),
        prepared.ids[0][90:180].tolist(),
    ]
    assert (found[0].chunks, found[0].asks) == ([(20, 40), (40, 60), (60, 80)], 80)
    assert (found[1].chunks, found[1].asks) == ([(16, 32), (32, 48), (48, 64)], 64)
    assert len(probes_of(engine, texts[:2], 2)) == 2


def test_refusals(make_llm: MakeLLM, llama: Checkpoint, hybrid: Checkpoint) -> None:
    llm = make_llm(llama)
    assert llm.blend_calibration is None
    for given in (
        {"target": 0.1, "ratio": 0.15},
        {"target": 0.1, "threshold": 1.0},
        {"target": 0.1, "select": "v"},
        {"target": 0},
        {"target": -1},
        {"target": True},
        {"target": math.nan},
        {"gate": 1},
    ):
        with pytest.raises(InvalidArgument) as caught:
            BlendParams(**given)
        assert caught.value.field == next(iter(given))
    with pytest.raises(Unsupported, match="calibrate_blending") as refused:
        llm.generate([PROMPT], greedy(1), blend=BlendParams(target=0.1))
    assert refused.value.field == "target"
    for field, arguments in (
        ("texts", {"texts": "text"}),
        ("texts", {"texts": []}),
        ("probes", {"probes": 0}),
        ("limits", {"limits": 0.1}),
        ("texts.1", {"texts": [TEXT, TEXT[:71]]}),
        ("texts.0", {"texts": [[Segment(DOCUMENTS[0]), DOCUMENTS[1], [1]]]}),  # nothing stands before it
        ("texts.0", {"texts": [[[1], Segment(DOCUMENTS[0][:15]), [1]]]}),
        ("texts.0", {"texts": [[[1], Segment(TEXT), TEXT]]}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            llm.calibrate_blending(**arguments)  # type: ignore[arg-type]
        assert caught.value.field == field, arguments
    with pytest.raises(InvalidArgument):
        llm.calibrate_blending([[97]])  # no token of the model
    assert llm.blend_calibration is None
    session = llm.session(random_tokens(60))
    with pytest.raises(Unsupported, match="ratio"):
        session.edit((2, 4), mode="blend", blend=BlendParams(target=0.1))
    with pytest.raises(Unsupported, match="recurrent"):
        make_llm(hybrid).calibrate_blending()


def test_an_interrupt(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any forward: no sequence is left, and the earlier calibration stays."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        llm = make_llm(llama)
        engine = engine_of(llm)
        kept = llm.calibrate_blending([TEXT])
        execute, left = engine.runner.execute, [0]

        def interrupted(*given: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                signal.raise_signal(signal.SIGINT)
            return execute(*given)

        monkeypatch.setattr(engine.runner, "execute", interrupted)
        for forwards in (1, 2, 5, 9, 14, 23, 40, 200, 320):
            left[0] = forwards
            with pytest.raises(KeyboardInterrupt):
                llm.calibrate_blending(probes=3)
            assert engine.runner.state.empty()
            assert llm.blend_calibration == kept
            check(llm)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forward_that_fails(make_llm: MakeLLM, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(llama)
    engine = engine_of(llm)
    execute = engine.runner.execute

    def failing(step: Step) -> Any:
        if step.blend is not None:
            raise QuireError("the device is gone")
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", failing)
    with pytest.raises(QuireError, match="the device is gone"):
        llm.calibrate_blending([TEXT])
    assert engine.runner.state.empty()
    assert llm.blend_calibration is None


# -- records ---------------------------------------------------------------------------------------


def test_a_restart(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is kept by what the model is: another one, or another dtype, does not find it."""
    options: dict[str, Any] = {"store": [f"file://{tmp_path}/store"]}
    one = make_llm(llama, **options)
    one.calibrate_blending([TEXT], limits=QualityLimits(mean_kl=0.0))
    expected = one.calibrate_blending([TEXT], limits=QualityLimits(mean_kl=5.0))
    one.close()
    two = make_llm(llama, **options)
    engine_of(two).stored.is_worth = lambda tokens, nbytes: True
    assert two.blend_calibration == expected
    assert two.capabilities()["blend_calibration"] == expected.document()
    blended = BlendParams(target=1e3, least=1, keep=False)
    two.warm(PROMPT[:3])
    assert told(two.generate([PROMPT], greedy(1), blend=blended)[0]).blended > 0
    two.close()
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    for path, changes in ((other, {}), (llama, {"kv_dtype": "bfloat16"})):
        third = make_llm(path, **options, **changes)
        assert third.blend_calibration is None
        with pytest.raises(Unsupported, match="calibrate_blending"):
            third.generate([PROMPT], greedy(1), blend=blended)
        third.close()
    assert not caplog.records
    # A damaged one is not used, and says so.
    (damaged,) = (tmp_path / "store/objects").rglob("*-record-*")
    damaged.write_bytes(damaged.read_bytes().replace(b"qualities", b"qualitiez"))
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert make_llm(llama, **options).blend_calibration is None
    assert "calibration" in caplog.text


def test_the_digest_of_the_weights_waits_until_there_is_a_record(
    make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blend_calibration, "_key", pytest.fail)
    assert make_llm(llama, store=[f"file://{tmp_path}/store"]).blend_calibration is None


def test_a_store_that_cannot_be_read_is_named_first(
    make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "quire.engine"):
        assert make_llm(llama, store=[f"file://{tmp_path}/file/store"]).blend_calibration is None
    assert "the store cannot be read, so no calibration of blending is known: " in caplog.text


def test_a_state_directory_keeps_it(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    one = make_llm(llama, state_dir=tmp_path)
    expected = one.calibrate_blending([TEXT])
    one.close()
    assert make_llm(llama, state_dir=tmp_path).blend_calibration == expected
