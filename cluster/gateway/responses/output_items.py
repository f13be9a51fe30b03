"""The items of a response, built from the events of a parsed output, and the stream events that tell of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, assert_never

from cluster.gateway.formats.base import Arguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class _Part:
    """A message or reasoning, which has one part of text."""

    def __init__(self, item_id: str, kind: Literal["message", "reasoning"]) -> None:
        self.kind = kind
        self._id = item_id
        self._pieces: list[str] = []
        self._name = "output_text" if kind == "message" else "reasoning_text"

    def begin(self) -> list[Json]:
        return [self._event("response.content_part.added", part=self._part(""))]

    def add(self, text: str) -> Json:
        self._pieces.append(text)
        return self._event(f"response.{self._name}.delta", delta=text, **self._logprobs())

    def end(self) -> list[Json]:
        text = "".join(self._pieces)
        return [
            self._event(f"response.{self._name}.done", text=text, **self._logprobs()),
            self._event("response.content_part.done", part=self._part(text)),
        ]

    def to_json(self, status: Status) -> Json:
        content = [] if status == "in_progress" else [self._part("".join(self._pieces))]
        own: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self._id, "type": self.kind, "status": status, "content": content, **own}

    def _part(self, text: str) -> Json:
        own: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self._name, "text": text, **own}

    def _logprobs(self) -> Json:
        return {"logprobs": []} if self.kind == "message" else {}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self._id, "content_index": 0, **fields}


class _Call:
    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self._id = item_id
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []

    def begin(self) -> list[Json]:
        return []

    def add(self, text: str) -> Json:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", "item_id": self._id, "delta": text}

    def end(self) -> list[Json]:
        arguments = "".join(self._pieces)
        kind = "response.function_call_arguments.done"
        return [{"type": kind, "item_id": self._id, "name": self._name, "arguments": arguments}]

    def to_json(self, status: Status) -> Json:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._pieces),
        }


class OutputItems:
    """The items so far.

    Args:
        item_id: makes an item's id from its kind (``msg``, ``rs`` or ``fc``) and index.
        new_call_id: makes the id of a call.
    """

    def __init__(self, item_id: Callable[[str, int], str], new_call_id: Callable[[], str]) -> None:
        self._item_id = item_id
        self._new_call_id = new_call_id
        self._done: list[Json] = []
        self._open: _Part | _Call | None = None

    @property
    def done(self) -> list[Json]:
        """The items that have ended."""
        return list(self._done)

    def add(self, event: Event) -> list[Json]:
        """Adds to the output, and returns the stream events for that."""
        match event:
            case Text(text):
                return self._add_text("message", text)
            case Reasoning(text):
                return self._add_text("reasoning", text)
            case CallStart(name):
                events = self.end("completed")
                item_id = self._item_id("fc", len(self._done))
                return [*events, *self._begin(_Call(item_id, self._new_call_id(), name))]
            case Arguments(text):
                return [self._numbered(self._open.add(text))] if self._open else []
            case CallEnd():
                return self.end("completed")
            case CallBroken():
                return self.end("incomplete")
            case _:
                assert_never(event)

    def end(self, status: Status) -> list[Json]:
        """Ends the item that is being written, if there is one."""
        if self._open is None:
            return []
        events = [self._numbered(event) for event in self._open.end()]
        item = self._open.to_json(status)
        events.append(self._numbered({"type": "response.output_item.done", "item": item}))
        self._done.append(item)
        self._open = None
        return events

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> list[Json]:
        events: list[Json] = []
        part = self._open
        if not isinstance(part, _Part) or part.kind != kind:
            events += self.end("completed")
            part = _Part(self._item_id("msg" if kind == "message" else "rs", len(self._done)), kind)
            events += self._begin(part)
        return [*events, self._numbered(part.add(text))]

    def _begin(self, item: _Part | _Call) -> list[Json]:
        self._open = item
        added = {"type": "response.output_item.added", "item": item.to_json("in_progress")}
        return [self._numbered(event) for event in (added, *item.begin())]

    def _numbered(self, event: Json) -> Json:
        return {**event, "output_index": len(self._done)}
