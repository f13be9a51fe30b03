"""What a request has produced so far, over all of its attempts."""

from __future__ import annotations

import time

from cluster.generation import GenerationRequest, TokenChunk
from cluster.messages import unpack_finish_reason, unpack_logprobs
from cluster.request_ids import new_call_id
from cluster.wire import worker_pb2
from engine.errors import DeadlineError
from engine.request import FinishReason


class Journal:
    """Tokens that the client has, and what the next attempt must know of those before it.

    Args:
        timeout_s: for all attempts together.
    """

    def __init__(self, request: GenerationRequest, timeout_s: float) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.attempt = 0
        self.failed_on: set[str] = set()
        """Ids of the workers that attempts failed on."""
        self.finish_reason: FinishReason | None = None
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def time_left_s(self) -> float:
        """Raises :class:`DeadlineError` when there is none."""
        left = self._deadline_s - time.monotonic()
        if left <= 0:
            raise self.deadline_error()
        return left

    def deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"The request was not finished within {self._timeout_s:g} s. Ask for fewer tokens, try again when the "
            "cluster is less busy, or raise router.request_timeout_s."
        )

    def new_call_id(self) -> str:
        """The request's name on the workers of one attempt."""
        return new_call_id(self.request.request_id)

    def take(self, batch: worker_pb2.TokenBatch) -> TokenChunk:
        """Writes a worker's tokens down; gives them as the client gets them."""
        self.token_ids.extend(batch.token_ids)
        self.finish_reason = unpack_finish_reason(batch)
        self.num_drafted += batch.num_drafted
        self.num_accepted += batch.num_accepted
        return TokenChunk(
            tuple(batch.token_ids),
            unpack_logprobs(batch),
            self.finish_reason,
            self.num_cached_tokens,
            batch.num_drafted,
            batch.num_accepted,
        )
