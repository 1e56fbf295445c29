"""States of every combination of layers with tokens in them, and what their layers must return, by
loops over all tokens.

Each layer gives a token a query, a key and a value that depend on the token alone; an encoder's
rows are fixed. So what a layer returns for a token follows from the tokens before it, computed here
from scratch in float64.

Letters: T new tokens; Hq, H heads of queries and keys; D head size; R columns of a latent row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quire.contracts.attention import AttentionState
from quire.contracts.layers import (
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    Recurrent,
    StateTensor,
    WindowedAttention,
)
from quire.kv.contract import ContractState
from quire.kv.rule_table import Combination
from quire.ops.attention import ReferenceAttention, merge
from quire.ops.recurrence import ReferenceRecurrence

from .faces import contract

HQ, H, D, R, WINDOW, ENCODED, VOCAB = 4, 2, 4, 7, 5, 6, 40
F64 = torch.float64
SIZES: dict[str, Any] = {"num_heads": HQ, "num_kv_heads": H, "head_dim": D, "value_dim": D}
SPECS: dict[str, LayerSpec] = {
    "full": FullAttention(**SIZES),
    "window": WindowedAttention(**SIZES, window=WINDOW),
    "latent": LatentAttention(num_heads=HQ, row_dim=R, value_dim=D),
    "cross": CrossAttention(**SIZES),
    "recurrent": Recurrent(
        states=(StateTensor(shape=(H, D, D), dtype="float32"), StateTensor(shape=(3,), dtype="float64"))
    ),
}


def table(kind: str, name: str, *shape: int, rows: int = VOCAB) -> Tensor:
    """float64 ``[rows, *shape]``, fixed."""
    generator = torch.Generator().manual_seed(sum(map(ord, kind + name)))
    return torch.randn(rows, *shape, generator=generator, dtype=F64)


def given(kind: str, tokens: Sequence[int]) -> dict[str, Tensor]:
    """What tokens bring to a layer of this kind."""
    index = torch.tensor(list(tokens), dtype=torch.int64)
    if kind == "latent":
        return {"q": table(kind, "q", HQ, R)[index], "rows": table(kind, "rows", R)[index]}
    found = {"q": table(kind, "q", HQ, D)[index]}
    if kind == "cross":
        return found
    k = table(kind, "k", H, D)[index]
    found |= {"k": k, "v": table(kind, "v", H, D)[index]}
    if kind == "recurrent":
        found |= {
            "k": k / k.norm(dim=-1, keepdim=True),
            "log_decay": -table(kind, "decay", H)[index].abs() / 4,
            "beta": table(kind, "beta", H)[index].sigmoid(),
        }
        return {name: x.float() for name, x in found.items()}
    return found


def encoded() -> tuple[Tensor, Tensor]:
    """K and V of the encoder."""
    return table("cross", "k", H, D, rows=ENCODED), table("cross", "v", H, D, rows=ENCODED)


def recurrent_state(tokens: Sequence[int]) -> Tensor:
    """float64 ``[H, D, D]`` after these tokens."""
    x = given("recurrent", tokens)
    S_HDD = torch.zeros(H, D, D, dtype=F64)
    for t in range(len(tokens)):
        for head in range(H):
            k, v = x["k"][t, head].double(), x["v"][t, head].double()
            S = S_HDD[head] * math.exp(x["log_decay"][t, head])
            S_HDD[head] = S + torch.outer(k, x["beta"][t, head] * (v - S.T @ k))
    return S_HDD


def expected(kind: str, tokens: Sequence[int], window: tuple[int, int] | None = None) -> Tensor:
    """What the layer returns for the last of these tokens: ``[Hq, D]``.

    ``window``: size and sink of the sequence.
    """
    x, last = given(kind, tokens), len(tokens) - 1
    if kind == "recurrent":
        S_HDD = recurrent_state(tokens)
        return torch.stack([S_HDD[head // (HQ // H)].T @ x["q"][last, head].double() for head in range(HQ)])
    seen = list(range(len(tokens)))
    if window is not None:
        size, sink = window
        seen = [i for i in seen if i < sink or i > last - (size - sink)]
    if kind == "window":
        seen = [i for i in seen if i > last - WINDOW]
    if kind == "latent":
        k_MHD, v_MHD = x["rows"][seen][:, None], x["rows"][seen][:, None, :D]
    elif kind == "cross":
        k_MHD, v_MHD = encoded()
    else:
        k_MHD, v_MHD = x["k"][seen], x["v"][seen]
    rows = []
    for head in range(HQ):
        of = head // (HQ // k_MHD.shape[1])
        weights = (k_MHD[:, of] @ x["q"][last, head] * k_MHD.shape[2] ** -0.5).softmax(0)
        rows.append(weights @ v_MHD[:, of])
    return torch.stack(rows)


class CountingAttention(ReferenceAttention):
    """Counts what it computes."""

    calls = 0

    def run(self, *args: Any, **more: Any) -> Tensor:
        self.calls += 1
        return super().run(*args, **more)

    def run_state(self, *args: Any, **more: Any) -> AttentionState:
        self.calls += 1
        return super().run_state(*args, **more)


class CountingRecurrence(ReferenceRecurrence):
    """Counts what it computes."""

    calls = 0

    def linear_attention(self, *args: Any, **more: Any) -> Any:
        self.calls += 1
        return super().linear_attention(*args, **more)


def refused_call(state: ContractState, verb: str) -> Callable[[], object]:
    """A call of a verb that a state does not have, with arguments of the right types."""
    rows = torch.zeros(3, 2, 8, dtype=state.dtype)
    given: dict[str, tuple[Any, ...]] = {
        "set_cross_kv": (0, 0, rows, rows),
        "linear_attention": (0, rows, rows, rows),
        "set": (0, 0, rows),
        "debug_get": (0, 0, 0),
        "debug_set": (0, 0, 0, rows),
        "checkpoint": (0,),
    }
    return lambda: getattr(state, verb)(*given.get(verb, (0, 0)))


class Story:
    """A state with one layer of each kind of a combination, in this order."""

    def __init__(self, combination: Combination, page_size: int = 4) -> None:
        self.combination = combination
        self.kinds = combination.kinds
        self.attention, self.recurrence = CountingAttention(), CountingRecurrence()
        fields: dict[str, Any] = {
            "page_size": page_size,
            "dtype": F64,
            "backend": self.attention,
        }
        if set(self.kinds) != {"recurrent"}:
            fields["capacity"] = 400
        if "cross" in self.kinds:
            fields["cross_capacity"] = 200
        specs = [SPECS[kind] for kind in self.kinds]
        if combination.own_rotation:
            specs = [FullAttention(**SIZES, caller_rotates=True)]
        self.state: ContractState
        if "recurrent" in self.kinds:
            self.state = contract(specs, num_states=60, ring=2, recurrence=self.recurrence, **fields)
        else:
            self.state = contract(specs, **fields)

    @property
    def calls(self) -> int:
        """How often something was computed."""
        return self.attention.calls + self.recurrence.calls

    def layer_of(self, kind: str) -> int:
        return self.kinds.index(kind)

    def layers(self, *kinds: str) -> list[tuple[int, str]]:
        """Ids and kinds of the layers of these kinds."""
        return [(layer, kind) for layer, kind in enumerate(self.kinds) if kind in kinds]

    def add(self, *seq_ids: int) -> None:
        for seq_id in seq_ids:
            self.state.add_sequence(seq_id)
            if "cross" in self.kinds:
                self.state.set_cross_kv(self.layer_of("cross"), seq_id, *encoded())

    def begin(self, seq_id: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.state.begin_forward([seq_id], [len(tokens)], None if parents is None else [list(parents)])

    def forward(
        self, batch: dict[int, list[int]], parents: Sequence[int] | None = None, *, parts: bool = False
    ) -> list[Tensor]:
        """One forward; what each layer returned, ``[T, Hq, D]``."""
        trees = None if parents is None else [list(parents)]
        self.state.begin_forward(list(batch), [len(tokens) for tokens in batch.values()], trees)
        tokens = [token for entry in batch.values() for token in entry]
        found = [self.attend(layer, kind, tokens, parts=parts) for layer, kind in enumerate(self.kinds)]
        self.state.end_forward()
        return found

    def attend(self, layer: int, kind: str, tokens: Sequence[int], *, parts: bool = False) -> Tensor:
        """What one layer does in a forward; in ``parts``: new tokens and stored ones by verbs of
        their own, merged.
        """
        state, x = self.state, given(kind, tokens)
        if kind == "recurrent":
            return state.linear_attention(layer, x["q"], x["k"], x["v"], log_decay=x["log_decay"], beta=x["beta"])
        if kind == "cross":
            return state.cross_attention(layer, x["q"])[0]
        if kind == "latent":
            k, v = x["rows"][:, None], x["rows"][:, None, :D]
            state.append_mla_kv(layer, x["rows"])
        elif parts:
            k, v = x["k"], x["v"]
            state.append_kv(layer, k, v)
        else:
            return state.attention_with_fused_qkv(layer, torch.cat((x["q"], x["k"], x["v"]), 1))
        if not parts:
            return state.cross_attention(layer, x["q"], scope="all")[0]
        own, past = state.self_attention(layer, x["q"], k, v), state.cross_attention(layer, x["q"])
        out, lse = state.merge(*own, *past)
        wanted = merge(AttentionState(*own), AttentionState(*past))
        assert torch.equal(out, wanted.out)
        assert torch.equal(lse, wanted.lse)
        inplace = state.merge_attn_output_inplace(*own, *past)
        assert torch.equal(inplace[0], out)
        assert inplace[0] is own[0]
        return out

    def check_row(
        self, found: list[Tensor], row: int, tokens: Sequence[int], window: tuple[int, int] | None = None
    ) -> None:
        """One row of every layer is that of the last of these tokens."""
        for kind, out in zip(self.kinds, found, strict=True):
            wanted = expected(kind, tokens, window)
            eps = torch.finfo(torch.float32 if kind == "recurrent" else F64).eps
            # Each of the sums has at most as many terms as tokens and columns.
            bound = 16 * (len(tokens) + R + ENCODED) * eps * max(1.0, float(wanted.abs().max()))
            assert float((out[row] - wanted).abs().max()) <= bound, (kind, row)

    def run(
        self,
        seq_id: int,
        before: Sequence[int],
        tokens: list[int],
        window: tuple[int, int] | None = None,
        *,
        parts: bool = False,
    ) -> list[int]:
        """Run tokens behind those that the sequence holds, check every row, return all tokens."""
        found = self.forward({seq_id: tokens}, parts=parts)
        for row in range(len(tokens)):
            self.check_row(found, row, [*before, *tokens[: row + 1]], window)
        return [*before, *tokens]

    def begun(self) -> list[int]:
        """Sequence 0 with tokens from two forwards."""
        self.add(0)
        return self.run(0, self.run(0, [], [3, 1, 4, 1, 5, 9, 2]), [6, 5, 35])

    def goes_on(self, seq_id: int, tokens: Sequence[int]) -> None:
        """The sequence holds exactly these tokens: what follows is what follows them."""
        assert self.state.sequence_length(seq_id) == len(tokens)
        self.run(seq_id, tokens, [8, 9])
        self.state.check()
