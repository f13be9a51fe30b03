"""Runs what the manifests run in the pods of a cluster, without Kubernetes: the head's command, a node, the hook.

``check_image.sh`` calls it inside the image: ``python head_command.py MANIFEST``. The commands and the configuration
are those of the manifest, on ports of their own. KubeRay's part is the environment's variables and ``ray start``.
"""

from __future__ import annotations

import http.client
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

_GCS = "127.0.0.1:6479"
_ROUTER = 9600
_START = "ray start --num-cpus={cpus} --object-store-memory=134217728 --disable-usage-stats --block {rest}"
_READY_S = 500


def main(manifest: str) -> None:
    documents = [document for document in yaml.safe_load_all(Path(manifest).read_text()) if document]
    cluster = next(document["spec"] for document in documents if document["kind"] == "RayCluster")
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (group,) = cluster["workerGroupSpecs"]
    config = next(document["data"]["config.yaml"] for document in documents if document["kind"] == "ConfigMap")
    Path("/tmp/config.yaml").write_text(yaml.safe_dump(_with_port(yaml.safe_load(config))))

    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-for-this-check", "RAY_ADDRESS": _GCS}
    start_head = _START.format(cpus=0, rest=f"--head --port={_GCS.split(':')[1]} --dashboard-host=127.0.0.1")
    labels = ",".join(f"{key}={value}" for key, value in group["labels"].items())
    start_node = _START.format(cpus=4, rest=f"--address={_GCS} --labels={labels}")

    variables |= {item["name"]: item["value"] for item in head["env"] if item["name"] == "BATON_RUN"}
    environment = {**os.environ, **variables}
    command = [*head["command"], head["args"][0].replace("/etc/baton/config.yaml", "/tmp/config.yaml")]
    baton = subprocess.Popen(command, env={**environment, "KUBERAY_GEN_RAY_START_CMD": start_head})
    _wait(lambda: subprocess.run(["ray", "health-check"], env=environment, capture_output=True).returncode == 0, baton)
    node = subprocess.Popen(start_node.split(), env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: _status("/ready") == 200, baton)
        _say(f"/ready, /health, /metrics: {[_status(path) for path in ('/ready', '/health', '/metrics')]}")
        (worker,) = group["template"]["spec"]["containers"]
        probe = worker["livenessProbe"]["httpGet"]
        _say(f"the probe of a node: {_status(probe['path'], probe['port'])}")
        (port,) = (port for port in head["ports"] if port["containerPort"] == 8000)
        endpoint = f"{port['name']}://127.0.0.1:{_ROUTER}"
        submit = ["baton", "submit", "--endpoint", endpoint, "Say hello.", "--max-tokens", "8"]
        subprocess.run(submit, check=True, env=environment)
        host, gcs_port = _GCS.split(":")
        for container in (worker, head):
            hook = container["lifecycle"]["preStop"]["exec"]["command"]
            hook = [part.replace(":8000", f":{_ROUTER}").replace(":6379", f":{gcs_port}") for part in hook]
            subprocess.run(hook, check=True, env={**environment, "FQ_RAY_IP": host})
        baton.send_signal(signal.SIGTERM)
        _say(f"the head ended with status {baton.wait(120)}")
    finally:
        node.kill()
        subprocess.run(["ray", "stop", "--force"], capture_output=True, env=environment)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _with_port(config: dict[str, Any]) -> dict[str, Any]:
    config["router"]["port"] = _ROUTER
    return config


def _wait(is_true: Any, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _READY_S
    while not is_true():
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the head is not ready; its status is {process.poll()}")
        time.sleep(1)


def _status(path: str, port: int = _ROUTER) -> int | None:
    """The status of an answer by HTTP or HTTPS, with any certificate, as the kubelet asks."""
    context = ssl._create_unverified_context()
    for scheme in ("http", "https"):
        try:
            url = f"{scheme}://127.0.0.1:{port}{path}"
            with urllib.request.urlopen(url, timeout=5, context=context) as answer:
                return int(answer.status)
        except (OSError, http.client.HTTPException):
            continue
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
