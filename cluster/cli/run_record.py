"""The record and the configuration of the cluster that this process runs, which reloads and upgrades change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from baton.client.local_cluster import ReloadOutcome, RunState, UpgradeProgress, write_state
from baton.core.errors import StorageError
from cluster.config.config import BatonConfig


class RunRecord:
    """What other commands can read about this run.

    When the disk is full, the cluster goes on and other commands read what was written last.

    Args:
        report: shows a line of progress to the user.

    Attributes:
        state: the record; :meth:`change` writes it.
        config: the configuration that the cluster has.
        read_again: reads the configuration as it was read for the start or the last upgrade.
    """

    def __init__(
        self,
        state: RunState,
        config: BatonConfig,
        read_again: Callable[[], BatonConfig],
        report: Callable[[str], None],
    ) -> None:
        self.state = state
        self.config = config
        self.read_again = read_again
        self._report = report
        self._is_failing = False

    def write(self, **changes: Any) -> None:
        """Changes and writes the record as :meth:`change` does. Raises :class:`StorageError` if that fails."""
        self.state = replace(self.state, config=self.config.to_dict(), **changes)
        write_state(self.state)

    def change(self, **changes: Any) -> None:
        """Changes attributes of the record, and writes it with the present configuration.

        The first of several failures in a row is reported.
        """
        try:
            self.write(**changes)
            self._is_failing = False
        except StorageError as error:
            if not self._is_failing:
                self._report(f"warning: other commands do not see this change: {error.message}")
            self._is_failing = True

    def begin_upgrade(self) -> None:
        """Records that an upgrade begins."""
        last = self.state.upgrade
        self.change(upgrade=UpgradeProgress(1 + (last.number if last else 0)))

    def end_upgrade(self, text: str, *, is_applied: bool) -> None:
        """Reports and records how the upgrade has ended."""
        self._report(text)
        if (upgrade := self.state.upgrade) is not None:
            outcome = ReloadOutcome(upgrade.number, is_applied=is_applied, text=text)
            self.change(upgrade=replace(upgrade, outcome=outcome))

    def report(self, line: str) -> None:
        """Shows a line of progress; during an upgrade, the record keeps it, too."""
        self._report(line)
        upgrade = self.state.upgrade
        if upgrade is not None and upgrade.outcome is None:
            self.change(upgrade=replace(upgrade, lines=(*upgrade.lines, line)))
