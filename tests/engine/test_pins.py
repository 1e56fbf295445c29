"""Pinned sessions of an account never hold more than its share, nor all together more than theirs,
at any step; and what is refused changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens

from quire import LLM, FailedPrecondition, ResourceExhausted
from quire.base.errors import PoolExhausted, QuotaExceeded
from quire.base.hints import PinAccount
from quire.engine.request import Request
from quire.sessions import generation
from quire.sessions.session import Session


def pages_of(llm: LLM, sessions: Iterable[Session]) -> list[int]:
    """Different pages of each pool that sessions hold now, counted page by page; of recurrent
    states the present ones.
    """
    engine = engine_of(llm)
    state = engine.runner.state
    seqs = []
    for session in sessions:
        found = (session._branch.present.seq, session._branch.undo_fork)
        seqs += [seq for seq in found if seq is not None]
    counts = []
    for index in range(len(state.sequences.pools)):
        pages = {int(page) for seq in seqs for page in state.sequences.get(seq).tables[index].pages if page >= 0}
        counts.append(len(pages))
    if state.parts.recurrent is not None:
        table = state.parts.recurrent.table
        counts.append(len({table._sequences[seq].present for seq in seqs} - {-1}))
    return counts


def limits_of(llm: LLM, share: float) -> list[int]:
    return [int(size * share) for size in engine_of(llm).runner.state.pool_sizes()]


def within(llm: LLM, sessions: Iterable[Session], share: float) -> bool:
    return all(have <= most for have, most in zip(pages_of(llm, sessions), limits_of(llm, share), strict=True))


class Life:
    """Random calls on sessions of two accounts, several of them under way at a time."""

    SHARE, TOTAL = 0.3, 0.5

    def __init__(self, llm: LLM, seed: int, written: bytes | None = None) -> None:
        """``written``: a state file of a state that somebody wrote into."""
        self.written = written
        self.llm, self.rng = llm, random.Random(seed)
        self.accounts = [PinAccount(share=self.SHARE, total=self.TOTAL) for _ in range(2)]
        self.sessions: list[Session] = []
        self.running: list[tuple[Session, Request]] = []
        self.refused: set[type[Exception]] = set()

    def look(self) -> None:
        pinned = [one for one in self.sessions if one.pinned]
        for account in self.accounts:
            assert within(self.llm, [one for one in pinned if one._branch.account is account], self.SHARE)
        assert within(self.llm, pinned, self.TOTAL)

    def idle(self) -> Session | None:
        found = [one for one in self.sessions if not one._branch.busy]
        return self.rng.choice(found) if found else None

    def step(self) -> None:
        engine = engine_of(self.llm)
        for _ in range(self.rng.randint(1, 4)):
            engine.step()
            self.look()
        for session, request in [one for one in self.running if one[1].finished]:
            # What is pinned takes its room from others.
            assert request.output.error is None or not session.pinned
            self.running.remove((session, request))

    def act(self, session: Session | None) -> None:
        rng = self.rng
        choices = ["make", "append", "generate", "generate", "fork", "rewind", "close", "step"]
        choice = rng.choice(choices if self.written is None else [*choices, "load"])
        if choice == "step" or (session is None and choice not in ("make", "load")):
            self.step()
        elif choice == "make":
            made = self.llm.session(random_tokens(rng.randint(1, 50), seed=rng.randint(0, 5)))
            self.sessions.append(made)
            if rng.random() < 0.8:
                made.pin(rng.choice(self.accounts))
        elif choice == "load":
            assert self.written is not None
            loaded = self.llm.session_from_bytes(self.written)
            try:
                loaded.pin(rng.choice(self.accounts))
            except BaseException:
                loaded.close()
                raise
            self.sessions.append(loaded)
        else:
            assert session is not None
            tokens = session._branch.tokens.ids
            if choice == "close":
                session.close()
                self.sessions.remove(session)
            elif choice == "rewind":
                session.rewind(to=rng.randint(1, len(session)))
            elif choice == "fork":
                self.sessions += session.fork(at=rng.randint(1, len(session)), n=rng.randint(1, 3))
            elif choice == "append":
                session.append(random_tokens(rng.randint(1, 40), seed=rng.randint(0, 99)))
            else:
                self.running.append((session, generation.submit(session._live, tokens, greedy(rng.randint(1, 50)))))

    def live(self, count: int) -> None:
        for _ in range(count):
            session = self.idle()
            before = None if session is None else (session.tokens, session.pinned)
            try:
                self.act(session)
            except (QuotaExceeded, PoolExhausted) as error:
                self.refused.add(type(error))
                assert session is None or (session.tokens, session.pinned) == before
            except FailedPrecondition:
                assert session is not None
                assert session.modified  # whose way back a window has taken
            self.look()
        engine_of(self.llm).run([request for _, request in self.running])
        check(self.llm)
        for session in self.sessions:
            session.close()


@pytest.mark.turns(6)
@pytest.mark.parametrize("seed", range(2))
def test_no_step_passes_a_share(make_llm: MakeLLM, checkpoint: Checkpoint, seed: int) -> None:
    llm = make_llm(checkpoint, pool=480, page_size=4, max_num_batched_tokens=24, max_num_seqs=8)
    with llm.session(random_tokens(30)) as session:
        session.set_kv(0, v=torch.zeros(5, 2, 16), start=20)
        written = session.to_bytes()
    life = Life(llm, seed, written)
    life.live(120)
    assert life.refused == {QuotaExceeded, PoolExhausted}


def test_no_step_passes_a_share_of_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    life = Life(make_llm(hybrid, kv_cache_memory="1MiB", page_size=4, max_num_batched_tokens=24, max_num_seqs=8), 0)
    life.live(80)


def test_windows_count_what_they_keep(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """A session that runs on for ever holds no more than its window, and that is what its account
    is asked for.
    """
    llm = make_llm(llama, pool=480, page_size=4, max_num_batched_tokens=24)
    account = PinAccount(share=0.2, total=1.0)
    with llm.session(random_tokens(40), window=32, sink=4) as session:
        session.pin(account)
        for _ in range(8):
            session.generate(greedy(60))
            assert within(llm, [session], 0.2)
        assert len(session) == 520
    with llm.session(random_tokens(40)) as session:
        session.pin(account)
        with pytest.raises(QuotaExceeded):
            session.generate(greedy(60))


def test_the_messages_say_what_is_held_and_what_may_be(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=480, page_size=4)
    mine, other = PinAccount(share=0.25, total=0.4), PinAccount(share=0.25, total=0.4)
    first = llm.session(random_tokens(101))
    first.pin(mine)  # 26 pages of 120, of which 30 are the account's and 48 are for all
    with pytest.raises(QuotaExceeded, match=r"would hold 50 of 120 pages, and may hold 30; .*max_tokens"):
        first.generate(greedy(99))
    assert (len(first), first.pinned) == (101, True)
    second = llm.session(random_tokens(101, seed=1))
    with pytest.raises(QuotaExceeded, match=r"would hold \d+ of 120 pages, and may hold 30"):
        second.pin(mine)
    with pytest.raises(
        PoolExhausted, match=r"all pinned sessions and prompts would hold \d+ of 120 pages, and may hold 48"
    ):
        second.pin(other)
    assert not second.pinned
    second.generate(greedy(99))  # not pinned, it is nobody's business
    # Children share their parent's pages, and count once.
    children = first.fork(n=8)
    assert all(child.pinned for child in children)
    assert within(llm, [first, *children], 0.25)
    children[0].append(random_tokens(3))  # 102 tokens are computed, and the last page of 25 and a bit is copied
    for child in children[1:4]:
        with pytest.raises(QuotaExceeded):
            child.append(random_tokens(19))
    # What a parent held is held for its children when it is gone.
    first.close()
    with pytest.raises(QuotaExceeded):
        llm.session(random_tokens(90, seed=3)).pin(mine)
    for child in children:
        child.close()
    second.rewind(to=90)
    second.pin(mine)
    second.unpin()
    assert not second.pinned
    second.close()


def test_a_page_that_is_copied_counts(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=480, page_size=4)
    account = PinAccount(share=3.5 / 120, total=1.0)
    session = llm.session(random_tokens(10))
    session.pin(account)  # 9 tokens are computed: the last of three pages holds one
    child = session.fork()
    with pytest.raises(QuotaExceeded, match="would hold 4 of 120 pages, and may hold 3"):
        child.append(random_tokens(1))
    session.close()
    child.append(random_tokens(1))  # now the page is its own
    assert pages_of(llm, [child]) == [3]
    child.close()


def test_a_written_state_stays_pinned_and_counts(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=480, page_size=4)
    account = PinAccount(share=0.1, total=1.0)
    session = llm.session(random_tokens(30))
    session.set_kv(0, v=torch.zeros(5, 2, 16), start=20)
    with pytest.raises(FailedPrecondition, match="set_kv"):
        session.unpin()
    session.pin(account)
    with pytest.raises(QuotaExceeded):
        session.append(random_tokens(40))
    session.append(random_tokens(4))
    with llm.session_from_bytes(session.to_bytes()) as loaded:
        assert loaded.pinned
        with pytest.raises(QuotaExceeded):
            loaded.pin(account)


def test_a_pool_that_others_hold_is_not_one_that_is_too_small(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama, pool=240, page_size=4)
    pinned = llm.session(random_tokens(150), pin=True)
    (output,) = llm.generate([random_tokens(120, seed=1)], greedy(4))
    failure = output.outputs[0].failure
    assert type(failure) is PoolExhausted
    assert "nothing left to give up" in str(failure)
    with pytest.raises(PoolExhausted):
        llm.session(random_tokens(120, seed=1))
    pinned.close()
    assert llm.generate([random_tokens(120, seed=1)], greedy(4))[0].outputs[0].finish_reason == "length"
    with pytest.raises(ResourceExhausted) as error:
        llm.generate([random_tokens(120)], greedy(130))
    assert type(error.value) is ResourceExhausted
