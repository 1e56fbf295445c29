"""Which compiled lengths cover a prefill: LiteRT-LM's rule for models whose shapes are fixed in advance.

The same rule can choose the sizes of CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class PrefillGroup:
    """One run of a compiled shape: ``num_tokens`` tokens in ``bucket`` slots, the rest padding."""

    bucket: int
    num_tokens: int

    @property
    def padding(self) -> int:
        return self.bucket - self.num_tokens


def prefill_groups(num_tokens: int, buckets: Sequence[int]) -> list[PrefillGroup]:
    """Cover ``num_tokens`` >= 0 tokens, in order, with the given bucket lengths (distinct, >= 1, in any order).

    A bucket is used as often as it fits fully. What remains goes on to the next shorter one, m, if that covers it
    and is at least half as long; otherwise, if it fills at least half of the present bucket c, it is padded to c;
    otherwise it goes on to m. The shortest bucket pads whatever is left. No tokens: no groups.
    """
    if num_tokens < 0:
        raise InvalidArgument(f"num_tokens must be >= 0; got {num_tokens}")
    lengths = sorted(buckets, reverse=True)
    if not lengths or lengths[-1] < 1 or len(set(lengths)) != len(lengths):
        raise InvalidArgument(f"buckets must be distinct lengths >= 1, at least one; got {list(buckets)}")

    groups: list[PrefillGroup] = []
    left = num_tokens
    for current, shorter in zip(lengths, [*lengths[1:], None], strict=True):
        full, left = divmod(left, current)
        groups += [PrefillGroup(current, current)] * full
        if left == 0:
            break
        goes_on = shorter is not None and 2 * shorter >= current and left <= shorter
        if shorter is None or (not goes_on and 2 * left >= current):
            groups.append(PrefillGroup(current, left))
            break
    return groups
