"""``blend`` in the bodies of requests, prompts made of parts, and what answers say of blending."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.base.outputs import Blend
from quire.base.segments import BlendParams, Segment
from quire.engine.prompts import Text
from quire.server.http.context import Context
from quire.server.http.errors import bad_field, naming
from quire.server.openai.generation import encode
from quire.server.openai.protocol import GenerationBody
from quire.text.spelled_tokens import SpelledTokens
from quire.text.tokenizer import Tokenizer

Part: TypeAlias = Segment | Text
"""A piece of a prompt: text or token ids, perhaps as a segment."""

NAMES = {one.name: f"blend.{one.name}" for one in fields(BlendParams)}
"""The body's names of parameters."""


def blend_of(context: Context, body: GenerationBody) -> BlendParams | None:
    """Return the blending of a body's prompts; None for none. Raise ``ApiError`` 400 as
    ``read_blend`` does, and in a session."""
    params = read_blend(context, body.blend)
    if params is not None and body.session_id is not None:
        raise bad_field("blend", "blend cannot be given with session_id; POST /v1/sessions/{id}/edit has a mode for it")
    return params


def read_blend(context: Context, given: Any) -> BlendParams | None:
    """Return the parameters of a field ``blend``. Raise ``ApiError`` 400 for a wrong value, and for
    a model that cannot be blended."""
    if given is None or given is False:
        return None
    given = {} if given is True else given
    if not isinstance(given, dict):
        raise bad_field("blend", f"blend must be true, false or an object with {', '.join(NAMES)}, got {given!r:.60}")
    for name in given:
        if name not in NAMES:
            raise bad_field(f"blend.{name[:60]}", f"blend may hold {', '.join(NAMES)}, got {name!r:.60}")
    with naming({"blend": "blend", **NAMES}):
        params = BlendParams(**{name: value for name, value in given.items() if value is not None})
        context.llm.engine.blending.check(params)
        return params


def contents(parts: Sequence[Part]) -> list[Text]:
    """Return parts without marks."""
    return [part.content if isinstance(part, Segment) else part for part in parts]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as token ids."""

    ids: NDArray[np.int64]
    given: Any
    """What ``AsyncLLM.generate`` takes."""

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, parts: Sequence[Part]) -> EncodedPrompt:
        """Return a prompt whose parts are tokenised by themselves, the first one as a prompt is."""
        return cls._of(parts, lambda content, first: encode(tokenizer, content, inside=not first))

    @classmethod
    def rendered(cls, texts: SpelledTokens, parts: Sequence[Segment | str]) -> EncodedPrompt:
        """Return the prompt of a text that a chat template has written, given in parts."""
        return cls._of(parts, texts.encode_part)

    @classmethod
    def _of(cls, parts: Sequence[Part], encoded: Callable[[Text, bool], NDArray[np.int64]]) -> EncodedPrompt:
        ids: list[Any] = [encoded(content, not number) for number, content in enumerate(contents(parts))]
        pieces = [Segment(one) if isinstance(part, Segment) else one for part, one in zip(parts, ids, strict=True)]
        whole = np.concatenate(ids)
        return cls(whole, pieces if any(isinstance(part, Segment) for part in parts) else whole)


def blend_body(found: Sequence[Blend]) -> dict[str, Any]:
    """Return the report of blending. For several prompts it has the sums, and each prompt under
    ``prompts``."""
    bodies = [blend.as_dict() for blend in found]
    if len(bodies) == 1:
        return bodies[0]
    by_tier: Counter[str] = Counter()
    for blend in found:
        by_tier.update(blend.by_tier)
    sums = {name: sum(body[name] for body in bodies) for name in ("blended", "recomputed", "exact")}
    return {**sums, "by_tier": dict(by_tier), "prompts": bodies}
