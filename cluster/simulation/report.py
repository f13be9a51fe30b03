"""Figures of a replay, by class and overall, as a document and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from baton.bench.latency import percentile
from baton.core.outcomes import FINISHED, REJECTED
from baton.core.slo import SloClass, judge
from baton.core.timeline import Timeline

FORMAT = "baton-simulate"
VERSION = 1
ALL = "all"
_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request of a replay.

    Attributes:
        arrived_s: arrival on the replay's clock.
        ttft_ms, tpot_ms: ``None`` if the request has none.
        heard_ms: time from the request's arrival to its end or refusal.
        is_met: whether it met the targets of its class; ``None`` if it does not count.
        is_local: a decode worker computed its prompt.
    """

    slo: str
    outcome: str
    arrived_s: float
    heard_ms: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    is_met: bool | None
    is_local: bool

    @classmethod
    def of(
        cls, timeline: Timeline, slo: SloClass, outcome: str, prompt_tokens: int, output_tokens: int, now_s: float
    ) -> ReplayedRequest:
        """Reads the figures from the timeline of an ended request."""
        verdict = judge(slo, timeline, outcome, output_tokens)
        attributes = timeline.attributes
        return cls(
            slo=slo.name,
            outcome=outcome,
            arrived_s=timeline.origin_s,
            heard_ms=(now_s - timeline.origin_s) * 1e3,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=int(attributes.get("cached_tokens", 0)),
            ttft_ms=timeline.ttft_ms,
            tpot_ms=timeline.tpot_ms(output_tokens),
            is_met=verdict.is_met,
            is_local="decode_worker" in attributes and not attributes.get("prefill_worker"),
        )


def summarize(requests: Sequence[ReplayedRequest], seconds: float) -> dict[str, Any]:
    """Figures of requests that arrived within ``seconds``; JSON-ready."""
    finished = [request for request in requests if request.outcome in FINISHED]
    counted = [request for request in requests if request.is_met is not None]
    met = sum(request.is_met is True for request in counted)
    rejected = [request for request in requests if request.outcome == REJECTED]
    prompt_tokens = sum(request.prompt_tokens for request in finished)
    return {
        "requests": len(requests),
        "finished": len(finished),
        "rejected": len(rejected),
        "failed": len(requests) - len(finished) - len(rejected),
        "attainment": _rounded(met / len(counted)) if counted else None,
        "goodput_per_s": _rounded(met / seconds) if seconds > 0 else None,
        "admitted_attainment": _rounded(met / len(finished)) if finished else None,
        "ttft_ms": percentiles([request.ttft_ms for request in finished]),
        "tpot_ms": percentiles([request.tpot_ms for request in finished]),
        "rejection_ms": percentiles([request.heard_ms for request in rejected]),
        "local_share": _rounded(sum(request.is_local for request in finished) / len(finished)) if finished else None,
        "cached_share": _rounded(sum(r.cached_tokens for r in finished) / prompt_tokens) if prompt_tokens else None,
        "input_tokens": prompt_tokens,
        "output_tokens": sum(request.output_tokens for request in finished),
    }


def by_class(requests: Sequence[ReplayedRequest], seconds: float) -> dict[str, dict[str, Any]]:
    """:func:`summarize` for each class, and for all of them together."""
    names = dict.fromkeys(request.slo for request in requests)
    groups = {name: [request for request in requests if request.slo == name] for name in names}
    return {name: summarize(group, seconds) for name, group in {**groups, ALL: list(requests)}.items()}


def table(document: Mapping[str, Any]) -> Table:
    """The table, with a row for each class."""
    shown = Table(title=_title(document))
    for column in ("class", "requests", "met", "goodput/s", "rejected", "failed", "TTFT p50/p90/p99 ms",
                   "TPOT p50/p90/p99 ms", "local", "cached"):  # fmt: skip
        shown.add_column(column, justify="left" if column == "class" else "right")
    for name, row in document["classes"].items():
        if name == ALL and len(document["classes"]) == 2:
            continue  # equal to the only class
        shown.add_row(
            name,
            str(row["requests"]),
            percent(row["attainment"]),
            _number(row["goodput_per_s"]),
            str(row["rejected"]),
            str(row["failed"]),
            _three(row["ttft_ms"]),
            _three(row["tpot_ms"]),
            percent(row["local_share"]),
            percent(row["cached_share"]),
        )
    return shown


def _title(document: Mapping[str, Any]) -> str:
    replay = document["replay"]
    hours = " and ".join(f"{hours:.2f} {pool}" for pool, hours in document["worker_hours"].items())
    return (
        f"{replay['requests_per_s']:.2f} requests/s on average; {replay['virtual_s']:.0f} s of virtual time, "
        f"replayed in {replay['wall_s']:.1f} s; worker-hours: {hours}"
    )


def percentiles(values: Sequence[float | None]) -> dict[str, float] | None:
    """Percentiles and mean of the present values, interpolated as in the load tool; ``None`` without values."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    found = {f"p{share}": percentile(present, share) for share in _PERCENTILES}
    found["mean"] = sum(present) / len(present)
    return {name: round(value, 3) for name, value in found.items()}


def _rounded(value: float) -> float:
    return round(value, 4)


def percent(share: float | None) -> str:
    """A share as a percentage for tables."""
    return "-" if share is None else f"{100 * share:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _three(percentiles: Mapping[str, float] | None) -> str:
    if percentiles is None:
        return "-"
    return " / ".join(f"{percentiles[name]:.4g}" for name in ("p50", "p90", "p99"))
