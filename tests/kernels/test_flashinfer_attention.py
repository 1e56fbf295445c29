"""The backend ``flashinfer`` against the exact attention of ``test_attention_kernel``: with what
stands for FlashInfer, and with FlashInfer on a GPU where it is installed.
"""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import flashinfer_double
from tests.flashinfer_double import WIDE, doubled
from tests.kernels import test_attention_kernel
from tests.kernels.test_attention_kernel import (
    CHUNKS,
    DECODES,
    FEATURES,
    GROUPS,
    KINDS,
    POOLS,
    Case,
    Entry,
    random_entry,
)
from tests.triton_machine import there
from torch import Tensor

from quire import LLM, SamplingParams, build
from quire.base.config import ATTENTION_CLASSES
from quire.base.errors import InvalidArgument, Unsupported
from quire.contracts.attention import AttentionState, ForwardPlan, Scoring
from quire.contracts.kv_format import PlainRows
from quire.contracts.layers import CrossAttention, FullAttention, LatentAttention, LayerSpec, WindowedAttention
from quire.kernels.attention import flashinfer_attention
from quire.kernels.attention.flashinfer_attention import (
    HEAD_SIZES,
    FlashInferAttention,
    FlashPlan,
    Form,
    flashinfer_problem,
)
from quire.kernels.attention.sdpa import SdpaPlan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
UNCAPPED = [name for name, (_, softcap, _) in FEATURES.items() if softcap is None]


def made(backend: FlashInferAttention) -> list[Any]:
    """Return the wrappers that a backend has made."""
    wrappers: list[Any] = backend._library.BatchPrefillWithPagedKVCacheWrapper.made
    return wrappers


def check(case: Case, backend: FlashInferAttention, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(test_attention_kernel.BACKENDS, "flashinfer", lambda: backend)
    case.check("flashinfer")


# -- numbers ---------------------------------------------------------------------------------------


EACH_FEATURE = [
    pytest.param(feature, dtype, pools, marks=() if quick else pytest.mark.slow)
    for number, feature in enumerate(UNCAPPED)
    for turn, dtype in enumerate(WIDE)
    for pools, quick in (
        (POOLS[number % len(POOLS) :][:1], turn == 0 or (number + turn) % 6 == 0),
        (POOLS, False),
    )
]
"""Each in float32 and a pool, and some in half precision."""


@pytest.mark.parametrize(("feature", "dtype", "pools"), EACH_FEATURE)
def test_each_feature(feature: str, dtype: torch.dtype, pools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entries, _, learned = FEATURES[feature]
    for (key_size, _), page_size, fragmented in pools:
        case = Case(
            entries,
            page_size=page_size,
            sizes=(key_size, key_size),
            dtype=dtype,
            scoring=Scoring(0.6),
            learned=learned,
            fragmented=fragmented,
        )
        check(case, doubled(), monkeypatch)


@pytest.mark.parametrize("examples", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_random_plans(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One backend for all, so that its wrappers are planned again and again."""
    backend, forms = doubled(), set()
    for seed in range(examples):
        rng = random.Random(seed)
        kinds = rng.choice([KINDS, ("chain",), ("chain", "tree", "mask"), ("own", "tree own"), ("past", "tree past")])
        size = rng.choice([8, 5])
        case = Case(
            [random_entry(rng, kinds) for _ in range(rng.randint(1, 5))],
            seed=seed,
            page_size=rng.choice([1, 5, 16]),
            heads=rng.choice(GROUPS),
            sizes=(size, size),
            dtype=rng.choice([torch.float32, *WIDE]),
            scoring=Scoring(rng.choice([0.3, 1.0])),
            learned=rng.random() < 0.3,
            fragmented=rng.random() < 0.6,
            fresh=rng.random() < 0.7,
        )
        check(case, backend, monkeypatch)
    for wrapper in made(backend):
        forms |= {(wrapper.backend, one.page > 1, one.window >= 0, one.causal, one.masked) for one in wrapper.plans}
    assert {paged for _, paged, _, _, _ in forms} == {True, False}
    assert {(windowed, causal) for _, _, windowed, causal, _ in forms} == {(True, True), (False, True), (False, False)}
    assert {masked for _, _, _, _, masked in forms} == {True, False}


def forms_of(*entries: Entry, **options: Any) -> list[list[Form]]:
    """Return the forms of the calls of each part."""
    prepared: FlashPlan = doubled().plan(Case(list(entries), **options).plan, torch.float32)
    return [[call.form for call in part] for part in prepared.parts]


def test_usual_batches_are_one_call_over_whole_pages() -> None:
    decodes, chunks = Form("fa2", 4, -1, True), Form("auto", 4, -1, True)
    assert forms_of(*DECODES) == [[decodes]]
    assert forms_of(*CHUNKS) == [[chunks]]
    assert forms_of(*DECODES, *CHUNKS) == [[decodes, chunks]]
    assert forms_of(*(replace(entry, layer_window=30) for entry in CHUNKS)) == [[chunks, Form("auto", 4, 29, True)]]
    assert forms_of(Entry(kind="past", past=20, count=9)) == [[Form("auto", 4, -1, False)]]
    masks = Form("fa2", 1, -1, False)
    assert forms_of(Entry(kind="tree", past=20, count=7), *DECODES) == [[masks, decodes]]
    # What begins inside of a page, and all where rows behind a sink may hold NaN.
    assert forms_of(Entry(kind="chain", past=30, count=1, layer_window=6)) == [[Form("fa2", 1, -1, True)]]
    assert forms_of(Entry(kind="chain", past=30, count=1, layer_window=7)) == [[decodes]]
    sunk = Entry(kind="chain", past=30, count=6, window=9, sink=3)
    assert forms_of(sunk) == [[Form("auto", 1, 5, True)], [Form("auto", 1, -1, False)]]


def test_a_batch_in_order_is_written_in_place() -> None:
    """Neither queries nor results of usual batches are copied."""
    case, backend = Case(DECODES), doubled()
    prepared: FlashPlan = backend.plan(case.plan, case.dtype)
    assert prepared.parts[0][0].rows is None
    given = []
    wrapper = backend._library.BatchPrefillWithPagedKVCacheWrapper
    run = wrapper.run

    def seen(self: Any, q: Tensor, pool: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        given.extend([q, *pool, kwargs["out"]])
        return run(self, q, pool, **kwargs)

    wrapper.run = seen
    out = backend.run(prepared, case.q_THD, case.new, PlainRows(case.k_SHD, case.v_SHD), case.scoring)
    own = (case.q_THD, case.k_SHD, case.v_SHD, out)
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in own]


def test_a_pool_with_a_slot_for_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([*DECODES, *CHUNKS])
    case.k_SHD, case.v_SHD = (torch.cat((x, x[:1])) for x in (case.k_SHD, case.v_SHD))
    check(case, doubled(), monkeypatch)


@pytest.mark.parametrize(
    ("entry", "page_size"),
    [
        # The window begins in the sink's page.
        (Entry(kind="chain", past=4, count=1, window=3, sink=1), 8),
        (Entry(kind="chain", past=3, count=2, window=3, sink=1), 8),
        # The page is the sink's alone.
        (Entry(kind="chain", past=30, count=1, window=8, sink=3), 4),
        (Entry(kind="tree", past=30, count=5, window=8, sink=3), 4),
    ],
)
def test_rows_behind_a_sink_are_not_read(entry: Entry, page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([entry], page_size=page_size)
    hidden = int(case.plan.tables[0][0]) * page_size + entry.sink
    case.k_SHD[hidden] = case.v_SHD[hidden] = torch.nan
    check(case, doubled(), monkeypatch)


# -- wrappers --------------------------------------------------------------------------------------


def test_layers_of_one_shape_are_planned_once_and_wrappers_return() -> None:
    backend = doubled()
    for _ in range(3):
        case = Case([*DECODES, *CHUNKS])
        prepared, other = (backend.plan(case.plan, case.dtype) for _ in range(2))
        for one in (prepared, other, prepared, other):
            backend.run(one, case.q_THD, case.new, PlainRows(case.k_SHD, case.v_SHD), case.scoring)
        del prepared, other, one
    # Two calls, of decodes and of chunks, of two plans that live at a time.
    assert len(made(backend)) == 4
    assert [len(wrapper.plans) for wrapper in made(backend)] == [3] * 4


def test_a_shape_has_wrappers_of_its_own() -> None:
    """A wrapper keeps the kernels of its first plan."""
    backend = FlashInferAttention(library=flashinfer_double.library())
    for size in (64, 128):
        case = Case(CHUNKS, sizes=(size, size), dtype=torch.bfloat16)
        case.run(backend)
    assert [wrapper.backend for wrapper in made(backend)] == ["fa3", "fa3"]


# -- what is refused -------------------------------------------------------------------------------


def test_other_types_take_pytorchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float64):
        case, backend = Case(DECODES, dtype=dtype), FlashInferAttention(library=flashinfer_double.library())
        assert isinstance(backend.plan(case.plan, dtype), SdpaPlan)
        check(case, backend, monkeypatch)


def test_tensors_of_another_type_than_planned() -> None:
    case, backend = Case(DECODES), doubled()
    prepared = backend.plan(case.plan, torch.float16)
    with pytest.raises(InvalidArgument, match=r"planned for torch\.float16 on cpu; a tensor is torch\.float32 on cpu"):
        backend.run(prepared, case.q_THD, case.new, PlainRows(case.k_SHD, case.v_SHD), case.scoring)


def test_scores_are_not_capped_by_an_approximate_tanh() -> None:
    case, backend = Case(DECODES, scoring=Scoring(0.6, 2.0)), doubled()
    for run in (case.run, case.run_state):
        with pytest.raises(Unsupported, match="by an approximate tanh"):
            run(backend)


def test_more_bits_than_int32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attention, "MOST_BITS", 20)
    case = Case([Entry(kind="tree", past=20, count=3)])
    with pytest.raises(Unsupported, match=r"bits of masks in int32; these are 69"):
        case.run(doubled())


def test_what_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FlashInferAttention()
    spec = FullAttention(num_heads=4, num_kv_heads=2, head_dim=128, value_dim=128)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: None)
    assert "need the package flashinfer-python, which is not installed" in backend.refusal(spec, CUDA)
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: name)
    assert "FlashInfer kernels run on CUDA devices; the state is on cpu" in backend.refusal(spec, CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "FlashInfer kernels need compute capability 8.0; cuda has 7.5" in backend.refusal(spec, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "cannot be imported" in backend.refusal(spec, CUDA)
    double = flashinfer_double.library()
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    for version in ("0.6.16.post3", "0.7.2rc1", "0.0.0+unknown"):
        monkeypatch.setattr(double, "__version__", version)
        assert f"need release 0.7.2; {version} is installed" in backend.refusal(spec, CUDA)
    for version in ("0.7.2", "0.7.2.post1+cu130", "1.0"):
        monkeypatch.setattr(double, "__version__", version)
        assert backend.refusal(spec, CUDA) == ""


SIZES: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2}
REFUSED: list[tuple[LayerSpec, str]] = [
    (FullAttention(**SIZES, head_dim=64, value_dim=64, softcap=30.0), "by an approximate tanh"),
    (WindowedAttention(**SIZES, head_dim=96, value_dim=96, window=8), "64, 128, 256 columns; K has 96, V has 96"),
    (FullAttention(**SIZES, head_dim=576, value_dim=512), "64, 128, 256 columns; K has 576, V has 512"),
    (FullAttention(**SIZES, head_dim=128, value_dim=64), "64, 128, 256 columns; K has 128, V has 64"),
    (LatentAttention(num_heads=2, row_dim=128, value_dim=64), "no layers of kind 'latent'"),
    (CrossAttention(**SIZES, head_dim=64, value_dim=64), "no layers of kind 'cross'"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED)
def test_kinds_of_layers(spec: LayerSpec, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_attention, "flashinfer_problem", lambda device: "")
    backend = FlashInferAttention()
    assert reason in backend.refusal(spec, CUDA)
    for size in HEAD_SIZES:
        sizes = {**SIZES, "head_dim": size, "value_dim": size}
        assert backend.refusal(FullAttention(**sizes, sinks=(0.5, 1.0, 0.0, 2.0)), CUDA) == ""
        assert backend.refusal(WindowedAttention(**sizes, window=3), CUDA) == ""
        assert backend.fuses(FullAttention(**sizes), CUDA)


# -- in an engine ----------------------------------------------------------------------------------


def test_it_is_chosen_by_its_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "flashinfer" in ATTENTION_CLASSES
    monkeypatch.setattr(flashinfer_attention, "flashinfer_problem", lambda device: "")
    for problem, taken in (("", "triton"), ("missing", "torch")):
        monkeypatch.setattr(build, "attention_problem", lambda device, problem=problem: problem)
        assert build.fastest_attention(CUDA) == taken
    monkeypatch.undo()
    with pytest.raises(Unsupported, match="FlashInfer kernels"):
        LLM("tiny-python", device="cpu", attention_backend="flashinfer", kv_cache_memory="4MiB")


def test_a_model_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill in chunks and decodes beside it, and wrappers that return after each forward."""
    double = flashinfer_double.library(WIDE, sizes=None)
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(FlashInferAttention, "refusal", lambda *args: "")
    monkeypatch.setattr(FlashInferAttention.__init__, "__kwdefaults__", {"library": None, "dtypes": WIDE})
    found = []
    for name in ("torch", "flashinfer"):
        options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "max_num_batched_tokens": 24}
        with LLM("tiny-python", device="cpu", attention_backend=name, **options) as llm:
            gc.disable()
            try:
                outputs = llm.generate(
                    [list(range(5, 45)), list(range(9, 20))], SamplingParams(temperature=0, max_tokens=12)
                )
            finally:
                gc.enable()
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    wrappers = double.BatchPrefillWithPagedKVCacheWrapper.made
    assert sum(len(wrapper.plans) for wrapper in wrappers) > 12
    assert len(wrappers) <= 4


# -- FlashInfer itself -----------------------------------------------------------------------------


class CarriedFlashInfer(FlashInferAttention):
    """The backend for tests whose tensors are on the CPU."""

    def plan(self, plan: ForwardPlan, dtype: torch.dtype) -> Any:
        return super().plan(replace(plan, device=CUDA), dtype)

    def run(self, prepared: Any, *args: Any, **kwargs: Any) -> Tensor:
        return super().run(prepared, *map(there, args), **{name: there(x) for name, x in kwargs.items()}).cpu()

    def run_state(self, prepared: Any, *args: Any, **kwargs: Any) -> AttentionState:
        found = super().run_state(prepared, *map(there, args), **{name: there(x) for name, x in kwargs.items()})
        return AttentionState(found.out.cpu(), found.lse.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 128), *((torch.bfloat16, size) for size in HEAD_SIZES)],
)
@pytest.mark.parametrize("feature", UNCAPPED)
def test_flashinfer_itself(feature: str, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem := flashinfer_problem(CUDA):
        pytest.skip(problem)
    entries, _, learned = FEATURES[feature]
    long = [] if "tree" in feature else [replace(entries[0], past=300)]
    case = Case(
        [*entries, *long], page_size=16, heads=(2, 4), sizes=(size, size), dtype=dtype, scoring=Scoring(size**-0.5),
        learned=learned,
    )  # fmt: skip
    assert isinstance(CarriedFlashInfer().plan(case.plan, dtype), FlashPlan)
    check(case, CarriedFlashInfer(), monkeypatch)
