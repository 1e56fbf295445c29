"""KV caches as bytes: round trips, and bytes that must be refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.executor.conftest import CONTEXT, Tiny, inputs, make_executor, prompt, refused, some_ids
from tests.executor.test_kv_cache import content, filled, same

from quire.base.errors import DataLoss, InvalidArgument, QuireError, ResourceExhausted
from quire.executor.cache import KVCache
from quire.executor.executor import Executor
from quire.executor.llm_executor import LlmExecutor
from quire.statefile.container import plan_of, read_state, to_bytes


def rewritten(data: bytes, change: Any = None, tensors: Any = None) -> bytes:
    """The state with other metadata or tensors, and checksums that fit."""
    with read_state(data) as file:
        metadata = dict(file.metadata)
        held = {name: file.tensor(name).clone() for name in file.names}
    if change is not None:
        metadata = {**metadata, **change}
    if tensors is not None:
        tensors(held)
    return to_bytes(metadata, plan_of(held), held.items())


@pytest.mark.parametrize("dynamic", [False, True])
def test_round_trip_is_bit_exact(tiny: Tiny, executor: Executor, dynamic: bool) -> None:
    llm = LlmExecutor(executor)
    rows = [some_ids(9, 1), some_ids(4, 2), some_ids(1, 3)]
    cache = filled(executor, *rows, dynamic=dynamic)
    fresh = make_executor(tiny)
    other = fresh.create_kv_cache(batch_size=3, dynamic=dynamic)
    other.load(cache.serialize())
    assert other.lengths == (9, 4, 1)
    assert [other.token_ids(row).tolist() for row in range(3)] == rows
    assert same(content(other), content(cache))
    assert other.num_entries == (9 if dynamic else CONTEXT)
    steps = [inputs([5], [6], [7]), inputs([1], [2], [3], at=(2, 4, 0))]
    for step in steps:
        assert torch.equal(llm.step(step, cache), LlmExecutor(fresh).step(step, other))
    assert other.serialize() == cache.serialize()


def test_round_trip_of_an_empty_cache(ex: Executor) -> None:
    empty, target = ex.create_kv_cache(capacity=9), filled(ex, [1, 2, 3])
    target.load(empty.serialize())
    assert (target.length, target.num_entries, target.token_ids(0).size) == (0, CONTEXT, 0)


def test_loading_replaces_content(ex: Executor) -> None:
    source, target = filled(ex, some_ids(6)), filled(ex, some_ids(9, 4))
    handle = ex.truncate_kv(target, 9)
    fork = target.deep_copy()
    before, used = content(fork), ex.pool.state.num_used_pages
    target.load(source.serialize())
    assert not handle.is_valid
    assert same(content(fork), before)
    assert ex.pool.state.num_used_pages == used + 2
    target.load(bytearray(source.serialize()))
    assert ex.pool.state.num_used_pages == used + 2


@pytest.mark.slow
def test_another_process(tmp_path: Path, llama: Tiny, ex: Executor) -> None:
    cache = filled(ex, some_ids(7), some_ids(3))
    (tmp_path / "state").write_bytes(cache.serialize())
    script = f"""
import sys
from pathlib import Path
from tests.executor.conftest import *
from quire.executor.llm_executor import LlmExecutor
ex = make_executor(Tiny("Llama", None, load_model({str(llama.path)!r}, dtype="float32"), None))
cache = ex.create_kv_cache(batch_size=2)
cache.load(Path({str(tmp_path / "state")!r}).read_bytes())
torch.save(LlmExecutor(ex).step(inputs([5], [6]), cache), {str(tmp_path / "logits")!r})
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=120)
    assert torch.equal(torch.load(tmp_path / "logits"), LlmExecutor(ex).step(inputs([5], [6]), cache))


def test_damaged_bytes_leave_the_target_intact(ex: Executor) -> None:
    data = filled(ex, [1, 2]).serialize()
    target = filled(ex, some_ids(5))
    with refused(DataLoss, ex, target):
        target.load(data + b"\0")
    before = content(target)
    generator = torch.Generator().manual_seed(0)
    # Every offset of the header's beginning and of some everywhere; the container's own suite tries
    # all.
    offsets = {*range(64), *torch.randint(len(data), (60,), generator=generator).tolist(), len(data) - 1}
    for offset in sorted(offsets):
        with pytest.raises(DataLoss):
            target.load(data[:offset])
        flipped = bytearray(data)
        flipped[offset] ^= 1 << (offset % 8)
        with pytest.raises(QuireError) as caught:
            target.load(bytes(flipped))
        assert caught.type in (DataLoss, InvalidArgument)
    assert same(content(target), before)
    assert target.token_ids(0).tolist() == some_ids(5)
    for bad in (None, "a path", 3):
        with refused(InvalidArgument, ex, target, match="load: data must be a bytes or a bytearray or a memoryview"):
            target.load(bad)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused(llama: Tiny, tinies: dict[str, Tiny], ex: Executor) -> None:
    cache = filled(ex, some_ids(6), some_ids(3))
    data = cache.serialize()
    target = filled(ex, [1], [2])
    with read_state(data) as file:
        rows: Any = file.metadata["rows"]
        model: Any = file.metadata["model"]
    cases: list[tuple[type[QuireError], bytes, str]] = [
        (InvalidArgument, rewritten(data, {"kind": "soup"}), "kind 'soup'; 'session' or 'kv_cache' or 'kv_cache_with"),
        (DataLoss, rewritten(data, {"kind": "session"}), "metadata"),
        (InvalidArgument, rewritten(data, {"model": {**model, "weights": "x"}}), "weights 'x' found"),
        (DataLoss, rewritten(data, {"model": None}), "metadata.model is None"),
        (DataLoss, rewritten(data, {"adapters": [1]}), r"metadata.adapters\[0\] is 1"),
        (DataLoss, rewritten(data, {"adapters": [1, []]}), r"metadata.adapters\[0\] is 1"),
        (DataLoss, rewritten(data, {"adapters": [[[1, "x"]], []]}), "begins at 1"),
        (DataLoss, rewritten(data, {"adapters": [[[0, "x"], [6, None]], []]}), "in order"),
        (DataLoss, rewritten(data, {"adapters": [[], [[0, 5]]]}), r"metadata.adapters\[1\]\[0\]\[1\] is 5"),
        (DataLoss, rewritten(data, {"adapters": [[], [[True, None]]]}), r"metadata.adapters\[1\]\[0\]\[0\] is True"),
        (
            InvalidArgument,
            rewritten(data, {"adapters": [[], [[0, None], [2, "x"]]]}),
            "fingerprint x from token 2 on, expected to be loaded",
        ),
        (InvalidArgument, rewritten(data, {"batch_size": 3}), "3 rows, 2 are expected"),
        (DataLoss, rewritten(data, {"rows": rows[:1]}), "rows of the state"),
        (DataLoss, rewritten(data, {"rows": None}), "metadata.rows is None"),
        (DataLoss, rewritten(data, {"lengths": [6, 4]}), "lengths"),
        (DataLoss, rewritten(data, {"next_positions": [6, 2]}), "next_positions"),
        (DataLoss, rewritten(data, {"tokens": [[1] * 6, [1] * 4]}), "state of 3 tokens and names 4"),
        (DataLoss, rewritten(data, {"tokens": [[1] * 5 + [97], [1] * 3]}), "token 97"),
        (DataLoss, rewritten(data, {"tokens": [[1] * 5 + [True], [1] * 3]}), "True"),
        (
            InvalidArgument,
            rewritten(data, {"rows": [{**rows[0], "format_version": 9}, rows[1]]}),
            "format_version is 9",
        ),
        (InvalidArgument, rewritten(data, tensors=lambda t: t.update(x=torch.ones(1))), "no row has"),
        (InvalidArgument, rewritten(data, tensors=lambda t: t.pop("row.1.layer.0.v")), "lacks"),
        (
            InvalidArgument,
            rewritten(data, tensors=lambda t: t.update({"row.0.layer.1.k": torch.ones(5, 2, 8)})),
            "shape",
        ),
        (
            InvalidArgument,
            rewritten(data, tensors=lambda t: t.update({"row.0.layer.1.k": torch.ones(6, 2, 8).half()})),
            "metadata says|float16",
        ),
    ]
    for kind, bad, match in cases:
        with refused(kind, ex, target, match=match):
            target.load(bad)
    other = make_executor(tinies["Qwen3"])
    with pytest.raises(InvalidArgument, match="another model"):
        other.create_kv_cache(batch_size=2).load(data)
    one, small = filled(ex, [1]), filled(ex, [1], [2], capacity=5)
    with refused(InvalidArgument, ex, one, match="2 rows, 1 are expected"):
        one.load(data)
    with refused(InvalidArgument, ex, small, match="5 slots"):
        small.load(data)
    growing = filled(ex, [1], [2], dynamic=True)
    growing.load(data)
    assert growing.num_entries == 6
    unknown = rewritten(data, {"tokens": [None, [4, 5, 6]]})
    growing.load(unknown)
    assert growing.token_ids(0) is None


def test_dtype_is_converted_on_request_only(llama: Tiny, ex: Executor) -> None:
    data = filled(ex, some_ids(6)).serialize()
    half = make_executor(llama, dtype=torch.bfloat16)
    target = filled(half, [1])
    with refused(InvalidArgument, half, target, match="convert_dtype"):
        target.load(data)
    target.load(data, convert_dtype=True)
    assert target.length == 6
    expected = filled(half, some_ids(6))
    assert target.read(0, [6], values=True).dtype == torch.bfloat16
    assert torch.equal(target.read(0, [6], values=True), expected.read(0, [6], values=True))
    back: KVCache = ex.create_kv_cache()
    back.load(target.serialize(), convert_dtype=True)
    assert back.length == 6


def test_limits_of_the_reader(llama: Tiny, ex: Executor) -> None:
    data = filled(ex, some_ids(30)).serialize()
    short = make_executor(llama, max_model_len=29)
    with pytest.raises(ResourceExhausted, match="maximum is 29"):
        short.create_kv_cache(dynamic=True).load(data)
    tight = make_executor(llama, tokens=32)
    target = tight.create_kv_cache()
    target.load(data)
    with refused(ResourceExhausted, tight, target, match="pages"):
        target.load(data)
    target.clear()
    target.load(data)
    assert tight.prefill(prompt([1, 2], kv_cache=target)).kv_cache.sequence_length == 32
