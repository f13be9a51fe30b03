"""``/v1/files``: files that clients upload for jobs, and files that jobs have written."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Request, Response
from starlette.responses import FileResponse

from baton.core.errors import BatonError, EndpointFullError, InvalidRequestError, NotFoundError
from cluster.gateway.access import api_key_of
from cluster.gateway.bodies import announced_bytes, drop_body, drop_rest
from cluster.gateway.http_edge import JsonResponse
from cluster.gateway.jobs.answers import MAX_FILES_LISTED, file_json, list_json, parse_listing
from cluster.gateway.jobs.form_reader import FileBegins, FormReader
from cluster.gateway.openai.json_body import check_content_encoding, shown
from cluster.gateway.openai.known_names import check_known
from cluster.jobs.job_types import FILE_ID, StoredFile
from cluster.jobs.jobs import BATCH_PURPOSE, Jobs
from cluster.jobs.uploads import Upload

FILE_FIELD = "file"
FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
EXPIRY_ANCHOR = "created_at"
SHORTEST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 30 * 86_400
_UPLOADS_AT_ONCE = 16
_WRITE_BYTES = 2**20
_MAX_FORM_BYTES = 2**20
"""What a form has besides its file is shorter."""
_MAX_DRAINED_BYTES = 4 * 2**30
"""So much of a refused upload is read and dropped, since many clients read the answer only after they have sent all."""


def owner_of(request: Request) -> str:
    """The name of the request's API key; empty if the endpoint needs no key."""
    api_key = api_key_of(request)
    return "" if api_key is None else api_key.name


def enabled(jobs: Jobs | None) -> Jobs:
    """Raises :class:`NotFoundError` if jobs are disabled."""
    if jobs is None:
        raise NotFoundError("Files and batches are disabled on this endpoint (jobs.enabled: false).")
    return jobs


class FilesEndpoint:
    """
    Args:
        jobs: ``None`` if jobs are disabled.
    """

    def __init__(self, jobs: Jobs | None) -> None:
        self._jobs = jobs
        self._num_uploads = 0

    async def create(self, request: Request) -> Response:
        try:
            form = self._begin(request)
        except BatonError:
            await drop_body(request, _MAX_DRAINED_BYTES)
            raise
        try:
            return JsonResponse(file_json(await self._receive(request, form)))
        except BatonError:
            await drop_rest(request, _MAX_DRAINED_BYTES)
            raise

    async def list(self, request: Request) -> Response:
        listing = parse_listing(
            request.query_params,
            FILE_ID,
            default=MAX_FILES_LISTED,
            max_limit=MAX_FILES_LISTED,
            more=("order", "purpose"),
        )
        found, has_more = await enabled(self._jobs).files(
            owner_of(request),
            after=listing.after,
            limit=listing.limit,
            purpose=listing.purpose,
            oldest_first=listing.oldest_first,
        )
        return JsonResponse(list_json([file_json(file) for file in found], has_more=has_more))

    async def get(self, request: Request, file_id: str) -> Response:
        return JsonResponse(file_json(await enabled(self._jobs).file(owner_of(request), file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        file, path = await enabled(self._jobs).content(owner_of(request), file_id)
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def delete(self, request: Request, file_id: str) -> Response:
        await enabled(self._jobs).delete_file(owner_of(request), file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})

    def _begin(self, request: Request) -> FormReader:
        """Refuses an upload before it is read if its head says enough for that."""
        check_content_encoding(request.headers.get("content-encoding"))
        enabled(self._jobs).check_size(announced_bytes(request) - _MAX_FORM_BYTES)
        if self._num_uploads == _UPLOADS_AT_ONCE:
            raise EndpointFullError(
                f"{_UPLOADS_AT_ONCE} files are being uploaded, which is the limit. Try again in a minute.",
                reason="bytes",
            )
        return FormReader(request.headers.get("content-type"), FILE_FIELD)

    async def _receive(self, request: Request, form: FormReader) -> StoredFile:
        jobs = enabled(self._jobs)
        self._num_uploads += 1
        upload: Upload | None = None
        buffered = bytearray()
        try:
            async for chunk in request.stream():
                for piece in form.feed(chunk):
                    if isinstance(piece, FileBegins):
                        upload = await jobs.upload(owner_of(request), piece.filename)
                    else:
                        buffered += piece
                if upload is not None and len(buffered) >= _WRITE_BYTES:
                    await upload.write(bytes(buffered))
                    buffered.clear()
            keep_s = _check_fields(form.fields)
            if upload is None:
                raise InvalidRequestError(f"The form has no field {FILE_FIELD!r} with a file.", param=FILE_FIELD)
            if not form.is_complete:
                raise InvalidRequestError("The form ends before its last boundary.", param=FILE_FIELD)
            await upload.write(bytes(buffered))
            return await upload.finish(keep_s)
        finally:
            self._num_uploads -= 1
            if upload is not None:
                await upload.close()


def _check_fields(fields: Mapping[str, str]) -> int | None:
    """The seconds until the file expires, if the form says so. Raises :class:`InvalidRequestError`."""
    check_known(fields, FORM_FIELDS, "field", listed=(FILE_FIELD, *FORM_FIELDS))
    purpose = fields.get("purpose")
    if purpose != BATCH_PURPOSE:
        raise InvalidRequestError(f"purpose must be {BATCH_PURPOSE!r}, got {shown(purpose)}.", param="purpose")
    seconds = fields.get("expires_after[seconds]")
    anchor = fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return None
    return check_expiry(anchor, int(seconds) if seconds and seconds.isascii() and seconds.isdecimal() else seconds)


def check_expiry(anchor: object, seconds: object, param: str = "expires_after") -> int:
    """The seconds until a file expires. Raises :class:`InvalidRequestError`."""
    if anchor != EXPIRY_ANCHOR:
        raise InvalidRequestError(f"{param}.anchor must be {EXPIRY_ANCHOR!r}, got {shown(anchor)}.", param=param)
    if type(seconds) is not int or not SHORTEST_EXPIRY_S <= seconds <= LONGEST_EXPIRY_S:
        raise InvalidRequestError(
            f"{param}.seconds must be between {SHORTEST_EXPIRY_S} and {LONGEST_EXPIRY_S}, got {shown(seconds)}.",
            param=param,
        )
    return seconds
