"""``State`` is what the contracts promise, and no module beside it uses more than that.

mypy compares the signatures; here every name must be there. Whoever holds a state is typed by the
contract, so mypy refuses what the contract does not have; here the names are looked for in the
text, also where a type is ``Any``.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.sources import forget_sources, tree_of  # noqa: F401

import quire
from quire.contracts.kv_state import AttentionKVCache, ModelState, RNNState
from quire.contracts.layers import CrossAttention, FullAttention, Recurrent, StateTensor
from quire.kv.contract import ContractState
from quire.kv.state import State

ROOT = Path(quire.__file__).parent
OUTSIDE = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("*.py")
    if not path.is_relative_to(ROOT / "kv") and not path.is_relative_to(ROOT / "models")
)
"""All modules but the state's own.

Models may not import ``quire.kv`` at all (``tests/test_imports.py``).
"""
BOOKS = {"recurrent"}
"""Parts of a state: nothing else outside has attributes of these names."""
INTERNAL = {
    "encoders",
    "layer_classes",
    "pages",
    "paged",
    "part",
    "parts",
    "recurrent",
    "sequence_table",
    "sequences",
    "state",
    "state_pass",
    "state_room",
    "recurrent_table",
    "recurrent_states",
    "storage",
}
"""Modules of ``quire.kv`` that hold what a state is made of; plain functions may be imported from
them.
"""
MAKERS = {
    *(("build.py", "State"), ("runner/graph.py", "State"), ("runner/row_dependence.py", "State")),
    *(("runner/ranks.py", "State"), ("runner/ranks.py", "StateParts")),
}
CAPTURED = {
    ("runner/graph.py", "begin_static"),
    ("runner/graph.py", "static_refusal"),
    ("runner/graph.py", "static_forward"),
    ("build.py", "static_refusal"),
    ("runner/row_dependence.py", "parts"),
    ("runner/ranks.py", "parts"),
}
"""Captured steps are made of this package's state only; ``GraphRunner`` refuses others. It is also
asked which kernel reads its rows. So are ranks, which exchange rows by slots."""
"""The one module that may import the class, and makes states."""

if TYPE_CHECKING:

    def is_the_contract(state: State, face: ContractState) -> tuple[ModelState, ModelState, AttentionKVCache, RNNState]:
        return state, face, face, face


def members() -> set[str]:
    return {name for base in ModelState.__mro__ for name in vars(base) if not name.startswith("_")}


def published() -> set[str]:
    kinds = (*AttentionKVCache.__mro__, *RNNState.__mro__)
    return members() | {name for base in kinds for name in vars(base) if not name.startswith("_")}


def test_every_member_of_the_contract_is_there() -> None:
    promised = published()
    annotated = {name for base in ModelState.__mro__ for name in inspect.get_annotations(base)}
    assert {"begin_forward", "linear_attention", "num_needed"} <= promised
    assert "page_size" in annotated
    assert sorted(name for name in promised if not hasattr(ContractState, name)) == []
    assert sorted(name for name in members() if not hasattr(State, name)) == []


@cache
def hidden() -> set[str]:
    """Return the names of a state that the contract does not have."""
    attention = FullAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=2)
    cross = CrossAttention(num_heads=1, num_kv_heads=1, head_dim=2, value_dim=2)
    mixer = Recurrent(states=(StateTensor(shape=(1,), dtype="float32"),))
    state = State([attention, cross, mixer], capacity=1, cross_capacity=1, num_states=1)
    annotated = {name for base in ModelState.__mro__ for name in inspect.get_annotations(base)}
    return {name for name in dir(state) if not name.startswith("__")} - members() - annotated


def reaches(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield what a module outside of ``quire.kv`` takes from behind the contract."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            receiver = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if (module, node.attr) in CAPTURED:
                continue
            if node.attr in BOOKS or (receiver in ("state", "_state", "kv", "_kv") and node.attr in hidden()):
                yield f"{module}:{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quire.kv"):
            part = (node.module or "").removeprefix("quire.kv").removeprefix(".")
            names = [alias.name for alias in node.names]
            taken = [one for one in names if (one in INTERNAL if not part else part in INTERNAL and not one.islower())]
            yield from (
                f"{module}:{node.lineno}: {one} of {node.module}" for one in taken if (module, one) not in MAKERS
            )
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith("quire.kv.")]
            yield from (f"{module}:{node.lineno}: {one}" for one in modules if one.rpartition(".")[2] in INTERNAL)


def test_what_is_hidden() -> None:
    assert hidden() >= {"sequences", "parts", "begin_static", "current_pass", "open_tokens", "_begin"}
    assert not hidden() & {"geometry", "window", "check", "page_size", "begin_forward", "fork_sequence"}
    assert {"runner/local.py", "executor/cache_pool.py", "sessions/state.py", "build.py", "llm.py"} <= set(OUTSIDE)
    assert {path.stem for path in (ROOT / "kv").glob("*.py")} >= INTERNAL


def test_no_module_reaches_behind_the_contract() -> None:
    found = [reach for module in OUTSIDE for reach in reaches(module, tree_of(ROOT / module))]
    assert found == [], "ask the state by a verb of contracts.pool_verbs"


@pytest.mark.parametrize(
    "line",
    [
        "window = engine.runner.state.sequences.get(seq).window",
        "free = [pool.num_free for pool in state.sequences.pools]",
        "part = pool.state.parts",
        "opened = self._state.current_pass",
        "tokens = kv.open_tokens",
        "from quire.kv.state import State",
        "from quire.kv.recurrent_table import RecurrentTable",
        "from quire.kv.sequences import SequenceTable, check_integer",
        "from quire.kv.recurrent_states import NULL",
        "from quire.kv import exchange, state",
        "import quire.kv.recurrent_states",
    ],
)
def test_a_reach_is_found(line: str) -> None:
    assert len(list(reaches("executor/cache_pool.py", ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "length = self.state.sequence_length(seq)",
        "window = state.window(seq)",
        "from quire.kv.sequences import check_integer",
        "from quire.kv import exchange, sequencefile",
        "from quire.kv.windows import Window",
        "from rich.table import Table",
        "state.seq = session.state.seq",
    ],
)
def test_what_is_no_reach(line: str) -> None:
    assert not list(reaches("executor/cache_pool.py", ast.parse(line)))
    assert not list(reaches("build.py", ast.parse("from quire.kv.state import State")))
