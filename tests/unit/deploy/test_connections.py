"""Certificates, ports, policies, hooks and budgets of a manifest in which the chart uses every option."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml

from tests.kubernetes_manifests import Document, of_kind, problems, ray_cluster, read
from tests.unit.deploy.deploy_files import MANIFEST_FILES, RAY_VERSION


def everything() -> list[Document]:
    return read(MANIFEST_FILES["everything"].read_text(encoding="utf-8"))


def one(documents: list[Document], kind: str, name: str = "baton") -> Document:
    (found,) = (document for document in of_kind(documents, kind) if document["metadata"]["name"] == name)
    return found["spec"]


def head(documents: list[Document]) -> Document:
    return ray_cluster(documents)["spec"]["headGroupSpec"]["template"]["spec"]


def worker(documents: list[Document]) -> Document:
    return ray_cluster(documents)["spec"]["workerGroupSpecs"][0]["template"]["spec"]


def container(pod: Document) -> Document:
    return pod["containers"][0]


def named(items: list[Document], name: str) -> Document:
    (found,) = (item for item in items if item["name"] == name)
    return found


def volume(pod: Document, name: str) -> Document:
    return named(pod["volumes"], name)


def mount(pod: Document, name: str) -> Document:
    return named(container(pod)["volumeMounts"], name)


def probe(documents: list[Document], name: str) -> Document:
    return container(head(documents))[name]["httpGet"]


def in_hook(pod: Document, old: str, new: str) -> None:
    command = container(pod)["lifecycle"]["preStop"]["exec"]["command"]
    assert old in command[-1]
    command[-1] = command[-1].replace(old, new)


def endpoint(documents: list[Document]) -> Document:
    return one(documents, "ServiceMonitor")["endpoints"][0]


def service_port(documents: list[Document]) -> Document:
    return one(documents, "Service")["ports"][0]


def close(documents: list[Document], port: int) -> None:
    policy = one(documents, "NetworkPolicy", "baton-cluster")
    policy["egress"] = [rule for rule in policy["egress"] if port not in [p["port"] for p in rule.get("ports", ())]]


def test_the_manifest_has_no_problem(tmp_path):
    assert problems(everything(), tmp_path, RAY_VERSION) == []


PLANTED: dict[str, tuple[Callable[[list[Document]], object], str]] = {
    "no certificates": (lambda it: mount(worker(it), "certificates").update(mountPath="/x"), "cpu: /etc/baton-cert"),
    "certificates of the head": (
        lambda it: mount(head(it), "certificates").update(mountPath="/etc/x"),
        "head: /etc/baton-certificates/ca.crt is in no Secret",
    ),
    "open key": (lambda it: volume(worker(it), "certificates")["secret"].pop("defaultMode"), "can be read by others"),
    "old certificates": (lambda it: mount(worker(it), "certificates").update(subPath="x"), "is not renewed"),
    "writable": (lambda it: mount(head(it), "router-tls").pop("readOnly"), "tls.key can be written"),
    "no group": (lambda it: worker(it)["securityContext"].pop("fsGroup"), "cannot read the files of Secrets"),
    "no key of the endpoint": (
        lambda it: volume(head(it), "router-tls").update(emptyDir=volume(head(it), "router-tls").pop("secret")),
        "head: /etc/baton-router-tls/tls.crt is in no Secret",
    ),
    "startup": (lambda it: probe(it, "startupProbe").pop("scheme"), "the startupProbe does not speak https"),
    "liveness": (lambda it: probe(it, "livenessProbe").update(scheme="HTTP"), "the livenessProbe does not speak"),
    "readiness": (lambda it: probe(it, "readinessProbe").update(port="http"), "the readinessProbe does not speak"),
    "no announcement": (lambda it: in_hook(head(it), "--whole-cluster", ""), "does not announce"),
    "plain hook": (lambda it: in_hook(head(it), "https:", "http:"), "does not wait for requests at its endpoint"),
    "short wait": (lambda it: in_hook(head(it), "=600", "=60"), "does not wait for requests at its endpoint"),
    "no record": (
        lambda it: container(head(it)).update(env=[]),
        "may take the record of another cluster",
    ),
    "no drain": (lambda it: in_hook(worker(it), "drain", "token"), "does not drain its node"),
    "short drain": (lambda it: in_hook(worker(it), "=600", "=60"), "does not drain its node"),
    "no head": (lambda it: in_hook(worker(it), ":6379", ":6380"), "does not drain its node"),
    "service": (lambda it: service_port(it).update(targetPort="http"), "does not lead to the endpoint"),
    "protocol": (lambda it: service_port(it).update(appProtocol="http"), "does not lead to the endpoint"),
    "closed port": (
        lambda it: one(it, "NetworkPolicy", "baton-router")["ingress"][0]["ports"][0].update(port="http"),
        "the policy opens http, which is no port",
    ),
    "ingress": (
        lambda it: one(it, "Ingress")["rules"][0]["http"]["paths"][0]["backend"]["service"].update(port={"name": "x"}),
        "the Ingress leads to no port",
    ),
    "monitor": (lambda it: endpoint(it).update(scheme="http"), "the ServiceMonitor does not reach"),
    "port of the monitor": (lambda it: endpoint(it).update(port="http"), "the ServiceMonitor does not reach"),
    "trust": (lambda it: endpoint(it)["tlsConfig"].pop("ca"), "Prometheus does not trust"),
    "name": (lambda it: endpoint(it)["tlsConfig"].pop("serverName"), "Prometheus does not trust"),
    "selector of the monitor": (
        lambda it: one(it, "ServiceMonitor")["selector"]["matchLabels"].update(release="x"),
        "ServiceMonitor baton selects nothing",
    ),
    "collector": (lambda it: close(it, 4318), "no policy opens the port 4318 of collector.monitoring"),
    "database": (lambda it: close(it, 5433), "no policy opens the port 5433 of database.example.com"),
    "budget": (
        lambda it: one(it, "PodDisruptionBudget", "baton-cpu").update(minAvailable=3),
        "the budget baton-cpu lets no pod be evicted",
    ),
    "selector of the budget": (
        lambda it: one(it, "PodDisruptionBudget", "baton-cpu")["selector"]["matchLabels"].update({"ray.io/group": "x"}),
        "PodDisruptionBudget baton-cpu selects nothing",
    ),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_found(error, tmp_path):
    plant, expected = PLANTED[error]
    documents = everything()
    plant(documents)
    found = problems(documents, tmp_path, RAY_VERSION)
    assert any(expected in text for text in found), found


def test_one_certificate_serves_all_pods():
    documents = everything()
    secrets = [volume(pod, "certificates")["secret"]["secretName"] for pod in (head(documents), worker(documents))]
    assert secrets == ["certificates"] * 2
    (config_map,) = of_kind(documents, "ConfigMap")
    folder = mount(head(documents), "certificates")["mountPath"]
    security = yaml.safe_load(config_map["data"]["config.yaml"])["security"]
    assert security == {"ca": f"{folder}/ca.crt", "certificate": f"{folder}/tls.crt", "key": f"{folder}/tls.key"}


def test_the_key_of_the_endpoint_is_in_the_head_alone():
    assert "router-tls" not in {item["name"] for item in worker(everything())["volumes"]}


def test_clients_outside_the_namespace_reach_the_router_as_the_values_say():
    (rule,) = one(everything(), "NetworkPolicy", "baton-router")["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}} in rule["from"]
    assert {"ipBlock": {"cidr": "203.0.113.0/24"}} in rule["from"]
