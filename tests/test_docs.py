"""Every Python example in README, the concept pages, the executors' page and the examples runs as
pasted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.server.conftest import Served, llm, served

__all__ = ["llm", "served"]

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "docs/concepts.md",
    "docs/executor.md",
    "docs/speculation.md",
    "docs/ranks.md",
    "docs/examples.md",
    "docs/kv_state.md",
    "docs/inspector.md",
]
SERVER = "http://127.0.0.1:8000"
"""Where examples find a server of tiny-python."""
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
        assert blocks, f"{page} has no examples"
        if page == "README.md":  # its examples go on from each other
            blocks = ["\n".join(blocks)]
        found += [(f"{page}:{number}", block) for number, block in enumerate(blocks, start=1)]
    return found


@pytest.mark.product(3)
@pytest.mark.parametrize(("name", "code"), examples(), ids=[name for name, _ in examples()])
def test_example_runs_as_pasted(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if SERVER in code:
        pytest.importorskip("openai")
        served: Served = request.getfixturevalue("served")
        code = code.replace(SERVER, served.url)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_readme_has_seven_examples() -> None:
    assert len(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) == 7


def test_every_kind_of_call_has_an_example() -> None:
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    code = "\n".join(BLOCK.findall(page))
    for call in (
        "llm.chat(",
        "session.chat(",
        "chat_template=",
        "session.stream(",
        "session.stream_chat(",
        "AsyncLLM",
        "asyncio.gather(",
        "StructuredOutputs(",
        "tool_choice=",
        "stream=True",
        "llm.beam_search(",
        ".fork(n=",
        "window=",
    ):
        assert call in code, call


PROSE = sorted(
    str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")] if path.name != "rules.md"
)


def test_linked_files_exist() -> None:
    for page in [*PAGES, *PROSE]:
        text = (ROOT / page).read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert ((ROOT / page).parent / link).exists(), f"{page} links to {link}, which is not there"


def test_prose_fits_in_100_columns() -> None:
    """Code and tables aside. ``docs/rules.md`` is made of the rule table."""
    found = []
    for page in PROSE:
        code = False
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            if len(line) > 100 and not code and not line.startswith(("|", "    ")):
                found.append(f"{page}:{number}")
    assert not found


def test_the_map_and_the_front_page_stay_short() -> None:
    assert len((ROOT / "docs/design.md").read_text(encoding="utf-8").splitlines()) <= 200
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 142
    assert len(readme.split()) <= 1500
