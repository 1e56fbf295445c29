"""Everything a user does, on a CUDA device, against the same on the CPU: ``make gpu-test``.

In float32 two right runs of the bundled model are as far apart as ``TINY_PYTHON`` says, and its
greedy tokens here are farther apart than that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.exact import TINY_PYTHON
from tests.kv.pieces import Pieces
from tests.models.conftest import Case
from tests.models.test_moe_families import QWEN3, make_checkpoint

from quire import LLM, SamplingParams
from quire.base.host_link import host_link
from quire.base.sampling_params import StructuredOutputs
from quire.base.types import Add, Chunk, Step
from quire.kernels.draw.triton_draw import TritonDraw
from quire.kernels.linear.float8 import STACK_CAPABILITY
from quire.runner.graph import GraphRunner, usual_sizes
from quire.runner.memory_profile import run_greatest_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = "cuda"
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "32MiB", "max_model_len": 1024}
GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPTS = ["def add(left, right):\n    return", "class Stack:\n    def __init__(self):\n", "import os\n\n" * 40]
BACKENDS = ["auto", "triton", "torch", "reference"]


@pytest.fixture(scope="module")
def cpu() -> Iterator[LLM]:
    with LLM("tiny-python", device="cpu", **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def gpu() -> Iterator[LLM]:
    with LLM("tiny-python", device=DEVICE, **OPTIONS) as llm:
        yield llm


def tokens(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(one.token_ids) for output in llm.generate(prompts, params) for one in output.outputs]


def captured(llm: LLM) -> float:
    """How many steps were captured."""
    return llm.engine.snapshot()['quire:steps_total{path="captured"}']


def logits(llm: LLM, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits of all positions, from a prompt that comes in pieces."""
    runner = llm.engine.runner
    seq = runner.new_seq()
    runner.execute(Step(edits=(Add(seq),)))
    parts = [
        runner.execute(Step(chunks=(Chunk(seq, ids[start : start + chunk], logits="all"),))).logits_RV
        for start in range(0, len(ids), chunk)
    ]
    runner.state.remove_sequence(seq)
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_texts(backend: str, cpu: LLM) -> None:
    with LLM("tiny-python", device=DEVICE, attention_backend=backend, **OPTIONS) as llm:
        assert tokens(llm, PROMPTS) == tokens(cpu, PROMPTS)


@pytest.mark.parametrize("chunk", [200, 16, 1])
def test_log_probabilities(chunk: int, cpu: LLM, gpu: LLM) -> None:
    ids = [(7 * index) % 900 + 5 for index in range(200 if chunk > 1 else 40)]
    expected, found = (logits(llm, ids, chunk).log_softmax(-1) for llm in (cpu, gpu))
    assert float((found - expected).abs().max()) <= TINY_PYTHON


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits(dtype: str, cpu: LLM) -> None:
    """Each layer rounds its residual stream, the products' inputs and results: about 8 roundings
    in each of 8 layers, of values as large as the logits.
    """
    with LLM("tiny-python", device=DEVICE, **{**OPTIONS, "dtype": dtype}) as llm:
        ids = list(range(5, 105))
        expected, found = logits(cpu, ids, 100), logits(llm, ids, 100)
        eps = torch.finfo(getattr(torch, dtype)).eps
        assert float((found - expected).abs().max()) <= 64 * eps * float(expected.abs().max())
        assert tokens(llm, PROMPTS) == tokens(llm, PROMPTS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.05, seed=4, max_tokens=12, n=3),
        SamplingParams(temperature=0.7, seed=5, max_tokens=12, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(temperature=0.9, seed=6, max_tokens=12, min_tokens=12, logit_bias={7: 3.0}, logprobs=3),
    ],
)
def test_sampled_texts_are_the_seeds(params: SamplingParams, gpu: LLM) -> None:
    found = tokens(gpu, PROMPTS[:2], params)
    assert found == tokens(gpu, PROMPTS[:2], params)
    assert {len(one) for one in found} == {12} or params.min_tokens == 0
    assert found != tokens(gpu, PROMPTS[:2], params.replace(seed=99))


def test_a_kernel_draws_the_same_tokens(gpu: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, min_p=0.02, seed=3, max_tokens=12)
    assert isinstance(gpu.engine.sampling.kernel, TritonDraw)
    found = tokens(gpu, PROMPTS, params)
    monkeypatch.setattr(gpu.engine.sampling, "kernel", None)
    assert tokens(gpu, PROMPTS, params) == found


def test_grammars(gpu: LLM) -> None:
    pytest.importorskip("llguidance")
    form = StructuredOutputs(regex="[0-9]{3}-[a-c]{2}")
    params = SamplingParams(temperature=0.8, seed=1, structured_outputs=form, max_tokens=24)
    output = gpu.generate("x = ", params)
    text = output[0].outputs[0].text
    assert len(text) == 6
    assert text[:3].isdigit()


def test_sessions_are_forked_rewound_and_moved(cpu: LLM, gpu: LLM, tmp_path: Path) -> None:
    found = []
    for number, llm in enumerate((cpu, gpu)):
        session = llm.session(PROMPTS[2] + PROMPTS[1])
        session.generate(GREEDY)
        fork = session.fork()
        fork.append("\n    def push(self, item):\n")
        first = list(fork.generate(GREEDY).outputs[0].token_ids)
        fork.rewind(n=8)
        again = list(fork.generate(GREEDY).outputs[0].token_ids)
        path = tmp_path / f"{number}.session"
        fork.save(path)
        found.append((first, again, path, fork.text))
    assert found[0][:2] == found[1][:2]
    # What one device has saved, the other goes on with.
    texts = []
    for llm, (_, _, path, text) in zip((gpu, cpu), found, strict=True):
        loaded = llm.load_session(path)
        assert loaded.text == text
        texts.append(list(loaded.generate(GREEDY).outputs[0].token_ids))
    assert texts[0] == texts[1]


def test_windows_with_a_sink(cpu: LLM, gpu: LLM) -> None:
    found = []
    for llm in (cpu, gpu):
        session = llm.session(PROMPTS[1] * 8, window=64, sink=4)
        found.append(list(session.generate(GREEDY.replace(max_tokens=24)).outputs[0].token_ids))
    assert found[0] == found[1]


def test_a_small_pool_preempts_and_reuses(cpu: LLM) -> None:
    """Sequences wait, are preempted and share prefixes; texts stay the same."""
    prompts = [PROMPTS[2] + tail for tail in ("a =", "b =", "def c", "x")]
    with LLM("tiny-python", device=DEVICE, **{**OPTIONS, "kv_cache_memory": "6MiB", "host_memory": "64MiB"}) as llm:
        assert tokens(llm, prompts) == tokens(cpu, prompts)
        assert tokens(llm, prompts[::-1]) == tokens(cpu, prompts[::-1])


@pytest.mark.parametrize("sequences", [1, 3, 9, 11])
def test_captured_decodes(sequences: int, cpu: LLM, gpu: LLM) -> None:
    """They give the tokens of the plain path, with rows that no token has (9 is padded to 10), also
    while others come and go.
    """
    prompts = [PROMPTS[number % 2] + " " * number for number in range(sequences)]
    before = captured(gpu)
    found = tokens(gpu, prompts)
    assert captured(gpu) > before
    assert found == tokens(cpu, prompts)
    with LLM("tiny-python", device=DEVICE, enforce_eager=True, **OPTIONS) as eager:
        assert tokens(eager, prompts) == found
        assert captured(eager) == 0


def test_usual_decodes_are_captured_at_start(gpu: LLM) -> None:
    """Of up to 256 sequences, in memory that the largest has taken."""
    runner = gpu.engine.runner
    assert isinstance(runner, GraphRunner)
    sizes = [(entries, 1) for entries in usual_sizes(256)]
    assert all(runner._sizes[size] is not None for size in sizes)  # type: ignore[index]
    before = torch.cuda.memory_reserved()
    assert all(runner.capture(entries) for entries, _ in sizes)
    assert torch.cuda.memory_reserved() == before


@torch.inference_mode()
def test_experts_of_eight_bits_are_captured(tmp_path: Path) -> None:
    """Their decodes are one launch, to the bit that of the plain path."""
    if torch.cuda.get_device_capability() != STACK_CAPABILITY:
        pytest.skip("the device has no products of stacks of 8-bit floats")
    changes = {**QWEN3, "moe_intermediate_size": 48, "head_dim": 64}
    make_checkpoint(Case("experts", "Qwen3Moe", changes), tmp_path)
    options: dict[str, Any] = {**OPTIONS, "dtype": "bfloat16", "max_model_len": 128, "quantization": "fp8"}
    prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(tmp_path, device=DEVICE, **options) as llm:
        found = tokens(llm, prompts, params)
        assert captured(llm) > 0
    with LLM(tmp_path, device=DEVICE, enforce_eager=True, **options) as eager:
        assert tokens(eager, prompts, params) == found


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0.7, seed=5, max_tokens=12, repetition_penalty=1.2, presence_penalty=0.3),
    ],
)
@pytest.mark.parametrize("eager", [False, True])
def test_steps_ahead(params: SamplingParams, eager: bool) -> None:
    """They draw what steps draw that wait for the tokens before, by captured work and without."""
    found = []
    for ahead in (False, True):
        with LLM("tiny-python", device=DEVICE, enforce_eager=eager, async_scheduling=ahead, **OPTIONS) as llm:
            texts = tokens(llm, PROMPTS, params)
            stop = texts[0][5]
            found.append((texts, tokens(llm, PROMPTS, params.replace(stop_token_ids=[stop]))))
            assert (llm.metrics()["quire:steps_ahead_total"] > 0) == ahead
            llm.engine.runner.state.check()
    assert found[0] == found[1]


def test_a_step_ahead_waits_for_nothing_but_its_tokens(gpu: LLM) -> None:
    """Events of copies are waited for, and PyTorch raises at anything else that waits."""
    engine = gpu.engine
    requests = [one for seed in range(3) for one in engine.submit(np.array([5, 6, 7 + seed]), GREEDY)]
    for _ in range(5):
        engine.step()
    assert engine.stepper.in_flight.last is not None
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(request.output.token_ids) for request in requests] == [9] * 3
    engine.end(requests)


def test_captured_logits_are_those_of_the_plain_path(gpu: LLM) -> None:
    """To the bit: the same kernels with the same splits. Drafts of three tokens, too."""
    with LLM("tiny-python", device=DEVICE, enforce_eager=True, **OPTIONS) as eager:
        for count, wanted in ((1, "last"), (3, "all")):
            found = []
            for runner in (gpu.engine.runner, eager.engine.runner):
                seqs = [runner.new_seq() for _ in range(4)]
                runner.execute(Step(edits=tuple(map(Add, seqs))))
                prompts = [
                    [(7 * index + seq) % 900 for index in range(100 * place + 1)] for place, seq in enumerate(range(4))
                ]
                runner.execute(Step(chunks=tuple(Chunk(seq, ids) for seq, ids in zip(seqs, prompts, strict=True))))
                outputs = [
                    runner.execute(Step(chunks=tuple(Chunk(seq, [9 + step] * count, logits=wanted) for seq in seqs)))
                    for step in range(5)
                ]
                found.append(torch.cat([output.logits_RV for output in outputs]))
                assert outputs[-1].captured == (runner is gpu.engine.runner)
                for seq in seqs:
                    runner.state.remove_sequence(seq)
            assert torch.equal(*found)


def test_a_captured_step_waits_for_nothing(gpu: LLM) -> None:
    runner = gpu.engine.runner
    seqs = [runner.new_seq() for _ in range(3)]
    runner.execute(Step(edits=tuple(map(Add, seqs)), chunks=tuple(Chunk(seq, [5, 6, 7]) for seq in seqs)))
    decode = Step(chunks=tuple(Chunk(seq, [9]) for seq in seqs))
    assert [runner.execute(decode).captured for _ in range(3)] == [True] * 3
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.execute(decode)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seq in seqs:
        runner.state.remove_sequence(seq)


def test_no_step_waits_in_a_layer(gpu: LLM) -> None:
    """A forward of decodes is queued without a wait for the device: PyTorch raises at one."""
    runner = gpu.engine.runner
    seqs = [runner.new_seq() for _ in range(3)]
    runner.execute(Step(edits=tuple(map(Add, seqs))))
    step = Step(chunks=tuple(Chunk(seq, [5, 6, 7], logits="last") for seq in seqs))
    runner.execute(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runner.execute(Step(chunks=tuple(Chunk(seq, [9], logits="last") for seq in seqs)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seq in seqs:
        runner.state.remove_sequence(seq)


def test_the_pool_leaves_room_for_the_greatest_step() -> None:
    """The pool takes what is left of its share, and a step with all logits runs beside it."""
    share = 0.5
    with LLM("tiny-python", device=DEVICE, dtype="bfloat16", max_num_seqs=100_000, gpu_memory_utilization=share) as llm:
        total = torch.cuda.mem_get_info()[1]
        runner = llm.engine.runner
        assert runner.state.num_bytes > 0.8 * share * total
        run_greatest_step(runner, [8] * 256)
        free, _ = torch.cuda.mem_get_info()
        # Segments of the allocator are multiples of 2 MiB; PyTorch may need a few more than before.
        assert total - free <= share * total + (256 << 20)


class Arriving:
    """A transfer whose layers are written by a thread."""

    def __init__(self, arrived: dict[int, threading.Event]) -> None:
        self.arrived = arrived

    def wait(self, layer: int) -> None:
        self.arrived[layer].wait()


def test_state_that_comes_back_is_what_was_given_up(cpu: LLM, gpu: LLM) -> None:
    """Rows leave the device and come back in many pieces, while another sequence decodes."""
    runner = gpu.engine.runner
    seq, other = runner.new_seq(), runner.new_seq()
    runner.execute(Step(edits=(Add(seq), Add(other)), chunks=(Chunk(seq, list(range(5, 205))), Chunk(other, [5]))))
    state = runner.state
    export = state.open_export(seq)
    rows = {
        layer: {name: host(one) for name, one in export.rows(layer, 0, 200).items()}
        for layer in state.geometry.layer_ids
    }
    state.remove_sequence(seq)
    for _ in range(20):
        runner.execute(Step(chunks=(Chunk(other, [6]),)))
    state.prepare_import(seq, state.import_metadata(200))
    state.publish_import(seq)

    def load() -> None:
        for layer, tensors in rows.items():
            state.import_rows(
                *(seq, layer, 0),
                Pieces([{name: one[a : a + 50] for name, one in tensors.items()} for a in range(0, 200, 50)]),
            )
            arrived[layer].set()

    arrived = {layer: threading.Event() for layer in rows}
    thread = threading.Thread(target=load)
    thread.start()
    runner.loads[seq] = Arriving(arrived)
    found = runner.execute(Step(chunks=(Chunk(seq, [7]), Chunk(other, [7])), awaited=(seq,))).logits_RV[0]
    del runner.loads[seq]
    thread.join()
    state.finish_import(seq)
    again = state.open_export(seq)
    assert all(
        torch.equal(host(again.rows(layer, 0, 200)[name]), one)
        for layer, group in rows.items()
        for name, one in group.items()
    )
    expected = logits(cpu, [*range(5, 205), 7], 201)[-1]
    assert float((found.cpu().log_softmax(-1) - expected.log_softmax(-1)).abs().max()) <= TINY_PYTHON
    for one in (seq, other):
        state.remove_sequence(one)


def host(rows: torch.Tensor) -> torch.Tensor:
    link = host_link(rows.device)
    assert link is not None
    found = link.to_host(rows)
    assert torch.equal(found, rows.cpu())
    return found
