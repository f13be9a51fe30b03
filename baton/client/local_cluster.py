"""The record of the cluster that ``baton up`` runs on this machine, for other commands to find it.

Machines and containers may share the cache folder, as with a shared home or one volume for models. Each has a folder
of its own for its record, by its host name: no command acts on the record of another one.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from baton.core.errors import ConfigError
from baton.core.files import replace_file, writing
from baton.engine.models.model_cache import CACHE_VARIABLE, cache_dir
from baton.process.start_mark import is_stopped, start_mark

ENDPOINT_VARIABLE = "BATON_ENDPOINT"
RUN_VARIABLE = "BATON_RUN"
ANOTHER_RUN_FOLDER = f"Set {RUN_VARIABLE} or {CACHE_VARIABLE} to another folder."
"""The advice of an error about a file in :func:`run_folder`."""
_USUAL_ENDPOINT = "http://127.0.0.1:8000"
_PROBE_S = 1.0
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class ReloadOutcome:
    """What became of a reload of the configuration.

    Attributes:
        number: counts the reloads of one run, from 1.
        text: what was reloaded, or why it was refused.
    """

    number: int
    is_applied: bool
    text: str


@dataclass(frozen=True, slots=True)
class UpgradeProgress:
    """An upgrade of the configuration, or the last one.

    Attributes:
        number: counts the upgrades of one run, from 1.
        lines: its progress so far.
        outcome: how it ended; ``None`` while it runs.
    """

    number: int
    lines: tuple[str, ...] = ()
    outcome: ReloadOutcome | None = None


@dataclass(frozen=True, slots=True)
class RunState:
    """One run of ``baton up``.

    Attributes:
        pid: id of the process that supervises the cluster.
        start: mark of that process, which tells it from a later one with its pid.
        endpoint: base URL of the router; ``None`` while the cluster starts.
        config: its configuration, as plain values.
        log_file: log of a detached run; ``None`` in the foreground.
        reload: the last reload of the configuration, if any.
        upgrade: the last upgrade, if any.
    """

    pid: int
    start: str
    endpoint: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    log_file: str | None = None
    reload: ReloadOutcome | None = None
    upgrade: UpgradeProgress | None = None

    @classmethod
    def of_this_process(cls, config: Mapping[str, Any], log_file: str | None = None) -> RunState:
        pid = os.getpid()
        return cls(pid=pid, start=start_mark(pid) or "", config=dict(config), log_file=log_file)

    @property
    def certificate(self) -> str | None:
        """File with the router's TLS certificate; ``None`` without TLS."""
        tls = (self.config.get("router") or {}).get("tls")
        return None if tls is None else str(tls["certificate"])

    @property
    def outlives_its_process(self) -> bool:
        """Whether router and workers may serve for a while after the process was killed."""
        return (self.config.get("ray") or {}).get("address") is not None

    def is_running(self) -> bool:
        """Whether the recorded process is still running."""
        return start_mark(self.pid) == self.start

    def why_stopped(self) -> str:
        """A sentence if the process is stopped, so that it answers nothing, and what to do; else nothing."""
        if not (self.is_running() and is_stopped(self.pid)):
            return ""
        return (
            f"`baton up` (process {self.pid}) is stopped, so it replaces no controller, reloads nothing and upgrades "
            f"nothing. Continue it with `kill -CONT {self.pid}`."
        )

    def is_same_run(self, other: RunState | None) -> bool:
        """Whether the other record is of this run, at whatever time."""
        return other is not None and (other.pid, other.start) == (self.pid, self.start)


def run_folder() -> Path:
    """This machine's folder of the state file and of the logs of detached runs: ``$BATON_RUN``, else one in the cache.

    Machines that share the cache's folder have a folder each there, by their names.
    """
    if chosen := os.environ.get(RUN_VARIABLE):
        return Path(chosen).expanduser().absolute()
    return cache_dir() / "run" / (socket.gethostname() or "localhost")


def state_file() -> Path:
    return run_folder() / "cluster.json"


def read_state() -> RunState | None:
    """The last recorded run, running or not; ``None`` if there is none or the record is unreadable."""
    try:
        values = json.loads(state_file().read_text(encoding="utf-8"))
        return RunState(
            pid=int(values["pid"]),
            start=str(values["start"]),
            endpoint=values["endpoint"],
            config=dict(values["config"]),
            log_file=values["log_file"],
            reload=_outcome(values.get("reload")),
            upgrade=_upgrade(values.get("upgrade")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _outcome(values: dict[str, Any] | None) -> ReloadOutcome | None:
    return ReloadOutcome(**values) if values else None


def _upgrade(values: dict[str, Any] | None) -> UpgradeProgress | None:
    if not values:
        return None
    return UpgradeProgress(values["number"], tuple(values["lines"]), _outcome(values["outcome"]))


def write_state(state: RunState) -> None:
    """Replaces the record atomically. Raises :class:`StorageError` if it cannot be written."""
    _write(state_file(), asdict(state))


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """What ``baton upgrade`` asks of the process of ``baton up``.

    Attributes:
        config: the new configuration, as plain values.
        file: the file that it was read from, absolute; ``None``: it is the running configuration with overrides.
        assignments: the overrides, as ``--set`` takes them.
    """

    config: dict[str, Any]
    file: str | None
    assignments: tuple[str, ...]


def write_upgrade_request(request: UpgradeRequest) -> None:
    """Leaves a request for the process of ``baton up``, readable by this user only.

    Raises:
        StorageError: it cannot be written.
    """
    _write(_upgrade_file(), asdict(request))


def take_upgrade_request() -> UpgradeRequest | None:
    """Removes and returns the request that was left, if any."""
    try:
        values = json.loads(_upgrade_file().read_text(encoding="utf-8"))
        return UpgradeRequest(values["config"], values["file"], tuple(values["assignments"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        _upgrade_file().unlink(missing_ok=True)


def _upgrade_file() -> Path:
    return run_folder() / "upgrade.json"


def _write(file: Path, values: dict[str, Any]) -> None:
    with writing(file, ANOTHER_RUN_FOLDER):
        replace_file(file, json.dumps(values, indent=2))


def clear_state(run: RunState) -> None:
    """Removes the record if it is of this run."""
    if run.is_same_run(read_state()):
        state_file().unlink(missing_ok=True)


def find_endpoint(option: str | None = None) -> str:
    """The router's base URL: the option, else ``$BATON_ENDPOINT``, else the cluster that ``baton up`` recorded.

    The recorded cluster may have lost its `baton up` where it can outlive it.

    Raises:
        ConfigError: none of them is set, the recorded cluster is gone or still starts, or the URL is invalid.
    """
    chosen = option or os.environ.get(ENDPOINT_VARIABLE)
    if chosen:
        return _base_url(chosen)
    state = read_state()
    how = f"Start one with `baton up`, or name one with --endpoint or {ENDPOINT_VARIABLE}."
    if state is None or not (state.is_running() or (state.outlives_its_process and state.endpoint)):
        raise ConfigError(f"{no_cluster()} {how}")
    if state.endpoint is None:
        raise ConfigError(f"The cluster (process {state.pid}) is still starting. Try again when it is ready.")
    return state.endpoint


def no_cluster() -> str:
    """Sentences for a user whose cluster was not found; they name clusters that the user may have meant.

    Raises:
        ConfigError: the record exists, and only another user can read it.
    """
    try:
        state_file().open("rb").close()
    except PermissionError as error:
        raise ConfigError(
            f"The cluster's record {state_file()} belongs to another user. Run the command as that user, or name the "
            f"cluster with --endpoint or {ENDPOINT_VARIABLE} where the command takes one."
        ) from error
    except OSError:
        pass
    text = f"No cluster runs on this machine, as far as {state_file()} says."
    own = state_file().parent
    others = sorted(file.parent.name for file in own.parent.glob(f"*/{state_file().name}") if file.parent != own)
    if others:
        more = ", …" if len(others) > _MAX_NAMED else ""
        text += f" There are records of other machines: {', '.join(others[:_MAX_NAMED])}{more}."
    if _is_baton(_USUAL_ENDPOINT):
        text += (
            f" But {_USUAL_ENDPOINT} is a cluster, which another user or a service may run: name it with --endpoint, "
            f"or run the command as that user with that user's {CACHE_VARIABLE}."
        )
    return text


def _is_baton(endpoint: str) -> bool:
    try:
        answer = httpx.get(endpoint, headers={"Accept": "application/json"}, timeout=_PROBE_S, trust_env=False)
        return bool(answer.json()["name"] == "baton")
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


def _base_url(text: str) -> str:
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    expected = "Expected a URL such as http://127.0.0.1:8000."
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number or too large
    except ValueError as error:
        raise ConfigError(f"{text!r} is not an endpoint: {error}. {expected}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{text!r} is not an endpoint. {expected}")
    return url.rstrip("/").removesuffix("/v1")
