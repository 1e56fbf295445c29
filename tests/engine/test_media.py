"""Prompts with embeddings at placeholders, in ``generate`` and in sessions, against transformers
with ``inputs_embeds``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import (
    Checkpoint,
    MakeLLM,
    assert_near,
    check,
    engine_of,
    greedy,
    make_family,
    random_tokens,
    record,
    token_ids,
)
from torch import Tensor

from quire import LLM, AsyncLLM, BeamSearchParams, FailedPrecondition, InvalidArgument, SamplingParams, Unsupported
from quire.base.errors import QuireError
from quire.base.media import NO_MEDIA
from quire.contracts.executor import AudioData, ExecutorInputs, TextData, VisionData
from quire.engine.prompts import read_prompt
from quire.executor.llm_executor import LlmExecutor

WIDTH = 32
BEDS = ("llama", "gemma3", "mistral", "deepseek-v2-lite", "qwen3-next")


@pytest.fixture(scope="module", params=BEDS)
def bed(
    request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    name: str = request.param
    return checkpoints[name] if name in checkpoints else make_family(name, tmp_path_factory.mktemp(name))


def rows_of(count: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def width_of(checkpoint: Checkpoint) -> int:
    return int(checkpoint.model.config.get_text_config().hidden_size)


@torch.inference_mode()
def continues(checkpoint: Checkpoint, ids: Sequence[int], rows: Tensor, found: Sequence[int]) -> bool:
    """Whether ``found`` are the greedy tokens after ids whose negative ones are ``rows``."""
    every = torch.tensor([*ids, *found[:-1]])
    x_TE = checkpoint.model.get_input_embeddings()(every.clamp_min(0)).clone()
    x_TE[every < 0] = rows
    best = checkpoint.model(inputs_embeds=x_TE[None]).logits[0].argmax(-1)
    return best[len(ids) - 1 :].tolist() == list(found)


def image(ids: Sequence[int], rows: Tensor) -> dict[str, Any]:
    return {"prompt_token_ids": list(ids), "multi_modal_data": {"image": rows}}


IDS = [*random_tokens(9), -1, -1, -1, *random_tokens(5, seed=1)]


@pytest.mark.turns(6)
@pytest.mark.parametrize("budget", [3, 64])
def test_mixed_batches(make_llm: MakeLLM, bed: Checkpoint, budget: int) -> None:
    """Beside plain prompts, in chunks that divide an image, with other images at the same
    placeholders.
    """
    llm = make_llm(bed, kv_cache_memory="4MiB", page_size=4, max_num_batched_tokens=budget, max_num_seqs=3)
    width = width_of(bed)
    first, second = rows_of(3, 1, width), rows_of(3, 2, width)
    plain = random_tokens(14, seed=5)
    outputs = llm.generate([image(IDS, first), plain, image(IDS, second), image(IDS, first)], greedy(6))
    found = token_ids(outputs)
    assert continues(bed, IDS, first, found[0])
    assert continues(bed, IDS, second, found[2])
    assert bed.continues(plain, found[1])
    assert found[3] == found[0] != found[2]
    assert outputs[0].prompt_token_ids == IDS
    check(llm)


@pytest.mark.parametrize("family", ["granite", "granite-4", "falcon-h1"])
def test_multiplied_as_in_transformers(make_llm: MakeLLM, tmp_path: Path, family: str) -> None:
    """Granite multiplies given embeddings, too, and Falcon-H1 only the rows of its table."""
    made = make_family(family, tmp_path, embedding_multiplier=3.0)
    rows = rows_of(9, 1, width_of(made))
    with torch.inference_mode():
        exact_TV = made.model.double()(inputs_embeds=rows.double()[None]).logits[0]
    with make_llm(made, kv_cache_memory="4MiB").session({"prompt_embeds": rows}) as session:
        assert_near(session.logits().double(), exact_TV[-1].double(), 8 * made.tolerance)


def test_the_prefix_cache_goes_by_the_data(small: LLM, llama: Checkpoint) -> None:
    first, second = rows_of(3, 1), rows_of(3, 2)
    small.generate(image(IDS, first), greedy(1))
    for ids, rows, cached in (
        (IDS, first, 16),
        (IDS, first.double(), 16),  # the same numbers
        (IDS, second, 9),
        (IDS, torch.cat((first[:2], second[:1])), 11),
        ([*IDS[:12], *random_tokens(4, seed=8)], first, 12),
        ([*IDS[:9], -2, *IDS[10:]], first, 9),
    ):
        data = {"image": rows[: ids.count(-1)]} if -2 not in ids else {"audio": rows[:1], "image": rows[1:]}
        recorder = record(small)
        output = small.generate({"prompt_token_ids": ids, "multi_modal_data": data}, greedy(4))[0]
        assert (output.num_cached_tokens, recorder.num_tokens) == (cached, len(ids) - cached + 3)
        assert continues(llama, ids, rows.float(), output.outputs[0].token_ids)
    assert small.generate(image(IDS, first), greedy(1), cache_salt="other")[0].num_cached_tokens == 0


def test_every_way_to_say_it(small: LLM, llama: Checkpoint) -> None:
    rows, end = rows_of(4), rows_of(1, 9)[0]
    inputs = ExecutorInputs(
        text=TextData(token_ids=torch.tensor([[5, -1, -3, 7, -2, -2, 3]])),
        vision=VisionData(embeddings=rows[:1], end_embedding=end),
        audio=AudioData(embeddings=rows[1:3]),
    )
    mapping = {
        "prompt_token_ids": np.array([5, -1, -3, 7, -2, -2, 3]),
        "multi_modal_data": {"image": inputs.vision, "audio": rows[1:3]},
    }
    at = torch.stack([rows[0], end, rows[1], rows[2]])
    whole = {"prompt_embeds": rows}
    outputs = small.generate([inputs, mapping, whole, {"prompt_token_ids": [3, 4]}], greedy(5))
    assert outputs[0].prompt_token_ids == [5, -1, -3, 7, -2, -2, 3]
    assert continues(llama, [5, -1, -1, 7, -1, -1, 3], at, outputs[0].outputs[0].token_ids)
    assert token_ids(outputs)[1] == token_ids(outputs)[0]
    assert continues(llama, [-1] * 4, rows, outputs[2].outputs[0].token_ids)
    assert token_ids(outputs)[3] == llama.greedy([3, 4], 5)
    assert token_ids(small.generate(inputs, greedy(5))) == token_ids(outputs)[:1]


def test_samples_penalties_and_what_a_caller_does_afterwards(small: LLM, llama: Checkpoint) -> None:
    rows = rows_of(3)
    prompt = image(IDS, rows)
    ids, media = read_prompt(prompt, WIDTH)
    kept = [row.clone() for row in media.embeddings(ids)]
    rows.zero_()
    assert all(torch.equal(one, other) for one, other in zip(media.embeddings(ids), kept, strict=True))
    rows = rows_of(3)
    output = small.generate(image(IDS, rows), SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=4))[0]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    penalised = small.generate(image(IDS, rows), greedy(3, repetition_penalty=1.2, presence_penalty=0.5))[0]
    assert len(penalised.outputs[0].token_ids) == 3


def test_preempted_and_computed_again(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=64, page_size=4, enable_prefix_caching=False)
    rows = [rows_of(3, seed) for seed in range(4)]
    outputs = llm.generate([image(IDS, one) for one in rows], greedy(20))
    assert llm.metrics()["quire:num_preemptions_total"] > 0
    for one, found in zip(rows, token_ids(outputs), strict=True):
        assert continues(llama, IDS, one, found)


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.turns(4)
@pytest.mark.parametrize("seed", range(2))
def test_sessions_at_random(make_llm: MakeLLM, bed: Checkpoint, seed: int) -> None:
    """Append text and images, generate, fork, rewind, lose the state: each goes on as a
    fresh run."""
    llm = make_llm(bed, kv_cache_memory="4MiB", page_size=4, max_num_batched_tokens=7, max_num_seqs=3)
    dice, width = random.Random(seed), width_of(bed)
    held: list[tuple[Any, list[int], list[Tensor]]] = [(llm.session(), [], [])]
    for step in range(30):
        number = dice.randrange(len(held))
        session, ids, rows = held[number]
        verb = dice.choice(["image", "text", "generate", "fork", "rewind", "edit", "edit", "drop", "cut"])
        if verb == "image" or not ids:
            new = rows_of(dice.randrange(1, 6), dice.randrange(3), width)
            given = [*random_tokens(dice.randrange(3), seed=step), *[-1] * len(new)]
            session.append(image(given, new))
            ids, rows = [*ids, *given], [*rows, *new]
        elif verb == "text":
            more = random_tokens(dice.randrange(1, 9), seed=step)
            session.append(more)
            ids = [*ids, *more]
        elif verb == "generate":
            found = session.generate(greedy(3)).outputs[0].token_ids
            assert continues(bed, ids, torch.stack(rows) if rows else rows_of(0, 0, width), found)
            ids = [*ids, *found]
        elif verb == "fork" and len(held) < 4:
            at = dice.randrange(1, len(ids) + 1)
            held.append((session.fork(at=at), ids[:at], rows[: sum(one < 0 for one in ids[:at])]))
        elif verb == "rewind":
            to = dice.randrange(1, len(ids) + 1)
            session.rewind(to=to)
            ids, rows = ids[:to], rows[: sum(one < 0 for one in ids[:to])]
        elif verb == "edit":
            start = dice.randrange(len(ids))
            stop = dice.randrange(start, len(ids))
            new = random_tokens(dice.randrange(4), seed=step)
            session.edit(range(start, stop), new)
            before, after = sum(one < 0 for one in ids[:start]), sum(one < 0 for one in ids[:stop])
            ids, rows = [*ids[:start], *new, *ids[stop:]], [*rows[:before], *rows[after:]]
        elif verb == "drop":
            engine_of(llm).branches.drop(session._branch)
            llm.reset_prefix_cache()
        held[number] = (session, ids, rows)
        assert session.tokens == ids
        check(llm)


def test_saved_and_as_a_cache(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """The state goes along, the embeddings do not: what they stand for is not computed again."""
    llm, rows = make_llm(llama, page_size=4), rows_of(3)
    session = llm.session(image(IDS, rows))
    expected = session.fork().generate(greedy(6)).outputs[0].token_ids
    assert continues(llama, IDS, rows, expected)
    cache = session.as_cache()
    assert min(cache.token_ids(0)[9:12]) < -4
    loaded = llm.executor.create_kv_cache()
    loaded.load(session.to_bytes())
    others = [
        llm.session_from_bytes(session.to_bytes()),
        llm.session(cache=cache),
        llm.session(cache=loaded),
        llm.session_from_bytes(cache.serialize()),
    ]
    assert not session.modified
    for other in others:
        assert other.modified
        assert other.pinned
        assert other.tokens == IDS
        assert other.fork().generate(greedy(6)).outputs[0].token_ids == expected
        other.rewind(to=14)
        assert continues(llama, IDS[:14], rows, other.generate(greedy(4)).outputs[0].token_ids)
        other.rewind(to=11)
        with pytest.raises(FailedPrecondition, match="an embedding that must be run is gone"):
            other.generate(greedy(1))
        with pytest.raises(FailedPrecondition, match="an embedding that must be run is gone"):
            other.logits()
        assert len(other) == 11
        other.append([4])
        found = other.generate(greedy(4)).outputs[0].token_ids
        assert continues(llama, [*IDS[:11], 4], rows[:2], found)
        other.close()
    check_cache = LlmExecutor(llm.executor)
    assert check_cache.sample_tokens(
        1, ExecutorInputs(text=TextData(token_ids=torch.tensor([[expected[0]]]))), cache
    ) == [expected[1]]


def test_a_session_that_ends_in_an_image_is_saved(small: LLM, llama: Checkpoint) -> None:
    session = small.session(image(IDS[:12], rows_of(3)))
    assert session.num_computed == 11
    for data in (session.to_bytes(), small.session(image([-1], rows_of(1))).to_bytes()):
        loaded = small.session_from_bytes(data)
        count = len(loaded)
        ids, rows = (IDS[:12], rows_of(3)) if count > 1 else ([-1], rows_of(1))
        with pytest.raises(FailedPrecondition, match="append a token"):
            loaded.score([3])
        found = loaded.append([3, 4]).generate(greedy(3)).outputs[0].token_ids
        assert continues(llama, [*ids, 3, 4], rows, found)


def test_a_text_in_the_words_of_vllm(python_llm: LLM) -> None:
    wrapped: Any = {"prompt": "import os"}
    (alone,), both = python_llm.generate(wrapped, greedy(2)), python_llm.generate([wrapped, "import os"], greedy(2))
    assert [one.prompt for one in (alone, *both)] == ["import os"] * 3
    assert alone.outputs[0].text == both[0].outputs[0].text == both[1].outputs[0].text
    with python_llm.session(wrapped) as session:
        assert session.append(wrapped).text == "import os" * 2


def test_chat_and_text_with_images(python_llm: LLM) -> None:
    width = python_llm.model.hidden_size
    session = python_llm.session("import ")
    session.append(image([-1, -1], rows_of(2, 0, width)))
    session.append("os\n")
    assert session.text == "import os\n"
    assert len(session.score("import")) == 1
    session.close()


def test_windowed_sessions(small: LLM) -> None:
    rows = rows_of(3)
    session = small.session(image(IDS, rows), window=8, sink=2)
    found = session.generate(greedy(6)).outputs[0].token_ids
    assert found != small.session(image(IDS, rows_of(3, 1)), window=8, sink=2).generate(greedy(6)).outputs[0].token_ids
    engine_of(small).branches.drop(session._branch)
    session.rewind(to=len(IDS))
    assert session.generate(greedy(6)).outputs[0].token_ids == found


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        (image([5, -1], rows_of(2)), InvalidArgument, "1 vision placeholders"),
        (image([5, -1], rows_of(1)[:, :9]), InvalidArgument, "width 9; the model's is 32"),
        (image([5, -7], rows_of(0)), InvalidArgument, "negative and no placeholders"),
        (image([97, -1], rows_of(1)), InvalidArgument, "token id 97 is outside"),
        (image([], rows_of(0)), InvalidArgument, "row of integers"),
        (image([1.5], rows_of(0)), InvalidArgument, "int32 or int64"),
        ({"prompt_token_ids": ["a"]}, InvalidArgument, "row of integers"),
        ({"prompt_token_ids": [[1, 2]]}, InvalidArgument, "row of integers"),
        ({"prompt_token_ids": [1], "image": 3}, InvalidArgument, "no image; prompt_token_ids, multi_modal_data"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"video": 3}}, InvalidArgument, "image and audio"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": 3}}, InvalidArgument, "multi_modal_data.image must be .* got 3"),
        ({}, InvalidArgument, "needs prompt_token_ids"),
        ({"prompt": "x", "multi_modal_data": {}}, InvalidArgument, "has no prompt; .* or prompt alone, a text"),
        ({"prompt": [1]}, InvalidArgument, "has no prompt; .* or prompt alone, a text"),
        ({"prompt_embeds": rows_of(2), "prompt_token_ids": [1]}, InvalidArgument, "leave the other keys out"),
        ({"prompt_embeds": rows_of(0)}, InvalidArgument, "at least one token"),
        ({"prompt_embeds": rows_of(2).long()}, InvalidArgument, "floating"),
        (ExecutorInputs(), InvalidArgument, "one row of token ids; got 0"),
        (ExecutorInputs(text=TextData(token_ids=torch.ones(2, 3).long())), InvalidArgument, "got 2"),
        (ExecutorInputs(text=TextData(token_ids=torch.ones(1, 3).long()), next_position=0), InvalidArgument, "begins at 0"),
        (
            image([-1], VisionData(embeddings=rows_of(1), bidirectional=True)),  # type: ignore[arg-type]
            Unsupported,
            r"session\(cache=",
        ),
    ],
)  # fmt: skip
def test_bad_prompts(small: LLM, prompt: Any, error: type[QuireError], match: str) -> None:
    session = small.session([1, 2, 3])
    for call in (
        lambda: small.generate([[1, 2], prompt], greedy(1)),
        lambda: small.session(prompt),
        lambda: session.append(prompt),
    ):
        with pytest.raises(error, match=match):
            call()
    assert session.tokens == [1, 2, 3]
    assert len(engine_of(small).branches.sessions) == 1
    assert engine_of(small).scheduler.idle


def test_what_takes_no_embeddings(small: LLM) -> None:
    prompt = image(IDS, rows_of(3))
    with pytest.raises(Unsupported, match="prompt_logprobs"):
        small.generate(prompt, greedy(1, prompt_logprobs=1))
    with pytest.raises(Unsupported, match="beam_search"):
        small.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
    session = small.session(prompt)
    with pytest.raises(Unsupported, match="prompt_logprobs"):
        session.generate(greedy(1, prompt_logprobs=1))
    with pytest.raises(InvalidArgument, match="score"):
        session.score(prompt)  # type: ignore[arg-type]
    for bad in ([-1], [3, -7]):
        with pytest.raises(InvalidArgument, match="outside"):
            small.generate([bad], greedy(1))
        with pytest.raises(InvalidArgument, match="outside"):
            session.append(bad)
    with pytest.raises(InvalidArgument, match="outside"):
        engine_of(small).submit(np.array([3, -1234567]), greedy(1), media=NO_MEDIA)


def test_async(llama: Checkpoint) -> None:
    async def use() -> None:
        async with AsyncLLM(llama.path, device="cpu", dtype="float32", kv_cache_memory="2MiB") as llm:
            rows = rows_of(3)
            output = (await llm.generate(image(IDS, rows), greedy(4)))[0]
            assert continues(llama, IDS, rows, output.outputs[0].token_ids)
            session = await llm.session()
            await session.append(image(IDS, rows))
            assert (await session.generate(greedy(4))).outputs[0].token_ids == output.outputs[0].token_ids
            streamed = [token async for delta in llm.stream(image(IDS, rows), greedy(4)) for token in delta.token_ids]
            assert streamed == output.outputs[0].token_ids

    asyncio.run(use())
