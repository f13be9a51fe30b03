"""Draws faults from a seed, so that a run can be repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.core.roles import DECODE, PREFILL
from tests.chaos.faults import CONTROL_FAULTS, FREEZES, HOST_FAULTS, KILLS, LINK_FAULTS, SCALINGS, Fault

DEFAULT_GROUPS: Mapping[str, Sequence[Fault]] = {
    "kills": KILLS,
    "freezes": FREEZES,
    "links": LINK_FAULTS,
    "scaling": SCALINGS,
}
GROUPS: Mapping[str, Sequence[Fault]] = {**DEFAULT_GROUPS, "hosts": HOST_FAULTS, "control": CONTROL_FAULTS}
_WEIGHTS = {"kills": 4, "freezes": 2, "links": 1, "scaling": 0.5, "hosts": 2, "control": 1}
"""In the proportion of the numbers of faults that a release must survive."""


class Stage(StrEnum):
    """What a worker does for some request; the value is the figure in its status that shows it."""

    QUEUED = "waiting"
    COMPUTING = "running"
    HANDOFF = "transfers"


STAGE_NAMES = {
    PREFILL: {Stage.QUEUED: "queued", Stage.COMPUTING: "prefill", Stage.HANDOFF: "hand-off"},
    DECODE: {Stage.QUEUED: "queued", Stage.COMPUTING: "decode", Stage.HANDOFF: "hand-off"},
}


@dataclass(frozen=True)
class Planned:
    """A fault that shall happen to a worker while it has a request at some stage."""

    fault: Fault
    stage: Stage


def draw(seed: int, pool: str, groups: Sequence[str]) -> Iterator[Planned]:
    """The faults of a pool, without an end.

    Args:
        groups: names in :data:`GROUPS`.
    """
    chance = random.Random(f"{seed} {pool}")
    weights = [_WEIGHTS[group] for group in groups]
    while True:
        [group] = chance.choices(groups, weights)
        yield Planned(chance.choice(GROUPS[group]), chance.choice(list(Stage)))
