"""What ran for the rows of one item, as the values that the contract returns.

Letters: B batch rows; S tokens of a row with padding; E model width; Hq query heads; K keys; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.contracts.executor import DecodeOutput, PrefillOutput
from quire.executor.arguments import Request
from quire.executor.forwards import RowOutput, batched, batched_weights
from quire.executor.handle import Handle
from quire.types import LogitsWanted


def prefill_output(request: Request, handle: Handle, wanted: LogitsWanted, rows: Sequence[RowOutput]) -> PrefillOutput:
    """``rows``: one for each row of the request."""
    spans, columns = request.spans, request.columns
    logits, last = None, None
    if wanted == "last":
        logits = torch.stack([row.logits_RV for row in rows])
    elif wanted == "all" and len(rows) == 1 and spans[0] == (0, columns):
        logits = rows[0].logits_RV[None]
    elif wanted == "all":
        logits = batched([row.logits_RV for row in rows], spans, columns)
        last = tuple(b - 1 for _, b in spans)
    hidden = weights = None
    if request.asked.hidden_states:
        layers = zip(*(row.hidden_states for row in rows), strict=True)
        hidden = tuple(batched(layer, spans, columns) for layer in layers)
    if request.asked.attention_weights:
        layers = zip(*(row.attention_weights for row in rows), strict=True)
        weights = tuple(batched_weights(layer, spans, columns) for layer in layers)
    return PrefillOutput(
        logits=logits, kv_cache=handle, last_indices=last, hidden_states=hidden, attention_weights=weights
    )


def decode_output(request: Request, handle: Handle, rows: Sequence[RowOutput]) -> DecodeOutput:
    """``rows``: one token of each row of the request. Joined here, so that no two outputs share memory."""
    hidden = weights = None
    if request.asked.hidden_states:
        hidden = torch.cat([row.hidden_states[-1] for row in rows])
    if request.asked.attention_weights:
        layers = zip(*(row.attention_weights for row in rows), strict=True)
        weights = tuple(batched_weights(layer, request.spans, 1) for layer in layers)
    return DecodeOutput(
        logits=torch.cat([row.logits_RV for row in rows]),
        kv_cache=handle,
        hidden_state=hidden,
        attention_weights=weights,
    )
