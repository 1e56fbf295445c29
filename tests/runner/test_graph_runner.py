"""``GraphRunner``: captured steps give what the plain path gives, and what is not for them takes
that path. Kernels are Triton's, run by its interpreter; captured work is ``captured_work``'s.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.captured_work import FrozenWork
from tests.engine.test_memory_profile import MadeUpMemory
from tests.models import conftest as dense
from tests.models import test_deepseek, test_moe_families, test_recurrent_families
from tests.triton_machine import INTERPRETED, needs_triton

from quire import SamplingParams, build
from quire.base.config import EngineConfig
from quire.base.errors import InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.base.types import Add, Chunk, Commit, Edit, Fork, Inputs, Pop, Remove, SetWindow, Step, TokenTree
from quire.contracts.layers import Recurrent
from quire.engine.assembly import make_engine
from quire.engine.step_builder import Limits
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.attention.triton_attention import TritonAttention
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kernels.recurrence.triton_recurrence import TritonRecurrence
from quire.kernels.rows.triton_rows import TritonRows
from quire.kv.formats.plain import PlainFormat
from quire.kv.recurrent import RecurrentStorage
from quire.kv.state import State
from quire.models.loading import load_model
from quire.nn.packed import LayerKernels
from quire.runner import graph
from quire.runner.graph import GraphRunner
from quire.runner.local import LocalRunner

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="captured work is real on a GPU")]
LONGEST, PAGE, VOCAB = 100, 4, 97
FAMILIES: dict[str, Any] = {
    "llama-gqa": dense,
    "qwen2-windows": dense,
    "youtu": test_deepseek,
    "falcon-h1": test_recurrent_families,
    "mamba2": test_recurrent_families,
}
"""Full attention, windows beside it, latent rows, a hybrid, recurrent layers alone."""
NARROWER = {
    "llama-gqa": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mamba2": {"num_hidden_layers": 1},
    "falcon-h1": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
}
"""Where a test needs no more: Triton's interpreter takes milliseconds for each program."""
TWO = ["llama-gqa", pytest.param("falcon-h1", marks=pytest.mark.slow)]


class Pair:
    """The same model behind a ``GraphRunner`` and on the plain path, which get the same steps."""

    def __init__(
        self,
        path: Path,
        *,
        padding: bool = True,
        backend: Any = None,
        recurrence: Any = None,
        rows: Any = None,
        **options: Any,
    ) -> None:
        self.model = load_model(path, dtype="float32", kernels=LayerKernels(rows))
        specs = self.model.layer_specs
        recurrent = sum(isinstance(spec, Recurrent) for spec in specs)

        def made() -> LocalRunner:
            state = State(
                specs,
                capacity=1024 if recurrent < len(specs) else None,
                num_states=96 if recurrent else None,
                page_size=PAGE,
                # Items of 32 keys, so that most sequences are cut.
                backend=TritonAttention(least_split=32, programs=8) if backend is None else backend,
                recurrence=TritonRecurrence() if recurrence is None else recurrence,
                rows=rows,
                padding=padding,
            )
            return LocalRunner(self.model, state, torch.device("cpu"))

        self.work, self.plain = FrozenWork(), made()
        self.runner = GraphRunner(made(), self.work, longest=LONGEST, **options)
        self.captured = 0

    def new_seq(self) -> int:
        self.plain.new_seq()
        return self.runner.new_seq()

    def run(self, *chunks: Chunk, edits: Sequence[Edit] = (), **inputs: Any) -> bool:
        """Run a step on both, and compare. Return whether it was captured.

        Without padding all sums are the same. With it, products may add up in another order: the
        errors of a layer's sums grow like the root of their length, and those of layers add up."""
        step = Step(edits=tuple(edits), chunks=chunks, inputs=Inputs(**inputs))
        found, expected = self.runner.execute(step), self.plain.execute(step)
        assert found.starts == expected.starts
        size = math.sqrt(self.model.config["intermediate_size"]) * 2 * len(self.model.layer_specs)
        if expected.logits_RV.numel():
            unit = size * torch.finfo(torch.float32).eps * float(expected.logits_RV.abs().max())
            assert float((found.logits_RV - expected.logits_RV).abs().max()) <= unit
        self.captured += found.captured
        self.runner.state.check()
        return found.captured


def make(name: str, path: Path, *, whole: bool = False, **options: Any) -> Pair:
    module = FAMILIES.get(name, test_moe_families)
    case = next(one for one in module.CASES if one.name == name)
    if not whole and name in NARROWER:
        case = replace(case, changes={**case.changes, **NARROWER[name]})
    module.make_checkpoint(case, path)
    return Pair(path, **options)


def drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.parametrize(
    ("name", "recurrence", "most", "steps"),
    [
        *(pytest.param(name, None, 8, 14, marks=pytest.mark.slow) for name in FAMILIES),
        ("mamba2", None, 2, 6),
        ("mamba2", ChunkedRecurrence(), 8, 14),
    ],
)
def test_random_steps(name: str, recurrence: Any, most: int, steps: int, tmp_path: Path) -> None:
    """Sequences come, fork, go back and go; any of them decode together, in any order. Lengths
    cross the ends of pages and items. States are read and written where they are, or copied.
    Triton's interpreter takes a minute and more for all steps of a family.
    """
    rows = TritonRows() if steps == 14 and recurrence is None else None
    pair = make(name, tmp_path, recurrence=recurrence, rows=rows, whole=steps == 14)
    rng = random.Random(name)
    lengths: dict[int, int] = {}
    for number in range(steps):
        verb = "add" if not lengths else rng.choice(("add", "fork", "pop", "remove", "none"))
        seq = rng.choice(list(lengths)) if lengths else 0
        if verb == "add" and len(lengths) < most:
            seq, count = pair.new_seq(), rng.choice((1, 3, 4, 29, 31, 32, 33, 62))
            pair.run(Chunk(seq, drawn(rng, count), logits="last" if number % 2 else "none"), edits=[Add(seq)])
            lengths[seq] = count
        elif verb == "fork" and len(lengths) < most:
            child = pair.new_seq()
            pair.run(edits=[Fork(seq, child)])
            lengths[child] = lengths[seq]
        elif verb == "pop":
            # As far as windows and recurrent layers let it.
            kept = pair.runner.state.nearest_reachable(seq, max(1, lengths[seq] - 3))
            pair.run(edits=[Pop(seq, lengths[seq] - max(1, kept))] if kept else [])
            lengths[seq] = max(1, kept) if kept else lengths[seq]
        elif verb == "remove" and len(lengths) > 2:
            pair.run(edits=[Remove(seq)])
            del lengths[seq]
        some = rng.sample(sorted(lengths), rng.randint(1, len(lengths)))
        assert pair.run(*(Chunk(seq, drawn(rng, 1)) for seq in some))
        for seq in some:
            lengths[seq] += 1
    assert pair.captured >= steps
    assert 2 <= pair.work.recorded <= pair.work.replayed


def begun(pair: Pair, *lengths: int) -> list[int]:
    """Sequences of these lengths."""
    seqs = [pair.new_seq() for _ in lengths]
    rng = random.Random(1)
    prompts = [Chunk(seq, drawn(rng, count)) for seq, count in zip(seqs, lengths, strict=True)]
    pair.run(*prompts, edits=[Add(seq) for seq in seqs])
    return seqs


def decodes(seqs: Sequence[int], token: int = 9) -> list[Chunk]:
    return [Chunk(seq, [token + seq]) for seq in seqs]


@pytest.mark.parametrize("name", TWO)
def test_rows_without_tokens_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of 3, 2 and 1 are of one size, 4. What a row without a token writes is nobody's."""
    monkeypatch.setattr(graph, "rounded", lambda entries: 4)
    pair = make(name, tmp_path)
    seqs = begun(pair, 3, 33, 1)
    for some in (seqs, seqs[:2], seqs[:1], seqs[::-1]):
        assert pair.run(*decodes(some))
    assert (pair.work.recorded, pair.work.replayed) == (1, 3)


def test_states_are_used_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By prompts and decodes, captured or not: nothing copies a state out of its pool or back."""
    pair = make("mamba2", tmp_path)
    for name in ("read", "write", "copy"):
        monkeypatch.delattr(RecurrentStorage, name)
    seqs = begun(pair, 3, 5)
    for some in (seqs, seqs[::-1], seqs):
        assert pair.run(*decodes(some))
    assert pair.work.replayed == 2


def test_sizes() -> None:
    found = [graph.rounded(entries) for entries in range(1, 513)]
    assert found[:8] == list(range(1, 9))
    assert all(entries <= size <= 1.25 * entries for entries, size in enumerate(found, 1))
    assert len(set(found)) <= graph.MOST_SIZES / 2


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 9])
def test_drafts_are_verified(count: int, tmp_path: Path) -> None:
    """Several tokens of each sequence: few rows for a program, and more than fit in one."""
    pair, rng = make("llama-gqa", tmp_path), random.Random(0)
    seqs = begun(pair, 2, 30, 61)
    for some in (seqs, seqs, seqs[::-1], seqs[:2]):
        assert pair.run(*(Chunk(seq, drawn(rng, count), logits="all") for seq in some))
        pair.run(edits=[Pop(seq, count - 1) for seq in some])
    assert pair.work.replayed == 2


@pytest.mark.slow
def test_what_is_more_takes_the_plain_path(tmp_path: Path) -> None:
    pair = make("llama-gqa", tmp_path, largest=2)
    seqs = begun(pair, 5, 6, 7, 98)
    two = seqs[:2]
    for _ in range(3):
        assert pair.run(*decodes(two))
    replayed = pair.work.replayed
    assert not pair.run(*decodes(seqs[:3])), "more than the largest"
    assert not pair.run(*(Chunk(seq, [5, 6], logits="all") for seq in two)), "more tokens than the largest"
    assert not pair.run(*(Chunk(seq, [5, 6]) for seq in two)), "of several tokens the last row"
    assert not pair.run(Chunk(two[0], [5]), Chunk(two[1], [5, 6], logits="all")), "unequal"
    assert not pair.run(Chunk(two[0], [5], logits="none")), "no logits"
    assert not pair.run(Chunk(two[0], list(range(5, 22)), logits="all")), "a prompt"
    assert not pair.run(*decodes(two), hidden_states=True)
    assert not pair.run(Chunk(two[0], [5], TokenTree((-1,)))), "a tree"
    pair.run(edits=[Commit((two[0],), (0,))])
    assert pair.run(*decodes(seqs[3:]))
    assert pair.run(*decodes(seqs[3:]))
    assert not pair.run(*decodes(seqs[3:])), "longer than the tables"
    pair.run(edits=[SetWindow(two[1], 8)])
    assert not pair.run(*decodes(two)), "a window of its own"
    assert pair.work.replayed == replayed + 1
    assert pair.run(*decodes(two[:1]))


def test_no_more_sizes_are_kept_than_asked_for(tmp_path: Path) -> None:
    pair = make("llama-gqa", tmp_path, sizes=2)
    seqs = begun(pair, 5, 6, 7)
    for step, number in enumerate((1, 1, 2, 2, 1, 3, 3, 2)):
        assert pair.run(*decodes(seqs[:number], token=9 + step))
    # Of sizes 1 and 2 the one used longest ago, 2, has gone; it begins anew.
    assert pair.work.recorded == 3


@pytest.mark.parametrize("name", TWO)
def test_usual_sizes_are_captured_ahead(name: str, tmp_path: Path) -> None:
    """On a sequence that is gone afterwards; decodes are launched at once from the first one on."""
    pair = make(name, tmp_path, rows=TritonRows())
    state = pair.runner.state
    before = state.free_pages(), state.num_used_pages
    assert all(pair.runner.capture(size) for size in (2, 1))
    assert pair.work.recorded == 2
    assert (state.free_pages(), state.num_used_pages, state.sequence_ids()) == (*before, [])
    state.check()
    pair.plain.new_seq(), pair.plain.new_seq()
    replayed, seqs = pair.work.replayed, begun(pair, 3, 33)
    for some in (seqs, seqs[:1], seqs[::-1]):
        assert pair.run(*decodes(some))
    assert (pair.work.recorded, pair.work.replayed - replayed) == (2, 3)


def test_without_room_nothing_is_captured_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of one page of one token starts all the same."""
    pair = make("llama-gqa", tmp_path)

    def full(*args: Any, **options: Any) -> bool:
        raise ResourceExhausted("there is no page")

    with monkeypatch.context() as patch:
        patch.setattr(State, "begin_static", full)
        assert not pair.runner.capture(1)
    assert pair.runner.state.sequence_ids() == []
    assert pair.runner.capture(1)


@pytest.mark.parametrize("name", ["llama-gqa", pytest.param("qwen2-windows", marks=pytest.mark.slow)])
def test_sizes_share_their_memory(name: str, tmp_path: Path) -> None:
    """Those behind the largest take none."""
    pair = make(name, tmp_path)
    assert pair.runner.capture(2)
    taken = pair.runner.shared.nbytes
    assert taken > 2 * VOCAB * 4
    assert pair.runner.capture(1)
    assert pair.runner.shared.nbytes == taken


def test_the_budget_counts_what_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of the two largest usual sizes, on a state that is gone afterwards."""
    memory, work = MadeUpMemory(), FrozenWork()
    monkeypatch.setattr(build, "device_memory", lambda device: memory)
    monkeypatch.setattr(build, "CudaCapture", lambda: work)
    make("llama-gqa", tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        attention_backend="triton",
        max_num_seqs=3,
        max_num_batched_tokens=3,
    )
    model = load_model(tmp_path, dtype="float32", kernels=LayerKernels(TritonRows()))
    device = torch.device("cpu")
    given = (config, model, build.make_adapters(model), PlainFormat(torch.float32), device, 64)
    budgets = [build.pool_budget(*given, captures=captures) for captures in (False, True)]
    # 20 MiB for three sequences, 3 MiB each for two and one.
    assert budgets[0].nbytes - budgets[1].nbytes == 26 << 20
    assert "less 26 MiB for captured decodes" in budgets[1].words
    assert work.recorded == 2


def test_usual_sizes() -> None:
    assert graph.usual_sizes(1) == [1]
    assert graph.usual_sizes(12) == [12, 10, 8, 7, 6, 5, 4, 3, 2, 1]
    assert graph.usual_sizes(10_000)[:3] == [512, 448, 384]
    assert len(graph.usual_sizes(10_000)) <= graph.MOST_SIZES


def test_models_that_wait_for_the_device_are_not_captured(tmp_path: Path) -> None:
    """Experts one by one need to know which were chosen. The step runs all the same."""
    pair = make("mixtral", tmp_path)
    seqs = begun(pair, 5, 6)
    assert [pair.run(*decodes(seqs)) for _ in range(3)] == [True, False, False]
    assert not pair.runner.capture(2)
    assert not pair.runner.capture(1)
    assert pair.work.recorded == 0
    assert len(pair.runner.state.sequence_ids()) == 2


@pytest.mark.parametrize("name", ["mamba2", pytest.param("falcon-h1", marks=pytest.mark.slow)])
def test_a_failed_step_is_undone(name: str, tmp_path: Path) -> None:
    pair = make(name, tmp_path)
    seqs = begun(pair, 5, 6)
    for _ in range(3):
        assert pair.run(*decodes(seqs))
    lengths, pages = [pair.runner.state.sequence_length(seq) for seq in seqs], pair.runner.state.num_used_pages
    with pytest.raises(InvalidArgument):
        pair.runner.execute(Step(chunks=(Chunk(seqs[0], [3]), Chunk(seqs[0], [4]))))
    with pytest.raises(QuireError):
        pair.runner.execute(Step(chunks=(Chunk(seqs[0], [3]), Chunk(99, [4]))))
    captured = pair.runner._sizes[graph.Size(2, 1)]
    assert captured is not None

    def broken() -> None:
        raise KeyboardInterrupt

    launch, captured._launch = captured._launch, broken
    with pytest.raises(KeyboardInterrupt):
        pair.runner.execute(Step(chunks=tuple(decodes(seqs))))
    captured._launch = launch
    assert [pair.runner.state.sequence_length(seq) for seq in seqs] == lengths
    assert pair.runner.state.num_used_pages == pages
    assert pair.run(*decodes(seqs))


@pytest.mark.parametrize(
    ("options", "reason"), [({"padding": False}, "no slot for padding"), ({"backend": SdpaAttention()}, "'torch'")]
)
def test_states_without_static_plans(options: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=reason):
        make("llama-gqa", tmp_path, **options)


@pytest.mark.parametrize("name", TWO)
def test_steps_ahead(name: str, tmp_path: Path) -> None:
    """Captured steps take tokens from where they were drawn, and write nothing behind the end of a
    text. The engine gives the tokens of the plain path, whose steps wait for theirs.
    """
    pair = make(name, tmp_path)
    found = []
    for runner in (pair.plain, pair.runner):
        engine = make_engine(runner, limits=Limits(max_num_seqs=4, max_num_batched_tokens=64), max_model_len=LONGEST)
        engine.stepper.runs_ahead = engine.sampling.later = runner is pair.runner
        rng, requests = random.Random(name), []
        for number in range(4):
            params = SamplingParams(
                temperature=1.0 if number % 2 else 0.0,
                seed=number,
                max_tokens=4 + number,
                stop_token_ids=drawn(rng, 9),
                logprobs=1,
            )
            requests += engine.submit(np.array(drawn(rng, 3 + 5 * number)), params)
        while engine.has_work:
            engine.step()
            runner.state.check()
        found.append([(one.output.token_ids, one.output.stop_reason) for one in requests])
        metrics = engine.snapshot()
        assert (metrics["quire:steps_ahead_total"] > 0) == (runner is pair.runner)
        engine.reset_prefix_cache()
        assert runner.state.empty()
    assert found[0] == found[1]
    assert metrics['quire:steps_total{path="captured"}'] >= metrics["quire:steps_ahead_total"]
    assert any(stop is not None for _, stop in found[1])


def test_tokens_of_the_device_are_one_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything runs; those of rows that no token has are left alone."""
    monkeypatch.setattr(graph, "rounded", lambda entries: 4)
    pair = make("llama-gqa", tmp_path)
    seqs = [pair.new_seq() for _ in range(3)]
    pair.run(*(Chunk(seq, [5, 6 + seq], logits="last") for seq in seqs), edits=[Add(seq) for seq in seqs])
    for step in range(4):
        given = torch.tensor([(step + 3 * row) % VOCAB for row in range(3)])
        assert pair.run(*(Chunk(seq, [0]) for seq in seqs), drawn=given)
    with pytest.raises(InvalidArgument, match="drawn tokens must be int64"):
        pair.runner.execute(Step(chunks=tuple(Chunk(seq, [0]) for seq in seqs), inputs=Inputs(drawn=given[:2])))
    assert pair.runner.state.sequence_length(seqs[0]) == 6
