"""How many drafts to verify: as many as raise the expected tokens per millisecond of the whole batch.

Every draft slot of every sequence has a survival probability: that it and all drafts before it are accepted. Slots are
taken in the order of survival over the whole batch while the next one earns more than it costs. (vLLM's adaptive
verification has the same form; the costs here are measured while serving.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_worker.speculation.step_cost import StepCost

# Speculation must promise this much more than plain decoding before it begins, and half of it to go on.
_MIN_GAIN = 0.03


def survival(confidences: Sequence[float]) -> list[float]:
    """Running product: the chance that a slot and all before it are accepted."""
    product, out = 1.0, []
    for confidence in confidences:
        product *= confidence
        out.append(product)
    return out


class DraftLengthPolicy:
    """Chooses draft lengths step by step.

    Args:
        cost: of a step, by its tokens.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._was_drafting = False

    def choose(self, confidences: Mapping[str, Sequence[float]], num_sequences: int, num_tokens: int) -> dict[str, int]:
        """Draft length by request id; requests that get none are left out.

        Args:
            confidences: of each request's drafts, in order.
            num_sequences: sequences of the step that yield a token anyway.
            num_tokens: tokens of the step without any draft.
        """
        slots = sorted(
            ((chance, -depth, request_id) for request_id, chances in confidences.items()
             for depth, chance in enumerate(survival(chances))),
            reverse=True,
        )  # fmt: skip
        plain = num_sequences / self._cost.ms(num_tokens)
        best_rate, best_count, expected = plain, 0, float(num_sequences)
        for count, (chance, _, _) in enumerate(slots, start=1):
            expected += chance
            rate = expected / self._cost.ms(num_tokens + count)
            if rate > best_rate:
                best_rate, best_count = rate, count
        gain = best_rate / plain - 1
        self._was_drafting = gain > (_MIN_GAIN / 2 if self._was_drafting else _MIN_GAIN)
        if not self._was_drafting:
            return {}
        lengths: dict[str, int] = {}
        for _, _, request_id in slots[:best_count]:
            lengths[request_id] = lengths.get(request_id, 0) + 1
        return lengths
