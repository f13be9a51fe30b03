"""A chat message built from the events of a parsed output, whole and as stream deltas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, assert_never

from cluster.gateway.formats.base import Arguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": "".join(self.pieces)},
        }


class ChatMessage:
    """The message of one choice.

    A call that breaks after it began is content of the whole message. A stream may have sent its beginning, and the
    arguments end there.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._num_begun = 0

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, without those that broke."""
        return bool(self._calls)

    def add(self, events: Iterable[Event]) -> Json:
        """Adds events, and returns what they add to the message as a delta."""
        delta: Json = {}
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case Text(text):
                    self._content.append(text)
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    self._reasoning.append(text)
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallStart(name):
                    call = _Call(self._new_call_id(), name)
                    self._calls.append(call)
                    calls[self._num_begun] = {"index": self._num_begun, **call.to_json()}
                    self._num_begun += 1
                case Arguments(text):
                    self._calls[-1].pieces.append(text)
                    index = self._num_begun - 1
                    piece = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    piece["function"]["arguments"] += text
                case CallBroken(source):
                    self._calls.pop()
                    self._content.append(source)
                case CallEnd():
                    pass
                case _:
                    assert_never(event)
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def to_json(self) -> Json:
        """The whole message."""
        content = "".join(self._content)
        body: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            body["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            body["content"] = content or None
            body["tool_calls"] = [call.to_json() for call in self._calls]
        return body
