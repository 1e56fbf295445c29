"""The models on this machine, as ``quire models`` and a command without a model list them."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.cli.local_models import LocalModel, models_here
from quire.models.catalogue import resolve_model
from quire.models.ollama_files import ollama_file

GGUF = b"GGUF" + bytes(96)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, in which the working directory is."""
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def write(path: Path, content: bytes | object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def others() -> list[LocalModel]:
    """All but the bundled ones."""
    found = models_here()
    assert found[0].name == "tiny-python"
    assert found[0].nbytes > 1 << 20
    return [one for one in found if one.place != "bundled"]


def test_nothing_is_found_where_nothing_is(home: Path) -> None:
    write(Path("config.json"), {"model_type": "llama"})
    write(Path("notes/config.json"), {"colour": "blue"})
    write(Path("notes/model.safetensors"), b"x")
    write(Path("broken/config.json"), b"{")
    write(Path("deep/config.json"), b"[" * 100_000)
    write(Path("deep/model.safetensors"), b"x")
    write(Path("mmproj-x.gguf"), GGUF)
    write(Path("half-00001-of-00002.gguf"), GGUF)
    write(Path("pointer.gguf"), b"version https://git-lfs.github.com/spec/v1")
    Path("folder.gguf").mkdir()
    for name, wrong in (("a", b"not JSON"), ("b", {"layers": ["x", {}]}), ("c", {"layers": [], "config": "x"})):
        write(home / f".ollama/models/manifests/r/library/{name}/latest", wrong)
    assert others() == []


def test_this_directory(home: Path) -> None:
    config = {"model_type": "llama", "torch_dtype": "bfloat16"}
    write(Path("plain/config.json"), config)
    write(Path("plain/model.safetensors"), bytes(7))
    write(Path("small/config.json"), {**config, "quantization_config": {"quant_method": "fp8"}})
    write(Path("small/model.safetensors"), bytes(5))
    write(Path("a-7B-Q4_K_M.gguf"), GGUF)
    for part in ("1", "2"):
        write(Path(f"b-IQ2_XS-0000{part}-of-00002.gguf"), GGUF)
    place = "this directory"
    assert others() == [
        LocalModel("./plain", "bfloat16", 7, place),
        LocalModel("./small", "fp8", 5, place),
        LocalModel("a-7B-Q4_K_M.gguf", "Q4_K_M", 100, place),
        LocalModel("b-IQ2_XS-00001-of-00002.gguf", "IQ2_XS", 200, place),
    ]


def test_the_hubs_cache(home: Path) -> None:
    for repo, files in (
        (
            "models--org--plain",
            {"config.json": {"model_type": "llama", "dtype": "float16"}, "model.safetensors": bytes(9)},
        ),
        ("models--org--files", {"x-Q8_0.gguf": GGUF, "x-Q4_0.gguf": GGUF}),
        ("models--org--one", {"x-F16.gguf": GGUF}),
        ("models--org--texts", {"README.md": b"x"}),
        ("datasets--org--data", {"config.json": {"model_type": "x"}, "a.safetensors": bytes(9)}),
    ):
        folder = home / "hub" / repo
        write(folder / "refs/main", b"a" * 40)
        for name, content in files.items():
            write(folder / "snapshots" / ("a" * 40) / name, content)
    found = [(one.name, one.weights, one.nbytes) for one in others()]
    assert found == [
        ("org/files:Q4_0", "Q4_0", 100),
        ("org/files:Q8_0", "Q8_0", 100),
        ("org/one", "F16", 100),
        ("org/plain", "float16", 9),
    ]


def test_folders_of_other_programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def blob(content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        write(home / f".ollama/models/blobs/sha256-{digest}", content)
        return f"sha256:{digest}"

    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": blob(b"template")},
        {"mediaType": "application/vnd.ollama.image.model", "digest": blob(GGUF)},
    ]
    manifest = {"config": {"digest": blob(b'{"file_type": "Q4_K_M"}')}, "layers": layers}
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/small/1b", manifest)
    write(home / ".ollama/models/manifests/hf.co/org/x/latest", manifest)
    adapted = [*layers, {"mediaType": "application/vnd.ollama.image.adapter", "digest": layers[0]["digest"]}]
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/adapted/1b", {"layers": adapted})
    outside = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../x"}]
    write(home / ".ollama/models/manifests/host.example/library/odd/1b", {"layers": outside})
    write(home / ".cache/llama.cpp/ggml-org_x_x-Q6_K.gguf", GGUF)
    write(home / ".lmstudio/models/org/y/y-Q5_0.gguf", GGUF)
    assert [(one.weights, one.nbytes, one.place) for one in others()] == [
        ("Q4_K_M", 100, "ollama"),
        ("Q4_K_M", 100, "ollama"),
        ("Q6_K", 100, "llama.cpp"),
        ("Q5_0", 100, "LM Studio"),
    ]
    assert [one.name for one in others()[:2]] == ["hf.co/org/x:latest", "small:1b"]
    assert all(resolve_model(one.name).read_bytes() == GGUF for one in others())
    assert resolve_model("hf.co/org/x") == resolve_model("small:1b")
    for name in ("small", "adapted:1b", "odd:1b"):  # another tag, another model with an adapter, no blob
        assert ollama_file(name) is None
    write(Path("small:1b/config.json"), {})
    assert resolve_model("small:1b") == Path("small:1b"), "what lies here comes first"
    monkeypatch.setenv("LLAMA_CACHE", str(home / ".cache/llama.cpp"))
    assert len(others()) == 4, "a folder that is named twice counts once"


@pytest.mark.parametrize("command", ["serve", "chat", "run"])
def test_a_command_without_a_model_lists_them(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("a-Q4_0.gguf"), GGUF)
    monkeypatch.setattr(sys, "argv", ["quire", command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    command = "chat" if command == "run" else command
    assert (ended.value.code, out) == (2, "")
    assert err.startswith(f"quire: {command} needs a MODEL: ")
    assert "tiny-python" in err
    assert err.endswith(f"For example: quire {command} a-Q4_0.gguf\n")


def test_models_lists_them(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("a-Q4_0.gguf"), GGUF)
    monkeypatch.setattr(sys, "argv", ["quire", "models"])
    with pytest.raises(SystemExit):
        cli.main()
    out = capsys.readouterr().out
    assert "a-Q4_0.gguf" in out
    assert "LlamaForCausalLM" in out
