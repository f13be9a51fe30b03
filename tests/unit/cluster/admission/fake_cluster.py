"""A prefill worker, a decode worker and a router's state in a few lines, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from baton.core.request import FinishReason, SamplingParams
from baton.core.roles import DECODE
from baton.core.slo import BUILTIN_CLASSES, SloClass
from baton.core.timeline import Event, Timeline
from cluster.admission.admission import Admission
from cluster.admission.admission_config import AdmissionConfig
from cluster.admission.admission_metrics import AdmissionMetrics
from cluster.requests.generation import GenerationRequest
from cluster.requests.request_record import RequestRecord
from cluster.routing.routing_contracts import Preference, RouteDecision

PROMPT_MS = 100.0
TOKEN_MS, TOKEN_MS_PER_SEQUENCE = 10.0, 2.0
OUTPUT_TOKENS = 20


@dataclass(eq=False)
class FakePlacement:
    record: RequestRecord
    num_releases: int = 0
    on_release: Callable[[FakePlacement], None] = lambda placement: None

    def release(self) -> None:
        self.num_releases += 1
        if self.num_releases == 1:
            self.on_release(self)


@dataclass
class FakeCluster:
    """Computes one prompt at a time and decodes all sequences together. Predictions are exact times ``optimism``."""

    loop: asyncio.AbstractEventLoop
    has_workers: bool = True
    optimism: float = 1.0
    prompts: list[FakePlacement] = field(default_factory=list)
    decoding: list[FakePlacement] = field(default_factory=list)
    booked: list[RequestRecord] = field(default_factory=list)
    num_forecasts: int = 0
    on_first_token: Callable[[RequestRecord], None] = lambda record: None
    on_end: Callable[[RequestRecord], None] = lambda record: None
    _free_s: float = 0.0

    def forecast(self, record: RequestRecord, preferred: Preference | None = None) -> RouteDecision | None:
        self.num_forecasts += 1
        if not self.has_workers:
            return None
        now_s = self.loop.time()
        wait_ms = max(0.0, self._free_s - now_s) * 1e3 / self.optimism
        elapsed_ms = (now_s - record.timeline.events[Event.RECEIVED]) * 1e3
        num_sequences = len(self.prompts) + len(self.decoding)
        return RouteDecision(
            "prefill-0",
            "decode-0",
            cached_tokens=0,
            ttft_ms=elapsed_ms + wait_ms + PROMPT_MS,
            tpot_ms=TOKEN_MS + TOKEN_MS_PER_SEQUENCE * num_sequences,
            idle_ttft_ms=PROMPT_MS,
            idle_tpot_ms=TOKEN_MS,
            wait_ms=wait_ms,
        )

    def workers_changed(self) -> asyncio.Event:
        return asyncio.Event()

    def missing_pools(self) -> list[str]:
        return [] if self.has_workers else [DECODE]

    def book(self, record: RequestRecord, decision: RouteDecision) -> FakePlacement:
        placement = FakePlacement(record, on_release=self._released)
        self.booked.append(record)
        self.prompts.append(placement)
        self._free_s = max(self._free_s, self.loop.time()) + PROMPT_MS / 1e3
        self.loop.call_at(self._free_s, self._computed, placement)
        return placement

    def fall_behind(self, seconds: float) -> None:
        """Makes later prompts wait ``seconds`` longer."""
        self._free_s = max(self._free_s, self.loop.time()) + seconds

    def _computed(self, placement: FakePlacement) -> None:
        if placement.num_releases:
            return
        self.prompts.remove(placement)
        self.decoding.append(placement)
        record = placement.record
        record.token_ids.append(1)
        record.timeline.record(Event.FIRST_TOKEN, self.loop.time())
        self.on_first_token(record)
        token_ms = TOKEN_MS + TOKEN_MS_PER_SEQUENCE * (len(self.decoding) - 1)
        self.loop.call_later(token_ms * OUTPUT_TOKENS / 1e3, self._finished, placement)

    def _finished(self, placement: FakePlacement) -> None:
        if placement.num_releases:
            return
        record = placement.record
        record.token_ids.extend([1] * OUTPUT_TOKENS)
        record.finish_reason = FinishReason.LENGTH
        record.timeline.record(Event.FINISHED, self.loop.time())
        placement.release()

    def _released(self, placement: FakePlacement) -> None:
        for held in (self.prompts, self.decoding):
            if placement in held:
                held.remove(placement)
        self.on_end(placement.record)


@dataclass
class Scene:
    """Admission in front of the fake cluster."""

    loop: asyncio.AbstractEventLoop
    config: AdmissionConfig = field(default_factory=AdmissionConfig)
    classes: tuple[SloClass, ...] = BUILTIN_CLASSES
    worker_wait_s: float = 5.0

    def __post_init__(self) -> None:
        self.cluster = FakeCluster(self.loop)
        self.registry = CollectorRegistry()
        self.metrics = AdmissionMetrics(self.registry, self.classes)
        self.admission: Admission[FakePlacement] = Admission(
            self.cluster,
            self.config,
            self.metrics,
            self.classes,
            worker_wait_s=self.worker_wait_s,
            clock=self.loop.time,
        )
        self.cluster.on_first_token = self.admission.first_token
        self.cluster.on_end = self.admission.ended
        self._count = 0

    def record(self, slo: SloClass, *, max_tokens: int = OUTPUT_TOKENS, timeout_s: float = 600.0) -> RequestRecord:
        """The record of a request that arrives now."""
        self._count += 1
        timeline = Timeline(f"r{self._count}", clock=self.loop.time)
        timeline.record(Event.RECEIVED)
        params = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest(f"r{self._count}", (1, 2, 3), params, timeline, slo=slo)
        record = RequestRecord(request, timeout_s, self.loop.time)
        record.attempt = 1
        return record

    def ask(self, slo: SloClass) -> tuple[RequestRecord, asyncio.Task[FakePlacement]]:
        record = self.record(slo)
        return record, self.loop.create_task(self.admission.admit(record))

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)
