"""Long random use of many sessions at once in a small pool: whatever happened, a session continues
as a fresh run would.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.small_llms import BYTES_PER_TOKEN, Checkpoint, MakeLLM, check, greedy, random_tokens

from quire import LLM, QuireError, SamplingParams, Session

MAX_LENGTH = 70


class Conversations:
    """Sessions and, beside each, the tokens that it must hold."""

    def __init__(self, llm: LLM, checkpoint: Checkpoint, seed: int, folder: Path) -> None:
        self.llm, self.checkpoint, self.folder = llm, checkpoint, folder
        self.rng = random.Random(seed)
        self.sessions: list[tuple[Session, list[int]]] = []
        self.files = 0

    def tokens(self, most: int) -> list[int]:
        # Few different beginnings, so that conversations share prefixes.
        return random_tokens(self.rng.randint(1, most), seed=self.rng.randint(0, 3))

    def pick(self) -> tuple[Session, list[int]]:
        if not self.sessions or (len(self.sessions) < 7 and self.rng.random() < 0.2):
            tokens = random_tokens(60, seed=self.rng.randint(0, 2))[: self.rng.randint(1, 40)]
            self.sessions.append((self.llm.session(tokens), tokens))
        return self.rng.choice(self.sessions)

    def append(self) -> None:
        session, tokens = self.pick()
        new = self.tokens(12)
        if len(tokens) + len(new) <= MAX_LENGTH:
            session.append(new)
            tokens += new

    def generate(self) -> None:
        session, tokens = self.pick()
        count = self.rng.randint(1, 6)
        found = session.generate(greedy(count)).outputs[0].token_ids
        assert len(found) == count
        assert self.checkpoint.continues(tokens, found)
        tokens += found

    def sample(self) -> None:
        session, tokens = self.pick()
        params = SamplingParams(temperature=1.5, seed=self.rng.randint(0, 9), max_tokens=5, stop_token_ids=[3, 4])
        output = session.generate(params).outputs[0]
        tokens += output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids

    def stream_and_leave(self) -> None:
        session, tokens = self.pick()
        before = list(tokens)
        stream = session.stream(greedy(5))
        leave = self.rng.randint(1, 3)
        for _, delta in zip(range(leave), stream, strict=False):
            tokens += delta.token_ids
        stream.close()
        assert len(tokens) == len(before) + leave
        assert self.checkpoint.continues(before, tokens[len(before) :])

    def fork(self) -> None:
        session, tokens = self.pick()
        if len(self.sessions) < 10:
            at = self.rng.randint(1, len(tokens))
            self.sessions.append((session.fork(at=at), tokens[:at]))

    def rewind(self) -> None:
        session, tokens = self.pick()
        to = self.rng.randint(1, len(tokens))
        session.rewind(to=to)
        del tokens[to:]

    def edit(self) -> None:
        session, tokens = self.pick()
        start = self.rng.randint(0, len(tokens))
        stop = self.rng.randint(start, min(len(tokens), start + 12))
        new = self.tokens(12) if self.rng.random() < 0.7 else []
        length = len(tokens) + len(new) - (stop - start)
        if not 1 <= length <= MAX_LENGTH:
            return
        report = session.edit(range(start, stop), new)
        assert (report.removed, report.added, report.exact) == (stop - start, len(new), True)
        assert 0 <= report.replayed < length
        tokens[start:stop] = new

    def score(self) -> None:
        session, tokens = self.pick()
        new = self.tokens(9)
        logits, bound = self.checkpoint.exact_logits(tokens + new)
        wanted = logits[len(tokens) - 1 : -1].log_softmax(-1)[range(len(new)), new]
        found = torch.tensor(session.score(new), dtype=torch.float64)
        # A score is the difference of two values, of which each is off by the bound of a logit at
        # most.
        assert float((found - wanted).abs().max()) <= 2 * bound

    def logits(self) -> None:
        session, tokens = self.pick()
        assert session.logits().argmax() == self.checkpoint.logits(tokens)[-1].argmax()

    def save_and_load(self) -> None:
        session, tokens = self.pick()
        self.files += 1
        if self.rng.random() < 0.5:
            loaded = self.llm.session_from_bytes(session.to_bytes())
        else:
            path = self.folder / f"{self.files}.quire"
            session.save(path)
            loaded = self.llm.load_session(path)
        if len(self.sessions) < 10:
            self.sessions.append((loaded, list(tokens)))
        else:
            assert loaded.tokens == tokens
            loaded.close()

    def serve_others(self) -> None:
        prompts = [random_tokens(60, seed=self.rng.randint(0, 2))[: self.rng.randint(1, 60)] for _ in range(3)]
        found = self.llm.generate(prompts, greedy(6))
        assert all(
            self.checkpoint.continues(p, out.outputs[0].token_ids) for p, out in zip(prompts, found, strict=True)
        )

    def cancel(self) -> None:
        session, tokens = self.pick()
        stream = session.stream(greedy(6))
        tokens += next(stream).token_ids
        assert session.cancel()
        for delta in stream:
            tokens += delta.token_ids
            assert delta.finish_reason in (None, "cancelled")

    def refused(self) -> None:
        session, tokens = self.pick()
        calls: list[Callable[[], object]] = [
            lambda: session.append([97]),
            lambda: session.rewind(to=len(tokens) + 1),
            lambda: session.fork(at=-1),
            lambda: session.edit((0, len(tokens) + 1), [3]),
            lambda: session.edit((0, 1), random_tokens(300)),
            lambda: session.edit((0, 0), [97]),
            lambda: session.generate(greedy(5000)),
            lambda: session.append(random_tokens(300)),
        ]
        with pytest.raises(QuireError):
            self.rng.choice(calls)()

    def close(self) -> None:
        session, _tokens = self.pick()
        if len(self.sessions) > 3:
            self.sessions = [entry for entry in self.sessions if entry[0] is not session]
            session.close()

    def step(self) -> None:
        session = None
        verbs = [self.append, self.generate, self.generate, self.sample, self.stream_and_leave, self.fork, self.fork]
        verbs += [
            self.rewind,
            self.edit,
            self.edit,
            self.score,
            self.logits,
            self.save_and_load,
            self.serve_others,
            self.cancel,
        ]
        verbs += [self.refused, self.close]
        # Room for what a verb adds.
        for session, tokens in self.sessions:
            if len(tokens) > MAX_LENGTH - 8:
                session.rewind(to=20)
                del tokens[20:]
        self.rng.choice(verbs)()
        check(self.llm)
        for session, tokens in self.sessions:
            assert session.tokens == tokens

    def finish(self) -> None:
        for session, tokens in self.sessions:
            found = session.generate(greedy(4)).outputs[0].token_ids
            assert len(found) == 4
            assert self.checkpoint.continues(tokens, found)
            session.close()


def run(
    make_llm: MakeLLM,
    checkpoint: Checkpoint,
    seed: int,
    steps: int,
    folder: Path,
    *,
    bytes_per_token: int = BYTES_PER_TOKEN,
    state_bytes: int = 0,
) -> None:
    rng = random.Random(seed)
    page_size = rng.choice([1, 3, 4, 8, 16])
    pool = rng.choice([96, 160, 256])
    llm = make_llm(
        checkpoint,
        kv_cache_memory=pool * bytes_per_token + 2 * rng.choice([12, 24]) * state_bytes,
        page_size=page_size,
        max_num_batched_tokens=rng.choice([5, 16, 512]),
        enable_prefix_caching=rng.random() < 0.75,
        checkpoint_interval=rng.choice([None, 0, page_size, 3 * page_size]) if state_bytes else None,
    )
    conversations = Conversations(llm, checkpoint, seed, folder)
    for _ in range(steps):
        conversations.step()
    conversations.finish()


@pytest.mark.product(8)
@pytest.mark.parametrize("seed", range(4))
def test_conversations(make_llm: MakeLLM, checkpoint: Checkpoint, seed: int, tmp_path: Path) -> None:
    run(make_llm, checkpoint, seed, 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_long_conversations(make_llm: MakeLLM, checkpoint: Checkpoint, seed: int, tmp_path: Path) -> None:
    run(make_llm, checkpoint, seed, 400, tmp_path)
