"""Latent attention (MLA) in its forms: over latent rows, and over all heads' keys and values.

* *latent*: the KV state's form, with the kernels that a model gets on the device. One row per token
  is stored. Decodes attend in absorbed form. Tokens of a prompt attend to each other in expanded
  form, and to a past in absorbed form (``kv.latent``).
* *unpacked*: the same with maps by PyTorch, on a CPU with the C++ library.
* *absorbed*: all tokens attend to the rows, with maps by PyTorch. A decode equals *unpacked* and is
  left out.
* *expanded*: keys and values of all heads are stored, as in ``transformers``; new rows are
  expanded.
* *anew*: rows are stored in a contiguous tensor without pages; each decode expands all of them.

Only attention is measured, from queries and rows to each head's values. The other parts, RoPE
included, are equal in all forms. A forward is planned before the clock starts, since one plan
serves all layers of a model.

Letters: T new tokens; S tokens of a history; H heads; R rank of the latent; Dn, Dr columns of a
head without and with positions, Dk = Dn + Dr; Dv value size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quire.contracts.layers import FullAttention, LatentAttention
from quire.contracts.model import LatentExpansion
from quire.kernels.attention.cpu_attention import NativeAttention
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.linear.cpu_linear import native_linear
from quire.kernels.native_library import native_problem
from quire.kernels.rows.cpu_rows import native_rows
from quire.kv.state import State
from quire.kv.state_pass import StatePass
from quire.nn.latent import absorbing
from quire_bench.latency import synchronize

PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes of latent layers."""

    heads: int
    rank: int = 512
    rotary: int = 64
    nope: int = 128
    value: int = 128
    layers: int = 4

    @property
    def row(self) -> int:
        """Columns of a row, R + Dr."""
        return self.rank + self.rotary

    @property
    def head(self) -> int:
        """Columns of a head, Dk."""
        return self.nope + self.rotary

    @property
    def expansion_size(self) -> int:
        """Elements of the maps from a latent to keys and values."""
        return self.heads * self.rank * (self.nope + self.value)


GEOMETRIES = {
    "v2-lite": Geometry(heads=16),
    "v3": Geometry(heads=128, layers=2),
    "small": Geometry(heads=4, rank=16, rotary=8, nope=16, value=12, layers=2),
}
"""Sizes of DeepSeek-V2-Lite and DeepSeek-V3 with fewer layers, and tiny ones."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement: ``batch`` sequences with a history, each with new tokens."""

    geometry: str
    batch: int = 1
    history: int = 0
    tokens: int = 1

    @property
    def what(self) -> str:
        return "decode" if self.tokens == 1 else "chunk" if self.history else "prompt"

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a visible key."""
        return self.batch * (self.tokens * self.history + self.tokens * (self.tokens + 1) // 2)

    @property
    def keys(self) -> int:
        """Rows of all sequences, the new ones included."""
        return self.batch * (self.history + self.tokens)


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Random queries, rows and maps; all sequences have equal histories in separate memory."""

    q_THD: Tensor
    rows_TR: Tensor
    history_SR: Tensor
    expansions: Sequence[LatentExpansion]
    """The maps of each layer, equal, in separate memory."""

    @classmethod
    def draw(cls, geometry: Geometry, cell: Cell, layers: int, dtype: torch.dtype, device: torch.device) -> Inputs:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

        count, scale = cell.batch * cell.tokens, geometry.rank**-0.5
        key = normal(geometry.heads, geometry.nope, geometry.rank, scale=scale)
        value = normal(geometry.heads, geometry.rank, geometry.value, scale=scale)
        return cls(
            q_THD=normal(count, geometry.heads, geometry.head),
            rows_TR=normal(count, geometry.row),
            history_SR=normal(cell.history, geometry.row),
            expansions=[LatentExpansion(key.clone(), value.clone()) for _ in range(layers)],
        )


def expand(rows_TR: Tensor, expansion: LatentExpansion) -> tuple[Tensor, Tensor]:
    """Expand rows to K ``[T, H, Dk]`` and V ``[T, H, Dv]``."""
    heads, nope, rank = expansion.key_HDR.shape
    c_TR, shared_TD = rows_TR[:, :rank], rows_TR[:, rank:]
    nope_THD = (c_TR @ expansion.key_HDR.view(-1, rank).T).view(-1, heads, nope)
    k_THD = torch.cat((nope_THD, shared_TD.unsqueeze(1).expand(-1, heads, -1)), -1)
    return k_THD, torch.matmul(c_TR, expansion.value_HRV).transpose(0, 1).contiguous()


# -- forms -------------------------------------------------------------------------------------


class Form(Protocol):
    """A way to compute the attention of all layers."""

    def step(self) -> tuple[Tensor, float]:
        """Return the last layer's ``[T, H, Dv]`` and all layers' seconds; store nothing."""
        ...


class Stored:
    """A form over a paged KV state, which ``append`` fills and ``attend`` reads."""

    def __init__(
        self,
        specs: Sequence[FullAttention | LatentAttention],
        cell: Cell,
        inputs: Inputs,
        *,
        append: Callable[[StatePass, int], None],
        attend: Callable[[StatePass, int], Tensor],
    ) -> None:
        device, pages = inputs.q_THD.device, -(-(cell.history + cell.tokens) // PAGE)
        self.state = State(
            specs,
            capacity=cell.batch * pages * PAGE,
            page_size=PAGE,
            dtype=inputs.q_THD.dtype,
            device=device,
            backend=NativeAttention() if has_library(device) else SdpaAttention(),
            rows=native_rows() if has_library(device) else None,
        )
        self.cell = cell
        self._attend = attend
        for seq in range(cell.batch):
            self.state.add_sequence(seq)
            if cell.history:
                self.state.begin_forward([seq], [cell.history])
                for layer in range(len(specs)):
                    append(self.state.open_pass(), layer)
                self.state.end_forward()

    def step(self) -> tuple[Tensor, float]:
        """Attend in all layers; see ``Form``."""
        state, cell = self.state, self.cell
        state.begin_forward(list(range(cell.batch)), [cell.tokens] * cell.batch)
        try:
            opened = state.open_pass()
            self._attend(opened, 0)  # this call plans
            synchronize(state.device)
            started = time.perf_counter()
            for layer in range(len(state.geometry.specs)):
                out_THV = self._attend(opened, layer)
            synchronize(state.device)
            return out_THV, time.perf_counter() - started
        finally:
            state.abort_forward()


def has_library(device: torch.device) -> bool:
    """Return whether the C++ kernels run there."""
    return device.type == "cpu" and not native_problem()


def latent_form(geometry: Geometry, cell: Cell, inputs: Inputs) -> Form:
    kernel = native_linear() if has_library(inputs.q_THD.device) else None
    if kernel is None:
        return unpacked_form(geometry, cell, inputs)
    expansions = [absorbing(one, kernel) for one in inputs.expansions]
    return unpacked_form(geometry, cell, replace(inputs, expansions=expansions))


def unpacked_form(geometry: Geometry, cell: Cell, inputs: Inputs) -> Form:
    spec = LatentAttention(
        num_heads=geometry.heads, row_dim=geometry.row, value_dim=geometry.rank, sm_scale=geometry.head**-0.5
    )
    return Stored(
        [spec] * len(inputs.expansions),
        cell,
        inputs,
        append=lambda opened, layer: opened.append_rows(layer, inputs.history_SR),
        attend=lambda opened, layer: opened.attend_latent(
            layer, inputs.q_THD, inputs.rows_TR, inputs.expansions[layer]
        ),
    )


def absorbed_form(geometry: Geometry, cell: Cell, inputs: Inputs) -> Form:
    nope, rank = geometry.nope, geometry.rank
    spec = FullAttention(
        num_heads=geometry.heads,
        num_kv_heads=1,
        head_dim=geometry.row,
        value_dim=rank,
        sm_scale=geometry.head**-0.5,
    )

    def attend(opened: StatePass, layer: int) -> Tensor:
        expansion, q_THD = inputs.expansions[layer], inputs.q_THD
        q_THR = torch.bmm(q_THD[..., :nope].transpose(0, 1), expansion.key_HDR).transpose(0, 1)
        rows_T1R = inputs.rows_TR.unsqueeze(1)
        out_THR = opened.attend(layer, torch.cat((q_THR, q_THD[..., nope:]), -1), rows_T1R, rows_T1R[..., :rank])
        return torch.bmm(out_THR.transpose(0, 1), expansion.value_HRV).transpose(0, 1)

    def append(opened: StatePass, layer: int) -> None:
        rows_S1R = inputs.history_SR.unsqueeze(1)
        opened.append(layer, rows_S1R, rows_S1R[..., :rank])

    return Stored([spec] * len(inputs.expansions), cell, inputs, append=append, attend=attend)


def expanded_form(geometry: Geometry, cell: Cell, inputs: Inputs) -> Form:
    spec = FullAttention(
        num_heads=geometry.heads, num_kv_heads=geometry.heads, head_dim=geometry.head, value_dim=geometry.value
    )
    k_SHD, v_SHD = expand(inputs.history_SR, inputs.expansions[0])
    return Stored(
        [spec] * len(inputs.expansions),
        cell,
        inputs,
        append=lambda opened, layer: opened.append(layer, k_SHD, v_SHD),
        attend=lambda opened, layer: opened.attend(
            layer, inputs.q_THD, *expand(inputs.rows_TR, inputs.expansions[layer])
        ),
    )


class ExpandedAnew:
    """The form *anew*, for decodes."""

    def __init__(self, geometry: Geometry, cell: Cell, inputs: Inputs) -> None:
        self.inputs, self.scale = inputs, geometry.head**-0.5
        rows_BTR = inputs.rows_TR.view(cell.batch, 1, -1)
        one_BSR = torch.cat((inputs.history_SR.expand(cell.batch, -1, -1), rows_BTR), 1)
        self.layers = [one_BSR.clone() for _ in inputs.expansions]

    def step(self) -> tuple[Tensor, float]:
        """Attend in all layers; see ``Form``."""
        device = self.inputs.q_THD.device
        synchronize(device)
        started = time.perf_counter()
        for rows_BSR, expansion in zip(self.layers, self.inputs.expansions, strict=True):
            outs = []
            for rows_SR, q_HD in zip(rows_BSR, self.inputs.q_THD, strict=True):
                k_SHD, v_SHD = expand(rows_SR, expansion)
                q_1H1D, k_1HSD, v_1HSD = (x.transpose(0, 1)[None] for x in (q_HD[None], k_SHD, v_SHD))
                outs.append(scaled_dot_product_attention(q_1H1D, k_1HSD, v_1HSD, scale=self.scale)[0, :, 0])
        synchronize(device)
        return torch.stack(outs), time.perf_counter() - started


FORMS: Mapping[str, Callable[[Geometry, Cell, Inputs], Form]] = {
    "latent": latent_form,
    "unpacked": unpacked_form,
    "absorbed": absorbed_form,
    "expanded": expanded_form,
    "anew": ExpandedAnew,
}
