"""Imports inside of ``quire`` point down only, what runs without torch imports none, and ``import
quire`` is quick.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import pytest
from tests.sources import forget_sources, text_of, tree_of  # noqa: F401

import quire

ROOT = Path(quire.__file__).parent
LAYERS = (
    {"base"},
    {"contracts"},
    {"channels"},
    {"ops"},
    {"weights"},
    {"sampling"},
    {"text"},
    {"grammars"},
    {"statefile"},
    {"kernels", "kv", "nn"},
    {"store"},
    {"blend"},
    {"models"},
    {"adapters"},
    {"runner"},
    {"branches"},
    {"speculation"},
    {"executor"},
    {"engine"},
    {"sessions"},
    {"build"},
    {"rank_process"},
    {"llm"},
    {"async_llm"},
    {"server"},
    {"cluster"},
    {"cli"},
)
"""From the bottom up: a part may import itself and what lies below it."""
APART = {"kernels", "kv", "nn"}
"""Parts of one layer that do not know each other."""
STRANGERS = {("models", "kv")}
"""A model sees a pass, never the state behind it."""
WITHOUT_TORCH = (
    "blend.selection",
    "kv.pages",
    "kv.sequences",
    "kv.sequence_table",
    "kv.imports",
    "kv.recurrent_states",
    "kv.recurrent_table",
    "branches.branch",
    "engine.scheduler",
    "speculation.proposers.lookup",
    "speculation.controller",
    "branches.prefix_cache",
    "engine.pins",
    "grammars.trial",
    "engine.page_use",
    "engine.timeline",
    "cluster.front",
)
INSPECTED = (
    "quire.cli.main",
    "quire.cli.state",
    "quire.llm",
    "quire.server.http.app",
    "quire.sessions.display",
    "quire.sessions.layer_views",
    "quire.sessions.session",
    "quire.sessions.views",
)
"""Modules of verbs that show something."""
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}
PATHS = {".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in PATHS.items()}


@cache
def imports(module: str) -> dict[str, bool]:
    """Names of modules that a module imports, wherever it does so: whether it happens when the
    module is loaded.
    """
    found: dict[str, bool] = {}

    def visit(node: ast.AST, loaded: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        for name in names:
            found[name] = found.get(name, False) or loaded
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        # Imports are statements, which stand in no expression.
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            skipped = typing_only and block == "body"
            for child in getattr(node, block, ()):
                visit(child, loaded and not lazy and not skipped)

    visit(tree_of(MODULES[module]), True)
    return found


def test_there_are_modules_to_check() -> None:
    assert len(MODULES) > 40
    assert {"quire", "quire.kv.state", "quire.kernels.attention.sdpa", "quire.contracts.layers"} <= set(MODULES)
    assert "quire.kv.import_verbs" in imports("quire.kv.state")
    assert imports("quire.contracts.kv_state")["quire.contracts.model"] is False


def below(part: str, other: str) -> bool:
    """Whether ``part`` may import ``other``."""
    for name in (part, other):
        assert name in LEVELS, f"give {name!r} a place in LAYERS"
    same_level = LEVELS[other] == LEVELS[part] and not {part, other} & APART
    return (part, other) not in STRANGERS and (other == part or LEVELS[other] < LEVELS[part] or same_level)


def test_imports_point_down() -> None:
    found = []
    for module in sorted(set(MODULES) - {"quire", "quire.__main__"}):
        part = module.split(".")[1]
        for name in imports(module):
            if name == "quire" and part != "cli":
                found.append(f"{module} imports the package itself")
            if name.startswith("quire.") and not below(part, name.split(".")[1]):
                found.append(f"{module} imports {name}, which is not below it")
    assert found == []


def users_of(package: str) -> dict[str, bool]:
    """Return the modules that import a package, and whether they do so when they are loaded."""
    found: dict[str, bool] = {}
    for module in MODULES:
        for name, loaded in imports(module).items():
            if name.partition(".")[0] == package:
                found[module] = found.get(module, False) or loaded
    return found


def test_only_the_command_line_measures_and_only_when_it_is_asked_to() -> None:
    """``quire_bench`` stands over ``quire``, which works without it."""
    assert users_of("quire_bench") == {"quire.cli.bench": False}


def test_the_inspector_is_imported_where_a_user_asks_for_it() -> None:
    """``quire_inspector`` stands over ``quire``: only functions import it, at the doors."""
    assert users_of("quire_inspector") == dict.fromkeys(INSPECTED, False)


def test_engine_and_executor_meet_in_branches() -> None:
    """An annotation aside, as of what ``Session.as_cache`` returns."""
    pairs = [(module, name) for module in MODULES for name, loaded in imports(module).items() if loaded]
    parts = {(module.split(".")[1], name.split(".")[1]) for module, name in pairs if "." in module and "." in name}
    assert {("engine", "branches"), ("executor", "branches")} <= parts
    assert (
        not {("engine", "executor"), ("executor", "engine"), ("branches", "engine"), ("branches", "executor")} & parts
    )


def test_the_rule_can_fail() -> None:
    assert below("kv", "ops")
    assert below("kv", "kv")
    assert below("engine", "branches")
    assert not below("kv", "kernels")
    assert not below("models", "kv")
    assert not below("ops", "kv")
    assert not below("engine", "llm")


def circles(graph: Mapping[str, Collection[str]]) -> list[set[str]]:
    """Return the sets of two or more names each of which reaches all others of its set."""

    def reached(start: str) -> set[str]:
        found, waiting = set[str](), [start]
        while waiting:
            fresh = set(graph[waiting.pop()]) - found
            found |= fresh
            waiting += fresh
        return found

    reach = {name: reached(name) for name in graph}
    found: list[set[str]] = []
    for name in sorted(graph):
        if not any(name in one for one in found):
            found.append({name} | {other for other in reach[name] if name in reach[other]})
    return [one for one in found if len(one) > 1]


def test_no_imports_form_a_circle() -> None:
    """Wherever they stand: inside of functions and for type checkers, too."""
    graph = {module: (imports(module).keys() & MODULES.keys()) - {module} for module in MODULES}
    found = [{name.removeprefix("quire.") for name in circle} for circle in circles(graph)]
    assert not found, "move what both need down, or type a parameter by a Protocol that lies below"


def test_a_circle_is_found() -> None:
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["a"]}
    assert circles(graph) == [{"a", "b", "c"}, {"d", "e"}]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_bookkeeping_imports_no_torch(name: str) -> None:
    waiting, seen = [f"quire.{name}"], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen or module not in MODULES:
            continue
        seen.add(module)
        parents = module.split(".")
        waiting += [".".join(parents[:length]) for length in range(1, len(parents))]
        for imported, loaded in imports(module).items():
            assert not loaded or imported.split(".")[0] != "torch", f"{name} imports torch by {module}"
            if loaded:
                waiting.append(imported)
    assert f"quire.{name}" in seen
    assert "quire.base.openmp" in seen


def loaded_by(statement: str) -> set[str]:
    """Top names of the modules that a fresh interpreter has loaded after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(result.stdout))


def test_import_of_the_package_is_quick() -> None:
    loaded = loaded_by("import quire")
    assert "quire" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "tokenizers", "huggingface_hub"}


def test_commands_and_models_import_no_more_than_they_need() -> None:
    """``quire --help`` computes nothing and waits for nothing; a model draws no tables."""
    loaded = loaded_by("import quire.cli.main")
    assert "quire" in loaded
    assert not loaded & {"torch", "numpy", "asyncio", "rich", "jinja2", "tokenizers", "fastapi", "pydantic"}
    loaded = loaded_by("from quire import LLM")
    assert "torch" in loaded
    assert not loaded & {"rich", "transformers", "fastapi", "pydantic", "prometheus_client", "matplotlib", "redis"}


def test_every_public_name_is_there() -> None:
    assert {"AsyncSession", "SampleDelta", "AsyncLLM", "Session"} <= set(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name


def test_what_breaks_below_a_public_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken package that torch imports is not "cannot import name"."""

    def broken(name: str) -> None:
        raise AttributeError(f"{name}: partially initialized module 'torch' has no attribute 'version'")

    monkeypatch.setattr(quire, "import_module", broken)
    with pytest.raises(ImportError, match=r"quire.llm cannot be imported: .* no attribute 'version'"):
        from quire import LLM  # noqa: F401


def test_bookkeeping_runs_without_torch() -> None:
    loaded = loaded_by("import " + ", ".join(f"quire.{name}" for name in WITHOUT_TORCH))
    assert "quire" in loaded
    assert not loaded & {"torch", "transformers"}


def test_awaited_verbs_use_no_private_of_what_they_wrap() -> None:
    """Of their own objects they do: names that the package itself gives to ``self``."""
    trees = [tree_of(path) for name, path in MODULES.items() if name.startswith("quire.async_llm")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}
    own |= {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    private = {node.attr for node in nodes if node.attr.startswith("_") and node.attr[-2:] != "__"}
    assert "_session" in private
    assert private <= own


def slices(sources: Mapping[str, ast.Module]) -> list[str]:
    """Return the base classes whose only heir stands in another module, and that are no values by
    themselves: parts of one object that was cut into files. ``sources``: trees by module."""
    homes: dict[str, str] = {}
    heirs: dict[str, list[str]] = {}
    used = set[str]()
    for module, tree in sources.items():
        skipped = set[ast.AST]()
        for node in ast.walk(tree):
            parts: list[ast.AST | None] = [getattr(node, name, None) for name in ("annotation", "returns")]
            if isinstance(node, ast.ClassDef):
                bases = [one.value if isinstance(one, ast.Subscript) else one for one in node.bases]
                names = [ast.unparse(one).rpartition(".")[2] for one in bases]
                if "Protocol" not in names:
                    homes[node.name] = module
                for name in names:
                    heirs.setdefault(name, []).append(module)
                parts += node.bases
            skipped.update(inner for part in parts if part is not None for inner in ast.walk(part))
        used |= {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and one not in skipped}
    return [
        name
        for name, module in homes.items()
        if len(found := heirs.get(name, [])) == 1 and found[0] != module and name not in used
    ]


def test_no_object_is_cut_into_base_classes() -> None:
    """Values of the contract aside, which rooms may extend."""
    rooms = {name: path for name, path in MODULES.items() if not name.startswith("quire.contracts")}
    assert slices({name: tree_of(path) for name, path in rooms.items()}) == []


def test_a_slice_is_found() -> None:
    def found(**sources: str) -> list[str]:
        return slices({name: ast.parse(text) for name, text in sources.items()})

    part, whole = "class Part:\n    pass\n", "from a import Part\nclass Whole(Part):\n    pass\n"
    assert found(a=part, b=whole) == ["Part"]
    assert found(a=part, b=f"{whole}Part()\n") == []
    assert found(a=part, b=whole, c=whole.replace("Whole", "Other")) == []
    assert found(a=part + whole) == []
