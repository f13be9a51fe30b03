"""Response bodies of both endpoints, whole and as stream chunks, and OpenAI's error shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.core.errors import BatonError, OverloadedError
from baton.core.request import FinishReason
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.formats.base import Event, Text
from cluster.gateway.openai.chat_message import ChatMessage
from cluster.gateway.openai.prompt_logprobs import CompletionLogprobs, DescribedPrompt, finite
from cluster.gateway.output_processor import OutputDelta, TokenEntry
from cluster.requests.generation import ModelCard

Json = dict[str, Any]


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request so far.

    Attributes:
        prompt_tokens: each prompt counts once, regardless of its choices.
        cached_tokens: prompt tokens that came from the prefix cache.
        drafted_tokens: tokens proposed by speculation; ``accepted_tokens`` of them were accepted.
        reasoning_tokens: those of the completion that are reasoning.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    reasoning_tokens: int = 0

    def to_json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.drafted_tokens - self.accepted_tokens,
            },
        }


@dataclass(slots=True)
class ChoiceOutput:
    """The whole output of one sequence, for a response that is not streamed."""

    index: int
    texts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.events.extend(delta.events)
        self.entries.extend(delta.entries)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_string = delta.stop_string or self.stop_string

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_entries(self) -> int:
        """The choice itself and its log probabilities, which is what an answer costs time for."""
        return 1 + sum(1 + len(entry.logprobs.top) for entry in self.entries)


class ResponseFormat(Protocol):
    """The format of one endpoint's responses."""

    def add_prompt(self, index: int, prompt: DescribedPrompt) -> None:
        """Describes the prompt of choice ``index``, before its first output."""
        ...

    def choice_chunk(self, index: int, delta: OutputDelta, *, is_first: bool) -> Json:
        """A stream event with new output of choice ``index``."""
        ...

    def usage_chunk(self, usage: Usage) -> Json:
        """The last stream event, which has usage and no choices."""
        ...

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        """The body of a response that is not streamed."""
        ...


class _Format:
    object_whole: str
    object_chunk: str

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        service_tier: str | None = None,
    ) -> None:
        self._request_id = request_id
        self._model = model
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._prompts: dict[int, DescribedPrompt] = {}
        self._extra = {} if service_tier is None else {"service_tier": service_tier}
        self._created_unix_s = int(time.time())

    def add_prompt(self, index: int, prompt: DescribedPrompt) -> None:
        self._prompts[index] = prompt

    def _listed(self, index: int) -> Json:
        """The field with the log probabilities of a choice's prompt, if they are wanted."""
        prompt = self._prompts.get(index)
        return {} if prompt is None or prompt.listed is None else {"prompt_logprobs": prompt.listed}

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope(self.object_chunk, []) | {"usage": usage.to_json()}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self._request_id,
            "object": kind,
            "created": self._created_unix_s,
            "model": self._model,
            "choices": choices,
            **self._extra,
        }


class CompletionFormat(_Format):
    """``/v1/completions``. ``echo_texts`` holds one text per choice, shown before its output."""

    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        echo_texts: Sequence[str],
    ) -> None:
        super().__init__(request_id, model, tokenizer, with_logprobs=with_logprobs)
        self._echo_texts = echo_texts

    def choice_chunk(self, index: int, delta: OutputDelta, *, is_first: bool) -> Json:
        choice = self._choice(index, delta.text, delta.entries, delta.finish_reason, is_first=is_first)
        return self._envelope(self.object_chunk, [choice])

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        body = [self._choice(c.index, c.text, c.entries, c.finish_reason, is_first=True) for c in choices]
        return self._envelope(self.object_whole, body) | {"usage": usage.to_json()}

    def _choice(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenEntry],
        finish_reason: FinishReason | None,
        *,
        is_first: bool,
    ) -> Json:
        return {
            "index": index,
            "text": self._echo_texts[index] + text if is_first else text,
            "logprobs": self._logprobs(index, entries, is_first=is_first) if self._with_logprobs else None,
            "finish_reason": finish_reason,
            **(self._listed(index) if is_first else {}),
        }

    def _logprobs(self, index: int, entries: Sequence[TokenEntry], *, is_first: bool) -> Json:
        own, start = CompletionLogprobs(self._tokenizer), len(self._echo_texts[index])
        for entry in entries:
            own.add(entry.token_id, entry.logprobs.logprob, entry.logprobs.top, start + entry.text_offset)
        prompt = self._prompts.get(index)
        return own.to_json(prompt.echoed if prompt is not None and is_first else None)


class ChatFormat(_Format):
    """``/v1/chat/completions``.

    Args:
        service_tier: the tier that serves the request, or ``None``.
        new_call_id: makes the id of a tool call.
    """

    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(
        self,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        service_tier: str | None = None,
        new_call_id: Callable[[], str],
    ) -> None:
        super().__init__(request_id, model, tokenizer, with_logprobs=with_logprobs, service_tier=service_tier)
        self._new_call_id = new_call_id
        self._messages: dict[int, ChatMessage] = {}

    def choice_chunk(self, index: int, delta: OutputDelta, *, is_first: bool) -> Json:
        message = self._messages.setdefault(index, ChatMessage(self._new_call_id))
        added = message.add(delta.events or (Text(delta.text),) if delta.text or delta.events else ())
        if is_first:
            added = {"role": "assistant", "content": "", **added}
        return self._envelope(
            self.object_chunk,
            [
                {
                    "index": index,
                    "delta": added,
                    "logprobs": self._logprobs(delta.entries) if self._with_logprobs else None,
                    "finish_reason": _chat_reason(delta.finish_reason, message.has_calls),
                }
            ],
        ) | (self._listed(index) if is_first else {})

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        envelope = self._envelope(self.object_whole, list(map(self._choice, choices)))
        return envelope | {"usage": usage.to_json(), **self._listed(0)}  # all choices have the same prompt

    def _choice(self, choice: ChoiceOutput) -> Json:
        message = ChatMessage(self._new_call_id)
        message.add(choice.events or (Text(choice.text),))
        return {
            "index": choice.index,
            "message": message.to_json(),
            "logprobs": self._logprobs(choice.entries) if self._with_logprobs else None,
            "finish_reason": _chat_reason(choice.finish_reason, message.has_calls),
        }

    def _logprobs(self, entries: Sequence[TokenEntry]) -> Json:
        return {
            "content": [
                self._token(entry.token_id, entry.logprobs.logprob)
                | {"top_logprobs": [self._token(*top) for top in entry.logprobs.top]}
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _chat_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason is FinishReason.STOP else reason


def model_body(name: str, card: ModelCard) -> Json:
    """One entry of ``/v1/models``; ``root``, the main name, and ``max_model_len`` are extensions that clients read."""
    return {
        "id": name,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "baton",
        "root": card.name,
        "max_model_len": card.max_model_len,
    }


def error_body(error: BatonError) -> Json:
    """OpenAI's error shape. Overload errors add ``reason`` and ``predicted_wait_ms``."""
    body: Json = {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code}
    if isinstance(error, OverloadedError):
        if error.reason:
            body["reason"] = error.reason
        if error.predicted_wait_s is not None:
            body["predicted_wait_ms"] = round(error.predicted_wait_s * 1e3)
    return {"error": body}
