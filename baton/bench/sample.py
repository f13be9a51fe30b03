"""The client's sample of one request, and its service-level objectives."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from baton.core.errors import ConfigError
from baton.core.option_text import duration_s, key_values

UNSENT = "unsent"
UNFINISHED = "unfinished"


@dataclass(slots=True)
class Sample:
    """The sample of a request. Times are in seconds since the stage's load began; ``None`` until they are known.

    Attributes:
        intended_s: intended time of sending, fixed before the run in an open loop.
        is_warmup: True if it is left out of the statistics.
        wanted_input: intended tokens of the prompt; ``None`` if unknown.
        wanted_output: requested tokens of the answer.
        sent_s: time at which it was handed to the connection.
        chunk_times_s: times at which parts of the answer with text were read.
        finished_s: time of the stream's end or of the failure.
        input_tokens: prompt tokens counted by the server.
        output_tokens: answer tokens counted by the server, else the number of chunks.
        counts_are_chunks: True if the server reported no usage.
        cached_tokens: prompt tokens found in a prefix cache.
        error: kind of failure; ``None`` for a complete answer.
        error_message: error text of the server or the library.
        request_id: the server's ``X-Request-Id``, which `baton explain` takes; ``None`` without one.
    """

    intended_s: float
    is_warmup: bool
    wanted_input: int | None
    wanted_output: int
    sent_s: float | None = None
    chunk_times_s: array[float] = field(default_factory=lambda: array("d"))
    finished_s: float | None = None
    input_tokens: int | None = None
    output_tokens: int = 0
    counts_are_chunks: bool = False
    cached_tokens: int = 0
    error: str | None = UNSENT
    error_message: str = ""
    request_id: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.error is None

    def send_delay_s(self) -> float | None:
        """Delay of sending after the intended time."""
        return None if self.sent_s is None else self.sent_s - self.intended_s

    def ttft_s(self, *, from_send: bool) -> float | None:
        """Time to first token, from the actual or the intended time of sending."""
        return self._since(self.chunk_times_s[0] if self.chunk_times_s else None, from_send)

    def e2e_s(self, *, from_send: bool) -> float | None:
        """Time to the end of the stream, from the actual or the intended time of sending."""
        return self._since(self.finished_s, from_send)

    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` for answers of fewer than two tokens."""
        if self.output_tokens < 2 or not self.chunk_times_s:
            return None
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / (self.output_tokens - 1)

    def gaps_s(self) -> list[float]:
        """Times between consecutive chunks, which are the inter-token latencies for a reader."""
        times = self.chunk_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    def to_dict(self) -> dict[str, Any]:
        """The sample for the report, with times in seconds; JSON-ready."""
        return {
            "request_id": self.request_id,
            "intended_s": round(self.intended_s, 6),
            "sent_s": _rounded(self.sent_s),
            "first_token_s": _rounded(self.chunk_times_s[0] if self.chunk_times_s else None),
            "last_token_s": _rounded(self.chunk_times_s[-1] if self.chunk_times_s else None),
            "finished_s": _rounded(self.finished_s),
            "num_chunks": len(self.chunk_times_s),
            "wanted_input": self.wanted_input,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "wanted_output": self.wanted_output,
            "output_tokens": self.output_tokens,
            "is_warmup": self.is_warmup,
            "error": self.error,
            "error_message": self.error_message,
        }

    def _since(self, moment_s: float | None, from_send: bool) -> float | None:
        start_s = self.sent_s if from_send else self.intended_s
        return None if moment_s is None or start_s is None else moment_s - start_s


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


_METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; ``None`` means no limit. An answer must meet all of them.

    In an open loop TTFT and E2E count from the intended time of sending.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, sample: Sample) -> bool:
        """Whether the answer meets all limits; False for failures. An answer of one token has no TPOT."""
        if not sample.is_ok:
            return False
        measured = (
            (sample.ttft_s(from_send=False), self.ttft_s),
            (sample.tpot_s(), self.tpot_s),
            (sample.e2e_s(from_send=False), self.e2e_s),
        )
        return all(limit is None or value is None or value <= limit for value, limit in measured)

    def describe(self) -> str:
        limits = {"TTFT": self.ttft_s, "TPOT": self.tpot_s, "E2E": self.e2e_s}
        return ", ".join(f"{name} <= {1000 * limit:g} ms" for name, limit in limits.items() if limit is not None)

    def to_dict(self) -> Mapping[str, float | None]:
        """The limits in milliseconds by name; JSON-ready."""
        limits = {"ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s, "e2e_ms": self.e2e_s}
        return {name: None if limit is None else 1000 * limit for name, limit in limits.items()}


def parse_slo(option: str, text: str) -> Slo:
    """Parses ``"ttft=500ms,tpot=50ms"``.

    Raises:
        ConfigError: there is no metric, an unknown metric, or an invalid duration.
    """
    values = {name: duration_s(f"{option} {name}", value) for name, value in key_values(option, text, _METRICS).items()}
    if not values:
        raise ConfigError(
            f"{option} must have at least one limit; got {text!r}. Expected limits such as {option} "
            "ttft=500ms,tpot=50ms."
        )
    return Slo(values.get("ttft"), values.get("tpot"), values.get("e2e"))
