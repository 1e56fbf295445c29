"""State that outlives the process: what one engine has written, another one reads, to the token,
for every kind of state; whatever happens to the files.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.adapters.test_named_adapters import directories as directories
from tests.engine.test_media import image, rows_of
from tests.sessions.test_conversations import Conversations
from tests.sessions.test_family_conversations import family as family
from tests.sessions.test_family_conversations import sizes
from tests.small_llms import Checkpoint, MakeLLM, engine_of, greedy, random_tokens
from tests.store.servers import RedisServer

from quire import LLM, InvalidArgument
from quire.base.outputs import TIERS
from quire.branches.stored_state import StoredState
from quire.contracts.store import ObjectKey
from quire.statefile.container import read_state
from quire.store import keys
from quire.store.files import FileTier

from .test_stored_state import CHUNK, check_store, stored_of

COUNT = 6


def eager(llm: LLM) -> LLM:
    """Small objects, whatever they cost."""
    stored = stored_of(llm)
    stored.least, stored.is_worth, stored.keys.layout.chunk = 1, lambda *_: True, CHUNK
    return llm


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def start(make_llm: MakeLLM, directory: Path) -> Callable[..., LLM]:
    """Starts an engine over the directory."""

    def make(model: Checkpoint, **options: Any) -> LLM:
        given = {"page_size": 4, "host_memory": 0, "store": [f"file://{directory}"], **options}
        if not isinstance(given.get("kv_cache_memory"), (int, str)):
            given.pop("kv_cache_memory", None)
        return eager(make_llm(model, **given))

    return make


def flush(llm: LLM) -> None:
    assert engine_of(llm).flush(30)


def reused(llm: LLM, prompt: Any, **options: Any) -> tuple[list[int], int]:
    """The next tokens, and how many of the prompt came from the disk."""
    (output,) = llm.generate(prompt, greedy(COUNT), **options)
    return output.outputs[0].token_ids, output.reuse.by_tier.get("disk", 0)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.quire"))


# -- another engine --------------------------------------------------------------------------------


@pytest.mark.turns(8)
def test_prompts_and_turns_outlive_the_engine(start: Callable[..., LLM], family: Checkpoint) -> None:
    """A client that sends its history again goes on where it was."""
    first = start(family)
    prompt = random_tokens(60)
    answer, none = reused(first, prompt)
    assert none == 0
    assert family.continues(prompt, answer)
    first.close()
    second = start(family)
    history = [*prompt, *answer, *random_tokens(5, seed=3)]
    again, found = reused(second, history)
    assert family.continues(history, again)
    assert found >= 60, "the end of the prompt, or of the turn"
    same, found = reused(second, prompt)
    assert same == answer
    check_store(second)


def test_sessions_are_found_by_their_tokens(start: Callable[..., LLM], checkpoint: Checkpoint) -> None:
    first = start(checkpoint)
    session = first.session(random_tokens(50))
    session.generate(greedy(9))
    tokens = session.tokens
    first.close()
    second = start(checkpoint)
    session = second.session(tokens)
    output = session.generate(greedy(COUNT))
    assert output.outputs[0].token_ids == checkpoint.greedy(tokens, COUNT)
    # A run computes at least one token, and a window can go on only where it stopped.
    expected = 57 if checkpoint.path.name == "llama" else 50
    assert second.metrics()["quire:store_tokens_loaded_total"] == expected
    windowed = second.session(tokens, window=24, sink=4)
    windowed.generate(greedy(3))
    flush(second)
    tokens = windowed.tokens
    second.close()


def test_a_session_with_a_window_is_written_while_it_goes_on(
    start: Callable[..., LLM], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that writes, from what it held then; a commit packs without the engine, too."""
    opened, seen, pack = threading.Event(), list[str](), StoredState._pack_whole

    def held(self: StoredState, *given: Any) -> bytes:
        seen.append(threading.current_thread().name)
        assert opened.wait(30)
        assert not engine_of(first).lock.owned
        return pack(self, *given)

    monkeypatch.setattr(StoredState, "_pack_whole", held)
    first = start(checkpoint)
    session = first.session(random_tokens(50), window=24, sink=4)
    session.generate(greedy(9))
    texts, wanted = [session.tokens], []
    for _ in range(2):
        wanted.append(session.generate(greedy(30)).outputs[0].token_ids)
        texts.append(session.tokens)
    opened.set()
    flush(first)
    assert set(seen) == {"quire-write"}
    session.commit("one")
    first.close()
    second = start(checkpoint)
    assert second.checkout("one").tokens == texts[-1]
    for text, tokens in zip(texts, wanted, strict=False):
        before = second.metrics()["quire:store_tokens_loaded_total"]
        again = second.session([*text, *tokens[:1]], window=24, sink=4)
        assert again.generate(greedy(29)).outputs[0].token_ids == tokens[1:]
        # What it held when its call ended; a run computes at least one token.
        assert second.metrics()["quire:store_tokens_loaded_total"] - before == len(text) - 1
        check_store(second)


@pytest.mark.turns(2)
@pytest.mark.parametrize("what", ["weights", "rope", "dtype", "salt", "version", "chunk"])
def test_what_differs_is_not_found(
    start: Callable[..., LLM],
    llama: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    what: str,
) -> None:
    """Another model of the same shape, another dtype of K and V, another salt, an older version."""
    first = start(llama)
    prompt = random_tokens(60)
    answer, _ = reused(first, prompt)
    first.close()
    options: dict[str, Any] = {}
    model = llama
    match what:
        case "weights":
            import copy

            peer = copy.deepcopy(llama.model)
            peer.lm_head.weight.data[3, 3] += 1
            peer.save_pretrained(tmp_path / "other")
            model = Checkpoint(tmp_path / "other", peer)
        case "rope":
            peer = llama.model
            shutil.copytree(llama.path, tmp_path / "other")
            config = json.loads((tmp_path / "other/config.json").read_text())
            config["rope_parameters"]["rope_theta"] *= 2
            (tmp_path / "other/config.json").write_text(json.dumps(config))
            model = Checkpoint(tmp_path / "other", peer)
        case "dtype":
            options["kv_dtype"] = "bfloat16"
        case "version":
            monkeypatch.setattr(keys, "KEY_VERSION", 0)
    second = start(model, **options)
    if what == "chunk":
        stored_of(second).keys.layout.chunk = 2 * CHUNK
    found = reused(second, prompt, cache_salt="other" if what == "salt" else None)
    assert found[1] == 0
    if what not in ("dtype", "rope"):
        assert found[0] == (answer if what != "weights" else model.greedy(prompt, COUNT))
    second.close()
    assert files(directory)
    monkeypatch.undo()
    third = start(llama)
    assert reused(third, prompt) == (answer, 60 - 60 % CHUNK if 60 - 60 % CHUNK > 59 else 59)


@pytest.mark.parametrize("salt", ["other", None])
def test_a_look_tells_nothing_of_another_salt(
    start: Callable[..., LLM], llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, salt: str | None
) -> None:
    """Nor by its time: the tier is asked for as many keys as of an unknown prompt, and has none."""
    looks: list[tuple[str, int, int]] = []

    def note(name: str) -> None:
        call = getattr(FileTier, name)

        async def noted(tier: FileTier, keys: Any) -> Any:
            found = await call(tier, keys)
            looks.append((name, len(keys), sum(map(bool, found))))
            return found

        monkeypatch.setattr(FileTier, name, noted)

    for name in ("get", "contains", "children"):
        note(name)
    prompt, unknown = random_tokens(60), random_tokens(60, seed=9)
    first = start(llama)
    reused(first, prompt, cache_salt="mine")
    first.close()
    second = start(llama)

    def looked(tokens: list[int], salt: str | None) -> list[tuple[str, int, int]]:
        flush(second)
        looks.clear()
        reused(second, tokens, cache_salt=salt)
        flush(second)
        return sorted(looks)

    nothing = looked(unknown, "third")
    assert nothing
    assert not any(found for _, _, found in nothing)
    assert looked(prompt, salt) == nothing
    assert any(found for _, _, found in looked(prompt, "mine"))


def test_state_belongs_to_its_adapter(
    start: Callable[..., LLM], llama: Checkpoint, directories: dict[str, Path]
) -> None:
    """Whatever it is called, and whatever else is loaded."""
    first = start(llama)
    first.load_adapter("it", directories["one"])
    prompt = random_tokens(60)
    answer, _ = reused(first, prompt, adapter="it")
    assert answer != llama.greedy(prompt, COUNT), "the adapter shows"
    first.close()
    second = start(llama)
    second.load_adapter("it", directories["two"])
    assert reused(second, prompt) == (llama.greedy(prompt, COUNT), 0)
    assert reused(second, prompt, adapter="it")[1] == 0
    second.load_adapter("other", directories["one"])
    assert reused(second, prompt, adapter="other") == (answer, 59)


def test_images_are_found_by_their_data(start: Callable[..., LLM], checkpoint: Checkpoint) -> None:
    """In another process, too; another image at the same place is another prompt."""
    begin, end = random_tokens(20), random_tokens(20, seed=4)
    prompts = [image([*begin, -1, -1, -1, *end], rows_of(3, seed=seed)) for seed in (1, 2)]
    first = start(checkpoint)
    answer, none = reused(first, prompts[0])
    assert none == 0
    first.close()
    second = start(checkpoint)
    other, found = reused(second, prompts[1])
    assert found <= len(begin)
    second.reset_prefix_cache()
    assert reused(second, prompts[0]) == (answer, 42)
    third = start(checkpoint, store=[])
    assert reused(third, prompts[1]) == (other, 0)
    check_store(second)


@pytest.mark.parametrize(("page_size", "chunk"), [(4, 256), (100, 200), (300, 300)])
def test_runs_are_cut_where_pages_are(make_llm: MakeLLM, llama: Checkpoint, page_size: int, chunk: int) -> None:
    llm = make_llm(llama, page_size=page_size, kv_cache_memory="4MiB")
    assert stored_of(llm).keys.layout.chunk == chunk


def test_two_engines_at_once(start: Callable[..., LLM], llama: Checkpoint) -> None:
    """What one writes, the other finds; both may write the same."""
    one, other = start(llama), start(llama)
    prompts = [random_tokens(40, seed=seed) for seed in range(4)]
    for prompt in prompts:
        for llm in (one, other):
            assert reused(llm, prompt)[0] == llama.greedy(prompt, COUNT)
    flush(one)
    flush(other)
    for llm in (one, other):
        llm.reset_prefix_cache()
        for prompt in prompts:
            assert reused(llm, prompt) == (llama.greedy(prompt, COUNT), 39)


# -- damage ----------------------------------------------------------------------------------------


def flipped(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def emptied(path: Path, rng: random.Random) -> None:
    del rng
    path.write_bytes(b"")


def gone(path: Path, rng: random.Random) -> None:
    del rng
    path.unlink()


def swapped(path: Path, rng: random.Random) -> None:
    other = rng.choice(files(path.parent.parent))
    data = other.read_bytes()
    path.write_bytes(data)


def of_version(number: int) -> Callable[[Path, random.Random], None]:
    """Whole files of another version of the format."""

    def change(path: Path, rng: random.Random) -> None:
        del rng
        data = bytearray(path.read_bytes())
        end = 8 + int.from_bytes(data[:8], "little")
        head = bytes(data[:end]).replace(rb"\"version\":1", rb"\"version\":%d" % number)
        assert head != data[:end]
        digest = xxhash.xxh3_128_hexdigest(head[:44] + b"0" * 32 + head[76:]).encode()
        path.write_bytes(head[:44] + digest + head[76:] + data[end:])
        with pytest.raises(InvalidArgument, match="version"):
            read_state(path)

    change.__name__ = f"version_{number}"
    return change


@pytest.mark.turns(7)
@pytest.mark.parametrize("fault", [flipped, cut, emptied, gone, swapped, of_version(0), of_version(2)])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_damaged_files_are_misses(
    start: Callable[..., LLM], checkpoint: Checkpoint, directory: Path, fault: Any, share: float
) -> None:
    """Never a wrong token; what was damaged is written again."""
    rng = random.Random(5)
    first = start(checkpoint)
    prompts = [random_tokens(60, seed=seed) for seed in range(3)]
    answers = [reused(first, prompt)[0] for prompt in prompts]
    first.close()
    for path in files(directory):
        if rng.random() < share:
            fault(path, rng)
    second = start(checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert reused(second, prompt)[0] == answer == checkpoint.greedy(prompt, COUNT)
        check_store(second)
    if share == 1.0 and (fault is flipped or fault.__name__.startswith("version")):  # the others are gone
        assert second.metrics()["quire:store_damaged_total"] > 0
    second.close()
    third = start(checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert reused(third, prompt)[0] == answer


def test_a_read_only_directory(start: Callable[..., LLM], llama: Checkpoint, directory: Path) -> None:
    """What cannot be written is counted, and nothing fails."""
    directory.parent.mkdir(exist_ok=True)
    directory.write_text("no directory at all")
    llm = start(llama)
    prompt = random_tokens(60)
    assert reused(llm, prompt) == (llama.greedy(prompt, COUNT), 0)
    assert reused(llm, [*prompt, 5])[0] == llama.greedy([*prompt, 5], COUNT)


# -- killed processes ------------------------------------------------------------------------------

WORK = """
import sys
from quire import LLM, SamplingParams
from tests.small_llms import random_tokens
llm = LLM(sys.argv[1], device="cpu", dtype="float32", kv_cache_memory="1MiB", page_size=4, host_memory=0, store=["file://" + sys.argv[2]])
stored = llm._engine.stored
stored.least, stored.is_worth, stored.keys.layout.chunk = 1, lambda *_: True, 8
print("ready", flush=True)
turn = int(sys.argv[3])
while True:
    llm.generate(random_tokens(50, seed=turn % 5)[: 20 + turn % 30], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    turn += 1
"""


def killed(start: Callable[..., LLM], model: Checkpoint, directory: Path, times: int, rng: random.Random) -> int:
    """Kill a working process so often; between, another engine must say the right tokens. Return
    how many tokens came from the disk."""
    found = 0
    root = Path(__file__).parents[2]
    for turn in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(model.path), str(directory), str(turn)],
            stdout=subprocess.PIPE,
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        llm = start(model)
        for seed in range(5):
            prompt = random_tokens(50, seed=seed)[:45]
            tokens, disk = reused(llm, prompt)
            assert tokens == model.greedy(prompt, COUNT)
            found += disk
        llm.close()
    return found


@pytest.mark.slow
def test_killed_at_random_moments(start: Callable[..., LLM], llama: Checkpoint, directory: Path) -> None:
    assert killed(start, llama, directory, 2, random.Random(1)) > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_a_hundred_times(start: Callable[..., LLM], llama: Checkpoint, directory: Path) -> None:
    """``tests.store.test_file_processes`` kills a writer a thousand times."""
    assert killed(start, llama, directory, 100, random.Random(2)) > 0


# -- Redis -----------------------------------------------------------------------------------------


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.thaw()
    server.kill()


def test_redis_outlives_the_engine(start: Callable[..., LLM], checkpoint: Checkpoint, redis: RedisServer) -> None:
    first = start(checkpoint, store=[redis.url])
    prompt = random_tokens(60)
    answer, _ = reused(first, prompt)
    first.close()
    second = start(checkpoint, store=["memory://4MiB", redis.url], host_memory=None)
    (output,) = second.generate(prompt, greedy(COUNT))
    assert output.outputs[0].token_ids == answer == checkpoint.greedy(prompt, COUNT)
    assert output.reuse.by_tier == {"redis": 59}
    # What came over the network stays near.
    second._engine.branches.clear_cache()
    (output,) = second.generate(prompt, greedy(COUNT))
    assert output.reuse.by_tier == {"memory": 59}


@pytest.mark.parametrize("fault", ["killed", "frozen", "flushed"])
def test_redis_that_fails(start: Callable[..., LLM], llama: Checkpoint, redis: RedisServer, fault: str) -> None:
    """Never a wrong token, and never a hang: at worst all is computed."""
    llm = start(llama, store=[redis.url])
    prompts = [random_tokens(60, seed=seed) for seed in range(4)]
    for prompt in prompts:
        reused(llm, prompt)
    flush(llm)
    llm.reset_prefix_cache()
    stored = stored_of(llm)
    asked = stored.ask(_work(llm, prompts[0]))
    match fault:
        case "killed":
            redis.kill()
        case "frozen":
            redis.freeze()
        case _:
            redis.command("FLUSHALL")
    assert asked is not None
    begun = time.monotonic()
    for prompt in prompts:
        assert reused(llm, prompt) == (llama.greedy(prompt, COUNT), 0)
    assert time.monotonic() - begun < 30
    check_store(llm)
    if fault == "killed":
        redis.start()


def _work(llm: LLM, prompt: list[int]) -> Any:
    import numpy as np

    (request,) = engine_of(llm).submit(np.array(prompt), greedy(1))
    engine_of(llm).end([request])
    return request.branch


# -- the conversation suite ------------------------------------------------------------------------


class StoredConversations(Conversations):
    """Conversations whose state goes to tiers and comes back, also in another engine."""

    def __init__(self, start: Callable[[], LLM], checkpoint: Checkpoint, seed: int, folder: Path) -> None:
        super().__init__(start(), checkpoint, seed, folder)
        self.start = start
        self.loaded = 0.0
        self.seen: set[str] = set()
        """The tiers that state came from."""
        self.branches: dict[str, list[int]] = {}
        """The tokens of each branch's last commit."""

    def evict(self) -> None:
        """Take all that can be had again out of the pool."""
        while engine_of(self.llm).runner.room.make():
            pass

    def note(self) -> None:
        """Note what came from where, at the end of an engine."""
        found = self.llm.metrics()
        self.loaded += found["quire:store_tokens_loaded_total"]
        names = (tier for tier in TIERS if found.get(f'quire:prompt_tokens_reused_total{{tier="{tier}"}}'))
        self.seen.update(names)

    def restart(self) -> None:
        """End the process, as it were, and begin again with the same tokens."""
        if self.rng.random() < 0.5:
            flush(self.llm)
        self.note()
        self.llm.close()
        self.llm = self.start()
        self.sessions = [(self.llm.session(tokens), tokens) for _, tokens in self.sessions]

    def commit(self) -> None:
        """Keep a session under a name, which may have had another one."""
        session, tokens = self.pick()
        name = self.rng.choice(["main", "side"])
        session.commit(name, force=True)
        self.branches[name] = list(tokens)

    def checkout(self) -> None:
        name = self.rng.choice(["main", "side"])
        if name in self.branches and len(self.sessions) < 10:
            session = self.llm.checkout(name)
            assert session.tokens == self.branches[name]
            self.sessions.append((session, list(self.branches[name])))

    def transfer(self) -> None:
        """Send a branch elsewhere, forget it here, and get it back."""
        name = self.rng.choice(["main", "side"])
        if name in self.branches:
            url = f"file://{self.folder / 'elsewhere'}"
            self.llm.push(name, url, force=True)
            self.llm.delete(name)
            self.llm.gc()
            self.llm.pull(name, url)

    def step(self) -> None:
        super().step()
        if self.rng.random() < 0.3:
            verbs = [self.evict, self.evict, self.restart, self.commit, self.checkout, self.checkout, self.transfer]
            self.rng.choice(verbs)()
            check_store(self.llm)


def converse(
    start: Callable[..., LLM],
    make_llm: MakeLLM,
    model: Checkpoint,
    seed: int,
    steps: int,
    folder: Path,
    tiers: list[str],
    kind: type[StoredConversations] = StoredConversations,
) -> StoredConversations:
    rng = random.Random(seed)
    known = sizes(model, make_llm)
    options = {
        "kv_cache_memory": 200 * known["bytes_per_token"] + 40 * known["state_bytes"],
        "max_num_batched_tokens": rng.choice([7, 64]),
        "enable_prefix_caching": rng.random() < 0.75,
        "store": tiers,
        "host_memory": None if any(tier.startswith("memory") for tier in tiers) else 0,
    }
    conversations = kind(lambda: start(model, **options), model, seed, folder)
    for _ in range(steps):
        conversations.step()
    conversations.restart()
    conversations.finish()
    conversations.note()
    return conversations


@pytest.mark.turns(8)
def test_conversations(
    start: Callable[..., LLM], make_llm: MakeLLM, family: Checkpoint, tmp_path: Path, directory: Path
) -> None:
    assert converse(start, make_llm, family, 11, 24, tmp_path, [f"file://{directory}"]).loaded > 0


class TieredConversations(StoredConversations):
    """Conversations that lose what near tiers have, so that each has its turn."""

    def evict(self) -> None:
        super().evict()
        store = stored_of(self.llm).store
        assert store is not None
        flush(self.llm)
        if self.rng.random() < 0.7 and store.memory is not None:
            store.memory.clear_now()
        if self.rng.random() < 0.5:
            names = [path.stem for path in files(self.folder / "store") if "-record-" not in path.name]
            store.direct(lambda tier: tier.remove([ObjectKey.parse(name) for name in names])).result(30)


def test_conversations_over_all_tiers(
    start: Callable[..., LLM], make_llm: MakeLLM, checkpoint: Checkpoint, tmp_path: Path, redis: RedisServer
) -> None:
    seen: set[str] = set()
    for seed in range(5, 15):
        folder = tmp_path / str(seed)
        folder.mkdir()
        tiers = ["memory://300KiB", f"file://{folder / 'store'}", redis.url]
        found = converse(start, make_llm, checkpoint, seed, 40, folder, tiers, TieredConversations)
        seen |= found.seen
        if {"memory", "disk", "redis"} <= seen:
            break
    assert {"memory", "disk", "redis"} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 403))
def test_long_conversations(
    start: Callable[..., LLM], make_llm: MakeLLM, family: Checkpoint, tmp_path: Path, directory: Path, seed: int
) -> None:
    tiers = [f"file://{directory}?size=2MiB"]
    if seed % 2:
        tiers.insert(0, "memory://300KiB")
    assert converse(start, make_llm, family, seed, 300, tmp_path, tiers).loaded > 0
