"""The recurrent verbs of the contract (``contracts.recurrent_state``): checks, padding, ``out=``.

Letters: B entries of the batch; T new tokens, N >= T rows of a padded tensor; Hq query heads, H
heads of a state; K, V sizes of keys and values.
"""

from __future__ import annotations

from torch import Tensor

from quire.contracts.layers import StateTensor
from quire.errors import FailedPrecondition, InvalidArgument, Unsupported
from quire.kv.recurrent import dtype_of
from quire.kv.rules import refuse_layer
from quire.kv.sequences import check_integer
from quire.kv.state_pass import OpenState
from quire.kv.storage import check_tensor
from quire.kv.tensor_checks import check_out, padded
from quire.signatures import checks_arguments
from quire.types import SeqId


@checks_arguments()
class StateRecurrence(OpenState):
    """The recurrent verbs of a state. The contract's docstrings are not repeated here."""

    def get(self, layer_id: int, state_id: int, *, per_token: bool = False, out: Tensor | None = None) -> Tensor:
        one = state_tensor(self, layer_id, state_id, "get")
        opened = self.open_pass().recurrent("get")
        self.open_pass().require_open(layer_id)
        rows = self.open_tokens if per_token else len(opened.plan.starts) - 1
        if out is not None:
            check_tensor("get: out", out, dtype_of(one), (rows, *one.shape), self.device)
        found = opened.get(layer_id, state_id, per_token=per_token)
        return found if out is None else out.copy_(found)

    def set(self, layer_id: int, state_id: int, data: Tensor, *, per_token: bool = False) -> None:
        state_tensor(self, layer_id, state_id, "set")
        self.open_pass().recurrent("set").set(layer_id, state_id, data, per_token=per_token)

    def linear_attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sm_scale: float = 1.0,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        verb = "linear_attention"
        one = state_tensor(self, layer_id, 0, verb)
        if len(one.shape) != 3 or one.dtype != "float32":
            raise Unsupported(
                f"{verb}: state 0 of layer {layer_id} is {one.dtype} {one.shape}; float32 [heads, Dk, Dv] is needed"
            )
        heads, key_dim, value_dim = one.shape
        tokens = self.open_tokens
        if q.dim() != 3 or q.shape[2] != key_dim or q.shape[1] < 1 or q.shape[1] % heads or q.shape[0] < tokens:
            raise InvalidArgument(
                f"{verb}: q has shape {tuple(q.shape)}; at least {tokens} rows of [a multiple of {heads}, {key_dim}] are needed"
            )
        rows = q.shape[0]
        wanted: list[tuple[str, Tensor | None, list[tuple[int, ...]]]] = [
            ("k", k, [(rows, heads, key_dim)]),
            ("v", v, [(rows, heads, value_dim)]),
            ("log_decay", log_decay, [(rows, heads), (rows, heads, key_dim)]),
            ("beta", beta, [(rows, heads)]),
        ]
        given = {"q": q}
        for name, tensor, shapes in wanted:
            if tensor is None:
                continue
            if tuple(tensor.shape) not in shapes:
                raise InvalidArgument(
                    f"{verb}: {name} has shape {tuple(tensor.shape)}; {' or '.join(map(str, shapes))} is needed"
                )
            given[name] = tensor
        for name, tensor in given.items():
            if not tensor.is_floating_point() or tensor.device.type != self.device.type:
                raise InvalidArgument(
                    f"{verb}: {name} is {tensor.dtype} on {tensor.device}; floats on {self.device} are needed"
                )
        if not q.dtype == k.dtype == v.dtype:
            raise InvalidArgument(f"{verb}: q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; the same is needed")
        if log_decay is not None and bool((log_decay[:tokens] > 0).any()):
            raise InvalidArgument(f"{verb}: log_decay holds a number above 0; a decay is at most 1")
        if out is not None:
            for tensor in given.values():
                check_out(out, (rows, q.shape[1], value_dim), q.dtype, tensor)
        found = self.open_pass().linear_attention(
            layer_id,
            0,
            q[:tokens],
            k[:tokens],
            v[:tokens],
            scale=sm_scale,
            log_decay=None if log_decay is None else log_decay[:tokens],
            beta_TH=None if beta is None else beta[:tokens],
        )
        return padded(found, rows, 0.0, out)

    def debug_get(self, layer_id: int, state_id: int, seq_id: SeqId, *, position: int | None = None) -> Tensor:
        if position is not None:
            position = check_integer(position, "debug_get: position", 0)
        state_tensor(self, layer_id, state_id, "debug_get", seq_id)
        self.table.require_ready(seq_id, self.table.get(seq_id), "debug_get")
        part = self.recurrent_part("debug_get")
        if position is not None and part.table.slot_at(seq_id, position) is None:
            raise FailedPrecondition(
                f"debug_get: no state of sequence {seq_id} is kept at {position}; there are {self.kept_positions(seq_id)}"
            )
        return part.debug_get(layer_id, state_id, seq_id, position)

    def debug_set(self, layer_id: int, state_id: int, seq_id: SeqId, data: Tensor) -> None:
        one = state_tensor(self, layer_id, state_id, "debug_set", seq_id)
        if tuple(data.shape) != one.shape or data.dtype != dtype_of(one):
            raise InvalidArgument(
                f"debug_set: data is {data.dtype} {tuple(data.shape)}; {dtype_of(one)} {one.shape} is needed"
            )
        self.table.require_settled(seq_id, "debug_set")
        self.recurrent_part("debug_set").debug_set(layer_id, state_id, seq_id, data.to(self.device))

    def checkpoint(self, seq_id: SeqId) -> None:
        part = self.recurrent_part("checkpoint")
        self.table.require_settled(seq_id, "checkpoint")
        part.table.keep(seq_id)

    def drop_checkpoint(self, seq_id: SeqId, position: int) -> None:
        table = self.recurrent_part("drop_checkpoint").table
        position = check_integer(position, "drop_checkpoint: position", 0)
        if seq_id in self.table and position not in table.kept(seq_id):
            raise InvalidArgument(
                f"drop_checkpoint: no checkpoint of sequence {seq_id} at {position}; there are {table.kept(seq_id)}"
            )
        self.table.require_settled(seq_id, "drop_checkpoint")
        table.drop(seq_id, position)


def state_tensor(state: OpenState, layer_id: int, state_id: int, verb: str, seq_id: SeqId | None = None) -> StateTensor:
    """Return a state tensor of a recurrent layer. ``seq_id``: ``NotFound``, if unknown, first."""
    state_id = check_integer(state_id, f"{verb}: state", 0)
    part = state.recurrent_part(verb)
    if layer_id not in part.layer_ids:
        kind = state.spec(layer_id).kind  # InvalidArgument for an unknown one
        if seq_id is not None:
            state.table.get(seq_id)
        refuse_layer(verb, layer_id, kind)
    spec = part.specs[part.layer(layer_id)]
    if state_id >= len(spec.states):
        raise InvalidArgument(f"{verb}: layer {layer_id} has states 0..{len(spec.states) - 1}, got {state_id}")
    return spec.states[state_id]
