"""``baton upgrade``: a running cluster gets another configuration, worker by worker.

The command leaves the new configuration beside the record of ``baton up`` and sends SIGHUP to that process, which tells
the controller and writes the progress into the record. So the configuration takes no other way than that of a reload.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from baton.client.local_cluster import (
    RunState,
    UpgradeRequest,
    read_state,
    take_upgrade_request,
    write_upgrade_request,
)
from baton.core.errors import BatonError, ConfigError
from cluster.cli.cli_reload import hang_up, refuse_stopped, running_state
from cluster.cli.run_record import ConfigSource, RunRecord
from cluster.config.config import BatonConfig
from cluster.config.key_changes import UpgradePlan, plan_upgrade

_POLL_S = 0.1
_UPGRADED = "Upgraded: all workers run with the new configuration."
_UPGRADED_PARTLY = (
    "Upgraded: no worker has the old configuration, and new ones start with the new one. Not all are ready, as `baton "
    "status` shows:"
)


class Upgradable(Protocol):
    """The part of :class:`cluster.controller.launch.Cluster` that upgrades need."""

    def begin_upgrade(self, config: BatonConfig) -> None: ...

    def upgrade_ended(self) -> bool: ...

    def not_ready(self) -> list[str] | None: ...


class Upgrader:
    """Upgrades the cluster that this process runs, as ``baton upgrade`` asks."""

    def __init__(self, record: RunRecord, cluster: Upgradable) -> None:
        self._record = record
        self._cluster = cluster
        self._request: UpgradeRequest | None = None
        self._is_settling = False  # whether the last upgrade has ended, and workers may still be starting

    def begin(self) -> bool:
        """Begins the upgrade that was asked for. Returns False if none was."""
        request = take_upgrade_request()
        if request is None:
            return False
        if self._request is not None or self._is_settling:  # the other command has not seen the running upgrade yet
            self._record.report("a second upgrade was refused, because one runs already")
            return True
        self._record.begin_upgrade()
        try:
            new = BatonConfig.from_dict(request.config)
            plan_upgrade(self._record.config, new)
            self._cluster.begin_upgrade(new)
            self._request = request
        except BatonError as error:
            self._end(f"The upgrade was refused, and nothing has changed. {error.message}", is_applied=False)
        return True

    def follow(self) -> None:
        """Records the outcome when all workers are ready, or should be. Must be called several times per second."""
        if self._request is not None:
            self._follow_upgrade(self._request)
        if self._is_settling:
            self._follow_settling()

    def _follow_upgrade(self, request: UpgradeRequest) -> None:
        try:
            if not self._cluster.upgrade_ended():
                return
        except BatonError as error:
            self._end(error.message, is_applied=False)
            return
        self._request, self._is_settling = None, True
        self._record.config = BatonConfig.from_dict(request.config)
        self._record.source = self._record.source.changed_by(ConfigSource(request.file, request.assignments))
        self._record.change()  # a reload while workers start must begin with the new configuration

    def _follow_settling(self) -> None:
        try:
            left = self._cluster.not_ready()
        except BatonError as error:
            left = [f"unknown, since {error.message}"]
        if left is None:
            return
        self._is_settling = False
        self._end(f"{_UPGRADED_PARTLY} {'; '.join(left)}" if left else _UPGRADED, is_applied=True)

    def _end(self, text: str, *, is_applied: bool) -> None:
        self._request = None
        self._record.end_upgrade(text, is_applied=is_applied)


def plan_for_running(source: ConfigSource) -> tuple[BatonConfig, UpgradePlan]:
    """The new configuration of the recorded cluster, and what an upgrade to it would do.

    Args:
        source: without a file, its overrides change the running configuration.

    Raises:
        ConfigError: no cluster runs here, it is being upgraded, the source has wrong keys or values, or the cluster
            cannot take over a change; the message names all such keys.
    """
    running = _state_between_upgrades().config
    new = source.read(running)
    return new, plan_upgrade(BatonConfig.from_dict(running), new)


def _state_between_upgrades() -> RunState:
    """The recorded cluster; raises :class:`ConfigError` while it is being upgraded."""
    found = running_state()
    if found.upgrade is not None and found.upgrade.outcome is None:
        raise ConfigError(
            f"The cluster (process {found.pid}) is being upgraded already. Wait for the end of that upgrade, which "
            "`baton status` shows."
        )
    return found


def upgrade_cluster(request: UpgradeRequest, show: Callable[[str], None]) -> str:
    """Makes the recorded cluster take over a configuration, and waits for the end; returns the outcome as a sentence.

    Args:
        show: called with lines of progress.

    Raises:
        ConfigError: no cluster runs here, it belongs to another user, it is being upgraded already, or the upgrade was
            refused or has failed.
        DeadlineError: the process of ``baton up`` is stopped. If it was stopped later than asked, it upgrades the
            cluster when it is continued.
    """
    before = _state_between_upgrades()
    refuse_stopped(before)
    write_upgrade_request(request)
    hang_up(before)
    return _follow(before, show)


def _follow(before: RunState, show: Callable[[str], None]) -> str:
    number, num_shown = (before.upgrade.number if before.upgrade else 0) + 1, 0
    while True:
        now = read_state()
        if now is None or not before.is_same_run(now) or not before.is_running():
            raise ConfigError(f"The cluster (process {before.pid}) has ended during the upgrade. See its log.")
        refuse_stopped(before)
        upgrade = now.upgrade
        if upgrade is not None and upgrade.number >= number:
            for line in upgrade.lines[num_shown:]:
                show(line)
            num_shown = len(upgrade.lines)
            if upgrade.outcome is not None:
                if not upgrade.outcome.is_applied:
                    raise ConfigError(upgrade.outcome.text)
                return upgrade.outcome.text
        time.sleep(_POLL_S)
