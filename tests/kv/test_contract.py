"""``State`` is what the contracts promise: mypy compares the signatures, and every name is there."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from quire.contracts.kv_state import ModelState
from quire.kv.state import State

if TYPE_CHECKING:

    def is_the_contract(state: State) -> ModelState:
        return state


def test_every_member_of_the_contract_is_there() -> None:
    promised = {name for base in ModelState.__mro__ for name in vars(base) if not name.startswith("_")}
    annotated = {name for base in ModelState.__mro__ for name in inspect.get_annotations(base)}
    assert {"begin_forward", "linear_attention", "num_needed"} <= promised
    assert "page_size" in annotated
    missing = sorted(name for name in promised if not hasattr(State, name))
    assert not missing
