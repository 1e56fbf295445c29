"""The command line: what goes to stdout, one sentence for every mistake, exit codes."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pytest
import typer

from quire import LLM, FailedPrecondition, InvalidArgument, QuireError
from quire.base.other_names import ALIASES, COMMANDS, OPTIONS, SEVERAL
from quire.cli import main as cli
from quire.cli.chat import AnswerPiece, LocalBackend, TerminalChat
from quire.cli.options import read_config
from quire.server.http.settings import ServerSettings

RECALL = "# module base\nport = 8031\nhost = 1276\n# module other\nalias = port\n# checks\nassert alias =="
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--dtype", "float32"]


def run(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["quire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-python", dtype="float32", kv_cache_memory="64MiB")


@pytest.fixture(scope="module")
def saved(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "recall.quire"
    with llm.session(RECALL) as session:
        session.save(path)
    return path


def test_generate_streams_the_continuation_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", RECALL, *GREEDY, monkeypatch=monkeypatch) == 0
    out, err = capsys.readouterr()
    assert out.startswith(" 8031\n")
    assert "tok/s" in err
    assert "tok/s" not in out


def test_a_process_of_its_own_collects_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading makes some 300,000 lasting objects; Python would look through them 130 times."""
    before = gc.get_threshold()
    try:
        assert run("--version", monkeypatch=monkeypatch) == 0
        assert gc.get_threshold() == (cli.COLLECT_AFTER, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_stores_and_the_state_directory_are_flags_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the order in which they are given."""
    import quire.async_llm
    import quire.server.http.serving

    seen: list[Any] = []
    monkeypatch.setattr(quire.async_llm, "AsyncLLM", lambda model, **options: (model, options))
    monkeypatch.setattr(quire.server.http.serving, "serve", lambda llm, settings: seen.append(llm))
    urls = ["memory://4GiB", f"file://{tmp_path}/quire?size=200GiB", "redis://localhost"]
    flags = [word for url in urls for word in ("--store", url)]
    words = ["tiny-python", "--port", "0", *flags, "--state-dir", str(tmp_path)]
    assert run("serve", *words, monkeypatch=monkeypatch) == 0
    ((model, options),) = seen
    assert (model, list(options["store"]), str(options["state_dir"])) == ("tiny-python", urls, str(tmp_path))


def test_generate_reads_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(RECALL))
    assert run("generate", "-", *GREEDY, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.startswith(" 8031")


def test_config_file_sets_options_and_the_command_line_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "quire.yaml"
    config.write_text("max-tokens: 5\ntemperature: 0\nkv_cache_memory: 16MiB\ndtype: float32\n")
    assert run("generate", RECALL, "--config", str(config), monkeypatch=monkeypatch) == 0
    assert "5 tokens" in capsys.readouterr().err
    assert run("generate", RECALL, "--config", str(config), "--max-tokens", "3", monkeypatch=monkeypatch) == 0
    assert "3 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "x", "--model", "/no/such/place"], "/no/such/place"),
        (["generate", "x", "--temperature", "nan"], "quire: --temperature: temperature must be"),
        (["generate", "x", "--top-p", "2"], "quire: --top-p: top_p must be a number in (0, 1], got 2.0"),
        (["generate", ""], "empty"),
        (["generate", "x", "--max-tokens", "100000"], "quire: --max-tokens: This model's maximum context length is"),
        (["generate", "x", "--kv-cache-memory", "10"], "kv_cache_memory"),
        (["generate", "x", "--kv-cache-memory", "many"], "kv_cache_memory"),
        (
            ["generate", "x", "--pipeline-parallel-size", "9"],
            "quire: --pipeline-parallel-size: ",
        ),
        (
            ["generate", "x", "--tensor-parallel-size", "3"],
            "tensor_parallel_size 3: 4 query heads do not divide by 3",
        ),
        (["generate", "x", "--device", "cuda:99"], "cuda:99"),
        (["generate", "x", "--config", "/no/such.yaml"], "/no/such.yaml"),
        (["inspect", "/no/such.quire"], "/no/such.quire"),
        (["inspect", __file__], "is no state file: it begins with"),
        (["bench", "latency", "--batch", "0"], "batch"),
        (["bench", "latency", "--peer", "nobody"], "peer"),
        (["generate", "x", "--no-such-flag"], "--no-such-flag"),
        (["generate", "x", "--quantization", "int3"], "accepted: one of 'int8', 'int4', 'fp8', or left out"),
        (["generate", "x", "--temperature", "hot"], "'--temperature': 'hot' is not a number"),
        (["generate", "x", "--stop-token-ids", "a"], "'--stop-token-ids': 'a' is not an integer"),
        (["generate", "def \udcff"], "is not UTF-8: byte 0xff at index 4"),
        (["inspect", "x", "--port", "abc"], "'--port': 'abc' is not an integer"),
        (["generate", "tiny-python"], "'tiny-python' is a model, and there is no prompt; put one behind it"),
        (["generate", "one", "two", "three"], "3 arguments are given, where PROMPT or MODEL PROMPT is accepted"),
        (["generate", "one", "two", "-m", "three"], "quire: the model is given twice, as 'one' and as --model 'three'"),
        (["generate", "/no/such/place", "x"], "/no/such/place"),
        (["chat", "/no/such/place"], "/no/such/place"),
        (["chat", "tiny-python", " "], "quire: LINE is empty; give a text, or leave it out to talk"),
        (["chat", "tiny-python", "/nosuch"], "quire: unknown command /nosuch; "),
        (["chat", "--url", "http://127.0.0.1:1", "--page-size", "4"], "quire: --page-size: with --url the server has"),
        (["chat", "one", "-m", "two"], "quire: the model is given twice, as 'one' and as --model 'two'"),
        (["serve", "one", "-m", "two"], "quire: the model is given twice, as 'one' and as --model 'two'"),
        (["serve", "-m", "/no/such/place", "--port", "0"], "/no/such/place"),
        (["calibrate", "--texts", "/no/such.txt"], "quire: --texts: '/no/such.txt': No such file or directory"),
        (["no-such-command"], "no-such-command"),
        (["pull", "x"], "quire: there is no command pull; quire serve MODEL and"),
        (["rm", "x"], "quire: there is no command rm; models are files; quire models says where they are"),
        (["generate", "x", "-f", "y"], "quire: there is no option -f here; - as the prompt reads stdin"),
        (["chat", "x", "--verbose"], "quire: there is no option --verbose here; it stands before the command"),
        (["capabilities", "/no/such/place"], "/no/such/place"),
        (["doctor", "/no/such/place"], "/no/such/place"),
        (["doctor", "one", "-m", "two"], "quire: the model is given twice, as 'one' and as --model 'two'"),
        (["serve", "x", "-ngl", "20"], "quire: -ngl 20 is not supported; --device auto takes a GPU for the whole"),
        (["serve", "x", "-fa", "off"], "quire: -fa off is not supported; the fastest kernels are taken"),
        (
            ["serve", "x", "--temp", "hot", "--port", "0"],
            "fields temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens",
        ),
        (["serve", "x", "--mmproj", "y"], "quire: there is no option --mmproj here; only text is taken"),
        (["serve", "x", "-t", "0"], "quire: -t '0': a number of 1 or more is accepted"),
        (["chat", "x", "--threads", "all"], "quire: --threads 'all': a number of 1 or more is accepted"),
        (["serve", "x", "-np"], "Option '--max-num-seqs' requires an argument"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_a_switch_can_be_turned_off_and_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the engine and of sampling, whatever their defaults are."""
    chosen: list[dict[str, object]] = []

    def refuse(model: str | None, options: dict[str, object], adapter: str | None) -> LLM:
        chosen.append({name: options.get(name) for name in ("enable_prefix_caching", "ignore_eos")})
        raise InvalidArgument("far enough")

    monkeypatch.setattr(cli, "_load", refuse)
    config = tmp_path / "quire.yaml"
    config.write_text("enable-prefix-caching: true\nignore-eos: true\n")
    for arguments in (
        [],
        ["--enable-prefix-caching", "--ignore-eos"],
        ["--no-enable-prefix-caching", "--no-ignore-eos"],
        ["--config", str(config), "--no-enable-prefix-caching", "--no-ignore-eos"],
        ["--config", str(config)],
    ):
        assert run("generate", "x", *arguments, monkeypatch=monkeypatch) == 2
    assert [tuple(options.values()) for options in chosen] == [
        (None, None),
        (True, True),
        (False, False),
        (False, False),
        (True, True),
    ]


def test_a_switch_that_is_off_reaches_the_engine() -> None:
    options = {"enable_prefix_caching": False, "kv_cache_memory": "16MiB", "dtype": "float32"}
    with cli._load("tiny-python", options) as loaded:
        assert not loaded.config.enable_prefix_caching


def test_an_empty_config_file_means_no_options(tmp_path: Path) -> None:
    config = tmp_path / "quire.yaml"
    for text in ("", "# nothing yet\n", "---\n"):
        config.write_text(text)
        assert read_config(config, {"seed"}) == {}
    config.write_text("[]\n")
    with pytest.raises(InvalidArgument, match="mapping"):
        read_config(config, {"seed"})


def test_a_mistake_in_a_config_file_is_located(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("seed: 1\ndtype: [float32\ntop-p: 1\n")
    assert run("generate", "x", "--config", str(config), monkeypatch=monkeypatch) == 2
    err = capsys.readouterr().err
    assert "line 3, column 6" in err
    assert err.count("\n") == 1


def test_a_directory_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot be read: Is a directory$"):
        read_config(tmp_path, {"seed"})


def test_unknown_option_in_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("temprature: 0\n")
    assert run("generate", "x", "--config", str(config), monkeypatch=monkeypatch) == 2
    assert "temprature" in capsys.readouterr().err


def test_config_file_names_only_what_the_command_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "quire.yaml"
    for text, says in (("temperature: 0\n", "temperature"), ("page-size: 4\npage_size: 8\n", "twice")):
        config.write_text(text)
        assert run("capabilities", "--config", str(config), monkeypatch=monkeypatch) == 2
        assert says in capsys.readouterr().err


def test_the_model_of_the_command_line_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_bench import latency

    config = tmp_path / "quire.yaml"
    config.write_text("model: another\npage-size: 4\n")
    calls: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(latency, "run_latency", lambda model, **rest: calls.append((model, rest["engine_options"])))
    assert run("bench", "latency", "--config", str(config), "--model", "mine", monkeypatch=monkeypatch) == 0
    assert run("bench", "latency", "--config", str(config), monkeypatch=monkeypatch) == 0
    assert calls == [("mine", {"page_size": 4}), ("another", {"page_size": 4})]


class NotInstalled(MetaPathFinder):
    """In front of whatever finds ``quire_bench``."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] == "quire_bench":
            raise ModuleNotFoundError("No module named 'quire_bench'", name="quire_bench")


def test_bench_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "quire_bench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    for command in (["latency"], ["throughput"], ["speculative"], ["state"], ["serve", "http://127.0.0.1:8000"]):
        assert run("bench", *command, monkeypatch=monkeypatch) == 2
        error = capsys.readouterr().err
        assert "quire bench needs the package quire_bench, which is not installed" in error
        assert error.count("\n") == 1


def test_text_that_the_pipe_cannot_hold() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "quire.cli.main", "generate", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, env=environment)
    assert done.returncode == 2
    assert b"encoding" in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokens": 7},
        {"kind": "session", "sequence": 5, "tokens": [1]},
        {"kind": "session", "sequence": {"layers": [1]}, "tokens": [1]},
        {"sequence": {"layers": 5}},
        {"sequence": {"held": 7}},
        {"sequence": {"held": [[1]]}},
        {"sequence": {"held": [["a", "b"]]}},
        {"kind": "kv_cache", "rows": [1], "tokens": [None]},
        {"kind": "kv_cache", "rows": 1, "tokens": [None]},
    ],
)
def test_inspect_of_metadata_that_makes_no_sense(
    metadata: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.statefile.container import write_state

    path = tmp_path / "odd.quire"
    write_state(path, metadata, [], iter(()))
    assert run("inspect", str(path), monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "state file" in err


def test_inspect_prints_brackets_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.statefile.container import write_state

    path = tmp_path / "odd.quire"
    metadata = {
        "kind": "session",
        "model": {"architecture": "[bold]x", "config": "[/red]", "weights": ""},
        "adapters": [],
        "exact": True,
        "modified": False,
        "window": None,
        "tokens": [],
        "positions": [0, 0],
        "sequence": None,
    }
    write_state(path, metadata, [], iter(()))
    assert run("inspect", str(path), monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "[/red]" in out
    assert "[bold]x" in out


def test_inspect_shows_and_verifies(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("inspect", str(saved), "--json", monkeypatch=monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["architecture"] == "LlamaForCausalLM"
    assert found["sequences"][0]["num_layers"] == 8
    assert found["checksums"] == "verified"
    held = found["sequences"][0]["num_tokens"] - 1  # the last token has not been run yet
    assert found["sequences"][0]["positions_held"] == [{"layers": list(range(8)), "ranges_start_stop": [[0, held]]}]
    assert run("inspect", str(saved), monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out
    assert f"0..{held - 1}" in out
    damaged = tmp_path / "damaged.quire"
    data = bytearray(saved.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    assert run("inspect", str(damaged), monkeypatch=monkeypatch) == 2
    assert "damaged" in capsys.readouterr().err


def test_models_doctor_capabilities_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "tiny-python" in out
    assert "Qwen3ForCausalLM" in out
    assert "any other decoder of transformers" in out.lower()
    assert run("doctor", "--no-measure", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "PyTorch" in out
    assert "GB/s" not in out
    assert run("--version", monkeypatch=monkeypatch) == 0
    assert "torch" in capsys.readouterr().out
    assert run("capabilities", "--json", "--kv-cache-memory", "16MiB", monkeypatch=monkeypatch) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["verbs"]["fork_sequence"] == ""
    assert "release" in table["verbs"]["set_cross_kv"]
    assert set(table["engine_verbs"].values()) == {""}
    assert "beam search" in table["engine_verbs"]
    assert "LLM(quantization='awq')" in table["engine"]
    assert run("capabilities", "--kv-cache-memory", "16MiB", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    # Words, for the table folds long names.
    assert [word for name in table["engine_verbs"] for word in name.split() if word not in out] == []


def test_capabilities_of_the_state_are_true(llm: LLM) -> None:
    """What the table refuses raises ``Unsupported`` with the reason of the table."""
    from quire.base.errors import Unsupported
    from quire.kv.contract import ContractState
    from quire.kv.rules import PAGED_REFUSALS

    state = ContractState(llm.engine.runner.state)
    verbs = [verb for verb in PAGED_REFUSALS if callable(getattr(state, verb, None))]
    assert len(verbs) == len(PAGED_REFUSALS)
    for verb in ("debug_get_kv_mla", "checkpoint"):
        state.add_sequence(-77)
        with pytest.raises(Unsupported, match=verb):
            getattr(state, verb)(-77)
        state.remove_sequence(-77)


def test_help_has_the_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--help", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    for option in ("--max-tokens", "--kv-cache-memory", "--page-size", "--config", "--top-p"):
        assert option in out


def test_words_of_other_programs_lead_to_what_is_there() -> None:
    """The options, commands and paths that are named exist, and have no other program's name."""
    known = commands(cli.app)
    parameters = [one for command in known.values() for one in command.params]
    options = {name for one in parameters for name in (*one.opts, *one.secondary_opts)}
    texts = " ".join([*(one.says for one in OPTIONS.values()), *COMMANDS.values()])
    assert set(re.findall(r"--[a-z-]+", texts)) <= options
    assert {one.own for one in OPTIONS.values() if one.own.startswith("-")} <= options
    assert not SEVERAL - options - OPTIONS.keys()
    assert {(name,) for name in re.findall(r"quire ([a-z]+)", texts)} <= set(known)
    assert not {(name,) for name in (*COMMANDS, *ALIASES)} & set(known)
    assert {(name,) for name in ALIASES.values()} <= set(known)


def served_with(
    *words: str, monkeypatch: pytest.MonkeyPatch, model: str = "tiny-python"
) -> tuple[dict[str, Any], ServerSettings]:
    """The engine's options and the server's settings of a ``quire serve`` of a model."""
    import quire.async_llm
    import quire.server.http.listeners
    import quire.server.http.serving

    seen: list[Any] = []
    monkeypatch.setattr(quire.server.http.listeners, "bind", lambda host, port: [])
    monkeypatch.setattr(quire.async_llm, "AsyncLLM", lambda model, **options: {"model": model, **options})
    monkeypatch.setattr(quire.server.http.serving, "serve", lambda *given: seen.append(given))
    assert run("serve", *([model] if model else []), *words, monkeypatch=monkeypatch) == 0
    ((options, settings),) = seen
    return options, settings


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "x", "--max-tokens", "0"], "--max-tokens: max_tokens must be"),
        (["generate", "x", "--min-tokens", "9", "--max-tokens", "8"], "--min-tokens: "),
        (["generate", "def \udcff"], "the prompt is not UTF-8: byte 0xff at index 4"),
        (["chat", "tiny-python", "--top-p", "2"], "--top-p: top_p must be"),
        (["run", "tiny-python", "def \udcff"], "LINE is not UTF-8: byte 0xff at index 4"),
    ],
)
def test_wrong_values_are_refused_before_the_load(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_load", lambda *_: pytest.fail("the model was loaded"))
    assert run(*words, monkeypatch=monkeypatch) == 2
    assert f"quire: {says}" in capsys.readouterr().err


def test_the_only_line_of_a_chat_is_not_to_be_continued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_load", lambda *_: llm)
    assert run("run", "tiny-python", "def add(a, b):", "--max-tokens", "3", monkeypatch=monkeypatch) == 0
    err = capsys.readouterr().err
    assert "; cut there, by --max-tokens or the end of the context]" in err
    assert "/continue" not in err
    monkeypatch.setattr(llm.tokenizer, "chat_templates", {})
    assert run("run", "tiny-python", "def add(a, b):", "--max-tokens", "3", monkeypatch=monkeypatch) == 0
    assert "this model has no chat template: it continues the line" in capsys.readouterr().err


def test_an_address_that_is_taken_is_refused_before_the_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import quire.async_llm

    monkeypatch.setattr(quire.async_llm, "AsyncLLM", lambda *_, **options: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run("serve", "tiny-python", "--port", port, monkeypatch=monkeypatch) == 2
    assert f"quire: cannot listen on host '127.0.0.1', port {port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("-c 4096 -np 4 --batch-size 512", {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 512}),
        ("--ctx-size=0 -np -1 -s -1", {}),
        ("--swap-space 4 --kv-cache-dtype bfloat16", {"host_memory": "4GiB", "kv_dtype": "bfloat16"}),
        ("-cram 512 --slot-save-path /state", {"host_memory": "512MiB", "state_dir": "/state"}),
        ("-md ./draft --no-cache-prompt", {"speculative": "draft:./draft", "enable_prefix_caching": False}),
        ("--chat-template-file x.jinja -ngl 0", {"chat_template": "x.jinja", "device": "cpu"}),
        ("--lora-modules a=./a b=./b", {"adapters": ["a=./a", "b=./b"]}),
        (
            "--temp 0.6 --top-k 20 --min-p=0 -n 99",
            {
                "override_generation_config": [
                    '{"temperature": 0.6}',
                    '{"top_k": 20}',
                    '{"min_p": 0}',
                    '{"max_new_tokens": 99}',
                ]
            },
        ),
        (
            "-tp 2 -pp 3 -q int8 --block-size 32",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "quantization": "int8", "page_size": 32},
        ),
        (
            "--dtype float16 --enforce-eager --max-model-len 99",
            {"dtype": "float16", "enforce_eager": True, "max_model_len": 99},
        ),
    ],
)
def test_options_of_others_are_read_as_ours(
    words: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served_with(*words.split(), monkeypatch=monkeypatch)[0] == {"model": "tiny-python", **options}


def test_models_and_names_are_given_as_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["-m", "x"], ["-hf", "x"], ["--model=x"], ["x"]):
        options, settings = served_with(*words, "--served-model-name", "a", "b", monkeypatch=monkeypatch, model="")
        assert (options["model"], settings.model_names) == ("x", ("a", "b"))
    before = served_with("--served-model-name", "a", "x", monkeypatch=monkeypatch, model="")
    assert (before[0]["model"], before[1].model_names) == ("x", ("a",)), "the model may stand behind one name"
    assert served_with("--alias", "a,b", monkeypatch=monkeypatch)[1].model_names == ("a", "b")
    assert served_with(monkeypatch=monkeypatch)[1].model_names == ()


def test_keys_are_a_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "a, b,")
    assert served_with(monkeypatch=monkeypatch)[1].api_key == ("a", "b")
    monkeypatch.setenv("QUIRE_API_KEY", "")
    assert served_with(monkeypatch=monkeypatch)[1].api_key == ()
    monkeypatch.setenv("QUIRE_API_KEY", " ,")  # never a server without a key
    assert run("serve", "tiny-python", monkeypatch=monkeypatch) == 2
    assert "QUIRE_API_KEY is ' ,', without a key" in capsys.readouterr().err


def test_threads_are_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    served_with("-t", "-1", monkeypatch=monkeypatch)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    served_with("--threads", "3", monkeypatch=monkeypatch)
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_what_is_so_in_any_case_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    words = ["--jinja", "-fa", "--flash-attn", "on", "-ngl", "99", "--enable-auto-tool-choice", "-cb"]
    words += ["--reasoning", "auto", "--kv-unified"]
    words += ["--reasoning-parser", "qwen3", "--task", "generate", "-ub", "64", "--port", "0"]
    options, settings = served_with(*words, monkeypatch=monkeypatch)
    assert (options, settings.port) == ({"model": "tiny-python"}, 0)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in said] == [word for word in words[:-2] if word.startswith("-")]
    assert said[0] == "--jinja: the model's chat template is always used"


def test_help_names_the_options_of_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help", monkeypatch=monkeypatch) == 0
    assert "Also -c, --ctx-size, " in " ".join(capsys.readouterr().out.split())


def test_a_command_may_be_called_as_by_ollama(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", "--help", monkeypatch=monkeypatch) == 0
    assert "Talk to a model in the terminal" in capsys.readouterr().out


def commands(app: typer.Typer, *path: str) -> dict[tuple[str, ...], Any]:
    """Every command and group of commands, by the words that lead to it."""
    found: dict[tuple[str, ...], Any] = {}

    def visit(command: Any, path: tuple[str, ...]) -> None:
        found[path] = command
        for name, child in getattr(command, "commands", {}).items():
            visit(child, (*path, name))

    visit(typer.main.get_command(app), path)
    return found


@pytest.mark.turns(3)
@pytest.mark.parametrize("width", [60, 80, 119])
def test_help_is_never_cut(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of each text is there, at any width of the terminal; in the lists of commands their first
    paragraphs.
    """
    monkeypatch.setenv("COLUMNS", str(width))
    known = commands(cli.app)
    assert len(known) > 12
    for path, command in known.items():
        assert run(*path, "--help", monkeypatch=monkeypatch) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= width
        # Words may be broken at hyphens, and texts stand in columns.
        shown = "".join(out.split())
        texts = [parameter.help for parameter in command.params if getattr(parameter, "help", None)]
        texts += [command.help] + [
            child.help.partition("\n\n")[0] for child in getattr(command, "commands", {}).values()
        ]
        for text in texts:
            assert "".join(text.split()) in shown, (path, text)


def test_tables_are_never_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for command in (["models"], ["doctor", "--no-measure"]):
        assert run(*command, monkeypatch=monkeypatch) == 0
        assert "…" not in capsys.readouterr().out


def test_tables_where_the_width_is_not_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert run("models", monkeypatch=monkeypatch) == 0
    assert "tiny-python" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "quire.llm", None)
    assert run("generate", "x", monkeypatch=monkeypatch) == 2
    error = capsys.readouterr().err
    assert "quire.llm" in error
    assert error.count("\n") == 1


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "quire", "generate", "x", "--config", "/no/such.yaml"]  # which needs no torch
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quire: ")


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    """The package itself comes before ``main``, where Ctrl-C would show a traceback."""
    code = "import sys; import quire.__main__; print(*(name for name in sys.modules if name.startswith('quire')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "quire",
        "quire.__main__",
        "quire.base",
        "quire.base.collector",
        "quire.base.openmp",
    }


def test_ctrl_c_while_modules_are_imported() -> None:
    code = """
import sys
from quire.__main__ import main
class Interrupts:
    def find_spec(self, name, *_):
        if name == "quire.cli.options":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nquire: interrupted\n")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("quire ca", ["calibrate", "capabilities"]),
        ("quire bench s", ["serve", "speculative", "state"]),
        ("quire chat --chat", ["--chat-template"]),
    ],
)
def test_shell_completion(words: str, wanted: list[str]) -> None:
    ask = {"_QUIRE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-m", "quire"], capture_output=True, text=True, env=os.environ | ask)
    assert sorted(done.stdout.split()) == wanted


def test_chat_commands(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 4}))
    file = tmp_path / "chat.quire"
    assert chat.take("port = 8031")
    main = chat._session.tokens
    for line in ("/fork other", "host = 1", "/switch main", "/stats", f"/save {file}", f"/load {file}", "/switch main"):
        assert chat.take(line)
    assert chat._session.tokens == main
    assert chat.take("/rewind 1")
    assert len(chat._session) == 0
    assert not chat.take("/exit")
    said = capsys.readouterr().err
    assert "shared" in said
    assert re.search(r"of all pages \d+ free, \d+ evictable, 0 held, 0 pinned", said)
    for bad in (
        "/rewind 9",
        "/rewind ²",
        "/rewind 0",
        "/rewind " + "9" * 5000,
        "/switch nobody",
        "/rewind",  # no turns are left
        "/continue",
        "/fork main",
        "/fork a b",
        "x = \udcff",
        "/save",
        "/load /no/such",
        "/nonsense",
    ):
        with pytest.raises(QuireError, match=r"/|byte 0xff at index 4"):
            chat.take(bad)
    with pytest.raises(FailedPrecondition, match="--state-dir"):
        chat.take("/checkout main")
    with pytest.raises(FailedPrecondition, match=r"--state-dir.*; /save FILE keeps this conversation now"):
        chat.take("/commit main")


def test_what_chat_commands_do_without_a_number_and_a_name(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 4}))
    for line in ("x = 1", "/fork", "y = 2", "/fork", "/switch fork-1", "/rewind"):
        assert chat.take(line)
    assert list(chat._branches) == ["main", "fork-1", "fork-2"]
    assert [len(branch.turns) for branch in chat._branches.values()] == [1, 1, 2]
    assert "now in fork-2" in capsys.readouterr().err


def test_an_answer_that_was_cut_goes_on(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, the rest is what a longer answer would have been, and one turn holds both."""
    question = "def add(a, b):"
    whole = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 12}))
    whole.take(question)
    wanted = capsys.readouterr().out.removesuffix("\n")
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 6}))
    for line in (question, "/continue"):
        assert chat.take(line)
        out, err = capsys.readouterr()
        assert "; cut there, /continue goes on]" in err
        assert out.removesuffix("\n") in wanted
    (turn,) = chat._branch.turns
    assert turn.answer == wanted
    assert chat._session.tokens == whole._session.tokens
    chat.take("class Stack:")
    chat.take("/drop")
    with pytest.raises(InvalidArgument, match="/continue: the conversation was computed anew"):
        chat.take("/continue")


def test_an_answer_that_the_model_ended_is_not_cut(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 64, "stop": ["\n"]}))
    chat.take("def add(a, b):")
    assert "cut" not in capsys.readouterr().err
    chat.take("/continue")
    assert capsys.readouterr().err == "the model had ended its answer, and adds nothing\n"


def test_a_refused_turn_leaves_nothing_behind(llm: LLM) -> None:
    limit = llm.engine.max_model_len
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": limit - 2}))
    with pytest.raises(InvalidArgument, match="max_tokens"):
        chat.take("def longer_than_two_tokens(x):")
    assert len(chat._session) == 0
    with pytest.raises(InvalidArgument, match="0 turns"):
        chat.take("/rewind 1")


def test_chat_help_says_that_loaded_text_has_no_turns(
    llm: LLM, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 4}))
    assert chat.take(f"/load {saved}")
    with pytest.raises(InvalidArgument, match="0 turns"):
        chat.take("/rewind 1")
    capsys.readouterr()
    assert chat.take("/help")
    assert "loaded has no turns, unless" in capsys.readouterr().err


def test_loaded_text_is_shown(
    llm: LLM, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 4}))
    assert chat.take(f"/load {saved}")
    assert f"{RECALL}\nnow in recall, " in capsys.readouterr().err
    monkeypatch.setattr("quire.cli.chat.SHOWN", 12)
    assert chat.take(f"/load {saved}")
    shown = f"[{len(RECALL) - 12} characters before; /text shows them]\n{RECALL[-12:]}\nnow in recall', "
    assert shown in capsys.readouterr().err
    assert chat.take("/text")
    assert capsys.readouterr().err == RECALL + "\n"


def test_loaded_text_is_dropped_first(llm: LLM, saved: Path) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 4}))
    for line in (f"/load {saved}", "x = 1", "y = 2"):
        assert chat.take(line)
    with pytest.raises(InvalidArgument, match=r"1\.\.3 turns \(the text that was loaded is the first\)"):
        chat.take("/drop 4")
    chat.take("/drop")
    assert chat._session.text.startswith("x = 1")
    with pytest.raises(InvalidArgument, match=r"/drop N: N is '3'; 1\.\.2 turns can"):
        chat.take("/drop 3")
    chat.take("/drop 2")
    assert len(chat._session) == 0
    with pytest.raises(InvalidArgument, match="0 turns to forget"):
        chat.take("/drop")
    chat.take(f"/load {saved}")
    chat.take("x = 1")
    chat.take("/drop 2")
    assert len(chat._session) == 0


def test_what_tab_offers(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.quire").touch()
    chat = TerminalChat(LocalBackend(llm, {}))
    assert chat.take("/fork other")
    assert {"/help", "/drop", "/window"} & set(chat._completions("/")) == {"/help", "/drop"}
    assert chat._completions("/switch o") == ["main", "other"]
    assert chat._completions("/load a") == ["a.quire"]
    assert chat._completions("/rewind ") == []
    assert chat._completions("def f") == []


def test_a_turn_that_an_interrupt_undid_is_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the session holds is a turn that can be taken back."""
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 4}))

    def interrupted(*_: object) -> Iterator[tuple[str, int]]:
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr(chat._backend, "answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.take("x = 1")
    assert chat._branch.turns == []

    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", Impatient())
        with pytest.raises(KeyboardInterrupt):
            chat.take("x = 1")
    assert [turn.line for turn in chat._branch.turns] == ["x = 1"]
    chat.take("/rewind 1")
    assert len(chat._session) == 0


def test_one_line_is_answered_as_by_ollama(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "tiny-python", "def add(a, b):\n    x", *GREEDY, monkeypatch=monkeypatch) == 0
    given = capsys.readouterr()
    assert given.out.strip()
    assert "/help" not in given.err
    monkeypatch.setattr("sys.stdin", io.StringIO("def add(a, b):\n    x\n"))
    assert run("chat", "tiny-python", "-", *GREEDY, monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out == given.out
    sent: list[Any] = []
    monkeypatch.setattr("quire.cli.remote_chat.run_remote_chat", lambda url, **given: sent.append(given["line"]))
    url = ("--url", "http://127.0.0.1:1")
    for line in (["x = 1"], ["x", "=", "1"], ["x", *url, "=", "1"], ["-", "1"], []):
        assert run("run", "m", *line, *([] if "--url" in line else url), monkeypatch=monkeypatch) == 0
    assert sent == ["x = 1", "x = 1", "x = 1", "- 1", None]


def test_only_a_saved_state_is_replaced(llm: LLM, tmp_path: Path) -> None:
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 2}))
    chat.take("x = 1")
    notes, state = tmp_path / "notes.txt", tmp_path / "x.quire"
    notes.write_text("what was written by hand")
    with pytest.raises(InvalidArgument, match=r"notes\.txt': a file of that name is no saved state; give another name"):
        chat.take(f"/save {notes}")
    assert notes.read_text() == "what was written by hand"
    for _ in range(2):
        assert chat.take(f"/save {state}")
    state.write_bytes(b"")
    assert chat.take(f"/save {state}")
    assert chat.take(f"/load {state}")


def test_lines_of_a_pipe(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All are taken, and the exit code says that one was refused. An interrupt ends the chat."""
    chat = TerminalChat(LocalBackend(llm, {"temperature": 0, "max_tokens": 2}))
    monkeypatch.setattr("sys.stdin", io.StringIO("/nosuch\n// x\n/clear\n/etc/passwd is\n/bye\nz = 1\n"))
    with pytest.raises(SystemExit) as ended:
        chat.run()
    assert ended.value.code == 2
    assert "unknown command /nosuch; " in capsys.readouterr().err
    lines = {name: [turn.line for turn in branch.turns] for name, branch in chat._branches.items()}
    assert lines == {"main": ["// x"], "new-1": ["/etc/passwd is"]}
    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1\n"))
    chat.run()

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1\ny = 1\n"))
    monkeypatch.setattr(chat, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        chat.run()


def test_an_error_within_an_answer_has_a_line_of_its_own(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = TerminalChat(LocalBackend(llm, {}))

    def broken(*_: object) -> Iterator[AnswerPiece]:
        yield AnswerPiece("def", 1)
        raise QuireError("the connection broke")

    monkeypatch.setattr(chat._backend, "answer", broken)
    with pytest.raises(QuireError, match="broke"):
        chat.take("x")
    assert capsys.readouterr().out == "def\n"


def test_windows_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["--window", "4", "--sink", "4"], "window 4 with sink 4"),
        (["--sink", "4"], "sink is 4 without a window"),
        (["--chat-template", "chatlm"], "'chatlm': there is no such file"),
    ):
        assert run("chat", "tiny-python", *arguments, "--kv-cache-memory", "16MiB", monkeypatch=monkeypatch) == 2
        err = capsys.readouterr().err
        assert says in err
        assert "Traceback" not in err


def test_generate_refuses_before_it_runs_the_prompt(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_load", lambda *_: llm)
    monkeypatch.setattr(llm.engine.stepper, "step", lambda: pytest.fail("it runs the prompt"))
    assert run("generate", "x = 1\n" * 100, "--max-tokens", "4000", monkeypatch=monkeypatch) == 2
    assert "4500 tokens (500 in the prompt, 4000 in the completion)" in capsys.readouterr().err


def test_interrupt_is_quiet(tmp_path: Path) -> None:
    """Ctrl-C ends a generation with exit code 130 and no traceback."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "quire.cli.main", "generate", "x = 1\n", "--max-tokens", "4000", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    del out
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err


def test_closed_pipe_is_quiet() -> None:
    """``quire generate ... | head -c 1`` ends without a traceback."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quire.cli.main", "generate", "x = 1\n", "--max-tokens", "300", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.stdout.close()
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 141
    assert b"Traceback" not in err


@pytest.mark.slow
def test_tables_end_as_texts_do_at_a_closed_pipe() -> None:
    pipe, closed = os.pipe()
    os.close(pipe)
    command = [sys.executable, "-m", "quire.cli.main", "doctor", "--no-measure"]
    with open(closed, "wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_stdout_is_told(saved: Path) -> None:
    command = f"{sys.executable} -m quire.cli.main inspect {saved} --json >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (2, b"quire: output cannot be written: stdout is closed\n")


@pytest.mark.parametrize(
    ("closed", "told"), [("<&-", b"quire: the prompt is empty; give at least one token\n"), ("2>&-", b"")]
)
def test_a_closed_stdin_or_stderr_is_a_silent_one(closed: str, told: bytes) -> None:
    command = f"{sys.executable} -m quire.cli.main generate - --dtype float32 {closed}"
    done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", told)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["models"], marks=pytest.mark.slow),
        ["--version"],
        pytest.param(["generate", "x = 1\n", "--max-tokens", "2", "--dtype", "float32"], marks=pytest.mark.slow),
    ],
)
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    """Whether it fails while printing or in the last flush: one sentence."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "quire.cli.main", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 2
    assert done.stderr == b"quire: output cannot be written: No space left on device\n"


def test_a_calibration_is_there_for_later_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.py"
    text.write_text("def area(width, height):\n    return width * height\n\n" * 20)
    options = ["--dtype", "float32", "--kv-cache-memory", "16MiB"]
    kept = [*options, "--state-dir", str(tmp_path / "state")]
    asked = ["calibrate", "tiny-python", "--probes", "1", "--texts", str(text)]
    assert run(*asked, *options, monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "not kept; give --state-dir" in out
    assert "mean KL" in out
    assert run("capabilities", "--model", "tiny-python", *kept, monkeypatch=monkeypatch) == 0
    assert "blending: not calibrated" in capsys.readouterr().out
    assert run(*asked, *kept, "--json", monkeypatch=monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("kept")
    assert (found["probes"], found["sampled"]) == (1, False)
    assert run("capabilities", "--model", "tiny-python", *kept, "--json", monkeypatch=monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["blend_calibration"] == found
    assert run("capabilities", "--model", "tiny-python", *kept, monkeypatch=monkeypatch) == 0
    assert f"checked at layer {found['layer']}; 1 probes at a ratio of 0.3" in capsys.readouterr().out
    assert run("calibrate", "--texts", str(tmp_path / "no"), monkeypatch=monkeypatch) == 2
    assert "--texts: " in capsys.readouterr().err


def test_what_the_engine_refuses_is_refused(llm: LLM) -> None:
    """Each line of the engine's table, provoked."""
    from collections.abc import Callable

    from quire import Unsupported

    calls: dict[str, list[Callable[[], object]]] = {
        "LLM(quantization='awq')": [lambda: LLM("tiny-python", quantization="awq")],
        "LLM(trust_remote_code=True)": [lambda: LLM("tiny-python", trust_remote_code=True)],
    }
    assert set(calls) == set(llm.capabilities()["engine"])
    for refused in calls.values():
        for call in refused:
            with pytest.raises(Unsupported):
                call()
