"""What the stores of files and jobs promise, on SQLite and on PostgreSQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from baton.core.errors import (
    ConfigError,
    ConflictError,
    InternalError,
    InvalidRequestError,
    JobsUnavailableError,
    NotFoundError,
)
from cluster.jobs.database import Database
from cluster.jobs.file_records import FileRecords
from cluster.jobs.job_store import JobStore, LeaseLostError
from cluster.jobs.job_types import Job, LineProblem, Status
from cluster.jobs.tables import SCHEMA
from tests.unit.cluster.jobs.made_jobs import LEASE_S, MODEL, made_job, result, stored_file


@pytest.fixture
def files(database: Database) -> FileRecords:
    return FileRecords(database)


@pytest.fixture
def store(database: Database) -> JobStore:
    return JobStore(database)


def added(store: JobStore, files: FileRecords, owner: str = "", num_lines: int = 0, **changes: object) -> Job:
    """A new job; with ``num_lines`` it is claimed by the router ``a`` and in progress."""
    file = stored_file(owner)
    files.add(file)
    job = made_job(file, **changes)
    store.add(job)
    return store.begin(claimed(store, "a")[-1], num_lines, 101) if num_lines else job


def claimed(store: JobStore, holder: str, now_s: float = 100.0, model: str = MODEL) -> list[Job]:
    return store.claim(holder, [model], now_s, LEASE_S, running=[], limit=10)


def test_a_job_is_found_as_it_was_added(store: JobStore, files: FileRecords) -> None:
    job = added(store, files, "ann", metadata={"a": "b"})
    assert store.get("ann", job.id) == job
    for act in (store.get, lambda owner, job_id: store.cancel(owner, job_id, 1)):
        with pytest.raises(NotFoundError):
            act("bob", job.id)
    assert store.listed("bob", after=None, limit=5) == ([], False)


def test_figures_count_jobs_and_the_lines_of_those_that_have_not_ended(store: JobStore, files: FileRecords) -> None:
    assert sum(store.figures().states.values()) == 0
    for num_lines in (5, 7):
        store.record(added(store, files, num_lines=num_lines), [result(1), result(2, failed=True)])
    ended = added(store, files, num_lines=9)
    store.finish(ended, Status.CANCELLED, None, None, 102)
    added(store, files, "ann")
    figures = store.figures()
    assert {state: count for state, count in figures.states.items() if count} == {
        "validating": 1,
        "in_progress": 2,
        "cancelled": 1,
    }
    assert figures.lines == {"open": 8, "completed": 2, "failed": 2}


def test_lists_have_pages(store: JobStore, files: FileRecords) -> None:
    jobs = [added(store, files) for _ in range(3)][::-1]
    assert store.listed("", after=None, limit=2) == (jobs[:2], True)
    assert store.listed("", after=jobs[1].id, limit=2) == (jobs[2:], False)
    found, has_more = files.listed("", after=None, limit=2, oldest_first=True)
    assert ([file.id for file in found], has_more) == ([job.input_file_id for job in jobs[:0:-1]], True)
    assert files.listed("", after=None, limit=2, purpose="batch_output") == ([], False)


def test_a_job_needs_a_file_of_its_owner(store: JobStore, files: FileRecords) -> None:
    file = stored_file("ann")
    files.add(file)
    with pytest.raises(NotFoundError, match="There is no file"):
        store.add(replace(made_job(file), owner="bob"))


def test_one_router_has_the_lease(store: JobStore, files: FileRecords) -> None:
    job = added(store, files)
    assert claimed(store, "b", model="other") == []
    (mine,) = claimed(store, "a")
    assert (mine.id, mine.token) == (job.id, 1)
    assert claimed(store, "b", 100.0 + LEASE_S) == []
    store.renew(mine, 105.0, LEASE_S)
    assert claimed(store, "b", 101.0 + LEASE_S) == []
    (theirs,) = claimed(store, "b", 106.0 + LEASE_S)
    assert theirs.token == 2
    for act in (
        lambda: store.renew(mine, 130.0, LEASE_S),
        lambda: store.record(mine, [result(1)]),
        lambda: store.begin(mine, 5, 130),
        lambda: store.finish(mine, Status.COMPLETED, None, None, 130),
    ):
        with pytest.raises(LeaseLostError):
            act()
    assert store.numbers_done(job.id) == set()


def test_a_router_that_starts_again_has_its_jobs_at_once(store: JobStore, files: FileRecords) -> None:
    added(store, files)
    (before,) = claimed(store, "a")
    (after,) = claimed(store, "a", 100.5)
    assert after.token == before.token + 1
    assert store.claim("a", [MODEL], 100.6, LEASE_S, running=[after.id], limit=10) == []


def test_a_lease_that_is_given_back_can_be_taken_at_once(store: JobStore, files: FileRecords) -> None:
    added(store, files)
    (mine,) = claimed(store, "a")
    store.release(mine)
    assert len(claimed(store, "b")) == 1
    store.release(mine)  # of an old lease
    assert claimed(store, "c") == []


def test_many_routers_claim_each_job_once(store: JobStore, files: FileRecords) -> None:
    jobs = {added(store, files).id for _ in range(12)}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda n: store.claim(str(n), [MODEL], 100.0, LEASE_S, running=[], limit=4), range(6)))
    taken = [job.id for each in found for job in each]
    assert len(taken) == len(set(taken))
    assert set(taken) <= jobs


def test_a_line_has_one_result(store: JobStore, files: FileRecords) -> None:
    job = added(store, files, num_lines=3)
    store.record(job, [result(1, b"first"), result(3, b"bad", failed=True)])
    store.record(job, [result(1, b"second"), result(2, b"two")])
    assert [(one.number, one.text) for one in store.results(job.id, failed=False, after=0, limit=9)] == [
        (1, b"first"), (2, b"two"),
    ]  # fmt: skip
    assert store.results(job.id, failed=False, after=1, limit=1)[0].number == 2
    job = store.get("", job.id)
    assert (job.num_completed, job.num_failed, job.num_open) == (2, 1, 0)


def test_attempts_are_counted_until_their_line_has_a_result(store: JobStore, files: FileRecords) -> None:
    job = added(store, files, num_lines=3)
    store.set_open_attempts(job, {1: 1, 2: 1, 3: 2})
    store.set_open_attempts(job, {2: 0, 3: 3})
    assert store.open_attempts(job.id) == {1: 1, 3: 3}
    store.record(job, [result(3)])
    assert store.open_attempts(job.id) == {1: 1}
    (later,) = claimed(store, "b", 101.0 + LEASE_S)
    with pytest.raises(LeaseLostError):
        store.set_open_attempts(job, {1: 0})
    store.record(later, [result(2)])
    assert store.open_attempts(job.id) == {1: 1}
    store.finish(store.get("", job.id), Status.CANCELLED, None, None, 102)
    assert store.open_attempts(job.id) == {}


def test_results_of_several_threads_are_counted(store: JobStore, files: FileRecords) -> None:
    job = added(store, files, num_lines=40)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.record(job, [result(number % 40 + 1)]), range(80)))
    assert store.get("", job.id).num_completed == 40


def test_a_job_ends_with_its_files(store: JobStore, files: FileRecords) -> None:
    job = added(store, files, num_lines=1)
    with pytest.raises(InternalError, match="1 lines without a result"):
        store.begin_finalizing(job, 102)
    store.record(job, [result(1)])
    job = store.begin_finalizing(job, 102)
    output = stored_file(purpose="batch_output", expires_at=600)
    job = store.finish(job, Status.COMPLETED, output, None, 103)
    assert (job.status, job.output_file_id, job.error_file_id) == (Status.COMPLETED, output.id, None)
    assert job.times == {"in_progress": 101, "finalizing": 102, "completed": 103}
    assert files.get("", output.id) == output
    assert store.numbers_done(job.id) == set()
    assert claimed(store, "b", 900.0) == []
    with pytest.raises(LeaseLostError):
        store.record(job, [result(1)])


def test_no_result_is_left_out_of_the_files(store: JobStore, files: FileRecords) -> None:
    """A result that came while the files were written prevents the end of the job."""
    job = added(store, files, num_lines=2)
    store.cancel("", job.id, 102)
    begun = store.renew(job, 102.0, LEASE_S)
    store.record(job, [result(1)])
    with pytest.raises(InternalError):
        store.finish(begun, Status.CANCELLED, None, None, 103)


def test_a_cancelled_job_does_not_begin(store: JobStore, files: FileRecords) -> None:
    job = added(store, files)
    (mine,) = claimed(store, "a")
    assert store.cancel("", job.id, 101).status is Status.CANCELLING
    assert store.cancel("", job.id, 102).times == {"cancelling": 101}
    assert store.begin(mine, 4, 103).status is Status.CANCELLING
    assert store.fail(mine, [], 103).status is Status.CANCELLING
    assert store.begin_finalizing(mine, 103).status is Status.CANCELLING
    store.finish(store.renew(mine, 103.0, LEASE_S), Status.CANCELLED, None, None, 104)
    with pytest.raises(ConflictError):
        store.cancel("", job.id, 105)


@pytest.mark.parametrize("job_id", ["batch_\0", "batch_\ud83d"])
def test_ids_that_no_database_holds_are_the_fault_of_the_request(store: JobStore, job_id: str) -> None:
    """PostgreSQL refuses them; SQLite finds nothing."""
    with pytest.raises((NotFoundError, InvalidRequestError)):
        store.get("ann", job_id)
    with pytest.raises((NotFoundError, InvalidRequestError)):
        store.cancel("ann", job_id, 1)


def test_a_failed_job_keeps_its_problems(store: JobStore, files: FileRecords) -> None:
    added(store, files)
    (mine,) = claimed(store, "a")
    problems = [LineProblem("invalid_url", "wrong", 3, "url"), LineProblem("empty_file", "empty")]
    job = store.fail(mine, problems, 102)
    assert (job.status, job.problems) == (Status.FAILED, tuple(problems))


def test_a_file_in_use_stays(store: JobStore, files: FileRecords) -> None:
    job = added(store, files)
    with pytest.raises(ConflictError, match="which has not ended"):
        files.remove("", job.input_file_id)
    spare = stored_file("ann", expires_at=150)
    files.add(spare)
    with pytest.raises(NotFoundError):
        files.remove("bob", spare.id)
    assert files.known([spare.id, "none"]) == {spare.id}
    assert files.remove_expired(149) == []
    assert files.remove_expired(150) == [spare.id]
    with pytest.raises(NotFoundError):
        files.get("ann", spare.id)


def test_old_jobs_are_removed(store: JobStore, files: FileRecords) -> None:
    job = added(store, files)
    store.remove_old(10_000)
    (mine,) = claimed(store, "a")
    store.fail(mine, [], 102)
    store.remove_old(1499)
    assert store.get("", job.id).status is Status.FAILED
    store.remove_old(1500)
    with pytest.raises(NotFoundError):
        store.get("", job.id)


def test_tables_are_created_once_by_several_routers(url: str, database: Database) -> None:
    others = [Database(url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Database.create_tables, others))
    for other in others:
        other.close()


def test_tables_of_another_version_are_refused(url: str, database: Database) -> None:
    with database.writing() as connection:
        connection.execute(SCHEMA.update().values(version=99))
    other = Database(url)
    with pytest.raises(ConfigError, match="have version 99"):
        other.create_tables()
    other.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://someone:secret@127.0.0.1:1/none?connect_timeout=2",
        "postgresql://someone@127.0.0.1:1/none?password=secret&sslpassword=secret&connect_timeout=2",
    ],
)
def test_unreachable_databases_have_an_error_with_a_name(url: str) -> None:
    database = Database(url)
    with pytest.raises(JobsUnavailableError, match="cannot be used") as refused:
        database.create_tables()
    assert "secret" not in refused.value.message
