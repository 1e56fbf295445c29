"""Values of the executor contract: what they compute, and what they refuse with which words."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.base.errors import InvalidArgument, NotFound
from quire.contracts.executor import (
    AttentionMechanism,
    AudioData,
    DecodeInput,
    DecodeOutput,
    ExecutorCapabilities,
    ExecutorInfo,
    ExecutorInputs,
    ExecutorMetrics,
    ExecutorState,
    ExecutorStatus,
    ExecutorType,
    MemoryRequirements,
    MemoryUsage,
    ModelAssets,
    PrefillInput,
    PrefillOutput,
    SpeculativeOutput,
    TextData,
    VisionData,
)
from quire.contracts.kv_cache import CacheHandle


class Carried(CacheHandle):
    """Stands for a cache handle where a value only carries it."""


HANDLE: Any = Carried()  # type: ignore[abstract]


# -- LiteRT-LM inputs ------------------------------------------------------------------------------


def text(*rows: list[int], lengths: tuple[int, ...] | None = None) -> TextData:
    return TextData(token_ids=torch.tensor(rows, dtype=torch.int64), row_lengths=lengths)


def test_absent_members_are_not_found() -> None:
    nothing, bare = ExecutorInputs(), ExecutorInputs(vision=VisionData(), audio=AudioData())
    for get in (
        nothing.get_text_data,
        nothing.get_text_token_ids,
        nothing.get_vision_data,
        nothing.get_vision_embeddings,
        nothing.get_vision_per_layer_embeddings,
        nothing.get_audio_data,
        nothing.get_audio_embeddings,
        nothing.get_audio_per_layer_embeddings,
        bare.get_vision_embeddings,
        bare.get_vision_per_layer_embeddings,
        bare.get_audio_embeddings,
        bare.get_audio_per_layer_embeddings,
    ):
        with pytest.raises(NotFound, match="the inputs have no"):
            get()


def test_present_members_are_given() -> None:
    audio = AudioData(
        embeddings=torch.arange(6.0).reshape(3, 2), per_layer_embeddings=torch.ones(4, 3, 2), valid_tokens=2
    )
    vision = VisionData(embeddings=torch.ones(1, 2), per_layer_embeddings=torch.ones(4, 1, 5))
    inputs = ExecutorInputs(text=text([5, -1, -3, -2, -2, -4]), vision=vision, audio=audio)
    assert inputs.get_text_token_ids().tolist() == [[5, -1, -3, -2, -2, -4]]
    assert inputs.get_vision_data() is vision
    assert inputs.get_vision_embeddings().shape == (1, 2)
    assert inputs.get_vision_per_layer_embeddings().shape == (4, 1, 5)
    assert inputs.get_audio_data() is audio
    assert inputs.get_audio_embeddings().tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert inputs.get_audio_per_layer_embeddings().shape == (4, 2, 2)


def test_text_rows() -> None:
    data = text([1, 2, 3], [4, 5, 6], lengths=(3, 1))
    assert [row.tolist() for row in data.token_rows()] == [[1, 2, 3], [4]]
    assert (data.batch_size, data.lengths, text([1, 2]).lengths) == (2, (3, 1), (2,))
    data.token_rows()[0].zero_()
    assert data.token_ids.tolist() == [[1, 2, 3], [4, 5, 6]], "rows are copies"
    assert text([]).lengths == (0,), "an empty prompt can be said; prefill refuses it"
    for ids, lengths in (
        (torch.tensor([[1.0]]), None),
        (torch.tensor([[1]], dtype=torch.int16), None),
        (torch.tensor([1, 2]), None),
        (torch.tensor(1), None),
        (torch.tensor([[1, 2]]), (3,)),
        (torch.tensor([[1, 2]]), (0,)),
        (torch.tensor([[1, 2]]), (1, 1)),
    ):
        with pytest.raises(InvalidArgument):
            TextData(token_ids=ids, row_lengths=lengths)


def test_placeholders_match_media_rows() -> None:
    two = VisionData(embeddings=torch.ones(2, 4))
    ExecutorInputs(text=text([-1, 7], [7, -1]), vision=two)
    ExecutorInputs(text=text([-1, -1, 7], [7, -1, -1], lengths=(2, 1)), vision=two)
    ExecutorInputs(vision=two)
    for data, kwargs, message in (
        (text([-1, 7]), {}, "1 vision placeholders .* for 0 rows"),
        (text([-1, 7]), {"vision": two}, "1 vision placeholders .* for 2 rows"),
        (text([7]), {"vision": two}, "0 vision placeholders"),
        (text([-2, -1, -1]), {"vision": two}, "1 audio placeholders"),
        (text([-2]), {"audio": AudioData(embeddings=torch.ones(2, 4), valid_tokens=0)}, "for 0 rows of audio"),
        (text([3, -3]), {}, "-3 ends vision data"),
        (text([3, -4]), {}, "-4 ends audio data"),
        (text([3, -7]), {}, r"\[-7\] are negative"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            ExecutorInputs(text=data, **kwargs)


def test_media_shapes() -> None:
    for bad in (
        lambda: VisionData(embeddings=torch.ones(2, 3, dtype=torch.int64)),
        lambda: VisionData(embeddings=torch.ones(2)),
        lambda: VisionData(per_layer_embeddings=torch.ones(2, 3)),
        lambda: VisionData(embeddings=torch.ones(2, 3), per_layer_embeddings=torch.ones(4, 3, 3)),
        lambda: AudioData(embeddings=torch.ones(2, 3), valid_tokens=3),
        lambda: AudioData(embeddings=torch.ones(2, 3), valid_tokens=-2),
    ):
        with pytest.raises(InvalidArgument):
            bad()
    assert VisionData(per_layer_embeddings=torch.ones(4, 3, 2)).num_rows == 3
    assert AudioData(embeddings=torch.ones(2, 3)).num_rows == 2


def test_next_position() -> None:
    assert ExecutorInputs().start_positions((4, 6)) == (4, 6)
    assert ExecutorInputs(next_position=4).start_positions((4, 6)) == (4, 4)
    assert ExecutorInputs(next_position=(0, 6)).start_positions((4, 6)) == (0, 6)
    with pytest.raises(InvalidArgument, match=r"next_position 5 of row 0 must be in 0\.\.4"):
        ExecutorInputs(next_position=5).start_positions((4, 6))
    with pytest.raises(InvalidArgument, match="2 entries for a cache of 1 rows"):
        ExecutorInputs(next_position=(0, 0)).start_positions((4,))
    with pytest.raises(InvalidArgument, match="1 entries for 2 rows"):
        ExecutorInputs(text=text([1], [2]), next_position=(0,))
    for bad in (-1, (0, -1), True, 1.0, (1.5,)):
        with pytest.raises(InvalidArgument, match="next_position must be an integer"):
            ExecutorInputs(next_position=bad)  # type: ignore[arg-type]


def test_model_assets_are_exactly_one() -> None:
    sources: dict[str, Any] = {"path": "a", "file": io.BytesIO(b"a"), "data": b"", "stream": io.BytesIO(b"a")}
    for count in range(5):
        for names in itertools.combinations(sources, count):
            given_sources = {name: sources[name] for name in names}
            if count == 1:
                assert ModelAssets(**given_sources).source == names[0]
            else:
                with pytest.raises(InvalidArgument, match="exactly one of path, file, data, stream"):
                    ModelAssets(**given_sources)
    closed_to_reading = io.BufferedWriter(io.BytesIO())
    for bad in ({"path": ""}, {"file": closed_to_reading}, {"stream": closed_to_reading}):
        with pytest.raises(InvalidArgument):
            ModelAssets(**bad)


# -- ferrum inputs and outputs ---------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
    st.sampled_from([torch.bool, torch.int32, torch.int64]),
)
def test_real_tokens_against_a_loop(rows: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    width = max(sum(row) for row in rows)
    masks = [[0] * left + [1] * real + [0] * (width - left - real) for left, real, _ in rows]
    ids = torch.arange(len(rows) * width).reshape(len(rows), width)
    given_input = PrefillInput(input_ids=ids, attention_mask=torch.tensor(masks).to(dtype))
    naive = [[int(i) for i, m in zip(row, mask, strict=True) if m] for row, mask in zip(ids, masks, strict=True)]
    assert [row.tolist() for row in given_input.token_rows()] == naive
    assert given_input.real_spans() == tuple((left, left + real) for left, real, _ in rows)


def test_prefill_input_sizes() -> None:
    wide = PrefillInput(input_ids=torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert (wide.batch_size, wide.sequence_length, wide.logits) == (2, 3, "all")
    wide.token_rows()[0].zero_()
    assert wide.input_ids.tolist() == [[1, 2, 3], [4, 5, 6]], "rows are copies"
    column = PrefillInput(input_ids=torch.tensor([7, 8], dtype=torch.int32))
    assert (column.batch_size, column.sequence_length) == (2, 1)
    assert [row.tolist() for row in column.token_rows()] == [[7], [8]]
    scalar = PrefillInput(input_ids=torch.tensor(7))
    assert scalar.sequence_length == 1
    with pytest.raises(InvalidArgument, match="rank 0"):
        _ = scalar.batch_size
    for shape in ((0,), (0, 3), (2, 0)):
        with pytest.raises(InvalidArgument, match=r"^Input token tensor is empty$"):
            PrefillInput(input_ids=torch.zeros(shape, dtype=torch.int64)).token_rows()


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("input_ids", torch.tensor([[1.0]]), "int32 or int64"),
        ("input_ids", [[1]], "must be a Tensor; got list"),
        ("input_ids", torch.ones(1, 1, 2, dtype=torch.int64), r"\[batch, tokens\]"),
        ("attention_mask", torch.ones(1, 3), "bool or integer"),
        ("attention_mask", torch.ones(1, 2, dtype=torch.bool), "has shape"),
        ("attention_mask", torch.tensor([[1, 0, 1]]), "row 0 has 2 runs"),
        ("attention_mask", torch.tensor([[0, 0, 0]]), "row 0 has 0 runs"),
        ("attention_mask", torch.tensor([[1, 2, 1]]), "1 for real tokens and 0"),
        ("position_ids", torch.tensor([[0, 1]]), "has shape"),
        ("position_ids", torch.tensor([[0.0, 1.0, 2.0]]), "int32 or int64"),
        ("position_ids", torch.tensor([[-1, 0, 1]]), ">= 0; got -1"),
        ("logits", "some", "must be 'last' or 'all' or 'none'; got 'some'"),
        ("adapter", -1, "id >= 0"),
        ("adapter", "french", "must be an integer or None; got 'french'"),
    ],
)
def test_prefill_input_refusals(field: str, bad: Any, message: str) -> None:
    good = PrefillInput(input_ids=torch.tensor([[1, 2, 3]]))
    with pytest.raises(InvalidArgument, match=message):
        replace(good, **{field: bad})


def test_positions_of_padding_do_not_matter() -> None:
    ids, mask = torch.tensor([[9, 1, 2]]), torch.tensor([[0, 1, 1]])
    found = PrefillInput(input_ids=ids, attention_mask=mask, position_ids=torch.tensor([[-1, 0, 1]]))
    assert found.position_ids is not None
    assert found.position_ids.tolist() == [[-1, 0, 1]]
    with pytest.raises(InvalidArgument, match=r">= 0; got -1"):
        PrefillInput(input_ids=ids, attention_mask=mask, position_ids=torch.tensor([[0, -1, 1]]))


def test_builders_change_one_field() -> None:
    start = PrefillInput(input_ids=torch.tensor([[1, 2]]))
    mask = torch.tensor([[1, 0]])
    for built, field, value in (
        (start.with_input_ids(mask), "input_ids", mask),
        (start.with_attention_mask(mask), "attention_mask", mask),
        (start.with_position_ids(mask), "position_ids", mask),
        (start.with_kv_cache(HANDLE), "kv_cache", HANDLE),
        (start.with_logits("last"), "logits", "last"),
        (start.with_hidden_states(), "output_hidden_states", True),
        (start.with_attentions(), "output_attentions", True),
        (start.with_adapter(3), "adapter", 3),
    ):
        names = set(start.__dataclass_fields__)
        assert getattr(built, field) is value
        assert all(getattr(built, name) is getattr(start, name) for name in names - {field})
    with pytest.raises(InvalidArgument):
        start.with_attention_mask(torch.tensor([[1]]))
    with pytest.raises(FrozenInstanceError):
        start.logits = "none"  # type: ignore[misc]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_last_token_logits_against_a_loop(rows: int, columns: int, data: st.DataObject) -> None:
    logits = torch.arange(rows * columns * 3, dtype=torch.float32).reshape(rows, columns, 3)
    last = data.draw(st.none() | st.tuples(*[st.integers(0, columns - 1)] * rows))
    out = PrefillOutput(logits=logits, kv_cache=HANDLE, last_indices=last).last_token_logits()
    assert out.tolist() == [logits[b, columns - 1 if last is None else last[b]].tolist() for b in range(rows)]
    before = logits.clone()
    out.zero_()
    assert torch.equal(logits, before), "the result is the caller's own"


def test_last_token_logits_refusals() -> None:
    def output(logits: torch.Tensor | None, last: tuple[int, ...] | None = None) -> PrefillOutput:
        return PrefillOutput(logits=logits, kv_cache=HANDLE, last_indices=last)

    with pytest.raises(InvalidArgument, match=r"^Expected 3D logits tensor \[batch, seq, vocab\]$"):
        output(torch.zeros(2, 3)).last_token_logits()
    with pytest.raises(InvalidArgument, match=r"^Empty sequence$"):
        output(torch.zeros(2, 0, 3)).last_token_logits()
    with pytest.raises(NotFound, match="logits='none'"):
        output(None).last_token_logits()
    for last in ((0,), (0, 2), (0, -1)):
        with pytest.raises(InvalidArgument, match="2 indices below 2"):
            output(torch.zeros(2, 2, 3), last)


def test_decode_values() -> None:
    one = DecodeInput(input_ids=torch.tensor([[3], [4]], dtype=torch.int32), kv_cache=HANDLE)
    assert (one.batch_size, one.tokens().tolist(), one.tokens().dtype) == (2, [3, 4], torch.int64)
    assert DecodeInput(input_ids=torch.tensor([5]), kv_cache=HANDLE).tokens().tolist() == [5]
    assert one.with_position_ids(torch.tensor([[1], [2]])).position_ids is not None
    other: Any = Carried()  # type: ignore[abstract]
    assert one.with_kv_cache(other).kv_cache is other
    with pytest.raises(InvalidArgument, match=r"^forward_verify input token empty$"):
        DecodeInput(input_ids=torch.zeros(1, 0, dtype=torch.int64), kv_cache=HANDLE).tokens("forward_verify")
    with pytest.raises(InvalidArgument, match=r"one token per row, \[1, 1\]; got \[1, 2\]"):
        DecodeInput(input_ids=torch.tensor([[1, 2]]), kv_cache=HANDLE).tokens()
    with pytest.raises(InvalidArgument, match="rank 0"):
        DecodeInput(input_ids=torch.tensor(1), kv_cache=HANDLE).tokens()
    for change in (
        {"kv_cache": None},
        {"input_ids": torch.tensor([[0.5]])},
        {"position_ids": torch.tensor([[-1], [0]])},
    ):
        with pytest.raises(InvalidArgument):
            replace(one, **change)
    with pytest.raises(InvalidArgument, match=r"\[batch, vocab\]"):
        DecodeOutput(logits=torch.zeros(1, 1, 4), kv_cache=HANDLE)


def test_speculative_output() -> None:
    out = SpeculativeOutput(accepted_tokens=(4, 5), next_logits=torch.zeros(1, 6), kv_cache=HANDLE)
    assert out.acceptance_count == 2
    refused: list[dict[str, Any]] = [
        {"next_logits": torch.zeros(6)},
        {"next_logits": torch.zeros(2, 6)},
        {"next_probs": torch.zeros(1, 5)},
    ]
    for change in refused:
        with pytest.raises(InvalidArgument):
            replace(out, **change)


# -- reports ---------------------------------------------------------------------------------------


SIZES = st.integers(0, 10**12)


@given(SIZES, SIZES, SIZES, SIZES, st.integers(0, 999), st.integers(0, 10**6), st.integers(0, 200))
def test_memory_estimate(p: int, a: int, kv: int, o: int, b: int, s: int, layers: int) -> None:
    need = MemoryRequirements(
        parameter_memory=p, activation_memory_per_token=a, kv_cache_memory_per_token=kv, overhead_memory=o
    )
    total = need.calculate_total_memory
    assert total(b, s, layers) == p + a * b * s + kv * b * s * layers + o
    assert total(0, s, layers) == total(b, 0, layers) == p + o
    assert total(b, s, layers + 1) - total(b, s, layers) == kv * b * s


def info(**changes: Any) -> ExecutorInfo:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 32,
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "max_sequence_length": 64,
        "dtype": "float32",
        "device": "cpu",
        "num_parameters": 100,
        "fingerprint": "ab",
    }
    return ExecutorInfo(**{**values, **changes})


def test_reports_refuse_what_cannot_be() -> None:
    info()
    info(num_heads=0, num_kv_heads=0, head_dim=0)
    memory = MemoryRequirements(
        parameter_memory=1, activation_memory_per_token=1, kv_cache_memory_per_token=1, overhead_memory=1
    )
    for bad in (
        lambda: memory.calculate_total_memory(-1, 1, 1),
        lambda: replace(memory, overhead_memory=-1),
        lambda: info(num_heads=3),
        lambda: info(num_kv_heads=0),
        lambda: info(vocab_size=0),
        lambda: info(fingerprint=""),
        lambda: MemoryUsage(allocated_bytes=1, used_bytes=2, peak_bytes=2),
        lambda: MemoryUsage(allocated_bytes=3, used_bytes=2, peak_bytes=1),
        lambda: ExecutorStatus(state=ExecutorState.READY, decode_operations=-1),
        lambda: ExecutorMetrics(memory_efficiency=1.1),
        lambda: ExecutorMetrics(throughput_tps=math.nan),
    ):
        with pytest.raises(InvalidArgument):
            bad()


def test_status_and_metrics() -> None:
    usage = MemoryUsage(allocated_bytes=200, used_bytes=50, peak_bytes=80)
    assert (usage.utilization_percent, MemoryUsage().utilization_percent) == (25.0, 0.0)
    ready = {state for state in ExecutorState if ExecutorStatus(state=state).is_ready}
    assert ready == {ExecutorState.READY, ExecutorState.BUSY}
    status = ExecutorStatus(state=ExecutorState.BUSY, memory_usage=usage, last_operation=1.5).to_dict()
    assert "last_operation" not in status
    assert (status["state"], status["is_ready"]) == ("Busy", True)
    memory = status["memory_usage"]
    assert isinstance(memory, dict)
    assert memory["utilization_percent"] == 25.0
    metrics = ExecutorMetrics(prefill_operations=2, decode_operations=5)
    assert metrics.total_operations == metrics.to_dict()["total_operations"] == 7


def test_capabilities_name_their_refusals() -> None:
    capabilities = ExecutorCapabilities(
        max_batch_size=4,
        max_sequence_length=64,
        attention_mechanisms=(AttentionMechanism.PAGED,),
        supports_dynamic_batching=True,
        supports_continuous_batching=True,
        supports_speculative_decoding=True,
        supports_tensor_parallelism=False,
        supports_pipeline_parallelism=False,
        supported_dtypes=("float32",),
        supported_devices=("cpu",),
        memory_requirements=MemoryRequirements(
            parameter_memory=1, activation_memory_per_token=1, kv_cache_memory_per_token=1, overhead_memory=1
        ),
        refusals=(("blend", "recurrent layers need every row"),),
    )
    assert capabilities.why_not("blend") == "recurrent layers need every row"
    assert capabilities.why_not("decode") is None
    with pytest.raises(InvalidArgument, match="named once"):
        replace(capabilities, refusals=(("a", "1"), ("a", "2")))
    with pytest.raises(InvalidArgument, match="max_batch_size must be >= 1"):
        replace(capabilities, max_batch_size=0)


def test_enums_have_the_original_names() -> None:
    assert [m.value for m in AttentionMechanism] == [
        "MultiHead",
        "MultiQuery",
        "GroupedQuery",
        "Flash",
        "Paged",
        "SlidingWindow",
    ]
    assert [s.value for s in ExecutorState] == ["Initializing", "Ready", "Busy", "Error", "Shutdown"]
    assert [t.value for t in ExecutorType] == [
        "Sequential",
        "Batch",
        "ContinuousBatch",
        "Speculative",
        "PipelineParallel",
        "TensorParallel",
    ]
