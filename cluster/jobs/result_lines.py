"""The lines of output and error files, in OpenAI's form, and what an answer means for its line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from baton.core.errors import EndpointFullError, NoWorkerError, OverloadedError
from baton.core.json_lines import in_one_line
from cluster.jobs.job_types import Job, Line, Result

_OK = 200
_SERVER_ERROR = 500
_MAX_TRIES = 5
"""Tries of a line whose request fails on its own, such as one that lost its worker each time."""
_NO_ROOM = frozenset(error.code for error in (OverloadedError, EndpointFullError, NoWorkerError))
"""Codes of errors that say nothing about the line; it is tried until its job expires."""
_LONGEST_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The router's answer to a line.

    Attributes:
        body: JSON.
        retry_after_s: seconds, if it says so.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None = None

    @property
    def lacks_room(self) -> bool:
        """Whether the line can only have failed because of the cluster's state."""
        return self.status != _OK and self._error_code() in _NO_ROOM

    def retry_s(self, num_tries: int) -> float | None:
        """Seconds until the line is tried again; ``None`` if this is its result."""
        if self.status == _OK or (self.status < _SERVER_ERROR and not self.lacks_room):
            return None
        if not self.lacks_room and num_tries >= _MAX_TRIES:
            return None
        wait_s = self.retry_after_s if self.retry_after_s is not None else 0.5 * 2.0 ** min(num_tries, 6)
        return min(wait_s, _LONGEST_WAIT_S)

    def _error_code(self) -> Any:
        try:
            error = orjson.loads(self.body).get("error")
        except (ValueError, AttributeError):
            return None
        return error.get("code") if isinstance(error, Mapping) else None


class LineSender(Protocol):
    """The router's endpoint, as jobs see it."""

    async def __call__(self, job: Job, line: Line) -> Answer:
        """Runs a line as a request of the job's owner, in the SLO class ``batch``. Cancelling the call cancels it."""
        ...


def line_id(job: Job, line: Line) -> str:
    """The id of a line's request. No other line has it, and every try of this one does."""
    return f"batch_req_{job.id.removeprefix('batch_')}-{line.number}"


def result_of(job: Job, line: Line, answer: Answer) -> Result:
    """The result of a line, from the last answer to it."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": orjson.Fragment(answer.body),
    }
    values = {"id": line_id(job, line), "custom_id": line.custom_id, "response": response, "error": None}
    return Result(line.number, answer.status != _OK, in_one_line(orjson.dumps(values)))


def lost_line(job: Job, line: Line, num_lost: int) -> Result:
    """The result of a line whose attempts have all ended with the loss of the router."""
    message = (
        f"The router was lost {num_lost} times while it ran this request, the last times without another line of a "
        "batch beside it. The request may be what ends the router, and is not tried again."
    )
    return Result(line.number, True, _without_answer(job, line, "router_lost", message))


def expired_line(job: Job, line: Line) -> bytes:
    """A line of the error file for a request that did not run in time."""
    message = "This request could not be executed before the completion window expired."
    return _without_answer(job, line, "batch_expired", message)


def _without_answer(job: Job, line: Line, code: str, message: str) -> bytes:
    error = {"code": code, "message": message}
    values = {"id": line_id(job, line), "custom_id": line.custom_id, "response": None, "error": error}
    return in_one_line(orjson.dumps(values))
