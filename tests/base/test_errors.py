"""Errors carry the field that they are about, what was given and what is allowed,
wherever they go."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import quire.cli.client
import quire.grammars.trial  # which have errors of their own
from quire import SamplingParams
from quire.base.config import AttentionConfig, EngineConfig, ExecutorConfig
from quire.base.errors import MAX_SHOWN, Cancelled, InvalidArgument, QuireError
from quire.base.sampling_params import BeamSearchParams
from quire.contracts.executor import DecodeInput, TextData
from quire.engine.prompts import as_prompts, read_prompt
from quire.server.http.settings import ServerSettings
from quire.server.tools.tools import schema_for
from quire.sessions.labels import checked_labels
from quire.text.chat_rendering import render_chat


def classes(kind: type[QuireError] = QuireError) -> Iterator[type[QuireError]]:
    """All of them."""
    yield kind
    for one in kind.__subclasses__():
        yield from classes(one)


def test_the_message_is_made_of_what_is_carried() -> None:
    error = InvalidArgument(field="structured_outputs.json", given=-1, allowed="a schema")
    assert str(error) == "structured_outputs.json must be a schema, got -1"
    assert (error.field, error.given, error.allowed) == ("structured_outputs.json", -1, "a schema")
    error = InvalidArgument("the prompt is too long", field="prompt")
    assert (str(error), error.field, error.given, error.allowed) == ("the prompt is too long", "prompt", None, "")
    assert (str(QuireError()), QuireError("broken").field) == ("", None)


def test_what_was_given_is_shown_in_few_words() -> None:
    def shown(given: object) -> str:
        return str(InvalidArgument(field="x", given=given, allowed="y")).removeprefix("x must be y, got ")

    assert shown(torch.zeros(2, 3)) == "Tensor torch.float32 [2, 3]"
    assert shown(object()) == "object"
    assert shown("a" * 10**6) == repr("a" * 10**6)[: MAX_SHOWN - 3] + "..."


@pytest.mark.parametrize("kind", sorted(set(classes()), key=str), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copies_and_pickles_are_whole(kind: type[QuireError], carry: Callable[[QuireError], QuireError]) -> None:
    error = kind("messages.3.content must be a string, got [3]")
    error.field, error.given, error.allowed = "messages.3.content", [3], "a string"
    error.extra = "more"  # type: ignore[attr-defined]
    error.about("prompt 1")
    found = carry(error)
    assert type(found) is kind
    assert str(found) == "prompt 1: messages.3.content must be a string, got [3]"
    assert vars(found) == vars(error)
    assert (found.field, found.given, found.allowed) == ("messages.3.content", [3], "a string")


def test_what_classes_add_is_carried_too() -> None:
    cancelled = pickle.loads(pickle.dumps(Cancelled("the call was cancelled", [1, 2])))
    assert (str(cancelled), cancelled.token_ids, cancelled.field) == ("the call was cancelled", [1, 2], None)
    failure = quire.cli.client.HttpFailure("the server answered 400", 400, param="n", code="invalid_argument")
    found = pickle.loads(pickle.dumps(failure))
    assert (found.status, found.param, found.code, str(found)) == (400, "n", "invalid_argument", str(failure))


def test_a_value_that_cannot_be_pickled_is_carried_as_it_is_shown() -> None:
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(logits_processors=[print, lambda ids, logits: logits, 3])  # type: ignore[list-item]
    found = pickle.loads(pickle.dumps(caught.value))
    assert found.field == "logits_processors"
    assert found.given.startswith("[<built-in function print>, <function")
    assert str(found) == str(caught.value)


def test_errors_cross_threads_and_processes() -> None:
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(SamplingParams, temperature=-1).exception()
    program = (
        "import pickle, sys\nfrom quire.base.sampling_params import SamplingParams\n"
        "try:\n    SamplingParams(temperature=-1)\n"
        "except ValueError as error:\n    sys.stdout.buffer.write(pickle.dumps(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    for found in (error, pickle.loads(done.stdout)):
        assert isinstance(found, InvalidArgument)
        assert (found.field, found.given, found.allowed) == ("temperature", -1, "a finite number >= 0")


TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED: list[tuple[Callable[[], Any], str, Any, str]] = [
    (lambda: SamplingParams(top_p=2), "top_p", 2, "a number in (0, 1]"),
    (lambda: SamplingParams(stop_token_ids=[1, -1]), "stop_token_ids.1", -1, "an integer >= 0"),
    (lambda: SamplingParams(logit_bias={7: 101}), "logit_bias.7", 101, "a number in [-100, 100]"),
    (lambda: SamplingParams(logit_bias={"x": 1}), "logit_bias", None, ""),
    (lambda: SamplingParams(structured_outputs={"regex": 3}), "structured_outputs.regex", 3, "a non-empty string"),
    (lambda: SamplingParams(structured_outputs={"choice": ["a", 3]}), "structured_outputs.choice.1", 3, ""),
    (lambda: SamplingParams.from_generation_config({"top_k": -5}), "top_k", -5, "an integer >= -1"),
    (lambda: BeamSearchParams(beam_width=0), "beam_width", 0, "an integer >= 1"),
    (lambda: EngineConfig(model="m", page_size=0), "page_size", 0, "an integer >= 1"),
    (
        lambda: EngineConfig(model="m", quantization="awq"),
        "quantization",
        "awq",
        "one of 'int8', 'int4', 'fp8', or left out",
    ),
    (lambda: EngineConfig.from_mapping({"model": "m", "no-such": 1}), "no_such", None, ""),
    (lambda: AttentionConfig(attention_type="Other"), "attention_type", "Other", ""),
    (
        lambda: ExecutorConfig(model_info="m", executor_options={"modalities": 3}),
        "executor_options.modalities",
        3,
        "a list of one of 'vision', 'audio'",
    ),
    (lambda: ServerSettings(port=70000), "port", 70000, "an integer in [0, 65535]"),
    (lambda: DecodeInput(input_ids=[1], kv_cache=3), "input_ids", [1], "a Tensor"),  # type: ignore[arg-type]
    (
        lambda: TextData(token_ids=torch.zeros(1, 3, dtype=torch.int64), row_lengths=(5,)),
        "row_lengths",
        (5,),
        "1 lengths in 1..3, one per row",
    ),
    (lambda: render_chat("{{ messages }}", [{"role": "user", "content": 3}]), "messages.0.content", 3, ""),
    (lambda: render_chat("{{ raise_exception('no') }}", [{"role": "user", "content": "a"}]), "messages", None, ""),
    (lambda: as_prompts(["a", 3]), "prompts.1", 3, "text or token ids"),  # type: ignore[list-item]
    (
        lambda: read_prompt({"prompt_token_ids": [1], "multi_modal_data": {"image": 3}}, 8),
        "multi_modal_data.image",
        3,
        "embeddings [M, E] or VisionData",
    ),
    (lambda: checked_labels({"a": "\n"}), "labels.a", "\n", "at most 512 printable characters"),
    (lambda: schema_for([TOOL, TOOL], "required"), "tools.1.function.name", None, ""),
]


@pytest.mark.parametrize(("call", "field", "given", "allowed"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_arguments_are_refused_with(call: Callable[[], Any], field: str, given: Any, allowed: str) -> None:
    """``allowed`` is left out where it is long."""
    with pytest.raises(QuireError) as caught:
        call()
    error = caught.value
    assert (error.field, error.given) == (field, given)
    assert error.allowed == allowed or (not allowed and error.given is not None)
