"""The container of the state file: what goes in comes out, and nothing damaged is ever accepted.

Oracles: safetensors' own reader, the reference reader of docs/statefile.md (its code is run), and
an independent ``seal`` here that gives any header, right or wrong, its right checksum.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import re
import struct
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save as safetensors_save
from tests.examples import examples
from torch import Tensor

from quire.base.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
)
from quire.statefile import atomic_file
from quire.statefile import header as state_header
from quire.statefile.container import plan_of, read_state, to_bytes, write_state
from quire.statefile.header import TensorSpec, dtypes

DOC = (Path(__file__).parents[2] / "docs" / "statefile.md").read_text()
PREFIX = b'{"__metadata__":{"header_checksum":"'


def pack(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    return to_bytes(metadata, plan_of(tensors), tensors.items())


def save(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> int:
    return write_state(path, metadata, plan_of(tensors), tensors.items())


def raw(tensor: Tensor) -> bytes:
    """Bytes by a way of its own: element by element would be slow, untyped storage is not used by
    the writer.
    """
    return bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


SMALL = {
    "layer.0.k": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "state": torch.tensor([1.5, float("nan")], dtype=torch.float64),
    "none": torch.empty(0, 4),
    "flags": torch.tensor([1, 255, 3], dtype=torch.uint8),
}
SMALL_BYTES = pack({"tokens": [5, 6], "text": 'a "quoted" é'}, SMALL)


def seal(table: str, data: bytes = b"", *, size: int | None = None) -> bytes:
    """A file with this text as header, with the right checksum in it: damage that only validation
    can find.
    """
    header = table.encode("utf-8", "surrogatepass")
    head = (len(header) if size is None else size).to_bytes(8, "little") + header
    at = 8 + len(PREFIX)
    assert head[8:at] == PREFIX
    assert head[at : at + 32] == b"0" * 32
    return head[:at] + xxhash.xxh3_128_hexdigest(head).encode() + head[at + 32 :] + data


def table(
    tensors: str = "",
    *,
    version: str = "1",
    format: str = '"quire-state"',
    metadata: str = "{}",
    checksums: str | None = None,
    document: str | None = None,
) -> str:
    """The text of a header; ``tensors`` is JSON without braces."""
    if checksums is None:
        names = re.findall(r'"([^"]+)":\{', tensors)
        checksums = json.dumps(dict.fromkeys(names, xxhash.xxh3_128_hexdigest(b"")))
    if document is None:
        document = f'{{"checksums":{checksums},"format":{format},"metadata":{metadata},"version":{version}}}'
    text = f'{PREFIX.decode()}{"0" * 32}","quire":{json.dumps(document)}}}'
    return text + (f",{tensors}" if tensors else "") + "}"


def entry(name: str, dtype: str = "U8", shape: str = "[0]", offsets: str = "[0,0]") -> str:
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


# What goes in comes out

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
names = st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def tensor_values(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(list(dtypes().values()))), draw(shapes)
    count = torch.Size(shape).numel()
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    flat = torch.tensor(list(data), dtype=torch.uint8).view(dtype)
    tensor = flat.reshape(shape)
    if draw(st.booleans()):
        tensor = tensor.mT if tensor.ndim >= 2 else torch.stack((tensor, tensor), -1)[..., 0]
    return tensor


@given(metadata=st.dictionaries(st.text(), json_values, max_size=5), tensors=st.dictionaries(names, tensor_values()))
@settings(max_examples=examples(50, 150), deadline=None)
def test_round_trip(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    data = pack(metadata, tensors)
    state = read_state(data)
    assert state.metadata == metadata
    assert json.dumps(state.metadata, sort_keys=True) == json.dumps(metadata, sort_keys=True)  # 1 is not 1.0 or True
    assert state.names == tuple(tensors)
    assert state.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())
    for name, tensor in tensors.items():
        found = state.tensor(name)
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert raw(found) == raw(tensor)  # to the bit, NaN payloads too
    assert pack(metadata, {name: state.tensor(name) for name in state.names}) == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_path_and_bytes_are_the_same_format(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "a.quire"
    size = save(path, {"tokens": [5, 6], "text": 'a "quoted" é'}, SMALL)
    assert path.read_bytes() == SMALL_BYTES
    assert size == len(SMALL_BYTES)
    for source in (path, str(path), kind(SMALL_BYTES)):
        with read_state(source) as state:
            assert {name: raw(state.tensor(name)) for name in state.names} == {n: raw(t) for n, t in SMALL.items()}
    strided = memoryview(b"".join(bytes([byte, 0]) for byte in SMALL_BYTES))[::2]
    assert read_state(strided).names == tuple(SMALL)


def test_unusual_tensors() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "scalar": torch.tensor(3, dtype=torch.int64),
        "expanded": torch.tensor([1.0]).expand(3, 2),
        "strided": base[::2, 1::2],
        "grad": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.half()),
        "negated": torch.tensor([1 + 2j]).conj().imag,  # a view with the neg bit
        "ranked": torch.ones((1,) * 64),
    }
    state = read_state(pack({}, tensors))
    for name, tensor in tensors.items():
        assert torch.equal(state.tensor(name), tensor), name


def test_safetensors_opens_our_files(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    save(path, {"tokens": list(range(1000))}, SMALL)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(SMALL)
        assert set(file.metadata()) == {"header_checksum", "quire"}
        for name, tensor in SMALL.items():
            assert raw(file.get_tensor(name)) == raw(tensor)
            assert file.get_tensor(name).dtype == tensor.dtype


def test_every_tensor_is_aligned_to_its_element(tmp_path: Path) -> None:
    # Odd sizes first in the plan; a header of any length.
    for pad in range(9):
        tensors = {"b": torch.ones(3, dtype=torch.int8), "h": torch.ones(1).half(), "d": torch.ones(2).double()}
        path = tmp_path / f"{pad}"
        save(path, {"pad": "x" * pad}, tensors)
        with read_state(path) as state:
            assert state.names == ("b", "h", "d")
            again = state.tensor("d")
            again[0] = 7.0  # seen through a second view: it was no copy
            assert state.tensor("d")[0] == 7.0
            assert read_state(path).tensor("d")[0] == 1.0  # and the file has not changed


def test_views_share_the_given_bytes_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = bytearray(SMALL_BYTES)
        view = read_state(source).tensor("flags")
        source[source.index(bytes([1, 255, 3]))] = 9
        assert view[0] == 9
        constant = bytes(bytearray(SMALL_BYTES))
        references = sys.getrefcount(constant)
        view = read_state(constant).tensor("flags")
        gc.collect()
        assert sys.getrefcount(constant) > references  # the view alone keeps the bytes
        assert view.tolist() == [1, 255, 3]
        del view
        assert sys.getrefcount(constant) == references


def test_a_foreign_order_of_tensors_is_read() -> None:
    data = bytes([7]) + struct.pack("<2f", 1.5, -2.0)
    sums = {"a": xxhash.xxh3_128_hexdigest(data[:1]), "b": xxhash.xxh3_128_hexdigest(data[1:])}
    both = entry("b", "F32", "[2]", "[1,9]") + "," + entry("a", "U8", "[1]", "[0,1]")
    for pad in range(8):
        state = read_state(seal(table(both, checksums=json.dumps(sums)) + " " * pad, data))
        assert state.tensor("b").tolist() == [1.5, -2.0]
        assert state.tensor("b").data_ptr() % 4 == 0
        assert state.tensor("a").tolist() == [7]


def test_open_and_close(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    save(path, {}, SMALL)
    with read_state(path, verify=False) as state:
        kept = state.tensor("layer.0.k")
        state.verify()
        with pytest.raises(NotFound, match=r"no tensor 'x'; it holds 'layer.0.k'"):
            state.tensor("x")
    path.unlink()
    gc.collect()
    assert torch.equal(kept, SMALL["layer.0.k"])
    assert state.specs["none"] == TensorSpec(name="none", dtype=torch.float32, shape=(0, 4))
    state.close()
    for use in (state.verify, lambda: state.tensor("none")):
        with pytest.raises(FailedPrecondition, match="is closed"):
            use()


# Nothing damaged is accepted


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    for length in range(len(SMALL_BYTES)):
        with pytest.raises(DataLoss):
            read_state(SMALL_BYTES[:length], verify=False)
        if length % 16 == 0:
            path.write_bytes(SMALL_BYTES[:length])
            with pytest.raises(DataLoss, match=r"a\.quire"):
                read_state(path, verify=False)


def test_every_flipped_byte_is_refused() -> None:
    header_len = 8 + int.from_bytes(SMALL_BYTES[:8], "little")
    assert header_len < len(SMALL_BYTES)
    for at in range(len(SMALL_BYTES)):
        for flip in (*(1 << bit for bit in range(8)), 0xFF):
            damaged = bytearray(SMALL_BYTES)
            damaged[at] ^= flip
            with pytest.raises(DataLoss, match="the given state"):
                read_state(damaged, verify=at >= header_len)


def test_damage_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    damaged = bytearray(SMALL_BYTES)
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    found = xxhash.xxh3_128_hexdigest(damaged[-3:])
    expected = xxhash.xxh3_128_hexdigest(SMALL_BYTES[-3:])
    with pytest.raises(DataLoss, match=rf"a\.quire'.*'flags' is damaged.*'{expected}' expected, '{found}' found"):
        read_state(path)
    for surplus in (b"\0", b" ", SMALL_BYTES):
        with pytest.raises(DataLoss, match=f"trailing bytes: 31 bytes of tensors expected, {31 + len(surplus)} found"):
            read_state(SMALL_BYTES + surplus)
    with pytest.raises(DataLoss, match="header is damaged"):
        read_state(SMALL_BYTES.replace(b"tokens", b"Tokens"))


SUM = xxhash.xxh3_128_hexdigest(b"")
CRAFTED = {
    "overlap": (table(entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[2,6]")), 6, "overlaps"),
    "same range": (table(entry("a", "U8", "[4]", "[0,4]") + "," + entry("b", "U8", "[4]", "[0,4]")), 4, "overlaps"),
    "gap": (table(entry("a", "U8", "[1]", "[0,1]") + "," + entry("b", "U8", "[1]", "[2,3]")), 3, "gap"),
    "gap at start": (table(entry("a", "U8", "[1]", "[1,2]")), 2, "gap"),
    "past the end": (table(entry("a", "U8", "[9]", "[0,9]")), 8, "truncated"),
    "short of the end": (table(entry("a", "U8", "[7]", "[0,7]")), 8, "trailing"),
    "negative offsets": (table(entry("a", "U8", "[1]", "[-1,0]")), 0, "offsets"),
    "reversed offsets": (table(entry("a", "U8", "[1]", "[1,0]")), 1, "offsets"),
    "three offsets": (table(entry("a", "U8", "[0]", "[0,0,0]")), 0, "offsets"),
    "float offsets": (table(entry("a", "U8", "[0]", "[0.0,0.0]")), 0, "offsets"),
    "bool offsets": (table(entry("a", "U8", "[1]", "[false,true]")), 1, "offsets"),
    "size of shape": (table(entry("a", "F32", "[1]", "[0,3]")), 3, "4 bytes apart"),
    "negative size": (table(entry("a", "U8", "[-1,-1]", "[0,1]")), 1, r"shape\[0\] is -1; an integer >= 0"),
    "huge size": (
        table(entry("a", "U8", f"[{2**63}]", f"[0,{2**63}]")),
        0,
        r"shape\[0\] is 9223372036854775808; an integer <=",
    ),
    "huge extent": (table(entry("a", "F64", f"[0,{2**40},{2**40}]")), 0, "sizes >= 0"),
    "huge extent, no zero": (table(entry("a", "U8", f"[{2**62},4]", f"[0,{2**64}]")), 0, "sizes >= 0"),
    "rank": (table(entry("a", "U8", json.dumps([1] * 65), "[0,1]")), 1, "up to 64 sizes"),
    "bool size": (table(entry("a", "U8", "[true]", "[0,1]")), 1, r"shape\[0\] is True; an integer is"),
    "shape is no list": (table(entry("a", "U8", "0", "[0,0]")), 0, "shape is 0; a list is"),
    "dtype is no text": (table('"a":{"dtype":1,"shape":[0],"data_offsets":[0,0]}'), 0, "dtype"),
    "surplus key": (
        table('"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}'),
        0,
        "x is not known; one of dtype, shape, data_offsets",
    ),
    "entry is no object": (table('"a":7', checksums=f'{{"a":"{SUM}"}}'), 0, "'a' is 7; an object is"),
    "duplicate tensor": (table(entry("a") + "," + entry("a")), 0, "stands twice"),
    "second metadata": (table('"__metadata__":{}', checksums="{}"), 0, "stands twice"),
    "duplicate in document": (table(metadata='{"a":1,"a":1}'), 0, "stands twice"),
    "NaN": (table(metadata='{"a":NaN}'), 0, "JSON number"),
    "infinity": (table(metadata='{"a":-Infinity}'), 0, "JSON number"),
    "float overflow": (table(metadata='{"a":1e999}'), 0, "JSON number"),
    "huge integer": (table(metadata=f'{{"a":{"9" * 5000}}}'), 0, "valid JSON"),
    "lone surrogate": (table(metadata='{"a":"\\ud800"}'), 0, "valid JSON"),
    "surrogate in name": (table(entry("\\ud800")), 0, "valid JSON"),
    "not UTF-8": (table(entry("\ud800")), 0, "UTF-8"),
    "deep document": (table(metadata='{"a":' + "[" * 100_000 + "]" * 100_000 + "}"), 0, "nested too deeply"),
    "deep header": (table('"a":' + '{"a":' * 100_000 + "1" + "}" * 100_000), 0, "nested too deeply"),
    "surplus text": (table() + "{}", 0, "valid JSON"),
    "document is a list": (table(document="[]"), 0, "object expected"),
    "document is no JSON": (table(document="{"), 0, "valid JSON"),
    "metadata is a list": (table(metadata="[]"), 0, "quire.metadata is"),
    "checksums are a list": (table(checksums="[]"), 0, "quire.checksums is"),
    "unknown key in document": (
        table(document='{"checksums":{},"format":"quire-state","metadata":{},"version":1,"x":0}'),
        0,
        "quire.x is not known; one of format, version, checksums, metadata is",
    ),
    "checksum missing": (table(entry("a"), checksums="{}"), 0, "of none found"),
    "checksum surplus": (table(entry("a"), checksums=f'{{"a":"{SUM}","b":"{SUM}"}}'), 0, "checksums of 'a' expected"),
    "checksum is a number": (table(entry("a"), checksums='{"a":1}'), 0, "quire.checksums is .*; text is expected"),
    "wrong checksum": (table(entry("a"), checksums=f'{{"a":"{SUM.upper()}"}}'), 0, "'a' is damaged"),
    "no document": (f'{PREFIX.decode()}{"0" * 32}"}}}}', 0, "text 'quire'"),
    "document is no text": (f'{PREFIX.decode()}{"0" * 32}","quire":7}}}}', 0, "text 'quire'"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_headers_are_data_loss(case: str) -> None:
    text, size, reason = CRAFTED[case]
    with pytest.raises(DataLoss, match=reason):
        read_state(seal(text, bytes(size)))


def test_the_crafted_headers_differ_from_a_good_one_only_in_their_fault() -> None:
    assert read_state(seal(table(entry("a") + "," + entry("b", "F64", "[2,0]")))).names == ("a", "b")
    assert read_state(seal(table(metadata='{"a":"\\ud83d\\ude00"}'))).metadata == {"a": "\U0001f600"}


@pytest.mark.parametrize("size", [0, 1, 7, 67, 100_000_001, 1 << 31, 1 << 63, (1 << 64) - 1])
def test_absurd_header_lengths(size: int) -> None:
    with pytest.raises(DataLoss):
        read_state(seal(table(), bytes(100), size=size))


def test_a_header_over_the_limit_is_refused_although_the_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sparse"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 200_000_000)
    with pytest.raises(DataLoss, match="at most 100000000 bytes expected"):
        read_state(path)
    sizes = [int.from_bytes(to_bytes({"text": "x" * n}, [], [])[:8], "little") for n in (100, 101, 108)]
    assert sizes[0] == sizes[2] - 8
    monkeypatch.setattr(state_header, "MAX_HEADER_BYTES", sizes[0])
    assert read_state(to_bytes({"text": "x" * 100}, [], [])).names == ()
    with pytest.raises(InvalidArgument, match=f"a header of {sizes[2]} bytes; a state file holds at most {sizes[0]}"):
        to_bytes({"text": "x" * 108}, [], [])


json_texts = json_values.map(json.dumps)
offsets = st.lists(st.integers(-2, 12), min_size=2, max_size=2).map(json.dumps) | json_texts
fields = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(['"U8"', '"F32"', '"F8_E4M3"', '"BF16"']) | json_texts,
        "shape": st.lists(st.integers(-1, 4), max_size=3).map(json.dumps) | json_texts,
        "data_offsets": offsets,
    }
)


@given(
    entries=st.lists(st.tuples(st.sampled_from("abc"), fields), max_size=3),
    document=st.none() | json_texts,
    size=st.integers(0, 12),
)
@settings(max_examples=examples(50, 300), deadline=None)
def test_sealed_nonsense_never_escapes(
    entries: list[tuple[str, dict[str, str]]], document: str | None, size: int
) -> None:
    tensors = ",".join(
        f'"{name}":{{' + ",".join(f'"{key}":{value}' for key, value in entry.items()) + "}" for name, entry in entries
    )
    try:
        state = read_state(seal(table(tensors, document=document), bytes(size)))
    except (DataLoss, InvalidArgument):
        return
    assert state.nbytes == size
    for name in state.names:
        state.tensor(name).sum()


@given(
    data=st.binary(max_size=200), prefix=st.sampled_from([b"", SMALL_BYTES[:8], SMALL_BYTES[:60], SMALL_BYTES[:-20]])
)
@settings(max_examples=examples(100, 300), deadline=None)
def test_random_bytes_are_refused(data: bytes, prefix: bytes) -> None:
    assume(prefix + data != SMALL_BYTES)
    with pytest.raises((DataLoss, InvalidArgument)):
        read_state(prefix + data)


@given(cut=st.integers(0, len(SMALL_BYTES)), drop=st.integers(0, 9), insert=st.binary(max_size=9))
@settings(max_examples=examples(100, 300), deadline=None)
def test_spliced_files_are_refused(cut: int, drop: int, insert: bytes) -> None:
    spliced = SMALL_BYTES[:cut] + insert + SMALL_BYTES[cut + drop :]
    if spliced != SMALL_BYTES:
        with pytest.raises(DataLoss):
            read_state(spliced)


# Undamaged, but not ours


@pytest.mark.parametrize("version", ["2", "0", '"1"', "1.0", "true", "null"])
def test_other_versions_are_recognised(version: str) -> None:
    # The rest of a future version may look like anything.
    text = table('"__future__":[1]', checksums='"elsewhere"', version=version)
    with pytest.raises(InvalidArgument, match=r"another version: 1 expected, .* found"):
        read_state(seal(text, b"??"))
    damaged = bytearray(seal(text, b"??"))
    damaged[damaged.index(b"__future__")] ^= 1
    with pytest.raises(DataLoss, match="header is damaged"):
        read_state(damaged)


def test_other_formats() -> None:
    with pytest.raises(InvalidArgument, match="another format: 'quire-state' expected, 'quire-tape' found"):
        read_state(seal(table(format='"quire-tape"')))
    with pytest.raises(InvalidArgument, match=r"dtype 'F64', .* expected, 'F8_E4M3' found"):
        read_state(seal(table(entry("a", "F8_E4M3"))))


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_plain_safetensors_file_is_no_state(metadata: dict[str, str] | None) -> None:
    plain = safetensors_save({"w": torch.ones(2, 2)}, metadata)
    with pytest.raises(InvalidArgument, match="a safetensors file of 1 tensors, but no state file"):
        read_state(plain)
    with pytest.raises(DataLoss, match="truncated"):
        read_state(plain[:-1])


def test_a_file_that_another_tool_rewrote(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    path.write_bytes(SMALL_BYTES)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["header_checksum"]  # alone it has a fixed place
    with pytest.raises(DataLoss, match="rewritten by another tool"):
        read_state(safetensors_save(tensors, metadata))


@pytest.mark.parametrize("text", [b"", b"hello", b"PK\x03\x04" + bytes(100), b"\x80\x04\x95" + bytes(60), bytes(4096)])
def test_anything_else_is_data_loss(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.quire"
    path.write_bytes(text)
    for source in (path, text):
        with pytest.raises(DataLoss):
            read_state(source)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"gone\.quire"):
        read_state(tmp_path / "gone.quire")
    with pytest.raises(InvalidArgument, match="is a directory"):
        read_state(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(InvalidArgument, match="no regular file"):
        read_state(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match="null"):
        read_state("a\0b")
    with pytest.raises(InvalidArgument, match="got int"):
        read_state(7)  # type: ignore[arg-type]


# Writing: all or nothing


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def spec(name: Any = "a", dtype: Any = torch.float32, shape: Any = (2,)) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


deep: list[Any] = []
for _ in range(64):
    deep = [deep]
circle: dict[str, Any] = {}
circle["self"] = circle
A = torch.ones(2)
REFUSED: dict[str, tuple[Any, list[TensorSpec], list[Any], str]] = {
    "metadata list": ([], [], [], "mapping, got list"),
    "metadata key": ({"a": [{1: 2}]}, [], [], "keys in metadata must be str, got 1"),
    "metadata NaN": ({"a": float("nan")}, [], [], "finite"),
    "metadata object": ({"a": object()}, [], [], "object is no JSON type"),
    "metadata bytes": ({"a": [b"x"]}, [], [], "bytes is no JSON type"),
    "metadata surrogate": ({"a": "\ud800"}, [], [], "surrogate"),
    "metadata depth": ({"a": deep}, [], [], "64 levels"),
    "metadata circle": (circle, [], [], "64 levels"),
    "metadata huge int": ({"a": 10**5000}, [], [], "JSON"),
    "reserved name": ({}, [spec("__metadata__")], [("__metadata__", A)], "'__metadata__'"),
    "empty name": ({}, [spec("")], [("", A)], "non-empty"),
    "surrogate name": ({}, [spec("\ud800")], [("\ud800", A)], "name must be"),
    "name of a number": ({}, [spec(3)], [(3, A)], "name must be"),
    "name twice": ({}, [spec(), spec()], [("a", A)], "planned twice"),
    "dtype": ({}, [spec(dtype=torch.complex64)], [("a", A)], "complex64; a state file holds torch.float64"),
    "negative size": ({}, [spec(shape=(-1,))], [("a", A)], "sizes >= 0"),
    "rank": ({}, [spec(shape=(1,) * 65)], [("a", A)], "up to 64"),
    "not planned": ({}, [spec()], [("b", A)], "'b' is not in the plan, which has 'a'"),
    "came twice": ({}, [spec(), spec("b")], [("a", A), ("a", A)], "came twice"),
    "did not come": ({}, [spec(), spec("b")], [("a", A)], "1 of 2 planned tensors did not come: 'b'"),
    "other dtype": ({}, [spec()], [("a", A.double())], r"planned as torch.float32 \[2\], it came as torch.float64"),
    "other shape": ({}, [spec()], [("a", A[None])], r"came as torch.float32 \[1, 2\]"),
    "no tensor": ({}, [spec()], [("a", [1.0, 1.0])], "got list"),
    "no data": ({}, [spec()], [("a", torch.ones(2, device="meta"))], "with data"),
    "sparse": ({}, [spec()], [("a", A.to_sparse())], "dense"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("old", [None, b"what was there"])
def test_refused_states_leave_no_trace(tmp_path: Path, case: str, old: bytes | None) -> None:
    metadata, plan, tensors, reason = REFUSED[case]
    path = tmp_path / "a.quire"
    if old is not None:
        path.write_bytes(old)
    before = listing(tmp_path)
    with pytest.raises(InvalidArgument, match=reason):
        write_state(path, metadata, plan, tensors)
    assert listing(tmp_path) == before
    with pytest.raises(InvalidArgument, match=reason):
        to_bytes(metadata, plan, tensors)


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), OSError(errno.ENOSPC, "x"), ValueError("x")])
def test_exceptions_of_the_iterator_pass_and_leave_no_trace(tmp_path: Path, error: BaseException) -> None:
    def produce() -> Iterator[tuple[str, Tensor]]:
        yield "a", A
        raise error

    path = tmp_path / "a.quire"
    path.write_bytes(b"old")
    with pytest.raises(type(error)) as caught:
        write_state(path, {}, [spec(), spec("b")], produce())
    assert caught.value is error
    assert listing(tmp_path) == {"a.quire": b"old"}


EXPECTED_ERRORS = [
    (errno.ENOSPC, ResourceExhausted),
    (errno.EDQUOT, ResourceExhausted),
    (errno.EIO, QuireError),
    (errno.EACCES, InvalidArgument),
    (errno.EROFS, InvalidArgument),
    (errno.ENAMETOOLONG, InvalidArgument),
]


@pytest.mark.parametrize(("number", "expected"), EXPECTED_ERRORS)
@pytest.mark.parametrize("function", ["fsync", "replace", "fstat"])
def test_errors_of_the_system_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[QuireError], function: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.quire"
    path.write_bytes(b"old")
    monkeypatch.setattr(atomic_file.os, function, fail)
    with pytest.raises(expected, match=rf"a\.quire': {os.strerror(number)}") as caught:
        save(path, {}, SMALL)
    monkeypatch.undo()
    assert type(caught.value) is expected
    assert listing(tmp_path) == {"a.quire": b"old"}


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_full_disk_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    class Full(io.FileIO):
        writes = 0

        def write(self, data: Any) -> int:
            if self.writes == after:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.writes += 1
            return super().write(data)

    path = tmp_path / "a.quire"
    path.write_bytes(b"old")
    monkeypatch.setattr(atomic_file, "open", lambda name, mode, buffering=-1: Full(name, mode), raising=False)
    tensors = {name: torch.ones(3) for name in "abcd"}
    with pytest.raises(ResourceExhausted, match="No space left"):
        save(path, {}, tensors)
    monkeypatch.undo()
    assert listing(tmp_path) == {"a.quire": b"old"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("buffering", [0, -1])
def test_dev_full(buffering: int) -> None:
    full = open("/dev/full", "wb", buffering=buffering)  # noqa: SIM115 - closing it fails, too
    with pytest.raises(ResourceExhausted, match="the given file object: No space left on device"):
        write_state(full, {}, plan_of(SMALL), SMALL.items())
    with contextlib.suppress(OSError):  # a buffer would be written now
        full.close()
    with pytest.raises(InvalidArgument, match="no regular file"):
        write_state("/dev/full", {}, plan_of(SMALL), SMALL.items())
    assert Path("/dev/full").is_char_device()


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    before = listing(tmp_path)
    for target, error, reason in (
        (tmp_path / "no" / "a.quire", NotFound, "there is no directory"),
        (tmp_path / "file" / "a.quire", NotFound, "there is no directory"),
        (tmp_path, InvalidArgument, "is a directory"),
        (Path(), InvalidArgument, "is a directory"),
        (f"{tmp_path}/a\0b", InvalidArgument, "null"),
        (tmp_path / ("x" * 256), InvalidArgument, "File name too long"),
    ):
        with pytest.raises(error, match=reason):
            write_state(target, {}, plan_of(SMALL), SMALL.items())
    assert listing(tmp_path) == before


def test_the_longest_name_works(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    save(path, {}, SMALL)
    save(path, {"second": True}, SMALL)
    assert read_state(path).metadata == {"second": True}
    assert list(listing(tmp_path)) == [path.name]


def test_file_objects(tmp_path: Path) -> None:
    class Reluctant(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:7]))

    sink = Reluctant(b"before ")
    sink.seek(0, os.SEEK_END)
    tensors = dict(reversed(SMALL.items()))
    write_state(sink, {}, plan_of(SMALL), tensors.items())  # in another order than planned
    assert sink.getvalue() == b"before " + pack({}, SMALL)
    assert sink.tell() == len(sink.getvalue())

    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    reader, writer = os.pipe()
    with (
        open(path, "rb") as unwritable,
        open(path, "r+b") as not_at_end,
        open(path, "a") as text,
        open(reader, "rb"),
        open(writer, "wb") as pipe,
    ):
        closed = io.BytesIO()
        closed.close()
        for target in (unwritable, not_at_end, text, pipe, closed, 7, None):
            with pytest.raises(InvalidArgument, match="seekable, binary file object that stands at its end"):
                write_state(target, {}, plan_of(SMALL), SMALL.items())  # type: ignore[arg-type]
        assert not_at_end.tell() == 0
    assert path.read_bytes() == b"0123456789"


def test_an_unfinished_file_object_holds_no_state() -> None:
    sink = io.BytesIO()
    with pytest.raises(InvalidArgument):
        write_state(sink, {}, [spec(), spec("b")], [("b", A)])
    with pytest.raises(DataLoss):
        read_state(sink.getvalue())


def test_one_tensor_at_a_time_and_metadata_of_the_start() -> None:
    alive: list[weakref.ref[Tensor]] = []
    metadata = {"tokens": [1]}

    def produce() -> Iterator[tuple[str, Tensor]]:
        for index in range(4):
            assert all(ref() is None for ref in alive)
            metadata["tokens"].append(index)
            tensor = torch.full((2,), float(index))
            alive.append(weakref.ref(tensor))
            yield str(index), tensor
            del tensor

    state = read_state(to_bytes(metadata, [spec(str(i)) for i in range(4)], produce()))
    assert len(alive) == 4
    assert state.metadata == {"tokens": [1]}


def test_stale_temporaries(tmp_path: Path) -> None:
    def names_of_failed_save(name: str) -> str:
        """The name that a temporary file for ``name`` has, seen from inside of a save."""
        seen: list[str] = []

        def produce() -> Iterator[tuple[str, Tensor]]:
            seen.extend(set(os.listdir(tmp_path)) - before)
            yield "a", A

        before = set(os.listdir(tmp_path))
        write_state(tmp_path / name, {}, [spec()], produce())
        assert len(seen) == 1
        return seen[0]

    mine, other = names_of_failed_save("a.quire"), names_of_failed_save("b.quire")
    assert re.fullmatch(rf"\.quire-[0-9a-f]{{16}}-{os.getpid()}-[0-9a-f]{{16}}\.tmp", mine)
    dead, alive, like = mine[:-5] + "0.tmp", mine[:-5] + "1.tmp", mine + "x"
    for name in {dead, alive, like, other}:
        (tmp_path / name).write_bytes(b"part")
    with open(tmp_path / alive, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save(tmp_path / "a.quire", {}, SMALL)
        assert set(os.listdir(tmp_path)) == {"a.quire", "b.quire", alive, like, other}
    save(tmp_path / "a.quire", {}, SMALL)
    assert set(os.listdir(tmp_path)) == {"a.quire", "b.quire", like, other}


def test_a_writer_whose_file_was_taken_for_stale_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = 0

    def lock(file: Any, operation: int) -> None:
        nonlocal locks
        locks += 1
        if locks == 1:
            os.unlink(file.name)

    monkeypatch.setattr(atomic_file.fcntl, "flock", lock)
    save(tmp_path / "a.quire", {}, SMALL)
    assert locks == 2
    assert list(listing(tmp_path)) == ["a.quire"]


def test_the_bytes_are_on_the_disk_before_the_name_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.quire"
    events: list[object] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(fd: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{fd}"))
        events.append(target if target == tmp_path else (target.suffix, target.stat().st_size, path.exists()))
        fsync(fd)

    def record_replace(source: Path, target: Path) -> None:
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(atomic_file.os, "fsync", record_fsync)
    monkeypatch.setattr(atomic_file.os, "replace", record_replace)
    size = save(path, {}, SMALL)
    assert events == [(".tmp", size, False), "replace", tmp_path]


def test_file_systems_without_locks_and_directory_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(atomic_file.fcntl, "flock", fail)
    monkeypatch.setattr(atomic_file.os, "open", fail)
    save(tmp_path / "a.quire", {}, SMALL)
    assert list(listing(tmp_path)) == ["a.quire"]


def test_writers_of_one_name_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    errors: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(10):
                save(path, {"value": value}, {"a": torch.full((500,), float(value))})
                with read_state(path) as state:
                    assert set(state.tensor("a").tolist()) == {float(state.metadata["value"])}  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert list(listing(tmp_path)) == ["a.quire"]


def test_a_reader_keeps_the_file_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    save(path, {"n": 1}, {"a": torch.ones(5000)})
    old = read_state(path)
    save(path, {"n": 2}, {"a": torch.zeros(1)})
    old.verify()
    assert torch.equal(old.tensor("a"), torch.ones(5000))
    assert read_state(path).metadata == {"n": 2}


# The documentation is right


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOC, re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    code = next(block for block in code_blocks("python") if "example.quire" in block)
    exec(compile(code, "statefile.md", "exec"), {})
    assert capsys.readouterr().out == "[7] ('layer.0.k',) tensor([[ 1., -2.]])\n"
    return tmp_path / "example.quire"


def test_the_documented_bytes_are_what_is_written(example: Path) -> None:
    rows = re.findall(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} )+) *\|(.*)\|$", DOC, re.MULTILINE)
    data = example.read_bytes()
    assert bytes.fromhex("".join(digits for _, digits, _ in rows)) == data
    for index, (offset, _, text) in enumerate(rows):
        row = data[16 * index : 16 * index + 16]
        assert int(offset, 16) == 16 * index
        assert text == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)


@pytest.fixture(scope="module")
def reference_read() -> Any:
    code = next(block for block in code_blocks("python") if "def read(" in block)
    assert "quire." not in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 22
    scope: dict[str, Any] = {}
    exec(compile(code, "statefile.md", "exec"), scope)
    return scope["read"]


def test_the_documented_reader_reads(example: Path, reference_read: Any) -> None:
    assert reference_read(example) == (
        {"tokens": [7]},
        {"layer.0.k": ("F32", [1, 2], struct.pack("<2f", 1.0, -2.0))},
    )


@given(tensors=st.dictionaries(names, tensor_values()))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_documented_reader_agrees(tmp_path: Path, reference_read: Any, tensors: dict[str, Tensor]) -> None:
    path = tmp_path / "a.quire"
    path.write_bytes(pack({"n": [1, {"x": None}]}, tensors))
    metadata, found = reference_read(path)
    assert metadata == {"n": [1, {"x": None}]}
    assert {name: (dtypes()[dtype], tuple(shape), data) for name, (dtype, shape, data) in found.items()} == {
        name: (tensor.dtype, tuple(tensor.shape), raw(tensor)) for name, tensor in tensors.items()
    }


def test_the_documented_reader_refuses_damage(tmp_path: Path, reference_read: Any) -> None:
    path = tmp_path / "a.quire"
    for at in range(0, len(SMALL_BYTES), 5):
        path.write_bytes(SMALL_BYTES[:at] + bytes([SMALL_BYTES[at] ^ 4]) + SMALL_BYTES[at + 1 :])
        with pytest.raises((AssertionError, ValueError, KeyError)):
            reference_read(path)
