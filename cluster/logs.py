"""Structured logs: one line per event, with who says it; JSON on request. Never any prompt text."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from cluster.config import LogConfig

_PACKAGES = ("engine", "cluster", "prefill_worker", "decode_worker")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(config: LogConfig, process_name: str) -> None:
    """Sends baton's own loggers to standard error. Other libraries' logging stays as it is.

    Args:
        process_name: worker id, or ``router`` or ``controller``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(process_name)
        if config.json_lines
        else logging.Formatter(f"%(asctime)s %(levelname)s {process_name} %(name)s: %(message)s")
    )
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(config.level.upper())
        logger.propagate = False
