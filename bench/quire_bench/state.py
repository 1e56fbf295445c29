"""Costs of the state: fork, copy, rewind, save and restore; a second chat turn; start-up.

If a model cannot do a verb (rewind behind its windows, say), its row gives the reason.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from quire.base.errors import FailedPrecondition, InvalidArgument, QuireError, ResourceExhausted, Unsupported
from quire.base.sampling_params import SamplingParams
from quire.contracts.executor import ExecutorInputs, TextData
from quire.executor.llm_executor import LlmExecutor
from quire.llm import LLM
from quire.sessions.session import Session
from quire_bench.latency import synchronize
from quire_bench.reports import print_json, print_table, random_prompts

T = TypeVar("T")

LEAST_TOKENS = 32
BACK = 16
"""Tokens of a rewind."""
HISTORY = 2000
"""Tokens before the second turn of the chat, or fewer in a short context."""
TURN, ANSWER = 20, 16
"""Tokens of the second turn's prompt, and of each answer."""
QUICK = 20
"""Measurements of a quick verb per measurement of a slow one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measurement in seconds; None without one."""

    what: str
    median_seconds: float | None = None
    best_seconds: float | None = None
    note: str = ""

    def shown(self) -> dict[str, str]:
        """Return the cells of a table."""
        return {
            "what": self.what,
            "median": duration(self.median_seconds),
            "best": duration(self.best_seconds),
            "note": self.note,
        }


def duration(seconds: float | None) -> str:
    """Format to three digits in a fitting unit; blank for None."""
    if seconds is None:
        return ""
    factor, unit = next((pair for pair in ((1.0, "s"), (1e3, "ms")) if seconds * pair[0] >= 1), (1e6, "µs"))
    scaled = seconds * factor
    return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"


def nothing() -> None:
    """Prepare nothing."""


class Timer:
    """Times calls, each after its preparation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, including its work on the device."""
        synchronize(self.device)
        started = time.perf_counter()
        call()
        synchronize(self.device)
        return time.perf_counter() - started

    def row(
        self,
        what: str,
        count: int,
        call: Callable[[T], object],
        *,
        prepare: Callable[[], T],
        note: Callable[[], str] = lambda: "",
    ) -> Row:
        """Time ``count`` calls, each on a result of ``prepare``, which is not timed."""
        times = []
        for _ in range(count):
            given = prepare()
            times.append(self.seconds(lambda given=given: call(given)))  # type: ignore[misc]
        return Row(what=what, median_seconds=statistics.median(times), best_seconds=min(times), note=note())


def possible(what: str, measure: Callable[[], Row]) -> Row:
    """Return the row of ``measure``, or a row with the reason why it failed."""
    try:
        return measure()
    except (FailedPrecondition, ResourceExhausted, Unsupported) as error:
        return Row(what=what, note=f"not measured: {error}")


# -- one long sequence -------------------------------------------------------------------------


def state_rows(llm: LLM, tokens: int, rounds: int) -> list[Row]:
    """Measure fork, deep copy, rewind, save and restore of a sequence of ``tokens`` tokens."""
    ids = random_prompts(1, tokens, llm.model.vocab_size)[0].tolist()
    timer, quick = Timer(llm.model.device), QUICK * rounds
    # Measured first, so that the pool need not hold the tokens twice.
    name = "KVCache.deep_copy"
    copy = possible(name, lambda: deep_copy_row(llm, timer, name, ids, quick))
    opened: list[Session] = []
    prefill = timer.seconds(lambda: opened.append(llm.session(ids, pin=True)))
    session = opened[0]
    rows = [Row(what=f"prefill of {tokens} tokens", median_seconds=prefill)]
    rows += fork_rows(llm, timer, session, quick)
    rows += [copy, rewind_row(llm, timer, session, quick)]
    with tempfile.TemporaryDirectory() as folder:
        rows += file_rows(llm, timer, session, Path(folder) / "long.quire", rounds, prefill)
    return rows


def deep_copy_row(llm: LLM, timer: Timer, name: str, ids: Sequence[int], count: int) -> Row:
    """Measure LiteRT-LM's verb on a cache with all tokens but the last."""
    state, copies = llm.engine.runner.state, list[Any]()
    cache = llm.executor.create_kv_cache(capacity=len(ids))
    try:
        given = ExecutorInputs(text=TextData(token_ids=torch.tensor([list(ids[:-1])])))
        LlmExecutor(llm.executor).prefill(given, cache)
        used = state.num_used_pages
        return timer.row(
            name,
            count,
            lambda _: copies.append(cache.deep_copy()),
            prepare=nothing,
            note=lambda: f"{state.num_used_pages - used} pages taken",
        )
    finally:
        for each in (*copies, cache):
            llm.executor.release_cache(each.cache_id)


def fork_rows(llm: LLM, timer: Timer, session: Session, count: int) -> list[Row]:
    """Measure forks of the session and of its sequence, and taking tokens back from such a fork."""
    runner = llm.engine.runner
    state, children = runner.state, list[Session]()
    used, splits = state.num_used_pages, state.num_splits
    rows = [
        timer.row(
            "Session.fork",
            count,
            lambda _: children.append(session.fork()),
            prepare=nothing,
            note=lambda: f"{state.num_used_pages - used} pages taken, {state.num_splits - splits} copied",
        )
    ]
    for child in children:
        child.close()

    parent, sequences = held_sequence(session), list[int]()

    def fork(seq: int) -> None:
        state.fork_sequence(parent, seq)
        sequences.append(seq)

    rows.append(
        timer.row("fork_sequence", count, fork, prepare=runner.new_seq, note=lambda: "the verb of the KV state")
    )
    # A window keeps at least the tokens of the last forward, which is one token or more.
    back = min(BACK, state.sequence_length(parent) - first_position(llm, session))
    forks = iter(sequences)
    rows.append(timer.row(f"popn of {back}", count, lambda seq: state.popn(seq, back), prepare=lambda: next(forks)))
    for seq in sequences:
        state.remove_sequence(seq)
    return rows


def rewind_row(llm: LLM, timer: Timer, session: Session, count: int) -> Row:
    """Measure rewinds in a fork of the session, as far as windows allow without new runs."""
    lowest = first_position(llm, session)
    back = min(BACK, len(session) - lowest)
    children: list[Session] = []

    def child() -> Session:
        while children:
            children.pop().close()
        children.append(session.fork())
        return children[0]

    row = timer.row(
        f"Session.rewind by {back}",
        count,
        lambda given: given.rewind(n=back),
        prepare=child,
        note=lambda: f"its windows leave positions from {lowest} on within reach" if lowest else "",
    )
    children.pop().close()
    return row


def file_rows(llm: LLM, timer: Timer, session: Session, path: Path, rounds: int, prefill: float) -> list[Row]:
    """Measure saves and restores; the session is closed in between."""
    saved = timer.row(
        "save",
        rounds,
        lambda _: session.save(path),
        prepare=nothing,
        note=lambda: f"{path.stat().st_size / 2**20:.1f} MiB, synced",
    )
    session.close()
    restored: list[Session] = []

    def close_last() -> None:
        while restored:
            restored.pop().close()

    row = timer.row("restore", rounds, lambda _: restored.append(llm.load_session(path)), prepare=close_last)
    close_last()
    ratio = prefill / (row.median_seconds or prefill)
    note = f"{ratio:.1f} times as fast as prefill"
    return [saved, Row(what=row.what, median_seconds=row.median_seconds, best_seconds=row.best_seconds, note=note)]


def held_sequence(session: Session) -> int:
    """Return a session's sequence, which a pinned session keeps after a run."""
    seq = session.sequence_id
    if seq is None:
        raise QuireError("the session has no state in the pool")
    return seq


def first_position(llm: LLM, session: Session) -> int:
    """Return the start of the last run of reachable positions; 0 without windows."""
    return llm.engine.runner.state.reachable(held_sequence(session))[-1].start


# -- a chat, and start-up ----------------------------------------------------------------------


def chat_row(llm: LLM, history: int) -> Row:
    """Measure a second turn on a long history."""
    vocab = llm.model.vocab_size
    ids = random_prompts(1, history, vocab, seed=7)[0].tolist()
    one = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    started = time.perf_counter()
    first = llm.generate(ids, one)[0]
    cold = time.perf_counter() - started
    turn = [*ids, *first.outputs[0].token_ids, *random_prompts(1, TURN, vocab, seed=8)[0].tolist()]
    started = time.perf_counter()
    second = llm.generate(turn, one)[0]
    warm = time.perf_counter() - started
    cached, prompt = second.num_cached_tokens, len(second.prompt_token_ids)
    note = f"{cached} of {prompt} prompt tokens cached, {prompt - cached} run; first turn {duration(cold)}"
    return Row(what=f"second turn on {history} tokens", median_seconds=warm, note=note)


def second_turn_row(llm: LLM) -> Row:
    """Measure a second turn on the longest history that fits with both turns."""
    longest = llm.engine.max_model_len
    history = min(HISTORY, longest - 2 * ANSWER - TURN)
    if history < 1:
        return Row(what="second turn", note=f"not measured: the context ends at {longest}")
    return possible(f"second turn on {history} tokens", lambda: chat_row(llm, history))


def start_rows(rounds: int, model: str | None = None) -> list[Row]:
    """Measure imports, and ``quire generate`` to the first token: from the start of its process,
    and beyond a process that imports torch alone, in turns."""
    alone = "import time; t = time.perf_counter(); import quire; print(time.perf_counter() - t)"
    after = "import time, torch; t = time.perf_counter(); import quire; from quire import LLM; print(time.perf_counter() - t)"
    generate = [sys.executable, "-m", "quire.cli.main", "generate", "def main():", "--max-tokens", "4"]
    generate += [] if model is None else ["--model", model]
    torch_alone = [sys.executable, "-c", "import torch; print()"]
    imports: dict[str, list[float]] = {alone: [], after: []}
    firsts, beyond = [], []
    for _ in range(rounds):
        for code, found in imports.items():
            printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            found.append(float(printed))
        firsts.append(seconds_to_output(generate))
        beyond.append(firsts[-1] - seconds_to_output(torch_alone))
    note = f"from the start of the process, {model or 'bundled model'}"
    measured = [
        ("import quire", imports[alone], ""),
        ("import quire and LLM, after torch", imports[after], ""),
        ("quire generate, first token", firsts, note),
        ("the same, after torch", beyond, "less what a process takes that imports torch"),
    ]
    return [
        Row(what=what, median_seconds=statistics.median(found), best_seconds=min(found), note=note)
        for what, found, note in measured
    ]


def seconds_to_output(command: Sequence[str]) -> float:
    """Return the seconds from the start of a process to the first byte of its output."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        seconds = time.perf_counter() - started
        process.communicate()
    if process.returncode:
        raise QuireError(f"{' '.join(command)} ended with exit code {process.returncode}")
    return seconds


# -- all of it ---------------------------------------------------------------------------------


def run_state(
    model: str,
    *,
    engine_options: Mapping[str, Any],
    tokens: int = 2048,
    rounds: int = 5,
    start: Callable[[int], list[Row]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure, print a table and one JSON line, and return the line's content.

    Args:
        model: as for ``LLM``.
        engine_options: keywords of ``LLM``.
        tokens: of the long sequence.
        rounds: repetitions of slow verbs; quick ones have ``QUICK`` times as many.
        start: measures the start-up in this many rounds; None leaves it out.
        facts: further content of the line.

    Raises:
        InvalidArgument: too few tokens or rounds, or more tokens than the model's context.
    """
    for name, value, least in (("tokens", tokens, LEAST_TOKENS), ("rounds", rounds, 1)):
        if value < least:
            raise InvalidArgument(f"{name} {value}; at least {least} is needed")
    with LLM(model, **engine_options) as llm:
        longest = llm.engine.max_model_len
        if tokens > longest:
            raise InvalidArgument(f"tokens {tokens}; the context ends at {longest}, so at most that many are possible")
        rows = [] if start is None else start(rounds)
        rows += state_rows(llm, tokens, rounds)
        rows.append(second_turn_row(llm))
        dtype, device = str(llm.model.dtype).removeprefix("torch."), str(llm.model.device)
        print(
            f"{model}: {llm.model.architecture}, {llm.model.num_parameters / 1e6:.0f}M parameters, {dtype} on {device}"
        )
    print_table([row.shown() for row in rows])
    result = {"benchmark": "state", "model": model, "dtype": dtype, "device": device, "tokens": tokens}
    result |= {"rounds": rounds, **(facts or {}), "rows": [asdict(row) for row in rows]}
    print_json(result)
    return result
