"""What else ran on the machine meanwhile: figures of a machine that was busy with other things say little."""

from __future__ import annotations

import resource
import time

import psutil


class NeighbourWatch:
    """Begins where it is made. Processes of one's own have to be over when it is asked."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._machine_s, self._own_s = _machine_s(), _own_s()

    def cores(self) -> float:
        """Mean number of cores that other processes have used since then."""
        others_s = (_machine_s() - self._machine_s) - (_own_s() - self._own_s)
        return max(0.0, others_s / max(time.monotonic() - self._began_s, 1e-9))


def _machine_s() -> float:
    """Processor seconds of everybody; what a hypervisor gave to others is not among them."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _own_s() -> float:
    """Of this process and of those it has started that are over."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
