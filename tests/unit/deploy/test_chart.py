"""The Helm chart, rendered by Helm itself (``--helm``, as ``make test-deploy`` passes it)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.kubernetes_manifests import Document, of_kind, problems, ray_cluster, read
from tests.unit.deploy.deploy_files import DEPLOY, EVERYTHING, MANIFEST_FILES, RAY_VERSION

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


VALUES = {"cpu": (), "gpu": (CHART / "values-gpu.yaml",), "everything": (EVERYTHING / "values.yaml",)}


@pytest.mark.parametrize("name", VALUES)
def test_the_manifests_are_what_the_chart_renders(helm, name):
    rendered = helm(*(argument for file in VALUES[name] for argument in ("--values", str(file))))
    assert rendered.returncode == 0, rendered.stderr
    assert rendered.stdout == MANIFEST_FILES[name].read_text(encoding="utf-8"), "run `make manifests`"


OPTIONS = {
    "a fixed number of nodes": ["nodeAutoscaling.enabled=false"],
    "ingress": ["ingress.enabled=true", "ingress.className=nginx", "ingress.tlsSecret=baton-tls"],
    "no policy": ["networkPolicy.enabled=false"],
    "monitor": ["serviceMonitor.enabled=true", "serviceMonitor.labels.release=prometheus"],
    "claim": ["models.existingClaim=models"],
    "a volume for jobs": ["jobs.persistent=true"],
    "a claim for jobs": ["jobs.persistent=true", "jobs.existingClaim=jobs"],
    "secrets": ["secrets.apiKeys=keys", "secrets.huggingFace=hub", "secrets.ray=ray-token"],
    "certificates": ["secrets.certificates=certificates"],
    "TLS at the endpoint": ["secrets.routerTls=endpoint", "serviceMonitor.enabled=true", "ingress.enabled=true"],
    "budgets": ["workers.cpu.minReplicas=4", "podDisruptionBudget.head=true"],
    "a load balancer": ["service.type=LoadBalancer", "networkPolicy.clientNetworks={0.0.0.0/0,::/0}"],
    "an ingress controller": ["ingress.enabled=true", "networkPolicy.ingressControllers={ingress-nginx}"],
    "no egress": ["networkPolicy.egress=null", "config.telemetry.otlp_endpoint=https://collector"],
    "another port": ["config.router.port=9000", "config.router.request_timeout_s=60"],
    "a group for each pool": ["workers.prefill.pool=prefill", "workers.decode.pool=decode"],
}
GROUP = "minReplicas=1,maxReplicas=2,cpu=4,memory=8Gi,gpus=0,sharedMemory=1Gi"


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
    assert "--timeout=1200" in head["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
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


def spec_of(documents: list[Document], kind: str, name: str = "baton") -> Document:
    (found,) = (document for document in of_kind(documents, kind) if document["metadata"]["name"] == name)
    return found["spec"]


URLS = {
    "telemetry.otlp_endpoint=http://collector:4318/v1/traces": [4318],
    "telemetry.otlp_endpoint=https://collector": [443],
    "telemetry.otlp_endpoint=http://[::1]": [80],
    "jobs.database=postgresql://user@database/jobs": [5432],
    "jobs.database=postgresql://user:a:1@[::1]:5433/jobs?connect_timeout=10": [5433],
    "jobs.database=postgresql://user@one:5433\\,two/jobs": [5433, 5432],
    "jobs.database=sqlite:////var/lib/baton/jobs/jobs.sqlite": [],
}


@pytest.mark.parametrize("setting", URLS)
def test_pods_reach_the_ports_that_the_configuration_names(helm, setting):
    rendered = helm("--set", f"config.{setting}", "--set", "networkPolicy.egress=null")
    assert rendered.returncode == 0, rendered.stderr
    own, names, *others = spec_of(read(rendered.stdout), "NetworkPolicy", "baton-cluster")["egress"]
    assert "to" in own
    assert {port["port"] for port in names["ports"]} == {53}
    assert others == [{"ports": [{"port": port, "protocol": "TCP"}]} for port in URLS[setting]]


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        (["workers.cpu.minReplicas=1"], {}),
        (["workers.cpu.minReplicas=0"], {}),
        (["workers.cpu.minReplicas=4"], {"baton-cpu": 3}),
        (["workers.cpu.minReplicas=4", "workers.cpu.minAvailable=1"], {"baton-cpu": 1}),
        (["workers.cpu.minReplicas=4", "workers.cpu.minAvailable=0"], {}),
        (["workers.cpu.minReplicas=4", "podDisruptionBudget.workers=false"], {}),
        (["podDisruptionBudget.head=true"], {"baton-head": 1}),
    ],
)
def test_budgets_leave_one_pod_to_move_unless_the_values_say_otherwise(helm, settings, budgets):
    documents = read(helm(*(text for setting in settings for text in ("--set", setting))).stdout)
    found = of_kind(documents, "PodDisruptionBudget")
    assert {budget["metadata"]["name"]: budget["spec"]["minAvailable"] for budget in found} == budgets


def test_nothing_needs_the_kinds_of_the_prometheus_operator_by_default(helm):
    assert not of_kind(read(helm("--values", str(CHART / "values-gpu.yaml")).stdout), "ServiceMonitor")


@pytest.mark.parametrize(
    ("settings", "port"),
    [([], 80), (["secrets.routerTls=tls"], 443), (["secrets.routerTls=tls", "service.port=8443"], 8443)],
)
def test_the_port_of_the_service_is_that_of_its_protocol(helm, settings, port):
    documents = read(helm(*(text for setting in settings for text in ("--set", setting))).stdout)
    assert [found["port"] for found in spec_of(documents, "Service")["ports"]] == [port]


def test_a_certificate_among_the_api_keys_serves_as_well(helm):
    files = "config.router.tls.certificate=endpoint.pem,config.router.tls.key=endpoint.key"
    documents = read(helm("--set", f"secrets.apiKeys=keys,{files}").stdout)
    (head,) = ray_cluster(documents)["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert "--endpoint=https://127.0.0.1:8000" in head["lifecycle"]["preStop"]["exec"]["command"][-1]


def test_prometheus_trusts_what_the_values_say(helm):
    tls = "serviceMonitor.enabled=true,secrets.routerTls=tls,serviceMonitor.tlsConfig.serverName=baton.example.com"
    (endpoint,) = spec_of(read(helm("--set", tls).stdout), "ServiceMonitor")["endpoints"]
    assert endpoint["tlsConfig"] == {"serverName": "baton.example.com"}


def test_certificates_that_no_secret_has_are_refused(helm):
    files = ",".join(f"config.security.{name}=/etc/{name}" for name in ("ca", "certificate", "key"))
    refused = helm("--set", files)
    assert refused.returncode != 0
    assert "name the Secret with the certificates in secrets.certificates" in refused.stderr


PLANTED = {
    "workers.cpu.maxReplica=3": "additional properties 'maxReplica' not allowed",
    "image.tags=x": "additional properties 'tags' not allowed",
    "workers.cpu.pool=both": "value must be one of 'prefill', 'decode'",
    "workers.cpu.cpu=much": "got string, want integer",
    "workers.gpu.gpus=1": "missing properties",
    "models.size=many": "does not match pattern",
    "jobs.size=many": "does not match pattern",
    "jobs.persistent=often": "got string, want boolean",
    "secrets.certificate=x": "additional properties 'certificate' not allowed",
    "secrets.routerTls.name=x": "got object, want null or string",
    "podDisruptionBudget.heads=true": "additional properties 'heads' not allowed",
    "podDisruptionBudget.workers=1": "got number, want boolean",
    "workers.cpu.minAvailable=-1": "minimum: got -1, want 0",
    "networkPolicy.ingressController=x": "additional properties 'ingressController' not allowed",
    "networkPolicy.ingressControllers={Ingress_NGINX}": "does not match pattern",
    "networkPolicy.clientNetworks={10.0.0.1}": "does not match pattern",
    "service.externalTrafficPolicy=local": "value must be one of 'Cluster', 'Local'",
    "service.port=70000": "maximum: got 70,000, want 65,535",
    "service.annotation.a=b": "additional properties 'annotation' not allowed",
    "head.annotations.a=1": "got number, want string",
    "serviceMonitor.tls.a=b": "additional properties 'tls' not allowed",
}


@pytest.mark.parametrize("setting", PLANTED)
def test_a_planted_error_in_the_values_is_found(helm, setting):
    refused = helm("--set", setting)
    assert refused.returncode != 0
    assert PLANTED[setting] in refused.stderr
