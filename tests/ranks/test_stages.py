"""Models whose blocks pipeline stages divide, of every family: each session continues as a fresh
run by transformers would, whatever happened.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ranks.thread_ranks import thread_ranks  # noqa: F401
from tests.sessions import test_family_conversations as families
from tests.sessions.test_conversations import run
from tests.small_llms import Checkpoint, MakeLLM, make_family
from tests.test_parity import FAMILIES, GEMMA3N

pytestmark = pytest.mark.usefixtures("thread_ranks")

QUICK = {"deepseek-v3", "mamba2", "falcon-h1", "gpt-oss", "gemma3n"}
"""Latent rows, recurrent layers alone and beside attention, experts and sinks, rows of another
layer."""

MORE: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention", *GEMMA3N["layer_types"]],
        "activation_sparsity_pattern": [0.0, *GEMMA3N["activation_sparsity_pattern"]],
    },
    "gemma4": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", *["full_attention", "sliding_attention"] * 2, "full_attention"],
    },
}
"""A block that shares its K and V with none."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(FAMILIES)],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family(request.param, tmp_path_factory.mktemp(request.param), **MORE.get(request.param, {}))


def in_stages(make_llm: MakeLLM, **sizes: int) -> MakeLLM:
    return partial(make_llm, **{"pipeline_parallel_size": 2, **sizes})


def test_conversations(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    known = families.sizes(family, make_llm)
    run(in_stages(make_llm), family, 5, 24, tmp_path, **known)
