"""Where jobs are kept: nothing depends on the folder in which a router's process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from cluster.config.config import BatonConfig
from cluster.jobs.database import Database
from cluster.jobs.jobs_config import DATA_VARIABLE, JobsConfig


@pytest.mark.parametrize("url", ["sqlite:///dir", "sqlite:///", "sqlite://", "mysql://host/name", "dir"])
def test_databases_without_an_absolute_place_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="absolute path"):
        BatonConfig.from_dict({"jobs": {"database": url}})


@pytest.mark.parametrize("url", ["sqlite:///dir", "sqlite:///", "sqlite:///file:dir?uri=true"])
def test_no_database_is_made_in_the_current_folder(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="four slashes"):
        Database(url)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert JobsConfig(dir="data").database_url == f"sqlite:///{tmp_path}/data/jobs.sqlite"
    monkeypatch.setenv(DATA_VARIABLE, "data")
    assert JobsConfig().database_url == f"sqlite:///{tmp_path}/data/jobs/jobs.sqlite"
    assert JobsConfig(database="sqlite:////srv/jobs.sqlite").database_url == "sqlite:////srv/jobs.sqlite"
