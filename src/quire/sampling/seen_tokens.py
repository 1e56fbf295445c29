"""Penalties on a device, from a table of the tokens that each request has seen.

``logit_edits`` uploads all tokens of all requests in each step. Here a table on the device has a
row for each request, and a step uploads only new tokens. A drawn token that the host has not read
yet is counted on the device.

Letters: W rows of logits, G those of them with penalties; V vocabulary; S rows of the table; N
counted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from quire.base.uploads import uploaded
from quire.sampling.filters import take_rows, uploaded_rows
from quire.sampling.logit_edits import penalised
from quire.sampling.request_sampler import RequestSampler

PROMPT, OUTPUT = 1, 2
"""Amounts that a token adds to its entry of the table: once for the prompt, each time for the
output."""


class PenaltyKernel(Protocol):
    """Counts tokens and applies penalties, on the logits' device, without waiting."""

    def add(self, seen_SV: Tensor, slots_N: Tensor, tokens_N: Tensor, amounts_N: Tensor) -> None:
        """Add int32 amounts to int32 ``seen_SV`` at these int64 places, which may repeat."""

    def penalise(self, z_WV: Tensor, seen_SV: Tensor, table_G5: Tensor) -> None:
        """Apply repetition, then frequency, then presence penalty to seen tokens, in place.
        ``z_WV``: float32. ``table_G5``, float64: the row of the logits, the row of the table, and
        the repetition, frequency and presence penalties, which are rounded to float32."""


class ReferencePenalties:
    """``PenaltyKernel`` by PyTorch's operations."""

    def add(self, seen_SV: Tensor, slots_N: Tensor, tokens_N: Tensor, amounts_N: Tensor) -> None:
        """See ``PenaltyKernel``."""
        seen_SV.index_put_((slots_N, tokens_N), amounts_N, accumulate=True)

    def penalise(self, z_WV: Tensor, seen_SV: Tensor, table_G5: Tensor) -> None:
        """See ``PenaltyKernel``."""
        rows_G, slots_G = table_G5[:, 0].long(), table_G5[:, 1].long()
        repetition_G1, frequency_G1, presence_G1 = table_G5[:, 2:].float().T.unsqueeze(-1)
        seen_GV, z_GV = seen_SV.index_select(0, slots_G), z_WV.index_select(0, rows_G)
        new_GV = penalised(z_GV, repetition_G1, frequency_G1, presence_G1, (seen_GV // OUTPUT).float())
        z_WV.index_copy_(0, rows_G, torch.where(seen_GV > 0, new_GV, z_GV))


@dataclass(slots=True)
class _Row:
    """A request's row of the table."""

    slot: int
    counted: int
    """Number of counted output tokens, unread ones included."""


class SeenTokens:
    """The table of one engine. It grows to the largest number of penalised requests in a step;
    requests outside of the step lose their rows to new ones."""

    def __init__(self, vocab_size: int, device: torch.device, kernel: PenaltyKernel | None = None) -> None:
        """Make an empty table. ``kernel`` None: PyTorch's operations."""
        self._kernel: PenaltyKernel = ReferencePenalties() if kernel is None else kernel
        self._seen_SV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._rows: WeakKeyDictionary[RequestSampler, _Row] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Return the bytes that the table takes."""
        return self._seen_SV.nbytes

    def penalise(self, z_WV: Tensor, samplers: Sequence[RequestSampler], unread_W: Tensor | None = None) -> None:
        """Apply penalties to the rows that have some, in place. ``samplers``: one for each row.
        ``unread_W``: int64, the drawn token of each row that its sampler has not observed; it
        counts."""
        members = [i for i, sampler in enumerate(samplers) if sampler.counts is not None]
        if not members:
            return
        chosen = [samplers[i] for i in members]
        self._admit(chosen)
        self._count(chosen)
        rows = [self._rows[sampler] for sampler in chosen]
        if unread_W is not None:
            slots_G = uploaded_rows([row.slot for row in rows], z_WV.device)
            tokens_G = unread_W if len(members) == len(samplers) else take_rows(unread_W, members)
            self._kernel.add(self._seen_SV, slots_G, tokens_G, torch.full_like(slots_G, OUTPUT, dtype=torch.int32))
            for row in rows:
                row.counted += 1
        penalties = [
            (i, row.slot, one.repetition_penalty, one.frequency_penalty, one.presence_penalty)
            for i, row, one in zip(members, rows, (sampler.params for sampler in chosen), strict=True)
        ]
        self._kernel.penalise(z_WV, self._seen_SV, uploaded(np.array(penalties, dtype=np.float64), z_WV.device))

    def forget(self, sampler: RequestSampler) -> None:
        """Count a request's tokens anew in its next step. Drawn tokens that were counted may have
        been discarded."""
        self._rows.pop(sampler, None)

    def _admit(self, samplers: Sequence[RequestSampler]) -> None:
        """Give empty rows of the table to the samplers that have none."""
        new = [sampler for sampler in samplers if sampler not in self._rows]
        if not new:
            return
        size = len(self._seen_SV)
        taken = {row.slot for row in self._rows.values()}
        if len(taken) + len(new) > size:
            # Drop the rows of samplers outside of this step; they are counted anew when they
            # return.
            here = set(samplers)
            for sampler in [one for one in list(self._rows) if one not in here]:
                del self._rows[sampler]
            taken = {row.slot for row in self._rows.values()}
        if (needed := len(taken) + len(new)) > size:
            grown_SV = self._seen_SV.new_zeros(1 << (needed - 1).bit_length(), self._seen_SV.shape[1])
            grown_SV[:size] = self._seen_SV
            self._seen_SV = grown_SV
        free = (slot for slot in range(len(self._seen_SV)) if slot not in taken)
        for sampler in new:
            self._rows[sampler] = _Row(next(free), 0)
        slots = [self._rows[sampler].slot for sampler in new]
        self._seen_SV.index_fill_(0, uploaded_rows(slots, self._seen_SV.device), 0)
        self._add([(row.slot, token, PROMPT) for one in new for row in [self._rows[one]] for token in one.prompt_ids])

    def _count(self, samplers: Sequence[RequestSampler]) -> None:
        """Count the tokens observed since the last step."""
        entries = []
        for sampler in samplers:
            row = self._rows[sampler]
            entries += [(row.slot, token, OUTPUT) for token in sampler.output[row.counted :]]
            row.counted = max(row.counted, len(sampler.output))
        self._add(entries)

    def _add(self, entries: Sequence[tuple[int, int, int]]) -> None:
        if entries:
            columns = np.array(entries, dtype=np.int64).T.copy()
            slots_N, tokens_N, amounts_N = uploaded(columns, self._seen_SV.device)
            self._kernel.add(self._seen_SV, slots_N, tokens_N, amounts_N.to(torch.int32))
