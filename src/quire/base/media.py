"""``Media``: the embeddings of images and sounds in a history of tokens. No torch at run time.

The id of a placeholder in a history is computed from its data
(``quire.branches.row_media.recorded_ids``), as in rows of KV caches: below -4, 62 bits of a
SHA-256. So the users that compare histories (the prefix cache, sessions, requests of one batch) see
equal ids for equal data only. The data are kept beside the history, by these ids, as long as the
tokens may be replayed.

Letters: E model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import FailedPrecondition

if TYPE_CHECKING:
    from torch import Tensor

UNKNOWN_PLACEHOLDER: Final = -1
"""Id of an embedding that is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """Embeddings by their ids in a history."""

    rows: Mapping[int, Tensor] = field(default_factory=dict)
    """``[E]`` each, on the device and in the dtype of the caller's tensor."""
    placeholders: Mapping[int, int] = field(default_factory=dict)
    """The user's ids of these placeholders, -1 to -4."""

    def __or__(self, other: Media) -> Media:
        """Return the embeddings of both."""
        if not other.rows or not self.rows:
            return self if self.rows else other
        return Media({**self.rows, **other.rows}, {**self.placeholders, **other.placeholders})

    def embeddings(self, ids: Sequence[int]) -> list[Tensor]:
        """Return an embedding ``[E]`` for each id below 0, in their order."""
        return [self.rows[token] for token in ids if token < 0] if self.rows else []

    def as_given(self, ids: NDArray[np.int64]) -> list[int]:
        """Return the ids in the user's form; -1 for an embedding that is gone."""
        if not ids.size or ids.min() >= 0:
            return ids.tolist()  # type: ignore[no-any-return]
        return [token if token >= 0 else self.placeholders.get(token, UNKNOWN_PLACEHOLDER) for token in ids.tolist()]

    def require(self, ids: NDArray[np.int64]) -> None:
        """Raise ``FailedPrecondition`` if an embedding of these ids is gone."""
        if ids.size and ids.min() < 0 and any(token not in self.rows for token in ids[ids < 0].tolist()):
            raise FailedPrecondition(
                "an embedding that must be run is gone: neither state files nor KV caches have them; append a token behind it, or "
                "give the prompt anew",
                field="prompt",
            )


NO_MEDIA: Final = Media()
