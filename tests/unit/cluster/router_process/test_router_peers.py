"""Routers ask each other, and do without those that do not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.router_process import router_peers
from cluster.router_process.router_peers import Question, RouterPeers


class Handle:
    """Stands for the handle of a router's actor."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.answer = self
        self.asked: list[tuple[Any, ...]] = []

    async def remote(self, *arguments: Any) -> object:
        self.asked.append(arguments)
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.Event().wait()
        return self._answer


async def test_answers_come_from_the_others_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_peers, "_ANSWER_S", 0.01)
    peers = RouterPeers(1)
    assert await peers.ask(Question.COUNTS) == {}
    handles = {index: Handle(answer) for index, answer in enumerate(["zero", "own", ActorDiedError(), None, "four"])}
    peers.meet(handles)
    assert await peers.ask(Question.TIMELINE, "id", None) == {0: "zero", 4: "four"}
    assert handles[0].asked == [(Question.TIMELINE, "id", None)]
    assert handles[1].asked == []
    assert peers.indices == [0, 2, 3, 4]
    peers.meet({1: handles[1], 4: handles[4]})
    assert await peers.ask(Question.COUNTS) == {4: "four"}


async def test_the_first_router_leads_the_others() -> None:
    routers = {0: Handle("zero"), 1: Handle("one"), 2: Handle("two")}
    follower, leader = RouterPeers(1), RouterPeers(0)
    for peers in (follower, leader):
        peers.meet(routers)
    assert await follower.ask_leader(Question.PLAN) == "zero"
    assert (routers[0].asked, routers[2].asked) == ([(Question.PLAN,)], [])
    assert await leader.ask_leader(Question.PLAN) is None
    follower.meet({0: Handle(ActorDiedError())})
    assert await follower.ask_leader(Question.PLAN) is None
