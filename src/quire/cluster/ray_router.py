"""Ray Serve's request router for replicas that the front names.

Ray pickles this module by value. So a router makes itself known through ``ray_serve``, which is the
process's own.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to the replica that its first argument names."""

    def initialize_state(self, **kwargs: Any) -> None:
        from quire.cluster import ray_serve

        ray_serve.ROUTERS.append(self)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = pending_request.args[0] if pending_request is not None and pending_request.args else None
        named = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        return [named or candidate_replicas]  # another one says that it is another one
