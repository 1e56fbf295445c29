"""The rule table as users meet it, cell by cell: what they call on every combination of layers,
devices, text and documents.

Verbs of the KV state are tried in ``tests/kv/test_rules.py``. What works is what transformers
computes, what is refused raises ``Unsupported`` with the table's reason before anything is computed
(``rule_uses``, ``rule_executors``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests import rule_executors, rule_uses
from tests.rule_beds import KINDS, PROMPT, Bed
from tests.small_llms import assert_empty

from quire import LLM
from quire.base.errors import Unsupported
from quire.build import resolve_device
from quire.cli import main as cli
from quire.cli.inspection import rules_page
from quire.contracts.executor import LlmExecutorInterface, ModelExecutor
from quire.contracts.kv_cache import CacheHandle, KVCacheInterface
from quire.kernels.attention.lse_attention import has_lse_kernel
from quire.kv.rule_table import (
    COMBINATIONS,
    DEVICE_ROWS,
    MODELS,
    OTHER_DEVICES,
    STATE_ROWS,
    USE_ROWS,
    combination_of,
    rules_of,
    state_cell,
    tables,
    use_cell,
)
from quire.kv.rule_text import as_text, marked
from quire.nn.packed import can_pack

ROOT = Path(__file__).parents[1]
EXACT = rule_uses.EXACT | rule_executors.EXACT
REFUSED = rule_uses.REFUSED | rule_executors.REFUSED
NAMED = {one.name: one for one in COMBINATIONS}
EXECUTOR_VERBS: dict[str, tuple[str, ...]] = {
    "executor: prefill and decode": ("prefill", "decode", "forward", "step"),
    "executor: batches": ("batch_prefill", "batch_decode"),
    "executor: sample_tokens": ("sample_tokens", "sample_tokens_batch"),
    "executor: truncate_kv": ("truncate_kv",),
    "executor: forward_verify and commit_path": ("forward_verify", "commit_path"),
    "executor: speculative_decode and batch_speculative_decode": ("speculative_decode", "batch_speculative_decode"),
    "executor: select, broadcast and copy": (
        "select_and_copy_from",
        "broadcast_and_copy_from",
        "deep_copy",
        "clone_handle",
    ),
    "executor: serialize and load": ("serialize", "load"),
    "executor: key_cache and value_cache": ("key_cache", "value_cache"),
    "executor: block_table": ("block_table",),
    "executor: clear, resize and release": ("create_kv_cache", "clear", "resize", "release_cache"),
    "executor: cancel": ("cancel",),
    "executor: reports": (
        "capabilities",
        "contains",
        "info",
        "metrics",
        "optimal_batch_size",
        "shutdown",
        "status",
        "supports_batch_size",
        "warmup",
    ),
    "executor: adapters": ("load_lora", "unload_lora"),
}
"""The verbs of the contracts of executors and their caches, by the row that is about them."""


@pytest.fixture(scope="module", params=KINDS)
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    made = Bed.make(NAMED[request.param], tmp_path_factory.mktemp("rules"))
    yield made
    made.llm.close()
    assert_empty(made.llm)


def test_models_are_of_their_combination(bed: Bed) -> None:
    """A loaded model gets the column that it stands for."""
    specs = bed.llm.model.layer_specs
    found = combination_of(specs, len(bed.runner.model.blocks))
    assert set(found.kinds) == set(bed.combination.kinds)
    assert (found.own_rotation, found.every_block_attends) == (
        bed.combination.own_rotation,
        bed.combination.every_block_attends,
    )
    rules = rules_of(found)
    assert rules["uses"] == {use: use_cell(use, bed.combination) for use in USE_ROWS}
    assert rules["state"] == {verb: state_cell(verb, bed.combination) for verb in rules["state"]}


@pytest.mark.turns(2)
@pytest.mark.product(5)
@pytest.mark.parametrize("use", USE_ROWS)
def test_use_cells(bed: Bed, use: str) -> None:
    cell = use_cell(use, bed.combination)
    if cell.works:
        EXACT[use](bed)
    else:
        REFUSED[use](bed, cell.reason)
    bed.state.check()


def test_every_cell_is_tried() -> None:
    assert set(KINDS) == {one.name for one in MODELS}
    cells = {use: [use_cell(use, one) for one in MODELS] for use in USE_ROWS}
    assert set(EXACT) == {use for use, row in cells.items() if any(cell.works for cell in row)}
    assert set(REFUSED) == {use for use, row in cells.items() if not all(cell.works for cell in row)}


def test_every_verb_of_executors_is_in_a_row() -> None:
    """So a new verb cannot be forgotten.

    What kinds of executors there are, and their registry, is no matter of layers.
    """
    verbs = {
        name
        for contract in (LlmExecutorInterface, ModelExecutor, KVCacheInterface, CacheHandle)
        for base in contract.__mro__
        for name, value in vars(base).items()
        if not name.startswith("_") and base.__module__.startswith("quire.") and not isinstance(value, property)
    }
    assert sorted(name for row in EXECUTOR_VERBS.values() for name in row) == sorted({*verbs, "block_table"})
    assert set(EXECUTOR_VERBS) <= set(USE_ROWS)


# -- devices ---------------------------------------------------------------------------------------


def test_devices() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    (reason,) = OTHER_DEVICES.values()
    with pytest.raises(Unsupported) as raised:
        resolve_device("mps")
    assert reason in str(raised.value)
    assert has_lse_kernel(cpu)
    assert not has_lse_kernel(cuda)
    assert not can_pack(torch.bfloat16, cuda)
    assert not can_pack(torch.float32, cpu)
    assert all(cell.works for cells in DEVICE_ROWS.values() for cell in cells), "what differs is speed"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_device_cells(device: str, dtype: str, tmp_path: Path) -> None:
    """Greedy tokens of one device and type are those of a fresh run of them there, after fork,
    rewind, save and load.
    """
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    assert f"weights in {dtype}" in DEVICE_ROWS
    llm = LLM("tiny-python", device=device, dtype=dtype, kv_cache_memory="16MiB", max_model_len=256)
    with llm.session(PROMPT) as session:
        logits = session.logits()
        assert bool(logits.isfinite().all())
        branch = session.fork()
        branch.append([7, 8, 9])
        branch.compute()
        branch.rewind(n=3)
        loaded = llm.session_from_bytes(session.to_bytes())
        for one in (branch, loaded):
            # Sums of other shapes are rounded differently, by a few units of the type.
            bound = 64 * torch.finfo(getattr(torch, dtype)).eps * float(logits.abs().max())
            assert float((one.logits() - logits).abs().max()) <= bound
            one.close()
    llm.close()
    assert_empty(llm)


# -- text ------------------------------------------------------------------------------------------


def test_the_page_is_the_table() -> None:
    """``docs/rules.md`` is what ``quire capabilities --markdown`` prints."""
    assert (ROOT / "docs" / "rules.md").read_text() == rules_page()
    assert "(docs/rules.md)" in (ROOT / "README.md").read_text()


def test_marks_say_every_cell() -> None:
    """From marks and numbered texts every cell can be had back."""
    for rows in tables().values():
        marks, texts = marked(rows)
        for name, cells in rows.items():
            for mark, cell in zip(marks[name], cells.values(), strict=True):
                text = texts[int(mark[1:]) - 1] if mark[1:] else ""
                assert (mark[0] == "+") == cell.works
                assert text == cell.reason or text == cell.note


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_text_fits_the_terminal(width: int) -> None:
    lines = as_text(width).splitlines()
    # Of many columns each has its sign and number, which cannot be less.
    assert max(map(len, lines)) <= max(width, 60)
    for rows in tables().values():
        assert all(any(line.startswith(name) for line in lines) for name in rows)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["quire", "capabilities", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    assert run("--markdown") == (0, rules_page())
    monkeypatch.setenv("COLUMNS", "60")
    assert run("--all") == (0, as_text(60) + "\n")
    code, out = run("--kv-cache-memory", "16MiB")
    assert code == 0
    assert all(name in out for name in USE_ROWS if len(name) < 16)
    code, out = run("--json", "--kv-cache-memory", "16MiB")
    found = json.loads(out)["rules"]
    assert code == 0
    assert found["kinds"] == ["full"]
    for name, rows in (("state", STATE_ROWS), ("uses", USE_ROWS)):
        cells = {row: (state_cell if name == "state" else use_cell)(row, NAMED["full"]) for row in rows}
        assert found[name] == {row: cell.as_json() for row, cell in cells.items()}
    whole = {
        title: {name: {column: cell.as_json() for column, cell in cells.items()} for name, cells in rows.items()}
        for title, rows in tables().items()
    }
    assert found["tables"] == whole
    code, out = run("--json", "--all")
    assert code == 2
    assert "one of them" in out
