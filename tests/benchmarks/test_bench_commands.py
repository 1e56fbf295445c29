"""``quire bench throughput`` and ``quire bench state``, apart from time itself, and the scripts
that do the same.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from quire import LLM
from quire.base.errors import InvalidArgument, Unsupported
from quire.cli import main as cli
from quire_bench import state, throughput
from quire_bench.checkpoints import LAG, SHAPES, checkpoint, predicted_text, variant, windowed_config
from quire_bench.hardware import Hardware
from quire_bench.peers import TransformersPeer
from quire_bench.speculative import KINDS, functions, run_speculative
from quire_bench.throughput import (
    CONTINUOUS,
    STATIC,
    Outcome,
    QuireSubject,
    Workload,
    choose_scale,
    make_workload,
    round_scale,
    run_throughput,
    try_batches,
    visible_pairs,
    workload_flops,
    worth_it,
)

BENCH = Path(__file__).parents[2] / "bench"
QUICK = SHAPES["quick-1m"]
WINDOW = 24
HARDWARE: Hardware = {
    "device": "none",
    "threads": 1,
    "torch": "",
    "buffer_bytes": 1,
    "cache_bytes": 1,
    "exceeds_cache": False,
    "copy_gbps": 1.0,
    "read_gbps": 3.0,
    "read_methods_gbps": {"sum": 3.0},
    "gemm_tflops": {"bfloat16": {"1024": 2.0}},
    "peak_tflops": {"bfloat16": 2.0},
}
"""Measuring takes seconds."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def path(directory: Path) -> Path:
    return checkpoint("quick-1m", directory=directory)


@pytest.fixture(scope="module")
def windowed(directory: Path) -> Path:
    return variant("quick-1m", "window", windowed_config(QUICK, WINDOW, 4096), directory=directory)


@pytest.fixture(scope="module")
def peer(path: Path) -> TransformersPeer:
    return TransformersPeer(path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds and is not what is tested here."""
    monkeypatch.setattr(throughput, "measure", lambda **_: HARDWARE)


def ragged() -> Workload:
    """Prompts shorter and longer than what decides the text, and texts of all lengths,
    in no order."""
    work = make_workload(7, 0.05, QUICK.vocab_size, seed=3)
    assert min(map(len, work.prompts)) < LAG < max(map(len, work.prompts))
    assert list(work.lengths) != sorted(work.lengths)
    return work


def predicted(work: Workload) -> list[tuple[int, ...] | None]:
    """The texts that the weights must give; None for prompts that are too short to tell."""
    return [
        tuple(predicted_text(QUICK, list(prompt), new)) if len(prompt) > LAG else None
        for prompt, new in zip(work.prompts, work.lengths, strict=True)
    ]


def assert_predicted(work: Workload, tokens: Sequence[tuple[int, ...]]) -> None:
    assert [len(text) for text in tokens] == list(work.lengths)
    pairs = [(text, wanted) for text, wanted in zip(tokens, predicted(work), strict=True) if wanted is not None]
    assert len(pairs) > 2
    assert all(text == wanted for text, wanted in pairs)


VLLM = """
import json, sys
for line in sys.stdin:
    given = json.loads(line)
    if given["verb"] == "load":
        tokens = given["length"] - 4096
        answer = {"reply": {}} if tokens == 8 else {"error": f"ValueError: {tokens} tokens are too many"}
    else:
        texts = [[-1] * length for length in given["lengths"]]
        answer = {"reply": {"seconds": 0.75, "first": 0.25, "tokens": texts}}
    print(json.dumps(answer), flush=True)
"""
"""Answers as ``peer_worker`` does."""


class TestWorkload:
    def test_lengths_fill_the_scaled_range(self) -> None:
        work = make_workload(2000, 0.1, 500, seed=1)
        for sizes in (list(map(len, work.prompts)), list(work.lengths)):
            assert (min(sizes), max(sizes)) == (10, 102)
            assert abs(sum(sizes) / 2000 - 56.2) < 3 * 26.7 / 2000**0.5  # three standard errors of the mean
        assert {token for prompt in work.prompts for token in prompt} == set(range(3, 500))
        assert work.longest == max(map(sum, zip(map(len, work.prompts), work.lengths, strict=True)))
        assert work.prompt_tokens == sum(len(prompt) for prompt in work.prompts)

    def test_seed_and_scale(self) -> None:
        one, same, other = (make_workload(20, 0.5, 500, seed=seed) for seed in (1, 1, 2))
        assert one == same
        assert one.lengths != other.lengths
        full = make_workload(20, 1.0, 500, seed=1)
        assert list(one.lengths) == [round(length / 2) for length in full.lengths]
        assert len(set(one.prompts)) == 20
        assert min(make_workload(500, 0.01, 500).lengths) == 1

    def test_middle(self) -> None:
        work = Workload(prompts=tuple((5,) * size for size in (4, 1, 2, 9, 7)), lengths=(50, 10, 20, 40, 30))
        assert work.middle(3) == [2, 4, 3]
        assert work.middle(5) == [1, 2, 4, 3, 0]
        assert work.only([4, 0]) == Workload(prompts=((5,) * 7, (5,) * 4), lengths=(30, 50))


class TestPeer:
    @pytest.mark.turns(4)
    @pytest.mark.parametrize("batch", [1, 3, 7, 50])
    def test_static_batches_give_what_was_wanted(self, peer: TransformersPeer, batch: int) -> None:
        work = ragged()
        served = peer.serve_static(work.prompts, work.lengths, batch)
        assert served.seconds > 0
        assert_predicted(work, served.tokens)

    @pytest.mark.turns(2)
    @pytest.mark.parametrize("batch", [2, 7])
    def test_continuous_batching_gives_what_was_wanted(self, peer: TransformersPeer, batch: int) -> None:
        work, attention = ragged(), peer.model.config._attn_implementation
        served = peer.serve_continuous(work.prompts, work.lengths, batch)
        assert served.seconds > 0
        assert_predicted(work, served.tokens)
        assert served.tokens == peer.serve_static(work.prompts, work.lengths, 4).tokens
        assert peer.model.config._attn_implementation == attention

    def test_static_batches_hold_requests_of_like_lengths(
        self, peer: TransformersPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each runs to its longest: what is generated for nothing is least so."""
        steps: list[tuple[int, int]] = []
        generate = peer.model.generate

        def noting(**given: Any) -> Any:
            steps.append((given["input_ids"].shape[0], given["max_new_tokens"]))
            return generate(**given)

        monkeypatch.setattr(peer.model, "generate", noting)
        peer.serve_static([[5, 6, 7]] * 5, [2, 30, 3, 29, 4], 2)
        assert steps == [(2, 3), (2, 29), (1, 30)]

    def test_what_fails_in_the_library_is_a_reason(
        self, peer: TransformersPeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        logger = logging.getLogger("ContinuousBatchingLogger")
        before, forward = logger.level, peer.model.forward
        logger.setLevel(logging.INFO)

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no kernel for this")

        monkeypatch.setattr(peer.model, "forward", broken)
        with pytest.raises(Unsupported, match=r"continuous batching does not run here.*no kernel for this"):
            peer.serve_continuous([[5, 6, 7]], [3], 1)
        assert logger.level == logging.INFO
        logger.setLevel(before)
        monkeypatch.setattr(peer.model, "forward", forward)
        assert len(peer.serve_continuous([[5, 6, 7]], [3], 1).tokens[0]) == 3

    @pytest.mark.parametrize(
        ("prompts", "lengths", "batch"),
        [([], [], 1), ([[5]], [1, 2], 1), ([[5]], [0], 1), ([[5]], [1], 0), ([[]], [1], 1), ([[2000]], [1], 1)],
    )
    def test_refusals(self, peer: TransformersPeer, prompts: Any, lengths: Any, batch: int) -> None:
        for serve in (peer.serve_static, peer.serve_continuous):
            with pytest.raises(InvalidArgument):
                serve(prompts, lengths, batch)


class TestChoosing:
    @staticmethod
    def way(seconds: dict[int, float], calls: list[int]) -> Callable[[Workload, int], Outcome]:
        """Takes so many seconds for each token at each batch size."""

        def serve(work: Workload, batch: int) -> Outcome:
            calls.append(batch)
            assert len(work) == batch
            return Outcome(tokens=((1,),) * batch, seconds=seconds[batch] * work.new_tokens)

        return serve

    def test_batches_grow_until_one_is_slower(self) -> None:
        work, calls = make_workload(40, 0.1, 100), list[int]()
        trial = try_batches(self.way({4: 5.0, 8: 3.0, 16: 4.0, 32: 1.0}, calls), work, (32, 4, 16, 8))
        assert (trial.batch, trial.rate) == (8, pytest.approx(3.0))
        assert calls == [4, 4, 8, 16]  # the first one twice, for warming up
        assert list(trial.members) == work.middle(8)

    def test_batches_grow_until_one_fails(self) -> None:
        """As where a larger one has no memory; a way that never runs says why."""
        way = self.way({4: 5.0, 8: 3.0}, list[int]())

        def limited(work: Workload, batch: int) -> Outcome:
            if batch > most:
                raise Unsupported("no memory")
            return way(work, batch)

        most = 8
        assert try_batches(limited, make_workload(40, 0.1, 100), (4, 8, 16)).batch == 8
        most = 0
        with pytest.raises(Unsupported, match="no memory"):
            try_batches(limited, make_workload(40, 0.1, 100), (4, 8, 16))

    def test_batches_are_no_larger_than_the_requests(self) -> None:
        calls: list[int] = []
        trial = try_batches(self.way({2: 2.0, 6: 1.0}, calls), make_workload(6, 0.1, 100), (2, 8, 64))
        assert (trial.batch, calls) == (6, [2, 2, 6])

    def test_worth_it(self) -> None:
        assert worth_it({"a": 1.0, "b": 2.9, "c": 3.1}) == ["a", "b"]

    def test_scales_are_rounded_down(self) -> None:
        assert round_scale(0.259, 4096) == 0.25
        assert round_scale(0.29, 4096) == 0.29  # which is not quite 29 hundredths
        assert round_scale(7.0, 4096) == 1.0
        assert round_scale(7.0, 512) == 0.25
        assert round_scale(0.0001, 4096) == 0.01

    def test_scale_fits_the_budget(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """10 ms a token of Quire and 20 of a peer, 100 requests of 562 tokens, two rounds and one
        for the trials.
        """
        monkeypatch.setattr(throughput, "BUDGET_SECONDS", 300.0)
        monkeypatch.setattr(QuireSubject, "serve", lambda _, work: Outcome(tokens=(), seconds=0.01 * work.new_tokens))

        def failing(work: Workload, batch: int) -> Outcome:
            raise Unsupported("no such thing")

        def taking(seconds: float) -> Callable[[Workload, int], Outcome]:
            return lambda work, batch: Outcome(tokens=(), seconds=seconds * work.new_tokens)

        with LLM(str(path), device="cpu", kv_cache_memory="1MiB") as llm:
            ways, notes = {"good": taking(0.02), "slow": taking(0.1), "bad": failing}, dict[str, str]()
            found = choose_scale(QuireSubject(llm), ways, 100, 2, seed=0, notes=notes)
        assert found == round_scale(300 / (56200 * (3 * (0.01 + 0.02) + 0.1)), 4096) == 0.02
        assert notes == {"bad": "no such thing"}
        assert set(ways) == {"good", "slow"}


class TestOperations:
    @pytest.mark.parametrize("window", [None, 1, 4, 50])
    def test_visible_pairs(self, window: int | None) -> None:
        for length in (1, 3, 4, 5, 20):
            seen = [sum(window is None or key > query - window for key in range(query + 1)) for query in range(length)]
            assert visible_pairs(length, window) == sum(seen)

    def test_operations_are_those_of_the_shape(self, path: Path, windowed: Path) -> None:
        """Counted by torch: with one new token the head runs once; attention is counted by its full
        square.
        """
        from torch.utils.flop_counter import FlopCounterMode
        from transformers import AutoModelForCausalLM

        length = 60
        model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(input_ids=torch.full((1, length), 7), logits_to_keep=1)
        parts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        attention = sum(count for name, count in parts.items() if "bmm" in name)
        matrices = sum(count for name, count in parts.items() if "bmm" not in name)
        assert attention == QUICK.layers * 2 * 2 * QUICK.heads * QUICK.head_size * length**2
        norms = 2 * (2 * QUICK.layers + 1) * QUICK.hidden_size * length  # whose weights torch does not count
        work = Workload(prompts=((7,) * length,), lengths=(1,))
        for where, window in ((path, None), (windowed, WINDOW)):
            with LLM(str(where), device="cpu", kv_cache_memory="1MiB") as llm:
                share = visible_pairs(length, window) / length**2
                assert workload_flops(llm, work) == pytest.approx(matrices + norms + attention * share)


@pytest.mark.usefixtures("quick")
class TestThroughput:
    # The dtype by name: "auto" is float32 where the CPU would emulate bfloat16, and pages are twice
    # as large then.
    OPTIONS: ClassVar[dict[str, Any]] = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory": "4MiB"}

    @pytest.mark.slow
    def test_runs_and_reports(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        result = run_throughput(
            str(path),
            engine_options=self.OPTIONS,
            requests=6,
            scale=0.02,
            rounds=2,
            seed=5,
            peer="transformers",
            peer_batches=(2, 6),
        )
        *table, printed = capsys.readouterr().out.splitlines()
        assert "generated tok/s" in "\n".join(table)
        assert json.loads(printed) == json.loads(json.dumps(result, default=dataclasses.asdict))
        work = make_workload(6, 0.02, QUICK.vocab_size, seed=5)
        assert (result["prompt_tokens"], result["generated_tokens"]) == (work.prompt_tokens, work.new_tokens)
        seconds = result["seconds"].median
        assert result["generated_per_second"] == pytest.approx(work.new_tokens / seconds)
        assert result["total_per_second"] == pytest.approx((work.new_tokens + work.prompt_tokens) / seconds)
        assert (result["read_gbps"], result["peak_tflops"]) == (3.0, 2.0)
        assert result["pool"] == {"pages": 4 * 2**20 // 1024 // 16, "page_size": 16, "tokens": 4096}
        # Rounds repeat the prompts: each starts with an empty prefix cache.
        assert (result["preemptions"], result["cached_tokens"], result["notes"]) == (0, 0, {})
        assert set(result["peers"]) == {STATIC, CONTINUOUS}
        for values in result["peers"].values():
            assert values["equal_texts"] == values["compared_texts"]
            assert values["compared_texts"] == (values["batch"] if values["estimated"] else 6)
            assert values["ratio"] == pytest.approx(values["median_seconds"] / seconds)
        ratios = {name: values["ratio"] for name, values in result["peers"].items()}
        assert result["ratio_to_faster_peer"] == ratios[result["faster_peer"]] == min(ratios.values())

    def test_without_a_peer_and_with_a_small_pool(self, path: Path) -> None:
        options = {**self.OPTIONS, "kv_cache_memory": 12 * 16 * 1024}
        result = run_throughput(str(path), engine_options=options, requests=6, scale=0.05, rounds=1)
        assert result["preemptions"] > 0
        assert (result["peers"], result["faster_peer"], result["ratio_to_faster_peer"]) == ({}, None, None)

    def test_what_cannot_run_is_said_and_what_is_slow_is_estimated(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        work = make_workload(5, 0.05, QUICK.vocab_size)
        with LLM(str(path), **self.OPTIONS) as llm:
            texts = dict(zip(work.prompts, QuireSubject(llm).serve(work).tokens, strict=True))

        def wrong(work: Workload, batch: int) -> Outcome:
            """Quick, and right but for the last text."""
            tokens = [*(texts[prompt] for prompt in work.prompts[:-1]), (0,)]
            return Outcome(tokens=tuple(tokens), seconds=0.001 * work.new_tokens)

        def slow(work: Workload, batch: int) -> Outcome:
            assert len(work) == 2, "it runs in its trial only"
            return Outcome(tokens=tuple(texts[prompt] for prompt in work.prompts), seconds=1.0 * work.new_tokens)

        def failing(work: Workload, batch: int) -> Outcome:
            raise Unsupported("no such kernel")

        monkeypatch.setattr(throughput, "peer_ways", lambda *_: {"wrong": wrong, "slow": slow, "failing": failing})
        result = run_throughput(
            str(path),
            engine_options=self.OPTIONS,
            requests=5,
            scale=0.05,
            rounds=1,
            peer="transformers",
            peer_batches=(2,),
        )
        fast, estimate = result["peers"]["wrong"], result["peers"]["slow"]
        assert (fast["equal_texts"], fast["compared_texts"], fast["estimated"]) == (4, 5, False)
        assert (estimate["equal_texts"], estimate["compared_texts"], estimate["estimated"]) == (2, 2, True)
        assert estimate["median_seconds"] == pytest.approx(work.new_tokens)
        assert result["faster_peer"] == "wrong"
        assert result["notes"] == {"failing": "no such kernel"}
        assert "failing: no such kernel" in capsys.readouterr().out

    def test_an_engine_gets_all_requests_at_once(self, path: Path) -> None:
        asked: list[tuple[int, int]] = []

        def engine(work: Workload, batch: int) -> Outcome:
            asked.append((len(work), batch))
            return Outcome(tokens=tuple((0,) for _ in work.prompts), seconds=1e-6)

        result = run_throughput(
            str(path), engine_options=self.OPTIONS, requests=40, scale=0.01, rounds=2, engines={"other": engine}
        )
        assert asked[-2:] == [(40, 40)] * 2
        assert result["peers"]["other"]["batch"] == 40
        assert not result["peers"]["other"]["estimated"]

    def test_default_scale(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(throughput, "BUDGET_SECONDS", 1e-6)
        result = run_throughput(str(path), engine_options=self.OPTIONS, requests=3, rounds=1)
        assert result["scale"] == 0.01
        assert "scale 0.01" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"requests": 0}, "requests"),
            ({"scale": 0.0}, r"0\.01 to 1"),
            ({"scale": float("nan")}, r"0\.01 to 1"),
            ({"scale": 1.1}, r"0\.01 to 1"),
            ({"rounds": 0}, "rounds"),
            ({"seed": -1}, "seed"),
            ({"peer": "nobody"}, "transformers"),
            ({"peer_batches": ()}, "peer_batches"),
            ({"peer_batches": (4, 0)}, "peer_batches"),
        ],
    )
    def test_refusals_come_before_the_model(self, changes: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidArgument, match=says):
            run_throughput("/no/such/model", engine_options={}, **changes)

    def test_context_is_a_limit(self, path: Path) -> None:
        options = {**self.OPTIONS, "max_model_len": 300}
        with pytest.raises(InvalidArgument, match=r"ends at 300; a scale up to 0\.14 is accepted"):
            run_throughput(str(path), engine_options=options, scale=0.5)
        with pytest.raises(InvalidArgument, match="too short"):
            run_throughput(str(path), engine_options={**options, "max_model_len": 8})
        assert run_throughput(str(path), engine_options=options, scale=0.14, requests=2, rounds=1)["requests"] == 2


class TestState:
    OPTIONS: ClassVar[dict[str, Any]] = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory": "1MiB"}
    VERBS = ("Session.fork", "fork_sequence", "KVCache.deep_copy", "save", "restore")

    @staticmethod
    def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {row["what"]: row for row in result["rows"]}

    def test_runs_and_reports(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        result = state.run_state(str(path), engine_options=self.OPTIONS, tokens=100, rounds=1, facts={"shape": "x"})
        *table, printed = capsys.readouterr().out.splitlines()
        assert "median" in "\n".join(table)
        assert json.loads(printed) == result
        assert (result["benchmark"], result["tokens"], result["shape"]) == ("state", 100, "x")
        rows = self.rows(result)
        for what in (*self.VERBS, "popn of 16", "Session.rewind by 16"):
            assert 0 < rows[what]["best_seconds"] <= rows[what]["median_seconds"], what
        assert rows["Session.fork"]["note"] == "0 pages taken, 0 copied"
        assert rows["KVCache.deep_copy"]["note"] == "0 pages taken"
        assert rows["prefill of 100 tokens"]["median_seconds"] > 0
        # A pool of 1,024 tokens holds no chat of 2,000.
        assert "not measured" in rows["second turn on 2000 tokens"]["note"]

    def test_second_turn_reuses_the_first(self, path: Path) -> None:
        options = {**self.OPTIONS, "max_model_len": 200}
        rows = self.rows(state.run_state(str(path), engine_options=options, tokens=40, rounds=1))
        history = 200 - 2 * 16 - 20
        assert rows[f"second turn on {history} tokens"]["note"].startswith(
            f"{history + 15} of {history + 36} prompt tokens cached, 21 run"
        )
        options["max_model_len"] = 40
        rows = self.rows(state.run_state(str(path), engine_options=options, tokens=40, rounds=1))
        assert rows["second turn"]["note"] == "not measured: the context ends at 40"

    def test_rewinds_stay_within_the_windows(self, windowed: Path) -> None:
        """The last forward runs one token, and pages of one token leave nothing more than what the
        windows need.
        """
        options = {**self.OPTIONS, "page_size": 1, "max_num_batched_tokens": 32}
        rows = self.rows(state.run_state(str(windowed), engine_options=options, tokens=98, rounds=1))
        for what in (*self.VERBS, "popn of 1", "Session.rewind by 2"):
            assert rows[what]["median_seconds"] > 0, what
        assert rows["Session.rewind by 2"]["note"] == "its windows leave positions from 96 on within reach"

    def test_pool_need_hold_the_tokens_once_only(self, path: Path) -> None:
        """100 tokens fill 7 of these 8 pages."""
        options = {**self.OPTIONS, "kv_cache_memory": 8 * 16 * 1024}
        rows = self.rows(state.run_state(str(path), engine_options=options, tokens=100, rounds=1))
        assert all(rows[what]["median_seconds"] > 0 for what in self.VERBS)

    def test_nothing_is_left_behind(self, path: Path) -> None:
        with LLM(str(path), **self.OPTIONS) as llm:
            state.state_rows(llm, 64, 1)
            llm.reset_prefix_cache()
            assert llm.engine.runner.state.empty()

    def test_what_a_model_cannot_do_is_a_row(self) -> None:
        def refused() -> state.Row:
            raise Unsupported("no such verb")

        row = state.possible("deep copy", refused)
        assert (row.what, row.median_seconds, row.note) == ("deep copy", None, "not measured: no such verb")
        assert row.shown() == {"what": "deep copy", "median": "", "best": "", "note": row.note}

    def test_preparation_is_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr(state.time, "perf_counter", lambda: now[0])

        def pass_time(seconds: float) -> float:
            now[0] += seconds
            return seconds

        steps = iter([5.0, 1.0, 3.0])
        timer = state.Timer(torch.device("cpu"))
        row = timer.row("x", 3, pass_time, prepare=lambda: pass_time(100.0) * 0 + next(steps), note=lambda: "after")
        assert (row.median_seconds, row.best_seconds, row.note) == (3.0, 1.0, "after")

    @pytest.mark.parametrize(
        ("seconds", "text"), [(None, ""), (12.345, "12.3 s"), (0.5, "500 ms"), (0.0123, "12.3 ms"), (2.5e-05, "25 µs")]
    )
    def test_durations(self, seconds: float | None, text: str) -> None:
        assert state.duration(seconds) == text

    @pytest.mark.parametrize(
        ("changes", "says"), [({"tokens": 31}, "at least 32"), ({"rounds": 0}, "rounds"), ({"tokens": 4097}, "4096")]
    )
    def test_refusals(self, path: Path, changes: dict[str, Any], says: str) -> None:
        with pytest.raises(InvalidArgument, match=says):
            state.run_state(str(path), engine_options=self.OPTIONS, **changes)


# -- the command line and the scripts --------------------------------------------------------------


def command(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """``quire bench ...`` in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["quire", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module: scripts find each other by their directory."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(name)


class TestCommands:
    @pytest.mark.usefixtures("quick")
    def test_throughput(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """What the flags say reaches the benchmark; the peer's own ways are tried above."""

        def way(work: Workload, batch: int) -> Outcome:
            return Outcome(tokens=((0,),) * len(work), seconds=1.0)

        monkeypatch.setattr(throughput, "peer_ways", lambda *_: {STATIC: way})
        arguments = ["--model", str(path), "--requests", "3", "--scale", "0.02", "--rounds", "1", "--seed", "4"]
        arguments += [
            "--peer",
            "transformers",
            "--peer-batches",
            "3",
            "--kv-cache-memory",
            "1MiB",
            "--dtype",
            "bfloat16",
        ]
        assert command("throughput", *arguments, monkeypatch=monkeypatch) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["model"], result["requests"], result["scale"]) == (str(path), 3, 0.02)
        assert (result["rounds"], result["seed"]) == (1, 4)
        assert result["pool"]["tokens"] == 1024
        assert {values["batch"] for values in result["peers"].values()} == {3}

    def test_state(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["--model", str(path), "--tokens", "40", "--rounds", "1", "--kv-cache-memory", "1MiB"]
        assert command("state", *arguments, monkeypatch=monkeypatch) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["model"], result["tokens"]) == (str(path), 40)
        assert not [row for row in result["rows"] if "quire generate" in row["what"]]

    def test_start_up_belongs_to_bundled_models(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: dict[str, Callable[[int], Any] | None] = {}
        monkeypatch.setattr(state, "run_state", lambda model, **given: calls.update({model: given["start"]}))
        monkeypatch.setattr(state, "start_rows", lambda rounds, model: (rounds, model))
        assert command("state", monkeypatch=monkeypatch) == 0
        assert command("state", "--model", str(path), monkeypatch=monkeypatch) == 0
        start = calls["tiny-python"]
        assert start is not None
        assert start(3) == (3, "tiny-python")
        assert calls[str(path)] is None

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["throughput", "--scale", "2"], "scale"),
            (["throughput", "--scale", "much"], "--scale"),
            (["throughput", "--requests", "0"], "requests"),
            (["throughput", "--peer", "nobody"], "peer"),
            (["throughput", "--peer-batches", "8,x"], "peer-batches"),
            (["throughput", "--model", "/no/such/place"], "/no/such/place"),
            (["throughput", "--no-such-flag"], "--no-such-flag"),
            (["state", "--tokens", "1"], "tokens"),
            (["state", "--rounds", "0"], "rounds"),
            (["state", "--tokens", "9000", "--kv-cache-memory", "1MiB"], "4096"),
            (["state", "--model", "/no/such/place"], "/no/such/place"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_mistakes_are_one_sentence_and_exit_code_2(
        self,
        arguments: list[str],
        says: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert command(*arguments, monkeypatch=monkeypatch) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert says in err
        assert "Traceback" not in err


class TestScripts:
    @pytest.mark.slow
    @pytest.mark.usefixtures("quick")
    def test_throughput(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        module = script("throughput", monkeypatch)
        arguments = ["--shape", "quick-1m", "--dir", str(directory), "--requests", "3", "--scale", "0.02"]
        arguments += ["--rounds", "1", "--peer-batches", "2", "--kv-cache-memory", "1MiB", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", ["throughput.py", *arguments])
        module.main()
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["requests"], result["scale"]) == (3, 0.02)
        assert all(values["equal_texts"] == values["compared_texts"] > 0 for values in result["peers"].values())
        for wrong in (["--peer-batches", "x"], ["--scale", "3"], ["--shape", "gpt-9"]):
            monkeypatch.setattr(sys, "argv", ["throughput.py", *arguments, *wrong])
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert ended.value.code == 2
            assert wrong[1] in capsys.readouterr().err

    def test_state(self, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        module = script("state", monkeypatch)
        monkeypatch.setattr(module, "start_rows", lambda rounds: [state.Row(what=f"start, {rounds}")])
        arguments = ["--shape", "quick-1m", "--dir", str(directory), "--tokens", "40", "--rounds", "1"]
        monkeypatch.setattr(sys, "argv", ["state.py", *arguments])
        module.main()
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["shape"], result["tokens"], result["rows"][0]["what"]) == ("quick-1m", 40, "start, 1")
        monkeypatch.setattr(sys, "argv", ["state.py", *arguments, "--tokens", "3"])
        with pytest.raises(SystemExit) as ended:
            module.main()
        assert ended.value.code == 2
        assert "at least 32" in capsys.readouterr().err

    @pytest.mark.slow
    def test_start_up_is_measured(self) -> None:
        rows = state.start_rows(1, "tiny-python")
        alone, imports, first, beyond = (row.median_seconds or 0.0 for row in rows)
        assert 0 < alone < imports < beyond < first
        assert "tiny-python" in rows[2].note


class TestSpeculation:
    def test_runs_and_reports(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 1024}
        result = run_speculative("tiny-python", engine_options=options, tasks=2, tokens=12, batches=(2,))
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
        assert [row["kind"] for row in result["rows"]] == list(KINDS)
        for row in result["rows"]:
            assert row["equal texts"] == row["requests"] == 2
            assert row["tokens"] <= 24
            assert row["accepted"] <= row["drafted"]

    def test_requests_come_from_a_queue(self) -> None:
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 1024}
        result = run_speculative(
            "tiny-python", engine_options=options, tasks=3, tokens=12, batches=(2,), kinds=["free"], queue=True
        )
        (row,) = result["rows"]
        assert row["equal texts"] == row["requests"] == 3
        assert 0 < row["least"] <= row["times as fast"]

    def test_beside_transformers(self) -> None:
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 1024}
        result = run_speculative(
            "tiny-python", engine_options=options, tasks=1, tokens=8, batches=(1,), kinds=["edit"], peer=True
        )
        (row,) = result["rows"]
        assert row["equal there"] == 1
        assert row["its CPU ms a token"] > 0

    def test_beside_the_ngrams_of_vllm(self, tmp_path: Path) -> None:
        """Another program is in the place of vLLM: it is timed behind the first token."""
        program = tmp_path / "python"
        program.write_text(f"#!{sys.executable}\n{VLLM}")
        program.chmod(0o755)
        options = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "16MiB", "max_model_len": 1024}
        given: dict[str, Any] = {"engine_options": options, "tasks": 3, "batches": (2,), "kinds": ["edit"]}
        (row,) = run_speculative("tiny-python", **given, tokens=8, vllm=str(program))["rows"]
        assert row["vLLM tok/s"] == (row["tokens"] - row["requests"]) / (2 * 0.5)
        assert row["equal in vLLM"] == 0
        assert row["its time over Quire's"] > 0
        with pytest.raises(InvalidArgument, match=r"vLLM does not run this model: .* 9 tokens are too many"):
            run_speculative("tiny-python", **given, tokens=9, vllm=str(program))

    @pytest.mark.parametrize(
        "changes",
        [
            {"kinds": ["prose"]},
            {"kinds": []},
            {"batches": []},
            {"batches": [0]},
            {"tasks": 0},
            {"peer": True, "queue": True},
            {"vllm": "python", "queue": True},
        ],
    )
    def test_refusals_come_before_the_model(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InvalidArgument):
            run_speculative("no-such-model", engine_options={}, **changes)

    def test_functions_are_whole(self) -> None:
        found = list(functions(70))
        assert len(found) == 70
        for source in found:
            ast.parse(source)
