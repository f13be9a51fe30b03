"""What an output consists of, for answers that are not messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.gateway.formats.base import CallBroken, CallStart, Event, Text
from cluster.gateway.openai.responses import ChoiceOutput
from cluster.gateway.output_processor import OutputDelta


def events_of(output: OutputDelta | ChoiceOutput) -> Sequence[Event]:
    """The events of an output, which is text alone if it was not parsed."""
    return output.events or ((Text(output.text),) if output.text else ())


def settled(events: Iterable[Event]) -> list[Event]:
    """The events of a whole output, with calls that broke as the text that they were."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, CallBroken):
            while not isinstance(found.pop(), CallStart):
                pass
            event = Text(event.source)
        found.append(event)
    return found
