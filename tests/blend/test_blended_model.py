"""A blended forward of a small model against its full forward, in float64."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.blend.prompts import (
    RATIOS,
    batch_lengths,
    blender,
    kinds,
    random_batch,
    random_prompt,
    seeds,
    segment_lengths,
)
from tests.blend.small_model import (
    KINDS,
    LAYERS,
    Answer,
    Prompt,
    SmallModel,
    bottom_right,
    by_position,
    run,
    small_model,
)
from tests.examples import examples

from quire.base.blend_inputs import BlendedRows
from quire.contracts.blend import BlendOutput

EXACT = 1e-10
"""How far float64 runs of other shapes may be apart; values are of the size of 1."""


pytestmark = pytest.mark.usefixtures("float64")


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype == torch.float64
    assert not found.numel() or (found - wanted).abs().max() < EXACT


def assert_full(model: SmallModel, prompt: Prompt, answer: Answer, *, all_rows: bool) -> None:
    """Rows that ran have the logits, K and V of a full prefill; with ``all_rows`` all K and V."""
    full = model.full(prompt.tokens)
    assert_close(answer.logits, full.logits[answer.rows])
    rows = list(range(len(prompt.tokens))) if all_rows else answer.rows
    for layer in range(LAYERS):
        assert_close(answer.k[layer][rows], full.k[layer][rows])
        assert_close(answer.v[layer][rows], full.v[layer][rows])


def assert_same(one: Answer, other: Answer) -> None:
    """To the bit."""
    assert one.rows == other.rows
    assert torch.equal(one.logits, other.logits)
    for layer in range(LAYERS):
        assert torch.equal(one.k[layer], other.k[layer])
        assert torch.equal(one.v[layer], other.v[layer])


def alike(one: Answer, other: Answer) -> None:
    """Up to rounding."""
    assert one.rows == other.rows
    assert_close(one.logits, other.logits)
    for layer in range(LAYERS):
        assert_close(one.k[layer], other.k[layer])
        assert_close(one.v[layer], other.v[layer])


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2, 3)]))
def test_ratio_1_is_a_full_prefill(kind: str, seed: int, batch: list[list[int]], layers: tuple[int, ...]) -> None:
    model, prompts = random_batch(kind, seed, batch, ratio=1.0)
    for prompt, answer in zip(prompts, run(model, blender(model, layers=layers), prompts), strict=True):
        assert answer.rows == list(range(prompt.context, len(prompt.tokens)))
        assert_full(model, prompt, answer, all_rows=True)


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.sampled_from([(0,), (1,), (2,), (1, 2, 3)]))
def test_true_rows_change_nothing(kind: str, seed: int, batch: list[list[int]], layers: tuple[int, ...]) -> None:
    """The fixed point: whatever rows run, with any ratio and any holes."""
    model, prompts = random_batch(kind, seed, batch, cached="true")
    answers = run(model, blender(model, layers=layers, score="random"), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.rows[-1] == len(prompt.tokens) - 1
        assert_full(model, prompt, answer, all_rows=True)


def test_a_bottom_right_mask_does_not_pass_for_that() -> None:
    model, prompts = random_batch("gqa", 5, [[6, 6, 3]], cached="true", holes=False, context=0, ratio=0.5)
    (answer,) = run(model, blender(model, score="random"), prompts, mask=bottom_right)
    assert (answer.logits - model.full(prompts[0].tokens).logits[answer.rows]).abs().max() > 0.1
    (whole,) = run(model, blender(model, ratio=1.0), [dataclasses.replace(prompts[0], known=None)], mask=bottom_right)
    assert_full(model, prompts[0], whole, all_rows=True)


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, segment_lengths, st.data())
def test_no_row_depends_on_a_row_behind_it(kind: str, seed: int, lengths: list[int], data: st.DataObject) -> None:
    model, draw = small_model(kind), np.random.default_rng(seed)
    forced = draw.random(sum(lengths)) < 0.3
    prompt = random_prompt(model, draw, lengths, context=0, ratio=0.0, forced=forced, question_start=None)
    place = data.draw(st.integers(0, len(prompt.tokens) - 1))
    other = dataclasses.replace(
        prompt,
        tokens=[*prompt.tokens[: place + 1], *draw.integers(0, 40, len(prompt.tokens) - place - 1).tolist()],
        cached=[tuple(torch.cat((x[: place + 1], x[place + 1 :] + 1)) for x in layer) for layer in prompt.cached],  # type: ignore[misc]
    )
    executor = blender(model)
    one, two = (run(model, executor, [each])[0] for each in (prompt, other))
    assert one.rows == two.rows
    for layer in range(LAYERS):
        assert torch.equal(one.k[layer][: place + 1], two.k[layer][: place + 1])
        assert torch.equal(one.v[layer][: place + 1], two.v[layer][: place + 1])
        for row, hidden in one.hidden[layer].items():
            # A product of the same shape adds up each row alike.
            assert row > place or torch.equal(hidden, two.hidden[layer][row])


@given(kinds, seeds, st.integers(1, 12), st.integers(0, 6))
def test_a_prefix_at_its_own_place_is_plain_reuse(kind: str, seed: int, prefix: int, rest: int) -> None:
    model, draw = small_model(kind), np.random.default_rng(seed)
    prompt = random_prompt(model, draw, [prefix + rest], cached="true", holes=False, context=0, ratio=0.0)
    prompt.valid[prefix:] = False
    prompt.origins[:prefix] = np.arange(prefix)
    alone = model.past_of(prompt.tokens[:prefix])
    prompt.cached = [
        tuple(torch.cat((mine, torch.full_like(x[prefix:], torch.nan))) for mine, x in zip(*both, strict=True))  # type: ignore[misc]
        for both in zip(alone, prompt.cached, strict=True)
    ]
    (answer,) = run(model, blender(model), [prompt])
    assert answer.rows == sorted({*range(prefix, prefix + rest), prefix + rest - 1})
    assert_full(model, prompt, answer, all_rows=True)


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, segment_lengths, st.sampled_from(RATIOS))
def test_where_a_chunk_was_captured_does_not_matter(kind: str, seed: int, lengths: list[int], ratio: float) -> None:
    """777 positions later everything is as it was, and the same rows run."""
    model, draw = small_model(kind), np.random.default_rng(seed)
    prompt = random_prompt(model, draw, lengths, ratio=ratio)
    later = dataclasses.replace(prompt, origins=prompt.origins + 777)
    # Rotations compose: a key at o turned by 777 more stands at o + 777, the magnitude aside.
    later.cached = [(_further(model, layer, k, 777), v) for layer, (k, v) in enumerate(prompt.cached)]
    one, two = (run(model, blender(model), [each])[0] for each in (prompt, later))
    alike(one, two)


def _further(model: SmallModel, layer: int, k: torch.Tensor, distance: int) -> torch.Tensor:
    spec = model.specs[layer].rope  # type: ignore[union-attr]
    magnitude = 1.0 if spec is None else spec.attention_factor
    turned = model.turned(layer, k, torch.full((len(k),), distance))
    if spec is not None:
        turned[..., : spec.rotary_dim] /= magnitude
    return turned


@settings(max_examples=examples(15, 30))
@given(st.sampled_from([torch.nan, torch.inf, 1e30, 7.0]), kinds, seeds, batch_lengths)
def test_rows_that_are_not_valid_do_not_matter(rubbish: float, kind: str, seed: int, batch: list[list[int]]) -> None:
    model, prompts = random_batch(kind, seed, batch)
    spoilt = []
    for prompt in prompts:
        lost = torch.from_numpy(~prompt.valid)[:, None, None]
        cached = [(k.masked_fill(lost, rubbish), v.masked_fill(lost, rubbish)) for k, v in prompt.cached]
        origins = np.where(prompt.valid, prompt.origins, 123456)
        spoilt.append(dataclasses.replace(prompt, cached=cached, origins=origins))
    executor = blender(model, score="kv")
    for one, two in zip(run(model, executor, prompts), run(model, executor, spoilt), strict=True):
        assert_same(one, two)


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.randoms(use_true_random=False))
def test_requests_of_a_batch_do_not_meet(kind: str, seed: int, batch: list[list[int]], shuffle: object) -> None:
    """In any order, among requests with a context, nothing valid, or one row that is decoded."""
    model, prompts = random_batch(kind, seed, [*batch, [1], [4]])
    prompts[-1].valid[:] = False
    prompts.append(random_prompt(model, np.random.default_rng(seed), [5], context=4))
    prompts[-1].valid[:] = False
    order = list(range(len(prompts)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    executor = blender(model, layers=(1, 2), layer_ratios=(1.5, 1.0))
    together = run(model, executor, [prompts[at] for at in order])
    for at, answer in zip(order, together, strict=True):
        alike(run(model, executor, [prompts[at]])[0], answer)


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.integers(1, LAYERS))
def test_executors_remember_nothing(kind: str, seed: int, batch: list[list[int]], stop: int) -> None:
    """After a forward, or one that was given up; and nothing that is given changes."""
    model, prompts = random_batch(kind, seed, batch)
    _, others = random_batch(kind, seed + 1, batch[::-1])
    executor = blender(model)
    before = [[x.clone() for x in layer] for prompt in prompts for layer in prompt.cached]
    first = run(model, executor, prompts)
    run(model, executor, others, stop=stop)
    for one, two in zip(first, run(model, executor, prompts), strict=True):
        assert_same(one, two)
    after = [layer for prompt in prompts for layer in prompt.cached]
    for kept, now in zip(before, after, strict=True):
        assert all(map(torch.equal, kept, now))


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.sampled_from([(0,), (1,), (3,), (1, 2)]), st.sampled_from(RATIOS))
def test_shapes_and_positions(
    kind: str, seed: int, batch: list[list[int]], layers: tuple[int, ...], ratio: float
) -> None:
    model, prompts = random_batch(kind, seed, batch, ratio=ratio)
    counts = [prompt.count for prompt in prompts]
    starts = np.cumsum([0, *counts])
    places = np.concatenate([np.arange(one.context, len(one.tokens)) for one in prompts])
    seen: list[BlendOutput] = []

    def watch(layer_id: int, out: BlendOutput) -> None:
        rows = out.local_indices
        assert rows.dtype == torch.int64
        assert len(out.q) == len(rows) == len(out.positions) == len(out.kept)
        assert len(out.k) == len(out.v) == sum(counts)
        assert out.positions.tolist() == places[rows.numpy()].tolist()
        own = [rows[(rows >= start) & (rows < stop)] for start, stop in pairwise(starts)]
        assert torch.equal(torch.cat(own), rows)
        assert all((one.diff() > 0).all() for one in own)
        assert [int(one[-1]) + 1 for one in own] == starts[1:].tolist()
        if layer_id in layers:
            assert out.query_start_loc is not None
            assert out.query_start_loc.dtype == torch.int32
            assert out.query_start_loc.tolist() == np.cumsum([0, *map(len, own)]).tolist()
            if seen:
                assert set(rows.tolist()) <= set(seen[-1].local_indices.tolist())
        else:
            assert out.query_start_loc is None
            wanted = seen[-1].local_indices if seen else torch.arange(sum(counts))
            assert torch.equal(rows, wanted)
        seen.append(out)

    run(model, blender(model, layers=layers), prompts, watch=watch)
    assert len(seen) == LAYERS


def test_errors_of_k_and_v_do_not_grow_with_the_ratio() -> None:
    """Over 24 prompts and all layers; the error of one prompt may grow."""
    model, draw = small_model("gqa"), np.random.default_rng(3)
    prompts = [random_prompt(model, draw, [7, 8, 9, 3], cached="alone", holes=False, context=0) for _ in range(24)]
    errors = []
    for ratio in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        known = BlendedRows(ratio=ratio, question_start=24)
        answers = run(model, blender(model), [dataclasses.replace(one, known=known) for one in prompts])
        error = 0.0
        for prompt, answer in zip(prompts, answers, strict=True):
            full = model.full(prompt.tokens)
            for layer in range(LAYERS):
                error += float((answer.k[layer] - full.k[layer]).square().sum())
                error += float((answer.v[layer] - full.v[layer]).square().sum())
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 100 * EXACT
    assert errors[-1] < EXACT


@given(kinds, seeds, st.integers(2, 8), st.integers(4, 8))
def test_the_first_segment_is_right_already(kind: str, seed: int, first: int, second: int) -> None:
    """Its rows score 0 at the check layer, and none is chosen while others are left."""
    model, draw = small_model(kind), np.random.default_rng(seed)
    prompt = random_prompt(model, draw, [first, second, 2], holes=False, context=0, ratio=0.1)
    prompt.origins[:first] = np.arange(first)
    trace = model.full(prompt.tokens[:first])
    for layer, (k, v) in enumerate(prompt.cached):
        k[:first], v[:first] = trace.k[layer], trace.v[layer]
    (answer,) = run(model, blender(model), [prompt])
    assert min(answer.rows) >= first
    assert len(answer.rows) == 2 + -(-(first + second) // 10)


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.integers(0, LAYERS - 1))
def test_at_the_check_layer_all_rows_are_right(kind: str, seed: int, batch: list[list[int]], layer: int) -> None:
    model, prompts = random_batch(kind, seed, batch)
    answers = run(model, blender(model, layers=(layer,)), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        full = model.full(prompt.tokens)
        for before in range(layer + 1):
            assert_close(answer.k[before], full.k[before])
            assert_close(answer.v[before], full.v[before])


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, segment_lengths, st.data())
def test_a_context_is_as_rows_that_were_forced(kind: str, seed: int, lengths: list[int], data: st.DataObject) -> None:
    model, draw = small_model(kind), np.random.default_rng(seed)
    whole = random_prompt(model, draw, lengths, context=0, ratio=0.0, question_start=None)
    count = len(whole.tokens)
    context = data.draw(st.integers(0, count - 1))
    forced = draw.random(count) < 0.3
    forced[:context] = True
    cut = dataclasses.replace(
        whole,
        cached=[(k[context:], v[context:]) for k, v in whole.cached],
        valid=whole.valid[context:],
        origins=whole.origins[context:],
        context=context,
        known=BlendedRows(ratio=0.0, forced=forced[context:]),
    )
    executor = blender(model)
    (one,) = run(model, executor, [dataclasses.replace(whole, known=BlendedRows(ratio=0.0, forced=forced))])
    (two,) = run(model, executor, [cut])
    assert_close(one.logits[[row >= context for row in one.rows]], two.logits)
    for layer in range(LAYERS):
        assert_close(one.k[layer], two.k[layer])
        assert_close(one.v[layer], two.v[layer])


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, segment_lengths, st.data())
def test_a_prompt_in_pieces_is_as_one_run(kind: str, seed: int, lengths: list[int], data: st.DataObject) -> None:
    """If the last row of each piece is forced, as it always runs."""
    model, draw = small_model(kind), np.random.default_rng(seed)
    whole = random_prompt(model, draw, lengths, context=0, ratio=0.0, question_start=None)
    count = len(whole.tokens)
    cuts = sorted(data.draw(st.sets(st.integers(1, count), max_size=3)) | {count})
    forced = draw.random(count) < 0.3
    forced[np.array(cuts) - 1] = True
    executor = blender(model)
    (one,) = run(model, executor, [dataclasses.replace(whole, known=BlendedRows(ratio=0.0, forced=forced))])
    past, done = None, 0
    for stop in cuts:
        piece = Prompt(
            whole.tokens[:stop],
            [(k[done:stop], v[done:stop]) for k, v in whole.cached],
            whole.valid[done:stop],
            whole.origins[done:stop],
            done,
            past,
            BlendedRows(ratio=0.0, forced=forced[done:stop]),
        )
        (two,) = run(model, executor, [piece])
        past, done = list(zip(two.k, two.v, strict=True)), stop
    assert_close(one.logits[-1], two.logits[-1])
    for layer in range(LAYERS):
        assert_close(one.k[layer], two.k[layer])
        assert_close(one.v[layer], two.v[layer])


@settings(max_examples=examples(10, 20))
@given(kinds, seeds, batch_lengths, st.sampled_from(["v", "kv", "random"]))
def test_several_layers_select_fewer_and_fewer(kind: str, seed: int, batch: list[list[int]], score: str) -> None:
    """Each has a budget of its own, a share of the same candidates."""
    model, prompts = random_batch(kind, seed, batch, ratio=0.4)
    alive: list[set[int]] = []
    executor = blender(model, score=score, layers=(0, 1, 2), layer_ratios=(1.5, 1.0, 0.5))

    run(model, executor, prompts, watch=lambda _, out: alive.append(set(out.local_indices.tolist())))
    assert alive[0] >= alive[1] >= alive[2] == alive[3]
    bounds = np.cumsum([0, *(prompt.count for prompt in prompts)])
    for prompt, (start, stop) in zip(prompts, pairwise(bounds.tolist()), strict=True):
        assert prompt.known is not None
        must = ~prompt.valid
        must[-1] = True
        if prompt.known.question_start is not None:
            must[prompt.known.question_start :] = True
        candidates = int((~must).sum())
        for layer, share in enumerate((0.6, 0.4, 0.2)):
            kept = [row for row in alive[layer] if start <= row < stop and not must[row - start]]
            assert len(kept) == int(np.ceil(share * candidates - 1e-9))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_that_leave_at_a_later_layer_are_fresh_there(kind: str) -> None:
    model, (prompt,) = random_batch(kind, 11, [[6, 6, 2]], ratio=0.5, holes=False, context=0)
    rows: list[list[int]] = []
    executor = blender(model, layers=(1, 2), layer_ratios=(1.0, 0.5))
    (answer,) = run(model, executor, [prompt], watch=lambda _, out: rows.append(out.local_indices.tolist()))
    left = sorted(set(rows[1]) - set(rows[2]))
    assert left
    (wide,) = run(model, blender(model, layers=(1,)), [prompt])
    assert_close(answer.v[2][left], wide.v[2][left])
    assert_close(answer.k[2][left], wide.k[2][left])
    assert (answer.v[3][left] - wide.v[3][left]).abs().max() > EXACT


@given(seeds, st.integers(2, 30), st.sampled_from([None, 5]))
def test_runs_of_neighbours_are_triangles(seed: int, count: int, window: int | None) -> None:
    """Rows a..b that stand side by side see what a bottom-right mask over keys 0..b shows them."""
    rows = np.flatnonzero(np.random.default_rng(seed).random(count) < 0.5)
    wanted = by_position(torch.from_numpy(rows), count, window)
    pieces = []
    for piece in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        keys = int(piece[-1]) + 1 if len(piece) else count
        seen = bottom_right(torch.from_numpy(piece), keys, window)
        pieces.append(torch.nn.functional.pad(seen, (0, count - keys)))
    assert torch.equal(torch.cat(pieces), wanted)
