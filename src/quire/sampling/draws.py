"""Asynchronous draws: tokens stay on the logits' device until the host reads them.

Letters: R rows of logits, V vocabulary; W rows of one chunk of work, G of a group in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from quire.base.errors import QuireError
from quire.base.host_link import Download
from quire.sampling.filters import (
    Candidates,
    DrawKernel,
    KernelDraws,
    candidates,
    needs_no_order,
    take_rows,
    uploaded_rows,
)
from quire.sampling.logit_edits import FAILED, Bans, chunks, edited, is_settled, maxima, not_finite, nothing_left
from quire.sampling.request_sampler import RequestSampler
from quire.sampling.sampled_tokens import SampledTokens, TokenLogprobs
from quire.sampling.seen_tokens import SeenTokens
from quire.sampling.token_logprobs import logprobs_of, ranked, read_ranked


class Draws:
    """One token for each row of logits, as ``sampling.sample`` draws them.

    The device draws for every row that needs a draw. At ``read`` the host sorts out the failed rows
    and the incomplete ones: if top-p of a row holds more tokens than the most probable ones that
    were ordered, the row is drawn again.
    """

    @torch.no_grad()
    def __init__(
        self,
        logits_RV: Tensor,
        samplers: Sequence[RequestSampler],
        banned: Sequence[Sequence[int]],
        kernel: DrawKernel | None,
        seen: SeenTokens | None = None,
        unread_R: Tensor | None = None,
    ) -> None:
        """Queue the draws. The logits must stay unchanged until ``read``. The arguments are those
        of ``sampler.sample_later``, which has checked them."""
        self._seen, self._unread_R = seen, unread_R
        self._logits_RV, self._samplers, self._banned = logits_RV, samplers, banned
        self.redrawn: tuple[int, ...] = ()
        """Rows that drew again, known after ``read``."""
        work = [row for row, sampler in enumerate(samplers) if not is_settled(sampler, banned[row], True)]
        self._uniforms: dict[int, float] = {}
        try:
            self._uniforms |= {row: samplers[row].uniform() for row in work if not samplers[row].params.is_greedy}
            self._queue(work, kernel)
        except BaseException:
            self.drop(range(len(samplers)))
            raise

    def _queue(self, work: Sequence[int], kernel: DrawKernel | None) -> None:
        """Queue the draws of all rows, and the copies of their results to the host. ``work``: rows
        whose token may differ from their first maximum."""
        logits_RV = self._logits_RV
        _, first_R = maxima(logits_RV)
        self.tokens_R = first_R
        """int64 ``[R]``, on the device. Undefined (``FAILED`` or any token) in failed rows. Rows
        that are drawn again get another token at ``read``."""
        complete_R = torch.ones_like(first_R)
        if work:
            self.tokens_R = first_R.clone()
            for rows in chunks(work, logits_RV.shape[1]):
                self._draw(rows, kernel, complete_R)
        wanted = ((row, sampler.params.logprobs) for row, sampler in enumerate(self._samplers))
        self._wanted = {row: count for row, count in wanted if count is not None}
        self._ranked = list(chunks(list(self._wanted), logits_RV.shape[1]))
        tables = []
        for rows in self._ranked:
            ids_W = take_rows(self.tokens_R, rows).clamp(min=0)
            tables.append(ranked(logits_RV, rows, ids_W, max(self._wanted[row] for row in rows)))
        self._coming = Download([torch.stack((first_R, self.tokens_R, complete_R)), *tables])

    def _draw(self, rows: Sequence[int], kernel: DrawKernel | None, complete_R: Tensor) -> None:
        """Draw for ``rows``; write their tokens, and in ``complete_R`` 0 for rows that must be
        drawn again."""
        penalise, unread_W = None, self._unread_R
        if self._seen is not None:
            if unread_W is not None and len(rows) < len(unread_W):
                unread_W = take_rows(unread_W, rows)
            penalise = partial(self._seen.penalise, unread_W=unread_W)
        z_WV, _ = edited(self._logits_RV, rows, self._samplers, Bans(self._banned, {}), penalise)
        max_W, tokens_W = maxima(z_WV)
        params = {i: self._samplers[row].params for i, row in enumerate(rows) if row in self._uniforms}
        complete_W = torch.ones_like(tokens_W)
        groups: list[Candidates | KernelDraws] = []
        if kernel is not None:
            for ordered in (False, True) if kernel.ranked else (False,):
                some = {i: one for i, one in params.items() if needs_no_order(one, z_WV.shape[1]) != ordered}
                groups += [KernelDraws(kernel, z_WV, max_W, some, ordered)] if some else []
                params = {i: one for i, one in params.items() if i not in some}
        groups += candidates(z_WV, max_W, params, at_once=True)
        for group in groups:
            members_G = uploaded_rows(group.members, z_WV.device)
            drawn_G = group.drawn([self._uniforms[rows[i]] for i in group.members])
            kept_G = tokens_W.index_select(0, members_G) == FAILED
            tokens_W.index_copy_(0, members_G, torch.where(kept_G, FAILED, drawn_G))
            if group.complete_G is not None:
                complete_W.index_copy_(0, members_G, (group.complete_G | kept_G).to(complete_W.dtype))
        rows_W = uploaded_rows(rows, z_WV.device)
        self.tokens_R.index_copy_(0, rows_W, tokens_W)
        complete_R.index_copy_(0, rows_W, complete_W)

    def read(self) -> SampledTokens:
        """Wait for the tokens and return them. Call it once, before a sampler observes a token."""
        numbers, *tables = (one.tolist() for one in self._coming.wait())
        first, tokens, complete = numbers
        failures: dict[int, QuireError] = {}
        again: list[int] = []
        for row, token in enumerate(tokens):
            if first[row] == FAILED:
                tokens[row], failures[row] = FAILED, not_finite(row)
            elif token == FAILED:
                failures[row] = nothing_left()
            elif not complete[row] and row in self._uniforms:
                again.append(row)
        self.drop(failures)
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for rows, table in zip(self._ranked, tables, strict=True):
            for row, one in zip(rows, table, strict=True):
                if row not in failures:
                    logprobs[row] = read_ranked(one, tokens[row], self._wanted[row])
        if again:
            self._draw_again(again, tokens)
            wanted = [self._wanted.get(row) if row in again else None for row in range(len(tokens))]
            for row, found in enumerate(logprobs_of(self._logits_RV, tokens, wanted)):
                logprobs[row] = logprobs[row] if found is None else found
        self.redrawn = tuple(again)
        return SampledTokens(token_ids=tokens, logprobs=logprobs, failures=failures)

    @torch.no_grad()
    def _draw_again(self, again: Sequence[int], tokens: list[int]) -> None:
        """Draw from whole rows, with the same random numbers."""
        for rows in chunks(again, self._logits_RV.shape[1]):
            z_WV, _ = edited(self._logits_RV, rows, self._samplers, Bans(self._banned, {}))
            params = {i: self._samplers[row].params for i, row in enumerate(rows)}
            for group in candidates(z_WV, z_WV.amax(-1), params):
                drawn = group.draw([self._uniforms[rows[i]] for i in group.members])
                for i, token in zip(group.members, drawn, strict=True):
                    tokens[rows[i]] = token

    def drop(self, rows: Iterable[int]) -> None:
        """Return the random numbers of rows with discarded tokens to their generators, and forget
        their counts."""
        for row in rows:
            if row in self._uniforms:
                self._samplers[row].rollback(self._uniforms.pop(row))
            if self._seen is not None:
                self._seen.forget(self._samplers[row])
