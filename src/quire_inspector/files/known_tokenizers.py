"""``tokenizer_of``: the tokenizer of the model that a state is of, if this machine has the model.

State names its model by digests. Nothing is downloaded, and no weights are read that were not read
before, except for bundled models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from quire.base.errors import QuireError
from quire.models.catalogue import bundled_models
from quire.models.fingerprint import digested_models, weights_digest
from quire.text.tokenizer import Tokenizer


@cache
def tokenizer_at(directory: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint's directory; None: it has none that can be read."""
    try:
        return Tokenizer.from_path(directory)
    except QuireError:
        return None


def tokenizer_of(model: Mapping[str, str]) -> Tokenizer | None:
    """Return the tokenizer of a model. ``model``: ``weights`` as in a state's metadata."""
    weights = model["weights"].partition("-")[0]
    return next((found for one in _directories(weights) if (found := tokenizer_at(one)) is not None), None)


def _directories(weights: str) -> Iterator[Path]:
    for one in bundled_models().values():
        with suppress(QuireError):
            if weights_digest(one) == weights:
                yield one
    yield from digested_models(weights)
