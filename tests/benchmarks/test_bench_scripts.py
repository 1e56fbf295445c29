"""The scripts about windows, overheads, recurrences, states and latent attention, apart from time
itself: they run, and print what they promise.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.base.errors import InvalidArgument, NotFound, QuireError, Unsupported
from quire.branches.prefix_cache import RadixCache
from quire.contracts.layers import FullAttention, WindowedAttention
from quire.kernels.native_library import native_problem
from quire.kv.state import State
from quire.models.families import FAMILIES
from quire.text.tokenizer import Tokenizer
from quire_bench import latent, latent_forms, reuse, states
from quire_bench.checkpoints import (
    DRAWN,
    SHAPES,
    alternating_config,
    checkpoint,
    drawn,
    predicted_text,
    text_tokenizer,
    variant,
    windowed_config,
)
from quire_bench.hardware import Hardware, measure
from quire_bench.peers import TransformersPeer
from quire_bench.reports import Spread, random_prompts

BENCH = Path(__file__).parents[2] / "bench"
QUICK = SHAPES["quick-1m"]
OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "32MiB"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module: scripts find each other by their directory."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


HARDWARE: Hardware = {
    "device": "none",
    "threads": 1,
    "torch": "",
    "buffer_bytes": 1 << 24,
    "cache_bytes": 1,
    "exceeds_cache": False,
    "copy_gbps": 1.0,
    "read_gbps": 3.0,
    "read_methods_gbps": {"sum": 3.0},
    "gemm_tflops": {"float32": {"1024": 2.0}},
    "peak_tflops": {"float32": 2.0},
}
"""Measuring takes seconds."""


def run(name: str, directory: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Its table, and its line of JSON, with the small shape."""
    return run_plain(name, *of_the_small_shape(directory), *arguments)


def of_the_small_shape(directory: Path) -> list[str]:
    return ["--shape", "quick-1m", "--dir", str(directory), "--device", "cpu", "--kv-cache-memory", "32MiB"]


def run_plain(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Its table, and its line of JSON; in this process, on hardware that was not measured."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(str(BENCH))
        # By its path: "adapters" is a package of tests too.
        spec = importlib.util.spec_from_file_location(f"bench_script_{name}", BENCH / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # where dataclasses look for their module
        spec.loader.exec_module(module)
        if getattr(module, "measure", None) is measure:
            patch.setattr(module, "measure", lambda **_: HARDWARE)
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        module.main()
    *table, line = out.getvalue().splitlines()
    return "\n".join(table), json.loads(line)


def run_process(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Its table, and its line of JSON, as a user starts it."""
    command = [sys.executable, str(BENCH / f"{name}.py"), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    return "\n".join(table), json.loads(line)


def test_adapters(directory: Path) -> None:
    """Steps over the base model's, rows equal to themselves alone, and the time of a load."""
    arguments = [
        "--batch",
        "3",
        "--rank",
        "2",
        "--adapters",
        "1,3",
        "--decode",
        "4",
        "--context",
        "20",
        "--rounds",
        "1",
    ]
    table, found = run("adapters", directory, "--dtype", "float32", *arguments)
    assert "rows as alone" in table
    for kind in ("qv", "all"):
        rows = found[kind]["decode"]
        assert [row["adapters"] for row in rows] == [1, 3]
        assert all(row["rows as alone"] == "3/3" and row["over base"]["median"] > 0 for row in rows)
        assert found[kind]["logits_differ_by"] > 0
        assert found[kind]["loading"]["load ms"] > 0
    assert found["all"]["loading"]["bytes"] > found["qv"]["loading"]["bytes"]


class TestWindows:
    @pytest.mark.slow
    def test_runs_and_reports(self, directory: Path) -> None:
        lengths, window, session_window = [80, 144], 32, 48
        arguments = ["--lengths", "80,144", "--sample", "6", "--slice", "3", "--sink", "4", "--peer", "none"]
        arguments += [*of_the_small_shape(directory), "--window", "32", "--session-window", "48"]
        table, result = run_process("windows", *arguments)
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
        # Pages of 16 tokens, the last token of a session not among them; 6 tokens more were timed
        # at the first length.
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
        """The configurations that the script makes, with a window that cuts off what decides the
        text.
        """
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
    @pytest.mark.slow
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
        assert result["met"] == {"structured": cost < 0.05, "scheduler_and_plan": share < 0.03}

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


class TestBareSteps:
    def test_runs_and_reports(self, directory: Path) -> None:
        if native_problem():
            pytest.skip(native_problem())
        given = ["--batches", "1,3", "--context", "20", "--decode", "6", "--rounds", "1"]
        table, result = run("bare_steps", directory, *given)
        assert "of a step" in table
        assert [row["batch"] for row in result["rows"]] == [1, 3]
        for row in result["rows"]:
            assert all(row[kind]["median"] > 0 for kind in ("step", "bare", "cold"))
            for part in ("scheduler", "KV bookkeeping", "attention plan", "sampling", "detokenizer"):
                assert 0 < row["parts"][part]["share"] < 1, part

    def test_a_model_is_whole_again(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """And while it is not, its blocks and its head do nothing."""
        if native_problem():
            pytest.skip(native_problem())
        script("overheads", monkeypatch)  # which ``bare_steps`` finds by its directory
        bare_steps = script("bare_steps", monkeypatch)
        prompts = [row.numpy() for row in random_prompts(2, 20, QUICK.vocab_size)]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with LLM(str(checkpoint("quick-1m", directory=directory)), **OPTIONS) as llm:
            before = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
            stack, rows = llm.model.stack, []
            plain = type(stack.call).outputs

            def counted(self: Any, x_TE: torch.Tensor, *more: Any) -> Any:
                rows.append(x_TE.shape[0])
                return plain(self, x_TE, *more)

            monkeypatch.setattr(type(stack.call), "outputs", counted)
            assert bare_steps.bare_seconds(llm, prompts, params, 0) > 0
            assert rows == [40]  # of the prompts
            assert llm.model.stack is stack
            llm.reset_prefix_cache()
            assert [one.outputs[0].token_ids for one in llm.generate(prompts, params)] == before


class TestAttention:
    @pytest.mark.slow
    def test_runs_and_reports(self) -> None:
        table, result = run_plain("attention", "--small", "--levels", "portable")
        assert result["benchmark"] == "attention"
        assert (result["context"], result["prompt"], result["rounds"]) == ([64], [32], 2)
        assert "portable / native" in table
        heads = ["64, grouped", "64", "128, grouped", "128"]
        whats = [("decode", 1), ("decode", 2), ("prompt", 1)]
        rows = [(row["head"], row["what"], row["batch"]) for row in result["rows"]]
        assert rows == [(head, what, batch) for head in heads for what, batch in whats]
        shares = [row["share"]["median"] for row in result["rows"] if row["what"] == "decode"]
        assert result["all_met"] == all(share >= result["target"] for share in shares)
        assert all(row["share"] is None for row in result["rows"] if row["what"] == "prompt")
        assert table.count("of the read bandwidth") == len(shares)


class TestRecurrence:
    @pytest.mark.slow
    def test_runs_and_reports(self) -> None:
        table, result = run_plain("recurrence", "--small")
        kinds = [
            "linear",
            "ssd",
            "gated",
            "gated-columns",
            "delta",
            "gated-delta",
            "gated-delta-columns",
            "convolution",
        ]
        assert result["benchmark"] == "recurrence"
        assert (result["tokens"], result["batch"], result["draft"], result["rounds"]) == (130, 3, 4, 1)
        assert list(result["met"]) == kinds
        assert result["all_met"] == all(result["met"].values())
        assert [(row["kind"], row["what"]) for row in result["rows"]] == [
            (kind, what) for kind in kinds for what in ("prompt", "decodes", "draft")
        ]
        for row in result["rows"]:
            assert row["tokens"] == {"prompt": 130, "decodes": 3, "draft": 4}[row["what"]]
            for spread in ("seconds", "reference_seconds", "gain"):
                assert 0 < row[spread]["least"] <= row[spread]["median"] <= row[spread]["most"]
            # Sums of float32 over at most as many terms as there are rows, or columns of a head.
            assert row["difference"] < 130 * torch.finfo(torch.float32).eps
            if row["what"] == "prompt":
                assert result["met"][row["kind"]] == (row["gain"]["median"] >= result["target"] == 10)
                verdict = "10 reached" if result["met"][row["kind"]] else "10 NOT reached"
                line = next(one for one in table.splitlines() if one.startswith(f"{row['kind']}: "))
                assert "a prompt of 130 tokens" in line
                assert line.endswith(verdict)

    def test_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        verdict = script("recurrence", monkeypatch).verdict
        just = Spread(median=10.0, least=9.0, most=11.0)
        assert verdict("ssd", 2048, just) == (
            "ssd: a prompt of 2048 tokens runs 10 (9 to 11) times as fast as step by step; 10 reached"
        )
        assert verdict("ssd", 7, Spread(median=9.99, least=9.0, most=11.0)).endswith("10 NOT reached")


@pytest.fixture(scope="module")
def found(directory: Path) -> tuple[str, dict[str, Any]]:
    """What the script about states says."""
    return run_plain("states", "--small", "--device", "cpu", "--dir", str(directory))


class TestStates:
    @pytest.mark.slow
    def test_costs(self, found: tuple[str, dict[str, Any]]) -> None:
        table, result = found
        assert result["benchmark"] == "states"
        assert (result["tokens"], result["rounds"], result["peer"]) == (200, 1, "transformers")
        assert [model["name"] for model in result["models"]] == ["bamba-small", "mamba2-small"]
        for model in result["models"]:
            assert model["name"] in table
            kind, values = DRAWN[model["name"]]
            head = {"bamba": "mamba_d_head", "mamba2": "head_dim"}[kind]
            heads = {"bamba": "mamba_n_heads", "mamba2": "num_heads"}[kind]
            size = {"bamba": "mamba_d_state", "mamba2": "state_size"}[kind]
            mixers = values["num_hidden_layers"] - len(values.get("attn_layer_indices", ()))
            width = values[heads] * values[head]
            # A matrix for each head, and three inputs of the convolution over x, B and C, in
            # float32.
            assert model["state_bytes"] == mixers * 4 * (width * values[size] + 3 * (width + 2 * values[size]))
            assert (model["token_bytes"] > 0) == (kind == "bamba")
            assert model["file_bytes"] > model["state_bytes"] + 199 * model["token_bytes"]
            rows = {row["what"]: row for row in model["costs"]}
            for what in ("Session.fork", "fork_sequence", "KVCache.deep_copy", "save", "restore", "KVState.checkpoint"):
                assert rows[what]["median_seconds"] > 0, what
            assert rows["Session.fork"]["note"] == "0 pages taken, 0 copied"
            assert rows["KVState.checkpoint"]["note"] == "0 states taken"

    def test_rewinds(self, found: tuple[str, dict[str, Any]]) -> None:
        for model in found[1]["models"]:
            intervals = [one["interval"] for one in model["checkpoints"]]
            chosen = [one["interval"] for one in model["checkpoints"] if one["by_engine"]]
            assert len(chosen) == 1
            assert intervals == sorted({0, 32, 64, *chosen})
            for one in model["checkpoints"]:
                # And the one before the last token, where the history ends that was run.
                kept = (199 // one["interval"] if one["interval"] else 0) + 1
                assert (one["checkpoints"], one["bytes"]) == (kept, kept * model["state_bytes"])
                assert one["equal"]["same"] == one["equal"]["of"] >= 4
                assert one["equal"]["difference"] < 1e-5
            for row in model["rewinds"]:
                # The logits of the token after a position need the one before it run, from a state
                # that stands before that.
                before, interval = row["position"] - 1, row["interval"]
                kept = before - before % interval if interval else 0
                assert 1 <= row["run_again"] <= row["position"] - kept, row
                assert 0 <= row["announced"] <= row["run_again"], row
            behind = [row for row in model["rewinds"] if row["what"] == "behind a checkpoint"]
            assert behind
            assert all(row["run_again"] == 1 for row in behind)

    def test_memory_against_hits(self, found: tuple[str, dict[str, Any]]) -> None:
        result = found[1]
        cache, rows = result["cache"], result["cache"]["rows"]
        assert cache["model"] == "bamba-small"
        assert result["intervals"] == [0, 32, 64]
        none, short, long = (row for row in rows if row["interval"] in result["intervals"])
        assert [row["by_engine"] for row in rows].count(True) == 1
        for row in rows:
            assert row["lost"] == 0
            assert row["equal"] == {"same": 8, "of": 8}
            assert row["bytes"] == row["states"] * result["models"][0]["state_bytes"]
            assert row["reused_tokens"] <= row["shared_tokens"] < row["prompt_tokens"]
            assert row["hit_rate"] == pytest.approx(row["reused_tokens"] / row["prompt_tokens"])
            assert row["of_shared"] == pytest.approx(row["reused_tokens"] / row["shared_tokens"])
            if row["interval"]:
                # Each of six prompts finds all but an interval of what it shares.
                assert row["shared_tokens"] - row["reused_tokens"] < 6 * row["interval"]
        assert none["hit_rate"] < long["hit_rate"] <= short["hit_rate"]
        assert none["bytes"] < long["bytes"] < short["bytes"]

    def test_second_turns(self, found: tuple[str, dict[str, Any]]) -> None:
        result = found[1]
        assert result["met"] == {"second_turn": True}
        assert result["turns"]["model"] == "bamba-small"
        after, half, place = result["turns"]["rows"]
        assert after["what"] == "after the answer"
        # The last token of the answer has not been run before.
        assert after["run_tokens"] == after["new_tokens"] + 1
        # The end of the prompt is kept; three tokens of the answer stay.
        assert half["run_tokens"] == half["new_tokens"] + 3
        for turn in (after, half, place):
            assert turn["met"]
            assert turn["new_tokens"] == 5
            assert turn["run_tokens"] + turn["cached_tokens"] == turn["prompt_tokens"]
            assert turn["run_tokens"] <= turn["new_tokens"] + turn["interval"]
            assert turn["equal"]["whole"] == "6/6"
            assert turn["whole"]["median"] > 0
        assert after["peer"]["median"] > 0
        assert after["equal"]["transformers"] == "6/6"
        assert half["peer"] is None

    def test_models_without_recurrent_layers_are_refused(self, directory: Path) -> None:
        with pytest.raises(Unsupported, match="no recurrent layers"):
            states.Subject(str(checkpoint("quick-1m", directory=directory)), OPTIONS, None, cached=False)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [({"tokens": 100}, "200"), ({"rounds": 0}, "rounds"), ({"intervals": ()}, "intervals"), ({"tail": 0}, "tail")],
    )
    def test_sizes_are_checked(self, changes: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidArgument, match=says):
            states.Sizes(**changes)

    def test_a_turn_that_runs_too_much_is_an_error(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if the cache had nothing of the history."""
        path = str(drawn("mamba2-small", directory=directory))
        sizes = states.Sizes(tokens=80, back=4, turn=3, answer=2, rounds=1)
        monkeypatch.setattr(RadixCache, "match", lambda self, tokens, key: None)
        with pytest.raises(QuireError, match="ran 85 tokens; 3 are new, and the interval is 32"):
            reuse.second_turns(path, OPTIONS, sizes, 32)

    def test_a_rewind_that_runs_too_much_is_an_error(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = str(drawn("mamba2-small", directory=directory))
        sizes = states.Sizes(tokens=80, back=4, places=1, rounds=1)
        monkeypatch.setattr(State, "nearest_reachable", lambda self, seq, position: 0)
        with pytest.raises(QuireError, match="ran 79 tokens again; at most 32"):
            states.rewinds(path, OPTIONS, sizes, 32)

    def test_shared_tokens(self) -> None:
        assert reuse.shared_tokens([[1, 2, 3], [1, 2, 9], [1, 2, 3], [4]]) == 2 + 2
        assert reuse.shared_tokens([[1], [1]]) == 0

    def test_mistakes_are_one_sentence(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = script("states", monkeypatch)
        for wrong, says in ((["--models", "gpt-9"], "gpt-9"), (["--tokens", "5"], "tokens 5")):
            monkeypatch.setattr(sys, "argv", ["states.py", "--dir", str(directory), *wrong])
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == 2
            assert says in capsys.readouterr().err


class TestQuantisation:
    @pytest.mark.slow
    def test_runs_and_reports(self) -> None:
        if native_problem():
            pytest.skip(native_problem())
        table, result = run_plain("quantisation", "--tokens", "320")
        assert "perplexity" in table
        plain, eight, four = result["lines"]
        assert (plain["KL"], plain["same first"]) == (0, 1)
        assert 0 < eight["KL"] < four["KL"] < 0.5
        assert four["MiB"] < eight["MiB"] < plain["MiB"]


class TestLinear:
    def test_runs_and_reports(self) -> None:
        if native_problem():
            pytest.skip(native_problem())
        table, result = run_plain("linear", "--small", "--shapes", "40x256", "--rows", "1,13", "--dtypes", "float32")
        assert "40 x 256, float32" in table
        lines = {(one["map"], one["rows"], one["product"]): one for one in result["lines"]}
        for form in ("bfloat16", "int8", "int4", "Q4_K", "Q8_0"):
            assert ("40 x 256, float32", 13, f"Quire, {form}") in lines


class TestMixers:
    def test_runs_and_reports(self) -> None:
        if native_problem():
            pytest.skip(native_problem())
        threads = torch.get_num_threads()
        table, result = run_plain("mixers", "--rounds", "1")
        torch.set_num_threads(threads)
        assert "gated delta net" in table
        rows = {(row["layer"], row["what"]): row for row in result["rows"]}
        for layer in ("gated delta net", "Mamba-2", "short convolution"):
            assert 0 < rows[layer, "decode of 1"]["µs"] < rows[layer, "prompt of 2048"]["µs"]


class TestExperts:
    def test_runs_and_reports(self) -> None:
        if native_problem():
            pytest.skip(native_problem())
        threads = torch.get_num_threads()
        table, result = run_plain("experts", "--small")
        torch.set_num_threads(threads)
        assert "processor_over_call" in table
        assert [(row["form"], row["rows"]) for row in result["rows"]] == [
            (form, rows) for form in ("bfloat16", "int4", "float32") for rows in (1, 5)
        ]
        assert all(0 < row["least"] <= row["over_call"] <= row["most"] for row in result["rows"])


class TestHybrids:
    @pytest.mark.slow
    def test_runs_and_reports(self, directory: Path) -> None:
        table, result = run_plain("hybrids", "--small", "--dtype", "float32", "--dir", str(directory))
        assert "bamba-small, float32" in table
        shapes = ["qwen3.5-small", "bamba-small", "lfm2-small", "qwen3-moe-small"]
        assert [model["shape"] for model in result["models"]] == shapes
        for model in result["models"]:
            assert [cell["cell"] for cell in model["cells"]] == ["prefill 40", "decode 2 after 20"]
            for cell in model["cells"]:
                for name in ("quire", "transformers"):
                    assert 0 < cell[name]["of_possible"] < 1
                    assert cell[name]["tokens_per_second"] > 0

    def test_the_costs_are_those_of_the_states(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hybrids = script("hybrids", monkeypatch)
        for name in hybrids.SMALL:
            path = drawn(name, directory=directory)
            costs = hybrids.costs_of(path)
            with LLM(str(path), dtype="bfloat16", device="cpu", kv_cache_memory="8MiB") as llm:
                state = llm.engine.runner.state
                assert 2 * costs.kept + 4 * costs.wide == state.geometry.state_bytes
                assert 2 * costs.kv == llm.bytes_per_token
                assert costs.matrices + costs.experts + costs.head < llm.model.num_parameters
                assert (costs.experts, costs.chosen) == ((2 * 8 * 3 * 64 * 48, 0.5) if "moe" in name else (0, 0))


class TestLatent:
    def test_runs_and_reports(self) -> None:
        table, result = run_plain("latent", "--small", "--device", "cpu")
        assert "all forms within their bounds: True" in table
        assert (result["benchmark"], result["dtype"], result["rounds"]) == ("latent", "float32", 1)
        assert list(result["geometries"]) == ["small"]
        assert [(one["what"], one["batch"], one["history"], one["tokens"]) for one in result["cells"]] == [
            ("decode", 1, 40, 1),
            ("decode", 2, 40, 1),
            ("decode", 1, 100, 1),
            ("decode", 2, 100, 1),
            ("prompt", 1, 0, 24),
            ("chunk", 1, 64, 8),
        ]
        assert result["equal"]
        assert result["decodes"] == 4
        for cell in result["cells"]:
            decode = cell["what"] == "decode"
            assert cell["layers"] == (2 if decode else 1)
            unpacked = [] if native_problem() else ["unpacked"]
            assert [one["form"] for one in cell["forms"]] == (
                ["latent", *unpacked, "expanded", "anew"] if decode else ["latent", *unpacked, "absorbed", "expanded"]
            )
            assert 0 < cell["bound"] < 1e-5
            for one in cell["forms"]:
                assert not one["skipped"]
                assert one["error"] <= cell["bound"]
                assert one["seconds"]["median"] > 0
                assert one["read_gbps"] == pytest.approx(one["work"]["read_bytes"] / one["seconds"]["median"] / 1e9)
                assert one["of_possible"] > 0
            latent_form, expanded = cell["forms"][0], cell["forms"][-1 - decode]
            # Rows of 24 columns, and four heads of 24 and 12.
            assert expanded["work"]["stored_bytes"] == 6 * latent_form["work"]["stored_bytes"]

    def test_a_wrong_form_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows of which one column of the history is off by one part in a thousand."""
        cell = latent_forms.Cell(geometry="small", batch=1, history=40)
        given = {"dtype": torch.float32, "device": torch.device("cpu"), "rounds": 1, "most_bytes": 1 << 30}
        hardware: Any = {"read_gbps": 10.0, "peak_tflops": {"float32": 0.1}}
        assert latent.measure_cell(cell, **given, hardware=hardware).equal
        true = latent_forms.expand

        def wrong(rows_TR: torch.Tensor, expansion: Any) -> tuple[torch.Tensor, torch.Tensor]:
            k_THD, v_THD = true(rows_TR, expansion)
            return k_THD * 1.001, v_THD

        monkeypatch.setattr(latent_forms, "expand", wrong)
        found = latent.measure_cell(cell, **given, hardware=hardware)
        assert not found.equal
        assert {one.form: one.error > found.bound for one in found.forms} == {
            "latent": False, **({} if native_problem() else {"unpacked": False}), "expanded": True, "anew": True,
        }  # fmt: skip

    def test_what_does_not_fit_says_why(self) -> None:
        geometry = latent_forms.GEOMETRIES["small"]
        cell = latent_forms.Cell(geometry="small", batch=2, history=99)
        stored = 200 * geometry.heads * (geometry.head + geometry.value) * 4
        hardware: Any = {"read_gbps": 10.0, "peak_tflops": {"float32": 0.1}}
        given = {"dtype": torch.float32, "device": torch.device("cpu"), "rounds": 1, "hardware": hardware}
        assert latent.measure_cell(cell, **given, most_bytes=2 * stored).layers == 2
        assert latent.measure_cell(cell, **given, most_bytes=2 * stored - 1).layers == 1
        result = latent.measure_cell(cell, **given, most_bytes=stored - 1)
        rows = {one.form: one for one in result.forms}
        assert result.layers == 2
        assert rows["expanded"].skipped
        assert rows["expanded"].seconds is None
        assert rows["latent"].seconds is not None
        assert any("not measured" in str(line["ms/layer"]) for line in latent.lines(result))

    def test_work_is_counted(self) -> None:
        """By loops over queries and keys."""
        small = latent_forms.GEOMETRIES["small"]
        for cell in (
            latent_forms.Cell(geometry="small", batch=3, history=5),
            latent_forms.Cell(geometry="small", tokens=4),
            latent_forms.Cell(geometry="small", batch=2, history=5, tokens=4),
        ):
            pairs = [(query, key) for query in range(cell.tokens) for key in range(cell.history + query + 1)]
            own = [(query, key) for query, key in pairs if key >= cell.history]
            maps = 2 * small.heads * small.rank * (small.nope + small.value)
            rows = 2 * small.heads * (2 * small.rank + small.rotary)
            heads = 2 * small.heads * (small.nope + small.rotary + small.value)
            new, all_keys = cell.batch * cell.tokens, cell.batch * (cell.tokens + cell.history)
            operations = {
                "absorbed": cell.batch * len(pairs) * rows + new * maps,
                "expanded": cell.batch * len(pairs) * heads + new * maps,
                "anew": cell.batch * len(pairs) * heads + all_keys * maps,
            }
            operations["unpacked"] = operations["absorbed"]
            if cell.tokens > 1:
                past = len(pairs) - len(own)
                both = 2 if cell.history else 1
                operations["unpacked"] = cell.batch * (len(own) * heads + past * rows) + both * new * maps
            for form, expected in operations.items():
                assert latent.work_of(form, small, cell, 4).operations == expected, (form, cell)

    def test_refusals(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        module = script("latent", monkeypatch)
        for wrong in (["--geometries", "v9"], ["--batches", "0"], ["--memory", "much"]):
            monkeypatch.setattr(sys, "argv", ["latent.py", *wrong])
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == 2
            assert wrong[1] in capsys.readouterr().err


class TestCheckpoints:
    def test_variants_share_weights(self, directory: Path) -> None:
        config = windowed_config(QUICK, 64, 8192)
        path = variant("quick-1m", "some", config, directory=directory)
        weights = checkpoint("quick-1m", directory=directory) / "model.safetensors"
        assert (path / "model.safetensors").resolve() == weights.resolve()
        assert json.loads((path / "config.json").read_text()) == config
        assert variant("quick-1m", "some", config | {"sliding_window": 65}, directory=directory) == path
        assert json.loads((path / "config.json").read_text())["sliding_window"] == 65

    def test_drawn_models_are_made_once(self, directory: Path) -> None:
        path = drawn("mamba2-small", directory=directory)
        stamp = (path / "model.safetensors").stat().st_mtime_ns
        assert drawn("mamba2-small", directory=directory) == path
        assert (path / "model.safetensors").stat().st_mtime_ns == stamp
        with pytest.raises(NotFound, match="bamba-small"):
            drawn("mamba9", directory=directory)

    def test_drawn_models_have_their_size(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        for name, (kind, values) in DRAWN.items():
            if name.endswith("m"):
                config = AutoConfig.for_model(kind, **values, tie_word_embeddings=False)
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config)
                millions = int(name.rpartition("-")[2].removesuffix("m"))
                assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.05)  # the name is rounded

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


@pytest.mark.slow
def test_waiting(directory: Path) -> None:
    """Steps on a quiet and on a busy machine; the texts are equal, or it fails."""
    arguments = ["--rounds", "1", "--decode", "2", "--threads", "1", "--neighbours", "1", "--spins", "3000,0"]
    table, found = run_plain("waiting", "--shape", "quick-1m", "--dir", str(directory), *arguments)
    assert "over the first" in table
    for machine in ("quiet", "busy"):
        assert list(found[machine]["seconds"]) == ["3000", "0"]
        assert all(seconds > 0 for times in found[machine]["seconds"].values() for seconds in times)
