"""Engines with 8-bit and 4-bit weights: the tokens of the rounded weights, states that no other
weights take over, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams, Unsupported
from quire.adapters.targets import linears_of
from quire.base.errors import QuireError
from quire.kernels.native_library import native_library, native_problem
from quire.weights.packed import pack, unpack

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["def fib(n):", "class Stack:\n    def __init__(self):", "import"]
SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "16MiB"}

pytestmark = pytest.mark.skipif(native_library() is None, reason=native_problem())


def texts(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.turns(2)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_are_those_of_the_rounded_weights(quantization: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle multiplies plain float32 weights that have the rounded values."""
    with LLM("tiny-python", quantization=quantization, **SMALL) as llm:
        found = texts(llm)
        assert quantization in llm.capabilities()["notes"][0]
    monkeypatch.setattr("quire.build.native_linear", lambda: None)
    with LLM("tiny-python", **SMALL) as oracle:
        plain = texts(oracle)
        for name, one in linears_of(oracle._parts.model).items():
            one.weight = unpack(pack(one.weight, "int8" if name == "head" else quantization))
        oracle.reset_prefix_cache()
        assert texts(oracle) == found
    if quantization == "int4":
        assert found != plain


def test_states_do_not_pass_between_weights(tmp_path: Path) -> None:
    with LLM("tiny-python", quantization="int8", **SMALL) as llm:
        session = llm.session()
        session.append("def fib(n):")
        session.save(tmp_path / "a.quire")
        again = llm.load_session(tmp_path / "a.quire")
        assert again.tokens == session.tokens
    for other in (None, "int4"):
        with LLM("tiny-python", quantization=other, **SMALL) as llm, pytest.raises(QuireError, match="weights"):
            llm.load_session(tmp_path / "a.quire")


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="float16") as caught:
        LLM("tiny-python", quantization="int8", dtype="float16", kv_cache_memory="16MiB")
    assert caught.value.field == "quantization"
    with pytest.raises(Unsupported, match="one of 'int8', 'int4', 'fp8', or left out"):
        LLM("tiny-python", quantization="int2")
    monkeypatch.setattr("quire.build.native_linear", lambda: None)
    monkeypatch.setattr("quire.build.native_problem", lambda: "there was no compiler")
    with pytest.raises(Unsupported, match="there was no compiler"):
        LLM("tiny-python", quantization="int4")


def test_only_cpus_have_it() -> None:
    from quire.build import layer_kernels

    with pytest.raises(Unsupported, match="only CPUs"):
        layer_kernels(torch.device("cuda"), "int8")
    assert layer_kernels(torch.device("cuda")).linear is None
