"""Engines whose model is divided among processes: the same texts, refusals, ends."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.exact import TINY_PYTHON
from tests.ranks.thread_ranks import ranks_as_threads
from tests.small_llms import greedy, make_family, random_tokens
from torch import Tensor

from quire import LLM, SamplingParams
from quire.base.config import AttentionConfig, ExecutorConfig, MemoryConfig
from quire.base.errors import InvalidArgument, QuireError, RanksBroken, ResourceExhausted, Unsupported
from quire.base.outputs import Blend
from quire.base.segments import BlendParams, Segment
from quire.base.temporary_folders import TemporaryFolder
from quire.base.types import Chunk, Step
from quire.branches.move_costs import MoveCosts
from quire.build import EXECUTOR_FACTORY, RankPart
from quire.contracts.adapters import Adapter
from quire.contracts.executor import DecodeInput, PrefillInput
from quire.contracts.ranks import Share
from quire.runner import rank_processes, torch_group
from quire.runner.rank_processes import Ranks
from quire.runner.ranks import RankedRunner
from quire.runner.torch_group import TorchGroup

PROMPTS = ["def fib(n):", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n\ndef main("]
GREEDY = SamplingParams(temperature=0, max_tokens=20)


def made(size: int, **options: Any) -> LLM:
    """In float32: in 16 bits each rank rounds its part of a sum, and texts may differ."""
    return LLM("tiny-python", tensor_parallel_size=size, **{"kv_cache_memory": "16MiB", "dtype": "float32", **options})


@pytest.fixture(scope="module", autouse=True)
def worth() -> Iterator[None]:
    """State is always brought back; otherwise it depends on the machine's speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoveCosts, "is_worth", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with made(1) as llm:
        yield llm


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two ranks keep on disk."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def two(kept: Path) -> Iterator[LLM]:
    with made(2, store=(f"file://{kept}/store",), state_dir=kept / "state") as llm:
        yield llm


def runner_of(llm: LLM) -> RankedRunner:
    runner = llm.engine.branches.runner
    assert isinstance(runner, RankedRunner)
    return runner


def processes(llm: LLM) -> list[subprocess.Popen[bytes]]:
    return runner_of(llm).ranks._processes


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[list[str]]:
    return [[one.text for one in output.outputs] for output in llm.generate(PROMPTS, params)]


def is_gone(process: subprocess.Popen[bytes]) -> bool:
    for _ in range(100):
        if process.poll() is not None:
            return True
        time.sleep(0.1)
    return False


def log_probabilities(llm: LLM) -> Tensor:
    """Those of all tokens of the prompts but the first ones."""
    found = []
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)):
        assert output.prompt_logprobs is not None
        for token, chances in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert chances is not None
            found.append(chances[token].logprob)
    return torch.tensor(found, dtype=torch.float64)


def test_log_probabilities_are_those_of_one_process(one: LLM, two: LLM) -> None:
    # Each rank adds half of a sum: the rounding of another order.
    assert (log_probabilities(two) - log_probabilities(one)).abs().max() < TINY_PYTHON


def test_in_bfloat16_ranks_are_as_near_to_float32_as_one_process(one: LLM) -> None:
    exact = log_probabilities(one)
    errors = []
    for size in (1, 2):
        with ranks_as_threads(), made(size, dtype="bfloat16") as llm:
            errors.append((log_probabilities(llm) - exact).square().mean().sqrt())
    # The same number of roundings to 8 bits; those of the parts are of smaller numbers. The mean of
    # 24 errors varies by a quarter.
    assert errors[0] > 0
    assert errors[1] < 1.5 * errors[0]


def test_ranks_share_the_threads_of_this_process_which_gets_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    tell = Ranks.tell
    monkeypatch.setattr(Ranks, "tell", lambda ranks, messages: (told.extend(messages), tell(ranks, messages)))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")  # so that it is a user's number
    before = torch.get_num_threads()
    try:
        for chosen, expected in ((None, 5), (3, 3)):
            torch.set_num_threads(5)
            with ranks_as_threads(), made(2):
                assert torch.get_num_threads() == 2
                if chosen is not None:
                    torch.set_num_threads(chosen)
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
    assert [part.threads for part in told if isinstance(part, RankPart)] == [2, 2]


def of_all_ranks(path: Path, size: int, act: Callable[[TorchGroup, int], Any]) -> list[Any]:
    """What a function of each rank's group returns."""

    def run(rank: int) -> Any:
        return act(TorchGroup(Share(rank, size), torch.device("cpu"), path), rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture(params=["shared memory", "no kernels", "no memory"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks add; without kernels, and where no memory can be shared, by gloo."""

    def refuse(*_: object) -> int:
        raise OSError("not permitted")

    if request.param == "no kernels":
        monkeypatch.setattr(torch_group, "native_library", lambda: None)
    if request.param == "no memory":
        monkeypatch.setattr(os, "memfd_create", refuse)
    name: str = request.param
    return name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_rounded_once(tmp_path: Path, transport: str, size: int, dtype: torch.dtype) -> None:
    """Tensors of one piece and of several."""
    shape = (3, 1000) if size == 2 else (700, 1001)
    parts = torch.randn(size, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).to(dtype)
    exact = parts.double().sum(0)

    def summed(group: TorchGroup, rank: int) -> Tensor:
        assert (group._shared is not None) == (transport == "shared memory")
        own = parts[rank].clone()
        for _ in range(3):
            own.copy_(parts[rank])
            assert group.sum(own) is own
        return own

    found = of_all_ranks(tmp_path / "store", size, summed)
    assert all(torch.equal(one, found[0]) for one in found)
    # One rounding to the type, and the float32 additions before it.
    bound = (
        exact.abs() * torch.finfo(dtype).eps / 2 + parts.double().abs().sum(0) * size * torch.finfo(torch.float32).eps
    )
    assert ((found[0].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("columns", [5, 90_001])
def test_columns_are_gathered_on_rank_0(tmp_path: Path, transport: str, columns: int) -> None:
    parts = [torch.randn(columns, 4).t() for _ in range(3)]
    first, *others = of_all_ranks(tmp_path / "store", 3, lambda group, rank: group.gather(parts[rank]))
    assert torch.equal(first, torch.cat(parts, -1))
    assert others == [None, None]


def test_a_rank_that_is_gone_ends_a_sum(tmp_path: Path) -> None:
    """Its lock goes with its last descriptor, as when its process ends."""
    go = threading.Barrier(2)

    def one_ends(group: TorchGroup, rank: int) -> None:
        shared, group._shared = group._shared, None
        assert shared is not None
        go.wait(20)
        if rank:
            del shared
            return
        started = time.monotonic()
        with pytest.raises(RanksBroken, match="load the model again"):
            shared.sum(torch.ones(3))
        assert time.monotonic() - started < 20

    of_all_ranks(tmp_path / "store", 2, one_ends)


def test_a_rank_that_hangs_ends_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "HANG_SECONDS", 2.0)
    ended = threading.Event()

    def one_hangs(group: TorchGroup, rank: int) -> None:
        if rank:
            ended.wait(60)
            return
        try:
            with pytest.raises(RanksBroken, match="does not answer"):
                group.sum(torch.ones(3))
        finally:
            ended.set()

    of_all_ranks(tmp_path / "store", 2, one_hangs)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, seed=7, max_tokens=12, n=3, top_p=0.9),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs={"regex": "[a-z]+: [0-9]{3}"}),
        SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, stop=["\n\n"]),
    ],
    ids=["greedy", "sampled", "grammar", "penalty"],
)
def test_texts_are_those_of_one_process(one: LLM, two: LLM, params: SamplingParams) -> None:
    assert texts(two, params) == texts(one, params)


def test_sessions_fork_rewind_and_edit(one: LLM, two: LLM) -> None:
    found = []
    for llm in (one, two):
        with llm.session("def area(width, height):\n") as session:
            first = session.generate(GREEDY).outputs[0].token_ids
            session.rewind(n=12)
            assert session.generate(GREEDY).outputs[0].token_ids[:8] == first[8:16]
            forks = session.fork(n=2)
            forks[0].append("\n# width")
            forks[1].edit("width, height", "size")
            found.append([[fork.generate(GREEDY).outputs[0].text for fork in forks], session.score(" return")])
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=0, abs=TINY_PYTHON)  # as above


def test_drafts_and_preemptions() -> None:
    """Pages for less than the requests together: state goes out to memory and back. Rejected drafts
    are popped on all ranks."""
    options = {"kv_cache_memory": "512KiB", "max_model_len": 64, "speculative": "lookup", "host_memory": "8MiB"}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found = []
    for size in (1, 2):
        # A rank's pages are half as large.
        with ranks_as_threads(), made(size, **{**options, "kv_cache_memory": f"{512 // size}KiB"}) as llm:
            found.append(texts(llm, params))
            metrics = llm.metrics()
            assert metrics["quire:num_preemptions_total"] > 0
            assert metrics["quire:store_tokens_loaded_total"] > 0
    assert found[0] == found[1]


def test_executors(one: LLM, two: LLM) -> None:
    """Logits of whole prompts, attention weights, a cache's bytes, a rewind, verified drafts."""
    tokens = torch.randint(0, one.model.vocab_size, (1, 70), generator=torch.Generator().manual_seed(3))
    found: list[list[Tensor]] = []
    written: list[bytes] = []
    for llm in (one, two):
        executor = llm.executor
        cache = executor.create_kv_cache()
        output = executor.prefill(PrefillInput(input_ids=tokens, kv_cache=cache, output_attentions=True))
        if written:
            cache.load(written[0])
            assert cache.serialize() == written[0]
        written.append(cache.serialize())
        steps = [executor.decode(DecodeInput(input_ids=tokens[:, at : at + 1], kv_cache=cache)) for at in range(3)]
        executor.truncate_kv(cache, tokens.shape[1])
        drafts = [DecodeInput(input_ids=tokens[:, at : at + 1], kv_cache=cache) for at in range(3)]
        verified = executor.forward_verify(drafts)
        assert output.logits is not None
        assert output.attention_weights is not None
        found.append([output.logits, *(one.logits for one in (*steps, *verified)), *output.attention_weights])
        cache.release()
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        # Each rank adds half of a sum: the rounding of another order, as for log-probabilities.
        assert (mine - theirs).abs().max() <= TINY_PYTHON * max(1.0, float(theirs.abs().max()))


def test_adapters(one: LLM, two: LLM, tmp_path: Path) -> None:
    """Requests under an adapter beside others, a session that changes it, and its file."""
    found, base = [], texts(two)
    for number, llm in enumerate((two, one)):
        llm.load_adapter("docs", "tiny-python-docstrings")
        try:
            outputs = llm.generate(PROMPTS, GREEDY, adapter="docs")
            with llm.session(PROMPTS[1], adapter="docs") as session:
                session.generate(GREEDY)
                session.use_adapter(None)
                session.append("\n\n")
                session.generate(GREEDY)
                session.save(tmp_path / f"{number}.kv")
                found.append([*(one.outputs[0].token_ids for one in outputs), session.tokens])
            if number:
                with llm.load_session(tmp_path / "0.kv") as loaded:
                    loaded.save(tmp_path / "again.kv")
            with pytest.raises(ResourceExhausted, match="adapter_ranks"):
                runner_of(two).adapters.admit(1000, 0)
        finally:
            llm.unload_adapter("docs")
    assert found[0] == found[1]
    assert (tmp_path / "again.kv").read_bytes() == (tmp_path / "0.kv").read_bytes()
    assert texts(two) == base


def test_an_adapter_that_a_rank_cannot_keep_is_kept_by_none(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, pool = runner_of(two).ranks, runner_of(two).adapters
    load = ranks.load_adapter

    def of_another_shape(adapter_id: int, parts: Sequence[Adapter]) -> None:
        update = parts[0].updates[0]
        wrong = dataclasses.replace(update, a_RI=update.a_RI[:, 1:])
        load(adapter_id, [dataclasses.replace(parts[0], updates=(wrong,))])

    with monkeypatch.context() as patch:
        patch.setattr(ranks, "load_adapter", of_another_shape)
        with pytest.raises(InvalidArgument, match="inputs"):
            two.load_adapter("docs", "tiny-python-docstrings")
    assert not pool.ids
    assert not two.adapters
    two.load_adapter("docs", "tiny-python-docstrings")
    two.unload_adapter("docs")


# -- one state, any layout -------------------------------------------------------------------------


def saved(llm: LLM, source: Path, target: Path) -> list[int]:
    """Load a file, save it again, and return the next tokens."""
    with llm.load_session(source) as session:
        session.save(target)
        return session.generate(GREEDY).outputs[0].token_ids


def test_state_files_know_no_ranks(one: LLM, two: LLM, tmp_path: Path) -> None:
    """A file of one process goes through two ranks and stays the same to the byte, and one of two
    ranks through one process."""
    paths = [tmp_path / f"{number}.kv" for number in range(4)]
    for number, (writer, reader) in enumerate(((one, two), (two, one))):
        first, second = paths[2 * number : 2 * number + 2]
        with writer.session(PROMPTS[1]) as session:
            session.generate(GREEDY)
            session.save(first)
            tokens = session.generate(GREEDY).outputs[0].token_ids
        assert saved(reader, first, second) == tokens
        assert second.read_bytes() == first.read_bytes()


def test_rows_are_read_and_written(one: LLM, two: LLM, tmp_path: Path) -> None:
    """Two ranks hold what was written, for later tokens too; a fork keeps what was there."""
    with one.session(PROMPTS[1]) as session:
        session.save(tmp_path / "one.kv")
    with two.load_session(tmp_path / "one.kv") as ours, one.load_session(tmp_path / "one.kv") as theirs:
        kept = ours.fork()
        for layer in (0, 2):
            values = theirs.kv(layer)["v"]
            for session in (ours, theirs):
                session.set_kv(layer, v=values[2:5].flip(1) * 2, start=2)
        assert ours.norms(1).norms["k"].shape == theirs.norms(1).norms["k"].shape
        views = [session.attention(5, layer=1).weights for session in (ours, theirs)]
        # Weights of at most 1, of scores that differ by rounding.
        assert views[0] == pytest.approx(views[1], rel=0, abs=TINY_PYTHON)
        for layer in range(3):
            for name, expected in theirs.kv(layer).items():
                # The file lacks the last token, which each has computed.
                assert torch.equal(ours.kv(layer)[name][:-1], expected[:-1])
        assert ours.generate(GREEDY).outputs[0].token_ids == theirs.generate(GREEDY).outputs[0].token_ids
        assert not torch.equal(kept.kv(0)["v"], ours.kv(0)["v"][: len(kept)])


def test_an_interrupt_leaves_no_answer_unread(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pipe: Connection) -> Any:
        signal.raise_signal(signal.SIGINT)
        return receive(pipe)

    receive = rank_processes.receive
    with two.session(PROMPTS[0]) as session:
        expected = session.norms(0).norms["k"]
        with monkeypatch.context() as patch:
            patch.setattr(rank_processes, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.norms(1)  # reads without the engine's lock
        assert (session.norms(0).norms["k"] == expected).all()


LONG = "".join(f"def f{number}(x):\n    return x + {number}\n\n\n" for number in range(8))


def test_stores_know_no_ranks(two: LLM, kept: Path, tmp_path: Path) -> None:
    """Prefixes and commits of one process are those of two ranks, with other pages, and the
    reverse; and so are sessions, when the ranks are gone."""
    store = (f"file://{kept}/store",)
    prompts = [f"# {number}\n{LONG}" for number in range(2)]

    def found(llm: LLM, prompt: str) -> list[int]:
        """The tokens that follow, of which the prompt's state came from the store."""
        before = llm.metrics()["quire:store_tokens_loaded_total"]
        (output,) = llm.generate(prompt, GREEDY)
        assert llm.metrics()["quire:store_tokens_loaded_total"] - before >= len(output.prompt_token_ids) - 16
        return output.outputs[0].token_ids

    with made(1, store=store, page_size=32) as llm:
        expected = llm.generate(prompts[0], GREEDY)[0].outputs[0].token_ids
        with llm.session(prompts[0]) as session:
            session.generate(GREEDY)
            session.commit("of-one")
            following = session.generate(GREEDY).outputs[0].token_ids
        assert llm.engine.stepper.stored.flush(10)
    assert found(two, prompts[0]) == expected
    assert two.checkout("of-one").generate(GREEDY).outputs[0].token_ids == following
    expected = two.generate(prompts[1], GREEDY)[0].outputs[0].token_ids
    assert two.engine.stepper.stored.flush(10)
    two.reset_prefix_cache()
    assert found(two, prompts[1]) == expected
    with two.session(prompts[1], name="kept") as session:
        session.generate(GREEDY)
        session.commit("of-two")
        following = session.generate(GREEDY).outputs[0].token_ids
        tokens = session.tokens
        assert two.engine.stepper.stored.flush(10)
        shutil.copytree(kept / "state", tmp_path / "state")
    with made(1, store=store, state_dir=tmp_path / "state", page_size=32) as llm:
        assert found(llm, prompts[1]) == expected
        assert llm.checkout("of-two").generate(GREEDY).outputs[0].token_ids == following
        assert llm.resume("kept").tokens == tokens


@pytest.mark.parametrize("select", ["v", "v_or_question"])
def test_blended_prompts(one: LLM, two: LLM, select: Any) -> None:
    """Ranks choose the same rows as one process, by sums over all heads; then by the attention of
    the question, which runs first. A session's rows move."""
    pieces = [Segment(LONG[:150]), Segment(LONG[150:]), "\n\ndef g("]
    params = BlendParams(ratio=0.3, least=1, gate=False, select=select)
    found: list[tuple[list[int], Blend, list[int]]] = []
    for llm in (one, two):
        # A salt of its own: what other tests have computed is not found, in neither.
        llm.warm(pieces[:2], cache_salt=select)
        (output,) = llm.generate([pieces], GREEDY, blend=params, cache_salt=select)
        assert output.blend is not None
        with llm.session(LONG, cache_salt=select) as session:
            session.generate(GREEDY)
            session.edit((0, 10), "# new\n", "blend", blend=params)
            moved = session.generate(GREEDY).outputs[0].token_ids
        found.append((output.outputs[0].token_ids, output.blend, moved))
    assert found[0][1].blended > found[0][1].recomputed > 0
    assert found[0] == found[1]


def test_embeddings_go_to_all_ranks(one: LLM, two: LLM) -> None:
    tokens = one.tokenizer.encode(PROMPTS[0]) if one.tokenizer is not None else []
    rows = one.model.embed(torch.tensor(tokens))
    (expected,), (found,) = (llm.generate({"prompt_embeds": rows}, GREEDY) for llm in (one, two))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_model_that_does_not_divide_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    with pytest.raises(Unsupported, match=r"tiny-python: tensor_parallel_size 3: 4 query heads do not divide by 3"):
        made(3)


def test_ranks_that_cannot_load_end(two: LLM) -> None:
    before = children()
    assert str(processes(two)[0].pid) in before, "ranks are found"
    with pytest.raises(ResourceExhausted, match="no page of"):
        made(2, kv_cache_memory="1KiB")
    assert children() == before


def children() -> set[str]:
    """The ids of ranks that this process has started and that have not ended."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"rank_process" in (folder / "cmdline").read_bytes():
                found.add(folder.name)
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return found


def test_a_step_that_fails_on_all_ranks_is_undone(two: LLM) -> None:
    runner = runner_of(two)
    with pytest.raises(QuireError, match="sequence"):
        runner.execute(Step(chunks=(Chunk(runner.new_seq(), [1, 2, 3]),)))
    assert not runner.ranks.broken
    assert texts(two)


def test_a_rank_that_is_killed_at_a_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with made(2) as llm:
        ranks, taken = runner_of(llm).ranks, list[object]()
        take = ranks.take

        def killing(*given: Any) -> Any:
            taken.append(given)
            if len(taken) == 3:
                processes(llm)[0].kill()
            return take(*given)

        session = llm.session(PROMPTS[1])
        session.save(tmp_path / "whole.kv")
        monkeypatch.setattr(ranks, "take", killing)
        with pytest.raises(RanksBroken, match="load the model again"):
            session.save(tmp_path / "half.kv")
        with pytest.raises(RanksBroken, match="load the model again"):
            llm.load_session(tmp_path / "whole.kv")
        assert [one.name for one in tmp_path.iterdir()] == ["whole.kv"]
        assert len(llm.engine.runner.state.sequence_ids()) == 1


def test_an_executor_of_its_own_whose_rank_hangs_in_the_end(one: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "HANG_SECONDS", 4.0)
    options = {"executor_type": "TensorParallel", "dtype": "float32", "max_sequence_length": 64}
    attention = AttentionConfig(attention_type="GroupedQuery")  # of all heads; a rank's share one KV head
    pool = MemoryConfig(memory_pool_size="4MiB")
    executor = EXECUTOR_FACTORY.create_executor(
        ExecutorConfig(model_info="tiny-python", attention_config=attention, memory_config=pool, **options)
    )
    assert executor.executor_type == "TensorParallel"
    assert executor.capabilities().supports_tensor_parallelism
    assert executor.info().num_parameters == one.executor.info().num_parameters
    tokens = torch.arange(20, 40)[None]
    found = executor.prefill(PrefillInput(input_ids=tokens))
    expected = one.executor.prefill(PrefillInput(input_ids=tokens)).logits
    assert found.logits is not None
    assert expected is not None
    # As for log-probabilities.
    assert (found.logits - expected).abs().max() <= TINY_PYTHON
    (process,) = cast(RankedRunner, executor.pool.runner).ranks._processes
    os.kill(process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RanksBroken, match="does not answer"):
        executor.decode(DecodeInput(input_ids=tokens[:, :1], kv_cache=found.kv_cache))
    assert time.monotonic() - started < 20
    assert is_gone(process)
    executor.shutdown()


def test_an_executor_whose_heads_do_not_divide_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a rank was started"))
    config = ExecutorConfig(
        model_info="tiny-python", executor_type="TensorParallel", executor_options={"tensor_parallel_size": 3}
    )
    with pytest.raises(Unsupported, match="4 query heads do not divide by 3"):
        EXECUTOR_FACTORY.create_executor(config)
    with pytest.raises(InvalidArgument, match="belongs to executor_type 'TensorParallel'"):
        ExecutorConfig(model_info="tiny-python", executor_options={"tensor_parallel_size": 2})


@pytest.mark.parametrize("is_noticed", [False, True], ids=["at-the-answer", "when-told"])
def test_a_rank_that_is_killed_ends_requests_with_an_error(is_noticed: bool) -> None:
    """Also if a step without tokens, which forks a cached prefix, is the first that it misses."""
    with made(2) as llm:
        texts(llm)
        (process,) = processes(llm)
        assert not runner_of(llm).fault
        os.kill(process.pid, signal.SIGKILL)
        if is_noticed:
            process.wait(10)
            assert "load the model again" in runner_of(llm).fault
        (output,) = llm.generate([PROMPTS[0]], GREEDY)
        assert output.outputs[0].finish_reason == "error"
        assert "load the model again" in str(output.outputs[0].error)
        with pytest.raises(RanksBroken, match="load the model again"):
            runner_of(llm).execute(Step(chunks=(Chunk(0, [1]),)))


def test_ranks_end_with_their_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder in which the ranks of a killed process met goes at the next start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, living = tmp_path / "quire-ranks-killed", TemporaryFolder("quire-ranks-")
    killed.mkdir()
    (killed / "store").write_bytes(b"x")
    for one in (killed, living.path):
        os.utime(one, (1, 1))
    llm = made(2)
    (process,) = processes(llm)
    folder = runner_of(llm).ranks.meeting.parent
    assert sorted(tmp_path.glob("quire-ranks-*")) == sorted([living.path, folder])
    living.remove()
    llm.close()
    assert is_gone(process)
    assert not folder.exists()


# -- stages ----------------------------------------------------------------------------------------


def test_a_stage_that_is_killed_ends_requests_with_an_error(one: LLM) -> None:
    """The first stage notices while it waits for logits; the other stages end too."""
    with made(1, pipeline_parallel_size=3) as llm:
        turns = llm.engine.stepper.turns
        assert turns is not None
        turns._least_rows = 1
        assert texts(llm) == texts(one)
        first, last = processes(llm)
        session = llm.session(PROMPTS[0])
        stream = session.stream(SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
        tokens = [np.array(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
        others = [llm.engine.submit(one, SamplingParams(max_tokens=200, ignore_eos=True))[0] for one in tokens]
        while not llm.engine.stepper.in_flight.turns:
            next(stream)
        last.kill()
        started = time.monotonic()
        with pytest.raises(RanksBroken, match="load the model again"):
            list(stream)
        llm.engine.run(others)
        assert all("load the model again" in str(one.output.error) for one in others)
        assert time.monotonic() - started < 10
        assert is_gone(first)
        (output,) = llm.generate([PROMPTS[0]], GREEDY)
        assert "load the model again" in str(output.outputs[0].error)
    assert not children() & {str(first.pid), str(last.pid)}


@pytest.mark.slow
def test_a_stage_that_hangs_ends_requests_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "HANG_SECONDS", 4.0)
    with made(1, pipeline_parallel_size=2) as llm:
        (process,) = processes(llm)
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        (output,) = llm.generate([PROMPTS[0]], GREEDY)
        assert time.monotonic() - started < 20
        assert "does not answer" in str(output.outputs[0].error)
        assert is_gone(process)


def test_mixers_and_their_norms_in_processes(tmp_path: Path) -> None:
    """Heads of attention and of mixers, whose norms add over both processes; a file goes through
    one."""
    fields = {"mamba_n_groups": 1, "mamba_rms_norm": True}
    path = make_family("falcon-h1", tmp_path / "falcon", **fields).path
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MiB", "device": "cpu"}
    found = []
    for size in (1, 2):
        with LLM(path, tensor_parallel_size=size, **options) as llm, llm.session(random_tokens(30)) as session:
            found.append(session.generate(greedy(8)).outputs[0].token_ids)
            session.save(tmp_path / f"{size}.kv")
    assert found[0] == found[1]
    with LLM(path, **options) as llm, llm.load_session(tmp_path / "2.kv") as session:
        session.save(tmp_path / "again.kv")
    assert (tmp_path / "again.kv").read_bytes() == (tmp_path / "2.kv").read_bytes()
