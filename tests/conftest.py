"""For all tests, which share the machine: nothing depends on how fast it is, and one run tries what another tried.

Before torch is imported: waiting OpenMP threads must sleep instead of spinning.
"""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import HealthCheck, settings

from cluster.logs import PACKAGES
from cluster.worker_environment import worker_variables

os.environ.update(worker_variables())
settings.register_profile("shared", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(autouse=True)
def _caplog_hears_our_loggers() -> None:
    """Whatever ran before in this process may have configured them for a worker's."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
