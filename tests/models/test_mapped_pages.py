"""Pages of a checkpoint's files, which are dropped while a model is loaded."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.build import layer_kernels
from quire.kernels.native_library import native_problem
from quire.models.loading import load_model
from quire.weights import mapped_pages
from quire.weights.safetensors_files import SINGLE_FILE, SafetensorsFiles

from .conftest import Case, make_checkpoint
from .quantized_writer import awq, write_quantized
from .test_quantized import AWQ

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are dropped on Linux"),
    pytest.mark.skipif(bool(native_problem()), reason="the C++ library was not built"),
]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 1024, "num_hidden_layers": 2}
CASES = (Case("pages", "Qwen3", SIZES), Case("pages-tied", "Qwen3", {**SIZES, "tie_word_embeddings": True}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("how", ["float32", "bfloat16", "int4", "awq"])
def test_each_page_that_was_read_is_dropped(
    case: Case, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model's end of loading, but for a page at each end of a tensor: packed from the file,
    copied, quantised, or made of codes."""
    path, dropped = make_checkpoint(case, tmp_path / "model").path, list[tuple[int, int]]()
    if how == "awq":
        path, _ = write_quantized(path, tmp_path, awq(32), AWQ)
    advise = mapped_pages._advise()

    def counted(start: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> Any:
        assert start.value
        dropped.append((start.value, start.value + size.value))
        return advise(start, size, advice)

    monkeypatch.setattr(mapped_pages, "_advise", lambda: counted)
    monkeypatch.setattr(mapped_pages, "LEAST", 1)
    kernels = layer_kernels(torch.device("cpu"), "int4" if how == "int4" else None)
    load_model(path, dtype="bfloat16" if how == "bfloat16" else "float32", kernels=kernels)
    pages = {page for start, stop in dropped for page in range(start, stop, mmap.PAGESIZE)}
    stored = load_file(path / SINGLE_FILE).values()
    assert len(pages) >= sum(tensor.nbytes // mmap.PAGESIZE - 1 for tensor in stored if tensor.nbytes > mmap.PAGESIZE)


def test_memory_that_is_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SafetensorsFiles(make_checkpoint(CASES[0], tmp_path / "model").path)
    mapped = files.read("model.embed_tokens.weight")
    copy = mapped.clone()
    assert mapped_pages.drop_pages(mapped) == 0
    monkeypatch.setattr(mapped_pages, "LEAST", 1)
    assert mapped_pages.drop_pages(copy) == 0
    assert mapped.nbytes - 2 * mmap.PAGESIZE < mapped_pages.drop_pages(mapped) <= mapped.nbytes
    assert mapped_pages.drop_pages(mapped.T) == 0
    assert mapped_pages.drop_pages(mapped[:1]) == 0
    assert torch.equal(mapped, copy)


def test_what_was_written_into_a_private_map_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_pages, "LEAST", 1)
    (tmp_path / "values").write_bytes(bytes(1 << 16))
    mapped = torch.from_file(str(tmp_path / "values"), shared=False, size=1 << 14, dtype=torch.float32)
    assert mapped_pages.drop_pages(mapped) == mapped.nbytes
    mapped[7000] = 1.0
    assert mapped_pages.drop_pages(mapped) == 0
    assert mapped[7000] == 1.0
    assert mapped_pages.drop_pages(mapped[:4096]) == 4096 * 4
