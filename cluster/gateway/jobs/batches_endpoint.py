"""``/v1/batches``: jobs over the requests in a file."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from baton.core.config_section import parse_duration_s
from baton.core.errors import InvalidRequestError
from cluster.gateway.bodies import BodyReader
from cluster.gateway.http_edge import JsonResponse
from cluster.gateway.jobs.answers import MAX_BATCHES_LISTED, batch_json, list_json, parse_listing
from cluster.gateway.jobs.files_endpoint import check_expiry, enabled, owner_of
from cluster.gateway.openai.json_body import shown
from cluster.gateway.openai.known_names import check_known
from cluster.jobs.job_types import ENDPOINTS, JOB_ID
from cluster.jobs.jobs import Jobs

BATCH_KEYS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
_DEFAULT_LISTED = 20


class BatchesEndpoint:
    """
    Args:
        jobs: ``None`` if jobs are disabled.
    """

    def __init__(self, jobs: Jobs | None, bodies: BodyReader) -> None:
        self._jobs = jobs
        self._bodies = bodies

    async def create(self, request: Request) -> Response:
        body = await self._bodies.read_object(request)
        jobs = enabled(self._jobs)
        check_known(body, BATCH_KEYS)
        file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
        if isinstance(endpoint, str):
            endpoint = endpoint.removesuffix("/")
        if not isinstance(file_id, str) or not file_id:
            raise InvalidRequestError(
                f"input_file_id must be the id of a file of /v1/files, got {shown(file_id)}.", param="input_file_id"
            )
        if endpoint not in ENDPOINTS:
            raise InvalidRequestError(
                f"endpoint must be one of {', '.join(ENDPOINTS)}, got {shown(endpoint)}.", param="endpoint"
            )
        job = await jobs.create(
            owner_of(request),
            endpoint=str(endpoint),
            input_file_id=file_id,
            window=_window(body.get("completion_window")),
            metadata=_metadata(body.get("metadata")),
            keep_s=_expiry(body.get("output_expires_after")),
        )
        return JsonResponse(batch_json(job))

    async def list(self, request: Request) -> Response:
        listing = parse_listing(request.query_params, JOB_ID, default=_DEFAULT_LISTED, max_limit=MAX_BATCHES_LISTED)
        found, has_more = await enabled(self._jobs).jobs(owner_of(request), after=listing.after, limit=listing.limit)
        return JsonResponse(list_json([batch_json(job) for job in found], has_more=has_more))

    async def get(self, request: Request, batch_id: str) -> Response:
        return JsonResponse(batch_json(await enabled(self._jobs).job(owner_of(request), batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        return JsonResponse(batch_json(await enabled(self._jobs).cancel(owner_of(request), batch_id)))


def _window(given: object) -> tuple[str, int]:
    """OpenAI knows ``24h`` only; here any duration of a second to a day."""
    try:
        seconds = int(parse_duration_s(given)) if isinstance(given, str) else 0
    except ValueError:
        seconds = 0
    if seconds < 1:
        raise InvalidRequestError(
            "completion_window must be a duration of a second to a day in s, min or h, such as 24h, got "
            f"{shown(given)}.",
            param="completion_window",
        )
    return str(given), seconds


def _metadata(given: object) -> dict[str, str] | None:
    if given is None:
        return None
    fits = isinstance(given, dict) and len(given) <= MAX_METADATA
    if not isinstance(given, dict) or not fits or not all(_is_metadata(*entry) for entry in given.items()):
        raise InvalidRequestError(
            f"metadata must be an object of at most {MAX_METADATA} strings of at most {MAX_METADATA_VALUE} characters, "
            f"with keys of at most {MAX_METADATA_KEY}.",
            param="metadata",
        )
    return given


def _is_metadata(key: str, value: object) -> bool:
    return len(key) <= MAX_METADATA_KEY and isinstance(value, str) and len(value) <= MAX_METADATA_VALUE


def _expiry(given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidRequestError("output_expires_after must be an object with anchor and seconds.")
    check_known(given, ("anchor", "seconds"), path="output_expires_after")
    return check_expiry(given.get("anchor"), given.get("seconds"), "output_expires_after")
