"""Settings of all tests: runs are independent of the machine's speed and reproducible.

Before torch is imported, OpenMP is set so that waiting threads sleep instead of spinning, and that each of several test
processes uses one thread.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from baton.core.logs import PACKAGES
from baton.process.worker_environment import worker_variables
from baton.rpc.channel import PeerServer
from cluster.jobs.jobs_config import DATA_VARIABLE
from tests.cpu_kinds.process import take_on_kind
from tests.thorough_cases import split, wrong_records

os.environ.update(worker_variables())
os.environ[DATA_VARIABLE] = str(
    Path(tempfile.gettempdir()) / f"baton-tests-{os.getuid()}-{os.getpid()}"
)  # no user's jobs
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a forgotten fake must not start a Ray
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
take_on_kind()
settings.register_profile("shared", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="the slowest tests in every case and at full size, as before a release (make test-thorough)",
    )
    parser.addoption("--helm", metavar="PROGRAM", help="Helm, for the tests of the chart (make test-deploy)")
    parser.addoption(
        "--kuberay-crds", metavar="FOLDER", help="KubeRay's custom resource definitions, to check the manifests against"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects cases marked ``thorough`` unless ``--thorough`` is given, and checks what they are covered by."""
    chooses_cases = any("::" in argument for argument in config.args)
    wrong = [] if chooses_cases else wrong_records(items, config.rootpath)
    if wrong:
        raise pytest.UsageError("\n".join(wrong))
    if config.getoption("--thorough"):
        return
    items[:], left_out = split(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports the kinds of CPU on which tests ran; see :mod:`tests.cpu_kinds`."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    found = [value for report in reports for name, value in _properties(report) if name == "cpu kind"]
    if found:
        terminalreporter.section("CPU kinds")
        for line in dict.fromkeys(found):
            terminalreporter.line(str(line))


def _properties(report: object) -> list[tuple[str, object]]:
    return list(getattr(report, "user_properties", ()))


@pytest.fixture(scope="session")
def _serving() -> Iterator[dict[PeerServer, str]]:
    """The gRPC servers of this process that run, with the tests that have started them."""
    serving: dict[PeerServer, str] = {}
    start, stop = PeerServer.start, PeerServer.stop

    async def started(server: PeerServer) -> None:
        serving[server] = os.environ["PYTEST_CURRENT_TEST"]
        await start(server)

    async def stopped(server: PeerServer, grace: float | None) -> None:
        await stop(server, grace)
        serving.pop(server, None)

    with mock.patch.object(PeerServer, "start", started), mock.patch.object(PeerServer, "stop", stopped):
        yield serving


@pytest.fixture(scope="module", autouse=True)
def _no_server_is_left(_serving: dict[PeerServer, str]) -> Iterator[None]:
    """A server that outlives its event loop makes gRPC crash or hang in a later test."""
    yield
    left = sorted(set(_serving.values()))
    _serving.clear()
    assert not left, f"these tests have left gRPC servers: {left}"


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether the slowest tests run at full size."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(autouse=True)
def _the_environment_stays() -> Iterator[None]:
    """Undoes what a test, or a command that it runs in this process, does to the environment variables."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _caplog_captures_baton_loggers() -> None:
    """Resets baton's loggers, which an earlier test in this process may have configured as in a worker."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
