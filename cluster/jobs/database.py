"""Transactions on SQLite or PostgreSQL. A transaction that has returned survives the loss of process and power."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, make_url, select, text
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from baton.core.errors import (
    BatonError,
    ConfigError,
    InvalidRequestError,
    JobsUnavailableError,
    StorageFullError,
)
from cluster.jobs.tables import METADATA, SCHEMA, VERSION

_BUSY_S = 30.0
"""How long a SQLite transaction waits for another process."""
_WRITES = "baton_writes"
_SECRETS = frozenset({"password", "sslpassword"})
"""Keys of a URL's query whose values are not shown."""
_PG_DISK_FULL = "53100"
_PG_LOCK = 0x6261746F6E
"""Number of the advisory lock that creates the tables once."""


class Database:
    """
    Args:
        url: ``sqlite:///PATH`` with an absolute path, or ``postgresql://…``. Nothing is opened before
            :meth:`create_tables`.

    Raises:
        ConfigError: the URL or its path is invalid, or PostgreSQL's driver is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            secrets = dict.fromkeys(_SECRETS & parsed.query.keys(), "***")
            self._shown = parsed.update_query_dict(secrets).render_as_string(hide_password=True)
            self._is_sqlite = parsed.get_backend_name() == "sqlite"
            self._folder = _absolute(parsed.database).parent if self._is_sqlite else None
            self._engine = _sqlite(url) if self._is_sqlite else create_engine(
                parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True
            )  # fmt: skip
        except ModuleNotFoundError as error:
            raise ConfigError(
                "jobs.database is a PostgreSQL URL, which needs psycopg. Install baton-serve[postgres]."
            ) from error
        except (ArgumentError, NoSuchModuleError) as error:
            raise ConfigError("jobs.database is not a URL such as postgresql://user@host:5432/baton.") from error

    def create_tables(self) -> None:
        """Creates what is missing.

        Raises:
            ConfigError: the tables are those of another version of baton.
            JobsUnavailableError, StorageFullError: as in :meth:`writing`.
        """
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                raise JobsUnavailableError(
                    f"Cannot create the folder {self._folder} of jobs: {error.strerror}."
                ) from error
        with self.writing() as connection:
            if not self._is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _PG_LOCK})
            METADATA.create_all(connection)
            version = connection.scalar(select(SCHEMA.c.version))
            if version is None:
                connection.execute(insert(SCHEMA).values(version=VERSION))
            elif version != VERSION:
                raise ConfigError(
                    f"The tables of jobs in {self._shown} have version {version}, and this baton needs {VERSION}. Name "
                    "another database in jobs.database, or use the version of baton that made these."
                )

    def check(self) -> None:
        """Raises the errors of :meth:`writing` unless the database answers."""
        with self.reading() as connection:
            connection.execute(select(1))

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database. Raises the errors of :meth:`writing`."""
        with self._translated(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end of the context, or rolled back if that raises.

        Raises:
            StorageFullError: there is no room on the disk.
            JobsUnavailableError: the database cannot be reached or used.
            InvalidRequestError: it cannot hold a text of the request.
        """
        with self._translated(), self._engine.connect() as connection:
            connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except BatonError:
            raise
        except UnicodeEncodeError as error:
            raise _unstorable("half of a character") from error
        except SQLAlchemyError as error:
            raise self._problem(error) from error

    def _problem(self, error: SQLAlchemyError) -> BatonError:
        cause = error.orig if isinstance(error, DBAPIError) else None
        if _is_full(cause):
            return StorageFullError(
                f"The database of jobs, {self._shown}, has no room left on its disk. Make room; jobs continue by "
                "themselves."
            )
        reason = str(cause or type(error).__name__).strip().split("\n")[0]
        if isinstance(error, DataError):  # such as NUL, which PostgreSQL's texts cannot have
            return _unstorable(reason)
        return JobsUnavailableError(f"The database of jobs, {self._shown}, cannot be used: {reason}")


def _unstorable(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"The database of jobs cannot hold a text of this request: {what}.")


def _absolute(path: str | None) -> Path:
    """A relative path would depend on the folder in which the router's process runs, and an empty one keeps nothing."""
    found = Path(path or "")
    if not found.is_absolute():
        raise ConfigError(
            f"jobs.database has the path {str(found)!r} and needs an absolute one, as in sqlite:////data/jobs.sqlite "
            "with four slashes."
        )
    return found


def _is_full(cause: BaseException | None) -> bool:
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return getattr(cause, "sqlstate", None) == _PG_DISK_FULL


def _sqlite(url: str) -> Engine:
    engine = create_engine(url, connect_args={"timeout": _BUSY_S})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions begin below, and not with the first change
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # a commit survives the loss of power

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later would fail if another one wrote in between.
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
