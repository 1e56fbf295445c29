"""Image and audio embeddings at placeholders, against transformers with ``inputs_embeds``."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executor.conftest import (
    VOCAB,
    WIDTH,
    Tiny,
    assert_close,
    inputs,
    make_executor,
    refused,
    some_ids,
    token,
)
from torch import Tensor

from quire.base.errors import Cancelled, InvalidArgument, ResourceExhausted, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.branches.row_media import image_blocks, image_mask
from quire.contracts.executor import (
    AUDIO_PLACEHOLDER,
    END_OF_AUDIO,
    END_OF_IMAGE,
    VISION_PLACEHOLDER,
    AudioData,
    ExecutorInputs,
    TextData,
    VisionData,
)
from quire.executor.executor import Executor
from quire.executor.forward_packing import pack
from quire.executor.llm_executor import LlmExecutor


def rows_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)) * 0.5


def given_inputs(
    *rows: list[int],
    lengths: tuple[int, ...] | None = None,
    vision: VisionData | None = None,
    audio: AudioData | None = None,
) -> ExecutorInputs:
    return ExecutorInputs(text=TextData(token_ids=torch.tensor(rows), row_lengths=lengths), vision=vision, audio=audio)


def oracle(tiny: Tiny, ids: list[int], embeddings: Tensor, seen: Tensor | None = None) -> Tensor:
    """Logits ``[S, V]`` where the negative ids are the rows of ``embeddings``; ``seen``: bool ``[S,
    S]``.
    """
    x_SE = tiny.model.embed(torch.tensor(ids).clamp_min(0)).clone()
    x_SE[torch.tensor(ids) < 0] = embeddings
    mask = None if seen is None else seen[None, None].float().log()
    with torch.no_grad():
        return tiny.reference(inputs_embeds=x_SE[None], attention_mask=mask).logits[0]


@pytest.mark.parametrize("chunk", [0, 1, 3])
def test_rows_stand_at_their_placeholders(tiny: Tiny, chunk: int) -> None:
    ex = make_executor(tiny, prefill_chunk_size=chunk)
    llm = LlmExecutor(ex)
    images, sounds, end_of_image, end_of_sound = rows_of(4), rows_of(5, 1), rows_of(1, 2)[0], rows_of(1, 3)[0]
    a = [5, VISION_PLACEHOLDER, VISION_PLACEHOLDER, END_OF_IMAGE, 7, AUDIO_PLACEHOLDER, 3, END_OF_IMAGE]
    b = [AUDIO_PLACEHOLDER, AUDIO_PLACEHOLDER, END_OF_AUDIO, VISION_PLACEHOLDER, 2, VISION_PLACEHOLDER]
    vision = VisionData(embeddings=images, end_embedding=end_of_image)
    audio = AudioData(embeddings=sounds, valid_tokens=3, end_embedding=end_of_sound)
    cache = llm.create_kv_cache(batch_size=2)
    llm.prefill(given_inputs(a, [*b, 0, 0], lengths=(8, 6), vision=vision, audio=audio), cache)
    assert cache.lengths == (8, 6)
    logits = llm.step(inputs([9], [4]), cache)
    end = end_of_image[None]
    assert_close(logits[0], oracle(tiny, [*a, 9], torch.cat((images[:2], end, sounds[:1], end)))[-1:])
    expected = oracle(tiny, [*b, 4], torch.cat((sounds[1:3], end_of_sound[None], images[2:])))
    assert_close(logits[1], expected[-1:])


def test_a_row_of_the_table_is_the_token(tiny: Tiny, executor: Executor) -> None:
    ids = some_ids(9)
    llm = LlmExecutor(executor)
    cache = llm.create_kv_cache()
    table = tiny.model.embed(torch.tensor(ids[3:6])).to(torch.bfloat16).float()
    llm.prefill(inputs(ids[:2]), cache)
    llm.prefill(given_inputs([ids[2], -1, -1, -1, *ids[6:]], vision=VisionData(embeddings=table)), cache)
    expected = oracle(tiny, [*ids[:3], -1, -1, -1, *ids[6:], 8], table)
    assert_close(llm.step(inputs([8]), cache)[0], expected[-1:])
    # bfloat16 holds the same numbers, and a rewind into the image runs it anew.
    again = VisionData(embeddings=table[1:].to(torch.bfloat16))
    llm.prefill(
        ExecutorInputs(text=TextData(token_ids=torch.tensor([[-1, -1, *ids[6:]]])), vision=again, next_position=4),
        cache,
    )
    assert_close(llm.step(inputs([8]), cache)[0], expected[-1:])


@pytest.mark.parametrize("chunk", [0, 1, 4, 5, 7])
def test_an_image_may_see_all_of_itself(tiny: Tiny, chunk: int) -> None:
    """Whatever the chunks: a forward is never cut inside of an image."""
    ids = [5, 6, -1, -1, -1, -1, 9, -1, -1, 3]
    images = rows_of(6)
    seen = torch.ones(len(ids) + 3, len(ids) + 3).tril().bool()
    seen[4:8, 4:8] = seen[9:11, 9:11] = True
    ex = make_executor(tiny, prefill_chunk_size=chunk)
    llm = LlmExecutor(ex)
    cache = llm.create_kv_cache(batch_size=2)
    both = VisionData(embeddings=torch.cat((images, images[:6])), bidirectional=True)
    llm.prefill(inputs([1, 2], [1, 2]), cache)
    llm.prefill(given_inputs(ids, ids, vision=both), cache)
    logits = llm.step(inputs([8], [8]), cache)
    expected = oracle(tiny, [1, 2, *ids, 8], images, seen)[-1:]
    assert_close(logits[0], expected)
    assert_close(logits[1], expected)
    causal = oracle(tiny, [1, 2, *ids, 8], images)[-1:]
    assert float((causal - expected).abs().max()) > 1e-3, "the rule changes the result"


def test_image_blocks_and_mask() -> None:
    ids = torch.tensor([-1, -1, 4, -1, -3, -2, -1, -1]).numpy()
    assert image_blocks(ids) == ((0, 2), (3, 4), (6, 8))
    assert image_blocks(ids[2:3]) == ()
    found = image_mask([1, 0], [3, 1], [[(1, 3)], []]).tolist()
    assert found == [*(True, True, False, False), *(True, True, True, True), *(True, True, True, True), True]


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_packing_divides_no_image(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 12), max_size=4))
    budget = data.draw(st.integers(-1, 9))
    blocks = []
    for count in counts:
        edges = sorted(data.draw(st.sets(st.integers(0, count), max_size=6)))
        blocks.append(list(zip(edges[::2], edges[1::2], strict=False)))
    done = [0] * len(counts)
    for forward in pack(counts, budget, blocks):
        assert forward
        assert len({piece.row for piece in forward}) == len(forward)
        size = sum(piece.end - piece.begin for piece in forward)
        alone = [last - first for piece in forward for first, last in blocks[piece.row] if first == piece.begin]
        assert budget <= 0 or size <= budget or (len(forward) == 1 and alone[:1] == [size]), "only for one image alone"
        for row, begin, end in forward:
            assert begin == done[row] < end
            assert not any(first < end < last for first, last in blocks[row])
            done[row] = end
    assert done == counts


def test_refusals_leave_no_trace(llama: Tiny, ex: Executor) -> None:
    llm = LlmExecutor(ex)
    cache = llm.create_kv_cache()
    llm.prefill(inputs([1, 2]), cache)
    one = rows_of(1)
    for kind, given_, match in (
        (InvalidArgument, given_inputs([-1], vision=VisionData(embeddings=one[:, 1:])), "width 31; the model's is 32"),
        (
            InvalidArgument,
            given_inputs([-1, -3], vision=VisionData(embeddings=one, end_embedding=one[0, 1:])),
            "end_embedding have width 31",
        ),
        (InvalidArgument, given_inputs([-1, -3], vision=VisionData(embeddings=one)), "-3 .* end_embedding"),
        (InvalidArgument, given_inputs([-2, -4], audio=AudioData(embeddings=one)), "-4 .* end_embedding"),
        (InvalidArgument, given_inputs([-1, VOCAB], vision=VisionData(embeddings=one)), f"{VOCAB} is outside"),
        (
            Unsupported,
            given_inputs([-1], vision=VisionData(embeddings=one, per_layer_embeddings=torch.ones(3, 1, 4))),
            "vision per_layer_embeddings",
        ),
        (
            Unsupported,
            given_inputs([-2], audio=AudioData(per_layer_embeddings=torch.ones(3, 1, 4))),
            "audio per_layer_embeddings",
        ),
        (ResourceExhausted, given_inputs([-1, *[1] * 130], vision=VisionData(embeddings=one)), "maximum"),
    ):
        with refused(kind, ex, cache, match=match):
            llm.prefill(given_, cache)
    deaf = Executor(ex.pool.runner, identity=ex.pool.facts.identity, modalities=("vision",))
    mine = deaf.create_kv_cache()
    with refused(Unsupported, deaf, mine, match="audio data: .* without the modality 'audio'"):
        LlmExecutor(deaf).prefill(given_inputs([-2], audio=AudioData(embeddings=one)), mine)
    LlmExecutor(deaf).prefill(given_inputs([-1], vision=VisionData(embeddings=one)), mine)
    for bad in ("vision", ["smell"]):
        with pytest.raises(InvalidArgument, match="modalities"):
            Executor(ex.pool.runner, identity=ex.pool.facts.identity, modalities=bad)
    for bad_data in (
        lambda: VisionData(embeddings=one, end_embedding=one),
        lambda: VisionData(embeddings=one, bidirectional=1),  # type: ignore[arg-type]
        lambda: AudioData(embeddings=one, end_embedding=torch.ones(WIDTH, dtype=torch.int64)),
        lambda: AudioData(embeddings=one, valid_tokens=True),
    ):
        with pytest.raises(InvalidArgument):
            bad_data()


def test_placeholders_are_remembered_by_their_data(ex: Executor) -> None:
    llm = LlmExecutor(ex)

    def record(ids: list[int], **data: VisionData | AudioData) -> list[int]:
        cache = llm.create_kv_cache()
        llm.prefill(given_inputs(ids, **data), cache)  # type: ignore[arg-type]
        return cache.token_ids(0).tolist()

    rows = rows_of(3)
    first = record([4, -1, -1, 5], vision=VisionData(embeddings=rows[:2]))
    assert (first[0], first[3]) == (4, 5)
    assert first[1] != first[2]
    assert max(first[1:3]) < -4, "never the id of a token, nor a placeholder"
    assert record([-1, -1], vision=VisionData(embeddings=rows[:2].double())) == first[1:3]
    assert record([-1, -1], vision=VisionData(embeddings=rows[[0, 2]]))[0] == first[1]
    assert record([-1, -1], vision=VisionData(embeddings=rows[[0, 2]]))[1] != first[2]
    assert record([-2, -2], audio=AudioData(embeddings=rows[:2]))[0] != first[1]
    whole = VisionData(embeddings=rows[:2], bidirectional=True)
    other = VisionData(embeddings=rows[[0, 2]], bidirectional=True)
    seen = record([-1, -1], vision=whole)
    assert seen[0] != first[1]
    assert record([-1, -1], vision=other)[0] != seen[0], "the first row sees the second"
    assert record([7, -1, -1], vision=whole)[1:] == seen, "wherever it stands"
    same = VisionData(embeddings=rows[[0, 0]], bidirectional=True)
    assert len(set(record([-1, -1], vision=same))) == 2


def test_a_cache_with_media_is_saved_and_goes_on(tiny: Tiny, executor: Executor) -> None:
    llm = LlmExecutor(executor)
    cache, target = llm.create_kv_cache(), llm.create_kv_cache()
    rows = rows_of(2)
    llm.prefill(given_inputs([3, -1, -1, 4], vision=VisionData(embeddings=rows)), cache)
    target.load(cache.serialize())
    assert target.token_ids(0).tolist() == cache.token_ids(0).tolist()
    params = SamplingParams(temperature=0, repetition_penalty=1.3)
    expected = oracle(tiny, [3, -1, -1, 4, 8], rows)[-1]
    seen = torch.tensor([3, 4, 8])  # An image has no ids that a penalty could count.
    penalised = expected.clone()
    penalised[seen] = torch.where(expected[seen] > 0, expected[seen] / 1.3, expected[seen] * 1.3)
    assert llm.sample_tokens(1, inputs([8]), target, sampling=params) == [int(penalised.argmax())]
    assert_close(executor.decode(token(cache, 8)).logits[0], expected)


def test_media_are_let_go_on_every_way_out(llama: Tiny) -> None:
    ex = make_executor(llama, prefill_chunk_size=2)
    llm = LlmExecutor(ex)

    def run(ids: list[int], error: type[Exception] | None, cancel: bool = False) -> weakref.ref[Tensor]:
        rows = rows_of(2)
        watched = weakref.ref(rows)
        cache = llm.create_kv_cache()
        execute = ex.pool.runner.execute

        def cancelling(*args: object) -> object:
            ex.cancel()
            return execute(*args)  # type: ignore[arg-type]

        if cancel:
            ex.pool.runner.execute = cancelling  # type: ignore[method-assign]
        with nullcontext() if error is None else pytest.raises(error):
            llm.prefill(given_inputs(ids, vision=VisionData(embeddings=rows)), cache)
        ex.pool.runner.execute = execute  # type: ignore[method-assign]
        assert cache.length == (4 if error is None else 2 if cancel else 0)
        return watched

    for ids, error, cancel in (
        ([1, -1, -1, 2], None, False),
        ([1, -1, -1, VOCAB], InvalidArgument, False),
        ([1, -1, -1, 2], Cancelled, True),
    ):
        watched = run(ids, error, cancel)
        gc.collect()
        assert watched() is None
