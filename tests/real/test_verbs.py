"""Sessions, state files, blending and a killed process over a real model."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import torch
from tests.real.test_parity import kl, texts

from quire import LLM, BlendParams, SamplingParams, Segment, Session

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def alone(llm: LLM, ids: list[int]) -> torch.Tensor:
    """The logits after ``ids`` in a session that shares no state with others."""
    with llm.session(ids, cache_salt="alone") as session:
        return session.logits().double()


def check(llm: LLM, session: Session) -> None:
    """The next token is that of a fresh session with the same tokens."""
    # Chunks differ between the two, and with them the order of sums in float32.
    assert kl(alone(llm, session.tokens)[None], session.logits().double()[None]) < 1e-6


def test_random_verbs(llm: LLM, tmp_path: Path) -> None:
    generator, pool = random.Random(3), texts(llm)
    sessions = [llm.session(pool[0][:50])]
    for step in range(40):
        session = generator.choice(sessions)
        match generator.choice(("append", "generate", "fork", "rewind", "edit", "save", "bytes")):
            case "append":
                start = generator.randrange(400)
                session.append(generator.choice(pool)[start : start + generator.randrange(1, 60)])
            case "generate":
                session.generate(GREEDY)
            case "fork":
                sessions.append(session.fork(at=generator.randrange(1, len(session) + 1)))
            case "rewind":
                session.rewind(to=generator.randrange(1, len(session) + 1))
            case "edit":
                start = generator.randrange(len(session) - 1)
                session.edit(range(start, start + 1), pool[1][start : start + 3])
            case "save":
                session.save(tmp_path / f"{step}.quire")
                sessions.append(llm.load_session(tmp_path / f"{step}.quire"))
            case _:
                sessions.append(llm.session_from_bytes(session.to_bytes()))
        check(llm, sessions[-1])
        check(llm, session)
        while len(sessions) > 4:
            sessions.pop(generator.randrange(len(sessions))).close()
    for session in sessions:
        session.close()


def test_blending_everything_anew_is_exact_and_less_is_near(llm: LLM) -> None:
    """Two documents whose state is reused in another order."""
    one, two, three, _ = texts(llm)
    tail = three[:20]
    llm.warm([Segment(one), Segment(two)])
    exact = alone(llm, [*two, *one, *tail])
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=20)

    def first(ratio: float) -> tuple[int, dict[int, float]]:
        """Return the number of tokens with reused state, and the likeliest first tokens."""
        prompt = [Segment(two), Segment(one), tail]
        output = llm.generate([prompt], params, blend=BlendParams(ratio=ratio, gate=False), cache_salt=None)[0]
        assert output.blend is not None
        chances = output.outputs[0].logprobs
        assert chances is not None
        return output.blend.blended, {token: found.logprob for token, found in chances[0].items()}

    base = exact.log_softmax(-1)
    # In this order: the exact state would be found in the prefix cache.
    blended, some = first(0.3)
    assert blended > len(one) // 2
    assert int(base.argmax()) in sorted(some, key=some.__getitem__)[-5:]
    _, all_anew = first(1.0)
    assert max(abs(float(base[token]) - value) for token, value in all_anew.items()) < 1e-3  # sums in another order


PROGRAM = """
import sys
from quire import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", kv_cache_memory="256MiB", max_model_len=2048, state_dir=sys.argv[2])
session = llm.session("import json\\n\\n\\ndef load(path):\\n", name="kept")
for _ in range(100):
    session.generate(SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    print(*session.tokens, flush=True)
"""


def test_a_killed_process_loses_no_finished_turn(llm: LLM, file: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(file), str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    turns = [list(map(int, process.stdout.readline().split())) for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    with LLM(str(file), dtype="float32", kv_cache_memory="256MiB", max_model_len=2048, state_dir=tmp_path) as again:
        session = again.resume("kept")
        assert session.tokens[: len(turns[-1])] == turns[-1]
        check(llm, session)
        session.generate(GREEDY)
        check(llm, session)
