"""The C++ library as a file: it must load on every processor of its kind."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

import quire.kernels.native_library as module

FILE = Path(module.__file__).parent / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
WIDE = re.compile(r"%[yz]mm\d|%xmm(1[6-9]|2\d|3[01])\b|%tmm\d|\{%k\d\}")
"""Registers that the oldest x86-64 processors lack."""

pytestmark = pytest.mark.skipif(
    not FILE.exists() or not shutil.which("objdump") or not shutil.which("nm"),
    reason="needs the C++ library, nm and objdump",
)


def functions(kinds: str) -> dict[str, str]:
    """Names and addresses of functions, by nm's letters of their kinds."""
    listed = subprocess.run(["nm", str(FILE)], capture_output=True, text=True, check=True).stdout
    return {
        name: address
        for address, kind, name in (line.split() for line in listed.splitlines() if len(line.split()) == 3)
        if kind in kinds
    }


def instructions(name: str) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={name}", str(FILE)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def called(name: str, known: dict[str, str]) -> set[str]:
    """The function and all functions of the library that it calls by name."""
    found, waiting = set[str](), [name]
    while waiting:
        one = waiting.pop()
        if one in found or one not in known:
            continue
        found.add(one)
        waiting += re.findall(r"(?:call|jmp)\s+[0-9a-f]+ <([^>+@]+)>", instructions(one))
    return found


def test_loading_the_library_needs_no_instructions_beyond_the_oldest_processors() -> None:
    """A constant that a constructor computed for AVX-512 ended every process on other machines."""
    known = functions("tT")
    begin = [name for name in known if name.startswith(("_GLOBAL__sub_I", "__cpu_indicator_init"))]
    for first in begin:
        for name in called(first, known):
            assert not WIDE.search(instructions(name)), f"{first} runs {name} when the library is loaded"


def test_what_files_for_several_processors_share_is_for_the_oldest() -> None:
    """The linker keeps one file's copy of an inline function outside of anonymous namespaces."""
    for name in functions("WVu"):
        assert not WIDE.search(instructions(name)), f"{name} is shared and has instructions of one kind of processor"
