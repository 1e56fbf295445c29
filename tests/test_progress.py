"""How far prompts have come: on a terminal, or where it is asked for."""

from __future__ import annotations

import io
import re
import sys
from functools import partial

import pytest
from tqdm import tqdm

from quire import LLM, SamplingParams, cli

LONG = "x = 1\n" * 40
"""120 tokens, which take several steps of 32."""
GREEDY = SamplingParams(temperature=0, max_tokens=2)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny-python", dtype="float32", kv_cache_memory="32MiB", max_num_batched_tokens=32)


def shown(llm: LLM, monkeypatch: pytest.MonkeyPatch, *prompts: str, stderr: io.StringIO, **options: bool) -> str:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        # Another salt each time, so that nothing is cached.
        llm.generate(list(prompts), GREEDY, cache_salt=str(id(stderr)), **options)
    return stderr.getvalue()


def test_a_long_prompt_shows_its_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    total = len(llm.tokenizer.encode(LONG))
    assert total > 96
    text = shown(llm, monkeypatch, LONG, stderr=Terminal())
    done = [int(found) for found in re.findall(rf"prompt tokens (\d+)/{total}", text)]
    assert done == sorted(done)
    assert {32, 64, 96} <= set(done) < {*range(0, total, 32)}
    last = text.rstrip().rpartition("\r")[2]
    assert "1/1" in last
    assert "prompt tokens" not in last


def test_of_several_prompts_all_tokens_count(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    total = sum(len(llm.tokenizer.encode(text)) for text in (LONG, "y = 2\n" * 20))
    text = shown(llm, monkeypatch, LONG, "y = 2\n" * 20, stderr=io.StringIO(), use_tqdm=True)
    done = [int(found) for found in re.findall(rf"prompt tokens (\d+)/{total}", text)]
    assert done[-1] > total - 32
    assert "2/2" in text


def test_nothing_is_shown_where_nobody_looks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(llm, monkeypatch, LONG, stderr=io.StringIO()) == ""
    assert shown(llm, monkeypatch, LONG, LONG, stderr=io.StringIO()) == ""
    assert shown(llm, monkeypatch, "x = 1", stderr=Terminal()) == ""
    assert shown(llm, monkeypatch, LONG, LONG, stderr=Terminal(), use_tqdm=False) == ""


def generate(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> str:
    options = ["--temperature", "0", "--max-tokens", "2", "--dtype", "float32", "--kv-cache-memory", "32MiB"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        patch.setattr("quire.progress.tqdm", partial(tqdm, mininterval=0))
        cli.app(["generate", LONG, "--max-num-batched-tokens", "32", *options], standalone_mode=False)
    return stderr.getvalue()


def test_the_command_shows_the_prompt_and_writes_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Prompt" not in generate(monkeypatch, io.StringIO())
    out = capsys.readouterr().out
    err = generate(monkeypatch, Terminal())
    assert capsys.readouterr().out == out
    assert re.search(r"Prompt: +\d+%.* 64/200 \[", err), err
    assert "tok/s" in err.rpartition("\r")[2]
