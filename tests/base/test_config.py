"""Configuration: every field's defaults, accepted values and refusals; mappings and help texts."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from quire.base.config import (
    AttentionConfig,
    EngineConfig,
    ExecutorConfig,
    MemoryConfig,
    OptimizationConfig,
    field_help,
    parse_bytes,
)
from quire.base.errors import InvalidArgument, QuireError, Unsupported

# The signature of LLM(...), as users rely on it.
LLM_ARGUMENTS = {
    "device": "auto",
    "dtype": "auto",
    "kv_dtype": "auto",
    "max_model_len": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory": None,
    "gpu_memory_utilization": 0.9,
    "page_size": 16,
    "checkpoint_interval": None,
    "enable_prefix_caching": True,
    "attention_backend": "auto",
    "enforce_eager": False,
    "async_scheduling": True,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "speculative": None,
    "adapters": None,
    "quantization": None,
    "tokenizer": None,
    "chat_template": None,
    "parse_special": False,
    "revision": None,
    "trust_remote_code": False,
    "seed": 0,
    "override_generation_config": None,
    "host_memory": None,
    "store": (),
    "adapter_ranks": 512,
    "adapter_memory": None,
    "state_dir": None,
}


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        (" 4 gib ", 4 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("3MB", 3_000_000),
        ("3MiB", 3 * 2**20),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("7B", 7),
        ("0.1KiB", 102),
    ],
)
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "bad", [-1, True, 1.5, None, "", "GiB", "4G", "4 gigs", "-4GiB", "4,5GiB", "1e9", "4GiB4", "٤GiB"]
)
def test_parse_bytes_refuses(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"pool must be .*'4GiB'.*KiB.*got {re.escape(repr(bad))}"):
        parse_bytes(bad, name="pool")


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(["KiB", "MB", "GiB", "TiB"]))
def test_parse_bytes_is_exact(whole: int, thousandths: int, unit: str) -> None:
    factor = (1024 if "i" in unit else 1000) ** ("KMGT".index(unit[0]) + 1)
    exact = Fraction(whole * 1000 + thousandths, 1000) * factor
    assert parse_bytes(f"{whole}.{thousandths:03d}{unit}") == math.floor(exact)


# ---------------------------------------------------------------------- the engine


def test_engine_config_has_the_arguments_of_llm() -> None:
    parameters = inspect.signature(EngineConfig).parameters
    assert {name: p.default for name, p in parameters.items() if name != "model"} == LLM_ARGUMENTS
    assert parameters["model"].default is inspect.Parameter.empty
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


@pytest.mark.parametrize(
    "given", [{"a": "x", "b": Path("y=z")}, ["a=x", "b=y=z"], ("a=x", "b=y=z")], ids=["mapping", "list", "tuple"]
)
def test_adapters_by_name(given: Any) -> None:
    assert EngineConfig(model="m", adapters=given).adapters == {"a": "x", "b": "y=z"}


@pytest.mark.parametrize(("given", "why"), [(["a=x", "a=y"], "twice"), ({" ": "x"}, "empty"), (["=x"], "empty")])
def test_adapters_that_no_name_tells_apart(given: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        EngineConfig(model="m", adapters=given)


ACCEPTED = [
    ("device", "cpu"),
    ("device", "cuda"),
    ("device", "cuda:12"),
    *((name, dtype) for name in ("dtype", "kv_dtype") for dtype in ("auto", "float32", "bfloat16", "float16")),
    ("max_model_len", 1),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("kv_cache_memory", 1),
    ("gpu_memory_utilization", 1),
    ("gpu_memory_utilization", 1e-3),
    ("page_size", 1),
    ("page_size", 7),
    ("enable_prefix_caching", False),
    ("attention_backend", "torch"),
    ("tokenizer", "somewhere"),
    ("chat_template", "chatml"),
    ("revision", "main"),
    ("seed", 2**63 - 1),
    ("host_memory", 0),
    ("host_memory", 1),
    ("store", ("memory://1GiB", "file:///somewhere?size=2GiB")),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_engine_config_accepts(name: str, value: Any) -> None:
    assert getattr(EngineConfig(model="m", **{name: value}), name) == value


NOT_STRINGS = ["", "  ", 3, b"m"]
NOT_BOOLS = [1, 0, "true", None]
NOT_POSITIVE = [0, -1, 1.0, True, "4"]
REFUSED: dict[str, tuple[list[Any], str]] = {
    "model": ([*NOT_STRINGS, None], "a non-empty string"),
    "device": (["gpu", "cuda:", "cuda:x", "CPU", "mps", "", 0, None, "cpu\n"], "'auto', 'cpu', 'cuda' or 'cuda:N'"),
    "dtype": (["half", "int8", "", None, 16], "one of 'auto', 'float32', 'bfloat16', 'float16'"),
    "kv_dtype": ([None, 8], "one of 'auto', 'float32', 'bfloat16', 'float16'"),
    "max_model_len": (NOT_POSITIVE, "an integer >= 1 or left out"),
    "max_num_seqs": ([*NOT_POSITIVE, None], "an integer >= 1"),
    "max_num_batched_tokens": ([*NOT_POSITIVE, None], "an integer >= 1"),
    "kv_cache_memory": ([0, "0GiB", -1, 1.5, "4G", True], "byte"),
    "checkpoint_interval": ([-16, True, 1.5, "16"], "an integer >= 0 or left out"),
    "gpu_memory_utilization": ([0, -0.1, 1.01, 90, math.nan, math.inf, True, "0.9", None], r"a number in (0, 1]"),
    "page_size": ([*NOT_POSITIVE, None], "an integer >= 1"),
    "enable_prefix_caching": (NOT_BOOLS, "True or False"),
    "enforce_eager": (NOT_BOOLS, "True or False"),
    "async_scheduling": (NOT_BOOLS, "True or False"),
    "attention_backend": ([None, 3, ""], "a non-empty string"),
    "tensor_parallel_size": ([*NOT_POSITIVE, None], "an integer >= 1"),
    "pipeline_parallel_size": ([*NOT_POSITIVE, None], "an integer >= 1"),
    "tokenizer": (NOT_STRINGS, "a non-empty string"),
    "chat_template": (NOT_STRINGS, "a non-empty string"),
    "parse_special": (NOT_BOOLS, "True or False"),
    "revision": ([*NOT_STRINGS, Path("main")], "a non-empty string"),
    "trust_remote_code": (NOT_BOOLS, "True or False"),
    "seed": ([-1, 2**63, 1.0, True, None], f"an integer in [0, {2**63 - 1}]"),
    "override_generation_config": (
        ["hot", 7, ["{}", "[1]"], {"heat": 1}, '{"heat": 1}'],
        "with the fields temperature",
    ),
    "host_memory": ([-1, 1.5, "4G", True], "byte"),
    "speculative": (["ngram", 7, ["lookup"]], "one of auto, lookup, draft, eagle, mtp"),
    "store": (["memory://1GiB", ["file:///a", 3], [3], 3, None], "a list of URLs"),
    "adapter_ranks": ([*NOT_POSITIVE, None], "an integer >= 1"),
    "adapter_memory": ([-1, 1.5, "4G", True], "byte"),
    "state_dir": (NOT_STRINGS, "a non-empty string"),
    "adapters": (["a=b", ["a"], [1], {"a": 3}, {3: "a"}, 7], "NAME=WHERE"),
}
UNSUPPORTED: dict[str, tuple[list[Any], str]] = {
    "kv_dtype": (["fp8", "int8", "float64", ""], "one of 'auto', 'float32', 'bfloat16', 'float16'"),
    "attention_backend": (["flash_attn", "flashinfer", "Triton"], "one of 'auto', 'torch'"),
    "quantization": (["awq", "", 8], "one of 'int8', 'int4', 'fp8', or left out"),
    "trust_remote_code": ([True], "False"),
}


def cases(table: dict[str, tuple[list[Any], str]]) -> list[Any]:
    return [
        pytest.param(name, value, accepted, id=f"{name}={value!r}")
        for name, (values, accepted) in table.items()
        for value in values
    ]


def expect(error: type[QuireError], name: str, value: Any, accepted: str, config: type[Any], **others: Any) -> None:
    """Exactly this class of error, and its message has the field, the value and what is
    accepted."""
    with pytest.raises(error) as caught:
        config(**{**others, name: value})
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith(name)
    assert repr(value) in message
    assert accepted in message


@pytest.mark.parametrize(("name", "value", "accepted"), cases(REFUSED))
def test_engine_config_refuses(name: str, value: Any, accepted: str) -> None:
    expect(InvalidArgument, name, value, accepted, EngineConfig, model="m")


@pytest.mark.parametrize(("interval", "page_size"), [(8, 16), (24, 16), (1, 5)])
def test_a_checkpoint_interval_is_a_multiple_of_the_page(interval: int, page_size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"a multiple of page_size {page_size}, 0 or left out, got {interval}"):
        EngineConfig(model="m", checkpoint_interval=interval, page_size=page_size)
    assert EngineConfig(model="m", checkpoint_interval=0, page_size=page_size).checkpoint_interval == 0
    assert EngineConfig(model="m", checkpoint_interval=3 * page_size, page_size=page_size).checkpoint_interval


@pytest.mark.parametrize(("name", "value", "accepted"), cases(UNSUPPORTED))
def test_engine_config_names_what_is_not_supported(name: str, value: Any, accepted: str) -> None:
    expect(Unsupported, name, value, f"accepted: {accepted}", EngineConfig, model="m")


def test_every_field_has_a_refusal() -> None:
    assert set(REFUSED) | set(UNSUPPORTED) == {f.name for f in dataclasses.fields(EngineConfig)}


def test_values_are_put_into_one_form() -> None:
    config = EngineConfig(model=Path("a/b"), tokenizer=Path("c"), kv_cache_memory="2KiB", dtype=torch.bfloat16)  # type: ignore[arg-type]
    assert (config.model, config.tokenizer) == (str(Path("a/b")), "c")
    assert config.kv_cache_memory == 2048
    assert config.dtype == "bfloat16"
    with pytest.raises(InvalidArgument, match="'int8'"):
        EngineConfig(model="m", dtype=torch.int8)  # type: ignore[arg-type]


def test_configs_are_frozen_and_hashable() -> None:
    for config in (EngineConfig(model="m"), ExecutorConfig(model_info="m")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.dtype = "float16"  # type: ignore[misc]
        assert len({config, dataclasses.replace(config), dataclasses.replace(config, dtype="float16")}) == 2


def test_from_mapping_takes_both_cases_and_yaml() -> None:
    text = "model: tiny\nmax-num-seqs: 8\npage_size: 4\nkv-cache-memory: 1GiB\nmax-model-len: null\n"
    config = EngineConfig.from_mapping(yaml.safe_load(text))
    assert config == EngineConfig(model="tiny", max_num_seqs=8, page_size=4, kv_cache_memory=2**30)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"model": "m", "max-seqs": 1},
            r"unknown configuration key 'max-seqs'; known: model, device, .*, state_dir$",
        ),
        ({"model": "m", 5: 1}, "unknown configuration key 5; known: model"),
        ({"model": "m", "page-size": 1, "page_size": 1}, "'page_size' is given twice"),
        ({"page_size": 1}, "'model' is missing; required: model"),
        (["model"], "must be a mapping"),
        (None, "must be a mapping"),
        ({"model": "m", "page-size": 0}, "page_size must be an integer >= 1, got 0"),
    ],
)
def test_from_mapping_refuses(mapping: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        EngineConfig.from_mapping(mapping)


@pytest.mark.parametrize("cls", [EngineConfig, ExecutorConfig, AttentionConfig, MemoryConfig, OptimizationConfig])
def test_every_field_has_a_help_text(cls: type[Any]) -> None:
    texts = field_help(cls)
    assert list(texts) == [f.name for f in dataclasses.fields(cls)]
    assert all(text.endswith(".") and len(text) > 10 for text in texts.values())
    assert len(set(texts.values())) == len(texts)


# ---------------------------------------------------------------------- executors

EXECUTOR_FIELDS = {
    ExecutorConfig: "model_info device dtype executor_type max_batch_size max_sequence_length attention_config memory_config "
    "optimization_config executor_options",
    AttentionConfig: "attention_type enable_flash_attention enable_paged_attention block_size sliding_window_size",
    MemoryConfig: "enable_memory_pooling memory_pool_size enable_kv_cache_sharing max_memory_usage",
    OptimizationConfig: "enable_cuda_graphs enable_kernel_fusion enable_mixed_precision optimization_level custom_flags",
}


@pytest.mark.parametrize(("cls", "names"), EXECUTOR_FIELDS.items())
def test_executor_configs_have_exactly_these_fields(cls: type[Any], names: str) -> None:
    assert [f.name for f in dataclasses.fields(cls)] == names.split()


EXECUTOR_REFUSED: dict[type[Any], dict[str, tuple[list[Any], str]]] = {
    ExecutorConfig: {
        "model_info": (["", None, 5], "must be a"),
        "device": REFUSED["device"],
        "dtype": REFUSED["dtype"],
        "executor_type": (["batch", "", None, 1], "one of 'Sequential', 'Batch'"),
        "max_batch_size": ([*NOT_POSITIVE, None], "an integer >= 1"),
        "max_sequence_length": (NOT_POSITIVE, "an integer >= 1"),
        "attention_config": ([None, {}, MemoryConfig()], "AttentionConfig"),
        "memory_config": ([None, {}], "MemoryConfig"),
        "optimization_config": ([None, {}], "OptimizationConfig"),
        "executor_options": ([None, [], "x"], "a mapping"),
    },
    AttentionConfig: {
        "attention_type": (["multihead", "", None, 1], "one of 'MultiHead', 'MultiQuery'"),
        "enable_flash_attention": (NOT_BOOLS, "True or False"),
        "enable_paged_attention": (NOT_BOOLS, "True or False"),
        "block_size": ([*NOT_POSITIVE, None], "an integer >= 1"),
        "sliding_window_size": ([5], "must be None unless attention_type is 'SlidingWindow'"),
    },
    MemoryConfig: {
        "enable_memory_pooling": (NOT_BOOLS, "True or False"),
        "memory_pool_size": ([0, -1, 1.5, "4G"], "byte"),
        "enable_kv_cache_sharing": (NOT_BOOLS, "True or False"),
        "max_memory_usage": ([0, -1, 100.1, math.nan, True, "90", None], "a number in (0, 100] percent"),
    },
    OptimizationConfig: {
        "enable_cuda_graphs": (NOT_BOOLS, "True or False"),
        "enable_kernel_fusion": (NOT_BOOLS, "True or False"),
        "enable_mixed_precision": (NOT_BOOLS, "True or False"),
        "optimization_level": ([-1, 4, 1.0, True, None], "an integer in [0, 3]"),
        "custom_flags": ([None, [], "x"], "a mapping"),
    },
}


@pytest.mark.parametrize(
    ("cls", "name", "value", "accepted"),
    [(cls, *case.values) for cls, table in EXECUTOR_REFUSED.items() for case in cases(table)],
)
def test_executor_configs_refuse(cls: type[Any], name: str, value: Any, accepted: str) -> None:
    others = {"model_info": "m"} if cls is ExecutorConfig else {}
    expect(InvalidArgument, name, value, accepted, cls, **others)


def test_every_executor_field_has_a_refusal() -> None:
    for cls, table in EXECUTOR_REFUSED.items():
        assert list(table) == EXECUTOR_FIELDS[cls].split()


@pytest.mark.parametrize(("cls", "name"), [(OptimizationConfig, "custom_flags"), (ExecutorConfig, "executor_options")])
def test_unknown_flags_and_options_are_errors(cls: type[Any], name: str) -> None:
    others = {"model_info": "m"} if cls is ExecutorConfig else {}
    assert getattr(cls(**others, **{name: {}}), name) == {}
    accepted = "none" if cls is OptimizationConfig else "prefill_chunk_size, modalities"
    with pytest.raises(InvalidArgument, match=f"{name} has no 'turbo'; accepted: {accepted}"):
        cls(**others, **{name: {"turbo": True}})


def test_values_of_options_are_checked() -> None:
    windowed = AttentionConfig(attention_type="SlidingWindow", sliding_window_size=4)
    options = {"prefill_chunk_size": 0, "modalities": ["audio"], "sliding_window_sink": 3}
    config = ExecutorConfig(model_info="m", attention_config=windowed, executor_options=options)
    assert config.executor_options == options
    for name, values, message in (
        ("prefill_chunk_size", (None, True, 1.5, "2"), "an integer"),
        ("modalities", (None, "vision", ["smell"], 3), "a list of one of 'vision', 'audio'"),
        ("sliding_window_sink", (-1, 4, True, None), r"an integer in \[0, 3\]"),
    ):
        for value in values:
            with pytest.raises(InvalidArgument, match=rf"executor_options\.{name} must be {message}"):
                ExecutorConfig(model_info="m", attention_config=windowed, executor_options={name: value})
    with pytest.raises(InvalidArgument, match="belongs to attention_type 'SlidingWindow', got 1 with 'MultiHead'"):
        ExecutorConfig(model_info="m", executor_options={"sliding_window_sink": 1})


def test_types_demand_their_flags() -> None:
    for kind, name in (("Flash", "enable_flash_attention"), ("Paged", "enable_paged_attention")):
        with pytest.raises(InvalidArgument, match=f"{name} must be True where attention_type is '{kind}', got False"):
            AttentionConfig(attention_type=kind, **{name: False})


def test_a_window_belongs_to_sliding_window_attention() -> None:
    assert AttentionConfig(attention_type="SlidingWindow", sliding_window_size=1).sliding_window_size == 1
    for size in (None, 0, -1, True):
        with pytest.raises(InvalidArgument, match=f"sliding_window_size must be an integer >= 1 .*, got {size}"):
            AttentionConfig(attention_type="SlidingWindow", sliding_window_size=size)
    for kind in ("MultiHead", "MultiQuery", "GroupedQuery", "Flash", "Paged"):
        assert AttentionConfig(attention_type=kind).sliding_window_size is None


def test_block_size_is_ranged_when_paging() -> None:
    assert AttentionConfig(block_size=1).block_size == 1
    assert AttentionConfig(enable_paged_attention=False, block_size=0).block_size == 0
    with pytest.raises(InvalidArgument, match="block_size must be an integer, got 'x'"):
        AttentionConfig(enable_paged_attention=False, block_size="x")  # type: ignore[arg-type]


def test_executor_sizes() -> None:
    assert MemoryConfig(memory_pool_size="1KiB", max_memory_usage=100).memory_pool_size == 1024
    assert MemoryConfig().memory_pool_size is None
    for level in range(4):
        assert OptimizationConfig(optimization_level=level).optimization_level == level


@dataclasses.dataclass(frozen=True)
class Metadata:
    max_sequence_length: Any


def test_the_length_fits_the_model() -> None:
    assert ExecutorConfig(model_info=Metadata(100), max_sequence_length=100).max_sequence_length == 100
    with pytest.raises(InvalidArgument, match=r"max_sequence_length must be an integer in \[1, 100\], got 101"):
        ExecutorConfig(model_info=Metadata(100), max_sequence_length=101)
    for bad in (None, True, "8"):
        with pytest.raises(InvalidArgument, match=r"model_info must be .*max_sequence_length, got Metadata"):
            ExecutorConfig(model_info=Metadata(bad))
    assert ExecutorConfig(model_info=Path("a")).model_info == "a"


def test_options_are_copied() -> None:
    options: dict[str, object] = {}
    config = ExecutorConfig(model_info="m", executor_options=options)
    options["later"] = 1
    assert config.executor_options == {}


# ---------------------------------------------------------------------- imports


def test_bookkeeping_needs_no_torch() -> None:
    code = (
        "import sys, quire.base.config, quire.base.metrics, quire.branches.prefix_cache; "
        "quire.base.config.EngineConfig(model='m'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
