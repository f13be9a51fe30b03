"""Structured logs: one line per event with its process and request, as text or JSON.

No line holds text of a prompt or an answer. Where such text is in scope, an unforeseen exception is logged with its
place in the code but without its message, which may quote it; see :func:`describe_fault`.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ConfigDict, Field

from baton.core.config_section import Section

PACKAGES = ("baton", "cluster", "prefill_worker", "decode_worker")
_OTHERS_WITH_HANDLERS = ("ray",)
"""Libraries whose loggers do not propagate to the root logger."""
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_PLAIN_VALUE = re.compile(r"[^\s\[\]\"=]+")


class RequestLog(logging.LoggerAdapter[logging.Logger]):
    """A logger for one request: each of its lines has the field ``request_id``. ``extra`` adds further fields."""

    def __init__(self, logger: logging.Logger, request_id: str) -> None:
        super().__init__(logger, {"request_id": request_id})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds the request's fields to the call's. A field whose name logging reserves gets an underscore."""
        fields = {**(kwargs.get("extra") or {}), **(self.extra or {})}
        kwargs["extra"] = {f"{name}_" if name in _OWN_ATTRIBUTES else name: value for name, value in fields.items()}
        return msg, kwargs


class OccasionalLog:
    """Logs what clients can cause as often as they like: at most one line per period, with the number left out.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, logger: logging.Logger, period_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._period_s = period_s
        self._clock = clock
        self._quiet_until_s = -math.inf
        self._num_left_out = 0

    def log(self, level: int, message: str) -> None:
        if self._clock() < self._quiet_until_s:
            self._num_left_out += 1
            return
        self._quiet_until_s = self._clock() + self._period_s
        suffix = f" ({self._num_left_out} such lines were left out)" if self._num_left_out else ""
        self._num_left_out = 0
        self._logger.log(level, "%s%s", message, suffix)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line; the fields of ``extra`` are added to the standard fields."""

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
        return json.dumps(
            line | {name: value for name, value in _fields(record).items() if name not in line}, default=str
        )


class TextFormatter(logging.Formatter):
    """Formats a record for people: the message, then the fields as ``[name=value …]``.

    Whatever a client can bring into a record stays within its line and field: other characters than printable ones are
    escaped, and so are values that could be taken for several fields. The lines of a traceback are indented.
    """

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone().isoformat(" ", timespec="milliseconds")
        message = _printable(record.getMessage())
        fields = " ".join(f"{_printable(name)}={_field_value(value)}" for name, value in _fields(record).items())
        line = f"{at} {record.levelname} {self._process_name} {record.name}: {message}"
        line += f" [{fields}]" if fields else ""
        if not record.exc_info:
            return line
        traceback_lines = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"    {_printable(text)}" for text in traceback_lines)])


def _printable(text: str) -> str:
    """``text`` with control characters, line separators, direction marks and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _field_value(value: object) -> str:
    text = str(value)
    if _PLAIN_VALUE.fullmatch(text):
        return text
    return _printable(json.dumps(text, ensure_ascii=False))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Fields from ``extra``. Libraries such as Ray mark what they add to every record with an underscore."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _OWN_ATTRIBUTES and not name.startswith("_") and value is not None
    }


def describe_fault(error: BaseException) -> str:
    """The class of an unforeseen exception and its place in the code, without its message."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames))
    return f"{type(error).__name__} in {places or 'unknown code'}"


def configure_logging(config: LogConfig, process_name: str) -> None:
    """Sends baton's own loggers to standard error.

    With JSON, lines of other libraries and Python's warnings go there too, so that no text line appears among the JSON
    lines. The content and levels of other libraries' logs do not change.

    Args:
        process_name: worker id, or ``router`` or ``controller``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process_name) if config.json_lines else TextFormatter(process_name))
    for package in PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers = [handler]
        logger.setLevel(config.level.upper())
        logger.propagate = False
    if config.json_lines:
        for name in (None, *_OTHERS_WITH_HANDLERS):
            logging.getLogger(name).handlers = [handler]
        logging.captureWarnings(True)


class LogConfig(Section):
    """Logging of all processes."""

    level: Literal["debug", "info", "warning", "error", "critical"] = "warning"
    json_lines: bool = Field(default=False, alias="json")
    """One JSON object per line instead of text."""

    model_config = ConfigDict(serialize_by_alias=True)
