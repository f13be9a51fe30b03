"""The answer of ``/v1/responses``: a response object, or the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from baton.core.errors import BatonError
from baton.core.request import FinishReason
from cluster.gateway.answers import Answer
from cluster.gateway.chat_api import AnswerSetting
from cluster.gateway.openai.json_body import without_nulls
from cluster.gateway.openai.responses import ChoiceOutput, Json, Usage
from cluster.gateway.output_events import events_of, settled
from cluster.gateway.output_processor import OutputDelta
from cluster.gateway.responses.output_items import OutputItems, Status
from cluster.gateway.responses.schemas import ResponsesRequest
from cluster.gateway.server_events import COMMENT, encode_typed_event

_TEXT_FORMAT = {"type": "text"}
_RATE_LIMITED = 429


class ResponsesAnswer(Answer):
    """There is one choice."""

    heartbeat = COMMENT

    def __init__(self, request: ResponsesRequest, setting: AnswerSetting) -> None:
        self._request = request
        self._setting = setting
        self._created_unix_s = int(time.time())
        self._items = OutputItems(self._item_id, setting.new_call_id)
        self._finish_reason: FinishReason | None = None
        self._num_events = 0
        self._extra: Json = {}

    def add_speculation(self, index: int, speculation: Json) -> None:
        self._extra = {"speculation": speculation}

    def events(self, index: int, delta: OutputDelta, usage: Callable[[], Usage]) -> list[bytes]:
        self._finish_reason = delta.finish_reason
        found = self._first_events()
        for event in events_of(delta):
            found += self._items.add(event)
        return self._encoded(found)

    def last_events(self, usage: Usage) -> list[bytes]:
        status = self._last_status()
        events = self._items.end(status)
        return self._encoded([*events, self._of_response(f"response.{status}", status, usage)])

    def failure(self, error: BatonError) -> bytes:
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        events = [*self._first_events(), *self._items.end("incomplete"), told]
        return b"".join(self._encoded([*events, self._of_response("response.failed", "failed", error=error)]))

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        (choice,) = choices
        for event in settled(events_of(choice)):
            self._items.add(event)
        self._finish_reason = choice.finish_reason
        status = self._last_status()
        self._items.end(status)
        return self._response(status, usage)

    def _last_status(self) -> Status:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _first_events(self) -> list[Json]:
        if self._num_events:
            return []
        return [self._of_response(f"response.{name}", "in_progress") for name in ("created", "in_progress")]

    def _encoded(self, events: Iterable[Json]) -> list[bytes]:
        encoded = []
        for event in events:
            encoded.append(encode_typed_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return encoded

    def _of_response(self, kind: str, status: str, usage: Usage | None = None, error: BatonError | None = None) -> Json:
        return {"type": kind, "response": self._response(status, usage, error)}

    def _response(self, status: str, usage: Usage | None, error: BatonError | None = None) -> Json:
        request, setting = self._request, self._setting
        effort = (request.reasoning or {}).get("effort")
        text = without_nulls(request.text or {})
        return {
            "id": setting.request_id(),
            "object": "response",
            "created_at": self._created_unix_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None if error is None else {"code": _error_code(error), "message": error.message},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": setting.plan.model,
            "output": self._items.done,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "background": False,
            "service_tier": setting.service_tier,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": _TEXT_FORMAT, **text},
            "tool_choice": request.tool_choice or "auto",
            "tools": [{"strict": False, "parameters": None, **tool} for tool in request.tools or ()],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            **self._extra,
        }

    def _item_id(self, kind: str, index: int) -> str:
        return f"{kind}_{self._setting.request_id().removeprefix('resp_')}_{index}"


def _error_code(error: BatonError) -> str:
    """One of the codes that a response may have; the event before it has baton's own."""
    return "rate_limit_exceeded" if error.http_status == _RATE_LIMITED else "server_error"


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
