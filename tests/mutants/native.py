"""Plants faults in the C++ kernels.

All units are compiled once. For each fault one unit is compiled again, the one that shows it, and
the library of the copy is linked anew.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutants import harness
from tests.mutants.harness import ROOT, BrokenRun, Copy, Mutant, NotRun

KERNELS = "quire/kernels"
"""Below the sources: where the library is. Its units are in ``cpu``."""
LIBRARY = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
EMULATED = 5
"""The level that any processor runs; it runs those up to its own, too."""
LEVELS = ("portable", "AVX2", "AVX-512", "AVX-512 with bfloat16", "AMX", "emulated AMX")


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeMutant(Mutant):
    """A fault in the C++."""

    unit: str
    """The file beside ``file`` that is compiled again: a fault in a header is in no other unit."""
    level: int
    """The level whose instructions show it: a place in ``LEVELS``."""


def flags(project: Path) -> list[str]:
    """Return setup.py's with less optimisation, which takes a third of the time.

    Sums are fused as there: PyTorch's are, to which tests compare them.
    """
    found = re.search(r"extra_compile_args=(\[[^]]*\])", (project / "setup.py").read_text())
    if found is None:
        raise BrokenRun("setup.py has no extra_compile_args")
    given = ["-O1" if flag == "-O3" else flag for flag in ast.literal_eval(found[1])]
    return [*given, "-fexpensive-optimizations", "-fPIC"]


class Builder:
    """Compiles units into a folder, each under the hash of the text that it is made of."""

    def __init__(self, project: Path, objects: Path) -> None:
        self._objects, self._flags = objects, flags(project)
        objects.mkdir(parents=True, exist_ok=True)
        self._compiler = shutil.which("g++") or ""
        if not self._compiler:
            raise BrokenRun("there is no g++")

    def compiled(self, source: Path) -> Path:
        """Return the object of a unit. ``NotRun`` if it does not compile."""
        listed = self._run("-MM", str(source)).partition(":")[2].replace("\\\n", " ").split()
        text = b"\0".join(Path(name).read_bytes() for name in listed)
        made = self._objects / f"{source.stem}-{hashlib.sha256(repr(self._flags).encode() + text).hexdigest()[:20]}.o"
        if not made.exists():
            partly = made.with_suffix(".partly")
            self._run("-c", str(source), "-o", str(partly))
            partly.replace(made)
        return made

    def link(self, objects: Sequence[Path], library: Path) -> None:
        """Write a library. Who has loaded the one before keeps it."""
        partly = library.with_suffix(".partly")
        self._run("-shared", *map(str, objects), "-o", str(partly))
        partly.replace(library)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([self._compiler, *self._flags, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise NotRun(f"g++: {next((line for line in done.stderr.splitlines() if 'error' in line), done.stderr)}")
        return done.stdout


class NativeCopy(Copy):
    """A copy with a library of its own."""

    def __init__(self, builder: Builder, project: Path, folder: Path) -> None:
        super().__init__(project, folder)
        self._builder = builder
        self._folder = self.sources / KERNELS / "cpu"
        self._library = self.sources / KERNELS / LIBRARY
        try:
            self._units = {one.name: builder.compiled(one) for one in sorted(self._folder.glob("*.cpp"))}
            builder.link([*self._units.values()], self._library)
        except NotRun as error:
            raise BrokenRun(f"the kernels are not built: {error}") from error
        self._level = ctypes.CDLL(str(self._library)).quire_attention_level()

    @contextmanager
    def with_fault(self, mutant: Mutant) -> Iterator[None]:
        assert isinstance(mutant, NativeMutant)
        if mutant.level != EMULATED and mutant.level > self._level:
            raise NotRun(f"the processor has no {LEVELS[mutant.level]}")
        with super().with_fault(mutant):
            made = self._builder.compiled(self._folder / mutant.unit)
            if made == self._units[mutant.unit]:
                raise NotRun(f"{mutant.unit} is not made of {mutant.file}")
            self._builder.link([*(self._units | {mutant.unit: made}).values()], self._library)
            yield


def main(mutants: Sequence[Mutant], arguments: Sequence[str] | None = None, project: Path = ROOT) -> int:
    """As the harness's, with a folder that keeps objects for the next run."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--objects", type=Path, metavar="FOLDER")
    options, others = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="objects.") as folder:
        try:
            builder = Builder(project, options.objects or Path(folder))
        except BrokenRun as error:
            print(error, file=sys.stderr)
            return 2
        return harness.main(mutants, others, project, partial(NativeCopy, builder))
