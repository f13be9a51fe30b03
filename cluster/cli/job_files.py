"""Files of prompts as the lines of a batch, and the lines of its results as answers."""

from __future__ import annotations

import heapq
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from baton.client.router_client import CHAT_PATH, COMPLETION_PATH, encode_body
from baton.core.errors import ConfigError, InvalidRequestError
from cluster.cli.cli_submit import choice_text, request_for

_LENGTH_LIMITS = ("max_tokens", "max_completion_tokens")
"""The API's two names of one limit; a request may use one of them."""
_OWN_ID = re.compile(r"(\d+):(.+)", re.DOTALL)
_TEXT_KEYS = ("index", "text", "message", "finish_reason")
_MAX_ID_CHARS = 480
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class PromptFile:
    """How the prompts of a file become requests.

    Attributes:
        model: the served model.
        options: sampling parameters in the API's names; those of a line override them.
        chat: whether prompts are chats.
    """

    model: str
    options: Mapping[str, Any]
    chat: bool

    @property
    def endpoint(self) -> str:
        return CHAT_PATH if self.chat else COMPLETION_PATH

    def write(self, source: Path, target: BinaryIO) -> None:
        """Writes the lines of a batch.

        A line of ``source`` has ``prompt`` or ``messages``, and may have ``id`` and sampling parameters.

        Raises:
            ConfigError: the file cannot be read, has no prompt, or has faulty lines; the first ones are named.
        """
        faults: list[str] = []
        places: dict[str, int] = {}  # the line of each id
        is_empty = True
        try:
            with source.open(encoding="utf-8-sig") as stream:
                for number, line in enumerate(stream, start=1):
                    if not line.strip():
                        continue
                    is_empty = False
                    try:
                        target.write(encode_body(self._line(number, line, places)) + b"\n")
                    except InvalidRequestError as error:
                        faults.append(f"Line {number}: {error.message}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read {source}: {error}.") from error
        if is_empty:
            raise ConfigError(
                f'{source} has no prompt. Write one JSON object into each line, such as {{"prompt": "Hello"}}.'
            )
        if faults:
            rest = len(faults) - _MAX_SHOWN
            more = [f"and {rest} more"] if rest > 0 else []
            raise ConfigError(
                "\n".join([f"{source} has faulty lines, and nothing was sent.", *faults[:_MAX_SHOWN], *more])
            )

    def _line(self, number: int, line: str, places: dict[str, int]) -> dict[str, Any]:
        values = _parsed(line)
        given_id = values.pop("id", None)
        own_id = json.dumps(number if given_id is None else given_id)
        if (place := places.setdefault(own_id, number)) != number:
            raise InvalidRequestError(f"line {place} has the id {own_id[:60]}, too. A line without one has its number.")
        if len(own_id) > _MAX_ID_CHARS:
            raise InvalidRequestError(f"id has more than {_MAX_ID_CHARS} characters.", param="id")
        if values.get("stream"):
            raise InvalidRequestError("stream is not supported in a file; leave it out.", param="stream")
        if {"custom_id", "body"} <= values.keys():
            raise InvalidRequestError(
                "this is a line for /v1/batches: send the file with the openai client (client.files.create, "
                "client.batches.create), or write what is in body into the line."
            )
        if ("prompt" in values) == ("messages" in values):
            raise InvalidRequestError("expected either prompt or messages.")
        if "messages" not in values:
            _, body = request_for(values.pop("prompt"), chat=self.chat)
        elif self.chat:
            body = {"messages": values.pop("messages")}
        else:
            raise InvalidRequestError("messages are a chat; leave out --completion.", param="messages")
        options = dict(self.options)
        if any(name in values for name in _LENGTH_LIMITS):
            options.pop("max_tokens", None)
        body = {"model": self.model, **body, **options, **values}
        return {"custom_id": f"{number}:{own_id}", "method": "POST", "url": self.endpoint, "body": body}


def answers(output: Iterable[bytes], errors: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The results of a batch. Those of :class:`PromptFile` are in the order of the prompts.

    An answer has ``id``, ``text``, ``finish_reason`` and ``usage``, and also ``choices`` if it has several or more than
    text; a failure has ``id`` and ``error``.

    Args:
        output, errors: the lines of the batch's two files, each in the order of the input.
    """
    for _, answer in heapq.merge(map(_numbered, output), map(_numbered, errors), key=lambda found: found[0]):
        yield answer


def to_json_line(answer: Mapping[str, Any]) -> str:
    text = json.dumps(answer, ensure_ascii=False)
    # A lone surrogate in an id cannot be encoded as UTF-8, but it can be escaped.
    return (text if text.isascii() or text.encode(errors="replace").decode() == text else json.dumps(answer)) + "\n"


def _parsed(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line.rstrip(), object_pairs_hook=_object_of)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"not JSON: {error.msg} (column {error.pos + 1}).") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise InvalidRequestError("not a JSON object.")
    return values


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise InvalidRequestError(f"the key {key[:60]!r} occurs twice in one JSON object.")
    return found


def _numbered(line: bytes) -> tuple[float, dict[str, Any]]:
    """The answer in a line, with the number of its prompt if that has one."""
    values = json.loads(line)
    number, own_id = _ids(values["custom_id"])
    response = values["response"]
    if response is not None and response["status_code"] == 200:
        return number, {"id": own_id, **_result(response["body"])}
    found = values["error"] or response["body"]["error"]
    return number, {"id": own_id, "error": {key: found.get(key) for key in ("message", "type", "code")}}


def _ids(custom_id: str) -> tuple[float, Any]:
    match = _OWN_ID.fullmatch(custom_id)
    if match is not None:
        try:
            return int(match[1]), json.loads(match[2])
        except (ValueError, RecursionError):
            pass
    return math.inf, custom_id


def _result(body: Mapping[str, Any]) -> dict[str, Any]:
    choices = body["choices"]
    usage = dict(body.get("usage") or {})
    result = {"text": choice_text(choices[0]), "finish_reason": choices[0].get("finish_reason"), "usage": usage}
    if len(choices) > 1 or not _is_text(choices[0]):
        result["choices"] = choices
    return result


def _is_text(choice: Mapping[str, Any]) -> bool:
    """Whether a choice has only a text and how it ended, and no calls, reasoning, log probabilities or the like."""
    message = choice.get("message") or {}
    return not any(
        value
        for holder, known in ((choice, _TEXT_KEYS), (message, ("role", "content")))
        for key, value in holder.items()
        if key not in known
    )
