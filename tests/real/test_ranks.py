"""A real model divided among processes: the texts and the state files of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams

PROMPTS = ["def quicksort(items):\n", "The three largest cities of France are", "# A parser of INI files\nclass "]
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def texts(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def divided(file: Path, slices: int, stages: int) -> LLM:
    sizes = {"tensor_parallel_size": slices, "pipeline_parallel_size": stages}
    return LLM(str(file), dtype="float32", kv_cache_memory="128MiB", max_model_len=1024, **sizes)


@pytest.mark.parametrize(("slices", "stages"), [(2, 1), (2, 2)])
def test_slices_write_the_texts_of_one_process(file: Path, llm: LLM, slices: int, stages: int) -> None:
    with divided(file, slices, stages) as found:
        assert texts(found) == texts(llm)


def test_stages_write_the_texts_and_the_files_of_one_process(file: Path, llm: LLM, tmp_path: Path) -> None:
    with divided(file, 1, 2) as found:
        assert texts(found) == texts(llm)
        with found.session(PROMPTS[0]) as session:
            session.save(tmp_path / "first.kv")
            expected = session.generate(GREEDY).outputs[0].token_ids
    with llm.load_session(tmp_path / "first.kv") as session:
        session.save(tmp_path / "second.kv")
        assert session.generate(GREEDY).outputs[0].token_ids == expected
    assert (tmp_path / "second.kv").read_bytes() == (tmp_path / "first.kv").read_bytes()
