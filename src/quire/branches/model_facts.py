"""``ModelFacts``: constants of a model, its KV state and its limits, valid also after shutdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, cast

import torch

from quire.base.config import check_int
from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.layers import KeyValueAttention, LatentAttention, LayerSpec, sink_refusal, window_refusal
from quire.contracts.model import num_blocks
from quire.kv.rule_table import POSITIONS_OF_WINDOWS, position_refusal
from quire.kv.windows import Window
from quire.models.families import LoadedModel
from quire.models.fingerprint import ModelIdentity
from quire.runner.local import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a runner and an executor's configuration, for KV caches and reports."""

    identity: ModelIdentity
    architecture: str
    vocab_size: int
    hidden_size: int
    num_blocks: int
    layer_kinds: tuple[str, ...]
    """The kinds of layers of the model, each once, sorted."""
    num_parameters: int
    parameter_bytes: int
    weight_dtype: torch.dtype
    device: torch.device
    specs: tuple[KeyValueAttention | LatentAttention, ...]
    """Specifications of the layers with attention."""
    layer_ids: tuple[int, ...]
    """Global ids of the layers with attention, ascending."""
    recurrent_ids: tuple[int, ...]
    """Global ids of the recurrent layers."""
    num_ranks: int
    """Number of processes among which the heads are divided."""
    num_stages: int
    """Number of stages among which the layers are divided."""
    page_size: int
    """Tokens of a page."""
    page_bytes: tuple[int, ...]
    """Bytes of a page of each layer class."""
    state_bytes: int
    """Bytes of the states of all recurrent layers at one position."""
    state_interval: int
    """Tokens between recurrent states that are kept automatically; 0: none is."""
    storage_bytes: int
    """Bytes of the K/V pool and of the slots for recurrent states."""
    keeps_last_state: bool
    """Whether a forward can always be undone by popping its tokens."""
    fused: bool
    """Whether some layer uses kernels that never form the attention weights."""
    max_model_len: int
    """Most tokens of a row."""
    chunk_size: int
    """Most tokens of a forward that replays tokens; <= 0: any number."""
    row_window: Window | None
    """The window of tokens that each new row keeps; None: all tokens."""
    is_windowed: bool
    """Whether some layer drops tokens."""
    position_refusal: str
    """Reason why tokens can be at no positions but their indices; empty: they can."""
    adapter_refusal: str
    """Reason why the model can run no adapter; empty: it can."""

    @classmethod
    def of(
        cls,
        runner: Runner,
        identity: ModelIdentity,
        max_model_len: int,
        *,
        window: int | None = None,
        sink: int = 0,
        chunk_size: int = 0,
    ) -> Self:
        """Collect the facts; ``window`` and ``sink`` of rows are as in ``checked_window``."""
        model, state, geometry = cast(LoadedModel, runner.model), runner.state, runner.state.geometry
        kept = checked_window(window, sink, model.layer_specs)
        return cls(
            identity=identity,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            num_blocks=num_blocks(model),
            layer_kinds=tuple(sorted({spec.kind for spec in model.layer_specs})),
            num_parameters=model.num_parameters,
            parameter_bytes=model.parameter_bytes,
            weight_dtype=model.dtype,
            device=state.device,
            specs=geometry.specs,
            layer_ids=geometry.layer_ids,
            recurrent_ids=state.recurrent_ids,
            num_ranks=geometry.num_ranks,
            num_stages=geometry.num_stages,
            page_size=state.page_size,
            page_bytes=geometry.page_bytes,
            state_bytes=geometry.state_bytes,
            state_interval=geometry.interval,
            storage_bytes=state.num_bytes,
            keeps_last_state=geometry.ring > 0 or not state.recurrent_ids,
            fused=len(state.unfused_layers()) < len(geometry.specs),
            max_model_len=max_model_len,
            chunk_size=chunk_size,
            row_window=kept,
            is_windowed=kept is not None or any(one is not None for one in geometry.windows),
            position_refusal=position_refusal(model.layer_specs) or ("" if kept is None else POSITIONS_OF_WINDOWS),
            adapter_refusal=runner.adapters.refusal,
        )

    def spec_of(self, layer: int) -> KeyValueAttention | LatentAttention | None:
        """Return the specification of an attention layer; None for other layers."""
        return self.specs[self.layer_ids.index(layer)] if layer in self.layer_ids else None

    def logits(self, *shape: int) -> torch.Tensor:
        """Return zeros for logits, float32 ``[*shape, V]``."""
        return torch.zeros(*shape, self.vocab_size, device=self.device)


def checked_window(
    window: int | None, sink: int, specs: Sequence[LayerSpec], longest: int | None = None
) -> Window | None:
    """Return a window of the first ``sink`` and the last ``window - sink`` tokens; None: no window.
    ``InvalidArgument`` beyond ``longest`` tokens or for an impossible window; ``Unsupported`` if a
    layer cannot have it."""
    check_int("window", 0 if window is None else window, None)
    check_int("sink", sink, None)
    if window is None:
        if sink != 0:
            raise InvalidArgument(f"sink is {sink} without a window; give a window, or sink=0", field="sink")
        return None
    if not 0 <= sink < window or window > (window if longest is None else longest):
        most = "" if longest is None else f" <= {longest} (the context)"
        raise InvalidArgument(f"window {window} with sink {sink}; 0 <= sink < window{most} is needed", field="window")
    if reason := window_refusal(specs):
        raise Unsupported(f"window {window}: {reason}", field="window")
    if sink and (reason := sink_refusal(specs)):
        raise Unsupported(f"window {window} with sink {sink}: {reason}", field="sink")
    return Window(window, sink)
