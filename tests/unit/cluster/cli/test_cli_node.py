"""What `baton node` reads and prints."""

from __future__ import annotations

import pytest

from tests.unit.cluster.command_line import baton, environment

__all__ = ["baton", "environment"]  # fixtures


def test_the_token_is_made_once_and_printed(baton, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    file = tmp_path / "token"
    status, out, _ = baton("node", "token", "--token-file", str(file))
    assert (status, out.strip()) == (0, file.read_text())
    assert baton("node", "token", "--token-file", str(file))[1] == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["join", "somewhere"], "expected HOST:PORT"),
        (["join", "somewhere:99999"], "with a port from 1 to 65535"),
        (["join", "h:1", "--label", "rack"], "expected KEY=VALUE"),
        (["join", "h:1", "--worker-ports", "7"], "expected one such as 20000-20100"),
        (["join", "h:1", "--pool", "both"], "'both' is not one of"),
    ],
)
def test_wrong_options_are_explained(baton, arguments, message):
    status, _, err = baton("node", *arguments)
    assert status == 2
    assert message in " ".join(err.replace("│", " ").split())
