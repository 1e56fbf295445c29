"""Candidates, weights, and the draw: masks, temperature, top-k, top-p, min-p, inverse CDF.

Tensor operations handle all rows that need the same kind of work. Yet a row's token does not depend
on other rows, to the bit, for two reasons:

* Probabilities are integers. A token's weight is ``exp((z - max z) / T)`` in float64, times a power
  of two, rounded to int64. Integer sums are exact, so a cumulative sum is the same in any order,
  blocks or threads, and its last entry is the total. Weights below about 1e-13 of the largest
  become 0.
* Order is by unique integer keys (logit, then lower token id), so all sorts and top-k agree.

Letters: V vocabulary; W rows of a batch, G of a group in it; K candidates; B words of a bit mask.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.base.sampling_params import SamplingParams
from quire.base.uploads import uploaded

TOP_WIDTH = 1024
"""Largest number of candidates found by top-k selection; for more, the whole row is sorted."""


def take_rows(x_RV: Tensor, rows: Sequence[int]) -> Tensor:
    """Copy some rows, ``[R, ...]`` to ``[len(rows), ...]``."""
    return x_RV.index_select(0, uploaded_rows(rows, x_RV.device))


def uploaded_rows(rows: Sequence[int], device: torch.device) -> Tensor:
    """Return indices as int64 on a device, without a wait."""
    return uploaded(np.asarray(rows, dtype=np.int64), device)


Ids = npt.NDArray[np.int64]

Words = npt.NDArray[np.uint32]
"""One bit for each token, 32 to a word: token t is bit ``t % 32`` of word ``t // 32``."""


def num_words(vocab_size: int) -> int:
    """Return the number of words of a mask of the vocabulary."""
    return -(-vocab_size // 32)


class Allowed(Protocol):
    """Tokens that grammars allow in the rows of a batch. A mask costs a walk through the
    vocabulary, so it is made only on demand: a model often draws an allowed token without one."""

    @property
    def rows(self) -> Collection[int]:
        """Rows with a grammar."""

    def accepts(self, row: int, token: int) -> bool:
        """Return True if a token is known to be allowed. False may also mean that only the mask can
        decide."""

    def masks(self, rows: Sequence[int]) -> Mapping[int, Words]:
        """Return the masks of some of ``rows``, uint32 ``[num_words(V)]`` each."""


@dataclass(frozen=True)
class GivenMasks:
    """``Allowed`` with masks that exist already."""

    given: Mapping[int, Words]

    @property
    def rows(self) -> Collection[int]:
        return self.given.keys()

    def accepts(self, row: int, token: int) -> bool:
        return bool(self.given[row][token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def masks(self, rows: Sequence[int]) -> Mapping[int, Words]:
        return {row: self.given[row] for row in rows}


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
ALLOWED_BYTES = np.where(_BITS, np.float32(0), np.float32(-np.inf)).astype(np.float32)
"""``[256, 8]``: for each byte of a mask the summands (0 or -inf) of the logits of eight tokens."""


def mask_out(z_WV: Tensor, allowed_WB: Words) -> None:
    """Set the logits of tokens with bit 0 to -inf, in place. NaN stays NaN."""
    vocab_size = z_WV.shape[1]
    if z_WV.device.type == "cpu":
        # One table look-up for eight tokens and a sum without branches: 3 to 10 times as fast as a
        # fill by mask.
        bias_WV = ALLOWED_BYTES.take(allowed_WB.view(np.uint8), axis=0).reshape(z_WV.shape[0], -1)[:, :vocab_size]
        z_WV.add_(torch.from_numpy(bias_WV))
        return
    # Copies an eighth of the bytes, and the device expands bits faster.
    words_WB = uploaded(allowed_WB.view(np.int32), z_WV.device)
    z_WV.masked_fill_(zero_bits(words_WB, vocab_size), -torch.inf)


def first_allowed(z_RV: Tensor, allowed: Mapping[int, Words]) -> dict[int, tuple[int, float]]:
    """Return, by row, the first maximum after ``mask_out`` and its value, for rows on the CPU.
    Equal to ``mask_out`` and ``max`` without copies of the batch: each row stays in one core's
    cache for lookup, sum and search, which takes less than half of the time."""
    vocab_size = z_RV.shape[1]
    bias_B8 = np.empty((num_words(vocab_size) * 4, 8), dtype=np.float32)
    z_V = bias_B8.reshape(-1)[:vocab_size]
    found = {}
    for row, allowed_B in allowed.items():
        ALLOWED_BYTES.take(allowed_B.view(np.uint8), axis=0, out=bias_B8, mode="clip")  # "raise" would copy
        z_V += z_RV[row].numpy()
        token = int(z_V.argmax())
        found[row] = token, float(z_V[token])
    return found


def zero_bits(words_WB: Tensor, vocab_size: int) -> Tensor:
    """Return bool ``[W, vocab_size]``, True at the 0 bits of int32 words."""
    bits_WB32 = words_WB.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words_WB.device)
    return ((bits_WB32 & 1) == 0).flatten(1)[:, :vocab_size]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens from which some rows of a chunk may draw."""

    members: list[int]
    """Rows of the chunk."""
    weights: Tensor
    """int64; 0 for tokens that a filter removed. The sum of a row is below 2**62."""
    ids: Tensor | None
    """int64 token ids by descending logit; None: K is V and columns are ids."""
    complete_G: Tensor | None = None
    """bool ``[G]``, False for members that may need tokens beyond these candidates; None: all
    complete."""

    def draw(self, uniforms: Sequence[float]) -> list[int]:
        """Return the tokens of ``drawn`` as a list."""
        tokens: list[int] = self.drawn(uniforms).tolist()
        return tokens

    def drawn(self, uniforms: Sequence[float]) -> Tensor:
        """Return int64 ``[G]``: per member the first token with a cumulative weight above u times
        the total.

        u is in [0, 1 - 2**-53]. A token of weight 0 is never drawn, and a token is always found:
        even if float64 rounds the total up by half a unit in the last place, it rounds u times the
        total to at least one unit below.
        """
        sums_GK = self.weights.cumsum(-1)
        total_G1 = sums_GK[:, -1:]
        u_G1 = uploaded(np.array(uniforms, dtype=np.float64), sums_GK.device).unsqueeze(1)
        target_G1 = (u_G1 * total_G1).to(torch.int64)
        # In a row without a finite maximum the target may exceed all sums; its token is not used.
        column_G1 = torch.searchsorted(sums_GK, target_G1, right=True).clamp_(max=sums_GK.shape[1] - 1)
        tokens_G1 = column_G1 if self.ids is None else self.ids.gather(1, column_G1)
        return tokens_G1[:, 0]


class DrawKernel(Protocol):
    """Draws tokens, on the logits' device. ``table_G6``, float64: the row, temperature, min-p,
    uniform number, top-k and top-p of each row that draws; ``one``: the weight of a row's
    maximum."""

    ranked: bool
    """True if the kernel draws rows with top-k or top-p; else PyTorch's operations do."""

    def draw(self, z_WV: Tensor, max_W: Tensor, table_G6: Tensor, one: float) -> Tensor:
        """Return int64 ``[G]``, without top-k and top-p: the tokens of ``by_id().drawn``."""

    def draw_ranked(self, z_WV: Tensor, max_W: Tensor, table_G6: Tensor, one: float) -> tuple[Tensor, Tensor]:
        """Return int64 ``[G]``, the tokens of ``by_rank(...).drawn``, and bool ``[G]``, False for
        rows that may have got another token."""


@dataclass(slots=True, eq=False)
class KernelDraws:
    """Rows of a chunk whose tokens a kernel draws; otherwise as ``Candidates``."""

    kernel: DrawKernel
    z_WV: Tensor
    max_W: Tensor
    params: dict[int, SamplingParams]
    ordered: bool
    """True if top-k or top-p exclude tokens of any of the rows."""
    complete_G: Tensor | None = None
    """bool ``[G]`` as in ``Candidates``; None until the tokens are drawn."""

    @property
    def members(self) -> list[int]:
        return list(self.params)

    def drawn(self, uniforms: Sequence[float]) -> Tensor:
        """See ``Candidates``."""
        vocab_size = self.z_WV.shape[1]
        table = [
            (row, p.temperature, p.min_p, u, effective_top_k(p, vocab_size), p.top_p)
            for (row, p), u in zip(self.params.items(), uniforms, strict=True)
        ]
        table_G6 = uploaded(np.array(table, dtype=np.float64), self.z_WV.device)
        given = self.z_WV, self.max_W, table_G6, largest_weight(vocab_size)
        if not self.ordered:
            return self.kernel.draw(*given)
        tokens_G, self.complete_G = self.kernel.draw_ranked(*given)
        return tokens_G


def largest_weight(vocab_size: int) -> float:
    """Return the weight of a row's maximum. V such weights sum to less than 2**62, and float64
    resolves 52 bits of them."""
    return 2.0 ** min(52, 62 - vocab_size.bit_length())


class _Group:
    """Some rows of a batch with their parameters, float64 ``[G, 1]`` each; unset filters do
    nothing."""

    def __init__(self, z_WV: Tensor, max_W: Tensor, params: dict[int, SamplingParams], members: list[int]) -> None:
        self.members = members
        whole = members == list(range(len(z_WV)))
        self.z_GV = z_WV if whole else take_rows(z_WV, members)
        self.max_G1 = (max_W if whole else take_rows(max_W, members)).double().unsqueeze(1)
        vocab_size = z_WV.shape[1]
        chosen = [params[i] for i in members]
        table = [(p.temperature, effective_top_k(p, vocab_size), p.top_p, p.min_p) for p in chosen]
        columns = uploaded(np.array(table, dtype=np.float64), z_WV.device).T.unsqueeze(-1)
        self.temperature_G1, self.top_k_G1, self.top_p_G1, self.min_p_G1 = columns
        self.one = largest_weight(vocab_size)

    def by_id(self) -> Candidates:
        """Return all tokens after min-p."""
        return Candidates(self.members, self._min_p(self._weights(self.z_GV)), None)

    def by_rank(self, width: int, total_G1: Tensor | None = None) -> Candidates:
        """Return the ``width`` most probable tokens after top-k, top-p, min-p. ``total_G1``: the
        total weight for top-p; None: the weight that top-k left among these tokens."""
        ids_GK = top_ids(self.z_GV, width)
        weights_GK = self._weights(self.z_GV.gather(1, ids_GK))
        weights_GK.masked_fill_(torch.arange(width, device=weights_GK.device) >= self.top_k_G1, 0)
        sums_GK = weights_GK.cumsum(-1)
        mass_G1 = self._mass(sums_GK[:, -1:] if total_G1 is None else total_G1)
        weights_GK.masked_fill_(sums_GK - weights_GK >= mass_G1, 0)
        return Candidates(self.members, self._min_p(weights_GK), ids_GK)

    def total(self) -> Tensor:
        """Return the weight of the whole vocabulary, int64 ``[G, 1]``."""
        return self._weights(self.z_GV).sum(-1, keepdim=True)

    def top_p_within(self, width: int, total_G1: Tensor) -> Tensor:
        """Return bool ``[G]``, True for rows whose ``width`` most probable tokens contain all of
        top-p."""
        top_GK = self._weights(self.z_GV.topk(width, sorted=False).values)
        return top_GK.sum(-1) >= self._mass(total_G1)[:, 0]

    def _weights(self, z_GK: Tensor) -> Tensor:
        """Return int64 weights after temperature; the maximum has weight ``one``."""
        x_GK = z_GK.double().sub_(self.max_G1).div_(self.temperature_G1)
        return x_GK.exp_().mul_(self.one).round_().to(torch.int64)

    def _mass(self, total_G1: Tensor) -> Tensor:
        """Return int64 ``[G, 1]``: top-p keeps a token if the tokens before it weigh less than
        this."""
        part_G1 = (self.top_p_G1 * total_G1).ceil().to(torch.int64)
        # An inactive top-p must not depend on float64's rounding of the total.
        return torch.where(self.top_p_G1 < 1, torch.minimum(part_G1, total_G1), total_G1)

    def _min_p(self, weights_GK: Tensor) -> Tensor:
        return weights_GK.masked_fill_(weights_GK < self.min_p_G1 * self.one, 0)


def effective_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return the number of tokens that top-k keeps: all if it is off."""
    return min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size


def needs_no_order(params: SamplingParams, vocab_size: int) -> bool:
    """Return True if neither top-k nor top-p excludes a token."""
    return effective_top_k(params, vocab_size) == vocab_size and params.top_p == 1


def candidates(
    z_WV: Tensor, max_W: Tensor, params: dict[int, SamplingParams], *, at_once: bool = False
) -> list[Candidates]:
    """Return the candidates of the rows in ``params`` (row to parameters, temperature > 0).

    ``z_WV``: edited logits, float32 ``[W, V]``; ``max_W``: finite maximum of each row. Rows are
    grouped by the cheapest sufficient work, which affects time and never results. Rows without
    top-k and top-p draw in order of ids, others in order of probability; extra candidates change
    nothing. ``at_once``: never wait for a value on the device; some candidates may then be
    incomplete, as ``complete_G`` says.
    """
    vocab_size = z_WV.shape[1]
    plain: list[int] = []  # neither top-k nor top-p: no order needed
    small: list[int] = []  # top-k selection finds all candidates
    nucleus: list[int] = []  # top-p alone: nearly always within the first few, checked with the exact total
    wide: list[int] = []  # the whole row must be ordered
    for i, p in params.items():
        top_k = effective_top_k(p, vocab_size)
        if needs_no_order(p, vocab_size):
            plain.append(i)
        elif top_k <= TOP_WIDTH:
            small.append(i)
        else:
            (nucleus if top_k == vocab_size else wide).append(i)
    found: list[Candidates] = []
    if plain:
        found.append(_Group(z_WV, max_W, params, plain).by_id())
    if small:
        width = max(effective_top_k(params[i], vocab_size) for i in small)
        found.append(_Group(z_WV, max_W, params, small).by_rank(width))
    if nucleus:
        group = _Group(z_WV, max_W, params, nucleus)
        total_G1 = group.total()
        within_G = group.top_p_within(TOP_WIDTH, total_G1)
        if at_once:
            found.append(replace(group.by_rank(TOP_WIDTH, total_G1), complete_G=within_G))
        within = [True] * len(nucleus) if at_once else within_G.tolist()
        wide += [i for i, yes in zip(nucleus, within, strict=True) if not yes]
        if any(within) and not at_once:
            if not all(within):
                group = _Group(z_WV, max_W, params, [i for i, yes in zip(nucleus, within, strict=True) if yes])
                total_G1 = total_G1[torch.tensor(within, device=total_G1.device)]
            found.append(group.by_rank(TOP_WIDTH, total_G1))
    if wide:
        found.append(_Group(z_WV, max_W, params, wide).by_rank(vocab_size))
    return found


def top_ids(z_GV: Tensor, width: int) -> Tensor:
    """Return the ids of the ``width`` largest logits, int64 ``[G, width]``, descending, ties by
    lower id. A key holds the logit's bits, made to sort like the number, above the reversed id:
    unique."""
    bits_GV = (z_GV + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, so that both zeros are equal
    ordered_GV = bits_GV ^ ((bits_GV >> 31) & 0x7FFFFFFF)
    last = z_GV.shape[1] - 1
    key_GV = (ordered_GV.to(torch.int64) << 32) | torch.arange(last, -1, -1, device=z_GV.device)
    return last - (key_GV.topk(width).values & 0xFFFFFFFF)
