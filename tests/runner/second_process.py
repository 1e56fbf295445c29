"""A second process that holds the same weights and runs copies of a runner's steps."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quire import LLM
from quire.base.errors import QuireError
from quire.base.types import Step
from quire.blend.rows_task import RowsPiece
from quire.runner.local import Runner, StepOutput
from quire.statefile.container import read_state

SECONDS = 120
Write: TypeAlias = tuple[int, int, int | None, dict[str, Tensor]]
"""Imported rows: sequence, layer, first position (None: the whole layer), tensors."""


def found_by(runner: Runner, step: Step, output: StepOutput) -> list[Tensor]:
    """Everything that a step has computed, and the sequences behind it."""
    found = [output.logits_RV, torch.tensor(output.starts)]
    found += [one for layers in (*output.hidden_states, *output.attention_weights) for one in layers]
    found += output.features
    found += [one for layer in sorted(output.observed) for one in output.observed[layer]]
    found += [torch.from_numpy(mask) for mask in output.left_out if mask is not None]
    found += [runner.logits[place.tensor] for place in step.inputs.places]
    return [*found, *map(torch.tensor, sequences_of(runner))]


def sequences_of(runner: Runner) -> list[list[int]]:
    """Each sequence, its length, and the positions of its kept recurrent states."""
    state: Any = runner.state
    return [[seq, state.sequence_length(seq), *state.checkpoints(seq)] for seq in state.sequences.ids]


def metadata_of(runner: Runner) -> list[Mapping[str, Any]]:
    """Each sequence's metadata, with checksums of all that its layers hold."""
    state: Any = runner.state
    return [state.get_checkpoint_metadata(seq) for seq in state.sequences.ids]


class GivenRows:
    """A source of cached rows that were sent."""

    def __init__(self, layers: Mapping[int, Sequence[RowsPiece]]) -> None:
        self.layers = layers

    def pieces(self, layer_id: int) -> Sequence[RowsPiece]:
        return self.layers[layer_id]


class Arrived:
    """A transfer that has written all layers."""

    def wait(self, layer: int) -> None:
        pass


class SecondProcess:
    """The first process's end."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there,), daemon=True)
        self._process.start()

    def ask(self, verb: str, *given: Any) -> Any:
        """Call a verb of ``Copies`` there; an error there is one here."""
        self._here.send_bytes(pickle.dumps((verb, given)))
        # A second at a time, so that one in which the machine stands still counts once.
        assert any(self._here.poll(1) for _ in range(SECONDS)), f"no answer to {verb}"
        answer = pickle.loads(self._here.recv_bytes())
        if isinstance(answer, AssertionError):
            raise answer
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


class Copies:
    """The second process's verbs."""

    llm: LLM

    def open(self, path: str, options: Mapping[str, Any]) -> None:
        self.llm = LLM(path, **options)

    def rows(self, name: int, layers: Mapping[int, Sequence[RowsPiece]]) -> None:
        """Have the cached rows that the next step names."""
        self.llm.engine.runner.row_sources.sources[name] = GivenRows(layers)

    def imported(self, writes: Sequence[Write]) -> None:
        """Write what transfers have brought."""
        state = self.llm.engine.runner.state
        for seq, layer, start, tensors in writes:
            if start is None:
                state.import_page_group(seq, layer, tensors)
            else:
                state.import_rows(seq, layer, start, tensors)

    def run(self, copy: bytes, kept: set[int], files: Mapping[int, bytes]) -> list[Tensor] | str:
        """Return what a step computes, or the name of its error. ``kept``: tensors of logits;
        ``files``: the state files that it loads."""
        runner, step = self.llm.engine.runner, pickle.loads(copy)
        runner.loads.update(dict.fromkeys(step.awaited, Arrived()))
        runner.files.update((seq, read_state(data)) for seq, data in files.items())
        for name in runner.logits.keys() - kept:
            del runner.logits[name]
        try:
            return found_by(runner, step, runner.execute(step))
        except QuireError as error:
            return type(error).__name__
        finally:
            runner.row_sources.sources.clear()
            runner.loads.clear()
            for file in runner.files.values():
                file.close()
            runner.files.clear()

    def sequences(self) -> list[list[int]]:
        """Check the state, and return its sequences."""
        runner = self.llm.engine.runner
        runner.state.check()
        return sequences_of(runner)

    def metadata(self) -> list[Mapping[str, Any]]:
        """Return the metadata of all sequences, checksums of their bytes included."""
        return metadata_of(self.llm.engine.runner)


def serve(connection: Connection) -> None:
    """Answer until the first process ends."""
    copies = Copies()
    while True:
        try:
            verb, given = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = getattr(copies, verb)(*given)
        except Exception as error:
            answer = AssertionError(f"{verb} failed in the second process: {type(error).__name__}: {error}")
        connection.send_bytes(pickle.dumps(answer))
