"""kubectl's dry run on the client, which asks a cluster only for the kinds that it knows."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kubernetes_manifests import read
from tests.unit.deploy.deploy_files import MANIFEST_FILES

MANIFESTS = list(MANIFEST_FILES)
KINDS = {
    "v1": ("ConfigMap", "PersistentVolumeClaim", "Service"),
    "monitoring.coreos.com/v1": ("ServiceMonitor",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "policy/v1": ("PodDisruptionBudget",),
    "ray.io/v1": ("RayCluster",),
}


def discovery() -> dict[str, dict[str, object]]:
    """What a cluster with KubeRay and the Prometheus operator answers about its kinds, by path."""
    answers: dict[str, dict[str, object]] = {"/api": {"kind": "APIVersions", "versions": ["v1"]}}
    groups = []
    for version, kinds in KINDS.items():
        resources = [
            {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["create", "get"]} for kind in kinds
        ]
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        answers[path] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        if "/" in version:
            group, number = version.split("/")
            groups.append({"name": group, "versions": [{"groupVersion": version, "version": number}]})
    return answers | {"/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a server that knows the kinds and nothing else."""
    answers = discovery()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.split("?")[0])
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer or {"kind": "Status", "status": "Failure", "code": 404}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def dry_run(cluster: str, file: Path, home: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("needs kubectl")
    command = [program, "--server", cluster, "--cache-dir", str(home), "--kubeconfig", "/dev/null"]
    command += ["create", "--dry-run=client", "--validate=false", "--output=name", "--filename", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubectl_reads_the_manifests(cluster, name, tmp_path):
    done = dry_run(cluster, MANIFEST_FILES[name], tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(read(MANIFEST_FILES[name].read_text(encoding="utf-8")))


PLANTED = {
    "kind: RayCluster": "kind: RayClutser",
    "apiVersion: policy/v1": "apiVersion: policy/v1beta1",
    "policyTypes: [Ingress, Egress]": "policyTypes: [Ingress, Egress",
}


@pytest.mark.parametrize("line", PLANTED)
def test_a_planted_error_is_found(cluster, line, tmp_path):
    text = MANIFEST_FILES["everything"].read_text(encoding="utf-8")
    assert line in text
    planted = tmp_path / "planted.yaml"
    planted.write_text(text.replace(line, PLANTED[line], 1), encoding="utf-8")
    assert dry_run(cluster, planted, tmp_path).returncode != 0
