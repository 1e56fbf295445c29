"""A process that has the libraries of the tests in memory, those that its arguments name, and runs
pytest in forks of itself, so that a run begins at once. What is not installed is left out.

It reads lines of JSON from stdin: a file for the output, and the arguments of pytest. It answers
each with the fork's pid, and with its exit status when it has ended (negative: a signal), a line
each. It imports nothing of the project.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path


def main() -> int:
    """Serve until stdin ends. In a fork: pytest's exit status."""
    if not Path("/dev/nvidiactl").exists():  # as tests/conftest.py does it
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in sys.argv[1:]:
        with suppress(ImportError):
            importlib.import_module(name)
    if "quire" in sys.modules:
        raise SystemExit("a library imports quire, whose faults would not be seen")
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        output, *arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            return _run(output, arguments)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return 0


def _run(output: str, arguments: list[str]) -> int:
    os.setpgid(0, 0)
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        opened = os.open(output if descriptor else os.devnull, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    importlib.invalidate_caches()
    import pytest

    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
