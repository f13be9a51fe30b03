"""What requests of this cluster are usually like: medians over the last ones."""

from __future__ import annotations

from cluster.latency.calibration import SlidingMedian

_DELIVERY_MS = 2.0
_OUTPUT_TOKENS = 64.0


class RequestHabits:
    """
    Attributes:
        delivery_ms: from the router to the prefill worker's queue, and of the first token back.
        claim_ms: between first token and decoding, beyond what the hand-off was predicted to take.
        output_tokens: of an answer.
        cached_tokens: of a prompt, where it was computed.
    """

    def __init__(self) -> None:
        self.delivery_ms = SlidingMedian(_DELIVERY_MS)
        self.claim_ms = SlidingMedian(0.0)
        self.output_tokens = SlidingMedian(_OUTPUT_TOKENS)
        self.cached_tokens = SlidingMedian(0.0)
