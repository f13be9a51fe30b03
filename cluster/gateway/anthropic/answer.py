"""The answer of ``/v1/messages``: a message, or the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.core.errors import BatonError
from baton.core.request import FinishReason
from cluster.gateway.answers import Answer
from cluster.gateway.anthropic.content_blocks import ContentBlocks
from cluster.gateway.anthropic.errors import anthropic_error
from cluster.gateway.anthropic.schemas import MessagesRequest
from cluster.gateway.chat_api import AnswerSetting
from cluster.gateway.openai.responses import ChoiceOutput, Json, Usage
from cluster.gateway.output_events import events_of, settled
from cluster.gateway.output_processor import OutputDelta
from cluster.gateway.server_events import encode_typed_event


class MessagesAnswer(Answer):
    """There is one choice."""

    heartbeat = encode_typed_event({"type": "ping"})

    def __init__(self, request: MessagesRequest, setting: AnswerSetting) -> None:
        self._request = request
        self._setting = setting
        self._content = ContentBlocks(setting.new_call_id)
        self._has_begun = False
        self._end: OutputDelta | ChoiceOutput | None = None
        self._extra: Json = {}

    def add_speculation(self, index: int, speculation: Json) -> None:
        self._extra = {"speculation": speculation}

    def events(self, index: int, delta: OutputDelta, usage: Callable[[], Usage]) -> list[bytes]:
        found: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            found.append({"type": "message_start", "message": self._message(usage())})
        for event in events_of(delta):
            found += self._content.add(event)
        self._end = delta
        return list(map(encode_typed_event, found))

    def last_events(self, usage: Usage) -> list[bytes]:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": _usage(usage), **self._extra}
        return list(map(encode_typed_event, [*self._content.end(), delta, {"type": "message_stop"}]))

    def failure(self, error: BatonError) -> bytes:
        return encode_typed_event(anthropic_error(error, self._setting.request_id()))

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        (choice,) = choices
        for event in settled(events_of(choice)):
            self._content.add(event)
        self._end = choice
        return {**self._message(usage), "content": self._content.to_json(), **self._stop(), **self._extra}

    def _message(self, usage: Usage) -> Json:
        """The message before its content."""
        return {
            "id": self._setting.request_id(),
            "type": "message",
            "role": "assistant",
            "model": self._setting.plan.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _stop(self) -> Json:
        reason = self._stop_reason()
        stop_string = self._end.stop_string if self._end is not None and reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop_string}

    def _stop_reason(self) -> str:
        if self._end is not None and self._end.finish_reason is FinishReason.LENGTH:
            is_clipped = self._setting.plan.prompts[0].params.max_tokens < self._request.max_tokens
            return "model_context_window_exceeded" if is_clipped else "max_tokens"
        if self._content.has_uses:
            return "tool_use"
        return "stop_sequence" if self._end is not None and self._end.stop_string else "end_turn"


def _usage(usage: Usage) -> Json:
    """Cached tokens do not count as input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }
