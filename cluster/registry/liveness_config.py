"""The section ``liveness`` of the configuration: how processes that hang are recognised."""

from __future__ import annotations

from baton.core.config_section import AnswerDuration, Duration, Section


class LivenessConfig(Section):
    """Health checks of workers in the router and the controller, of routers in the controller, and of the controller in
    `baton up`."""

    suspect_after: AnswerDuration = 3.0
    """A worker is suspected after this long without an answer, or with a step that takes ten times as long as expected
    and at least this long; a router or controller after this long without an answer."""
    replace_after: Duration = 10.0
    """A process that stays suspected for this long is replaced."""
    idle_check: Duration = 10.0
    """A worker that has made no step for this long computes one token, to show that it still can."""
