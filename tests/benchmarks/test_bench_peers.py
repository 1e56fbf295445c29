"""The benchmark of runtimes beside each other, apart from time itself: processes that are asked and
stopped, ratios, and shares of what the hardware allows.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quire.cli import main as cli
from quire.cli.bench import PEER_OPTIONS
from quire_bench.checkpoints import SHAPES, checkpoint, predicted_text
from quire_bench.hardware import Hardware
from quire_bench.peers import TransformersPeer
from quire_bench.reports import Spread, random_prompts

BENCH = Path(__file__).parents[2] / "bench"
HARDWARE: Hardware = {
    "device": "none",
    "threads": 1,
    "torch": "",
    "buffer_bytes": 1,
    "cache_bytes": 1,
    "exceeds_cache": False,
    "copy_gbps": 1.0,
    "read_gbps": 2.0,
    "read_methods_gbps": {"sum": 2.0},
    "gemm_tflops": {},
    "peak_tflops": {"float32": 0.5, "bfloat16": 1.0, "int8": 2.0},
}
FAKE = f"""
import os, sys, threading, time
sys.path.insert(0, {str(BENCH)!r})
from quire_bench import peer_worker

class Fake:
    '''Says numbers that go on from a prompt's first token; a turn takes as long as its settings say.'''

    def load(self, model, **rest):
        print("a library talks")  # not to the parent
        if model == "damaged":
            raise ValueError("the file is damaged")
        seconds, _, self.fault = model.rpartition("/")[2].partition(":")
        self.seconds = float(seconds)
        self.texts = []
        threading.Thread(target=self.spin, daemon=True).start()
        return {{"threads": os.environ["OMP_NUM_THREADS"]}}

    def spin(self):
        while True:
            pass

    def prefill(self, prompt):
        if self.fault == "dies":
            print("out of memory", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if self.fault == "hangs":
            time.sleep(100)
        return {{"seconds": self.seconds, "tokens": [prompt[0] + 1]}}

    def place(self, prompts, room):
        assert not self.texts, "not released"
        self.room = room
        self.texts = [[prompt[0] + 1] for prompt in prompts]
        return self.texts

    def decode(self, steps):
        if self.fault == "refuses":
            raise RuntimeError("no room")
        new = []
        for text in self.texts:
            new.append([text[-1] + 1 + step for step in range(steps)])
            if self.fault == "lies":
                new[-1][2] = 0
            if self.fault == "stalls":
                new[-1].pop()
            text.extend(new[-1])
            assert len(text) <= self.room
        return {{"seconds": [9.0, self.seconds, self.seconds], "tokens": new}}

    def release(self):
        self.texts = []

peer_worker.PEERS["fake"] = Fake
sys.argv = ["", "fake"]
peer_worker.main()
"""
"""A worker whose model is its time and its fault."""


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """``quire bench peers``."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("quire_bench.peer_table")
        patch.setattr(module, "predicted_text", lambda _, prompt, steps: [prompt[0] + 1 + i for i in range(steps)])
        yield module


class Fakes:
    """Starts fake peers, and ends them."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.module, self.folder = module, folder
        self.started: list[Any] = []

    def start(self, name: str) -> Any:
        """A peer that has loaded nothing."""
        command = [sys.executable, "-c", FAKE]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.started.append(self.module.PeerProcess(name, command, environment, self.folder / f"{name}.log"))
        return self.started[-1]


@pytest.fixture
def fakes(bench: ModuleType, tmp_path: Path) -> Iterator[Fakes]:
    made = Fakes(bench, tmp_path)
    yield made
    for peer in made.started:
        peer.close()


def state(pid: int) -> str:
    """The letter of a process's state; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def reaches(pid: int, states: tuple[str, ...]) -> bool:
    """Whether a process comes to one of these states."""
    end = time.monotonic() + 30
    while state(pid) not in states and time.monotonic() < end:
        time.sleep(0.01)
    return state(pid) in states


class TestProcess:
    def test_answers(self, fakes: Fakes) -> None:
        peer = fakes.start("fake")
        assert peer.ask("load", model="0.5:") == {"threads": "1"}
        assert peer.ask("prefill", prompt=[7, 8]) == {"seconds": 0.5, "tokens": [8]}
        assert peer.ask("place", prompts=[[7], [20]], room=9) == [[8], [21]]
        assert peer.ask("decode", steps=2) == {"seconds": [9.0, 0.5, 0.5], "tokens": [[9, 10], [22, 23]]}
        assert peer.ask("decode", steps=1)["tokens"] == [[11], [24]]
        assert peer.ask("release") is None
        assert "a library talks" in peer.log.read_text()

    @pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
    def test_stands_still_between_two_requests(self, fakes: Fakes) -> None:
        """Its thread would spin for ever."""
        peer = fakes.start("fake")
        peer.ask("load", model="0.5:")
        assert reaches(peer.pid, ("T",))
        assert peer.ask("prefill", prompt=[1])["tokens"] == [2]
        assert reaches(peer.pid, ("T",))

    def test_refusals_leave_it_usable(self, bench: ModuleType, fakes: Fakes) -> None:
        peer = fakes.start("fake")
        with pytest.raises(bench.PeerFailed, match=r"fake: ValueError: the file is damaged"):
            peer.ask("load", model="damaged")
        assert peer.ask("load", model="0.5:")

    def test_its_last_words_are_told(self, bench: ModuleType, fakes: Fakes) -> None:
        peer = fakes.start("fake")
        peer.ask("load", model="0.5:dies")
        with pytest.raises(bench.PeerFailed, match=r"(?s)ended during 'prefill'.*out of memory"):
            peer.ask("prefill", prompt=[1])
        with pytest.raises(bench.PeerFailed, match="ended during 'release'"):
            peer.ask("release")

    def test_no_answer(self, bench: ModuleType, fakes: Fakes) -> None:
        peer = fakes.start("fake")
        peer.ask("load", model="0.5:hangs")
        with pytest.raises(bench.PeerFailed, match="no answer to 'prefill' in time"):
            peer.ask("prefill", prompt=[1], seconds=0.1)

    def test_a_stopped_one_is_ended(self, fakes: Fakes) -> None:
        peer = fakes.start("fake")
        peer.ask("load", model="0.5:")
        peer.close()
        with pytest.raises(ProcessLookupError):
            os.kill(peer.pid, 0)

    @pytest.mark.skipif(sys.platform != "linux", reason="other systems let orphans live")
    def test_none_outlives_a_killed_parent(self, tmp_path: Path) -> None:
        code = f"""
import os, sys, time
sys.path.insert(0, {str(BENCH)!r})
from pathlib import Path
from quire_bench.peer_process import PeerProcess
peer = PeerProcess("fake", [sys.executable, "-c", {FAKE!r}], os.environ, Path({str(tmp_path / "log")!r}))
peer.ask("load", model="0.5:")
print(peer.pid, flush=True)
time.sleep(100)
"""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
            assert parent.stdout is not None
            peer = int(parent.stdout.readline())
            parent.send_signal(signal.SIGKILL)
        assert reaches(peer, ("", "Z"))


class TestWorkers:
    @pytest.mark.parametrize("name", ["quire", "transformers"])
    def test_says_what_generate_says(self, name: str, bench: ModuleType, tmp_path: Path) -> None:
        """Placed contexts go on where they stopped, and are gone when they are released."""
        workers = importlib.import_module("quire_bench.peer_worker")
        model = checkpoint("quick-1m", directory=tmp_path)
        prompts = random_prompts(3, 40, 1024)
        expected = TransformersPeer(model, torch.float32).generate(prompts, 9).tokens
        load = {"dtype": "float32", "quantization": None, "threads": torch.get_num_threads()}
        load |= {"length": 128, "batch": 3, "kv_bytes": 1 << 20}
        peer = workers.PEERS[name]()
        assert peer.load(str(model), **load)["version"]
        for _ in range(2):
            done = peer.prefill(prompts[1].tolist())
            assert done["tokens"] == [expected[1][0]]
            assert done["seconds"] > 0
            texts = peer.place(prompts.tolist(), 20)
            for steps in (3, 2):
                done = peer.decode(steps)
                assert len(done["seconds"]) == steps
                for text, tokens in zip(texts, done["tokens"], strict=True):
                    assert len(tokens) == steps
                    text.extend(tokens)
            assert [tuple(text) for text in texts] == [
                row[: len(text)] for row, text in zip(expected, texts, strict=True)
            ]
            peer.release()

    def test_quantised_weights_are_for_two(self, bench: ModuleType) -> None:
        workers = importlib.import_module("quire_bench.peer_worker")
        for name in ("transformers", "vllm"):
            load = {"dtype": "bfloat16", "quantization": "int8", "threads": 1, "length": 9, "batch": 1, "kv_bytes": 1}
            with pytest.raises(ValueError, match="int8: only Quire and"):
                workers.PEERS[name]().load("none", **load)


class TestMeasuring:
    def measured(self, fakes: Fakes, cell: Any, models: dict[str, str]) -> Any:
        bench = fakes.module.Bench("quick-1m", "float32", 3, HARDWARE)
        for name, model in models.items():
            bench.add(fakes.start(name), model=model)
        bench.measure(cell)
        return bench

    def test_ratios_and_shares(self, bench: ModuleType, fakes: Fakes) -> None:
        cell = bench.Cell(batch=3, tokens=40, steps=4)
        found = self.measured(fakes, cell, {"quire": "0.5:", "transformers": "1.0:"})
        (told,) = found.cells
        possible = bench.possible_seconds(SHAPES["quick-1m"], "float32", cell, HARDWARE, 3)
        assert told["possible_tokens_per_second"] == 3 / possible
        ours, theirs = told["peers"]["quire"], told["peers"]["transformers"]
        assert (ours["tokens_per_second"], theirs["tokens_per_second"]) == (6.0, 3.0)
        assert theirs["of_possible"] == possible
        assert theirs["over_quire"] == Spread(median=2.0, least=2.0, most=2.0)
        assert ours["text"] is theirs["text"] is None
        assert [row["text"] for row in found.rows()] == ["equal", "equal"]
        assert found.report()["about"]["quire"] == {"threads": "1"}

    def test_prefill_counts_the_tokens_of_the_prompt(self, bench: ModuleType, fakes: Fakes) -> None:
        found = self.measured(fakes, bench.Cell(batch=1, tokens=40), {"quire": "0.5:"})
        assert found.cells[0]["peers"]["quire"]["tokens_per_second"] == 80.0

    def test_the_first_difference_is_told(self, bench: ModuleType, fakes: Fakes) -> None:
        found = self.measured(fakes, bench.Cell(batch=2, tokens=40, steps=4), {"quire": "0.5:", "vllm": "0.5:lies"})
        assert found.cells[0]["peers"]["vllm"]["text"] == 3  # after the token of the prompt, two are right
        assert [row["text"] for row in found.rows()] == ["equal", "differs at token 3"]

    @pytest.mark.parametrize("fault", ["refuses", "dies"])
    def test_goes_on_without_a_peer_that_fails(
        self, fault: str, bench: ModuleType, fakes: Fakes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        steps = 4 if fault == "refuses" else 0
        cell = bench.Cell(batch=1, tokens=40, steps=steps)
        found = self.measured(fakes, cell, {"quire": "0.5:", "vllm": f"0.5:{fault}"})
        assert list(found.cells[0]["peers"]) == ["quire"]
        assert "vllm" in found.refused
        assert "quick-1m, float32: without vllm: " in capsys.readouterr().out

    def test_steps_without_tokens_do_not_count(self, bench: ModuleType, fakes: Fakes) -> None:
        """A sequence that has ended would make steps look quick."""
        found = self.measured(fakes, bench.Cell(batch=2, tokens=40, steps=4), {"quire": "0.5:", "vllm": "0.5:stalls"})
        assert found.refused == {"vllm": "not 4 tokens for each sequence in as many steps"}
        assert list(found.cells[0]["peers"]) == ["quire"]

    def test_without_quire_nothing_is_compared(
        self, bench: ModuleType, fakes: Fakes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = self.measured(fakes, bench.Cell(batch=1, tokens=40), {"quire": "damaged", "vllm": "0.5:"})
        assert found.refused == {"quire": "ValueError: the file is damaged"}
        assert found.cells[0]["peers"]["vllm"]["over_quire"] is None
        assert found.rows()[0]["time over Quire's"] == ""

    def test_texts_of_all_sequences_count(self, bench: ModuleType) -> None:
        prompts, right = [[5], [7]], [[6, 7, 8], [8, 9, 10]]
        assert bench.first_difference(None, prompts, right) is None
        assert bench.first_difference(None, prompts, [[6, 7, 0], [8, 0, 0]]) == 1


class TestPossible:
    def test_of_a_prompt(self, bench: ModuleType) -> None:
        """Products of all matrices, attention to half of the square, the head once."""
        shape = dataclasses.replace(SHAPES["quick-1m"], layers=1)
        matrices = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 3 * 256
        flops = 2 * matrices * 2000 + 4 * 256 * 2000 * 1000 + 2 * 1024 * 256
        cell = bench.Cell(batch=1, tokens=2000)
        assert bench.possible_seconds(shape, "float32", cell, HARDWARE, 1) == pytest.approx(flops / 0.5e12)
        assert bench.possible_seconds(shape, "int8", cell, HARDWARE, 1) == pytest.approx(flops / 2e12)

    @pytest.mark.parametrize(("dtype", "bits", "kv"), [("float32", 32, 4), ("bfloat16", 16, 2), ("int4", 4.5, 2)])
    def test_of_a_step(self, dtype: str, bits: float, kv: int, bench: ModuleType) -> None:
        """All weights once, 8.5 bits of the head's at least, and K and V of every sequence."""
        shape, cell = SHAPES["quick-1m"], bench.Cell(batch=2, tokens=1000, steps=4)
        length = 1000 + cell.room(1) // 2
        head = 1024 * 256 * (8.5 - bits if dtype == "int4" else 0)
        read = (shape.parameters * bits + head) / 8 + 2 * length * shape.layers * 2 * 128 * kv
        assert bench.possible_seconds(shape, dtype, cell, HARDWARE, 1) == pytest.approx(read / 2e9)

    def test_cells_that_do_not_fit_are_left_out(
        self, bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shape = SHAPES["quick-1m"]
        small, large = bench.Cell(batch=1, tokens=100, steps=4), bench.Cell(batch=16, tokens=4096, steps=4)
        free = 2 * (4 * shape.parameters + bench.pool_bytes(shape, "bfloat16", large, 3))
        monkeypatch.setattr(bench, "free_bytes", lambda _: free)
        assert bench.fitting(shape, "bfloat16", [small, large], 3, 2) == [small]
        assert "decode 16 after 4096: left out, 2 peers" in capsys.readouterr().out
        monkeypatch.setattr(bench, "free_bytes", lambda _: free + 1)
        assert bench.fitting(shape, "bfloat16", [small, large], 3, 2) == [small, large]


class TestCommandLine:
    def test_cells(self, bench: ModuleType) -> None:
        found = bench.parsed(["--prefill", "128,512", "--decode", "1x128,4x1024", "--steps", "8"]).cells
        assert [str(cell) for cell in found] == [
            "prefill 128",
            "prefill 512",
            "decode 1 after 128",
            "decode 4 after 1024",
        ]
        assert [cell.steps for cell in found] == [0, 0, 8, 8]

    def test_quick_is_less_and_can_be_changed(self, bench: ModuleType) -> None:
        quick = bench.parsed(["--quick", "--prefill", "64"])
        assert quick.shapes == ["smollm2-135m"]
        assert [str(cell) for cell in quick.cells][:2] == ["prefill 64", "decode 1 after 128"]
        assert len(bench.parsed([]).cells) == 12

    def test_peers_that_are_there(self, bench: ModuleType) -> None:
        found = bench.parsed(["--vllm", "/elsewhere/python"]).pythons
        assert found["quire"] == found["transformers"] == sys.executable
        assert found["vllm"] == "/elsewhere/python"
        assert list(bench.parsed(["--peers", "transformers,quire"]).pythons) == ["quire", "transformers"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--shapes", "gpt"], "gpt: there are smollm2-135m"),
            (["--dtypes", "int2"], "int2: there are bfloat16"),
            (["--peers", "quire,ollama"], "ollama"),
            (["--prefill", "17"], "longer than 17"),
            (["--prefill", "", "--decode", ""], "are needed"),
            (["--decode", "0x128"], "at least one sequence"),
            (["--rounds", "0"], "1 or greater"),
        ],
    )
    def test_refusals(
        self, arguments: list[str], message: str, bench: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            bench.parsed(arguments)
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("option", "module"), [("--peers=vllm", "vllm"), ("--plot=x.png", "matplotlib")], ids=["peer", "plot"]
    )
    def test_what_is_not_installed(
        self,
        option: str,
        module: str,
        bench: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
        with pytest.raises(SystemExit):
            bench.parsed([option])
        assert module in capsys.readouterr().err

    def test_is_a_command_of_quire(self, bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        found: list[list[str]] = []
        monkeypatch.setattr(bench, "main", found.append)
        given = ["--quick", "--decode", "4x128", "--rounds", "2", "--hardware-seconds", "0.5"]
        monkeypatch.setattr(sys, "argv", ["quire", "bench", "peers", *given])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (found, ended.value.code) == ([given], 0)
        actions = {name for name, value in vars(bench.parsed([])).items() if name not in ("cells", "pythons")}
        assert actions == set(PEER_OPTIONS)

    def test_vllm_gets_its_threads(self, bench: ModuleType, tmp_path: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib/libiomp5.so").touch()
        found = bench.vllm_environment(tmp_path / "bin/python", [0, 2])
        assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0,2"
        assert found["LD_PRELOAD"].endswith(str(tmp_path / "lib/libiomp5.so"))
        assert found["KMP_AFFINITY"].endswith("proclist=[0,2]")

    def test_from_options_to_the_line_of_json(
        self, tmp_path: Path, bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "fake.py").write_text(FAKE)
        monkeypatch.setattr(bench, "WORKER", tmp_path / "fake.py")
        monkeypatch.setattr(bench, "checkpoint", lambda *_, **__: tmp_path / "0.5:")
        self.check(tmp_path, bench, monkeypatch, capsys)

    @pytest.mark.slow
    def test_quire_and_transformers(
        self, tmp_path: Path, bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """In processes of their own, on a real checkpoint."""
        monkeypatch.setattr(bench, "predicted_text", predicted_text)
        self.check(tmp_path, bench, monkeypatch, capsys)

    def check(
        self, directory: Path, bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(bench, "measure", lambda **_: HARDWARE)
        arguments = ["--shapes", "quick-1m", "--dtypes", "float32", "--dir", str(directory), "--rounds", "2"]
        arguments += ["--peers", "quire,transformers", "--threads", "1", "--steps", "3"]
        bench.main([*arguments, "--prefill", "30", "--decode", "1x20,3x40"])
        *table, line = capsys.readouterr().out.splitlines()
        found = json.loads(line)
        assert found["benchmark"] == "peers"
        (model,) = found["models"]
        assert model["refused"] == {}
        assert [cell["cell"] for cell in model["cells"]] == ["prefill 30", "decode 1 after 20", "decode 3 after 40"]
        for cell in model["cells"]:
            assert list(cell["peers"]) == ["quire", "transformers"]
            for told in cell["peers"].values():
                assert told["text"] is None
                assert len(told["seconds"]) == 2
                assert told["of_possible"] > 0
        assert "time over Quire's" in "\n".join(table)

    def test_texts_that_differ_in_float32_are_an_error(
        self, bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cell = {"cell": "prefill 30", "peers": {"quire": {"text": None}, "vllm": {"text": 4}}}
        reports = [{"shape": "quick-1m", "dtype": "bfloat16", "cells": [cell]}]
        monkeypatch.setattr(bench, "run", lambda *_: reports)
        bench.main(["--dir", str(tmp_path)])
        reports[0]["dtype"] = "float32"
        with pytest.raises(SystemExit, match="quick-1m, vllm, prefill 30: token 4 differs"):
            bench.main(["--dir", str(tmp_path)])

    def test_plot(self, bench: ModuleType, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        cell = {"cell": "prefill 30", "peers": {"quire": {"of_possible": 0.5}}}
        report = {"shape": "quick-1m", "dtype": "float32", "about": {"quire": {}, "vllm": {}}, "cells": [cell]}
        bench.plot([report, report], tmp_path / "plot.svg")
        assert "share of what the hardware allows" in (tmp_path / "plot.svg").read_text()
