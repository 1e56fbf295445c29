"""Adapters by name: loaded, used, unloaded and loaded again, while others run, from good
directories and bad ones.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.peft_models import linear_names, merged, write_adapter
from tests.small_llms import Checkpoint, MakeLLM, check, engine_of, greedy, random_tokens
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.adapters.pool import AdapterPool
from quire.adapters.targets import linears_of
from quire.async_llm import AsyncLLM
from quire.base.errors import (
    AlreadyExists,
    CheckpointError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unsupported,
)
from quire.contracts.executor import ModelAssets
from quire.models.catalogue import bundled_adapters, bundled_models

PROMPT = random_tokens(23)
NEW = 9
LONG = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def directories(checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters for all linear maps but the head, of different weights."""
    root = tmp_path_factory.mktemp("adapters")
    sites = {name: shape for name, shape in linear_names(checkpoints["llama"].model).items() if name != "lm_head"}
    write_adapter(root / "one", sites)
    tensors = write_adapter(root / "two", sites)
    turned = {name: -tensor if "lora_B" in name else tensor for name, tensor in tensors.items()}
    save_file(turned, root / "two" / "adapter_model.safetensors")
    for tensor_file in root.glob("*/adapter_model.safetensors"):
        # As large as weights would drown the model's own: B is made smaller.
        found = load_file(tensor_file)
        save_file({name: t * (0.3 if "lora_B" in name else 1) for name, t in found.items()}, tensor_file)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def texts(checkpoints: dict[str, Checkpoint], directories: dict[str, Path]) -> dict[str | None, list[int]]:
    """What each adapter's merged weights continue ``PROMPT`` with, in float64."""
    found: dict[str | None, list[int]] = {}
    for name in (None, *directories):
        tensors = {} if name is None else load_file(directories[name] / "adapter_model.safetensors")
        model = merged(checkpoints["llama"].model, tensors)
        tokens = list(PROMPT)
        with torch.inference_mode():
            for _ in range(NEW):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found[name] = tokens[len(PROMPT) :]
    assert len({tuple(text) for text in found.values()}) == 3, "the adapters must say something else"
    return found


def text(llm: LLM, adapter: str | None) -> list[int]:
    return list(llm.generate(PROMPT, greedy(NEW), adapter=adapter)[0].outputs[0].token_ids)


def untouched(llm: LLM) -> bool:
    """Whether the model is as it was before any adapter."""
    pool = engine_of(llm).runner.adapters
    terms = [linear.low_rank for linear in linears_of(llm.model).values()]
    return all(term is None for term in terms) and not pool.ids and not pool.host_bytes and not pool.device_bytes


def test_loaded_at_the_start_used_and_unloaded(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]
) -> None:
    llm = make_llm(llama, adapters=directories)
    assert list(llm.adapters) == list(directories)
    info = llm.adapters["one"]
    assert (info.name, info.path, info.rank, info.resident) == ("one", str(directories["one"]), 3, True)
    assert info.num_bytes == sum(t.nbytes for t in load_file(directories["one"] / "adapter_model.safetensors").values())
    assert llm.status()["num_adapters"] == 2
    assert llm.metrics()["quire:adapters_loaded"] == llm.metrics()["quire:adapters_resident"] == 2
    assert llm.metrics()["quire:adapter_transfers_total"] == 2
    for name in (None, "one", None, "two", "one"):
        assert text(llm, name) == texts[name]
    for name in directories:
        llm.unload_adapter(name)
    assert untouched(llm)
    assert text(llm, None) == texts[None]
    check(llm)


def test_another_adapter_under_an_old_name_sees_nothing_of_the_old_one(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]
) -> None:
    llm = make_llm(llama)
    llm.load_adapter("it", directories["one"])
    assert text(llm, "it") == texts["one"]
    assert llm.generate(PROMPT, greedy(1), adapter="it")[0].num_cached_tokens > 0
    cached = len(engine_of(llm).cache or ())
    llm.unload_adapter("it")
    assert len(engine_of(llm).cache or ()) < cached
    llm.load_adapter("it", directories["two"])
    first = llm.generate(PROMPT, greedy(NEW), adapter="it")[0]
    assert first.num_cached_tokens == 0
    assert first.outputs[0].token_ids == texts["two"]
    check(llm)


def test_one_adapter_under_two_names_shares_what_is_cached(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]
) -> None:
    llm = make_llm(llama, adapters={"a": directories["one"], "b": directories["one"]})
    assert llm.adapters["a"].fingerprint == llm.adapters["b"].fingerprint
    assert text(llm, "a") == texts["one"]
    llm.unload_adapter("a")
    found = llm.generate(PROMPT, greedy(NEW), adapter="b")[0]
    assert found.num_cached_tokens > 0
    assert found.outputs[0].token_ids == texts["one"]


def test_every_verb_takes_a_name(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]
) -> None:
    llm = make_llm(llama, adapters=directories)
    with llm.session(PROMPT, adapter="one") as session, session.fork() as other:
        assert session.adapter == other.adapter == "one"
        assert session.generate(greedy(NEW)).outputs[0].token_ids == texts["one"]
        other.use_adapter("two")
        assert other.adapter == "two"
        other.use_adapter(None)
        assert other.adapter is None
        for bad, error in (("three", NotFound), (3, InvalidArgument), ("", InvalidArgument)):
            with pytest.raises(error):
                other.use_adapter(bad)  # type: ignore[arg-type]
        assert other.adapter is None
        with pytest.raises(FailedPrecondition, match="'one' is in use: 2 sessions"):
            llm.unload_adapter("one")
    llm.unload_adapter("one")
    check(llm)


def test_a_twin_without_a_name(make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path]) -> None:
    """The same adapter was loaded into the executor first: files open under the one that users know
    by name.
    """
    llm = make_llm(llama)
    nameless = llm.executor.load_lora(ModelAssets(path=directories["one"]))
    llm.load_adapter("x", directories["one"])
    with llm.session(PROMPT, adapter="x") as session, llm.session_from_bytes(session.to_bytes()) as restored:
        assert restored.adapter == "x"
        session.close()
        with pytest.raises(FailedPrecondition, match="1 session"):
            llm.unload_adapter("x")
        data = restored.to_bytes()
    llm.unload_adapter("x")
    with llm.session_from_bytes(data) as restored:
        assert restored.adapter == engine_of(llm).runner.adapters.get(nameless).fingerprint
    llm.executor.unload_lora(nameless)
    assert untouched(llm)


def test_in_use_by_a_request(make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path]) -> None:
    llm = make_llm(llama, adapters=directories)
    prepared = llm.requests.prepare([PROMPT], greedy(50), adapter="two")
    requests = llm.requests.submit(prepared)[0]
    for _ in range(3):
        engine_of(llm).step()
        with pytest.raises(FailedPrecondition, match="'two' is in use: 1 request uses it"):
            llm.unload_adapter("two")
    engine_of(llm).end(requests)
    llm.unload_adapter("two")
    # What was prepared names an adapter that is gone.
    with pytest.raises(NotFound):
        llm.requests.submit(prepared)
    check(llm)


def test_unloaded_and_loaded_while_others_run(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]
) -> None:
    llm = make_llm(llama, adapters={"one": directories["one"]})
    params = greedy(60)
    alone = llm.generate([PROMPT], params, adapter="one")[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    requests = [
        llm.requests.submit(llm.requests.prepare([PROMPT], params, adapter=name))[0][0] for name in ("one", None)
    ]
    steps = 0
    while not all(request.finished for request in requests):
        engine_of(llm).step()
        steps += 1
        (llm.load_adapter if steps % 2 else lambda name, _: llm.unload_adapter(name))("other", directories["two"])
    assert requests[0].output.token_ids == list(alone)
    assert requests[1].output.token_ids[:NEW] == texts[None]
    check(llm)


@pytest.mark.parametrize("rounds", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_loads_leave_nothing_behind(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]], rounds: int
) -> None:
    """Random loads, unloads and generations, also refused ones; at the end all memory is back."""
    llm = make_llm(llama, adapter_ranks=3)
    dice, loaded = random.Random(5), dict[str, str]()
    ids = set[int]()
    for count in range(rounds):
        name, kind = dice.choice("abc"), dice.choice(["one", "two"])
        match dice.choice(["load", "unload", "generate"]):
            case "load" if name not in loaded:
                llm.load_adapter(name, directories[kind])
                loaded[name] = kind
                ids.add(max(engine_of(llm).runner.adapters.ids))
            case "unload" if name in loaded:
                llm.unload_adapter(name)
                del loaded[name]
            case "generate" if name in loaded and count % 5 == 0:
                assert text(llm, name) == texts[loaded[name]]
            case "generate" if count % 50 == 0:
                assert text(llm, None) == texts[None]
    assert len(ids) > rounds / 10, "each load has an id of its own"
    for name in loaded:
        llm.unload_adapter(name)
    assert untouched(llm)
    llm.reset_prefix_cache()
    check(llm)
    assert engine_of(llm).runner.state.empty()


# -- wrong input -----------------------------------------------------------------------------------


def test_names(make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path]) -> None:
    llm = make_llm(llama, adapters={"one": directories["one"]})
    calls: list[tuple[Callable[[], Any], type[QuireError], str]] = [
        (lambda: llm.load_adapter("one", directories["two"]), AlreadyExists, "'one' is loaded already"),
        (lambda: llm.load_adapter("", directories["two"]), InvalidArgument, "non-empty"),
        (lambda: llm.load_adapter(3, directories["two"]), InvalidArgument, "non-empty"),  # type: ignore[arg-type]
        (lambda: llm.load_adapter("x", 3), InvalidArgument, "path"),  # type: ignore[arg-type]
        (lambda: llm.load_adapter("x", "./nowhere"), NotFound, "nowhere"),
        (lambda: llm.load_adapter("x", llama.path), NotFound, "adapter_config.json"),
        (lambda: llm.unload_adapter("x"), NotFound, "loaded are: 'one'"),
        (lambda: llm.generate(PROMPT, greedy(1), adapter="x"), NotFound, "loaded are: 'one'"),
        (lambda: llm.session(PROMPT, adapter="x"), NotFound, "'x'"),
        (lambda: llm.generate(PROMPT, greedy(1), adapter=3), InvalidArgument, "name"),  # type: ignore[arg-type]
    ]
    for call, error, match in calls:
        with pytest.raises(error, match=match) as caught:
            call()
        assert type(caught.value) is error
    assert list(llm.adapters) == ["one"]
    check(llm)


def test_what_does_not_fit(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]
) -> None:
    size = sum(t.nbytes for t in load_file(directories["one"] / "adapter_model.safetensors").values())
    small = make_llm(llama, adapter_ranks=2)
    with pytest.raises(ResourceExhausted, match="3"):
        small.load_adapter("one", directories["one"])
    assert untouched(small)
    tight = make_llm(llama, adapter_memory=size)
    tight.load_adapter("one", directories["one"])
    with pytest.raises(ResourceExhausted):
        tight.load_adapter("two", directories["two"])
    assert list(tight.adapters) == ["one"]
    assert text(tight, "one") == texts["one"]


def test_what_does_not_fit_is_not_read(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers say how large it is; both faces refuse it before a weight is read."""
    llm = make_llm(llama, adapter_memory=1000)
    executor = llm.executor
    monkeypatch.setattr(AdapterPool, "load", lambda self, adapter: pytest.fail("it was read"))
    with pytest.raises(ResourceExhausted, match="adapter_memory"):
        llm.load_adapter("one", directories["one"])
    with pytest.raises(ResourceExhausted, match="adapter_memory"):
        executor.load_lora(ModelAssets(path=directories["one"]))
    assert not llm.adapters


def test_a_bad_adapter_at_the_start_gives_everything_back(
    make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path], tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    for file in directories["one"].iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    (bad / "adapter_model.safetensors").write_bytes(b"\0" * 30)
    with pytest.raises(CheckpointError, match="adapter_model"):
        make_llm(llama, adapters={"good": directories["one"], "bad": bad})


def test_a_model_that_cannot(tmp_path: Path, directories: dict[str, Path]) -> None:
    """A model that runs through transformers' layers refuses all; it never answers as the base
    model.
    """
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    with LLM(tmp_path / "neox", dtype="float32", kv_cache_memory="4MiB") as llm:
        with pytest.raises(Unsupported, match="transformers"):
            llm.load_adapter("one", directories["one"])
        with pytest.raises(NotFound):
            llm.generate([1, 2], greedy(1), adapter="one")


# -- AsyncLLM --------------------------------------------------------------------------------------


def test_async(llama: Checkpoint, directories: dict[str, Path], texts: dict[str | None, list[int]]) -> None:
    llm = AsyncLLM(llama.path, dtype="float32", kv_cache_memory="4MiB", page_size=4)

    async def use() -> None:
        running = asyncio.create_task(llm.generate(PROMPT, LONG, request_id="long"))
        info = await llm.load_adapter("one", directories["one"])
        assert info.name == "one"
        await llm.load_adapter("two", directories["two"])
        assert list(await llm.adapters()) == ["one", "two"]
        found = await asyncio.gather(*(llm.generate(PROMPT, greedy(NEW), adapter=name) for name in texts))
        assert [one[0].outputs[0].token_ids for one in found] == list(texts.values())
        async with await llm.session(PROMPT, adapter="one") as session:
            assert session.adapter == "one"
            with pytest.raises(FailedPrecondition):
                await llm.unload_adapter("one")
            await session.use_adapter("two")
            assert session.adapter == "two"
        stream = llm.stream(PROMPT, greedy(NEW), adapter="two")
        assert [token async for delta in stream for token in delta.token_ids] == texts["two"]
        await llm.unload_adapter("one")
        await llm.abort("long")
        await running
        await llm.close()

    asyncio.run(use())


def test_loaded_by_many_threads_at_once(make_llm: MakeLLM, llama: Checkpoint, directories: dict[str, Path]) -> None:
    """One of them gets the name."""
    llm = make_llm(llama)
    outcomes: list[str] = []

    def load() -> None:
        try:
            llm.load_adapter("same", directories["one"])
            outcomes.append("loaded")
        except AlreadyExists:
            outcomes.append("taken")

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["loaded", "taken", "taken", "taken"]
    llm.unload_adapter("same")
    assert untouched(llm)
    gc.collect()


# -- tokenizers and chat templates beside adapters -------------------------------------------------

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(file.read_text())
    edit(found)
    file.write_text(json.dumps(found, indent=1))


def add_token(folder: Path, text: str) -> None:
    """As ``save_pretrained`` writes it after ``add_tokens``."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([text])
    tokenizer.save(str(folder / "tokenizer.json"))


def pad_with_a_token_of_its_own(folder: Path) -> None:
    add_token(folder, "<|fill|>")
    edit_json(folder / "tokenizer_config.json", lambda found: found.update(pad_token="<|fill|>"))


def in_another_format(folder: Path, tokens: dict[str, int]) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "added_tokens.json").write_text(json.dumps(tokens))


SAME: dict[str, Callable[[Path], object]] = {
    "copies": lambda folder: None,
    "rewritten": lambda folder: edit_json(
        folder / "tokenizer.json", lambda found: found.update(padding=None, truncation=None)
    ),
    "a token for padding": pad_with_a_token_of_its_own,
    "without a template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "another format": lambda folder: in_another_format(folder, {}),
}
OTHER: dict[str, tuple[Callable[[Path], object], str]] = {
    "a new token": (
        lambda folder: add_token(folder, "<|new|>"),
        "tokenizer of its own.*'<|new|>' is no such token of the model",
    ),
    "another format": (lambda folder: in_another_format(folder, {"<|new|>": 9999}), "'<|new|>' is no such token"),
    "another normalizer": (
        lambda folder: edit_json(folder / "tokenizer.json", lambda found: found.update(normalizer={"type": "NFC"})),
        "it has another normalizer",
    ),
    "another end": (
        lambda folder: edit_json(folder / "tokenizer_config.json", lambda found: found.update(eos_token="x")),
        "eos_token is 'x' and not ",
    ),
    "another template": (
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        "chat template of its own",
    ),
}


@pytest.fixture
def texted(tmp_path: Path) -> Path:
    """A bundled adapter beside a copy of its model's tokenizer."""
    model, adapter = bundled_models()["tiny-python"], bundled_adapters()["tiny-python-docstrings"]
    for file in [*adapter.iterdir(), *(model / name for name in TOKENIZER_FILES)]:
        shutil.copy(file, tmp_path / file.name)
    return tmp_path


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("tiny-python", kv_cache_memory="4MiB") as llm:
        yield llm


@pytest.mark.parametrize("which", sorted(SAME))
def test_a_tokenizer_that_is_the_models_is_taken(which: str, texted: Path, plain: LLM) -> None:
    SAME[which](texted)
    plain.load_adapter("a", texted)
    plain.unload_adapter("a")


@pytest.mark.parametrize("which", sorted(OTHER))
def test_a_tokenizer_or_template_of_an_adapters_own_is_refused_by_name(which: str, texted: Path, plain: LLM) -> None:
    edit, message = OTHER[which]
    edit(texted)
    with pytest.raises(Unsupported, match=message.replace("|", r"\|")):
        plain.load_adapter("a", texted)
    assert not plain.adapters


def test_what_the_user_chose_is_used(texted: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_token(texted, "<|new|>")
    (texted / "chat_template.jinja").write_text("{{ messages }}")
    model = str(bundled_models()["tiny-python"])
    template = str(texted / "chat_template.jinja")
    for tokenizer, told in ((model, "'<|new|>' is no such token of the model"), (str(texted), "")):
        caplog.clear()
        given = {"tokenizer": tokenizer, "chat_template": template, "adapters": {"a": str(texted)}}
        with LLM("tiny-python", kv_cache_memory="4MiB", **given) as llm:
            assert list(llm.adapters) == ["a"]
            assert (told in caplog.text) if told else ("of its own" not in caplog.text)
