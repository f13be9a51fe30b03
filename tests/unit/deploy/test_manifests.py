"""The manifests for Kubernetes: what can be checked without Helm, schemas and a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from tests.kubernetes_manifests import Document, of_kind, problems, ray_cluster, read
from tests.unit.deploy.deploy_files import MANIFEST_FILES, RAY_VERSION

MANIFESTS = ["cpu", "gpu", "everything"]


def manifest(name: str) -> list[Document]:
    return read(MANIFEST_FILES[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifests_have_no_problem(name, tmp_path):
    assert problems(manifest(name), tmp_path, RAY_VERSION) == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_cluster_has_everything_around_it(name):
    kinds = {document["kind"] for document in manifest(name)}
    wanted = {"RayCluster", "ConfigMap", "Service", "PersistentVolumeClaim", "NetworkPolicy"}
    if name == "everything":
        wanted |= {"Ingress", "PodDisruptionBudget", "ServiceMonitor"}
    assert kinds == wanted


def test_nothing_of_the_manifests_is_a_secret():
    for name in MANIFESTS:
        assert not of_kind(manifest(name), "Secret")


@pytest.mark.parametrize("name", MANIFESTS)
def test_only_the_cluster_reaches_the_ports_of_ray(name):
    documents = manifest(name)
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(documents, "NetworkPolicy")}
    own = {"podSelector": {"matchLabels": {"ray.io/cluster": "baton"}}}
    port = "https" if name == "everything" else "http"
    assert policies["baton-cluster"]["ingress"] == [{"from": [own]}]
    assert [rule["ports"] for rule in policies["baton-router"]["ingress"]] == [[{"port": port, "protocol": "TCP"}]]


def test_only_the_autoscaler_gets_the_token_of_the_service_account():
    spec = ray_cluster(manifest("gpu"))["spec"]
    mounts = [mount["name"] for mount in spec["autoscalerOptions"]["volumeMounts"]]
    assert "kubernetes-api" in mounts
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    assert "kubernetes-api" not in [mount["name"] for mount in head["volumeMounts"]]


def spec(documents: list[Document]) -> Document:
    return ray_cluster(documents)["spec"]


def group(documents: list[Document]) -> Document:
    return spec(documents)["workerGroupSpecs"][0]


def pod(documents: list[Document]) -> Document:
    return group(documents)["template"]["spec"]


def container(documents: list[Document]) -> Document:
    return pod(documents)["containers"][0]


def resources(documents: list[Document]) -> Document:
    return container(documents)["resources"]


def head(documents: list[Document]) -> Document:
    return spec(documents)["headGroupSpec"]["template"]["spec"]


def head_container(documents: list[Document]) -> Document:
    return head(documents)["containers"][0]


def selector(documents: list[Document], kind: str) -> Document:
    """The selector of the last object of this kind."""
    found = of_kind(documents, kind)[-1]["spec"]["selector"]
    return found.get("matchLabels", found)


PLANTED: dict[str, tuple[Callable[[list[Document]], object], str]] = {
    "another Ray": (lambda it: spec(it).update(rayVersion="2.59.0"), "the image's Ray is"),
    "no token": (lambda it: spec(it).pop("authOptions"), "Ray does not ask for a token"),
    "root": (lambda it: pod(it)["securityContext"].pop("runAsNonRoot"), "decode-h200: runs as root"),
    "no seccomp": (lambda it: head(it)["securityContext"].pop("seccompProfile"), "head: has no seccomp profile"),
    "service account": (lambda it: pod(it).pop("automountServiceAccountToken"), "gets the token of a service account"),
    "privileges": (lambda it: container(it)["securityContext"].pop("capabilities"), "may gain privileges"),
    "writable root": (lambda it: container(it)["securityContext"].pop("readOnlyRootFilesystem"), "may write to its"),
    "unknown volume": (lambda it: pod(it)["volumes"].pop(0), "mounts models, which is no volume"),
    "no scratch": (lambda it: container(it)["volumeMounts"].pop(2), "has nothing at /tmp"),
    "small /dev/shm": (lambda it: pod(it)["volumes"][-1]["emptyDir"].update(sizeLimit="64Mi"), "/dev/shm is not"),
    "requests": (lambda it: resources(it)["requests"].update(cpu=1), "its requests differ"),
    "no probe": (lambda it: container(it).pop("readinessProbe"), "has no readinessProbe"),
    "no drain": (lambda it: container(it).pop("lifecycle"), "does not wait for requests before it ends"),
    "short grace": (lambda it: head(it).update(terminationGracePeriodSeconds=30), "head: ends before"),
    "replicas": (lambda it: group(it).update(minReplicas=9), "minReplicas is more than"),
    "no label": (lambda it: group(it)["labels"].pop("baton-pool"), "no group has nodes for decode"),
    "no GPU": (lambda it: resources(it)["limits"].pop("nvidia.com/gpu"), "no group has nodes for decode"),
    "port": (lambda it: head_container(it)["ports"][0].update(containerPort=80), "does not listen on the port"),
    "readiness": (lambda it: head_container(it)["readinessProbe"]["httpGet"].update(path="/health"), "other paths"),
    "startup": (lambda it: head_container(it)["startupProbe"].update(failureThreshold=3), "the startup probe ends"),
    "head": (lambda it: spec(it)["headGroupSpec"]["rayStartParams"].pop("num-cpus"), "the head takes workers"),
    "command": (
        lambda it: spec(it)["headGroupSpec"]["template"]["metadata"]["annotations"].clear(),
        "KubeRay replaces",
    ),
    "service": (
        lambda it: selector(it, "Service").update({"ray.io/cluster": "other"}),
        "Service baton selects nothing",
    ),
    "closed paths": (
        lambda it: of_kind(it, "ConfigMap")[0]["data"].update(
            {"config.yaml": of_kind(it, "ConfigMap")[0]["data"]["config.yaml"].replace("- /metrics", "- /")}
        ),
        "no API key for /ready and /metrics",
    ),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error, tmp_path):
    plant, expected = PLANTED[error]
    documents = manifest("gpu")
    plant(documents)
    found = problems(documents, tmp_path, RAY_VERSION)
    assert any(expected in text for text in found), found


def test_a_planted_error_in_the_configuration_is_found(tmp_path: Path):
    documents = manifest("gpu")
    (config_map,) = of_kind(documents, "ConfigMap")
    config_map["data"]["config.yaml"] += "\nrouterr: {}\n"
    with pytest.raises(ConfigError, match="routerr"):
        problems(documents, tmp_path, RAY_VERSION)
