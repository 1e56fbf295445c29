"""Attention of latent layers (MLA, DeepSeek-V2, arXiv:2405.04434) over an open forward.

A latent layer keeps one row ``[c_kv | k_pe]`` per token. A query meets it in one of two forms:

* *expanded*: rows become K and V of every head, ``k = [key c_kv | k_pe]`` and ``v = c_kv value``.
  Cheap where many queries share a new row, so the new tokens of a forward attend to each other so.
  Where only some of them continue, rows of all would be expanded: if that is worth it;
* *absorbed*: the query becomes ``[q_nope key | q_pe]`` and attends to the rows themselves, as to
  one KV head whose value is the row's first columns; ``value`` is applied to the result. No stored
  row is expanded, so decodes and queries over the past take this form.

Both are equal up to rounding. The last ``rope.rotary_dim`` columns of queries and rows turn.

Letters: T new tokens; S slots; Hq heads; R columns of ``c_kv``; Dn, Dr columns of a head without
and with positions; Dv value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument
from quire.contracts.layers import LatentAttention
from quire.contracts.model import LatentExpansion
from quire.kv.plans import Batch


def worth_expanding(batch: Batch, expansion: LatentExpansion) -> bool:
    """Return whether fewer products are needed if rows of all tokens that the forward appends are
    expanded for the few that run. These see half of them on average."""
    _, nope, rank = expansion.key_HDR.shape
    columns = nope + expansion.value_HRV.shape[2]
    saved = int((batch.counts * batch.added).sum()) // 2 * (2 * rank - columns)
    return saved > int(batch.added.sum()) * rank * columns


def check_shapes(
    tokens: int, layer_id: int, spec: LatentAttention, q_THD: Tensor, rows_TR: Tensor, expansion: LatentExpansion
) -> None:
    rotary = spec.row_dim - spec.value_dim
    if rows_TR.shape != (tokens, spec.row_dim):
        raise InvalidArgument(
            f"attend_latent: rows of layer {layer_id} have shape {tuple(rows_TR.shape)}; {(tokens, spec.row_dim)} is needed"
        )
    if q_THD.dim() != 3 or q_THD.shape[:2] != (tokens, spec.num_heads) or q_THD.shape[2] <= rotary:
        raise InvalidArgument(
            f"attend_latent: q of layer {layer_id} has shape {tuple(q_THD.shape)}; [{tokens}, {spec.num_heads}, more than {rotary}] is needed"
        )
    key, value = expansion.key_HDR, expansion.value_HRV
    wanted = (spec.num_heads, q_THD.shape[2] - rotary, spec.value_dim)
    if key.shape != wanted or value.dim() != 3 or value.shape[:2] != (spec.num_heads, spec.value_dim):
        raise InvalidArgument(
            f"attend_latent: the expansion of layer {layer_id} has shapes {tuple(key.shape)} and {tuple(value.shape)}; "
            f"{wanted} and [{spec.num_heads}, {spec.value_dim}, any] are needed"
        )


def expand(rows_TR: Tensor, expansion: LatentExpansion, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return K ``[T, Hq, Dn + Dr]`` and V ``[T, Hq, Dv]`` of turned rows."""
    heads, nope, rank = expansion.key_HDR.shape
    c_TR, k_pe_TR = rows_TR[:, :rank], rows_TR[:, rank:]
    k_nope_THD = (c_TR @ expansion.key_HDR.reshape(-1, rank).T).view(-1, heads, nope)
    k_THD = torch.cat((k_nope_THD, k_pe_TR.unsqueeze(1).expand(-1, heads, -1)), -1)
    v_THD = torch.matmul(c_TR, expansion.value_HRV).transpose(0, 1)
    return k_THD.to(dtype), v_THD.to(dtype).contiguous()


def expand_values(out_THR: Tensor, expansion: LatentExpansion) -> Tensor:
    """Return ``[T, Hq, Dv]``, contiguous, of attention over rows."""
    if expansion.absorbing is not None:
        out_THV = out_THR.new_empty(*out_THR.shape[:2], expansion.value_HRV.shape[2])
        expansion.absorbing.values(out_THR, out_THV)
        return out_THV
    return torch.bmm(out_THR.transpose(0, 1), expansion.value_HRV).transpose(0, 1).contiguous()


def absorb(q_THD: Tensor, expansion: LatentExpansion, dtype: torch.dtype) -> Tensor:
    """Return ``[T, Hq, R + Dr]`` of turned queries."""
    _, nope, rank = expansion.key_HDR.shape
    if expansion.absorbing is not None:
        rows_THR = q_THD.new_empty(*q_THD.shape[:2], rank + q_THD.shape[2] - nope)
        expansion.absorbing.queries(q_THD[..., :nope], rows_THR[..., :rank])
        rows_THR[..., rank:] = q_THD[..., nope:]
        return rows_THR.to(dtype)
    q_THR = torch.bmm(q_THD[..., :nope].transpose(0, 1), expansion.key_HDR).transpose(0, 1)
    return torch.cat((q_THR, q_THD[..., nope:]), -1).to(dtype)
