"""The input file of a job: checked as a whole before a line runs, then read line by line. Reading blocks.

A line is ``{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}``, as OpenAI has it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from baton.core.errors import InternalError, InvalidRequestError
from cluster.jobs.file_storage import storage_errors
from cluster.jobs.job_types import Line, LineProblem

MAX_PROBLEMS = 100
"""Problems of a job that are listed; checking ends there."""
_KEYS = frozenset({"custom_id", "method", "url", "body"})
_MAX_ID_CHARS = 512
_WORK_S = 0.005
_PAUSES = 3
"""Checking pauses for so many times as long as it works, so that it takes little of Python's lock from requests."""

ParseObject = Callable[[bytes], dict[str, Any]]
"""Parses a JSON object, or raises :class:`InvalidRequestError`."""


class _LineError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class InputFile:
    """
    Args:
        endpoint: the URL that all lines must have.
        parse: parses the JSON of a line, within limits.
        max_line_bytes: the longest line; a longer one is a problem.
    """

    def __init__(self, path: Path, endpoint: str, parse: ParseObject, max_line_bytes: int) -> None:
        self._path = path
        self._endpoint = endpoint
        self._parse = parse
        self._max_line_bytes = max_line_bytes

    def check(self, max_lines: int, pause: Callable[[float], None] = time.sleep) -> tuple[int, list[LineProblem]]:
        """The number of requests in the file, and what is wrong with it.

        Args:
            pause: sleeps so many seconds.

        Raises:
            JobsUnavailableError: the file cannot be read.
        """
        problems: list[LineProblem] = []
        ids: set[bytes] = set()
        num_lines, began_s = 0, time.monotonic()
        for number, raw in self._raw_lines():
            if num_lines == max_lines:
                text = f"The file has more than {max_lines} requests, which is the limit (jobs.max_lines). Divide it."
                return 0, [LineProblem("too_many_requests", text)]
            num_lines += 1
            try:
                self._check_new(self._parsed(raw).custom_id, ids)
            except _LineError as error:
                problems.append(LineProblem(error.code, error.message, number, error.param))
                if len(problems) == MAX_PROBLEMS:
                    break
            if (worked_s := time.monotonic() - began_s) > _WORK_S:
                pause(_PAUSES * worked_s)
                began_s = time.monotonic()
        if not num_lines:
            problems = [LineProblem("empty_file", "The file has no request. Write one JSON object into each line.")]
        return num_lines, problems

    def lines(self, done: Collection[int]) -> Iterator[Line]:
        """The requests of a file without problems, but for those whose numbers are in ``done``.

        Raises:
            InternalError: the file is not the one that was checked.
            JobsUnavailableError: the file cannot be read.
        """
        for number, (place, raw) in enumerate(self._raw_lines(), start=1):
            if number in done:
                continue
            try:
                yield self._parsed(raw, number)
            except _LineError as error:
                file = self._path.name
                raise InternalError(
                    f"Line {place} of the input file {file} has changed since it was checked: {error.message}"
                ) from error

    def _raw_lines(self) -> Iterator[tuple[int, bytes | None]]:
        """The lines that are not blank, with their numbers in the file; ``None`` for one that is too long.

        They are without a byte order mark, which some editors write before the first one.
        """
        with storage_errors(self._path.parent), self._path.open("rb") as stream:
            number = 0
            while raw := stream.readline(self._max_line_bytes + 1):
                number += 1
                if len(raw) > self._max_line_bytes and not raw.endswith(b"\n"):
                    _skip_line(stream)
                    yield number, None
                elif (text := raw.removeprefix(codecs.BOM_UTF8)).strip():
                    yield number, text

    def _parsed(self, raw: bytes | None, number: int = 0) -> Line:
        if raw is None:
            raise _LineError(
                "line_too_long", f"The line is longer than {self._max_line_bytes} bytes, which is the limit."
            )
        try:
            values = self._parse(raw.rstrip(b"\r\n"))
        except InvalidRequestError as error:
            message = error.message.replace("The request body", "The line").replace("at line 1 column", "at column")
            raise _LineError("invalid_json_line", message) from error
        custom_id, body = values.get("custom_id"), values.get("body")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_ID_CHARS:
            raise _LineError(
                "invalid_custom_id", f"custom_id must be a string of 1 to {_MAX_ID_CHARS} characters.", "custom_id"
            )
        if values.get("method") != "POST":
            raise _LineError("invalid_method", "method must be POST.", "method")
        url = values.get("url")
        if not isinstance(url, str) or url.removesuffix("/") != self._endpoint:
            raise _LineError("invalid_url", f"url must be the endpoint of the batch, {self._endpoint}.", "url")
        if not isinstance(body, dict):
            raise _LineError("invalid_body", "body must be a JSON object with the parameters of the request.", "body")
        if unknown := {key for key, value in values.items() if value is not None} - _KEYS:
            names = ", ".join(sorted(unknown))[:80]
            raise _LineError("unknown_key", f"Unknown: {names}; expected custom_id, method, url and body.")
        return Line(number, custom_id, json.dumps(body, separators=(",", ":")).encode())

    def _check_new(self, custom_id: str, ids: set[bytes]) -> None:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in ids:
            raise _LineError("duplicate_custom_id", f"custom_id {custom_id[:60]!r} occurs twice.", "custom_id")
        ids.add(digest)


def _skip_line(stream: BinaryIO) -> None:
    while (part := stream.readline(2**20)) and not part.endswith(b"\n"):
        pass
