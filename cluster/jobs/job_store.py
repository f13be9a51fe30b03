"""The records of jobs: their states, leases and results.

Each job is run by one router, which holds a lease on it and renews the lease. A router that takes a lease over raises
its token, and every change must name the current token, so a router that was wrongly taken for dead can no longer
change anything. Results are rows with the key (job, line), written in the transaction that updates the job's counts, so
each line has exactly one result whatever fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Delete, Select, delete, func, insert, or_, select, update
from sqlalchemy.engine import RowMapping

from baton.core.errors import BatonError, ConflictError, InternalError, NotFoundError
from cluster.jobs.database import Database
from cluster.jobs.job_types import ACTIVE, Job, LineProblem, Result, Status, StoredFile, as_problem
from cluster.jobs.tables import ATTEMPTS, FILES, JOBS, RESULTS
from cluster.telemetry.job_figures import COMPLETED, FAILED, OPEN, JobFigures

_COLUMNS = [column for column in JOBS.c if column.name not in ("holder", "leased_until")]


class LeaseLostError(BatonError):
    """Another router has the lease of the job."""

    code = "lease_lost"


class JobStore:
    """Every method is one transaction and raises the errors of :meth:`Database.writing`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, job: Job) -> None:
        """Adds a job that no router has begun.

        Raises:
            NotFoundError: its owner has no such input file.
        """
        values = {name: value for name, value in asdict(job).items() if name in JOBS.c}
        with self._database.writing() as connection:
            # Locked, so that it is not deleted at the same time.
            file = select(FILES.c.id).where(FILES.c.id == job.input_file_id, FILES.c.owner == job.owner)
            if connection.scalar(file.with_for_update()) is None:
                raise NotFoundError(f"There is no file {job.input_file_id[:80]!r}.", param="input_file_id")
            connection.execute(insert(JOBS).values(**values, holder="", leased_until=0.0))

    def get(self, owner: str, job_id: str) -> Job:
        """Raises :class:`NotFoundError` unless the owner has this job."""
        with self._database.reading() as connection:
            return _owned(connection, owner, job_id)

    def listed(self, owner: str, *, after: str | None, limit: int) -> tuple[list[Job], bool]:
        """The owner's jobs behind ``after``, the newest first, and whether there are more."""
        query = select(*_COLUMNS).where(JOBS.c.owner == owner).order_by(JOBS.c.id.desc()).limit(limit + 1)
        if after is not None:
            query = query.where(JOBS.c.id < after)
        with self._database.reading() as connection:
            found = [_job(row) for row in connection.execute(query).mappings()]
        return found[:limit], len(found) > limit

    def cancel(self, owner: str, job_id: str, now_s: int) -> Job:
        """Asks for the end of a job, which the holder of its lease brings about. Idempotent.

        Raises:
            NotFoundError: the owner has no such job.
            ConflictError: it has ended, or its results are being written.
        """
        with self._database.writing() as connection:
            job = _owned(connection, owner, job_id, locks=True)
            if job.status is Status.CANCELLING:
                return job
            if job.status not in (Status.VALIDATING, Status.IN_PROGRESS):
                raise ConflictError(f"The batch {job_id!r} is {job.status} and cannot be cancelled.")
            return _move(connection, job, Status.CANCELLING, now_s)

    def claim(
        self,
        holder: str,
        models: Collection[str],
        now_s: float,
        lease_s: float,
        *,
        running: Collection[str],
        limit: int,
    ) -> list[Job]:
        """Takes the leases of jobs that no router runs, the oldest first.

        Args:
            holder: name of the router that only it and its earlier processes have. Their leases are taken at once, and
                those of others when they have run out.
            models: names of the model that it serves.
            running: jobs that this process runs already.
        """
        query = (
            select(*_COLUMNS)
            .where(JOBS.c.status.in_(ACTIVE), JOBS.c.model.in_(models), JOBS.c.id.not_in(running))
            .where(or_(JOBS.c.leased_until < now_s, JOBS.c.holder == holder))
            .order_by(JOBS.c.id)
            .limit(limit)
        )
        if limit < 1 or not self._finds(query):
            return []
        with self._database.writing() as connection:
            claimed = []
            for row in connection.execute(query.with_for_update(skip_locked=True)).mappings().all():
                job = replace(_job(row), token=row["token"] + 1)
                lease = {"holder": holder, "token": job.token, "leased_until": now_s + lease_s}
                connection.execute(update(JOBS).where(JOBS.c.id == job.id).values(lease))
                claimed.append(job)
            return claimed

    def renew(self, job: Job, now_s: float, lease_s: float) -> Job:
        """Keeps the lease and returns the job as it is now. Raises :class:`LeaseLostError`."""
        with self._database.writing() as connection:
            found = _held(connection, job)
            connection.execute(update(JOBS).where(JOBS.c.id == job.id).values(leased_until=now_s + lease_s))
            return found

    def release(self, job: Job) -> None:
        """Gives the lease back, so that another router can take it at once. Does nothing if it is lost."""
        with self._database.writing() as connection:
            connection.execute(
                update(JOBS).where(JOBS.c.id == job.id, JOBS.c.token == job.token).values(leased_until=0.0, holder="")
            )

    def begin(self, job: Job, num_lines: int, now_s: int) -> Job:
        """The job is valid and has so many lines. Returns it as it is now: perhaps it was cancelled meanwhile."""
        with self._database.writing() as connection:
            found = _held(connection, job)
            if found.status is not Status.VALIDATING:
                return found
            return _move(connection, found, Status.IN_PROGRESS, now_s, num_lines=num_lines)

    def fail(self, job: Job, problems: Sequence[LineProblem], now_s: int) -> Job:
        """The job is not valid. Returns it as it is now."""
        with self._database.writing() as connection:
            found = _held(connection, job)
            if found.status is not Status.VALIDATING:
                return found
            return _move(connection, found, Status.FAILED, now_s, problems=[asdict(problem) for problem in problems])

    def begin_finalizing(self, job: Job, now_s: int) -> Job:
        """No line runs any more, since all have a result or the job's time is over. Returns the job as it is now."""
        with self._database.writing() as connection:
            found = _held(connection, job)
            if found.status not in (Status.VALIDATING, Status.IN_PROGRESS):
                return found
            if found.num_open and now_s < found.expires_at:
                raise InternalError(f"The batch {job.id!r} has {found.num_open} lines without a result.")
            return _move(connection, found, Status.FINALIZING, now_s)

    def numbers_done(self, job_id: str) -> set[int]:
        """The numbers of the lines that have a result."""
        with self._database.reading() as connection:
            return set(connection.scalars(select(RESULTS.c.number).where(RESULTS.c.job_id == job_id)))

    def record(self, job: Job, results: Sequence[Result]) -> None:
        """Records results. Those of lines that have one are dropped, so a repetition changes nothing.

        The attempts of these lines are counted no more.

        Raises:
            LeaseLostError: the lease is lost, and nothing was recorded.
        """
        numbers = [result.number for result in results]
        known = select(RESULTS.c.number).where(RESULTS.c.job_id == job.id, RESULTS.c.number.in_(numbers))
        with self._database.writing() as connection:
            found = _held(connection, job)
            taken = set(connection.scalars(known))
            new = [result for result in results if result.number not in taken]
            if not new:
                return
            connection.execute(insert(RESULTS), [{"job_id": job.id, **asdict(result)} for result in new])
            connection.execute(_attempts(job, numbers))
            num_failed = sum(result.failed for result in new)
            counts = {
                "num_completed": found.num_completed + len(new) - num_failed,
                "num_failed": found.num_failed + num_failed,
            }
            connection.execute(update(JOBS).where(JOBS.c.id == job.id).values(counts))

    def open_attempts(self, job_id: str) -> dict[int, int]:
        """How many attempts of each line have begun and not ended, by the number of the line, if there are any.

        For the holder of a new lease, these are the attempts that ended with the loss of their router.
        """
        query = select(ATTEMPTS.c.number, ATTEMPTS.c.num_open).where(ATTEMPTS.c.job_id == job_id)
        with self._database.reading() as connection:
            return {row.number: row.num_open for row in connection.execute(query)}

    def set_open_attempts(self, job: Job, counts: Mapping[int, int]) -> None:
        """Changes what :meth:`open_attempts` returns for these lines.

        Raises:
            LeaseLostError: the lease is lost, and nothing has changed.
        """
        rows = [{"job_id": job.id, "number": number, "num_open": count} for number, count in counts.items() if count]
        with self._database.writing() as connection:
            _held(connection, job)
            connection.execute(_attempts(job, counts))
            if rows:
                connection.execute(insert(ATTEMPTS), rows)

    def results(self, job_id: str, *, failed: bool, after: int, limit: int) -> list[Result]:
        """The next results, in the order of the lines."""
        query = (
            select(RESULTS.c.number, RESULTS.c.failed, RESULTS.c.text)
            .where(RESULTS.c.job_id == job_id, RESULTS.c.failed == failed, RESULTS.c.number > after)
            .order_by(RESULTS.c.number)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [Result(**row) for row in connection.execute(query).mappings()]

    def finish(
        self,
        job: Job,
        status: Status,
        output: StoredFile | None,
        errors: StoredFile | None,
        now_s: int,
        problems: Sequence[LineProblem] = (),
    ) -> Job:
        """Ends the job with its files, whose content must be complete. Its results are in them and are removed here.

        Args:
            job: as it was when its files were begun.

        Raises:
            LeaseLostError: the lease is lost, and nothing has changed.
        """
        with self._database.writing() as connection:
            found = _held(connection, job)
            if (found.num_completed, found.num_failed) != (job.num_completed, job.num_failed):
                raise InternalError(f"The batch {job.id!r} got results while its files were written.")
            for file in (output, errors):
                if file is not None:
                    connection.execute(insert(FILES).values(asdict(file)))
            for table in (RESULTS, ATTEMPTS):
                connection.execute(delete(table).where(table.c.job_id == job.id))
            return _move(
                connection,
                found,
                status,
                now_s,
                output_file_id=output and output.id,
                error_file_id=errors and errors.id,
                problems=[asdict(problem) for problem in problems],
            )

    def figures(self) -> JobFigures:
        """All jobs by state, and the lines of those that have not ended."""
        sums = (func.sum(column) for column in (JOBS.c.num_lines, JOBS.c.num_completed, JOBS.c.num_failed))
        query = select(JOBS.c.status, func.count(), *sums).group_by(JOBS.c.status)
        states = {str(status): 0 for status in Status}
        lines = dict.fromkeys((OPEN, COMPLETED, FAILED), 0)
        with self._database.reading() as connection:
            for status, num_jobs, num_lines, num_completed, num_failed in connection.execute(query):
                states[status] = num_jobs
                if status in ACTIVE:
                    lines[OPEN] += int(num_lines - num_completed - num_failed)
                    lines[COMPLETED] += int(num_completed)
                    lines[FAILED] += int(num_failed)
        return JobFigures(states, lines)

    def remove_old(self, now_s: int) -> None:
        """Removes the records of jobs that have ended and whose files have expired."""
        is_old = (JOBS.c.status.not_in(ACTIVE), JOBS.c.expires_at + JOBS.c.keep_s <= now_s)
        with self._database.writing() as connection:
            connection.execute(delete(JOBS).where(*is_old))

    def _finds(self, query: Select[Any]) -> bool:
        """Whether there are rows, without the lock of a writer: routers ask every second."""
        with self._database.reading() as connection:
            return connection.execute(query).first() is not None


def _job(row: RowMapping) -> Job:
    values = {**row, "status": Status(row["status"]), "problems": tuple(map(as_problem, row["problems"]))}
    return Job(**values)


def _owned(connection: Connection, owner: str, job_id: str, *, locks: bool = False) -> Job:
    query = select(*_COLUMNS).where(JOBS.c.id == job_id, JOBS.c.owner == owner)
    row = connection.execute(query.with_for_update() if locks else query).mappings().first()
    if row is None:
        raise NotFoundError(f"There is no batch {job_id[:80]!r}. GET /v1/batches lists your batches.", param="batch_id")
    return _job(row)


def _held(connection: Connection, job: Job) -> Job:
    """The job as it is now, locked until the end of the transaction. Raises :class:`LeaseLostError`."""
    query = select(*_COLUMNS).where(JOBS.c.id == job.id, JOBS.c.token == job.token, JOBS.c.status.in_(ACTIVE))
    row = connection.execute(query.with_for_update()).mappings().first()
    if row is None:
        raise LeaseLostError(f"Another router runs the batch {job.id!r}, or it has ended.")
    return _job(row)


def _attempts(job: Job, numbers: Collection[int]) -> Delete:
    return delete(ATTEMPTS).where(ATTEMPTS.c.job_id == job.id, ATTEMPTS.c.number.in_(numbers))


def _move(connection: Connection, job: Job, status: Status, now_s: int, **values: Any) -> Job:
    times = {**job.times, str(status): now_s}
    connection.execute(update(JOBS).where(JOBS.c.id == job.id).values(status=status, times=times, **values))
    row = connection.execute(select(*_COLUMNS).where(JOBS.c.id == job.id)).mappings().one()
    return _job(row)
