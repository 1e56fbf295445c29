"""The state under test, as callers outside of Quire hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.contracts.layers import LayerSpec
from quire.kv.contract import ContractState
from quire.kv.state import State


def contract(specs: Sequence[LayerSpec], **options: Any) -> ContractState:
    """Return the contract's face of a new state."""
    return ContractState(State(specs, **options))
