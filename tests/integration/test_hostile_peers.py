"""Workers refuse hostile messages with typed errors, keep nothing for them, and serve on. ``make fuzz`` sends more."""

from __future__ import annotations

from pathlib import Path

from tests.hostile_peers.session import hostile_session


def test_hostile_calls_are_refused_and_leave_nothing_behind(tmp_path: Path) -> None:
    with hostile_session(tmp_path) as session:
        session.run(num_calls=200)
        answers = {answer for _, answer in session.answers}
    assert {"OK", "UNAUTHENTICATED", "UNIMPLEMENTED", "invalid_request", "kv_transfer_failed"} <= answers
