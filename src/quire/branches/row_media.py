"""Image and audio embeddings of a call: their distribution to rows, and recorded ids of
placeholders.

The caller has the encoder. Any decoder takes embeddings of its own width, so a *modality* only
names a kind of input that an executor was configured to take; it refuses others.

Letters: B batch rows; n tokens, m placeholders of a row; M rows of embeddings; E model width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from quire.base.config import MODALITIES
from quire.base.errors import InvalidArgument, Unsupported
from quire.base.token_history import LAST_PLACEHOLDER, Ids
from quire.contracts.executor import (
    AUDIO_PLACEHOLDER,
    END_OF_AUDIO,
    END_OF_IMAGE,
    VISION_PLACEHOLDER,
    AudioData,
    ExecutorInputs,
    VisionData,
)

NO_PER_LAYER = "the model adds nothing to its layers' inputs; give embeddings only"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMedia:
    """The embeddings at the negative ids of one row."""

    embeddings_mE: Tensor
    """In the order of the ids."""
    places: Ids
    """Columns of the negative ids, ascending."""
    blocks: tuple[tuple[int, int], ...] = ()
    """First column and one past the last of each image whose tokens all see each other."""

    def slice(self, begin: int, end: int) -> Tensor:
        """Return the embeddings of columns ``begin..end - 1``."""
        first, last = np.searchsorted(self.places, (begin, end))
        return self.embeddings_mE[first:last]


def check_modalities(modalities: Collection[str]) -> frozenset[str]:
    """Return the modalities; ``InvalidArgument`` for one that does not exist."""
    if isinstance(modalities, str) or (unknown := set(modalities) - set(MODALITIES)):
        shown = repr(modalities) if isinstance(modalities, str) else sorted(unknown)
        raise InvalidArgument(f"modalities: {shown}; a collection of {', '.join(map(repr, MODALITIES))} is accepted")
    return frozenset(modalities)


def refusal(kind: str) -> str:
    """Return the reason why an executor without the modality ``kind`` refuses it."""
    return f"this executor was made without the modality {kind!r}; give text only"


def media_of_rows(
    inputs: ExecutorInputs, tokens: Sequence[Ids], modalities: Collection[str], hidden_size: int
) -> list[RowMedia | None]:
    """Return the embeddings of each row of ids, None for a row without placeholders, all checked.

    ``Unsupported``: a modality that is not taken, per-layer embeddings. ``InvalidArgument``:
    another width, or an end marker without its embedding. Counts were checked when ``inputs`` were
    built.
    """
    parts: list[Tensor] = []
    sources: dict[int, tuple[int, bool]] = {}
    size = 0
    for kind, data, placeholder, end in (
        ("vision", inputs.vision, VISION_PLACEHOLDER, END_OF_IMAGE),
        ("audio", inputs.audio, AUDIO_PLACEHOLDER, END_OF_AUDIO),
    ):
        if data is None:
            continue
        if kind not in modalities:
            raise Unsupported(f"{kind} data: {refusal(kind)}")
        rows_ME, end_E = _checked(kind, data, hidden_size)
        sources[placeholder] = (size, True)
        parts.append(rows_ME)
        size += len(rows_ME)
        if end_E is not None:
            sources[end] = (size, False)
            parts.append(end_E[None])
            size += 1
    if not parts:
        return [None] * len(tokens)
    sees_images = inputs.vision is not None and inputs.vision.bidirectional
    return _divide(joined(parts), sources, tokens, sees_images)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return all rows of all parts, in a dtype that holds all values."""
    dtype = reduce(torch.promote_types, [part.dtype for part in parts])
    return torch.cat([part.to(dtype) for part in parts])


def _checked(kind: str, data: VisionData | AudioData, hidden_size: int) -> tuple[Tensor, Tensor | None]:
    """Return the used rows, on their device, and the embedding of the end marker."""
    if data.per_layer_embeddings is not None:
        raise Unsupported(f"{kind} per_layer_embeddings: {NO_PER_LAYER}")
    rows = data.embeddings
    if rows is None:
        rows = torch.empty(0, hidden_size)
    for name, found in (("embeddings", rows), ("end_embedding", data.end_embedding)):
        if found is not None and found.shape[-1] != hidden_size:
            raise InvalidArgument(f"{kind} {name} have width {found.shape[-1]}; the model's is {hidden_size}")
    return rows[: data.num_rows].detach(), None if data.end_embedding is None else data.end_embedding.detach()


def _divide(
    all_ME: Tensor, sources: dict[int, tuple[int, bool]], tokens: Sequence[Ids], sees_images: bool
) -> list[RowMedia | None]:
    """Give each row its embeddings. ``sources``: by negative id the index of its first embedding,
    and True if each further such id takes the next one."""
    taken = dict.fromkeys(sources, 0)
    found: list[RowMedia | None] = []
    for ids in tokens:
        places = np.flatnonzero(ids < 0)
        index = np.empty(len(places), dtype=np.int64)
        for token in np.unique(ids[places]).tolist():
            if token not in sources:
                raise InvalidArgument(f"token id {token} ends a medium, and its end_embedding was not given")
            begin, counts = sources[token]
            here = ids[places] == token
            index[here] = begin + (taken[token] + np.arange(here.sum()) if counts else 0)
            taken[token] += int(here.sum())
        if not len(places):
            found.append(None)
            continue
        rows = torch.from_numpy(index).to(all_ME.device)
        blocks = image_blocks(ids) if sees_images else ()
        found.append(RowMedia(embeddings_mE=all_ME.index_select(0, rows), places=places, blocks=blocks))
    return found


def image_blocks(ids: Ids) -> tuple[tuple[int, int], ...]:
    """Return the runs of image placeholders: first column and one past the last."""
    edges = np.flatnonzero(np.diff(ids == VISION_PLACEHOLDER, prepend=False, append=False))
    return tuple(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def recorded_ids(ids: Ids, media: RowMedia | None) -> Ids:
    """Return the ids in recorded form: the id of a placeholder is below -4 and computed from its
    data.

    So equal records mean equal state, and a placeholder matches only the same data under the same
    rule. If the tokens of an image see all of it, each id is computed from the whole image.
    """
    if media is None:
        return ids
    rows = media.embeddings_mE.to("cpu", torch.float32).contiguous().numpy()
    digests = [hashlib.sha256(row.tobytes()).digest() for row in rows]
    found = ids.copy()
    spans = dict(media.blocks)
    whole = b""
    start = stop = 0
    for number, (place, digest) in enumerate(zip(media.places.tolist(), digests, strict=True)):
        if place in spans:
            start, stop = place, spans[place]
            whole = b"".join(digests[number : number + stop - start])
        rest = whole + (place - start).to_bytes(8, "little") if place < stop else b""
        found[place] = _recorded(hashlib.sha256(bytes([-ids[place]]) + digest + rest).digest())
    return found


def _recorded(digest: bytes) -> int:
    """Return an id out of the 2**62 below all placeholders."""
    return LAST_PLACEHOLDER - 1 - (int.from_bytes(digest[:8], "little") >> 2)


def image_mask(lengths: Sequence[int], counts: Sequence[int], blocks: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Return the mask of a forward in which tokens of an image see all of it.

    It is bool, flat, entry by entry ``[n, length + n]``. ``lengths``: tokens before; ``blocks``:
    per entry, columns among the new tokens.
    """
    parts = []
    for length, count, spans in zip(lengths, counts, blocks, strict=True):
        allowed_nK = torch.ones(count, length + count, dtype=torch.bool).tril_(length)
        for begin, end in spans:
            allowed_nK[begin:end, length + begin : length + end] = True
        parts.append(allowed_nK.reshape(-1))
    return torch.cat(parts)
