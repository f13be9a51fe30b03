"""Plays an output to the answer of an API, cut in any way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from baton.core.request import FinishReason, SamplingParams
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.answers import Answer
from cluster.gateway.chat_api import AnswerSetting
from cluster.gateway.http_edge import JsonResponse
from cluster.gateway.openai.plan import GenerationPlan, PromptPlan
from cluster.gateway.openai.responses import ChoiceOutput, Usage
from cluster.gateway.output_processor import OutputDelta, StopConditions
from tests.unit.cluster.gateway.formats.samples import Sample, parser_of

USAGE = Usage(prompt_tokens=20, completion_tokens=7, cached_tokens=16, reasoning_tokens=3)
OUTPUT = '<think>Hm.</think>Ok.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
BROKEN = 'a <tool_call>{"name": "now", "arguments": {"x": y}}'
CUT_OFF = '<tool_call>{"name": "now", "arguments": {"city": "Os'
TEXTS = {
    "text": "Ok.",
    "reasoning": "<think>Hm.</think>",
    "calls": OUTPUT.partition("Ok.")[2] * 2,
    "all": OUTPUT,
    "broken call": BROKEN,
    "call that is cut off": CUT_OFF,
    "nothing": "",
}


def setting(request_id: str, max_tokens: int = 9) -> AnswerSetting:
    prompt = PromptPlan((1,), SamplingParams(max_tokens=max_tokens, seed=1))
    plan = GenerationPlan("m", (prompt,), 1, StopConditions(), True, True, False, False)
    numbers = itertools.count()
    return AnswerSetting(lambda: request_id, plan, cast(Tokenizer, None), None, lambda: f"call_{next(numbers)}")


def deltas(pieces: Iterable[str], finish: FinishReason, stop_string: str = "") -> Iterator[OutputDelta]:
    parser = parser_of(Sample("", "think", ""))
    for piece in pieces:
        yield OutputDelta(events=tuple(parser.push(piece)))
    yield OutputDelta(events=tuple(parser.finish()), finish_reason=finish, stop_string=stop_string)


def streamed(
    answer: Answer, pieces: Iterable[str], finish: FinishReason = FinishReason.STOP, stop_string: str = ""
) -> list[dict[str, Any]]:
    """The data of all events, whose names must be their types."""
    sent = [event for delta in deltas(pieces, finish, stop_string) for event in answer.events(0, delta, lambda: USAGE)]
    return decoded(sent + answer.last_events(USAGE))


def whole(answer: Answer, text: str, finish: FinishReason = FinishReason.STOP, stop_string: str = "") -> dict[str, Any]:
    choice = ChoiceOutput(0)
    for delta in deltas([text], finish, stop_string):
        choice.add(delta)
    found: dict[str, Any] = json.loads(JsonResponse(answer.whole([choice], USAGE)).body)
    return found


def decoded(events: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for event in b"".join(events).decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def cuts(text: str) -> Iterator[list[str]]:
    """The text in two pieces, cut everywhere, and in single characters."""
    for place in range(len(text)):
        yield [text[:place], text[place:]]
    yield list(text)
