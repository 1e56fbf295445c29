"""Sampling parameters: what is accepted, what is refused and how, and what became of it."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import InvalidArgument
from quire.base.sampling_params import MAX_CHOICES, MAX_STOP_STRINGS, SamplingParams, StructuredOutputs

FLOAT_RANGES: dict[str, tuple[list[Any], list[Any]]] = {  # field: (accepted, refused)
    "temperature": ([0, 0.7, 1e-300, 1e6], [-1e-9, -1]),
    "top_p": ([1e-12, 0.5, 1], [0, -0.1, 1.0000001]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.0000001]),
    "presence_penalty": ([-2, 0, 2], [-2.01, 2.01]),
    "frequency_penalty": ([-2, 0, 2], [-2.01, 2.01]),
    "repetition_penalty": ([1e-3, 1, 50], [0, -1]),
}
INT_RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 128], [0, -1]),
    "top_k": ([-1, 0, 1, 10**6], [-2]),
    "seed": ([None, 0, -(2**63), 2**64 - 1], [-(2**63) - 1, 2**64]),
    "max_tokens": ([None, 1, 10**6], [0, -1]),
    "min_tokens": ([0, 16], [-1, 17]),
    "logprobs": ([None, 0, 20], [-1]),
    "prompt_logprobs": ([None, 0, 20], [-1]),
}
NO_NUMBERS = [math.nan, math.inf, -math.inf, True, False, "1", [1], 1j, 10**400]


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, (good, _) in (FLOAT_RANGES | INT_RANGES).items() for v in good]
)
def test_accepts(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, (_, bad) in FLOAT_RANGES.items() for v in [*bad, *NO_NUMBERS, None]]
    + [(f, v) for f, (_, bad) in INT_RANGES.items() for v in [*bad, math.nan, math.inf, True, False, "1", [1], 1.0]]
    + [(f, v) for f in ("n", "top_k", "min_tokens") for v in [None]]
    + [(f, v) for f in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens") for v in [None, 0, 1, "yes"]]
    + [("stop", v) for v in ["", ["a", ""], [1], 5, b"a", [b"a"], {"a": 1}, ["x"] * (MAX_STOP_STRINGS + 1)]]
    + [("bad_words", v) for v in ["", ["a", ""], [1], 5, {"a": 1}, ["x"] * (MAX_STOP_STRINGS + 1)]]
    + [("allowed_token_ids", v) for v in [5, "12", [], [-1], [True], [1.0], ["1"], {1: 2}]]
    + [("stop_token_ids", v) for v in [5, "12", [-1], [True], [1.0], ["1"], {1: 2}]]
    + [
        ("logit_bias", v)
        for v in [5, [1], {1.0: 1}, {True: 1}, {-1: 1}, {"-1": 1}, {"x": 1}, {" 1": 1}, {"1_0": 1}, {"1" * 5000: 1}]
    ]
    + [("logit_bias", {3: v}) for v in [100.1, -100.1, *NO_NUMBERS, None]]
    + [("logit_bias", {1: 0.5, "1": 0.5})],
)
def test_refuses_and_names_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=field) as error:
        SamplingParams(**{field: value})
    assert isinstance(error.value, ValueError)
    if not isinstance(value, list | dict):
        assert repr(value) in str(error.value)


def test_min_tokens_goes_up_to_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5
    with pytest.raises(InvalidArgument, match=r"min_tokens.*4.*got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_normalised_views() -> None:
    params = SamplingParams(stop=["b", "a", "b"], stop_token_ids=[7, 3, 7], logit_bias={"12": 1, 5: -100})  # type: ignore[arg-type]
    assert params.stop_strings == ("b", "a")
    assert params.stop_ids == frozenset({3, 7})
    assert params.token_bias == {12: 1.0, 5: -100.0}
    none = SamplingParams()
    assert (none.stop_strings, none.stop_ids, dict(none.token_bias)) == ((), frozenset(), {})
    assert SamplingParams(stop="ab").stop_strings == ("ab",)


def test_what_the_caller_passed_may_change_later() -> None:
    stop, ids, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b")
    ids.append(2)
    bias[2] = 2.0
    assert params.stop_strings == ("a",)
    assert params.stop_ids == frozenset({1})
    assert params.token_bias == {1: 1.0}


def test_a_seed_of_minus_one_is_none() -> None:
    """As clients of vLLM and llama.cpp mean it; other negative seeds are seeds."""
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=5).replace(seed=-1).seed is None
    assert [SamplingParams(seed=seed).seed for seed in (-2, 0, 2**64 - 1)] == [-2, 0, 2**64 - 1]


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(4), seed=np.int64(7))  # type: ignore[arg-type]
    assert (type(params.temperature), type(params.top_k), type(params.seed)) == (float, int, int)
    with pytest.raises(InvalidArgument, match="n must"):
        SamplingParams(n=np.bool_(True))  # type: ignore[arg-type]


def test_is_a_value() -> None:
    one, same = (SamplingParams(temperature=0, stop=["a"], logit_bias={1: 1}) for _ in range(2))
    assert one == same
    assert hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.temperature = 1.0  # type: ignore[misc]
    changed = one.replace(temperature=0.5)
    assert (changed.temperature, changed.stop, one.temperature) == (0.5, ("a",), 0.0)
    with pytest.raises(InvalidArgument, match="temperature"):
        one.replace(temperature=-1)


@pytest.mark.parametrize(
    ("fields", "greedy", "history"),
    [
        ({}, False, False),
        ({"temperature": 0}, True, False),
        ({"top_k": 1}, True, False),
        ({"temperature": 1e-9}, False, False),
        ({"presence_penalty": 0.1}, False, True),
        ({"frequency_penalty": -0.1, "temperature": 0}, True, True),
        ({"repetition_penalty": 0.9}, False, True),
    ],
)
def test_greedy_and_history(fields: dict[str, Any], greedy: bool, history: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.is_greedy, params.needs_history) == (greedy, history)


def test_generation_config() -> None:
    config = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "max_new_tokens": 99, "num_beams": 4}
    assert SamplingParams.from_generation_config(config) == SamplingParams(temperature=0.6, top_k=20, max_tokens=99)
    assert SamplingParams.from_generation_config({}) == SamplingParams()
    with pytest.raises(InvalidArgument, match=r"generation_config\.json.*top_p.*2"):
        SamplingParams.from_generation_config({"top_p": 2})


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.lists(st.integers(0, 9))
        ),
    )
)
def test_any_value_is_accepted_or_refused_in_our_words(fields: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**fields)
    except InvalidArgument as error:
        assert any(name in str(error) for name in fields)  # noqa: PT017
    else:
        assert params.replace() == params


def test_imports_no_torch() -> None:
    code = "import sys, quire.base.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_choices_are_as_many_as_can_be_compiled() -> None:
    most = [str(number) for number in range(MAX_CHOICES)]
    assert len(StructuredOutputs(choice=most).choice or ()) == MAX_CHOICES
    with pytest.raises(InvalidArgument, match=f"at most {MAX_CHOICES} strings, got {MAX_CHOICES + 1}"):
        StructuredOutputs(choice=[*most, "x"])


# -- schemas of classes ----------------------------------------------------------------------------


def test_a_schema_of_a_pydantic_class() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Part(pydantic.BaseModel):
        name: str
        sizes: list[int]

    wanted = StructuredOutputs(json=Part)
    assert wanted == StructuredOutputs(json=Part.model_json_schema())
    assert SamplingParams(structured_outputs={"json": Part}).structured_outputs == wanted
    with pytest.raises(InvalidArgument, match=r"as JSON text or as a pydantic model's class, got Part\("):
        StructuredOutputs(json=Part(name="a", sizes=[]))  # type: ignore[arg-type]


def test_any_class_with_a_schema() -> None:
    class Given:
        @classmethod
        def model_json_schema(cls) -> Any:
            return {"type": "integer"}

    class Broken:
        @classmethod
        def model_json_schema(cls) -> Any:
            raise RuntimeError("a callable has no schema")

    class Odd:
        @classmethod
        def model_json_schema(cls) -> Any:
            return {"type": {1}}

    assert StructuredOutputs(json=Given).json == '{"type": "integer"}'
    with pytest.raises(InvalidArgument, match=r"structured_outputs.json: Broken has no JSON schema: a callable"):
        StructuredOutputs(json=Broken)
    for wrong, words in ((Odd, "what was given is no JSON"), (int, "got <class 'int'>")):
        with pytest.raises(InvalidArgument, match=words):
            StructuredOutputs(json=wrong)
