"""The section ``liveness`` of the configuration: how workers that hang are recognised."""

from __future__ import annotations

from baton.core.config_section import Duration, Section


class LivenessConfig(Section):
    """Health checks of workers, in the router and in the controller."""

    suspect_after: Duration = 3.0
    """A worker is suspected after this long without an answer, or with a step that takes ten times as long as expected
    and at least this long."""
    replace_after: Duration = 10.0
    """A worker that stays suspected for this long is replaced."""
    idle_check: Duration = 10.0
    """A worker that has made no step for this long computes one token, to show that it still can."""
