"""What `make chaos` draws and judges, without a cluster."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from baton.core.roles import DECODE, PREFILL
from tests.chaos.injector import Strike
from tests.chaos.pauses import Pause, pauses, undisturbed_waits_s
from tests.chaos.plan import DEFAULT_GROUPS, GROUPS, draw
from tests.chaos.report import checks, document
from tests.chaos.resources import Growth
from tests.chaos.run import Findings
from tests.chaos.streams import Stream
from tests.chaos.workload import Question

QUESTION = Question((1, 2), 0.0, 0, False, (7, 8, 9))


def stream(token_ids: list[int], **values: Any) -> Stream:
    return Stream(QUESTION, {}, sent_s=10.0, token_ids=token_ids, arrivals_s=[11.0, 12.0, 20.0], **values)


def strike(at_s: float, *, silences: bool = True, recovered_s: float = 30.0) -> Strike:
    return Strike(PREFILL, "prefill-1", "kills", "kill", silences, at_s, {}, recovered_s)


def failed(findings: Findings) -> list[str]:
    return [check.name for check in checks(findings) if not check.holds]


def test_a_seed_repeats_faults_and_requests() -> None:
    for pool in (PREFILL, DECODE):
        first, again, other = (list(islice(draw(seed, pool, list(DEFAULT_GROUPS)), 40)) for seed in (1, 1, 2))
        assert first == again != other
        assert {planned.fault.kind for planned in first} == {"kills", "freezes", "link faults", "scalings"}
        assert {"host faults", "control faults"} <= {
            planned.fault.kind for planned in islice(draw(1, pool, list(GROUPS)), 40)
        }
    assert QUESTION.body(random.Random(1)) == QUESTION.body(random.Random(1)) != QUESTION.body(random.Random(2))


@pytest.mark.parametrize(
    ("values", "is_wrong"),
    [
        ({"token_ids": [7, 8, 9]}, False),
        ({"token_ids": [7, 8]}, True),
        ({"token_ids": [7, 8, 8, 9]}, True),
        ({"token_ids": [7, 5, 9]}, True),
        ({"token_ids": [7, 8], "is_cancelled": True}, False),
        ({"token_ids": [8], "is_cancelled": True}, True),
        ({"token_ids": [7], "error": "worker_lost"}, False),
    ],
    ids=["same", "lost", "twice", "changed", "cancelled", "cancelled and lost", "failed"],
)
def test_lost_duplicated_and_changed_tokens_are_wrong(values: dict[str, Any], is_wrong: bool) -> None:
    assert stream(**values).is_wrong == is_wrong


def test_a_pause_counts_from_the_fault_on() -> None:
    moved = stream([7, 8, 9], moves_s=[16.0])
    only = strike(13.0)
    assert pauses([moved, stream([7, 8, 9])], [only]) == [Pause(7.0, only, 3.0, True)]
    assert pauses([moved], [only, strike(14.0, silences=False)]) == [Pause(7.0, None, None, False)]
    assert pauses([moved], [strike(9.0)]) == [Pause(8.0, None, None, True)]
    assert undisturbed_waits_s([moved, stream([7, 8, 9])], [strike(9.0), strike(11.0)]) == [8.0]
    assert undisturbed_waits_s([stream([7, 8, 9])], [strike(11.0)]) == []


def test_every_failure_is_judged() -> None:
    assert failed(Findings(streams=[stream([7, 8, 9])], returns_s=[0.5])) == []
    found = Findings(
        streams=[stream([7, 8]), stream([7], error="worker_lost"), stream([7, 8, 9], moves_s=[19.0])],
        strikes=[strike(12.5)],
        returns_s=[1.5],
        problems=["decode is not complete"],
        excess={"processes": 1, "objects in shared memory": -1},
    )
    assert failed(found) == [
        "streams with lost, duplicated or changed tokens",
        "failed or hung requests",
        "problems of the cluster",
        "pause of a moved stream, p95 (s)",
        "detection of a lost or silent worker, p95 (s)",
        "blocks in use after cancels, max (s)",
        "processes, files, shared memory more than before",
    ]
    assert len(document(found)["bad_streams"]) == 2


def test_growing_memory_is_judged_in_long_runs() -> None:
    growths = [Growth("ray::WorkerActor", 100.0, 106.0), Growth("raylet raylet", 100.0, 200.0)]
    assert failed(Findings(growths=growths, watched_s=480.0)) == ["growth of the memory of ray::WorkerActor (%)"]
    assert failed(Findings(growths=growths, watched_s=120.0)) == []
    assert document(Findings(growths=growths, watched_s=120.0))["growths"][0]["percent"] == pytest.approx(6)
