"""``kill -9`` at any moment of a save: the final name holds a complete state, the old or the new
one, or nothing.

A launcher imports torch once and forks writers; each saves over and over until it is killed. The
test asserts that some kills came in the middle of a save, so that it has seen what it claims.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.base.errors import NotFound
from quire.statefile.container import plan_of, read_state, write_state

ROUNDS = 25
LAUNCHER = """
import os, random, signal, sys, time
import torch
from quire.base.errors import NotFound
from quire.statefile.container import read_state, write_state
from quire.statefile.header import TensorSpec

path, rounds = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
plan = [TensorSpec(name=f"layer.{i}", dtype=torch.float32, shape=(1 << 15,)) for i in range(8)]
plan.append(TensorSpec(name="chat", dtype=torch.uint8, shape=(4099,)))  # text, as a session's chat


def save_for_ever(generation):
    while True:
        write_state(path, {"generation": generation}, plan,
                    ((spec.name, torch.full(spec.shape, generation % 256, dtype=spec.dtype)) for spec in plan))
        generation += 1


def generation_found():
    try:
        with read_state(path) as state:  # verifies every checksum
            generation = state.metadata["generation"]
            for name in state.names:
                assert state.tensor(name).eq(generation % 256).all(), name
            return generation
    except NotFound:
        return None


def temporaries():
    return [name for name in os.listdir(os.path.dirname(path)) if name.endswith(".tmp")]


interrupted = saved = last = 0
random.seed(0)
for _ in range(rounds):
    before = set(temporaries())
    pid = os.fork()
    if not pid:
        try:
            save_for_ever(last + 1)
        finally:
            os._exit(1)
    time.sleep(random.uniform(0.0, 0.06))
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "a writer ended by itself"
    found = generation_found()
    if found is None:
        assert last == 0, "a state that was there is gone"
    else:
        assert found >= last, (found, last)
        saved += found > last
        last = found
    interrupted += bool(set(temporaries()) - before)
    assert len(temporaries()) <= 1, "a later save did not clean up"
print(interrupted, saved, last)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_never_leaves_a_bad_file(tmp_path: Path) -> None:
    path = tmp_path / "a.quire"
    with pytest.raises(NotFound):
        read_state(path)
    result = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(path), str(ROUNDS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    interrupted, saved, last = map(int, result.stdout.split())
    assert interrupted >= 3, "hardly any kill came during a save: the test shows nothing"
    assert saved >= 3, "hardly any save was complete: the test shows nothing"

    # Whatever the last killed writer left is cleaned up by the next save.
    tensors = {"a": torch.ones(1)}
    write_state(path, {"generation": last + 1}, plan_of(tensors), tensors.items())
    assert os.listdir(tmp_path) == ["a.quire"]
