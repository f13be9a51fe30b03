"""Ray's actors load torch only where they need it, and pass every call on to their hosts."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.process.without_torch import do_without_torch
from cluster import actors
from cluster.actors import RouterActor, WorkerActor
from cluster.router_process.router_host import RouterHost
from cluster.worker.worker_host import WorkerHost
from tests.tiny_tokenizers import byte_level_tokenizer


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-X", "utf8", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_starting_a_cluster_imports_nothing_that_only_workers_or_the_router_need() -> None:
    """Neither `baton up` nor the controller loads them: each would take seconds, one after the other."""
    others = ("torch", "transformers", "numba", "fastapi", "uvicorn")
    loaded = run(f"import sys, cluster.controller.launch; print([name for name in {others} if name in sys.modules])")
    assert loaded == "[]"


def own_arguments(method: Any) -> inspect.Signature:
    """Without the environment, which actors set before they import their hosts."""
    signature = inspect.signature(method)
    return signature.replace(parameters=[own for own in signature.parameters.values() if own.name != "variables"])


def methods(cls: type[Any]) -> dict[str, inspect.Signature]:
    return {
        name: own_arguments(value)
        for name, value in vars(cls).items()
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_"))
    }


def test_actors_accept_the_arguments_of_their_hosts() -> None:
    assert methods(WorkerActor) == methods(WorkerHost)
    assert methods(RouterActor) == methods(RouterHost)


def record_calls_of(host: type, calls: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a class in the host's place that notes its making and every call, and answers with the method's name."""

    class Recorder:
        def __init__(self, *arguments: object) -> None:
            calls.append(("__init__", *arguments))

        def __getattr__(self, name: str) -> Any:
            async def call(*arguments: object) -> str:
                calls.append((name, *arguments))
                return name

            return call

    monkeypatch.setattr(f"{host.__module__}.{host.__name__}", Recorder)
    monkeypatch.setattr(actors, "imports_that_stay", nullcontext)  # this process goes on to other tests


async def test_the_actor_of_a_router_forwards_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    record_calls_of(RouterHost, calls, monkeypatch)
    actor = RouterActor({"model": "m"}, 8000, "controller", b"secret")
    assert await actor.start() == "start"
    assert await actor.describe() == "describe"
    await actor.follow("another", [])
    await actor.add_worker({"worker_id": "decode-1"})
    await actor.drain_worker("decode-1", 3.0)
    await actor.remove_worker("decode-1")
    await actor.wait()
    await actor.stop()
    assert calls == [
        ("__init__", {"model": "m"}, 8000, "controller", b"secret", 0),
        ("start",),
        ("describe",),
        ("follow", "another", []),
        ("add_worker", {"worker_id": "decode-1"}),
        ("drain_worker", "decode-1", 3.0),
        ("remove_worker", "decode-1"),
        ("wait",),
        ("stop",),
    ]


async def test_the_actor_of_a_worker_forwards_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    record_calls_of(WorkerHost, calls, monkeypatch)
    monkeypatch.setattr(os, "environ", {"HF_HOME": "/here"})
    variables = {"HF_HOME": "/there", "HF_TOKEN": "hf_secret"}
    actor = WorkerActor("decode-1", "decode", "module:Role", {}, None, b"secret", variables)
    assert os.environ == {"HF_HOME": "/here", "HF_TOKEN": "hf_secret"}
    assert calls == []  # Ray reports that the process runs before it imports the host
    assert await actor.start() == "start"
    assert await actor.describe() == "describe"
    assert await actor.change_role("prefill-2", "prefill", "module:Other") == "change_role"
    await actor.wait()
    await actor.stop()
    assert calls == [
        ("__init__", "decode-1", "decode", "module:Role", {}, None, b"secret"),
        ("start",),
        ("describe",),
        ("change_role", "prefill-2", "prefill", "module:Other"),
        ("wait",),
        ("stop",),
    ]


def test_a_router_reads_and_writes_text_without_torch(tmp_path: Path) -> None:
    byte_level_tokenizer().save(tmp_path)
    code = """
import sys
from baton.process.without_torch import do_without_torch
do_without_torch()
from baton.engine.models.tokenizer import Tokenizer
tokenizer = Tokenizer.load(sys.argv[1])
assert sys.modules["torch"] is None
print(tokenizer.decode(tokenizer.encode("all of it, ä, 😀")))
"""
    assert run(code, str(tmp_path)) == "all of it, ä, 😀"


def test_imported_objects_are_never_collected_but_later_ones_are() -> None:
    code = """
import gc
from baton.process.garbage import imports_that_stay
before = gc.get_freeze_count()
with imports_that_stay():
    assert not gc.isenabled()
    kept = [[] for _ in range(5000)]
assert gc.isenabled()
print(gc.get_freeze_count() - before >= 5000)
"""
    assert run(code) == "True"


def test_a_loaded_torch_is_kept() -> None:
    do_without_torch()
    assert sys.modules["torch"] is torch
