"""Objects that own parts of a pool, which the end of a copy would take from the original."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

from quire.base.errors import Unsupported


class Uncopied:
    """Base class: ``copy``, ``deepcopy`` and ``pickle`` are refused with one sentence."""

    _instead: ClassVar[str]
    """What to do in place of a copy."""

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise Unsupported(f"{type(self).__name__} objects are live and cannot be copied or pickled; {self._instead}")
