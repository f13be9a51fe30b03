"""Judges what a run has found, and shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from baton.bench.latency import percentile
from tests.chaos.injector import Strike
from tests.chaos.pauses import pauses, undisturbed_waits_s
from tests.chaos.run import Findings

_DETECTION_S = 5.0
"""Limit of the time after which a lost or silent worker's streams continue elsewhere."""
_GROWTH_PERCENT = 5.0
_LEAST_WATCHED_S = 450.0
"""In less time, the memory of a process changes by as much without growing."""
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
    found = [
        Check("streams with lost, duplicated or changed tokens", sum(stream.is_wrong for stream in streams), 0),
        Check("failed or hung requests", sum(bool(stream.error) for stream in streams), 0),
        Check("problems of the cluster", len(findings.problems), 0),
    ]
    found_pauses = [pause for pause in pauses(streams, findings.strikes) if pause.is_silence]
    if found_pauses:
        waits_s = undisturbed_waits_s(streams, findings.strikes)
        limit_s = _DETECTION_S + (percentile(waits_s, 95) if waits_s else 0.0)
        found.append(
            Check("pause of a moved stream, p95 (s)", percentile([p.seconds for p in found_pauses], 95), limit_s)
        )
    if detections_s := [pause.detection_s for pause in found_pauses if pause.detection_s is not None]:
        found.append(Check("detection of a lost or silent worker, p95 (s)", percentile(detections_s, 95), _DETECTION_S))
    if findings.returns_s:
        found.append(Check("blocks in use after cancels, max (s)", max(findings.returns_s), _RETURN_S))
    found += [
        Check(f"growth of the memory of {growth.name} (%)", growth.percent, _GROWTH_PERCENT)
        for growth in findings.growths
        if growth.is_own and findings.watched_s >= _LEAST_WATCHED_S
    ]
    if findings.excess:
        found.append(Check("processes, files, shared memory more than before", sum(leaks(findings).values()), 0))
    return found


def leaks(findings: Findings) -> dict[str, int]:
    """What there is more of than before, by name."""
    return {name: count for name, count in findings.excess.items() if count > 0}


def faults_table(findings: Findings) -> Table:
    """A row for each fault and pool."""
    columns = ("pool", "fault", "times", "stages of the worker's requests", "recovery p50", "max", "pause p50", "max")
    table = Table(*columns, box=None)
    groups: dict[tuple[str, str], list[Strike]] = {}
    for strike in findings.strikes:
        groups.setdefault((strike.fault, strike.pool), []).append(strike)
    found = pauses(findings.streams, findings.strikes)
    for (fault, pool), strikes in sorted(groups.items()):
        stages = Counter[str]()
        for strike in strikes:
            stages.update(strike.stages)
        recoveries_s = [strike.recovered_s - strike.at_s for strike in strikes]
        pauses_s = [pause.seconds for pause in found if pause.strike in strikes]
        table.add_row(
            pool,
            fault,
            str(len(strikes)),
            ", ".join(f"{count} {name}" for name, count in stages.items()),
            *_shares(recoveries_s),
            *_shares(pauses_s),
        )
    return table


def _shares(values_s: Sequence[float]) -> tuple[str, str]:
    """Median and maximum."""
    return (f"{percentile(values_s, 50):.1f} s", f"{max(values_s):.1f} s") if values_s else ("", "")


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
        "with a schema": sum(stream.question.has_schema for stream in streams),
        "moved": sum(bool(stream.moves_s) for stream in streams),
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
        "pauses": [asdict(pause) for pause in pauses(findings.streams, findings.strikes)],
        "undisturbed_waits_s": undisturbed_waits_s(findings.streams, findings.strikes),
        "returns_s": findings.returns_s,
        "growths": [{**asdict(growth), "percent": growth.percent} for growth in findings.growths],
        "excess": findings.excess,
        "bad_streams": [asdict(stream) for stream in bad],
    }
