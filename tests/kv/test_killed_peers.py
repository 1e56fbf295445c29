"""Processes that are killed at random moments of a hand-over: on the side that is left, pages in
are pages out, and what has come whole has the right rows.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.channels.test_channels import listening, until
from tests.examples import examples
from tests.kv.peers import TOKENS, TRUST, compute, peer, receive, send
from tests.kv.test_transfers import same
from tests.kv.transfers import KINDS, begun, made

from quire.base.errors import DataLoss


def phase(error: DataLoss) -> str:
    """Return how far the hand-over had come."""
    found = re.search(r"(\d+) of (\d+) (?:layers|tokens)", str(error))
    if found is None:
        return "before"
    return {"0": "nothing", found[2]: "all, not acknowledged"}.get(found[1], "some")


@pytest.mark.parametrize("sends", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize("url", ["tcp://127.0.0.1:0", "shm:{}/s"], ids=["tcp", "shm"])
def test_peers_that_are_killed(url: str, sends: bool, tmp_path: Path) -> None:
    """1,000 of them in all in ``make test-all``. ``sends``: the one that is killed sends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quire.kv.contract", "quire.channels.urls"])
    chance, phases, lasted = random.Random(f"{url} {sends}"), Counter[str](), 0.05
    states, rounds = {kind: made(kind) for kind in KINDS}, examples(8, 250)
    with listening(url.format(tmp_path), TRUST) as (listener, ends, _):
        for number in range(rounds):
            kind, chunk = chance.choice(sorted(KINDS)), chance.randint(1, 13)
            child = context.Process(target=peer, args=(listener.url, sends, kind, chunk), daemon=True)
            child.start()
            until(lambda: ends, 60)
            end, state, begin = ends.pop(), states[kind], time.monotonic()
            killer = threading.Timer(chance.uniform(0, 1.2 * lasted), child.kill)
            if number:  # The first one is not killed.
                killer.start()
            try:
                if sends:
                    receive(state, kind, end)
                else:
                    send(state, kind, chunk, end)
            except DataLoss as error:
                come = phase(error)
            else:
                come = "whole"
                lasted = time.monotonic() - begin
                if sends:
                    whole = made(kind)
                    begun(whole, kind, 1)
                    compute(whole, kind, chunk)
                    same(state, 1, whole, 1)
            phases[come] += 1
            assert state.sequence_length(1) == (TOKENS if come == "whole" or not (sends or come == "before") else 0)
            if number:
                killer.join()
            child.join()
            end.close()
            state.check()
            state.remove_sequence(1)
            assert state.empty(), (number, kind, phases)
    assert 0 < phases["whole"] < rounds, phases
