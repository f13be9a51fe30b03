"""The section ``jobs`` of the configuration: OpenAI's Files and Batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from baton.core.config_section import NonEmptyString, PositiveInt, Section

DATA_VARIABLE = "BATON_DATA"
_SCHEMES = ("postgresql://", "sqlite:////")


class JobsConfig(Section):
    """Where jobs are kept, and their limits. See ``docs/jobs.md``."""

    enabled: bool = True
    """Whether the router serves /v1/files and /v1/batches."""
    dir: NonEmptyString | None = None
    """Folder of the files; null: jobs in $BATON_DATA, else ~/.local/share/baton/jobs."""
    database: NonEmptyString | None = None
    """null: SQLite in ``dir``; or postgresql://user@host/name, which needs the extra ``postgres``."""
    max_file_bytes: Annotated[int, Field(ge=1024)] = 200 * 1024 * 1024
    """Larger uploads get 413."""
    max_lines: PositiveInt = 50_000
    """Jobs whose input file has more lines fail."""
    max_in_flight: PositiveInt = 32
    """Lines of all jobs that one router runs at the same time while no urgent request comes."""
    keep_days: PositiveInt = 30
    """Days until the files that a job has written expire, and its record with them."""

    @field_validator("database")
    @classmethod
    def _known_database(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(_SCHEMES):
            raise ValueError(
                "database must begin with postgresql://, or with sqlite:/// and an absolute path (four slashes); null "
                "means SQLite in jobs.dir"
            )
        return url

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        if self.dir is not None:
            return Path(self.dir).expanduser().absolute()
        data = os.environ.get(DATA_VARIABLE)
        return (Path(data).expanduser().absolute() if data else Path.home() / ".local/share/baton") / "jobs"

    @property
    def database_url(self) -> str:
        """URL of the database."""
        return self.database or f"sqlite:///{self.folder / 'jobs.sqlite'}"
