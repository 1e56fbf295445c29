"""The manifest for Kubernetes has the fields that KubeRay and Kubernetes know, and no others."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml

from quire.cluster.shape import ClusterShape

MANIFEST = Path(__file__).parents[2] / "deploy/kuberay/quire.yaml"


class Known(msgspec.Struct, forbid_unknown_fields=True):
    """Other fields are errors, as for ``kubectl apply``, which validates strictly."""


class Port(Known):
    containerPort: int
    name: str


class Mount(Known):
    name: str
    mountPath: str


class Resources(Known):
    requests: dict[Literal["cpu", "memory"], str]
    limits: dict[Literal["cpu", "memory"], str]


class Container(Known):
    name: str
    image: str
    resources: Resources
    volumeMounts: list[Mount]
    ports: list[Port] = []


class Claim(Known):
    claimName: str


class Volume(Known):
    name: str
    persistentVolumeClaim: Claim


class PodSpec(Known):
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(Known):
    spec: PodSpec


class HeadGroup(Known):
    """``HeadGroupSpec`` of ray.io/v1."""

    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(Known):
    """``WorkerGroupSpec`` of ray.io/v1."""

    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int
    rayStartParams: dict[str, str]
    template: PodTemplate


class RayCluster(Known):
    """``RayClusterSpec`` of ray.io/v1."""

    rayVersion: str
    enableInTreeAutoscaling: bool
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayServiceSpec(Known):
    """``RayServiceSpec`` of ray.io/v1."""

    serveConfigV2: str
    rayClusterConfig: RayCluster


class Metadata(Known):
    name: str


class RayService(Known):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


class ClaimSpec(Known):
    accessModes: list[Literal["ReadWriteMany"]]
    resources: dict[Literal["requests"], dict[Literal["storage"], str]]


class VolumeClaim(Known):
    apiVersion: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: ClaimSpec


class Application(Known):
    """Of Ray Serve's configuration files."""

    name: str
    route_prefix: str
    import_path: str
    args: dict[str, Any]


class HttpOptions(Known):
    host: str
    port: int


class ServeConfig(Known):
    http_options: HttpOptions
    applications: list[Application]


@pytest.fixture
def service() -> RayService:
    return msgspec.convert(next(yaml.safe_load_all(MANIFEST.read_text())), RayService)


@pytest.fixture
def config(service: RayService) -> ServeConfig:
    return msgspec.convert(yaml.safe_load(service.spec.serveConfigV2), ServeConfig)


def test_its_parts_go_together(service: RayService, config: ServeConfig) -> None:
    _, second = yaml.safe_load_all(MANIFEST.read_text())
    claim = msgspec.convert(second, VolumeClaim)
    cluster = service.spec.rayClusterConfig
    (group,) = cluster.workerGroupSpecs
    assert cluster.rayVersion == "2.60.0", "the version that was tried (docs/cluster.md)"
    assert group.minReplicas <= group.replicas <= group.maxReplicas
    for template in (cluster.headGroupSpec.template, group.template):
        (container,), (volume,) = template.spec.containers, template.spec.volumes
        assert volume.persistentVolumeClaim.claimName == claim.metadata.name
        assert [mount.name for mount in container.volumeMounts] == [volume.name]
    (head,) = cluster.headGroupSpec.template.spec.containers
    assert config.http_options.port in [port.containerPort for port in head.ports]


def test_servers_have_the_room_that_they_ask_for(service: RayService, config: ServeConfig) -> None:
    """Each pod of the group holds one server, and autoscaling may have as many as the group."""
    (application,), (group,) = config.applications, service.spec.rayClusterConfig.workerGroupSpecs
    (container,) = group.template.spec.containers
    args = dict(application.args)
    shape = {name: args.pop(name) for name in [field.name for field in fields(ClusterShape)] if name in args}
    made = ClusterShape(**shape)
    assert float(container.resources.requests["cpu"]) == made.cpus
    assert (group.minReplicas, group.maxReplicas) == (made.least, made.most)
    assert set(args) == {"arguments", "state_dir"}
    assert args["state_dir"] in [mount.mountPath for mount in container.volumeMounts]
    assert shlex.split(args["arguments"])[0].startswith("/models/")


def test_ray_takes_the_application(config: ServeConfig) -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="ray is not installed (pip install '.[ray]')")
    schema.ServeDeploySchema.model_validate(msgspec.to_builtins(config))
    module, _, name = config.applications[0].import_path.partition(":")
    assert callable(getattr(pytest.importorskip(module), name))
