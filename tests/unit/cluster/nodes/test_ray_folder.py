"""The private folders of Ray nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from cluster.nodes.ray_folder import RayFolder, published_heads

LONGEST_SESSION = "session_2026-01-31_23-59-59_123456_4194304/sockets/plasma_store"


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A short path to a temporary folder."""
    link = Path(f"/tmp/rf{os.getpid()}")
    link.symlink_to(tmp_path)
    yield link
    link.unlink()


def make_session(folder: Path, name: str, modified_s: float) -> Path:
    session = folder / f"session_{name}"
    for part in ("logs", "sockets"):
        (session / part).mkdir(parents=True)
        (session / part / "file").write_text("x")
    os.utime(session, (modified_s, modified_s))
    return session


def test_only_the_owner_can_enter_even_if_the_folder_was_open(short: Path) -> None:
    root = short / f"baton-{os.geteuid()}"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with RayFolder(short) as folder:
        assert folder.path == root / "0"
        assert root.stat().st_mode & 0o777 == 0o700


def test_nodes_that_run_at_once_have_folders_of_their_own(short: Path) -> None:
    with RayFolder(short) as first, RayFolder(short) as second:
        assert first.path != second.path
    with RayFolder(short) as third:
        assert third.path == first.path


def test_the_next_node_removes_all_but_the_last_logs(short: Path) -> None:
    with RayFolder(short) as folder:
        oldest, newest = make_session(folder.path, "b", 100.0), make_session(folder.path, "a", 200.0)
    with RayFolder(short):
        assert not oldest.exists()
        assert [path.name for path in newest.iterdir()] == ["logs"]


def test_heads_are_found_while_their_nodes_run(short: Path) -> None:
    assert published_heads(short) == []
    with RayFolder(short), RayFolder(short) as joined:  # the first one is a local cluster
        joined.publish_head("10.0.0.1:6379")
        assert published_heads(short) == ["10.0.0.1:6379"]
    assert published_heads(short) == []
    with RayFolder(short), RayFolder(short):
        assert published_heads(short) == []


def test_sockets_have_room_in_the_longest_path(short: Path) -> None:
    deep = short / ("d" * 60)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        RayFolder(deep)
    with RayFolder() as folder:
        assert len(str(folder.path.parent / "99" / LONGEST_SESSION)) <= 107


@pytest.mark.parametrize("squatter", ["file", "link"])
def test_a_foreign_entry_in_its_place_is_refused(squatter: str, short: Path, tmp_path: Path) -> None:
    root = short / f"baton-{os.geteuid()}"
    if squatter == "file":
        root.write_text("")
    else:
        root.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="TMPDIR"):
        RayFolder(short)
