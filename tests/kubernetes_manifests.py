"""Reads Kubernetes manifests and finds what is wrong with them, as sentences. Needs neither a cluster nor schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from baton.core.roles import POOLS
from cluster.config.config import BatonConfig, load_config
from cluster.controller.placement import Node, describe_request, fits_somewhere
from tests.kubernetes_connections import MOUNTED, connection_problems, mounted_files, scheme

Document = dict[str, Any]
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read(text: str) -> list[Document]:
    """The documents of a manifest."""
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def ray_cluster(documents: Sequence[Document]) -> Document:
    (cluster,) = of_kind(documents, "RayCluster")
    return cluster


def num_bytes(quantity: str | int) -> int:
    """A quantity of memory in Kubernetes' notation, in bytes."""
    text = str(quantity)
    return int(text[:-2]) * _UNITS[text[-2:]] if text[-2:] in _UNITS else int(text)


def problems(documents: Sequence[Document], folder: Path, ray_version: str) -> list[str]:
    """What keeps the manifests from working, or makes them less safe than they should be.

    Args:
        folder: an empty folder, into which the configuration is written.
        ray_version: the version of Ray in the image.
    """
    cluster = ray_cluster(documents)
    found = [] if cluster["spec"]["rayVersion"] == ray_version else [f"the image's Ray is {ray_version}"]
    if cluster["spec"].get("authOptions", {}).get("mode") != "token":
        found.append("Ray does not ask for a token")
    for name, template in pods(cluster):
        found += [f"{name}: {text}" for text in _pod_problems(template["spec"])]
    for group in cluster["spec"]["workerGroupSpecs"]:
        if not 0 <= group["minReplicas"] <= group["maxReplicas"]:
            found.append(f"{group['groupName']}: minReplicas is more than maxReplicas")
    config = load_config(_write_configuration(documents, folder))
    return [
        *found,
        *_selector_problems(documents),
        *_head_problems(cluster, config),
        *_place_problems(cluster, config),
        *connection_problems(documents, config, folder),
    ]


def pods(cluster: Document) -> Iterator[tuple[str, Document]]:
    """The head's template and those of the groups, by name."""
    yield "head", cluster["spec"]["headGroupSpec"]["template"]
    for group in cluster["spec"]["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def _pod_problems(spec: Document) -> Iterator[str]:
    security = spec.get("securityContext", {})
    if not (security.get("runAsNonRoot") and security.get("runAsUser")):
        yield "runs as root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "has no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "gets the token of a service account"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in spec["containers"]:
        yield from _container_problems(container, volumes)


def _container_problems(container: Document, volumes: Mapping[str, Document]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "may gain privileges"
    if not own.get("readOnlyRootFilesystem"):
        yield "may write to its root file system"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    yield from (f"mounts {name}, which is no volume" for name in mounts.values() if name not in volumes)
    yield from (f"has nothing at {path}" for path in ("/tmp", "/home/baton", "/var/cache/baton") if path not in mounts)
    shared = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
    limits = container["resources"]["limits"]
    if shared.get("medium") != "Memory" or not 2**30 <= num_bytes(shared["sizeLimit"]) < num_bytes(limits["memory"]):
        yield "/dev/shm is not between 1 GiB and the pod's memory"
    if limits != container["resources"]["requests"]:
        yield "its requests differ from its limits"
    yield from (f"has no {probe}" for probe in ("livenessProbe", "readinessProbe") if probe not in container)
    if "preStop" not in container.get("lifecycle", {}):
        yield "does not wait for requests before it ends"


def _head_problems(cluster: Document, config: BatonConfig) -> Iterator[str]:
    """The head's command, probes and times against the configuration."""
    group = cluster["spec"]["headGroupSpec"]
    pod = group["template"]
    (container,) = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if ports.get(scheme(config)) != config.router.port or config.router.host != "0.0.0.0":
        yield "the router does not listen on the port of the pod"
    if group["rayStartParams"].get("num-cpus") != "0":
        yield "the head takes workers"
    if pod["metadata"]["annotations"].get("ray.io/overwrite-container-cmd") != "true":
        yield "KubeRay replaces the head's command"
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    if paths != {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}:
        yield "the probes ask for other paths than /health and /ready"
    if config.router.api_keys and not {"/ready", "/metrics"} <= set(config.router.open_paths):
        yield "probes and hooks have no API key for /ready and /metrics (router.open_paths)"
    startup = container["startupProbe"]
    if startup["periodSeconds"] * startup["failureThreshold"] < config.ray.start_timeout_s:
        yield "the startup probe ends the head before ray.start_timeout_s"
    for name, template in pods(cluster):
        if template["spec"]["terminationGracePeriodSeconds"] <= config.router.request_timeout_s:
            yield f"{name}: ends before router.request_timeout_s"


def _place_problems(cluster: Document, config: BatonConfig) -> Iterator[str]:
    """Pools whose workers fit on no node of any group."""
    nodes = [_node(group) for group in cluster["spec"]["workerGroupSpecs"]]
    for pool in POOLS:
        resources = config.pool(pool).resources
        if not fits_somewhere(resources, nodes):
            yield f"no group has nodes for {pool}: {describe_request(resources)}"


def _node(group: Document) -> Node:
    """A node as Ray sees it: KubeRay passes on the limits of the first container."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    resources = {"CPU": limits["cpu"], "memory": num_bytes(limits["memory"]), "GPU": limits.get("nvidia.com/gpu", 0)}
    return Node(group["groupName"], resources, group["labels"])


def _selector_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Selectors that select nothing: KubeRay labels pods with their cluster, type and group."""
    cluster = ray_cluster(documents)
    name = cluster["metadata"]["name"]
    groups = [group["groupName"] for group in cluster["spec"]["workerGroupSpecs"]]
    labels = [{"ray.io/cluster": name, "ray.io/node-type": "head", "ray.io/group": "headgroup"}]
    labels += [{"ray.io/cluster": name, "ray.io/node-type": "worker", "ray.io/group": group} for group in groups]
    services = [service["metadata"]["labels"] for service in of_kind(documents, "Service")]
    for document in documents:
        match document["kind"]:
            case "Service":
                wanted, candidates = document["spec"]["selector"], labels
            case "NetworkPolicy":
                wanted, candidates = document["spec"]["podSelector"]["matchLabels"], labels
            case "PodDisruptionBudget":
                wanted, candidates = document["spec"]["selector"]["matchLabels"], labels
            case "ServiceMonitor":
                wanted, candidates = document["spec"]["selector"]["matchLabels"], services
            case _:
                continue
        if not any(wanted.items() <= candidate.items() for candidate in candidates):
            yield f"{document['kind']} {document['metadata']['name']} selects nothing"


def _write_configuration(documents: Sequence[Document], folder: Path) -> Path:
    """Writes the mounted files of the head as the pod sees them, with keys in place of those of the Secret.

    Those that the configuration names by an absolute path are below ``folder``, and empty.
    """
    (config_map,) = of_kind(documents, "ConfigMap")
    for name, text in config_map["data"].items():
        (folder / name).write_text(text.replace(MOUNTED, f"{folder}{MOUNTED}"), encoding="utf-8")
    config = yaml.safe_load(config_map["data"]["config.yaml"])
    for file in mounted_files(config):
        (folder / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (folder / file.lstrip("/")).touch()
    for key in config["router"].get("api_keys", []):
        (folder / key["key_file"]).write_text(f"the-key-of-the-{key['name']}", encoding="ascii")
    return folder / "config.yaml"
