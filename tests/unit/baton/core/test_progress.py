"""Lines of progress reach the receiver of their context, and a terminal shows only the last one."""

from __future__ import annotations

import sys

import pytest

from baton.core.progress import progress_on_stderr, progress_to, report_progress


def test_a_line_goes_to_the_innermost_receiver_and_to_none_outside() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with progress_to(outer.append):
        with progress_to(inner.append):
            report_progress("1")
        report_progress("2")
    report_progress("3")
    assert (outer, inner) == (["2"], ["1"])


@pytest.mark.parametrize(
    ("is_terminal", "shown"), [(False, "1\n2\n"), (True, "\r\x1b[K1\r\x1b[K2\n")], ids=["file", "terminal"]
)
def test_a_terminal_updates_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool, shown: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_on_stderr():
        report_progress("1")
        report_progress("2")
    assert capsys.readouterr().err == shown


def test_work_without_progress_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_on_stderr():
        pass
    assert capsys.readouterr().err == ""
