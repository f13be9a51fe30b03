"""Judges what a run has found, and shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from baton.bench.latency import percentile
from tests.chaos.injector import Strike
from tests.chaos.run import Findings
from tests.chaos.streams import Stream

_DETECTION_S = 5.0
"""Limit of the time after which a lost or silent worker's streams continue elsewhere."""
_RETURN_S = 1.0
"""Limit of the time for which blocks of cancelled requests stay in use."""


@dataclass(frozen=True)
class Check:
    """A figure and its limit."""

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


def checks(findings: Findings) -> list[Check]:
    """Everything that must hold."""
    streams = findings.streams
    answered = [stream for stream in streams if not stream.error and not stream.is_cancelled]
    moved = [stream for stream in answered if stream.num_failed_attempts]
    undisturbed = [stream.pause_s for stream in answered if not stream.num_failed_attempts]
    found = [
        Check("streams with lost, duplicated or changed tokens", sum(stream.is_wrong for stream in streams), 0),
        Check("failed or hung requests", sum(bool(stream.error) for stream in streams), 0),
        Check("problems of the cluster", len(findings.problems), 0),
    ]
    if moved:
        detection_s = percentile([stream.lost_s / stream.num_failed_attempts for stream in moved], 95)
        found.append(Check("time lost with a failed attempt, p95 (s)", detection_s, _DETECTION_S))
        limit_s = _DETECTION_S + percentile(undisturbed, 95)
        pause_s = percentile([stream.pause_s for stream in moved], 95)
        found.append(Check("pause of a moved stream, p95 (s)", pause_s, limit_s))
    if findings.returns_s:
        found.append(Check("blocks in use after cancels, max (s)", max(findings.returns_s), _RETURN_S))
    return found


def faults_table(findings: Findings) -> Table:
    """A row for each fault and pool."""
    table = Table("pool", "fault", "times", "stages of the worker's requests", "recovery p50", "max", box=None)
    groups: dict[tuple[str, str], list[Strike]] = {}
    for strike in findings.strikes:
        groups.setdefault((strike.fault, strike.pool), []).append(strike)
    for (fault, pool), strikes in sorted(groups.items()):
        stages = Counter[str]()
        for strike in strikes:
            stages.update(strike.stages)
        recoveries = [strike.recovered_s - strike.at_s for strike in strikes]
        table.add_row(
            pool,
            fault,
            str(len(strikes)),
            ", ".join(f"{count} {name}" for name, count in stages.items()),
            *(f"{percentile(recoveries, share):.1f} s" for share in (50, 100)),
        )
    return table


def verdict_table(findings: Findings) -> Table:
    table = Table("", "found", "limit", "", box=None)
    for check in checks(findings):
        table.add_row(check.name, f"{check.value:.3g}", f"{check.limit:.3g}", "ok" if check.holds else "FAILED")
    return table


def counts(findings: Findings) -> dict[str, int]:
    """How much has happened."""
    streams = findings.streams
    return {
        **Counter(strike.kind for strike in findings.strikes),
        "requests": len(streams),
        "greedy": sum(not stream.question.temperature for stream in streams),
        "moved": sum(bool(stream.num_failed_attempts) for stream in streams),
        "cancelled": sum(stream.is_cancelled for stream in streams),
    }


def document(findings: Findings) -> dict[str, Any]:
    """All of it as JSON: of streams only those that are worth a look."""
    bad = [stream for stream in findings.streams if stream.error or stream.is_wrong]
    return {
        "counts": counts(findings),
        "checks": [{**asdict(check), "holds": check.holds} for check in checks(findings)],
        "problems": findings.problems,
        "strikes": [asdict(strike) for strike in findings.strikes],
        "pauses_s": [_pause(stream) for stream in findings.streams if stream.num_failed_attempts],
        "returns_s": findings.returns_s,
        "bad_streams": [asdict(stream) for stream in bad],
    }


def _pause(stream: Stream) -> Sequence[float]:
    return stream.pause_s, stream.lost_s, stream.num_failed_attempts
