"""Memory of the pools of KV state, and its division among kinds of layers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.base.config import EngineConfig, parse_bytes
from quire.base.errors import InvalidArgument, ResourceExhausted, size_words
from quire.base.process_limits import free_memory
from quire.contracts.kv_format import KVFormat
from quire.contracts.layers import FullAttention, LatentAttention, LayerSpec, Recurrent, WindowedAttention
from quire.kv.formats import kv_format
from quire.kv.forward_need import pages_for
from quire.kv.recurrent import bytes_per_state
from quire.kv.storage import bytes_per_token
from quire.models.loading import Outline

ATTENTION = (FullAttention, LatentAttention, WindowedAttention)
"""Layers that keep tokens."""
CPU_POOL_SHARE = 0.25
"""Share of the free memory for the pool on a CPU, without ``kv_cache_memory``."""

STATES_PER_SEQUENCE = 8
"""State slots for each of ``max_num_seqs``, if there is room: the present state, the next one, the
ring, and the states of cached sequences at prompt and turn ends."""

LEAST_STATES = 4
"""Least number of state slots: one sequence, its next state, and a copy of both."""

DEFAULT_INTERVAL = 512
"""Tokens between checkpoints of a model without attention, whose tokens cost nothing."""

LEAST_INTERVAL, MOST_INTERVAL = 64, 1024
"""Bounds of the default number of tokens between checkpoints."""

STATE_SHARE = 0.5
"""Largest share of the budget that recurrent states may take from the pages of attention layers."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for the pools."""

    nbytes: int
    words: str
    """Describes the number and its limits, up to "hold"; refusals begin with it."""
    advice: str = "free some memory, give a kv_cache_memory, or take a smaller dtype or quantization for the weights"
    argument: str = ""
    """The user's argument for the bytes; pools then take all of them, even if they can never be
    used."""


def given_budget(size: int | str, name: str = "kv_cache_memory") -> Budget:
    """Return the budget of a ``kv_cache_memory``, or of another argument with such a size."""
    advice = f"give a larger {name}, smaller pages, or a dtype of fewer bits for K and V"
    return Budget(parse_bytes(size), f"{name} {size} holds", advice, name)


def free_budget(device: torch.device, share: float = CPU_POOL_SHARE, weights: int = 0) -> Budget:
    """Return a share of a device's free memory; for the host within the control groups' limits, or
    of half of the machine's memory if that is unknown. ``weights``: bytes that will be taken before
    the pool."""
    found = free_memory(device)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if found is None else found
    nbytes = max(0, int((free - weights) * share))
    return Budget(nbytes, f"{size_words(nbytes)} of free memory for the KV pool on {device} hold")


def check_room(budget: Budget, weights: int, device: torch.device) -> None:
    """Raise ``ResourceExhausted`` if a given pool does not fit beside ``weights`` bytes."""
    free = free_memory(device)
    if budget.argument and free is not None and weights + budget.nbytes > free:
        raise ResourceExhausted(
            f"{budget.argument} is {size_words(budget.nbytes)}, beside {size_words(weights)} of weights, but "
            f"{size_words(free)} are free on {device}; give at most {max(0, free - weights)} bytes, a smaller dtype or "
            "quantization, or free some memory"
        )


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Tokens for which the pools have room."""

    tokens: int
    """Tokens of layers that keep all tokens; of all layers if every layer has a window."""
    window_tokens: int | None
    """Tokens of layers with a window; None: there are none."""
    step_tokens: int
    """Most tokens of one sequence in a step, so that a window and its new tokens fit."""
    states: int = 0
    """Slots for recurrent states; 0: there are no recurrent layers."""


def pool_sizes(
    config: EngineConfig,
    specs: Sequence[LayerSpec],
    format: KVFormat,
    max_len: int,
    budget: Budget,
    *,
    slack: int = 0,
) -> PoolSizes:
    """Divide the budget among the pools. ``slack``: of the state, by which windows keep more.

    Layers with a window get room for ``max_num_seqs`` windows and a step, if that is less than the
    other layers get. ``ResourceExhausted`` if one page and one token do not fit.
    """
    attention = [spec for spec in specs if isinstance(spec, ATTENTION)]
    size = config.page_size
    windows = [spec.layer_window for spec in attention if spec.layer_window is not None]
    full_bytes = bytes_per_token([spec for spec in attention if spec.layer_window is None], format)
    window_bytes = bytes_per_token([spec for spec in attention if spec.layer_window is not None], format)
    per_token = full_bytes + window_bytes
    state_bytes = bytes_per_state([spec for spec in specs if isinstance(spec, Recurrent)])
    given, advice, left = budget.words, budget.advice, budget.nbytes
    if not budget.argument:
        # More than the full length of every sequence, in whole pages, is never used.
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


def sequence_bytes(specs: Sequence[LayerSpec], format: KVFormat, length: int) -> int:
    """Return the bytes of K, V and states of a sequence, without regard to windows."""
    per_token = bytes_per_token([spec for spec in specs if isinstance(spec, ATTENTION)], format)
    states = STATES_PER_SEQUENCE * bytes_per_state([spec for spec in specs if isinstance(spec, Recurrent)])
    return per_token * length + states


def short_pool(sizes: PoolSizes, specs: Sequence[LayerSpec], max_len: int, nbytes: int) -> list[str]:
    """Return a sentence if a pool of ``nbytes`` does not hold a longest sequence; else nothing."""
    if sizes.tokens >= max_len or all(getattr(spec, "layer_window", 1) is not None for spec in specs):
        return []
    return [
        f"the KV pool holds {sizes.tokens} tokens, and longer sequences than that are refused; max_model_len {max_len} would "
        f"take a kv_cache_memory of about {size_words(nbytes * max_len // sizes.tokens)}"
    ]


def check_outline(config: EngineConfig, outline: Outline, device: torch.device) -> None:
    """Check context, pool and memory of a model before its weights are read. Raise the errors of
    ``longest_of``, ``check_room`` and ``pool_sizes``. On a GPU the largest possible pool is
    checked: the memory of a step is measured later."""
    length = longest_of(config, outline.max_position)
    if config.kv_cache_memory is None:
        budget = free_budget(device, CPU_POOL_SHARE if device.type == "cpu" else 1.0, outline.weight_bytes)
    else:
        budget = given_budget(config.kv_cache_memory)
        check_room(budget, outline.weight_bytes, device)
    pool_sizes(config, outline.layer_specs, kv_format(config.kv_dtype, outline.dtype), length, budget)


def longest_of(config: EngineConfig, limit: int) -> int:
    """Return the longest sequence in tokens; ``InvalidArgument`` beyond the model's positions."""
    length = limit if config.max_model_len is None else config.max_model_len
    if length > limit:
        raise InvalidArgument(
            f"max_model_len {length} is beyond the model's {limit} positions; give at most that", field="max_model_len"
        )
    return length


def checkpoint_interval(config: EngineConfig, specs: Sequence[LayerSpec], format: KVFormat) -> int:
    """Return the tokens between checkpoints of recurrent states; 0 without recurrent layers. By
    default the number of tokens whose K and V have the size of a state. ``InvalidArgument`` if an
    interval is given and no layer is recurrent."""
    state_bytes = bytes_per_state([spec for spec in specs if isinstance(spec, Recurrent)])
    if config.checkpoint_interval is not None:
        if config.checkpoint_interval and not state_bytes:
            raise InvalidArgument(
                f"checkpoint_interval {config.checkpoint_interval}: the model has no recurrent layers, and every position of it is kept; "
                "leave it out"
            )
        return config.checkpoint_interval
    if not state_bytes:
        return 0
    per_token = bytes_per_token([spec for spec in specs if isinstance(spec, ATTENTION)], format)
    wanted = min(max(LEAST_INTERVAL, -(-state_bytes // per_token) if per_token else DEFAULT_INTERVAL), MOST_INTERVAL)
    return -(-wanted // config.page_size) * config.page_size
