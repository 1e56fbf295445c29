"""Tiny random models for the engine, in float32 on the CPU, with transformers as the oracle."""

from __future__ import annotations

import copy
import math
from collections import UserList
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from tests.prefix_trees import check_trees

from quire import LLM, SamplingParams
from quire.base.types import Step
from quire.engine.engine import Engine

VOCAB = 97
CONTEXT = 256
EOS = 5
GEOMETRY = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
WINDOW = 24
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "architectures": ["Gemma3ForCausalLM"],
        },
    ),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
}
"""Without windows, with one in some layers, with one in all."""

TOLERANCE = 2 * math.sqrt(32) * torch.finfo(torch.float32).eps
"""Relative to the largest value: the rounding errors of a layer's sums grow like the root of their
length, and those of the two layers add up.
"""


def assert_near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal up to float32 rounding."""
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


class Greedy(UserList[int]):
    """The next tokens after a prompt, EOS ignored. To compare others with them takes one forward;
    they are generated where they are used, or where the others differ.
    """

    def __init__(self, checkpoint: Checkpoint, prompt: Sequence[int], count: int) -> None:
        self.checkpoint, self.prompt, self.count = checkpoint, list(prompt), count

    @property
    def data(self) -> list[int]:  # type: ignore[override]
        known, key = self.checkpoint.known, (tuple(self.prompt), self.count)
        if not self.count:
            return []
        if key not in known:
            ids = torch.tensor([self.prompt])
            out = self.checkpoint.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self.count,
                eos_token_id=None,
                pad_token_id=0,
            )
            known[key] = out[0, len(self.prompt) :].tolist()
        return known[key]

    def __eq__(self, other: object) -> bool:
        found = list(cast("Sequence[int]", other))
        return (len(found) == self.count and self.checkpoint.continues(self.prompt, found)) or self.data == found

    def __getitem__(self, at: Any) -> Any:
        """A beginning is compared as cheaply."""
        if isinstance(at, slice) and at.start is None and at.step is None:
            return Greedy(self.checkpoint, self.prompt, len(range(self.count)[at]))
        return self.data[at]

    def __len__(self) -> int:
        return self.count

    def __add__(self, other: Sequence[int]) -> list[int]:  # type: ignore[override]
        return [*self.data, *other]

    def __radd__(self, other: Sequence[int]) -> list[int]:  # type: ignore[override]
        return [*other, *self.data]


@dataclass
class Checkpoint:
    """A saved model without a tokenizer, and the same in transformers."""

    path: Path
    model: Any
    known: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)
    exact: Any = None
    """The model in float64, once it was asked for."""

    @property
    def tolerance(self) -> float:
        """As ``TOLERANCE``, which is that of two layers 32 wide, for a model of any size."""
        config = self.model.config.get_text_config()
        return float(config.num_hidden_layers * math.sqrt(config.hidden_size) * torch.finfo(torch.float32).eps)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next ``count`` tokens, EOS ignored."""
        return cast("list[int]", Greedy(self, prompt, count))

    def continues(self, prompt: Sequence[int], found: Sequence[int]) -> bool:
        """Whether ``found`` are the greedy tokens after ``prompt``; one forward instead of many."""
        if not found:
            return True
        best = self.logits([*prompt, *found[:-1]])[len(prompt) - 1 :].argmax(-1)
        return list(found) == best.tolist()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[T, V]``"""
        return self.model(torch.tensor([list(tokens)])).logits[0].float()

    @torch.inference_mode()
    def exact_logits(self, tokens: Sequence[int]) -> tuple[torch.Tensor, float]:
        """float64 ``[T, V]``, and how far float32 may be from them: as far as transformers is,
        which tells how the model magnifies rounding, and what a sum of another order adds. A
        recurrence magnifies each draw of these errors by itself, so there it is twice as far.
        """
        if self.exact is None:
            self.exact = copy.deepcopy(self.model).double()
        exact_TV = self.exact(torch.tensor([list(tokens)])).logits[0].double()
        error = float((self.logits(tokens).double() - exact_TV).abs().max())
        is_recurrent = any("mamba" in type(one).__name__.lower() for one in self.model.modules())
        error *= 2 if is_recurrent else 1
        return exact_TV, error + self.tolerance * float(exact_TV.abs().max())

    def assert_same_memory(self, found: torch.Tensor, wanted: torch.Tensor, tokens: Sequence[int]) -> None:
        """Two float32 computations of what a layer remembers of these tokens: each as far from the
        exact values, relative to the largest, as the logits may be.
        """
        exact_TV, bound = self.exact_logits(tokens)
        assert_near(found, wanted, 2 * bound / float(exact_TV.abs().max()))


def make_checkpoint(family: str, path: Path, seed: int = 0, **changes: Any) -> Checkpoint:
    name, given = FAMILIES[family]
    kind = "Gemma3Text" if name == "Gemma3" else name
    config = getattr(transformers, f"{kind}Config")(**{**GEOMETRY, **given, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed + len(family))
    with torch.no_grad():
        for parameter, weight in model.named_parameters():
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 and "embed" not in parameter else 0.5
            # Gemma's norms multiply by 1 + w.
            one = "norm" in parameter and name != "Gemma3"
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale + one)
    model.save_pretrained(path)
    return Checkpoint(path, model)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("engine")
    return {family: make_checkpoint(family, folder / family) for family in FAMILIES}


@pytest.fixture
def llama(checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    return checkpoints["llama"]


@pytest.fixture(params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Checkpoint]) -> Checkpoint:
    """Each family in turn."""
    return checkpoints[request.param]


def make_family(kind: str, path: Path, **others: Any) -> Checkpoint:
    """A checkpoint of one of the families of ``tests.test_parity``, with other fields, and with one
    set of frequencies (``ONE_ROPE``) unless these name others."""
    from tests.test_parity import FAMILIES as EVERY
    from tests.test_parity import ONE_ROPE, SIZES

    name, changes = EVERY[kind]
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")
    sizes = {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    peer = model(model.config_class(**{**sizes, **changes, **ONE_ROPE.get(kind, {}), **others})).float().eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0).add_(0.1 * torch.randn_like(parameter))
    peer.save_pretrained(path)
    return Checkpoint(path, peer)


@pytest.fixture(scope="session", params=("qwen3-next", "mamba2", "lfm2"))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Models with recurrent layers: beside attention, alone, and short convolutions."""
    return make_family(request.param, tmp_path_factory.mktemp(request.param))


MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm() -> Iterator[MakeLLM]:
    """Builds LLMs, by default with a pool of 4096 tokens, and looks for leaks at the end of the
    test.
    """
    made: list[LLM] = []

    def make(path: str | Path | Checkpoint, *, pool: int = 4096, **options: Any) -> LLM:
        where = path.path if isinstance(path, Checkpoint) else path
        given = {"device": "cpu", "dtype": "float32", **options}
        if isinstance(path, (Checkpoint, Path)):
            given.setdefault("kv_cache_memory", pool * BYTES_PER_TOKEN)
        made.append(LLM(where, **given))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
        assert_empty(llm)


@pytest.fixture
def llm(make_llm: MakeLLM, checkpoint: Checkpoint) -> LLM:
    """An LLM of each family."""
    return make_llm(checkpoint)


@pytest.fixture
def small(make_llm: MakeLLM, llama: Checkpoint) -> LLM:
    """An LLM of one family, for what does not depend on the model."""
    return make_llm(llama)


@pytest.fixture(scope="session")
def python_llm() -> Iterator[LLM]:
    """The bundled model, with its tokenizer; shared, so leave nothing behind."""
    llm = LLM("tiny-python", device="cpu", dtype="float32", kv_cache_memory="64MiB", max_model_len=512)
    yield llm
    llm.close()
    assert_empty(llm)


def engine_of(llm: LLM) -> Engine:
    return llm._engine


def check(llm: LLM) -> None:
    """All invariants of bookkeeping."""
    engine = engine_of(llm)
    engine.runner.state.check()
    if engine.cache is not None:
        check_trees(engine.cache)
        held = set(engine.runner.state.sequences.ids)
        assert set(engine.cache._entries) <= held
    owned = {session.seq for session in engine.branches.sessions.values() if session.seq is not None}
    branches = (one.branch for one in (*engine.scheduler.running, *engine.scheduler.waiting))
    running = {branch.seq for branch in branches if branch.seq is not None}
    cached = set() if engine.cache is None else {s for s, entry in engine.cache._entries.items() if not entry.live}
    owned |= engine.stored.forks
    assert set(engine.runner.state.sequences.ids) == owned | running | cached, "every sequence has an owner"


def assert_empty(llm: LLM) -> None:
    """No request, no sequence, no page is left."""
    engine = engine_of(llm)
    engine.reset_prefix_cache()
    assert engine.scheduler.idle
    assert not engine.requests.by_id
    engine.runner.state.check()
    assert engine.runner.state.empty()


@dataclass
class Recorder:
    """Steps that a runner has executed."""

    steps: list[Step] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def forwards(self) -> list[Step]:
        return [step for step in self.steps if step.chunks]


def attention_layer(llm: LLM) -> int:
    """The first layer with attention; without any (Mamba-2) the test is skipped."""
    found = next((layer for layer, spec in enumerate(llm.model.layer_specs) if spec.kind == "full"), None)
    if found is None:
        pytest.skip("the model has no attention layer")
    return found


def recurrent_layer(llm: LLM) -> int:
    """The first recurrent layer."""
    return next(layer for layer, spec in enumerate(llm.model.layer_specs) if spec.kind == "recurrent")


def record(llm: LLM) -> Recorder:
    """Note every step from now on."""
    recorder, runner = Recorder(), engine_of(llm).runner
    execute = runner.execute

    def recording(step: Step) -> Any:
        recorder.steps.append(step)
        return execute(step)

    runner.execute = recording  # type: ignore[method-assign]
    return recorder


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, VOCAB, length).tolist()


def greedy(count: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": count, "ignore_eos": True, **changes})


def token_ids(outputs: Sequence[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]
