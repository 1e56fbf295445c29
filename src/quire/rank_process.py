"""The process of one rank: it loads its part of the model, makes its state, and replays steps."""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from quire.base.errors import CheckpointError, QuireError
from quire.build import RankPart, dependences_of, division_of, joined, layer_kernels, make_adapters, make_state
from quire.kernels.cpu_process import keep_freed_memory
from quire.kv.formats import kv_format
from quire.models.families import LoadedModel
from quire.models.fingerprint import checkpoint_mark
from quire.models.loading import load_model
from quire.runner.local import LocalRunner
from quire.runner.pool_budget import PoolSizes
from quire.runner.rank_messages import receive, send
from quire.runner.ranks import serve_steps
from quire.runner.torch_group import TorchGroup, TorchLine


def main(descriptor: int) -> None:
    """Serve rank 0, at the other end of a socket: load, make the state, replay steps."""
    with Connection(descriptor) as pipe:
        part: RankPart = receive(pipe)
        if checkpoint_mark(part.path) != part.mark:
            text = f"{part} sees another checkpoint in {part.path} than rank 0; let its files be, and load again"
            send(pipe, CheckpointError(text))
            return
        send(pipe, None)
        try:
            group, line, model = _loaded(part)
        except Exception as error:
            send(pipe, error if isinstance(error, QuireError) else QuireError(f"{part}: {error!r}"))
            with suppress(EOFError, OSError):
                receive(pipe)  # rank 0 may still be connecting to this one, and then finds the same error
            return
        send(pipe, dict(model.expanded))
        try:
            sizes: PoolSizes = receive(pipe)
        except (EOFError, OSError):  # rank 0 could not go on
            return
        config, device = part.config, torch.device(part.device)
        format = kv_format(config.kv_dtype, model.dtype)
        division = division_of(model, part.grid, part.rank, None)
        state = make_state(
            model.layer_specs,
            sizes,
            config.page_size,
            format,
            device,
            config.attention_backend,
            division=division,
        )
        send(pipe, dependences_of(model, state))
        adapters = make_adapters(model, config.adapter_ranks, config.adapter_memory)
        with suppress(BrokenPipeError):  # rank 0 has ended
            serve_steps(LocalRunner(model, state, device, adapters, group, line), pipe)


def _loaded(part: RankPart) -> tuple[TorchGroup | None, TorchLine | None, LoadedModel]:
    config, device = part.config, torch.device(part.device)
    group, line = joined(part, device)
    model = load_model(
        part.path,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        kernels=layer_kernels(device, config.quantization),
        group=group,
        grid=part.grid,
        stage=part.grid.stage(part.rank),
    )
    if device.type == "cpu":
        keep_freed_memory()
    if line is not None and model.stages is not None:
        line.use(model.stages, model.vocab_size)
    return group, line, model
