"""A format of K and V is one class: ``SwappedPairs`` is in this file, and no other code knows it.

The suites of states, files and stores run once more over it. Attention is the reference's, which
reads every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.adapters.test_named_adapters import directories as directories
from tests.branches import test_stored_files
from tests.branches.test_stored_files import directory as directory
from tests.branches.test_stored_files import family as family
from tests.branches.test_stored_files import redis as redis
from tests.branches.test_stored_files import start as start
from tests.int8_rows import suites
from tests.kv import (
    test_cross,
    test_forward,
    test_isolation,
    test_latent,
    test_layer_windows,
    test_masks,
    test_narrowing,
    test_pieces,
    test_rehearsal,
    test_snapshots,
    test_trees,
    test_window_values,
    test_windows,
)
from tests.kv.test_pieces import threads as threads
from tests.sessions import test_saved
from tests.small_llms import Checkpoint, MakeLLM, engine_of, greedy, random_tokens
from torch import Tensor

from quire import LLM, InvalidArgument, Unsupported
from quire.base import config
from quire.contracts.attention import Scoring
from quire.contracts.kv_format import Geometry, KVFormat, PlainRows, Plane
from quire.contracts.layers import FullAttention, LatentAttention
from quire.contracts.rows import RowKernels
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.rows.cpu_rows import native_rows
from quire.kernels.rows.triton_rows import TritonRows
from quire.kv import state as kv_state
from quire.kv.formats.plain import PlainFormat
from quire.kv.state import State
from quire.kv.storage import PagedStorage, bytes_per_token
from quire.ops.attention import ReferenceAttention
from quire.ops.rows import REFERENCE_ROWS


@dataclass(frozen=True, slots=True)
class SwappedPairs(KVFormat):
    """K and V of a token side by side in one plane of bytes, of which each pair is swapped."""

    name: ClassVar[str] = "swapped"
    dtype: torch.dtype

    def planes(self, shape: Geometry) -> Mapping[str, Plane]:
        width = shape.key_dim + (0 if shape.latent else shape.value_dim)
        return {"pairs": Plane((shape.kv_heads, width * self.dtype.itemsize), torch.uint8)}

    def pack(self, shape: Geometry, k_NHD: Tensor, v_NHD: Tensor | None) -> Mapping[str, Tensor]:
        rows = k_NHD if v_NHD is None else torch.cat((k_NHD, v_NHD), -1)
        return {"pairs": _swapped(rows.contiguous().view(torch.uint8))}

    def expand(self, shape: Geometry, planes: Mapping[str, Tensor]) -> PlainRows:
        rows = _swapped(planes["pairs"]).view(self.dtype)
        k = rows[..., : shape.key_dim].contiguous()
        return PlainRows(k, k[..., : shape.value_dim] if shape.latent else rows[..., shape.key_dim :].contiguous())


def _swapped(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@pytest.fixture(autouse=True)
def swapped() -> Iterator[pytest.MonkeyPatch]:
    """All states keep K and V in this format, until a test undoes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_state, "PlainFormat", SwappedPairs)
        for name in config.KV_FORMATS:
            patch.setitem(config.KV_FORMATS, name, __name__)
        yield patch


# -- the suites ------------------------------------------------------------------------------------


STATES = (
    test_cross,
    test_forward,
    test_isolation,
    test_latent,
    test_layer_windows,
    test_masks,
    test_narrowing,
    test_pieces,
    test_rehearsal,
    test_snapshots,
    test_trees,
    test_window_values,
    test_windows,
)
FILES = (test_saved, test_stored_files)
PLAIN = {
    # They name the tensors of plain rows in exports.
    "test_export_and_import",
    "test_export_into_given_tensors",
    "test_imports_that_do_not_fit",
    "test_export_round_trip",
    "test_state_file_round_trip",
    "test_malformed_calls",
    "test_windows_far_out",
    "test_positions_that_are_far_out",
    "test_rows_go_where_their_pages_are",
    "test_what_an_import_under_way_refuses",
    "test_a_forward_waits_for_layers_or_refuses_them",
    "test_a_pass_calls_whoever_waits_for_a_layer",
    "test_metadata_name_exactly_what_goes_on",
    "test_pages_stay_while_a_row_is_written",
    "test_an_import_that_has_begun_anew_takes_no_rows_of_the_old_one",
    # They look into the pool of a layer.
    "test_each_piece_is_checked_right_before_it_is_written",
    "test_rows_behind_the_last_one_are_zero",
    # They convert a file from one dtype to another.
    "test_state_file",
    "test_dtype",
    # They watch a kernel that reads plain rows only.
    "test_layers_of_as_many_rows_share_a_plan",
    "test_form_of_each_batch",
}
"""Tests that are about plain rows."""
LONG = {
    "test_every_chunking_gives_the_same_rows",
    "test_any_rows_of_any_batch",
    "test_any_rows_of_any_entries",
    "test_killed_at_random_moments",
    "test_killed_a_hundred_times",
}
"""Tests of which a format changes nothing that shorter ones do not show."""
SLOW = {
    "test_a_tree_is_all_its_paths",
    "test_a_tree_of_five_forwards",
    "test_an_export_is_read_while_others_write",
    "test_chunks_of_up_to_four_windows",
    "test_conversations",
    "test_damaged_files_are_misses",
    "test_every_chunking_of_twelve_tokens",
    "test_fork_and_pop_at_every_position",
    "test_forks_of_windowed_parents",
    "test_latent_rows",
    "test_long_chunks",
    "test_many_rows",
    "test_pieces_make_what_an_import_makes",
    "test_prompts_in_pieces_mixed_with_decodes",
    "test_prompts_pieces_and_decodes",
    "test_random_masks",
    "test_random_stories",
    "test_refused_without_a_trace",
    "test_rows_come_while_others_change",
    "test_trees_over_several_forwards",
    "test_types_and_head_sizes",
    "test_types_head_sizes_and_modes",
}
"""Tests whose many cases run with the slow ones: in each suite shorter ones remain."""


globals().update(suites(*STATES, *FILES, without=PLAIN | LONG, turn=1, slow=SLOW))


# -- what a format decides -------------------------------------------------------------------------

FULL = FullAttention(num_heads=4, num_kv_heads=2, head_dim=3, value_dim=5)
LATENT = LatentAttention(num_heads=4, row_dim=10, value_dim=6)
CPU = torch.device("cpu")


def filled(format: KVFormat, **options: Any) -> tuple[State, Tensor, Tensor]:
    """A state of two kinds of layers with seven tokens, and K and V of the first."""
    state, draw = State([FULL, LATENT], capacity=16, page_size=4, format=format, **options), torch.Generator()
    k, v, rows = (torch.randn(7, *size, generator=draw.manual_seed(1)) for size in ((2, 3), (2, 5), (10,)))
    k, v, rows = (x.to(format.dtype) for x in (k, v, rows))
    state.add_sequence(0)
    state.begin_forward([0], [7])
    state.open_pass().append(0, k, v)
    state.open_pass().append_rows(1, rows)
    state.end_forward()
    return state, k, v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_planes_in_exports(dtype: torch.dtype) -> None:
    state, k, v = filled(SwappedPairs(dtype))
    plain, *_ = filled(PlainFormat(dtype))
    export = state.open_export(0)
    planes = export.rows(0, 2, 7)
    assert {name: (one.shape, one.dtype) for name, one in planes.items()} == {
        "pairs": ((5, 2, 8 * dtype.itemsize), torch.uint8)
    }
    assert torch.equal(planes["pairs"][..., 0], k[2:].contiguous().view(torch.uint8)[..., 1])
    found = export.plain_rows(0, 2, 7)
    assert list(found) == ["k", "v"]
    assert torch.equal(found["k"], k[2:])
    assert torch.equal(found["v"], v[2:])
    assert torch.equal(export.plain_rows(1, 0, 7)["latent"], plain.open_export(0).rows(1, 0, 7)["latent"])
    group = state.get_checkpoint_metadata(0)["groups"][0]["tensors"]["pairs"]
    assert (group["shape"], group["bytes"]) == ([7, 2, 8 * dtype.itemsize], 7 * 2 * 8 * dtype.itemsize)


def test_layouts_name_the_format() -> None:
    """But for plain rows, whose files and hashes are older than formats."""
    state, plain = (
        State([FULL], capacity=4, format=one) for one in (SwappedPairs(torch.float16), PlainFormat(torch.float16))
    )
    assert state.get_layout()["layers"][0]["format"] == "swapped"
    assert "format" not in plain.get_layout()["layers"][0]
    assert state.get_layout_hash() != plain.get_layout_hash()
    for one, other, found, wanted in ((state, plain, "None", "'swapped'"), (plain, state, "'swapped'", "None")):
        with pytest.raises(InvalidArgument, match=f"layer 0 has format {found}, expected {wanted}"):
            one.prepare_import(0, other.import_metadata(3))


def test_bytes_are_asked_of_the_format() -> None:
    class Wide(SwappedPairs):
        def planes(self, shape: Geometry) -> Mapping[str, Plane]:
            return {**super().planes(shape), "scale": Plane((3,), torch.float16)}

    assert bytes_per_token([FULL, LATENT], SwappedPairs(torch.float32)) == (16 + 10) * 4
    assert bytes_per_token([FULL, LATENT], Wide(torch.float32)) == (16 + 10) * 4 + 12
    state = State([FULL], capacity=16, page_size=4, format=Wide(torch.float32))
    assert state.geometry.page_bytes == (4 * (64 + 6),)
    assert state.num_bytes == 16 * (64 + 6)


def test_kernels_of_plain_rows_refuse_others_by_name() -> None:
    backend = SdpaAttention()
    assert backend.refusal(FULL, CPU, "plain") == ""
    reason = "the torch attention reads rows of the format 'plain'; these are 'swapped'"
    assert backend.refusal(FULL, CPU, "swapped") == reason
    assert ReferenceAttention().refusal(FULL, CPU, "swapped") == ""
    state, *_ = filled(SwappedPairs(torch.float32), backend=backend)
    assert state.parts.paged.backend.name == "reference"
    assert filled(PlainFormat(torch.float32), backend=backend)[0].parts.paged.backend is backend
    state.begin_forward([0], [1])
    prepared = backend.plan(state.open_pass().prepared("fused", 0).plan, torch.float32)
    with pytest.raises(Unsupported, match=reason):
        backend.run(prepared, torch.zeros(1, 4, 3), None, state.parts.layer(0).view, Scoring(1.0))
    state.abort_forward()


def test_a_dtype_beside_a_format() -> None:
    with pytest.raises(InvalidArgument, match=r"dtype torch\.float32 and format 'swapped'"):
        State([FULL], capacity=4, format=SwappedPairs(torch.float32), dtype=torch.float32)


@pytest.mark.parametrize("kernels", [REFERENCE_ROWS, native_rows(), TritonRows()])
def test_rows_are_placed_by_the_view(kernels: RowKernels | None) -> None:
    if kernels is None:
        pytest.skip("no C++ library")
    found = []
    for format in (SwappedPairs(torch.float32), PlainFormat(torch.float32)):
        storage = PagedStorage([FULL], 12, format, CPU)
        qkv_TC = torch.randn(3, 4 * 3 + 2 * 3 + 2 * 5, generator=torch.Generator().manual_seed(3))
        turned = kernels.rope_and_write_kv(qkv_TC, 4, None, None, storage.layers[0], torch.tensor([9, 2, 4]))
        found.append((turned, *storage.read(0, np.array([9, 2, 4]))))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][1].any()


# -- an engine over it -----------------------------------------------------------------------------


def test_files_of_another_format_are_refused(make_llm: MakeLLM, llama: Checkpoint, swapped: pytest.MonkeyPatch) -> None:
    prompt = random_tokens(40)
    llm = make_llm(llama)
    session = llm.session(prompt)
    data, kept = session.to_bytes(), session.kv(0)
    swapped.undo()
    plain = make_llm(llama)
    mine = plain.session(prompt)
    torch.testing.assert_close(kept, mine.kv(0))
    with pytest.raises(InvalidArgument, match="layer 0 has format 'swapped', expected None"):
        plain.session_from_bytes(data)
    with pytest.raises(InvalidArgument, match="layer 0 has format None, expected 'swapped'"):
        llm.session_from_bytes(mine.to_bytes())
    half = make_llm(llama, kv_dtype="bfloat16")
    with pytest.raises(InvalidArgument, match="rows of the format swapped are not converted"):
        half.session_from_bytes(data, convert_dtype=True)


def test_objects_of_another_format_are_not_found(
    start: Callable[..., LLM], llama: Checkpoint, swapped: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(60)
    first = start(llama)
    answer, _ = test_stored_files.reused(first, prompt)
    first.close()
    again, found = test_stored_files.reused(start(llama), prompt)
    assert (again, found > 0) == (answer, True)
    swapped.undo()
    again, found = test_stored_files.reused(start(llama), prompt)
    assert (again, found) == (answer, 0)


def test_norms_and_forks_of_sessions(small: LLM, llama: Checkpoint) -> None:
    session = small.session(random_tokens(30))
    rows = session.kv(1)
    # Two sums of squares in float32.
    np.testing.assert_allclose(session.norms(1).norms["k"], rows["k"].norm(dim=-1).numpy(), rtol=1e-5)
    other = session.fork()
    other.set_kv(1, v=rows["v"] * 2)
    assert torch.equal(session.kv(1)["v"], rows["v"])
    assert torch.equal(other.kv(1)["v"], rows["v"] * 2)
    assert session.generate(greedy(5)).outputs[0].token_ids == llama.greedy(random_tokens(30), 5)
    assert engine_of(small).runner.state.get_layout()["layers"][0]["format"] == "swapped"
