"""From logits to tokens: masks and edits of logits, one draw per token, log-probabilities.

The reference sampler, and the only one. Randomness belongs to requests: one ``torch.Generator``
each, one float64 uniform per drawn token, none for a greedy one. With the exact arithmetic of
``sampling.filters`` a request's tokens depend only on its logits, parameters, history and seed.

Letters: R rows of logits, V vocabulary; W rows of one chunk of work; K candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, QuireError
from quire.base.uploads import uploaded
from quire.sampling.draws import Draws
from quire.sampling.filters import (
    Allowed,
    DrawKernel,
    GivenMasks,
    Words,
    candidates,
    first_allowed,
    num_words,
    uploaded_rows,
)
from quire.sampling.logit_edits import (
    FAILED,
    Bans,
    check_logits,
    chunks,
    edited,
    first_maxima,
    is_settled,
    not_finite,
    nothing_left,
)
from quire.sampling.request_sampler import RequestSampler, check_ids
from quire.sampling.sampled_tokens import SampledTokens, TokenLogprobs
from quire.sampling.seen_tokens import SeenTokens
from quire.sampling.token_logprobs import logprobs_of

# ---- The operations ------------------------------------------------------------------------------


def sample(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None = None,
    allowed: Allowed | Mapping[int, Words] | None = None,
    kernel: DrawKernel | None = None,
    maxima: Sequence[int] | None = None,
) -> SampledTokens:
    """Draw the next token of each row.

    ``logits_RV``: raw logits, float32 ``[R, V]``, on any device; not changed. ``samplers``: one per
    row. ``banned``: ids per row that may not be drawn (end tokens before ``min_tokens``); None:
    nothing is banned. ``allowed``: by row the mask of a grammar, uint32 ``[num_words(V)]``, or a
    maker of masks; other rows have none. A greedy row with an allowed token makes no mask.
    ``kernel`` draws if the logits are on another device than a CPU, and no row has a grammar or
    logits processors; None: PyTorch's operations do. ``maxima``: ``first_maxima`` of the logits, if
    they are known.

    A row gives ``FAILED`` and an entry in ``failures``, and draws nothing, if its logits hold NaN
    or +inf or are all -inf, if every token is banned, or if its processor fails. Other rows are not
    affected. ``InvalidArgument``: shapes, dtype or ids, before any generator has advanced.
    """
    grammars = GivenMasks(allowed or {}) if allowed is None or isinstance(allowed, Mapping) else allowed
    ids = _check_batch(logits_RV, samplers, banned, grammars)
    if not grammars.rows and not logits_RV.is_cpu and all(map(can_wait, samplers)):
        return Draws(logits_RV, samplers, ids, kernel).read()
    token_ids = first_maxima(logits_RV) if maxima is None else list(maxima)
    failures = {row: not_finite(row) for row, token in enumerate(token_ids) if token == FAILED}
    if banned is not None or grammars.rows or not all(sampler.takes_maximum for sampler in samplers):
        _draw(logits_RV, samplers, ids, grammars, token_ids, failures)
    return _with_logprobs(logits_RV, samplers, token_ids, failures)


def can_wait(sampler: RequestSampler) -> bool:
    """Return True if a row can be drawn without values on the host. Users' processors and bad words
    of several tokens need them."""
    return not sampler.reads_output


def sample_later(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None = None,
    kernel: DrawKernel | None = None,
    seen: SeenTokens | None = None,
    unread_R: Tensor | None = None,
) -> Draws:
    """Queue the work of ``sample`` without waiting; ``Draws.read`` returns the tokens.

    For rows without a grammar that ``can_wait``, on any device; ``InvalidArgument`` as in
    ``sample``. ``seen`` applies penalties; None: penalties count the tokens that samplers have
    observed. ``unread_R``: int64 on the logits' device, the last token of each row if its sampler
    has not observed it yet. It counts for penalties, which need ``seen`` then.
    """
    ids = _check_batch(logits_RV, samplers, banned, GivenMasks({}))
    if not all(map(can_wait, samplers)):
        raise InvalidArgument("rows with logits_processors or bad_words need values on the host; draw them by `sample`")
    if unread_R is not None and seen is None and any(one.counts is not None for one in samplers):
        raise InvalidArgument("rows with penalties behind tokens that nobody has read need `seen`, which counts them")
    return Draws(logits_RV, samplers, ids, kernel, seen, unread_R)


@torch.no_grad()
def _draw(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    ids: Sequence[Sequence[int]],
    grammars: Allowed,
    token_ids: list[int],
    failures: dict[int, QuireError],
) -> None:
    """Replace the first maxima by drawn tokens in rows that are not ``is_settled``."""
    work = [
        row
        for row, sampler in enumerate(samplers)
        if row not in failures
        and not is_settled(sampler, ids[row], row not in grammars.rows or grammars.accepts(row, token_ids[row]))
    ]
    bans = Bans(ids, _masks(grammars, [row for row in work if row in grammars.rows], logits_RV.shape[1]))
    work = _take_allowed(logits_RV, work, samplers, bans, token_ids, failures)
    for rows in chunks(work, logits_RV.shape[1]):
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
                failures[row] = reasons.get(row) or nothing_left()


def _with_logprobs(
    logits_RV: Tensor, samplers: Sequence[RequestSampler], token_ids: list[int], failures: dict[int, QuireError]
) -> SampledTokens:
    wanted = [sampler.params.logprobs for sampler in samplers]
    logprobs: list[TokenLogprobs | None] = [None] * len(wanted)
    if any(count is not None for count in wanted):
        logprobs = logprobs_of(logits_RV, token_ids, wanted)
    return SampledTokens(token_ids=token_ids, logprobs=logprobs, failures=dict(sorted(failures.items())))


@torch.no_grad()
def probabilities(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None = None,
    allowed: Mapping[int, Words] | None = None,
) -> Tensor:
    """Return the distribution of each row in ``sample``, float64 ``[R, V]``; no generator advances.
    A greedy row is one-hot at the first maximum; a row that ``sample`` would fail is all zero."""
    grammars = GivenMasks(allowed or {})
    ids = _check_batch(logits_RV, samplers, banned, grammars)
    bans = Bans(ids, _masks(grammars, list(grammars.rows), logits_RV.shape[1]))
    p_RV = torch.zeros_like(logits_RV, dtype=torch.float64)
    for rows in chunks(range(len(samplers)), logits_RV.shape[1]):
        z_WV, _ = edited(logits_RV, rows, samplers, bans)
        max_W, tokens = z_WV.amax(-1), first_maxima(z_WV)
        good = [i for i, token in enumerate(tokens) if token != FAILED]
        greedy = [i for i in good if samplers[rows[i]].params.is_greedy]
        places = np.array([[rows[i] for i in greedy], [tokens[i] for i in greedy]], dtype=np.int64)
        p_RV[tuple(uploaded(places, p_RV.device))] = 1.0
        for group in candidates(z_WV, max_W, {i: samplers[rows[i]].params for i in sorted({*good} - {*greedy})}):
            share_GK = group.weights.double() / group.weights.sum(-1, keepdim=True)
            index_G = uploaded_rows([rows[i] for i in group.members], p_RV.device)
            p_GV = share_GK if group.ids is None else torch.zeros_like(p_RV[index_G]).scatter_(1, group.ids, share_GK)
            p_RV[index_G] = p_GV
    return p_RV


# ---- Checks --------------------------------------------------------------------------------------


def _check_batch(
    logits_RV: Tensor,
    samplers: Sequence[RequestSampler],
    banned: Sequence[Sequence[int]] | None,
    grammars: Allowed,
) -> Sequence[Sequence[int]]:
    """Raise ``InvalidArgument`` if arguments do not fit together; return the banned ids of each
    row."""
    num_rows, vocab_size = check_logits(logits_RV)
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


def _take_allowed(
    logits_RV: Tensor,
    work: Sequence[int],
    samplers: Sequence[RequestSampler],
    bans: Bans,
    token_ids: list[int],
    failures: dict[int, QuireError],
) -> list[int]:
    """Choose tokens of greedy rows on the CPU that need only a mask; return the other rows of
    ``work``."""
    if logits_RV.device.type != "cpu":
        return list(work)
    masked = {row: words for row, words in bans.allowed.items() if is_settled(samplers[row], bans.ids[row], True)}
    for row, (token, logit) in first_allowed(logits_RV, masked).items():
        token_ids[row] = token if math.isfinite(logit) else FAILED
        if token_ids[row] == FAILED:
            failures[row] = nothing_left()
    return [row for row in work if row not in masked]
