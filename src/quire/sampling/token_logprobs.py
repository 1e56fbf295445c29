"""Log-probabilities of tokens under the raw distribution of a model.

Letters: R rows of logits, V vocabulary; W rows of one chunk of work; K tokens of highest logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError
from quire.sampling.filters import take_rows, top_ids, uploaded_rows
from quire.sampling.logit_edits import FAILED, check_logits, chunks
from quire.sampling.sampled_tokens import RankedLogprob, TokenLogprobs


@torch.no_grad()
def logprobs_of(
    raw_logits_RV: Tensor, token_ids: Sequence[int], top_n: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Return log-probabilities of each row's chosen token and ``top_n`` most probable ones. float32
    log-softmax of the raw logits, float32 ``[R, V]``. None for a row with ``top_n`` None or token
    ``FAILED``. ``InvalidArgument``: token outside the vocabulary, ``top_n`` outside 0..V."""
    num_rows, vocab_size = check_logits(raw_logits_RV)
    if not num_rows == len(token_ids) == len(top_n):
        raise InvalidArgument(
            f"need one token and one top_n for each of {num_rows} rows, got {len(token_ids)}, {len(top_n)}"
        )
    wanted = {r: n for r, n in enumerate(top_n) if n is not None and token_ids[r] != FAILED}
    for row, n in wanted.items():
        if not 0 <= token_ids[row] < vocab_size or not 0 <= n <= vocab_size:
            raise InvalidArgument(
                f"row {row}: token must be in 0..{vocab_size - 1} and top_n in 0..{vocab_size}, got {token_ids[row]}, {n}"
            )
    results: list[TokenLogprobs | None] = [None] * num_rows
    for rows in chunks(list(wanted), vocab_size):
        ids_W = uploaded_rows([token_ids[row] for row in rows], raw_logits_RV.device)
        table = ranked(raw_logits_RV, rows, ids_W, max(wanted[row] for row in rows)).tolist()
        for row, numbers in zip(rows, table, strict=True):
            results[row] = read_ranked(numbers, token_ids[row], wanted[row])
    return results


@torch.no_grad()
def ranked(raw_logits_RV: Tensor, rows: Sequence[int], ids_W: Tensor, width: int) -> Tensor:
    """Return the input of ``read_ranked``, float64 ``[W, 2 + 2 K]``, on the logits' device; K is
    ``width``. ``ids_W``: the chosen tokens of ``rows``. Float64 holds all of these numbers exactly,
    so they reach the host in one transfer."""
    z_WV, ids_W1 = take_rows(raw_logits_RV, rows), ids_W.unsqueeze(1)
    vocab_size = z_WV.shape[1]
    logprobs_WV = z_WV.log_softmax(-1)
    z_W1 = z_WV.gather(1, ids_W1)
    lower_V = torch.arange(vocab_size, device=z_WV.device) < ids_W1
    rank_W = 1 + ((z_WV > z_W1) | ((z_WV == z_W1) & lower_V)).sum(-1)
    top_ids_WK = top_ids(z_WV, width)
    columns = (logprobs_WV.gather(1, ids_W1), rank_W.unsqueeze(1), top_ids_WK, logprobs_WV.gather(1, top_ids_WK))
    return torch.cat([one.double() for one in columns], 1)


def read_ranked(numbers: Sequence[float], token_id: int, top_n: int) -> TokenLogprobs:
    """Return the log-probabilities of one row of ``ranked``."""
    chosen, rank, *tops = numbers
    ids, of_ids = map(int, tops[: len(tops) // 2]), tops[len(tops) // 2 :]
    best = zip(ids, of_ids, range(1, top_n + 1), strict=False)
    top = tuple(RankedLogprob(token, logprob, place) for token, logprob, place in best)
    return TokenLogprobs(RankedLogprob(token_id, chosen, int(rank)), top)


@torch.no_grad()
def top_logprobs(raw_logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's ``count`` best tokens, int64 ``[R, K]``, and float32 log-probabilities.
    float32 log-softmax of the raw logits, float32 ``[R, V]``, as in ``logprobs_of``. NaN in a row
    with NaN or +inf, or with only -inf. ``InvalidArgument`` for a count outside 0..V."""
    num_rows, vocab_size = check_logits(raw_logits_RV)
    if not 0 <= count <= vocab_size:
        raise InvalidArgument(f"count must be in 0..{vocab_size}, got {count}")
    ids_RK = raw_logits_RV.new_empty((num_rows, count), dtype=torch.int64)
    logprobs_RK = raw_logits_RV.new_empty((num_rows, count))
    for rows in chunks(range(num_rows), vocab_size):
        chunk = slice(rows[0], rows[-1] + 1)
        ids_RK[chunk] = top_ids(raw_logits_RV[chunk], count)
        logprobs_RK[chunk] = raw_logits_RV[chunk].log_softmax(-1).gather(1, ids_RK[chunk])
    return ids_RK, logprobs_RK


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, from the logits of its chunks (not kept)."""

    def __init__(self, tokens: NDArray[Any], count: int) -> None:
        """Collect the log-probabilities of each prompt token and of the ``count`` most probable
        ones."""
        self._tokens = tokens
        self._count = count
        self.entries: list[TokenLogprobs] = []
        """Of the prompt's tokens from the second on, as far as they are known."""

    @property
    def complete(self) -> bool:
        return len(self.entries) == len(self._tokens) - 1

    def take(self, position: int, rows_RV: Tensor) -> None:
        """Read the logits of the tokens from ``position`` on, each of its successor; skip known
        ones. ``QuireError`` if they are not finite."""
        known = len(self.entries)
        targets = self._tokens[known + 1 : position + rows_RV.shape[0] + 1].tolist()
        if not targets:
            return
        start = known - position
        found = logprobs_of(rows_RV[start : start + len(targets)].float(), targets, [self._count] * len(targets))
        for offset, entry in enumerate(found):
            if entry is None or math.isnan(entry.chosen.logprob):
                raise QuireError(f"the logits after token {known + offset} of the prompt hold NaN or +inf")
            self.entries.append(entry)
