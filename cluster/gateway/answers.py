"""What an API makes of the output of a request: an answer, or the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from baton.core.errors import BatonError
from cluster.gateway.openai.plan import GenerationPlan
from cluster.gateway.openai.prompt_logprobs import DescribedPrompt
from cluster.gateway.openai.responses import ChoiceOutput, Json, ResponseFormat, Usage, error_body
from cluster.gateway.output_processor import OutputDelta
from cluster.gateway.server_events import COMMENT, DONE_EVENT, encode_event


class Answer(Protocol):
    """The answer to one request, in the form of one API. It is either streamed or whole."""

    heartbeat: bytes
    """Sent while a stream has nothing to say."""

    def add_speculation(self, index: int, speculation: Json) -> None:
        """Adds the trace of choice ``index``, before the end of its output."""
        ...

    def add_prompt(self, index: int, prompt: DescribedPrompt) -> None:
        """Adds the log probabilities of a prompt to choice ``index``, before its first output. APIs whose requests
        cannot ask for them leave this as it is."""
        return

    def events(self, index: int, delta: OutputDelta, usage: Callable[[], Usage]) -> list[bytes]:
        """Events for new output of choice ``index``."""
        ...

    def last_events(self, usage: Usage) -> list[bytes]:
        """Events after all output."""
        ...

    def failure(self, error: BatonError) -> bytes:
        """The last events of a stream that fails."""
        ...

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        """The body of an answer that is not streamed."""
        ...


class ChunkedAnswer(Answer):
    """The answer of ``/v1/chat/completions`` and ``/v1/completions``: chunks of choices.

    Args:
        make_format: makes the form of the answer from its id.
        request_id: returns the id, which is final when there is output.
    """

    heartbeat = COMMENT

    def __init__(
        self, make_format: Callable[[str], ResponseFormat], request_id: Callable[[], str], plan: GenerationPlan
    ) -> None:
        self._make_format = make_format
        self._request_id = request_id
        self._plan = plan
        self._format: ResponseFormat | None = None
        self._seen: set[int] = set()
        self._speculation: dict[int, Json] = {}

    def add_speculation(self, index: int, speculation: Json) -> None:
        self._speculation[index] = speculation

    def add_prompt(self, index: int, prompt: DescribedPrompt) -> None:
        self._chosen_format().add_prompt(index, prompt)

    def events(self, index: int, delta: OutputDelta, usage: Callable[[], Usage]) -> list[bytes]:
        plan, is_first = self._plan, index not in self._seen
        if not (is_first or plan.continuous_usage or plan.return_token_ids or _has_news(delta)):
            return []
        self._seen.add(index)
        chunk = self._chosen_format().choice_chunk(index, delta, is_first=is_first)
        if plan.return_token_ids:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        if index in self._speculation:
            chunk["choices"][0]["speculation"] = self._speculation[index]
        if plan.continuous_usage:
            chunk["usage"] = usage().to_json()
        elif plan.include_usage:
            chunk["usage"] = None
        return [encode_event(chunk)]

    def last_events(self, usage: Usage) -> list[bytes]:
        if not self._plan.include_usage:
            return [DONE_EVENT]
        return [encode_event(self._chosen_format().usage_chunk(usage)), DONE_EVENT]

    def failure(self, error: BatonError) -> bytes:
        return encode_event(error_body(error))

    def whole(self, choices: Sequence[ChoiceOutput], usage: Usage) -> Json:
        body = self._chosen_format().whole(choices, usage)
        if self._plan.return_token_ids:
            for entry, choice in zip(body["choices"], choices, strict=True):
                entry["token_ids"] = choice.token_ids
        for index, speculation in self._speculation.items():
            body["choices"][index]["speculation"] = speculation
        return body

    def _chosen_format(self) -> ResponseFormat:
        if self._format is None:
            self._format = self._make_format(self._request_id())
        return self._format


def _has_news(delta: OutputDelta) -> bool:
    return bool(delta.text or delta.events or delta.entries or delta.finish_reason)
