"""Prompts as users give them: text or token ids, perhaps with embeddings at placeholders or made of
segments.

Letters: S tokens of a prompt; M rows of embeddings; E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.base.config import MODALITIES
from quire.base.errors import InvalidArgument, QuireError, Unsupported
from quire.base.media import NO_MEDIA, Media
from quire.base.segments import Segment
from quire.branches.row_media import media_of_rows, recorded_ids
from quire.contracts.executor import VISION_PLACEHOLDER, AudioData, ExecutorInputs, TextData, VisionData

KEYS = ("prompt_token_ids", "multi_modal_data", "prompt_embeds")
KINDS: dict[str, type[VisionData] | type[AudioData]] = {"image": VisionData, "audio": AudioData}

Text: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
EmbedsPrompt: TypeAlias = ExecutorInputs | Mapping[str, Any]
"""Token ids with embeddings at their placeholders, see ``read_prompt``."""
SegmentedPrompt: TypeAlias = Sequence[Segment | Text]
"""A list with a ``Segment`` in it: segments, and pieces of text or token ids between them."""
Prompt: TypeAlias = Text | EmbedsPrompt | SegmentedPrompt
Prompts: TypeAlias = Prompt | Sequence[Prompt]


Encode: TypeAlias = Callable[[Text, bool], NDArray[np.int64]]
"""Returns the ids of a text, with the tokens that begin a prompt or without them, or of ids."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a prompt."""

    offsets: tuple[int, ...] = ()
    """Where the second, third, ... piece begins."""
    marked: tuple[tuple[int, int], ...] = ()
    """First token, and the one behind the last, of each segment that is worth keeping."""
    unplaced: tuple[str, ...] = ()
    """Paths of marked texts of messages that are no segments (``Blend.unplaced``)."""

    def question(self, length: int) -> int:
        """Return the start of the last piece, whose tokens always run; for one piece ``length``."""
        return self.offsets[-1] if self.offsets else length


WHOLE = Pieces()
"""A prompt of one piece."""


def read_segments(prompt: SegmentedPrompt, encode: Encode) -> tuple[NDArray[np.int64], Pieces]:
    """Return the ids ``[S]`` of a prompt, and its pieces. Each piece is tokenised by itself, the
    first one as a prompt is. ``InvalidArgument`` names a piece that is neither."""
    ids: list[NDArray[np.int64]] = []
    ends, marked = [0], []
    for number, part in enumerate(prompt):
        content = part.content if isinstance(part, Segment) else part
        if not isinstance(content, str) and not hasattr(content, "__len__"):
            raise InvalidArgument(
                field=f"prompt.{number}", given=part, allowed="a Segment, text, or a list of token ids"
            )
        ids.append(encode(content, not number))
        ends.append(ends[-1] + ids[-1].size)
        if isinstance(part, Segment):
            marked.append((ends[-2], ends[-1]))
    return np.concatenate(ids), Pieces(tuple(ends[1:-1]), tuple(marked))


def read_prompt(prompt: EmbedsPrompt, hidden_size: int) -> tuple[NDArray[np.int64], Media]:
    """Return the ids of a history, and its embeddings.

    ``ExecutorInputs`` of one row, or a mapping in vLLM's words: ``prompt_token_ids`` with a
    placeholder for each row of ``multi_modal_data`` (``image`` at -1, ``audio`` at -2: ``[M, E]``,
    ``VisionData`` or ``AudioData``), or ``prompt_embeds`` ``[S, E]`` alone. ``InvalidArgument`` for
    anything else; ``Unsupported`` for an image that sees all of itself, which needs a mask.
    """
    inputs = prompt if isinstance(prompt, ExecutorInputs) else _as_inputs(prompt)
    rows = () if inputs.text is None else inputs.text.token_rows()
    if len(rows) != 1:
        raise InvalidArgument(f"a prompt with embeddings is one row of token ids; got {len(rows)}", field="prompt")
    if inputs.next_position is not None:
        raise InvalidArgument(field="next_position", given=inputs.next_position, allowed="None: a prompt begins at 0")
    if inputs.vision is not None and inputs.vision.bidirectional:
        raise Unsupported(
            "vision bidirectional: prompts and sessions see each token's past only; prefill a KV cache of the executor, and take it "
            "by session(cache=...)",
            field="vision.bidirectional",
        )
    ids = rows[0].cpu().numpy()
    (media,) = media_of_rows(inputs, [ids], MODALITIES, hidden_size)
    if media is None:
        return ids, NO_MEDIA
    recorded = recorded_ids(ids, media)
    names = recorded[media.places].tolist()
    # These are copies: what the user does with the tensors afterwards is not seen.
    return recorded, Media(
        dict(zip(names, media.embeddings_mE.unbind(), strict=True)),
        dict(zip(names, ids[media.places].tolist(), strict=True)),
    )


def _as_inputs(prompt: Mapping[str, Any]) -> ExecutorInputs:
    if unknown := sorted(str(key) for key in prompt if key not in KEYS):
        raise InvalidArgument(
            f"a prompt has no {', '.join(unknown)}; {', '.join(KEYS)} are accepted, or prompt alone, a text",
            field=unknown[0],
        )
    if "prompt_embeds" in prompt:
        if len(prompt) > 1:
            raise InvalidArgument("prompt_embeds are the whole prompt; leave the other keys out", field="prompt_embeds")
        embeds = prompt["prompt_embeds"]
        if not isinstance(embeds, Tensor) or embeds.dim() != 2 or not len(embeds):
            allowed = "a floating tensor [S, E] of at least one token"
            raise InvalidArgument(field="prompt_embeds", given=embeds, allowed=allowed)
        ids = torch.full((1, len(embeds)), VISION_PLACEHOLDER)
        return ExecutorInputs(text=TextData(token_ids=ids), vision=VisionData(embeddings=embeds))
    if "prompt_token_ids" not in prompt:
        raise InvalidArgument("a prompt needs prompt_token_ids, or prompt_embeds alone", field="prompt_token_ids")
    data = prompt.get("multi_modal_data") or {}
    if not isinstance(data, Mapping) or not set(data) <= set(KINDS):
        raise InvalidArgument(field="multi_modal_data", given=data, allowed=f"a mapping of {' and '.join(KINDS)}")
    given = {}
    for name, kind in KINDS.items():
        value = data.get(name)
        if value is not None and not isinstance(value, (Tensor, kind)):
            allowed = f"embeddings [M, E] or {kind.__name__}"
            raise InvalidArgument(field=f"multi_modal_data.{name}", given=value, allowed=allowed)
        given[name] = kind(embeddings=value) if isinstance(value, Tensor) else value
    try:
        ids = torch.as_tensor(prompt["prompt_token_ids"])
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise InvalidArgument(
            f"prompt_token_ids must be a row of integers: {error}", field="prompt_token_ids"
        ) from None
    if ids.dim() != 1 or not ids.numel():
        raise InvalidArgument(field="prompt_token_ids", given=ids, allowed="a row of integers")
    return ExecutorInputs(
        text=TextData(token_ids=ids[None]),
        vision=cast(VisionData | None, given["image"]),
        audio=cast(AudioData | None, given["audio"]),
    )


def embeddings_of(chunks: Iterable[Sequence[Tensor]]) -> Tensor | None:
    """Return a forward's embeddings ``[M, E]``, chunk by chunk; None if it has none."""
    found = [row for rows in chunks for row in rows]
    if not found:
        return None
    dtype = found[0].dtype
    for row in found[1:]:
        dtype = torch.promote_types(dtype, row.dtype)
    return torch.stack([row.to(found[0].device, dtype) for row in found])


def is_segmented(prompt: object) -> bool:
    """Return whether it is one prompt with segments in it."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(part, Segment) for part in prompt)


def unwrapped(prompt: Prompt) -> Prompt:
    """Return the text of a ``{"prompt": text}``, as vLLM has it, and other prompts as they are."""
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
        return str(prompt["prompt"])
    return prompt


def as_prompts(prompts: Prompts) -> list[Prompt]:
    """Return a list of the prompts, of which there may be a single one."""
    if isinstance(prompts, (str, Mapping, ExecutorInputs)):
        return [unwrapped(prompts)]
    if isinstance(prompts, torch.Tensor):
        prompts = prompts.tolist()
    listable = isinstance(prompts, Sequence) and not isinstance(prompts, (bytes, bytearray))
    if not listable and not (isinstance(prompts, np.ndarray) and prompts.ndim):
        raise InvalidArgument(field="prompts", given=prompts, allowed="text, token ids, or a list of these")
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [prompts]  # type: ignore[list-item]
    if is_segmented(prompts):
        return [prompts]  # type: ignore[list-item]
    for number, item in enumerate(prompts):
        if not isinstance(item, (str, Sequence, Mapping, ExecutorInputs, np.ndarray, torch.Tensor)):
            raise InvalidArgument(field=f"prompts.{number}", given=item, allowed="text or token ids")
    return [unwrapped(prompt) for prompt in prompts]  # type: ignore[arg-type]


@contextmanager
def naming_prompt(number: int, count: int) -> Iterator[None]:
    """Adds the number of the prompt to an error, if there are many."""
    try:
        yield
    except QuireError as error:
        if count > 1:
            error.about(f"prompt {number}")
        raise
