"""The backend ``triton`` against the exact attention of ``test_attention_kernel``: on a GPU, or on
the CPU by Triton's interpreter.

Letters: as there.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.kernels.test_attention_kernel import CHUNKS, DECODES, FEATURES, KINDS, SIZES, Case, Entry, random_entry
from tests.triton_machine import DEVICE, DTYPES, MISSING, CarriedAttention, needs_triton

from quire import LLM, SamplingParams, build
from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.attention import Scoring
from quire.contracts.block_calls import LayerKernels
from quire.contracts.kv_format import PlainRows
from quire.contracts.layers import FullAttention
from quire.kernels import triton_support
from quire.kernels.attention.tiles import ITEM_FIELDS, MERGE_FIELDS, reach_of, sight_of, split_size, tiles_of, work_of
from quire.kernels.attention.triton_attention import Shape, TritonAttention, key_blocks, most_rows, power, settings
from quire.kernels.attention.visibility import sink_part, window_part
from quire.kernels.rows.triton_rows import TritonRows

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")]
CUT = CarriedAttention(least_split=32, programs=1000)
"""Cuts what tiles see into as many items as it can."""
WHOLE = CarriedAttention(least_split=1 << 20)


def check(case: Case, *backends: CarriedAttention, patch: pytest.MonkeyPatch) -> None:
    """Check a case with these backends."""
    from tests.kernels import test_attention_kernel

    for backend in backends:
        patch.setitem(test_attention_kernel.BACKENDS, "triton", lambda backend=backend: backend)
        case.check("triton")


QUICK_FEATURES = [
    pytest.param(feature, dtype, marks=() if usual and (number + turn) % len(DTYPES) == 0 else pytest.mark.slow)
    for number, feature in enumerate(FEATURES)
    # Every third one, and those with learned logits.
    for usual in [number % 3 == 0 or FEATURES[feature][2]]
    for turn, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("feature", "dtype"), QUICK_FEATURES)
def test_each_feature(feature: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, softcap, learned = FEATURES[feature]
    # Fewer entries than there: each program takes the interpreter milliseconds.
    case = Case(
        entries[::3] + entries[1:2],
        sizes=(16, 6),
        page_size=5,
        heads=(1, 2),
        dtype=dtype,
        scoring=Scoring(0.6, softcap),
        learned=learned,
    )
    check(case, CUT, patch=monkeypatch)


@pytest.mark.parametrize("examples", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_random_plans(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(examples):
        rng = random.Random(seed)
        kinds = rng.choice([KINDS, ("chain",), ("chain", "tree", "mask"), ("own", "tree own"), ("past", "tree past")])
        case = Case(
            [random_entry(rng, kinds) for _ in range(rng.randint(1, 3))],
            seed=seed,
            page_size=rng.choice([1, 5, 16]),
            heads=rng.choice([(1, 1), (2, 2), (1, 3)]),
            sizes=rng.choice([*SIZES, (24, 20), (40, 33), (17, 32)]),
            dtype=rng.choice(DTYPES),
            scoring=Scoring(rng.choice([0.3, 1.0]), rng.choice([None, None, 0.7, 5.0])),
            learned=rng.random() < 0.3,
            fragmented=rng.random() < 0.6,
            fresh=rng.random() < 0.7,
        )
        check(case, rng.choice([CUT, WHOLE]), patch=monkeypatch)


LONG = [Entry(kind="chain", past=past, count=count) for past, count in ((100, 1), (70, 9), (0, 40))]


@pytest.mark.parametrize(("heads", "sizes"), [((1, 4), (64, 64)), ((2, 3), (80, 96)), ((1, 24), (16, 16))])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.product(2)
def test_sizes_of_models(
    heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of all sizes; heads that do not divide them; more heads of a KV head than a program
    has rows; keys that are read in two pieces.
    """
    # Long chunks of one size only: each program takes the interpreter milliseconds.
    entries = LONG if heads == (1, 4) else [LONG[0], Entry(kind="chain", past=20, count=5)]
    check(Case(entries, heads=heads, sizes=sizes, dtype=dtype, page_size=16), CUT, WHOLE, patch=monkeypatch)


@pytest.mark.turns(4)
@pytest.mark.parametrize("sizes", [(48, 32), (576, 512)])
@pytest.mark.parametrize("entries", [[Entry(kind="chain", past=70, count=1)] * 2, [*CHUNKS[:1], *DECODES[:1]]])
def test_values_that_are_columns_of_keys(
    sizes: tuple[int, int], entries: list[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention in absorbed form: rows are read once."""
    case = Case(entries, heads=(1, 20), sizes=sizes, dtype=torch.float16, page_size=16, fresh=False)
    case.v_SHD = case.k_SHD[..., : sizes[1]]
    check(case, CUT, patch=monkeypatch)


def test_null_pages_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in front of the pool is NaN: page -1 would be there."""
    case = Case([Entry(kind="mask", past=20, count=3), Entry(kind="mask", past=60, count=18)], page_size=1, fresh=False)
    assert any((table < 0).any() for table in case.plan.tables)
    for name in ("k_SHD", "v_SHD"):
        pool = getattr(case, name)
        setattr(case, name, torch.cat((torch.full_like(pool[:1], torch.nan), pool))[1:])
    check(case, CUT, patch=monkeypatch)


def test_a_row_is_the_same_in_any_batch() -> None:
    """To the bit, where what it sees is cut at the same addresses."""
    entries = [Entry(kind="chain", past=past, count=1) for past in (200, 3, 140)]
    case = Case(entries, heads=(1, 2))
    whole = case.run(CUT)
    for number in range(len(entries)):
        table, keys = case.plan.tables[number], case.plan.keys[number : number + 1]
        alone = replace(
            case.plan, counts=np.ones(1, np.int64), keys=keys, origins=np.zeros(1, np.int64), starts=np.array([0, 1]),
            tables=(table,), positions=keys - 1, rules=(None,),
        )  # fmt: skip
        q = case.q_THD[number : number + 1]
        found = CUT.run(CUT.plan(alone, case.dtype), q, None, PlainRows(case.k_SHD, case.v_SHD), case.scoring)
        assert torch.equal(found[0], whole[number])


def test_tensors_of_another_type_than_planned() -> None:
    case = Case(DECODES)
    prepared = CUT.plan(case.plan, torch.float16)
    with pytest.raises(InvalidArgument, match=r"planned for torch\.float16 on .*; q is torch\.float32"):
        CUT.run(prepared, case.q_THD, case.new, PlainRows(case.k_SHD, case.v_SHD), case.scoring)


def test_other_types_take_pytorchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    check(Case(DECODES, dtype=torch.float64), CUT, patch=monkeypatch)


# -- work ------------------------------------------------------------------------------------------


@pytest.mark.turns(3)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("size", [64, 128])
def test_items_meet_each_key_once(feature: str, size: int) -> None:
    """Every key that a row sees is in one item of its tile; results are written or merged once."""
    case = Case(FEATURES[feature][0] + LONG if "tree" not in feature else FEATURES[feature][0])
    plan, rng = case.plan, random.Random(size)
    parts = [part for part in (window_part(plan), sink_part(plan)) if part is not None]
    most_B = np.array([rng.choice([1, 3, 16]) for _ in plan.tables])
    tiles = tiles_of(plan, most_B)
    sights = [sight_of(plan, part) for part in parts]
    pairs = [(sight, reach_of(plan, tiles, sight)) for sight in sights]
    work = work_of(tiles, pairs, np.arange(plan.num_entries), size, 32, 5)
    written, states = np.zeros(plan.num_tokens, np.int64), np.zeros(work.num_states + 5, np.int64)
    for number, items in enumerate(work.items):
        assert items.shape[1] == len(ITEM_FIELDS)
        met: list[list[int]] = [[] for _ in range(plan.num_tokens)]
        lengths = []
        for values in items.tolist():
            item = dict(zip(ITEM_FIELDS, values, strict=True))
            rows = range(item["row"], item["row"] + item["rows"])
            lengths.append(item["stop"] - item["first"])
            assert 0 < lengths[-1] <= size
            assert item["plain_first"] % 32 == item["plain_stop"] % 32 == 0
            for row in rows:
                met[row] += range(item["first"], item["stop"])
                entry = int(np.searchsorted(plan.starts, row, side="right")) - 1
                assert item["table"] == entry
                seen = case.sight(entry, row - int(plan.starts[entry]))[number]
                assert set(range(item["plain_first"], item["plain_stop"])) <= set(seen)
                if item["state"] < 0:
                    written[row] += 1
                else:
                    states[item["state"] + row - rows[0]] += 1
        assert lengths == sorted(lengths, reverse=True)
        for row, keys in enumerate(met):
            entry = int(np.searchsorted(plan.starts, row, side="right")) - 1
            assert len(keys) == len(set(keys))
            assert set(case.sight(entry, row - int(plan.starts[entry]))[number]) <= set(keys)
    for values in work.merges.tolist():
        merge = dict(zip(MERGE_FIELDS, values, strict=True))
        written[merge["row"]] += 1
        assert merge["count"] != 1
        for index in range(merge["count"]):
            states[merge["state"] + merge["step"] * index] += 1
    assert (written == 1).all()
    assert (states[5:] == 2).all()


def test_sizes_of_items_fill_the_device() -> None:
    assert split_size(keys=1000, heads=8, programs=1000, least=128) == 128
    assert split_size(keys=64 * 8192, heads=8, programs=1056, least=128) == 4096
    assert split_size(keys=100, heads=1, programs=0, least=64) == 128


def test_programs_fit() -> None:
    """Sizes are powers of two that cover all columns, and steps divide the fewest keys of an
    item.
    """
    for size in (1, 5, 16, 24, 64, 80, 96, 128, 192, 256, 576):
        main, rest = key_blocks(size)
        assert main + rest >= size
        assert main < 2 * size or main == 16
        assert main & (main - 1) == rest & (rest - 1) == 0
        for dtype in (torch.float32, torch.bfloat16):
            for rows in most_rows(power(size), dtype):
                assert 64 % settings(rows, size, power(size), dtype).keys == 0


def test_a_forward_is_bound_once_for_layers_of_one_shape() -> None:
    """No layer but the first uploads anything."""
    case = Case(DECODES[:2] + CHUNKS[:1])
    prepared = CUT.plan(case.plan, case.dtype)
    for _ in range(2):
        CUT.run(prepared, case.q_THD, case.new, PlainRows(case.k_SHD, case.v_SHD), case.scoring)
    assert list(prepared.bound) == [Shape(4, 2, 8, 8, True)]


# -- where it runs ---------------------------------------------------------------------------------


def test_what_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = FullAttention(num_heads=2, num_kv_heads=1, head_dim=8, value_dim=8)
    backend = TritonAttention()
    assert backend.refusal(spec, DEVICE) == ""
    assert backend.fuses(spec, DEVICE)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "run on CUDA devices; the state is on cpu" in backend.refusal(spec, torch.device("cpu"))
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "and there is none" in backend.refusal(spec, cuda)
    assert build.layer_kernels(cuda).rows is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "needs the shared memory of compute capability 9 or 10; cuda has 8.9" in backend.refusal(spec, cuda)
    assert build.fastest_attention(cuda) == "torch"
    assert build.layer_kernels(cuda).rows is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert backend.refusal(spec, cuda) == ""
    assert build.fastest_attention(cuda) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "need compute capability 8.0; cuda has 7.5" in backend.refusal(spec, cuda)
    assert build.layer_kernels(cuda).rows is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="Triton kernels run on CUDA devices"):
        LLM("tiny-python", device="cpu", attention_backend="triton", kv_cache_memory="4MiB")
    monkeypatch.setattr(triton_support, "_has_triton", lambda: False)
    assert "need the package triton" in backend.refusal(spec, torch.device("cuda"))


@pytest.mark.slow
def test_a_model_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in chunks and decodes beside it: greedy tokens of the bundled model, by all Triton
    kernels and by PyTorch.
    """
    found = []
    for name, rows in (("torch", None), ("triton", TritonRows())):
        monkeypatch.setattr(build, "layer_kernels", lambda *args, rows=rows: LayerKernels(rows))
        llm = LLM(
            "tiny-python", dtype="float32", attention_backend=name, kv_cache_memory="4MiB",
            max_num_batched_tokens=24, device=DEVICE.type,
        )  # fmt: skip
        outputs = llm.generate([list(range(5, 45)), list(range(9, 20))], SamplingParams(temperature=0, max_tokens=4))
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


# -- compiled ahead --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_programs_compile_for_a_gpu(rare: bool, tmp_path: Path) -> None:
    """For compute capability 9.0: prompts use its matrix units, nothing spills, shared memory
    suffices, and penalties are not fused.
    """
    if problem := compiler_problem():
        pytest.skip(problem)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    lines = subprocess.run(
        [sys.executable, "-m", "tests.kernels.ahead", *["--rare"] * rare], cwd=Path(__file__).parents[2], env=environment,
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert lines.returncode == 0, lines.stderr[-2000:]
    made = [json.loads(line) for line in lines.stdout.splitlines()]
    usual = {"decode", "prompt", "chunk", "latent decode", "rows", "draws", "blocks", "gated delta", "state space"}
    assert {one["case"] for one in made} >= ({"large state space", "columns"} if rare else usual)
    multiply = {("prompt", "attend_items"), ("chunk", "attend_items"), ("gated delta", "weigh_chunks")}
    for one in made:
        assert one["cubin"] > 0
        assert one["shared"] <= 227 * 1024, one
        assert one["stack"] <= (8 if rare else 0), one
        if one["program"] in ("pass_chunks", "read_chunks") or (one["case"], one["program"]) in multiply:
            assert one["wgmma"] > 0, one
        # Numbers of penalties are those of a CPU, each operation rounded, and so are weights.
        assert one["program"] not in ("penalise", "read_rows") or one["fused"] == 0, one
    assert rare or "penalise" in {one["program"] for one in made}


def compiler_problem() -> str:
    if MISSING:
        return MISSING
    import triton

    for tool in ("ptxas", "cuobjdump"):
        try:
            assert Path(getattr(triton.knobs.nvidia, tool).path).is_file()
        except Exception as error:
            return f"Triton has no {tool}: {error}"
    return ""
