"""The environment of workers; a process that lacks it restarts itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from baton.process.worker_environment import become_like_a_worker, carried_variables, worker_variables

_SHOW = """
import json, os, sys
from baton.process.worker_environment import become_like_a_worker
become_like_a_worker()
print(json.dumps([os.getpid(), sys.argv[1:], {name: os.environ.get(name) for name in sys.argv[1:]}]))
"""


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in (*worker_variables(), "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def test_variables_set_by_the_user_take_precedence(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert worker_variables()["GOMP_SPINCOUNT"] == "7"


def test_expandable_segments_are_set_unless_the_user_configured_the_allocator(monkeypatch):
    assert worker_variables()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert worker_variables()["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert worker_variables()["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_a_process_without_the_variables_restarts_with_the_same_command_line():
    names = list(worker_variables())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), names[0]: "7"}
    with subprocess.Popen([sys.executable, "-c", _SHOW, *names], env=environment, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=60)
    pid, arguments, variables = json.loads(output)
    assert pid == process.pid
    assert arguments == names
    assert variables == {**worker_variables(), names[0]: "7"}


def test_a_process_with_the_variables_does_not_restart(monkeypatch):
    for name, value in worker_variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execve", lambda *arguments: pytest.fail("started anew"))
    become_like_a_worker()


def test_only_variables_of_models_are_carried(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"HF_TOKEN": "hf_secret", "BATON_CACHE": "/fast", "AWS_SECRET": "no", "HOME": "/"}
    )
    assert carried_variables() == {"HF_TOKEN": "hf_secret", "BATON_CACHE": "/fast"}
    assert not {*carried_variables()} & {*worker_variables()}  # those are in Ray's runtime environments
