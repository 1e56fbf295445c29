"""What is shown of the state is what the state is: after every one of many random operations all
views are compared with page tables, reference counts, token histories and ``page_use``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.test_page_use import Traffic, kinds_of_pages
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, make_family, random_tokens

from quire import LLM, Session
from quire.base.errors import FailedPrecondition
from quire.base.token_history import TokenHistory, common_prefix
from quire.base.types import SeqId
from quire.contracts.executor import PrefillInput
from quire.contracts.views import OWNER_NAMES, HistoryNode, HistoryView, PoolView
from quire_inspector.views.state_reading import ReadBranch, _ids_of
from quire_inspector.views.state_views import ReadState
from quire_inspector.views.viewer import EVERYBODY


@pytest.fixture(scope="session")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model whose layers keep one row per token."""
    return make_family("deepseek-v3", tmp_path_factory.mktemp("latent"))


def named_by(llm: LLM) -> list[dict[SeqId, dict[int, set[int]]]]:
    """For each pool and sequence, the positions at which it names each page."""
    state = engine_of(llm).runner.state
    found: list[dict[SeqId, dict[int, set[int]]]] = []
    for index in range(len(state.sequences.pools)):
        found.append({})
        for seq in state.sequences.ids:
            pages = state.sequences.get(seq).tables[index].pages.tolist()
            found[-1][seq] = {page: {place * state.page_size} for place, page in enumerate(pages) if page >= 0}
    if state.parts.recurrent is not None:
        found.append({})
        for seq, states in state.parts.recurrent.table._sequences.items():
            slots: dict[int, set[int]] = {}
            for position, slot in (
                (states.length, states.present),
                *states.kept.items(),
                *states.ring.items(),
                *((states.length, slot) for slot in states.nodes),
            ):
                if slot >= 0:
                    slots.setdefault(slot, set()).add(position)
            found[-1][seq] = slots
    return found


def check_pools(llm: LLM, state: ReadState) -> None:
    engine = engine_of(llm)
    views = [llm.views.pages(pool, state=state) for pool in range(len(state.reading.facts))]
    kv = engine.runner.state
    use = engine.page_use()
    counts = {name: sum(view.counts[name] for view in views) for name in OWNER_NAMES}
    assert counts == {name: getattr(use, name) for name in OWNER_NAMES}
    assert llm.views.overview(state).use == {"total": use.total, **counts}
    pools = [*kv.sequences.pools, *([] if kv.parts.recurrent is None else [kv.parts.recurrent.table.pool])]
    named = named_by(llm)
    assert len(views) == len(pools) == len(named)
    ids = {view.id: branch.seq for branch, view in state.branches.shown(EVERYBODY)}
    for view, pool, kinds, by_seq in zip(views, pools, kinds_of_pages(llm), named, strict=True):
        assert view.references.tolist() == pool.references.tolist()
        assert [OWNER_NAMES[owner] for owner in view.owner.tolist()] == kinds
        names = {seq: pages for seq, pages in by_seq.items() if pages}
        assert {ids[branch] for branch in view.branches} == set(names)
        for page, kind in enumerate(kinds):
            holder, position = int(view.holder[page]), int(view.position[page])
            if kind == "free":
                assert (holder, position, int(view.eviction[page])) == (-1, -1, -1)
                continue
            assert position in names[ids[view.branches[holder]]][page]
            assert (view.eviction[page] >= 0) == (kind == "evictable")
        check_some_pages(llm, state, view, names)


def check_some_pages(llm: LLM, state: ReadState, view: PoolView, names: dict[SeqId, dict[int, set[int]]]) -> None:
    """The pages with most holders, and a free one."""
    ids = {view.id: branch for branch, view in state.branches.shown(EVERYBODY)}
    for page in {int(view.references.argmax()), int(view.references.argmin())}:
        found = llm.views.page(view.pool, page, state=state)
        assert found.references == view.references[page] == len(found.holders)
        assert found.owner == OWNER_NAMES[view.owner[page]]
        assert {(ids[one.branch].seq, one.start) for one in found.holders} == {
            (seq, position) for seq, pages in names.items() for position in pages.get(page, ())
        }
        if found.holders and found.holders[0].role is None:
            first = found.holders[0]
            branch = ids[first.branch]
            assert [one.position for one in found.tokens] == list(range(first.start, min(first.stop, branch.length)))
            assert [one.id for one in found.tokens] == branch.ids(first.start, first.stop).tolist()


def check_branches(llm: LLM, state: ReadState, sessions: list[Any]) -> None:
    kv = engine_of(llm).runner.state
    shown = state.branches.shown(EVERYBODY)
    assert sorted(branch.seq for branch, _ in shown if branch.seq is not None) == sorted(kv.sequences.ids)
    assert len({view.id for _, view in shown}) == len(shown)
    for branch, view in shown:
        assert view.id == branch.id
        assert view.num_tokens == branch.length == branch.ids().size
        if branch.seq is None:
            assert (view.pages, view.computed, view.held) == (0, 0, ())
            continue
        holding = kv.sequence_pages(branch.seq)
        assert (view.pages, view.shared_pages) == (holding.held, holding.shared)
        assert list(view.reachable) == kv.reachable(branch.seq)
        assert view.computed == kv.sequence_length(branch.seq)
        if kv.parts.recurrent is not None and view.computed:
            assert [0, *view.checkpoints] == kv.kept_positions(branch.seq)
        for held in view.held:
            layer = state.reading.facts[held.pool].layers[0]
            assert list(held.ranges) == kv.held(branch.seq, layer)
    by_number = {branch.number: (branch, view) for branch, view in shown if branch.kind == "session"}
    assert len(by_number) == len(sessions)
    for session in sessions:
        branch, view = by_number[session.number]
        assert branch.given(0, branch.length)[: len(session)] == session.tokens
        assert (view.pinned, view.modified, view.exact) == (session.pinned, session.modified, session.exact)
        assert (view.name, view.busy) == (session.name, session._branch.busy)


def tree_of(view: HistoryView) -> dict[str, list[tuple[int, str]]]:
    """The nodes on the way to each branch, as (end, node)."""
    ways: dict[str, list[tuple[int, str]]] = {}
    found: dict[str, list[tuple[int, str]]] = {}
    for node in view.nodes:
        if node.parent is None:
            assert (node.start, node.end) == (0, 0)
            assert node.key is not None
            ways[node.id] = []
        else:
            assert ways[node.parent] == [] or ways[node.parent][-1][0] == node.start
            assert node.start < node.end
            ways[node.id] = [*ways[node.parent], (node.end, node.id)]
        found |= dict.fromkeys(node.branches, ways[node.id])
    assert len({node.id for node in view.nodes}) == len(view.nodes)
    return found


def check_history(llm: LLM, state: ReadState) -> None:
    view = llm.views.history(state=state)
    branches: dict[str, ReadBranch] = {one.id: one for one in state.reading.branches if one.key is not None}
    ways = tree_of(view)
    assert ways.keys() == branches.keys()
    roots = {}
    for node in view.nodes:
        roots[node.id] = node.id if node.parent is None else roots[node.parent]
    for name, way in ways.items():
        assert (way[-1][0] if way else 0) == branches[name].length
    ends = {name: next(node.id for node in view.nodes if name in node.branches) for name in ways}
    for one, other in combinations(ways, 2):
        a, b = branches[one], branches[other]
        together = [x[0] for x, y in zip(ways[one], ways[other], strict=False) if x == y]
        same_tree = roots[ends[one]] == roots[ends[other]]
        assert same_tree == (a.key == b.key and bool(a.length) == bool(b.length))
        assert (together[-1] if together else 0) == (common_prefix(a.ids(), b.ids()) if same_tree else 0)


def watched(llm: LLM, seed: int, steps: int) -> None:
    """Compare all views with the state after each of ``steps`` random operations."""
    traffic = Traffic(llm, seed)
    traffic.session(pin=True)
    seen: set[str] = set()
    for _ in range(steps):
        with suppress(FailedPrecondition):  # one that was written into cannot go back everywhere
            traffic.step()
        state = llm.views.state()
        check_pools(llm, state)
        held = [one for one, stream in traffic.running if stream is not None]
        check_branches(llm, state, [*traffic.sessions, *held])
        check_history(llm, state)
        seen |= state.branches.kinds().keys()
    assert {"session", "request", "cached"} <= seen
    check(llm)
    traffic.stop()


@pytest.mark.turns(6)
@pytest.mark.parametrize("seed", [4, 5])
def test_attention(make_llm: MakeLLM, checkpoint: Checkpoint, seed: int) -> None:
    watched(make_llm(checkpoint, pool=2048, page_size=4), seed, 50)


def test_recurrent_states(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    watched(make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=16), 6, 50)


def test_latent_rows(make_llm: MakeLLM, latent: Checkpoint) -> None:
    llm = make_llm(latent, kv_cache_memory="1MiB", page_size=4)
    watched(llm, 7, 40)
    assert {one["kind"] for one in llm.views.overview().document()["layers"]} == {"latent"}


# -- eviction --------------------------------------------------------------------------------------


def test_what_goes_first(make_llm: MakeLLM, llama: Checkpoint) -> None:
    """Sequences are given up in the order that was told, and each time these pages become free."""
    llm = make_llm(llama, pool=2048, page_size=4)
    engine = engine_of(llm)
    traffic = Traffic(llm, 8)
    for _ in range(40):
        traffic.step()
    while traffic.running:
        traffic.end()
    view = llm.views.pages(0)
    turns = int(view.eviction.max()) + 1
    assert turns > 4
    free = view.owner == 0
    for turn in range(turns):
        assert engine.branches.evict() or engine.branches.drop_idle()
        free |= view.eviction == turn
        assert (llm.views.pages(0).owner == 0).tolist() == free.tolist(), f"turn {turn} of {turns}"
    traffic.stop()


def test_what_goes_first_where_windows_forget(make_llm: MakeLLM, checkpoints: dict[str, Checkpoint]) -> None:
    """There the next one is told; it is not always the one used longest ago."""
    llm = make_llm(checkpoints["gemma3"], pool=2048, page_size=4)
    engine = engine_of(llm)
    assert engine.cache is not None
    prompt = random_tokens(60)
    for tokens in (random_tokens(70, seed=3), prompt, [*prompt, 1, 2]):
        llm.generate(tokens, greedy(2))
    odd = 0
    while engine.cache.num_cached:
        views = [llm.views.pages(pool) for pool in range(2)]
        odd += engine.cache.oldest() != engine.cache.next_to_go(1)[0]
        engine.branches.evict()
        for pool, view in enumerate(views):
            gone = (llm.views.pages(pool).owner == 0) & (view.owner != 0)
            assert gone.tolist() == (view.eviction == 0).tolist()
    assert odd, "some time another one goes first"


# -- branches of other kinds -----------------------------------------------------------------------


def test_rows_of_kv_caches(small: LLM) -> None:
    rows = torch.tensor([random_tokens(20), random_tokens(20, 1)])
    found = small.executor.prefill(PrefillInput(input_ids=rows))
    cache = found.kv_cache
    state = small.views.state()
    views = [view for branch, view in state.branches.shown(EVERYBODY) if branch.kind == "cache"]
    assert [view.id for view in views] == [f"cache:{cache.cache_id}.{row}" for row in range(2)]
    assert [view.num_tokens for view in views] == [20, 20]
    pages = small.views.pages(0, state=state)
    assert pages.counts["held"] == small._engine.page_use().held == 4
    assert small.views.text(views[1].id, 3, 5).document()["tokens"] == [
        {"position": position, "id": token, "text": None}
        for position, token in zip((3, 4), random_tokens(20, 1)[3:5], strict=True)
    ]
    small.executor.release_cache(cache.cache_id)
    assert small.views.state().branches.kinds() == {}


def test_sequences_of_nobody(small: LLM) -> None:
    """What no branch claims is shown, too: its pages count."""
    engine = engine_of(small)
    with small.session(random_tokens(20)) as session:
        with engine.lock:
            fork = engine.branches.fork_of(session.sequence_id)
        state = small.views.state()
        check_pools(small, state)
        (loose,) = [one for one in state.reading.branches if one.kind == "other"]
        assert (loose.seq, loose.length, loose.id) == (fork, 19, f"other:{fork}")
        assert loose.key is None
        assert loose.id not in tree_of(small.views.history(state=state))
        with engine.lock:
            engine.branches.remove(fork)


def test_pinned_prefixes(small: LLM) -> None:
    from quire import CacheHints, Pin

    prompt = random_tokens(40)
    small.generate(prompt, greedy(1), hints=CacheHints(pins=[Pin(tokens=20, ttl=600)]))
    views = [view for _, view in small.views.state().branches.shown(EVERYBODY)]
    pinned = [view for view in views if view.pinned]
    assert [(view.kind, view.num_tokens) for view in pinned] == [("cached", 20)]
    assert pinned[0].id.startswith("cached:pin")
    assert small.views.pages(0).counts["pinned"] == 2


@pytest.fixture
def stored(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> Iterator[LLM]:
    """An LLM with a durable tier."""
    llm = make_llm(llama, store=[f"file://{tmp_path}/store"])
    yield llm
    engine_of(llm).flush(10.0)


def test_commits(stored: LLM) -> None:
    tokens = random_tokens(40)
    with stored.session(tokens) as session:
        first = session.commit("main", message="the first one")
        session.append([1, 2, 3])
        second = session.commit("main")
        session.rewind(to=40)
        session.append([4])
        third = session.commit("side", message="another way")
    history = stored.views.history()
    commits = {view.id.removeprefix("commit:"): view for view in history.branches if view.kind == "commit"}
    assert {one: (view.name, view.num_tokens, view.last_commit) for one, view in commits.items()} == {
        first.id: ("the first one", 40, None),
        second.id: ("main", 43, first.id),
        third.id: ("side", 41, second.id),
    }
    assert all((view.pages, view.computed) == (0, 0) for view in commits.values())
    ways = tree_of(history)
    assert [end for end, _ in ways[f"commit:{second.id}"]][-2:] == [40, 43]
    assert ways[f"commit:{first.id}"] == ways[f"commit:{second.id}"][:-1] == ways[f"commit:{third.id}"][:-1]
    found = stored.views.text(f"commit:{second.id}", 39)
    assert [one.id for one in found.tokens] == [tokens[39], 1, 2, 3]
    assert not [view for view in stored.views.history(owner=None).branches if view.kind == "commit"]
    assert not [view for view in stored.views.history(owner="another").branches if view.kind == "commit"]
    assert [one.durable for one in stored.views.tiers().tiers].count(True) == 1
    objects = stored.views.tiers().tiers[-1].objects
    assert objects is not None
    assert objects > 0


def test_a_commit_of_a_session_that_is_shown_is_shown(stored: LLM) -> None:
    """The list of commits is asked again if a session names one that it lacks."""
    with stored.session(random_tokens(40)) as session:
        stored.views.history()
        for length in (40, 41):
            made = session.commit("main", message=f"{length}")
            names = {view.id for view in stored.views.history().branches}
            assert f"commit:{made.id}" in names
            session.append([length])


def test_a_tier_that_fails_hides_no_session(stored: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.base.errors import TierError
    from quire.sessions import commits

    with stored.session(random_tokens(40)) as session:
        made = session.commit("main")
        assert f"commit:{made.id}" in {view.id for view in stored.views.history().branches}

        def fails(*args: object, **more: object) -> None:
            raise TierError("the disk is gone")

        monkeypatch.setattr(commits, "ask", fails)
        monkeypatch.setattr(stored.views.commits, "_clock", lambda: float("inf"))
        kinds = {view.kind for view in stored.views.history().branches}
        assert kinds >= {"commit", "session"}, "those read last are shown"
        monkeypatch.undo()


def test_adapters_and_salts_part_trees(make_llm: MakeLLM, llama: Checkpoint) -> None:
    llm = make_llm(llama)
    prompt = random_tokens(20)
    with llm.session(prompt) as one, llm.session(prompt, cache_salt="a") as two, one.fork() as three:
        history = llm.views.history()
        roots = [node for node in history.nodes if node.parent is None]
        assert [node.key for node in roots] == [{"adapter": None, "salt": None}, {"adapter": None, "salt": "a"}]
        ends = {name: node for node in history.nodes for name in node.branches}
        assert ends[f"session:{one.number}"] is ends[f"session:{three.number}"]
        assert ends[f"session:{two.number}"].parent == roots[1].id


def test_nodes_keep_their_ids(small: LLM) -> None:
    """Also if a run grows at its end, or another branch parts from it."""
    with small.session(random_tokens(20)) as session:
        before = {node.id: (node.start, node.end) for node in small.views.history().nodes}
        session.append([1, 2, 3])
        grown = {node.id: (node.start, node.end) for node in small.views.history().nodes}
        assert grown.keys() == before.keys()
        assert grown != before
        with session.fork(10) as other:
            other.append([7])
            parted = {node.id: (node.start, node.end) for node in small.views.history().nodes}
            assert parted.keys() > grown.keys()
            assert sorted(parted.values()) == [(0, 0), (0, 10), (10, 11), (10, 23)]


# -- looking changes nothing -----------------------------------------------------------------------


def test_looking_changes_nothing(make_llm: MakeLLM, hybrid: Checkpoint) -> None:
    llm = make_llm(hybrid, kv_cache_memory="4MiB", checkpoint_interval=16)
    engine = engine_of(llm)
    traffic = Traffic(llm, 9)
    for _ in range(30):
        traffic.step()
    assert engine.cache is not None

    def everything() -> tuple[Any, ...]:
        kv = engine.runner.state
        assert engine.cache is not None
        return (
            engine.runner.revision,
            list(engine.cache._cached),
            list(engine.branches.sessions),
            [one.tolist() for one in kv.page_references()],
            {seq: kv.kept_positions(seq) for seq in kv.sequence_ids()},
            [session.tokens for session in traffic.sessions],
            engine.page_use(),
            {name: value for name, value in llm.metrics().items() if "seconds" not in name},
        )

    before = everything()
    for _ in range(2):
        state = llm.views.state()
        llm.views.history(state=state)
        for pool in range(len(state.reading.facts)):
            llm.views.pages(pool, state=state)
            llm.views.page(pool, 0, state=state)
    assert everything() == before
    # A history that was looked at may grow, and the view stays as it was.
    session = llm.session(random_tokens(5))
    state = llm.views.state()
    branch = llm.views.branch(f"session:{session.number}", state=state)
    seen = branch.ids().tolist()
    session.rewind(to=2)
    session.append([5])  # written behind the two, in the memory of the others
    assert branch.ids().tolist() == seen == random_tokens(5)
    assert session.tokens == [*random_tokens(5)[:2], 5]
    session.append(random_tokens(9, seed=4))
    assert branch.ids().tolist() == seen
    session.close()
    traffic.stop()


def test_views_of_running_requests(small: LLM) -> None:
    """Samples of a prompt, one that waits, and a session at work."""
    engine = engine_of(small)
    (first, second) = engine.submit(np.array(random_tokens(9)), greedy(30, n=2, temperature=1.0), request_id="two")
    while len(engine.scheduler.running) < 2:
        engine.step()
    (waiting,) = engine.submit(np.array(random_tokens(12, seed=2)), greedy(3), request_id="later")
    session = small.session(random_tokens(6))
    stream = session.stream(greedy(30))
    next(stream)
    found = {view.id: view for _, view in small.views.state().branches.shown(EVERYBODY)}
    assert found.keys() >= {"request:two", "request:two#1", f"session:{session.number}"}
    working = found[f"session:{session.number}"]
    assert working.busy
    assert working.num_tokens > len(session) - 1
    assert small.views.overview().requests["running"] == len(engine.scheduler.running)
    stream.close()
    engine.end([first, second, waiting])
    session.close()


def test_ends_of_long_runs(python_llm: LLM) -> None:
    """Heads and tails are texts of 80 characters, and a head covers a run whole that is shorter
    than both.
    """
    tokenizer = python_llm.tokenizer
    assert tokenizer is not None
    texts = python_llm.views.texts
    text = "def f(n):\n    return n + 1\n\n\n" * 20
    ids = np.array(tokenizer.encode(text, add_special_tokens=False))
    head, tail = texts.ends(ids)
    assert head == text[:80]
    assert tail == text[-80:]
    assert texts.ends(ids[:5]) == (tokenizer.decode(ids[:5].tolist()), "")
    marked = np.array([ids[0], -7, ids[1]])
    assert texts.ends(marked) == (
        f"{tokenizer.decode(ids[:1].tolist())}\N{OBJECT REPLACEMENT CHARACTER}{tokenizer.decode(ids[1:2].tolist())}",
        "",
    )
    sizes = [len(texts.ends(ids[:count])[0] or "") for count in range(1, ids.size, 7)]
    assert max(sizes) <= 160
    for count in range(1, ids.size):
        whole = tokenizer.decode(ids[:count].tolist())
        assert texts.ends(ids[:count]) == ((whole, "") if len(whole) <= 160 else (whole[:80], whole[-80:]))


def test_an_empty_session_is_no_parent(python_llm: LLM) -> None:
    """It has a root of its own beside those with tokens, under whatever salt."""
    llm = python_llm

    def node_of(session: Session) -> HistoryNode:
        nodes = llm.views.history().nodes
        assert len({node.id for node in nodes}) == len(nodes)
        (found,) = (node for node in nodes if f"session:{session.number}" in node.branches)
        assert not found.branches or not [node for node in nodes if node.parent == found.id]
        return found

    with llm.session(cache_salt="own") as empty, llm.session(cache_salt="own") as other:
        assert node_of(empty) == node_of(other)
        with llm.session([5, 6, 7], cache_salt="own") as session, llm.session([5, 6, 8], cache_salt="own"):
            found = node_of(empty)
            assert (found.parent, found.start, found.end, len(found.branches)) == (None, 0, 0, 2)
            assert found.key == {"adapter": None, "salt": "own"}
            assert node_of(session).parent is not None
            assert len(session.tree().nodes) == 3
            assert [node.end for node in empty.tree().nodes] == [0]


def test_ids_that_were_read_stay_when_a_busy_history_goes_on() -> None:
    """A request goes back and writes others in the same place; a reading has what was there."""
    for busy in (True, False):
        history = TokenHistory(range(8))
        history.extend([8, 9])
        read = _ids_of(history, busy=busy)
        history.truncate(4)
        history.extend([70, 80, 90])
        assert read.tolist() == list(range(10)), busy
