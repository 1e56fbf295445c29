"""Outputs of forwards for the rows of one item, as the values that the contract returns.

Letters: B batch rows; S tokens with padding; E model width; Hq query heads; K keys; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.base.types import LogitsPlace, LogitsWanted
from quire.contracts.executor import DecodeOutput, PrefillOutput
from quire.executor.arguments import CallItem
from quire.executor.forward_packing import RowOutput, batched, batched_weights, rows_wanted, stacked
from quire.executor.handle import Handle


@dataclass(frozen=True, slots=True)
class CallPlaces:
    """The destinations of the logits of a call."""

    rows: Sequence[LogitsPlace] = ()
    """One for each row; empty: logits are returned."""
    items: Sequence[int | None] = ()
    """For each item the tensor ``[B * S, V]`` of its result; None: its rows have one each."""


def places_for_logits(items: Sequence[CallItem], wanted: Sequence[LogitsWanted], *, in_pieces: bool) -> CallPlaces:
    """Return places for results ``[B, S, V]``.

    An item needs none if its rows of logits are adjacent already: it has no padding, and logits do
    not come ``in_pieces``. There are places for all items if one needs some.
    """
    placed = [kind == "all" and (in_pieces or one.is_padded) for one, kind in zip(items, wanted, strict=True)]
    if not any(placed):
        return CallPlaces((), [None] * len(items))
    rows: list[LogitsPlace] = []
    tensors: list[int | None] = []
    for item, kind, in_one in zip(items, wanted, placed, strict=True):
        name, columns = len(rows), item.columns
        tensors.append(name if in_one else None)
        if in_one:
            size = len(item.spans) * columns
            rows += [LogitsPlace(name, size, row * columns + a) for row, (a, _) in enumerate(item.spans)]
        else:
            rows += [LogitsPlace(name + row, rows_wanted(kind, ids.size)) for row, ids in enumerate(item.tokens)]
    return CallPlaces(rows, tensors)


def prefill_output(
    item: CallItem, handle: Handle, wanted: LogitsWanted, rows: Sequence[RowOutput], logits: Tensor | None
) -> PrefillOutput:
    """Make the output of a prompt from its ``rows`` and the tensor ``logits`` ``[B * S, V]`` that
    rows were written to."""
    spans, columns = item.spans, item.columns
    last = None
    if wanted == "all" and item.is_padded:
        last = tuple(b - 1 for _, b in spans)
    if logits is not None:
        logits = logits.view(len(spans), columns, -1)
    elif wanted != "none":
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
