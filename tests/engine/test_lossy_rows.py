"""An engine that keeps K and V in 8 bits: the suites of files, stores and sessions, compared with
transformers over a cache that rounds in the same way.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import small_llms
from tests.adapters.test_named_adapters import directories as directories
from tests.branches import test_stored_files, test_stored_state
from tests.branches.test_stored_files import directory as directory
from tests.branches.test_stored_files import family as family
from tests.branches.test_stored_files import redis as redis
from tests.branches.test_stored_files import start as start
from tests.branches.test_stored_state import hybrid as hybrid
from tests.int8_rows import kept_in_int8, rounded, suites
from tests.sessions import test_history, test_saved, test_sessions
from tests.sessions.test_history import model as model
from tests.sessions.test_history import stored as stored
from tests.small_llms import Checkpoint, MakeLLM, assert_near, engine_of, greedy, make_family, random_tokens

from quire import LLM, Unsupported
from quire.base import config
from quire.store.files import FileTier
from quire_inspector.files.file_snapshot import file_snapshot
from quire_inspector.files.store_snapshot import store_snapshot

SUITES = (
    test_history,
    test_saved,
    test_sessions,
    test_stored_files,
    test_stored_state,
)


@pytest.fixture(autouse=True)
def int8(checkpoints: dict[str, Checkpoint]) -> Iterator[pytest.MonkeyPatch]:
    """Everything is kept in this format, until a test undoes it."""
    with kept_in_int8() as patch:
        for module in (small_llms, test_history, test_stored_state):
            patch.setattr(module, "BYTES_PER_TOKEN", 2 * 2 * 2 * (16 + 1))
        for one in checkpoints.values():
            patch.setattr(one, "known", {})
        yield patch


OTHER = {
    # They convert a file from one dtype to another.
    "test_dtype",
    "test_another_dtype_stays_approximate",
    "test_a_session_that_is_not_exact_is_dropped",
    # They count bytes of plain rows.
    "test_a_branch_stores_its_own_objects_only",
    "test_a_full_store",
    # Their oracles are in float64, where a number may be rounded to the next code.
    "test_hybrids_are_cut_at_kept_states",
    "test_long_conversations",
}
LONG = {
    "test_a_move_that_fails_is_computed_again",
    "test_adapters",
    "test_an_idle_hybrid_comes_back_to_the_bit",
    "test_chats",
    "test_conversations",
    "test_costs_are_measured_as_it_runs",
    "test_killed_a_hundred_times",
    "test_killed_at_random_moments",
    "test_preempted_hybrids_come_back",
    "test_random_conversations_in_a_tight_pool",
    "test_random_conversations_with_few_states",
    "test_random_histories_and_collections",
    "test_the_budget_is_kept",
}
"""Tests of which a format changes nothing that shorter ones do not show."""

globals().update(suites(*SUITES, without=OTHER | LONG, turn=0))


# -- what is chosen and shown ----------------------------------------------------------------------


def test_a_format_is_chosen_by_its_name(
    make_llm: MakeLLM, llama: Checkpoint, int8: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line in ``KV_FORMATS`` makes a class a value of ``kv_dtype``. The log says that no kernel
    reads it."""
    int8.undo()
    with pytest.raises(Unsupported, match="kv_dtype='int8' is not supported by this release; accepted: one of 'auto'"):
        make_llm(llama, kv_dtype="int8")
    int8.setitem(config.KV_FORMATS, "int8", "tests.int8_rows")
    with caplog.at_level(logging.WARNING, "quire"):
        llm = make_llm(llama, kv_dtype="int8", pool=64)
    (said,) = [one.getMessage() for one in caplog.records if "attention" in one.getMessage()]
    assert said.endswith("these are 'int8'; the reference attention computes, which is exact and slow")
    assert "in int8" in " ".join(llm.capabilities()["notes"])
    state = engine_of(llm).runner.state
    assert state.get_layout()["layers"][0]["format"] == "int8"
    assert state.capacity == 64 * 16 * 4 // (16 + 1) // 16 * 16
    plain = make_llm(llama)
    session = llm.session(random_tokens(30))
    assert_near(session.kv(0)["k"], plain.session(random_tokens(30)).kv(0)["k"], 1 / 127)
    assert session.generate(greedy(3)).outputs[0].token_ids


def test_views_show_numbers(small: LLM, llama: Checkpoint) -> None:
    """Rows, norms, weights and the heat map are of the numbers that the format keeps."""
    tokens = random_tokens(30)
    peer = copy.deepcopy(llama.model)
    peer.set_attn_implementation("eager")
    with torch.inference_mode():
        out = peer(torch.tensor([tokens]), use_cache=True, output_attentions=True)
    session = small.session(tokens)
    session.generate(greedy(1))
    for layer, held in enumerate(out.past_key_values.layers):
        rows, norms = session.kv(layer), session.norms(layer).norms
        for name, wanted in (("k", held.keys[0]), ("v", held.values[0])):
            assert_near(rows[name][:30], wanted.transpose(0, 1))
            # float32 sums of 16 squares in another order
            np.testing.assert_allclose(norms[name][:30], rows[name][:30].norm(dim=-1), rtol=1e-5)
        weights = out.attentions[layer][0]
        assert_near(torch.from_numpy(session.attention(20, layer).weights), weights[:, 20, :21])
        heat = session.heat(layer=layer, queries=11)
        assert_near(torch.from_numpy(heat.values)[:10, :30], weights.mean(0)[20:])
        of_keys = session.heat(layer=layer, what="k").values
        # float32 sums of 16 squares in another order
        np.testing.assert_allclose(of_keys.T[:30], rows["k"][:30].norm(dim=-1), rtol=1e-5)


def test_norms_of_files_are_of_numbers(
    make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path, int8: pytest.MonkeyPatch
) -> None:
    """A file names its format; an object of a store does not, and is refused."""
    int8.setitem(config.KV_FORMATS, "int8", "tests.int8_rows")
    llm = make_llm(llama, store=[f"file://{tmp_path}/store"])
    session = llm.session(random_tokens(200))
    session.save(tmp_path / "state.quire")
    wanted, held = session.norms(1), file_snapshot(tmp_path / "state.quire")
    found = asyncio.run(held.norms(held.branch("session:0"), 1))
    assert found.positions.tolist() == wanted.positions.tolist()
    for name, norms in found.norms.items():
        # float32 sums of 16 squares in another order
        np.testing.assert_allclose(norms, wanted.norms[name], rtol=1e-5)
    session.commit("main")
    said = "layer 1 is stored in tensors codes, exponents, and the file names no format of this release"

    async def norms_of_the_store() -> None:
        tier = FileTier(tmp_path / "store", None)
        try:
            (branch,) = (kept := await store_snapshot(tier)).branches
            await kept.norms(branch, 1)
        finally:
            await tier.close()

    with pytest.raises(Unsupported, match=said):
        asyncio.run(norms_of_the_store())
    int8.delitem(config.KV_FORMATS, "int8")
    with pytest.raises(Unsupported, match=said):
        asyncio.run(held.norms(held.branch("session:0"), 1))


def test_latent_rows(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Forks, rewinds and files keep every bit of what was rounded."""
    llm, tokens = make_llm(make_family("deepseek-v2-lite", tmp_path / "model"), page_size=4), random_tokens(45)
    session = llm.session(tokens)
    wanted, rows = session.logits(), session.kv(1)["latent"]
    assert torch.equal(rows, torch.cat([rounded(part) for part in rows.tensor_split([24], -1)], -1))
    with session.fork() as child, llm.session_from_bytes(session.to_bytes()) as loaded:
        child.append(random_tokens(9))
        child.compute()
        child.rewind(to=45)
        for one in (child, loaded):
            assert torch.equal(one.logits(), wanted)
            assert torch.equal(one.kv(1)["latent"], rows)
        child.set_kv(1, start=40, latent=2 * rows[40:])
        assert torch.equal(child.kv(1)["latent"], torch.cat((rows[:40], 2 * rows[40:])))
    assert torch.equal(session.kv(1)["latent"], rows)
