"""What ``quire doctor`` measures and says of models' speed, apart from this machine's own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.cli.test_cli import run
from tests.models.conftest import make_checkpoint
from tests.models.gguf_writer import write_gguf
from tests.models.quantized_writer import write_quantized
from tests.models.test_quantized import LAYOUTS, MODEL

from quire import LLM
from quire.build import layer_kernels
from quire.cli import rates
from quire.models.loading import count_parameters, load_model
from quire.weights.places import Place


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"MOST_BYTES": 1 << 18, "PIECE": 1 << 16, "ROWS": 8, "OUTPUTS": 64, "INPUTS": 64}.items():
        monkeypatch.setattr(rates, name, size)


@pytest.mark.usefixtures("small")
def test_a_measurement_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each look at the clock takes a second, so a run takes one."""
    runs: list[str] = []

    def product(form: str) -> Callable[[], object]:
        return lambda: runs.append(form)

    monkeypatch.setattr(rates, "_products", lambda: {form: product(form) for form in ("bfloat16", "int8")})
    ticks = itertools.count()
    found = rates.measure(8.0, lambda: float(next(ticks)))
    assert runs == ["bfloat16"] * 2 + ["int8"] * 2  # two seconds for each form, a warm run among them
    assert found.products == dict.fromkeys(("bfloat16", "int8"), 2 * 8 * 64 * 64)
    # Two of eight seconds for filling, which begin with a look at the clock: one piece more.
    assert found.reads == 2 * rates.PIECE


@pytest.mark.usefixtures("small")
def test_all_forms_have_a_rate() -> None:
    found = rates.measure(0.0)
    assert set(found.products) in ({"float32", "bfloat16"}, {"float32", "bfloat16", "int8", "int4"})
    assert min(found.reads, *found.products.values()) > 0


def test_limits_are_reads_by_bytes_and_products_by_operations() -> None:
    found = rates.Rates(reads=30e9, products={"bfloat16": 0.3e12, "int8": 0.6e12})
    assert rates.limits(found, "bfloat16", 0.5e9, 1e9) == rates.Limits(decode=30.0, prompt=300.0)
    assert rates.limits(found, "int8", 0.5e9, 0.5e9) == rates.Limits(decode=60.0, prompt=600.0)
    # 8 bits, and a scale of 16 for 64 weights.
    assert [rates.weight_bytes(form, 64) for form in ("float32", "bfloat16", "int8")] == [256, 128, 66]


def test_what_a_token_reads_is_counted() -> None:
    shapes = {
        "embed.weight": (97, 32),
        "blocks.0.attention.qkv.weight": (64, 32),
        "blocks.0.mlp.experts.down.weight": (8 * 32, 16),
        "blocks.0.mlp.shared_experts.down.weight": (32, 16),
        "head.weight": (97, 32),
    }
    places = {name: Place(parameter=name, shape=shape) for name, shape in shapes.items()}
    values = {"num_experts": 8, "num_experts_per_tok": 2}
    found = count_parameters(places, values)
    assert found["num_parameters"] == 2 * 97 * 32 + 64 * 32 + 8 * 32 * 16 + 32 * 16
    assert found["num_read"] == 97 * 32 + 64 * 32 + 2 * 32 * 16 + 32 * 16  # of the table one row
    assert count_parameters(places, {"text_config": values}) == found
    del places["head.weight"]  # tied: the table is the head
    assert count_parameters(places, values)["num_read"] == found["num_read"]


@pytest.mark.usefixtures("small")
def test_doctor_tells_what_to_expect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rates, "SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "240")
    rate = r"[\d.e+]+"
    assert run("doctor", monkeypatch=monkeypatch) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"reads {rate} GB/s from memory by \d+ threads", out)
    assert re.search(rf"products GFLOP/s by the form of the weights: float32 {rate}, bfloat16 {rate}", out)
    assert re.search(rf"8B parameters {rate} and {rate} in bfloat16 \(15 GiB\)", out)
    assert run("doctor", "--model", "tiny-python", monkeypatch=monkeypatch) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"tiny-python at most .* {rate} and {rate} in \w+ \(0.\d+ GiB\), read for each token", out)
    assert "8B" not in out
    assert run("doctor", "--model", "no-such-model", monkeypatch=monkeypatch) == 2


def test_the_bundled_model_is_counted_as_loading_counts_it() -> None:
    with LLM("tiny-python", kv_cache_memory="4MiB") as llm:
        assert rates.outline_of(Path("src/quire/data/tiny-python")).num_parameters == llm.model.num_parameters


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-float8-rows", "nf4-nested", "awq", "gptq-4", "Q8_0"])
def test_doctor_says_which_formats_are_expanded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without reading weights it knows what loading finds, and what that costs. Integers that do
    not fit are found by their values only.
    """
    path = make_checkpoint(MODEL, tmp_path / "model").path
    if name in LAYOUTS:
        layout, section, format = LAYOUTS[name]
        path, _ = write_quantized(path, tmp_path, layout, section)
    else:
        path, format = write_gguf(path, tmp_path / "model.gguf", name), name
    kernels = layer_kernels(torch.device("cpu"))
    loaded = load_model(path, kernels=kernels)
    monkeypatch.setattr(rates, "SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "400")
    assert run("doctor", "--model", str(path), monkeypatch=monkeypatch) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert rates.outline_of(path).formats == loaded.formats
    assert rates.outline_of(path).expanded == loaded.expanded
    assert re.search(rf"its weights .*{format} \d+\.\d MiB", out)
    assert ("is expanded to " in out) == bool(loaded.expanded)
