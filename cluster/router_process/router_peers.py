"""The other routers of a cluster, which are asked for what only they know."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from ray.exceptions import RayError

logger = logging.getLogger(__name__)

_ANSWER_S = 2.0
LEADER = 0
"""Index of the router that plans the sizes of the pools and saves fits, with what all routers know."""


class Question(StrEnum):
    """What routers ask each other."""

    TIMELINE = "timeline"
    REQUESTS = "requests"
    COUNTS = "counts"
    METRICS = "metrics"
    TRAFFIC = "traffic"
    PLAN = "plan"
    ADVISE = "advise"
    RECORDED = "recorded"


class RouterPeers:
    """The handles of the other routers.

    Args:
        index: of this router.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._routers: dict[int, Any] = {}

    def meet(self, routers: Mapping[int, Any]) -> None:
        """Knows exactly these routers from now on, by index; its own handle is ignored."""
        self._routers = {index: handle for index, handle in routers.items() if index != self._index}

    @property
    def indices(self) -> Sequence[int]:
        """Those of the other routers."""
        return list(self._routers)

    async def ask(self, question: Question, *arguments: Any) -> dict[int, Any]:
        """The answers by index, of the routers that answer within 2 s."""
        found = dict(self._routers)
        answers = await asyncio.gather(
            *(self._ask(handle, question, arguments) for handle in found.values()), return_exceptions=True
        )
        return {
            index: answer for index, answer in zip(found, answers, strict=True) if not isinstance(answer, BaseException)
        }

    async def ask_leader(self, question: Question) -> Any | None:
        """The leader's answer; ``None`` if this router leads, or if the leader does not answer within 2 s."""
        leader = self._routers.get(LEADER)
        if leader is None:
            return None
        try:
            return await self._ask(leader, question, ())
        except (RayError, TimeoutError):
            return None

    async def _ask(self, handle: Any, question: Question, arguments: tuple[Any, ...]) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await handle.answer.remote(question, *arguments)
        except (RayError, TimeoutError) as error:
            logger.info("another router did not answer: %s", error)
            raise
