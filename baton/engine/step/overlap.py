"""Overlap of the host's work on one step with the device's work on the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from baton.core.drafts import ScheduledSequence
from baton.core.request import Request
from baton.engine.device.device_errors import is_device_lost
from baton.engine.sampling.verification import ChosenTokens
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.step.step import Step

logger = logging.getLogger(__name__)

AheadRule = Callable[[Sequence[ScheduledSequence]], bool]
"""Whether the step after this plan may be launched before the plan's tokens are known: no draft needs them."""

_UNREAD = 0  # placeholder for a token that is only on the device


def never(plan: Sequence[ScheduledSequence]) -> bool:
    """An :data:`AheadRule`: every step is scheduled when the tokens before it are known."""
    return False


def always(plan: Sequence[ScheduledSequence]) -> bool:
    """An :data:`AheadRule` for an engine without drafts."""
    return True


class Overlap:
    """Launches the next step while a step's tokens are on the device, so that the device never waits for the host.

        step k          forward ─ tokens ──────────────── read ─ emit
        step k + 1               schedule ─ forward              tokens ─ …

    The next step's work is wasted for requests that end with the unread tokens.

    Args:
        rule: called in each step.
        launch: queues the forward of a planned step that continues from the given tokens.
    """

    def __init__(
        self, scheduler: Scheduler, rule: AheadRule, launch: Callable[[Step, ChosenTokens | None], object]
    ) -> None:
        self._scheduler = scheduler
        self._launch = launch
        self._next: Step | None = None
        self.can_launch_ahead = rule

    def take(self) -> Step | None:
        """Returns the step that was launched ahead; ``None`` if there is none or all of its requests have ended."""
        step, self._next = self._next, None
        return step if step is not None and step.live_sequences() else None

    def launch_behind(self, chosen: ChosenTokens) -> None:
        """Launches the step after a booked one, from the booked step's tokens on the device.

        A step that cannot be launched is scheduled again after these tokens are read.

        Raises:
            Exception: the device is lost; its own error is raised.
        """
        requests = [s.request for s in chosen.sequences if not s.request.is_finished]
        for request in requests:
            request.output_token_ids.append(_UNREAD)
        step = Step([], time.monotonic())
        try:
            step.plan = self._scheduler.schedule_ahead({r.request_id for r in requests if _ends_with_next_token(r)})
            if step.plan:
                self._launch(step, chosen)
                self._next = step
        except Exception as error:
            if is_device_lost(error):
                raise
            request_ids = [sequence.request.request_id for sequence in step.plan]
            logger.warning(
                "a step could not be launched ahead of its tokens", exc_info=True, extra={"request_ids": request_ids}
            )
        finally:
            for request in requests:
                request.output_token_ids.pop()


def _ends_with_next_token(request: Request) -> bool:
    """Whether the request ends with the last token of ``output_token_ids``, whatever that token is."""
    return request.hands_off or len(request.output_token_ids) >= request.params.max_tokens
