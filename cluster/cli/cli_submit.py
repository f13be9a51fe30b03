"""``baton submit``: answers one prompt on the screen, or a file of prompts in a file of answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from baton.client.router_client import CHAT_PATH, COMPLETION_PATH, RouterClient
from baton.core.errors import BatonError, ConfigError, InvalidRequestError, OverloadedError

DEFAULT_CONCURRENCY = 8
_MAX_ATTEMPTS_WHEN_OVERLOADED = 60
_LENGTH_LIMITS = ("max_tokens", "max_completion_tokens")
"""The API's two names of one limit; a request may use one of them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        usage: token counts as the router reports them.
    """

    text: str
    finish_reason: str | None
    usage: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchResult:
    num_answered: int
    num_failed: int


def request_for(prompt: object, *, chat: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for one prompt.

    Raises:
        InvalidRequestError: ``chat`` is set and the prompt is not text.
    """
    if not chat:
        return COMPLETION_PATH, {"prompt": prompt}
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


async def submit_file(
    client: RouterClient,
    source: Path,
    target: Path,
    options: Mapping[str, Any],
    *,
    chat: bool,
    concurrency: int,
    on_progress: Callable[[int, int], None],
) -> BatchResult:
    """Answers every line of a JSONL file and writes the answers, in order, into another file.

    A line has ``prompt`` or ``messages``, and may have ``id`` and sampling parameters, which override ``options``. An
    answer has the line's ``id``, ``text``, ``finish_reason`` and ``usage``; a failure has ``id`` and ``error``.

    Args:
        on_progress: called with the number of finished lines and of all lines.

    Raises:
        ConfigError: a file cannot be read or written.
        BatonError: the router cannot be reached.
    """
    lines = _read_lines(source, target)
    model = await client.model()
    try:
        with target.open("w", encoding="utf-8") as output:
            batch = _Batch(client, model, options, chat, output, len(lines), on_progress)
            return await batch.run(lines, concurrency)
    except OSError as error:
        raise ConfigError(f"Cannot write {target}: {error}.") from error


def check_source(source: Path) -> None:
    """Raises :class:`ConfigError` for an unreadable file, without opening it: a pipe can be opened only once."""
    if not source.exists():
        raise ConfigError(f"Cannot read {source}: there is no such file.")
    if source.is_dir():
        raise ConfigError(f"Cannot read {source}: it is a folder, not a file.")
    if not os.access(source, os.R_OK):
        raise ConfigError(f"Cannot read {source}: permission denied.")


class _Batch:
    """The progress of one file: the finished lines, and how many of them are written."""

    def __init__(
        self,
        client: RouterClient,
        model: str,
        options: Mapping[str, Any],
        chat: bool,
        output: TextIO,
        num_lines: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._chat = chat
        self._output = output
        self._num_lines = num_lines
        self._on_progress = on_progress
        self._done: dict[int, dict[str, Any]] = {}
        self._num_done = 0
        self._num_written = 0
        self._num_failed = 0

    async def run(self, lines: Sequence[tuple[int, str]], concurrency: int) -> BatchResult:
        waiting = iter(enumerate(lines))

        async def work() -> None:
            for index, (number, line) in waiting:
                self._finish(index, await self._result(number, line))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(concurrency, len(lines))):
                    tasks.create_task(work())
        except ExceptionGroup as failures:
            # One error is enough: a cause such as a full disk affects all tasks.
            raise failures.exceptions[0] from failures
        return BatchResult(self._num_written - self._num_failed, self._num_failed)

    def _finish(self, index: int, result: dict[str, Any]) -> None:
        """Stores a result, and writes all results whose predecessors are written."""
        self._done[index] = result
        self._num_done += 1
        self._num_failed += "error" in result
        while self._num_written in self._done:
            self._output.write(_to_json(self._done.pop(self._num_written)) + "\n")
            self._num_written += 1
        self._output.flush()
        self._on_progress(self._num_done, self._num_lines)

    async def _result(self, number: int, line: str) -> dict[str, Any]:
        identity: dict[str, Any] = {"id": number}
        try:
            values = _parse_line(number, line)
            identity["id"] = values.pop("id", number)
            path, body = self._request(number, values)
            return identity | _result_of(await self._generate(path, body))
        except BatonError as error:
            return identity | {"error": {"message": error.message, "type": error.error_type, "code": error.code}}

    def _request(self, number: int, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if values.get("stream"):
            raise InvalidRequestError(
                f"Line {number}: stream is not supported in a file; leave it out.", param="stream"
            )
        if ("prompt" in values) == ("messages" in values):
            raise InvalidRequestError(f"Line {number}: expected either prompt or messages.")
        if "messages" in values:
            path, body = CHAT_PATH, {"messages": values.pop("messages")}
        else:
            path, body = request_for(values.pop("prompt"), chat=self._chat)
        options = dict(self._options)
        if any(name in values for name in _LENGTH_LIMITS):
            options.pop("max_tokens", None)
        return path, {"model": self._model, **body, **options, **values}

    async def _generate(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request. While the router is overloaded, waits as long as it says and tries again."""
        for _ in range(_MAX_ATTEMPTS_WHEN_OVERLOADED - 1):
            try:
                return await self._client.generate(path, body)
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after_s)
        return await self._client.generate(path, body)


def _to_json(result: Mapping[str, Any]) -> str:
    text = json.dumps(result, ensure_ascii=False)
    # A lone surrogate in an id cannot be encoded as UTF-8, but it can be escaped.
    return text if text.isascii() or text.encode(errors="replace").decode() == text else json.dumps(result)


def _result_of(response: Mapping[str, Any]) -> dict[str, Any]:
    answer = _answer(response)
    result = {"text": answer.text, "finish_reason": answer.finish_reason, "usage": dict(answer.usage)}
    choices = response["choices"]
    if len(choices) > 1 or choices[0].get("logprobs"):
        result["choices"] = choices
    return result


def _read_lines(source: Path, target: Path) -> list[tuple[int, str]]:
    """The non-blank lines with their numbers, from 1. Refuses a source that is also the target."""
    try:
        if target.exists() and target.samefile(source):
            raise ConfigError(f"{target} is the input file; choose another output file.")
        with source.open(encoding="utf-8") as stream:
            return [(number, line) for number, line in enumerate(stream, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read {source}: {error}.") from error


def _parse_line(number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"Line {number} is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise InvalidRequestError(f"Line {number} is not a JSON object.")
    return values
