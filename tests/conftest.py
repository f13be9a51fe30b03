"""Before torch is imported: tests share the machine, so waiting OpenMP threads must sleep instead of spinning."""

from __future__ import annotations

import logging
import os

import pytest

from cluster.logs import PACKAGES

os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@pytest.fixture(autouse=True)
def _caplog_hears_our_loggers() -> None:
    """Whatever ran before in this process may have configured them for a worker's."""
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
