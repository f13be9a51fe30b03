"""Files, batches and lists of them as OpenAI's API shows them, and the queries of lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.core.errors import InvalidRequestError
from cluster.gateway.openai.json_body import shown
from cluster.gateway.openai.known_names import check_known
from cluster.jobs.job_types import FILE_ID, JOB_ID, Job, Status, StoredFile, is_id

Json = dict[str, Any]

MAX_FILES_LISTED = 10_000
MAX_BATCHES_LISTED = 100
ORDERS = ("asc", "desc")
_NAMES = {FILE_ID: "file", JOB_ID: "batch"}
_TIMES = {f"{status}_at": str(status) for status in Status if status is not Status.VALIDATING}


@dataclass(frozen=True, slots=True)
class Listing:
    """The query of a list.

    Attributes:
        after: id of the last entry of the page before.
    """

    after: str | None
    limit: int
    purpose: str | None = None
    oldest_first: bool = False


def parse_listing(
    query: Mapping[str, str], ids: str, *, default: int, max_limit: int, more: Sequence[str] = ()
) -> Listing:
    """Reads a query.

    An entry may be gone by the time that its id is sent as ``after``: clients delete what they list. Ids say where the
    next page begins.

    Args:
        ids: how the ids of the list begin.
        default: entries of a page if the query does not say.
        more: which of ``order`` and ``purpose`` the list knows besides ``after`` and ``limit``.

    Raises:
        InvalidRequestError: a name or a value is not known.
    """
    check_known(query, ("after", "limit", *more), "query parameter")
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= max_limit):
        raise InvalidRequestError(f"limit must be between 1 and {max_limit}, got {shown(limit)}.", param="limit")
    after = query.get("after")
    if after is not None and not is_id(after, ids):
        raise InvalidRequestError(
            f"after must be the id of a {_NAMES[ids]}, the last one of the page before, got {shown(after)}.",
            param="after",
        )
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise InvalidRequestError(f"order must be asc or desc, got {shown(order)}.", param="order")
    return Listing(after, int(limit), query.get("purpose"), order == "asc")


def file_json(file: StoredFile) -> Json:
    found: Json = {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    return found if file.expires_at is None else found | {"expires_at": file.expires_at}


def batch_json(job: Job) -> Json:
    errors = [{"code": one.code, "line": one.line, "message": one.message, "param": one.param} for one in job.problems]
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": job.input_file_id,
        "completion_window": job.completion_window,
        "status": str(job.status),
        "output_file_id": job.output_file_id,
        "error_file_id": job.error_file_id,
        "created_at": job.created_at,
        "expires_at": job.expires_at,
        **{name: job.times.get(status) for name, status in _TIMES.items()},
        "request_counts": {"total": job.num_lines, "completed": job.num_completed, "failed": job.num_failed},
        "metadata": job.metadata,
    }


def list_json(entries: Sequence[Json], *, has_more: bool) -> Json:
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }
