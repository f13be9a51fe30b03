"""The record and the configuration of the cluster that this process runs, which reloads and upgrades change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from baton.client.local_cluster import ReloadOutcome, RunState, UpgradeProgress, write_state
from baton.core.errors import StorageError
from cluster.config.config import BatonConfig, load_config
from cluster.config.config_reading import parse_override


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where a configuration is read from. Not recorded, since assignments may have API keys.

    Attributes:
        file: a YAML file; ``None``: the defaults.
        assignments: the overrides, as ``--set`` takes them.
    """

    file: str | None
    assignments: tuple[str, ...] = ()

    def read(self, base: Mapping[str, Any] | None = None) -> BatonConfig:
        """Reads the configuration. Raises :class:`ConfigError`.

        Args:
            base: plain values in place of the defaults if there is no file.
        """
        file = None if self.file is None else Path(self.file)
        return load_config(file, dict(map(parse_override, self.assignments)), base)

    def changed_by(self, other: ConfigSource) -> ConfigSource:
        """The source with the overrides of the other one; the other one itself if it has a file."""
        return other if other.file is not None else replace(self, assignments=(*self.assignments, *other.assignments))


class RunRecord:
    """What other commands can read about this run.

    When the disk is full, the cluster goes on and other commands read what was written last.

    Args:
        report: shows a line of progress to the user.

    Attributes:
        state: the record; :meth:`change` writes it.
        config: the configuration that the cluster has.
        source: where the configuration comes from, for reloads.
    """

    def __init__(
        self,
        state: RunState,
        config: BatonConfig,
        source: ConfigSource,
        report: Callable[[str], None],
    ) -> None:
        self.state = state
        self.config = config
        self.source = source
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
