"""What a user asks of sampling and stopping, as one frozen value. No torch here.

Fields and defaults are those of vLLM's ``SamplingParams``, so that what is written for it works. Every value is checked
when the object is made; a field that this release cannot honour is refused by name and never ignored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Self, cast

from quire.errors import InvalidArgument, Unsupported

MAX_STOP_STRINGS = 256
"""All stop strings are searched for after every token, so their number is bounded."""

_GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names in ``generation_config.json`` to fields here; the same selection as vLLM's."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    The order of operations: ``logit_bias``, penalties, ban of end tokens before ``min_tokens``, ``temperature``,
    ``top_k``, ``top_p`` (inside top-k), ``min_p``, softmax, one draw. ``logprobs`` are of the raw distribution, before
    all of these.

    Sequences become tuples and ``logit_bias`` a private dict with int keys, so later changes of what the caller passed
    do not reach a running request; treat the dict as read-only. Two objects with equal fields are equal and hash equal.

    Raises ``InvalidArgument`` (a ``ValueError``) that names the field, the value and the range, ``Unsupported`` for
    ``prompt_logprobs``, ``structured_outputs`` and ``logits_processors``, which this release does not have.
    """

    n: int = 1
    """Samples per prompt; sample i draws from the generator of (``seed``, i)."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the first maximum."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose mass, relative to what top-k kept, reaches this. (0, 1]; 1 is off."""
    top_k: int = -1
    """Keep that many of the largest logits, among equals those of lower id; 0 and -1 are off."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the largest one. [0, 1]; 0 is off."""
    seed: int | None = None
    """Any 64-bit integer, signed or unsigned. The same seed gives the same tokens whatever else runs."""
    max_tokens: int | None = 16
    """Emitted tokens at most; None goes on up to the context length."""
    min_tokens: int = 0
    """EOS and stop tokens cannot be drawn before that many tokens."""
    stop: str | Collection[str] | None = None
    """Strings that end the text; at most ``MAX_STOP_STRINGS``."""
    stop_token_ids: Collection[int] | None = None
    """Tokens that end the text, beside the model's EOS."""
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output so far. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output so far. [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies other logits of tokens in the prompt or output (CTRL, arXiv:1909.05858). > 0."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = field(default=None, hash=False)
    """Token id (or its decimal string, as in OpenAI's JSON) to what is added to its logit, [-100, 100]."""
    logprobs: int | None = None
    """None: none. 0: of the chosen token. N: of it and of the N most probable ones."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: Any = None
    logits_processors: Any = None

    def __post_init__(self) -> None:
        for name in ("prompt_logprobs", "structured_outputs", "logits_processors"):
            if getattr(self, name) is not None:
                raise Unsupported(
                    f"{name} is not supported in this release, got {getattr(self, name)!r}; leave it None"
                )
        checked: dict[str, Any] = {
            "n": _integer("n", self.n, 1),
            "temperature": _number("temperature", self.temperature, 0.0),
            "top_p": _number("top_p", self.top_p, 0.0, 1.0, open_low=True),
            "top_k": _integer("top_k", self.top_k, -1),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "seed": None if self.seed is None else _integer("seed", self.seed, -(2**63), 2**64 - 1),
            "max_tokens": None if self.max_tokens is None else _integer("max_tokens", self.max_tokens, 1),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.0, open_low=True),
            "logit_bias": _bias("logit_bias", self.logit_bias),
            "logprobs": None if self.logprobs is None else _integer("logprobs", self.logprobs, 0),
        }
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False, got {getattr(self, name)!r}")
        if checked["max_tokens"] is not None and checked["min_tokens"] > checked["max_tokens"]:
            raise InvalidArgument(
                f"min_tokens must be in 0..max_tokens ({checked['max_tokens']}), got {checked['min_tokens']}"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` without duplicates, in the order given; empty for None."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(dict.fromkeys(self.stop))

    @property
    def stop_ids(self) -> frozenset[int]:
        """``stop_token_ids``; empty for None. The model's EOS is not among them unless the user named it."""
        return frozenset(self.stop_token_ids or ())

    @property
    def token_bias(self) -> Mapping[int, float]:
        """``logit_bias`` with int keys; empty for None."""
        return cast(Mapping[int, float], self.logit_bias or {})

    @property
    def is_greedy(self) -> bool:
        """Whether the choice is the first maximum of the edited logits: temperature 0, or the single token of top-k 1.

        Such a request makes no random draw.
        """
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether a penalty looks at earlier tokens."""
        return self.repetition_penalty != 1.0 or self.counts_output

    @property
    def counts_output(self) -> bool:
        """Whether a penalty looks at how often the output holds a token."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Self:
        """Defaults for a model from the content of its ``generation_config.json``.

        As in vLLM, ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and ``max_new_tokens`` count
        where they are given and not null, and absent ones keep the defaults of this class. ``do_sample`` is ignored:
        transformers means greedy when it is absent, which is rarely what a model's author meant. Other fields are
        ignored too, because the file is written for other engines as well. A bad value of a field that counts raises
        ``InvalidArgument``.
        """
        given = {
            ours: config[theirs] for theirs, ours in _GENERATION_CONFIG_FIELDS.items() if config.get(theirs) is not None
        }
        try:
            return cls(**given)
        except InvalidArgument as error:
            raise InvalidArgument(f"generation_config.json: {error}") from None


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise InvalidArgument(f"{name} must be {allowed}, got {value!r}")
    return number


def _number(name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """A finite number in ``[low, high]``, or ``(low, high]`` if ``open_low``."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an int that no float holds
            number = math.inf
    # A NaN fails every comparison, so it is refused here too.
    if not (math.isfinite(number) and (low < number if open_low else low <= number) and number <= high):
        if high == math.inf:
            allowed = f"a finite number {'>' if open_low else '>='} {low:g}"
        else:
            allowed = f"a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        raise InvalidArgument(f"{name} must be {allowed}, got {value!r}")
    return number


def _is_collection(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | bytearray | Mapping)


def _strings(name: str, value: object) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    items = (
        (value,)
        if isinstance(value, str)
        else tuple(cast(Collection[object], value))
        if _is_collection(value)
        else None
    )
    if items is None or not all(isinstance(item, str) and item for item in items):
        raise InvalidArgument(f"{name} must be a non-empty string or a list of non-empty strings, got {value!r}")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidArgument(f"{name} must hold at most {MAX_STOP_STRINGS} strings, got {len(items)}")
    return value if isinstance(value, str) else cast(tuple[str, ...], items)


def _token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not _is_collection(value):
        raise InvalidArgument(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_integer(f"each token id in {name}", item, 0) for item in cast(Collection[object], value))


def _bias(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must map token ids to numbers in [-100, 100], got {value!r}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_decimal = isinstance(key, str) and key.isascii() and key.isdigit()
        token = _integer(f"each key of {name}", int(key) if is_decimal else key, 0)
        if token in biases:
            raise InvalidArgument(f"{name} names token {token} twice; each token may be named once")
        biases[token] = _number(f"{name}[{token}]", bias, -100.0, 100.0)
    return biases
