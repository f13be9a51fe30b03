"""The manifests against the schemas of Kubernetes and KubeRay, strictly: an unknown field is an error.

``make test-deploy`` runs these; they need the package kubernetes-validate and, with ``--kuberay-crds``, the folder of
KubeRay's custom resource definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.kubernetes_manifests import Document, of_kind, ray_cluster, read
from tests.unit.deploy.deploy_files import MANIFEST_FILES

VERSIONS = ["1.29", "1.37"]
"""The oldest and the newest Kubernetes that the manifests are checked for."""
WITHOUT_SCHEMA = ("RayCluster", "ServiceMonitor")
MANIFESTS = list(MANIFEST_FILES)


def manifest(name: str) -> list[Document]:
    return read(MANIFEST_FILES[name].read_text(encoding="utf-8"))


def kubernetes_problems(documents: list[Document], version: str) -> list[str]:
    """What Kubernetes' own schemas say against its own kinds."""
    validate: Any = pytest.importorskip("kubernetes_validate", reason="make test-deploy installs kubernetes-validate")
    found = []
    for document in documents:
        if document["kind"] in WITHOUT_SCHEMA:
            continue
        try:
            validate.validate(document, version, strict=True)
        except validate.ValidationError as error:
            found.append(f"{document['kind']}: {error.message}")
    return found


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(part) for name, part in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner


@pytest.fixture(scope="module")
def kuberay_schema(request) -> Document:
    folder = request.config.getoption("--kuberay-crds")
    if folder is None:
        pytest.skip("needs KubeRay's custom resource definitions: --kuberay-crds FOLDER")
    definition = yaml.safe_load((Path(folder) / "ray.io_rayclusters.yaml").read_text(encoding="utf-8"))
    versions = {version["name"]: version for version in definition["spec"]["versions"]}
    schema = closed(versions["v1"]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes checks it by itself
    return schema


def kuberay_problems(documents: list[Document], schema: Document) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(ray_cluster(documents))
    return [f"{error.json_path}: {error.message}" for error in errors]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts_the_manifests(name, version):
    assert kubernetes_problems(manifest(name), version) == []


@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberay_accepts_the_manifests(name, kuberay_schema):
    assert kuberay_problems(manifest(name), kuberay_schema) == []


def pod(documents: list[Document]) -> Document:
    return ray_cluster(documents)["spec"]["workerGroupSpecs"][0]["template"]["spec"]


PLANTED: dict[str, Callable[[list[Document]], object]] = {
    "ConfigMap": lambda it: it["data"].update(number=1),
    "NetworkPolicy": lambda it: it["spec"].update(policyType=["Ingress"]),
    "PersistentVolumeClaim": lambda it: it["spec"].update(accessModes="ReadWriteMany"),
    "PodDisruptionBudget": lambda it: it["spec"].update(minAvailables=1),
    "Service": lambda it: it["spec"]["ports"][0].update(port="eighty"),
}
PLANTED_IN_THE_CLUSTER: dict[str, Callable[[list[Document]], object]] = {
    "unknown field": lambda it: ray_cluster(it)["spec"].update(enableAutoscaling=True),
    "text for a number": lambda it: ray_cluster(it)["spec"]["workerGroupSpecs"][0].update(minReplicas="one"),
    "no template": lambda it: ray_cluster(it)["spec"]["headGroupSpec"].pop("template"),
    "unknown mode": lambda it: ray_cluster(it)["spec"]["authOptions"].update(mode="password"),
    "unknown field of a container": lambda it: pod(it)["containers"][0].update(privileged=False),
    "unknown field of a probe": lambda it: pod(it)["containers"][0]["livenessProbe"].update(path="/health"),
    "number for a parameter": lambda it: ray_cluster(it)["spec"]["headGroupSpec"]["rayStartParams"].update(num=0),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_error_in_a_kind_of_kubernetes_is_found(kind):
    documents = manifest("everything")
    PLANTED[kind](of_kind(documents, kind)[0])
    (found,) = kubernetes_problems(documents, VERSIONS[-1])
    assert found.startswith(kind)


@pytest.mark.parametrize("error", PLANTED_IN_THE_CLUSTER)
def test_a_planted_error_in_the_cluster_is_found(error, kuberay_schema):
    documents = manifest("everything")
    PLANTED_IN_THE_CLUSTER[error](documents)
    assert len(kuberay_problems(documents, kuberay_schema)) == 1
