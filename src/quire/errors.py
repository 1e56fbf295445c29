"""Every error that Quire raises on purpose.

One rule for all of them: the message says what was given and what would be accepted, and the call that
raised has changed nothing. The classes also derive from the builtin that a caller would expect, so
``except ValueError`` works as it does with other engines.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

MAX_SHOWN = 500
"""Characters of a value that a message repeats, at most."""


class QuireError(Exception):
    """Base class; raised itself only when an internal invariant or the device broke.

    ``field`` is the argument that the error is about, as a dotted path ("structured_outputs.json",
    "messages.3.content"); None if it is about none. ``given`` is its value, and ``allowed`` says what is
    accepted in its place. The message is made of these three, unless there is one that says more.
    """

    def __init__(self, message: str = "", *, field: str | None = None, given: object = None, allowed: str = "") -> None:
        super().__init__(message if message or not allowed else f"{field} must be {allowed}, got {_shown(given)}")
        self.field, self.given, self.allowed = field, given, allowed

    def about(self, what: str) -> None:
        """Say in front of the message what it is about."""
        self.args = (f"{what}: {self}",)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copies and pickles keep: of a value that has no pickle what is shown."""
        state = dict(self.__dict__)
        try:
            pickle.dumps(self.given)
        except Exception:  # whatever the value raises
            state["given"] = _shown(self.given)
        return type(self), self.args, state

    def __str__(self) -> str:
        # KeyError would otherwise print the repr of the message.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class InvalidArgument(QuireError, ValueError):
    """A malformed argument: shape, dtype, range, an id that exists already where a new one is needed."""


class AlreadyExists(InvalidArgument):
    """A name that must be new is taken."""


class NotFound(QuireError, KeyError):
    """A sequence, cache, adapter, file or name that does not exist."""


class FailedPrecondition(QuireError, RuntimeError):
    """Right arguments at the wrong time."""


class ResourceExhausted(QuireError, MemoryError):
    """Pages, capacity or the model's maximum length ran out; always raised before anything is written."""


class PoolExhausted(ResourceExhausted):
    """Others hold what the call needs, and nothing of it can be taken from them now; later the same call may succeed."""


class QuotaExceeded(ResourceExhausted):
    """The caller holds as much as one may; the call can succeed once the caller has given something back."""


class Unsupported(QuireError, NotImplementedError):
    """A verb or a combination that this model, device or kind of state does not have."""


class Cancelled(QuireError):
    """The running call was cancelled; ``token_ids`` holds what had been sampled until then."""

    def __init__(self, message: str, token_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.token_ids: list[int] = list(token_ids)


class DataLoss(QuireError):
    """Bytes that are truncated, altered or malformed."""


class BlendLoadError(DataLoss):
    """A layer that a blend retriever had promised could not be loaded."""


class CheckpointError(QuireError, ValueError):
    """A model checkpoint that cannot be loaded: missing, misshapen, surplus or damaged tensors or files."""


def _shown(value: object) -> str:
    """Show a value in a message: tensors and arrays by shape, what has no form of its own by class."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    text = repr(value) if type(value).__repr__ is not object.__repr__ else type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
