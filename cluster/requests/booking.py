"""What one attempt of a request has been counted as."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.latency.estimates import RouteForecast


@dataclass(slots=True, eq=False)
class Booking:
    """An attempt's entries in the ledger, and what was expected of it.

    Attributes:
        name: of its entries.
        prefill_id: empty: the decode worker computes the prompt.
        decodes: the decode worker has something to do: one token of a pair comes from the prefill worker alone.
        is_computed: the prompt is; its first token came.
    """

    name: str
    prefill_id: str
    decode_id: str
    forecast: RouteForecast
    decodes: bool = True
    is_computed: bool = False

    @property
    def computing_id(self) -> str:
        """The worker that computes the prompt."""
        return self.prefill_id or self.decode_id
