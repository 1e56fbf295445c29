"""Sessions as history: a checkout goes on as if nothing had happened, branches share what they have
in common, and whatever breaks in between leaves no branch without its state.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.branches.test_stored_state import squeeze
from tests.engine.test_media import image, rows_of
from tests.small_llms import (
    BYTES_PER_TOKEN,
    VOCAB,
    Checkpoint,
    MakeLLM,
    assert_near,
    attention_layer,
    check,
    engine_of,
    greedy,
    make_checkpoint,
    random_tokens,
    record,
)
from tests.store.servers import RedisServer

from quire import LLM, AlreadyExists, AsyncLLM, InvalidArgument, NotFound, Session
from quire.base.errors import (
    DataLoss,
    FailedPrecondition,
    QuireError,
    ResourceExhausted,
    StoreDamaged,
    StoreFull,
    TierError,
)
from quire.contracts.store import ObjectKey, ObjectKind, StoreTier
from quire.models.catalogue import bundled_adapters
from quire.store import collection
from quire.store import files as store_files
from quire.store.commits import SessionCommit, digest_of, space_key, space_of
from quire.store.files import FileTier
from quire.store.history import History
from quire.store.records import pack_record, unpack_record
from small_tokenizers import saved

from .test_session_chat import TEMPLATE, user

PROMPT = random_tokens(45)
CHUNK = 8
ROOM: dict[str, Any] = {"kv_cache_memory": "4MiB"}

MakeStored = Callable[..., LLM]


@pytest.fixture
def stored(make_llm: MakeLLM, tmp_path: Path) -> MakeStored:
    """Makes LLMs over a directory, with small objects, and state that is always worth a load. Only
    commits write there.
    """

    def make(model: Checkpoint | Path | str, where: Path | None = None, *, chunk: int = CHUNK, **options: Any) -> LLM:
        llm = make_llm(model, store=[f"file://{where or tmp_path / 'store'}"], **options)
        tier = engine_of(llm).stored
        tier.least, tier.is_worth, tier.keys.layout.chunk = 1, lambda *_: True, chunk
        tier.keep = lambda *_, **__: None  # type: ignore[method-assign]
        return llm

    return make


def files(where: Path) -> dict[str, int]:
    """The objects of a directory, by name, and their sizes."""
    return {path.stem: path.stat().st_size for path in (where / "objects").glob("*/*.quire")}


def states(where: Path) -> dict[str, int]:
    return {name: size for name, size in files(where).items() if "-record-" not in name}


def age(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
    """Let collections spare commits only if they are this young."""
    monkeypatch.setattr(
        collection.collect, "__kwdefaults__", {"dry_run": False, "now": None, "spared_seconds": seconds}
    )


def assert_same(found: torch.Tensor, wanted: torch.Tensor, llm: LLM) -> None:
    """To the bit; behind windows up to rounding, for pages there hold other rows beside those that
    are seen.
    """
    if any(getattr(spec, "layer_window", None) for spec in llm.model.layer_specs):
        assert_near(found, wanted)
    else:
        assert torch.equal(found, wanted)


def next_tokens(session: Session, count: int = 6) -> list[int]:
    return session.generate(greedy(count)).outputs[0].token_ids


# -- commit and checkout ---------------------------------------------------------------------------


@pytest.fixture(params=("llama", "gemma3", "mistral", "qwen3-next", "mamba2"))
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    """Without windows, with one in some layers, in all; hybrid, and recurrent layers only."""
    if request.param in checkpoints:
        return checkpoints[request.param]
    if request.param not in FAMILIES:
        from tests.small_llms import make_family

        FAMILIES[request.param] = make_family(request.param, request.getfixturevalue("tmp_path_factory").mktemp("h"))
    return FAMILIES[request.param]


FAMILIES: dict[str, Checkpoint] = {}


@pytest.mark.turns(3)
def test_a_checkout_goes_on_as_if_nothing_had_happened(stored: MakeStored, model: Checkpoint) -> None:
    llm = stored(model, **ROOM)
    session = llm.session(PROMPT, labels={"task": "42"})
    next_tokens(session, 5)
    commit = session.commit("one", "before the change")
    tokens, logits = session.tokens, session.logits()
    wanted = [next_tokens(session.fork()), next_tokens(session.fork(at=30))]
    session.rewind(n=9)
    session.append([1, 2, 3])
    check(llm)
    llm.close()
    again = stored(model, **ROOM)
    found = again.checkout("one")
    assert (found.tokens, dict(found.labels), found.name) == (tokens, {"task": "42"}, None)
    assert found.last_commit == commit.id
    assert found.num_computed == 0
    recorder = record(again)
    assert_same(found.logits(), logits, again)
    assert recorder.num_tokens == 1, "only the last token ran"
    assert [next_tokens(found.fork()), next_tokens(found.fork(at=30))] == wanted
    assert next_tokens(again.checkout(commit.id[:8])) == wanted[0]
    check(again)


@pytest.mark.turns(6)
def test_without_its_objects_it_is_computed_again(stored: MakeStored, model: Checkpoint, tmp_path: Path) -> None:
    llm = stored(model, **ROOM)
    session = llm.session(PROMPT)
    session.commit("one")
    wanted = next_tokens(session)
    llm.close()
    for number, path in enumerate(sorted((tmp_path / "store/objects").glob("*/*.quire"))):
        if "-record-" not in path.name:
            data = bytearray(path.read_bytes())
            data[-1 - number % 7] ^= 1
            path.write_bytes(data)
    again = stored(model, **ROOM)
    assert next_tokens(again.checkout("one")) == wanted
    check(again)


def test_windowed_sessions(stored: MakeStored, checkpoint: Checkpoint) -> None:
    llm = stored(checkpoint)
    session = llm.session(PROMPT, window=16, sink=2)
    next_tokens(session, 9)
    session.commit("one")
    wanted, logits = next_tokens(session.fork(), 9), session.logits()
    llm.close()
    again = stored(checkpoint)
    found = again.checkout("one")
    recorder = record(again)
    assert found.window == (16, 2)
    assert_near(found.logits(), logits)
    assert recorder.num_tokens == 1
    assert next_tokens(found, 9) == wanted
    found.commit("one")
    assert [one.num_tokens for one in again.log("one")] == [63, 54]


def test_what_tokens_do_not_give_is_kept_whole(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    llm = stored(llama)
    layer = attention_layer(llm)
    written = llm.session(PROMPT)
    written.set_kv(layer, start=0, v=written.kv(layer)["v"] * -3)
    seen = llm.session(image([1, -1, -1, 4, -1], rows_of(3)))
    next_tokens(seen, 2)
    assert written.commit("written").modified
    assert seen.commit("seen").modified
    wanted = [next_tokens(one) for one in (written, seen)]
    assert wanted[0] != llama.greedy(PROMPT, 6)
    llm.close()
    again = stored(llama)
    found = [again.checkout(name) for name in ("written", "seen")]
    assert all(one.modified and one.pinned for one in found)
    assert [next_tokens(one) for one in found] == wanted
    assert found[0].commit("written").parent == again.log("written")[1].id
    again.close()
    for name in states(tmp_path / "store"):
        path = next((tmp_path / "store/objects").glob(f"*/{name}.quire"))
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    last = stored(llama)
    for name in ("written", "seen"):
        with pytest.raises(DataLoss, match="is damaged, and tokens do not give its state"):
            last.checkout(name)
    for path in (tmp_path / "store/objects").glob("*/*-stop-*.quire"):
        path.unlink()
    with pytest.raises(DataLoss, match="is gone, and tokens do not give its state"):
        last.checkout("seen")
    assert not engine_of(last).branches.sessions


def test_a_kind_of_state_that_no_tokens_give(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    """Cross layers keep what an encoder read: nothing is found by tokens, and a commit is whole."""
    llm = stored(llama)
    engine_of(llm).stored.keys.layout.refusal = "cross layers"
    session = llm.session(PROMPT)
    next_tokens(session, 4)
    assert session.commit("one").modified
    llm.generate(random_tokens(40, seed=7), greedy(1))
    squeeze(llm)
    assert len(states(tmp_path / "store")) == 1
    wanted = next_tokens(session)
    llm.close()
    again = stored(llama)
    engine_of(again).stored.keys.layout.refusal = "cross layers"
    recorder, found = record(again), again.checkout("one")
    assert found.num_computed == 48
    assert next_tokens(found) == wanted
    assert recorder.num_tokens == 6


def test_another_dtype_stays_approximate(stored: MakeStored, make_llm: MakeLLM, llama: Checkpoint) -> None:
    data = make_llm(llama, kv_dtype="bfloat16").session(PROMPT).to_bytes()
    llm = stored(llama)
    session = llm.session_from_bytes(data, convert_dtype=True)
    session.commit("rough")
    found = llm.checkout("rough")
    assert not found._branch.origin.exact
    assert torch.equal(found.logits(), session.logits())


def test_a_loaded_session_is_no_prefix_for_others(stored: MakeStored, llama: Checkpoint, make_llm: MakeLLM) -> None:
    """Its objects are found by what was committed from it, in any process, and by nothing else."""
    data = make_llm(llama).session(PROMPT).to_bytes()
    llm = stored(llama)
    llm.session_from_bytes(data).commit("mine")
    llm.close()
    again = stored(llama)
    assert again.generate(PROMPT, greedy(1))[0].num_cached_tokens == 0
    assert again.session_from_bytes(data).fork(at=0).append(PROMPT).generate(greedy(1)).num_cached_tokens <= len(PROMPT)
    assert again.checkout("mine").generate(greedy(1)).reuse.by_tier == {"disk": 44}


def test_adapters(stored: MakeStored) -> None:
    options: dict[str, Any] = {"kv_cache_memory": "16MiB", "max_model_len": 128}
    adapters = {"docs": str(bundled_adapters()["tiny-python-docstrings"])}
    llm = stored("tiny-python", adapters=adapters, **options)
    session = llm.session("def f(x):\n")
    session.use_adapter("docs")
    next_tokens(session, 4)
    session.commit("one")
    wanted = next_tokens(session, 8)
    llm.close()
    again = stored("tiny-python", **options)
    with pytest.raises(InvalidArgument, match=r"commit [0-9a-f]{12} was made with .*load that adapter first"):
        again.checkout("one")
    again.load_adapter("other", adapters["docs"])
    found = again.checkout("one")
    assert found.adapter == "other"
    output = found.generate(greedy(8))
    assert output.outputs[0].token_ids == wanted
    assert output.reuse.by_tier.get("disk", 0) > 0


def test_chats(stored: MakeStored, make_llm: MakeLLM, tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path / "model", vocab_size=600, max_position_embeddings=1024)
    (tmp_path / "model/tokenizer.json").write_text(saved("byte_level"))
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    llm = stored(tmp_path / "model")
    session = llm.session()
    for number in range(20):
        session.chat([user(f"the fox {number}")], greedy(3))
    session.commit("chat")
    found = stored(tmp_path / "model").checkout("chat")
    wanted = session.chat([user("over")], greedy(6))
    assert found.chat([user("over")], greedy(6)).prompt_token_ids == wanted.prompt_token_ids
    assert found.tokens == session.tokens
    session.chat([user("over")], greedy(2), answer=lambda text: {**user(text), "object": object()})
    with pytest.raises(InvalidArgument, match="no JSON"):
        session.commit("chat")


def test_an_empty_session(stored: MakeStored, llama: Checkpoint) -> None:
    llm = stored(llama)
    assert llm.session().commit("empty").nbytes == 0
    assert llm.checkout("empty").append(PROMPT).generate(greedy(4)).outputs[0].token_ids == llama.greedy(PROMPT, 4)


def test_another_model(stored: MakeStored, checkpoints: dict[str, Checkpoint]) -> None:
    stored(checkpoints["llama"]).session(PROMPT).commit("one")
    other = stored(checkpoints["mistral"])
    with pytest.raises(InvalidArgument, match=r"commit \w{12}: .*LlamaForCausalLM.*MistralForCausalLM"):
        other.checkout("one")
    assert list(other.branches()) == ["one"], "what needs no model works"
    assert other.session(PROMPT).commit("two").parent is None
    assert (other.diff("one", "two").common, other.diff("one", "two").shared_bytes) == (len(PROMPT), 0)


# -- names, order, refusals ------------------------------------------------------------------------


def test_log_and_branches(stored: MakeStored, llama: Checkpoint) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.name = "fox"
    first = session.commit("main", "first")
    child = session.fork()
    session.append([1])
    second = session.commit("main", "second\nwith two lines")
    other = child.commit("feature/a-1.x")
    assert [one.id for one in llm.log("main")] == [second.id, first.id]
    assert [one.id for one in llm.log("feature/a-1.x")] == [other.id, first.id]
    assert [one.id for one in llm.log(first.id[:9])] == [first.id]
    assert {name: one.id for name, one in llm.branches().items()} == {"feature/a-1.x": other.id, "main": second.id}
    assert (second.parent, second.message, second.session, second.num_tokens) == (
        first.id,
        "second\nwith two lines",
        "fox",
        46,
    )
    with pytest.raises(AlreadyExists, match=f"stands at commit {second.id[:12]}") as caught:
        child.commit("main")
    assert (caught.value.field, caught.value.given) == ("name", "main")
    assert child.last_commit == other.id, "refused: as it was"
    forced = child.commit("main", force=True)
    assert [one.id for one in llm.log("main")] == [forced.id, other.id, first.id]
    with pytest.raises(AlreadyExists):
        session.commit("main")
    assert llm.delete("main") == forced.id
    with pytest.raises(NotFound, match=r"no branch 'main'; there are: 'feature/a-1.x'"):
        llm.checkout("main")
    assert llm.checkout(forced.id).tokens == PROMPT, "until it is collected"
    session.commit("main")


@pytest.mark.parametrize("name", ["", "/a", "-a", "a/../b", "..", "a b", "é", "a" * 129, 3, None, "a\n"])
def test_names_are_checked(stored: MakeStored, llama: Checkpoint, name: Any) -> None:
    llm = stored(llama)
    session = llm.session([1])
    for verb in (session.commit, llm.checkout, llm.log, llm.delete, lambda one: llm.push(one, "file:///tmp/never")):
        with pytest.raises(InvalidArgument, match="name must be 1 to 128 of"):
            verb(name)


def test_other_arguments(stored: MakeStored, small: LLM, llama: Checkpoint) -> None:
    llm = stored(llama)
    session = llm.session([1])
    for message in (3, "x" * 5000, "\udc00"):
        with pytest.raises(InvalidArgument, match="message must be text"):
            session.commit("a", message)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="force"):
        session.commit("a", force=1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="owner must be a string"):
        session.commit("a", owner=None)  # type: ignore[arg-type]
    for url in ("memory://1MiB", "nothing", 3):
        with pytest.raises(InvalidArgument) as caught:
            llm.push("a", url)  # type: ignore[arg-type]
        assert caught.value.field in ("url", "store")
    assert not llm.branches()
    for verb in (lambda: small.session([1]).commit("a"), small.branches, lambda: small.checkout("a"), small.gc):
        with pytest.raises(FailedPrecondition, match=r"store= .* or state_dir="):
            verb()
    stream = session.stream(greedy(3))
    next(stream)
    with pytest.raises(FailedPrecondition, match="generating"):
        session.commit("a")
    stream.close()
    session.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        session.commit("a")


def test_owners_have_names_of_their_own(stored: MakeStored, llama: Checkpoint) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    commits = {owner: session.commit("same", owner=owner, force=True) for owner in ("", "a", "b")}
    assert {owner: llm.branches(owner=owner)["same"].id for owner in commits} == {
        owner: one.id for owner, one in commits.items()
    }
    for owner in ("", "b", "c"):
        with pytest.raises(NotFound):
            llm.log(commits["a"].id, owner=owner)
    llm.delete("same", owner="a")
    assert not llm.branches(owner="a")
    assert llm.checkout("same", owner="b").tokens == PROMPT


def test_salts_stay(stored: MakeStored, llama: Checkpoint) -> None:
    llm = stored(llama)
    llm.session(PROMPT, cache_salt="x").commit("one")
    llm.close()
    again = stored(llama)
    found = again.checkout("one")
    assert found._branch.key == ("", "x")
    assert again.generate(PROMPT, greedy(1))[0].num_cached_tokens == 0
    assert found.generate(greedy(1)).num_cached_tokens == 44


def test_the_state_directory_is_enough(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama, state_dir=tmp_path / "a")
    session = llm.session(PROMPT, name="kept")
    first = session.commit("one")
    llm.close()
    again = make_llm(llama, state_dir=tmp_path / "a")
    assert again.resume("kept").commit("one").parent == first.id, "sessions remember their commit"
    assert len(again.log("one")) == 2


# -- what is shared --------------------------------------------------------------------------------


def test_a_branch_stores_its_own_objects_only(stored: MakeStored, tmp_path: Path) -> None:
    """A hundred tokens behind four thousand: at most 1.05 times the objects that hold them."""
    model = make_checkpoint(
        "llama",
        tmp_path / "model",
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
    )
    llm = stored(model.path, chunk=256, kv_cache_memory="64MiB", max_model_len=8192)
    session = llm.session(random_tokens(4000))
    session.commit("main")
    before, base = files(tmp_path / "store"), states(tmp_path / "store")
    child = session.fork()
    child.append(random_tokens(100, seed=1))
    child.commit("branch")
    after = files(tmp_path / "store")
    own = sum(size for name, size in states(tmp_path / "store").items() if name not in base)
    added = sum(after.values()) - sum(before.values())
    assert 100 * 2 * 2 * 8 * 64 * 4 <= own <= added <= 1.05 * own
    assert own < 0.07 * sum(base.values()), "the last run and the token behind it"
    found = llm.diff("main", "branch")
    assert (found.common, len(found.a_adds), len(found.b_adds)) == (4000, 0, 100)
    assert found.shared_bytes == 15 * 256 * 2 * 2 * 8 * 64 * 4


def runs_of(tokens: list[int], computed: int) -> set[tuple[int, ...]]:
    """What the objects of rows depend on: all tokens to the end of each run."""
    ends = [*range(CHUNK, computed + 1, CHUNK), *([computed] if computed % CHUNK else [])]
    return {tuple(tokens[:end]) for end in ends}


def nbytes(runs: set[tuple[int, ...]]) -> int:
    return sum(((len(run) - 1) % CHUNK + 1) * BYTES_PER_TOKEN for run in runs)


@pytest.mark.turns(3)
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 16, 44, 45])
def test_differences(stored: MakeStored, llama: Checkpoint, cut: int) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    base = session.commit("base")
    a, b = session.fork(at=cut), session.fork(at=cut)
    a.append([90, 91])
    b.append([92] * 11)
    a.commit("a")
    b.commit("b")
    found = llm.diff("a", "b")
    assert (found.common, found.a_adds, found.b_adds, found.base) == (cut, [90, 91], [92] * 11, base.id)
    of_a, of_b = (runs_of(one.tokens, len(one) - 1) for one in (a, b))
    assert (found.shared_bytes, found.a_bytes, found.b_bytes) == (
        nbytes(of_a & of_b),
        nbytes(of_a - of_b),
        nbytes(of_b - of_a),
    )
    assert llm.diff("a", "a").shared_bytes == found.a.nbytes == nbytes(of_a)
    other = llm.session([3])
    other.commit("alone")
    assert (llm.diff("alone", "a").base, llm.diff("alone", "a").common) == (None, int(a.tokens[0] == 3))


# -- garbage ---------------------------------------------------------------------------------------


def test_random_histories_and_collections(
    stored: MakeStored, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is what the branches reach, and what was not collected yet; each can be checked
    out, with the tokens that it was committed with.
    """
    age(monkeypatch)
    dice, llm = random.Random(7), stored(llama)
    heads: dict[str, str] = {}
    commits: dict[str, tuple[str | None, list[int], set[tuple[int, ...]]]] = {}
    sessions = [llm.session(PROMPT[:20])]
    collected = 0
    for _ in range(120):
        session, name = dice.choice(sessions), dice.choice("abcd")
        match dice.randrange(7):
            case 0 if len(sessions) < 5:
                sessions.append(session.fork(at=dice.randrange(len(session) + 1)))
            case 1:
                session.append([dice.randrange(VOCAB) for _ in range(dice.randrange(1, 12))])
                if len(session) > 60:
                    session.rewind(to=10)
            case 2:
                session.rewind(to=dice.randrange(len(session) + 1))
            case 3 | 4:
                parent = session.last_commit
                try:
                    made = session.commit(name)
                except AlreadyExists:
                    assert heads[name] not in reached(commits, parent)
                    made = session.commit(name, force=True)
                else:
                    assert name not in heads or heads[name] in reached(commits, parent)
                commits[made.id] = (parent, session.tokens, runs_of(session.tokens, session.num_computed))
                heads[name] = made.id
            case 5 if name in heads:
                llm.delete(name)
                del heads[name]
            case 6:
                kept = {one for head in heads.values() for one in reached(commits, head)}
                told = llm.gc(dry_run=True)
                found = llm.gc()
                assert dataclasses.asdict(found) == dataclasses.asdict(told)
                assert found.commits == len(commits) - len(kept)
                collected += found.commits
                gone = set().union(*(commits[one][2] for one in commits.keys() - kept))
                commits = {one: commits[one] for one in kept}
                assert found.bytes == nbytes(gone - rows_of_commits(commits))
                for one in sessions:
                    if one.last_commit not in commits:
                        one._live.last_commit = None  # an oracle of sets knows no more than that
        there = states(tmp_path / "store")
        assert len(there) == len(rows_of_commits(commits))
        assert {one: llm.branches()[one].id for one in llm.branches()} == heads
    assert collected > 5
    assert heads
    for name, head in heads.items():
        found_session = llm.checkout(name)
        assert found_session.tokens == commits[head][1]
        if found_session.tokens:
            assert next_tokens(found_session, 2) == llama.greedy(commits[head][1], 2)
        found_session.close()
    records = {name for name in files(tmp_path / "store") if "-record-" in name}
    for name in list(heads):
        llm.delete(name)
    llm.gc()
    assert not states(tmp_path / "store")
    assert len(files(tmp_path / "store")) == 1 < len(records), "only that programs have branches here"


def reached(commits: dict[str, Any], head: str | None) -> set[str]:
    found = set()
    while head is not None and head in commits:
        found.add(head)
        head = commits[head][0]
    return found


def rows_of_commits(commits: dict[str, Any]) -> set[tuple[int, ...]]:
    return set().union(*(runs for _, _, runs in commits.values()))


def test_young_commits_and_the_state_of_others_stay(
    stored: MakeStored, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.commit("one")
    llm.delete("one")
    assert llm.gc().commits == 0, "it may be about to get a branch"
    age(monkeypatch)
    # Prompts that the cache knows go on from the third run.
    session.rewind(to=24)
    session.append(random_tokens(9, seed=1))
    tier = engine_of(llm).stored
    names, makers, fork = tier.described(session._branch)
    assert fork is not None
    store = tier.store
    assert store is not None
    for key, make in makers.items():
        store.put(key, make(), durable=True)
    store.flush(5)
    engine_of(llm).branches.remove(fork)
    before = states(tmp_path / "store")
    found = llm.gc()
    assert (found.commits, found.objects, found.released) == (1, 3, 3)
    assert len(states(tmp_path / "store")) == len(before) - 3
    assert store.stat()[-1].stat.pinned < 2000, "records alone"  # type: ignore[union-attr]
    assert names.length == 32


def test_a_collected_object_is_written_again(
    stored: MakeStored, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    age(monkeypatch)
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.commit("one")
    llm.delete("one")
    assert llm.gc().objects == 6
    session.commit("two")
    llm.close()
    assert stored(llama).checkout("two").generate(greedy(1)).reuse.by_tier == {"disk": 44}


# -- push and pull ---------------------------------------------------------------------------------


@contextmanager
def elsewhere(kind: str, tmp_path: Path) -> Iterator[str]:
    if kind == "directory":
        yield f"file://{tmp_path / 'other'}"
        return
    server = RedisServer()
    try:
        yield server.url
    finally:
        server.kill()


@pytest.mark.parametrize("kind", ["directory", "redis"])
def test_round_trips(stored: MakeStored, llama: Checkpoint, tmp_path: Path, kind: str) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.commit("one")
    session.append([1, 2])
    session.commit("one")
    written = session.fork()
    written.set_kv(0, v=written.kv(0)["v"] * 2)
    written.commit("written")
    wanted = {name: next_tokens(llm.checkout(name)) for name in ("one", "written")}
    with elsewhere(kind, tmp_path) as url:
        sent = llm.push("one", url)
        assert (sent.commits, sent.objects, sent.there, sent.missing) == (2, 7, 0, 0)
        assert sent.bytes == nbytes(runs_of(PROMPT, 44) | runs_of([*PROMPT, 1, 2], 46))
        assert llm.push("one", url).objects == 0
        sent = llm.push("written", url)
        assert (sent.commits, sent.objects, sent.there) == (1, 1, 7)
        there = stored(llama, tmp_path / "third")
        for name in ("one", "written"):
            assert there.pull(name, url).commit == llm.branches()[name].id
        assert {name: next_tokens(there.checkout(name)) for name in wanted} == wanted
        assert there.checkout("one").generate(greedy(1)).num_cached_tokens == 46
        assert [one.id for one in there.log("one")] == [one.id for one in llm.log("one")]
        # Both go on: neither is an earlier state of the other.
        llm.checkout("one").append([3]).commit("one")
        there.checkout("one").append([4]).commit("one")
        llm.push("one", url)
        for verb in (there.push, there.pull):
            with pytest.raises(AlreadyExists):
                verb("one", url)
        there.pull("one", url, force=True)
        assert there.checkout("one").tokens == [*PROMPT, 1, 2, 3]
        with pytest.raises(NotFound, match="no branch 'nothing'; there are: 'one', 'written'"):
            there.pull("nothing", url)


def test_a_pull_makes_no_store(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"there is no store: .* does not exist"):
        stored(llama).pull("one", f"file://{tmp_path}/mistyped")
    assert not (tmp_path / "mistyped").exists()


def test_a_server_that_is_not_there(stored: MakeStored, llama: Checkpoint) -> None:
    llm = stored(llama)
    llm.session(PROMPT).commit("one")
    with pytest.raises(TierError):
        llm.push("one", "redis://127.0.0.1:1/0")
    assert list(llm.branches()) == ["one"]


def test_what_is_damaged_is_not_passed_on(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.commit("one")
    session.set_kv(0, v=session.kv(0)["v"] * 2)
    session.commit("written")
    rows, whole = (sorted((tmp_path / "store/objects").glob(f"*/*-{kind}-*.quire")) for kind in ("rows", "stop"))
    for path in (rows[0], whole[0]):
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    sent = llm.push("one", f"file://{tmp_path / 'other'}")
    assert (sent.objects, sent.missing) == (5, 1)
    other = stored(llama, tmp_path / "other")
    assert next_tokens(other.checkout("one")) == llama.greedy(PROMPT, 6)
    with pytest.raises(DataLoss, match="cannot be computed again"):
        llm.push("written", f"file://{tmp_path / 'other'}")
    assert list(other.branches()) == ["one"]


# -- faults ----------------------------------------------------------------------------------------


class Broken(TierError):
    """What a test breaks a tier with."""


@contextmanager
def breaking(tier: Any, after: int) -> Iterator[list[int]]:
    """Let the changes of a tier fail, all but the first few; yields how many were asked for."""
    asked = [0]
    verbs = {name: getattr(tier, name) for name in ("put", "pin", "remove")}

    def failing(verb: Any) -> Any:
        async def call(*given: Any) -> Any:
            asked[0] += 1
            if asked[0] > after:
                raise Broken("the line was cut")
            return await verb(*given)

        return call

    for name, verb in verbs.items():
        setattr(tier, name, failing(verb))
    try:
        yield asked
    finally:
        for name in verbs:
            delattr(tier, name)


def home(llm: LLM) -> StoreTier:
    store = engine_of(llm).stored.store
    assert store is not None
    return store._far[0].tier


def test_a_commit_that_breaks_anywhere(
    stored: MakeStored, llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch stands where it stood or at the whole new commit, and the next one works."""
    age(monkeypatch)
    after, llm = 0, stored(llama)
    session = llm.session(PROMPT)
    heads = [session.commit("one").id]
    while True:
        session.append([after])
        with breaking(home(llm), after) as asked:
            try:
                session.commit("one")
                broken = False
            except Broken:
                broken = True
        check(llm)
        head = llm.branches()["one"]
        assert llm.checkout("one").tokens[: head.num_tokens] == session.tokens[: head.num_tokens]
        assert broken == (asked[0] > after)
        if head.id == heads[-1]:
            assert broken
        heads.append(session.commit("one").id)
        assert llm.branches()["one"].id == heads[-1]
        if not broken:
            break
        after += 1
    assert after > 5
    llm.gc()
    assert {one.id for one in llm.log("one")} >= set(heads)
    found = stored(llama).checkout("one")
    assert found.tokens == session.tokens
    assert found.generate(greedy(2)).outputs[0].token_ids == llama.greedy(session.tokens, 2)


def test_a_push_that_breaks_anywhere(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.commit("one")
    session.append([1])
    session.commit("one")
    store = engine_of(llm).stored.store
    assert store is not None
    from quire.store.transfer import transfer

    after, broken = 0, True
    while broken:
        tier = FileTier(tmp_path / f"target-{after}", None)

        async def run(source: StoreTier, tier: FileTier = tier) -> None:
            ends = History(source, space_of("")), History(tier, space_of(""))
            await transfer(*ends, "one", force=False, show=False)

        async def look(_: StoreTier, tier: FileTier = tier) -> list[str]:
            return list(await History(tier, space_of("")).branches())

        with breaking(tier, after):
            try:
                store.direct(run).result(30)
                broken = False
            except Broken:
                pass
        seen = store.direct(look).result(30)
        assert seen == ["one"] or broken
        store.direct(run).result(30)
        assert store.direct(look).result(30) == ["one"]
        other = stored(llama, tmp_path / f"target-{after}")
        assert other.checkout("one").generate(greedy(1)).num_cached_tokens == 45
        other.close()
        after += 5 if after < 10 else 1
    assert after > 10


@pytest.mark.parametrize("kind", ["branch", "commit", "piece"])
def test_damaged_records(stored: MakeStored, llama: Checkpoint, tmp_path: Path, kind: str) -> None:
    llm = stored(llama)
    commit = llm.session(PROMPT).commit("one")
    space = space_of("")
    key = {"branch": space.branch("one"), "commit": space.commit(commit.id), "piece": space.piece(commit.tokens[0])}[
        kind
    ]
    path = next((tmp_path / "store/objects").glob(f"*/{key.name}.quire"))
    whole = path.read_bytes()
    for at in range(8, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataLoss):
            llm.checkout("one")
    with pytest.raises(StoreDamaged):
        llm.push("one", f"file://{tmp_path / 'other'}")
    (told,) = llm.gc().damaged
    assert commit.id in told or kind == "branch"
    path.write_bytes(whole)
    assert llm.checkout("one").tokens == PROMPT


def stands(branches: Mapping[str, SessionCommit]) -> dict[str, str]:
    return {name: one.id for name, one in branches.items()}


@pytest.mark.parametrize("repair", ["delete", "force"])
@pytest.mark.parametrize("kind", ["branch", "commit"])
def test_a_branch_that_is_lost_hides_no_other(
    stored: MakeStored, llama: Checkpoint, tmp_path: Path, kind: str, repair: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named, deleted, or replaced by a commit with force. Then garbage can be collected."""
    llm = stored(llama)
    lost, other = (llm.session([*PROMPT, number]).commit(name) for number, name in ((1, "lost"), (2, "other")))
    key = space_of("").branch("lost") if kind == "branch" else space_of("").commit(lost.id)
    path = next((tmp_path / "store/objects").glob(f"*/{key.name}.quire"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    told = list[str]()
    assert stands(llm.branches(damaged=told)) == {"other": other.id}
    assert len(told) == 1
    assert "delete it by its name, or let a commit with force" in told[0]
    assert ("'lost'" in told[0]) == (kind == "commit")
    assert stands(llm.branches()) == {"other": other.id}
    assert told[0] in caplog.text
    with pytest.raises(NotFound, match="no branch 'nothing'"):
        llm.checkout("nothing")
    with pytest.raises(StoreDamaged, match=rf"lost|{lost.id}"):
        llm.checkout("lost")
    assert any("by its name" in sentence for sentence in llm.gc().damaged)
    if repair == "delete":
        assert llm.delete("lost") == ("" if kind == "branch" else lost.id)
        assert stands(llm.branches()) == {"other": other.id}
    else:
        made = llm.session([*PROMPT, 3]).commit("lost", force=True)
        assert stands(llm.branches()) == {"lost": made.id, "other": other.id}
    assert not llm.gc().damaged


@pytest.mark.parametrize("kind", ["space", "branch", "commit", "piece"])
def test_a_damaged_record_keeps_its_owners_commits_and_no_others(
    stored: MakeStored, llama: Checkpoint, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it may have reached stays, and goes when the branch is deleted."""
    age(monkeypatch)
    llm = stored(llama)
    kept = [llm.session([*PROMPT, 1, 1, number]).commit("kept", owner="a", force=True) for number in (1, 2)]
    llm.session([*PROMPT, 2]).commit("gone", owner="b")
    assert llm.gc(dry_run=True).commits == 1, "of a, the first one"
    llm.delete("gone", owner="b")
    space = space_of("a")
    key = {
        "space": space_key(space),
        "branch": space.branch("kept"),
        "commit": space.commit(kept[1].id),
        "piece": space.piece(kept[1].tokens[0]),
    }[kind]
    path = next((tmp_path / "store/objects").glob(f"*/{key.name}.quire"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    found = llm.gc()
    assert len(found.damaged) == 1
    # A commit whose tokens are lost reaches its parents all the same.
    assert found.commits == (2 if kind == "piece" else 1)
    path.write_bytes(whole)
    assert llm.checkout("kept", owner="a").tokens == [*PROMPT, 1, 1, 2]
    found = llm.gc()
    assert (found.commits, found.damaged) == (0 if kind == "piece" else 1, ())


def test_a_commit_on_a_full_disk(stored: MakeStored, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = stored(llama)
    session = llm.session(PROMPT)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(store_files, "_write", fail)
        with pytest.raises(StoreFull, match=r"disk of the store.* is full .*; make room on it, or delete branches"):
            session.commit("one")
    assert not llm.branches()
    session.commit("one")
    assert list(llm.branches()) == ["one"]


@pytest.mark.parametrize("kind", ["commit", "piece"])
def test_forged_records(stored: MakeStored, llama: Checkpoint, tmp_path: Path, kind: str) -> None:
    """Whole ones, with checksums of their own, under the name of another."""
    llm = stored(llama)
    commit = llm.session(PROMPT).commit("one")
    space = space_of("")
    key = space.commit(commit.id) if kind == "commit" else space.piece(commit.tokens[0])
    path = next((tmp_path / "store/objects").glob(f"*/{key.name}.quire"))
    document = unpack_record(key, path.read_bytes(), dict)
    other = {"commit": {**document, "message": "x"}, "piece": {"items": [*PROMPT[:-1], 1]}}[kind]
    path.write_bytes(pack_record(key, other))
    llm.close()
    for index in (tmp_path / "store").glob("index-*"):
        index.unlink()
    again = stored(llama)
    with pytest.raises(DataLoss, match=r"is damaged: its \w+ ha\w+ another digest"):
        again.checkout("one")


@pytest.mark.parametrize("state", [{"length": 46}, {"stops": [[99, 5]]}, {"file": ["no name", 1]}])
def test_a_commit_with_the_state_of_other_tokens(stored: MakeStored, llama: Checkpoint, state: dict[str, Any]) -> None:
    """A writer of another store signs what it likes: a digest is no proof that it can be read."""
    commit = stored(llama).session(PROMPT).commit("one")
    document = json.loads(json.dumps(commit.document(), default=dict))
    assert SessionCommit.read(document, commit.id).state.length == commit.state.length
    document["state"] |= state
    with pytest.raises(StoreDamaged, match="is damaged"):
        SessionCommit.read(document, digest_of(document))


def test_a_full_store(make_llm: MakeLLM, llama: Checkpoint, tmp_path: Path) -> None:
    llm = make_llm(llama, store=[f"file://{tmp_path}?size=20KiB"])
    tier = engine_of(llm).stored
    tier.least, tier.keys.layout.chunk = 1, CHUNK
    tier.keep = lambda *_, **__: None  # type: ignore[method-assign]
    session = llm.session(PROMPT)
    with pytest.raises(ResourceExhausted, match=r"no room|given up"):
        session.commit("one")
    assert not llm.branches()
    assert session.last_commit is None
    check(llm)
    assert next_tokens(session) == llama.greedy(PROMPT, 6)


def test_what_is_committed_outlives_evictions(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    """Also state that no tokens give, and the record of the branch's space, without which a
    collection would take the branch for garbage."""
    llm = stored(llama)
    session, layer = llm.session(PROMPT), attention_layer(llm)
    session.set_kv(layer, start=0, v=session.kv(layer)["v"] * -3)
    session.commit("written", owner="me")
    wanted = next_tokens(session)
    llm.close()
    before = sum(files(tmp_path / "store").values())

    async def fill() -> list[str]:
        tier = FileTier(tmp_path / "store", 4 * before)
        try:
            for number in range(60):
                key = ObjectKey(b"p" * 20, ObjectKind.ROWS, 8, number.to_bytes(20))
                await tier.put(key, bytes(before // 4))
            await collection.collect(tier, spared_seconds=0)
            return [space.name for space in await collection.spaces_of(tier)]
        finally:
            await tier.close()

    assert len(asyncio.run(fill())) == 2, "that of programs, and the one of the branch"
    assert sum(files(tmp_path / "store").values()) <= 4 * before, "the others were given up"
    again = stored(llama)
    assert list(again.branches(owner="me")) == ["written"]
    assert next_tokens(again.checkout("written", owner="me")) == wanted


def test_a_commit_while_others_run(stored: MakeStored, llama: Checkpoint) -> None:
    llm = stored(llama)

    async def main() -> None:
        options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": "1MiB"}
        async with AsyncLLM(llama.path, store=llm.config.store, **options) as other:
            session = await other.session(PROMPT)
            outputs, commit = await asyncio.gather(
                other.generate([PROMPT] * 4, greedy(9)), session.commit("one", "all")
            )
            assert [one.outputs[0].token_ids for one in outputs] == [llama.greedy(PROMPT, 9)] * 4
            assert session.last_commit == commit.id
            found = await other.checkout("one")
            await found.append([1])
            await found.commit("one")
            assert (await found.generate(greedy(4))).outputs[0].token_ids == llama.greedy([*PROMPT, 1], 4)
            assert [one.parent for one in await other.log("one")] == [commit.id, None]
            assert (await other.diff("one", commit.id)).a_adds == [1]
            assert list(await other.branches()) == ["one"]
            await other.delete("one")
            assert (await other.gc()).commits == 0

    asyncio.run(main())
    assert not llm.branches(), "both see the same directory"


def test_keys_of_whole_states_are_their_own(stored: MakeStored, llama: Checkpoint, tmp_path: Path) -> None:
    """What a collection removes of one commit is never another's."""
    llm = stored(llama)
    session = llm.session(PROMPT)
    session.set_kv(0, v=session.kv(0)["v"] * 2)
    names = [session.commit("one").state.file for _ in range(2)]
    assert names[0] is not None
    assert names[1] is not None
    keys = [ObjectKey.parse(one[0]) for one in names if one is not None]
    assert keys[0].parent != keys[1].parent
    assert {key.kind for key in keys} == {ObjectKind.STOP}


def test_newer_commits_are_told(stored: MakeStored, llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = stored(llama)
    with monkeypatch.context() as patch:
        patch.setattr("quire.store.commits.VERSION", 2)
        llm.session(PROMPT).commit("one")
    with pytest.raises(QuireError, match="is of version 2; this Quire reads up to 1"):
        llm.checkout("one")
