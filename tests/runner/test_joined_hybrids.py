"""Hybrids and mixtures whose blocks, or all of them, are one call in C++, beside the same weights
whose parts run one by one: logits and states are equal to the bit after random steps.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.models import test_moe_families, test_recurrent_families
from tests.runner.test_recurrent_rows import loaded, state_of
from torch import Tensor

from quire.base.types import Add, Chunk, Commit, Edit, Fork, Inputs, Pop, Remove, Step, TokenTree
from quire.contracts.layers import Recurrent
from quire.kernels.block import NativeBlock, NativeStack
from quire.kernels.native_library import native_problem
from quire.models.blocks import Joinable, SerialBlock
from quire.models.families import LoadedModel
from quire.runner.local import LocalRunner

HYBRIDS = (
    *("bamba", "bamba-biases", "bamba-clamped", "lfm2", "lfm2-biases-untied", "qwen3.5", "granite-4-dense"),
    *("granite-4", "lfm2-moe", "qwen3-next", "qwen3.5-moe", "lfm3"),
    *("mamba2", "mamba2-biases-tied", "nemotron-h", "nemotron-h-dense"),
    *("falcon-h1", "falcon-h1-normed", "falcon-h1-gated-first", "falcon-h1-biases-plain"),
)
MIXTURES = ("mixtral", "qwen2-moe", "qwen2-moe-some", "qwen3-moe-dense-ends", "gpt-oss-clamped")
FAMILIES = (*HYBRIDS, *MIXTURES)
"""Models whose blocks are all one call each."""


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if problem := native_problem():
        pytest.skip(problem)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls in C++, in order."""
    found: list[str] = []
    for kind, verb in ((NativeBlock, "__call__"), (NativeStack, "outputs"), (NativeStack, "model")):
        plain, name = getattr(kind, verb), f"{kind.__name__}.{verb}"

        def counted(self: Any, *given: Any, plain: Any = plain, name: str = name) -> Any:
            found.append(name)
            return plain(self, *given)

        monkeypatch.setattr(kind, verb, counted)
    return found


def apart(model: LoadedModel) -> LoadedModel:
    """Take the calls out of a model."""
    for block in model.blocks:
        if isinstance(block, Joinable):
            block.joined = None
    model.stack = None
    return model


class Twins:
    """A model with calls and one without, over states of their own."""

    def __init__(self, name: str, dtype: str, path: Path) -> None:
        family = test_moe_families if name in MIXTURES else test_recurrent_families
        tiny = family.make_checkpoint(family.named(name), path)
        self.models = loaded(tiny.path, dtype), apart(loaded(tiny.path, dtype))
        self.runners = [LocalRunner(model, state_of(model), torch.device("cpu")) for model in self.models]
        self.layers = [layer for layer, spec in enumerate(self.models[0].layer_specs) if isinstance(spec, Recurrent)]
        self.lengths: dict[int, int] = {}

    def run(self, *edits: Edit, chunks: tuple[Chunk, ...] = (), inputs: Inputs | None = None) -> None:
        """Run a step of both."""
        step = Step(edits=edits, chunks=chunks, **({} if inputs is None else {"inputs": inputs}))
        ours, plain = (runner.execute(step) for runner in self.runners)
        assert torch.equal(ours.logits_RV, plain.logits_RV)
        assert ours.logits_RV.isfinite().all()
        for one, other in zip(ours.features, plain.features, strict=True):
            assert torch.equal(one, other)

    def compare(self) -> None:
        """Compare all states of all sequences, also those that are kept."""
        one, other = (runner.state.parts.recurrent for runner in self.runners)  # type: ignore[attr-defined]
        for seq in self.lengths if self.layers else ():
            assert one.table.slots(seq).keys() == other.table.slots(seq).keys()
            for position in one.table.slots(seq):
                for layer in self.layers:
                    for state in range(len(self.models[0].layer_specs[layer].states)):  # type: ignore[union-attr]
                        assert torch.equal(
                            one.debug_get(layer, state, seq, position), other.debug_get(layer, state, seq, position)
                        )
        for runner in self.runners:
            runner.state.check()  # type: ignore[attr-defined]

    def places(self, seq: int) -> list[int]:
        """Lengths to which a sequence can go back at once."""
        state = self.runners[0].state
        if self.layers:
            found = list(state.parts.recurrent.table.slots(seq))  # type: ignore[attr-defined]
        else:
            found = [place for part in state.reachable(seq) for place in part][-4:]  # type: ignore[attr-defined]
        return [place for place in found if place < self.lengths[seq]]

    def fork(self, parent: int, child: int) -> None:
        self.run(Fork(parent, child, self.lengths[parent]))
        self.lengths[child] = self.lengths[parent]


@pytest.mark.turns(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_random_steps(name: str, dtype: str, tmp_path: Path, calls: list[str]) -> None:
    twins, random = Twins(name, dtype, tmp_path), Random(name + dtype)
    vocabulary = twins.models[0].vocab_size

    def drawn(count: int) -> list[int]:
        return [random.randrange(vocabulary) for _ in range(count)]

    for seq in range(3):
        twins.run(Add(seq))
        twins.lengths[seq] = 0
    number = 3
    for _ in range(40):
        seqs = random.sample(sorted(twins.lengths), random.randint(1, len(twins.lengths)))
        match random.choice(("decode", "decode", "decode", "prompt", "fork", "pop", "tree", "remove", "features")):
            case "decode":
                twins.run(chunks=tuple(Chunk(seq, drawn(1)) for seq in seqs))
                twins.lengths.update({seq: twins.lengths[seq] + 1 for seq in seqs})
            case "prompt" | "features" as kind:
                counts = [random.choice((1, 2, 9, 15)) for _ in seqs]
                wanted = Inputs(features=(0, 2)) if kind == "features" else None
                asked = random.choice(("last", "all"))
                chunks = tuple(Chunk(seq, drawn(count), logits=asked) for seq, count in zip(seqs, counts, strict=True))
                twins.run(chunks=chunks, inputs=wanted)
                twins.lengths.update({seq: twins.lengths[seq] + count for seq, count in zip(seqs, counts, strict=True)})
            case "fork" if len(twins.lengths) < 6:
                twins.fork(seqs[0], number)
                number += 1
            case "pop":
                if places := twins.places(seqs[0]):
                    place = random.choice(places)
                    twins.run(Pop(seqs[0], twins.lengths[seqs[0]] - place))
                    twins.lengths[seqs[0]] = place
            case "tree":
                tree = TokenTree((-1, 0, 0, 2))
                chunks = (
                    Chunk(seqs[0], drawn(4), tree=tree, logits="all"),
                    *(Chunk(seq, drawn(1)) for seq in seqs[1:]),
                )
                twins.run(chunks=chunks)
                twins.lengths.update({seq: twins.lengths[seq] + 1 for seq in seqs[1:]})
                leaf, deep = random.choice(((0, 1), (1, 2), (3, 3)))
                twins.run(Commit((seqs[0],), (leaf,)))
                twins.lengths[seqs[0]] += deep
            case "remove" if len(twins.lengths) > 2:
                twins.run(Remove(seqs[0]))
                del twins.lengths[seqs[0]]
        twins.compare()
    assert {"NativeStack.model", "NativeStack.outputs"} == set(calls)
    assert calls.count("NativeStack.model") >= 10


@pytest.mark.parametrize("name", FAMILIES)
def test_each_block_by_itself(name: str, tmp_path: Path, calls: list[str]) -> None:
    """If blocks must run one by one, each is one call."""
    twins = Twins(name, "float32", tmp_path)
    twins.models[0].stack = None
    for seq in range(2):
        twins.run(Add(seq), chunks=(Chunk(seq, [1, 2, 3, 4]),))
        twins.lengths[seq] = 4
    for token in range(3):
        twins.run(chunks=(Chunk(0, [token]), Chunk(1, [token + 9])))
    twins.compare()
    assert set(calls) == {"NativeBlock.__call__"}
    assert len(calls) == 5 * len(twins.models[0].blocks)


@pytest.mark.parametrize(
    "name", ["mamba2-gelu-narrow", "nemotron-h-latent", "bamba-biases", "mixtral", "mamba2", "falcon-h1", "nemotron-h"]
)
def test_what_is_not_joined_runs_its_parts(name: str, tmp_path: Path, calls: list[str]) -> None:
    """Prompts of more rows than a call takes, and models with other blocks."""
    twins = Twins(name, "float32", tmp_path)
    count = 9 if name in ("mamba2-gelu-narrow", "nemotron-h-latent") else 70
    twins.run(Add(0), chunks=(Chunk(0, [token % 90 for token in range(count)]),))
    twins.lengths[0] = count
    twins.compare()
    assert not [call for call in calls if call.startswith("NativeStack")]


class Busy:
    """An adapter's term that changes a map."""

    is_idle = False

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> None:
        y_TO.add_(x_TI[:, :1])


@pytest.mark.parametrize("part", ["mlp.gate_up", "mlp.down", "gate"])
def test_an_adapter_of_the_shared_expert_leaves_the_calls(part: str, tmp_path: Path, calls: list[str]) -> None:
    twins = Twins("qwen2-moe", "float32", tmp_path)
    for model in twins.models:
        model.stack = None
        for block in model.blocks:
            assert isinstance(block, SerialBlock)
            attrgetter(f"shared.{part}")(block.mlp).low_rank = Busy()
    twins.run(Add(0), chunks=(Chunk(0, [1, 2, 3, 4]),))
    assert calls == []
