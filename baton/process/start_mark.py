"""Tells a process from a later one that has its id, and whether it is stopped."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def start_mark(pid: int) -> str | None:
    """A text that only this process has; ``None`` if it has ended.

    It consists of the machine's start, the namespace in which ids count, and the clock ticks since the start. So no
    process of another machine or container has it. Unlike the time of day at which the process started, it stays the
    same when somebody sets the clock.
    """
    try:
        fields = _fields(pid)
        boot, namespace = _BOOT_ID.read_text(encoding="ascii").strip(), _PID_NAMESPACE.readlink()
    except OSError:
        return None
    state, start_ticks = fields[0], fields[19]
    return None if state in ("X", "Z") else f"{boot} {namespace} {start_ticks}"


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process, until it is continued."""
    try:
        return _fields(pid)[0] in ("T", "t")
    except OSError:
        return False


def _fields(pid: int) -> list[str]:
    """The fields of the process's ``stat`` from its state on; see proc_pid_stat(5). Raises ``OSError``."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
