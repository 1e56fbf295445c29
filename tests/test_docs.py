"""Every Python example in README and the concept pages runs as pasted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/concepts.md", "docs/executor.md"]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
        assert blocks, f"{page} has no examples"
        found += [(f"{page}:{number}", block) for number, block in enumerate(blocks, start=1)]
    return found


@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
def test_example_runs_as_pasted(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_readme_has_six_examples() -> None:
    assert len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) == 6


def test_linked_files_exist() -> None:
    for page in [*PAGES, "docs/design.md", "docs/statefile.md", "docs/server.md", "docs/log.md"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert ((ROOT / page).parent / link).exists(), f"{page} links to {link}, which is not there"
