"""Segments of prompts whose state is reused at any position, and the repair of that state. No
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from quire.base.config import check_int, check_real
from quire.base.errors import InvalidArgument

SelectName: TypeAlias = Literal["auto", "v", "v_or_question"]
"""Methods that select the tokens which are computed anew; ``auto`` is the best one in
measurements."""

DEFAULT_RATIO = 0.3

AUTO: SelectName = "v_or_question"
"""The method of ``auto`` without a threshold: it loses least on a real model
(``docs/blend.md``)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt that occurs in other prompts too, at other positions: a document, a
    tool's result. It is tokenised separately."""

    content: str | Sequence[int]
    """Text, or token ids."""

    def __post_init__(self) -> None:
        content = self.content
        if isinstance(content, str):
            return
        if isinstance(content, (bytes, bytearray)) or not hasattr(content, "__len__"):
            raise InvalidArgument(field="segment", given=content, allowed="text, or a sequence of token ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class BlendParams:
    """The rules for reusing the state of segments. The result is approximate, and marked so."""

    ratio: float | None = None
    """Share of the tokens with reused state that are computed anew, 0 to 1; 1: all of them. The
    last segment, and tokens without reused state, are computed in addition. None: 0.3, or by
    ``target``."""
    target: float | None = None
    """Nats: use the smallest ratio whose mean KL divergence from full computations was at most this
    when the model was calibrated (``LLM.calibrate_blending``). If there is none, the prompt is
    computed in full. None: use ``ratio``."""
    gate: bool = True
    """Whether the prompt is computed in full if the calibrated model is too inexact at this ratio.
    ``target``, ``threshold`` and other methods of ``select`` have no gate."""
    select: SelectName = "auto"
    """The method that selects these tokens."""
    threshold: float | None = None
    """Only tokens with a higher score are computed anew, at most ``ratio`` of them; None: the ratio
    decides alone. Only ``v`` supports it, and ``auto`` is ``v`` then: scores of ``v_or_question``
    are ranks."""
    least: int = 256
    """Least number of tokens with reusable state for blending; with fewer a prompt is computed in
    full."""
    keep: bool = True
    """Whether text without stored state is computed for later prompts while nothing else runs:
    segments as wholes, other text after the exactly reused part in chunks of about 256 tokens."""
    verify: float = 0.0
    """Share of the requests, 0 to 1, whose prompt is also computed in full, to report the error of
    the next token's distribution (``Blend.divergence``)."""

    def __post_init__(self) -> None:
        if self.ratio is not None:
            _check_part("ratio", self.ratio)
        _check_part("verify", self.verify)
        if self.select not in get_args(SelectName):
            raise InvalidArgument(field="select", given=self.select, allowed=", ".join(get_args(SelectName)))
        if self.threshold is not None:
            check_real("threshold", self.threshold, above=0, up_to=1e30)
            if self.select == "v_or_question":
                allowed = "None: v_or_question only orders tokens; give ratio"
                raise InvalidArgument(field="threshold", given=self.threshold, allowed=allowed)
        check_int("least", self.least, 1)
        for name, value in (("keep", self.keep), ("gate", self.gate)):
            if not isinstance(value, bool):
                raise InvalidArgument(field=name, given=value, allowed="True or False")
        if self.target is not None:
            check_real("target", self.target, above=0, up_to=1e30)
            if self.ratio is not None or self.threshold is not None or self.select != "auto":
                raise InvalidArgument(
                    "target says how much is computed anew, as it was measured for select='auto'; leave ratio, threshold and select out",
                    field="target",
                )


def _check_part(name: str, value: Any) -> None:
    if value != 0 or isinstance(value, bool):
        try:
            check_real(name, value, above=0, up_to=1)
        except InvalidArgument:
            raise InvalidArgument(field=name, given=value, allowed="a number in [0, 1]") from None
