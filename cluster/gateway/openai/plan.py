"""Plans: a request checked against the model, with token ids, sampling parameters and output options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar, get_args

from baton.core.errors import InvalidRequestError, ModelNotFoundError, UnsupportedParameterError
from baton.core.request import SamplingParams
from baton.core.roles import DRAFT_METHODS, SpeculationMethod
from cluster.gateway.formats.base import OutputParser
from cluster.gateway.openai.json_body import shown
from cluster.gateway.openai.model_inputs import (
    MAX_PROMPTS,
    build_sampling_params,
    choice_seed,
    resolve_max_tokens,
    truncated,
)
from cluster.gateway.openai.output_grammars import OutputGrammars
from cluster.gateway.openai.prompt_encoder import Chat, PromptEncoder
from cluster.gateway.openai.schemas import BaseRequest, ChatCompletionRequest, CompletionRequest
from cluster.gateway.openai.structured import AskedGrammar
from cluster.gateway.openai.tool_use import ToolUse, resolve_tools
from cluster.gateway.output_processor import StopConditions
from cluster.gateway.turns import in_passes
from cluster.requests.generation import ModelCard

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Attributes:
    max_body_bytes: longer HTTP bodies are refused with 413.
    max_choices: highest ``n``.
    max_sequences: highest number of prompts times ``n``.
    max_inflight: number of sequences that the router runs at a time.
    max_stop_strings: highest number of ``stop`` entries.
    max_stop_chars: longest ``stop`` entry, in characters.
    request_timeout_s: a client that has not read its stream by then is disconnected.
    comment_every_s: a stream that is silent for so long sends a comment, so that no proxy takes it for dead.
    ignores_unknown: unknown parameters are left out, and named in a header, instead of refused.
    """

    max_body_bytes: int = 8 * MEBIBYTE
    max_choices: int = 128
    max_sequences: int = MAX_PROMPTS
    max_inflight: int = 1024
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    request_timeout_s: float = 600.0
    comment_every_s: float = 5.0
    ignores_unknown: bool = False


MAX_SALT_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default ``max_tokens`` of a completion."""
MAX_TRACED_SEQUENCES = 16
"""Highest number of sequences in a request with a trace; as many as the timeline of a request shows."""
MAX_PROMPT_LOGPROBS = 2**18
"""Highest number of log probabilities of prompts in one answer; each costs time and about 50 bytes."""

AUTO, NONE = "auto", "none"

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and its sampling parameters. ``params.seed`` is the seed of choice 0."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    echo_text: str = ""
    """Text that the response repeats before the output."""
    is_continued: bool = True
    """True if the output continues the prompt's last word, False if it starts a new turn."""
    has_output: bool = True
    """False if the client wants to know about the prompt only; ``params`` then allow one token, which it never sees."""

    def params_of_choice(self, choice: int) -> SamplingParams:
        """The first choice alone brings the prompt's log probabilities."""
        num_top = None if choice else self.params.prompt_logprobs
        return dataclasses.replace(self.params, seed=choice_seed(self.params.seed, choice), prompt_logprobs=num_top)


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The checked content of one HTTP request, which has ``len(prompts) * num_choices`` sequences.

    Attributes:
        model: the model's name in the answer.
        echoed_top, listed_top: how many of the most likely tokens are shown for each token of a prompt, with ``echo``
            and in ``prompt_logprobs``; ``None``: its log probabilities are not in the answer.
        is_traced: every choice tells its rounds.
        grammar_param: the parameter that asks for the grammar, if there is one.
    """

    model: str
    prompts: tuple[PromptPlan, ...]
    num_choices: int
    stop: StopConditions
    skip_special_tokens: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool = False
    speculation_method: str | None = None
    cache_salt: str = ""
    new_parser: Callable[[], OutputParser] | None = None
    """Makes the parser of one choice; ``None``: all text is content."""
    shown_token_ids: frozenset[int] = frozenset()
    """Special tokens whose text the parser needs."""
    echoed_top: int | None = None
    listed_top: int | None = None
    is_traced: bool = False
    grammar_param: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_prompt_logprobs(self) -> int:
        """The number of log probabilities of prompts in the answer."""
        return self.num_choices * sum(
            len(prompt.token_ids) * (1 + prompt.params.prompt_logprobs)
            for prompt in self.prompts
            if prompt.params.prompt_logprobs is not None
        )


class Planner:
    """Builds plans for one served model."""

    def __init__(self, encoder: PromptEncoder, limits: GatewayLimits) -> None:
        self._encoder = encoder
        self._dialect = encoder.dialect
        self._grammars = OutputGrammars(encoder)
        self._limits = limits

    async def plan_completion(self, request: CompletionRequest, card: ModelCard) -> GenerationPlan:
        """Raises :class:`~baton.core.errors.BatonError` if the model or the limits do not allow the request."""
        model = check_model(request.model, card)
        _check_completion_options(request)
        truncates = request.truncate_prompt_tokens is not None
        prompts = await self._encoder.split(request.prompt, self._limits.max_sequences, card, may_be_long=truncates)
        self._check_shared(request, len(prompts))
        encoded = await self._encoder.encode_prompts(
            prompts, card, request.add_special_tokens, echo=request.echo, may_be_long=truncates
        )
        asked = await self._grammars.of_completion(request, card)
        grammar = asked.grammar if asked else ""
        planned = await in_passes(lambda found: _plan_prompt(*found, request, card, grammar), encoded)
        plan = self._plan(request, model, planned, card, asked)
        return dataclasses.replace(plan, echoed_top=request.logprobs) if request.echo else plan

    async def plan_chat(self, request: ChatCompletionRequest, card: ModelCard) -> GenerationPlan:
        """Raises :class:`~baton.core.errors.BatonError` if the model or the limits do not allow the request."""
        model = check_model(request.model, card)
        self._check_shared(request, num_prompts=1)
        max_tokens_param, requested = _agreed_max_tokens(request)
        num_top = _resolve_top_logprobs(request)
        tools = self._tools(request)
        truncates = request.truncate_prompt_tokens is not None
        token_ids = await self._encoder.encode_chat(chat_of(request, tools), card, may_be_long=truncates)
        token_ids = truncated(token_ids, request.truncate_prompt_tokens, requested, card)
        # Chat clients ask for a fixed number, and their history grows until both together exceed the context.
        names = "messages", max_tokens_param
        max_tokens = resolve_max_tokens(len(token_ids), requested, None, card, names, clips=True)
        end = self._dialect.prompt_end(token_ids)
        asked = await self._grammars.of_chat(request, tools, end, card)
        params = build_sampling_params(request, card, max_tokens, num_top, asked.grammar if asked else "")
        prompt = PromptPlan(tuple(token_ids), params, is_continued=request.continue_final_message)
        plan = self._plan(request, model, [prompt], card, asked)
        if not self._dialect.needs_parser(tools.functions):
            return plan
        new_parser = partial(
            self._dialect.parser,
            tools.functions,
            end,
            is_single=tools.is_single,
            is_constrained=bool(asked and tools.functions),
            holds_calls=bool(request.stop_strings),  # which may end the output within a call
        )
        return dataclasses.replace(plan, new_parser=new_parser, shown_token_ids=self._dialect.shown_token_ids())

    async def count_chat(self, request: ChatCompletionRequest, card: ModelCard) -> int:
        """The number of tokens of a chat's prompt, which may be longer than the context; errors as for
        :meth:`plan_chat`."""
        check_model(request.model, card)
        return len(await self._encoder.encode_chat(chat_of(request, self._tools(request)), card, may_be_long=True))

    def _tools(self, request: ChatCompletionRequest) -> ToolUse:
        return resolve_tools(request, is_allowed=self._dialect.allows_tools)

    def _plan(
        self,
        request: BaseRequest,
        model: str,
        prompts: list[PromptPlan],
        card: ModelCard,
        asked: AskedGrammar | None,
    ) -> GenerationPlan:
        options = request.stream_options
        plan = GenerationPlan(
            model=model,
            prompts=tuple(prompts),
            num_choices=request.n,
            stop=StopConditions(
                strings=request.stop_strings,
                include_in_output=request.include_stop_str_in_output,
                min_tokens=request.min_tokens,
            ),
            skip_special_tokens=request.skip_special_tokens,
            stream=request.stream,
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.continuous_usage_stats,
            return_token_ids=request.return_token_ids,
            speculation_method=_speculation_method(request, card),
            cache_salt=request.cache_salt or "",
            listed_top=request.prompt_logprobs,
            is_traced=_is_traced(request),
            grammar_param=asked.param if asked else None,
        )
        if plan.num_prompt_logprobs > MAX_PROMPT_LOGPROBS:
            raise InvalidRequestError(
                f"The answer would have {plan.num_prompt_logprobs} log probabilities of prompts, but "
                f"{MAX_PROMPT_LOGPROBS} are the limit of one request. Send fewer or shorter prompts, or ask for fewer "
                "of the most likely tokens.",
                param="prompt_logprobs",
            )
        return plan

    def _check_shared(self, request: BaseRequest, num_prompts: int) -> None:
        """Runs the checks of both endpoints that come before tokenization."""
        self._check_counts(request.n, num_prompts)
        if _is_traced(request) and num_prompts * request.n > MAX_TRACED_SEQUENCES:
            raise InvalidRequestError(
                f"speculation.trace is for requests of at most {MAX_TRACED_SEQUENCES} sequences (prompts times n), but "
                f"this one has {num_prompts * request.n}. Send fewer, or leave out the trace.",
                param="speculation",
            )
        self._check_stop(request.stop_strings)
        if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_SALT_CHARS:
            raise InvalidRequestError(
                f"cache_salt must have 1 to {MAX_SALT_CHARS} characters, got {len(request.cache_salt)}.",
                param="cache_salt",
            )
        options = request.stream_options
        if options is not None and options.include_obfuscation:
            raise UnsupportedParameterError(
                "stream_options.include_obfuscation is not supported; leave it out or send false.",
                param="stream_options",
            )

    def _check_stop(self, strings: tuple[str, ...]) -> None:
        limits = self._limits
        if len(strings) > limits.max_stop_strings:
            raise InvalidRequestError(
                f"stop has {len(strings)} strings; at most {limits.max_stop_strings} are allowed.", param="stop"
            )
        for string in strings:
            if not 1 <= len(string) <= limits.max_stop_chars:
                raise InvalidRequestError(
                    f"Each stop string must have 1 to {limits.max_stop_chars} characters, got {len(string)}.",
                    param="stop",
                )

    def _check_counts(self, n: int, num_prompts: int) -> None:
        limits = self._limits
        if not 1 <= n <= limits.max_choices:
            raise InvalidRequestError(f"n must be between 1 and {limits.max_choices}, got {shown(n)}.", param="n")
        if num_prompts * n > limits.max_sequences:
            raise InvalidRequestError(
                f"The request asks for {num_prompts} prompts times n = {n} sequences; "
                f"at most {limits.max_sequences} are allowed in one request.",
                param="n" if n > 1 else "prompt",
            )
        if num_prompts * n > limits.max_inflight:
            raise InvalidRequestError(
                f"The request asks for {num_prompts * n} sequences (prompts times n = {n}), but this endpoint runs at "
                f"most {limits.max_inflight} at a time (router.max_inflight). Send fewer in one request.",
                param="n" if n > 1 else "prompt",
            )


def chat_of(request: ChatCompletionRequest, tools: ToolUse) -> Chat:
    """The conversation of a request, and how it asks for it to be rendered."""
    return Chat(
        request.messages,
        tools.listed,
        add_generation_prompt=_resolve_generation_prompt(request),
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        template_kwargs=request.template_kwargs,
    )


def _plan_prompt(
    token_ids: list[int], echo_text: str, request: CompletionRequest, card: ModelCard, grammar: str
) -> PromptPlan:
    wanted = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    token_ids = truncated(token_ids, request.truncate_prompt_tokens, wanted, card)
    tells_prompt = request.echo or request.prompt_logprobs is not None
    has_output = request.max_tokens != 0 or not tells_prompt
    max_tokens = resolve_max_tokens(
        len(token_ids),
        request.max_tokens if has_output else 1,
        DEFAULT_COMPLETION_TOKENS,
        card,
        ("prompt", "max_tokens"),
    )
    echoed_top = request.logprobs if request.echo else None
    params = build_sampling_params(request, card, max_tokens, request.logprobs, grammar, echoed_top)
    return PromptPlan(tuple(token_ids), params, echo_text=echo_text, has_output=has_output)


def check_model(name: str | None, card: ModelCard) -> str:
    """The name of the model in the answer: the requested one, or the main one for ``None``.

    Raises:
        ModelNotFoundError: the served model has no such name.
    """
    if name is not None and name not in card.names:
        served = " and ".join(map(repr, card.names))
        raise ModelNotFoundError(
            f"The model {name[:100]!r} does not exist; this endpoint serves {served}.", param="model"
        )
    return card.name if name is None else name


def _is_traced(request: BaseRequest) -> bool:
    return request.speculation is not None and request.speculation.trace


def _speculation_method(request: BaseRequest, card: ModelCard) -> str | None:
    """Raises :class:`InvalidRequestError` if the method needs a draft that the cluster does not have."""
    method = request.speculation.method if request.speculation else None
    if method in DRAFT_METHODS and method not in card.draft_methods:
        loaded = ", ".join(sorted(card.draft_methods))
        state = f"the loaded draft is for {loaded}" if loaded else "no draft is loaded"
        others = set(get_args(SpeculationMethod)) - (set(DRAFT_METHODS) - card.draft_methods) - {AUTO, NONE}
        raise InvalidRequestError(
            f"speculation.method {method} needs a draft of that kind, but {state}. Choose one of {AUTO}, {NONE}, "
            f"{', '.join(sorted(others))}, or start the cluster with a draft for {method} (speculation.draft).",
            param="speculation",
        )
    return method


def _check_completion_options(request: CompletionRequest) -> None:
    if request.best_of is not None and request.best_of != request.n:
        raise UnsupportedParameterError(
            f"best_of is only supported when it equals n ({shown(request.n)}), got {shown(request.best_of)}.",
            param="best_of",
        )
    if request.echo and request.truncate_prompt_tokens is not None:
        raise UnsupportedParameterError(
            "truncate_prompt_tokens cannot be combined with echo, which returns the whole prompt. Leave one out.",
            param="truncate_prompt_tokens",
        )


def _agreed_max_tokens(request: ChatCompletionRequest) -> tuple[str, int | None]:
    """The name that the client used for the bound, and its value."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"max_tokens ({shown(old)}) and max_completion_tokens ({shown(new)}) contradict each other; send one.",
            param="max_tokens",
        )
    return ("max_tokens", old) if new is None else ("max_completion_tokens", new)


def _resolve_generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt and request.continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message cannot both be true.", param="continue_final_message"
        )
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def _resolve_top_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise InvalidRequestError("top_logprobs requires logprobs: true.", param="top_logprobs")
    return None
