"""Service-level objectives: which answers came in time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.bench.sample import Sample
from baton.core.errors import ConfigError
from baton.core.option_text import duration_s, key_values

_METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None sets none. An answer must keep all of them.

    In an open loop TTFT and E2E count from when the request was meant to be sent.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, sample: Sample) -> bool:
        """False for every failure. An answer of one token has no TPOT to miss."""
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
        """Milliseconds by name; JSON-ready."""
        limits = {"ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s, "e2e_ms": self.e2e_s}
        return {name: None if limit is None else 1000 * limit for name, limit in limits.items()}


def parse_slo(option: str, text: str) -> Slo:
    """``"ttft=500ms,tpot=50ms"``.

    Raises:
        ConfigError: no metric, an unknown one, or something that is no duration.
    """
    values = {name: duration_s(f"{option} {name}", value) for name, value in key_values(option, text, _METRICS).items()}
    if not values:
        raise ConfigError(
            f"{option} says what has to be kept; got {text!r}. Give at least one limit, such as {option} "
            "ttft=500ms,tpot=50ms."
        )
    return Slo(values.get("ttft"), values.get("tpot"), values.get("e2e"))
