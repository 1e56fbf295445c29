"""The conversation suite: every family through long random use of many sessions at once, in a pool
that is too small.

Fork, rewind, append, generate, sample, stream, cancel, score, save, load, close, and others served
in between: each session must continue as a fresh run of its tokens by transformers would. A new
kind of state joins by an entry in the table of families of ``tests.test_parity``, or here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.branches.test_stored_state import check_store, force, squeeze
from tests.small_llms import CONTEXT, VOCAB, Checkpoint, MakeLLM, check, engine_of
from tests.test_parity import FAMILIES, ONE_ROPE, SIZES, STATES

from quire.kv.recurrent import bytes_per_state

from .test_conversations import Conversations, run

NOT_NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "fallback-olmo": ("Olmo", {}),
    "fallback-olmo3": ("Olmo3", {"sliding_window": 9}),
    "fallback-gpt2": ("GPT2", {}),
}
"""Through transformers' layers."""

EVERY = NOT_NATIVE | {kind: (name, fields | ONE_ROPE.get(kind, {})) for kind, (name, fields) in FAMILIES.items()}


QUICK = STATES | NOT_NATIVE.keys()


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in sorted(EVERY)],
)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name, changes = EVERY[request.param]
    torch.manual_seed(sorted(EVERY).index(request.param) + 1000)
    kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    sizes = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    peer = kind(kind.config_class(**{**sizes, **changes})).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param)
    peer.save_pretrained(path)
    return Checkpoint(path, peer)


def sizes(checkpoint: Checkpoint, make_llm: MakeLLM) -> dict[str, int]:
    """Bytes of a token's K and V, and of a recurrent state."""
    llm = make_llm(checkpoint, kv_cache_memory="4MiB")
    part = engine_of(llm).runner.state.parts.recurrent
    return {
        "bytes_per_token": llm.bytes_per_token,
        "state_bytes": 0 if part is None else bytes_per_state(part.specs.values()),
    }


@pytest.mark.turns(8)
@pytest.mark.parametrize("seed", range(1))
def test_conversations(make_llm: MakeLLM, family: Checkpoint, seed: int, tmp_path: Path) -> None:
    run(make_llm, family, seed, 24, tmp_path, **sizes(family, make_llm))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 204))
def test_long_conversations(make_llm: MakeLLM, family: Checkpoint, seed: int, tmp_path: Path) -> None:
    run(make_llm, family, seed, 400, tmp_path, **sizes(family, make_llm))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300, 302))
def test_long_conversations_with_little_room(make_llm: MakeLLM, family: Checkpoint, seed: int, tmp_path: Path) -> None:
    """Pages for little more than one session, states for a few; what is given up waits in host
    memory, or is computed again.
    """
    rng = random.Random(seed)
    known = sizes(family, make_llm)
    state_bytes = known["state_bytes"]
    llm = make_llm(
        family,
        kv_cache_memory=max(104 * known["bytes_per_token"], rng.choice([6, 9]) * state_bytes) * (1 + bool(state_bytes)),
        page_size=rng.choice([1, 4]),
        max_num_batched_tokens=rng.choice([7, 64]),
        enable_prefix_caching=rng.random() < 0.75,
        **({"checkpoint_interval": rng.choice([0, 8, 20])} if state_bytes else {}),
    )
    # An object has a header of some 4 KiB beside its state.
    room = rng.choice([2, 5]) * (60 * known["bytes_per_token"] + 3 * state_bytes + 20 * 4096)
    force(llm, room, lambda *_: rng.random() < 0.8)
    conversations = Conversations(llm, family, seed, tmp_path)
    for _ in range(300):
        conversations.step()
        check_store(llm)
        if rng.random() < 0.1:
            squeeze(llm)
    conversations.finish()


class Committed(Conversations):
    """Conversations that are committed, checked out, moved to another store and back."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.heads: dict[str, list[int]] = {}

    def commit(self) -> None:
        session, tokens = self.pick()
        name = self.rng.choice("abc")
        session.commit(name, force=True)
        self.heads[name] = list(tokens)

    def checkout(self) -> None:
        name = self.rng.choice(sorted(self.heads))
        self.sessions.append((self.llm.checkout(name), list(self.heads[name])))
        if len(self.sessions) > 9:
            self.sessions.pop(0)[0].close()

    def move(self) -> None:
        name, url = self.rng.choice(sorted(self.heads)), f"file://{self.folder / 'other'}"
        self.llm.push(name, url, force=True)
        self.llm.delete(name)
        self.llm.pull(name, url)

    def step(self) -> None:
        if self.rng.random() < 0.5:
            super().step()
            return
        verbs = [self.commit, *([self.checkout, self.checkout, self.move] if self.heads else [])]
        self.rng.choice(verbs)()
        squeeze(self.llm)
        check(self.llm)


def committed(make_llm: MakeLLM, family: Checkpoint, seed: int, steps: int, folder: Path) -> None:
    rng, known = random.Random(seed), sizes(family, make_llm)
    llm = make_llm(
        family,
        kv_cache_memory=rng.choice([128, 256]) * known["bytes_per_token"] + 40 * known["state_bytes"],
        page_size=rng.choice([1, 4, 8]),
        host_memory=0,
        store=[f"file://{folder / 'store'}"],
    )
    stored = engine_of(llm).stored
    stored.least, stored.is_worth, stored.keys.layout.chunk = 1, lambda *_: rng.random() < 0.8, 8
    stored.keep = lambda *_, **__: None  # type: ignore[method-assign]
    conversations = Committed(llm, family, seed, folder)
    for _ in range(steps):
        conversations.step()
    conversations.finish()


@pytest.mark.turns(8)
@pytest.mark.parametrize("seed", range(1))
def test_conversations_with_a_history(make_llm: MakeLLM, family: Checkpoint, seed: int, tmp_path: Path) -> None:
    committed(make_llm, family, seed, 20, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(400, 403))
def test_long_conversations_with_a_history(make_llm: MakeLLM, family: Checkpoint, seed: int, tmp_path: Path) -> None:
    committed(make_llm, family, seed, 200, tmp_path)
