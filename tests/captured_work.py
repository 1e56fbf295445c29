"""What stands for CUDA graphs on the CPU: work that is recorded, and runs again with everything
frozen that Python had decided.

PyTorch's operations are recorded where they are dispatched, Triton's programs where they are
launched. A replay calls them in the same order with the same arguments. Results of operations go
where they went the first time, so tensors have one place, as in a CUDA graph. What a CUDA graph
cannot hold is an error: waiting for a value, or bringing memory of the host to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
WAITS = (aten._local_scalar_dense.default, aten.nonzero.default, aten.lift_fresh.default)
"""Operations that wait for a value, or bring one of the host's."""
PLACES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
"""Operations that take memory, which a replay has already."""


def _tensors(given: Any) -> list[Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in WAITS:
            raise RuntimeError(f"{func} is not permitted when work is captured")
        found = func(*args, **kwargs)
        made, given = _tensors(found), {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            self._calls.append(lambda: func(*args, **kwargs))
            return found
        # Views lie in what they are of.
        fresh = [one.untyped_storage().data_ptr() not in given for one in made]
        if not any(fresh) or func._schema.name.removeprefix("aten::") in PLACES:
            return found

        def again() -> None:
            for place, value in zip(made, _tensors(func(*args, **kwargs)), strict=True):
                place.copy_(value)

        self._calls.append(again)
        return found


class FrozenWork:
    """A ``Capture`` of ``quire.runner.graph`` on the CPU. It counts what it has recorded, and what
    ran again.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        from triton.runtime.interpreter import InterpretedFunction

        calls: list[Callable[[], None]] = []
        launch = InterpretedFunction.run

        def recorded(program: Any, *args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():
                launch(program, *args, **kwargs)
            calls.append(lambda: launch(program, *args, **kwargs))

        def refused(*args: Any) -> Tensor:
            raise RuntimeError("host and device exchange values while work is captured")

        with pytest.MonkeyPatch.context() as patch, _Recorder(calls):
            patch.setattr(InterpretedFunction, "run", recorded)
            patch.setattr(torch, "from_numpy", refused)
            for name in ("tolist", "numpy"):
                patch.setattr(Tensor, name, refused)
            result = run()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for call in calls:
                call()

        return replay, result
