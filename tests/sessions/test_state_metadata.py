"""Metadata of state files that strangers wrote: what is malformed is refused, with its field,
before it costs anything.
"""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of

from quire import LLM
from quire.base.errors import DataLoss, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.cli.inspection import describe
from quire.sessions import saving
from quire.statefile.container import read_state
from state_files import MISSING, NOT_A_NUMBER, VALUES, changed, fields, metadata_of, of_metadata

from .test_saved import PROMPT


def the_field(path: tuple[str | int, ...]) -> str:
    """How errors name it."""
    return "metadata" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def loads(llm: LLM, data: bytes, where: str) -> None:
    """It is refused with one of the two errors, or it is a session whose next token needs no
    others.
    """
    try:
        session = llm.session_from_bytes(data)
    except (InvalidArgument, DataLoss):
        return
    except Exception as error:
        raise AssertionError(f"{where}: {error!r}") from error
    with session:
        assert len(session) - session.num_computed <= 1, where


@pytest.fixture(scope="module")
def plain(python_llm: LLM) -> bytes:
    with python_llm.session("def fib(n):\n") as session:
        return session.to_bytes()


@pytest.fixture(scope="module")
def windowed(python_llm: LLM) -> bytes:
    with python_llm.session("def fib(n):\n    return" * 4, window=16, sink=4) as session:
        return session.to_bytes()


@pytest.mark.parametrize(
    ("kind", "stride"),
    [("plain", 4), *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("plain", "windowed"))],
)
def test_every_field_of_a_session(
    python_llm: LLM, tmp_path: Path, request: pytest.FixtureRequest, kind: str, stride: int
) -> None:
    """Each field with each value, or with every other one."""
    data: bytes = request.getfixturevalue(kind)
    paths = list(fields(metadata_of(data)))
    assert len(paths) > 50
    path = tmp_path / "changed.quire"
    for number, field in enumerate(paths):
        for value in VALUES[number % stride :: stride]:
            if value is MISSING and isinstance(field[-1], int):
                continue
            given = changed(data, field, value)
            loads(python_llm, given, f"{field} {value!r:.40}")
            path.write_bytes(given)
            with suppress(InvalidArgument, DataLoss):
                describe(path)
    check(python_llm)


def test_the_field_is_named(python_llm: LLM, plain: bytes) -> None:
    named = 0
    for field in fields(metadata_of(plain)):
        # Whatever may be null is no field of text, numbers or lists; rope is compared as a whole.
        if field[-1] == "kind" or "rope" in field:
            continue
        for value in ({"a": 1}, 0.5, 2**63):
            with pytest.raises(QuireError) as caught:
                python_llm.session_from_bytes(changed(plain, field, value))
            assert the_field(field) in str(caught.value) or f"{the_field(field)}." in str(caught.value)
            named += 1
        if isinstance(field[-1], str):
            # Which sizes a layer has depends on its kind; what is not there is None then.
            with pytest.raises(QuireError, match=rf"{field[-1]}( is missing| None)"):
                python_llm.session_from_bytes(changed(plain, field, MISSING))
        with pytest.raises(DataLoss, match="NaN is no finite JSON number"):
            python_llm.session_from_bytes(changed(plain, field, NOT_A_NUMBER))
    assert named > 100


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(data=st.data())
@settings(max_examples=examples(30, 200), deadline=None)
def test_any_value_anywhere(python_llm: LLM, windowed: bytes, data: st.DataObject) -> None:
    paths = list(fields(metadata_of(windowed)))
    field, value = data.draw(st.sampled_from(paths)), data.draw(json_values)
    loads(python_llm, changed(windowed, field, value), f"{field} {value!r:.80}")


def test_a_state_shorter_than_its_tokens_is_refused(python_llm: LLM, windowed: bytes) -> None:
    """A window hides how many tokens there are; whoever loaded such a file would have to run all of
    them.
    """
    tokens = metadata_of(windowed)["tokens"] * 5000
    given = changed(changed(windowed, ("tokens",), tokens), ("positions",), [0, len(tokens)])
    with pytest.raises(DataLoss, match=rf"the state of \d+ tokens and names {len(tokens)}"):
        python_llm.session_from_bytes(given)
    empty = changed(given, ("sequence",), None)
    with pytest.raises(InvalidArgument, match="tensors that no row has"):
        python_llm.session_from_bytes(empty)


CONTAINERS = ("[" + "[]," * 3_000_000 + "0]", '{"a":' * 50 + "[" + "{}," * 3_000_000 + "0]" + "}" * 50)


@pytest.mark.parametrize("bomb", CONTAINERS)
def test_headers_of_containers_are_refused_before_they_are_parsed(python_llm: LLM, tmp_path: Path, bomb: str) -> None:
    given = of_metadata(f'{{"kind":"session","tokens":{bomb}}}')
    path = tmp_path / "bomb.quire"
    path.write_bytes(given)
    for read in (
        lambda: python_llm.session_from_bytes(given),
        lambda: python_llm.load_session(path),
        lambda: describe(path),
    ):
        tracemalloc.start()
        try:
            with pytest.raises(DataLoss, match="arrays and objects"):
                read()
            # Copies of the text, of which no container was made.
            assert tracemalloc.get_traced_memory()[1] < 3 * len(given)
        finally:
            tracemalloc.stop()


def test_headers_are_as_large_as_the_model_needs(python_llm: LLM, plain: bytes) -> None:
    """Limits are those of the layers, not of the format: the format allows a million arrays and 100
    MB.
    """
    for bomb, what in (
        ("[" + "[]," * 20_000 + "0]", "arrays and objects"),
        ("[" + "1," * (saving.LONGEST + 100_000) + "0]", "values"),
        ('"' + "x" * (saving.LONGEST * 12 + 10_000_000) + '"', "bytes"),
    ):
        given = of_metadata(f'{{"kind":"session","tokens":{bomb}}}')
        with pytest.raises(DataLoss, match=f"at most \\d+ {what}"):
            python_llm.session_from_bytes(given)
    with read_state(plain) as file:
        assert file.names


def test_kept_states_are_within_the_limits(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    """A pool of the smallest pages and of many kept states saves what it takes again."""
    llm = make_llm(hybrid, page_size=1, checkpoint_interval=1)
    with llm.session(PROMPT) as session:
        data = session.to_bytes()
    with llm.session_from_bytes(data) as again:
        assert again.tokens == PROMPT


def test_sessions_too_long_for_a_file_are_not_saved(
    python_llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    longest = python_llm.engine.max_model_len
    monkeypatch.setattr(saving, "LONGEST", 1)
    tokens = [5] * (longest + 8)
    with python_llm.session(tokens[:16], window=16) as session:
        session.append(tokens[16:])
        with pytest.raises(Unsupported, match=f"has {longest + 8} tokens; a state file holds at most {longest}"):
            session.save(tmp_path / "long.quire")
    assert not list(tmp_path.iterdir())


def test_only_expected_errors_come_of_full_pools(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A length that the pool does not have is a refusal too."""
    llm = make_llm(llama, pool=64)
    with llm.session(PROMPT) as session:
        data = session.to_bytes()
    with llm.session(PROMPT[::-1], pin=True), pytest.raises(ResourceExhausted):
        llm.session_from_bytes(data)
    assert engine_of(llm).runner.state.num_available_pages()
