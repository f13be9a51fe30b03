"""Files, jobs and results, as the store keeps them. Times are whole seconds since 1970."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
"""What the lines of a job may ask for."""


FILE_ID, JOB_ID = "file-", "batch_"
"""How ids begin."""
_END_OF_ID = re.compile("[0-9a-f]{24}")


class Status(StrEnum):
    """OpenAI's states of a batch.

    validating ─┬─ in_progress ── finalizing ─┬─ completed
                ├─ failed                     └─ expired
                └─ cancelling (from any of the first three) ── cancelled

    A job that baton cannot go on with also becomes failed, from any state (:mod:`cluster.jobs.setbacks`).
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ACTIVE = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)
"""States in which a router has work to do."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """
    Attributes:
        owner: name of the API key that made it; empty without keys.
        expires_at: ``None`` if it is kept until it is deleted.
    """

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class LineProblem:
    """Why a job was not accepted. ``line`` counts from 1; ``None`` concerns the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """
    Attributes:
        owner: name of the API key that made it; empty without keys.
        model: the served model when it was made; only routers that serve it run the job.
        times: when each state began.
        keep_s: seconds until its output files expire.
        num_lines, num_completed, num_failed: lines in all, with an answer, and with an error.
        token: fences the holder of the lease: every change names it, and a new lease raises it.
    """

    id: str
    owner: str
    model: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    keep_s: int
    status: Status = Status.VALIDATING
    metadata: Mapping[str, str] | None = None
    times: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[LineProblem, ...] = ()
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    token: int = 0

    @property
    def num_open(self) -> int:
        """Lines without a result."""
        return self.num_lines - self.num_completed - self.num_failed


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a job. ``number`` counts from 1; ``body`` is JSON."""

    number: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a line: a line of the output file, or of the error file if it failed. JSON without line break."""

    number: int
    failed: bool
    text: bytes


def new_id(prefix: str) -> str:
    """A new id. Later ones sort behind earlier ones, to the millisecond."""
    return f"{prefix}{int(time.time() * 1e3):012x}{secrets.token_hex(6)}"


def is_id(text: str, prefix: str) -> bool:
    """Whether :func:`new_id` makes ids like ``text``."""
    return text.startswith(prefix) and _END_OF_ID.fullmatch(text, len(prefix)) is not None


def as_problem(values: Mapping[str, Any]) -> LineProblem:
    """The problem that :func:`dataclasses.asdict` made ``values`` of."""
    return LineProblem(**values)
