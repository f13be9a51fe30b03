"""What a router answers to operators while it has no controller."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from baton.core.errors import ControllerLostError
from cluster.losses import controller_link
from cluster.losses.controller_link import ControllerLink


class Controller:
    """A handle of a controller."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __getattr__(self, name: str) -> Controller:
        return self

    async def remote(self, *arguments: Any) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer, arguments


async def test_a_lost_controller_is_an_error_until_there_is_another_one() -> None:
    link = ControllerLink(Controller(ActorDiedError()))
    with pytest.raises(ControllerLostError, match="`baton up` starts another one in seconds, unless it is stopped"):
        await link.pool_counts()
    link.follow(Controller("done"))
    assert await link.call("scale", {"decode": 2}) == ("done", ({"decode": 2},))


async def test_a_controller_that_hangs_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_link, "_ANSWER_S", 0.05)
    controller = Controller("late")
    monkeypatch.setattr(controller, "remote", lambda *_: asyncio.Event().wait(), raising=False)
    with pytest.raises(ControllerLostError, match=r"has not answered for 0\.05 s\. Requests are served"):
        await ControllerLink(controller).call("scale", {"decode": 2})
