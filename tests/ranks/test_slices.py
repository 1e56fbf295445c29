"""Models whose layers slices divide, of every family: each session continues as a fresh run by
transformers would, whatever happened; state files are those of one process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks.test_stages import MORE
from tests.ranks.thread_ranks import thread_ranks  # noqa: F401
from tests.sessions import test_family_conversations as families
from tests.sessions.test_conversations import run
from tests.small_llms import Checkpoint, MakeLLM, greedy, make_family, random_tokens
from tests.test_parity import FAMILIES

pytestmark = pytest.mark.usefixtures("thread_ranks")

QUICK = {"deepseek-v3", "mamba2", "falcon-h1", "gemma3n", "gemma4-moe", "lfm3", "olmo2", "qwen3-next", "qwen3.5"}
"""Latent rows, recurrent layers alone, beside and between attention, norms and cutoffs over what is
divided, experts, rows of another layer."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(FAMILIES)],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family(request.param, tmp_path_factory.mktemp(request.param), **MORE.get(request.param, {}))


def in_slices(make_llm: MakeLLM, **sizes: int) -> MakeLLM:
    return partial(make_llm, **{"tensor_parallel_size": 2, **sizes})


def test_conversations(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    run(in_slices(make_llm), family, 5, 16, tmp_path, **families.sizes(family, make_llm))
