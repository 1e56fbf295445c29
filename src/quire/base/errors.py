"""Every error that Quire raises on purpose.

One rule holds for all: the message gives the value and the accepted ones, and the failed call has
changed nothing. Each class also derives from the builtin that a caller expects, so
``except ValueError`` works as with other engines.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CONTEXT_FULL = "context_length_exceeded"
"""The code of a prompt that is too long for the context, as used by OpenAI's clients."""

MAX_SHOWN = 500
"""Most characters of a value that a message repeats."""


class QuireError(Exception):
    """Base class; raised itself only for a broken internal invariant or device.

    ``field`` is the wrong argument as a dotted path ("structured_outputs.json",
    "messages.3.content"), or None. ``given`` is its value and ``allowed`` describes the accepted
    ones. The message is made of these three unless a fuller one is given. ``code`` is for programs,
    if the class is not specific enough, such as ``CONTEXT_FULL``.
    """

    def __init__(
        self,
        message: str = "",
        *,
        field: str | None = None,
        given: object = None,
        allowed: str = "",
        code: str | None = None,
    ) -> None:
        super().__init__(message if message or not allowed else f"{field} must be {allowed}, got {_shown(given)}")
        self.field, self.given, self.allowed, self.code = field, given, allowed, code

    def about(self, what: str) -> None:
        """Put the subject in front of the message."""
        self.args = (f"{what}: {self}",)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts for copies and pickles; replace a value without pickle by its text."""
        state = dict(self.__dict__)
        try:
            pickle.dumps(self.given)
        except Exception:  # pickling the value may raise any exception
            state["given"] = _shown(self.given)
        return type(self), self.args, state

    def __str__(self) -> str:
        # KeyError would otherwise print the repr of the message.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class InvalidArgument(QuireError, ValueError):
    """A malformed argument: shape, dtype, range, or an existing id in place of a new one."""


def context_full(longest: int, problem: str, field: str | None = None) -> InvalidArgument:
    """Return the error about a prompt that does not fit the context of ``longest`` tokens.

    It begins with OpenAI's sentence: clients search for it to shorten a conversation, or to choose
    a model with a longer context.
    """
    message = f"This model's maximum context length is {longest} tokens. {problem}"
    return InvalidArgument(message, field=field, code=CONTEXT_FULL)


class AlreadyExists(InvalidArgument):
    """A name that must be new is taken."""


class NotFound(QuireError, KeyError):
    """A sequence, cache, adapter, file or name that does not exist."""


class FailedPrecondition(QuireError, RuntimeError):
    """Right arguments at the wrong time."""


class ResourceExhausted(QuireError, MemoryError):
    """Pages, capacity or the model's maximum length ran out; raised before anything is written."""


class PoolExhausted(ResourceExhausted):
    """Needed resources are held by others and cannot be taken now; the same call may succeed
    later."""


class StoreFull(ResourceExhausted):
    """A durable tier has no room for the data of a call."""


class QuotaExceeded(ResourceExhausted):
    """The caller holds its maximum; the call can succeed after the caller frees something."""


class Unsupported(QuireError, NotImplementedError):
    """A verb or a combination that this model, device or kind of state does not have."""


class RanksBroken(QuireError):
    """A process that holds a part of the model has ended, so that no step can run any more."""


class Cancelled(QuireError):
    """The running call was cancelled; ``token_ids`` holds the tokens sampled before."""

    def __init__(self, message: str, token_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.token_ids: list[int] = list(token_ids)


class DataLoss(QuireError):
    """Bytes that are truncated, altered or malformed."""


class BlendLoadError(DataLoss):
    """A promised layer of a blend retriever cannot be loaded; ``requests`` holds the indices of the
    affected requests. Run the step again with their chunks invalid."""

    def __init__(self, message: str = "", requests: Collection[int] = ()) -> None:
        super().__init__(message)
        self.requests: tuple[int, ...] = tuple(sorted(requests))


class StoreDamaged(DataLoss):
    """A record or file of the store itself, not one given by the caller, is damaged or gone."""


class TierError(QuireError, OSError):
    """A tier of a store cannot be reached or written: no route, a full or read-only disk. The store
    continues without it and counts that."""


class TierFull(TierError):
    """A tier's disk or its quota is full. A commit raises ``StoreFull`` for it."""


class NotDurable(QuireError):
    """The effect of a call could not be written to the state directory. It took effect, and is lost
    if the process ends."""


@contextmanager
def took_effect() -> Iterator[None]:
    """Add to the message of a ``NotDurable`` that the call took effect and must not be repeated."""
    try:
        yield
    except NotDurable as error:
        error.about("the call took effect, and is lost if the process ends")
        raise


class CheckpointError(QuireError, ValueError):
    """A model checkpoint with missing, misshapen, surplus or damaged tensors or files."""


def _shown(value: object) -> str:
    """Show a value in a message: tensors and arrays by shape, objects without repr by class."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    text = repr(value) if type(value).__repr__ is not object.__repr__ else type(value).__name__
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def some(names: Collection[str], limit: int = 4) -> str:
    """Return the first names, and how many more there are, for an error."""
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def short_size(nbytes: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    unit, name = (30, "GiB") if nbytes >= 1 << 30 else (20, "MiB")
    return f"{nbytes / (1 << unit):.2f} {name}"


def size_words(nbytes: int) -> str:
    """Return a number of bytes for a message, in GiB or MiB and in bytes."""
    return f"{short_size(nbytes)} ({nbytes:,} bytes)"
