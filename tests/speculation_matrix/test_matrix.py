"""Speculation beside everything else that an engine does: every pair of a kind of model, a
proposer, the prefix cache, grammars, adapters, preemption, forks, rewinds, restored sessions,
samples, stops, chunked prompts and steps ahead.

Each row of a covering array is one life of an LLM: sessions and prompts that share beginnings run
together, are forked, rewound and restored, and run again. What they say is what an LLM without
speculation says that has room, no cache and whole prompts; and where nothing is drawn by chance,
each token is a most likely one in one forward of the whole text in transformers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.engine.test_steps_ahead import ahead
from tests.small_llms import VOCAB, assert_empty, check, engine_of, greedy, random_tokens
from tests.speculation.test_speculation import Everything, Told, drafting, drafts_of

from quire import LLM, RequestOutput, SamplingParams, Session
from quire.kv.recurrent import bytes_per_state
from quire.speculation import likely_trees
from quire.speculation.controller import Pace
from quire.speculation.proposer import Context, Draft

from .covering import Row, covering_array, pairs_of, random_rows
from .worlds import ADAPTERS, FORMS, KINDS, World, make_world

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": tuple(KINDS),
    "proposer": ("lookup", "draft", "garbage", "half", "perfect", "broken"),
    "cache": (True, False),
    "form": (None, *FORMS),
    "adapters": ("none", "one", "mixed"),
    "pool": ("roomy", "small"),
    "fork": (False, True),
    "rewind": (False, True),
    "restore": (False, True),
    "n": (1, 3),
    "stop": (None, "string", "token"),
    "step": (512, 9),
    "ahead": (False, True),
    "drawn": ("greedy", "drawn", "penalized"),
}
PLAIN: Row = {"proposer": None, "cache": False, "pool": "roomy", "step": 512, "ahead": False}
ROWS = covering_array(FACTORS)
TOKENS = 12
"""Most tokens of a turn."""
BEGINNING = random_tokens(24, seed=8)


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


def test_the_rows_have_every_pair() -> None:
    found = {pair for row in ROWS for pair in pairs_of(row)}
    names = list(FACTORS)
    wanted = sum(len(FACTORS[a]) * len(FACTORS[b]) for i, a in enumerate(names) for b in names[i + 1 :])
    assert len(found) == wanted
    assert len(ROWS) <= 48


class Failing(Told):
    """Raises, or gives no tokens of the vocabulary, in turns; what it gives before is right."""

    def __init__(self) -> None:
        super().__init__(right=1.0)
        self.calls = 0

    def propose(self, contexts: Sequence[Context], most: Sequence[int]) -> list[Draft]:
        self.calls += 1
        found = super().propose(contexts, most)
        if self.calls % 6 == 3:
            raise RuntimeError("out of ideas")
        if self.calls % 6 == 0:
            return [Draft([*draft.tokens[:-1], VOCAB + 3], [1.0] * max(1, len(draft.tokens))) for draft in found]
        return found


@dataclass
class Life:
    """What happens to one LLM, in the order that a row says."""

    llm: LLM
    row: Row
    rounds: int = 3
    """Number of times that all run together."""
    said: list[tuple[RequestOutput, str | None, SamplingParams]] = field(default_factory=list)
    """The outputs, each with its adapter and parameters."""
    sessions: list[Session] = field(default_factory=list)

    def params(self, seed: int, **changes: Any) -> SamplingParams:
        row, given = self.row, dict[str, Any](max_tokens=TOKENS, seed=seed, temperature=0.0)
        if row["drawn"] != "greedy":
            given |= {"temperature": 0.9, "top_p": 0.95, "logprobs": 1}
        if row["drawn"] == "penalized":
            given |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {7: 1.0}, "min_p": 0.01}
        if row["stop"] == "string":
            given |= {"stop": ["3", "zz"]}
        if row["stop"] == "token":
            given |= {"stop_token_ids": [17, 28, 29, 60, 61]}
        if row["form"] is not None:
            given |= {"structured_outputs": FORMS[row["form"]]}
        elif row["stop"] is None:
            given |= {"ignore_eos": True}
        return SamplingParams(**{**given, **changes})

    def adapter(self, number: int) -> str | None:
        return {"none": None, "one": ADAPTERS[0], "mixed": (None, *ADAPTERS)[number % 3]}[self.row["adapters"]]

    def open(self, number: int) -> None:
        tokens = BEGINNING[: 10 + 4 * number] + random_tokens(6, seed=number)
        self.sessions.append(self.llm.session(tokens, adapter=self.adapter(number)))

    def together(self, seed: int) -> None:
        """Continue all sessions and some prompts in one batch."""
        prompts = [BEGINNING[:cut] + random_tokens(length, seed=seed) for cut, length in ((20, 9), (24, 17), (3, 30))]
        prompts.append(prompts[0])
        params = [self.params(seed + number) for number in range(len(self.sessions))]
        params += [self.params(seed + 50 + number, n=self.row["n"]) for number in range(len(prompts))]
        if self.row["pool"] == "small":
            prompts += [random_tokens(30, seed=seed + number) for number in range(4)]
            params += [greedy(24)] * 4
        adapter = self.adapter(seed)
        outputs = self.llm.generate([*self.sessions, *prompts], params, adapter=adapter, use_tqdm=False)
        adapters = [session.adapter for session in self.sessions] + [adapter] * len(prompts)
        self.said += zip(outputs, adapters, params, strict=True)
        check(self.llm)

    def change(self, seed: int) -> None:
        """Fork, rewind and restore what there is."""
        rng = random.Random(seed)
        if self.row["fork"]:
            parent = rng.choice(self.sessions)
            self.sessions += [parent.fork(), parent.fork(at=rng.randint(len(parent) // 2, len(parent)))]
        if self.row["rewind"]:
            for session in self.sessions[::2]:
                session.rewind(to=rng.randint(len(session) // 2, len(session)))
        if self.row["restore"]:
            old = self.sessions[seed % len(self.sessions)]
            self.sessions[seed % len(self.sessions)] = self.llm.session_from_bytes(old.to_bytes())
            old.close()
        check(self.llm)

    def leave_a_stream(self, seed: int) -> None:
        """Take one piece of a turn, and go back to its first token."""
        session = self.sessions[-1]
        before = len(session)
        stream = session.stream(self.params(seed))
        next(stream, None)
        stream.close()
        session.rewind(to=min(before + 1, len(session)))
        check(self.llm)

    def run(self) -> list[Any]:
        """Return what can be compared: all texts, the reasons of their ends, and all sessions."""
        for number in range(2):
            self.open(number)
        for number in range(1, self.rounds):
            self.together(100 * number)
            self.change(100 * number)
            self.leave_a_stream(100 * number)
            if number == 1:
                self.open(3)
        self.together(100 * self.rounds)
        found: list[Any] = [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason)
            for output, *_ in self.said
            for one in output.outputs
        ]
        found.append([(session.tokens, session.adapter) for session in self.sessions])
        for session in self.sessions:
            session.close()
        return found


def small_pool(llm: LLM, row: Row) -> int:
    """Return the bytes of a pool in which the requests of a row do not all fit."""
    state = engine_of(llm).runner.state
    slots = bytes_per_state(state.parts.recurrent.specs.values()) if state.recurrent_ids else 0  # type: ignore[attr-defined]
    return 100 * llm.bytes_per_token + (28 if llm.bytes_per_token else 10) * slots


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each world once."""
    known: dict[str, World] = {}

    def get(kind: str) -> World:
        if kind not in known:
            known[kind] = make_world(kind, tmp_path_factory.mktemp("worlds"))
        return known[kind]

    return get


@pytest.fixture(autouse=True)
def drafts_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on time."""
    monkeypatch.setattr(Pace, "drafts", lambda *_: True)
    monkeypatch.setattr(likely_trees, "LEAST_CHANCE", 0.0)


def make(world: World, row: Row, memory: int | str, **options: Any) -> LLM:
    return LLM(
        world.checkpoint.path,
        device="cpu",
        dtype="float32",
        page_size=4,
        max_num_seqs=16,
        kv_cache_memory=memory,
        enable_prefix_caching=row["cache"],
        max_num_batched_tokens=row["step"],
        adapters=world.adapters if row["adapters"] != "none" else None,
        **options,
    )


def accepts(row: Row) -> bool:
    """Return whether drafts of a row must be accepted: there is room for them, and the draft model
    knows what the model is asked for."""
    if row["proposer"] == "draft":
        return bool(row["adapters"] == "none" and row["form"] is None and row["drawn"] == "greedy")
    return row["proposer"] in ("half", "perfect") and row["pool"] == "roomy"


def live(world: World, row: Row, rounds: int) -> None:
    """Compare the life of a row with the same one without speculation, and with transformers."""
    with make(world, row | PLAIN, "4MiB") as llm:
        plain = Life(llm, row, rounds)
        expected = plain.run()
        memory = "4MiB" if row["pool"] == "roomy" else small_pool(llm, row)
    proposers: dict[str, Any] = {"garbage": Told(right=0.0), "half": Told(), "perfect": Told(right=1.0)}
    proposers["broken"] = Failing()
    told = proposers.get(row["proposer"])
    if row["proposer"] == "draft":
        draft: Any = {"speculative": {"method": "draft", "model": world.checkpoint.path, "depth": 4}}
        memory = 2 * memory if isinstance(memory, int) else memory
    else:
        draft = {"speculative": "lookup"}
    with make(world, row, memory, **draft) as llm:
        if row["ahead"]:
            ahead(llm)
        drafts_of(llm).controller = Everything()
        if told is not None:
            told.known = [
                [*output.prompt_token_ids, *one.token_ids] for output, *_ in plain.said for one in output.outputs
            ]
            drafting(llm, told)
        life = Life(llm, row, rounds)
        assert life.run() == expected
        counts = [output.speculation for output, *_ in life.said if output.speculation is not None]
        dropped = [one.dropped for one in counts if one.dropped]
        if row["proposer"] == "broken":
            assert any("out of ideas" in reason or "outside of" in reason for reason in dropped)
        else:
            assert not dropped
        if accepts(row):
            assert sum(one.accepted for one in counts) > 0
        if row["pool"] == "small" and row["model"] in ("dense", "mixed", "latent"):
            # Of the others windows and states are of one size: who was admitted may need no more.
            assert sum(output.metrics.num_preemptions for output, *_ in life.said) > 0
        assert_empty(llm)
    if row["drawn"] == "greedy":
        for output, adapter, params in life.said:
            form = row["form"] if params.structured_outputs is not None else None
            for one in output.outputs:
                assert world.says(output.prompt_token_ids, one, adapter, form, params.stop_ids)


@pytest.mark.turns(4)
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_pair(worlds: Any, row: Row) -> None:
    live(worlds(row["model"]), row, 2)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_pair_changed_twice(worlds: Any, row: Row) -> None:
    live(worlds(row["model"]), row, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_triples(worlds: Any, seed: int) -> None:
    for row in random_rows(FACTORS, 10, seed):
        live(worlds(row["model"]), row, 3)
