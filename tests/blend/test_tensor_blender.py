"""The executor of blending on plain tensors: forms, dtypes, what it is told, what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.blend.prompts import blender, random_batch, seeds
from tests.blend.small_model import LATENT, YARN, heads, rope, run
from torch import Tensor

from quire.base.blend_inputs import BlendedRows
from quire.base.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.blend.executor import TensorBlender
from quire.blend.scores import SCORES, ScoreInputs
from quire.blend.selection import BlendPolicy
from quire.contracts.blend import BlendExecutor, BlendOutput
from quire.contracts.layers import CrossAttention, Recurrent, StateTensor

FORMS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "flat": (lambda rows: rows.flatten(1), 0),
    "flat, tokens last": (lambda rows: rows.flatten(1).T.contiguous(), 1),
    "HND": (lambda rows: rows.movedim(0, 1).contiguous(), 1),
    "HND view": (lambda rows: rows.movedim(0, 1), 1),
}


@pytest.mark.turns(6)
@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("kind", ["gqa", "interleaved", "partial", "latent", "mqa"])
@settings(max_examples=4)
@given(seeds)
def test_every_form_gives_the_same(form: str, kind: str, seed: int) -> None:
    model, prompts = random_batch(kind, seed, [[5, 4, 2], [1], [6, 3]], ratio=0.4)
    made, token_dim = FORMS[form]
    executor = blender(model, score="kv", layers=(1, 2))
    shapes: list[tuple[int, ...]] = []

    def watch(_: int, out: BlendOutput) -> None:
        shapes.append(tuple(out.k.shape))
        assert out.q.dim() == out.k.dim() == out.v.dim()

    plain = run(model, executor, prompts)
    for one, two in zip(plain, run(model, executor, prompts, form=made, token_dim=token_dim, watch=watch), strict=True):
        assert one.rows == two.rows
        assert torch.equal(one.logits, two.logits)
        for layer in range(len(model.specs)):
            assert torch.equal(one.k[layer], two.k[layer])
            assert torch.equal(one.v[layer], two.v[layer])
    total = sum(prompt.count for prompt in prompts)
    (key_heads, columns), _ = model.shapes[0]
    shape: dict[str, tuple[int, ...]] = {
        "flat": (total, key_heads * columns),
        "flat, tokens last": (key_heads * columns, total),
        "HND": (key_heads, total, columns),
        "HND view": (key_heads, total, columns),
    }
    assert set(shapes) == {shape[form]}


def call(layer_id: int = 0, count: int = 6, rows: int | None = None, **changed: Any) -> dict[str, Any]:
    """Return arguments of ``blend`` for two requests, the second with a context of 2 tokens.

    ``rows``: how many are alive, the last ones of the batch."""
    draw = torch.Generator().manual_seed(layer_id)
    alive = count if rows is None else rows
    kv = torch.rand(4, count, 2, 8, generator=draw)
    places = torch.cat((torch.arange(4), torch.arange(2, count - 2)))[count - alive :]
    return {
        "layer_id": layer_id,
        "retrieved_k": kv[0],
        "retrieved_v": kv[1],
        "valid_mask": torch.tensor([1, 1, 1, 0, 1, 1]),
        "original_positions": torch.arange(count),
        "fresh_q": torch.rand(alive, 4, 8, generator=draw),
        "fresh_k": kv[2, count - alive :],
        "fresh_v": kv[3, count - alive :],
        "positions": places,
        "query_start_loc": torch.tensor([0, 4, count], dtype=torch.int32),
        "token_dim": 0,
        **changed,
    }


def executor(**policy: object) -> TensorBlender:
    return TensorBlender(BlendPolicy(**{"min_tokens": 0, "ratio": 0.0, **policy}), (heads(4, 2, rope()),) * 4)  # type: ignore[arg-type]


def outcome(one: BlendExecutor, changes: dict[str, Any]) -> list[BlendOutput]:
    """Return what a forward of three layers gives; rows 3 and 5 go on behind layer 1."""
    outs = [one.blend(**call(0, **changes)), one.blend(**call(1, **changes))]
    fresh = {name: value[[3, 5]] for name, value in call(2).items() if name.startswith(("fresh", "positions"))}
    return [*outs, one.blend(**{**call(2, **changes), **fresh})]


@pytest.mark.parametrize(
    "changes",
    [
        {"valid_mask": torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.bool)},
        {"valid_mask": torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.uint8)},
        {"valid_mask": torch.tensor([1, 1, 1, 0, 1, 1], dtype=torch.int32)},
        {"original_positions": torch.arange(6, dtype=torch.int16)},
        {"original_positions": torch.tensor([0, 1, 2, -5, 4, 5], dtype=torch.int32)},
        {"query_start_loc": torch.tensor([0, 4, 6])},
    ],
)
def test_integers_of_any_kind(changes: dict[str, Tensor]) -> None:
    for one, two in zip(outcome(executor(), {}), outcome(executor(), changes), strict=True):
        for name in ("q", "k", "v", "positions", "local_indices", "kept"):
            assert torch.equal(getattr(one, name), getattr(two, name))
        if one.query_start_loc is not None:
            assert two.query_start_loc is not None
            assert one.query_start_loc.tolist() == two.query_start_loc.tolist()
            assert two.query_start_loc.dtype == changes.get("query_start_loc", one.query_start_loc).dtype


def test_what_comes_out() -> None:
    one: BlendExecutor = executor()
    first, second, third = outcome(one, {})
    assert first.query_start_loc is None
    assert first.local_indices.tolist() == first.kept.tolist() == list(range(6))
    assert torch.equal(first.k, call(0)["fresh_k"])
    assert second.query_start_loc is not None
    assert second.query_start_loc.tolist() == [0, 1, 2]
    assert second.local_indices.tolist() == second.kept.tolist() == [3, 5]
    assert second.positions.tolist() == [3, 3]
    assert torch.equal(second.k, call(1)["fresh_k"])
    assert torch.equal(second.q, call(1)["fresh_q"][[3, 5]])
    assert third.query_start_loc is None
    assert third.local_indices.tolist() == [3, 5]
    assert third.kept.tolist() == [0, 1]
    wanted = call(2)["retrieved_v"].clone()
    wanted[[3, 5]] = call(2)["fresh_v"][[3, 5]]
    assert torch.equal(third.v, wanted)
    assert torch.equal(third.k[[0, 1, 2]], call(2)["retrieved_k"][[0, 1, 2]])
    assert not torch.equal(third.k[4], call(2)["retrieved_k"][4])


def test_nothing_that_is_given_is_changed() -> None:
    one = executor(layers=(0, 2), score="kv", ratio=0.5)
    local = torch.arange(6)
    for layer in range(4):
        fresh = {name: value[local] for name, value in call(layer).items() if name.startswith(("fresh", "positions"))}
        given_call = {**call(layer), **fresh}
        before = {name: value.clone() for name, value in given_call.items() if isinstance(value, Tensor)}
        local = one.blend(**given_call).local_indices
        assert all(torch.equal(value, given_call[name]) for name, value in before.items())
    assert len(local) < 6


def test_keys_of_another_dtype_are_rounded_once() -> None:
    """A float16 cache of a float32 model."""
    one = executor()
    stored = call(2)["retrieved_k"].half()
    for layer in range(2):
        one.blend(**call(layer))
    fresh = {name: value[[3, 5]] for name, value in call(2).items() if name.startswith(("fresh", "positions"))}
    half = one.blend(**{**call(2), **fresh, "retrieved_k": stored, "retrieved_v": call(2)["retrieved_v"].half()})
    other = executor()
    for layer in range(2):
        other.blend(**call(layer))
    wide = other.blend(**{**call(2), **fresh, "retrieved_k": stored.float()})
    assert half.k.dtype == half.v.dtype == torch.float32
    assert torch.equal(half.k, wide.k)


def test_keys_of_a_wider_cache_are_rounded_once() -> None:
    """They are moved in float32, and then become the model's float16."""
    changes = {"fresh_k": call(2)["fresh_k"][[3, 5]], "positions": call(2)["positions"][[3, 5]]}
    found = []
    for dtype in (torch.float16, torch.float32):
        one = executor()
        for layer in range(2):
            one.blend(**call(layer))
        fresh = {f"fresh_{name}": call(2)[f"fresh_{name}"][[3, 5]].to(dtype) for name in "qkv"}
        found.append(one.blend(**{**call(2), **changes, **fresh}).k)
    assert found[0].dtype == torch.float16
    assert torch.equal(found[0], found[1].half())


class Spy:
    """A score that keeps what it is given."""

    needs = frozenset({"k", "v"})

    def __init__(self) -> None:
        self.seen: list[ScoreInputs] = []

    def scores(self, inputs: ScoreInputs) -> Tensor:
        self.seen.append(inputs)
        return torch.zeros(len(inputs.candidates))


@pytest.fixture
def spy() -> Iterator[Spy]:
    yield SCORES.register("spy", Spy())
    SCORES.remove("spy")


def test_scores_get_the_layer(spy: Spy) -> None:
    spec = dataclasses.replace(heads(4, 2, rope(), 7), sm_scale=0.3)
    policy = BlendPolicy(score="spy", min_tokens=0, layers=(0, 1), ratio=0.5)
    one, rows = TensorBlender(policy, (spec,) * 2), torch.arange(6)
    for layer in range(2):
        fresh = {name: value[rows] for name, value in call(layer).items() if name.startswith(("fresh", "positions"))}
        out = one.blend(**{**call(layer), **fresh})
        inputs = spy.seen[layer]
        assert (inputs.layer_id, inputs.scale, inputs.window) == (layer, 0.3, 7)
        assert torch.equal(inputs.positions, call(0)["positions"][rows])
        assert torch.equal(inputs.fresh_q, fresh["fresh_q"])
        assert inputs.cached_k is not None
        assert inputs.cached_v is not None
        assert torch.equal(inputs.cached_v, call(layer)["retrieved_v"][rows])
        assert len(inputs.cached_k) == len(rows)
        rows = out.local_indices.clone()
        out.local_indices.zero_()  # What was returned is the caller's.


def test_nothing_retrieved_is_nothing_valid() -> None:
    one = executor()
    nothing = {"retrieved_k": None, "retrieved_v": None}
    outs = [one.blend(**call(layer, **nothing)) for layer in range(4)]
    assert [out.query_start_loc is None for out in outs] == [True, False, True, True]
    assert all(out.local_indices.tolist() == list(range(6)) for out in outs)
    assert outs[1].query_start_loc is not None
    assert outs[1].query_start_loc.tolist() == [0, 4, 6]


@pytest.mark.parametrize(("score", "spared"), [("v", "retrieved_k"), ("k", "retrieved_v")])
def test_at_the_check_layer_only_what_the_score_reads_is_needed(score: str, spared: str) -> None:
    one, other = executor(score=score, ratio=0.5), executor(score=score, ratio=0.5)
    for layer in range(2):
        whole = one.blend(**call(layer))
        part = other.blend(**call(layer, **({spared: None} if layer else {})))
        assert whole.local_indices.tolist() == part.local_indices.tolist()
    third = executor(score=score, ratio=0.5)
    third.blend(**call(0))
    needed = "retrieved_k" if spared == "retrieved_v" else "retrieved_v"
    with pytest.raises(InvalidArgument) as refused:
        third.blend(**call(1, **{needed: None}))
    assert refused.value.field == needed
    assert third.blend(**call(1)).local_indices.tolist() == whole.local_indices.tolist()


def test_a_check_layer_behind_the_last_is_a_full_prefill() -> None:
    one = executor(layers=(9,))
    for layer in range(4):
        out = one.blend(**call(layer))
        assert out.query_start_loc is None
        assert len(out.q) == 6


def test_what_is_told_holds_for_one_forward() -> None:
    one = executor()

    def kept() -> list[int]:
        return [one.blend(**call(layer)).local_indices.tolist() for layer in range(2)][1]

    forced = np.array([False, True, False, False])
    one.prepare([BlendedRows(forced=forced), BlendedRows(ratio=1.0)])
    assert kept() == [1, 3, 4, 5]
    assert kept() == [3, 5]
    one.prepare([BlendedRows(forced=forced), None])
    one.prepare([None, BlendedRows(question_start=0)])
    assert kept() == [3, 4, 5]
    one.prepare([None])
    with pytest.raises(InvalidArgument) as refused:
        one.blend(**call(0))
    assert refused.value.field == "requests"
    one.prepare([BlendedRows(forced=np.ones(9, dtype=bool)), None])
    with pytest.raises(InvalidArgument) as refused:
        one.blend(**call(0))
    assert refused.value.field == "forced"


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "another layer": ("layer_id", lambda _: 4),
    "no layer": ("layer_id", lambda _: -1),
    "tokens nowhere": ("token_dim", lambda _: 2),
    "rows of q": ("fresh_q", lambda one: one["fresh_q"][1:]),
    "heads of q": ("fresh_q", lambda one: one["fresh_q"][:, :2]),
    "columns of k": ("fresh_k", lambda one: one["fresh_k"][..., :4]),
    "rows of v": ("fresh_v", lambda one: torch.cat((one["fresh_v"], one["fresh_v"]))),
    "one dimension": ("fresh_v", lambda one: one["fresh_v"].flatten()),
    "integers for v": ("fresh_v", lambda one: one["fresh_v"].int()),
    "rows of cached k": ("retrieved_k", lambda one: one["retrieved_k"][:-1]),
    "columns of cached v": ("retrieved_v", lambda one: one["retrieved_v"].flatten(1)[:, 1:]),
    "cached k elsewhere": ("retrieved_k", lambda one: one["retrieved_k"].to("meta")),
    "a mask that is short": ("valid_mask", lambda one: one["valid_mask"][1:]),
    "a mask of floats": ("valid_mask", lambda one: one["valid_mask"].float()),
    "a mask elsewhere": ("valid_mask", lambda one: one["valid_mask"].to("meta")),
    "origins that are short": ("original_positions", lambda one: one["original_positions"][1:]),
    "origins of floats": ("original_positions", lambda one: one["original_positions"].float()),
    "positions of floats": ("positions", lambda one: one["positions"].float()),
    "positions that are short": ("positions", lambda one: one["positions"][1:]),
    "positions that stand still": ("positions", lambda one: torch.zeros_like(one["positions"])),
    "positions before the first": ("positions", lambda one: one["positions"] - 1),
    "counts that end early": ("query_start_loc", lambda _: torch.tensor([0, 4, 5])),
    "counts that begin late": ("query_start_loc", lambda _: torch.tensor([1, 4, 6])),
    "an empty request": ("query_start_loc", lambda _: torch.tensor([0, 4, 4, 6])),
    "counts of floats": ("query_start_loc", lambda _: torch.tensor([0.0, 4.0, 6.0])),
    "no request": ("query_start_loc", lambda _: torch.tensor([0])),
    "one number": ("query_start_loc", lambda _: torch.tensor(6)),
}
OTHERS = {"query_start_loc": "valid_mask"}
"""Another argument that may be blamed, since the first layer compares both."""


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (name, layer)
        for name, (field, _) in sorted(WRONG.items())
        for layer in range(3)
        # Of positions only the first layer's count.
        if not layer or name not in ("positions that stand still", "positions before the first")
    ],
)
def test_arguments_are_checked_before_anything_is_done(name: str, layer: int) -> None:
    """The same call with right arguments gives what it would have given."""
    field, made = WRONG[name]
    one, other = executor(ratio=1.0), executor(ratio=1.0)
    for before in range(layer):
        one.blend(**call(before))
        other.blend(**call(before))
    with pytest.raises(InvalidArgument) as refused:
        one.blend(**{**call(layer), field: made(call(layer))})
    assert refused.value.field in (field, OTHERS.get(field))
    assert refused.value.allowed
    assert torch.equal(one.blend(**call(layer)).k, other.blend(**call(layer)).k)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("valid_mask", torch.tensor([1, 1, 0, 0, 1, 1])),
        ("query_start_loc", torch.tensor([0, 3, 6])),
        ("retrieved_k", None),
        ("retrieved_v", None),
    ],
)
def test_layers_of_a_forward_agree(field: str, value: object) -> None:
    """Rows that were left out need a cached one in every layer."""
    one = executor()
    one.blend(**call(0))
    one.blend(**call(1))
    fresh = {name: given[[3, 5]] for name, given in call(2).items() if name.startswith(("fresh", "positions"))}
    with pytest.raises(InvalidArgument) as refused:
        one.blend(**{**call(2), **fresh, field: value})
    assert refused.value.field == field
    assert one.blend(**{**call(2), **fresh}).local_indices.tolist() == [3, 5]


def test_positions_and_origins_are_those_of_the_call() -> None:
    """A caller that keeps one buffer of positions may write the next ones into it."""
    buffer = call(0)["positions"].clone()
    one, other = executor(), executor()
    for layer in range(2):
        one.blend(**call(layer, positions=buffer))
        other.blend(**call(layer))
    buffer += 100
    fresh = {name: given[[3, 5]] for name, given in call(2).items() if name.startswith(("fresh", "positions"))}
    negative = torch.tensor([0, -1, 2, 3, 4, 5])
    with pytest.raises(InvalidArgument) as refused:
        one.blend(**{**call(2), **fresh, "original_positions": negative})
    assert refused.value.field == "original_positions"
    assert torch.equal(one.blend(**{**call(2), **fresh}).k, other.blend(**{**call(2), **fresh}).k)
    moved = {name: given[[3, 5]] for name, given in call(3).items() if name.startswith(("fresh", "positions"))}
    last = [each.blend(**{**call(3), **moved, "original_positions": torch.arange(6) + 7}).k for each in (one, other)]
    assert torch.equal(*last)
    assert not torch.equal(last[0][0], call(3)["retrieved_k"][0])


def test_gradients_are_no_obstacle() -> None:
    one = executor(ratio=0.5)
    one.blend(**call(0))
    given_call = call(1)
    given_call["fresh_v"].requires_grad_()
    assert one.blend(**given_call).local_indices.tolist() == executor_rows(ratio=0.5)


def executor_rows(**policy: object) -> list[int]:
    """Return the rows that go on behind layer 1."""
    one = executor(**policy)
    one.blend(**call(0))
    return one.blend(**call(1)).local_indices.tolist()


@pytest.mark.parametrize(("before", "layer"), [((), 1), ((0,), 2), ((0, 1), 1), ((0, 1), 3)])
def test_layers_come_one_after_the_other(before: tuple[int, ...], layer: int) -> None:
    one = executor(ratio=1.0)
    for each in before:
        one.blend(**call(each))
    with pytest.raises(FailedPrecondition, match=f"layer {layer} cannot follow"):
        one.blend(**call(layer))


def test_a_stage_begins_where_its_layers_begin() -> None:
    layers = (heads(4, 2, rope()), heads(4, 2, rope(theta=7.0)))
    one = TensorBlender(BlendPolicy(layers=(3,), min_tokens=0, ratio=0.0), layers, first_layer=2)
    for _ in range(2):
        assert one.blend(**call(2)).query_start_loc is None
        assert one.blend(**call(3)).local_indices.tolist() == [3, 5]
    for layer in (0, 1, 4):
        with pytest.raises(InvalidArgument):
            one.blend(**call(layer))
    with pytest.raises(InvalidArgument) as refused:
        TensorBlender(BlendPolicy(layers=(1, 3)), layers, first_layer=2)
    assert refused.value.field == "policy.layers"


def test_scores_are_summed_over_ranks_before_rows_are_chosen() -> None:
    """This rank would choose row 0, the others' heads make it row 1."""
    policy = BlendPolicy(ratio=0.2, min_tokens=0, layers=(0,))
    layers = (heads(4, 2, rope()),)
    given_call = call(0, valid_mask=torch.ones(6, dtype=torch.int32))
    given_call["retrieved_v"] = given_call["fresh_v"].clone()
    given_call["retrieved_v"][0] += 1
    assert TensorBlender(policy, layers).blend(**given_call).local_indices.tolist() == [0, 3, 4, 5]

    def all_reduce(sums: Tensor) -> Tensor:
        return sums + torch.tensor([0.0, 100.0, 0.0, 0.0])

    one = TensorBlender(policy, layers, all_reduce=all_reduce)
    assert one.blend(**given_call).local_indices.tolist() == [1, 3, 4, 5]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Recurrent(states=(StateTensor(shape=(2,), dtype="float32"),)), "layer 1 .* recurrent state"),
        (CrossAttention(num_heads=2, num_kv_heads=2, head_dim=8, value_dim=8), "layer 1 .* encoder"),
        (dataclasses.replace(heads(2, 2, None), caller_rotates=True), "layer 1 .* rule of its own"),
    ],
)
def test_layers_whose_rows_cannot_move_are_refused(spec: Any, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        TensorBlender(BlendPolicy(), (LATENT, spec))


def test_an_unknown_score_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="random"):
        executor(score="best")


def test_a_score_that_needs_a_forward_of_its_own_is_refused_at_once() -> None:
    with pytest.raises(Unsupported, match="pass of the question"):
        executor(score="v_or_question")


@pytest.mark.parametrize(
    ("ratio", "protect", "wanted"), [(0.2, True, [2, 6, 9]), (0.2, False, [2, 6]), (0.0, False, [])]
)
@pytest.mark.parametrize("spec", [heads(4, 2, rope()), LATENT])
def test_lmcache_leaves_the_last_row_out(spec: Any, ratio: float, protect: bool, wanted: list[int]) -> None:
    """Ten valid rows, of which 2 and 6 deviate."""
    policy = BlendPolicy(ratio=ratio, min_tokens=0, protect_last=protect)
    one, rows = TensorBlender(policy, (spec,) * 3), torch.arange(10)
    columns, kv = (12, (1, 4, 8)) if spec is LATENT else (8, (2, 8, 8))
    for layer in range(3):
        v = torch.ones(10, kv[0], kv[2])
        deviating = v.clone()
        deviating[[2, 6]] += 1
        out = one.blend(
            layer,
            torch.ones(10, kv[0], kv[1]),
            v,
            torch.ones(10, dtype=torch.bool),
            torch.arange(10),
            torch.ones(len(rows), 4, columns),
            torch.ones(len(rows), kv[0], kv[1]),
            deviating[rows],
            rows,
            torch.tensor([0, 10], dtype=torch.int32),
            0,
        )
        rows = out.local_indices
        assert rows.tolist() == (wanted if layer else list(range(10)))
        assert len(out.k) == len(out.v) == 10


def test_raw_keys_are_not_turned() -> None:
    """In RoPE mode ``inline`` K is stored as it was before its rotation."""
    inline = dataclasses.replace(heads(4, 2, YARN), rope_mode="inline")
    one = TensorBlender(BlendPolicy(layers=(0,), min_tokens=0, ratio=0.0), (inline,) * 2)
    one.blend(**call(0))
    fresh = {name: value[[3, 5]] for name, value in call(1).items() if name.startswith(("fresh", "positions"))}
    out = one.blend(**{**call(1), **fresh})
    assert torch.equal(out.k[4], call(1)["retrieved_k"][4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("origins", ["cpu", "cuda"])
def test_a_device_gives_what_the_cpu_gives(origins: str) -> None:
    def moved(name: str, value: object) -> object:
        if not isinstance(value, Tensor) or name == "valid_mask":
            return value
        return value.to(origins if name == "original_positions" else "cuda")

    one, other = executor(score="kv", ratio=0.5), executor(score="kv", ratio=0.5)
    rows = torch.arange(6)
    for layer in range(3):
        fresh = {name: value[rows] for name, value in call(layer).items() if name.startswith(("fresh", "positions"))}
        here = one.blend(**{**call(layer), **fresh})
        there = other.blend(**{name: moved(name, value) for name, value in {**call(layer), **fresh}.items()})
        rows = here.local_indices
        assert torch.equal(rows, there.local_indices)
        assert there.kept.device.type == there.k.device.type == "cuda"
        assert torch.equal(here.v, there.v.cpu())
        # A rotation of values below 2: a few roundings.
        assert torch.allclose(here.k, there.k.cpu(), rtol=0, atol=1e-6)
