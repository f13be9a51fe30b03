"""Finds what is wrong with the ways into and out of the pods of Kubernetes manifests: certificates, ports, policies.

As in :mod:`tests.kubernetes_manifests`, problems are sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from cluster.config.config import BatonConfig
from cluster.config.security_config import SecurityConfig
from cluster.gateway.tls import TlsConfig

Document = dict[str, Any]
MOUNTED = "/etc/baton-"
"""The beginning of the folders of Secrets."""
_PRIVATE_MODE = 0o440
_GCS_PORT = 6379
_DEFAULT_PORTS = {"http": 80, "https": 443, "postgresql": 5432}


def mounted_files(config: Mapping[str, Any]) -> list[str]:
    """The files of certificates and keys that a configuration names, as plain values."""
    sections = (config.get("security"), config["router"].get("tls"))
    return [str(file) for section in sections if section for file in section.values()]


def connection_problems(documents: Sequence[Document], config: BatonConfig, folder: Path) -> Iterator[str]:
    """What keeps processes and clients from reaching each other, or lets others read what they send.

    Args:
        folder: where the files of the configuration are in place of the root folder of the head.
    """
    (cluster,) = (document for document in documents if document["kind"] == "RayCluster")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    groups = {group["groupName"]: group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]}
    security = _in_the_pod(config.security, folder)
    tls = _in_the_pod(config.router.tls, folder)
    for name, pod in {"head": head, **groups}.items():
        for text in _secret_problems(pod, security):
            yield f"{name}: {text}"
        if pod["securityContext"].get("fsGroup") != pod["securityContext"]["runAsUser"]:
            yield f"{name}: its user cannot read the files of Secrets"
    for text in _secret_problems(head, tls):
        yield f"head: {text}"
    yield from _probe_problems(head["containers"][0], config)
    yield from _hook_problems(head["containers"][0], [pod["containers"][0] for pod in groups.values()], config)
    yield from _port_problems(documents, head["containers"][0], config)
    yield from _egress_problems(documents, config)
    yield from _budget_problems(documents, cluster)


def scheme(config: BatonConfig) -> str:
    """What the endpoint speaks, which is also the name of its port."""
    return "https" if config.router.tls else "http"


def _in_the_pod(section: SecurityConfig | TlsConfig | None, folder: Path) -> list[str]:
    """The files of a section, as the pod sees them."""
    files = section.model_dump().values() if section else ()
    return [str(file).removeprefix(str(folder)) for file in files if file is not None]


def _secret_problems(pod: Document, files: Sequence[str]) -> Iterator[str]:
    """Files that are not in a Secret that only the pod's user can read."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    for file in files:
        mount = mounts.get(str(PurePosixPath(file).parent))
        secret = volumes[mount["name"]].get("secret") if mount else None
        if mount is None or secret is None:
            yield f"{file} is in no Secret"
        elif not mount.get("readOnly") or "subPath" in mount:  # Kubernetes renews no file of a subPath
            yield f"{file} can be written, or is not renewed with its Secret"
        elif secret.get("defaultMode") != _PRIVATE_MODE:
            yield f"{file} can be read by others"
        elif PurePosixPath(file).name not in ("ca.crt", "tls.crt", "tls.key"):
            yield f"{file} has another name than cert-manager and kubectl give it"


def _probe_problems(container: Document, config: BatonConfig) -> Iterator[str]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        request = container[name]["httpGet"]
        if (request["port"], request.get("scheme", "HTTP")) != (scheme(config), scheme(config).upper()):
            yield f"the {name} does not speak {scheme(config)}"


def _hook_problems(head: Document, workers: Sequence[Document], config: BatonConfig) -> Iterator[str]:
    """The hooks before the end of a pod, and what they need."""
    timeout = f"--timeout={config.router.request_timeout_s:.0f}"
    parts = _hook(head).split(";")
    if f"baton node drain 127.0.0.1:{_GCS_PORT} --whole-cluster" not in parts[0]:
        yield "head: does not announce that the cluster ends"
    endpoint = f"--endpoint={scheme(config)}://127.0.0.1:{config.router.port}"
    if not {"wait-idle", timeout, endpoint} <= set(parts[-1].split()):
        yield "head: does not wait for requests at its endpoint"
    if "BATON_RUN" not in {variable["name"] for variable in head["env"]}:
        yield "head: may take the record of another cluster for its own"
    for worker in workers:
        if not {"drain", f'"$FQ_RAY_IP:{_GCS_PORT}"', timeout} <= set(_hook(worker).split()):
            yield "a worker's pod does not drain its node before it ends"


def _hook(container: Document) -> str:
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    return " ".join(command)


def _port_problems(documents: Sequence[Document], head: Document, config: BatonConfig) -> Iterator[str]:
    """Names of ports that lead nowhere, and what speaks another protocol than the endpoint."""
    container_ports = {port["name"] for port in head["ports"]}
    service_ports = {port["name"]: port for document in _of(documents, "Service") for port in document["spec"]["ports"]}
    for port in service_ports.values():
        if port["targetPort"] not in container_ports or port.get("appProtocol") != scheme(config):
            yield f"the port {port['name']} of the Service does not lead to the endpoint"
    for policy in _of(documents, "NetworkPolicy"):
        ports = [port["port"] for rule in policy["spec"].get("ingress", ()) for port in rule.get("ports", ())]
        yield from (f"the policy opens {port}, which is no port" for port in ports if port not in container_ports)
    for ingress in _of(documents, "Ingress"):
        paths = [path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
        if any(path["backend"]["service"]["port"].get("name") not in service_ports for path in paths):
            yield "the Ingress leads to no port of the Service"
    for monitor in _of(documents, "ServiceMonitor"):
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in service_ports or endpoint.get("scheme", "http") != scheme(config):
                yield "the ServiceMonitor does not reach the endpoint"
            if config.router.tls and not {"ca", "serverName"} <= set(endpoint.get("tlsConfig", {})):
                yield "Prometheus does not trust the endpoint"


def _egress_problems(documents: Sequence[Document], config: BatonConfig) -> Iterator[str]:
    """Hosts in the configuration that no policy lets the pods reach."""
    for policy in _of(documents, "NetworkPolicy"):
        if "Egress" not in policy["spec"]["policyTypes"]:
            continue
        rules = [rule for rule in policy["spec"]["egress"] if "to" not in rule]
        reached = {port["port"] for rule in rules for port in rule.get("ports", ())}
        for url in filter(None, (config.telemetry.otlp_endpoint, config.jobs.database)):
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
            if port is not None and port not in reached:
                yield f"no policy opens the port {port} of {parts.hostname}"


def _budget_problems(documents: Sequence[Document], cluster: Document) -> Iterator[str]:
    """Budgets that keep a group's smallest size from ever being moved."""
    sizes = {group["groupName"]: group["minReplicas"] for group in cluster["spec"]["workerGroupSpecs"]}
    for budget in _of(documents, "PodDisruptionBudget"):
        group = budget["spec"]["selector"]["matchLabels"].get("ray.io/group")
        if group in sizes and budget["spec"]["minAvailable"] >= max(1, sizes[group]):
            yield f"the budget {budget['metadata']['name']} lets no pod be evicted"


def _of(documents: Sequence[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]
