"""``baton submit`` with one prompt: shows its answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.client.router_client import CHAT_PATH, COMPLETION_PATH, RouterClient
from baton.core.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        usage: token counts as the router reports them.
    """

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any]


def request_for(prompt: object, *, chat: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for one prompt.

    Raises:
        InvalidRequestError: the prompt is none, or ``chat`` is set and it is not text.
    """
    if not isinstance(prompt, str | list):
        raise InvalidRequestError(f"prompt must be a string, got {json.dumps(prompt)[:60]}.", param="prompt")
    if not chat:
        return COMPLETION_PATH, {"prompt": prompt}
    if isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt):
        raise InvalidRequestError("prompt must be a string, got an array. Write each into a line.", param="prompt")
    if not isinstance(prompt, str):
        raise InvalidRequestError("A prompt of token ids has no chat form; add --completion.", param="prompt")
    return CHAT_PATH, {"messages": [{"role": "user", "content": prompt}]}


async def submit_one(
    client: RouterClient,
    prompt: str,
    options: Mapping[str, Any],
    *,
    chat: bool,
    stream: bool,
    show: Callable[[str], None],
) -> Answer:
    """Sends one prompt and passes the answer's text to ``show``: in pieces when streamed, else as a whole.

    Args:
        options: sampling parameters in the API's names.
    """
    path, body = request_for(prompt, chat=chat)
    body = {"model": await client.model(), **body, **options}
    if not stream:
        answer = _answer(await client.generate(path, body))
        show(answer.text)
        return answer
    pieces: list[str] = []
    finish_reason: str | None = None
    usage: Mapping[str, Any] = {}
    async for chunk in client.stream(path, {**body, "stream_options": {"include_usage": True}}):
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", []):
            piece = choice_text(choice)
            finish_reason = choice.get("finish_reason") or finish_reason
            if piece:
                pieces.append(piece)
                show(piece)
    return Answer("".join(pieces), finish_reason, usage)


def choice_text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a chat, a completion, or a chunk of either."""
    holder = choice.get("delta") or choice.get("message") or {}
    return str(holder.get("content") or choice.get("text") or "")


def _answer(response: Mapping[str, Any]) -> Answer:
    choice = response["choices"][0]
    return Answer(choice_text(choice), choice.get("finish_reason"), response.get("usage") or {})


def check_source(source: Path) -> None:
    """Raises :class:`ConfigError` for an unreadable file, without opening it: a pipe can be opened only once."""
    if not source.exists():
        raise ConfigError(f"Cannot read {source}: there is no such file.")
    if source.is_dir():
        raise ConfigError(f"Cannot read {source}: it is a folder, not a file.")
    if not os.access(source, os.R_OK):
        raise ConfigError(f"Cannot read {source}: permission denied.")
