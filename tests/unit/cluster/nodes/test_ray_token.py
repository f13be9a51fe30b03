"""Ray's token on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.core.errors import ConfigError
from cluster.nodes.ray_token import ensure_token, find_token, refuse_open_ray, require_token, token_file


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode_of(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_a_new_token_is_for_its_owner_only_and_stays(home: Path) -> None:
    assert find_token() is None
    token = ensure_token()
    assert len(token) == 64
    assert token_file() == home / ".ray" / "auth_token"
    assert mode_of(token_file()) == 0o600
    assert ensure_token() == find_token() == token
    assert list((home / ".ray").iterdir()) == [token_file()]


def test_processes_of_two_machines_with_one_home_and_one_id_do_not_share_a_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    made: list[str] = []

    def another_one_first(source: str, destination: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        made.append(ensure_token())
        link(source, destination)

    monkeypatch.setattr(os, "link", another_one_first)
    assert ensure_token() == made[0]
    assert list((home / ".ray").iterdir()) == [token_file()]


def test_a_token_that_ray_made_readable_for_everybody_becomes_private(home: Path) -> None:
    file = home / "given"
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
        assert require_token() == "secret"
    assert mode_of(file) == 0o600


def test_the_variable_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert ensure_token() == "given"


def test_a_missing_or_empty_token_says_where_it_comes_from(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"no token .*auth_token does not exist.*baton node token.*--token-file"):
        require_token()
    (home / ".ray").mkdir()
    token_file().write_text("\n")
    with pytest.raises(ConfigError, match=r"auth_token is empty.*baton node token"):
        ensure_token()


def test_a_folder_that_cannot_be_written_names_the_variable(home: Path) -> None:
    (home / ".ray").write_text("a file")
    with pytest.raises(ConfigError, match="auth_token"):
        ensure_token()


def test_switched_off_authentication_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_open_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "Token")
    refuse_open_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="Unset RAY_AUTH_MODE"):
        refuse_open_ray()
