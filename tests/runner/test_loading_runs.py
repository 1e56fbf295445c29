"""Steps that run while the state of their sequences is still being written, layer by layer, by
another thread: logits are those without, to the bit.

Letters: T new tokens; E model width; H heads; D head size; R, Dr columns of a latent row and those
that turn; W taps.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base.errors import FailedPrecondition
from quire.base.types import Add, Chunk, Fork, Remove, Step
from quire.contracts.layers import (
    FullAttention,
    LatentAttention,
    LayerSpec,
    Recurrent,
    RopeSpec,
    StateTensor,
    WindowedAttention,
)
from quire.contracts.model import Block, LatentExpansion, Pass
from quire.kernels.attention.sdpa import SdpaAttention
from quire.kernels.recurrence.chunked import ChunkedRecurrence
from quire.kv.exports import SequenceExport
from quire.kv.state import State
from quire.runner.local import LocalRunner

H, D, R, DR, W, VOCAB = 2, 8, 12, 4, 3, 31
E = H * D
ROPE = RopeSpec(theta=100.0, rotary_dim=4)
SIZES: dict[str, Any] = {"num_heads": H, "num_kv_heads": 1, "head_dim": D, "value_dim": D}
SPECS: dict[str, LayerSpec] = {
    "full": FullAttention(**SIZES, rope=ROPE, rope_mode="normal"),
    "inline": FullAttention(**SIZES, rope=ROPE, rope_mode="inline"),
    "window": WindowedAttention(**SIZES, window=6, rope=ROPE, rope_mode="normal"),
    "latent": LatentAttention(num_heads=H, row_dim=R + DR, value_dim=R, rope=RopeSpec(theta=50.0, rotary_dim=DR)),
    "recurrent": Recurrent(
        states=(StateTensor(shape=(W - 1, E), dtype="float32"), StateTensor(shape=(H, D, D), dtype="float32"))
    ),
}
MODELS: dict[str, tuple[str, ...]] = {
    "full": ("full",) * 4,
    "gemma": ("window", "window", "full", "window", "full"),
    "latent": ("latent", "latent", "inline"),
    "recurrent": ("recurrent",) * 3,
    "hybrid": ("recurrent", "recurrent", "full", "recurrent", "window", "latent"),
}
PROMPT = [(7 * index) % VOCAB for index in range(37)]
TAIL = [5, 3, 8, 2]


class Mixed:
    """Layers of any kinds, with weights that depend on the layer alone. ``whole``: all of them are
    one block, as where transformers runs them.
    """

    architecture, vocab_size, max_position, hidden_size = "Mixed", VOCAB, 128, E
    stack = None

    def __init__(self, kinds: Sequence[str], *, whole: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.layer_specs: Sequence[LayerSpec] = tuple(SPECS[kind] for kind in kinds)
        self.table = torch.randn(VOCAB, E, generator=generator)
        self.weights = [torch.randn(E, 4 * E, generator=generator) / 4 for _ in kinds]
        layers = [partial(self.layer, layer, kind) for layer, kind in enumerate(kinds)]
        self.blocks: Sequence[Block] = [self.all_of(layers)] if whole else layers

    @staticmethod
    def all_of(layers: Sequence[Block]) -> Block:
        def block(x_TE: Tensor, pass_: Pass) -> Tensor:
            for layer in layers:
                x_TE = layer(x_TE, pass_)
            return x_TE

        return block

    def embed(self, tokens_T: Tensor) -> Tensor:
        return self.table[tokens_T]

    def head(self, x_RE: Tensor) -> Tensor:
        return x_RE @ self.table.T

    def layer(self, layer: int, kind: str, x_TE: Tensor, pass_: Pass) -> Tensor:
        y = torch.nn.functional.normalize(x_TE, dim=-1) @ self.weights[layer]
        q_THD = y[:, :E].view(-1, H, D)
        if kind == "latent":
            key = torch.ones(H, D - DR, R) / R
            expansion = LatentExpansion(key, torch.eye(R, D).expand(H, R, D))
            out = pass_.attend_latent(layer, q_THD, y[:, E : E + R + DR], expansion)
        elif kind == "recurrent":
            mixed = pass_.convolve(layer, 0, y[:, :E], self.weights[layer][:, :W])
            k = torch.nn.functional.normalize(mixed.view(-1, H, D), dim=-1)
            v, beta = y[:, E : 2 * E].reshape(-1, H, D), y[:, :H].sigmoid()
            out = pass_.linear_attention(layer, 1, q_THD, k, v, beta_TH=beta)
        else:
            out = pass_.attend(layer, q_THD, y[:, E : E + D].view(-1, 1, D), y[:, -D:].reshape(-1, 1, D))
        return x_TE + out.flatten(1)


def make_runner(kinds: Sequence[str], *, whole: bool = False) -> LocalRunner:
    specs = [SPECS[kind] for kind in kinds]
    sizes: dict[str, Any] = {"page_size": 4, "backend": SdpaAttention()}
    if set(kinds) != {"recurrent"}:
        sizes["capacity"] = 400
    if "recurrent" in kinds:
        sizes |= {"num_states": 20, "recurrence": ChunkedRecurrence()}
    return LocalRunner(Mixed(kinds, whole=whole), State(specs, **sizes), torch.device("cpu"))


def prompted(kinds: Sequence[str], *, whole: bool = False) -> tuple[LocalRunner, SequenceExport]:
    """Sequence 0 runs the prompt; what it held is kept by sequence 1."""
    runner = make_runner(kinds, whole=whole)
    runner.execute(Step(edits=(Add(0),), chunks=(Chunk(0, PROMPT),)))
    runner.execute(Step(edits=(Fork(0, 1, -1),)))
    return runner, runner.state.open_export(1)  # type: ignore[return-value]


class Loader:
    """Writes a sequence in pieces, layer by layer, and tells who waits for one."""

    def __init__(self, runner: LocalRunner, seq: int, export: SequenceExport, shared: int, seed: int) -> None:
        self.state, self.seq, self.export = runner.state, seq, export
        self.rng = random.Random(seed)
        metadata = self.state.import_metadata(export.length)
        parent = 1 if shared else None
        self.state.prepare_import(seq, metadata, parent=parent, shared=shared)
        self.state.publish_import(seq)
        self.parts = {
            layer: [
                range(max(start, shared if layer in self.state.geometry.keeping_layers else 0), stop)
                for start, stop in one["ranges"]
            ]
            for one in metadata["held"]
            for layer in one["layers"]
        }
        self.come = threading.Condition()
        self.waited: list[int] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        try:
            for layer in self.state.pending_layers(self.seq):
                self.write(layer)
                with self.come:
                    self.come.notify_all()
        except BaseException as error:
            self.error = error

    def write(self, layer: int) -> None:
        time.sleep(self.rng.choice([0.0, 0.001, 0.004]))
        if layer in self.state.recurrent_ids:
            self.state.import_page_group(self.seq, layer, self.export.states(layer, self.export.length))
            return
        for part in self.parts[layer]:
            for start in range(part.start, part.stop, 7):
                stop = min(start + 7, part.stop)
                self.state.import_rows(self.seq, layer, start, self.export.rows(layer, start, stop))
                time.sleep(self.rng.choice([0.0, 0.0, 0.001]))

    def wait(self, layer: int) -> None:
        self.waited.append(layer)
        with self.come:
            assert self.come.wait_for(lambda: layer not in self.state.pending_layers(self.seq), 10)

    def finish(self) -> None:
        self.thread.join(10)
        assert self.error is None
        self.state.finish_import(self.seq)


@pytest.mark.product(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", [0, 20, 36])
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_runs_behind_its_loader(model: str, shared: int, whole: bool) -> None:
    """Together with a sequence that is there, which changes nothing."""
    kinds = MODELS[model]
    runner, export = prompted(kinds, whole=whole)
    state = runner.state
    step = (Chunk(9, TAIL, logits="all"), Chunk(0, [4, 6], logits="all"))
    runner.execute(Step(edits=(Fork(1, 9, -1), Fork(0, 8, -1))))
    wanted = runner.execute(Step(chunks=step))
    behind = runner.execute(Step(chunks=(Chunk(9, [1], logits="all"),)))
    runner.execute(Step(edits=(Remove(9), Remove(0), Fork(8, 0, -1))))
    for seed in range(3):
        loader = Loader(runner, 9, export, shared, seed)
        loader.thread.start()
        runner.loads[9] = loader
        found = runner.execute(Step(chunks=step, awaited=(9,)))
        loader.finish()
        assert torch.equal(found.logits_RV, wanted.logits_RV)
        assert sorted(set(loader.waited)) == loader.waited
        state.check()
        again = runner.execute(Step(chunks=(Chunk(9, [1], logits="all"),)))
        assert torch.equal(again.logits_RV, behind.logits_RV)
        runner.execute(Step(edits=(Remove(9), Remove(0), Fork(8, 0, -1))))
    runner.execute(Step(edits=(Remove(0), Remove(1), Remove(8))))
    assert state.empty()


class Broken(Exception):
    """A store that is gone."""


class Writing:
    """A transfer that writes each layer when it is waited for."""

    def __init__(self, loader: Loader, fails_at: int | None = None) -> None:
        self.loader, self.fails_at = loader, fails_at

    def wait(self, layer: int) -> None:
        if layer == self.fails_at:
            raise Broken
        self.loader.write(layer)


class Late:
    """A transfer that returns before a layer is there."""

    def wait(self, layer: int) -> None:
        pass


@pytest.mark.parametrize("model", MODELS)
def test_a_loader_that_fails_leaves_the_state_as_before_the_step(model: str) -> None:
    """At whichever layer; afterwards the sequence goes on loading, or goes away."""
    runner, export = prompted(MODELS[model])
    state = runner.state
    wanted = runner.execute(Step(edits=(Fork(1, 9, -1),), chunks=(Chunk(9, TAIL),)))
    runner.execute(Step(edits=(Remove(9),)))

    for at in range(len(MODELS[model])):
        loader = Loader(runner, 9, export, 8, at)
        runner.loads[9] = Writing(loader, fails_at=at)
        with pytest.raises(Broken):
            runner.execute(Step(chunks=(Chunk(9, TAIL),), awaited=(9,)))
        assert not state.forward_is_open
        assert state.sequence_length(9) == len(PROMPT)
        assert at in state.pending_layers(9)
        state.check()
        with pytest.raises(FailedPrecondition, match=f"layer {at} of sequence 9"):
            runner.execute(Step(chunks=(Chunk(9, TAIL),)))
        runner.loads[9] = Late()
        with pytest.raises(FailedPrecondition, match=f"layer {at} of sequence 9"):
            runner.execute(Step(chunks=(Chunk(9, TAIL),), awaited=(9,)))
        if at % 2:
            runner.execute(Step(edits=(Remove(9),)))
            continue
        runner.loads[9] = Writing(loader)
        found = runner.execute(Step(chunks=(Chunk(9, TAIL),), awaited=(9,)))
        assert torch.equal(found.logits_RV, wanted.logits_RV)
        state.finish_import(9)
        runner.execute(Step(edits=(Remove(9),)))
    state.check()


class Unwanted:
    """A transfer that must not be waited for."""

    def wait(self, layer: int) -> None:
        raise AssertionError(layer)


def test_a_transfer_is_not_waited_for_once_its_layers_are_there() -> None:
    runner, _ = prompted(MODELS["hybrid"])
    runner.loads[0] = Unwanted()
    runner.execute(Step(chunks=(Chunk(0, TAIL), Chunk(1, [1])), awaited=(0,)))


def test_a_step_that_awaits_an_unknown_transfer_changes_nothing() -> None:
    runner, _ = prompted(MODELS["hybrid"])
    with pytest.raises(FailedPrecondition, match="sequence 0 is awaited, and no transfer brings it"):
        runner.execute(Step(edits=(Fork(1, 9, -1),), chunks=(Chunk(0, TAIL),), awaited=(0,)))
    assert runner.state.sequences.ids == [0, 1]
    assert runner.state.sequence_length(0) == len(PROMPT)
