"""The contract between gateway and router: requests and chunks of token ids. Only the gateway handles text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from baton.core.prompt_logprobs import PromptLogprobs
from baton.core.request import FinishReason, SamplingParams, TokenLogprobs
from baton.core.rounds import Round
from baton.core.slo import STANDARD, SloClass
from baton.core.timeline import Timeline


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate. ``timeline`` already holds RECEIVED and TOKENIZED.

    Attributes:
        speculation_method: how the decode worker drafts tokens; ``None`` leaves that to the cluster's configuration.
        slo: its SLO class.
        cache_salt: only requests with the same salt share cached prefixes.
        is_traced: every chunk with tokens has a round.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    timeline: Timeline
    speculation_method: str | None = None
    slo: SloClass = STANDARD
    cache_salt: str = ""
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """An HTTP request whose response was sent, or whose client left.

    Attributes:
        operation: ``chat`` or ``text_completion``.
        trace_context: the W3C headers ``traceparent`` and ``tracestate`` that the client sent.
    """

    request_id: str
    operation: str
    model: str
    sequences: tuple[GenerationRequest, ...]
    streamed: bool
    trace_context: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one sequence, in order.

    Only the last chunk has a ``finish_reason``, and only the first one the ``prompt_logprobs`` that were asked for.
    After a failure, the iterator raises a ``BatonError`` instead.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    round: Round | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The public description of the served model.

    Attributes:
        name: its main name, in metrics and traces.
        max_model_len: prompt and output tokens together.
        draft_methods: speculation methods whose draft is loaded. Methods without a draft are always available.
        aliases: further names that requests may use.
    """

    name: str
    max_model_len: int
    vocab_size: int
    created_unix_s: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    draft_methods: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the main one first."""
        return (self.name, *self.aliases)


class Generator(Protocol):
    """The router, as the gateway sees it."""

    @property
    def model(self) -> ModelCard: ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Streams the tokens of a sequence. Closing the iterator cancels the work on every worker.

        Raises:
            BatonError: the request was refused or could not be finished.
        """
        ...

    def is_ready(self) -> bool:
        """True while at least one worker of each needed role is healthy."""
        ...
