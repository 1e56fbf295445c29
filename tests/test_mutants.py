"""The mutants fit the code that they break, and the harness says what it should about those that
live.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
from tests.mutants.faults import MUTANTS
from tests.mutants.harness import ROOT, BrokenRun, Harness, Mutant, main
from tests.sources import forget_sources, text_of  # noqa: F401

CODE = '''def double(x: int) -> int:
    """Twice."""  # by addition
    return x + x


def count(n: int) -> int:
    while n < 10:
        n += 1
    return n
'''
TESTS = """from quire import count, double


def test_double() -> None:
    assert double(3) == 6


def test_count() -> None:
    assert count(2) == 10
"""


def test_there_are_enough_of_different_names() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) >= 15
    assert len(set(names)) == len(names)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def changes_code(text: str, body: list[ast.stmt], mutant: Mutant) -> bool:
    """Return whether a mutant changes more than comments and the layout of the statements that it
    touches.
    """
    first = text[: text.index(mutant.old)].count("\n")
    last = first + mutant.old.count("\n")
    depth = 0
    while True:
        begin = max((node.end_lineno or 0 for node in body if (node.end_lineno or 0) <= first), default=0)
        inside = next((node for node in body if begin <= first and (node.end_lineno or 0) > last), None)
        if not isinstance(inside, ast.ClassDef) or inside.body[0].lineno > first + 1:
            break
        body, depth = inside.body, depth + 1
    end = last + 1 if inside is None else inside.end_lineno
    around = [f"{'    ' * one}if True:" for one in range(depth)]
    part = "\n".join([*around, *text.split("\n")[begin:end]])
    return ast.dump(ast.parse(part)) != ast.dump(ast.parse(part.replace(mutant.old, mutant.new)))


def test_each_changes_the_code_in_one_place() -> None:
    found = []
    for file, mutants in itertools.groupby(sorted(MUTANTS, key=lambda one: one.file), lambda one: one.file):
        text = (ROOT / "src/quire" / file).read_text()
        body = ast.parse(text).body
        for mutant in mutants:
            if text.count(mutant.old) != 1:
                found.append(f"{mutant.name}: its old text occurs {text.count(mutant.old)} times in {file}")
            elif not changes_code(text, body, mutant):
                found.append(f"{mutant.name}: only a comment or the layout differs")
    assert found == []


def test_each_has_tests_that_are_there() -> None:
    assert all(mutant.tests for mutant in MUTANTS)
    missing = []
    for name, test in ((mutant.name, test) for mutant in MUTANTS for test in mutant.tests):
        path, *parts = test.partition("[")[0].split("::")
        text = text_of(ROOT / "tests" / path)
        for part in parts:
            if not any(f"{word} {part}" in text for word in ("def", "class")) and f"\n{part} = " not in text:
                missing.append(f"{name}: {test}")
    assert missing == []


# The harness, on a project of one module and two tests.


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tests.mutants.harness.LIBRARIES", ("pytest",))
    (tmp_path / "src/quire").mkdir(parents=True)
    (tmp_path / "src/quire/__init__.py").write_text(CODE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_double.py").write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: long"]\n')
    return tmp_path


def fault(name: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, file="__init__.py", old=old, new=new, tests=tests or ("test_double.py",))


SUM = fault("sum", "return x + x", "return x * x")
COMMENT = fault("comment", "# by addition", "# by a product")
ELSEWHERE = fault("elsewhere", "n += 1", "n += 2", "test_double.py::test_double")


def test_what_survives_is_reported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SUM, COMMENT, ELSEWHERE], ["--jobs", "2"], project) == 1
    shown = capsys.readouterr().out
    assert "1 of 3 killed" in shown
    rows = {line.split()[0]: line for line in shown.partition("\nmutant ")[2].splitlines() if line}
    assert "test_double.py::test_double" in rows["sum"]
    assert "SURVIVED" in rows["comment"]
    assert "SURVIVED" in rows["elsewhere"]


@pytest.mark.slow
def test_all_killed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([SUM, COMMENT], ["--only", "sum"], project) == 0
    assert "1 of 1 killed" in capsys.readouterr().out
    assert (project / "src/quire/__init__.py").read_text() == CODE


def test_crashes_are_deaths_and_what_does_not_run_is_none(project: Path) -> None:
    crash = fault("crash", "return x + x", "import os; os.abort()")
    unknown = fault("unknown", "return x + x", "return 0", "test_double.py::test_nothing")
    broken = fault("broken", "return x + x", "return x +")
    told: list[str] = []
    with Harness(project, jobs=2) as harness:
        found = harness.run([crash, unknown, broken], lambda one: told.append(one.mutant.name))
    assert sorted(told) == ["broken", "crash", "unknown"]
    assert [(one.mutant.name, one.verdict) for one in found] == [
        ("crash", "killed"),
        ("unknown", "NOT RUN"),
        ("broken", "NOT RUN"),
    ]
    assert "signal 6" in found[0].by


@pytest.mark.slow
def test_hangs_are_deaths(project: Path) -> None:
    with Harness(project, limit=3.0) as harness:
        (late,) = harness.run([fault("hang", "n += 1", "n += 0", "test_double.py::test_count")])
    assert late.verdict == "killed"
    assert "hang" in late.by


@pytest.mark.slow
def test_one_after_the_other_on_one_copy(project: Path) -> None:
    """Texts of one size that follow within a second are told apart, and the copy is mended in
    between.
    """
    wrong, harmless = fault("wrong", "x + x", "x - x"), fault("harmless", "x + x", "x * 2")
    with Harness(project) as harness:
        verdicts = [outcome.verdict for outcome in harness.run([harmless, wrong, harmless])]
        assert verdicts == ["SURVIVED", "killed", "SURVIVED"]
        folder = harness.folder
        assert folder.exists()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("mutants", "arguments", "words"),
    [
        ([SUM], ["--only", "product"], "no mutant is called product"),
        ([fault("gone", "return 3 * x", "return x")], [], "gone: its old text occurs 0 times"),
        ([fault("twice", "return", "yield")], [], "twice: its old text occurs 2 times"),
    ],
)
def test_what_cannot_be_run_is_said(
    project: Path, capsys: pytest.CaptureFixture[str], mutants: list[Mutant], arguments: list[str], words: str
) -> None:
    assert main(mutants, arguments, project) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_tests_that_fail_by_themselves_say_nothing(project: Path) -> None:
    tests = project / "tests/test_double.py"
    tests.write_text(tests.read_text().replace("== 6", "== 7"))
    with Harness(project) as harness, pytest.raises(BrokenRun, match="do not pass without any fault"):
        harness.check_without_faults([SUM])


def test_the_copy_is_what_is_tested(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed, or stands elsewhere on the path."""
    other = project / "other"
    (other / "quire").mkdir(parents=True)
    (other / "quire/__init__.py").write_text(CODE.replace("x + x", "0"))
    tests = project / "tests/test_double.py"
    tests.write_text(f"import sys\nsys.path.insert(0, {str(other)!r})\n{TESTS}")
    with Harness(project) as harness:
        harness.check_without_faults([SUM])
    (project / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(other)!r})\n")
    (project / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\npythonpath = other\n")
    with Harness(project) as harness, pytest.raises(BrokenRun, match="not from the copy"):
        harness.check_without_faults([SUM])
