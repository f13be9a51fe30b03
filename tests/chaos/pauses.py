"""How long streams paused because of faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.injector import Strike
from tests.chaos.streams import Stream


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without a token in which the router moved a stream to other workers.

    Attributes:
        seconds: from the first fault in this time on, or all of it if the fault was before.
        strike: the fault, where it is the only one in this time.
        detection_s: from this fault to the move.
        is_silence: whether the faults of that time silenced their workers.
    """

    seconds: float
    strike: Strike | None
    detection_s: float | None
    is_silence: bool


def pauses(streams: Sequence[Stream], strikes: Sequence[Strike]) -> list[Pause]:
    """All pauses of streams that were moved, each from the first fault in it to the next token."""
    found = []
    for stream in streams:
        for begun_s, ended_s in stream.gaps_s:
            moves_s = [move_s for move_s in stream.moves_s if begun_s < move_s <= ended_s]
            if moves_s:
                near = [each for each in strikes if each.at_s <= moves_s[-1] and each.recovered_s >= begun_s]
                within = [each for each in near if each.at_s > begun_s]
                only = within[0] if len(within) == 1 == len(moves_s) else None
                found.append(
                    Pause(
                        ended_s - min((each.at_s for each in within), default=begun_s),
                        only,
                        moves_s[0] - only.at_s if only is not None else None,
                        all(each.silences for each in near),
                    )
                )
    return found


def undisturbed_waits_s(streams: Sequence[Stream], strikes: Sequence[Strike]) -> list[float]:
    """The longest time without a token of each stream that was sent among the faults, and finished without being moved:
    what it costs, under this load, to wait for a prompt and to compute it."""
    if not strikes:
        return []
    begun_s, ended_s = strikes[0].at_s, strikes[-1].at_s
    return [
        max(after_s - before_s for before_s, after_s in stream.gaps_s)
        for stream in streams
        if begun_s <= stream.sent_s <= ended_s and stream.arrivals_s
        if not (stream.moves_s or stream.error or stream.is_cancelled)
    ]
