"""One answer for many readers."""

from __future__ import annotations

import asyncio

import pytest

from cluster.gateway.page.kept_answer import KeptAnswer


class Question:
    def __init__(self) -> None:
        self.num_asked = 0
        self.error: Exception | None = None

    async def __call__(self) -> dict[str, int]:
        await asyncio.sleep(0)
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        return {"number": self.num_asked}


async def test_an_answer_is_shared_until_it_is_too_old() -> None:
    now = [0.0]
    question = Question()
    kept = KeptAnswer(question, lambda: now[0])
    assert await asyncio.gather(*(kept.get(30) for _ in range(10))) == [{"number": 1}] * 10
    now[0] = 30.0
    assert await kept.get(30) == {"number": 1}
    now[0] = 31.0
    assert await kept.get(30) == {"number": 2}
    assert await kept.get(0) == {"number": 3}


async def test_an_error_is_not_kept() -> None:
    question = Question()
    kept = KeptAnswer(question)
    question.error = ValueError("not now")
    with pytest.raises(ValueError, match="not now"):
        await kept.get(30)
    question.error = None
    assert await kept.get(30) == {"number": 2}
