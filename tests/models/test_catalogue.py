"""Names of models: bundled, local, on the Hub; and one sentence for each that leads nowhere."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from quire.base.errors import InvalidArgument, NotFound
from quire.models import catalogue
from quire.models.catalogue import (
    ADAPTER_FILES,
    bundled_models,
    registered_architectures,
    resolve_adapter,
    resolve_model,
    resolve_tokenizer,
)
from quire.models.loading import load_model


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """No test asks the real Hub; calls are recorded."""
    calls: list[tuple[Any, ...]] = []

    def snapshot_download(name: str, **kwargs: Any) -> str:
        calls.append((name, kwargs))
        return "/snapshot"

    def model_info(name: str, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(siblings=[])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "model_info", model_info)
    return calls


def test_bundled_models_load() -> None:
    assert "tiny-python" in bundled_models()
    for name, path in bundled_models().items():
        assert resolve_model(name) == path
        assert load_model(path).architecture in registered_architectures()


def test_architectures_and_their_kinds_of_state() -> None:
    found = registered_architectures()
    full = ("LlamaForCausalLM", "Olmo2ForCausalLM", "StableLmForCausalLM", "GraniteForCausalLM", "Glm4ForCausalLM")
    windowed = (
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Phi3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Cohere2ForCausalLM",
        "SmolLM3ForCausalLM",
    )
    assert found.items() >= {**dict.fromkeys(full, ("full",)), **dict.fromkeys(windowed, ("full", "window"))}.items()


def test_local_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: list[Any]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "tiny-python").mkdir()
    assert resolve_model("org/model") == Path("org/model")
    assert resolve_model("~/org/model") == tmp_path / "org" / "model"
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model("tiny-python") == bundled_models()["tiny-python"]
    assert resolve_model("./tiny-python") == Path("tiny-python")
    assert hub == []


def test_hub_repositories_are_fetched_at_their_revision(hub: list[Any]) -> None:
    assert resolve_model("org/model-1.5", revision="v2") == Path("/snapshot")
    [(name, kwargs)] = hub
    assert (name, kwargs["revision"]) == ("org/model-1.5", "v2")
    wanted = {
        "model.safetensors": True,
        "model-00001-of-00002.safetensors": True,
        "model.safetensors.index.json": True,
        "config.json": True,
        "generation_config.json": True,
        "tokenizer.json": True,
        "tokenizer.model": True,
        "chat_template.jinja": True,
        "consolidated.safetensors": False,
        "original/consolidated.00.pth": False,
        "pytorch_model.bin": False,
        "README.md": False,
    }
    for file, expected in wanted.items():
        allowed = any(fnmatch.fnmatch(file, pattern) for pattern in kwargs["allow_patterns"])
        ignored = any(fnmatch.fnmatch(file, pattern) for pattern in kwargs["ignore_patterns"])
        assert (allowed and not ignored) == expected, file


@pytest.mark.parametrize(
    "name", ["./nowhere", "/no/such/directory", "a/b/c", "../x", "bad name", "x" * 5000 + "/", "a\0b"]
)
def test_paths_that_lead_nowhere(name: str, hub: list[Any]) -> None:
    with pytest.raises(NotFound, match=r"no such directory; expected a bundled model \(tiny-python\)"):
        resolve_model(name)
    assert hub == []


def test_a_name_may_have_the_hubs_address(hub: list[Any]) -> None:
    for name in ("hf.co/org/x", "https://huggingface.co/org/x"):
        resolve_model(name)
    assert [asked for asked, _ in hub] == ["org/x", "org/x"]
    with pytest.raises(NotFound, match=r"'https://other\.example/org/x'"):
        resolve_model("https://other.example/org/x")
    with pytest.raises(NotFound, match=r"'./x\.gguf': there is no such file; expected"):
        resolve_model("./x.gguf")


def test_a_tokenizer_is_called_one() -> None:
    with pytest.raises(NotFound, match=r"^tokenizer './x': there is no such directory; expected a bundled tokenizer"):
        resolve_tokenizer("./x")
    assert resolve_tokenizer("tiny-python") == resolve_model("tiny-python")


def test_files_empty_names_and_revisions_of_directories(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(NotFound, match="is a file; expected a bundled model"):
        resolve_model(str(tmp_path / "model.bin"))
    with pytest.raises(InvalidArgument, match="model name is empty"):
        resolve_model("")
    for name in (str(tmp_path), "tiny-python"):
        with pytest.raises(InvalidArgument, match="revision is 'main'"):
            resolve_model(name, revision="main")


def test_the_name_of_a_missing_file_is_no_name_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **given: pytest.fail("the Hub was asked"))
    with pytest.raises(NotFound, match=r"'model-Q4_K_M\.gguf': there is no such file; expected"):
        resolve_model("model-Q4_K_M.gguf")


def http_error(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    """Without a response, whose class depends on the HTTP library that the Hub's client uses."""
    error = kind.__new__(kind)
    error.args = ("first line\nsecond line",)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError), "gated: accept its terms .* and set HF_TOKEN"),
        (
            http_error(errors.RepositoryNotFoundError),
            r"no such file or directory, and no such repository .*; expected a bundled model \(tiny-python\)",
        ),
        (http_error(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (http_error(errors.HfHubHTTPError), r"could not be fetched \(first line\)"),
        (errors.LocalEntryNotFoundError("long story"), "no such file or directory, .* cannot be reached .*tiny-python"),
        (errors.OfflineModeIsEnabled("long story"), "cannot be reached .*tiny-python"),
        (errors.HFValidationError("not a repo id"), r"could not be fetched \(not a repo id\)"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_hub_errors_are_one_sentence(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(NotFound, match=message) as raised:
        resolve_model("org/model", revision="v9")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is error


def test_the_hub_library_is_not_imported_for_local_names() -> None:
    assert not hasattr(catalogue, "huggingface_hub")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A repository of the Hub with these files, of which a snapshot holds what its
    patterns allow."""

    def make(*files: str, error: Exception | None = None) -> None:
        def snapshot_download(name: str, **kwargs: Any) -> str:
            for file in files:
                if any(fnmatch.fnmatch(file, pattern) for pattern in kwargs["allow_patterns"]):
                    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
                    (tmp_path / file).touch()
            return str(tmp_path)

        def model_info(name: str, **kwargs: Any) -> SimpleNamespace:
            assert name == "org/adapter"
            if error is not None:
                raise error
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "model_info", model_info)

    return make


def test_adapters_of_the_hub(repository: Callable[..., None], tmp_path: Path) -> None:
    repository("README.md", *ADAPTER_FILES, error=AssertionError("asked for files that are there"))
    assert resolve_adapter("org/adapter") == tmp_path
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(ADAPTER_FILES)


HOLDS = "an adapter's repository holds adapter_config.json and adapter_model.safetensors"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((), f"the repository has no adapter_config.json; {HOLDS}, as PEFT saves them$"),
        (("config.json", "model.safetensors"), f"has no adapter_config.json; it seems to be a model; {HOLDS}"),
        (("adapter_config.json",), f"the repository has no adapter_model.safetensors; {HOLDS}"),
        (
            ("adapter_config.json", "adapter_model.bin"),
            f"no adapter_model.safetensors; its weights are in 'adapter_model.bin', a pickle, .*as safetensors; {HOLDS}",
        ),
        (
            [f"{name}/{file}" for name in ("b", "a/x", "c", "d", "e") for file in ADAPTER_FILES],
            f"no adapter_config.json; {HOLDS}.*; it has adapters in 'a/x', 'b', 'c', 'd' and 1 more: fetch it and give",
        ),
    ],
)
def test_repositories_without_an_adapter(files: list[str], message: str, repository: Callable[..., None]) -> None:
    repository(*files)
    with pytest.raises(NotFound, match=f"adapter 'org/adapter': .*{message}"):
        resolve_adapter("org/adapter")


@pytest.mark.parametrize("error", [errors.OfflineModeIsEnabled("offline"), RuntimeError("whatever")])
def test_repositories_that_cannot_be_listed(error: Exception, repository: Callable[..., None]) -> None:
    repository("adapter_config.json", "adapter_model.bin", error=error)
    with pytest.raises(NotFound, match=f"'org/adapter': the repository has no adapter_model.safetensors; {HOLDS}"):
        resolve_adapter("org/adapter")
