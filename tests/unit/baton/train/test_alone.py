"""Two trainings never write into one working folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.errors import ConfigError, StorageError
from baton.train.alone import alone_in


def test_a_second_training_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "work"
    with alone_in(folder):
        refused = pytest.raises(
            ConfigError, match=r"Another `baton train` works in .*work\. Wait for its end, or .*--work"
        )
        with refused, alone_in(folder):
            pass
        assert folder.is_dir()
    with alone_in(folder):
        pass


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(StorageError, match="/proc/x cannot be written"), alone_in(Path("/proc/x")):
        pass
