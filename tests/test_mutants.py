"""The mutants fit the code that they break, and the harness says what it should about those that
live.
"""

from __future__ import annotations

import ast
import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.mutants import native
from tests.mutants.faults import MUTANTS
from tests.mutants.harness import ROOT, BrokenRun, Harness, Mutant, main
from tests.mutants.native import EMULATED, NativeMutant
from tests.mutants.native_faults import MUTANTS as NATIVE
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


@pytest.mark.parametrize("mutants", [MUTANTS, NATIVE], ids=["Python", "C++"])
def test_there_are_enough_of_different_names(mutants: Sequence[Mutant]) -> None:
    names = [mutant.name for mutant in mutants]
    assert len(names) >= 15
    assert len(set(names)) == len(names)
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in mutants}) == len(mutants)


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


def files_of(unit: Path) -> set[Path]:
    """A unit and the headers beside it that it is made of."""
    found, waiting = set[Path](), [unit]
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting += [
                unit.parent / name for name in re.findall(r'^#include "([^"]+)"', one.read_text(), re.MULTILINE)
            ]
    return found


def test_each_changes_the_kernels_in_one_place() -> None:
    found = []
    for mutant in NATIVE:
        path = ROOT / "src/quire" / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            found.append(f"{mutant.name}: its old text occurs {text.count(mutant.old)} times in {mutant.file}")
        elif re.sub("//.*", "", text).split() == re.sub("//.*", "", mutant.applied(text)).split():
            found.append(f"{mutant.name}: only a comment or the layout differs")
        if path not in files_of(path.parent / mutant.unit):
            found.append(f"{mutant.name}: {mutant.unit} is not made of {mutant.file}")
    assert found == []


def test_each_has_tests_that_are_there() -> None:
    mutants = (*MUTANTS, *NATIVE)
    assert all(mutant.tests for mutant in mutants)
    missing = []
    for name, test in ((mutant.name, test) for mutant in mutants for test in mutant.tests):
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


# The harness of the C++, on a library of two units.

UNITS = {
    "steps.h": "inline int steps(int n) { return n + 1; }  // the next\n",
    "one.cpp": '#include "steps.h"\nextern "C" int quire_one(int n) { return steps(n); }\n',
    "level.cpp": '#include "steps.h"\nextern "C" long quire_attention_level() { return steps(-1); }\n',
}
CALLS = f"""import ctypes
from pathlib import Path

LIBRARY = ctypes.CDLL(str(Path(__file__).parent / "kernels" / "{native.LIBRARY}"))


def one(n: int) -> int:
    return LIBRARY.quire_one(n)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_faults_in_a_library(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are in one unit. Not run: what does not compile, what needs another processor."""
    kernels = project / "src/quire/kernels"
    (kernels / "cpu").mkdir(parents=True)
    for name, text in UNITS.items():
        (kernels / "cpu" / name).write_text(text)
    (project / "src/quire/__init__.py").write_text(CALLS)
    (project / "setup.py").write_text('extra_compile_args=["-O3", "-std=c++17"]')
    (project / "tests/test_one.py").write_text("from quire import one\n\n\ndef test_one():\n    assert one(1) == 2\n")

    def planted(name: str, old: str, new: str, unit: str = "one.cpp", level: int = 0) -> NativeMutant:
        file, tests = "kernels/cpu/steps.h", ("test_one.py",)
        return NativeMutant(name=name, file=file, old=old, new=new, tests=tests, unit=unit, level=level)

    mutants = [
        planted("far", "n + 1", "n + 2"),
        planted("near", "// the next", "// the one behind"),
        planted("elsewhere", "n + 1", "n + 2", "level.cpp"),
        planted("wide", "n + 1", "n + 2", level=1),
        planted("emulated", "n + 1", "n + 3", level=EMULATED),
        planted("broken", "n + 1", "n +"),
    ]
    objects = project / "objects"
    assert native.main(mutants, ["--objects", str(objects)], project) == 1
    rows = {line.split()[0]: line for line in capsys.readouterr().out.partition("\nmutant ")[2].splitlines() if line}
    assert {name for name in rows if "test_one.py::test_one" in rows[name]} == {"far", "emulated"}
    assert {name for name in rows if "SURVIVED" in rows[name]} == {"near", "elsewhere"}
    assert "NOT RUN: the processor has no AVX2" in rows["wide"]
    assert "NOT RUN: g++: " in rows["broken"]
    # Objects are kept by what they are made of.
    made = set(objects.iterdir())
    assert native.main(mutants[:1], ["--objects", str(objects)], project) == 0
    assert set(objects.iterdir()) == made
    assert (kernels / "cpu/steps.h").read_text() == UNITS["steps.h"]
