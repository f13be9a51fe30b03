"""Files that appear as a whole or not at all, and what a full disk is called."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from baton.core.errors import StorageError, StorageFullError
from baton.core.files import AtomicFile, replace_file, writing


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, "storage_full"), (errno.EDQUOT, "storage_full"), (errno.EACCES, "storage_failed")],
)
def test_a_full_disk_has_one_name(number: int, code: str) -> None:
    with pytest.raises(StorageError, match=r"/srv/file cannot be written") as raised, writing(Path("/srv/file")):
        raise OSError(number, os.strerror(number))
    assert raised.value.code == code
    assert isinstance(raised.value, StorageFullError) == (code == "storage_full")


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_file_appears_when_it_is_complete(tmp_path: Path, is_durable: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    new = AtomicFile(path, 0o640)
    new.stream.write(b"new")
    assert path.read_bytes() == b"old"
    new.commit(is_durable=is_durable)
    new.discard()
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o640)


def test_a_discarded_file_leaves_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, "old")
    new = AtomicFile(path)
    new.stream.write(b"new")
    new.discard()
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
