"""``make demo`` in a fresh clone says what it does before it takes minutes."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# In place of Python: it makes an environment out of itself, and says how it was called.
PYTHON = """#!/bin/sh
echo "python $*"
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("terminal", [False, True])
def test_demo_says_what_it_installs(terminal: bool, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = tmp_path / "venv"
    command = ["make", f"VENV={environment}", f"PYTHON={python}", "demo"]
    # As from a shell, also where make runs these tests.
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    main, side = pty.openpty()
    stderr = side if terminal else subprocess.PIPE
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, env=clean)
    os.close(side)
    os.close(main)
    assert done.returncode == 0
    said = done.stdout.splitlines()
    (pip,) = [line for line in said if "pip install" in line]
    assert said[0] == f"Making {environment} with {python}"
    installing = said.index(
        f"Installing Quire and what it needs, PyTorch among it, into {environment}: once, some minutes"
    )
    assert installing < said.index(pip)
    assert (" -q" in pip) != terminal  # on a terminal pip shows its own bars
    assert said[-1] == "python examples/demo.py"
    # The second time there is nothing to install.
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=clean)
    assert again.stdout.splitlines() == ["python examples/demo.py"]
