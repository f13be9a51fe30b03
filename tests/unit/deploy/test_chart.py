"""The Helm chart, rendered by Helm itself (``--helm``, as ``make test-deploy`` passes it)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.kubernetes_manifests import of_kind, problems, ray_cluster, read
from tests.unit.deploy.deploy_files import DEPLOY, RAY_VERSION

CHART = DEPLOY / "kubernetes" / "chart"
Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helm(request) -> Helm:
    """Runs ``helm template`` on the chart with further arguments."""
    program = request.config.getoption("--helm")
    if program is None:
        pytest.skip("needs Helm: --helm PROGRAM, as `make test-deploy` passes it")
    command = [str(Path(program).absolute()), "template", "baton", str(CHART)]
    return lambda *arguments: subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("name", "values"), [("cpu", ()), ("gpu", ("--values", str(CHART / "values-gpu.yaml")))])
def test_the_manifests_are_what_the_chart_renders(helm, name, values):
    rendered = helm(*values)
    assert rendered.returncode == 0, rendered.stderr
    manifest = DEPLOY / "kubernetes" / "manifests" / f"{name}.yaml"
    assert rendered.stdout == manifest.read_text(encoding="utf-8"), "run `make manifests`"


OPTIONS = {
    "a fixed number of nodes": ["nodeAutoscaling.enabled=false"],
    "ingress": ["ingress.enabled=true", "ingress.className=nginx", "ingress.tlsSecret=baton-tls"],
    "no policy": ["networkPolicy.enabled=false"],
    "monitor": ["serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus"],
    "claim": ["models.existingClaim=models"],
    "a volume for jobs": ["jobs.persistent=true"],
    "a claim for jobs": ["jobs.persistent=true", "jobs.existingClaim=jobs"],
    "secrets": ["secrets.apiKeys=keys", "secrets.huggingFace=hub", "secrets.ray=ray-token"],
    "another port": ["config.router.port=9000", "config.router.request_timeout_s=60"],
    "a group for each pool": ["workers.prefill.pool=prefill", "workers.decode.pool=decode"],
}
GROUP = "minReplicas=1,maxReplicas=2,minAvailable=1,cpu=4,memory=8Gi,gpus=0,sharedMemory=1Gi"


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_renders_manifests_without_a_problem(helm, option, tmp_path):
    arguments = [text for setting in OPTIONS[option] for text in ("--set", setting)]
    if option == "a group for each pool":
        for name in ("prefill", "decode"):
            arguments += ["--set", ",".join(f"workers.{name}.{setting}" for setting in GROUP.split(","))]
    rendered = helm(*arguments)
    assert rendered.returncode == 0, rendered.stderr
    assert problems(read(rendered.stdout), tmp_path, RAY_VERSION) == []


def test_the_head_waits_as_long_as_a_request_may_take(helm):
    documents = read(helm("--set", "config.router.request_timeout_s=1200").stdout)
    head = ray_cluster(documents)["spec"]["headGroupSpec"]["template"]["spec"]
    assert "--timeout=1200" in head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert head["terminationGracePeriodSeconds"] == 1260


def test_a_changed_configuration_changes_the_pods(helm):
    def head(*arguments: str) -> object:
        return ray_cluster(read(helm(*arguments).stdout))["spec"]["headGroupSpec"]["template"]["metadata"]

    assert head() == head()
    assert head() != head("--set", "config.log.level=debug")


def test_the_chart_decides_where_the_router_listens(helm, tmp_path):
    documents = read(helm("--set", "config.router.host=127.0.0.1", "--set", "config.ray.address=null").stdout)
    assert problems(documents, tmp_path, RAY_VERSION) == []
    (config_map,) = of_kind(documents, "ConfigMap")
    assert "address: auto" in config_map["data"]["config.yaml"]


def test_jobs_are_kept_on_a_volume_of_the_head_alone(helm):
    documents = read(helm("--set", "jobs.persistent=true", "--set", "config.jobs.keep_days=7").stdout)
    (config_map,) = of_kind(documents, "ConfigMap")
    assert yaml.safe_load(config_map["data"]["config.yaml"])["jobs"] == {"dir": "/var/lib/baton/jobs", "keep_days": 7}
    found = of_kind(documents, "PersistentVolumeClaim")
    claims = {claim["metadata"]["name"]: claim["spec"]["accessModes"] for claim in found}
    assert claims == {"baton-models": ["ReadWriteMany"], "baton-jobs": ["ReadWriteOnce"]}
    spec = ray_cluster(documents)["spec"]
    head, *workers = (group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]))
    assert {"name": "jobs", "mountPath": "/var/lib/baton"} in head["containers"][0]["volumeMounts"]
    assert "jobs" in {volume["name"] for volume in head["volumes"]}
    assert not [volume for pod in workers for volume in pod["volumes"] if volume["name"] == "jobs"]


PLANTED = {
    "workers.cpu.maxReplica=3": "additional properties 'maxReplica' not allowed",
    "image.tags=x": "additional properties 'tags' not allowed",
    "workers.cpu.pool=both": "value must be one of 'prefill', 'decode'",
    "workers.cpu.cpu=much": "got string, want integer",
    "workers.gpu.gpus=1": "missing properties",
    "models.size=many": "does not match pattern",
    "jobs.size=many": "does not match pattern",
    "jobs.persistent=often": "got string, want boolean",
}


@pytest.mark.parametrize("setting", PLANTED)
def test_a_planted_error_in_the_values_is_found(helm, setting):
    refused = helm("--set", setting)
    assert refused.returncode != 0
    assert PLANTED[setting] in refused.stderr
