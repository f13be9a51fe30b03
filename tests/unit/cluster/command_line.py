"""Fixtures for tests of the command line: commands in this process, and substitutes for a cluster."""

import os
from pathlib import Path

import pytest

from cluster.cli import cli
from tests.unit.cluster.fake_router import FakeRouter, running

ROOT = Path(__file__).parents[3]
# Replaces cluster.controller.launch in processes that the tests start.
FAKE_LAUNCH = """
import os, sys, time, types
from baton.core.errors import BatonError

class Cluster:
    endpoint = "http://127.0.0.1:5"

    @classmethod
    def start(cls, config, report):
        report("starting workers")
        if config.served_model_name == "broken":
            raise BatonError("no [GPU] anywhere")
        if config.served_model_name == "slow":
            time.sleep(60)
        report("prefill-1 is ready")
        report("decode-1 is ready")
        cluster = cls()
        cluster.tell = report
        return cluster

    def wait(self, stop, on_pass):
        if os.environ.get("CLUSTER_DIES"):
            raise BatonError("the router died")
        while not stop.wait(0.05):
            on_pass()

    def reload(self, config):
        if any(api_key.name == "refused" for api_key in config.router.api_keys):
            raise BatonError("the router refused the keys")
        print("keys:", [api_key.name for api_key in config.router.api_keys], flush=True)

    def begin_upgrade(self, config):
        if config.ray.start_timeout_s == 1:
            raise BatonError("no node fits")
        self.tell("decode-2 is ready")
        self.left, self.new = 3, config

    def upgrade_ended(self):
        self.left -= 1
        if self.left > 0 or os.path.exists("hold"):
            return False
        if self.new.decode.kv_blocks == 13:
            raise BatonError("the old settings are back")
        self.checks_left = 3
        return True

    def not_ready(self):
        self.checks_left -= 1
        if self.checks_left > 0 or os.path.exists("settle"):
            return None
        self.tell("decode-3 has been waited for")
        return ["decode-4 is starting (no room)"] if self.new.decode.kv_blocks == 17 else []

    def stop(self):
        print("stopped cleanly", flush=True)

module = types.ModuleType("cluster.controller.launch")
module.Cluster = Cluster
sys.modules["cluster.controller.launch"] = module
"""


@pytest.fixture
def router():
    with running() as fake:
        yield fake


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "sitecustomize.py").write_text(FAKE_LAUNCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(stubs), str(ROOT)]))
    model = tmp_path / "model"  # the files that are read before the cluster starts
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(f"model: {model}\nrouter: {{port: 0}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("BATON_ENDPOINT", raising=False)


@pytest.fixture
def baton(monkeypatch, capsys):
    """A function that runs a command in this process and returns its exit status, stdout and stderr."""

    def run(*arguments: str, router: FakeRouter | None = None) -> tuple[int, str, str]:
        if router is not None:
            monkeypatch.setenv("BATON_ENDPOINT", router.endpoint)
        status = cli.run(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
