"""A cluster on Ray Serve: replicas and the front as deployments.

``Replica`` holds one ``ReplicaProcess``. Ray places it where its CPUs and GPUs are, watches its
health, replaces it, and changes the number of replicas by the requests under way. The front chooses
a replica for each request, and ``NamedReplicaRouter`` sends it there. Ray counts these requests.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.request_router import RequestRouter

from quire.cluster.calls import Answer, Call, ReplicaGone
from quire.cluster.front import Front
from quire.cluster.replica_process import ReplicaProcess
from quire.cluster.router import Router
from quire.cluster.shape import ClusterShape

APP = "quire"
REPLICA = "Replica"
MOST_UNDER_WAY = 4096
"""Requests that Ray gives to a replica at a time. Quire's own limits are below that."""
WRONG = -1
"""The status of an answer by another replica than the named one, which has ended."""
REQUEST_ROUTER = "quire.cluster.ray_router.NamedReplicaRouter"
ROUTERS = list[RequestRouter]()
"""The request router of this process's handle, once there is one."""


class Replica:
    """One server, in an actor of Ray."""

    def __init__(self, arguments: Sequence[str], state: str) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._process = ReplicaProcess(arguments, Path(state))
        self._is_started = False

    async def answer(self, name: str, call: Call) -> AsyncIterator[Any]:
        """Yield the status and the headers of an answer, then its chunks."""
        await self._start()
        if name != self._name:
            yield WRONG, ()
            return
        try:
            async with self._process.send(call) as answer:
                yield answer.status, answer.headers
                async for chunk in answer.chunks:
                    yield chunk
        except ReplicaGone as error:
            yield error

    async def _start(self) -> None:
        if not self._is_started:
            await self._process.start()
            self._is_started = True

    async def check_health(self) -> None:
        """Start the server at the first call. Raise if it has ended: Ray replaces the replica."""
        await self._start()
        if not self._process.is_alive:
            raise RuntimeError("the server has ended")

    async def __del__(self) -> None:
        await self._process.stop()


class RayReplicas:
    """The replicas of this cluster's deployment."""

    def __init__(self) -> None:
        self._handle: Any = None

    def _opened(self) -> Any:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(REPLICA, app_name=APP).options(stream=True)
        return self._handle

    def names(self) -> Sequence[str]:
        self._opened()
        return sorted(one.unique_id for one in ROUTERS[-1].curr_replicas) if ROUTERS else []

    @asynccontextmanager
    async def send(self, name: str, call: Call) -> AsyncIterator[Answer]:
        stream = self._opened().answer.remote(name, call)
        try:
            try:
                head = await anext(stream)
            except (RayError, StopAsyncIteration) as error:
                raise ReplicaGone(str(error)) from error
            if isinstance(head, ReplicaGone):
                raise head
            status, headers = head
            if status == WRONG:
                raise ReplicaGone(f"{name} has ended", reached=False)
            yield Answer(status, headers, _chunks(stream))
        finally:
            stream.cancel()


async def _chunks(stream: Any) -> AsyncIterator[bytes]:
    try:
        async for chunk in stream:
            if isinstance(chunk, ReplicaGone):
                raise chunk
            yield chunk
    except RayError as error:
        raise ReplicaGone(str(error)) from error


def run(arguments: Sequence[str], state: Path, shape: ClusterShape, host: str, port: int, address: str | None) -> None:
    """Deploy a cluster, and stay until an interrupt, which takes it down. ``address``: of a running
    cluster of Ray; None starts one on this machine."""
    began = not ray.is_initialized()
    ray.init(address=address, log_to_driver=True, configure_logging=False)
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port, location="HeadOnly"))
        serve.run(application(arguments, state, shape), name=APP, route_prefix="/")
        print(f"Serving a cluster at http://{host}:{port} (Ctrl+C stops)", flush=True)
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()
    except KeyboardInterrupt:
        pass
    finally:
        serve.shutdown()
        if began:
            ray.shutdown()


def application(arguments: Sequence[str], state: Path, shape: ClusterShape) -> Any:
    """Return the application for ``serve.run``."""
    replica = serve.deployment(
        Replica,
        name=REPLICA,
        num_replicas=None,
        max_ongoing_requests=MOST_UNDER_WAY,
        ray_actor_options={"num_cpus": shape.cpus, "num_gpus": shape.gpus},
        autoscaling_config=AutoscalingConfig(
            min_replicas=shape.least, max_replicas=shape.most, target_ongoing_requests=shape.target
        ),
        request_router_config=RequestRouterConfig(request_router_class=REQUEST_ROUTER),
        health_check_period_s=2.0,
        health_check_timeout_s=600.0,  # the first one loads the model
        graceful_shutdown_timeout_s=60.0,
    ).bind(list(arguments), str(state))
    slack = shape.slack

    def front() -> Front:
        return Front(RayReplicas(), Router(slack))

    ingress = serve.deployment(
        serve.ingress(front)(), name="Front", max_ongoing_requests=MOST_UNDER_WAY, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(replica)


def deployed(args: dict[str, Any]) -> Any:
    """Return the application of a configuration file of Ray Serve, as KubeRay's ``serveConfigV2``.
    ``args``: ``arguments``, those of ``quire serve`` as one text; ``state_dir``; fields of
    ``ClusterShape``."""
    given = dict(args)
    arguments, state = shlex.split(given.pop("arguments")), Path(given.pop("state_dir"))
    return application(arguments, state, ClusterShape(**given))
