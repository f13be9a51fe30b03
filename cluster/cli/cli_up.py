"""``baton up`` and ``baton down``: runs a cluster in this process or in a detached one, and stops it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from baton.client.local_cluster import ANOTHER_RUN_FOLDER, RunState, clear_state, no_cluster, read_state, run_folder
from baton.core.accelerators import MEMORY_BYTES
from baton.core.errors import BatonError, ConfigError, DeadlineError, StorageError
from baton.core.files import writing
from baton.engine.models.default_model import default_model_folder, is_default_model
from baton.engine.models.model_config import check_context_length, read_model_config, stated_context_length
from baton.engine.models.model_source import is_hub_id, resolve_model
from baton.process.descriptors import raise_descriptor_limit
from baton.process.listening import listen
from baton.process.stop_signals import StopEvent, StopSignals
from cluster.cli.cli_common import ERROR_PREFIX
from cluster.cli.cli_model import pull
from cluster.cli.cli_reload import Reloader
from cluster.cli.cli_upgrade import Upgrader
from cluster.cli.run_record import ConfigSource, RunRecord
from cluster.config.config import BatonConfig
from cluster.gateway.tls import create_tls_context

LOG_FILE_VARIABLE = "BATON_RUN_LOG"
"""Set for the process of a detached cluster: the file with its output."""
_PROFILES = "cluster.simulation.profile"
_POLL_S = 0.2
_LOG_LINES_SHOWN = 15

Report = Callable[[str], None]


class RunningCluster(Protocol):
    """The interface of a started ``cluster.controller.launch.Cluster``."""

    @property
    def endpoint(self) -> str: ...

    def wait(self, stop: StopEvent, on_pass: Callable[[], None] = lambda: None) -> None:
        """Returns when ``stop`` is set; raises BatonError when the cluster died. Calls ``on_pass`` now and then."""
        ...

    def reload(self, config: BatonConfig) -> None:
        """Takes over API keys and SLO classes. Raises BatonError, with no effect, if they cannot be used."""
        ...

    def begin_upgrade(self, config: BatonConfig) -> None:
        """Begins to replace workers for another configuration. Raises BatonError, with no effect, if it cannot."""
        ...

    def upgrade_ended(self) -> bool:
        """Whether the upgrade that was begun has ended. Raises BatonError if it has failed."""
        ...

    def not_ready(self) -> list[str] | None:
        """What is not ready at last; ``None`` while there is hope. Raises BatonError if that cannot be found out."""
        ...

    def stop(self) -> None: ...


Starter = Callable[[BatonConfig, Report], RunningCluster]


class StartError(BatonError):
    """A detached cluster ended before it was ready; the message includes the last lines of its log."""

    code = "start_failed"


def start_cluster(config: BatonConfig, report: Report) -> RunningCluster:
    """Starts a real cluster. A local one first does the steps that may fail or take long, where the user sees them.

    Raises:
        BatonError: the port is taken, the model is unavailable, max_model_len or the draft does not fit it, or a part
            of the cluster cannot start.
    """
    _check_fit(config, report)
    if config.ray.is_local:
        _check_profile(config)
        listen(config.router.host, config.router.port).close()
        folder = pull(config.model, report)
        if config.simulation.profile is None:  # simulated workers load neither model nor draft
            _check_context_length(config, folder)
            _check_draft(config, folder, report)
    from cluster.controller.launch import Cluster  # importing ray takes a second, and most commands do not need it

    return Cluster.start(config, report)


def _check_fit(config: BatonConfig, report: Report) -> None:
    """Raises :class:`ConfigError` if the workers cannot fit on their GPUs, where their memory is known."""
    pools = (config.prefill, config.decode)
    known = any(pool.resources.gpus and pool.resources.accelerator_type in MEMORY_BYTES for pool in pools)
    if not known or config.simulation.profile is not None:
        return
    from cluster.cli.cli_check import fit_rows

    rows = [row for row in fit_rows(config) if row.memory]
    for row in rows:
        report(f"{row.pool}: {row.hardware} per worker, room for {row.kv_tokens:,} tokens of KV")
    problems = [row.explain() for row in rows if row.problem]
    if problems:
        raise ConfigError("\n".join([*problems, "`baton check` shows the sizes."]))


def check_configuration(config: BatonConfig) -> None:
    """Checks what can be checked without fetching, converting or starting anything, even while a cluster runs.

    Raises:
        BatonError: the model, profile or draft does not exist, max_model_len, the draft or the method does not fit, or
            a certificate cannot be used.
    """
    if config.router.tls is not None:
        create_tls_context(config.router.tls)
    if config.ray.address is not None:
        return
    if config.security.ca is not None:
        config.security.credentials(b"")
    _check_profile(config)
    if not is_default_model(config.model) and not config.model.endswith(".gguf"):
        resolve_model(config.model)
    if config.simulation.profile is not None:
        return
    # The model may not be there yet; it is checked again when it is.
    folder = default_model_folder() if is_default_model(config.model) else Path(config.model).expanduser()
    _check_context_length(config, folder)
    draft = config.speculation.draft
    takes_time = is_default_model(draft) or draft.endswith(".gguf") or is_hub_id(draft)
    if Path(draft).is_dir() or not takes_time:
        _compare_draft(config, folder)


def _check_profile(config: BatonConfig) -> None:
    if config.simulation.profile is not None:
        importlib.import_module(_PROFILES).load_profile(config.simulation.profile)


def _check_context_length(config: BatonConfig, model_folder: Path) -> None:
    check_context_length(config.max_model_len, stated_context_length(read_model_config(model_folder)))


def _check_draft(config: BatonConfig, model_folder: Path, report: Report) -> None:
    draft = config.speculation.draft
    if is_hub_id(draft) and not Path(draft).is_dir():
        report(f"looking up the draft {draft} on the hub")
    _compare_draft(config, model_folder)


def _compare_draft(config: BatonConfig, model_folder: Path) -> None:
    from baton.engine.draft.preflight import check_draft

    speculation = config.speculation
    key = f"speculation.{'method' if speculation.shadow is None else 'shadow'}"
    check_draft(speculation.draft, speculation.wanted_draft, config.model, model_folder, key)


def run_in_foreground(
    config: BatonConfig,
    report: Report,
    on_ready: Callable[[str], None],
    source: ConfigSource,
    starter: Starter = start_cluster,
) -> None:
    """Starts a cluster, serves until SIGINT or SIGTERM, and shuts the cluster down. SIGHUP reloads the configuration.

    Args:
        on_ready: called with the endpoint once requests can be sent.
        source: where ``config`` was read from.

    Raises:
        ConfigError: a cluster of this user already runs.
        StorageError: the record of the cluster cannot be written, so that no other command would find it.
        BatonError: the cluster did not start, or died.
    """
    refuse_second_cluster()
    raise_descriptor_limit()  # Ray's processes inherit it
    state = RunState.of_this_process(config.to_dict(), os.environ.get(LOG_FILE_VARIABLE))
    record = RunRecord(state, config, source, report)
    cluster: RunningCluster | None = None
    with StopSignals(on_hangup="reload") as signals:
        try:
            record.write()
            cluster = starter(config, record.report)
            signals.end_of_start()
            record.write(endpoint=cluster.endpoint)
            on_ready(cluster.endpoint)
            reloader, upgrader = Reloader(record, cluster.reload), Upgrader(record, cluster)

            def on_pass() -> None:
                if signals.take_reload() and not upgrader.begin():
                    reloader.reload()
                upgrader.follow()

            cluster.wait(signals.stop, on_pass)
        except KeyboardInterrupt:
            if cluster is None:
                report("stopped before it was ready")
        finally:
            if cluster is not None:
                report("shutting down")
                cluster.stop()
            clear_state(state)


def run_detached(arguments: Sequence[str], report: Report) -> RunState:
    """Runs ``baton up`` with these arguments in its own session and waits until the cluster is ready.

    Raises:
        ConfigError: a cluster of this user already runs.
        StorageError: its log cannot be written.
        StartError: the new process ended before it was ready.
    """
    refuse_second_cluster()
    log_file = run_folder() / "baton.log"
    with writing(log_file, ANOTHER_RUN_FOLDER):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        if log_file.exists():
            log_file.replace(log_file.with_suffix(".previous.log"))
        output = log_file.open("wb")
    with output:
        process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, LOG_FILE_VARIABLE: str(log_file)},
            start_new_session=True,
        )
    try:
        return _wait_until_ready(process, log_file, report)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise


def _wait_until_ready(process: subprocess.Popen[bytes], log_file: Path, report: Report) -> RunState:
    # Error lines and what follows are held back, because StartError shows them if the process ends.
    last_words: list[str] = []
    with log_file.open(encoding="utf-8", errors="replace") as log:
        has_ended = False
        while not has_ended:
            has_ended = process.poll() is not None  # before reading, so that no output is missed
            news = log.read()
            state = read_state()
            is_its_own = state is not None and state.pid == process.pid and state.is_running()
            ready = state if state is not None and is_its_own and state.endpoint is not None else None
            if ready is not None:
                news += log.read()  # completes the output from before it was ready
            for line in filter(None, map(str.strip, news.splitlines())):
                if ready is not None and line == ready.endpoint:
                    break  # the caller prints the endpoint itself
                if last_words or line.startswith(ERROR_PREFIX):
                    last_words.append(line)
                else:
                    report(line)
            if ready is not None:
                for line in last_words:
                    report(line)
                return ready
            if not has_ended:
                time.sleep(_POLL_S)
    lines = last_words[-_LOG_LINES_SHOWN:] or _last_lines(log_file, _LOG_LINES_SHOWN)
    tail = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
    try:
        with writing(log_file.parent, ANOTHER_RUN_FOLDER), log_file.open("a") as log:
            log.write("\n")
    except StorageError as error:
        tail += f"\nThe log may lack the reason: {error.message}"
    raise StartError(
        f"The cluster exited with status {process.returncode} before it was ready. "
        f"The last lines of {log_file}:\n{tail}"
    )


def refuse_second_cluster() -> None:
    """Raises ConfigError while a recorded cluster runs."""
    state = read_state()
    if state is not None and state.is_running():
        where = f"at {state.endpoint}" if state.endpoint else "and is still starting"
        raise ConfigError(f"A cluster already runs {where} (process {state.pid}). Stop it with `baton down` first.")


def end_survivors(config: BatonConfig, report: Report) -> int:
    """Ends the router and the workers that a killed `baton up` has left; returns how many processes there were."""
    from cluster.controller.launch import end_without_controller

    return end_without_controller(config, report)


def stop_cluster(
    timeout_s: float, report: Report, end_left: Callable[[BatonConfig, Report], int] = end_survivors
) -> str:
    """Stops the recorded cluster, waits for its end, and returns the outcome as a sentence.

    Args:
        end_left: ends what a cluster has left whose process has ended.

    Raises:
        DeadlineError: the cluster did not end in time; it continues to shut down.
        ConfigError: the process, or its record, belongs to another user.
    """
    state = read_state()
    if state is None:
        return no_cluster()
    if not state.is_running():
        num_left = 0
        if state.outlives_its_process:
            try:
                num_left = end_left(BatonConfig.from_dict(state.config), report)
            except BatonError as error:  # Ray has ended, or another `baton up` has taken the cluster over
                report(error.message)
        clear_state(state)
        if num_left:
            return f"Ended {num_left} processes of the cluster at {state.endpoint}, whose `baton up` had been killed."
        return f"No cluster runs on this machine: the recorded one (process {state.pid}) has already ended."
    report(f"asking process {state.pid} to shut down")
    try:
        process = psutil.Process(state.pid)
        process.terminate()
        process.resume()  # someone may have suspended it (Ctrl-Z)
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as error:
        raise ConfigError(f"Process {state.pid} belongs to another user; only that user can stop it.") from error
    give_up_at = time.monotonic() + timeout_s
    while state.is_running():  # a zombie counts as ended
        if time.monotonic() >= give_up_at:
            raise DeadlineError(
                f"The cluster (process {state.pid}) has not ended after {timeout_s:g} s but is still shutting down. "
                f"Wait longer with --timeout. If Ray hangs, `kill -9 {state.pid}` ends it, and `baton down` the rest."
            )
        time.sleep(_POLL_S)
    clear_state(state)
    return f"Stopped the cluster at {state.endpoint or '(still starting)'}."


def _last_lines(file: Path, count: int) -> list[str]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        return list(deque((line.rstrip() for line in stream if line.strip()), maxlen=count))
