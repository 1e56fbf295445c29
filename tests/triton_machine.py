"""Where the tests run Triton kernels: on a CUDA device, else on the CPU by Triton's interpreter.

``conftest`` says which, before Triton is imported.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.contracts.attention import AttentionState, ForwardPlan
from quire.contracts.kv_format import KVView, PlainRows
from quire.contracts.recurrence import Recurred, RecurrencePlan, StatePlaces
from quire.contracts.rows import ActivationName, HeadNormWeights, Rotation
from quire.kernels.attention.triton_attention import TritonAttention
from quire.kernels.recurrence.triton_recurrence import TritonRecurrence
from quire.kernels.rows.triton_rows import TritonRows

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
MISSING = "" if find_spec("triton") else "the package triton is not installed"
INTERPRETED = not HAS_CUDA and not MISSING
needs_triton = pytest.mark.skipif(bool(MISSING), reason=MISSING)
"""Of tests of Triton kernels."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if HAS_CUDA else (torch.float32, torch.float16)
"""That kernels know here: the interpreter has no bfloat16."""

if INTERPRETED:
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    class _Scope:
        """Passes on what the interpreter changes in Triton, with one change."""

        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def set_attr(self, owner: Any, name: str, value: Any) -> None:
            if name == "__index__":

                def value(self: Any) -> int:
                    # The interpreter's own ``int(data)`` takes no array of one number since NumPy
                    # 2.4.
                    return int(self.handle.data.item())

            self._scope.set_attr(owner, name, value)

    interpreter._patch_lang_tensor = lambda tensor, scope: _patch(tensor, _Scope(scope))
    _convert = interpreter._convert_float

    def _converted(values: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if str(to_type) != "fp8e4nv":
            return _convert(values, from_type, to_type, rounding)
        # The interpreter loses carries into the exponent, and rounds small numbers to zero.
        return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = _converted

    # For each value the interpreter finds the type in NumPy, the shape and its check again, and for
    # each function that a kernel calls it changes Triton's modules again, which stay changed. Here
    # the same is found once: kernels then take half the time.
    _block, _numpy_type, _patch_lang = core.block_type.__init__, interpreter._get_np_dtype, interpreter._patch_lang
    _blocks: dict[tuple[object, ...], dict[str, Any]] = {}
    _numpy_types: dict[str, np.dtype[Any]] = {}

    def _made_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (str(element_ty), *map(core._unwrap_if_constexpr, getattr(shape, "values", shape)))
        if key not in _blocks:
            _block(self, element_ty, shape)
            _blocks[key] = dict(self.__dict__)
        self.__dict__.update(_blocks[key])

    @functools.cache
    def _shape(*sizes: int) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def _made_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _shape(*(type.shape.values if type.is_block() else ()))

    def _found_type(dtype: Any) -> np.dtype[Any]:
        name = dtype.scalar.name
        if name not in _numpy_types:
            _numpy_types[name] = _numpy_type(dtype)
        return _numpy_types[name]

    def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function from a kernel, which has changed ``triton.language``."""
        if self.fn not in self.rewritten_fn and all(one is not triton.language for one in self.fn.__globals__.values()):
            _patch_lang(self.fn)  # It is Triton's own, and sees ``triton.language.core``.
        return self.rewrite()(*args, **kwargs)

    core.block_type.__init__, core.tensor.__init__ = _made_block, _made_tensor
    interpreter._get_np_dtype, interpreter.InterpretedFunction.__call__ = _found_type, _called


class CarriedAttention(TritonAttention):
    """The backend ``triton`` for tests whose tensors are on the CPU."""

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        return super().plan(replace(plan, device=DEVICE), dtype)

    def run(self, prepared: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().run(prepared, *map(there, args), **{name: there(x) for name, x in kwargs.items()}).cpu()

    def run_state(self, prepared: Any, *args: Any, **kwargs: Any) -> AttentionState:
        found = super().run_state(prepared, *map(there, args), **{name: there(x) for name, x in kwargs.items()})
        return AttentionState(found.out.cpu(), found.lse.cpu())


class CarriedRows(TritonRows):
    """The row kernels for tests whose tensors are on the CPU."""

    def rms_norm(self, x: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        return super().rms_norm(there(x), there(weight_E), eps).cpu()

    def add_rms_norm(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor, eps: float, scale: float = 1.0) -> Tensor:
        y = there(y_TE)
        found = super().add_rms_norm(y, there(x_TE), there(weight_E), eps, scale).cpu()
        if HAS_CUDA:
            y_TE.copy_(y)
        return found

    def gated(self, gate_up: Tensor, activation: ActivationName) -> Tensor:
        return super().gated(there(gate_up), activation).cpu()

    def rope_and_write_kv(
        self,
        qkv_TC: Tensor,
        num_heads: int,
        rotation: Rotation | None,
        norms: HeadNormWeights | None,
        view: KVView,
        slots_T: Tensor,
    ) -> Tensor:
        assert isinstance(view, PlainRows)
        rows = there(view)
        turned = None if rotation is None else Rotation(*there(rotation[:2]), rotation.interleaved)
        weights = None if norms is None else HeadNormWeights(*there(norms[:2]), norms.eps)
        found = super().rope_and_write_kv(there(qkv_TC), num_heads, turned, weights, rows, there(slots_T)).cpu()
        if HAS_CUDA:
            view.k.copy_(rows.k)
            view.v.copy_(rows.v)
        return found

    def copy_slots(self, pools_LSHD: Sequence[Tensor], moves_2N: NDArray[np.int64]) -> None:
        pools = [there(pool) for pool in pools_LSHD]
        super().copy_slots(pools, moves_2N)
        if HAS_CUDA:
            for pool_LSHD, pool in zip(pools_LSHD, pools, strict=True):
                pool_LSHD.copy_(pool)


class CarriedRecurrence(TritonRecurrence):
    """The recurrences for tests whose tensors are on the CPU."""

    def linear_attention(self, plan: RecurrencePlan, *args: Any, **kwargs: Any) -> Recurred:
        return here(super().linear_attention(plan, *map(there, args), **{name: there(x) for name, x in kwargs.items()}))

    def linear_attention_at(
        self, plan: RecurrencePlan, q: Tensor, k: Tensor, v: Tensor, places: StatePlaces, **kwargs: Any
    ) -> Tensor | None:
        moved = StatePlaces(*map(there, places))
        gates = {name: there(x) for name, x in kwargs.items()}
        return brought(super().linear_attention_at(plan, there(q), there(k), there(v), moved, **gates), moved, places)

    def convolve(self, plan: RecurrencePlan, *args: Any) -> Recurred:
        return here(super().convolve(plan, *map(there, args)))

    def convolve_at(
        self, plan: RecurrencePlan, x: Tensor, weight: Tensor, bias: Tensor | None, places: StatePlaces
    ) -> Tensor | None:
        moved = StatePlaces(*map(there, places))
        return brought(super().convolve_at(plan, there(x), there(weight), there(bias), moved), moved, places)


def brought(out: Tensor | None, moved: StatePlaces, places: StatePlaces) -> Tensor | None:
    """Return an output on the CPU, with the pool as the kernels have left it."""
    if HAS_CUDA:
        places.pool_S.copy_(moved.pool_S)
    return None if out is None else out.cpu()


def here(found: Recurred) -> Recurred:
    """Return a result on the CPU."""
    return Recurred(found.out.cpu(), found.states.cpu())


def there(x: Any) -> Any:
    """Return a tensor, or a pair of some, on the device of the kernels; other things as they
    are.
    """
    if isinstance(x, PlainRows):
        return PlainRows(x.k.to(DEVICE), x.v.to(DEVICE))
    if isinstance(x, tuple) and x and isinstance(x[0], Tensor):
        return tuple(part.to(DEVICE) for part in x)
    return x.to(DEVICE) if isinstance(x, Tensor) else x
