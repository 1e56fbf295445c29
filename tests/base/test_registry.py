"""Modules of a package by name: each format of K and V, and each proposer, is one file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from quire.base.config import DTYPES, KV_FORMATS
from quire.base.errors import QuireError
from quire.base.registry import class_in, modules_in
from quire.base.speculation import METHODS, PROPOSERS, WITH_MODEL
from quire.kv.formats import kv_format
from quire.speculation.proposers import proposer_of


class Base:
    """What the modules of these tests have heirs of."""


def test_each_module_is_one_by_its_name() -> None:
    assert {name for name in KV_FORMATS if name in DTYPES} == set(DTYPES[1:])
    for name in KV_FORMATS:
        assert kv_format(name, torch.float32).name == ("plain" if name in DTYPES else name)
    formats = kv_format("auto", torch.bfloat16), kv_format("float16", torch.float32)
    assert [one.dtype for one in formats] == [torch.bfloat16, torch.float16]
    for method in PROPOSERS:
        assert proposer_of(method).name == method
    assert proposer_of("auto").name == "lookup"
    assert ("auto", *PROPOSERS, *WITH_MODEL, "mtp") == METHODS


def test_a_new_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No module runs before it is asked for. One that defines no heir, or several, is refused; an
    imported one is not its own."""
    package = tmp_path / "quire_registry_example"
    package.mkdir()
    given = {"__init__": "", "one": "class Heir(Base): ...", "two": "class A(Base): ...\nclass B(Base): ..."}
    given |= {"none": "from quire_registry_example.one import Heir", "broken": "raise RuntimeError"}
    for name, text in given.items():
        (package / f"{name}.py").write_text(f"from {__name__} import Base\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = modules_in(package.name)
    assert list(found) == ["broken", "none", "one", "two"]
    assert not any(name in sys.modules for name in found.values())
    heir = class_in(found["one"], Base)
    assert (heir.__name__, issubclass(heir, Base)) == ("Heir", True)
    for name, count in (("two", 2), ("none", 0)):
        with pytest.raises(QuireError, match=f"{found[name]} defines {count} heirs of Base; it needs one"):
            class_in(found[name], Base)
