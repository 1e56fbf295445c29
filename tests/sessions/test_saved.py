"""Sessions to files and back: into other pools, and what a wrong or damaged file leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, make_checkpoint, random_tokens, record

from quire import LLM, DataLoss, InvalidArgument, NotFound, ResourceExhausted
from quire.base.errors import QuireError
from quire.statefile.container import plan_of, read_state, to_bytes

PROMPT = random_tokens(40)


@pytest.mark.turns(3)
@pytest.mark.parametrize(("page_size", "max_len"), [(1, 256), (5, 64), (16, 128), (64, 100)])
def test_into_other_pools(
    make_llm: MakeLLM, checkpoint: Checkpoint, tmp_path: Path, page_size: int, max_len: int
) -> None:
    session = make_llm(checkpoint, page_size=7).session(PROMPT)
    session.generate(greedy(3))
    session.save(tmp_path / "state.quire")
    other = make_llm(checkpoint, page_size=page_size, max_model_len=max_len, enable_prefix_caching=page_size != 5)
    recorder = record(other)
    loaded = other.load_session(str(tmp_path / "state.quire"))
    assert loaded.tokens == session.tokens
    assert loaded.generate(greedy(6)).outputs[0].token_ids == checkpoint.greedy(session.tokens, 6)
    assert recorder.num_tokens == 6, "the state came from the file"
    check(other)


ROPES = {
    "dynamic": ({"factor": 2.0}, 128, 256, "max_model_len up to 128, and the model runs for max_model_len 256"),
    "longrope": (
        {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64},
        64,
        128,
        "max_model_len up to 64, and the model runs for max_model_len above 64",
    ),
}


@pytest.mark.parametrize("rule", sorted(ROPES))
def test_a_state_of_another_length_is_refused_as_that(
    rule: str, make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where RoPE depends on the longest sequence, short sequences differ from transformers, too."""
    fields, short, long, words = ROPES[rule]
    given = make_checkpoint(
        "llama",
        tmp_path / rule,
        max_position_embeddings=128,
        rope_parameters={"rope_type": rule, "rope_theta": 100.0, **fields},
    )
    kept = {"state_dir": str(tmp_path / "kept")}
    first = make_llm(given, max_model_len=short, **kept)
    assert not [one for one in first.capabilities()["notes"] if "max_model_len" in one]
    assert "other logits" not in caplog.text
    session = first.session(PROMPT, name="mine")
    assert session.generate(greedy(4)).outputs[0].token_ids == given.greedy(PROMPT, 4), "as transformers"
    data = session.to_bytes()
    session.commit("main")
    first.close()

    second = make_llm(given, max_model_len=long, **kept)
    note = second.capabilities()["notes"][-1]
    assert f"max_model_len {long}" in note
    assert f"with max_model_len {short} or less they have the same" in note
    assert note in caplog.text
    assert second.session(PROMPT).generate(greedy(4)).outputs[0].token_ids != given.greedy(PROMPT, 4)
    refused(second, data, InvalidArgument, f"the state was computed for {words}")
    with pytest.raises(InvalidArgument, match=f"the state was computed for {words}"):
        second.checkout("main")
    with pytest.raises(NotFound, match=f"'mine' was computed for {words}"):
        second.resume("mine")


def test_bytes_are_those_of_the_file(llm: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    session = llm.session(PROMPT)
    session.save(tmp_path / "a.quire")
    assert (tmp_path / "a.quire").read_bytes() == session.to_bytes()
    loaded = [llm.session_from_bytes(kind(session.to_bytes())) for kind in (bytes, bytearray, memoryview)]
    session.close()
    first = [loaded[0].kv(layer) for layer in range(2)]
    for other in loaded:
        for layer in range(2):
            torch.testing.assert_close(other.kv(layer), first[layer], rtol=0, atol=0)
        assert other.generate(greedy(6)).outputs[0].token_ids == checkpoint.greedy(PROMPT, 6)
    assert llm.session_from_bytes(llm.session([]).to_bytes()).tokens == []
    assert llm.session_from_bytes(llm.session([3]).to_bytes()).tokens == [3]


def test_what_was_dropped_is_computed_before_it_is_saved(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=64, page_size=4)
    session = llm.session(PROMPT)
    llm.session(random_tokens(50, seed=1))
    assert session.num_computed == 0
    data = session.to_bytes()
    loaded = make_llm(llama).session_from_bytes(data)
    assert loaded.num_computed == 39
    assert loaded.generate(greedy(6)).outputs[0].token_ids == llama.greedy(PROMPT, 6)


def test_written_state_survives(make_llm: MakeLLM, llama: Checkpoint) -> None:
    session = make_llm(llama).session(PROMPT)
    session.set_kv(1, v=torch.zeros(20, 2, 16))
    loaded = make_llm(llama, page_size=3).session_from_bytes(session.to_bytes())
    assert loaded.modified
    assert loaded.pinned
    assert not loaded.kv(1)["v"][:20].any()
    assert loaded.generate(greedy(9)).outputs[0].token_ids == session.generate(greedy(9)).outputs[0].token_ids


def refused(llm: LLM, data: bytes, error: type[QuireError], match: str) -> None:
    """Loading raises, and afterwards the pool is as it was."""
    state = engine_of(llm).runner.state
    before = (list(state.sequences.ids), state.num_available_pages(), len(engine_of(llm).branches.sessions))
    with pytest.raises(error, match=match):
        llm.session_from_bytes(data)
    assert (list(state.sequences.ids), state.num_available_pages(), len(engine_of(llm).branches.sessions)) == before
    check(llm)


def test_another_model(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint], tmp_path: Path) -> None:
    data = make_llm(checkpoints["llama"]).session(PROMPT).to_bytes()
    refused(make_llm(checkpoints["mistral"]), data, InvalidArgument, "another model: architecture .*Llama.*Mistral")
    weights = make_checkpoint("llama", tmp_path / "weights", seed=9)
    refused(make_llm(weights), data, InvalidArgument, "another model: weights .* found, .* expected")
    config = make_checkpoint("llama", tmp_path / "config", rms_norm_eps=1e-3)
    refused(make_llm(config), data, InvalidArgument, "another model: config .* found, .* expected")


def test_dtype(make_llm: MakeLLM, llama: Checkpoint) -> None:
    exact = make_llm(llama)
    half = make_llm(llama, kv_dtype="bfloat16", pool=2048)
    data = half.session(PROMPT).to_bytes()
    refused(exact, data, InvalidArgument, "bfloat16.*float32.*convert_dtype")
    loaded = exact.session_from_bytes(data, convert_dtype=True)
    assert loaded.tokens == PROMPT
    # V of the first layer depends on nothing that was stored, so one rounding to the nearest
    # bfloat16 is all.
    rounding = torch.finfo(torch.bfloat16).eps / 2 + 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(loaded.kv(0)["v"][:39], exact.session(PROMPT).kv(0)["v"][:39], rtol=rounding, atol=0)
    # What went through bfloat16 is nobody's prefix.
    loaded.close()
    assert exact.generate(PROMPT, greedy(6))[0].outputs[0].token_ids == llama.greedy(PROMPT, 6)


def test_damaged_bytes(small: LLM, llama: Checkpoint) -> None:
    data = small.session(PROMPT).to_bytes()
    small.reset_prefix_cache()
    for length in (0, 1, 7, 8, 9, 200, len(data) // 2, len(data) - 1):
        refused(small, data[:length], DataLoss, ".")
    for position in range(0, len(data), len(data) // 40):
        flipped = bytearray(data)
        flipped[position] ^= 0x10
        with pytest.raises((DataLoss, InvalidArgument)):
            small.session_from_bytes(flipped)
        check(small)
    refused(small, data + b"x", DataLoss, ".")
    assert engine_of(small).runner.state.empty()
    assert small.session_from_bytes(data).generate(greedy(6)).outputs[0].token_ids == llama.greedy(PROMPT, 6)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"kind": "soup"}, InvalidArgument, "kind 'soup'; 'session' or 'kv_cache'"),
        ({"kind": "kv_cache"}, DataLoss, "metadata.exact is True; a list"),
        ({"model": None}, DataLoss, "metadata.model is None"),
        ({"adapters": None}, DataLoss, "metadata.adapters is None"),
        ({"adapters": [{"from": 0}]}, DataLoss, r"metadata.adapters\[0\] is"),
        ({"exact": None}, DataLoss, "metadata.exact is None"),
        ({"modified": 1}, DataLoss, "metadata.modified is 1"),
        ({"tokens": 7}, DataLoss, "metadata.tokens is 7"),
        ({"tokens": [2**70] * 40}, DataLoss, r"metadata.tokens\[0\] is"),
        ({"tokens": [True] * 40}, DataLoss, r"metadata.tokens\[0\] is"),
        ({"tokens": [-1] * 40}, DataLoss, "names token -1"),
        ({"tokens": PROMPT[:9], "positions": [0, 9]}, DataLoss, "state of 39 tokens and names 9"),
        ({"positions": [0, 41]}, DataLoss, r"\[0, 40\] is expected"),
        ({"sequence": None}, InvalidArgument, "tensors that no row has"),
        ({"tokens": [*PROMPT, *PROMPT], "positions": [0, 80]}, DataLoss, "state of 39 tokens and names 80"),
        ({"window": [8]}, DataLoss, "metadata.window is"),
        ({"window": [8, 8]}, DataLoss, r"window \[8, 8\]"),
        ({"colour": 1}, DataLoss, "metadata.colour is not known"),
        ({"sequence": [1]}, DataLoss, "metadata.sequence is"),
    ],
)
def test_metadata_that_makes_no_sense(
    small: LLM, changes: dict[str, object], error: type[QuireError], match: str
) -> None:
    """Undamaged containers, as another program might write them."""
    with small.session(PROMPT) as session, read_state(session.to_bytes()) as file:
        tensors = {name: file.tensor(name) for name in file.names}
        metadata = dict(file.metadata)
    assert small.session_from_bytes(to_bytes(metadata, plan_of(tensors), tensors.items())).tokens == PROMPT
    refused(small, to_bytes({**metadata, **changes}, plan_of(tensors), tensors.items()), error, match)
    refused(small, to_bytes({**metadata, "sequence": None}, [], ()), DataLoss, "state of 0 tokens and names 40")


def test_missing_files_and_wrong_arguments(small: LLM, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="absent"):
        small.load_session(tmp_path / "absent.quire")
    with pytest.raises(QuireError):
        small.load_session(tmp_path)
    for wrong in (None, 3, "text"):
        with pytest.raises(InvalidArgument):
            small.session_from_bytes(wrong)  # type: ignore[arg-type]
    with pytest.raises(QuireError, match="missing-folder"):
        small.session([1, 2]).save(tmp_path / "missing-folder" / "a.quire")
    check(small)


def test_a_pool_that_is_too_small(make_llm: MakeLLM, llama: Checkpoint) -> None:
    data = make_llm(llama).session(PROMPT).to_bytes()
    refused(make_llm(llama, pool=32), data, ResourceExhausted, "40 prompt tokens|40 tokens")
    refused(make_llm(llama, max_model_len=32), data, InvalidArgument, "context length is 32")
    full = make_llm(llama, pool=64)
    with full.session(random_tokens(40, seed=1), pin=True):
        refused(full, data, ResourceExhausted, "page")


def test_loading_takes_the_room_of_what_is_idle(make_llm: MakeLLM, llama: Checkpoint) -> None:
    data = make_llm(llama).session(PROMPT).to_bytes()
    llm = make_llm(llama, pool=96, page_size=4)
    llm.generate(random_tokens(40, seed=1), greedy(3))
    idle = llm.session(random_tokens(40, seed=2))
    loaded = llm.session_from_bytes(data)
    assert loaded.num_computed == 39
    assert llm.session_from_bytes(data).num_computed == 39
    assert idle.num_computed == 0
    check(llm)
    assert idle.generate(greedy(4)).outputs[0].token_ids == llama.greedy(random_tokens(40, seed=2), 4)
    assert loaded.generate(greedy(4)).outputs[0].token_ids == llama.greedy(PROMPT, 4)
