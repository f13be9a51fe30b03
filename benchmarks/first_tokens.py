"""Times of the first two tokens of a request: the second one comes after the hand-off."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from baton.engine.models.default_model import DEFAULT_MODEL_NAME

_VOCABULARY = range(1000, 40_000)
_NUM_TOKENS = 2


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Seconds from sending a request to its first and to its second token, and its id."""

    first_s: float
    second_s: float
    request_id: str


def new_prompt(chance: random.Random, num_tokens: int) -> list[int]:
    """A prompt that no cache holds."""
    return chance.choices(_VOCABULARY, k=num_tokens)


def first_tokens(http: httpx.Client, endpoint: str, prompt: Sequence[int], key: str | None = None) -> FirstTokens:
    """Sends a prompt for two tokens. Raises :class:`httpx.HTTPError`.

    Args:
        key: the API key; ``None`` sends none.
    """
    body = {
        "model": DEFAULT_MODEL_NAME,
        "prompt": prompt,
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    times: list[float] = []
    request_id, began_s = "", time.perf_counter()
    with http.stream("POST", f"{endpoint}/v1/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter() - began_s)
                request_id = request_id or json.loads(line.removeprefix("data: "))["id"]
    return FirstTokens(times[0], times[_NUM_TOKENS - 1], request_id)
