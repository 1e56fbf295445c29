"""Models whose blocks pipeline stages divide, of every family: each session continues as a fresh
run by transformers would, whatever happened.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.ranks.thread_ranks import thread_ranks  # noqa: F401
from tests.sessions import test_family_conversations as families
from tests.sessions.test_conversations import run
from tests.small_llms import Checkpoint, MakeLLM, greedy, make_family, random_tokens
from tests.test_parity import FAMILIES, GEMMA3N, SIZES

from quire import LLM
from quire.base.errors import RanksBroken, Unsupported
from quire.contracts.ranks import Grid
from quire.models.families import family_of
from quire.models.stages import check_stages, owners_of, ranges_of
from quire.runner import micro_batches, torch_group
from quire.runner.torch_group import TorchLine
from quire.weights.places import Place

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
"""Of two families a block more, which shares its K and V with none."""


DIVIDED = ("llama", "gemma3", "gpt-oss", "qwen3-moe", "mistral-window", "granite")
SLICED: dict[str, dict[str, Any]] = {}
"""Fields with which the heads divide."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(FAMILIES)],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_family(request.param, tmp_path_factory.mktemp(request.param), **MORE.get(request.param, {}))


@pytest.fixture
def tiny_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of six tokens and more are cut."""
    monkeypatch.setattr(micro_batches, "LEAST_ROWS", 3)


def in_stages(make_llm: MakeLLM, **sizes: int) -> MakeLLM:
    return partial(make_llm, **{"pipeline_parallel_size": 2, **sizes})


@pytest.mark.usefixtures("tiny_batches")
def test_conversations(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    run(in_stages(make_llm), family, 5, 16, tmp_path, **families.sizes(family, make_llm))


@pytest.mark.turns(8)
def test_conversations_with_a_history(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    """Over a store; pages are of another size than those of one process."""

    def make(checkpoint: Checkpoint, **options: Any) -> LLM:
        """The sizes are those of all layers."""
        staged = options["kv_cache_memory"] != "4MiB"
        return (in_stages(make_llm) if staged else make_llm)(checkpoint, **options)

    families.committed(make, family, 6, 12, tmp_path)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(one, marks=() if one == "gpt-oss" else pytest.mark.slow) for one in DIVIDED],
)
def test_conversations_of_four_ranks(
    make_llm: MakeLLM, kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two stages of two slices each."""
    family = make_family(kind, tmp_path_factory.mktemp(kind), num_attention_heads=4, **SLICED.get(kind, {}))
    known = families.sizes(family, make_llm)
    run(in_stages(make_llm, tensor_parallel_size=2), family, 7, 16, tmp_path, **known)


# -- one state, any layout -------------------------------------------------------------------------


def memory(llm: LLM, tokens: list[int], path: Path) -> tuple[bytes, list[int]]:
    """The state file of tokens, and what follows."""
    with llm.session(tokens) as session:
        session.save(path)
        return path.read_bytes(), session.generate(greedy(6)).outputs[0].token_ids


def test_files_of_stages_are_those_of_one_process(make_llm: MakeLLM, family: Checkpoint, tmp_path: Path) -> None:
    """To the byte: blocks run as they do in one process, whatever the pages."""
    tokens = random_tokens(40)
    one, two = make_llm(family, page_size=4), in_stages(make_llm)(family, page_size=8)
    (expected, after), (found, followed) = (
        memory(llm, tokens, tmp_path / f"{number}.kv") for number, llm in enumerate((one, two))
    )
    assert followed == after
    assert found == expected
    for llm in (two, one):
        with llm.load_session(tmp_path / "0.kv") as session:
            session.save(tmp_path / "again.kv")
            assert (tmp_path / "again.kv").read_bytes() == expected
            assert session.generate(greedy(6)).outputs[0].token_ids == after


def test_layers_of_all_stages_are_read_and_written(make_llm: MakeLLM, family: Checkpoint) -> None:
    tokens, found = random_tokens(20), list[Any]()
    for llm in (make_llm(family), in_stages(make_llm)(family)):
        seen: list[Any] = []
        with llm.session(tokens) as session:
            session.generate(greedy(2))
            layers = range(len(llm.model.layer_specs))
            for layer in (0, layers[-1]):
                tensors = {name: tensor for name, tensor in session.kv(layer).items() if name != "positions"}
                if "state_0" in tensors:
                    session.set_kv(layer, **{name: tensor * 2 for name, tensor in tensors.items()})
                else:
                    last = len(session) - 1
                    session.set_kv(layer, start=last - 2, **{name: rows[-3:-1] * 2 for name, rows in tensors.items()})
            seen += [session.kv(layer) for layer in layers]
            seen.append(session.generate(greedy(4)).outputs[0].token_ids)
        found.append(seen)
    *ours, texts = found[1]
    *theirs, expected = found[0]
    assert texts == expected
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


# -- the blocks of each stage ----------------------------------------------------------------------


def config_of(kind: str, **changes: Any) -> Any:
    name, fields = FAMILIES[kind]
    config = getattr(transformers, f"{name}ForCausalLM").config_class(**{**SIZES, **fields, **changes})
    values = {**config.to_dict(), "architectures": [f"{name}ForCausalLM"]}
    return family_of(values).read_config(values, None)


def test_blocks_that_share_k_and_v_are_in_one_stage() -> None:
    config = config_of("gemma3n")
    assert set(owners_of(config, [range(6)])) == {0, 1, 2}
    with pytest.raises(Unsupported, match="blocks 0 to 5 share K and V and are one stage; give 1 at most"):
        check_stages(config, 2)
    check_stages(config_of("gemma3n", **MORE["gemma3n"]), 2)


def test_the_largest_stage_is_as_small_as_possible() -> None:
    """The head is as large as two blocks, and the first block as two others."""
    config = config_of("llama", num_hidden_layers=7, tie_word_embeddings=False, hidden_size=48)
    places = {
        "embed": Place(parameter="embed.weight", shape=(10, 1)),
        "head": Place(parameter="head.weight", shape=(200, 1)),
    }
    for block in range(7):
        places[str(block)] = Place(parameter=f"{block}.x", shape=(200 if block == 0 else 100, 1))
    # 310, 300 and 400; a block more in the first stage makes 410.
    assert ranges_of(config, 3, places) == [range(2), range(2, 5), range(5, 7)]
    assert ranges_of(config, 1, places) == [range(7)]
    assert [len(one) for one in ranges_of(config, 7, places)] == [1] * 7


def test_a_peer_that_is_known_to_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo raises when a receive begins, not when it is waited for."""

    class Gone:
        def recv(self, *_: object) -> None:
            raise RuntimeError("Connection closed by peer")

        send = recv

    monkeypatch.setattr(torch_group, "_group_of", lambda *_: Gone())
    line = TorchLine(1, Grid(stages=3), torch.device("cpu"), tmp_path / "store")
    for call in (lambda: line.receive(1), lambda: line.fetch(1), lambda: line.send(torch.zeros(1, 2))):
        with pytest.raises(RanksBroken, match="load the model again"):
            call()
