"""``baton reload`` and SIGHUP: a running cluster reads its API keys and SLO classes again.

The command sends SIGHUP to the process of ``baton up``, which owns the file, and finds the outcome in that process's
record. So the new keys take no other way than those of the start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from baton.client.local_cluster import ReloadOutcome, RunState, no_cluster, read_state
from baton.core.errors import BatonError, ConfigError, DeadlineError
from cluster.cli.run_record import RunRecord
from cluster.config.config import BatonConfig
from cluster.config.reloading import reloaded, restart_keys

_POLL_S = 0.05


class Reloader:
    """Reloads the configuration of the cluster that this process runs.

    Args:
        apply: passes a configuration on to the cluster.
    """

    def __init__(self, record: RunRecord, apply: Callable[[BatonConfig], None]) -> None:
        self._record = record
        self._apply = apply

    def reload(self) -> None:
        """Reads and applies the configuration, and records the outcome. A refused one changes nothing."""
        try:
            text, is_applied = self._reload(), True
        except BatonError as error:
            text, is_applied = f"The configuration was not reloaded, and nothing has changed. {error.message}", False
        self._record.report(text)
        last = self._record.state.reload
        number = 1 + (last.number if last else 0)
        self._record.change(reload=ReloadOutcome(number, is_applied=is_applied, text=text))

    def _reload(self) -> str:
        new = self._record.source.read()
        config = reloaded(self._record.config, new)
        self._apply(config)
        self._record.config = config
        num_keys, num_classes = len(config.router.api_keys), len(config.slo.classes)
        text = f"Reloaded: {num_keys or 'no'} API keys, {num_classes} SLO classes."
        keys = restart_keys(config, new)
        return f"{text} These changes need a restart: {', '.join(keys)}." if keys else text


def reload_cluster(timeout_s: float) -> str:
    """Makes the recorded cluster reload its configuration; returns the outcome as a sentence.

    Raises:
        ConfigError: no cluster runs here, it belongs to another user, or it refused the configuration.
        DeadlineError: there was no outcome in time, or the process of ``baton up`` is stopped.
    """
    state = running_state()
    refuse_stopped(state)
    hang_up(state)
    outcome = _wait_for_news(state, timeout_s)
    if not outcome.is_applied:
        raise ConfigError(outcome.text)
    return outcome.text


def running_state() -> RunState:
    """The record of the cluster that serves on this machine. Raises :class:`ConfigError` if there is none."""
    state = read_state()
    if state is None or not state.is_running():
        raise ConfigError(f"{no_cluster()} Start one with `baton up`.")
    if state.endpoint is None:
        raise ConfigError(f"The cluster (process {state.pid}) is still starting. Try again when it is ready.")
    return state


def refuse_stopped(state: RunState) -> None:
    """Raises :class:`DeadlineError` if the process of ``baton up`` is stopped."""
    if why := state.why_stopped():
        raise DeadlineError(why)


def hang_up(state: RunState) -> None:
    """Makes the process of ``baton up`` look for news. Raises :class:`ConfigError` if it is another user's."""
    try:
        os.kill(state.pid, signal.SIGHUP)
    except PermissionError as error:
        raise ConfigError(f"Process {state.pid} belongs to another user; only that user can change it.") from error


def _wait_for_news(before: RunState, timeout_s: float) -> ReloadOutcome:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        now = read_state()
        if now is not None and before.is_same_run(now) and now.reload is not None and now.reload != before.reload:
            return now.reload
        if not before.is_running():
            raise ConfigError(f"The cluster (process {before.pid}) has ended.")
        refuse_stopped(before)
        time.sleep(_POLL_S)
    raise DeadlineError(
        f"The cluster (process {before.pid}) has not reloaded its configuration after {timeout_s:g} s, or could not "
        "record it. See its log."
    )
