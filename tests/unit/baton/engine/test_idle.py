"""The engine checks its blocks once each time it becomes idle."""

from __future__ import annotations

import threading
import time

from baton.core.request import Request
from baton.engine.engine import Engine
from baton.engine.loop import EngineLoop
from tests.engine_runs import build_engine, build_runner, greedy
from tests.tiny_models import tiny_model
from tests.waiting import TIMEOUT_S


def test_an_engine_becomes_idle_once_after_each_period_of_work() -> None:
    engine = build_engine(build_runner(tiny_model("llama"), decoder="transformers"))  # nothing to compile
    idle = threading.Semaphore(0)
    loop = EngineLoop(engine, lambda outputs: None, idle.release)
    loop.start()
    try:
        _send_mail(loop)
        assert not idle.acquire(blocking=False), "there has been no work yet"
        for name in ("first", "second"):
            _add(loop, engine, name)
            assert idle.acquire(timeout=TIMEOUT_S)
            _send_mail(loop)
            assert not idle.acquire(blocking=False), "mail is no work"
    finally:
        loop.stop()


def _add(loop: EngineLoop, engine: Engine, name: str) -> None:
    loop.submit(lambda: engine.scheduler.add(Request(name, [5, 6, 7], greedy(3)))).result(TIMEOUT_S)


def _send_mail(loop: EngineLoop) -> None:
    """A message at a time: the thread has gone back to sleep before the last one comes."""
    for _ in range(20):
        loop.submit(lambda: None).result(TIMEOUT_S)
        time.sleep(0.001)
