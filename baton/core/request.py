"""A generation request as the engine sees it: token ids in, token ids out. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import TypeGuard

from baton.core.errors import BatonError, InvalidRequestError
from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.queue_priority import NO_PRIORITY, QueuePriority
from baton.core.rounds import Round
from baton.core.steps import StepShare
from baton.core.token_edits import TokenEdits
from baton.core.token_grammar import TokenGrammar

MAX_LOGPROBS = 20
SEED_LIMIT = 2**63


class FinishReason(StrEnum):
    """Why a request ended. ``STOP`` and ``LENGTH`` reach OpenAI clients unchanged."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OFF = "handed_off"
    """On a prefill worker only: the first token is out and decoding continues on another worker."""


class RequestStatus(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


def _require(condition: bool, param: str, expected: str, value: object) -> None:
    if not condition:
        found = str(value).lower() if isinstance(value, bool) else repr(value)
        raise InvalidRequestError(f"{param} must be {expected}, got {found}.", param=param)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or numpy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number of Python or numpy, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_bias(pair: object) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and is_integer(pair[0]) and is_number(pair[1])


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("max_tokens", "top_k", "min_tokens", "seed")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Stop *strings* are not here: they are matched against text, next to the detokenizer.

    Raises:
        InvalidRequestError: a value has another type or is out of its range; ``param`` names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    """0 means greedy."""
    top_k: int = 0
    """0 (or -1, as some clients send) means no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    """``None`` returns none; k ≥ 0 returns the log probability of the chosen token and of the k most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. Such a prompt is computed without its cached prefix."""
    seed: int = 0
    """Noise is a function of (seed, position): see ``baton/engine/sampling/sampler.py``."""
    grammar: str = ""
    """Only texts of this grammar are generated, and they end where it ends; see :mod:`baton.grammar.forms`. Empty for
    none."""

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            _require(is_number(value) and math.isfinite(value), name, "a finite number", value)
        for name in _INTEGERS:
            _require(is_integer(getattr(self, name)), name, "an integer", getattr(self, name))
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", "true or false", self.ignore_eos)
        is_list = isinstance(self.stop_token_ids, Sequence) and all(map(is_integer, self.stop_token_ids))
        _require(is_list, "stop_token_ids", "a sequence of token ids", self.stop_token_ids)
        is_list = isinstance(self.logit_bias, Sequence) and all(map(_is_bias, self.logit_bias))
        _require(is_list, "logit_bias", "a sequence of pairs of a token id and a number", self.logit_bias)
        _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(0 <= self.temperature <= 100, "temperature", "between 0 and 100", self.temperature)
        _require(self.top_k >= -1, "top_k", "0 or -1 (no limit) or a positive integer", self.top_k)
        _require(0 <= self.top_p <= 1, "top_p", "in [0, 1]", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p)
        _require(
            0.01 <= self.repetition_penalty <= 100,
            "repetition_penalty",
            "between 0.01 and 100",
            self.repetition_penalty,
        )
        _require(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2", self.presence_penalty)
        _require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2", self.frequency_penalty)
        _require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens", self.min_tokens)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            is_right = count is None or (is_integer(count) and 0 <= count <= MAX_LOGPROBS)
            _require(is_right, name, f"an integer between 0 and {MAX_LOGPROBS}", count)
        _require(0 <= self.seed < SEED_LIMIT, "seed", "between 0 and 2^63 - 1", self.seed)
        _require(isinstance(self.grammar, str), "grammar", "a text", self.grammar)
        if self.grammar:  # it says where the answer may end
            _require(not self.ignore_eos, "ignore_eos", "false for an answer with a grammar or schema", self.ignore_eos)
            _require(not self.min_tokens, "min_tokens", "0 for an answer with a grammar or schema", self.min_tokens)
        for _, bias in self.logit_bias:
            _require(-100 <= bias <= 100, "logit_bias", "between -100 and 100 for every token", bias)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def token_edits(self, eos_token_ids: frozenset[int] = frozenset()) -> TokenEdits:
        """What the parameters do to single tokens, for a model that ends its output with ``eos_token_ids``."""
        stop_ids = {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}
        return TokenEdits.of(stop_ids, self.logit_bias, holds_back=self.min_tokens > 0)

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises :class:`InvalidRequestError` when the parameters name tokens that are not in the vocabulary."""
        num_top = self.prompt_logprobs or 0
        _require(num_top <= vocab_size, "prompt_logprobs", f"at most {vocab_size}, as the vocabulary has", num_top)
        for param, token_ids in (
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
        ):
            check_token_ids(token_ids, vocab_size, param)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises :class:`InvalidRequestError` naming the first id outside ``[0, vocab_size)``."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        shown = f"the token id {bad}" if abs(bad) < 2**64 else "a token id of more than 64 bits"
        raise InvalidRequestError(
            f"{param} has {shown}, but the model's token ids go from 0 to {vocab_size - 1}.", param=param
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one generated token, under the model's own distribution (before any processing).

    Attributes:
        logprob: log probability of the chosen token.
        top: ``(token id, log probability)`` pairs, most likely first, as many as the request asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. Only the scheduler that owns it changes it.

    ``num_computed_tokens`` catches up with ``num_tokens``: prefill, chunked prefill, decode and verification are all
    that one movement.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = field(default_factory=list)
    """Tokens generated so far; a resumed request starts with what the client has already seen."""
    speculation_method: str | None = None
    """How to draft for this request; ``None`` uses the worker's method."""
    hands_off: bool = False
    """True on a prefill worker: the request leaves after its first token, with ``HANDED_OFF``."""
    queue_priority: QueuePriority = NO_PRIORITY
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes and remembered outputs."""
    grammar: TokenGrammar | None = None
    """The state of ``params.grammar``; only the engine's thread uses it."""
    is_probe: bool = False
    """A health check, from whose steps the engine does not learn: an idle engine is slower than a busy one."""
    is_traced: bool = False
    """Its outputs carry rounds."""
    tpot_target_s: float = 0.0
    """Target for the mean time per output token, in seconds; 0 means none."""
    arrival_s: float = 0.0
    """Arrival, in seconds of the monotonic clock."""
    first_scheduled_s: float | None = None
    """When it left the queue for the first time, in seconds of the monotonic clock."""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the request was first scheduled."""
    block_ids: list[int] = field(default_factory=list)
    steps: list[StepShare] = field(default_factory=list)
    """Engine steps since its last token; the next output carries them."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained content hashes of its full blocks; the block manager appends to them."""
    prompt_logprobs: PromptLogprobs | None = field(init=False, repr=False)
    """Those of the prompt as far as computed; the first output takes them along. ``None`` if not wanted or taken."""
    edits: TokenEdits = field(init=False, repr=False)
    """What ``params`` and ``eos_token_ids`` do to single tokens."""

    def __post_init__(self) -> None:
        self.edits = self.params.token_edits(self.eos_token_ids)
        num_top = self.params.prompt_logprobs
        self.prompt_logprobs = None if num_top is None else PromptLogprobs.of_prompt(self.num_prompt_tokens, num_top)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def num_scored(self, num_tokens: int) -> int:
        """How many of its next ``num_tokens`` tokens predict a token of the prompt that needs a log probability."""
        if self.prompt_logprobs is None:
            return 0
        return max(0, min(num_tokens, len(self.prompt_logprobs) - self.num_computed_tokens))

    def token_at(self, position: int) -> int:
        prompt_length = len(self.prompt_token_ids)
        if position < prompt_length:
            return self.prompt_token_ids[position]
        return self.output_token_ids[position - prompt_length]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Known tokens at positions ``[start, end)``."""
        prompt_length = len(self.prompt_token_ids)
        if end <= prompt_length:
            return self.prompt_token_ids[start:end]
        if start >= prompt_length:
            return self.output_token_ids[start - prompt_length : end - prompt_length]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - prompt_length]

    def move_to(self, status: RequestStatus) -> None:
        """Changes the status. Raises :class:`RuntimeError` for a transition that the table does not allow."""
        if status not in _TRANSITIONS[self.status]:
            raise RuntimeError(f"request {self.request_id}: illegal status change {self.status} → {status}")
        self.status = status

    def append_output(self, token_id: int) -> FinishReason | None:
        """Adds a generated token and returns the finish reason if it ends the request.

        The ending token is part of the output; the detokenizer decides whether its text is shown.
        """
        self.output_token_ids.append(token_id)
        num_output = len(self.output_token_ids)
        if num_output > self.params.min_tokens and token_id in self.edits.stop_ids:
            return FinishReason.STOP
        if num_output >= self.params.max_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Output of one engine step for one request.

    Attributes:
        token_ids: new tokens in order; several when drafts were accepted, none with an error or an abort.
        logprobs: one entry per token, or ``None`` when the request did not ask.
        prompt_logprobs: with the first output, if the request asked for them.
        finish_reason: set on the last output of the request.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_drafted: guessed tokens that this step verified; ``num_accepted`` of them were right.
        drafted_by: the speculation method that guessed them; empty without any.
        error: why, when ``finish_reason`` is ``ERROR``.
        steps: the engine's steps since the previous output, and the request's tokens in each.
        round: what was drafted and accepted, with new tokens of a traced request.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_by: str = ""
    error: BatonError | None = None
    steps: tuple[StepShare, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    round: Round | None = None
