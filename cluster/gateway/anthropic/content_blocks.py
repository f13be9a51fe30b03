"""The content of a message, built from the events of a parsed output, and the stream events that tell of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, assert_never

import orjson

from cluster.gateway.formats.base import Arguments, CallBroken, CallEnd, CallStart, Event, Reasoning, Text, read_json

Json = dict[str, Any]


@dataclass(slots=True)
class _Block:
    """A block that is being written.

    Attributes:
        start: the block without its text or input.
        delta: type of its deltas, and the key of the text in them.
    """

    start: Json
    delta: tuple[str, str]
    pieces: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        text = "".join(self.pieces)
        if self.start["type"] == "tool_use":
            return {**self.start, "input": _object_of(text)}
        return {**self.start, self.start["type"]: text}


class ContentBlocks:
    """The blocks so far.

    Args:
        new_call_id: makes the id of a tool use.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self._new_call_id = new_call_id
        self._blocks: list[_Block] = []
        self._is_open = False
        self._num_uses = 0

    @property
    def has_uses(self) -> bool:
        """Whether there are tool uses that are complete."""
        return self._num_uses > 0

    def to_json(self) -> list[Json]:
        return [block.to_json() for block in self._blocks]

    def add(self, event: Event) -> list[Json]:
        """Adds to the content, and returns the stream events for that."""
        match event:
            case Text(text):
                return self._add_text({"type": "text", "text": ""}, ("text_delta", "text"), text)
            case Reasoning(text):
                start = {"type": "thinking", "thinking": "", "signature": ""}
                return self._add_text(start, ("thinking_delta", "thinking"), text)
            case CallStart(name):
                use: Json = {"type": "tool_use", "id": self._new_call_id(), "name": name, "input": {}}
                return self._begin(_Block(use, ("input_json_delta", "partial_json")))
            case Arguments(text):
                return [self._delta(text)]
            case CallEnd():
                self._num_uses += 1
                return self.end()
            case CallBroken():
                return self.end()
            case _:
                assert_never(event)

    def end(self) -> list[Json]:
        """Ends the block that is being written, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _add_text(self, start: Json, delta: tuple[str, str], text: str) -> list[Json]:
        if self._is_open and self._blocks[-1].start["type"] == start["type"]:
            return [self._delta(text)]
        return [*self._begin(_Block(start, delta)), self._delta(text)]

    def _begin(self, block: _Block) -> list[Json]:
        events = self.end()
        self._blocks.append(block)
        self._is_open = True
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.start}
        return [*events, start]

    def _delta(self, text: str) -> Json:
        block = self._blocks[-1]
        block.pieces.append(text)
        kind, key = block.delta
        index = len(self._blocks) - 1
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: text}}


def _object_of(text: str) -> Any:
    """The arguments of a call as JSON, as the model has written them: its numbers may have any size."""
    try:
        is_object = isinstance(read_json(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    return orjson.Fragment(text or "{}") if is_object else {"invalid_json": text}
