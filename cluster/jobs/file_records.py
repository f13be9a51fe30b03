"""The records of files. Their content is in :mod:`cluster.jobs.file_storage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy import delete, insert, select

from baton.core.errors import ConflictError, NotFoundError
from cluster.jobs.database import Database
from cluster.jobs.job_types import ACTIVE, StoredFile
from cluster.jobs.tables import FILES, JOBS


class FileRecords:
    """Every method is one transaction and raises the errors of :meth:`Database.writing`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, file: StoredFile) -> None:
        """Adds a file, whose content must be complete."""
        with self._database.writing() as connection:
            connection.execute(insert(FILES).values(asdict(file)))

    def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises :class:`NotFoundError` unless the owner has this file."""
        query = select(FILES).where(FILES.c.id == file_id, FILES.c.owner == owner)
        with self._database.reading() as connection:
            row = connection.execute(query).mappings().first()
        if row is None:
            raise _unknown(file_id)
        return StoredFile(**row)

    def listed(
        self, owner: str, *, after: str | None, limit: int, purpose: str | None = None, oldest_first: bool = False
    ) -> tuple[list[StoredFile], bool]:
        """The owner's files behind ``after``, and whether there are more."""
        query = select(FILES).where(FILES.c.owner == owner)
        if purpose is not None:
            query = query.where(FILES.c.purpose == purpose)
        if after is not None:
            query = query.where(FILES.c.id > after if oldest_first else FILES.c.id < after)
        query = query.order_by(FILES.c.id if oldest_first else FILES.c.id.desc()).limit(limit + 1)
        with self._database.reading() as connection:
            found = [StoredFile(**row) for row in connection.execute(query).mappings()]
        return found[:limit], len(found) > limit

    def remove(self, owner: str, file_id: str) -> None:
        """Removes the record.

        Raises:
            NotFoundError: the owner has no such file.
            ConflictError: a job that has not ended reads it.
        """
        with self._database.writing() as connection:
            user = connection.scalar(
                select(JOBS.c.id).where(
                    JOBS.c.owner == owner, JOBS.c.input_file_id == file_id, JOBS.c.status.in_(ACTIVE)
                )
            )
            if user is not None:
                raise ConflictError(
                    f"The file {file_id!r} is the input of the batch {user!r}, which has not ended. Cancel the batch, "
                    "or wait for its end."
                )
            gone = connection.execute(delete(FILES).where(FILES.c.id == file_id, FILES.c.owner == owner))
            if gone.rowcount == 0:
                raise _unknown(file_id)

    def remove_expired(self, now_s: int) -> list[str]:
        """Removes the records of expired files that no job reads, and returns their ids."""
        in_use = select(JOBS.c.input_file_id).where(JOBS.c.status.in_(ACTIVE))
        expired = (FILES.c.expires_at <= now_s, FILES.c.id.not_in(in_use))
        with self._database.writing() as connection:
            found = list(connection.scalars(select(FILES.c.id).where(*expired)))
            connection.execute(delete(FILES).where(*expired))
        return found

    def known(self, file_ids: Sequence[str]) -> set[str]:
        """Those of the ids that have a record."""
        with self._database.reading() as connection:
            return set(connection.scalars(select(FILES.c.id).where(FILES.c.id.in_(file_ids))))


def _unknown(file_id: str) -> NotFoundError:
    return NotFoundError(f"There is no file {file_id[:80]!r}. GET /v1/files lists your files.", param="file_id")
