"""Waiting times of a pool, modelled as a queue with several servers and general service times (M/G/c).

Allen and Cunneen's approximation: the probability of waiting is Erlang's, and the wait is exponential, stretched by the
variation of service times. Non-preemptive priorities follow Cobham's formula: higher classes slow a class twice, since
they are served first and keep arriving while it waits. Sources: A. O. Allen, *Probability, Statistics, and Queueing
Theory* (1990), chapter 5; A. Cobham, *Priority Assignment in Waiting Line Problems* (1954).
"""

from __future__ import annotations

from math import erf, exp, sqrt


def erlang_c(servers: int, offered: float) -> float:
    """Probability that all servers are busy.

    Args:
        offered: arrival rate times mean service time, in servers. The result is 1 if it is at least ``servers``.
    """
    if offered <= 0:
        return 0.0
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang's loss formula, by its recursion over servers
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    busy = offered / servers
    return blocked / (1.0 - busy + busy * blocked)


def wait_exceeds(
    limit_s: float, servers: int, offered: float, ahead: float, upto: float, service_s: float, variation: float
) -> float:
    """Probability that a request waits longer than ``limit_s``.

    Args:
        offered: offered load of all classes, in servers.
        ahead: the part of ``offered`` by classes that are served first.
        upto: ``ahead`` plus the load of the request's own class.
        service_s: mean service time.
        variation: squared coefficient of variation of service times.
    """
    if limit_s < 0 or upto >= servers:
        return 1.0
    busy = erlang_c(servers, offered)
    if busy == 0.0 or service_s <= 0:
        return 0.0
    pace = (1.0 - ahead / servers) * (1.0 - upto / servers) * servers * 2.0 / (1.0 + variation)
    return busy * exp(-pace * limit_s / service_s)


def poisson_at_most(limit: float, mean: float) -> float:
    """Probability that a Poisson variable is at most ``limit``, by the smooth normal approximation."""
    if mean <= 0:
        return 1.0
    return 0.5 * (1.0 + erf((limit + 0.5 - mean) / sqrt(2.0 * mean)))
