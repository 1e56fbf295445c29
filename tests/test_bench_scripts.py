"""The scripts about windows and overheads, apart from time itself: they run, and print what they promise."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench.checkpoints import (
    SHAPES,
    alternating_config,
    checkpoint,
    predicted_text,
    text_tokenizer,
    variant,
    windowed_config,
)

from quire.bench.peers import TransformersPeer
from quire.bench.reports import random_prompts
from quire.contracts.layers import FullAttention, WindowedAttention
from quire.engine.tokenizer import Tokenizer
from quire.models.families import FAMILIES

BENCH = Path(__file__).parents[1] / "bench"
QUICK = SHAPES["quick-1m"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module: scripts find each other by their directory."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


def run(name: str, directory: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Its table, and its line of JSON."""
    command = [sys.executable, str(BENCH / f"{name}.py"), "--shape", "quick-1m", "--dir", str(directory)]
    command += ["--device", "cpu", "--kv-cache-memory", "32MiB", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    return "\n".join(table), json.loads(line)


class TestWindows:
    def test_runs_and_reports(self, directory: Path) -> None:
        lengths, window, session_window = [80, 144], 32, 48
        arguments = ["--lengths", "80,144", "--sample", "6", "--slice", "3", "--sink", "4", "--peer", "none"]
        table, result = run("windows", directory, *arguments, "--window", "32", "--session-window", "48")
        assert "RSS" in table
        assert result["benchmark"] == "windows"
        assert result["lengths"] == lengths
        assert (result["window"], result["session_window"], result["sink"]) == (window, session_window, 4)
        pages: dict[str, list[int]] = {}
        for row in result["rows"]:
            assert row["resident_bytes"] > 1 << 20
            assert row["seconds_per_token"] > 0
            assert row["to_young"]["least"] <= row["to_young"]["median"] <= row["to_young"]["most"]
            assert row["to_full"]["median"] > 0
            pages.setdefault(row["model"], []).append(row["pages"])
        # Pages of 16 tokens, the last token of a session not among them; 6 tokens more were timed at the first length.
        assert pages["full"] == [5, 9]
        assert all(count <= window // 16 + 2 for count in pages["window"])
        assert all(
            full < both <= full + window // 16 + 2
            for both, full in zip(pages["alternating"], pages["full"], strict=True)
        )
        assert all(count <= 1 + (session_window - 4) // 16 + 2 for count in pages["streaming"])
        made = 144 + 6 - 2 * 17
        for one in result["summary"]:
            assert (one["from"], one["to"]) == (80, 144)
            assert one["equal"]["predicted"] == {"same": made, "of": made}
            assert one["model"] == "full" or one["equal"]["full"] == {"same": 150, "of": 150}
            assert one["seconds_ratio"] > 0

    def test_texts_are_those_of_transformers(self, directory: Path) -> None:
        """The configurations that the script makes, with a window that cuts off what decides the text."""
        from quire import LLM, SamplingParams

        prompts = random_prompts(1, 40, QUICK.vocab_size, seed=3)
        for label, config in (
            ("short", windowed_config(QUICK, 12, 4096)),
            ("turns", alternating_config(QUICK, 12, 4096)),
        ):
            path = variant("quick-1m", label, config, directory=directory)
            expected = TransformersPeer(path, torch.float32).generate(prompts, 40).tokens[0]
            with LLM(str(path), dtype="float32", device="cpu", kv_cache_memory="32MiB") as llm:
                params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
                made = llm.generate(prompts[0].tolist(), params)[0].outputs[0].token_ids
            assert tuple(made) == expected
            assert list(made) != predicted_text(QUICK, prompts[0].tolist(), 40)

    def test_first_difference_ends_what_is_equal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        common = script("windows", monkeypatch).common
        assert common([1, 2, 3, 4], [1, 2, 9, 4, 5]) == {"same": 2, "of": 4}
        assert common([1, 2], [1, 2, 3]) == {"same": 2, "of": 2}
        assert common([], [1]) == {"same": 0, "of": 0}

    def test_summary_begins_where_the_window_is_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        windows = script("windows", monkeypatch)
        rows = [
            {"tokens": tokens, "pages": pages, "resident_bytes": 10 * tokens, "seconds_per_token": 1.0 + tokens / 1000}
            | {"to_young": tokens}
            for tokens, pages in ((100, 7), (300, 17), (1000, 18))
        ]
        common = {"name": "window", "path": "", "session": {}, "prompt": [], "device": "cpu", "kv_cache_memory": ""}
        found = windows.summary(windows.Subject(window=256, **common), rows)
        assert (found["from"], found["to"], found["pages"]) == (300, 1000, [17, 18])
        assert found["resident_growth_bytes"] == 7000
        assert found["seconds_ratio"] == pytest.approx(2.0 / 1.3)
        assert found["to_young"] == 1000
        assert windows.summary(windows.Subject(window=None, **common), rows)["from"] == 100

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--models", "full,gpt"], "gpt"),
            (["--lengths", "20"], "above 34"),
            (["--lengths", "1000,1100"], "further apart"),
            (["--slice", "1"], "--slice"),
        ],
    )
    def test_refusals(
        self,
        arguments: list[str],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        windows = script("windows", monkeypatch)
        monkeypatch.setattr(sys, "argv", ["windows.py", *arguments])
        with pytest.raises(SystemExit):
            windows.main()
        assert message in capsys.readouterr().err


class TestOverheads:
    def test_runs_and_reports(self, directory: Path) -> None:
        table, result = run("overheads", directory, "--batch", "3", "--context", "20", "--decode", "5", "--rounds", "2")
        assert "attention plan" in table
        assert result["benchmark"] == "overheads"
        assert (result["batch"], result["context"], result["decode"], result["rounds"]) == (3, 20, 5, 2)
        rows = {row["steps"]: row for row in result["structured"]}
        known = ["known: free", "known: JSON schema", "known: regex"]
        assert list(rows) == ["free", "JSON schema", "regex", *known]
        for name, row in rows.items():
            assert row["seconds_per_step"]["median"] > 0
            if name.endswith("free"):
                assert row["to_free"] == {"median": 1.0, "least": 1.0, "most": 1.0}
            elif name not in known:
                assert row["texts"]["ended"] == row["texts"]["valid"] > 0
                for part in ("grammar masks", "grammar masks applied"):
                    assert result["parts"][name][part]["share"] > 0
        assert "grammar masks" not in result["parts"]["free"]
        for name, parts in result["parts"].items():
            for part in ("scheduler", "KV bookkeeping", "attention plan", "sampling", "detokenizer", "model"):
                assert 0 < parts[part]["share"] < 1, (name, part)
            counted = sum(parts[part]["share"] for part in ("scheduler", "KV bookkeeping", "attention plan"))
            assert parts["scheduler and plan"]["share"] == pytest.approx(counted)
            own = sum(parts[part]["share"] for part in parts if part != "scheduler and plan")
            assert 0.98 < own <= 1, name
        cost, share = result["structured_cost"], result["scheduler_and_plan_share"]
        assert cost == pytest.approx(max(rows[name]["to_free"]["median"] for name in known) - 1)
        assert result["structured_cost_random_weights"] == pytest.approx(
            max(rows[name]["to_free"]["median"] for name in ("free", "JSON schema", "regex")) - 1
        )
        assert result["met"] == {"structured": cost < 0.05, "scheduler_and_plan": share < 0.05}

    def test_clocks_count_own_time_and_leave_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        overheads = script("overheads", monkeypatch)
        now = [0]
        monkeypatch.setattr(overheads, "time", SimpleNamespace(perf_counter=lambda: now[0]))

        class Inner:
            def work(self, seconds: int) -> int:
                now[0] += seconds
                return seconds

        class Outer:
            def __init__(self) -> None:
                self.inner = Inner()

            def work(self) -> int:
                now[0] += 20
                self.inner.work(3)
                return self.inner.work(seconds=50)

            def fail(self) -> None:
                self.work()
                now[0] += 700
                raise ValueError("as intended")

        outer, before = Outer(), Inner.work
        with overheads.Clocks() as clocks:
            clocks.put(Inner, "work", "inner")
            clocks.put(outer, "work", "outer")
            clocks.put(outer, "fail", "failing")
            assert outer.work() == 50
            assert clocks.take() == {"inner": 53, "outer": 20}
            with pytest.raises(ValueError, match="as intended"):
                outer.fail()
            assert clocks.take() == {"inner": 53, "outer": 20, "failing": 700}
            assert clocks.take() == {}
            with pytest.raises(AttributeError):
                clocks.put(outer, "rest", "nothing")
        assert Inner.work is before
        assert vars(outer).keys() == {"inner"}

    def test_forms_are_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        has_form = script("overheads", monkeypatch).has_form
        good = {"name": "f", "kind": "class", "line": 3, "documented": True}
        assert has_form("JSON schema", json.dumps([good]))
        for change in ({"kind": "def"}, {"line": "3"}, {"documented": 1}, {"name": "x" * 25}, {"more": 1}):
            assert not has_form("JSON schema", json.dumps([good | change])), change
        assert not has_form("JSON schema", "[")
        assert not has_form("JSON schema", json.dumps([good, good]))
        assert has_form("regex", "12: name(a, b) -> int\n")
        assert not has_form("regex", "12: name(a, b) -> float\n")


class TestCheckpoints:
    def test_variants_share_weights(self, directory: Path) -> None:
        config = windowed_config(QUICK, 64, 8192)
        path = variant("quick-1m", "some", config, directory=directory)
        weights = checkpoint("quick-1m", directory=directory) / "model.safetensors"
        assert (path / "model.safetensors").resolve() == weights.resolve()
        assert json.loads((path / "config.json").read_text()) == config
        assert variant("quick-1m", "some", config | {"sliding_window": 65}, directory=directory) == path
        assert json.loads((path / "config.json").read_text())["sliding_window"] == 65

    def test_configurations_have_the_windows(self) -> None:
        assert windows_in(windowed_config(QUICK, 64, 8192)) == [64, 64]
        assert windows_in(alternating_config(QUICK, 64, 8192)) == [None, 64]
        assert windows_in(QUICK.config()) == [None, None]

    def test_tokenizer_is_made_once_and_loses_nothing(self, directory: Path) -> None:
        path = text_tokenizer(600, directory=directory)
        stamp = (path / "tokenizer.json").stat().st_mtime_ns
        assert text_tokenizer(600, directory=directory) == path
        assert (path / "tokenizer.json").stat().st_mtime_ns == stamp
        assert len(list(path.iterdir())) == 1  # and nothing left over
        tokenizer = Tokenizer.from_directory(path)
        assert tokenizer is not None
        assert tokenizer.token_bytes.size == 600
        text = '{"naïve": [1, 2, "ключ"]}\n'
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode("def __init__(self):")) < 10


def windows_in(config: dict[str, Any]) -> list[int | None]:
    """The window of each layer, as the family's reader finds it."""
    specs = FAMILIES.require(config["architectures"][0]).read_config(config).layers
    assert all(isinstance(spec, (FullAttention, WindowedAttention)) for spec in specs)
    return [spec.layer_window for spec in specs]
