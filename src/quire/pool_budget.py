"""How much memory the pools of KV state get, and how it is shared out among kinds of layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.config import EngineConfig, parse_bytes
from quire.contracts.layers import FullAttention, LatentAttention, LayerSpec, Recurrent, WindowedAttention
from quire.errors import ResourceExhausted
from quire.kv.forward_need import pages_for
from quire.kv.recurrent import bytes_per_state
from quire.kv.storage import bytes_per_token
from quire.models.loading import free_memory

ATTENTION = (FullAttention, LatentAttention, WindowedAttention)
"""Layers that keep tokens."""
CPU_POOL_SHARE = 0.25
"""Part of the free memory that the pool takes on a CPU, without ``kv_cache_memory``."""

STATES_PER_SEQUENCE = 8
"""State slots for each of ``max_num_seqs``, if there is room: the present state, the next one, the
ring, and those that cached sequences keep at prompt and turn ends."""

LEAST_STATES = 4
"""One sequence, what its next step writes, and a copy of both."""

STATE_SHARE = 0.5
"""The most of the budget that recurrent states may take from the pages of attention layers."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for the pools."""

    nbytes: int
    words: str
    """Says how many, and why no more, up to "hold"; refusals begin with it."""
    advice: str = "free some memory, or give a larger kv_cache_memory"
    given: bool = False
    """Whether the user gave them: pools take all of them then, even what can never be used."""


def given_budget(size: int | str) -> Budget:
    """Return the budget of a ``kv_cache_memory``."""
    return Budget(parse_bytes(size), f"kv_cache_memory {size} holds", given=True)


def free_budget(device: torch.device, share: float = CPU_POOL_SHARE) -> Budget:
    """Return a share of what is free on a device, for host memory within the control group's limit;
    where nothing tells that, of half of what the machine has."""
    found = free_memory(device)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if found is None else found
    nbytes = int(free * share)
    return Budget(nbytes, f"{nbytes / 2**20:.0f} MiB of free memory for the KV pool on {device} hold")


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Tokens for which the pools have room."""

    tokens: int
    """Of layers that keep all tokens; of all layers where every layer has a window."""
    window_tokens: int | None
    """Of layers with a window; None: there are none."""
    step_tokens: int
    """Most tokens of one sequence in a step, so that a window and its new tokens fit."""
    states: int = 0
    """Slots for recurrent states; 0: there are no recurrent layers."""


def pool_sizes(
    config: EngineConfig,
    specs: Sequence[LayerSpec],
    dtype: torch.dtype,
    max_len: int,
    budget: Budget,
    *,
    slack: int = 0,
) -> PoolSizes:
    """Share out the budget. ``slack``: that of the state, by which windows keep more.

    Layers with a window get what ``max_num_seqs`` windows and a step need, if that is less than
    what other layers get. ``ResourceExhausted`` if one page and one token do not fit.
    """
    attention = [spec for spec in specs if isinstance(spec, ATTENTION)]
    size = config.page_size
    windows = [spec.layer_window for spec in attention if spec.layer_window is not None]
    full_bytes = bytes_per_token([spec for spec in attention if spec.layer_window is None], dtype)
    window_bytes = bytes_per_token([spec for spec in attention if spec.layer_window is not None], dtype)
    per_token = full_bytes + window_bytes
    state_bytes = bytes_per_state([spec for spec in specs if isinstance(spec, Recurrent)])
    given, advice, left = budget.words, budget.advice, budget.nbytes
    if not budget.given:
        # More than every sequence at its full length, in whole pages, is never used.
        most = config.max_num_seqs * pages_for(max_len, size) * size * per_token
        left = min(left, most + config.max_num_seqs * STATES_PER_SEQUENCE * state_bytes)
    states = 0
    if state_bytes:
        share = STATE_SHARE if per_token else 1.0
        states = min(config.max_num_seqs * STATES_PER_SEQUENCE, int(left * share) // state_bytes)
        if states < LEAST_STATES:
            raise ResourceExhausted(
                f"{given} {states} recurrent states of {state_bytes} bytes, and {LEAST_STATES} are needed at least; {advice}"
            )
        left -= states * state_bytes
    if not per_token:
        return PoolSizes(max_len, None, config.max_num_batched_tokens, states)
    tokens = left // per_token
    window_tokens: int | None = None
    window = min(max(windows, default=0) + slack, max_len)
    if windows:
        # A window touches one page more than it fills, and so do the new tokens.
        one = (pages_for(window, size) + 2) * size
        wanted = config.max_num_seqs * one + pages_for(config.max_num_batched_tokens, size) * size
        if full_bytes and tokens > wanted:
            tokens, window_tokens = (left - wanted * window_bytes) // full_bytes, wanted
        else:
            window_tokens = tokens if full_bytes else min(tokens, wanted)
    if tokens < size:
        raise ResourceExhausted(f"{given} no page of {size} tokens ({per_token * size} bytes); {advice}")
    tokens = tokens // size * size
    step = config.max_num_batched_tokens
    if window_tokens is not None:
        window_tokens = window_tokens // size * size
        if window_tokens < max_len and window < max_len:
            step = min(step, (window_tokens // size - 1) * size - window)
        if step < 1:
            raise ResourceExhausted(
                f"{given} {window_tokens} tokens of layers with a window of {window}, and one window, one token and a "
                f"page are needed ({(window + 1 + 2 * size) * per_token} bytes); {advice}"
            )
    return PoolSizes(int(tokens), window_tokens, int(step), states)
