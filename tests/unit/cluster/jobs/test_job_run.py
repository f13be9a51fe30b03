"""Runs of jobs: failures of storage and of other routers, and what they cost."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.core.errors import InternalError, StorageFullError
from cluster.gateway.openai.json_body import parse_object
from cluster.jobs.file_storage import FileStorage
from cluster.jobs.input_lines import InputFile
from cluster.jobs.job_runner import JobRunner
from cluster.jobs.job_store import LeaseLostError
from cluster.jobs.job_types import Line, Status
from cluster.jobs.setbacks import MAX_TRIES, Setbacks
from tests.fake_clock import FakeClock
from tests.job_services import jsonl, line
from tests.unit.cluster.jobs.job_world import ALL, NUM_LINES, URL, World
from tests.unit.cluster.jobs.made_jobs import MODEL, stored_file
from tests.waiting import until


async def test_a_run_goes_on_where_the_last_one_was_killed(world: World) -> None:
    world.sender.is_held = lambda line: line.number > 5
    killed = asyncio.create_task(world.claim().run())
    await until(lambda: world.now().num_completed == 5)
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    world.sender.is_held = lambda _: False
    world.sender.seen.clear()
    await world.claim().run()
    assert world.now().status is Status.COMPLETED
    assert sorted(world.sender.seen) == list(range(6, NUM_LINES + 1))
    assert world.contents() == ALL


async def test_a_router_that_was_believed_dead_ends_its_run(world: World) -> None:
    world.sender.is_held = lambda line: line.number > 5
    hung = asyncio.create_task(world.claim(lease_s=0.2).run())
    await until(lambda: world.now().num_completed == 5)
    world.now_s += 60
    other = world.claim("b", lease_s=100.0)
    with pytest.raises(LeaseLostError):
        await hung
    world.sender.is_held = lambda _: False
    await other.run()
    assert world.contents() == ALL


async def test_a_full_database_delays_results_and_loses_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True, True, False])
    record = world.store.record

    def limited(*arguments: Any) -> None:
        if next(failures, False):
            raise StorageFullError("full")
        record(*arguments)

    monkeypatch.setattr(world.store, "record", limited)
    await world.claim().run()
    assert world.contents() == ALL
    assert len(world.sender.seen) == NUM_LINES


async def test_sqlite_without_room_says_so(world: World) -> None:
    with world.database.reading() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    large = stored_file(filename="x" * 2**20)
    with pytest.raises(StorageFullError, match="no room left"):
        world.files.add(large)
    assert world.now().status is Status.VALIDATING


async def test_a_full_disk_delays_the_files_of_a_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True, False])
    fsync = os.fsync

    def limited(descriptor: int) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", limited)
    await world.claim().run()
    assert world.now().status is Status.COMPLETED
    assert world.contents() == ALL
    assert len(list(world.storage.path("x").parent.iterdir())) == 2


async def test_a_job_whose_time_passed_while_nothing_ran_expires(world: World) -> None:
    world.now_s = world.job.expires_at + 1
    await world.claim().run()
    assert (world.now().status, world.sender.seen) == (Status.EXPIRED, [])


async def test_a_lost_input_file_keeps_the_job(world: World) -> None:
    """Its content comes back with the disk that holds it."""
    run = world.claim()
    path = world.storage.path(world.job.input_file_id)
    hidden = path.rename(path.with_name("hidden"))
    task = asyncio.create_task(run.run())
    await asyncio.sleep(0.05)
    assert world.now().status is Status.VALIDATING
    hidden.rename(path)
    await task
    assert world.contents() == ALL


async def test_a_job_that_always_fails_ends_with_a_named_error_and_keeps_its_results(world: World) -> None:
    clock = FakeClock()
    runner = JobRunner(world.shop, world.files, "a", lambda: [MODEL], setbacks=Setbacks(clock))
    world.sender.is_broken = lambda line: line.number == NUM_LINES
    task = asyncio.create_task(runner.run())

    def has_failed() -> bool:
        clock.now_s += 100.0
        runner.wake()
        return world.now().status is Status.FAILED

    await until(has_failed)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    job = world.now()
    (problem,) = job.problems
    assert (problem.code, problem.line) == ("internal_error", None)
    assert "ValueError" in problem.message
    assert 0 < job.num_completed < NUM_LINES
    assert len(world.contents()) == job.num_completed
    assert world.sender.seen.count(NUM_LINES) >= MAX_TRIES


async def test_an_input_file_that_was_changed_is_named(world: World) -> None:
    world.sender.is_held = lambda line: line.number > 5
    killed = asyncio.create_task(world.claim().run())
    await until(lambda: world.now().num_completed == 5)
    killed.cancel()
    await asyncio.gather(killed, return_exceptions=True)
    path = world.storage.path(world.job.input_file_id)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:7], b"{broken\n", *lines[8:]]))
    world.sender.is_held = lambda _: False
    with pytest.raises(InternalError, match=r"Line 8 of the input file .* has changed since it was checked"):
        await world.claim().run()


def test_uploads_leave_room_for_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    new = FileStorage(tmp_path).write("file-1")
    with pytest.raises(StorageFullError, match=r"leave 64 MiB free\. Make room on the disk, .*jobs\.dir"):
        new.write(b"x")
    new.discard()
    assert list(tmp_path.iterdir()) == []


def test_strays_are_removed_and_records_keep_their_files(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    for name in ("file-known", "file-stray", "file-new", ".file-open-abc", "jobs.sqlite"):
        (tmp_path / name).write_bytes(b"x")
        if name != "file-new":
            os.utime(tmp_path / name, (0, 0))
    storage.remove_strays(lambda names: {"file-known"} & set(names))
    assert {path.name for path in tmp_path.iterdir()} == {"file-known", "file-new", "jobs.sqlite"}


def test_a_large_input_is_checked_with_pauses_and_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "file-1"
    body = {"prompt": "word " * 1000}
    with path.open("wb") as stream:
        for number in range(2000):
            stream.write(jsonl(line(str(number), URL, **body)))
        stream.write(b'{"custom_id": "' + b"x" * 200_000 + b'"}\n')
    pauses: list[float] = []
    source = InputFile(path, URL, partial(parse_object), 100_000)
    num_lines, problems = source.check(10_000, pauses.append)
    assert num_lines == 2001
    assert [(one.code, one.line) for one in problems] == [("line_too_long", 2001)]
    assert pauses


def lines_of(source: InputFile) -> Iterator[Line]:
    return source.lines({2})


def test_lines_that_are_done_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "file-1"
    path.write_bytes(jsonl(line("a", URL, prompt="1"), "", line("b", URL, prompt="2"), line("c", URL, prompt="3")))
    found = list(lines_of(InputFile(path, URL, parse_object, 1000)))
    assert found == [Line(1, "a", b'{"prompt":"1"}'), replace(found[1], number=3, custom_id="c")]
