"""From logits to tokens: masks and edits of logits, one draw per token, log-probabilities.

The reference sampler, and the only one. Randomness belongs to requests: one ``torch.Generator``
each, one float64 uniform per drawn token, none for a greedy one. With the exact arithmetic of
``quire.ops.filters`` a request's tokens depend only on its logits, parameters, history and seed.

Letters: R rows of logits, V vocabulary; W rows of one chunk of work; K candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvalidArgument, QuireError
from quire.ops.filters import (
    Allowed,
    Candidates,
    DrawKernel,
    GivenMasks,
    KernelDraws,
    Words,
    candidates,
    first_allowed,
    needs_no_order,
    num_words,
    take_rows,
    top_ids,
)
from quire.ops.logit_edits import FAILED, Bans, edited, first_maxima, maxima
from quire.ops.request_sampler import RequestSampler, check_ids
from quire.ops.uploads import uploaded

CHUNK_ELEMENTS = 1 << 24
"""Logits worked on at a time (128 MB per float64 temporary); more rows go through in several
chunks."""

# ---- Results -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankedLogprob:
    """Log-probability (natural, float32) of one token under the raw distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most probable; ties go by lower id."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The chosen token and the most probable ones by rank, the chosen one among them if ranked."""

    chosen: RankedLogprob
    top: tuple[RankedLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """One token per row. A failed row holds ``FAILED``, and its error is in ``failures``."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """None for rows without the request for them, and for failed rows."""
    failures: dict[int, QuireError]

    def raise_failures(self) -> None:
        """Raise the first failed row's error, for callers with one row per request."""
        for error in self.failures.values():
            raise error


# ---- The operations ------------------------------------------------------------------------------


def sample(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None = None,
    allowed: Allowed | Mapping[int, Words] | None = None,
    kernel: DrawKernel | None = None,
    first: Sequence[int] | None = None,
) -> SampledTokens:
    """Draw the next token of each row.

    ``logits_RV``: raw logits, float32 ``[R, V]``, on any device; not changed. ``samplers``: one per
    row. ``banned``: ids per row that may not be drawn (end tokens before ``min_tokens``); None:
    nothing is banned. ``allowed``: by row the mask of a grammar, uint32 ``[num_words(V)]``, or a
    maker of masks; other rows have none. A greedy row with an allowed token makes no mask.
    ``kernel`` draws for rows that need no order, where all rows are drawn from at once; None:
    PyTorch's operations do. ``first``: ``first_maxima`` of the logits, if they are known.

    A row gives ``FAILED`` and an entry in ``failures``, and draws nothing, if its logits hold NaN
    or +inf or are all -inf, if every token is banned, or if its processor fails. Other rows are not
    affected. ``InvalidArgument``: shapes, dtype or ids, before any generator has moved."""
    grammars = GivenMasks(allowed or {}) if allowed is None or isinstance(allowed, Mapping) else allowed
    ids = _check_batch(logits_RV, samplers, banned, grammars)
    if not grammars.rows and _fits_at_once(logits_RV, samplers):
        token_ids, failures = _sampled_at_once(logits_RV, samplers, ids, kernel)
        return _with_logprobs(logits_RV, samplers, token_ids, failures)
    token_ids = first_maxima(logits_RV) if first is None else list(first)
    failures = {row: _not_finite(row) for row, token in enumerate(token_ids) if token == FAILED}
    if banned is not None or grammars.rows or not all(sampler.takes_maximum for sampler in samplers):
        _draw(logits_RV, samplers, ids, grammars, token_ids, failures)
    return _with_logprobs(logits_RV, samplers, token_ids, failures)


@torch.no_grad()
def _draw(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    ids: Sequence[Sequence[int]],
    grammars: Allowed,
    token_ids: list[int],
    failures: dict[int, QuireError],
) -> None:
    """Replace the first maxima of rows that are not settled by what they draw."""
    work = [
        row
        for row, sampler in enumerate(samplers)
        if row not in failures
        and not _is_settled(sampler, ids[row], row not in grammars.rows or grammars.accepts(row, token_ids[row]))
    ]
    bans = Bans(ids, _masks(grammars, [row for row in work if row in grammars.rows], logits_RV.shape[1]))
    work = _take_allowed(logits_RV, work, samplers, bans, token_ids, failures)
    for rows in _chunks(work, logits_RV.shape[1]):
        z_WV, reasons = edited(logits_RV, rows, samplers, bans)
        max_W, tokens = z_WV.amax(-1), first_maxima(z_WV)
        drawing = [i for i, row in enumerate(rows) if tokens[i] != FAILED and not samplers[row].params.is_greedy]
        groups = candidates(z_WV, max_W, {i: samplers[rows[i]].params for i in drawing})
        uniforms = {i: samplers[rows[i]].uniform() for i in drawing}
        for group in groups:
            for i, token in zip(group.members, group.draw([uniforms[i] for i in group.members]), strict=True):
                tokens[i] = token
        for row, token in zip(rows, tokens, strict=True):
            token_ids[row] = token
            if token == FAILED:
                failures[row] = reasons.get(row) or _nothing_left()


def _with_logprobs(
    logits_RV: Tensor, samplers: Sequence[RequestSampler], token_ids: list[int], failures: dict[int, QuireError]
) -> SampledTokens:
    wanted = [sampler.params.logprobs for sampler in samplers]
    logprobs: list[TokenLogprobs | None] = [None] * len(wanted)
    if any(count is not None for count in wanted):
        logprobs = logprobs_of(logits_RV, token_ids, wanted)
    return SampledTokens(token_ids=token_ids, logprobs=logprobs, failures=dict(sorted(failures.items())))


def _fits_at_once(logits_RV: Tensor, samplers: Sequence[RequestSampler]) -> bool:
    """Return whether tokens come with one transfer from the logits' device. Users' processors and
    grammars need values on the way, and a CPU has nothing to wait for."""
    return not logits_RV.is_cpu and not any(one.params.logits_processors for one in samplers)


@torch.no_grad()
def _sampled_at_once(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]],
    kernel: DrawKernel | None,
) -> tuple[list[int], dict[int, QuireError]]:
    """Draw as ``sample``, and wait for the device once: all rows that may draw do, and what is
    known then says whose token counts. Another wait is for rows whose top-p holds more than the
    most probable tokens."""
    work = [row for row, sampler in enumerate(samplers) if not _is_settled(sampler, banned[row], True)]
    uniforms = {row: samplers[row].uniform() for row in work if not samplers[row].params.is_greedy}
    _, first_R = maxima(logits_RV)
    tokens_R, complete_R = first_R.clone(), torch.ones_like(first_R)
    for rows in _chunks(work, logits_RV.shape[1]):
        z_WV, _ = edited(logits_RV, rows, samplers, Bans(banned, {}))
        max_W, tokens_W = maxima(z_WV)
        params = {i: samplers[row].params for i, row in enumerate(rows) if row in uniforms}
        rows_W, complete_W = _uploaded_rows(rows, logits_RV), torch.ones_like(tokens_W)
        groups: list[Candidates | KernelDraws] = []
        if kernel is not None:
            for ordered in (False, True) if kernel.ranked else (False,):
                some = {i: one for i, one in params.items() if needs_no_order(one, z_WV.shape[1]) != ordered}
                groups += [KernelDraws(kernel, z_WV, max_W, some, ordered)] if some else []
                params = {i: one for i, one in params.items() if i not in some}
        groups += candidates(z_WV, max_W, params, at_once=True)
        for group in groups:
            members_G = _uploaded_rows(group.members, logits_RV)
            drawn_G = group.drawn([uniforms[rows[i]] for i in group.members])
            kept_G = tokens_W.index_select(0, members_G) == FAILED
            tokens_W.index_copy_(0, members_G, torch.where(kept_G, FAILED, drawn_G))
            if group.complete_G is not None:
                complete_W.index_copy_(0, members_G, (group.complete_G | kept_G).to(complete_W.dtype))
        tokens_R.index_copy_(0, rows_W, tokens_W)
        complete_R.index_copy_(0, rows_W, complete_W)
    first, tokens, complete = torch.stack((first_R, tokens_R, complete_R)).tolist()
    failures: dict[int, QuireError] = {}
    wide: list[int] = []
    for row, token in enumerate(tokens):
        if first[row] == FAILED:
            tokens[row], failures[row] = FAILED, _not_finite(row)
        elif token == FAILED:
            failures[row] = _nothing_left()
        elif not complete[row]:
            wide.append(row)
        if row in failures and row in uniforms:
            samplers[row].take_back(uniforms[row])
    for rows in _chunks(wide, logits_RV.shape[1]):
        z_WV, _ = edited(logits_RV, rows, samplers, Bans(banned, {}))
        for group in candidates(z_WV, z_WV.amax(-1), {i: samplers[row].params for i, row in enumerate(rows)}):
            for i, token in zip(group.members, group.draw([uniforms[rows[i]] for i in group.members]), strict=True):
                tokens[rows[i]] = token
    return tokens, failures


def _uploaded_rows(rows: Sequence[int], like: Tensor) -> Tensor:
    return uploaded(np.asarray(rows, dtype=np.int64), like.device)


@torch.no_grad()
def probabilities(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None = None,
    allowed: Mapping[int, Words] | None = None,
) -> Tensor:
    """Return the distribution of each row in ``sample``, float64 ``[R, V]``; move no generator. A
    greedy row is one-hot at the first maximum; a row that ``sample`` would fail is all zero."""
    grammars = GivenMasks(allowed or {})
    ids = _check_batch(logits_RV, samplers, banned, grammars)
    bans = Bans(ids, _masks(grammars, list(grammars.rows), logits_RV.shape[1]))
    p_RV = torch.zeros_like(logits_RV, dtype=torch.float64)
    for rows in _chunks(range(len(samplers)), logits_RV.shape[1]):
        z_WV, _ = edited(logits_RV, rows, samplers, bans)
        max_W, tokens = z_WV.amax(-1), first_maxima(z_WV)
        good = [i for i, token in enumerate(tokens) if token != FAILED]
        greedy = [i for i in good if samplers[rows[i]].params.is_greedy]
        places = np.array([[rows[i] for i in greedy], [tokens[i] for i in greedy]], dtype=np.int64)
        p_RV[tuple(uploaded(places, p_RV.device))] = 1.0
        for group in candidates(z_WV, max_W, {i: samplers[rows[i]].params for i in sorted({*good} - {*greedy})}):
            share_GK = group.weights.double() / group.weights.sum(-1, keepdim=True)
            index_G = _uploaded_rows([rows[i] for i in group.members], p_RV)
            p_GV = share_GK if group.ids is None else torch.zeros_like(p_RV[index_G]).scatter_(1, group.ids, share_GK)
            p_RV[index_G] = p_GV
    return p_RV


@torch.no_grad()
def logprobs_of(
    raw_logits_RV: Tensor, token_ids: Sequence[int], top_n: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Return log-probabilities of each row's chosen token and ``top_n`` most probable ones. float32
    log-softmax of the raw logits, float32 ``[R, V]``. None for a row with ``top_n`` None or token
    ``FAILED``. ``InvalidArgument``: token outside the vocabulary, ``top_n`` outside 0..V."""
    num_rows, vocab_size = _check_logits(raw_logits_RV)
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
    for rows in _chunks(list(wanted), vocab_size):
        z_WV = take_rows(raw_logits_RV, rows)
        ids_W1 = _uploaded_rows([token_ids[row] for row in rows], z_WV).unsqueeze(1)
        logprobs_WV = z_WV.log_softmax(-1)
        z_W1 = z_WV.gather(1, ids_W1)
        lower_V = torch.arange(vocab_size, device=z_WV.device) < ids_W1
        rank_W = 1 + ((z_WV > z_W1) | ((z_WV == z_W1) & lower_V)).sum(-1)
        top_ids_WK = top_ids(z_WV, max(wanted[row] for row in rows))
        columns = (logprobs_WV.gather(1, ids_W1), rank_W.unsqueeze(1), top_ids_WK, logprobs_WV.gather(1, top_ids_WK))
        # One transfer: float64 has all of these numbers exactly.
        for row, (chosen, rank, *tops) in zip(rows, torch.cat([x.double() for x in columns], 1).tolist(), strict=True):
            ids, of_ids = map(int, tops[: len(tops) // 2]), tops[len(tops) // 2 :]
            ranked = zip(ids, of_ids, range(1, wanted[row] + 1), strict=False)
            top = tuple(RankedLogprob(token, logprob, place) for token, logprob, place in ranked)
            results[row] = TokenLogprobs(RankedLogprob(token_ids[row], chosen, int(rank)), top)
    return results


@torch.no_grad()
def top_logprobs(raw_logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's ``count`` best tokens, int64 ``[R, K]``, and float32 log-probabilities.
    float32 log-softmax of the raw logits, float32 ``[R, V]``, as in ``logprobs_of``. NaN in a row
    with NaN or +inf, or with only -inf. ``InvalidArgument`` for a count outside 0..V."""
    num_rows, vocab_size = _check_logits(raw_logits_RV)
    if not 0 <= count <= vocab_size:
        raise InvalidArgument(f"count must be in 0..{vocab_size}, got {count}")
    ids_RK = raw_logits_RV.new_empty((num_rows, count), dtype=torch.int64)
    logprobs_RK = raw_logits_RV.new_empty((num_rows, count))
    for rows in _chunks(range(num_rows), vocab_size):
        chunk = slice(rows[0], rows[-1] + 1)
        ids_RK[chunk] = top_ids(raw_logits_RV[chunk], count)
        logprobs_RK[chunk] = raw_logits_RV[chunk].log_softmax(-1).gather(1, ids_RK[chunk])
    return ids_RK, logprobs_RK


# ---- Checks --------------------------------------------------------------------------------------


def _check_logits(logits_RV: Tensor) -> tuple[int, int]:
    if logits_RV.dim() != 2 or logits_RV.dtype != torch.float32 or logits_RV.shape[1] < 1:
        raise InvalidArgument(f"logits must be float32 [R, V], got {logits_RV.dtype} {list(logits_RV.shape)}")
    return logits_RV.shape[0], logits_RV.shape[1]


def _check_batch(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None,
    grammars: Allowed,
) -> Sequence[Sequence[int]]:
    """Refuse arguments that do not fit together; return the banned ids of each row."""
    num_rows, vocab_size = _check_logits(logits_RV)
    if len(samplers) != num_rows:
        raise InvalidArgument(f"need one sampler for each of {num_rows} rows of logits, got {len(samplers)}")
    for row, sampler in enumerate(samplers):
        if sampler.vocab_size != vocab_size:
            raise InvalidArgument(
                f"row {row}: the sampler is for {sampler.vocab_size} tokens, the logits for {vocab_size}"
            )
    outside = [row for row in grammars.rows if not 0 <= row < num_rows]
    if outside:
        raise InvalidArgument(f"a mask must be of a row in 0..{num_rows - 1}, got row {outside[0]}")
    if isinstance(grammars, GivenMasks):
        _masks(grammars, list(grammars.rows), vocab_size)
    if banned is None:
        return [()] * num_rows
    if len(banned) != num_rows:
        raise InvalidArgument(f"need one list of banned ids for each of {num_rows} rows, got {len(banned)}")
    for row, ids in enumerate(banned):
        check_ids(f"banned ids of row {row}", np.asarray(ids, dtype=np.int64), vocab_size)
    return banned


def _masks(grammars: Allowed, rows: Sequence[int], vocab_size: int) -> Mapping[int, Words]:
    masks = grammars.masks(rows) if rows else {}
    for row, words_B in masks.items():
        if words_B.dtype != np.uint32 or words_B.shape != (num_words(vocab_size),):
            raise InvalidArgument(
                f"a mask must be uint32 [{num_words(vocab_size)}], got {words_B.dtype} {list(words_B.shape)} of row {row}"
            )
    return masks


def _not_finite(row: int) -> QuireError:
    return QuireError(f"the logits of row {row} hold NaN or +inf, or are all -inf; no token can be drawn from them")


def _is_settled(sampler: RequestSampler, banned: Sequence[int], allowed: bool) -> bool:
    """Return whether the first maximum is the token: a greedy choice without edits or exclusion."""
    return allowed and sampler.takes_maximum and not len(banned)


def _nothing_left() -> QuireError:
    # A model's own logits are finite, so that what a request asks for together leaves nothing.
    return InvalidArgument("there is no token to draw: every token is banned or has logit -inf")


def _take_allowed(
    logits_RV: Tensor,
    work: Sequence[int],
    samplers: Sequence[RequestSampler],
    bans: Bans,
    token_ids: list[int],
    failures: dict[int, QuireError],
) -> list[int]:
    """Settle greedy rows on the CPU that need only a mask; return the other rows of ``work``."""
    if logits_RV.device.type != "cpu":
        return list(work)
    masked = {row: words for row, words in bans.allowed.items() if _is_settled(samplers[row], bans.ids[row], True)}
    for row, (token, logit) in first_allowed(logits_RV, masked).items():
        token_ids[row] = token if math.isfinite(logit) else FAILED
        if token_ids[row] == FAILED:
            failures[row] = _nothing_left()
    return [row for row in work if row not in masked]


def _chunks(rows: Sequence[int], vocab_size: int) -> Iterator[Sequence[int]]:
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
