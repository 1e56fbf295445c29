"""Random prompts for blending: segments, holes, chunks that occur twice, contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from hypothesis import strategies as st
from tests.blend.small_model import KINDS, LAYERS, VOCABULARY, Prompt, SmallModel, small_model

from quire.base.blend_inputs import BlendedRows
from quire.blend.executor import TensorBlender
from quire.blend.selection import BlendPolicy

RATIOS = (0.0, 1e-12, 0.15, 1.0)
kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32 - 1)
segment_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum)
batch_lengths = st.lists(segment_lengths, min_size=1, max_size=6)


def blender(model: SmallModel, **policy: object) -> TensorBlender:
    """Return an executor for a model; ``min_tokens`` is 0, since prompts are short."""
    return TensorBlender(BlendPolicy(**{"min_tokens": 0, **policy}), model.specs)  # type: ignore[arg-type]


def random_prompt(
    model: SmallModel,
    draw: np.random.Generator,
    lengths: Sequence[int],
    *,
    cached: Literal["alone", "true", "other"] = "other",
    holes: bool = True,
    context: int | None = None,
    **known: object,
) -> Prompt:
    """Return a prompt of segments of these lengths, each captured at a position of its own.

    ``cached``: each segment's K and V if it is run ``alone``, the ``true`` ones of the whole
    prompt, or those of some ``other`` text. ``holes``: some rows have nothing cached. ``context``:
    C; None: any."""
    segments: list[list[int]] = []
    for length in lengths:
        twins = [one for one in segments if len(one) == length]
        again = bool(twins) and draw.random() < 0.3
        segments.append(twins[0] if again else draw.integers(0, VOCABULARY, length).tolist())
    tokens = [token for segment in segments for token in segment]
    count = len(tokens)
    begins = [int(draw.integers(0, 1000)) for _ in segments]
    origins = np.concatenate([begin + np.arange(len(one)) for begin, one in zip(begins, segments, strict=True)])
    if context is None:
        context = int(draw.integers(0, count)) if draw.random() < 0.4 else 0
    if cached == "true":
        layers = model.moved_cache(model.full(tokens), origins, 0)
    elif cached == "alone":
        alone = [model.full(one, begin) for begin, one in zip(begins, segments, strict=True) if one]
        layers = [
            (torch.cat([one.k[layer] for one in alone]), torch.cat([one.v[layer] for one in alone]))
            for layer in range(LAYERS)
        ]
    else:
        layers = [
            (torch.from_numpy(draw.standard_normal((count, *k))), torch.from_numpy(draw.standard_normal((count, *v))))
            for k, v in model.shapes
        ]
    valid = np.ones(count, dtype=np.bool_)
    if holes:
        valid = draw.random(count) < draw.choice([0.0, 0.5, 0.9, 1.0, 1.0])
    start = count - len(segments[-1]) - context
    given: dict[str, object] = {"question_start": max(0, start) if len(segments) > 1 else None}
    return Prompt(
        tokens,
        [(k[context:], v[context:]) for k, v in layers],
        valid[context:],
        origins[context:],
        context,
        known=BlendedRows(**{**given, **known}),  # type: ignore[arg-type]
    )


def random_batch(
    kind: str, seed: int, batch: Sequence[Sequence[int]], **given: object
) -> tuple[SmallModel, list[Prompt]]:
    """Return a model and one prompt for each list of lengths, at random ratios."""
    model, draw = small_model(kind), np.random.default_rng(seed)
    return model, [
        random_prompt(model, draw, lengths, **{"ratio": float(draw.choice(RATIOS)), **given})  # type: ignore[arg-type]
        for lengths in batch
    ]
