"""The effect of adapters on a linear map and on an embedding, row by row. The reference.

A row under a low-rank adapter (LoRA, arXiv:2106.09685) gets ``x A^T B^T`` added to some columns of
its result. If the adapter has its own table, the row gets that table's result instead of the
model's. Rows of the base model are unchanged. ``adapters.low_rank`` must give the same results.

Letters: T rows; I input, O output features of the whole map; R rank; V vocabulary; E model width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.contracts.adapters import LowRankUpdate


def add_low_rank(y_TO: Tensor, x_TI: Tensor, updates_T: Sequence[Sequence[LowRankUpdate]]) -> Tensor:
    """Return a fresh ``[T, O]``: ``y [T, O]`` of the base model for ``x [T, I]``, plus each row's
    updates. Summed in float32 (float64 for such an ``x``) and rounded once."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    out_TO = y_TO.clone()
    for row, updates in enumerate(updates_T):
        x_I = x_TI[row].to(wide)
        for update in updates:
            h_R = update.a_RI.to(wide) @ x_I
            part_O = out_TO[row, update.row : update.row + update.b_RO.shape[1]]
            part_O.copy_(part_O.to(wide) + h_R @ update.b_RO.to(wide))
    return out_TO


def replace_products(
    y_TO: Tensor, x_TI: Tensor, tables_T: Sequence[Tensor | None], bias_O: Tensor | None = None
) -> Tensor:
    """Return a fresh ``[T, O]``: row t is ``x[t] W^T + b`` for its table W ``[O, I]``; None:
    unchanged."""
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    out_TO = y_TO.clone()
    for row, table_OI in enumerate(tables_T):
        if table_OI is not None:
            sum_O = table_OI.to(wide) @ x_TI[row].to(wide)
            out_TO[row] = sum_O if bias_O is None else sum_O + bias_O.to(wide)
    return out_TO


def embed_under(
    x_TE: Tensor, tokens_T: Tensor, updates_T: Sequence[Sequence[LowRankUpdate]], tables_T: Sequence[Tensor | None]
) -> Tensor:
    """Map the base model's embeddings ``x [T, E]`` to a fresh ``[T, E]``, before any scale. Rows of
    an adapter's table ``[V, E]`` replace the model's; updates add ``A[:, token] B``."""
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    out_TE = x_TE.clone()
    for row, (token, updates, table_VE) in enumerate(zip(tokens_T.tolist(), updates_T, tables_T, strict=True)):
        if table_VE is not None:
            out_TE[row] = table_VE[token]
        for update in updates:
            part_E = out_TE[row, update.row : update.row + update.b_RO.shape[1]]
            part_E.copy_(part_E.to(wide) + update.a_RI[:, token].to(wide) @ update.b_RO.to(wide))
    return out_TE
