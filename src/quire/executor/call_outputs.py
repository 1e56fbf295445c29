"""Outputs of forwards for the rows of one item, as the values that the contract returns.

Letters: B batch rows; S tokens with padding; E model width; Hq query heads; K keys; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

from quire.base.types import LogitsWanted
from quire.contracts.executor import DecodeOutput, PrefillOutput
from quire.executor.arguments import CallItem
from quire.executor.cache_pool import CachePool
from quire.executor.forward_packing import RowOutput, batched, batched_weights, rows_wanted, stacked
from quire.executor.handle import Handle

Places: TypeAlias = tuple[list[Tensor | None], list[Tensor]]


def places_for_logits(
    pool: CachePool, items: Sequence[CallItem], wanted: Sequence[LogitsWanted], *, in_pieces: bool
) -> Callable[[], Places] | None:
    """Return a function that makes, once, results ``[B, S, V]`` and each row's part of them for
    logits.

    Results have zeros at padding. An item needs none if its rows of logits are adjacent already: it
    has no padding, and logits do not come ``in_pieces``. None: no item needs any.
    """
    placed = [kind == "all" and (in_pieces or one.is_padded) for one, kind in zip(items, wanted, strict=True)]
    if not any(placed):
        return None

    @cache
    def make() -> Places:
        results: list[Tensor | None] = []
        places: list[Tensor] = []
        for item, kind, in_one in zip(items, wanted, placed, strict=True):
            result = pool.facts.logits(len(item.spans), item.columns) if in_one else None
            results.append(result)
            if result is not None:
                places += [row[a:b] for row, (a, b) in zip(result, item.spans, strict=True)]
            else:
                places += [pool.facts.logits(rows_wanted(kind, ids.size)) for ids in item.tokens]
        return results, places

    return make


def prefill_output(
    item: CallItem, handle: Handle, wanted: LogitsWanted, rows: Sequence[RowOutput], logits: Tensor | None
) -> PrefillOutput:
    """Make the output of a prompt from its ``rows`` and the result ``logits`` that rows were
    written to."""
    spans, columns = item.spans, item.columns
    last = None
    if wanted == "all" and item.is_padded:
        last = tuple(b - 1 for _, b in spans)
    if logits is None and wanted != "none":
        logits = stacked([row.logits_RV for row in rows])
    hidden = weights = None
    if item.asked.hidden_states:
        layers = zip(*(row.hidden_states for row in rows), strict=True)
        hidden = tuple(batched(layer, spans, columns) for layer in layers)
    if item.asked.attention_weights:
        layers = zip(*(row.attention_weights for row in rows), strict=True)
        weights = tuple(batched_weights(layer, spans, columns) for layer in layers)
    return PrefillOutput(
        logits=logits, kv_cache=handle, last_indices=last, hidden_states=hidden, attention_weights=weights
    )


def decode_output(item: CallItem, handle: Handle, rows: Sequence[RowOutput]) -> DecodeOutput:
    """Make the output of a decode from its ``rows``, which may be views of a larger batch."""
    hidden = weights = None
    if item.asked.hidden_states:
        hidden = torch.cat([row.hidden_states[-1] for row in rows])
    if item.asked.attention_weights:
        layers = zip(*(row.attention_weights for row in rows), strict=True)
        weights = tuple(batched_weights(layer, item.spans, 1) for layer in layers)
    return DecodeOutput(
        logits=stacked([row.logits_RV[0] for row in rows]),
        kv_cache=handle,
        hidden_state=hidden,
        attention_weights=weights,
    )
