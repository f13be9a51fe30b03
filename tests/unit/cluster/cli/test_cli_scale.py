"""Output while pools change their size: progress and what delays it."""

from __future__ import annotations

from typing import Any

import pytest

from baton.core.errors import ConfigError, DeadlineError
from cluster.cli import cli_scale

NO_PLACE = "A decode worker needs 9 CPUs, and Ray has not started it yet.\n  here: too few CPUs"


def worker(number: int, state: str, reason: str = "") -> dict[str, Any]:
    return {"id": f"decode-{number}", "state": state, "reason": reason}


class Client:
    """A router that returns scripted statuses of its decode pool in order, and then the last one again."""

    def __init__(self, *statuses: list[dict[str, Any]]) -> None:
        self._statuses = list(statuses)

    async def scale(self, targets: dict[str, int]) -> dict[str, Any]:
        return {"pools": {name: {"target": target} for name, target in targets.items()}}

    async def status(self) -> dict[str, Any]:
        workers = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        other = {"id": "prefill-1", "state": "dead", "reason": "of the other pool"}
        return {"pools": {"decode": {"workers": workers}, "prefill": {"workers": [other]}}}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(cli_scale, "_POLL_S", 0.0)


async def test_each_reason_is_shown_once():
    client: Any = Client(
        [worker(1, "dead", "long ago"), worker(2, "starting")],
        [worker(1, "dead", "long ago"), worker(2, "dead", "its process died"), worker(3, "starting")],
        [worker(2, "dead", "its process died"), worker(3, "starting", NO_PLACE), worker(4, "starting", NO_PLACE)],
        [worker(2, "dead", "its process died"), worker(3, "ready"), worker(4, "ready")],
    )
    lines: list[str] = []
    assert await cli_scale.scale(client, {"decode": 2}, 60.0, lines.append, lines.append) == {"decode": 2}
    assert lines == [
        "decode: 1 starting",
        "decode-2: its process died",
        "decode: 2 starting",
        f"decode-3: {NO_PLACE}",
    ]


async def test_the_error_contains_the_reasons():
    client: Any = Client([worker(1, "dead", "long ago"), worker(2, "ready"), worker(3, "starting", NO_PLACE)])
    with pytest.raises(DeadlineError) as raised:
        await cli_scale.scale(client, {"decode": 2}, 0.0, lambda line: None, lambda line: None)
    assert raised.value.message == (
        f"The pools did not reach their targets within 0 s. Now: decode: 1 ready, 1 starting.\ndecode-3: {NO_PLACE}"
    )


def test_a_pool_of_no_workers_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"set autoscaler\.enabled to true and autoscaler\.decode\.min to 0"):
        cli_scale.parse_targets(["decode=0"])
