"""Pipeline parallelism: the range of a model's blocks that one stage holds.

The first stage has the embedding, the last one the final norm and the head; a tied head is on both.
What goes from stage to stage is the rows of the residual stream. So blocks run whole, in any
family. Blocks are divided so that the stage with the most bytes of weights has as few as possible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from quire.base.errors import Unsupported
from quire.contracts.ranks import Stages
from quire.models.decoder import DecoderConfig, Trunk
from quire.models.gemma_layers import LayeredConfig
from quire.models.hybrid_decoder import HybridConfig, layer_ids
from quire.weights.places import Place, parameter_shapes

FIRST = frozenset({"embed", "inputs", "spread"})
"""Beginnings of the names of parameters, outside of blocks, that the embedding needs."""


def check_stages(config: DecoderConfig | HybridConfig, count: int) -> None:
    """Raise ``Unsupported`` for a model without a range of blocks for each of ``count`` stages."""
    cuts = _cuts(config)
    if count <= len(cuts) + 1:
        return
    if count > config.num_layers:
        raise _refused(count, f"the model has {config.num_layers} blocks; give as many stages at most")
    first = min(source for source in getattr(config, "sources", ()) if source is not None)
    raise _refused(
        count,
        f"blocks {first} to {config.num_layers - 1} share K and V and are one stage; give {len(cuts) + 1} at most",
    )


def _refused(count: int, reason: str) -> Unsupported:
    name = "pipeline_parallel_size"
    return Unsupported(f"{name} {count}: {reason}", field=name, given=count)


def _cuts(config: DecoderConfig | HybridConfig) -> list[int]:
    """Return the blocks at which a stage may begin, but for the first: a block that reads the K and
    V of another is in its stage."""
    sources = config.sources if isinstance(config, LayeredConfig) else ()
    shared = [(source, block) for block, source in enumerate(sources) if source is not None]
    return [cut for cut in range(1, config.num_layers) if not any(source < cut <= block for source, block in shared)]


def ranges_of(config: DecoderConfig | HybridConfig, count: int, places: Mapping[str, Place]) -> list[range]:
    """Return the blocks of each stage. ``places``: those of the whole model. ``Unsupported`` as
    ``check_stages``."""
    check_stages(config, count)
    sizes = [0] * config.num_layers
    first = last = 0
    for name, shape in parameter_shapes(places).items():
        beginning, size = name.partition(".")[0], math.prod(shape)
        if beginning.isdecimal():
            sizes[int(beginning)] += size
        elif beginning in FIRST:
            first += size
        else:
            last += size
    trunk = config.trunk if isinstance(config, HybridConfig) else config
    sizes[0] += first
    sizes[-1] += last + (trunk.vocab_size * trunk.hidden_size if trunk.tie_embeddings else 0)
    before = [0, *accumulate(sizes)]
    ends = [*_cuts(config), config.num_layers]
    # Of each end the lowest greatest stage of those up to it, and their beginnings.
    best: dict[int, tuple[int, list[int]]] = {end: (before[end], [0]) for end in ends}
    for _ in range(1, count):
        best = {
            end: min(
                (max(most, before[end] - before[cut]), [*starts, cut])
                for cut, (most, starts) in best.items()
                if cut < end
            )
            for end in ends
            if end > min(best)
        }
    starts = best[config.num_layers][1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], config.num_layers], strict=True)]


def owners_of(config: DecoderConfig | HybridConfig, blocks: Sequence[range]) -> dict[int, int]:
    """Return the stage of each layer of the KV state, by id."""
    stage_of = {block: stage for stage, own in enumerate(blocks) for block in own}
    if isinstance(config, HybridConfig):
        ids = enumerate(layer_ids(config))
        return {layer: stage_of[block] for block, one in ids for layer in one if layer is not None}
    own = config.own_layers() if isinstance(config, LayeredConfig) else range(config.num_layers)
    return {block: stage_of[block] for block in own}


def names_of(stages: Stages, places: Mapping[str, Place], *, tied: bool) -> frozenset[str]:
    """Return the names of the parameters of a stage. Learned sinks are part of a layer's spec, and
    all stages know the specs."""
    found = set()
    for name in {place.parameter for place in places.values()}:
        beginning = name.partition(".")[0]
        if beginning.isdecimal():
            is_own = int(beginning) in stages.own or name.endswith(".sinks")
        elif beginning in FIRST:
            is_own = stages.is_first or (stages.is_last and tied and beginning == "embed")
        else:
            is_own = stages.is_last
        if is_own:
            found.add(name)
    return frozenset(found)


def row_of(model: Trunk) -> tuple[int, torch.dtype]:
    """Return the width and the type of what a model's blocks pass on."""
    x_TW = model.embed(torch.zeros(1, dtype=torch.int64, device=model.device))
    return x_TW.shape[1], x_TW.dtype


def stage_config(config: Any) -> DecoderConfig | HybridConfig:
    """Return a configuration whose blocks stages can divide; ``Unsupported`` for another."""
    if not isinstance(config, DecoderConfig | HybridConfig):
        raise Unsupported(
            "pipeline_parallel_size: this architecture has no list of blocks", field="pipeline_parallel_size"
        )
    return config
