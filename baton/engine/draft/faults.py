"""Errors while drafting that are not the draft's own fault."""

from __future__ import annotations

from baton.engine.device.device_errors import is_device_lost, is_out_of_memory


class DraftFaults:
    """Tells errors that the engine must see from those for which a draft is switched off.

    The engine ends when the device is lost. When memory lacks in a step, it frees some and tries the step again, so a
    draft is at fault only if it lacks memory twice in a row.
    """

    def __init__(self) -> None:
        self._lacked_memory: set[str] = set()

    def is_for_engine(self, name: str, error: Exception, *, in_step: bool) -> bool:
        """Whether an error of the draft ``name`` must be raised.

        Args:
            in_step: the engine tries the step again in which the error occurred.
        """
        if is_device_lost(error):
            return True
        if not in_step or not is_out_of_memory(error) or name in self._lacked_memory:
            return False
        self._lacked_memory.add(name)
        return True

    def went_well(self, name: str) -> None:
        """Ends a row of failures. Call it when the draft's part of a step has worked."""
        self._lacked_memory.discard(name)
