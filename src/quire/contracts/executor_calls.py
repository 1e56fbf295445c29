"""Inputs and outputs of the verbs of ``ModelExecutor``, as in ferrum.

Letters: B batch rows, S tokens of a row with padding, V vocabulary, E model width, Hq query heads,
K keys.

Token ids are int32 or int64 (float32 holds ids exactly only below 2**24); the executor refuses ids
outside [0, V). Logits are float32. Inputs are never mutated; returned tensors belong to the caller.
A constructed value is consistent in itself; the verb refuses an input without tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch
from torch import Tensor

from quire.base.errors import InvalidArgument, NotFound
from quire.base.signatures import checks_arguments
from quire.base.types import LogitsWanted
from quire.contracts.executor_inputs import check_token_ids
from quire.contracts.kv_cache import CacheHandle, KVCacheInterface

CacheLike: TypeAlias = CacheHandle | KVCacheInterface
"""A handle, or a KV cache, which stands for its present content."""


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class _ModelInput:
    """Tokens of rows, and the wanted outputs besides logits."""

    input_ids: Tensor
    """int32 or int64 ``[B, S]``; ``[B]`` is one token per row."""
    position_ids: Tensor | None = None
    """int32 or int64, shaped as ``input_ids``: positions for rotation; token order decides
    visibility. None: each token is one after its predecessor, the first of a sequence at 0. The row
    keeps given positions. Positions that differ from the running count are ``Unsupported``, never
    ignored, with a window, a recurrent layer or a model that uses the index."""
    output_hidden_states: bool = False
    output_attentions: bool = False
    adapter: int | None = None
    """Id of the loaded adapter for these tokens alone; None: the base model."""

    def _check(self, shape: str, mask: Tensor | None = None) -> None:
        check_token_ids("input_ids", self.input_ids)
        if self.input_ids.dim() > 2:
            raise InvalidArgument(f"input_ids must be {shape}; got shape {list(self.input_ids.shape)}")
        if self.adapter is not None and self.adapter < 0:
            raise InvalidArgument(f"adapter must be an id >= 0 from load_lora, or None; got {self.adapter}")
        for name, tensor in (("attention_mask", mask), ("position_ids", self.position_ids)):
            if tensor is not None and tensor.shape != self.input_ids.shape:
                raise InvalidArgument(
                    f"{name} has shape {list(tensor.shape)}; input_ids have {list(self.input_ids.shape)}"
                )
        if mask is not None:
            _check_mask(mask)
        if self.position_ids is not None:
            _check_positions(self.position_ids, mask)

    @property
    def batch_size(self) -> int:
        """B. ``InvalidArgument`` for a tensor of rank 0."""
        if self.input_ids.dim() == 0:
            raise InvalidArgument("input_ids must be [batch, tokens]; got a tensor of rank 0")
        return self.input_ids.shape[0]

    def with_position_ids(self, position_ids: Tensor | None) -> Self:
        return replace(self, position_ids=position_ids)


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillInput(_ModelInput):
    """Prompts, or with ``kv_cache`` further pieces. ``with_...`` return changed copies."""

    attention_mask: Tensor | None = None
    """bool or integer, shaped as ``input_ids``: 1 is a real token, 0 padding left or right of the
    one run of real tokens. Padding never enters the cache; its logits are undefined. None: all are
    real."""
    kv_cache: CacheLike | None = None
    """The sequences to continue; None: a fresh cache."""
    logits: LogitsWanted = "all"
    """``all``: ``[B, S, V]``; ``last``: ``[B, 1, V]`` of the last real token; ``none``: no head."""

    def __post_init__(self) -> None:
        self._check("[batch, tokens]", self.attention_mask)

    @property
    def sequence_length(self) -> int:
        """S, padding included; 1 for a tensor of rank below 2."""
        return self.input_ids.shape[1] if self.input_ids.dim() == 2 else 1

    def real_spans(self) -> tuple[tuple[int, int], ...]:
        """Return the first and one past the last column of each row's real tokens.
        ``InvalidArgument`` "Input token tensor is empty": no token, or a tensor of rank 0."""
        rows, columns = self.batch_size, self.sequence_length
        if rows == 0 or columns == 0:
            raise InvalidArgument("Input token tensor is empty")
        if self.attention_mask is None:
            return ((0, columns),) * rows
        real_BS = self.attention_mask.reshape(rows, columns).cpu() != 0
        first = real_BS.int().argmax(1)
        return tuple((a, a + n) for a, n in zip(first.tolist(), real_BS.sum(1).tolist(), strict=True))

    def token_rows(self) -> tuple[Tensor, ...]:
        """Return the real tokens of each row, int64, 1-D, fresh. Refuse as ``real_spans``."""
        spans = self.real_spans()
        ids_BS = self.input_ids.reshape(len(spans), -1)
        return tuple(row[a:b].to(torch.int64, copy=True) for row, (a, b) in zip(ids_BS, spans, strict=True))

    def with_input_ids(self, input_ids: Tensor) -> Self:
        return replace(self, input_ids=input_ids)

    def with_attention_mask(self, attention_mask: Tensor | None) -> Self:
        return replace(self, attention_mask=attention_mask)

    def with_kv_cache(self, kv_cache: CacheLike | None) -> Self:
        return replace(self, kv_cache=kv_cache)

    def with_logits(self, logits: LogitsWanted) -> Self:
        return replace(self, logits=logits)

    def with_hidden_states(self, wanted: bool = True) -> Self:
        return replace(self, output_hidden_states=wanted)

    def with_attentions(self, wanted: bool = True) -> Self:
        return replace(self, output_attentions=wanted)

    def with_adapter(self, adapter: int | None) -> Self:
        return replace(self, adapter=adapter)


def _check_mask(mask: Tensor) -> None:
    """Require zeros and ones, with exactly one run of ones in each row of a non-empty batch."""
    if mask.is_floating_point() or mask.is_complex():
        raise InvalidArgument(f"attention_mask must be bool or integer; got {mask.dtype}")
    if mask.dim() == 0 or mask.numel() == 0:
        return
    mask_BS = mask.reshape(mask.shape[0], -1).cpu()
    if ((mask_BS != 0) & (mask_BS != 1)).any():
        raise InvalidArgument("attention_mask must hold 1 for real tokens and 0 for padding only")
    starts_BS = torch.nn.functional.pad(mask_BS.int(), (1, 0)).diff(dim=1) == 1
    for row, runs in enumerate(starts_BS.sum(1).tolist()):
        if runs != 1:
            raise InvalidArgument(
                f"attention_mask: row {row} has {runs} runs of real tokens; one is needed, with padding left or right of it"
            )


def _check_positions(positions: Tensor, mask: Tensor | None) -> None:
    """Raise unless positions are integers, >= 0 at real tokens; padding may have any values."""
    check_token_ids("position_ids", positions)
    real = positions if mask is None else positions[mask.to(positions.device) != 0]
    if (real < 0).any():
        raise InvalidArgument(f"position_ids must be >= 0; got {int(real.min())}")


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillOutput:
    """Logits of a prefill, and the handle of the cache that now holds the prompt."""

    logits: Tensor | None
    """float32 ``[B, S, V]``; ``[B, 1, V]`` if only the last were wanted; None if none were."""
    kv_cache: CacheHandle
    last_indices: tuple[int, ...] | None = None
    """Column in ``logits`` of each row's last real token; None: the last one."""
    hidden_states: tuple[Tensor, ...] | None = None
    """Output ``[B, S, E]`` of each layer, in the model's dtype; 0 at padding. None if not
    wanted."""
    attention_weights: tuple[Tensor, ...] | None = None
    """For each layer float32 ``[B, Hq, S, K]``; K counts the tokens of the longest row, earlier
    ones included. 0 for unseen tokens and padding. A learned sink may lower a row's sum below 1.
    None if not wanted."""

    def __post_init__(self) -> None:
        if self.last_indices is None or self.logits is None or self.logits.dim() != 3:
            return
        rows, columns = self.logits.shape[:2]
        if len(self.last_indices) != rows or not all(0 <= i < columns for i in self.last_indices):
            allowed = f"{rows} indices below {columns}, one per row"
            raise InvalidArgument(field="last_indices", given=self.last_indices, allowed=allowed)

    def last_token_logits(self) -> Tensor:
        """Return fresh float32 ``[B, V]``: the logits after the last *real* token of each row.

        ``InvalidArgument``: "Expected 3D logits tensor [batch, seq, vocab]", "Empty sequence".
        ``NotFound``: the input asked for no logits.
        """
        if self.logits is None:
            raise NotFound("the prefill was asked for no logits (logits='none'); ask for 'last' or 'all'")
        if self.logits.dim() != 3:
            raise InvalidArgument("Expected 3D logits tensor [batch, seq, vocab]")
        rows, columns = self.logits.shape[:2]
        if columns == 0:
            raise InvalidArgument("Empty sequence")
        last = [columns - 1] * rows if self.last_indices is None else list(self.last_indices)
        device = self.logits.device
        return self.logits[torch.arange(rows, device=device), torch.tensor(last, dtype=torch.int64, device=device)]


@checks_arguments()
@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeInput(_ModelInput):
    """One token for each row of a cache: S is 1."""

    kv_cache: CacheLike
    """The cache to continue. A handle shorter than its cache means: rewind to its length."""

    def __post_init__(self) -> None:
        self._check("[batch, 1]")

    def tokens(self, verb: str = "decode") -> Tensor:
        """Return int64 ``[B]``, fresh. ``InvalidArgument``: "<verb> input token empty"; not one
        token per row."""
        rows = self.batch_size
        if self.input_ids.numel() == 0:
            raise InvalidArgument(f"{verb} input token empty")
        if self.input_ids.numel() != rows:
            raise InvalidArgument(f"{verb} takes one token per row, [{rows}, 1]; got {list(self.input_ids.shape)}")
        return self.input_ids.reshape(rows).to(torch.int64, copy=True)

    def with_kv_cache(self, kv_cache: CacheLike) -> Self:
        return replace(self, kv_cache=kv_cache)


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeOutput:
    """Logits of the token after the one given, and the new, longer handle."""

    logits: Tensor
    """float32 ``[B, V]``."""
    kv_cache: CacheHandle
    hidden_state: Tensor | None = None
    """``[B, E]``, of the last layer; None unless asked for."""
    attention_weights: tuple[Tensor, ...] | None = None
    """For each layer float32 ``[B, Hq, 1, K]``, as in ``PrefillOutput``. For a tree node the
    columns are the tokens before the tree, then its nodes. None unless asked for."""

    def __post_init__(self) -> None:
        if self.logits.dim() != 2:
            raise InvalidArgument(f"decode logits must be [batch, vocab]; got shape {list(self.logits.shape)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class SpeculativeOutput:
    """The accepted prefix of a draft, and the distribution after it."""

    accepted_tokens: tuple[int, ...]
    """A prefix of the draft, or of one path of a draft tree. The caller samples the bonus token."""
    next_logits: Tensor
    """float32 ``[1, V]``: raw target logits after the last accepted token."""
    kv_cache: CacheHandle
    """The cache of length start + 1 + acceptance_count, without the rejected drafts."""
    next_probs: Tensor | None = None
    """float32 ``[1, V]``, in exact mode only: the caller must draw the next token from it."""

    def __post_init__(self) -> None:
        if self.next_logits.dim() != 2 or self.next_logits.shape[0] != 1:
            raise InvalidArgument(f"next_logits must be [1, vocab]; got shape {list(self.next_logits.shape)}")
        if self.next_probs is not None and self.next_probs.shape != self.next_logits.shape:
            raise InvalidArgument(
                f"next_probs has shape {list(self.next_probs.shape)}; next_logits {list(self.next_logits.shape)}"
            )

    @property
    def acceptance_count(self) -> int:
        return len(self.accepted_tokens)
