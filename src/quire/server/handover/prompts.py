"""What both sides need: ``AskedPrompt``, the message by which a decode server asks for the state of
a prompt, and ``locked``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from quire.async_llm import AsyncLLM
from quire.async_llm.stepper import Call
from quire.base.errors import InvalidArgument
from quire.contracts.kv_state import TensorPlan
from quire.kv.messages import packed, planes_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPrompt:
    """A prompt, and where its state goes."""

    tokens: NDArray[np.int64]
    key: tuple[str, str | None]
    """The salt's owner, and the salt."""
    adapter: str | None
    """A fingerprint."""
    begin: int
    map: tuple[int, ...]
    model: Mapping[str, str]
    """The fingerprint of the receiver's model."""

    def message(self) -> list[bytes | memoryview]:
        header = {name: getattr(self, name) for name in self.__slots__ if name != "tokens"}
        return packed({"kind": "prompt", "count": self.tokens.size, **header}, [torch.from_numpy(self.tokens)])

    @classmethod
    def of(cls, header: Mapping[str, Any], data: memoryview) -> Self:
        """Read a message; ``InvalidArgument`` or ``DataLoss`` for a malformed one."""
        try:
            found = msgspec.convert(header, _Header)
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"the message that asks for a prompt is malformed: {error}") from None
        plan = {"tokens": TensorPlan((found.count,), torch.int64)}
        tokens = planes_of(data, plan, "the tokens of a prompt")["tokens"].numpy().copy()
        fields = {name: getattr(found, name) for name in cls.__slots__ if name != "tokens"}
        return cls(tokens=tokens, **fields)


class _Header(msgspec.Struct):
    count: int
    key: tuple[str, str | None]
    begin: int
    map: tuple[int, ...]
    model: dict[str, str]
    adapter: str | None = None


def locked(llm: AsyncLLM, function: Callable[[], T]) -> T:
    """Run a function under the engine's lock, as one of the engine's calls."""

    def run() -> T:
        with llm.engine.lock:
            return function()

    return llm.stepper.perform(Call(), run)


def asked_key(key: Hashable) -> tuple[str, str | None]:
    """Return a key of ``sessions.prompts.cache_key`` as it is sent."""
    assert isinstance(key, tuple)
    owner, salt = key
    return str(owner), None if salt is None else str(salt)
