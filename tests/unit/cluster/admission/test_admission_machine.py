"""Admission under random events: every request ends, books at most one place, and the queue keeps its order."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.core.errors import NoWorkerError, OverloadedError
from baton.core.slo import SloClass
from cluster.admission.admission_config import AdmissionConfig
from cluster.requests.request_record import RequestRecord
from cluster.simulation.virtual_loop import VirtualEventLoop
from tests.unit.cluster.admission.fake_cluster import PROMPT_MS, FakePlacement, Scene

URGENT = SloClass("urgent", 0.5, 0.03, percentile=95.0, priority=2, queue_deadline_s=0.0)
HIGH = SloClass("high", 1.0, 0.05, percentile=95.0, priority=2, queue_deadline_s=4.0)
USUAL = SloClass("usual", 2.0, 0.1, percentile=95.0, priority=1, queue_deadline_s=10.0)
LOW = SloClass("low", 5.0, 0.5, percentile=90.0, priority=0, queue_deadline_s=60.0)
CLASSES = (URGENT, HIGH, USUAL, LOW)
MAX_QUEUED = 12


class Crowd(RuleBasedStateMachine):
    @initialize(fair_share=st.sampled_from([0.0, 0.05, 0.25]))
    def open(self, fair_share: float) -> None:
        self.loop = VirtualEventLoop()
        config = AdmissionConfig(max_queued=MAX_QUEUED, fair_share=fair_share, gather_ms=0.0)
        self.scene = Scene(self.loop, config, CLASSES)
        self.asked: dict[str, tuple[RequestRecord, asyncio.Task[FakePlacement]]] = {}
        self.arrival: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.without_workers: set[str] = set()
        self.fair = fair_share > 0
        self._run(0.0)

    def _run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    @rule(slo=st.sampled_from(CLASSES), count=st.integers(1, 8))
    def arrive(self, slo: SloClass, count: int) -> None:
        cluster = self.scene.cluster
        was_idle = not (cluster.prompts or cluster.decoding or self.scene.admission.num_queued)
        for number in range(count):
            record, task = self.scene.ask(slo)
            self.asked[record.request.request_id] = record, task
            self.arrival[record.request.request_id] = len(self.arrival)
            if not cluster.has_workers:
                self.without_workers.add(record.request.request_id)
            self._run(0.0)
            self._run(0.0)
            if was_idle and number == 0 and cluster.has_workers:
                assert task.done(), "kept waiting by an idle cluster"
                assert task.exception() is None, "refused by an idle cluster"

    @rule(seconds=st.floats(0.001, 5.0))
    def pass_time(self, seconds: float) -> None:
        self._run(seconds)

    @rule(choice=st.randoms(use_true_random=False))
    def leave(self, choice: object) -> None:
        waiting = [name for name, (_, task) in self.asked.items() if not task.done()]
        if waiting:
            name = choice.choice(waiting)  # type: ignore[attr-defined]
            self.asked[name][1].cancel()
            self.cancelled.add(name)
            self._run(0.0)

    @rule()
    def lose_workers(self) -> None:
        self.scene.cluster.has_workers = False

    @precondition(lambda self: not self.scene.cluster.has_workers)
    @rule()
    def find_workers(self) -> None:
        self.scene.cluster.has_workers = True
        self.loop.call_soon(self.scene.admission.poke)
        self._run(0.0)

    @invariant()
    def the_queue_is_bounded(self) -> None:
        assert self.scene.admission.num_queued <= MAX_QUEUED

    @invariant()
    def no_request_is_admitted_twice(self) -> None:
        names = [record.request.request_id for record in self.scene.cluster.booked]
        assert len(names) == len(set(names))

    @invariant()
    def order_holds_inside_a_class(self) -> None:
        """Of those that waited for room (not for workers) and were in time, the first to come is the first to go."""
        went: dict[str, list[int]] = {}
        for record in self.scene.cluster.booked:
            request = record.request
            waited_ms = float(request.timeline.attributes.get("admission_wait_ms", 0.0))
            in_time = waited_ms + 1.5 * PROMPT_MS <= request.slo.ttft_s * 1e3  # with the slack of the configuration
            if request.request_id in self.waited_for_room and in_time:
                went.setdefault(request.slo.name, []).append(self.arrival[request.request_id])
        for numbers in went.values():
            assert numbers == sorted(numbers)

    @property
    def waited_for_room(self) -> set[str]:
        return {
            name
            for name, (record, _) in self.asked.items()
            if record.timeline.attributes.get("admission_wait_ms", 0.0)
            and name not in self.cancelled | self.without_workers
        }

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.scene.cluster.has_workers = True
        self._run(200.0)
        cluster = self.scene.cluster
        placed = {record.request.request_id for record in cluster.booked}
        for name, (_, task) in self.asked.items():
            assert task.done(), "waits forever"
            if task.cancelled():
                assert name in self.cancelled
            elif task.exception() is not None:
                assert isinstance(task.exception(), OverloadedError | NoWorkerError)
                assert name not in placed
            else:
                assert name in placed
        assert not cluster.prompts
        assert not cluster.decoding
        assert self.scene.admission.num_queued == 0
        status = self.scene.admission.status()
        assert all(entry["queued"] == 0 for entry in status.values())
        self.scene.admission.close()
        self.loop.close()


Crowd.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCrowd = Crowd.TestCase
