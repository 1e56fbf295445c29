"""What cannot be served is one clear error before any compute, and the engine goes on serving
everything else.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_llms import CONTEXT, VOCAB, Checkpoint, MakeLLM, check, greedy, random_tokens, record

from quire import (
    LLM,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    SamplingParams,
    Unsupported,
)
from quire.base.config import EngineConfig
from quire.base.sampling_params import BeamSearchParams
from quire.text.token_ids import as_token_ids
from small_tokenizers import saved

GOOD = random_tokens(9)
NESTED: list[Any] = [[1, [2, 3]], [[1], 2]]

BAD_PROMPTS = [
    ([[]], "empty"),
    ([GOOD, []], "prompt 1: .*empty"),
    ([VOCAB], f"token id {VOCAB} .*0..{VOCAB - 1}"),
    ([GOOD, [1, -1]], "prompt 1: token id -1"),
    ([2**31], "outside"),
    ([GOOD, [2**70]], "integers|outside"),
    ([1, 2.5], "integers"),
    ([1.0, 2.0], "token ids|must be"),
    ([1, "a"], "integers"),
    ([[1, "a"]], "integers"),
    ([[True, False]], "integers"),
    ([1, True], "integers"),
    ([None], "must be"),
    (None, "must be"),
    (7, "must be"),
    (b"bytes", "must be"),
    ([b"bytes"], "integers"),
    ({"prompt": "text"}, "no tokenizer"),
    ({"prompt": "text", "prompt_token_ids": [5]}, "no prompt; prompt_token_ids"),
    ({"prompt_token_ids": [VOCAB]}, f"token id {VOCAB}"),
    ({"prompt_token_ids": [2**70]}, "row of integers"),
    (NESTED, "integers"),
    (np.zeros((2, 2, 2), dtype=int), "integers"),
    (np.array(3), "must be"),
    (random_tokens(CONTEXT), "context length is 256"),
    (random_tokens(CONTEXT + 50), "context length is 256"),
    ("text", "no tokenizer"),
    ([GOOD, "text"], "prompt 1: .*no tokenizer"),
]


@pytest.mark.parametrize(("prompts", "match"), BAD_PROMPTS)
def test_prompts(small: LLM, llama: Checkpoint, prompts: Any, match: str) -> None:
    recorder = record(small)
    with pytest.raises(InvalidArgument, match=match):
        small.generate(prompts, greedy(4))
    assert not recorder.steps, "nothing has run"
    check(small)
    assert small.generate(GOOD, greedy(4))[0].outputs[0].token_ids == llama.greedy(GOOD, 4)


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        (greedy(CONTEXT - 8), InvalidArgument, f"up to {CONTEXT - 9}"),
        ([greedy(1)] * 3, InvalidArgument, "3 sampling_params for 2 prompts"),
        ([], InvalidArgument, "0 sampling_params"),
        ([greedy(1), None], InvalidArgument, "SamplingParams"),
        ({"max_tokens": 3}, InvalidArgument, "SamplingParams"),
        (greedy(3, stop_token_ids=[VOCAB]), InvalidArgument, "stop_token_ids"),
        (greedy(3, logit_bias={VOCAB: 1}), InvalidArgument, "logit_bias"),
        (greedy(3, logprobs=VOCAB + 1), InvalidArgument, "^prompt 0: logprobs"),
        (
            greedy(3, prompt_logprobs=VOCAB + 1),
            InvalidArgument,
            f"prompt_logprobs must be at most {VOCAB}, .* got {VOCAB + 1}",
        ),
        (greedy(3, structured_outputs={"regex": "a"}), Unsupported, "structured_outputs need a tokenizer"),
        ([greedy(3), greedy(3, structured_outputs={"json_object": True})], Unsupported, "prompt 1: structured_outputs"),
        (greedy(3, stop="x"), Unsupported, "tokenizer"),
        ([greedy(3), greedy(3, stop="x")], Unsupported, "prompt 1"),
    ],
)
def test_parameters(small: LLM, params: Any, error: type[QuireError], match: str) -> None:
    recorder = record(small)
    with pytest.raises(error, match=match):
        small.generate([GOOD, GOOD], params)
    assert not recorder.steps
    check(small)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
def test_nan(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: float("nan")})


def test_arguments_are_spelt_out() -> None:
    """The signature of ``LLM`` is the configuration: same names, same order, same defaults."""
    *arguments, retriever, executor = inspect.signature(LLM).parameters.values()
    assert (retriever.name, executor.name) == ("blend_retriever", "blend_executor")  # objects, no configuration
    fields = dataclasses.fields(EngineConfig)
    assert [argument.name for argument in arguments] == [field.name for field in fields]
    assert all(a.default == f.default for a, f in zip(arguments[1:], fields[1:], strict=True))
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in arguments[1:])
    with pytest.raises(TypeError, match="max_length"):
        LLM("tiny-python", max_length=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="model must be"):
        LLM(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLM("tiny-python", page_sise=4), r"LLM has no keyword 'page_sise'; did you mean page_size\?"),  # type: ignore[call-arg]
        (lambda: SamplingParams(temprature=0), "SamplingParams has no keyword 'temprature'; did you mean temperature"),  # type: ignore[call-arg]
        (lambda: SamplingParams().replace(max_new_tokens=3), "'max_new_tokens'; did you mean max_tokens"),
        (lambda: BeamSearchParams(zzz=1), "'zzz'; there are beam_width, "),  # type: ignore[call-arg]
    ],
)
def test_a_misspelt_keyword_is_refused_with_the_nearest(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_arguments_reach_the_configuration(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, page_size=5, max_num_seqs=3, dtype=torch.float32, seed=9, enable_prefix_caching=False)
    config = llm.config
    assert (config.page_size, config.max_num_seqs, config.dtype, config.seed) == (5, 3, "float32", 9)
    assert not config.enable_prefix_caching
    llm = make_llm(llama, override_generation_config=['{"temperature": 0}', {"max_new_tokens": 3}])
    assert (llm.default_params.temperature, llm.default_params.max_tokens) == (0.0, 3)
    with pytest.raises(InvalidArgument, match="override_generation_config: temperature must be"):
        make_llm(llama, override_generation_config={"temperature": -1})


def test_arrays_and_tensors_are_prompts(small: LLM, llama: Checkpoint) -> None:
    expected = llama.greedy(GOOD, 4)
    for prompts in (
        np.array(GOOD),
        torch.tensor(GOOD),
        torch.tensor([GOOD]),
        [torch.tensor(GOOD, dtype=torch.int32)],
        [np.int64(token) for token in GOOD],
    ):
        outputs = small.generate(prompts, greedy(4))  # type: ignore[arg-type]
        assert [output.outputs[0].token_ids for output in outputs] == [expected]
    with small.session(torch.tensor(GOOD[:4])) as session:  # type: ignore[arg-type]
        assert session.append(np.array(GOOD[4:])).tokens == GOOD  # type: ignore[arg-type]
    for bad in (torch.tensor([1.0, 2.0]), torch.tensor(3), torch.tensor([True]), [torch.tensor(3)]):
        with pytest.raises(InvalidArgument):
            small.generate(bad, greedy(1))  # type: ignore[arg-type]


def test_session_arguments_of_another_type(small: LLM, tmp_path: Path) -> None:
    with small.session(GOOD) as session:
        data = session.to_bytes()
        calls: list[tuple[Any, str]] = [
            (lambda: session.kv("0"), "layer must be an integer, as in kv\\(0\\), got '0'"),  # type: ignore[arg-type]
            (lambda: session.kv(True), "layer must be .* got True"),
            (lambda: session.save(None), "name of a file"),  # type: ignore[arg-type]
            (lambda: session.save(""), "name of a file"),
            (lambda: session.save(b"x"), "name of a file"),  # type: ignore[arg-type]
            (lambda: small.session_from_bytes(data, convert_dtype="yes"), "convert_dtype"),  # type: ignore[arg-type]
            (lambda: small.load_session(tmp_path, convert_dtype=1), "convert_dtype"),  # type: ignore[arg-type]
        ]
        for call, match in calls:
            with pytest.raises(InvalidArgument, match=match):
                call()
        assert session.tokens == GOOD
    for verb in ("save", "score", "to_bytes"):
        with pytest.raises(FailedPrecondition, match=f"^{verb}: the session is closed"):
            getattr(session, verb)(*{"save": [tmp_path / "x"], "score": [[1]], "to_bytes": []}[verb])
    check(small)


def test_keywords(small: LLM) -> None:
    for call in (
        lambda: small.generate(GOOD, greedy(1), cache_salt=3),  # type: ignore[arg-type]
        lambda: small.session(GOOD, cache_salt=b"x"),  # type: ignore[arg-type]
        lambda: small.session(GOOD, pin="yes"),  # type: ignore[arg-type]
        lambda: small.session([VOCAB]),
        lambda: small.session(random_tokens(CONTEXT + 1)),
        lambda: small.session("text"),
        lambda: small.chat([]),
        lambda: small.chat("hello"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument):
            call()
    for call in (
        lambda: small.generate(GOOD, greedy(1), adapter="mine"),
        lambda: small.session(GOOD, adapter="mine"),
        lambda: small.load_adapter("mine", "./mine"),
        lambda: small.unload_adapter("mine"),
    ):
        with pytest.raises(NotFound, match="mine"):
            call()
    check(small)


def test_a_pool_that_is_too_small_for_a_prompt(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=32)
    recorder = record(llm)
    for call in (
        lambda: llm.generate([GOOD, random_tokens(33)], greedy(1)),
        lambda: llm.generate(random_tokens(20), greedy(14)),
        lambda: llm.session(random_tokens(33)),
    ):
        with pytest.raises(ResourceExhausted, match="32 tokens"):
            call()
    assert not recorder.steps
    # The last token needs no page.
    assert llm.generate(random_tokens(20), greedy(13))[0].outputs[0].token_ids == llama.greedy(random_tokens(20), 13)
    with pytest.raises(ResourceExhausted, match="kv_cache_memory"):
        make_llm(llama, pool=15)


def test_the_longest_of_everything(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=CONTEXT)
    longest = random_tokens(CONTEXT)
    assert len(llm.session(longest)) == CONTEXT
    with pytest.raises(InvalidArgument, match="context"):
        llm.session(longest).generate(greedy(1))
    assert llm.session(longest).logits().shape == (VOCAB,)
    assert len(llm.session(longest[:-1]).generate(greedy(1)).outputs[0].token_ids) == 1
    assert len(llm.session(longest[:-3]).score(longest[-3:])) == 3


def test_a_tokenizer_that_does_not_fit(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.path, tmp_path / "model"))
    (folder / "tokenizer.json").write_text(saved("byte_level"))
    with pytest.raises(QuireError, match="97"):
        make_llm(folder, kv_cache_memory="1MiB")


@pytest.mark.parametrize(("given", "told"), [(None, "None"), (5, "5"), ("text", "'text'"), ([1.5], r"\[1.5\]")])
def test_what_was_given_for_token_ids(given: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=f"must be a row of integers, got {told}$"):
        as_token_ids(given)
