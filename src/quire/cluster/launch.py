"""``quire cluster``: checks what was given, and starts the front and the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvicorn

from quire.base.errors import InvalidArgument, Unsupported
from quire.cluster.front import Front
from quire.cluster.local import LocalReplicas
from quire.cluster.router import Router
from quire.cluster.shape import ClusterShape
from quire.server.http import logs
from quire.server.http.listeners import bind, url_of


def launch(
    model: str, options: Mapping[str, Any], shape: ClusterShape, *, is_local: bool, ray_address: str | None
) -> None:
    """Serve until an interrupt. ``options``: those of ``quire serve``."""
    given = dict(options)
    host, port = given.pop("host", "127.0.0.1"), given.pop("port", 8000)
    state = given.pop("state_dir", None)
    if state is None:
        raise InvalidArgument("a cluster needs --state-dir, the folder of its servers' state directories")
    if "adopt_from" in given:
        raise InvalidArgument("--adopt-from is the cluster's own; leave it out")
    arguments = [model, *_spelled(given)]
    folder = Path(state).absolute()
    if is_local:
        if ray_address is not None or shape.most != shape.least:
            raise InvalidArgument("--local has neither --ray-address nor --max-replicas; leave these out, or --local")
        with suppress(KeyboardInterrupt):
            asyncio.run(_serve_local(arguments, folder, shape, host, port))
        return
    try:
        from quire.cluster import ray_serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise Unsupported(
            "quire cluster needs Ray Serve, which is not installed; pip install '.[ray]' in Quire's folder brings it, "
            "and --local runs without it"
        ) from error
    ray_serve.run(arguments, folder, shape, host, port, ray_address)


def _spelled(options: Mapping[str, Any]) -> list[str]:
    """Return options as a command line has them."""
    found = list[str]()
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            found.append(flag if value else f"--no-{flag[2:]}")
        else:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                found += [flag, str(one)]
    return found


async def _serve_local(arguments: list[str], state: Path, shape: ClusterShape, host: str, port: int) -> None:
    sockets = bind(host, port)
    replicas = LocalReplicas(arguments, state, shape.least)
    with logs.to_stderr():
        try:
            await replicas.start()
            front = Front(replicas, Router(shape.slack))
            server = uvicorn.Server(uvicorn.Config(front, log_config=None, access_log=False, server_header=False))
            where = " and ".join(url_of(listener) for listener in sockets)
            print(f"Serving a cluster of {shape.least} at {where} (Ctrl+C stops)", flush=True)
            await server.serve(sockets)
        finally:
            for listener in sockets:
                listener.close()
            await replicas.stop()
