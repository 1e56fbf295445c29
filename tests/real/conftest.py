"""The models in ``QUIRE_REAL_MODELS``, the name of a directory, loaded once for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM

FOLDER = os.environ.get("QUIRE_REAL_MODELS", "")
FILES = sorted(one for one in Path(FOLDER).glob("*.gguf") if one.with_suffix("").is_dir()) if FOLDER else []
REASON = "QUIRE_REAL_MODELS names no directory with NAME.gguf and NAME/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        # Comparing all parents of a path takes longer than all other hooks for 30,000 items.
        if item.path.parent == here:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.timeout(3000))
            item.add_marker(pytest.mark.skipif(not FILES, reason=REASON))


@pytest.fixture(scope="session", params=FILES or [Path("none.gguf")], ids=lambda path: path.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="session")
def llm(file: Path) -> Iterator[LLM]:
    """The file in float32: weights in its blocks."""
    with LLM(str(file), dtype="float32", kv_cache_memory="512MiB", max_model_len=4096) as found:
        yield found


@pytest.fixture(scope="session")
def theirs(file: Path) -> Any:
    """``transformers`` in float32, which expands the file's blocks."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="session")
def instructed(file: Path, llm: LLM) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer of ``transformers`` with the model's chat template; skips models without."""
    found: Any = transformers.AutoTokenizer.from_pretrained(file.with_suffix(""))
    if not found.chat_template:
        pytest.skip(f"{file.stem} has no chat template")
    return found  # type: ignore[no-any-return]
