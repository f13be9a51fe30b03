"""The generation endpoints: an HTTP request becomes sequences, and their output becomes the response."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response

from baton.core.errors import InvalidRequestError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.request_ids import owned_id
from baton.core.rounds import RoundLog
from baton.core.slo import SLO_CLASS_HEADER, SloClass, SloClasses, SloResult
from baton.core.timeline import Event, Timeline
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.access import Allowance, KeyLimiter, api_key_of
from cluster.gateway.active_ids import ActiveIds
from cluster.gateway.answers import Answer, ChunkedAnswer
from cluster.gateway.anthropic.api import MESSAGES_API
from cluster.gateway.anthropic.schemas import PromptRequest, check_counted
from cluster.gateway.anthropic.translation import to_counted_chat
from cluster.gateway.anthropic.versions import check_version
from cluster.gateway.api_keys import cache_salt_of
from cluster.gateway.bodies import BodyReader
from cluster.gateway.chat_api import AnswerSetting, ChatApi
from cluster.gateway.http_edge import (
    ArrivalTimes,
    JsonResponse,
    add_log_fields,
    add_response_headers,
    arrival_of,
    call_when_finished,
    request_id_of,
    set_request_id,
    until_disconnect,
)
from cluster.gateway.openai.output_grammars import naming_grammar
from cluster.gateway.openai.plan import GatewayLimits, GenerationPlan, Planner
from cluster.gateway.openai.prompt_encoder import PromptEncoder
from cluster.gateway.openai.prompt_logprobs import describe_prompt
from cluster.gateway.openai.responses import ChatFormat, ChoiceOutput, CompletionFormat, ResponseFormat
from cluster.gateway.openai.rounds import describe_rounds
from cluster.gateway.openai.schemas import (
    ChatCompletionRequest,
    CommonRequest,
    CompletionRequest,
    RequestT,
    parse_request,
    without_unknown,
)
from cluster.gateway.output_processor import OutputDelta, OutputProcessor
from cluster.gateway.responses.api import RESPONSES_API
from cluster.gateway.sequence_runner import SequenceSpec, Starts, run_sequences
from cluster.gateway.sse import PunctualEvents, SseResponse
from cluster.gateway.turns import in_passes
from cluster.gateway.usage import UsageCounter
from cluster.requests.generation import FinishedRequest, GenerationRequest, Generator

# The end of the prompt tells the detokenizer whether the output continues a word.
_NUM_CONTEXT_TOKENS = 32
IGNORED_HEADER = "X-Baton-Ignored-Parameters"
"""Names the parameters of the request that were left out because no API documents them."""
_CHARS_PER_ENTRY = 8
"""A choice or a log probability of an answer costs about as much time as so many characters of text."""
_MAX_IGNORED_NAMES = 16
_MAX_NAME_CHARS = 64
_NOT_IN_HEADERS = re.compile(r"[^!-+\--~]")  # also commas, which divide the names
_TRACE_HEADERS = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class _Job:
    """A planned HTTP request. Times are seconds of the monotonic clock.

    Attributes:
        operation: its name in OpenTelemetry's semantic conventions.
        allowance: its share of the API key's limits; ``None`` if the key has no limits.
        cache_salt: see :func:`cache_salt_of`.
    """

    operation: str
    slo: SloClass
    plan: GenerationPlan
    answer: Answer
    parsed_s: float
    tokenized_s: float
    allowance: Allowance | None
    cache_salt: str


class GenerationEndpoint:
    """Serves ``/v1/completions``, ``/v1/chat/completions``, and the APIs that are translated to chats.

    Args:
        on_finished: called for every request that reached the generator, when its response has been sent.
        is_kept: whether an id belongs to the timeline of an earlier request, so that it must not be used again.
        dialect: how the model writes calls and reasoning; ``None`` finds it out.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        limits: GatewayLimits,
        slo_classes: SloClasses,
        bodies: BodyReader,
        encoder: PromptEncoder,
        on_finished: Callable[[FinishedRequest], None] | None = None,
        is_kept: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._generator = generator
        self._tokenizer = tokenizer
        self._limits = limits
        self._slo_classes = slo_classes
        self._bodies = bodies
        self._encoder = encoder
        self._dialect = encoder.dialect
        self._planner = Planner(encoder, limits)
        self._active_ids = ActiveIds(is_kept)
        self._on_finished = on_finished
        self._key_limiter = KeyLimiter()
        self._starts = Starts()

    async def complete(self, request: Request) -> Response:
        body = await self._bodies.read_object(request)
        parsed_s = time.monotonic()
        allowance = self._admit(request)
        parsed = self._parse(request, CompletionRequest, body)
        slo = self._choose_class(request, parsed)
        plan = await self._planner.plan_completion(parsed, self._generator.model)
        _take_prompt(request, allowance, plan)

        def make_format(request_id: str) -> ResponseFormat:
            return CompletionFormat(
                request_id,
                plan.model,
                self._tokenizer,
                with_logprobs=parsed.logprobs is not None,
                echo_texts=[prompt.echo_text for prompt in plan.prompts for _ in range(plan.num_choices)],
            )

        answer = ChunkedAnswer(make_format, partial(request_id_of, request), plan)
        salt = cache_salt_of(api_key_of(request), plan.cache_salt)
        job = _Job("text_completion", slo, plan, answer, parsed_s, time.monotonic(), allowance, salt)
        return await self._respond(request, job)

    async def chat(self, request: Request) -> Response:
        return await self._converse(request, _CHAT_API)

    async def create_response(self, request: Request) -> Response:
        return await self._converse(request, RESPONSES_API)

    async def create_message(self, request: Request) -> Response:
        return await self._converse(request, MESSAGES_API)

    async def count_message_tokens(self, request: Request) -> Response:
        body = await self._bodies.read_object(request)
        check_version(request.headers)
        check_counted(body)
        parsed = self._parse(request, PromptRequest, body)
        with MESSAGES_API.own_names():
            count = await self._planner.count_chat(to_counted_chat(parsed), self._generator.model)
        return JsonResponse({"input_tokens": count})

    async def _converse(self, request: Request, api: ChatApi[RequestT]) -> Response:
        body = await self._bodies.read_object(request)
        parsed_s = time.monotonic()
        allowance = self._admit(request)
        api.check_headers(request.headers)
        parsed = self._parse(request, api.schema, body)
        with api.own_names():
            chat = api.to_chat(parsed)
            slo = self._choose_class(request, chat)
            plan = api.with_own_names(await self._planner.plan_chat(chat, self._generator.model))
        _take_prompt(request, allowance, plan)
        # As with OpenAI, only requests with a tier get one back. Completions have no such field.
        tier = None if chat.service_tier is None else self._slo_classes.tier_used(slo, chat.service_tier)
        request_id = partial(request_id_of, request)
        answer = api.answer(parsed, AnswerSetting(request_id, plan, self._tokenizer, tier, self._dialect.new_call_id))
        salt = cache_salt_of(api_key_of(request), plan.cache_salt)
        return await self._respond(
            request, _Job("chat", slo, plan, answer, parsed_s, time.monotonic(), allowance, salt)
        )

    def _admit(self, request: Request) -> Allowance | None:
        """Called before any other work, but after the body was read: a client may send it all before it reads."""
        allowance = self._key_limiter.admit(api_key_of(request))
        if allowance is not None:
            call_when_finished(request, lambda _: allowance.release())
            add_response_headers(request, allowance.headers)
        return allowance

    def _parse(self, request: Request, schema: type[RequestT], body: dict[str, Any]) -> RequestT:
        if self._limits.ignores_unknown:
            body, ignored = without_unknown(schema, body)
            if ignored:
                names = (_NOT_IN_HEADERS.sub("?", name[:_MAX_NAME_CHARS]) for name in ignored[:_MAX_IGNORED_NAMES])
                add_response_headers(request, {IGNORED_HEADER: ", ".join(names)})
        return parse_request(schema, body)

    def _choose_class(self, request: Request, parsed: CommonRequest) -> SloClass:
        api_key = api_key_of(request)
        key_class = None if api_key is None else api_key.slo_class
        classes = dict.fromkeys(request.headers.getlist(SLO_CLASS_HEADER))
        if len(classes) > 1:
            raise InvalidRequestError(
                f"{SLO_CLASS_HEADER} has {len(classes)} different values; send one.", param=SLO_CLASS_HEADER
            )
        slo = self._slo_classes.choose(next(iter(classes), None), parsed.service_tier, key_class)
        add_log_fields(request, slo_class=slo.name)
        return slo

    async def _respond(self, request: Request, job: _Job) -> Response:
        if not job.plan.stream:
            return await until_disconnect(request.receive, self._collect(request, job))
        events = PunctualEvents(self._stream(request, job))
        # For a while, an error before the first token can still have its own HTTP status.
        every_s = self._limits.comment_every_s
        await until_disconnect(request.receive, events.wait_for_first(every_s))
        deadline_s = arrival_of(request).accepted_s + self._limits.request_timeout_s
        return SseResponse(events, job.answer, request_id_of(request), deadline_s, every_s)

    async def _collect(self, request: Request, job: _Job) -> Response:
        async with self._claim(request, job) as specs:
            choices = [ChoiceOutput(spec.index) for spec in specs]
            counter = UsageCounter(job.plan.num_prompt_tokens, specs)
            async with aclosing(run_sequences(self._generator, specs, self._starts)) as deltas:
                async for index, delta in deltas:
                    await self._describe(job, index, delta)
                    choices[index].add(delta)
                    counter.note(index)
            usage = counter.usage()
            response = await self._encoder.off_loop(
                _size_of_answer(job.plan, choices), lambda: JsonResponse(job.answer.whole(choices, usage))
            )
            _record_response(specs)
            return response

    async def _stream(self, request: Request, job: _Job) -> AsyncGenerator[bytes, None]:
        async with self._claim(request, job) as specs:
            counter = UsageCounter(job.plan.num_prompt_tokens, specs)
            seen: set[int] = set()
            async with aclosing(run_sequences(self._generator, specs, self._starts)) as deltas:
                async for index, delta in deltas:
                    await self._describe(job, index, delta)
                    counter.note(index)
                    for event in job.answer.events(index, delta, counter.usage):
                        yield event
                    if index not in seen:  # the consumer sends each event before it asks for the next one
                        seen.add(index)
                        specs[index].request.timeline.record(Event.FIRST_TOKEN_SENT)
            _record_response(specs)
            for event in job.answer.last_events(counter.usage()):
                yield event

    async def _describe(self, job: _Job, index: int, delta: OutputDelta) -> None:
        """Adds to the answer what it tells besides its text."""
        if delta.prompt_logprobs is not None:
            await self._describe_prompt(job, index, delta.prompt_logprobs)
        if (rounds := delta.rounds) is not None:
            described = await self._encoder.off_loop(rounds.num_numbers, describe_rounds, rounds, self._tokenizer)
            job.answer.add_speculation(index, described)

    async def _describe_prompt(self, job: _Job, first_choice: int, found: PromptLogprobs) -> None:
        """Adds what a prompt's first choice brought to the answer, for all of its choices."""
        plan = job.plan
        prompt = plan.prompts[first_choice // plan.num_choices]
        described = await self._encoder.off_loop(
            found.top_ids.size + len(found),
            describe_prompt,
            prompt.token_ids,
            prompt.echo_text,
            found,
            self._tokenizer,
            plan.echoed_top,
            plan.listed_top,
        )
        for choice in range(plan.num_choices):
            job.answer.add_prompt(first_choice + choice, described)

    @asynccontextmanager
    async def _claim(self, request: Request, job: _Job) -> AsyncIterator[list[SequenceSpec]]:
        num_sequences = len(job.plan.prompts) * job.plan.num_choices
        api_key = api_key_of(request)
        owner = None if api_key is None else api_key.owner
        with self._active_ids.claim(request_id_of(request), num_sequences, owner) as (request_id, ids):
            set_request_id(request, request_id)
            arrival = arrival_of(request)
            group = owned_id(owner, request_id) if num_sequences > 1 else None
            specs = await in_passes(
                lambda each: self._spec(job, arrival, Timeline(each[1], group=group), each[0]), enumerate(ids)
            )
            call_when_finished(request, partial(self._finish, request, job, request_id, specs))
            try:
                with naming_grammar(job.plan.grammar_param):
                    yield specs
            finally:
                _log_slo(request, specs)
                if job.allowance is not None:
                    job.allowance.settle(sum(spec.processor.num_completion_tokens for spec in specs))

    def _finish(self, request: Request, job: _Job, request_id: str, specs: list[SequenceSpec], was_sent: bool) -> None:
        if was_sent:
            _record(specs, Event.SENT)
        if self._on_finished is not None:
            sequences = tuple(spec.request for spec in specs)
            context = {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
            model = self._generator.model.name
            self._on_finished(FinishedRequest(request_id, job.operation, model, sequences, job.plan.stream, context))

    def _spec(self, job: _Job, arrival: ArrivalTimes, timeline: Timeline, index: int) -> SequenceSpec:
        plan = job.plan
        prompt_index, choice = divmod(index, plan.num_choices)
        prompt = plan.prompts[prompt_index]
        timeline.record(Event.RECEIVED, arrival.received_s)
        timeline.record(Event.ACCEPTED, arrival.accepted_s)
        timeline.record(Event.PARSED, job.parsed_s)
        timeline.record(Event.TOKENIZED, job.tokenized_s)
        timeline.rounds = RoundLog() if plan.is_traced else None
        detokenizer = self._tokenizer.detokenizer(
            skip_special_tokens=plan.skip_special_tokens,
            prompt_token_ids=prompt.token_ids[-_NUM_CONTEXT_TOKENS:] if prompt.is_continued else (),
            shown_token_ids=plan.shown_token_ids,
        )
        return SequenceSpec(
            index=index,
            request=GenerationRequest(
                timeline.request_id,
                prompt.token_ids,
                prompt.params_of_choice(choice),
                timeline,
                plan.speculation_method,
                job.slo,
                job.cache_salt,
                plan.is_traced,
            ),
            processor=OutputProcessor(
                detokenizer,
                plan.stop,
                plan.new_parser and plan.new_parser(),
                has_output=prompt.has_output,
                rounds=timeline.rounds,
            ),
            starts_after=index - choice if choice else None,
        )


def _chat_answer(request: ChatCompletionRequest, setting: AnswerSetting) -> Answer:
    def make_format(request_id: str) -> ResponseFormat:
        return ChatFormat(
            request_id,
            setting.plan.model,
            setting.tokenizer,
            with_logprobs=request.logprobs,
            service_tier=setting.service_tier,
            new_call_id=setting.new_call_id,
        )

    return ChunkedAnswer(make_format, setting.request_id, setting.plan)


_CHAT_API = ChatApi(ChatCompletionRequest, lambda request: request, _chat_answer)


def _take_prompt(request: Request, allowance: Allowance | None, plan: GenerationPlan) -> None:
    if allowance is not None:
        allowance.take_prompt(plan.num_prompt_tokens)
        add_response_headers(request, allowance.headers)


def _log_slo(request: Request, specs: list[SequenceSpec]) -> None:
    """Logs whether all sequences met the targets of their class. Excluded sequences do not count."""
    results = {spec.request.timeline.attributes.get("slo_result") for spec in specs} - {None, SloResult.EXCLUDED}
    if results:
        add_log_fields(request, slo_met=results == {SloResult.MET})


def _record_response(specs: list[SequenceSpec]) -> None:
    """Records when the response was complete. A single sequence waits for no other and has no such event."""
    if len(specs) > 1:
        _record(specs, Event.RESPONDED)


def _record(specs: list[SequenceSpec], event: Event) -> None:
    now_s = time.monotonic()
    for spec in specs:
        spec.request.timeline.record(event, now_s)


def _size_of_answer(plan: GenerationPlan, choices: Sequence[ChoiceOutput]) -> int:
    """What writing an answer costs, in characters of text to tokenize."""
    num_entries = plan.num_prompt_logprobs + sum(choice.num_entries for choice in choices)
    return _CHARS_PER_ENTRY * num_entries
