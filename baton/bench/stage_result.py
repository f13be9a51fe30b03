"""Figures of a finished stage: latencies, throughput, goodput, failures and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.bench.latency import Summary
from baton.bench.runner import StageRun
from baton.bench.sample import UNFINISHED, UNSENT, Sample, Slo

_BUSY_CPU_SHARE = 0.8
_LATE_LOOP_MS = 10.0


@dataclass(frozen=True, slots=True)
class Window:
    """The time window of throughput, in seconds since the load began.

    Attributes:
        is_steady: True for a window from the end of the warm-up to the end of the load. In an open loop it starts one
            typical answer later, when the server has filled. False if the stage was too short for that; then the window
            covers the whole measurement, up to the last answer.
    """

    start_s: float
    end_s: float
    is_steady: bool

    @property
    def seconds(self) -> float:
        return max(self.end_s - self.start_s, 1e-9)

    def holds(self, moment_s: float | None) -> bool:
        return moment_s is not None and self.start_s <= moment_s <= self.end_s


@dataclass(frozen=True, slots=True)
class StageResult:
    """The figures of a stage.

    Attributes:
        latencies: summaries over the answered measured requests by name: ``ttft_ms``, ``tpot_ms``, ``itl_ms``,
            ``e2e_ms``. In an open loop TTFT and E2E count from the intended time of sending.
        latencies_from_send: TTFT and E2E from the actual time of sending.
        send_delay: delay of sending after the intended time.
        num_measured: requests after the warm-up, including failures.
        failures: number of measured requests by kind of failure.
        failure_messages: an example of each kind.
        requests_per_s, output_tokens_per_s, input_tokens_per_s: rates in the window.
        offered_per_s: due measured requests per second, from the first one to the last one.
        attainment: share of the measured requests that met the SLO; ``None`` without an SLO.
        goodput_per_s: requests that met the SLO, per second of the window.
        mean_input, mean_output: mean tokens of prompts and answers.
        cached_share: share of the prompt tokens found in a prefix cache.
        notes: caveats on the figures.
    """

    run: StageRun
    window: Window
    latencies: dict[str, Summary]
    latencies_from_send: dict[str, Summary]
    send_delay: Summary
    num_measured: int
    failures: dict[str, int]
    failure_messages: dict[str, str]
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    offered_per_s: float
    attainment: float | None
    goodput_per_s: float | None
    mean_input: float
    mean_output: float
    cached_share: float
    notes: list[str]

    @property
    def label(self) -> str:
        return self.run.stage.label

    @property
    def answered(self) -> list[Sample]:
        """The answered requests that count, in the order in which they were due."""
        measured = [sample for sample in self.run.samples if not sample.is_warmup and sample.is_ok]
        return sorted(measured, key=lambda sample: sample.intended_s)

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    def to_dict(self, *, with_samples: bool) -> dict[str, Any]:
        """JSON-ready."""
        values: dict[str, Any] = {
            "label": self.label,
            "load": asdict(self.run.stage),
            "is_interrupted": self.run.is_interrupted,
            "window_s": {"start": self.window.start_s, "end": self.window.end_s, "is_steady": self.window.is_steady},
            "num_measured": self.num_measured,
            "num_warmup": sum(sample.is_warmup for sample in self.run.samples),
            "num_failed": self.num_failed,
            "num_clipped": self.run.num_clipped,
            "failures": self.failures,
            "failure_messages": self.failure_messages,
            "latencies": {name: asdict(summary) for name, summary in self.latencies.items()},
            "latencies_from_send": {name: asdict(summary) for name, summary in self.latencies_from_send.items()},
            "send_delay_ms": asdict(self.send_delay),
            "throughput": {
                "requests_per_s": self.requests_per_s,
                "offered_per_s": self.offered_per_s,
                "output_tokens_per_s": self.output_tokens_per_s,
                "input_tokens_per_s": self.input_tokens_per_s,
            },
            "goodput": {"attainment": self.attainment, "requests_per_s": self.goodput_per_s},
            "tokens": {
                "mean_input": self.mean_input,
                "mean_output": self.mean_output,
                "cached_share": self.cached_share,
            },
            "client": asdict(self.run.client),
            "notes": self.notes,
        }
        if with_samples:
            values["samples"] = [sample.to_dict() for sample in self.run.samples]
        return values


def evaluate(run: StageRun, slo: Slo | None = None) -> StageResult:
    """Computes the figures of a stage, finished or interrupted."""
    measured = [sample for sample in run.samples if not sample.is_warmup and not _is_cut_off(run, sample)]
    answered = [sample for sample in measured if sample.is_ok]
    window = _window(run, answered)
    failures = Counter(sample.error for sample in measured if sample.error is not None)
    num_good = None if slo is None else sum(slo.is_met(sample) for sample in measured)
    prompt_tokens = sum(sample.input_tokens or 0 for sample in answered)
    return StageResult(
        run=run,
        window=window,
        latencies={
            "ttft_ms": _summary(answered, lambda sample: sample.ttft_s(from_send=False)),
            "tpot_ms": _summary(answered, Sample.tpot_s),
            "itl_ms": Summary.of_seconds((gap for sample in answered for gap in sample.gaps_s()), len(answered)),
            "e2e_ms": _summary(answered, lambda sample: sample.e2e_s(from_send=False)),
        },
        latencies_from_send={
            "ttft_ms": _summary(answered, lambda sample: sample.ttft_s(from_send=True)),
            "e2e_ms": _summary(answered, lambda sample: sample.e2e_s(from_send=True)),
        },
        send_delay=_summary(measured, Sample.send_delay_s),
        num_measured=len(measured),
        failures=dict(failures.most_common()),
        failure_messages={sample.error: sample.error_message for sample in reversed(measured) if sample.error},
        requests_per_s=_rate(run.samples, window, lambda sample: sample.is_ok),
        output_tokens_per_s=sum(_tokens_in(sample, window) for sample in run.samples) / window.seconds,
        input_tokens_per_s=_prompt_tokens_in(run.samples, window) / window.seconds,
        offered_per_s=_offered_per_s(run),
        attainment=None if num_good is None or not measured else num_good / len(measured),
        goodput_per_s=None if slo is None else _rate(run.samples, window, slo.is_met),
        mean_input=prompt_tokens / len(answered) if answered else 0.0,
        mean_output=sum(sample.output_tokens for sample in answered) / len(answered) if answered else 0.0,
        cached_share=sum(sample.cached_tokens for sample in answered) / prompt_tokens if prompt_tokens else 0.0,
        notes=_notes(run, answered, window),
    )


def _summary(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> Summary:
    return Summary.of_seconds(value(sample) for sample in samples)


def _is_cut_off(run: StageRun, sample: Sample) -> bool:
    """Whether the answer is missing because the user interrupted the run."""
    return run.is_interrupted and sample.error in (UNFINISHED, UNSENT)


def _rate(samples: Sequence[Sample], window: Window, counts: Callable[[Sample], bool]) -> float:
    """Requests/s that end in the window, including those of the warm-up."""
    return sum(window.holds(sample.finished_s) and counts(sample) for sample in samples) / window.seconds


def _offered_per_s(run: StageRun) -> float:
    """Offered rate: the number of gaps between arrivals, divided by the time from the first to the last one."""
    num_gaps = sum(not sample.is_warmup for sample in run.samples) - 1
    seconds = run.load_end_s - run.load_start_s
    return num_gaps / seconds if num_gaps > 0 and seconds > 0 else 0.0


def _window(run: StageRun, answered: Sequence[Sample]) -> Window:
    """The steady window if it is long compared with an answer, else the whole stage: edge effects would dominate."""
    typical_s = Summary.of_seconds(sample.e2e_s(from_send=False) for sample in answered).p50 / 1000.0
    start_s = run.load_start_s
    if run.stage.is_open and run.samples:
        # An open loop begins with an empty server, so at first fewer requests end than arrive.
        start_s = max(start_s, run.samples[0].intended_s + typical_s)
    steady = Window(start_s, run.load_end_s, is_steady=True)
    num_held = sum(steady.holds(sample.finished_s) for sample in answered)
    if answered and steady.seconds >= 2 * typical_s and 2 * num_held >= len(answered):
        return steady
    last_s = max((sample.finished_s or 0.0 for sample in run.samples), default=run.load_end_s)
    return Window(run.load_start_s, max(last_s, run.load_end_s), is_steady=False)


def _tokens_in(sample: Sample, window: Window) -> float:
    """Output tokens of a request within the window, assuming chunks of equal size."""
    if not sample.chunk_times_s:
        return 0.0
    tokens = sample.output_tokens or len(sample.chunk_times_s)
    return tokens * sum(map(window.holds, sample.chunk_times_s)) / len(sample.chunk_times_s)


def _prompt_tokens_in(samples: Sequence[Sample], window: Window) -> int:
    """Prompt tokens of the requests whose first token came in the window."""
    return sum(
        sample.input_tokens or 0 for sample in samples if sample.chunk_times_s and window.holds(sample.chunk_times_s[0])
    )


def _notes(run: StageRun, answered: Sequence[Sample], window: Window) -> list[str]:
    notes: list[str] = []
    if run.is_interrupted:
        num_cut_off = sum(_is_cut_off(run, sample) for sample in run.samples)
        left_out = f", without {num_cut_off} requests in flight" if num_cut_off else ""
        notes.append(f"interrupted: these are the results so far{left_out}")
    if not run.is_interrupted and all(sample.is_warmup for sample in run.samples):
        notes.append(
            "no request was measured: all of them were warm-up, or none was due in time. Give a longer --duration, a "
            "higher --rate or less warm-up"
        )
    if answered and not window.is_steady:
        notes.append("too short for a steady state: throughput covers the whole stage, including its end")
    if by_chunks := sum(sample.counts_are_chunks for sample in answered):
        notes.append(f"{by_chunks} answers had no usage: each chunk counts as one token, also for TPOT")
    if other := sum(sample.output_tokens != sample.wanted_output for sample in answered):
        notes.append(f"{other} answers have a different length than requested")
    prompts = [sample for sample in answered if sample.wanted_input is not None and sample.input_tokens is not None]
    if other := sum(sample.input_tokens != sample.wanted_input for sample in prompts):
        farthest = max(abs((sample.input_tokens or 0) - (sample.wanted_input or 0)) for sample in prompts)
        notes.append(f"{other} prompts have a different length than intended, by up to {farthest} tokens")
    if run.num_clipped:
        notes.append(f"{run.num_clipped} of {len(run.samples)} requests were shortened to the length limits")
    if run.client.cpu_share > _BUSY_CPU_SHARE:
        notes.append(f"the client was busy ({run.client.cpu_share:.0%} of a core): latencies may be the client's")
    elif run.client.loop_lag_p99_ms > _LATE_LOOP_MS:
        notes.append(
            f"the client's machine was busy (timers up to {run.client.loop_lag_p99_ms:.0f} ms late): latencies may be "
            "the client's"
        )
    return notes
